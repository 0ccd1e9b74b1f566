// The cost model behind `auto` on CUDA: what each algorithm takes, and the one that takes least. Pure; tested on the CPU.
#pragma once

#include <cstdint>

#include "causal_linear_decay/causal_linear_decay.h"
#include "core/op_specs.h"

namespace leanfleet {

// What the model knows of a call.
struct DecayShape {
  int64_t requests, heads, kv_heads, tokens, key_width, value_width;  // tokens: of one request, on average
  int64_t element;                                                    // bytes of T
  int sm_count;
};

inline DecayShape shape_of(const DecayInputs& in, int sm_count) {
  const int64_t requests = in.requests > 0 ? in.requests : 1;
  return {requests, in.heads, in.kv_heads, (in.batch * in.tokens + requests - 1) / requests, in.key_width, in.value_width,
          in.dtype == 0 ? 4 : 2, sm_count};
}

inline int64_t next_power_of_two(int64_t x) {
  int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

// Microseconds. Constants were fitted on an H200; see bench/LOG.md.
inline double dot_product_microseconds(const DecayShape& s) {
  const double group = double(s.heads) / double(s.kv_heads), quads = s.key_width > 256 ? 4 : 2;
  const double lanes = double(next_power_of_two((s.key_width + 4 * int64_t(quads) - 1) / (4 * int64_t(quads))));
  const double warp_columns = 32.0 / lanes * 4.0;
  const double warps = double(s.requests * s.kv_heads) * double(int64_t((double(s.value_width) + warp_columns - 1.0) / warp_columns));
  const double instructions = 30.0 + 16.0 * quads + group * (16.0 * quads + 16.0);  // of a warp, a token
  const double schedulers = 4.0 * s.sm_count;
  const double in_turn = warps <= schedulers ? 1.0 : warps / schedulers;
  const double issue = instructions * in_turn, latency = 150.0 + group * 30.0;  // cycles a token
  return 3.0 + double(s.tokens) * (issue > latency ? issue : latency) / 1700.0;
}

inline double fleet_microseconds(const DecayShape& s) {
  const double group = double(s.heads) / double(s.kv_heads);
  const double ranks = double((s.key_width + 15) / 16);
  const double warps = double(s.requests * s.kv_heads * ((s.value_width + 31) / 32)) * ranks;
  const double instructions = 30.0 + group * 28.0, schedulers = 4.0 * s.sm_count;
  const double issue = instructions * (warps <= schedulers ? 1.0 : warps / schedulers), latency = 80.0 + group * 20.0;
  return 3.0 + double(s.tokens) * (issue > latency ? issue : latency) / 1700.0;
}

inline double lightning_microseconds(const DecayShape& s) {
  const double rows = double(s.requests * s.tokens), heads = double(s.heads), kv = double(s.kv_heads);
  const double bytes = rows * double(s.element) * (heads * double(s.key_width + s.value_width) +
                                                   kv * double(s.key_width + s.value_width));
  const double chunks = double((s.tokens + 63) / 64);
  const double blocks = double(s.requests) * heads * double((s.value_width + 63) / 64);
  const double side_by_side = blocks >= s.sm_count ? blocks / s.sm_count : 1.0;
  const double segments = blocks >= s.sm_count / 2 ? 1.0 : s.sm_count / blocks < chunks ? s.sm_count / blocks : chunks;
  const double chunk = s.element == 4 ? 6.0 : 2.0;
  const double compute = chunks / segments * chunk * side_by_side * (segments > 1.0 ? 1.6 : 1.0);
  const double memory = 1.3 * bytes / 4.0e6;
  return 8.0 + (compute > memory ? compute : memory);
}

// causal_linear_decay::Algorithm of the kernel to run.
inline int fastest_algorithm(const DecayInputs& in, bool normalize, int sm_count) {
  const DecayShape shape = shape_of(in, sm_count);
  const bool wide = normalize && in.key_width > kLightningMaxNormalizedKeyWidth;
  const double lightning = wide ? 1e30 : lightning_microseconds(shape);
  if (in.key_width > kRecurrenceMaxKeyWidth && !wide) return causal_linear_decay::kAlgorithmLightning;
  const double dot = dot_product_microseconds(shape), fleet = fleet_microseconds(shape);
  if (dot <= fleet && dot <= lightning) return causal_linear_decay::kAlgorithmCausalDotProduct;
  return fleet < lightning ? causal_linear_decay::kAlgorithmFleet : causal_linear_decay::kAlgorithmLightning;
}

}  // namespace leanfleet
