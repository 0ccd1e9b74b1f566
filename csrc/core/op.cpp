// Table-driven checks of a call against its schema, and the entry to an operator's implementation.
#include "core/op.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/bind_shapes.h"
#include "core/cpu_isa.h"
#include "core/cuda_target.h"
#include "core/op_specs.h"

namespace leanfleet {

namespace {

std::string prefix(const OpSpec& spec, const char* node) {
  std::string text = spec.name;
  if (node != nullptr && node[0] != '\0') text += std::string(" '") + node + "'";
  return text + ": ";
}

std::string number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return buffer;
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) text += (i ? "," : "") + std::to_string(tensor.shape[i]);
  return text + "]";
}

std::string axis_text(const OpSpec& spec, AxisSpec axis) {
  if (axis.symbol < 0) return std::to_string(axis.offset);
  std::string text = spec.symbols[axis.symbol];
  if (axis.plus >= 0 && axis.times == 0) return "max(" + text + "," + spec.symbols[axis.plus] + ")";
  if (axis.offset != 0) text += "+" + std::to_string(axis.offset);
  if (axis.plus >= 0) text += "+" + std::to_string(axis.times) + spec.symbols[axis.plus];
  return text;
}

std::string expected_shape(const OpSpec& spec, const ShapeSpec& shape, bool bnhd) {
  std::string text = "[";
  for (int i = 0; i < shape.rank; ++i) text += (i ? "," : "") + axis_text(spec, axis_at(shape, i, bnhd));
  return text + "]";
}

DType dtype_of(const Call& call, TypeVar type) {
  for (int i = 0; i < call.spec->num_inputs; ++i)
    if (call.spec->inputs[i].type == TypeVar::kT && call.inputs[i].present()) return dtype_of(type, call.inputs[i].dtype);
  return dtype_of(type, DType::kFloat32);
}

Status check_type(const Call& call, const TensorSpec& spec, const Tensor& tensor) {
  const DType expected = dtype_of(call, spec.type);
  const OwnTypes own = own_types(spec.type, dtype_of(call, TypeVar::kT));
  if (std::find(own.begin(), own.end(), tensor.dtype) != own.end()) return {};
  const bool integer =
      spec.type == TypeVar::kT && (tensor.dtype == DType::kInt32 || tensor.dtype == DType::kInt64 || is_narrow(tensor.dtype));
  if (tensor.dtype == expected && !integer) return {};
  const std::string found = std::string(spec.name) + " has type " + dtype_name(tensor.dtype);
  if (integer) return call.invalid(found + "; expected float32, float16 or bfloat16");
  if (spec.type == TypeVar::kC) {
    return call.invalid(found + "; expected " + dtype_name(expected) + ", the type of " + call.spec->inputs[0].name + ", or " +
                        narrow_type_names());
  }
  if (own.count > 1)
    return call.invalid(found + "; expected float32, or " + dtype_name(own.types[1]) + ", the type of " +
                        call.spec->inputs[0].name);
  if (spec.type == TypeVar::kT)
    return call.invalid(found + ", but " + call.spec->inputs[0].name + " has " + dtype_name(expected) +
                        "; these must be the same");
  return call.invalid(found + "; expected " + dtype_name(expected));
}

bool holds(const ShapeSpec& shape, Given given) {
  return std::all_of(shape.conditions, shape.conditions + shape.num_conditions, [&](Ref condition) {
    return given >> (condition.index + (condition.kind == RefKind::kAttr ? kMaxInputs : 0)) & 1;
  });
}

// Whether the shape is one of those that count: of all whose conditions hold, the ones with the most of them.
bool counts(const TensorSpec& tensor, const ShapeSpec& shape, Given given) {
  return holds(shape, given) && std::none_of(tensor.shapes, tensor.shapes + tensor.num_shapes, [&](const ShapeSpec& other) {
           return other.num_conditions > shape.num_conditions && holds(other, given);
         });
}

// Binds call.dims to the sizes of the inputs and refuses sizes that contradict each other.
struct CheckedSizes : NumberSizes {
  Call& call;
  Given given;
  int origin[kMaxSymbols] = {};  // the input that bound a symbol

  CheckedSizes(Call& call, Given given) : NumberSizes{call.inputs, call.dims}, call(call), given(given) {}

  std::string found(int input) const {
    return std::string(call.spec->inputs[input].name) + " has shape " + shape_text(call.inputs[input]);
  }
  std::string where(const Axis& axis) const {
    return found(axis.input) + ": axis " + std::to_string(axis.index) + " of " +
           expected_shape(*call.spec, *axis.shape, call.bnhd()) + " is " +
           std::to_string(call.inputs[axis.input].shape[axis.index]) +
           (numbers_each(axis.input, axis.index) > 1 ? " bytes of two int4" : "");
  }
  std::string gives(int symbol) const {
    return std::string(call.spec->inputs[origin[symbol]].name) + " gives " + call.spec->symbols[symbol] + " = " +
           std::to_string(call.dims[symbol]);
  }
  std::string because(int symbol) const { return ", because " + gives(symbol); }

  Status wrong_rank(int input) const {
    const TensorSpec& spec = call.spec->inputs[input];
    std::string expected;
    for (int i = 0; i < spec.num_shapes; ++i) {
      const ShapeSpec& s = spec.shapes[i];
      if (!counts(spec, s, given)) continue;
      expected += (expected.empty() ? "" : " or ") + expected_shape(*call.spec, s, call.bnhd());
    }
    return call.invalid(found(input) + ", rank " + std::to_string(rank(input)) + "; expected " + expected);
  }

  Status bind(const Axis& axis, int symbol, int64_t value) {
    const int64_t found = size(axis.input, axis.index), rest = found - value;
    if (found > kMaxAxis) return call.invalid(where(axis) + "; an axis has at most " + std::to_string(kMaxAxis));
    const bool sum = axis.spec.plus >= 0;
    if (symbol < 0)
      return value == 0 ? Status{}
                        : call.invalid(where(axis) + "; expected " + std::to_string(rest) +
                                       (sum ? because(axis.spec.symbol) + " and " + gives(axis.spec.plus) : std::string()));
    if (value < 1)
      return call.invalid(where(axis) + (sum ? "; expected at least " : "; it is empty, expected at least ") +
                          std::to_string(1 + rest) + (sum ? because(axis.spec.plus) : std::string()));
    int64_t& bound = call.dims[symbol];
    if (bound < 0) {
      bound = value;
      origin[symbol] = axis.input;
    } else if (bound != value) {
      const int64_t expected = bound + rest, each = numbers_each(axis.input, axis.index);
      if (expected % each != 0)
        return call.invalid(gives(symbol) + ", an odd number, and " + call.spec->inputs[axis.input].name +
                            " is uint8, whose bytes hold two int4 each; give it another type, or an even " +
                            call.spec->symbols[symbol]);
      return call.invalid(where(axis) + "; expected " + std::to_string(expected / each) + because(symbol));
    }
    return {};
  }
};

bool is_on(const Call& call, Ref ref) {
  if (ref.kind == RefKind::kInput) return call.inputs[ref.index].present();
  const AttrSpec& spec = call.spec->attrs[ref.index];
  const AttrValue& value = call.attrs[ref.index];
  if (spec.type == AttrType::kFloat) return !spec.has_off || value.f != static_cast<float>(spec.off);
  return spec.has_off ? value.i != static_cast<int64_t>(spec.off) : value.i != 0;
}

std::string ref_name(const Call& call, Ref ref) {
  if (ref.kind == RefKind::kInput) return call.spec->inputs[ref.index].name;
  return call.spec->attrs[ref.index].name;
}

// "append = 1" for a switched-on attribute, "new_key" for a present input.
std::string ref_state(const Call& call, Ref ref) {
  if (ref.kind == RefKind::kInput) return std::string("input ") + ref_name(call, ref);
  const AttrSpec& spec = call.spec->attrs[ref.index];
  const AttrValue& value = call.attrs[ref.index];
  return ref_name(call, ref) + " = " + (spec.type == AttrType::kFloat ? number(value.f) : std::to_string(value.i));
}

Status check_rule(const Call& call, const RuleSpec& rule) {
  if (rule.condition.kind != RefKind::kNone && !is_on(call, rule.condition)) return {};
  const OpSpec& op = *call.spec;
  const Ref* args = rule.args;
  switch (rule.kind) {
    case RuleKind::kMultiple: {
      const int64_t a = call.dims[args[0].index], b = call.dims[args[1].index];
      if (a < 0 || b < 0 || a % b == 0) return {};
      return call.invalid(std::string(op.symbols[args[0].index]) + " = " + std::to_string(a) + " is not a multiple of " +
                          op.symbols[args[1].index] + " = " + std::to_string(b) + "; each of the " + op.symbols[args[1].index] +
                          (op.symbols[args[1].index][0] == 'H' ? " heads" : " blocks") + " must serve the same number of the " +
                          op.symbols[args[0].index] + (op.symbols[args[0].index][0] == 'H' ? " heads" : " columns"));
    }
    case RuleKind::kFixed: {
      const int64_t size = call.dims[args[0].index];
      if (size == rule.value) return {};
      return call.invalid(std::string(op.symbols[args[0].index]) + " = " + std::to_string(size) + "; with " +
                          ref_name(call, rule.condition) + " it must be " + std::to_string(rule.value));
    }
    case RuleKind::kEqual: {
      const int64_t a = call.dims[args[0].index], b = call.dims[args[1].index];
      if (a == b) return {};
      return call.invalid(std::string(op.symbols[args[0].index]) + " = " + std::to_string(a) + " and " +
                          op.symbols[args[1].index] + " = " + std::to_string(b) + "; with " + ref_state(call, rule.condition) +
                          " they must be the same");
    }
    case RuleKind::kTogether: {
      int given = -1, missing = -1;
      for (int i = 0; i < rule.num_args; ++i) (is_on(call, args[i]) ? given : missing) = i;
      if (given < 0 || missing < 0) return {};
      const std::string context =
          rule.condition.kind == RefKind::kNone ? std::string() : " (with " + ref_state(call, rule.condition) + ")";
      return call.invalid(ref_name(call, args[missing]) + " is missing, " + ref_name(call, args[given]) +
                          " is given; give both or neither" + context);
    }
    case RuleKind::kExclusive:
      if (!is_on(call, args[0]) || !is_on(call, args[1])) return {};
      return call.invalid(ref_name(call, args[0]) + " and " + ref_name(call, args[1]) + " are both given; give one of them");
    case RuleKind::kNeeds: {
      if (!is_on(call, args[0])) return {};
      std::string needed;
      for (int i = 1; i < rule.num_args; ++i) {
        if (is_on(call, args[i])) return {};
        needed += i > 1 ? ", or " : "";
        if (args[i].kind == RefKind::kInput) {
          needed += "input " + ref_name(call, args[i]) + ", which is missing";
        } else {
          const bool counts = op.attrs[args[i].index].type == AttrType::kInt;
          needed += ref_name(call, args[i]) + (counts ? " = 1 or more" : " = 1") + "; found " + ref_state(call, args[i]);
        }
      }
      return call.invalid(ref_state(call, args[0]) + " needs " + needed);
    }
  }
  return {};
}

Status check_elements(const Call& call, const TensorSpec& spec, const Tensor& tensor) {
  double count = 1.0;
  for (int i = 0; i < tensor.rank; ++i) count *= static_cast<double>(tensor.shape[i]);
  if (count <= static_cast<double>(kMaxElements)) return {};
  return call.invalid(std::string(spec.name) + " has shape " + shape_text(tensor) + "; a tensor has at most 2^47 elements");
}

Status refuse_attr(const OpSpec& spec, const char* node, const AttrSpec& attr, const std::string& found,
                   const std::string& allowed) {
  return Status::invalid(prefix(spec, node) + "attribute " + attr.name + " is " + found + "; expected " + allowed);
}

Status check_range(const OpSpec& spec, const char* node, const AttrSpec& attr, double value) {
  if (!std::isfinite(value)) return refuse_attr(spec, node, attr, number(value), "a finite number");
  if (attr.has_off && value == attr.off) return {};
  if (attr.has_min && value < attr.min)
    return refuse_attr(spec, node, attr, number(value),
                       number(attr.min) + " or more" + (attr.has_off ? ", or " + number(attr.off) + " for off" : ""));
  return {};
}

const char* const kTypeWords[] = {"a bool", "an integer", "a float", "a string"};

Status wrong_kind(const OpSpec& spec, const char* node, const AttrSpec& attr, const char* found) {
  return refuse_attr(spec, node, attr, found, kTypeWords[static_cast<int>(attr.type)]);
}

}  // namespace

int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kFloat8e4m3fn:
    case DType::kUint8: return 1;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kInt64: return 8;
  }
  return 0;
}

bool is_narrow(DType dtype) {
  return std::find(std::begin(kNarrowTypes), std::end(kNarrowTypes), dtype) != std::end(kNarrowTypes);
}

std::string narrow_type_names() {
  constexpr int kCount = static_cast<int>(std::size(kNarrowTypes));
  std::string text;
  for (int i = 0; i < kCount; ++i)
    text += (i == 0 ? "" : i == kCount - 1 ? " or " : ", ") + std::string(dtype_name(kNarrowTypes[i]));
  return text;
}

OwnTypes own_types(TypeVar type, DType t) {
  OwnTypes own;
  const auto add = [&](DType dtype) {
    if (std::find(own.begin(), own.end(), dtype) == own.end()) own.types[own.count++] = dtype;
  };
  if (type == TypeVar::kC) {
    add(t);
    for (const DType narrow : kNarrowTypes) add(narrow);
  } else if (type == TypeVar::kS) {
    add(DType::kFloat32);
    add(t);
  }
  return own;
}

bool has_own_type(TypeVar type) { return type == TypeVar::kC || type == TypeVar::kS; }

DType dtype_of(TypeVar type, DType t) {
  switch (type) {
    case TypeVar::kF:
    case TypeVar::kS: return DType::kFloat32;
    case TypeVar::kI: return DType::kInt32;
    case TypeVar::kL: return DType::kInt64;
    case TypeVar::kT:
    case TypeVar::kC: break;
  }
  return t;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kInt8: return "int8";
    case DType::kFloat8e4m3fn: return "float8e4m3fn";
    case DType::kUint8: return "uint8";
  }
  return "unknown";
}

Status Call::invalid(const std::string& text) const { return Status::invalid(prefix(*spec, node) + text); }
Status Call::unsupported(const std::string& text) const { return Status::unsupported(prefix(*spec, node) + text); }

Given given_input(int input) { return Given{1} << input; }

Given given_attrs(const OpSpec& spec, const AttrValue* attrs) {
  Given given = 0;
  for (int i = 0; i < spec.num_attrs; ++i)
    if (spec.attrs[i].type == AttrType::kBool && attrs[i].i != 0) given |= Given{1} << (kMaxInputs + i);
  return given;
}

Given given_in(const Call& call) {
  Given given = given_attrs(*call.spec, call.attrs);
  for (int i = 0; i < call.spec->num_inputs; ++i)
    if (call.inputs[i].present()) given |= given_input(i);
  return given;
}

const ShapeSpec* choose_shape(const TensorSpec& tensor, Given given, int rank) {
  for (int i = 0; i < tensor.num_shapes; ++i) {
    const ShapeSpec& shape = tensor.shapes[i];
    if ((rank < 0 || rank == shape.rank) && counts(tensor, shape, given)) return &shape;
  }
  return nullptr;
}

AxisSpec axis_at(const ShapeSpec& shape, int i, bool bnhd) {
  if (bnhd && shape.swap >= 0) {
    if (i == shape.swap) return shape.axes[i + 1];
    if (i == shape.swap + 1) return shape.axes[i - 1];
  }
  return shape.axes[i];
}

void default_attrs(const OpSpec& spec, AttrValue* attrs) {
  for (int i = 0; i < spec.num_attrs; ++i) {
    const AttrSpec& attr = spec.attrs[i];
    attrs[i] = {attr.default_int, attr.default_float, attr.default_text != nullptr ? attr.default_text : ""};
  }
}

Status set_attr_int(const OpSpec& spec, const char* node, int index, int64_t value, AttrValue* attrs) {
  const AttrSpec& attr = spec.attrs[index];
  if (attr.type == AttrType::kFloat || attr.type == AttrType::kString) return wrong_kind(spec, node, attr, "an integer");
  if (attr.type == AttrType::kBool && value != 0 && value != 1)
    return refuse_attr(spec, node, attr, std::to_string(value), "0 or 1");
  if (attr.refuse != nullptr && value != 0)
    return Status::unsupported(prefix(spec, node) + "attribute " + attr.name + " is " + std::to_string(value) + ": " +
                               attr.refuse);
  LEANFLEET_RETURN_IF_ERROR(check_range(spec, node, attr, static_cast<double>(value)));
  attrs[index].i = value;
  return {};
}

Status set_attr_float(const OpSpec& spec, const char* node, int index, float value, AttrValue* attrs) {
  const AttrSpec& attr = spec.attrs[index];
  if (attr.type != AttrType::kFloat) return wrong_kind(spec, node, attr, "a float");
  LEANFLEET_RETURN_IF_ERROR(check_range(spec, node, attr, value));
  attrs[index].f = value;
  return {};
}

Status set_attr_string(const OpSpec& spec, const char* node, int index, const std::string& value, AttrValue* attrs) {
  const AttrSpec& attr = spec.attrs[index];
  if (attr.type != AttrType::kString) return wrong_kind(spec, node, attr, "a string");
  if (attr.num_values == 0) {
    if (value.empty()) return refuse_attr(spec, node, attr, "''", "a text that is not empty");
    attrs[index].s = value;
    return {};
  }
  std::string allowed;
  for (int i = 0; i < attr.num_values; ++i) {
    if (value == attr.values[i]) {
      if (i < attr.num_served) {
        attrs[index].i = i;
        return {};
      }
      allowed.clear();
      for (int j = 0; j < attr.num_served; ++j) allowed += (j ? ", " : "") + std::string(attr.values[j]);
      return Status::unsupported(prefix(spec, node) + "attribute " + attr.name + " is '" + value +
                                 "', which only the PyTorch reference has; the kernels have " + allowed);
    }
    if (i < attr.num_served) allowed += (i ? ", " : "") + std::string(attr.values[i]);
  }
  return refuse_attr(spec, node, attr, "'" + value + "'", "one of " + allowed);
}

Status bind_inputs(const Op& op, Call& call) {
  const OpSpec& spec = *op.spec;
  for (int i = 0; i < kMaxSymbols; ++i) call.dims[i] = -1;
  for_each_attr_size(spec, call.attrs, [&](int symbol, int64_t size) { call.dims[symbol] = size; });
  const Given given = given_in(call);
  for (int i = 0; i < spec.num_inputs; ++i) {
    if (!call.inputs[i].present()) {
      if (!spec.inputs[i].optional) return call.invalid(std::string("input ") + spec.inputs[i].name + " is missing");
      continue;
    }
    LEANFLEET_RETURN_IF_ERROR(check_type(call, spec.inputs[i], call.inputs[i]));
  }
  // Rules about presence come before shapes: two cache variants at once would otherwise be reported as a wrong rank.
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < spec.num_rules; ++i) {
      const bool about_sizes = spec.rules[i].args[0].kind == RefKind::kSymbol;
      if (about_sizes == (pass == 1)) LEANFLEET_RETURN_IF_ERROR(check_rule(call, spec.rules[i]));
    }
    if (pass == 0) LEANFLEET_RETURN_IF_ERROR(bind_symbols(spec, given, call.bnhd(), CheckedSizes(call, given)));
  }
  for (int i = 0; i < spec.num_inputs; ++i) LEANFLEET_RETURN_IF_ERROR(check_elements(call, spec.inputs[i], call.inputs[i]));
  for (int i = 0; i < spec.num_outputs; ++i)
    LEANFLEET_RETURN_IF_ERROR(check_elements(call, spec.outputs[i], output_of(call, i)));
  return op.impl->check != nullptr ? op.impl->check(call) : Status{};
}

bool output_exists(const OpSpec& spec, const AttrValue* attrs, int output) {
  const TensorSpec& tensor = spec.outputs[output];
  for (int i = 0; i < tensor.num_when; ++i)
    if (attrs[tensor.when[i]].i == 0) return false;
  return true;
}

DType output_type(const Call& call, int output) {
  const TensorSpec& spec = call.spec->outputs[output];
  const bool taken = has_own_type(spec.type) && call.inputs[spec.takes].present();
  return taken ? call.inputs[spec.takes].dtype : dtype_of(call, spec.type);
}

Tensor output_of(const Call& call, int output) {
  const TensorSpec& spec = call.spec->outputs[output];
  Tensor tensor;
  if (!output_exists(*call.spec, call.attrs, output)) return tensor;
  if (spec.like >= 0) {
    tensor = call.inputs[spec.like];
    tensor.data = nullptr;
    tensor.dtype = dtype_of(call, spec.type);
    if (spec.repeats >= 0 && tensor.rank > 0 &&
        __builtin_mul_overflow(tensor.shape[0], call.attrs[spec.repeats].i, &tensor.shape[0]))
      tensor.shape[0] = INT64_MAX;  // more elements than any tensor has
    return tensor;
  }
  tensor.dtype = output_type(call, output);
  const ShapeSpec& shape = *choose_shape(spec, given_in(call), -1);
  tensor.rank = shape.rank;
  const NumberSizes sizes = {call.inputs, call.dims};
  for (int i = 0; i < shape.rank; ++i) tensor.shape[i] = axis_size(axis_at(shape, i, call.bnhd()), sizes);
  tensor.shape[shape.rank - 1] /= numbers_each(tensor.dtype);
  return tensor;
}

Status check_outputs(const Call& call) {
  for (int i = 0; i < call.spec->num_outputs; ++i) {
    const Tensor expected = output_of(call, i);
    const Tensor& found = call.outputs[i];
    if (!expected.present()) continue;
    const std::string name = std::string("output ") + call.spec->outputs[i].name;
    if (!found.present()) return call.invalid(name + " is missing; the attributes ask for it");
    bool same = found.rank == expected.rank && found.dtype == expected.dtype;
    for (int axis = 0; same && axis < expected.rank; ++axis) same = found.shape[axis] == expected.shape[axis];
    if (!same)
      return call.invalid(name + " is " + dtype_name(found.dtype) + shape_text(found) + "; expected " +
                          dtype_name(expected.dtype) + shape_text(expected));
  }
  return {};
}

bool check_requested() {
  const char* value = std::getenv("LEANFLEET_CHECK");
  return value != nullptr && value[0] != '\0' && std::strcmp(value, "0") != 0;
}

Status run_cpu(const Op& op, const Call& call, const CpuTarget& target, Workspace& ws) {
  if (const char* unknown = unknown_cpu_isa())
    return call.invalid(std::string("the environment variable LEANFLEET_CPU is '") + unknown + "'; expected " + kCpuIsaNames +
                        ", or nothing for the best that this processor has");
  if (!ws.counting() && op.impl->check_values != nullptr)
    LEANFLEET_RETURN_IF_ERROR(op.impl->check_values(call, check_requested()));
  return op.impl->run_cpu(call, target, ws);
}

Status run_cuda(const Op& op, const Call& call, const CudaTarget& target, Workspace& ws) {
  if (op.impl->run_cuda == nullptr)
    return call.unsupported("this build has no CUDA kernel for it; use the CPU provider, or build with nvcc present");
#ifdef LEANFLEET_CUDA
  if (!ws.counting() && op.impl->check_values != nullptr && check_requested())
    LEANFLEET_RETURN_IF_ERROR(check_values_on_device(op, call, target));
#endif
  return op.impl->run_cuda(call, target, ws);
}

}  // namespace leanfleet
