#include "core/chunk_scan_hopper.cuh"

namespace leanfleet {
namespace chunk {

template int launch_typed<__half>(const ChunkScan&, int, int, int, void*);
template int launch_hopper<__half>(const ChunkGroup&, int, bool, int, void*);

}  // namespace chunk
}  // namespace leanfleet
