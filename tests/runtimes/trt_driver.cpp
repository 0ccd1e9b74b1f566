// Drives the plugin library as TensorRT does, without TensorRT: getCreators, createPlugin, clone, types, shapes, formats,
// workspace, serialization, attachToContext, onShapeChange, enqueue.
//
//   trt_driver LIBRARY CASES [--launch] [--bench]
//   trt_driver LIBRARY FIELDS --fields
//
// CASES is written by trt_cases.py. --launch: run on the GPU on two streams, in place and in a captured CUDA graph, and
// compare with the expected outputs. Without it enqueue must fail with a message that names CUDA. --bench: the host time
// of enqueue. Prints a summary; exit code 1 and one line for each failure otherwise.
//
// --fields: FIELDS is the operator, the phase (0 build, 1 runtime), and a line for each field: name and data in hexadecimal, "-"
// for null, its type and its length. Makes a plugin of them and prints "refused", the message; or "made" and the plugin's own
// fields in the same form. What lies behind a field's data cannot be read.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "capi/leanfleet.h"

#ifdef LEANFLEET_DIRECT  // linked with the library's objects, for a launch without the plugin around it
#include "core/cuda_target.h"
#include "core/op.h"
#endif

using namespace nvinfer1;

// What the library asks the runtime for; the logger's layout follows from the version.
extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() noexcept {
  return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}

namespace {

int failures = 0;
std::string current;  // what is being tried

void check(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  if (failures <= 40) std::printf("FAILED %s: %s\n", current.c_str(), what.c_str());
}

void cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED %s: %s: %s\n", current.c_str(), what, cudaGetErrorString(error));
  std::exit(1);
}

// ---- Stand-ins for what TensorRT hands to a plugin

struct Logger : ILogger {
  std::string last;
  int count = 0;
  void log(Severity severity, const char* text) noexcept override {
    check(severity == Severity::kERROR, "severity of a message");
    last = text;
    ++count;
  }
};

struct Finder : ILoggerFinder {
  Logger logger;
  ILogger* findLogger() override { return &logger; }
};

Finder finder;

// The last message names the operator and `word`.
bool logged(const std::string& op, const std::string& word) {
  const std::string text = std::exchange(finder.logger.last, "");
  const bool good = text.rfind(op + " '", 0) == 0 && text.find(word) != std::string::npos;
  if (!good) std::printf("the message was: %s\n", text.c_str());
  return good;
}

// A dimension whose value is known to the test, and to the plugin only if it is a constant.
struct Expression : IDimensionExpr, apiv::VDimensionExpr {
  Expression(int64_t value, bool constant) : value(value), constant(constant) { mImpl = this; }
  bool isConstant() const override { return constant; }
  int64_t getConstantValue() const override { return constant ? value : INT64_MIN; }
  bool isSizeTensor() const override { return false; }
  int64_t value;
  bool constant;
};

int64_t value_of(const IDimensionExpr& expression) { return static_cast<const Expression&>(expression).value; }

struct Builder : IExprBuilder, apiv::VExprBuilder {
  Builder() { mImpl = this; }
  const Expression* make(int64_t value, bool is_constant) {
    expressions.push_back(std::make_unique<Expression>(value, is_constant));
    return expressions.back().get();
  }
  const IDimensionExpr* constant(int64_t value) override { return make(value, true); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const bool product = op == DimensionOperation::kPROD;
    check(product || op == DimensionOperation::kSUM, "an operation other than a sum or a product");
    return make(product ? value_of(a) * value_of(b) : value_of(a) + value_of(b), false);
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override { return nullptr; }
  std::deque<std::unique_ptr<Expression>> expressions;
};

struct ResourceContext : IPluginResourceContext {
  IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

// ---- Cases

const DataType kTypes[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT32,
                           DataType::kINT64, DataType::kINT8, DataType::kFP8};
const size_t kSizes[] = {4, 2, 2, 4, 8, 1, 1};
size_t element_size(int type) { return kSizes[type]; }

struct Tensor {
  std::string name;
  int type = 0;
  char variable = 'T';      // inputs: T, F, I, L, C or S of the schema
  std::string takes = "-";  // outputs: the input whose buffer it may take
  double tolerance = 0.0;
  Dims shape = {}, smallest = {}, largest = {};
  std::vector<char> content;

  size_t bytes() const {
    size_t count = element_size(type);
    for (int i = 0; i < shape.nbDims; ++i) count *= static_cast<size_t>(shape.d[i]);
    return count;
  }
  double at(size_t i) const {  // not of float8, of which cases have no numbers
    if (type == 4) {
      int64_t value;
      std::memcpy(&value, content.data() + 8 * i, 8);
      return static_cast<double>(value);
    }
    if (type == 5) return static_cast<int8_t>(content[i]);
    uint32_t bits = 0;
    if (type == 0 || type == 3) std::memcpy(&bits, content.data() + 4 * i, 4);
    if (type == 3) return static_cast<int32_t>(bits);
    if (type == 2) {
      uint16_t half;
      std::memcpy(&half, content.data() + 2 * i, 2);
      bits = static_cast<uint32_t>(half) << 16;
    }
    if (type == 1) {
      uint16_t half;
      std::memcpy(&half, content.data() + 2 * i, 2);
      const int exponent = half >> 10 & 31, fraction = half & 1023;
      const double sign = half & 0x8000 ? -1.0 : 1.0;
      if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
      return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

struct Attr {
  std::string name, text;
  char kind;
  int32_t i = 0;
  float f = 0.0f;
};

struct Case {
  std::string op;
  std::vector<Attr> attrs;
  std::vector<Tensor> inputs, outputs;
  bool has_data = false;
};

Dims read_dims(std::istream& in, int rank) {
  Dims dims = {};
  dims.nbDims = rank;
  for (int i = 0; i < rank; ++i) in >> dims.d[i];
  return dims;
}

bool read_case(std::istream& file, Case* result) {
  std::string line, word;
  if (!std::getline(file, line)) return false;
  *result = {};
  size_t num_attrs, num_inputs, num_outputs;
  const auto require = [](bool good) {
    if (good) return;
    std::printf("FAILED: the file of cases is damaged\n");
    std::exit(1);
  };
  std::istringstream first(line);
  first >> word >> result->op >> num_attrs >> num_inputs >> num_outputs;
  require(!first.fail() && word == "case");
  for (size_t i = 0; i < num_attrs; ++i) {
    std::getline(file, line);
    std::istringstream in(line);
    Attr attr;
    in >> attr.name >> attr.kind >> attr.text;
    if (attr.kind == 'i') attr.i = std::stoi(attr.text);
    if (attr.kind == 'f') attr.f = std::stof(attr.text);
    result->attrs.push_back(attr);
  }
  for (size_t i = 0; i < num_inputs + num_outputs; ++i) {
    std::getline(file, line);
    std::istringstream in(line);
    Tensor tensor;
    int rank;
    in >> tensor.name >> tensor.type;
    if (i < num_inputs) in >> tensor.variable;
    else in >> tensor.takes >> tensor.tolerance;
    in >> rank;
    tensor.shape = read_dims(in, rank);
    if (i < num_inputs) {
      tensor.smallest = read_dims(in, rank);
      tensor.largest = read_dims(in, rank);
    }
    require(!in.fail());  // also of a tolerance that is NaN
    (i < num_inputs ? result->inputs : result->outputs).push_back(tensor);
  }
  int has_data;
  std::getline(file, line);
  std::istringstream(line) >> word >> has_data;
  result->has_data = has_data != 0;
  for (auto* tensors : {&result->inputs, &result->outputs})
    for (Tensor& tensor : *tensors) {
      tensor.content.resize(tensor.bytes());
      if (has_data) file.read(tensor.content.data(), static_cast<std::streamsize>(tensor.content.size()));
    }
  return true;
}

std::string join(const std::vector<Tensor>& tensors) {
  std::string text;
  for (const Tensor& tensor : tensors) text += (text.empty() ? "" : ",") + tensor.name;
  return text;
}

PluginTensorDesc desc_of(const Tensor& tensor) {
  PluginTensorDesc desc = {};
  desc.dims = tensor.shape;
  desc.type = kTypes[tensor.type];
  desc.format = TensorFormat::kLINEAR;
  return desc;
}

std::vector<PluginTensorDesc> descs_of(const std::vector<Tensor>& tensors) {
  std::vector<PluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) descs.push_back(desc_of(tensor));
  return descs;
}

std::vector<DynamicPluginTensorDesc> dynamic_descs_of(const std::vector<Tensor>& tensors, bool inputs) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) {
    DynamicPluginTensorDesc desc = {};
    desc.desc = desc_of(tensor);
    desc.min = inputs ? tensor.smallest : tensor.shape;
    desc.opt = tensor.shape;
    desc.max = inputs ? tensor.largest : tensor.shape;
    descs.push_back(desc);
  }
  return descs;
}

// Fields as the ONNX parser makes them from a prepared node.
struct Fields {
  std::deque<std::string> texts;
  std::vector<PluginField> fields;
  void text(const char* name, const std::string& value) {
    texts.push_back(value);
    fields.emplace_back(name, texts.back().c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1));
  }
  PluginFieldCollection collection() const { return {static_cast<int32_t>(fields.size()), fields.data()}; }
};

void fields_of(const Case& c, Fields* result) {
  for (const Attr& attr : c.attrs) {
    if (attr.kind == 's') result->text(attr.name.c_str(), attr.text);
    if (attr.kind == 'i') result->fields.emplace_back(attr.name.c_str(), &attr.i, PluginFieldType::kINT32, 1);
    if (attr.kind == 'f') result->fields.emplace_back(attr.name.c_str(), &attr.f, PluginFieldType::kFLOAT32, 1);
  }
  result->text("connected_inputs", join(c.inputs));
  result->text("connected_outputs", join(c.outputs));
}

template <class T>
T* capability(IPluginV3& plugin, PluginCapabilityType type) {
  return static_cast<T*>(plugin.getCapabilityInterface(type));
}

// ---- Without a launch

void try_shapes(const Case& c, IPluginV3OneBuildV2& build) {
  const auto num_inputs = static_cast<int32_t>(c.inputs.size()), num_outputs = static_cast<int32_t>(c.outputs.size());
  check(build.getNbOutputs() == num_outputs, "number of outputs");
  std::vector<DataType> types, found(c.outputs.size());
  for (const Tensor& t : c.inputs) types.push_back(kTypes[t.type]);
  check(build.getOutputDataTypes(found.data(), num_outputs, types.data(), num_inputs) == 0, "getOutputDataTypes");
  for (int i = 0; i < num_outputs; ++i) check(found[i] == kTypes[c.outputs[i].type], "type of " + c.outputs[i].name);
  for (int open = 0; open < 2; ++open) {
    Builder builder;
    std::vector<DimsExprs> inputs(c.inputs.size()), outputs(c.outputs.size());
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      const Tensor& t = c.inputs[i];
      inputs[i].nbDims = t.shape.nbDims;
      for (int k = 0; k < t.shape.nbDims; ++k)
        inputs[i].d[k] = builder.make(t.shape.d[k], !open || t.smallest.d[k] == t.largest.d[k]);
    }
    check(build.getOutputShapes(inputs.data(), num_inputs, nullptr, 0, outputs.data(), num_outputs, builder) == 0,
          "getOutputShapes");
    for (int i = 0; i < num_outputs; ++i) {
      const Dims& expected = c.outputs[i].shape;
      bool same = outputs[i].nbDims == expected.nbDims;
      for (int k = 0; same && k < expected.nbDims; ++k) same = value_of(*outputs[i].d[k]) == expected.d[k];
      check(same, "shape of " + c.outputs[i].name);
    }
    inputs[0].nbDims = 6;  // no operator's first input has this rank
    for (int k = 1; k < 6; ++k) inputs[0].d[k] = inputs[0].d[0];
    check(build.getOutputShapes(inputs.data(), num_inputs, nullptr, 0, outputs.data(), num_outputs, builder) != 0 &&
              logged(c.op, c.inputs[0].name + " has rank"),
          "a wrong rank");
  }
  const bool wide = c.inputs.back().type == 4;
  types.back() = wide ? DataType::kINT8 : DataType::kINT64;
  check(build.getOutputDataTypes(found.data(), num_outputs, types.data(), num_inputs) != 0 &&
            logged(c.op, c.inputs.back().name + (wide ? " has type int8" : " has type int64")),
        "a wrong type");
  for (int i = 0; i < num_outputs; ++i) {
    const int32_t aliased = build.getAliasedInput(i);
    check((aliased < 0 ? "-" : c.inputs[aliased].name) == c.outputs[i].takes, "aliased input of " + c.outputs[i].name);
  }
}

void try_formats(const Case& c, IPluginV3OneBuildV2& build) {
  auto descs = dynamic_descs_of(c.inputs, true);
  const auto outputs = dynamic_descs_of(c.outputs, false);
  descs.insert(descs.end(), outputs.begin(), outputs.end());
  const auto num_inputs = static_cast<int32_t>(c.inputs.size()), num_outputs = static_cast<int32_t>(c.outputs.size());
  for (int32_t i = 0; i < num_inputs + num_outputs; ++i) {
    const DataType right = descs[i].desc.type;
    for (DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT32, DataType::kINT8,
                          DataType::kINT64, DataType::kFP8}) {
      descs[i].desc.type = type;
      const bool floating = type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
      const bool expected = i == 0 ? floating : type == right;
      check(build.supportsFormatCombination(i, descs.data(), num_inputs, num_outputs) == expected, "types of formats");
    }
    descs[i].desc.type = right;
    descs[i].desc.format = TensorFormat::kCHW32;
    check(!build.supportsFormatCombination(i, descs.data(), num_inputs, num_outputs), "a format other than linear");
    descs[i].desc.format = TensorFormat::kLINEAR;
  }
  const DynamicPluginTensorDesc first = descs.front();
  descs.insert(descs.begin() + num_inputs, 3, first);
  for (int32_t i = 0; i < num_inputs + 3 + num_outputs; ++i)
    check(!build.supportsFormatCombination(i, descs.data(), num_inputs + 3, num_outputs), "formats of more inputs than listed");
  descs = dynamic_descs_of(c.inputs, true);
  descs.insert(descs.end(), outputs.begin(), outputs.end());
  descs.push_back(first);
  check(!build.supportsFormatCombination(num_inputs + num_outputs, descs.data(), num_inputs, num_outputs + 1),
        "formats of more outputs than listed");
}

size_t workspace_of(const Case& c, IPluginV3OneBuildV2& build) {
  const auto inputs = dynamic_descs_of(c.inputs, true), outputs = dynamic_descs_of(c.outputs, false);
  const auto num_inputs = static_cast<int32_t>(inputs.size()), num_outputs = static_cast<int32_t>(outputs.size());
  const bool configured = build.configurePlugin(inputs.data(), num_inputs, outputs.data(), num_outputs) == 0;
  check(configured, "configurePlugin: " + finder.logger.last);
  return build.getWorkspaceSize(inputs.data(), num_inputs, outputs.data(), num_outputs);
}

bool same_fields(const PluginFieldCollection& a, const PluginFieldCollection& b) {
  if (a.nbFields != b.nbFields) return false;
  for (int32_t i = 0; i < a.nbFields; ++i) {
    const PluginField &x = a.fields[i], &y = b.fields[i];
    const size_t width = x.type == PluginFieldType::kCHAR ? 1 : x.type == PluginFieldType::kINT64 ? 8 : 4;
    if (std::strcmp(x.name, y.name) != 0 || x.type != y.type || x.length != y.length ||
        std::memcmp(x.data, y.data, width * static_cast<size_t>(x.length)) != 0)
      return false;
  }
  return true;
}

// What an engine holds makes the same plugin again; what is damaged makes none and a message.
std::unique_ptr<IPluginV3> reload(const Case& c, IPluginCreatorV3One& creator, IPluginV3& built) {
  const PluginFieldCollection* written =
      capability<IPluginV3OneRuntime>(built, PluginCapabilityType::kRUNTIME)->getFieldsToSerialize();
  check(written != nullptr, "getFieldsToSerialize");
  std::unique_ptr<IPluginV3> loaded(creator.createPlugin("", written, TensorRTPhase::kRUNTIME));
  check(loaded != nullptr, "createPlugin from an engine's fields");
  if (loaded == nullptr) return nullptr;
  check(same_fields(*written,
                    *capability<IPluginV3OneRuntime>(*loaded, PluginCapabilityType::kRUNTIME)->getFieldsToSerialize()),
        "fields after a round trip");
  const std::vector<PluginField> whole(written->fields, written->fields + written->nbFields);
  const auto refused = [&](const std::vector<PluginField>& fields, const std::string& what) {
    const PluginFieldCollection collection = {static_cast<int32_t>(fields.size()), fields.data()};
    const int before = finder.logger.count;
    const std::unique_ptr<IPluginV3> plugin(creator.createPlugin("", &collection, TensorRTPhase::kRUNTIME));
    check(plugin == nullptr && finder.logger.count > before && logged(c.op, ""), "damaged fields: " + what);
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    std::vector<PluginField> fields = whole;
    fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(i));
    const std::string name = whole[i].name;
    // An engine without lists of connections, or without a node's name, would be another plugin's, yet a whole one.
    if (name.rfind("connected_", 0) != 0 && name != "node") refused(fields, "without " + name);
    fields = whole;
    fields[i].data = nullptr;
    refused(fields, name + " without data");
    fields = whole;
    fields[i].length = 0;
    refused(fields, name + " without length");
    fields = whole;
    fields[i].type = PluginFieldType::kDIMS;
    refused(fields, name + " of another type");
  }
  std::vector<PluginField> fields = whole;
  fields.emplace_back("surprise", "x", PluginFieldType::kCHAR, 2);
  refused(fields, "one too many");
  refused({}, "none");
  return loaded;
}

// ---- On the GPU

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    cuda(cudaMalloc(&data, bytes + 2 * kGuard), "cudaMalloc");
    data_ = static_cast<char*>(data);
    fill();
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  char* data() const { return data_ + kGuard; }
  void fill() { cuda(cudaMemset(data_, 0xFF, bytes_ + 2 * kGuard), "cudaMemset"); }  // NaN in every float type
  void write(const std::vector<char>& from) {
    cuda(cudaMemcpy(data(), from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<char> read() const {
    std::vector<char> to(bytes_);
    cuda(cudaMemcpy(to.data(), data(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return to;
  }
  bool guards_whole() const {
    std::vector<unsigned char> guards(2 * kGuard);
    cuda(cudaMemcpy(guards.data(), data_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    cuda(cudaMemcpy(guards.data() + kGuard, data() + bytes_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return std::all_of(guards.begin(), guards.end(), [](unsigned char byte) { return byte == 0xFF; });
  }

 private:
  static constexpr size_t kGuard = 4096;
  char* data_ = nullptr;
  size_t bytes_;
};

// One execution context with its tensors.
struct Context {
  Context(const Case& c, IPluginV3OneRuntime& layer, size_t workspace_bytes, bool in_place)
      : c(c), inputs(descs_of(c.inputs)), outputs(descs_of(c.outputs)), workspace(workspace_bytes) {
    plugin.reset(layer.attachToContext(&resources));
    check(plugin != nullptr, "attachToContext");
    runtime = capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
    check(runtime->onShapeChange(inputs.data(), static_cast<int32_t>(inputs.size()), outputs.data(),
                                 static_cast<int32_t>(outputs.size())) == 0,
          "onShapeChange");
    for (const Tensor& t : c.inputs) {
      memory.push_back(std::make_unique<Memory>(t.bytes()));
      input_addresses.push_back(memory.back()->data());
    }
    for (const Tensor& t : c.outputs) {
      taken.push_back(-1);
      for (size_t i = 0; in_place && i < c.inputs.size(); ++i)
        if (c.inputs[i].name == t.takes) taken.back() = static_cast<int>(i);
      if (taken.back() < 0) memory.push_back(std::make_unique<Memory>(t.bytes()));
      output_memory.push_back(taken.back() < 0 ? memory.back().get() : memory[taken.back()].get());
      output_addresses.push_back(output_memory.back()->data());
    }
    reset();
  }

  // Inputs as they were, everything else poisoned.
  void reset() {
    workspace.fill();
    for (auto& m : memory) m->fill();
    for (size_t i = 0; i < c.inputs.size(); ++i) memory[i]->write(c.inputs[i].content);
  }

  int32_t enqueue(cudaStream_t stream) {
    return runtime->enqueue(inputs.data(), outputs.data(), input_addresses.data(), output_addresses.data(),
                            workspace.data(), stream);
  }

  void compare(const char* how) {
    for (size_t i = 0; i < c.outputs.size(); ++i) {
      const Tensor& expected = c.outputs[i];
      Tensor found = expected;
      found.content = output_memory[i]->read();
      const size_t count = found.content.size() / element_size(found.type);
      double worst = 0.0;
      for (size_t k = 0; k < count; ++k) {
        const double a = found.at(k), b = expected.at(k);
        if (a == b || (std::isnan(a) && std::isnan(b))) continue;
        const double error = std::fabs(a - b);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
      }
      check(worst <= expected.tolerance, std::string(how) + ": " + expected.name + " is wrong by " + std::to_string(worst) +
                                             ", allowed " + std::to_string(expected.tolerance));
    }
    for (auto& m : memory) check(m->guards_whole(), std::string(how) + ": it wrote outside a tensor");
    check(workspace.guards_whole(), std::string(how) + ": it wrote outside its workspace");
    for (size_t i = 0; i < c.inputs.size(); ++i)
      if (std::find(taken.begin(), taken.end(), static_cast<int>(i)) == taken.end())
        check(memory[i]->read() == c.inputs[i].content, std::string(how) + ": it changed " + c.inputs[i].name);
  }

  const Case& c;
  ResourceContext resources;
  std::vector<PluginTensorDesc> inputs, outputs;
  std::unique_ptr<IPluginV3> plugin;
  IPluginV3OneRuntime* runtime;
  std::vector<std::unique_ptr<Memory>> memory;
  Memory workspace;
  std::vector<int> taken;
  std::vector<Memory*> output_memory;
  std::vector<const void*> input_addresses;
  std::vector<void*> output_addresses;
};

void launch(const Case& c, IPluginV3OneRuntime& layer, size_t workspace_bytes) {
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  {
    Context first(c, layer, workspace_bytes, false), second(c, layer, workspace_bytes, true);
    cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(first.enqueue(streams[0]) == 0, "enqueue: " + finder.logger.last);
    check(second.enqueue(streams[1]) == 0, "enqueue in place: " + finder.logger.last);
    cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    first.compare("on one stream");
    second.compare("in place on another");

    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cuda(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    check(second.enqueue(streams[0]) == 0, "enqueue in a capture: " + finder.logger.last);
    cuda(cudaStreamEndCapture(streams[0], &graph), "cudaStreamEndCapture");
    cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    for (int i = 0; i < 2; ++i) {
      second.reset();
      cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      cuda(cudaGraphLaunch(replay, streams[0]), "cudaGraphLaunch");
      cuda(cudaStreamSynchronize(streams[0]), "replay");
      second.compare("replayed in place");
    }
    cuda(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
    cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  for (cudaStream_t stream : streams) cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Median of the host's seconds for one call of `body`, which enqueues work; the device is idle before each.
double host_seconds(const std::function<void()>& body) {
  std::vector<double> seconds;
  for (int i = 0; i < 2200; ++i) {
    cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const auto begin = std::chrono::steady_clock::now();
    body();
    const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (i >= 200) seconds.push_back(passed);
  }
  std::nth_element(seconds.begin(), seconds.begin() + 1000, seconds.end());
  return seconds[1000];
}

void bench(const Case& c, IPluginV3OneRuntime& layer, size_t workspace_bytes) {
  Context context(c, layer, workspace_bytes, true);
  const double enqueue = host_seconds([&] { context.enqueue(nullptr); });
  std::printf("bench %s %s: enqueue %.2f us", c.op.c_str(), join(c.inputs).c_str(), 1e6 * enqueue);
#ifdef LEANFLEET_DIRECT
  namespace lf = leanfleet;
  const lf::Op& op = *lf::find_op(c.op);
  lf::Call call;
  call.spec = op.spec;
  lf::default_attrs(*op.spec, call.attrs);
  for (const Attr& attr : c.attrs)
    for (int i = 0; i < op.spec->num_attrs; ++i)
      if (attr.name == op.spec->attrs[i].name) {
        if (attr.kind == 's') lf::set_attr_string(*op.spec, "", i, attr.text, call.attrs);
        else if (attr.kind == 'i') lf::set_attr_int(*op.spec, "", i, attr.i, call.attrs);
        else lf::set_attr_float(*op.spec, "", i, attr.f, call.attrs);
      }
  for (size_t k = 0; k < c.inputs.size(); ++k)
    for (int i = 0; i < op.spec->num_inputs; ++i)
      if (c.inputs[k].name == op.spec->inputs[i].name) {
        lf::Tensor& t = call.inputs[i];
        t.data = const_cast<void*>(context.input_addresses[k]);
        t.dtype = static_cast<lf::DType>(c.inputs[k].type);
        t.rank = c.inputs[k].shape.nbDims;
        std::copy(c.inputs[k].shape.d, c.inputs[k].shape.d + t.rank, t.shape);
      }
  check(lf::bind_inputs(op, call).ok(), "bind_inputs");
  for (size_t k = 0, i = 0; i < static_cast<size_t>(op.spec->num_outputs); ++i) {
    call.outputs[i] = lf::output_of(call, static_cast<int>(i));
    if (call.outputs[i].present()) call.outputs[i].data = context.output_addresses[k++];
  }
  lf::CudaTarget target;
  check(lf::current_cuda_target(nullptr, &target).ok(), "current_cuda_target");
  lf::Workspace needed;
  check(op.impl->run_cuda(call, target, needed).ok(), "counting");
  Memory sync(needed.sync_bytes());
  cuda(cudaMemset(sync.data(), 0, needed.sync_bytes()), "cudaMemset");
  const double direct = host_seconds([&] {
    lf::Workspace ws(context.workspace.data(), needed.scratch_bytes(), sync.data(), needed.sync_bytes());
    check(op.impl->run_cuda(call, target, ws).ok(), "direct launch");
  });
  std::printf(", direct launcher %.2f us, beyond it %.2f us", 1e6 * direct, 1e6 * (enqueue - direct));
#endif
  std::printf("\n");
}

// ---- All of it

void try_case(const Case& c, IPluginCreatorV3One& creator, bool launches, bool benches) {
  Fields fields;
  fields_of(c, &fields);
  const PluginFieldCollection collection = fields.collection();
  const std::unique_ptr<IPluginV3> made(creator.createPlugin("node", &collection, TensorRTPhase::kBUILD));
  check(made != nullptr, "createPlugin: " + finder.logger.last);
  if (made == nullptr) return;
  const std::unique_ptr<IPluginV3> plugin(made->clone());
  const auto* core = capability<IPluginV3OneCore>(*plugin, PluginCapabilityType::kCORE);
  check(core->getPluginName() == c.op && !std::strcmp(core->getPluginVersion(), "1") &&
            !std::strcmp(core->getPluginNamespace(), "leanfleet"),
        "name, version and namespace");
  auto* build = capability<IPluginV3OneBuildV2>(*plugin, PluginCapabilityType::kBUILD);
  try_shapes(c, *build);
  try_formats(c, *build);
  const size_t workspace_bytes = workspace_of(c, *build);
  const std::unique_ptr<IPluginV3> loaded = reload(c, creator, *plugin);
  if (loaded == nullptr) return;
  auto* runtime = capability<IPluginV3OneRuntime>(*loaded, PluginCapabilityType::kRUNTIME);
  if (benches) return bench(c, *runtime, workspace_bytes);
  if (launches) {
    launch(c, *runtime, workspace_bytes);
    const std::unique_ptr<IPluginV3> unplanned(made->clone());  // the engine planned nothing: it takes memory of its own
    return launch(c, *capability<IPluginV3OneRuntime>(*unplanned, PluginCapabilityType::kRUNTIME), 0);
  }
  ResourceContext resources;
  const std::unique_ptr<IPluginV3> attached(runtime->attachToContext(&resources));
  check(attached != nullptr, "attachToContext");
  const auto inputs = descs_of(c.inputs), outputs = descs_of(c.outputs);
  runtime = capability<IPluginV3OneRuntime>(*attached, PluginCapabilityType::kRUNTIME);
  check(runtime->onShapeChange(inputs.data(), static_cast<int32_t>(inputs.size()), outputs.data(),
                               static_cast<int32_t>(outputs.size())) == 0,
        "onShapeChange");
  const std::vector<const void*> no_inputs(inputs.size());
  const std::vector<void*> no_outputs(outputs.size());
  finder.logger.last.clear();
  check(runtime->enqueue(inputs.data(), outputs.data(), no_inputs.data(), no_outputs.data(), nullptr, nullptr) != 0 &&
            finder.logger.last.find("cuda") != std::string::npos,
        "enqueue without a GPU: " + finder.logger.last);
}

// ---- Fields that may be wrong

size_t width_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kCHAR:
    case PluginFieldType::kINT8: return 1;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
    case PluginFieldType::kINT16: return 2;
    case PluginFieldType::kFLOAT64:
    case PluginFieldType::kINT64: return 8;
    case PluginFieldType::kDIMS: return sizeof(Dims);
    default: return 4;
  }
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

void print_hex(const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i) std::printf("%02x", static_cast<const unsigned char*>(data)[i]);
}

// `bytes`, repeated or cut to `size`, before a page that must not be read.
const void* before_the_end(const std::string& bytes, size_t size) {
  constexpr size_t kPage = 4096;
  const size_t whole = (size + kPage - 1) / kPage * kPage;
  char* const memory = static_cast<char*>(mmap(nullptr, whole + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory + whole, kPage, PROT_NONE) != 0) std::exit(3);
  char* const data = memory + whole - size;
  for (size_t i = 0; i < size && !bytes.empty(); ++i) data[i] = bytes[i % bytes.size()];
  return data;
}

int try_fields(std::istream& in, const std::function<IPluginCreatorV3One*(const std::string&)>& creator_of) {
  std::string op, name, data;
  int phase, type;
  long long length;
  in >> op >> phase;
  IPluginCreatorV3One* const creator = creator_of(op);
  if (creator == nullptr) return 2;
  std::vector<PluginField> fields;
  while (in >> name >> type >> length >> data) {
    PluginField field;
    const std::string text = from_hex(name);
    field.name = name == "-" ? nullptr : static_cast<const char*>(before_the_end(text + '\0', text.size() + 1));
    field.type = static_cast<PluginFieldType>(type);
    field.length = static_cast<int32_t>(length);
    const size_t size = width_of(field.type) * static_cast<size_t>(std::max<int32_t>(field.length, 0));
    field.data = data == "-" ? nullptr : before_the_end(from_hex(data), size);
    fields.push_back(field);
  }
  const PluginFieldCollection collection = {static_cast<int32_t>(fields.size()), fields.data()};
  const auto turn = phase ? TensorRTPhase::kRUNTIME : TensorRTPhase::kBUILD;
  const std::unique_ptr<IPluginV3> plugin(creator->createPlugin("node", &collection, turn));
  if (plugin == nullptr) {
    std::printf("refused %s\n", finder.logger.last.c_str());
    return 0;
  }
  const std::unique_ptr<IPluginV3> copy(plugin->clone());
  auto* const running = capability<IPluginV3OneRuntime>(*copy, PluginCapabilityType::kRUNTIME);
  const PluginFieldCollection* const written = running->getFieldsToSerialize();
  if (written == nullptr) return 2;
  std::printf("made\n");
  for (int32_t i = 0; i < written->nbFields; ++i) {
    const PluginField& field = written->fields[i];
    print_hex(field.name, std::strlen(field.name));
    std::printf(" %d %d ", static_cast<int>(field.type), field.length);
    print_hex(field.data, width_of(field.type) * static_cast<size_t>(field.length));
    std::printf("\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bool launches = false, benches = false, wrong_fields = false;
  for (int i = 3; i < argc; ++i) {
    launches |= !std::strcmp(argv[i], "--launch");
    benches |= !std::strcmp(argv[i], "--bench");
    wrong_fields |= !std::strcmp(argv[i], "--fields");
  }
  void* library = argc < 3 ? nullptr : dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("usage: trt_driver LIBRARY CASES [--launch] [--bench]; %s\n", argc < 3 ? "" : dlerror());
    return 2;
  }
  const auto set_logger_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  const auto get_creators =
      reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  set_logger_finder(&finder);
  int32_t num_creators = 0;
  IPluginCreatorInterface* const* creators = get_creators(num_creators);
  const auto creator_of = [&](const std::string& op) -> IPluginCreatorV3One* {
    for (int32_t i = 0; i < num_creators; ++i) {
      auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
      if (creator->getPluginName() == op && !std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE"))
        return creator;
    }
    return nullptr;
  };
  std::ifstream file(argv[2], std::ios::binary);
  const auto create =
      reinterpret_cast<decltype(&leanfleet_communicator_create)>(dlsym(library, "leanfleet_communicator_create"));
  std::set<std::string> communicators;  // worlds of one, which nodes that exchange tensors look up when they are launched
  const auto create_communicator = [&](const std::string& name) {
    leanfleet_communicator world = {};
    world.name = name.c_str(), world.world = 1, world.timeout_s = 1.0;
    if (communicators.insert(name).second) check(create(&world) == 0, "a communicator of one");
  };
  create_communicator("world");
  if (wrong_fields) return try_fields(file, creator_of);
  Case c;
  int count = 0, without_kernel = 0;
  for (; read_case(file, &c); ++count) {
    current = c.op;
    for (const Attr& attr : c.attrs) {
      current += " " + attr.name + "=" + attr.text;
      if (attr.name == "communicator") create_communicator(attr.text);
    }
    current += " (" + join(c.inputs) + ") type " + std::to_string(c.inputs[0].type);
    IPluginCreatorV3One* creator = creator_of(c.op);
    check(creator != nullptr, "creator");
    if (creator == nullptr) continue;
    const PluginFieldCollection none = {};
    const std::unique_ptr<IPluginV3> probe(creator->createPlugin("node", &none, TensorRTPhase::kBUILD));
    if (probe == nullptr) {
      check(logged(c.op, "there is no CUDA kernel of it yet"), "a refusal without a kernel");
      ++without_kernel;
      continue;
    }
    try_case(c, *creator, launches, benches);
  }
  std::printf("%d cases, %d of operators without a CUDA kernel, %d failures\n", count, without_kernel, failures);
  return failures == 0 && count > 0 ? 0 : 1;
}
