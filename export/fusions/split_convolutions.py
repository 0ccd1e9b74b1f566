"""CausalConv and the Split of its channels in three -> CausalConv that gives the three."""

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import column_sizes, take_over

_OUTPUTS = [t.name for t in spec.all_specs()["CausalConv"].outputs]
_SIZES = "split", "first", "second", "third"
_PARTS = [_OUTPUTS.index(name) for name in ("output", "output_2", "output_3")]


def split_convolutions(model: ir.Model, positions: int | None = None) -> int:
    """Queries, keys and values behind a convolution that all of them go through are written where they belong, and not copied
    from there. After merge_splits. Returns how many.
    """
    count = 0
    for node in list(model.graph):
        if (node.domain, node.op_type) != (spec.DOMAIN, "CausalConv") or node.attributes.get_int("split", 0) != 0:
            continue
        whole = node.outputs[0]
        split = next((use.node for use in whole.uses() if use.node.op_type == "Split" and use.node.domain == ""), None)
        sizes = column_sizes(split)
        if split is None or sizes is None or len(sizes) != 3 or min(sizes) < 1 or whole.is_graph_output():
            continue
        if split.graph is not node.graph or any(use.node is not split for use in whole.uses()):
            continue
        parts = ir.convenience.convert_attributes(dict(zip(_SIZES, (1, *sizes), strict=True)))
        kept = [attribute for name, attribute in node.attributes.items() if name not in _SIZES]
        new = ir.Node(spec.DOMAIN, "CausalConv", node.inputs, [*kept, *parts], num_outputs=len(_OUTPUTS))
        model.graph.insert_before(node, new)
        for i, part in zip(_PARTS, split.outputs, strict=True):
            take_over(part, new.outputs[i])
        state = new.outputs[_OUTPUTS.index("final_state")]
        if len(node.outputs) > 1:
            take_over(node.outputs[1], state)
        else:
            state.name = ""
        model.graph.remove([split, node], safe=True)
        count += 1
    return count
