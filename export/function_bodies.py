"""Every operator as a model-local ONNX function of standard operators, so that an exported model runs where the
library is not registered too.

attach(model) gives every leanfleet node of a model its function. A function cannot test whether an optional input is
there, so each set of present inputs and attribute values gets an overload of its own, with the values as constants in
its body. All sizes stay dynamic. The bodies compute in float32 whatever T is, and need opset 18 or newer.

AllReduce and AllGather stand for a process alone: the first is its input, the second repeats it `world` times.

The linear operators work chunk by chunk: a Scan over chunks of 64 tokens carries the state, so that memory is linear
in the number of tokens. GatedDeltaRule goes token by token. Equations and sources: leanfleet.export.reference, which is
what the bodies are tested against.

Symbols: B batch, Q requests, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, C tokens of a chunk, R or D
size of queries and keys, Dv of values, W any size.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass
from onnx_ir.tape import Tape

from leanfleet import communicators, spec
from leanfleet.export import sample_constants as sampling

CHUNK = 64
DELTA_ROW_EPS = 1e-6  # what the delta rule's normalize_qk adds to the sum of squares, as in the reference
LEAST_MAGNITUDE = 2.0**-100  # a row of smaller numbers has the scale 0, as in the reference
UNIT_ROW_EPS = 1e-12  # lower bound of the norm that normalize_qk divides by, as in the reference
DEFAULT_OPSET = 20  # of a model without standard operators
OLDEST_OPSET = 18  # the first where ReduceMax takes its axes as an input
FLOAT8_OPSET = 19  # the first with Cast to float8e4m3fn
IR_VERSION = 10  # the first with overloads
TAKES_OVERLOADS = 1, 27  # onnxruntime's first version that tells overloads apart
RUNTIMES = ("onnxruntime", *(f"onnxruntime-{of}" for of in ("gpu", "directml", "openvino", "qnn", "rocm")))  # its packages
_TOKENS = 3  # the token axis of the inner tensors [Q,Hkv,G,N,W]; once split into chunks, the axis of the chunks


class ExportWarning(UserWarning):
    """What an export has to tell of the file that it writes."""


class _Ops(Tape):
    """Emits standard operators: ops.Add(x, 1.0). Numbers and lists of integers among the inputs become constants."""

    def __init__(self, outer=None):
        super().__init__()
        self._outer = outer
        self._numbers = outer._numbers if outer else itertools.count()  # names are unique across subgraphs
        self._constants = {}

    def __getattr__(self, op_type):
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def emit(*inputs, outputs=1, **attributes):
            values = [self.constant(x) if isinstance(x, (int, float, list)) else x for x in inputs]
            results = self.op_multi_out(op_type, values, attributes, num_outputs=outputs)
            for value in results:
                value.name = self._name()
            return results[0] if outputs == 1 else results

        return emit

    def _name(self):
        return f"v{next(self._numbers)}"

    def constant(self, value):
        """A number as a scalar (float32 or int64), a list of integers as int64 [n]; one node for equal values."""
        if self._outer:
            return self._outer.constant(value)
        key = repr(value)
        if key not in self._constants:
            dtype = np.float32 if isinstance(value, float) else np.int64
            self._constants[key] = self.Constant(value=ir.tensor(np.array(value, dtype)))
        return self._constants[key]

    def float(self, x):
        return self.Cast(x, to=ir.DataType.FLOAT)

    def int64(self, x):
        return self.Cast(x, to=ir.DataType.INT64)

    def size(self, x, axis):
        """Size of an axis, int64 [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def range(self, count):
        """0 .. count-1, for an int64 [1]."""
        return self.Range(0, self.Squeeze(count, [0]), 1)

    def dims(self, *sizes):
        """A shape from numbers, sizes and parts of shapes."""
        return self.Concat(*([s] if isinstance(s, int) else s for s in sizes), axis=0)

    def reshape(self, x, *sizes):
        return self.Reshape(x, self.dims(*sizes), allowzero=1)

    def zeros(self, *sizes):
        return self.ConstantOfShape(self.dims(*sizes), value=ir.tensor(np.zeros(1, np.float32)))

    def add_rows(self, x, axis, count):
        """x with `count` rows of zeros behind it. Not by Pad: when onnxruntime (1.20 to 1.31) moves a Transpose
        across it, it forgets the axes that Pad was given."""
        return self.Concat(x, self.zeros(self.Shape(x, end=axis), count, self.Shape(x, start=axis + 1)), axis=axis)

    def take(self, x, axis, count):
        """The first `count` rows."""
        return self.Slice(x, [0], count, [axis])

    def split_last(self, x, axis):
        """x without its last row along an axis, and that row, with the axis kept."""
        return self.Slice(x, [0], [-1], [axis]), self.Slice(x, [-1], [2**31], [axis])

    def sum(self, x, *axes, keepdims=1):
        return self.ReduceSum(x, list(axes), keepdims=keepdims)

    def sum_all(self, x):
        """The sum of each row of an int64 [B,V], int64 [B,1]."""
        return self.ReduceSum(x, [1], keepdims=1)

    def transposed(self, x):
        """The last two axes of [Q,Hkv,G,.,.] exchanged."""
        return self.Transpose(x, perm=[0, 1, 2, 4, 3])

    def clamped(self, x, upper):
        return self.Min(self.Max(x, 0), upper)

    def scan(self, step, states, sequences, reverse=False):
        """A Scan along the token axis. step(ops, states, slices) -> (states, outputs), lists; the outputs are stacked
        along the same axis. None in `sequences` stays None. Returns (final states, stacked outputs)."""
        inner = _Ops(self)
        known = {"type": ir.TensorType(ir.DataType.FLOAT), "shape": ir.Shape([None] * 5)}

        def parameter(x):
            return x and ir.Value(name=self._name(), **known)

        inputs = [[parameter(x) for x in group] for group in (states, sequences)]
        new_states, outputs = step(inner, *inputs)
        results = [inner.Identity(x) for x in (*new_states, *outputs)]  # an output may not be an input
        for result in results:  # onnxruntime 1.20 must be told the rank
            result.type, result.shape = known["type"], known["shape"]
        parameters, sequences = [x for x in sum(inputs, []) if x], [x for x in sequences if x]
        body = ir.Graph(parameters, results, nodes=inner.nodes, name="chunk")
        values = self.Scan(
            *states,
            *sequences,
            outputs=len(results),
            body=body,
            num_scan_inputs=len(sequences),
            scan_input_axes=[_TOKENS] * len(sequences),
            scan_input_directions=[int(reverse)] * len(sequences),
            scan_output_axes=[_TOKENS] * len(outputs),
            scan_output_directions=[int(reverse)] * len(outputs),
        )
        return values[: len(states)], values[len(states) :]


def _swapped(ops, x, layout, rank=4):
    """Between bhnd and `layout`, either way."""
    return x if layout == "bhnd" else ops.Transpose(x, perm=[0, 2, 1, 3][:rank])


def _away_from_zero(ops, x, eps):
    """x with its magnitude held at eps or more, sign kept (that of 0 is plus); NaN stays NaN."""
    held = ops.Where(ops.Less(x, 0.0), -eps, eps)
    return ops.Where(ops.Less(ops.Abs(x), eps), held, x)


def _spans(ops, cu_seqlens, total):
    """(start, length) of each request, [Q], inside [0, total] whatever cu_seqlens holds."""
    offsets = ops.clamped(ops.int64(cu_seqlens), total)
    start, end = ops.Slice(offsets, [0], [-1], [0]), ops.Slice(offsets, [1], [2**31], [0])
    return start, ops.Sub(ops.Max(start, end), start)


# LeanAttention


def _cache_slots(ops, x, cache, batch):
    """(capacity [B,1] or [1], slot of each position [B,S], Hkv, to_slots, from_slots). cache: the numbers of one.

    A slot is a row of a cache brought to [slots,Hkv,W] by to_slots; -1 on a page that does not exist.
    """
    if x.block_table is not None:
        pool, block, kv_heads = (ops.size(cache, axis) for axis in range(3))
        pages = ops.Unsqueeze(ops.int64(x.block_table), [2])
        inside = ops.And(ops.GreaterOrEqual(pages, 0), ops.Less(pages, pool))
        slots = ops.Where(inside, ops.Add(ops.Mul(pages, block), ops.range(block)), -1)
        capacity = ops.Mul(ops.size(x.block_table, 1), block)

        def to_slots(cache):
            return ops.reshape(cache, ops.Mul(pool, block), kv_heads, ops.size(cache, 3))

        def from_slots(slots):
            return ops.reshape(slots, pool, block, kv_heads, ops.size(slots, 2))

        return capacity, ops.reshape(slots, batch, capacity), kv_heads, to_slots, from_slots
    if x.cu_seqlens is not None:
        start, length = _spans(ops, x.cu_seqlens, ops.size(cache, 1))
        longest = ops.Max(ops.ReduceMax(length, [0]), [1])
        slots = ops.Add(ops.Unsqueeze(start, [1]), ops.range(longest))

        def swap(cache):
            return ops.Transpose(cache, perm=[1, 0, 2])

        return ops.Unsqueeze(length, [1]), slots, ops.size(cache, 0), swap, swap
    kv_heads, capacity = ops.size(cache, 1), ops.size(cache, 2)
    slots = ops.Add(ops.Mul(ops.Unsqueeze(ops.range(batch), [1]), capacity), ops.range(capacity))

    def to_slots(cache):
        by_token = ops.Transpose(cache, perm=[0, 2, 1, 3])
        return ops.reshape(by_token, ops.Mul(batch, capacity), kv_heads, ops.size(cache, 3))

    def from_slots(slots):
        by_token = ops.reshape(slots, batch, capacity, kv_heads, ops.size(slots, 2))
        return ops.Transpose(by_token, perm=[0, 2, 1, 3])

    return capacity, slots, kv_heads, to_slots, from_slots


def _rotated(ops, rows, x, a, positions, heads):
    """rows, float32 with an axis of heads at `heads`, after the rotary encoding of positions [B,Nq]; rounded to T."""
    last = ops.Sub(ops.size(x.cos_cache, 0), 1)
    cos, sin = (
        ops.Unsqueeze(ops.Gather(table, ops.clamped(positions, last), axis=0), [heads]) for table in (x.cos_cache, x.sin_cache)
    )
    half = ops.size(x.cos_cache, 1)
    end = ops.Mul(half, 2)
    if a.rotary_interleaved:
        first, second = (ops.Slice(rows, [start], end, [3], [2]) for start in (0, 1))
    else:
        first, second = ops.Slice(rows, [0], half, [3]), ops.Slice(rows, half, end, [3])
    pair = ops.Sub(ops.Mul(first, cos), ops.Mul(second, sin)), ops.Add(ops.Mul(second, cos), ops.Mul(first, sin))
    if a.rotary_interleaved:
        stacked = ops.Concat(*(ops.Unsqueeze(t, [4]) for t in pair), axis=4)
        pair = (ops.reshape(stacked, ops.Shape(rows, end=3), end),)
    rotated = ops.Concat(*pair, ops.Slice(rows, end, [2**31], [3]), axis=3)
    return ops.float(ops.CastLike(rotated, x.query))


class _PackedRows:
    """Between packed new tokens and rows [B,longest,...], of which those past a request's tokens are padding."""

    def __init__(self, ops, x, layout):
        self.ops, self.axis = ops, 0 if layout == "bnhd" else 1
        self.tokens = ops.size(x.query, self.axis)
        begins_at_0 = ops.Concat(ops.constant([0]), ops.Slice(ops.int64(x.cu_query_lens), [1], [2**31], [0]), axis=0)
        start, self.counts = _spans(ops, begins_at_0, self.tokens)
        rows = ops.range(ops.Max(ops.ReduceMax(self.counts, [0]), [1]))
        at = ops.Add(ops.Unsqueeze(start, [1]), rows)
        self.source = ops.Min(at, ops.Sub(self.tokens, 1))
        self.target = ops.Where(ops.Less(rows, ops.Unsqueeze(self.counts, [1])), at, self.tokens)

    def spread(self, x):
        """[H,Nq,W] or [Nq,H,W] as [B,H,longest,W] or [B,longest,H,W]."""
        rows = self.ops.Gather(x, self.source, axis=self.axis)
        return rows if self.axis == 0 else self.ops.Transpose(rows, perm=[1, 0, 2, 3])

    def join(self, x, fill, rank):
        """The inverse for an output with `rank` axes; rows of no request become `fill`."""
        ops, order = self.ops, [0, 2, 1, 3][:rank]
        by_token = x if self.axis == 0 else ops.Transpose(x, perm=order)
        row = ops.Shape(by_token, start=2)
        empty = ops.Expand(fill, ops.Concat(ops.Add(self.tokens, 1), row, axis=0))  # float32: bfloat16 has no kernel of it
        empty = ops.CastLike(empty, by_token)
        joined = ops.take(ops.ScatterND(empty, ops.Unsqueeze(self.target, [2]), by_token), 0, self.tokens)
        return joined if self.axis == 0 else ops.Transpose(joined, perm=[1, 0, 2][: rank - 1])


FORMS = {"int8": (-128.0, 127.0), "float8e4m3fn": (-448.0, 448.0), "uint8": (-8.0, 7.0)}  # of caches; least and largest number


def _numbers(ops, cache, form):
    """The numbers of a cache, or of weights, as floats [...,D]. form: their type in the schema; uint8 holds two int4."""
    cache = ops.float(cache)
    if form != "uint8":
        return cache
    high = ops.Floor(ops.Div(cache, 16.0))
    halves = [ops.Unsqueeze(half, [-1]) for half in (ops.Sub(cache, ops.Mul(high, 16.0)), high)]
    width = ops.Mul(ops.Shape(cache, start=-1), 2)
    return ops.Sub(ops.reshape(ops.Concat(*halves, axis=-1), ops.Shape(cache, end=-1), width), 8.0)


def _of_form(ops, numbers, cache, form):
    """The inverse, in the type of `cache`."""
    if form == "uint8":
        pairs = ops.reshape(ops.Add(numbers, 8.0), ops.Shape(numbers, end=-1), ops.Div(ops.Shape(numbers, start=-1), 2), 2)
        low, high = (ops.Squeeze(half, [-1]) for half in ops.split_last(pairs, -1))
        numbers = ops.Add(low, ops.Mul(high, 16.0))
    return ops.CastLike(numbers, cache)


def _row_scales(ops, rows, form):
    """Of rows [...,D] their own scales [...,1]: the largest magnitude / the form's largest number; 0 for rows of tiny numbers,
    NaN for others than finite ones."""
    largest = ops.ReduceMax(ops.Abs(rows), [-1], keepdims=1)
    scale = ops.Where(ops.Less(largest, LEAST_MAGNITUDE), 0.0, ops.Div(largest, FORMS[form][1]))
    return ops.Add(scale, ops.sum(ops.Mul(rows, 0.0), -1))  # + NaN where there is one, or an infinity


def _quantised(ops, rows, scale, form):
    """rows / scale within the form's range and rounded to it, as floats; 0 where the scale is, and in integers where that is
    NaN."""
    quotient = ops.Where(ops.Equal(scale, 0.0), 0.0, ops.Div(rows, scale))
    nan = ops.IsNaN(quotient)
    held = ops.Clip(ops.Where(nan, 0.0, quotient), *FORMS[form])
    if form != "float8e4m3fn":
        return ops.Round(held)
    return ops.Where(nan, math.nan, ops.float(ops.Cast(held, to=ir.DataType.FLOAT8E4M3FN)))


def _lean_attention(ops, x, a, ranks):
    """Packed new tokens are spread to rows of padding, and the outputs packed again. Keys of several ranks count as if all had
    these."""
    if a.world != 1:
        _check_world("LeanAttention", a.world)
        alone = [SimpleNamespace(**{**vars(x), "sinks": None}), SimpleNamespace(**{**vars(a), "world": 1})]
        output, lse, *caches = _lean_attention(ops, *alone, ranks)
        of_ranks = ops.Add(lse, math.log(a.world))
        if x.sinks is None:
            return [output, of_ranks, *caches]
        sinks = x.sinks if a.layout == "bnhd" else ops.Unsqueeze(x.sinks, [1])
        nothing = ops.IsInf(lse)
        finite = ops.Where(nothing, 0.0, of_ranks)
        largest = ops.Max(finite, sinks)
        total = ops.Add(largest, ops.Log(ops.Add(ops.Exp(ops.Sub(finite, largest)), ops.Exp(ops.Sub(sinks, largest)))))
        share = ops.Where(nothing, 0.0, ops.Exp(ops.Sub(finite, total)))
        scaled = ops.CastLike(ops.Mul(ops.float(output), ops.Unsqueeze(share, [-1])), output)
        return [scaled, ops.Where(nothing, -math.inf, total), *caches]
    if x.cu_query_lens is None:
        return _lean_attention_of_rows(ops, x, a, ranks)
    rows = _PackedRows(ops, x, a.layout)
    spread = {name: rows.spread(getattr(x, name)) for name in ("query", "new_key", "new_value") if getattr(x, name) is not None}
    padded = SimpleNamespace(**{**vars(x), **spread, "query_lens": rows.counts})
    output, lse, *caches = _lean_attention_of_rows(ops, padded, a, ranks)
    return [rows.join(output, 0.0, 4), rows.join(lse, -math.inf, 3), *caches]


def _lean_attention_of_rows(ops, x, a, ranks):
    """Reads every cache through one table of slots. Two rows of zeros follow the slots: what is not visible reads the
    first, so that whatever the cache holds there cannot leak; new rows that are padding are written to the second."""
    forms = [a.types.get(name, "int8") for name in ("key_cache", "value_cache")]
    # onnxruntime has not even Shape for float8e4m3fn: from here on they are floats.
    caches = [_numbers(ops, cache, form) for cache, form in zip((x.key_cache, x.value_cache), forms)]
    capacity, slots, kv_heads, to_slots, from_slots = _cache_slots(ops, x, caches[0], ops.size(x.query, 0))
    query, new_rows = x.query, [x.new_key, x.new_value]
    if a.packed_qkv:
        heads_axis = 2 if a.layout == "bnhd" else 1
        heads = ops.Sub(ops.size(query, heads_axis), ops.Mul(kv_heads, 2))
        query, *new_rows = ops.Split(query, ops.Concat(heads, kv_heads, kv_heads, axis=0), axis=heads_axis, outputs=3)
    query = _swapped(ops, ops.float(query), a.layout)
    batch, heads, tokens, width = (ops.size(query, axis) for axis in range(4))
    group = ops.Div(heads, kv_heads)

    def per_request(lens, absent):
        return ops.Expand(absent, ops.dims(batch, 1)) if lens is None else ops.Unsqueeze(ops.int64(lens), [1])

    lengths = ops.clamped(per_request(x.seq_lens, capacity), capacity)
    counts = ops.clamped(per_request(x.query_lens, tokens), ops.Min(tokens, lengths))
    first = ops.Sub(lengths, counts)  # the position of a request's row 0
    rows, positions = ops.range(tokens), ops.range(ops.size(slots, 1))
    if x.cos_cache is not None:
        query = _rotated(ops, query, x, a, ops.Add(first, rows), 1)
    is_row = ops.Less(rows, counts)  # [B,Nq]
    valid = ops.And(ops.Less(positions, lengths), ops.GreaterOrEqual(slots, 0))  # [B,S]
    if a.window != -1:
        valid = ops.And(valid, ops.Greater(positions, ops.Sub(first, a.window)))

    caches = [to_slots(cache) for cache in caches]
    slot_count = ops.size(caches[0], 0)
    caches = [ops.add_rows(cache, 0, 2) for cache in caches]
    scales, per_token = [x.key_scale, x.value_scale], [a.key_per_token, a.value_per_token]
    for i in (0, 1):
        if per_token[i]:  # a cache of rows of one column
            scales[i] = ops.add_rows(to_slots(ops.Unsqueeze(scales[i], [-1])), 0, 2)
    if a.append:
        last = ops.Sub(ops.size(slots, 1), 1)
        target = ops.GatherElements(slots, ops.Min(ops.Add(first, rows), last), axis=1)
        target = ops.Where(ops.And(is_row, ops.GreaterOrEqual(target, 0)), target, ops.Add(slot_count, 1))
        for i, new in enumerate(new_rows):
            by_token = ops.float(new) if a.layout == "bnhd" else ops.Transpose(ops.float(new), perm=[0, 2, 1, 3])
            if i == 0 and x.cos_cache is not None:
                by_token = _rotated(ops, by_token, x, a, ops.Add(first, rows), 2)
            scale = scales[i]
            if per_token[i]:
                scale = _row_scales(ops, by_token, forms[i])
                scales[i] = ops.ScatterND(scales[i], ops.Unsqueeze(target, [2]), scale)
            elif scale is not None:  # [Hkv,1,D] as [1,Hkv,D], [1] as it is
                scale = ops.Squeeze(scale, [1]) if ranks.get(("key_scale", "value_scale")[i]) == 3 else scale
            if scale is not None:
                by_token = _quantised(ops, by_token, scale, forms[i])
            caches[i] = ops.ScatterND(caches[i], ops.Unsqueeze(target, [2]), by_token)

    source = ops.Where(valid, slots, slot_count)
    keys, values = (  # [B,Hkv,S,W]
        ops.Transpose(ops.Gather(cache, source, axis=0), perm=[0, 2, 1, 3]) for cache in caches
    )
    for i, scale in enumerate(scales):
        if scale is not None:
            factor = ops.Transpose(ops.Gather(scale, source, axis=0), perm=[0, 2, 1, 3]) if per_token[i] else scale
            keys, values = (ops.Mul(keys, factor), values) if i == 0 else (keys, ops.Mul(values, factor))
    keys = ops.Unsqueeze(ops.Transpose(keys, perm=[0, 1, 3, 2]), [2])
    values = ops.Unsqueeze(values, [2])

    scale = a.scale or ops.Reciprocal(ops.Sqrt(ops.float(width)))
    scaled = ops.reshape(ops.Mul(query, scale), batch, kv_heads, group, tokens, width)
    logits = ops.MatMul(scaled, keys)  # [B,Hkv,G,Nq,S]
    if a.softcap:
        logits = ops.Mul(ops.Tanh(ops.Div(logits, a.softcap)), a.softcap)
    visible = ops.Unsqueeze(valid, [1])
    if a.causal:
        position = ops.Unsqueeze(ops.Add(first, rows), [2])
        visible = ops.And(visible, ops.LessOrEqual(positions, position))
        if a.window != -1:
            visible = ops.And(visible, ops.Greater(positions, ops.Sub(position, a.window)))
    logits = ops.Where(ops.Unsqueeze(visible, [1, 2]), logits, -math.inf)
    top = ops.ReduceMax(logits, [-1])
    if x.sinks is not None:
        sinks = ops.reshape(x.sinks, kv_heads, group, 1, 1)
        top = ops.Max(top, sinks)
    top = ops.Where(ops.Equal(top, -math.inf), 0.0, top)
    weights = ops.Exp(ops.Sub(logits, top))
    total = ops.sum(weights, -1)
    if x.sinks is not None:
        total = ops.Add(total, ops.Exp(ops.Sub(sinks, top)))
    none = ops.Equal(total, 0.0)  # not where it is NaN
    output = ops.MatMul(ops.Div(weights, ops.Where(none, 1.0, total)), values)
    lse = ops.Where(none, -math.inf, ops.Add(ops.Log(total), top))

    is_row = ops.Unsqueeze(is_row, [1, 2, 4])
    output = ops.reshape(ops.Where(is_row, output, 0.0), batch, heads, tokens, ops.size(values, 4))
    lse = ops.reshape(ops.Where(is_row, lse, -math.inf), batch, heads, tokens)
    results = [ops.CastLike(_swapped(ops, output, a.layout), x.query), _swapped(ops, lse, a.layout, 3)]
    if a.append:
        scale_caches = [ops.take(scale, 0, slot_count) for scale, own in zip(scales, per_token) if own]
        caches = [from_slots(ops.take(cache, 0, slot_count)) for cache in caches]
        like = x.key_cache, x.value_cache
        results += [_of_form(ops, cache, before, form) for cache, before, form in zip(caches, like, forms)]
        results += [ops.Squeeze(from_slots(scale), [-1]) for scale in scale_caches]
    return results


# The linear operators
#
# Inside, query is [Q,Hkv,G,N,R], key and value [Q,Hkv,1,N,W], log_decay [Q,Hkv,1,N,1] or None where there is no
# decay, and a state [Q,Hkv,1,R,Dv]. Rows of zeros behind the last token change nothing: their key is 0, their decay 1.


class _Requests:
    """Between the tokens of the batch and those of the requests, which differ where requests are packed."""

    def __init__(self, ops, cu_seqlens, tokens):
        self.ops, self.tokens, self.index = ops, tokens, None
        if cu_seqlens is not None:
            start, length = _spans(ops, cu_seqlens, tokens)
            positions = ops.range(ops.ReduceMax(length, [0]))
            start, length = ops.Unsqueeze(start, [1]), ops.Unsqueeze(length, [1])
            self.index = ops.Where(ops.Less(positions, length), ops.Add(start, positions), tokens)  # [Q,longest]

    def split(self, x):
        """[1,Hkv,G,N,W] to [Q,Hkv,G,longest,W], with zeros behind a request's last token."""
        if self.index is None:
            return x
        rows = self.ops.add_rows(self.ops.Squeeze(x, [0]), 2, 1)
        return self.ops.Transpose(self.ops.Gather(rows, self.index, axis=2), perm=[2, 0, 1, 3, 4])

    def join(self, x):
        """The other way; tokens of no request become 0."""
        if self.index is None:
            return x
        ops = self.ops
        rows = ops.Transpose(x, perm=[0, 3, 1, 2, 4])
        blank = ops.zeros(ops.Add(self.tokens, 1), ops.Shape(rows, start=2))
        rows = ops.ScatterND(blank, ops.Unsqueeze(self.index, [2]), rows)
        return ops.Unsqueeze(ops.Transpose(ops.take(rows, 0, self.tokens), perm=[1, 2, 0, 3]), [0])


def _grouped(ops, x, like):
    """[B,H,N,W] to [B,Hkv,G,N,W], where `like` has Hkv heads at axis 1."""
    heads = ops.size(like, 1)
    return ops.reshape(x, ops.size(x, 0), heads, ops.Div(ops.size(x, 1), heads), ops.Shape(x, start=2))


def _ungrouped(ops, x, layout):
    """[B,Hkv,G,N,W] to [B,H,N,W] in `layout`."""
    heads = ops.Mul(ops.size(x, 1), ops.size(x, 2))
    return _swapped(ops, ops.reshape(x, ops.size(x, 0), heads, ops.Shape(x, start=3)), layout)


def _token_inputs(ops, layout, query, key, value, *like_query):
    """query, key, value and further tensors with query's heads, at their inner shapes in float32."""
    query, key, value, *others = (_swapped(ops, ops.float(x), layout) for x in (query, key, value, *like_query))
    grouped = [_grouped(ops, x, key) for x in (query, *others)]
    return grouped[0], ops.Unsqueeze(key, [2]), ops.Unsqueeze(value, [2]), *grouped[1:]


def _of_states(ops, x, heads):
    """[B,h,N,W] to [B,Hv,max(h,Hv)/Hv,N,W], each of fewer heads than `heads`, which is Hv as an int64 [1], repeated."""
    batch, own, rest = ops.size(x, 0), ops.size(x, 1), ops.Shape(x, start=2)
    all_heads = ops.Max(own, heads)
    repeated = ops.Expand(ops.Unsqueeze(x, [2]), ops.dims(batch, own, ops.Div(all_heads, own), rest))
    return ops.reshape(repeated, batch, heads, ops.Div(all_heads, heads), rest)


def _state_inputs(ops, layout, query, key, value, *others):
    """query, key, value and further tensors, of heads that states may share, at their inner shapes in float32."""
    tensors = [_swapped(ops, ops.float(x), layout) for x in (query, key, value, *others)]
    heads = ops.size(tensors[2], 1)
    return [ops.Unsqueeze(x, [2]) if i == 2 else _of_states(ops, x, heads) for i, x in enumerate(tensors)]


def _summed_heads(ops, x, like, layout):
    """[B,Hv,G,N,W] to [B,h,N,W] in `layout`, of as many heads as `like` has: the sums over those that share one."""
    heads = ops.size(like, 1 if layout == "bhnd" else 2)
    shared = ops.Div(ops.Mul(ops.size(x, 1), ops.size(x, 2)), heads)
    apart = ops.reshape(x, ops.size(x, 0), heads, shared, ops.Shape(x, start=3))
    return _swapped(ops, ops.sum(apart, 2, keepdims=0), layout)


def _with_ones(ops, x):
    """[B,Hkv,G,N,W] with one more column, of ones."""
    return ops.Concat(x, ops.Expand(1.0, ops.dims(ops.Shape(x, end=4), 1)), axis=4)


def _log_decay(ops, log_decay, rank, layout, key):
    """log_decay, or another number a token and state, at its inner shape; `key` is at its own."""
    if log_decay is None:
        return None
    if rank == 4:
        return ops.Unsqueeze(_swapped(ops, log_decay, layout), [2])
    if rank == 3:
        return ops.Unsqueeze(_swapped(ops, log_decay, layout, 3), [2, 4])
    sizes = ops.dims(ops.Shape(key, end=4), 1)
    return ops.Expand(ops.Unsqueeze(log_decay, [1, 2, 3]), sizes)


class _Chunks:
    """Tokens in chunks of at most 64, and the masks of a chunk: pairs on and below the diagonal, and below it.

    Masks select, they do not multiply: above the diagonal a score may be infinite.
    """

    def __init__(self, ops, key):
        self.ops, self.tokens = ops, ops.size(key, _TOKENS)
        tokens = ops.Max(self.tokens, 1)  # packed requests may all be empty
        self.length = ops.Min(tokens, CHUNK)
        self.count = ops.Div(ops.Add(tokens, ops.Sub(self.length, 1)), self.length)
        rows = ops.range(self.length)
        columns, rows = rows, ops.Unsqueeze(rows, [1])
        self.lower, self.below = ops.GreaterOrEqual(rows, columns), ops.Greater(rows, columns)  # [C,C]

    def split(self, x):
        """[Q,Hkv,G,N,W] to [Q,Hkv,G,chunks,C,W], padded with zeros."""
        ops = self.ops
        padding = ops.Sub(ops.Mul(self.count, self.length), self.tokens)
        sizes = ops.Shape(x, end=_TOKENS), self.count, self.length, ops.Shape(x, start=_TOKENS + 1)
        return ops.reshape(ops.add_rows(x, _TOKENS, padding), *sizes)

    def join(self, x):
        ops = self.ops
        sizes = ops.Shape(x, end=_TOKENS), ops.Mul(self.count, self.length), ops.Shape(x, start=_TOKENS + 2)
        return ops.take(ops.reshape(x, *sizes), _TOKENS, self.tokens)

    def decays(self, ops, log_decay):
        """For a chunk's log_decay [Q,Hkv,1,C,1]: M_ij on and below the diagonal [..,C,C]; what is left at token i of
        the state before the chunk, and after the chunk of what token j wrote [..,C,1]; and after it of that state.

        Exponentials of sums, never of differences of sums: no exponent is positive, and a decay of 0 (-inf) is exact.
        """
        if log_decay is None:
            return None, None, None, None
        mask = ops.CumSum(ops.Where(self.below, log_decay, 0.0), -2)
        later = ops.CumSum(log_decay, -2, exclusive=1, reverse=1)
        return tuple(ops.Exp(x) for x in (mask, ops.CumSum(log_decay, -2), later, ops.sum(log_decay, -2)))


def _times(ops, x, factor):
    return x if factor is None else ops.Mul(factor, x)


def _masked_product(ops, weights, x, later=False):
    """weights [..,C,C] @ x [..,C,W], for weights that are 0 above the diagonal, or with `later` below it. What is not finite
    in x becomes NaN in its own column of the rows that see it, and stays away from the others, where 0 times it would not."""
    finite = ops.Less(ops.Abs(x), math.inf)
    spread = ops.CumSum(ops.Where(finite, 0.0, math.nan), -2, reverse=int(later))
    return ops.Add(ops.MatMul(weights, ops.Where(finite, x, 0.0)), spread)


def _linear_attention(ops, query, key, value, log_decay, state):
    """((Q Kᵀ) ⊙ M) V from `state` on; returns it and the state after the last token."""
    chunks = _Chunks(ops, key)

    def step(ops, states, slices):
        (state,), (q, k, v, g) = states, slices
        mask, prefix, suffix, kept = chunks.decays(ops, g)
        scores = ops.Where(chunks.lower, _times(ops, ops.MatMul(q, ops.transposed(k)), mask), 0.0)
        output = ops.Add(_masked_product(ops, scores, v), _times(ops, ops.MatMul(q, state), prefix))
        added = ops.MatMul(ops.transposed(_times(ops, k, suffix)), v)
        return [ops.Add(_times(ops, state, kept), added)], [output]

    tensors = [x and chunks.split(x) for x in (query, key, value, log_decay)]
    (state,), (output,) = ops.scan(step, [state], tensors)
    return chunks.join(output), state


def _linear_attention_grad(ops, query, key, value, log_decay, do, state, ds, with_decay=False):
    """Gradients of _linear_attention: dq, dk, dv, dlog_decay (None unless with_decay) and that of the first state.

    `do` and `ds` are those of the output and of the last state. One Scan finds the state before every chunk, one from
    the last chunk to the first carries `ds` through the equations of reference.causal_linear_decay_grad.
    """
    chunks = _Chunks(ops, key)
    q, k, v, g, do = (x and chunks.split(x) for x in (query, key, value, log_decay, do))

    def forward(ops, states, slices):
        (state,), (k, v, g) = states, slices
        _, _, suffix, kept = chunks.decays(ops, g)
        added = ops.MatMul(ops.transposed(_times(ops, k, suffix)), v)
        return [ops.Add(_times(ops, state, kept), added)], [state]

    def backward(ops, states, slices):
        (ds,), (q, k, v, g, do, state) = states, slices
        mask, prefix, suffix, kept = chunks.decays(ops, g)
        scores = ops.Where(chunks.lower, ops.MatMul(q, ops.transposed(k)), 0.0)
        dscores = ops.Where(chunks.lower, _times(ops, ops.MatMul(do, ops.transposed(v)), mask), 0.0)
        weights = _times(ops, scores, mask)
        dq = ops.Add(_masked_product(ops, dscores, k), _times(ops, ops.MatMul(do, ops.transposed(state)), prefix))
        dk = ops.Add(
            ops.sum(_masked_product(ops, ops.transposed(dscores), q, later=True), 2),
            _times(ops, ops.MatMul(v, ops.transposed(ds)), suffix),
        )
        from_state = _times(ops, ops.MatMul(k, ds), suffix)
        dv = ops.Add(ops.sum(_masked_product(ops, ops.transposed(weights), do, later=True), 2), from_state)
        outputs = [dq, dk, dv]
        if with_decay:
            # Decay t is a factor of what row i >= t takes from key j < t (pairs) and from the state before the chunk
            # (rows), of what the state after the chunk keeps of key j < t (keys) and of the state before (whole).
            pairs = ops.sum(ops.Mul(dscores, scores), 2)
            rows = ops.sum(ops.Mul(ops.Mul(prefix, ops.MatMul(q, state)), do), 2, 4)
            keys = ops.sum(ops.Mul(from_state, v), 4)
            whole = ops.Mul(kept, ops.sum(ops.Mul(state, ds), 3, 4))
            pairs = ops.Where(chunks.below, ops.CumSum(pairs, -2, reverse=1), 0.0)
            dg = ops.Add(ops.sum(pairs, 4), ops.CumSum(rows, -2, reverse=1))
            outputs.append(ops.Add(dg, ops.Add(ops.CumSum(keys, -2, exclusive=1), whole)))
        ds = ops.Add(_times(ops, ds, kept), ops.sum(ops.MatMul(ops.transposed(_times(ops, q, prefix)), do), 2))
        return [ds], outputs

    _, (states,) = ops.scan(forward, [state], [k, v, g])
    (ds,), grads = ops.scan(backward, [ds], [q, k, v, g, do, states], reverse=True)
    dq, dk, dv, *dg = (chunks.join(x) for x in grads)
    return dq, dk, dv, dg[0] if with_decay else None, ds


# CausalLinearDecay


def _token_scan(ops, step, state, tokens):
    """The output and the last state of a Scan with a step a token, of which `tokens` are at their inner shapes."""
    # One more token of zeros: packed requests may all be empty, and a Scan takes a step at least.
    count = ops.size(tokens[1], _TOKENS)
    sequences = [t and ops.Unsqueeze(ops.add_rows(t, _TOKENS, 1), [_TOKENS + 1]) for t in tokens]
    (final,), (output,) = ops.scan(step, [state], sequences)
    return ops.take(ops.Squeeze(output, [_TOKENS + 1]), _TOKENS, count), final


def _decayed_rows(ops, state, log_decay):
    """A state [..,R,Dv] after a token's decay [..,1,R] or [..,1,1]; None: none."""
    return state if log_decay is None else ops.Mul(ops.Exp(ops.transposed(log_decay)), state)


def _key_decays(ops, query, key, value, log_decay, state):
    """_linear_attention with decays of key dimensions, token by token."""

    def step(ops, states, slices):
        (state,), (q, k, v, g) = states, slices
        state = ops.Add(_decayed_rows(ops, state, g), ops.Mul(ops.transposed(k), v))
        return [state], [ops.MatMul(q, state)]

    return _token_scan(ops, step, state, [query, key, value, log_decay])


def _turned(ops, state, v_first):
    """A state [..,R,Dv], or [..,Dv,R] where v_first says so, in the other order."""
    return ops.Transpose(state, perm=[0, 1, 3, 2]) if v_first and state is not None else state


def _inner_state(ops, state, like, value):
    """A given state [Q,Hkv,R,W] or zeros, for keys `like` and values `value`, at its inner shape."""
    if state is not None:
        return ops.Unsqueeze(state, [2])
    return ops.zeros(ops.Shape(like, end=3), ops.size(like, 4), ops.size(value, 4))


def _pool_rows(ops, pool, state_index):
    """The pool with a row of zeros behind it, which stands for every row that it does not have, and the row of each request."""
    count, index = ops.size(pool, 0), ops.int64(state_index)
    inside = ops.And(ops.GreaterOrEqual(index, 0), ops.Less(index, count))
    return ops.add_rows(pool, 0, 1), ops.Where(inside, index, count)


def _causal_linear_decay(ops, x, a, ranks):
    query, key, value = _state_inputs(ops, a.layout, x.query, x.key, x.value)
    log_decay = _log_decay(ops, x.log_decay, ranks.get("log_decay"), a.layout, value)
    if x.beta is not None:
        key = ops.Mul(key, _log_decay(ops, x.beta, 3, a.layout, value))
    pool = _turned(ops, x.initial_state and ops.float(x.initial_state), a.state_v_first)
    if a.normalize:  # the normaliser is one more column of value, which is 1, and of the state
        value = _with_ones(ops, value)
        pool = pool and ops.Concat(pool, ops.Unsqueeze(x.initial_norm, [3]), axis=3)
    requests = _Requests(ops, x.cu_seqlens, ops.size(key, _TOKENS))
    query, key, value, log_decay = (t and requests.split(t) for t in (ops.Mul(query, a.scale), key, value, log_decay))
    state = pool
    if x.state_index is not None:
        count = ops.size(pool, 0)
        pool, index = _pool_rows(ops, pool, x.state_index)
        state = ops.Gather(pool, index, axis=0)
    attend = _key_decays if ranks.get("log_decay") == 4 else _linear_attention
    output, final = attend(ops, query, key, value, log_decay, _inner_state(ops, state, key, value))
    if a.normalize:
        output, normalizer = ops.split_last(output, 4)
        output = ops.Div(output, _away_from_zero(ops, normalizer, a.eps))
    results = [ops.CastLike(_ungrouped(ops, requests.join(output), a.layout), x.query)]
    if a.return_state:
        final = ops.Squeeze(final, [2])
        if x.state_index is not None:
            final = ops.take(ops.ScatterND(pool, ops.Unsqueeze(index, [1]), final), 0, count)
        norm = []
        if a.normalize:
            final, norm = ops.split_last(final, 3)
            norm = [ops.Squeeze(norm, [3])]
        final = _turned(ops, final, a.state_v_first)
        results += [final if x.initial_state is None else ops.CastLike(final, x.initial_state), *norm]
    return results


def _causal_linear_decay_grad(ops, x, a, ranks):
    query, key, value, do = _state_inputs(ops, a.layout, x.query, x.key, x.value, x.grad_output)
    log_decay = _log_decay(ops, x.log_decay, ranks.get("log_decay"), a.layout, value)
    requests = _Requests(ops, x.cu_seqlens, ops.size(key, _TOKENS))
    tensors = [t and requests.split(t) for t in (ops.Mul(query, a.scale), key, value, log_decay, do)]
    states = [
        _inner_state(ops, _turned(ops, s, a.state_v_first), tensors[1], value) for s in (x.initial_state, x.grad_final_state)
    ]
    if ranks.get("log_decay") == 4:
        q, k, v, g, do = tensors
        grads, ds = _delta_backward(ops, [q, k, v, None, g], do, *states, per_key=True)
    else:
        *grads, ds = _linear_attention_grad(ops, *tensors, *states, with_decay=a.grad_decay)
    dq, dk, dv, dg = (t and requests.join(t) for t in grads)
    own = (ops.Mul(dq, a.scale), x.query), (dk, x.key), (dv, x.value)
    results = [ops.CastLike(_summed_heads(ops, t, like, a.layout), x.query) for t, like in own]
    if a.grad_decay and ranks["log_decay"] == 3:
        results.append(_swapped(ops, ops.Squeeze(dg, [2, 4]), a.layout, 3))
    elif a.grad_decay and ranks["log_decay"] == 4:
        results.append(_swapped(ops, ops.Squeeze(dg, [2]), a.layout))
    elif a.grad_decay:
        results.append(ops.sum(dg, 0, 2, 3, 4, keepdims=0))
    if a.grad_state:
        results.append(_turned(ops, ops.Squeeze(ds, [2]), a.state_v_first))
    return results


# GatedDeltaRule


def _delta_unit_rows(ops, x):
    return ops.Div(x, ops.Sqrt(ops.Add(ops.ReduceSumSquare(x, [-1]), DELTA_ROW_EPS)))


def _delta_tokens(ops, x, a, ranks):
    """query and key, of unit length where that is asked for, and the tokens' inputs at their inner shapes: query times scale,
    key, value, beta, log_decay."""
    query, key, value = (_swapped(ops, ops.float(t), a.layout) for t in (x.query, x.key, x.value))
    if a.normalize_qk:
        query, key = _delta_unit_rows(ops, query), _delta_unit_rows(ops, key)
    heads = ops.size(value, 1)
    beta = ops.Unsqueeze(_swapped(ops, x.beta, a.layout, 3), [2, 4])
    decay = None
    if x.log_decay is not None:
        per_key = ranks["log_decay"] == 4
        decay = ops.Unsqueeze(_swapped(ops, x.log_decay, a.layout, ranks["log_decay"]), [2] if per_key else [2, 4])
    scaled = ops.Mul(query, _delta_scale(ops, query, a))
    return query, key, [_of_states(ops, scaled, heads), _of_states(ops, key, heads), ops.Unsqueeze(value, [2]), beta, decay]


def _delta_scale(ops, query, a):
    return a.scale or ops.Div(1.0, ops.Sqrt(ops.float(ops.Squeeze(ops.size(query, 3), [0]))))


def _gated_delta_rule(ops, x, a, ranks):
    _, key, tokens = _delta_tokens(ops, x, a, ranks)
    requests = _Requests(ops, x.cu_seqlens, ops.size(key, 2))
    tokens = [t and requests.split(t) for t in tokens]  # rows of zeros leave a state as it is
    state = pool = _turned(ops, x.initial_state, a.state_v_first)
    if x.state_index is not None:
        pool, index = _pool_rows(ops, pool, x.state_index)
        state = ops.Gather(pool, index, axis=0)
    state = _inner_state(ops, state, tokens[1], tokens[2])

    def step(ops, states, slices):
        (state,), (q, k, v, b, decay) = states, slices
        state = _decayed_rows(ops, state, decay)
        missing = ops.Mul(b, ops.Sub(v, ops.MatMul(k, state)))
        state = ops.Add(state, ops.Mul(ops.transposed(k), missing))
        return [state], [ops.MatMul(q, state)]

    output, final = _token_scan(ops, step, state, tokens)
    results = [ops.CastLike(_ungrouped(ops, requests.join(output), a.layout), x.query)]
    if a.return_state:
        final = ops.Squeeze(final, [2])
        if x.state_index is not None:
            final = ops.take(ops.ScatterND(pool, ops.Unsqueeze(index, [1]), final), 0, ops.size(x.initial_state, 0))
        results.append(_turned(ops, final, a.state_v_first))
    return results


def _delta_backward(ops, tokens, do, state, ds, per_key):
    """Gradients of the delta rule's tokens (see _delta_tokens) and of its first state, for those of the output and of the last
    state. per_key: log_decay is of key dimensions. Without beta there is no rule: values are what is added.

    One Scan finds the state before every chunk, one goes from the last chunk to the first; in each a Scan goes token by token,
    so that no more states are held than a chunk has tokens."""
    chunks = _Chunks(ops, tokens[1])
    tokens = [t and chunks.split(t) for t in (*tokens, do)]

    def rows(ops, sequences):
        return [t and ops.Unsqueeze(t, [_TOKENS + 1]) for t in sequences]

    def forward(ops, states, slices):
        def step(ops, states, slices):
            (state,), (k, v, b, g) = states, slices
            kept = _decayed_rows(ops, state, g)
            update = v if b is None else ops.Mul(b, ops.Sub(v, ops.MatMul(k, kept)))
            return [ops.Add(kept, ops.Mul(ops.transposed(k), update))], [kept]

        last, kept = ops.scan(step, states, rows(ops, slices))
        return last, kept

    def borders(ops, states, slices):
        return forward(ops, states, slices)[0], states

    def backward(ops, states, slices):
        def step(ops, states, slices):
            (ds,), (q, k, v, b, g, do, kept) = states, slices
            missing = v if b is None else ops.Sub(v, ops.MatMul(k, kept))
            update = missing if b is None else ops.Mul(b, missing)
            state = ops.Add(kept, ops.Mul(ops.transposed(k), update))
            ds = ops.Add(ds, ops.sum(ops.Mul(ops.transposed(q), do), 2))
            du = dv = ops.MatMul(k, ds)
            dk = ops.MatMul(update, ops.transposed(ds))
            outputs = [ops.MatMul(do, ops.transposed(state))]
            if b is None:
                outputs += [dk, dv]
            else:
                dv = ops.Mul(b, du)
                dk = ops.Sub(dk, ops.MatMul(dv, ops.transposed(kept)))
                outputs += [dk, dv, ops.sum(ops.Mul(du, missing), 4)]
                ds = ops.Sub(ds, ops.Mul(ops.transposed(k), dv))
            if g is not None:
                outputs.append(ops.transposed(ops.sum(ops.Mul(kept, ds), *(4,) if per_key else (3, 4))))
            return [_decayed_rows(ops, ds, g)], outputs

        *tokens, border = slices
        _, (kept,) = forward(ops, [border], tokens[1:5])
        states, grads = ops.scan(step, states, [*rows(ops, tokens), kept], reverse=True)
        return states, [ops.Squeeze(grad, [_TOKENS + 1]) for grad in grads]

    _, (states,) = ops.scan(borders, [state], tokens[1:5])
    (ds,), grads = ops.scan(backward, [ds], [*tokens, states], reverse=True)
    return [chunks.join(grad) for grad in grads], ds


def _gated_delta_rule_grad(ops, x, a, ranks):
    query, key, tokens = _delta_tokens(ops, x, a, ranks)
    do = _swapped(ops, ops.float(x.grad_output), a.layout)
    heads = ops.size(tokens[2], 1)
    requests = _Requests(ops, x.cu_seqlens, ops.size(key, 2))
    *tokens, do = (t and requests.split(t) for t in (*tokens, _of_states(ops, do, heads)))
    states = [
        _inner_state(ops, _turned(ops, s, a.state_v_first), tokens[1], tokens[2]) for s in (x.initial_state, x.grad_final_state)
    ]
    grads, ds = _delta_backward(ops, tokens, do, *states, per_key=ranks.get("log_decay") == 4)
    dq, dk, dv, db, *dg = (_ungrouped(ops, requests.join(grad), "bhnd") for grad in grads)
    dq, dk = ops.Mul(_over_heads(ops, dq, query), _delta_scale(ops, query, a)), _over_heads(ops, dk, key)
    if a.normalize_qk:
        dq, dk = (
            _delta_unit_rows_grad(ops, _swapped(ops, ops.float(t), a.layout), unit, grad)
            for t, unit, grad in ((x.query, query, dq), (x.key, key, dk))
        )
        if x.cu_seqlens is not None:  # tokens of no request may be NaN
            ones = ops.Expand(1.0, ops.dims(ops.Shape(tokens[1], end=1), 1, 1, ops.size(tokens[1], _TOKENS), 1))
            inside = ops.Greater(ops.Squeeze(requests.join(ones), [2]), 0.0)
            dq, dk = ops.Where(inside, dq, 0.0), ops.Where(inside, dk, 0.0)
    results = [ops.CastLike(_swapped(ops, t, a.layout), x.query) for t in (dq, dk, dv)]
    results.append(_swapped(ops, ops.Squeeze(db, [3]), a.layout, 3))
    if a.grad_decay:
        rank = ranks["log_decay"]
        results.append(_swapped(ops, dg[0] if rank == 4 else ops.Squeeze(dg[0], [3]), a.layout, rank))
    if a.grad_state:
        results.append(_turned(ops, ops.Squeeze(ds, [2]), a.state_v_first))
    return results


def _over_heads(ops, x, like):
    """[B,H,N,W] summed to the heads of `like` [B,h,N,W]."""
    return ops.sum(_grouped(ops, x, like), 2, keepdims=0)


def _delta_unit_rows_grad(ops, x, unit, grad):
    """The gradient of x, for that of `unit` = _delta_unit_rows(x)."""
    along = ops.sum(ops.Mul(unit, grad), -1)
    length = ops.Sqrt(ops.Add(ops.ReduceSumSquare(x, [-1]), DELTA_ROW_EPS))
    return ops.Div(ops.Sub(grad, ops.Mul(unit, along)), length)


# CausalConv


def _columns(ops, x, columns, first, count):
    """With columns, so many of x from `first` on."""
    return ops.Slice(x, [first], ops.Add(count, first), [-1]) if columns else x


def _causal_conv(ops, x, a, ranks):
    """Gathers the K + 1 tokens that a token's sum is of, from the state and the tokens behind it."""
    tokens, channels = ops.size(x.input, 1), ops.size(x.weight, 1)
    given, weight = ops.float(_columns(ops, x.input, a.columns, a.first_column, channels)), ops.float(x.weight)
    past = ops.Sub(ops.size(weight, 0), 1)
    index = None
    if x.cu_seqlens is not None:  # requests as rows of a batch
        start, counts = _spans(ops, x.cu_seqlens, tokens)
        longest = ops.range(ops.ReduceMax(counts, [0]))
        counts = ops.Unsqueeze(counts, [1])
        index = ops.Where(ops.Less(longest, counts), ops.Add(ops.Unsqueeze(start, [1]), longest), tokens)  # [Q,longest]
        given = ops.Gather(ops.Squeeze(ops.add_rows(given, 1, 1), [0]), index, axis=0)
    elif x.query_lens is not None:
        counts = ops.clamped(ops.Unsqueeze(ops.int64(x.query_lens), [1]), tokens)
    else:
        counts = ops.Expand(tokens, ops.dims(ops.size(given, 0), 1))
    pool = state = x.initial_state
    if x.state_index is not None:
        pool, rows = _pool_rows(ops, pool, x.state_index)
        state = ops.Gather(pool, rows, axis=0)
    elif pool is None:
        state = ops.zeros(ops.size(given, 0), past, channels)
    known = ops.Concat(state, given, axis=1)  # token i at past + i
    own = ops.range(ops.size(given, 1))
    windows = ops.Gather(known, ops.Add(ops.Unsqueeze(own, [1]), ops.range(ops.Add(past, 1))), axis=1)  # [B,N,K+1,C]
    output = ops.sum(ops.Mul(windows, weight), 2, keepdims=0)
    if x.bias is not None:
        output = ops.Add(output, ops.float(x.bias))
    if a.activation == "silu":
        output = _silu(ops, output)
    if index is not None:
        blank = ops.zeros(ops.Add(tokens, 1), channels)
        joined = ops.ScatterND(blank, ops.Unsqueeze(index, [2]), output)
        output = ops.Unsqueeze(ops.take(joined, 0, tokens), [0])
    elif x.query_lens is not None:
        output = ops.Where(ops.Unsqueeze(ops.Less(own, counts), [2]), output, 0.0)
    output = ops.CastLike(output, x.input)
    bounds = [0, a.first, a.first + a.second, a.first + a.second + a.third]
    parts = [ops.Slice(output, [i], [j], [2]) for i, j in itertools.pairwise(bounds)] if a.split else [output]
    results = [parts[0]]
    if a.return_state:
        last = ops.Unsqueeze(ops.Add(counts, ops.range(past)), [2])  # [B,K,1]
        final = ops.GatherND(known, last, batch_dims=1)
        if x.state_index is not None:
            scattered = ops.ScatterND(pool, ops.Unsqueeze(rows, [1]), final)
            final = ops.take(scattered, 0, ops.size(x.initial_state, 0))
        results.append(final)
    return [*results, *parts[1:]]


# NormalizedLinearAttention
#
# With x = [b q, a], y = [k, 1] and z = [v, 1] a score a + b q.k is x.y, f and g are columns of one product, and a state
# [D+1,Dv+1] holds Σ kᵀv, Σ k in its last column, Σ v in its last row, and in the corner the number of tokens.


def _unit_rows(ops, x):
    norm = ops.ReduceL2(x, [-1])
    norm = ops.Where(ops.Less(norm, UNIT_ROW_EPS), UNIT_ROW_EPS, norm)  # NaN stays NaN
    return ops.Div(x, norm), norm


def _normalized_inputs(ops, x, a, *like_query):
    """query and key, in unit rows if so asked, their norms, x, y and z, and further tensors with query's heads."""
    query, key, value, *others = _token_inputs(ops, a.layout, x.query, x.key, x.value, *like_query)
    norms = None
    if a.normalize_qk:
        (query, query_norm), (key, key_norm) = _unit_rows(ops, query), _unit_rows(ops, key)
        norms = query_norm, key_norm
    both = _with_ones(ops, query)
    if x.coefficients is not None:
        constant, slope = ops.split_last(x.coefficients, 0)
        factors = ops.Concat(ops.Expand(slope, ops.size(query, 4)), constant, axis=0)
        both = ops.Mul(both, factors)
    return query, key, norms, both, _with_ones(ops, key), _with_ones(ops, value), *others


def _normalized_linear_attention(ops, x, a, ranks):
    _, key, _, left, right, value = _normalized_inputs(ops, x, a)
    state = None
    if x.initial_state is not None:
        sums = ops.Concat(x.initial_state, ops.Unsqueeze(x.initial_key_sum, [3]), axis=3)
        count = ops.Unsqueeze(ops.float(x.initial_count), [1, 2])
        count = ops.Expand(count, ops.dims(ops.Shape(x.initial_value_sum, end=2), 1))
        state = ops.Concat(sums, ops.Unsqueeze(ops.Concat(x.initial_value_sum, count, axis=2), [2]), axis=2)
    if a.causal:
        both, final = _linear_attention(ops, left, right, value, None, _inner_state(ops, state, right, value))
    else:
        both = ops.MatMul(left, ops.MatMul(ops.transposed(right), value))
    output, normalizer = ops.split_last(both, 4)
    output = ops.Div(output, _away_from_zero(ops, normalizer, a.eps))
    results = [
        ops.CastLike(_ungrouped(ops, output, a.layout), x.query),
        ops.Squeeze(_ungrouped(ops, normalizer, a.layout), [3]),
    ]
    if a.return_state:
        (state, key_sum), (value_sum, _) = (ops.split_last(part, 3) for part in ops.split_last(ops.Squeeze(final, [2]), 2))
        tokens = ops.Expand(ops.size(key, _TOKENS), ops.size(key, 0))
        if x.initial_count is not None:
            tokens = ops.Add(tokens, ops.int64(x.initial_count))
            last = 2**31 - 1  # where it stays; onnxruntime's Min (1.31) compares int64 as floats
            tokens = ops.Where(ops.Greater(tokens, last), last, tokens)
        results += [state, ops.Squeeze(key_sum, [3]), ops.Squeeze(value_sum, [2]), ops.Cast(tokens, to=ir.DataType.INT32)]
    return results


def _normalized_linear_attention_grad(ops, x, a, ranks):
    """The gradient of a score is w.v - r with w = do / g and r = o.w: the gradients of x, y and z are then those of
    plain linear attention, for an output gradient [w, -r]. Where |g| is held it is a constant, and r is 0."""
    query, key, norms, left, right, value, output, do = _normalized_inputs(ops, x, a, x.output, x.grad_output)
    normalizer = _swapped(ops, x.normalizer, a.layout, 3)
    normalizer = _grouped(ops, ops.Unsqueeze(normalizer, [3]), key)
    w = ops.Div(do, _away_from_zero(ops, normalizer, a.eps))
    r = ops.Where(ops.Less(ops.Abs(normalizer), a.eps), 0.0, ops.sum(ops.Mul(output, w), 4))
    do = ops.Concat(w, ops.Neg(r), axis=4)
    if a.causal:
        zeros = _inner_state(ops, None, right, value)
        dleft, dright, dvalue, _, _ = _linear_attention_grad(ops, left, right, value, None, do, zeros, zeros)
    else:
        state = ops.MatMul(ops.transposed(right), value)
        dstate = ops.sum(ops.MatMul(ops.transposed(left), do), 2)
        dleft = ops.MatMul(do, ops.transposed(state))
        dright, dvalue = ops.MatMul(value, ops.transposed(dstate)), ops.MatMul(right, dstate)
    (dq, da), (dk, _), (dv, _) = (ops.split_last(t, 4) for t in (dleft, dright, dvalue))
    dab = []
    if a.grad_coefficients:
        dab = [ops.Unsqueeze(ops.sum(t, 0, 1, 2, 3, 4, keepdims=0), [0]) for t in (da, ops.Mul(query, dq))]
    if x.coefficients is not None:
        dq = ops.Mul(dq, ops.split_last(x.coefficients, 0)[1])
    if a.normalize_qk:

        def through_unit_rows(dy, y, norm):
            along = ops.Where(ops.Greater(norm, UNIT_ROW_EPS), ops.sum(ops.Mul(y, dy), 4), 0.0)
            return ops.Div(ops.Sub(dy, ops.Mul(y, along)), norm)

        dq, dk = through_unit_rows(dq, query, norms[0]), through_unit_rows(dk, key, norms[1])
    grads = [ops.CastLike(_ungrouped(ops, t, a.layout), x.query) for t in (dq, dk, dv)]
    return [*grads, ops.Concat(*dab, axis=0)] if dab else grads


# Functions and models

# SampleTokens
#
# In the integers and the roundings of float32 that the kernels have, so that the tokens are theirs.


def _column(ops, tensor, absent, right=None):
    """A setting of the requests as [B,1]: `absent` where there is none and where right(tensor) does not hold."""
    if tensor is None:
        return ops.constant(absent)
    if right is not None:
        tensor = ops.Where(right(tensor), tensor, absent)
    return ops.Unsqueeze(tensor, [1])


def _finite(ops, tensor):
    return ops.Less(ops.Abs(tensor), math.inf)


def _halves(ops, number, bits):
    """(number / 2^bits, rest) of an int64 that is not negative."""
    return ops.Div(number, 1 << bits), ops.Mod(number, 1 << bits)


def _product(ops, factor, number):
    """(high, low) 32 bits of the product of two numbers of 32 bits, in int64: by halves of the second."""
    high, low = _halves(ops, number, 16)
    carry, rest = _halves(ops, ops.Mul(low, factor), 16)
    top, middle = _halves(ops, ops.Add(ops.Mul(high, factor), carry), 16)
    return top, ops.Add(ops.Mul(middle, 1 << 16), rest)


def _philox(ops, seed, position):
    """The first two words of Philox4x32-10, int64 [B]."""
    low = ops.Mod(seed, 1 << 32)  # not negative, whatever the seed is
    keys = [low, ops.Mod(ops.Div(ops.Sub(seed, low), 1 << 32), 1 << 32)]
    nothing = ops.Sub(low, low)
    c = [ops.Mod(ops.int64(position), 1 << 32), nothing, nothing, nothing]
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(ops, 0xD2511F53, c[0]), _product(ops, 0xCD9E8D57, c[2])
        first = ops.BitwiseXor(ops.BitwiseXor(high1, c[1]), keys[0])
        c = [first, low1, ops.BitwiseXor(ops.BitwiseXor(high0, c[3]), keys[1]), low0]
        keys = [ops.Mod(ops.Add(k, add), 1 << 32) for k, add in zip(keys, (0x9E3779B9, 0xBB67AE85))]
    return c[0], c[1]


def _sample_weights(ops, exponents):
    """floor(2^(30 + e)) as int64 [B,V]; see export/reference.py."""
    valid = ops.GreaterOrEqual(exponents, sampling.LEAST_EXPONENT)
    e = ops.Where(valid, exponents, 0.0)
    n = ops.Round(e)
    f = ops.Sub(e, n)
    power = ops.constant(sampling.POWER[-1])
    for k in (*sampling.POWER[-2::-1], 1.0):
        power = ops.Add(ops.Mul(power, f), k)
    scale = ops.Gather(
        ops.float(ops.constant([1 << i for i in range(sampling.WEIGHT_BITS + 1)])),
        ops.Add(ops.int64(n), sampling.WEIGHT_BITS),
        axis=0,
    )
    return ops.Where(valid, ops.int64(ops.Mul(power, scale)), 0)


def _drawn_tokens(ops, x, ordered, order, vocabulary):
    """Tokens [B,1] drawn at random; ordered: the changed logits, the largest first, order: their tokens."""
    top = ops.Slice(ordered, [0], [1], [1])
    heat = _column(ops, x.temperature, 0.0, lambda t: ops.Greater(t, 0.0))
    sampled = ops.Greater(heat, 0.0)
    scale = ops.Where(sampled, ops.Div(sampling.LOG2_E, heat), 0.0)
    exponents = ops.Where(ops.Equal(ordered, top), 0.0, ops.Mul(ops.Sub(ordered, top), scale))
    weights = _sample_weights(ops, exponents)
    one = float(1 << sampling.WEIGHT_BITS)
    if x.min_p is not None:
        least = ops.Min(_column(ops, x.min_p, 0.0, lambda t: ops.Greater(t, 0.0)), 1.0)
        weights = ops.Where(ops.GreaterOrEqual(weights, ops.int64(ops.Ceil(ops.Mul(least, one)))), weights, 0)
    if x.top_k is not None:
        first = ops.int64(_column(ops, x.top_k, 0))
        number = ops.CumSum(ops.int64(ops.Greater(weights, 0)), 1)
        kept = ops.Or(ops.LessOrEqual(first, 0), ops.LessOrEqual(number, first))
        weights = ops.Where(kept, weights, 0)
    sums = ops.CumSum(weights, 1)
    if x.top_p is not None:
        share = _column(ops, x.top_p, 1.0, lambda t: ops.Less(t, 1.0))
        part = ops.int64(ops.Ceil(ops.Mul(ops.Max(share, 0.0), one)))
        high, low = _halves(ops, ops.sum_all(weights), 31)
        needed = ops.Add(ops.Mul(ops.Mul(high, part), 2), ops.Div(ops.Mul(low, part), 1 << sampling.WEIGHT_BITS))
        kept = ops.Or(ops.GreaterOrEqual(part, int(one)), ops.Less(ops.Sub(sums, weights), ops.Max(needed, 1)))
        weights = ops.Where(kept, weights, 0)
        sums = ops.CumSum(weights, 1)
    a, b = _halves(ops, ops.sum_all(weights), 31)
    c, d = (ops.Unsqueeze(ops.Div(word, 2), [1]) for word in _philox(ops, x.seed, x.position))
    middle = ops.Add(ops.Add(ops.Mul(a, d), ops.Mul(b, c)), ops.Div(ops.Mul(b, d), 1 << 31))
    passed = ops.Add(ops.Mul(a, c), ops.Div(middle, 1 << 31))
    place = ops.sum_all(ops.int64(ops.LessOrEqual(sums, passed)))
    drawn = ops.GatherElements(order, ops.Min(place, ops.Sub(vocabulary, 1)), axis=1)
    return ops.Where(sampled, drawn, ops.Slice(order, [0], [1], [1]))


def _changed_logits(ops, x, raw, rows):
    """float32 [B,V]: the logits after bias, mask and penalties; never NaN. rows: of token_counts, -1 for none."""
    v, vocabulary = raw, ops.size(raw, 1)
    if x.logit_bias is not None:
        v = ops.Add(v, x.logit_bias)
    if x.allowed_tokens is not None:
        index = ops.range(vocabulary)
        words = ops.Mod(ops.Gather(ops.int64(x.allowed_tokens), ops.Div(index, 32), axis=1), 1 << 32)
        bits = ops.Gather([1 << i for i in range(32)], ops.Mod(index, 32), axis=0)
        v = ops.Where(ops.Equal(ops.Mod(ops.Div(words, bits), 2), 0), -math.inf, v)
    if x.token_counts is not None:
        counts = ops.Gather(ops.int64(x.token_counts), ops.Max(rows, 0), axis=0)
        counts = ops.Where(ops.GreaterOrEqual(ops.Unsqueeze(rows, [1]), 0), counts, 0)
        penalty = x.repetition_penalty
        repetition = _column(ops, penalty, 1.0, lambda t: ops.And(ops.Greater(t, 0.0), _finite(ops, t)))
        presence = _column(ops, x.presence_penalty, 0.0, lambda t: _finite(ops, t))
        frequency = _column(ops, x.frequency_penalty, 0.0, lambda t: _finite(ops, t))
        answered = ops.float(ops.Mod(counts, sampling.IN_PROMPT))
        lower = ops.Where(ops.Less(v, 0.0), ops.Mul(v, repetition), ops.Div(v, repetition))
        lower = ops.Sub(lower, ops.Mul(frequency, answered))
        lower = ops.Where(ops.Greater(answered, 0.0), ops.Sub(lower, presence), lower)
        v = ops.Where(ops.Greater(counts, 0), lower, v)
    return ops.Where(ops.IsNaN(v), -math.inf, v)


def _counted(ops, token_counts, rows, tokens):
    """token_counts with 1 more at each request's token: over them flat, with one place more for what counts nowhere."""
    width = ops.size(token_counts, 1)
    flat = ops.Concat(ops.int64(ops.reshape(token_counts, -1)), ops.int64(ops.zeros(1)), axis=0)
    somewhere = ops.And(ops.GreaterOrEqual(rows, 0), ops.GreaterOrEqual(tokens, 0))
    at = ops.Where(somewhere, ops.Add(ops.Mul(rows, width), tokens), ops.Sub(ops.size(flat, 0), 1))
    counts = ops.Max(ops.GatherElements(flat, at, axis=0), 0)
    room = ops.Less(ops.Mod(counts, sampling.IN_PROMPT), sampling.IN_PROMPT - 1)
    flat = ops.ScatterElements(flat, at, ops.Add(counts, ops.int64(room)), axis=0)
    return ops.CastLike(ops.Reshape(ops.Slice(flat, [0], [-1], [0]), ops.Shape(token_counts)), token_counts)


def _sample_tokens(ops, x, a, ranks):
    raw = ops.float(x.logits)
    batch, vocabulary = ops.size(raw, 0), ops.size(raw, 1)
    rows = None
    if x.token_counts is not None:
        rows = ops.range(batch)
        if x.count_index is not None:
            index, count = ops.int64(x.count_index), ops.size(x.token_counts, 0)
            rows = ops.Where(ops.And(ops.GreaterOrEqual(index, 0), ops.Less(index, count)), index, -1)
    v = _changed_logits(ops, x, raw, rows)
    if x.temperature is not None:
        ordered, order = ops.TopK(v, vocabulary, axis=1, outputs=2)
        tokens = _drawn_tokens(ops, x, ordered, order, vocabulary)
    else:
        tokens = ops.ArgMax(v, axis=1, keepdims=1)
    takes_part = ops.Greater(ops.ReduceMax(v, [1]), -math.inf)
    if x.active is not None:
        takes_part = ops.And(takes_part, ops.Unsqueeze(ops.Not(ops.Equal(ops.int64(x.active), 0)), [1]))
    tokens = ops.Where(takes_part, tokens, -1)
    results = [ops.Squeeze(tokens, [1])]
    if a.logprob or a.num_logprobs:
        known = ops.Where(ops.IsNaN(raw), -math.inf, raw)
        largest = ops.ReduceMax(known, [1])
        below = ops.Where(ops.Equal(raw, largest), 0.0, ops.Sub(raw, largest))
        logprobs = ops.Sub(below, ops.Log(ops.sum(ops.Exp(below), 1)))  # NaN if a logit is NaN
        nothing = ops.IsInf(largest)
        if x.active is not None:
            idle = ops.Unsqueeze(ops.Equal(ops.int64(x.active), 0), [1])
            nothing = ops.Or(nothing, idle)
        logprobs = ops.Where(nothing, math.nan, logprobs)
    if a.logprob:
        chosen = ops.GatherElements(logprobs, ops.Max(tokens, 0), axis=1)
        results.append(ops.Squeeze(ops.Where(ops.Less(tokens, 0), math.nan, chosen), [1]))
    if a.num_logprobs:
        _, likely = ops.TopK(known, [a.num_logprobs], axis=1, outputs=2)
        results.append(ops.GatherElements(logprobs, likely, axis=1))
        results.append(ops.Identity(likely) if x.active is None else ops.Where(idle, -1, likely))
    if a.count_tokens:
        results.append(_counted(ops, x.token_counts, rows, ops.Squeeze(tokens, [1])))
    return results


# GatedActivation


def _silu(ops, x):
    """x / (1 + exp(-x)): onnxruntime has a Sigmoid whose error is relative to 1, which is no factor of a large x."""
    return ops.Div(x, ops.Add(ops.Exp(ops.Neg(x)), 1.0))


def _activated(ops, gate, activation):
    if activation == "silu":
        return _silu(ops, gate)
    if activation == "relu":
        return ops.Relu(gate)
    if activation == "sigmoid":
        return ops.Reciprocal(ops.Add(ops.Exp(ops.Neg(gate)), 1.0))  # as _silu
    if activation == "gelu":
        return ops.Mul(ops.Mul(gate, 0.5), ops.Add(ops.Erf(ops.Mul(gate, math.sqrt(0.5))), 1.0))
    cubed = ops.Mul(ops.Mul(gate, gate), gate)
    inner = ops.Mul(ops.Add(gate, ops.Mul(cubed, 0.044715)), math.sqrt(2 / math.pi))
    return ops.Div(gate, ops.Add(ops.Exp(ops.Mul(inner, -2.0)), 1.0))  # 1 + tanh would cancel far below 0


def _gated_activation(ops, x, a, ranks):
    if x.up is not None:
        pair = _columns(ops, x.gate_up, a.columns, a.first_column, ops.size(x.up, 2)), x.up
    else:
        pair = (ops.Gather(x.gate_up, i, axis=2) for i in (0, 1))
    gate, up = map(ops.float, pair)
    if x.skip is not None:
        heads = ops.Concat([0, 0], ops.Shape(x.skip_scale), [-1], axis=0)
        part = ops.Mul(ops.Reshape(ops.float(x.skip), heads), ops.Unsqueeze(x.skip_scale, [-1]))
        up = ops.Add(up, ops.Reshape(part, ops.Shape(up)))
    return [ops.CastLike(ops.Mul(_activated(ops, gate, a.activation), up), x.gate_up)]


# RmsNorm


def _rms_norm(ops, x, a, ranks):
    """Rows with numbers above 1 are divided by the largest finite one first: squares may be beyond float32."""
    width = ops.size(x.weight, 0)
    rows = _columns(ops, x.input, a.columns, a.first_column, width)
    if x.addend is not None:
        rows = ops.CastLike(ops.Add(ops.float(rows), ops.float(x.addend)), x.input)
    y, active = ops.float(rows), None
    if x.gate is not None:
        gate = ops.float(_columns(ops, x.gate, a.gate_columns, a.first_gate_column, width))
        active = _activated(ops, gate, a.activation)
    if active is not None and a.gate_first:
        y = ops.Mul(y, active)
    shape = ops.Shape(y)
    parts = y
    if a.group:
        parts = ops.Reshape(y, ops.Concat([0, 0], ops.Div(width, [a.group]), [a.group], axis=0))
    sizes = ops.Abs(parts)
    most = ops.Max(ops.ReduceMax(ops.Where(ops.IsInf(sizes), 1.0, sizes), [-1]), 1.0)
    parts = ops.Div(parts, most)
    root = ops.Sqrt(ops.Add(ops.ReduceMean(ops.Mul(parts, parts), [-1]), ops.Div(ops.Div(a.epsilon, most), most)))
    divided = ops.Reshape(ops.Div(parts, root), shape)
    if a.normed:
        divided = ops.Concat(ops.Slice(divided, [0], [a.normed], [2]), ops.Slice(y, [a.normed], [2**31], [2]), axis=2)
    y = ops.Mul(divided, x.weight)
    if active is not None and not a.gate_first:
        y = ops.Mul(y, active)
    return [ops.CastLike(y, x.input)] + [ops.Identity(rows)] * a.return_sum


# Linear


def _linear(ops, x, a, ranks):
    def product(weight, bias):
        y = ops.MatMul(ops.float(x.input), ops.float(weight))
        return y if bias is None else ops.Add(y, ops.float(bias))

    def half(value, i, axis):
        return None if value is None else ops.Gather(value, i, axis=axis)

    if a.gated:
        gate, up = (product(half(x.weight, i, 1), half(x.bias, i, 0)) for i in (0, 1))
        y = ops.Mul(_activated(ops, gate, a.activation), up)
    else:
        y = product(x.weight, x.bias)
    return [ops.CastLike(y, x.input)]


# BlockLinear


def _block_linear(ops, x, a, ranks):
    blocks = ops.size(x.scale, 1)

    def in_blocks(rows):
        """[...,I] as [...,G,I/G]."""
        return ops.Reshape(rows, ops.Concat(ops.Slice(ops.Shape(rows), [0], [-1], [0]), ops.Reshape(blocks, [1]), [-1], axis=0))

    def together(rows, like):
        """[...,G,I/G] as [...,I]."""
        return ops.Reshape(rows, ops.Concat(ops.Slice(ops.Shape(like), [0], [-1], [0]), [-1], axis=0))

    wide = ops.Mul(in_blocks(_numbers(ops, x.weight, a.types.get("weight", "int8"))), ops.Unsqueeze(ops.float(x.scale), [-1]))
    if x.shift is not None:
        wide = ops.Add(wide, ops.Unsqueeze(ops.float(x.shift), [-1]))
    rows = ops.float(x.input)
    if a.round_input:
        parts = in_blocks(rows)
        largest = ops.ReduceMax(ops.Abs(parts), [-1])
        nothing = ops.Less(largest, LEAST_MAGNITUDE)
        step = ops.Div(ops.Where(nothing, 127.0, largest), 127.0)
        rows = together(ops.Where(nothing, 0.0, ops.Mul(ops.Round(ops.Div(parts, step)), step)), rows)
    output = ops.MatMul(rows, ops.Transpose(together(wide, x.scale), perm=[1, 0]))
    if x.bias is not None:
        output = ops.Add(output, ops.float(x.bias))
    return [ops.CastLike(output, x.input)]


# DecayGates


def _decay_gates(ops, x, a, ranks):
    heads = ops.size(x.rate, 0)
    raw = ops.float(_columns(ops, x.input, a.columns and not a.per_key, a.first_column, heads))
    if x.bias is not None:
        raw = ops.Add(raw, x.bias)
    step = ops.Softplus(raw)
    if a.step_min or a.step_max:
        step = ops.Clip(step, a.step_min, *[a.step_max] * bool(a.step_max))
    log_decay = ops.Mul(ops.Unsqueeze(x.rate, [1]) if a.per_key else x.rate, step)
    log_decay = ops.Where(ops.LessOrEqual(log_decay, 0.0), log_decay, ops.Where(ops.IsNaN(log_decay), -math.inf, 0.0))
    results = [log_decay] + [ops.Identity(step)] * a.return_step
    if a.return_beta:
        beta_input = _columns(ops, x.beta_input, a.columns, a.first_beta_column, heads)
        # ONNX Runtime's Sigmoid is 0 or 1e-8 for what is below -18.
        results.append(ops.Div(a.beta_scale, ops.Add(1.0, ops.Exp(ops.Neg(ops.float(beta_input))))))
    if x.query_lens is None:
        return results
    inside = ops.Less(ops.range(ops.size(raw, 1)), ops.Unsqueeze(ops.int64(x.query_lens), [1]))
    of_head = ops.Unsqueeze(inside, [2])
    of_input = ops.Unsqueeze(inside, [2, 3]) if a.per_key else of_head
    count = len(results) - a.return_beta
    return [ops.Where(of_input if i < count else of_head, y, 0.0) for i, y in enumerate(results)]


# Collectives and MergeAttention


def _all_reduce(ops, x, a, ranks):
    return [ops.Identity(x.input)]


def _check_world(op, world):
    if not 1 <= world <= communicators.MAX_RANKS:
        raise ValueError(f"{op}: world is {world}; expected 1 to {communicators.MAX_RANKS}")


def _all_gather(ops, x, a, ranks):
    _check_world("AllGather", a.world)
    return [ops.Concat(*[x.input] * a.world, axis=0)]


def _merge_attention(ops, x, a, ranks):
    nothing = ops.IsInf(x.partial_lse, detect_positive=0)
    largest = ops.ReduceMax(x.partial_lse, [0])
    empty = ops.Equal(ops.ReduceMin(ops.int64(nothing), [0]), 1)
    shifted = ops.Sub(x.partial_lse, ops.Where(empty, 0.0, largest))
    weights = ops.Where(nothing, 0.0, ops.Exp(shifted))
    total = ops.sum(weights, 0)
    shares = ops.Unsqueeze(ops.Div(weights, ops.Where(empty, 1.0, total)), [-1])
    parts = ops.Where(ops.Unsqueeze(nothing, [-1]), 0.0, ops.Mul(ops.float(x.partial_output), shares))
    lse = ops.Where(empty, -math.inf, ops.Add(largest, ops.Log(total)))
    return [ops.CastLike(ops.sum(parts, 0, keepdims=0), x.partial_output), ops.Squeeze(lse, [0])]


_BODIES = {
    "LeanAttention": _lean_attention,
    "CausalLinearDecay": _causal_linear_decay,
    "CausalLinearDecayGrad": _causal_linear_decay_grad,
    "NormalizedLinearAttention": _normalized_linear_attention,
    "NormalizedLinearAttentionGrad": _normalized_linear_attention_grad,
    "SampleTokens": _sample_tokens,
    "GatedActivation": _gated_activation,
    "BlockLinear": _block_linear,
    "Linear": _linear,
    "GatedDeltaRule": _gated_delta_rule,
    "GatedDeltaRuleGrad": _gated_delta_rule_grad,
    "CausalConv": _causal_conv,
    "DecayGates": _decay_gates,
    "RmsNorm": _rms_norm,
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "MergeAttention": _merge_attention,
}
_IGNORED = {"algorithm", "constant_weight"}  # attributes that choose how to compute, not what


def _variant(op_name, present, attrs, ranks, types):
    """(OpSpec, names of all present inputs, values of all attributes, ranks that `present` does not tell, types of quantised
    caches that are not int8).

    Raises ValueError for what no function can mean: see function_for.
    """
    op = spec.all_specs().get(op_name)
    if op is None:
        raise ValueError(f"{spec.DOMAIN} has no operator {op_name}; it has {', '.join(spec.all_specs())}")
    present = {t.name for t in op.inputs if not t.optional} | set(present)
    if unknown := present - {t.name for t in op.inputs}:
        raise ValueError(f"{op.name} has no input {', '.join(sorted(unknown))}")
    values = {a.name: type(a.default)((attrs or {}).get(a.name, a.default)) for a in op.attrs}
    for a in op.attrs:
        if a.refuse and values[a.name]:
            raise ValueError(f"{op.name}: {a.name} is {int(values[a.name])}; {a.refuse}")
        if a.values and values[a.name] not in a.values:
            raise ValueError(f"{op.name}: {a.name} is {values[a.name]!r}; expected one of {', '.join(a.values)}")
    _check_rules(op, present, values)
    open_ranks = {}
    given = op.given(present, values)
    for t in op.inputs:
        allowed = sorted({len(s.axes) for s in op.alternatives(t, given)})
        if t.optional and t.name in present and len(allowed) > 1:
            rank = open_ranks[t.name] = (ranks or {}).get(t.name)
            if rank not in allowed:
                *others, last = map(str, allowed)
                raise ValueError(
                    f"{op.name}: {t.name} has rank {rank}; expected {', '.join(others)} or {last}. If the "
                    "model does not say it (None), run onnx's shape inference on the model first"
                )
    for t in op.inputs:
        quantised = t.type == "C" and t.name.replace("_cache", "_scale") in present
        if quantised and types is not None and t.name not in types:
            raise ValueError(
                f"{op.name}: {t.name} has scales and no known type, which tells how its numbers are stored; run onnx's shape "
                "inference on the model first"
            )
    own = {t.name: word for t in op.inputs if t.type == "C" and (word := (types or {}).get(t.name)) in spec.TYPES["C"][1:]}
    return op, present, values, open_ranks, own


def _check_rules(op, present, values):
    on = {a.name for a in op.attrs if (values[a.name] is True if a.off is None else values[a.name] != a.off)}
    for rule in op.rules:
        found = [name for name in rule.args if name in present | on]
        if rule.condition not in (None, *present, *on):
            continue
        wrong, words = {
            "needs": (found == [rule.args[0]], "needs"),
            "together": (0 < len(found) < len(rule.args), "goes with"),
            "exclusive": (len(found) > 1, "excludes"),
        }.get(rule.kind, (False, ""))
        if wrong:
            others = (" or " if rule.kind == "needs" else ", ").join(n for n in rule.args if n != found[0])
            raise ValueError(
                f"{op.name}: {found[0]} {words} {others}" + (f", because {rule.condition} is given" if rule.condition else "")
            )


def _positions(op, values):
    """The outputs that a node has a place for: up to the last that the attributes ask for."""
    active = op.active_outputs(values)
    return op.outputs[: 1 + max(i for i, t in enumerate(op.outputs) if t in active)]


def overload_name(
    op_name: str,
    present: Collection[str] = (),
    attrs: Mapping[str, Any] | None = None,
    ranks: Mapping[str, int] | None = None,
    types: Mapping[str, str] | None = None,
) -> str:
    """Name of the overload for these inputs and attributes; arguments as in function_for.

    The types of quantised caches that are not int8, the optional inputs, with the rank where it may vary, and the attributes
    that differ from their default, for example "seq_lens.query_lens.scale=0.125"; "default" where there is none.
    """
    op, present, values, open_ranks, own_types = _variant(op_name, present, attrs, ranks, types)
    parts = [f"{name}={word}" for name, word in own_types.items()]
    parts += [f"{t.name}{open_ranks.get(t.name, '')}" for t in op.inputs if t.optional and t.name in present]
    convert = {"float": np.float32, "bool": int}  # nodes hold attributes as float32 and integers
    for a in op.attrs:
        value, default = (convert.get(a.type, type(a.default))(x) for x in (values[a.name], a.default))
        if a.name not in _IGNORED and value != default:
            parts.append(f"{a.name}={value!s}")  # the shortest digits of a float32
    return ".".join(parts) or "default"


def function_for(
    op_name: str,
    present: Collection[str] = (),
    attrs: Mapping[str, Any] | None = None,
    ranks: Mapping[str, int] | None = None,
    opset: int = DEFAULT_OPSET,
    types: Mapping[str, str] | None = None,
) -> ir.Function:
    """The onnx_ir.Function of an operator with these inputs and attributes, in standard operators of an opset.

    op_name: a name of ops.toml. present: names of the optional inputs that are given (required ones may be among
    them). attrs: attribute values; missing ones take their default. ranks: rank of each input, needed for log_decay
    alone, which is per head (1), per token (3) or per key dimension (4). opset: version of the standard operators, 18 or newer,
    19 for caches of float8e4m3fn. types: of inputs of type C, by the schema's names; needed of those that are not T or int8.

    Its inputs are all of the operator's, the absent ones unused; its outputs are the operator's up to the last that
    the attributes ask for, where one before it that they do not ask for is empty. It declares all attributes, so that
    a node may carry them, and reads none: their values are in the body.
    Raises ValueError for a combination that breaks the operator's rules, an unknown rank, or an older opset.
    """
    op, present, values, open_ranks, own_types = _variant(op_name, present, attrs, ranks, types)
    oldest = FLOAT8_OPSET if "float8e4m3fn" in own_types.values() else OLDEST_OPSET
    if opset < oldest:
        raise ValueError(f"{op.name}: the model has opset {opset}; its function body needs {oldest} or newer")
    inputs = {t.name: ir.Value(name=t.name) for t in op.inputs}
    ops = _Ops()
    outputs = _BODIES[op.name](
        ops,
        SimpleNamespace(**{n: v if n in present else None for n, v in inputs.items()}),
        SimpleNamespace(**values, types=own_types),
        open_ranks,
    )
    outputs = dict(zip((t.name for t in op.active_outputs(values)), outputs, strict=True))
    outputs = {t.name: outputs.get(t.name) or ops.zeros(0) for t in _positions(op, values)}
    for name, value in outputs.items():
        value.name = name
    graph = ir.Graph(list(inputs.values()), list(outputs.values()), nodes=ops.nodes, opset_imports={"": opset}, name=op.name)
    defaults = {a.name: int(a.default) if a.type == "bool" else a.default for a in op.attrs}
    return ir.Function(
        spec.DOMAIN,
        op.name,
        overload_name(op_name, present, attrs, ranks, types),
        graph=graph,
        attributes=ir.convenience.convert_attributes(defaults),
    )


def _inline_callers(model):
    """Inlines every called function that holds our nodes: onnxruntime 1.31 finds no overload from inside a function,
    and an attribute in one may refer to the function's, while a body needs its value."""
    modified = True
    while modified:
        callers = {f.identifier() for f in model.functions.values() if f.domain != spec.DOMAIN and _our_nodes(f)}
        modified = callers and InlinePass(lambda f, callers=callers: f.identifier() in callers)(model).modified


def _our_nodes(graph):
    return [n for n in ir.traversal.RecursiveGraphIterator(graph) if n.domain == spec.DOMAIN]


def check_nodes(model: ir.Model) -> None:
    """Raises ValueError where leanfleet nodes of an onnx_ir.Model are of another version than there is, or one has an
    attribute that its operator does not have."""
    graphs = [model.graph, *(f for f in model.functions.values() if f.domain != spec.DOMAIN)]
    nodes = [node for graph in graphs for node in _our_nodes(graph)]
    if nodes and spec.DOMAIN in model.opset_imports:
        spec.check_version(model.opset_imports[spec.DOMAIN])
    for node in nodes:
        spec.check_attributes(node.op_type, node.name, list(node.attributes))


def _given(op, node):
    """(values of a node's attributes, its present inputs by name, their ranks and types where they are known)."""
    attrs = {name: a.value for name, a in node.attributes.items()}
    given = {t.name: x for t, x in zip(op.inputs, node.inputs, strict=False) if x is not None}
    ranks = {name: len(x.shape) for name, x in given.items() if x.shape is not None}
    return attrs, given, ranks, {name: x.dtype.name.lower() for name, x in given.items() if x.dtype is not None}


def edited_nodes(model: ir.Model) -> list[str]:
    """A line for each leanfleet node of an onnx_ir.Model whose attributes or inputs are no longer those of the function
    that it names: without the library that function would run with the old ones. attach(model) mends it."""
    lines = []
    for node in _our_nodes(model.graph):
        op = spec.all_specs().get(node.op_type)
        if op is None or (spec.DOMAIN, node.op_type, node.overload) not in model.functions:
            continue
        attrs, given, ranks, types = _given(op, node)
        guesses = _rank_guesses(op, given, attrs, ranks)
        expected = {overload_name(op.name, given, attrs, ranks | guess, types) for guess in guesses}
        if node.overload not in expected:
            lines.append(
                f"{op.name} '{node.name}' now means '{min(expected)}', but its function body '{node.overload}': the "
                "node was edited after the body was made, and runs differently without leanfleet's library; "
                "leanfleet.export.function_bodies.attach makes the body anew"
            )
    return lines


def _rank_guesses(op, given, attrs, ranks):
    """What the ranks may be that shape inference has not told, where the overload depends on them."""
    conditions = op.given(given, attrs)
    unknown = [
        (t.name, sorted({len(s.axes) for s in op.alternatives(t, conditions)}))
        for t in op.inputs
        if t.name in given and t.name not in ranks
    ]
    return [dict(zip((name for name, _ in unknown), choice)) for choice in itertools.product(*(r for _, r in unknown))]


def _takes_overloads() -> bool:
    """Whether the onnxruntime that is installed does."""
    found = []
    for package in RUNTIMES:
        with suppress(metadata.PackageNotFoundError):
            found.append(tuple(map(int, re.findall(r"\d+", metadata.version(package) or "0")[:2])))
    return bool(found) and min(found) >= TAKES_OVERLOADS


def attach(model: ir.Model) -> ir.Model:
    """Gives every leanfleet node of an onnx_ir.Model, in subgraphs too, its overload, and the model the functions that
    these name, one for all equal nodes. Other functions that hold such nodes are inlined first.

    Changes the model, may be called again, as it must be after an attribute or the inputs of a node were edited, and
    returns the model. Raises ValueError as function_for and check_nodes do. onnxruntime before 1.27 takes the last overload of
    an operator for every node: warns where there are several and no newer one is installed.

    Example:
        import onnx_ir
        from leanfleet.export import function_bodies

        model = onnx_ir.load("layer.onnx")
        node = next(node for node in model.graph if node.op_type == "NormalizedLinearAttention")
        node.attributes["eps"] = onnx_ir.AttrFloat32("eps", 1e-5)
        function_bodies.attach(model)                       # the function computes with the new eps
        onnx_ir.save(model, "edited.onnx")
    """
    check_nodes(model)
    opset = model.opset_imports.setdefault("", DEFAULT_OPSET)
    _inline_callers(model)
    functions, nodes = {}, _our_nodes(model.graph)
    for node in nodes:
        op = spec.all_specs().get(node.op_type)
        if op is None:
            raise ValueError(f"node {node.name}: {spec.DOMAIN} has no operator {node.op_type}")
        attrs, given, ranks, types = _given(op, node)
        node.overload = overload_name(op.name, given, attrs, ranks, types)
        key = (op.name, node.overload)
        if key not in functions:
            functions[key] = function_for(op.name, given, attrs, ranks, opset, types)
        # A node that names fewer outputs than its function has is an error of ONNX's shape inference.
        outputs, first_new = _positions(op, attrs), len(node.outputs)
        node.resize_outputs(max(first_new, len(outputs)))
        for t, value in list(zip(outputs, node.outputs, strict=False))[first_new:]:
            value.name = f"{node.outputs[0].name}.{t.name}" if t in op.active_outputs(attrs) else ""
    for function in functions.values():
        model.functions[function.identifier()] = function
    several = sorted(name for name, count in Counter(name for name, _ in functions).items() if count > 1)
    if several and not _takes_overloads():
        warnings.warn(
            f"the model has nodes of {', '.join(several)} that differ in optional inputs or attributes. Where "
            "leanfleet's library is not registered it needs onnxruntime 1.27 or newer: older ones run one "
            "function for all of them, and give wrong results without an error",
            ExportWarning,
            stacklevel=2,
        )
    if nodes:
        model.opset_imports.setdefault(spec.DOMAIN, spec.OPSET_VERSION)
        model.ir_version = max(model.ir_version, IR_VERSION)
    return model
