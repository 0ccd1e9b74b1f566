// LeanAttention over quantised caches on tensor cores, for float16 and bfloat16 queries; one of the two caches may have the query's
// type. Rows come into shared memory as they lie in the cache and become 16-bit numbers in registers. The products with quantised
// numbers are in half precision, which holds them exactly and has more digits than bfloat16. int4 take the places of int8 in shared
// memory, 8 bytes for each 16:
//   logits   query row times the keys' scales per channel, over a power of two that brings the row's largest number near 1;
//            scales of a tensor or a token are factors of the logits
//   output   weights times the values' scales per token, over a power of two for each row (`lift`), so that they stay in
//            half's range whatever the scales are; scales of a tensor or a channel are factors of the output
//
// A warp has 16 rows of the unit. Warps with other rows and the same tokens are a team, which fills a ring of tiles of its own
// by cp.async and has every tile of kTokens tokens that is its turn. A decode step has teams of one warp, a prompt one team.
// Teams meet at the end of a segment, where their parts of the rows are added up.
//
// In the fragments of mma.sync a lane is (g, t) = (lane / 4, lane % 4). Columns may stand in any order that is the same for both
// operands, so that a lane takes 16 bytes of a row at once: the keys of token g, chunks 2 t and 2 t + 1 of each 128 bytes; of
// values chunk g of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
#include <cuda_runtime.h>

#include <type_traits>

#include "lean_attention/device.cuh"
#include "lean_attention/narrow.cuh"
#include "lean_attention/narrow.h"

namespace leanfleet::lean_attention {

namespace {

constexpr int kMostWarps = 8, kMostStages = 6;

template <int kWidth>
struct NarrowTile {
  static constexpr int kTokens = kWidth == 256 ? 16 : 32;
  static constexpr int kSteps = kWidth / 16;  // products along the columns
  static constexpr int kScratchStride = kWidth + 4;
  static constexpr int kQueryBytes = kSteps * 32 * 16;  // of 16 rows, as fragments [step][lane]
};

// How a CTA works, and where its shared memory has what. Bytes.
struct NarrowLaunch {
  int32_t warps, team_warps;  // team_warps: 1, 2, 4 or 8, each with 16 rows
  int32_t stages;             // tiles of a team's ring: 2, 3, 4 or 6
  int32_t key_bytes, stage_bytes;
  int32_t key_piece_log2, value_piece_log2;  // of a copy: 4, 8 or 16 bytes
  int32_t shared_bytes;
};

// Shared memory: this, the query of each 16 rows as fragments, and the rings of the teams.
struct alignas(16) NarrowStatistics {
  float row_power[16 * kMostWarps];  // what the query's rows were divided by
  float max[kMostWarps][16], sum[kMostWarps][16];
  uint32_t missing[kMostWarps][kMostStages];  // a bit for each token of a tile whose page is outside the pool
};

// The byte of 16-byte chunk `chunk` of a token's row of kRowBytes, in lines of 128 bytes: two rows of 64 bytes, or [box of 128
// bytes][token]. Chunk c of line n stands at place c ^ (n % 8).
template <int kRowBytes, int kTokens>
__device__ __forceinline__ int row_offset(int token, int chunk) {
  const int line = kRowBytes == 64 ? token / 2 : chunk / 8 * kTokens + token;
  const int place = kRowBytes == 64 ? token % 2 * 4 + chunk : chunk % 8;
  return line * 128 + (place ^ line % 8) * 16;
}

__device__ __forceinline__ void wait_for_stages(int left) {
  switch (left) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 4;" ::: "memory");
  }
}

template <class T, int kWidth>
struct NarrowCta {
  using Tile = NarrowTile<kWidth>;
  static constexpr int kTokens = Tile::kTokens, kSteps = Tile::kSteps, kBlocks = kTokens / 8;
  static constexpr bool kHoldsQuery = kWidth <= 128;                                         // in registers
  static constexpr int kBoxes = kWidth == 256 ? 2 : 1, kChunksOfBox = kWidth == 64 ? 1 : 2;  // of int8 rows, a lane's

  const Args& args;
  const NarrowLaunch& launch;
  char* const query_fragments;
  NarrowStatistics& statistics;
  char* const ring;
  const int warp, lane, teams, team, member;
  const bool narrow_keys, narrow_values;

  // Of the segment.
  int request, head, begin, end, tiles;  // tokens [begin, end); tiles of this team
  int first_position;                    // ragged: of the request
  Span seen, common;                     // keys that at least one row sees, and that all rows see, padding aside
  const char *keys, *values;             // the head's, in the request's cache or in page 0
  int copy_slot, read_slot;              // stages of the tiles that are copied and read next
  int page;                              // of token lane % kTokens of the tile that is copied next

  uint4 query[kHoldsQuery ? kSteps : 1];
  float output[kWidth / 8][4];               // over lift
  float max[2], sum[2], factor[2], lift[2];  // of rows g and g + 8 of the warp's
  RowBounds bounds[2];

  __device__ __forceinline__ int group() const { return lane / 4; }
  __device__ __forceinline__ int place() const { return lane % 4; }
  __device__ __forceinline__ char* stage_at(int slot) const {
    return ring + (team * launch.stages + slot) * launch.stage_bytes;
  }
  __device__ __forceinline__ int slot_behind(int slot) const { return slot + 1 == launch.stages ? 0 : slot + 1; }
  __device__ __forceinline__ int first_token(int tile) const { return begin + (team + tile * teams) * kTokens; }

  __device__ __forceinline__ void meet_team() const {
    if (launch.team_warps == 1) __syncwarp();
    else named_barrier(2 + team, 32 * launch.team_warps);
  }

  // Tiles of a team. Those before it have as many, or one more.
  __device__ __forceinline__ int tiles_of(int of_team) const {
    const int all = end > begin ? (end - begin + kTokens - 1) / kTokens : 0;
    return all > of_team ? (all - of_team + teams - 1) / teams : 0;
  }

  __device__ __forceinline__ void begin_segment(const Unit& unit, const Segment& segment) {
    const RowsKeys of_rows = keys_of_tokens(args, unit.request, unit_tokens(args, unit.request, unit.row_tile));
    seen = of_rows.seen;
    common = of_rows.common;
    request = unit.request.b;
    head = unit.head;
    first_position = unit.request.start;
    begin = max32(segment.tiles.begin * args.plan.key_tile, seen.begin / kTokens * kTokens);
    end = min32(segment.tiles.end * args.plan.key_tile, seen.end);
    tiles = tiles_of(team);
    const auto base = [&](const void* cache, const CacheStrides& strides, const Scales& scales) {
      const int64_t at = head * strides.head + (args.cache_kind == kPaged ? 0 : request * strides.batch);
      return static_cast<const char*>(cache) + cache_bytes(scales, at, 2);
    };
    keys = base(args.key_cache, args.key_strides, args.key_scales);
    values = base(args.value_cache, args.value_strides, args.value_scales);
    copy_slot = read_slot = 0;
    look_up(0);
  }

  // The page of each token of a tile, one step before its rows are asked for.
  __device__ __forceinline__ void look_up(int tile) {
    page = 0;
    if (args.cache_kind != kPaged) return;
    const int token = first_token(tile) + lane % kTokens;
    page = -1;
    if (tile >= tiles || token < seen.begin || token >= end) return;
    const int found =
        __ldg(args.block_table + static_cast<int64_t>(request) * args.pages_per_request + quotient(token, args.block));
    if (static_cast<unsigned>(found) < static_cast<unsigned>(args.num_pages)) page = found;
  }

  // Starts to copy a tile, in the order of tiles; what no row sees becomes 0. Its stage has been read.
  __device__ __forceinline__ void copy_tile(int tile) {
    if (tile < tiles) {
      const int token = first_token(tile) + lane % kTokens;
      const bool inside = token >= seen.begin && token < end, wanted = inside && page >= 0;
      const bool paged = args.cache_kind == kPaged;
      const int of_page = paged ? token - quotient(token, args.block) * args.block : 0;
      const int64_t position = paged ? of_page : first_position + static_cast<int64_t>(token);
      const auto at = [&](const CacheStrides& strides) { return (paged ? page * strides.page : 0) + position * strides.token; };
      const unsigned missing = __ballot_sync(kFullWarp, inside && page < 0);
      if (lane == 0) statistics.missing[warp][copy_slot] = missing;
      char* const stage = stage_at(copy_slot);
      copy_slot = slot_behind(copy_slot);
      const int64_t key_at = wanted ? cache_bytes(args.key_scales, at(args.key_strides), 2) : -1;
      const int64_t value_at = wanted ? cache_bytes(args.value_scales, at(args.value_strides), 2) : -1;
      // Rows that lie at one distance from each other.
      const bool whole = launch.team_warps == 1 && __all_sync(kFullWarp, wanted) &&
                         (!paged || __shfl_sync(kFullWarp, of_page, 0) + kTokens <= args.block);
      copy_rows(stage, keys, key_at, args.key_strides, args.key_width, args.key_scales, launch.key_piece_log2, whole);
      copy_rows(stage + launch.key_bytes, values, value_at, args.value_strides, args.value_width, args.value_scales,
                launch.value_piece_log2, whole);
      const auto copy_scale = [&](const Scales& scales, const float* to) {
        if (scales.kind != kPerToken || member != 0 || lane >= kTokens) return;
        const int64_t from = head * scales.strides.head + (paged ? 0 : request * scales.strides.batch) + at(scales.strides);
        cp_async_4(shared_address(to + lane), wanted ? scales.in + from : scales.in, wanted ? 4 : 0);
      };
      copy_scale(args.key_scales, key_scales(stage));
      copy_scale(args.value_scales, key_scales(stage) + kTokens);
      look_up(tile + 1);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ const float* key_scales(const char* stage) const {
    return reinterpret_cast<const float*>(stage + launch.stage_bytes) - 2 * kTokens;
  }

  // A tile of rows that lie `stride` bytes apart, by a warp. `bytes` of kRowBytes exist, the others become 0.
  template <int kRowBytes>
  __device__ __forceinline__ void copy_even_rows(char* to, const char* from, int64_t stride, int bytes) const {
    constexpr int kLanes = kRowBytes / 16, kAtOnce = 32 / kLanes;
    const int first = lane / kLanes, chunk = lane % kLanes, read = chunk * 16 < bytes ? 16 : 0;
    const uint32_t there = shared_address(to);
    from += first * stride + chunk * read;  // where columns are missing, any address that exists
    stride *= kAtOnce;
#pragma unroll
    for (int token = 0; token < kTokens; token += kAtOnce) {
      cp_async(there + row_offset<kRowBytes, kTokens>(first + token, chunk), from, read);
      from += stride;
    }
  }

  // mine: bytes from `from` to the row of token lane % kTokens, or -1. Columns beyond the row's become 0: they meet zeros of the
  // query, and must not be NaN.
  __device__ __forceinline__ void copy_rows(char* to, const char* from, int64_t mine, const CacheStrides& strides, int width,
                                            const Scales& scales, int piece_log2, bool whole) const {
    const bool narrow = scales.kind != kNoScale, nibbles = narrow && scales.form == kInt4;
    if (whole && piece_log2 == 4) {
      from += __shfl_sync(kFullWarp, mine, 0);
      if (narrow) copy_even_rows<kWidth>(to, from, strides.token, width);
      else copy_even_rows<2 * kWidth>(to, from, 2 * strides.token, 2 * width);
      return;
    }
    constexpr int kWidthLog2 = kWidth == 64 ? 6 : kWidth == 128 ? 7 : 8;
    const int lanes_log2 = kWidthLog2 + (nibbles ? -1 : narrow ? 0 : 1) - piece_log2;  // of a row
    const int thread = member * 32 + lane, byte = (thread & ((1 << lanes_log2) - 1)) << piece_log2;
    const bool exists = byte < cache_bytes(scales, width, 2);
#pragma unroll 1
    for (int token = thread >> lanes_log2; token < kTokens; token += (32 * launch.team_warps) >> lanes_log2) {
      const int64_t row = __shfl_sync(kFullWarp, mine, token);
      const bool copies = row >= 0 && exists;
      const int offset = nibbles  ? row_offset<kWidth, kTokens>(token, byte / 8) + byte % 8
                         : narrow ? row_offset<kWidth, kTokens>(token, byte / 16) + byte % 16
                                  : row_offset<2 * kWidth, kTokens>(token, byte / 16) + byte % 16;
      const uint32_t there = shared_address(to + offset);
      const char* const source = copies ? from + row + byte : from;
      if (piece_log2 == 4) cp_async(there, source, copies ? 16 : 0);
      else if (piece_log2 == 3) cp_async_8(there, source, copies ? 8 : 0);
      else cp_async_4(there, source, copies ? 4 : 0);
    }
  }

  // The first of the 4 columns that lanes (g, t) have of a step: 2 in each half of the product's 16.
  struct Step {
    int step, place;
  };
  __device__ __forceinline__ Step step_of(int column) const {
    if (!narrow_keys) return {column / 64 * 4 + column / 8 % 2 * 2 + column / 4 % 2, column % 64 / 16};
    if (kWidth == 64) return {column / 4 % 4, column / 16};
    return {(column / 128 * 2 + column / 16 % 2) * 4 + column / 4 % 4, column % 128 / 32};
  }

  // Four columns of a row of the query after its rotary embedding.
  __device__ __forceinline__ float4 query_columns(const T* row, int position, int column) const {
    if (args.rotary_half == 0) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(row + column);
      const float2 a = unpack_pair(T{}, pairs.x), b = unpack_pair(T{}, pairs.y);
      return make_float4(a.x, a.y, b.x, b.y);
    }
    const Rotation rotation = rotation_at(args, position);
    const float2 a = rotate<T, false>(rotation, row, column), b = rotate<T, false>(rotation, row, column + 2);
    const float2 c = unpack_pair(T{}, pack_pair(T{}, a.x, a.y)), d = unpack_pair(T{}, pack_pair(T{}, b.x, b.y));
    return make_float4(c.x, c.y, d.x, d.y);
  }

  // A warp a row: the unit's rows as fragments, with zeros for padding and beyond D.
  __device__ __forceinline__ void prepare_query(const Unit& unit, Span rows) const {
    constexpr int kQuads = (kWidth + 127) / 128;
    const int real_rows = min32(rows.end, args.group * unit.request.tokens);
#pragma unroll 1
    for (int row = warp; row < 16 * launch.team_warps; row += launch.warps) {
      float4 x[kQuads];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int column = 128 * i + 4 * lane;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (rows.begin + row >= real_rows || column >= args.key_width) continue;
        const RowPlace at = row_place(args, unit, rows.begin + row);
        x[i] = query_columns(query_row<T>(args, unit, at), unit.request.position + at.token, column);
        if (args.key_scales.kind == kPerChannel) {
          const float* const scales = args.key_scales.in + static_cast<int64_t>(head) * args.key_width + column;
          x[i].x *= scales[0], x[i].y *= scales[1], x[i].z *= scales[2], x[i].w *= scales[3];
        }
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      const bool divided = narrow_keys && largest > 0.0f && largest < INFINITY;
      const float power = divided ? power_below(largest) : 1.0f, inverse = inverse_power(power);
      if (lane == 0) statistics.row_power[row] = power;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int column = 128 * i + 4 * lane;
        if (column >= kWidth) continue;
        const Step at = step_of(column);
        uint32_t* const to = reinterpret_cast<uint32_t*>(query_fragments + row / 16 * Tile::kQueryBytes) +
                             (at.step * 32 + row % 8 * 4 + at.place) * 4 + row / 8 % 2;
        if (narrow_keys) {
          to[0] = pack_pair(__half{}, x[i].x * inverse, x[i].y * inverse);
          to[2] = pack_pair(__half{}, x[i].z * inverse, x[i].w * inverse);
        } else {
          to[0] = pack_pair(T{}, x[i].x, x[i].y);
          to[2] = pack_pair(T{}, x[i].z, x[i].w);
        }
      }
    }
  }

  __device__ __forceinline__ uint4 query_fragment(int step) const {
    return reinterpret_cast<const uint4*>(query_fragments + member * Tile::kQueryBytes)[step * 32 + lane];
  }

  __device__ __forceinline__ void begin_rows(const Unit& unit, Span rows) {
    if constexpr (kHoldsQuery) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) query[k] = query_fragment(k);
    }
    const float scale = args.scale * (args.softcap > 0.0f ? 1.0f : kLog2E) *
                        (args.key_scales.kind == kPerTensor ? args.key_scales.in[0] : 1.0f);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 16 * member + group() + 8 * c;
      factor[c] = statistics.row_power[row] * scale;
      bounds[c] = rows.begin + row < rows.end ? row_bounds(args, unit, rows.begin + row) : RowBounds{0, 0};
      max[c] = -INFINITY;
      sum[c] = 0.0f;
      lift[c] = args.value_scales.kind == kPerToken ? 0.0f : 1.0f;
    }
#pragma unroll
    for (int o = 0; o < kWidth / 8; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i) output[o][i] = 0.0f;
  }

  __device__ __forceinline__ uint4 query_of(int step) const {
    if constexpr (kHoldsQuery) return query[step];
    else return query_fragment(step);
  }

  // 16 numbers of a row, a byte each.
  template <CacheForm kForm>
  static __device__ __forceinline__ uint4 sixteen(const char* from) {
    if constexpr (kForm != kInt4) {
      return *reinterpret_cast<const uint4*>(from);
    } else {
      const uint2 nibbles = *reinterpret_cast<const uint2*>(from);
      const uint2 first = biased_bytes(nibbles.x), second = biased_bytes(nibbles.y);
      return make_uint4(first.x, first.y, second.x, second.y);
    }
  }

  // s[n]: rows g and g + 8, tokens 8 n + 2 t and the next.
  template <CacheForm kForm>
  __device__ __forceinline__ void score_narrow(const char* from, float (&s)[kBlocks][4]) const {
#pragma unroll
    for (int part = 0; part < kBoxes * kChunksOfBox; ++part) {
      const int chunk = kWidth == 64 ? place() : part / 2 * 8 + 2 * place() + part % 2;
      uint4 x[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) x[n] = sixteen<kForm>(from + row_offset<kWidth, kTokens>(8 * n + group(), chunk));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint4 q = query_of(part * 4 + w);
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint32_t word = prepared<kForm>(word_of(x[n], w));
          mma(__half{}, s[n], a, halves_of<kForm, false>(word), halves_of<kForm, true>(word));
        }
      }
    }
  }
  __device__ __forceinline__ void score_wide(const char* from, float (&s)[kBlocks][4]) const {
#pragma unroll
    for (int part = 0; part < kWidth / 32; ++part) {
      const int chunk = part / 2 * 8 + 2 * place() + part % 2;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + row_offset<2 * kWidth, kTokens>(8 * n + group(), chunk));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 q = query_of(part * 2 + half);
          const uint32_t a[4] = {q.x, q.y, q.z, q.w};
          mma(T{}, s[n], a, word_of(x, 2 * half), word_of(x, 2 * half + 1));
        }
      }
    }
  }

  // The logits in base 2, -inf where a row does not see a token.
  __device__ __forceinline__ void finish_scores(const char* stage, int first, unsigned missing, float (&s)[kBlocks][4]) const {
    const float* const scales = key_scales(stage);
    const bool masked = first < common.begin || first + kTokens > common.end || missing != 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float2 of_tokens = make_float2(1.0f, 1.0f);
      if (args.key_scales.kind == kPerToken) of_tokens = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * place());
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= factor[i / 2] * (i % 2 == 0 ? of_tokens.x : of_tokens.y);
    }
    if (args.softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = cap_logit(s[n][i], args.softcap) * kLog2E;
    }
    if (!masked) return;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of_tile = 8 * n + 2 * place() + i % 2, token = first + of_tile;
        if (token < bounds[i / 2].begin || token >= bounds[i / 2].end || (missing >> of_tile & 1)) s[n][i] = -INFINITY;
      }
  }

  __device__ __forceinline__ void multiply_output(int c, float by) {
#pragma unroll
    for (int o = 0; o < kWidth / 8; ++o) {
      output[o][2 * c] *= by;
      output[o][2 * c + 1] *= by;
    }
  }

  static __device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
  }

  // Logits become weights; the statistics and the output are brought up to date.
  __device__ __forceinline__ void online_softmax(float (&s)[kBlocks][4]) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], s[n][i]);
    if (__any_sync(kFullWarp, top[0] - max[0] > kRescaleAt || top[1] - max[1] > kRescaleAt)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float now = fmaxf(largest_of_row(top[c]), max[c]), by = rescale(max[c], now);
        max[c] = now;
        sum[c] *= by;
        // With scales of tokens the power falls with the weights so far; lift_weights raises it as far as it has to.
        // Below the least power its row has next to no part in the output.
        if (args.value_scales.kind == kPerToken) lift[c] = lift[c] * by < 0x1p-120f ? 0.0f : lift[c] * by;
        else multiply_output(c, by);
      }
    }
    const float base[2] = {max[0] == -INFINITY ? 0.0f : max[0], max[1] == -INFINITY ? 0.0f : max[1]};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_fast(s[n][i] - base[i / 2]);
        sum[i / 2] += s[n][i];
      }
  }

  // Multiplies the weights by their tokens' scales and divides them by lift, which rises where they would be large.
  __device__ __forceinline__ void lift_weights(const char* stage, float (&p)[kBlocks][4]) {
    const float* const scales = key_scales(stage) + kTokens;
    float top[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 of_tokens = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * place());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[n][i] *= i % 2 == 0 ? of_tokens.x : of_tokens.y;
        top[i / 2] = fmaxf(top[i / 2], fabsf(p[n][i]));
      }
    }
    if (__any_sync(kFullWarp, top[0] > lift[0] * kMostOverLift || top[1] > lift[1] * kMostOverLift)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float now = power_below(fmaxf(largest_of_row(top[c]), lift[c]));
        multiply_output(c, lift[c] * inverse_power(now));
        lift[c] = now;
      }
    }
    float inverse[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) inverse[c] = lift[c] > 0.0f ? 1.0f / lift[c] : 0.0f;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] *= inverse[i / 2];
  }

  template <class P>
  static __device__ __forceinline__ void pack_weights(P type, const float (&p)[kBlocks][4], int slice, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack_pair(type, p[2 * slice + i / 2][i % 2 * 2], p[2 * slice + i / 2][i % 2 * 2 + 1]);
  }

  // The token of row i of the 4 that a lane has of each 16 values.
  __device__ __forceinline__ int value_token(int slice, int i) const { return 16 * slice + i / 2 * 8 + 2 * place() + i % 2; }

  // output[16 b + w], kWidth = 64 output[w]: the products with columns 128 b + 16 n + w, or 8 n + w, n as in mma.sync.
  template <CacheForm kForm>
  __device__ __forceinline__ void add_values_narrow(const char* from, const float (&p)[kBlocks][4]) {
    constexpr int kWords = kWidth == 64 ? 2 : 4;
#pragma unroll
    for (int slice = 0; slice < kTokens / 16; ++slice) {
      uint32_t a[4];
      pack_weights(__half{}, p, slice, a);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        uint32_t x[4][kWords];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kWidth == 64) {
            const char* const row = from + row_offset<64, kTokens>(value_token(slice, i), group() / 2);
            uint2 found;
            if constexpr (kForm == kInt4) found = biased_bytes(*reinterpret_cast<const uint32_t*>(row + group() % 2 * 4));
            else found = *reinterpret_cast<const uint2*>(row + group() % 2 * 8);
            x[i][0] = found.x, x[i][1] = found.y;
          } else {
            const int offset = row_offset<kWidth, kTokens>(value_token(slice, i), 8 * b + group());
            const uint4 found = sixteen<kForm>(from + offset);
            x[i][0] = found.x, x[i][1] = found.y, x[i][2] = found.z, x[i][3] = found.w;
          }
        }
#pragma unroll
        for (int w = 0; w < kWords; ++w)
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {  // two columns of two tokens each
            const uint32_t select = pair == 0 ? 0x5140 : 0x7362;
            const uint32_t low = prepared<kForm>(__byte_perm(x[0][w], x[1][w], select));
            const uint32_t high = prepared<kForm>(__byte_perm(x[2][w], x[3][w], select));
            float (&first)[4] = output[16 * b + 4 * w + 2 * pair];
            float (&second)[4] = output[16 * b + 4 * w + 2 * pair + 1];
            mma(__half{}, first, a, halves_of<kForm, false>(low), halves_of<kForm, false>(high));
            mma(__half{}, second, a, halves_of<kForm, true>(low), halves_of<kForm, true>(high));
          }
      }
    }
  }
  // output[8 b + w]: columns 64 b + 8 n + w.
  __device__ __forceinline__ void add_values_wide(const char* from, const float (&p)[kBlocks][4]) {
#pragma unroll
    for (int slice = 0; slice < kTokens / 16; ++slice) {
      uint32_t a[4];
      pack_weights(T{}, p, slice, a);
#pragma unroll
      for (int b = 0; b < kWidth / 64; ++b) {
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] =
              *reinterpret_cast<const uint4*>(from + row_offset<2 * kWidth, kTokens>(value_token(slice, i), 8 * b + group()));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t words[4] = {word_of(x[0], w), word_of(x[1], w), word_of(x[2], w), word_of(x[3], w)};
          mma(T{}, output[8 * b + 2 * w], a, __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410));
          mma(T{}, output[8 * b + 2 * w + 1], a, __byte_perm(words[0], words[1], 0x7632),
              __byte_perm(words[2], words[3], 0x7632));
        }
      }
    }
  }

  // The first column of output[o], o a multiple of 4, for c = 0 and 1: so many columns follow each other there.
  __device__ __forceinline__ int column_of(int o, int c) const {
    if (kWidth > 64 && narrow_values) return o / 16 * 128 + 16 * (2 * place() + c) + o % 16;
    return o / 8 * 64 + 8 * (2 * place() + c) + o % 8;
  }

  __device__ __forceinline__ void consume(int tile) {
    const char* const stage = stage_at(read_slot);
    const unsigned missing = statistics.missing[warp][read_slot];
    read_slot = slot_behind(read_slot);
    float s[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    if (narrow_keys) for_form(args.key_scales.form, [&](auto form) { score_narrow<decltype(form)::value>(stage, s); });
    else score_wide(stage, s);
    finish_scores(stage, first_token(tile), missing, s);
    online_softmax(s);
    if (args.value_scales.kind == kPerToken) lift_weights(stage, s);
    const char* const rows = stage + launch.key_bytes;
    if (narrow_values) for_form(args.value_scales.form, [&](auto form) { add_values_narrow<decltype(form)::value>(rows, s); });
    else add_values_wide(rows, s);
  }

  __device__ __forceinline__ void run_segment(const Unit& unit, const Segment& segment) {
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    __syncthreads();  // the ring and the query of the segment before have been read
    begin_segment(unit, segment);
#pragma unroll 1
    for (int tile = 0; tile < launch.stages - 1; ++tile) copy_tile(tile);
    prepare_query(unit, rows);
    __syncthreads();
    begin_rows(unit, rows);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      wait_for_stages(launch.stages - 2);
      meet_team();  // all copies of the tile have landed, and the tile before has been read
      copy_tile(tile + launch.stages - 1);
      consume(tile);
    }
    if (team > 0 && tiles < tiles_of(0)) meet_team();  // as often as other teams, or racecheck sees races where they join
    wait_for_stages(0);
    finish(unit, segment, rows);
  }

  // 4 columns of a row of the unit, over the values' scales that are no tokens'.
  __device__ __forceinline__ void write(const Unit& unit, const Segment& segment, Span rows, int row, int d, float4 o,
                                        float row_max, float row_sum) const {
    scale_values(args.value_scales, head, args.value_width, d, o);
    if (segment.count == 1) write_row<T>(args, unit, rows.begin + row, d, o, row_max, row_sum);
    else write_partial(args, segment.slot, row, d, o, row_max, row_sum);
  }

  __device__ __forceinline__ void finish(const Unit& unit, const Segment& segment, Span rows) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 1);
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 2);
    }
    if (teams == 1) {
#pragma unroll
      for (int o = 0; o < kWidth / 8; o += 4)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = i / 2, row = 16 * member + group() + 8 * c, d = column_of(o, i % 2);
          if (rows.begin + row < rows.end && d < args.value_width)
            write(unit, segment, rows, row, d, lifted(o, i), max[c], sum[c]);
        }
    } else {
      join_teams(unit, segment, rows);
    }
    if (segment.count == 1) return;
    end_part<T>(args, unit, segment, first_contributor(segment), warp, launch.warps);
  }

  __device__ __forceinline__ float4 lifted(int o, int i) const {
    const float by = lift[i / 2];
    return make_float4(output[o][i] * by, output[o + 1][i] * by, output[o + 2][i] * by, output[o + 3][i] * by);
  }

  // The sum of the teams' parts, which meet where the ring was.
  __device__ __forceinline__ void join_teams(const Unit& unit, const Segment& segment, Span rows) {
    float* const scratch = reinterpret_cast<float*>(ring);
    __syncthreads();
    if (place() == 0) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        statistics.max[warp][group() + 8 * c] = max[c];
        statistics.sum[warp][group() + 8 * c] = sum[c];
      }
    }
#pragma unroll
    for (int o = 0; o < kWidth / 8; o += 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * warp + group() + 8 * (i / 2), d = column_of(o, i % 2);
        *reinterpret_cast<float4*>(scratch + row * Tile::kScratchStride + d) = lifted(o, i);
      }
    __syncthreads();
    const int quads = args.value_width / 4;
#pragma unroll 1
    for (int item = warp * 32 + lane; item < (rows.end - rows.begin) * quads; item += launch.warps * 32) {
      const int row = small_quotient(item, quads), d = (item - row * quads) * 4;
      float top = -INFINITY, total = 0.0f;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int t = 0; t < teams; ++t) top = fmaxf(top, statistics.max[t * launch.team_warps + row / 16][row % 16]);
#pragma unroll 1
      for (int t = 0; t < teams; ++t) {
        const int of_team = t * launch.team_warps + row / 16;
        const float by = rescale(statistics.max[of_team][row % 16], top);
        const float4 x = *reinterpret_cast<const float4*>(scratch + (16 * of_team + row % 16) * Tile::kScratchStride + d);
        total += by * statistics.sum[of_team][row % 16];
        o.x += by * x.x, o.y += by * x.y, o.z += by * x.z, o.w += by * x.w;
      }
      write(unit, segment, rows, row, d, o, top, total);
    }
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    NarrowKernel(const __grid_constant__ Args launch_args, const __grid_constant__ NarrowLaunch launch) {
  using Tile = NarrowTile<kWidth>;
  Args args = launch_args;   // so that the compiler knows the plan's constants
  args.lone_tokens = false;  // never here
  args.plan.key_tile = kNarrowTileKeys;
  args.plan.min_range_work = kMinRangeWork;
  extern __shared__ __align__(16) char raw[];
  auto& statistics = *reinterpret_cast<NarrowStatistics*>(raw);
  char* const fragments = raw + sizeof(NarrowStatistics);
  char* const ring = fragments + launch.team_warps * Tile::kQueryBytes;
  const int warp = threadIdx.x / 32, team = warp / launch.team_warps;
  NarrowCta<T, kWidth> cta{args,
                           launch,
                           fragments,
                           statistics,
                           ring,
                           warp,
                           static_cast<int>(threadIdx.x % 32),
                           launch.warps / launch.team_warps,
                           team,
                           warp - team * launch.team_warps,
                           args.key_scales.kind != kNoScale,
                           args.value_scales.kind != kNoScale};
  if (args.plan.merge_apart && threadIdx.x == 0) begin_cuts(args, blockIdx.x);
  Range<int64_t> range;
  if (!locate_range(args, blockIdx.x, num_row_tiles(args), range)) return;
  for_each_share(args, range,
                 [&](const Unit& unit, const Share& share) { cta.run_segment(unit, segment_of(args, range, unit, share)); });
}

// How CTAs of `shared_bytes` work; stages 0: not even half of the warps have their tiles in them.
template <int kWidth>
NarrowLaunch shape_launch(const Args& args, int shared_bytes) {
  using Tile = NarrowTile<kWidth>;
  const bool narrow_keys = args.key_scales.kind != kNoScale, narrow_values = args.value_scales.kind != kNoScale;
  NarrowLaunch launch = {};
  launch.team_warps = args.plan.row_tile / 16;
  launch.key_bytes = Tile::kTokens * kWidth * (narrow_keys ? 1 : 2);
  launch.stage_bytes = launch.key_bytes + Tile::kTokens * kWidth * (narrow_values ? 1 : 2) + 2 * Tile::kTokens * 4;
  // Rows are pieces of 16 bytes, or of 8 where an odd number of these makes a row; of int4 of half as many.
  const auto piece_log2 = [](const Scales& scales, int width) {
    return 4 - (scales.kind != kNoScale && width % 16 != 0) - (scales.kind != kNoScale && scales.form == kInt4);
  };
  launch.key_piece_log2 = piece_log2(args.key_scales, args.key_width);
  launch.value_piece_log2 = piece_log2(args.value_scales, args.value_width);
  const int fixed = static_cast<int>(sizeof(NarrowStatistics)) + launch.team_warps * Tile::kQueryBytes;
  for (launch.warps = kMostWarps; launch.warps >= max32(launch.team_warps, kMostWarps / 2); launch.warps /= 2) {
    const int teams = launch.warps / launch.team_warps;
    const int fit = (shared_bytes - fixed) / (teams * launch.stage_bytes);
    launch.stages = fit >= 6 ? 6 : fit >= 4 ? 4 : fit;
    const int scratch = teams == 1 ? 0 : launch.warps * 16 * Tile::kScratchStride * 4;
    launch.shared_bytes = fixed + max32(teams * launch.stages * launch.stage_bytes, scratch);
    if (launch.stages >= 2 && launch.shared_bytes <= shared_bytes) return launch;
  }
  launch.stages = 0;
  return launch;
}

// body(width), with a width that the compiler knows.
template <class F>
auto for_width(const Args& args, F&& body) {
  const int width = max32(args.key_width, args.value_width);
  if (width <= 64) return body(std::integral_constant<int, 64>{});
  return width <= 128 ? body(std::integral_constant<int, 128>{}) : body(std::integral_constant<int, 256>{});
}

template <class T>
int launch_type(const Args& args, int max_shared_bytes, cudaStream_t stream) {
  return for_width(args, [&](auto width) -> int {
    const NarrowLaunch launch = shape_launch<decltype(width)::value>(args, max_shared_bytes);
    const auto kernel = NarrowKernel<T, decltype(width)::value>;
    // The attribute belongs to the kernel, which other threads launch too: it is the same for all calls.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<args.plan.max_ranges, 32 * launch.warps, launch.shared_bytes, stream>>>(args, launch);
    return cudaGetLastError();
  });
}

}  // namespace

bool narrow_fits(const Args& args, int max_shared_bytes) {
  return for_width(args, [&](auto width) { return shape_launch<decltype(width)::value>(args, max_shared_bytes).stages > 0; });
}

int launch_narrow(const Args& args, int max_shared_bytes, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return args.dtype == static_cast<int>(DType::kFloat16) ? launch_type<__half>(args, max_shared_bytes, on)
                                                         : launch_type<__nv_bfloat16>(args, max_shared_bytes, on);
}

}  // namespace leanfleet::lean_attention
