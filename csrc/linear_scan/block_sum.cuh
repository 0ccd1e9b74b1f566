// A CTA's sum in a fixed order.
#pragma once

namespace leanfleet {

// The sum of x over a CTA of kThreads threads, a power of two, always in the same order. shared: kThreads elements.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
  __syncthreads();
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

}  // namespace leanfleet
