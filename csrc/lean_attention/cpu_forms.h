// What quantised caches are made of, for the CPU kernel: how their bytes become floats, and how floats become bytes. A new form
// is a type with RowOf, load() and to_bytes(), an entry of CacheForm, and one of for_form().
#pragma once

#include <type_traits>

#include "core/narrow_numbers.h"
#include "lean_attention/schedule.h"

namespace leanfleet::lean_attention::LEANFLEET_ISA {

using leanfleet::load;
using leanfleet::to_float;

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
