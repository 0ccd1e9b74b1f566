// What the parts of the TensorRT library share. One library serves TensorRT 10 and 11 and TensorRT-RTX: the plugin
// interfaces used here have the same layout in all of them.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferVersion.h>

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/op.h"

#if NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR < 3
#error "leanfleet needs TensorRT's headers of 10.3 or later; set TENSORRT_INCLUDE_DIR to their folder"
#endif

namespace leanfleet::trt {

constexpr const char* kNamespace = "leanfleet";
constexpr const char* kVersion = "1";

// TensorRT neither takes a plugin's input that is absent nor tells which outputs are connected. Where those are not the
// first of the operator's, these fields name them, separated by commas: leanfleet.trt_plugins.prepare writes them.
constexpr const char* kConnectedInputs = "connected_inputs";
constexpr const char* kConnectedOutputs = "connected_outputs";
// In an engine alone: the node's name, and what the engine plans for it.
constexpr const char* kNodeField = "node";
constexpr const char* kPlannedField = "planned";

// Which tensors of the operator a layer has: the operator's index of each, in the layer's order.
struct Connections {
  bool listed = false;  // false: the first inputs, and every output that the attributes ask for
  std::vector<int> indices;
};

// What a plugin is made of; all of it is serialized.
struct Layer {
  const Op* op;
  std::string node;
  AttrValue attrs[kMaxAttrs];
  Connections inputs, outputs;
  // What the engine gives as workspace, in bytes, and the sync words it was sized for; -1: not known.
  int64_t planned_workspace = -1, planned_sync = -1;
};

// library.cpp: writes to TensorRT's logger, or to stderr where there is none.
void log_error(const char* text) noexcept;

// plugin.cpp. Null on failure, which is logged.
nvinfer1::IPluginV3* create_plugin(const Layer& layer) noexcept;

// Runs `body`, which returns a Status; reports a failure to the logger. 0, or -1 on failure: no exception crosses the
// library's boundary.
template <class F>
int32_t guarded(F&& body) noexcept {
  try {
    const Status status = body();
    if (status.ok()) return 0;
    log_error(status.message.c_str());
  } catch (const std::bad_alloc&) {
    log_error("out of memory");
  } catch (const std::exception& error) {
    log_error(error.what());
  }
  return -1;
}

}  // namespace leanfleet::trt
