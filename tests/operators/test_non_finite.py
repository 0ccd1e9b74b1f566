"""The contract of csrc/ops.toml about NaN and infinities: CPU kernels, function bodies and the reference."""

import pytest
import torch

from leanfleet import spec
from support import non_finite
from support.attention_cases import make_case
from support.kernels import instruction_sets, run_kernel
from support.linear_cases import LINEAR, PACKED_CASES, fill, one_node_model, ort_models, session_of

OPS = spec.all_specs()
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

ATTENTION = {
    "prompt": dict(lens=(37, 150), Nq=37, query_lens=(37, 20)),
    "decode": dict(lens=(5, 200), sinks=True),
    "append": dict(variant="paged", lens=(40, 70), query_lens=(9, 3), Nq=9, append=True, rotary=4),
    "window": dict(variant="ragged", lens=(60, 33), Nq=20, window=7, append=True, layout="bnhd"),
    "softcap": dict(lens=(20, 140), Nq=20, softcap=3.0, sinks=True),
    "not causal": dict(variant="paged", lens=(20, 33), Nq=6, causal=0),
    "odd widths": dict(lens=(20, 140), Nq=17, D=5, Dv=7),
}
LINEAR_CASES = {**LINEAR, **{f"packed {name}": case for name, case in PACKED_CASES.items()}}
REFUSED = ("log_decay", "coefficients")  # by the CPU kernels, when they are not finite


def attention(case, dtype=torch.float32, seed=0):
    options = {"H": 4, "Hkv": 2, "D": 16, "Dv": 16, **ATTENTION[case]}
    return make_case(seed, options.pop("variant", "dense"), dtype, **options)


def linear(case):
    """(operator, inputs, attributes); tokens in several chunks."""
    name, present, attrs, rank = LINEAR_CASES[case]
    offsets = (0, 40, 40, 70) if "cu_seqlens" in present else None
    return name, fill(name, present, (1 if offsets else 2, 4, 2, 73, 4, 5), attrs, rank, offsets=offsets), attrs


def body(name, inputs, attrs):
    given = {n: t for n, t in inputs.items() if t is not None}
    session = session_of(one_node_model(name, given, attrs, {n: t.dim() for n, t in given.items()}))
    return lambda changed: ort_models.run_node(
        session, OPS[name], {n: t.clone() for n, t in changed.items() if t is not None}, attrs
    )


def kernel(name, attrs):
    return lambda inputs: run_kernel(name, inputs, attrs)


def plain_reference(name, attrs):
    return lambda inputs: non_finite.run_reference(name, inputs, attrs)


# Kernels of every instruction set, and bodies.
RUNNERS = pytest.mark.parametrize(
    ("runner", "instruction_set"),
    [*((kernel, name) for name in instruction_sets()), (body, instruction_sets()[-1])],
    indirect=["instruction_set"],
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_kernel(case, dtype, instruction_set):
    inputs, attrs = attention(case, dtype)
    non_finite.sweep("LeanAttention", inputs, attrs, kernel("LeanAttention", attrs), count=4)


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_body(case):
    inputs, attrs = attention(case)
    non_finite.sweep("LeanAttention", inputs, attrs, body("LeanAttention", inputs, attrs))


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_reference(case):
    inputs, attrs = attention(case)
    non_finite.sweep("LeanAttention", inputs, attrs, plain_reference("LeanAttention", attrs))


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_kernel(case, instruction_set):
    name, inputs, attrs = linear(case)
    non_finite.sweep(name, inputs, attrs, kernel(name, attrs), skip=REFUSED, count=4)


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_body(case):
    name, inputs, attrs = linear(case)
    non_finite.sweep(name, inputs, attrs, body(name, inputs, attrs))


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_reference(case):
    name, inputs, attrs = linear(case)
    non_finite.sweep(name, inputs, attrs, plain_reference(name, attrs))


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@RUNNERS
@pytest.mark.parametrize("case", ATTENTION)
def test_what_belongs_to_nobody_reaches_nothing_in_attention(case, runner, instruction_set):
    """Padding rows, unused cache positions and pages, keys before all windows: they are NaN in make_case."""
    inputs, attrs = attention(case)
    assert any(t.isnan().any() for t in inputs.values() if t is not None and t.is_floating_point())
    run = runner("LeanAttention", attrs) if runner is kernel else body("LeanAttention", inputs, attrs)
    results = []
    for value in (NAN, INF, -INF, 3e38, 0.25):
        results.append(
            run(
                {
                    n: torch.where(t.isnan(), torch.full_like(t, value), t) if t is not None and t.is_floating_point() else t
                    for n, t in inputs.items()
                }
            )
        )
        assert same(results[0]["output"], results[-1]["output"]) and same(results[0]["lse"], results[-1]["lse"]), value
    assert results[0]["output"].isfinite().all()


@RUNNERS
@pytest.mark.parametrize("case", [c for c in LINEAR_CASES if "packed" in c or "pool" in c])
def test_what_belongs_to_nobody_reaches_nothing_in_linear_attention(case, runner, instruction_set):
    """Tokens outside all requests, and pool rows that none names."""
    name, inputs, attrs = linear(case)
    run = runner(name, attrs) if runner is kernel else body(name, inputs, attrs)
    results = []
    for value in (NAN, INF, 0.25):
        changed = dict(inputs)
        for n, t in inputs.items():
            if t.is_floating_point() and n not in REFUSED:
                changed[n] = torch.where(t.isnan(), torch.full_like(t, value), t)
        unused = []
        if "state_index" in inputs:
            rows = len(inputs["initial_state"])
            unused = [r for r in range(rows) if r not in inputs["state_index"].tolist()]
            for n in ("initial_state", "initial_norm"):
                if n in inputs:
                    changed[n] = changed[n].clone()
                    changed[n][unused] = value
        found = run(changed)
        for n in found:
            if n.startswith("final") and unused:
                found[n][unused] = 0
        results.append(found)
        for n in found:
            assert same(results[0][n], found[n]), f"{n}: {value}"
    assert all(t.isfinite().all() for t in results[0].values())


@pytest.mark.parametrize("causal", (1, 0))
@RUNNERS
def test_without_eps_one_row_with_a_denominator_of_zero_spoils_itself(runner, causal, instruction_set):
    """The first token's denominator is 0: its own gradients and, where all see all, those of the keys it sees."""
    name, attrs = "NormalizedLinearAttentionGrad", dict(eps=0.0, causal=causal, grad_coefficients=0)
    inputs = {n: torch.rand(1, 1, 70, 3) + 0.1 for n in ("query", "key", "value", "output", "grad_output")}
    inputs["normalizer"] = torch.rand(1, 1, 70) + 1
    inputs["normalizer"][0, 0, 0] = 0
    run = runner(name, attrs) if runner is kernel else body(name, inputs, attrs)
    found = run(inputs)
    assert not found["grad_query"][0, 0, 0].isfinite().any() and found["grad_query"][0, 0, 1:].isfinite().all()
    for n in ("grad_key", "grad_value"):
        assert not found[n][0, 0, 0].isfinite().any()
        assert found[n][0, 0, 1:].isfinite().all() == bool(causal), n


@pytest.mark.parametrize("later", (NAN, INF))
@pytest.mark.parametrize(
    "case", [c for c, (n, _, attrs, _) in LINEAR.items() if not n.endswith("Grad") and attrs.get("causal", 1)]
)
def test_later_tokens_leave_earlier_rows_of_a_body_alone(case, later):
    name, inputs, attrs = linear(case)
    run = body(name, inputs, attrs)
    clean = run(inputs)["output"]
    axis = 1 if attrs.get("layout") == "bnhd" else 2
    changed = {n: t.clone() for n, t in inputs.items()}
    for n in ("query", "key", "value"):
        changed[n].movedim(axis, 0)[21:] = later
    found = run(changed)["output"]
    assert torch.equal(found.movedim(axis, 0)[:21], clean.movedim(axis, 0)[:21])
    assert not found.movedim(axis, 0)[21:].isfinite().any()


def test_a_denominator_of_nan_is_not_held_at_eps(instruction_set):
    """A carried normaliser alone: the numerator stays finite, the quotient must not."""
    decay = fill("CausalLinearDecay", ["initial_state", "initial_norm"], (1, 2, 1, 3, 4, 5), dict(normalize=1))
    decay["initial_norm"][0, 0, 1] = NAN
    sums = fill(
        "NormalizedLinearAttention",
        ["initial_state", "initial_key_sum", "initial_value_sum", "initial_count"],
        (1, 2, 1, 3, 4, 5),
        {},
    )
    sums["initial_key_sum"][0, 0, 1] = NAN
    for name, inputs, attrs in (("CausalLinearDecay", decay, dict(normalize=1)), ("NormalizedLinearAttention", sums, {})):
        for run in (kernel(name, attrs), body(name, inputs, attrs), plain_reference(name, attrs)):
            assert run(inputs)["output"].isnan().all(), name


def test_a_sink_of_nan_where_no_key_is_seen(instruction_set):
    inputs, attrs = make_case(1, "paged", lens=(9, 20), Nq=2, sinks=True)
    inputs["block_table"][0] = -1
    inputs["sinks"][1] = NAN
    for run in (kernel("LeanAttention", attrs), body("LeanAttention", inputs, attrs), plain_reference("LeanAttention", attrs)):
        found = run(inputs)
        assert found["lse"][:, 1].isnan().all() and found["output"][1, 1].isnan().all()
        assert found["output"][:, [0, 2, 3, 4, 5]].isfinite().all()
