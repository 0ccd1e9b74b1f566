"""Rewriting attention nodes: what is rewritten gives the same numbers, with the kernels and with the bodies; the rest stays."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper

from leanfleet import cli
from leanfleet.export import export_decoder
from leanfleet.export import rewrite as rw
from leanfleet.ort_ops import make_session
from support import decoders
from support.rewrite_models import (
    BOOL,
    DV,
    FLOAT,
    HKV,
    B,
    D,
    H,
    N,
    bhnd,
    close,
    decay_model,
    delta,
    delta_net,
    feed_of,
    group_query,
    lean_model,
    linear,
    model_of,
    normal,
    paged,
    qkv,
    run,
    rounded,
    single,
)


def rewritten(model, to="leanfleet", **options):
    """(the rewritten ModelProto, rows)"""
    found = ir.from_proto(model)
    rows = rw.rewrite(found, to, **options)
    proto = ir.to_proto(found)
    onnx.checker.check_model(proto)
    return proto, rows


def same_numbers(model, feed, into, keep=lambda outputs: outputs, **options):
    """Rewrites a model and compares it, with kernels and with bodies, with what onnxruntime's own operator gives."""
    expected = run(model, feed)
    proto, rows = rewritten(model, **options)
    assert [(r.into, r.reason) for r in rows] == [(into, None)]
    assert all(n.op_type != model.graph.node[0].op_type for n in proto.graph.node)
    for library in (True, False):
        close(keep(run(proto, feed, library)), keep(expected), into, f"library {library}")
    return proto


# ai.onnx Attention


@pytest.mark.parametrize(
    "attributes",
    [
        dict(is_causal=1),
        dict(is_causal=0),
        dict(is_causal=1, scale=0.3),
        dict(is_causal=1, softcap=2.0),
        dict(is_causal=0, softcap=1.5, scale=0.7),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["rank4", "rank3"])
def test_attention(attributes, packed):
    inputs = qkv(packed=packed)
    if packed:
        attributes = attributes | dict(q_num_heads=H, kv_num_heads=HKV)
    same_numbers(model_of("Attention", "", inputs, ["Y"], attributes), inputs, "LeanAttention")


def test_attention_in_half_precision():
    inputs = qkv(dtype=np.float16)
    model = model_of("Attention", "", inputs, ["Y"], dict(is_causal=1))
    same_numbers(model, inputs, "LeanAttention")


@pytest.mark.parametrize("n, s", [(3, 7), (1, 9), (7, 7)])
def test_attention_without_causality_over_more_keys(n, s):
    inputs = qkv(n, s)
    same_numbers(model_of("Attention", "", inputs, ["Y"], {}), inputs, "LeanAttention")


@pytest.mark.parametrize("packed", [False, True], ids=["rank4", "rank3"])
@pytest.mark.parametrize("n, past", [(1, 6), (4, 7), (5, 0)])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_past(n, past, causal, packed):
    shape = [None, "n", None] if packed else [None, None, "n", None]  # dynamic: one model serves every length

    def declared(a):
        return a, [size if name is None else name for name, size in zip(shape, a.shape)]

    inputs = {name: declared(a) for name, a in qkv(n, n, packed=packed).items()}
    inputs |= {
        "mask": None,
        "past_key": (normal(B, HKV, past, D), [B, HKV, "past", D]),
        "past_value": (normal(B, HKV, past, DV), [B, HKV, "past", DV]),
    }
    attributes = dict(is_causal=causal, softcap=3.0) | (dict(q_num_heads=H, kv_num_heads=HKV) if packed else {})
    model = model_of("Attention", "", inputs, ["Y", "present_key", "present_value"], attributes)
    same_numbers(model, feed_of(inputs), "LeanAttention")


@pytest.mark.parametrize("lens", [[9, 9], [1, 7], [4, 2]])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_over_an_outer_cache(lens, causal):
    inputs = qkv(1, 9) | {"m": None, "pk": None, "pv": None, "nonpad": np.array(lens, np.int64)}
    same_numbers(model_of("Attention", "", inputs, ["Y"], dict(is_causal=causal), opset=24), inputs, "LeanAttention")


def test_attention_window_of_opset_25():
    """onnxruntime 1.31 has no kernel for it: compared with a mask in Attention-23."""
    inputs = qkv(9, 9)
    rows, columns = np.arange(9)[:, None], np.arange(9)
    mask = (columns <= rows) & (columns >= rows - 3)
    expected = run(model_of("Attention", "", inputs | {"mask": mask}, ["Y"], {}), inputs | {"mask": mask})
    for attributes in (dict(is_causal=1, left_window_size=3), dict(left_window_size=3, right_window_size=0)):
        proto, rows_ = rewritten(model_of("Attention", "", inputs, ["Y"], attributes, opset=25))
        assert rows_[0].into == "LeanAttention"
        for library in (True, False):
            close(run(proto, inputs, library), expected, "LeanAttention")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mask=np.ones((N, N), bool)), "attn_mask"),
        (dict(attributes=dict(scale=0.0)), "scale is 0"),
        (dict(attributes=dict(softcap=-1.0)), "softcap is -1.0"),
        (dict(attributes=dict(softmax_precision=11)), "softmax_precision is double"),
        (dict(attributes=dict(left_window_size=2), opset=25), "left_window_size without"),
        (dict(attributes=dict(right_window_size=2), opset=25), "right_window_size is 2"),
        (dict(outputs=["Y", "", "", "qk"]), "qk_matmul_output is read"),
        (dict(outputs=["Y", "pk", "pv"]), "is read without past_key"),
        (dict(arrays=qkv(3, 7), attributes=dict(is_causal=1)), "3 queries and 7 keys"),
        (dict(arrays=qkv(7, 3)), "7 queries and 3 keys .*padding"),
        (dict(arrays={k: (v, [B, None, "n" if k == "Q" else "s", None]) for k, v in qkv().items()}), "n queries and s keys"),
        (dict(arrays={k: v.astype(np.float64) for k, v in qkv().items()}), "its type is double"),
        (dict(arrays=qkv(packed=True)), "need q_num_heads and kv_num_heads"),
        (dict(attributes=dict(is_causal=7)), "is_causal is 7; expected 0 or 1"),  # onnxruntime's Attention reads it as 0
        (dict(arrays=qkv(packed=True), attributes=dict(q_num_heads=6, kv_num_heads=0)), "need q_num_heads and kv_num_heads"),
        (dict(arrays=qkv(packed=True), attributes=dict(q_num_heads=5, kv_num_heads=2)), "5 query heads over 2 key/value heads"),
        (
            dict(arrays=qkv(packed=True), attributes=dict(q_num_heads=7, kv_num_heads=1)),
            "not the same number for each of 7 heads",
        ),
        (dict(attributes=dict(is_causal=0.5)), "is_causal is of type FLOAT; expected INT"),
        (dict(nonpad=np.array([5, 5]), opset=24), "nonpad_kv_seqlen with 5 queries"),
    ],
    ids=str,
)
def test_attention_left_alone(change, message):
    inputs = change.get("arrays", qkv()) | {"mask": change.get("mask")}
    if "nonpad" in change:
        inputs |= {"pk": None, "pv": None, "nonpad": change["nonpad"]}
    model = model_of(
        "Attention", "", inputs, change.get("outputs", ["Y"]), change.get("attributes", {}), change.get("opset", 23)
    )
    found = ir.from_proto(model)
    (row,) = rw.rewrite(found)
    assert row.into is None
    assert __import__("re").search(message, row.reason), row.reason
    assert [n.op_type for n in found.graph] == ["Attention"] and not found.functions


# com.microsoft GroupQueryAttention


GQA = [
    ("prompt", dict(n=5, lens=[5, 5])),
    ("prompt_ragged", dict(n=5, lens=[3, 5])),
    ("prompt_packed", dict(n=5, lens=[5, 2], packed=True)),
    ("prompt_no_past", dict(n=5, lens=[5, 4], past=None)),
    ("prompt_into_capacity", dict(n=5, lens=[5, 3], past=12)),
    ("decode", dict(n=1, lens=[7, 7], past=6)),
    ("decode_ragged", dict(n=1, lens=[4, 7], past=6)),
    ("decode_into_capacity", dict(n=1, lens=[4, 7], past=12)),
    ("chunk_of_one_request", dict(n=4, lens=[11], past=7)),
    ("chunk_into_capacity", dict(n=4, lens=[11], past=14)),
    ("scale", dict(n=5, lens=[5, 5], scale=0.4)),
    ("softcap", dict(n=5, lens=[5, 5], softcap=1.5)),
    ("window", dict(n=6, lens=[6, 6], local_window_size=3)),
    ("window_of_one", dict(n=6, lens=[6, 6], local_window_size=1)),
    ("window_decode", dict(n=1, lens=[9, 5], past=8, local_window_size=3)),
    ("sink", dict(n=5, lens=[5, 5], sink=True)),
    ("sink_decode", dict(n=1, lens=[5, 3], past=4, sink=True)),
    ("smooth_softmax", dict(n=5, lens=[5, 5], smooth_softmax=1)),
    ("bidirectional", dict(n=5, lens=[5, 5], causal=0)),
    ("rotary", dict(n=5, lens=[5, 3], rotary=8)),
    ("rotary_packed", dict(n=5, lens=[5, 3], rotary=8, packed=True)),
    ("rotary_decode", dict(n=1, lens=[7, 4], past=6, rotary=8)),
    ("rotary_chunk", dict(n=3, lens=[9], past=6, rotary=8)),
    ("rotary_interleaved", dict(n=1, lens=[7, 4], past=6, rotary=8, rotary_interleaved=1)),
    ("rotary_into_capacity", dict(n=1, lens=[4, 7], past=12, rotary=8)),
    ("rotary_no_past", dict(n=5, lens=[5, 4], past=None, rotary=8)),
    ("int8_prompt", dict(n=4, lens=[4, 2], quant="PER_TENSOR")),
    ("int8_one_token", dict(n=1, lens=[7, 4], past=6, quant="PER_CHANNEL", local_window_size=3)),
    ("int8_packed", dict(n=1, lens=[7, 4], past=6, quant="PER_TENSOR", packed=True, sink=True)),
    ("int8_rotary_into_capacity", dict(n=1, lens=[4, 7], past=12, rotary=8, quant="PER_CHANNEL")),
    ("int4_prompt", dict(n=4, lens=[4, 2], quant="PER_CHANNEL", form="int4")),
    ("int4_packed", dict(n=1, lens=[7, 4], past=6, quant="PER_TENSOR", packed=True, sink=True, form="int4")),
    ("int4_rotary_into_capacity", dict(n=1, lens=[4, 7], past=12, rotary=8, quant="PER_CHANNEL", form="int4")),
]


@pytest.mark.parametrize("case", [c for _, c in GQA], ids=[n for n, _ in GQA])
def test_group_query_attention(case):
    inputs, attributes = group_query(**case)
    model = model_of("GroupQueryAttention", "com.microsoft", inputs, ["output", "present_key", "present_value"], attributes, 21)
    lens, n = case["lens"], case["n"]

    def keep(outputs):
        """What is defined: rows of real tokens, and cached positions that hold one."""
        output, key, value = outputs
        rows = [output[b, : min(n, length)] for b, length in enumerate(lens)]
        return [
            np.concatenate(rows),
            *(np.concatenate([t[b, :, :length] for b, length in enumerate(lens)], 1) for t in (key, value)),
        ]

    feed = feed_of(inputs)
    proto = same_numbers(model, feed, "LeanAttention", keep)
    shapes = [[r.shape for r in run(m, feed)] for m in (model, proto)]
    assert shapes[0] == shapes[1]
    outside = "rotary" in case and case.get("past", 0) is None
    assert ("RotaryEmbedding" in [x.op_type for x in proto.graph.node]) == outside
    inside = [bool(x.input[10:11]) and x.input[10] != "" for x in proto.graph.node if x.op_type == "LeanAttention"]
    assert inside == ["rotary" in case and not outside]
    if case.get("past", 0) is not None and max(lens) <= case.get("past", 0):
        fixed = same_numbers(model, feed, "LeanAttention", keep, fixed_caches=True)
        attention = next(x for x in fixed.graph.node if x.op_type == "LeanAttention")
        assert list(attention.input[1:3]) == ["past_key", "past_value"] and "Concat" not in [
            x.op_type for x in fixed.graph.node
        ]


def test_group_query_partial_rotary():
    """cos_cache covers half of a head."""
    global D
    D, before = 32, D
    try:
        test_group_query_attention(dict(n=1, lens=[7, 4], past=6, rotary=8))
        test_group_query_attention(dict(n=4, lens=[4, 2], rotary=8, packed=True))
    finally:
        D = before


def test_caches_declared_of_one_length_are_appended_to_in_place():
    inputs, attributes = group_query(n=1, lens=[4, 7], past=12)
    inputs = {name: ((a, [2, HKV, "slots", D]) if name.startswith("past") else a) for name, a in inputs.items()}
    outputs = {"output": None, "present_key": [2, HKV, "slots", D], "present_value": [2, HKV, "slots", D]}
    proto, _ = rewritten(model_of("GroupQueryAttention", "com.microsoft", inputs, outputs, attributes, 21))
    attention = next(x for x in proto.graph.node if x.op_type == "LeanAttention")
    assert list(attention.input[1:3]) == ["past_key", "past_value"]
    assert list(attention.output[2:]) == ["present_key", "present_value"]


SCALES = dict.fromkeys(("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink")) | dict(k_scale=normal(1))


@pytest.mark.parametrize(
    "extra, attributes, message",
    [
        (dict(cos_cache=None, sin_cache=None, position_ids=None, attention_bias=normal(1, 1, 5, 5)), {}, "attention_bias"),
        ({}, dict(sliding_window_cache=1, local_window_size=4), "sliding_window_cache"),
        ({}, dict(k_quant_type="PER_TENSOR"), "k_quant_type is PER_TENSOR without k_scale"),
        ({}, dict(k_quant_type="PER_TOKEN"), "k_quant_type is PER_TOKEN; expected NONE"),
        (SCALES, dict(k_quant_type="PER_TENSOR"), "past_key holds float; of quantised caches LeanAttention takes int8, float8"),
        (SCALES, {}, "it has k_scale: it goes with k_quant_type"),
        ({}, dict(qk_output=1), "output_qk"),
        ({}, dict(local_window_size=0), "local_window_size is 0"),
        ({}, dict(do_rotary=1), "without cos_cache"),
        (
            dict(cos_cache=normal(9, 8), sin_cache=normal(9, 8), position_ids=np.zeros((2, 5), np.int64)),
            dict(do_rotary=1),
            "position_ids",
        ),
        (
            dict(past_key=None, past_value=None, cos_cache=(normal(9, 8), ["a", "b"]), sin_cache=normal(9, 8)),
            dict(do_rotary=1),
            "sizes of cos_cache",
        ),
    ],
)
def test_group_query_attention_left_alone(extra, attributes, message):
    inputs, usual = group_query(n=5, lens=[5, 5])
    model = model_of("GroupQueryAttention", "com.microsoft", inputs | extra, ["output", "pk", "pv"], usual | attributes, 21)
    _, (row,) = rewritten(model)
    assert row.into is None and message in row.reason


@pytest.mark.parametrize("form", ("int8", "int4", "fp8"))
@pytest.mark.parametrize("quant", ("PER_TENSOR", "PER_CHANNEL"))
def test_quantised_group_query_attention_there_and_back(quant, form):
    """Over fixed caches. onnxruntime's CPU provider has no GroupQueryAttention over fp8: that is compared with ours."""
    inputs, attributes = group_query(n=1, lens=[4, 7], past=12, quant=quant, form=form)
    shape = [*inputs["past_key"].shape[:3], inputs["past_key"].shape[3]]
    outputs = {"output": None, "present_key": shape, "present_value": shape}
    model = model_of("GroupQueryAttention", "com.microsoft", inputs, outputs, attributes, 21)
    proto, (row,) = rewritten(model)
    assert (row.into, row.reason) == ("LeanAttention", None)
    back, (row,) = rewritten(proto, "standard")
    assert (row.into, row.reason) == ("GroupQueryAttention", None)
    (node,) = (n for n in back.graph.node if n.op_type == "GroupQueryAttention")
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert found["kv_cache_bit_width"] == (4 if form == "int4" else 8) and found["k_quant_type"] == quant.encode()
    feed = feed_of(inputs)
    ours = [run(proto, feed, library) for library in (True, False)]
    close(ours[1], ours[0], "LeanAttention")
    if form != "fp8":
        for mine, theirs in zip(ours[0][1:], run(back, feed)[1:], strict=True):  # which leaves zeros behind a request's tokens
            assert all(np.array_equal(mine[b, :, :n], theirs[b, :, :n]) for b, n in enumerate((4, 7)))
        close(run(back, feed)[:1], ours[0][:1], "LeanAttention")
    again, (row,) = rewritten(back)
    assert row.into == "LeanAttention"
    close(run(again, feed, True), ours[0], "LeanAttention")


def test_fp8_caches_that_grow_are_left_alone():
    inputs, attributes = group_query(n=1, lens=[7, 4], past=6, quant="PER_TENSOR", form="fp8")
    model = model_of("GroupQueryAttention", "com.microsoft", inputs, ["output", "pk", "pv"], attributes, 21)
    _, (row,) = rewritten(model)
    assert row.into is None and "caches of float8e4m3fn grow here" in row.reason


# com.microsoft PagedAttention


def paged_in_float64(x, a):
    """What PagedAttention's definition says, a token and a head at a time; keys are rounded as the cache holds them."""
    dtype = x["query"].dtype
    rows = x["query"].astype(np.float64).reshape(len(x["query"]), -1, D)
    if x["key"] is None:
        query, key, value = np.split(rows, [H, H + HKV], 1)
    else:
        query, (key, value) = rows, (x[n].astype(np.float64).reshape(len(rows), HKV, D) for n in ("key", "value"))
    pools = [x[n].copy() for n in ("key_cache", "value_cache")]
    form = {"int8": "int8", "float8_e4m3fn": "fp8"}.get(str(pools[0].dtype))
    output, block = np.zeros((len(rows), H, D)), pools[0].shape[1]
    offsets = x["cumulative_sequence_length"]

    def turned(row, position):
        if not a.get("do_rotary"):
            return row
        cos, sin = (x[n][position].astype(np.float64) for n in ("cos_cache", "sin_cache"))
        pairs = (slice(0, 2 * len(cos), 2), slice(1, 2 * len(cos), 2))
        if not a.get("rotary_interleaved"):
            pairs = (slice(0, len(cos)), slice(len(cos), 2 * len(cos)))
        result = row.copy()
        result[..., pairs[0]] = row[..., pairs[0]] * cos - row[..., pairs[1]] * sin
        result[..., pairs[1]] = row[..., pairs[1]] * cos + row[..., pairs[0]] * sin
        return result.astype(dtype).astype(np.float64)

    scales = [np.broadcast_to(x.get(n, np.ones(1)), (HKV, 1, D))[:, 0].astype(np.float64) for n in ("k_scale", "v_scale")]

    def stored(row, scale):
        return rounded(row / scale, form) if form else row

    for b, past in enumerate(x["past_seqlens"]):
        places = [(page, slot) for page in x["block_table"][b] for slot in range(block)]
        for i, t in enumerate(range(offsets[b], offsets[b + 1])):
            for pool, row, scale in zip(pools, (turned(key[t], past + i), value[t]), scales, strict=True):
                pool[places[past + i]] = stored(row, scale)
        length = past + offsets[b + 1] - offsets[b]
        for i, t in enumerate(range(offsets[b], offsets[b + 1])):
            end = past + i + 1 if a.get("is_causal", 1) else length
            begin = max(0, end - a["local_window_size"]) if a.get("local_window_size", -1) > 0 else 0
            seen = [places[j] for j in range(begin, end)]
            keys, values = (np.array([p[at].astype(np.float64) * s for at in seen]) for p, s in zip(pools, scales, strict=True))
            for h in range(H):
                logits = keys[:, h // (H // HKV)] @ turned(query[t, h], past + i) * (a.get("scale") or D**-0.5)
                if a.get("softcap"):
                    logits = a["softcap"] * np.tanh(logits / a["softcap"])
                extra = [float(x["head_sink"][h])] if x.get("head_sink") is not None else []
                weights = np.exp(logits - max([*logits, *extra]))
                total = weights.sum() + sum(np.exp(e - max([*logits, *extra])) for e in extra)
                output[t, h] = weights @ values[:, h // (H // HKV)] / total
    return [output.reshape(len(rows), -1).astype(dtype), *pools]


PAGED = [
    {},
    dict(packed=True),
    dict(new=(1, 1, 1, 1)),
    dict(rotary=8),
    dict(rotary=8, packed=True, rotary_interleaved=1),
    dict(rotary=4),
    dict(sink=True),
    dict(scale=0.4, softcap=1.5),
    dict(local_window_size=3),
    dict(is_causal=0),
    dict(quant="PER_TENSOR", packed=True),
    dict(quant="PER_CHANNEL", rotary=8, local_window_size=5),
    dict(quant="PER_TENSOR", packed=True, form="fp8"),
    dict(quant="PER_CHANNEL", rotary=8, local_window_size=5, form="fp8"),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_attention(case):
    inputs, attributes = paged(**case)
    model = model_of("PagedAttention", "com.microsoft", inputs, ["output", "key_out", "value_out"], attributes, 21)
    proto, (row,) = rewritten(model)
    assert (row.into, row.reason) == ("LeanAttention", None)
    assert all(n.op_type != "PagedAttention" for n in proto.graph.node)
    expected = paged_in_float64(inputs, attributes)
    for library in (True, False):
        close(run(proto, feed_of(inputs), library), expected, "LeanAttention", f"library {library}")


@pytest.mark.parametrize("case", [c for c in PAGED if "sink" not in c], ids=str)
def test_paged_attention_there_and_back(case):
    inputs, attributes = paged(**case)
    model = model_of("PagedAttention", "com.microsoft", inputs, ["output", "key_out", "value_out"], attributes, 21)
    proto, _ = rewritten(model)
    back, (row,) = rewritten(proto, "standard")
    if case.get("rotary") == 4:  # which onnxruntime's operator refuses when it runs
        assert (
            row.into is None and row.reason == "rotary encoding of 8 of a head's columns; PagedAttention takes multiples of 16"
        )
        return
    assert (row.into, row.reason) == ("PagedAttention", None) and "onnxruntime runs it on CUDA alone" in row.notes
    again, (row,) = rewritten(back)
    assert row.into == "LeanAttention"
    close(run(again, feed_of(inputs), True), paged_in_float64(inputs, attributes), "LeanAttention")


@pytest.mark.parametrize(
    "extra, attributes, message",
    [
        (dict(cos_cache=None, sin_cache=None, slot_mapping=np.arange(10, dtype=np.int32)), {}, "slot_mapping"),
        ({}, dict(k_quant_type="PER_TENSOR"), "k_quant_type is PER_TENSOR without k_scale"),
        ({}, dict(kv_cache_layout="LATENT"), "kv_cache_layout is LATENT"),
        ({}, dict(rotary_offset=8), "rotary_offset is 8"),
        ({}, dict(local_window_size=0), "local_window_size is 0"),
        ({}, dict(local_window_size=3, is_causal=0), "where causal"),
        ({}, dict(do_rotary=1), "without cos_cache"),
        (dict(value=None), {}, "go together"),
    ],
)
def test_paged_attention_left_alone(extra, attributes, message):
    inputs, usual = paged()
    model = model_of("PagedAttention", "com.microsoft", inputs | extra, ["output", "k", "v"], usual | attributes, 21)
    _, (row,) = rewritten(model)
    assert row.into is None and message in row.reason


# com.microsoft MultiHeadAttention


def heads_first(a):
    return np.ascontiguousarray(a.reshape(*a.shape[:2], H, -1).transpose(0, 2, 1, 3))


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("form", ["rank3", "packed_qkv", "packed_kv", "past", "past_one"])
def test_multi_head_attention(form, causal):
    n = 1 if form == "past_one" else N
    q, k, v = normal(B, n, H * D), normal(B, n, H * D), normal(B, n, H * (DV if form == "rank3" else D))
    inputs, outputs = dict(query=q, key=k, value=v), ["output"]
    if form == "packed_qkv":
        inputs = dict(query=np.stack([x.reshape(B, n, H, D) for x in (q, k, v)], 3))
    if form == "packed_kv":
        inputs = dict(query=q, key=np.stack([x.reshape(B, n, H, D) for x in (k, v)], 3))
    if form.startswith("past"):
        inputs |= dict(bias=None, mask=None, attention_bias=None, past_key=normal(B, H, 7, D), past_value=normal(B, H, 7, D))
        outputs += ["present_key", "present_value"]
    attributes = dict(num_heads=H, unidirectional=causal, scale=0.3)
    model = model_of("MultiHeadAttention", "com.microsoft", inputs, outputs, attributes, 21)
    if "packed" not in form:
        same_numbers(model, feed_of(inputs), "LeanAttention")
        return
    plain = dict(query=q, key=k, value=v)  # onnxruntime has packed inputs on CUDA alone
    expected = run(model_of("MultiHeadAttention", "com.microsoft", plain, outputs, attributes, 21), plain)
    proto, (row,) = rewritten(model)
    for library in (True, False):
        close(run(proto, inputs, library), expected, row.into)


def test_multi_head_cross_attention_over_a_cache():
    inputs = dict(query=normal(B, 3, H * D), key=normal(B, H, 8, D), value=normal(B, H, 8, D))
    same_numbers(
        model_of("MultiHeadAttention", "com.microsoft", inputs, ["output"], dict(num_heads=H), 21), inputs, "LeanAttention"
    )


@pytest.mark.parametrize(
    "extra, outputs, attributes, message",
    [
        (dict(bias=normal(3 * H * D)), ["o"], {}, "it has bias"),
        (dict(bias=None, key_padding_mask=np.array([3, 5], np.int32)), ["o"], {}, "finite number"),
        (dict(bias=None, mask=None, attention_bias=normal(1, 1, N, N)), ["o"], {}, "attention_bias"),
        ({}, ["o", "", "", "qk"], {}, "qk is read"),
        (dict(key=normal(B, 7, H * D), value=normal(B, 7, H * D)), ["o"], dict(unidirectional=1), "5 queries and 7 keys"),
    ],
)
def test_multi_head_attention_left_alone(extra, outputs, attributes, message):
    inputs = dict(query=normal(B, N, H * D), key=normal(B, N, H * D), value=normal(B, N, H * D)) | extra
    _, (row,) = rewritten(model_of("MultiHeadAttention", "com.microsoft", inputs, outputs, dict(num_heads=H) | attributes, 21))
    assert row.into is None and message in row.reason


# LinearAttention


@pytest.mark.parametrize(
    "case",
    [
        dict(),
        dict(n=1),
        dict(rule="linear"),
        dict(state=False),
        dict(rule="linear", state=False, n=64),
        dict(scale=0.5),
        dict(n=65, chunk_size=32),
        dict(heads=(2, 2, 6)),
        dict(heads=(1, 1, 4), rule="linear", n=1),
        dict(decay="key"),
        dict(decay="key", heads=(2, 2, 6), n=1),
        dict(decay="key", heads=(3, 3, 3), state=False, scale=0.5),
    ],
    ids=str,
)
def test_linear_attention_of_com_microsoft(case):
    inputs, attributes = linear(**case)
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    model = model_of("LinearAttention", "com.microsoft", inputs, ["output", "present_state"], attributes, 21)
    same_numbers(model, feed_of(inputs), "CausalLinearDecay")


def test_linear_attention_of_opset_27_is_made_loadable():
    """onnxruntime 1.31 refuses opset 27; the rewritten file needs no more than 26."""
    inputs, attributes = linear(n=9)
    expected = run(model_of("LinearAttention", "com.microsoft", inputs, ["output", "present_state"], attributes, 21), inputs)
    model = model_of("LinearAttention", "", inputs, ["output", "present_state"], attributes, 27)
    with pytest.raises(Exception, match="till opset 26"):
        run(model, inputs)
    proto, rows = rewritten(model)
    assert rows[0].into == "CausalLinearDecay" and rows[0].notes == ["log decays above 0 are an error"]
    assert proto.opset_import[0].version == 26
    for library in (True, False):
        close(run(proto, inputs, library), expected, "CausalLinearDecay")


@pytest.mark.parametrize(
    "change, attributes, message",
    [
        (dict(beta=normal(B, 9, HKV)), {}, "the update rule gated has no beta"),
        ({}, dict(update_rule="gated_delta"), "the update rule gated_delta needs beta"),
        ({}, dict(update_rule="momentum"), "update_rule is momentum"),
        (dict(decay=-np.abs(normal(B, 9, 3))), {}, "decay has 3 columns for 2 states of 16 rows"),
        (dict(decay=(-np.abs(normal(B, 9, HKV)), [B, 9, "width"])), {}, "width columns for 2 states"),
        ({}, dict(update_rule="linear"), "update_rule is linear with decay"),
        (dict(query=(normal(B, 9, H * D), [B, 9, "width"])), {}, "scale is 1/sqrt"),
        ({}, dict(state_window=2), "state_window is 2"),
        ({}, dict(q_num_heads=4, kv_num_heads=6), "columns for 4 query heads"),
        ({}, dict(kv_num_heads=4), "do not divide each other"),
    ],
)
def test_linear_attention_left_alone(change, attributes, message):
    inputs, usual = linear(n=9)
    _, (row,) = rewritten(model_of("LinearAttention", "com.microsoft", inputs | change, ["o", "s"], usual | attributes, 21))
    assert row.into is None and message in row.reason


# The delta rule: LinearAttention, and com.microsoft GatedDeltaNet

DELTA = [
    dict(),
    dict(n=1),
    dict(decay=None, state=False),
    dict(decay="key"),
    dict(heads=(2, 2, 4), beta="one"),
    dict(heads=(1, 1, 3), decay="key", scale=0.5),
    dict(heads=(6, 3, 3), decay=None, chunk_size=32),
]


def linear_model(inputs, attributes):
    inputs = dict(inputs)
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    return model_of("LinearAttention", "com.microsoft", inputs, ["output", "present_state"], attributes, 21)


@pytest.mark.parametrize("case", DELTA, ids=str)
def test_delta_rule_of_linear_attention(case):
    inputs, attributes = delta(**case)
    same_numbers(linear_model(inputs, attributes), feed_of(inputs), "GatedDeltaRule")


@pytest.mark.parametrize("case", DELTA, ids=str)
def test_delta_rule_there_and_back(case):
    inputs, attributes = delta(**case)
    model = linear_model(inputs, attributes)
    proto, _ = rewritten(model)
    back, (row,) = rewritten(proto, "standard")
    assert (row.into, row.reason) == ("LinearAttention", None) and not back.functions
    close(run(back, feed_of(inputs)), run(model, feed_of(inputs)), "GatedDeltaRule")


@pytest.mark.parametrize(
    "change, attributes, message",
    [
        (dict(beta=None), {}, "needs beta"),
        (dict(decay=None), {}, "gated_delta without decay"),
        (dict(decay=-np.abs(normal(B, 9, 3))), {}, "decay has 3 columns for 2 states of 16 rows"),
        (dict(beta=normal(B, 9, 3)), {}, "beta has 3 columns for 2 states"),
        (dict(beta=(normal(B, 9, 2), [B, 9, "width"])), {}, "beta has width columns"),
        (dict(key=normal(B, 9, 24)), {}, "64 and 24 columns for 4 query heads"),
        (dict(key=normal(B, 9, 3 * D)), {}, "4 query heads, 3 key heads and 2 states do not divide each other"),
        ({}, dict(state_window=2), "state_window is 2"),
    ],
)
def test_delta_rule_left_alone(change, attributes, message):
    inputs, usual = delta(n=9)
    _, (row,) = rewritten(linear_model(inputs | change, usual | attributes))
    assert row.into is None and message in row.reason


def delta_net_in_float64(x, a):
    """What GatedDeltaNet's definition says, a token and a state at a time."""
    inputs = {name: t if t is None else t.astype(np.int64 if name == "cu_seqlens" else np.float64) for name, t in x.items()}
    get = inputs.get
    lead = x["query"].shape[: 2 if get("key") is None and x["query"].ndim == 3 or x["query"].ndim == 4 else 1]
    tokens = int(np.prod(lead))
    query, key, value = (t if t is None else t.reshape(tokens, -1) for t in (x["query"], get("key"), get("value")))
    if key is None:
        states, value_size, size = x["initial_state"].shape[1:]
        heads = (query.shape[1] - states * value_size) // (2 * size)
        query, key, value = np.split(query, [heads * size, 2 * heads * size], 1)
    else:
        heads, size = x["key"].shape[-2:]
        states, value_size = x["value"].shape[-2:]
    query, key = (t.astype(np.float64).reshape(tokens, heads, size) for t in (query, key))
    value = value.astype(np.float64).reshape(tokens, states, value_size)
    if a.get("qk_l2_norm"):
        query, key = (t / np.sqrt((t**2).sum(-1, keepdims=True) + 1e-12) for t in (query, key))
    decay = np.zeros((tokens, states, 1)) if get("decay") is None else get("decay").reshape(tokens, states, -1)
    beta = np.ones((tokens, states)) if get("beta") is None else get("beta").reshape(tokens, states)
    if a.get("gate_activation") == "qwen":
        decay = -np.exp(get("a_log"))[:, None] * np.log1p(np.exp(decay + get("dt_bias")[:, None]))
        beta = 1 / (1 + np.exp(-beta))
    requests = len(x["cu_seqlens"]) - 1 if get("cu_seqlens") is not None else len(x["initial_state"])
    offsets = get("cu_seqlens") if get("cu_seqlens") is not None else np.arange(requests + 1) * (tokens // requests)
    state = np.zeros((requests, states, value_size, size)) if get("initial_state") is None else get("initial_state").copy()
    output = np.zeros((tokens, states, value_size))
    for b in range(requests):
        for t in range(offsets[b], offsets[b + 1]):
            for h in range(states):
                k, q = key[t, h // (states // heads)], query[t, h // (states // heads)]
                kept = state[b, h] * np.exp(decay[t, h])
                missing = value[t, h] - kept @ k if a["update_rule"].endswith("delta") else value[t, h]
                state[b, h] = kept + np.outer(beta[t, h] * missing, k)
                output[t, h] = (a.get("scale") or size**-0.5) * (state[b, h] @ q)
    return [output.reshape(*lead, states, value_size).astype(x["query"].dtype), state.astype(np.float32)]


DELTA_NET = [
    dict(),
    dict(gate=True, qk_l2_norm=1),
    dict(gate=True, decay="key"),
    dict(form="uniform", decay="key"),
    dict(form="batch", heads=(2, 2), scale=0.3),
    dict(form="batch", joined=True, gate=True),
    dict(joined=True, heads=(1, 3)),
    dict(decay=None, state=False),
    dict(beta=False, lengths=(5, 0, 2)),
    dict(dtype=np.float16),
    dict(dtype=np.float16, form="uniform", gate=True, qk_l2_norm=1),
]
# Without the rule.
GATED_NET = [
    dict(),
    dict(decay="key", beta=False),
    dict(decay="key", form="batch", gate=True, qk_l2_norm=1),
    dict(decay=None, form="uniform", scale=0.3),
    dict(dtype=np.float16, decay="key", joined=True),
]


def delta_net_model(inputs, attributes):
    rank = 4 if inputs["query"].ndim == 4 or inputs.get("key") is None and inputs["query"].ndim == 3 else 3
    outputs = {"output": [None] * rank, "final_state": [None] * 4}
    model = model_of("GatedDeltaNet", "com.microsoft", inputs, outputs, attributes, 21)
    model.graph.output[1].type.tensor_type.elem_type = FLOAT
    return model


@pytest.mark.parametrize("case", [*DELTA_NET, *(dict(case, delta=False) for case in GATED_NET)], ids=str)
def test_gated_delta_net(case):
    inputs, attributes = delta_net(**case)
    proto, (row,) = rewritten(delta_net_model(inputs, attributes))
    assert (row.into, row.reason) == ("GatedDeltaRule" if case.get("delta", True) else "CausalLinearDecay", None)
    assert all(n.op_type != "GatedDeltaNet" for n in proto.graph.node)
    expected = delta_net_in_float64(inputs, attributes)
    for library in (True, False):
        close_states(run(proto, feed_of(inputs), library), expected, f"library {library}")


def close_states(found, expected, what=""):
    """As close, with states that are float32 and come from keys and values of the output's type."""
    close(found[:1], expected[:1], "GatedDeltaRule", what)
    close([found[1].astype(expected[0].dtype)], [expected[1].astype(expected[0].dtype)], "GatedDeltaRule", what)
    assert found[1].dtype == np.float32


@pytest.mark.parametrize("case", [c for c in DELTA_NET if c.get("form", "packed") == "packed" or "dtype" in c], ids=str)
def test_gated_delta_net_there_and_back(case):
    """Packed requests and 16-bit types, which LinearAttention does not take."""
    inputs, attributes = delta_net(**case)
    proto, _ = rewritten(delta_net_model(inputs, attributes))
    back, (row,) = rewritten(proto, "standard")
    assert (row.into, row.reason) == ("GatedDeltaNet", None) and "onnxruntime runs it on GPUs alone" in row.notes
    (net,) = (n for n in back.graph.node if n.op_type == "GatedDeltaNet")
    normalizes = {a.name: a.i for a in net.attribute}.get("qk_l2_norm", 0)
    assert normalizes == (inputs["query"].dtype != np.float32 and attributes.get("qk_l2_norm", 0))
    again, (row,) = rewritten(back)
    assert row.into == "GatedDeltaRule"
    close_states(run(again, feed_of(inputs), True), delta_net_in_float64(inputs, attributes))


@pytest.mark.parametrize(
    "case, change, attributes, message",
    [
        ({}, dict(capture_count=np.ones(3, np.int32)), dict(state_update_capacity=2), "captures transitions"),
        ({}, {}, dict(update_rule="momentum"), "update_rule is momentum; expected linear, gated, delta or gated_delta"),
        ({}, {}, dict(gate_activation="mamba"), "gate_activation is mamba"),
        ({}, {}, dict(qk_l2_norm=2), "qk_l2_norm is 2; expected 0 or 1"),
        ({}, dict(a_log=normal(4)), {}, "it has a_log: it goes with gate_activation = qwen"),
        (dict(form="uniform"), dict(initial_state=None), {}, "how many requests"),
        (dict(joined=True), dict(initial_state=None), {}, "need an initial_state of known heads"),
        (dict(joined=True), dict(query=normal(70, 200)), {}, "query has 200 columns"),
        (dict(heads=(2, 3)), {}, {}, "2 query heads, 2 key heads and 3 states"),
    ],
)
def test_gated_delta_net_left_alone(case, change, attributes, message):
    inputs, usual = delta_net(**case)
    _, (row,) = rewritten(delta_net_model(inputs | change, usual | attributes))
    assert row.into is None and message in row.reason


# Short convolutions: CausalConvWithState of both domains, and VarlenCausalConvWithState

CONV = [
    dict(activation="silu"),
    dict(activation="swish", bias=False),
    dict(state=False),
    dict(n=1),
    dict(n=2, taps=5),
    dict(n=2, taps=2, last=True),
    dict(n=6, activation="silu", last=True, state=False),
]


def conv(n=9, taps=4, channels=6, state=True, bias=True, last=False, dtype=np.float32, activation="none"):
    """(inputs, attributes) of a CausalConvWithState."""

    def ordered(a):
        return np.ascontiguousarray(a.transpose(0, 2, 1)) if last else a

    inputs = {
        "input": ordered(normal(B, channels, n)).astype(dtype),
        "weight": normal(channels, 1, taps).astype(dtype),
        "bias": normal(channels).astype(dtype) if bias else None,
        "past_state": ordered(normal(B, channels, taps - 1)).astype(dtype) if state else None,
    }
    return inputs, dict(activation=activation) | (dict(channels_last=1) if last else {})


def conv_model(inputs, attributes, domain="com.microsoft", opset=21):
    inputs = dict(inputs)
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    name = "VarlenCausalConvWithState" if "offsets" in inputs else "CausalConvWithState"
    return model_of(name, domain, inputs, ["output", "present_state"], attributes, opset)


@pytest.mark.parametrize("case", CONV, ids=str)
def test_causal_conv(case):
    inputs, attributes = conv(**case)
    same_numbers(conv_model(inputs, attributes), feed_of(inputs), "CausalConv")


@pytest.mark.parametrize("case", [c for c in CONV if "last" not in c], ids=str)
def test_causal_conv_of_opset_27(case):
    """onnxruntime 1.31 reads no file of it; the rewritten one is of 26."""
    inputs, attributes = conv(**case)
    proto, (row,) = rewritten(conv_model(inputs, attributes, "", 27))
    assert (row.into, row.reason) == ("CausalConv", None) and proto.opset_import[0].version == 26
    expected = run(conv_model(inputs, attributes), feed_of(inputs))
    for library in (True, False):
        close(run(proto, feed_of(inputs), library), expected, "CausalConv")


@pytest.mark.parametrize("case", CONV, ids=str)
def test_causal_conv_there_and_back(case):
    inputs, attributes = conv(**case)
    model = conv_model(inputs, attributes)
    proto, _ = rewritten(model)
    back, (row,) = rewritten(proto, "standard")
    assert (row.into, row.reason) == ("CausalConvWithState", None) and not back.functions
    close(run(back, feed_of(inputs)), run(model, feed_of(inputs)), "CausalConv")


def packed_conv(lengths=(3, 1, 5), taps=4, channels=6, bias=True, dtype=np.float32, activation="silu"):
    """(inputs, attributes) of a VarlenCausalConvWithState, which onnxruntime runs on GPUs alone."""
    inputs = {
        "input": normal(sum(lengths), channels).astype(dtype),
        "weight": normal(channels, 1, taps).astype(dtype),
        "offsets": np.cumsum([0, *lengths]).astype(np.int32),
        "bias": normal(channels).astype(dtype) if bias else None,
        "initial_state": normal(len(lengths), channels, taps - 1).astype(dtype),
    }
    return inputs, dict(activation=activation)


def packed_conv_in_float64(x, activation):
    """What its definition says, a request at a time."""
    kept, weight = x["weight"].shape[2] - 1, x["weight"][:, 0].astype(np.float64)
    outputs, states = [], []
    for start, end, state in zip(x["offsets"], x["offsets"][1:], x["initial_state"].astype(np.float64)):
        rows = np.concatenate([state, x["input"][start:end].T.astype(np.float64)], 1)
        sums = np.stack([(rows[:, i : i + kept + 1] * weight).sum(1) for i in range(end - start)])
        sums += 0 if x["bias"] is None else x["bias"].astype(np.float64)
        outputs.append(sums / (1 + np.exp(-sums)) if activation == "silu" else sums)
        states.append(rows[:, rows.shape[1] - kept :])
    return [np.concatenate(outputs).astype(x["input"].dtype), np.stack(states).astype(x["input"].dtype)]


@pytest.mark.parametrize(
    "case", [{}, dict(bias=False, activation="none"), dict(dtype=np.float16), dict(lengths=(4,), taps=2)], ids=str
)
def test_packed_causal_conv(case):
    inputs, attributes = packed_conv(**case)
    expected = packed_conv_in_float64(inputs, attributes["activation"])
    model = conv_model(inputs, attributes)
    proto, (row,) = rewritten(model)
    assert (row.into, row.reason) == ("CausalConv", None)
    for library in (True, False):
        close(run(proto, feed_of(inputs), library), expected, "CausalConv")
    back, (row,) = rewritten(proto, "standard")
    assert (row.into, row.reason) == ("VarlenCausalConvWithState", None) and "GPUs alone" in " ".join(row.notes)
    again, (row,) = rewritten(back)
    assert row.into == "CausalConv"
    close(run(again, feed_of(inputs), True), expected, "CausalConv")


@pytest.mark.parametrize(
    "case, attributes, message",
    [
        ({}, dict(dilation=2), "dilation is 2"),
        ({}, dict(ndim=2), "ndim is 2"),
        ({}, dict(state_window=3), "state_window is 3"),
        ({}, dict(activation="gelu"), "activation is gelu; CausalConv has none and silu"),
        ({}, dict(channels_last=2), "channels_last is 2; expected 0 or 1"),
        (dict(taps=1, state=False), {}, "weight has 1 taps"),
    ],
)
def test_causal_conv_left_alone(case, attributes, message):
    inputs, usual = conv(**case)
    _, (row,) = rewritten(conv_model(inputs, usual | attributes))
    assert row.into is None and message in row.reason


def test_packed_causal_conv_left_alone():
    inputs, usual = packed_conv()
    capture = dict(capture_count=np.ones(3, np.int32))
    _, (row,) = rewritten(conv_model(inputs | capture, usual | dict(state_update_capacity=2)))
    assert row.into is None and "captures transitions" in row.reason


# Whole models


class TorchAttention(torch.nn.Module):
    """Two layers of SDPA, grouped heads, causal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (torch.nn.ModuleList(torch.nn.Linear(32, h * 16) for _ in range(2)) for h in (6, 2, 2))
        self.o = torch.nn.ModuleList(torch.nn.Linear(96, 32) for _ in range(2))

    def forward(self, x, context):
        def heads(t, source=None):
            return t.unflatten(-1, (-1, 16)).transpose(1, 2)

        for q, k, v, o in zip(self.q, self.k, self.v, self.o, strict=True):
            y = torch.nn.functional.scaled_dot_product_attention(
                heads(q(x)), heads(k(x)), heads(v(x)), is_causal=True, enable_gqa=True
            )
            x = x + o(y.transpose(1, 2).flatten(2))
        y = torch.nn.functional.scaled_dot_product_attention(heads(q(x)), heads(k(context)), heads(v(context)), enable_gqa=True)
        return o(y.transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory):
    """(path, feed, outputs of onnxruntime): weights in an external file, lengths dynamic."""
    path = tmp_path_factory.mktemp("torch") / "model.onnx"
    n, s = (torch.export.Dim(name, min=2) for name in ("n", "s"))
    program = torch.onnx.export(
        TorchAttention().eval(),
        (torch.randn(2, 5, 32), torch.randn(2, 7, 32)),
        dynamo=True,
        opset_version=23,
        dynamic_shapes=({1: n}, {1: s}),
        verbose=False,
    )
    ir.save(program.model, path, external_data="weights.bin")
    feed = dict(zip([v.name for v in program.model.graph.inputs], (normal(2, 9, 32), normal(2, 3, 32)), strict=True))
    return path, feed, onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)


def test_file_of_the_torch_exporter(torch_file, tmp_path, capsys):
    """The causal layers are rewritten; cross attention over unknown lengths stays and says so. Through the command line."""
    path, feed, expected = torch_file
    for target in (path.with_name("beside.onnx"), tmp_path / "elsewhere.onnx"):
        assert cli.main(["rewrite", str(path), "-o", str(target)]) == 0
        text = capsys.readouterr().out
        assert "2 of 3 nodes rewritten" in text and text.count("-> LeanAttention") == 2
        assert "n queries and s keys are not shown to be equally many" in text
        model = onnx.load(target, load_external_data=False)
        ours = [n for n in model.graph.node if n.domain == "leanfleet"]
        assert len(ours) == 2 and [n.op_type for n in model.graph.node].count("Attention") == 1
        names = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        assert names == ({"weights.bin"} if "beside" in target.name else {"elsewhere.onnx.data"})
        close(make_session(target, ["CPUExecutionProvider"]).run(None, feed), expected, "LeanAttention")
    bare = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    close(bare.run(None, feed), expected, "LeanAttention")


def test_weights_are_not_loaded(torch_file, tmp_path, monkeypatch):
    """A target beside the source is written without reading the file of weights."""
    path, _, _ = torch_file
    monkeypatch.setattr(ir.ExternalTensor, "_load", lambda self: pytest.fail(f"{self.name} was read"))
    rw.rewrite_file(path, path.with_name("again.onnx"))


def test_json(torch_file, capsys):
    path, _, _ = torch_file
    assert cli.main(["rewrite", str(path), "-o", str(path.with_name("j.onnx")), "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [n["into"] for n in nodes] == ["LeanAttention", "LeanAttention", None]
    assert nodes[2]["operator"] == "ai.onnx.Attention" and "n queries and s keys" in nodes[2]["reason"]


def test_back_to_the_file_of_the_torch_exporter(torch_file):
    path, feed, expected = torch_file
    there, back = path.with_name("there.onnx"), path.with_name("back.onnx")
    rw.rewrite_file(path, there)
    assert cli.main(["rewrite", str(there), "-o", str(back), "--to", "standard"]) == 0
    model = onnx.load(back, load_external_data=False)
    assert not model.functions and {n.domain for n in model.graph.node} == {""}
    assert "leanfleet" not in {o.domain for o in model.opset_import}
    close(onnxruntime.InferenceSession(back, providers=["CPUExecutionProvider"]).run(None, feed), expected, "LeanAttention")


@pytest.mark.slow
def test_file_of_the_transformers_exporter(tmp_path, capsys):
    """Its GroupQueryAttention nodes read the mask as a bias: they stay, each with the reason. The file, which onnx's checker
    refuses already (SimplifiedLayerNormalization is no operator of ai.onnx), computes what it did."""
    import transformers
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, vocab_size=211, intermediate_size=128
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 211, (2, 7))
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    inputs = dict(input_ids=ids[:, 5:6], attention_mask=torch.ones(2, 6, dtype=torch.int64), past_key_values=cache)
    exported = OnnxExporter().export(model, inputs, config=OnnxConfig(ort_fusions="cuda"))
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    ir.save(exported.program, source)
    capsys.readouterr()
    assert cli.main(["rewrite", str(source), "-o", str(target)]) == 0
    text = capsys.readouterr().out
    assert "0 of 2 nodes rewritten" in text
    assert text.count("com.microsoft.GroupQueryAttention  left alone  it has attention_bias: LeanAttention knows lengths") == 2
    feed = {"input_ids": ids[:, 5:6].numpy(), "attention_mask": np.ones((2, 6), np.int64)}
    caches = [i.name for i in onnx.load(source).graph.input if "past_key_values" in i.name]  # releases name them differently
    feed |= {name: normal(2, 2, 5, 16) for name in caches}
    assert len(caches) == 4
    for found, expected in zip(*(run(onnx.load(path), feed) for path in (source, target)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_multi_head_attention_layers_without_declared_shapes():
    """onnx infers nothing behind a com.microsoft node: what is found out about one layer serves the next."""
    weights = [normal(96, 96) / 10 for _ in range(6)]
    nodes, last = [], "x"
    for layer in range(2):
        nodes += [helper.make_node("MatMul", [last, f"w{3 * layer + i}"], [f"{name}{layer}"]) for i, name in enumerate("qkv")]
        nodes.append(
            helper.make_node(
                "MultiHeadAttention",
                [f"{n}{layer}" for n in "qkv"],
                [f"y{layer}"],
                domain="com.microsoft",
                num_heads=H,
                unidirectional=1,
            )
        )
        last = f"y{layer}"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [2, "n", 96])],
        [helper.make_tensor_value_info(last, FLOAT, [2, "n", 96])],
        [onnx.numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    feed = {"x": normal(2, 11, 96)}
    expected = run(model, feed)
    proto, rows = rewritten(model)
    assert [r.into for r in rows] == ["LeanAttention"] * 2
    for library in (True, False):
        close(run(proto, feed, library), expected, "LeanAttention")


def test_nodes_in_subgraphs_and_functions():
    inputs = qkv()
    attention = helper.make_node("Attention", ["Q", "K", "V"], ["inner"], is_causal=1)
    function = helper.make_function("custom", "Block", ["Q", "K", "V"], ["inner"], [attention], [helper.make_opsetid("", 23)])
    call = helper.make_node("Block", ["Q", "K", "V"], ["called"], domain="custom")
    branches = [
        helper.make_graph(
            [helper.make_node("Attention", ["Q", "K", "V"], ["b"], is_causal=1, scale=s)],
            "b",
            [],
            [helper.make_tensor_value_info("b", FLOAT, inputs["Q"].shape[:3] + (DV,))],
        )
        for s in (0.1, 0.2)
    ]
    nodes = [
        call,
        helper.make_node("If", ["c"], ["chosen"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Add", ["called", "chosen"], ["Y"]),
    ]
    declared = [helper.make_tensor_value_info(n, FLOAT, a.shape) for n, a in inputs.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        declared + [helper.make_tensor_value_info("c", BOOL, [])],
        [helper.make_tensor_value_info("Y", FLOAT, [None] * 4)],
    )
    model = helper.make_model(
        graph,
        functions=[function],
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("custom", 1)],
    )
    for chosen in (True, False):
        feed = inputs | {"c": np.array(chosen)}
        expected = run(model, feed)
        proto, rows = rewritten(model)
        assert [r.into for r in rows] == ["LeanAttention"] * 3
        for library in (True, False):
            close(run(proto, feed, library), expected, "LeanAttention")


def test_models_older_than_the_function_bodies():
    inputs, attributes = linear(n=9)
    model = model_of("LinearAttention", "com.microsoft", inputs, ["o", "s"], attributes, 17)
    _, (row,) = rewritten(model)
    assert row.into is None and "opset 17; function bodies need 18" in row.reason
    proto, (row,) = rewritten(model, bodies=False)
    close(run(proto, inputs, True), run(model, inputs), row.into)


def test_errors(tmp_path, capsys):
    assert cli.main(["rewrite", str(tmp_path / "no.onnx"), "-o", "x"]) == 2
    assert "no.onnx does not exist; give the path of an ONNX file" in capsys.readouterr().err
    (tmp_path / "bad.onnx").write_text("text")
    assert cli.main(["rewrite", str(tmp_path / "bad.onnx"), "-o", "x"]) == 2
    assert "bad.onnx is no ONNX file" in capsys.readouterr().err
    onnx.save(model_of("Attention", "", qkv(), ["Y"], {}), tmp_path / "m.onnx")
    assert cli.main(["rewrite", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), "--operator", "Gelu"]) == 2
    assert "operator Gelu is none that can be rewritten" in capsys.readouterr().err
    with pytest.raises(ValueError, match="to is 'x'; it is leanfleet or standard"):
        rw.rewrite(ir.load(tmp_path / "m.onnx"), "x")


# Back to standard operators


def is_back(model, feed, into, domain, keep=lambda outputs: outputs):
    expected = run(model, feed, True)
    proto, (row,) = rewritten(model, "standard")
    assert (row.into, row.reason) == (into, None)
    assert not proto.functions and "leanfleet" not in {o.domain for o in proto.opset_import}
    assert domain in {n.domain for n in proto.graph.node}
    close(keep(run(proto, feed)), keep(expected), "LeanAttention")
    return proto


@pytest.mark.parametrize("size", [16, 64])
def test_hybrids_back(size, tmp_path):
    """The recurrence by LinearAttention, and attention by GroupQueryAttention where that takes the rotary encoding, which is of
    a quarter of a head's columns."""
    torch.manual_seed(5)
    export_decoder(decoders.hybrid("qwen3.5", head_dim=size), tmp_path, verify=False)
    found, alone = (
        rw.rewrite_file(tmp_path / "model.onnx", tmp_path / "standard.onnx", "standard", operators=operators)
        for operators in (None, ["leanfleet.GatedDeltaRule"])
    )
    by_name = {row.operator: row for row in found}
    assert by_name["leanfleet.GatedDeltaRule"].into == "LinearAttention"
    attention = by_name["leanfleet.LeanAttention"]
    if size == 16:
        assert "rotary encoding of 4 of a head's columns; GroupQueryAttention takes multiples of 16" in attention.reason
    else:
        assert attention.into == "GroupQueryAttention"
    assert [row.into for row in alone] == ["LinearAttention"] * 2
    assert found.verification.runs == alone.verification.runs == ("a prompt", "a step")
    if size == 16:  # functions in the place of chosen operators alone
        model = ir.load(tmp_path / "model.onnx")
        rw.rewrite(model, "standard", operators=["leanfleet.DecayGates"], inline=True)
        kinds = {node.op_type for node in model.graph}
        assert "DecayGates" not in kinds and kinds >= {"LeanAttention", "CausalConv", "GatedDeltaRule"}


@pytest.mark.parametrize("name", ["bamba", "mamba2"])
def test_mamba_back(name, tmp_path):
    """States share the keys of one group, or of two, and each has a step size, beta, of its own."""
    torch.manual_seed(5)
    export_decoder(decoders.hybrid(name), tmp_path, verify=False)
    rows = rw.rewrite_file(
        tmp_path / "model.onnx", tmp_path / "standard.onnx", "standard", operators=["leanfleet.CausalLinearDecay"]
    )
    assert {row.into for row in rows} == {"LinearAttention"} and rows.verification.runs


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "n, s, attributes", [(7, 7, {}), (7, 7, dict(softcap=2.0, scale=0.4)), (3, 8, dict(causal=0)), (1, 8, {})]
)
def test_attention_back(n, s, attributes, layout):
    model, feed = lean_model(attributes | dict(layout=layout), 23, **bhnd(n, s, layout))
    is_back(model, feed, "Attention", "")


def test_attention_over_lengths_back():
    model, feed = lean_model({}, **bhnd(1, 9), seq_lens=np.array([4, 9], np.int32))
    is_back(model, feed, "Attention", "")


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("attributes", [{}, dict(window=3), dict(softcap=2.0, scale=0.4)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rotary", [{}, {"rotary": 8}, {"rotary": 8, "rotary_interleaved": 1}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_append_back(attributes, layout, sinks, rotary, packed):
    tensors = bhnd(1, 9, layout) | dict(value_cache=normal(B, HKV, 9, D), seq_lens=np.array([4, 8], np.int32))
    shape = (B, HKV, 1, D) if layout == "bhnd" else (B, 1, HKV, D)
    tensors |= dict(new_key=normal(*shape), new_value=normal(*shape), sinks=normal(H) if sinks else None)
    rotary = dict(rotary)
    if half := rotary.pop("rotary", 0):
        tensors |= dict(cos_cache=normal(9, half), sin_cache=normal(9, half))
    if packed:
        rows = [tensors.pop(name) for name in ("query", "new_key", "new_value")]
        tensors["query"] = np.concatenate(rows, 1 if layout == "bhnd" else 2)
        rotary["packed_qkv"] = 1
    model, feed = lean_model(
        attributes | rotary | dict(append=1, layout=layout), outputs=("output", "key_cache_out", "value_cache_out"), **tensors
    )

    def keep(outputs):
        return [outputs[0], *(t[b, :, :n] for t in outputs[1:] for b, n in enumerate((4, 8)))]

    is_back(model, feed, "GroupQueryAttention", "com.microsoft", keep)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "batch, n, past, new",
    [(2, 5, [0, 0], [5, 3]), (2, 5, [0, 0], [5, 0]), (1, 4, [6], [4]), (1, 4, [6], [2]), (3, 1, [4, 0, 7], [1, 1, 0])],
    ids=str,
)
@pytest.mark.parametrize("attributes", [{}, dict(window=3, softcap=2.0, scale=0.4)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_several_tokens_with_padding_back(batch, n, past, new, attributes, layout, packed):
    """As exported decoders append: prompts padded to one length, chunks of one request, steps of ragged requests."""
    lens, rows = np.array(past, np.int32) + np.array(new, np.int32), {}
    for name, h in (("query", H), ("new_key", HKV), ("new_value", HKV)):
        rows[name] = normal(batch, h, n, D) if layout == "bhnd" else normal(batch, n, h, D)
    if packed:
        rows = {"query": np.concatenate(list(rows.values()), 1 if layout == "bhnd" else 2)}
    tensors = rows | dict(
        key_cache=normal(batch, HKV, 12, D),
        value_cache=normal(batch, HKV, 12, D),
        seq_lens=lens,
        query_lens=np.array(new, np.int32),
        cos_cache=normal(12, 8),
        sin_cache=normal(12, 8),
    )
    model, feed = lean_model(
        attributes | dict(append=1, layout=layout, packed_qkv=int(packed)),
        outputs=("output", "key_cache_out", "value_cache_out"),
        **tensors,
    )

    def keep(outputs):
        return [outputs[0], *(np.concatenate([t[b, :, :length] for b, length in enumerate(lens)], 1) for t in outputs[1:])]

    is_back(model, feed, "GroupQueryAttention", "com.microsoft", keep)


def test_several_tokens_behind_pasts_are_an_error_on_the_way_back():
    """The one form that GroupQueryAttention lacks: it must not compute anything else for it."""
    shape, lens = (2, HKV, 3, D), np.array([5, 3], np.int32)
    model, feed = lean_model(
        dict(append=1),
        outputs=("output",),
        query=normal(2, H, 3, D),
        new_key=normal(*shape),
        new_value=normal(*shape),
        key_cache=normal(2, HKV, 9, D),
        value_cache=normal(2, HKV, 9, D),
        seq_lens=lens,
        query_lens=np.array([3, 1], np.int32),
    )
    proto, (row,) = rewritten(model, "standard")
    assert "several tokens a request behind a past are an error in batches of more than one request" in row.notes
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1"):
        run(proto, feed)


@pytest.mark.parametrize(
    "case",
    [c for n, c in GQA if c.get("past", 0) is not None and "causal" not in c and not c.get("smooth_softmax")],
    ids=[n for n, c in GQA if c.get("past", 0) is not None and "causal" not in c and not c.get("smooth_softmax")],
)
def test_group_query_attention_there_and_back(case, tmp_path):
    inputs, attributes = group_query(**case)
    model = model_of("GroupQueryAttention", "com.microsoft", inputs, ["output", "present_key", "present_value"], attributes, 21)
    feed, lens = feed_of(inputs), case["lens"]
    there, _ = rewritten(model)
    back, (row,) = rewritten(there, "standard")
    assert row.into == "GroupQueryAttention" and not back.functions

    def keep(outputs):
        rows = [outputs[0][b, : min(case["n"], length)] for b, length in enumerate(lens)]
        return [
            np.concatenate(rows),
            *(np.concatenate([t[b, :, :length] for b, length in enumerate(lens)], 1) for t in outputs[1:]),
        ]

    close(keep(run(back, feed)), keep(run(model, feed)), "LeanAttention")


@pytest.fixture(scope="module")
def decoder_file(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    from leanfleet.export import export_decoder

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("decoder")
    export_decoder(
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=97,
                intermediate_size=96,
                max_position_embeddings=64,
            )
        ),
        folder,
    )
    return folder / "model.onnx"


def test_decoder_there_and_back(decoder_file, capsys):
    """An exported decoder without leanfleet, with it again, and without it again: a ragged prompt, then ragged steps."""
    files = [decoder_file.with_name(f"{i}.onnx") for i in range(3)]
    for source, target, to in zip([decoder_file, *files], files, ["standard", "leanfleet", "standard"], strict=False):
        assert cli.main(["rewrite", str(source), "-o", str(target), "--to", to]) == 0
        text = capsys.readouterr().out
        both = "4 of 4" if source == decoder_file else "2 of 2"  # attentions, and at first the gates too
        assert f"{both} nodes rewritten" in text and "verified on the CPU with a prompt and a step: largest difference" in text
    nodes = onnx.load(files[2]).graph.node
    assert "leanfleet" not in {n.domain for n in nodes} and [n.op_type for n in nodes].count("GroupQueryAttention") == 2
    sessions = [
        make_session(decoder_file, ["CPUExecutionProvider"]),
        onnxruntime.InferenceSession(files[0]),
        make_session(files[1], ["CPUExecutionProvider"]),
        onnxruntime.InferenceSession(files[2]),
    ]
    names = [i.name for i in sessions[0].get_inputs()][3:]
    results = []
    for session in sessions:
        random = np.random.default_rng(5)
        caches, lens, logits = {n: np.zeros((2, 2, 16, 16), np.float32) for n in names}, np.zeros(2, np.int32), []
        for new in ([4, 2], [1, 1], [0, 1], [1, 1]):
            new = np.array(new, np.int32)
            lens += new
            feed = {"input_ids": random.integers(0, 97, (2, new.max())), "seq_lens": lens, "query_lens": new}
            first, *rest = session.run(None, feed | caches)
            caches = dict(zip(names, rest, strict=True))
            logits.append(first[new > 0])
        results.append(logits)
    for found in results[1:]:
        close(found, results[0], "LeanAttention")


# Files


@pytest.mark.parametrize("op_type", ["Attention", "LinearAttention"])
def test_there_and_back_and_there_again(op_type, tmp_path):
    """Each way leaves names behind, which those of the next way must not be. Two nodes of one name share none either."""
    if op_type == "Attention":
        inputs, attributes, domain = qkv(packed=True), dict(is_causal=1, q_num_heads=H, kv_num_heads=HKV), ""
        outputs = ["Y"]
    else:
        (inputs, attributes), domain, outputs = linear(n=9), "com.microsoft", ["output", "present_state"]
    model = model_of(op_type, domain, inputs, outputs, attributes)
    onnx.save(model, tmp_path / "0.onnx")
    for i, to in enumerate(["leanfleet", "standard", "leanfleet", "standard"]):
        rows = rw.rewrite_file(tmp_path / f"{i}.onnx", tmp_path / f"{i + 1}.onnx", to)
        assert [row.into is not None for row in rows] == [True] and rows.verification.runs
        onnx.checker.check_model(tmp_path / f"{i + 1}.onnx")
    close(run(onnx.load(tmp_path / "4.onnx"), feed_of(inputs)), run(model, feed_of(inputs)), "LeanAttention")


def test_nodes_of_one_name():
    inputs = qkv(packed=True)
    model = model_of("Attention", "", inputs, ["Y"], dict(is_causal=1, q_num_heads=H, kv_num_heads=HKV))
    second = model.graph.node.add()
    second.CopyFrom(model.graph.node[0])
    second.output[0] = "Z"
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("Z", FLOAT, [None] * 3))
    proto, rows = rewritten(model)  # the checker asks for single assignment
    assert [r.into for r in rows] == ["LeanAttention"] * 2


def snapshot(folder):
    return {p.name: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("fault", ["other numbers", "a name twice", "no kernel"])
@pytest.mark.parametrize("target", ["out.onnx", "deeper/still/out.onnx"])
def test_a_wrong_result_leaves_everything_as_it_was(fault, target, tmp_path, monkeypatch, capsys):
    right = rw._TO_LEANFLEET["ai.onnx.Attention"]

    def wrong(ops, node, options):
        into, (out, *rest) = right(ops, node, options)
        if fault == "other numbers":
            out = ops.Mul(out, 1.001)
        elif fault == "a name twice":
            out = ops.Identity(ops.Identity(out))
            ops.nodes[-2].outputs[0].name = ops.nodes[-3].outputs[0].name
        else:
            (out,) = ops.foreign("com.microsoft", "NoSuchOperator", [out], {})
        return into, [out, *rest]

    monkeypatch.setitem(rw._TO_LEANFLEET, "ai.onnx.Attention", wrong)
    onnx.save(model_of("Attention", "", qkv(), ["Y"], dict(is_causal=1)), tmp_path / "m.onnx")
    (tmp_path / "out.onnx").write_text("what was there")
    before = snapshot(tmp_path)
    code = cli.main(["rewrite", str(tmp_path / "m.onnx"), "-o", str(tmp_path / target)])
    error = capsys.readouterr().err
    assert code == {"other numbers": 1, "a name twice": 2, "no kernel": 1}[fault]
    assert {
        "other numbers": "output Y differs from the original's by",
        "a name twice": "is not written, because it would be no valid",
        "no kernel": "the result fails where the original runs",
    }[fault] in error
    assert error.count("\n") == 1 and snapshot(tmp_path) == before
    if fault != "a name twice":
        assert cli.main(["rewrite", str(tmp_path / "m.onnx"), "-o", str(tmp_path / target), "--no-verify"]) == 0
        assert "not verified: it was not asked for" in capsys.readouterr().out and (tmp_path / target).stat().st_size > 100


def test_verified_with_given_inputs(tmp_path, capsys):
    inputs = qkv()
    onnx.save(model_of("Attention", "", inputs, ["Y"], dict(is_causal=1)), tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", **inputs)
    command = ["rewrite", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), "--json"]
    assert cli.main([*command, "--inputs", str(tmp_path / "in.npz")]) == 0
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["runs"] == ["the given inputs"] and 0 <= found["error"] <= found["bound"] < 1e-3 and found["reason"] is None
    np.savez(tmp_path / "in.npz", Q=inputs["Q"])
    before = snapshot(tmp_path)
    assert cli.main([*command, "--inputs", str(tmp_path / "in.npz")]) == 2
    assert "the original does not run with the given inputs" in capsys.readouterr().err and snapshot(tmp_path) == before
    assert cli.main([*command, "--inputs", str(tmp_path / "in.npz"), "--no-verify"]) == 2


def test_large_models_are_not_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(rw.rewrite_check, "LARGEST", 100)
    onnx.save(model_of("Attention", "", qkv(), ["Y"], dict(is_causal=1)), tmp_path / "m.onnx")
    rows = rw.rewrite_file(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert "GiB of weights, more than" in rows.verification.reason


def test_an_empty_file_and_inline_without_standard(tmp_path, capsys):
    (tmp_path / "empty.onnx").touch()
    onnx.save(model_of("Attention", "", qkv(), ["Y"], dict(is_causal=1)), tmp_path / "m.onnx")
    before = snapshot(tmp_path)
    for arguments, message in (
        (["empty.onnx"], "empty.onnx is no valid ONNX model: it holds no graph"),
        (["m.onnx", "--inline"], "it goes with --to standard"),
    ):
        assert cli.main(["rewrite", str(tmp_path / arguments[0]), "-o", str(tmp_path / "o.onnx"), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and snapshot(tmp_path) == before
    with pytest.raises(ValueError, match="inline .* goes with to = standard"):
        rw.rewrite(ir.load(tmp_path / "m.onnx"), inline=True)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("decay", [None, "head", "token", "key"])
@pytest.mark.parametrize("state, v_first", [(False, 0), (True, 0), (True, 1)])
def test_linear_attention_back(layout, decay, state, v_first):
    attributes = dict(layout=layout, scale=0.3, return_state=int(state), state_v_first=v_first)
    model, feed = decay_model(attributes, decay=decay, state=state, outputs=("output", "final_state") if state else ("output",))
    proto = is_back(model, feed, "LinearAttention", "com.microsoft")
    again, (row,) = rewritten(proto)
    assert row.into == "CausalLinearDecay"
    close(run(again, feed, True), run(model, feed, True), "CausalLinearDecay")


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_linear_attention_with_beta_back(layout):
    beta = np.abs(normal(B, HKV, 9) if layout == "bhnd" else normal(B, 9, HKV))
    model, feed = decay_model(dict(layout=layout, return_state=1), beta=beta)
    is_back(model, feed, "LinearAttention", "com.microsoft")


@pytest.mark.parametrize("kind", ("silu", "gelu", "gelu_tanh", "relu", "sigmoid"))
@pytest.mark.parametrize("form", ("halves", "apart", "skip", "columns"))
def test_gated_activation_back(kind, form):
    attributes = {"activation": kind} | ({"columns": 1, "first_column": 5} if form == "columns" else {})
    inputs = {"gate_up": normal(2, 3, 2, 8)} if form == "halves" else {"gate_up": normal(2, 3, 8), "up": normal(2, 3, 8)}
    if form == "skip":
        inputs |= {"skip": normal(2, 3, 8), "skip_scale": normal(4)}
    if form == "columns":
        inputs["gate_up"] = normal(2, 3, 20)
    is_back(*single("GatedActivation", inputs, attributes), "Mul", "")


@pytest.mark.parametrize("kind", (None, "silu", "gelu_tanh", "relu"))
@pytest.mark.parametrize("bias", (False, True))
def test_linear_back(kind, bias):
    columns = (5,) if kind is None else (2, 5)
    inputs = {"input": normal(2, 3, 8), "weight": normal(8, *columns)} | ({"bias": normal(*columns)} if bias else {})
    attributes = {} if kind is None else {"gated": 1, "activation": kind}
    is_back(*single("Linear", inputs, attributes), "MatMul" if kind is None else "Mul", "")


@pytest.mark.parametrize("state", (False, True))
def test_causal_conv_of_columns_and_three_parts_back(state):
    inputs = {"input": normal(2, 9, 20), "weight": normal(4, 12), "bias": normal(12)}
    attributes = dict(
        activation="silu", split=1, first=4, second=2, third=6, return_state=int(state), columns=1, first_column=3
    )
    if state:
        inputs["initial_state"] = normal(2, 3, 12)
    is_back(*single("CausalConv", inputs, attributes), "CausalConvWithState", "com.microsoft")


@pytest.mark.parametrize("heads", ((2, 2, 6), (1, 1, 4)))
def test_linear_attention_of_shared_heads_and_back(heads):
    inputs, attributes = linear(n=9, heads=heads)
    model = model_of("LinearAttention", "com.microsoft", inputs, ["output", "present_state"], attributes, 21)
    ours, (row,) = rewritten(model)
    assert row.into == "CausalLinearDecay" and "Expand" not in [node.op_type for node in ours.graph.node]
    back, (row,) = rewritten(ours, to="standard")
    assert row.into == "LinearAttention"
    close(run(back, feed_of(inputs)), run(model, feed_of(inputs)), "CausalLinearDecay")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: lean_model({}, **bhnd(3, 9)), "3 queries and 9 keys"),
        (lambda: lean_model({}, 22, **bhnd(7, 7)), "opset 22; ai.onnx Attention with these inputs needs 23"),
        (lambda: lean_model(dict(window=3), **bhnd(7, 7)), "opset 24; ai.onnx Attention with these inputs needs 25"),
        (lambda: lean_model({}, outputs=("output", "lse"), **bhnd(7, 7)), "lse is read"),
        (lambda: lean_model({}, **bhnd(7, 9), seq_lens=np.array([8, 9], np.int32)), "seq_lens with 7 queries"),
        (lambda: lean_model({}, **bhnd(1, 9), query_lens=np.array([1, 0], np.int32)), "query_lens"),
        (lambda: lean_model({}, **bhnd(7, 7), sinks=normal(H)), "no sinks"),
        (lambda: lean_model({}, **bhnd(7, 7), cos_cache=normal(9, 4), sin_cache=normal(9, 4)), "no rotary encoding"),
        (
            lambda: lean_model(
                dict(append=1, causal=0), **bhnd(2, 9), new_key=normal(B, HKV, 2, D), new_value=normal(B, HKV, 2, DV)
            ),
            "append with 2 queries that are not causal",
        ),
        (
            lambda: lean_model(dict(append=1), **bhnd(2, 9), new_key=normal(B, HKV, 2, D), new_value=normal(B, HKV, 2, DV)),
            "of one known size",
        ),
        (lambda: decay_model(dict(normalize=1), state=False, outputs=("output",)), "normalize = 1"),
        (lambda: decay_model(dict(scale=0.0), outputs=("output",)), "scale is 0"),
        (lambda: decay_model({}, dtype=np.float16, outputs=("output",)), "rounded to the type of query"),
        (lambda: decay_model({}, outputs=("output",), state_index=np.array([1, 0], np.int32)), "pool of states"),
        (
            lambda: single(
                "GatedActivation",
                {name: normal(2, 3, 8).astype(np.float16) for name in ("gate_up", "up", "skip")} | {"skip_scale": normal(2)},
                {},
            ),
            "skip_scale is float32",
        ),
    ],
)
def test_left_alone_on_the_way_back(make, message):
    model, feed = make()
    found = ir.from_proto(model)
    (row,) = rw.rewrite(found, "standard")
    assert row.into is None and message in row.reason
    assert [n.domain for n in found.graph] == ["leanfleet"] and len(found.functions) == 1


def test_inline_puts_bodies_in_the_place_of_what_is_left():
    model, feed = lean_model({}, **bhnd(3, 9))
    proto, (row,) = rewritten(model, "standard", inline=True)
    assert row.into is None and not proto.functions and {n.domain for n in proto.graph.node} == {""}
    close(run(proto, feed), run(model, feed, True), "LeanAttention")


def test_nothing_to_do(tmp_path, capsys):
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [1])],
        [helper.make_tensor_value_info("y", FLOAT, [1])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    assert cli.main(["rewrite", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx")]) == 0
    assert "no node that could be rewritten" in capsys.readouterr().out
