// What LeanAttention's CUDA kernels share: the schedule read by a warp, rows of caches, the append, and the
// reduction of partial results by the last contributor to arrive.
//
// Softmax statistics are kept in base 2: a logit x enters as x * log2(e), `max` is the largest such value that a
// part has seen and `sum` the sum of 2^(value - max). -inf and 0 stand for "has seen nothing".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dependent_launch.cuh"
#include "core/mma.cuh"
#include "core/op.h"
#include "lean_attention/lean_attention.h"
#include "lean_attention/schedule.h"

namespace leanfleet::lean_attention {

using namespace tile;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kMinRangeWork = 2;  // key tiles, as in the paper: fewer are not worth a merge
// How far a logit may rise above the maximum in use before the statistics are rescaled: 2^8 is far from the ends of every type
// here. What is compared is their difference, which is exact for neighbours; a maximum and 8 may be rounded up to what is 16 more.
constexpr float kRescaleAt = 8.0f;

// 2^(part - whole) for part <= whole; 0 for a part that has seen nothing.
__device__ __forceinline__ float rescale(float part, float whole) { return part == -INFINITY ? 0.0f : exp2_fast(part - whole); }

// The largest or the sum over lanes whose numbers differ by multiples of kFrom below kTo.
template <int kFrom, int kTo>
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int offset = kFrom; offset < kTo; offset *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}
template <int kFrom, int kTo>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int offset = kFrom; offset < kTo; offset *= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// Brings a row's maximum, of which such lanes have a part each, up to date; returns what its earlier weights have to be multiplied
// with, as its sum is.
template <int kFrom = 4, int kTo = 32>
__device__ __forceinline__ float raise_max(float top, float& max, float& sum) {
  const float x = max_of_lanes<kFrom, kTo>(fmaxf(top, max));
  const float factor = rescale(max, x);
  max = x;
  sum *= factor;
  return factor;
}

// Kernels that scale logits as they subtract the maximum round once there, but the maximum has been rounded before. That changes all
// weights of a row alike, by 2^4 at most where it is below 2^27; beyond they might overflow. A row that far has its products times a
// power of two near the scale instead, which rounds nothing: distinct logits are 8 and more apart there, so that the largest counts
// almost alone either way.
__device__ __forceinline__ bool is_far(float max) { return fabsf(max) >= 0x1p27f; }
// 2^n >= x > 2^(n-1).
__device__ __forceinline__ float power_above(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}
__device__ __forceinline__ float multiplier_of(float max, float scale) { return is_far(max) ? power_above(scale) : scale; }
// The largest logit times log2(e) of a row whose maximum, a product with that multiplier, is `max`.
__device__ __forceinline__ float logit_of(float max, float scale) {
  return is_far(max) ? max * (scale / power_above(scale)) : max;
}

// softcap * tanh(x / softcap) = softcap * tanh(y), with float32's precision near 0 too: tanh.approx has 11 bits only, and the closed
// form loses what cancels there. The polynomial was fitted to the least relative error below kSmallCapped, up to 2^-23. Where the
// exponential overflows the quotient is 0; NaN stays NaN, which fminf would not let through.
constexpr float kSmallCapped = 0.6f;
__device__ __forceinline__ float cap_small(float y, float softcap) {
  const float y2 = y * y;
  const float slope = fmaf(y2, fmaf(y2, fmaf(y2, 0.01561263f, -0.05221181f), 0.13313117f), -0.33332598f);
  return softcap * y * fmaf(y2, slope, 1.0f);
}
__device__ __forceinline__ float cap_any(float y, float softcap) {
  const float small = cap_small(y, softcap);
  const float closed = fmaf(inverse_fast(exp2_fast(y * (2.0f * kLog2E)) + 1.0f), -2.0f * softcap, softcap);
  return fabsf(y) < kSmallCapped ? small : closed;
}
__device__ __forceinline__ float cap_logit(float x, float softcap) { return cap_any(__fdividef(x, softcap), softcap); }

template <class T>
__device__ __forceinline__ float as_float(T x) {
  return static_cast<float>(x);
}

template <class T>
__device__ __forceinline__ T from_float32(float x) {
  return static_cast<T>(x);
}

// A number of float16 or bfloat16, as args.dtype says, for kernels that are compiled once for both.
struct EitherHalf {
  uint16_t bits;
};

// body(type) with the type that T stands for.
template <class T, class F>
__device__ __forceinline__ auto with_half(const Args& args, F&& body) {
  if constexpr (!std::is_same_v<T, EitherHalf>) return body(T{});
  else if (args.dtype == static_cast<int>(DType::kFloat16)) return body(__half{});
  else return body(__nv_bfloat16{});
}

__device__ __forceinline__ void store4(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
template <class T>
__device__ __forceinline__ void store4(T* to, float4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(T{}, x.x, x.y), pack_pair(T{}, x.z, x.w));
  } else {
    to[0] = from_float32<T>(x.x), to[1] = from_float32<T>(x.y);
    to[2] = from_float32<T>(x.z), to[3] = from_float32<T>(x.w);
  }
}

// Two neighbouring numbers; kAligned: `from` is a multiple of their size.
template <class T, bool kAligned>
__device__ __forceinline__ float2 load_two(const T* from) {
  if constexpr (!kAligned) return make_float2(as_float(from[0]), as_float(from[1]));
  else if constexpr (sizeof(T) == 4) return *reinterpret_cast<const float2*>(from);
  else return unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(from));
}

// The rotary embedding of a position.
struct Rotation {
  const float *cosines, *sines;  // [half]
  int half;
  bool interleaved;
};
__device__ __forceinline__ Rotation rotation_at(const Args& args, int position) {
  const int64_t at = static_cast<int64_t>(min32(position, args.rotary_positions - 1)) * args.rotary_half;
  return {args.cos_cache + at, args.sin_cache + at, args.rotary_half, args.rotary_interleaved};
}

// Columns `column`, an even one, and the next of a row [D] of query or new_key after its rotary embedding. kAligned: the row
// and the tables are aligned to two numbers and half is even.
template <class T, bool kAligned>
__device__ __forceinline__ float2 rotate(const Rotation& rotation, const T* row, int column) {
  const int half = rotation.half;
  const float *cosines = rotation.cosines, *sines = rotation.sines;
  const float2 x = load_two<T, kAligned>(row + column);
  if (column >= 2 * half) return x;
  if (rotation.interleaved) {
    const float cosine = cosines[column / 2], sine = sines[column / 2];
    return make_float2(x.x * cosine - x.y * sine, x.y * cosine + x.x * sine);
  }
  if constexpr (kAligned) {
    const bool second = column >= half;
    const int i = second ? column - half : column;
    const float2 other = load_two<T, true>(row + (second ? i : half + i));
    const float2 cosine = load_two<float, true>(cosines + i), sine = load_two<float, true>(sines + i);
    const float sign = second ? 1.0f : -1.0f;
    return make_float2(x.x * cosine.x + sign * (other.x * sine.x), x.y * cosine.y + sign * (other.y * sine.y));
  } else {
    float result[2] = {x.x, x.y};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool second = column + c >= half;
      const int i = second ? column + c - half : column + c;
      if (i >= half) continue;  // the first column that is not rotated
      const float other = as_float(row[second ? i : half + i]);
      result[c] = result[c] * cosines[i] + (second ? other : -other) * sines[i];
    }
    return make_float2(result[0], result[1]);
  }
}

// x * cosines + sign * other * sines for 8 columns in a row, rounded to T.
template <class T>
__device__ __forceinline__ uint4 rotate8(uint4 x, uint4 other, const float* cosines, const float* sines, float sign) {
  const uint32_t from[4] = {x.x, x.y, x.z, x.w}, with[4] = {other.x, other.y, other.z, other.w};
  uint32_t to[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 c = reinterpret_cast<const float4*>(cosines)[i], s = reinterpret_cast<const float4*>(sines)[i];
    const float2 low = unpack_pair(T{}, from[2 * i]), high = unpack_pair(T{}, from[2 * i + 1]);
    const float2 low_other = unpack_pair(T{}, with[2 * i]), high_other = unpack_pair(T{}, with[2 * i + 1]);
    to[2 * i] = pack_pair(T{}, low.x * c.x + sign * (low_other.x * s.x), low.y * c.y + sign * (low_other.y * s.y));
    to[2 * i + 1] = pack_pair(T{}, high.x * c.z + sign * (high_other.x * s.z), high.y * c.w + sign * (high_other.y * s.w));
  }
  return make_uint4(to[0], to[1], to[2], to[3]);
}

// 8 columns of such a row from `column`, a multiple of 8, on. Row and tables are aligned to 16 bytes and half is even. Not
// inlined: kernels that run for microseconds wait for their code. Not by reference: their arguments would get an address.
template <class T>
__device__ __noinline__ uint4 rotated_chunk(const Rotation rotation, const T* row, int column) {
  const int half = rotation.half;
  const uint4 x = *reinterpret_cast<const uint4*>(row + column);
  if (column >= 2 * half) return x;
  if (half % 8 == 0 && !rotation.interleaved) {
    const bool second = column >= half;
    const int i = second ? column - half : column;
    return rotate8<T>(x, *reinterpret_cast<const uint4*>(row + (second ? i : half + i)), rotation.cosines + i,
                      rotation.sines + i, second ? 1.0f : -1.0f);
  }
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = rotate<T, true>(rotation, row, column + 2 * i);
    pairs[i] = pack_pair(T{}, pair.x, pair.y);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Schedule

template <class P>
__device__ __forceinline__ P warp_sum(P x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// The sum over this lane and those before it.
template <class P>
__device__ __forceinline__ P warp_scan(P x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const P left = __shfl_up_sync(kFullWarp, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += left;
  }
  return x;
}

// Finds the entry of 32 consecutive ones (a lane each) that holds `position`, the first entry beginning at `before`;
// `end` is the scan of their sizes. Returns its lane and leaves its begin in `before`; -1 and the end of the last
// entry if it lies beyond them.
template <class P>
__device__ __forceinline__ int warp_find(P size, P end, P position, P& before) {
  const unsigned beyond = __ballot_sync(kFullWarp, before + end > position);
  const int lane = beyond == 0 ? 31 : __ffs(beyond) - 1;
  before += __shfl_sync(kFullWarp, beyond == 0 ? end : end - size, lane);
  return beyond == 0 ? -1 : lane;
}

// A range of the line of work and the unit that holds its first position. P: see range_begin.
template <class P>
struct Range {
  P work, begin, end;
  int32_t ranges, index;
  int32_t parts;  // all units are equal and so many ranges each; 0: they are not
  bool dealt;     // it is no range: this CTA, `index`, is dealt whole units, of which `unit` is the first
  Unit unit;
};

// A pair of (request, query tile): the request, the tiles of keys, and the work of one head.
template <class P>
struct Pair {
  Request request;
  Span tiles;
  P work;
};
template <class P>
__device__ __forceinline__ Pair<P> pair_of(const Args& args, int index, int row_tiles) {
  Pair<P> pair = {};
  if (index >= args.batch * row_tiles) return pair;
  const int request = row_tiles == 1 ? index : quotient(index, row_tiles);
  pair.request = request_of(args, request);
  pair.tiles = unit_tiles(args, pair.request, index - request * row_tiles);
  pair.work = pair.request.rows == 0 ? 0 : static_cast<P>(unit_work(args, pair.tiles));
  return pair;
}

// A lane's request, that of this index, in all lanes.
__device__ __forceinline__ Request request_of_lane(const Args& args, const Request& mine, int lane, int index) {
  if (args.lone_tokens) {
    LoneToken found;
    found.b = __shfl_sync(kFullWarp, mine.b, lane), found.earlier = __shfl_sync(kFullWarp, mine.earlier, lane);
    found.keys = __shfl_sync(kFullWarp, mine.keys, lane), found.tokens = __shfl_sync(kFullWarp, mine.tokens, lane);
    return request_of_lone(args, index, found);
  }
  if (args.packed_tokens) return args.pieces[index];
  Request request = {};
  request.start = __shfl_sync(kFullWarp, mine.start, lane);
  request.keys = __shfl_sync(kFullWarp, mine.keys, lane);
  request.tokens = __shfl_sync(kFullWarp, mine.tokens, lane);
  request.rows = args.tokens;
  request.b = request.origin = index;
  request.position = request.keys - request.tokens;
  return request;
}

// The rest of locate_range where all units are equal and a request has one query tile: what range_begin and
// locate come to, with less arithmetic between the lengths and the first copy. tiles < 2^20.
template <class P>
__device__ __forceinline__ bool locate_equal(const Args& args, const Pair<P>& mine, int tiles, int units, Range<P>& range) {
  range.ranges = units * range.parts;
  if (range.index >= range.ranges) return false;
  const int of_unit = max32(tiles, 1);
  const int index = small_quotient(range.index, range.parts), part = range.index - index * range.parts;
  const int whole = small_quotient(of_unit, range.parts), rest = of_unit - whole * range.parts;
  const P before = static_cast<P>(of_unit) * index;
  range.work = static_cast<P>(of_unit) * units;
  range.begin = before + part * whole + small_quotient(part * rest, range.parts);
  range.end = before + (part + 1) * whole + small_quotient((part + 1) * rest, range.parts);
  Unit& unit = range.unit;
  unit.index = small_quotient(index, args.kv_heads);
  unit.head = index - unit.index * args.kv_heads;
  unit.row_tile = 0;
  unit.position = static_cast<int64_t>(before);
  if (args.batch > 32) {
    unit.request = request_of(args, unit.index);
    unit.tiles = unit_tiles(args, unit.request, 0);
    return true;
  }
  unit.request = request_of_lane(args, mine.request, unit.index, unit.index);
  unit.tiles.begin = __shfl_sync(kFullWarp, mine.tiles.begin, unit.index);
  unit.tiles.end = __shfl_sync(kFullWarp, mine.tiles.end, unit.index);
  return true;
}

// What settle, fill_work_prefix and locate do, by a warp and without memory for the prefix: lanes share the pairs of
// (request, query tile), first to add up their work, then to find the one that holds the range's first position. All
// lanes of a warp call it and get the same answer; the plan is settled. False: there is no range of this index.
template <class P>
__device__ __forceinline__ bool locate_range(Args& args, int index, int row_tiles, Range<P>& range) {
  const int lane = threadIdx.x % 32;
  const int pairs = args.batch * row_tiles;
  const P heads = args.kv_heads;
  Pair<P> mine = pair_of<P>(args, pairs == 1 ? 0 : lane, row_tiles);
  range.index = index;
  range.parts = 0;
  if (args.plan.equal_parts > 0) {
    const int tiles = __shfl_sync(kFullWarp, mine.tiles.end - mine.tiles.begin, 0);
    bool equal = lane >= pairs || mine.tiles.end - mine.tiles.begin == tiles;
#pragma unroll 1
    for (int pair = 32 + lane; pair < pairs; pair += 32) {
      const Span span = pair_of<P>(args, pair, row_tiles).tiles;
      equal = equal && span.end - span.begin == tiles;
    }
    if (__builtin_expect(__all_sync(kFullWarp, equal), true)) {
      const int units = pairs * args.kv_heads;
      range.parts = num_equal_parts(args.plan, tiles);
      settle_equal(args.plan, units, range.parts);
      if (row_tiles == 1) return locate_equal(args, mine, tiles, units, range);
      if (mine.work > 0) mine.work = max32(tiles, 1);
    }
  }
  // A lane has `each` pairs in a row.
  const int each = pairs <= 32 ? 1 : (pairs + 31) / 32;
  if (each > 1) {
    mine.work = 0;
#pragma unroll 1
    for (int i = 0; i < each; ++i) mine.work += pair_of<P>(args, lane * each + i, row_tiles).work;
  }
  P end = heads * mine.work;
  if (pairs > 1) end = warp_scan(end);
  const P work = pairs > 1 ? __shfl_sync(kFullWarp, end, 31) : end;
  range.work = work;
  range.ranges = num_ranges(args.plan, work);
  if (index >= range.ranges || work == 0) return false;
  range.begin = range_begin(work, range.ranges, index);
  range.end = range_begin(work, range.ranges, index + 1);

  P before = 0;
  int first = 0, found = pairs > 1 ? warp_find(heads * mine.work, end, range.begin, before) : 0;
  if (each > 1) {
    first = found * each - 32;
    found = -1;
  }
#pragma unroll 1
  while (found < 0) {
    first += 32;
    mine = pair_of<P>(args, first + lane, row_tiles);
    end = warp_scan(heads * mine.work);
    found = warp_find(heads * mine.work, end, range.begin, before);
  }
  const int pair = first + found;
  Unit& unit = range.unit;
  unit.index = row_tiles == 1 ? pair : quotient(pair, row_tiles);
  unit.row_tile = pair - unit.index * row_tiles;
  unit.request = request_of_lane(args, mine.request, found, unit.index);
  unit.tiles.begin = __shfl_sync(kFullWarp, mine.tiles.begin, found);
  unit.tiles.end = __shfl_sync(kFullWarp, mine.tiles.end, found);
  const P of_unit = __shfl_sync(kFullWarp, mine.work, found);
  unit.head = static_cast<int32_t>((range.begin - before) / of_unit);
  unit.position = static_cast<int64_t>(before + unit.head * of_unit);
  return true;
}

// Whether whole units are done sooner than ranges, the units being pieces of packed tokens; fills in plan.deal_heads. All lanes of a
// warp call it.
__device__ __forceinline__ bool are_better_dealt(Args& args) {
  int32_t sum = 0, most = 0, count = 0;  // of units of a head, with their begin and end
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < args.batch; i += 32) {
    const Request request = request_of(args, i);
    if (request.rows == 0) continue;
    const Span tiles = unit_tiles(args, request, 0);
    const int32_t size = kUnit + max32(tiles.end - tiles.begin, 1);
    sum += size, most = max32(most, size), ++count;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, distance);
    most = max32(most, __shfl_xor_sync(kFullWarp, most, distance));
    count += __shfl_xor_sync(kFullWarp, count, distance);
  }
  if (4 * count < 3 * args.batch) return false;  // those without rows take their turns too
  const int64_t ctas = args.plan.max_ranges, units = static_cast<int64_t>(count) * args.kv_heads;
  const int64_t even = static_cast<int64_t>(sum) * args.kv_heads / ctas, rounds = (units + ctas - 1) / ctas * most;
  const int64_t longest = even + sum / count / 2;
  args.plan.deal_heads = heads_together(args, most * args.plan.key_tile, args.kv_heads);
  return is_sooner(longest < rounds ? longest : rounds, even, args.kv_heads, args.plan.deal_heads);
}

// Whether units are dealt out whole, and the first one of this CTA, that of its own index. All lanes of a warp call it. `exists`:
// there is one.
template <class P>
__device__ __forceinline__ bool deal_first(Args& args, int index, Range<P>& range, bool& exists) {
  range.dealt = false;
  if (args.plan.deal_history < 0) return false;
  if (args.packed_tokens) {
    if (!are_better_dealt(args)) return false;
  } else if (args.seq_lens != nullptr || args.query_lens != nullptr || args.cache_kind == kRagged) {
    const int lane = threadIdx.x % 32;
    bool dealt = true;
    int keys = 0;
#pragma unroll 1
    for (int b = 0; b < args.batch; b += 32) {
      const Request request = request_of(args, min32(b + lane, args.batch - 1));
      if (b == 0) keys = __shfl_sync(kFullWarp, request.keys, 0);
      dealt = dealt && may_be_dealt(args, request) && request.keys == keys;
    }
    if (!__all_sync(kFullWarp, dealt)) return false;
  }
  range.dealt = true;
  range.index = index;
  range.parts = 0;
  exists = deal(args, index, range.unit);
  return true;
}

// A share of the range with its place among the unit's contributors.
template <class P>
__device__ __forceinline__ Segment segment_of(const Args& args, const Range<P>& range, const Unit& unit, const Share& share) {
  if (range.parts == 0 || share.whole) return segment_of(args, unit, share, range.work, range.ranges, range.index);
  const int part = range.index - small_quotient(range.index, range.parts) * range.parts;
  return {share.tiles, true, part, range.parts, slot_of(range.index - part, part)};
}

// The unit that a CTA takes in its turn 1, 2, ...; all lanes of a warp call it. The first two are given: the second is taken when
// the first begins, so that nobody is behind yet, and goes to the CTAs in reverse order. Later ones are the next that nobody has:
// args.tickets[max_ranges] counts them; each CTA asks until there is none, and the last of all to ask puts it back to 0. False:
// there is none.
__device__ __forceinline__ bool take(const Args& args, int cta, int turn, Unit& unit) {
  const int ctas = args.plan.max_ranges, units = args.batch * args.kv_heads * num_row_tiles(args);
  if (turn == 1) return deal(args, 2 * ctas - 1 - cta, unit);
  if (units <= 2 * ctas) return false;
  int taken = 0;
  if (threadIdx.x % 32 == 0) {
    taken = static_cast<int>(atomicAdd(args.tickets + ctas, 1u));
    if (taken == units - ctas - 1) args.tickets[ctas] = 0;
  }
  return deal(args, 2 * ctas + __shfl_sync(kFullWarp, taken, 0), unit);
}

// Calls body(unit, share) for every part of a unit that the range holds, in order.
template <class P, class F>
__device__ __forceinline__ void for_each_share(const Args& args, const Range<P>& range, F&& body) {
  Unit unit = range.unit;
#pragma unroll 1
  for (;;) {
    const Share share = share_of(args, unit, range.begin, range.end);
    if (share.contributes) body(unit, share);
    if (static_cast<P>(unit_end(args, unit)) >= range.end) return;
    next_unit<true>(args, unit);
  }
}

// The keys that all rows with these tokens see, and those that some of them sees.
struct RowsKeys {
  Span common, seen;
};
__device__ __forceinline__ RowsKeys keys_of_tokens(const Args& args, const Request& request, Span tokens) {
  if (tokens.begin >= tokens.end) return {{0, 0}, {0, 0}};
  const Span first = token_keys(args, request, tokens.begin);
  const Span last = token_keys(args, request, tokens.end - 1);
  return {{last.begin, first.end}, {first.begin, last.end}};
}

// Which keys the rows of a unit see: the row-wise bounds of one or two rows that a lane holds.
struct RowBounds {
  int begin, end;
};
__device__ __forceinline__ RowBounds row_bounds(const Args& args, const Unit& unit, int row) {
  const int token = quotient(row, args.group);
  if (token >= unit.request.tokens) return {0, 0};
  const Span keys = token_keys(args, unit.request, token);
  return {keys.begin, keys.end};
}

// Rows

// The element at which position j of a request begins in a cache; -1 if its page is outside the pool.
__device__ __forceinline__ int64_t cache_row(const Args& args, const CacheStrides& strides, const Request& request, int head,
                                             int j) {
  if (args.cache_kind == kPaged) {
    const int page = args.block_table[static_cast<int64_t>(request.b) * args.pages_per_request + j / args.block];
    if (static_cast<unsigned>(page) >= static_cast<unsigned>(args.num_pages)) return -1;
    return page * strides.page + head * strides.head + j % args.block * strides.token;
  }
  return request.b * strides.batch + head * strides.head + (request.start + static_cast<int64_t>(j)) * strides.token;
}

// Copies the new keys and values to their positions in the cache, `Chunk` by `Chunk`, a warp a row. kRope: keys after their
// rotary embedding, by chunks of 16 bytes. kPieces: of packed tokens, whose pieces nobody has noted yet.
template <class T, class Chunk, bool kRope = false, bool kPieces = false>
__device__ __noinline__ void append_all(const Args& args, int64_t warp, int64_t warps) {
  constexpr int kPerChunk = sizeof(Chunk) / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int64_t rows = static_cast<int64_t>(args.batch) * args.tokens * args.kv_heads;
#pragma unroll 1
  for (int64_t row = warp; row < rows; row += warps) {
    const int64_t of_batch = row / args.kv_heads;
    const int head = static_cast<int>(row - of_batch * args.kv_heads);
    const int index = static_cast<int>(of_batch / args.tokens), token = static_cast<int>(of_batch % args.tokens);
    const Request request = kPieces ? piece(args, index) : request_of(args, index);
    if (token >= request.tokens) continue;
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
      const Strides& strides = kind == 0 ? args.new_key_strides : args.new_value_strides;
      const int64_t from = request.origin * strides.batch + head * strides.head + token * strides.token;
      const int64_t to =
          cache_row(args, kind == 0 ? args.key_strides : args.value_strides, request, head, request.position + token);
      if (to < 0) continue;
      const void* rows_from = kind == 0 ? args.new_key : args.new_value;
      void* rows_to = kind == 0 ? args.key_cache_out : args.value_cache_out;
      const Chunk* source = reinterpret_cast<const Chunk*>(static_cast<const T*>(rows_from) + from);
      Chunk* target = reinterpret_cast<Chunk*>(static_cast<T*>(rows_to) + to);
      const int chunks = (kind == 0 ? args.key_width : args.value_width) / kPerChunk;
      if constexpr (kRope) {
        if (kind == 0) {
#pragma unroll 1
          for (int c = lane; c < chunks; c += 32)
            target[c] = rotated_chunk(rotation_at(args, request.position + token), static_cast<const T*>(rows_from) + from,
                                      c * kPerChunk);
          continue;
        }
      }
#pragma unroll 1
      for (int c = lane; c < chunks; c += 32) target[c] = source[c];
    }
  }
}

// The pieces of packed tokens; where two launches share them, what the other has is without rows.
__device__ __forceinline__ void note_pieces(const Args& args, int thread, int threads) {
  const int apart = args.short_tokens > 0 ? args.requests : 0;
  for (int b = thread; b < apart; b += threads)
    args.pieces[b] = is_short(args, b) ? packed_tokens(args, b, 0, args.short_tokens) : Request{};
  for (int i = thread; i < args.batch; i += threads) {
    const Request request = piece(args, i);
    args.pieces[apart + i] = apart > 0 && request.rows > 0 && is_short(args, request.b) ? Request{} : request;
  }
}

// 8 columns of a new key or value, the key after its rotary embedding (kRope), which also go to their position in the cache if
// that exists. column: a multiple of 8.
struct AppendedChunk {
  uint4 data;
  bool exists;
};
template <class T, bool kRope>
__device__ __forceinline__ AppendedChunk append_chunk(const Args& args, const Unit& unit, int position, bool value,
                                                      int column) {
  const int token = position - (unit.request.keys - unit.request.tokens);
  // Not a reference to one of two members: the arguments would get an address, and a copy in local memory.
  const auto pick = [value](int64_t of_value, int64_t of_key) { return value ? of_value : of_key; };
  const int64_t at = unit.request.origin * pick(args.new_value_strides.batch, args.new_key_strides.batch) +
                     unit.head * pick(args.new_value_strides.head, args.new_key_strides.head) +
                     token * pick(args.new_value_strides.token, args.new_key_strides.token);
  const T* const row = static_cast<const T*>(value ? args.new_value : args.new_key) + at;
  AppendedChunk chunk;
  if (kRope && !value) chunk.data = rotated_chunk(rotation_at(args, position), row, column);
  else chunk.data = *reinterpret_cast<const uint4*>(row + column);
  const CacheStrides strides = {
      pick(args.value_strides.batch, args.key_strides.batch), pick(args.value_strides.page, args.key_strides.page),
      pick(args.value_strides.head, args.key_strides.head), pick(args.value_strides.token, args.key_strides.token)};
  const int64_t to = cache_row(args, strides, unit.request, unit.head, position);
  chunk.exists = to >= 0;
  if (chunk.exists) {
    if (value) *reinterpret_cast<uint4*>(static_cast<T*>(args.value_cache_out) + to + column) = chunk.data;
    else *reinterpret_cast<uint4*>(static_cast<T*>(args.key_cache_out) + to + column) = chunk.data;
  }
  return chunk;
}

// The packed row's token and query head.
struct RowPlace {
  int token, head;
};
__device__ __forceinline__ RowPlace row_place(const Args& args, const Unit& unit, int row) {
  const int token = quotient(row, args.group);
  return {token, unit.head * args.group + row - token * args.group};
}

// Where a packed row of the query begins.
template <class T>
__device__ __forceinline__ const T* query_row(const Args& args, const Unit& unit, const RowPlace& place) {
  return static_cast<const T*>(args.query) + unit.request.origin * args.query_strides.batch +
         place.head * args.query_strides.head + place.token * args.query_strides.token;
}

// Where a packed row of the output begins, what its unnormalised elements have to be multiplied with (0: they are 0
// whatever they hold), and its lse.
template <class T>
struct RowEnd {
  T* output;
  float factor, lse;
};
template <class T>
__device__ __forceinline__ RowEnd<T> row_end(const Args& args, const Unit& unit, const RowPlace& place, float max, float sum) {
  float top = max;
  float factor = 0.0f;
  const bool padding = place.token >= unit.request.tokens;
  if (!padding) {
    factor = 1.0f;
    if (args.sinks != nullptr) {
      const float sink = args.sinks[place.head] * kLog2E;
      top = fmaxf(max, sink);
      factor = rescale(max, top);
      sum = sum * factor + rescale(sink, top);
    }
    factor = sum != 0.0f ? __fdividef(factor, sum) : 0.0f;
  }
  const bool empty = padding || sum == 0.0f;
  return {static_cast<T*>(args.output) + unit.request.origin * args.output_strides.batch +
              place.head * args.output_strides.head + place.token * args.output_strides.token,
          factor, empty ? -INFINITY : kLn2 * (top + __log2f(sum))};
}

__device__ __forceinline__ void write_lse(const Args& args, const Unit& unit, const RowPlace& place, float lse) {
  args.lse[unit.request.origin * args.lse_strides.batch + place.head * args.lse_strides.head +
           place.token * args.lse_strides.token] = lse;
}

// Normalises 4 elements of a packed row and writes them; the thread with the row's first elements writes lse.
template <class T>
__device__ __forceinline__ void write_row(const Args& args, const Unit& unit, int row, int d, float4 o, float max, float sum) {
  const RowPlace place = row_place(args, unit, row);
  const RowEnd<T> end = row_end<T>(args, unit, place, max, sum);
  if (end.factor == 0.0f) o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  o = make_float4(o.x * end.factor, o.y * end.factor, o.z * end.factor, o.w * end.factor);
  with_half<T>(args, [&](auto type) { store4(reinterpret_cast<decltype(type)*>(end.output + d), o); });
  if (d == 0) write_lse(args, unit, place, end.lse);
}

// Stores 4 unnormalised elements of a packed row as part of a contributor's partial result.
__device__ __forceinline__ void write_partial(const Args& args, int slot, int row_of_tile, int d, float4 o, float max,
                                              float sum) {
  const int64_t row = static_cast<int64_t>(slot) * args.plan.row_tile + row_of_tile;
  *reinterpret_cast<float4*>(args.partial_output + row * args.value_width + d) = o;
  if (d == 0) {
    args.partial_max[row] = max;
    args.partial_sum[row] = sum;
  }
}

// Called by `threads` threads after they have stored a contributor's partial result. True in all of them if every
// other contributor has stored its own; the ticket is then 0 again. Nobody waits, so that CTAs need not run at
// the same time.
__device__ __forceinline__ bool last_to_arrive(uint32_t* ticket, int count, int thread, int threads) {
  const uint32_t others = static_cast<uint32_t>(count - 1);
  uint32_t before = 0;
  named_barrier(1, threads);
  if (thread == 0)
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(others) : "memory");
  return named_barrier_any(1, threads, thread == 0 && before == others);
}

// What an append begins with. The attention behind it may read old keys from when all launches before the append have ended, not
// earlier: they may be appends of other steps to the same caches.
__device__ __forceinline__ void begin_append() {
  wait_for_launch_before();
  let_next_launch_begin();
}

// With plan.merge_apart: one thread of the range says at its begin that it cuts no unit, and the same thread which, where it is the
// first of a unit's contributors. The merge may be launched from now on: it waits for the end of all CTAs, so that nothing else has to.
__device__ __forceinline__ void begin_cuts(const Args& args, int range) {
  args.cut_units[range] = {};
  let_next_launch_begin();
}
__device__ __forceinline__ void note_cut(const Args& args, const Unit& unit, const Segment& segment, int range) {
  if (segment.index == 0) args.cut_units[range] = {unit.index, unit.head, unit.row_tile, segment.count};
}

// Merges the partial results of a unit in the order of their ranges, so that the result does not depend on who
// arrives last, and writes the rows. A warp takes 64 columns of a row; a lane reads the statistics of one contributor,
// and 4 columns of every second one.
template <class T>
__device__ __forceinline__ void merge_unit(const Args& args, const Unit& unit, int first, int count, int warp, int warps) {
  constexpr int kAtOnce = 16;
  const Span rows = unit_rows(args, unit.request, unit.row_tile);
  const int lane = threadIdx.x % 32, half = lane / 16, parts_of_row = (args.value_width + 63) / 64;
  const int row_tile = args.plan.row_tile, width = args.value_width;
#pragma unroll 1
  for (int item = warp; item < (rows.end - rows.begin) * parts_of_row; item += warps) {
    const int row = quotient(item, parts_of_row), d = (item - row * parts_of_row) * 64 + lane % 16 * 4;
    const bool column = d < width;
    float max = -INFINITY, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int i0 = 0; i0 < count; i0 += kAtOnce) {
      // Rows of partial results: contributor i0, then steps of two slots, less one slot after the very first.
      const int64_t at = static_cast<int64_t>(slot_of(first, i0)) * row_tile + row;
      const int back = i0 == 0 ? row_tile : 0;
      float part_max = -INFINITY, part_sum = 0.0f;
      if (i0 + lane % kAtOnce < count) {
        const int64_t mine = at + (lane % kAtOnce == 0 ? 0 : lane % kAtOnce * 2 * row_tile - back);
        part_max = __ldcg(args.partial_max + mine);
        part_sum = __ldcg(args.partial_sum + mine);
      }
      const float* from = args.partial_output + at * width + d;
      if (half == 1) from += (2 * row_tile - back) * width;
      float4 part[kAtOnce / 2];
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i0 + 2 * i + half < count && column) part[i] = __ldcg(reinterpret_cast<const float4*>(from));
        from += (4 * row_tile - (i == 0 && half == 0 ? back : 0)) * width;
      }
      float top = part_max;
#pragma unroll
      for (int offset = kAtOnce / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
      top = fmaxf(top, max);
      const float old = rescale(max, top), mine = rescale(part_max, top);
      float share = mine * part_sum;
#pragma unroll
      for (int offset = kAtOnce / 2; offset > 0; offset /= 2) share += __shfl_xor_sync(kFullWarp, share, offset);
      sum = sum * old + share;
      o.x *= old, o.y *= old, o.z *= old, o.w *= old;
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) {
        const float factor = __shfl_sync(kFullWarp, mine, 2 * i + half);
        o.x += factor * part[i].x, o.y += factor * part[i].y, o.z += factor * part[i].z, o.w += factor * part[i].w;
      }
      max = top;
    }
    o.x += __shfl_xor_sync(kFullWarp, o.x, 16);
    o.y += __shfl_xor_sync(kFullWarp, o.y, 16);
    o.z += __shfl_xor_sync(kFullWarp, o.z, 16);
    o.w += __shfl_xor_sync(kFullWarp, o.w, 16);
    if (half == 0 && column) write_row<T>(args, unit, rows.begin + row, d, o, max, sum);
  }
}

// What follows a contributor's partial result: the last of all merges the unit, or a launch of its own does.
template <class T>
__device__ __forceinline__ void end_part(const Args& args, const Unit& unit, const Segment& segment, int first, int warp,
                                         int warps) {
  const int thread = warp * 32 + threadIdx.x % 32;
  if (args.plan.merge_apart) {
    if (thread == 0) note_cut(args, unit, segment, first);
  } else if (last_to_arrive(args.tickets + first, segment.count, thread, warps * 32)) {
    merge_unit<T>(args, unit, first, segment.count, warp, warps);
  }
}

}  // namespace leanfleet::lean_attention
