// Launches that may begin while the launch before them in their stream still runs (programmatic dependent launch, CUDA Programming
// Guide): from when that one lets them (let_next_launch_begin), else when it ends, which in a graph gains nothing.
//
// The launch before may itself still wait for the one before it, and so on. So until wait_for_launch_before() a kernel writes nothing,
// and reads nothing that a launch still under way may write. Exempt are weights that the caller promises to be constant, and lines
// that are only brought to the L2 cache. Attention does more: it reads old keys and writes its workspace. It may, since the append
// before it lets it begin only behind the append's own wait, when all launches before have ended.
//
// No CTA ends without waiting: so the launch behind, which waits for this one, has waited for the ones before too.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "core/cuda_target.h"

namespace leanfleet {

__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same for what is read by volatile assembly alone: all else may be moved past it.
__device__ __forceinline__ void wait_for_volatile_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;");
#endif
}

// Lets the launch behind begin, if it may, once all CTAs have come here or ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Allows it for a launch, unless the user has said no. Code for GPUs before 9.0 does not wait, and must not be launched so.
inline void allow_dependent_launch(cudaLaunchConfig_t& config, cudaLaunchAttribute* attributes) {
  config.attrs = attributes;
  if (!dependent_launches()) return;
  attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
}

// Whether code for 9.0 and later was loaded for a kernel on the current device.
template <auto kKernel>
bool may_launch_dependently() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  int version = known[device % kDevices].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) {
      cudaGetLastError();  // the launch will say what is wrong
      return false;
    }
    version = attributes.ptxVersion;
    known[device % kDevices].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}

// Launches a kernel that waits for the launch before it. shared_bytes: dynamic.
template <auto kKernel, class... Given>
cudaError_t launch_dependently_with(size_t shared_bytes, dim3 blocks, unsigned threads, cudaStream_t stream, Given&&... given) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  if (may_launch_dependently<kKernel>()) allow_dependent_launch(config, &attribute);
  const cudaError_t launched = cudaLaunchKernelEx(&config, kKernel, given...);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}
template <auto kKernel, class... Given>
cudaError_t launch_dependently(dim3 blocks, unsigned threads, cudaStream_t stream, Given&&... given) {
  return launch_dependently_with<kKernel>(0, blocks, threads, stream, given...);
}

}  // namespace leanfleet
