// In place of the instances of LeanAttention's kernels for 16-bit caches, whose copies are not simulated: calls that would take
// them fail. CTAs that read caches straight into registers are launched without clusters; those with one segment, where a cluster would
// share a unit, have all of it.
#include "lean_attention/direct_kernel.cuh"
#include "lean_attention/mma_kernel.cuh"
#include "lean_attention/narrow.h"
#include "lean_attention/wgmma_kernel.cuh"

namespace leanfleet::lean_attention {

template <class T, int kWidth>
int launch_mma(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, int, void*) {
  return cudaErrorNotSupported;
}

template <class T, int kWidth, bool kConverts, int kValueWidth>
int launch_wgmma(const Args& args, const TileLoads& loads, const CUtensorMap& key_map, const CUtensorMap& value_map,
                 void* stream) {
  if constexpr (!kConverts) return cudaErrorNotSupported;
  else {
    using Tile = WgmmaTile<kWidth, true>;
    const auto kernel = WgmmaKernel<T, kWidth, true, kWidth>;
    kernel<<<args.plan.max_ranges, Tile::kThreads, Tile::shared_bytes(loads.slots), static_cast<cudaStream_t>(stream)>>>(
        args, loads, key_map, value_map);
    return cudaGetLastError();
  }
}
template <class T, int kWidth, int kBlocks>
int launch_direct_kernel(const Args& args, DirectKernelPointer kernel, void* stream) {
  const int bytes = direct_shared_bytes<T, kWidth, kBlocks>(args.group * args.tokens, cache_bits(args));
  const int threads = 32 * direct_warps(kWidth, 8 * kBlocks, cache_bits(args));
  kernel<<<args.plan.max_ranges, threads, bytes, static_cast<cudaStream_t>(stream)>>>({direct_grid(args), args});
  return cudaGetLastError();
}
template <class T, int kWidth, int kBlocks>
int launch_direct(const Args& args, DirectCut, void* stream) {
  return launch_direct_kernel<T, kWidth, kBlocks>(args, direct_kernel<T, kWidth, kBlocks>(args), stream);
}
template <int kWidth, int kBlocks>
int launch_direct_narrow(const Args& args, DirectCut, void* stream) {
  return launch_direct_kernel<EitherHalf, kWidth, kBlocks>(args, direct_narrow_kernel<kWidth, kBlocks>(args), stream);
}

template <class T, int kWidth, int kRows>
int launch_ctas(const Args& args, void (*kernel)(OneSegmentLaunch), void* stream) {
  const bool small = args.plan.small_ctas;
  const int row_tiles = num_row_tiles(args, kRows), threads = 32 * one_segment_warps(kWidth, small);
  const int parts = args.plan.last_merges ? args.plan.one_segment : 1;
  const int bytes = one_segment_bytes<T, kWidth, kRows>(small, false, min32(args.group * args.tokens, kRows));
  kernel<<<args.batch * args.kv_heads * row_tiles * parts, threads, bytes, static_cast<cudaStream_t>(stream)>>>(
      {parts, row_tiles, args});
  return cudaGetLastError();
}
template <class T, int kWidth, int kRows, bool kSmall, int kKeys = kOfT, int kValues = kOfT>
int launch_parts(const Args& args, void* stream) {
  const auto of_any = OneSegmentKernel<T, kWidth, kRows, kSmall, UnitOf::kAnyCtas, kKeys, kValues>;
  const auto of_one = OneSegmentKernel<T, kWidth, kRows, kSmall, UnitOf::kOneCta, kKeys, kValues>;
  const auto kernel = args.plan.last_merges && args.plan.one_segment > 1 ? of_any : of_one;
  return launch_ctas<T, kWidth, kRows>(args, kernel, stream);
}
template <class T, int kWidth, int kRows>
int launch_rows(const Args& args, void* stream) {
  return args.plan.small_ctas ? launch_parts<T, kWidth, kRows, true>(args, stream)
                              : launch_parts<T, kWidth, kRows, false>(args, stream);
}
template <class T>
int launch_one_segment(const Args& args, int width, void* stream) {
  const bool few = args.plan.row_tile == 8;
  if (width == 64) return few ? launch_rows<T, 64, 8>(args, stream) : launch_rows<T, 64, 16>(args, stream);
  if (width == 128) return few ? launch_rows<T, 128, 8>(args, stream) : launch_rows<T, 128, 16>(args, stream);
  return launch_rows<T, 256, 8>(args, stream);
}
template <int kWidth>
int launch_one_segment_narrow(const Args& args, void* stream) {
  return for_direct_forms(args, [&](auto keys, auto values) {
    return launch_parts<EitherHalf, kWidth, 8, true, decltype(keys)::value, decltype(values)::value>(args, stream);
  });
}
template int launch_one_segment<__half>(const Args&, int, void*);
template int launch_one_segment<__nv_bfloat16>(const Args&, int, void*);

#define LEANFLEET_INSTANCES(T, kWidth)                                                                                       \
  template int launch_mma<T, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, int, void*);     \
  template int launch_wgmma<T, kWidth, false, kWidth>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, \
                                                      void*);
template int launch_wgmma<__half, 96, false, 96>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);
template int launch_wgmma<__nv_bfloat16, 96, false, 96>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                        void*);
template int launch_wgmma<__half, 192, false, 128>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                   void*);
template int launch_wgmma<__nv_bfloat16, 192, false, 128>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                          void*);
LEANFLEET_INSTANCES(__half, 64)
LEANFLEET_INSTANCES(__half, 128)
LEANFLEET_INSTANCES(__half, 192)
LEANFLEET_INSTANCES(__half, 256)
LEANFLEET_INSTANCES(__nv_bfloat16, 64)
LEANFLEET_INSTANCES(__nv_bfloat16, 128)
LEANFLEET_INSTANCES(__nv_bfloat16, 192)
LEANFLEET_INSTANCES(__nv_bfloat16, 256)
#undef LEANFLEET_INSTANCES
template int launch_wgmma<__half, 64, true, 64>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);
template int launch_wgmma<__half, 128, true, 128>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);
template int launch_wgmma<__half, 256, true, 256>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&, void*);
template int launch_wgmma<__nv_bfloat16, 64, true, 64>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                       void*);
template int launch_wgmma<__nv_bfloat16, 128, true, 128>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                         void*);
template int launch_wgmma<__nv_bfloat16, 256, true, 256>(const Args&, const TileLoads&, const CUtensorMap&, const CUtensorMap&,
                                                         void*);
template int launch_direct<__half, 64, 1>(const Args&, DirectCut, void*);
template int launch_direct<__half, 64, 2>(const Args&, DirectCut, void*);
template int launch_direct<__half, 128, 1>(const Args&, DirectCut, void*);
template int launch_direct<__half, 128, 2>(const Args&, DirectCut, void*);
template int launch_direct<__half, 256, 1>(const Args&, DirectCut, void*);
template int launch_direct<__nv_bfloat16, 64, 1>(const Args&, DirectCut, void*);
template int launch_direct<__nv_bfloat16, 64, 2>(const Args&, DirectCut, void*);
template int launch_direct<__nv_bfloat16, 128, 1>(const Args&, DirectCut, void*);
template int launch_direct<__nv_bfloat16, 128, 2>(const Args&, DirectCut, void*);
template int launch_direct<__nv_bfloat16, 256, 1>(const Args&, DirectCut, void*);
template int launch_direct_narrow<64, 1>(const Args&, DirectCut, void*);
template int launch_direct_narrow<128, 1>(const Args&, DirectCut, void*);
template int launch_direct_narrow<256, 1>(const Args&, DirectCut, void*);
template int launch_direct_narrow<64, 2>(const Args&, DirectCut, void*);
template int launch_direct_narrow<128, 2>(const Args&, DirectCut, void*);
template int launch_one_segment_narrow<64>(const Args&, void*);
template int launch_one_segment_narrow<128>(const Args&, void*);
template int launch_one_segment_narrow<256>(const Args&, void*);

}  // namespace leanfleet::lean_attention
