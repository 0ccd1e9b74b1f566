// In place of csrc/linear_scan/chunk_scan_hopper.cuh: the simulated GPU runs the chunked scans of earlier generations.
#pragma once

#include <cuda.h>

#include "linear_scan/chunk_scan.cuh"

namespace leanfleet {
namespace chunk {

constexpr int kMaxUncombined = 0;

struct ChunkMaps {
  CUtensorMap x, y, z, out, source;
};
struct ChunkGroup {
  ChunkScan scans[kMaxTogether];
  ChunkMaps maps[kMaxTogether];
  int count, sm_count;
};

inline bool go_together(const ChunkScan&, const ChunkScan&) { return false; }

template <class T>
int launch_hopper(const ChunkGroup& group, int pass, bool, int max_shared_bytes, void* stream) {
  for (int i = 0; i < group.count; ++i)
    if (const int failed = launch_typed<T>(group.scans[i], pass, true, max_shared_bytes, stream)) return failed;
  return cudaSuccess;
}

}  // namespace chunk
}  // namespace leanfleet
