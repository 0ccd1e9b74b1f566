"""Queries, keys and values that one tensor holds side by side."""

from collections.abc import Sequence
from itertools import accumulate

import onnx_ir as ir

from leanfleet.export.fusions.graph import columns, named, producer


def known_heads(value: ir.Value | None) -> bool:
    """Whether a value is of shape [.,.,H,D] with heads and channels of known sizes."""
    return (
        value is not None
        and value.shape is not None
        and len(value.shape) == 4
        and all(isinstance(n, int) for n in value.shape[2:])
    )


def side_by_side(heads: Sequence[ir.Value]) -> ir.Value | None:
    """The value [..., width] whose last axis holds, from its begin to its end, what reshaped makes each of `heads`
    [..., heads, D], of known sizes, by one Split or a Slice each; else None."""
    widths = [x.shape[2] * x.shape[3] for x in heads]
    reshapes = [producer(value, "Reshape") for value in heads]
    if None in reshapes:
        return None
    parts = [reshape.inputs[0] for reshape in reshapes]
    # A Reshape may have split up tokens of [B N,width] too: the leading axes must be those of the heads.
    if any(
        p.shape is None or len(p.shape) != 3 or not named(p.shape) or [*p.shape] != [*x.shape[:2], width]
        for p, x, width in zip(parts, heads, widths, strict=True)
    ):
        return None
    split = producer(parts[0], "Split")
    if split:
        whole = list(split.outputs) == parts and split.attributes.get_int("axis", 0) in (-1, 2)
        return split.inputs[0] if whole else None
    slices, ends = [columns(value) for value in parts], list(accumulate(widths))
    if None in slices or slices[0][0].shape[-1] != ends[-1]:
        return None
    expected = [(slices[0][0], end - width, end) for end, width in zip(ends, widths, strict=True)]
    return slices[0][0] if slices == expected else None
