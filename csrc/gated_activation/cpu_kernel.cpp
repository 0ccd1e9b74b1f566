#include "core/simd.h"
#include "gated_activation/activated.h"

namespace leanfleet::gated_activation::LEANFLEET_ISA {

namespace {

// A head's columns of a row. skip: null where there is none.
template <class T, Kind kind>
void columns(const T* gate, const T* up, const T* skip, float scale, T* out, int64_t width) {
  const auto values = [scale](const T* up, const T* skip) {
    return skip == nullptr ? load(up) : fma(broadcast(scale), load(skip), load(up));
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    store(out + i, activated<kind>(load(gate + i)) * values(up + i, skip == nullptr ? skip : skip + i));
  if (i == width) return;
  T rest[4][kLanes] = {};
  for (int64_t k = i; k < width; ++k) {
    rest[0][k - i] = gate[k], rest[1][k - i] = up[k];
    if (skip != nullptr) rest[2][k - i] = skip[k];
  }
  store(rest[3], activated<kind>(load(rest[0])) * values(rest[1], skip == nullptr ? skip : rest[2]));
  for (int64_t k = i; k < width; ++k) out[k] = rest[3][k - i];
}

template <class T, Kind kind>
void rows_of(const Args& args, int64_t begin, int64_t end) {
  const int64_t of_head = args.width / args.heads;
  const bool skips = args.skip != nullptr;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t first = head * of_head, at = row * args.width + first;
      columns<T, kind>(static_cast<const T*>(args.gate) + row * args.gate_pitch + first,
                       static_cast<const T*>(args.up) + row * args.up_pitch + first,
                       skips ? static_cast<const T*>(args.skip) + at : nullptr, skips ? args.scales[head] : 0.0f,
                       static_cast<T*>(args.output) + at, of_head);
    }
}

template <class T>
void typed(const Args& args, int64_t begin, int64_t end) {
  switch (args.activation) {
    case Kind::kSilu: return rows_of<T, Kind::kSilu>(args, begin, end);
    case Kind::kGelu: return rows_of<T, Kind::kGelu>(args, begin, end);
    case Kind::kGeluTanh: return rows_of<T, Kind::kGeluTanh>(args, begin, end);
    case Kind::kRelu: return rows_of<T, Kind::kRelu>(args, begin, end);
    case Kind::kSigmoid: return rows_of<T, Kind::kSigmoid>(args, begin, end);
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
