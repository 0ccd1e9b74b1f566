// Sinks of merged attention, see merge_parts.h.
#pragma once

#include "core/merge_parts.h"

namespace leanfleet::merge_parts {

// Adds the sink of a row with keys to the sum of exp(logit - largest).
__device__ __forceinline__ void add_sink(const Sinks& sinks, int64_t row, float& largest, float& sum) {
  if (sinks.logits == nullptr) return;
  const float sink = sinks.logits[row / sinks.inner % sinks.heads], before = largest;
  largest = fmaxf(largest, sink);
  sum = sum * expf(before - largest) + expf(sink - largest);
}

}  // namespace leanfleet::merge_parts
