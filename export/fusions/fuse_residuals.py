"""A sum and its norm -> com.microsoft.SkipSimplifiedLayerNormalization or SkipLayerNormalization."""

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from leanfleet.export.fusions.graph import MICROSOFT, Op, constant, named, producer, set_function, take_over

SIMPLIFIED, CENTRED = "SkipSimplifiedLayerNormalization", "SkipLayerNormalization"


class OverRoot(NamedTuple):
    """x over the root of the mean square of its last axis plus epsilon. steps: the nodes that make it, from the square on."""

    x: ir.Value
    epsilon: float
    steps: tuple[ir.Node, ...]


def over_root_mean_square(value: ir.Value | None) -> OverRoot | None:
    """What a value is, where it is such a quotient; else None."""
    quotient = producer(value, "Div")
    root = quotient and producer(quotient.inputs[1], "Sqrt")
    total = root and producer(root.inputs[0], "Add")
    if not total:
        return None
    x = quotient.inputs[0]
    for averaged, added in (total.inputs, total.inputs[::-1]):
        mean, eps = producer(averaged, "ReduceMean"), constant(added)
        square = mean and producer(mean.inputs[0], "Pow", "Mul")
        if not square or eps is None or eps.size != 1:
            continue
        axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
        last = (
            axes is not None
            and axes.tolist() in ([-1], [len(x.shape or ()) - 1])
            and (mean.attributes.get_int("keepdims", 1) == 1)
        )
        exponent = constant(square.inputs[1])
        squared = square.inputs[0] is x and (
            square.inputs[1] is x if square.op_type == "Mul" else exponent is not None and exponent.tolist() in (2, [2])
        )
        if last and squared:
            return OverRoot(x, float(eps.item()), (square, mean, total, root, quotient))
    return None


def _rms_norm(product: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """(x, weight [E], eps) where a Mul node is the RMS norm of x's last axis, computed in float32 or in x's type; else None."""
    for weight, normed in (product.inputs, product.inputs[::-1]):
        if weight is None or weight.shape is None or len(weight.shape) != 1 or constant(weight) is None:
            continue
        cast = producer(normed, "Cast")
        found = over_root_mean_square(cast.inputs[0] if cast else normed)
        widened = producer(found[0], "Cast") if found and cast else None
        if not found or (cast and not widened):
            continue
        x = widened.inputs[0] if widened else found[0]
        if widened and x.dtype == ir.DataType.FLOAT16:
            continue  # fuse_norms', whose kernel begins while the one before it ends
        if x.dtype == weight.dtype == product.outputs[0].dtype:
            return x, weight, found[1]
    return None


def _layer_norm(node: ir.Node) -> tuple[ir.Value, Sequence[ir.Value], float] | None:
    """(x, parameters [E], eps) of a LayerNormalization node of x's last axis whose other outputs are not named; else None."""
    x, *parameters = node.inputs
    if (
        node.attributes.get_int("axis", -1) not in (-1, 2)
        or len([o for o in node.outputs if o.name]) > 1
        or any(constant(p) is None or p.shape is None or len(p.shape) != 1 or p.dtype != x.dtype for p in parameters)
    ):
        return None
    return x, parameters, node.attributes.get_float("epsilon", 1e-5)


def _norm(node: ir.Node) -> tuple[str, ir.Value, Sequence[ir.Value], float] | None:
    """(name of the fused operator, x, parameters, eps) where a node gives a norm of x; else None."""
    if node.domain == "" and node.op_type == "Mul" and (simplified := _rms_norm(node)):
        x, weight, eps = simplified
        return SIMPLIFIED, x, [weight], eps
    if node.domain == "" and node.op_type == "LayerNormalization" and (centred := _layer_norm(node)):
        return CENTRED, *centred
    return None


def _fits(x: ir.Value, total: ir.Node | None, normed: ir.Value, parameters: Sequence[ir.Value]) -> bool:
    """Whether shapes and types of a norm of the sum x [B,N,E] are those that the fused operators have kernels for."""
    if (
        total is None
        or x.shape is None
        or len(x.shape) != 3
        or not named(x.shape)
        or x.is_graph_output()
        or any(value.shape is None or list(value.shape) != list(x.shape) for value in (*total.inputs, normed))
    ):
        return False
    return x.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16) and all(list(p.shape) == [x.shape[2]] for p in parameters)


def _set_functions(model: ir.Model, epsilons: dict[str, float], lengths: dict[str, int]) -> None:
    def simplified(op: Op, x: ir.Value, skip: ir.Value, weight: ir.Value) -> list[ir.Value]:
        both, last = op("Add", x, skip), op("Constant", value_ints=[-1])
        wide = op("Cast", both, to=ir.DataType.FLOAT)
        root = op(
            "Sqrt", op("Add", op("ReduceMean", op("Mul", wide, wide), last), op("Constant", value_float=epsilons[SIMPLIFIED]))
        )
        normed = op("Mul", op("CastLike", op("Div", wide, root), both), weight)
        return [normed, op("ReduceMean", wide, last), op("Reciprocal", root), both]

    def centred(op: Op, x: ir.Value, skip: ir.Value, *parameters: ir.Value) -> list[ir.Value]:
        both = op("Add", x, skip)
        normed = op("LayerNormalization", both, *parameters, outputs=3, epsilon=epsilons[CENTRED])
        return [*normed, both]

    for name, build in ((SIMPLIFIED, simplified), (CENTRED, centred)):
        if name in epsilons:
            inputs = ("input", "skip", "gamma", "beta")[: 2 + lengths[name]]
            set_function(model, name, inputs, build, {"epsilon": epsilons[name]})


def fuse_residuals(model: ir.Model, positions: int | None = None) -> int:
    """A sum and the norm that reads it become one node, com.microsoft.SkipSimplifiedLayerNormalization or
    SkipLayerNormalization, which gives the sum too; with functions of these names for other runtimes. In float32, in
    float16 where the norm is not widened to float32, and for norms of the first one's epsilon and number of parameters
    alone: a name has one function. Returns the number of places.

    ONNX Runtime does so by itself only where nothing else reads the sum. Its CUDA kernels add up in float32 since 2026.
    """
    graph, count = model.graph, 0
    epsilons: dict[str, float] = {}
    lengths: dict[str, int] = {}
    for node in list(graph):
        found = _norm(node)
        if found is None:
            continue
        name, x, parameters, eps = found
        total = producer(x, "Add")
        if not _fits(x, total, node.outputs[0], parameters):
            continue
        if epsilons.setdefault(name, eps) != eps or lengths.setdefault(name, len(parameters)) != len(parameters):
            continue
        fused = ir.node(name, [*total.inputs, *parameters], {"epsilon": eps}, domain=MICROSOFT, num_outputs=4, name=node.name)
        normed, *unused, both = fused.outputs
        for output in unused:
            output.name = ""
        graph.insert_before(total, fused)
        take_over(node.outputs[0], normed)
        take_over(x, both)
        graph.remove(node, safe=True)
        count += 1
    if count:
        graph.sort()
        model.opset_imports.setdefault(MICROSOFT, 1)
        _set_functions(model, epsilons, lengths)
    return count
