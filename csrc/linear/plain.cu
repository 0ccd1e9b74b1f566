// Any product on any GPU, for those that neither other way takes: tiles of 64 by 64 outputs, of which a thread has 4 by 4.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/op.h"
#include "core/with_type.cuh"
#include "linear/linear.h"

namespace leanfleet::linear {

namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kOwn = 4;
constexpr int64_t kMostRowTiles = 65535;  // side by side

template <class T>
__global__ void __launch_bounds__(kThreads) PlainKernel(const __grid_constant__ Args args, T* output) {
  __shared__ float input_tile[kDepth][kTile + 4],
      weight_tile[kDepth][kTile + 4];  // a row's begin is in another bank than the last's
  const auto* const input = static_cast<const T*>(args.input);
  const auto* const weight = static_cast<const T*>(args.weight);
  const auto* const bias = static_cast<const T*>(args.bias);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int own_row = static_cast<int>(threadIdx.x) / 16 * kOwn, own_column = static_cast<int>(threadIdx.x) % 16 * kOwn;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTile; row < args.rows;
       row += static_cast<int64_t>(gridDim.y) * kTile) {
    float sums[kOwn][kOwn] = {};
    for (int64_t k = 0; k < args.depth; k += kDepth) {
      for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
        const int r = i / kDepth, d = i % kDepth;
        input_tile[d][r] =
            row + r < args.rows && k + d < args.depth ? static_cast<float>(input[(row + r) * args.depth + k + d]) : 0.0f;
        const int c = i % kTile, e = i / kTile;
        weight_tile[e][c] = column + c < args.columns && k + e < args.depth
                                ? static_cast<float>(weight[(k + e) * args.columns + column + c])
                                : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
#pragma unroll
        for (int r = 0; r < kOwn; ++r)
#pragma unroll
          for (int c = 0; c < kOwn; ++c)
            sums[r][c] = fmaf(input_tile[d][own_row + r], weight_tile[d][own_column + c], sums[r][c]);
      }
      __syncthreads();
    }
    for (int r = 0; r < kOwn; ++r)
      for (int c = 0; c < kOwn; ++c) {
        const int64_t at_row = row + own_row + r, at = column + own_column + c;
        if (at_row < args.rows && at < args.columns)
          output[at_row * args.columns + at] =
              static_cast<T>(sums[r][c] + (bias != nullptr ? static_cast<float>(bias[at]) : 0.0f));
      }
  }
}

}  // namespace

int launch_plain(const Args& args, void* output, void* stream) {
  const int64_t row_tiles = (args.rows + kTile - 1) / kTile, column_tiles = (args.columns + kTile - 1) / kTile;
  const dim3 blocks(static_cast<unsigned>(column_tiles),
                    static_cast<unsigned>(row_tiles < kMostRowTiles ? row_tiles : kMostRowTiles));
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    PlainKernel<T><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, static_cast<T*>(output));
    return cudaGetLastError();
  });
}

}  // namespace leanfleet::linear
