// In place of csrc/core/barrier.cuh: barriers by number, and mbarriers as 8 bytes of shared memory.
#pragma once

#include <cstdint>

namespace leanfleet {
namespace tile {

inline void named_barrier(int id, int threads) { simulated::named_barrier(id, threads, true); }
inline bool named_barrier_any(int id, int threads, bool holds) { return simulated::named_barrier(id, threads, true, holds); }
inline void named_barrier_arrive(int id, int threads) { simulated::named_barrier(id, threads, false); }

// pending: arrivals that the phase lacks. bits: twice the bytes that it lacks, and its parity.
struct Mbarrier {
  uint16_t count, pending;
  int32_t bits;
};
inline Mbarrier& mbarrier_at(uint32_t barrier) { return *reinterpret_cast<Mbarrier*>(simulated::from_shared(barrier, 8)); }
inline void mbarrier_settle(Mbarrier& b) {
  simulated::note_progress();
  if (b.pending == 0 && b.bits >> 1 == 0) b.bits ^= 1, b.pending = b.count;
}
inline void mbarrier_init(uint32_t barrier, int count) {
  mbarrier_at(barrier) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
inline void mbarrier_arrive_times(uint32_t barrier, uint32_t times) {
  Mbarrier& b = mbarrier_at(barrier);
  if (b.pending < times) simulated::unsupported();
  b.pending = static_cast<uint16_t>(b.pending - times);
  mbarrier_settle(b);
}
inline void mbarrier_arrive_times_if(uint32_t barrier, uint32_t times) {
  if (times != 0) mbarrier_arrive_times(barrier, times);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_times(barrier, 1); }
inline void mbarrier_expect(uint32_t barrier, int bytes) { mbarrier_at(barrier).bits += 2 * bytes; }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  mbarrier_expect(barrier, static_cast<int>(bytes));
  mbarrier_arrive(barrier);
}
inline void mbarrier_landed(uint32_t barrier, int bytes) {
  mbarrier_expect(barrier, -bytes);
  mbarrier_settle(mbarrier_at(barrier));
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return (static_cast<uint32_t>(mbarrier_at(barrier).bits) & 1) != parity;
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_test(barrier, parity)) simulated::pause();
}

}  // namespace tile
}  // namespace leanfleet
