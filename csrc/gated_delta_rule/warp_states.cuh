// What kernels share in which a warp has 16 value columns of a state, transposed, and takes them from chunk to chunk on
// mma.sync: the system of a chunk, and products of the state.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gated_delta_rule/tiles.cuh"

namespace leanfleet::gated_delta_rule {

constexpr int kSlice = 16 * kWarps;  // value columns of a CTA

// What a token of a value head has beside its rows. key: 1 over the length of its row of keys.
struct TokenScalars {
  float beta[kChunk], prefix[kChunk], suffix[kChunk], key[kChunk];
  DecaySums decay;
};
struct Scalars : TokenScalars {
  float query[kChunk];  // factors of rows of queries
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
};

// One warp: beta and the sums of g of `tokens` tokens; the others have 0 of both.
__device__ __forceinline__ void take_scalars(const Args& args, int64_t batch, int64_t head, int64_t token, int tokens,
                                             TokenScalars& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float g[2] = {0.0f, 0.0f}, prefix[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane;
    s.beta[t] = t >= tokens            ? 0.0f
                : args.beta == nullptr ? 1.0f
                                       : __ldg(row_of<float>(args.beta, args.beta_strides, batch, head, token + t));
    if (t < tokens && args.log_decay != nullptr)
      g[half] = __ldg(row_of<float>(args.log_decay, args.decay_strides, batch, head, token + t));
  }
  sum_decay(g, s.decay, prefix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    s.prefix[32 * half + lane] = prefix[half];
    s.suffix[32 * half + lane] = decay_between(s.decay, 32 * half + lane, kChunk - 1);
  }
}

// Two of an array's floats, those of the tokens that a lane has in tile n of a product.
__device__ __forceinline__ float2 column_pair(const float* of, int n, int lane) {
  return *reinterpret_cast<const float2*>(of + 8 * n + fragment_column(lane, 0));
}

// What a token has of the sums of g, as the later of pairs.
struct Until {
  float sum, rest;
  int reset, token;

  __device__ __forceinline__ Until(const DecaySums& s, int t) : sum(s.sum[t]), rest(s.rest[t]), reset(s.reset[t]), token(t) {}

  // The decay from tokens `first` and first + 1, which is even, to this one; 0 from later ones. own: from itself too.
  template <bool kOwn>
  __device__ __forceinline__ float2 from(const DecaySums& s, int first) const {
    const float2 sums = *reinterpret_cast<const float2*>(&s.sum[first]),
                 rests = *reinterpret_cast<const float2*>(&s.rest[first]);
    const float x = ratio((sum - sums.x) + (rest - rests.x)), y = ratio((sum - sums.y) + (rest - rests.y));
    const int last = kOwn ? token : token - 1;
    return make_float2(first >= reset && first <= last ? x : 0.0f, first + 1 >= reset && first < last ? y : 0.0f);
  }

 private:
  static __device__ __forceinline__ float ratio(float g) {
    return exp2_fast((g > 0.0f ? 0.0f : g) * 1.4426950408889634f);  // rounded above 0 at most; NaN stays NaN
  }
};

// A 16 x 16 block of floats as the left side of a product, in two 16-bit planes; float16's times a factor, which is undone by
// rows or, where blocks have one factor, behind all products.
template <class T>
struct Left {
  static constexpr bool kScaled = std::is_same_v<T, __half>;
  uint32_t high[4], low[4];
  float inverse[2];

  // a, b: columns 0 to 7 and 8 to 15.
  __device__ __forceinline__ void take(const float (&a)[4], const float (&b)[4]) {
    float factor[2] = {1.0f, 1.0f};
    inverse[0] = inverse[1] = 1.0f;
    if constexpr (kScaled) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row_scale(fmaxf(fmaxf(fabsf(a[2 * r]), fabsf(a[2 * r + 1])), fmaxf(fabsf(b[2 * r]), fabsf(b[2 * r + 1]))), factor[r],
                  inverse[r]);
    }
    split(a, b, factor);
  }
  __device__ __forceinline__ void split(const float (&a)[4], const float (&b)[4], const float (&factor)[2]) {
    const float pairs[4][2] = {{a[0], a[1]}, {a[2], a[3]}, {b[0], b[1]}, {b[2], b[3]}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t planes[2];
      if constexpr (kScaled) split_pair<T>(factor[i % 2] * pairs[i][0], factor[i % 2] * pairs[i][1], planes);
      else split_pair<T>(pairs[i][0], pairs[i][1], planes);
      high[i] = planes[0], low[i] = planes[1];
    }
  }

  // c += this, as it is in its planes, times a 16 x 8 right side of one plane.
  __device__ __forceinline__ void multiply_planes(float (&c)[4], uint32_t b0, uint32_t b1) const {
    mma(T{}, c, low, b0, b1);
    mma(T{}, c, high, b0, b1);
  }
  // c += this times a right side of one plane, or of two.
  __device__ __forceinline__ void multiply(float (&c)[4], uint32_t b0, uint32_t b1) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_planes(kScaled ? sum : c, b0, b1);
    add(c, sum);
  }
  __device__ __forceinline__ void multiply(float (&c)[4], uint32_t b0, uint32_t b1, uint32_t low0, uint32_t low1) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma(T{}, kScaled ? sum : c, high, low0, low1);
    multiply_planes(kScaled ? sum : c, b0, b1);
    add(c, sum);
  }

 private:
  __device__ __forceinline__ void add(float (&c)[4], const float (&sum)[4]) const {
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += inverse[i / 2] * sum[i];
    }
  }
};

// float16's factor of all of a warp's 16 rows, and what undoes it.
template <class T, int kTiles>
__device__ __forceinline__ void scale_rows(const float (&x)[kTiles][4], float (&factor)[2], float& inverse) {
  factor[0] = factor[1] = inverse = 1.0f;
  if constexpr (Left<T>::kScaled) {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[n][e]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    row_scale(largest, factor[0], inverse);
    factor[1] = factor[0];
  }
}

// x times two factors of its columns and one of all.
__device__ __forceinline__ void scale_columns(float (&x)[2 * kBlocks][4], const float* a, const float* b, int lane,
                                              float all = 1.0f) {
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n) {
    const float2 p = column_pair(a, n, lane), q = column_pair(b, n, lane);
#pragma unroll
    for (int e = 0; e < 4; e += 2) x[n][e] *= all * p.x * q.x, x[n][e + 1] *= all * p.y * q.y;
  }
}

// A warp's 16 columns of a tile of rows of the value's width, transposed: as left sides of products, and as floats.
template <class T>
__device__ __forceinline__ void load_columns(uint32_t tile, int warp, int lane, uint32_t (&left)[kBlocks][4],
                                             float (&x)[2 * kBlocks][4]) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    load_matrices_transposed(left[k], right_rows(tile, k, warp, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair(T{}, left[k][i]);
      x[2 * k + i / 2][i % 2 * 2] = pair.x, x[2 * k + i / 2][i % 2 * 2 + 1] = pair.y;
    }
  }
}

// beta (v - factors u) in place of u, which is K S transposed; of(n): factors of the tokens that a lane has in tile n.
template <class T, class Of>
__device__ __forceinline__ void take_rest(uint32_t values, const float* beta, Of&& of, int warp, int lane,
                                          float (&u)[2 * kBlocks][4]) {
  uint32_t left[kBlocks][4];
  float value[2 * kBlocks][4];
  load_columns<T>(values, warp, lane, left, value);
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n) {
    const float2 betas = column_pair(beta, n, lane), by = of(n);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      u[n][e] = betas.x * (value[n][e] - by.x * u[n][e]);
      u[n][e + 1] = betas.y * (value[n][e + 1] - by.y * u[n][e + 1]);
    }
  }
}
// The same with the decay from the chunk's begin and the lengths of keys.
template <class T>
__device__ __forceinline__ void take_rest(uint32_t values, const TokenScalars& s, int warp, int lane,
                                          float (&u)[2 * kBlocks][4]) {
  const auto of = [&](int n) {
    const float2 prefix = column_pair(s.prefix, n, lane), key = column_pair(s.key, n, lane);
    return make_float2(prefix.x * key.x, prefix.y * key.y);
  };
  take_rest<T>(values, s.beta, of, warp, lane, u);
}

// The block above the diagonal of a system's first plane that has the third of block i on it: where keys are nearly parallel,
// what bfloat16's first two leave out of these inverses is most of what is lost.
__device__ __forceinline__ int third_row(int i) { return i < kBlocks - 1 ? i : 0; }
__device__ __forceinline__ int third_column(int i) { return i < kBlocks - 1 ? i + 1 : kBlocks - 1; }

// One warp: the inverse of I + M's block on the diagonal, of which `diagonal` has -M's, to the tiles of -M.
template <class T>
__device__ __forceinline__ void put_inverse_block(float (&diagonal)[kBlock][kDiagonalStride], uint32_t high, uint32_t low,
                                                  int warp, int lane) {
  invert_block(diagonal, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = fragment_row(lane, e), column = 8 * n + fragment_column(lane, e);
      uint32_t planes[3];
      split_pair<T>(diagonal[row][column], diagonal[row][column + 1], planes);
      store_pair(high, kBlock * warp + row, kBlock * warp + column, planes[0]);
      store_pair(low, kBlock * warp + row, kBlock * warp + column, planes[1]);
      if constexpr (!Left<T>::kScaled)
        store_pair(high, kBlock * third_row(warp) + row, kBlock * third_column(warp) + column, planes[2]);
    }
}

// This warp's rows of the tiles of -M, in two planes, with the inverse of I + M's block in place of the diagonal one.
template <class T, int kD>
__device__ __forceinline__ void make_system(uint32_t keys, uint32_t high, uint32_t low, Scalars& s, int warp, int lane) {
  float c[2 * kBlocks][4];
  pair_products<T, kD>(keys, keys, warp, lane, c);
  float (&diagonal)[kBlock][kDiagonalStride] = s.diagonal[warp];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = fragment_row(lane, 2 * r), t = kBlock * warp + row;
    const Until until(s.decay, t);
    const float factor = -s.beta[t] * s.key[t];
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n / 2 > warp) continue;
      const int first = 8 * n + fragment_column(lane, 0);
      const float2 decay = until.from<false>(s.decay, first), key = column_pair(s.key, n, lane);
      const float x = factor * key.x * decay.x * c[n][2 * r], y = factor * key.y * decay.y * c[n][2 * r + 1];
      if (n / 2 < warp) store_planes<T>(high, low, t, first, x, y);
      else *reinterpret_cast<float2*>(&diagonal[row][first % kBlock]) = make_float2(x, y);
    }
  }
  __syncwarp();
  put_inverse_block<T>(diagonal, high, low, warp, lane);
}

// The 16 x 16 block (r, c) of a tile as the right side of a product that takes its rows as columns, with kTurned its columns.
template <bool kTurned>
__device__ __forceinline__ void load_block(uint32_t (&b)[4], uint32_t tile, int r, int c, int lane) {
  if constexpr (kTurned) load_matrices_transposed(b, right_depth(tile, r, c, lane));
  else load_matrices(b, right_rows(tile, r, c, lane));
}

// (I + M)^-1, with kTurned (I + M)^-T, times what u holds, transposed, in its place; the system is make_system's.
template <class T, bool kTurned = false>
__device__ __forceinline__ void solve(uint32_t high, uint32_t low, int lane, float (&u)[2 * kBlocks][4]) {
  Left<T> solved[kBlocks];
#pragma unroll
  for (int step = 0; step < kBlocks; ++step) {
    const int i = kTurned ? kBlocks - 1 - step : step;
    uint32_t b[4], rest[4];
#pragma unroll
    for (int before = 0; before < step; ++before) {
      const int j = kTurned ? kBlocks - 1 - before : before, row = kTurned ? j : i, column = kTurned ? i : j;
      load_block<kTurned>(b, high, row, column, lane);
      load_block<kTurned>(rest, low, row, column, lane);
      solved[j].multiply(u[2 * i], b[0], b[1], rest[0], rest[1]);
      solved[j].multiply(u[2 * i + 1], b[2], b[3], rest[2], rest[3]);
    }
    solved[i].take(u[2 * i], u[2 * i + 1]);
    load_block<kTurned>(b, high, i, i, lane);
    load_block<kTurned>(rest, low, i, i, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) u[2 * i + n][e] = 0.0f;
      solved[i].multiply(u[2 * i + n], b[2 * n], b[2 * n + 1], rest[2 * n], rest[2 * n + 1]);
    }
    if constexpr (!Left<T>::kScaled) {
      load_block<kTurned>(rest, high, third_row(i), third_column(i), lane);
      mma(T{}, u[2 * i], solved[i].high, rest[0], rest[1]);
      mma(T{}, u[2 * i + 1], solved[i].high, rest[2], rest[3]);
    }
    solved[i].take(u[2 * i], u[2 * i + 1]);
  }
}

// A warp's 16 columns of a state, transposed: [D/8 tiles][element], rows are value columns. kD may be a part of D; first: its
// first key dimension.
template <class T, int kD>
struct State {
  float x[kD / 8][4];

  template <bool kStore>
  __device__ __forceinline__ void move(float* data, bool v_first, int column, int lane, int D, int V, int first = 0) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int v = column + fragment_row(lane, e), d = first + 8 * n + fragment_column(lane, e);
        const bool there = v < V && d < D;
        float* const at = data + (v_first ? static_cast<int64_t>(v) * D + d : static_cast<int64_t>(d) * V + v);
        if constexpr (kStore) {
          if (there) *at = x[n][e];
        } else {
          x[n][e] = there ? *at : 0.0f;
        }
      }
  }

  // by(n): factors of the key dimensions that a lane has in tile n.
  template <class By>
  __device__ __forceinline__ void decay(By&& by) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const float2 of = by(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= e % 2 ? of.y : of.x;
    }
  }

  // c = S^T X^T for the tile of X, or two planes of X that are kLow bytes apart. Calls split(k, left side, what undoes its
  // scale) for 16 key dimensions at a time.
  template <int kLow = 0, class Split>
  __device__ __forceinline__ void multiply(uint32_t rows, int lane, float (&c)[2 * kBlocks][4], Split&& split) const {
    float factor[2], inverse;
    scale_rows<T>(x, factor, inverse);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      Left<T> left;
      left.split(x[2 * k], x[2 * k + 1], factor);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t b[4];
        if constexpr (kLow > 0) {
          load_matrices(b, right_rows(rows + kLow, block, k, lane));
          mma(T{}, c[2 * block], left.high, b[0], b[1]);
          mma(T{}, c[2 * block + 1], left.high, b[2], b[3]);
        }
        load_matrices(b, right_rows(rows, block, k, lane));
        left.multiply_planes(c[2 * block], b[0], b[1]);
        left.multiply_planes(c[2 * block + 1], b[2], b[3]);
      }
      split(k, left, inverse);
    }
    if constexpr (Left<T>::kScaled) {
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] *= inverse;
    }
  }
  __device__ __forceinline__ void multiply(uint32_t rows, int lane, float (&c)[2 * kBlocks][4]) const {
    multiply(rows, lane, c, [](int, const Left<T>&, float) {});
  }

  // S^T = kept S^T + U^T X for the tile of X, or two planes that are kLow bytes apart; u holds U^T. Products are added up on
  // their own, as tensor cores truncate sums. kept(n): of the key dimensions that a lane has in tile n.
  __device__ __forceinline__ void enter(uint32_t rows, int lane, const float (&u)[2 * kBlocks][4], float kept) {
    enter<0>(rows, lane, u, [kept](int) { return make_float2(kept, kept); });
  }
  template <int kLow, class Kept>
  __device__ __forceinline__ void enter(uint32_t rows, int lane, const float (&u)[2 * kBlocks][4], Kept&& kept) {
    float factor[2], inverse;
    scale_rows<T>(u, factor, inverse);
    Left<T> left[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) left[k].split(u[2 * k], u[2 * k + 1], factor);
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) {
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        uint32_t b[4];
        if constexpr (kLow > 0) {
          load_matrices_transposed(b, right_depth(rows + kLow, k, n, lane));
          mma(T{}, sum[0], left[k].high, b[0], b[1]);
          mma(T{}, sum[1], left[k].high, b[2], b[3]);
        }
        load_matrices_transposed(b, right_depth(rows, k, n, lane));
        left[k].multiply_planes(sum[0], b[0], b[1]);
        left[k].multiply_planes(sum[1], b[2], b[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 by = kept(2 * n + half);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[2 * n + half][e] =
              (e % 2 ? by.y : by.x) * x[2 * n + half][e] + (Left<T>::kScaled ? inverse * sum[half][e] : sum[half][e]);
      }
    }
  }
};

}  // namespace leanfleet::gated_delta_rule
