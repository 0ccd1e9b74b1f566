// libleanfleet_trt.so: what TensorRT looks for in a plugin library, the creators of the plugins, and errors on their way
// to TensorRT's logger.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "core/op_specs.h"
#include "trt/trt_common.h"

namespace leanfleet::trt {

using namespace nvinfer1;

// ILogger and ILoggerFinder as TensorRT 10 lays them out, and as TensorRT 11 does, which put two functions before theirs.
// Not in an unnamed namespace, where the compiler may conclude that nothing implements them.
struct Logger10 {
  virtual void log(ILogger::Severity severity, const char* text) noexcept = 0;
  virtual ~Logger10() = default;
};
struct LoggerFinder10 {
  virtual Logger10* find_logger() = 0;
  virtual ~LoggerFinder10() = default;
};
struct Versioned11 {
  virtual APILanguage language() const noexcept = 0;
  virtual InterfaceInfo info() const noexcept = 0;
  virtual ~Versioned11() = default;
};
struct Logger11 : Versioned11 {
  virtual void log(ILogger::Severity severity, const char* text) noexcept = 0;
};
struct LoggerFinder11 : Versioned11 {
  virtual Logger11* find_logger() = 0;
};

namespace {

// ---- Logger

// The runtime that loaded this library last.
std::atomic<void*> logger_finder{nullptr};

// The library of the runtime that `object` belongs to, by its table of virtual functions; null, which dlsym takes for
// the whole process, where the runtime is linked into the program.
void* library_of(void* object) {
  Dl_info found;
  if (dladdr(*static_cast<void**>(object), &found) == 0) return nullptr;
  return dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

// TensorRT 10.14 says 101401, TensorRT-RTX 1.7 says 10701; RTX has had the new layout since 1.7 at the latest.
bool has_logger_11(int32_t version) { return version >= 110000 || version < 100000; }

// The logger of the call under way, as far as TensorRT has noted it; else the runtime's own, which is that of its first
// builder or runtime. False where there is neither.
template <class Logger, class LoggerFinder>
bool log_with(void* finder, void* (*own_logger)(), const char* text) {
  auto* logger = static_cast<LoggerFinder*>(finder)->find_logger();
  if (logger == nullptr && own_logger != nullptr) logger = static_cast<Logger*>(own_logger());
  if (logger != nullptr) logger->log(ILogger::Severity::kERROR, text);
  return logger != nullptr;
}

bool log_with_tensorrt(const char* text) {
  void* const finder = logger_finder.load();
  if (finder == nullptr) return false;
  void* const runtime = library_of(finder);
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(runtime, "getInferLibVersion"));
  const auto own_logger = reinterpret_cast<void* (*)()>(dlsym(runtime, "getLogger"));
  if (runtime != nullptr) dlclose(runtime);  // it stays loaded: the finder lives in it
  if (version == nullptr) return false;
  return has_logger_11(version()) ? log_with<Logger11, LoggerFinder11>(finder, own_logger, text)
                                  : log_with<Logger10, LoggerFinder10>(finder, own_logger, text);
}

// ---- Fields

std::string field_name(const OpSpec& spec, const std::string& node, const PluginField& field) {
  return std::string(spec.name) + " '" + node + "': field " + field.name;
}

// A text with or without its terminator.
std::string read_text(const PluginField& field) {
  const char* const data = static_cast<const char*>(field.data);
  return std::string(data, strnlen(data, static_cast<size_t>(field.length)));
}

Status read_attr(const OpSpec& spec, const std::string& node, int index, const PluginField& field, AttrValue* attrs) {
  const auto number = [&](auto zero) {
    std::memcpy(&zero, field.data, sizeof zero);
    return zero;
  };
  if (field.type == PluginFieldType::kCHAR) return set_attr_string(spec, node.c_str(), index, read_text(field), attrs);
  if (field.length != 1)
    return Status::invalid(std::string(spec.name) + " '" + node + "': attribute " + field.name +
                           " is a list; expected a single value");
  switch (field.type) {
    case PluginFieldType::kINT32: return set_attr_int(spec, node.c_str(), index, number(int32_t{}), attrs);
    case PluginFieldType::kINT64: return set_attr_int(spec, node.c_str(), index, number(int64_t{}), attrs);
    case PluginFieldType::kFLOAT32: return set_attr_float(spec, node.c_str(), index, number(float{}), attrs);
    default: break;
  }
  return Status::invalid(std::string(spec.name) + " '" + node + "': attribute " + field.name +
                         " is neither an integer nor a float32 nor a string");
}

template <class Exists>
Status read_connections(const OpSpec& spec, const std::string& node, const PluginField& field, const TensorSpec* tensors,
                        int count, Exists&& exists, Connections* connections) {
  if (field.type != PluginFieldType::kCHAR)
    return Status::invalid(field_name(spec, node, field) + " is no string; expected names separated by commas");
  connections->listed = true;
  const std::string names = read_text(field);
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    const std::string name = names.substr(begin, end - begin);
    int index = 0;
    while (index < count && name != tensors[index].name) ++index;
    if (index == count || !exists(index) || (!connections->indices.empty() && index <= connections->indices.back()))
      return Status::invalid(field_name(spec, node, field) + " is '" + names + "'; '" + name +
                             "' is not a tensor of this node, or not in the operator's order");
    connections->indices.push_back(index);
    begin = end + 1;
  }
  return {};
}

Status read_planned(const OpSpec& spec, const std::string& node, const PluginField& field, Layer* layer) {
  if (field.type != PluginFieldType::kINT64 || field.length != 2)
    return Status::invalid(field_name(spec, node, field) + " is not two int64 values; the engine is damaged, build it again");
  int64_t planned[2];
  std::memcpy(planned, field.data, sizeof planned);
  layer->planned_workspace = planned[0];
  layer->planned_sync = planned[1];
  return {};
}

Status refuse_field(const OpSpec& spec, const std::string& node, const char* name) {
  std::string known;
  for (int i = 0; i < spec.num_attrs; ++i) known += (i ? ", " : "") + std::string(spec.attrs[i].name);
  return Status::invalid(std::string(spec.name) + " '" + node + "': there is no attribute " + name + "; it has " + known);
}

// Of two fields of one name nobody knows which one is meant, and counts of an engine's fields would not notice a missing one.
Status refuse_twice(const OpSpec& spec, const std::string& node, const PluginFieldCollection* fields, int count) {
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < i; ++k) {
      const char *const name = fields->fields[i].name, *const other = fields->fields[k].name;
      if (name != nullptr && other != nullptr && std::strcmp(name, other) == 0)
        return Status::invalid(std::string(spec.name) + " '" + node + "': field " + name + " is there twice; expected once");
    }
  return {};
}

// In an engine every field must be there and no other. (TensorRT's ONNX parser hands over no attributes but those that the
// creator lists: leanfleet.trt_plugins checks the names in a model.)
Status read_fields(const Op& op, const char* name, const PluginFieldCollection* fields, bool from_engine, Layer* layer) {
  const OpSpec& spec = *op.spec;
  layer->op = &op;
  layer->node = name != nullptr ? name : "";
  default_attrs(spec, layer->attrs);
  const int count = fields != nullptr ? fields->nbFields : 0;
  const PluginField* inputs = nullptr;
  const PluginField* outputs = nullptr;
  const PluginField* planned = nullptr;
  int known = 0, attrs_read = 0;
  for (int i = 0; i < count; ++i) {
    const PluginField& field = fields->fields[i];
    if (field.name == nullptr || field.data == nullptr || field.length < 1) {
      if (!from_engine) continue;  // an attribute without a value
      return Status::invalid(std::string(spec.name) + " '" + layer->node + "': field " +
                             (field.name != nullptr ? field.name : std::to_string(i)) +
                             " is empty; the engine is damaged, build it again");
    }
    ++known;
    if (std::strcmp(field.name, kConnectedInputs) == 0) inputs = &field;
    else if (std::strcmp(field.name, kConnectedOutputs) == 0) outputs = &field;
    else if (from_engine && std::strcmp(field.name, kPlannedField) == 0) planned = &field;
    else if (from_engine && std::strcmp(field.name, kNodeField) == 0 && field.type == PluginFieldType::kCHAR)
      layer->node = read_text(field);
    else --known;
  }
  LEANFLEET_RETURN_IF_ERROR(refuse_twice(spec, layer->node, fields, count));
  for (int i = 0; i < count; ++i)
    for (int attr = 0; attr < spec.num_attrs; ++attr) {
      const PluginField& field = fields->fields[i];
      if (field.name == nullptr || field.data == nullptr || field.length < 1) continue;
      if (std::strcmp(field.name, spec.attrs[attr].name) != 0) continue;
      LEANFLEET_RETURN_IF_ERROR(read_attr(spec, layer->node, attr, field, layer->attrs));
      ++attrs_read;
    }
  for (int i = 0; i < count && !from_engine; ++i) {
    const char* const field = fields->fields[i].name;
    bool has = field == nullptr || std::strcmp(field, kConnectedInputs) == 0 || std::strcmp(field, kConnectedOutputs) == 0 ||
               std::strncmp(field, "plugin_", 7) == 0;  // TensorRT's own: plugin_version, plugin_namespace
    for (int attr = 0; attr < spec.num_attrs && !has; ++attr) has = std::strcmp(field, spec.attrs[attr].name) == 0;
    if (!has) return refuse_field(spec, layer->node, field);
  }
  if (inputs != nullptr)
    LEANFLEET_RETURN_IF_ERROR(
        read_connections(spec, layer->node, *inputs, spec.inputs, spec.num_inputs, [](int) { return true; }, &layer->inputs));
  if (outputs != nullptr)
    LEANFLEET_RETURN_IF_ERROR(read_connections(
        spec, layer->node, *outputs, spec.outputs, spec.num_outputs,
        [&](int index) { return output_exists(spec, layer->attrs, index); }, &layer->outputs));
  if (!from_engine) return {};
  if (planned == nullptr || attrs_read != spec.num_attrs || known + attrs_read != count)
    return Status::invalid(std::string(spec.name) + " '" + layer->node + "': the engine holds " + std::to_string(count) +
                           " fields for it, not those that this version of leanfleet writes; build the engine again");
  return read_planned(spec, layer->node, *planned, layer);
}

// ---- Creators

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(const Op& op) : op_(op) {
    const int num_attrs = op.spec->num_attrs;
    for (int i = 0; i < num_attrs; ++i) names_[i] = {op.spec->attrs[i].name, nullptr, field_type(op.spec->attrs[i].type), 1};
    names_[num_attrs] = {kConnectedInputs, nullptr, PluginFieldType::kCHAR, 0};
    names_[num_attrs + 1] = {kConnectedOutputs, nullptr, PluginFieldType::kCHAR, 0};
    collection_ = {num_attrs + 2, names_.data()};
  }

  const char* getPluginName() const noexcept override { return op_.spec->name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }

  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* fields, TensorRTPhase phase) noexcept override {
    Layer layer;
    const int32_t failed = guarded([&]() -> Status {
      LEANFLEET_RETURN_IF_ERROR(read_fields(op_, name, fields, phase == TensorRTPhase::kRUNTIME, &layer));
      if (op_.impl->run_cuda == nullptr)
        return Status::unsupported(std::string(op_.spec->name) + " '" + layer.node +
                                   "': there is no CUDA kernel of it yet; run this model with ONNX Runtime on the CPU");
      return {};
    });
    return failed ? nullptr : create_plugin(layer);
  }

 private:
  static PluginFieldType field_type(AttrType type) {
    if (type == AttrType::kString) return PluginFieldType::kCHAR;
    return type == AttrType::kFloat ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
  }

  const Op& op_;
  std::array<PluginField, kMaxAttrs + 2> names_;
  PluginFieldCollection collection_;
};

template <size_t... kIndices>
std::array<Creator, sizeof...(kIndices)> make_creators(std::index_sequence<kIndices...>) {
  return {Creator(kOps[kIndices])...};
}

}  // namespace

void log_error(const char* text) noexcept {
  try {
    if (log_with_tensorrt(text)) return;
  } catch (...) {  // a logger of the application's that throws
  }
  std::fprintf(stderr, "leanfleet: %s\n", text);
}

}  // namespace leanfleet::trt

#define LEANFLEET_TRT_EXPORT extern "C" __attribute__((visibility("default")))

LEANFLEET_TRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { leanfleet::trt::logger_finder.store(finder); }

LEANFLEET_TRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace leanfleet;
  constexpr size_t kCount = std::size(kOps);
  static auto creators = trt::make_creators(std::make_index_sequence<kCount>());
  static const auto pointers = [] {
    std::array<nvinfer1::IPluginCreatorInterface*, kCount> list;
    for (size_t i = 0; i < kCount; ++i) list[i] = &creators[i];
    return list;
  }();
  count = static_cast<int32_t>(kCount);
  return pointers.data();
}
