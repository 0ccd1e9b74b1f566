"""RMS norms with a gate behind them, of columns of a wider product, and of sums in bfloat16 -> RmsNorm."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.fuse_residuals import over_root_mean_square
from leanfleet.export.fusions.graph import adder, column_sizes, constant, named, new_initializer, producer, read_by, take_over

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class _Norm:
    """node: gives the norm of x's last axis, times weight [D]; readers: the nodes of it that read x."""

    def __init__(self, node: ir.Node, x: ir.Value, weight: ir.Value, epsilon: float, readers: Sequence[ir.Node]):
        self.node, self.x, self.weight, self.epsilon, self.readers = node, x, weight, epsilon, readers
        self.output = node.outputs[0]


def _norm(node: ir.Node) -> _Norm | None:
    """The norm that a node gives: a product with a weight of x's type or of float32, perhaps cast to x's type; else None."""
    product = producer(node.inputs[0], "Mul") if node.op_type == "Cast" else node
    if node.domain != "" or product is None or product.op_type != "Mul":
        return None
    if product is not node and not read_by(product.outputs[0], node):
        return None
    for weight, normed in (product.inputs, tuple(reversed(product.inputs))):
        array = constant(weight)
        cast = producer(normed, "Cast")
        found = over_root_mean_square(cast.inputs[0] if cast is not None else normed)
        if weight is None or array is None or array.ndim != 1 or found is None:
            continue
        widened = producer(found[0], "Cast")
        x = widened.inputs[0] if widened is not None else found[0]
        if x is None or x.shape is None or x.dtype not in _TYPES or x.dtype != node.outputs[0].dtype:
            continue
        quotient = cast.inputs[0] if cast is not None else normed
        if normed is None or quotient is None or found[0].dtype != ir.DataType.FLOAT:
            continue
        if not read_by(normed, product) or not (cast is None or read_by(quotient, cast)):
            continue  # what is over the root has other readers, for whom it would stay
        squares = [n for n in (use.node for use in found[0].uses()) if n.op_type in ("Pow", "Mul") and _is_averaged(n)]
        inside = [*squares, quotient.producer()]
        if len(x.shape) in (2, 3, 4) and x.shape[-1] == len(array):
            return _Norm(node, x, weight, found[1], inside if widened is None else [widened])
    return None


def _is_averaged(node: ir.Node) -> bool:
    return all(use.node.op_type == "ReduceMean" for use in node.outputs[0].uses())


class _Weights:
    """Weights [C] in float32, of C / D times the same [D]."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self.made: dict[tuple[ir.Value, int], ir.Value] = {}

    def of(self, norm: _Norm, width: int) -> ir.Value:
        key = norm.weight, width
        if key not in self.made:
            array = constant(norm.weight)
            assert array is not None
            rows = np.tile(array.astype(np.float32), width // len(array))
            self.made[key] = new_initializer(self.graph, norm.weight, f"of_{width}", rows, ir.DataType.FLOAT)
        return self.made[key]


def _width(value: ir.Value | None) -> int | None:
    """C of a value [B,N,C], where it is known."""
    shape = None if value is None else value.shape
    return shape[2] if shape is not None and len(shape) == 3 and isinstance(shape[2], int) else None


def _fuse_gate(graph: ir.Graph, gated: ir.Node, weights: _Weights) -> bool:
    """A gate behind a norm of its heads, or of its rows. Whether it was done."""
    kind = gated.attributes.get_string("activation", "silu")
    if kind not in ("silu", "sigmoid"):
        return False
    gate, up = [*gated.inputs, None][:2]
    if len(gated.inputs) > 2 or gated.attributes.get_int("columns", 0) != 0 or up is None or (width := _width(gate)) is None:
        return False
    seen = producer(up, "Reshape")
    normed = seen.inputs[0] if seen is not None else up
    made = normed.producer() if normed is not None else None
    norm = _norm(made) if made is not None else None
    if (
        norm is None
        or not read_by(norm.output, seen or gated)
        or not read_by(up, gated)
        or norm.x.dtype != gated.outputs[0].dtype
    ):
        return False
    group = norm.x.shape[-1] if norm.x.shape is not None else 0
    if not isinstance(group, int) or group == 0 or width % group != 0 or (seen is None and group != width):
        return False
    op = adder(graph, gated)
    x = norm.x
    if seen is not None:
        x = op("Reshape", x, seen.inputs[1], allowzero=seen.attributes.get_int("allowzero", 0))
        x.type, x.shape = up.type, up.shape
    new = op(
        "RmsNorm",
        x,
        weights.of(norm, width),
        None,
        gate,
        domain=spec.DOMAIN,
        epsilon=norm.epsilon,
        group=0 if group == width else group,
        activation=kind,
    )
    take_over(gated.outputs[0], new)
    graph.remove(gated, safe=True)
    return True


def _part(norm: _Norm) -> ir.Value | None:
    """The part [B,N,C] of a Split whose rows, or their heads, a norm alone reads; None where there is none."""
    reshape = producer(norm.x, "Reshape")
    value = reshape.inputs[0] if reshape is not None else norm.x
    split = producer(value, "Split")
    if split is None or value is None or column_sizes(split) is None or _width(value) is None:
        return None
    if reshape is not None and not read_by(value, reshape):
        return None
    return value if read_by(norm.x, *norm.readers) else None


def _fuse_part(graph: ir.Graph, norm: _Norm, weights: _Weights) -> bool:
    """A norm of columns of a product. Whether it was done."""
    part = _part(norm)
    shape, width = norm.output.shape, _width(part)
    if part is None or part.shape is None or width is None or shape is None or norm.x.shape is None:
        return False
    if list(shape) != list(norm.x.shape) or list(shape[:2]) != list(part.shape[:2]) or not named(shape):
        return False
    group = norm.x.shape[-1]
    if not isinstance(group, int) or group == 0 or width % group != 0:
        return False
    heads = len(shape) == 4 and shape[2] == width // group
    if not heads and list(shape) != list(part.shape):
        return False
    op = adder(graph, norm.node)
    attributes = dict(epsilon=norm.epsilon, group=0 if group == width else group)
    new = op("RmsNorm", part, weights.of(norm, width), domain=spec.DOMAIN, **attributes)
    new.type, new.shape = part.type, part.shape
    take_over(norm.output, op("Reshape", new, op("Constant", value_ints=[0, 0, shape[2], group])) if heads else new)
    graph.remove(norm.node, safe=True)
    return True


def _fuse_sum(graph: ir.Graph, norm: _Norm, weights: _Weights) -> bool:
    """A sum in bfloat16 and its norm, for which ONNX Runtime has two kernels. Whether it was done."""
    total, width = producer(norm.x, "Add"), _width(norm.x)
    if total is None or width is None or norm.x.dtype != ir.DataType.BFLOAT16 or norm.x.is_graph_output():
        return False
    shapes = [value.shape if value is not None else None for value in (norm.x, norm.output, *total.inputs)]
    if any(shape is None or not named(shape) or list(shape) != list(shapes[0] or ()) for shape in shapes):
        return False
    x, addend = total.inputs
    attributes = {"epsilon": norm.epsilon, "return_sum": 1}
    fused = ir.node("RmsNorm", [x, weights.of(norm, width), addend], attributes, domain=spec.DOMAIN, num_outputs=2)
    graph.insert_before(total, fused)
    take_over(norm.output, fused.outputs[0])
    take_over(norm.x, fused.outputs[1])
    graph.remove(norm.node, safe=True)
    return True


def fuse_norms(model: ir.Model, positions: int | None = None) -> int:
    """A norm of heads and the gate behind it become one kernel (Qwen3-Next, Kimi-Linear), as do a sum in bfloat16 and its norm,
    and norms of queries and keys read them where their product puts them: read_columns finds RmsNorm there. Weights are
    float32. After fuse_gates, fuse_residuals and pack_heads, before read_columns. Returns how many.
    """
    graph, weights, count = model.graph, _Weights(model.graph), 0
    for node in list(graph):
        if (node.domain, node.op_type) == (spec.DOMAIN, "GatedActivation"):
            count += _fuse_gate(graph, node, weights)
    for node in list(graph):
        if node.graph is graph and (norm := _norm(node)) is not None:
            count += _fuse_part(graph, norm, weights) or _fuse_sum(graph, norm, weights)
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
