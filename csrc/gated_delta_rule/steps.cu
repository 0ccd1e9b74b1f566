// The gated delta rule token by token for calls whose rows and states are read in vectors, as decode steps' are. What a step
// costs is a state's way in and out, so that a warp asks for all of its part of a state before anything else, and finds what
// needs no state while that is under way. A warp has 4 kLanes value columns of one state in registers from the first token to the
// last, and needs nothing of other warps. Lane (r, c) of 32 / kLanes x kLanes has columns 4 c to 4 c + 3 and key dimensions
// kGroupRows j + 4 r to kGroupRows j + 4 r + 3, j < kLanes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/cuda_target.h"
#include "core/dependent_launch.cuh"
#include "core/integers.h"
#include "core/mma.cuh"
#include "core/op.h"
#include "core/with_type.cuh"
#include "gated_delta_rule/gated_delta_rule.h"
#include "gated_delta_rule/token_rows.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWidest = 128;  // keys
constexpr int kFew = 16;      // tokens of a request, on average, that are steps; what is asked for ahead

// A tensor whose elements 32 bits count.
struct Rows {
  const void* data;  // null: not there
  uint32_t batch, head, token;

  __device__ __forceinline__ uint32_t at(uint32_t b, uint32_t h) const { return b * batch + h * head; }
  template <class T>
  __device__ __forceinline__ const T* row(uint32_t first, uint32_t t) const {
    return static_cast<const T*>(data) + (first + t * token);
  }
};

// x / n for x and n below 2^16: what finds a row of keys waits for no division.
struct Quotient {
  uint64_t factor;

  static Quotient by(int64_t n) { return {(uint64_t{1} << 32) / static_cast<uint64_t>(n) + 1}; }
  __device__ __forceinline__ uint32_t of(uint32_t x) const { return static_cast<uint32_t>(x * factor >> 32); }
};

// Args as a step needs them, in few registers.
struct Steps {
  const float* initial_state;
  float* final_state;
  const int32_t *state_index, *cu_seqlens;
  int32_t D, V, state_rows, tokens;
  uint32_t v_heads;
  uint32_t of_state;              // heads of the output of a state
  Quotient key_head, query_head;  // of a state, of a head of the output
  Rows key, query, value, log_decay, beta, factors, output;
  float scale;
  bool normalize, delta;
};

// The sum over the lanes that have the same columns, in all of them.
template <int kLanes>
__device__ __forceinline__ float over_rows(float x) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// A lane's part of a state: element [j][i][c].
template <int kLanes, bool kValuesFirst>
struct LaneState {
  static constexpr int kGroupRows = kWidest / kLanes;
  float x[kLanes][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < 16 * kLanes; ++n) {
      float& element = x[n / 16][n / 4 % 4][n % 4];
      element = 0.0f;
      asm volatile("" : "+f"(element));  // so that warps which load a state do not clear it first
    }
  }

  // Reads (kStore false) or writes the state [D,V], or with kValuesFirst [V,D], of which data is this lane's first element.
  template <bool kStore>
  __device__ __forceinline__ void move(float* data, int row, int D, int V) {
    if (D == kWidest) move_rows<kStore, true>(data, row, D, V);
    else move_rows<kStore, false>(data, row, D, V);
  }

  // Asks for what move<false> will read.
  static __device__ __forceinline__ void prefetch_rows(const float* data, int row, int D, int V) {
    const int stride = kValuesFirst ? D : V;
#pragma unroll
    for (int j = 0; j < kLanes; ++j)
      if (j * kGroupRows + row < D)
#pragma unroll
        for (int outer = 0; outer < 4; ++outer)
          prefetch(data + (kValuesFirst ? outer * stride + j * kGroupRows : (j * kGroupRows + outer) * stride));
  }

 private:
  // kWhole: lanes have no rows past the last, so that nothing stands between loads, not even zeros.
  template <bool kStore, bool kWhole>
  __device__ __forceinline__ void move_rows(float* data, int row, int D, int V) {
    const int stride = kValuesFirst ? D : V;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      const bool there = kWhole || j * kGroupRows + row < D;
      if (kStore && !there) continue;
#pragma unroll
      for (int outer = 0; outer < 4; ++outer) {
        float4* const at = reinterpret_cast<float4*>(
            data + (kValuesFirst ? outer * stride + j * kGroupRows : (j * kGroupRows + outer) * stride));
        // Four elements side by side: columns of a key dimension, or key dimensions of a column.
        if constexpr (kStore && kValuesFirst) {
          *at = make_float4(x[j][0][outer], x[j][1][outer], x[j][2][outer], x[j][3][outer]);
        } else if constexpr (kStore) {
          *at = make_float4(x[j][outer][0], x[j][outer][1], x[j][outer][2], x[j][outer][3]);
        } else {
          const float4 four = there ? *at : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          (kValuesFirst ? x[j][0][outer] : x[j][outer][0]) = four.x;
          (kValuesFirst ? x[j][1][outer] : x[j][outer][1]) = four.y;
          (kValuesFirst ? x[j][2][outer] : x[j][outer][2]) = four.z;
          (kValuesFirst ? x[j][3][outer] : x[j][outer][3]) = four.w;
        }
      }
    }
  }
};

// What a lane reads of a token: the elements of token 0.
struct Place {
  uint32_t key, query, value, log_decay, beta, factor, output;
  int row, column;
};

// What a token brings to a lane.
template <class T, int kLanes, bool kKeyDecays>
struct Token {
  static constexpr int kGroupRows = kWidest / kLanes;
  Four<T> key[kLanes], query[kLanes], value;
  Four<float> log_decays[kKeyDecays ? kLanes : 1];  // else the first element, of all
  float beta, factor;

  __device__ __forceinline__ void load(const Steps& args, const Place& place, uint32_t token) {
    const float* const logs = args.log_decay.row<float>(place.log_decay, token);
    if constexpr (kKeyDecays) {
#pragma unroll
      for (int j = 0; j < kLanes; ++j) log_decays[j] = load_four(logs + place.row, j * kGroupRows, args.D - place.row, true);
    } else {
      log_decays[0].element[0] = args.log_decay.data != nullptr ? __ldg(logs) : 0.0f;
    }
    value = load_four(args.value.row<T>(place.value, token), place.column, args.V, true);
    beta = args.beta.data != nullptr ? __ldg(args.beta.row<float>(place.beta, token)) : 1.0f;
    factor = args.factors.data != nullptr ? __ldg(args.factors.row<float>(place.factor, token)) : 1.0f;
    const T* const keys = args.key.row<T>(place.key, token) + place.row;
    const T* const queries = args.query.row<T>(place.query, token) + place.row;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      key[j] = load_four(keys, j * kGroupRows, args.D - place.row, true);
      query[j] = load_four(queries, j * kGroupRows, args.D - place.row, true);
    }
  }
};

// Asks for what tokens first to last - 1 bring, which registers do not hold ahead: eight lanes have a token, one line of its key
// or query each.
template <class T>
__device__ __forceinline__ void prefetch_tokens(const Steps& args, const Place& place, int lane, int first, int last) {
  constexpr int kLine = 128 / sizeof(T);
  const int column = lane % 4 * kLine;
  for (int token = first + lane / 8; token < last; token += 4) {
    const bool query = lane & 4;
    if (column < args.D) prefetch((query ? args.query : args.key).row<T>(query ? place.query : place.key, token) + column);
    if (lane % 8 == 0) prefetch(args.value.row<T>(place.value, token) + place.column);
  }
}

struct Numbers {
  float x[4];
};
template <class T>
__device__ __forceinline__ Numbers numbers_of(const Four<T>& four) {
  if constexpr (sizeof(T) == 4) {
    return {four.element[0], four.element[1], four.element[2], four.element[3]};
  } else {  // an instruction for each number, where one by one takes bfloat16 two for every second
    const float2 low = tile::unpack_pair(T{}, four.bits[0].x), high = tile::unpack_pair(T{}, four.bits[0].y);
    return {low.x, low.y, high.x, high.y};
  }
}

template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&x)[4]) {
  Four<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.element[i] = static_cast<T>(x[i]);
  if constexpr (sizeof(T) == 4)
    *reinterpret_cast<uint4*>(to) = make_uint4(four.bits[0].x, four.bits[0].y, four.bits[1].x, four.bits[1].y);
  else *reinterpret_cast<uint2*>(to) = four.bits[0];
}

// The rows of the output of a state's heads after the first, of the state as the token left it.
template <class T, int kLanes, bool kValuesFirst>
__device__ __forceinline__ void more_heads(const Steps& args, const Place& place, uint32_t batch, uint32_t first_head,
                                           uint32_t token, const LaneState<kLanes, kValuesFirst>& state, T* output,
                                           bool writes) {
#pragma unroll 1
  for (uint32_t h = 1; h < args.of_state; ++h) {
    const T* const from = args.query.row<T>(args.query.at(batch, args.query_head.of(first_head + h)), token);
    float sums[8] = {};  // of 4 columns, and of squares
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      const Numbers query = numbers_of(load_four(from, j * state.kGroupRows + place.row, args.D, true));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[4] += query.x[i] * query.x[i];
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[c] += query.x[i] * state.x[j][i][c];
      }
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) sums[i] = over_rows<kLanes>(sums[i]);
    float factor = args.scale;
    if (args.factors.data != nullptr) factor *= __ldg(args.factors.row<float>(place.factor + h * args.factors.head, token));
    if (args.normalize) factor *= rsqrtf(sums[4] + kUnitRowEps);
    const float out[4] = {factor * sums[0], factor * sums[1], factor * sums[2], factor * sums[3]};
    if (writes) store_four(output + h * args.output.head, out);
  }
}

// Takes the state over one token, and writes the output's row of the state's first head. What needs no state comes first.
template <class T, int kLanes, bool kValuesFirst, bool kKeyDecays>
__device__ __forceinline__ void step(const Steps& args, const Token<T, kLanes, kKeyDecays>& now,
                                     LaneState<kLanes, kValuesFirst>& state, T* output, bool writes) {
  float sums[12] = {};  // of 4 columns with the key and with the query; query by key, squares of keys, of queries
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const Numbers key = numbers_of(now.key[j]), query = numbers_of(now.query[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[8] += query.x[i] * key.x[i], sums[9] += key.x[i] * key.x[i], sums[10] += query.x[i] * query.x[i];
  }
#pragma unroll
  for (int i = 8; i < 11; ++i) sums[i] = over_rows<kLanes>(sums[i]);
  const float decay = kKeyDecays ? 1.0f : expf(now.log_decays[0].element[0]);
  float kept[kKeyDecays ? kLanes : 1][4];
  if constexpr (kKeyDecays) {
#pragma unroll
    for (int j = 0; j < kLanes; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[j][i] = expf(now.log_decays[j].element[i]);
  }

#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const Numbers key = numbers_of(now.key[j]), query = numbers_of(now.query[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state.x[j][i][c] *= kKeyDecays ? kept[j][i] : decay;
        sums[c] += key.x[i] * state.x[j][i][c];
        sums[4 + c] += query.x[i] * state.x[j][i][c];
      }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = over_rows<kLanes>(sums[i]);
  float of_key = 1.0f, of_query = args.scale * now.factor;
  if (args.normalize) of_key = rsqrtf(sums[9] + kUnitRowEps), of_query *= rsqrtf(sums[10] + kUnitRowEps);
  float update[4], out[4];  // update: of the key as it is given
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float value = static_cast<float>(now.value.element[c]);
    update[c] = of_key * now.beta * (args.delta ? value - of_key * sums[c] : value);
    out[c] = of_query * (sums[4 + c] + sums[8] * update[c]);
  }
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const Numbers key = numbers_of(now.key[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) state.x[j][i][c] += key.x[i] * update[c];
  }
  if (writes) store_four(output, out);
}

// Warps of a CTA, measured: 8 columns of [Dv,D] are 4 KB side by side; 16 of [D,Dv] are pieces of 64 bytes, and two warps next to each
// other read whole lines.
constexpr int lanes_of(bool values_first) { return values_first ? 2 : 4; }
constexpr int warps_of(bool values_first) { return values_first ? 1 : 2; }
// CTAs of a multiprocessor: as many as spill nothing. Their registers hold 80 to 128 KB of states.
template <class T, bool kValuesFirst, bool kKeyDecays>
constexpr int kMostCtas = (kKeyDecays || sizeof(T) == 4 ? kValuesFirst ? 20 : 12
                           : kValuesFirst               ? 28
                                                        : 16) /
                          warps_of(kValuesFirst);

// blockIdx: (columns, head of the state, request).
template <class T, bool kValuesFirst, bool kKeyDecays>
__global__ void __launch_bounds__(32 * warps_of(kValuesFirst), kMostCtas<T, kValuesFirst, kKeyDecays>)
    StepsKernel(const __grid_constant__ Steps args) {
  constexpr int kLanes = lanes_of(kValuesFirst), kWarps = warps_of(kValuesFirst);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int slice = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (slice * 4 * kLanes >= args.V) return;
  const uint32_t head = blockIdx.y, request = blockIdx.z;
  Place place;
  place.row = lane / kLanes * 4, place.column = (slice * kLanes + lane % kLanes) * 4;
  const bool packed = args.cu_seqlens != nullptr;
  // A state is most of what a step reads: its lines come to the L2 cache before the launch before has ended. Past L1, since that
  // launch may still write the index.
  const auto at_of = [&](int32_t index) {
    return (static_cast<int64_t>(index) * args.v_heads + head) * (args.D * args.V) +
           (kValuesFirst ? place.column * args.D + place.row : place.row * args.V + place.column);
  };
  const auto name = [&] {
    return args.state_index != nullptr ? __ldcg(args.state_index + request) : static_cast<int32_t>(request);
  };
  const auto exists = [&](int32_t index) { return index >= 0 && index < args.state_rows && place.column < args.V; };
  const int32_t maybe = name();
  if (exists(maybe) && args.initial_state != nullptr)
    LaneState<kLanes, kValuesFirst>::prefetch_rows(args.initial_state + at_of(maybe), place.row, args.D, args.V);
  wait_for_launch_before();
  const int32_t named = name();
  int32_t begin = 0, end = args.tokens;
  if (packed) begin = args.cu_seqlens[request], end = args.cu_seqlens[request + 1];
  const bool there = exists(named);
  const int64_t at = at_of(named);
  LaneState<kLanes, kValuesFirst> state;
  if (there && args.initial_state != nullptr)
    state.template move<false>(const_cast<float*>(args.initial_state) + at, place.row, args.D, args.V);
  else state.clear();

  begin = clamp(begin, 0, args.tokens), end = clamp(end, 0, args.tokens);
  const uint32_t batch = packed ? 0 : request, first_head = head * args.of_state;
  place.key = args.key.at(batch, args.key_head.of(head));
  place.query = args.query.at(batch, args.query_head.of(first_head));
  place.value = args.value.at(batch, head);
  place.log_decay = args.log_decay.at(batch, head);
  place.beta = args.beta.at(batch, head);
  place.factor = args.factors.at(batch, first_head);
  place.output = args.output.at(batch, first_head) + place.column;
  const bool writes = lane < kLanes && place.column < args.V;
  Token<T, kLanes, kKeyDecays> now;
  if (begin < end) now.load(args, place, begin);
  prefetch_tokens<T>(args, place, lane, begin + 1, end - begin > kFew ? begin + kFew : end);
#pragma unroll 1
  for (int32_t token = begin; token < end; ++token) {
    T* const output = const_cast<T*>(args.output.row<T>(place.output, token));
    step<T>(args, now, state, output, writes);
    more_heads<T>(args, place, batch, first_head, token, state, output, writes);
    if (token + 1 < end) now.load(args, place, token + 1);
    if (token + kFew < end) prefetch_tokens<T>(args, place, lane, token + kFew, token + kFew + 1);
  }
  if (there && args.final_state != nullptr) state.template move<true>(args.final_state + at, place.row, args.D, args.V);
}

uint32_t narrow(int64_t n) { return static_cast<uint32_t>(n); }
Rows rows_of(const void* data, const Strides& strides) {
  return {data, narrow(strides.batch), narrow(strides.head), narrow(strides.token)};
}

Steps steps_of(const Args& args) {
  Steps to = {};
  to.initial_state = args.initial_state, to.final_state = args.final_state;
  to.state_index = args.state_index, to.cu_seqlens = args.cu_seqlens;
  to.D = static_cast<int32_t>(args.key_width), to.V = static_cast<int32_t>(args.value_width);
  to.state_rows = static_cast<int32_t>(args.state_rows), to.tokens = static_cast<int32_t>(args.tokens);
  to.v_heads = narrow(args.v_heads);
  to.of_state = narrow(args.heads / args.v_heads);
  to.key_head = Quotient::by(args.v_heads / args.k_heads), to.query_head = Quotient::by(args.heads / args.q_heads);
  to.key = rows_of(args.key, args.key_strides), to.query = rows_of(args.query, args.query_strides);
  to.value = rows_of(args.value, args.value_strides), to.output = rows_of(args.output, args.output_strides);
  to.log_decay = rows_of(args.log_decay, args.decay_strides), to.beta = rows_of(args.beta, args.beta_strides);
  to.factors = rows_of(args.row_factors, {args.heads * args.tokens, args.tokens, 1});
  to.scale = args.scale, to.normalize = args.normalize, to.delta = args.delta;
  return to;
}

template <class T, bool kValuesFirst>
cudaError_t launch_order(const Args& args, cudaStream_t stream) {
  constexpr int kWarps = warps_of(kValuesFirst), kColumns = 4 * lanes_of(kValuesFirst) * kWarps;
  const dim3 blocks(narrow(ceil_div(args.value_width, int64_t{kColumns})), narrow(args.v_heads), narrow(args.requests));
  const Steps steps = steps_of(args);
  if (args.decay_per_key) return launch_dependently<StepsKernel<T, kValuesFirst, true>>(blocks, 32 * kWarps, stream, steps);
  return launch_dependently<StepsKernel<T, kValuesFirst, false>>(blocks, 32 * kWarps, stream, steps);
}

}  // namespace

bool steps_fit(const Args& args) {
  if (args.requests == 0) return false;
  const uintptr_t four = 4 * element_size(static_cast<DType>(args.dtype));
  const int64_t widest = args.key_width > args.value_width ? args.key_width : args.value_width;
  const int64_t tokens = args.packed ? ceil_div(args.tokens, args.requests) : args.tokens;
  return tokens <= kFew && args.key_width <= kWidest && args.key_width % 4 == 0 && args.value_width % 4 == 0 &&
         args.batch * args.tokens * args.heads * widest <= INT32_MAX && args.key_width * args.value_width <= INT32_MAX &&
         args.state_rows <= INT32_MAX && args.heads < 65536 && args.requests < 65536 &&
         args.requests * args.v_heads * args.value_width > 0 &&
         aligned({args.query, args.key, args.value, args.output}, four) &&
         aligned({args.initial_state, args.final_state}, 16) && (!args.decay_per_key || aligned({args.log_decay}, 16));
}

int launch_steps(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    return args.state_v_first ? launch_order<T, true>(args, stream) : launch_order<T, false>(args, stream);
  });
}

}  // namespace leanfleet::gated_delta_rule
