// The rotary embedding of queries and new keys before LeanAttention's kernels, for those that do not rotate what they read; for
// packed tokens together with the append.
#include <cuda_runtime.h>

#include "core/dependent_launch.cuh"
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

// The request that owns a packed token, or one before it where nobody does. By a warp.
__device__ __forceinline__ int owner_of_token(const Args& args, int token) {
  int owners = 0;
#pragma unroll 1
  for (int first = 0; first < args.requests; first += 32) {
    const int b = first + static_cast<int>(threadIdx.x % 32);
    const unsigned begun = __ballot_sync(kFullWarp, b < args.requests && query_offset(args, b) <= token);
    owners += __popc(begun);
    if (begun != kFullWarp) break;
  }
  return max32(owners - 1, 0);
}

// A warp takes a token: rows of `heads` query heads, from `first` on, and of new keys, 8 columns and those that they pair with
// to a lane, then new values.
template <class T>
__global__ void __launch_bounds__(256) PrepareKernel(const __grid_constant__ Args args, int first_row) {
  constexpr int kAtOnce = 4;
  begin_append();
  if (!args.lone_tokens) note_pieces(args, blockIdx.x * 256 + threadIdx.x, gridDim.x * 256);
  const int lane = threadIdx.x % 32, warps = gridDim.x * 8;
  const int half = args.rotary_half, rotated = half / 8, items = (args.key_width - half) / 8, chunks = args.value_width / 8;
  const int rows = args.heads + args.kv_heads, end = rows * items, values_end = args.kv_heads * chunks;
#pragma unroll 1
  for (int token = blockIdx.x * 8 + threadIdx.x / 32; token < args.total_tokens; token += warps) {
    const Request request = packed_tokens(args, owner_of_token(args, token), 0, args.total_tokens);
    const int of_request = token - request.origin;
    if (of_request < 0 || of_request >= request.tokens) continue;
    const int position = request.position + of_request;
    const Rotation rotation = rotation_at(args, position);
    const int64_t key_at = cache_row(args, args.key_strides, request, 0, position);
    const int64_t value_at = cache_row(args, args.value_strides, request, 0, position);
#pragma unroll 1
    for (int begin = first_row * items + lane; begin < end; begin += 32 * kAtOnce) {
      uint4 x[kAtOnce], y[kAtOnce];
      T* to[kAtOnce];
      int column[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + 32 * j, row = small_quotient(i, items), item = i - row * items;
        const Row<T> place = row_of<T>(args, request, row, of_request);
        const bool is_query = row < args.heads, there = i < end && (is_query || key_at >= 0);
        column[j] = item;
        to[j] = !there     ? nullptr
                : is_query ? place.to
                           : static_cast<T*>(args.key_cache_out) + key_at + (row - args.heads) * args.key_strides.head;
        if (there && item < rotated) x[j] = *reinterpret_cast<const uint4*>(place.from + 8 * item);
        if (there) y[j] = *reinterpret_cast<const uint4*>(place.from + half + 8 * item);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (to[j] == nullptr) continue;
        const int at = 8 * column[j];
        if (column[j] < rotated) {
          const float *cosines = rotation.cosines + at, *sines = rotation.sines + at;
          *reinterpret_cast<uint4*>(to[j] + at) = rotate8<T>(x[j], y[j], cosines, sines, -1.0f);
          y[j] = rotate8<T>(y[j], x[j], cosines, sines, 1.0f);
        }
        *reinterpret_cast<uint4*>(to[j] + half + at) = y[j];
      }
    }
    if (value_at < 0) continue;
    const T* const from = static_cast<const T*>(args.new_value) + request.origin * args.new_value_strides.batch +
                          of_request * args.new_value_strides.token;
#pragma unroll 2
    for (int i = lane; i < values_end; i += 32) {
      const int head = small_quotient(i, chunks), column = 8 * (i - head * chunks);
      *reinterpret_cast<uint4*>(static_cast<T*>(args.value_cache_out) + value_at + head * args.value_strides.head + column) =
          *reinterpret_cast<const uint4*>(from + head * args.new_value_strides.head + column);
    }
  }
}

}  // namespace

int launch_prepare(const Args& args, bool queries, void* stream) {
  const int ctas = clamp(ceil_div(args.total_tokens, 8), 1, 8192), first_row = queries ? 0 : args.heads;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.dtype == static_cast<int>(DType::kFloat16))
    return launch_dependently<PrepareKernel<__half>>(dim3(ctas), 256, on, args, first_row);
  return launch_dependently<PrepareKernel<__nv_bfloat16>>(dim3(ctas), 256, on, args, first_row);
}

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
