"""Function bodies in onnxruntime without the library, against the float64 reference; how models come to carry them."""

import re
import warnings
from pathlib import Path

import onnx
import onnx_ir
import onnxruntime
import pytest
import torch

from leanfleet import spec
from leanfleet.export import function_bodies, reference
from support import block_cases, conv_cases, delta_cases, gate_cases, norm_cases, ort_models, product_cases, sampling_cases
from support.attention_cases import make_case, one_after_another, packed
from support.kernels import TORCH_DTYPES
from support.linear_cases import INF, LINEAR, OPS, PACKED_CASES, fill, int32, one_node_model, session_of

OLDEST = "1.20.1"
RUNTIME = tuple(map(int, re.findall(r"\d+", onnxruntime.__version__)[:2]))
takes_overloads = pytest.mark.skipif(RUNTIME < (1, 27), reason="onnxruntime before 1.27 ignores overloads")
STEPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # from 1 to the next number


# Models


def converted(inputs, dtype):
    """T and F inputs in another type."""
    keep = (None, *reference.FORMS)
    return {n: t.to(dtype) if t is not None and t.dtype not in keep and t.is_floating_point() else t for n, t in inputs.items()}


def disturbed(inputs, seed):
    """float64 inputs off by what float32 rounds away: what comes of it says how well conditioned the outputs are."""
    signs = torch.Generator().manual_seed(seed)
    return {
        n: t * (1 + 2.0**-24 * torch.randint(-1, 2, t.shape, generator=signs))
        if t is not None and t.dtype.itemsize > 1 and t.is_floating_point()
        else t
        for n, t in inputs.items()
    }


def check_outputs(name, found, inputs, attrs, dtype="float32"):
    """At most 4 times what the reference loses in the node's own types, or by a rounding of its inputs, or a step of
    the type at the largest value."""
    op, function = OPS[name], getattr(reference, OPS[name].snake_name)
    double = converted(inputs, torch.float64)
    judge = function(**double, **attrs)
    losses = [function(**inputs, **attrs)] + [function(**disturbed(double, seed), **attrs) for seed in range(4)]
    active = op.active_outputs(attrs)
    assert list(found) == [t.name for t in active] and len(judge) == len(active)
    for t, j, *others in zip(active, judge, *losses, strict=True):
        actual = found[t.name]
        assert actual.shape == j.shape, t.name
        if t.type in "IL" or t.name.endswith(("cache_out", "scale_out")):
            numbers = map(reference.numbers_of, (actual, others[0]))
            torch.testing.assert_close(*numbers, rtol=0, atol=0, equal_nan=True)
            continue
        finite = j.isfinite()
        assert torch.equal(actual.double()[~finite], j[~finite]), f"{t.name}: where the reference is not finite"
        if not finite.any():
            continue
        errors = [(x.double() - j)[finite].abs().max().item() for x in (actual, *others)]
        step = STEPS[dtype if t.type == "T" else "float32"]
        bound = 4 * max(*errors[1:], step * j[finite].abs().max().item())
        assert errors[0] <= bound, f"{t.name}: error {errors[0]:.3g}, allowed {bound:.3g}"


def check_body(name, session, inputs, attrs, dtype="float32"):
    given = {n: t.clone() for n, t in inputs.items() if t is not None}
    found = ort_models.run_node(session, OPS[name], given, attrs)
    check_outputs(name, found, inputs, attrs, dtype)
    return found


# LeanAttention: optional inputs and attributes for make_case; present follows from what it returns.

ATTENTION = {
    "plain": dict(absent=("seq_lens",)),
    "lengths": dict(),
    "not causal": dict(causal=0, padded=True),
    "all": dict(append=True, padded=True, window=20, softcap=5.0, sinks=True, scale=0.3),
    "bnhd": dict(append=True, layout="bnhd", padded=True),
    "ragged": dict(variant="ragged", sinks=True, window=1),
    "ragged plain": dict(variant="ragged", absent=("seq_lens",)),
    "ragged append": dict(variant="ragged", append=True, padded=True, softcap=2.0),
    "paged": dict(variant="paged", layout="bnhd", causal=0),
    "paged append": dict(variant="paged", append=True, padded=True, window=64),
    "paged plain": dict(variant="paged", absent=("seq_lens",)),
    "rotary": dict(append=True, padded=True, turned=1.0),
    "rotary interleaved": dict(variant="paged", append=True, layout="bnhd", turned=0.6, positions=60, rotary_interleaved=1),
    "rotary queries": dict(variant="ragged", turned=0.6, padded=True, causal=0),
    "packed": dict(append=True, together=True, layout="bnhd", padded=True),
    "packed rotary": dict(variant="paged", append=True, together=True, turned=1.0),
    "int8": dict(append=True, padded=True, quant=("tensor", "channel"), window=20, softcap=5.0, sinks=True),
    "int8 channel": dict(variant="paged", append=True, turned=1.0, quant=("channel", "tensor")),
    "int8 token": dict(append=True, padded=True, layout="bnhd", quant=("token", "token")),
    "int8 ragged": dict(variant="ragged", append=True, padded=True, quant=("token", "channel")),
    "int8 paged": dict(variant="paged", append=True, together=True, padded=True, quant=("token", "token")),
    "int8 keys": dict(variant="paged", absent=("seq_lens",), quant=("token", None)),
    "int8 values": dict(quant=(None, "channel"), causal=0),
    "fp8": dict(append=True, padded=True, quant=("tensor fp8", "channel fp8"), window=20, softcap=5.0, sinks=True),
    "fp8 token": dict(variant="paged", append=True, together=True, padded=True, quant=("token fp8", "token fp8")),
    "int4": dict(append=True, padded=True, layout="bnhd", quant=("channel int4", "token int4")),
    "int4 ragged": dict(variant="ragged", append=True, padded=True, quant=("token int4", "tensor fp8")),
    "int4 paged": dict(variant="paged", append=True, padded=True, quant=("tensor int4", "channel int4")),
    "int4 values": dict(quant=(None, "channel int4"), causal=0),
    "one after another int8": dict(variant="paged", append=True, padded=True, after=2, quant=("token", "token")),
    "one after another": dict(padded=True, after=3),
    "one after another append": dict(variant="paged", append=True, padded=True, after=0, window=20, turned=1.0),
    "one after another packed": dict(variant="ragged", append=True, padded=True, after=2, together=True, layout="bnhd"),
    "one after another bnhd": dict(padded=True, after=1, layout="bnhd", causal=0, sinks=True),
}
# Nq, lengths of the cache, new tokens where there is padding, and heads and sizes.
ATTENTION_SIZES = [
    (1, (1,), (1,), dict(H=3, Hkv=1, D=4, Dv=7)),
    (1, (0, 63, 64), (0, 1, 1), dict(H=6, Hkv=2, D=8, Dv=5)),
    (5, (65, 5, 6), (5, 0, 3), dict(H=14, Hkv=2, D=3, Dv=8)),
    (64, (130, 64, 0), (64, 63, 0), dict(H=5, Hkv=1, D=8, Dv=8)),
    (65, (65, 200, 70), (65, 1, 64), dict(H=2, Hkv=2, D=6, Dv=3)),
]


def attention_case(seed, size, dtype="float32", absent=(), padded=False, turned=0.0, together=False, after=None, **options):
    """turned: the part of the columns that a rotary encoding turns. together: packed projections. after: packed new tokens
    and so many rows of padding."""
    tokens, lens, counts, sizes = size
    if together:
        sizes = sizes | {"Dv": sizes["D"]}
    if turned:
        options = {**options, "rotary": max(1, int(turned * sizes["D"] / 2))}
    if absent:  # the capacity is the length, so every request must fill its own
        lens, options = (max(lens),) * len(lens), {"spare": 0, "block": 1, **options}
    inputs, attrs = make_case(
        seed, dtype=TORCH_DTYPES[dtype], lens=lens, query_lens=counts if padded else None, Nq=tokens, **sizes, **options
    )
    if absent and "block_table" in inputs:
        inputs["block_table"] = inputs["block_table"][:, : max(lens)].contiguous()
    if after is not None:
        inputs, attrs = one_after_another(inputs, attrs, after)
    inputs, attrs = packed(inputs, attrs) if together else (inputs, attrs)
    return {n: None if n in absent else t for n, t in inputs.items()}, attrs


@pytest.mark.parametrize("case", ATTENTION)
def test_lean_attention(case):
    sessions = {}
    for seed, size in enumerate(ATTENTION_SIZES):
        inputs, attrs = attention_case(seed, size, **ATTENTION[case])
        present = [n for n, t in inputs.items() if t is not None]
        ranks = {n: inputs[n].dim() for n in present}
        forms = ort_models.forms_of(inputs)
        session = sessions.get(str(forms)) or session_of(one_node_model("LeanAttention", present, attrs, ranks, forms=forms))
        sessions[str(forms)] = session
        check_body("LeanAttention", session, inputs, attrs)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("case", ("all", "ragged append", "paged append", "rotary", "rotary interleaved"))
def test_lean_attention_low_precision(case, dtype):
    inputs, attrs = attention_case(3, ATTENTION_SIZES[2], dtype, **ATTENTION[case])
    present = [n for n, t in inputs.items() if t is not None]
    session = session_of(one_node_model("LeanAttention", present, attrs, dtype=dtype))
    check_body("LeanAttention", session, inputs, attrs, dtype)


@pytest.mark.parametrize("variant", ("dense", "ragged", "paged"))
def test_wrong_lengths_offsets_and_pages(variant):
    """They are clamped or masked out, for reading and for writing."""
    inputs, attrs = make_case(1, variant, lens=(20, 33, 18), query_lens=(5, 5, 4), Nq=5, H=6, Hkv=2, D=4, Dv=3, append=True)
    inputs |= {n: torch.nan_to_num(t) for n, t in inputs.items() if t is not None and t.is_floating_point()}
    model = one_node_model("LeanAttention", [n for n, t in inputs.items() if t is not None], attrs)
    session = session_of(model)
    for seq_lens in ((10**9, -5, 2), (0, 18, -(2**31))):
        for query_lens in ((7, 3, -1), (5, 2**31 - 1, 9)):
            inputs |= {"seq_lens": int32(*seq_lens), "query_lens": int32(*query_lens)}
            check_body("LeanAttention", session, inputs, attrs)
    if variant == "ragged":
        for offsets in ((-9, 5, 30, 10**9), (0, 0, 0, 0), (40, 8, 2**31 - 1, 3)):
            check_body("LeanAttention", session, inputs | {"cu_seqlens": int32(*offsets)}, attrs)
    if variant == "paged":
        inputs |= {"seq_lens": int32(36, 40, 20), "query_lens": int32(5, 5, 5)}
        inputs["block_table"][:, :2] = torch.tensor([[-1, 4], [10**9, -(2**31)], [2, 9]])
        check_body("LeanAttention", session, inputs, attrs)


# The linear operators. B, H, Hkv, N, R or D, Dv

SIZES = [(3, 6, 2, 1, 4, 7), (1, 3, 1, 5, 8, 5), (1, 5, 1, 64, 3, 8), (3, 14, 2, 65, 6, 4), (1, 2, 2, 130, 8, 3)]
PACKED = [(0, 1), (0, 0), (3, 3, 4, 67, 131, 196, 200), (0, 130, 130, 135)]  # offsets; N is 4 more than the last


@pytest.mark.parametrize("case", LINEAR)
def test_linear(case):
    name, present, attrs, rank = LINEAR[case]
    session = session_of(one_node_model(name, present, attrs, {"log_decay": rank}))
    for seed, size in enumerate(SIZES):
        check_body(name, session, fill(name, present, size, attrs, rank, seed), attrs)


@pytest.mark.parametrize("case", PACKED_CASES)
def test_packed_requests(case):
    name, present, attrs, rank = PACKED_CASES[case]
    session = session_of(one_node_model(name, present, attrs, {"log_decay": rank}))
    for seed, offsets in enumerate(PACKED):
        size = (1, *SIZES[seed][1:3], offsets[-1] + 4, *SIZES[seed][4:])
        found = check_body(name, session, fill(name, present, size, attrs, rank, seed, offsets=offsets), attrs)
        assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("case", ("decay norm carried", "grad per token", "normalized carried", "normalized grad unit rows"))
def test_linear_low_precision(case, dtype):
    name, present, attrs, rank = LINEAR[case]
    session = session_of(one_node_model(name, present, attrs, {"log_decay": rank}, dtype))
    check_body(name, session, fill(name, present, SIZES[3], attrs, rank, 5, dtype), attrs, dtype)


def test_wrong_offsets_and_rows():
    name, present, attrs, rank = PACKED_CASES["decay pool"]
    session = session_of(one_node_model(name, present, attrs, {"log_decay": rank}))
    inputs = fill(name, present, (1, 6, 2, 9, 4, 3), attrs, rank, offsets=(0, 4, 9))
    for offsets in ((-5, 4, 99), (8, 3, 2**31 - 1), (50, 60, 70), (-9, -9, -9)):
        inputs |= {"cu_seqlens": int32(*offsets), "state_index": int32(2**31 - 1, -1)}
        check_body(name, session, inputs, attrs)


@pytest.mark.parametrize("decay", (-60.0, -1e30, -INF, 0.0, -1e-4))
def test_extreme_decay(decay):
    """Far below the range of float32, zero, none, and scores that overflow above the diagonal: no NaN."""
    for name, present, attrs in (
        ("CausalLinearDecay", ["log_decay"], dict(return_state=1)),
        ("CausalLinearDecayGrad", ["log_decay"], dict(grad_decay=1)),
    ):
        session = session_of(one_node_model(name, present, attrs, {"log_decay": 1}))
        inputs = fill(name, present, (2, 6, 6, 200, 4, 5), attrs, 1) | {"log_decay": torch.full((6,), decay)}
        check_body(name, session, inputs, attrs)
    query, key = inputs["query"].clone(), inputs["key"].clone()
    query[:, :, 0], key[:, :, 1:] = 1e30, 1e30
    forward = session_of(one_node_model("CausalLinearDecay", ["log_decay"], {}, {"log_decay": 1}))
    found = ort_models.run_node(
        forward,
        OPS["CausalLinearDecay"],
        {"query": query, "key": key, "value": inputs["value"] * 1e-30, "log_decay": inputs["log_decay"]},
    )
    assert found["output"].isfinite().all()


def test_small_normalizers_are_held():
    """Denominators on both sides of eps, negative and zero ones too, and rows of zeros under normalize_qk."""
    sign = torch.tensor([1.0, -1.0, 0.0, 1e-3, -1e-3]).view(1, 1, 5, 1)
    query, key, value = sign * torch.ones(1, 2, 5, 3), torch.ones(1, 1, 5, 3), torch.randn(1, 1, 5, 4)
    inputs = {"query": query, "key": key, "value": value}
    attrs = dict(normalize=1, eps=0.5)
    check_body("CausalLinearDecay", session_of(one_node_model("CausalLinearDecay", [], attrs)), inputs, attrs)
    inputs["coefficients"] = torch.tensor([0.0, 1.0])
    for attrs in (dict(eps=0.5), dict(eps=0.5, normalize_qk=1)):
        model = one_node_model("NormalizedLinearAttention", ["coefficients"], attrs)
        found = check_body("NormalizedLinearAttention", session_of(model), inputs, attrs)
        assert (found["normalizer"].abs() < 0.5).any() and (found["normalizer"].abs() > 0.5).any()
        grad = {**inputs, **found, "grad_output": torch.randn(1, 2, 5, 4)}
        model = one_node_model("NormalizedLinearAttentionGrad", ["coefficients"], attrs)
        check_body("NormalizedLinearAttentionGrad", session_of(model), grad, attrs)


def test_counts_stay_at_their_end():
    randn, states = torch.randn, ["initial_state", "initial_key_sum", "initial_value_sum", "initial_count"]
    inputs = {
        "query": randn(2, 2, 5, 3),
        "key": randn(2, 1, 5, 3),
        "value": randn(2, 1, 5, 4),
        "initial_state": randn(2, 1, 3, 4),
        "initial_key_sum": randn(2, 1, 3),
        "initial_value_sum": randn(2, 1, 4),
        "initial_count": int32(2**31 - 6, 2**31 - 5),
    }
    model = one_node_model("NormalizedLinearAttention", states, dict(return_state=1))
    found = ort_models.run_node(session_of(model), OPS["NormalizedLinearAttention"], inputs, dict(return_state=1))
    assert found["final_count"].tolist() == [2**31 - 1] * 2


def status_bytes(field):
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def test_memory_is_linear_in_tokens():
    name, present, attrs, rank = LINEAR["grad per token"]
    tokens = 4096
    inputs = fill(name, present, (1, 1, 1, tokens, 2, 2), attrs, rank)
    session = session_of(one_node_model(name, present, attrs, {"log_decay": rank}), enable_cpu_mem_arena=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present use
    before = status_bytes("VmRSS")
    ort_models.run_node(session, OPS[name], inputs, attrs)
    assert status_bytes("VmHWM") - before < tokens * tokens * 4 / 4


# GatedDeltaRule: arguments of delta_cases.make, attributes

DELTA = {
    "plain": (dict(decay=None), {}),
    "per token": (dict(state=True, heads=(2, 2, 6)), dict(return_state=1)),
    "per key": (dict(decay="key", heads=(6, 2, 2), state=True, v_first=True), dict(return_state=1, state_v_first=1)),
    "bnhd": (dict(heads=(8, 2, 4), layout="bnhd", unit=False), dict(normalize_qk=1, layout="bnhd", scale=0.3)),
    "bnhd per key": (dict(decay="key", layout="bnhd"), dict(layout="bnhd", return_state=1)),
    "pool": (dict(pool=True, v_first=True), dict(return_state=1, state_v_first=1)),
    "packed": (dict(packed=True), dict(return_state=1)),
    "packed unit rows": (dict(packed=[3, 20, 20, 37]), dict(normalize_qk=1)),
    "packed pool": (dict(packed=[2, 2, 30, 38], pool=True, decay="key", layout="bnhd"), dict(return_state=1, layout="bnhd")),
    "nothing packed": (dict(packed=[0, 0, 0], state=True), dict(return_state=1)),
}


def delta_body(inputs, attrs, dtype="float32", opset=20):
    rank = inputs["log_decay"].dim() if "log_decay" in inputs else None
    name = "GatedDeltaRuleGrad" if "grad_output" in inputs else "GatedDeltaRule"
    return session_of(one_node_model(name, inputs, attrs, {"log_decay": rank}, dtype, opset))


@pytest.mark.parametrize("case", DELTA)
def test_gated_delta_rule(case):
    options, attrs = DELTA[case]
    session = None
    for n in (40, 41):
        inputs = delta_cases.make(n, **options)
        session = session or delta_body(inputs, attrs)
        check_body("GatedDeltaRule", session, inputs, attrs)
    if "pool" in case:
        inputs["state_index"][0], inputs["state_index"][1] = 2**31 - 1, -1
        check_body("GatedDeltaRule", session, inputs, attrs)


@pytest.mark.parametrize("case", [case for case in DELTA if "pool" not in case])
def test_gated_delta_rule_grad(case):
    """Also over more tokens than a chunk has, and of the gradient of the output alone."""
    options, attrs = DELTA[case]
    session = None
    for n in (40, 70):
        inputs, grad_attrs = delta_cases.with_grads(delta_cases.make(n, **options), attrs)
        session = session or delta_body(inputs, grad_attrs)
        check_body("GatedDeltaRuleGrad", session, inputs, grad_attrs)
    inputs, _ = delta_cases.with_grads(delta_cases.make(5, **options), attrs, last=False)
    alone = {name: x for name, x in grad_attrs.items() if name not in ("grad_state", "grad_decay")}
    check_body("GatedDeltaRuleGrad", delta_body(inputs, alone), inputs, alone)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_low_precision(dtype):
    inputs, attrs = delta_cases.make(20, dtype=dtype, state=True), {"return_state": 1, "normalize_qk": 1}
    check_body("GatedDeltaRule", delta_body(inputs, attrs, dtype), inputs, attrs, dtype)
    inputs, attrs = delta_cases.with_grads(inputs, attrs)
    check_body("GatedDeltaRuleGrad", delta_body(inputs, attrs, dtype), inputs, attrs, dtype)


# Models: what attach does


def test_opsets():
    newest = {(1, 20): 21, (1, 21): 22, (1, 22): 22, (1, 23): 23}.get(RUNTIME, 24)  # of those that this onnxruntime reads
    for name, present, attrs, rank in (LINEAR["grad per token"], PACKED_CASES["decay pool"], LINEAR["normalized all"]):
        for opset in {18, 19, 21, newest}:
            model = one_node_model(name, present, attrs, {"log_decay": rank}, opset=opset)
            assert {o.domain: o.version for o in model.functions[0].opset_import} == {"": opset}
            offsets = (0, 3, 70) if "cu_seqlens" in present else None
            inputs = fill(name, present, (1, 6, 2, 70, 4, 3), attrs, rank, offsets=offsets)
            check_body(name, session_of(model), inputs, attrs)
    inputs, attrs = attention_case(0, ATTENTION_SIZES[2], **ATTENTION["all"])
    present = [n for n, t in inputs.items() if t is not None]
    for opset in {18, 19, 21, newest}:
        session = session_of(one_node_model("LeanAttention", present, attrs, opset=opset))
        check_body("LeanAttention", session, inputs, attrs)


def normalized_nodes(attrs_of_nodes, inputs=("query", "key", "value")):
    """A model of NormalizedLinearAttention nodes on the same inputs, with their outputs."""
    op = OPS["NormalizedLinearAttention"]
    nodes, outputs = [], []
    for i, attrs in enumerate(attrs_of_nodes):
        rename = {"output": f"output{i}", "normalizer": f"normalizer{i}"}
        nodes.append(ort_models.make_node(op, inputs, attrs, f"node{i}", rename=rename))
        outputs.append((f"output{i}", 1, ["B", "H", "N", "Dv"]))
    values = [
        (n, 1, list(shape))
        for n, shape in zip(inputs, (("B", "H", "N", "D"), ("B", "K", "N", "D"), ("B", "K", "N", "Dv")), strict=True)
    ]
    return ort_models.make_model(nodes, values, outputs)


def test_overloads_of_an_operator_need_a_newer_onnxruntime(monkeypatch):
    """Said where an older one is installed, or none; not where the new one is."""

    installed = {}

    def version(package):
        if package not in installed:
            raise function_bodies.metadata.PackageNotFoundError(package)
        return installed[package]

    def install(packages):
        installed.clear()
        installed.update(packages)

    monkeypatch.setattr(function_bodies.metadata, "version", version)
    model = onnx_ir.from_proto(normalized_nodes([{}, {"eps": 1e-3}]))
    older = (
        {},
        {"onnxruntime": "1.26.0"},
        {"onnxruntime-gpu": "1.9.1"},
        {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.20.1"},
    )
    for packages in older:
        install(packages)
        with pytest.warns(UserWarning, match="nodes of NormalizedLinearAttention that differ.*onnxruntime 1.27 or newer"):
            function_bodies.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for packages in ({"onnxruntime-gpu": "1.27.0"}, {"onnxruntime": "2.0.0"}):
            install(packages)
            function_bodies.attach(model)
        install({})
        function_bodies.attach(onnx_ir.from_proto(normalized_nodes([{}, {}])))


@takes_overloads
def test_equal_nodes_share_a_function():
    model = normalized_nodes([{}, {"eps": 1e-6, "layout": "bhnd"}, {"causal": 0}, {"eps": 1e-3}, {"causal": 0}])
    model = function_bodies.attach(onnx_ir.from_proto(model))
    once = onnx_ir.to_proto(model)
    model = onnx_ir.to_proto(function_bodies.attach(model))
    assert model == once
    onnx.checker.check_model(model, full_check=True)
    assert [n.overload for n in model.graph.node] == ["default", "default", "causal=0", "eps=0.001", "causal=0"]
    assert [f.overload for f in model.functions] == ["default", "causal=0", "eps=0.001"]
    declared = {a.name: onnx.helper.get_attribute_value(a) for a in model.functions[2].attribute_proto}
    assert declared == {"causal": 1, "normalize_qk": 0, "eps": pytest.approx(1e-6), "return_state": 0, "layout": b"bhnd"}
    q, k, v = torch.rand(1, 6, 9, 4), torch.rand(1, 2, 9, 4), torch.rand(1, 2, 9, 5)
    found = session_of(model).run(None, {"query": q.numpy(), "key": k.numpy(), "value": v.numpy()})
    for output, attrs in zip(found, ({}, {}, {"causal": 0}, {}, {"causal": 0}), strict=True):
        expected = reference.normalized_linear_attention(q.double(), k.double(), v.double(), **attrs)[0]
        torch.testing.assert_close(torch.from_numpy(output).double(), expected, rtol=1e-5, atol=1e-6)


def test_one_variant_of_each_operator_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function_bodies.attach(onnx_ir.from_proto(normalized_nodes([{"eps": 0.5}, {"eps": 0.5}])))


def test_overload_names():
    name = function_bodies.overload_name
    assert name("LeanAttention") == "default"
    assert (
        name("LeanAttention", ["seq_lens", "query", "query_lens"], {"scale": 0.125, "causal": 1})
        == "seq_lens.query_lens.scale=0.125"
    )
    assert name("CausalLinearDecay", ["log_decay"], ranks={"log_decay": 3}) == "log_decay3"
    assert name("CausalLinearDecay", ["log_decay"], {"eps": 2e-6}, {"log_decay": 1}) == "log_decay1.eps=2e-06"
    assert name("CausalLinearDecay", [], {"algorithm": "fleet"}) == "default"  # the body is the same


@pytest.mark.parametrize("outputs", (["output"], ["output", "", "final_state"], ["", "", "", "", "", "final_count"]))
def test_outputs_that_nobody_reads(outputs):
    op, attrs = OPS["NormalizedLinearAttention"], {"return_state": 1}
    inputs = fill(op.name, [], (2, 6, 2, 5, 4, 3), attrs)
    model = ort_models.node_model(op, {n: list(t.shape) for n, t in inputs.items()}, attrs, outputs=outputs)
    for info, name in zip(model.graph.output, (o for o in outputs if o), strict=True):
        shape = {"output": (2, 6, 5, 3), "final_state": (2, 2, 4, 3), "final_count": (2,)}[name]
        info.CopyFrom(onnx.helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, shape))
    model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    onnx.checker.check_model(model, full_check=True)
    found = session_of(model).run(None, {n: t.numpy() for n, t in inputs.items()})
    expected = reference.normalized_linear_attention(**inputs, **attrs)
    names = [t.name for t in op.outputs]
    for name, value in zip((o for o in outputs if o), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), expected[names.index(name)], rtol=1e-5, atol=1e-5)


@takes_overloads
@pytest.mark.filterwarnings("ignore:the model has nodes")
def test_nodes_in_subgraphs_and_functions():
    """In a branch of an If, and in functions of others that call each other, with attributes of theirs."""
    op = OPS["NormalizedLinearAttention"]
    names = ["query", "key", "value"]

    def node(attrs, **rename):
        rename["normalizer"] = rename["output"] + "_normalizer"
        return ort_models.make_node(op, names, attrs, rename["output"], rename=rename)

    def info(name, shape=None):
        return onnx.helper.make_tensor_value_info(name, 1, shape)

    make = onnx.helper.make_node
    branches = [
        onnx.helper.make_graph(
            [node({"causal": 0}, output="inner"), make("Identity", ["inner"], ["chosen"])], "then", [], [info("chosen")]
        ),
        onnx.helper.make_graph([make("Identity", ["value"], ["other"])], "else", [], [info("other")]),
    ]
    shape = ["B", "H", "N", "D"]
    model = ort_models.make_model(
        [
            make("If", ["flag"], ["first"], then_branch=branches[0], else_branch=branches[1]),
            make("Outer", names, ["second"], domain="custom", hold=0.25),
        ],
        [("flag", onnx.TensorProto.BOOL, []), *((n, 1, shape) for n in names)],
        [("first", 1, shape), ("second", 1, shape)],
    )
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    opsets = [*model.opset_import]
    referring = node({}, output="once")
    referring.attribute.append(onnx.AttributeProto(name="eps", type=onnx.AttributeProto.FLOAT, ref_attr_name="hold"))
    inner_call = make("Inner", names, ["once"], domain="custom")
    inner_call.attribute.append(onnx.AttributeProto(name="hold", type=onnx.AttributeProto.FLOAT, ref_attr_name="hold"))
    model.functions.extend(
        [
            onnx.helper.make_function("custom", "Inner", names, ["once"], [referring], opsets, ["hold"]),
            onnx.helper.make_function(
                "custom", "Outer", names, ["twice"], [inner_call, node({}, output="twice", value="once")], opsets, ["hold"]
            ),
        ]
    )
    model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    onnx.checker.check_model(model, full_check=True)
    assert {(f.domain, f.overload) for f in model.functions} == {
        (spec.DOMAIN, overload) for overload in ("causal=0", "eps=0.25", "default")
    }
    q, k, v = (torch.rand(1, 2, 5, 4) for _ in range(3))
    first, second = session_of(model).run(
        None, {"flag": torch.tensor(True).numpy(), "query": q.numpy(), "key": k.numpy(), "value": v.numpy()}
    )
    attention = reference.normalized_linear_attention
    torch.testing.assert_close(torch.from_numpy(first), attention(q, k, v, causal=0)[0], rtol=1e-5, atol=1e-6)
    once = attention(q, k, v, eps=0.25)[0]
    torch.testing.assert_close(torch.from_numpy(second), attention(q, k, once)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("Attention",), "no operator Attention; it has LeanAttention"),
        (("LeanAttention", ["cache"]), "LeanAttention has no input cache"),
        (("LeanAttention", [], {"append": 1}), "append needs new_key or packed_qkv"),
        (("LeanAttention", ["new_key", "new_value"], {"append": 1, "packed_qkv": 1}), "packed_qkv excludes new_key"),
        (("LeanAttention", ["new_key"], {"append": 1}), "new_key goes with new_value"),
        (("LeanAttention", ["cu_seqlens", "block_table"]), "cu_seqlens excludes block_table"),
        (("LeanAttention", [], {"window": 3, "causal": 0}), "window needs causal"),
        (("LeanAttention", [], {"layout": "nhd"}), "layout is 'nhd'; expected one of bhnd, bnhd"),
        (
            ("CausalLinearDecay", ["initial_state"], {"normalize": 1}),
            "initial_state goes with initial_norm, because normalize is given",
        ),
        (("CausalLinearDecay", ["log_decay"]), "log_decay has rank None; expected 1, 3 or 4.*shape inference"),
        (("CausalLinearDecay", ["log_decay"], {}, {"log_decay": 2}), "log_decay has rank 2; expected 1, 3 or 4"),
        (("GatedDeltaRule", ["log_decay"]), "log_decay has rank None; expected 3 or 4"),
        (("CausalLinearDecayGrad", [], {"normalize": 1}), "normalize is 1; the normalised form"),
        (("NormalizedLinearAttention", [], {}, {}, 17), "the model has opset 17; its function body needs 18 or newer"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        function_bodies.function_for(*arguments)


def test_error_names_the_node():
    unknown = onnx.helper.make_node("Foo", ["query"], ["y"], "n1", domain=spec.DOMAIN)
    model = ort_models.make_model([unknown], [("query", 1, ["N"])], [("y", 1, ["N"])])
    with pytest.raises(ValueError, match="node n1: leanfleet has no operator Foo"):
        function_bodies.attach(onnx_ir.from_proto(model))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", OPS)
def test_kernels_win_where_the_library_is_registered(name, tmp_path):
    """And without it nothing of ours is left in the graph."""
    if name == "LeanAttention":
        inputs, attrs = attention_case(1, ATTENTION_SIZES[2], **ATTENTION["all"])
        present, rank = [n for n, t in inputs.items() if t is not None], None
    elif name == "SampleTokens":
        inputs, attrs = sampling_cases.make_case(3, 3, 300, all_inputs=True)
        inputs.pop("active")  # every row has log-probabilities
        present, rank = list(inputs), None
    elif name == "GatedDeltaRule":
        inputs, attrs = delta_cases.make(9, state=True), {"return_state": 1}
        present, rank = list(inputs), 3
    elif name == "GatedDeltaRuleGrad":
        inputs, attrs = delta_cases.with_grads(delta_cases.make(9, state=True), {})
        present, rank = list(inputs), 3
    elif name == "CausalConv":
        inputs, attrs = conv_cases.make(9, state=True, lens=(9, 4)), {"return_state": 1}
        present, rank = list(inputs), None
    elif name == "GatedActivation":
        inputs, attrs, present, rank = {"gate_up": torch.randn(2, 3, 2, 40)}, {"activation": "gelu"}, ["gate_up"], None
    elif name == "BlockLinear":
        inputs, attrs = block_cases.make((2, 3, 96, 3, 7), torch.float32, torch.int8), {"round_input": 1}
        present, rank = list(inputs), None
    elif name == "DecayGates":
        inputs, attrs = gate_cases.make((2, 9, 3, None), torch.float32, lens=True)
        present, rank = list(inputs), None
    elif name == "RmsNorm":
        inputs, attrs = norm_cases.make((2, 9, 30, 10), torch.float32, addend=True, gate=False)
        present, rank = list(inputs), None
    elif name == "Linear":
        inputs, attrs = product_cases.make((2, 3, 16, 6), torch.float32, gated=True)
        present, rank = list(inputs), None
    elif name in ("AllReduce", "AllGather"):
        inputs, attrs, present, rank = {"input": torch.randn(7)}, {}, ["input"], None
    elif name == "MergeAttention":
        inputs, attrs = {"partial_output": torch.randn(3, 2, 4, 5, 8), "partial_lse": torch.randn(3, 2, 4, 5)}, {}
        present, rank = list(inputs), None
    else:
        _, present, attrs, rank = next(row for case, row in LINEAR.items() if row[0] == name and row[1])
        inputs = fill(name, present, SIZES[1], attrs, rank)
    model = one_node_model(name, present, attrs, {"log_decay": rank})
    exchanged = name in ("AllReduce", "AllGather", "MergeAttention")  # one form alone, in a world of one
    assert model.graph.node[0].overload not in ("", "" if exchanged else "default")
    least = {"GatedActivation": 4, "Linear": 6, "AllReduce": 0, "AllGather": 0}.get(name, 11)  # operators of its body
    for library in (True, False):
        (folder := tmp_path / str(library)).mkdir()
        session = session_of(model, library, enable_profiling=True, profile_file_prefix=str(folder / "profile"))
        check_body(name, session, inputs, attrs)
        ran = {op for op, _ in ort_models.nodes_that_ran(session)}
        assert ran == {name} if library else name not in ran and len(ran) >= least


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME == (1, 20), reason="this is the run in the oldest runtime")
def test_oldest_runtime():
    """Everything above, once more."""
    passed, text = ort_models.run_in_oldest_runtime(OLDEST, __file__)
    assert passed > len(ATTENTION) + len(LINEAR), text
