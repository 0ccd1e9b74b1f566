// Stream-K over attention: which keys each query row sees, and how the work of a call is cut into equal shares.
// Integer arithmetic on an Args and nothing else, the same code on the host and on a device.
//
// A unit is (request, key/value head, query tile): `row_tile` packed rows, row = token * group + head in the group,
// that share the keys and values of one head. Its context is cut into tiles of `key_tile` keys, aligned to multiples
// of it from position 0 of the request; only tiles that one of its rows sees are its work. Units stand on a line in
// the order request, head, query tile (on a device request, query tile, head: less to find); a unit is `unit_overhead` positions followed by one position for each of its
// tiles, or by one for all if it has none, so that padding rows and empty requests have an owner too. Range r of G
// takes the positions [r W / G, (r+1) W / G) of all W: it ends in the middle of a unit where it must. Whoever owns
// all tiles of a unit writes its output; otherwise each owner of at least one tile, a contributor, leaves a partial
// result, and these are merged in the order of their ranges. A range leaves at most two: one for a unit that began
// in an earlier range and one for a unit that it begins.
//
// Where all units turn out to have the same number of tiles, a plan with equal_parts cuts each into at most that many
// ranges, all in the same places; see settle. (direct_kernel.cuh has a cut of its own for that case.)
//
// Prompts may have their units dealt out whole instead; see deal.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/integers.h"
#include "lean_attention/lean_attention.h"

LEANFLEET_HD_NAMESPACE(leanfleet::lean_attention) {

LEANFLEET_HD int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
LEANFLEET_HD int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

// Bytes of so many numbers of a cache, whose type, where it is not quantised, has `wide` each.
LEANFLEET_HD int64_t cache_bytes(const Scales& scales, int64_t numbers, int64_t wide) {
  if (scales.kind == kNoScale) return numbers * wide;
  return scales.form == kInt4 ? numbers / 2 : numbers;
}

// The largest number of a form: that of a row with a scale of its own is so large.
LEANFLEET_HD float largest_of(CacheForm form) { return form == kInt8 ? 127.0f : form == kFloat8 ? 448.0f : 7.0f; }

// x / y for 0 <= x < 2^20. On a device in float32, which is exact, as (x + 0.5) / y is never nearer than 0.5 / y to an integer.
LEANFLEET_HD int32_t small_quotient(int32_t x, int32_t y) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(y)));
  return static_cast<int32_t>((x + 0.5f) * inverse);
#else
  return x / y;
#endif
}

// x / y for 0 <= x, 0 < y.
LEANFLEET_HD int32_t quotient(int32_t x, int32_t y) {
#ifdef __CUDA_ARCH__
  if (x < (1 << 20)) return small_quotient(x, y);
#endif
  return x / y;
}

// What is known of request b without its new tokens.
LEANFLEET_HD Request cache_of(const Args& args, int32_t b) {
  Request request = {};
  request.b = b;
  int32_t capacity = args.capacity;
  if (args.cache_kind == kRagged) {
    request.start = clamped_offset(args.cu_seqlens, b, capacity);
    capacity = max32(clamped_offset(args.cu_seqlens, b + 1, capacity), request.start) - request.start;
  }
  request.keys = args.seq_lens != nullptr ? clamp(args.seq_lens[b], 0, capacity) : capacity;
  return request;
}

// Packed tokens
//
// A piece is up to args.tokens tokens of one request, and to the schedule a request of its own: it may see all keys up to its
// last token, as those of earlier pieces are in the cache by then. Rows behind the last request are one more request, all
// padding. Requests need not be counted to know which pieces are theirs: those of request b begin at
//   floor((cu[b] + b (c - 1)) / c) = b + floor((cu[b] - b) / c)   for pieces of c tokens and offsets cu,
// which leaves room for ceil(n / c) of n tokens, as 1 + floor((r + n - 1) / c) >= ceil(n / c) for any r >= 0. A piece that is
// not needed has no rows. As many tokens as requests are exactly so many pieces of one token.

// Where the tokens of request b begin; b = requests: the padding; b = requests + 1: the end.
LEANFLEET_HD int32_t query_offset(const Args& args, int32_t b) {
  if (b == 0) return 0;
  return b > args.requests ? args.total_tokens : clamped_offset(args.cu_query_lens, b, args.total_tokens);
}

LEANFLEET_HD int32_t first_piece(const Args& args, int32_t b) {
  return (query_offset(args, b) + b * (args.tokens - 1)) / args.tokens;
}

// Tokens `skip` .. `skip` + `most` of request b.
LEANFLEET_HD Request packed_tokens(const Args& args, int32_t b, int32_t skip, int32_t most) {
  Request request = {};
  request.b = b;
  if (b < args.requests) request = cache_of(args, b);
  const int32_t begin = query_offset(args, b), rows = query_offset(args, b + 1) - begin;
  const int32_t tokens = clamp(rows, 0, request.keys);
  request.origin = begin + skip;
  request.earlier = skip;
  request.rows = skip < 0 ? 0 : clamp(rows - skip, 0, most);
  request.position = request.keys - tokens + skip;
  request.tokens = clamp(tokens - skip, 0, request.rows);
  if (args.causal) request.keys = request.tokens > 0 ? request.position + request.tokens : 0;
  return request;
}

// A piece, worked out from the offsets: its request is the last whose pieces begin at or before it. Kernels whose first
// microsecond counts read args.pieces instead.
LEANFLEET_HD Request piece(const Args& args, int32_t index) {
  int32_t low = 0, high = args.requests;
  if (index < args.requests && first_piece(args, index) == index && first_piece(args, index + 1) > index) low = high = index;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (first_piece(args, middle) <= index) low = middle;
    else high = middle - 1;
  }
  return packed_tokens(args, low, (index - first_piece(args, low)) * args.tokens, args.tokens);
}

// Whether a launch for requests of few tokens has request b.
LEANFLEET_HD bool is_short(const Args& args, int32_t b) {
  return b < args.requests && query_offset(args, b + 1) - query_offset(args, b) <= args.short_tokens;
}

// Makes `batch` and `tokens` of packed tokens those of pieces of at most `tokens` tokens. args.pieces has to be filled then,
// unless they are lone tokens.
LEANFLEET_HD void cut_into_pieces(Args& args, int32_t tokens) {
  args.tokens = tokens;
  args.batch = first_piece(args, args.requests + 1);
}

// What is to be known of a packed token of causal attention that is a piece: the request that owns it, how many of that request's
// tokens come before it, the keys that it sees, and whether it counts at all (1 or 0).
struct alignas(16) LoneToken {
  int32_t b, earlier, keys, tokens;
};

// The same as piece() says, in less time where requests have a token each. Not inlined: kernels ask in several places, and those that
// run for microseconds wait for their code. Not of Args: they would get an address. cu_seqlens: ragged caches, else null.
LEANFLEET_HD_NOINLINE LoneToken lone_token(const int32_t* cu_query_lens, const int32_t* seq_lens, const int32_t* cu_seqlens,
                                           int32_t requests, int32_t total, int32_t capacity, int32_t token) {
  const auto offset = [&](int32_t b) { return b == 0 ? 0 : b > requests ? total : clamped_offset(cu_query_lens, b, total); };
  int32_t b = token < requests ? token : requests;
  if (offset(b) > token || offset(b + 1) <= token) {
    int32_t low = 0, high = requests;  // the last that begins at or before it
    while (low < high) {
      const int32_t middle = low + (high - low + 1) / 2;
      if (offset(middle) <= token) low = middle;
      else high = middle - 1;
    }
    b = low;
  }
  LoneToken found = {b, token - offset(b), 0, 0};
  if (b == requests) return found;
  if (cu_seqlens != nullptr) {
    const int32_t start = clamped_offset(cu_seqlens, b, capacity);
    capacity = max32(clamped_offset(cu_seqlens, b + 1, capacity), start) - start;
  }
  const int32_t keys = seq_lens != nullptr ? clamp(seq_lens[b], 0, capacity) : capacity;
  const int32_t tokens = clamp(offset(b + 1) - offset(b), 0, keys);
  found.tokens = found.earlier < tokens ? 1 : 0;
  if (found.tokens > 0) found.keys = keys - tokens + found.earlier + 1;
  return found;
}
LEANFLEET_HD Request request_of_lone(const Args& args, int32_t token, const LoneToken& found) {
  Request request = {};
  request.b = found.b;
  if (args.cache_kind == kRagged && found.b < args.requests)
    request.start = clamped_offset(args.cu_seqlens, found.b, args.capacity);
  request.keys = found.keys, request.tokens = found.tokens;
  request.rows = 1;
  request.origin = token;
  request.position = max32(found.keys - 1, 0);
  request.earlier = found.earlier;
  return request;
}

// The request, or the piece, of this index.
LEANFLEET_HD Request request_of(const Args& args, int32_t index) {
  if (args.lone_tokens) {
    const int32_t* const cu_seqlens = args.cache_kind == kRagged ? args.cu_seqlens : nullptr;
    return request_of_lone(
        args, index,
        lone_token(args.cu_query_lens, args.seq_lens, cu_seqlens, args.requests, args.total_tokens, args.capacity, index));
  }
  if (args.packed_tokens) return args.pieces[index];
  Request request = cache_of(args, index);
  request.rows = args.tokens;
  request.origin = index;
  request.tokens =
      min32(args.query_lens != nullptr ? clamp(args.query_lens[index], 0, args.tokens) : args.tokens, request.keys);
  request.position = request.keys - request.tokens;
  return request;
}

// The keys that the cache held before the call.
LEANFLEET_HD int32_t old_keys(const Request& request) { return request.position - request.earlier; }

// All new tokens of request b.
LEANFLEET_HD Request whole_request(const Args& args, int32_t b) {
  return args.packed_tokens ? packed_tokens(args, b, 0, args.total_tokens) : request_of(args, b);
}

// A half-open interval, of keys or of tiles.
struct Span {
  int32_t begin, end;
};

// The keys that token i of the request sees. 0 <= i < request.tokens.
LEANFLEET_HD Span token_keys(const Args& args, const Request& request, int32_t token) {
  if (!args.causal) return {0, request.keys};
  const int32_t end = request.keys - request.tokens + token + 1;
  return {args.window > 0 && end > args.window ? end - args.window : 0, end};
}

LEANFLEET_HD int32_t num_row_tiles(const Args& args, int32_t row_tile) {
  return static_cast<int32_t>((static_cast<int64_t>(args.group) * args.tokens + row_tile - 1) / row_tile);
}

LEANFLEET_HD int32_t num_row_tiles(const Args& args) { return num_row_tiles(args, args.plan.row_tile); }

// The rows of a query tile: [begin, end) of all the request's, of which those below group * tokens are not padding.
LEANFLEET_HD Span unit_rows(const Args& args, const Request& request, int32_t row_tile) {
  const int32_t begin = row_tile * args.plan.row_tile;
  return {begin, max32(begin, min32(begin + args.plan.row_tile, args.group * request.rows))};
}

// The tokens of a query tile's rows, padding aside; empty if all are. Divisions only where there are several tiles.
LEANFLEET_HD Span unit_tokens(const Args& args, const Request& request, int32_t row_tile) {
  const Span rows = unit_rows(args, request, row_tile);
  const int32_t real_rows = args.group * request.tokens;
  Span tokens = {0, request.tokens};
  if (rows.begin > 0) tokens.begin = quotient(rows.begin, args.group);
  if (rows.end < real_rows) tokens.end = quotient(rows.end - 1, args.group) + 1;
  if (rows.begin >= real_rows) tokens.end = tokens.begin;
  return tokens;
}

// The keys that at least one row of a query tile sees; empty if all are padding.
LEANFLEET_HD Span unit_keys(const Args& args, const Request& request, int32_t row_tile) {
  const Span tokens = unit_tokens(args, request, row_tile);
  if (tokens.begin >= tokens.end) return {0, 0};
  return {token_keys(args, request, tokens.begin).begin, token_keys(args, request, tokens.end - 1).end};
}

// The tiles of those keys.
LEANFLEET_HD Span unit_tiles(const Args& args, const Request& request, int32_t row_tile) {
  const Span keys = unit_keys(args, request, row_tile);
  return {keys.begin / args.plan.key_tile, keys.end / args.plan.key_tile + (keys.end % args.plan.key_tile != 0)};
}

LEANFLEET_HD int64_t unit_work(const Args& args, Span tiles) {
  return args.plan.unit_overhead + max32(tiles.end - tiles.begin, 1);
}

// The work of one head of a request: the sum over its query tiles. A piece without rows is none.
LEANFLEET_HD int64_t head_work(const Args& args, const Request& request) {
  int64_t work = 0;
  if (request.rows == 0) return work;
  for (int32_t row_tile = 0; row_tile < num_row_tiles(args); ++row_tile)
    work += unit_work(args, unit_tiles(args, request, row_tile));
  return work;
}

// Into how many parts each unit of `tiles` tiles is cut if all have so many. Where CTAs of a cluster merge a unit, parts are
// halved, so that units of a power of two of them do not lie in two clusters.
LEANFLEET_HD int32_t num_equal_parts(const Plan& plan, int32_t tiles) {
  int32_t parts = plan.equal_parts;
  if (!plan.equal_halved) return max32(min32(parts, tiles / plan.min_range_work), 1);
  while (parts > 1 && parts * plan.min_range_work > tiles) parts /= 2;
  return parts;
}

// The plan for `units` units of which each is `parts` ranges.
LEANFLEET_HD void settle_equal(Plan& plan, int32_t units, int32_t parts) {
  plan.max_ranges = units * parts;
  plan.min_range_work = 1;
  plan.unit_overhead = 0;
}

// What a plan with equal_parts leaves open until the lengths are known: whether all units have the same number of tiles.
// Comes before everything below; a device does the same by a warp.
LEANFLEET_HD void settle(Args& args) {
  if (args.plan.equal_parts == 0) return;
  const int32_t row_tiles = num_row_tiles(args);
  int32_t tiles = -1;
  for (int32_t b = 0; b < args.batch; ++b) {
    const Request request = request_of(args, b);
    for (int32_t row_tile = 0; row_tile < row_tiles; ++row_tile) {
      const Span span = unit_tiles(args, request, row_tile);
      if (tiles < 0) tiles = span.end - span.begin;
      if (tiles != span.end - span.begin) return;
    }
  }
  settle_equal(args.plan, args.batch * args.kv_heads * row_tiles, num_equal_parts(args.plan, tiles));
}

// Fills prefix[B+1] with the work before each request and returns all of it. A device scans instead.
LEANFLEET_HD int64_t fill_work_prefix(const Args& args, int64_t* prefix) {
  int64_t work = 0;
  for (int32_t b = 0; b < args.batch; ++b) {
    prefix[b] = work;
    work += args.kv_heads * head_work(args, request_of(args, b));
  }
  return prefix[args.batch] = work;
}

// The number of ranges: max_ranges, or fewer where they would be smaller than min_range_work. Never more than the
// work, so that no range is empty.
template <class P>
LEANFLEET_HD int32_t num_ranges(const Plan& plan, P work) {
  const P most = work / max32(plan.min_range_work, 1);
  return most < 1 ? 1 : most < plan.max_ranges ? static_cast<int32_t>(most) : plan.max_ranges;
}

// Positions are of a type P that holds ranges * work: int64_t, or uint32_t where that is known to suffice and 64-bit
// divisions are slow; or int32_t, which has to hold the work alone, and the ranges in 16 bits.
template <class P>
LEANFLEET_HD P range_begin(P work, int32_t ranges, int32_t range) {
  if constexpr (std::is_same_v<P, int32_t>) {
    const int32_t share = work / ranges;
    const uint32_t rest = static_cast<uint32_t>(work - share * ranges);
    return share * range + static_cast<int32_t>(rest * static_cast<uint32_t>(range) / static_cast<uint32_t>(ranges));
  } else {
    return range * work / ranges;
  }
}

// The range that holds a position: the largest r with floor(r W / G) <= position, that is r W / G < position + 1.
template <class P>
LEANFLEET_HD int32_t range_of(P work, int32_t ranges, P position) {
  if constexpr (std::is_same_v<P, int32_t>) {
    int32_t range = min32(static_cast<int32_t>(static_cast<float>(position) / work * ranges), ranges - 1);  // or one beside it
    while (range + 1 < ranges && range_begin(work, ranges, range + 1) <= position) ++range;
    while (range_begin(work, ranges, range) > position) --range;
    return range;
  } else {
    return static_cast<int32_t>(((position + 1) * ranges - 1) / work);
  }
}

struct Unit {
  Request request;
  int32_t index, head, row_tile;  // index: of the request, or of the piece of packed tokens
  Span tiles;                     // that it sees
  int64_t position;               // where it begins on the line
};

// Where the line goes on after a unit.
LEANFLEET_HD int64_t unit_end(const Args& args, const Unit& unit) { return unit.position + unit_work(args, unit.tiles); }

// The unit that holds `position` < work. prefix[B+1]: see fill_work_prefix.
LEANFLEET_HD Unit locate(const Args& args, const int64_t* prefix, int64_t position) {
  int32_t low = 0, high = args.batch - 1;  // the last request that begins at or before position
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (prefix[middle] <= position) low = middle;
    else high = middle - 1;
  }
  Unit unit;
  unit.index = low;
  unit.request = request_of(args, low);
  const int64_t head_work = (prefix[low + 1] - prefix[low]) / args.kv_heads;
  unit.head = static_cast<int32_t>((position - prefix[low]) / head_work);
  unit.position = prefix[low] + unit.head * head_work;
  for (unit.row_tile = 0;; ++unit.row_tile) {
    unit.tiles = unit_tiles(args, unit.request, unit.row_tile);
    const int64_t end = unit_end(args, unit);
    if (position < end) return unit;
    unit.position = end;
  }
}

// Moves on to the next unit. The last unit has none. kHeadsInside: in the order of a device.
template <bool kHeadsInside = false>
LEANFLEET_HD void next_unit(const Args& args, Unit& unit) {
  unit.position = unit_end(args, unit);
  if constexpr (kHeadsInside) {
    if (++unit.head < args.kv_heads) return;
    unit.head = 0;
    if (++unit.row_tile == num_row_tiles(args)) {
      unit.row_tile = 0;
      do unit.request = request_of(args, ++unit.index);
      while (unit.request.rows == 0);
    }
  } else if (++unit.row_tile == num_row_tiles(args)) {
    unit.row_tile = 0;
    if (++unit.head == args.kv_heads) {
      unit.head = 0;
      do unit.request = request_of(args, ++unit.index);
      while (unit.request.rows == 0);
    }
  }
  unit.tiles = unit_tiles(args, unit.request, unit.row_tile);
}

// A range's part of a unit.
struct Segment {
  Span tiles;            // its share of the unit's tiles
  bool contributes;      // false: it holds nothing but the overhead of the unit, there is nothing to do
  int32_t index, count;  // which of how many contributors; count 1: it writes the output itself
  int32_t slot;          // 0 .. 2 * ranges - 1: where its partial result goes if count > 1
};

// The slot of contributor `index` of a unit whose first contributor is range `first`.
LEANFLEET_HD int32_t slot_of(int32_t first, int32_t index) { return 2 * (first + index) + (index == 0); }

// That first contributor again.
LEANFLEET_HD int32_t first_contributor(const Segment& segment) { return segment.slot / 2 - segment.index; }

// A whole unit of a range.
LEANFLEET_HD Segment whole_segment(const Unit& unit, int32_t range) { return {unit.tiles, true, 0, 1, slot_of(range, 0)}; }

// The tiles of a unit that lie in the positions [begin, end) of a range.
struct Share {
  Span tiles;
  bool contributes, whole;
};

template <class P>
LEANFLEET_HD Share share_of(const Args& args, const Unit& unit, P begin, P end) {
  const P tiles_at = static_cast<P>(unit.position + args.plan.unit_overhead);
  const P tiles_end = static_cast<P>(unit_end(args, unit));
  if (begin <= tiles_at && end >= tiles_end) return {unit.tiles, true, true};
  begin = begin < tiles_at ? tiles_at : begin;
  end = end > tiles_end ? tiles_end : end;
  if (begin >= end) return {{unit.tiles.begin, unit.tiles.begin}, false, false};
  return {{unit.tiles.begin + static_cast<int32_t>(begin - tiles_at),
           min32(unit.tiles.begin + static_cast<int32_t>(end - tiles_at), unit.tiles.end)},
          true,
          false};
}

// That share with its place among the unit's contributors.
template <class P>
LEANFLEET_HD Segment segment_of(const Args& args, const Unit& unit, const Share& share, P work, int32_t ranges, int32_t range) {
  if (share.whole) return whole_segment(unit, range);
  const bool begins = share.contributes && share.tiles.begin == unit.tiles.begin;
  const bool ends = share.contributes && share.tiles.end == unit.tiles.end;
  const int32_t first = begins ? range : range_of(work, ranges, static_cast<P>(unit.position + args.plan.unit_overhead));
  const int32_t last = ends ? range : range_of(work, ranges, static_cast<P>(unit_end(args, unit) - 1));
  return {share.tiles, share.contributes, range - first, last - first + 1, slot_of(first, range - first)};
}

LEANFLEET_HD Segment segment_of(const Args& args, const Unit& unit, int64_t work, int32_t ranges, int32_t range) {
  const Share share = share_of(args, unit, range_begin(work, ranges, range), range_begin(work, ranges, range + 1));
  return segment_of(args, unit, share, work, ranges, range);
}

// Units dealt out whole
//
// A cut costs a second begin and end of the unit and a merge, which is more than it evens out where a CTA has several units. Then
// CTAs take whole units, each the next one that nobody has, of an order by falling size, so that all end at about the same time;
// and nobody has to find the begin of a range. The order: of `deal_heads` heads after the other, so that their keys and values stay
// in the L2 cache, the last query tiles of all, which see most keys, then those before, to the first. Pieces of packed tokens, a
// query tile each, are in that order as if they were the query tiles of one request.

// Whether a request is as all have to be for units to be dealt, if its keys are as many as those of the others.
LEANFLEET_HD bool may_be_dealt(const Args& args, const Request& request) {
  return request.tokens == args.tokens && request.position <= args.plan.deal_history;
}

// The unit of this index in that order, of less than 2^20; its position is not set. False: there are not so many.
LEANFLEET_HD bool deal(const Args& args, int32_t index, Unit& unit) {
  const bool pieces = args.packed_tokens;
  const int32_t heads = pieces ? args.kv_heads : args.batch * args.kv_heads, rows = pieces ? args.batch : num_row_tiles(args);
  if (index >= heads * rows) return false;
  const int32_t first = small_quotient(index, args.plan.deal_heads * rows) * args.plan.deal_heads;
  const int32_t together = min32(args.plan.deal_heads, heads - first), rest = index - first * rows;
  const int32_t row = small_quotient(rest, together), head = first + rest - row * together;
  unit.index = pieces ? rows - 1 - row : small_quotient(head, args.kv_heads);
  unit.head = pieces ? head : head - unit.index * args.kv_heads;
  unit.row_tile = pieces ? 0 : rows - 1 - row;
  unit.request = request_of(args, unit.index);
  unit.tiles = unit_tiles(args, unit.request, unit.row_tile);
  return true;
}

constexpr int32_t kUnit = 3, kCut = 9;        // begin and end of a unit; a merge and finding a range: in tiles, measured
constexpr int64_t kTogetherBytes = 24 << 20;  // of keys and values that are read at about the same time: half of the L2 cache

// How many heads with so many keys are that.
LEANFLEET_HD int32_t heads_together(const Args& args, int32_t keys, int32_t heads) {
  const int64_t most = kTogetherBytes / (2 * static_cast<int64_t>(args.key_width + args.value_width) * max32(keys, 1));
  return most < 1 ? 1 : most < heads ? static_cast<int32_t>(most) : heads;
}

// Whether CTAs that take `longest` tiles at most with whole units are done sooner than with ranges of `even` tiles, by an estimate.
// Ranges go over all heads at once: where these are more than can be read together, keys come from memory again and again.
LEANFLEET_HD bool is_sooner(int64_t longest, int64_t even, int32_t heads, int32_t together) {
  const int64_t cuts = even / 25, misses = heads > 2 * together ? even / 10 : 0;  // measured
  return longest < even + cuts + misses + kUnit + kCut;
}

// Whether whole units are done sooner than ranges. All requests have all keys of the cache.
LEANFLEET_HD bool is_better_dealt(const Args& args) {
  constexpr int32_t kRowTiles = 32;  // that are looked at
  const int32_t ctas = args.plan.max_ranges, row_tiles = num_row_tiles(args);
  const int64_t units = static_cast<int64_t>(args.batch) * args.kv_heads * row_tiles;
  if (units >= 1 << 20) return false;
  const auto cost = [&](int64_t index) -> int64_t {
    Unit unit;
    return deal(args, static_cast<int32_t>(index), unit) ? kUnit + max32(unit.tiles.end - unit.tiles.begin, 1) : 0;
  };
  int64_t sum = 0, sampled = 0;
  const int32_t step = max32(row_tiles / kRowTiles, 1);
  for (int32_t row_tile = step / 2; row_tile < row_tiles; row_tile += step) {
    const Span tiles = unit_tiles(args, request_of(args, 0), row_tile);
    sum += kUnit + max32(tiles.end - tiles.begin, 1);
    ++sampled;
  }
  const int64_t even = sum * units / (sampled * ctas);
  // Who begins one of the last units has the others wait for its end. Where CTAs have up to two: the largest unit or two of them.
  int64_t longest = even + cost(units - ctas > 0 ? units - ctas : 0) / 2;
  if (units <= 2 * ctas) {
    const int64_t first = cost(0), middle = cost(ctas - 1) + cost(ctas);
    longest = middle > first ? middle : first;
  }
  const int64_t rounds = (units + ctas - 1) / ctas * cost(0);
  if (longest > rounds) longest = rounds;
  return is_sooner(longest, even, args.batch * args.kv_heads, args.plan.deal_heads);
}

// Fills in plan.deal_history and plan.deal_heads, the rest of the plan being known. args.plan is not read. Of packed tokens that
// leaves the choice to the device, which knows their lengths, where there are units enough.
LEANFLEET_HD void choose_dealing(const Args& args, Plan& plan) {
  if (args.packed_tokens) {
    const int64_t units = static_cast<int64_t>(args.batch) * args.kv_heads;
    const bool may = num_row_tiles(args, plan.row_tile) == 1 && units >= 2 * plan.max_ranges && units < 1 << 20;
    plan.deal_history = may ? 0 : -1;
    return;
  }
  const bool known = args.seq_lens == nullptr && args.cache_kind != kRagged;  // how many keys there are
  const int32_t keys = known ? args.capacity : args.tokens, all_heads = args.batch * args.kv_heads;
  plan.deal_heads = heads_together(args, keys, all_heads);
  plan.deal_history = -1;
  Args all = args;
  all.seq_lens = all.query_lens = nullptr;
  all.cache_kind = kDense;
  all.plan = plan;
  for (int32_t history = known ? args.capacity - args.tokens : 0; history >= 0 && history <= args.capacity - args.tokens;
       history = history == 0 ? 512 : 8 * history) {
    all.capacity = history + args.tokens;
    if (!is_better_dealt(all)) return;
    plan.deal_history = history;
    if (known || history >= 1 << 24) return;
  }
}

}  // LEANFLEET_HD_NAMESPACE(leanfleet::lean_attention)
