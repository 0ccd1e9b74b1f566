// The CUDA-core kernels to which recurrence.cu passes calls: many tokens (rows.cu) and few (decode.cu). What they ask of `ws`
// depends on shapes and attributes; they return 0 while it counts, otherwise the cudaError_t of the launches.
#pragma once

#include "causal_linear_decay/causal_linear_decay.h"

namespace leanfleet {

bool decay_rows_fit(const CausalLinearDecayArgs& args);
int launch_decay_rows(const CausalLinearDecayArgs& args, const CudaTarget& target, Workspace& ws);

// Few tokens a request, any number of requests.
bool decay_decode_fits(const CausalLinearDecayArgs& args);
int launch_decay_decode(const CausalLinearDecayArgs& args, const CudaTarget& target);

}  // namespace leanfleet
