#include "core/chunk_scan_hopper.cuh"

namespace leanfleet {
namespace chunk {

template int launch_typed<__nv_bfloat16>(const ChunkScan&, int, int, int, void*);
template int launch_hopper<__nv_bfloat16>(const ChunkGroup&, int, bool, int, void*);

}  // namespace chunk
}  // namespace leanfleet
