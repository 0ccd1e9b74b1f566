// Rows of a token as the kernels read them that go token by token: four neighbouring elements a lane.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "gated_delta_rule/gated_delta_rule.h"

namespace leanfleet::gated_delta_rule {

// Four neighbouring elements as they lie in memory.
template <class T>
union Four {
  uint2 bits[sizeof(T) / 2];
  T element[4];
  __device__ Four() {}
};

// Those of a row from `first` on, 0 where there are no more of `count`.
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* row, int first, int count, bool vectors) {
  Four<T> x;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) x.bits[i] = make_uint2(0, 0);
  if (first >= count) return x;
  if (vectors) {
    if constexpr (sizeof(T) == 4) {
      const uint4 bits = __ldg(reinterpret_cast<const uint4*>(row + first));
      x.bits[0] = make_uint2(bits.x, bits.y);
      x.bits[1] = make_uint2(bits.z, bits.w);
    } else {
      x.bits[0] = __ldg(reinterpret_cast<const uint2*>(row + first));
    }
    return x;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (first + i < count) x.element[i] = __ldg(row + first + i);
  return x;
}

template <class T>
__device__ __forceinline__ const T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head,
                                           int64_t token) {
  return static_cast<const T*>(data) + batch * strides.batch + head * strides.head + token * strides.token;
}

__device__ __forceinline__ float row_factor(const Args& args, int64_t batch, int64_t head, int64_t token) {
  return args.row_factors != nullptr ? __ldg(args.row_factors + (batch * args.heads + head) * args.tokens + token) : 1.0f;
}

inline bool aligned(std::initializer_list<const void*> pointers, uintptr_t bytes) {
  for (const void* pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) return false;
  return true;
}

}  // namespace leanfleet::gated_delta_rule
