"""Tables of cosines and sines that follow from the tokens' positions alone, computed once from the graph that makes them."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from leanfleet.export.fusions.graph import argument, layout

MOST_POSITIONS = 2**18  # rows of a rotary table that is worth its place in the file: 128 MB for cosines and sines of 64 angles

_LOG = logging.getLogger(__name__)


class DoesNotFit(Exception):
    """Why a graph's rotary encoding is none that follows from positions alone. What else is raised is an error."""


def _reads_unknown(node: ir.Node, value: ir.Value, known: Sequence[str | None]) -> bool:
    """Whether a Shape node reads a size of `value` that is neither a number nor has one of the names `known`."""
    sizes = value.shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(value.shape))]
    return any(not isinstance(n, int) and (n.value is None or n.value not in known) for n in sizes)


def _evaluator(
    graph: ir.Graph, outputs: Sequence[ir.Value], sizes: tuple[str | None, str | None], lens: Sequence[ir.Value]
) -> Callable[..., list[np.ndarray]]:
    """evaluate(batch, tokens, *lens) -> numpy values of `outputs`, where these follow from the values `lens`, of one axis, and
    from the sizes of other inputs of the graph alone. sizes: (name of the axis of requests, of tokens). Raises DoesNotFit."""
    bounds, seen = list(lens), set()
    pending: list[tuple[ir.Value | None, ir.Node | None]] = [(value, None) for value in outputs]
    while pending:
        value, reader = pending.pop()
        node = None if value is None else value.producer()
        if value is None or value in bounds and node is not None or value.const_value is not None:
            continue
        if node is None:
            if value not in lens and (reader is None or reader.op_type != "Shape" or value.shape is None):
                raise DoesNotFit(f"it depends on what {value.name} holds")
            if value not in lens and _reads_unknown(reader, value, sizes):
                raise DoesNotFit(f"it depends on a size of {value.name} that is not of {' or '.join(map(str, sizes))}")
            if value not in bounds:
                bounds.append(value)
        elif node not in seen:
            if node.domain != "" or any(
                a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()
            ):
                raise DoesNotFit(f"it depends on {node.name}, a node of {node.op_type}")
            seen.add(node)
            pending += [(x, node) for x in node.inputs]
    used = [v for v in bounds if v not in lens or v.is_graph_input() or any(use.node in seen for use in v.uses())]
    model = ir.Model(ir.convenience.extract(graph, used, outputs), ir_version=10)
    model.graph.opset_imports.update(graph.opset_imports)
    try:
        run = ReferenceEvaluator(ir.to_proto(model)).run
    except NotImplementedError as error:
        raise DoesNotFit(f"onnx has no reference of an operator that it depends on: {error}") from error

    def evaluate(batch: int, tokens: int, *values: Sequence[int]) -> list[np.ndarray]:
        known = dict(zip(sizes, (batch, tokens), strict=True))
        feeds = {v.name: np.array(x, v.dtype.numpy()) for v, x in zip(lens, values, strict=True)}
        for v in used[len(lens) :]:
            dims = [d if isinstance(d, int) else known.get(d.value, 1) for d in v.shape]  # sizes that are read are known
            feeds[v.name] = np.zeros(dims, v.dtype.numpy())
        try:
            return list(run(None, feeds))
        except (IndexError, ValueError) as error:  # numpy's, for sizes that the graph does not take
            raise DoesNotFit(f"it cannot be computed for {batch} requests of {tokens} tokens: {error}") from error

    return evaluate


def _name(value: ir.Value, axis: int) -> str | None:
    """The name of an axis whose size is open."""
    size = value.shape[axis]
    return None if isinstance(size, int) else size.value


def tables(node: ir.Node, rotary: ir.Node, positions: int) -> list[np.ndarray]:
    """The tables of a RotaryEmbedding node before a LeanAttention node as float32 arrays of `positions` rows, where row p
    is what a token at position p is rotated by, seq_lens - query_lens being the position of a request's first. Raises
    DoesNotFit."""
    query, lens = argument(node, "query"), (argument(node, "seq_lens"), argument(node, "query_lens"))
    axis = 1 if layout(node) == "bnhd" else 2
    if query.shape is None or any(query.shape.is_static(i) for i in (0, axis)):
        raise DoesNotFit("the batch or the number of new tokens is fixed")
    evaluate = _evaluator(node.graph, rotary.inputs[1:4], (_name(query, 0), _name(query, axis)), lens)
    rows, *found = evaluate(1, positions, [positions], [positions])
    if any(len(t) != positions for t in found):
        raise DoesNotFit("it has not a row for each position")
    # That rows follow from positions alone is tested: prompts and steps, short and long, of one request and of two.
    for tokens, ends, counts in ((1, [1], [1]), (3, [3], [3]), (3, [positions, 7], [1, 3]), (2, [9, positions], [2, 2])):
        ends = [min(n, positions) for n in ends]
        counts = [min(n, end) for n, end in zip(counts, ends, strict=True)]
        rows, *others = evaluate(len(ends), tokens, ends, counts)
        for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
            for t, other in zip(found, others, strict=True):
                if not np.allclose(other[rows[b, :count]], t[end - count : end], rtol=1e-5, atol=1e-6):
                    raise DoesNotFit("it depends on other requests, or on more than positions")
    return [t.astype(np.float32) for t in found]


def packed_tables(rotary: ir.Node, numbers: ir.Value, positions: int) -> list[np.ndarray]:
    """As `tables` for a node of packed tokens, whose positions are the graph's input `numbers` [T]. Raises DoesNotFit."""
    evaluate = _evaluator(rotary.graph, rotary.inputs[1:4], ("", _name(numbers, 0)), [numbers])
    rows, *found = evaluate(1, positions, range(positions))
    found = [t[rows[0]] for t in found]
    # That they follow from each token's position alone is tested, of short requests and of long ones.
    for some in ([0], list(range(min(3, positions))), [positions - 1, 0, min(3, positions - 1)]):
        rows, *others = evaluate(1, len(some), some)
        if not all(np.allclose(other[rows[0]], t[some], rtol=1e-5, atol=1e-6) for other, t in zip(others, found, strict=True)):
            raise DoesNotFit("it depends on more than a token's position")
    return [t.astype(np.float32) for t in found]


def constants(
    graph: ir.Graph, number: int, name: str | None, compute: Callable[[], list[np.ndarray]]
) -> tuple[ir.Value, ir.Value] | None:
    """Initializers of the tables, cosines and sines, that compute() returns, with `number` in their names. None where it raises
    DoesNotFit; the reason is logged with the name of the attention."""
    try:
        arrays = compute()
    except DoesNotFit as reason:
        _LOG.info("%s: its rotary encoding stays outside LeanAttention: %s", name, reason)
        return None
    values = [
        ir.Value(name=f"rotary_{kind}_{number}", const_value=ir.tensor(array))
        for kind, array in zip(("cos", "sin"), arrays, strict=True)
    ]
    for value, array in zip(values, arrays, strict=True):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
        graph.register_initializer(value)
    return values[0], values[1]
