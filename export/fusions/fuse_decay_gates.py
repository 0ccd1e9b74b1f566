"""What makes the decays and beta of a GatedDeltaRule node from a layer's raw outputs -> DecayGates."""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, constant, named, narrow, new_initializer, producer

_ARGUMENTS = [t.name for t in spec.all_specs()["GatedDeltaRule"].inputs]
_STEEP = 18.0  # from here on log(1 + exp(x)) is x in float32


def _scalar(value: ir.Value | None) -> float | None:
    """A constant of one element."""
    array = constant(value)
    return float(array.astype(np.float64).item()) if array is not None and array.size == 1 else None


def _orders(node: ir.Node | None) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """The two inputs of a sum or product, either first."""
    return [] if node is None else [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _lengths(mask: ir.Value | None, masked: ir.Value | None) -> ir.Value | None:
    """query_lens [B] where a mask [B,N,1] or [B,N,1,1], perhaps cast, says which rows of a value [B,N,...] it covers."""
    if mask is None or masked is None or mask.shape is None or masked.shape is None or not named(masked.shape):
        return None
    rows_of = list(masked.shape[:2])
    if list(mask.shape) != [*rows_of, *[1] * (len(masked.shape) - 2)]:
        return None
    while (node := producer(mask, "Unsqueeze", "Cast")) is not None:
        mask = node.inputs[0]
    less = producer(mask, "Less")
    rows, lens = (less.inputs[0], less.inputs[1]) if less is not None else (None, None)
    numbers, known = producer(rows, "Range"), constant(rows)
    if numbers is not None:
        counts = _scalar(numbers.inputs[0]) == 0 and _scalar(numbers.inputs[2]) == 1
    else:
        counts = known is not None and known.ndim == 1 and np.array_equal(known, np.arange(known.size))
    if not counts:
        return None
    while (node := producer(lens, "Unsqueeze", "Cast")) is not None:
        lens = node.inputs[0]
    if lens is None or lens.shape is None or not lens.is_graph_input():
        return None
    return lens if lens.dtype == ir.DataType.INT32 and list(lens.shape) == rows_of[:1] else None


def _unmasked(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """(x, query_lens) where a value is x in front of query_lens and 0 behind; (value, None) for any other."""
    where = producer(value, "Where")
    if where is not None and _scalar(where.inputs[2]) == 0.0 and (lens := _lengths(where.inputs[0], value)) is not None:
        return where.inputs[1], lens
    for x, mask in _orders(producer(value, "Mul")):
        if producer(mask, "Cast") is not None and (lens := _lengths(mask, value)) is not None:
            return x, lens
    return value, None


def _softplus(value: ir.Value | None) -> ir.Value | None:
    """What a value is softplus of: as Softplus, or as Where(x > t, x, log(1 + exp(x)))."""
    if (plain := producer(value, "Softplus")) is not None:
        return plain.inputs[0]
    where = producer(value, "Where")
    over, log = (producer(where.inputs[0], "Greater"), producer(where.inputs[2], "Log")) if where is not None else (None, None)
    if where is None or over is None or log is None:
        return None
    x, limit = where.inputs[1], _scalar(over.inputs[1])
    for part, one in _orders(producer(log.inputs[0], "Add")):
        exp = producer(part, "Exp")
        if exp is not None and exp.inputs[0] is x and over.inputs[0] is x and _scalar(one) == 1.0 and (limit or 0.0) >= _STEEP:
            return x
    return None


@dataclass
class _Gates:
    """raw: [B,N,H] or [B,N,H,D], or [B,N,HD] to be seen as that; rate [H], bias [H] or [H,D]."""

    raw: ir.Value
    sizes: list[int]  # H, or H and D
    rate: np.ndarray
    bias: np.ndarray | None
    lens: ir.Value | None


def _plus_bias(value: ir.Value | None, sizes: list[int]) -> tuple[ir.Value | None, np.ndarray | None]:
    """(x, constant) where a value is their sum and the constant is of its last axes, which are `sizes`; (value, None) for any
    other."""
    for x, bias in _orders(producer(value, "Add")):
        array = constant(bias)
        if array is not None and list(array.shape[-len(sizes) :]) == sizes and array.size == math.prod(sizes):
            return x, array
    return value, None


def _decays(value: ir.Value | None) -> _Gates | None:
    """What the logarithms of decays are made of, held at 0 or less and perhaps masked."""
    value, lens = _unmasked(value)
    held = producer(value, "Where")
    below = producer(held.inputs[0], "LessOrEqual") if held is not None else None
    if held is None or below is None or below.inputs[0] is not held.inputs[1]:
        return None
    if _scalar(held.inputs[2]) != 0.0 or _scalar(below.inputs[1]) != 0.0:
        return None
    for rate, step in _orders(producer(held.inputs[1], "Mul")):
        array, x = constant(rate), _softplus(step)
        if array is None or x is None or x.shape is None or len(x.shape) not in (3, 4):
            continue
        sizes = [n for n in x.shape[2:] if isinstance(n, int)]
        if len(sizes) < len(x.shape) - 2 or array.size != sizes[0]:
            continue
        if (*[1] * (len(x.shape) - array.ndim), *array.shape)[2:] != (sizes[0], *[1] * (len(sizes) - 1)):
            continue  # of something else than heads
        rows, width = list(x.shape[:2]), math.prod(sizes)
        x, bias = _plus_bias(x, sizes)
        if bias is None and (reshape := producer(x, "Reshape")) is not None:  # the sum, seen as heads
            x, bias = _plus_bias(reshape.inputs[0], [width])
        raw = narrow(x)
        if raw is None or raw.shape is None or len(raw.shape) < 3:
            continue
        if list(raw.shape[:2]) != rows or not named(rows):
            continue
        if math.prod(n if isinstance(n, int) else 0 for n in raw.shape[2:]) == width:
            return _Gates(raw, sizes, array.reshape(-1), None if bias is None else bias.reshape(sizes), lens)
    return None


def _beta(value: ir.Value | None) -> tuple[ir.Value, float, ir.Value | None] | None:
    """(x, factor, query_lens) where a value is factor times sigmoid(x), perhaps cast and masked."""
    value, lens = _unmasked(value)
    factor = 1.0
    while (node := producer(value, "Cast", "Mul")) is not None:
        if node.op_type == "Mul":
            number = next((n for i in (0, 1) if (n := _scalar(node.inputs[i])) is not None), None)
            if number is None:
                return None
            factor *= number
            value = node.inputs[0] if _scalar(node.inputs[1]) is not None else node.inputs[1]
        else:
            value = node.inputs[0]
    sigmoid = producer(value, "Sigmoid")
    x = narrow(sigmoid.inputs[0]) if sigmoid is not None else None
    return (x, factor, lens) if x is not None and x.shape is not None and len(x.shape) == 3 else None


def _fuse(graph: ir.Graph, node: ir.Node) -> bool:
    decay_at, beta_at = _ARGUMENTS.index("log_decay"), _ARGUMENTS.index("beta")
    old_decay, old_beta = node.inputs[decay_at], node.inputs[beta_at]
    found, beta = _decays(old_decay), _beta(old_beta)
    if found is None or found.raw.shape is None or old_decay is None or old_beta is None:
        return False
    op = adder(graph, node)
    if beta is not None and (beta[2] is not found.lens or beta[0].dtype != found.raw.dtype):
        beta = None
    raw = found.raw
    if len(found.raw.shape) != 2 + len(found.sizes):
        raw = op("Reshape", raw, op("Constant", value_ints=[0, 0, *found.sizes]))
        raw.type = found.raw.type
    bias = None if found.bias is None else new_initializer(graph, old_decay, "bias", found.bias, ir.DataType.FLOAT)
    rate = new_initializer(graph, old_decay, "rate", found.rate, ir.DataType.FLOAT)
    inputs = [raw, rate, bias, beta[0] if beta else None, found.lens]
    attributes: dict[str, int | float] = {"per_key": len(found.sizes) - 1}
    attributes |= {"return_beta": 1, "beta_scale": beta[1]} if beta else {}
    gates = ir.node("DecayGates", inputs, attributes, domain=spec.DOMAIN, num_outputs=3 if beta else 1)
    graph.insert_before(node, gates)
    replaced = [(gates.outputs[0], old_decay, decay_at)]
    if beta:
        gates.outputs[1].name = ""  # steps, which nobody asks for
        replaced.append((gates.outputs[2], old_beta, beta_at))
    for value, old, at in replaced:
        value.type, value.shape = old.type, old.shape
        node.replace_input_with(at, value)
    return True


def fuse_decay_gates(model: ir.Model, positions: int | None = None) -> int:
    """One kernel for the ten or so that make a layer's decays and beta: bias, softplus, rate, sigmoid, casts, and what keeps
    padding out. After plain_softplus. Returns how many.
    """
    nodes = [n for n in model.graph if (n.domain, n.op_type) == (spec.DOMAIN, "GatedDeltaRule")]
    return sum(_fuse(model.graph, node) for node in nodes)
