"""Serving: packed tokens are spread to requests before their projection is split to heads."""

from functools import partial

import onnx_ir as ir

from leanfleet.export.fusions import rotary_tables
from leanfleet.export.fusions.graph import ROWS, adder, argument, constant, producer, set_arguments, swaps_heads
from leanfleet.export.fusions.rotary_embedding import rotated
from leanfleet.export.fusions.side_by_side import known_heads, side_by_side


def _spread(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(x [1,heads,T,D], slots [B,N]) where value [B,N,heads,D] is x's tokens taken by slots, as leanfleet.export.serving
    spreads them; else None."""
    reshape = producer(value, "Reshape")
    taken = producer(reshape.inputs[0], "Gather") if reshape else None
    flat = producer(taken.inputs[1], "Reshape") if taken and taken.attributes.get_int("axis", 0) == 0 else None
    tokens_first = producer(taken.inputs[0], "Transpose") if flat else None
    request = producer(tokens_first.inputs[0], "Gather") if tokens_first else None
    if not request or list(tokens_first.attributes.get_ints("perm", ())) != [1, 0, 2]:
        return None
    which, x, slots = constant(request.inputs[1]), request.inputs[0], flat.inputs[0]
    if which is None or which.ndim != 0 or which.item() != 0 or request.attributes.get_int("axis", 0) != 0:
        return None
    known = x.shape is not None and len(x.shape) == 4 and x.shape[0] == 1 and isinstance(x.shape[3], int)
    return (x, slots) if known and slots.shape is not None and len(slots.shape) == 2 else None


def _set_rows(
    graph: ir.Graph, node: ir.Node, heads: list[ir.Value], slots: ir.Value, spreads: dict[tuple[ir.Value, ir.Value], ir.Value]
) -> None:
    """Gives a LeanAttention node the rows of `heads` [1,T,heads,D] that slots [B,N] name. spreads: those made before."""
    widths = [value.shape[2] * value.shape[3] for value in heads]
    op, together = adder(graph, node), side_by_side(heads)
    wholes = [(together, sum(widths))] if together is not None else list(zip(heads, widths, strict=True))
    for value, width in wholes:
        if (value, slots) not in spreads:
            rows = op("Reshape", value, op("Constant", value_ints=[-1, width]))
            spreads[value, slots] = op("Gather", rows, slots, axis=0)
    parts = [spreads[value, slots] for value, _ in wholes]
    if together is not None:
        sizes = op("Constant", value_ints=widths)
        split = ir.node("Split", [parts[0], sizes], {"axis": -1}, num_outputs=len(heads))
        graph.insert_before(node, split)
        parts = list(split.outputs)
    for name, value, part, width in zip(ROWS, heads, parts, widths, strict=True):
        old = argument(node, name)
        part.type, part.shape = old.type, ir.Shape([*old.shape[:2], width])
        rows = op("Reshape", part, op("Constant", value_ints=[0, 0, *value.shape[2:]]))
        rows.type, rows.shape = old.type, old.shape
        set_arguments(node, **{name: rows})


def spread_packed(model: ir.Model, positions: int | None = None) -> int:
    """Tokens packed for leanfleet.export.serving are spread to a row a request before their projection is split to heads, by
    one Gather an attention, or three where queries, keys and values are made apart; and rotary encodings go into LeanAttention,
    for up to `positions` positions: token i of request b stands at seq_lens[b] - query_lens[b] + i, which is what the input
    `positions` says of it. None: nothing is done. After fuse_rotary. Returns the number of attentions.
    """
    graph, count = model.graph, 0
    tables: dict[tuple, tuple[ir.Value, ir.Value] | None] = {}
    spreads: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    numbers = next((value for value in graph.inputs if value.name == "positions"), None)
    if not positions or numbers is None:
        return 0
    for node in list(graph):
        if (
            node.op_type != "LeanAttention"
            or argument(node, "block_table") is None
            or any(argument(node, name) is not None for name in ("sinks", "cos_cache"))
        ):
            continue
        found = [_spread(argument(node, name)) for name in ROWS]
        if None in found or len({slots for _, slots in found}) != 1:
            continue
        slots, sources, rotary = found[0][1], [x for x, _ in found], None
        encoded = [rotated(x) for x in sources[:2]]
        if (
            None not in encoded
            and encoded[0][1].inputs[1:4] == encoded[1][1].inputs[1:4]
            and (positions <= rotary_tables.MOST_POSITIONS)
        ):
            place = tuple(encoded[0][1].inputs[1:4])
            if place not in tables:
                compute = partial(rotary_tables.packed_tables, encoded[0][1], numbers, positions)
                tables[place] = rotary_tables.constants(graph, len(tables), node.name, compute)
            if tables[place] is not None:
                sources[:2], rotary = [x for x, _ in encoded], tables[place]
        before = [x.producer() for x in sources]
        if any(t is None or not swaps_heads(t) for t in before):
            continue
        heads = [t.inputs[0] for t in before]  # [1,T,heads,D]
        if not all(map(known_heads, heads)):
            continue
        if rotary:
            set_arguments(node, cos_cache=rotary[0], sin_cache=rotary[1])
        _set_rows(graph, node, heads, slots, spreads)
        count += 1
    return count
