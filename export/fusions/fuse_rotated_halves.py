"""Rotary encodings of linear attention, written half by half -> com.microsoft.RotaryEmbedding."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from leanfleet.export.fusions.graph import MICROSOFT, adder, columns, is_microsoft, named, producer, replace
from leanfleet.export.fusions.rotary_embedding import TYPES, rotate_flat, row_numbers, set_rotary


def _rotated_halves(concat: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value] | None:
    """(x, angles, cosines, sines) where a Concat node makes x1 cos - x2 sin and x2 cos + x1 sin of the halves of x's last axis;
    else None. Halves may be cast first."""
    if len(concat.inputs) != 2 or concat.attributes.get_int("axis") not in (-1, 3):
        return None
    difference, total = producer(concat.inputs[0], "Sub"), producer(concat.inputs[1], "Add")
    products = [producer(value, "Mul") for node in (difference, total) if node for value in node.inputs]
    if len(products) != 4 or None in products:
        return None
    factors = []
    for product in products:
        table = next((i for i in (0, 1) if producer(product.inputs[i], "Cos", "Sin")), None)
        if table is None:
            return None
        half = product.inputs[1 - table]
        cast = producer(half, "Cast")
        factors.append((columns(cast.inputs[0] if cast else half), product.inputs[table]))
    (first, cos), (second, sin), *rest = factors
    if None in (first, second) or rest not in ([(second, cos), (first, sin)], [(first, sin), (second, cos)]):
        return None
    angles, width = cos.producer().inputs[0], first[0].shape[-1]
    if (cos.producer().op_type, sin.producer().op_type) != ("Cos", "Sin") or sin.producer().inputs[0] is not angles:
        return None
    whole = first[0] is second[0] and (first[1:], second[1:]) == ((0, width // 2), (width // 2, width))
    return (first[0], angles, cos, sin) if whole and width % 2 == 0 else None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node of this type and of the same graph that alone reads a value; else None."""
    users = [use.node for use in value.uses()]
    return producer(users[0].outputs[0], op_type) if len(users) == 1 and users[0].graph is value.graph else None


def _factor(value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """(node, factor) where the node alone reads a value [B,N,H,D] and multiplies it with a factor [B,N,1,1]; else None."""
    node = None if value.is_graph_output() else _only_user(value, "Mul")
    factor = next((i for i in node.inputs if i is not value), None) if node else None
    if factor is None or factor.shape is None or list(factor.shape) != [*value.shape[:2], 1, 1]:
        return None
    return node, factor


def fuse_rotated_halves(model: ir.Model, positions: int | None = None) -> int:
    """Rotary position encodings as leanfleet.export.linear_attention.rotary writes them, of projections [B,N,H*2h] by angles
    [B,N,1,h], become RotaryEmbedding nodes as in fuse_rotary, with tables in the projections' type. A factor [B,N,1,1] that
    only the rotated heads are multiplied with, such as 0 for padding, goes into the tables. Returns the number of places; 0
    for a model that has such nodes already, whose function may be another.
    """
    graph, tables, count = model.graph, {}, 0
    if any(is_microsoft(node, "RotaryEmbedding") for node in graph):
        return 0
    for node in list(graph):
        found = _rotated_halves(node) if node.op_type == "Concat" and node.domain == "" else None
        if found is None:
            continue
        x, angles, cos, sin = found
        reshape, half = producer(x, "Reshape"), x.shape[-1] // 2
        flat = reshape.inputs[0] if reshape else None
        if (
            flat is None
            or flat.shape is None
            or len(flat.shape) != 3
            or len(x.shape) != 4
            or angles.shape is None
            or (
                list(angles.shape) != [*x.shape[:2], 1, half]
                or list(flat.shape[:2]) != list(x.shape[:2])
                or not named(x.shape[:2])
                or x.dtype not in TYPES
            )
        ):
            continue
        cast = _only_user(node.outputs[0], "Cast")
        last = cast if cast and cast.outputs[0].dtype == x.dtype else node
        if last.outputs[0].dtype != x.dtype:
            continue

        key: tuple = cos, sin, x.dtype
        if key not in tables:
            op = adder(graph, node)
            rows = [op("Cast", op("Reshape", t, op("Constant", value_ints=[-1, half])), to=x.dtype) for t in (cos, sin)]
            tables[key] = row_numbers(op, flat), *rows
        last.outputs[0].shape = x.shape
        if multiplied := _factor(last.outputs[0]):
            (numbers, *rows), (last, factor) = tables[key], multiplied
            key = cos, sin, factor
            if key not in tables:
                op = adder(graph, last)
                each = op("Reshape", factor, op("Constant", value_ints=[-1, 1]))
                tables[key] = numbers, *(op("Mul", t, each) for t in rows)
        rotated = ir.node("RotaryEmbedding", [flat, *tables[key]], domain=MICROSOFT, name=node.name)
        graph.insert_before(last, rotated)
        rotated.outputs[0].type, rotated.outputs[0].shape = flat.type, flat.shape
        replace(graph, last, ir.node("Reshape", [rotated.outputs[0], reshape.inputs[1]]))
        count += 1
    if count:
        RemoveUnusedNodesPass()(model)
        graph.sort()
        set_rotary(model, rotate_flat)
    return count
