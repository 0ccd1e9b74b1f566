// Stream-K over attention: which keys each query row sees, and how the work of a call is cut into equal shares.
// Integer arithmetic on a LeanAttentionArgs and nothing else, the same code on the host and on a device.
//
// A unit is (request, key/value head, query tile): `row_tile` packed rows, row = token * group + head in the group,
// that share the keys and values of one head. Its context is cut into tiles of `key_tile` keys, aligned to multiples
// of it from position 0 of the request; only tiles that one of its rows sees are its work. Units stand on a line in
// the order request, head, query tile; a unit is `unit_overhead` positions followed by one position for each of its
// tiles, or by one for all if it has none, so that padding rows and empty requests have an owner too. Range r of G
// takes the positions [r W / G, (r+1) W / G) of all W: it ends in the middle of a unit where it must. Whoever owns
// all tiles of a unit writes its output; otherwise each owner of at least one tile, a contributor, leaves a partial
// result, and these are merged in the order of their ranges. A range leaves at most two: one for a unit that began
// in an earlier range and one for a unit that it begins.
//
// Where all units turn out to have the same number of tiles, a plan with equal_parts cuts each into at most that many
// ranges, all in the same places; see lean_settle. (direct_kernel.cuh has a cut of its own for that case.)
#pragma once

#include <cstdint>

#include "core/integers.h"
#include "lean_attention/lean_attention.h"

namespace LEANFLEET_HD_NAMESPACE {

LEANFLEET_HD int32_t lean_min(int32_t a, int32_t b) { return a < b ? a : b; }
LEANFLEET_HD int32_t lean_max(int32_t a, int32_t b) { return a > b ? a : b; }

// A request after clamping, whatever seq_lens, query_lens and cu_seqlens hold.
struct LeanRequest {
  int32_t start;   // ragged: its first position in the cache; else 0
  int32_t keys;    // valid keys, new ones included: 0 .. capacity
  int32_t tokens;  // new tokens: 0 .. min(Nq, keys); token i stands at position keys - tokens + i
};

LEANFLEET_HD LeanRequest lean_request(const LeanAttentionArgs& args, int32_t b) {
  LeanRequest request;
  int32_t capacity = args.capacity;
  request.start = 0;
  if (args.cache_kind == kLeanRagged) {
    request.start = clamped_offset(args.cu_seqlens, b, capacity);
    capacity = lean_max(clamped_offset(args.cu_seqlens, b + 1, capacity), request.start) - request.start;
  }
  request.keys = args.seq_lens != nullptr ? clamp(args.seq_lens[b], 0, capacity) : capacity;
  request.tokens = lean_min(args.query_lens != nullptr ? clamp(args.query_lens[b], 0, args.tokens) : args.tokens, request.keys);
  return request;
}

// A half-open interval, of keys or of tiles.
struct LeanSpan {
  int32_t begin, end;
};

// The keys that token i of the request sees. 0 <= i < request.tokens.
LEANFLEET_HD LeanSpan lean_token_keys(const LeanAttentionArgs& args, const LeanRequest& request, int32_t token) {
  if (!args.causal) return {0, request.keys};
  const int32_t end = request.keys - request.tokens + token + 1;
  return {args.window > 0 && end > args.window ? end - args.window : 0, end};
}

LEANFLEET_HD int32_t lean_row_tiles_of(const LeanAttentionArgs& args, int32_t row_tile) {
  return static_cast<int32_t>((static_cast<int64_t>(args.group) * args.tokens + row_tile - 1) / row_tile);
}

LEANFLEET_HD int32_t lean_row_tiles(const LeanAttentionArgs& args) { return lean_row_tiles_of(args, args.plan.row_tile); }

// The rows of a query tile: [begin, end) of all group * Nq, of which those below group * tokens are not padding.
LEANFLEET_HD LeanSpan lean_unit_rows(const LeanAttentionArgs& args, int32_t row_tile) {
  const int32_t begin = row_tile * args.plan.row_tile;
  return {begin, lean_min(begin + args.plan.row_tile, args.group * args.tokens)};
}

// The tokens of a query tile's rows, padding aside; empty if all are. Divisions only where there are several tiles.
LEANFLEET_HD LeanSpan lean_unit_tokens(const LeanAttentionArgs& args, const LeanRequest& request, int32_t row_tile) {
  const LeanSpan rows = lean_unit_rows(args, row_tile);
  const int32_t real_rows = args.group * request.tokens;
  LeanSpan tokens = {0, request.tokens};
  if (rows.begin > 0) tokens.begin = rows.begin / args.group;
  if (rows.end < real_rows) tokens.end = (rows.end - 1) / args.group + 1;
  if (rows.begin >= real_rows) tokens.end = tokens.begin;
  return tokens;
}

// The keys that at least one row of a query tile sees; empty if all are padding.
LEANFLEET_HD LeanSpan lean_unit_keys(const LeanAttentionArgs& args, const LeanRequest& request, int32_t row_tile) {
  const LeanSpan tokens = lean_unit_tokens(args, request, row_tile);
  if (tokens.begin >= tokens.end) return {0, 0};
  return {lean_token_keys(args, request, tokens.begin).begin, lean_token_keys(args, request, tokens.end - 1).end};
}

// The tiles of those keys.
LEANFLEET_HD LeanSpan lean_unit_tiles(const LeanAttentionArgs& args, const LeanRequest& request, int32_t row_tile) {
  const LeanSpan keys = lean_unit_keys(args, request, row_tile);
  return {keys.begin / args.plan.key_tile, keys.end / args.plan.key_tile + (keys.end % args.plan.key_tile != 0)};
}

LEANFLEET_HD int64_t lean_unit_work(const LeanAttentionArgs& args, LeanSpan tiles) {
  return args.plan.unit_overhead + lean_max(tiles.end - tiles.begin, 1);
}

// The work of one head of a request: the sum over its query tiles.
LEANFLEET_HD int64_t lean_head_work(const LeanAttentionArgs& args, const LeanRequest& request) {
  int64_t work = 0;
  for (int32_t row_tile = 0; row_tile < lean_row_tiles(args); ++row_tile)
    work += lean_unit_work(args, lean_unit_tiles(args, request, row_tile));
  return work;
}

// Into how many parts each unit of `tiles` tiles is cut if all have so many. Where CTAs of a cluster merge a unit, parts are
// halved, so that units of a power of two of them do not lie in two clusters.
LEANFLEET_HD int32_t lean_equal_parts(const LeanPlan& plan, int32_t tiles) {
  int32_t parts = plan.equal_parts;
  if (!plan.equal_halved) return lean_max(lean_min(parts, tiles / plan.min_range_work), 1);
  while (parts > 1 && parts * plan.min_range_work > tiles) parts /= 2;
  return parts;
}

// The plan for `units` units of which each is `parts` ranges.
LEANFLEET_HD void lean_settle_equal(LeanPlan& plan, int32_t units, int32_t parts) {
  plan.max_ranges = units * parts;
  plan.min_range_work = 1;
  plan.unit_overhead = 0;
}

// What a plan with equal_parts leaves open until the lengths are known: whether all units have the same number of tiles.
// Comes before everything below; a device does the same by a warp.
LEANFLEET_HD void lean_settle(LeanAttentionArgs& args) {
  if (args.plan.equal_parts == 0) return;
  const int32_t row_tiles = lean_row_tiles(args);
  int32_t tiles = -1;
  for (int32_t b = 0; b < args.batch; ++b) {
    const LeanRequest request = lean_request(args, b);
    for (int32_t row_tile = 0; row_tile < row_tiles; ++row_tile) {
      const LeanSpan span = lean_unit_tiles(args, request, row_tile);
      if (tiles < 0) tiles = span.end - span.begin;
      if (tiles != span.end - span.begin) return;
    }
  }
  lean_settle_equal(args.plan, args.batch * args.kv_heads * row_tiles, lean_equal_parts(args.plan, tiles));
}

// Fills prefix[B+1] with the work before each request and returns all of it. A device scans instead.
LEANFLEET_HD int64_t lean_work_prefix(const LeanAttentionArgs& args, int64_t* prefix) {
  int64_t work = 0;
  for (int32_t b = 0; b < args.batch; ++b) {
    prefix[b] = work;
    work += args.kv_heads * lean_head_work(args, lean_request(args, b));
  }
  return prefix[args.batch] = work;
}

// The number of ranges: max_ranges, or fewer where they would be smaller than min_range_work. Never more than the
// work, so that no range is empty.
LEANFLEET_HD int32_t lean_num_ranges(const LeanPlan& plan, int64_t work) {
  const int64_t most = work / lean_max(plan.min_range_work, 1);
  return most < 1 ? 1 : most < plan.max_ranges ? static_cast<int32_t>(most) : plan.max_ranges;
}

// Positions are of a type P that holds ranges * work: int64_t, or uint32_t where that is known to suffice and 64-bit
// divisions are slow.
template <class P>
LEANFLEET_HD P lean_range_begin(P work, int32_t ranges, int32_t range) {
  return range * work / ranges;
}

// The range that holds a position: the largest r with floor(r W / G) <= position, that is r W / G < position + 1.
template <class P>
LEANFLEET_HD int32_t lean_range_of(P work, int32_t ranges, P position) {
  return static_cast<int32_t>(((position + 1) * ranges - 1) / work);
}

struct LeanUnit {
  LeanRequest request;
  int32_t b, head, row_tile;
  LeanSpan tiles;    // that it sees
  int64_t position;  // where it begins on the line
};

// Where the line goes on after a unit.
LEANFLEET_HD int64_t lean_unit_end(const LeanAttentionArgs& args, const LeanUnit& unit) {
  return unit.position + lean_unit_work(args, unit.tiles);
}

// The unit that holds `position` < work. prefix[B+1]: see lean_work_prefix.
LEANFLEET_HD LeanUnit lean_locate(const LeanAttentionArgs& args, const int64_t* prefix, int64_t position) {
  int32_t low = 0, high = args.batch - 1;  // the last request that begins at or before position
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (prefix[middle] <= position) low = middle;
    else high = middle - 1;
  }
  LeanUnit unit;
  unit.b = low;
  unit.request = lean_request(args, low);
  const int64_t head_work = (prefix[low + 1] - prefix[low]) / args.kv_heads;
  unit.head = static_cast<int32_t>((position - prefix[low]) / head_work);
  unit.position = prefix[low] + unit.head * head_work;
  for (unit.row_tile = 0;; ++unit.row_tile) {
    unit.tiles = lean_unit_tiles(args, unit.request, unit.row_tile);
    const int64_t end = lean_unit_end(args, unit);
    if (position < end) return unit;
    unit.position = end;
  }
}

// Moves on to the next unit. The last unit has none.
LEANFLEET_HD void lean_next_unit(const LeanAttentionArgs& args, LeanUnit& unit) {
  unit.position = lean_unit_end(args, unit);
  if (++unit.row_tile == lean_row_tiles(args)) {
    unit.row_tile = 0;
    if (++unit.head == args.kv_heads) {
      unit.head = 0;
      unit.request = lean_request(args, ++unit.b);
    }
  }
  unit.tiles = lean_unit_tiles(args, unit.request, unit.row_tile);
}

// A range's part of a unit.
struct LeanSegment {
  LeanSpan tiles;        // its share of the unit's tiles
  bool contributes;      // false: it holds nothing but the overhead of the unit, there is nothing to do
  int32_t index, count;  // which of how many contributors; count 1: it writes the output itself
  int32_t slot;          // 0 .. 2 * ranges - 1: where its partial result goes if count > 1
};

// The slot of contributor `index` of a unit whose first contributor is range `first`.
LEANFLEET_HD int32_t lean_slot(int32_t first, int32_t index) { return 2 * (first + index) + (index == 0); }

// That first contributor again.
LEANFLEET_HD int32_t lean_first(const LeanSegment& segment) { return segment.slot / 2 - segment.index; }

// The tiles of a unit that lie in the positions [begin, end) of a range.
struct LeanShare {
  LeanSpan tiles;
  bool contributes, whole;
};

template <class P>
LEANFLEET_HD LeanShare lean_share(const LeanAttentionArgs& args, const LeanUnit& unit, P begin, P end) {
  const P tiles_at = static_cast<P>(unit.position + args.plan.unit_overhead);
  const P tiles_end = static_cast<P>(lean_unit_end(args, unit));
  if (begin <= tiles_at && end >= tiles_end) return {unit.tiles, true, true};
  begin = begin < tiles_at ? tiles_at : begin;
  end = end > tiles_end ? tiles_end : end;
  if (begin >= end) return {{unit.tiles.begin, unit.tiles.begin}, false, false};
  return {{unit.tiles.begin + static_cast<int32_t>(begin - tiles_at),
           lean_min(unit.tiles.begin + static_cast<int32_t>(end - tiles_at), unit.tiles.end)},
          true,
          false};
}

// That share with its place among the unit's contributors.
template <class P>
LEANFLEET_HD LeanSegment lean_segment_of(const LeanAttentionArgs& args, const LeanUnit& unit, const LeanShare& share, P work,
                                         int32_t ranges, int32_t range) {
  if (share.whole) return {share.tiles, true, 0, 1, lean_slot(range, 0)};
  const int32_t first = lean_range_of(work, ranges, static_cast<P>(unit.position + args.plan.unit_overhead));
  const int32_t last = lean_range_of(work, ranges, static_cast<P>(lean_unit_end(args, unit) - 1));
  return {share.tiles, share.contributes, range - first, last - first + 1, lean_slot(first, range - first)};
}

LEANFLEET_HD LeanSegment lean_segment(const LeanAttentionArgs& args, const LeanUnit& unit, int64_t work, int32_t ranges,
                                      int32_t range) {
  const LeanShare share =
      lean_share(args, unit, lean_range_begin(work, ranges, range), lean_range_begin(work, ranges, range + 1));
  return lean_segment_of(args, unit, share, work, ranges, range);
}

}  // namespace LEANFLEET_HD_NAMESPACE
