"""x * (1 / sqrt(y)) -> x / sqrt(y)."""

import onnx_ir as ir

from leanfleet.export.fusions.graph import producer, replace


def divide_by_roots(model: ir.Model, positions: int | None = None) -> int:
    """Writes x * (1 / sqrt(y)) as x / sqrt(y), which ONNX Runtime recognises as an RMS norm. Returns the number of places."""
    count = 0
    for node in list(model.graph):
        for i in (0, 1) if node.op_type == "Mul" and node.domain == "" else ():
            reciprocal = producer(node.inputs[i], "Reciprocal")
            root = reciprocal and producer(reciprocal.inputs[0], "Sqrt")
            if root:
                replace(model.graph, node, ir.node("Div", [node.inputs[1 - i], root.outputs[0]], name=node.name))
                count += 1
                break
    return count
