"""LeanAttention of queries, keys and values -> LeanAttention of the one tensor that holds them."""

import onnx_ir as ir

from leanfleet.export.fusions.graph import ROWS, adder, argument, layout, set_arguments
from leanfleet.export.fusions.side_by_side import known_heads, side_by_side


def pack_heads(model: ir.Model, positions: int | None = None) -> int:
    """LeanAttention nodes take queries, new keys and new values as the one tensor that a Split, or a Slice each, made them of:
    a kernel fewer. After drop_transposes and attend_packed. Returns the number of attentions.
    """
    graph, count = model.graph, 0
    for node in list(graph):
        if node.op_type != "LeanAttention" or layout(node) != "bnhd":
            continue
        rows = [argument(node, name) for name in ROWS]
        if not all(map(known_heads, rows)) or len({x.shape[3] for x in rows}) != 1:
            continue
        together = side_by_side(rows)
        if together is None:
            continue
        op, old, heads = adder(graph, node), rows[0], sum(x.shape[2] for x in rows)
        packed = op("Reshape", together, op("Constant", value_ints=[0, 0, heads, old.shape[3]]))
        packed.type, packed.shape = old.type, ir.Shape([*old.shape[:2], heads, old.shape[3]])
        set_arguments(node, query=packed, new_key=None, new_value=None)
        node.attributes["packed_qkv"] = ir.AttrInt64("packed_qkv", 1)
        count += 1
    return count
