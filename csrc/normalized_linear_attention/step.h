// The kernel for one token a call (step.cu).
#pragma once

#include "normalized_linear_attention/normalized_linear_attention.h"

namespace leanfleet::normalized_linear_attention {

constexpr int64_t kStepMaxWidth = 256;  // of D
constexpr int64_t kStepMaxGroup = 8;    // query heads of a key/value head

inline bool step_fits(const Inputs& in) {
  return in.tokens == 1 && in.dim <= kStepMaxWidth && in.heads / in.kv_heads <= kStepMaxGroup && in.value_dim % 4 == 0 &&
         in.batch > 0;
}
int launch_step(const Args& args, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet::normalized_linear_attention
