"""BlockLinear against the float64 reference: the CPU kernels, the CUDA kernels, and the function body."""

import math

import pytest
import torch

from leanfleet.export import block_linear, reference
from support import ort_models
from support.block_cases import DTYPES, FORMS, NAME, SIZES, assert_right, calls, make, rounds_weights
from support.kernels import DTYPE_NAMES, run_kernel
from support.linear_cases import OPS, one_node_model, session_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_call(form, dtype, instruction_set):
    for seed, sizes in enumerate(SIZES):
        for inputs, attrs in calls(sizes, dtype, form, seed):
            before = {name: x.clone() for name, x in inputs.items()}
            assert_right(run_kernel(NAME, inputs, attrs, threads=1 + seed % 4)["output"], inputs, attrs)
            assert all(torch.equal(x.view(torch.uint8), before[name].view(torch.uint8)) for name, x in inputs.items())


@pytest.mark.everywhere
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_the_largest_integers(form, instruction_set):
    """Sums of products at their limits: all weights and inputs are the largest there are, of either sign."""
    for rows in (1, 20):
        inputs = make((1, rows, 128, 1, 20), torch.float32, form, shift=False, bias=False)
        for of_weights in (0x00, 0x7F, 0x80, 0xFF, 0x0F, 0xF0, 0x88):
            inputs["weight"].view(torch.uint8).fill_(of_weights)
            for of_input in (1.0, -1.0):
                inputs["input"].fill_(of_input)
                found = run_kernel(NAME, inputs, {"round_input": 1})["output"]
                assert_right(found, inputs, {"round_input": 1})


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cuda(form, dtype):
    for seed, sizes in enumerate((*SIZES, (1, 1, 4096, 128, 1000), (4, 70, 1024, 32, 300), (1, 300, 512, 16, 500))):
        for inputs, attrs in calls(sizes, dtype, form, seed):
            found = run_kernel(NAME, {name: x.cuda() for name, x in inputs.items()}, attrs)["output"]
            assert_right(found.cpu(), inputs, attrs, torch.finfo(dtype).eps * rounds_weights(inputs))
    odd = make((1, 4, 64, 2, 5), dtype, form)
    shifted = torch.empty(4 * 64 + 1, dtype=dtype, device="cuda")[1:].view(1, 4, 64).copy_(odd["input"])
    given = {name: x.cuda() for name, x in odd.items()} | {"input": shifted}
    assert_right(run_kernel(NAME, given, {})["output"].cpu(), odd, {}, torch.finfo(dtype).eps * (dtype != torch.float32))


@GPU
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_cuda_panels(form, dtype, monkeypatch):
    """Tiles of 16 to 128 rows, with as many parts of the columns as are chosen, one, and several; the bits are the same each time."""
    for seed, sizes in enumerate(
        (
            (1, 9, 5120, 160, 301),
            (1, 20, 6432, 201, 320),
            (1, 85, 1600, 25, 289),
            (1, 500, 256, 8, 8500),
            (1, 12, 160, 5, 34000),
        )
    ):
        for inputs, attrs in calls(sizes, dtype, form, seed):
            given = {name: x.cuda() for name, x in inputs.items()}
            for split in ("0", "1", "7"):
                monkeypatch.setenv("LEANFLEET_BLOCK_SPLIT", split)
                found = run_kernel(NAME, given, attrs)["output"]
                assert torch.equal(found, run_kernel(NAME, given, attrs)["output"])
                assert_right(found.cpu(), inputs, attrs, torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("rounds", (0, 1))
@pytest.mark.parametrize("rows", (3, 12))
def test_values_that_are_not_finite(rows, rounds, device):
    """A NaN or an infinity of the input reaches its own row alone, one of the scales or the bias its own column."""
    for form in FORMS:
        inputs = make((1, rows, 96, 3, 11), torch.float32, form)
        clean = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, {"round_input": rounds})["output"].cpu()
        for bad in (math.nan, math.inf):
            dirty = {name: x.clone() for name, x in inputs.items()}
            dirty["input"][0, 1, 40] = bad
            dirty["scale"][4, 1], dirty["shift"][5, 2], dirty["bias"][6] = bad, bad, bad
            found = run_kernel(NAME, {name: x.to(device) for name, x in dirty.items()}, {"round_input": rounds})["output"].cpu()
            assert not found[0, 1].isfinite().any() and not found[0, :, 4:7].isfinite().any()
            kept = torch.ones_like(found, dtype=torch.bool)
            kept[0, 1], kept[0, :, 4:7] = False, False
            assert torch.equal(found[kept], clean[kept])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_function_body(form, dtype):
    name = DTYPE_NAMES[dtype]
    for sizes in ((2, 3, 64, 2, 5), (1, 9, 42, 3, 7)):
        for inputs, attrs in calls(sizes, dtype, form, 1):
            model = one_node_model(NAME, inputs, attrs, dtype=name, forms={"weight": DTYPE_NAMES[form]})
            for library in (False, True):
                given = {n: x.clone() for n, x in inputs.items()}
                found = ort_models.run_node(session_of(model, library), OPS[NAME], given, attrs)
                assert_right(found["output"], inputs, attrs)


def test_in_pytorch():
    for form in FORMS:
        inputs = make((2, 3, 64, 2, 5), torch.bfloat16, form)
        assert_right(block_linear(*inputs.values(), round_input=True), inputs, {"round_input": 1})
    x, weight, scale = torch.randn(1, 2, 64), torch.zeros(5, 64, dtype=torch.int8), torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"I = 64 is not a multiple of G = 3"):
        block_linear(x, weight, torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"weight has shape \[5,63\]: axis 1 of \[O,I\] is 63; expected 64"):
        block_linear(x, weight[:, 1:].contiguous(), scale)
    with pytest.raises(ValueError, match=r"scale has shape \[4,2\]: axis 0 of \[O,G\] is 4; expected 5"):
        block_linear(x, weight, scale[1:].contiguous())
    with pytest.raises(ValueError, match="bias has shape"):
        block_linear(x, weight, scale, bias=torch.ones(4))
    with pytest.raises(ValueError, match="weight has type int32"):
        block_linear(x, weight.int(), scale)


def test_rounding_is_the_references():
    """Integers of the input, ties among them, as the reference rounds them: of a weight of ones the output is their sum."""
    step = 2.0**-5
    x = torch.arange(-127, 128).float()[None, :, None] * step
    x = torch.cat([x / 4, torch.full((1, 255, 15), 127 * step / 2)], 2)
    found = run_kernel(
        NAME,
        inputs := {"input": x, "weight": torch.ones(1, 16, dtype=torch.int8), "scale": torch.ones(1, 1)},
        {"round_input": 1},
    )
    (exact,) = reference.block_linear(*(t.double() if t.is_floating_point() else t for t in inputs.values()), round_input=1)
    assert torch.equal(found["output"].double(), exact)
