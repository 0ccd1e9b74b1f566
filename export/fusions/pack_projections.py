"""Products of one value with several matrices -> one product and a Split."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.graph import adder, bias_of, constant, new_initializer, take_over


def _bias(product: ir.Value, width: int) -> tuple[ir.Node, np.ndarray] | None:
    """(node, vector) of the Add of a constant vector that alone reads a product of so many columns; else None."""
    found = bias_of(product, width)
    vector = constant(found[1]) if found is not None else None
    return (found[0], vector) if found is not None and vector is not None else None


def _joined(
    graph: ir.Graph, before: ir.Node, kind: str, value: ir.Value | None, arrays: Sequence[ir.TensorProtocol], dtype: ir.DataType
) -> ir.Value:
    """The output of a `kind` node of value and all arrays side by side, put before the node of the first of them. They are
    joined when they are read: a model's matrices are not copied before one of them is written."""
    old, sizes = before.outputs[0], [a.shape.numpy() for a in arrays]
    width = sum(size[-1] for size in sizes)

    def join() -> ir.Tensor:
        return ir.Tensor(np.concatenate([a.numpy() for a in arrays], axis=-1), dtype=dtype)

    packed = ir.LazyTensor(join, dtype, ir.Shape([*sizes[0][:-1], width]))
    new = adder(graph, before)(kind, value, new_initializer(graph, old, f"packed_{kind}", packed, dtype))
    new.type, new.shape = old.type, old.shape and ir.Shape([*old.shape[:-1], width])
    return new


def pack_projections(model: ir.Model, positions: int | None = None) -> int:
    """Products of one value with several constant matrices become one product and a Split: fewer, larger kernels. So do their
    sums with constant vectors, where there are any. Returns the number of products saved. (A Split of another axis
    than the last, such as of heads, costs ONNX Runtime's CUDA provider four copies to the device where sizes differ.)
    """
    groups: dict[tuple, list] = {}  # (value, type of the matrices) -> [(node, matrix)]
    for node in model.graph:
        if node.op_type == "MatMul" and node.domain == "":
            matrix = node.inputs[1]
            tensor = None if matrix is None else ir.convenience.get_const_tensor(matrix)
            if tensor is not None and len(tensor.shape) == 2:
                groups.setdefault((node.inputs[0], tensor.dtype), []).append((node, tensor))
    saved = 0
    for (x, dtype), group in groups.items():
        if len(group) < 2:
            continue
        first = group[0][0]
        widths = [tensor.shape[1] for _, tensor in group]
        biases = [_bias(node.outputs[0], width) for (node, _), width in zip(group, widths, strict=True)]
        product = _joined(model.graph, first, "MatMul", x, [tensor for _, tensor in group], dtype)
        if types := [bias[1].dtype for bias in biases if bias]:
            vectors = [bias[1] if bias else np.zeros(width, types[0]) for bias, width in zip(biases, widths, strict=True)]
            product = _joined(model.graph, first, "Add", product, [ir.tensor(v, dtype=dtype) for v in vectors], dtype)
        sizes = adder(model.graph, first)("Constant", value_ints=widths)
        split = ir.node("Split", [product, sizes], {"axis": -1}, num_outputs=len(group))
        model.graph.insert_before(first, split)
        for (node, _), bias, new in zip(group, biases, split.outputs, strict=True):
            last = bias[0] if bias else node
            take_over(last.outputs[0], new)
            for done in dict.fromkeys((last, node)):
                model.graph.remove(done, safe=True)
        saved += len(group) - 1
    return saved
