// Barriers: of all or some warps of a CTA, by number; and mbarriers in shared memory, which also count bytes.
#pragma once

#include <cstdint>

namespace leanfleet {
namespace tile {

// Barrier `id` among `threads` threads of a CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether the predicate holds in any of them.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool holds) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(holds))
               : "memory");
  return any != 0;
}

// Arrives at it without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// mbarriers: arrivals of a phase, and a wait for the phase of this parity to end.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
// Whether the phase of this parity has ended.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  // How long the hardware may let a warp sleep, in nanoseconds. Without it a try ends after some 80 cycles, and warps that wait
  // for long take a twentieth of the slots in which the others issue.
  constexpr uint32_t kSleep = 10'000'000;
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity), "r"(kSleep)
                 : "memory");
  } while (!done);
#else
  while (!mbarrier_test(barrier, parity)) {}
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_times(uint32_t barrier, uint32_t times) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(times) : "memory");
}
// The same, or nothing for 0: without a branch, on which the compiler would stop to mix instructions.
__device__ __forceinline__ void mbarrier_arrive_times_if(uint32_t barrier, uint32_t times) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared.b64 _, [%0], %1;\n}" ::"r"(barrier),
               "r"(times)
               : "memory");
}
}  // namespace tile
}  // namespace leanfleet
