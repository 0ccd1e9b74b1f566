// A thread has four channels, or one where four do not fit, and goes from token to token with those
// before in registers. CTAs of the first kind take a request each: its first tokens, which need the state, and then the state
// itself, so that it is read before it is written. CTAs of the second kind take a tile of tokens, whichever requests they are
// of, and leave those first ones out.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "causal_conv/causal_conv.h"
#include "core/dependent_launch.cuh"
#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"

namespace leanfleet::causal_conv {

namespace {

constexpr int kThreads = 128;
constexpr int kWide = 4;  // channels of a thread
// A tile has as many tokens as leave this many CTAs, which is a little more than run at once.
constexpr int64_t kCtas = 1024;
constexpr int64_t kMinTile = 4, kMaxTile = 32;

// What a thread loads of a token at once.
template <class T, int kChunk>
struct alignas(sizeof(T) * kChunk) Pack {
  T values[kChunk];

  __device__ __forceinline__ static Pack from(const T* values) {
    if constexpr (kChunk == 1) {
      return {__ldg(values)};
    } else {
      union {
        std::conditional_t<sizeof(T) == 4, uint4, uint2> words;
        Pack pack;
      } loaded = {__ldg(reinterpret_cast<const decltype(loaded.words)*>(values))};
      return loaded.pack;
    }
  }
  __device__ __forceinline__ void widen(float (&x)[kChunk]) const {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = static_cast<float>(values[i]);
  }
};

template <class T, int kChunk>
__device__ __forceinline__ void load(float (&x)[kChunk], const T* from) {
  Pack<T, kChunk>::from(from).widen(x);
}
template <class T, int kChunk>
__device__ __forceinline__ void store(const float (&x)[kChunk], T* to) {
  Pack<T, kChunk> pack;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) pack.values[i] = static_cast<T>(x[i]);
  *reinterpret_cast<Pack<T, kChunk>*>(to) = pack;
}

// Of a state, which is read and written by the same thread: not through the cache of constants.
template <int kChunk>
__device__ __forceinline__ void load_state(float (&x)[kChunk], const float* from) {
  if constexpr (kChunk % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(from + i);
      x[i] = part.x, x[i + 1] = part.y, x[i + 2] = part.z, x[i + 3] = part.w;
    }
  } else {
    x[0] = *from;
  }
}
template <int kChunk>
__device__ __forceinline__ void store_state(const float (&x)[kChunk], float* to) {
  if constexpr (kChunk % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
    *to = x[0];
  }
}

// A request: its first row in [B * N] and how many tokens it has.
struct Request {
  int64_t first, count;
};

__device__ __forceinline__ int64_t offset(const Args& args, int64_t request) {
  return clamped_offset(args.cu_seqlens, request, args.tokens);
}

__device__ __forceinline__ Request request_of(const Args& args, int64_t q) {
  if (args.cu_seqlens != nullptr) {
    const int64_t begin = offset(args, q), end = offset(args, q + 1);
    return {begin, end > begin ? end - begin : 0};
  }
  if (args.query_lens == nullptr) return {q * args.tokens, args.tokens};
  const int64_t count = args.query_lens[q];
  return {q * args.tokens, count < 0 ? 0 : count < args.tokens ? count : args.tokens};
}

// The last request that begins at a row of [B * N] or before it; -1: none does. The CTA looks together.
__device__ __forceinline__ int64_t request_at(const Args& args, int64_t row) {
  if (args.cu_seqlens == nullptr) return row / args.tokens;
  int64_t begun = 0;
  for (int64_t first = 0; first < args.requests; first += kThreads) {
    const int64_t q = first + threadIdx.x;
    begun += __syncthreads_count(q < args.requests && offset(args, q) <= row);
  }
  return begun - 1;
}

// kTaps: how many weights there are, if that is known when this is compiled; else 0.
template <class T, int kChunk, int kTaps>
struct Convolution {
  const Args& args;
  unsigned channel, to_channels;  // to_channels: of a row of the output's part that has the thread's
  T* to;                          // the thread's channels of that part's first row
  float bias[kChunk], weights[kTaps > 0 ? kTaps : 1][kChunk];
  float window[kTaps > 0 ? kTaps : 1][kChunk];  // token i of a run, counted from where that began, is at i mod kTaps

  __device__ __forceinline__ const T* weight(int64_t j) const {
    return static_cast<const T*>(args.weight) + j * args.channels + channel;
  }
  __device__ __forceinline__ const T* input(int64_t row) const {
    return static_cast<const T*>(args.input) + row * args.pitch + channel;
  }
  __device__ __forceinline__ T* output(int64_t row) const { return to + row * to_channels; }

  __device__ __forceinline__ Convolution(const Args& a, int64_t c) : args(a), channel(static_cast<unsigned>(c)) {
    const Part& part =
        args.parts[(args.num_parts > 1 && c >= args.parts[0].end) + (args.num_parts > 2 && c >= args.parts[1].end)];
    to_channels = static_cast<unsigned>(part.end - part.begin);
    to = static_cast<T*>(part.data) + (c - part.begin);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) load(weights[j], weight(j));
#pragma unroll
    for (int i = 0; i < kChunk; ++i) bias[i] = 0.0f;
    if (args.bias != nullptr) load(bias, static_cast<const T*>(args.bias) + channel);
  }

  __device__ __forceinline__ void finish(float (&sum)[kChunk], T* to) const {
    if (args.activation == Kind::kSilu) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[i] = __fdividef(sum[i], 1.0f + __expf(-sum[i]));
    }
    store(sum, to);
  }

  // The token `back` places before a run that begins at token `from`: of the input, or of the state (null: zeros).
  __device__ __forceinline__ void earlier(float (&x)[kChunk], const Request& request, int64_t from, int64_t back,
                                          const float* state) const {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = 0.0f;
    if (from >= back) load(x, input(request.first + from - back));
    else if (state != nullptr) load_state(x, state + (args.past + from - back) * args.channels + channel);
  }

  // Tokens `from` .. from + count of a request. Where from < past it is 0: the state stands before it.
  __device__ __forceinline__ void run(const Request& request, int64_t from, int count, const float* state) {
    const T* x = input(request.first + from);
    T* y = output(request.first + from);
    if constexpr (kTaps == 0) {
      for (int64_t i = from; i < from + count; ++i, y += to_channels) {
        float sum[kChunk], token[kChunk], w[kChunk];
#pragma unroll
        for (int c = 0; c < kChunk; ++c) sum[c] = bias[c];
        for (int64_t j = 0; j <= args.past; ++j) {
          earlier(token, request, i, args.past - j, state);
          load(w, weight(j));
#pragma unroll
          for (int c = 0; c < kChunk; ++c) sum[c] = fmaf(w[c], token[c], sum[c]);
        }
        finish(sum, y);
      }
    } else {
      Pack<T, kChunk> ahead[kTaps];
#pragma unroll
      for (int k = 0; k < kTaps; ++k)
        if (k < count) ahead[k] = Pack<T, kChunk>::from(x + k * args.pitch);
#pragma unroll
      for (int k = 1; k < kTaps; ++k) earlier(window[k], request, from, kTaps - k, state);
      for (int i = 0; i < count; i += kTaps) {
        Pack<T, kChunk> now[kTaps];
        x += kTaps * args.pitch;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          now[k] = ahead[k];
          if (i + kTaps + k < count) ahead[k] = Pack<T, kChunk>::from(x + k * args.pitch);
        }
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (i + k >= count) continue;
          float sum[kChunk];
          now[k].widen(window[k]);
#pragma unroll
          for (int c = 0; c < kChunk; ++c) sum[c] = bias[c];
#pragma unroll
          for (int j = 0; j < kTaps; ++j)
#pragma unroll
            for (int c = 0; c < kChunk; ++c) sum[c] = fmaf(weights[j][c], window[(k + 1 + j) % kTaps][c], sum[c]);
          finish(sum, y);
          y += to_channels;
        }
      }
    }
  }

  // The last `past` tokens of a request whose first `done` were the last run. A row of the state is read before one in front
  // of it is written.
  __device__ __forceinline__ void keep_last(const Request& request, int done, const float* state, float* to) const {
    if constexpr (kTaps > 0) {
      if (done == request.count) {
#pragma unroll
        for (int s = 0; s < kTaps - 1; ++s) {
          const int at = (done + 1 + s) % kTaps;  // values are chosen, so that the window stays in registers
          float x[kChunk];
#pragma unroll
          for (int k = 0; k < kTaps; ++k)
#pragma unroll
            for (int c = 0; c < kChunk; ++c) x[c] = k == 0 || at == k ? window[k][c] : x[c];
          store_state(x, to + s * args.channels + channel);
        }
        return;
      }
    }
    for (int64_t s = 0; s < args.past; ++s) {
      float x[kChunk];
      earlier(x, request, request.count, args.past - s, state);
      store_state(x, to + s * args.channels + channel);
    }
  }

  __device__ __forceinline__ void clear(int64_t row, int64_t end) const {
    float none[kChunk];
#pragma unroll
    for (int c = 0; c < kChunk; ++c) none[c] = 0.0f;
    for (; row < end; ++row) store(none, output(row));
  }
};

// Tokens that a request's own CTA takes: at least those that need the state.
__host__ __device__ __forceinline__ int64_t head_tokens(const Args& args, int64_t tile) {
  return args.past > tile ? args.past : tile;
}

template <class T, int kChunk, int kTaps>
__device__ __forceinline__ void run_head(const Args& args, int64_t q, int64_t head, int64_t channel) {
  Convolution<T, kChunk, kTaps> convolution(args, channel);
  const Request request = request_of(args, q);
  const int64_t row = args.state_index != nullptr ? args.state_index[q] : q, floats = args.past * args.channels;
  const bool has_row = row >= 0 && row < args.state_rows;
  const float* const state = has_row && args.initial_state != nullptr ? args.initial_state + row * floats : nullptr;
  const int count = static_cast<int>(std::min(request.count, head));
  convolution.run(request, 0, count, state);
  if (has_row && args.final_state != nullptr) convolution.keep_last(request, count, state, args.final_state + row * floats);
  if (args.query_lens != nullptr) convolution.clear(request.first + count, request.first + std::min(args.tokens, head));
}

// Rows `row` .. `end` of [B * N], without the heads of requests; q: the last request that begins at `row` or before.
template <class T, int kChunk, int kTaps>
__device__ __forceinline__ void run_tile(const Args& args, int64_t row, int64_t end, int64_t q, int64_t head, int64_t channel) {
  Convolution<T, kChunk, kTaps> convolution(args, channel);
  while (row < end) {
    if (args.cu_seqlens == nullptr) q = row / args.tokens;
    else
      while (q + 1 < args.requests && offset(args, q + 1) <= row) ++q;
    const Request request = q < 0 ? Request{row, 0} : request_of(args, q);
    const int64_t i = row - request.first;
    int64_t stop;
    if (i < head && (i < request.count || args.cu_seqlens == nullptr)) {
      stop = request.first + std::min(head, args.cu_seqlens == nullptr ? args.tokens : request.count);
    } else if (i < request.count) {
      stop = std::min(end, request.first + request.count);
      convolution.run(request, i, static_cast<int>(stop - row), nullptr);
    } else {
      stop = args.cu_seqlens == nullptr ? request.first + args.tokens
             : q + 1 < args.requests    ? offset(args, q + 1)
                                        : args.tokens;
      convolution.clear(row, std::min(end, stop));
    }
    row = stop;
  }
}

template <class T, int kChunk, int kTaps>
__global__ void __launch_bounds__(kThreads, 5) ConvolveKernel(Args args, unsigned strips, int64_t tile) {
  let_next_launch_begin();
  const int64_t channel = (static_cast<int64_t>(blockIdx.x % strips) * kThreads + threadIdx.x) * kChunk;
  const int64_t item = blockIdx.x / strips, head = head_tokens(args, tile), begin = (item - args.requests) * tile;
  const int64_t q = item < args.requests ? item : request_at(args, begin);
  if (channel >= args.channels) return;
  if (item < args.requests) run_head<T, kChunk, kTaps>(args, q, head, channel);
  else run_tile<T, kChunk, kTaps>(args, begin, std::min(args.batch * args.tokens, begin + tile), q, head, channel);
}

bool aligned(std::initializer_list<const void*> pointers, size_t bytes) {
  for (const void* pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) return false;
  return true;
}

int64_t tile_tokens(const Args& args) {
  const int64_t strips = ceil_div(args.channels, int64_t{kThreads} * kWide);
  return std::clamp(args.batch * args.tokens * strips / kCtas / kMinTile * kMinTile, kMinTile, kMaxTile);
}

// Without cu_seqlens the requests' own CTAs take all tokens where the head is the whole row.
int64_t items(const Args& args) {
  const int64_t tile = tile_tokens(args);
  if (args.cu_seqlens == nullptr && args.tokens <= head_tokens(args, tile)) return args.requests;
  return args.requests + ceil_div(args.batch * args.tokens, tile);
}

template <class T, int kChunk>
cudaError_t launch_chunks(const Args& args, cudaStream_t stream) {
  const int64_t strips = ceil_div(args.channels, int64_t{kThreads} * kChunk), ctas = strips * items(args);
  if (ctas == 0) return cudaSuccess;
  const auto kernel = args.past == 3 ? ConvolveKernel<T, kChunk, 4> : ConvolveKernel<T, kChunk, 0>;
  kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args, static_cast<unsigned>(strips), tile_tokens(args));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Args& args, cudaStream_t stream) {
  constexpr size_t kBytes = kWide * sizeof(T);
  bool wide = args.pitch % kWide == 0 && aligned({args.input, args.weight, args.bias}, kBytes) &&
              aligned({args.initial_state, args.final_state}, kWide * sizeof(float));
  for (int i = 0; i < args.num_parts; ++i)
    wide = wide && args.parts[i].end % kWide == 0 && aligned({args.parts[i].data}, kBytes);
  return wide ? launch_chunks<T, kWide>(args, stream) : launch_chunks<T, 1>(args, stream);
}

}  // namespace

int64_t blocks(const Args& args) { return ceil_div(args.channels, int64_t{kThreads}) * items(args); }

int launch(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  if (args.state_index != nullptr && args.final_state != nullptr && args.final_state != args.initial_state) {
    const auto bytes = sizeof(float) * static_cast<size_t>(args.state_rows * args.past * args.channels);
    const cudaError_t error = cudaMemcpyAsync(args.final_state, args.initial_state, bytes, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, stream); });
}

}  // namespace leanfleet::causal_conv
