"""Mixtures of experts as ONNX Runtime's own node, com.microsoft.MoE, with a function of it for other runtimes.

transformers' traceable form, batched_mm, gathers the weights of each token's experts. That is correct, but a prompt of n
tokens copies a token's weights n times. MoE sorts tokens by expert instead. It takes logits in the type of the hidden states
and makes the weights of a token's experts from them: in float16 these differ from transformers' float32 ones by up to 0.2%,
in bfloat16 by up to 1.4%. The function gathers as batched_mm does. It runs where ONNX Runtime has no kernel (bfloat16 on
CPUs) and in TensorRT.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import torch

from leanfleet.export.function_bodies import ExportWarning
from leanfleet.export.fusions import MICROSOFT, set_function

IMPLEMENTATION = "leanfleet"  # the name under which transformers knows it
_NOT_CHOSEN = -1e4  # a logit whose probability is 0 in every type
# alpha, beta, limit of MoE's swiglu: gate * sigmoid(alpha * gate) * (up + beta), gate at most limit and up within +-limit.
_PLAIN, _CLAMPED = (
    {"activation_alpha": 1.0, "activation_beta": 0.0},
    {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0},
)


class ExpertsWarning(ExportWarning):
    """Says which versions of ONNX Runtime compute a model's experts correctly."""


def _swiglu(gate, up, activation_alpha, activation_beta, swiglu_limit=float("inf")):
    gate = gate.clamp(max=swiglu_limit)
    return gate * torch.sigmoid(activation_alpha * gate) * (up.clamp(-swiglu_limit, swiglu_limit) + activation_beta)


def _is_concatenated(module):
    return getattr(module, "is_concatenated", True)  # not every transformers 5 says so


def _activation(module):
    """MoE's attributes for the activation of transformers' experts, found by trying; None if it is none of MoE's."""
    if not getattr(module, "has_gate", False) or any(
        getattr(module, name, False) for name in ("has_post_expert_norm", "_is_expert_parallel")
    ):
        return None
    gate, up = 12 * torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0))
    joined = torch.cat([gate, up], -1) if _is_concatenated(module) else torch.stack([gate, up], -1).flatten(-2)
    found = module._apply_gate(joined)
    return next((a for a in (_PLAIN, _CLAMPED) if torch.allclose(found, _swiglu(gate, up, **a), rtol=1e-5, atol=1e-5)), None)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """Rows [gate; up] of [E,2I,...] as gate 0, up 0, gate 1, ..."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def _arranged(module):
    """{name: parameter} of the weights in MoE's form, [E,2I,H] and [E,H,I], and of the biases."""
    names = ["gate_up_proj", "down_proj"] + ["gate_up_proj_bias", "down_proj_bias"] * module.has_bias
    found = {name: getattr(module, name).detach() for name in names}
    if module.is_transposed:
        found |= {name: found[name].transpose(1, 2).contiguous() for name in names[:2]}
    if _is_concatenated(module):
        found |= {name: interleave(x) for name, x in found.items() if name.startswith("gate_up")}
    return {name: torch.nn.Parameter(x, requires_grad=False) for name, x in found.items()}


def _moe(module, hidden_states, top_k_index, top_k_weights):
    """The experts of hidden_states [T,H] as one node; top_k_index int64 and top_k_weights [T,K], as transformers' routers give.

    MoE takes logits, of which it keeps the K highest, normalised: those whose softmax the given weights are. A module with
    leanfleet_elsewhere has some of the experts alone: tokens give others the weight 0.
    """
    activation = getattr(module, "leanfleet_activation", None)
    if activation is None:
        from transformers.integrations.moe import batched_mm_experts_forward

        return batched_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    weights = top_k_weights.float()
    total = weights.sum(-1, keepdim=True)
    shares = (weights / total.clamp(min=1e-30)).clamp(min=1e-30)
    count = module.gate_up_proj.shape[0]
    if getattr(module, "leanfleet_elsewhere", False):
        # Experts elsewhere go to a column more, which is cut off. A token that has none here gets the first one alone, for
        # nothing: without it K would be chosen.
        top_k_index = torch.where(weights > 0, top_k_index, count)
        unchosen = torch.full((count + 1,), _NOT_CHOSEN, device=hidden_states.device)
        unchosen[0] = _NOT_CHOSEN / 2
        logits = unchosen.expand(hidden_states.shape[0], -1)
    else:
        logits = torch.full((hidden_states.shape[0], count), _NOT_CHOSEN, device=hidden_states.device)
    logits = logits.scatter(1, top_k_index, shares.log())[:, :count].to(hidden_states.dtype)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    mixed = torch.onnx.ops.symbolic(
        f"{MICROSOFT}::MoE",
        (hidden_states, logits, module.gate_up_proj, biases[0], module.down_proj, biases[1]),
        {
            "k": min(top_k_index.shape[1], count),
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
            **activation,
        },
        dtype=hidden_states.dtype,
        shape=hidden_states.shape,
        version=1,
    )
    return (mixed * total).to(hidden_states.dtype)


@contextmanager
def as_one_node(model: torch.nn.Module) -> Iterator[None]:
    """A transformers model whose experts become MoE nodes where their activation is one that MoE has, else batched_mm."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _moe)
    before = []
    try:
        for module in model.modules():
            if hasattr(module, "_apply_gate") and (activation := _activation(module)) is not None:
                arranged = _arranged(module)
                before.append((module, {name: getattr(module, name) for name in arranged}))
                module.leanfleet_activation = activation
                for name, parameter in arranged.items():
                    setattr(module, name, parameter)
        if before:
            warnings.warn(
                "the model's experts become com.microsoft.MoE nodes, checked with onnxruntime 1.31. CUDA providers "
                "released before June 2026 ignore the nodes' activation and give wrong results without an error; "
                "export with fuse=False (leanfleet export --no-fuse) for those",
                ExpertsWarning,
                stacklevel=6,
            )
        model.set_experts_implementation(IMPLEMENTATION)
        yield
    finally:
        for module, parameters in before:
            for name, parameter in parameters.items():
                setattr(module, name, parameter)
            vars(module).pop("leanfleet_activation", None)


def add_function(model: ir.Model) -> None:
    """Gives an onnx_ir.Model whose graph has MoE nodes, all with the same inputs and attributes, a function of them in standard
    operators. Nodes that differ get none."""
    kinds = [
        (tuple(x is not None for x in n.inputs), {a.name: a.value for a in n.attributes.values()})
        for n in model.graph
        if (n.domain, n.op_type) == (MICROSOFT, "MoE")
    ]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        return
    present, given = kinds[0]

    def build(op, x, logits, w1, b1, w2, b2=None):
        def axes(*numbers):
            return op("Constant", value_ints=numbers)

        def number(value):
            return op("CastLike", op("Constant", value_float=float(value)), x)

        chances, chosen = op("TopK", op("Softmax", logits, axis=-1), axes(given["k"]), outputs=2, axis=-1)
        shares = op("Div", chances, op("ReduceSum", chances, axes(-1)))  # [T,K]
        joined = op("Squeeze", op("MatMul", op("Gather", w1, chosen), op("Unsqueeze", x, axes(1, 3))), axes(3))  # [T,K,2I]
        if present[3]:
            joined = op("Add", joined, op("Gather", b1, chosen))
        pairs = op("Split", op("Reshape", joined, axes(0, 0, -1, 2)), outputs=2, axis=-1, num_outputs=2)
        gate, up = (op("Squeeze", t, axes(3)) for t in pairs)
        if "swiglu_limit" in given:
            limit = number(given["swiglu_limit"])
            gate, up = op("Min", gate, limit), op("Max", op("Min", up, limit), op("Neg", limit))
        gated = op(
            "Mul",
            op("Mul", gate, op("Sigmoid", op("Mul", gate, number(given["activation_alpha"])))),
            op("Add", up, number(given["activation_beta"])),
        )
        rows = op("Squeeze", op("MatMul", op("Gather", w2, chosen), op("Unsqueeze", gated, axes(3))), axes(3))  # [T,K,H]
        if present[3]:
            rows = op("Add", rows, op("Gather", b2, chosen))
        return op("ReduceSum", op("Mul", rows, op("Unsqueeze", shares, axes(2))), axes(1), keepdims=0)

    names = ("input", "router_probs", "fc1_weights", "fc1_bias", "fc2_weights", "fc2_bias")[: len(present)]
    set_function(model, "MoE", names, build, given)
