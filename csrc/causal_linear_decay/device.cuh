// What the token-by-token CUDA kernels of CausalLinearDecay share.
#pragma once

#include "causal_linear_decay/causal_linear_decay.h"
#include "core/integers.h"

namespace leanfleet::causal_linear_decay {

// x times a decay; what is forgotten completely is 0, also where it was not finite.
__device__ __forceinline__ float times_decay(float x, float decay) { return decay == 0.0f ? 0.0f : x * decay; }

// Of a token of a state's head; 1 where there is none.
__device__ __forceinline__ float beta_of(const Inputs& in, int64_t batch, int64_t head, int64_t token) {
  if (in.beta == nullptr) return 1.0f;
  return __ldg(in.beta + batch * in.decay_strides.batch + head * in.decay_strides.head + token * in.decay_strides.token);
}

// Request q's tokens, begin .. end; none where end is not above begin.
struct RequestTokens {
  int64_t begin, end;
};
__device__ __forceinline__ RequestTokens request_tokens(const Inputs& in, int64_t request) {
  if (in.cu_seqlens == nullptr) return {0, in.tokens};
  return {clamped_offset(in.cu_seqlens, request, in.tokens), clamped_offset(in.cu_seqlens, request + 1, in.tokens)};
}

}  // namespace leanfleet::causal_linear_decay
