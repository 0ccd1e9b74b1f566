// A thread takes 16 bytes of a row's gates and of the values beside them, and writes as many results.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/op.h"
#include "core/with_type.cuh"
#include "gated_activation/activated.cuh"

namespace leanfleet::gated_activation {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = int64_t{1} << 30;

// kWide: heads are whole chunks of 16 bytes on addresses that are multiples of them; else a chunk is one element.
template <class T, Kind kind, bool kWide>
__global__ void __launch_bounds__(kThreads) ActivateKernel(Args args, unsigned blocks_of_row) {
  constexpr int kChunk = kWide ? 16 / sizeof(T) : 1;
  union Chunk {
    uint4 words;
    T values[16 / sizeof(T)];
    __device__ Chunk() {}
  };
  const auto at = static_cast<int64_t>(blockIdx.x % blocks_of_row * kThreads + threadIdx.x) * kChunk;
  if (at >= args.width) return;
  const float scale = args.skip != nullptr ? args.scales[at / (args.width / args.heads)] : 0.0f;
  for (int64_t row = blockIdx.x / blocks_of_row; row < args.rows; row += gridDim.x / blocks_of_row) {
    const T* const gate = static_cast<const T*>(args.gate) + row * args.gate_pitch + at;
    const T* const up = static_cast<const T*>(args.up) + row * args.up_pitch + at;
    const T* const skip = static_cast<const T*>(args.skip) + row * args.width + at;
    T* const out = static_cast<T*>(args.output) + row * args.width + at;
    const auto value = [&](T up, T skip) {
      return args.skip != nullptr ? scale * static_cast<float>(skip) + static_cast<float>(up) : static_cast<float>(up);
    };
    if constexpr (kWide) {
      Chunk a, b, c, d;
      a.words = *reinterpret_cast<const uint4*>(gate);
      b.words = *reinterpret_cast<const uint4*>(up);
      d.words = args.skip != nullptr ? *reinterpret_cast<const uint4*>(skip) : b.words;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        c.values[i] = static_cast<T>(activated<kind>(static_cast<float>(a.values[i])) * value(b.values[i], d.values[i]));
      *reinterpret_cast<uint4*>(out) = c.words;
    } else {
      *out = static_cast<T>(activated<kind>(static_cast<float>(*gate)) * value(*up, args.skip != nullptr ? *skip : *up));
    }
  }
}

template <class T, Kind kind>
int launch_kind(const Args& args, cudaStream_t stream) {
  constexpr int64_t kChunk = 16 / sizeof(T);
  bool wide = args.width / args.heads % kChunk == 0 && args.gate_pitch % kChunk == 0;
  for (const void* data : {args.gate, args.up, args.skip, static_cast<const void*>(args.output)})
    wide = wide && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t chunks = wide ? args.width / kChunk : args.width, blocks_of_row = (chunks + kThreads - 1) / kThreads;
  const int64_t rows = args.rows * blocks_of_row > kMostBlocks ? kMostBlocks / blocks_of_row : args.rows;
  const auto blocks = static_cast<unsigned>(rows * blocks_of_row), of_row = static_cast<unsigned>(blocks_of_row);
  if (blocks == 0) return cudaSuccess;
  if (wide) ActivateKernel<T, kind, true><<<blocks, kThreads, 0, stream>>>(args, of_row);
  else ActivateKernel<T, kind, false><<<blocks, kThreads, 0, stream>>>(args, of_row);
  return cudaGetLastError();
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  switch (args.activation) {
    case Kind::kGelu: return launch_kind<T, Kind::kGelu>(args, stream);
    case Kind::kGeluTanh: return launch_kind<T, Kind::kGeluTanh>(args, stream);
    case Kind::kRelu: return launch_kind<T, Kind::kRelu>(args, stream);
    case Kind::kSigmoid: return launch_kind<T, Kind::kSigmoid>(args, stream);
    default: return launch_kind<T, Kind::kSilu>(args, stream);
  }
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::gated_activation
