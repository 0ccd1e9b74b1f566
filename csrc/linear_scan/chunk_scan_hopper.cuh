// The kernels of chunk_scan.h for Hopper: float16 and bfloat16 with K up to 128, in chunks of 64 tokens. The products are
// those of chunk_scan.cuh; here warpgroups share them out and run ahead of each other:
//
//   state groups  (1 or 2) each 64 columns of Z, with Sᵀ in its accumulators: Oᵀ and Sᵀ
//   score group   P, row sums, the sum of y; not for segment sums, but those with decay and row sums
//   copy group    warp 0 loads tiles by TMA, warp 3 stores rows of out, the others make tables of rows
//
// A stage of the ring is a chunk's X, Y and Z as boxes of 64 columns, and its table. For row_dot, source comes to where rows
// of out are written next, two chunks ahead, and warp 3 adds up the dots.
//
// One launch runs up to three scans, such as those of a gradient, whose segments are then as many times longer.
//
// What a segment adds up on its own is walked over against the scan's order: a row then needs one factor, its decay up to
// the segment's end, the state none, tokens that no longer matter are not read, and the pass that follows finds in the
// cache the tokens that it begins with.
#pragma once

#include "core/hopper.cuh"
#include "linear_scan/chunk_scan.cuh"

namespace leanfleet {
namespace chunk {

constexpr int kMaxUncombined = 15;  // segments before one that it adds up the sums of by itself
constexpr int kSlotBatch = 3;       // so many at a time

struct ChunkMaps {
  CUtensorMap x, y, z, source, out;
};

// Scans of one launch, as many CTAs each.
struct ChunkGroup {
  ChunkScan scans[kMaxTogether];
  ChunkMaps maps[kMaxTogether];
  int count;
  int sm_count;  // of the device
};

// sums: Sᵀ only. whole: Oᵀ only, from the sum over all tokens. single and grouped: both, with one head of y for a chunk
// or several.
enum Mode : int { kSums, kWhole, kSingle, kGrouped };

// plain: decays, or nothing, but neither row sums nor terms of rank 1. rank 1: these two without decay, in bfloat16, whose
// range it takes. full: all of it.
enum Kind : int { kPlain, kRank1, kFull };

constexpr float kLeastFactor = 0x1p-96f;  // that rows of P are divided by

// A RowTable for chunks without decay. P is over x_factor.
template <int kTokens>
struct alignas(1024) Rank1Table {
  // y_factor as right operand of wgmma, lines of 128 bytes, swizzled: what bfloat16 numbers hold of it, what they left, 0.
  uint16_t to_y_sum_tile[8][kTokens];
  float y_factor[kTokens], y_rank1[kTokens], z_factor[kTokens];
  float x_rank1[kTokens];                        // over x_factor
  float from_state[kTokens], from_sum[kTokens];  // x_factor, held away from 0, and x_rank1
  float to_state[kTokens];
  alignas(4) uint16_t to_z_sum_parts[2][kTokens];  // bfloat16 numbers whose sum nearly is that of a row
  float count;                                     // Σ ry_j
  int unscaled;                                    // to_state is 1, but for rows outside
  int uniform;                                     // and so are y_factor, y_rank1 and z_factor
  static constexpr float kept = 1.0f;
  static constexpr double log2_kept = 0.0;
  static constexpr int steep = 0;
};

// kCtasPerSm: that an SM holds at once. Two hide each other's waits, with half of its registers and memory each.
template <class T, int kWidth_, int kGroups_, int kMode_, int kKind_, int kCtasPerSm_>
struct HopperShape {
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kMode = kMode_, kKind = kKind_, kCtasPerSm = kCtasPerSm_;
  static constexpr bool kExtras = kKind != kPlain;  // row sums and terms of rank 1
  static constexpr bool kOut = kMode != kSums, kUpdates = kMode != kWhole, kPairs = kOut && kUpdates;
  static constexpr bool kScores = kPairs || kKind == kFull;
  // Sums of rows of Y, and products of rows of X with them, on tensor cores; float16 has not the range.
  static constexpr bool kSplitSums = std::is_same<T, __nv_bfloat16>::value;
  // Chunks that are not steep: P holds scores over the decay since the chunk's begin, or over x_factor, and rows of out get
  // that as a whole, so that both products of Oᵀ follow each other at once. float16 has not the range for it.
  static constexpr bool kScaledLast = kMode == kSingle && kKind != kFull && std::is_same<T, __nv_bfloat16>::value;
  using Table = typename std::conditional<kKind == kRank1, Rank1Table<64>, RowTable<64>>::type;
  static constexpr int kTokens = 64, kColumns = 64 * kGroups, kBox = 8192, kBoxes = kWidth / 64;
  static constexpr int kThreads = 128 * (kGroups + 1 + kScores);
  static constexpr int kMaxStages = kCtasPerSm == 2 ? 2 : kOut && kBoxes * kGroups == 4 ? 3 : 6;
  // With a score group they are shared out unevenly.
  static constexpr int kStateRegisters = kCtasPerSm == 2   ? 128
                                         : kGroups == 1    ? 216
                                         : kKind == kFull  ? 184
                                         : kKind == kRank1 ? 176
                                                           : 192;
  static constexpr int kScoreRegisters = kCtasPerSm == 2   ? 72
                                         : kGroups == 1    ? 144
                                         : kKind == kFull  ? 96
                                         : kKind == kRank1 ? 112
                                                           : 80;
  static constexpr int kCopyRegisters = kCtasPerSm == 2 ? 40 : kGroups == 2 ? 48 : 120;
  struct Small {
    Table table[kMaxStages + 1];  // the last: of all whole chunks within a request
    // As to_y_sum_tile: bfloat16 numbers whose sum is that of y, before this chunk and, by turns, the next.
    static constexpr bool kTiles = kKind == kRank1 && kOut;
    alignas(kTiles ? 1024 : 16) uint16_t y_sum_tile[kTiles ? 2 : 1][kTiles ? kBoxes : 1][8][kTiles ? 64 : 8];
    uint64_t full[kMaxStages], empty[kMaxStages], landed, scores_full[2], scores_empty[2], out_full[2], out_empty[2];
    uint64_t source_full[2];
    alignas(16) float divisor[2][kTokens];
    alignas(16) float2 out_factor[2][kTokens];      // of what accumulators hold and of the sum of z, in rows scaled last
    float y_sum[2][kWidth];                         // before this chunk and, by turns, the next
    alignas(4) uint16_t y_sum_parts[2][3][kWidth];  // bfloat16 numbers whose sum it is
    float column_sums[kWidth];
    alignas(16) float dots[2][4 * kGroups][kTokens];
  };
  static constexpr int kStageBytes = kBox * ((kOut ? kBoxes : 0) + (kUpdates ? kBoxes + kGroups : 0));
  // Besides stages: P twice, and rows on their way out, twice.
  static constexpr int kFixedTiles = kOut ? 2 + 2 * kGroups : 0;
  static int fixed_bytes() { return 1024 + kFixedTiles * kBox + static_cast<int>(sizeof(Small)); }
};

#if __CUDA_ARCH_FEAT_SM90_ALL
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <class S, class T>
struct HopperCta : Site<T, S::kTokens, S::kColumns> {
  using Base = Site<T, S::kTokens, S::kColumns>;
  using Base::scan, Base::batch, Base::x_head, Base::state_head, Base::slice, Base::segment, Base::out_row;
  static constexpr int kTokens = S::kTokens, kWidth = S::kWidth, kGroups = S::kGroups, kBox = S::kBox, kBoxes = S::kBoxes;
  using Table = typename S::Table;
  static constexpr bool kExtras = S::kExtras, kOut = S::kOut, kUpdates = S::kUpdates, kPairs = S::kPairs;
  // Factors of rows of out come from the score group; sums of rows come from tensor cores in the state groups too.
  static constexpr bool kFactors = S::kScaledLast && S::kKind == kRank1;
  static constexpr bool kPartSums = S::kSplitSums && S::kKind == kRank1;
  // Z becomes Z' in its own registers.
  static constexpr bool kInPlace = S::kKind == kRank1 || S::kCtasPerSm == 2;
  static constexpr int kYParts = kBoxes > kGroups ? 2 : 1;  // 16 columns of Y each, of a state warp
  static constexpr bool kGroupedHeads = S::kMode == kGrouped || S::kMode == kSums;
  // Tiles of a stage, in boxes.
  static constexpr int kYTile = kOut ? kBoxes : 0, kZTile = kYTile + kBoxes;

  const ChunkMaps& maps;
  typename S::Small& small;
  const uint32_t stages_at, scores_at, out_at;
  const int stages;
  const uint32_t flags;

  // A place in the ring and the parity of its barriers.
  struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int slots) {
      if (++slot == slots) slot = 0, parity ^= 1;
    }
  };

  // What the loops ask of the scan, which is at a place in constant memory that is not known to the compiler.
  enum Flag : uint32_t {
    kReverse = 1,
    kRank1Terms = 2,
    kRowSums = 4,
    kDivides = 8,
    kDots = 16,
    kScalesOut = 32,
    kOwnTables = 64,  // chunks have tables of their own
    kPacked = 128
  };
  static __device__ __forceinline__ uint32_t flags_of(const ChunkScan& scan) {
    const bool own_tables = scan.decay_per_token || scan.x_factor.data != nullptr || scan.x_rank1.data != nullptr ||
                            scan.y_factor.data != nullptr || scan.y_rank1.data != nullptr || scan.z_factor.data != nullptr ||
                            scan.y_group > 1;
    uint32_t flags = (scan.reverse ? kReverse : 0) | (scan.rank1 ? kRank1Terms : 0) | (scan.row_sums ? kRowSums : 0) |
                     (scan.divide ? kDivides : 0) | (scan.row_dot != nullptr ? kDots : 0) |
                     (scan.out_times != nullptr ? kScalesOut : 0) | (own_tables ? kOwnTables : 0) |
                     (scan.cu_seqlens != nullptr ? kPacked : 0);
    // Bits of one register: what they came from would stay in as many, and hot loops spill.
    asm volatile("" : "+r"(flags));
    return flags;
  }
  __device__ __forceinline__ bool reverse() const { return flags & kReverse; }
  __device__ __forceinline__ bool rank1() const { return flags & kRank1Terms; }
  __device__ __forceinline__ bool row_sums() const { return flags & kRowSums; }
  __device__ __forceinline__ bool divides() const { return flags & kDivides; }
  __device__ __forceinline__ bool dots() const { return flags & kDots; }
  __device__ __forceinline__ bool scales_out() const { return flags & kScalesOut; }

  __device__ __forceinline__ uint32_t tile(int stage, int box) const { return stages_at + stage * S::kStageBytes + box * kBox; }
  __device__ __forceinline__ int heads() const { return kGroupedHeads ? scan.y_group : 1; }

  // A warp arrives as often as it has lanes: each once where lanes read what those of another warp have written, or write
  // where those have read, else one for all. After __syncwarp one would always do, but racecheck does not follow that order.
  static __device__ __forceinline__ void arrive_warp(uint64_t* barrier, bool each = true) {
    __syncwarp();
    if (each || threadIdx.x % 32 == 0) hopper::mbarrier_arrive_times(shared_address(barrier), each ? 1 : 32);
  }
  // Warps of the copy group write tables and rows of 0 to a stage again.
  __device__ __forceinline__ void arrive_empty(int slot) const {
    arrive_warp(&small.empty[slot], flags & (kOwnTables | kPacked));
  }
  static __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    hopper::mbarrier_wait(shared_address(barrier), parity);
  }

  // Every group goes over the same pieces, chunks and heads.
  __device__ __forceinline__ int begin_piece(Cursor& at) const {
    const int chunks = ceil_div(at.piece.end - at.piece.begin, kTokens);
    at.head = 0;
    at.chunk = at.piece.begin + (reverse() != (S::kMode == kSums) ? (chunks - 1) * kTokens : 0);
    return chunks * heads();
  }
  __device__ __forceinline__ void next_step(Cursor& at) const {
    if (kGroupedHeads && ++at.head < scan.y_group) return;
    at.head = 0;
    at.chunk += reverse() != (S::kMode == kSums) ? -kTokens : kTokens;
  }
  __device__ __forceinline__ void next_piece(Cursor& at) const {
    at.valid = false;
    if (scan.cu_seqlens == nullptr || S::kMode == kSums) return;
    at.request += reverse() ? -1 : 1;
    at.find_piece(scan, kTokens);
  }

  // Warp 0 of the copy group.
  __device__ __forceinline__ void copy_tiles(Cursor at) {
    const int lane = threadIdx.x % 32, x_from = Base::shared_head(x_head, scan.x_share);
    const int y_from = Base::shared_head(state_head * scan.y_group, scan.y_share);
    const int z_from = Base::shared_head(state_head * scan.y_group, scan.z_share);
    Place place;
    uint32_t landed_parity = 0;
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        wait(&small.empty[place.slot], place.parity ^ 1);
        const int token = at.chunk, end = at.chunk_end(kTokens);
        // Rows past the tensor's end come as 0, those of another request do not.
        const bool foreign = end - token < kTokens && end < scan.tokens;
        uint64_t* const barrier = foreign ? &small.landed : &small.full[place.slot];
        if (lane == 0) {
          const uint32_t full = shared_address(barrier);
          hopper::mbarrier_arrive_expect_tx(full, S::kStageBytes);
          if (kUpdates) {
#pragma unroll 1
            for (int box = 0; box < kBoxes; ++box)
              hopper::tma_load(tile(place.slot, kYTile + box), &maps.y, 64 * box, token, y_from + at.head, batch, full);
          }
          if (kOut) {
#pragma unroll 1
            for (int box = 0; box < kBoxes; ++box)
              hopper::tma_load(tile(place.slot, box), &maps.x, 64 * box, token, x_from, batch, full);
          }
          if (kUpdates) {
#pragma unroll 1
            for (int box = 0; box < kGroups; ++box)
              hopper::tma_load(tile(place.slot, kZTile + box), &maps.z, slice * S::kColumns + 64 * box, token, z_from + at.head,
                               batch, full);
          }
        } else if (!foreign) {
          hopper::mbarrier_arrive(shared_address(barrier));
        }
        __syncwarp();
        if (foreign) {
          wait(&small.landed, landed_parity);
          landed_parity ^= 1;
          const int boxes = S::kStageBytes / kBox, first = end - token;
          for (int i = lane; i < boxes * (kTokens - first) * 8; i += 32) {
            const int line = i / 8, box = line / (kTokens - first), row = first + line % (kTokens - first);
            store_16_bytes(tile(place.slot, box) + row * 128 + i % 8 * 16, make_uint4(0, 0, 0, 0));
          }
          hopper::fence_proxy_async();
          arrive_warp(&small.full[place.slot]);
        }
      }
    }
  }

  // Where chunks share a table: the step, counted down from `steps` to 1, of the one chunk of a piece that may have its own,
  // that with the last token; else 0.
  __device__ __forceinline__ int own_step(const Cursor& at, int steps) const {
    const bool own = (at.piece.end - at.piece.begin) % kTokens != 0 ||
                     (S::kKind != kRank1 && reverse() && at.piece.end == at.request_span.end);
    return !own ? 0 : reverse() != (S::kMode == kSums) ? steps : 1;
  }
  __device__ __forceinline__ bool has_own(int step, int own) const { return (flags & kOwnTables) || step == own; }
  __device__ __forceinline__ Table& table_of(int step, int own, int slot) const {
    return small.table[has_own(step, own) ? slot : S::kMaxStages];
  }
  __device__ __forceinline__ void make_usual_table(Cursor at, const float (&scales)[5]) {
    at.chunk = at.piece.begin = at.head = 0;
    at.piece.end = at.request_span.end = 2 * kTokens;
    if constexpr (S::kKind == kRank1) fill_rank1_table(at, small.table[S::kMaxStages], RawRows{}, scales);
    else
      fill_table<T, kTokens>(scan, Base::pass, state_head, threadIdx.x % 32, at, small.table[S::kMaxStages],
                             [](int, int) { return 0.0f; });
  }

  // What rows 2 lane and 2 lane + 1 of a chunk have in memory, 1 where nothing is: fx, rx, fy, ry, fz.
  struct RawRows {
    float x[5][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}};
  };
  __device__ __forceinline__ void load_raw_rows(const Cursor& at, RawRows& raw) const {
    const int lane = threadIdx.x % 32, rows = at.chunk_end(kTokens) - at.chunk, y_head = state_head * scan.y_group + at.head;
    const auto load = [&](int kind, const ChunkFactor& factor, int head) {
      if (factor.data == nullptr) return;
      const float* const from = factor.data + batch * factor.batch + head * factor.head;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (2 * lane + r < rows) raw.x[kind][r] = from[(at.chunk + 2 * lane + r) * factor.token];
    };
    if (kOut) load(0, scan.x_factor, x_head), load(1, scan.x_rank1, x_head);
    load(2, scan.y_factor, y_head), load(3, scan.y_rank1, y_head), load(4, scan.z_factor, y_head);
  }
  // What they are multiplied by.
  __device__ __forceinline__ void load_scales(float (&scales)[5]) const {
    const auto times = [](const ChunkFactor& factor) {
      return factor.times != nullptr ? factor.scale * *factor.times : factor.scale;
    };
    scales[0] = kOut ? times(scan.x_factor) : 0.0f;
    scales[1] = kOut && rank1() ? times(scan.x_rank1) : 0.0f;
    scales[2] = times(scan.y_factor);
    scales[3] = rank1() ? times(scan.y_rank1) : 0.0f;
    scales[4] = times(scan.z_factor);
  }
  // By a warp.
  __device__ __forceinline__ void fill_rank1_table(const Cursor& at, Table& table, const RawRows& raw,
                                                   const float (&scales)[5]) const {
    const int lane = threadIdx.x % 32, rows = at.chunk_end(kTokens) - at.chunk;
    const int first = 2 * lane;
    const auto put = [&](float (&to)[kTokens], float x0, float x1) {
      *reinterpret_cast<float2*>(&to[first]) = make_float2(x0, x1);
    };
    const auto put_parts = [](uint16_t* high_to, uint16_t* low_to, float x0, float x1) {
      const uint32_t high = pack_pair(__nv_bfloat16{}, x0, x1);
      const float2 taken = unpack_pair(__nv_bfloat16{}, high);
      *reinterpret_cast<uint32_t*>(high_to) = high;
      *reinterpret_cast<uint32_t*>(low_to) = pack_pair(__nv_bfloat16{}, x0 - taken.x, x1 - taken.y);
    };
    float x[5][2], own[2], held[2], rank1[2];
    bool unscaled = true, uniform = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = first + r < rows;
#pragma unroll
      for (int kind = 0; kind < 5; ++kind) x[kind][r] = there ? scales[kind] * raw.x[kind][r] : 0.0f;
      own[r] = x[2][r] * x[4][r];
      unscaled = unscaled && (!there || own[r] == 1.0f);
      uniform = uniform && there && x[2][r] == 1.0f && x[3][r] == 1.0f && x[4][r] == 1.0f;
      held[r] = fabsf(x[0][r]) < kLeastFactor ? copysignf(kLeastFactor, x[0][r]) : x[0][r];
      rank1[r] = __fdividef(x[1][r], held[r]);
    }
    put(table.x_rank1, rank1[0], rank1[1]);
    put(table.y_factor, x[2][0], x[2][1]);
    put(table.y_rank1, x[3][0], x[3][1]);
    put(table.z_factor, x[4][0], x[4][1]);
    put(table.from_state, held[0], held[1]);
    put(table.from_sum, x[1][0], x[1][1]);
    put(table.to_state, own[0], own[1]);
    put_parts(table.to_z_sum_parts[0] + first, table.to_z_sum_parts[1] + first, x[3][0] * x[4][0], x[3][1] * x[4][1]);
    put_parts(table.to_y_sum_tile[0] + in_line(0, first), table.to_y_sum_tile[1] + in_line(1, first), x[2][0], x[2][1]);
    float count = x[3][0] + x[3][1];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(kFullWarp, count, offset);
    unscaled = __all_sync(kFullWarp, unscaled);
    uniform = __all_sync(kFullWarp, uniform);
    if (lane == 0) table.count = count, table.unscaled = unscaled, table.uniform = uniform;
    hopper::fence_proxy_async();
  }
  // Where column `column` of 64 is in line `line` of a swizzled tile, in numbers.
  static __device__ __forceinline__ int in_line(int line, int column) { return ((column / 8 ^ line % 8) * 8) + column % 8; }
  // Warps 1 and 2 of the copy group: one alone where all tables are the same but for few, else each for some places.
  __device__ __forceinline__ void make_tables(Cursor at, int turn) {
    const int lane = threadIdx.x % 32;
    const bool of_rows = flags & kOwnTables;
    float scales[5] = {};
    if (S::kKind == kRank1) load_scales(scales);
    if (!of_rows && turn == 0) make_usual_table(at, scales);
    Place place;
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
      const int own = own_step(at, steps);
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        if ((of_rows ? place.slot % 2 : 0) != turn) continue;
        RawRows raw;
        if (S::kKind == kRank1 && of_rows) load_raw_rows(at, raw);
        wait(&small.empty[place.slot], place.parity ^ 1);
        if (!has_own(steps, own)) {
        } else if constexpr (S::kKind == kRank1) {
          fill_rank1_table(at, small.table[place.slot], raw, scales);
        } else {
          const int y_head = state_head * scan.y_group + at.head;
          const auto factor_at = [&](const ChunkFactor& factor, int head, int row) {
            return factor.data[batch * factor.batch + head * factor.head + (at.chunk + row) * factor.token];
          };
          fill_table<T, kTokens>(scan, Base::pass, state_head, lane, at, small.table[place.slot], [&](int kind, int row) {
            switch (kind) {
              case 0:
                return scan.log_decay[batch * scan.decay_batch + state_head * scan.decay_head +
                                      (at.chunk + row + (reverse() ? 1 : 0)) * scan.decay_token];
              case 1: return factor_at(scan.x_factor, x_head, row);
              case 2: return factor_at(scan.x_rank1, x_head, row);
              case 3: return factor_at(scan.y_factor, y_head, row);
              case 4: return factor_at(scan.y_rank1, y_head, row);
              default: return factor_at(scan.z_factor, y_head, row);
            }
          });
        }
        arrive_warp(&small.full[place.slot]);
      }
    }
  }

  // Warp 3 of the copy group.
  __device__ __forceinline__ void take_rows(Cursor at) {
    const int lane = threadIdx.x % 32, column = slice * S::kColumns;
    const int source_head = Base::shared_head(x_head, scan.source_share);
    Place out;
    // Rows of source come to where rows of out will be written.
    const bool with_source = dots();
    Cursor ahead = at;
    int ahead_steps = ahead.valid ? begin_piece(ahead) : 0;
    const auto bring_source = [&](int slot) {
      if (!ahead.valid) return;
      if (lane == 0) {
        const uint32_t full = shared_address(&small.source_full[slot]);
        hopper::mbarrier_arrive_expect_tx(full, kGroups * kBox);
        for (int group = 0; group < kGroups; ++group)
          hopper::tma_load(out_at + (slot * kGroups + group) * kBox, &maps.source, column + 64 * group, ahead.chunk,
                           source_head, batch, full);
      } else {
        hopper::mbarrier_arrive(shared_address(&small.source_full[slot]));
      }
      do next_step(ahead), --ahead_steps;
      while (kGroupedHeads && ahead.head != 0);
      if (ahead_steps > 0) return;
      next_piece(ahead);
      if (ahead.valid) ahead_steps = begin_piece(ahead);
    };
    if (with_source) bring_source(0), bring_source(1);
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at)) {
        if (kGroupedHeads && at.head + 1 != scan.y_group) continue;
        const int rows = at.chunk_end(kTokens) - at.chunk;
        wait(&small.out_full[out.slot], out.parity);
        if (with_source) {
          for (int row = lane; row < rows; row += 32) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4 * kGroups; ++w) sum += small.dots[out.slot][w][row];
            float* const to = Base::row_dot_at(at.chunk + row);
            *to = scan.add_dots ? *to + sum : sum;
          }
        }
        for (int group = 0; group < kGroups; ++group) {
          const uint32_t from = out_at + (out.slot * kGroups + group) * kBox;
          if (rows == kTokens || at.chunk + rows == scan.tokens) {
            if (lane == 0) {
              if (scan.accumulate) hopper::tma_reduce_add(&maps.out, from, column + 64 * group, at.chunk, x_head, batch);
              else hopper::tma_store(&maps.out, from, column + 64 * group, at.chunk, x_head, batch);
            }
            continue;
          }
          for (int i = lane; i < rows * 8; i += 32) {
            const int row = i / 8, chunk = i % 8, at_column = column + 64 * group + chunk * 8;
            if (at_column >= scan.z.width) continue;
            uint4* const to = reinterpret_cast<uint4*>(out_row(at.chunk + row) + at_column);
            const uint4 x = load_16_bytes(from + chunk_offset<kTokens>(row, chunk));
            *to = scan.accumulate ? add_pairs(T{}, *to, x) : x;
          }
        }
        if (lane == 0) hopper::tma_store_wait_read();
        if (with_source) __syncwarp(), bring_source(out.slot);
        else arrive_warp(&small.out_empty[out.slot]);
        out.next(2);
      }
    }
    // The pass before may have nothing for this CTA, but has to end before it.
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  // Calls add(slots, weights) for what the piece begins with, if slots hold that: the last one alone once they have been
  // combined, else the slots before it, the last first, with weight 0 where they do not matter.
  template <class Add>
  __device__ __forceinline__ void from_slots(Add&& add) const {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int64_t rest = static_cast<int64_t>(scan.y.width) * scan.z.width + scan.y.width + scan.z.width;
    float weight = 1.0f;
#pragma unroll 1
    for (int before = scan.causal ? segment - 1 : 0; before >= 0 && weight != 0.0f; before -= kSlotBatch) {
      float* slots[kSlotBatch];
      float weights[kSlotBatch], kept[kSlotBatch], begins[kSlotBatch];
#pragma unroll
      for (int s = 0; s < kSlotBatch; ++s) {
        slots[s] = Base::slot(scan.slots, before - s);
        kept[s] = 0.0f, begins[s] = 1.0f;
        if (s <= before && !scan.combined) kept[s] = slots[s][rest + 1], begins[s] = slots[s][rest + 2];
      }
#pragma unroll
      for (int s = 0; s < kSlotBatch; ++s) {
        weights[s] = s <= before ? weight : 0.0f;
        weight = begins[s] != 0.0f ? 0.0f : weight * exp2f(kept[s]);
      }
      add(slots, weights);
    }
  }
  __device__ __forceinline__ bool begins_scan(const Cursor& at) const { return scan.causal && at.begins_request(reverse()); }

  // The score group

  __device__ __forceinline__ void score(Cursor at) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int K = scan.y.width, V = scan.z.width;
    Place place, scores;
    if (kPairs) {
      for (int i = thread; i < 2 * kBox / 16; i += 128) store_16_bytes(scores_at + 16 * i, make_uint4(0, 0, 0, 0));
      hopper::named_barrier(1, 128);
    }
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
      const int own = own_step(at, steps);
      float y_sum = 0.0f, count = 0.0f, after = 1.0f, kept = 1.0f;  // y_sum: of column `thread`
      int y_sum_at = 0;
      if (kExtras && row_sums()) {
        if (kOut && !begins_scan(at)) {
          from_slots([&](float* const(&slots)[kSlotBatch], const float (&weights)[kSlotBatch]) {
#pragma unroll
            for (int i = 0; i < kSlotBatch; ++i) {
              if (weights[i] == 0.0f) continue;
              const float* const sums = slots[i] + static_cast<int64_t>(K) * V;
              if (thread < K) y_sum += weights[i] * sums[thread];
              count += weights[i] * sums[K + V];
            }
          });
        } else if (kOut) {
          const FirstSums from = Base::first_sums(at);
          if (from.y_sum != nullptr && thread < K) y_sum = from.y_sum[thread];
          count = from.count;
        }
        if (kOut) {
          hopper::named_barrier(1, 128);
          if (thread < kWidth) put_y_sum(0, thread, y_sum);
          hopper::named_barrier(1, 128);
        }
      }
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        wait(&small.full[place.slot], place.parity);
        const Table& table = table_of(steps, own, place.slot);
        if (kPairs || (kOut && row_sums())) {
          float s[8][4], sums[2] = {0.0f, 0.0f}, carried[2] = {0.0f, 0.0f};
          if (kPairs) {
            const uint32_t x = hopper::make_smem_descriptor(tile(place.slot, 0), 0),
                           y = hopper::make_smem_descriptor(tile(place.slot, kYTile), 0);
            hopper::warpgroup_arrive();
            multiply_keys(x, y, s);
            hopper::warpgroup_commit();
          }
          if (kExtras && row_sums()) times_y_sum(y_sum_at, place.slot, warp, lane, carried);
          wait(&small.scores_empty[scores.slot], scores.parity ^ 1);
          if (kPairs) {
            hopper::warpgroup_wait<0>();
            hopper::fence_accumulators(s);
            const uint32_t to = scores_at + scores.slot * kBox;
            if (S::kScaledLast && !table.steep) {
              mask_scores(table, to, warp, lane, s);
            } else {
              finish_scores(table, to, warp, lane, s, sums);
            }
          }
          if (kExtras && row_sums()) finish_row_sums(at, table, scores.slot, warp, lane, sums, carried, count);
          hopper::fence_proxy_async();
          arrive_warp(&small.scores_full[scores.slot]);
          scores.next(2);
        }
        if (kExtras && kUpdates && row_sums()) {
          const float weight = kOut ? 1.0f : after;
          count = (kOut ? table.kept : 1.0f) * count + weight * table.count;
          if (thread < kWidth) y_sum = (kOut ? table.kept : 1.0f) * y_sum + weight * sum_column(table, place.slot, thread);
          if (kOut) {
            y_sum_at ^= 1;
            if (thread < kWidth) put_y_sum(y_sum_at, thread, y_sum);
            hopper::named_barrier(1, 128);
          }
          kept *= table.kept;
          if (at.head + 1 == heads()) after = kept;
        }
        arrive_empty(place.slot);
      }
      if (kExtras && kUpdates && slice == 0 && row_sums() && thread < K) {
        end_y_sum(at, thread, after, y_sum);
      }
    }
  }

  // s = X Yᵀ
  static __device__ __forceinline__ void multiply_keys(uint32_t x, uint32_t y, float (&s)[8][4]) {
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      const int at_step = (k / 4 * kBox + k % 4 * 32) / 16;
      hopper::wgmma_ss(T{}, s, x + at_step, y + at_step, k > 0);
    }
  }

  // Stores a column of the sum of y that a piece ends with.
  __device__ __forceinline__ void end_y_sum(const Cursor& at, int thread, float after, float y_sum) const {
    const LastSums to = Base::last_sums(at);
    if (!kOut && begins_scan(at)) {
      const FirstSums from = Base::first_sums(at);
      if (from.y_sum != nullptr) y_sum += after * from.y_sum[thread];
    }
    if (to.y_sum != nullptr) to.y_sum[thread] = to.factor * y_sum;
  }

  // The score group without decay. Row sums come from products of wgmma too: X times the sum of y before the chunk, and
  // the chunk's part of that sum, whose columns lane / 4 and the eighth after it of a warp's 16 of a box are kept in lanes
  // that 4 divides.
  __device__ __forceinline__ void score_rank1(Cursor at) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int K = scan.y.width, V = scan.z.width;
    Place place, scores;
    clear_tiles(thread);
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at), y_sum_at = 0;
      const int own = own_step(at, steps);
      float y_sum[kBoxes][2] = {}, count = 0.0f;
      const auto for_columns = [&](auto&& body) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = 64 * box + 16 * warp + 8 * half + lane / 4;
            if (lane % 4 == 0 && column < K) body(y_sum[box][half], column);
          }
      };
      if (row_sums()) {
        begin_y_sum(at, K, V, for_columns, count);
        hopper::named_barrier(1, 128);
        for_columns([&](float& sum, int column) { put_y_sum_tile(0, column, sum); });
      }
      hopper::fence_proxy_async();
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        wait(&small.full[place.slot], place.parity);
        const Table& table = table_of(steps, own, place.slot);
        float s[8][4], sums[2] = {0.0f, 0.0f}, carried[1][4], parts[kBoxes][4];
        const uint32_t x = hopper::make_smem_descriptor(tile(place.slot, 0), 0),
                       y = hopper::make_smem_descriptor(tile(place.slot, kYTile), 0);
        hopper::named_barrier(1, 128);
        hopper::warpgroup_arrive();
        multiply_keys(x, y, s);
        if (row_sums()) {
          multiply_sums(table, y_sum_at, x, y, carried, parts);
        }
        hopper::warpgroup_commit();
        float* const sum_to = row_sums() ? row_sum_at(at, warp, lane) : nullptr;
        wait(&small.scores_empty[scores.slot], scores.parity ^ 1);
        hopper::warpgroup_wait<0>();
        hopper::fence_accumulators(s);
        if (row_sums()) {
          take_sums(lane, for_columns, carried, parts, y_sum_at, sums);
        }
        const uint32_t to = scores_at + scores.slot * kBox;
        if (table.uniform) finish_rank1_scores<true>(table, to, warp, lane, s, sums);
        else finish_rank1_scores<false>(table, to, warp, lane, s, sums);
        finish_rows(table, scores.slot, warp, lane, sums, count, sum_to);
        count += table.count;
        hopper::fence_proxy_async();
        arrive_warp(&small.scores_full[scores.slot]);
        scores.next(2);
        arrive_empty(place.slot);
      }
      if (slice == 0 && row_sums()) {
        const LastSums to = Base::last_sums(at);
        if (to.y_sum != nullptr) for_columns([&](float& sum, int column) { to.y_sum[column] = to.factor * sum; });
      }
    }
  }

  // Tiles of P, of the sum of y and of tables, parts of which stay 0.
  __device__ __forceinline__ void clear_tiles(int thread) const {
    for (int i = thread; i < 2 * kBox / 16; i += 128) store_16_bytes(scores_at + 16 * i, make_uint4(0, 0, 0, 0));
    for (int i = thread; i < 2 * kBoxes * 64; i += 128)
      store_16_bytes(shared_address(small.y_sum_tile) + 16 * i, make_uint4(0, 0, 0, 0));
    for (int i = thread; i < (S::kMaxStages + 1) * 48; i += 128)
      store_16_bytes(shared_address(small.table[i / 48].to_y_sum_tile[2]) + i % 48 * 16, make_uint4(0, 0, 0, 0));
  }

  // What a piece begins with. for_columns(body): body(sum, column) for the lane's columns of the sum of y.
  template <class ForColumns>
  __device__ __forceinline__ void begin_y_sum(const Cursor& at, int K, int V, ForColumns&& for_columns, float& count) const {
    if (!begins_scan(at)) {
      from_slots([&](float* const(&slots)[kSlotBatch], const float (&weights)[kSlotBatch]) {
#pragma unroll
        for (int i = 0; i < kSlotBatch; ++i) {
          if (weights[i] == 0.0f) continue;
          const float* const sums = slots[i] + static_cast<int64_t>(K) * V;
          for_columns([&](float& sum, int column) { sum += weights[i] * sums[column]; });
          count += weights[i] * sums[K + V];
        }
      });
    } else {
      const FirstSums from = Base::first_sums(at);
      if (from.y_sum != nullptr) for_columns([&](float& sum, int column) { sum = from.y_sum[column]; });
      count = from.count;
    }
  }

  // X times the sum of y, and the chunk's part of that sum.
  __device__ __forceinline__ void multiply_sums(const Table& table, int y_sum_at, uint32_t x, uint32_t y,
                                                float (&carried)[1][4], float (&parts)[kBoxes][4]) const {
    hopper::warpgroup_arrive();
    const uint32_t y_sums = hopper::make_smem_descriptor(shared_address(small.y_sum_tile[y_sum_at]), 0);
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
      hopper::wgmma_ss<false>(T{}, carried, x + (k / 4 * kBox + k % 4 * 32) / 16, y_sums + (k / 4 * 1024 + k % 4 * 32) / 16,
                              k > 0);
    const uint32_t factors = hopper::make_smem_descriptor(shared_address(table.to_y_sum_tile), 0);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float (&part)[1][4] = *reinterpret_cast<float (*)[1][4]>(&parts[box]);
        hopper::wgmma_ss<true>(T{}, part, y + (box * kBox + k * 2048) / 16, factors + k * 2, k > 0);
      }
  }

  // Adds that part to the sum of y. sums: becomes this lane's parts of what rows of X have of the sum before.
  template <class ForColumns>
  __device__ __forceinline__ void take_sums(int lane, ForColumns&& for_columns, float (&carried)[1][4],
                                            float (&parts)[kBoxes][4], int& y_sum_at, float (&sums)[2]) const {
    hopper::fence_accumulators(carried);
    hopper::fence_accumulators(parts);
    y_sum_at ^= 1;
    for_columns([&](float& sum, int column) {
      const float (&part)[4] = parts[column / 64];
      sum += column / 8 % 2 == 0 ? part[0] + part[1] : part[2] + part[3];
      put_y_sum_tile(y_sum_at, column, sum);
    });
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sums[half] = lane % 4 == 0   ? carried[0][2 * half] + carried[0][2 * half + 1]
                   : lane % 4 == 1 ? carried[0][2 * half]
                                   : 0.0f;
  }

  __device__ __forceinline__ void put_y_sum_tile(int to, int column, float sum) const {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const uint32_t bits = pack_pair(T{}, sum, 0.0f);
      small.y_sum_tile[to][column / 64][part][in_line(part, column % 64)] = static_cast<uint16_t>(bits);
      sum = pair_not_finite(T{}, bits) ? 0.0f : sum - unpack_pair(T{}, bits).x;
    }
  }

  // The row of a chunk whose sum a lane finishes, of every four two.
  static __device__ __forceinline__ int finished_row(int warp, int lane) { return 16 * warp + 8 * (lane % 2) + lane / 4; }
  // Where its sum goes; null: nowhere.
  __device__ __forceinline__ float* row_sum_at(const Cursor& at, int warp, int lane) const {
    const int token = at.chunk + finished_row(warp, lane);
    if (lane % 4 >= 2 || slice != 0 || token >= at.piece.end || scan.row_sum == nullptr) return nullptr;
    return scan.row_sum + batch * scan.sum_batch + x_head * scan.sum_head + token * scan.sum_token;
  }
  // sums: this lane's parts of the sums of two rows over x_factor. Leaves the factors of rows of out.
  __device__ __forceinline__ void finish_rows(const Table& table, int buffer, int warp, int lane, const float (&sums)[2],
                                              float count, float* sum_to) {
    float sum = sums[0], other = sums[1];
    if (row_sums()) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, offset);
        other += __shfl_xor_sync(kFullWarp, other, offset);
      }
    }
    if (lane % 4 >= 2) return;
    const int row = finished_row(warp, lane);
    const float from_state = table.from_state[row], from_sum = table.from_sum[row];
    sum = (lane % 2 == 0 ? sum : other) * from_state + from_sum * count;
    if (sum_to != nullptr) *sum_to = sum;
    float factor = 1.0f;
    if (divides()) factor = __frcp_rn(fabsf(sum) < scan.eps ? (sum < 0.0f ? -scan.eps : scan.eps) : sum);
    small.out_factor[buffer][row] = make_float2(from_state * factor, from_sum * factor);
  }

  __device__ __forceinline__ void put_y_sum(int to, int column, float sum) const {
    if constexpr (S::kSplitSums) {
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const uint32_t bits = pack_pair(T{}, sum, 0.0f);
        small.y_sum_parts[to][part][column] = static_cast<uint16_t>(bits);
        sum = pair_not_finite(T{}, bits) ? 0.0f : sum - unpack_pair(T{}, bits).x;
      }
    } else {
      small.y_sum[to][column] = sum;
    }
  }

  // Columns 16 column_tile .. + 15 of the sum of the rows of Y, each times its to_y_sum: lane / 4 and the eighth after it,
  // in lanes that 4 divides. By whole warps.
  __device__ __forceinline__ void sum_16_columns(const Table& table, int stage, int column_tile, int lane,
                                                 float (&sums)[2]) const {
    // The right operand has the factors in column 0 and what their rounding left in column 1.
    float c[4] = {};
    const int part = lane / 4;
    uint32_t y[4][4];
    load_columns(tile(stage, kYTile + column_tile / 4), column_tile % 4, lane, y);
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      uint32_t b[2] = {0, 0};
      if (part < 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * step + 8 * half + 2 * (lane % 4);
          if constexpr (S::kKind == kRank1) {
            b[half] = *reinterpret_cast<const uint32_t*>(&table.to_y_sum_tile[part][in_line(part, row)]);
          } else {
            const float2 factor = *reinterpret_cast<const float2*>(&table.to_y_sum[row]);
            b[half] = pack_pair(T{}, factor.x, factor.y);
            const float2 taken = unpack_pair(T{}, b[half]);
            if (part == 1) b[half] = pack_pair(T{}, factor.x - taken.x, factor.y - taken.y);
          }
        }
      }
      mma(T{}, c, y[step], b[0], b[1]);
    }
    sums[0] = c[0] + c[1], sums[1] = c[2] + c[3];
  }

  // Column `thread` of the same sum. By whole warps.
  __device__ __forceinline__ float sum_column(const Table& table, int stage, int thread) const {
    if constexpr (S::kSplitSums) {
      const int warp = thread / 32, lane = thread % 32;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float sums[2];
        sum_16_columns(table, stage, 2 * warp + part, lane, sums);
        if (lane % 4 == 0) {
          small.column_sums[32 * warp + 16 * part + lane / 4] = sums[0];
          small.column_sums[32 * warp + 16 * part + 8 + lane / 4] = sums[1];
        }
      }
      __syncwarp();
      const float sum = small.column_sums[thread];
      __syncwarp();
      return sum;
    } else {
      const uint32_t column = tile(stage, kYTile + thread / 64);
      float sum = 0.0f;
#pragma unroll 8
      for (int j = 0; j < kTokens; ++j)
        sum +=
            table.to_y_sum[j] * unpack_one(T{}, load_2_bytes(column + j * 128 + ((thread / 8 ^ j) % 8) * 16 + thread % 8 * 2));
      return sum;
    }
  }

  // Of rows lane / 4 and the eighth after it of a warp's 16 rows of X: this lane's part of their products with y_sum.
  __device__ __forceinline__ void times_y_sum(int from, int stage, int warp, int lane, float (&carried)[2]) const {
    if constexpr (S::kSplitSums) {
      float c[2][4] = {};
      const int part = lane / 4;
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k) {
        uint32_t a[4], b[2] = {0, 0};
        load_matrices(a, tile(stage, 0) + chunk_offset<kTokens>(16 * warp + lane % 16, 2 * k + lane / 16));
        if (part < 3) {
          b[0] = *reinterpret_cast<const uint32_t*>(&small.y_sum_parts[from][part][16 * k + 2 * (lane % 4)]);
          b[1] = *reinterpret_cast<const uint32_t*>(&small.y_sum_parts[from][part][16 * k + 8 + 2 * (lane % 4)]);
        }
        mma(T{}, c[k % 2], a, b[0], b[1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float parts[2] = {c[0][2 * half] + c[1][2 * half], c[0][2 * half + 1] + c[1][2 * half + 1]};
        carried[half] = lane % 4 == 0 ? parts[0] + parts[1] : lane % 4 == 1 ? parts[0] : 0.0f;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + 8 * half + lane / 4;
        carried[half] = 0.0f;
#pragma unroll 2
        for (int chunk = lane % 4; chunk < kWidth / 8; chunk += 4) {
          const uint4 x = load_16_bytes(tile(stage, 0) + chunk_offset<kTokens>(row, chunk));
          const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 pair = unpack_pair(T{}, pairs[j]);
            carried[half] += pair.x * small.y_sum[from][chunk * 8 + 2 * j] + pair.y * small.y_sum[from][chunk * 8 + 2 * j + 1];
          }
        }
      }
    }
  }

  // Scores over the decay since the chunk's begin. Tiles that no row of the warp sees stay 0.
  __device__ __forceinline__ void mask_scores(const Table& table, uint32_t to, int warp, int lane,
                                              const float (&s)[8][4]) const {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (reverse() ? t < 2 * warp : t > 2 * warp + 1) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const float2 factor = *reinterpret_cast<const float2*>(&table.from_begin[j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half;
        const float p0 = (reverse() ? j >= i : j <= i) ? s[t][2 * half] * factor.x : 0.0f;
        const float p1 = (reverse() ? j + 1 >= i : j + 1 <= i) ? s[t][2 * half + 1] * factor.y : 0.0f;
        store_4_bytes(to + chunk_offset<kTokens>(i, t) + lane % 4 * 4, pack_pair(T{}, p0, p1));
      }
    }
  }

  // Over x_factor, with the terms of rank 1. sums: adds this lane's part of what a row sees.
  template <bool kUniform>
  __device__ __forceinline__ void finish_rank1_scores(const Table& table, uint32_t to, int warp, int lane,
                                                      const float (&s)[8][4], float (&sums)[2]) const {
    const int row = 16 * warp + lane / 4;
    const float x_rank1[2] = {table.x_rank1[row], table.x_rank1[row + 8]};
    const int direction = reverse() ? -1 : 1;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (reverse() ? t < 2 * warp : t > 2 * warp + 1) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const bool whole = reverse() ? t > 2 * warp + 1 : t < 2 * warp;
      float2 factor = {}, rank1 = {}, z_factor = {};
      if (!kUniform) {
        factor = *reinterpret_cast<const float2*>(&table.y_factor[j]);
        rank1 = *reinterpret_cast<const float2*>(&table.y_rank1[j]);
        z_factor = *reinterpret_cast<const float2*>(&table.z_factor[j]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half, ahead = (j - i) * direction;
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float x = s[t][2 * half + c];
          if (kUniform) x += x_rank1[half];
          else x = x * (c == 0 ? factor.x : factor.y) + x_rank1[half] * (c == 0 ? rank1.x : rank1.y);
          if (!whole && ahead + c * direction > 0) x = 0.0f;
          sums[half] += x;
          p[c] = kUniform ? x : x * (c == 0 ? z_factor.x : z_factor.y);
        }
        store_4_bytes(to + chunk_offset<kTokens>(i, t) + lane % 4 * 4, pack_pair(T{}, p[0], p[1]));
      }
    }
  }

  // Tiles that no row of the warp sees stay 0.
  __device__ __forceinline__ void finish_scores(const Table& table, uint32_t to, int warp, int lane, const float (&s)[8][4],
                                                float (&sums)[2]) const {
    const bool decays = !kExtras || scan.log_decay != nullptr;
    const int row = 16 * warp + lane / 4;
    float2 row_decay[2];
    float x_factor[2], x_rank1[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_decay[half] = table.log2_decay[row + 8 * half];
      x_factor[half] = table.x_factor[row + 8 * half];
      x_rank1[half] = kExtras ? table.x_rank1[row + 8 * half] : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (reverse() ? t < 2 * warp : t > 2 * warp + 1) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const float4 decay = *reinterpret_cast<const float4*>(&table.log2_decay[j]);
      const float2 factor = *reinterpret_cast<const float2*>(kExtras ? &table.y_factor[j] : &table.own[j]);
      float2 rank1 = {}, z_factor = {};
      if (kExtras) {
        rank1 = *reinterpret_cast<const float2*>(&table.y_rank1[j]);
        z_factor = *reinterpret_cast<const float2*>(&table.z_factor[j]);
      }
      float p[4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float x = s[t][2 * half + c] * x_factor[half] * (c == 0 ? factor.x : factor.y);
          if (kExtras) x += x_rank1[half] * (c == 0 ? rank1.x : rank1.y);
          if (decays) {
            const float low = row_decay[half].y - (c == 0 ? decay.y : decay.w);
            x *= exp2_fast(row_decay[half].x - (c == 0 ? decay.x : decay.z) + low);
          }
          const int i = row + 8 * half;
          if (reverse() ? j + c < i : j + c > i) x = 0.0f;
          if (kExtras) {
            sums[half] += x;
            x = x == 0.0f ? 0.0f : x * (c == 0 ? z_factor.x : z_factor.y);
          }
          p[2 * half + c] = x;
        }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_4_bytes(to + chunk_offset<kTokens>(row + 8 * half, t) + lane % 4 * 4,
                      pack_pair(T{}, p[2 * half], p[2 * half + 1]));
    }
  }

  // sums, carried: this lane's parts of the sums of two rows of P and of their products with y_sum. Leaves what rows of out
  // are divided by.
  __device__ __forceinline__ void finish_row_sums(const Cursor& at, const Table& table, int buffer, int warp, int lane,
                                                  const float (&sums)[2], const float (&carried)[2], float count) {
    const int rows = at.chunk_end(kTokens) - at.chunk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + 8 * half + lane / 4;
      float sum = sums[half] + table.from_state[row] * carried[half];
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
      sum += table.from_sum[row] * count;
      if (lane % 4 != 0) continue;
      small.divisor[buffer][row] = fabsf(sum) < scan.eps ? (sum < 0.0f ? -scan.eps : scan.eps) : sum;
      if (scan.row_sum != nullptr && slice == 0 && row < rows)
        scan.row_sum[batch * scan.sum_batch + x_head * scan.sum_head + (at.chunk + row) * scan.sum_token] = sum;
    }
  }

  // A state group. Nothing but products stands between the first and the last of a kind, or the compiler makes them wait
  // for each other.
  __device__ __forceinline__ void carry(Cursor at, int group, bool cut) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int column = slice * S::kColumns + 64 * group + 16 * warp + lane / 4;
    const int K = scan.y.width, V = scan.z.width;
    Place place, scores, out;
    float state[kWidth / 8][4], o[8][4], y_sum[kYParts][2] = {};
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
      const int own = own_step(at, steps);
      float z_sum[2] = {0.0f, 0.0f}, after = 1.0f, kept = 1.0f, count = 0.0f;
      double log2_kept = 0.0;
      clear_state(state);
      if (kOut && !begins_scan(at)) {
        from_slots([&](float* const(&slots)[kSlotBatch], const float (&weights)[kSlotBatch]) {
          add_slots(state, slots, weights, column, lane);
          if constexpr (kExtras) {
            if (!rank1()) return;
#pragma unroll
            for (int i = 0; i < kSlotBatch; ++i)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                if (weights[i] != 0.0f && column + 8 * half < V)
                  z_sum[half] += weights[i] * slots[i][static_cast<int64_t>(K) * V + K + column + 8 * half];
          }
        });
      } else if (kOut) {
        add_first(at, state, z_sum, 1.0f, column, lane);
      }
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        // Of the heads of y of a chunk.
        const bool first = !kGroupedHeads || at.head == 0, last = !kGroupedHeads || at.head + 1 == scan.y_group;
        wait(&small.full[place.slot], place.parity);
        const Table& table = table_of(steps, own, place.slot);
        if constexpr (!kOut) {
          uint32_t scaled[4][4];
          load_summed(table, place.slot, group, warp, lane, after, scaled, z_sum);
          to_state(place.slot, scaled, state);
          if (kPartSums && row_sums()) add_y_sum(table, place.slot, group, warp, lane, y_sum);
          count += after * table.count;
          log2_kept += table.log2_kept;
          kept *= table.kept;
          if (last) after = kept;
          end_update(place.slot, scaled, state);
        } else if (S::kScaledLast && (S::kKind == kRank1 || !table.steep)) {
          wait(&small.scores_full[scores.slot], scores.parity);
          uint32_t packed[kWidth / 16][4], z[4][4], scaled[4][4];
          float one[2] = {1.0f, 1.0f};
          pack_state(state, packed, one);
          const float sum_before[2] = {z_sum[0], z_sum[1]};
          const bool odd = load_z(table, place.slot, group, warp, lane, z, z_sum);
          from_state(place.slot, packed, o, false);
          from_scores(scores.slot, z, o);
          if constexpr (S::kKind != kRank1) decay_state(table.kept, state);
          start_update(table, place.slot, group, warp, lane, odd, z, scaled, state, z_sum, o);
          wait_products(place.slot, scores.slot, group, warp, lane, odd, sum_before, packed, z, o);
          arrive_warp(&small.scores_empty[scores.slot], odd || kFactors || row_sums());
          scores.next(2);
          if constexpr (!kFactors) scale_rows(table, lane, one, z_sum, o);
          end_chunk(place.slot, group, warp, lane, out, z, scaled, state, o);
        } else {
          const float sum_before[2] = {z_sum[0], z_sum[1]};
          float unscale[2] = {1.0f, 1.0f};
          uint32_t packed[kWidth / 16][4], scaled[4][4];
          carry_state(table, first, place.slot, group, warp, lane, sum_before, unscale, packed, scaled, state, z_sum, o);
          const bool with_scores = kPairs || row_sums();
          bool odd = false;
          if constexpr (kPairs) {
            uint32_t z[4][4];
            load_columns(tile(place.slot, kZTile + group), warp, lane, z);
            wait(&small.scores_full[scores.slot], scores.parity);
            odd = has_odd(z);
            if (odd) take_out_odd(z);
            add_scores(place.slot, scores.slot, group, warp, lane, odd, z, scaled, state, o);
          } else if (with_scores) {
            wait(&small.scores_full[scores.slot], scores.parity);
          }
          if (last) end_rows(scores.slot, out, group, warp, lane, o);
          arrive_empty(place.slot);
          if (with_scores) {
            arrive_warp(&small.scores_empty[scores.slot], odd || kFactors || row_sums());
            scores.next(2);
          }
          if (last) put_rows(group, warp, lane, out, o);
        }
      }
      if constexpr (!kOut) {
        if (begins_scan(at)) {
          const FirstSums from = Base::first_sums(at);
          count += after * from.count;
          add_first(at, state, z_sum, after, column, lane);
        }
        write_segment(at, cut, K, V, column, group, warp, lane, thread, count, log2_kept, state, z_sum, y_sum);
      } else if constexpr (kUpdates) {
        const LastSums to = Base::last_sums(at);
        write_state<kWidth>(state, to, K, V, column, lane);
        if (kExtras && to.z_sum != nullptr && rank1() && lane % 4 == 0) write_z_sum(to, V, column, z_sum);
      }
    }
  }

  static __device__ __forceinline__ void clear_state(float (&state)[kWidth / 8][4]) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) state[n][c] = 0.0f;
  }

  static __device__ __forceinline__ void decay_state(float kept, float (&state)[kWidth / 8][4]) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) state[n][c] *= kept;
  }

  // Z' of a chunk of a segment whose sums are wanted, and its part of the sum of z.
  __device__ __forceinline__ void load_summed(const Table& table, int stage, int group, int warp, int lane, float after,
                                              uint32_t (&scaled)[4][4], float (&z_sum)[2]) const {
    load_columns(tile(stage, kZTile + group), warp, lane, scaled);
    if constexpr (kPartSums) {
      add_z_sum(table, lane, scaled, z_sum);
      if (!table.unscaled) scale_columns(table, lane, 1.0f, scaled, z_sum);
    } else {
      scale_columns(table, lane, after, scaled, z_sum);
    }
  }

  // A warp's columns of a chunk's part of the sum of y.
  __device__ __forceinline__ void add_y_sum(const Table& table, int stage, int group, int warp, int lane,
                                            float (&y_sum)[kYParts][2]) const {
#pragma unroll
    for (int part = 0; part < kYParts; ++part) {
      float sums[2];
      sum_16_columns(table, stage, kYParts * (4 * group + warp) + part, lane, sums);
      y_sum[part][0] += sums[0], y_sum[part][1] += sums[1];
    }
  }

  // Stores the sums of a segment.
  __device__ __forceinline__ void write_segment(const Cursor& at, bool cut, int K, int V, int column, int group, int warp,
                                                int lane, int thread, float count, double log2_kept,
                                                float (&state)[kWidth / 8][4], float (&z_sum)[2],
                                                const float (&y_sum)[kYParts][2]) const {
    float* const slot = Base::slot(scan.slots, segment);
    write_slot(state, slot, column, lane);
    float* const rest = slot + static_cast<int64_t>(K) * V + K + V;
    if (slice == 0 && group == 0 && thread == 0) Base::write_slot_rest(at, rest, count, cut ? -16384.0 : log2_kept);
    if (kExtras && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (column + 8 * half < V) rest[column + 8 * half - V] = z_sum[half];
    }
    if (kPartSums && row_sums() && slice == 0 && lane % 4 == 0) {
      const FirstSums from = Base::first_sums(at);
#pragma unroll
      for (int part = 0; part < kYParts; ++part)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = 16 * (kYParts * (4 * group + warp) + part) + 8 * half + lane / 4;
          if (k >= K) continue;
          const bool first = begins_scan(at) && from.y_sum != nullptr;
          rest[k - V - K] = y_sum[part][half] + (first ? from.y_sum[k] : 0.0f);
        }
    }
  }

  // Z without what is not finite, and its part of the sum of z. Returns whether there was such a number.
  __device__ __forceinline__ bool load_z(const Table& table, int stage, int group, int warp, int lane, uint32_t (&z)[4][4],
                                         float (&z_sum)[2]) const {
    load_columns(tile(stage, kZTile + group), warp, lane, z);
    // Where products wait for it, it has to be the same in the whole group.
    const bool odd = S::kKind == kRank1 ? hopper::named_barrier_any(4 + group, 128, has_odd(z)) : has_odd(z);
    if constexpr (kPartSums) add_z_sum(table, lane, z, z_sum);
    if (odd) take_out_odd(z);
    return odd;
  }

  // Starts Sᵀ += Z'ᵀ Y while products with Z are on their way to o. z: it or what it becomes; scaled: else that.
  __device__ __forceinline__ void start_update(const Table& table, int stage, int group, int warp, int lane, bool odd,
                                               uint32_t (&z)[4][4], uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4],
                                               float (&z_sum)[2], float (&o)[8][4]) const {
    if constexpr (kInPlace) {
      // Where Z is its own Z', as in the usual call without decay, products follow each other at once.
      if (S::kKind != kRank1 || odd || !table.unscaled) {
        hopper::warpgroup_wait<0>();
        hopper::fence_accumulators(o);
        hopper::fence_operands_for_write(z);
        if (odd) load_columns(tile(stage, kZTile + group), warp, lane, z);
        if (S::kKind != kRank1 || !table.unscaled) scale_columns(table, lane, 1.0f, z, z_sum);
      }
      to_state(stage, z, state);
    } else {
      if (odd) {
        load_columns(tile(stage, kZTile + group), warp, lane, scaled);
      } else {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i) scaled[step][i] = z[step][i];
      }
      scale_columns(table, lane, 1.0f, scaled, z_sum);
      to_state(stage, scaled, state);
    }
  }

  // Waits for these products, which are rows of out before they are scaled, or after that.
  __device__ __forceinline__ void wait_products(int stage, int buffer, int group, int warp, int lane, bool odd,
                                                const float (&sum_before)[2], uint32_t (&packed)[kWidth / 16][4],
                                                uint32_t (&z)[4][4], float (&o)[8][4]) const {
    hopper::warpgroup_wait<1>();
    hopper::fence_accumulators(o);
    hopper::fence_operands(packed);
    if constexpr (!kInPlace) hopper::fence_operands(z);
    if (odd) add_odd(stage, buffer, group, warp, lane, o);
    if constexpr (kFactors) scale_rows_last(buffer, lane, sum_before, o);
  }

  // Hands rows of out on and waits for the state.
  __device__ __forceinline__ void end_chunk(int stage, int group, int warp, int lane, Place& out, uint32_t (&z)[4][4],
                                            uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4], float (&o)[8][4]) const {
    wait_rows(out, group, warp, lane, o);
    put_rows(group, warp, lane, out, o);
    end_update(stage, kInPlace ? z : scaled, state);
  }

  // Waits for Sᵀ; scaled: its operand.
  __device__ __forceinline__ void end_update(int stage, uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4]) const {
    hopper::warpgroup_wait<0>();
    hopper::fence_accumulators(state);
    hopper::fence_operands(scaled);
    arrive_empty(stage);
  }

  // Rows of out have what the state before a chunk gives, with the first of its heads of y. Starts Sᵀ += Z'ᵀ Y.
  __device__ __forceinline__ void carry_state(const Table& table, bool first, int stage, int group, int warp, int lane,
                                              const float (&sum_before)[2], float (&unscale)[2],
                                              uint32_t (&packed)[kWidth / 16][4], uint32_t (&scaled)[4][4],
                                              float (&state)[kWidth / 8][4], float (&z_sum)[2], float (&o)[8][4]) const {
    if (first) {
      pack_state(state, packed, unscale);
      from_state(stage, packed, o, true);
      if (S::kMode != kSingle) {
        hopper::warpgroup_wait<0>();
        hopper::fence_accumulators(o);
        scale_rows(table, lane, unscale, sum_before, o);
      }
    }
    if constexpr (kUpdates) {
      load_columns(tile(stage, kZTile + group), warp, lane, scaled);
      scale_columns(table, lane, 1.0f, scaled, z_sum);
      decay_state(table.kept, state);
      to_state(stage, scaled, state);
      if (S::kMode == kSingle) {
        hopper::warpgroup_wait<1>();
        hopper::fence_accumulators(o);
        hopper::fence_operands(packed);
        scale_rows(table, lane, unscale, sum_before, o);
      }
    }
  }

  // Adds what scores give, and waits for the state.
  __device__ __forceinline__ void add_scores(int stage, int buffer, int group, int warp, int lane, bool odd,
                                             uint32_t (&z)[4][4], uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4],
                                             float (&o)[8][4]) const {
    hopper::warpgroup_arrive();
    from_scores(buffer, z, o);
    hopper::warpgroup_wait<0>();
    hopper::fence_accumulators(o);
    hopper::fence_accumulators(state);
    hopper::fence_operands(scaled);
    hopper::fence_operands(z);
    if (odd) add_odd(stage, buffer, group, warp, lane, o);
  }

  __device__ __forceinline__ void divide_rows(int buffer, int lane, float (&o)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 by = *reinterpret_cast<const float2*>(&small.divisor[buffer][8 * n + 2 * (lane % 4)]);
      const float2 factor = make_float2(__frcp_rn(by.x), __frcp_rn(by.y));
      o[n][0] *= factor.x, o[n][1] *= factor.y, o[n][2] *= factor.x, o[n][3] *= factor.y;
    }
  }

  // Waits for room for rows of out, and divides them.
  __device__ __forceinline__ void end_rows(int buffer, const Place& out, int group, int warp, int lane,
                                           float (&o)[8][4]) const {
    wait_rows(out, group, warp, lane, o);
    if (kExtras && divides()) divide_rows(buffer, lane, o);
  }

  static __device__ __forceinline__ void write_z_sum(const LastSums& to, int V, int column, const float (&z_sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (column + 8 * half < V) to.z_sum[column + 8 * half] = to.factor * z_sum[half];
  }

  // What a request begins with, times weight.
  __device__ __forceinline__ void add_first(const Cursor& at, float (&state)[kWidth / 8][4], float (&z_sum)[2], float weight,
                                            int column, int lane) const {
    const FirstSums from = Base::first_sums(at);
    const int K = scan.y.width, V = scan.z.width;
    if (from.state == nullptr) return;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int k = 8 * n + 2 * (lane % 4) + c % 2, v = column + c / 2 * 8;
        if (k < K && v < V) state[n][c] += weight * from.state[k * from.k_stride + v * from.v_stride];
      }
    if constexpr (kExtras) {
      if (from.z_sum == nullptr || !rank1()) return;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (column + 8 * half < V) z_sum[half] += weight * from.z_sum[column + 8 * half];
    }
  }

  // A slot has [V][K], K even; where it is made of whole tiles and no one else reads it, each of its 64 columns as they lie
  // in registers, so that whole lines move.
  __device__ __forceinline__ bool whole_tiles() const {
    return !scan.own_slots && scan.y.width == kWidth && scan.z.width % 64 == 0;
  }
  static __device__ __forceinline__ float* fragment(float* slot, int column, int thread) {
    return slot + column / 64 * (64 * kWidth) + thread * 4;
  }
  __device__ __forceinline__ void add_slots(float (&state)[kWidth / 8][4], float* const (&slots)[kSlotBatch],
                                            const float (&weights)[kSlotBatch], int column, int lane) const {
    const int K = scan.y.width, V = scan.z.width;
    if (column / 64 * 64 >= V) return;
    if (whole_tiles()) {
      // Loads of all slots are on their way at once.
#pragma unroll
      for (int part = 0; part < kWidth / 8; part += 8) {
        float4 x[kSlotBatch][8];
#pragma unroll
        for (int i = 0; i < kSlotBatch; ++i)
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            x[i][n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (weights[i] != 0.0f)
              x[i][n] = *reinterpret_cast<const float4*>(fragment(slots[i], column, threadIdx.x % 128) + (part + n) * 512);
          }
#pragma unroll
        for (int i = kSlotBatch - 1; i >= 0; --i)
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            float (&to)[4] = state[part + n];
            to[0] += weights[i] * x[i][n].x, to[1] += weights[i] * x[i][n].y;
            to[2] += weights[i] * x[i][n].z, to[3] += weights[i] * x[i][n].w;
          }
      }
      return;
    }
#pragma unroll 1
    for (int i = kSlotBatch - 1; i >= 0; --i) {
      const float weight = i == 0 ? weights[0] : i == 1 ? weights[1] : weights[2];
      const float* const slot = i == 0 ? slots[0] : i == 1 ? slots[1] : slots[2];
      if (weight == 0.0f) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const row = slot + static_cast<int64_t>(column + 8 * half) * K + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n)
          if (8 * n < K && column + 8 * half < V) {
            const float2 x = *reinterpret_cast<const float2*>(row + 8 * n);
            state[n][2 * half] += weight * x.x;
            state[n][2 * half + 1] += weight * x.y;
          }
      }
    }
  }
  __device__ __forceinline__ void write_slot(const float (&state)[kWidth / 8][4], float* slot, int column, int lane) const {
    const int K = scan.y.width, V = scan.z.width;
    if (column / 64 * 64 >= V) return;
    if (whole_tiles()) {
      float* const to = fragment(slot, column, threadIdx.x % 128);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        *reinterpret_cast<float4*>(to + n * 512) = make_float4(state[n][0], state[n][1], state[n][2], state[n][3]);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const row = slot + static_cast<int64_t>(column + 8 * half) * K + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        if (8 * n < K && column + 8 * half < V)
          *reinterpret_cast<float2*>(row + 8 * n) = make_float2(state[n][2 * half], state[n][2 * half + 1]);
    }
  }

  // Whether a warp's columns of Z have a number that is not finite.
  static __device__ __forceinline__ bool has_odd(const uint32_t (&z)[4][4]) {
    uint32_t top = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) top = __vmaxu2(top, z[step][i] & 0x7fff7fffu);
    return __any_sync(kFullWarp, pair_not_finite(T{}, top));
  }

  // Oᵀ += Zᵀ Pᵀ
  __device__ __forceinline__ void from_scores(int buffer, const uint32_t (&z)[4][4], float (&o)[8][4]) const {
    const uint32_t p = hopper::make_smem_descriptor(scores_at + buffer * kBox, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) hopper::wgmma_rs<false>(T{}, o, z[k], p + k * 2, 1);
    hopper::warpgroup_commit();
  }

  // Oᵀ = Sᵀ Xᵀ; alone: nothing follows in the same group.
  __device__ __forceinline__ void from_state(int stage, const uint32_t (&packed)[kWidth / 16][4], float (&o)[8][4],
                                             bool alone) const {
    const uint32_t x = hopper::make_smem_descriptor(tile(stage, 0), 0);
    hopper::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
      hopper::wgmma_rs<false>(T{}, o, packed[k], x + (k / 4 * kBox + k % 4 * 32) / 16, k > 0);
    if (alone) hopper::warpgroup_commit();
  }

  // Sᵀ += Z'ᵀ Y
  __device__ __forceinline__ void to_state(int stage, const uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4]) const {
    const uint32_t y = hopper::make_smem_descriptor(tile(stage, kYTile), kBox);
    hopper::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k) hopper::wgmma_rs<true>(T{}, state, scaled[k], y + k * 128, 1);
    hopper::warpgroup_commit();
  }

  __device__ __forceinline__ void scale_rows(const Table& table, int lane, const float (&unscale)[2], const float (&sum)[2],
                                             float (&o)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int row = 8 * n + 2 * (lane % 4);
      const float2 factor = *reinterpret_cast<const float2*>(&table.from_state[row]);
      o[n][0] *= factor.x * unscale[0], o[n][1] *= factor.y * unscale[0];
      o[n][2] *= factor.x * unscale[1], o[n][3] *= factor.y * unscale[1];
      if (kExtras) {
        const float2 of_sum = *reinterpret_cast<const float2*>(&table.from_sum[row]);
        o[n][0] += of_sum.x * sum[0], o[n][1] += of_sum.y * sum[0];
        o[n][2] += of_sum.x * sum[1], o[n][3] += of_sum.y * sum[1];
      }
    }
  }

  __device__ __forceinline__ void scale_rows_last(int buffer, int lane, const float (&sum)[2], float (&o)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 factor = *reinterpret_cast<const float4*>(&small.out_factor[buffer][8 * n + 2 * (lane % 4)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        o[n][2 * half] = o[n][2 * half] * factor.x + factor.y * sum[half];
        o[n][2 * half + 1] = o[n][2 * half + 1] * factor.z + factor.w * sum[half];
      }
    }
  }

  // float16 reaches 65504: there columns are scaled by powers of two.
  static __device__ __forceinline__ void pack_state(const float (&state)[kWidth / 8][4], uint32_t (&packed)[kWidth / 16][4],
                                                    float (&unscale)[2]) {
    float scale[2] = {1.0f, 1.0f};
    if constexpr (std::is_same<T, __half>::value) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = 0.0f;
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) top = fmaxf(top, fmaxf(fabsf(state[n][2 * half]), fabsf(state[n][2 * half + 1])));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        power_of_two_scale(top, scale[half], unscale[half]);
      }
    }
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = state[2 * k + i / 2];
        packed[k][i] = pack_pair(T{}, from[i % 2 * 2] * scale[i % 2], from[i % 2 * 2 + 1] * scale[i % 2]);
      }
  }

  // A warp's 16 columns of a tile of Z as the left operand of four k-steps.
  static __device__ __forceinline__ void load_columns(uint32_t from, int warp, int lane, uint32_t (&z)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      load_matrices_transposed(z[step],
                               from + chunk_offset<kTokens>(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
  }

  // From Z to Z' times weight, and its part of the sum of z.
  __device__ __forceinline__ void scale_columns(const Table& table, int lane, float weight, uint32_t (&scaled)[4][4],
                                                float (&z_sum)[2]) const {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * step + 8 * half + 2 * (lane % 4);
        float2 factor = *reinterpret_cast<const float2*>(&table.to_state[row]), to_sum = {};
        if (!kOut) factor.x *= weight, factor.y *= weight;
        if constexpr (kExtras && !kPartSums) to_sum = *reinterpret_cast<const float2*>(&table.to_z_sum[row]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 x = unpack_pair(T{}, scaled[step][2 * half + i]);
          scaled[step][2 * half + i] = pack_pair(T{}, x.x * factor.x, x.y * factor.y);
          if (kExtras && !kPartSums) sums[i] += to_sum.x * x.x + to_sum.y * x.y;
        }
      }
    if constexpr (kExtras && !kPartSums) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
        z_sum[half] = kOut ? table.kept * z_sum[half] + sums[half] : z_sum[half] + weight * sums[half];
      }
    }
  }

  // The chunk's part of the sum of z, of a warp's columns of Z, in every lane.
  __device__ __forceinline__ void add_z_sum(const Table& table, int lane, const uint32_t (&z)[4][4], float (&z_sum)[2]) const {
    if (!rank1()) return;
    // The right operand has the factors in even columns and what their rounding left in odd ones.
    float c[4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint16_t* const factors = &table.to_z_sum_parts[lane / 4 % 2][16 * step + 2 * (lane % 4)];
      mma(T{}, c, z[step], *reinterpret_cast<const uint32_t*>(factors), *reinterpret_cast<const uint32_t*>(factors + 8));
    }
    z_sum[0] += c[0] + c[1], z_sum[1] += c[2] + c[3];
  }

  // What is not finite would reach tokens that do not see it, as 0 times itself: it becomes 0, and is added on its own to
  // the rows that see it.
  static __device__ __forceinline__ void take_out_odd(uint32_t (&z)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (pair_not_finite(T{}, z[step][i] & 0xffffu)) z[step][i] &= 0xffff0000u;
        if (pair_not_finite(T{}, z[step][i] & 0xffff0000u)) z[step][i] &= 0xffffu;
      }
  }
  __device__ __forceinline__ void add_odd(int stage, int buffer, int group, int warp, int lane, float (&o)[8][4]) const {
    const uint32_t p = scores_at + buffer * kBox, z = tile(stage, kZTile + group);
#pragma unroll 1
    for (int j = 0; j < kTokens; ++j) {
      uint32_t bits[2];
      bool odd[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bits[half] = load_2_bytes(z + chunk_offset<kTokens>(j, 2 * warp + half) + lane / 4 * 2);
        odd[half] = pair_not_finite(T{}, bits[half]);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = 8 * n + 2 * (lane % 4) + c % 2;
          if (odd[c / 2] && (reverse() ? j >= i : j <= i))
            o[n][c] += unpack_one(T{}, load_2_bytes(p + chunk_offset<kTokens>(i, j / 8) + j % 8 * 2)) *
                       unpack_one(T{}, static_cast<uint16_t>(bits[c / 2]));
        }
    }
  }

  // Until there is room for rows of out, which for row_dot holds those of source: stores this warp's part of the dots.
  __device__ __forceinline__ void wait_rows(const Place& out, int group, int warp, int lane, const float (&o)[8][4]) const {
    if (!dots()) {
      wait(&small.out_empty[out.slot], out.parity ^ 1);
      return;
    }
    wait(&small.source_full[out.slot], out.parity);
    const uint32_t from = out_at + (out.slot * kGroups + group) * kBox;
    float sums[8][2];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      load_matrices_transposed(a, from + chunk_offset<kTokens>(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float2 x0 = unpack_pair(T{}, a[2 * t]), x1 = unpack_pair(T{}, a[2 * t + 1]);
        sums[2 * step + t][0] = x0.x * o[2 * step + t][0] + x1.x * o[2 * step + t][2];
        sums[2 * step + t][1] = x0.y * o[2 * step + t][1] + x1.y * o[2 * step + t][3];
      }
    }
    // Eight lanes have parts of the same rows. With each exchange a lane keeps half of them.
#pragma unroll
    for (int kept = 4; kept > 0; kept /= 2)
#pragma unroll
      for (int n = 0; n < kept; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const bool upper = lane & 4 * kept;
          const float other = __shfl_xor_sync(kFullWarp, upper ? sums[n][c] : sums[n + kept][c], 4 * kept);
          sums[n][c] = (upper ? sums[n + kept][c] : sums[n][c]) + other;
        }
    float* const to = &small.dots[out.slot][4 * group + warp][8 * (lane / 4) + 2 * (lane % 4)];
    *reinterpret_cast<float2*>(to) = make_float2(sums[0][0], sums[0][1]);
    __syncwarp();
  }

  // Through shared memory, so that whole lines are written.
  __device__ __forceinline__ void put_rows(int group, int warp, int lane, Place& out, float (&o)[8][4]) const {
    const uint32_t tile = out_at + (out.slot * kGroups + group) * kBox;
    if (kExtras && scales_out()) {
      const float times = *scan.out_times;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[n][c] *= times;
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_pair(T{}, o[n + i / 2][i % 2 * 2], o[n + i / 2][i % 2 * 2 + 1]);
      // Matrix i: tokens 8 (n + i / 2) .. + 7, columns 8 (i % 2) .. + 7 of the warp's.
      hopper::store_matrices_transposed(tile + chunk_offset<kTokens>(8 * (n + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                                        r);
    }
    hopper::fence_proxy_async();
    arrive_warp(&small.out_full[out.slot], flags & (kDots | kPacked));
    out.next(2);
  }

  // Leaves only the tokens of a segment whose part in its sums is more than 2^-24 of what it would be without decay.
  __device__ __forceinline__ bool cut_to_window(Cursor& at) const {
    if (scan.log_decay == nullptr || scan.decay_per_token || !scan.causal) return false;
    const int length = at.piece.end - at.piece.begin;
    const float tokens = 24.0f / (-kLog2E * scan.log_decay[state_head]);
    if (!(tokens < static_cast<float>(length - kTokens))) return false;
    const int window = static_cast<int>(tokens) + 1;
    if (reverse()) at.piece.end = at.piece.begin + round_up(window, kTokens);
    else at.piece.begin += (length - window) / kTokens * kTokens;
    return true;
  }

  __device__ __forceinline__ void run() {
    const int group = threadIdx.x / 128;
    if (!kOut) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    Cursor at = Base::first_step();
    if (!kOut && !at.valid) {
      if (slice == 0 && threadIdx.x == 0) Base::mark_unused_slot();
      return;
    }
    const bool cut = !kOut && cut_to_window(at);
    Base::zero_unowned(at, threadIdx.x / 32, S::kThreads / 32, threadIdx.x % 32);
    // The warp that copies makes the barriers, and does not wait for the others.
    const int copy_warp = threadIdx.x / 32 - 4 * (kGroups + S::kScores);
    if (copy_warp == 0) {
      if (threadIdx.x % 32 == 0) {
        const auto init = [](uint64_t& barrier, int warps) { hopper::mbarrier_init(shared_address(&barrier), 32 * warps); };
        for (int s = 0; s < stages; ++s) {
          init(small.full[s], 2);
          init(small.empty[s], 4 * (kGroups + S::kScores));
        }
        hopper::mbarrier_init(shared_address(&small.landed), 1);
        for (int s = 0; s < 2; ++s) {
          init(small.scores_full[s], 4);
          init(small.scores_empty[s], 4 * kGroups);
          init(small.out_full[s], 4 * kGroups);
          init(small.out_empty[s], 1);
          init(small.source_full[s], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
      hopper::named_barrier_arrive(3, S::kThreads);
    } else {
      hopper::named_barrier(3, S::kThreads);
    }
    if (group < kGroups) {
      if (S::kScores) take_registers<S::kStateRegisters>();
      carry(at, group, cut);
    } else if (S::kScores && group == kGroups) {
      if (S::kScores) give_registers<S::kScoreRegisters>();
      if constexpr (S::kKind == kRank1) score_rank1(at);
      else score(at);
    } else {
      if (S::kScores) give_registers<S::kCopyRegisters>();
      const int warp = threadIdx.x / 32 % 4;
      if (warp == 0) copy_tiles(at);
      else if (warp < 3) make_tables(at, warp - 1);
      else if (S::kOut) take_rows(at);
    }
  }
};
#endif

template <class T, int kWidth, int kGroups, int kMode, int kKind, int kCtasPerSm>
__global__ void __launch_bounds__(HopperShape<T, kWidth, kGroups, kMode, kKind, kCtasPerSm>::kThreads, kCtasPerSm)
    ChunkScanHopperKernel(const __grid_constant__ ChunkGroup group, int stages) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using S = HopperShape<T, kWidth, kGroups, kMode, kKind, kCtasPerSm>;
  extern __shared__ char dynamic[];
  char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  const uint32_t stages_at = shared_address(shared), scores_at = stages_at + stages * S::kStageBytes;
  auto& small = *reinterpret_cast<typename S::Small*>(shared + stages * S::kStageBytes + S::kFixedTiles * S::kBox);
  const unsigned which = blockIdx.x % group.count;
  HopperCta<S, T> cta{{group.scans[which], S::kOut ? kOutputs : kSegmentSums, blockIdx.x / group.count},
                      group.maps[which],
                      small,
                      stages_at,
                      scores_at,
                      scores_at + 2 * S::kBox,
                      stages,
                      HopperCta<S, T>::flags_of(group.scans[which])};
  cta.run();
#endif
}

// Whether scans have the same kernel and as many CTAs.
inline bool go_together(const ChunkScan& a, const ChunkScan& b) {
  const auto extras = [](const ChunkScan& scan) { return scan.rank1 || scan.row_sums; };
  return a.dtype == b.dtype && a.causal == b.causal && a.batch == b.batch && a.tokens == b.tokens && a.heads == b.heads &&
         a.x_group == b.x_group && a.y_group == b.y_group && extras(a) == extras(b) &&
         (a.log_decay == nullptr) == (b.log_decay == nullptr) && (a.y.width > 64) == (b.y.width > 64) &&
         (a.z.width <= 64) == (b.z.width <= 64) && chunk_scan_slices(a) == chunk_scan_slices(b) && a.own_slots == b.own_slots &&
         (!a.own_slots || a.segments == b.segments);
}

// The scans of a group take the same kernel. overlap: the pass before may still run, and this one waits for it where it
// needs its sums. Compiled by chunk_scan_hopper_launch.cu.in, a source file a type and width.
template <class T, int kWidth, int kGroups>
int launch_hopper_shape(const ChunkGroup& group, int pass, bool overlap, int max_shared_bytes, void* stream);

template <class T>
int launch_hopper(const ChunkGroup& group, int pass, bool overlap, int max_shared_bytes, void* stream) {
  const ChunkScan& scan = group.scans[0];
  const bool narrow = scan.z.width <= 64;
  const auto launch = [&](auto launcher) { return launcher(group, pass, overlap, max_shared_bytes, stream); };
  if (scan.y.width > 64) return narrow ? launch(launch_hopper_shape<T, 128, 1>) : launch(launch_hopper_shape<T, 128, 2>);
  return narrow ? launch(launch_hopper_shape<T, 64, 1>) : launch(launch_hopper_shape<T, 64, 2>);
}

}  // namespace chunk
}  // namespace leanfleet
