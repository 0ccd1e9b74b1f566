// A thread has 16 bytes of a token's channels, or one channel where that does not fit. CTAs of the first kind take a request each:
// its first tokens, which need the state, and then the state itself, so that it is read before it is written. CTAs of the
// second kind take tokens in their order, whichever requests they are of, and leave those first ones out.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "causal_conv/causal_conv.h"
#include "core/integers.h"
#include "core/op.h"

namespace leanfleet::causal_conv {

namespace {

constexpr int kThreads = 128;
constexpr int kTileTokens = 16;  // of a CTA of the second kind, and first tokens of a request where the state is no longer

template <class T, int kChunk>
struct Channels {
  float x[kChunk];

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kChunk == 1) {
      x[0] = static_cast<float>(__ldg(from));
    } else {
      union {
        uint4 words;
        T values[kChunk];
      } chunk = {__ldg(reinterpret_cast<const uint4*>(from))};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] = static_cast<float>(chunk.values[i]);
    }
  }
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kChunk == 1) {
      *to = static_cast<T>(x[0]);
    } else {
      union Chunk {
        uint4 words;
        T values[kChunk];
        __device__ Chunk() {}
      } chunk;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk.values[i] = static_cast<T>(x[i]);
      *reinterpret_cast<uint4*>(to) = chunk.words;
    }
  }
};

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

// The last request that begins at a row of [B * N] or before it; -1: none does.
__device__ __forceinline__ int64_t request_at(const Args& args, int64_t row) {
  if (args.cu_seqlens == nullptr) return row / args.tokens;
  int64_t low = -1, high = args.requests;  // request `low` begins there, `high` does not
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (offset(args, middle) <= row ? low : high) = middle;
  }
  return low;
}

__host__ __device__ __forceinline__ int64_t head_tokens(int64_t past) { return past > kTileTokens ? past : kTileTokens; }

// kTaps: how many weights there are, if that is known when this is compiled; else 0.
template <class T, int kChunk, int kTaps>
struct Convolution {
  const Args& args;
  int64_t channel;
  Channels<T, kChunk> weights[kTaps > 0 ? kTaps : 1], bias;

  __device__ __forceinline__ const T* weight(int64_t j) const {
    return static_cast<const T*>(args.weight) + j * args.channels + channel;
  }

  __device__ __forceinline__ Convolution(const Args& a, int64_t c) : args(a), channel(c) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) weights[j].load(weight(j));
#pragma unroll
    for (int i = 0; i < kChunk; ++i) bias.x[i] = 0.0f;
    if (args.bias != nullptr) bias.load(static_cast<const T*>(args.bias) + channel);
  }

  __device__ __forceinline__ void add(Channels<T, kChunk>& sum, int64_t j, const float (&x)[kChunk]) const {
    Channels<T, kChunk> w;
    if constexpr (kTaps == 0) w.load(weight(j));
#pragma unroll
    for (int k = 0; k < kTaps; ++k)
      if (k == j) w = weights[k];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum.x[i] = fmaf(w.x[i], x[i], sum.x[i]);
  }

  __device__ __forceinline__ void finish(Channels<T, kChunk>& sum, int64_t row) const {
    if (args.activation == Kind::kSilu) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum.x[i] = __fdividef(sum.x[i], 1.0f + __expf(-sum.x[i]));
    }
    sum.store(static_cast<T*>(args.output) + row * args.channels + channel);
  }

  __device__ __forceinline__ const T* input(int64_t row) const {
    return static_cast<const T*>(args.input) + row * args.channels + channel;
  }

  // Of a token whose `past` tokens before are rows of the same request.
  __device__ __forceinline__ void inner(int64_t row) const {
    Channels<T, kChunk> sum = bias, x;
    const int64_t past = kTaps > 0 ? kTaps - 1 : args.past;
#pragma unroll
    for (int64_t j = 0; j <= past; ++j) {
      x.load(input(row - past + j));
      add(sum, j, x.x);
    }
    finish(sum, row);
  }

  // Of token i of a request, whose state is null where it is zeros.
  __device__ __forceinline__ void early(const Request& request, int64_t i, const float* state) const {
    Channels<T, kChunk> sum = bias, x;
    const int64_t past = kTaps > 0 ? kTaps - 1 : args.past;
#pragma unroll
    for (int64_t j = 0; j <= past; ++j) {
      if (i + j >= past) x.load(input(request.first + i - past + j));
      else if (state != nullptr) load_state(x.x, state + (i + j) * args.channels + channel);
      else continue;
      add(sum, j, x.x);
    }
    finish(sum, request.first + i);
  }

  // The last `past` tokens. A row is read before one in front of it is written.
  __device__ __forceinline__ void keep_last(const Request& request, const float* state, float* final_state) const {
    for (int64_t s = 0; s < args.past; ++s) {
      Channels<T, kChunk> x;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x.x[i] = 0.0f;
      const int64_t token = request.count - args.past + s;
      if (token >= 0) x.load(input(request.first + token));
      else if (state != nullptr) load_state(x.x, state + (request.count + s) * args.channels + channel);
      store_state(x.x, final_state + s * args.channels + channel);
    }
  }
};

template <class T, int kChunk, int kTaps>
__global__ void __launch_bounds__(kThreads) ConvolveKernel(Args args, unsigned strips) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x % strips) * kThreads + threadIdx.x) * kChunk;
  if (channel >= args.channels) return;
  const Convolution<T, kChunk, kTaps> convolution(args, channel);
  const int64_t item = blockIdx.x / strips, head = head_tokens(args.past);
  if (item < args.requests) {
    const Request request = request_of(args, item);
    const int64_t row = args.state_index != nullptr ? args.state_index[item] : item, floats = args.past * args.channels;
    const bool has_row = row >= 0 && row < args.state_rows;
    const float* const state = has_row && args.initial_state != nullptr ? args.initial_state + row * floats : nullptr;
    for (int64_t i = 0; i < request.count && i < head; ++i) convolution.early(request, i, state);
    if (has_row && args.final_state != nullptr) convolution.keep_last(request, state, args.final_state + row * floats);
    return;
  }
  const int64_t begin = (item - args.requests) * kTileTokens, rows = args.batch * args.tokens;
  const int64_t end = begin + kTileTokens < rows ? begin + kTileTokens : rows;
  int64_t q = request_at(args, begin);
  for (int64_t row = begin; row < end; ++row) {
    if (args.cu_seqlens == nullptr) q = row / args.tokens;
    else
      while (q + 1 < args.requests && offset(args, q + 1) <= row) ++q;
    const Request request = q < 0 ? Request{row + 1, 0} : request_of(args, q);
    const int64_t i = row - request.first;
    if (i >= 0 && i < request.count) {
      if (i >= head) convolution.inner(row);
      continue;
    }
    Channels<T, kChunk> none;
#pragma unroll
    for (int c = 0; c < kChunk; ++c) none.x[c] = 0.0f;
    none.store(static_cast<T*>(args.output) + row * args.channels + channel);
  }
}

bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  return true;
}

int64_t items(const Args& args) { return args.requests + ceil_div(args.batch * args.tokens, int64_t{kTileTokens}); }

template <class T, int kChunk>
cudaError_t launch_chunks(const Args& args, cudaStream_t stream) {
  const int64_t strips = ceil_div(args.channels, int64_t{kThreads} * kChunk), ctas = strips * items(args);
  if (ctas == 0) return cudaSuccess;
  const auto kernel = args.past == 3 ? ConvolveKernel<T, kChunk, 4> : ConvolveKernel<T, kChunk, 0>;
  kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args, static_cast<unsigned>(strips));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Args& args, cudaStream_t stream) {
  constexpr int kChunk = 16 / sizeof(T);
  const bool wide = args.channels % kChunk == 0 &&
                    aligned({args.input, args.weight, args.bias, args.initial_state, args.output, args.final_state});
  return wide ? launch_chunks<T, kChunk>(args, stream) : launch_chunks<T, 1>(args, stream);
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
  switch (static_cast<DType>(args.dtype)) {
    case DType::kFloat32: return launch_type<float>(args, stream);
    case DType::kFloat16: return launch_type<__half>(args, stream);
    default: return launch_type<__nv_bfloat16>(args, stream);
  }
}

}  // namespace leanfleet::causal_conv
