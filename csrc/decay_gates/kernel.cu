// A thread has one number of a token's decays; the first of them that of beta too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dependent_launch.cuh"
#include "core/op.h"
#include "core/with_type.cuh"
#include "decay_gates/decay_gates.h"

namespace leanfleet::decay_gates {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = int64_t{1} << 30;

__device__ __forceinline__ float softplus(float x) { return x == x ? fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) : x; }

// What a decay's logarithm may be: a NaN forgets everything, which leaves nothing finite where nothing should be.
__device__ __forceinline__ float as_log_decay(float x) { return x <= 0.0f ? x : x == x ? 0.0f : -INFINITY; }

// Index: uint32_t where it counts all numbers and a stride more, since each takes several divisions.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads) GateKernel(const __grid_constant__ Args args) {
  let_next_launch_begin();
  const Index heads = static_cast<Index>(args.heads), width = static_cast<Index>(args.width), of_row = heads * width;
  const Index tokens = static_cast<Index>(args.tokens), rows = static_cast<Index>(args.batch) * tokens;
  const Index count = rows * of_row, betas = args.beta != nullptr ? rows * heads : 0;
  const auto inside = [&](Index row) {
    if (args.query_lens == nullptr) return true;
    const int32_t own = args.query_lens[row / tokens];
    return own > 0 && row % tokens < static_cast<Index>(own);
  };
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<Index>(gridDim.x) * kThreads) {
    const Index row = i / of_row, column = i - row * of_row;
    float step = 0.0f, log_decay = 0.0f;
    if (inside(row)) {
      const float x = static_cast<float>(static_cast<const T*>(args.input)[row * args.input_pitch + column]);
      step = softplus(args.bias != nullptr ? x + args.bias[column] : x);
      if (step < args.step_min) step = args.step_min;
      if (step > args.step_max) step = args.step_max;
      log_decay = as_log_decay(args.rate[column / width] * step);
    }
    args.log_decay[i] = log_decay;
    if (args.step != nullptr) args.step[i] = step;
    if (i >= betas) continue;
    const Index beta_row = i / heads, head = i - beta_row * heads;
    const float x = static_cast<float>(static_cast<const T*>(args.beta_input)[beta_row * args.beta_pitch + head]);
    args.beta[i] = inside(beta_row) ? args.beta_scale / (1.0f + expf(-x)) : 0.0f;
  }
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  const int64_t count = args.batch * args.tokens * args.heads * args.width, blocks = (count + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = count < int64_t{1} << 31 ? GateKernel<T, uint32_t> : GateKernel<T, int64_t>;
  kernel<<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::decay_gates
