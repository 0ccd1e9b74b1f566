// The kernel of chunk_scan.h for Hopper: float16 and bfloat16 with K up to 128, in chunks of 64 tokens. The products are
// those of chunk_scan.cuh; here warpgroups share them out and run ahead of each other:
//
//   state groups  (1 or 2) each 64 columns of Z, with Sᵀ in its accumulators: Oᵀ and Sᵀ
//   score group   P, row sums, the sum of y
//   copy group    warp 0 has the copy engine bring tiles, warp 1 makes the tables of rows
//
// A stage of the ring is a chunk's X, Y, Z and, for row_dot, source, as boxes of 64 columns, and its table.
#pragma once

#include "core/chunk_scan.cuh"
#include "core/hopper.cuh"

namespace leanfleet {
namespace chunk {

struct ChunkMaps {
  CUtensorMap x, y, z, source, out;
};

template <class T, int kWidth_, int kGroups_>
struct HopperShape {
  static constexpr int kWidth = kWidth_, kGroups = kGroups_;
  static constexpr int kTokens = 64, kColumns = 64 * kGroups, kBox = 8192, kBoxes = kWidth / 64;
  static constexpr int kThreads = 128 * (kGroups + 2), kMaxStages = 6;
  static constexpr int kStateRegisters = kGroups == 2 ? 184 : 232, kScoreRegisters = kGroups == 2 ? 88 : 144;
  static constexpr int kCopyRegisters = kGroups == 2 ? 56 : 120;
  struct Small {
    uint64_t full[kMaxStages], empty[kMaxStages], landed, scores_full[2], scores_empty[2];
    RowTable<kTokens> table[kMaxStages];
    float divisor[2][kTokens];
    float y_sum[kWidth];
    float dots[2][4 * kGroups][kTokens];
  };
  static int stage_bytes(bool source) { return kBox * (2 * kBoxes + (source ? 2 : 1) * kGroups); }
  // Besides stages: P twice, and rows on their way out.
  static int fixed_bytes() { return 1024 + 2 * kBox + kGroups * kBox + static_cast<int>(sizeof(Small)); }
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
  using Base::scan, Base::pass, Base::batch, Base::x_head, Base::state_head, Base::slice, Base::segment, Base::out_row;
  static constexpr int kTokens = S::kTokens, kWidth = S::kWidth, kGroups = S::kGroups, kBox = S::kBox, kBoxes = S::kBoxes;

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

  __device__ __forceinline__ bool outputs() const { return pass == kOutputs; }
  __device__ __forceinline__ bool updates() const { return pass == kSegmentSums || scan.causal; }
  __device__ __forceinline__ bool pairs() const { return outputs() && scan.causal; }
  __device__ __forceinline__ uint32_t tile(int stage, int box) const { return stages_at + stage * stage_bytes + box * kBox; }
  __device__ __forceinline__ uint32_t y_tile(int stage) const { return tile(stage, kBoxes); }
  __device__ __forceinline__ uint32_t z_tile(int stage) const { return tile(stage, 2 * kBoxes); }
  __device__ __forceinline__ uint32_t source_tile(int stage) const { return tile(stage, 2 * kBoxes + kGroups); }

  static __device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::barrier_arrive(shared_address(barrier));
  }
  static __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    hopper::barrier_wait(shared_address(barrier), parity);
  }

  // Warp 0 of the copy group.
  __device__ __forceinline__ void copy_tiles(Cursor at) {
    const int lane = threadIdx.x % 32;
    Place place;
    uint32_t landed_parity = 0;
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens), place.next(stages)) {
      wait(&small.empty[place.slot], place.parity ^ 1);
      const int token = at.chunk, end = at.chunk_end(kTokens);
      // Rows past the tensor's end come as 0, those of another request do not.
      const bool foreign = end - token < kTokens && end < scan.tokens;
      uint64_t* const barrier = foreign ? &small.landed : &small.full[place.slot];
      const int y_head = state_head * scan.y_group + at.head;
      const bool with_source = outputs() && scan.row_dot != nullptr;
      if (lane == 0) {
        const uint32_t full = shared_address(barrier);
        const int boxes = (outputs() ? kBoxes : 0) + (updates() ? kBoxes + kGroups : 0) + (with_source ? kGroups : 0);
        hopper::barrier_arrive_expecting(full, boxes * kBox);
        if (outputs())
          for (int box = 0; box < kBoxes; ++box)
            hopper::copy_in(tile(place.slot, box), &maps.x, 64 * box, token, x_head, batch, full);
        if (updates()) {
          for (int box = 0; box < kBoxes; ++box)
            hopper::copy_in(y_tile(place.slot) + box * kBox, &maps.y, 64 * box, token, y_head, batch, full);
          for (int box = 0; box < kGroups; ++box)
            hopper::copy_in(z_tile(place.slot) + box * kBox, &maps.z, slice * S::kColumns + 64 * box, token, y_head, batch,
                            full);
        }
        if (with_source)
          for (int box = 0; box < kGroups; ++box)
            hopper::copy_in(source_tile(place.slot) + box * kBox, &maps.source, slice * S::kColumns + 64 * box, token, x_head,
                            batch, full);
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

  // Warp 1 of the copy group.
  __device__ __forceinline__ void make_tables(Cursor at) {
    const int lane = threadIdx.x % 32;
    Place place;
    const bool by_token = scan.decay_per_token || scan.x_factor.data != nullptr || scan.x_rank1.data != nullptr ||
                          scan.y_factor.data != nullptr || scan.y_rank1.data != nullptr || scan.z_factor.data != nullptr ||
                          scan.y_group > 1;
    uint32_t usual = 0;  // stages whose table is that of a whole chunk within a request
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens), place.next(stages)) {
      wait(&small.empty[place.slot], place.parity ^ 1);
      const int end = at.chunk_end(kTokens);
      const bool is_usual =
          !by_token && end - at.chunk == kTokens && !(scan.reverse && end == at.request_span.end);
      if (!is_usual || !(usual >> place.slot & 1)) {
        const int y_head = state_head * scan.y_group + at.head;
        const auto factor_at = [&](const ChunkFactor& factor, int head, int row) {
          return factor.data[batch * factor.batch + head * factor.head + (at.chunk + row) * factor.token];
        };
        fill_table<T, kTokens>(scan, pass, state_head, lane, at, small.table[place.slot], [&](int kind, int row) {
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
        usual = is_usual ? usual | 1u << place.slot : usual & ~(1u << place.slot);
      }
      arrive_warp(&small.full[place.slot]);
    }
  }

  // The score group

  template <bool kPairs>
  __device__ __forceinline__ void score(Cursor at) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Place place, scores;
    float y_sum = 0.0f, count = 0.0f;  // y_sum: of column `thread`
    double log2_kept = 0.0;
    for (int i = thread; i < 2 * kBox / 16; i += 128) store_16_bytes(scores_at + 16 * i, make_uint4(0, 0, 0, 0));
    hopper::named_barrier(1, 128);
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens), place.next(stages)) {
      const bool first = at.head == 0;
      if (first && at.first_chunk(scan, kTokens)) {
        const FirstSums from = Base::first_sums(at);
        count = from.count;
        log2_kept = 0.0;
        if (scan.row_sums) {
          y_sum = from.y_sum != nullptr && thread < scan.y.width ? from.y_sum[thread] : 0.0f;
          hopper::named_barrier(1, 128);
          if (thread < kWidth) small.y_sum[thread] = y_sum;
          hopper::named_barrier(1, 128);
        }
      }
      wait(&small.full[place.slot], place.parity);
      const RowTable<kTokens>& table = small.table[place.slot];
      if (kPairs || (outputs() && scan.row_sums)) {
        float s[8][4], sums[2] = {0.0f, 0.0f};
        if (kPairs) {
          hopper::products_begin();
#pragma unroll
          for (int k = 0; k < kWidth / 16; ++k) {
            const int at_step = k / 4 * kBox + k % 4 * 32;
            hopper::product_of_tiles(T{}, s, hopper::describe(tile(place.slot, 0) + at_step, 0),
                                     hopper::describe(y_tile(place.slot) + at_step, 0), k > 0);
          }
          hopper::products_commit();
          hopper::products_wait<0>();
          hopper::products_keep(s);
        }
        wait(&small.scores_empty[scores.slot], scores.parity ^ 1);
        if (kPairs) {
          const uint32_t to = scores_at + scores.slot * kBox;
          if (scan.rank1 || scan.row_sums) finish_scores<true, false>(table, to, warp, lane, s, sums);
          else if (table.coarse) finish_scores<false, true>(table, to, warp, lane, s, sums);
          else finish_scores<false, false>(table, to, warp, lane, s, sums);
        }
        if (scan.row_sums) finish_row_sums(at, place.slot, scores.slot, warp, lane, sums, count);
        hopper::fence_async();
        arrive_warp(&small.scores_full[scores.slot]);
        scores.next(2);
      }
      if (updates()) {
        count = table.kept * count + table.count;
        log2_kept += table.log2_kept;
        if (scan.row_sums) {
          if (thread < scan.y.width) {
            const uint32_t column = y_tile(place.slot) + thread / 64 * kBox;
            float sum = 0.0f;
#pragma unroll 8
            for (int j = 0; j < kTokens; ++j)
              sum += table.to_y_sum[j] *
                     unpack_one(T{}, load_2_bytes(column + j * 128 + ((thread / 8 ^ j) % 8) * 16 + thread % 8 * 2));
            y_sum = table.kept * y_sum + sum;
          }
          hopper::named_barrier(1, 128);
          if (thread < kWidth) small.y_sum[thread] = y_sum;
          hopper::named_barrier(1, 128);
        }
      }
      arrive_warp(&small.empty[place.slot]);
      if (updates() && slice == 0 && at.head + 1 == scan.y_group && at.last_chunk(scan, kTokens)) {
        const LastSums to = Base::last_sums(at);
        if (to.y_sum != nullptr && scan.row_sums && thread < scan.y.width) to.y_sum[thread] = to.factor * y_sum;
        if (to.slot_rest != nullptr && thread == 0) Base::write_slot_rest(at, to.slot_rest, count, log2_kept);
      }
    }
  }

  // kFull: with row sums or the terms of rank 1. Tiles that no row of the warp sees stay 0.
  template <bool kFull, bool kCoarse>
  __device__ __forceinline__ void finish_scores(const RowTable<kTokens>& table, uint32_t to, int warp, int lane,
                                                const float (&s)[8][4], float (&sums)[2]) const {
    const bool decays = scan.log_decay != nullptr;
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
            float power = row_decay[half].x - (c == 0 ? decay.x : decay.z);
            if (!kCoarse) power += row_decay[half].y - (c == 0 ? decay.y : decay.w);
            x *= exp2_fast(power);
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
    const RowTable<kTokens>& table = small.table[stage];
    const int rows = at.chunk_end(kTokens) - at.chunk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + 8 * half + lane / 4;
      float carried = 0.0f;
#pragma unroll 2
      for (int chunk = lane % 4; chunk < kWidth / 8; chunk += 4) {
        const uint4 x = load_16_bytes(tile(stage, 0) + chunk_offset<kTokens>(row, chunk));
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair(T{}, pairs[j]);
          carried += pair.x * small.y_sum[chunk * 8 + 2 * j] + pair.y * small.y_sum[chunk * 8 + 2 * j + 1];
        }
      }
      float own = sums[half];
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

  // A state group. kMode sums: Sᵀ only. whole: Oᵀ only, from the sum over all tokens. single and grouped: both, with one
  // head of y for a chunk or several. Nothing but products stands between the first and the last of a kind, or the
  // compiler makes them wait for each other.
  enum Mode { kSums, kWhole, kSingle, kGrouped };

  template <Mode kMode>
  __device__ __forceinline__ void carry(Cursor at, int group) {
    constexpr bool kPairs = kMode == kSingle || kMode == kGrouped, kUpdates = kMode != kWhole;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int column = slice * S::kColumns + 64 * group + 16 * warp + lane / 4;
    const int K = scan.y.width, V = scan.z.width;
    const float out_times = scan.out_times != nullptr ? *scan.out_times : 1.0f;
    Place place, scores;
    float state[kWidth / 8][4], z_sum[2] = {0.0f, 0.0f}, o[8][4];
    int dots = 0;
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens), place.next(stages)) {
      // Of the heads of y of a chunk; the sum over all tokens has been taken over all heads.
      const bool first = kMode == kSingle || at.head == 0;
      const bool last = kMode == kSingle || (kMode == kWhole ? at.head == 0 : at.head + 1 == scan.y_group);
      if (first && at.first_chunk(scan, kTokens)) {
        const FirstSums from = Base::first_sums(at);
        read_state<kWidth>(state, from, K, V, column, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          z_sum[half] = from.z_sum != nullptr && scan.rank1 && column + 8 * half < V ? from.z_sum[column + 8 * half] : 0.0f;
      }
      wait(&small.full[place.slot], place.parity);
      const RowTable<kTokens>& table = small.table[place.slot];
      const float sum_before[2] = {z_sum[0], z_sum[1]};
      uint32_t packed[kWidth / 16][4], z[4][4], scaled[4][4];
      float unscale[2] = {1.0f, 1.0f};
      bool odd = false;
      if (kMode != kSums) pack_state(state, packed, unscale);
      if (kMode == kGrouped && first) {
        from_state(place.slot, packed, o);
        hopper::products_wait<0>();
        hopper::products_keep(o);
        scale_rows(table, lane, unscale, sum_before, o);
      }
      if (kUpdates) {
        const uint32_t from = z_tile(place.slot) + group * kBox;
#pragma unroll
        for (int step = 0; step < 4; ++step)
          load_matrices_transposed(z[step], from + chunk_offset<kTokens>(16 * step + lane / 16 * 8 + lane % 8,
                                                                        2 * warp + lane / 8 % 2));
        scale_columns(table, lane, z, scaled, odd, z_sum);
        const float kept = table.kept;
        if (kept != 1.0f) {
#pragma unroll
          for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) state[n][c] *= kept;
        }
      }
      if (kMode == kSingle || kMode == kWhole) from_state(place.slot, packed, o);
      if (kUpdates) to_state(place.slot, scaled, state);
      if (kMode == kSingle || kMode == kWhole) {
        hopper::products_wait<kUpdates ? 1 : 0>();
        hopper::products_keep(o);
        scale_rows(table, lane, unscale, sum_before, o);
      }
      const bool with_scores = kPairs || (kMode == kWhole && scan.row_sums);
      if (with_scores) wait(&small.scores_full[scores.slot], scores.parity);
      if (kPairs) {
        // Oᵀ += Zᵀ Pᵀ
        const uint32_t p = scores_at + scores.slot * kBox;
        hopper::products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) hopper::product<false>(T{}, o, z[k], hopper::describe(p + k * 32, 0), 1);
        hopper::products_commit();
      }
      if (kUpdates) {
        hopper::products_wait<0>();
        if (kPairs) hopper::products_keep(o);
        hopper::products_keep(state);
      }
      if (kPairs && odd) add_odd(place.slot, scores.slot, group, warp, lane, o);
      if (kMode != kSums && last) {
        if (scan.row_dot != nullptr) write_dots(at, place.slot, dots, group, warp, lane, o);
        dots ^= 1;
        if (scan.divide) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float2 by = *reinterpret_cast<const float2*>(&small.divisor[scores.slot][8 * n + 2 * (lane % 4)]);
            const float2 factor = make_float2(1.0f / by.x, 1.0f / by.y);
            o[n][0] *= factor.x, o[n][1] *= factor.y, o[n][2] *= factor.x, o[n][3] *= factor.y;
          }
        }
      }
      arrive_warp(&small.empty[place.slot]);
      if (with_scores) {
        arrive_warp(&small.scores_empty[scores.slot]);
        scores.next(2);
      }
      if (kMode != kSums && last) write_rows(at, group, warp, lane, out_times, o);
      if (kUpdates && last && at.last_chunk(scan, kTokens)) {
        const LastSums to = Base::last_sums(at);
        write_state<kWidth>(state, to, K, V, column, lane);
        if (to.z_sum != nullptr && scan.rank1 && lane % 4 == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (column + 8 * half < V) to.z_sum[column + 8 * half] = to.factor * z_sum[half];
        }
      }
    }
    if (kMode != kSums && thread == 0) hopper::copies_out_read();
  }

  // Oᵀ = Sᵀ Xᵀ
  __device__ __forceinline__ void from_state(int stage, const uint32_t (&packed)[kWidth / 16][4], float (&o)[8][4]) const {
    hopper::products_begin();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
      hopper::product<false>(T{}, o, packed[k], hopper::describe(tile(stage, 0) + k / 4 * kBox + k % 4 * 32, 0), k > 0);
    hopper::products_commit();
  }

  // Sᵀ += Z'ᵀ Y
  __device__ __forceinline__ void to_state(int stage, const uint32_t (&scaled)[4][4], float (&state)[kWidth / 8][4]) const {
    hopper::products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      hopper::product<true>(T{}, state, scaled[k], hopper::describe(y_tile(stage) + k * 2048, kBox), 1);
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
      if (scan.rank1) {
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

  // Z' and the sum of z; what is not finite in z becomes 0 there, and `odd` tells.
  __device__ __forceinline__ void scale_columns(const RowTable<kTokens>& table, int lane, uint32_t (&z)[4][4],
                                                uint32_t (&scaled)[4][4], bool& odd, float (&z_sum)[2]) const {
    const bool unscaled = table.unscaled;
    float sums[2] = {0.0f, 0.0f};
    uint32_t top = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scaled[step][i] = z[step][i];
        top = __vmaxu2(top, z[step][i] & 0x7fff7fffu);
      }
    odd = __any_sync(kFullWarp, pair_not_finite(T{}, top));
    if (!unscaled || scan.rank1) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * step + i / 2 * 8 + 2 * (lane % 4);
          const float2 x = unpack_pair(T{}, z[step][i]);
          const float2 to_state = *reinterpret_cast<const float2*>(&table.to_state[row]);
          scaled[step][i] = pack_pair(T{}, x.x * to_state.x, x.y * to_state.y);
          if (scan.rank1) {
            const float2 to_sum = *reinterpret_cast<const float2*>(&table.to_z_sum[row]);
            sums[i % 2] += to_sum.x * x.x + to_sum.y * x.y;
          }
        }
    }
    if (odd) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (pair_not_finite(T{}, z[step][i])) z[step][i] = 0;
    }
    if (!scan.rank1) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
      sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
      z_sum[half] = table.kept * z_sum[half] + sums[half];
    }
  }

  // What scale_columns took out, for the tokens that see it.
  __device__ __forceinline__ void add_odd(int stage, int buffer, int group, int warp, int lane, float (&o)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        o[n][c] += odd_scores_times_column<T>(scores_at + buffer * kBox, z_tile(stage) + group * kBox,
                                              8 * n + 2 * (lane % 4) + c % 2, 16 * warp + lane / 4 + c / 2 * 8, scan.reverse);
  }

  __device__ __forceinline__ void write_dots(const Cursor& at, int stage, int buffer, int group, int warp, int lane,
                                             const float (&o)[8][4]) const {
    const uint32_t from = source_tile(stage) + group * kBox;
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
  __device__ __forceinline__ void write_rows(const Cursor& at, int group, int warp, int lane, float out_times,
                                             const float (&o)[8][4]) const {
    const int thread = threadIdx.x % 128, rows = at.chunk_end(kTokens) - at.chunk;
    const uint32_t tile = out_at + group * kBox;
    if (thread == 0) hopper::copies_out_read();
    hopper::named_barrier(3 + group, 128);
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
    const int column = slice * S::kColumns + 64 * group;
    if (rows == kTokens || at.chunk + rows == scan.tokens) {
      hopper::fence_async();
      hopper::named_barrier(3 + group, 128);
      if (thread == 0) hopper::copy_out(&maps.out, tile, column, at.chunk, x_head, batch);
      return;
    }
    hopper::named_barrier(3 + group, 128);
    for (int i = thread; i < rows * 8; i += 128) {
      const int row = i / 8, chunk = i % 8;
      if (column + chunk * 8 < scan.z.width)
        *reinterpret_cast<uint4*>(out_row(at.chunk + row) + column + chunk * 8) =
            load_16_bytes(tile + chunk_offset<kTokens>(row, chunk));
    }
  }

  __device__ __forceinline__ void run() {
    const int group = threadIdx.x / 128;
    Cursor at = Base::first_step();
    if (pass == kSegmentSums && !at.valid) {
      if (slice == 0 && threadIdx.x == 0) Base::mark_unused_slot();
      return;
    }
    Base::zero_unowned(at, threadIdx.x / 32, S::kThreads / 32, threadIdx.x % 32);
    if (threadIdx.x == 0) {
      for (int s = 0; s < stages; ++s) {
        hopper::barrier_init(shared_address(&small.full[s]), 2);
        hopper::barrier_init(shared_address(&small.empty[s]), 4 * (kGroups + 1));
      }
      hopper::barrier_init(shared_address(&small.landed), 1);
      for (int s = 0; s < 2; ++s) {
        hopper::barrier_init(shared_address(&small.scores_full[s]), 4);
        hopper::barrier_init(shared_address(&small.scores_empty[s]), 4 * kGroups);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group < kGroups) {
      take_registers<S::kStateRegisters>();
      if (pass == kSegmentSums) carry<kSums>(at, group);
      else if (!scan.causal) carry<kWhole>(at, group);
      else if (scan.y_group == 1) carry<kSingle>(at, group);
      else carry<kGrouped>(at, group);
    } else if (group == kGroups) {
      give_registers<S::kScoreRegisters>();
      if (pairs()) score<true>(at);
      else score<false>(at);
    } else {
      give_registers<S::kCopyRegisters>();
      const int warp = threadIdx.x / 32 % 4;
      if (warp == 0) copy_tiles(at);
      if (warp == 1) make_tables(at);
    }
  }
};
#endif

template <class T, int kWidth, int kGroups>
__global__ void __launch_bounds__(128 * (kGroups + 2), 1)
    ChunkScanHopperKernel(const __grid_constant__ ChunkScan scan, const __grid_constant__ ChunkMaps maps, int pass,
                          int stages) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using S = HopperShape<T, kWidth, kGroups>;
  extern __shared__ char dynamic[];
  char* const shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
  const int stage_bytes = S::kBox * (2 * S::kBoxes + (scan.row_dot != nullptr ? 2 : 1) * kGroups);
  const uint32_t stages_at = shared_address(shared), scores_at = stages_at + stages * stage_bytes;
  auto& small = *reinterpret_cast<typename S::Small*>(shared + stages * stage_bytes + (2 + kGroups) * S::kBox);
  HopperBlock<S, T> block{{scan, pass, static_cast<int64_t>(blockIdx.x)}, maps, small, stages_at, scores_at,
                          scores_at + 2 * S::kBox, stages, stage_bytes};
  block.run();
#endif
}

template <class T, int kWidth, int kGroups>
int launch_hopper_shape(const ChunkScan& scan, const ChunkMaps& maps, int pass, int max_shared_bytes, void* stream) {
  using S = HopperShape<T, kWidth, kGroups>;
  const int stage_bytes = S::stage_bytes(scan.row_dot != nullptr);
  int stages = (max_shared_bytes - S::fixed_bytes()) / stage_bytes;
  if (stages > S::kMaxStages) stages = S::kMaxStages;
  const int bytes = S::fixed_bytes() + stages * stage_bytes;
  const auto kernel = ChunkScanHopperKernel<T, kWidth, kGroups>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t segments = pass == kOutputs || !scan.causal ? scan.segments : scan.segments - 1;
  const int64_t heads = pass == kOutputs ? scan.heads : scan.heads / scan.x_group;
  const int64_t blocks = scan.batch * heads * segments * scan.slices;
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), S::kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(scan, maps, pass, stages);
  return cudaGetLastError();
}

constexpr int kHopperMaxWidth = 128;

template <class T>
int launch_hopper(const ChunkScan& scan, const ChunkMaps& maps, int pass, int max_shared_bytes, void* stream) {
  const bool narrow = scan.z.width <= 64;
  if (scan.y.width > 64)
    return narrow ? launch_hopper_shape<T, 128, 1>(scan, maps, pass, max_shared_bytes, stream)
                  : launch_hopper_shape<T, 128, 2>(scan, maps, pass, max_shared_bytes, stream);
  return narrow ? launch_hopper_shape<T, 64, 1>(scan, maps, pass, max_shared_bytes, stream)
                : launch_hopper_shape<T, 64, 2>(scan, maps, pass, max_shared_bytes, stream);
}

}  // namespace chunk
}  // namespace leanfleet
