"""Softplus beside the comparison that keeps it from overflowing -> Softplus."""

import math

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.graph import constant, producer

EXACT_FROM = 18.0  # log(1 + exp(-x)) is less than half a unit in the last place of x in float32


def _number(value: ir.Value | None, absent: float | None = None) -> float | None:
    """What a constant scalar is, or `absent` for no value; None for one that is not known."""
    array = constant(value)
    known = float(array.astype(np.float64).item()) if array is not None and array.ndim == 0 else None
    return absent if value is None else known


def _softplus(node: ir.Node) -> ir.Value | None:
    """The Softplus's output that a node gives: by Where(x > t, x, Softplus(x)), or by holding it between 0 and infinity."""
    if node.op_type == "Where":
        over, inner = producer(node.inputs[0], "Greater"), producer(node.inputs[2], "Softplus")
        limit = _number(over.inputs[1]) if over else None
        if over and inner and limit is not None and limit >= EXACT_FROM:
            x = node.inputs[1]
            return inner.outputs[0] if x is not None and over.inputs[0] is x and inner.inputs[0] is x else None
    if node.op_type == "Clip" and not node.attributes:  # which opsets below 11 have
        inner, bounds = producer(node.inputs[0], "Softplus"), [*node.inputs[1:], None, None]
        low, high = _number(bounds[0], -math.inf), _number(bounds[1], math.inf)
        if inner and low is not None and low <= 0.0 and high == math.inf:
            return inner.outputs[0]
    return None


def plain_softplus(model: ir.Model, positions: int | None = None) -> int:
    """PyTorch's softplus comes as Softplus for small x and x for large ones, and where it is held at or above 0 it is that
    already. Softplus alone gives the same numbers, in fewer kernels. Returns the number of nodes gone.
    """
    count = 0
    for node in list(model.graph):
        found = _softplus(node) if node.domain == "" else None
        if found is not None and found.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            if not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(found)
                model.graph.remove(node, safe=True)
                count += 1
    return count
