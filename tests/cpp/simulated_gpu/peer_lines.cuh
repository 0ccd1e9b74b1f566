// In place of csrc/core/peer_lines.cuh: the windows are memory that processes share.
#pragma once

#include <unistd.h>

#include <atomic>

#include "core/peers.h"

namespace leanfleet {

inline void write_line(PeerLine* to, uint32_t low, uint32_t high, uint32_t number) {
  const uint64_t mark = static_cast<uint64_t>(number) << 32;
  auto* const halves = reinterpret_cast<std::atomic<uint64_t>*>(to);
  halves[1].store(mark | high, std::memory_order_relaxed);
  halves[0].store(mark | low, std::memory_order_relaxed);
}

inline PeerLine read_line(const PeerLine* from) {
  const auto* const halves = reinterpret_cast<const std::atomic<uint64_t>*>(from);
  const uint64_t low = halves[0].load(std::memory_order_relaxed), high = halves[1].load(std::memory_order_relaxed);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

inline void wait_a_little() {
  simulated::note_progress();  // another process may make it
  static thread_local unsigned calls = 0;
  if (++calls % 64 == 0) usleep(50);  // more ranks than cores: the one that is waited for needs one
  simulated::pause();
}

}  // namespace leanfleet
