// The CUDA device of a call, and CUDA errors as statuses. No CUDA header is needed to include this.
#pragma once

#include "core/op.h"

namespace leanfleet {

// Properties of the current device, read once a device. `stream` is a cudaStream_t.
Status current_cuda_target(void* stream, CudaTarget* target);

// The driver's function of this name, as of CUDA 12.0, or null. The libraries do not link the driver.
void* driver_function(const char* name);

// The operator's check_values, strict, on host copies of the I and F inputs. It waits for the call's stream, and does
// nothing while that is being captured.
Status check_values_on_device(const Op& op, const Call& call, const CudaTarget& target);

// Whether the stream is being captured into a CUDA graph.
Status is_captured(const Call& call, void* stream, bool* captured);

// ok for 0 (cudaSuccess); otherwise "LeanAttention 'node': <action> failed: cudaErrorX (its text)".
Status cuda_status(const Call& call, const char* action, int error);

}  // namespace leanfleet
