"""DecayGates against the float64 reference: the CPU kernels, the CUDA kernel, and the function body."""

import math

import pytest
import torch

from leanfleet.export import causal_linear_decay, decay_gates, reference
from support import gate_cases
from support.all_calls import check_bodies, check_on_cpu
from support.gate_cases import DTYPES, NAME, SIZES, assert_right, calls
from support.kernels import run_kernel

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_call(dtype, instruction_set):
    check_on_cpu(gate_cases, dtype)


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda(dtype):
    for seed, sizes in enumerate((*SIZES, (2, 2000, 24, None), (1, 700, 16, 128))):
        for inputs, attrs in calls(sizes, dtype, seed):
            found = run_kernel(NAME, {name: x.cuda() for name, x in inputs.items()}, attrs)
            assert_right({name: x.cpu() for name, x in found.items()}, inputs, attrs)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first, others", ((1, 0), (0, 1), (4, 0)))
def test_beta_where_no_vector_begins(first, others, dtype, device):
    """Whole vectors of decays beside rows of beta that begin, or end, within one."""
    inputs, attrs = gate_cases.make((2, 3, 4, None), dtype, betas=True)
    apart = torch.full((2, 3, first + 4 + others), math.nan, dtype=dtype)
    apart[..., first : first + 4] = inputs["beta_input"]
    wide = torch.cat((inputs["input"], torch.full_like(inputs["input"], math.nan)), -1)
    inputs |= {"input": wide, "beta_input": apart}
    attrs |= {"columns": 1, "first_column": 0, "first_beta_column": first}
    found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)
    assert_right({name: x.cpu() for name, x in found.items()}, inputs, attrs)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite(dtype, device):
    """A NaN reaches its own token and head alone, where nothing is finite; so does an infinity, or what the formula gives."""
    inputs, attrs = gate_cases.make((1, 9, 5, None), dtype, betas=True)
    inputs["input"][0, 1, 1], inputs["beta_input"][0, 1, 1] = math.nan, math.nan
    inputs["input"][0, 2, 2], inputs["beta_input"][0, 2, 2] = math.inf, math.inf
    inputs["input"][0, 3, 3], inputs["beta_input"][0, 3, 3] = -math.inf, -math.inf
    found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)
    found = {name: x.cpu() for name, x in found.items()}
    assert found["log_decay"][0, 1, 1] == -math.inf and found["step"][0, 1, 1].isnan() and found["beta"][0, 1, 1].isnan()
    assert found["log_decay"][0, 2, 2] == -math.inf and found["step"][0, 2, 2] == math.inf and found["beta"][0, 2, 2] == 2
    assert found["log_decay"][0, 3, 3] == 0 and found["step"][0, 3, 3] == 0 and found["beta"][0, 3, 3].abs() < 1e-30
    marked = torch.tensor([[1, 1], [2, 2], [3, 3]])
    clean = {name: x.clone() for name, x in inputs.items()}
    for name in ("input", "beta_input"):
        clean[name][0, marked[:, 0], marked[:, 1]] = 0.0
    for name, x in run_kernel(NAME, {name: x.to(device) for name, x in clean.items()}, attrs).items():
        x = x.cpu()
        x[0, marked[:, 0], marked[:, 1]] = found[name][0, marked[:, 0], marked[:, 1]]
        assert torch.equal(x.nan_to_num(7.0), found[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
def test_a_decay_is_never_above_1(device):
    """A positive rate decays nothing."""
    inputs, _ = gate_cases.make((1, 4, 3, None), torch.float32)
    inputs["rate"] = torch.tensor([0.5, 0.0, -0.5])
    found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, {})["log_decay"].cpu()
    assert (found[..., :2] == 0).all() and (found[..., 2] < 0).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("sizes", ((2, 5, 3, None), (2, 4, 3, 7)), ids=str)
def test_function_body(sizes, dtype):
    check_bodies(gate_cases, sizes, dtype, absolute=2e-7)  # ONNX Runtime's softplus loses digits far below 0


def test_in_pytorch():
    """Mamba-2's recurrence by hand, padding included."""
    generator = torch.Generator().manual_seed(0)
    raw, rate, bias = torch.randn(2, 6, 3, generator=generator), -torch.rand(3), torch.randn(3, generator=generator)
    lens = torch.tensor([6, 4], dtype=torch.int32)
    c, b, x = (torch.randn(2, 6, heads, width, generator=generator) for heads, width in ((1, 8), (1, 8), (3, 5)))
    log_decay, step = decay_gates(raw, rate, bias, query_lens=lens, return_step=True)
    output, state = causal_linear_decay(c, b, x, log_decay, beta=step, return_state=True, layout="bnhd")
    for row, count in enumerate(lens):
        expected = torch.zeros(3, 8, 5, dtype=torch.float64)
        for i in range(count):
            dt = torch.nn.functional.softplus(raw[row, i].double() + bias)
            expected = (rate * dt).exp().view(3, 1, 1) * expected
            expected = expected + dt.view(3, 1, 1) * b[row, i, 0].double().view(1, 8, 1) * x[row, i].double().view(3, 1, 5)
            torch.testing.assert_close(output[row, i].double(), c[row, i, 0].double() @ expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"bias": torch.ones(3, 2)}, r"bias has shape \[3,2\], rank 2; expected \[H\]"),
        ({"per_key": True}, r"input has shape \[1,4,3\], rank 3; expected \[B,N,H,D\]"),
        ({"bias": torch.ones(4)}, r"bias has shape \[4\]: axis 0 of \[H\] is 4; expected 3"),
        ({"rate": torch.ones(2)}, r"rate has shape \[2\]: axis 0 of \[H\] is 2; expected 3"),
        ({"step_min": -1.0}, "step_min is -1; expected 0 or more"),
        ({"return_beta": True}, "return_beta = 1 needs input beta_input, which is missing"),
        ({"beta_input": torch.ones(1, 4, 2), "return_beta": True}, r"beta_input has shape \[1,4,2\]"),
        ({"first_column": 1}, "first_column = 1 needs columns = 1; found columns = 0"),
        ({"columns": True, "first_column": 1}, "first_column is 1, and input has 3 columns; expected 3 from first_column on"),
        ({"columns": True, "first_beta_column": 1}, "first_beta_column = 1 needs input beta_input, which is missing"),
        (
            {"columns": True, "beta_input": torch.ones(1, 4, 5), "return_beta": True, "first_beta_column": 3},
            "first_beta_column is 3, and beta_input has 5 columns; expected 3 from first_beta_column on",
        ),
        (
            {"columns": True, "per_key": True, "first_column": 1, "input": torch.ones(1, 4, 3, 2)},
            "first_column and per_key are both given; give one of them",
        ),
        ({"columns": True, "per_key": True}, r"input has shape \[1,4,3\], rank 3; expected \[B,N,H,D\]"),
    ),
    ids=str,
)
def test_refused(change, message):
    given = {"input": torch.ones(1, 4, 3), "rate": -torch.ones(3)} | change
    with pytest.raises(ValueError, match=message):
        decay_gates(**given)


def test_lengths_are_checked(monkeypatch):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    lens = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"query_lens\[0\] is 5; expected 0 .. N = 4"):
        run_kernel(NAME, {"input": torch.ones(1, 4, 3), "rate": -torch.ones(3), "query_lens": lens}, {})


def test_the_reference_agrees_with_the_formula():
    inputs, attrs = gate_cases.make((2, 7, 3, 5), torch.float32, lens=True)
    log_decay, step, beta = reference.decay_gates(
        **{n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}, **attrs
    )
    raw = inputs["input"].double() + inputs["bias"].double()
    expected = (1 + raw.exp()).log().clamp(attrs["step_min"], attrs["step_max"])
    inside = torch.arange(7) < inputs["query_lens"].unsqueeze(1)
    torch.testing.assert_close(step, expected * inside[..., None, None])
    torch.testing.assert_close(log_decay, inputs["rate"].double()[:, None] * step)
    torch.testing.assert_close(beta, 2 / (1 + (-inputs["beta_input"].double()).exp()) * inside.unsqueeze(-1))
