// Runs CUDA kernels that hold no inline PTX on the host: force-included by g++ into a translated .cu file (build.py). Each
// thread of a CTA is a fiber, which runs until it has to wait for others: at a barrier, or in a warp's exchange. Threads are
// taken in an order that a seed shuffles, another one each round, so that a result which depends on the order shows (a missing
// barrier). A thread that waits for one that has ended, or for ever, ends the launch with cudaErrorLaunchFailure. Global memory
// is the host's. Nothing here is about speed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)

namespace simulated {

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
};

const Place& place();              // of the thread that runs
void* dynamic_shared();            // of its CTA
void block_barrier();              // __syncthreads
int block_votes(bool vote);        // __syncthreads_count
// All lanes of `mask` bring 8 bytes; `all` gets those of the 32 lanes, unspecified for lanes outside of the mask.
void exchange(unsigned mask, uint64_t mine, uint64_t (&all)[32]);
int lane();
void run(dim3 blocks, dim3 threads, size_t shared_bytes, const std::function<void()>& thread);

// What kernel<<<blocks, threads, shared, stream>>> is translated to. Arguments are copied, as a launch does.
template <class... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  return [=](Parameters... arguments) { run(blocks, threads, shared_bytes, [&] { kernel(arguments...); }); };
}

template <class T>
T from_lane(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0, all[32];
  std::memcpy(&bits, &value, sizeof(T));
  exchange(mask, bits, all);
  std::memcpy(&value, &all[source], sizeof(T));
  return value;
}

inline unsigned votes(unsigned mask, bool vote) {
  uint64_t all[32];
  exchange(mask, vote, all);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0 && all[i] != 0) result |= 1u << i;
  return result;
}

}  // namespace simulated

#define threadIdx (simulated::place().thread)
#define blockIdx (simulated::place().block)
#define blockDim (simulated::place().threads)
#define gridDim (simulated::place().blocks)

inline void __syncthreads() { simulated::block_barrier(); }
inline int __syncthreads_count(int vote) { return simulated::block_votes(vote != 0); }
inline int __syncthreads_or(int vote) { return simulated::block_votes(vote != 0) != 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simulated::votes(mask, false); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = simulated::lane() / width * width;
  return simulated::from_lane(mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int other = simulated::lane() ^ bits;
  return simulated::from_lane(mask, value, other / width == simulated::lane() / width ? other : simulated::lane());
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int other = simulated::lane() - static_cast<int>(delta);
  return simulated::from_lane(mask, value, other >= simulated::lane() / width * width ? other : simulated::lane());
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int other = simulated::lane() + static_cast<int>(delta);
  return simulated::from_lane(mask, value, other / width == simulated::lane() / width ? other : simulated::lane());
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0) == mask; }

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
inline void __threadfence() {}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __log2f(float x) { return std::log2(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
#ifndef LEANFLEET_NO_RSQRT
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#endif
