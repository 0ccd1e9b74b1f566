"""GatedActivation against the float64 reference: the CPU kernels, the CUDA kernel, and the function body."""

import pytest
import torch

from leanfleet.export import gated_activation, reference
from support import ort_models
from support.kernels import run_kernel
from support.linear_cases import OPS, one_node_model, session_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NAME = "GatedActivation"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
# (B, N, F): whole vectors and chunks, ends of them, rows of one element, more rows than a CTA takes.
SIZES = ((1, 1, 1), (2, 3, 7), (1, 5, 64), (3, 2, 200), (1, 70, 129), (2, 1, 5000), (1, 300, 24))
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAN, INF = float("nan"), float("inf")


def case(sizes, dtype, seed=0):
    """Gates where every activation bends, and some far out."""
    random = torch.Generator().manual_seed(seed)
    B, N, F = sizes
    x = 3 * torch.randn(B, N, 2, F, generator=random)
    x.view(-1)[::17] *= 30
    return x.to(dtype)


def apart(x):
    """The same call with gate and values in tensors of their own."""
    return {"gate_up": x[:, :, 0].contiguous(), "up": x[:, :, 1].contiguous()}


def with_skip(x, seed=0):
    """That call with what is added to the values, one to four heads of columns."""
    random = torch.Generator().manual_seed(seed)
    heads = max(h for h in range(1, 5) if x.shape[-1] % h == 0)
    skip = torch.randn(x[:, :, 0].shape, generator=random).to(x.dtype)
    return apart(x) | {"skip": skip, "skip_scale": torch.randn(heads, generator=random)}


def among_others(inputs, seed=0):
    """That call with the gate among other columns, which are NaN, and the attributes that say where."""
    gate, random = inputs["gate_up"], torch.Generator().manual_seed(seed)
    before, behind = (8 * int(n) + seed % 2 for n in torch.randint(0, 3, (2,), generator=random))
    wide = torch.full((*gate.shape[:2], before + gate.shape[2] + behind), NAN, dtype=gate.dtype)
    wide[..., before : before + gate.shape[2]] = gate
    return inputs | {"gate_up": wide}, {"columns": 1, "first_column": before}


def calls(x, seed=0):
    return {"gate_up": x}, apart(x), with_skip(x, seed)


def assert_right(found, inputs, kind, least=2.0**-126):
    """One rounding to the output's type, and float32's in the middle: 1 + erf(x) cancels, so that it is of the operands. least:
    a sigmoid below it may be anything up to it."""
    double = {name: t.double() for name, t in inputs.items()}
    (exact,) = reference.gated_activation(**double, activation=kind)
    x = inputs["gate_up"]
    gate, up = (double["gate_up"], double["up"]) if "up" in inputs else double["gate_up"].unbind(2)
    size = up.abs()
    if "skip" in inputs:
        scales = double["skip_scale"].repeat_interleave(up.shape[-1] // len(double["skip_scale"]))
        size = size + (scales * double["skip"]).abs()
    of_gate = gate.sigmoid() if kind == "sigmoid" else gate.abs()
    bound = 0.51 * torch.finfo(x.dtype).eps * exact.abs() + 4e-7 * of_gate * size + torch.finfo(x.dtype).smallest_normal
    bound = bound + (least * size if kind == "sigmoid" else 0.0)
    wrong = ~((found.double() - exact).abs() <= bound)
    assert not wrong.any(), (kind, found[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_call(kind, dtype, instruction_set):
    for seed, sizes in enumerate(SIZES):
        x = case(sizes, dtype, seed)
        before = x.clone()
        for inputs in calls(x, seed):
            assert_right(run_kernel(NAME, inputs, {"activation": kind}, threads=1 + seed % 4)["output"], inputs, kind)
            if "up" in inputs:
                wide, where = among_others(inputs, seed)
                found = run_kernel(NAME, wide, {"activation": kind} | where, threads=1 + seed % 4)
                assert_right(found["output"], inputs, kind)
        assert torch.equal(x, before)


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda(kind, dtype):
    for seed, sizes in enumerate((*SIZES, (1, 2048, 8192))):
        x = case(sizes, dtype, seed)
        for inputs in calls(x, seed):
            found = run_kernel(NAME, {name: t.cuda() for name, t in inputs.items()}, {"activation": kind})["output"]
            assert_right(found.cpu(), inputs, kind)
            if "up" in inputs:
                wide, where = among_others(inputs, seed)
                found = run_kernel(NAME, {name: t.cuda() for name, t in wide.items()}, {"activation": kind} | where)["output"]
                assert_right(found.cpu(), inputs, kind)
    odd = torch.empty(2 * 2 * 64 + 1, dtype=dtype, device="cuda")[1:].view(1, 2, 2, 64).copy_(x[:, :2, :, :64])
    inputs = {"gate_up": x[:, :2, :, :64].contiguous()}
    assert_right(run_kernel(NAME, {"gate_up": odd}, {"activation": kind})["output"].cpu(), inputs, kind)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite(kind, dtype, device):
    """They reach their own element alone: NaN stays NaN, and an infinity gives what is not finite or what the formula gives."""
    values = torch.tensor([NAN, INF, -INF, 0.0, -1.0, 2.0])
    gate, up = torch.meshgrid(values, values, indexing="ij")
    x = torch.stack([gate.reshape(-1), up.reshape(-1)]).to(dtype).view(1, 1, 2, -1)
    found = run_kernel(NAME, {"gate_up": x.to(device)}, {"activation": kind})["output"].cpu().double().view(-1)
    (exact,) = reference.gated_activation(x.double(), activation=kind)
    exact = exact.view(-1)
    finite = x.view(2, -1).isfinite().all(0)
    assert torch.allclose(found[finite], exact[finite], rtol=2e-2, atol=1e-2)
    assert not found[x.view(2, -1).isnan().any(0)].isfinite().any()
    infinite = ~finite & found.isfinite()
    assert (found[infinite] == exact[infinite]).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_function_body(kind, dtype):
    x = case((2, 5, 33), dtype, 3)
    for inputs in calls(x):
        ranks = {name: t.dim() for name, t in inputs.items()}
        model = one_node_model(NAME, inputs, {"activation": kind}, ranks, dtype=str(dtype).removeprefix("torch."))
        for library in (False, True):
            given = {name: t.clone() for name, t in inputs.items()}
            found = ort_models.run_node(session_of(model, library), OPS[NAME], given, {"activation": kind})
            assert_right(found["output"], inputs, kind, 2.0**-126 if library else 2.0**-22)  # what ONNX Runtime loses


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_function_body_of_columns(dtype):
    inputs = apart(case((2, 5, 33), dtype, 3))
    wide, where = among_others(inputs, 2)
    attrs = {"activation": "silu"} | where
    model = one_node_model(NAME, wide, attrs, {name: 3 for name in wide}, dtype=str(dtype).removeprefix("torch."))
    for library in (False, True):
        given = {name: t.clone() for name, t in wide.items()}
        assert_right(ort_models.run_node(session_of(model, library), OPS[NAME], given, attrs)["output"], inputs, "silu")


def test_columns_that_are_not_there():
    x = torch.zeros(1, 2, 10)
    with pytest.raises(ValueError, match="first_column is 5, and gate_up has 10 columns; expected 6 from first_column on"):
        gated_activation(x, x[..., :6].contiguous(), columns=True, first_column=5)
    with pytest.raises(ValueError, match="first_column = 5 needs columns = 1"):
        gated_activation(x, x, first_column=5)
    with pytest.raises(ValueError, match="columns = 1 needs input up"):
        gated_activation(torch.zeros(1, 2, 2, 5), columns=True)


def test_in_pytorch():
    x = case((2, 4, 48), torch.bfloat16)
    for inputs in calls(x):
        assert_right(gated_activation(*inputs.values(), activation="gelu"), inputs, "gelu")
    skip = with_skip(x)
    with pytest.raises(ValueError, match="skip_scale is missing, skip is given; give both or neither"):
        gated_activation(skip["gate_up"], skip["up"], skip["skip"])
    with pytest.raises(ValueError, match=r"F = 48 is not a multiple of H = 5; each of the H heads .* of the F columns"):
        gated_activation(*apart(x).values(), skip["skip"], torch.ones(5))
    for none in (torch.ones(0), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="skip_scale has shape"):
            gated_activation(*apart(x).values(), skip["skip"], none)
    with pytest.raises(ValueError, match=r"gate_up has shape \[2,4,2,48\], rank 4; expected \[B,N,F\]"):
        gated_activation(x, x[:, :, 0])
    with pytest.raises(ValueError, match=r"up has shape \[2,4,47\]: axis 2 of \[B,N,F\] is 47; expected 48"):
        gated_activation(x[:, :, 0], x[:, :, 1, 1:])
    with pytest.raises(ValueError, match=r"gate_up has shape \[2,4,1,48\]: axis 2 of \[B,N,2,F\] is 1; expected 2"):
        gated_activation(x[:, :, :1])
    with pytest.raises(ValueError, match="activation is 'swish'; expected one of silu, gelu, gelu_tanh, relu, sigmoid"):
        gated_activation(x, activation="swish")
