// What makes a token, in arithmetic that gives the same bits on every processor: additions, multiplications and divisions
// of float32 that are rounded one by one, and integers. export/reference.py and the function body do the same.
#pragma once

#include <cstdint>

#include "core/integers.h"
#include "sample_tokens/sample_tokens.h"

LEANFLEET_HD_NAMESPACE(leanfleet::sample_tokens) {
namespace exact {

#if defined(__CUDA_ARCH__)
LEANFLEET_HD float add(float a, float b) { return __fadd_rn(a, b); }
LEANFLEET_HD float subtract(float a, float b) { return __fsub_rn(a, b); }
LEANFLEET_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
LEANFLEET_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
LEANFLEET_HD uint32_t float_bits(float x) { return __float_as_uint(x); }
LEANFLEET_HD float bits_float(uint32_t x) { return __uint_as_float(x); }
#else
LEANFLEET_HD float add(float a, float b) { return a + b; }
LEANFLEET_HD float subtract(float a, float b) { return a - b; }
LEANFLEET_HD float multiply(float a, float b) { return a * b; }
LEANFLEET_HD float divide(float a, float b) { return a / b; }
LEANFLEET_HD uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
LEANFLEET_HD float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
#endif

LEANFLEET_HD float minus_infinity() { return bits_float(0xff800000u); }
LEANFLEET_HD float not_a_number() { return bits_float(0x7fc00000u); }
LEANFLEET_HD bool finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

// ---- Weights

constexpr int kWeightBits = 30;           // the largest weight is 2^30
constexpr float kLeastExponent = -30.0f;  // of 2: tokens below weigh nothing
constexpr float kBinsPerOctave = 64.0f;
constexpr float kLog2E = 1.44269502f;
// 2^f = 1 + f (k1 + f (k2 + ...)) for |f| <= 1/2, within 2e-7.
constexpr float kPower1 = 0.693147004f, kPower2 = 0.240222424f, kPower3 = 0.0555073395f, kPower4 = 0.00967151392f,
                kPower5 = 0.00132647075f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// log2 of a token's weight as a part of the largest; NaN or below kLeastExponent: it weighs nothing.
LEANFLEET_HD float exponent_of(float x, float top, float scale) { return x == top ? 0.0f : multiply(subtract(x, top), scale); }

// Of an exponent in [kLeastExponent - 1, 0]; it is 0 below kLeastExponent.
LEANFLEET_HD int32_t weight_unchecked(float exponent) {
  const float shifted = add(exponent, kRound);
  const float f = subtract(exponent, subtract(shifted, kRound));
  float p = kPower5;
  p = add(multiply(p, f), kPower4);
  p = add(multiply(p, f), kPower3);
  p = add(multiply(p, f), kPower2);
  p = add(multiply(p, f), kPower1);
  p = add(multiply(p, f), 1.0f);
  // shifted's low bits are the integer; 2^(integer + 30)
  const float power = bits_float((float_bits(shifted) << 23) + ((127u + kWeightBits) << 23));
  return static_cast<int32_t>(multiply(p, power));
}

LEANFLEET_HD int32_t weight_of(float exponent) { return exponent >= kLeastExponent ? weight_unchecked(exponent) : 0; }

// Of an exponent in [kLeastExponent, 0]. Tokens of a lower bin come before those of a higher one.
LEANFLEET_HD int32_t bin_of(float exponent) { return static_cast<int32_t>(multiply(exponent, -kBinsPerOctave)); }

// ---- Order: a token's place, the largest x first, then the lowest index.

LEANFLEET_HD uint32_t descending_key(float x) {
  const uint32_t bits = float_bits(add(x, 0.0f));  // -0 as 0
  return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}
LEANFLEET_HD uint64_t place_of(float x, uint32_t token) { return uint64_t{descending_key(x)} << 32 | token; }
LEANFLEET_HD float value_at(uint64_t place) {
  const auto key = static_cast<uint32_t>(place >> 32);
  return bits_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

// ---- Random numbers

struct Random {
  uint32_t high, low;  // 31 bits each
};

// The first two words of Philox4x32-10.
LEANFLEET_HD Random philox(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0 >> 1, c1 >> 1};
}

// floor(mass * random / 2^62), for mass below 2^62.
LEANFLEET_HD int64_t part_of(int64_t mass, Random random) {
  const int64_t a = mass >> 31, b = mass & 0x7fffffff, c = random.high, d = random.low;
  return a * c + ((a * d + b * c + (b * d >> 31)) >> 31);
}

// floor(mass * part / 2^30), for a part of at most 2^30.
LEANFLEET_HD int64_t fraction_of(int64_t mass, int64_t part) {
  return ((mass >> 31) * part << 1) + ((mass & 0x7fffffff) * part >> 30);
}

// ---- Settings

// A value of [0, 1] in units of 2^-30, rounded up.
LEANFLEET_HD int64_t fixed_point(float x) {
  const float scaled = multiply(x, 1073741824.0f);
  const auto below = static_cast<int64_t>(scaled);
  return below + (static_cast<float>(below) < scaled);
}

constexpr int32_t kInPrompt = 1 << 30;  // in token_counts
constexpr int32_t kMaxCount = kInPrompt - 1;

// A request's settings, with those that mean nothing replaced by ones that do.
struct Settings {
  bool active, greedy;
  float scale;            // log2(e) / temperature
  int64_t least_weight;   // of min_p, at least 1
  int64_t top_k;          // 0: off
  int64_t top_p;          // in units of 2^-30; 0: off
  const int32_t* counts;  // [V]; null: there are no penalties
  float repetition, presence, frequency;
  const float* bias;       // [V]
  const int32_t* allowed;  // [W]
  int64_t count_row;       // -1: none

  LEANFLEET_HD bool changes() const { return counts != nullptr || bias != nullptr || allowed != nullptr; }
};

LEANFLEET_HD Settings settings_of(const leanfleet::sample_tokens::Args& args, int64_t row) {
  Settings s = {};
  s.active = args.active == nullptr || args.active[row] != 0;
  const float temperature = args.temperature != nullptr ? args.temperature[row] : 0.0f;
  s.greedy = !(temperature > 0.0f);
  s.scale = s.greedy ? 0.0f : divide(kLog2E, temperature);
  const float min_p = args.min_p != nullptr ? args.min_p[row] : 0.0f;
  s.least_weight = min_p > 0.0f ? fixed_point(min_p < 1.0f ? min_p : 1.0f) : 1;
  if (s.least_weight < 1) s.least_weight = 1;
  s.top_k = args.top_k != nullptr && args.top_k[row] > 0 ? args.top_k[row] : 0;
  const float top_p = args.top_p != nullptr ? args.top_p[row] : 1.0f;
  s.top_p = top_p < 1.0f ? fixed_point(top_p > 0.0f ? top_p : 0.0f) : 0;
  if (top_p < 1.0f && s.top_p < 1) s.top_p = 1;
  s.count_row = args.token_counts == nullptr ? -1 : args.count_index != nullptr ? args.count_index[row] : row;
  if (s.count_row >= args.count_rows || s.count_row < 0) s.count_row = -1;
  const float repetition = args.repetition_penalty != nullptr ? args.repetition_penalty[row] : 1.0f;
  const float presence = args.presence_penalty != nullptr ? args.presence_penalty[row] : 0.0f;
  const float frequency = args.frequency_penalty != nullptr ? args.frequency_penalty[row] : 0.0f;
  s.repetition = repetition > 0.0f && finite(repetition) ? repetition : 1.0f;
  s.presence = finite(presence) ? presence : 0.0f;
  s.frequency = finite(frequency) ? frequency : 0.0f;
  if (s.count_row >= 0 && (s.repetition != 1.0f || s.presence != 0.0f || s.frequency != 0.0f))
    s.counts = args.token_counts + s.count_row * args.vocabulary;
  if (args.logit_bias != nullptr) s.bias = args.logit_bias + row * args.vocabulary;
  if (args.allowed_tokens != nullptr) s.allowed = args.allowed_tokens + row * args.allowed_words;
  return s;
}

LEANFLEET_HD float penalised(const Settings& s, float x, int32_t count) {
  if (count <= 0) return x;
  x = x < 0.0f ? multiply(x, s.repetition) : divide(x, s.repetition);
  const int32_t n = count & kMaxCount;
  x = subtract(x, multiply(s.frequency, static_cast<float>(n)));
  return n > 0 ? subtract(x, s.presence) : x;
}

// A logit with what the request's settings make of it; may be NaN.
LEANFLEET_HD float changed(const Settings& s, float x, int64_t token) {
  if (s.bias != nullptr) x = add(x, s.bias[token]);
  if (s.allowed != nullptr && (static_cast<uint32_t>(s.allowed[token / 32]) >> (token % 32) & 1u) == 0) return minus_infinity();
  return s.counts != nullptr ? penalised(s, x, s.counts[token]) : x;
}

// A count after its token was chosen once more.
LEANFLEET_HD int32_t counted(int32_t count) {
  if (count < 0) return 1;
  return (count & kMaxCount) < kMaxCount ? count + 1 : count;
}

}  // namespace exact
}  // LEANFLEET_HD_NAMESPACE(leanfleet::sample_tokens)
