"""com.microsoft.RotaryEmbedding before LeanAttention -> LeanAttention's own rotary encoding."""

from functools import partial

import onnx_ir as ir

from leanfleet.export.fusions import rotary_tables
from leanfleet.export.fusions.graph import argument, set_arguments
from leanfleet.export.fusions.rotary_embedding import rotated


def rotate_inside(model: ir.Model, positions: int | None = None) -> int:
    """LeanAttention nodes take in the rotary encodings of their queries and new keys, where angles follow from the tokens'
    positions alone: the tables become constants of `positions` rows, MOST_POSITIONS at most; None: no such bound is known, and
    nothing is done. After fuse_rotary. Returns the number of attentions.
    """
    graph, count = model.graph, 0
    tables: dict[tuple, tuple[ir.Value, ir.Value] | None] = {}
    if not positions or positions > rotary_tables.MOST_POSITIONS:
        return 0
    for node in graph:
        if node.op_type != "LeanAttention" or argument(node, "cos_cache") is not None:
            continue
        if argument(node, "block_table") is not None:  # pages need not stand in the order of their tokens' positions
            continue
        lens = argument(node, "seq_lens"), argument(node, "query_lens")
        if None in (*lens, argument(node, "new_value")):
            continue
        query, key = rotated(argument(node, "query")), rotated(argument(node, "new_key"))
        if query is None or key is None or query[1].inputs[1:4] != key[1].inputs[1:4]:
            continue
        place = (*query[1].inputs[1:4], *lens)
        if place not in tables:
            compute = partial(rotary_tables.tables, node, query[1], positions)
            tables[place] = rotary_tables.constants(graph, len(tables), node.name, compute)
        found = tables[place]
        if found is None:
            continue
        cosines, sines = found
        set_arguments(node, query=query[0], new_key=key[0], cos_cache=cosines, sin_cache=sines)
        count += 1
    return count
