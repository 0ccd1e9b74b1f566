// Tensor-core and copy instructions that chunked kernels share: fragments of mma.sync, tiles in shared memory, and
// float32 numbers as sums of three bfloat16 ones.
//
// A tile is kRows rows of 16-bit numbers as lines of 64 columns, 128 bytes, ordered [box of 64 columns][row]; the
// 16-byte chunk c of line n stands at place c ^ (n % 8), the 128-byte swizzle of TMA and of wgmma.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/barrier.cuh"

namespace leanfleet {
namespace tile {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, of which the first `bytes` (0 or 16) are read and the others are 0.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
// For all but the last kGroups that were committed.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ void store_8_bytes(uint32_t to, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void store_16_bytes(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ void store_4_bytes(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_2_bytes(uint32_t to, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}
__device__ __forceinline__ uint4 load_16_bytes(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_4_bytes(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint16_t load_2_bytes(uint32_t from) {
  uint16_t x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c[16x8] += a[16x16] b[16x8]
__device__ __forceinline__ void mma(__half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bytes, exactly: c[16x8] += a[16x32] b[32x8], of int8 or, b where not kSigned, uint8.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kSigned)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as a pair of 16-bit numbers, the first in the low half, and back.
__device__ __forceinline__ uint32_t pack_pair(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_pair(__half, uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ float2 unpack_pair(__nv_bfloat16, uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// 8 numbers of T each.
template <class T>
__device__ __forceinline__ uint4 add_pairs(T, uint4 x, uint4 y) {
  const auto add = [](uint32_t a, uint32_t b) {
    const float2 p = unpack_pair(T{}, a), q = unpack_pair(T{}, b);
    return pack_pair(T{}, p.x + q.x, p.y + q.y);
  };
  return make_uint4(add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w));
}
__device__ __forceinline__ float unpack_one(__half, uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ __forceinline__ float unpack_one(__nv_bfloat16, uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
// Whether one of a pair of 16-bit numbers is an infinity or not a number.
__device__ __forceinline__ bool pair_not_finite(__half, uint32_t pair) {
  return (pair & 0x7c00u) == 0x7c00u || (pair & 0x7c000000u) == 0x7c000000u;
}
__device__ __forceinline__ bool pair_not_finite(__nv_bfloat16, uint32_t pair) {
  return (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u;
}

// How numbers of type T enter tensor cores: as kPlanes numbers of 16 bits whose sum they are. Of three planes the
// products that count are those of planes i and j with i + j < 3.
template <class T>
struct Element {
  using Plane = T;
  static constexpr int kPlanes = 1;
};
template <>
struct Element<float> {
  using Plane = __nv_bfloat16;
  static constexpr int kPlanes = 3;
};

template <class Plane, int kPlanes>
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&planes)[kPlanes]) {
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) {
    planes[p] = pack_pair(Plane{}, low, high);
    if (p + 1 < kPlanes) {
      const float2 taken = unpack_pair(Plane{}, planes[p]);
      low -= taken.x;
      high -= taken.y;
    }
  }
}
template <class Plane, int kPlanes>
__device__ __forceinline__ float2 join_pair(const uint32_t (&planes)[kPlanes]) {
  float2 sum = unpack_pair(Plane{}, planes[kPlanes - 1]);
#pragma unroll
  for (int p = kPlanes - 2; p >= 0; --p) {
    const float2 x = unpack_pair(Plane{}, planes[p]);
    sum.x += x.x;
    sum.y += x.y;
  }
  return sum;
}

// All products of planes that count, smallest first. b: registers of one k-step, [plane]. Tensor cores truncate their
// sums, so that with three planes the products of a step are added up on their own, from 0.
template <class Plane, int kPlanes>
__device__ __forceinline__ void mma_planes(float (&c)[4], const uint32_t (&a)[kPlanes][4], const uint32_t (&b0)[kPlanes],
                                           const uint32_t (&b1)[kPlanes]) {
  if constexpr (kPlanes == 1) {
    mma(Plane{}, c, a[0], b0[0], b1[0]);
  } else {
    float step[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int sum = kPlanes - 1; sum >= 0; --sum)
#pragma unroll
      for (int p = 0; p <= sum; ++p) mma(Plane{}, step, a[p], b0[sum - p], b1[sum - p]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += step[i];
  }
}

// The byte of a 16-byte chunk of a row.
template <int kRows>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return (chunk / 8 * kRows + row) * 128 + ((chunk ^ row) % 8) * 16;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tile
}  // namespace leanfleet
