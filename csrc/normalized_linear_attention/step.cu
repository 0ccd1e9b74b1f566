// NormalizedLinearAttention for one token: the state is read once, the token's kᵀv added, and written once. A CTA has
// a key/value head and some columns of its state; a thread four columns of every kRowGroups-th row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"
#include "normalized_linear_attention/step.h"

namespace leanfleet::normalized_linear_attention {

namespace {

constexpr int kThreads = 256, kWidth = static_cast<int>(kStepMaxWidth);
constexpr int kAtOnce = 8;  // rows that a thread has in flight

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// One warp: a row of D numbers, of unit length with normalize, 0 behind them.
template <class T>
__device__ __forceinline__ void take_row(const T* row, int D, bool normalize, int lane, float (&to)[kWidth]) {
  float x[kWidth / 32], top = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    x[i] = i * 32 + lane < D ? static_cast<float>(row[i * 32 + lane]) : 0.0f;
    top = fmaxf(top, fabsf(x[i]));
  }
  float factor = 1.0f;
  if (normalize) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const float inverse = top > 0.0f ? 1.0f / top : 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) sum += x[i] * inverse * (x[i] * inverse);
    const float norm = top * sqrtf(warp_sum(sum));
    factor = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
  }
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) to[i * 32 + lane] = factor * x[i];
}

// kLanes threads a row of the CTA's 4 * kLanes columns. kGroup: query heads of a key/value head, at most; one alone leaves
// the registers for more CTAs on an SM.
template <class T, int kLanes, int kGroup>
__global__ void __launch_bounds__(kThreads, kGroup == 1 ? 4 : 1)
    StepKernel(const __grid_constant__ Args args, uint32_t* tickets, int slices, bool aligned) {
  constexpr int kRowGroups = kThreads / kLanes;
  const Inputs& in = args.in;
  const int D = static_cast<int>(in.dim), V = static_cast<int>(in.value_dim);
  const int group = static_cast<int>(in.heads / in.kv_heads);
  const int slice = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ __align__(16) float rows[kGroup + 1][kWidth];  // queries, then the key
  __shared__ float normalizers[kGroup];
  __shared__ __align__(16) float partial[kGroup][kRowGroups][4 * kLanes];
  __shared__ bool last;

  const int64_t entry = static_cast<int64_t>(batch) * in.kv_heads + head;
  const bool carried = args.initial_state != nullptr;
  const float a = in.coefficients != nullptr ? in.coefficients[0] : 1.0f;
  const float b = in.coefficients != nullptr ? in.coefficients[1] : 1.0f;
  const int columns = slice * 4 * kLanes + threadIdx.x % kLanes * 4, row_group = threadIdx.x / kLanes;
  const bool mine = columns < V;
  const float* from = args.initial_state + entry * D * V + columns;
  float* to = args.final_state + entry * D * V + columns;
  float4 state[kAtOnce];
  const auto fetch = [&](int first) {
    const auto load = [&](auto&& four_at) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int d = first + i * kRowGroups + row_group;
        state[i] = carried && mine && d < D ? four_at(from + static_cast<int64_t>(d) * V) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    };
    if (aligned) load([](const float* x) { return *reinterpret_cast<const float4*>(x); });
    else load([](const float* x) { return make_float4(x[0], x[1], x[2], x[3]); });
  };
  fetch(0);
  for (int r = warp; r <= group; r += kThreads / 32) {
    const T* row = r < group ? static_cast<const T*>(in.query) + batch * in.query_strides.batch +
                                   (head * group + r) * in.query_strides.head
                             : static_cast<const T*>(in.key) + batch * in.key_strides.batch + head * in.key_strides.head;
    take_row(row, D, in.normalize_qk, lane, rows[r < group ? r : kGroup]);
  }
  float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (mine) {
    const T* row = static_cast<const T*>(in.value) + batch * in.value_strides.batch + head * in.value_strides.head + columns;
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] = static_cast<float>(row[c]);
  }
  __syncthreads();
  const float count = (args.initial_count != nullptr ? static_cast<float>(args.initial_count[batch]) : 0.0f) + 1.0f;
  for (int g = warp; g < group; g += kThreads / 32) {
    float sum = 0.0f;
    for (int d = lane; d < D; d += 32)
      sum += rows[g][d] * (rows[kGroup][d] + (carried ? args.initial_key_sum[entry * D + d] : 0.0f));
    sum = a * count + b * warp_sum(sum);
    if (lane == 0) normalizers[g] = sum;
  }

  float out[kGroup][4] = {};
  for (int first = 0; first < D; first += kAtOnce * kRowGroups) {
    if (first > 0) fetch(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int d = first + i * kRowGroups + row_group;
      if (d >= D) break;
      const float k = rows[kGroup][d];
      state[i].x += k * value[0], state[i].y += k * value[1], state[i].z += k * value[2], state[i].w += k * value[3];
      if (args.final_state != nullptr && mine) {
        float* const x = to + static_cast<int64_t>(d) * V;
        if (aligned) *reinterpret_cast<float4*>(x) = state[i];
        else x[0] = state[i].x, x[1] = state[i].y, x[2] = state[i].z, x[3] = state[i].w;
      }
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        if (g >= group) break;
        const float q = rows[g][d];
        out[g][0] += q * state[i].x, out[g][1] += q * state[i].y, out[g][2] += q * state[i].z, out[g][3] += q * state[i].w;
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    if (g >= group) break;
    *reinterpret_cast<float4*>(&partial[g][row_group][threadIdx.x % kLanes * 4]) =
        make_float4(out[g][0], out[g][1], out[g][2], out[g][3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < group * 4 * kLanes; i += kThreads) {
    const int g = i / (4 * kLanes), column = slice * 4 * kLanes + i % (4 * kLanes);
    if (column >= V) continue;
    float sum = 0.0f;
    for (int r = 0; r < kRowGroups; ++r) sum += partial[g][r][i % (4 * kLanes)];
    const float v = static_cast<float>(
        static_cast<const T*>(in.value)[batch * in.value_strides.batch + head * in.value_strides.head + column]);
    const float value_sum = (carried ? args.initial_value_sum[entry * V + column] : 0.0f) + v;
    if (g == 0 && args.final_value_sum != nullptr) partial[0][0][i] = value_sum;
    const float normalizer = normalizers[g];
    const float divisor = fabsf(normalizer) < in.eps ? (normalizer < 0.0f ? -in.eps : in.eps) : normalizer;
    static_cast<T*>(args.output)[batch * in.output_strides.batch + (head * group + g) * in.output_strides.head + column] =
        static_cast<T>((a * value_sum + b * sum) / divisor);
  }
  if (slice == 0 && static_cast<int>(threadIdx.x) < group)
    args.normalizer[batch * in.normalizer_strides.batch + (head * group + threadIdx.x) * in.normalizer_strides.head] =
        normalizers[threadIdx.x];
  if (args.final_state == nullptr) return;
  // The sums that other CTAs read are written once all have, since the buffers may be the same.
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * kLanes && slice * 4 * kLanes + i < V; i += kThreads)
    args.final_value_sum[entry * V + slice * 4 * kLanes + i] = partial[0][0][i];
  const auto arrive = [&](uint32_t* ticket, uint32_t all) {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(all - 1) : "memory");
      last = before == all - 1;
    }
    __syncthreads();
    return last;
  };
  if (arrive(tickets + entry, slices)) {
    for (int d = threadIdx.x; d < D; d += kThreads)
      args.final_key_sum[entry * D + d] = rows[kGroup][d] + (carried ? args.initial_key_sum[entry * D + d] : 0.0f);
  }
  if (arrive(tickets + in.batch * in.kv_heads + batch, static_cast<uint32_t>(slices * in.kv_heads)) && threadIdx.x == 0) {
    const int32_t count = args.initial_count != nullptr ? args.initial_count[batch] : 0;
    args.final_count[batch] = count < kMaxCount ? count + 1 : count;
  }
}

template <class T>
int launch(const Args& args, const CudaTarget& target, uint32_t* tickets) {
  const Inputs& in = args.in;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const auto grid = [&](int columns) {
    return dim3(static_cast<unsigned>(ceil_div(in.value_dim, columns)), static_cast<unsigned>(in.kv_heads),
                static_cast<unsigned>(in.batch));
  };
  constexpr int kMaxGroup = static_cast<int>(kStepMaxGroup);
  const bool one = in.heads == in.kv_heads;
  bool aligned = true;
  for (const float* state : {args.initial_state, static_cast<const float*>(args.final_state)})
    aligned &= reinterpret_cast<uintptr_t>(state) % 16 == 0;
  if (in.batch * in.kv_heads * ((in.value_dim + 127) / 128) >= 2 * target.sm_count) {
    const auto kernel = one ? StepKernel<T, 32, 1> : StepKernel<T, 32, kMaxGroup>;
    const dim3 ctas = grid(128);
    kernel<<<ctas, kThreads, 0, stream>>>(args, tickets, static_cast<int>(ctas.x), aligned);
  } else {
    const auto kernel = one ? StepKernel<T, 8, 1> : StepKernel<T, 8, kMaxGroup>;
    const dim3 ctas = grid(32);
    kernel<<<ctas, kThreads, 0, stream>>>(args, tickets, static_cast<int>(ctas.x), aligned);
  }
  return cudaGetLastError();
}

}  // namespace

int launch_step(const Args& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  uint32_t* const tickets = ws.sync<uint32_t>(in.batch * in.kv_heads + in.batch);
  if (ws.counting()) return cudaSuccess;
  return with_type(in.dtype, [&](auto type) { return launch<decltype(type)>(args, target, tickets); });
}

}  // namespace leanfleet::normalized_linear_attention
