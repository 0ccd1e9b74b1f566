// What the parts of a row weigh in merged attention, see merge_parts.h.
#pragma once

#include "core/merge_parts.h"

namespace leanfleet::merge_parts {

constexpr float kNothing = -INFINITY;  // the LSE of a part without keys, whose output may hold anything

struct RowWeights {
  float largest, sum;
  bool some;  // whether any part has keys

  __device__ float of(float lse) const { return expf(lse - largest) / sum; }
  __device__ float lse() const { return some ? largest + logf(sum) : kNothing; }
};

// lse_of(w): of part w. The row's sink counts where there are keys.
template <class F>
__device__ __forceinline__ RowWeights weigh(F&& lse_of, int64_t parts, const Sinks& sinks, int64_t row) {
  RowWeights weights = {kNothing, 0.0f, false};
#pragma unroll
  for (int64_t w = 0; w < parts; ++w) weights.largest = fmaxf(weights.largest, lse_of(w));
#pragma unroll
  for (int64_t w = 0; w < parts; ++w) {
    const float lse = lse_of(w);
    if (lse == kNothing) continue;
    weights.some = true;
    weights.sum += expf(lse - weights.largest);
  }
  if (weights.some && sinks.logits != nullptr) {
    const float sink = sinks.logits[row / sinks.inner % sinks.heads], before = weights.largest;
    weights.largest = fmaxf(weights.largest, sink);
    weights.sum = weights.sum * expf(before - weights.largest) + expf(sink - weights.largest);
  }
  return weights;
}

}  // namespace leanfleet::merge_parts
