"""Calls of RmsNorm, and what they may lose."""

import torch

from leanfleet.export import reference

NAME = "RmsNorm"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("silu", "sigmoid")
# (B, N, C, group): ends of vectors, heads, rows that a warp or a CTA holds and longer ones, units of one column.
SIZES = (
    (1, 1, 1, 0),
    (2, 3, 7, 0),
    (1, 2, 64, 16),
    (2, 5, 96, 12),
    (1, 3, 1024, 0),
    (1, 2, 2056, 0),
    (1, 1, 20001, 0),
    (1, 2, 9000, 0),
    (3, 4, 60, 1),
    (1, 9, 512, 128),
    (1, 2, 17000, 8500),
)


def make(sizes, dtype, seed=0, addend=False, gate=None):
    """(inputs, attributes). gate: whether it comes first, None for none."""
    random = torch.Generator().manual_seed(seed)
    B, N, C, group = sizes
    inputs = {"input": 3 * torch.randn(B, N, C, generator=random), "weight": torch.randn(C, generator=random)}
    inputs["input"] *= 10.0 ** torch.randint(-3, 3, (B, N, 1), generator=random)
    inputs["input"] = inputs["input"].to(dtype)
    attrs = {"group": group, "epsilon": (1e-6, 1e-5, 0.1)[seed % 3]}
    if group and seed % 2:
        attrs["normed"] = group * (C // group + 1) // 2 // group * group
    if addend:
        inputs["addend"] = torch.randn(B, N, C, generator=random).to(dtype)
        attrs["return_sum"] = int(seed % 2 == 0)
    if gate is not None:
        inputs["gate"] = (4 * torch.randn(B, N, C, generator=random)).to(dtype)
        attrs |= {"gate_first": int(gate), "activation": KINDS[seed % len(KINDS)]}
    return inputs, attrs


def among_others(inputs, attrs, seed=0):
    """That call with its input, and its gate, among other columns, which are NaN: of one tensor, or of two."""
    width, random = len(inputs["weight"]), torch.Generator().manual_seed(seed)
    gaps = [8 * int(n) + seed % 2 for n in torch.randint(0, 3, (3,), generator=random)]
    places = {"input": gaps[0], "gate": gaps[0] + width + gaps[1]}
    wide = torch.full((*inputs["input"].shape[:2], 2 * width + sum(gaps)), torch.nan, dtype=inputs["input"].dtype)
    wide[..., gaps[0] : gaps[0] + width] = inputs["input"]
    made = inputs | {"input": wide}
    where = {"columns": 1, "first_column": gaps[0]}
    if "gate" in inputs:
        wide[..., places["gate"] : places["gate"] + width] = inputs["gate"]
        made["gate"] = wide
        where |= {"gate_columns": 1, "first_gate_column": places["gate"]}
        if seed % 3 == 2:
            made["gate"] = inputs["gate"]
            where |= {"gate_columns": 0, "first_gate_column": 0}
    return made, attrs | where


def calls(sizes, dtype, seed=0):
    yield make(sizes, dtype, seed)
    yield make(sizes, dtype, seed, addend=True)
    for first in (False, True):
        yield make(sizes, dtype, seed + first, gate=first, addend=bool(seed % 2))
        yield among_others(*make(sizes, dtype, seed + first, gate=first, addend=not seed % 2), seed + first)


def assert_right(found, inputs, attrs):
    """The sum is exact; the output is computed in float32 and rounded once."""
    double = {name: x.double() for name, x in inputs.items()}
    dtype = inputs["input"].dtype
    if "addend" in inputs:  # what is normalised is rounded to the type first
        first, width = attrs.get("first_column", 0), len(inputs["weight"])
        rows = inputs["input"][..., first : first + width]
        total = (rows.float() + inputs["addend"].float()).to(dtype)
        double["addend"] = torch.zeros_like(double["addend"])
        wide = torch.full_like(double["input"], torch.nan)
        wide[..., first : first + width] = total.double()
        double["input"] = wide
    exact = reference.rms_norm(**double, **attrs)
    names = ["output", *["sum"] * attrs.get("return_sum", 0)]
    assert list(found) == names
    if "sum" in found:
        assert torch.equal(found["sum"], total)
    x, y = found["output"], exact[0]
    assert x.dtype == dtype and x.shape == y.shape
    # A sigmoid has the error of its exponential beside what is rounded.
    without = {name: t for name, t in double.items() if name != "gate"}
    plain = {name: a for name, a in attrs.items() if "gate" not in name and name not in ("activation", "return_sum")}
    size = y.abs()
    if "gate" in inputs:
        size = size + reference.rms_norm(**without, **plain)[0].abs() * double["gate"].nan_to_num(0.0).abs().amax() * 2.0**-3
    bound = 0.51 * torch.finfo(dtype).eps * y.abs() + 2.0**-20 * size + torch.finfo(dtype).smallest_normal
    wrong = ~((x.double() - y).abs() <= bound)
    assert not wrong.any(), (x[wrong][:3], y[wrong][:3], bound[wrong][:3])
