// CausalLinearDecay for few tokens a request: the state is read once into registers, takes the tokens one after the other,
// and is written once, perhaps where it was. A CTA has a request and 32 columns of a state. All loads
// of the state are on their way before anything is computed.
//
// One token a request, of packed ones on average, has a kernel of its own, which needs few registers: its time is that of moving the state, for which many
// CTAs must be on an SM.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "causal_linear_decay/causal_linear_decay.h"
#include "causal_linear_decay/device.cuh"
#include "causal_linear_decay/rows.h"
#include "core/dependent_launch.cuh"
#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"

namespace leanfleet::causal_linear_decay {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kColumns = 32;     // of a CTA
constexpr int kColumnLanes = 8;  // of four columns each
constexpr int kThreadRows = 8;   // of a thread
constexpr int kMaxThreads = 512, kFewThreads = 128;
constexpr int kStepThreads = 256, kStepBlocks = 4, kPackedStepBlocks = 3;  // on an SM, one token
constexpr int kMaxTile = 16;                                               // tokens
constexpr size_t kSharedBudget = 40 * 1024;

struct DecodePlan {
  int row_groups, tile, column_blocks;
};

__host__ __device__ inline int query_floats(const DecodePlan& plan) { return plan.tile * plan.row_groups * kThreadRows; }
__host__ __device__ inline int partial_floats(const DecodePlan& plan) { return plan.tile * plan.row_groups / 4 * kColumns; }
inline size_t shared_bytes(const DecodePlan& plan, int64_t group) {
  return sizeof(float) *
         static_cast<size_t>((group + 1) * query_floats(plan) + group * partial_floats(plan) + plan.tile * (kColumns + 1));
}

DecodePlan plan_of(const Args& args) {
  const Inputs& in = args.in;
  DecodePlan plan = {};
  plan.row_groups = static_cast<int>((in.key_width + 4 * kThreadRows - 1) / (4 * kThreadRows) * 4);
  plan.column_blocks = static_cast<int>(ceil_div(in.value_width, kColumns));
  plan.tile = static_cast<int>(in.tokens < kMaxTile ? in.tokens : kMaxTile);
  while (plan.tile > 1 && shared_bytes(plan, in.heads / in.v_heads) > kSharedBudget) plan.tile /= 2;
  return plan;
}

__device__ __forceinline__ void load8(const float* from, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// kThreadRows elements of a row, as they lie in memory.
template <class T>
union RowPart {
  uint4 bits[sizeof(T) / 2];
  T element[kThreadRows];
};

// Elements first .. of a row of R, 0 beyond it. vectors: rows begin and end at 16 bytes.
template <class T>
__device__ __forceinline__ RowPart<T> load_part(const T* row, int first, int R, bool vectors) {
  RowPart<T> x;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) x.bits[i] = make_uint4(0, 0, 0, 0);
  if (vectors) {
    constexpr int kVec = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i)
      if (first + i * kVec < R) x.bits[i] = __ldg(reinterpret_cast<const uint4*>(row + first + i * kVec));
  } else {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
      if (first + i < R) x.element[i] = __ldg(row + first + i);
  }
  return x;
}

// The states of a call, of type S. whole: four neighbouring numbers, from a multiple of four on, are one access; those of float32
// always are.
template <class S>
struct States {
  const S* initial;
  S* final;
  bool whole;
};
template <class S>
States<S> states_of(const Args& args) {
  if constexpr (std::is_same_v<S, float>) {
    return {args.initial_state, args.final_state, true};
  } else {
    const auto bits =
        reinterpret_cast<uintptr_t>(args.narrow_initial_state) | reinterpret_cast<uintptr_t>(args.narrow_final_state);
    return {static_cast<const S*>(args.narrow_initial_state), static_cast<S*>(args.narrow_final_state), bits % 8 == 0};
  }
}

template <class S>
union StatePart {
  std::conditional_t<sizeof(S) == 4, uint4, uint2> bits;
  S element[4];
};

// The four numbers of each of a thread's rows, which are `step` numbers apart; 0 for rows from `rows` on. No load waits for
// another.
template <class S>
__device__ __forceinline__ void load_state(const States<S>& states, int64_t at, int64_t step, int rows,
                                           float4 (&state)[kThreadRows]) {
  StatePart<S> parts[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) parts[i].bits = {};
  if (states.whole) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
      if (i < rows) parts[i].bits = *reinterpret_cast<const decltype(parts[i].bits)*>(states.initial + at + i * step);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (i < rows) parts[i].element[c] = states.initial[at + i * step + c];
  }
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    state[i] = make_float4(static_cast<float>(parts[i].element[0]), static_cast<float>(parts[i].element[1]),
                           static_cast<float>(parts[i].element[2]), static_cast<float>(parts[i].element[3]));
}

// Asks for the lines that load_state will read.
template <class S>
__device__ __forceinline__ void prefetch_state(const States<S>& states, int64_t at, int64_t step, int rows) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    if (i < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(states.initial + at + i * step));
}

template <class S>
__device__ __forceinline__ void store_state(const States<S>& states, int64_t at, int64_t step, int rows,
                                            const float4 (&state)[kThreadRows]) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    if (i >= rows) continue;
    StatePart<S> part;
    part.element[0] = static_cast<S>(state[i].x), part.element[1] = static_cast<S>(state[i].y);
    part.element[2] = static_cast<S>(state[i].z), part.element[3] = static_cast<S>(state[i].w);
    S* const to = states.final + at + i * step;
    if (states.whole) {
      *reinterpret_cast<decltype(part.bits)*>(to) = part.bits;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) to[c] = part.element[c];
    }
  }
}

// A token a request, or of packed ones on average; those of one request one after the other. A thread has kThreadRows neighbouring
// rows of four columns.
template <class T, class S, int kThreads, bool kPacked>
__global__ void __launch_bounds__(kThreads, kThreads > kStepThreads ? 1
                                            : kPacked               ? kPackedStepBlocks
                                                                    : kStepBlocks)
    StepKernel(const __grid_constant__ Args args, const __grid_constant__ States<S> states, int column_blocks, bool vectors) {
  __shared__ __align__(16) float partial[2][kThreads / 32][kColumns];
  const Inputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const int group = static_cast<int>(in.heads / in.v_heads);
  const uint32_t unit = blockIdx.x / static_cast<uint32_t>(column_blocks);
  const uint32_t request = unit / static_cast<uint32_t>(in.v_heads);
  const int head = static_cast<int>(unit - request * static_cast<uint32_t>(in.v_heads));
  const int column = static_cast<int>(blockIdx.x - unit * static_cast<uint32_t>(column_blocks)) * kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int mine = threadIdx.x % kColumnLanes * 4, first = threadIdx.x / kColumnLanes * kThreadRows;
  const bool inside = column + mine < V;
  // Of the state, kThreadRows of them at most.
  const auto rows_at = [&](int64_t row) { return row >= 0 && row < args.state_rows && inside ? R - first : 0; };
  const auto place_at = [&](int64_t row) { return ((row * in.v_heads + head) * R + first) * V + column + mine; };
  // Past L1, since the launch before may still write the index.
  const auto named = [&]() -> int64_t { return args.state_index != nullptr ? __ldcg(args.state_index + request) : request; };
  // A state is most of what a step reads: its lines come to the L2 cache before the launch before has ended.
  const int64_t maybe = named();
  if (states.initial != nullptr) prefetch_state(states, place_at(maybe), V, rows_at(maybe));
  wait_for_launch_before();
  const int64_t row = named(), at = place_at(row);
  const int rows = rows_at(row);
  float4 state[kThreadRows];
  load_state(states, at, V, states.initial != nullptr ? rows : 0, state);

  const int64_t batch = kPacked ? 0 : request;
  int64_t begin = 0, end = 1;
  if constexpr (kPacked) {
    const auto tokens = request_tokens(in, request);
    begin = tokens.begin, end = tokens.end;
  }
  if (begin >= end && states.final != nullptr) store_state(states, at, V, rows, state);
  // A step notices a division.
  const int query_head = in.query_share == 1 ? head * group : in.query_head(head * group);
  const int key_head = in.key_share == 1 ? head : in.key_head(head);
  const T* const queries =
      static_cast<const T*>(in.query) + batch * in.query_strides.batch + query_head * in.query_strides.head;
  const T* const keys = static_cast<const T*>(in.key) + batch * in.key_strides.batch + key_head * in.key_strides.head;
  const T* const values =
      static_cast<const T*>(in.value) + batch * in.value_strides.batch + head * in.value_strides.head + column + mine;
  T* const outputs =
      static_cast<T*>(args.output) + batch * in.output_strides.batch + head * group * in.output_strides.head + column;
  for (int64_t token = begin, turn = 0; token < end; ++token) {
    const T* const query = queries + token * in.query_strides.token;
    const RowPart<T> k = load_part(keys + token * in.key_strides.token, first, R, vectors);
    RowPart<T> q = load_part(query, first, R, vectors);
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (inside) {
      const float beta = beta_of(in, batch, head, token);
#pragma unroll
      for (int c = 0; c < 4; ++c) v[c] = beta * static_cast<float>(__ldg(values + token * in.value_strides.token + c));
    }
    float decay = 1.0f;
    if (in.log_decay != nullptr)
      decay = expf(__ldg(in.log_decay + (in.decay_per_token ? batch * in.decay_strides.batch + head * in.decay_strides.head +
                                                                  token * in.decay_strides.token
                                                            : static_cast<int64_t>(head))));
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float4& s = state[i];
      const float by = static_cast<float>(k.element[i]);
      s.x = times_decay(s.x, decay) + by * v[0], s.y = times_decay(s.y, decay) + by * v[1];
      s.z = times_decay(s.z, decay) + by * v[2], s.w = times_decay(s.w, decay) + by * v[3];
    }
    if (token + 1 == end && states.final != nullptr) store_state(states, at, V, rows, state);

    T* const output = outputs + token * in.output_strides.token;
    for (int g = 0; g < group; ++g, ++turn) {
      float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const float by = static_cast<float>(q.element[i]);
        out.x += by * state[i].x, out.y += by * state[i].y, out.z += by * state[i].z, out.w += by * state[i].w;
      }
      if (g + 1 < group) q = load_part(query + (g + 1) * in.query_strides.head, first, R, vectors);
#pragma unroll
      for (int offset = kColumnLanes; offset < 32; offset *= 2) {
        out.x += __shfl_xor_sync(kAll, out.x, offset), out.y += __shfl_xor_sync(kAll, out.y, offset);
        out.z += __shfl_xor_sync(kAll, out.z, offset), out.w += __shfl_xor_sync(kAll, out.w, offset);
      }
      if (lane < kColumnLanes) *reinterpret_cast<float4*>(&partial[turn & 1][warp][mine]) = out;
      // One barrier a head: the next head's sums go to the other half.
      __syncthreads();
      if (threadIdx.x < kColumns && column + lane < V) {
        float x = 0.0f;
        for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) x += partial[turn & 1][w][lane];
        output[g * in.output_strides.head + lane] = static_cast<T>(in.scale * x);
      }
    }
  }
}

// A token into four columns of a thread's rows of a state.
__device__ __forceinline__ void take_token(float4 (&state)[kThreadRows], float decay, const float (&k)[kThreadRows],
                                           const float4& v) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    float4& s = state[i];
    s.x = times_decay(s.x, decay) + k[i] * v.x, s.y = times_decay(s.y, decay) + k[i] * v.y;
    s.z = times_decay(s.z, decay) + k[i] * v.z, s.w = times_decay(s.w, decay) + k[i] * v.w;
  }
}

// A query's outputs of a warp's rows, in all of its lanes that have the same columns.
__device__ __forceinline__ float4 warp_output(const float4 (&state)[kThreadRows], const float (&q)[kThreadRows]) {
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    out.x += q[i] * state[i].x, out.y += q[i] * state[i].y, out.z += q[i] * state[i].z, out.w += q[i] * state[i].w;
#pragma unroll
  for (int offset = kColumnLanes; offset < 32; offset *= 2) {
    out.x += __shfl_xor_sync(kAll, out.x, offset), out.y += __shfl_xor_sync(kAll, out.y, offset);
    out.z += __shfl_xor_sync(kAll, out.z, offset), out.w += __shfl_xor_sync(kAll, out.w, offset);
  }
  return out;
}

template <class T, class S, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 6 : 1)
    DecodeKernel(const __grid_constant__ Args args, const __grid_constant__ States<S> states,
                 const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(16) float shared[];
  const Inputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const int group = static_cast<int>(in.heads / in.v_heads), padded = plan.row_groups * kThreadRows;
  int64_t cta = blockIdx.x;
  const int column = static_cast<int>(cta % plan.column_blocks) * kColumns;
  cta /= plan.column_blocks;
  const int64_t head = cta % in.v_heads, request = cta / in.v_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = plan.row_groups / 4;
  const int mine = threadIdx.x % kColumnLanes * 4, row_group = threadIdx.x / kColumnLanes;
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = row >= 0 && row < args.state_rows, inside = column + mine < V;
  const int64_t at = ((row * in.v_heads + head) * R + row_group) * V + column + mine;

  const int64_t step = static_cast<int64_t>(plan.row_groups) * V;
  const int rows = there && inside && row_group < R ? (R - row_group + plan.row_groups - 1) / plan.row_groups : 0;
  float4 state[kThreadRows];
  load_state(states, at, step, states.initial != nullptr ? rows : 0, state);

  const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
  const auto [begin, end] = request_tokens(in, request);
  const T* const query =
      static_cast<const T*>(in.query) + batch * in.query_strides.batch + in.query_head(head * group) * in.query_strides.head;
  const T* const key = static_cast<const T*>(in.key) + batch * in.key_strides.batch + in.key_head(head) * in.key_strides.head;
  const T* const value =
      static_cast<const T*>(in.value) + batch * in.value_strides.batch + head * in.value_strides.head + column;
  T* const output =
      static_cast<T*>(args.output) + batch * in.output_strides.batch + head * group * in.output_strides.head + column;
  const int width = V - column < kColumns ? V - column : kColumns;
  float* const queries = shared;                                 // [group][tile][padded]
  float* const keys = queries + group * query_floats(plan);      // [tile][padded]
  float* const values = keys + query_floats(plan);               // [tile][kColumns]
  float* const partial = values + plan.tile * kColumns;          // [group][tile][warps][kColumns]
  float* const decays = partial + group * partial_floats(plan);  // [tile]

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
                      ? beta_of(in, batch, head, first + i / kColumns) *
                            static_cast<float>(__ldg(value + (first + i / kColumns) * in.value_strides.token + i % kColumns))
                      : 0.0f;
    if (static_cast<int>(threadIdx.x) < tokens)
      decays[threadIdx.x] = in.log_decay == nullptr ? 1.0f
                            : in.decay_per_token
                                ? expf(in.log_decay[batch * in.decay_strides.batch + head * in.decay_strides.head +
                                                    (first + threadIdx.x) * in.decay_strides.token])
                                : expf(in.log_decay[head]);
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const float decay = decays[t];
      const float4 v = *reinterpret_cast<const float4*>(values + t * kColumns + mine);
      float k[kThreadRows];
      load8(keys + t * padded + row_group * kThreadRows, k);
      take_token(state, decay, k, v);
      for (int g = 0; g < group; ++g) {
        float q[kThreadRows];
        load8(queries + (g * plan.tile + t) * padded + row_group * kThreadRows, q);
        const float4 out = warp_output(state, q);
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

  if (states.final != nullptr) store_state(states, at, step, rows, state);
}

template <class T, class S>
cudaError_t launch(const Args& args, const DecodePlan& plan, cudaStream_t stream) {
  const Inputs& in = args.in;
  const auto ctas = static_cast<unsigned>(in.requests * in.v_heads * plan.column_blocks);
  const auto threads = static_cast<unsigned>(plan.row_groups * kColumnLanes);
  const States<S> states = states_of<S>(args);
  const bool packed = in.cu_seqlens != nullptr;
  if (in.tokens <= (packed ? in.requests : 1)) {
    bool vectors = (in.key_width * sizeof(T)) % 16 == 0;
    for (const void* data : {in.query, in.key}) vectors &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
    const auto step = [&](auto most, auto is_packed) {
      return launch_dependently<StepKernel<T, S, decltype(most)::value, decltype(is_packed)::value>>(
          ctas, threads, stream, args, states, plan.column_blocks, vectors);
    };
    const auto of_packed = [&](auto most) { return packed ? step(most, std::true_type{}) : step(most, std::false_type{}); };
    if (threads <= kStepThreads) return of_packed(std::integral_constant<int, kStepThreads>{});
    return of_packed(std::integral_constant<int, kMaxThreads>{});
  }
  const auto kernel = threads <= kFewThreads ? DecodeKernel<T, S, kFewThreads> : DecodeKernel<T, S, kMaxThreads>;
  kernel<<<ctas, threads, shared_bytes(plan, in.heads / in.v_heads), stream>>>(args, states, plan);
  return cudaGetLastError();
}

}  // namespace

bool decode_fits(const Args& args) {
  const Inputs& in = args.in;
  if (args.normalize || in.key_width > kRecurrenceMaxKeyWidth || in.value_width % 4 != 0 || in.tokens == 0) return false;
  if (in.requests * in.v_heads == 0 || in.tokens > kMaxTile * (in.cu_seqlens != nullptr ? in.requests : 1)) return false;
  // Null while a workspace is counted; rows.cu, which takes what is turned away here, needs none for so few tokens.
  for (const float* state : {args.initial_state, static_cast<const float*>(args.final_state)})
    if (reinterpret_cast<uintptr_t>(state) % 16 != 0) return false;
  return shared_bytes(plan_of(args), in.heads / in.v_heads) <= kSharedBudget;
}

int launch_decode(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  return with_type(args.in.dtype, [&](auto type) {
    using T = decltype(type);
    return args.narrow_states ? launch<T, T>(args, plan_of(args), stream) : launch<T, float>(args, plan_of(args), stream);
  });
}

}  // namespace leanfleet::causal_linear_decay
