"""Calls of CausalConv, and how far a kernel may be from the float64 reference."""

import torch

from leanfleet import spec
from leanfleet.export import reference
from support.kernels import TORCH_DTYPES, remembered

NAME = "CausalConv"
OP = spec.all_specs()[NAME]


def make(n, b=2, c=8, past=3, dtype="float32", bias=False, state=False, lens=None, packed=None, pool=False, seed=0):
    """Inputs by name. lens: tokens of each request. packed: offsets. Tokens of no request are NaN."""
    g = torch.Generator().manual_seed(seed + n)
    b = 1 if packed else b
    requests = len(packed) - 1 if packed else b
    x = 2 * torch.randn(b, n, c, generator=g)
    for row, count in enumerate(lens or ()):
        x[row, max(count, 0) :] = float("nan")
    if packed:
        x[:, : packed[0]] = x[:, packed[-1] :] = float("nan")
    inputs = {"input": x, "weight": torch.randn(past + 1, c, generator=g)}
    if bias:
        inputs["bias"] = torch.randn(c, generator=g)
    inputs = {name: t.to(TORCH_DTYPES[dtype]) for name, t in inputs.items()}
    rows = requests + 3 if pool else requests
    if state or pool:
        inputs["initial_state"] = 2 * torch.randn(rows, past, c, generator=g)
    if lens:
        inputs["query_lens"] = torch.tensor(lens, dtype=torch.int32)
    if packed:
        inputs["cu_seqlens"] = torch.tensor(packed, dtype=torch.int32)
    if pool:
        inputs["state_index"] = torch.randperm(rows, generator=g)[:requests].int()
    return inputs


def among_others(inputs, before=8, behind=5):
    """(inputs, attributes) with the channels among other columns, which are NaN."""
    x = inputs["input"]
    wide = torch.full((*x.shape[:2], before + x.shape[2] + behind), float("nan"), dtype=x.dtype)
    wide[..., before : before + x.shape[2]] = x
    return inputs | {"input": wide}, {"columns": 1, "first_column": before}


def parts_of(inputs):
    """Attributes by which the channels come in three tensors, of whole vectors where that may be."""
    channels = inputs["weight"].shape[1]
    if channels < 3:
        return {}
    first = channels // 2 // 4 * 4 or channels // 2
    second = (channels - first) // 2 // 4 * 4 or 1
    return {"split": 1, "first": first, "second": second, "third": channels - first - second}


@remembered
def _exact(inputs, attrs):
    """The outputs by name, and for each element the sum of its terms' magnitudes, which its rounding errors follow."""
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items() if t is not None}
    names = [t.name for t in OP.active_outputs(attrs)]
    magnitudes = {name: t.abs() if t.is_floating_point() else t for name, t in tensors.items()}
    where = {name: n for name, n in attrs.items() if name in ("columns", "first_column")}
    (terms,) = reference.causal_conv(**magnitudes, **where)
    return dict(zip(names, reference.causal_conv(**tensors, **attrs), strict=True)), terms


def assert_right(found, inputs, attrs):
    """One rounding to the output's type, and a few float32 ones in the middle; the state is exact."""
    exact, terms = _exact({k: v.cpu() for k, v in inputs.items() if v is not None}, attrs)
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        got = found[name].cpu()
        if name == "final_state":
            assert torch.equal(got, right.float())
            continue
        part = terms.split([attrs["first"], attrs["second"], attrs["third"]], -1) if attrs.get("split") else [terms]
        own = part[{"output": 0, "output_2": 1, "output_3": 2}[name]]
        bound = 0.51 * torch.finfo(got.dtype).eps * right.abs() + 8e-7 * own + torch.finfo(got.dtype).smallest_normal
        assert ((got.double() - right).abs() <= bound).all(), (name, (got.double() - right).abs().max())
