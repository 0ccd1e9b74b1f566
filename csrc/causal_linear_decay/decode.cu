// CausalLinearDecay for few tokens a request: the state is read once into registers, takes the tokens one after the other,
// and is written once, perhaps where it was. A block has a request, a key/value head and 32 columns of the state, a thread
// four columns of every row_groups-th row. All loads of the state are on their way before anything is computed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "causal_linear_decay/causal_linear_decay.h"
#include "causal_linear_decay/device.cuh"
#include "causal_linear_decay/rows.h"
#include "core/op.h"

namespace leanfleet {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kColumns = 32;          // of a block
constexpr int kColumnLanes = 8;       // of four columns each
constexpr int kThreadRows = 8;        // of a thread
constexpr int kMaxThreads = 512, kFewThreads = 128;
constexpr int kMaxTile = 16;          // tokens
constexpr size_t kSharedBudget = 40 * 1024;

struct DecodePlan {
  int row_groups, tile, column_blocks;
};

__host__ __device__ inline int query_floats(const DecodePlan& plan) { return plan.tile * plan.row_groups * kThreadRows; }
__host__ __device__ inline int partial_floats(const DecodePlan& plan) { return plan.tile * plan.row_groups / 4 * kColumns; }
inline size_t shared_bytes(const DecodePlan& plan, int64_t group) {
  return sizeof(float) * static_cast<size_t>((group + 1) * query_floats(plan) + group * partial_floats(plan) +
                                             plan.tile * (kColumns + 1));
}

DecodePlan plan_of(const CausalLinearDecayArgs& args) {
  const DecayInputs& in = args.in;
  DecodePlan plan = {};
  plan.row_groups = static_cast<int>((in.key_width + 4 * kThreadRows - 1) / (4 * kThreadRows) * 4);
  plan.column_blocks = static_cast<int>((in.value_width + kColumns - 1) / kColumns);
  plan.tile = static_cast<int>(in.tokens < kMaxTile ? in.tokens : kMaxTile);
  while (plan.tile > 1 && shared_bytes(plan, in.heads / in.kv_heads) > kSharedBudget) plan.tile /= 2;
  return plan;
}

__device__ __forceinline__ void load8(const float* from, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 6 : 1)
    DecayDecodeKernel(const __grid_constant__ CausalLinearDecayArgs args, const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(16) float shared[];
  const DecayInputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const int group = static_cast<int>(in.heads / in.kv_heads), padded = plan.row_groups * kThreadRows;
  int64_t block = blockIdx.x;
  const int column = static_cast<int>(block % plan.column_blocks) * kColumns;
  block /= plan.column_blocks;
  const int64_t head = block % in.kv_heads, request = block / in.kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = plan.row_groups / 4;
  const int mine = threadIdx.x % kColumnLanes * 4, row_group = threadIdx.x / kColumnLanes;
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = row >= 0 && row < args.state_rows, inside = column + mine < V;
  const int64_t at = ((row * in.kv_heads + head) * R + row_group) * V + column + mine;

  float4 state[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const bool load = args.initial_state != nullptr && there && inside && row_group + i * plan.row_groups < R;
    state[i] = load ? *reinterpret_cast<const float4*>(args.initial_state + at + static_cast<int64_t>(i) * plan.row_groups * V)
                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
  const auto [begin, end] = request_tokens(in, request);
  const T* const query =
      static_cast<const T*>(in.query) + batch * in.query_strides.batch + head * group * in.query_strides.head;
  const T* const key = static_cast<const T*>(in.key) + batch * in.key_strides.batch + head * in.key_strides.head;
  const T* const value =
      static_cast<const T*>(in.value) + batch * in.value_strides.batch + head * in.value_strides.head + column;
  T* const output =
      static_cast<T*>(args.output) + batch * in.output_strides.batch + head * group * in.output_strides.head + column;
  const int width = V - column < kColumns ? V - column : kColumns;
  float* const queries = shared;                                  // [group][tile][padded]
  float* const keys = queries + group * query_floats(plan);       // [tile][padded]
  float* const values = keys + query_floats(plan);                // [tile][kColumns]
  float* const partial = values + plan.tile * kColumns;           // [group][tile][warps][kColumns]
  float* const decays = partial + group * partial_floats(plan);   // [tile]

  for (int64_t first = begin; first < end; first += plan.tile) {
    const int tokens = static_cast<int>(end - first < plan.tile ? end - first : plan.tile);
    // Loads that nothing is stored between: outside the token's row the nearest element is read, and then left out.
    constexpr int kAtOnce = 4;
    for (int r = threadIdx.x; r < padded; r += blockDim.x) {
      // A thread's rows lie side by side.
      const int at_most = r < R ? r : R - 1, dest = r % plan.row_groups * kThreadRows + r / plan.row_groups;
      for (int g = -1; g < group; ++g) {
        const T* const from = g < 0 ? key : query + g * in.query_strides.head;
        const int64_t stride = g < 0 ? in.key_strides.token : in.query_strides.token;
        float* const to = g < 0 ? keys : queries + g * query_floats(plan);
        const float factor = r >= R ? 0.0f : g < 0 ? 1.0f : in.scale;
        if (tokens == 1) {
          to[dest] = r < R ? factor * static_cast<float>(__ldg(from + first * stride + at_most)) : 0.0f;
          continue;
        }
        for (int t = 0; t < tokens; t += kAtOnce) {
          T x[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            x[i] = __ldg(from + (first + (t + i < tokens ? t + i : tokens - 1)) * stride + at_most);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (t + i < tokens) to[(t + i) * padded + dest] = r < R ? factor * static_cast<float>(x[i]) : 0.0f;
        }
      }
    }
    for (int i = threadIdx.x; i < tokens * kColumns; i += blockDim.x)
      values[i] = i % kColumns < width
                      ? static_cast<float>(__ldg(value + (first + i / kColumns) * in.value_strides.token + i % kColumns)) : 0.0f;
    if (static_cast<int>(threadIdx.x) < tokens)
      decays[threadIdx.x] =
          in.log_decay == nullptr ? 1.0f
          : in.decay_per_token    ? expf(in.log_decay[batch * in.decay_strides.batch + head * in.decay_strides.head +
                                                   (first + threadIdx.x) * in.decay_strides.token])
                                  : expf(in.log_decay[head]);
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const float decay = decays[t];
      const float4 v = *reinterpret_cast<const float4*>(values + t * kColumns + mine);
      float k[kThreadRows];
      load8(keys + t * padded + row_group * kThreadRows, k);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        float4& s = state[i];
        s.x = times_decay(s.x, decay) + k[i] * v.x, s.y = times_decay(s.y, decay) + k[i] * v.y;
        s.z = times_decay(s.z, decay) + k[i] * v.z, s.w = times_decay(s.w, decay) + k[i] * v.w;
      }
      for (int g = 0; g < group; ++g) {
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float q[kThreadRows];
        load8(queries + (g * plan.tile + t) * padded + row_group * kThreadRows, q);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i)
          out.x += q[i] * state[i].x, out.y += q[i] * state[i].y, out.z += q[i] * state[i].z, out.w += q[i] * state[i].w;
#pragma unroll
        for (int offset = kColumnLanes; offset < 32; offset *= 2) {
          out.x += __shfl_xor_sync(kAll, out.x, offset), out.y += __shfl_xor_sync(kAll, out.y, offset);
          out.z += __shfl_xor_sync(kAll, out.z, offset), out.w += __shfl_xor_sync(kAll, out.w, offset);
        }
        if (lane < kColumnLanes)
          *reinterpret_cast<float4*>(partial + ((g * plan.tile + t) * warps + warp) * kColumns + mine) = out;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * tokens * kColumns; i += blockDim.x) {
      const int c = i % kColumns, t = i / kColumns % tokens, g = i / kColumns / tokens;
      if (c >= width) continue;
      float x = 0.0f;
      for (int w = 0; w < warps; ++w) x += partial[((g * plan.tile + t) * warps + w) * kColumns + c];
      output[g * in.output_strides.head + (first + t) * in.output_strides.token + c] = static_cast<T>(x);
    }
    // The next tile's first barrier comes before its partial outputs, and keys, queries and values have been read.
  }

  if (args.final_state == nullptr || !there || !inside) return;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    if (row_group + i * plan.row_groups < R)
      *reinterpret_cast<float4*>(args.final_state + at + static_cast<int64_t>(i) * plan.row_groups * V) = state[i];
}

template <class T>
cudaError_t launch(const CausalLinearDecayArgs& args, const DecodePlan& plan, cudaStream_t stream) {
  const DecayInputs& in = args.in;
  const int64_t blocks = in.requests * in.kv_heads * plan.column_blocks;
  const int threads = plan.row_groups * kColumnLanes;
  const auto kernel = threads <= kFewThreads ? DecayDecodeKernel<T, kFewThreads> : DecayDecodeKernel<T, kMaxThreads>;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes(plan, in.heads / in.kv_heads), stream>>>(
      args, plan);
  return cudaGetLastError();
}

}  // namespace

bool decay_decode_fits(const CausalLinearDecayArgs& args) {
  const DecayInputs& in = args.in;
  if (args.normalize || in.key_width > kRecurrenceMaxKeyWidth || in.value_width % 4 != 0 || in.tokens == 0) return false;
  if (in.requests * in.kv_heads == 0 || in.tokens > kMaxTile * (in.cu_seqlens != nullptr ? in.requests : 1)) return false;
  return shared_bytes(plan_of(args), in.heads / in.kv_heads) <= kSharedBudget;
}

int launch_decay_decode(const CausalLinearDecayArgs& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  switch (static_cast<DType>(args.in.dtype)) {
    case DType::kFloat32: return launch<float>(args, plan_of(args), stream);
    case DType::kFloat16: return launch<__half>(args, plan_of(args), stream);
    default: return launch<__nv_bfloat16>(args, plan_of(args), stream);
  }
}

}  // namespace leanfleet
