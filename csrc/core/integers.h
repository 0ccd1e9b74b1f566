// Integer arithmetic shared by host code, device code and the CPU kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LEANFLEET_HD __host__ __device__ __forceinline__
#define LEANFLEET_HD_NOINLINE inline __host__ __device__ __noinline__
#else
#define LEANFLEET_HD inline
#define LEANFLEET_HD_NOINLINE inline
#endif
// The namespace `parent`, or in CPU kernels the instruction set's own in it, as core/simd.h explains.
#if defined(LEANFLEET_ISA)
#define LEANFLEET_HD_NAMESPACE(parent) namespace parent::LEANFLEET_ISA
namespace leanfleet {
inline namespace LEANFLEET_ISA {}
}  // namespace leanfleet
#else
#define LEANFLEET_HD_NAMESPACE(parent) namespace parent
#endif

LEANFLEET_HD_NAMESPACE(leanfleet) {

// a / b rounded up, and the next multiple of b: 0 <= a, 0 < b.
template <class A, class B>
LEANFLEET_HD constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
template <class A, class B>
LEANFLEET_HD constexpr auto round_up(A a, B b) {
  return (a + b - 1) / b * b;
}

template <class T>
LEANFLEET_HD T clamp(T x, T low, T high) {
  return x < low ? low : x > high ? high : x;
}

// The offset cu_seqlens[i] of packed requests, held in [0, end]: kernels stay in bounds whatever it says.
template <class I, class T>
LEANFLEET_HD T clamped_offset(const int32_t* cu_seqlens, I i, T end) {
  return clamp<T>(cu_seqlens[i], 0, end);
}

}  // LEANFLEET_HD_NAMESPACE(leanfleet)
