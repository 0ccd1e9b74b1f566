#include "core/cuda_target.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace leanfleet {

namespace {

std::string error_text(const char* action, cudaError_t error) {
  return std::string(action) + " failed: " + cuda_error_text(error);
}

// The number of the capture that the stream is in, and its graph; 0: none.
cudaError_t capture_of(cudaStream_t stream, unsigned long long* id, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, id, graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, id, graph, nullptr, nullptr);
#endif
  if (status != cudaStreamCaptureStatusActive) *id = 0;
  return error;
}

}  // namespace

Status current_cuda_target(void* stream, CudaTarget* target) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static CudaTarget known[kMaxDevices] = {};  // sm_count 0: not read yet
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return {Code::kCuda, error_text("cudaGetDevice", error)};
  if (device >= kMaxDevices) return Status::internal("CUDA device number " + std::to_string(device) + " is above 63");
  std::lock_guard<std::mutex> lock(mutex);
  CudaTarget& entry = known[device];
  if (entry.sm_count == 0) {
    int sm_count = 0, major = 0, minor = 0;
    error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return {Code::kCuda, error_text("cudaDeviceGetAttribute", error)};
    entry = {nullptr, device, sm_count, 10 * major + minor};
  }
  *target = entry;
  target->stream = stream;
  return {};
}

void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

bool dependent_launches() {
  static const bool wanted = [] {
    const char* const told = std::getenv("LEANFLEET_DEPENDENT_LAUNCH");
    return told == nullptr || std::string(told) != "0";
  }();
  return wanted;
}

Status is_captured(const Call& call, void* stream, bool* captured) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const int error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *captured = status != cudaStreamCaptureStatusNone;
  return cuda_status(call, "cudaStreamIsCapturing", error);
}

Status check_values_on_device(const Op& op, const Call& call, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  bool captured;
  LEANFLEET_RETURN_IF_ERROR(is_captured(call, stream, &captured));
  if (captured) return {};
  Call host = call;
  std::vector<char> copies[kMaxInputs];
  for (int i = 0; i < call.spec->num_inputs; ++i) {
    Tensor& tensor = host.inputs[i];
    const TypeVar type = call.spec->inputs[i].type;
    const bool read = (type != TypeVar::kT && !has_own_type(type)) || (op.impl->checked & given_input(i)) != 0;
    if (!tensor.present() || !read) continue;
    copies[i].resize(static_cast<size_t>(tensor.elements() * element_size(tensor.dtype)));
    const std::string action = std::string("cudaMemcpyAsync of ") + call.spec->inputs[i].name + " for LEANFLEET_CHECK";
    LEANFLEET_RETURN_IF_ERROR(
        cuda_status(call, action.c_str(),
                    cudaMemcpyAsync(copies[i].data(), tensor.data, copies[i].size(), cudaMemcpyDeviceToHost, stream)));
    tensor.data = copies[i].data();
  }
  LEANFLEET_RETURN_IF_ERROR(cuda_status(call, "cudaStreamSynchronize for LEANFLEET_CHECK", cudaStreamSynchronize(stream)));
  return op.impl->check_values(host, true);
}

Status copy_on_device(const Call& call, void* to, const void* from, int64_t bytes, void* stream) {
  return cuda_status(
      call, "cudaMemcpyAsync",
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

Status use_device(int device) {
  const cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) return {};
  return {Code::kCuda, error_text(("cudaSetDevice of " + std::to_string(device)).c_str(), error)};
}

bool record_mark(void** mark, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(cuda_stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) return false;
  cudaEvent_t event = static_cast<cudaEvent_t>(*mark);
  if (event == nullptr && cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return false;
  *mark = event;
  return cudaEventRecord(event, cuda_stream) == cudaSuccess;
}

bool mark_done(void* mark) { return cudaEventQuery(static_cast<cudaEvent_t>(mark)) != cudaErrorNotReady; }

int wait_in_order(const LaunchOrder& order, void* mark, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  const cudaError_t error = capture_of(cuda_stream, &capture, &graph);
  if (error != cudaSuccess) return error;
  void* const behind = capture == 0 ? mark : capture == order.capture ? order.captured : nullptr;
  return behind == nullptr ? cudaSuccess : cudaStreamWaitEvent(cuda_stream, static_cast<cudaEvent_t>(behind), 0);
}

int note_in_order(LaunchOrder* order, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  cudaError_t error = capture_of(cuda_stream, &capture, &graph);
  if (error != cudaSuccess || capture == 0) return error;
  cudaEvent_t event = static_cast<cudaEvent_t>(order->captured);
  if (event == nullptr) error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return error;
  order->captured = event;
  order->capture = capture;
  return cudaEventRecord(event, cuda_stream);
}

void free_mark(void* mark) {
  if (mark != nullptr) static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(mark)));
}

bool keep_with_graph(void* stream, unsigned long long* known, void* what, void (*let_go)(void*)) {
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  if (capture_of(static_cast<cudaStream_t>(stream), &id, &graph) != cudaSuccess || id == 0 || id == *known) return false;
  cudaUserObject_t object = nullptr;
  if (cudaUserObjectCreate(&object, what, let_go, 1, cudaUserObjectNoDestructorSync) != cudaSuccess) return false;
  if (cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess) *known = id;
  else static_cast<void>(cudaUserObjectRelease(object, 1));  // which calls let_go
  return true;
}

void allow_calls_during_capture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

CallsDuringCapture::CallsDuringCapture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  before_ = static_cast<int>(mode);
}
CallsDuringCapture::~CallsDuringCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(before_);
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

std::string cuda_error_text(int error) {
  const auto known = static_cast<cudaError_t>(error);
  return std::string(cudaGetErrorName(known)) + " (" + cudaGetErrorString(known) + ")";
}

Status cuda_status(const Call& call, const char* action, int error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // it is reported here, not by the next launch
  Status status = call.invalid(error_text(action, static_cast<cudaError_t>(error)));
  status.code = Code::kCuda;
  return status;
}

}  // namespace leanfleet
