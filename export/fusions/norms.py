"""What passes about RMS norms share: finding one, and its weights for several heads."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.fuse_residuals import OverRoot, over_root_mean_square
from leanfleet.export.fusions.graph import constant, new_initializer, producer, read_by

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Norm:
    """node: gives the norm of x's last axis, times weight [D]; readers: the nodes of it that read x, none where others than the
    norm read what it makes of x on its way."""

    def __init__(self, node: ir.Node, x: ir.Value, weight: ir.Value, epsilon: float, readers: Sequence[ir.Node]):
        self.node, self.x, self.weight, self.epsilon, self.readers = node, x, weight, epsilon, readers
        self.output = node.outputs[0]


def find_norm(node: ir.Node) -> Norm | None:
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
        widened = producer(found.x, "Cast")
        x = widened.inputs[0] if widened is not None else found.x
        if x is None or x.shape is None or x.dtype not in _TYPES or x.dtype != node.outputs[0].dtype:
            continue
        quotient = cast.inputs[0] if cast is not None else normed
        if normed is None or quotient is None or found.x.dtype != ir.DataType.FLOAT:
            continue
        if not read_by(normed, product) or not (cast is None or read_by(quotient, cast)):
            continue  # what is over the root has other readers, for whom it would stay
        readers = _readers(found)
        if widened is not None:
            readers = [widened] if readers and read_by(widened.outputs[0], *readers) else []
        if len(x.shape) in (2, 3, 4) and x.shape[-1] == len(array):
            return Norm(node, x, weight, found.epsilon, readers)
    return None


def _readers(found: OverRoot) -> list[ir.Node]:
    """The two nodes of a quotient that read x; none where others read what is in between."""
    alone = all(read_by(made.outputs[0], reader) for made, reader in pairwise(found.steps))
    return [found.steps[0], found.steps[-1]] if alone else []


class Weights:
    """Weights [C] in float32 for heads side by side, each made once."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self.made: dict[tuple, ir.Value] = {}

    def of(self, *parts: tuple[Norm, int], ones: int = 0) -> ir.Value:
        """Of parts (norm of D columns, columns), whose weight is repeated, and so many ones behind them."""
        key = tuple((norm.weight, width) for norm, width in parts), ones
        if key not in self.made:
            rows = [np.ones(ones, np.float32)]
            for norm, width in reversed(parts):
                array = constant(norm.weight)
                assert array is not None
                rows.insert(0, np.tile(array.astype(np.float32), width // len(array)))
            first, together = parts[0][0].weight, np.concatenate(rows)
            self.made[key] = new_initializer(self.graph, first, f"of_{len(together)}", together, ir.DataType.FLOAT)
        return self.made[key]


def width_of(value: ir.Value | None) -> int | None:
    """C of a value [B,N,C], where it is known."""
    shape = None if value is None else value.shape
    return shape[2] if shape is not None and len(shape) == 3 and isinstance(shape[2], int) else None
