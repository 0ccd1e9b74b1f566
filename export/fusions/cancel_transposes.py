"""A transpose of a transpose that undoes it -> what was transposed."""

import onnx_ir as ir

from leanfleet.export.fusions.graph import producer


def cancel_transposes(model: ir.Model, positions: int | None = None) -> int:
    """Pairs of Transpose nodes that leave their value as it was go, as those around the short convolutions of hybrid models.
    Returns the number of pairs."""
    count = 0
    for node in model.graph:
        if node.op_type != "Transpose" or (before := producer(node.inputs[0], "Transpose")) is None:
            continue
        orders = [n.attributes.get_ints("perm") for n in (before, node)]
        output, value = node.outputs[0], before.inputs[0]
        if (
            value is None
            or None in orders
            or output.is_graph_output()
            or [orders[0][i] for i in orders[1]] != sorted(orders[0])
        ):
            continue
        value.shape = value.shape or output.shape
        output.replace_all_uses_with(value)
        count += 1
    return count
