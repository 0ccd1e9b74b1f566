// Numbers of 8 and 4 bits as the floats of simd.h: those of quantised caches and of weights in blocks.
#pragma once

#include "core/simd.h"

namespace leanfleet {
inline namespace LEANFLEET_ISA {

struct Float8 {  // e4m3fn: sign, 4 bits of exponent, whose bias is 7, 3 of mantissa; 0x7f and 0xff are NaN
  uint8_t bits;
};
struct Int4 {};  // two a byte, the one of the even column in its low half; they are stored with 8 added

// A row of numbers: the number at column i is row[i], those from it on are row + i.
template <class T>
struct RowOf {
  using Type = const T*;
  static Type at(const void* begin) { return static_cast<Type>(begin); }
};
struct Int4Row {
  const uint8_t* bytes;
  Int4Row operator+(int64_t i) const { return {bytes + i / 2}; }  // i is even
  int8_t operator[](int64_t i) const { return static_cast<int8_t>((bytes[i / 2] >> (i % 2 * 4) & 15) - 8); }
};
template <>
struct RowOf<Int4> {
  using Type = Int4Row;
  static Type at(const void* begin) { return {static_cast<const uint8_t*>(begin)}; }
};
template <class T>
constexpr int64_t row_bytes(int64_t width) {
  return width * static_cast<int64_t>(sizeof(T));
}
template <>
constexpr int64_t row_bytes<Int4>(int64_t width) {
  return width / 2;
}

inline float to_float(Float8 x) {
  const int32_t magnitude = x.bits & 0x7f;
  float value = static_cast<float>(magnitude) * 0x1p-9f;  // below 2^-6 a multiple of 2^-9
  if (magnitude >= 8) {
    const int32_t bits = (magnitude << 20) + (120 << 23);
    std::memcpy(&value, &bits, 4);
  }
  if (magnitude == 0x7f) value = __builtin_nanf("");
  return x.bits > 0x7f ? -value : value;
}

// As half precision, whose bias is 15, the bits of a number are 2^-8 of it. Where all of these are set it is NaN.
inline Vec load(const Float8* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3f80));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  return (Vec)_mm512_cvtph_ps(_mm256_or_si256(half, nan)) * 256.0f;
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi16(0x3f80));
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
  return (Vec)_mm256_cvtph_ps(_mm_or_si128(half, nan)) * 256.0f;
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline Vec load(Int4Row row) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.bytes)), low = _mm_set1_epi8(15);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(bytes, low), odd));
  return (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(8)));
#elif defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, row.bytes, 4);
  const __m128i bytes = _mm_cvtsi32_si128(four), low = _mm_set1_epi8(15);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(bytes, low), odd));
  return (Vec)_mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(8)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = row[i];
  return v;
#endif
}

}  // namespace LEANFLEET_ISA
}  // namespace leanfleet
