// What the kernels that work on chunks of 64 tokens share: rows of a chunk as tiles in shared memory, products of its rows
// with its keys, and the decay between its tokens.
#pragma once

#include "core/integers.h"
#include "core/mma.cuh"
#include "gated_delta_rule/gated_delta_rule.h"

namespace leanfleet::gated_delta_rule {

using namespace tile;

constexpr int kChunk = 64;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlock = 16;  // tokens of a block of M
constexpr int kBlocks = kChunk / kBlock;
constexpr float kForgotten = -104.0f;  // exp of this and less is 0
constexpr int kSquareBytes = kChunk * kChunk * 2;

// Rows of a chunk into a tile of kWidth columns from `column` on, zeros where there are none, by kOf threads.
template <class T, int kWidth, int kOf = kThreads>
__device__ __forceinline__ void fetch(uint32_t to, const T* rows, int64_t stride, int tokens, int column, int width) {
#pragma unroll
  for (unsigned first = 0; first < kChunk * kWidth / 8; first += kOf) {
    const unsigned i = first + threadIdx.x;
    const int row = static_cast<int>(i / (kWidth / 8)), chunk = static_cast<int>(i % (kWidth / 8));
    const bool there = row < tokens && column + chunk * 8 < width;
    cp_async(to + chunk_offset<kChunk>(row, chunk), there ? rows + row * stride + column + chunk * 8 : rows, there ? 16 : 0);
  }
}

template <class T>
__device__ __forceinline__ const T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head,
                                           int64_t token) {
  return static_cast<const T*>(data) + batch * strides.batch + head * strides.head + token * strides.token;
}

// The byte of a number of a tile.
__device__ __forceinline__ uint32_t element_offset(int row, int column) {
  return chunk_offset<kChunk>(row, column / 8) + column % 8 * 2;
}

// Eight neighbouring numbers of a row.
template <class T>
__device__ __forceinline__ void unpack_8(uint4 bits, float (&x)[8]) {
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair(T{}, pairs[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
template <class T>
__device__ __forceinline__ void load_8(uint32_t tile, int row, int chunk, float (&x)[8]) {
  unpack_8<T>(load_16_bytes(tile + chunk_offset<kChunk>(row, chunk)), x);
}

// The factor of a row: `scale`, over its length with normalize.
template <class T, int kD>
__device__ __forceinline__ float row_factor(uint32_t rows, int row, bool normalize, float scale) {
  if (!normalize) return scale;
  float squares = 0.0f;
  for (int chunk = 0; chunk < kD / 8; ++chunk) {
    float x[8];
    load_8<T>(rows, row, chunk, x);
#pragma unroll
    for (int i = 0; i < 8; i += 2) squares += x[i] * x[i] + x[i + 1] * x[i + 1];
  }
  return scale * rsqrtf(squares + kUnitRowEps);
}

// The running sums of g in a chunk as sum + rest, from the last token that forgets all before it: differences of two are
// exact enough whatever their size. reset: the last such token up to a token, or -1.
struct DecaySums {
  float sum[kChunk], rest[kChunk];
  int reset[kChunk];
};

__device__ __forceinline__ float decay_between(const DecaySums& s, int from, int to) {
  if (from < s.reset[to]) return 0.0f;
  const float g = (s.sum[to] - s.sum[from]) + (s.rest[to] - s.rest[from]);
  return expf(g > 0.0f ? 0.0f : g);  // rounded above 0 at most; NaN stays NaN
}

// One warp: lane l brings g of tokens l and 32 + l. prefix: the decay from the chunk's begin to each of them.
__device__ __forceinline__ void sum_decay(const float (&g)[2], DecaySums& s, float (&prefix)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  double sum = 0.0;
  int reset = -1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane;
    const bool forgets = g[half] <= kForgotten;
    double own = forgets ? 0.0 : static_cast<double>(g[half]);
    int last = forgets ? t : -1;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double before = __shfl_up_sync(kFullWarp, own, offset);
      const int earlier = __shfl_up_sync(kFullWarp, last, offset);
      if (lane >= offset) {
        own += before;
        last = last > earlier ? last : earlier;
      }
    }
    own += sum;
    last = last > reset ? last : reset;
    s.sum[t] = static_cast<float>(own);
    s.rest[t] = static_cast<float>(own - static_cast<double>(s.sum[t]));
    s.reset[t] = last;
    prefix[half] = last >= 0 ? 0.0f : expf(s.sum[t]);
    sum = __shfl_sync(kFullWarp, own, 31);
    reset = __shfl_sync(kFullWarp, last, 31);
  }
  __syncwarp();
}

// A lane's part of a 16 x 8 product: row lane / 4, and 8 more for elements 2 and 3; column 2 (lane % 4) + element % 2.
__device__ __forceinline__ int fragment_row(int lane, int element) { return lane / 4 + 8 * (element / 2); }
__device__ __forceinline__ int fragment_column(int lane, int element) { return 2 * (lane % 4) + element % 2; }

// float16 has few exponents: a power of two that brings what is as large as `largest` near 2^8, and what undoes it. 0, infinity
// and what is too small or large for one stay as they are.
__device__ __forceinline__ void scale_of(float largest, float& factor, float& inverse) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  const bool usual = exponent > -60 && exponent < 120;
  factor = usual ? __uint_as_float(static_cast<uint32_t>(127 + 8 - exponent) << 23) : 1.0f;
  inverse = usual ? __uint_as_float(static_cast<uint32_t>(127 - 8 + exponent) << 23) : 1.0f;
}
// The same of a row, of whose numbers `largest` is the largest in this lane; the row's four lanes call it together.
__device__ __forceinline__ void row_scale(float largest, float& factor, float& inverse) {
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
  scale_of(largest, factor, inverse);
}

// Addresses for ldmatrix of a 16 x 16 part of a tile: row 16 r .., chunks 2 c and 2 c + 1. rows_side: as the right side of a
// product that takes the tile's rows as columns; else (transposed loads) its rows as the depth; left: as the left side.
__device__ __forceinline__ uint32_t right_rows(uint32_t tile, int r, int c, int lane) {
  return tile + chunk_offset<kChunk>(16 * r + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2);
}
__device__ __forceinline__ uint32_t right_depth(uint32_t tile, int r, int c, int lane) {
  return tile + chunk_offset<kChunk>(16 * r + lane / 8 % 2 * 8 + lane % 8, 2 * c + lane / 16);
}
__device__ __forceinline__ uint32_t left_rows(uint32_t tile, int r, int c, int lane) { return right_depth(tile, r, c, lane); }

// Rows 16 warp .. of X K^T, columns up to the diagonal block; X is the tile at `rows`.
template <class T, int kD>
__device__ __forceinline__ void pair_products(uint32_t rows, uint32_t keys, int warp, int lane, float (&c)[2 * kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
#pragma unroll 2
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t a[4];
    load_matrices(a, left_rows(rows, warp, k, lane));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block > warp) continue;
      uint32_t b[4];
      load_matrices(b, right_rows(keys, block, k, lane));
      mma(T{}, c[2 * block], a, b[0], b[1]);
      mma(T{}, c[2 * block + 1], a, b[2], b[3]);
    }
  }
}

// Two neighbouring numbers of a tile; column is even.
__device__ __forceinline__ void store_pair(uint32_t tile, int row, int column, uint32_t pair) {
  store_4_bytes(tile + element_offset(row, column), pair);
}
template <class T>
__device__ __forceinline__ void store_planes(uint32_t high, uint32_t low, int row, int column, float x, float y) {
  uint32_t planes[2];
  split_pair<T>(x, y, planes);
  store_pair(high, row, column, planes[0]);
  store_pair(low, row, column, planes[1]);
}

// One warp: the inverse of I + M's 16 x 16 block, in place of -M's, of which only what is below the diagonal is read. Lane j
// below 16 finds column j: x_i = [i == j] + sum of -M_il x_l.
constexpr int kDiagonalStride = kBlock + 4;  // floats, so that rows of a block are read 16 bytes at a time
__device__ __forceinline__ void invert_block(float (&block)[kBlock][kDiagonalStride], int lane) {
  float x[kBlock];
  const int j = lane % kBlock;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sums[2] = {i == j ? 1.0f : 0.0f, 0.0f};
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&block[i][l]);
      sums[0] += four.x * x[l];
      if (l + 1 < i) sums[1] += four.y * x[l + 1];
      if (l + 2 < i) sums[0] += four.z * x[l + 2];
      if (l + 3 < i) sums[1] += four.w * x[l + 3];
    }
    x[i] = sums[0] + sums[1];
  }
  __syncwarp();
  if (lane < kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) block[i][j] = x[i];
  }
  __syncwarp();
}

}  // namespace leanfleet::gated_delta_rule
