"""CPU kernels of CausalLinearDecay with a decay of each key dimension, and with states [Dv,R], against the float64 reference."""

from itertools import product

import pytest
import torch

from leanfleet.export import causal_linear_decay, causal_linear_decay_
from support.delta_cases import swap
from support.kernels import run_kernel
from support.key_decay_cases import NAMES, assert_right, grads_of, make

pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")
NAME, GRAD = NAMES
# Of steps, and on both sides of the chunks' borders.
LENGTHS = (1, 2, 4, 31, 33, 65)
HEADS = ((2, 2, 2), (2, 2, 6), (6, 2, 2), (4, 2, 8), (8, 2, 4))
# R, Dv
WIDTHS = ((1, 1), (5, 7), (16, 16), (20, 50), (64, 33))
DECAYS = ("head", "token", "key", None)


def check(inputs, attrs, **options):
    before = {name: x.clone() for name, x in inputs.items()}
    given = {name: x.clone() for name, x in inputs.items()}
    found = run_kernel(GRAD if "grad_output" in inputs else NAME, given, attrs, **options)
    assert_right(found, inputs, attrs)
    kept = () if options.get("in_place") else before
    for name in kept:
        assert torch.equal(given[name].nan_to_num(), before[name].nan_to_num()), name
    return found


def check_both(inputs, attrs, **options):
    check(inputs, attrs, **options)
    check(*grads_of(inputs, attrs))


@pytest.mark.everywhere
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n):
    for decay, state, v_first in product(DECAYS, (False, True), (0, 1)):
        inputs = make(n, decay=decay, state=state, v_first=v_first)
        check_both(inputs, {"return_state": 1, "state_v_first": v_first})


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads):
    for n, decay, (layout, v_first) in product((1, 40), ("token", "key"), (("bhnd", 1), ("bnhd", 0))):
        inputs = make(n, heads=heads, d=16, dv=24, decay=decay, layout=layout, state=True, v_first=v_first)
        check_both(inputs, {"return_state": 1, "layout": layout, "scale": 0.7, "state_v_first": v_first})


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_widths_and_types(widths, dtype):
    for n, v_first in product((1, 37), (0, 1)):
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, decay="key", state=True, v_first=v_first, beta=n > 1)
        check_both(inputs, {"return_state": 1, "state_v_first": v_first})


@pytest.mark.parametrize("decay", ("mixed", float("-inf"), -50.0, -1e-6, 0.0))
def test_adversarial_decays(decay):
    """No exponent above 0 is formed, and nothing is divided by a decay."""
    for n, d in ((70, 16), (300, 5)):
        inputs = make(n, b=1, d=d, dv=9, decay=decay, state=True, v_first=1)
        if inputs["log_decay"].dim() == 3:
            inputs["log_decay"] = inputs["log_decay"].unsqueeze(-1).repeat(1, 1, 1, d)
        check_both(inputs, {"return_state": 1, "state_v_first": 1})


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_packed_requests(layout):
    for offsets, decay, pool in product((True, [0, 0, 0], [3, 8, 45]), ("token", "key"), (False, True)):
        inputs = make(50, packed=offsets, decay=decay, pool=pool, state=True, layout=layout, v_first=1)
        attrs = {"return_state": 1, "layout": layout, "state_v_first": 1}
        check(inputs, attrs)
        if not pool:
            check(*grads_of(inputs, attrs))


@pytest.mark.parametrize("in_place", (False, True))
def test_pools(in_place):
    """Rows that no request names stay as they are; one outside the pool is zeros and is written nowhere."""
    for n, (decay, v_first), normalize in product((1, 3, 40), (("key", 0), ("key", 1), ("token", 1)), (0, 1)):
        inputs = make(n, b=3, pool=True, decay=decay, v_first=v_first, normalize=normalize)
        inputs["state_index"][1] = 17
        found = check(inputs, {"return_state": 1, "state_v_first": v_first, "normalize": normalize}, in_place=in_place)
        others = [row for row in range(6) if row not in inputs["state_index"].tolist()]
        for what in ("state", "norm")[: 1 + normalize]:
            assert torch.equal(found[f"final_{what}"][others], inputs[f"initial_{what}"][others])


@pytest.mark.parametrize("threads", (1, 8))
def test_normalised_form(threads):
    """The norm decays as the state's rows do, whatever the order of the state."""
    for n, (decay, v_first), state in product((1, 40), (("key", 0), ("key", 1), ("token", 1), ("head", 1)), (False, True)):
        inputs = make(n, b=1, heads=(6, 2, 2), d=13, dv=40, decay=decay, state=state, v_first=v_first, normalize=True)
        check(inputs, {"normalize": 1, "return_state": 1, "state_v_first": v_first, "scale": 0.3}, threads=threads)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_narrow_states(dtype):
    """Rounded once a call."""
    case = dict(d=13, dv=20, dtype=dtype, state=True, narrow=True)
    for packed, (decay, v_first), pool in product((None, [0, 1, 1, 40]), (("key", 0), ("key", 1), ("token", 1)), (False, True)):
        inputs = make(40 if packed else 1, packed=packed, decay=decay, pool=pool, v_first=v_first, **case)
        check(inputs, {"return_state": 1, "state_v_first": v_first})
        check(inputs, {"state_v_first": v_first})


def test_few_states_for_many_threads():
    for n in (1, 70):
        inputs = make(n, b=1, heads=(1, 1, 1), d=32, dv=100, decay="key", state=True)
        check(inputs, {"return_state": 1}, threads=8)


def test_pieces_are_the_whole():
    inputs = make(90, state=True, d=16, dv=32, decay="key", v_first=1)
    attrs = {"return_state": 1, "state_v_first": 1}
    whole = run_kernel(NAME, inputs, attrs)
    state, outputs = inputs["initial_state"], []
    for start, stop in ((0, 1), (1, 37), (37, 90)):
        piece = {k: x[:, :, start:stop].contiguous() for k, x in inputs.items() if k != "initial_state"}
        found = run_kernel(NAME, {**piece, "initial_state": state}, attrs)
        state = found["final_state"]
        outputs.append(found["output"])
    assert torch.equal(torch.cat(outputs, 2), whole["output"]) and torch.equal(state, whole["final_state"])


def test_orders_of_the_state_and_kinds_of_decay_agree():
    """[R,Dv] and [Dv,R], decays of a head and the same of each of its key dimensions, by different kernels."""
    inputs = make(70, d=16, dv=20, decay="head", state=True)
    turned = inputs | {"initial_state": inputs["initial_state"].mT.contiguous()}
    alike = inputs | {"log_decay": inputs["log_decay"].view(1, -1, 1, 1).repeat(2, 1, 70, 16)}
    plain, v_first, keys = (
        run_kernel(NAME, x, {"return_state": 1, "state_v_first": v}) for x, v in ((inputs, 0), (turned, 1), (alike, 0))
    )
    for other in (v_first | {"final_state": v_first["final_state"].mT}, keys):
        for name in plain:
            assert torch.allclose(plain[name], other[name], atol=2e-5, rtol=1e-5)


def test_errors():
    inputs = make(4, decay="key")
    for algorithm in ("fleet", "lightning"):
        with pytest.raises(ValueError, match=f"algorithm {algorithm}; it must be auto or causal_dot_product then"):
            run_kernel(NAME, inputs, {"algorithm": algorithm})
    check(inputs, {"algorithm": "causal_dot_product"})
    with pytest.raises(ValueError, match=r"axis 3 of \[B,Hv,N,R\] is 7; expected 8"):
        run_kernel(NAME, inputs | {"log_decay": inputs["log_decay"][..., :7].contiguous()})
    with pytest.raises(ValueError, match=r"axis 2 of \[B,Hv,Dv,R\] is 8; expected 7"):
        run_kernel(NAME, make(4, state=True), {"state_v_first": 1})
    inputs["log_decay"][1, 2, 3, 4] = 0.5
    for x, layout in ((inputs, "bhnd"), ({name: swap(x, "bnhd") for name, x in inputs.items()}, "bnhd")):
        with pytest.raises(ValueError, match=r"is 0.5 \(batch row 1, head 2, token 3\); ln of a decay lies in"):
            run_kernel(NAME, x, {"layout": layout})


@pytest.mark.parametrize("normalize", (False, True))
def test_pytorch_forms(normalize):
    """The functional form, the one that changes a pool in place, and gradients through the operator."""
    attrs = {"normalize": int(normalize), "state_v_first": 1}
    inputs = make(6, pool=True, decay="key", v_first=1, normalize=normalize)
    found = causal_linear_decay(**inputs, **attrs, return_state=True)
    names = ("output", "final_state", "final_norm")[: len(found)]
    assert_right(dict(zip(names, found)), inputs, attrs | {"return_state": 1})
    mutated = {name: x.clone() for name, x in inputs.items()}
    assert torch.equal(causal_linear_decay_(**mutated, **attrs), found[0])
    assert torch.equal(mutated["initial_state"], found[1])


@pytest.mark.parametrize("normalize, decay, layout", [(0, "key", "bnhd"), (1, "key", "bhnd"), (1, "token", "bnhd")])
def test_gradients_through_pytorch(normalize, decay, layout):
    """Those of the float64 reference, which differentiates itself."""
    inputs = make(37, heads=(2, 2, 4), decay=decay, state=True, v_first=1, normalize=bool(normalize), layout=layout)
    inputs["log_decay"].clamp_(min=-3.0)
    attrs = dict(normalize=normalize, state_v_first=1, layout=layout, return_state=True)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        tensors = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        outputs = causal_linear_decay(**tensors, **attrs)
        sum((x * torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x)).sum() for x in outputs).backward()
        gradients.append({name: x.grad for name, x in tensors.items()})
    for name, exact in gradients[1].items():
        assert torch.allclose(gradients[0][name].double(), exact, rtol=2e-4, atol=2e-4 * exact.abs().max().item()), name
