// The gated delta rule token by token, for what steps.cu does not take. A warp has 16 value columns of one state in registers
// from the first token to the last, so that the state is read and written once: what few tokens cost is that traffic. Warps
// need nothing of each other. Lane (r, c) of 8 x 4 holds four columns, 4 c to 4 c + 3 of the warp's, of the key dimensions
// 32 j + 4 r to 32 j + 4 r + 3.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"
#include "gated_delta_rule/gated_delta_rule.h"
#include "gated_delta_rule/token_rows.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarps = 4;         // of a CTA at most
constexpr int kWarpColumns = 16;  // of a warp
constexpr int kGroupRows = 32;    // key dimensions that the lanes of a warp hold four each of
constexpr int kFirstRowLane = 4;  // lanes of equal columns are 4, 8 and 16 apart

// What may be read and written 16 bytes (of T: four elements) at a time.
struct Vectors {
  bool keys, values, states, decays;
};

// The sum over the lanes that have the same columns, in all of them.
__device__ __forceinline__ float over_rows(float x) {
#pragma unroll
  for (int offset = kFirstRowLane; offset < 32; offset *= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

// A lane's part of a state: element [j][i][c] is key dimension 32 j + 4 r + i and value column `column` + c.
template <int kGroups>
struct LaneState {
  float x[kGroups][4][4];

  // Reads (kStore false) or writes the state [D,V], or [V,D] with v_first.
  template <bool kStore>
  __device__ __forceinline__ void move(float* data, bool v_first, bool vectors, int row, int column, int D, int V) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int first = j * kGroupRows + row;
#pragma unroll
      for (int outer = 0; outer < 4; ++outer) {
        // Four elements side by side: columns of a key dimension, or key dimensions of a column.
        const bool there = v_first ? column + outer < V && first < D : first + outer < D && column < V;
        float* const at = data + (v_first ? static_cast<int64_t>(column + outer) * D + first
                                          : static_cast<int64_t>(first + outer) * V + column);
        const int left = v_first ? D - first : V - column;
        float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (kStore) {
#pragma unroll
          for (int i = 0; i < 4; ++i) four[i] = v_first ? x[j][i][outer] : x[j][outer][i];
          if (there && vectors) {
            *reinterpret_cast<float4*>(at) = make_float4(four[0], four[1], four[2], four[3]);
          } else if (there) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (i < left) at[i] = four[i];
          }
        } else {
          if (there && vectors) {
            const float4 bits = *reinterpret_cast<const float4*>(at);
            four[0] = bits.x, four[1] = bits.y, four[2] = bits.z, four[3] = bits.w;
          } else if (there) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (i < left) four[i] = at[i];
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (v_first) x[j][i][outer] = four[i];
            else x[j][outer][i] = four[i];
          }
        }
      }
    }
  }
};

// What a token brings to a lane, loaded while the token before is computed.
template <class T, int kGroups>
struct Token {
  Four<T> key[kGroups], query[kGroups], value;
  float log_decay, beta;

  __device__ __forceinline__ void load(const Args& args, int64_t batch, int64_t head, int64_t key_head, int64_t query_head,
                                       int64_t token, int row, int column, Vectors vectors) {
    const int D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
    const T* const keys = row_of<T>(args.key, args.key_strides, batch, key_head, token);
    const T* const queries = row_of<T>(args.query, args.query_strides, batch, query_head, token);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      key[j] = load_four(keys, j * kGroupRows + row, D, vectors.keys);
      query[j] = load_four(queries, j * kGroupRows + row, D, vectors.keys);
    }
    value = load_four(row_of<T>(args.value, args.value_strides, batch, head, token), column, V, vectors.values);
    beta = args.beta != nullptr ? __ldg(row_of<float>(args.beta, args.beta_strides, batch, head, token)) : 1.0f;
    log_decay = args.log_decay != nullptr && !args.decay_per_key
                    ? __ldg(row_of<float>(args.log_decay, args.decay_strides, batch, head, token))
                    : 0.0f;
  }
};

__device__ __forceinline__ float chosen(const float (&x)[4], int i) {
  return i < 2 ? (i == 0 ? x[0] : x[1]) : (i == 2 ? x[2] : x[3]);
}

// The sums over rows of `low` and of `high`, each in a lane of its own: lanes below 16 get one of `low`, the others one of
// `high`, that of column summed_column(lane). Halves are exchanged, so that 7 shuffles do what 24 would.
__device__ __forceinline__ int summed_column(int lane) { return lane / 4 % 4; }
__device__ __forceinline__ float scattered_sums(const float (&low)[4], const float (&high)[4], int lane) {
  const bool upper = lane & 16, second = lane & 8, odd = lane & 4;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = (upper ? high[i] : low[i]) + __shfl_xor_sync(kAll, upper ? low[i] : high[i], 16);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] = (second ? four[i + 2] : four[i]) + __shfl_xor_sync(kAll, second ? four[i] : four[i + 2], 8);
  return (odd ? two[1] : two[0]) + __shfl_xor_sync(kAll, odd ? two[0] : two[1], 4);
}

// kGroups: key dimensions over 32, rounded up. A CTA has up to kWarps warps of neighbouring columns.
template <class T, int kGroups>
__global__ void __launch_bounds__(kWarps * 32, kGroups <= 4 ? 2 : 1)
    RecurrenceKernel(const __grid_constant__ Args args, unsigned column_blocks, Vectors vectors) {
  const int D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4 * 4;
  const int first_column = static_cast<int>(blockIdx.x % column_blocks * (blockDim.x / 32) + threadIdx.x / 32) * kWarpColumns;
  if (first_column >= V) return;  // the whole warp
  const int column = first_column + lane % 4 * 4;
  const int64_t unit = blockIdx.x / column_blocks, request = unit / args.v_heads, head = unit % args.v_heads;
  const int64_t key_head = head / (args.v_heads / args.k_heads), group = args.heads / args.v_heads;
  const int64_t queries_of = args.heads / args.q_heads, first_head = head * group;
  int64_t batch = request, begin = 0, end = args.tokens;
  if (args.cu_seqlens != nullptr) {
    batch = 0;
    begin = clamped_offset(args.cu_seqlens, request, args.tokens);
    end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
  }
  const int64_t state_row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = state_row >= 0 && state_row < args.state_rows;
  const int64_t at = (state_row * args.v_heads + head) * D * V;

  const int written = column + summed_column(lane);
  const bool writes = lane >= 16 && written < V;
  constexpr bool kAhead = kGroups <= 4;  // a token is loaded while the one before is computed; else registers do not do
  Token<T, kGroups> next;
  if (begin < end) next.load(args, batch, head, key_head, first_head / queries_of, begin, row, column, vectors);
  LaneState<kGroups> state = {};
  if (there && args.initial_state != nullptr)
    state.template move<false>(const_cast<float*>(args.initial_state) + at, args.state_v_first, vectors.states, row, column, D,
                               V);

  for (int64_t token = begin; token < end; ++token) {
    if (!kAhead && token > begin) next.load(args, batch, head, key_head, first_head / queries_of, token, row, column, vectors);
    const Token<T, kGroups> now = next;
    if (kAhead && token + 1 < end)
      next.load(args, batch, head, key_head, first_head / queries_of, token + 1, row, column, vectors);

    float found[4] = {}, out[4] = {}, query_key = 0.0f, keys = 0.0f, queries = 0.0f;
    const float decay = expf(now.log_decay);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      Four<float> logs;
      if (args.decay_per_key)
        logs = load_four(row_of<float>(args.log_decay, args.decay_strides, batch, head, token), j * kGroupRows + row, D,
                         vectors.decays);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float k = static_cast<float>(now.key[j].element[i]), q = static_cast<float>(now.query[j].element[i]);
        const float kept = args.decay_per_key ? expf(logs.element[i]) : decay;
        query_key += q * k, keys += k * k, queries += q * q;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          state.x[j][i][c] *= kept;
          found[c] += k * state.x[j][i][c];
          out[c] += q * state.x[j][i][c];
        }
      }
    }
    float of_key = 1.0f, of_query = args.scale * row_factor(args, batch, first_head, token);
    if (args.normalize) {
      of_key = rsqrtf(over_rows(keys) + kUnitRowEps);
      of_query *= rsqrtf(over_rows(queries) + kUnitRowEps);
    }
    query_key = over_rows(query_key);
    const float sum = scattered_sums(found, out, lane);
    float update[4];  // of the key as it is given
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float of_state = __shfl_sync(kAll, sum, 4 * c + lane % 4);
      const float value = static_cast<float>(now.value.element[c]);
      update[c] = of_key * now.beta * (args.delta ? value - of_key * of_state : value);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) state.x[j][i][c] += static_cast<float>(now.key[j].element[i]) * update[c];
    // Lanes from 16 on write an element each.
    T* const output = const_cast<T*>(row_of<T>(args.output, args.output_strides, batch, first_head, token)) + written;
    if (writes) *output = static_cast<T>(of_query * (sum + query_key * chosen(update, summed_column(lane))));

    for (int64_t h = 1; h < group; ++h) {  // more query heads of this state
      const T* const from = row_of<T>(args.query, args.query_strides, batch, (first_head + h) / queries_of, token);
      float sums[4] = {}, squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const Four<T> query = load_four(from, j * kGroupRows + row, D, vectors.keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float q = static_cast<float>(query.element[i]);
          squares += q * q;
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[c] += q * state.x[j][i][c];
        }
      }
      const float scale = args.scale * row_factor(args, batch, first_head + h, token);
      const float factor = args.normalize ? scale * rsqrtf(over_rows(squares) + kUnitRowEps) : scale;
      const float of_state = scattered_sums(sums, sums, lane);
      if (writes) output[h * args.output_strides.head] = static_cast<T>(factor * of_state);
    }
  }
  if (there && args.final_state != nullptr)
    state.template move<true>(args.final_state + at, args.state_v_first, vectors.states, row, column, D, V);
}

template <class T>
cudaError_t launch_type(const Args& args, cudaStream_t stream) {
  Vectors vectors = {};
  vectors.keys = args.key_width % 4 == 0 && aligned({args.query, args.key}, 4 * sizeof(T));
  vectors.values = args.value_width % 4 == 0 && aligned({args.value, args.output}, 4 * sizeof(T));
  vectors.states =
      (args.state_v_first ? args.key_width : args.value_width) % 4 == 0 && aligned({args.initial_state, args.final_state}, 16);
  vectors.decays = args.key_width % 4 == 0 && aligned({args.log_decay}, 16);
  const int64_t wanted = ceil_div(args.value_width, int64_t{kWarpColumns}), warps = wanted < kWarps ? wanted : kWarps;
  const int64_t column_blocks = ceil_div(wanted, warps), blocks = args.requests * args.v_heads * column_blocks;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = args.key_width <= 2 * kGroupRows   ? RecurrenceKernel<T, 2>
                      : args.key_width <= 4 * kGroupRows ? RecurrenceKernel<T, 4>
                                                         : RecurrenceKernel<T, 8>;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(32 * warps), 0, stream>>>(
      args, static_cast<unsigned>(column_blocks), vectors);
  return cudaGetLastError();
}

}  // namespace

int64_t recurrence_blocks(const Args& args) {
  const int64_t wanted = ceil_div(args.value_width, int64_t{kWarpColumns});
  return args.requests * args.v_heads * ceil_div(wanted, wanted < kWarps ? wanted : int64_t{kWarps});
}

namespace {

// What no request names: rows of the pool stay as they are, tokens become 0.
cudaError_t keep_what_is_not_named(const Args& args, cudaStream_t stream) {
  const int64_t state_floats = args.v_heads * args.key_width * args.value_width;
  if (args.state_index != nullptr && args.final_state != nullptr && args.final_state != args.initial_state) {
    const cudaError_t error =
        cudaMemcpyAsync(args.final_state, args.initial_state,
                        sizeof(float) * static_cast<size_t>(args.state_rows * state_floats), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  if (args.cu_seqlens == nullptr) return cudaSuccess;
  const int64_t elements = args.batch * args.heads * args.tokens * args.value_width;
  return cudaMemsetAsync(args.output, 0, static_cast<size_t>(elements * element_size(static_cast<DType>(args.dtype))), stream);
}

}  // namespace

int launch_recurrence(const Args& args, const CudaTarget& target, Workspace& ws) {
  static_assert(8 * kGroupRows == kCudaMaxKeyWidth);
  const auto stream = static_cast<cudaStream_t>(target.stream);
  if (!ws.counting()) {
    const cudaError_t error = keep_what_is_not_named(args, stream);
    if (error != cudaSuccess) return error;
  }
  if (!args.token_by_token && prompt_fits(args, target)) {
    bool launched = false;
    const int failed = launch_prompt(args, target, ws, &launched);
    if (failed != cudaSuccess || launched) return failed;
  }
  if (ws.counting()) return cudaSuccess;
  if (!args.token_by_token && chunked_fits(args, target.device)) return launch_chunked(args, target);
  if (steps_fit(args)) return launch_steps(args, target);
  if (!args.token_by_token && float_chunks_fit(args, target.device)) return launch_float_chunks(args, target);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, stream); });
}

}  // namespace leanfleet::gated_delta_rule
