// Activations of the GPU.
#pragma once

#include "gated_activation/gated_activation.h"

namespace leanfleet::gated_activation {

template <Kind kind>
__device__ __forceinline__ float activated(float gate) {
  if constexpr (kind == Kind::kSilu) return __fdividef(gate, 1.0f + __expf(-gate));
  if constexpr (kind == Kind::kSigmoid) return 1.0f / (1.0f + expf(-gate));  // __expf loses digits far below 0
  if constexpr (kind == Kind::kGelu) return 0.5f * gate * (1.0f + erff(gate * kSqrtHalf));
  if constexpr (kind == Kind::kGeluTanh)
    return __fdividef(gate, 1.0f + __expf(-kTanhScale * gate * (1.0f + kTanhCube * gate * gate)));
  return gate < 0.0f ? 0.0f : gate;  // NaN stays
}

__device__ __forceinline__ float activated(Kind kind, float gate) {
  switch (kind) {
    case Kind::kGelu: return activated<Kind::kGelu>(gate);
    case Kind::kGeluTanh: return activated<Kind::kGeluTanh>(gate);
    case Kind::kRelu: return activated<Kind::kRelu>(gate);
    case Kind::kSigmoid: return activated<Kind::kSigmoid>(gate);
    default: return activated<Kind::kSilu>(gate);
  }
}

}  // namespace leanfleet::gated_activation
