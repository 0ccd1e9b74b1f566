// The instances of the tensor-core kernel for one element type; included by one source file a type, so that they
// compile side by side.
#pragma once

#include "lean_attention/mma_kernel.cuh"

namespace leanfleet {

template <class T>
int launch_mma(const LeanAttentionArgs& args, const LeanTileLoads& loads, const CUtensorMap& key_map,
               const CUtensorMap& value_map, int width, int producer_warps, void* stream) {
  const auto of_width = [&](auto w) {
    constexpr int kWidth = decltype(w)::value;
    const int rows = args.plan.row_tile;
    if (rows == 8) return launch_mma_tile<T, kWidth, 8>(args, loads, key_map, value_map, producer_warps, stream);
    if constexpr (kWidth < 256)
      if (rows == 16) return launch_mma_tile<T, kWidth, 16>(args, loads, key_map, value_map, producer_warps, stream);
    return launch_mma_tile<T, kWidth, 128>(args, loads, key_map, value_map, producer_warps, stream);
  };
  if (width == 64) return of_width(std::integral_constant<int, 64>{});
  if (width == 128) return of_width(std::integral_constant<int, 128>{});
  return of_width(std::integral_constant<int, 256>{});
}

}  // namespace leanfleet
