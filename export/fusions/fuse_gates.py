"""Gates: Split, activation and product, or activation and product of two values -> GatedActivation."""

import numpy as np
import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import (
    MICROSOFT,
    Op,
    adder,
    column_sizes,
    constant,
    named,
    narrow,
    new_initializer,
    producer,
    read_by,
    take_over,
)


def _halves(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value, int] | None:
    """(x, first half, second half, F) where value is one of the halves that a Split makes of x [B,N,2F] with a known F."""
    split = producer(value, "Split")
    if split is None or len(split.outputs) != 2 or split.inputs[0] is None:
        return None
    x = split.inputs[0]
    if x.shape is None or len(x.shape) != 3 or not isinstance(x.shape[2], int) or x.shape[2] % 2 != 0:
        return None
    if column_sizes(split) != [x.shape[2] // 2] * 2:
        return None
    return x, split.outputs[0], split.outputs[1], x.shape[2] // 2


def _activation(value: ir.Value | None) -> tuple[str, ir.Value] | None:
    """(GatedActivation's name of an activation, what it is of) where a value is one."""
    node = None if value is None else value.producer()
    if node is None or node.domain not in ("", MICROSOFT) or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in ("Relu", "Sigmoid"):
        return node.op_type.lower(), node.inputs[0]
    if node.op_type == "Gelu":
        return "gelu_tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu", node.inputs[0]
    if node.op_type == "Mul" and node.domain == "":
        for gate, factor in (node.inputs, reversed(node.inputs)):
            sigmoid = producer(factor, "Sigmoid")
            if gate is not None and sigmoid is not None and sigmoid.inputs[0] is gate:
                return "silu", gate
    return None


def _swap_halves(graph: ir.Graph, x: ir.Value, split: ir.Node) -> bool:
    """Whether the halves of x, which this Split alone reads, have changed places: a product with a constant matrix, plus a
    constant vector at most."""
    nodes, value, reader = [], x, split
    while value is not None and read_by(value, reader) and (node := producer(value, "Add", "MatMul")):
        place = next((i for i in (1, 0) if constant(node.inputs[i]) is not None), None)
        array = constant(node.inputs[place]) if place is not None else None
        if array is None or array.shape[-1:] != (x.shape[-1],) or not read_by(node.inputs[place], node):
            return False
        nodes.append((node, place, array))
        if node.op_type == "MatMul":
            break
        value, reader = node.inputs[1 - place], node
    if not nodes or nodes[-1][0].op_type != "MatMul" or nodes[-1][1] != 1 or nodes[-1][2].ndim != 2:
        return False
    for node, place, array in nodes:
        first, second = np.split(array, 2, axis=-1)
        old = node.inputs[place]
        node.replace_input_with(place, new_initializer(graph, old, "swapped", np.concatenate([second, first], -1)))
    return True


def _gate_last(node: ir.Node, active: ir.Value, gate: ir.Value, up: ir.Value) -> bool:
    """Whether a product of values and the activated gate behind them is all that reads the two."""
    made = active.producer()
    sigmoids = [n for n in (i.producer() for i in made.inputs if i is not None) if n is not None and n.op_type == "Sigmoid"]
    inner = all(read_by(sigmoid.outputs[0], made) for sigmoid in sigmoids)
    return inner and read_by(active, node) and read_by(up, node) and read_by(gate, made, *sigmoids)


_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _apart(node: ir.Node) -> tuple[str, ir.Value, ir.Value] | None:
    """(activation, gate, values) where a Mul node alone reads an activated gate, and values of its shape, that may both have
    been widened to float32 before or after the activation."""
    for active, up in (node.inputs, tuple(reversed(node.inputs))):
        found = _activation(active) or _activation(narrow(active))
        if found is None or up is None or up is active or not read_by(active, node):
            continue
        gate = found[1]
        scaled = producer(gate, "Mul")
        if found[0] == "sigmoid" and (up is gate or scaled is not None and up in scaled.inputs):  # silu itself, or QuickGelu
            continue
        if gate.shape is None or up.shape is None or len(gate.shape) not in (2, 3, 4) or not named(gate.shape):
            continue
        last = gate.shape[2 if len(gate.shape) > 2 else 1 :]
        if list(gate.shape) == list(up.shape) and gate.dtype in _TYPES and all(isinstance(n, int) for n in last):
            return found[0], gate, up
    return None


def _rows(op: Op, value: ir.Value) -> ir.Value:
    """A value [R,F], [B,N,F] or [B,N,H,D] as the operator takes it."""
    sizes = list(value.shape)
    if len(sizes) == 3:
        return value
    if len(sizes) == 2:
        found = op("Unsqueeze", value, op("Constant", value_ints=[0]))
    else:
        found = op("Reshape", value, op("Constant", value_ints=[0, 0, sizes[2] * sizes[3]]))
    found.type = value.type
    return found


def _heads_of(value: ir.Value) -> ir.Value | None:
    """The value [B,N,HF] whose heads are the rows of a value [R,F]; None where it is not known to be that."""
    reshape = producer(value, "Reshape")
    whole = reshape.inputs[0] if reshape is not None else None
    if whole is None or whole.shape is None or value.shape is None or len(whole.shape) != 3 or whole.dtype != value.dtype:
        return None
    width, each = whole.shape[2], value.shape[1]
    return whole if isinstance(width, int) and isinstance(each, int) and each > 0 and width % each == 0 else None


def _sizes_of(op: Op, value: ir.Value) -> ir.Value:
    """[B, N, C] of a value. Where it is columns of another, asked of that: who asks for a part's own sizes keeps it from being
    read in place."""
    split = producer(value, "Split")
    of = split.inputs[0] if split is not None and column_sizes(split) is not None else value
    return op("Concat", op("Shape", of, start=0, end=2), op("Constant", value_ints=[value.shape[2]]), axis=0)


def _cast(op: Op, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    if value.dtype == dtype:
        return value
    found = op("Cast", value, to=dtype)
    found.type, found.shape = ir.TensorType(dtype), value.shape
    return found


def _skip(up: ir.Value, reader: ir.Node) -> tuple[list[ir.Value], np.ndarray] | None:
    """([x, skip], scales [H]) where values that the reader alone has are x [B,N,H,D] plus skip [B,N,H,D] times a scale of each
    head, seen as [B,N,HD] or as they are."""
    total, reshape = producer(up, "Add"), producer(up, "Reshape")
    if reshape is not None:
        total = producer(reshape.inputs[0], "Add") if read_by(reshape.inputs[0], reshape) else None
    if total is None or up.shape is None or len(up.shape) < 3 or not read_by(up, reader):
        return None
    for x, part in (total.inputs, tuple(reversed(total.inputs))):
        product = producer(part, "Mul")
        if product is None or x is None or not read_by(part, total):
            continue
        for scale, skip in (product.inputs, tuple(reversed(product.inputs))):
            scales = constant(scale)
            if scales is None or skip is None or x.shape is None or skip.shape is None or len(x.shape) != 4:
                continue
            sizes, shape = list(x.shape), scales.shape
            if list(skip.shape) != sizes or not named(x.shape) or not all(isinstance(n, int) for n in sizes[2:]):
                continue
            if list(up.shape[:2]) != sizes[:2]:
                continue
            if scales.dtype == np.float32 and len(shape) in (2, 3, 4) and scales.size == sizes[2] == shape[-2]:
                return [x, skip], scales.reshape(-1)
    return None


def _gate_heads(graph: ir.Graph, op: Op, kind: str, gate: ir.Value, up: ir.Value, made: ir.Value) -> None:
    """GatedActivation of a gate [B,N,HF] and values that are seen as its heads' rows [R,F]. In place of `made` [R,F], or of
    what alone reads that: the same seen in the gate's shape."""
    values = op("Reshape", up, _sizes_of(op, gate), allowzero=1)  # a call may have no tokens
    values.type, values.shape = up.type, gate.shape
    new = op("GatedActivation", gate, values, domain=spec.DOMAIN, activation=kind)
    new.type, new.shape = made.type, gate.shape
    uses = [*made.uses()]
    alone = len(uses) == 1 and uses[0].idx == 0 and uses[0].node.graph is graph and not made.is_graph_output()
    seen = producer(uses[0].node.outputs[0], "Reshape") if alone else None
    back = seen.outputs[0] if seen is not None else None
    if back is not None and back.shape is not None and named(gate.shape) and list(back.shape) == list(gate.shape):
        take_over(back, new)
        graph.remove(seen, safe=True)
    else:
        take_over(made, op("Reshape", new, op("Constant", value_ints=[-1, made.shape[1]])))


def _fuse_apart(graph: ir.Graph, node: ir.Node, kind: str, gate: ir.Value, up: ir.Value) -> bool:
    """In the gate's own type where the product is of it, or is rounded to it and the values were of it; else in float32, as
    before: float16 may not hold what is between. Whether it was done."""
    op, product, own = adder(graph, node), node.outputs[0], narrow(gate)
    values, scales = _skip(up, node) or ([up], None)
    cast, *others = [use.node for use in product.uses()] or [None]
    rounds = cast is not None and not others and (cast.domain, cast.op_type, cast.graph) == ("", "Cast", node.graph)
    rounds = rounds and cast.outputs[0].dtype == own.dtype and not product.is_graph_output()
    wide, ranged = product.dtype == ir.DataType.FLOAT, own.dtype == ir.DataType.BFLOAT16
    if wide and rounds and all(narrow(x).dtype == own.dtype or ranged and x.dtype == product.dtype for x in values):
        gate, values, last = own, [_cast(op, narrow(x), own.dtype) for x in values], cast
    elif wide and all(x.dtype == product.dtype for x in values):
        gate, last = _cast(op, gate, product.dtype), node
    elif all(x.dtype == gate.dtype == product.dtype for x in values):
        last = node
    else:
        return False
    sizes, made = list(gate.shape), last.outputs[0]
    if len(sizes) == 2 and (whole := _heads_of(gate)) is not None:
        _gate_heads(graph, op, kind, whole, values[0], made)
        graph.remove(list(dict.fromkeys((last, node))), safe=True)
        return True
    inputs = [_rows(op, x) for x in (gate, *values)]
    if scales is not None:
        inputs.append(new_initializer(graph, up, "skip_scale", scales, ir.DataType.FLOAT))
    new = op("GatedActivation", *inputs, domain=spec.DOMAIN, activation=kind)
    if len(sizes) == 2:
        new = op("Squeeze", new, op("Constant", value_ints=[0]))
    elif len(sizes) == 4:
        new = op("Reshape", new, op("Constant", value_ints=[0, 0, *sizes[2:]]))
    take_over(made, new)
    new.shape = gate.shape
    graph.remove(list(dict.fromkeys((last, node))), safe=True)
    return True


def fuse_gates(model: ir.Model, positions: int | None = None) -> int:
    """Products of an activated half of a value and its other half become GatedActivation: one kernel for three or four. Where
    the gate is the second half, the columns of the matrix before it change places. So do products of an activated value and
    another of its shape, with the casts to float32 and back around them, and with what is added to the values from beside the
    recurrent layer, times a scale of each head (Mamba-2). After pack_projections. Returns how many.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain != "":
            continue
        for active, up in (node.inputs, tuple(reversed(node.inputs))):
            found, halves = _activation(active), _halves(up)
            if found is None or halves is None:
                continue
            if found[1] is halves[2] and up is halves[1]:
                split = up.producer()
                if not _gate_last(node, active, halves[2], up) or not _swap_halves(model.graph, halves[0], split):
                    continue
            elif found[1] is not halves[1] or up is not halves[2]:
                continue
            x, op = halves[0], adder(model.graph, node)
            pairs = op("Reshape", x, op("Constant", value_ints=[0, 0, 2, halves[3]]))
            pairs.type = x.type
            new = op("GatedActivation", pairs, domain=spec.DOMAIN, activation=found[0])
            take_over(node.outputs[0], new)
            model.graph.remove(node, safe=True)
            count += 1
            break
        else:
            if (apart := _apart(node)) is not None:
                count += _fuse_apart(model.graph, node, *apart)
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
