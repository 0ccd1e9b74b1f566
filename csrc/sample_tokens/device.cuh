// What the kernel asks of a GPU beside arithmetic: memory, barriers, exchange between the threads of a warp and the CTAs of
// a cluster.
#pragma once

#include <cstdint>

namespace leanfleet::sample_tokens {

__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ uint4 sample_tokens_memory[];
  return reinterpret_cast<unsigned char*>(sample_tokens_memory);
}

__device__ __forceinline__ void sync_block() { __syncthreads(); }

// All threads of a row's CTAs. What they wrote, to global memory too, the others see afterwards.
__device__ __forceinline__ void sync_row(int ctas) {
#if __CUDA_ARCH__ >= 900
  if (ctas > 1) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}
template <class T>
__device__ __forceinline__ T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_up(T x, int lanes) {
  return __shfl_up_sync(0xffffffffu, x, static_cast<unsigned>(lanes));
}

__device__ __forceinline__ uint4 load_16_bytes(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

// A value in global memory that another CTA may have written since this one read it: not from this SM's cache.
template <class T>
__device__ __forceinline__ T load_shared_by_ctas(const T* from) {
  return __ldcg(from);
}
__device__ __forceinline__ uint64_t load_shared_by_ctas(const uint64_t* from) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(from));
}

// The word at the same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t load_of_cta(const uint32_t* from, int cta) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(from));
  uint32_t there, word;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(there) : "memory");
  return word;
#else
  static_cast<void>(cta);
  return *from;
#endif
}

// The same for a struct of words.
template <class T>
__device__ __forceinline__ T load_struct_of_cta(const T& from, int cta) {
  static_assert(sizeof(T) % 4 == 0);
  union {
    uint32_t words[sizeof(T) / 4];
    T value;
  } x;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i)
    x.words[i] = load_of_cta(reinterpret_cast<const uint32_t*>(&from) + i, cta);
  return x.value;
}

}  // namespace leanfleet::sample_tokens
