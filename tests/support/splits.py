"""Splits as ONNX Runtime's CUDA provider takes them."""

import onnx_ir as ir
import onnxruntime

from leanfleet.ort_ops import make_session


def sizes_of(split):
    """The sizes of a Split's parts, which a constant or the input's shape tells."""
    if len(split.inputs) > 1:
        return ir.convenience.get_const_tensor(split.inputs[1]).numpy().tolist()
    width, count = split.inputs[0].shape[split.attributes.get_int("axis", 0)], len(split.outputs)
    each = -(-width // count)
    return [each] * (count - 1) + [width - each * (count - 1)]


def splits_by_tables(model, folder):
    """(axis, sizes) of the Splits that it copies tables to the device for in each run, which a captured graph does not take: parts
    of unequal sizes, but for three of the last axis. Of a model after ONNX Runtime's own passes, which make Splits too."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    make_session(model, ["CPUExecutionProvider"], options)
    found = []
    for node in ir.load(folder / "optimized.onnx").graph:
        if node.op_type == "Split":
            sizes, axis = sizes_of(node), node.attributes.get_int("axis", 0)
            last = axis in (-1, len(node.inputs[0].shape) - 1)
            if not (len(set(sizes)) == 1 and len(sizes) <= 32 or last and len(sizes) == 3):
                found.append((axis, sizes))
    return found
