// In place of the instances of LeanAttention's kernels for 16-bit caches, whose copies are not simulated: calls that would take
// them fail. Where producers make tiles of quantised caches for wgmma, they are the real ones, and their consumers stand-ins of plain
// arithmetic. CTAs that read caches straight into registers are launched without clusters; those with one segment, where a cluster would
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

// Two threads a row, each with half of its columns. They wait and arrive as the real ones do.
template <class T, int kWidth>
struct WarpgroupConsumer<T, kWidth, true, kWidth> {
  using Tile = WgmmaTile<kWidth, true>;
  static constexpr int kTokens = Tile::kTokens, kColumns = kWidth / 2;
  const Args& args;
  const TileLoads& loads;
  const RingAddresses& ring;
  uint32_t query;
  int group, warp, lane;
  RingPlace place{0, 0};
  float o[kColumns], max, sum, keys[kWidth], logits[kTokens];

  void run() {
    if (args.plan.merge_apart && warp == 0 && lane == 0) begin_cuts(args, blockIdx.x);
    place = RingPlace(0, loads.slots);
    for (RingPlace queued(0, kQueue);; queued.next()) {
      mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
      const Work& work = ring.queue[queued.slot];
      if (work.last != 0) return;
      compute(work);
      mbarrier_arrive(ring.queue_empty + queued.slot * 8);
    }
  }
  template <class F>
  void with_slot(F&& body) {
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
    body(ring.slots + Tile::slot_at(place.slot));
    mbarrier_arrive(ring.empty + place.slot * 8);
    place.next();
  }
  static float number(uint32_t slot, int token, int column) {
    T x;
    std::memcpy(&x, simulated::from_shared(slot + slot_offset<kTokens>(token, column / 8) + column % 8 * 2, 2), 2);
    return static_cast<float>(x);
  }
  void compute(const Work& work) {
    const Span all = unit_rows(args, work.unit.request, work.unit.row_tile);
    const int thread = warp % 4 * 32 + lane, of_unit = Tile::kGroupRows * group + thread / 2, row = all.begin + of_unit;
    const bool real = row < min32(all.end, args.group * work.unit.request.tokens);
    const RowBounds bounds = real ? row_bounds(args, work.unit, row) : RowBounds{0, 0};
    const T* const from = real ? query_row<T>(args, work.unit, row_place(args, work.unit, row)) : nullptr;
    std::memset(o, 0, sizeof(o));
    max = -INFINITY, sum = 0.0f;
    for (int tile = work.segment.tiles.begin; tile < work.segment.tiles.end; ++tile) {
      with_slot([&](uint32_t slot) { weigh(slot, tile * kTokens, bounds, from); });
      with_slot([&](uint32_t slot) {
        for (int token = 0; token < kTokens; ++token)
          for (int d = 0; logits[token] > 0.0f && d < kColumns; ++d)
            o[d] += logits[token] * number(slot, token, thread % 2 * kColumns + d);
      });
    }
    if (row < all.end) write(work, row, of_unit, thread % 2 * kColumns);
    if (work.segment.count > 1) end_part<T>(args, work.unit, work.segment, work.first, warp, Tile::kConsumerWarps);
  }
  // Logits of a tile, and what becomes of them.
  void weigh(uint32_t slot, int begin, RowBounds bounds, const T* from) {
    float top = max;
    for (int token = 0; token < kTokens; ++token) {
      const int j = begin + token, bits = ring.masked_out[place.slot * Tile::kSlices + token / 16];
      logits[token] = -INFINITY;
      if (j < bounds.begin || j >= bounds.end || (args.cache_kind == kPaged && (bits >> token % 16 & 1) != 0)) continue;
      float x = 0.0f, scale;
      for (int d = 0; d < kWidth; ++d) x += static_cast<float>(from[d]) * number(slot, token, d);
      std::memcpy(&scale, simulated::from_shared(ring.key_scales + (place.slot / 2 * kTokens + token) * 4, 4), 4);
      x *= scale * args.scale;
      if (args.softcap > 0.0f) x = args.softcap * std::tanh(x / args.softcap);
      logits[token] = x * kLog2E;
      top = std::fmax(top, logits[token]);
    }
    const float factor = max == -INFINITY ? 0.0f : std::exp2(max - top);
    max = top, sum *= factor;
    for (float& x : o) x *= factor;
    for (float& x : logits) x = x == -INFINITY ? 0.0f : std::exp2(x - top), sum += x;
  }
  void write(const Work& work, int row, int of_unit, int column) {
    for (int d = 0; d < kColumns; d += 4) {
      float4 x = make_float4(o[d], o[d + 1], o[d + 2], o[d + 3]);
      scale_values(args.value_scales, work.unit.head, kWidth, column + d, x);
      if (work.segment.count == 1) write_row<T>(args, work.unit, row, column + d, x, max, sum);
      else write_partial(args, work.segment.slot, of_unit, column + d, x, max, sum);
    }
  }
};

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
