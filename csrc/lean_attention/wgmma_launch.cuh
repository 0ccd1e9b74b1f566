// The instances of the wgmma kernel for one element type; see mma_launch.cuh.
#pragma once

#include "lean_attention/wgmma_kernel.cuh"

namespace leanfleet {

template <class T>
int launch_wgmma(const LeanAttentionArgs& args, const LeanTileLoads& loads, const CUtensorMap& key_map,
                 const CUtensorMap& value_map, int width, void* stream) {
  return width == 64 ? launch_wgmma_width<T, 64>(args, loads, key_map, value_map, stream)
                     : launch_wgmma_width<T, 128>(args, loads, key_map, value_map, stream);
}

}  // namespace leanfleet
