"""The operators in plain PyTorch: what every kernel is judged by.

One function per operator, named after it in snake case. Tensors are parameters in the operator's input
order, absent optional inputs are None, attributes are keyword-only. Every function returns a tuple whose
length follows from the attributes alone, never modifies an input, returns no alias of one, and is
differentiable.

Types: T (float32, float16, bfloat16, and here float64 too) is query's type and that of every tensor marked
T; C is T, int8, float8_e4m3fn or uint8 of two int4 each; F is float32, or float64 when T is float64; I is int32,
L int64. The computation runs in float64 when query is float64, otherwise in float32 or in `compute_dtype`. So the
judge of a low-precision kernel is this reference on its inputs converted to float64.

Symbols: B batch, H query heads, Hkv key/value heads (query head h reads key/value head h // (H / Hkv)),
N or Nq tokens, D or R size of queries and keys, Dv of values. Shapes are those of layout "bhnd"; with "bnhd"
heads and tokens change places in every tensor that has both, except in caches. Wrong arguments raise
ValueError. Wrong lengths, offsets and indices inside a tensor never do: they are clamped or masked out, as
each function says.

Sources: LeetDecoding (cited as LD), FleetAttention (Efficient Decoding for Long Prompts via Low-Rank
Attention, cited as FA), LeanAttention, and Linear Attention Optimized GPU Kernel Implementation (cited as
LA; the gradients here correct its printed ones).
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch.nn.functional import pad

from leanfleet import communicators
from leanfleet.export.sample_constants import IN_PROMPT, LEAST_EXPONENT, LOG2_E, MAX_LOGPROBS, POWER, WEIGHT_BITS

BLOCK = 64  # tokens per block of the blocked algorithms
RECURSION_BASE = 16  # tokens at which the recursion stops halving
DELTA_ROW_EPS = 1e-6  # what the delta rule's normalize_qk adds to the sum of squares
LEAST_MAGNITUDE = 2.0**-100  # a row of smaller numbers has the scale 0
FORMS = {torch.int8: (-128, 127), torch.float8_e4m3fn: (-448, 448), torch.uint8: (-8, 7)}
"""What a quantised cache may be made of, and the least and largest number of it. uint8 holds two int4 along the last axis."""
FORM_TYPES = {"int8": torch.int8, "float8e4m3fn": torch.float8_e4m3fn, "uint8": torch.uint8}  # by the schema's names
UNIT_ROW_EPS = 1e-12  # lower bound of the norm that normalize_qk divides by


def _check(condition, message):
    if not condition:
        raise ValueError(message)


def _match(operator, dims, layout, name, tensor, kind, symbols):
    """Checks type and sizes of an input; `dims` holds the sizes known so far and gains the new symbols.

    kind: "T" query's type, "C" the same or one of FORMS, "S" the same or F, "F" float32 or float64, "I" and "L" any integer. A
    star after `symbols`, which are those of bhnd, says that the tensor follows `layout`.
    """
    if tensor is None:
        return
    names = symbols.rstrip("*").split()
    if symbols.endswith("*") and layout == "bnhd":
        names[1], names[2] = names[2], names[1]
    allowed = ", ".join(f"{s}={dims[s]}" if s in dims and not s.isdigit() else s for s in names)
    shape = list(tensor.shape)
    pairs = kind == "C" and tensor.dtype == torch.uint8
    sizes = [*shape[:-1], 2 * shape[-1]] if pairs and shape else shape
    fits = len(shape) == len(names)
    fits = fits and all(dims.setdefault(s, n) == n for s, n in zip(names, sizes, strict=True))
    _check(fits, f"{operator}: {name} has shape {shape}{' of two int4 each' * pairs}; expected [{allowed}]")
    dtype = tensor.dtype
    right, expected = {
        "T": (
            dtype.is_floating_point and dims.setdefault("T", dtype) == dtype,
            f"{dims.get('T', 'a floating point type')}, the type of query",
        ),
        "F": (dtype in (torch.float32, torch.float64), "torch.float32 (or float64)"),
        "S": (
            dtype in (torch.float32, torch.float64, dims.get("T")),
            f"torch.float32 (or float64), or {dims.get('T')}, the type of query",
        ),
        "C": (
            kind != "C" or dtype == dims["T"] or dtype in FORMS,
            f"{dims.get('T')}, the type of query, or {' or '.join(map(str, FORMS))}",
        ),
        "I": (not dtype.is_floating_point and dtype != torch.bool, "torch.int32"),
        "L": (not dtype.is_floating_point and dtype != torch.bool, "torch.int64"),
    }[kind]
    _check(right, f"{operator}: {name} has type {dtype}; expected {expected}")


def _begin(operator, layout, query, compute_dtype, eps=0.0):
    """The checker bound to this call, its sizes, the type to compute in, and the type of F outputs."""
    _check(layout in ("bhnd", "bnhd"), f"{operator}: layout is {layout!r}; expected 'bhnd' or 'bnhd'")
    _check(eps >= 0, f"{operator}: eps is {eps}; expected 0 or more")
    dims = {"2": 2}
    double = query.dtype == torch.float64
    compute = torch.float64 if double else compute_dtype or torch.float32
    return partial(_match, operator, dims, layout), dims, compute, torch.float64 if double else torch.float32


def _check_heads(operator, dims):
    _check(
        dims["Hkv"] > 0 and dims["H"] % dims["Hkv"] == 0,
        f"{operator}: query has H={dims['H']} heads and key Hkv={dims['Hkv']}; H must be its multiple",
    )


def _swap(tensor, layout):
    """Between bhnd and `layout`, either way, for a tensor with heads and tokens at axes 1 and 2."""
    return tensor if layout == "bhnd" else tensor.transpose(1, 2).contiguous()


def _spans(cu_seqlens, total):
    """Requests as (start, stop) inside [0, total], whatever cu_seqlens holds; None where it is absent.

    Requests of offsets that fall back may overlap, and what the operators write in an overlap is unspecified.
    """
    if cu_seqlens is None:
        return None
    offsets = [min(max(n, 0), total) for n in cu_seqlens.tolist()]
    return [(start, max(start, stop)) for start, stop in pairwise(offsets)]


# LeanAttention


def _cache_slots(variant, batch, cache, cu_seqlens, block_table):
    """Per request, the slot (row of _to_slots) of each position up to the capacity; -1 where masked out."""
    if variant == "dense":
        size = cache.shape[2]
        return [torch.arange(b * size, (b + 1) * size, device=cache.device) for b in range(batch)]
    if variant == "ragged":
        spans = _spans(cu_seqlens, cache.shape[1])
        return [torch.arange(start, stop, device=cache.device) for start, stop in spans]
    pool, block = cache.shape[:2]
    pages = block_table.long().unsqueeze(-1)
    slots = pages * block + torch.arange(block, device=cache.device)
    return list(slots.masked_fill((pages < 0) | (pages >= pool), -1).flatten(1))


def _to_slots(variant, cache):
    """Any cache as [slots,Hkv,D]."""
    if variant == "ragged":
        return cache.transpose(0, 1)
    return (cache.transpose(1, 2) if variant == "dense" else cache).flatten(0, 1)


def _from_slots(variant, slots, shape):
    if variant == "dense":
        batch, heads, size, width = shape
        return slots.reshape(batch, size, heads, width).transpose(1, 2).contiguous()
    return slots.transpose(0, 1).contiguous() if variant == "ragged" else slots.reshape(shape)


def quantised(rows: torch.Tensor, scale: torch.Tensor, form: torch.dtype = torch.int8) -> torch.Tensor:
    """rows / scale in float32, held within the range of `form`, one of FORMS, and rounded to it, half to even; 0 where the
    scale is 0, and in integers where that is NaN. A uint8 is two int4: the one of the even column in its low half, each with 8
    added.

    rows: any type and shape, for uint8 of an even last axis; scale: float32 or float64, broadcast over them.
    """
    quotient = (rows.detach().float() / scale.detach().float()).masked_fill(scale == 0, 0).clamp(*FORMS[form])
    if form == torch.float8_e4m3fn:
        return torch.where(quotient.isnan(), math.nan, quotient).to(form)
    whole = quotient.nan_to_num(0).round()
    if form == torch.int8:
        return whole.to(form)
    low, high = (whole + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def numbers_of(cache: torch.Tensor) -> torch.Tensor:
    """What quantised() gives, [...,D]: int8 and uint8 as int8, float8_e4m3fn as float32. Other caches as they are."""
    if cache.dtype == torch.uint8:
        return torch.stack((cache & 15, cache >> 4), -1).flatten(-2).to(torch.int8) - 8
    return cache.float() if cache.dtype == torch.float8_e4m3fn else cache


def row_scales(rows: torch.Tensor, form: torch.dtype = torch.int8) -> torch.Tensor:
    """The scales float32 [...,1] that rows [...,D] have of their own: the largest magnitude / the largest number of `form`, in
    float32. 0 where no magnitude is 2^-100 or more; NaN where an element is NaN or infinite.

    Example:
        import torch
        from leanfleet.export.reference import quantised, row_scales

        rows = torch.tensor([[1.0, -2.0, 0.5]])
        scale = row_scales(rows)
        print(quantised(rows, scale).tolist(), (quantised(rows, scale) * scale).tolist())
    """
    largest = rows.detach().float().abs().amax(-1, keepdim=True)
    divisor = torch.full_like(largest, FORMS[form][1])  # CUDA multiplies by the reciprocal of a number
    scale = (largest / divisor).masked_fill(largest < LEAST_MAGNITUDE, 0)
    return scale.masked_fill(~rows.isfinite().all(-1, keepdim=True), math.nan)


class _Cache:
    """A cache brought to slots [slots,Hkv,D], of int4 [slots,Hkv,D/2], and its scale: None, [1], [Hkv,1,D] or, per token, slots
    [slots,Hkv,1]."""

    def __init__(self, variant, cache, scale, per_token):
        self.variant, self.shape, self.per_token, self.form = variant, cache.shape, per_token, cache.dtype
        self.rows, self.scale = _to_slots(variant, cache), scale
        if per_token:
            self.scale = _to_slots(variant, scale.unsqueeze(-1))

    def append(self, rows, targets):
        """Writes the first len(targets[b]) of rows [B,Hkv,Nq,D] at targets[b]."""
        if self.per_token:
            scales = row_scales(rows, self.form)
            self.scale = _append(self.scale, scales.to(self.scale.dtype), targets)
            rows = quantised(rows, scales, self.form)
        elif self.scale is not None:
            rows = quantised(rows, self.scale, self.form)
        if self.form == torch.float8_e4m3fn:  # PyTorch has no kernels that move such numbers about
            self.rows = _append(self.rows.view(torch.uint8), rows.view(torch.uint8), targets).view(self.form)
        else:
            self.rows = _append(self.rows, rows, targets)

    def read(self, slots, compute):
        """[len(slots),Hkv,D] in the type `compute`."""
        rows = numbers_of(self.rows)[slots].to(compute)
        if self.scale is None:
            return rows
        if self.per_token:
            return rows * self.scale[slots].to(compute)
        return rows * self.scale.to(compute).flatten(1 if self.scale.dim() > 1 else 0)  # [Hkv,D] or [1]

    def results(self):
        """The cache, and with scales of tokens these, in their shapes."""
        cache = _from_slots(self.variant, self.rows, self.shape)
        if not self.per_token:
            return cache, None
        return cache, _from_slots(self.variant, self.scale, (*self.shape[:-1], 1)).squeeze(-1)


def _append(slots, rows, targets):
    """slots [slots,Hkv,D] with the first len(targets[b]) of rows [B,Hkv,Nq,D] at targets[b]; a new tensor."""
    if not targets:
        return slots.clone()
    where = torch.cat(targets)
    new = torch.cat([rows[b, :, : len(target)].transpose(0, 1) for b, target in enumerate(targets)])
    return slots.index_put((where[where >= 0],), new[where >= 0])


def _rotate(rows, positions, cos_cache, sin_cache, interleaved, compute):
    """rows T [B,H,Nq,D] with pairs of their first columns rotated for positions [B,Nq]; rounded to T."""
    positions = positions.clamp(0, len(cos_cache) - 1)
    cos, sin = (table.to(compute)[positions].unsqueeze(1) for table in (cos_cache, sin_cache))
    half = cos.shape[-1]
    rotated, rest = rows.to(compute).split((2 * half, rows.shape[-1] - 2 * half), -1)
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.split(half, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, rest), -1).to(rows.dtype)


def _unpacked(op, query, caches, axes, new_key, new_value, append, layout):
    """(query, new_key, new_value) of packed projections [B,H+2Hkv,Nq,D], or in bnhd [B,Nq,H+2Hkv,D]. axes: those of the
    caches but for the last."""
    _check(
        append and new_key is None and new_value is None,
        f"{op}: packed_qkv=1 takes append=1, and query in place of new_key and new_value; append is {int(append)}, new_key "
        f"is {'absent' if new_key is None else 'given'}, new_value is {'absent' if new_value is None else 'given'}",
    )
    heads_axis, ranks = 2 if layout == "bnhd" else 1, [4, *[len(axes) + 1] * 2]
    found = [t.dim() for t in (query, *caches)]
    _check(found == ranks, f"{op}: query, key_cache and value_cache have ranks {found}; expected {ranks}")
    widths = query.shape[-1], numbers_of(caches[1]).shape[-1]
    _check(
        widths[0] == widths[1],
        f"{op}: query has D={widths[0]} and value_cache Dv={widths[1]}; with packed_qkv=1 they must be the same",
    )
    kv_heads = caches[0].shape[axes.index("Hkv")]
    heads = query.shape[heads_axis] - 2 * kv_heads
    _check(
        heads > 0,
        f"{op}: query has {query.shape[heads_axis]} heads; packed with those of {kv_heads} keys and "
        f"{kv_heads} values it has {2 * kv_heads + 1} or more",
    )
    return query.split((heads, kv_heads, kv_heads), heads_axis)


def _padded(rows, spans, axis):
    """Packed rows with the tokens of all requests at `axis` as [B,...] with those of the longest, zeros behind the others."""
    longest = max((stop - start for start, stop in spans), default=0) or 1
    requests = [rows.narrow(axis, start, stop - start) for start, stop in spans]
    padding = [[0, 0] * (rows.dim() - 1 - axis) + [0, longest - request.shape[axis]] for request in requests]
    return torch.stack([pad(request, ends) for request, ends in zip(requests, padding, strict=True)])


def _packed(rows, spans, axis, tokens, fill):
    """The inverse: rows [B,...] as a tensor with `tokens` tokens at `axis`, `fill` where no request has one."""
    shape = list(rows.shape[1:])
    shape[axis] = tokens
    result = rows.new_full(shape, fill)
    for request, (start, stop) in zip(rows, spans, strict=True):
        result.narrow(axis, start, stop - start).copy_(request.narrow(axis, 0, stop - start))
    return result


def _query_spans(cu_query_lens, tokens):
    """Requests of packed new tokens; the first begins at 0."""
    return _spans(torch.cat([torch.zeros_like(cu_query_lens[:1]), cu_query_lens[1:]]), tokens)


def _packed_lean_attention(op, query, cu_query_lens, new_key, new_value, layout, arguments):
    """lean_attention of packed new tokens, as that of the padded ones. arguments: all others by name."""
    _check(query.dim() == 3, f"{op}: query has rank {query.dim()} with cu_query_lens; expected 3, [H,Nq,D]")
    _check(
        cu_query_lens.dim() == 1 and len(cu_query_lens) > 1,
        f"{op}: cu_query_lens has shape {list(cu_query_lens.shape)}; expected [B+1]",
    )
    axis = 0 if layout == "bnhd" else 1
    tokens = query.shape[axis]
    for name, rows in (("new_key", new_key), ("new_value", new_value)):
        _check(
            rows is None or (rows.dim() == 3 and rows.shape[axis] == tokens),
            f"{op}: {name} has other tokens than query, which has Nq={tokens}",
        )
    spans = _query_spans(cu_query_lens, tokens)
    padded = (t if t is None else _padded(t, spans, axis) for t in (query, new_key, new_value))
    counts = torch.tensor([stop - start for start, stop in spans], dtype=torch.int32, device=query.device)
    inputs = dict(zip(("query", "new_key", "new_value"), padded, strict=True))
    output, lse, *caches = lean_attention(**inputs, query_lens=counts, layout=layout, **arguments)
    return _packed(output, spans, axis, tokens, 0), _packed(lse, spans, axis, tokens, -math.inf), *caches


def lean_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    query_lens: torch.Tensor | None = None,
    new_key: torch.Tensor | None = None,
    new_value: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cos_cache: torch.Tensor | None = None,
    sin_cache: torch.Tensor | None = None,
    cu_query_lens: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    *,
    scale: float = 0.0,
    causal: int = 1,
    window: int = -1,
    softcap: float = 0.0,
    append: int = 0,
    layout: str = "bhnd",
    rotary_interleaved: int = 0,
    packed_qkv: int = 0,
    key_per_token: int = 0,
    value_per_token: int = 0,
    world: int = 1,
    communicator: str = "world",
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Exact softmax attention of the newest tokens over a cache (LeanAttention).

    query T [B,H,Nq,D]; rows at and past query_lens are padding and may hold anything.
    key_cache, value_cache T: dense [B,Hkv,S,D], [B,Hkv,S,Dv]; with cu_seqlens I [B+1] ragged [Hkv,total,D],
    [Hkv,total,Dv], where request b owns positions cu[b] .. cu[b+1]; with block_table I [B,M] paged
    [P,block,Hkv,D], [P,block,Hkv,Dv].
    seq_lens I [B]: valid tokens of each request, the new ones included; clamped to [0, capacity], which is
    S, cu[b+1] - cu[b] or M * block; absent: the capacity.
    query_lens I [B]: new tokens of each request, clamped to [0, min(Nq, seq_len)]; absent: Nq.
    cu_query_lens I [B+1]: packed new tokens instead of query_lens. query is [H,Nq,D], new_key and new_value [Hkv,Nq,D] and
    [Hkv,Nq,Dv] with the tokens of all requests, request b's at cu[b] .. cu[b+1]; output is [H,Nq,Dv] and lse [H,Nq]. Offsets
    are clamped to [0, Nq]; the first is taken as 0. Where they fall, the kernels leave open what the rows are.
    new_key, new_value T [B,Hkv,Nq,D], [B,Hkv,Nq,Dv]: with append, row i is first written to position p_i. With
    packed_qkv they are absent and query [B,H+2Hkv,Nq,D] holds them: the queries' heads, then the keys', then the values'.
    sinks F [H]: a logit that joins the softmax's sum and has no value.
    cos_cache, sin_cache F [positions,half]: rotary encoding. The first 2 half columns of query's row i, and of
    new_key's, turn in pairs, a to a cos - b sin and b to b cos + a sin, by row p_i of the tables (the last one where
    p_i lies beyond) and are rounded to T. Pairs are columns j and half + j, with rotary_interleaved 2 j and 2 j + 1.
    Caches hold rotated keys: what is in them is not rotated again.
    key_scale, value_scale F: key_cache, value_cache are int8, float8_e4m3fn, or uint8 of two int4 each, whose last axis is
    half of D or Dv (see quantised), and stand for their numbers times the scale: [1]; [Hkv,1,D], of a head's columns; or,
    with key_per_token or value_per_token, one for each position and head, shaped as the cache without its last axis.
    Appended rows, rotated and rounded to T, become quantised(row, scale); per token their scale is first made their largest
    magnitude / the largest number of the type (row_scales). Infinities saturate, and NaN becomes 0 in integers, where the
    scale is not the token's own; a token's own is then NaN.

    Row i has position p_i = seq_len - query_len + i and logit_ij = scale * q_i . k_j (scale 0: 1/sqrt(D)),
    then softcap * tanh(logit / softcap) if softcap is not 0. It sees j <= p_i when causal, else all valid
    keys, and only j > p_i - window if window is not -1. Offsets in cu_seqlens are clamped to [0, total]; a
    page id outside the pool masks its positions out, for reading and for writing. What no row sees may be
    anything, NaN included.

    world above 1: the keys are spread over the ranks of a communicator, see ops.toml. The reference takes all ranks to have
    this one's, and raises ValueError where this process's communicator has more than one rank.

    Returns output T [B,H,Nq,Dv] and lse F [B,H,Nq], the natural logarithm of the sum of exponentials, sink
    included; with append also key_cache_out and value_cache_out, and of them that are per token key_scale_out and
    value_scale_out. A row that sees nothing has output 0 and
    lse -inf, or the sink; padding rows and empty requests have output 0 and lse -inf.
    """
    given = locals()
    op = "LeanAttention"
    if world != 1:
        _check(world >= 1, f"{op}: world is {world}; expected 1 or more")
        _alone(op, communicator)
        output, lse, *caches = lean_attention(**given | {"world": 1, "sinks": None})
        of_ranks = lse + math.log(world)
        if sinks is None:
            return output, of_ranks, *caches
        seen = ~torch.isinf(lse)
        total = torch.where(seen, torch.logaddexp(of_ranks, sinks if layout == "bnhd" else sinks[:, None]), lse)
        share = torch.where(seen, (of_ranks - total).exp(), 0.0).unsqueeze(-1)
        return (output * share).to(output.dtype), total, *caches
    if cu_query_lens is not None:
        _check(query_lens is None, f"{op}: query_lens and cu_query_lens are both given; give one")
        arguments = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "seq_lens": seq_lens,
            "cu_seqlens": cu_seqlens,
            "block_table": block_table,
            "sinks": sinks,
            "cos_cache": cos_cache,
            "sin_cache": sin_cache,
            "scale": scale,
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "append": append,
            "rotary_interleaved": rotary_interleaved,
            "packed_qkv": packed_qkv,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "key_per_token": key_per_token,
            "value_per_token": value_per_token,
            "compute_dtype": compute_dtype,
        }
        return _packed_lean_attention(op, query, cu_query_lens, new_key, new_value, layout, arguments)
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype)
    _check(
        cu_seqlens is None or block_table is None,
        f"{op}: cu_seqlens and block_table are both given; give one (ragged or paged) or none (dense)",
    )
    variant = "ragged" if cu_seqlens is not None else "paged" if block_table is not None else "dense"
    axes = {"dense": "B Hkv S", "ragged": "Hkv total", "paged": "P block Hkv"}[variant]
    if packed_qkv:
        query, new_key, new_value = _unpacked(
            op, query, (key_cache, value_cache), axes.split(), new_key, new_value, append, layout
        )
    match("query", query, "T", "B H Nq D*")
    match("key_cache", key_cache, "C", f"{axes} D")
    match("value_cache", value_cache, "C", f"{axes} Dv")
    _check_heads(op, dims)
    dims["B+1"] = dims["B"] + 1
    match("seq_lens", seq_lens, "I", "B")
    match("query_lens", query_lens, "I", "B")
    match("new_key", new_key, "T", "B Hkv Nq D*")
    match("new_value", new_value, "T", "B Hkv Nq Dv*")
    match("cu_seqlens", cu_seqlens, "I", "B+1")
    match("block_table", block_table, "I", "B M")
    match("sinks", sinks, "F", "H")
    match("cos_cache", cos_cache, "F", "positions half")
    match("sin_cache", sin_cache, "F", "positions half")
    dims["1"] = 1
    for name, cache, of_cache, per_token, width in (
        ("key", key_cache, key_scale, key_per_token, "D"),
        ("value", value_cache, value_scale, value_per_token, "Dv"),
    ):
        _check(not per_token or of_cache is not None, f"{op}: {name}_per_token is 1 without {name}_scale")
        _check(
            (of_cache is not None) == (cache.dtype in FORMS),
            f"{op}: {name}_cache has type {cache.dtype} and {name}_scale is "
            f"{'absent' if of_cache is None else 'given'}; caches of {' or '.join(map(str, FORMS))} have scales, others none",
        )
        static = "1" if of_cache is None or of_cache.dim() == 1 else f"Hkv 1 {width}"
        match(f"{name}_scale", of_cache, "F", axes if per_token else static)
    _check(
        (cos_cache is None) == (sin_cache is None),
        f"{op}: {'cos' if cos_cache is None else 'sin'}_cache is missing; cos_cache and sin_cache go together",
    )
    _check(
        cos_cache is not None or not rotary_interleaved,
        f"{op}: rotary_interleaved is {int(rotary_interleaved)} without cos_cache",
    )
    _check(
        2 * dims.get("half", 0) <= dims["D"],
        f"{op}: cos_cache turns {2 * dims.get('half', 0)} columns; query has D={dims['D']}",
    )
    for name, tensor in (("new_key", new_key), ("new_value", new_value)):
        _check(
            (tensor is not None) == bool(append),
            f"{op}: {name} is {'absent' if tensor is None else 'given'} and append is {int(append)}; "
            "append=1 takes both new_key and new_value, or packed_qkv, append=0 neither",
        )
    _check(window == -1 or window >= 1, f"{op}: window is {window}; expected -1 (off) or 1 or more keys")
    _check(softcap >= 0, f"{op}: softcap is {softcap}; expected 0 (off) or more")
    _check(window == -1 or causal, f"{op}: window is {window} with causal=0; a window needs causal=1")

    batch, heads, tokens, group = dims["B"], dims["H"], dims["Nq"], dims["H"] // dims["Hkv"]
    scale = scale or 1 / math.sqrt(dims["D"])
    slots_of = _cache_slots(variant, batch, key_cache, cu_seqlens, block_table)
    lengths, counts = [len(slots) for slots in slots_of], [tokens] * batch
    if seq_lens is not None:
        lengths = [min(max(n, 0), capacity) for n, capacity in zip(seq_lens.tolist(), lengths, strict=True)]
    if query_lens is not None:
        counts = [max(n, 0) for n in query_lens.tolist()]
    counts = [min(n, tokens, length) for n, length in zip(counts, lengths, strict=True)]

    query, new_key = (t if t is None else _swap(t, layout) for t in (query, new_key))
    if cos_cache is not None:
        first = torch.tensor(
            [length - n for length, n in zip(lengths, counts, strict=True)], dtype=torch.long, device=query.device
        )
        positions = first.unsqueeze(-1) + torch.arange(tokens, device=query.device)
        query, new_key = (
            t if t is None else _rotate(t, positions, cos_cache, sin_cache, rotary_interleaved, compute)
            for t in (query, new_key)
        )

    keys = _Cache(variant, key_cache, key_scale, key_per_token)
    values = _Cache(variant, value_cache, value_scale, value_per_token)
    if append:
        targets = [slots[length - n : length] for slots, length, n in zip(slots_of, lengths, counts, strict=True)]
        keys.append(new_key, targets)
        values.append(_swap(new_value, layout), targets)

    if sinks is None:
        sinks = query.new_full((heads,), -math.inf)
    sinks = sinks.to(compute).view(-1, group, 1, 1)
    outputs, sums = [], []
    for rows, slots, length, n in zip(query, slots_of, lengths, counts, strict=True):
        slots = slots[:length]
        position = length - n + torch.arange(n, device=query.device).unsqueeze(-1)
        index = torch.arange(length, device=query.device)
        visible = (slots >= 0).expand(n, length)
        if causal:
            visible = visible & (index <= position)
        if window >= 0:
            visible = visible & (index > position - window)
        seen = visible.any(0)  # a key that no row sees is not read, so that whatever it holds cannot leak
        q = rows[:, :n].to(compute).unflatten(0, (-1, group))
        k, v = keys.read(slots[seen], compute), values.read(slots[seen], compute)
        logits = scale * torch.einsum("hgid,jhd->hgij", q, k)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible[:, seen], -math.inf)
        logits = torch.cat([logits, sinks.expand(-1, -1, n, 1)], -1)  # one more column, without a value
        top = logits.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0)
        weights = (logits - top).exp()
        total = weights.sum(-1, keepdim=True)
        blank = total == 0
        total = total.masked_fill(blank, 1)
        out = torch.einsum("hgij,jhd->hgid", weights[..., :-1] / total, v)
        lse = (total.log() + top).masked_fill(blank, -math.inf)
        outputs.append(pad(out.flatten(0, 1), (0, 0, 0, tokens - n)))
        sums.append(pad(lse.flatten(0, 1).squeeze(-1), (0, tokens - n), value=-math.inf))
    output = torch.stack(outputs) if batch else query.new_zeros(0, heads, tokens, dims["Dv"])
    lse = torch.stack(sums) if batch else query.new_zeros(0, heads, tokens)
    result: tuple[torch.Tensor, ...] = _swap(output.to(query.dtype), layout), _swap(lse.to(float_out), layout)
    if append:
        (key_cache, key_scale), (value_cache, value_scale) = keys.results(), values.results()
        result += (key_cache, value_cache, *(t for t in (key_scale, value_scale) if t is not None))
    return result


# CausalLinearDecay
#
# Inside, query is [B,Hkv,G,N,R] with G = H / Hkv and scale multiplied in, key and value [B,Hkv,1,N,..],
# log_decay [B,Hkv,1,N,1], or of key dimensions [B,Hkv,1,N,R], and a state [B,Hkv,1,R,Dv]. Products of decays are exponentials
# of sums, never of differences of sums, so that no exponent is positive and a decay of 0 (log_decay -inf) is exact anywhere.


def _prefix(log_decay):
    """What is left at token i of a state before the first token: Π_{t<=i} γ_t."""
    return log_decay.cumsum(-2).exp()


def _suffix(log_decay):
    """What is left after the last token of what token j wrote: Π_{t>j} γ_t."""
    later = pad(log_decay[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def _mask(log_decay):
    """M_ij = Π_{t=j+1..i} γ_t for i >= j (LD eq. 4); 1 above the diagonal, where the caller takes tril."""
    n = log_decay.shape[-2]
    upper = torch.ones(n, n, dtype=torch.bool, device=log_decay.device).triu()
    return log_decay.expand(*log_decay.shape[:-1], n).masked_fill(upper, 0).cumsum(-2).exp()


def _masked_product(query, key, value, log_decay):
    """((Q Kᵀ) ⊙ M) V; tril selects, so that an infinite score above the diagonal does no harm."""
    return (query @ key.mT * _mask(log_decay)).tril() @ value


def _next_state(key, value, log_decay, state):
    return _prefix(log_decay)[..., -1:, :] * state + (_suffix(log_decay) * key).mT @ value


def _vanilla(query, key, value, log_decay, state):
    """LD eq. 4 as it stands: the whole N x N matrix."""
    output = _masked_product(query, key, value, log_decay) + _prefix(log_decay) * (query @ state)
    return output, _next_state(key, value, log_decay, state)


def _block_based(query, key, value, log_decay, state, block=BLOCK // 2):
    """LD algorithm 2: block after block, its own masked product plus the state before it."""
    outputs = []
    for parts in zip(*(x.split(block, -2) for x in (query, key, value, log_decay)), strict=True):
        output, state = _vanilla(*parts, state)
        outputs.append(output)
    return torch.cat(outputs, -2), state


def _recursion(query, key, value, log_decay, state):
    """LD algorithm 4: two halves, and between them a quarter without a mask, multiplied from the right."""

    def halves(query, key, value, log_decay):
        n = query.shape[-2]
        if n <= RECURSION_BASE:
            return _masked_product(query, key, value, log_decay)
        first, second = zip(*(x.tensor_split(2, -2) for x in (query, key, value, log_decay)), strict=True)
        (_, key1, value1, log_decay1), (query2, _, _, log_decay2) = first, second
        across = (_prefix(log_decay2) * query2) @ ((_suffix(log_decay1) * key1).mT @ value1)
        return torch.cat([halves(*first), halves(*second) + across], -2)

    output = halves(query, key, value, log_decay) + _prefix(log_decay) * (query @ state)
    return output, _next_state(key, value, log_decay, state)


def _causal_dot_product(query, key, value, log_decay, state):
    """LD algorithm 1: row after row, S_i = diag(γ_i) S_{i-1} + k_iᵀ v_i and o_i = q_i S_i."""
    outputs = []
    rows = (x.split(1, -2) for x in (query, key, value, log_decay.exp()))
    for q, k, v, decay in zip(*rows, strict=True):
        state = decay.mT * state + k.mT @ v
        outputs.append(q @ state)
    return torch.cat(outputs, -2), state


def _decayed_cumsum(x, decay):
    """y_i = decay_i y_{i-1} + x_i along tokens, the λ-cumsum of LD appendix C.1, in log2 N doublings."""
    step = 1
    while step < x.shape[-2]:
        x = x + decay * pad(x[..., :-step, :], (0, 0, step, 0))
        decay = decay * pad(decay[..., :-step, :], (0, 0, step, 0))
        step *= 2
    return x


def _fleet(query, key, value, log_decay, state):
    """LD eq. 5 and appendix C.1, FA eq. 7: the sum over ranks r of diag(b_r) λ-cumsum(diag(c_r) V).

    No matrix product. Row r of the state before the first token enters as the prefix l_r of LD algorithm 5.
    """
    decay, output, last = log_decay.exp(), 0, []
    for q, k, prefix in zip(query.split(1, -1), key.split(1, -1), state.split(1, -2), strict=True):
        first = pad(decay[..., :1, :] * prefix, (0, 0, 0, key.shape[-2] - 1))
        sums = _decayed_cumsum(k * value + first, decay)
        output = output + q * sums
        last.append(sums[..., -1:, :])
    return output, torch.cat(last, -2)


def _lightning(query, key, value, log_decay, state, block=BLOCK):
    """Lightning Attention-2 (LD section 3.2): divided into what stays inside a block and what crosses blocks.

    All blocks' masked products (as in vanilla) and state updates are taken at once; only the states between
    blocks are a recurrence, that of causal_dot_product with blocks for rows.
    """
    tokens = query.shape[-2]
    block = min(block, tokens)
    q, k, v, g = (pad(x, (0, 0, 0, -tokens % block)).unflatten(-2, (-1, block)) for x in (query, key, value, log_decay))
    update, carry = (_suffix(g) * k).mT @ v, _prefix(g)
    states = []
    for added, kept in zip(update.unbind(-3), carry[..., -1:, :].unbind(-3), strict=True):
        states.append(state)
        state = kept * state + added
    output = _masked_product(q, k, v, g) + carry * (q @ torch.stack(states, -3))
    return output.flatten(-3, -2)[..., :tokens, :], state


ALGORITHMS = {
    "auto": _lightning,
    "vanilla": _vanilla,
    "block_based": _block_based,
    "recursion": _recursion,
    "causal_dot_product": _causal_dot_product,
    "fleet": _fleet,
    "lightning": _lightning,
}
# Where each key dimension has a decay of its own.
KEY_ALGORITHMS = dict.fromkeys(("auto", "causal_dot_product"), _causal_dot_product)


def _away_from_zero(x, eps):
    """x with its magnitude held at eps or more, sign kept (that of 0 is plus), NaN kept; constant where it is held."""
    return torch.where(x.abs() < eps, torch.where(x < 0, x.new_tensor(-eps), x.new_tensor(eps)), x)


def _grouped(query, key, value, group, layout, compute):
    query, key, value = (_swap(x, layout).to(compute) for x in (query, key, value))
    return query.unflatten(1, (-1, group)), key.unsqueeze(2), value.unsqueeze(2)


def _check_shared_heads(op, dims):
    """That query, key and value heads divide each other as operators with Hq, Hk and Hv ask for."""
    queries, keys, values = dims["Hq"], dims["Hk"], dims["Hv"]
    _check(values % keys == 0, f"{op}: Hv = {values} is not a multiple of Hk = {keys}")
    _check(queries % keys == 0, f"{op}: Hq = {queries} is not a multiple of Hk = {keys}")
    heads = max(queries, values)
    _check(
        heads % min(queries, values) == 0,
        f"{op}: Hq = {queries} and Hv = {values}; one of the two must be a multiple of the other",
    )
    return heads


def _decay_inputs(op, match, dims, query, key, value, log_decay, cu_seqlens, layout, compute):
    """Checks and brings to the inner shapes; also sets dims["Q"], the number of states."""
    match("query", query, "T", "B Hq N R*")
    match("key", key, "T", "B Hk N R*")
    match("value", value, "T", "B Hv N Dv*")
    heads = _check_shared_heads(op, dims)
    if cu_seqlens is not None:
        match("cu_seqlens", cu_seqlens, "I", "Q+1")
        _check(
            dims["B"] == 1 and dims["Q+1"] >= 1,
            f"{op}: query has batch B={dims['B']} and cu_seqlens has {dims['Q+1']} entries; packed "
            "requests have B=1 and one entry more than there are requests",
        )
    dims["Q"] = dims["B"] if cu_seqlens is None else dims["Q+1"] - 1
    batch, states, tokens = dims["B"], dims["Hv"], dims["N"]
    dims["H"] = heads
    query, key, value = (_swap(x, layout).to(compute) for x in (query, key, value))
    query = _expanded(query, heads).unflatten(1, (states, heads // states))
    key, value = _expanded(key, states).unsqueeze(2), value.unsqueeze(2)
    if log_decay is None:
        decay = key.new_zeros(batch, states, tokens)
    elif log_decay.dim() in (3, 4):
        match("log_decay", log_decay, "F", "B Hv N*" if log_decay.dim() == 3 else "B Hv N R*")
        decay = _swap(log_decay, layout)
    else:
        match("log_decay", log_decay, "F", "Hv")
        decay = log_decay.view(1, -1, 1).expand(batch, -1, tokens)
    return query, key, value, decay.to(compute).reshape(batch, states, 1, tokens, -1 if decay.dim() == 4 else 1)


def _per_request(run, spans, tokens, states):
    """run(*tokens, *states) -> (token outputs, final state), once, or for each request of a packed batch."""
    if spans is None:
        return run(*tokens, *states)
    empty, _ = run(*(x[..., :0, :] for x in tokens), *states)
    outputs = [x.new_zeros(*x.shape[:-2], tokens[0].shape[-2], x.shape[-1]) for x in empty]
    finals = []
    for request, (start, stop) in enumerate(spans):
        own = (x[request : request + 1] for x in states)
        parts, final = run(*(x[..., start:stop, :] for x in tokens), *own)
        outputs = [torch.slice_scatter(x, part, -2, start, stop) for x, part in zip(outputs, parts, strict=True)]
        finals.append(final)
    return outputs, torch.cat(finals) if finals else states[0].clone()


def causal_linear_decay(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    initial_norm: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_index: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    algorithm: str = "auto",
    scale: float = 1.0,
    normalize: int = 0,
    eps: float = 1e-6,
    return_state: int = 0,
    layout: str = "bhnd",
    state_v_first: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Causal linear attention with exponential decay: O = ((scale * Q Kᵀ) ⊙ M) V (LD eq. 4).

    query T [B,Hq,N,R], key T [B,Hk,N,R], value T [B,Hv,N,Dv]: B, C and V of LD. Of the H = max(Hq, Hv) heads of the output
    head h takes query head h // (H / Hq) and state h // (H / Hv); state h takes key head h // (Hv / Hk).
    log_decay F [Hv], per token [B,Hv,N], or of each of its key dimensions [B,Hv,N,R]: ln γ in [-inf, 0]; -inf is γ = 0,
    absent is γ = 1.
    initial_state F or T [B,Hv,R,Dv], with state_v_first [B,Hv,Dv,R]; absent: zeros. With normalize, and only then,
    initial_norm F [B,Hv,R] too.
    cu_seqlens I [Q+1]: request r is tokens cu[r] .. cu[r+1] of a batch of 1, and states have Q in place of
    B. Offsets are clamped to [0, N]; tokens of no request have output 0.
    state_index I [B] (or [Q]): the row of each request in a pool of states [P,Hv,R,Dv] and of norms
    [P,Hv,R], which must be given. A row outside the pool is zeros and is not written; none may come twice.
    beta F [B,Hv,N]: of each token, what its key is multiplied by, for each state; absent: 1.

    S_i = diag(γ_i) S_{i-1} + β_i k_iᵀ v_i and o_i = scale * q_i S_i. With normalize also z_i = γ_i z_{i-1} + β_i k_i, and
    o_i is divided by d_i = scale * q_i . z_i, where |d_i| is held at eps or more, sign kept (FA algorithm 1;
    d_i is the same operator on values of 1).

    algorithm: vanilla, block_based, recursion, causal_dot_product, fleet, lightning, or auto, which is
    lightning here; they differ in rounding alone. With decays of key dimensions auto or causal_dot_product, both token by
    token.
    Returns output T [B,H,N,Dv]; with return_state final_state of the type and shape of initial_state, without one F, and with
    normalize too final_norm F, shaped as initial_norm.
    """
    op = "CausalLinearDecay"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype, eps)
    _check(algorithm in ALGORITHMS, f"{op}: algorithm is {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    q, k, v, decay = _decay_inputs(op, match, dims, query, key, value, log_decay, cu_seqlens, layout, compute)
    per_key = log_decay is not None and log_decay.dim() == 4
    _check(
        not per_key or algorithm in KEY_ALGORITHMS,
        f"{op}: log_decay is that of each key dimension and algorithm is {algorithm!r}; it must be auto or causal_dot_product "
        "then",
    )
    _check(initial_norm is None or normalize, f"{op}: initial_norm is given and normalize is 0; it needs normalize=1")
    rows = "Q" if state_index is None else "P"
    match("state_index", state_index, "I", "Q")
    if beta is not None:
        match("beta", beta, "F", "B Hv N*")
        k = k * _swap(beta, layout).to(compute)[:, :, None, :, None]
    match("initial_state", initial_state, "S", f"{rows} Hv Dv R" if state_v_first else f"{rows} Hv R Dv")
    match("initial_norm", initial_norm, "F", f"{rows} Hv R")
    _check(
        state_index is None or initial_state is not None,
        f"{op}: state_index is given and initial_state is absent; it must be the pool",
    )
    _check(
        not normalize or (initial_state is None) == (initial_norm is None),
        f"{op}: one of initial_state and initial_norm is absent and normalize is 1; give both or neither",
    )

    # The normaliser is one more column of value and of the state.
    zeros = v.new_zeros(dims["Q"], dims["Hv"], dims["R"], dims["Dv"])
    pool = zeros if initial_state is None else initial_state.to(compute)
    if state_v_first and initial_state is not None:
        pool = pool.mT
    if normalize:
        norm = pool.new_zeros(pool.shape[:-1]) if initial_norm is None else initial_norm.to(compute)
        pool = torch.cat([pool, norm.unsqueeze(-1)], -1)
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    state = pool
    if state_index is not None:
        inside = (state_index >= 0) & (state_index < len(pool))
        requests, index = inside.nonzero().squeeze(-1), state_index[inside].long()
        state = pool.new_zeros(dims["Q"], *pool.shape[1:]).index_put((requests,), pool[index])

    def run(query, key, value, log_decay, state):
        if not query.shape[-2]:
            return [query.new_zeros(*query.shape[:-1], value.shape[-1])], state.clone()
        output, state = (KEY_ALGORITHMS if per_key else ALGORITHMS)[algorithm](query, key, value, log_decay, state)
        return [output], state

    spans = _spans(cu_seqlens, dims["N"])
    (output,), final = _per_request(run, spans, (scale * q, k, v, decay), (state.unsqueeze(2),))
    if normalize:
        output = output[..., :-1] / _away_from_zero(output[..., -1:], eps)
    result = (_swap(output.flatten(1, 2).to(query.dtype), layout),)
    if return_state:
        final = final.squeeze(2)
        if state_index is not None:
            final = pool.index_put((index,), final[requests])
        state_type = float_out if initial_state is None else initial_state.dtype
        norms = (final[..., -1].to(float_out).clone(),) if normalize else ()
        final = final[..., :-1] if normalize else final
        result += ((final.mT if state_v_first else final).to(state_type).contiguous().clone(), *norms)
    return result


def causal_linear_decay_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    grad_output: torch.Tensor | None = None,
    grad_final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    grad_decay: int = 0,
    grad_state: int = 0,
    layout: str = "bhnd",
    state_v_first: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of causal_linear_decay without normalize, in closed form, in O(N) time and memory.

    Inputs as there; grad_output T [B,H,N,Dv], grad_final_state F shaped as the state; absent: zeros.
    With G_i the gradient of S_i, from later tokens and its own output,
      G_i = γ_{i+1} G_{i+1} + scale * q_iᵀ do_i, where grad_final_state stands for γ_{N+1} G_{N+1}
      dq_i = scale * do_i S_iᵀ,   dk_i = v_i G_iᵀ,   dv_i = k_i G_i,   dlog_decay_i = ⟨G_i, γ_i S_{i-1}⟩
    so that dlog_decay_i is 0 where γ_i is; of a key dimension it is its row's product. Taken block by block, with decays of key
    dimensions token by token; a token's dlog_decay is the sum of the terms its decay is a factor of, without subtraction.

    Returns grad_query, grad_key, grad_value T; with grad_decay grad_log_decay F, shaped as log_decay, which
    must be given; with grad_state grad_initial_state F, shaped as initial_state, given or not.
    The normalised form is differentiated by composition of numerator and denominator, not here.
    """
    op = "CausalLinearDecayGrad"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype)
    q, k, v, decay = _decay_inputs(op, match, dims, query, key, value, log_decay, cu_seqlens, layout, compute)
    if grad_output is None:
        raise ValueError(f"{op}: grad_output is absent; it must be given")
    _check(
        log_decay is not None or not grad_decay,
        f"{op}: grad_decay is 1 and log_decay is absent; give log_decay (zeros for no decay)",
    )
    match("grad_output", grad_output, "T", "B H N Dv*")
    states = []
    for name, x in (("initial_state", initial_state), ("grad_final_state", grad_final_state)):
        match(name, x, "F", "Q Hv Dv R" if state_v_first else "Q Hv R Dv")
        if x is None:
            x = v.new_zeros(dims["Q"], dims["Hv"], dims["R"], dims["Dv"])
        elif state_v_first:
            x = x.mT
        states.append(x.to(compute).unsqueeze(2))
    do = _swap(grad_output, layout).to(compute).unflatten(1, q.shape[1:3])
    spans = _spans(cu_seqlens, dims["N"])
    per_key = log_decay is not None and log_decay.dim() == 4
    backward = _key_decay_backward if per_key else _decay_backward
    (dq, dk, dv, dg), ds = _per_request(backward, spans, (scale * q, k, v, decay, do), states)
    dq, dk, dv = (x.flatten(1, 2) for x in (scale * dq, dk, dv))
    dq, dk = (x.unflatten(1, (heads, -1)).sum(2) for x, heads in ((dq, dims["Hq"]), (dk, dims["Hk"])))
    result = tuple(_swap(x.to(query.dtype), layout) for x in (dq, dk, dv))
    if grad_decay and log_decay is not None:
        dg = dg.squeeze(2) if per_key else dg.flatten(2)
        result += ((dg.sum((0, 2)) if log_decay.dim() == 1 else _swap(dg, layout)).to(float_out),)
    if grad_state:
        ds = ds.squeeze(2)
        result += ((ds.mT if state_v_first else ds).to(float_out).contiguous(),)
    return result


def _decay_backward(query, key, value, log_decay, do, state, ds):
    """dq, dk, dv, dlog_decay and the gradient of the state before the first token; ds is that of the last."""

    def over_group(x):
        return x.sum(2, keepdim=True)

    if not query.shape[-2]:
        return [x.clone() for x in (query, key, value, log_decay)], ds.clone()
    blocks = list(zip(*(x.split(BLOCK, -2) for x in (query, key, value, log_decay, do)), strict=True))
    states, grads = [], []
    for _, k, v, g, _ in blocks:
        states.append(state)
        state = _next_state(k, v, g, state)
    for (q, k, v, g, o), state in zip(reversed(blocks), reversed(states), strict=True):
        mask, prefix, suffix = _mask(g), _prefix(g), _suffix(g)
        kept = prefix[..., -1:, :]
        scores = q @ k.mT
        weights = (scores * mask).tril()  # M_ij q_i.k_j
        dscores = (o @ v.mT * mask).tril()  # M_ij do_i.v_j
        dq = dscores @ k + prefix * (o @ state.mT)
        dk = over_group(dscores.mT @ q) + suffix * (v @ ds.mT)
        dv = over_group(weights.mT @ o) + suffix * (k @ ds)
        # Decay t is a factor of what row i >= t takes from key j < t (pairs) and from the state before the
        # block (rows), and of what the state after the block keeps of key j < t (keys) and of the one before.
        pairs = over_group((dscores * scores).tril())
        rows = over_group((prefix * (q @ state) * o).sum(-1, keepdim=True))
        keys = (suffix * (k @ ds) * v).sum(-1, keepdim=True)
        from_t = torch.cat([pairs, rows], -1).flip(-2).cumsum(-2).flip(-2)
        dg = from_t[..., :-1].tril(-1).sum(-1, keepdim=True) + from_t[..., -1:]
        dg = dg + pad(keys.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        dg = dg + kept * (state * ds).sum((-2, -1), keepdim=True)
        ds = kept * ds + over_group((prefix * q).mT @ o)
        grads.append((dq, dk, dv, dg))
    return [torch.cat(parts[::-1], -2) for parts in zip(*grads, strict=True)], ds


def _key_decay_backward(query, key, value, log_decay, do, state, ds):
    """The same for decays of key dimensions, token by token; states are computed again from those before blocks."""
    tokens = (query, key, value, log_decay, do)
    if not query.shape[-2]:
        return [x.clone() for x in tokens[:4]], ds.clone()
    blocks = list(zip(*(x.split(BLOCK, -2) for x in tokens), strict=True))
    states, grads = [state], []
    for q, k, v, g, _ in blocks[:-1]:
        states.append(_causal_dot_product(q, k, v, g, states[-1])[1])
    for block, state in zip(reversed(blocks), reversed(states), strict=True):
        steps = []
        for q, k, v, g, o in zip(*(x.split(1, -2) for x in block), strict=True):
            kept = g.mT.exp() * state
            state = kept + k.mT @ v
            steps.append((q, k, v, g, o, kept, state))
        for q, k, v, g, o, kept, state in reversed(steps):
            ds = ds + (q.mT @ o).sum(2, keepdim=True)
            grads.append((o @ state.mT, v @ ds.mT, k @ ds, (kept * ds).sum(-1).unsqueeze(-2)))
            ds = g.mT.exp() * ds
    return [torch.cat(parts[::-1], -2) for parts in zip(*grads, strict=True)], ds


# GatedDeltaRule


def _expanded(x, heads):
    """[B,h,...] with each head repeated, so that there are `heads`."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _delta_rule(query, key, value, log_decay, beta, state):
    """Token by token: query, key [B,H,N,D], value [B,H,N,Dv], log_decay [B,H,N,D or 1], beta [B,H,N,1], state [B,H,D,Dv]."""
    outputs = []
    for q, k, v, g, b in zip(*(x.unbind(-2) for x in (query, key, value, log_decay, beta)), strict=True):
        state = g.exp().unsqueeze(-1) * state
        missing = b * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k.unsqueeze(-1) * missing.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    if not outputs:
        return [value.clone()], state.clone()
    return [torch.stack(outputs, -2)], state


def _delta_inputs(op, match, dims, query, key, value, log_decay, beta, cu_seqlens, scale, normalize_qk, layout, compute):
    """Checks, and the tokens' inputs of _delta_rule; also sets dims["Q"], the number of states, and dims["H"], of the output's
    heads."""
    match("query", query, "T", "B Hq N D*")
    match("key", key, "T", "B Hk N D*")
    match("value", value, "T", "B Hv N Dv*")
    dims["H"], v_heads = _check_shared_heads(op, dims), dims["Hv"]
    if beta is None:
        raise ValueError(f"{op}: beta is absent; it must be given")
    if log_decay is not None:
        match("log_decay", log_decay, "F", "B Hv N D*" if log_decay.dim() == 4 else "B Hv N*")
    match("beta", beta, "F", "B Hv N*")
    if cu_seqlens is not None:
        match("cu_seqlens", cu_seqlens, "I", "Q+1")
        _check(
            dims["B"] == 1 and dims["Q+1"] >= 1,
            f"{op}: query has batch B={dims['B']} and cu_seqlens has {dims['Q+1']} entries; packed "
            "requests have B=1 and one entry more than there are requests",
        )
    dims["Q"] = dims["B"] if cu_seqlens is None else dims["Q+1"] - 1
    heads = dims["H"]
    q, k, v = (_swap(x, layout).to(compute) for x in (query, key, value))
    if normalize_qk:
        q, k = _delta_unit_rows(q), _delta_unit_rows(k)
    b = _swap(beta, layout).to(compute).unsqueeze(-1)
    g = torch.zeros_like(b) if log_decay is None else _swap(log_decay, layout).to(compute)
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    return [_expanded(x, heads) for x in ((scale or dims["D"] ** -0.5) * q, _expanded(k, v_heads), v, g, b)]


def _delta_unit_rows(x):
    return x / (x.square().sum(-1, keepdim=True) + DELTA_ROW_EPS).sqrt()


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_index: torch.Tensor | None = None,
    *,
    scale: float = 0.0,
    normalize_qk: int = 0,
    return_state: int = 0,
    layout: str = "bhnd",
    state_v_first: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gated delta rule, token by token: a decayed state in which each token corrects what is stored under its key.

    query T [B,Hq,N,D], key T [B,Hk,N,D], value T [B,Hv,N,Dv], beta F [B,Hv,N], which must be given. Hk divides Hq and Hv, and
    of Hq and Hv one divides the other.
    log_decay F [B,Hv,N], or of each key dimension [B,Hv,N,D]: in [-inf, 0]; absent: 0.
    initial_state F [B,Hv,D,Dv], with state_v_first [B,Hv,Dv,D]; absent: zeros.
    cu_seqlens, state_index: as in causal_linear_decay.

    S'_i = diag(exp(log_decay_i)) S_{i-1}, u_i = beta_i (v_i - k_i S'_i), S_i = S'_i + k_iᵀ u_i, o_i = scale * q_i S_i, with
    scale 0 meaning 1/sqrt(D). With normalize_qk q_i and k_i are divided by sqrt(sum of squares + 1e-6) first.
    Returns output T [B,max(Hq,Hv),N,Dv], and with return_state final_state F, shaped as initial_state.
    """
    op = "GatedDeltaRule"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype)
    tokens = _delta_inputs(
        op, match, dims, query, key, value, log_decay, beta, cu_seqlens, scale, normalize_qk, layout, compute
    )
    heads, v_heads = dims["H"], dims["Hv"]
    rows = "Q" if state_index is None else "P"
    match("state_index", state_index, "I", "Q")
    match("initial_state", initial_state, "F", f"{rows} Hv Dv D" if state_v_first else f"{rows} Hv D Dv")
    _check(
        state_index is None or initial_state is not None,
        f"{op}: state_index is given and initial_state is absent; it must be the pool",
    )

    zeros = tokens[0].new_zeros(dims["Q"], v_heads, dims["D"], dims["Dv"])
    pool = zeros if initial_state is None else initial_state.to(compute)
    if state_v_first and initial_state is not None:
        pool = pool.mT
    state = pool
    if state_index is not None:
        inside = (state_index >= 0) & (state_index < len(pool))
        requests, index = inside.nonzero().squeeze(-1), state_index[inside].long()
        state = zeros.index_put((requests,), pool[index])
    spans = _spans(cu_seqlens, dims["N"])
    (output,), final = _per_request(_delta_rule, spans, tokens, (_expanded(state, heads),))
    result: tuple[torch.Tensor, ...] = (_swap(output.to(query.dtype), layout),)
    if return_state:
        final = final[:, :: heads // v_heads]  # the query heads of a state have all made the same of it
        if state_index is not None:
            final = pool.index_put((index,), final[requests])
        result += ((final.mT if state_v_first else final).to(float_out).contiguous().clone(),)
    return result


def gated_delta_rule_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    grad_output: torch.Tensor | None = None,
    grad_final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float = 0.0,
    normalize_qk: int = 0,
    grad_decay: int = 0,
    grad_state: int = 0,
    layout: str = "bhnd",
    state_v_first: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of gated_delta_rule in closed form, token by token.

    Inputs as there; grad_output T [B,max(Hq,Hv),N,Dv], grad_final_state F shaped as the state; absent: zeros.
    With S'_i, u_i and S_i as there, dS_i the gradient of S_i from its own output and from later tokens, and du_i that of u_i,
      dS_i = diag(exp(log_decay_{i+1})) dS'_{i+1} + scale * q_iᵀ do_i, where grad_final_state is the first term of the last
      du_i = k_i dS_i,   dS'_i = dS_i - beta_i k_iᵀ du_i,   dq_i = scale * do_i S_iᵀ,   dk_i = u_i dS_iᵀ - beta_i du_i S'_iᵀ
      dv_i = beta_i du_i,   dbeta_i = du_i · (v_i - k_i S'_i),   dlog_decay_i = ⟨S'_i, dS'_i⟩, of a key dimension its row's
    No decay is divided by: states are computed again, forwards, from those before blocks.

    Returns grad_query, grad_key, grad_value T, grad_beta F; with grad_decay grad_log_decay F, shaped as log_decay, which
    must be given; with grad_state grad_initial_state F, shaped as initial_state, given or not.
    """
    op = "GatedDeltaRuleGrad"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype)
    tokens = _delta_inputs(
        op, match, dims, query, key, value, log_decay, beta, cu_seqlens, scale, normalize_qk, layout, compute
    )
    heads, v_heads = dims["H"], dims["Hv"]
    if grad_output is None:
        raise ValueError(f"{op}: grad_output is absent; it must be given")
    _check(
        log_decay is not None or not grad_decay,
        f"{op}: grad_decay is 1 and log_decay is absent; give log_decay (zeros for no decay)",
    )
    match("grad_output", grad_output, "T", "B H N Dv*")
    states = []
    for name, x in (("initial_state", initial_state), ("grad_final_state", grad_final_state)):
        match(name, x, "F", "Q Hv Dv D" if state_v_first else "Q Hv D Dv")
        if x is None:
            x = tokens[0].new_zeros(dims["Q"], v_heads, dims["D"], dims["Dv"])
        elif state_v_first:
            x = x.mT
        states.append(x.to(compute))
    # Query heads of one state each carry their own gradient of it; the first carries that of the last state too.
    first = torch.arange(heads, device=query.device) % (heads // v_heads) == 0
    states = [_expanded(x, heads) for x in states]
    states[1] = states[1].where(first.view(-1, 1, 1), 0)
    do = _swap(grad_output, layout).to(compute)
    spans = _spans(cu_seqlens, dims["N"])
    (dq, dk, dv, dg, db), ds = _per_request(_delta_backward, spans, (*tokens, do), states)

    def over(x, count):
        return x.unflatten(1, (count, -1)).sum(2)

    dq = (scale or dims["D"] ** -0.5) * dq
    if normalize_qk:  # of each head alone, as kernels that have no room for a group's sum
        rows = (_expanded(_swap(x, layout).to(compute), heads) for x in (query, key))
        dq, dk = (_delta_unit_rows_grad(x, dx) for x, dx in zip(rows, (dq, dk), strict=True))
    dq, dk, dv = over(dq, dims["Hq"]), over(dk, dims["Hk"]), over(dv, v_heads)
    if normalize_qk and spans is not None:  # tokens of no request may be NaN
        inside = [any(start <= token < stop for start, stop in spans) for token in range(dims["N"])]
        dq, dk = (x.where(torch.tensor(inside, device=x.device).unsqueeze(-1), 0) for x in (dq, dk))
    result = tuple(_swap(x.to(query.dtype), layout) for x in (dq, dk, dv))
    result += (_swap(over(db, v_heads).squeeze(-1), layout).to(float_out),)
    if grad_decay and log_decay is not None:
        dg = over(dg, v_heads)
        result += (_swap(dg if log_decay.dim() == 4 else dg.squeeze(-1), layout).to(float_out),)
    if grad_state:
        ds = over(ds, v_heads)
        result += ((ds.mT if state_v_first else ds).to(float_out).contiguous(),)
    return result


def _delta_unit_rows_grad(x, dy):
    """The gradient of x, where dy is that of _delta_unit_rows(x)."""
    length = (x.square().sum(-1, keepdim=True) + DELTA_ROW_EPS).sqrt()
    y = x / length
    return (dy - y * (y * dy).sum(-1, keepdim=True)) / length


def _delta_backward(query, key, value, log_decay, beta, do, state, ds):
    """dq, dk, dv, dlog_decay, dbeta and the gradient of the state before the first token; ds is that of the last."""
    tokens = (query, key, value, log_decay, beta, do)
    if not query.shape[-2]:
        return [x.clone() for x in tokens[:5]], ds.clone()
    blocks = list(zip(*(x.split(BLOCK, -2) for x in tokens), strict=True))
    states = [state]
    for q, k, v, g, b, _ in blocks[:-1]:
        states.append(_delta_rule(q, k, v, g, b, states[-1])[1])
    grads = []
    for block, state in zip(reversed(blocks), reversed(states), strict=True):
        steps = []
        for q, k, v, g, b, o in zip(*(x.split(1, -2) for x in block), strict=True):
            kept = g.mT.exp() * state
            missing = v - k @ kept
            steps.append((q, k, g, b, o, kept, missing))
            state = kept + k.mT @ (b * missing)
            steps[-1] += (state,)
        for q, k, g, b, o, kept, missing, state in reversed(steps):
            ds = ds + q.mT @ o
            du = k @ ds
            dq, dv, db = o @ state.mT, b * du, (du * missing).sum(-1, keepdim=True)
            dk = (b * missing) @ ds.mT - dv @ kept.mT
            ds = ds - k.mT @ dv
            dg = (kept * ds).sum(-1).unsqueeze(-2)
            grads.append((dq, dk, dv, dg if g.shape[-1] > 1 else dg.sum(-1, keepdim=True), db))
            ds = g.mT.exp() * ds
    return [torch.cat(parts[::-1], -2) for parts in zip(*grads, strict=True)], ds


def _columns(op, name, tensor, first, count, attribute="first_column"):
    """So many columns of a tensor from `first` on, which an attribute says."""
    width = tensor.shape[-1]
    _check(first >= 0, f"{op}: {attribute} is {first}; expected 0 or more")
    _check(
        first + count <= width,
        f"{op}: columns is 1, {attribute} is {first}, and {name} has {width} columns; expected {count} from {attribute} on",
    )
    return tensor[..., first : first + count]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x (1 + tanh(u)) / 2 as x / (1 + exp(-2 u)), in which nothing cancels where x is far below 0."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


def _activated(op, gate, activation):
    _check(activation in _ACTIVATIONS, f"{op}: activation is {activation!r}; expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation](gate)


def causal_conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    query_lens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_index: torch.Tensor | None = None,
    *,
    activation: str = "none",
    return_state: int = 0,
    columns: int = 0,
    first_column: int = 0,
    split: int = 0,
    first: int = 0,
    second: int = 0,
    third: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """A causal convolution of each channel over K + 1 tokens, the K before the first of them carried as a state.

    input T [B,N,C], weight T [K+1,C] the oldest token's first, bias T [C]. initial_state F [B,K,C], the oldest token first;
    absent: zeros. query_lens I [B]: tokens of each row, clamped to [0, N]; absent: N. cu_seqlens, state_index: as in
    causal_linear_decay. activation: "none" or "silu".
    Returns output T [B,N,C], 0 where a token is of no request, and with return_state final_state F, shaped as initial_state.
    With split the output is three tensors, of first, second and third channels: the first in its place, the others last. With
    columns input is wider, and its C columns from first_column on are taken.
    Source: Dao & Gu, "Transformers are SSMs" (2024), section 7. Raises ValueError for wrong shapes and types.

    Example:
        import torch
        from leanfleet.export import reference

        (output,) = reference.causal_conv(torch.randn(1, 5, 4), torch.randn(3, 4))
        print(output.shape)  # torch.Size([1, 5, 4])
    """
    op = "CausalConv"
    match, dims, compute, float_out = _begin(op, "bhnd", input, compute_dtype)
    _check(columns or not first_column, f"{op}: first_column needs columns")
    for name, size in (("first", first), ("second", second), ("third", third)):
        _check(split or not size, f"{op}: {name} needs split")
    if columns:
        input = _columns(op, "input", input, first_column, weight.shape[-1])
    match("input", input, "T", "B N C")
    match("weight", weight, "T", "K+1 C")
    match("bias", bias, "T", "C")
    match("query_lens", query_lens, "I", "B")
    if cu_seqlens is not None:
        match("cu_seqlens", cu_seqlens, "I", "Q+1")
    past, requests = dims["K+1"] - 1, dims["B"] if cu_seqlens is None else dims["Q+1"] - 1
    dims |= {"K": past, "Q": requests}
    match("state_index", state_index, "I", "Q")
    match("initial_state", initial_state, "F", f"{'Q' if state_index is None else 'P'} K C")
    _check(past >= 1, f"{op}: weight has {past + 1} rows; expected 2 or more, one a token")
    _check(activation in ("none", "silu"), f"{op}: activation is {activation!r}; expected 'none' or 'silu'")
    _check(cu_seqlens is None or dims["B"] == 1, f"{op}: input has batch B={dims['B']}; packed requests have B=1")
    _check(cu_seqlens is None or query_lens is None, f"{op}: cu_seqlens and query_lens are both given; one tells the lengths")
    _check(
        state_index is None or initial_state is not None,
        f"{op}: state_index is given and initial_state is absent; it must be the pool",
    )
    total = dims["N"]
    counts = [total] * requests if query_lens is None else [min(max(n, 0), total) for n in query_lens.tolist()]
    spans = _spans(cu_seqlens, total) or [(0, count) for count in counts]
    x, w = input.to(compute), weight.to(compute)
    zeros = x.new_zeros(past, dims["C"])
    pool = x.new_zeros(requests, *zeros.shape) if initial_state is None else initial_state.to(compute)
    rows = list(range(requests)) if state_index is None else state_index.tolist()
    output, states = torch.zeros_like(x), list(pool.unbind())
    for request, (start, stop) in enumerate(spans):
        batch, row = 0 if cu_seqlens is not None else request, rows[request]
        inside = 0 <= row < len(pool)
        known = torch.cat([pool[row] if inside else zeros, x[batch, start:stop]])
        made = x.new_zeros(()) if bias is None else bias.to(compute)
        for tap in range(past + 1):
            made = made + w[tap] * known[tap : tap + stop - start]
        if activation == "silu":
            made = torch.nn.functional.silu(made)
        output = output.index_put((torch.tensor(batch), torch.arange(start, stop)), made)
        if inside:
            states[row] = known[stop - start :]
    parts = (output.to(input.dtype),)
    if split:
        sizes = (first, second, third)
        whole = sum(sizes) == dims["C"] and min(sizes) >= 1
        _check(
            whole,
            f"{op}: split is 1, and first, second and third are {sizes}; expected C = {dims['C']} channels, 1 or more each",
        )
        parts = parts[0].split(sizes, -1)
    state = ((torch.stack(states) if states else pool).to(float_out).clone(),) if return_state else ()
    return (parts[0], *state, *parts[1:])


# NormalizedLinearAttention
#
# Inside, value has one more column of ones: g is f for a value of 1, Σ k beside Σ kᵀ v, the count beside Σ v.


def _unit_rows(x):
    """x / max(|x|, UNIT_ROW_EPS) (LA eq. 22), and that divisor; a row of zeros stays zeros."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(UNIT_ROW_EPS)
    return x / norm, norm


def _linear_product(x, y, z, causal, state=0):
    """(X Yᵀ ⊙ M) Z + X state, with M all ones, or lower triangular when causal; and state + Yᵀ Z."""
    state = state + y[..., :0, :].mT @ z[..., :0, :]
    final = state + y.mT @ z
    if not causal or not x.shape[-2]:
        return x @ final, final
    return _lightning(x, y, z, y.new_zeros(*y.shape[:-1], 1), state)[0], final


def _token_sum(x, causal):
    """Σ over tokens n <= i when causal, else over all."""
    return x.cumsum(-2) if causal else x.sum(-2, keepdim=True).expand_as(x)


def _normalized_inputs(op, match, dims, query, key, value, coefficients, normalize_qk, layout, compute):
    """Checks and brings to the inner shapes; also the divisors of query's and key's rows, and a and b."""
    match("query", query, "T", "B H N D*")
    match("key", key, "T", "B Hkv N D*")
    match("value", value, "T", "B Hkv N Dv*")
    _check_heads(op, dims)
    match("coefficients", coefficients, "F", "2")
    q, k, v = _grouped(query, key, value, dims["H"] // dims["Hkv"], layout, compute)
    (q, q_norm), (k, k_norm) = (_unit_rows(x) if normalize_qk else (x, None) for x in (q, k))
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    a, b = v.new_ones(2) if coefficients is None else coefficients.to(compute)
    return q, k, v, q_norm, k_norm, a, b


def normalized_linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    initial_key_sum: torch.Tensor | None = None,
    initial_value_sum: torch.Tensor | None = None,
    initial_count: torch.Tensor | None = None,
    *,
    causal: int = 1,
    normalize_qk: int = 0,
    eps: float = 1e-6,
    return_state: int = 0,
    layout: str = "bhnd",
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Linear attention with kernel a + b x (LA eq. 4): o_i = f_i / g_i with f_i = Σ_n (a + b q_i.k_n) v_n and
    g_i = Σ_n (a + b q_i.k_n), over n <= i when causal, else over all n.

    query T [B,H,N,D], key T [B,Hkv,N,D], value T [B,Hkv,N,Dv]; coefficients F [2]: a, b; absent: 1, 1.
    initial_state F [B,Hkv,D,Dv], initial_key_sum F [B,Hkv,D], initial_value_sum F [B,Hkv,Dv], initial_count
    I [B]: Σ kᵀv, Σ k, Σ v and the number of the tokens before; all or none, only when causal.
    normalize_qk: rows of query and key are first divided by max(norm, 1e-12) (LA eq. 22), so that a row of
    zeros stays zeros and has the gradient of a division by 1e-12. States sum the divided keys.
    In the division |g_i| is held at eps or more, sign kept; where it is held, it is constant to the gradient.

    Returns output T [B,H,N,Dv] and normalizer F [B,H,N], which is g before it is held; with return_state the
    four final values F, F, F, I, shaped as the initial ones.
    """
    op = "NormalizedLinearAttention"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype, eps)
    q, k, v, _, _, a, b = _normalized_inputs(op, match, dims, query, key, value, coefficients, normalize_qk, layout, compute)
    match("initial_state", initial_state, "F", "B Hkv D Dv")
    match("initial_key_sum", initial_key_sum, "F", "B Hkv D")
    match("initial_value_sum", initial_value_sum, "F", "B Hkv Dv")
    match("initial_count", initial_count, "I", "B")
    carried = {
        "initial_state": initial_state,
        "initial_key_sum": initial_key_sum,
        "initial_value_sum": initial_value_sum,
        "initial_count": initial_count,
    }
    missing = [name for name, tensor in carried.items() if tensor is None]
    _check(len(missing) in (0, 4), f"{op}: {', '.join(missing)} absent; give all four initial values or none of them")
    _check(
        causal or missing and not return_state,
        f"{op}: causal is 0 with initial values or return_state=1; states are carried with causal=1 only",
    )

    batch, kv_heads, tokens = dims["B"], dims["Hkv"], dims["N"]
    state = v.new_zeros(batch, kv_heads, 1, dims["D"], v.shape[-1])
    sums = v.new_zeros(batch, kv_heads, 1, 1, v.shape[-1])
    if (
        initial_state is not None
        and initial_key_sum is not None
        and initial_value_sum is not None
        and initial_count is not None
    ):
        state = torch.cat([initial_state, initial_key_sum.unsqueeze(-1)], -1).to(compute).unsqueeze(2)
        count = initial_count.to(compute).view(batch, 1, 1).expand(batch, kv_heads, 1)
        sums = torch.cat([initial_value_sum.to(compute), count], -1).view(batch, kv_heads, 1, 1, -1)
    linear, state = _linear_product(q, k, v, causal, state)
    both = a * (sums + _token_sum(v, causal)) + b * linear
    normalizer = both[..., -1:]
    output = (both[..., :-1] / _away_from_zero(normalizer, eps)).flatten(1, 2).to(query.dtype)
    normalizer = normalizer.flatten(1, 2).squeeze(-1).to(float_out).contiguous()
    result: tuple[torch.Tensor, ...] = _swap(output, layout), _swap(normalizer, layout)
    if return_state:
        state, value_sum = state.squeeze(2).to(float_out), (sums + v.sum(-2, keepdim=True)).to(float_out)
        count = torch.zeros(batch, dtype=torch.int32, device=query.device) if initial_count is None else initial_count.int()
        result += (
            state[..., :-1].clone(),
            state[..., -1].clone(),
            value_sum[:, :, 0, 0, :-1].clone(),
            (count.long() + tokens).clamp_max(2**31 - 1).int(),
        )  # it stays at the end
    return result


def normalized_linear_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    normalizer: torch.Tensor | None = None,
    grad_output: torch.Tensor | None = None,
    *,
    causal: int = 1,
    normalize_qk: int = 0,
    eps: float = 1e-6,
    grad_coefficients: int = 1,
    layout: str = "bhnd",
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of normalized_linear_attention in closed form, in O(N D²) time and O(N D) memory.

    Inputs as there; output T [B,H,N,Dv] and normalizer F [B,H,N] are what it returned, grad_output T as
    output. With ĝ the held normalizer, w_i = do_i / ĝ_i, and r_i = o_i . w_i, or 0 where |g_i| < eps:
      dq_i = b [(Σ_{n<=i} k_n v_nᵀ) w_i - r_i Σ_{n<=i} k_n]
      dk_p = b [(Σ_{i>=p} q_i w_iᵀ) v_p - Σ_{i>=p} r_i q_i]
      dv_p = a Σ_{i>=p} w_i + b (Σ_{i>=p} w_i q_iᵀ) k_p
      da = Σ_i [(Σ_{n<=i} v_n) . w_i - i r_i],   db = Σ_i q_i . dq_i / b
    (LA eqs. 17 to 20, corrected); the sums run over all tokens when not causal, and the count is then N.
    With normalize_qk a row x that was divided to y has dx = (dy - y (y . dy)) / |x|, or dy / 1e-12 where
    |x| <= 1e-12. Carried states have no gradient here.

    Returns grad_query, grad_key, grad_value T and, with grad_coefficients, grad_coefficients F [2], also where
    coefficients is absent.
    """
    op = "NormalizedLinearAttentionGrad"
    match, dims, compute, float_out = _begin(op, layout, query, compute_dtype, eps)
    if output is None or normalizer is None or grad_output is None:
        name = "output" if output is None else "normalizer" if normalizer is None else "grad_output"
        raise ValueError(f"{op}: {name} is absent; it must be given")
    q, k, v, q_norm, k_norm, a, b = _normalized_inputs(
        op, match, dims, query, key, value, coefficients, normalize_qk, layout, compute
    )
    match("output", output, "T", "B H N Dv*")
    match("normalizer", normalizer, "F", "B H N*")
    match("grad_output", grad_output, "T", "B H N Dv*")
    o, g, do = (
        _swap(x, layout).to(compute).unflatten(1, q.shape[1:3]) for x in (output, normalizer.unsqueeze(-1), grad_output)
    )

    def backwards(function, *tensors):
        return function(*(x.flip(-2) for x in tensors), causal).flip(-2)

    def product(x, y, z, causal):
        return _linear_product(x, y, z, causal)[0]

    w = do / _away_from_zero(g, eps)
    r = (o * w).sum(-1, keepdim=True).masked_fill(g.abs() < eps, 0)
    wr = torch.cat([w, -r], -1)  # against [v, 1]: w_i . v_n - r_i
    dq = product(wr, v, k, causal)
    dk = b * backwards(product, v, wr, q).sum(2, keepdim=True)
    dv = (a * backwards(_token_sum, w) + b * backwards(product, k, q, w)).sum(2)
    dab = torch.stack([(wr * _token_sum(v, causal)).sum(), (q * dq).sum()])
    dq = b * dq
    if normalize_qk:
        dq, dk = (
            (dy - y * ((y * dy).sum(-1, keepdim=True)).masked_fill(norm <= UNIT_ROW_EPS, 0)) / norm
            for dy, y, norm in ((dq, q, q_norm), (dk, k, k_norm))
        )
    grads = (dq.flatten(1, 2), dk.squeeze(2), dv)
    return tuple(_swap(x.to(query.dtype), layout) for x in grads) + ((dab.to(float_out),) if grad_coefficients else ())


# SampleTokens


def philox(seed: int, position: int) -> tuple[int, int]:
    """The first two words of Philox4x32-10 with the key `seed`, 64 bits, and the counter `position`, 32 bits."""
    low = 0xFFFFFFFF
    counter, key = [position & low, 0, 0, 0], [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & low, a >> 32 ^ counter[3] ^ key[1], a & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return counter[0], counter[1]


def _weights(exponents):
    """floor(2^(30 + e)) as int64 for e <= 0; 0 below LEAST_EXPONENT and for NaN.

    In float32 by the additions and multiplications that the kernels do, which give the same bits."""
    valid = exponents >= LEAST_EXPONENT
    e = torch.where(valid, exponents, torch.zeros_like(exponents))
    if e.dtype == torch.float64:
        weights = torch.floor(torch.exp2(e + WEIGHT_BITS))
    else:
        n = e.round()
        f = e - n
        power = torch.full_like(f, POWER[-1])
        for k in (*POWER[-2::-1], 1.0):
            power = power * f
            power = power + k
        scale = torch.tensor([2.0**i for i in range(WEIGHT_BITS + 1)], device=f.device)
        weights = power * scale[n.long() + WEIGHT_BITS]
    return torch.where(valid, weights, torch.zeros_like(weights)).long()


def _row_counts(token_counts, count_index, batch):
    """The row of token_counts of each request, -1 where it has none."""
    if count_index is None:
        return torch.arange(batch, device=token_counts.device)
    index = count_index.long()
    return torch.where((index >= 0) & (index < token_counts.shape[0]), index, torch.full_like(index, -1))


def _penalised(x, counts, repetition, presence, frequency):
    """x [B,V] after the penalties [B,1] for tokens with counts [B,V]."""
    seen, answered = counts > 0, (counts & (IN_PROMPT - 1)).to(x.dtype)
    changed = torch.where(x < 0, x * repetition, x / repetition)
    changed = changed - frequency * answered
    changed = torch.where(answered > 0, changed - presence, changed)
    return torch.where(seen, changed, x)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    token_counts: torch.Tensor | None = None,
    count_index: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    allowed_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    count_tokens: bool = False,
    logprob: bool = False,
    num_logprobs: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """The next token of every request.

    logits T [B,V]. temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty F [B]; top_k,
    position, count_index, active I [B]; seed L [B]; token_counts I [B,V], with count_index [P,V]; logit_bias F [B,V];
    allowed_tokens I [B,W], W = V / 32 rounded up.

    csrc/ops.toml has the equation. In float32, which is what logits of 32 and 16 bits are computed in, tokens are those
    of the kernels and the function body, bit for bit; in float64 weights are of 2^30 exp((x - max x) / temperature).
    compute_dtype is that of log-probabilities alone.
    Settings that mean nothing count as off: a temperature that is not above 0 as 0, a top_p of 0 or less as the smallest.

    Returns (tokens L [B], logprob F [B] if asked for, with num_logprobs top_logprobs F and top_tokens L
    [B,num_logprobs], with count_tokens token_counts_out).
    """
    match, dims, log_compute, wide = _begin("SampleTokens", "bhnd", logits, compute_dtype)
    match("logits", logits, "T", "B V")
    settings = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    settings |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    for name, tensor in settings.items():
        match(name, tensor, "F", "B")
    for name, tensor in {"top_k": top_k, "position": position, "count_index": count_index, "active": active}.items():
        match(name, tensor, "I", "B")
    match("seed", seed, "L", "B")
    match("token_counts", token_counts, "I", "P V" if count_index is not None else "B V")
    match("logit_bias", logit_bias, "F", "B V")
    match("allowed_tokens", allowed_tokens, "I", "B W")
    compute = wide  # of the tokens: float32, or float64
    batch, vocabulary = logits.shape
    words = -(-vocabulary // 32)
    _check(
        dims.get("W", words) == words, f"SampleTokens: allowed_tokens has W={dims.get('W')} words; V={vocabulary} takes {words}"
    )
    together = [t is not None for t in (temperature, seed, position)]
    _check(all(together) or not any(together), "SampleTokens: temperature, seed and position come together or not at all")
    for name, tensor in {"top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        _check(tensor is None or temperature is not None, f"SampleTokens: {name} needs temperature")
    counted = {n: t for n, t in settings.items() if n.endswith("penalty")} | {"count_index": count_index}
    for name, tensor in counted.items():
        _check(tensor is None or token_counts is not None, f"SampleTokens: {name} needs token_counts")
    _check(not count_tokens or token_counts is not None, "SampleTokens: count_tokens needs token_counts")
    most = min(vocabulary, MAX_LOGPROBS)
    _check(0 <= num_logprobs <= most, f"SampleTokens: num_logprobs is {num_logprobs}; expected 0 to {most}")

    def setting(tensor, absent, right):
        """[B,1]; `absent` where it is not given or not right."""
        if tensor is None:
            return torch.full((batch, 1), absent, dtype=compute, device=logits.device)
        tensor = tensor.detach().to(compute)
        return torch.where(right(tensor), tensor, torch.full_like(tensor, absent)).unsqueeze(1)

    raw = logits.detach().to(compute)
    x = raw
    if logit_bias is not None:
        x = x + logit_bias.detach().to(compute)
    if allowed_tokens is not None:
        index = torch.arange(vocabulary, device=logits.device)
        allowed = allowed_tokens.long()[:, index // 32] >> index % 32 & 1
        x = torch.where(allowed != 0, x, torch.full_like(x, -math.inf))
    rows = None if token_counts is None else _row_counts(token_counts, count_index, batch)
    if token_counts is not None:
        assert rows is not None
        counts = torch.where(rows.unsqueeze(1) >= 0, token_counts.long()[rows], 0)
        repetition = setting(repetition_penalty, 1.0, lambda t: (t > 0) & t.isfinite())
        presence, frequency = (setting(t, 0.0, torch.isfinite) for t in (presence_penalty, frequency_penalty))
        x = _penalised(x, counts, repetition, presence, frequency)
    x = torch.where(x.isnan(), torch.full_like(x, -math.inf), x)

    order = x.sort(dim=1, descending=True, stable=True).indices
    top = x.gather(1, order[:, :1])
    tokens = order[:, 0].clone()
    if temperature is not None:
        heat = setting(temperature, 0.0, lambda t: t > 0)
        parts = setting(top_p, 1.0, lambda t: t < 1), setting(min_p, 0.0, lambda t: t > 0)
        drawn = _drawn_tokens(x, top, order, heat, top_k, *parts, seed, position)
        tokens = torch.where(heat[:, 0] > 0, drawn, tokens)
    takes_part = torch.ones(batch, dtype=torch.bool, device=logits.device) if active is None else active != 0
    tokens = torch.where(takes_part & (top[:, 0] > -math.inf), tokens, torch.full_like(tokens, -1))

    results = [tokens]
    raw = raw.to(log_compute)
    largest = torch.where(raw.isnan(), torch.full_like(raw, -math.inf), raw).amax(1, keepdim=True)
    from_largest = torch.where(raw == largest, torch.zeros_like(raw), raw - largest)
    logprobs = from_largest - from_largest.exp().sum(1, keepdim=True).log()  # NaN if a logit is NaN
    nothing = ~takes_part.unsqueeze(1) | largest.isinf()
    logprobs = torch.where(nothing, torch.full_like(logprobs, math.nan), logprobs).to(wide)
    if logprob:
        chosen = logprobs.gather(1, tokens.clamp(min=0).unsqueeze(1))[:, 0]
        results.append(torch.where(tokens < 0, torch.full_like(chosen, math.nan), chosen))
    if num_logprobs:
        likely = torch.where(raw.isnan(), torch.full_like(raw, -math.inf), raw)
        likely = likely.sort(dim=1, descending=True, stable=True).indices[:, :num_logprobs]
        results.append(logprobs.gather(1, likely))
        results.append(torch.where(takes_part.unsqueeze(1), likely, torch.full_like(likely, -1)))
    if count_tokens:
        results.append(_counted(token_counts, rows, tokens))
    return tuple(results)


def _drawn_tokens(x, top, order, temperature, top_k, top_p, min_p, seed, position):
    """Tokens [B] drawn at random from x [B,V]; rows whose temperature is 0 hold anything. Other settings are [B,1], top_k,
    seed and position [B]."""
    scale = LOG2_E if x.dtype == torch.float32 else math.log2(math.e)
    scale = torch.where(temperature > 0, torch.full_like(temperature, scale) / temperature, torch.zeros_like(temperature))
    exponents = torch.where(x == top, torch.zeros_like(x), (x - top) * scale)
    weights = _weights(exponents)
    one = 1 << WEIGHT_BITS
    least = (min_p.clamp(max=1.0) * one).ceil().long().clamp(min=1)
    weights = torch.where(weights >= least, weights, 0).gather(1, order)
    if top_k is not None:
        first = top_k.long().unsqueeze(1)
        weights = torch.where((first <= 0) | ((weights > 0).cumsum(1) <= first), weights, 0)
    part = (top_p.clamp(min=0.0) * one).ceil().long()
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    needed = ((total >> 31) * part * 2 + ((total & 0x7FFFFFFF) * part >> 30)).clamp(min=1)
    weights = torch.where((part >= one) | (sums - weights < needed), weights, 0)
    sums = weights.cumsum(1)
    tokens = []
    for row, (key, counter) in enumerate(zip(seed.tolist(), position.tolist(), strict=True)):
        high, low = (word >> 1 for word in philox(key, counter))
        passed = sums[row, -1].item() * (high << 31 | low) >> 62
        tokens.append(order[row, int((sums[row] <= passed).sum().clamp(max=len(order[row]) - 1))])
    return torch.stack(tokens)


def _counted(token_counts, rows, tokens):
    """token_counts with 1 more at each request's token, unless there is none or its count is full."""
    counts = token_counts.clone()
    for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
        if row >= 0 and token >= 0:
            count = max(int(counts[row, token]), 0)
            counts[row, token] = count + (count & (IN_PROMPT - 1) < IN_PROMPT - 1)
    return counts


# GatedActivation


def gated_activation(
    gate_up: torch.Tensor,
    up: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    skip_scale: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    columns: int = 0,
    first_column: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor]:
    """activation(gate) * up of gate_up T [B,N,2,F], the gate first: (output T [B,N,F],). Or of gate_up T [B,N,F], the gate
    alone, and up T [B,N,F]; with skip T [B,N,F] and skip_scale float32 [H] of up + skip_scale * skip, each head's F/H columns
    times its scale. With columns the gate is F columns of a wider gate_up, from first_column on.

    activation: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid". Computed in float32, in float64 for float64 inputs, and
    rounded once. Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 5. Raises ValueError for another shape or
    activation.

    Example:
        import torch
        from leanfleet.export import reference

        (output,) = reference.gated_activation(torch.randn(1, 3, 2, 4), activation="gelu")
        print(output.shape)  # torch.Size([1, 3, 4])
    """
    match, dims, compute, _ = _begin("GatedActivation", "bhnd", gate_up, compute_dtype)
    _check(not columns or up is not None, "GatedActivation: columns needs up")
    _check(columns or not first_column, "GatedActivation: first_column needs columns")
    if columns and up is not None:
        gate_up = _columns("GatedActivation", "gate_up", gate_up, first_column, up.shape[-1])
    match("gate_up", gate_up, "T", "B N 2 F" if up is None else "B N F")
    if up is not None:
        match("up", up, "T", "B N F")
    given, missing = ("skip", "skip_scale") if skip_scale is None else ("skip_scale", "skip")
    _check(
        (skip is None) == (skip_scale is None), f"GatedActivation: {missing} is missing, {given} is given; give both or neither"
    )
    _check(skip is None or up is not None, "GatedActivation: skip needs up")
    gate, values = gate_up.unbind(2) if up is None else (gate_up, up)
    values = values.to(compute)
    if skip is not None and skip_scale is not None:
        match("skip", skip, "T", "B N F")
        match("skip_scale", skip_scale, "F", "H")
        F, H = dims["F"], dims["H"]
        _check(H > 0 and F % H == 0, f"GatedActivation: F = {F} is not a multiple of H = {H}")
        scales = skip_scale.to(compute).repeat_interleave(F // H)
        values = values + scales * skip.to(compute)
    return ((_activated("GatedActivation", gate.to(compute), activation) * values).to(gate_up.dtype),)


# Linear


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: int = 0,
    activation: str = "silu",
    constant_weight: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor]:
    """input T [B,N,I] times weight T [I,O], plus bias T [O]: (output T [B,N,O],). With gated weight is T [I,2,O] and bias T
    [2,O], and the output activation(y_0) y_1 of the two products.

    activation: "silu", "gelu", "gelu_tanh", "relu" or "sigmoid". constant_weight is a promise to kernels, and changes nothing
    here. Computed in float32, in float64 for float64 inputs, and rounded once. Source: Shazeer, "GLU Variants Improve
    Transformer" (2020), equation 5. Raises ValueError for other shapes, types and activations.

    Example:
        import torch
        from leanfleet.export import reference

        (output,) = reference.linear(torch.randn(1, 3, 8), torch.randn(8, 2, 6), gated=1, activation="gelu")
        print(output.shape)  # torch.Size([1, 3, 6])
    """
    match, _, compute, _ = _begin("Linear", "bhnd", input, compute_dtype)
    match("input", input, "T", "B N I")
    match("weight", weight, "T", "I 2 O" if gated else "I O")
    match("bias", bias, "T", "2 O" if gated else "O")
    y = input.to(compute) @ weight.to(compute).flatten(1)
    if bias is not None:
        y = y + bias.to(compute).flatten()
    if gated:
        gate, values = y.chunk(2, -1)
        y = _activated("Linear", gate, activation) * values
    return (y.to(input.dtype),)


# BlockLinear


def block_numbers(weight: torch.Tensor) -> torch.Tensor:
    """The numbers of a weight of BlockLinear [O,I], two int4 a byte where it is uint8 [O,I/2]."""
    if weight.dtype != torch.uint8:
        return weight
    return torch.stack([weight & 15, weight >> 4], -1).flatten(1).to(torch.int8) - 8


def rounded_blocks(input: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [...,G,I/G], step [...,G,1]) of input [...,I], float32: what BlockLinear's round_input makes of it, step times q."""
    x = input.float().unflatten(-1, (blocks, -1))
    largest = x.abs().amax(-1, keepdim=True)
    step = torch.where(largest < LEAST_MAGNITUDE, 0.0, largest / torch.full_like(largest, 127))
    return torch.where(step == 0.0, 0.0, (x / step).round()), step


def block_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    round_input: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor]:
    """input T [B,N,I] times the matrix [O,I] of weight, int8, float8e4m3fn or T, or uint8 [O,I/2] of two int4, scale [O,G] and
    shift [O,G] of its blocks, float32 or T, plus bias T [O]: (output T [B,N,O],).

    round_input: multiply each block of a row of input as 8-bit integers and a step. Computed in float32, in float64 for
    float64 inputs, but for that rounding, which is float32's, and rounded once. Source: the block formats of GGML. Raises
    ValueError for other shapes and types.

    Example:
        import torch
        from leanfleet.export import reference

        weight = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
        (output,) = reference.block_linear(torch.randn(1, 3, 64), weight, torch.rand(4, 2))
        print(output.shape)  # torch.Size([1, 3, 4])
    """
    match, dims, compute, _ = _begin("BlockLinear", "bhnd", input, compute_dtype)
    match("input", input, "T", "B N I")
    match("weight", weight, "C", "O I")
    match("scale", scale, "S", "O G")
    match("shift", shift, "S", "O G")
    match("bias", bias, "T", "O")
    width, blocks = dims["I"], dims["G"]
    _check(blocks > 0 and width % blocks == 0, f"BlockLinear: I = {width} is not a multiple of G = {blocks}")
    wide = block_numbers(weight).to(compute).unflatten(1, (blocks, -1)) * scale.to(compute).unsqueeze(-1)
    if shift is not None:
        wide = wide + shift.to(compute).unsqueeze(-1)
    if round_input:
        q, step = rounded_blocks(input, blocks)
        x = (q.to(compute) * step.to(compute)).flatten(-2)
    else:
        x = input.to(compute)
    output = x @ wide.flatten(1).T
    if bias is not None:
        output = output + bias.to(compute)
    return (output.to(input.dtype),)


# RmsNorm


def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    epsilon: float = 1e-6,
    group: int = 0,
    normed: int = 0,
    activation: str = "silu",
    gate_first: int = 0,
    return_sum: int = 0,
    columns: int = 0,
    first_column: int = 0,
    gate_columns: int = 0,
    first_gate_column: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Rows over the root of their mean square, times weight F [C]: (output T [B,N,C],), with return_sum also input + addend.

    input T [B,N,C], or with columns those from first_column on of a wider tensor, plus addend T [B,N,C], rounded to T. group:
    so many columns are normalised together (0: all). normed: the first columns that are, a multiple of group (0: all); the
    others are multiplied by their weight alone. gate T [B,N,C], or with gate_columns those from first_gate_column on:
    activation(gate) is a factor of the output or, with gate_first, of what is normalised. Computed in float32, in float64 for
    float64 inputs. Source: Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. Raises ValueError for
    other shapes, a group that does not divide C, and attributes without what they are of.

    Example:
        import torch
        from leanfleet.export import reference

        (y,) = reference.rms_norm(torch.full((1, 2, 8), 3.0), torch.ones(8), epsilon=0.0)
        print(y.unique().tolist())  # [1.0]
    """
    op = "RmsNorm"
    _check(weight.dim() == 1, f"{op}: weight has {weight.dim()} axes; expected 1")
    for name, on, needed in (
        ("normed", normed, group),
        ("return_sum", return_sum, addend is not None),
        ("gate_first", gate_first, gate is not None),
        ("gate_columns", gate_columns, gate is not None),
        ("first_column", first_column, columns),
        ("first_gate_column", first_gate_column, gate_columns),
    ):
        _check(not on or needed, f"{op}: {name} is {on} without what it is of")
    width = len(weight)
    _check(epsilon >= 0.0, f"{op}: epsilon is {epsilon}; expected 0 or more")
    _check(group >= 0, f"{op}: group is {group}; expected 0 or more")
    _check(group == 0 or width % group == 0, f"{op}: group is {group}, and weight has C = {width} columns")
    fits = normed == 0 or (0 < normed <= width and normed % group == 0)
    _check(fits, f"{op}: normed is {normed}; expected a multiple of group = {group}, and at most C = {width}")
    if columns:
        input = _columns(op, "input", input, first_column, width)
    if gate is not None and gate_columns:
        gate = _columns(op, "gate", gate, first_gate_column, width, "first_gate_column")
    match, _, compute, _ = _begin(op, "bhnd", input, compute_dtype)
    match("input", input, "T", "B N C")
    match("weight", weight, "F", "C")
    x = input
    if addend is not None:
        match("addend", addend, "T", "B N C")
        x = (x.to(compute) + addend.to(compute)).to(input.dtype)
    active = None
    if gate is not None:
        match("gate", gate, "T", "B N C")
        _check(activation in ("silu", "sigmoid"), f"{op}: activation is {activation!r}; expected silu or sigmoid")
        active = _activated(op, gate.to(compute), activation)
    y = x.to(compute)
    if active is not None and gate_first:
        y = y * active
    parts = y.unflatten(-1, (-1, group or max(width, 1)))
    divided = (parts * (parts.square().mean(-1, keepdim=True) + epsilon).rsqrt()).flatten(-2)
    y = torch.cat((divided[..., : normed or None], y[..., normed or width :]), -1) * weight.to(compute)
    if active is not None and not gate_first:
        y = y * active
    return (y.to(input.dtype), x) if return_sum else (y.to(input.dtype),)


# DecayGates


def decay_gates(
    input: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor | None = None,
    beta_input: torch.Tensor | None = None,
    query_lens: torch.Tensor | None = None,
    *,
    per_key: int = 0,
    step_min: float = 0.0,
    step_max: float = 0.0,
    beta_scale: float = 1.0,
    return_step: int = 0,
    return_beta: int = 0,
    columns: int = 0,
    first_column: int = 0,
    first_beta_column: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gates of a recurrent layer: (log_decay F [B,N,H] or [B,N,H,D],), with return_step its steps F of that shape, with
    return_beta beta F [B,N,H].

    input T [B,N,H], with per_key [B,N,H,D], rate F [H], bias F [H] or [H,D], beta_input T [B,N,H], query_lens I [B]: step is
    softplus(input + bias), held between step_min and step_max (0: no bound), log_decay is rate * step, held at 0 or less and
    -inf for NaN, beta is beta_scale * sigmoid(beta_input). With columns the input, without per_key, is H columns of a wider
    one, from first_column on, and beta_input those from first_beta_column on. Tokens at query_lens or later have 0. Computed
    in float32, in float64 for float64 inputs. Source: Dao & Gu, "Transformers are SSMs" (2024), section 7; Yang et al.,
    "Gated Delta Networks" (2024), section 3.4. Raises ValueError for other shapes or bounds below 0.

    Example:
        import torch
        from leanfleet.export import reference

        log_decay, step = reference.decay_gates(torch.zeros(1, 3, 2), -torch.ones(2), return_step=1)
        print(bool((log_decay == -step).all()))  # True
    """
    match, _, compute, float_out = _begin("DecayGates", "bhnd", input, compute_dtype)
    _check(not first_column or not per_key, "DecayGates: first_column and per_key exclude each other")
    _check(columns or not (first_column or first_beta_column), "DecayGates: first_column and first_beta_column need columns")
    _check(not first_beta_column or beta_input is not None, "DecayGates: first_beta_column needs beta_input")
    _check(rate.dim() == 1, f"DecayGates: rate has {rate.dim()} axes; expected 1")
    if columns and not per_key:
        input = _columns("DecayGates", "input", input, first_column, len(rate))
    if columns and beta_input is not None:
        beta_input = _columns("DecayGates", "beta_input", beta_input, first_beta_column, len(rate), "first_beta_column")
    axes = "B N H D" if per_key else "B N H"
    match("input", input, "T", axes)
    match("rate", rate, "F", "H")
    for name, value in (("step_min", step_min), ("step_max", step_max)):
        _check(value >= 0.0, f"DecayGates: {name} is {value}; expected 0 or more")
    x, by = input.to(compute), rate.to(compute)
    if bias is not None:
        match("bias", bias, "F", axes.removeprefix("B N "))
        x = x + bias.to(compute)
    step = torch.nn.functional.softplus(x, threshold=60.0).clamp(step_min, step_max or math.inf)
    log_decay = (by.unsqueeze(-1) if per_key else by) * step
    log_decay = torch.where(log_decay.isnan(), -math.inf, log_decay.clamp(max=0.0))
    outputs = [log_decay] + [step] * bool(return_step)
    _check(not return_beta or beta_input is not None, "DecayGates: return_beta is 1 and beta_input is absent; it needs it")
    if return_beta and beta_input is not None:
        match("beta_input", beta_input, "T", "B N H")
        outputs.append(beta_scale * beta_input.to(compute).sigmoid())
    if query_lens is not None:
        match("query_lens", query_lens, "I", "B")
        inside = torch.arange(input.shape[1], device=input.device) < query_lens.unsqueeze(1)
        outputs = [x.masked_fill(~inside.view(*inside.shape, *[1] * (x.dim() - 2)), 0.0) for x in outputs]
    return tuple(x.to(float_out) for x in outputs)


# Collectives and MergeAttention


def _alone(operator, communicator):
    """The reference knows no other process."""
    world = communicators.world_of(communicator)
    _check(
        world <= 1,
        f"{operator}: communicator '{communicator}' has {world} ranks, and the reference computes for one alone; give tensors "
        "of float32, float16 or bfloat16, which kernels exchange",
    )


def all_reduce(
    input: torch.Tensor, *, communicator: str = "world", compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor]:
    """The sum of input T [...] over the ranks of a world of one: (a copy of input,). Nothing is computed, in any type.

    Raises ValueError where this process's communicator has more ranks.
    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.

    Example:
        import torch
        from leanfleet.export import reference

        (output,) = reference.all_reduce(torch.ones(2, 3))
        print(output.shape)  # torch.Size([2, 3])
    """
    _alone("AllReduce", communicator)
    return (input.clone(),)


def all_gather(
    input: torch.Tensor, *, communicator: str = "world", world: int = 1, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor]:
    """input T [N,...] of each rank, one behind the other, as if all `world` ranks had this one's: (output T [world N,...],).
    Nothing is computed, in any type.

    Raises ValueError where this process's communicator has more than one rank, and for a world below 1.
    Source: Sanovar et al., "LeanAttention" (2024), section 6.

    Example:
        import torch
        from leanfleet.export import reference

        (output,) = reference.all_gather(torch.ones(2, 3), world=1)
        print(output.shape)  # torch.Size([2, 3])
    """
    _alone("AllGather", communicator)
    _check(world >= 1, f"AllGather: world is {world}; expected 1 or more")
    return (input.repeat(world, *[1] * (input.dim() - 1)),)


def merge_attention(
    partial_output: torch.Tensor, partial_lse: torch.Tensor, *, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from that over W parts of them: (output T [B,H,Nq,Dv], lse F [B,H,Nq]).

    partial_output T [W,B,H,Nq,Dv]; partial_lse F [W,B,H,Nq], the natural logarithm of each part's softmax sum. A part with an
    lse of -inf counts for nothing, whatever its output holds; a row without any other is 0, its lse -inf. Computed in float32,
    in float64 for float64 inputs. Source: Sanovar et al., "LeanAttention" (2024), section 4.1. Raises
    ValueError for other shapes.

    Example:
        import torch
        from leanfleet.export import reference

        output, lse = reference.merge_attention(torch.randn(2, 1, 4, 1, 16), torch.randn(2, 1, 4, 1))
        print(output.shape, lse.shape)  # torch.Size([1, 4, 1, 16]) torch.Size([1, 4, 1])
    """
    match, _, compute, real = _begin("MergeAttention", "bhnd", partial_output, compute_dtype)
    match("partial_output", partial_output, "T", "W B H Nq Dv")
    match("partial_lse", partial_lse, "F", "W B H Nq")
    lses = partial_lse.to(compute)
    nothing = lses == -torch.inf
    empty = nothing.all(0)
    largest = torch.where(empty, 0.0, lses.amax(0))
    weights = torch.where(nothing, 0.0, torch.exp(lses - largest))
    total = weights.sum(0)
    shares = (weights / torch.where(empty, 1.0, total)).unsqueeze(-1)
    parts = torch.where(nothing.unsqueeze(-1), 0.0, partial_output.to(compute) * shares)
    lse = torch.where(empty, -torch.inf, largest + torch.log(total))
    return parts.sum(0).to(partial_output.dtype), lse.to(real)
