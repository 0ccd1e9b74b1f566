// The append of new keys and values to quantised caches, before LeanAttention's kernels read them.
#include <cuda_runtime.h>

#include "core/dependent_launch.cuh"
#include "core/with_type.cuh"
#include "lean_attention/device.cuh"
#include "lean_attention/narrow.cuh"
#include "lean_attention/narrow.h"

namespace leanfleet::lean_attention {

namespace {

constexpr float kLeast = 0x1p-100f;  // of a row's largest magnitude: a smaller one counts as 0

// A row's largest magnitude / that of the form; NaN if one is not finite. magnitudes: the largest of each lane as bits, whose order is that
// of the numbers, with NaN last.
__device__ __forceinline__ float own_scale(CacheForm form, unsigned magnitudes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const unsigned other = __shfl_xor_sync(kFullWarp, magnitudes, offset);
    magnitudes = other > magnitudes ? other : magnitudes;
  }
  if (magnitudes >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const float largest = __uint_as_float(magnitudes);
  return largest < kLeast ? 0.0f : __fdiv_rn(largest, largest_of(form));
}

// x / scale as the form holds it; 0 where the scale is.
__device__ __forceinline__ uint32_t quantised(CacheForm form, float x, float scale) {
  return bits_of(form, scale == 0.0f ? 0.0f : __fdiv_rn(x, scale));
}

// The key or value at `position`, by a warp. from: its row [width]; at, scale_at: its place in the cache and in its scales.
template <class T>
__device__ __forceinline__ void append_row(const Args& args, const Scales& scales, int head, const T* from, int width,
                                           bool rotated, int position, void* cache, int64_t at, int64_t scale_at) {
  constexpr int kPairs = 256 / 64;  // of columns a lane
  const int lane = threadIdx.x % 32;
  T x[kPairs][2];
  unsigned magnitudes = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = 64 * i + 2 * lane;
    x[i][0] = x[i][1] = from_float32<T>(0.0f);
    if (column >= width) continue;
    x[i][0] = from[column], x[i][1] = from[column + 1];
    if (rotated) {
      const float2 turned = rotate<T, false>(rotation_at(args, position), from, column);
      x[i][0] = from_float32<T>(turned.x), x[i][1] = from_float32<T>(turned.y);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const unsigned magnitude = __float_as_uint(as_float(x[i][c])) & 0x7fffffffu;
      magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    }
  }
  float scale = scales.kind == kPerTensor ? scales.in[0] : 0.0f;
  if (scales.kind == kPerToken) {
    scale = own_scale(scales.form, magnitudes);
    if (lane == 0) scales.out[scale_at] = scale;
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = 64 * i + 2 * lane;
    if (column >= width) continue;
    auto* const bytes = static_cast<uint8_t*>(cache) + cache_bytes(scales, at + column, sizeof(T));
    uint32_t bits[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (scales.kind == kPerChannel) scale = scales.in[static_cast<int64_t>(head) * width + column + c];
      if (scales.kind == kNoScale) static_cast<T*>(cache)[at + column + c] = x[i][c];
      else bits[c] = quantised(scales.form, as_float(x[i][c]), scale);
    }
    if (scales.kind == kNoScale) continue;
    if (scales.form == kInt4) {
      *bytes = static_cast<uint8_t>(bits[0] | bits[1] << 4);
    } else {
      bytes[0] = static_cast<uint8_t>(bits[0]);
      bytes[1] = static_cast<uint8_t>(bits[1]);
    }
  }
}

// A warp takes the key or the value of a token and head.
template <class T>
__global__ void __launch_bounds__(256) AppendNarrowKernel(const __grid_constant__ Args args) {
  begin_append();
  if (args.packed_tokens && !args.lone_tokens) note_pieces(args, blockIdx.x * 256 + threadIdx.x, gridDim.x * 256);
  if (!args.append) return;
  const int64_t rows = static_cast<int64_t>(args.batch) * args.tokens * args.kv_heads * 2;
#pragma unroll 1
  for (int64_t row = blockIdx.x * 8 + threadIdx.x / 32; row < rows; row += gridDim.x * 8) {
    const bool value = row % 2 != 0;
    const int64_t of_batch = row / 2 / args.kv_heads;
    const int head = static_cast<int>(row / 2 - of_batch * args.kv_heads);
    const int index = static_cast<int>(of_batch / args.tokens), token = static_cast<int>(of_batch % args.tokens);
    const Request request = args.packed_tokens ? piece(args, index) : request_of(args, index);
    if (token >= request.tokens) continue;
    const int position = request.position + token;
    const Strides& strides = value ? args.new_value_strides : args.new_key_strides;
    const Scales& scales = value ? args.value_scales : args.key_scales;
    const int64_t at = cache_row(args, value ? args.value_strides : args.key_strides, request, head, position);
    if (at < 0) continue;
    const T* const from = static_cast<const T*>(value ? args.new_value : args.new_key) + request.origin * strides.batch +
                          head * strides.head + token * strides.token;
    append_row(args, scales, head, from, value ? args.value_width : args.key_width, !value && args.rotary_half > 0, position,
               value ? args.value_cache_out : args.key_cache_out, at, cache_row(args, scales.strides, request, head, position));
  }
}

template <class T>
int launch(const Args& args, cudaStream_t stream) {
  const int64_t rows =
      args.append ? static_cast<int64_t>(args.batch) * args.tokens * args.kv_heads * 2 : ceil_div(args.batch, 32);
  const dim3 ctas(static_cast<unsigned>(rows < 8192 ? (rows + 7) / 8 : 1024));
  return launch_dependently<AppendNarrowKernel<T>>(ctas, 256, stream, args);
}

}  // namespace

int launch_append_narrow(const Args& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch<decltype(type)>(args, on); });
}

}  // namespace leanfleet::lean_attention
