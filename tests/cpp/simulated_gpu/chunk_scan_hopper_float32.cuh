// In place of csrc/linear_scan/chunk_scan_hopper_float32.cuh, as chunk_scan_hopper.cuh here.
#pragma once

#include "linear_scan/chunk_scan.cuh"

namespace leanfleet {
namespace chunk {

template <int kWidth, int kGroups>
int launch_hopper_float32_shape(const ChunkScan& scan, int pass, void* stream) {
  return launch_typed<float>(scan, pass, true, 227 << 10, stream);
}

}  // namespace chunk
}  // namespace leanfleet
