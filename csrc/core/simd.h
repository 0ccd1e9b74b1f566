// A vector of floats for CPU kernels, as wide as the instruction set that this file is compiled for.
//
// A CPU kernel's source file is compiled once per instruction set (see csrc/CMakeLists.txt) with LEANFLEET_ISA set
// to its name; everything in such a file stands in namespace leanfleet::<operator>::LEANFLEET_ISA, and what is here in
// leanfleet::LEANFLEET_ISA, so that no function compiled for a newer processor can be linked in place of one for an
// older. For the same reason these files use no standard library templates and no header with inline functions outside
// such namespaces (core/op.h has some): what they take is plain structs and pointers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

#ifndef LEANFLEET_ISA
#error "a CPU kernel is compiled through leanfleet_cpu_kernels() in csrc/CMakeLists.txt, which sets LEANFLEET_ISA"
#endif

namespace leanfleet {
inline namespace LEANFLEET_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// GCC and Clang vector extensions: + - * / and comparisons work lane by lane.
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecUint __attribute__((vector_size(4 * kLanes)));  // for sums and shifts that may wrap

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// While it lives, numbers below 2^-126 are 0 in this thread's arithmetic, on processors with SSE. Decays multiply to such,
// and a processor takes a hundred times as long over them as over others.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
#if defined(__SSE__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kFlushOperands); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushResults = 0x8000, kFlushOperands = 0x40;
  unsigned before_;
#else
  FlushSubnormals() {}
#endif
};

inline Vec broadcast(float x) { return x - Vec{}; }  // x - 0 is x even for -0; 0 + x costs an addition

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Stores past the cache to an address that is a multiple of a vector: what is not read again soon need not be fetched
// before it is overwritten. Others see it after finish_streams().
inline void stream(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v);
#endif
}
// Asks for the line of an address, which need not be one of the program's.
inline void prefetch(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(line)));  // GCC drops a loop of __builtin_prefetch
#else
  __builtin_prefetch(line);
#endif
}
inline void finish_streams() {
#if defined(__AVX2__) || defined(__AVX512F__)
  _mm_sfence();
#endif
}
// Whether `bytes` of states at `to`, the results of those at `from`, are to be streamed: they stand elsewhere and are
// more than stays in a cache until the next token.
inline bool streams(const float* from, const float* to, int64_t row_stride, int64_t bytes) {
  return from != to && bytes >= 8 << 20 && reinterpret_cast<uintptr_t>(to) % (4 * kLanes) == 0 && row_stride % kLanes == 0;
}

// a * b + c in one rounding where the processor has it.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec select(VecInt mask, Vec a, Vec b) { return (Vec)(((VecInt)a & mask) | ((VecInt)b & ~mask)); }
inline Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec minimum(Vec a, Vec b) { return select(a < b, a, b); }

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}
inline float maximum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

// 2^n where `shifted` is n + 1.5 * 2^23, for n from -126 to 127; of other n and of NaN some number.
inline Vec power_of_two(Vec shifted) { return (Vec)(((VecUint)shifted << 23) + 0x3f800000); }

// exp(x) for x <= 88, within 2 ulp; 0 below -87. x = n ln2 + r with |r| <= ln2/2, then a degree 6 polynomial in r.
inline Vec exp(Vec x) {
  const VecInt underflow = x < -87.0f;
  x = maximum(minimum(x, broadcast(88.0f)), broadcast(-87.0f));
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(x, broadcast(1.44269504f), broadcast(kRound));
  const Vec n = shifted - kRound;
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = fma(broadcast(1.0f / 720), r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return select(underflow, Vec{}, p * power_of_two(shifted));
}

// 1 / (1 + exp(-x)); 0 below -87, and NaN stays.
inline Vec sigmoid(Vec x) {
  const Vec rest = select((VecInt)(x < -87.0f), Vec{}, x);
  return select((VecInt)(x >= -87.0f), 1.0f / (1.0f + exp(-x)), rest);
}

// e^x for x <= 0, rounded but for a few units in 10 of the last place: an error in γ counts at every token again.
// x = n ln2 + r, |r| <= ln2/2, then a polynomial of degree 7 whose last sum is the only rounding that matters.
inline Vec exp_of_decay(Vec x) {
  const VecInt zero = x < -87.0f;
  x = select(zero, Vec{}, x);
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(x, broadcast(1.44269504f), broadcast(kRound));
  const Vec n = shifted - kRound;
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = fma(broadcast(1.0f / 5040), r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p * r, r, r) + 1.0f;
  return select(zero, Vec{}, p * power_of_two(shifted));
}

inline Vec lane_numbers(int first) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(first + i);
  return v;
}

// Conversions of one value; rounding is to nearest, ties to even.
inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // zero, subnormal: magnitude * 2^-24, exact in float
    value = static_cast<float>(magnitude) * 5.9604645e-8f;
    return sign ? -value : value;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline Half from_float<Half>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded
    float value;
    std::memcpy(&value, &magnitude, 4);
    value += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &value, 4);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}

inline Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline Vec load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}
inline void store(BFloat16* p, Vec v) {
#if defined(__AVX2__) || defined(__AVX512F__)
  const VecInt bits = (VecInt)v, high = bits >> 16;
  const VecInt is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const VecInt rounded = (VecInt)((VecUint)bits + 0x7fff + (VecUint)(high & 1)) >> 16;  // to even; the low half counts
  const VecInt result = (is_nan & (high | 0x40)) | (~is_nan & rounded);
#endif
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)result));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(result & 0xffff);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<BFloat16>(v[i]);
#endif
}
inline void store(Half* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<Half>(v[i]);
#endif
}

// The first n lanes, all if there are more; the others are 0 and nothing behind is read.
template <class T>
inline Vec load_part(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float part[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = to_float(p[i]);
  return load(part);
}

template <class T>
inline void store_part(T* p, Vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  for (int64_t i = 0; i < n; ++i) p[i] = from_float<T>(v[i]);
}

// v becomes its transpose, as a kLanes x kLanes matrix of rows.
__attribute__((always_inline)) inline void transpose(Vec* v) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // b[i + c]: in 128-bit lane l, column 4 l + c of rows i .. i+3
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + 2 + j]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), odd01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    v[c] = (Vec)_mm512_shuffle_f32x4(even01, even23, 0x88);
    v[4 + c] = (Vec)_mm512_shuffle_f32x4(odd01, odd23, 0x88);
    v[8 + c] = (Vec)_mm512_shuffle_f32x4(even01, even23, 0xdd);
    v[12 + c] = (Vec)_mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
#elif defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0xee);
    }
  }
  for (int c = 0; c < 4; ++c) {
    v[c] = (Vec)_mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    v[4 + c] = (Vec)_mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = i + 1; j < kLanes; ++j) {
      const float swapped = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = swapped;
    }
  }
#endif
}

// out[i] = in[i] in the other type, for i < n.
template <class From, class To>
inline void convert(const From* in, To* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
  for (; i < n; ++i) out[i] = from_float<To>(to_float(in[i]));
}

}  // namespace LEANFLEET_ISA
}  // namespace leanfleet
