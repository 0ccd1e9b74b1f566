#include "core/simd.h"
#include "gated_activation/gated_activation.h"

namespace leanfleet::gated_activation::LEANFLEET_ISA {

namespace {

template <Kind kind>
Vec activated(Vec gate) {
  if constexpr (kind == Kind::kSilu) return gate / (1.0f + exp(-gate));
  if constexpr (kind == Kind::kGeluTanh)
    return gate / (1.0f + exp(-kTanhScale * gate * fma(gate * gate, broadcast(kTanhCube), broadcast(1.0f))));
  if constexpr (kind == Kind::kRelu) return select((VecInt)(gate < 0.0f), Vec{}, gate);  // NaN stays
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * kSqrtHalf));
  return result;
}

template <class T, Kind kind>
void rows_of(const Args& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* const gate = static_cast<const T*>(args.gate) + row * args.pitch;
    const T* const up = static_cast<const T*>(args.up) + row * args.pitch;
    T* const out = static_cast<T*>(args.output) + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(out + i, activated<kind>(load(gate + i)) * load(up + i));
    if (i == width) continue;
    T rest[3][kLanes] = {};
    for (int64_t k = i; k < width; ++k) rest[0][k - i] = gate[k], rest[1][k - i] = up[k];
    store(rest[2], activated<kind>(load(rest[0])) * load(rest[1]));
    for (int64_t k = i; k < width; ++k) out[k] = rest[2][k - i];
  }
}

template <class T>
void typed(const Args& args, int64_t begin, int64_t end) {
  switch (args.activation) {
    case Kind::kSilu: return rows_of<T, Kind::kSilu>(args, begin, end);
    case Kind::kGelu: return rows_of<T, Kind::kGelu>(args, begin, end);
    case Kind::kGeluTanh: return rows_of<T, Kind::kGeluTanh>(args, begin, end);
    case Kind::kRelu: return rows_of<T, Kind::kRelu>(args, begin, end);
  }
}

}  // namespace

// Rows begin .. end.
void activate(const Args& args, int64_t begin, int64_t end) {
  if (args.dtype == 0) typed<float>(args, begin, end);
  if (args.dtype == 1) typed<Half>(args, begin, end);
  if (args.dtype == 2) typed<BFloat16>(args, begin, end);
}

}  // namespace leanfleet::gated_activation::LEANFLEET_ISA
