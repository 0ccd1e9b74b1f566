// Products of a chunk's rows with its keys where key dimensions have decays of their own, and these are only multiplied:
// nothing cancels, no exponent is positive, and a token that forgets all is a factor 0. Shared by prepare_steep_keys.cu and
// grad_key_chunks.cu.
//   Between blocks of 16 tokens: rows with the decay from their block's first token on, times keys with that to their block's
//   last, in two planes each, times the decay over whole blocks between.
//   Within a block: a thread walks a key from its token to the block's end, with 1/8 of its dimensions in registers.
#pragma once

#include "gated_delta_rule/chunks.cuh"
#include "gated_delta_rule/tiles.cuh"

namespace leanfleet::gated_delta_rule {

constexpr int kBefore = kBlocks * (kBlocks - 1) / 2;  // blocks below those on the diagonal

// A 16 x 16 block as the left side of products, in two planes.
struct Planes {
  uint32_t high[4], low[4];
};
// c += left times the transposed block (i, j) of the tiles.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[2][4], const Planes& left, uint32_t high, uint32_t low, int i, int j,
                                         int lane) {
  uint32_t b[4], rest[4];
  load_matrices(b, right_rows(high, i, j, lane));
  load_matrices(rest, right_rows(low, i, j, lane));
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.high, rest[2 * n], rest[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.low, b[2 * n], b[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.high, b[2 * n], b[2 * n + 1]);
}

// The beta of a chunk's token, 0 past its last.
__device__ __forceinline__ float beta_of(const Args& args, const ChunkPlace& chunk, int64_t head, int t) {
  if (t >= chunk.tokens) return 0.0f;
  return args.beta != nullptr ? __ldg(row_of<float>(args.beta, args.beta_strides, chunk.batch, head, chunk.token + t)) : 1.0f;
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 times(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// The decay of blocks first .. last - 1 of dimensions column and column + 1; totals: that of each block.
template <int kD>
__device__ __forceinline__ float2 whole_blocks(const float (&totals)[kBlocks][kD], int first, int last, int column) {
  float2 by = make_float2(1.0f, 1.0f);
  for (int block = first; block < last; ++block) by = times(by, *reinterpret_cast<const float2*>(&totals[block][column]));
  return by;
}

// Two columns of a block of 16 tokens, which a thread of 2 kD has.
template <int kD>
struct KeyColumns {
  int first_token, column;
  float2 decay[kBlock], x[kBlock];

  __device__ __forceinline__ KeyColumns() {
    const int thread = static_cast<int>(threadIdx.x) % (2 * kD);
    first_token = thread / (kD / 2) * kBlock;
    column = thread % (kD / 2) * 2;
  }

  // Decays of tokens, 1 past the chunk's end and past the last dimension; first: the first of the columns' dimensions.
  __device__ __forceinline__ void load_decays(const Args& args, const ChunkPlace& chunk, int64_t head, int first) {
    const int d = first + column, left = static_cast<int>(args.key_width) - d;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = first_token + i;
      decay[i] = make_float2(0.0f, 0.0f);
      if (left <= 0 || t >= chunk.tokens) continue;
      const float* const from = row_of<float>(args.log_decay, args.decay_strides, chunk.batch, head, chunk.token + t) + d;
      decay[i] = make_float2(__ldg(from), left > 1 ? __ldg(from + 1) : 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) decay[i] = make_float2(expf(decay[i].x), expf(decay[i].y));
  }

  // The decay of the block.
  __device__ __forceinline__ float2 over_block() const {
    float2 by = decay[0];
#pragma unroll
    for (int i = 1; i < kBlock; ++i) by = times(by, decay[i]);
    return by;
  }

  // A tile's columns, times factors of rows.
  template <class T>
  __device__ __forceinline__ void take_rows(const unsigned char* tile, const float* factors) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = first_token + i;
      x[i] = times(factors[t], unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(tile + element_offset(t, column))));
    }
  }

  // Calls put(token, pair) for rows times the decay from their block's first token on times `by`; returns that of the block.
  template <class Put>
  __device__ __forceinline__ float2 from_first(float2 by, Put&& put) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      by = times(by, decay[i]);
      put(first_token + i, times(by, x[i]));
    }
    return by;
  }
  // The same for the decay from their token to their block's last.
  template <class Put>
  __device__ __forceinline__ void to_last(float2 by, Put&& put) const {
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      put(first_token + i, times(by, x[i]));
      by = times(by, decay[i]);
    }
  }
};

// Where a dimension's decay stands in its token's row: lanes that read four each, eight dimensions apart, read neighbours.
__device__ __forceinline__ int decay_place(int d) { return d / 64 * 64 + d % 8 / 4 * 32 + d / 8 % 8 * 4 + d % 4; }

// A warp's four columns, of a quarter, of products within a block of the tiles of keys and queries with keys, as they are.
// decays: rows of kD at their places. Calls put(row, key, m, p) with tokens of the block in all eight lanes that have the sums.
template <class T, int kD, class Put>
__device__ __forceinline__ void within_block(uint32_t keys, uint32_t queries, const float* decays, int block, int quarter,
                                             int lane, Put&& put) {
  const int first = kBlock * block, part = lane % 8, from = 4 * quarter + lane / 8;
  float x[kD / 64][8];
#pragma unroll
  for (int i = 0; i < kD / 64; ++i) load_8<T>(keys, first + from, 8 * i + part, x[i]);
  for (int to = 4 * quarter; to < kBlock; ++to) {
    const int row = first + to;
    float m = 0.0f, p = 0.0f;
#pragma unroll
    for (int i = 0; i < kD / 64; ++i) {
      float key[8], query[8];
      load_8<T>(keys, row, 8 * i + part, key);
      load_8<T>(queries, row, 8 * i + part, query);
      const float4* const decay = reinterpret_cast<const float4*>(decays + row * kD + 64 * i) + part;
      const float4 halves[2] = {decay[0], decay[8]};
      const float w[8] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                          halves[1].x, halves[1].y, halves[1].z, halves[1].w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (to > from) x[i][j] *= w[j];
        m += x[i][j] * key[j];
        p += x[i][j] * query[j];
      }
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) {
      m += __shfl_xor_sync(kFullWarp, m, offset);
      p += __shfl_xor_sync(kFullWarp, p, offset);
    }
    put(to, from, m, p);
  }
}

// The n-th block below the diagonal: (1,0), (2,0), (2,1), (3,0) ..
struct Below {
  int row_block, key_block;

  __device__ __forceinline__ explicit Below(int n) {
    row_block = n < 1 ? 1 : n < 3 ? 2 : 3;
    key_block = n - row_block * (row_block - 1) / 2;
  }
};

// c += a 16 x 16 block of rows with decay from their block's first token times keys with decay to their block's last; the
// tiles' second planes are kLow bytes behind the first.
template <class T, int kD, int kLow>
__device__ __forceinline__ void between_blocks(uint32_t rows, uint32_t keys, const float (&totals)[kBlocks][kD], Below of,
                                               int lane, float (&c)[2][4]) {
#pragma unroll 2
  for (int k = 0; k < kD / 16; ++k) {
    Planes left;
    load_matrices(left.high, left_rows(rows, of.row_block, k, lane));
    load_matrices(left.low, left_rows(rows + kLow, of.row_block, k, lane));
    if (of.row_block > of.key_block + 1) {  // whole blocks between them
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 16 * k + fragment_column(lane, 0) + i / 2 * 8;
        const float2 by = whole_blocks(totals, of.key_block + 1, of.row_block, column);
        const float2 high = unpack_pair(T{}, left.high[i]), low = unpack_pair(T{}, left.low[i]);
        uint32_t planes[2];
        split_pair<T>(by.x * (high.x + low.x), by.y * (high.y + low.y), planes);
        left.high[i] = planes[0], left.low[i] = planes[1];
      }
    }
    multiply<T>(c, left, keys, keys + kLow, of.key_block, k, lane);
  }
}

// Two numbers of a row into two planes of a record.
template <class T, int kBytes>
__device__ __forceinline__ void send_planes(unsigned char (&to)[2][kBytes], int row, int column, float2 x) {
  uint32_t planes[2];
  split_pair<T>(x.x, x.y, planes);
  *reinterpret_cast<uint32_t*>(to[0] + element_offset(row, column)) = planes[0];
  *reinterpret_cast<uint32_t*>(to[1] + element_offset(row, column)) = planes[1];
}

}  // namespace leanfleet::gated_delta_rule
