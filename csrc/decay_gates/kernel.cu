// A thread has one number of a token's decays; the first of them that of beta too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/op.h"
#include "decay_gates/decay_gates.h"

namespace leanfleet::decay_gates {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = int64_t{1} << 30;

__device__ __forceinline__ float softplus(float x) { return x == x ? fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) : x; }

// What a decay's logarithm may be: a NaN forgets everything, which leaves nothing finite where nothing should be.
__device__ __forceinline__ float as_log_decay(float x) { return x <= 0.0f ? x : x == x ? 0.0f : -INFINITY; }

template <class T>
__global__ void __launch_bounds__(kThreads) GateKernel(const __grid_constant__ Args args) {
  const int64_t of_row = args.heads * args.width, count = args.batch * args.tokens * of_row;
  const int64_t betas = args.beta != nullptr ? args.batch * args.tokens * args.heads : 0;
  const auto inside = [&](int64_t row) {
    return args.query_lens == nullptr || row % args.tokens < args.query_lens[row / args.tokens];
  };
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / of_row, column = i - row * of_row;
    float step = 0.0f, log_decay = 0.0f;
    if (inside(row)) {
      const float x = static_cast<float>(static_cast<const T*>(args.input)[i]);
      step = softplus(args.bias != nullptr ? x + args.bias[column] : x);
      if (step < args.step_min) step = args.step_min;
      if (step > args.step_max) step = args.step_max;
      log_decay = as_log_decay(args.rate[column / args.width] * step);
    }
    args.log_decay[i] = log_decay;
    if (args.step != nullptr) args.step[i] = step;
    if (i >= betas) continue;
    const float x = static_cast<float>(static_cast<const T*>(args.beta_input)[i]);
    args.beta[i] = inside(i / args.heads) ? args.beta_scale / (1.0f + expf(-x)) : 0.0f;
  }
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  const int64_t count = args.batch * args.tokens * args.heads * args.width, blocks = (count + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  GateKernel<T><<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.dtype == static_cast<int32_t>(DType::kFloat32)) return launch_type<float>(args, cuda_stream);
  if (args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(args, cuda_stream);
  return launch_type<__nv_bfloat16>(args, cuda_stream);
}

}  // namespace leanfleet::decay_gates
