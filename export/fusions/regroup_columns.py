"""Products whose columns stand head by head, each with all its parts -> products whose columns stand part by part."""

import numpy as np
import onnx_ir as ir

from leanfleet.export.fusions.graph import adder, column_sizes, constant, named, new_initializer, producer, read_by, take_over


def _columns_of_heads(split: ir.Node) -> tuple[ir.Node, np.ndarray, int, list[int]] | None:
    """(MatMul, its matrix, H, sizes) where a Split takes the last axis of [B,N,H,G], a product with a constant matrix as heads,
    to pieces of these sizes; else None."""
    heads = split.inputs[0]
    reshape = producer(heads, "Reshape")
    product = producer(reshape.inputs[0], "MatMul") if reshape else None
    matrix = constant(product.inputs[1]) if product else None
    if matrix is None or matrix.ndim != 2 or heads.shape is None or len(heads.shape) != 4:
        return None
    flat, (H, G) = product.outputs[0], heads.shape[2:]
    if not isinstance(H, int) or not isinstance(G, int) or H < 2 or matrix.shape[1] != H * G:
        return None
    sizes, tokens = column_sizes(split), heads.shape[:2]
    if sizes is None or sum(sizes) != G or flat.shape is None or not named(tokens):
        return None
    if list(flat.shape[:2]) != list(tokens):
        return None
    alone = read_by(flat, reshape) and read_by(heads, split)
    if not alone or len(flat.shape) != 3 or any(output.is_graph_output() for output in split.outputs):
        return None
    return product, matrix, H, sizes


def _skip_reshapes(graph: ir.Graph, heads: ir.Value, flat: ir.Value) -> None:
    """What Reshapes make of a part [B,N,H,g] is the part [B,N,H*g] itself where it has that shape again; others read it in the
    place of the heads."""
    for use in list(heads.uses()):
        node = use.node
        if node.op_type != "Reshape" or node.domain != "" or use.idx != 0 or node.graph is not graph:
            continue
        made, sizes = node.outputs[0], constant(node.inputs[1])
        same = made.shape is not None and named(made.shape) and list(made.shape) == list(flat.shape)
        if same and not made.is_graph_output():
            made.replace_all_uses_with(flat)
            graph.remove(node, safe=True)
            continue
        _skip_reshapes(graph, made, flat)
        if sizes is not None and 0 not in sizes:  # which would copy a size
            node.replace_input_with(0, flat)


def regroup_columns(model: ir.Model, positions: int | None = None) -> int:
    """A product that is seen as heads, each of which holds a piece of several parts, such as queries, keys, values and gates,
    has its columns sorted by parts: a Split of its last axis then gives each part for all heads as it lies in memory, and what
    joins parts again is left to merge_splits. Before pack_projections. Returns how many.
    """
    graph, count = model.graph, 0
    for split in list(graph):
        found = _columns_of_heads(split) if split.op_type == "Split" and split.domain == "" else None
        if found is None:
            continue
        product, matrix, H, sizes = found
        old, starts = product.inputs[1], np.cumsum([0, *sizes])
        order = np.concatenate([np.arange(H * starts[-1]).reshape(H, -1)[:, a:b].ravel() for a, b in zip(starts, starts[1:])])
        product.replace_input_with(1, new_initializer(graph, old, "by_parts", matrix[:, order]))
        op, flat = adder(graph, split), product.outputs[0]
        parts = ir.node(
            "Split", [flat, op("Constant", value_ints=[H * n for n in sizes])], {"axis": -1}, num_outputs=len(sizes)
        )
        graph.insert_before(split, parts)
        for piece, part, size in zip(split.outputs, parts.outputs, sizes, strict=True):
            part.dtype, part.shape = flat.dtype, ir.Shape([*flat.shape[:2], H * size])
            heads = op("Reshape", part, op("Constant", value_ints=[0, 0, H, size]))
            take_over(piece, heads)
            _skip_reshapes(graph, heads, part)
        graph.remove(split, safe=True)
        count += 1
    return count
