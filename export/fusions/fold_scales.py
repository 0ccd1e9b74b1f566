"""Products with constants beside products with constant matrices -> matrices that have them in."""

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.graph import constant, new_initializer, producer, read_by

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _loss(dtype: np.dtype) -> float:
    """What rounding may cost, as a share of the largest weight: two units in its last place."""
    return {"float32": 2.0**-22, "float16": 2.0**-10}.get(dtype.name, 2.0**-7)


def _matrix(product: ir.Node | None) -> np.ndarray | None:
    """The constant matrix [K,N] of a MatMul node that alone reads it; else None."""
    if product is None or product.op_type != "MatMul" or product.domain != "":
        return None
    weight = product.inputs[1]
    if weight is None or len(list(weight.uses())) != 1 or weight.is_graph_output():
        return None
    matrix = constant(weight)
    return matrix if matrix is not None and matrix.ndim == 2 else None


def _scaled(matrix: np.ndarray, by: np.ndarray) -> np.ndarray | None:
    """The matrix times a factor of all or of each column, in float32 and rounded to its type; None where that does not hold
    what the matrix did: beyond the type's range, or where its numbers lie too far apart."""
    wide = matrix.astype(np.float32)
    with np.errstate(over="ignore"):
        made = (wide * by).astype(matrix.dtype)
    back = made.astype(np.float32) / by
    most = _loss(matrix.dtype) * np.abs(wide).max(initial=0.0)
    return made if np.isfinite(back).all() and np.abs(back - wide).max(initial=0.0) <= most else None


def _set_matrix(graph: ir.Graph, product: ir.Node, matrix: np.ndarray) -> None:
    product.replace_input_with(1, new_initializer(graph, product.inputs[1], "scaled", matrix))


def _folded(graph: ir.Graph, node: ir.Node, x: ir.Value, factor: np.ndarray) -> bool:
    """Whether node, x times a constant, is not needed any more: other matrices say the same."""
    output, one = node.outputs[0], factor.size == 1
    if x.shape is None or factor.ndim > len(x.shape):  # the product has more axes
        return False
    if one and factor.reshape(-1)[0] == 1:
        return True
    by = factor.astype(np.float32).reshape(-1)
    if x.dtype not in _TYPES or not np.isfinite(by).all() or not by.all() or output.is_graph_output():
        return False
    maker, users = producer(x, "MatMul"), [use.node for use in output.uses()]
    matrix = _matrix(maker)
    # Of each column, or of all.
    if matrix is not None and read_by(x, node) and (one or factor.size == matrix.shape[1] == factor.shape[-1]):
        if (made := _scaled(matrix, by)) is not None:
            _set_matrix(graph, maker, made)
            return True
    matrices = [_matrix(user) for user in users]
    if one and users and all(m is not None and u.inputs[0] is output for m, u in zip(matrices, users, strict=True)):
        found = [_scaled(each, by[0]) for each in matrices]
        if all(made is not None for made in found):
            for user, made in zip(users, found, strict=True):
                _set_matrix(graph, user, made)
            return True
    return False


def fold_scales(model: ir.Model, positions: int | None = None) -> int:
    """Constants by which a product with a constant matrix is multiplied, or what such products read, go into the matrix, in
    float32 and rounded once. So do factors of 1. Before pack_projections. Returns the number of products gone.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain != "":
            continue
        for x, other in (node.inputs, tuple(reversed(node.inputs))):
            factor = constant(other)
            if x is None or factor is None or not factor.size or constant(x) is not None:
                continue
            if _folded(model.graph, node, x, factor) and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(x)
                model.graph.remove(node, safe=True)
                count += 1
            break
    return count
