// The cost model behind `auto` on CUDA: what each algorithm takes, and the one that takes least. Pure; tested on the CPU.
#pragma once

#include <cstdint>

#include "causal_linear_decay/causal_linear_decay.h"
#include "core/integers.h"
#include "core/op_specs.h"

namespace leanfleet::causal_linear_decay {

// What the model knows of a call.
struct CallShape {
  int64_t requests, q_heads, k_heads, v_heads, heads, tokens, key_width, value_width;  // tokens: of one request, on average
  int64_t element;                                                                     // bytes of T
  int sm_count;
  bool normalize;
};

inline CallShape shape_of(const Inputs& in, int sm_count, bool normalize = false) {
  const int64_t requests = in.requests > 0 ? in.requests : 1;
  return {requests,     in.q_heads,     in.k_heads,
          in.v_heads,   in.heads,       ceil_div(in.batch * in.tokens, requests),
          in.key_width, in.value_width, in.dtype == 0 ? 4 : 2,
          sm_count,     normalize};
}

// How the recurrence of a call that is not normalised is cut (rows.cu): its units have some columns, and all tokens or, where
// there are few units, a segment of these, which a first pass over all but the last segments makes possible.
struct RecurrenceSplit {
  int columns;  // of a unit
  int segments;
  double time;  // in tokens of a unit that is alone where it runs
};

constexpr int64_t kRecurrenceNarrowWidth = 16;  // of R: a unit is a warp; above it a CTA
constexpr int kRecurrenceNarrowColumns = 64;

// The split that takes least time.
inline RecurrenceSplit recurrence_split(const CallShape& s) {
  constexpr int64_t kMinSegmentTokens = 256, kMaxSegments = 16;
  const bool narrow = s.key_width <= kRecurrenceNarrowWidth;
  const int columns = narrow ? kRecurrenceNarrowColumns : s.key_width <= 32 ? 128 : s.key_width <= 64 ? 64 : 32;
  const int64_t at_once = narrow ? 8 * int64_t(s.sm_count) : s.sm_count;
  const int64_t blocks = s.requests * ceil_div(s.value_width, columns);
  const auto deep = [&](int64_t units) {
    const double each = double(ceil_div(units, at_once));
    return each > 1.0 && s.key_width <= 128 ? 0.85 * each : each;  // two CTAs an SM hide some of each other's waiting
  };
  RecurrenceSplit best = {columns, 1, deep(blocks * s.heads) * double(s.tokens)};
  for (int64_t n = 2; n <= kMaxSegments && n <= s.tokens / kMinSegmentTokens; ++n) {
    const double passes = deep(blocks * s.heads * n) + 0.55 * deep(blocks * s.v_heads * (n - 1));
    const double time = passes * double(s.tokens) / double(n) + 60.0 + 3.0 * double(n);
    if (time < best.time) best = {columns, int(n), time};
  }
  return best;
}

// Microseconds, fitted to the shapes of bench/results/linear_attention_auto_h200.json. The recurrences of calls that are not
// normalised share their kernels: decode.cu for few tokens, rows.cu for many.
inline double recurrence_microseconds(const CallShape& s) {
  const double group = double(s.heads) / double(s.v_heads), tokens = double(s.tokens);
  if (s.tokens <= 16) {
    const int64_t threads = (s.key_width + 31) / 32 * 32, most = s.tokens == 1 ? 1024 : 768;
    const int64_t at_once = threads <= 128 ? most / (threads > 0 ? threads : 32) : threads <= 512 ? 512 / threads : 1;
    const double ctas = double(s.requests) * double(s.v_heads) * double((s.value_width + 31) / 32);
    const double waves = ctas / (double(s.sm_count) * double(at_once)), more = waves > 1.0 ? waves - 1.0 : 0.0;
    if (s.tokens == 1) return (4.6 + 0.88 * group) * (1.0 + 1.5 * more);
    const double token = s.key_width > 64 && s.key_width <= 128 ? 0.15 : 0.21;
    return (6.15 + token * tokens * (1.0 + 2.94 * group)) * (1.0 + 0.59 * more);
  }
  const double begin = s.key_width <= 8                        ? 8.0
                       : s.key_width <= kRecurrenceNarrowWidth ? 14.5
                       : s.key_width <= 128                    ? 15.5
                       : s.key_width <= 256                    ? 19.5
                                                               : 24.0;
  const double token = s.key_width <= 8                        ? 0.105
                       : s.key_width <= kRecurrenceNarrowWidth ? 0.132
                       : s.key_width <= 128                    ? 0.087
                       : s.key_width <= 256                    ? 0.158
                                                               : 0.33;
  return begin + token * recurrence_split(s).time;
}

// What the chunked kernels take, fitted in the same way: in microseconds, before they begin; what a CTA costs that has to
// wait for its turn; a chunk of 64 tokens, and what its keys of 128 add; how much longer a walk over segments takes; parts of
// the keys that are scanned one after the other (in 16 bits on mma.sync they are in the costs), each with its share of `begin`.
struct ChunkCosts {
  double begin, cta, chunk, chunk_keys, segments;
  int64_t parts = 1;
};
inline ChunkCosts chunk_costs(const CallShape& s) {
  if (s.element == 4) {
    if (s.key_width > 128) {
      const int64_t parts = (s.key_width + 255) / 256;
      return {24.3 * double(parts), 0.0, 45.2, 0.0, 1.85, parts};
    }
    if (s.key_width % 4 != 0 || s.value_width % 4 != 0) return {19.4, 0.0, 11.5, 12.4, 1.85};  // mma.sync
    const double narrow = s.value_width <= 64 ? 0.72 : 1.0;
    return {22.3, 6.95, 6.02 * narrow, 8.02 * narrow, 1.5};
  }
  const bool odd_rows = s.key_width % 8 != 0 || s.value_width % 8 != 0;                       // no multiple of 16 bytes
  if (s.key_width > 128 && (s.normalize || odd_rows)) return {47.2, 15.1, 8.85, 3.14, 1.48};  // mma.sync
  if (odd_rows) return {29.4, 0.0, 4.62, 24.4, 1.98};
  if (s.key_width > 128) {
    const int64_t parts = (s.key_width + 127) / 128;
    return {16.7 * double(parts), 8.11, 0.452, 0.782, 1.79, parts};
  }
  return {17.6, 5.81, 0.77, 1.29, 1.71};
}

inline double lightning_microseconds(const CallShape& shape) {
  CallShape s = shape;
  const ChunkCosts cost = chunk_costs(s);
  s.key_width /= cost.parts;
  const double tokens = double(s.tokens), heads = double(s.heads), sms = s.sm_count;
  const double slices = s.key_width <= 128 && s.value_width <= 64 ? 1.0 : double((s.value_width + 127) / 128);
  const double units = double(s.requests) * heads * slices, chunks = double((s.tokens + 63) / 64);
  double segments = double(int64_t(sms / (units > 1.0 ? units : 1.0)));
  if (segments > double(s.tokens / 512)) segments = double(s.tokens / 512);
  if (segments < 1.0) segments = 1.0;
  const double waves = units * segments / sms > 1.0 ? units * segments / sms : 1.0;
  const double chunk = cost.chunk + cost.chunk_keys * double(s.key_width < 32 ? 32 : s.key_width) / 128.0;
  const double walk = ((waves - 1.0) * cost.cta + double(int64_t(chunks / segments + 0.999999)) * chunk * waves) *
                      (segments > 1.0 ? cost.segments : 1.0);
  const double columns =
      double(s.q_heads + s.k_heads) * double(s.key_width) + double(s.heads + s.v_heads) * double(s.value_width);
  const double bytes = double(s.requests) * tokens * double(s.element) * columns;
  const double memory = 1.2 * bytes / 4.0e6;
  return cost.begin + double(cost.parts) * (walk > memory ? walk : memory);
}

// The Algorithm of the kernel to run.
inline int fastest_algorithm(const Inputs& in, bool normalize, int sm_count) {
  const CallShape shape = shape_of(in, sm_count, normalize);
  const bool wide = normalize && in.key_width > kLightningMaxNormalizedKeyWidth;
  const double lightning = wide ? 1e30 : lightning_microseconds(shape);
  if (in.key_width > kRecurrenceMaxKeyWidth && !wide) return kAlgorithmLightning;
  if (recurrence_microseconds(shape) > lightning) return kAlgorithmLightning;
  return normalize && shape.tokens > 16 ? kAlgorithmFleet : kAlgorithmCausalDotProduct;
}

}  // namespace leanfleet::causal_linear_decay
