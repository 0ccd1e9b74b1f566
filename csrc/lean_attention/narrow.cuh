// Numbers of quantised caches: their bytes as halves for tensor cores and as floats, floats as their bytes; powers of two that
// keep other numbers in half's range. A new form is an edit here, in copy_rows() of narrow.cu where its rows lie in another way,
// and in for_form().
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/mma.cuh"
#include "lean_attention/schedule.h"

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

// Eight int4, 8 added to each, as two words of biased bytes in their order.
__device__ __forceinline__ uint2 biased_bytes(uint32_t nibbles) {
  const uint32_t even = (nibbles & 0x0f0f0f0fu) + 0x78787878u, odd = (nibbles >> 4 & 0x0f0f0f0fu) + 0x78787878u;
  return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// A word of a quantised row's bytes as halves_of() takes it; those of int4 are biased bytes already.
template <CacheForm kForm>
__device__ __forceinline__ uint32_t prepared(uint32_t word) {
  return kForm == kInt8 ? word ^ kBias : word;
}

// The two low or the two high bytes of a prepared word as halves.
template <CacheForm kForm, bool kHigh>
__device__ __forceinline__ uint32_t halves_of(uint32_t word) {
  if constexpr (kForm != kFloat8) {
    return halves_of(word, kHigh ? kHighBytes : kLowBytes);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(kHigh ? word >> 16 : word & 0xffffu)));
    return halves;
#else
    // Half's bias of the exponent is 8 more: the same bits, one further down, are 2^-8 of the number. 0x7f is NaN.
    const uint32_t bytes = __byte_perm(word, 0u, kHigh ? 0x3424 : 0x1404);
    const uint32_t magnitude = bytes >> 1 & 0x3f803f80u, top = (magnitude + 0x00800080u) & 0x40004000u;
    const uint32_t bits = (bytes & 0x80008000u) | magnitude | top | (top - (top >> 14));
    const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&bits), __floats2half2_rn(256.0f, 256.0f));
    return *reinterpret_cast<const uint32_t*>(&x);
#endif
  }
}

// The number at a column of a quantised row.
__device__ __forceinline__ float number_at(CacheForm form, const void* row, int column) {
  const auto* const bytes = static_cast<const uint8_t*>(row);
  if (form == kInt8) return static_cast<float>(static_cast<int8_t>(bytes[column]));
  if (form == kInt4) return static_cast<float>(static_cast<int>(bytes[column / 2] >> (column % 2 * 4) & 15) - 8);
  const uint32_t magnitude = bytes[column] & 0x7f;
  float x = magnitude >= 8 ? __uint_as_float((magnitude << 20) + (120u << 23)) : static_cast<float>(magnitude) * 0x1p-9f;
  if (magnitude == 0x7f) x = __uint_as_float(0x7fc00000u);
  return bytes[column] > 0x7f ? -x : x;
}

// A row's element over its scale, held within the range of the form and rounded to it, half to even, in the low bits; NaN is 0 in
// integers. int4 has 8 added.
__device__ __forceinline__ uint32_t bits_of(CacheForm form, float x) {
  const bool nan = x != x;
  const float low = form == kInt8 ? -128.0f : form == kInt4 ? -8.0f : -448.0f;
  const float held = nan ? 0.0f : fminf(fmaxf(x, low), largest_of(form));
  if (form == kInt8) return static_cast<uint32_t>(static_cast<int>(rintf(held))) & 0xffu;
  if (form == kInt4) return static_cast<uint32_t>(static_cast<int>(rintf(held)) + 8);
  if (nan) return 0x7fu;
  const uint32_t bits = __float_as_uint(held), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  // Below 2^-6 numbers are multiples of 2^-9, which the addition leaves in the low bits.
  if (magnitude < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) & 0xffu);
  return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
}

constexpr float kLeast = 0x1p-100f;  // of a row's largest magnitude: a smaller one counts as 0

// A row's largest magnitude / that of the form; NaN if one is not finite. magnitudes: the largest of each of kLanes lanes side by
// side, which share the row, as bits, whose order is that of the numbers, with NaN last.
template <int kLanes>
__device__ __forceinline__ float own_scale(CacheForm form, unsigned magnitudes, unsigned lanes) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const unsigned other = __shfl_xor_sync(lanes, magnitudes, offset);
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

// body(form), with a form that the compiler knows.
template <class F>
__device__ __forceinline__ void for_form(CacheForm form, F&& body) {
  if (form == kInt8) body(std::integral_constant<CacheForm, kInt8>{});
  else if (form == kFloat8) body(std::integral_constant<CacheForm, kFloat8>{});
  else body(std::integral_constant<CacheForm, kInt4>{});
}

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The numbers of a word of a quantised row, of as many columns, as halves: those of token a and of token b side by side.
template <CacheForm kForm>
constexpr int kNumbersOfWord = kForm == kInt4 ? 8 : 4;
template <CacheForm kForm>
__device__ __forceinline__ void pair_columns(uint32_t a, uint32_t b, uint32_t (&x)[kNumbersOfWord<kForm>]) {
  if constexpr (kForm == kInt4) {
    const __half2 bias = __floats2half2_rn(1032.0f, 1032.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t nibbles = __byte_perm(a, b, i < 4 ? 0x5410 : 0x7632) >> (4 * (i % 4));
      const uint32_t bits = (nibbles & 0x000f000fu) | 0x64006400u;
      const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&bits), bias);
      x[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
    const uint32_t low = prepared<kForm>(__byte_perm(a, b, 0x5140)), high = prepared<kForm>(__byte_perm(a, b, 0x7362));
    x[0] = halves_of<kForm, false>(low), x[1] = halves_of<kForm, true>(low);
    x[2] = halves_of<kForm, false>(high), x[3] = halves_of<kForm, true>(high);
  }
}

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
