// Numbers of int8 caches for tensor cores: bytes as halves, powers of two that keep others in half's range.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "core/mma.cuh"
#include "lean_attention/lean_attention.h"

namespace leanfleet::lean_attention {

// A power of two at or below x, where that has an inverse.
__device__ __forceinline__ float power_below(float x) {
  return __uint_as_float(__float_as_uint(fminf(fmaxf(x, 0x1p-120f), 0x1p126f)) & 0x7f800000u);
}
__device__ __forceinline__ float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Four biased bytes, b + 128, as two pairs of halves: 0x6400 | x is 1024 + x.
__device__ __forceinline__ uint32_t halves_of(uint32_t biased, uint32_t select) {
  const uint32_t bits = __byte_perm(biased, 0x64646464u, select);
  const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&bits), __floats2half2_rn(1152.0f, 1152.0f));
  return *reinterpret_cast<const uint32_t*>(&x);
}
constexpr uint32_t kBias = 0x80808080u, kLowBytes = 0x4140, kHighBytes = 0x4342;

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// 4 columns of an output, from d on, over the values' scales that are no tokens'.
__device__ __forceinline__ void scale_values(const Scales& scales, int head, int width, int d, float4& o) {
  if (scales.kind == kPerTensor) {
    const float scale = scales.in[0];
    o.x *= scale, o.y *= scale, o.z *= scale, o.w *= scale;
  } else if (scales.kind == kPerChannel) {
    const float* const of_columns = scales.in + static_cast<int64_t>(head) * width + d;
    o.x *= of_columns[0], o.y *= of_columns[1], o.z *= of_columns[2], o.w *= of_columns[3];
  }
}

// Weights times their values' scales are divided by a power of two that leaves them at most this.
constexpr float kMostOverLift = 256.0f;

}  // namespace leanfleet::lean_attention
