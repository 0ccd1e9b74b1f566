// What quantised caches are made of, for the CPU kernel: how their bytes become floats, and how floats become bytes. A new form
// is a type with RowOf, load() and to_bytes(), an entry of CacheForm, and one of for_form().
#pragma once

#include <type_traits>

#include "core/simd.h"
#include "lean_attention/schedule.h"

namespace leanfleet::lean_attention::LEANFLEET_ISA {

using leanfleet::load;
using leanfleet::to_float;

struct Float8 {  // e4m3fn: sign, 4 bits of exponent, whose bias is 7, 3 of mantissa; 0x7f and 0xff are NaN
  uint8_t bits;
};
struct Int4 {};  // two a byte, the one of the even column in its low half; they are stored with 8 added

// Two vectors of numbers that lie behind each other come apart into those with an even index and those with an odd one in fewer
// instructions than it takes to load them in their order. Sums over an axis do not mind the order; queries are laid out to match
// by separate(), and join() restores it in an output.
template <class T>
constexpr bool kPairs = false;
#if defined(__AVX2__) || defined(__AVX512F__)
template <>
constexpr bool kPairs<BFloat16> = true;
template <>
constexpr bool kPairs<Int4> = true;
#endif

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

template <class Row>
void load_pair(Row, Vec*, Vec*) {}  // where there are no pairs
inline void load_pair(const BFloat16* p, Vec* even, Vec* odd) {
  VecInt both;
  std::memcpy(&both, p, sizeof both);
  *even = (Vec)(both << 16);
  *odd = (Vec)(both & static_cast<int32_t>(0xffff0000));
}
#if defined(__AVX512F__)
inline void load_pair(Int4Row row, Vec* even, Vec* odd) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.bytes)));
  const __m512i low = _mm512_and_si512(wide, _mm512_set1_epi32(15)), eight = _mm512_set1_epi32(8);
  *even = (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(low, eight));
  *odd = (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(wide, 4), eight));
}
#elif defined(__AVX2__)
inline void load_pair(Int4Row row, Vec* even, Vec* odd) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.bytes)));
  const __m256i low = _mm256_and_si256(wide, _mm256_set1_epi32(15)), eight = _mm256_set1_epi32(8);
  *even = (Vec)_mm256_cvtepi32_ps(_mm256_sub_epi32(low, eight));
  *odd = (Vec)_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(wide, 4), eight));
}
#endif

// x held within low .. high, NaN as it is.
inline Vec held(Vec x, float low, float high) { return select(x < low, broadcast(low), select(x > high, broadcast(high), x)); }

constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, whose low bits are those of the sum

// to_bytes(): the first n lanes, at most all, of rows that were divided by their scale; NaN counts as 0 in integers. to: the first
// byte of them.
inline void to_bytes(int8_t, Vec x, uint8_t* to, int64_t n) {
  const VecInt rounded = (VecInt)(held(select(x == x, x, Vec{}), -128.0f, 127.0f) + kRounding);
  for (int64_t i = 0; i < n && i < kLanes; ++i) to[i] = static_cast<uint8_t>(rounded[i]);
}

// To the nearest, half to even: from 2^-6 on by an addition that carries into the bits that stay, below it, among multiples of
// 2^-9, by one of 2^14.
inline void to_bytes(Float8, Vec x, uint8_t* to, int64_t n) {
  const VecInt bits = (VecInt)held(x, -448.0f, 448.0f), magnitude = bits & 0x7fffffff;
  const VecInt normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const VecInt small = (VecInt)((Vec)magnitude + 16384.0f) & 0xff;
  VecInt byte = (VecInt)select(magnitude < 0x3c800000, (Vec)small, (Vec)normal) | (bits >> 24 & 0x80);
  byte = (VecInt)select(x == x, (Vec)byte, (Vec)(VecInt{} + 0x7f));
  for (int64_t i = 0; i < n && i < kLanes; ++i) to[i] = static_cast<uint8_t>(byte[i]);
}

inline void to_bytes(Int4, Vec x, uint8_t* to, int64_t n) {
  const VecInt rounded = (VecInt)(held(select(x == x, x, Vec{}), -8.0f, 7.0f) + kRounding) + 8;
  for (int64_t i = 0; i < n && i < kLanes; i += 2)
    to[i / 2] = static_cast<uint8_t>((rounded[i] & 15) | (rounded[i + 1] & 15) << 4);
}

// body(an element of the cache's form), of type T where it is not quantised.
template <class T, class F>
void for_form(const Scales& scales, F&& body) {
  if (scales.kind == kNoScale) body(T{});
  else if (scales.form == kInt8) body(int8_t{});
  else if (scales.form == kFloat8) body(Float8{});
  else body(Int4{});
}

}  // namespace leanfleet::lean_attention::LEANFLEET_ISA
