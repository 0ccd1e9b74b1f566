"""Models whose parity with their function bodies is checked, good ones and ones with a fault."""

import onnx
import onnx_ir

from leanfleet import spec
from leanfleet.export import function_bodies
from support import ort_models

OPS = spec.all_specs()
SIZES = {
    "B": 2,
    "H": 6,
    "Hkv": 2,
    "Hq": 2,
    "Hk": 2,
    "Hv": 4,
    "N": 70,
    "Nq": 7,
    "D": 16,
    "R": 16,
    "Dv": 12,
    "S": 80,
    "total": 100,
    "P": 16,
    "block": 16,
    "M": 4,
    "Q": 3,
    "positions": 80,
    "half": 6,
    "V": 300,
    "W": 10,
    "F": 24,
    "C": 24,
    "K": 3,
    "I": 96,
    "G": 3,
    "O": 20,
}
STATE = {"initial_state", "initial_key_sum", "initial_value_sum", "initial_count"}
DRAWS = {"temperature", "seed", "position"}
PENALTIES = {"token_counts", "repetition_penalty", "presence_penalty", "frequency_penalty"}
# Of each operator: optional inputs (log_decay of rank 3: "per_token log_decay", of rank 4: "per_key log_decay"), attributes.
VARIANTS = {
    "LeanAttention": [
        (set(), {}),
        ({"seq_lens", "query_lens", "sinks"}, {"window": 9, "softcap": 5.0, "layout": "bnhd"}),
        ({"seq_lens", "cu_seqlens"}, {}),
        ({"seq_lens", "query_lens", "new_key", "new_value", "block_table"}, {"append": 1}),
        ({"seq_lens", "new_key", "new_value", "cos_cache", "sin_cache"}, {"append": 1, "rotary_interleaved": 1}),
        ({"seq_lens", "cos_cache", "sin_cache"}, {"append": 1, "packed_qkv": 1, "layout": "bnhd"}),
    ],
    "CausalLinearDecay": [
        ({"log_decay", "initial_state"}, {"return_state": 1}),
        ({"per_token log_decay", "cu_seqlens", "beta"}, {"return_state": 1, "layout": "bnhd"}),
        ({"log_decay", "initial_state", "initial_norm", "state_index"}, {"normalize": 1, "return_state": 1}),
    ],
    "CausalLinearDecayGrad": [
        (set(), {}),
        ({"log_decay", "initial_state", "grad_final_state"}, {"grad_decay": 1, "grad_state": 1}),
        ({"per_token log_decay", "cu_seqlens"}, {"grad_decay": 1}),
    ],
    "NormalizedLinearAttention": [(set(), {"causal": 0}), ({"coefficients"} | STATE, {"return_state": 1, "normalize_qk": 1})],
    "NormalizedLinearAttentionGrad": [(set(), {"layout": "bnhd"}), ({"coefficients"}, {"normalize_qk": 1, "causal": 0})],
    "SampleTokens": [
        ({"allowed_tokens", "logit_bias"}, {"logprob": 1}),
        (DRAWS | PENALTIES | {"top_k", "top_p", "min_p", "count_index"}, {"count_tokens": 1, "logprob": 1, "num_logprobs": 7}),
        (DRAWS | {"active"}, {}),
    ],
    "GatedActivation": [(set(), {}), (set(), {"activation": "gelu_tanh"})],
    "BlockLinear": [({"shift", "bias"}, {}), ({"shift"}, {"round_input": 1})],
    "Linear": [({"bias"}, {"constant_weight": 1}), (set(), {"gated": 1, "activation": "gelu"})],
    "DecayGates": [
        ({"bias", "query_lens"}, {"return_step": 1}),
        ({"beta_input"}, {"per_key": 1, "return_step": 1, "return_beta": 1, "step_max": 1.5}),
        ({"beta_input"}, {"return_beta": 1, "columns": 1, "first_column": 1}),
    ],
    "RmsNorm": [({"addend", "gate"}, {"return_sum": 1}), ({"gate"}, {"gate_first": 1, "columns": 1, "gate_columns": 1})],
    "AllReduce": [(set(), {}), (set(), {})],
    "AllGather": [(set(), {}), (set(), {})],
    "MergeAttention": [(set(), {}), (set(), {})],
    "CausalConv": [
        ({"bias", "initial_state", "query_lens"}, {"return_state": 1, "activation": "silu"}),
        ({"initial_state", "cu_seqlens", "state_index"}, {"return_state": 1}),
    ],
    "GatedDeltaRule": [
        ({"log_decay", "initial_state"}, {"return_state": 1}),
        ({"per_key log_decay", "initial_state", "state_index"}, {"return_state": 1, "state_v_first": 1, "layout": "bnhd"}),
        ({"log_decay", "cu_seqlens"}, {"normalize_qk": 1, "return_state": 1}),
    ],
    "GatedDeltaRuleGrad": [
        (set(), {}),
        ({"log_decay", "initial_state", "grad_final_state"}, {"grad_decay": 1, "grad_state": 1, "normalize_qk": 1}),
        ({"per_key log_decay", "cu_seqlens"}, {"grad_decay": 1, "layout": "bnhd"}),
    ],
}


def input_shapes(name, index, sizes=None):
    """{input: shape} of a variant."""
    op, (extra, attrs) = OPS[name], VARIANTS[name][index]
    present = {t.name for t in op.inputs if not t.optional} | {e.split()[-1] for e in extra}
    sizes = SIZES | (sizes or {})
    if "cu_seqlens" in present and name != "LeanAttention":
        sizes["B"] = 1
    given = op.given(present, attrs)
    sizes, shapes = op.equal_sizes(sizes, given), {}
    for t in op.inputs:
        if t.name in present:
            rank = 3 if f"per_token {t.name}" in extra else 4 if f"per_key {t.name}" in extra else None
            axes = op.shape_of(t, given, rank)
            shapes[t.name] = [axis.size(sizes) for axis in axes.ordered(attrs.get("layout", "bhnd"))]
    return shapes


def with_bodies(model):
    return onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))


def variant_model(name, index, dtype="float32"):
    return with_bodies(ort_models.node_model(OPS[name], input_shapes(name, index), VARIANTS[name][index][1], dtype))


def saved(model, folder, name="model.onnx"):
    onnx.save(model, folder / name)
    return folder / name


def alter_body(model, output):
    """Makes an output of a model's only function wrong: an integer by one, others by a thousandth."""
    (function,) = model.functions
    for node in function.node:
        for i, name in enumerate(node.output):
            if name == output:
                node.output[i] = f"{name}_right"
    kind = next(t for t in OPS[function.name].outputs if t.name == output).type
    number, operator = ("one", "Add") if kind in "IL" else ("factor", "Mul")
    value = 1 if kind in "IL" else 1.001
    function.node.extend(
        [
            onnx.helper.make_node("Constant", [], [number], **{f"value_{'int' if kind in 'IL' else 'float'}": value}),
            onnx.helper.make_node("CastLike", [number, f"{output}_right"], [f"{number}_like"]),
            onnx.helper.make_node(operator, [f"{output}_right", f"{number}_like"], [output]),
        ]
    )
    return model


def chain_model():
    """LeanAttention twice, the second on the first's output; the batch, its tokens and the caches' slots are open."""
    op = OPS["LeanAttention"]
    nodes = [
        ort_models.make_node(
            op,
            {"query", "key_cache", "value_cache", "seq_lens", "query_lens"},
            {},
            f"node_{i}",
            rename={"query": query, "output": output, "lse": f"lse_{i}"},
        )
        for i, (query, output) in enumerate([("query", "between"), ("between", "output")])
    ]
    shapes = {
        "query": ["batch", 6, "tokens", 16],
        "key_cache": ["batch", 2, "slots", 16],
        "value_cache": ["batch", 2, "slots", 16],
        "seq_lens": ["batch"],
        "query_lens": ["batch"],
    }
    inputs = [(n, ort_models.onnx_type(op.input(n), "float32"), shape) for n, shape in shapes.items()]
    outputs = [(n, onnx.TensorProto.FLOAT, None) for n in ("between", "lse_0", "output", "lse_1")]
    return with_bodies(ort_models.make_model(nodes, inputs, outputs))
