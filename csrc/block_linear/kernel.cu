// Few rows of the input, and weights whose blocks are whole pieces of 16 bytes: warps read the weights once, a lane a piece of
// each of kOutputs rows of them, beside the input in shared memory, as floats or, where integers are multiplied, as bytes. More
// rows go through panels (panels.cu), and what those do not take through tiles of the output, on tensor cores in 16-bit types,
// for which weights times their scales plus shifts, and a rounded input, become T.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "block_linear/block_linear.h"
#include "block_linear/device.cuh"
#include "core/integers.h"
#include "core/mma.cuh"
#include "core/op.h"
#include "core/shared_memory.cuh"
#include "core/with_type.cuh"

namespace leanfleet::block_linear {

namespace {

using tile::kFullWarp;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kOutputs = 4;                     // whose weights a warp reads together
constexpr int kFewRows = 8, kMostTogether = 4;  // rows of the input, and those that share a reading of the weights
constexpr int kMostHeld = 96 << 10;             // bytes of the input in shared memory
constexpr int kWarpsOfSm = 16, kMostCtas = 2;   // that keep the memory busy
constexpr int64_t kMostBlocks = int64_t{1} << 30;

__device__ __forceinline__ void write(const Args& args, int64_t row, int64_t output, float x) {
  for_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    static_cast<T*>(args.output)[row * args.outputs + output] = static_cast<T>(x);
  });
}

// Rounding of blocks of the input. A block is shared by a power of two of lanes next to each other, which have about four
// columns each.
LEANFLEET_HD int lanes_of(int64_t block) {
  int lanes = 1;
  while (lanes < 32 && 4 * lanes < block) lanes *= 2;
  return lanes;
}

// The step of a block, in all of its lanes: NaN where a number is not finite, 0 where all are next to 0. The whole warp calls it.
// As integers the bits of magnitudes have their order, and those that are not finite are the largest.
__device__ __forceinline__ uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }
__device__ __forceinline__ float step_of_largest(uint32_t most, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) most = larger(most, __shfl_xor_sync(kFullWarp, most, other));
  if (most >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const float largest = __uint_as_float(most);
  return largest < kLeastMagnitude ? 0.0f : __fdiv_rn(largest, kLargestInteger);
}
template <class T>
__device__ __forceinline__ float step_of(const T* from, int64_t block, int lanes) {
  uint32_t most = 0;
#pragma unroll 4
  for (int64_t k = threadIdx.x & (lanes - 1); k < block; k += lanes)
    most = larger(most, __float_as_uint(to_float(from[k])) & 0x7fffffffu);
  return step_of_largest(most, lanes);
}
// q of a number of a block with a step: 0 where it is 0 or NaN.
__device__ __forceinline__ float integer_of(float x, float step) { return step > 0.0f ? rintf(__fdiv_rn(x, step)) : 0.0f; }

// body(block's index, whether it is a block of these lanes) for `count` blocks, shared out among `threads`; whole warps call it.
template <class F>
__device__ __forceinline__ void for_blocks(int64_t count, int lanes, int64_t thread, int64_t threads, F&& body) {
  const int64_t own = thread / lanes;
  for (int64_t first = thread / 32 * (32 / lanes); first < count; first += threads / lanes) {
    const int64_t i = first + (own - thread / 32 * (32 / lanes));
    body(i < count ? i : count - 1, i < count);
  }
}

// The input, rounded, where tiles read it from.
__global__ void __launch_bounds__(kThreads) RoundKernel(const __grid_constant__ Args args) {
  let_next_kernel_begin();
  const int lanes = lanes_of(args.block);
  for_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    for_blocks(args.rows * args.blocks, lanes, thread, threads, [&](int64_t i, bool own) {
      const T* const from = static_cast<const T*>(args.input) + i * args.block;
      T* const to = static_cast<T*>(args.rounded_input) + i * args.block;
      const float step = step_of(from, args.block, lanes);
      for (int64_t k = threadIdx.x & (lanes - 1); own && k < args.block; k += lanes)
        to[k] = static_cast<T>(step * integer_of(to_float(from[k]), step));
    });
  });
}

// How the kernel of few rows goes about a call. The input is held as [row][pitch] chunks of 16 bytes: 4 floats or 16 bytes of
// columns. Of integers, [row][pieces of the stage] of a step and the sum of a piece's integers follow.
struct RowsPlan {
  int row_groups;    // of as many rows as share a reading of the weights
  int split;         // warps that share rows of weights
  int64_t groups;    // of outputs that a CTA has at a time
  int stage;         // columns of the input that are held at once: whole pieces
  int pitch;         // a multiple of 8
  unsigned inverse;  // 2^32 over the pieces of a block, rounded up; 0 where that is one piece
  bool fours;        // takes_fours()
};

// Where chunk c of a row stands: lanes that read every second, fourth or eighth chunk come to all banks.
__device__ __forceinline__ int place_of(int chunk) { return chunk ^ (chunk >> 3 & 7); }

// body(r, column - begin, q, step) for columns begin .. begin + columns of rows row + r of the input, r < rows, by the whole CTA.
template <class F>
__device__ __forceinline__ void for_rounded(const Args& args, int64_t row, int rows, int begin, int columns, F&& body) {
  const int block = static_cast<int>(args.block), lanes = lanes_of(block);
  const int first = begin / block, blocks = (begin + columns + block - 1) / block - first;
  for_type(args.dtype, [&](auto type) {
    const auto* const input = static_cast<const decltype(type)*>(args.input) + row * args.width;
    for_blocks(int64_t{rows} * blocks, lanes, threadIdx.x, kThreads, [&](int64_t i, bool own) {
      const int r = static_cast<int>(i) / blocks, start = (first + static_cast<int>(i) % blocks) * block;
      const auto* const from = input + r * args.width + start;
      const float step = step_of(from, block, lanes);
      for (int k = threadIdx.x & (lanes - 1); own && k < block; k += lanes) {
        const int column = start + k - begin;
        if (column >= 0 && column < columns) body(r, column, integer_of(to_float(from[k]), step), step);
      }
    });
  });
}

// Whether four columns may be read at once, and with round_input a block is rounded by lanes that have four columns each.
bool takes_fours(const Args& args) {
  if (args.width % 4 != 0 || !aligned(args.input, args.dtype == 0 ? 16 : 8)) return false;
  return !args.round_input || (args.block % 4 == 0 && args.block / 4 == lanes_of(args.block));
}
__device__ __forceinline__ uint4 load_four(const Args& args, int64_t i) {
  if (args.dtype == 0) return __ldg(static_cast<const uint4*>(args.input) + i / 4);
  const uint2 pairs = __ldg(static_cast<const uint2*>(args.input) + i / 4);
  return make_uint4(pairs.x, pairs.y, 0, 0);
}
__device__ __forceinline__ float4 floats_of(const uint4& bits, int32_t dtype) {
  const float2 first = tile::unpack_pair(__half{}, bits.x), second = tile::unpack_pair(__half{}, bits.y);
  if (dtype == 1) return make_float4(first.x, first.y, second.x, second.y);
  if (dtype == 0)
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
                     __uint_as_float(bits.y & 0xffff0000u));
}

// Columns begin .. begin + columns of rows from `row` on, shared out among a CTA's threads by fours. Several fours of a thread are
// on their way at a time: most calls wait once, and weights may be asked for in between.
struct Fours {
  static constexpr int kOnTheirWay = 4;
  uint4 bits[kOnTheirWay];

  __device__ __forceinline__ void load(const Args& args, int64_t row, int rows, int begin, int columns, int first) {
    const int of_row = columns / 4, count = rows * of_row;
#pragma unroll
    for (int turn = 0; turn < kOnTheirWay; ++turn) {
      const int wanted = first + turn * kThreads, i = wanted < count ? wanted : count - 1;
      bits[turn] = load_four(args, (row + i / of_row) * args.width + begin + i % of_row * 4);
    }
  }
  // body(r, column - begin, four columns, whether they are there) for all rows row + r; whole warps call it. load() has been called
  // for the thread's first.
  template <class F>
  __device__ __forceinline__ void run(const Args& args, int64_t row, int rows, int begin, int columns, F&& body) {
    const int of_row = columns / 4, count = rows * of_row, own = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int first = own; first - own < count;) {
#pragma unroll
      for (int turn = 0; turn < kOnTheirWay; ++turn) {
        const int i = first + turn * kThreads;
        if (i - own < count) body(i / of_row, i % of_row * 4, floats_of(bits[turn], args.dtype), i < count);
      }
      first += kOnTheirWay * kThreads;
      if (first - own < count) load(args, row, rows, begin, columns, first);
    }
  }
};

// A block's step and the integers of a lane's four columns.
__device__ __forceinline__ float round_four(const float4& x, int lanes, float (&q)[4]) {
  const float from[4] = {x.x, x.y, x.z, x.w};
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) most = larger(most, __float_as_uint(from[j]) & 0x7fffffffu);
  const float step = step_of_largest(most, lanes);
#pragma unroll
  for (int j = 0; j < 4; ++j) q[j] = integer_of(from[j], step);
  return step;
}

// Columns begin .. begin + columns of `rows` rows of the input from `row` on, and zeros for those behind up to `together`, as
// floats.
__device__ __noinline__ void hold_floats(const Args& args, int64_t row, int rows, int together, int begin, int columns,
                                         int pitch, float* held) {
  const auto at = [&](int r, int k) -> float& { return held[(r * pitch + place_of(k >> 2)) * 4 + (k & 3)]; };
  for (int r = rows; r < together; ++r)
    for (int k = threadIdx.x; k < columns; k += kThreads) at(r, k) = 0.0f;
  if (args.round_input)
    return for_rounded(args, row, rows, begin, columns, [&](int r, int k, float q, float step) { at(r, k) = step * q; });
  for_type(args.dtype, [&](auto type) {
    const auto* const input = static_cast<const decltype(type)*>(args.input) + row * args.width + begin;
    for (int r = 0; r < rows; ++r)
#pragma unroll 8
      for (int k = threadIdx.x; k < columns; k += kThreads) at(r, k) = to_float(input[r * args.width + k]);
  });
}

// The same as integers, with the steps and sums of pieces of kColumns, which are parts of blocks. Of int4 eight columns are held
// in the order of their nibbles: the even ones first.
template <int kColumns>
__device__ __noinline__ void hold_integers(const Args& args, int64_t row, int rows, int together, int begin, int columns,
                                           int pitch, uint4* held) {
  const int pieces = columns / kColumns;
  auto* const bytes = reinterpret_cast<int8_t*>(held);
  auto* const factors = reinterpret_cast<float2*>(held + together * pitch);
  for (int r = rows; r < together; ++r) {
    for (int c = threadIdx.x; c < columns / 16; c += kThreads) held[r * pitch + place_of(c)] = make_uint4(0, 0, 0, 0);
    for (int p = threadIdx.x; p < pieces; p += kThreads) factors[r * pieces + p] = make_float2(0.0f, 0.0f);
  }
  for_rounded(args, row, rows, begin, columns, [&](int r, int column, float q, float step) {
    const int j = kColumns == 32 ? (column & ~7) | (column & 1) << 2 | (column >> 1 & 3) : column;
    bytes[(r * pitch + place_of(j >> 4)) * 16 + (j & 15)] = static_cast<int8_t>(q);
    if (column % kColumns == 0) factors[r * pieces + column / kColumns].x = step;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < rows * pieces; i += kThreads) {
    const int r = i / pieces, p = i % pieces;
    int sum = 0;
#pragma unroll
    for (int c = 0; c < kColumns / 16; ++c) {
      const uint4 q = held[r * pitch + place_of(p * (kColumns / 16) + c)];
      for (const uint32_t word : {q.x, q.y, q.z, q.w}) sum = __dp4a(static_cast<int>(word), 0x01010101, sum);
    }
    factors[i].y = static_cast<float>(sum);
  }
}

// The same by fours, with weights on their way: nothing is called, for which they would have to be there.
__device__ __forceinline__ void hold_float_fours(Fours& fours, const Args& args, int64_t row, int rows, int together, int begin,
                                                 int columns, int pitch, float4* held) {
  const int lanes = static_cast<int>(args.block) / 4;
#pragma unroll 1
  for (int i = rows * pitch + threadIdx.x; i < together * pitch; i += kThreads) held[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  fours.run(args, row, rows, begin, columns, [&](int r, int column, float4 x, bool own) {
    if (args.round_input) {
      float q[4];
      const float step = round_four(x, lanes, q);
      x = make_float4(step * q[0], step * q[1], step * q[2], step * q[3]);
    }
    if (own) held[r * pitch + place_of(column / 4)] = x;
  });
}
template <int kColumns>
__device__ __forceinline__ void hold_integer_fours(Fours& fours, const Args& args, int64_t row, int rows, int together,
                                                   int begin, int columns, int pitch, uint4* held) {
  const int pieces = columns / kColumns, lanes = static_cast<int>(args.block) / 4;
  auto* const factors = reinterpret_cast<float2*>(held + together * pitch);
#pragma unroll 1
  for (int i = rows * pitch + threadIdx.x; i < together * pitch; i += kThreads) held[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = rows * pieces + threadIdx.x; i < together * pieces; i += kThreads) factors[i] = make_float2(0.0f, 0.0f);
  fours.run(args, row, rows, begin, columns, [&](int r, int column, const float4& x, bool own) {
    float q[4];
    const float step = round_four(x, lanes, q);
    int sum = 0;
    uint32_t four = 0;  // of int4 the even columns first
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int integer = static_cast<int>(q[j]), place = kColumns == 32 ? j % 2 * 2 + j / 2 : j;
      four |= (static_cast<uint32_t>(integer) & 0xffu) << 8 * place;
      sum += integer;
    }
#pragma unroll
    for (int other = 1; other < kColumns / 4; other *= 2) sum += __shfl_xor_sync(kFullWarp, sum, other);
    if (!own) return;
    char* const chunk = reinterpret_cast<char*>(held + r * pitch + place_of(column / 16));
    if constexpr (kColumns == 32) {
      auto* const to = reinterpret_cast<uint16_t*>(chunk + (column & 8) + (column & 4) / 2);
      to[0] = static_cast<uint16_t>(four), to[2] = static_cast<uint16_t>(four >> 16);
    } else {
      *reinterpret_cast<uint32_t*>(chunk + (column & 15)) = four;
    }
    if (column % kColumns == 0) factors[r * pieces + column / kColumns] = make_float2(step, static_cast<float>(sum));
  });
}

// RoundKernel where takes_fours() is true: a thread has four columns.
__global__ void __launch_bounds__(kThreads) RoundFoursKernel(const __grid_constant__ Args args) {
  let_next_kernel_begin();
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, count = args.rows * args.width / 4;
  const int64_t four = wanted < count ? wanted : count - 1;
  float q[4];
  const float step = round_four(floats_of(load_four(args, 4 * four), args.dtype), static_cast<int>(args.block) / 4, q);
  if (wanted >= count) return;
  for_type(args.dtype, [&](auto type) {
    auto* const to = static_cast<decltype(type)*>(args.rounded_input) + 4 * four;
    if constexpr (sizeof(type) == 4)
      *reinterpret_cast<float4*>(to) = make_float4(step * q[0], step * q[1], step * q[2], step * q[3]);
    else
      *reinterpret_cast<uint2*>(to) =
          make_uint2(tile::pack_pair(type, step * q[0], step * q[1]), tile::pack_pair(type, step * q[2], step * q[3]));
  });
}

// A lane's piece of one row of weights, with the bits of its block's scale and shift.
struct Ahead {
  uint32_t words[4];
  uint32_t scale, shift;
};

// A CTA goes through the outputs with its rows of the input held, as long as all columns fit.
template <Piece kPiece, int kRows>
__global__ void __launch_bounds__(kThreads, 2) BlockRowsKernel(const __grid_constant__ Args args, const RowsPlan plan) {
  constexpr int kColumns = columns_of(kPiece), kChunks = kColumns / (in_integers(kPiece) ? 16 : 4);
  extern __shared__ uint4 held[];
  __shared__ float partial[2][kWarps][kRows * kOutputs];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % plan.split, units = kWarps / plan.split;
  const int64_t row = static_cast<int64_t>(blockIdx.x % plan.row_groups) * kRows;
  const int rows = static_cast<int>(args.rows - row < kRows ? args.rows - row : kRows), width = static_cast<int>(args.width);
  const auto row_pieces = static_cast<unsigned>(width / kColumns);
  const bool bfloat16 = args.dtype == 2, shifted = args.shift != nullptr;
  bool turn = false, holds = false;
  for (int64_t group = blockIdx.x / plan.row_groups; group < plan.groups; group += gridDim.x / plan.row_groups, turn = !turn) {
    const int64_t first = (group * units + warp / plan.split) * kOutputs;
    // Lines behind the last output are that of the last one, and are not written.
    const int64_t origin = first < args.outputs ? first : args.outputs - 1;
    const int last = static_cast<int>(args.outputs - 1 - origin < kOutputs - 1 ? args.outputs - 1 - origin : kOutputs - 1);
    const uint4* const weights = static_cast<const uint4*>(args.weight) + origin * row_pieces;
    const Factors scales(args.scale, args.scale_dtype, origin * args.blocks);
    // Without shifts the scales stand in for them, multiplied by nothing: a choice among loads would make some wait for others.
    const Factors shifts(shifted ? args.shift : args.scale, shifted ? args.shift_dtype : args.scale_dtype,
                         origin * args.blocks);
    float sums[kRows][kOutputs] = {};
    for (int begin = 0; begin < width; begin += plan.stage) {
      const int columns = width - begin < plan.stage ? width - begin : plan.stage, pieces = columns / kColumns;
      const auto load = [&](int p, Ahead(&to)[kOutputs]) {
        const unsigned piece = static_cast<unsigned>(begin / kColumns + p);
        const unsigned block = plan.inverse == 0 ? piece : __umulhi(piece, plan.inverse);
        uint32_t blocks[kOutputs], of_scales[kOutputs], of_shifts[kOutputs];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          const auto line = static_cast<unsigned>(o < last ? o : last);
          blocks[o] = line * static_cast<unsigned>(args.blocks) + block;
          asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(to[o].words[0]), "=r"(to[o].words[1]), "=r"(to[o].words[2]), "=r"(to[o].words[3])
                       : "l"(weights + (line * row_pieces + piece)));
        }
        scales.load(blocks, of_scales);
        shifts.load(blocks, of_shifts);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) to[o].scale = of_scales[o], to[o].shift = of_shifts[o];
      };
      int p = part * 32 + lane;
      Ahead ahead[kOutputs];
      const bool early = holds || plan.fours;
      Fours fours;
      if (!holds && plan.fours) fours.load(args, row, rows, begin, columns, static_cast<int>(threadIdx.x));
      if (early && p < pieces) load(p, ahead);
      if (!holds) {
        __syncthreads();  // for those who still read the columns before
        if constexpr (in_integers(kPiece)) {
          if (plan.fours) hold_integer_fours<kColumns>(fours, args, row, rows, kRows, begin, columns, plan.pitch, held);
          else hold_integers<kColumns>(args, row, rows, kRows, begin, columns, plan.pitch, held);
        } else {
          if (plan.fours)
            hold_float_fours(fours, args, row, rows, kRows, begin, columns, plan.pitch, reinterpret_cast<float4*>(held));
          else hold_floats(args, row, rows, kRows, begin, columns, plan.pitch, reinterpret_cast<float*>(held));
        }
        __syncthreads();
        holds = columns == width;
      }
      if (!early && p < pieces) load(p, ahead);
      while (p < pieces) {
        Ahead now[kOutputs];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) now[o] = ahead[o];
        const int own = p;
        p += plan.split * 32;
        if (p < pieces) load(p, ahead);
        if constexpr (in_integers(kPiece)) {
          int dots[kRows][kOutputs] = {};
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const uint4 q = held[r * plan.pitch + place_of(own * kChunks + c)];
              const uint32_t four[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
              for (int o = 0; o < kOutputs; ++o)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const uint32_t w = kPiece == Piece::kInt8Products
                                         ? now[o].words[i]
                                         : now[o].words[2 * c + i / 2] >> (i % 2 * 4) & 0x0f0f0f0fu;  // with 8 added
                  dots[r][o] = __dp4a(static_cast<int>(w), static_cast<int>(four[i]), dots[r][o]);
                }
            }
          }
          const float2* const factors = reinterpret_cast<const float2*>(held + kRows * plan.pitch);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float2 of_input = factors[r * pieces + own];
#pragma unroll
            for (int o = 0; o < kOutputs; ++o) {
              const float factor = float_of(now[o].scale, args.scale_dtype), added = float_of(now[o].shift, args.shift_dtype);
              const float product =
                  static_cast<float>(dots[r][o]) - (kPiece == Piece::kInt4Products ? 8.0f * of_input.y : 0.0f);
              sums[r][o] += of_input.x * (shifted ? fmaf(factor, product, added * of_input.y) : factor * product);
            }
          }
        } else {
          float dots[kRows][kOutputs] = {}, totals[kRows] = {};
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            float4 x[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              x[r] = reinterpret_cast<const float4*>(held)[r * plan.pitch + place_of(own * kChunks + c)];
              if (shifted) totals[r] += x[r].x + x[r].y + (x[r].z + x[r].w);
            }
#pragma unroll
            for (int o = 0; o < kOutputs; ++o) {
              float w[4];
              four_columns<kPiece>(now[o].words, c, bfloat16, w);
#pragma unroll
              for (int r = 0; r < kRows; ++r)
                dots[r][o] = fmaf(x[r].w, w[3], fmaf(x[r].z, w[2], fmaf(x[r].y, w[1], fmaf(x[r].x, w[0], dots[r][o]))));
            }
          }
#pragma unroll
          for (int o = 0; o < kOutputs; ++o) {
            const float factor = float_of(now[o].scale, args.scale_dtype), added = float_of(now[o].shift, args.shift_dtype);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              sums[r][o] = fmaf(factor, dots[r][o], sums[r][o]);
              if (shifted) sums[r][o] = fmaf(added, totals[r], sums[r][o]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sums[r][o] += __shfl_xor_sync(kFullWarp, sums[r][o], other);
        if (lane == 0) partial[turn][warp][r * kOutputs + o] = sums[r][o];
      }
    __syncthreads();  // one is enough: the next group's sums have the other half of `partial`
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * units * kOutputs; i += kThreads) {
      const int r = i / (units * kOutputs), unit = i / kOutputs % units, o = i % kOutputs;
      const int64_t output = (group * units + unit) * kOutputs + o;
      if (output >= args.outputs) continue;
      float sum = args.bias != nullptr ? float_at(args.bias, args.dtype, output) : 0.0f;
#pragma unroll 1
      for (int j = 0; j < plan.split; ++j) sum += partial[turn][unit * plan.split + j][r * kOutputs + o];
      write(args, row + r, output, sum);
    }
  }
}

// What tiles may do.
struct TilePlan {
  int64_t row_tiles;
  bool wide_input, wide_weights;  // eight columns are there or not, and may be read together
  bool whole_blocks;              // eight columns are of one block
  bool paired;                    // two outputs next to each other may be written together
};
constexpr int kTile = 64;          // rows, outputs, and in 16-bit types columns
constexpr int kTileThreads = 128;  // in 16-bit types: four warps with a quarter of the tile each
constexpr int kFloatColumns = 32, kFloatPitch = kTile + 4;

// An axis is shorter than 2^31: a division of 64 bits would be a hundred instructions.
__device__ __forceinline__ uint32_t block_of(const Args& args, int64_t column) {
  return static_cast<uint32_t>(column) / static_cast<uint32_t>(args.block);
}
template <class T, Form kForm>
__device__ __forceinline__ float weight_at(const Args& args, int64_t output, int64_t column) {
  const int64_t at = output * args.width + column;
  if constexpr (kForm == Form::kOfT) return to_float(static_cast<const T*>(args.weight)[at]);
  const auto* const bytes = static_cast<const uint8_t*>(args.weight);
  if constexpr (kForm == Form::kInt4)
    return lean_attention::number_at(lean_attention::kInt4, bytes + at / 2, static_cast<int>(at % 2));
  return lean_attention::number_at(kForm == Form::kInt8 ? lean_attention::kInt8 : lean_attention::kFloat8, bytes + at, 0);
}

// Eight columns of a row of weights, and the bits of their scale and shift where they have the same.
template <class T, Form kForm>
struct Eight {
  uint32_t words[2 * sizeof(T)];
  uint32_t scale, shift;

  // What can be asked for ahead. column: a multiple of 8.
  __device__ __forceinline__ void load(const Args& args, const TilePlan& plan, int64_t output, int64_t column) {
    if (output >= args.outputs || column >= args.width) return;
    if (plan.wide_weights) {
      const int64_t at = output * args.width + column;
      const auto* const bytes = static_cast<const char*>(args.weight);
      if constexpr (kForm == Form::kInt4) {
        words[0] = __ldg(reinterpret_cast<const uint32_t*>(bytes + at / 2));
      } else if constexpr (kForm == Form::kOfT) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
          const uint4 x = __ldg(reinterpret_cast<const uint4*>(bytes + at * static_cast<int64_t>(sizeof(T))) + i);
          words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
        }
      } else {
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(bytes + at));
        words[0] = x.x, words[1] = x.y;
      }
    }
    if (plan.whole_blocks) {
      const int64_t block = output * args.blocks + block_of(args, column);
      scale = bits_at(args.scale, args.scale_dtype, block);
      shift = bits_at(args.shift, args.shift_dtype, block);
    }
  }

  // The weights times scales plus shifts; 0 where none are.
  __device__ __forceinline__ void values(const Args& args, const TilePlan& plan, int64_t output, int64_t column,
                                         float (&w)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = 0.0f;
    if (output >= args.outputs || column >= args.width) return;
    if (plan.wide_weights) {
      constexpr Piece kOfT = sizeof(T) == 4 ? Piece::kFloats : Piece::kPairs;
      constexpr Piece kPiece = kForm == Form::kInt8     ? Piece::kInt8
                               : kForm == Form::kInt4   ? Piece::kInt4
                               : kForm == Form::kFloat8 ? Piece::kFloat8
                                                        : kOfT;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float four[4];
        four_columns<kPiece>(words, i, std::is_same_v<T, __nv_bfloat16>, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[4 * i + j] = four[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < args.width) w[i] = weight_at<T, kForm>(args, output, column + i);
    }
    if (plan.whole_blocks) {
      const float factor = float_of(scale, args.scale_dtype), added = float_of(shift, args.shift_dtype);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < args.width) w[i] = fmaf(factor, w[i], added);
    } else {
      const uint32_t first = block_of(args, column);
      int64_t block = output * args.blocks + first, left = (int64_t{first} + 1) * args.block - column;
#pragma unroll 1
      for (int i = 0; i < 8 && column + i < args.width; ++i) {
        if (left == 0) ++block, left = args.block;
        --left;
        const float factor = float_at(args.scale, args.scale_dtype, block),
                    added = float_at(args.shift, args.shift_dtype, block);
#pragma unroll
        for (int j = 0; j < 8; ++j)  // an index that the compiler does not know would put them into memory
          if (j == i) w[j] = fmaf(factor, w[j], added);
      }
    }
  }
};

// A CTA has kTile rows by kTile outputs, a warp 32 by 32 of them. Both factors stand in shared memory as lines of kTile columns in
// the order of chunk_offset(), two tiles of each: one is filled while the other is multiplied.
template <class T, Form kForm>
__global__ void __launch_bounds__(kTileThreads)
    BlockTilesKernel(const __grid_constant__ Args args, const __grid_constant__ TilePlan plan) {
  constexpr int kTileBytes = kTile * kTile * 2, kTurns = kTile * kTile / 8 / kTileThreads;
  __shared__ __align__(128) unsigned char tiles[2][2][kTileBytes];
  const int64_t row = static_cast<int64_t>(blockIdx.x) % plan.row_tiles * kTile;
  const int64_t output = static_cast<int64_t>(blockIdx.x) / plan.row_tiles * kTile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 2 * 32, warp_output = warp % 2 * 32;
  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8;  // a thread's chunks: of each kTileThreads / 8th line
  const auto line_of = [&](int turn) { return line + turn * (kTileThreads / 8); };

  const auto fill_input = [&](int half, int64_t begin) {
    const int64_t column = begin + 8 * chunk;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t at = row + line_of(turn);
      const uint32_t to = tile::shared_address(tiles[half][0]) + tile::chunk_offset<kTile>(line_of(turn), chunk);
      const T* const from = static_cast<const T*>(args.input) + at * args.width + column;
      const bool there = at < args.rows && column < args.width;
      if (plan.wide_input) {
        tile::cp_async(to, there ? from : args.input, there ? 16 : 0);
      } else {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = there && column + i < args.width ? to_float(from[i]) : 0.0f;
        tile::store_16_bytes(to, make_uint4(tile::pack_pair(T{}, x[0], x[1]), tile::pack_pair(T{}, x[2], x[3]),
                                            tile::pack_pair(T{}, x[4], x[5]), tile::pack_pair(T{}, x[6], x[7])));
      }
    }
    tile::cp_async_commit();
  };
  Eight<T, kForm> ahead[kTurns];
  const auto load_weights = [&](int64_t begin) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) ahead[turn].load(args, plan, output + line_of(turn), begin + 8 * chunk);
  };
  const auto fill_weights = [&](int half, int64_t begin) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float w[8];
      ahead[turn].values(args, plan, output + line_of(turn), begin + 8 * chunk, w);
      tile::store_16_bytes(tile::shared_address(tiles[half][1]) + tile::chunk_offset<kTile>(line_of(turn), chunk),
                           make_uint4(tile::pack_pair(T{}, w[0], w[1]), tile::pack_pair(T{}, w[2], w[3]),
                                      tile::pack_pair(T{}, w[4], w[5]), tile::pack_pair(T{}, w[6], w[7])));
    }
  };

  float sums[2][4][4] = {};  // [16 rows][8 outputs][of a fragment]
  const auto multiply = [&](int half) {
    const uint32_t input = tile::shared_address(tiles[half][0]), weights = tile::shared_address(tiles[half][1]);
#pragma unroll
    for (int k = 0; k < kTile / 8; k += 2) {
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile::load_matrices(a[i], input + tile::chunk_offset<kTile>(warp_row + 16 * i + lane % 16, k + lane / 16));
        const int of_weights = warp_output + 16 * i + lane / 16 * 8 + lane % 8;
        tile::load_matrices(b[i], weights + tile::chunk_offset<kTile>(of_weights, k + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) tile::mma(T{}, sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  };

  fill_input(0, 0);
  load_weights(0);
  fill_weights(0, 0);
  tile::cp_async_wait();
  __syncthreads();
  int half = 0;
  for (int64_t begin = 0; begin < args.width; begin += kTile, half ^= 1) {
    const int64_t next = begin + kTile;
    if (next < args.width) {
      fill_input(half ^ 1, next);
      load_weights(next);
    }
    multiply(half);
    if (next < args.width) fill_weights(half ^ 1, next);
    tile::cp_async_wait();
    __syncthreads();
  }

#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t o = output + warp_output + 8 * j + lane % 4 * 2;
    float bias[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (args.bias != nullptr && o + i < args.outputs) bias[i] = float_at(args.bias, args.dtype, o + i);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = row + warp_row + 8 * i + lane / 4;
      if (r >= args.rows || o >= args.outputs) continue;
      const float low = sums[i / 2][j][i % 2 * 2] + bias[0], high = sums[i / 2][j][i % 2 * 2 + 1] + bias[1];
      T* const to = static_cast<T*>(args.output) + r * args.outputs + o;
      if (plan.paired) {
        *reinterpret_cast<uint32_t*>(to) = tile::pack_pair(T{}, low, high);
      } else {
        to[0] = static_cast<T>(low);
        if (o + 1 < args.outputs) to[1] = static_cast<T>(high);
      }
    }
  }
}

// The same in float32: a thread has 4 rows by 4 outputs. Both factors stand in shared memory as [column][row or output].
template <Form kForm>
__global__ void __launch_bounds__(kThreads)
    BlockFloatTilesKernel(const __grid_constant__ Args args, const __grid_constant__ TilePlan plan) {
  static_assert(kThreads == kTile * kFloatColumns / 8);
  __shared__ __align__(16) float inputs[kFloatColumns][kFloatPitch], weights[kFloatColumns][kFloatPitch];
  const int64_t row = static_cast<int64_t>(blockIdx.x) % plan.row_tiles * kTile;
  const int64_t output = static_cast<int64_t>(blockIdx.x) / plan.row_tiles * kTile;
  const int line = threadIdx.x % kTile, chunk = threadIdx.x / kTile;  // the eight columns that a thread brings
  const int own_row = threadIdx.x / 16 * 4, own_output = threadIdx.x % 16 * 4;

  Eight<float, kForm> ahead;
  float x[8];
  const auto load = [&](int64_t begin) {
    const int64_t column = begin + 8 * chunk;
    const float* const from = static_cast<const float*>(args.input) + (row + line) * args.width + column;
    const bool there = row + line < args.rows && column < args.width;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    if (there && plan.wide_input) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
      }
    } else if (there) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < args.width) x[i] = from[i];
    }
    ahead.load(args, plan, output + line, column);
  };

  float sums[4][4] = {};  // [row][output]
  load(0);
  for (int64_t begin = 0; begin < args.width; begin += kFloatColumns) {
    float w[8];
    ahead.values(args, plan, output + line, begin + 8 * chunk, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) inputs[8 * chunk + i][line] = x[i], weights[8 * chunk + i][line] = w[i];
    __syncthreads();
    if (begin + kFloatColumns < args.width) load(begin + kFloatColumns);
    float part[4][4] = {};  // added up on its own: fewer roundings of large sums
#pragma unroll 8
    for (int k = 0; k < kFloatColumns; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(&inputs[k][own_row]);
      const float4 b = *reinterpret_cast<const float4*>(&weights[k][own_output]);
      const float of_rows[4] = {a.x, a.y, a.z, a.w}, of_outputs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int o = 0; o < 4; ++o) part[r][o] = fmaf(of_rows[r], of_outputs[o], part[r][o]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int o = 0; o < 4; ++o) sums[r][o] += part[r][o];
    __syncthreads();
  }
#pragma unroll
  for (int o = 0; o < 4; ++o) {
    const int64_t at = output + own_output + o;
    if (at >= args.outputs) break;
    const float bias = args.bias != nullptr ? float_at(args.bias, args.dtype, at) : 0.0f;
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (row + own_row + r < args.rows)
        static_cast<float*>(args.output)[(row + own_row + r) * args.outputs + at] = sums[r][o] + bias;
  }
}

Piece piece_of(const Args& args) {
  switch (args.form) {
    case Form::kInt8: return args.round_input ? Piece::kInt8Products : Piece::kInt8;
    case Form::kInt4: return args.round_input ? Piece::kInt4Products : Piece::kInt4;
    case Form::kFloat8: return Piece::kFloat8;
    default: return args.dtype == 0 ? Piece::kFloats : Piece::kPairs;
  }
}

// Blocks of whole pieces: rows of weights are then whole pieces too.
bool takes_few_rows(const Args& args) {
  const int64_t columns = columns_of(piece_of(args));
  if (args.rows > kFewRows || args.block % columns != 0 || !aligned(args.weight, 16)) return false;
  return args.width < int64_t{1} << 30 && args.width / columns * (args.block / columns) < int64_t{1}
                                                                                              << 32;  // as `inverse` needs
}

template <Piece kPiece, int kRows>
int launch_rows(const Args& args, cudaStream_t stream) {
  constexpr int kColumns = columns_of(kPiece), kChunk = in_integers(kPiece) ? 16 : 4;  // columns of a chunk of the input
  int device = 0, sms = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  constexpr int kDeclared = static_cast<int>(sizeof(float)) * 2 * kWarps * kRows * kOutputs;
  const auto kernel = BlockRowsKernel<kPiece, kRows>;
  if (error == cudaSuccess) error = allow_shared_memory(kernel, kDeclared);
  if (error != cudaSuccess) return error;

  RowsPlan plan = {};
  const auto bytes_of = [](int64_t columns) {
    const int64_t chunks = round_up(ceil_div(columns, int64_t{kChunk}), int64_t{8});
    return kRows * (16 * chunks + (in_integers(kPiece) ? columns / kColumns * static_cast<int64_t>(sizeof(float2)) : 0));
  };
  // Where not all columns fit: as many turns of a warp as do, the same number for all warps if they have one each.
  constexpr int kTurn = 32 * kColumns;
  int64_t stage = args.width;
  if (const int64_t most_held = std::min(kMostHeld, most - kDeclared); bytes_of(stage) > most_held) {
    const int64_t turns = most_held / bytes_of(kTurn);
    stage = (turns < kWarps ? turns : turns / kWarps * kWarps) * kTurn;
  }
  plan.stage = static_cast<int>(stage);
  plan.pitch = static_cast<int>(round_up(ceil_div(stage, int64_t{kChunk}), int64_t{8}));
  plan.fours = takes_fours(args);
  const int64_t pieces_of_block = args.block / kColumns;
  plan.inverse = pieces_of_block == 1 ? 0 : static_cast<unsigned>(ceil_div(int64_t{1} << 32, pieces_of_block));
  plan.row_groups = static_cast<int>(ceil_div(args.rows, int64_t{kRows}));
  const int64_t warps = ceil_div(args.outputs, int64_t{kOutputs}) * plan.row_groups, pieces = stage / kColumns;
  for (plan.split = 1; plan.split < kWarps && warps * plan.split < sms * kWarpsOfSm && pieces >= plan.split * 64;)
    plan.split *= 2;
  plan.groups = ceil_div(args.outputs, int64_t{kWarps / plan.split * kOutputs});
  const int64_t shared = bytes_of(stage), ctas = clamp(most / (shared + kDeclared), int64_t{1}, int64_t{kMostCtas});
  const int64_t together = std::min(plan.groups, std::max<int64_t>(sms * ctas / plan.row_groups, 1));
  kernel<<<static_cast<unsigned>(together * plan.row_groups), kThreads, static_cast<size_t>(shared), stream>>>(args, plan);
  return cudaGetLastError();
}

template <Piece kPiece>
int launch_piece(const Args& args, cudaStream_t stream) {
  if (args.rows == 1) return launch_rows<kPiece, 1>(args, stream);
  if (args.rows == 2) return launch_rows<kPiece, 2>(args, stream);
  return launch_rows<kPiece, kMostTogether>(args, stream);
}

int launch_few_rows(const Args& args, cudaStream_t stream) {
  switch (piece_of(args)) {
    case Piece::kInt8: return launch_piece<Piece::kInt8>(args, stream);
    case Piece::kInt4: return launch_piece<Piece::kInt4>(args, stream);
    case Piece::kFloat8: return launch_piece<Piece::kFloat8>(args, stream);
    case Piece::kPairs: return launch_piece<Piece::kPairs>(args, stream);
    case Piece::kFloats: return launch_piece<Piece::kFloats>(args, stream);
    case Piece::kInt8Products: return launch_piece<Piece::kInt8Products>(args, stream);
    default: return launch_piece<Piece::kInt4Products>(args, stream);
  }
}

int launch_rounding(const Args& args, cudaStream_t stream) {
  if (const int64_t fours = ceil_div(args.rows * args.width, int64_t{4} * kThreads);
      takes_fours(args) && fours <= kMostBlocks) {
    RoundFoursKernel<<<static_cast<unsigned>(fours), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  const int64_t blocks = ceil_div(args.rows * args.blocks * lanes_of(args.block), int64_t{kThreads});
  RoundKernel<<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T, Form kForm>
int launch_tiles(const Args& args, cudaStream_t stream) {
  constexpr int64_t kEight = kForm == Form::kInt4 ? 4 : kForm == Form::kOfT ? 16 : 8;  // what eight weights are read by
  TilePlan plan = {};
  plan.row_tiles = ceil_div(args.rows, int64_t{kTile});
  plan.wide_input = args.width % 8 == 0 && aligned(args.input, 16);
  plan.wide_weights = args.width % 8 == 0 && aligned(args.weight, kEight);
  plan.whole_blocks = args.block % 8 == 0;
  plan.paired = args.outputs % 2 == 0 && aligned(args.output, 4);
  const auto tiles = static_cast<unsigned>(plan.row_tiles * ceil_div(args.outputs, int64_t{kTile}));
  if constexpr (std::is_same_v<T, float>) BlockFloatTilesKernel<kForm><<<tiles, kThreads, 0, stream>>>(args, plan);
  else BlockTilesKernel<T, kForm><<<tiles, kTileThreads, 0, stream>>>(args, plan);
  return cudaGetLastError();
}

template <class T>
int launch_tiles(const Args& args, cudaStream_t stream) {
  switch (args.form) {
    case Form::kInt8: return launch_tiles<T, Form::kInt8>(args, stream);
    case Form::kInt4: return launch_tiles<T, Form::kInt4>(args, stream);
    case Form::kFloat8: return launch_tiles<T, Form::kFloat8>(args, stream);
    default: return launch_tiles<T, Form::kOfT>(args, stream);
  }
}

}  // namespace

Way way_of(const Args& args) {
  if (args.rows == 0 || args.outputs == 0) return Way::kNothing;
  if (takes_few_rows(args)) return Way::kRows;
  return takes_panels(args) ? Way::kPanels : Way::kTiles;
}

int launch(const Args& given, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Args args = given;
  const Way way = way_of(args);
  if (way == Way::kNothing) return cudaSuccess;
  if (way == Way::kRows) return launch_few_rows(args, cuda_stream);
  if (args.round_input) {
    if (const int error = launch_rounding(args, cuda_stream); error != cudaSuccess) return error;
    args.input = args.rounded_input;
  }
  if (way == Way::kPanels) return launch_panels(args, args.round_input, cuda_stream);
  return with_type(args.dtype, [&](auto type) { return launch_tiles<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::block_linear
