#include "core/chunk_scan_hopper_float32.cuh"

namespace leanfleet {
namespace chunk {

template int launch_typed<float>(const ChunkScan&, int, int, int, void*);

// For keys of up to 128 columns and aligned rows, whose slices are as chunk_scan_slices says.
int launch_hopper_float32(const ChunkScan& scan, int pass, void* stream) {
  const bool narrow = scan.z.width <= 64;
  if (scan.y.width > 64)
    return narrow ? launch_hopper_float32_shape<128, 1>(scan, pass, stream)
                  : launch_hopper_float32_shape<128, 2>(scan, pass, stream);
  return narrow ? launch_hopper_float32_shape<64, 1>(scan, pass, stream)
                : launch_hopper_float32_shape<64, 2>(scan, pass, stream);
}

}  // namespace chunk
}  // namespace leanfleet
