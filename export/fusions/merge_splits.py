"""Splits of parts of Splits, and Concats of neighbouring parts -> one Split."""

import onnx_ir as ir

from leanfleet.export.fusions.graph import adder, column_sizes, producer, take_over


def _read_once_by(value: ir.Value, node: ir.Node) -> bool:
    """Whether this node alone reads a value, once; not even its shape is asked for, as the value will be gone."""
    return not value.is_graph_output() and [use.node for use in value.uses()] == [node]


def _resplit(graph: ir.Graph, split: ir.Node, parts: list[tuple[ir.Value, int]]) -> None:
    """A Split with these parts in another's place: (value whose uses a part takes over, its size)."""
    sizes = adder(graph, split)("Constant", value_ints=[size for _, size in parts])
    new = ir.node("Split", [split.inputs[0], sizes], {"axis": -1}, num_outputs=len(parts))
    graph.insert_before(split, new)
    for (old, _), part in zip(parts, new.outputs, strict=True):
        take_over(old, part)


def _joined(graph: ir.Graph, concat: ir.Node) -> bool:
    """Whether a Concat was of neighbouring parts of a Split, which are one part now."""
    split = producer(concat.inputs[0], "Split")
    sizes = column_sizes(split)
    if split is None or sizes is None or len(concat.inputs) < 2:
        return False
    first, count = list(split.outputs).index(concat.inputs[0]), len(concat.inputs)
    rank = len(split.inputs[0].shape)
    if (
        list(concat.inputs) != list(split.outputs)[first : first + count]
        or concat.attributes.get_int("axis", 0) not in (-1, rank - 1)
        or not all(_read_once_by(x, concat) for x in concat.inputs)
    ):
        return False
    outputs = list(split.outputs)
    whole = concat.outputs[0], sum(sizes[first : first + count])
    parts = list(zip(outputs, sizes, strict=True))
    if count == len(outputs):
        concat.outputs[0].replace_all_uses_with(split.inputs[0])
        graph.remove([concat, split], safe=True)
        return True
    _resplit(graph, split, [*parts[:first], whole, *parts[first + count :]])
    graph.remove([concat, split], safe=True)
    return True


def _flattened(graph: ir.Graph, inner: ir.Node) -> bool:
    """Whether a Split was of a part of another, which has its parts now."""
    outer, sizes = producer(inner.inputs[0], "Split"), column_sizes(inner)
    before = column_sizes(outer)
    if outer is None or sizes is None or before is None or not _read_once_by(inner.inputs[0], inner):
        return False
    if len(outer.inputs[0].shape) != len(inner.inputs[0].shape):
        return False
    parts: list[tuple[ir.Value, int]] = []
    for value, size in zip(outer.outputs, before, strict=True):
        parts += zip(inner.outputs, sizes, strict=True) if value is inner.inputs[0] else [(value, size)]
    _resplit(graph, outer, parts)
    graph.remove([inner, outer], safe=True)
    return True


def merge_splits(model: ir.Model, positions: int | None = None) -> int:
    """A Split along the last axis of a part that another Split makes, and a Concat of neighbouring parts, are left to the first
    Split: each of them copies all that it reads. After pack_projections. Returns how many are gone.
    """
    count = 0
    for node in list(model.graph):
        if node.domain != "" or any(output.is_graph_output() for output in node.outputs):
            continue
        if node.op_type == "Concat":
            count += _joined(model.graph, node)
        elif node.op_type == "Split":
            count += _flattened(model.graph, node)
    return count
