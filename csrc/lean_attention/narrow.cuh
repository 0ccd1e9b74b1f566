// Numbers of quantised caches: their bytes as halves for tensor cores and as floats, floats as their bytes; powers of two that
// keep other numbers in half's range. A new form is an edit here, in copy_rows() of narrow.cu and LaneOfRows of mma_kernel.cuh where
// its rows lie in another way, and in for_form().
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

// Two bytes of int8, by kLowBytes or kHighBytes, as a pair of bfloat16. 0x4300 | x is 128 + x for x < 128, and 0x4380, the same with
// the sign's bit, is 256. high: kHighOfBfloat16.
constexpr uint32_t kHighOfBfloat16 = 0x43434343u;
__device__ __forceinline__ uint32_t bfloat16_of(uint32_t word, uint32_t select, uint32_t high) {
  const uint32_t bits = __byte_perm(word, high, select), low = bits & 0xff7fff7fu, sign = bits & 0xff80ff80u;
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(sign), "r"(0xbf80bf80u), "r"(low));  // low - sign
  return pair;
}

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

__device__ __forceinline__ uint32_t bits_of_pair(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

// Four pairs of int4 of a word as halves: nibbles i and i + 4, i from 0 on. Without a shift nibbles 1 and 5 are 16 times as much.
__device__ __forceinline__ void nibble_pairs(uint32_t word, uint32_t (&x)[4]) {
  const auto held = [](uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); };
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t bits = word >> (4 * i);
    x[i] = bits_of_pair(__hsub2(held((bits & 0x000f000fu) | 0x64006400u), __floats2half2_rn(1032.0f, 1032.0f)));
    x[i + 1] = bits_of_pair(__hfma2(held((bits & 0x00f000f0u) | 0x64006400u), __floats2half2_rn(0.0625f, 0.0625f),
                                    __floats2half2_rn(-72.0f, -72.0f)));
  }
}

// The numbers of a word of a quantised row as halves: columns next to each other, or of int4 columns i and i + 4.
template <CacheForm kForm, int kPairs>
__device__ __forceinline__ void row_pairs(uint32_t word, uint32_t (&x)[kPairs]) {
  static_assert(kPairs == (kForm == kInt4 ? 4 : 2));
  if constexpr (kForm == kInt4) {
    nibble_pairs(word, x);
  } else {
    const uint32_t bits = prepared<kForm>(word);
    x[0] = halves_of<kForm, false>(bits), x[1] = halves_of<kForm, true>(bits);
  }
}

// The same words of two rows, a column's number in a and in b side by side.
template <CacheForm kForm, int kColumns>
__device__ __forceinline__ void column_pairs(uint32_t a, uint32_t b, uint32_t (&x)[kColumns]) {
  static_assert(kColumns == (kForm == kInt4 ? 8 : 4));
  if constexpr (kForm == kInt4) {
    uint32_t low[4], high[4];
    nibble_pairs(__byte_perm(a, b, 0x5410), low);
    nibble_pairs(__byte_perm(a, b, 0x7632), high);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = low[i], x[4 + i] = high[i];
  } else {
    uint32_t low[2], high[2];
    row_pairs<kForm>(__byte_perm(a, b, 0x5140), low);
    row_pairs<kForm>(__byte_perm(a, b, 0x7362), high);
    x[0] = low[0], x[1] = low[1], x[2] = high[0], x[3] = high[1];
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

// body(form), with a form that the compiler knows.
template <class F>
__device__ __forceinline__ void for_form(CacheForm form, F&& body) {
  if (form == kInt8) body(std::integral_constant<CacheForm, kInt8>{});
  else if (form == kFloat8) body(std::integral_constant<CacheForm, kFloat8>{});
  else body(std::integral_constant<CacheForm, kInt4>{});
}

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
