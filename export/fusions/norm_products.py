"""Norms of the queries and keys of a product -> one RmsNorm of the product, whose values stay as they are."""

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, column_sizes, read_by
from leanfleet.export.fusions.norms import Norm, Weights, find_norm, width_of


def _reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The standard operator of this type that alone reads a value; others may ask for its shape."""
    nodes = [use.node for use in value.uses() if use.node.op_type != "Shape"]
    alone = len(nodes) == 1 and not value.is_graph_output()
    return nodes[0] if alone and (nodes[0].domain, nodes[0].op_type) == ("", op_type) else None


def _of_heads(part: ir.Value, norms: dict[ir.Value, Norm]) -> Norm | None:
    """The norm of each D columns that alone reads a part [B,N,H D] of a product, seen as heads, in any order of the other axes
    (Gemma 3 has heads first); else None. norms: {what is normalised: the norm}."""
    x = part
    while (seen := _reader(x, "Reshape")) is not None:
        x = seen.outputs[0]
    if x is part:
        return None
    if (turned := _reader(x, "Transpose")) is not None:
        axes = turned.attributes.get_ints("perm", ())
        if not axes or axes[-1] != len(axes) - 1:
            return None
        x = turned.outputs[0]
    norm = norms.get(x)
    return norm if norm is not None and read_by(x, *norm.readers) and not norm.output.is_graph_output() else None


def norm_products(model: ir.Model, positions: int | None = None) -> int:
    """Where queries and keys are normalised by head (Qwen3, Gemma 3), their product is, once for both: what reads queries,
    keys and values side by side finds them so. After divide_by_roots and merge_splits, before fuse_rotary. Returns the number
    of products.
    """
    graph, weights, count = model.graph, Weights(model.graph), 0
    norms = {norm.x: norm for node in graph if (norm := find_norm(node)) is not None}
    for split in [n for n in graph if n.op_type == "Split" and n.domain == "" and len(n.outputs) == 3]:
        sizes, product = column_sizes(split), split.inputs[0]
        width = width_of(product)
        query, key = (_of_heads(part, norms) for part in split.outputs[:2])
        if sizes is None or product is None or width is None or query is None or key is None:
            continue
        heads = {norm.weight.shape[0] if norm.weight.shape is not None else None for norm in (query, key)}
        (group,) = heads if len(heads) == 1 else (None,)
        if not isinstance(group, int) or group == 0 or any(n % group != 0 for n in sizes) or query.epsilon != key.epsilon:
            continue
        weight = weights.of((query, sizes[0]), (key, sizes[1]), ones=sizes[2])
        attributes = dict(epsilon=query.epsilon, group=group, normed=sizes[0] + sizes[1])
        new = adder(graph, split)("RmsNorm", product, weight, domain=spec.DOMAIN, **attributes)
        new.type, new.shape = product.type, product.shape
        split.replace_input_with(0, new)
        for norm in (query, key):
            norm.output.replace_all_uses_with(norm.x)
        count += 1
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
