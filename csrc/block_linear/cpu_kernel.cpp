// Integers are multiplied as unsigned bytes by signed ones, four columns a lane: of few rows of the input by rows of the weights as
// they stand, of many by panels in which the same four columns of as many outputs as there are lanes stand side by side. With u what
// is multiplied, the weight is u - centre: what that takes off joins the shift, whose factor is the sum of the input's chunk.
#include "block_linear/block_linear.h"
#include "core/integers.h"
#include "core/narrow_numbers.h"

namespace leanfleet::block_linear::LEANFLEET_ISA {

namespace {

constexpr int kColumns = 4 * kLanes;  // of a vector of bytes
constexpr int kFactors = 64;          // chunks whose factors are worked out at once
constexpr int kPadding = 16;          // floats behind them that may be read
constexpr int kFewRows = 4;           // that share a reading of the weights
// Of the product of a panel, as many as registers suffice for.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kPanel = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kPanel = 1;
#else
constexpr int kTileRows = 2, kPanel = 1;
#endif
constexpr int kPanelOutputs = kPanel * kLanes;

Vec to_floats(VecInt x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps((__m512i)x);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps((__m256i)x);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(x[i]);
  return v;
#endif
}

typedef int32_t AnyWord __attribute__((may_alias));

// Sums of products in a lane. kFour: the unsigned bytes are below 16. kVnni: one instruction has them; else those below 16 are added up
// as 16 bits, for up to 8 of kColumns / kLanes columns.
template <bool kFour, bool kVnni>
struct Products {
  static VecInt add(VecInt sums, VecInt u, VecInt x) {
#if defined(__AVX512F__)
    if constexpr (kVnni) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(u), "v"(x));
      return sums;
    } else if constexpr (kFour) {
      return (VecInt)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)u, (__m512i)x));
    } else {
      // Two sums of 16 bits, as one could be beyond them: of u / 2 and of its last bits.
      const __m512i ones = _mm512_set1_epi8(1),
                    half = _mm512_and_si512(_mm512_srli_epi16((__m512i)u, 1), _mm512_set1_epi8(127));
      const __m512i high = _mm512_madd_epi16(_mm512_maddubs_epi16(half, (__m512i)x), _mm512_set1_epi16(2));
      const __m512i low =
          _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_and_si512((__m512i)u, ones), (__m512i)x), _mm512_set1_epi16(1));
      return (VecInt)_mm512_add_epi32((__m512i)sums, _mm512_add_epi32(high, low));
    }
#elif defined(__AVX2__)
    if constexpr (kFour) {
      return (VecInt)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)u, (__m256i)x));
    } else {
      const __m256i ones = _mm256_set1_epi8(1),
                    half = _mm256_and_si256(_mm256_srli_epi16((__m256i)u, 1), _mm256_set1_epi8(127));
      const __m256i high = _mm256_madd_epi16(_mm256_maddubs_epi16(half, (__m256i)x), _mm256_set1_epi16(2));
      const __m256i low =
          _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256((__m256i)u, ones), (__m256i)x), _mm256_set1_epi16(1));
      return (VecInt)_mm256_add_epi32((__m256i)sums, _mm256_add_epi32(high, low));
    }
#else
    uint8_t bytes[kColumns];
    int8_t of_x[kColumns];
    std::memcpy(bytes, &u, sizeof u);
    std::memcpy(of_x, &x, sizeof x);
    for (int i = 0; i < kColumns; ++i) sums[i / 4] += bytes[i] * of_x[i];
    return sums;
#endif
  }

  // The same four columns of x in every lane.
  static VecInt add(VecInt sums, VecInt u, const int8_t* x) {
    const AnyWord* const word = reinterpret_cast<const AnyWord*>(x);
#if defined(__AVX512F__)
    if constexpr (kVnni) {
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(u), "m"(*word));
      return sums;
    }
#endif
    return add(sums, u, *word - VecInt{});
  }

  static VecInt total(VecInt sums) {
#if defined(__AVX512F__)
    if constexpr (kFour && !kVnni) return (VecInt)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    if constexpr (kFour) return (VecInt)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
    return sums;
  }
};

// Rows of weights as unsigned bytes in their order.
template <bool kFour>
struct Weights {
  static constexpr float kCentre = kFour ? 8.0f : 128.0f;
  static constexpr int64_t bytes(int64_t columns) { return kFour ? columns / 2 : columns; }

  // kColumns of them.
  static VecInt load(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (!kFour) return (VecInt)_mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return (VecInt)_mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
#elif defined(__AVX2__)
    if constexpr (!kFour)
      return (VecInt)_mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                                      _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (VecInt)_mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
#else
    uint8_t unsigned_bytes[kColumns];
    for (int i = 0; i < kColumns; ++i)
      unsigned_bytes[i] = kFour ? from[i / 2] >> (i % 2 * 4) & 15 : static_cast<uint8_t>(from[i] ^ 0x80);
    VecInt u;
    std::memcpy(&u, unsigned_bytes, sizeof u);
    return u;
#endif
  }

  // The same of int4 in an order that takes fewer instructions, see separate(); else in theirs.
  static VecInt load_separate(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (kFour) {
      const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      return (VecInt)_mm512_and_si512(_mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)), _mm512_set1_epi8(15));
    }
#elif defined(__AVX2__)
    if constexpr (kFour) {
      const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return (VecInt)_mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_set_epi64x(4, 4, 0, 0)), _mm256_set1_epi8(15));
    }
#endif
    return load(from);
  }

  // Some of them, of which `left` are there; behind them any, for zeros of the input.
  template <bool kSeparate>
  static VecInt load_some(const uint8_t* from, int64_t left) {
    uint8_t part[kColumns] = {};
    if (left < kColumns) {
      for (int64_t i = 0; i < bytes(left); ++i) part[i] = from[i];
      from = part;
    }
    return kSeparate ? load_separate(from) : load(from);
  }
};

// Whether integers of the input stand so that each kColumns of them begin with those of even index, for weights of int4 by rows.
bool are_separate(const Args& args) { return kLanes > 4 && args.form == Form::kInt4 && args.rows <= kFewRows; }

// Brings kColumns integers into that order.
void separate(int8_t* x) {
#if defined(__AVX512F__)
  const __m512i pairs = _mm512_loadu_si512(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtepi16_epi8(pairs));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 32), _mm512_cvtepi16_epi8(_mm512_srli_epi16(pairs, 8)));
#else
  int8_t odd[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) odd[i] = x[2 * i + 1];
  for (int i = 0; i < kColumns / 2; ++i) x[i] = x[2 * i];
  for (int i = 0; i < kColumns / 2; ++i) x[kColumns / 2 + i] = odd[i];
#endif
}

template <class F>
void with_type(int32_t dtype, F&& body) {
  if (dtype == 0) body(float{});
  else if (dtype == 1) body(Half{});
  else body(BFloat16{});
}

// `count` scales or shifts of an output as floats, of chunks from `first` on. none: 0.
void factors_of(const Args& args, const void* from, int32_t dtype, int64_t output, int64_t first, int count, float* to) {
  if (from == nullptr) {
    for (int c = 0; c < count; ++c) to[c] = 0.0f;
    return;
  }
  with_type(dtype, [&](auto type) {
    const auto* const row = static_cast<const decltype(type)*>(from) + output * args.blocks;
    if (args.chunk == args.block) return convert(row + first, to, count);
    for (int c = 0; c < count; ++c) to[c] = to_float(row[(first + c) * args.chunk / args.block]);
  });
}

// The factor of each lane's four columns, of the vector that begins at column k of what `factors` are of.
struct LaneFactors {
  VecInt lanes;
  LaneFactors(int chunk, bool separate) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = (separate ? i % (kLanes / 2) * 8 : i * 4) / chunk;
  }
  Vec at(const float* factors) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)lanes, _mm512_castps128_ps512(_mm_loadu_ps(factors)));
#elif defined(__AVX2__)
    return (Vec)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(factors)), (__m256i)lanes);
#else
    return broadcast(*factors);  // a chunk has as many columns, or more
#endif
  }
};

float bias_of(const Args& args, int64_t output) {
  float bias = 0.0f;
  if (args.bias != nullptr)
    with_type(args.dtype, [&](auto type) { bias = to_float(static_cast<const decltype(type)*>(args.bias)[output]); });
  return bias;
}

void write(const Args& args, int64_t row, int64_t output, Vec values, int64_t count) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    store_part(static_cast<T*>(args.output) + row * args.outputs + output, values, count);
  });
}

// The first n floats, all of a vector if there are more; the others are 0.
inline Vec load_floats(const float* p, int64_t n) {
#if defined(__AVX512F__)
  return n >= kLanes ? load(p) : (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#else
  return load_part(p, n);
#endif
}

// The factors of a row's chunks as they stand, where that is possible, else in `own`.
const float* row_factors(const Args& args, const void* from, int32_t dtype, int64_t output, int64_t first, int count,
                         float* own) {
  if (from != nullptr && dtype == 0 && args.chunk == args.block)
    return static_cast<const float*>(from) + output * args.blocks + first;
  factors_of(args, from, dtype, output, first, count, own);
  return own;
}

// Weights and their factors are read once, and the processor's own prefetching follows them to the end of a page at most: asked for
// kAhead bytes before, they come up to twice as fast to one core.
constexpr int64_t kAhead = 2048, kShortRow = 1024, kFactorLine = 512;
inline void prefetch_all(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(from) + i);
}

// Where the scales or shifts of outputs stand that are asked for ahead.
struct FactorRows {
  const char* from;
  int64_t bytes;  // of one

  FactorRows(const void* all, int32_t dtype, int64_t first)
      : from(static_cast<const char*>(all) + first * (dtype == 0 ? 4 : 2)), bytes(dtype == 0 ? 4 : 2) {}
  const char* at(int64_t i) const { return from + i * bytes; }
};

// kRows rows of the input by kOutputs outputs.
template <bool kFour, bool kVnni, int kRows, int kOutputs>
void dots(const Args& args, int64_t output) {
  using W = Weights<kFour>;
  using P = Products<kFour, kVnni>;
  const int64_t chunks = args.width / args.chunk, row_bytes = W::bytes(args.width);
  const uint8_t* const weights = static_cast<const uint8_t*>(args.weight) + output * row_bytes;
  const LaneFactors lanes(args.chunk, are_separate(args));
  // Short rows are asked for together, as they follow each other, long ones each by itself: what follows its end is in the row
  // that takes its place next.
  const bool short_rows = row_bytes <= kShortRow;
  const int64_t next_row = kAhead + (kOutputs - 1) * row_bytes;
  const FactorRows scales(args.scale, args.scale_dtype, output * args.blocks);
  const FactorRows shifts(args.shift != nullptr ? args.shift : args.scale, args.shift_dtype, output * args.blocks);
  if (short_rows) {
    const int64_t later = kAhead / row_bytes * args.blocks;
    prefetch_all(weights + kAhead, kOutputs * row_bytes);
    prefetch_all(scales.at(later), kOutputs * args.blocks * scales.bytes);
    if (args.shift != nullptr) prefetch_all(shifts.at(later), kOutputs * args.blocks * shifts.bytes);
  }
  Vec sums[kOutputs][kRows] = {};
  for (int64_t first = 0; first < chunks; first += kFactors) {
    const int count = static_cast<int>(chunks - first < kFactors ? chunks - first : kFactors);
    float factors[kOutputs][kRows][kFactors + kPadding];
    for (int n = 0; n < kOutputs; ++n) {
      float own_scales[kFactors], own_shifts[kFactors];
      const float* const scales = row_factors(args, args.scale, args.scale_dtype, output + n, first, count, own_scales);
      const float* const shifts = row_factors(args, args.shift, args.shift_dtype, output + n, first, count, own_shifts);
      for (int c = 0; c < count; c += kLanes) {
        const Vec scale = load_floats(scales + c, count - c);
        const Vec offset = fma(scale, broadcast(-W::kCentre), load_floats(shifts + c, count - c));
        for (int r = 0; r < kRows; ++r) {
          const int64_t at = r * chunks + first + c;
          store(factors[n][r] + c, scale * load_floats(args.steps + at, count - c));
          sums[n][r] = fma(offset, load_floats(args.sums + at, count - c), sums[n][r]);
        }
      }
    }
    const int64_t begin = first * args.chunk, end = begin + static_cast<int64_t>(count) * args.chunk;
    const int step = kColumns / args.chunk, of_chunk = args.chunk / kColumns;  // one of them is 0 where the other is not 1
    int c = 0, part = 0;
    for (int64_t k = begin; k < end; k += kColumns) {
      const int64_t left = args.width - k;
      VecInt x[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) std::memcpy(&x[r], args.rounded + r * args.pitch + k, sizeof x[r]);
#pragma GCC unroll 4
      for (int n = 0; n < kOutputs; ++n) {
        const uint8_t* const from = weights + n * row_bytes + W::bytes(k);
        if (!short_rows && W::bytes(k) % 64 == 0) {
          prefetch(from + (W::bytes(k) < row_bytes - kAhead ? kAhead : next_row));
          if (k % kFactorLine == 0) {
            const int64_t factor = (kOutputs + n) * args.blocks + (first + c) * args.chunk / args.block;
            prefetch(scales.at(factor));
            prefetch(shifts.at(factor));
          }
        }
        const VecInt u = W::template load_some<true>(from, left);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sums[n][r] = fma(to_floats(P::total(P::add(VecInt{}, u, x[r]))), lanes.at(factors[n][r] + c), sums[n][r]);
      }
      if (step > 0) c += step;
      else if (++part == of_chunk) ++c, part = 0;
    }
  }
  for (int r = 0; r < kRows; ++r)
    with_type(args.dtype, [&](auto type) {
      using T = decltype(type);
      T* const to = static_cast<T*>(args.output) + r * args.outputs + output;
      const T* const bias = static_cast<const T*>(args.bias);
      for (int n = 0; n < kOutputs; ++n)
        to[n] = from_float<T>(sum(sums[n][r]) + (args.bias != nullptr ? to_float(bias[output + n]) : 0.0f));
    });
}

// The same by the outputs begin .. end: as many at once as registers suffice for.
template <bool kFour, bool kVnni, int kRows>
void dots_of(const Args& args, int64_t begin, int64_t end) {
  constexpr int kOutputs = kRows <= 2 ? 4 : 2;
  int64_t n = begin;
  for (; n + kOutputs <= end; n += kOutputs) dots<kFour, kVnni, kRows, kOutputs>(args, n);
  for (; n < end; ++n) dots<kFour, kVnni, kRows, 1>(args, n);
}

template <bool kIs>
struct Known {
  static constexpr bool value = kIs;
};

// Calls body(kFour, kVnni), known to the compiler.
template <class F>
void for_integers(const Args& args, F&& body) {
  const bool four = args.form == Form::kInt4;
#if defined(__AVX512F__)
  if (args.integer_products) return four ? body(Known<true>{}, Known<true>{}) : body(Known<false>{}, Known<true>{});
#endif
  four ? body(Known<true>{}, Known<false>{}) : body(Known<false>{}, Known<false>{});
}

// A panel: kPanelOutputs outputs from `output` on, as [columns / 4][kPanel][lane][4] bytes, and their scales and offsets as
// [chunk][kPanel][lane].
struct Panel {
  int32_t* words;
  float *scales, *offsets;
};

int64_t padded_width(const Args& args) { return round_up(args.width, kColumns); }

Panel panel_at(const Args& args, char* scratch) {
  const int64_t bytes = padded_width(args) * kPanelOutputs, factors = args.width / args.chunk * kPanelOutputs;
  float* const scales = reinterpret_cast<float*>(scratch + bytes);
  return {reinterpret_cast<int32_t*>(scratch), scales, scales + factors};
}

template <bool kFour>
void fill(const Args& args, int64_t output, const Panel& panel) {
  using W = Weights<kFour>;
  const int64_t chunks = args.width / args.chunk;
  for (int p = 0; p < kPanel; ++p) {
    const int64_t first = output + p * kLanes;
    for (int64_t k = 0; k < args.width; k += kColumns) {
      Vec v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* const row = static_cast<const uint8_t*>(args.weight) + (first + i) * W::bytes(args.width);
        v[i] = first + i < args.outputs ? (Vec)W::template load_some<false>(row + W::bytes(k), args.width - k) : Vec{};
      }
      transpose(v);
      for (int j = 0; j < kLanes; ++j) std::memcpy(panel.words + ((k / 4 + j) * kPanel + p) * kLanes, &v[j], sizeof v[j]);
    }
    for (int64_t begin = 0; begin < chunks; begin += kFactors) {
      const int count = static_cast<int>(chunks - begin < kFactors ? chunks - begin : kFactors);
      float own[2][kLanes][kFactors];
      const float* rows[2][kLanes];  // of scales and of shifts
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = first + i < args.outputs ? first + i : args.outputs - 1;
        rows[0][i] = row_factors(args, args.scale, args.scale_dtype, row, begin, count, own[0][i]);
        rows[1][i] = row_factors(args, args.shift, args.shift_dtype, row, begin, count, own[1][i]);
      }
      for (int c = 0; c < count; c += kLanes) {
        Vec scales[kLanes], shifts[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          scales[i] = load_floats(rows[0][i] + c, count - c);
          shifts[i] = load_floats(rows[1][i] + c, count - c);
        }
        transpose(scales);
        transpose(shifts);
        for (int j = 0; j < kLanes && c + j < count; ++j) {
          const int64_t at = ((begin + c + j) * kPanel + p) * kLanes;
          store(panel.scales + at, scales[j]);
          store(panel.offsets + at, fma(scales[j], broadcast(-W::kCentre), shifts[j]));
        }
      }
    }
  }
}

// Up to kRows rows from `row` on, before `end`, by a panel's outputs.
template <bool kFour, bool kVnni, int kRows>
void tile(const Args& args, const Panel& panel, int64_t output, int64_t row, int64_t end) {
  using P = Products<kFour, kVnni>;
  const int64_t chunks = args.width / args.chunk;
  const int groups = args.chunk / 4;
  const int8_t* x[kRows];
  const float *steps[kRows], *of_rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = row + r < end ? row + r : end - 1;
    x[r] = args.rounded + at * args.pitch;
    steps[r] = args.steps + at * chunks;
    of_rows[r] = args.sums + at * chunks;
  }
  Vec totals[kRows][kPanel] = {};
  const int32_t* words = panel.words;
  for (int64_t c = 0; c < chunks; ++c) {
    VecInt sums[kRows][kPanel] = {};
    for (int j = 0; j < groups; ++j, words += kPanelOutputs) {
      VecInt u[kPanel];
      std::memcpy(u, words, sizeof u);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < kPanel; ++p) sums[r][p] = P::add(sums[r][p], u[p], x[r] + c * args.chunk + 4 * j);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanel; ++p) {
      const Vec scale = load(panel.scales + (c * kPanel + p) * kLanes),
                offset = load(panel.offsets + (c * kPanel + p) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec product = to_floats(P::total(sums[r][p])) * steps[r][c];
        totals[r][p] = fma(offset, broadcast(of_rows[r][c]), fma(scale, product, totals[r][p]));
      }
    }
  }
  for (int p = 0; p < kPanel; ++p) {
    const int64_t first = output + p * kLanes, left = args.outputs - first;
    if (left <= 0) return;
    Vec bias = {};
    for (int i = 0; i < kLanes && i < left; ++i) bias[i] = bias_of(args, first + i);
    for (int r = 0; r < kRows && row + r < end; ++r) write(args, row + r, first, totals[r][p] + bias, left);
  }
}

// A block of `n` floats, rounded to integers and a step. Where a number is not finite the step is NaN.
struct Rounded {
  float step;
  bool zero;
};
Rounded step_of(const float* x, int64_t n) {
  Vec largest = {}, products = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_part(x + i, n - i);
    largest = maximum(largest, maximum(v, -v));
    products = fma(v, Vec{}, products);  // NaN where there is one, or an infinity
  }
  const float most = maximum(largest), nothing = sum(products);
  if (nothing != nothing) return {nothing, true};
  if (most < kLeastMagnitude) return {0.0f, true};
  return {most / kLargestInteger, false};
}

// q of x = step q, as floats.
Vec integers_of(Vec x, const Rounded& rounded) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return rounded.zero ? Vec{} : (x / rounded.step + kRound) - kRound;
}

// A vector of these as bytes.
void store_bytes(int8_t* to, Vec q) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)q)));
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtps_epi32((__m256)q);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<int8_t>(q[lane]);
#endif
}

// A row of the input as integers. part: room for a block in floats.
template <class T>
void round_row(const Args& args, const T* from, int64_t row, float* part) {
  const int64_t chunks = args.width / args.chunk;
  int8_t* const to = args.rounded + row * args.pitch;
  for (int64_t k = 0; k < args.width; k += args.block) {
    convert(from + k, part, args.block);
    const Rounded rounded = step_of(part, args.block);
    for (int64_t j = 0; j < args.block; j += args.chunk) {
      Vec total = {};
      for (int64_t i = j; i < j + args.chunk; i += kLanes) {
        const Vec q = integers_of(load(part + i), rounded);
        total = total + q;
        store_bytes(to + k + i, q);
      }
      const int64_t c = row * chunks + (k + j) / args.chunk;
      args.steps[c] = rounded.step;
      args.sums[c] = rounded.step * sum(total);
    }
  }
  for (int64_t k = args.width; k < args.pitch; ++k) to[k] = 0;
  if (are_separate(args))
    for (int64_t k = 0; k < args.pitch; k += kColumns) separate(to + k);
}

// A row of the input as floats, rounded if it has to be.
template <class T>
void row_of_floats(const Args& args, const T* from, int64_t row) {
  float* const to = args.floats + row * args.width;
  convert(from, to, args.width);
  if (!args.round_input) return;
  for (int64_t k = 0; k < args.width; k += args.block) {
    const Rounded rounded = step_of(to + k, args.block);
    for (int64_t i = k; i < k + args.block; i += kLanes) {
      const int64_t left = k + args.block - i;
      store_part(to + i, integers_of(load_part(to + i, left), rounded) * rounded.step, left);
    }
  }
}

}  // namespace

int64_t few_rows() { return kFewRows; }
int64_t panel_outputs() { return kPanelOutputs; }
int64_t panel_bytes(const Args& args) {
  return padded_width(args) * kPanelOutputs +
         2 * (args.width / args.chunk) * kPanelOutputs * static_cast<int64_t>(sizeof(float));
}

// A row of the input becomes what the products take. block: room for the floats of one.
void prepare(const Args& args, int64_t row, float* block) {
  with_type(args.dtype, [&](auto type) {
    const auto* const from = static_cast<const decltype(type)*>(args.input) + row * args.width;
    if (args.chunk > 0) round_row(args, from, row, block);
    else row_of_floats(args, from, row);
  });
}

// All rows, up to few_rows(), by the outputs begin .. end.
void multiply_few(const Args& args, int64_t begin, int64_t end) {
  for_integers(args, [&](auto four, auto vnni) {
    constexpr bool kFour = decltype(four)::value, kVnni = decltype(vnni)::value;
    switch (args.rows) {
      case 1: return dots_of<kFour, kVnni, 1>(args, begin, end);
      case 2: return dots_of<kFour, kVnni, 2>(args, begin, end);
      case 3: return dots_of<kFour, kVnni, 3>(args, begin, end);
      default: return dots_of<kFour, kVnni, kFewRows>(args, begin, end);
    }
  });
}

// The rows begin .. end by the panel of outputs from `output` on. scratch: panel_bytes().
void multiply_panel(const Args& args, int64_t output, int64_t begin, int64_t end, char* scratch) {
  const Panel panel = panel_at(args, scratch);
  for_integers(args, [&](auto four, auto vnni) {
    fill<decltype(four)::value>(args, output, panel);
    int64_t row = begin;
    for (; end - row > kTileRows / 2; row += kTileRows)
      tile<decltype(four)::value, decltype(vnni)::value, kTileRows>(args, panel, output, row, end);
    if (row < end) tile<decltype(four)::value, decltype(vnni)::value, kTileRows / 2>(args, panel, output, row, end);
  });
}

// All rows by the outputs begin .. end, in floats. scratch: as many as the width.
void multiply_floats(const Args& args, int64_t begin, int64_t end, float* scratch) {
  const auto in_floats = [&](auto form) {
    using W = decltype(form);
    for (int64_t n = begin; n < end; ++n) {
      const auto weights = RowOf<W>::at(static_cast<const char*>(args.weight) + n * row_bytes<W>(args.width));
      for (int64_t g = 0; g < args.blocks; ++g) {
        float scale = 0.0f, shift = 0.0f;
        with_type(args.scale_dtype,
                  [&](auto s) { scale = to_float(static_cast<const decltype(s)*>(args.scale)[n * args.blocks + g]); });
        if (args.shift != nullptr)
          with_type(args.shift_dtype,
                    [&](auto s) { shift = to_float(static_cast<const decltype(s)*>(args.shift)[n * args.blocks + g]); });
        for (int64_t k = g * args.block; k < (g + 1) * args.block; ++k) scratch[k] = to_float(weights[k]) * scale + shift;
      }
      const float bias = bias_of(args, n);
      for (int64_t row = 0; row < args.rows; ++row) {
        const float* const x = args.floats + row * args.width;
        Vec sums = {};
        for (int64_t k = 0; k < args.width; k += kLanes)
          sums = fma(load_part(x + k, args.width - k), load_part(scratch + k, args.width - k), sums);
        write(args, row, n, broadcast(sum(sums) + bias), 1);
      }
    }
  };
  switch (args.form) {
    case Form::kInt8: return in_floats(int8_t{});
    case Form::kInt4: return in_floats(Int4{});
    case Form::kFloat8: return in_floats(Float8{});
    case Form::kOfT: return with_type(args.dtype, in_floats);
  }
}

}  // namespace leanfleet::block_linear::LEANFLEET_ISA
