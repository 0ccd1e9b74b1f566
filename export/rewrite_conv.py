"""Short causal convolutions in the rewriter, both ways.

A function takes (ops, node, options) as rewrite_nodes says, and returns the operator's name and the old node's outputs. States
hold tokens as they came: in the type of the input in the other operators, in float32 in CausalConv.
"""

import itertools
from typing import Any

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export import rewrite_nodes as nodes

FIRST_OPSET_OF_CAUSAL_CONV = 27
Result = tuple[str, list[ir.Value | None]]

_BATCH = ("input", "weight", "bias", "past_state")
_PACKED = ("input", "weight", "cumulative_sequence_length", "bias", "initial_state", "capture_count")


def causal_conv_with_state(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """ai.onnx and com.microsoft CausalConvWithState, by CausalConv over rows of a batch."""
    a, x = nodes.attributes(node), nodes.inputs(node, _BATCH)
    if a.get("ndim", 1) != 1:
        raise nodes.Refused(f"ndim is {a['ndim']}; CausalConv has one axis of tokens")
    if a.get("state_window", 0):
        raise nodes.Refused(f"state_window is {a['state_window']}; CausalConv returns the last state alone")
    nodes.check_ranks(x, 3, ["input", "weight"], "past_state")
    last = bool(a.get("channels_last", 0))

    def turned(t):  # between the tokens' and the channels' order
        return t if last or t is None else ops.Transpose(t, perm=[0, 2, 1])

    out, state = _causal_conv(ops, node, a, x, input=turned(x["input"]), initial_state=turned(x["past_state"]))
    return "CausalConv", [nodes.known(turned(out), x["input"], nodes.dims(x["input"]) or [None] * 3), turned(state)]


def varlen_causal_conv_with_state(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """com.microsoft VarlenCausalConvWithState, by CausalConv over packed requests."""
    a, x = nodes.attributes(node), nodes.inputs(node, _PACKED)
    if a.get("state_update_capacity", 0) or x["capture_count"] is not None or nodes.is_read(node, 2):
        raise nodes.Refused("it captures transitions (state_update_capacity), which CausalConv does not return")
    nodes.check_ranks(x, 2, ["input"])
    nodes.check_ranks(x, 1, ["cumulative_sequence_length"])
    nodes.check_ranks(x, 3, ["weight", "initial_state"])
    out, state = _causal_conv(
        ops,
        node,
        a,
        x,
        input=ops.Unsqueeze(x["input"], [0]),
        initial_state=ops.Transpose(x["initial_state"], perm=[0, 2, 1]),
        cu_seqlens=x["cumulative_sequence_length"],
    )
    out = nodes.known(ops.Squeeze(out, [0]), x["input"], nodes.dims(x["input"]) or [None] * 2)
    return "CausalConv", [out, None if state is None else ops.Transpose(state, perm=[0, 2, 1])]


def _causal_conv(ops, node, a, x, **inputs):
    """(output, final state in the input's type or None) of CausalConv for tokens and states in its own order."""
    nodes.check_types(x, "input", "weight", "bias")
    activation = a.get("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise nodes.Refused(f"activation is {activation}; CausalConv has none and silu, which is swish")
    if a.get("dilation", 1) != 1:
        raise nodes.Refused(f"dilation is {a['dilation']}; CausalConv's taps are tokens that follow each other")
    taps = nodes.dim(x["weight"], 2)
    if not isinstance(taps, int) or taps < 2:
        raise nodes.Refused(f"weight has {nodes.show(taps)} taps; expected a known number of 2 or more")
    dtype = x["input"].dtype
    if dtype is None:
        raise nodes.Refused("the type of input is unknown: run shape inference on the model first")
    if inputs["initial_state"] is not None and dtype != ir.DataType.FLOAT:
        inputs["initial_state"] = ops.float(inputs["initial_state"])
    returns = len(node.outputs) > 1 and bool(node.outputs[1].name)
    outputs = ops.ours(
        "CausalConv",
        dict(activation="none" if activation == "none" else "silu", return_state=returns),
        weight=ops.Transpose(ops.Squeeze(x["weight"], [1]), perm=[1, 0]),
        bias=x["bias"],
        **inputs,
    )
    return outputs["output"], ops.of_float(outputs["final_state"], dtype) if returns else None


def causal_conv_back(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """CausalConvWithState; VarlenCausalConvWithState, which onnxruntime runs on GPUs alone, for packed requests."""
    op = spec.all_specs()["CausalConv"]
    a = {t.name: t.default for t in op.attrs} | nodes.attributes(node)
    x = nodes.inputs(node, [t.name for t in op.inputs])
    nodes.refuse_inputs(
        x,
        {
            "query_lens": "CausalConvWithState takes all rows for tokens",
            "state_index": "no standard operator has a pool of states",
        },
    )
    dtype = x["input"].dtype
    if dtype is None:
        raise nodes.Refused("the type of input is unknown: run shape inference on the model first")
    if a["columns"]:
        x["input"] = ops.Slice(x["input"], [a["first_column"]], ops.Add(ops.size(x["weight"], 1), a["first_column"]), [2])
    weight = ops.Unsqueeze(ops.Transpose(x["weight"], perm=[1, 0]), [1])
    packed, state = x["cu_seqlens"] is not None, x["initial_state"]
    if state is not None:
        if dtype != ir.DataType.FLOAT:
            ops.notes.append("the state is rounded to the type of input, which its tokens had")
        state = ops.Transpose(ops.of_float(state, dtype), perm=[0, 2, 1])
    if packed:
        name, domain, attributes = "VarlenCausalConvWithState", nodes.MICROSOFT, {}
        ops.notes.append("onnxruntime runs it on GPUs alone, and each request needs a token")
        if state is None:
            requests, kept = (ops.Sub(ops.size(x[name], 0), 1) for name in ("cu_seqlens", "weight"))
            state = ops.of_float(ops.zeros(requests, ops.size(x["weight"], 1), kept), dtype)
        inputs = [ops.Squeeze(x["input"], [0]), weight, x["cu_seqlens"], x["bias"], state]
    else:
        name, attributes = "CausalConvWithState", {}
        domain = "" if options["opset"] >= FIRST_OPSET_OF_CAUSAL_CONV else nodes.MICROSOFT
        inputs = [ops.Transpose(x["input"], perm=[0, 2, 1]), weight, x["bias"], state]
    while inputs[-1] is None:
        inputs.pop()
    out, final = ops.foreign(domain, name, inputs, attributes | {"activation": a["activation"]}, 2)
    out = ops.Unsqueeze(out, [0]) if packed else ops.Transpose(out, perm=[0, 2, 1])
    final = ops.Transpose(final, perm=[0, 2, 1])
    bounds = list(itertools.accumulate((a["first"], a["second"], a["third"]), initial=0))
    parts = [ops.Slice(out, [i], [j], [2]) for i, j in itertools.pairwise(bounds)] if a["split"] else [out]
    return name, [parts[0], final if dtype == ir.DataType.FLOAT else ops.float(final), *parts[1:]]
