"""com.microsoft.RotaryEmbedding: its function in standard operators, and what passes read of its nodes."""

from collections.abc import Callable

import onnx_ir as ir

from leanfleet.export.fusions.graph import MICROSOFT, Op, columns, is_microsoft, producer, set_function

TYPES = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def _rotate(op: Op, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value, heads: int) -> ir.Value:
    """x with a last axis of 2h channels, and an axis of heads at `heads`, rotated by rows [B,N,h] of the tables."""
    axis = op("Constant", value_ints=[heads])
    cos, sin = (op("Unsqueeze", op("Gather", rows, positions), axis) for rows in (cos, sin))
    first, second = op("Split", x, outputs=2, axis=-1, num_outputs=2)
    return op(
        "Concat",
        op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
        op("Add", op("Mul", second, cos), op("Mul", first, sin)),
        axis=-1,
    )


def rotate_heads_first(op: Op, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """The function for x [B,H,N,2h]."""
    return _rotate(op, x, positions, cos, sin, 1)


def rotate_flat(op: Op, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """The function for x [B,N,H*2h]."""
    width = op("Mul", op("Shape", cos, start=1), op("Constant", value_ints=[2]))
    heads = op("Concat", op("Constant", value_ints=[0, 0, -1]), width, axis=0)
    return op("Reshape", _rotate(op, op("Reshape", x, heads), positions, cos, sin, 2), op("Shape", x))


def set_rotary(model: ir.Model, build: Callable[..., ir.Value]) -> None:
    """Gives the model the function: rotate_heads_first or rotate_flat."""
    model.opset_imports.setdefault(MICROSOFT, 1)
    set_function(model, "RotaryEmbedding", ("input", "position_ids", "cos_cache", "sin_cache"), build)


def row_numbers(op: Op, value: ir.Value) -> ir.Value:
    """b N + i for each token (b, i) of a value [B,N,...], int64 [B,N]: the rows of tables that tokens have to themselves."""
    size = op("Shape", value, start=0, end=2)
    zero, one = (op("Constant", value_int=n) for n in (0, 1))
    return op("Reshape", op("Range", zero, op("ReduceProd", size, keepdims=0), one), size)


def rotated(value: ir.Value | None) -> tuple[ir.Value, ir.Node] | None:
    """(x, node) where value is x [B,H,N,D] after a RotaryEmbedding node of all its columns or of the first ones; else None."""
    node = None if value is None else value.producer()
    concat = producer(value, "Concat")
    rest = None
    if concat and len(concat.inputs) == 2 and concat.attributes.get_int("axis") in (-1, 3):
        encoded, rest = concat.inputs[0], columns(concat.inputs[1])
        if encoded is None or rest is None:
            return None
        node = encoded.producer()
    if node is None or not is_microsoft(node, "RotaryEmbedding") or node.attributes:
        return None
    x = node.inputs[0]
    if x is None or rest is None:
        return None if x is None else (x, node)
    first = columns(x)
    if first is None or first[0] is not rest[0] or first[1] != 0:
        return None
    shape = first[0].shape
    return (first[0], node) if shape is not None and (first[2], shape[-1]) == rest[1:] else None
