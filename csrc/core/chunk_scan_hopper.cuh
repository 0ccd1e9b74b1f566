// The kernels of chunk_scan.h for Hopper: float16 and bfloat16 with K up to 128, in chunks of 64 tokens. The products are
// those of chunk_scan.cuh; here warpgroups share them out and run ahead of each other:
//
//   state groups  (1 or 2) each 64 columns of Z, with Sᵀ in its accumulators: Oᵀ and Sᵀ
//   score group   P, row sums, the sum of y; not for sums without row sums
//   copy group    warp 0 has the copy engine bring tiles, warp 3 has it take rows of out, the others make tables of rows
//
// A stage of the ring is a chunk's X, Y, Z and, for row_dot, source, as boxes of 64 columns, and its table.
//
// What a segment adds up on its own is walked over against the scan's order: a row then needs one factor, its decay up to
// the segment's end, the state none, tokens that no longer matter are not read, and the pass that follows finds in the
// cache the tokens that it begins with.
#pragma once

#include "core/chunk_scan.cuh"
#include "core/hopper.cuh"

namespace leanfleet {
namespace chunk {

constexpr int kMaxUncombined = 15;  // segments before one that it adds up the sums of by itself
constexpr int kSlotBatch = 3;       // so many at a time

struct ChunkMaps {
  CUtensorMap x, y, z, source, out;
};

// sums: Sᵀ only. whole: Oᵀ only, from the sum over all tokens. single and grouped: both, with one head of y for a chunk
// or several.
enum Mode : int { kSums, kWhole, kSingle, kGrouped };

// kFull: with row sums or the terms of rank 1.
template <class T, int kWidth_, int kGroups_, int kMode_, bool kFull_>
struct HopperShape {
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kMode = kMode_;
  static constexpr bool kFull = kFull_, kOut = kMode != kSums, kUpdates = kMode != kWhole, kPairs = kOut && kUpdates;
  static constexpr bool kScores = kPairs || kFull;
  // Sums of rows of Y, and products of rows of X with them, on tensor cores; float16 has not the range.
  static constexpr bool kSplitSums = std::is_same<T, __nv_bfloat16>::value;
  // Chunks that are not steep: P holds scores over the decay since the chunk's begin, and rows of out get that decay as a
  // whole, so that both products of Oᵀ follow each other at once. float16 has not the range for it.
  static constexpr bool kScaledLast = kMode == kSingle && !kFull && std::is_same<T, __nv_bfloat16>::value;
  static constexpr int kTokens = 64, kColumns = 64 * kGroups, kBox = 8192, kBoxes = kWidth / 64;
  static constexpr int kThreads = 128 * (kGroups + 1 + kScores);
  static constexpr int kMaxStages = 6;
  // With a score group they are shared out unevenly.
  static constexpr int kStateRegisters = kGroups == 1 ? 216 : kFull ? 184 : 192;
  static constexpr int kScoreRegisters = kGroups == 1 ? 144 : kFull ? 96 : 80;
  static constexpr int kCopyRegisters = kGroups == 2 ? 48 : 120;
  struct Small {
    uint64_t full[kMaxStages], empty[kMaxStages], landed, scores_full[2], scores_empty[2], out_full[2], out_empty[2];
    RowTable<kTokens> table[kMaxStages + 1];  // the last: of all whole chunks within a request
    int table_of[kMaxStages];
    float divisor[2][kTokens];
    float y_sum[kWidth];
    alignas(4) uint16_t y_sum_parts[3][kWidth];  // bfloat16 numbers whose sum it is
    float column_sums[kWidth];
    float dots[2][4 * kGroups][kTokens];
  };
  static int stage_bytes(bool source) {
    return kBox * ((kOut ? kBoxes : 0) + (kUpdates ? kBoxes + kGroups : 0) + (kOut && source ? kGroups : 0));
  }
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
struct HopperBlock : Site<T, S::kTokens, S::kColumns> {
  using Base = Site<T, S::kTokens, S::kColumns>;
  using Base::scan, Base::batch, Base::x_head, Base::state_head, Base::slice, Base::segment, Base::out_row;
  static constexpr int kTokens = S::kTokens, kWidth = S::kWidth, kGroups = S::kGroups, kBox = S::kBox, kBoxes = S::kBoxes;
  static constexpr bool kFull = S::kFull, kOut = S::kOut, kUpdates = S::kUpdates, kPairs = S::kPairs;
  static constexpr bool kGroupedHeads = S::kMode == kGrouped || S::kMode == kSums;
  // Tiles of a stage, in boxes.
  static constexpr int kYTile = kOut ? kBoxes : 0, kZTile = kYTile + kBoxes;
  static constexpr int kSourceTile = kOut && !kUpdates ? kBoxes : kZTile + kGroups;

  const ChunkMaps& maps;
  typename S::Small& small;
  const uint32_t stages_at, scores_at, out_at;
  const int stages, stage_bytes;

  // A place in the ring and the parity of its barriers.
  struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int slots) {
      if (++slot == slots) slot = 0, parity ^= 1;
    }
  };

  __device__ __forceinline__ uint32_t tile(int stage, int box) const { return stages_at + stage * stage_bytes + box * kBox; }
  __device__ __forceinline__ int heads() const { return kGroupedHeads ? scan.y_group : 1; }

  static __device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::barrier_arrive(shared_address(barrier));
  }
  static __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    hopper::barrier_wait(shared_address(barrier), parity);
  }

  // Every group goes over the same pieces, chunks and heads.
  __device__ __forceinline__ int begin_piece(Cursor& at) const {
    const int chunks = (at.piece.end - at.piece.begin + kTokens - 1) / kTokens;
    at.head = 0;
    at.chunk = at.piece.begin + (scan.reverse != (S::kMode == kSums) ? (chunks - 1) * kTokens : 0);
    return chunks * heads();
  }
  __device__ __forceinline__ void next_step(Cursor& at) const {
    if (kGroupedHeads && ++at.head < scan.y_group) return;
    at.head = 0;
    at.chunk += scan.reverse != (S::kMode == kSums) ? -kTokens : kTokens;
  }
  __device__ __forceinline__ void next_piece(Cursor& at) const {
    at.valid = false;
    if (scan.cu_seqlens == nullptr || S::kMode == kSums) return;
    at.request += scan.reverse ? -1 : 1;
    at.find_piece(scan, kTokens);
  }

  // Warp 0 of the copy group.
  __device__ __forceinline__ void copy_tiles(Cursor at) {
    const int lane = threadIdx.x % 32;
    const bool with_source = kOut && scan.row_dot != nullptr;
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
        const int y_head = state_head * scan.y_group + at.head;
        if (lane == 0) {
          const uint32_t full = shared_address(barrier);
          hopper::barrier_arrive_expecting(full, stage_bytes);
          if (kUpdates) {
            for (int box = 0; box < kBoxes; ++box)
              hopper::copy_in(tile(place.slot, kYTile + box), &maps.y, 64 * box, token, y_head, batch, full);
          }
          if (kOut) {
            for (int box = 0; box < kBoxes; ++box)
              hopper::copy_in(tile(place.slot, box), &maps.x, 64 * box, token, x_head, batch, full);
          }
          if (kUpdates) {
            for (int box = 0; box < kGroups; ++box)
              hopper::copy_in(tile(place.slot, kZTile + box), &maps.z, slice * S::kColumns + 64 * box, token, y_head, batch,
                              full);
          }
          if (with_source) {
            for (int box = 0; box < kGroups; ++box)
              hopper::copy_in(tile(place.slot, kSourceTile + box), &maps.source, slice * S::kColumns + 64 * box, token, x_head,
                              batch, full);
          }
        }
        __syncwarp();
        if (foreign) {
          wait(&small.landed, landed_parity);
          landed_parity ^= 1;
          const int boxes = stage_bytes / kBox, first = end - token;
          for (int i = lane; i < boxes * (kTokens - first) * 8; i += 32) {
            const int line = i / 8, box = line / (kTokens - first), row = first + line % (kTokens - first);
            store_16_bytes(tile(place.slot, box) + row * 128 + i % 8 * 16, make_uint4(0, 0, 0, 0));
          }
          hopper::fence_async();
          arrive_warp(&small.full[place.slot]);
        }
      }
    }
  }

  // Whether chunks have tables of their own.
  __device__ __forceinline__ bool by_token() const {
    return scan.decay_per_token || scan.x_factor.data != nullptr || scan.x_rank1.data != nullptr ||
           scan.y_factor.data != nullptr || scan.y_rank1.data != nullptr || scan.z_factor.data != nullptr || scan.y_group > 1;
  }
  __device__ __forceinline__ void make_usual_table(Cursor at) {
    at.chunk = at.piece.begin = at.head = 0;
    at.piece.end = at.request_span.end = 2 * kTokens;
    fill_table<T, kTokens>(scan, Base::pass, state_head, threadIdx.x % 32, at, small.table[S::kMaxStages],
                           [](int, int) { return 0.0f; });
  }
  // Warps 1 and 2 of the copy group: one alone where all tables are the same but for few, else each for some places.
  __device__ __forceinline__ void make_tables(Cursor at, int turn) {
    const int lane = threadIdx.x % 32;
    const bool of_rows = by_token();
    if (!of_rows && turn == 0) make_usual_table(at);
    Place place;
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        if ((of_rows ? place.slot % 2 : 0) != turn) continue;
        wait(&small.empty[place.slot], place.parity ^ 1);
        const int end = at.chunk_end(kTokens);
        const bool is_usual =
            !of_rows && end - at.chunk == kTokens && !(scan.reverse && end == at.request_span.end);
        if (lane == 0) small.table_of[place.slot] = is_usual ? S::kMaxStages : place.slot;
        if (!is_usual) {
          const int y_head = state_head * scan.y_group + at.head;
          const auto factor_at = [&](const ChunkFactor& factor, int head, int row) {
            return factor.data[batch * factor.batch + head * factor.head + (at.chunk + row) * factor.token];
          };
          fill_table<T, kTokens>(scan, Base::pass, state_head, lane, at, small.table[place.slot], [&](int kind, int row) {
            switch (kind) {
              case 0:
                return scan.log_decay[batch * scan.decay_batch + state_head * scan.decay_head +
                                      (at.chunk + row + (scan.reverse ? 1 : 0)) * scan.decay_token];
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
    Place out;
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at)) {
        if (kGroupedHeads && at.head + 1 != scan.y_group) continue;
        const int rows = at.chunk_end(kTokens) - at.chunk;
        wait(&small.out_full[out.slot], out.parity);
        for (int group = 0; group < kGroups; ++group) {
          const uint32_t from = out_at + (out.slot * kGroups + group) * kBox;
          if (rows == kTokens || at.chunk + rows == scan.tokens) {
            if (lane == 0) hopper::copy_out(&maps.out, from, column + 64 * group, at.chunk, x_head, batch);
            continue;
          }
          for (int i = lane; i < rows * 8; i += 32) {
            const int row = i / 8, chunk = i % 8, at_column = column + 64 * group + chunk * 8;
            if (at_column < scan.z.width)
              *reinterpret_cast<uint4*>(out_row(at.chunk + row) + at_column) =
                  load_16_bytes(from + chunk_offset<kTokens>(row, chunk));
          }
        }
        if (lane == 0) hopper::copies_out_read();
        arrive_warp(&small.out_empty[out.slot]);
        out.next(2);
      }
    }
    // The pass before may have nothing for this block, but has to end before it.
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
  __device__ __forceinline__ bool begins_scan(const Cursor& at) const {
    return scan.causal && at.begins_request(scan.reverse);
  }

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
      float y_sum = 0.0f, count = 0.0f, after = 1.0f, kept = 1.0f;  // y_sum: of column `thread`
      if (kFull && scan.row_sums) {
        if (kOut && !begins_scan(at)) {
          from_slots([&](float* const(&slots)[kSlotBatch], const float(&weights)[kSlotBatch]) {
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
          if (thread < kWidth) put_y_sum(thread, y_sum);
          hopper::named_barrier(1, 128);
        }
      }
#pragma unroll 1
      for (; steps > 0; --steps, next_step(at), place.next(stages)) {
        wait(&small.full[place.slot], place.parity);
        const RowTable<kTokens>& table = small.table[small.table_of[place.slot]];
        if (kPairs || (kOut && scan.row_sums)) {
          float s[8][4], sums[2] = {0.0f, 0.0f};
          if (kPairs) {
            const uint32_t x = hopper::describe(tile(place.slot, 0), 0), y = hopper::describe(tile(place.slot, kYTile), 0);
            hopper::products_begin();
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k) {
              const int at_step = (k / 4 * kBox + k % 4 * 32) / 16;
              hopper::product_of_tiles(T{}, s, x + at_step, y + at_step, k > 0);
            }
            hopper::products_commit();
          }
          wait(&small.scores_empty[scores.slot], scores.parity ^ 1);
          if (kPairs) {
            hopper::products_wait<0>();
            hopper::products_keep(s);
            if (S::kScaledLast && !table.steep) mask_scores(table, scores_at + scores.slot * kBox, warp, lane, s);
            else finish_scores(table, scores_at + scores.slot * kBox, warp, lane, s, sums);
          }
          if (kFull && scan.row_sums) finish_row_sums(at, place.slot, scores.slot, warp, lane, sums, count);
          hopper::fence_async();
          arrive_warp(&small.scores_full[scores.slot]);
          scores.next(2);
        }
        if (kFull && kUpdates && scan.row_sums) {
          const float weight = kOut ? 1.0f : after;
          count = (kOut ? table.kept : 1.0f) * count + weight * table.count;
          if (thread < kWidth) y_sum = (kOut ? table.kept : 1.0f) * y_sum + weight * sum_column(table, place.slot, thread);
          if (kOut) {
            hopper::named_barrier(1, 128);
            if (thread < kWidth) put_y_sum(thread, y_sum);
            hopper::named_barrier(1, 128);
          }
          kept *= table.kept;
          if (at.head + 1 == heads()) after = kept;
        }
        arrive_warp(&small.empty[place.slot]);
      }
      if (kFull && kUpdates && slice == 0 && scan.row_sums && thread < K) {
        const LastSums to = Base::last_sums(at);
        if (!kOut && begins_scan(at)) {
          const FirstSums from = Base::first_sums(at);
          if (from.y_sum != nullptr) y_sum += after * from.y_sum[thread];
        }
        if (to.y_sum != nullptr) to.y_sum[thread] = to.factor * y_sum;
      }
    }
  }

  __device__ __forceinline__ void put_y_sum(int column, float sum) const {
    if constexpr (S::kSplitSums) {
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const uint32_t bits = pack_pair(T{}, sum, 0.0f);
        small.y_sum_parts[part][column] = static_cast<uint16_t>(bits);
        sum = pair_not_finite(T{}, bits) ? 0.0f : sum - unpack_pair(T{}, bits).x;
      }
    } else {
      small.y_sum[column] = sum;
    }
  }

  // Column `thread` of the sum of the rows of Y, each times its to_y_sum. By whole warps.
  __device__ __forceinline__ float sum_column(const RowTable<kTokens>& table, int stage, int thread) const {
    if constexpr (S::kSplitSums) {
      // The left operand has the factors in row 0 and what their rounding left in row 1.
      const int warp = thread / 32, lane = thread % 32;
      float c[4][4] = {};
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) {
        uint32_t a[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 factor = *reinterpret_cast<const float2*>(&table.to_y_sum[16 * step + 8 * half + 2 * (lane % 4)]);
          const uint32_t high = pack_pair(T{}, factor.x, factor.y);
          const float2 taken = unpack_pair(T{}, high);
          const uint32_t low = pack_pair(T{}, factor.x - taken.x, factor.y - taken.y);
          a[2 * half] = lane < 4 ? high : lane < 8 ? low : 0;
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t b[4];
          load_matrices_transposed(
              b, tile(stage, kYTile) + chunk_offset<kTokens>(16 * step + lane % 16, 4 * warp + 2 * pair + lane / 16));
          mma(T{}, c[2 * pair], a, b[0], b[1]);
          mma(T{}, c[2 * pair + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = c[t][i] + __shfl_down_sync(kFullWarp, c[t][i], 4);
          if (lane < 4) small.column_sums[32 * warp + 8 * t + 2 * lane + i] = sum;
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
        sum += table.to_y_sum[j] *
               unpack_one(T{}, load_2_bytes(column + j * 128 + ((thread / 8 ^ j) % 8) * 16 + thread % 8 * 2));
      return sum;
    }
  }

  // Of rows lane / 4 and the eighth after it of a warp's 16 rows of X: this lane's part of their products with y_sum.
  __device__ __forceinline__ void times_y_sum(int stage, int warp, int lane, float (&carried)[2]) const {
    if constexpr (S::kSplitSums) {
      float c[4] = {};
      const int part = lane / 4;
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k) {
        uint32_t a[4], b[2] = {0, 0};
        load_matrices(a, tile(stage, 0) + chunk_offset<kTokens>(16 * warp + lane % 16, 2 * k + lane / 16));
        if (part < 3) {
          b[0] = *reinterpret_cast<const uint32_t*>(&small.y_sum_parts[part][16 * k + 2 * (lane % 4)]);
          b[1] = *reinterpret_cast<const uint32_t*>(&small.y_sum_parts[part][16 * k + 8 + 2 * (lane % 4)]);
        }
        mma(T{}, c, a, b[0], b[1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        carried[half] = lane % 4 == 0 ? c[2 * half] + c[2 * half + 1] : lane % 4 == 1 ? c[2 * half] : 0.0f;
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
            carried[half] += pair.x * small.y_sum[chunk * 8 + 2 * j] + pair.y * small.y_sum[chunk * 8 + 2 * j + 1];
          }
        }
      }
    }
  }

  // Scores over the decay since the chunk's begin. Tiles that no row of the warp sees stay 0.
  __device__ __forceinline__ void mask_scores(const RowTable<kTokens>& table, uint32_t to, int warp, int lane,
                                              const float (&s)[8][4]) const {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (scan.reverse ? t < 2 * warp : t > 2 * warp + 1) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const float2 factor = *reinterpret_cast<const float2*>(&table.from_begin[j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half;
        const float p0 = (scan.reverse ? j >= i : j <= i) ? s[t][2 * half] * factor.x : 0.0f;
        const float p1 = (scan.reverse ? j + 1 >= i : j + 1 <= i) ? s[t][2 * half + 1] * factor.y : 0.0f;
        store_4_bytes(to + chunk_offset<kTokens>(i, t) + lane % 4 * 4, pack_pair(T{}, p0, p1));
      }
    }
  }

  // Tiles that no row of the warp sees stay 0.
  __device__ __forceinline__ void finish_scores(const RowTable<kTokens>& table, uint32_t to, int warp, int lane,
                                                const float (&s)[8][4], float (&sums)[2]) const {
    const bool decays = !kFull || scan.log_decay != nullptr;
    const int row = 16 * warp + lane / 4;
    float2 row_decay[2];
    float x_factor[2], x_rank1[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_decay[half] = table.log2_decay[row + 8 * half];
      x_factor[half] = table.x_factor[row + 8 * half];
      x_rank1[half] = kFull ? table.x_rank1[row + 8 * half] : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (scan.reverse ? t < 2 * warp : t > 2 * warp + 1) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const float4 decay = *reinterpret_cast<const float4*>(&table.log2_decay[j]);
      const float2 factor = *reinterpret_cast<const float2*>(kFull ? &table.y_factor[j] : &table.own[j]);
      float2 rank1 = {}, z_factor = {};
      if (kFull) {
        rank1 = *reinterpret_cast<const float2*>(&table.y_rank1[j]);
        z_factor = *reinterpret_cast<const float2*>(&table.z_factor[j]);
      }
      float p[4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float x = s[t][2 * half + c] * x_factor[half] * (c == 0 ? factor.x : factor.y);
          if (kFull) x += x_rank1[half] * (c == 0 ? rank1.x : rank1.y);
          if (decays) {
            const float low = row_decay[half].y - (c == 0 ? decay.y : decay.w);
            x *= exp2_fast(row_decay[half].x - (c == 0 ? decay.x : decay.z) + low);
          }
          const int i = row + 8 * half;
          if (scan.reverse ? j + c < i : j + c > i) x = 0.0f;
          if (kFull) {
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

  // sums: of the two rows of P that this lane has a part of. Leaves what rows of out are divided by.
  __device__ __forceinline__ void finish_row_sums(const Cursor& at, int stage, int buffer, int warp, int lane,
                                                  const float (&sums)[2], float count) {
    const RowTable<kTokens>& table = small.table[small.table_of[stage]];
    const int rows = at.chunk_end(kTokens) - at.chunk;
    float parts[2];
    times_y_sum(stage, warp, lane, parts);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + 8 * half + lane / 4;
      float own = sums[half], carried = parts[half];
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        own += __shfl_xor_sync(kFullWarp, own, offset);
        carried += __shfl_xor_sync(kFullWarp, carried, offset);
      }
      const float sum = own + table.from_state[row] * carried + table.from_sum[row] * count;
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
    float state[kWidth / 8][4], o[8][4];
    for (; at.valid; next_piece(at)) {
      int steps = begin_piece(at);
      float z_sum[2] = {0.0f, 0.0f}, after = 1.0f, kept = 1.0f, count = 0.0f;
      double log2_kept = 0.0;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) state[n][c] = 0.0f;
      if (kOut && !begins_scan(at)) {
        from_slots([&](float* const(&slots)[kSlotBatch], const float(&weights)[kSlotBatch]) {
          add_slots(state, slots, weights, column, lane);
          if constexpr (kFull) {
            if (!scan.rank1) return;
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
        const RowTable<kTokens>& table = small.table[small.table_of[place.slot]];
        if constexpr (!kOut) {
          uint32_t scaled[4][4];
          load_columns(tile(place.slot, kZTile + group), warp, lane, scaled);
          scale_columns(table, lane, after, scaled, z_sum);
          to_state(place.slot, scaled, state);
          count += after * table.count;
          log2_kept += table.log2_kept;
          kept *= table.kept;
          if (last) after = kept;
          hopper::products_wait<0>();
          hopper::products_keep(state);
          arrive_warp(&small.empty[place.slot]);
        } else if (S::kScaledLast && !table.steep) {
          wait(&small.scores_full[scores.slot], scores.parity);
          uint32_t packed[kWidth / 16][4], z[4][4], scaled[4][4];
          float one[2] = {1.0f, 1.0f};
          pack_state(state, packed, one);
          load_columns(tile(place.slot, kZTile + group), warp, lane, z);
          const bool odd = has_odd(z);
          if (odd) take_out_odd(z);
          from_state(place.slot, packed, o, false);
          from_scores(scores.slot, z, o);
          if (odd) {
            load_columns(tile(place.slot, kZTile + group), warp, lane, scaled);
          } else {
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
              for (int i = 0; i < 4; ++i) scaled[step][i] = z[step][i];
          }
          scale_columns(table, lane, 1.0f, scaled, z_sum);
          const float kept = table.kept;
#pragma unroll
          for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) state[n][c] *= kept;
          to_state(place.slot, scaled, state);
          hopper::products_wait<1>();
          hopper::products_keep(o);
          if (odd) add_odd(place.slot, scores.slot, group, warp, lane, o);
          arrive_warp(&small.scores_empty[scores.slot]);
          scores.next(2);
          scale_rows(table, lane, one, z_sum, o);
          if (scan.row_dot != nullptr) write_dots(at, place.slot, out.slot, group, warp, lane, o);
          write_rows(group, warp, lane, out, o);
          hopper::products_wait<0>();
          hopper::products_keep(state);
          arrive_warp(&small.empty[place.slot]);
        } else {
          const float sum_before[2] = {z_sum[0], z_sum[1]};
          float unscale[2] = {1.0f, 1.0f};
          if (first) {
            uint32_t packed[kWidth / 16][4];
            pack_state(state, packed, unscale);
            from_state(place.slot, packed, o, true);
            if (S::kMode != kSingle) {
              hopper::products_wait<0>();
              hopper::products_keep(o);
              scale_rows(table, lane, unscale, sum_before, o);
            }
          }
          if constexpr (kUpdates) {
            uint32_t scaled[4][4];
            load_columns(tile(place.slot, kZTile + group), warp, lane, scaled);
            scale_columns(table, lane, 1.0f, scaled, z_sum);
            const float kept = table.kept;
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
              for (int c = 0; c < 4; ++c) state[n][c] *= kept;
            to_state(place.slot, scaled, state);
            if (S::kMode == kSingle) {
              hopper::products_wait<1>();
              hopper::products_keep(o);
              scale_rows(table, lane, unscale, sum_before, o);
            }
          }
          const bool with_scores = kPairs || scan.row_sums;
          bool odd = false;
          if constexpr (kPairs) {
            uint32_t z[4][4];
            load_columns(tile(place.slot, kZTile + group), warp, lane, z);
            wait(&small.scores_full[scores.slot], scores.parity);
            odd = has_odd(z);
            if (odd) take_out_odd(z);
            hopper::products_begin();
            from_scores(scores.slot, z, o);
            hopper::products_wait<0>();
            hopper::products_keep(o);
            hopper::products_keep(state);
            if (odd) add_odd(place.slot, scores.slot, group, warp, lane, o);
          } else if (with_scores) {
            wait(&small.scores_full[scores.slot], scores.parity);
          }
          if (last) {
            if (scan.row_dot != nullptr) write_dots(at, place.slot, out.slot, group, warp, lane, o);
            if (kFull && scan.divide) {
#pragma unroll
              for (int n = 0; n < 8; ++n) {
                const float2 by = *reinterpret_cast<const float2*>(&small.divisor[scores.slot][8 * n + 2 * (lane % 4)]);
                const float2 factor = make_float2(__frcp_rn(by.x), __frcp_rn(by.y));
                o[n][0] *= factor.x, o[n][1] *= factor.y, o[n][2] *= factor.x, o[n][3] *= factor.y;
              }
            }
          }
          arrive_warp(&small.empty[place.slot]);
          if (with_scores) {
            arrive_warp(&small.scores_empty[scores.slot]);
            scores.next(2);
          }
          if (last) write_rows(group, warp, lane, out, o);
        }
      }
      if constexpr (!kOut) {
        if (begins_scan(at)) {
          const FirstSums from = Base::first_sums(at);
          count += after * from.count;
          add_first(at, state, z_sum, after, column, lane);
        }
        float* const slot = Base::slot(scan.slots, segment);
        write_slot(state, slot, column, lane);
        float* const rest = slot + static_cast<int64_t>(K) * V + K + V;
        if (slice == 0 && group == 0 && thread == 0) Base::write_slot_rest(at, rest, count, cut ? -16384.0 : log2_kept);
        if (kFull && lane % 4 == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (column + 8 * half < V) rest[column + 8 * half - V] = z_sum[half];
        }
      } else if constexpr (kUpdates) {
        const LastSums to = Base::last_sums(at);
        write_state<kWidth>(state, to, K, V, column, lane);
        if (kFull && to.z_sum != nullptr && scan.rank1 && lane % 4 == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (column + 8 * half < V) to.z_sum[column + 8 * half] = to.factor * z_sum[half];
        }
      }
    }
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
    if constexpr (kFull) {
      if (from.z_sum == nullptr || !scan.rank1) return;
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
            float(&to)[4] = state[part + n];
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
    const uint32_t p = hopper::describe(scores_at + buffer * kBox, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) hopper::product<false>(T{}, o, z[k], p + k * 2, 1);
    hopper::products_commit();
  }

  // Oᵀ = Sᵀ Xᵀ; alone: nothing follows in the same group.
  __device__ __forceinline__ void from_state(int stage, const uint32_t (&packed)[kWidth / 16][4], float (&o)[8][4],
                                             bool alone) const {
    const uint32_t x = hopper::describe(tile(stage, 0), 0);
    hopper::products_begin();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
      hopper::product<false>(T{}, o, packed[k], x + (k / 4 * kBox + k % 4 * 32) / 16, k > 0);
    if (alone) hopper::products_commit();
  }

  // Sᵀ += Z'ᵀ Y
  __device__ __forceinline__ void to_state(int stage, const uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4]) const {
    const uint32_t y = hopper::describe(tile(stage, kYTile), kBox);
    hopper::products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) hopper::product<true>(T{}, state, scaled[k], y + k * 128, 1);
    hopper::products_commit();
  }

  __device__ __forceinline__ void scale_rows(const RowTable<kTokens>& table, int lane, const float (&unscale)[2],
                                             const float (&sum)[2], float (&o)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int row = 8 * n + 2 * (lane % 4);
      const float2 factor = *reinterpret_cast<const float2*>(&table.from_state[row]);
      o[n][0] *= factor.x * unscale[0], o[n][1] *= factor.y * unscale[0];
      o[n][2] *= factor.x * unscale[1], o[n][3] *= factor.y * unscale[1];
      if (kFull) {
        const float2 of_sum = *reinterpret_cast<const float2*>(&table.from_sum[row]);
        o[n][0] += of_sum.x * sum[0], o[n][1] += of_sum.y * sum[0];
        o[n][2] += of_sum.x * sum[1], o[n][3] += of_sum.y * sum[1];
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
        for (int n = 0; n < kWidth / 8; ++n)
          top = fmaxf(top, fmaxf(fabsf(state[n][2 * half]), fabsf(state[n][2 * half + 1])));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        power_of_two_scale(top, scale[half], unscale[half]);
      }
    }
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = state[2 * k + i / 2];
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
  __device__ __forceinline__ void scale_columns(const RowTable<kTokens>& table, int lane, float weight,
                                                uint32_t (&scaled)[4][4], float (&z_sum)[2]) const {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * step + 8 * half + 2 * (lane % 4);
        float2 factor = *reinterpret_cast<const float2*>(&table.to_state[row]), to_sum = {};
        if (!kOut) factor.x *= weight, factor.y *= weight;
        if (kFull) to_sum = *reinterpret_cast<const float2*>(&table.to_z_sum[row]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 x = unpack_pair(T{}, scaled[step][2 * half + i]);
          scaled[step][2 * half + i] = pack_pair(T{}, x.x * factor.x, x.y * factor.y);
          if (kFull) sums[i] += to_sum.x * x.x + to_sum.y * x.y;
        }
      }
    if constexpr (kFull) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
        z_sum[half] = kOut ? table.kept * z_sum[half] + sums[half] : z_sum[half] + weight * sums[half];
      }
    }
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
          if (odd[c / 2] && (scan.reverse ? j >= i : j <= i))
            o[n][c] += unpack_one(T{}, load_2_bytes(p + chunk_offset<kTokens>(i, j / 8) + j % 8 * 2)) *
                       unpack_one(T{}, static_cast<uint16_t>(bits[c / 2]));
        }
    }
  }

  __device__ __forceinline__ void write_dots(const Cursor& at, int stage, int buffer, int group, int warp, int lane,
                                             const float (&o)[8][4]) const {
    const uint32_t from = tile(stage, kSourceTile + group);
    float(&to)[kTokens] = small.dots[buffer][4 * group + warp];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      load_matrices_transposed(a, from + chunk_offset<kTokens>(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float2 x0 = unpack_pair(T{}, a[2 * t]), x1 = unpack_pair(T{}, a[2 * t + 1]);
        float sums[2] = {x0.x * o[2 * step + t][0] + x1.x * o[2 * step + t][2],
                         x0.y * o[2 * step + t][1] + x1.y * o[2 * step + t][3]};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2) sums[c] += __shfl_xor_sync(kFullWarp, sums[c], offset);
          if (lane < 4) to[16 * step + 8 * t + 2 * lane + c] = sums[c];
        }
      }
    }
    hopper::named_barrier(2, 128 * kGroups);
    const int rows = at.chunk_end(kTokens) - at.chunk, row = threadIdx.x % 128;
    if (group != 0 || row >= rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4 * kGroups; ++w) sum += small.dots[buffer][w][row];
    *Base::row_dot_at(at.chunk + row) = sum;
  }

  // Through shared memory, so that whole lines leave.
  __device__ __forceinline__ void write_rows(int group, int warp, int lane, Place& out, const float (&o)[8][4]) const {
    const uint32_t tile = out_at + (out.slot * kGroups + group) * kBox;
    const float out_times = kFull && scan.out_times != nullptr ? *scan.out_times : 1.0f;
    wait(&small.out_empty[out.slot], out.parity ^ 1);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r[i] = pack_pair(T{}, o[n + i / 2][i % 2 * 2] * out_times, o[n + i / 2][i % 2 * 2 + 1] * out_times);
      // Matrix i: tokens 8 (n + i / 2) .. + 7, columns 8 (i % 2) .. + 7 of the warp's.
      hopper::store_matrices_transposed(
          tile + chunk_offset<kTokens>(8 * (n + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), r);
    }
    hopper::fence_async();
    arrive_warp(&small.out_full[out.slot]);
    out.next(2);
  }

  // Leaves only the tokens of a segment whose part in its sums is more than 2^-24 of what it would be without decay.
  __device__ __forceinline__ bool cut_to_window(Cursor& at) const {
    if (scan.log_decay == nullptr || scan.decay_per_token || !scan.causal) return false;
    const int length = at.piece.end - at.piece.begin;
    const float tokens = 24.0f / (-kLog2E * scan.log_decay[state_head]);
    if (!(tokens < static_cast<float>(length - kTokens))) return false;
    const int window = static_cast<int>(tokens) + 1;
    if (scan.reverse) at.piece.end = at.piece.begin + (window + kTokens - 1) / kTokens * kTokens;
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
        for (int s = 0; s < stages; ++s) {
          hopper::barrier_init(shared_address(&small.full[s]), 2);
          hopper::barrier_init(shared_address(&small.empty[s]), 4 * (kGroups + S::kScores));
        }
        hopper::barrier_init(shared_address(&small.landed), 1);
        for (int s = 0; s < 2; ++s) {
          hopper::barrier_init(shared_address(&small.scores_full[s]), 4);
          hopper::barrier_init(shared_address(&small.scores_empty[s]), 4 * kGroups);
          hopper::barrier_init(shared_address(&small.out_full[s]), 4 * kGroups);
          hopper::barrier_init(shared_address(&small.out_empty[s]), 1);
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
      score(at);
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

template <class T, int kWidth, int kGroups, int kMode, bool kFull>
__global__ void __launch_bounds__(HopperShape<T, kWidth, kGroups, kMode, kFull>::kThreads, 1)
    ChunkScanHopperKernel(const __grid_constant__ ChunkScan scan, const __grid_constant__ ChunkMaps maps, int stages) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using S = HopperShape<T, kWidth, kGroups, kMode, kFull>;
  extern __shared__ char dynamic[];
  char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  const int stage_bytes = S::kBox * ((S::kOut ? S::kBoxes : 0) + (S::kUpdates ? S::kBoxes + kGroups : 0) +
                                     (S::kOut && scan.row_dot != nullptr ? kGroups : 0));
  const uint32_t stages_at = shared_address(shared), scores_at = stages_at + stages * stage_bytes;
  auto& small = *reinterpret_cast<typename S::Small*>(shared + stages * stage_bytes + S::kFixedTiles * S::kBox);
  HopperBlock<S, T> block{{scan, S::kOut ? kOutputs : kSegmentSums, blockIdx.x}, maps, small, stages_at,
                          scores_at, scores_at + 2 * S::kBox, stages, stage_bytes};
  block.run();
#endif
}

template <class T, int kWidth, int kGroups, int kMode, bool kFull>
int launch_hopper_mode(const ChunkScan& scan, const ChunkMaps& maps, bool overlap, int max_shared_bytes, void* stream) {
  using S = HopperShape<T, kWidth, kGroups, kMode, kFull>;
  const int stage_bytes = S::stage_bytes(scan.row_dot != nullptr);
  int stages = (max_shared_bytes - S::fixed_bytes()) / stage_bytes;
  if (stages > S::kMaxStages) stages = S::kMaxStages;
  const int bytes = S::fixed_bytes() + stages * stage_bytes;
  const auto kernel = ChunkScanHopperKernel<T, kWidth, kGroups, kMode, kFull>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t segments = S::kOut || !scan.causal ? scan.segments : scan.segments - 1;
  const int64_t heads = S::kOut ? scan.heads : scan.heads / scan.x_group;
  const int64_t blocks = scan.batch * heads * segments * scan.slices;
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, scan, maps, stages);
}

constexpr int kHopperMaxWidth = 128;

template <class T, int kWidth, int kGroups>
int launch_hopper_shape(const ChunkScan& scan, const ChunkMaps& maps, int pass, bool overlap, int max_shared_bytes,
                        void* stream) {
  const auto launch = [&](auto launcher) { return launcher(scan, maps, overlap, max_shared_bytes, stream); };
  const bool full = scan.rank1 || scan.row_sums;
  if (pass == kSegmentSums)
    return full ? launch(launch_hopper_mode<T, kWidth, kGroups, kSums, true>)
                : launch(launch_hopper_mode<T, kWidth, kGroups, kSums, false>);
  if (!scan.causal) return launch(launch_hopper_mode<T, kWidth, kGroups, kWhole, true>);
  if (scan.y_group > 1) return launch(launch_hopper_mode<T, kWidth, kGroups, kGrouped, true>);
  return full ? launch(launch_hopper_mode<T, kWidth, kGroups, kSingle, true>)
              : launch(launch_hopper_mode<T, kWidth, kGroups, kSingle, false>);
}

// overlap: the pass before may still run, and this one waits for it where it needs its sums.
template <class T>
int launch_hopper(const ChunkScan& scan, const ChunkMaps& maps, int pass, bool overlap, int max_shared_bytes, void* stream) {
  const bool narrow = scan.z.width <= 64;
  const auto launch = [&](auto launcher) { return launcher(scan, maps, pass, overlap, max_shared_bytes, stream); };
  if (scan.y.width > 64) return narrow ? launch(launch_hopper_shape<T, 128, 1>) : launch(launch_hopper_shape<T, 128, 2>);
  return narrow ? launch(launch_hopper_shape<T, 64, 1>) : launch(launch_hopper_shape<T, 64, 2>);
}

}  // namespace chunk
}  // namespace leanfleet
