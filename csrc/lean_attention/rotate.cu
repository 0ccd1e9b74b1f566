// The rotary embedding of queries and new keys before LeanAttention's kernels, for those that do not rotate what they read.
#include <cuda_runtime.h>

#include "lean_attention/device.cuh"

namespace leanfleet::lean_attention {

namespace {

// A row of a head of query or new_key, and where it goes.
template <class T>
struct Row {
  const T* from;
  T* to;
};

// Rows are those of the query's heads and then of new_key's.
template <class T>
__device__ __forceinline__ Row<T> row_of(const Args& args, const Request& request, int row, int token) {
  const bool is_query = row < args.heads;
  const Strides& strides = is_query ? args.query_strides : args.new_key_strides;
  const int64_t at =
      request.origin * strides.batch + (is_query ? row : row - args.heads) * strides.head + token * strides.token;
  return {static_cast<const T*>(is_query ? args.query : args.new_key) + at,
          static_cast<T*>(is_query ? args.rotated_query : args.rotated_key) + at};
}

// A CTA for each token of each request: its rows of all heads. A thread takes two columns.
template <class T, bool kAligned>
__global__ void __launch_bounds__(256) RotateKernel(const __grid_constant__ Args args) {
  const int index = blockIdx.x / args.tokens;
  const Request request = args.packed_tokens ? piece(args, index) : request_of(args, index);
  const int token = blockIdx.x % args.tokens;
  if (token >= request.tokens) return;
  const Rotation rotation = rotation_at(args, request.position + token);
  const int pairs = args.key_width / 2, rows = args.heads + (args.append ? args.kv_heads : 0);
  for (int i = threadIdx.x; i < rows * pairs; i += blockDim.x) {
    const int row = i / pairs, column = 2 * (i - row * pairs);
    const Row<T> place = row_of<T>(args, request, row, token);
    const float2 x = rotate<T, kAligned>(rotation, place.from, column);
    place.to[column] = from_float32<T>(x.x);
    place.to[column + 1] = from_float32<T>(x.y);
  }
}

// The same where pairs are a multiple of 8 columns apart: a thread takes 8 columns and those that they pair with, or 8 that
// stay.
template <class T>
__global__ void __launch_bounds__(256) RotateBy8Kernel(const __grid_constant__ Args args) {
  const int index = blockIdx.x / args.tokens;
  const Request request = args.packed_tokens ? piece(args, index) : request_of(args, index);
  const int token = blockIdx.x % args.tokens;
  if (token >= request.tokens) return;
  const Rotation rotation = rotation_at(args, request.position + token);
  const int half = args.rotary_half, rotated = half / 8, items = (args.key_width - half) / 8;
  const int rows = args.heads + (args.append ? args.kv_heads : 0);
  for (int i = threadIdx.x; i < rows * items; i += blockDim.x) {
    const int row = i / items, item = i - row * items;
    const Row<T> place = row_of<T>(args, request, row, token);
    const auto chunk = [&](int column) { return reinterpret_cast<const uint4*>(place.from + column); };
    const auto target = [&](int column) { return reinterpret_cast<uint4*>(place.to + column); };
    const int column = 8 * item;
    if (item < rotated) {
      const uint4 x = *chunk(column), y = *chunk(half + column);
      const float *cosines = rotation.cosines + column, *sines = rotation.sines + column;
      *target(column) = rotate8<T>(x, y, cosines, sines, -1.0f);
      *target(half + column) = rotate8<T>(y, x, cosines, sines, 1.0f);
    } else {
      *target(half + column) = *chunk(half + column);
    }
  }
}

template <class T>
void launch(const Args& args, cudaStream_t stream) {
  const auto aligned = [&](uintptr_t bytes) {
    return (reinterpret_cast<uintptr_t>(args.query) | reinterpret_cast<uintptr_t>(args.new_key) |
            reinterpret_cast<uintptr_t>(args.cos_cache) | reinterpret_cast<uintptr_t>(args.sin_cache)) %
               bytes ==
           0;
  };
  const int ctas = args.batch * args.tokens;
  if constexpr (sizeof(T) == 2) {
    if (args.rotary_half % 8 == 0 && !args.rotary_interleaved && aligned(16)) {
      RotateBy8Kernel<T><<<ctas, 256, 0, stream>>>(args);
      return;
    }
  }
  if (args.rotary_half % 2 == 0 && aligned(8)) RotateKernel<T, true><<<ctas, 256, 0, stream>>>(args);
  else RotateKernel<T, false><<<ctas, 256, 0, stream>>>(args);
}

}  // namespace

int launch_rotate(Args& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (static_cast<DType>(args.dtype)) {
    case DType::kFloat16: launch<__half>(args, on); break;
    case DType::kBFloat16: launch<__nv_bfloat16>(args, on); break;
    default: launch<float>(args, on);
  }
  args.query = args.rotated_query;
  if (args.append) args.new_key = args.rotated_key;
  args.rotary_half = 0;
  return cudaGetLastError();
}

}  // namespace leanfleet::lean_attention
