#include "torch/adapter.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/op_specs.h"
#include "core/thread_pool.h"
#ifdef LEANFLEET_CUDA
#include <map>
#include <mutex>

#include "core/cuda_target.h"
#endif

namespace leanfleet {
namespace {

using Value = uint64_t;  // StableIValue: a number, or a handle that whoever gets it owns
using Handle = void*;    // of a tensor
using Kernel = void (*)(Value* stack, uint64_t inputs, uint64_t outputs);

// The version of the ABI that is spoken here, 2.10's, the first with strings: later ones translate.
constexpr uint64_t kAbi = (uint64_t{2} << 56) | (uint64_t{10} << 48);

// PyTorch's functions: name, result, parameters. Those that return int give 0 or an error.
#define LEANFLEET_TORCH_FUNCTIONS(F)                                                                              \
  F(aoti_torch_device_type_cpu, int32_t, ())                                                                      \
  F(aoti_torch_device_type_cuda, int32_t, ())                                                                     \
  F(aoti_torch_dtype_float32, int32_t, ())                                                                        \
  F(aoti_torch_dtype_float16, int32_t, ())                                                                        \
  F(aoti_torch_dtype_bfloat16, int32_t, ())                                                                       \
  F(aoti_torch_dtype_float64, int32_t, ())                                                                        \
  F(aoti_torch_dtype_int32, int32_t, ())                                                                          \
  F(aoti_torch_dtype_int64, int32_t, ())                                                                          \
  F(aoti_torch_dtype_int8, int32_t, ())                                                                           \
  F(aoti_torch_dtype_uint8, int32_t, ())                                                                          \
  F(aoti_torch_dtype_float8_e4m3fn, int32_t, ())                                                                  \
  F(aoti_torch_get_dim, int, (Handle, int64_t*))                                                                  \
  F(aoti_torch_get_sizes, int, (Handle, int64_t**))                                                               \
  F(aoti_torch_get_dtype, int, (Handle, int32_t*))                                                                \
  F(aoti_torch_get_device_type, int, (Handle, int32_t*))                                                          \
  F(aoti_torch_get_device_index, int, (Handle, int32_t*))                                                         \
  F(aoti_torch_is_contiguous, int, (Handle, bool*))                                                               \
  F(aoti_torch_is_defined, int, (Handle, bool*))                                                                  \
  F(aoti_torch_empty_strided, int, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*)) \
  F(aoti_torch_copy_, int, (Handle, Handle, int32_t))                                                             \
  F(aoti_torch_zero_, int, (Handle))                                                                              \
  F(aoti_torch_delete_tensor_object, int, (Handle))                                                               \
  F(aoti_torch_get_current_device_index, int, (int32_t*))                                                         \
  F(aoti_torch_create_device_guard, int, (int32_t, void**))                                                       \
  F(aoti_torch_delete_device_guard, int, (void*))                                                                 \
  F(aoti_torch_library_init_impl, int, (const char*, const char*, const char*, uint32_t, void**))                 \
  F(torch_library_impl, int, (void*, const char*, Kernel, uint64_t))                                              \
  F(torch_call_dispatcher, int, (const char*, const char*, Value*, uint64_t))                                     \
  F(torch_get_const_data_ptr, int, (Handle, const void**))                                                        \
  F(torch_get_mutable_data_ptr, int, (Handle, void**))                                                            \
  F(torch_get_num_threads, int, (uint32_t*))                                                                      \
  F(torch_string_c_str, int, (void*, const char**))                                                               \
  F(torch_delete_string, int, (void*))

struct Torch {
#define LEANFLEET_TORCH_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  LEANFLEET_TORCH_FUNCTIONS(LEANFLEET_TORCH_MEMBER)
#undef LEANFLEET_TORCH_MEMBER
  int (*torch_delete_stable_ivalue)(Value*) = nullptr;                   // of 2.13
  int (*aoti_torch_get_current_cuda_stream)(int32_t, void**) = nullptr;  // of builds with CUDA
  int32_t cpu, cuda, float64;
  int32_t dtypes[kNumDTypes];  // by DType
};
Torch torch;

// Whether the C++ runtime is outside of this library: errors leave kernels as exceptions, which PyTorch catches only where both
// use one runtime.
bool shares_runtime() {
  Dl_info here, runtime;
  return dladdr(&torch, &here) == 0 || dladdr(reinterpret_cast<void*>(abi::__cxa_current_exception_type), &runtime) == 0 ||
         here.dli_fbase != runtime.dli_fbase;
}

// NULL, or what stands in the way.
const char* attach(void* handle) {
  if (!shares_runtime()) return "libleanfleet is linked with a C++ runtime of its own; link the shared one";
#define LEANFLEET_TORCH_FIND(name, result, parameters)                       \
  torch.name = reinterpret_cast<result(*) parameters>(dlsym(handle, #name)); \
  if (torch.name == nullptr) return #name;
  LEANFLEET_TORCH_FUNCTIONS(LEANFLEET_TORCH_FIND)
#undef LEANFLEET_TORCH_FIND
  torch.torch_delete_stable_ivalue = reinterpret_cast<int (*)(Value*)>(dlsym(handle, "torch_delete_stable_ivalue"));
  torch.aoti_torch_get_current_cuda_stream =
      reinterpret_cast<int (*)(int32_t, void**)>(dlsym(handle, "aoti_torch_get_current_cuda_stream"));
  torch.cpu = torch.aoti_torch_device_type_cpu();
  torch.cuda = torch.aoti_torch_device_type_cuda();
  torch.float64 = torch.aoti_torch_dtype_float64();
  const int32_t dtypes[] = {torch.aoti_torch_dtype_float32(),       torch.aoti_torch_dtype_float16(),
                            torch.aoti_torch_dtype_bfloat16(),      torch.aoti_torch_dtype_int32(),
                            torch.aoti_torch_dtype_int64(),         torch.aoti_torch_dtype_int8(),
                            torch.aoti_torch_dtype_float8_e4m3fn(), torch.aoti_torch_dtype_uint8()};
  static_assert(std::size(dtypes) == kNumDTypes);
  std::memcpy(torch.dtypes, dtypes, sizeof dtypes);
  return nullptr;
}

// One operator in its functional or its mutating form.
struct Form {
  const Op* op = nullptr;
  int mutating = -1;  // the attribute that is on
  std::string name, fallback;
};
Form forms[std::size(kOps)][2];
thread_local int last_code = 0;

Status check(int error, const char* what) {
  return error == 0 ? Status{} : Status::internal(std::string("PyTorch: ") + what + " failed");
}

// A tensor that is deleted with its owner.
struct Owned {
  Handle handle = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle != nullptr) torch.aoti_torch_delete_tensor_object(handle);
  }
  Handle release() { return std::exchange(handle, nullptr); }
};

struct Device {
  int32_t type, index;
  bool operator!=(const Device& other) const { return type != other.type || index != other.index; }
};

// Launches go to the tensors' device; the caller's becomes the current one again.
struct DeviceGuard {
  void* guard = nullptr;
  Status enter(const Device& device) {
    int32_t current = device.index;
    if (device.type == torch.cpu) return {};
    LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_get_current_device_index(&current), "asking for the current device"));
    if (current == device.index) return {};
    return check(torch.aoti_torch_create_device_guard(device.index, &guard), "changing the device");
  }
  ~DeviceGuard() {
    if (guard != nullptr) torch.aoti_torch_delete_device_guard(guard);
  }
};

Status empty(const int64_t* shape, int rank, int32_t dtype, const Device& device, Handle* made) {
  int64_t strides[kMaxRank + 1];
  for (int64_t i = rank - 1, step = 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i] > 1 ? shape[i] : 1;
  }
  return check(torch.aoti_torch_empty_strided(rank, shape, strides, dtype, device.type, device.index, made),
               "allocating a tensor");
}

Status bytes_on(const Device& device, size_t size, Owned* buffer, void** aligned) {
  const int64_t shape[] = {static_cast<int64_t>(size + kWorkspaceAlignment)};
  LEANFLEET_RETURN_IF_ERROR(empty(shape, 1, torch.dtypes[static_cast<int>(DType::kUint8)], device, &buffer->handle));
  void* data;
  LEANFLEET_RETURN_IF_ERROR(check(torch.torch_get_mutable_data_ptr(buffer->handle, &data), "reading a tensor"));
  *aligned = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(data), kWorkspaceAlignment));
  return {};
}

// What a call's stack holds, taken from it.
class Arguments {
 public:
  Arguments(const Form& form, const Value* stack) : form_(form) {
    const OpSpec& spec = *form.op->spec;
    for (int i = 0; i < spec.num_inputs; ++i, ++stack) {
      Value value = *stack;
      if (spec.inputs[i].optional) {
        auto* box = reinterpret_cast<Value*>(value);
        value = box == nullptr ? 0 : *box;
        if (box != nullptr && torch.torch_delete_stable_ivalue != nullptr) torch.torch_delete_stable_ivalue(box);
        else delete box;
      }
      tensors_[i].handle = reinterpret_cast<Handle>(value);
    }
    for (int i = 0; i < spec.num_attrs; ++i)
      if (i != form.mutating) attrs_[i] = *stack++;
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    const OpSpec& spec = *form_.op->spec;
    for (int i = 0; i < spec.num_attrs; ++i)
      if (spec.attrs[i].type == AttrType::kString && attrs_[i] != 0)
        torch.torch_delete_string(reinterpret_cast<void*>(attrs_[i]));
  }

  Status read(Call* call, Device* device);
  Handle tensor(int input) const { return tensors_[input].handle; }

 private:
  Status read_attrs(Call* call);
  Status read_tensor(int input, const Device& device, Call* call);
  bool taken(const Call& call, int input) const;

  const Form& form_;
  Owned tensors_[kMaxInputs];
  Owned copies_[kMaxInputs];  // contiguous ones, where inputs are not
  Value attrs_[kMaxAttrs] = {};
};

Status Arguments::read_attrs(Call* call) {
  const OpSpec& spec = *call->spec;
  default_attrs(spec, call->attrs);
  for (int i = 0; i < spec.num_attrs; ++i) {
    if (i == form_.mutating) {
      call->attrs[i].i = 1;
    } else if (spec.attrs[i].type == AttrType::kFloat) {
      double number;
      std::memcpy(&number, &attrs_[i], sizeof number);
      LEANFLEET_RETURN_IF_ERROR(set_attr_float(spec, "", i, static_cast<float>(number), call->attrs));
    } else if (spec.attrs[i].type == AttrType::kString) {
      const char* text;
      LEANFLEET_RETURN_IF_ERROR(check(torch.torch_string_c_str(reinterpret_cast<void*>(attrs_[i]), &text), "reading a string"));
      LEANFLEET_RETURN_IF_ERROR(set_attr_string(spec, "", i, text, call->attrs));
    } else {
      const bool flag = spec.attrs[i].type == AttrType::kBool;
      const int64_t number = flag ? static_cast<uint8_t>(attrs_[i]) : static_cast<int64_t>(attrs_[i]);
      LEANFLEET_RETURN_IF_ERROR(set_attr_int(spec, "", i, number, call->attrs));
    }
  }
  return {};
}

// Whether the form writes an output into this input's buffer.
bool Arguments::taken(const Call& call, int input) const {
  const OpSpec& spec = *call.spec;
  for (int i = 0; form_.mutating >= 0 && i < spec.num_outputs; ++i)
    if (spec.outputs[i].takes == input && output_exists(spec, call.attrs, i)) return true;
  return false;
}

std::string device_name(const Device& device) {
  if (device.type == torch.cpu) return "cpu";
  return (device.type == torch.cuda ? "cuda:" : "another device:") + std::to_string(device.index);
}

Status Arguments::read_tensor(int input, const Device& device, Call* call) {
  const TensorSpec& spec = call->spec->inputs[input];
  Tensor& to = call->inputs[input];
  Handle tensor = tensors_[input].handle;
  bool present = tensor != nullptr;
  if (present) LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_is_defined(tensor, &present), "reading a tensor"));
  const bool is_taken = taken(*call, input);
  if (!present) {
    if (!is_taken) return {};
    return call->invalid(std::string("input ") + spec.name + " is missing; " + form_.name + " changes it in place");
  }
  int64_t rank, *sizes;
  int32_t dtype;
  Device where;
  bool contiguous;
  if (torch.aoti_torch_get_dim(tensor, &rank) != 0 || torch.aoti_torch_get_sizes(tensor, &sizes) != 0 ||
      torch.aoti_torch_get_dtype(tensor, &dtype) != 0 || torch.aoti_torch_get_device_type(tensor, &where.type) != 0 ||
      torch.aoti_torch_get_device_index(tensor, &where.index) != 0 || torch.aoti_torch_is_contiguous(tensor, &contiguous) != 0)
    return Status::internal(std::string("PyTorch: reading ") + spec.name + " failed");
  if (where != device)
    return call->invalid(std::string(spec.name) + " is on " + device_name(where) + ", " + call->spec->inputs[0].name + " on " +
                         device_name(device) + "; all tensors of a call must be on one device");
  int known = 0;
  while (known < kNumDTypes && torch.dtypes[known] != dtype) ++known;
  if (known == kNumDTypes) return call->invalid(std::string(spec.name) + " has a type that no operator takes");
  if (rank > kMaxRank) return call->invalid(std::string(spec.name) + " has rank " + std::to_string(rank));
  to.dtype = static_cast<DType>(known);
  to.rank = static_cast<int32_t>(rank);
  std::memcpy(to.shape, sizes, rank * sizeof(int64_t));
  if (is_taken) {
    if (!contiguous)
      return call->invalid(std::string(spec.name) + " is not contiguous; " + form_.name + " changes it in place");
    return check(torch.torch_get_mutable_data_ptr(tensor, &to.data), "reading a tensor");
  }
  if (!contiguous) {
    LEANFLEET_RETURN_IF_ERROR(empty(sizes, to.rank, dtype, device, &copies_[input].handle));
    LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_copy_(copies_[input].handle, tensor, 0), "copying a tensor"));
    tensor = copies_[input].handle;
  }
  const void* data;
  LEANFLEET_RETURN_IF_ERROR(check(torch.torch_get_const_data_ptr(tensor, &data), "reading a tensor"));
  to.data = const_cast<void*>(data);
  return {};
}

Status Arguments::read(Call* call, Device* device) {
  call->spec = form_.op->spec;
  Handle first = tensors_[0].handle;
  LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_get_device_type(first, &device->type), "reading a tensor"));
  LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_get_device_index(first, &device->index), "reading a tensor"));
  LEANFLEET_RETURN_IF_ERROR(read_attrs(call));
  for (int i = 0; i < call->spec->num_inputs; ++i) LEANFLEET_RETURN_IF_ERROR(read_tensor(i, *device, call));
  return bind_inputs(*form_.op, *call);
}

#ifdef LEANFLEET_CUDA
// Zeroed sync words of a stream. In a CUDA graph they are zeroed by a node of the graph.
Status sync_words(const Call& call, const Device& device, void* stream, size_t size, Owned* own, void** words) {
  static std::mutex mutex;
  static std::map<std::pair<int32_t, void*>, std::pair<Handle, size_t>> kept;
  bool captured;
  LEANFLEET_RETURN_IF_ERROR(is_captured(call, stream, &captured));
  std::lock_guard<std::mutex> lock(mutex);
  auto& [buffer, bytes] = kept[{device.index, stream}];
  if (!captured && bytes >= size) {
    void* data;
    LEANFLEET_RETURN_IF_ERROR(check(torch.torch_get_mutable_data_ptr(buffer, &data), "reading a tensor"));
    *words = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(data), kWorkspaceAlignment));
    return {};
  }
  LEANFLEET_RETURN_IF_ERROR(bytes_on(device, size, own, words));
  LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_zero_(own->handle), "zeroing a tensor"));
  if (!captured) {
    std::swap(buffer, own->handle);  // launches on one stream follow each other and leave the words zero
    bytes = size;
  }
  return {};
}

Status launch(const Form& form, const Call& call, const Device& device) {
  void* stream;
  LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_get_current_cuda_stream(device.index, &stream), "asking for the stream"));
  CudaTarget target;
  LEANFLEET_RETURN_IF_ERROR(current_cuda_target(stream, &target));
  Workspace counting;
  LEANFLEET_RETURN_IF_ERROR(run_cuda(*form.op, call, target, counting));
  Owned scratch, sync;
  void *scratch_at = nullptr, *sync_at = nullptr;
  if (counting.scratch_bytes() > 0)
    LEANFLEET_RETURN_IF_ERROR(bytes_on(device, counting.scratch_bytes(), &scratch, &scratch_at));
  if (counting.sync_bytes() > 0)
    LEANFLEET_RETURN_IF_ERROR(sync_words(call, device, stream, counting.sync_bytes(), &sync, &sync_at));
  Workspace ws(scratch_at, counting.scratch_bytes(), sync_at, counting.sync_bytes());
  return run_cuda(*form.op, call, target, ws);
}
#endif

Status launch_on_cpu(const Form& form, const Call& call, const Device& device) {
  uint32_t count = 0;
  LEANFLEET_RETURN_IF_ERROR(check(torch.torch_get_num_threads(&count), "asking for the number of threads"));
  const std::shared_ptr<Threads> threads = shared_threads(static_cast<int>(count));
  const CpuTarget target{threads.get()};
  Workspace counting;
  LEANFLEET_RETURN_IF_ERROR(run_cpu(*form.op, call, target, counting));
  Owned scratch, sync;
  void *scratch_at = nullptr, *sync_at = nullptr;
  if (counting.scratch_bytes() > 0)
    LEANFLEET_RETURN_IF_ERROR(bytes_on(device, counting.scratch_bytes(), &scratch, &scratch_at));
  if (counting.sync_bytes() > 0) {
    LEANFLEET_RETURN_IF_ERROR(bytes_on(device, counting.sync_bytes(), &sync, &sync_at));
    std::memset(sync_at, 0, counting.sync_bytes());
  }
  Workspace ws(scratch_at, counting.scratch_bytes(), sync_at, counting.sync_bytes());
  return run_cpu(*form.op, call, target, ws);
}

Status launch_on(const Form& form, const Call& call, const Device& device) {
  if (device.type == torch.cpu) return launch_on_cpu(form, call, device);
#ifdef LEANFLEET_CUDA
  if (torch.aoti_torch_get_current_cuda_stream != nullptr) return launch(form, call, device);
#endif
  return call.unsupported("this build has no CUDA kernels; move the tensors to the CPU, or build with nvcc present");
}

// The outputs of a call: those that take an input's buffer in place stay out of `made`, those not asked for have shape [0].
Status make_outputs(const Form& form, const Device& device, Call* call, Owned* made) {
  const OpSpec& spec = *call->spec;
  for (int i = 0, returned = 0; i < spec.num_outputs; ++i) {
    const TensorSpec& output = spec.outputs[i];
    const bool exists = output_exists(spec, call->attrs, i);
    if (exists) call->outputs[i] = output_of(*call, i);
    if (form.mutating >= 0 && output.takes >= 0) {
      if (exists) call->outputs[i].data = call->inputs[output.takes].data;
      continue;
    }
    const DType dtype = output_type(*call, i);
    Handle& handle = made[returned++].handle;
    const int64_t none[] = {0};
    const int64_t* shape = exists ? call->outputs[i].shape : none;
    LEANFLEET_RETURN_IF_ERROR(
        empty(shape, exists ? call->outputs[i].rank : 1, torch.dtypes[static_cast<int>(dtype)], device, &handle));
    if (exists)
      LEANFLEET_RETURN_IF_ERROR(check(torch.torch_get_mutable_data_ptr(handle, &call->outputs[i].data), "reading a tensor"));
  }
  return {};
}

Status run(const Form& form, const Value* stack, Owned* made) {
  Arguments arguments(form, stack);
  bool defined = false;
  LEANFLEET_RETURN_IF_ERROR(check(torch.aoti_torch_is_defined(arguments.tensor(0), &defined), "reading a tensor"));
  Call call;
  if (!defined)
    return Status::invalid(std::string(form.op->spec->name) + ": input " + form.op->spec->inputs[0].name + " is missing");
  Device device;
  DeviceGuard guard;
  LEANFLEET_RETURN_IF_ERROR(arguments.read(&call, &device));
  LEANFLEET_RETURN_IF_ERROR(guard.enter(device));
  LEANFLEET_RETURN_IF_ERROR(make_outputs(form, device, &call, made));
  return launch_on(form, call, device);
}

// float64 has no kernel, so that the reference computes it.
bool is_float64(Handle tensor) {
  bool defined = false;
  int32_t dtype = 0;
  return torch.aoti_torch_is_defined(tensor, &defined) == 0 && defined && torch.aoti_torch_get_dtype(tensor, &dtype) == 0 &&
         dtype == torch.float64;
}

// An operator's kernel as PyTorch calls it: it owns the inputs on the stack and leaves outputs there. Its errors are exceptions,
// because the interface has no other way.
void call_form(const Form& form, Value* stack) {
  if (is_float64(reinterpret_cast<Handle>(stack[0]))) {
    if (torch.torch_call_dispatcher(form.fallback.c_str(), "", stack, kAbi) == 0) return;
    last_code = static_cast<int>(Code::kInvalidArgument);
    throw std::invalid_argument(std::string(form.op->spec->name) + ": the reference refused the call");
  }
  Owned made[kMaxOutputs];
  Status status;
  try {
    status = run(form, stack, made);
  } catch (const std::bad_alloc&) {
    status = Status::internal(std::string(form.op->spec->name) + ": out of memory; nothing is known of its outputs");
  }
  if (!status.ok()) {
    last_code = static_cast<int>(status.code);
    if (status.code == Code::kInvalidArgument) throw std::invalid_argument(status.message);
    throw std::runtime_error(status.message);
  }
  for (Owned& output : made)
    if (output.handle != nullptr) *stack++ = reinterpret_cast<Value>(output.release());
}

template <size_t I, bool Mutating>
void kernel(Value* stack, uint64_t, uint64_t) {
  call_form(forms[I][Mutating], stack);
}

// PyTorch calls a kernel without saying for which operator, so each form has a function of its own.
template <size_t... I>
Kernel kernel_of(int op, bool mutating, std::index_sequence<I...>) {
  static constexpr Kernel kKernels[][2] = {{kernel<I, false>, kernel<I, true>}...};
  return kKernels[op][mutating];
}

Status add(const char* domain, const char* key, const char* name, const char* op, const char* mutating, const char* fallback) {
  int index = 0;
  while (index < num_ops() && std::strcmp(op_at(index).spec->name, op) != 0) ++index;
  if (index == num_ops()) return Status::invalid(std::string("no operator is named '") + op + "'");
  Form& form = forms[index][mutating != nullptr];
  form.op = &op_at(index);
  form.name = name;
  form.fallback = fallback;
  const OpSpec& spec = *form.op->spec;
  for (int i = 0; mutating != nullptr && i < spec.num_attrs; ++i)
    if (std::strcmp(spec.attrs[i].name, mutating) == 0) form.mutating = i;
  void* library;  // stays: deleting it would take the kernel away
  LEANFLEET_RETURN_IF_ERROR(
      check(torch.aoti_torch_library_init_impl(domain, key, "leanfleet", 0, &library), "opening a library"));
  const Kernel found = kernel_of(index, mutating != nullptr, std::make_index_sequence<std::size(kOps)>());
  return check(torch.torch_library_impl(library, name, found, kAbi), "registering a kernel");
}

}  // namespace
}  // namespace leanfleet

extern "C" {

const char* leanfleet_torch_attach(void* handle) { return leanfleet::attach(handle); }

int leanfleet_torch_register(const char* domain, const char* key, const char* form, const char* op, const char* mutating,
                             const char* fallback) {
  return static_cast<int>(leanfleet::add(domain, key, form, op, mutating, fallback).code);
}

int leanfleet_torch_error() { return std::exchange(leanfleet::last_code, 0); }

int leanfleet_torch_refused() {
  using leanfleet::Code, leanfleet::last_code;
  return last_code == static_cast<int>(Code::kInvalidArgument) || last_code == static_cast<int>(Code::kUnsupported);
}

}  // extern "C"
