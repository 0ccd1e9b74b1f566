// Activations of vectors of the CPU.
#pragma once

#include "core/simd.h"
#include "gated_activation/gated_activation.h"

namespace leanfleet::gated_activation::LEANFLEET_ISA {

template <Kind kind>
inline Vec activated(Vec gate) {
  if constexpr (kind == Kind::kSilu) return gate / (1.0f + exp(-gate));
  if constexpr (kind == Kind::kSigmoid) return sigmoid(gate);
  if constexpr (kind == Kind::kGeluTanh)
    return gate / (1.0f + exp(-kTanhScale * gate * fma(gate * gate, broadcast(kTanhCube), broadcast(1.0f))));
  if constexpr (kind == Kind::kRelu) return select((VecInt)(gate < 0.0f), Vec{}, gate);  // NaN stays
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * kSqrtHalf));
  return result;
}

inline Vec activated(Kind kind, Vec gate) {
  switch (kind) {
    case Kind::kGelu: return activated<Kind::kGelu>(gate);
    case Kind::kGeluTanh: return activated<Kind::kGeluTanh>(gate);
    case Kind::kRelu: return activated<Kind::kRelu>(gate);
    case Kind::kSigmoid: return activated<Kind::kSigmoid>(gate);
    default: return activated<Kind::kSilu>(gate);
  }
}

}  // namespace leanfleet::gated_activation::LEANFLEET_ISA
