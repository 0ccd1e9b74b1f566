"""Rewrites ONNX files: attention nodes of ai.onnx and com.microsoft into leanfleet nodes, and back.

A node is rewritten where the meaning is exactly the same, whatever the inputs hold, and otherwise left as it is with a
reason. Needs onnx and onnx-ir alone. What corresponds to what:

    ai.onnx Attention (23, 24, 25)        LeanAttention; a past is joined to the new tokens before it
    com.microsoft GroupQueryAttention     LeanAttention with append and rotary encoding; that becomes nodes of its own where
                                          there is no past
    com.microsoft PagedAttention          LeanAttention of packed new tokens over pages, with append
    com.microsoft MultiHeadAttention      LeanAttention, as for Attention
    ai.onnx LinearAttention (27),
    com.microsoft LinearAttention         CausalLinearDecay for the update rules "linear" and "gated", GatedDeltaRule for
                                          "delta" and "gated_delta"
    com.microsoft GatedDeltaNet           GatedDeltaRule

Symbols are those of ops.toml: B batch, H query heads, Hkv key/value heads, N or Nq new tokens, S keys, D, R and Dv
head sizes.
"""

import logging
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, ShapeInferencePass

from leanfleet import files, progress, spec
from leanfleet.export import function_bodies, rewrite_check, rewrite_conv, rewrite_linear
from leanfleet.export import rewrite_nodes as nodes
from leanfleet.tables import print_table


@dataclass
class Row:
    """What became of one node. `into`: the operator that took its place, None where `reason` says why it stayed.
    `notes`: what the new node does not take that the old one did."""

    node: str
    operator: str
    into: str | None = None
    reason: str | None = None
    notes: list = field(default_factory=list)


# ai.onnx Attention


_ATTENTION = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def _attention(ops, node, options):
    a, x = nodes.attributes(node), nodes.inputs(node, _ATTENTION)
    nodes.check_types(x, "Q", "K", "V", "past_key", "past_value")
    nodes.check_ranks(x, 4, [], "past_key", "past_value")
    nodes.refuse_inputs(x, {"attn_mask": "LeanAttention knows lengths and windows, no masks or biases"})
    if nodes.is_read(node, 3):
        raise nodes.Refused("qk_matmul_output is read, which LeanAttention never forms")
    if a.get("softmax_precision") == ir.DataType.DOUBLE:
        raise nodes.Refused("softmax_precision is double; LeanAttention computes in float32")
    if (x["past_key"] is None) != (x["past_value"] is None):
        raise nodes.Refused("past_key and past_value go together")
    if x["past_key"] is None and (nodes.is_read(node, 1) or nodes.is_read(node, 2)):
        raise nodes.Refused("present_key or present_value is read without past_key and past_value")
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    causal = bool(a.get("is_causal", 0)) or right == 0
    if right > 0 and not causal:
        raise nodes.Refused(f"right_window_size is {right}: LeanAttention sees all later keys or none")
    if left >= 0 and not causal:
        raise nodes.Refused("left_window_size without is_causal or right_window_size = 0: LeanAttention's window is causal")
    packed = nodes.rank(x["Q"], "Q", 3, 4) == 3
    nodes.check_ranks(x, 3 if packed else 4, ["K", "V"])
    if packed:
        heads, kv_heads = a.get("q_num_heads"), a.get("kv_num_heads")
        if not heads or not kv_heads:
            raise nodes.Refused("inputs of rank 3 need q_num_heads and kv_num_heads")
        nodes.heads(a, "q_num_heads", "kv_num_heads")
    tokens, keys = (nodes.dim(x[name], 1 if packed else 2) for name in "QK")
    lens = None
    if x["nonpad_kv_seqlen"] is not None:
        if tokens != 1:
            raise nodes.Refused(
                f"nonpad_kv_seqlen with {nodes.show(tokens)} queries: a request with fewer keys than queries "
                "means another thing in LeanAttention; only a single query is the same"
            )
        lens = ops.int32(x["nonpad_kv_seqlen"])
    else:
        nodes.check_lengths(tokens, keys, causal)
    query, key, value = x["Q"], x["K"], x["V"]
    if packed:
        query = ops.split_heads(query, heads)
        key, value = ops.to_cache(key, kv_heads), ops.to_cache(value, kv_heads)
    present = []
    if x["past_key"] is not None:
        present = key, value = ops.Concat(x["past_key"], key, axis=2), ops.Concat(x["past_value"], value, axis=2)
    out = ops.ours(
        "LeanAttention",
        dict(
            scale=nodes.scale(a),
            softcap=nodes.softcap(a),
            causal=causal,
            window=left + 1 if left >= 0 else -1,
            layout="bnhd" if packed else "bhnd",
        ),
        query=query,
        key_cache=key,
        value_cache=value,
        seq_lens=lens,
    )["output"]
    if packed:
        value_width = nodes.dim(x["V"], 2)
        joined = value_width // kv_heads * heads if isinstance(value_width, int) else None
        out = nodes.known(ops.join_heads(out, joined), x["Q"], [*nodes.dims(x["Q"])[:2], joined])
    return "LeanAttention", [out, *present]


# com.microsoft GroupQueryAttention and MultiHeadAttention


_GROUP_QUERY = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
)


def _group_query_attention(ops, node, options):
    """Lengths: seqlens_k + 1 keys a request with the new tokens in; as many of them new as the query has rows, but no
    more than there are: in a prompt the rows behind a request's tokens are padding."""
    a, x = nodes.attributes(node), nodes.inputs(node, _GROUP_QUERY)
    heads, kv_heads = nodes.heads(a, "num_heads", "kv_num_heads")
    scales = _cache_scales(ops, a, x, "past_key", "past_value", int4="kv_cache_bit_width = 4")
    nodes.check_types(x, "query", "key", "value", *([] if scales else ["past_key", "past_value"]))
    nodes.check_ranks(x, 3, ["query"], "key", "value")
    nodes.check_ranks(x, 4, [], "past_key", "past_value")
    nodes.check_ranks(x, 2, [], "cos_cache", "sin_cache")
    nodes.refuse_inputs(
        x,
        {
            "attention_bias": "LeanAttention knows lengths and windows, no masks or biases",
            "q_norm_weight": "LeanAttention has no normalisation of queries",
            "k_norm_weight": "LeanAttention has none of keys",
        },
    )
    if nodes.is_read(node, 3) or a.get("qk_output", 0):
        raise nodes.Refused("output_qk is asked for, which LeanAttention never forms")
    if a.get("sliding_window_cache", 0):
        raise nodes.Refused("sliding_window_cache = 1: LeanAttention's caches keep every position")
    if (x["past_key"] is None) != (x["past_value"] is None):
        raise nodes.Refused("past_key and past_value go together")
    for name in ("seqlens_k", "total_sequence_length"):
        if x[name] is None:
            raise nodes.Refused(f"its input {name} is missing")
    causal, window = bool(a.get("causal", 1)), a.get("local_window_size", -1)
    if window != -1 and (window < 1 or not causal):
        raise nodes.Refused(f"local_window_size is {window}; LeanAttention takes -1 (off), or 1 or more where causal")
    query, key, value = x["query"], x["key"], x["value"]
    if (key is None) != (value is None):
        raise nodes.Refused("key and value go together, or are both packed into query")
    query_dims = nodes.dims(query) or [None] * 3
    width, packed = query_dims[2], key is None
    if packed:
        width = width // (heads + 2 * kv_heads) * heads if isinstance(width, int) else None
        query = ops.split_heads(query, heads + 2 * kv_heads)
        if x["past_key"] is None:
            query, key, value = ops.Split(query, [heads, kv_heads, kv_heads], axis=2, outputs=3)
    else:
        tokens, keys = query_dims[1], nodes.dim(key, 1)
        if None not in (tokens, keys) and tokens != keys:
            raise nodes.Refused(f"query has {tokens} tokens, key {keys}: LeanAttention appends as many as it attends from")
        query = ops.split_heads(query, heads)
        key, value = ops.split_heads(key, kv_heads), ops.split_heads(value, kv_heads)
    lens = ops.Add(x["seqlens_k"], ops.int32(1))
    counts = ops.Min(lens, ops.int32(ops.size(query, 1)))
    tables, rotary = {}, bool(a.get("do_rotary", 0))
    if rotary:
        _check_rotary(x)
    if rotary and x["past_key"] is not None:
        tables = {
            name: x[name] if x[name].dtype == ir.DataType.FLOAT else ops.float(x[name]) for name in ("cos_cache", "sin_cache")
        }
    elif rotary:
        positions = _positions(ops, query, lens, counts)
        query, key = (_rotated(ops, x, a, t, positions, n) for t, n in ((query, heads), (key, kv_heads)))
    sinks = None
    if x["head_sink"] is not None:
        sinks = ops.float(x["head_sink"])
    elif a.get("smooth_softmax", 0) == 1:
        sinks = ops.Expand(0.0, [heads])
    scale = a.get("scale", 0.0)  # 0 is 1/sqrt(D) in both
    attributes = dict(scale=scale, softcap=nodes.softcap(a), causal=causal, window=window, layout="bnhd")
    if x["past_key"] is None:
        caches = [ops.Transpose(t, perm=[0, 2, 1, 3]) for t in (key, value)]
        out = ops.ours(
            "LeanAttention",
            attributes,
            query=query,
            key_cache=caches[0],
            value_cache=caches[1],
            seq_lens=lens,
            query_lens=counts,
            sinks=sinks,
        )["output"]
    else:
        caches = [x["past_key"], x["past_value"]]
        if not (options["fixed_caches"] or _fixed_capacity(node, x["past_key"])):
            if x["past_key"].dtype == ir.DataType.FLOAT8E4M3FN:
                raise nodes.Refused("caches of float8e4m3fn grow here, which ONNX Runtime has no operators for")
            caches = [_grown(ops, cache, x["total_sequence_length"]) for cache in caches]
        attributes |= {
            "append": True,
            "rotary_interleaved": rotary and bool(a.get("rotary_interleaved", 0)),
            "packed_qkv": packed,
        }
        outputs = ops.ours(
            "LeanAttention",
            attributes,
            query=query,
            key_cache=caches[0],
            value_cache=caches[1],
            seq_lens=lens,
            query_lens=counts,
            new_key=key,
            new_value=value,
            sinks=sinks,
            **tables,
            **scales,
        )
        out, caches = outputs["output"], [outputs["key_cache_out"], outputs["value_cache_out"]]
    ops.notes.append("rows of the output behind a request's tokens are 0")
    return "LeanAttention", [nodes.known(ops.join_heads(out, width), x["query"], [*query_dims[:2], width]), *caches]


def _columns(cache):
    """Numbers of a row of a cache [...,D], of which an element of uint8 has two; None where they are not known."""
    size = nodes.dim(cache, 3)
    return size * spec.numbers_each(cache.dtype.name.lower()) if isinstance(size, int) and cache.dtype else size


def _stored(a, letter, cache):
    """The logical type of a quantised cache's numbers, which the operators of com.microsoft name, or leave to the type."""
    found = a.get(f"{letter}_cache_dtype", "") or ("int4" if a.get("kv_cache_bit_width", 0) == 4 else "")
    return found or (cache.dtype.name.lower() if cache.dtype else "an unknown type")


def _cache_scales(ops, a, x, key_cache, value_cache, int4=""):
    """LeanAttention's scales of quantised caches, {} for caches of the query's type. The operators of com.microsoft say how a
    cache is quantised by attributes, ours by the scale's shape. int4: what says that uint8 holds two, low half first, with 8
    added."""
    scales = {}
    for letter, cache, name in (("k", key_cache, "key_scale"), ("v", value_cache, "value_scale")):
        kind, scale = a.get(f"{letter}_quant_type", "NONE"), x[f"{letter}_scale"]
        if kind == "NONE":
            nodes.refuse_inputs(x, {f"{letter}_scale": f"it goes with {letter}_quant_type"})
            continue
        if kind not in ("PER_TENSOR", "PER_CHANNEL"):
            raise nodes.Refused(f"{letter}_quant_type is {kind}; expected NONE, PER_TENSOR or PER_CHANNEL")
        if scale is None or x[cache] is None:
            raise nodes.Refused(f"{letter}_quant_type is {kind} without {cache if scale is not None else f'{letter}_scale'}")
        stored = _stored(a, letter, x[cache])
        held = {"int8": "int8", "float8e4m3fn": "float8e4m3fn", "int4": "uint8" if int4 else None}.get(stored)
        if x[cache].dtype is None or x[cache].dtype.name.lower() != held:
            raise nodes.Refused(
                f"{cache} holds {stored}; of quantised caches LeanAttention takes int8, float8e4m3fn and, as "
                "GroupQueryAttention stores it, int4"
            )
        channels = [a["kv_num_heads"], 1, _columns(x[cache])]
        shape = [1] if kind == "PER_TENSOR" else channels
        if not all(isinstance(n, int) for n in shape):
            raise nodes.Refused(f"{letter}_scale has one for each channel, and {cache} an unknown number of columns")
        scales[name] = scale if nodes.dims(scale) == shape else ops.Reshape(scale, shape)
        scales[name].shape = ir.Shape(shape)
    return scales


def _quantisation(ops, a, x):
    """({"k_quant_type": ..}, [k_scale, v_scale]) of LeanAttention's caches for the operators of com.microsoft."""
    attributes, scales = {}, []
    for letter, name in (("k", "key"), ("v", "value")):
        scale = x[f"{name}_scale"]
        if scale is not None and a[f"{name}_per_token"]:
            raise nodes.Refused(f"{name}_scale has one for each token, which no standard operator has")
        if x["key_cache"].dtype != x["value_cache"].dtype:
            raise nodes.Refused("caches of keys and of values have different types, which no standard operator takes")
        if scale is not None:
            attributes[f"{letter}_quant_type"] = (
                "PER_CHANNEL" if nodes.rank(scale, f"{name}_scale", 1, 3) == 3 else "PER_TENSOR"
            )
        scales.append(scale)
    return attributes, scales


def _fixed_capacity(node, past):
    """Whether the model declares that present is no longer than past."""
    present = node.outputs[1] if len(node.outputs) > 1 else None
    return nodes.dim(past, 2) is not None and nodes.dim(past, 2) == nodes.dim(present, 2)


def _grown(ops, past, total):
    """past [B,Hkv,P,D] with zeros behind it, up to `total` positions."""
    missing = ops.Max(ops.Sub(ops.Reshape(ops.int64(total), [1]), ops.size(past, 2)), 0)
    zeros = ops.zeros(ops.Shape(past, end=2), missing, ops.size(past, 3))
    grown = ops.Concat(past, ops.CastLike(zeros, past), axis=2)
    grown.dtype = past.dtype
    return grown


def _check_rotary(x):
    if x["cos_cache"] is None or x["sin_cache"] is None:
        raise nodes.Refused("do_rotary = 1 without cos_cache and sin_cache")
    if x["position_ids"] is not None:
        raise nodes.Refused(
            "position_ids is given: GroupQueryAttention reads it in another way for prompts than for later "
            "tokens; leave it out where positions follow from seqlens_k"
        )


def _positions(ops, query, lens, counts):
    """int64 [B,N]: the position of each row of query [B,N,H,D]."""
    first = ops.Unsqueeze(ops.int64(ops.Sub(lens, counts)), [1])
    return ops.Add(first, ops.range(ops.size(query, 1)))


def _rotated(ops, x, a, t, positions, heads):
    """com.microsoft RotaryEmbedding of [B,N,heads,D], on the leading part of D that cos_cache covers."""
    width, half = nodes.dim(x["past_key"], 3) or _head_size(x, a), nodes.dim(x["cos_cache"], 1)
    if not isinstance(half, int) or not isinstance(width, int):
        raise nodes.Refused("do_rotary = 1, and the sizes of cos_cache and of a head are not both known")
    attributes = {"interleaved": int(a.get("rotary_interleaved", 0)), "num_heads": heads}
    if 2 * half != width:
        attributes["rotary_embedding_dim"] = 2 * half
    flat = ops.Reshape(t, [0, 0, heads * width])
    (rotated,) = ops.foreign(nodes.MICROSOFT, "RotaryEmbedding", [flat, positions, x["cos_cache"], x["sin_cache"]], attributes)
    return ops.Reshape(rotated, [0, 0, heads, width])


def _head_size(x, a):
    width = nodes.dim(x["query"], 2)
    heads = a["num_heads"] + (2 * a["kv_num_heads"] if x["key"] is None else 0)
    return width // heads if isinstance(width, int) else None


_PAGED = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",  # bounds of lengths, which LeanAttention does without
)


def _paged_attention(ops, node, options):
    """The new tokens of all requests one after the other, in both; past_seqlens leaves them out, seq_lens does not."""
    a, x = nodes.attributes(node), nodes.inputs(node, _PAGED)
    heads, kv_heads = nodes.heads(a, "num_heads", "kv_num_heads")
    scales = _cache_scales(ops, a, x, "key_cache", "value_cache")
    nodes.check_types(x, "query", "key", "value", *([] if scales else ["key_cache", "value_cache"]))
    nodes.check_ranks(x, 2, ["query"], "key", "value", "cos_cache", "sin_cache")
    nodes.check_ranks(x, 4, ["key_cache", "value_cache"])
    nodes.check_ranks(x, 2, ["block_table"])
    nodes.refuse_inputs(
        x,
        {
            "slot_mapping": "LeanAttention writes where positions and block_table say",
            "q_norm_weight": "LeanAttention has no normalisation of queries",
            "k_norm_weight": "LeanAttention has none of keys",
        },
    )
    for name, usual in (("kv_cache_layout", "SEPARATE"), ("rotary_offset", 0), ("v_head_size", 0)):
        if a.get(name, usual) != usual:
            raise nodes.Refused(f"{name} is {a[name]}; LeanAttention has a cache of each, and RoPE from the first column on")
    for name in ("cumulative_sequence_length", "past_seqlens"):
        if x[name] is None:
            raise nodes.Refused(f"its input {name} is missing")
    causal, window = bool(a.get("is_causal", 1)), a.get("local_window_size", -1)
    if window != -1 and (window < 1 or not causal):
        raise nodes.Refused(f"local_window_size is {window}; LeanAttention takes -1 (off), or 1 or more where causal")
    query, key, value = x["query"], x["key"], x["value"]
    if (key is None) != (value is None):
        raise nodes.Refused("key and value go together, or are both packed into query")
    packed, size = key is None, _columns(x["key_cache"])
    size = size if isinstance(size, int) else -1
    tables, rotary = {}, bool(a.get("do_rotary", 0))
    if rotary:
        if x["cos_cache"] is None or x["sin_cache"] is None:
            raise nodes.Refused("do_rotary = 1 without cos_cache and sin_cache")
        tables = {name: ops.float(x[name]) for name in ("cos_cache", "sin_cache")}
    offsets = x["cumulative_sequence_length"]
    counts = ops.Sub(ops.Slice(offsets, [1], [1 << 31]), ops.Slice(offsets, [0], [-1]))
    outputs = ops.ours(
        "LeanAttention",
        dict(
            scale=nodes.scale(a) if a.get("scale") else 0.0,  # 0 is 1/sqrt(D) in both
            softcap=nodes.softcap(a),
            causal=causal,
            window=window,
            layout="bnhd",
            append=True,
            packed_qkv=packed,
            rotary_interleaved=rotary and bool(a.get("rotary_interleaved", 0)),
        ),
        query=ops.Reshape(query, [0, heads + 2 * kv_heads if packed else heads, size]),
        key_cache=x["key_cache"],
        value_cache=x["value_cache"],
        seq_lens=ops.Add(x["past_seqlens"], counts),
        new_key=None if packed else ops.Reshape(key, [0, kv_heads, size]),
        new_value=None if packed else ops.Reshape(value, [0, kv_heads, size]),
        block_table=x["block_table"],
        sinks=None if x["head_sink"] is None else ops.float(x["head_sink"]),
        cu_query_lens=offsets,
        **tables,
        **scales,
    )
    width = heads * size if size > 0 else -1
    out = nodes.known(ops.Reshape(outputs["output"], [0, width]), query, [nodes.dim(query, 0), width if width > 0 else None])
    return "LeanAttention", [out, outputs["key_cache_out"], outputs["value_cache_out"]]


_MULTI_HEAD = (
    "query",
    "key",
    "value",
    "bias",
    "key_padding_mask",
    "attention_bias",
    "past_key",
    "past_value",
    "past_sequence_length",
    "cache_indirection",
)


def _multi_head_attention(ops, node, options):
    a, x = nodes.attributes(node), nodes.inputs(node, _MULTI_HEAD)
    nodes.check_types(x, "query", "key", "value", "past_key", "past_value")
    nodes.check_ranks(x, 4, [], "past_key", "past_value")
    nodes.refuse_inputs(
        x,
        {
            "key_padding_mask": "it adds mask_filter_value, a finite number, where LeanAttention leaves keys out",
            "attention_bias": "LeanAttention knows lengths and windows, no masks or biases",
            "past_sequence_length": "the caches' layout then depends on the execution provider",
            "cache_indirection": "LeanAttention has no beams",
            "bias": "add it to query, key and value before the node",
        },
    )
    if nodes.is_read(node, 3):
        raise nodes.Refused("qk is read, which LeanAttention never forms")
    if (x["past_key"] is None) != (x["past_value"] is None):
        raise nodes.Refused("past_key and past_value go together")
    if x["past_key"] is None and (nodes.is_read(node, 1) or nodes.is_read(node, 2)):
        raise nodes.Refused("present_key or present_value is read without past_key and past_value")
    (heads, _), causal = nodes.heads(a, "num_heads"), bool(a.get("unidirectional", 0))
    query, key, value = x["query"], x["key"], x["value"]
    query_dims = nodes.dims(query)
    tokens = nodes.dim(query, 1)
    if nodes.rank(query, "query", 3, 5) == 5:  # [B,N,H,3,D]
        if key is not None or value is not None:
            raise nodes.Refused("query of rank 5 holds key and value already, but key or value is given")
        query, key, value = (ops.Squeeze(t, [3]) for t in ops.Split(query, [1, 1, 1], axis=3, outputs=3))
        key, value = (ops.Transpose(t, perm=[0, 2, 1, 3]) for t in (key, value))
        keys, size = tokens, query_dims[4]
        joined = heads * size if isinstance(size, int) else None
    else:
        if key is None:
            raise nodes.Refused("query of rank 3 without key")
        rank = nodes.rank(key, "key", 3, 4, 5)
        if rank != 5:
            nodes.check_ranks(x, rank, ["value"])
        keys = nodes.dim(key, 2 if rank == 4 else 1)
        size = nodes.dim(value if value is not None else key, -1)
        query = ops.split_heads(query, heads)
        if rank == 4 and x["past_key"] is not None:
            raise nodes.Refused("key of rank 4 is a whole cache, but past_key is given too")
        if rank == 5:  # [B,S,H,2,D]
            key, value = (
                ops.Transpose(ops.Squeeze(t, [3]), perm=[0, 2, 1, 3]) for t in ops.Split(key, [1, 1], axis=3, outputs=2)
            )
        elif rank == 3:
            key, value = ops.to_cache(key, heads), ops.to_cache(value, heads)
        joined = (size if rank == 3 else heads * size) if isinstance(size, int) else None
    nodes.check_lengths(tokens, keys, causal)
    present = []
    if x["past_key"] is not None:
        present = key, value = ops.Concat(x["past_key"], key, axis=2), ops.Concat(x["past_value"], value, axis=2)
    out = ops.ours(
        "LeanAttention",
        dict(scale=a.get("scale", 0.0), causal=causal, layout="bnhd"),
        query=query,
        key_cache=key,
        value_cache=value,
    )["output"]
    return "LeanAttention", [nodes.known(ops.join_heads(out, joined), x["query"], [*query_dims[:2], joined]), *present]


# Back to standard operators


def _lean_attention_back(ops, node, options):
    """ai.onnx Attention without append; with it GroupQueryAttention, which places single new tokens alike."""
    op = spec.all_specs()["LeanAttention"]
    a = {t.name: t.default for t in op.attrs} | nodes.attributes(node)
    x = nodes.inputs(node, [t.name for t in op.inputs])
    if x["cu_query_lens"] is not None:
        return _packed_back(ops, node, a, x)
    nodes.check_ranks(x, 4, ["query"], "new_key", "new_value")
    nodes.refuse_inputs(
        x, {"cu_seqlens": "no standard operator has ragged caches", "block_table": "none has such paged caches"}
    )
    nodes.check_ranks(x, 4, ["key_cache", "value_cache"])
    if nodes.is_read(node, 1):
        raise nodes.Refused("lse is read, which no standard operator returns")
    bnhd = a["layout"] == "bnhd"
    tokens, heads = (nodes.dim(x["query"], axis) for axis in ((1, 2) if bnhd else (2, 1)))
    if a["packed_qkv"] and isinstance(heads, int) and isinstance(nodes.dim(x["key_cache"], 1), int):
        heads -= 2 * nodes.dim(x["key_cache"], 1)
    capacity = nodes.dim(x["key_cache"], 2)
    if a["append"]:
        return _append_back(ops, a, x, bnhd, tokens, heads)
    nodes.refuse_inputs(x, {"query_lens": "ai.onnx Attention takes no rows of padding"})
    nodes.refuse_inputs(x, dict.fromkeys(("key_scale", "value_scale"), "ai.onnx Attention has no quantised caches"))
    if x["sinks"] is not None:
        raise nodes.Refused("ai.onnx Attention has no sinks")
    if x["cos_cache"] is not None:
        raise nodes.Refused("ai.onnx Attention has no rotary encoding")
    opset, needed = options["opset"], 25 if a["window"] != -1 else 24 if x["seq_lens"] is not None else 23
    if opset < needed:
        raise nodes.Refused(f"the model has opset {opset}; ai.onnx Attention with these inputs needs {needed}")
    if x["seq_lens"] is not None and tokens != 1:
        raise nodes.Refused(f"seq_lens with {nodes.show(tokens)} queries: only for a single one is nonpad_kv_seqlen the same")
    if x["seq_lens"] is None:
        nodes.check_lengths(tokens, capacity, a["causal"] and tokens != 1)
    if tokens == 1 and a["window"] != -1 and x["seq_lens"] is None and capacity != 1:
        raise nodes.Refused("Attention would count the window from the first key")
    attributes = {"is_causal": int(a["causal"] and (tokens != 1 or a["window"] != -1)), "softcap": a["softcap"]}
    if a["scale"]:
        attributes["scale"] = a["scale"]
    if a["window"] != -1:
        attributes["left_window_size"] = a["window"] - 1
    query = ops.Transpose(x["query"], perm=[0, 2, 1, 3]) if bnhd else x["query"]
    inputs = [query, x["key_cache"], x["value_cache"]]
    if x["seq_lens"] is not None:
        inputs += [None, None, None, ops.int64(x["seq_lens"])]
    (out,) = ops.foreign("", "Attention", inputs, attributes)
    return "Attention", [ops.Transpose(out, perm=[0, 2, 1, 3]) if bnhd else out]


def _append_back(ops, a, x, bnhd, tokens, heads):
    """GroupQueryAttention of all of the query's rows: it counts the last of them to the last key, and pads nothing but
    prompts. So rows of padding are appended too, behind a request's keys, where the next tokens overwrite them, and their
    output is made 0. Several rows a request go to empty caches, or to a single request's: it refuses others."""
    kv_heads, size, value_size = nodes.dim(x["key_cache"], 1), _columns(x["key_cache"]), _columns(x["value_cache"])
    if not a["causal"] and tokens != 1:
        raise nodes.Refused(f"append with {nodes.show(tokens)} queries that are not causal: they would see rows of padding")
    if not all(isinstance(n, int) for n in (heads, kv_heads, size)) or size != value_size:
        raise nodes.Refused("GroupQueryAttention needs the numbers of heads, and keys and values of one known size")
    if size % 8:
        raise nodes.Refused(f"heads of {size}; onnxruntime's GroupQueryAttention takes multiples of 8")
    if x["sinks"] is not None and x["query"].dtype != ir.DataType.FLOAT:
        raise nodes.Refused("sinks are float32, head_sink is rounded to the type of query")
    if not a["packed_qkv"] and (x["new_key"] is None or x["new_value"] is None):
        raise nodes.Refused("append without new_key and new_value")
    rows_axis = 1 if bnhd else 2
    lens = x["seq_lens"]
    if lens is None:
        lens = ops.int32(ops.Expand(ops.size(x["key_cache"], 2), ops.size(x["query"], 0)))
    counts = None
    if tokens == 1 and x["query_lens"] is None:
        last, total = ops.Sub(lens, ops.int32(1)), ops.ReduceMax(lens, keepdims=0)
        ops.notes.append("lengths of 0 are an error")
    else:
        rows = ops.int32(ops.size(x["query"], rows_axis))
        counts = ops.Min(lens, rows)
        if x["query_lens"] is not None:
            counts = ops.Max(ops.Min(counts, x["query_lens"]), ops.int32(0))
        ends = ops.Add(ops.Sub(lens, counts), rows)
        last, total = ops.Sub(ends, ops.int32(1)), ops.ReduceMax(ends, keepdims=0)
        if tokens != 1:
            ops.notes.append("several tokens a request behind a past are an error in batches of more than one request")
        ops.notes.append("rows of padding take cache positions behind a request's")

    def joined(t):
        """[B,N,heads*D]."""
        return ops.Reshape(t if bnhd else ops.Transpose(t, perm=[0, 2, 1, 3]), [0, 0, -1])

    values = [None if x[name] is None else joined(x[name]) for name in ("query", "new_key", "new_value")]
    inputs = [*values, x["key_cache"], x["value_cache"], last, total]
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": a["scale"],
        "softcap": a["softcap"],
        "local_window_size": a["window"],
    }
    tables = [None, None]
    if x["cos_cache"] is not None:
        _check_rotary_sizes(x, size, "GroupQueryAttention")
        tables = [_as_type(x[name], x["query"].dtype, name) for name in ("cos_cache", "sin_cache")]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(a["rotary_interleaved"])}
        ops.notes.append("positions beyond cos_cache are an error")
    quantisation, scales = _quantisation(ops, a, x)
    bits = 4 if x["key_cache"].dtype == ir.DataType.UINT8 else 8
    attributes |= quantisation | ({"kv_cache_bit_width": bits} if quantisation else {})
    inputs += [*tables, None, None, x["sinks"], *scales]
    while inputs[-1] is None:
        inputs.pop()
    out, key, value = ops.foreign(nodes.MICROSOFT, "GroupQueryAttention", inputs, attributes, 3)
    out = ops.Reshape(out, [0, 0, heads, size])
    if counts is not None:
        real = ops.Less(ops.Unsqueeze(ops.range(ops.size(x["query"], rows_axis)), [0]), ops.Unsqueeze(ops.int64(counts), [1]))
        out = ops.Where(ops.Unsqueeze(real, [2, 3]), out, ops.CastLike(0.0, x["query"]))
    return "GroupQueryAttention", [out if bnhd else ops.Transpose(out, perm=[0, 2, 1, 3]), None, key, value]


def _packed_back(ops, node, a, x):
    """PagedAttention, which only onnxruntime's CUDA provider runs."""
    if x["block_table"] is None or not a["append"]:
        raise nodes.Refused("packed new tokens over other caches than pages, or without append, which no standard operator has")
    if nodes.is_read(node, 1):
        raise nodes.Refused("lse is read, which no standard operator returns")
    if x["query"].dtype == ir.DataType.FLOAT:
        raise nodes.Refused("onnxruntime's PagedAttention takes float16 and bfloat16")
    if x["key_cache"].dtype == ir.DataType.UINT8:
        raise nodes.Refused("int4 caches; how PagedAttention stores such is not known to be our way")
    bnhd, kv_heads, size = a["layout"] == "bnhd", nodes.dim(x["key_cache"], 2), nodes.dim(x["key_cache"], 3)
    heads = nodes.dim(x["query"], 1 if bnhd else 0)
    if not all(isinstance(n, int) for n in (heads, kv_heads, size)) or size != nodes.dim(x["value_cache"], 3):
        raise nodes.Refused("PagedAttention needs the numbers of heads, and keys and values of one known size")
    if x["sinks"] is not None:
        raise nodes.Refused("sinks are float32, head_sink is rounded to the type of query")
    if x["seq_lens"] is None:
        raise nodes.Refused("it has no seq_lens, which past_seqlens follow from")
    heads -= 2 * kv_heads if a["packed_qkv"] else 0
    offsets = x["cu_query_lens"]
    past = ops.Sub(x["seq_lens"], ops.Sub(ops.Slice(offsets, [1], [1 << 31]), ops.Slice(offsets, [0], [-1])))

    def joined(t):
        """[Nq,heads*D]."""
        return None if t is None else ops.Reshape(t if bnhd else ops.Transpose(t, perm=[1, 0, 2]), [0, -1])

    inputs = [joined(x[name]) for name in ("query", "new_key", "new_value")]
    inputs += [x["key_cache"], x["value_cache"], offsets, past, x["block_table"]]
    quantisation, scales = _quantisation(ops, a, x)
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": a["scale"], "softcap": a["softcap"]}
    attributes |= {"local_window_size": a["window"], "is_causal": int(a["causal"])} | quantisation
    tables = [None, None]
    if x["cos_cache"] is not None:
        _check_rotary_sizes(x, size, "PagedAttention")
        tables = [_as_type(x[name], x["query"].dtype, name) for name in ("cos_cache", "sin_cache")]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(a["rotary_interleaved"])}
        ops.notes.append("positions beyond cos_cache are an error")
    inputs += [*tables, *[None] * 4, *scales]
    while inputs[-1] is None:
        inputs.pop()
    ops.notes.append("onnxruntime runs it on CUDA alone")
    out, key, value = ops.foreign(nodes.MICROSOFT, "PagedAttention", inputs, attributes, 3)
    out = ops.Reshape(out, [0, heads, size])
    return "PagedAttention", [out if bnhd else ops.Transpose(out, perm=[1, 0, 2]), None, key, value]


def _check_rotary_sizes(x, size, operator):
    """Refuses heads of a size, and tables of a width, that onnxruntime's operators do not take."""
    if size % 16:
        raise nodes.Refused(f"heads of {size}; with rotary encoding onnxruntime's {operator} takes multiples of 16")
    half = nodes.dim(x["cos_cache"], 1)
    if not isinstance(half, int) or half % 8:
        turned = 2 * half if isinstance(half, int) else "an unknown number"
        raise nodes.Refused(f"rotary encoding of {turned} of a head's columns; {operator} takes multiples of 16")


def _as_type(table, dtype, name):
    """A table in the type of query: itself, or what was made float32 of it."""
    cast = table.producer()
    if table.dtype != dtype and cast is not None and (cast.domain, cast.op_type) == ("", "Cast"):
        table = cast.inputs[0]
    if table.dtype != dtype:
        raise nodes.Refused(f"{name} is float32, GroupQueryAttention's is rounded to the type of query")
    return table


def _gated_activation_back(ops, node, options):
    x, kind = node.inputs[0], nodes.attributes(node).get("activation", "silu")
    if kind.startswith("gelu") and options["opset"] < 20:
        raise nodes.Refused(f"the model has opset {options['opset']}; ai.onnx Gelu needs 20")
    gate, up, skip, scale = [*node.inputs, None, None, None][:4]
    if up is None:
        gate, up = (ops.Gather(x, i, axis=2) for i in (0, 1))
    elif nodes.attributes(node).get("columns", 0):
        first = nodes.attributes(node).get("first_column", 0)
        gate = ops.Slice(x, [first], ops.Add(ops.size(up, 2), first), [2])
    if skip is not None:
        if x.dtype != ir.DataType.FLOAT:
            raise nodes.Refused("skip_scale is float32, what is added would be rounded to the type of gate_up")
        heads = ops.Reshape(skip, ops.dims(ops.Shape(skip, end=2), ops.size(scale, 0), -1))
        up = ops.Add(up, ops.Reshape(ops.Mul(heads, ops.Unsqueeze(scale, [1])), ops.Shape(up)))
    return "Mul", [ops.Mul(_active(ops, gate, kind), up)]


def _active(ops, gate, kind):
    if kind == "sigmoid":
        return ops.Sigmoid(gate)
    if kind == "silu":
        return ops.Mul(gate, ops.Sigmoid(gate))
    if kind == "relu":
        return ops.Relu(gate)
    return ops.Gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")


def _linear_back(ops, node, options):
    a, (x, weight, bias) = nodes.attributes(node), [*node.inputs, None][:3]
    kind = a.get("activation", "silu")
    gated = a.get("gated", 0)
    if gated and kind.startswith("gelu") and options["opset"] < 20:
        raise nodes.Refused(f"the model has opset {options['opset']}; ai.onnx Gelu needs 20")

    def product(weight, bias):
        y = ops.MatMul(x, weight)
        return y if bias is None else ops.Add(y, bias)

    if not gated:
        return "MatMul", [product(weight, bias)]
    gate, up = (product(ops.Gather(weight, i, axis=1), bias and ops.Gather(bias, i, axis=0)) for i in (0, 1))
    return "Mul", [ops.Mul(_active(ops, gate, kind), up)]


# Models and files

_TO_LEANFLEET = {
    "ai.onnx.Attention": _attention,
    "ai.onnx.CausalConvWithState": rewrite_conv.causal_conv_with_state,
    "ai.onnx.LinearAttention": rewrite_linear.linear_attention,
    f"{nodes.MICROSOFT}.CausalConvWithState": rewrite_conv.causal_conv_with_state,
    f"{nodes.MICROSOFT}.GatedDeltaNet": rewrite_linear.gated_delta_net,
    f"{nodes.MICROSOFT}.GroupQueryAttention": _group_query_attention,
    f"{nodes.MICROSOFT}.LinearAttention": rewrite_linear.linear_attention,
    f"{nodes.MICROSOFT}.MultiHeadAttention": _multi_head_attention,
    f"{nodes.MICROSOFT}.PagedAttention": _paged_attention,
    f"{nodes.MICROSOFT}.VarlenCausalConvWithState": rewrite_conv.varlen_causal_conv_with_state,
}
_TO_STANDARD = {
    "leanfleet.LeanAttention": _lean_attention_back,
    "leanfleet.CausalLinearDecay": rewrite_linear.causal_linear_decay_back,
    "leanfleet.CausalConv": rewrite_conv.causal_conv_back,
    "leanfleet.GatedDeltaRule": rewrite_linear.gated_delta_rule_back,
    "leanfleet.GatedActivation": _gated_activation_back,
    "leanfleet.Linear": _linear_back,
}


def operator_name(node: ir.Node) -> str:
    """ "ai.onnx.Attention" for an onnx_ir.Node."""
    return f"{node.domain or 'ai.onnx'}.{node.op_type}"


def _no_counterpart(ops, node, options):
    raise nodes.Refused("no standard operator means the same")


def _names(model):
    """The names of all values and nodes of a model's graphs."""
    names = {v.name for graph in model.graphs() for v in (*graph.inputs, *graph.initializers.values())}
    return names | {x.name for graph in model.graphs() for node in graph for x in (node, *node.outputs)}


def _candidates(graph, mappings):
    return [n for n in ir.traversal.RecursiveGraphIterator(graph) if operator_name(n) in mappings]


def _replace(node, mapping, options):
    """Puts what `mapping` emits in the node's place; returns its Row. The node's other readers do not notice."""
    row = Row(nodes.label(node), operator_name(node))
    ops = nodes.Emitter(node, options["taken"])
    try:
        row.into, results = mapping(ops, node, options)
    except nodes.Refused as refusal:
        row.reason = str(refusal)
        for new in ops.nodes:  # they read the model's values no more
            for i in range(len(new.inputs)):
                new.replace_input_with(i, None)
        return row
    row.notes = ops.notes
    pairs = [(old, new) for old, new in zip(node.outputs, results, strict=False) if old.name and new is not None]
    for old, new in pairs:
        old.shape, old.type = old.shape or new.shape, old.type or new.type
    for new in ops.nodes:
        new.name = new.name or new.outputs[0].name
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], ops.nodes, *map(list, zip(*pairs, strict=True)))
    return row


def rewrite(
    model: ir.Model,
    to: str = "leanfleet",
    *,
    operators: Collection[str] | None = None,
    fixed_caches: bool = False,
    bodies: bool = True,
    inline: bool = False,
) -> list[Row]:
    """Rewrites an onnx_ir.Model in place; returns a Row for each node that could have been.

    to: "leanfleet", or "standard" for ai.onnx and com.microsoft operators.
    operators: rewrite these alone, such as "com.microsoft.GroupQueryAttention", or with to = "standard"
    "leanfleet.LeanAttention"; None: all.
    fixed_caches: GroupQueryAttention's past_key is never shorter than total_sequence_length, so that the caches are
    appended to where they are. Without it a copy is made for each node, of the size that is needed, unless the model
    declares that present_key is as long as past_key.
    bodies: gives every leanfleet node its function, for runtimes without the library.
    inline: with to = "standard", puts the function body in the place of each leanfleet node that has no counterpart, of
    `operators` where these are given.

    A model of opset 27 or newer in which nothing needs more than 26 is set to 26, which onnxruntime reads.
    Raises ValueError for an unknown `to` or operator, for inline without to = "standard", and for leanfleet nodes of another
    version or with an attribute that their operator does not have.

    Example:
        import onnx_ir
        from leanfleet.export.rewrite import rewrite

        model = onnx_ir.load("model.onnx")
        for row in rewrite(model, operators=["ai.onnx.Attention"]):
            print(row.operator, row.into)  # ai.onnx.Attention LeanAttention
        onnx_ir.save(model, "rewritten.onnx")
    """
    if to not in ("leanfleet", "standard"):
        raise ValueError(f"to is {to!r}; it is leanfleet or standard")
    if inline and to != "standard":
        raise ValueError("inline puts function bodies in the place of leanfleet nodes: it goes with to = standard")
    known = dict(_TO_LEANFLEET if to == "leanfleet" else _TO_STANDARD)
    every = known if to == "leanfleet" else {f"{spec.DOMAIN}.{n}": _no_counterpart for n in spec.all_specs()} | known
    if operators is not None and (unknown := set(operators) - set(every)):
        raise ValueError(f"operator {min(unknown)} is none that can be rewritten; these are {', '.join(known)}")
    mappings = every if operators is None else {name: every[name] for name in operators}
    _name_default_domain(model)
    function_bodies.check_nodes(model)
    _inline_callers(model, mappings)
    todo = _candidates(model.graph, mappings)
    options = {
        "fixed_caches": fixed_caches,
        "opset": model.opset_imports.get("", function_bodies.DEFAULT_OPSET),
        "taken": _names(model),
    }
    order = {id(node): i for i, node in enumerate(todo)}
    by_node: dict[int, Row] = {}
    if (bodies or to == "standard") and (options["opset"] or 0) < function_bodies.OLDEST_OPSET:
        what = "function bodies" if to == "leanfleet" else "the nodes in their place"
        reason = (
            f"the model has opset {options['opset']}; {what} need {function_bodies.OLDEST_OPSET}: convert it with "
            "onnx.version_converter"
        )
        return [Row(nodes.label(n), operator_name(n), reason=reason) for n in todo]
    while todo:  # what is found out about one node's output may be what the next one lacks
        _infer_shapes(model)
        found = {id(n): _replace(n, mappings[operator_name(n)], options) for n in todo}
        by_node |= found
        _import_domains(model)
        left = [n for n in todo if found[id(n)].into is None]
        todo = left if len(left) < len(todo) else []
    rows = [by_node[key] for key in sorted(by_node, key=order.__getitem__)]
    _complete(model, bodies, {name.partition(".")[2] for name in mappings} if inline else set())
    return rows


@contextmanager
def _quiet():
    """onnx_ir logs what it finds wrong with a model, tracebacks too; here errors, or reasons of nodes left alone, tell it."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("onnx_ir")]
    loud = [logger for logger in loggers if not logger.disabled]
    try:
        for logger in loud:
            logger.disabled = True
        yield
    finally:
        for logger in loud:
            logger.disabled = False


def _infer_shapes(model):
    """Where onnx finds fault with the model, shapes stay unknown, and nodes are left alone for it."""
    with _quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _name_default_domain(model):
    """Imports of "ai.onnx" become those of "", which is the same domain; onnx_ir does so with the domains of nodes alone."""
    for imports in (model.opset_imports, *(f.opset_imports for f in model.functions.values())):
        if "ai.onnx" in imports:
            imports.setdefault("", imports["ai.onnx"])
            del imports["ai.onnx"]


def _inline_callers(model, mappings):
    """Inlines every called function that holds such nodes: inside one, sizes are unknown."""
    modified = True
    while modified:
        callers = {f.identifier() for f in model.functions.values() if f.domain != spec.DOMAIN and _candidates(f, mappings)}
        modified = callers and InlinePass(lambda f, callers=callers: f.identifier() in callers)(model).modified


def _import_domains(model):
    """Imports the domains that new nodes may be of: onnx infers no shapes in a model that lacks one."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == "":
            model.opset_imports.setdefault("", function_bodies.DEFAULT_OPSET)
        if node.domain in (nodes.MICROSOFT, spec.DOMAIN):
            model.opset_imports.setdefault(node.domain, 1 if node.domain == nodes.MICROSOFT else spec.OPSET_VERSION)


def _complete(model, bodies, inline):
    """The opset and the functions that the nodes now in the model need, and no others. inline: names of our operators whose
    nodes become those of their functions."""
    every = [*ir.traversal.RecursiveGraphIterator(model.graph)]
    domains = {n.domain for n in every}
    imports = model.opset_imports
    opset, older = imports.get("", 0), rewrite_linear.FIRST_OPSET_OF_LINEAR_ATTENTION - 1
    if opset > older and all(
        onnx.defs.has(n.op_type, opset, "") and onnx.defs.get_schema(n.op_type, opset, "").since_version <= older
        for n in every
        if n.domain == ""
    ):
        imports[""] = older
    if spec.DOMAIN in domains and (bodies or inline):
        function_bodies.attach(model)
    if inline:
        InlinePass(lambda f: f.domain == spec.DOMAIN and f.name in inline)(model)
    RemoveUnusedFunctionsPass()(model)
    if spec.DOMAIN not in {n.domain for n in ir.traversal.RecursiveGraphIterator(model.graph)}:
        imports.pop(spec.DOMAIN, None)


class Rows(list):
    """The Rows of a file, and its rewrite_check.Verification."""

    verification: rewrite_check.Verification | None = None


def rewrite_file(
    source: str | Path,
    target: str | Path,
    to: str = "leanfleet",
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> Rows:
    """Rewrites the ONNX file `source` into `target`; returns the Rows. to and options are those of rewrite.

    Weights in external files are not loaded for it: a target beside the source refers to the same files, one elsewhere gets
    a copy of them, `target`.data. Nothing takes the target's place before the result is in order: in static single
    assignment form, accepted by onnx's checker where the source is, and, with `verify`, computing what the source does; see
    rewrite_check.verify, which takes `inputs`, {name: array}.
    Raises FileNotFoundError where there is no source, ValueError where it is no valid ONNX model or the result is none, and
    rewrite_check.Different where the numbers differ.

    Example:
        from leanfleet.export.rewrite import print_rows, rewrite_file

        rows = rewrite_file("model.onnx", "model.leanfleet.onnx")
        print_rows(rows)                                    # a line for each node: what it became, or why it stayed
        print(rows.verification)                            # the largest difference, and what is allowed
    """
    source, target = Path(source), Path(target)
    with progress.stage(f"reading {source}"):
        model = _read(source)
    try:
        with progress.stage("rewriting its nodes"):
            rows = Rows(rewrite(model, to, **options))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        what = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{source} cannot be rewritten: {what}{_short(error)}") from error
    with _place_for(model, source, target) as (scratch, finish):
        written = onnx.load(str(scratch), load_external_data=False)
        fault = rewrite_check.structural_fault(written, scratch.parent)
        if fault is None and (fault := rewrite_check.checker_fault(scratch)) and rewrite_check.checker_fault(source):
            fault = None
        if fault:
            raise ValueError(f"{target} is not written, because it would be no valid model: {_short(fault)}")
        with progress.stage("running the original and the result"):
            rows.verification = _verification(rows, options, source, scratch, verify, inputs)
        finish()
    return rows


def _verification(rows, options, source, result, verify, inputs):
    if not verify:
        return rewrite_check.Verification(reason="it was not asked for")
    if not options.get("inline") and all(row.into is None for row in rows):
        return rewrite_check.Verification(reason="no node changed")
    return rewrite_check.verify(source, result, inputs)


def _short(error):
    text = " ".join(str(error).split())
    return text if len(text) < 500 else f"{text[:500]} ..."


def _read(source):
    """The onnx_ir.Model of a file that is in order. Raises FileNotFoundError or ValueError."""
    files.check_onnx(source)
    try:
        proto = onnx.load(str(source), load_external_data=False)
    except Exception as error:
        raise ValueError(f"{source} is no ONNX file: {error}") from error
    if fault := rewrite_check.text_fault(proto) or rewrite_check.structural_fault(proto, source.parent):
        raise ValueError(f"{source} is no valid ONNX model: {_short(fault)}")
    try:
        with _quiet():
            model = ir.from_proto(proto)
        for graph in model.graphs():
            ir.external_data.set_base_dir(graph, source.parent)
    except Exception as error:
        raise ValueError(f"{source} is no valid ONNX model: {_short(error)}") from error
    return model


def _save(model, source, path, weights):
    """Raises ValueError where the model holds what no file can, such as a value or an attribute without a type."""
    try:
        with _quiet():
            ir.save(model, path, external_data=weights)
    except ir.serde.SerdeError as error:
        where = str(error)
        while error.__cause__ is not None:
            error = error.__cause__
            where = str(error) if isinstance(error, ir.serde.SerdeError) else where
        raise ValueError(f"{source} is no valid ONNX model: {_short(where)}: {_short(error)}") from error


@contextmanager
def _place_for(model, source, target):
    """Writes a model that was read from `source` to a file that is not the target yet; yields its path, and a function that
    puts it and the file of its weights into the target's place. Without that call nothing is left."""
    external = any(isinstance(v.const_value, ir.ExternalTensor) for g in model.graphs() for v in g.initializers.values())
    if external and target.parent.resolve() == source.parent.resolve():
        # The weights' files are named relative to the model's folder, so it must lie beside them.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        scratch, weights, folder = Path(name), None, nullcontext()
    else:
        existing = next(p for p in target.absolute().parents if p.is_dir())
        folder = tempfile.TemporaryDirectory(dir=existing, prefix=f".{target.name}.")
        scratch, weights = Path(folder.name, target.name), f"{target.name}.data"

    def finish():
        target.parent.mkdir(parents=True, exist_ok=True)
        if weights and scratch.with_name(weights).exists():
            os.replace(scratch.with_name(weights), target.with_name(weights))
        os.replace(scratch, target)

    with folder:
        try:
            _save(model, source, scratch, weights if external else None)
            scratch.chmod(0o666 & ~_umask())
            yield scratch, finish
        finally:
            scratch.unlink(missing_ok=True)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def print_rows(rows: Sequence[Row]) -> None:
    """Prints what rewrite returned: a line for each node."""
    if not rows:
        print("no node that could be rewritten")
        return
    done = sum(row.into is not None for row in rows)
    print(f"{done} of {len(rows)} nodes rewritten")
    print_table(
        [
            (row.node, row.operator, f"-> {row.into}" if row.into else "left alone", row.reason or "; ".join(row.notes))
            for row in rows
        ]
    )


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as dicts."""
    return [asdict(row) for row in rows]
