// The kernel of chunk_scan.h for float32 on Hopper, for K up to 128 and rows of whole aligned float4, in chunks of 64 tokens.
// A number is the sum of three bfloat16 planes and a product six of wgmma (mma.cuh). Warpgroups share the work out and run
// ahead of each other:
//
//   state groups  (1 or 2) each 64 columns of Z, with Sᵀ in registers: Oᵀ and Sᵀ
//   score group   the planes of X, P and row sums; while segments are summed, the planes of Z
//   load group    tables of rows and the planes of Y and Z
//
// Who loads rows also adds up their sums, from the numbers themselves. Factors of rows of Y and Z are in their planes.
//
// Tensor cores truncate their sums. A product therefore starts from 0 and takes the small planes first, so that only one
// product in six meets a sum of full size, and is added to what came before outside of them.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/hopper.cuh"
#include "linear_scan/chunk_scan.cuh"

namespace leanfleet {
namespace chunk {

// What a pass is for: the sums of segments, or outputs, with one head of y for a chunk or several.
enum Float32Pass : int { kFloat32Sums, kFloat32Single, kFloat32Grouped };

template <int kWidth_, int kGroups_, int kPass_>
struct Float32Shape {
  static constexpr bool kOut = kPass_ != kFloat32Sums, kGrouped = kPass_ == kFloat32Grouped;
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kTokens = 64, kColumns = 64 * kGroups, kPlanes = 3;
  static constexpr int kThreads = 128 * (kGroups + 2);
  static constexpr int kStateRegisters = kGroups == 1 ? 216 : 160, kOtherRegisters = kGroups == 1 ? 128 : 96;
  static constexpr int kBox = 8192, kWidePlane = kTokens * kWidth * 2, kNarrowPlane = kTokens * kColumns * 2;
  // X, Y twice, Z, P.
  static constexpr int kY = kPlanes * kWidePlane, kZ = 3 * kPlanes * kWidePlane, kP = kZ + kPlanes * kNarrowPlane;
  static constexpr int kTileBytes = kP + kPlanes * kBox;

  struct alignas(16) Table {
    float2 log2_decay[kTokens];  // sum from the chunk's begin, in scan order, as high and low part
    float x_factor[kTokens], x_rank1[kTokens], y_rank1[kTokens];
    float from_state[kTokens], from_sum[kTokens];  // of the carried sums in an output row
    float to_end[kTokens];                         // the decay up to the chunk's end
    double log2_kept;
    float kept, count;
    Cursor at;  // of outputs, for those who load neither Y nor Z
  };
  struct Small {
    Table table[2];
    alignas(16) float z_sum[kColumns];       // before the chunk of Z
    alignas(16) float next_z_sum[kColumns];  // before the next chunk of Z that is loaded
    alignas(16) float y_sum[3][kWidth];      // before a chunk of Y, by turns
    float carried[4][kTokens];               // parts of rows of X times the sum of y before the chunk
    alignas(16) float out_scale[2][kTokens];
    float dots[4 * kGroups][kTokens];
    uint64_t table_full[2], table_empty[2], y_full[2], y_empty[2];
    uint64_t x_full, x_empty, z_full, z_empty, p_full, p_empty;
    int z_odd[4];  // whether a quarter of the columns of Z has a number that is not finite
  };
  static constexpr int kBytes = kTileBytes + static_cast<int>(sizeof(Small));
};

#if __CUDA_ARCH_FEAT_SM90_ALL
template <class S>
struct Float32Cta : Site<float, S::kTokens, S::kColumns> {
  using Base = Site<float, S::kTokens, S::kColumns>;
  using Base::scan, Base::batch, Base::x_head, Base::state_head, Base::slice, Base::out_row, Base::row_dot_at;
  using Table = typename S::Table;
  using Plane = __nv_bfloat16;
  static constexpr int kTokens = S::kTokens, kWidth = S::kWidth, kGroups = S::kGroups, kPlanes = S::kPlanes;

  typename S::Small& small;
  const uint32_t tiles;

  __device__ __forceinline__ uint32_t x_tile() const { return tiles; }
  __device__ __forceinline__ uint32_t y_tile(int buffer) const { return tiles + S::kY + buffer * kPlanes * S::kWidePlane; }
  __device__ __forceinline__ uint32_t z_tile() const { return tiles + S::kZ; }
  __device__ __forceinline__ uint32_t p_tile() const { return tiles + S::kP; }
  static constexpr bool kOut = S::kOut;
  __device__ __forceinline__ bool updates() const { return !kOut || scan.causal; }

  // A warp arrives as often as it has lanes: each once where lanes read what those of another warp have written, or write
  // where those have read, else one for all. After __syncwarp one would always do, but racecheck does not follow that order.
  static __device__ __forceinline__ void arrive_warp(uint64_t& barrier, bool each = true) {
    __syncwarp();
    if (each || threadIdx.x % 32 == 0) hopper::mbarrier_arrive_times(shared_address(&barrier), each ? 1 : 32);
  }
  static __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    mbarrier_wait(shared_address(&barrier), parity);
  }

  __device__ __forceinline__ bool decays() const { return scan.log_decay != nullptr; }
  // Sums of segments without decay need none.
  __device__ __forceinline__ bool with_tables() const { return kOut || decays(); }
  // Whether who loads Y looks at them too, and whether who loads Y or Z does.
  __device__ __forceinline__ bool scales_y() const { return decays() && (!kOut || scan.row_sums); }
  __device__ __forceinline__ bool loads_with_table() const { return updates() && (kOut ? scales_y() || scan.rank1 : decays()); }
  static __device__ __forceinline__ float constant_of(const ChunkFactor& factor) {
    return factor.times != nullptr ? factor.scale * *factor.times : factor.scale;
  }
  __device__ __forceinline__ const float* rows_of(const ChunkFactor& factor, int head) const {
    return factor.data != nullptr ? factor.data + batch * factor.batch + head * factor.head : nullptr;
  }

  // By a warp, two rows a lane.
  __device__ __forceinline__ void make_table(const Cursor& at, Table& table) const {
    const int lane = threadIdx.x % 32, rows = at.chunk_end(kTokens) - at.chunk, y_head = state_head * scan.y_group + at.head;
    const float* const of_row[3] = {kOut ? rows_of(scan.x_factor, x_head) : nullptr,
                                    kOut ? rows_of(scan.x_rank1, x_head) : nullptr, rows_of(scan.y_rank1, y_head)};
    const int64_t strides[3] = {scan.x_factor.token, scan.x_rank1.token, scan.y_rank1.token};
    const float* const decay_of_row = scan.log_decay + batch * scan.decay_batch + state_head * scan.decay_head;
    float x[2][3], decay[2];
    const float constants[3] = {kOut ? constant_of(scan.x_factor) : 0.0f, kOut && scan.rank1 ? constant_of(scan.x_rank1) : 0.0f,
                                scan.rank1 ? constant_of(scan.y_rank1) : 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = scan.reverse ? kTokens - 1 - (2 * lane + r) : 2 * lane + r;
      const bool there = row < rows;
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) {
        x[r][kind] = there ? 1.0f : 0.0f;
        if (there && of_row[kind] != nullptr) x[r][kind] = __ldg(of_row[kind] + (at.chunk + row) * strides[kind]);
      }
      decay[r] = 0.0f;
      if (decays() && there && !(scan.reverse && at.chunk + row + 1 == at.request_span.end))
        decay[r] = scan.decay_per_token ? decay_of_row[(at.chunk + row + (scan.reverse ? 1 : 0)) * scan.decay_token]
                                        : scan.log_decay[state_head];
    }
    double sums[2] = {}, end = 0.0;
    if (decays()) {
      double total = 0.0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const double log2 = static_cast<double>(decay[r]) * 1.4426950408889634;
        total += log2 > kLeastLog2 ? log2 : kLeastLog2;
        sums[r] = total;
      }
      double before = total;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const double left = __shfl_up_sync(kFullWarp, before, offset);
        if (lane >= offset) before += left;
      }
      end = __shfl_sync(kFullWarp, before, 31);
      before -= total;
      sums[0] += before, sums[1] += before;
    }
    float count = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = scan.reverse ? kTokens - 1 - (2 * lane + r) : 2 * lane + r;
      float from_begin = 1.0f, to_end = 1.0f;
      if (decays()) {
        const float high = static_cast<float>(sums[r]);
        from_begin = exp2f(high), to_end = exp2f(static_cast<float>(end - sums[r]));
        table.log2_decay[row] = make_float2(high, static_cast<float>(sums[r] - high));
      }
      const float fx = x[r][0] * constants[0], rx = x[r][1] * constants[1], ry = x[r][2] * constants[2];
      table.x_factor[row] = fx;
      table.x_rank1[row] = rx;
      table.y_rank1[row] = ry;
      table.from_state[row] = from_begin * fx;
      table.from_sum[row] = from_begin * rx;
      table.to_end[row] = to_end;
      count += to_end * ry;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(kFullWarp, count, offset);
    // The heads of y that follow in the same chunk add to the same sums.
    if (lane == 0) {
      if (kOut) table.at = at;
      table.kept = at.head == 0 ? exp2f(static_cast<float>(end)) : 1.0f;
      table.log2_kept = at.head == 0 ? end : 0.0;
      table.count = count;
    }
  }

  // Loads

  // Lanes of a warp take a quarter of the columns, each four and four more kApart on, so that a row's lanes read whole
  // sectors; and rows so that no two of 16 lanes that store 8 bytes at once meet in a bank.
  template <int kTileColumns>
  struct Lane {
    static constexpr int kLanes = kTileColumns / 32, kRows = 32 / kLanes, kApart = 4 * kLanes;  // of a row, rows at once
    int row, column;
    __device__ __forceinline__ Lane() {
      const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, at = lane / kLanes;
      column = 8 * kLanes * warp + 4 * (lane % kLanes);
      row = kLanes == 4 ? at % 4 * 2 + at / 4 : at;
    }
    // Over a warp's rows, of each column.
    template <int kNumbers>
    static __device__ __forceinline__ void sum_rows(float (&x)[kNumbers]) {
#pragma unroll
      for (int offset = kLanes; offset < 32; offset *= 2)
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) x[i] += __shfl_xor_sync(kFullWarp, x[i], offset);
    }
  };

  // Rows of a tensor, kTileColumns columns from `first` on, to the planes of a tile, if kWeighed times their factors (null:
  // none) and `constant`; what is not there becomes 0. ready(): waits for room. visit(row, in_chunk, x): eight numbers of a
  // row, with their factors. Returns what tells whether one is not finite: the largest bits of the first plane without their
  // signs, of even and of odd columns.
  template <int kTileColumns, bool kWeighed, class Ready, class Visit>
  __device__ __forceinline__ uint32_t bring(const ChunkTensor& x, int head, const Cursor& at, int first, uint32_t to,
                                            const float* factors, int64_t factor_token, float constant, Ready&& ready,
                                            Visit&& visit) const {
    using L = Lane<kTileColumns>;
    constexpr int kPlane = kTokens * kTileColumns * 2, kSteps = kTokens / L::kRows, kAhead = 1;
    static_assert(kSteps % (kAhead + 1) == 0, "whole turns");
    const L lane;
    const float* const begin = static_cast<const float*>(x.data) + batch * x.batch + head * x.head + first;
    {
      // The next chunk's rows come then from the L2 cache; by lines of 32 numbers.
      constexpr int kLines = kTileColumns / 32, kThreadRows = 128 / kLines;
      const int thread = threadIdx.x % 128, column = thread % kLines * 32;
      int token = at.chunk + (scan.reverse ? -kTokens : kTokens) + thread / kLines;
#pragma unroll
      for (int i = 0; i < kTokens / kThreadRows; ++i, token += kThreadRows)
        if (token >= at.piece.begin && token < at.piece.end && first + column < x.width)
          hopper::prefetch(begin + token * x.token + column);
    }
    const int width = x.width - first - lane.column, rows = at.chunk_end(kTokens) - at.chunk - lane.row;
    const int64_t step = L::kRows * x.token;
    const float* from = begin + (at.chunk + lane.row) * x.token + lane.column;
    const float* factor = factors + (at.chunk + lane.row) * factor_token;
    uint32_t top = 0, place = to + chunk_offset<kTokens>(lane.row, lane.column / 8) + lane.column % 8 * 2,
             place_apart = to + chunk_offset<kTokens>(lane.row, (lane.column + L::kApart) / 8) + lane.column % 8 * 2;
    // While the rows of a step become planes, those of kAhead more are on their way. Nothing but loads stands in fetch.
    float v[kAhead + 1][8], f[kAhead + 1];
    const auto fetch = [&](int base, int number) {
      const bool there = (base + number) * L::kRows < rows;
      float (&to)[8] = v[number % (kAhead + 1)];
      if constexpr (kWeighed) {
        f[number % (kAhead + 1)] = hopper::load_or_zero(factor, there && factors != nullptr);
        factor += L::kRows * factor_token;
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float4 four = hopper::load_4_or_zero(from + L::kApart * part, there && L::kApart * part < width);
        to[4 * part] = four.x, to[4 * part + 1] = four.y, to[4 * part + 2] = four.z, to[4 * part + 3] = four.w;
      }
      from += step;
    };
#pragma unroll
    for (int number = 0; number < kAhead; ++number) fetch(0, number);
    ready();
#pragma unroll 1
    for (int first_number = 0; first_number < kSteps; first_number += kAhead + 1) {
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        const int number = first_number + i, row = number * L::kRows;
        if (i == 0 || first_number + kAhead + 1 < kSteps) fetch(first_number, i + kAhead);
        float (&x)[8] = v[i];
        if constexpr (kWeighed) {
          const float by = factors != nullptr ? constant * f[i] : constant;
#pragma unroll
          for (int c = 0; c < 8; ++c) x[c] *= by;
        }
        visit(lane.row + row, row < rows, x);
        uint32_t planes[4][kPlanes];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          split_pair<Plane, kPlanes>(x[2 * j], x[2 * j + 1], planes[j]);
          top = __vmaxu2(top, planes[j][0] & 0x7fff7fffu);
        }
        // Rows are 8 or 16 apart, and so at the same place of a swizzled line.
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
          store_8_bytes(place + p * kPlane, make_uint2(planes[0][p], planes[1][p]));
          store_8_bytes(place_apart + p * kPlane, make_uint2(planes[2][p], planes[3][p]));
        }
        place += L::kRows * 128, place_apart += L::kRows * 128;
      }
    }
    hopper::fence_proxy_async();
    return top;
  }

  // Sums of columns: a lane's eight.
  template <class L>
  static __device__ __forceinline__ void read_eight(const float* sum, float (&x)[8]) {
    const float* const from = sum + L().column;
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + L::kApart);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
  template <class L>
  static __device__ __forceinline__ void write_eight(float* sum, const float (&x)[8]) {
    float* const to = sum + L().column;
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + L::kApart) = make_float4(x[4], x[5], x[6], x[7]);
  }
  template <class L>
  static __device__ __forceinline__ void copy_eight(const float* from, float* to) {
    float x[8];
    read_eight<L>(from, x);
    write_eight<L>(to, x);
  }

  // By the lanes of the first row, once the others have read what was there: sums of `width` columns in memory, from
  // `first` on; null: 0.
  template <class L>
  static __device__ __forceinline__ void begin_sum(float* sum, const float* from, int first, int width) {
    if (static_cast<int>(threadIdx.x % 32) >= L::kLanes) return;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = first + L().column + i / 4 * L::kApart + i % 4;
      x[i] = from != nullptr && column < width ? from[column] : 0.0f;
    }
    write_eight<L>(sum, x);
  }
  template <class L>
  static __device__ __forceinline__ void end_sum(const float* sum, float* to, int first, int width, float factor) {
    if (static_cast<int>(threadIdx.x % 32) >= L::kLanes) return;
    float x[8];
    read_eight<L>(sum, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = first + L().column + i / 4 * L::kApart + i % 4;
      if (column < width) to[column] = factor * x[i];
    }
  }
  // part: of a lane's rows. to: where the sum after them goes.
  template <class L>
  static __device__ __forceinline__ void add_to_sum(const float* sum, float* to, float kept, float (&part)[8]) {
    L::sum_rows(part);
    if (static_cast<int>(threadIdx.x % 32) < L::kLanes) {
      float x[8];
      read_eight<L>(sum, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = kept * x[i] + part[i];
      write_eight<L>(to, x);
    }
    __syncwarp();
  }

  // kWithY: tables and Y; kWithZ: Z.
  template <bool kWithY, bool kWithZ>
  __device__ __forceinline__ void load() const {
    Cursor at = Base::first_step();
    using Wide = Lane<kWidth>;
    using Narrow = Lane<S::kColumns>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first = slice * S::kColumns;
    const bool y_sums = kWithY && updates() && scan.row_sums, z_sums = kWithZ && updates() && scan.rank1;
    const bool needs_table = loads_with_table(), decayed = scales_y();
    const float y_rank1 = scan.rank1 ? constant_of(scan.y_rank1) : 0.0f;
    float count = 0.0f;
    double log2_kept = 0.0;
    int y_sum_at = 0, n = 0;
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens), ++n) {
      const int buffer = n % 2, next_y_sum = y_sum_at == 2 ? 0 : y_sum_at + 1;
      const uint32_t parity = n & 1, parity2 = n >> 1 & 1;
      Table& table = small.table[buffer];
      const int y_head = state_head * scan.y_group + at.head;
      if (at.head == 0 && at.first_chunk(scan, kTokens)) {
        const FirstSums from = Base::first_sums(at);
        count = from.count;
        log2_kept = 0.0;
        __syncwarp();
        begin_sums(from, y_sums, z_sums, first, y_sum_at);
        __syncwarp();
      }
      if (kWithY && with_tables() && warp == 0) {
        wait(small.table_empty[buffer], parity2 ^ 1);
        make_table(at, table);
        arrive_warp(small.table_full[buffer]);
      }
      float kept = 1.0f;
      if (decayed) {
        wait(small.table_full[buffer], parity2);
        kept = table.kept;
      }
      if (kWithY && updates()) {
        float part[8] = {};
        bring_y(at, table, y_head, buffer, parity2, y_sums, decayed, part);
        arrive_warp(small.y_full[buffer], y_sums);
        if (y_sums) add_to_sum<Wide>(small.y_sum[y_sum_at], small.y_sum[next_y_sum], kept, part);
      }
      if (kWithZ && updates()) {
        const float* const rank1 = rows_of(scan.y_rank1, y_head);
        float part[8] = {}, of_rows = 0.0f;  // of_rows: of ry
        if (needs_table) {
          wait(small.table_full[buffer], parity2);
          kept = table.kept;
        }
        const uint32_t top = bring<S::kColumns, true>(
            scan.z, Base::shared_head(y_head, scan.z_share), at, first, z_tile(), rows_of(scan.z_factor, y_head),
            scan.z_factor.token, constant_of(scan.z_factor),
            [&] {
              wait(small.z_empty, parity ^ 1);
              if (!z_sums || lane >= Narrow::kLanes) return;
              copy_eight<Narrow>(small.next_z_sum, small.z_sum);
            },
            [&](int row, bool there, const float (&x)[8]) {
              if (!z_sums || !there) return;
              const float weight = z_weight(at, table, row, y_rank1, rank1);
#pragma unroll
              for (int i = 0; i < 8; ++i) part[i] += weight * x[i];
              of_rows += weight;
            });
        const bool odd = __any_sync(kFullWarp, pair_not_finite(Plane{}, top));
        if (lane == 0) small.z_odd[warp] = odd;
        arrive_warp(small.z_full);
        if (z_sums) add_to_sum<Narrow>(small.next_z_sum, small.next_z_sum, kept, part);
        if (!kOut && scan.rank1) {
#pragma unroll
          for (int offset = Narrow::kLanes; offset < 32; offset *= 2) of_rows += __shfl_xor_sync(kFullWarp, of_rows, offset);
          count = kept * count + of_rows;
        }
        if (!kOut && decays()) log2_kept += table.log2_kept;
      }
      if (needs_table) arrive_warp(small.table_empty[buffer]);
      if (updates() && at.head + 1 == scan.y_group && at.last_chunk(scan, kTokens)) {
        end_sums<kWithZ>(at, y_sums, z_sums, first, next_y_sum, count, log2_kept);
      }
      y_sum_at = next_y_sum;
    }
    if (kOut && warp == 0) {
      end_tables(n, lane);
    }
  }

  // What sums of y and z are before the first chunk of a request.
  __device__ __forceinline__ void begin_sums(const FirstSums& from, bool y_sums, bool z_sums, int first, int y_sum_at) const {
    if (y_sums) begin_sum<Lane<kWidth>>(small.y_sum[y_sum_at], from.y_sum, 0, scan.y.width);
    if (z_sums) begin_sum<Lane<S::kColumns>>(small.next_z_sum, from.z_sum, first, scan.z.width);
  }

  // A chunk's planes of Y. part: of this lane's columns of the sum of y.
  __device__ __forceinline__ void bring_y(const Cursor& at, const Table& table, int y_head, int buffer, uint32_t parity2,
                                          bool y_sums, bool decayed, float (&part)[8]) const {
    bring<kWidth, true>(
        scan.y, Base::shared_head(y_head, scan.y_share), at, 0, y_tile(buffer), rows_of(scan.y_factor, y_head),
        scan.y_factor.token, constant_of(scan.y_factor), [&] { wait(small.y_empty[buffer], parity2 ^ 1); },
        [&](int row, bool, const float (&x)[8]) {
          if (!y_sums) return;
          const float weight = decayed ? table.to_end[row] : 1.0f;
#pragma unroll
          for (int i = 0; i < 8; ++i) part[i] += weight * x[i];
        });
  }

  // What a row of Z counts in the sum of z.
  __device__ __forceinline__ float z_weight(const Cursor& at, const Table& table, int row, float y_rank1,
                                            const float* rank1) const {
    float weight = y_rank1;
    if (kOut) weight = table.y_rank1[row];
    else if (rank1 != nullptr) weight *= __ldg(rank1 + (at.chunk + row) * scan.y_rank1.token);
    if (decays()) weight *= table.to_end[row];
    return weight;
  }

  // Stores the sums after the last chunk of a request.
  template <bool kWithZ>
  __device__ __forceinline__ void end_sums(const Cursor& at, bool y_sums, bool z_sums, int first, int next_y_sum, float count,
                                           double log2_kept) const {
    const LastSums to = Base::last_sums(at);
    if (y_sums && slice == 0 && to.y_sum != nullptr)
      end_sum<Lane<kWidth>>(small.y_sum[next_y_sum], to.y_sum, 0, scan.y.width, to.factor);
    if (z_sums && to.z_sum != nullptr) end_sum<Lane<S::kColumns>>(small.next_z_sum, to.z_sum, first, scan.z.width, to.factor);
    if (kWithZ && to.slot_rest != nullptr && slice == 0 && threadIdx.x % 128 == 0)
      Base::write_slot_rest(at, to.slot_rest, count, log2_kept);
  }

  // Tells who follows tables that there are no more.
  __device__ __forceinline__ void end_tables(int n, int lane) const {
    wait(small.table_empty[n % 2], (n >> 1 & 1) ^ 1);
    if (lane == 0) small.table[n % 2].at.valid = false;
    arrive_warp(small.table_full[n % 2]);
  }

  // The score group

  __device__ __forceinline__ void score() const {
    const int thread = threadIdx.x % 128;
    for (int i = thread; i < kPlanes * S::kBox / 16; i += 128) store_16_bytes(p_tile() + 16 * i, make_uint4(0, 0, 0, 0));
    hopper::named_barrier(1, 128);
    float count = 0.0f;
    int y_sum_at = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Table& table = small.table[n % 2];
      wait(small.table_full[n % 2], n >> 1 & 1);
      const Cursor& at = table.at;
      if (!at.valid) break;
      if (at.head == 0 && at.first_chunk(scan, kTokens)) count = Base::first_sums(at).count;
      // Without updates, which is without requests too, the sums of the first chunk are those of all.
      if (!updates() && n == 0) {
        const FirstSums from = Base::first_sums(at);
        if (scan.row_sums) begin_sum<Lane<kWidth>>(small.y_sum[0], from.y_sum, 0, scan.y.width);
        if (scan.rank1) begin_sum<Lane<S::kColumns>>(small.z_sum, from.z_sum, slice * S::kColumns, scan.z.width);
        __syncwarp();
      }
      bring_queries(at, n, small.y_sum[y_sum_at]);
      if (updates()) y_sum_at = y_sum_at == 2 ? 0 : y_sum_at + 1;
      make_scores(at, n, table, count);
      if (scan.causal) count = table.kept * count + table.count;
      arrive_warp(small.table_empty[n % 2]);
    }
  }

  // y_sum: that before the chunk, which the load group has before the chunk's Y.
  __device__ __forceinline__ void bring_queries(const Cursor& at, int n, const float (&y_sum)[kWidth]) const {
    using Wide = Lane<kWidth>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float before[8] = {};
    if (scan.row_sums) {
      if (updates()) wait(small.y_full[n % 2], n >> 1 & 1);
      read_eight<Wide>(y_sum, before);
    }
    bring<kWidth, false>(
        scan.x, Base::shared_head(x_head, scan.x_share), at, 0, x_tile(), nullptr, 0, 1.0f,
        [&] { wait(small.x_empty, n & 1 ^ 1); },
        [&](int row, bool, const float (&x)[8]) {
          if (!scan.row_sums) return;
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += x[i] * before[i];
#pragma unroll
          for (int offset = 1; offset < Wide::kLanes; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
          if (lane % Wide::kLanes == 0) small.carried[warp][row] = sum;
        });
    arrive_warp(small.x_full, !updates());
    hopper::named_barrier(1, 128);
  }

  // P and what rows of out are multiplied by at the end. count: Σ ry before the chunk.
  __device__ __forceinline__ void make_scores(const Cursor& at, int n, const Table& table, float count) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, buffer = n % 2;
    const uint32_t parity = n & 1, parity2 = n >> 1 & 1;
    float s[8][4], sums[2] = {0.0f, 0.0f};
    if (scan.causal) {
      wait(small.y_full[buffer], parity2);
      const uint32_t x = hopper::make_smem_descriptor(x_tile(), 0), y = hopper::make_smem_descriptor(y_tile(buffer), 0);
      hopper::warpgroup_arrive();
      const auto product = [&](int x_plane, int y_plane, bool first) {
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
          const int step = (k / 4 * S::kBox + k % 4 * 32) / 16;
          hopper::wgmma_ss(Plane{}, s, x + x_plane * (S::kWidePlane / 16) + step, y + y_plane * (S::kWidePlane / 16) + step,
                           !first || k > 0);
        }
      };
      product(0, 2, true), product(1, 1, false), product(2, 0, false), product(0, 1, false), product(1, 0, false);
      product(0, 0, false);
      hopper::warpgroup_commit();
      hopper::warpgroup_wait<0>();
      hopper::fence_accumulators(s);
      arrive_warp(small.y_empty[buffer], scan.row_sums);
    }
    // Rows lane / 4 and the eighth after it of the warp's 16.
    const int row = 16 * warp + lane / 4;
    float carried[2] = {0.0f, 0.0f};
    if (scan.row_sums) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int w = 0; w < 4; ++w) carried[half] += small.carried[w][row + 8 * half];
    }
    arrive_warp(small.x_empty, scan.row_sums);
    wait(small.p_empty, parity ^ 1);
    if (scan.causal) finish_scores(table, row, lane, s, sums);
    float scale = scan.out_times != nullptr ? *scan.out_times : 1.0f;
    if (scan.row_sums) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half;
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
        sums[half] += table.from_state[i] * carried[half] + table.from_sum[i] * count;
      }
      // A lane finishes one of them, of every four two.
      const int i = row + 8 * (lane % 2);
      const float sum = lane % 2 == 0 ? sums[0] : sums[1];
      if (lane % 4 < 2 && scan.row_sum != nullptr && slice == 0 && at.chunk + i < at.piece.end)
        scan.row_sum[batch * scan.sum_batch + x_head * scan.sum_head + (at.chunk + i) * scan.sum_token] = sum;
      if (scan.divide) scale /= fabsf(sum) < scan.eps ? (sum < 0.0f ? -scan.eps : scan.eps) : sum;
    }
    if (lane % 4 < 2) small.out_scale[buffer][row + 8 * (lane % 2)] = scale;
    hopper::fence_proxy_async();
    arrive_warp(small.p_full);
  }

  // Y has its factor. Tiles of P that no row of the warp sees stay 0.
  __device__ __forceinline__ void finish_scores(const Table& table, int row, int lane, const float (&s)[8][4],
                                                float (&sums)[2]) const {
    const bool reverse = scan.reverse;
    const int first = row / 16 * 16;
    float2 row_decay[2] = {};
    float x_factor[2], x_rank1[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (decays()) row_decay[half] = table.log2_decay[row + 8 * half];
      x_factor[half] = table.x_factor[row + 8 * half];
      x_rank1[half] = table.x_rank1[row + 8 * half];
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (reverse ? 8 * t + 7 < first : 8 * t > first + 15) continue;
      const int j = 8 * t + 2 * (lane % 4);
      const float2 rank1 = *reinterpret_cast<const float2*>(&table.y_rank1[j]);
      float4 decay = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (decays()) decay = *reinterpret_cast<const float4*>(&table.log2_decay[j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half;
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float x = s[t][2 * half + c] * x_factor[half] + x_rank1[half] * (c == 0 ? rank1.x : rank1.y);
          if (decays())
            x *= exp2f((row_decay[half].x - (c == 0 ? decay.x : decay.z)) + (row_decay[half].y - (c == 0 ? decay.y : decay.w)));
          if (reverse ? j + c < i : j + c > i) x = 0.0f;
          sums[half] += x;
          p[c] = x;
        }
        uint32_t planes[kPlanes];
        split_pair<Plane, kPlanes>(p[0], p[1], planes);
        const uint32_t to = p_tile() + chunk_offset<kTokens>(i, t) + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < kPlanes; ++k) store_4_bytes(to + k * S::kBox, planes[k]);
      }
    }
  }

  // A state group

  // c = a b over kSteps steps of 16, small products first. make(step, a, a1, a2): the planes of a, the largest first, which
  // stays in registers, or is made again by again(step, a). b: the first plane's descriptor, planes kPlane bytes apart;
  // at(step): where a step's is. kBuffers steps are on their way at once.
  template <int kSteps, bool kRowsSummed, int kPlane, int kBuffers, int kTiles, class Make, class At,
            class Again = std::nullptr_t>
  static __device__ __forceinline__ void multiply(float (&c)[kTiles][4], uint32_t b, Make&& make, At&& at,
                                                  Again&& again = nullptr) {
    constexpr int kNext = kPlane / 16;
    constexpr bool kMadeTwice = !std::is_same<typename std::decay<Again>::type, std::nullptr_t>::value;
    uint32_t high[kMadeTwice ? kBuffers : kSteps][4], low[kBuffers][2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t (&l)[2][4] = low[step % kBuffers];
      uint32_t (&h)[4] = high[kMadeTwice ? step % kBuffers : step];
      if (step >= kBuffers) {
        hopper::warpgroup_wait<kBuffers - 1>();
        hopper::fence_operands_for_write(l);
        if constexpr (kMadeTwice) hopper::fence_operands_for_write(high);
      }
      make(step, h, l[0], l[1]);
      const uint32_t of_step = b + at(step);
      hopper::warpgroup_arrive();
      hopper::wgmma_rs<kRowsSummed>(Plane{}, c, h, of_step + 2 * kNext, step > 0);
      hopper::wgmma_rs<kRowsSummed>(Plane{}, c, l[0], of_step + kNext, 1);
      hopper::wgmma_rs<kRowsSummed>(Plane{}, c, l[1], of_step, 1);
      hopper::wgmma_rs<kRowsSummed>(Plane{}, c, h, of_step + kNext, 1);
      hopper::wgmma_rs<kRowsSummed>(Plane{}, c, l[0], of_step, 1);
      hopper::warpgroup_commit();
    }
    if constexpr (kMadeTwice) {
      uint32_t twice[2][2][4];
      hopper::warpgroup_wait<0>();
      hopper::fence_operands(high);
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) hopper::fence_operands(low[i]);
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t (&h)[2][4] = twice[step / 2 % 2];
        if (step >= 4) {
          hopper::warpgroup_wait<1>();
          hopper::fence_operands_for_write(h);
        }
        again(step, h[0]);
        again(step + 1, h[1]);
        hopper::warpgroup_arrive();
        hopper::wgmma_rs<kRowsSummed>(Plane{}, c, h[0], b + at(step), 1);
        hopper::wgmma_rs<kRowsSummed>(Plane{}, c, h[1], b + at(step + 1), 1);
        hopper::warpgroup_commit();
      }
      hopper::warpgroup_wait<0>();
      hopper::fence_accumulators(c);
      hopper::fence_operands(twice[0]);
      hopper::fence_operands(twice[1]);
    } else {
      hopper::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) hopper::wgmma_rs<kRowsSummed>(Plane{}, c, high[step], b + at(step), 1);
      hopper::warpgroup_commit();
      hopper::warpgroup_wait<0>();
      hopper::fence_accumulators(c);
      hopper::fence_operands(high);
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) hopper::fence_operands(low[i]);
    }
  }

  __device__ __forceinline__ void carry(int group) const {
    Cursor own;
    if (!kOut) own = Base::first_step();
    const int warp = 4 * group + threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int of_slice = 16 * warp + lane / 4, column = slice * S::kColumns + of_slice;
    const int K = scan.y.width, V = scan.z.width;
    float state[kWidth / 8][4], o[8][4];
    for (int n = 0;; ++n) {
      const int buffer = n % 2;
      const uint32_t parity = n & 1, parity2 = n >> 1 & 1;
      const Table& table = small.table[buffer];
      const Cursor& at = kOut ? table.at : own;
      if (!kOut && !at.valid) break;
      if (with_tables()) wait(small.table_full[buffer], parity2);
      if (kOut && !at.valid) break;
      const bool first = !S::kGrouped && kOut || at.head == 0, last = !S::kGrouped && kOut || at.head + 1 == scan.y_group;
      if (first && at.first_chunk(scan, kTokens)) read_state<kWidth>(state, Base::first_sums(at), K, V, column, lane);
      if (kOut) {
        wait(small.x_full, parity);
        if (first) from_state(state, o);
        arrive_warp(small.x_empty, false);
      }
      if (updates()) wait(small.z_full, parity);
      if (kOut && first) scale_rows(table, of_slice, lane, o);
      // Planes of a warp's 16 columns of Z by 16 tokens.
      const uint32_t z_from = z_tile() + chunk_offset<kTokens>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
      if (kOut) {
        wait(small.p_full, parity);
        if (scan.causal) {
          // 0 times an infinity, or what is no number, must not reach tokens before its own.
          const bool odd = small.z_odd[warp / kGroups] != 0;
          float sum[8][4];
          multiply_scores(z_from, odd, sum);
          add_products(odd, of_slice, lane, sum, o);
        }
        arrive_warp(small.p_empty);
      }
      // Beside the state there are registers for half an update, and while heads of y follow, for rows of out.
      constexpr int kHalves = kWidth == 128 ? 2 : 1, kTiles = kWidth / 8 / kHalves;
      if (kOut && !S::kGrouped) finish_rows(at, small.out_scale[buffer], warp, lane, column, o);
      if (updates()) {
        wait(small.y_full[buffer], parity2);
        const float kept = with_tables() ? table.kept : 1.0f;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float sum[kTiles][4];
          multiply<4, true, S::kWidePlane, 1>(
              sum, hopper::make_smem_descriptor(y_tile(buffer) + half * S::kBox, S::kBox),
              [&](int step, uint32_t (&a)[4], uint32_t (&b)[4], uint32_t (&c)[4]) {
                load_columns(z_from, step, a, b, c);
                if (decays()) scale_planes(table, step, lane, a, b, c);
              },
              [](int k) { return k * 128; });
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) state[kTiles * half + i][c] = kept * state[kTiles * half + i][c] + sum[i][c];
        }
        arrive_warp(small.y_empty[buffer], false);
        arrive_warp(small.z_empty);
        if (last && at.last_chunk(scan, kTokens)) write_state<kWidth>(state, Base::last_sums(at), K, V, column, lane);
      }
      if (S::kGrouped && last) finish_rows(at, small.out_scale[buffer], warp, lane, column, o);
      if (with_tables()) arrive_warp(small.table_empty[buffer]);
      if (!kOut) own.next(scan, kTokens);
    }
  }

  // Oᵀ = Sᵀ Xᵀ
  __device__ __forceinline__ void from_state(const float (&state)[kWidth / 8][4], float (&o)[8][4]) const {
    multiply<kWidth / 16, false, S::kWidePlane, 2>(
        o, hopper::make_smem_descriptor(x_tile(), 0),
        [&](int step, uint32_t (&a)[4], uint32_t (&b)[4], uint32_t (&c)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t planes[kPlanes];
            const float (&from)[4] = state[2 * step + i / 2];
            split_pair<Plane, kPlanes>(from[i % 2 * 2], from[i % 2 * 2 + 1], planes);
            a[i] = planes[0], b[i] = planes[1], c[i] = planes[2];
          }
        },
        [](int k) { return (k / 4 * S::kBox + k % 4 * 32) / 16; },
        [&](int step, uint32_t (&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float x = state[2 * step + i / 2][i % 2 * 2], y = state[2 * step + i / 2][i % 2 * 2 + 1];
            // Or the compiler keeps what it made before.
            asm volatile("" : "+f"(x), "+f"(y));
            a[i] = pack_pair(Plane{}, x, y);
          }
        });
  }

  // Rows of out so far: of the state and of the sum of z before the chunk.
  __device__ __forceinline__ void scale_rows(const Table& table, int of_slice, int lane, float (&o)[8][4]) const {
    const float z_sum[2] = {scan.rank1 ? small.z_sum[of_slice] : 0.0f, scan.rank1 ? small.z_sum[of_slice + 8] : 0.0f};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * i + 2 * (lane % 4);
      const float2 factor = *reinterpret_cast<const float2*>(&table.from_state[row]);
      o[i][0] *= factor.x, o[i][1] *= factor.y, o[i][2] *= factor.x, o[i][3] *= factor.y;
      if (scan.rank1) {
        const float2 of_sum = *reinterpret_cast<const float2*>(&table.from_sum[row]);
        o[i][0] += of_sum.x * z_sum[0], o[i][1] += of_sum.y * z_sum[0];
        o[i][2] += of_sum.x * z_sum[1], o[i][3] += of_sum.y * z_sum[1];
      }
    }
  }

  // Planes of Z at a step of 16 tokens.
  static __device__ __forceinline__ void load_columns(uint32_t z_from, int step, uint32_t (&a)[4], uint32_t (&b)[4],
                                                      uint32_t (&c)[4]) {
    load_matrices_transposed(a, z_from + step * 2048);
    load_matrices_transposed(b, z_from + step * 2048 + S::kNarrowPlane);
    load_matrices_transposed(c, z_from + step * 2048 + 2 * S::kNarrowPlane);
  }

  // Zᵀ Pᵀ; 0 if odd.
  __device__ __forceinline__ void multiply_scores(uint32_t z_from, bool odd, float (&sum)[8][4]) const {
    multiply<4, false, S::kBox, 1>(
        sum, hopper::make_smem_descriptor(p_tile(), 0),
        [&](int step, uint32_t (&a)[4], uint32_t (&b)[4], uint32_t (&c)[4]) {
          load_columns(z_from, step, a, b, c);
          if (odd) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = b[i] = c[i] = 0;
          }
        },
        [](int k) { return k * 2; },
        [&](int step, uint32_t (&a)[4]) {
          load_matrices_transposed(a, z_from + step * 2048);
          if (odd) a[0] = a[1] = a[2] = a[3] = 0;
        });
  }

  // Adds them to rows of out; if odd number by number, for rows that see them.
  __device__ __forceinline__ void add_products(bool odd, int of_slice, int lane, const float (&sum)[8][4],
                                               float (&o)[8][4]) const {
    if (odd) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          o[i][c] += score_times_column<Plane, kPlanes, kTokens, S::kBox, S::kNarrowPlane>(
              p_tile(), z_tile(), 8 * i + 2 * (lane % 4) + c % 2, of_slice + c / 2 * 8, scan.reverse);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][c] += sum[i][c];
    }
  }

  // Planes of Z times the decay up to the chunk's end.
  static __device__ __forceinline__ void scale_planes(const Table& table, int step, int lane, uint32_t (&a)[4],
                                                      uint32_t (&b)[4], uint32_t (&c)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 to_end = *reinterpret_cast<const float2*>(&table.to_end[16 * step + i / 2 * 8 + 2 * (lane % 4)]);
      uint32_t planes[kPlanes] = {a[i], b[i], c[i]};
      const float2 x = join_pair<Plane, kPlanes>(planes);
      split_pair<Plane, kPlanes>(x.x * to_end.x, x.y * to_end.y, planes);
      a[i] = planes[0], b[i] = planes[1], c[i] = planes[2];
    }
  }

  __device__ __forceinline__ void finish_rows(const Cursor& at, const float (&scale)[kTokens], int warp, int lane, int column,
                                              float (&o)[8][4]) const {
    const int rows = at.chunk_end(kTokens) - at.chunk, width = scan.z.width;
    const ChunkTensor& source = scan.source;
    if (scan.row_dot != nullptr) {
      const float* const from = static_cast<const float*>(source.data) + batch * source.batch +
                                Base::shared_head(x_head, scan.source_share) * source.head +
                                static_cast<int64_t>(at.chunk) * source.token + column;
      // In float64: sums of such dots over many tokens may cancel. Eight lanes have parts of the same rows; with each exchange
      // a lane keeps half of them.
      double sums[8][2];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = 8 * i + 2 * (lane % 4) + c;
          const float* const x = from + row * source.token;
          const float x0 = row < rows && column < width ? *x : 0.0f, x1 = row < rows && column + 8 < width ? x[8] : 0.0f;
          sums[i][c] = static_cast<double>(x0) * o[i][c] + static_cast<double>(x1) * o[i][2 + c];
        }
#pragma unroll
      for (int kept = 4; kept > 0; kept /= 2)
#pragma unroll
        for (int i = 0; i < kept; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const bool upper = lane & 4 * kept;
            const double other = __shfl_xor_sync(kFullWarp, upper ? sums[i][c] : sums[i + kept][c], 4 * kept);
            sums[i][c] = (upper ? sums[i + kept][c] : sums[i][c]) + other;
          }
      hopper::named_barrier(2, 128 * kGroups);
      float* const dots = &small.dots[warp][8 * (lane / 4) + 2 * (lane % 4)];
      dots[0] = static_cast<float>(sums[0][0]), dots[1] = static_cast<float>(sums[0][1]);
      hopper::named_barrier(2, 128 * kGroups);
      if (static_cast<int>(threadIdx.x) < rows) {
        double sum = 0.0;
#pragma unroll
        for (int w = 0; w < 4 * kGroups; ++w) sum += small.dots[w][threadIdx.x];
        *row_dot_at(at.chunk + threadIdx.x) = static_cast<float>(sum);
      }
    }
    const auto put = [&](bool whole) {
      float* const to = out_row(at.chunk) + column;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 by = *reinterpret_cast<const float2*>(&scale[8 * i + 2 * (lane % 4)]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = 8 * i + 2 * (lane % 4) + c;
          if (!whole && row >= rows) continue;
          float* const row_to = to + row * scan.out_strides.token;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float x = o[i][2 * half + c] * (c == 0 ? by.x : by.y);
            if (whole) row_to[8 * half] = x;
            else if (column + 8 * half < width) row_to[8 * half] = scan.accumulate ? row_to[8 * half] + x : x;
          }
        }
      }
    };
    if (rows == kTokens && (slice + 1) * S::kColumns <= width && !scan.accumulate) put(true);
    else put(false);
  }

  __device__ __forceinline__ void run() const {
    const int group = threadIdx.x / 128;
    {
      const Cursor at = Base::first_step();
      Base::zero_unowned(at, threadIdx.x / 32, S::kThreads / 32, threadIdx.x % 32);
      if (!kOut && !at.valid) {
        if (slice == 0 && threadIdx.x == 0) Base::mark_unused_slot();
        return;
      }
    }
    if (threadIdx.x == 0) {
      const auto init = [](uint64_t& barrier, int warps) { mbarrier_init(shared_address(&barrier), 32 * warps); };
      const int scorers = kOut ? 4 : 0;
      for (int i = 0; i < 2; ++i) {
        init(small.table_full[i], 1);
        init(small.table_empty[i], 4 * kGroups + scorers + (loads_with_table() ? kOut ? 4 : 8 : 0));
        init(small.y_full[i], 4);
        init(small.y_empty[i], 4 * kGroups + (scan.causal ? scorers : 0));
      }
      init(small.x_full, 4);
      init(small.x_empty, 4 * kGroups + scorers);
      init(small.z_full, 4);
      init(small.z_empty, 4 * kGroups);
      init(small.p_full, 4);
      init(small.p_empty, 4 * kGroups);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group < kGroups) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kStateRegisters) : "memory");
      carry(group);
    } else if (group == kGroups) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters) : "memory");
      if constexpr (kOut) score();
      else load<false, true>();
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters) : "memory");
      load<true, kOut>();
    }
  }
};
#endif

template <int kWidth, int kGroups, int kPass>
__global__ void __launch_bounds__(Float32Shape<kWidth, kGroups, kPass>::kThreads, 1)
    ChunkScanHopperFloat32Kernel(const __grid_constant__ ChunkScan scan) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using S = Float32Shape<kWidth, kGroups, kPass>;
  extern __shared__ __align__(1024) char tiles[];
  auto& small = *reinterpret_cast<typename S::Small*>(tiles + S::kTileBytes);
  const Float32Cta<S> cta{{scan, S::kOut ? kOutputs : kSegmentSums, blockIdx.x}, small, shared_address(tiles)};
  cta.run();
#endif
}

// For keys of up to kWidth columns (64 or 128) and aligned rows, whose slices are as chunk_scan_slices says. Compiled by
// chunk_scan_hopper_float32_launch.cu.in, a source file a width.
template <int kWidth, int kGroups>
int launch_hopper_float32_shape(const ChunkScan& scan, int pass, void* stream);

}  // namespace chunk
}  // namespace leanfleet
