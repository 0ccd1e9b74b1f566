// In place of the instances of LeanAttention's kernels for 16-bit caches, whose copies are not simulated: calls that would take
// them fail. CTAs that read caches straight into registers are launched without clusters.
#include "lean_attention/direct_narrow.cuh"
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
template <class T, int kWidth, class Cta>
int launch_cta(const Args& args, void* stream) {
  const auto kernel = DirectKernel<T, kWidth, Cta>;
  const int bytes = Cta::shared_bytes(args.group * args.tokens);
  kernel<<<args.plan.max_ranges, kDirectThreads, bytes, static_cast<cudaStream_t>(stream)>>>({direct_grid(args), args});
  return cudaGetLastError();
}
template <class T, int kWidth>
int launch_direct(const Args& args, bool, bool, void* stream) {
  if constexpr (kWidth > 128) return cudaErrorNotSupported;
  else if (has_narrow_cache(args)) return launch_cta<T, kWidth, NarrowDirectCta<T, kWidth>>(args, stream);
  else if (args.rotary_half > 0) return launch_cta<T, kWidth, WideCta<T, kWidth, true>>(args, stream);
  else return launch_cta<T, kWidth, WideCta<T, kWidth, false>>(args, stream);
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
