// The CUDA device of a call, and CUDA errors as statuses. No CUDA header is needed to include this.
#pragma once

#include "core/op.h"

namespace leanfleet {

// Properties of the current device, read once a device. `stream` is a cudaStream_t.
Status current_cuda_target(void* stream, CudaTarget* target);

// ok for 0 (cudaSuccess); otherwise "LeanAttention 'node': <action> failed: cudaErrorX (its text)".
Status cuda_status(const Call& call, const char* action, int error);

}  // namespace leanfleet
