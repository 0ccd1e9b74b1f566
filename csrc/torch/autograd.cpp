// Autograd of PyTorch operators, built against the installed PyTorch: its stable interface has none.
// leanfleet.export.torch_autograd compiles this file. It knows no operator: tables say which operator computes gradients, from
// which of a call's inputs, outputs and gradients.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;
using torch::autograd::variable_list;

enum Source : int32_t { kInput, kOutput, kGradient };  // of a tensor that the gradients' operator takes
enum Value : int32_t { kSame, kWanted, kDefault };     // of an attribute of the gradients' operator

struct Argument {
  int32_t source, index, optional;
};
struct Attribute {
  int32_t value, index;  // index of the call's attribute; kWanted: a bit each, the inputs whose gradients it asks for
};

struct Table {
  std::string name;  // for messages
  int inputs = 0, outputs = 0;
  std::vector<int32_t> refused_on;  // bool attributes that take the fallback
  std::vector<Argument> arguments;  // of the gradients' operator; empty: the operator has no gradients
  std::vector<Attribute> attributes;
  std::vector<int32_t> results;      // for each input the output that is its gradient, -1: it has none
  std::vector<bool> differentiable;  // outputs
  c10::optional<c10::OperatorHandle> gradients;
  c10::optional<c10::OperatorHandle> fallback;
  std::vector<bool> used;  // inputs that the gradients' operator takes
};

int (*refused)() = nullptr;  // leanfleet_torch_refused

[[noreturn]] void not_implemented(const std::string& text) { C10_THROW_ERROR(NotImplementedError, text); }

struct Gradients : torch::autograd::Node {
  explicit Gradients(const Table& t) : table(t) {}

  std::string name() const override { return table.name; }
  void release_variables() override {
    inputs.clear();
    outputs.clear();
    released = true;
  }

  variable_list apply(variable_list&& given) override {
    if (table.arguments.empty())
      not_implemented(table.name +
                      " has no backward: it serves inference. Detach its inputs, or call it under torch.no_grad()");
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list result(table.inputs);
    bool any = false;
    for (const Variable& gradient : given) any |= gradient.defined();
    if (!any) return result;
    torch::jit::Stack stack;
    for (const Argument& argument : table.arguments) stack.push_back(tensor_of(argument, given));
    push_attributes(&stack);
    table.gradients->callBoxed(stack);
    for (int i = 0; i < table.inputs; ++i)
      if (table.results[i] >= 0 && wanted(i)) result[i] = stack[table.results[i]].toTensor();
    return result;
  }

  bool wanted(int input) const { return present[input] && task_should_compute_output(input); }

  IValue tensor_of(const Argument& argument, const variable_list& given) {
    Variable tensor;
    if (argument.source == kInput) tensor = inputs[argument.index].unpack();
    if (argument.source == kOutput) tensor = outputs[argument.index].unpack(getptr());
    if (argument.source == kGradient) {
      const int32_t place = places[argument.index];
      if (place >= 0) tensor = given[place];
      // An output that is not asked for has shape [0], and torch.compile gives it a gradient of zeros.
      if (tensor.defined() && argument.optional && tensor.dim() == 1) tensor = Variable();
      if (!tensor.defined() && !argument.optional) tensor = input_metadata(place).zeros_like();
    }
    return tensor.defined() ? IValue(tensor) : IValue();
  }

  void push_attributes(torch::jit::Stack* stack) {
    const auto& arguments = table.gradients->schema().arguments();
    for (size_t i = 0; i < table.attributes.size(); ++i) {
      const Attribute& attribute = table.attributes[i];
      if (attribute.value == kSame) stack->push_back(attrs[attribute.index]);
      if (attribute.value == kDefault) stack->push_back(*arguments[table.arguments.size() + i].default_value());
      if (attribute.value == kWanted) {
        bool any = false;
        for (int input = 0; input < table.inputs; ++input) any |= (attribute.index >> input & 1) != 0 && wanted(input);
        stack->push_back(any);
      }
    }
  }

  const Table& table;
  std::vector<SavedVariable> inputs, outputs;
  std::vector<bool> present;
  std::vector<int32_t> places;  // of each output among this node's gradients, -1: not differentiable
  std::vector<IValue> attrs;
  bool released = false;
};

// A new node, owned as this PyTorch counts owners: in the node itself, or before 2.13 beside it.
template <class NewNode>
auto make_node(const Table& table) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, NewNode>) {
    return c10::make_intrusive<NewNode>(table);
  } else {
    return std::shared_ptr<NewNode>(new NewNode(table), [](NewNode* node) { deleteNode(node); });
  }
}

const at::Tensor* tensor_in(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? &value.toTensor() : nullptr;
}

// The kernel of one operator at the Autograd key.
class Recorder final : public c10::OperatorKernel {
 public:
  explicit Recorder(Table table) : table_(std::move(table)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const IValue* arguments = stack->data() + stack->size() - count;
    bool records = false, falls_back = false;
    for (int i = 0; i < table_.inputs; ++i) {
      const at::Tensor* tensor = tensor_in(arguments[i]);
      if (tensor == nullptr) continue;
      refuse_tangent(*tensor);
      records |= tensor->requires_grad();
      falls_back |= !table_.arguments.empty() && !table_.used[i];
    }
    if (!records || !at::GradMode::is_enabled()) return run(op, keys, stack);
    for (const int32_t attr : table_.refused_on) falls_back |= arguments[table_.inputs + attr].toBool();
    if (falls_back) return table_.fallback->callBoxed(stack);
    record(op, keys, stack, arguments, count);
  }

 private:
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const size_t count = op.schema().arguments().size(), below_call = stack->size() - count;
    const c10::SmallVector<IValue, 24> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    try {
      at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    } catch (const std::runtime_error&) {
      if (!refused()) throw;
      call_fallback(below_call, arguments, stack);
    } catch (const std::invalid_argument&) {
      if (!refused()) throw;
      call_fallback(below_call, arguments, stack);
    }
  }

  // Errors of the stable interface have no type of their own. The fallback refuses the same call with the right one.
  template <class Arguments>
  void call_fallback(size_t below_call, const Arguments& arguments, torch::jit::Stack* stack) const {
    stack->resize(below_call);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    table_.fallback->callBoxed(stack);
  }

  void refuse_tangent(const at::Tensor& tensor) const {
    if (torch::autograd::isFwGradDefined(tensor))
      not_implemented(table_.name +
                      " has no forward-mode derivative (torch.func.jvp, dual tensors); reverse mode, "
                      "backward() and torch.autograd.grad, is there where it has gradients");
  }

  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, const IValue* arguments,
              size_t count) {
    const auto node = make_node<Gradients>(table_);
    torch::autograd::edge_list edges(table_.inputs);
    node->present.resize(table_.inputs);
    for (int i = 0; i < table_.inputs; ++i) {
      const at::Tensor* tensor = tensor_in(arguments[i]);
      node->present[i] = tensor != nullptr;
      if (tensor != nullptr && (table_.arguments.empty() || table_.results[i] >= 0))
        edges[i] = torch::autograd::impl::gradient_edge(*tensor);
      const bool keep = tensor != nullptr && !table_.arguments.empty();
      node->inputs.push_back(keep ? SavedVariable(*tensor, false) : SavedVariable());
    }
    node->set_next_edges(std::move(edges));
    node->attrs.assign(arguments + table_.inputs, arguments + count);
    run(op, keys, stack);
    const size_t outputs = op.schema().returns().size();
    IValue* results = stack->data() + stack->size() - outputs;
    node->places.assign(outputs, -1);
    for (size_t i = 0, place = 0; i < outputs; ++i) {
      if (!table_.differentiable[i]) continue;
      at::Tensor tensor = results[i].toTensor();
      if (!tensor.is_floating_point()) continue;
      torch::autograd::set_history(tensor, node);
      results[i] = tensor;
      node->places[i] = static_cast<int32_t>(place++);
    }
    node->outputs.resize(outputs);
    for (const Argument& argument : table_.arguments)
      if (argument.source == kOutput) {
        const int32_t i = argument.index;
        node->outputs[i] = SavedVariable(results[i].toTensor(), node->places[i] >= 0);
      }
  }

  Table table_;
};

c10::OperatorHandle found(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

}  // namespace

// `numbers`: inputs, outputs, then lists with their lengths in front: refused attributes, the arguments (source, index, optional
// each), attributes (value, index), results, differentiable outputs. `gradients` is NULL where there are none. Returns NULL, or an
// error's text. `is_refused` is leanfleet_torch_refused.
extern "C" __attribute__((visibility("default"))) const char*
leanfleet_autograd_register(const char* domain, const char* form, const char* what, const char* gradients, const char* fallback,
                            const int32_t* numbers, int (*is_refused)()) {
  thread_local std::string error;
  try {
    refused = is_refused;
    Table table;
    table.name = what;
    table.inputs = *numbers++;
    table.outputs = *numbers++;
    const auto list = [&numbers](int width, auto&& add) {
      for (int32_t left = *numbers++; left > 0; --left, numbers += width) add(numbers);
    };
    list(1, [&](const int32_t* n) { table.refused_on.push_back(*n); });
    list(3, [&](const int32_t* n) { table.arguments.push_back({n[0], n[1], n[2]}); });
    list(2, [&](const int32_t* n) { table.attributes.push_back({n[0], n[1]}); });
    list(1, [&](const int32_t* n) { table.results.push_back(*n); });
    list(1, [&](const int32_t* n) { table.differentiable.push_back(*n != 0); });
    table.used.resize(table.inputs);
    for (const Argument& argument : table.arguments)
      if (argument.source == kInput) table.used[argument.index] = true;
    if (gradients != nullptr) table.gradients = found(gradients);
    table.fallback = found(fallback);
    static std::vector<std::unique_ptr<torch::Library>> libraries;  // they stay: deleting one would take its kernel away
    libraries.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, domain, c10::DispatchKey::Autograd, "leanfleet", 0));
    libraries.back()->impl(form, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>(std::move(table))));
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}
