"""Serving: LeanAttention of packed tokens reads their projection as it comes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import onnx_ir as ir

from leanfleet.decoder_contract import POSITIONS
from leanfleet.export.fusions import rotary_tables
from leanfleet.export.fusions.graph import ROWS, adder, argument, constant, producer, set_arguments, swaps_heads
from leanfleet.export.fusions.rotary_embedding import rotated
from leanfleet.export.fusions.side_by_side import known_heads, side_by_side


def _by_token(value: ir.Value | None) -> ir.Value | None:
    """x [1,heads,T,D] where value [T,heads,D] is x[0] with tokens first, as leanfleet.export.serving makes it; else None."""
    tokens_first = producer(value, "Transpose")
    request = producer(tokens_first.inputs[0], "Gather") if tokens_first else None
    if not tokens_first or not request or list(tokens_first.attributes.get_ints("perm", ())) != [1, 0, 2]:
        return None
    which, x = constant(request.inputs[1]), request.inputs[0]
    if x is None or which is None or which.ndim != 0 or which.item() != 0 or request.attributes.get_int("axis", 0) != 0:
        return None
    known = x.shape is not None and len(x.shape) == 4 and x.shape[0] == 1 and isinstance(x.shape[3], int)
    return x if known else None


def _set_tokens(graph: ir.Graph, node: ir.Node, heads: Sequence[Any]) -> None:
    """Gives a LeanAttention node the tokens of `heads` [1,T,heads,D], as one tensor where they come from one."""
    op, old = adder(graph, node), [x for x in (argument(node, name) for name in ROWS) if x is not None]
    together = side_by_side(heads) if len({x.shape[3] for x in heads}) == 1 else None
    if together is not None:
        count, size = sum(x.shape[2] for x in heads), heads[0].shape[3]
        rows = op("Reshape", together, op("Constant", value_ints=[-1, count, size]))
        rows.type, rows.shape = old[0].type, ir.Shape([heads[0].shape[1], count, size])
        set_arguments(node, query=rows, new_key=None, new_value=None)
        node.attributes["packed_qkv"] = ir.AttrInt64("packed_qkv", 1)
        return
    for name, value, before in zip(ROWS, heads, old, strict=True):
        rows = op("Reshape", value, op("Constant", value_ints=[-1, *value.shape[2:]]))
        rows.type, rows.shape = before.type, before.shape
        set_arguments(node, **{name: rows})


def attend_packed(model: ir.Model, positions: int | None = None) -> int:
    """LeanAttention nodes of packed tokens take these as their projection gives them, queries, keys and values in one tensor
    where that gives them so, and take in rotary encodings, for up to `positions` positions: the input `positions` says where
    each token stands. None: nothing is done. After fuse_rotary. Returns the number of attentions.
    """
    graph, count = model.graph, 0
    tables: dict[tuple, tuple[ir.Value, ir.Value] | None] = {}
    numbers = next((value for value in graph.inputs if value.name == POSITIONS), None)
    if not positions or numbers is None:
        return 0
    for node in list(graph):
        if node.op_type != "LeanAttention" or argument(node, "cu_query_lens") is None:
            continue
        found = [_by_token(argument(node, name)) for name in ROWS]
        sources = [x for x in found if x is not None]
        if len(sources) < len(ROWS):
            continue
        rotary = None
        query, key = rotated(sources[0]), rotated(sources[1])
        if (
            argument(node, "cos_cache") is None
            and node.attributes.get_int("world", 1) == 1  # else pages do not stand in the order of their tokens' positions
            and query is not None
            and key is not None
            and query[1].inputs[1:4] == key[1].inputs[1:4]
            and positions <= rotary_tables.MOST_POSITIONS
        ):
            place = tuple(query[1].inputs[1:4])
            if place not in tables:
                compute = partial(rotary_tables.packed_tables, query[1], numbers, positions)
                tables[place] = rotary_tables.constants(graph, len(tables), node.name, compute)
            rotary = tables[place]
            if rotary is not None:
                sources[:2] = [query[0], key[0]]
        before = [x.producer() for x in sources]
        heads = [t.inputs[0] for t in before if t is not None and swaps_heads(t)]  # [1,T,heads,D]
        if len(heads) < len(ROWS) or not all(map(known_heads, heads)):
            continue
        if rotary:
            set_arguments(node, cos_cache=rotary[0], sin_cache=rotary[1])
        _set_tokens(graph, node, heads)
        count += 1
    return count
