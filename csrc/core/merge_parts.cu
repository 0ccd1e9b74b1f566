// A warp merges a row: its lanes share out the columns, and each reads the few LSEs of the row for itself.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/merge_parts.h"
#include "core/merge_weights.cuh"
#include "core/with_type.cuh"

namespace leanfleet::merge_parts {

namespace {

constexpr int kWarps = 4;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

template <class T>
__global__ void __launch_bounds__(32 * kWarps) MergeKernel(Args args) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < args.rows; row += int64_t{gridDim.x} * kWarps) {
    const float* const lses = args.partial_lse + row;
    const RowWeights weights = weigh([&](int64_t w) { return lses[w * args.rows]; }, args.parts, args.sinks, row);
    if (lane == 0) args.lse[row] = weights.lse();
    for (int64_t i = lane; i < args.width; i += 32) {
      float total = 0.0f;
      for (int64_t w = 0; w < args.parts; ++w) {
        const float lse = lses[w * args.rows];
        if (lse == kNothing) continue;
        const T part = static_cast<const T*>(args.partial_output)[(w * args.rows + row) * args.width + i];
        total += static_cast<float>(part) * weights.of(lse);
      }
      static_cast<T*>(args.output)[row * args.width + i] = static_cast<T>(total);
    }
  }
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (args.rows + kWarps - 1) / kWarps));
  MergeKernel<T><<<blocks, 32 * kWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::merge_parts
