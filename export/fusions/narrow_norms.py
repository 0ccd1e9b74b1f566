"""RMS norms whose weight is applied in float32 -> ones whose weight is applied in their input's type."""

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.fuse_residuals import over_root_mean_square
from leanfleet.export.fusions.graph import adder, constant, new_initializer, producer, take_over


def _narrow(weight: np.ndarray, dtype: ir.DataType) -> np.ndarray | None:
    """A norm's weight in 16 bits, or None where too much of it would be lost: bfloat16 has no room for 1 + w."""
    narrow = weight.astype(dtype.numpy())
    exact = np.array_equal(narrow.astype(np.float32), weight)
    held = dtype == ir.DataType.FLOAT16 and bool(np.all((np.abs(weight) >= 2.0**-14) & (np.abs(weight) < 60000.0)))
    return narrow if exact or held else None


def narrow_norms(model: ir.Model, positions: int | None = None) -> int:
    """Of 16-bit rows, Cast(weight * normed) becomes weight * Cast(normed): the form that fuse_residuals and ONNX Runtime itself
    make one kernel of, which multiplies in float32 and rounds once. The weight is rounded to 16 bits, as all others are.
    Before fuse_residuals. Returns how many.
    """
    graph, count = model.graph, 0
    narrow: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for node in list(graph):
        product = producer(node.inputs[0], "Mul") if node.op_type == "Cast" and node.domain == "" else None
        if product is None or len(list(product.outputs[0].uses())) != 1 or product.outputs[0].is_graph_output():
            continue
        for weight, normed in (product.inputs, tuple(reversed(product.inputs))):
            array, found = constant(weight), over_root_mean_square(normed)
            widened = producer(found[0], "Cast") if found else None
            x = widened.inputs[0] if widened else None
            if array is None or array.ndim != 1 or array.dtype != np.float32 or x is None or x.dtype != node.outputs[0].dtype:
                continue
            if x.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) or (held := _narrow(array, x.dtype)) is None:
                continue
            if (weight, x.dtype) not in narrow:
                narrow[weight, x.dtype] = new_initializer(graph, weight, "narrow", held, x.dtype)
            value = narrow[weight, x.dtype]
            op = adder(graph, node)
            cast = op("Cast", normed, to=x.dtype)
            cast.dtype, cast.shape = x.dtype, normed.shape
            take_over(node.outputs[0], op("Mul", value, cast))
            graph.remove([node, product], safe=True)
            count += 1
            break
    return count
