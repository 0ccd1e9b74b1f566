// The CUDA device of a call, and CUDA errors as statuses. No CUDA header is needed to include this.
#pragma once

#include "core/op.h"

namespace leanfleet {

// Properties of the current device, read once a device. `stream` is a cudaStream_t.
Status current_cuda_target(void* stream, CudaTarget* target);

// The driver's function of this name, as of CUDA 12.0, or null. The libraries do not link the driver.
void* driver_function(const char* name);

// The operator's check_values, strict, on host copies of the inputs that it reads. It waits for the call's stream, and does
// nothing while that is being captured.
Status check_values_on_device(const Op& op, const Call& call, const CudaTarget& target);

// Copies between two places of the device.
Status copy_on_device(const Call& call, void* to, const void* from, int64_t bytes, void* stream);

// Makes the device the current one of this thread.
Status use_device(int device);

// An event behind what the stream has so far, made on first use. False while the stream is being captured, or on an error.
bool record_mark(void** mark, void* stream);
bool mark_done(void* mark);
// What puts launches of one kind in order, whichever streams they are on. Within a capture, behind those of the same capture.
struct LaunchOrder {
  void* captured = nullptr;  // a cudaEvent_t behind the last one that was captured
  unsigned long long capture = 0;
};
// Makes the stream wait for the last launch: for `mark` (null: none) outside of captures. Returns a cudaError_t.
int wait_in_order(const LaunchOrder& order, void* mark, void* stream);
// Behind a launch. Returns a cudaError_t.
int note_in_order(LaunchOrder* order, void* stream);
void free_mark(void* mark);

// Where the stream is being captured into a graph that is not the one of `known` (0: none), which is set: let_go(what) comes when
// that graph and all made of it are gone, from a thread of the driver's that may not call CUDA. False: it will not come.
bool keep_with_graph(void* stream, unsigned long long* known, void* what, void (*let_go)(void*));

// Captures of other threads do not mind what this thread calls.
void allow_calls_during_capture();
// The same for as long as it lives.
class CallsDuringCapture {
 public:
  CallsDuringCapture();
  ~CallsDuringCapture();
  CallsDuringCapture(const CallsDuringCapture&) = delete;
  CallsDuringCapture& operator=(const CallsDuringCapture&) = delete;

 private:
  int before_;  // a cudaStreamCaptureMode
};

// Whether launches may begin while the launch before them runs: the variable LEANFLEET_DEPENDENT_LAUNCH is not 0. See
// dependent_launch.cuh.
bool dependent_launches();

// Whether the stream is being captured into a CUDA graph.
Status is_captured(const Call& call, void* stream, bool* captured);

// ok for 0 (cudaSuccess); otherwise "LeanAttention 'node': <action> failed: cudaErrorX (its text)".
Status cuda_status(const Call& call, const char* action, int error);
// "cudaErrorX (its text)".
std::string cuda_error_text(int error);

}  // namespace leanfleet
