// Attention over keys that are spread over the ranks of a communicator, from each rank's over its share.
#pragma once

#include "core/communicator.h"

namespace leanfleet {

// Room for what all ranks have, for the communicators that have to gather it.
struct GatheredAttention {
  void* output = nullptr;  // [world,rows,width]
  float* lse = nullptr;    // [world,rows]
};
GatheredAttention carve_gathered(const PartialAttention& part, int64_t world, Workspace& ws);

Status merge_over_ranks(const Call& call, Communicator& communicator, const PartialAttention& part,
                        const GatheredAttention& gathered, const CpuTarget& target);
Status merge_over_ranks(const Call& call, Communicator& communicator, const PartialAttention& part,
                        const GatheredAttention& gathered, const CudaTarget& target);

}  // namespace leanfleet
