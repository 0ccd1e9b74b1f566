"""Linear against the float64 reference: the CPU kernels, the CUDA kernels, and the function body."""

import math
from itertools import pairwise

import pytest
import torch

from bench.kernels.timing import Launches, captured
from leanfleet import spec
from leanfleet.export import linear, reference
from support import product_cases
from support.all_calls import check_bodies, check_on_cpu
from support.kernels import run_kernel
from support.product_cases import DTYPES, NAME, SIZES, assert_right, calls, make, rounds_products

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Of a decoder's layers: ranges of all CTAs, tiles that several share.
LAYERS = ((1, 1, 2048, 3072), (5, 1, 4096, 4096), (16, 1, 1000, 8), (1, 24, 14336, 1032), (32, 1, 128, 20000), (1, 1, 8, 8))
MANY_ROWS = ((1, 33, 512, 264), (3, 700, 1024, 96))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_call(dtype, instruction_set):
    check_on_cpu(product_cases, dtype)


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda(dtype):
    for seed, sizes in enumerate((*SIZES, *LAYERS, *MANY_ROWS)):
        for inputs, attrs in calls(sizes, dtype, seed):
            found = run_kernel(NAME, {name: x.cuda() for name, x in inputs.items()}, attrs)
            rounds = rounds_products(sizes)
            assert_right({n: x.cpu() for n, x in found.items()}, inputs, attrs, rounds, rounds_sums=rounds)


@GPU
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tensors_at_odd_addresses(dtype):
    """Multiples of their elements' size alone."""
    for seed, sizes in enumerate(((1, 3, 128, 64), (2, 40, 64, 72))):
        for inputs, attrs in calls(sizes, dtype, seed):
            odd = {n: torch.cat([x.new_empty(1), x.flatten()]).cuda()[1:].view(x.shape) for n, x in inputs.items()}
            found = run_kernel(NAME, odd, attrs)
            assert_right({n: x.cpu() for n, x in found.items()}, inputs, attrs, rounds_products=True)


@GPU
def test_the_same_bits_each_time():
    """However the ranges of a launch are done, and beside the launches before and behind it."""
    inputs, attrs = make((1, 20, 4096, 6144), torch.bfloat16, seed=1)
    inputs = {name: x.cuda() for name, x in inputs.items()}
    first = linear(**inputs, constant_weight=True)
    for _ in range(50):
        assert torch.equal(linear(**inputs, constant_weight=True), first)


@GPU
@pytest.mark.parametrize("rows", (1, 12, 32))
def test_launches_that_overlap(rows):
    """A chain in a CUDA graph, each product of what the one before it gives, whose weights are read before that ends: norms and
    products of the same memory, with words of their own, so that nothing comes between."""
    random = torch.Generator().manual_seed(rows)
    widths = (1024, 3072, 64, 8192, 1024)
    x, chain = torch.randn(1, rows, widths[0], generator=random).half().cuda(), []
    for a, b in pairwise(widths):
        y = chain[-1].outputs["output"] if chain else x
        chain.append(Launches("RmsNorm", {"input": y, "weight": torch.ones(a, device="cuda")}, {}))
        weight = (torch.randn(a, b, generator=random) * a**-0.5).half().cuda()
        inputs = {"input": chain[-1].outputs["output"], "weight": weight}
        chain.append(Launches("Linear", inputs, {"constant_weight": 1}))
    graph = captured(lambda: [launch.run() for launch in chain])
    for _ in range(50):
        x.normal_()
        graph.replay()
        found = [launch.outputs["output"].clone() for launch in chain]
        for launch, overlapped in zip(chain, found, strict=True):
            launch.run()
            torch.cuda.synchronize()
            assert torch.equal(launch.outputs["output"], overlapped)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
def test_values_that_are_not_finite(device):
    """A NaN or an infinity of a row or of a column of the weight stays in it."""
    inputs, attrs = make((1, 5, 64, 24), torch.float16)
    inputs["input"][0, 1, 3], inputs["weight"][:, 7] = math.nan, math.inf
    found = run_kernel(NAME, {name: x.to(device) for name, x in inputs.items()}, attrs)["output"].cpu()
    assert found[0, 1].isnan().all() and not found[0, :, 7].isfinite().any()
    others = torch.ones(5, 24, dtype=torch.bool)
    others[1], others[:, 7] = False, False
    assert found[0][others].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("sizes", ((2, 3, 7, 5), (1, 9, 72, 200)), ids=str)
def test_function_body(sizes, dtype):
    check_bodies(product_cases, sizes, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"weight": torch.ones(5, 4)}, r"weight has shape \[5,4\]: axis 0 of \[I,O\] is 5; expected 6"),
        ({"weight": torch.ones(6, 2, 4)}, r"weight has shape \[6,2,4\]"),
        ({"gated": True}, r"weight has shape \[6,4\]"),
        ({"weight": torch.ones(6, 3, 4), "gated": True}, r"weight has shape \[6,3,4\]: axis 1"),
        ({"bias": torch.ones(3)}, r"bias has shape \[3\]: axis 0 of \[O\] is 3; expected 4"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
    ),
    ids=str,
)
def test_refused(change, message):
    given = {"input": torch.ones(1, 3, 6), "weight": torch.ones(6, 4)} | change
    with pytest.raises(ValueError, match=message):
        linear(**given)


def test_the_reference_agrees_with_pytorch():
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 3, 6), (4, 6), (4,)))
    (found,) = reference.linear(x, weight.T, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))


def test_activations_are_those_of_gated_activation():
    """Kernels of both take one number for an activation, its place."""
    of = {
        name: next(a.values for a in spec.all_specs()[name].attrs if a.name == "activation")
        for name in (NAME, "GatedActivation")
    }
    assert of[NAME] == of["GatedActivation"] == product_cases.KINDS
