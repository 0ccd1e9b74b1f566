"""Calls of MergeAttention, and how far a kernel may be from the float64 reference."""

import math

import torch

from leanfleet.export import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan
# (W, B, H, Nq, Dv): one part, columns that are no whole vectors, more rows than a piece.
SIZES = ((1, 1, 1, 1, 1), (2, 2, 3, 5, 16), (3, 1, 2, 7, 33), (8, 1, 32, 1, 128), (4, 2, 8, 40, 64))


def parts_of(sizes, dtype, seed=0):
    """Parts, some of them empty, whose outputs hold NaN then."""
    random = torch.Generator().manual_seed(seed)
    output = torch.randn(sizes, generator=random).to(dtype)
    lse = 6 * torch.randn(sizes[:-1], generator=random)
    lse[torch.rand(sizes[:-1], generator=random) < 0.3] = -INF
    lse.view(sizes[0], -1)[:, 0] = -INF if sizes[0] > 1 else 1.0
    output[lse == -INF] = NAN
    return {"partial_output": output, "partial_lse": lse}


def assert_merged(found, inputs):
    exact, lse = reference.merge_attention(inputs["partial_output"].double(), inputs["partial_lse"])
    held = inputs["partial_output"].double().nan_to_num(0).abs().amax(0)
    bound = 0.51 * torch.finfo(inputs["partial_output"].dtype).eps * exact.abs() + 2e-6 * held
    assert ((found["output"].double() - exact).abs() <= bound).all()
    empty = lse == -INF
    assert torch.equal(found["lse"] == -INF, empty) and not found["output"][empty].any()
    assert ((found["lse"].double() - lse)[~empty].abs() <= 1e-6 * (1 + lse[~empty].abs())).all()
