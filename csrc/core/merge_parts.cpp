#include "core/merge_parts.h"
#include "core/simd.h"

namespace leanfleet::merge_parts::LEANFLEET_ISA {

namespace {

const float kNothing = -__builtin_inff();

template <class T>
Vec load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T some[kLanes] = {};
  std::memcpy(some, from, static_cast<size_t>(count) * sizeof(T));
  return load(some);
}

template <class T>
void store_some(T* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T some[kLanes];
  store(some, v);
  std::memcpy(to, some, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
void rows_of(const Args& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float largest = kNothing, sum = 0.0f;
    for (int64_t w = 0; w < args.parts; ++w) largest = __builtin_fmaxf(largest, args.partial_lse[w * args.rows + row]);
    bool some = false;
    for (int64_t w = 0; w < args.parts; ++w) {
      const float lse = args.partial_lse[w * args.rows + row];
      if (lse == kNothing) continue;
      some = true;
      sum += __builtin_expf(lse - largest);
    }
    if (some && args.sinks.logits != nullptr) {
      const float sink = args.sinks.logits[row / args.sinks.inner % args.sinks.heads], before = largest;
      largest = __builtin_fmaxf(largest, sink);
      sum = sum * __builtin_expf(before - largest) + __builtin_expf(sink - largest);
    }
    args.lse[row] = some ? largest + __builtin_logf(sum) : kNothing;
    T* const out = static_cast<T*>(args.output) + row * args.width;
    for (int64_t i = 0; i < args.width; i += kLanes) {
      Vec total = {};
      for (int64_t w = 0; w < args.parts; ++w) {
        const float lse = args.partial_lse[w * args.rows + row];
        if (lse == kNothing) continue;  // its output may hold anything
        const T* const part = static_cast<const T*>(args.partial_output) + (w * args.rows + row) * args.width + i;
        total += load_some(part, args.width - i) * broadcast(__builtin_expf(lse - largest) / sum);
      }
      store_some(out + i, total, args.width - i);
    }
  }
}

}  // namespace

// Rows begin .. end.
void merge(const Args& args, int64_t begin, int64_t end) {
  if (args.dtype == 0) rows_of<float>(args, begin, end);
  if (args.dtype == 1) rows_of<Half>(args, begin, end);
  if (args.dtype == 2) rows_of<BFloat16>(args, begin, end);
}

}  // namespace leanfleet::merge_parts::LEANFLEET_ISA
