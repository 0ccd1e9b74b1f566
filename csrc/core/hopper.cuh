// Hopper's asynchronous instructions for the chunked scans: barriers in shared memory, TMA, and
// products of a warpgroup (wgmma), whose accumulators are laid out as those of mma.sync, 16 rows a warp.
#pragma once

#include <cuda.h>

#include "core/mma.cuh"

namespace leanfleet {
namespace hopper {

using namespace tile;

// Between ordinary writes to shared memory and their reading by TMA or by wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Asks for a line of the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// Of memory that is only read, and once, or 0; without a branch, so that loads follow each other.
__device__ __forceinline__ float4 load_4_or_zero(const float* from, bool load) {
  float4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
__device__ __forceinline__ float load_or_zero(const float* from, bool load) {
  float x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.f32 %0, [%1];\n}"
               : "=&f"(x)
               : "l"(from), "r"(static_cast<int>(load)));
  return x;
}

// Of shared memory, or 0. A predicate that the compiler does not see through: it would work out the address under it too.
__device__ __forceinline__ uint4 load_16_bytes_if(uint32_t from, uint32_t load) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "r"(from), "r"(load)
      : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_8_bytes_if(uint32_t from, uint32_t load) {
  uint2 x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n@p ld.shared.v2.b32 {%0, %1}, [%2];\n}"
               : "=&r"(x.x), "=&r"(x.y)
               : "r"(from), "r"(load)
               : "memory");
  return x;
}
// The assembler moves a wait for products to the front, but not past an access to memory. This one, to shared memory, is never done,
// and needs x, which is no NaN of all ones.
__device__ __forceinline__ void stay_behind(float x, uint32_t address) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p st.shared.b32 [%1], %0;\n}" ::"r"(__float_as_uint(x)),
               "r"(address)
               : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int column, int token, int head, int batch,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
          "r"(to),
      "l"(map), "r"(column), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
// Asks for a map, a kernel's argument, before the first copy needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of rows by 64 columns of a matrix; policy: how the L2 cache keeps what it reads.
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;
__device__ __forceinline__ void tma_load_rows(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// The same, added to what is there.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, uint32_t from, int column, int token, int head,
                                               int batch) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// A run of bytes, a multiple of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// Until earlier copies out have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Four 8x8 matrices of fragments to shared memory, transposed: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// The shared-memory descriptor of a tile, for wgmma: lines of 128 bytes, swizzled, groups of 8 lines 1024 bytes apart; box_bytes apart the next
// 64 columns, for a tile that is read with its rows as the summed index. This is the low word, to which a distance in
// bytes over 16 may be added; the high word is always the same.
__device__ __forceinline__ uint32_t make_smem_descriptor(uint32_t address, int box_bytes) {
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(box_bytes >> 4) << 16;
}
constexpr int kDescriptorHighWord = 1024 >> 4 | 1 << 30;

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving the use of accumulators to before a wait.
template <int kTiles>
__device__ __forceinline__ void fence_accumulators(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
}

// After a wait: until then products read their left operand, whose registers the compiler might take for something else.
template <int kTiles>
__device__ __forceinline__ void fence_operands(const uint32_t (&a)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(a[n][i]) : "memory");
}

// The same before they are changed.
template <int kTiles>
__device__ __forceinline__ void fence_operands_for_write(uint32_t (&a)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[n][i])::"memory");
}

// The operands of 32, 48, 64, 96 and 128 accumulators, from %0 on, as a text and as a list.
#define LEANFLEET_NAMES_32                                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define LEANFLEET_NAMES_48 \
  LEANFLEET_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LEANFLEET_NAMES_64 \
  LEANFLEET_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LEANFLEET_NAMES_96                                                                       \
  LEANFLEET_NAMES_64                                                                             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LEANFLEET_NAMES_128                                                                              \
  LEANFLEET_NAMES_96                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LEANFLEET_TILE(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define LEANFLEET_TILES_8(c, n)                                                                       \
  LEANFLEET_TILE(c, n), LEANFLEET_TILE(c, n + 1), LEANFLEET_TILE(c, n + 2), LEANFLEET_TILE(c, n + 3), \
      LEANFLEET_TILE(c, n + 4), LEANFLEET_TILE(c, n + 5), LEANFLEET_TILE(c, n + 6), LEANFLEET_TILE(c, n + 7)

// The products of a warpgroup for one type, whose name in PTX is `name`:
//   wgmma_rs          c[64xN] (+)= a[64x16] b[16xN] for N of 64, 96, 128, 192 and 256, a in registers;
//                     kRowsSummed: b's tile has the summed index as rows
//   wgmma_ss          the same for N of 64 and 128 with a a tile too, both tiles with the summed index as columns; and for N of 8
//                     and 16, where kRowsSummed is of a's tile
#define LEANFLEET_WGMMA(type, name)                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_rs(type, float (&c)[8][4], const uint32_t (&a)[4], uint32_t b, int add) {            \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %39};\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" LEANFLEET_NAMES_32                                  \
        "}, "                                                                                                                \
        "{%32, %33, %34, %35}, b, p, 1, 1, %38;\n}"                                                                          \
        : LEANFLEET_TILES_8(c, 0)                                                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kRowsSummed ? 1 : 0), "n"(kDescriptorHighWord)); \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_rs(type, float (&c)[12][4], const uint32_t (&a)[4], uint32_t b, int add) {           \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %53, 0;\nmov.b64 b, {%52, %55};\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n96k16.f32." name "." name " {" LEANFLEET_NAMES_48                                  \
        "}, "                                                                                                                \
        "{%48, %49, %50, %51}, b, p, 1, 1, %54;\n}"                                                                          \
        : LEANFLEET_TILES_8(c, 0), LEANFLEET_TILE(c, 8), LEANFLEET_TILE(c, 9), LEANFLEET_TILE(c, 10), LEANFLEET_TILE(c, 11)  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kRowsSummed ? 1 : 0), "n"(kDescriptorHighWord)); \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_rs(type, float (&c)[16][4], const uint32_t (&a)[4], uint32_t b, int add) {           \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, %71};\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" LEANFLEET_NAMES_64                                 \
        "}, "                                                                                                                \
        "{%64, %65, %66, %67}, b, p, 1, 1, %70;\n}"                                                                          \
        : LEANFLEET_TILES_8(c, 0), LEANFLEET_TILES_8(c, 8)                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kRowsSummed ? 1 : 0), "n"(kDescriptorHighWord)); \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_rs(type, float (&c)[24][4], const uint32_t (&a)[4], uint32_t b, int add) {           \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %101, 0;\nmov.b64 b, {%100, %103};\n"                                \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." name "." name " {" LEANFLEET_NAMES_96                                 \
        "}, "                                                                                                                \
        "{%96, %97, %98, %99}, b, p, 1, 1, %102;\n}"                                                                         \
        : LEANFLEET_TILES_8(c, 0), LEANFLEET_TILES_8(c, 8), LEANFLEET_TILES_8(c, 16)                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kRowsSummed ? 1 : 0), "n"(kDescriptorHighWord)); \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_rs(type, float (&c)[32][4], const uint32_t (&a)[4], uint32_t b, int add) {           \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %133, 0;\nmov.b64 b, {%132, %135};\n"                                \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " {" LEANFLEET_NAMES_128                                \
        "}, "                                                                                                                \
        "{%128, %129, %130, %131}, b, p, 1, 1, %134;\n}"                                                                     \
        : LEANFLEET_TILES_8(c, 0), LEANFLEET_TILES_8(c, 8), LEANFLEET_TILES_8(c, 16), LEANFLEET_TILES_8(c, 24)               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kRowsSummed ? 1 : 0), "n"(kDescriptorHighWord)); \
  }                                                                                                                          \
  __device__ __forceinline__ void wgmma_ss(type, float (&c)[8][4], uint32_t a, uint32_t b, int add) {                        \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" LEANFLEET_NAMES_32                                  \
        "}, "                                                                                                                \
        "a, b, p, 1, 1, 0, 0;\n}"                                                                                            \
        : LEANFLEET_TILES_8(c, 0)                                                                                            \
        : "r"(a), "r"(b), "r"(add), "n"(kDescriptorHighWord));                                                               \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_ss(type, float (&c)[1][4], uint32_t a, uint32_t b, int add) {                        \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %6, 0;\nmov.b64 a, {%4, %7};\nmov.b64 b, {%5, %7};\n"             \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." name "." name " {%0, %1, %2, %3}, a, b, p, 1, 1, %8, 0;\n}"             \
        : LEANFLEET_TILE(c, 0)                                                                                               \
        : "r"(a), "r"(b), "r"(add), "n"(kDescriptorHighWord), "n"(kRowsSummed ? 1 : 0));                                     \
  }                                                                                                                          \
  template <bool kRowsSummed>                                                                                                \
  __device__ __forceinline__ void wgmma_ss(type, float (&c)[2][4], uint32_t a, uint32_t b, int add) {                        \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %10, 0;\nmov.b64 a, {%8, %11};\nmov.b64 b, {%9, %11};\n"          \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name                                                          \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, 1, 1, %12, 0;\n}"                                                       \
        : LEANFLEET_TILE(c, 0), LEANFLEET_TILE(c, 1)                                                                         \
        : "r"(a), "r"(b), "r"(add), "n"(kDescriptorHighWord), "n"(kRowsSummed ? 1 : 0));                                     \
  }                                                                                                                          \
  __device__ __forceinline__ void wgmma_ss(type, float (&c)[16][4], uint32_t a, uint32_t b, int add) {                       \
    asm volatile(                                                                                                            \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\nmov.b64 a, {%64, %67};\nmov.b64 b, {%65, %67};\n"        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" LEANFLEET_NAMES_64                                 \
        "}, "                                                                                                                \
        "a, b, p, 1, 1, 0, 0;\n}"                                                                                            \
        : LEANFLEET_TILES_8(c, 0), LEANFLEET_TILES_8(c, 8)                                                                   \
        : "r"(a), "r"(b), "r"(add), "n"(kDescriptorHighWord));                                                               \
  }

LEANFLEET_WGMMA(__half, "f16")
LEANFLEET_WGMMA(__nv_bfloat16, "bf16")
#undef LEANFLEET_WGMMA
#undef LEANFLEET_TILES_8
#undef LEANFLEET_TILE
#undef LEANFLEET_NAMES_128
#undef LEANFLEET_NAMES_96
#undef LEANFLEET_NAMES_64
#undef LEANFLEET_NAMES_48
#undef LEANFLEET_NAMES_32

}  // namespace hopper
}  // namespace leanfleet
