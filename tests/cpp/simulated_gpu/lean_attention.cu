// In place of the instances of LeanAttention's kernels for 16-bit caches, whose clusters and copies are not simulated: calls that
// would take them fail.
#include "lean_attention/direct_kernel.cuh"
#include "lean_attention/mma_kernel.cuh"
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
int launch_direct(const Args&, bool, bool, void*) {
  return cudaErrorNotSupported;
}

#define LEANFLEET_INSTANCES(T, kWidth)                                                                                   \
  template int launch_mma<T, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, int, void*); \
  template int launch_wgmma<T, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);    \
  template int launch_direct<T, kWidth>(const Args&, bool, bool, void*);
LEANFLEET_INSTANCES(__half, 64)
LEANFLEET_INSTANCES(__half, 128)
LEANFLEET_INSTANCES(__half, 256)
LEANFLEET_INSTANCES(__nv_bfloat16, 64)
LEANFLEET_INSTANCES(__nv_bfloat16, 128)
LEANFLEET_INSTANCES(__nv_bfloat16, 256)
#undef LEANFLEET_INSTANCES

}  // namespace leanfleet::lean_attention
