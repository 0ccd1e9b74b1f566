"""Products with constants beside products with constant matrices -> matrices that have them in."""

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.graph import constant, producer

# Of a factor: weights of 16 bits keep their precision, which ends below 2^-14 in float16.
_RANGE = {ir.DataType.FLOAT16: 2.0**4, ir.DataType.BFLOAT16: 2.0**40, ir.DataType.FLOAT: 2.0**40}


def _matrix(product: ir.Node | None) -> np.ndarray | None:
    """The constant matrix [K,N] of a MatMul node that alone reads it; else None."""
    if product is None or product.op_type != "MatMul" or product.domain != "":
        return None
    weight = product.inputs[1]
    if weight is None or len(list(weight.uses())) != 1 or weight.is_graph_output():
        return None
    matrix = constant(weight)
    return matrix if matrix is not None and matrix.ndim == 2 else None


def _set_matrix(graph: ir.Graph, product: ir.Node, matrix: np.ndarray) -> None:
    old = product.inputs[1]
    new = ir.Value(name=f"{old.name}_scaled", const_value=ir.tensor(matrix.astype(constant(old).dtype), dtype=old.dtype))
    new.dtype, new.shape = old.dtype, ir.Shape(matrix.shape)
    graph.register_initializer(new)
    product.replace_input_with(1, new)


def _fits(factor: np.ndarray, dtype: ir.DataType | None) -> bool:
    most = _RANGE.get(dtype) if dtype is not None else None
    size = np.abs(factor.astype(np.float64))
    return most is not None and bool(np.all((size <= most) & (size >= 1 / most)))


def _folded(graph: ir.Graph, node: ir.Node, x: ir.Value, factor: np.ndarray) -> bool:
    """Whether node, x times a constant, is not needed any more: other matrices say the same."""
    output, flat = node.outputs[0], factor.astype(np.float32).reshape(-1)
    one = factor.size == 1
    if one and flat[0] == 1.0 and x.shape is not None and factor.ndim <= len(x.shape):
        return True
    if not _fits(flat, x.dtype) or output.is_graph_output():
        return False
    maker, users = producer(x, "MatMul"), [use.node for use in output.uses()]
    matrix = _matrix(maker)
    # Of each column, or of all.
    if matrix is not None and not x.is_graph_output() and len(list(x.uses())) == 1:
        if one or (factor.size == matrix.shape[1] == factor.shape[-1] and factor.ndim <= len(x.shape or ())):
            _set_matrix(graph, maker, matrix.astype(np.float32) * flat)
            return True
    matrices = [_matrix(user) for user in users]
    if one and users and all(m is not None and u.inputs[0] is output for m, u in zip(matrices, users, strict=True)):
        for user, each in zip(users, matrices, strict=True):
            _set_matrix(graph, user, each.astype(np.float32) * flat[0])
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
