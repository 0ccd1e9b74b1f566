"""The function bodies: the same meaning in standard operators, in onnxruntime without the library, at many sizes."""

import onnx
import onnx_ir
import ort_models
import pytest
import torch
from kernels import output_shapes
from leanfleet import spec
from leanfleet.export import function_bodies, reference

I32 = torch.int32


def randn(*shape):
    return torch.randn(*shape)


def ints(*values):
    return torch.tensor(values, dtype=I32)


def lay(x, layout):
    """A [B,heads,tokens,...] tensor in the layout."""
    return x.transpose(1, 2).contiguous() if layout == "bnhd" else x


def attention(b, n, layout="bhnd", variant="dense", append=False, query_lens=False, sinks=False, seq_lens=True, slots=70):
    """H 6 over Hkv 2, D 8, Dv 5; garbage behind the valid lengths."""
    inputs = dict(query=lay(randn(b, 6, n, 8), layout))
    new = torch.randint(1, n + 1, (b,), dtype=I32) if query_lens else torch.full((b,), n, dtype=I32)
    if variant == "dense":
        capacity = torch.full((b,), max(slots, n))
        inputs |= dict(key_cache=randn(b, 2, int(capacity[0]), 8), value_cache=randn(b, 2, int(capacity[0]), 5))
    elif variant == "ragged":
        capacity = torch.randint(n, n + slots, (b,))
        capacity[-1] = n
        inputs |= dict(key_cache=randn(2, int(capacity.sum()), 8), value_cache=randn(2, int(capacity.sum()), 5),
                       cu_seqlens=torch.cat([torch.zeros(1), capacity.cumsum(0)]).to(I32))
    else:
        pages = -(-(n + slots) // 16)
        capacity = torch.full((b,), pages * 16)
        table = torch.randperm(b * pages + 3)[:b * pages].reshape(b, pages).to(I32)
        inputs |= dict(key_cache=randn(b * pages + 3, 16, 2, 8), value_cache=randn(b * pages + 3, 16, 2, 5), block_table=table)
    if seq_lens:
        lens = torch.minimum(new + torch.randint(0, 9, (b,)), capacity).to(I32)
        lens[0] = int(capacity[0])
        if b > 1 and query_lens:
            lens[1], new[1] = 0, 0
        inputs["seq_lens"] = lens
    if query_lens:
        inputs["query_lens"] = new
    if append:
        inputs |= dict(new_key=lay(randn(b, 2, n, 8), layout), new_value=lay(randn(b, 2, n, 5), layout))
    if sinks:
        inputs["sinks"] = randn(6)
    return inputs


def decay(b, n, layout="bhnd", per_token=False, zero=False, state=False, norm=False, packed=False, pool=False, grad=False,
          no_decay=False):
    """H 6 over Hkv 2, R 4, Dv 5."""
    positive = torch.abs if norm else torch.clone
    requests = 3 if packed else b
    b = 1 if packed else b
    inputs = dict(query=lay(positive(randn(b, 6, n, 4)), layout), key=lay(positive(randn(b, 2, n, 4)), layout),
                  value=lay(randn(b, 2, n, 5), layout))
    if not no_decay:
        log_decay = -torch.rand(b, 2, n) / 4 if per_token else -torch.rand(2) / 4
        if zero:
            log_decay.view(-1)[::7] = float("-inf")
        inputs["log_decay"] = lay(log_decay, layout) if per_token else log_decay
    rows = requests + 2 if pool else requests
    if state or pool:
        inputs["initial_state"] = randn(rows, 2, 4, 5)
        if norm:
            inputs["initial_norm"] = randn(rows, 2, 4).abs()
    if packed:
        inputs["cu_seqlens"] = ints(0, n // 3, n // 3, n)
    if pool:
        inputs["state_index"] = torch.randperm(rows)[:requests].to(I32)
    if grad:
        inputs["grad_output"] = lay(randn(b, 6, n, 5), layout)
        if state:
            inputs["grad_final_state"] = randn(requests, 2, 4, 5)
    return inputs


def normalized(b, n, layout="bhnd", coefficients=False, state=False, grad=False, **attrs):
    """H 6 over Hkv 2, D 4, Dv 5; positive scores, so that no normaliser is near 0."""
    inputs = dict(query=lay(randn(b, 6, n, 4).abs(), layout), key=lay(randn(b, 2, n, 4).abs(), layout),
                  value=lay(randn(b, 2, n, 5), layout))
    if coefficients:
        inputs["coefficients"] = torch.tensor([2.0, 0.5])
    if state:
        inputs |= dict(initial_state=randn(b, 2, 4, 5), initial_key_sum=randn(b, 2, 4).abs(), initial_value_sum=randn(b, 2, 5),
                       initial_count=torch.randint(1, 9, (b,), dtype=I32))
    if grad:
        output, normalizer = reference.normalized_linear_attention(*[inputs.get(k) for k in (
            "query", "key", "value", "coefficients")], layout=layout, **attrs)
        inputs |= dict(output=output, normalizer=normalizer, grad_output=torch.randn_like(output))
    return inputs


APPEND = dict(append=1)
# name: (operator, builder of inputs, its arguments, attributes)
VARIANTS = {
    "attention": ("LeanAttention", attention, dict(seq_lens=False), {}),
    "attention lengths": ("LeanAttention", attention, dict(query_lens=True), dict(softcap=5.0, scale=0.3)),
    "attention append": ("LeanAttention", attention, dict(append=True, query_lens=True, sinks=True), {**APPEND, "window": 5}),
    "attention append bnhd": ("LeanAttention", attention, dict(append=True, layout="bnhd"), {**APPEND, "layout": "bnhd"}),
    "attention not causal": ("LeanAttention", attention, dict(query_lens=True), dict(causal=0)),
    "attention ragged": ("LeanAttention", attention, dict(variant="ragged", query_lens=True, sinks=True), {}),
    "attention ragged append": ("LeanAttention", attention, dict(variant="ragged", append=True, query_lens=True), APPEND),
    "attention paged": ("LeanAttention", attention, dict(variant="paged", query_lens=True), dict(window=3)),
    "attention paged append": ("LeanAttention", attention, dict(variant="paged", append=True, query_lens=True), APPEND),
    "decay": ("CausalLinearDecay", decay, {}, {}),
    "decay none": ("CausalLinearDecay", decay, dict(no_decay=True), dict(scale=0.5, return_state=1)),
    "decay token": ("CausalLinearDecay", decay, dict(per_token=True, zero=True, state=True), dict(return_state=1)),
    "decay normalize": ("CausalLinearDecay", decay, dict(norm=True, state=True), dict(normalize=1, return_state=1)),
    "decay bnhd": ("CausalLinearDecay", decay, dict(layout="bnhd", per_token=True), dict(layout="bnhd", normalize=1)),
    "decay packed": ("CausalLinearDecay", decay, dict(packed=True, state=True, per_token=True), dict(return_state=1)),
    "decay pool": ("CausalLinearDecay", decay, dict(pool=True), dict(return_state=1)),
    "decay packed pool": ("CausalLinearDecay", decay, dict(pool=True, packed=True, norm=True), dict(return_state=1, normalize=1)),
    "grad": ("CausalLinearDecayGrad", decay, dict(grad=True), dict(scale=0.5, grad_decay=1)),
    "grad state": ("CausalLinearDecayGrad", decay, dict(grad=True, state=True, per_token=True, zero=True),
                   dict(grad_decay=1, grad_state=1)),
    "grad packed": ("CausalLinearDecayGrad", decay, dict(grad=True, packed=True, state=True), dict(grad_decay=1, grad_state=1)),
    "grad bnhd": ("CausalLinearDecayGrad", decay, dict(grad=True, layout="bnhd", per_token=True),
                  dict(grad_decay=1, layout="bnhd")),
    "normalized": ("NormalizedLinearAttention", normalized, {}, {}),
    "normalized state": ("NormalizedLinearAttention", normalized, dict(state=True, coefficients=True), dict(return_state=1)),
    "normalized all": ("NormalizedLinearAttention", normalized, dict(coefficients=True), dict(causal=0, normalize_qk=1)),
    "normalized bnhd": ("NormalizedLinearAttention", normalized, dict(layout="bnhd"), dict(layout="bnhd", normalize_qk=1)),
    "normalized grad": ("NormalizedLinearAttentionGrad", normalized, dict(grad=True, coefficients=True, normalize_qk=1),
                        dict(normalize_qk=1)),
    "normalized grad all": ("NormalizedLinearAttentionGrad", normalized, dict(grad=True, causal=0), dict(causal=0)),
    "normalized grad bnhd": ("NormalizedLinearAttentionGrad", normalized, dict(grad=True, layout="bnhd"), dict(layout="bnhd")),
}


def with_bodies(model):
    return onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))


def body_session(op, inputs, attrs, dtype="float32"):
    """onnxruntime without the library, on a model whose dimensions are all dynamic."""
    import onnxruntime

    model = ort_models.node_model(op, {name: [None] * t.dim() for name, t in inputs.items()}, attrs, dtype=dtype)
    for value, (_, _, shape) in zip(model.graph.output, output_shapes(op, inputs, attrs), strict=True):
        for _ in shape:
            value.type.tensor_type.shape.dim.add()
    model = with_bodies(model)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def judged(op, inputs, attrs, dtype):
    """The reference on inputs converted to dtype."""
    tensors = [inputs.get(t.name) for t in op.inputs]
    tensors = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]
    return getattr(reference, op.snake_name)(*tensors, **attrs)


def cancelling(inputs, expected):
    """Size of the terms whose sum grad_log_decay and grad_coefficients are; they may cancel to anything.

    Σ |q_i| |dq_i|, and for da Σ_i N |o_i| |do_i| / g_i.
    """
    def norm(t):
        return t.double().norm(dim=-1)

    size = float((norm(inputs["query"]) * norm(expected[0])).sum())
    if "normalizer" in inputs:
        tokens = inputs["query"].numel() / inputs["query"].shape[-1] / inputs["query"].shape[0] / 6
        size += tokens * float((norm(inputs["output"]) * norm(inputs["grad_output"]) / inputs["normalizer"].double()).sum())
    return size


def compare(found, expected, rounded, unit, terms=0.0):
    """Within 4 times what the plain reference loses in the low precision, and a few units of the largest value."""
    same = expected == found.double()  # infinities
    error = torch.where(same, 0, (found.double() - expected).abs())
    baseline = torch.where(expected == rounded.double(), 0, (rounded.double() - expected).abs())
    allowed = 4 * baseline.max() + 8 * unit * expected[expected.isfinite()].abs().max() + 2 * unit * terms
    assert not torch.isnan(found).any() and error.max() <= allowed, (float(error.max()), float(allowed))


@pytest.mark.parametrize("name", VARIANTS)
def test_body_agrees_with_the_reference_at_every_size(name):
    op_name, make, arguments, attrs = VARIANTS[name]
    op = spec.all_specs()[op_name]
    torch.manual_seed(1)
    session = body_session(op, make(2, 5, **arguments), attrs)
    for b, n in ((1, 1), (2, 5), (3, 64), (1, 65), (2, 130)):
        inputs = make(b, n, **arguments)
        found = session.run(None, {k: t.numpy() for k, t in inputs.items()})
        expected, rounded = judged(op, inputs, attrs, torch.float64), judged(op, inputs, attrs, torch.float32)
        assert len(found) == len(expected)
        active = op.active_outputs(attrs)
        for t, f, e, r in zip(active, found, expected, rounded, strict=True):
            assert f.shape == tuple(e.shape)
            terms = cancelling(inputs, expected) if t.name in ("grad_log_decay", "grad_coefficients") else 0.0
            compare(torch.from_numpy(f), e.double(), r, 2.0**-23, terms)


@pytest.mark.parametrize("name", ["attention append", "decay normalize", "grad state", "normalized state", "normalized grad"])
def test_float16(name):
    op_name, make, arguments, attrs = VARIANTS[name]
    op = spec.all_specs()[op_name]
    torch.manual_seed(2)
    inputs = make(2, 21, **arguments)
    inputs = {k: v.half() if op.input(k).type == "T" else v for k, v in inputs.items()}
    session = body_session(op, inputs, attrs, "float16")
    found = session.run(None, {k: t.numpy() for k, t in inputs.items()})
    expected = judged(op, inputs, attrs, torch.float64)
    rounded = getattr(reference, op.snake_name)(*[inputs.get(t.name) for t in op.inputs], **attrs)
    for t, f, e, r in zip(op.active_outputs(attrs), found, expected, rounded, strict=True):
        terms = cancelling(inputs, expected) if t.name in ("grad_log_decay", "grad_coefficients") else 0.0
        compare(torch.from_numpy(f), e.double(), r, 2.0**-11, terms)


def test_garbage_behind_the_lengths_does_not_leak():
    op = spec.all_specs()["LeanAttention"]
    torch.manual_seed(3)
    inputs = attention(2, 4, append=True)
    inputs["seq_lens"] = ints(9, 6)
    clean = body_session(op, inputs, APPEND).run(None, {k: t.numpy() for k, t in inputs.items()})
    for b, length in enumerate((9, 6)):
        inputs["key_cache"][b, :, length:] = float("nan")
        inputs["value_cache"][b, :, length:] = float("nan")
    dirty = body_session(op, inputs, APPEND).run(None, {k: t.numpy() for k, t in inputs.items()})
    assert (clean[0] == dirty[0]).all() and (clean[1] == dirty[1]).all()


def test_equal_variants_share_a_function_and_different_ones_do_not():
    op = spec.all_specs()["NormalizedLinearAttention"]
    shapes = {k: list(v.shape) for k, v in normalized(1, 4).items()}
    values = [(t.name, ort_models.onnx_type(t, "float32"), shapes[t.name]) for t in op.inputs if t.name in shapes]
    nodes = [ort_models.make_node(op, shapes, attrs, f"n{i}", rename={"output": f"output{i}", "normalizer": f"normalizer{i}"})
             for i, attrs in enumerate([{}, {}, {"causal": 0}, {"eps": 1e-3}])]
    outputs = [(f"output{i}", 1, [None] * 4) for i in range(4)]
    model = with_bodies(ort_models.make_model(nodes, values, outputs))
    assert len(model.functions) == 3
    assert model.graph.node[0].overload == model.graph.node[1].overload
    assert len({n.overload for n in model.graph.node}) == 3
    onnx.checker.check_model(model)
