"""CPU kernels of GatedDeltaRule against the float64 reference; tolerances are those of support.delta_cases."""

import time
from itertools import product

import pytest
import torch

from leanfleet import native, spec
from leanfleet.export import gated_delta_rule, gated_delta_rule_, reference
from support.delta_cases import GRAD, NAME, assert_right, long_keys, make, swap
from support.kernels import run_kernel

pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")
LENGTHS = (1, 2, 3, 4, 5, 31, 32, 33, 40, 64, 97)
# Hq, Hk, Hv: all alike, inverse grouping, grouped queries, both kinds of sharing at once.
HEADS = ((2, 2, 2), (2, 2, 6), (6, 2, 2), (4, 2, 8), (8, 2, 4), (1, 1, 1))
# D, Dv: whole vectors, ends of them, one element.
WIDTHS = ((1, 1), (5, 7), (16, 16), (32, 24), (20, 50), (64, 128), (128, 33))


def check(inputs, attrs, threads=2, in_place=False, factor=2.0):
    before = {name: x.clone() for name, x in inputs.items()}
    given = {name: x.clone() for name, x in inputs.items()}
    found = run_kernel(NAME, given, attrs, threads, in_place=in_place)
    assert_right(found, inputs, attrs, factor)
    for name, x in before.items():
        if not (in_place and name == "initial_state" and attrs.get("return_state")):
            assert torch.equal(given[name].nan_to_num(), x.nan_to_num()), name
    return found


@pytest.mark.everywhere
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n):
    for decay, state, v_first in product((None, "token", "key"), (False, True), (0, 1)):
        inputs = make(n, decay=decay, state=state, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first})


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads):
    for n, (decay, layout) in product((1, 40), product(("token", "key"), ("bhnd", "bnhd"))):
        inputs = make(n, heads=heads, d=16, dv=24, decay=decay, layout=layout, state=True, unit=False)
        check(inputs, {"normalize_qk": 1, "return_state": 1, "layout": layout, "scale": 0.7})


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_widths_and_types(widths, dtype):
    for n, v_first in product((1, 3, 37), (0, 1)):
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, state=True, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first})


@pytest.mark.parametrize("threads", (1, 3, 8))
def test_few_states_for_many_threads(threads):
    """Ranges of columns."""
    for n, v_first in product((1, 70), (0, 1)):
        inputs = make(n, b=1, heads=(1, 1, 1), d=32, dv=100, state=True, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first}, threads)


def test_states_larger_than_the_cache():
    """Those that are not changed in place are streamed past it."""
    for n, v_first in product((1, 2), (0, 1)):
        inputs = make(n, b=2, heads=(2, 2, 16), d=256, dv=272, state=True, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first})


def test_without_a_state():
    """Nothing asks for the last state, so it stands in scratch memory."""
    for n, decay, state, v_first in product((1, 2, 3, 9, 50), ("token", "key"), (False, True), (0, 1)):
        check(make(n, d=9, dv=20, decay=decay, state=state, v_first=v_first), {"state_v_first": v_first})


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_packed_requests(layout):
    """Also requests without tokens, and tokens of no request, which are NaN and have output 0."""
    for offsets in (True, [0, 1, 2, 40], [0, 0, 0], [3, 8, 45], [0, 0, 33, 33]):
        for decay, pool in product(("token", "key"), (False, True)):
            inputs = make(50, packed=offsets, decay=decay, pool=pool, state=True, layout=layout)
            check(inputs, {"return_state": 1, "layout": layout})


def test_wrong_offsets_stay_inside():
    inputs = make(20, packed=[0, 8, 20], state=True)
    inputs["cu_seqlens"] = torch.tensor([-5, 8, 1000], dtype=torch.int32)
    check(inputs, {"return_state": 1})


@pytest.mark.parametrize("in_place", (False, True))
def test_pools(in_place):
    """Rows that no request names stay as they are; one outside the pool is zeros and is written nowhere."""
    for n, v_first in product((1, 3, 40), (0, 1)):
        inputs = make(n, b=3, pool=True, v_first=v_first)
        inputs["state_index"][1] = 17
        found = check(inputs, {"return_state": 1, "state_v_first": v_first}, in_place=in_place)
        others = [row for row in range(6) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"][others], inputs["initial_state"][others])


def test_pieces_are_the_whole():
    inputs = make(90, state=True, d=16, dv=32)
    whole = run_kernel(NAME, inputs, {"return_state": 1})
    state, outputs = inputs["initial_state"], []
    for start, stop in ((0, 1), (1, 37), (37, 38), (38, 90)):
        piece = {k: x[:, :, start:stop].contiguous() for k, x in inputs.items() if k != "initial_state"}
        found = run_kernel(NAME, {**piece, "initial_state": state}, {"return_state": 1})
        state = found["final_state"]
        outputs.append(found["output"])
    assert torch.allclose(torch.cat(outputs, 2), whole["output"], atol=2e-5, rtol=1e-5)
    assert torch.allclose(state, whole["final_state"], atol=2e-5, rtol=1e-5)


def adversarial():
    """Names and inputs on which a careless form overflows, cancels or loses what it carries over many tokens."""
    yield "slow decay", make(1500, b=1, d=16, dv=16, decay=-1e-5, state=True)
    yield "strong decay", make(200, b=1, decay=-100.0, state=True)
    yield "no memory", make(100, b=1, decay=float("-inf"), state=True)
    mixed = make(300, b=1, state=True)
    mixed["log_decay"].view(-1)[::3] = 0.0
    mixed["log_decay"].view(-1)[1::7] = -100.0
    yield "mixed decays", mixed
    for beta in (0.0, 1.0, 2.0):
        inputs = make(300, b=1, d=16, dv=16, decay=None, state=True)
        inputs["beta"].fill_(beta)
        yield f"beta {beta:g}", inputs
    inputs = make(300, b=1, d=16, dv=16, decay=None, state=True)
    near = inputs["key"][:, :, :1] + 1e-3 * inputs["key"]
    inputs["key"] = near / near.norm(dim=-1, keepdim=True)
    yield "nearly parallel keys", inputs
    inputs = {name: x.clone() for name, x in inputs.items()}
    inputs["beta"].fill_(2.0)
    yield "nearly parallel keys, beta 2", inputs
    inputs = make(64, b=1, d=16, dv=16, decay=-0.1, unit=False)
    inputs["key"] /= 2  # of length 2: with beta up to 2 the state grows by far
    yield "keys that are too long", inputs
    yield "zero keys", make(50) | {"key": torch.zeros(2, 2, 50, 8)}


@pytest.mark.parametrize("name", [name for name, _ in adversarial()])
def test_adversarial_inputs(name):
    """A chunk's scores are rounded each by itself, so where keys are parallel and states flip with every token (beta 2) their
    errors do not cancel as the recurrence's do: the root of a chunk's 32 tokens more of them is left."""
    inputs = dict(adversarial())[name]
    check(inputs, {"return_state": 1}, factor=6.0 if "parallel" in name else 2.0)
    if name != "keys that are too long":
        check(inputs, {"return_state": 1, "normalize_qk": 1}, factor=6.0 if "parallel" in name else 2.0)


def test_decay_of_each_key_dimension_that_is_all_the_same():
    inputs = make(70, d=16, dv=20, state=True)
    alike = inputs | {"log_decay": inputs["log_decay"].unsqueeze(-1).expand(-1, -1, -1, 16).contiguous()}
    a, b = (run_kernel(NAME, x, {"return_state": 1}) for x in (inputs, alike))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("role", ("query", "key", "value", "beta", "initial_state"))
def test_values_that_are_not_finite_stay_in_their_head(role):
    """They reach no other head, request or earlier request, and what depends on them is not finite."""
    for n, bad in product((3, 40), (float("nan"), float("inf"))):
        inputs = make(n, d=16, dv=20, state=True)
        clean = run_kernel(NAME, inputs, {"return_state": 1})
        inputs[role] = inputs[role].clone()
        inputs[role][1, 1].view(-1)[-1 if role == "initial_state" else 0] = bad
        found = run_kernel(NAME, inputs, {"return_state": 1})
        states = {"query": (2, 3), "key": (2, 3)}.get(role, (1,))
        for head in range(4):
            touched = head in states
            for name in found:
                assert torch.equal(found[name][0], clean[name][0])
                if not touched:
                    assert torch.equal(found[name][1, head], clean[name][1, head]), (name, head)
        if role == "query":
            assert not found["output"][1, 2:, 0].isfinite().any()
        else:
            assert not found["output"][1, states[0], -1].isfinite().all()


@pytest.mark.parametrize("operator", ["GatedDeltaRule", "GatedDeltaRuleGrad", "CausalLinearDecay", "CausalLinearDecayGrad"])
def test_strong_decays_cost_no_more(operator):
    """Products that they make smaller than normal numbers count as 0, which costs nothing, and the thread's own such numbers
    stay what they are. Without that it is up to 5 times the time."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, more = (torch.randn(1, 4, 256, 64, generator=generator) for _ in range(4))
    key = torch.nn.functional.normalize(key, dim=-1)
    inputs = {"query": query, "key": key, "value": value}
    if operator.startswith("Gated"):
        inputs["beta"] = torch.rand(1, 4, 256, generator=generator)
    if operator.endswith("Grad"):
        inputs["grad_output"] = more
    seconds = {}
    for _ in range(7):
        for decay in (-0.05, -3.0):
            begin = time.perf_counter()
            found = run_kernel(operator, inputs | {"log_decay": torch.full((1, 4, 256), decay)}, threads=1)
            seconds.setdefault(decay, []).append(time.perf_counter() - begin)
    assert min(seconds[-3.0]) < 2 * min(seconds[-0.05]), seconds
    inputs["log_decay"] = torch.full((1, 4, 256), -3.0)
    exact = getattr(reference, spec.all_specs()[operator].snake_name)(**{name: x.double() for name, x in inputs.items()})
    for name, right in zip(found, exact):
        assert (found[name] - right).abs().max() <= 1e-5 * right.abs().max(), name
    small = torch.tensor([1e-39, 1e-44])
    assert torch.equal((small * 1).view(torch.int32), small.view(torch.int32)) and (small > 0).all()


def test_errors_of_shapes():
    def refused(match, inputs, **attrs):
        with pytest.raises(ValueError, match=match):
            run_kernel(NAME, inputs, attrs)

    refused("Hv = 3 is not a multiple of Hk = 2; each of the Hk heads must serve", make(4, heads=(2, 2, 3)))
    refused("Hq = 3 is not a multiple of Hk = 2", make(4, heads=(3, 2, 2)))
    refused("Hq = 4 and Hv = 6; one of the two must be a multiple of the other", make(4, heads=(4, 2, 6)))
    refused("input beta is missing", make(4) | {"beta": None})
    refused(
        r"initial_state has shape \[2,4,8,7\]: axis 2 of \[B,Hv,Dv,D\] is 8; expected 7", make(4, state=True), state_v_first=1
    )
    refused("state_index needs input initial_state", make(4) | {"state_index": torch.zeros(2, dtype=torch.int32)})
    refused("B = 2; with cu_seqlens it must be 1", make(4) | {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)})


def test_errors_of_values(monkeypatch):
    def refused(match, inputs, **attrs):
        with pytest.raises(ValueError, match=match):
            run_kernel(NAME, inputs, attrs)

    for decay, at, place in (("token", (1, 2, 3), r"\[1,2,3\]"), ("key", (1, 2, 3, 4), r"\[1,2,3,4\]")):
        inputs = make(5, decay=decay)
        inputs["log_decay"][at] = 0.5
        refused(rf"log_decay{place} is 0.5 \(batch row 1, head 2, token 3\); ln of a decay lies in \[-inf, 0\]", inputs)
        swapped = inputs | {name: swap(inputs[name], "bnhd") for name in ("query", "key", "value", "log_decay", "beta")}
        refused(r"\(batch row 1, head 2, token 3\)", swapped, layout="bnhd")
        inputs["log_decay"][at] = float("nan")
        refused("log_decay.* is nan", inputs)
    inputs = make(5)
    inputs["beta"][0, 1, 2] = 2.5
    run_kernel(NAME, inputs)
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    refused(r"beta\[0,1,2\] is 2.5.*; expected a number in \[0, 2\]", inputs)
    twice = make(5, b=2, pool=True)
    twice["state_index"][:] = 1
    refused(r"state_index\[1\] is 1, as is state_index\[0\]", twice)
    refused(r"cu_seqlens\[2\] is 6; there are N = 5 tokens", make(5, packed=[0, 2, 6]))
    padded = make(5, packed=[0, 2, 2], pool=True)  # as captured steps pad: tokens of no request, and a request without a row
    padded["state_index"][1] = -1
    run_kernel(NAME, padded)
    padded["state_index"][0] = -1
    refused(r"state_index\[0\] is -1; initial_state has", padded)


@pytest.mark.parametrize("grad", (False, True), ids=("forward", "grad"))
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_keys_for_which_states_grow_without_end(monkeypatch, dtype, grad):
    name = GRAD if grad else NAME
    for layout in ("bhnd", "bnhd"):
        for inputs, attrs, said in long_keys(dtype, layout, grad):
            monkeypatch.delenv("LEANFLEET_CHECK", raising=False)
            run_kernel(name, inputs, attrs)
            monkeypatch.setenv("LEANFLEET_CHECK", "1")
            if said is None:
                run_kernel(name, inputs, attrs)
                continue
            with pytest.raises(ValueError, match=f"{name}: {said}"):
                run_kernel(name, inputs, attrs)


def test_keys_that_decays_of_their_dimensions_do_not_hold(monkeypatch):
    """The slowest of them counts."""
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs = make(5, decay="key")
    inputs["key"][1, 1, 3] *= 2
    inputs["beta"][1, :, 3] = 1.0
    inputs["log_decay"][1, :, 3] = -5.0
    run_kernel(NAME, inputs)
    inputs["log_decay"][1, 2, 3, 6] = -0.5
    with pytest.raises(ValueError, match=r"key\[1,1,3\] .*: it multiplies state 2 "):
        run_kernel(NAME, inputs)


def test_pytorch_forms():
    """The functional form, the one that changes a pool in place, float64 by the reference, and no silent gradient of a pool."""
    inputs = make(6, pool=True)
    found = gated_delta_rule(**inputs, return_state=True)
    assert_right(dict(zip(("output", "final_state"), found)), inputs, {"return_state": 1})
    pool = inputs["initial_state"].clone()
    output = gated_delta_rule_(**inputs | {"initial_state": pool})
    assert torch.equal(output, found[0]) and torch.equal(pool, found[1])
    exact = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    assert torch.equal(gated_delta_rule(**exact), reference.gated_delta_rule(**exact)[0])
    inputs["key"].requires_grad_()
    with pytest.raises(NotImplementedError, match="GatedDeltaRule: state_index is for inference"):
        gated_delta_rule(**inputs).sum().backward()


def test_reference_is_differentiable():
    inputs = make(5, b=1, heads=(1, 1, 2), d=3, dv=2, decay=-0.2, state=True)
    tensors = {k: x.double().requires_grad_() for k, x in inputs.items()}

    def call(*values):
        return reference.gated_delta_rule(**dict(zip(tensors, values)), normalize_qk=1, return_state=1)

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))


def test_the_library_knows_it():
    assert NAME in native.op_names()
