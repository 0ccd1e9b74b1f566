"""Linear attention and the gated delta rule in the rewriter, both ways.

A function takes (ops, node, options) as rewrite_nodes says, and returns the operator's name and the old node's outputs.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from leanfleet import spec
from leanfleet.export import function_bodies
from leanfleet.export import rewrite_nodes as nodes

FIRST_OPSET_OF_LINEAR_ATTENTION = 27  # onnxruntime 1.31 reads files of up to 26
# What is added to a row's sum of squares before its root: by GatedDeltaRule, and by onnxruntime's GatedDeltaNet on CUDA.
OUR_EPS, DELTA_NET_EPS = function_bodies.DELTA_ROW_EPS, 1e-12
Result = tuple[str, list[ir.Value | None]]

_LINEAR = ("query", "key", "value", "past_state", "decay", "beta")
_DELTA_NET = (
    "query",
    "key",
    "value",
    "cu_seqlens",
    "decay",
    "beta",
    "initial_state",
    "a_log",
    "dt_bias",
    "capture_count",
    "state_update_active",  # says whether transitions are captured, which only files without them reach
)


def linear_attention(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """ai.onnx and com.microsoft LinearAttention: CausalLinearDecay, and GatedDeltaRule for the update rules with beta."""
    a, x = nodes.attributes(node), nodes.inputs(node, _LINEAR)
    nodes.check_types(x, "query", "key", "value")
    rule = a.get("update_rule", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise nodes.Refused(f"update_rule is {rule}; expected linear, gated, delta or gated_delta")
    delta = rule.endswith("delta")
    if (x["beta"] is None) == delta:
        raise nodes.Refused(f"the update rule {rule} {'needs' if delta else 'has no'} beta")
    if (x["decay"] is None) != (rule in ("linear", "delta")):
        raise nodes.Refused(f"update_rule is {rule} with{'out' if x['decay'] is None else ''} decay")
    if a.get("state_window", 0):
        raise nodes.Refused(f"state_window is {a['state_window']}; leanfleet's operators return the last state alone")
    nodes.check_ranks(x, 3, ["query", "key", "value"], "decay", "beta")
    nodes.check_ranks(x, 4, [], "past_state")
    inputs, attributes, heads = _delta_inputs(ops, a, x) if delta else _decay_inputs(ops, a, x)
    returns = len(node.outputs) > 1 and bool(node.outputs[1].name)
    state = x["past_state"]
    state_type = (x["query"] if state is None else state).dtype
    inputs["initial_state"] = state if state is None or state.dtype == ir.DataType.FLOAT else ops.float(state)
    name = "GatedDeltaRule" if delta else "CausalLinearDecay"
    outputs = ops.ours(name, dict(attributes, return_state=returns, layout="bnhd"), **inputs)
    value_width = nodes.dim(x["value"], 2)
    joined = value_width // a["kv_num_heads"] * heads if isinstance(value_width, int) else None
    out = ops.join_heads(outputs["output"], joined)
    results: list[ir.Value | None] = [nodes.known(out, x["query"], [*(nodes.dims(x["query"]) or [None] * 3)[:2], joined])]
    if returns:
        if state_type is None:
            raise nodes.Refused("the type of past_state is unknown: run shape inference on the model first")
        results.append(ops.of_float(outputs["final_state"], state_type))
    return name, results


def _float(ops, value):
    """A value in float32, of the same shape."""
    if value.dtype == ir.DataType.FLOAT:
        return value
    wide = ops.float(value)
    wide.shape = value.shape
    return wide


def _head_counts(a, x):
    """Heads of queries, of keys and of values. Where there are more value heads than query heads, keys may have either's
    number, which their columns tell."""
    for name in ("q_num_heads", "kv_num_heads"):
        if a.get(name, 0) < 1:
            raise nodes.Refused(f"attribute {name} is {a.get(name, 'missing')}; expected 1 or more")
    heads, states = a["q_num_heads"], a["kv_num_heads"]
    width, key_width = nodes.dim(x["query"], 2), nodes.dim(x["key"], 2)
    if not isinstance(width, int) or not isinstance(key_width, int) or width % heads or key_width % (width // heads):
        raise nodes.Refused(
            f"query and key have {nodes.show(width)} and {nodes.show(key_width)} columns for {heads} query heads"
        )
    key_heads = key_width // (width // heads)
    _check_head_groups(heads, key_heads, states)
    return heads, key_heads, states


def _decay_inputs(ops, a, x):
    """(inputs of CausalLinearDecay but the state, attributes, heads of the output)."""
    width, scale = nodes.dim(x["query"], 2), a.get("scale", 0.0)
    if isinstance(width, int) and isinstance(nodes.dim(x["key"], 2), int):
        heads, key_heads, states = _head_counts(a, x)
    else:
        heads, states = nodes.heads(a, "q_num_heads", "kv_num_heads")
        key_heads = states
    if scale == 0:
        if not isinstance(width, int) or width < heads:
            raise nodes.Refused(f"scale is 1/sqrt(d_k), and query has {nodes.show(width)} columns for {heads} heads")
        scale = float(np.float32(1 / np.sqrt(width // heads)))
    inputs = dict(
        query=ops.split_heads(x["query"], heads),
        key=ops.split_heads(x["key"], key_heads),
        value=ops.split_heads(x["value"], states),
        log_decay=_log_decay(ops, x["decay"], states, width // heads if isinstance(width, int) else None),
    )
    return inputs, dict(scale=scale), max(heads, states)


def _log_decay(ops, decay, states, size):
    """decay [B,N,states] or, of key dimensions, [B,N,states * size], as our operators have it. size: None where not known."""
    if decay is None:
        return None
    columns = nodes.dim(decay, 2)
    per_key = size is not None and columns == states * size and columns != states
    if columns != states and not per_key:
        raise nodes.Refused(
            f"decay has {nodes.show(columns)} columns for {states} states" + (f" of {size} rows" if size is not None else "")
        )
    decay = _float(ops, decay)
    if per_key:
        decay = ops.Reshape(decay, [0, 0, states, size])
        decay.shape = ir.Shape([None, None, states, size])
    ops.notes.append("log decays above 0 are an error")
    return decay


def _delta_inputs(ops, a, x):
    """The same of GatedDeltaRule."""
    heads, key_heads, states = _head_counts(a, x)
    log_decay = _log_decay(ops, x["decay"], states, nodes.dim(x["query"], 2) // heads)
    beta = _float(ops, x["beta"])
    columns = nodes.dim(x["beta"], 2)
    if columns not in (1, states):
        raise nodes.Refused(f"beta has {nodes.show(columns)} columns for {states} states")
    if columns != states:
        beta = ops.Expand(beta, ops.dims(1, 1, states))
    inputs = dict(
        query=ops.split_heads(x["query"], heads),
        key=ops.split_heads(x["key"], key_heads),
        value=ops.split_heads(x["value"], states),
        log_decay=log_decay,
        beta=beta,
    )
    return inputs, dict(scale=a.get("scale", 0.0)), max(heads, states)


def _check_head_groups(heads, key_heads, states):
    """Refuses groups of heads that our operators do not take."""
    if states % key_heads or heads % key_heads or max(heads, states) % min(heads, states):
        raise nodes.Refused(f"{heads} query heads, {key_heads} key heads and {states} states do not divide each other")


def gated_delta_net(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """com.microsoft GatedDeltaNet, by GatedDeltaRule or, without the rule, CausalLinearDecay, with states [Dv,D]: its
    activations become nodes of their own."""
    a, x = nodes.attributes(node), nodes.inputs(node, _DELTA_NET)
    nodes.check_types(x, "query", "key", "value")
    rule = a.get("update_rule", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise nodes.Refused(f"update_rule is {rule}; expected linear, gated, delta or gated_delta")
    delta = rule.endswith("delta")
    if a.get("state_update_capacity", 0) or x["capture_count"] is not None or nodes.is_read(node, 2):
        raise nodes.Refused("it captures transitions (state_update_capacity), which leanfleet's operators do not return")
    _check_activations(a, x)
    query, key, value, like = _delta_net_rows(ops, x)
    _check_head_groups(*(_known_heads(t, name) for t, name in ((query, "query"), (key, "key"), (value, "value"))))
    batched = _batches(ops, x, len(like))
    beta = _beta(ops, a, x, value) if delta or x["beta"] is not None else None
    tokens = {"query": query, "key": key, "value": value, "log_decay": None, "beta": beta}
    if rule.startswith("gated") and x["decay"] is not None:
        tokens["log_decay"] = _gate(ops, a, x, len(like))
        ops.notes.append("log decays above 0 are an error")
    inputs = {name: t if t is None else batched(t) for name, t in tokens.items()}
    if inputs["log_decay"] is not None:  # function bodies ask for its rank
        inputs["log_decay"].shape = ir.Shape([None] * (nodes.rank(x["decay"], "decay") + 4 - len(like)))
    rule_attributes: dict[str, Any] = {"scale": a.get("scale", 0.0)}
    if not delta:
        rule_attributes["scale"] = rule_attributes["scale"] or _usual_scale(query)
    elif not a.get("qk_l2_norm", 0):
        ops.notes.append("keys are taken to be of unit length, which LEANFLEET_CHECK=1 sees to")
    if a.get("qk_l2_norm", 0) and (query.dtype == ir.DataType.FLOAT or not delta):
        inputs |= {name: _unit_rows(ops, inputs[name], DELTA_NET_EPS, query.dtype) for name in ("query", "key")}
    elif a.get("qk_l2_norm", 0):  # in 16 bits the difference is less than a rounding, and kernels are faster
        rule_attributes["normalize_qk"] = True
        ops.notes.append(f"rows of query and key below 0.03 are not made as long as 1: {OUR_EPS:g} is added to their squares")
    state = x["initial_state"]
    state_type = ir.DataType.FLOAT if state is None or state.dtype is None else state.dtype
    returns = len(node.outputs) > 1 and bool(node.outputs[1].name)
    name = "GatedDeltaRule" if delta else "CausalLinearDecay"
    outputs = ops.ours(
        name,
        dict(rule_attributes, return_state=returns, layout="bnhd", state_v_first=True),
        **inputs,
        initial_state=state if state is None else _float(ops, state),
        cu_seqlens=x["cu_seqlens"],
    )
    out = outputs["output"]
    if len(like) == 3:
        out = ops.Squeeze(out, [0]) if x["cu_seqlens"] is not None else ops.reshape(out, -1, ops.Shape(out, start=2))
    results: list[ir.Value | None] = [nodes.known(out, x["query"], like)]
    return name, results + ([ops.of_float(outputs["final_state"], state_type)] if returns else [])


def _usual_scale(query):
    """1 over the root of the width of query's rows."""
    width = nodes.dim(query, -1)
    if not isinstance(width, int):
        raise nodes.Refused(f"scale is 1/sqrt(head_size_qk), and rows of query have {nodes.show(width)} columns")
    return float(np.float32(1 / np.sqrt(width)))


def _check_activations(a, x):
    """Refuses activations that GatedDeltaNet does not have, and inputs that do not go with them."""
    gate, beta = a.get("gate_activation", "none"), a.get("beta_activation", "none")
    if gate not in ("none", "qwen") or beta not in ("none", "sigmoid"):
        raise nodes.Refused(f"gate_activation is {gate} and beta_activation {beta}; expected none or qwen, none or sigmoid")
    if gate == "none":
        nodes.refuse_inputs(x, dict.fromkeys(("a_log", "dt_bias"), "it goes with gate_activation = qwen"))


def _known_heads(value, name):
    heads = nodes.dim(value, -2)
    if not isinstance(heads, int):
        raise nodes.Refused(f"the number of {name}'s heads is unknown")
    return heads


def _delta_net_rows(ops, x):
    """query, key and value [.., heads, width], and the sizes of the output."""
    state = nodes.dims(x["initial_state"])
    if x["key"] is None and x["value"] is None:
        rank = nodes.rank(x["query"], "query", 2, 3)
        if state is None or not all(isinstance(n, int) for n in state[1:]):
            raise nodes.Refused("packed queries, keys and values need an initial_state of known heads and sizes")
        states, value_size, size = state[1:]
        width = nodes.dim(x["query"], -1)
        rest = width - states * value_size if isinstance(width, int) else 0
        if rest < 1 or rest % (2 * size):
            raise nodes.Refused(f"query has {nodes.show(width)} columns, which are not those of {states} states {state[2:]}")
        heads = rest // (2 * size)
        parts = ops.Split(x["query"], [heads * size, heads * size, states * value_size], axis=-1, outputs=3)
        lead = nodes.dims(x["query"])[:-1]
        shapes = ((heads, size), (heads, size), (states, value_size))
        rows = [
            nodes.known(ops.Reshape(part, [0] * (rank - 1) + list(shape)), x["query"], [*lead, *shape])
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return *rows, [*lead, max(heads, states), value_size]
    rank = nodes.rank(x["query"], "query", 3, 4)
    nodes.check_ranks(x, rank, ["query", "key", "value"])
    lead, value = nodes.dims(x["query"])[:-2], x["value"]
    heads = [nodes.dim(t, -2) for t in (x["query"], value)]
    most = max(heads) if all(isinstance(n, int) for n in heads) else None
    return x["query"], x["key"], value, [*lead, most, nodes.dim(value, -1)]


def _batches(ops, x, rank):
    """What puts values [tokens,..] or [B,N,..] in the form [B,N,..]."""
    if rank == 4:
        nodes.refuse_inputs(x, {"cu_seqlens": "requests of their own lengths are packed, not rows of a batch"})
        return lambda t: t
    if x["cu_seqlens"] is not None:
        return lambda t: ops.Unsqueeze(t, [0])
    if x["initial_state"] is None:
        raise nodes.Refused("neither cu_seqlens nor initial_state tell how many requests there are")
    count = ops.size(x["initial_state"], 0)
    return lambda t: ops.reshape(t, count, -1, ops.Shape(t, start=1))


def _beta(ops, a, x, value):
    """The update rate, float32 [..,Hv]; 1 where there is none."""
    if x["beta"] is None:
        return ops.Expand(1.0, ops.Shape(value, end=-1))
    beta = _float(ops, x["beta"])
    return ops.Sigmoid(beta) if a.get("beta_activation") == "sigmoid" else beta


def _gate(ops, a, x, rank):
    """The logarithm of the decay, float32 [..,Hv] or [..,Hv,D]."""
    decay = _float(ops, x["decay"])
    if a.get("gate_activation", "none") == "none":
        return decay
    per_key = nodes.rank(x["decay"], "decay", rank - 1, rank) == rank

    def of_heads(t):
        return ops.Unsqueeze(_float(ops, t), [1]) if per_key else _float(ops, t)

    if x["dt_bias"] is not None:
        decay = ops.Add(decay, of_heads(x["dt_bias"]))
    speed = ops.Softplus(decay)
    if x["a_log"] is not None:
        speed = ops.Mul(speed, of_heads(ops.Exp(_float(ops, x["a_log"]))))
    return ops.Neg(speed)


def _unit_rows(ops, x, eps, dtype):
    """Rows of a type, divided by the root of their sum of squares and eps, computed in float32."""
    rows = _float(ops, x)
    length = ops.Sqrt(ops.Add(ops.ReduceSumSquare(rows, [-1], keepdims=1), eps))
    return ops.of_float(ops.Div(rows, length), dtype)


def causal_linear_decay_back(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """LinearAttention."""
    op = spec.all_specs()["CausalLinearDecay"]
    a = {t.name: t.default for t in op.attrs} | nodes.attributes(node)
    x = nodes.inputs(node, [t.name for t in op.inputs])
    nodes.refuse_inputs(
        x, {"cu_seqlens": "LinearAttention has no packed requests", "state_index": "LinearAttention has no pool of states"}
    )
    nodes.check_ranks(x, 4, ["query", "key", "value"], "initial_state")
    if x["log_decay"] is not None:
        nodes.rank(x["log_decay"], "log_decay", 1, 3, 4)
    if x["initial_state"] is not None and x["initial_state"].dtype not in (None, ir.DataType.FLOAT):
        raise nodes.Refused("initial_state has 16 bits; LinearAttention's is float32")
    if a["normalize"]:
        raise nodes.Refused("normalize = 1, which LinearAttention does not have")
    if a["scale"] == 0:
        raise nodes.Refused("scale is 0, which LinearAttention reads as 1/sqrt(d_k)")
    bnhd = a["layout"] == "bnhd"
    heads, states = (nodes.dim(x[name], 2 if bnhd else 1) for name in ("query", "value"))
    if not isinstance(heads, int) or not isinstance(states, int):
        raise nodes.Refused("the numbers of heads are not known")
    single = x["query"].dtype == ir.DataType.FLOAT
    decay = x["log_decay"]
    if decay is not None and not single:
        raise nodes.Refused("log_decay is float32, decay would be rounded to the type of query")
    if options["opset"] < FIRST_OPSET_OF_LINEAR_ATTENTION and not single:
        raise nodes.Refused("com.microsoft LinearAttention has no kernel for other types than float32 on the CPU")

    def by_token(t, perm):
        return t if bnhd else ops.Transpose(t, perm=perm)

    def packed(t):
        t = by_token(t, [0, 2, 1, 3])
        return ops.Reshape(t, ops.dims(ops.Shape(t, end=2), -1))

    if decay is not None:
        if nodes.rank(decay, "log_decay") == 1:
            batch, tokens = ops.size(x["query"], 0), ops.size(x["query"], 1 if bnhd else 2)
            decay = ops.Expand(decay, ops.dims(batch, tokens, states))
        elif nodes.rank(decay, "log_decay") == 4:
            decay = packed(decay)
        else:
            decay = by_token(decay, [0, 2, 1])
    value = x["value"]
    if x["beta"] is not None:
        if not single:
            raise nodes.Refused("beta is float32, values times it would be rounded to the type of query")
        value = ops.Mul(value, ops.Unsqueeze(x["beta"], [3]))  # states may share keys
    given = _ordered(ops, x["initial_state"], a["state_v_first"])
    inputs = [packed(t) for t in (x["query"], x["key"], value)] + [given, decay]
    while inputs[-1] is None:
        inputs.pop()
    domain = "" if options["opset"] >= FIRST_OPSET_OF_LINEAR_ATTENTION else nodes.MICROSOFT
    attributes = {
        "q_num_heads": heads,
        "kv_num_heads": states,
        "scale": a["scale"],
        "update_rule": "linear" if decay is None else "gated",
    }
    out, state = ops.foreign(domain, "LinearAttention", inputs, attributes, 2)
    out = ops.Reshape(out, ops.dims(ops.Shape(out, end=2), max(heads, states), -1))
    return "LinearAttention", [by_token(out, [0, 2, 1, 3]), _ordered(ops, state, a["state_v_first"])]


def gated_delta_rule_back(ops: nodes.Emitter, node: ir.Node, options: dict[str, Any]) -> Result:
    """LinearAttention in float32; GatedDeltaNet, which onnxruntime runs on GPUs alone, for packed requests and 16 bits."""
    op = spec.all_specs()["GatedDeltaRule"]
    a = {t.name: t.default for t in op.attrs} | nodes.attributes(node)
    x = nodes.inputs(node, [t.name for t in op.inputs])
    nodes.check_ranks(x, 4, ["query", "key", "value"], "initial_state")
    nodes.check_ranks(x, 3, ["beta"])
    nodes.refuse_inputs(x, {"state_index": "no standard operator has a pool of states"})
    bnhd = a["layout"] == "bnhd"
    heads = [nodes.dim(x[name], 2 if bnhd else 1) for name in ("query", "key", "value")]
    if not all(isinstance(n, int) for n in heads):
        raise nodes.Refused("the numbers of heads are not known")

    def by_token(t):
        return t if bnhd or t is None else ops.Transpose(t, perm=[0, 2, 1, 3][: nodes.rank(t, t.name, 3, 4)])

    packed = x["cu_seqlens"] is not None
    single = x["query"].dtype == ir.DataType.FLOAT
    rows = {name: x[name] for name in ("query", "key")}
    if a["normalize_qk"] and single:  # in 16 bits GatedDeltaNet's own form differs by less than a rounding
        rows = {
            name: nodes.known(_unit_rows(ops, t, OUR_EPS, x["query"].dtype), t, nodes.dims(t) or []) for name, t in rows.items()
        }
    tokens = {name: by_token(t) for name, t in (x | rows).items() if name in ("query", "key", "value", "log_decay", "beta")}
    back = _linear_attention_of if single and not packed else _delta_net_of
    name, out, state = back(ops, a, x, tokens, heads)
    return name, [by_token(nodes.known(out, x["query"], [None] * 4)), state]


def _ordered(ops, state, transposed):
    """A state [..,D,Dv], or [..,Dv,D], in the other order."""
    return ops.Transpose(state, perm=[0, 1, 3, 2]) if transposed and state is not None else state


def _linear_attention_of(ops, a, x, tokens, heads):
    """(operator, output [B,N,H,Dv], state as ours has it)."""
    query, key, value = (ops.Reshape(tokens[name], [0, 0, -1]) for name in ("query", "key", "value"))
    decay = tokens["log_decay"]
    if decay is not None and nodes.rank(x["log_decay"], "log_decay", 3, 4) == 4:
        decay = ops.Reshape(decay, [0, 0, -1])
    attributes = {
        "q_num_heads": heads[0],
        "kv_num_heads": heads[2],
        "scale": a["scale"],
        "update_rule": "delta" if decay is None else "gated_delta",
    }
    state = _ordered(ops, x["initial_state"], a["state_v_first"])
    inputs = [query, key, value, state, decay, tokens["beta"]]
    out, final = ops.foreign(nodes.MICROSOFT, "LinearAttention", inputs, attributes, 2)
    return "LinearAttention", ops.Reshape(out, [0, 0, max(heads[0], heads[2]), -1]), _ordered(ops, final, a["state_v_first"])


def _delta_net_of(ops, a, x, tokens, heads):
    """The same by GatedDeltaNet."""
    if heads[0] != heads[1] or heads[2] % heads[0]:
        raise nodes.Refused(
            f"{heads[0]} query heads, {heads[1]} key heads and {heads[2]} states: GatedDeltaNet takes as many query heads as "
            "key heads, and a multiple of states"
        )
    packed = x["cu_seqlens"] is not None
    state = _ordered(ops, x["initial_state"], not a["state_v_first"])
    if state is None and not packed:  # its requests are counted by their states
        sizes = [ops.size(x["query"], 0), heads[2], ops.size(x["value"], 3), ops.size(x["query"], 3)]
        state = ops.zeros(*sizes)
    names = ("query", "key", "value", "log_decay", "beta")
    query, key, value, decay, beta = (ops.Squeeze(t, [0]) if packed and t is not None else t for t in map(tokens.get, names))
    inputs = [query, key, value, x["cu_seqlens"], decay, beta, state]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"scale": a["scale"], "update_rule": "delta" if decay is None else "gated_delta"}
    if a["normalize_qk"] and x["query"].dtype != ir.DataType.FLOAT:
        attributes["qk_l2_norm"] = 1
        ops.notes.append(f"{DELTA_NET_EPS:g} is added to the squares of query's and key's rows in place of {OUR_EPS:g}")
    ops.notes.append("onnxruntime runs it on GPUs alone")
    out, final = ops.foreign(nodes.MICROSOFT, "GatedDeltaNet", inputs, attributes, 2)
    return "GatedDeltaNet", ops.Unsqueeze(out, [0]) if packed else out, _ordered(ops, final, not a["state_v_first"])
