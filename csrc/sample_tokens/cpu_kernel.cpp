#include "core/simd.h"
#include "sample_tokens/arithmetic.h"
#include "sample_tokens/sample_tokens.h"

namespace leanfleet::sample_tokens::LEANFLEET_ISA {

namespace {

constexpr int64_t kBlock = 1024;  // tokens whose largest value is looked for at once

bool any(VecInt mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

// kLanes values of x, or the `count` that are left; the others are -inf.
template <class E>
Vec load_some(const E* x, int64_t count) {
  if (count >= kLanes) return load(x);
  Vec v = broadcast(exact::minus_infinity());
  for (int64_t i = 0; i < count; ++i) v[i] = to_float(x[i]);
  return v;
}

// What the settings make of the logits of [begin, end), into x.
template <class T>
void change(const exact::Settings& s, const T* logits, float* x, int64_t begin, int64_t end) {
  convert(logits + begin, x + begin, end - begin);
  if (s.bias != nullptr) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) store(x + i, load(x + i) + load(s.bias + i));
    for (; i < end; ++i) x[i] += s.bias[i];
  }
  if (s.allowed != nullptr) {
    for (int64_t word = begin / kWordTokens; word * kWordTokens < end; ++word) {  // pieces begin at whole words
      const auto bits = static_cast<uint32_t>(s.allowed[word]);
      if (bits == 0xffffffffu) continue;
      const int64_t first = word * kWordTokens, last = first + kWordTokens < end ? first + kWordTokens : end;
      for (int64_t i = first; i < last; ++i) x[i] = bits >> (i - first) & 1 ? x[i] : exact::minus_infinity();
    }
  }
  if (s.counts != nullptr) {
    for (int64_t i = begin; i < end; i += kLanes) {
      VecInt counts = {};
      if (i + kLanes <= end) std::memcpy(&counts, s.counts + i, sizeof counts);
      else std::memcpy(&counts, s.counts + i, static_cast<size_t>(end - i) * sizeof(int32_t));
      if (!any(counts > 0)) continue;  // most tokens have not occurred
      // A token that is not allowed stays so: a factor and a finite difference leave -inf.
      for (int64_t k = i; k < end && k < i + kLanes; ++k) x[k] = exact::penalised(s, x[k], s.counts[k]);
    }
  }
}

// The largest of [begin, end), NaN left out; *first: where it first occurs.
template <class E>
float top_of(const E* x, int64_t begin, int64_t end, int64_t* first, bool* has_nan) {
  float top = exact::minus_infinity();
  int64_t block_of_top = begin;
  VecInt nan = {};
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = block + kBlock < end ? block + kBlock : end;
    Vec largest[4];
    for (Vec& v : largest) v = broadcast(exact::minus_infinity());
    int64_t i = block;
    for (; i + 4 * kLanes <= stop; i += 4 * kLanes) {
      for (int k = 0; k < 4; ++k) {
        const Vec v = load(x + i + k * kLanes);
        largest[k] = maximum(v, largest[k]);
        nan |= v != v;
      }
    }
    for (; i < stop; i += kLanes) {
      const Vec v = load_some(x + i, stop - i);
      largest[0] = maximum(v, largest[0]);
      nan |= v != v;
    }
    const float found = maximum(maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3])));
    if (found > top) {
      top = found;
      block_of_top = block;
    }
  }
  *has_nan = any(nan);
  *first = block_of_top;
  while (*first < end && !(to_float(x[*first]) == top)) ++*first;
  return top;
}

// Sum of exp(x - top) of [begin, end), without NaN.
template <class E>
double exp_sum(const E* x, int64_t begin, int64_t end, float top) {
  double total = 0.0;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = block + kBlock < end ? block + kBlock : end;
    Vec sums = {};
    for (int64_t i = block; i < stop; i += kLanes) {
      const Vec v = load_some(x + i, stop - i);
      sums += exp(select(v == top, Vec{}, v - top));
    }
    total += sum(sums);
  }
  return total;
}

Vec exponents_of(Vec x, float top, float scale) { return select(x == top, Vec{}, (x - top) * scale); }

template <class E>
void weigh(const exact::Settings& s, const E* x, float top, int64_t begin, int64_t end, const RowWork& work, int64_t piece) {
  int64_t* const mass = work.mass + piece * kBins;
  uint32_t* const count = work.count + piece * kBins;
  std::memset(mass, 0, sizeof(int64_t) * kBins);
  std::memset(count, 0, sizeof(uint32_t) * kBins);
  const auto least = static_cast<int32_t>(s.least_weight);
  for (int64_t i = begin; i < end; i += kLanes) {
    Vec e = exponents_of(load_some(x + i, end - i), top, s.scale);
    const VecInt valid = e >= exact::kLeastExponent;
    VecInt weights = {};
    if (any(valid)) {
      e = select(valid, e, broadcast(exact::kLeastExponent));
      const Vec shifted = e + exact::kRound, f = e - (shifted - exact::kRound);
      Vec p = f * exact::kPower5 + exact::kPower4;
      p = p * f + exact::kPower3;
      p = p * f + exact::kPower2;
      p = p * f + exact::kPower1;
      p = p * f + 1.0f;
      const Vec power = (Vec)(((VecUint)shifted << 23) + ((127u + exact::kWeightBits) << 23));
      weights = __builtin_convertvector(p * power, VecInt) & valid;
      weights &= weights >= least;
      if (any(weights)) {
        const VecInt bins = __builtin_convertvector(e * -exact::kBinsPerOctave, VecInt);
        for (int lane = 0; lane < kLanes; ++lane) {
          mass[bins[lane]] += weights[lane];
          count[bins[lane]] += weights[lane] > 0;
        }
      }
    }
    if (i + kLanes <= end) std::memcpy(work.weights + i, &weights, sizeof weights);
    else std::memcpy(work.weights + i, &weights, static_cast<size_t>(end - i) * sizeof(int32_t));
  }
}

template <class E>
int64_t collect(const E* x, const RowWork& work, const exact::Settings& s, float top, int32_t bin, int64_t tokens) {
  int64_t found = 0;
  for (int64_t i = 0; i < tokens; i += kLanes) {
    Vec e = exponents_of(load_some(x + i, tokens - i), top, s.scale);
    const VecInt valid = e >= exact::kLeastExponent;
    e = select(valid, e, broadcast(exact::kLeastExponent));
    const VecInt there = (__builtin_convertvector(e * -exact::kBinsPerOctave, VecInt) == bin) & valid;
    if (!any(there)) continue;
    for (int64_t k = i; k < tokens && k < i + kLanes; ++k)
      if (there[k - i] && work.weights[k] > 0)
        work.candidates[found++] = exact::place_of(to_float(x[k]), static_cast<uint32_t>(k));
  }
  return found;
}

template <class T>
void top_places(const T* logits, int64_t tokens, int64_t wanted, uint64_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < tokens; i += kLanes) {
    const Vec v = load_some(logits + i, tokens - i);
    if (found == wanted && !any(v > exact::value_at(places[wanted - 1]))) continue;
    for (int64_t k = i; k < tokens && k < i + kLanes; ++k) {
      const float x = v[k - i];
      const uint64_t place = exact::place_of(x == x ? x : exact::minus_infinity(), static_cast<uint32_t>(k));
      if (found == wanted && place > places[wanted - 1]) continue;
      int64_t at = found < wanted ? found++ : wanted - 1;
      for (; at > 0 && places[at - 1] > place; --at) places[at] = places[at - 1];
      places[at] = place;
    }
  }
}

// Calls f with the row's logits in their type.
template <class F>
auto with_logits(const Args& args, int64_t row, F&& f) {
  const int64_t offset = row * args.vocabulary;
  if (args.dtype == 1) return f(static_cast<const Half*>(args.logits) + offset);
  if (args.dtype == 2) return f(static_cast<const BFloat16*>(args.logits) + offset);
  return f(static_cast<const float*>(args.logits) + offset);
}

}  // namespace

// x, where the settings change the logits, and the largest of [begin, end).
void prepare(const Args& args, const RowWork& work, int64_t row, int64_t piece, int64_t begin, int64_t end) {
  const exact::Settings s = exact::settings_of(args, row);
  Piece& out = work.pieces[piece];
  out = {};
  int64_t first;
  bool has_nan;
  with_logits(args, row, [&](const auto* logits) {
    if (!s.changes() || args.wants_logprob) {
      out.raw_top = top_of(logits, begin, end, &out.first, &out.raw_nan);
      out.top = out.raw_top;
    }
    if (!s.changes()) return;
    change(s, logits, work.x, begin, end);
    out.top = top_of(work.x, begin, end, &first, &has_nan);
    out.first = first;
  });
}

// Weights and their sums by bin, of a row that is drawn from, and the sum for log-probabilities.
void weigh(const Args& args, const RowWork& work, int64_t row, int64_t piece, int64_t begin, int64_t end, float top,
           float raw_top) {
  const exact::Settings s = exact::settings_of(args, row);
  with_logits(args, row, [&](const auto* logits) {
    if (args.wants_logprob) work.pieces[piece].raw_sum = exp_sum(logits, begin, end, raw_top);
    if (s.greedy) return;
    if (s.changes()) weigh(s, work.x, top, begin, end, work, piece);
    else weigh(s, logits, top, begin, end, work, piece);
  });
}

// The places of the tokens of a bin, by index; returns their number.
int64_t collect(const Args& args, const RowWork& work, int64_t row, float top, int32_t bin) {
  const exact::Settings s = exact::settings_of(args, row);
  if (s.changes()) return collect(work.x, work, s, top, bin, args.vocabulary);
  return with_logits(args, row, [&](const auto* x) { return collect(x, work, s, top, bin, args.vocabulary); });
}

// The first num_logprobs places of the logits as they are.
void top_places(const Args& args, int64_t row, uint64_t* places) {
  with_logits(args, row, [&](const auto* x) { top_places(x, args.vocabulary, args.num_logprobs, places); });
}

float logit(const Args& args, int64_t row, int64_t token) {
  return with_logits(args, row, [&](const auto* x) { return to_float(x[token]); });
}

}  // namespace leanfleet::sample_tokens::LEANFLEET_ISA
