"""The linear operators' calls, and models of one node whose function body runs."""

import math

import onnx
import onnx_ir
import onnxruntime
import torch

from leanfleet import ort_ops, spec
from leanfleet.export import function_bodies, reference
from support import ort_models
from support.kernels import TORCH_DTYPES

OPS = spec.all_specs()
NAN, INF = math.nan, math.inf


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def one_node_model(name, present, attrs=None, ranks=None, dtype="float32", opset=20, forms=None):
    """A checked model of one node with its body, all dimensions symbolic; present: names of optional inputs."""
    op, attrs = OPS[name], attrs or {}
    present = {t.name for t in op.inputs if not t.optional} | set(present)
    layout = attrs.get("layout", "bhnd")

    def info(t, like=None):
        shape = op.shape_of(like or t, op.given(present, attrs), (ranks or {}).get((like or t).name))
        names = [str(axis) for axis in shape.ordered(layout)]
        if spec.numbers_each(ort_models.type_name(t, dtype, present, forms)) > 1:
            names[-1] += " / 2"
        return t.name, ort_models.onnx_type(t, dtype, present, forms), names

    inputs = [info(t) for t in op.inputs if t.name in present]
    outputs = [info(t, t.like and op.input(t.like)) for t in op.active_outputs(attrs)]
    model = ort_models.make_model([ort_models.make_node(op, present, attrs)], inputs, outputs)
    model.opset_import[0].version = opset
    model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    onnx.checker.check_model(model, full_check=True)
    return model


def session_of(model, library=False, **options):
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    for name, value in options.items():
        setattr(settings, name, value)
    if library:
        ort_ops.register(settings)
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def fill(name, present, size, attrs, rank=None, seed=0, dtype="float32", offsets=None):
    """Inputs of a linear operator, by the shapes of ops.toml. Tokens of no request are NaN.

    size: B, H, Hkv, N, R, Dv; in place of H and Hkv perhaps Hq, Hk, Hv.
    """
    generator = torch.Generator().manual_seed(seed)
    op = OPS[name]
    present = {t.name for t in op.inputs if not t.optional} | set(present)
    batch, *heads, tokens, width, value_width = size
    dims = {"B": batch, "N": tokens, "R": width, "Dv": value_width}
    dims |= {"H": heads[0], "Hkv": heads[-1], "Hq": heads[0], "Hk": heads[1], "Hv": heads[-1]}
    dims |= {"D": dims["R"], "Q": dims["B"] if offsets is None else len(offsets) - 1}
    dims |= {"P": dims["Q"] + 3, "2": 2}
    layout = attrs.get("layout", "bhnd")
    inputs = {}
    for t in op.inputs:
        if t.name not in present:
            continue
        axes = op.shape_of(t, op.given(present, attrs), rank if t.name == "log_decay" else None).ordered(layout)
        x = torch.randn([a.size(dims) for a in axes], generator=generator)
        if t.name == "log_decay":
            x = -x.abs() / 4
            x[torch.rand(x.shape, generator=generator) < 0.1] = -INF
        elif t.name == "cu_seqlens":
            x = int32(*offsets)
        elif t.name == "state_index":
            x = (torch.randperm(dims["P"] + 1, generator=generator)[: dims["Q"]] - 1).int()
        elif t.name == "initial_count":
            x = torch.randint(1, 99, x.shape, generator=generator, dtype=torch.int32)
        elif t.name == "coefficients":
            x = torch.tensor([1.5, 0.4])
        elif t.name in ("query", "key", "initial_norm", "initial_key_sum", "beta"):
            x = x.abs()  # so that normalisers stay away from 0
        if offsets is not None and "N" in [a.symbol for a in axes]:
            outside = torch.ones(dims["N"], dtype=bool)
            outside[offsets[0] : offsets[-1]] = False
            x.movedim([a.symbol for a in axes].index("N"), 0)[outside] = NAN
        inputs[t.name] = x.to(TORCH_DTYPES[dtype]) if t.type == "T" else x
    if name == "NormalizedLinearAttentionGrad":
        forward = reference.normalized_linear_attention(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            inputs.get("coefficients"),
            **{n: v for n, v in attrs.items() if n != "grad_coefficients"},
        )
        inputs |= {"output": forward[0], "normalizer": forward[1]}
    return inputs


def coefficient_terms(inputs, attrs):
    """Norm over the tokens of the terms that the gradients of NormalizedLinearAttention's coefficients subtract: of da the value
    sums against the output's gradient and the count, of db the query against both parts of its own gradient."""
    q, k, v, output, g, grad = (
        inputs[n].double() if attrs.get("layout", "bhnd") == "bhnd" else inputs[n].double().transpose(1, 2)
        for n in ("query", "key", "value", "output", "normalizer", "grad_output")
    )
    if attrs.get("normalize_qk"):
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.float64, device=q.device)
    seen = seen.tril() if attrs.get("causal", 1) else seen
    w = grad / g.unsqueeze(-1)
    r = (output * w).sum(-1).abs()
    of_a = ((seen @ v) * w).sum(-1).abs() + r * seen.sum(-1)
    of_b = q.norm(dim=-1) * (((w @ v.mT * seen) @ k).norm(dim=-1) + r * (seen @ k).norm(dim=-1))
    return torch.stack([of_a.norm(), of_b.norm()]).norm().item()


# Hq, Hk, Hv of CausalLinearDecay: inverse grouping with and without queries of their own, both kinds of sharing at once.
SHARED_HEADS = ((1, 1, 8), (2, 2, 6), (4, 2, 8), (4, 1, 2), (6, 1, 6))
STATE = ["initial_state"]
SUMS = ["initial_state", "initial_key_sum", "initial_value_sum", "initial_count"]
# operator, optional inputs, attributes, rank of log_decay
LINEAR = {
    "decay plain": ("CausalLinearDecay", [], {}, None),
    "decay per head": ("CausalLinearDecay", ["log_decay"], dict(scale=0.3, return_state=1, algorithm="fleet"), 1),
    "decay per token": ("CausalLinearDecay", ["log_decay", *STATE], dict(return_state=1), 3),
    "decay bnhd": ("CausalLinearDecay", ["log_decay", *STATE], dict(return_state=1, layout="bnhd"), 3),
    "decay normalize": ("CausalLinearDecay", ["log_decay"], dict(normalize=1, eps=1e-2), 1),
    "decay norm carried": ("CausalLinearDecay", ["log_decay", *STATE, "initial_norm"], dict(normalize=1, return_state=1), 3),
    "decay pool": ("CausalLinearDecay", ["log_decay", *STATE, "state_index"], dict(return_state=1), 1),
    "decay beta": ("CausalLinearDecay", ["log_decay", *STATE, "beta"], dict(return_state=1, layout="bnhd"), 3),
    "decay per key": ("CausalLinearDecay", ["log_decay", *STATE], dict(return_state=1, layout="bnhd"), 4),
    "decay per key v first": ("CausalLinearDecay", ["log_decay", *STATE, "beta"], dict(return_state=1, state_v_first=1), 4),
    "decay per key normalize": (
        "CausalLinearDecay",
        ["log_decay", *STATE, "initial_norm"],
        dict(normalize=1, return_state=1, algorithm="causal_dot_product"),
        4,
    ),
    "decay v first": ("CausalLinearDecay", ["log_decay", *STATE], dict(return_state=1, state_v_first=1), 1),
    "decay v first pool": (
        "CausalLinearDecay",
        ["log_decay", *STATE, "initial_norm", "state_index"],
        dict(return_state=1, state_v_first=1, normalize=1),
        3,
    ),
    "decay v first plain": ("CausalLinearDecay", [], dict(return_state=1, state_v_first=1, normalize=1), None),
    "grad plain": ("CausalLinearDecayGrad", [], {}, None),
    "grad per head": ("CausalLinearDecayGrad", ["log_decay", *STATE], dict(scale=0.7, grad_decay=1), 1),
    "grad per token": ("CausalLinearDecayGrad", ["log_decay", *STATE, "grad_final_state"], dict(grad_decay=1, grad_state=1), 3),
    "grad bnhd": ("CausalLinearDecayGrad", ["log_decay", "grad_final_state"], dict(grad_decay=1, layout="bnhd"), 3),
    "grad of state": ("CausalLinearDecayGrad", ["grad_final_state"], dict(grad_state=1), None),
    "grad per key": (
        "CausalLinearDecayGrad",
        ["log_decay", *STATE, "grad_final_state"],
        dict(scale=0.7, grad_decay=1, grad_state=1, state_v_first=1),
        4,
    ),
    "grad per key alone": ("CausalLinearDecayGrad", ["log_decay"], dict(layout="bnhd"), 4),
    "grad v first": (
        "CausalLinearDecayGrad",
        ["log_decay", *STATE, "grad_final_state"],
        dict(grad_decay=1, grad_state=1, state_v_first=1),
        1,
    ),
    "normalized plain": ("NormalizedLinearAttention", [], {}, None),
    "normalized unit rows": ("NormalizedLinearAttention", ["coefficients"], dict(normalize_qk=1, layout="bnhd"), None),
    "normalized carried": ("NormalizedLinearAttention", ["coefficients", *SUMS], dict(return_state=1), None),
    "normalized return": ("NormalizedLinearAttention", [], dict(return_state=1, normalize_qk=1), None),
    "normalized all": ("NormalizedLinearAttention", ["coefficients"], dict(causal=0), None),
    "normalized grad": ("NormalizedLinearAttentionGrad", ["coefficients"], {}, None),
    "normalized grad unit rows": ("NormalizedLinearAttentionGrad", [], dict(normalize_qk=1, layout="bnhd"), None),
    "normalized grad alone": ("NormalizedLinearAttentionGrad", ["coefficients"], dict(grad_coefficients=0), None),
    "normalized grad all": ("NormalizedLinearAttentionGrad", ["coefficients"], dict(causal=0, normalize_qk=1), None),
}
PACKED_CASES = {
    "decay": ("CausalLinearDecay", ["log_decay", "cu_seqlens"], dict(return_state=1), 1),
    "decay pool": (
        "CausalLinearDecay",
        ["log_decay", *STATE, "initial_norm", "cu_seqlens", "state_index", "beta"],
        dict(return_state=1, normalize=1, layout="bnhd"),
        3,
    ),
    "decay per key": (
        "CausalLinearDecay",
        ["log_decay", *STATE, "initial_norm", "cu_seqlens", "state_index", "beta"],
        dict(return_state=1, normalize=1, state_v_first=1),
        4,
    ),
    "grad": ("CausalLinearDecayGrad", ["log_decay", *STATE, "cu_seqlens"], dict(grad_decay=1, grad_state=1), 1),
    "grad per key": (
        "CausalLinearDecayGrad",
        ["log_decay", *STATE, "grad_final_state", "cu_seqlens"],
        dict(grad_decay=1, grad_state=1, state_v_first=1, layout="bnhd"),
        4,
    ),
    "grad per token": (
        "CausalLinearDecayGrad",
        ["log_decay", *STATE, "grad_final_state", "cu_seqlens"],
        dict(grad_decay=1, layout="bnhd"),
        3,
    ),
}
