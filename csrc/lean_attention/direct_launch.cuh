// The launch of DirectKernel, for the files that compile its instances.
#pragma once

#include "lean_attention/direct_kernel.cuh"

namespace leanfleet::lean_attention {

template <class T, int kWidth, int kBlocks>
int launch_direct_kernel(DirectKernelPointer kernel, const Args& args, DirectCut cut, void* stream) {
  const int bits = cache_bits(args);
  // The attribute belongs to the kernel, which other threads launch too: it is the same for all calls.
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 direct_shared_bytes<T, kWidth, kBlocks>(8 * kBlocks, bits));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};
  config.gridDim = dim3(args.plan.max_ranges);
  config.blockDim = dim3(32 * direct_warps(kWidth, 8 * kBlocks, bits));
  config.dynamicSmemBytes = direct_shared_bytes<T, kWidth, kBlocks>(args.group * args.tokens, bits);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  Args chosen = args;
  int cluster = 1;
  const bool clusters = cut == DirectCut::kClusters || cut == DirectCut::kClustersOfFew;
  if (clusters && args.batch <= kDirectBatch)
    cluster = with_direct_shared<T, kWidth, kBlocks>(bits, [&](auto shared) {
      return choose_cluster<typename decltype(shared)::Of>(reinterpret_cast<const void*>(kernel), chosen.plan, args,
                                                           cut == DirectCut::kClustersOfFew, config);
    });
  DirectLaunch direct = {direct_grid(chosen), chosen};
  direct.grid.cluster = cluster;
  if (args.begins_early) allow_dependent_launch(config, attributes);
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, direct);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}

}  // namespace leanfleet::lean_attention
