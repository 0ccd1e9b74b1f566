// Lines in windows of memory that other GPUs write, see peers.h.
#pragma once

#include "core/peers.h"

namespace leanfleet {

__device__ __forceinline__ void write_line(PeerLine* to, uint32_t low, uint32_t high, uint32_t number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(low), "r"(number), "r"(high), "r"(number)
               : "memory");
}

__device__ __forceinline__ PeerLine read_line(const PeerLine* from) {
  PeerLine line;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.low), "=r"(line.low_number), "=r"(line.high), "=r"(line.high_number)
               : "l"(from)
               : "memory");
  return line;
}

// Between two looks at a line.
__device__ __forceinline__ void wait_a_little() {}

}  // namespace leanfleet
