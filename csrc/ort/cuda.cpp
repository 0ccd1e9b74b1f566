#include <cuda_runtime_api.h>

#include <string>

#include "core/cuda_target.h"
#include "ort/ort_common.h"

namespace leanfleet::ort {

Status zero_on_stream(const Call& call, void* memory, size_t bytes, void* stream) {
  return cuda_status(call, "cudaMemsetAsync of sync words",
                     cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)));
}

Status allocate_apart(const Call& call, size_t bytes, void** memory) {
  const CallsDuringCapture allowed;
  const std::string action = "cudaMalloc of " + std::to_string(bytes) + " bytes of sync words";
  return cuda_status(call, action.c_str(), cudaMalloc(memory, bytes));
}

void free_apart(void* memory) {
  const CallsDuringCapture allowed;
  if (cudaFree(memory) != cudaSuccess) cudaGetLastError();  // the process may be ending; it is not the next launch's
}

Status is_capturing(const Call& call, void* stream, bool* capturing) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  LEANFLEET_RETURN_IF_ERROR(
      cuda_status(call, "cudaStreamIsCapturing", cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture)));
  *capturing = capture != cudaStreamCaptureStatusNone;
  return {};
}

}  // namespace leanfleet::ort
