// The sum of several arrays, in float32 and in the order of the arrays, so that all who take it get the same bits.
#include "core/simd.h"

namespace leanfleet::sums::LEANFLEET_ISA {

namespace {

template <class T>
void add(const void* const* parts, int num_parts, void* output, int64_t count) {
  T* const out = static_cast<T*>(output);
  const auto sum_at = [&](int64_t i) {
    Vec total = load(static_cast<const T*>(parts[0]) + i);
    for (int p = 1; p < num_parts; ++p) total += load(static_cast<const T*>(parts[p]) + i);
    return total;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, sum_at(i));
  if (i == count) return;
  T rest[kLanes] = {};
  Vec total = {};
  for (int p = 0; p < num_parts; ++p) {
    std::memcpy(rest, static_cast<const T*>(parts[p]) + i, static_cast<size_t>(count - i) * sizeof(T));
    total = p == 0 ? load(rest) : total + load(rest);
  }
  store(rest, total);
  std::memcpy(out + i, rest, static_cast<size_t>(count - i) * sizeof(T));
}

}  // namespace

// dtype: DType of float32, float16 or bfloat16.
void add_parts(const void* const* parts, int num_parts, void* output, int64_t count, int32_t dtype) {
  if (dtype == 0) add<float>(parts, num_parts, output, count);
  if (dtype == 1) add<Half>(parts, num_parts, output, count);
  if (dtype == 2) add<BFloat16>(parts, num_parts, output, count);
}

}  // namespace leanfleet::sums::LEANFLEET_ISA
