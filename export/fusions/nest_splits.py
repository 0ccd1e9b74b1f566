"""Splits of columns into parts of unequal sizes -> Splits within Splits, each of three parts or of equal ones."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise

import onnx_ir as ir

from leanfleet.export.fusions.graph import adder, column_sizes, take_over

Sizes = tuple[int, ...]
Part = tuple[ir.Value | None, int]  # (the value, None for columns that nobody reads; its size)

_MOST_EQUAL = 32  # parts of equal sizes whose addresses the kernel has as arguments


def _is_direct(sizes: Sizes) -> bool:
    """Whether ONNX Runtime's CUDA kernel has all about parts of these sizes as arguments."""
    return len(sizes) == 3 or len(set(sizes)) == 1 and len(sizes) <= _MOST_EQUAL


def _groupings(sizes: Sizes) -> Iterator[tuple[Sizes, ...]]:
    """Neighbouring parts as three groups, or as more groups of equal sizes."""
    count, ends = len(sizes), [*accumulate(sizes)]
    cuts: list[Sizes] = [*combinations(range(1, count), 2)]
    for groups in range(4, min(count, _MOST_EQUAL + 1)):
        inner = [ends[-1] * i // groups for i in range(1, groups)]
        if ends[-1] % groups == 0 and {*inner} <= {*ends}:
            cuts.append(tuple(ends.index(end) + 1 for end in inner))
    for each in cuts:
        yield tuple(sizes[a:b] for a, b in pairwise((0, *each, count)))


@cache
def _cheapest(sizes: Sizes) -> tuple[int, int, tuple[Sizes, ...]]:
    """(columns that are copied again, number of Splits, groups of the first one) of the way that copies fewest again."""
    if _is_direct(sizes) or len(sizes) == 2:
        return 0, 1, tuple((size,) for size in sizes)
    ways = []
    for groups in _groupings(sizes):
        again = [group for group in groups if len(group) > 1]
        inner = [_cheapest(group) for group in again]
        copied = sum(map(sum, again)) + sum(way[0] for way in inner)
        ways.append((copied, 1 + sum(way[1] for way in inner), groups))
    return min(ways)


def _parts(split: ir.Node, sizes: Sequence[int]) -> list[Part]:
    """The parts of a Split; neighbours that nobody reads are one, and empty ones are none."""
    parts: list[Part] = []
    for value, size in zip(split.outputs, sizes, strict=True):
        if value.uses() or value.is_graph_output():
            parts.append((value, size))
        elif size:
            earlier = parts.pop()[1] if parts and parts[-1][0] is None else 0
            parts.append((None, earlier + size))
    return parts


def _write(graph: ir.Graph, before: ir.Node, x: ir.Value, parts: list[Part]) -> None:
    """Puts the Splits of x that make these parts before a node. Two parts of unequal sizes get an empty third: ONNX Runtime
    makes one Split again of Slices that take a value to pieces."""
    groups = _cheapest(tuple(size for _, size in parts))[2]
    sizes = [sum(group) for group in groups]
    if len(sizes) == 2 and not _is_direct(tuple(sizes)):
        sizes.append(0)
    split = ir.node("Split", [x, adder(graph, before)("Constant", value_ints=sizes)], {"axis": -1}, num_outputs=len(sizes))
    graph.insert_before(before, split)
    rest = iter(parts)
    for group, made in zip(groups, split.outputs):  # but for an empty one
        members = [next(rest) for _ in group]
        value, size = members[0][0], sum(group)
        if len(members) > 1:
            made.type, made.shape = x.type, ir.Shape([*x.shape[:-1], size])
            _write(graph, before, made, members)
        elif value is not None:
            take_over(value, made)


def nest_splits(model: ir.Model, positions: int | None = None) -> int:
    """A Split along the last axis has three parts, or up to 32 of equal sizes: ONNX Runtime's CUDA kernel gets these as its
    arguments. Of others it copies tables from pinned memory in each run, which it cannot take while a CUDA graph is captured,
    and does not keep for its replays. Neighbouring parts are split off together, and then from each other, so that the fewest
    columns are copied twice. After all passes that make Splits. Returns how many Splits were of other sizes.
    """
    count = 0
    for node in list(model.graph):
        sizes = column_sizes(node) if node.op_type == "Split" and node.domain == "" else None
        if sizes is None or _is_direct(tuple(sizes)):
            continue
        parts = _parts(node, sizes)
        if min(size for _, size in parts) < 1:
            continue
        _write(model.graph, node, node.inputs[0], parts)
        model.graph.remove(node, safe=True)
        count += 1
    return count
