"""Calls of Linear, and how far a kernel may be from the float64 reference."""

import torch

from leanfleet.export import reference

NAME = "Linear"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
# (B, N, I, O): one number, ends of vectors and of tiles, ranges that begin within tiles, more rows than kernels hold together.
SIZES = (
    (1, 1, 1, 1),
    (2, 3, 7, 5),
    (1, 1, 64, 64),
    (1, 8, 128, 64),
    (1, 9, 72, 200),
    (3, 5, 520, 24),
    (1, 17, 1000, 136),
    (2, 16, 256, 40),
    (1, 2, 2056, 264),
    (1, 33, 96, 65),
    (1, 130, 40, 72),
)


def make(sizes, dtype, seed=0, bias=False, gated=False):
    """(inputs, attributes)."""
    random = torch.Generator().manual_seed(seed)
    B, N, I, O = sizes  # noqa: E741
    columns = (2, O) if gated else (O,)
    scale = 2.0 * I**-0.5  # results of all sizes around 1, within float16
    inputs = {
        "input": torch.randn(B, N, I, generator=random).to(dtype),
        "weight": (scale * torch.randn(I, *columns, generator=random)).to(dtype),
    }
    if bias:
        inputs["bias"] = torch.randn(columns, generator=random).to(dtype)
    attrs = {"constant_weight": seed % 2}
    if gated:
        attrs |= {"gated": 1, "activation": KINDS[seed % len(KINDS)]}
    return inputs, attrs


def rounds_products(sizes):
    """Whether CUDA kernels round products before their activation, and cuBLAS may before a bias: all do, but that of few rows."""
    B, N, I, O = sizes  # noqa: E741
    return B * N > 16 or I % 8 > 0 or O % 8 > 0


def calls(sizes, dtype, seed=0):
    yield make(sizes, dtype, seed, bias=bool(seed % 2))
    yield make(sizes, dtype, seed + 1, gated=True, bias=bool(seed % 3))


def _products(double, half=None):
    """(products, sums of their terms' sizes, products without their bias); half: which of a gate's two."""
    parts = {n: t if n == "input" or half is None else t.select(-2, half) for n, t in double.items()}
    unbiased = {n: t for n, t in parts.items() if n != "bias"}
    return [reference.linear(**given)[0] for given in (parts, {n: t.abs() for n, t in parts.items()}, unbiased)]


def assert_right(found, inputs, attrs, rounds_products=False, rounds_sums=False):
    """Sums in float32 of as many terms as there are columns, rounded once; rounds_products: before an activation too; rounds_sums:
    before a bias too, as cuBLAS may."""
    double = {name: x.double() for name, x in inputs.items()}
    dtype, x = inputs["input"].dtype, found["output"]
    (exact,) = reference.linear(**double, **attrs)
    assert x.dtype == dtype and x.shape == exact.shape
    depth, eps = inputs["input"].shape[-1], torch.finfo(dtype).eps
    summed = 2.0**-23 * (4 + depth**0.5)  # of a sum, over that of its terms' sizes
    bound = 0.51 * eps * exact.abs() + torch.finfo(dtype).smallest_normal
    before_bias = rounds_sums * ("bias" in inputs) * 0.51 * eps
    if attrs.get("gated"):
        (y, *of_y), (z, *of_z) = (_products(double, i) for i in (0, 1))
        of_gate, of_values = (
            summed * terms + rounds_products * 0.51 * eps * p.abs() + before_bias * unbiased.abs()
            for p, (terms, unbiased) in ((y, of_y), (z, of_z))
        )
        active = reference._activated(NAME, y, attrs["activation"]).abs()
        # An activation changes at most 1.13 times as much as its gate; a kernel's own has an error of float32 beside it.
        own = 2.0**-20 * (1 + y.abs())
        bound = bound + 1.13 * of_gate * (z.abs() + of_values) + (active + own) * of_values + own * z.abs()
    else:
        _, terms, unbiased = _products(double)
        bound = bound + summed * terms + before_bias * unbiased.abs()
    wrong = ~((x.double() - exact).abs() <= bound)
    assert not wrong.any(), (x[wrong][:3], exact[wrong][:3], bound[wrong][:3])
