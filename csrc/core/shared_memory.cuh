// Launches with an amount of shared memory of their own.
#pragma once

#include <cuda_runtime.h>

namespace leanfleet {

// Lets a kernel's launches have all dynamic shared memory that the current device grants beside what the kernel declares,
// `declared` bytes at most. The attribute belongs to the kernel, which other threads launch too: were it what a launch needs,
// another thread could lower it before that launch.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int declared = 0) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - declared);
}

}  // namespace leanfleet
