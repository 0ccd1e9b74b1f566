// A warp merges a row: its lanes share out the columns, and each reads the few LSEs of the row for itself.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/merge_parts.h"
#include "core/sinks.cuh"

namespace leanfleet::merge_parts {

namespace {

constexpr int kWarps = 4;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

template <class T>
__global__ void __launch_bounds__(32 * kWarps) MergeKernel(Args args) {
  constexpr float kNothing = -INFINITY;
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < args.rows; row += int64_t{gridDim.x} * kWarps) {
    const float* const lses = args.partial_lse + row;
    float largest = kNothing, sum = 0.0f;
    bool some = false;
    for (int64_t w = 0; w < args.parts; ++w) largest = fmaxf(largest, lses[w * args.rows]);
    for (int64_t w = 0; w < args.parts; ++w) {
      const float lse = lses[w * args.rows];
      if (lse == kNothing) continue;
      some = true;
      sum += expf(lse - largest);
    }
    if (some) add_sink(args.sinks, row, largest, sum);
    if (lane == 0) args.lse[row] = some ? largest + logf(sum) : kNothing;
    for (int64_t i = lane; i < args.width; i += 32) {
      float total = 0.0f;
      for (int64_t w = 0; w < args.parts; ++w) {
        const float lse = lses[w * args.rows];
        if (lse == kNothing) continue;  // its output may hold anything
        const T part = static_cast<const T*>(args.partial_output)[(w * args.rows + row) * args.width + i];
        total += static_cast<float>(part) * (expf(lse - largest) / sum);
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
  if (args.dtype == static_cast<int32_t>(DType::kFloat32)) return launch_type<float>(args, cuda_stream);
  if (args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(args, cuda_stream);
  return launch_type<__nv_bfloat16>(args, cuda_stream);
}

}  // namespace leanfleet::merge_parts
