"""Models that leanfleet rewrite takes, with their inputs."""

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper

from leanfleet import parity, trial
from leanfleet.ort_ops import make_session

FLOAT, HALF, INT32, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
)
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def model_of(op_type, domain, inputs, outputs, attributes, opset=23):
    """A model of one node. inputs: {name: array, or (array, declared shape)}; None leaves an input out. outputs: names,
    or {name: declared shape}; "" leaves one out."""
    declared, names = [], []
    for name, value in inputs.items():
        array, shape = value if isinstance(value, tuple) else (value, None)
        names.append("" if array is None else name)
        if array is not None:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            declared.append(helper.make_tensor_value_info(name, kind, array.shape if shape is None else shape))
    types = [v.type.tensor_type.elem_type for v in declared]
    narrow = (TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.UINT8)
    t, of_caches = types[0], next((kind for kind in narrow if kind in types), types[0])
    rank = (
        len(next(iter(inputs.values()))[0].shape)
        if isinstance(next(iter(inputs.values())), tuple)
        else next(iter(inputs.values())).ndim
    )
    ranks = {name: [None] * (min(rank, 4 if domain == "" else 3) if i == 0 else 4) for i, name in enumerate(outputs)}
    declared_outputs = {n: shape for n, shape in (outputs if isinstance(outputs, dict) else {}).items() if shape}
    results = [
        helper.make_tensor_value_info(n, t if i == 0 else of_caches, shape)
        for i, (n, shape) in enumerate((ranks | declared_outputs).items())
        if n
    ]
    node = helper.make_node(op_type, names, list(outputs), name="attention", domain=domain, **attributes)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(helper.make_graph([node], "g", declared, results), opset_imports=imports, ir_version=10)


def feed_of(inputs):
    arrays = {name: v[0] if isinstance(v, tuple) else v for name, v in inputs.items()}
    return {name: a for name, a in arrays.items() if a is not None}


def run(model, feed, library=False):
    if library:
        session = make_session(model, providers=["CPUExecutionProvider"])
    else:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(trial.run_session(session, feed_of(feed), widen=False).values())


def close(found, expected, op, what=""):
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.shape == e.shape and f.dtype == e.dtype, (what, i, f.shape, e.shape)
        if e.dtype.itemsize == 1:
            assert np.array_equal(f, e), f"{what} output {i}: {(f != e).sum()} bytes differ"
            continue
        tolerance = parity.TOLERANCE[op][e.dtype != np.float32] * parity.EPSILON[str(e.dtype)] * max(1, np.abs(e).max())
        error = np.abs(f.astype(np.float64) - e).max()
        assert error <= tolerance, f"{what} output {i}: {error:.3g} > {tolerance:.3g}"


B, H, HKV, N, D, DV = 2, 6, 2, 5, 16, 24


def qkv(n=N, s=N, h=H, hkv=HKV, packed=False, dtype=np.float32):
    arrays = normal(B, h, n, D), normal(B, hkv, s, D), normal(B, hkv, s, DV)
    if packed:
        arrays = [a.transpose(0, 2, 1, 3).reshape(B, a.shape[2], -1) for a in arrays]
    return {name: np.ascontiguousarray(a.astype(dtype)) for name, a in zip("QKV", arrays)}


MAX = 16  # positions that cos_cache and sin_cache know


FORMS = {"int8": (-128, 127), "fp8": (-448, 448), "int4": (-8, 7)}


def rounded(rows, form):
    """Rows that were divided by a scale, as numbers that a quantised cache holds."""
    held = np.clip(rows, *FORMS[form])
    return held.astype(trial.FLOAT8).astype(rows.dtype) if form == "fp8" else np.round(held)


def quantised_caches(inputs, names, kind, shape, form):
    """(changes to inputs: quantised caches and their scales, attributes that say so). kind: PER_TENSOR or PER_CHANNEL."""
    changes, unit = {}, 127 / FORMS[form][1]
    for name, letter in zip(names, "kv"):
        scale = (unit * (0.02 + 0.01 * RANDOM.random(shape))).astype(np.float32)
        changes[f"{letter}_scale"] = scale
        numbers = rounded(inputs[name].astype(np.float32) / np.float32(0.03 * unit), form)
        if form == "int4":
            nibbles = (numbers + 8).astype(np.uint8)
            changes[name] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        else:
            changes[name] = numbers.astype(trial.FLOAT8 if form == "fp8" else np.int8)
    return changes, {f"{letter}_quant_type": kind for letter in "kv"}


def group_query(n, lens, past=0, packed=False, rotary=None, sink=False, total=None, quant=None, form="int8", **attributes):
    """inputs, attributes. lens: keys of each request, the new ones included. past: slots of the caches; None: absent. quant:
    PER_TENSOR or PER_CHANNEL, caches of `form`."""
    batch = len(lens)
    q, k, v = normal(batch, n, H * D), normal(batch, n, HKV * D), normal(batch, n, HKV * D)
    caches = [None, None] if past is None else [normal(batch, HKV, past, D) for _ in range(2)]
    inputs = dict(
        query=np.concatenate([q, k, v], 2) if packed else q,
        key=None if packed else k,
        value=None if packed else v,
        past_key=caches[0],
        past_value=caches[1],
        seqlens_k=np.array(lens, np.int32) - 1,
        total_sequence_length=np.array(max(lens) if total is None else total, np.int32),
    )
    if rotary is not None:
        angles = np.arange(MAX)[:, None] * 0.7 ** np.arange(rotary)[None]
        inputs |= dict(cos_cache=np.cos(angles).astype(np.float32), sin_cache=np.sin(angles).astype(np.float32))
        attributes["do_rotary"] = 1
    if sink:
        inputs |= {name: None for name in ("cos_cache", "sin_cache") if name not in inputs}
        inputs |= dict(position_ids=None, attention_bias=None, head_sink=normal(H))
    if quant:
        names = ("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink")
        inputs = {name: None for name in names} | inputs
        inputs = {name: inputs[name] for name in (*list(inputs)[5:], *names)}
        shape = 1 if quant == "PER_TENSOR" else (HKV, 1, D)
        changes, of_caches = quantised_caches(inputs, ("past_key", "past_value"), quant, shape, form)
        inputs |= changes
        attributes |= of_caches | dict(kv_cache_bit_width=4 if form == "int4" else 8)
    return inputs, dict(num_heads=H, kv_num_heads=HKV) | attributes


def paged(
    new=(3, 1, 0, 6),
    past=(0, 9, 4, 5),
    packed=False,
    rotary=0,
    sink=False,
    block=4,
    dtype=np.float16,
    quant=None,
    form="int8",
    **attributes,
):
    """(inputs, attributes) of new tokens of four requests, whose pages lie anywhere in a pool. quant, form: as in group_query."""
    lens, tokens = np.add(new, past), sum(new)
    pages = [-(-int(n) // block) for n in lens]
    order, table = np.random.default_rng(3).permutation(sum(pages) + 2), np.zeros((len(new), max(pages)), np.int32)
    for b, n in enumerate(pages):
        table[b, :n] = order[sum(pages[:b]) : sum(pages[: b + 1])]
    rows = [normal(tokens, heads * D).astype(dtype) for heads in (H, HKV, HKV)]
    pool = [normal(len(order), block, HKV, D).astype(dtype) for _ in range(2)]
    inputs = dict(query=np.concatenate(rows, 1) if packed else rows[0], key=None if packed else rows[1])
    inputs |= dict(value=None if packed else rows[2], key_cache=pool[0], value_cache=pool[1])
    inputs |= dict(cumulative_sequence_length=np.cumsum([0, *new]).astype(np.int32), past_seqlens=np.array(past, np.int32))
    inputs["block_table"] = table
    if rotary:
        angles = np.arange(20)[:, None] * 0.7 ** np.arange(rotary)[None]
        inputs |= dict(cos_cache=np.cos(angles).astype(dtype), sin_cache=np.sin(angles).astype(dtype))
        attributes["do_rotary"] = 1
    if sink:
        inputs |= {name: None for name in ("cos_cache", "sin_cache") if name not in inputs}
        inputs |= dict(slot_mapping=None, head_sink=normal(H).astype(dtype))
    if quant:
        names = ("cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight")
        inputs |= {name: inputs.pop(name, None) for name in names}
        shape = 1 if quant == "PER_TENSOR" else (HKV, 1, D)
        changes, of_caches = quantised_caches(inputs, ("key_cache", "value_cache"), quant, shape, form)
        inputs |= changes
        attributes |= of_caches
    return inputs, dict(num_heads=H, kv_num_heads=HKV) | attributes


def linear(n=70, rule="gated", state=True, heads=(H, HKV, HKV), decay="state", **attributes):
    """LinearAttention without the delta rule. heads: of queries, of keys, of values, which are the states. decay: of what one is,
    "state" or "key" dimension."""
    queries, keys, states = heads
    columns = {"state": states, "key": states * D}[decay]
    inputs = dict(
        query=normal(B, n, queries * D),
        key=normal(B, n, keys * D),
        value=normal(B, n, states * DV),
        past_state=normal(B, states, D, DV) if state else None,
        decay=-np.abs(normal(B, n, columns)) if rule == "gated" else None,
    )
    return inputs, dict(q_num_heads=queries, kv_num_heads=states, update_rule=rule) | attributes


def delta(n=70, heads=(4, 2, 2), decay="state", state=True, beta="state", **attributes):
    """LinearAttention with the delta rule. heads: of queries, of keys, of values, which are the states."""
    queries, keys, states = heads
    key = normal(B, n, keys, D)
    columns = {"state": states, "key": states * D, None: 0}[decay]
    inputs = dict(
        query=normal(B, n, queries * D),
        key=(key / np.linalg.norm(key, axis=-1, keepdims=True)).reshape(B, n, -1),
        value=normal(B, n, states * DV),
        past_state=normal(B, states, D, DV) if state else None,
        decay=-np.abs(normal(B, n, columns)) / 4 if decay else None,
        beta=2 * RANDOM.random((B, n, states if beta == "state" else 1), np.float32),
    )
    rule = "gated_delta" if decay else "delta"
    return inputs, dict(q_num_heads=queries, kv_num_heads=states, update_rule=rule) | attributes


def delta_net(
    form="packed",
    heads=(2, 4),
    decay="state",
    beta=True,
    state=True,
    joined=False,
    gate=False,
    dtype=np.float32,
    lengths=(3, 1, 66),
    delta=True,
    **attributes,
):
    """GatedDeltaNet. form: "packed" requests of their lengths, "uniform" ones one after the other, or a "batch". joined: queries,
    keys and values in one input. gate: the activations of Qwen's models. delta: with the rule."""
    requests, n = (len(lengths), sum(lengths)) if form == "packed" else (B, 7)
    lead = (B, n) if form == "batch" else (n,) if form == "packed" else (B * n,)
    (keys, states) = heads
    key = normal(*lead, keys, D)
    if not attributes.get("qk_l2_norm"):
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
    tokens = [normal(*lead, keys, D).astype(dtype), key.astype(dtype), normal(*lead, states, DV).astype(dtype)]
    if joined:
        tokens = [np.concatenate([t.reshape(*lead, -1) for t in tokens], -1), None, None]
    decays = normal(*lead, *{"state": (states,), "key": (states, D), None: ()}[decay]) if decay else None
    inputs = dict(
        zip(("query", "key", "value"), tokens, strict=True),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32) if form == "packed" else None,
        decay=decays if gate or decays is None else -np.abs(decays) / 4,
        beta=(normal(*lead, states) if gate else 2 * RANDOM.random((*lead, states), np.float32)) if beta else None,
        initial_state=normal(requests, states, DV, D) if state else None,
        a_log=normal(states) if gate else None,
        dt_bias=normal(states) if gate else None,
    )
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    rules = dict(update_rule="gated_delta" if decay else "delta")
    if not delta:
        rules = dict(update_rule="gated" if decay else "linear")
    return inputs, rules | (dict(gate_activation="qwen", beta_activation="sigmoid") if gate else {}) | attributes


def lean_model(attributes, opset=24, shapes=None, outputs=("output",), **tensors):
    from leanfleet import spec

    op = spec.all_specs()["LeanAttention"]
    return node_model(op, tensors, attributes, outputs, opset, shapes or {})


def node_model(op, tensors, attributes, outputs, opset, shapes=None, ranks=None):
    """One leanfleet node with its function."""
    arrays = {t.name: tensors.get(t.name) for t in op.inputs}
    while list(arrays.values())[-1] is None:
        arrays.popitem()
    inputs = {name: a if a is None else (a, (shapes or {}).get(name, a.shape)) for name, a in arrays.items()}
    active = op.active_outputs(attributes)
    names = [t.name if t in active else "" for t in op.outputs]
    while not names[-1]:
        names.pop()
    half = next(iter(tensors.values())).dtype == np.float16
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v[0].dtype), v[1]) for n, v in inputs.items() if v
    ]
    ranks = ranks or {
        "output": 4,
        "final_state": 4,
        "lse": 3,
        "key_cache_out": 4,
        "value_cache_out": 4,
        "normalizer": 3,
        "final_norm": 3,
    }
    results = [helper.make_tensor_value_info(n, HALF if half and n != "lse" else FLOAT, [None] * ranks[n]) for n in outputs]
    node = helper.make_node(
        op.name, [n if v else "" for n, v in inputs.items()], names, domain="leanfleet", name="ours", **attributes
    )
    model = ir.from_proto(
        helper.make_model(
            helper.make_graph([node], "g", declared, results),
            ir_version=10,
            opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("leanfleet", 1)],
        )
    )
    from leanfleet.export import function_bodies

    return ir.to_proto(function_bodies.attach(model)), {n: v[0] for n, v in inputs.items() if v}


def single(name, inputs, attributes, opset=21):
    """A model of one leanfleet node of [B,N,...] tensors with its function, and all its outputs; and what to feed it."""
    from leanfleet import spec

    op = spec.all_specs()[name]
    outputs = [t.name for t in op.active_outputs(attributes)]
    return node_model(op, inputs, attributes, outputs, opset, ranks=dict.fromkeys(outputs, 3))


def bhnd(n, s, layout="bhnd"):
    q, k, v = normal(B, H, n, D), normal(B, HKV, s, D), normal(B, HKV, s, DV)
    return dict(query=q if layout == "bhnd" else np.ascontiguousarray(q.transpose(0, 2, 1, 3)), key_cache=k, value_cache=v)


def decay_model(
    attributes, opset=21, dtype=np.float32, decay="token", state=True, n=9, outputs=("output", "final_state"), **extra
):
    from leanfleet import spec

    layout = attributes.get("layout", "bhnd")

    def ordered(a):
        return np.ascontiguousarray(a if layout == "bhnd" else a.swapaxes(1, 2))

    tensors = dict(query=ordered(normal(B, H, n, D)), key=ordered(normal(B, HKV, n, D)), value=ordered(normal(B, HKV, n, DV)))
    tensors = {name: a.astype(dtype) for name, a in tensors.items()}
    if decay:
        sizes = (B, HKV, n, D) if decay == "key" else (B, HKV, n)
        tensors["log_decay"] = -np.abs(normal(HKV) if decay == "head" else ordered(normal(*sizes)))
    if state:
        tensors["initial_state"] = normal(B, HKV, *((DV, D) if attributes.get("state_v_first") else (D, DV)))
    return node_model(spec.all_specs()["CausalLinearDecay"], tensors | extra, attributes, outputs, opset)


def sources():
    """Valid models of each operator that is rewritten, either way."""
    gqa, gqa_attributes = group_query(n=1, lens=[4, 7], past=12, rotary=8)
    packed, packed_attributes = group_query(n=5, lens=[5, 2], packed=True)
    scan, scan_attributes = linear(n=9)
    pages, pages_attributes = paged(rotary=8)
    heads = dict(q_num_heads=H, kv_num_heads=HKV)
    plain = dict(query=normal(2, 5, 96), key=normal(2, 5, 96), value=normal(2, 5, 96))
    append = bhnd(1, 9) | dict(value_cache=normal(B, HKV, 9, D), seq_lens=np.array([4, 8], np.int32))
    append |= {name: normal(B, HKV, 1, D) for name in ("new_key", "new_value")}
    caches = ["output", "present_key", "present_value"]
    return {
        "Attention": (model_of("Attention", "", qkv(), ["Y"], dict(is_causal=1)), "leanfleet"),
        "Attention of rank 3": (model_of("Attention", "", qkv(packed=True), ["Y"], dict(is_causal=1) | heads), "leanfleet"),
        "GroupQueryAttention": (model_of("GroupQueryAttention", "com.microsoft", gqa, caches, gqa_attributes, 21), "leanfleet"),
        "packed": (model_of("GroupQueryAttention", "com.microsoft", packed, caches, packed_attributes, 21), "leanfleet"),
        "MultiHeadAttention": (
            model_of("MultiHeadAttention", "com.microsoft", plain, ["o"], dict(num_heads=H), 21),
            "leanfleet",
        ),
        "PagedAttention": (
            model_of("PagedAttention", "com.microsoft", pages, ["output", "k", "v"], pages_attributes, 21),
            "leanfleet",
        ),
        "LinearAttention": (model_of("LinearAttention", "com.microsoft", scan, ["o", "s"], scan_attributes, 21), "leanfleet"),
        "LeanAttention": (lean_model({}, 23, **bhnd(7, 7))[0], "standard"),
        "append": (lean_model(dict(append=1), outputs=("output", "key_cache_out", "value_cache_out"), **append)[0], "standard"),
        "CausalLinearDecay": (decay_model(dict(scale=0.3, return_state=1))[0], "standard"),
    }
