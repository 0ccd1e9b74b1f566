// LeanAttention of few packed rows for float16 and bfloat16, without shared memory between the caches and the tensor
// cores: each warp reads the keys and values of its own tokens straight into the registers that its products take. Rows of a
// cache may lie anywhere, and the kernel is little code, which counts where a launch takes microseconds.
//
// A CTA of DirectKernel takes the segments of its range one after the other. That of OneSegmentKernel, for short contexts, has one,
// whose place it knows from its number; there a head may have several units. Units have up to 16 rows, of 256 columns 8.
//
// Of a segment the warps take tiles of kTokens tokens in turn; while one computes on a tile, its next, also of the next segment, is
// on its way. The products are transposed, S^T = K Q^T and O^T = V^T P^T, as for few rows elsewhere. In the fragments of mma.sync a
// lane (g, t) = (lane / 4, lane % 4) holds
//   of keys     rows g and g + 8 of 16 tokens, columns 32 j + 8 t .. + 7: the columns stand in another order than in the
//               product's definition, the same for the query
//   of values   tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, columns 64 c + 8 g .. + 7
//   of outputs  columns 64 c + 8 g + 2 w and the next, of rows 2 t and 2 t + 1, in output[4 c + w]
//   of scores   tokens g and g + 8 of 16, of rows 2 t and 2 t + 1
//
// Rows of fewer columns than kWidth (kPartial) have zeros for the others, which are neither read nor written.
//
// Quantised caches (kNarrow) are read the same way, 32 tokens at once, or 16 of 256 bytes. Values become halves in registers. So do
// fp8 keys and their query, whose rows are divided by a power of two. Keys of integers (kByteKeys) are multiplied as they are.
// Their query's rows become integers of up to 16 bits, whose upper bytes are 8 rows of a product S = Q K^T and whose lower bytes
// the 8 others. All that is lost is the rounding of the query, by at most 2^-14 of the power of two at or below its row's largest
// number, which leaves bfloat16 as it is down to 1/64 of that. A lane has tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of row g then. Of a
// row of keys, R bytes, a lane holds bytes 64 c + 16 t .. + 15, or R / 4 from R / 4 t on where rows are shorter than 64; of values
// bytes 128 c + 16 g .. + 15, or R / 8 from R / 8 g on; of outputs the columns of its values, two in each output[m]. Scales of keys
// are factors of the query's columns, of rows or of logits; those of values are factors of the weights, which `lift` keeps in
// half's range, or of the output.
#pragma once

#include "core/dependent_launch.cuh"
#include "lean_attention/cluster.cuh"
#include "lean_attention/narrow.cuh"
#include "lean_attention/narrow.h"
#include "lean_attention/one_segment.h"

namespace leanfleet::lean_attention {

constexpr int kDirectRows = 8, kMostDirectRows = 16;  // of units, of up to 128 columns
constexpr int kDirectBatch = 32;                      // up to which a warp sees at once whether all units are equal
// Warps of a CTA of DirectKernel, with units of so many rows: as many as registers suffice for, of which the output of 16 rows takes
// as many as that of 8 rows twice as wide, and a tile of int4 half of one of int8.
LEANFLEET_HD constexpr int direct_warps(int width, int rows, int bits) {
  return width * rows > 128 * 8 ? 8 : bits < 8 ? 16 : 12;
}
// Tokens that a CTA reads at once.
constexpr int direct_tokens(int width, int rows, int bits) {
  return direct_warps(width, rows, bits) * warp_tokens(width, bits);
}

// A segment, as all warps get it from one.
struct DirectWork {
  Unit unit;
  Segment segment;
  int32_t first;              // the range that begins the unit
  int32_t begin, end;         // tokens of the segment, begin a multiple of kTokens; empty after the last segment
  int32_t cached_end;         // tokens from here to end come from new_key and new_value
  int32_t read_end;           // cached_end, or 0 if no token before it is seen
  int32_t appended_from;      // tokens from here on the launch before may still append
  int32_t last;               // not 0: there is no more work
  Span seen, common;          // keys that at least one row sees, and that all rows see, padding aside
  const char *keys, *values;  // the request's head in dense and ragged caches, the head in page 0 of paged ones
};

struct DirectGrid {
  int32_t units;
  uint32_t parts_inverse, heads_inverse;  // x / n without a division: x * (2^20 / n + 1) >> 20, for x < 2^10
  int32_t cluster;  // CTAs of a cluster, a unit's parts if units turn out to be equal; 1: CTAs are launched on their own
};

struct DirectLaunch {
  DirectGrid grid;
  Args args;
};

// What a cache holds: numbers of T, or a CacheForm.
constexpr int kOfT = -1;

template <int kForm>
LEANFLEET_HD constexpr int64_t bytes_of(int64_t numbers) {
  return kForm == kOfT ? 2 * numbers : kForm == kInt4 ? numbers / 2 : numbers;
}

// A row of keys or of values as lanes hold it: kChunks pieces of kBytes bytes, those of keys 4 pieces from each other, those of
// values 8.
template <int kWidth, int kForm, bool kValues>
struct DirectRow {
  static constexpr int kOwn = static_cast<int>(bytes_of<kForm>(kWidth)) / (kValues ? 8 : 4);
  static constexpr int kBytes = kOwn < 16 ? kOwn : 16, kChunks = kOwn / kBytes;
};

constexpr int bits_of_form(int form) { return form == kOfT ? 16 : form == kInt4 ? 4 : 8; }

template <int kWidth, int kKeys = kOfT>
struct DirectTile {
  static constexpr int kTokens = warp_tokens(kWidth, bits_of_form(kKeys)), kSlices = kTokens / 16;
  static constexpr int kScratchStride = kWidth + 4;  // floats
};

// Of the outputs of warps.
template <int kWidth>
constexpr int direct_scratch_bytes(int warps, int rows) {
  return warps * rows * DirectTile<kWidth>::kScratchStride * 4;
}

// In shared memory, before the warps' outputs [kWarps][rows][kScratchStride].
template <class T, int kWidth, int kRows, int kBits>
struct alignas(16) DirectShared {
  static constexpr int kWarps = direct_warps(kWidth, kRows, kBits);
  static constexpr int kInboxItems = inbox_items(kRows, kWidth);
  char inbox[kInboxItems * kInboxItemBytes];
  // Of two segments: the query, and the keys and values that the call appends, into quantised caches in a launch of its own.
  T staged[2][std::is_same_v<T, EitherHalf> ? 1 : 3][kRows][kWidth + 8];
  DirectWork works[2];
  float row_power[2][kRows];  // of quantised caches: what the query's rows were divided by, times what all their logits are
  int32_t row_sum[2][kRows];  // of int4 keys: the sums of the query's rows
  float warp_max[kRows][kWarps], warp_sum[kRows][kWarps];
  Range<uint32_t> range;             // of the schedule, for the first warp
  uint64_t query_ready, inbox_full;  // barriers
  bool more;                         // the range holds more
  bool absent[2][kRows];             // staged new tokens whose page is outside the pool
};

// 16 bytes that this launch does not write. What the launch before may write is read after the wait for it: whole sectors, of which
// none has been read before, so that L1 holds nothing older.
__device__ __forceinline__ uint4 read_once(const char* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// The first kBytes of 16; the others are 0.
template <int kBytes>
__device__ __forceinline__ uint4 read_once(const char* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) return read_once(from);
  uint4 x = make_uint4(0, 0, 0, 0);
  if constexpr (kBytes == 8)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  if constexpr (kBytes == 4) asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(x.x) : "l"(from));
  return x;
}

// kRope: query and new keys get their rotary embedding. kKeys, kValues: the forms of the caches, or kOfT twice. The launch before may
// still append the new tokens (args.begins_early), into quantised caches or of packed tokens: whoever reads these waits for it, and no
// CTA ends before.
// Shared: DirectShared, or kOne: OneSegmentShared of a CTA with one segment, of which the warps know. kBlocks: of 8 rows, of a unit.
template <class T, int kWidth, bool kRope, int kKeys, int kValues, bool kPartial, class Shared, bool kOne, int kBlocks>
struct DirectCta {
  static constexpr bool kNarrow = kKeys != kOfT;
  static constexpr bool kByteKeys = kKeys == kInt8 || kKeys == kInt4;
  static_assert(kNarrow == (kValues != kOfT) && !(kNarrow && kPartial));
  using Tile = DirectTile<kWidth, kKeys>;
  using KeyRow = DirectRow<kWidth, kKeys, false>;
  using ValueRow = DirectRow<kWidth, kValues, true>;
  using Product = std::conditional_t<kNarrow, __half, T>;
  static constexpr int kSlices = Tile::kSlices, kTokens = Tile::kTokens, kRows = 8 * kBlocks, kWarps = Shared::kWarps;
  static constexpr int kPiece = kWidth / 8 / ValueRow::kChunks;  // columns of values that a lane has next to each other
  using Scores = float[kSlices][kBlocks][4];
  // Of a block's scores, those of a lane: how many rows they have, and which lanes have the same rows.
  static constexpr int kLaneRows = kByteKeys ? 1 : 2, kSameFrom = kByteKeys ? 1 : 4, kSameTo = kByteKeys ? 4 : 32;

  const Args& args;
  Shared& shared;
  float* const scratch;        // [kWarps][rows][kScratchStride]
  const int warp, lane, rows;  // rows of a unit, padding included

  uint4 keys[kSlices][2][KeyRow::kChunks];
  uint4 values[kSlices][4][ValueRow::kChunks];
  float output[kWidth / 16][kBlocks][4];
  float max[kBlocks][kLaneRows], sum[kBlocks][kLaneRows];  // of rows score_row()
  unsigned missing;            // of the keys read last: a bit for each token whose page is outside the pool
  unsigned missing_rows;       // paged: the same for the tile that is read next
  int64_t key_row, value_row;  // and bytes to the row of its token `lane`
  // Of quantised caches. The row of token `lane` of the tile that is read next, among all of a cache; scales of token `lane` of the
  // tile that is computed on, and of the one that is read next; `lift` of rows as in `max`: the output is to be multiplied by it.
  uint32_t row;
  float key_scale, value_scale, next_key_scale, next_value_scale;
  float lift[kBlocks][kLaneRows];

  __device__ __forceinline__ int group() const { return lane / 4; }
  __device__ __forceinline__ int member() const { return lane % 4; }
  // The row of a unit and the token of a tile that s[slice][block][i] is of.
  __device__ __forceinline__ int score_row(int block, int i) const {
    return 8 * block + (kByteKeys ? group() : 2 * member() + i % 2);
  }
  __device__ __forceinline__ int score_token(int slice, int i) const {
    return 16 * slice + i / 2 * 8 + (kByteKeys ? 2 * member() + i % 2 : group());
  }
  // What lanes have of rows score_row(), of the output's row 8 * block + 2 t + c.
  __device__ __forceinline__ float of_output(const float (&of_rows)[kLaneRows], int c) const {
    if constexpr (kByteKeys) return __shfl_sync(kFullWarp, of_rows[0], 4 * (2 * member() + c));
    else return of_rows[c];
  }
  __device__ __forceinline__ int first_tile(const DirectWork& work) const { return work.begin + warp * kTokens; }
  // Whether rows have this lane's columns of a piece, and this column.
  __device__ __forceinline__ bool has_keys(int piece) const { return !kPartial || 32 * piece + 8 * member() < args.key_width; }
  __device__ __forceinline__ bool has_values(int piece) const {
    return !kPartial || 64 * piece + 8 * group() < args.value_width;
  }
  __device__ __forceinline__ bool has_column(bool value, int column) const {
    return !kPartial || column < (value ? args.value_width : args.key_width);
  }

  // Before anything is read: what rows do not have stays 0.
  __device__ __forceinline__ void clear_rows() {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int c = 0; c < KeyRow::kChunks; ++c) keys[slice][0][c] = keys[slice][1][c] = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < ValueRow::kChunks; ++c) values[slice][i][c] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ DirectWork work_of(const Unit& unit, const Segment& segment) const {
    DirectWork work;
    work.unit = unit;
    work.segment = segment;
    work.first = first_contributor(segment);
    work.last = 0;
    const RowsKeys of_rows = keys_of_tokens(
        args, unit.request, kOne ? unit_tokens(args, unit.request, unit.row_tile) : Span{0, unit.request.tokens});
    work.seen = of_rows.seen;
    work.common = of_rows.common;
    work.begin = max32(segment.tiles.begin * args.plan.key_tile, work.seen.begin / kTokens * kTokens);
    work.end = min32(segment.tiles.end * args.plan.key_tile, work.seen.end);
    work.cached_end = args.append ? min32(work.end, old_keys(unit.request)) : work.end;
    const auto at = [&](const CacheStrides& strides) {
      if (args.cache_kind == kPaged) return unit.head * strides.head;
      return unit.head * strides.head + unit.request.b * strides.batch + unit.request.start * strides.token;
    };
    work.read_end = work.cached_end > work.seen.begin ? work.cached_end : 0;
    work.appended_from = args.begins_early ? old_keys(unit.request) : INT32_MAX;
    work.keys = static_cast<const char*>(args.key_cache) + bytes_of<kKeys>(at(args.key_strides));
    work.values = static_cast<const char*>(args.value_cache) + bytes_of<kValues>(at(args.value_strides));
    return work;
  }

  // This CTA's only segment where all units turn out to have the same number of tiles, of which the first so many CTAs of
  // each unit take equally many, or one more. False: they have not. A lane looks at a request; batch <= kDirectBatch.
  __device__ __forceinline__ bool equal_work(const DirectGrid& grid, DirectWork& work) const {
    Request request = request_of(args, lane < args.batch ? lane : 0);
    const Span seen = keys_of_tokens(args, request, {0, request.tokens}).seen;
    const int key_tile = args.plan.key_tile;
    int first = seen.begin / key_tile;
    const int count = ceil_div(seen.end, key_tile) - first;
    if (args.batch > 1 && !__all_sync(kFullWarp, count == __shfl_sync(kFullWarp, count, 0))) return false;
    const int index = (blockIdx.x * grid.parts_inverse) >> 20, part = blockIdx.x - index * args.plan.equal_parts;
    const int parts = max32(min32(args.plan.equal_parts, count / kMinRangeWork), 1);
    work.last = index >= grid.units || part >= parts;
    if (work.last != 0) return true;
    Unit unit;
    unit.index = 0;
    if (args.batch > 1) {
      unit.index = (index * grid.heads_inverse) >> 20;
      request = request_of_lane(args, request, unit.index, unit.index);
      first = __shfl_sync(kFullWarp, first, unit.index);
    }
    unit.head = index - unit.index * args.kv_heads;
    unit.row_tile = 0;
    unit.position = 0;
    unit.request = request;
    unit.tiles = {first, first + count};
    const int whole = small_quotient(count, parts), rest = count - whole * parts;
    const Span mine = {first + part * whole + min32(part, rest), first + (part + 1) * whole + min32(part + 1, rest)};
    work = work_of(unit, {mine, true, part, parts, slot_of(index * args.plan.equal_parts, part)});
    return true;
  }

  // Part `part` of `parts` of a unit, of about as many tiles as the others. index: of its head, among those of all requests.
  // first_part: the number of the unit's first part, among those of all units. args.plan.key_tile is kTokens.
  __device__ __forceinline__ DirectWork part_of_unit(int index, int row_tile, int first_part, int part, int parts) const {
    Unit unit;
    unit.index = quotient(index, args.kv_heads);
    unit.head = index - unit.index * args.kv_heads;
    unit.row_tile = row_tile;
    unit.position = 0;
    unit.request = request_of(args, unit.index);
    unit.tiles = unit_tiles(args, unit.request, row_tile);
    if (parts == 1) return work_of(unit, whole_segment(unit, 0));
    const int first = unit.tiles.begin, count = unit.tiles.end - first;
    const Span mine = {first + quotient(part * count, parts), first + quotient((part + 1) * count, parts)};
    return work_of(unit, {mine, true, part, parts, slot_of(first_part, part)});
  }

  // The nearest token of the segment that some row sees and the cache holds: others are not read.
  __device__ __forceinline__ int readable(const DirectWork& work, int token) const {
    return clamp(token, work.seen.begin, work.cached_end - 1);
  }

  // The page of a token, and the token's place in it; a page outside the pool is found to be missing.
  struct PagePlace {
    int page, of_page;
  };
  __device__ __forceinline__ PagePlace find_page(const DirectWork& work, int wanted) {
    const int token = readable(work, wanted), index = quotient(token, args.block);
    const int page = __ldg(args.block_table + static_cast<int64_t>(work.unit.request.b) * args.pages_per_request + index);
    const bool exists = static_cast<unsigned>(page) < static_cast<unsigned>(args.num_pages);
    missing_rows = __ballot_sync(kFullWarp, !exists && wanted < work.cached_end);
    // Page 0 is read in place of a missing one, and the launch before may append to it.
    if (args.begins_early && missing_rows != 0) wait_for_volatile_reads();
    return {exists ? page : 0, token - index * args.block};
  }

  // Paged caches: where the rows of the tile at `begin` lie. Its reads follow.
  __device__ __forceinline__ void look_up(const DirectWork& work, int begin) {
    const auto [page, of_page] = find_page(work, begin + lane % kTokens);
    key_row = bytes_of<kKeys>(page * args.key_strides.page + of_page * args.key_strides.token);
    value_row = bytes_of<kValues>(page * args.value_strides.page + of_page * args.value_strides.token);
  }

  // Quantised caches: the same in rows, which keys, values and their scales have in the same places.
  __device__ __forceinline__ void look_up_row(const DirectWork& work, int begin) {
    const auto in_rows = [](int64_t numbers) { return static_cast<uint32_t>(static_cast<uint64_t>(numbers) / kWidth); };
    const CacheStrides& strides = args.key_strides;
    const int wanted = begin + lane % kTokens;
    row = work.unit.head * in_rows(strides.head);
    if (args.cache_kind == kPaged) {
      const auto [page, of_page] = find_page(work, wanted);
      row += page * in_rows(strides.page) + of_page * in_rows(strides.token);
    } else {
      missing_rows = 0;
      row += work.unit.request.b * in_rows(strides.batch) +
             (work.unit.request.start + readable(work, wanted)) * in_rows(strides.token);
    }
    // Past L1, where neighbours of a new token's scale may lie since before the append wrote it.
    next_key_scale = args.key_scales.kind == kPerToken ? __ldcg(args.key_scales.in + row) : 1.0f;
    next_value_scale = args.value_scales.kind == kPerToken ? __ldcg(args.value_scales.in + row) : 1.0f;
  }

  // Before the reads of a tile: where its rows lie, and the scales of its tokens.
  __device__ __forceinline__ void prepare_reads(const DirectWork& work, int begin) {
    if (begin + kTokens > work.appended_from) {
      if constexpr (kNarrow) wait_for_launch_before();
      else wait_for_volatile_reads();
    }
    if constexpr (kNarrow) look_up_row(work, begin);
    else if (args.cache_kind == kPaged) look_up(work, begin);
  }

  // Reads of a tile with a token in the cache.
  __device__ __forceinline__ void read_keys(const DirectWork& work, int begin) {
    const char* rows_from[2 * kSlices];
    missing = 0;
    if constexpr (kNarrow) {
      missing = missing_rows;
      find_rows<kKeys>(rows_from, args.key_cache, member() * KeyRow::kBytes, [&](int i) { return 8 * i + group(); });
    } else {
      const char* const base = work.keys + member() * KeyRow::kBytes;
      if (args.cache_kind == kPaged) {
        missing = missing_rows;
#pragma unroll
        for (int i = 0; i < 2 * kSlices; ++i) rows_from[i] = base + __shfl_sync(kFullWarp, key_row, 8 * i + group());
      } else {
        const int stride = static_cast<int>(bytes_of<kKeys>(args.key_strides.token));
#pragma unroll
        for (int i = 0; i < 2 * kSlices; ++i)
          rows_from[i] = base + static_cast<int64_t>(readable(work, begin + 8 * i + group())) * stride;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i)
#pragma unroll
      for (int c = 0; c < KeyRow::kChunks; ++c)
        if (has_keys(c)) keys[i / 2][i % 2][c] = read_once<KeyRow::kBytes>(rows_from[i] + 64 * c);
  }

  // Of quantised caches: byte `byte` of the rows of tokens token(i) of the tile.
  template <int kForm, int kCount, class F>
  __device__ __forceinline__ void find_rows(const char* (&from)[kCount], const void* cache, int byte, F&& token) const {
    constexpr uint32_t kRowBytes = static_cast<uint32_t>(bytes_of<kForm>(kWidth));
    const char* const base = static_cast<const char*>(cache) + byte;
#pragma unroll
    for (int i = 0; i < kCount; ++i)  // as one instruction, for which the compiler takes four
      asm("mad.wide.u32 %0, %1, %2, %3;"
          : "=l"(from[i])
          : "r"(__shfl_sync(kFullWarp, row, token(i))), "n"(kRowBytes), "l"(base));
  }

  __device__ __forceinline__ void read_values(const DirectWork& work, int begin) {
    const char* rows_from[4 * kSlices];
    const auto token = [&](int i) { return i / 2 * 8 + 2 * member() + i % 2; };
    if constexpr (kNarrow) {
      find_rows<kValues>(rows_from, args.value_cache, group() * ValueRow::kBytes, token);
    } else {
      const char* const base = work.values + group() * ValueRow::kBytes;
      if (args.cache_kind == kPaged) {
#pragma unroll
        for (int i = 0; i < 4 * kSlices; ++i) rows_from[i] = base + __shfl_sync(kFullWarp, value_row, token(i));
      } else {
        const int stride = static_cast<int>(bytes_of<kValues>(args.value_strides.token));
#pragma unroll
        for (int i = 0; i < 4 * kSlices; ++i)
          rows_from[i] = base + static_cast<int64_t>(readable(work, begin + token(i))) * stride;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kSlices; ++i)
#pragma unroll
      for (int c = 0; c < ValueRow::kChunks; ++c)
        if (has_values(c)) values[i / 4][i % 4][c] = read_once<ValueRow::kBytes>(rows_from[i] + 128 * c);
  }

  // By the last kStagingWarps, which have no tile of a short segment where there are others: the query's rows to shared memory, with
  // zeros for padding, and the new tokens among the segment's, which also go to the caches. These by the threads that have the
  // padding first: the latencies of both are one then, if there are not many rows.
  static constexpr int kRowChunks = kWidth / 8, kQueryChunks = kRows * kRowChunks;
  static constexpr int kStagingWarps = kQueryChunks / 32 < kWarps ? kQueryChunks / 32 : kWarps;
  static constexpr int kStagingThreads = 32 * kStagingWarps, kOfThread = kQueryChunks / kStagingThreads;
  static_assert(kQueryChunks % kStagingThreads == 0);
  using QueryChunks = uint4[kOfThread];
  __device__ __forceinline__ bool stages() const { return warp >= kWarps - kStagingWarps; }
  __device__ __forceinline__ int staging_thread() const { return (warp - (kWarps - kStagingWarps)) * 32 + lane; }
  __device__ __forceinline__ void stage(const DirectWork& work, int which) const {
    QueryChunks x;
    read_query(work, kRope && args.rotary_half > 0, x);
    store_query(work, which, x);
  }
  // A thread's chunks of 8 columns.
  __device__ __forceinline__ void read_query(const DirectWork& work, bool rotates, QueryChunks& x) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int chunk = staging_thread() + i * kStagingThreads, column = chunk % kRowChunks * 8;
      const int row = chunk / kRowChunks + (kOne ? work.unit.row_tile * kRows : 0);
      x[i] = make_uint4(0, 0, 0, 0);
      if (row >= args.group * work.unit.request.tokens || !has_column(false, column)) continue;
      const RowPlace place = row_place(args, work.unit, row);
      const T* const from = query_row<T>(args, work.unit, place);
      if (rotates) {
        const Rotation rotation = rotation_at(args, work.unit.request.position + place.token);
        x[i] = with_half<T>(
            args, [&](auto type) { return rotated_chunk(rotation, reinterpret_cast<const decltype(type)*>(from), column); });
      } else x[i] = *reinterpret_cast<const uint4*>(from + column);
    }
  }
  __device__ __forceinline__ void store_query(const DirectWork& work, int which, const QueryChunks& x) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int chunk = staging_thread() + i * kStagingThreads, row = chunk / kRowChunks, column = chunk % kRowChunks * 8;
      uint4 query = x[i];
      if constexpr (kByteKeys) query = as_bytes(query, work.unit.head, which, row, column);
      else if constexpr (kNarrow) query = as_halves(query, work.unit.head, which, row, column);
      *reinterpret_cast<uint4*>(&shared.staged[which][0][row][column]) = query;
    }
    if constexpr (!kNarrow)
      if (__builtin_expect(work.cached_end < work.end, false)) stage_new(work, which, kStagingThreads - 1 - staging_thread());
  }

  // What logits are multiplied by; they are in base 2 then, or have the soft cap before them.
  __device__ __forceinline__ float logit_scale() const { return args.scale * (args.softcap > 0.0f ? 1.0f : kLog2E); }

  // 8 columns of a row of the query times the keys' scales of these, and the power of two at or below the row's largest number.
  struct QueryPart {
    float2 x[4];
    float power;
  };
  __device__ __forceinline__ QueryPart query_part(const uint4& from, int head, int column) const {
    QueryPart part;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2& x = part.x[i];
      x = with_half<T>(args, [&](auto type) { return unpack_pair(type, word_of(from, i)); });
      if (args.key_scales.kind == kPerChannel) {
        const float* const scales = args.key_scales.in + static_cast<int64_t>(head) * kWidth + column + 2 * i;
        x.x *= scales[0], x.y *= scales[1];
      }
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    largest = max_of_lanes<1, kRowChunks>(largest);
    part.power = largest > 0.0f && largest < INFINITY ? power_below(largest) : 1.0f;
    return part;
  }
  // What a row's logits are multiplied by, its keys' own scales aside, if the row was divided by `power`.
  __device__ __forceinline__ float logit_factor(float power) const {
    return power * logit_scale() * (args.key_scales.kind == kPerTensor ? args.key_scales.in[0] : 1.0f);
  }

  __device__ __forceinline__ uint4 as_halves(const uint4& from, int head, int which, int row, int column) const {
    const QueryPart part = query_part(from, head, column);
    const float inverse = inverse_power(part.power);
    if (column == 0) shared.row_power[which][row] = logit_factor(part.power);
    const auto pair = [&](int i) { return pack_pair(__half{}, part.x[i].x * inverse, part.x[i].y * inverse); };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }

  // The same for keys of integers, as integers, 2^13 at that power: the upper bytes of 4 columns, their lower ones, both with a sign,
  // and those of the 4 others. Of int4 even columns come before odd ones, as a word's nibbles become bytes. A row with a number that
  // is not finite gets NaN for a factor.
  static constexpr int kOfPower = 1 << 13, kLargestNumber = 2 * kOfPower;
  __device__ __forceinline__ uint4 as_bytes(const uint4& from, int head, int which, int row, int column) const {
    const QueryPart part = query_part(from, head, column);
    const float inverse = inverse_power(part.power);
    int number[8], sum = 0;
    float zero_or_nan = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = i % 2 == 0 ? part.x[i / 2].x : part.x[i / 2].y;
      zero_or_nan += x * 0.0f;
      number[i] = clamp(static_cast<int>(rintf(x * inverse * static_cast<float>(kOfPower))), -kLargestNumber, kLargestNumber);
      sum += number[i];
    }
    zero_or_nan = sum_of_lanes<1, kRowChunks>(zero_or_nan);
    if (column == 0)
      shared.row_power[which][row] = logit_factor(part.power) * (1.0f / static_cast<float>(kOfPower)) + zero_or_nan;
    if constexpr (kKeys == kInt4) {
#pragma unroll
      for (int offset = 1; offset < kRowChunks; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
      if (column == 0) shared.row_sum[which][row] = sum;
    }
    constexpr uint32_t kUpper = 0x51, kLower = 0x40;
    // Four of the numbers' upper or lower bytes as a word; a lower byte is 256 less where its sign's bit is set.
    const auto word = [&](int i, uint32_t select) {
      const auto at = [&](int j) {
        const int x = kKeys == kInt4 ? number[i + 2 * j] : number[4 * i + j];
        return static_cast<uint32_t>(select == kUpper ? x + 128 : x);
      };
      return __byte_perm(__byte_perm(at(0), at(1), select), __byte_perm(at(2), at(3), select), 0x5410);
    };
    return make_uint4(word(0, kUpper), word(0, kLower), word(1, kUpper), word(1, kLower));
  }

  __device__ __forceinline__ void stage_new(const DirectWork& work, int which, int thread) const {
    const int new_begin = work.unit.request.keys - work.unit.request.tokens;
    const int from = max32(work.begin, new_begin), tokens = work.end - from;
#pragma unroll 1
    for (int i = thread; i < 2 * tokens * kRowChunks; i += kStagingThreads) {
      const bool value = i >= tokens * kRowChunks;
      const int of_kind = value ? i - tokens * kRowChunks : i;
      const int token = from + of_kind / kRowChunks, column = of_kind % kRowChunks * 8;
      AppendedChunk x = {make_uint4(0, 0, 0, 0), true};
      if (has_column(value, column)) x = append_chunk<T, kRope>(args, work.unit, token, value, column);
      if (!x.exists) x.data = make_uint4(0, 0, 0, 0);  // a token without a page is not seen
      *reinterpret_cast<uint4*>(&shared.staged[which][value ? 2 : 1][token - new_begin][column]) = x.data;
      if (column == 0 && !value) shared.absent[which][token - new_begin] = !x.exists;
    }
  }

  // The new tokens of a tile from where they are staged.
  __device__ __forceinline__ void take_new(const DirectWork& work, int which, int begin) {
    const int new_begin = work.unit.request.keys - work.unit.request.tokens;
    unsigned gone = 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = begin + 16 * slice + 8 * r + group();
        if (token < work.cached_end || token >= work.end) continue;
        const T* const row = &shared.staged[which][1][token - new_begin][8 * member()];
        if (shared.absent[which][token - new_begin]) gone |= 1u << (16 * slice + 8 * r + group());
#pragma unroll
        for (int c = 0; c < KeyRow::kChunks; ++c) keys[slice][r][c] = *reinterpret_cast<const uint4*>(row + 32 * c);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = begin + 16 * slice + i / 2 * 8 + 2 * member() + i % 2;
        if (token < work.cached_end || token >= work.end) continue;
        const T* const row = &shared.staged[which][2][token - new_begin][8 * group()];
#pragma unroll
        for (int c = 0; c < ValueRow::kChunks; ++c) values[slice][i][c] = *reinterpret_cast<const uint4*>(row + 64 * c);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) gone |= __shfl_xor_sync(kFullWarp, gone, offset);
    missing |= gone;
  }

  __device__ __forceinline__ void read_first(const DirectWork& work) {
    const int tile = first_tile(work);
    if (tile >= work.read_end) return;
    prepare_reads(work, tile);
    read_keys(work, tile);
    read_values(work, tile);
    key_scale = next_key_scale, value_scale = next_value_scale;
  }

  // A segment's tiles of this warp, of which the registers hold the first; in the end they hold the first of the next segment.
  __device__ __forceinline__ void run_segment(const DirectWork& work, int which) {
#pragma unroll
    for (int m = 0; m < kWidth / 16; ++m)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) {
        max[n][c] = -INFINITY;
        sum[n][c] = 0.0f;
        if constexpr (kNarrow) lift[n][c] = args.value_scales.kind == kPerToken ? 0.0f : 1.0f;
      }
    }
    int tile = first_tile(work);
    const int end = work.end;
    const bool any = tile < end;
#pragma unroll 1
    for (;;) {
      const bool last = tile + kWarps * kTokens >= end;
      const DirectWork& follows = next_work(work, last ? which ^ 1 : which);
      const int following = last && !kOne ? first_tile(follows) : tile + kWarps * kTokens;
      const bool more = following < follows.read_end && !(kOne && last);
      if (more) prepare_reads(follows, following);
      Scores s;
      if (any) {
        if constexpr (!kNarrow)
          if (tile + kTokens > work.cached_end && work.cached_end < end) take_new(work, which, tile);
        if constexpr (kByteKeys) score_bytes(which, s);
        else if constexpr (kNarrow) score_narrow(which, s);
        else score_wide(which, s);
      }
      const unsigned gone = missing;
      missing = 0;
      if (more) read_keys(follows, following);
      if (any) online_softmax_pv(work, tile, gone, s);
      if (more) read_values(follows, following);
      if constexpr (kNarrow) key_scale = next_key_scale, value_scale = next_value_scale;
      if (last) return;
      tile = following;
    }
  }

  __device__ __forceinline__ const DirectWork& next_work(const DirectWork& work, int which) const {
    if constexpr (kOne) return work;
    else return shared.works[which];
  }

  __device__ __forceinline__ void score_wide(int which, Scores& s) const {
    const T* const query = &shared.staged[which][0][group()][8 * member()];
    constexpr int kRowStride = kWidth + 8;
    Scores other;  // a second chain of sums
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[slice][n][i] = other[slice][n][i] = 0.0f;
#pragma unroll
    for (int c = 0; c < KeyRow::kChunks; ++c) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const uint4 q = *reinterpret_cast<const uint4*>(query + 8 * n * kRowStride + 32 * c);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          const uint4 low = keys[slice][0][c], high = keys[slice][1][c];
          const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
          mma(T{}, s[slice][n], a, q.x, q.y);
          mma(T{}, other[slice][n], b, q.z, q.w);
        }
      }
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[slice][n][i] += other[slice][n][i];
  }

  __device__ __forceinline__ void score_narrow(int which, Scores& s) const {
    static_assert(kKeys == kFloat8);
    constexpr int kOfWord = 4, kWords = KeyRow::kBytes / 4;  // columns; words of a chunk
    constexpr int kRowStride = kWidth + 8;
    const T* const query = &shared.staged[which][0][group()][kWords * kOfWord * member()];
    Scores other;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[slice][n][i] = other[slice][n][i] = 0.0f;
#pragma unroll
    for (int c = 0; c < KeyRow::kChunks; ++c)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint2 of_query[kBlocks];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          of_query[n] = *reinterpret_cast<const uint2*>(query + 8 * n * kRowStride + (4 * kWords * c + w) * kOfWord);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          uint32_t low[2], high[2];
          row_pairs<static_cast<CacheForm>(kKeys)>(word_of(keys[slice][0][c], w), low);
          row_pairs<static_cast<CacheForm>(kKeys)>(word_of(keys[slice][1][c], w), high);
          const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
            mma(__half{}, w % 2 == 0 ? s[slice][n] : other[slice][n], a, of_query[n].x, of_query[n].y);
        }
      }
    scale_scores(which, s, [&](int slice, int n, int i) { return s[slice][n][i] + other[slice][n][i]; });
  }

  __device__ __forceinline__ void score_bytes(int which, Scores& s) const {
    // The columns of a product are two words of int8 or one of int4, of which a lane has so many of each piece of a row.
    constexpr int kOfPiece = KeyRow::kBytes / (kKeys == kInt8 ? 8 : 4);
    int sums[kSlices][2][kBlocks][4];  // of 8 tokens each: by upper bytes twice, by lower bytes twice
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      // int4 has 8 added to each.
      const int begin = kKeys == kInt4 ? -8 * shared.row_sum[which][8 * n + group()] : 0;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int (&x)[4] = sums[slice][r][n];
          x[0] = x[1] = 0, x[2] = x[3] = begin;
        }
    }
    const T* const query = &shared.staged[which][0][group()][8 * kOfPiece * member()];
#pragma unroll
    for (int c = 0; c < KeyRow::kChunks; ++c)
#pragma unroll
      for (int j = 0; j < kOfPiece; ++j)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint4 q = *reinterpret_cast<const uint4*>(query + 8 * n * (kWidth + 8) + 8 * (4 * kOfPiece * c + j));
          const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const uint4& row = keys[slice][r][c];
              const uint32_t nibbles = word_of(row, j);
              if constexpr (kKeys == kInt8) mma_bytes<true>(sums[slice][r][n], a, word_of(row, 2 * j), word_of(row, 2 * j + 1));
              else mma_bytes<false>(sums[slice][r][n], a, nibbles & 0x0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0fu);
            }
        }
    scale_scores(which, s, [&](int slice, int n, int i) {
      const int (&x)[4] = sums[slice][i / 2][n];
      return static_cast<float>(256 * x[i % 2] + x[2 + i % 2]);
    });
  }

  // The logits of sums of products.
  template <class F>
  __device__ __forceinline__ void scale_scores(int which, Scores& s, F&& sum_of) const {
    float power[kBlocks][kLaneRows];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) power[n][c] = shared.row_power[which][score_row(n, c)];
    with_token_scales(key_scale, [&](int slice, int i, float of_token) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) s[slice][n][i] = sum_of(slice, n, i) * (power[n][i % kLaneRows] * of_token);
    });
  }
  // take(slice, i, scale of score_token(slice, i)) for each, scale: lane's own token's.
  template <class F>
  __device__ __forceinline__ void with_token_scales(float scale, F&& take) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      float of_token[4];
#pragma unroll
      for (int i = 0; i < 4; i += kByteKeys ? 1 : 2) {
        of_token[i] = __shfl_sync(kFullWarp, scale, score_token(slice, i));
        if constexpr (!kByteKeys) of_token[i + 1] = of_token[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) take(slice, i, of_token[i]);
    }
  }

  // What no row sees may be NaN, which a weight of 0 does not silence: here values, or their scales.
  __device__ __forceinline__ void clear_unseen(const DirectWork& work, int begin, unsigned gone) {
    const auto unseen = [&](int of_tile) {
      return begin + of_tile < work.seen.begin || begin + of_tile >= work.seen.end || (gone >> of_tile & 1);
    };
    if constexpr (kNarrow)
      if (unseen(lane)) value_scale = 0.0f;
    if constexpr (kValues == kOfT || kValues == kFloat8) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (unseen(16 * slice + i / 2 * 8 + 2 * member() + i % 2)) {
#pragma unroll
            for (int c = 0; c < ValueRow::kChunks; ++c) values[slice][i][c] = make_uint4(0, 0, 0, 0);
          }
    }
  }

  // The online softmax of the tile's scores, and the sum of its values by these weights. gone: a bit for each token without a page.
  __device__ __forceinline__ void online_softmax_pv(const DirectWork& work, int begin, unsigned gone, Scores& s) {
    const auto each = [&](auto&& change) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) change(s[slice][n][i], slice, n, i);
    };
    if constexpr (!kNarrow) {
      const float scale = logit_scale();
      each([&](float& x, int, int, int) { x *= scale; });
    }
    if (args.softcap > 0.0f) each([&](float& x, int, int, int) { x = cap_logit(x, args.softcap) * kLog2E; });
    if (begin < work.common.begin || begin + kTokens > work.common.end || gone != 0) {
      const int first_row = kOne ? work.unit.row_tile * kRows : 0;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int c = 0; c < kLaneRows; ++c) {
          const int row = first_row + score_row(n, c);
          const int of_row = row < args.group ? 0 : small_quotient(row, args.group);
          Span bounds = {0, 0};
          if (of_row < work.unit.request.tokens) bounds = token_keys(args, work.unit.request, of_row);
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
            for (int i = c; i < 4; i += kLaneRows) {
              const int of_tile = score_token(slice, i), token = begin + of_tile;
              if (token < bounds.begin || token >= bounds.end || (gone >> of_tile & 1)) s[slice][n][i] = -INFINITY;
            }
        }
      clear_unseen(work, begin, gone);
    }
    float top[kBlocks][kLaneRows];
    bool rises = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) {
        top[n][c] = -INFINITY;
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
          for (int i = c; i < 4; i += kLaneRows) top[n][c] = fmaxf(top[n][c], s[slice][n][i]);
        rises = rises || top[n][c] - max[n][c] > kRescaleAt;
      }
    if (__any_sync(kFullWarp, rises)) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float factor[kLaneRows];
#pragma unroll
        for (int c = 0; c < kLaneRows; ++c) {
          factor[c] = raise_max<kSameFrom, kSameTo>(top[n][c], max[n][c], sum[n][c]);
          // With scales of tokens the power falls with the weights so far; lift_weights raises it as far as it has to. Below the
          // least power its row has next to no part in the output.
          if (kNarrow && args.value_scales.kind == kPerToken)
            lift[n][c] = lift[n][c] * factor[c] < 0x1p-120f ? 0.0f : lift[n][c] * factor[c];
        }
        if (!(kNarrow && args.value_scales.kind == kPerToken)) multiply_output(n, factor);
      }
    }
    each([&](float& x, int, int n, int i) {
      const float most = max[n][i % kLaneRows];
      x = exp2_fast(x - (most == -INFINITY ? 0.0f : most));
      sum[n][i % kLaneRows] += x;
    });
    if constexpr (kNarrow)
      if (args.value_scales.kind == kPerToken) lift_weights(s);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t p[kBlocks][2];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          p[n][r] = pack_pair(Product{}, s[slice][n][2 * r], s[slice][n][2 * r + 1]);
          if constexpr (!kByteKeys) p[n][r] = transpose_matrix(p[n][r]);
        }
      }
      if constexpr (kNarrow) add_values_narrow(slice, p);
      else add_values_wide(slice, p);
    }
  }

  // The products of a slice's values with its weights.
  __device__ __forceinline__ void add_values_wide(int slice, const uint32_t (&p)[kBlocks][2]) {
#pragma unroll
    for (int c = 0; c < ValueRow::kChunks; ++c) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto word = [&](int i) {
          const uint4& x = values[slice][i][c];
          return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w;
        };
        const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                               __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) mma(T{}, output[4 * c + w][n], a, p[n][0], p[n][1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_output(int n, const float (&by)[kLaneRows]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = of_output(by, c);
#pragma unroll
      for (int m = 0; m < kWidth / 16; ++m) {
        output[m][n][c] *= factor;
        output[m][n][2 + c] *= factor;
      }
    }
  }

  // Multiplies the weights by their tokens' scales and divides them by lift, which rises where they would be large.
  __device__ __forceinline__ void lift_weights(Scores& p) {
    float top[kBlocks][kLaneRows] = {};
    with_token_scales(value_scale, [&](int slice, int i, float of_token) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        p[slice][n][i] *= of_token;
        top[n][i % kLaneRows] = fmaxf(top[n][i % kLaneRows], fabsf(p[slice][n][i]));
      }
    });
    bool rises = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) rises = rises || top[n][c] > lift[n][c] * kMostOverLift;
    if (__any_sync(kFullWarp, rises)) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float factor[kLaneRows];
#pragma unroll
        for (int c = 0; c < kLaneRows; ++c) {
          const float now = power_below(max_of_lanes<kSameFrom, kSameTo>(fmaxf(top[n][c], lift[n][c])));
          factor[c] = lift[n][c] * inverse_power(now);
          lift[n][c] = now;
        }
        multiply_output(n, factor);
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float below[kLaneRows];
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) below[c] = lift[n][c] > 0.0f ? inverse_power(lift[n][c]) : 0.0f;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[slice][n][i] *= below[i % kLaneRows];
    }
  }

  __device__ __forceinline__ void add_values_narrow(int slice, const uint32_t (&p)[kBlocks][2]) {
    constexpr int kOfWord = kValues == kInt4 ? 8 : 4;
#pragma unroll
    for (int c = 0; c < ValueRow::kChunks; ++c)
#pragma unroll
      for (int w = 0; w < ValueRow::kBytes / 4; ++w) {
        const auto word = [&](int i) { return word_of(values[slice][i][c], w); };
        uint32_t low[kOfWord], high[kOfWord];
        column_pairs<static_cast<CacheForm>(kValues)>(word(0), word(1), low);
        column_pairs<static_cast<CacheForm>(kValues)>(word(2), word(3), high);
#pragma unroll
        for (int i = 0; i < kOfWord; i += 2) {  // two columns of two tokens each
          const uint32_t a[4] = {low[i], low[i + 1], high[i], high[i + 1]};
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) mma(__half{}, output[(kPiece * c + kOfWord * w + i) / 2][n], a, p[n][0], p[n][1]);
        }
      }
  }

  // This warp's statistics and output to shared memory.
  __device__ __forceinline__ void store_to_shared() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < kLaneRows; ++c) {
        const int row = score_row(n, c);
        const float total = sum_of_lanes<kSameFrom, kSameTo>(sum[n][c]);
        if (row >= rows || lane % kSameTo / kSameFrom != 0) continue;
        shared.warp_max[row][warp] = max[n][c];
        shared.warp_sum[row][warp] = total;
      }
      if constexpr (kNarrow) multiply_output(n, lift[n]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * n + 2 * member() + c;
        if (row >= rows) continue;
        float* const to = scratch + (warp * rows + row) * Tile::kScratchStride + kPiece * group();
#pragma unroll
        for (int m = 0; m < kWidth / 16; m += 2)
          *reinterpret_cast<float4*>(to + 2 * m / kPiece * 8 * kPiece + 2 * m % kPiece) =
              make_float4(output[m][n][c], output[m][n][2 + c], output[m + 1][n][c], output[m + 1][n][2 + c]);
      }
    }
  }

  // The sum of all warps' parts, 4 columns of a row from d on.
  struct Joined {
    float4 output;
    float max, sum;
  };
  __device__ __forceinline__ Joined join_warps(int row, int d) const {
    Joined joined = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITY, 0.0f};
    float factor[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factor[w] = shared.warp_max[row][w];
      joined.max = fmaxf(joined.max, factor[w]);
    }
    float4& o = joined.output;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factor[w] = rescale(factor[w], joined.max);
      joined.sum += factor[w] * shared.warp_sum[row][w];
      const float4 x = *reinterpret_cast<const float4*>(scratch + (w * rows + row) * Tile::kScratchStride + d);
      o.x += factor[w] * x.x, o.y += factor[w] * x.y, o.z += factor[w] * x.z, o.w += factor[w] * x.w;
    }
    return joined;
  }

  // The same times the values' scales that are no tokens'.
  __device__ __forceinline__ Joined join_scaled(const DirectWork& work, int row, int d) const {
    Joined joined = join_warps(row, d);
    if constexpr (kNarrow) scale_values(args.value_scales, work.unit.head, kWidth, d, joined.output);
    return joined;
  }

  // That, 4 columns of a row a thread, to the output or, where the unit has other contributors, to global memory, where the last of
  // them merges all.
  __device__ __forceinline__ void join(const DirectWork& work, const ClusterInbox& inbox, bool in_cluster) const {
    const int own_rows = args.group * work.unit.request.rows;  // of packed tokens maybe fewer than there is room for
#if __CUDA_ARCH__ >= 900
    const ClusterShare share = cluster_share(kPartial ? args.value_width : kWidth, {0, own_rows}, work.segment);
    if (in_cluster) cluster_wait();
#endif
    constexpr int kQuads = kWidth / 4, kPasses = (kRows * kQuads + 32 * kWarps - 1) / (32 * kWarps);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int item = (pass * kWarps + warp) * 32 + lane, row = item / kQuads, d = item % kQuads * 4;
      if (row >= own_rows || !has_column(true, d)) continue;
      const Joined x = join_scaled(work, row, d);
#if __CUDA_ARCH__ >= 900
      if (in_cluster) send_part(inbox, share, 0, row, d, x.output, x.max, x.sum);
      else
#endif
          if (work.segment.count == 1)
        write_row<T>(args, work.unit, row, d, x.output, x.max, x.sum);
      else write_partial(args, work.segment.slot, row, d, x.output, x.max, x.sum);
    }
#if __CUDA_ARCH__ >= 900
    if (in_cluster) {
      merge_in_cluster<T>(args, work.unit, inbox, share, warp, kWarps);
      return;
    }
#endif
    if (work.segment.count == 1) return;
    end_part<T>(args, work.unit, work.segment, work.first, warp, kWarps);
  }
};

// kBlocks: of 8 rows, those of a unit.
template <class T, int kWidth, bool kRope, int kKeys = kOfT, int kValues = kOfT, bool kPartial = false, int kBlocks = 1>
__global__ void __launch_bounds__(32 * direct_warps(kWidth, 8 * kBlocks, bits_of_form(kKeys)), 1)
    DirectKernel(const __grid_constant__ DirectLaunch launch) {
  using Shared = DirectShared<T, kWidth, 8 * kBlocks, bits_of_form(kKeys)>;
  using Cta = DirectCta<T, kWidth, kRope, kKeys, kValues, kPartial, Shared, false, kBlocks>;
  using P = uint32_t;
  let_next_launch_begin();
  const DirectGrid& grid = launch.grid;
  Args args = launch.args;  // so that the compiler knows the plan's constants
  args.plan.key_tile = 8192 / kWidth;
  args.plan.row_tile = Cta::kRows;
  args.plan.min_range_work = kMinRangeWork;
  extern __shared__ __align__(16) char raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const ClusterInbox inbox = {reinterpret_cast<float4*>(shared.inbox), Shared::kInboxItems, shared_address(&shared.inbox_full)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Cta cta{args, shared, reinterpret_cast<float*>(raw + sizeof(shared)), warp, lane, args.group * args.tokens};
  if constexpr (kPartial) cta.clear_rows();
  if (args.plan.merge_apart && threadIdx.x == 0) begin_cuts(args, blockIdx.x);
  // By the first warp: the next part of a unit that the range holds, or that there is none.
  const auto next = [&](DirectWork& work) {
    bool more = shared.more;
    Range<P> range = shared.range;
    while (more) {
      const Unit unit = range.unit;
      const Share share = share_of(args, unit, range.begin, range.end);
      more = static_cast<P>(unit_end(args, unit)) < range.end;
      if (more) next_unit<true>(args, range.unit);
      if (!share.contributes) continue;
      const DirectWork found = cta.work_of(unit, segment_of(args, range, unit, share));
      __syncwarp();
      if (lane == 0) work = found, shared.range.unit = range.unit, shared.more = more;
      __syncwarp();
      return;
    }
    if (lane == 0) work.last = 1, work.begin = work.end = work.cached_end = work.read_end = 0;
  };
  int turn = 0;
  // listed: there may be several segments, from the schedule. in_cluster: the contributors are the cluster's CTAs.
  bool begun = false, listed = true, in_cluster = false;
  DirectWork equal;
  if (args.plan.equal_parts > 0 && args.batch <= kDirectBatch && cta.equal_work(grid, equal)) {
    // A CTA has one segment, which every warp finds by itself.
    const uint32_t query_ready = shared_address(&shared.query_ready);
    if (threadIdx.x == 0) {
      mbarrier_init(query_ready, cta.kStagingThreads);
      mbarrier_init(inbox.barrier, 1);
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
      shared.works[0] = equal;
      shared.works[1].last = 1;
      shared.works[1].begin = shared.works[1].end = shared.works[1].cached_end = shared.works[1].read_end = 0;
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (grid.cluster > 1) cluster_arrive();
#endif
    if (equal.last != 0) {
      wait_for_volatile_reads();
      return;
    }
    in_cluster = grid.cluster > 1 && equal.segment.count > 1;
    // Rows of the query first: behind those of the caches they would queue.
    if (cta.stages()) {
      cta.stage(equal, 0);
      mbarrier_arrive(query_ready);
    }
    cta.read_first(equal);
    mbarrier_wait(query_ready, 0);
    turn = 1;
    begun = true;
    listed = false;
  } else if (warp == 0) {
    Range<P> range = {};
    const bool exists = locate_range<P>(args, blockIdx.x, 1, range);
    if (lane == 0) {
      shared.works[1].begin = shared.works[1].end = shared.works[1].cached_end = shared.works[1].read_end =
          0;  // ahead of the first segment an empty one
      shared.range = range;
      shared.more = exists;
    }
    __syncwarp();
  }
#pragma unroll 1
  for (;; turn ^= 1) {
    if (listed) {
      if (warp == 0) next(shared.works[turn]);
      __syncthreads();
    }
    const DirectWork& work = shared.works[turn ^ 1];
    cta.run_segment(work, turn ^ 1);
    const bool ends = shared.works[turn].last != 0;
    if (ends) wait_for_volatile_reads();
    if (begun) cta.store_to_shared();
    if (!ends && cta.stages()) cta.stage(shared.works[turn], turn);
    __syncthreads();
    if (begun) {
      cta.join(work, inbox, in_cluster);
      if (!ends) __syncthreads();  // work and scratch have been read
    }
    if (ends) return;
    begun = true;
  }
}

// In shared memory of a CTA with one segment, before the warps' outputs [kWarps][rows][kScratchStride].
template <class T, int kWidth, int kRows, int kOfWarps, bool kInCluster>
struct alignas(16) OneSegmentShared {
  static constexpr int kWarps = kOfWarps;
  static constexpr int kInboxItems = inbox_items(kRows, kWidth);
  char inbox[kInCluster ? kInboxItems * kInboxItemBytes : 16];
  T staged[1][3][kRows][kWidth + 8];
  float row_power[1][kRows];
  int32_t row_sum[1][kRows];
  float warp_max[kRows][kWarps], warp_sum[kRows][kWarps];
  uint64_t inbox_full;
  bool absent[1][kRows];
};

template <class T, int kWidth, int kRows>
constexpr int one_segment_bytes(bool small, bool in_cluster, int rows) {
  constexpr int kSmall = one_segment_warps(kWidth, true), kLarge = one_segment_warps(kWidth, false);
  const size_t fixed = small ? (in_cluster ? sizeof(OneSegmentShared<T, kWidth, kRows, kSmall, true>)
                                           : sizeof(OneSegmentShared<T, kWidth, kRows, kSmall, false>))
                             : (in_cluster ? sizeof(OneSegmentShared<T, kWidth, kRows, kLarge, true>)
                                           : sizeof(OneSegmentShared<T, kWidth, kRows, kLarge, false>));
  return static_cast<int>(fixed) + direct_scratch_bytes<kWidth>(small ? kSmall : kLarge, rows);
}

struct OneSegmentLaunch {
  int32_t parts, row_tiles;  // of a unit, of a request's head
  Args args;
};

// Who has a unit: one CTA, those of a cluster, or any, of which the last to end merges the parts. Separate instances: code that
// does not run takes time too, where the rest lies apart because of it.
enum class UnitOf { kOneCta, kCluster, kAnyCtas };

// The same for short contexts, with less code, which then takes longest: a CTA has one segment, a unit of kRows rows or one of its
// parts, whatever the lengths are.
template <class T, int kWidth, int kRows, bool kSmall, UnitOf kOf, int kKeys = kOfT, int kValues = kOfT>
__global__ void __launch_bounds__(32 * one_segment_warps(kWidth, kSmall), one_segment_ctas(kWidth, kSmall))
    OneSegmentKernel(const __grid_constant__ OneSegmentLaunch launch) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kOf == UnitOf::kCluster) return;  // there are none to be launched: nothing of it is compiled
#endif
  let_next_launch_begin();
  constexpr int kWarps = one_segment_warps(kWidth, kSmall);
  using Shared = OneSegmentShared<T, kWidth, kRows, kWarps, kOf == UnitOf::kCluster>;
  using Cta = DirectCta<T, kWidth, true, kKeys, kValues, kKeys == kOfT, Shared, true, kRows / 8>;
  Args args = launch.args;  // so that the compiler knows the plan's constants
  args.plan.key_tile = Cta::kTokens;
  args.plan.row_tile = kRows;
  extern __shared__ __align__(16) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  Cta cta{args,
          shared,
          reinterpret_cast<float*>(raw + sizeof(Shared)),
          static_cast<int>(threadIdx.x / 32),
          static_cast<int>(threadIdx.x % 32),
          min32(args.group * args.tokens, kRows)};
  if constexpr (!Cta::kNarrow) cta.clear_rows();
  int unit = blockIdx.x, part = 0, parts = 1;
  if constexpr (kOf != UnitOf::kOneCta) {
    parts = launch.parts;
    unit = quotient(blockIdx.x, parts);
    part = blockIdx.x - unit * parts;
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kOf == UnitOf::kCluster) {
    if (threadIdx.x == 0) {
      mbarrier_init(shared_address(&shared.inbox_full), 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    cluster_arrive();
  }
#endif
  const int head = launch.row_tiles > 1 ? quotient(unit, launch.row_tiles) : unit;  // of all requests
  const int row_tile = unit - head * launch.row_tiles;
  const DirectWork work = cta.part_of_unit(head, row_tile, unit * parts, part, parts);
  // Rows of the query first: behind those of the caches they would queue.
  const bool rotates = args.rotary_half > 0;
  typename Cta::QueryChunks query;
  if (cta.stages() && !rotates) cta.read_query(work, false, query);
  cta.read_first(work);
  if (cta.stages()) {
    if (rotates) cta.read_query(work, true, query);
    cta.store_query(work, 0, query);
  }
  __syncthreads();
  cta.run_segment(work, 0);
  wait_for_volatile_reads();
  cta.store_to_shared();
  __syncthreads();
  const Span rows = unit_rows(args, work.unit.request, row_tile);
  const int quads = args.value_width / 4, chunks = (rows.end - rows.begin) * quads;
  // take(row of the unit, column, 4 columns of it joined) by all threads.
  const auto for_chunks = [&](auto&& take) {
#pragma unroll 1
    for (int i = threadIdx.x; i < chunks; i += 32 * kWarps) {
      const int row = small_quotient(i, quads), d = (i - row * quads) * 4;
      take(row, d, cta.join_scaled(work, row, d));
    }
  };
  using Joined = const typename Cta::Joined&;
  if constexpr (kOf == UnitOf::kAnyCtas) {
    for_chunks([&](int row, int d, Joined x) { write_partial(args, work.segment.slot, row, d, x.output, x.max, x.sum); });
    end_part<T>(args, work.unit, work.segment, work.first, cta.warp, kWarps);
  } else if constexpr (kOf == UnitOf::kCluster) {
#if __CUDA_ARCH__ >= 900
    const ClusterInbox inbox = {reinterpret_cast<float4*>(shared.inbox), Shared::kInboxItems,
                                shared_address(&shared.inbox_full)};
    const ClusterShare share = cluster_share(args.value_width, rows, work.segment);
    cluster_wait();
    for_chunks([&](int row, int d, Joined x) { send_part(inbox, share, 0, row, d, x.output, x.max, x.sum); });
    merge_in_cluster<T>(args, work.unit, inbox, share, cta.warp, kWarps);
#endif
  } else {
    for_chunks([&](int row, int d, Joined x) { write_row<T>(args, work.unit, rows.begin + row, d, x.output, x.max, x.sum); });
  }
}

// CTAs are launched on their own.
inline DirectGrid direct_grid(const Args& args) {
  const auto inverse = [](int n) { return (1u << 20) / static_cast<uint32_t>(n > 0 ? n : 1) + 1; };
  return {args.batch * args.kv_heads, inverse(args.plan.equal_parts), inverse(args.kv_heads), 1};
}

// body(SharedType<S>) with the shared memory of caches of so many bits.
template <class S>
struct SharedType {
  using Of = S;
};
template <class T, int kWidth, int kBlocks, class F>
int with_direct_shared(int bits, F&& body) {
  if (bits < 8) return body(SharedType<DirectShared<T, kWidth, 8 * kBlocks, 4>>{});
  return body(SharedType<DirectShared<T, kWidth, 8 * kBlocks, 16>>{});
}
template <class T, int kWidth, int kBlocks>
int direct_shared_bytes(int rows, int bits) {
  return with_direct_shared<T, kWidth, kBlocks>(bits, [&](auto shared) {
    using Shared = typename decltype(shared)::Of;
    return static_cast<int>(sizeof(Shared)) + direct_scratch_bytes<kWidth>(Shared::kWarps, rows);
  });
}

// body(keys, values) with the forms of quantised caches that have a kernel, known to the compiler.
template <class F>
auto for_direct_forms(const Args& args, F&& body) {
  constexpr std::integral_constant<int, kInt8> int8;
  constexpr std::integral_constant<int, kFloat8> float8;
  constexpr std::integral_constant<int, kInt4> int4;
  if (args.key_scales.form == kFloat8) return body(float8, float8);
  if (args.key_scales.form == kInt4) return body(int4, int4);
  if (args.value_scales.form == kFloat8) return body(int8, float8);
  return args.value_scales.form == kInt4 ? body(int8, int4) : body(int8, int8);
}

using DirectKernelPointer = void (*)(DirectLaunch);

// The kernel for caches of T and this embedding.
template <class T, int kWidth, int kBlocks>
DirectKernelPointer direct_kernel(const Args& args) {
  // Without an embedding the one with it does nothing.
  if (args.key_width != kWidth || args.value_width != kWidth) return DirectKernel<T, kWidth, true, kOfT, kOfT, true, kBlocks>;
  return args.rotary_half > 0 ? DirectKernel<T, kWidth, true, kOfT, kOfT, false, kBlocks>
                              : DirectKernel<T, kWidth, false, kOfT, kOfT, false, kBlocks>;
}

// That for these quantised caches.
template <int kWidth, int kBlocks>
DirectKernelPointer direct_narrow_kernel(const Args& args) {
  return for_direct_forms(args, [](auto keys, auto values) -> DirectKernelPointer {
    return DirectKernel<EitherHalf, kWidth, true, decltype(keys)::value, decltype(values)::value, false, kBlocks>;
  });
}

// How a launch cuts the work: as the plan says, or by clusters where it may be, with fewer of the SMs where ranges are short.
enum class DirectCut { kPlan, kClusters, kClustersOfFew };

// args.plan holds the tile; for units of 8 * kBlocks rows: 1 or 2 for 64 and 128 columns, 1 for 256. Compiled by direct_launch.cu.in, a
// source file a type, width and number of blocks.
template <class T, int kWidth, int kBlocks>
int launch_direct(const Args& args, DirectCut cut, void* stream);

// The same over quantised caches, for units of 8 * kBlocks rows: 1 or 2 for 64 and 128 columns, 1 for 256. Compiled by
// direct_narrow_launch.cu.in.
template <int kWidth, int kBlocks>
int launch_direct_narrow(const Args& args, DirectCut cut, void* stream);

// OneSegmentKernel by args.plan, for units of 8 rows or, of up to 128 columns, 16, and widths of up to 64, 128 or 256. Compiled by one_segment_launch.cu.in,
// a source file a type.
template <class T>
int launch_one_segment(const Args& args, int width, void* stream);

// The same over quantised caches, for units of 8 rows and small CTAs. Compiled by one_segment_narrow_launch.cu.in.
template <int kWidth>
int launch_one_segment_narrow(const Args& args, void* stream);

}  // namespace leanfleet::lean_attention
