#include "core/chunk_scan.cuh"

namespace leanfleet {
namespace chunk {

template int launch_typed<float>(const ChunkScan&, int, int, int, void*);

}  // namespace chunk
}  // namespace leanfleet
