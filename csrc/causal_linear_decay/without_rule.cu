// The delta rule's kernels for decays of key dimensions. They have no norm: a kernel in front of them finds it for every token, and
// by what rows of the output are divided.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "causal_linear_decay/device.cuh"
#include "causal_linear_decay/without_rule.h"
#include "core/cuda_target.h"
#include "core/op_specs.h"
#include "core/with_type.cuh"
#include "core/workspace.h"

namespace leanfleet::causal_linear_decay {

static_assert(kDeltaMaxKeyWidth == gated_delta_rule::kCudaMaxKeyWidth);

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarps = 4;
constexpr int kParts = kDeltaMaxKeyWidth / 32;  // key dimensions of a lane

template <class T>
__device__ __forceinline__ const T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head,
                                           int64_t token) {
  return static_cast<const T*>(data) + batch * strides.batch + head * strides.head + token * strides.token;
}

// A warp: (request, state). Lane l has elements l, l + 32, .. of the norm from the first token to the last. factors
// [B,H,N]: 1 over what the norm makes of a query.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    NormKernel(const __grid_constant__ Args args, Strides decay_strides, float* factors) {
  const Inputs& in = args.in;
  const int lane = static_cast<int>(threadIdx.x % 32), R = static_cast<int>(in.key_width);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (unit >= in.requests * in.v_heads) return;  // the whole warp
  const int64_t request = unit / in.v_heads, head = unit % in.v_heads, batch = in.cu_seqlens != nullptr ? 0 : request;
  const int64_t group = in.heads / in.v_heads, row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = row >= 0 && row < args.state_rows;
  const int64_t at = (row * in.v_heads + head) * R;
  float norm[kParts];
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const int r = 32 * j + lane;
    norm[j] = r < R && there && args.initial_norm != nullptr ? args.initial_norm[at + r] : 0.0f;
  }
  const RequestTokens tokens = request_tokens(in, request);
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const T* const key = row_of<T>(in.key, in.key_strides, batch, in.key_head(head), token);
    const float* const log_decay = row_of<float>(in.log_decay, decay_strides, batch, head, token);
    const float beta = beta_of(in, batch, head, token);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int r = 32 * j + lane;
      if (r < R) norm[j] = times_decay(norm[j], expf(__ldg(log_decay + r))) + beta * static_cast<float>(key[r]);
    }
    for (int64_t h = head * group; h < (head + 1) * group; ++h) {
      const T* const query = row_of<T>(in.query, in.query_strides, batch, in.query_head(h), token);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kParts; ++j)
        if (32 * j + lane < R) sum += static_cast<float>(query[32 * j + lane]) * norm[j];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
      const float by = in.scale * sum;
      const float held = fabsf(by) < args.eps ? (by < 0.0f ? -args.eps : args.eps) : by;  // NaN stays NaN
      if (lane == 0) factors[(batch * in.heads + h) * in.tokens + token] = 1.0f / held;
    }
  }
#pragma unroll
  for (int j = 0; j < kParts; ++j)
    if (32 * j + lane < R && there && args.final_norm != nullptr) args.final_norm[at + 32 * j + lane] = norm[j];
}

cudaError_t find_norms(const Args& args, const Strides& decay_strides, float* factors, cudaStream_t stream) {
  const Inputs& in = args.in;
  if (args.state_index != nullptr && args.final_norm != nullptr &&
      args.final_norm != args.initial_norm) {  // rows of no request
    const auto bytes = sizeof(float) * static_cast<size_t>(args.state_rows * in.v_heads * in.key_width);
    const cudaError_t error = cudaMemcpyAsync(args.final_norm, args.initial_norm, bytes, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = ceil_div(in.requests * in.v_heads, int64_t{kWarps});
  if (blocks == 0) return cudaSuccess;
  return with_type(in.dtype, [&](auto type) {
    using T = decltype(type);
    NormKernel<T><<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(args, decay_strides, factors);
    return cudaGetLastError();
  });
}

}  // namespace

int launch_without_rule(const Args& args, const CudaTarget& target, Workspace& ws) {
  gated_delta_rule::Args to = without_rule(args);
  to.token_by_token = args.algorithm == kAlgorithmCausalDotProduct;
  if (args.normalize) {
    float* const factors = ws.scratch<float>(args.in.batch * args.in.heads * args.in.tokens);
    to.row_factors = factors;
    if (!ws.counting()) {
      const cudaError_t error = find_norms(args, to.decay_strides, factors, static_cast<cudaStream_t>(target.stream));
      if (error != cudaSuccess) return error;
    }
  }
  return gated_delta_rule::launch_recurrence(to, target, ws);
}

int launch_grad_without_rule(const GradArgs& args, const CudaTarget& target, Workspace& ws) {
  return gated_delta_rule::launch_grad(without_rule(args), target, ws);
}

}  // namespace leanfleet::causal_linear_decay
