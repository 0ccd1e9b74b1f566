// States of 16 bits, and states [Dv,R], for the kernels that take float32 ones [R,Dv]: those of a call's requests are copied into
// such in front of them, and back behind.
#include <cuda_runtime.h>

#include <algorithm>

#include "causal_linear_decay/rows.h"
#include "core/integers.h"
#include "core/with_type.cuh"

namespace leanfleet::causal_linear_decay {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 2048;  // of a launch

// Of plain states, rows x columns, which the caller has turned or as they are.
struct Order {
  int64_t rows, columns;
  bool turned;
};
__device__ __forceinline__ int64_t in_callers_order(const Order& order, int64_t i) {
  if (!order.turned) return i;
  const int64_t size = order.rows * order.columns, state = i / size, row = i % size / order.columns;
  return state * size + i % order.columns * order.rows + row;
}

// What the pool has of each request, a row of `width` each, or back. Requests outside it take zeros, and give nothing.
template <class From, class To, bool kBack>
__global__ void __launch_bounds__(kThreads) CopyStatesKernel(const From* from, To* to, const int32_t* state_index,
                                                             int64_t requests, int64_t state_rows, int64_t width, Order order) {
  const int64_t count = requests * width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t request = i / width, row = state_index != nullptr ? state_index[request] : request;
    const int64_t at = row * width + in_callers_order(order, i - request * width);
    const bool there = row >= 0 && row < state_rows;
    if constexpr (kBack) {
      if (there) to[at] = static_cast<To>(static_cast<float>(from[i]));
    } else {
      to[i] = static_cast<To>(there ? static_cast<float>(from[at]) : 0.0f);
    }
  }
}

// Which states of whom.
struct Rows {
  const int32_t* state_index;
  int64_t requests, state_rows, width;
};

template <bool kBack, class From, class To>
cudaError_t copy_states(const Rows& rows, const Order& order, const From* from, To* to, void* stream) {
  const int64_t blocks = std::min(kMostBlocks, ceil_div(rows.requests * rows.width, int64_t{kThreads}));
  if (blocks == 0) return cudaSuccess;
  CopyStatesKernel<From, To, kBack><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      from, to, rows.state_index, rows.requests, rows.state_rows, rows.width, order);
  return cudaGetLastError();
}

// A caller's states, of T where they are narrow, to plain ones, or back.
cudaError_t take_states(const Args& args, const Rows& rows, const Order& order, float* to, void* stream) {
  if (!args.narrow_states) return copy_states<false>(rows, order, args.initial_state, to, stream);
  return with_type(args.in.dtype, [&](auto type) {
    return copy_states<false>(rows, order, static_cast<const decltype(type)*>(args.narrow_initial_state), to, stream);
  });
}
cudaError_t give_states(const Args& args, const Rows& rows, const Order& order, const float* from, void* stream) {
  if (!args.narrow_states) return copy_states<true>(rows, order, from, args.final_state, stream);
  return with_type(args.in.dtype, [&](auto type) {
    return copy_states<true>(rows, order, from, static_cast<decltype(type)*>(args.narrow_final_state), stream);
  });
}

}  // namespace

int with_plain_states(const Args& args, bool turned, const CudaTarget& target, Workspace& ws,
                      int (*launch)(const Args&, const CudaTarget&, Workspace&)) {
  const Inputs& in = args.in;
  const int64_t norm_width = in.v_heads * in.key_width, width = norm_width * in.value_width;
  float* const states = ws.scratch<float>(in.requests * width);
  float* const norms = ws.scratch<float>(args.normalize ? in.requests * norm_width : 0);
  Args plain = args;
  if (turned) plain.in.state_v_first = false;
  plain.narrow_states = false;
  plain.narrow_initial_state = plain.narrow_final_state = nullptr;
  plain.state_index = nullptr;
  plain.state_rows = in.requests;
  if (ws.counting()) return launch(plain, target, ws);

  const bool given = args.initial_state != nullptr || args.narrow_initial_state != nullptr;
  const bool asked = args.final_state != nullptr || args.narrow_final_state != nullptr;
  plain.initial_state = given ? states : nullptr;
  plain.final_state = asked ? states : nullptr;
  if (args.normalize) {
    plain.initial_norm = args.initial_norm != nullptr ? norms : nullptr;
    plain.final_norm = args.final_norm != nullptr ? norms : nullptr;
  }
  const Rows of_states = {args.state_index, in.requests, args.state_rows, width};
  const Rows of_norms = {args.state_index, in.requests, args.state_rows, norm_width};
  const Order order = {in.key_width, in.value_width, turned}, of_norm = {};
  int failed = args.state_index != nullptr ? keep_other_states(args, target) : cudaSuccess;
  if (failed == cudaSuccess && given) failed = take_states(args, of_states, order, states, target.stream);
  if (failed == cudaSuccess && plain.initial_norm != nullptr)
    failed = copy_states<false>(of_norms, of_norm, args.initial_norm, norms, target.stream);
  if (failed == cudaSuccess) failed = launch(plain, target, ws);
  if (failed == cudaSuccess && asked) failed = give_states(args, of_states, order, states, target.stream);
  if (failed == cudaSuccess && plain.final_norm != nullptr)
    failed = copy_states<true>(of_norms, of_norm, norms, args.final_norm, target.stream);
  return failed;
}

int launch_grad_turned(const GradArgs& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  const int64_t width = in.v_heads * in.key_width * in.value_width;
  float* const initial = ws.scratch<float>(in.requests * width);
  float* const last = ws.scratch<float>(in.requests * width);
  float* const first = ws.scratch<float>(in.requests * width);
  GradArgs plain = args;
  plain.in.state_v_first = false;
  if (ws.counting()) return launch_grad(plain, target, ws);

  if (args.initial_state != nullptr) plain.initial_state = initial;
  if (args.grad_final_state != nullptr) plain.grad_final_state = last;
  if (args.grad_initial_state != nullptr) plain.grad_initial_state = first;
  const Rows rows = {nullptr, in.requests, in.requests, width};
  const Order order = {in.key_width, in.value_width, true};
  int failed = cudaSuccess;
  if (args.initial_state != nullptr) failed = copy_states<false>(rows, order, args.initial_state, initial, target.stream);
  if (failed == cudaSuccess && args.grad_final_state != nullptr)
    failed = copy_states<false>(rows, order, args.grad_final_state, last, target.stream);
  if (failed == cudaSuccess) failed = launch_grad(plain, target, ws);
  if (failed == cudaSuccess && args.grad_initial_state != nullptr)
    failed = copy_states<true>(rows, order, first, args.grad_initial_state, target.stream);
  return failed;
}

}  // namespace leanfleet::causal_linear_decay
