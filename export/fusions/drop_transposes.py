"""LeanAttention of heads first between transposes -> LeanAttention of tokens first."""

import onnx_ir as ir

from leanfleet.export.fusions.graph import (
    MICROSOFT,
    ROWS,
    adder,
    argument,
    is_microsoft,
    layout,
    producer,
    set_arguments,
    swaps_heads,
)
from leanfleet.export.fusions.rotary_embedding import rotate_flat, set_rotary

# The name of an input of LeanAttention, what its transpose takes, the rotary encoding between the two or None
Read = tuple[str, ir.Value, ir.Node | None]


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """What a value is the transpose (heads and tokens) of; None: it is not one, or its shape is unknown."""
    node = value.producer() if value is not None else None
    if node is None or not swaps_heads(node):
        return None
    return node.inputs[0] if node.inputs[0].shape is not None and isinstance(value.shape[3], int) else None


def _reads(node: ir.Node) -> list[Read] | None:
    """How a LeanAttention node reads its new tokens, where it does so through transposes; else None."""
    reads = []
    for name in ROWS:
        value, rotary = argument(node, name), None
        made = value.producer() if value is not None else None
        if is_microsoft(made, "RotaryEmbedding"):
            if len(value.uses()) != 1:
                return None
            rotary, value = made, made.inputs[0]
        source = _transposed(value)
        if source is None:
            return None
        reads.append((name, source, rotary))
    return reads


def _rotated_flat(graph: ir.Graph, source: ir.Value, rotary: ir.Node, dtype: ir.TypeProtocol) -> ir.Value:
    """source [B,N,H,D], rotated by a node of its own in the form [B,N,H*D]."""
    reshape = producer(source, "Reshape")
    flat = reshape.inputs[0] if reshape else None
    op = adder(graph, rotary)
    if flat is None or flat.shape is None or len(flat.shape) != 3:
        flat = op("Reshape", source, op("Constant", value_ints=[0, 0, -1]))
    rotated = op("RotaryEmbedding", flat, *rotary.inputs[1:], domain=MICROSOFT)
    rotated.type, rotated.shape = dtype, flat.shape
    return op("Reshape", rotated, op("Constant", value_ints=[0, 0, -1, source.shape[3]]))


def drop_transposes(model: ir.Model, positions: int | None = None) -> int:
    """LeanAttention and RotaryEmbedding read projections as they come, token after token, in place of heads first. Done
    where it can be for all of the model's rotary encodings, which share one function. Returns the number of attentions.
    """
    graph, plan, rotaries = model.graph, [], set()
    for node in graph:
        if node.op_type != "LeanAttention" or layout(node) != "bhnd":
            continue
        reads = _reads(node)
        users = [use.node for use in node.outputs[0].uses()]
        of_lse = [use.node for use in node.outputs[1].uses()] if len(node.outputs) > 1 else []
        if len(of_lse) > 1 or not all(swaps_heads(user, 3) for user in of_lse):
            continue
        if reads is not None and len(users) == 1 and swaps_heads(users[0]):
            plan.append((node, reads, [*users, *of_lse]))
            rotaries |= {rotary for _, _, rotary in reads if rotary}
    everywhere = {n for n in graph if is_microsoft(n, "RotaryEmbedding")}
    if not plan or rotaries and rotaries != everywhere:
        return 0

    for node, reads, after in plan:
        for name, source, rotary in reads:
            old = argument(node, name)
            value = _rotated_flat(graph, source, rotary, old.type) if rotary else source
            value.type = old.type
            value.shape = source.shape
            set_arguments(node, **{name: value})
        node.attributes["layout"] = ir.AttrString("layout", "bnhd")
        for output, transpose in zip(node.outputs, after, strict=False):  # the LSE, if anyone reads it, behind the output
            moved = transpose.outputs[0]
            output.shape = moved.shape
            moved.replace_all_uses_with(output)
    if rotaries:
        set_rotary(model, rotate_flat)
    return len(plan)
