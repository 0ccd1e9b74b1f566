#include <cuda_runtime_api.h>

#include <string>

#include "core/cuda_target.h"
#include "ort/ort_common.h"

namespace leanfleet::ort {

Status zero_on_stream(const Call& call, void* memory, size_t bytes, void* stream) {
  return cuda_status(call, "cudaMemsetAsync of sync words",
                     cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)));
}

// May be called while other threads capture: they do not mind.
Status allocate_apart(const Call& call, size_t bytes, void** memory) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  LEANFLEET_RETURN_IF_ERROR(
      cuda_status(call, "cudaThreadExchangeStreamCaptureMode", cudaThreadExchangeStreamCaptureMode(&mode)));
  const std::string action = "cudaMalloc of " + std::to_string(bytes) + " bytes of sync words";
  const Status status = cuda_status(call, action.c_str(), cudaMalloc(memory, bytes));
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  return status;
}

void free_apart(void* memory) { static_cast<void>(cudaFree(memory)); }  // the process may be ending

Status is_capturing(const Call& call, void* stream, bool* capturing) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  LEANFLEET_RETURN_IF_ERROR(
      cuda_status(call, "cudaStreamIsCapturing", cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture)));
  *capturing = capture != cudaStreamCaptureStatusNone;
  return {};
}

}  // namespace leanfleet::ort
