"""Parts of a Split that CausalConv and GatedActivation read -> the columns where they stand."""

from itertools import accumulate

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, column_sizes, take_over


def _reader(value: ir.Value) -> ir.Node | None:
    """The node that alone reads a value and can read it among other columns; None where there is none."""
    uses = [*value.uses()]
    if value.is_graph_output() or len(uses) != 1 or uses[0].idx != 0:
        return None
    node = uses[0].node
    if node.domain != spec.DOMAIN or node.attributes.get_int("columns", 0) != 0:
        return None
    has_up = node.op_type == "GatedActivation" and len(node.inputs) > 1 and node.inputs[1] is not None
    return node if node.op_type == "CausalConv" or has_up else None


def read_columns(model: ir.Model, positions: int | None = None) -> int:
    """A convolution or a gate whose input is a part of a wider product reads it there, and Slices copy what is left. After
    fuse_gates and split_convolutions, before nest_splits. Returns how many parts are no longer copied.
    """
    count = 0
    for split in [n for n in model.graph if n.op_type == "Split" and n.domain == ""]:
        sizes, x = column_sizes(split), split.inputs[0]
        if sizes is None or x is None or x.shape is None or len(x.shape) != 3 or not isinstance(x.shape[2], int):
            continue
        ends, whole = [*accumulate(sizes)], 4 if x.dtype == ir.DataType.FLOAT else 8  # columns: 16 bytes, as kernels load them
        readers = {
            i: node
            for i, part in enumerate(split.outputs)
            if (ends[i] - sizes[i]) % whole == 0 and (node := _reader(part)) is not None and node.graph is split.graph
        }
        if not readers or x.shape[2] % whole != 0:
            continue
        for i, node in readers.items():
            node.replace_input_with(0, x)
            node.attributes["columns"] = ir.AttrInt64("columns", 1)
            node.attributes["first_column"] = ir.AttrInt64("first_column", ends[i] - sizes[i])
        op = adder(model.graph, split)
        for end, size, part in zip(ends, sizes, split.outputs, strict=True):
            if part.uses() or part.is_graph_output():
                take_over(part, op("Slice", x, *(op("Constant", value_ints=[n]) for n in (end - size, end, -1))))
        model.graph.remove(split, safe=True)
        count += len(readers)
    return count
