"""Gated feed-forward layers: Split, activation and product -> GatedActivation."""

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import MICROSOFT, adder, constant, producer, take_over


def _halves(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value, int] | None:
    """(x, first half, second half, F) where value is one of the halves that a Split makes of x [B,N,2F] with a known F."""
    split = producer(value, "Split")
    if split is None or len(split.outputs) != 2 or split.inputs[0] is None:
        return None
    x = split.inputs[0]
    if x.shape is None or len(x.shape) != 3 or not isinstance(x.shape[2], int) or x.shape[2] % 2 != 0:
        return None
    sizes = constant(split.inputs[1]) if len(split.inputs) > 1 else None
    equal = len(split.inputs) == 1 if sizes is None else sizes.tolist() == [x.shape[2] // 2] * 2
    if not equal or split.attributes.get_int("axis", 0) not in (-1, 2):
        return None
    return x, split.outputs[0], split.outputs[1], x.shape[2] // 2


def _activation(value: ir.Value | None) -> tuple[str, ir.Value] | None:
    """(GatedActivation's name of an activation, what it is of) where a value is one."""
    node = None if value is None else value.producer()
    if node is None or node.domain not in ("", MICROSOFT) or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Relu":
        return "relu", node.inputs[0]
    if node.op_type == "Gelu":
        return "gelu_tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu", node.inputs[0]
    if node.op_type == "Mul" and node.domain == "":
        for gate, factor in (node.inputs, reversed(node.inputs)):
            sigmoid = producer(factor, "Sigmoid")
            if gate is not None and sigmoid is not None and sigmoid.inputs[0] is gate:
                return "silu", gate
    return None


def fuse_gates(model: ir.Model, positions: int | None = None) -> int:
    """Products of an activated first half of a value and its second half become GatedActivation: one kernel for three or four.
    After pack_projections. Returns how many.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain != "":
            continue
        for active, up in (node.inputs, tuple(reversed(node.inputs))):
            found, halves = _activation(active), _halves(up)
            if found is None or halves is None or found[1] is not halves[1] or up is not halves[2]:
                continue
            x, op = halves[0], adder(model.graph, node)
            pairs = op("Reshape", x, op("Constant", value_ints=[0, 0, 2, halves[3]]))
            pairs.type = x.type
            new = op("GatedActivation", pairs, domain=spec.DOMAIN, activation=found[0])
            take_over(node.outputs[0], new)
            model.graph.remove(node, safe=True)
            count += 1
            break
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
