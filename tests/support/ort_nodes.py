"""Nodes of every operator and variant in ONNX Runtime, beside what the C interface computes."""

import onnxruntime
import pytest
import torch

from leanfleet import ort_ops, spec
from support import ort_models
from support.kernels import TORCH_DTYPES, run_kernel

TOY = {s.name: s for s in spec.parse(ort_models.TOY_SCHEMA)}
OPS = {**spec.all_specs(), **TOY}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DTYPES = ("float32", "float16", "bfloat16")
# The present optional inputs and the attributes of each variant; sizes of dims that differ from SIZES.
CACHE = ["seq_lens", "query_lens"]
NEW = ["new_key", "new_value"]
SUMS = ["initial_state", "initial_key_sum", "initial_value_sum", "initial_count"]
DRAWS = ["temperature", "seed", "position"]
PENALTIES = ["token_counts", "repetition_penalty", "presence_penalty", "frequency_penalty"]
VARIANTS = {
    "LeanAttention": [
        ([], {}, {}),
        (CACHE, {"causal": 0, "scale": 0.3, "layout": "bnhd"}, {}),
        ([*CACHE, *NEW, "sinks"], {"append": 1, "window": 5, "softcap": 8.0}, {}),
        ([*CACHE, *NEW, "cu_seqlens"], {"append": 1}, {}),
        ([*CACHE, *NEW, "block_table"], {"append": 1, "layout": "bnhd"}, {}),
        (["block_table"], {}, {"H": 14}),
        (["seq_lens", "sinks"], {"world": 1, "communicator": "tp"}, {"Nq": 1, "S": 65}),
        ([*CACHE, *NEW, "cos_cache", "sin_cache"], {"append": 1, "layout": "bnhd"}, {}),
        (["block_table", "cos_cache", "sin_cache"], {"rotary_interleaved": 1}, {}),
        (CACHE, {"append": 1, "packed_qkv": 1, "layout": "bnhd"}, {}),
        ([*CACHE, "block_table", "cos_cache", "sin_cache"], {"append": 1, "packed_qkv": 1}, {}),
        (["seq_lens", "cu_query_lens"], {"layout": "bnhd"}, {}),
        (["seq_lens", "cu_query_lens", "cu_seqlens", *NEW, "sinks"], {"append": 1, "window": 5}, {}),
        (
            ["seq_lens", "cu_query_lens", "block_table", "cos_cache", "sin_cache"],
            {"append": 1, "packed_qkv": 1, "layout": "bnhd"},
            {},
        ),
        (["one key_scale", "channels value_scale", *CACHE, *NEW], {"append": 1}, {}),
        (
            ["key_scale", "value_scale", *CACHE, *NEW, "block_table"],
            {"append": 1, "key_per_token": 1, "value_per_token": 1},
            {},
        ),
        (["key_scale", *CACHE, *NEW, "cu_seqlens", "cos_cache", "sin_cache"], {"append": 1, "key_per_token": 1}, {}),
        (["one value_scale", "seq_lens"], {}, {}),
        (
            ["float8e4m3fn key_cache", "uint8 value_cache", "one key_scale", "channels value_scale", *CACHE, *NEW],
            {"append": 1},
            {"Dv": 8},
        ),
        (
            ["uint8 key_cache", "float8e4m3fn value_cache", "key_scale", "value_scale", *CACHE, *NEW, "block_table"],
            {"append": 1, "key_per_token": 1, "value_per_token": 1},
            {},
        ),
    ],
    "CausalLinearDecay": [
        ([], {}, {}),
        (["log_decay", "initial_state"], {"return_state": 1, "layout": "bnhd"}, {}),
        (["log_decay", "initial_state"], {"return_state": 1, "algorithm": "fleet"}, {"N": 1}),
        (["per_token log_decay", "initial_state", "initial_norm"], {"normalize": 1, "return_state": 1, "eps": 1e-3}, {}),
        (["per_token log_decay"], {"layout": "bnhd", "algorithm": "lightning"}, {"N": 64}),
        (["log_decay", "cu_seqlens", "initial_state", "state_index"], {"return_state": 1, "scale": 0.5}, {"B": 1}),
        (["cu_seqlens"], {"return_state": 1, "algorithm": "causal_dot_product"}, {"B": 1}),
        (["initial_state", "state_index"], {"return_state": 1}, {}),
        (["log_decay", "initial_state"], {"return_state": 1}, {"Hq": 6, "Hv": 2}),
        (["per_token log_decay", "initial_state"], {"return_state": 1, "layout": "bnhd"}, {"Hq": 4, "Hk": 2, "Hv": 8, "N": 1}),
        (["per_token log_decay", "initial_state", "beta"], {"return_state": 1, "layout": "bnhd"}, {"Hk": 1, "Hv": 4}),
        (["per_token log_decay", "narrow initial_state"], {"return_state": 1, "layout": "bnhd"}, {"N": 1}),
        (["log_decay", "narrow initial_state", "state_index"], {"return_state": 1}, {}),
        (["per_key log_decay", "initial_state", "beta"], {"return_state": 1, "layout": "bnhd", "state_v_first": 1}, {"N": 40}),
        (
            ["per_key log_decay", "cu_seqlens", "initial_state", "initial_norm", "state_index"],
            {"return_state": 1, "normalize": 1},
            {"B": 1},
        ),
        (["per_key log_decay", "narrow initial_state"], {"return_state": 1}, {"N": 1}),
        (["log_decay", "initial_state"], {"return_state": 1, "state_v_first": 1}, {"N": 1}),
        (["per_token log_decay", "initial_state"], {"return_state": 1, "state_v_first": 1}, {"N": 40}),
    ],
    "CausalLinearDecayGrad": [
        ([], {}, {}),
        (["log_decay", "initial_state", "grad_final_state"], {"grad_decay": 1, "grad_state": 1, "scale": 0.5}, {}),
        (["per_token log_decay"], {"grad_decay": 1, "layout": "bnhd"}, {}),
        (["log_decay", "initial_state", "cu_seqlens"], {"grad_state": 1}, {"B": 1}),
        (["log_decay", "initial_state"], {"grad_decay": 1}, {"Hq": 6, "Hv": 2}),
        (["per_token log_decay"], {"grad_decay": 1, "layout": "bnhd"}, {"Hq": 4, "Hk": 2, "Hv": 8}),
        (
            ["per_key log_decay", "initial_state", "grad_final_state"],
            {"grad_decay": 1, "grad_state": 1, "state_v_first": 1},
            {"Hq": 4, "Hv": 2},
        ),
        (["log_decay", "initial_state"], {"grad_decay": 1, "grad_state": 1, "state_v_first": 1}, {}),
    ],
    "NormalizedLinearAttention": [
        ([], {}, {}),
        (["coefficients"], {"causal": 0, "layout": "bnhd"}, {}),
        (["coefficients", *SUMS], {"return_state": 1, "normalize_qk": 1, "eps": 1e-3}, {}),
        (SUMS, {"return_state": 1}, {"N": 1}),
    ],
    "NormalizedLinearAttentionGrad": [
        ([], {}, {}),
        (["coefficients"], {"causal": 0, "layout": "bnhd", "eps": 1e-3}, {}),
        (["coefficients"], {"normalize_qk": 1}, {}),
        (["coefficients"], {"grad_coefficients": 0}, {}),
    ],
    "SampleTokens": [
        ([], {}, {}),
        ([*DRAWS, "top_k", "top_p", "min_p"], {"logprob": 1}, {}),
        ([*DRAWS, *PENALTIES, "logit_bias"], {"count_tokens": 1, "num_logprobs": 3}, {}),
        ([*DRAWS, *PENALTIES, "count_index", "allowed_tokens", "active"], {"count_tokens": 1, "logprob": 1}, {}),
    ],
    "GatedActivation": [
        *(
            (more, {"activation": kind}, {})
            for kind in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
            for more in ([], ["up"])
        ),
        (["up", "skip", "skip_scale"], {}, {"H": 5}),
        (["up"], {"columns": 1, "first_column": 4}, {"W": 400}),
    ],
    "BlockLinear": [
        ([], {}, {}),
        (["shift", "bias"], {"round_input": 1}, {"N": 20}),
        (["uint8 weight", "shift"], {"round_input": 1}, {"B": 1, "N": 1}),
        (["float8e4m3fn weight", "bias"], {"round_input": 1}, {"G": 4}),
    ],
    "GatedDeltaRule": [
        ([], {}, {}),
        (["log_decay", "initial_state"], {"return_state": 1, "normalize_qk": 1, "layout": "bnhd"}, {"N": 40}),
        (["per_key log_decay", "initial_state"], {"return_state": 1, "state_v_first": 1, "scale": 0.5}, {"N": 1}),
        (["log_decay", "initial_state", "state_index"], {"return_state": 1}, {"N": 1, "Hq": 4, "Hv": 2}),
        (["log_decay", "cu_seqlens", "initial_state", "state_index"], {"return_state": 1, "state_v_first": 1}, {"B": 1}),
        (["per_key log_decay", "cu_seqlens"], {"return_state": 1, "layout": "bnhd"}, {"B": 1}),
        (["log_decay"], {}, {"N": 70, "D": 32, "Dv": 48}),
    ],
    "GatedDeltaRuleGrad": [
        ([], {}, {}),
        (["log_decay", "initial_state", "grad_final_state"], {"grad_decay": 1, "grad_state": 1, "normalize_qk": 1}, {"N": 40}),
        (["per_key log_decay", "grad_final_state"], {"grad_decay": 1, "grad_state": 1, "state_v_first": 1}, {"Hq": 4, "Hv": 2}),
        (["log_decay", "cu_seqlens", "initial_state"], {"grad_state": 1, "layout": "bnhd", "scale": 0.5}, {"B": 1}),
    ],
    "CausalConv": [
        ([], {}, {}),
        (["bias", "initial_state"], {"return_state": 1, "activation": "silu"}, {}),
        (["initial_state", "query_lens"], {"return_state": 1}, {"C": 70, "Nq": 9}),
        (["initial_state", "state_index"], {"return_state": 1, "activation": "silu"}, {"N": 1, "C": 32}),
        (["bias", "cu_seqlens", "initial_state", "state_index"], {"return_state": 1}, {"B": 1, "K": 1}),
        (["cu_seqlens"], {"return_state": 1, "activation": "silu"}, {"B": 1, "N": 70}),
        (["initial_state"], {"return_state": 1, "split": 1, "first": 16, "second": 8, "third": 8}, {"C": 32}),
        (["initial_state"], {"return_state": 1, "columns": 1, "first_column": 8}, {"C": 32, "W": 48}),
        (["query_lens"], {"split": 1, "first": 3, "second": 4, "third": 6}, {"C": 13, "N": 9}),
    ],
    "DecayGates": [
        ([], {}, {}),
        (
            ["bias", "beta_input", "query_lens"],
            {"return_step": 1, "return_beta": 1, "step_max": 2.0, "step_min": 0.25},
            {"Nq": 9},
        ),
        (["bias", "beta_input"], {"per_key": 1, "return_step": 1, "return_beta": 1, "beta_scale": 2.0}, {"N": 40}),
        (["beta_input"], {"return_beta": 1, "columns": 1, "first_column": 9, "first_beta_column": 2}, {"F": 30, "C": 24}),
    ],
    "RmsNorm": [
        ([], {}, {}),
        (["addend"], {"return_sum": 1, "epsilon": 1e-5}, {"C": 640}),
        (["gate"], {"group": 5, "normed": 25, "activation": "sigmoid"}, {"C": 40}),
        (
            ["addend", "gate"],
            {"gate_first": 1, "columns": 1, "first_column": 8, "gate_columns": 1, "first_gate_column": 8},
            {"C": 24, "F": 40, "I": 32},
        ),
    ],
    "Linear": [
        ([], {}, {}),
        (["bias"], {"constant_weight": 1}, {"I": 72, "O": 40}),
        (["bias"], {"gated": 1, "activation": "relu", "constant_weight": 1}, {"N": 40, "I": 64, "O": 24}),
    ],
    "AllReduce": [([], {"communicator": "world"}, {})],
    "AllGather": [([], {"communicator": "world", "world": 1}, {})],
    "MergeAttention": [([], {}, {}), ([], {}, {"W": 1, "Dv": 64})],
    "ScaledAdd": [([], {}, {}), (["y"], {"alpha": -2.5, "layout": "bnhd"}, {}), (["total"], {"accumulate": 1}, {})],
}
SIZES = {
    "B": 2,
    "H": 6,
    "Hkv": 2,
    "Hq": 2,
    "Hk": 2,
    "Hv": 4,
    "N": 9,
    "Nq": 3,
    "D": 8,
    "R": 5,
    "Dv": 7,
    "S": 11,
    "P": 9,
    "block": 4,
    "M": 3,
    "total": 19,
    "Q": 3,
    "positions": 12,
    "half": 3,
    "V": 70,
    "W": 3,
    "F": 10,
    "C": 12,
    "K": 3,
    "I": 64,
    "G": 2,
    "O": 11,
}
CASES = [
    pytest.param(name, i, dtype, id=f"{name}-{i}-{dtype}")
    for name, variants in VARIANTS.items()
    for i in range(len(variants))
    for dtype in DTYPES
]


def make_session(model, device="cpu", options=None, **provider_options):
    return ort_ops.make_session(model, [(PROVIDERS[device], provider_options)], options)


def values(name, shape, dtype, size):
    """Sensible values of an input: lengths that fit, decays of at most 0, pages and rows that exist."""
    if name == "cu_seqlens":
        ends = {"total": size["total"], "Q": size["N"]}["total" if "S" in size["symbols"] else "Q"]
        return torch.linspace(0, ends, shape[0]).round().to(torch.int32)
    integers = {
        "seq_lens": lambda: torch.arange(4, 4 + shape[0]),
        "query_lens": lambda: size["Nq"] - torch.arange(shape[0]),
        "cu_query_lens": lambda: torch.linspace(0, size["Nq"], shape[0]).round(),
        "block_table": lambda: torch.randperm(size["P"])[: shape[0] * shape[1]].reshape(shape),
        "state_index": lambda: torch.randperm(size["P"])[: shape[0]],
        "initial_count": lambda: 3 + torch.arange(shape[0]),
        "top_k": lambda: 5 + torch.arange(shape[0]),
        "position": lambda: 7 + torch.arange(shape[0]),
        "token_counts": lambda: torch.randint(0, 3, shape) + (torch.randint(0, 2, shape) << 30),
        "count_index": lambda: torch.randperm(size["P"])[: shape[0]],
        "allowed_tokens": lambda: torch.randint(-(2**31), 2**31, shape),
        "active": lambda: torch.arange(shape[0]),
        "seed": lambda: torch.randint(-(2**62), 2**62, shape),
    }
    if name in integers:
        return integers[name]().to(dtype)
    if name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        return torch.rand(shape) / 2 + 0.3
    if name in ("key_scale", "value_scale"):
        return 0.01 + 0.02 * torch.rand(shape)
    if dtype in (torch.int8, torch.uint8):
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    if name.startswith("log_decay"):
        return -torch.rand(shape)
    if name == "beta":
        return 2 * torch.rand(shape)
    if name == "key":  # of length 1: longer ones have the delta rule diverge
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
    if name in ("normalizer", "initial_norm"):
        return 2 + torch.rand(shape)
    return torch.randn(shape).to(dtype)


def variant(name, index, dtype):
    """(operator, inputs as torch tensors or None, attributes) of a variant."""
    op, (extra, attrs, sizes) = OPS[name], VARIANTS[name][index]
    rank_of = {"per_token": 3, "per_key": 4, "one": 1, "channels": 3}
    said = {words[1]: words[0] for e in extra if len(words := e.split()) == 2}
    ranks = {name: rank_of[word] for name, word in said.items() if word in rank_of}  # of others the first
    forms = {name: dtype if word == "narrow" else word for name, word in said.items() if word in ("narrow", *spec.TYPES["C"])}
    present = {t.name for t in op.inputs if not t.optional} | {e.split()[-1] for e in extra}
    size = {**SIZES, **sizes, "symbols": op.symbols}
    given = op.given(present, attrs)
    size, inputs = op.equal_sizes(size, given), {}
    for t in op.inputs:
        inputs[t.name] = None
        if t.name in present:
            axes = op.shape_of(t, given, ranks.get(t.name)).ordered(attrs.get("layout", "bhnd"))
            shape = [axis.size(size) for axis in axes]
            kind = TORCH_DTYPES[ort_models.type_name(t, dtype, present, forms)]
            inputs[t.name] = values(t.name, spec.in_elements(shape, kind), kind, size)
    return op, inputs, attrs


def shapes_of(inputs):
    return {name: list(t.shape) for name, t in inputs.items() if t is not None}


def same_bits(a, b):
    views = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(views[a.element_size()]), b.view(views[b.element_size()]))
    )


def check_variant(name, index, dtype, folder, device):
    """One variant's node gives bit for bit what the C interface gives, from our kernel, in place and not."""
    op, inputs, attrs = variant(name, index, dtype)
    inputs = {n: t if t is None else t.to(device) for n, t in inputs.items()}
    before = {n: t.clone() for n, t in inputs.items() if t is not None}
    model = ort_models.node_model(op, shapes_of(inputs), attrs, dtype, forms=ort_models.forms_of(inputs))
    session = make_session(model, device, ort_models.profiled(onnxruntime.SessionOptions(), folder))
    expected = run_kernel(name, inputs, attrs, threads=0, ops=OPS)
    found = ort_models.run_node(session, op, inputs, attrs)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert same_bits(found[key], tensor), f"{key}: {(found[key].double() - tensor.double()).abs().max()}"
    assert all(same_bits(inputs[n], t) for n, t in before.items()), "an input changed"
    in_place = ort_models.run_node(session, op, inputs, attrs, in_place=True)
    for key, tensor in expected.items():
        assert same_bits(in_place[key], tensor), f"{key} in place"
    for t in op.active_outputs(attrs):
        if t.takes and inputs.get(t.takes) is not None:
            assert same_bits(inputs[t.takes], expected[t.name]), f"{t.takes} was not updated in place"
    assert ort_models.nodes_that_ran(session) == [(name, PROVIDERS[device])] * 2
