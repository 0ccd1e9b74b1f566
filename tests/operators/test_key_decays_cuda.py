"""CUDA kernels of CausalLinearDecay and its gradient with decays of each key dimension, and with states [Dv,R], against the float64
reference; tolerances are those of support.delta_cases."""

from itertools import product

import pytest
import torch

from support.delta_cases import PLAIN
from support.kernels import run_kernel
from support.key_decay_cases import NAMES, assert_near, grads_of, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = ("float32", "float16", "bfloat16")
HEADS = ((2, 2, 2), (2, 2, 6), (6, 2, 2), (4, 2, 8), (8, 2, 4))
WIDTHS = ((128, 128), (64, 64), (20, 50), (1, 1), (96, 72), (256, 40), (130, 20))  # R, Dv


def check(inputs, attrs, in_place=False, factor=PLAIN):
    found = run_kernel(
        NAMES["grad_output" in inputs], {k: x.clone().cuda() for k, x in inputs.items()}, attrs, in_place=in_place
    )
    assert_near(found, inputs, attrs, factor)
    return found


def check_both(inputs, attrs):
    check(inputs, attrs)
    check(*grads_of(inputs, attrs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths_and_types(widths, dtype):
    for n, v_first in product((1, 4, 33, 130), (0, 1)):
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, decay="key", state=True, v_first=v_first)
        check_both(inputs, {"return_state": 1, "state_v_first": v_first, "scale": 0.1})


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads):
    for n, layout, normalize in product((1, 40), ("bhnd", "bnhd"), (0, 1)):
        inputs = make(n, heads=heads, d=32, dv=48, decay="key", layout=layout, state=True, normalize=normalize)
        check(inputs, {"return_state": 1, "layout": layout, "scale": 0.7, "normalize": normalize})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ("mixed", "edge", float("-inf"), -50.0, -1e-6, 0.0))
def test_adversarial_decays(decay, dtype):
    for n in (63, 64, 65, 700):
        inputs = make(n, b=1, d=64, dv=72, dtype=dtype, decay=decay, state=True, v_first=1)
        if inputs["log_decay"].dim() == 3:
            inputs["log_decay"] = inputs["log_decay"].unsqueeze(-1).repeat(1, 1, 1, 64)
        # A rounding of exp(-1e-6) is the same in every token: CUDA's lies one unit from PyTorch's, and 3.5 times as far off.
        for algorithm in ("auto", "causal_dot_product"):
            check(inputs, {"return_state": 1, "state_v_first": 1, "scale": 0.1, "algorithm": algorithm}, factor=8.0)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_requests_and_pools(dtype, in_place):
    offsets = [3, 3, 4, 67, 131, 196, 396]
    for narrow, normalize, v_first in product((False, dtype != "float32"), (0, 1), (0, 1)):
        case = dict(packed=offsets, pool=True, narrow=narrow, normalize=normalize, v_first=v_first)
        inputs = make(400, d=32, dv=40, heads=(2, 1, 2), dtype=dtype, decay="key", **case)
        inputs["state_index"][2] = 17
        found = check(inputs, {"return_state": 1, "state_v_first": v_first, "normalize": normalize}, in_place)
        others = [row for row in range(9) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"].cpu()[others], inputs["initial_state"][others])


@pytest.mark.parametrize("decay", ("head", "token", None))
@pytest.mark.parametrize("algorithm", ("auto", "causal_dot_product", "fleet", "lightning"))
def test_states_in_the_other_order(algorithm, decay):
    """The same as from [R,Dv], to the bit where the state alone is turned."""
    for n, normalize in product((1, 5, 40, 300), (0, 1)):
        inputs = make(n, d=48, dv=72, decay=decay, state=True, normalize=normalize, v_first=1)
        attrs = {"return_state": 1, "state_v_first": 1, "algorithm": algorithm, "normalize": normalize}
        found = check(inputs, attrs)
        if n > 16 or normalize:
            plain = inputs | {"initial_state": inputs["initial_state"].mT.contiguous()}
            plain = run_kernel(NAMES[0], {k: x.cuda() for k, x in plain.items()}, attrs | {"state_v_first": 0})
            assert torch.equal(plain["output"], found["output"])
            assert torch.equal(plain["final_state"], found["final_state"].mT)


def test_wide_keys_are_refused():
    inputs = {k: x.cuda() for k, x in make(3, d=260, dv=8, decay="key").items()}
    with pytest.raises(NotImplementedError, match="on CUDA R goes up to 256 then"):
        run_kernel(NAMES[0], inputs, {})
