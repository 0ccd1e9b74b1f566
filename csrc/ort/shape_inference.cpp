// Shapes of outputs from the schema's tables when a model is loaded. Symbolic dimensions such as "batch" are
// kept. ONNX Runtime drops what this returns as an error: the kernel reports wrong attributes and shapes.
#include <atomic>
#include <memory>
#include <vector>

#include "core/bind_shapes.h"
#include "ort/ort_common.h"

namespace leanfleet::ort {

namespace {

// A size, or its name where the size is -1. Neither: unknown.
struct Dim {
  int64_t size = -1;
  std::string name;
};

struct Shape {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // undefined: an input that is absent
  std::vector<Dim> dims;  // empty where the rank is unknown; no tensor of an operator here is a scalar
};

// The context owns the info that it returns.
Status read_input(const OrtApi& ort, const OrtShapeInferContext* context, size_t index, Shape* shape) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.ShapeInferContext_GetInputTypeShape(context, index, &info));
  LEANFLEET_TRY_ORT(ort, ort.GetTensorElementType(info, &shape->type));
  size_t rank = 0;
  LEANFLEET_TRY_ORT(ort, ort.GetDimensionsCount(info, &rank));
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank);
  LEANFLEET_TRY_ORT(ort, ort.GetDimensions(info, sizes.data(), rank));
  LEANFLEET_TRY_ORT(ort, ort.GetSymbolicDimensions(info, names.data(), rank));
  for (size_t i = 0; i < rank; ++i) shape->dims.push_back({sizes[i], names[i] != nullptr ? names[i] : ""});
  return {};
}

Status write_output(const OrtApi& ort, OrtShapeInferContext* context, size_t index, const Shape& shape) {
  OrtTensorTypeAndShapeInfo* created = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.CreateTensorTypeAndShapeInfo(&created));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(ort.ReleaseTensorTypeAndShapeInfo)> info(
      created, ort.ReleaseTensorTypeAndShapeInfo);
  std::vector<int64_t> sizes;
  std::vector<const char*> names;
  for (const Dim& dim : shape.dims) {
    sizes.push_back(dim.size);
    names.push_back(dim.name.c_str());
  }
  LEANFLEET_TRY_ORT(ort, ort.SetTensorElementType(created, shape.type));
  LEANFLEET_TRY_ORT(ort, ort.SetDimensions(created, sizes.data(), sizes.size()));
  LEANFLEET_TRY_ORT(ort, ort.SetSymbolicDimensions(created, names.data(), names.size()));
  return from_ort(ort, ort.ShapeInferContext_SetOutputTypeShape(context, index, created));
}

// A name that occurs nowhere else. Written without a name an unknown size of -1 would count as a known one.
std::string fresh_name() {
  static std::atomic<uint64_t> count{0};
  return "leanfleet_unknown_" + std::to_string(count.fetch_add(1));
}

// How many numbers an element of a tensor counts for in the size of an axis: two int4 of a byte in that of the last one.
int64_t numbers_each(ONNXTensorElementDataType type, bool last) {
  return last && type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 ? leanfleet::numbers_each(DType::kUint8) : 1;
}

// Sizes that are numbers, names or unknown. A number is worth more than a name.
struct SymbolicSizes {
  using Size = Dim;
  const Shape* inputs;
  Dim symbols[kMaxSymbols];

  int rank(int input) const { return inputs[input].dims.empty() ? -1 : static_cast<int>(inputs[input].dims.size()); }
  Dim size(int input, int index) const {
    const Dim& dim = inputs[input].dims[index];
    const int64_t each = numbers_each(inputs[input].type, index == rank(input) - 1);
    return each == 1 ? dim : known(dim) ? constant(dim.size * each) : Dim{};
  }
  const Dim& symbol(int symbol) const { return symbols[symbol]; }
  static bool known(const Dim& dim) { return dim.size >= 0; }
  static Dim constant(int64_t value) { return {value, ""}; }
  static Dim moved(const Dim& dim, int64_t offset) {
    if (offset == 0) return dim;
    return known(dim) ? constant(dim.size + offset) : Dim{};
  }
  static Dim sum(const Dim& dim, int64_t times, const Dim& other) {
    return known(dim) && known(other) ? constant(dim.size + times * other.size) : Dim{};
  }
  static Dim divided(const Dim& dim, int64_t times) { return known(dim) ? constant(dim.size / times) : Dim{}; }
  static Dim repeated(const Dim& dim, int64_t times) {
    if (times == 1) return dim;
    return known(dim) ? constant(dim.size * times) : Dim{};
  }
  static Dim larger(const Dim& a, const Dim& b) {
    if (known(a) && known(b)) return constant(a.size > b.size ? a.size : b.size);
    return !known(a) && !known(b) && !a.name.empty() && a.name == b.name ? a : Dim{};
  }
  static Status wrong_rank(int /*input*/) { return {}; }

  Status bind(const Axis& /*axis*/, int symbol, const Dim& value) {
    if (symbol < 0) return {};
    Dim& bound = symbols[symbol];
    if (known(value)) bound = constant(value.size);
    else if (!known(bound) && !value.name.empty()) bound.name = value.name;
    return {};
  }
};

Status infer(const OrtApi& ort, const OpSpec& spec, OrtShapeInferContext* context) {
  AttrValue attrs[kMaxAttrs];
  LEANFLEET_RETURN_IF_ERROR(read_attributes(spec, "", InferenceAttributes(ort, context), attrs));
  const bool bnhd = spec.layout >= 0 && attrs[spec.layout].i == 1;

  Shape inputs[kMaxInputs];
  size_t num_inputs = 0;
  LEANFLEET_TRY_ORT(ort, ort.ShapeInferContext_GetInputCount(context, &num_inputs));
  Given given = given_attrs(spec, attrs);
  ONNXTensorElementDataType t_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  for (size_t i = 0; i < num_inputs && i < static_cast<size_t>(spec.num_inputs); ++i) {
    LEANFLEET_RETURN_IF_ERROR(read_input(ort, context, i, &inputs[i]));
    if (inputs[i].type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) continue;
    given |= given_input(static_cast<int>(i));
    if (spec.inputs[i].type == TypeVar::kT) t_type = inputs[i].type;
  }
  SymbolicSizes sizes = {inputs, {}};
  for_each_attr_size(spec, attrs, [&](int symbol, int64_t size) { sizes.symbols[symbol] = sizes.constant(size); });
  LEANFLEET_RETURN_IF_ERROR(bind_symbols(spec, given, bnhd, sizes));
  for (Dim& symbol : sizes.symbols)  // outputs of one unknown size share its name
    if (symbol.size < 0 && symbol.name.empty()) symbol.name = fresh_name();

  for (int i = 0; i < spec.num_outputs; ++i) {
    const TensorSpec& output = spec.outputs[i];
    if (!output_exists(spec, attrs, i)) continue;
    Shape shape;
    if (output.like >= 0) {
      shape = inputs[output.like];
      if (output.repeats >= 0 && !shape.dims.empty()) shape.dims[0] = sizes.repeated(shape.dims[0], attrs[output.repeats].i);
    } else if (const ShapeSpec* chosen = choose_shape(output, given, -1)) {
      for (int k = 0; k < chosen->rank; ++k) shape.dims.push_back(axis_size(axis_at(*chosen, k, bnhd), sizes));
    }
    // One operator's function serves every type T, so T is what this node's inputs say.
    const bool taken = has_own_type(output.type) && inputs[output.takes].type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    shape.type = output.type == TypeVar::kT                                  ? t_type
                 : taken                                                     ? inputs[output.takes].type
                 : dtype_of(output.type, DType::kFloat32) == DType::kFloat32 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                 : output.type == TypeVar::kL                                ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                                                             : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (shape.dims.empty()) continue;
    if (const int64_t each = output.like < 0 ? numbers_each(shape.type, true) : 1; each > 1) {
      Dim& last = shape.dims.back();
      last = last.size >= 0 ? Dim{last.size / each, ""} : Dim{};
    }
    for (Dim& dim : shape.dims)
      if (dim.size < 0 && dim.name.empty()) dim.name = fresh_name();
    // Refused for an output that the node does not have: the next ones may still be there.
    static_cast<void>(write_output(ort, context, i, shape));
  }
  return {};
}

}  // namespace

OrtStatus* ORT_API_CALL infer_output_shapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const CustomOp& self = *static_cast<const CustomOp*>(op);
  return guarded(*self.ort, [&] { return infer(*self.ort, *self.op->spec, context); });
}

}  // namespace leanfleet::ort
