"""RMS norms with a gate behind them, of columns of a wider product, and of sums in 16 bits -> RmsNorm."""

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, column_sizes, named, producer, read_by, take_over
from leanfleet.export.fusions.norms import Norm, Weights, find_norm, width_of


def _fuse_gate(graph: ir.Graph, gated: ir.Node, weights: Weights) -> bool:
    """A gate behind a norm of its heads, or of its rows. Whether it was done."""
    kind = gated.attributes.get_string("activation", "silu")
    if kind not in ("silu", "sigmoid"):
        return False
    gate, up = [*gated.inputs, None][:2]
    if len(gated.inputs) > 2 or gated.attributes.get_int("columns", 0) != 0 or up is None or (width := width_of(gate)) is None:
        return False
    seen = producer(up, "Reshape")
    normed = seen.inputs[0] if seen is not None else up
    made = normed.producer() if normed is not None else None
    norm = find_norm(made) if made is not None else None
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
        weights.of((norm, width)),
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


def _part(norm: Norm) -> ir.Value | None:
    """The part [B,N,C] of a Split whose rows, or their heads, a norm alone reads; None where there is none."""
    value: ir.Value | None = norm.x
    readers = [*norm.readers]
    while value is not None and read_by(value, *readers) and (seen := producer(value, "Reshape")) is not None:
        value, readers = seen.inputs[0], [seen]
    split = producer(value, "Split")
    if value is None or not read_by(value, *readers) or column_sizes(split) is None or width_of(value) is None:
        return None
    return value


def _fuse_part(graph: ir.Graph, norm: Norm, weights: Weights) -> bool:
    """A norm of columns of a product. Whether it was done."""
    part = _part(norm)
    shape, width = norm.output.shape, width_of(part)
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
    new = op("RmsNorm", part, weights.of((norm, width)), domain=spec.DOMAIN, **attributes)
    new.type, new.shape = part.type, part.shape
    take_over(norm.output, op("Reshape", new, op("Constant", value_ints=[0, 0, shape[2], group])) if heads else new)
    graph.remove(norm.node, safe=True)
    return True


def _fuse_sum(graph: ir.Graph, norm: Norm, weights: Weights) -> bool:
    """A sum in 16 bits and its norm, for which ONNX Runtime has two kernels in bfloat16. Whether it was done."""
    total, width = producer(norm.x, "Add"), width_of(norm.x)
    if total is None or width is None or norm.x.dtype == ir.DataType.FLOAT or norm.x.is_graph_output():
        return False
    shapes = [value.shape if value is not None else None for value in (norm.x, norm.output, *total.inputs)]
    if any(shape is None or not named(shape) or list(shape) != list(shapes[0] or ()) for shape in shapes):
        return False
    x, addend = total.inputs
    attributes = {"epsilon": norm.epsilon, "return_sum": 1}
    fused = ir.node("RmsNorm", [x, weights.of((norm, width)), addend], attributes, domain=spec.DOMAIN, num_outputs=2)
    graph.insert_before(total, fused)
    take_over(norm.output, fused.outputs[0])
    take_over(norm.x, fused.outputs[1])
    graph.remove(norm.node, safe=True)
    return True


def fuse_norms(model: ir.Model, positions: int | None = None) -> int:
    """A norm of heads and the gate behind it become one kernel (Qwen3-Next, Kimi-Linear), as do a sum in 16 bits and its norm,
    and norms of queries and keys read them where their product puts them: read_columns finds RmsNorm there. Weights are
    float32. After fuse_gates, fuse_residuals and pack_heads, before read_columns. Returns how many.
    """
    graph, weights, count = model.graph, Weights(model.graph), 0
    for node in list(graph):
        if (node.domain, node.op_type) == (spec.DOMAIN, "GatedActivation"):
            count += _fuse_gate(graph, node, weights)
    for node in list(graph):
        used = node.graph is graph and (node.outputs[0].uses() or node.outputs[0].is_graph_output())
        if used and (norm := find_norm(node)) is not None:
            count += _fuse_part(graph, norm, weights) or _fuse_sum(graph, norm, weights)
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
