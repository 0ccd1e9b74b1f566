// States of 16 bits for the kernels that take float32 ones: those of a call's requests are copied into float32 in front of
// them, and back behind.
#include <cuda_runtime.h>

#include <algorithm>

#include "causal_linear_decay/rows.h"
#include "core/integers.h"
#include "core/with_type.cuh"

namespace leanfleet::causal_linear_decay {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 2048;  // of a launch

// What the pool has of each request, a row each, or back. Requests outside it take zeros, and give nothing.
template <class From, class To, bool kBack>
__global__ void __launch_bounds__(kThreads) CopyStatesKernel(const From* from, To* to, const int32_t* state_index,
                                                             int64_t requests, int64_t state_rows, int64_t width) {
  const int64_t count = requests * width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t request = i / width, row = state_index != nullptr ? state_index[request] : request;
    const int64_t at = row * width + i - request * width;
    const bool there = row >= 0 && row < state_rows;
    if constexpr (kBack) {
      if (there) to[at] = static_cast<To>(static_cast<float>(from[i]));
    } else {
      to[i] = static_cast<To>(there ? static_cast<float>(from[at]) : 0.0f);
    }
  }
}

template <bool kBack, class From, class To>
cudaError_t copy_states(const Args& args, int64_t width, const From* from, To* to, void* stream) {
  const int64_t blocks = std::min(kMostBlocks, ceil_div(args.in.requests * width, int64_t{kThreads}));
  if (blocks == 0) return cudaSuccess;
  CopyStatesKernel<From, To, kBack><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      from, to, args.state_index, args.in.requests, args.state_rows, width);
  return cudaGetLastError();
}

}  // namespace

int with_wide_states(const Args& args, const CudaTarget& target, Workspace& ws,
                     int (*launch)(const Args&, const CudaTarget&, Workspace&)) {
  const Inputs& in = args.in;
  const int64_t norm_width = in.v_heads * in.key_width, width = norm_width * in.value_width;
  float* const states = ws.scratch<float>(in.requests * width);
  float* const norms = ws.scratch<float>(args.normalize ? in.requests * norm_width : 0);
  Args wide = args;
  wide.narrow_states = false;
  wide.narrow_initial_state = wide.narrow_final_state = nullptr;
  wide.state_index = nullptr;
  wide.state_rows = in.requests;
  if (ws.counting()) return launch(wide, target, ws);

  wide.initial_state = states;
  wide.final_state = args.narrow_final_state != nullptr ? states : nullptr;
  if (args.normalize) {
    wide.initial_norm = norms;
    wide.final_norm = args.final_norm != nullptr ? norms : nullptr;
  }
  int failed = args.state_index != nullptr ? keep_other_states(args, target) : cudaSuccess;
  const auto copy = [&](auto type) -> int {
    using T = decltype(type);
    return copy_states<false>(args, width, static_cast<const T*>(args.narrow_initial_state), states, target.stream);
  };
  const auto copy_back = [&](auto type) -> int {
    using T = decltype(type);
    return copy_states<true>(args, width, states, static_cast<T*>(args.narrow_final_state), target.stream);
  };
  if (failed == cudaSuccess) failed = with_type(in.dtype, copy);
  if (failed == cudaSuccess && args.normalize)
    failed = copy_states<false>(args, norm_width, args.initial_norm, norms, target.stream);
  if (failed == cudaSuccess) failed = launch(wide, target, ws);
  if (failed == cudaSuccess && wide.final_state != nullptr) failed = with_type(in.dtype, copy_back);
  if (failed == cudaSuccess && wide.final_norm != nullptr && args.normalize)
    failed = copy_states<true>(args, norm_width, norms, args.final_norm, target.stream);
  return failed;
}

}  // namespace leanfleet::causal_linear_decay
