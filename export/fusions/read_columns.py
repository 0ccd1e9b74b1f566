"""Parts of a Split that an operator can read where they stand -> the columns there."""

from itertools import accumulate

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, column_sizes, take_over

# {operator: {input: attributes that say that it stands among the columns of a wider value, and from which on}}
_READERS = {
    "CausalConv": {"input": ("columns", "first_column")},
    "GatedActivation": {"gate_up": ("columns", "first_column")},
    "DecayGates": {"input": ("columns", "first_column"), "beta_input": ("columns", "first_beta_column")},
    "RmsNorm": {"input": ("columns", "first_column"), "gate": ("gate_columns", "first_gate_column")},
}


def _reader(value: ir.Value, whole: bool) -> tuple[ir.Node, int, str, str] | None:
    """(node, input, attributes as in _READERS) where a node alone reads a value and can read it among other columns, else None.
    whole: rows, and the value's columns in them, begin at 16 bytes there."""
    uses = [*value.uses()]
    if value.is_graph_output() or len(uses) != 1 or uses[0].node.domain != spec.DOMAIN:
        return None
    node, i = uses[0]
    name = spec.all_specs()[node.op_type].inputs[i].name
    flag, first = _READERS.get(node.op_type, {}).get(name, ("", ""))
    if not flag:
        return None
    if node.op_type == "DecayGates":  # which loads single numbers
        shapes = [x.shape for x in (value, node.inputs[1]) if x is not None and x.shape is not None]
        heads = len(shapes) == 2 and list(shapes[0])[2:] == list(shapes[1])  # neither wider already nor of key dimensions
        return (node, i, flag, first) if heads else None
    has_up = node.op_type != "GatedActivation" or (len(node.inputs) > 1 and node.inputs[1] is not None)
    return (node, i, flag, first) if whole and has_up and node.attributes.get_int(flag, 0) == 0 else None


def read_columns(model: ir.Model, positions: int | None = None) -> int:
    """A convolution, gate or norm whose input is a part of a wider product reads it there, and Slices copy what is left. After
    the passes that make these, before nest_splits. Returns how many parts are no longer copied.
    """
    count = 0
    for split in [n for n in model.graph if n.op_type == "Split" and n.domain == ""]:
        sizes, x = column_sizes(split), split.inputs[0]
        if sizes is None or x is None or x.shape is None or len(x.shape) != 3 or not isinstance(x.shape[2], int):
            continue
        ends, whole = [*accumulate(sizes)], 4 if x.dtype == ir.DataType.FLOAT else 8  # columns: 16 bytes, as kernels load them
        begins = [end - size for end, size in zip(ends, sizes, strict=True)]
        found = [
            _reader(part, begin % whole == 0 and x.shape[2] % whole == 0)
            for begin, part in zip(begins, split.outputs, strict=True)
        ]
        readers = [(*f, begin) for f, begin in zip(found, begins, strict=True) if f and f[0].graph is split.graph]
        if not readers:
            continue
        for node, i, flag, first, begin in readers:
            node.replace_input_with(i, x)
            node.attributes[flag] = ir.AttrInt64(flag, 1)
            node.attributes[first] = ir.AttrInt64(first, begin)
        op = adder(model.graph, split)
        for begin, end, part in zip(begins, ends, split.outputs, strict=True):
            if part.uses() or part.is_graph_output():
                take_over(part, op("Slice", x, *(op("Constant", value_ints=[n]) for n in (begin, end, -1))))
        model.graph.remove(split, safe=True)
        count += len(readers)
    return count
