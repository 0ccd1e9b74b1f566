// The launch of OneSegmentKernel, for the files that compile its instances.
#pragma once

#include "lean_attention/direct_kernel.cuh"

namespace leanfleet::lean_attention {

template <class T, int kWidth, int kRows, bool kSmall, UnitOf kOf, int kKeys = kOfT, int kValues = kOfT>
int launch_ctas(const Args& args, int parts, cudaStream_t stream) {
  constexpr int kWarps = one_segment_warps(kWidth, kSmall);
  constexpr bool kInCluster = kOf == UnitOf::kCluster;
  const auto kernel = OneSegmentKernel<T, kWidth, kRows, kSmall, kOf, kKeys, kValues>;
  static_assert(one_segment_bytes<T, kWidth, kRows>(kSmall, kInCluster, kRows) <=
                one_segment_shared_bytes(kWidth, kRows, kSmall, kInCluster));
  // The attributes belong to the kernel, which other threads launch too: they are the same for all calls.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           one_segment_bytes<T, kWidth, kRows>(kSmall, kInCluster, kRows));
  if (error == cudaSuccess && kInCluster)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is reported here, not by the next call
    return error;
  }
  const int row_tiles = num_row_tiles(args, kRows), rows = args.group * args.tokens;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  config.gridDim = dim3(static_cast<unsigned>(args.batch * args.kv_heads * row_tiles * parts));
  config.blockDim = dim3(32 * kWarps);
  config.dynamicSmemBytes = one_segment_bytes<T, kWidth, kRows>(kSmall, kInCluster, min32(rows, kRows));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kInCluster ? 1 : 0;
  using Shared = OneSegmentShared<T, kWidth, kRows, kWarps, kInCluster>;
  if (kInCluster && clusters_at_once<Shared>(reinterpret_cast<const void*>(kernel), config) == 0)  // a part of a GPU, say
    return launch_ctas<T, kWidth, kRows, kSmall, UnitOf::kOneCta, kKeys, kValues>(args, 1, stream);
  if (args.begins_early) allow_dependent_launch(config, attributes);
  error = cudaLaunchKernelEx(&config, kernel, OneSegmentLaunch{parts, row_tiles, args});
  if (error != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return error;
}

template <class T, int kWidth, int kRows, bool kSmall, int kKeys = kOfT, int kValues = kOfT>
int launch_parts(const Args& args, cudaStream_t stream) {
  const int parts = args.plan.one_segment;
  if (parts == 1) return launch_ctas<T, kWidth, kRows, kSmall, UnitOf::kOneCta, kKeys, kValues>(args, 1, stream);
  // Of caches of T those are large CTAs.
  if constexpr (kSmall == (kKeys != kOfT))
    if (args.plan.last_merges)
      return launch_ctas<T, kWidth, kRows, kSmall, UnitOf::kAnyCtas, kKeys, kValues>(args, parts, stream);
  return launch_ctas<T, kWidth, kRows, kSmall, UnitOf::kCluster, kKeys, kValues>(args, parts, stream);
}

}  // namespace leanfleet::lean_attention
