"""x cos + rotate_half(x) sin -> com.microsoft.RotaryEmbedding."""

from collections.abc import Iterator

import onnx_ir as ir

from leanfleet.export.fusions.graph import MICROSOFT, adder, columns, constant, narrow, producer, replace
from leanfleet.export.fusions.rotary_embedding import rotate_heads_first, row_numbers, set_rotary


def _half(value: ir.Value) -> tuple[ir.Value, list[ir.Node]] | None:
    """How to get the first half of a value [..., 2h] whose halves are equal, as (x [..., h], the nodes after x); else None."""
    steps: list[ir.Node] = []
    while True:
        concat = producer(value, "Concat")
        if concat:
            same = len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]
            return (concat.inputs[0], steps[::-1]) if same and concat.attributes.get_int("axis") == -1 else None
        node = producer(value, "Cos", "Sin", "Cast", "Mul")
        if node is None:
            return None
        if node.op_type == "Mul":
            factor = next((i for i in (0, 1) if (c := constant(node.inputs[i])) is not None and c.size == 1), None)
            if factor is None:
                return None
            value = node.inputs[1 - factor]
        else:
            value = node.inputs[0]
        steps.append(node)


def _rotated_half(value: ir.Value) -> ir.Value | None:
    """x where value is the concatenation of -x2 and x1, the halves of x's last axis; else None."""
    concat = producer(value, "Concat")
    two = concat and len(concat.inputs) == 2 and concat.attributes.get_int("axis") == -1
    negation = two and producer(concat.inputs[0], "Neg")
    if not negation:
        return None
    second, first = columns(negation.inputs[0]), columns(concat.inputs[1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    x = first[0]
    width = x.shape[-1]
    return x if width % 2 == 0 and (first[1:], second[1:]) == ((0, width // 2), (width // 2, width)) else None


def _rounded(node: ir.Node, dtype: ir.DataType | None) -> ir.Node | None:
    """The last node of an encoding of values of a type: the Add itself, or the Cast alone that rounds it; None: neither."""
    if node.outputs[0].dtype == dtype:
        return node
    uses = [use.node for use in node.outputs[0].uses()]
    alone = len(uses) == 1 and uses[0].graph is node.graph and not node.outputs[0].is_graph_output()
    cast = uses[0] if alone and (uses[0].domain, uses[0].op_type) == ("", "Cast") else None
    return cast if cast is not None and cast.outputs[0].dtype == dtype else None


def _encodings(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Node, ir.Node, ir.Node]]:
    """(x [B,H,N,2h], the nodes that unsqueeze cos and sin, the last node) for each way to read an Add node as x cos +
    rotate_half(x) sin, in x's type or in float32 and rounded."""
    if node.op_type != "Add" or node.domain != "":
        return
    products = [producer(value, "Mul") for value in node.inputs]
    for straight, rotated in (products, products[::-1]) if None not in products else ():
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            x = _rotated_half(rotated.inputs[i]) or _rotated_half(narrow(rotated.inputs[i]))
            if x is None or x not in (straight.inputs[j], narrow(straight.inputs[j])) or x.shape is None or len(x.shape) != 4:
                continue
            last = _rounded(node, x.dtype)
            cos, sin = (producer(value, "Unsqueeze") for value in (straight.inputs[1 - j], rotated.inputs[1 - i]))
            if None in (cos, sin, last) or any(
                (axes := constant(s.inputs[1])) is None or axes.tolist() != [1] for s in (cos, sin)
            ):
                continue
            rows = cos.inputs[0].shape
            if rows is not None and rows[0] == 1 and x.shape[0] != 1:  # tables have rows of their own for each request
                continue
            yield x, cos, sin, last


def _table(graph: ir.Graph, cos: ir.Value, sin: ir.Value, dtype: ir.DataType, before: ir.Node) -> list[ir.Value] | None:
    """[positions, cosines, sines] of a type, made before a node, of a pair of cos and sin; None: not of that form."""
    found = _half(cos), _half(sin)
    if None in found or found[0][0] is not found[1][0] or cos.shape is None or not isinstance(cos.shape[-1], int):
        return None
    op, rows = adder(graph, before), []
    for x, steps in found:
        value = x
        for step in steps:
            inputs = [value if constant(i) is None else i for i in step.inputs]
            value = op(step.op_type, *inputs, **{a.name: a.value for a in step.attributes.values()})
        if cos.dtype != dtype:
            value = op("Cast", value, to=dtype)
        rows.append(op("Reshape", value, op("Constant", value_ints=[-1, cos.shape[-1] // 2])))
    return [row_numbers(op, found[0][0]), *rows]


def fuse_rotary(model: ir.Model, positions: int | None = None) -> int:
    """Rotary position encodings (x cos + rotate_half(x) sin) become com.microsoft.RotaryEmbedding nodes, with a function of
    that name in standard operators for other runtimes. Returns the number of places.

    Each pair of cos and sin [B,N,2h] with equal halves becomes tables [B N,h] that token (b, i) reads at row b N + i.
    """
    graph, tables, count = model.graph, {}, 0
    for node in list(graph):
        for x, cosines, sines, last in _encodings(node):
            pair = cosines.inputs[0], sines.inputs[0], x.dtype
            if pair not in tables:
                tables[pair] = _table(graph, *pair, before=cosines)
            if tables[pair] is not None:
                replace(graph, last, ir.node("RotaryEmbedding", [x, *tables[pair]], domain=MICROSOFT, name=node.name))
                count += 1
                break
    if count:
        graph.sort()
        set_rotary(model, rotate_heads_first)
    return count
