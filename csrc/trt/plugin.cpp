// Every operator of the registry as a plugin layer of TensorRT. Nothing here knows an operator: types, shapes and
// attributes come from the schema's tables.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/bind_shapes.h"
#include "core/cuda_target.h"
#include "trt/trt_common.h"

namespace leanfleet::trt {

namespace {

using namespace nvinfer1;

constexpr int64_t kUnknown = -1;
// Stands for a GPU that is not there, when an engine is built on another machine: as many SMs as any has.
constexpr CudaTarget kAnyDevice = {nullptr, 0, 192, 90};

size_t aligned(size_t bytes) { return round_up(bytes, kWorkspaceAlignment); }

bool from_trt(DataType type, DType* dtype) {
  switch (type) {
    case DataType::kFLOAT: *dtype = DType::kFloat32; return true;
    case DataType::kHALF: *dtype = DType::kFloat16; return true;
    case DataType::kBF16: *dtype = DType::kBFloat16; return true;
    case DataType::kINT32: *dtype = DType::kInt32; return true;
    case DataType::kINT64: *dtype = DType::kInt64; return true;
    case DataType::kINT8: *dtype = DType::kInt8; return true;
    case DataType::kFP8: *dtype = DType::kFloat8e4m3fn; return true;
    default: return false;
  }
}

DataType to_trt(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return DataType::kFLOAT;
    case DType::kFloat16: return DataType::kHALF;
    case DType::kBFloat16: return DataType::kBF16;
    case DType::kInt64: return DataType::kINT64;
    case DType::kInt8: return DataType::kINT8;
    case DType::kFloat8e4m3fn: return DataType::kFP8;
    case DType::kUint8: return DataType::kUINT8;
    case DType::kInt32: break;
  }
  return DataType::kINT32;
}

const char* trt_type_name(DataType type) {
  switch (type) {
    case DataType::kINT64: return "int64";
    case DataType::kINT8: return "int8";
    case DataType::kUINT8: return "uint8";
    case DataType::kBOOL: return "bool";
    case DataType::kFP8: return "float8e4m3fn";
    default: return "a type that no operator takes";
  }
}

// Device memory of one execution context.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Holds at least `bytes` afterwards; what it held is lost where it grows.
  Status reserve(const Call& call, const char* what, size_t bytes) {
    if (bytes <= bytes_) return {};
    cudaFree(data_);
    data_ = nullptr;
    bytes_ = 0;
    const std::string action = "cudaMalloc of " + std::to_string(bytes) + " bytes of " + what;
    LEANFLEET_RETURN_IF_ERROR(cuda_status(call, action.c_str(), cudaMalloc(&data_, bytes)));
    bytes_ = bytes;
    return {};
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// What an execution context adds to a layer.
struct ContextState {
  CudaTarget target = {};
  DeviceMemory sync;     // zeroed once; every launch leaves it zero
  DeviceMemory scratch;  // only where a launch needs more than the engine planned
  Call call;             // bound to the shapes of the last launch
  size_t scratch_bytes = 0, sync_bytes = 0, unread_bytes = 0;
  bool bound = false;
};

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuildV2, public IPluginV3OneRuntime {
 public:
  explicit Plugin(const Layer& layer) : layer_(layer), spec_(*layer.op->spec) {
    for (int i = 0; i < kMaxInputs; ++i)
      declared_types_[i] = input_types_[i] =
          i < spec_.num_inputs ? dtype_of(spec_.inputs[i].type, DType::kFloat32) : DType::kFloat32;
    if (layer_.inputs.listed) num_inputs_ = static_cast<int32_t>(layer_.inputs.indices.size());
    outputs_ = layer_.outputs.indices;
    for (int i = 0; i < spec_.num_outputs && !layer_.outputs.listed; ++i)
      if (output_exists(spec_, layer_.attrs, i)) outputs_.push_back(i);
  }

  // ---- IPluginV3

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  IPluginV3* clone() noexcept override {
    std::unique_ptr<Plugin> copy;
    guarded([&]() -> Status {
      copy = std::make_unique<Plugin>(layer_);
      std::copy(std::begin(input_types_), std::end(input_types_), std::begin(copy->input_types_));
      std::copy(std::begin(declared_types_), std::end(declared_types_), std::begin(copy->declared_types_));
      copy->num_inputs_ = num_inputs_;
      copy->planned_workspace_ = planned_workspace_;
      copy->planned_sync_ = planned_sync_;
      return {};
    });
    return copy.release();
  }

  // ---- IPluginV3OneCore

  const char* getPluginName() const noexcept override { return spec_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // ---- IPluginV3OneBuildV2

  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs_.size()); }

  int32_t getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                             int32_t num_inputs) const noexcept override {
    return guarded([&]() -> Status {
      DType types[kMaxInputs];
      LEANFLEET_RETURN_IF_ERROR(read_types(inputs, num_inputs, types));
      LEANFLEET_RETURN_IF_ERROR(check_outputs_count(num_outputs));
      for (int32_t k = 0; k < num_outputs; ++k) {
        const TensorSpec& output = spec_.outputs[outputs_[k]];
        outputs[k] = to_trt(has_own_type(output.type) ? types[output.takes] : dtype_of(output.type, types[0]));
      }
      std::copy(std::begin(types), std::end(types), std::begin(input_types_));
      std::copy(std::begin(types), std::end(types), std::begin(declared_types_));
      return {};
    });
  }

  int32_t getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs* /*shape_inputs*/,
                          int32_t /*num_shape_inputs*/, DimsExprs* outputs, int32_t num_outputs,
                          IExprBuilder& builder) noexcept override {
    return guarded([&]() -> Status {
      Call call = empty_call();
      LEANFLEET_RETURN_IF_ERROR(check_count(num_inputs));
      LEANFLEET_RETURN_IF_ERROR(check_outputs_count(num_outputs));
      for (int32_t k = 0; k < num_inputs; ++k) {
        int64_t sizes[Dims::MAX_DIMS];
        for (int32_t axis = 0; axis < inputs[k].nbDims; ++axis) {
          const IDimensionExpr& size = *inputs[k].d[axis];
          sizes[axis] = size.isConstant() ? size.getConstantValue() : kUnknown;
        }
        LEANFLEET_RETURN_IF_ERROR(set_input(input_index(k), inputs[k].nbDims, sizes, &call));
      }
      num_inputs_ = num_inputs;
      guess_unknown_sizes(&call);
      LEANFLEET_RETURN_IF_ERROR(bind_inputs(*layer_.op, call));
      return express(call, inputs, num_inputs, outputs, num_outputs, builder);
    });
  }

  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t /*num_outputs*/) noexcept override {
    if (!right_count(num_inputs) || position - num_inputs >= getNbOutputs()) return false;
    const PluginTensorDesc& desc = tensors[position].desc;
    DType found, t;
    if (desc.format != TensorFormat::kLINEAR || !from_trt(desc.type, &found)) return false;
    const bool input = position < num_inputs;
    const TypeVar type = input ? spec_.inputs[input_index(position)].type : spec_.outputs[outputs_[position - num_inputs]].type;
    if (type != TypeVar::kT && !has_own_type(type)) return found == dtype_of(type, found);
    if (found == DType::kInt32 || found == DType::kInt64 || (is_narrow(found) && type != TypeVar::kC)) return false;
    if (position == 0) return true;  // every operator's first input is a T
    if (!from_trt(tensors[0].desc.type, &t)) return false;
    if (type == TypeVar::kT) return found == t;
    if (!input) return found == type_taken(spec_.outputs[outputs_[position - num_inputs]], tensors, num_inputs);
    // The network's own type, not whichever a builder may choose: a state in another one would be rounded in each call, and
    // scales belong to a cache's numbers.
    const DType declared = declared_types_[input_index(position)];
    return found == (type == TypeVar::kC && !is_narrow(declared) ? t : declared);
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs, const DynamicPluginTensorDesc* /*outputs*/,
                          int32_t /*num_outputs*/) noexcept override {
    return guarded([&]() -> Status {
      Needs needs;
      return count_needs(inputs, num_inputs, &DynamicPluginTensorDesc::max, &needs);
    });
  }

  // The most that any of the profile's three shapes needs. It need not be the largest shape that needs most: a launch
  // that needs more than was planned takes memory of its context.
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs, const DynamicPluginTensorDesc* /*outputs*/,
                          int32_t /*num_outputs*/) const noexcept override {
    Needs most;
    guarded([&]() -> Status {
      for (const auto bound : {&DynamicPluginTensorDesc::max, &DynamicPluginTensorDesc::opt, &DynamicPluginTensorDesc::min}) {
        Needs needs;
        const Status status = count_needs(inputs, num_inputs, bound, &needs);
        if (!status.ok() && bound == &DynamicPluginTensorDesc::max) return status;
        if (!status.ok()) continue;
        most.workspace = std::max(most.workspace, needs.workspace);
        most.sync = std::max(most.sync, needs.sync);
      }
      return {};
    });
    const auto workspace = static_cast<int64_t>(most.workspace);
    planned_workspace_ = planned_workspace_ < 0 ? workspace : std::min(planned_workspace_, workspace);
    planned_sync_ = std::max(planned_sync_, static_cast<int64_t>(most.sync));
    return most.workspace;
  }

  int32_t getAliasedInput(int32_t output) noexcept override {
    if (output < 0 || output >= getNbOutputs()) return -1;
    const int taken = spec_.outputs[outputs_[output]].takes;
    for (int32_t k = 0; taken >= 0 && k < num_inputs_; ++k)
      if (input_index(k) == taken) return k;
    return -1;
  }

  const char* getMetadataString() noexcept override {
    guarded([&]() -> Status {
      metadata_.clear();
      for (int i = 0; i < spec_.num_attrs; ++i) {
        const AttrSpec& attr = spec_.attrs[i];
        const AttrValue& value = layer_.attrs[i];
        metadata_ += std::string(i ? " " : "") + attr.name + "=";
        if (attr.type == AttrType::kString) metadata_ += text_of(attr, value);
        else metadata_ += attr.type == AttrType::kFloat ? std::to_string(value.f) : std::to_string(value.i);
      }
      return {};
    });
    return metadata_.c_str();
  }

  // ---- IPluginV3OneRuntime

  IPluginV3* attachToContext(IPluginResourceContext* /*context*/) noexcept override {
    std::unique_ptr<Plugin> attached(static_cast<Plugin*>(clone()));
    if (attached == nullptr) return nullptr;
    const int32_t failed = guarded([&]() -> Status {
      attached->state_ = std::make_unique<ContextState>();
      // Without a device this is an engine being built for another machine: nothing will be launched.
      if (!current_cuda_target(nullptr, &attached->state_->target).ok()) return {};
      return attached->prepare_sync(static_cast<size_t>(std::max<int64_t>(layer_.planned_sync, 0)));
    });
    return failed ? nullptr : attached.release();
  }

  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t num_inputs, const PluginTensorDesc* /*outputs*/,
                        int32_t /*num_outputs*/) noexcept override {
    return guarded([&]() -> Status {
      LEANFLEET_RETURN_IF_ERROR(check_count(num_inputs));
      num_inputs_ = num_inputs;
      if (state_ == nullptr || state_->target.sm_count == 0) {  // only what the plugin thinks of the shapes
        Call call = empty_call();
        return bind(inputs, &call);
      }
      return bind_state(inputs);
    });
  }

  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* /*output_descs*/, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return guarded([&]() -> Status {
      if (state_ == nullptr) return Status::internal(name() + ": enqueue without attachToContext");
      ContextState& state = *state_;
      if (state.target.sm_count == 0) LEANFLEET_RETURN_IF_ERROR(current_cuda_target(nullptr, &state.target));
      if (!state.bound || !same_shapes(input_descs)) LEANFLEET_RETURN_IF_ERROR(bind_state(input_descs));
      Call& call = state.call;
      const bool planned = fits_plan();
      char* const memory = static_cast<char*>(planned ? workspace : state.scratch.data());
      for (int32_t k = 0; k < num_inputs_; ++k) call.inputs[input_index(k)].data = const_cast<void*>(inputs[k]);
      place_unread_outputs(memory + state.scratch_bytes, &call);
      for (size_t k = 0; k < outputs_.size(); ++k) call.outputs[outputs_[k]].data = outputs[k];
      state.target.stream = stream;
      Workspace ws(memory, state.scratch_bytes, state.sync.data(), state.sync_bytes);
      return run_cuda(*layer_.op, call, state.target, ws);
    });
  }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    const int32_t failed = guarded([&]() -> Status {
      fields_.clear();
      integers_.assign(static_cast<size_t>(spec_.num_attrs), 0);
      const auto text = [&](const char* name, const std::string& value) {
        fields_.emplace_back(name, value.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1));
      };
      for (int i = 0; i < spec_.num_attrs; ++i) {
        const AttrSpec& attr = spec_.attrs[i];
        const AttrValue& value = layer_.attrs[i];
        if (attr.type == AttrType::kString) {
          const char* chosen = text_of(attr, value);
          fields_.emplace_back(attr.name, chosen, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(chosen) + 1));
        } else if (attr.type == AttrType::kFloat) {
          fields_.emplace_back(attr.name, &value.f, PluginFieldType::kFLOAT32, 1);
        } else {
          integers_[i] = value.i;
          fields_.emplace_back(attr.name, &integers_[i], PluginFieldType::kINT64, 1);
        }
      }
      if (layer_.inputs.listed) text(kConnectedInputs, input_names_ = names(layer_.inputs, spec_.inputs));
      if (layer_.outputs.listed) text(kConnectedOutputs, output_names_ = names(layer_.outputs, spec_.outputs));
      text(kNodeField, layer_.node);
      planned_[0] = std::max(layer_.planned_workspace, planned_workspace_);
      planned_[1] = std::max(layer_.planned_sync, planned_sync_);
      fields_.emplace_back(kPlannedField, planned_, PluginFieldType::kINT64, 2);
      collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
      return {};
    });
    return failed ? nullptr : &collection_;
  }

 private:
  struct Needs {
    size_t workspace = 0, sync = 0;
  };

  std::string name() const { return std::string(spec_.name) + " '" + layer_.node + "'"; }

  int input_index(int32_t k) const { return layer_.inputs.listed ? layer_.inputs.indices[k] : k; }

  static std::string names(const Connections& connections, const TensorSpec* tensors) {
    std::string text;
    for (int i : connections.indices) text += (text.empty() ? "" : ",") + std::string(tensors[i].name);
    return text;
  }

  Call empty_call() const {
    Call call;
    call.spec = &spec_;
    call.node = layer_.node.c_str();
    std::copy(std::begin(layer_.attrs), std::end(layer_.attrs), call.attrs);
    return call;
  }

  // Whether the layer has as many inputs as are listed, or, without a list, no more than the operator.
  bool right_count(int32_t num_inputs) const {
    const auto listed = static_cast<int32_t>(layer_.inputs.indices.size());
    return layer_.inputs.listed ? num_inputs == listed : num_inputs <= spec_.num_inputs;
  }

  Status check_count(int32_t num_inputs) const {
    if (right_count(num_inputs)) return {};
    const auto refuse = [&](const std::string& expected) {
      return Status::invalid(name() + ": the layer has " + std::to_string(num_inputs) + " inputs; expected " + expected);
    };
    if (layer_.inputs.listed)
      return refuse(std::to_string(layer_.inputs.indices.size()) + ", " + names(layer_.inputs, spec_.inputs));
    return refuse("at most " + std::to_string(spec_.num_inputs));
  }

  Status check_outputs_count(int32_t num_outputs) const {
    if (num_outputs <= getNbOutputs()) return {};
    return Status::invalid(name() + ": the layer has " + std::to_string(num_outputs) + " outputs; expected at most " +
                           std::to_string(getNbOutputs()));
  }

  // The type of the input that an output takes; where it is absent, what the output has then.
  DType type_taken(const TensorSpec& output, const DynamicPluginTensorDesc* tensors, int32_t num_inputs) const {
    DType found = dtype_of(output.type, DType::kFloat32);
    for (int32_t k = 0; k < num_inputs; ++k)
      if (input_index(k) == output.takes) from_trt(tensors[k].desc.type, &found);
    return found;
  }

  // Types of the operator's inputs from those of the layer's; an absent input has the one that it would have.
  Status read_types(const DataType* inputs, int32_t num_inputs, DType* types) const {
    LEANFLEET_RETURN_IF_ERROR(check_count(num_inputs));
    for (int i = 0; i < kMaxInputs; ++i) types[i] = i < spec_.num_inputs ? input_types_[i] : DType::kFloat32;
    Call call = empty_call();
    for (int32_t k = 0; k < num_inputs; ++k) {
      const int i = input_index(k);
      const TensorSpec& tensor = spec_.inputs[i];
      if (tensor.type == TypeVar::kC && inputs[k] == DataType::kUINT8)
        return call.unsupported(std::string(tensor.name) +
                                " is uint8, which ONNX Runtime's layers take and TensorRT's plugins cannot; give it int8 or "
                                "float8e4m3fn, or the type of the other inputs");
      const bool known = from_trt(inputs[k], &types[i]);
      if (!known || (types[i] == DType::kInt64 && tensor.type != TypeVar::kL) ||
          (is_narrow(types[i]) && tensor.type != TypeVar::kC))
        return call.invalid(std::string(tensor.name) + " has type " + trt_type_name(inputs[k]) + "; expected " +
                            (tensor.type == TypeVar::kC ? "float32, float16, bfloat16, int8 or float8e4m3fn"
                             : tensor.type == TypeVar::kT || has_own_type(tensor.type)
                                 ? "float32, float16 or bfloat16"
                                 : dtype_name(dtype_of(tensor.type, DType::kFloat32))));
    }
    return check_narrow_types(call, types);
  }

  // TensorRT-RTX's builder fails on a network with both int8 and float8, by an assertion of its own.
  Status check_narrow_types(const Call& call, const DType* types) const {
    int first = -1;
    for (int i = 0; i < spec_.num_inputs; ++i) {
      if (spec_.inputs[i].type != TypeVar::kC || !is_narrow(types[i])) continue;
      if (first < 0) first = i;
      if (types[i] != types[first])
        return call.unsupported(
            std::string(spec_.inputs[first].name) + " is " + dtype_name(types[first]) + " and " + spec_.inputs[i].name + " " +
            dtype_name(types[i]) +
            "; a TensorRT engine has one of the two: give both caches the same type, or run the model in ONNX Runtime");
    }
    return {};
  }

  Status set_input(int index, int32_t rank, const int64_t* sizes, Call* call) const {
    Tensor& tensor = call->inputs[index];
    if (rank < 0 || rank > kMaxRank)
      return call->invalid(std::string(spec_.inputs[index].name) + " has rank " + std::to_string(rank) +
                           "; no input of an operator has more than " + std::to_string(kMaxRank));
    tensor.dtype = input_types_[index];
    tensor.rank = rank;
    std::copy(sizes, sizes + rank, tensor.shape);
    return {};
  }

  // Gives every axis whose `condition(size, axis)` holds the size that follows from `symbols`.
  template <class F>
  void set_sizes(Call* call, const int64_t* symbols, F&& condition) const {
    const NumberSizes sizes = {call->inputs, symbols};
    static_cast<void>(for_each_axis(spec_, given_in(*call), call->bnhd(), sizes, [&](const Axis& axis) -> Status {
      int64_t& size = call->inputs[axis.input].shape[axis.index];
      if (condition(size, axis.spec)) size = axis_size(axis.spec, sizes);
      return {};
    }));
  }

  // The largest size that occurs for each symbol; kUnknown: none is known.
  struct LargestSizes : NumberSizes {
    int64_t* largest;  // the symbols
    Status bind(const Axis& axis, int symbol, int64_t value) {
      if (symbol >= 0 && size(axis.input, axis.index) >= 0) largest[symbol] = std::max(largest[symbol], value);
      return {};
    }
  };
  void largest_sizes(const Call& call, int64_t* symbols) const {
    std::fill(symbols, symbols + kMaxSymbols, kUnknown);
    static_cast<void>(bind_symbols(spec_, given_in(call), call.bnhd(), LargestSizes{{call.inputs, symbols}, symbols}));
  }

  // Gives sizes that are open while a network is parsed a value that contradicts no other, so that what is known can
  // be checked like a call: what another input says, or 1; sizes that must be multiples or equal are made the same.
  void guess_unknown_sizes(Call* call) const {
    int64_t symbols[kMaxSymbols];
    largest_sizes(*call, symbols);
    int64_t guesses[kMaxSymbols];
    for (int i = 0; i < kMaxSymbols; ++i) guesses[i] = symbols[i] < 0 ? 1 : symbols[i];
    for (int i = 0; i < spec_.num_rules; ++i) {
      const RuleSpec& rule = spec_.rules[i];
      if (rule.kind != RuleKind::kMultiple && rule.kind != RuleKind::kEqual) continue;
      const int a = rule.args[0].index, b = rule.args[1].index;
      if (symbols[a] < 0) guesses[a] = guesses[b];
      else if (symbols[b] < 0 && rule.kind == RuleKind::kEqual) guesses[b] = guesses[a];
    }
    set_sizes(call, guesses, [](int64_t size, AxisSpec) { return size < 0; });
  }

  // Sizes that are expressions of the inputs' dimensions. A symbol is the first constant that its axes say, else what the
  // first of them says.
  struct ExpressionSizes {
    using Size = const IDimensionExpr*;
    const DimsExprs* inputs[kMaxInputs];  // null: absent
    IExprBuilder& builder;
    const IDimensionExpr* symbols[kMaxSymbols] = {};

    int rank(int input) const { return inputs[input] != nullptr ? inputs[input]->nbDims : -1; }
    const IDimensionExpr* size(int input, int index) const { return inputs[input]->d[index]; }
    const IDimensionExpr* symbol(int symbol) const { return symbols[symbol]; }
    static bool known(const IDimensionExpr* size) { return size != nullptr; }
    const IDimensionExpr* constant(int64_t value) const { return builder.constant(value); }
    const IDimensionExpr* moved(const IDimensionExpr* size, int64_t offset) const {
      if (offset == 0) return size;
      if (size->isConstant()) return constant(size->getConstantValue() + offset);
      return builder.operation(DimensionOperation::kSUM, *size, *constant(offset));
    }
    const IDimensionExpr* sum(const IDimensionExpr* size, int64_t times, const IDimensionExpr* other) const {
      if (other->isConstant()) return moved(size, times * other->getConstantValue());
      const IDimensionExpr* const product = builder.operation(DimensionOperation::kPROD, *other, *constant(std::abs(times)));
      return builder.operation(times < 0 ? DimensionOperation::kSUB : DimensionOperation::kSUM, *size, *product);
    }
    const IDimensionExpr* divided(const IDimensionExpr* size, int64_t times) const {
      if (size->isConstant()) return constant(size->getConstantValue() / times);
      return builder.operation(DimensionOperation::kFLOOR_DIV, *size, *constant(times));
    }
    const IDimensionExpr* larger(const IDimensionExpr* a, const IDimensionExpr* b) const {
      if (a->isConstant() && b->isConstant()) return constant(std::max(a->getConstantValue(), b->getConstantValue()));
      return builder.operation(DimensionOperation::kMAX, *a, *b);
    }
    static Status wrong_rank(int /*input*/) { return {}; }

    Status bind(const Axis& /*axis*/, int symbol, const IDimensionExpr* value) {
      if (symbol < 0) return {};
      const IDimensionExpr*& bound = symbols[symbol];
      if (bound == nullptr || (!bound->isConstant() && value->isConstant())) bound = value;
      return {};
    }
  };

  // The dimensions of the layer's outputs as expressions of the inputs' dimensions. `call` is bound.
  Status express(const Call& call, const DimsExprs* inputs, int32_t num_inputs, DimsExprs* outputs, int32_t num_outputs,
                 IExprBuilder& builder) const {
    ExpressionSizes sizes = {{}, builder};
    for (int32_t k = 0; k < num_inputs; ++k) sizes.inputs[input_index(k)] = &inputs[k];
    const Given given = given_in(call);
    for_each_attr_size(spec_, call.attrs, [&](int symbol, int64_t size) { sizes.symbols[symbol] = sizes.constant(size); });
    LEANFLEET_RETURN_IF_ERROR(bind_symbols(spec_, given, call.bnhd(), sizes));
    for (int32_t k = 0; k < num_outputs; ++k) {
      const TensorSpec& tensor = spec_.outputs[outputs_[k]];
      if (tensor.like >= 0) {
        if (sizes.inputs[tensor.like] == nullptr) continue;
        outputs[k] = *sizes.inputs[tensor.like];
        if (tensor.repeats < 0 || outputs[k].nbDims == 0) continue;
        const IDimensionExpr& times = *builder.constant(call.attrs[tensor.repeats].i);
        outputs[k].d[0] = builder.operation(DimensionOperation::kPROD, *outputs[k].d[0], times);
        continue;
      }
      const ShapeSpec& shape = *choose_shape(tensor, given, -1);
      outputs[k].nbDims = shape.rank;
      for (int i = 0; i < shape.rank; ++i) outputs[k].d[i] = axis_size(axis_at(shape, i, call.bnhd()), sizes);
    }
    return {};
  }

  // What a launch needs with the sizes at one end of a profile. Where bounds of tensors that share a size differ, the
  // largest counts.
  Status count_needs(const DynamicPluginTensorDesc* inputs, int32_t num_inputs, const Dims DynamicPluginTensorDesc::* bound,
                     Needs* needs) const {
    Call call = empty_call();
    LEANFLEET_RETURN_IF_ERROR(check_count(num_inputs));
    DataType types[kMaxInputs];
    DType input_types[kMaxInputs];
    for (int32_t k = 0; k < num_inputs; ++k) types[k] = inputs[k].desc.type;
    LEANFLEET_RETURN_IF_ERROR(read_types(types, num_inputs, input_types));
    for (int32_t k = 0; k < num_inputs; ++k) {
      const Dims& dims = inputs[k].*bound;
      LEANFLEET_RETURN_IF_ERROR(set_input(input_index(k), dims.nbDims, dims.d, &call));
      call.inputs[input_index(k)].dtype = input_types[input_index(k)];
    }
    int64_t symbols[kMaxSymbols];
    largest_sizes(call, symbols);
    set_sizes(&call, symbols, [](int64_t, AxisSpec axis) { return axis.symbol >= 0; });
    CudaTarget target;
    if (!current_cuda_target(nullptr, &target).ok()) target = kAnyDevice;
    LEANFLEET_RETURN_IF_ERROR(bind_inputs(*layer_.op, call));
    set_outputs(&call);
    Workspace counting;
    LEANFLEET_RETURN_IF_ERROR(run_cuda(*layer_.op, call, target, counting));
    needs->workspace = aligned(counting.scratch_bytes()) + place_unread_outputs(nullptr, &call);
    needs->sync = counting.sync_bytes();
    return {};
  }

  static void set_outputs(Call* call) {
    for (int i = 0; i < call->spec->num_outputs; ++i) call->outputs[i] = output_of(*call, i);
  }

  // Carves outputs that the attributes ask for and the layer does not have from `memory` (null: only counts); returns
  // their bytes.
  size_t place_unread_outputs(char* memory, Call* call) const {
    size_t bytes = 0;
    if (!layer_.outputs.listed) return bytes;
    for (int i = 0; i < spec_.num_outputs; ++i) {
      Tensor& output = call->outputs[i];
      if (!output.present() || std::find(outputs_.begin(), outputs_.end(), i) != outputs_.end()) continue;
      if (memory != nullptr) output.data = memory + bytes;
      bytes += aligned(static_cast<size_t>(output.elements() * element_size(output.dtype)));
    }
    return bytes;
  }

  // ---- At run time

  Status bind(const PluginTensorDesc* inputs, Call* call) {
    for (int32_t k = 0; k < num_inputs_; ++k) {
      const int i = input_index(k);
      if (!from_trt(inputs[k].type, &input_types_[i]))
        return call->invalid(std::string(spec_.inputs[i].name) + " has type " + trt_type_name(inputs[k].type));
      LEANFLEET_RETURN_IF_ERROR(set_input(i, inputs[k].dims.nbDims, inputs[k].dims.d, call));
    }
    LEANFLEET_RETURN_IF_ERROR(bind_inputs(*layer_.op, *call));
    set_outputs(call);
    return {};
  }

  Status bind_state(const PluginTensorDesc* inputs) {
    ContextState& state = *state_;
    state.bound = false;
    state.call = empty_call();
    LEANFLEET_RETURN_IF_ERROR(bind(inputs, &state.call));
    Workspace counting;
    LEANFLEET_RETURN_IF_ERROR(run_cuda(*layer_.op, state.call, state.target, counting));
    state.scratch_bytes = aligned(counting.scratch_bytes());
    state.unread_bytes = place_unread_outputs(nullptr, &state.call);
    LEANFLEET_RETURN_IF_ERROR(prepare_sync(counting.sync_bytes()));
    state.sync_bytes = counting.sync_bytes();
    if (!fits_plan())
      LEANFLEET_RETURN_IF_ERROR(state.scratch.reserve(state.call, "workspace", state.scratch_bytes + state.unread_bytes));
    state.bound = true;
    return {};
  }

  bool fits_plan() const {
    return static_cast<int64_t>(state_->scratch_bytes + state_->unread_bytes) <= layer_.planned_workspace;
  }

  Status prepare_sync(size_t bytes) {
    DeviceMemory& sync = state_->sync;
    if (bytes <= sync.bytes()) return {};
    const Call call = empty_call();
    LEANFLEET_RETURN_IF_ERROR(sync.reserve(call, "sync words", bytes));
    LEANFLEET_RETURN_IF_ERROR(cuda_status(call, "cudaMemset of sync words", cudaMemset(sync.data(), 0, sync.bytes())));
    return cuda_status(call, "cudaStreamSynchronize", cudaStreamSynchronize(nullptr));
  }

  bool same_shapes(const PluginTensorDesc* inputs) const {
    for (int32_t k = 0; k < num_inputs_; ++k) {
      const Tensor& tensor = state_->call.inputs[input_index(k)];
      if (inputs[k].dims.nbDims != tensor.rank || !std::equal(tensor.shape, tensor.shape + tensor.rank, inputs[k].dims.d))
        return false;
    }
    return true;
  }

  const Layer layer_;
  const OpSpec& spec_;
  mutable DType input_types_[kMaxInputs];     // as last told
  mutable DType declared_types_[kMaxInputs];  // as the network has them
  int32_t num_inputs_ = 0;
  std::vector<int> outputs_;  // of the layer: indices of the operator's
  mutable int64_t planned_workspace_ = -1, planned_sync_ = -1;
  std::unique_ptr<ContextState> state_;

  // What getFieldsToSerialize and getMetadataString hand out.
  std::vector<PluginField> fields_;
  std::vector<int64_t> integers_;
  std::string input_names_, output_names_, metadata_;
  int64_t planned_[2] = {};
  PluginFieldCollection collection_ = {};
};

}  // namespace

IPluginV3* create_plugin(const Layer& layer) noexcept {
  std::unique_ptr<Plugin> plugin;
  guarded([&]() -> Status {
    plugin = std::make_unique<Plugin>(layer);
    return {};
  });
  return plugin.release();
}

}  // namespace leanfleet::trt
