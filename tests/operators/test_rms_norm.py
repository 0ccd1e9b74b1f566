"""RmsNorm against the float64 reference: the CPU kernels, the CUDA kernel, and the function body."""

import math

import pytest
import torch

from leanfleet.export import reference, rms_norm
from support import norm_cases
from support.all_calls import check_bodies, check_on_cpu
from support.kernels import run_kernel
from support.norm_cases import DTYPES, NAME, SIZES, assert_right, calls

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_call(dtype, instruction_set):
    check_on_cpu(norm_cases, dtype)


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda(dtype):
    for seed, sizes in enumerate((*SIZES, (2, 700, 4096, 0), (1, 900, 4096, 128))):
        for inputs, attrs in calls(sizes, dtype, seed):
            found = run_kernel(NAME, {name: x.cuda() for name, x in inputs.items()}, attrs)
            assert_right({name: x.cpu() for name, x in found.items()}, inputs, attrs)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("size", (1e30, 1e-30, 0.0))
def test_numbers_whose_squares_float32_does_not_hold(size, dtype, device):
    for width in (40, 4096):
        inputs, attrs = norm_cases.make((1, 2, width, 0), dtype)
        inputs["input"] = (torch.ones(1, 2, width) * size).to(dtype)
        attrs["epsilon"] = 1e-30 if size == 0.0 else 0.0
        found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)["output"].cpu()
        expected = inputs["weight"].expand(1, 2, -1).to(dtype) * bool(size)
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
def test_values_that_are_not_finite(device):
    """A NaN or an infinity reaches its own group alone."""
    inputs, attrs = norm_cases.make((1, 4, 24, 8), torch.float32, gate=False)
    clean = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)["output"].cpu()
    inputs["input"][0, 1, 9], inputs["input"][0, 2, 3], inputs["gate"][0, 3, 20] = math.nan, math.inf, math.nan
    found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)["output"].cpu()
    assert found[0, 1, 8:16].isnan().all() and found[0, 2, 3].isnan() and found[0, 3, 20].isnan()
    assert (found[0, 2, :8].nan_to_num(0.0) == 0).all()
    same = torch.ones(4, 24, dtype=torch.bool)
    same[1, 8:16] = same[2, :8] = same[3, 20] = False
    assert torch.equal(found[0][same], clean[0][same])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("sizes", ((2, 3, 7, 0), (2, 5, 96, 12)), ids=str)
def test_function_body(sizes, dtype):
    check_bodies(norm_cases, sizes, dtype)


def test_in_pytorch():
    """A residual stream's sum and norm, and Mamba-2's gate before groups."""
    x, layer, weight = torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.randn(64)
    normed, total = rms_norm(x, weight, layer, return_sum=True, epsilon=1e-5)
    torch.testing.assert_close(total, x + layer)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + layer, (64,), weight, 1e-5))
    gate = torch.randn(2, 3, 64)
    found = rms_norm(x, weight, gate=gate, gate_first=True, group=16, epsilon=1e-5)
    gated = (x * torch.nn.functional.silu(gate)).unflatten(-1, (4, 16))
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(gated, (16,), None, 1e-5).flatten(-2) * weight)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"weight": torch.ones(4)}, r"weight has shape \[4\]: axis 0 of \[C\] is 4; expected 6"),
        ({"group": 4}, "group is 4, and weight has C = 6 columns; expected a multiple of group"),
        ({"normed": 2}, "normed = 2 needs group = 1 or more; found group = 0"),
        ({"group": 2, "normed": 3}, "normed is 3; expected a multiple of group = 2, and at most C = 6"),
        ({"group": 2, "normed": 8}, "normed is 8; expected a multiple of group = 2, and at most C = 6"),
        ({"return_sum": True}, "return_sum = 1 needs input addend, which is missing"),
        ({"gate_first": True}, "gate_first = 1 needs input gate, which is missing"),
        ({"first_column": 1}, "first_column = 1 needs columns = 1; found columns = 0"),
        ({"columns": True, "first_column": 1}, "first_column is 1, and input has 6 columns; expected 6 from first_column on"),
        (
            {"gate": torch.ones(1, 4, 7), "gate_columns": True, "first_gate_column": 2},
            "first_gate_column is 2, and gate has 7 columns; expected 6 from first_gate_column on",
        ),
        ({"epsilon": -1.0}, "epsilon is -1; expected 0 or more"),
        ({"gate": torch.ones(1, 4, 7)}, r"gate has shape \[1,4,7\]"),
    ),
    ids=str,
)
def test_refused(change, message):
    given = {"input": torch.ones(1, 4, 6), "weight": torch.ones(6)} | change
    with pytest.raises(ValueError, match=message):
        rms_norm(**given)


def test_the_reference_agrees_with_pytorch():
    x, weight = torch.randn(2, 3, 48, dtype=torch.float64), torch.randn(48, dtype=torch.float64)
    (found,) = reference.rms_norm(x, weight, epsilon=1e-3)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (48,), weight, 1e-3))
