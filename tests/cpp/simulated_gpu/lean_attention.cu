// In place of the instances of LeanAttention's kernels for 16-bit caches, whose copies are not simulated: calls that would take
// them fail. CTAs that read caches straight into registers are launched without clusters.
#include "lean_attention/direct_kernel.cuh"
#include "lean_attention/mma_kernel.cuh"
#include "lean_attention/narrow.h"
#include "lean_attention/wgmma_kernel.cuh"

namespace leanfleet::lean_attention {

template <class T, int kWidth>
int launch_mma(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, int, void*) {
  return cudaErrorNotSupported;
}
template <class T, int kWidth>
int launch_wgmma(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*) {
  return cudaErrorNotSupported;
}
template <class T, int kWidth>
int launch_direct(const Args& args, DirectCut cut, void* stream) {
  if constexpr (kWidth > 128) {
    return cudaErrorNotSupported;
  } else {
    const auto kernel = direct_kernel<T, kWidth>(args);
    const int bytes = direct_shared_bytes<T, kWidth>(args.group * args.tokens);
    DirectGrid grid = direct_grid(args);
    grid.whole = cut == DirectCut::kWholeUnits;
    const int ctas = grid.whole ? grid.units : args.plan.max_ranges;
    kernel<<<ctas, kDirectThreads, bytes, static_cast<cudaStream_t>(stream)>>>({grid, args});
    return cudaGetLastError();
  }
}

#define LEANFLEET_INSTANCES(T, kWidth)                                                                                   \
  template int launch_mma<T, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, int, void*); \
  template int launch_wgmma<T, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);    \
  template int launch_direct<T, kWidth>(const Args&, DirectCut, void*);
LEANFLEET_INSTANCES(__half, 64)
LEANFLEET_INSTANCES(__half, 128)
LEANFLEET_INSTANCES(__half, 192)
LEANFLEET_INSTANCES(__half, 256)
LEANFLEET_INSTANCES(__nv_bfloat16, 64)
LEANFLEET_INSTANCES(__nv_bfloat16, 128)
LEANFLEET_INSTANCES(__nv_bfloat16, 192)
LEANFLEET_INSTANCES(__nv_bfloat16, 256)
#undef LEANFLEET_INSTANCES

}  // namespace leanfleet::lean_attention
