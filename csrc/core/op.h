// The operator interface: what an adapter passes to an operator, and what an operator's folder provides.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "core/spec.h"
#include "core/status.h"
#include "core/strides.h"
#include "core/workspace.h"

namespace leanfleet {

enum class DType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kInt8 = 5,
  kFloat8e4m3fn = 6,
  kUint8 = 7,  // two int4 along the last axis
};
constexpr int kNumDTypes = 8;

int64_t element_size(DType dtype);  // bytes, of uint8 those that two int4 share
// How many numbers an element of the type holds. They lie along the last axis, whose size in shapes is that of elements.
inline int64_t numbers_each(DType dtype) { return dtype == DType::kUint8 ? 2 : 1; }
const char* dtype_name(DType dtype);
// The types of a tensor of type C or S, whichever it has, in a call whose T tensors are `t`; the first where nothing says it.
// None for the other types, which follow from T.
struct OwnTypes {
  DType types[1 + kNumDTypes];
  int count = 0;

  const DType* begin() const { return types; }
  const DType* end() const { return types + count; }
};
OwnTypes own_types(TypeVar type, DType t);
bool has_own_type(TypeVar type);
// The type of a tensor in a call whose T tensors are `t`; of one with a type of its own, where nothing says it.
DType dtype_of(TypeVar type, DType t);
bool is_narrow(DType dtype);  // a type that a C tensor may have besides T
std::string narrow_type_names();

// A contiguous row-major tensor. rank -1: an absent optional input, or an output that the attributes do not ask for.
// data is null while a workspace is being counted.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t rank = -1;
  int64_t shape[kMaxRank] = {};

  bool present() const { return rank >= 0; }
  int64_t elements() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[i];
    return count;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

struct AttrValue {
  int64_t i = 0;  // kBool, kInt; kString: index into AttrSpec::values
  float f = 0.0f;
  std::string s;  // kString without values
};

// The value of an attribute of type kString.
inline const char* text_of(const AttrSpec& spec, const AttrValue& value) {
  return spec.num_values > 0 ? spec.values[value.i] : value.s.c_str();
}

// One invocation. Inputs, outputs, attributes and dims are indexed by the enums in op_specs.h, such as
// call.inputs[lean_attention::kQuery] and call.dims[lean_attention::kDimHkv].
struct Call {
  const OpSpec* spec = nullptr;
  const char* node = "";  // name of the node, for messages
  Tensor inputs[kMaxInputs];
  Tensor outputs[kMaxOutputs];
  AttrValue attrs[kMaxAttrs];
  int64_t dims[kMaxSymbols];  // set by bind_inputs; -1 where the symbol does not occur

  bool bnhd() const { return spec->layout >= 0 && attrs[spec->layout].i == 1; }
  Status invalid(const std::string& text) const;  // "LeanAttention 'layers.3': " + text
  Status unsupported(const std::string& text) const;
};

inline Strides head_token_strides(bool bnhd, int64_t heads, int64_t tokens, int64_t width) {
  return bnhd ? Strides{heads * tokens * width, width, heads * width} : Strides{heads * tokens * width, tokens * width, width};
}

// Runs tasks 0 .. count-1 in any order on several threads and returns when all are done. A task must not throw.
struct Threads {
  virtual ~Threads() = default;
  virtual int count() const = 0;  // at least 1; how many tasks may run at once
  virtual void run(int64_t tasks, void (*task)(void* context, int64_t index), void* context) = 0;
};

template <class F>
void parallel_for(Threads& threads, int64_t tasks, F&& body) {
  threads.run(tasks, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &body);
}

// Calls body(index, worker) for 0 .. items - 1, each worker in a thread taking the next index that is left.
template <class F>
void run_items(Threads& threads, int64_t items, int64_t workers, F&& body) {
  std::atomic<int64_t> next{0};
  parallel_for(threads, items < workers ? items : workers, [&](int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(i, worker);
  });
}

struct CpuTarget {
  Threads* threads;
};

struct CudaTarget {
  void* stream;  // cudaStream_t
  int device;
  int sm_count;
  int compute_capability;  // 90 for sm_90
};

// What an operator's folder provides. Pointers other than run_cpu may be null.
struct OpImpl {
  // Refuses what the table's rules cannot express. Sees shapes and attributes only.
  Status (*check)(const Call& call);
  // Refuses wrong values in the inputs of type I, L and F, which are readable by the host: lengths, indices, decays.
  // `strict`: also those that a kernel tolerates by clamping (LEANFLEET_CHECK=1).
  Status (*check_values)(const Call& call, bool strict);
  // Ask `ws` for buffers, return if ws.counting(), compute. See workspace.h.
  Status (*run_cpu)(const Call& call, const CpuTarget& target, Workspace& ws);
  Status (*run_cuda)(const Call& call, const CudaTarget& target, Workspace& ws);
  // Inputs of type T that check_values reads when strict, a bit each (given_input).
  uint64_t checked = 0;
};

struct Op {
  const OpSpec* spec;
  const OpImpl* impl;
};

// The operators of this library, in the order of ops.toml.
int num_ops();
const Op& op_at(int index);
const Op* find_op(const std::string& name);

// Sets the attribute from what a caller gave; refuses values outside the schema. Attributes not given take the
// default: start from default_attrs.
void default_attrs(const OpSpec& spec, AttrValue* attrs);
Status set_attr_int(const OpSpec& spec, const char* node, int attr, int64_t value, AttrValue* attrs);
Status set_attr_float(const OpSpec& spec, const char* node, int attr, float value, AttrValue* attrs);
Status set_attr_string(const OpSpec& spec, const char* node, int attr, const std::string& value, AttrValue* attrs);

// The longest axis: lengths, indices and offsets are int32, and so are sizes in most kernels.
constexpr int64_t kMaxAxis = INT32_MAX;
// The most elements of a tensor, more than any machine holds: products of sizes stay far from the end of int64.
constexpr int64_t kMaxElements = int64_t{1} << 47;

// Checks types, ranks, sizes and rules of call.inputs, and the operator's own check; fills call.dims.
Status bind_inputs(const Op& op, Call& call);

// Whether the attributes ask for the output; its type and shape, after bind_inputs.
bool output_exists(const OpSpec& spec, const AttrValue* attrs, int output);
DType output_type(const Call& call, int output);
Tensor output_of(const Call& call, int output);
// Checks call.outputs against output_of.
Status check_outputs(const Call& call);

// What conditions of shapes ask for, a bit each: the inputs that are present, and the bool attributes that are on.
using Given = uint64_t;
static_assert(kMaxInputs + kMaxAttrs <= 64, "an operator has more inputs and attributes than Given has bits");
Given given_input(int input);
Given given_attrs(const OpSpec& spec, const AttrValue* attrs);
Given given_in(const Call& call);

// The shape alternative of `tensor` for what is given and a rank (-1: any); null if none fits.
const ShapeSpec* choose_shape(const TensorSpec& tensor, Given given, int rank);

// Axis `i` of the shape in the order that the attribute `layout` gives.
AxisSpec axis_at(const ShapeSpec& shape, int i, bool bnhd);

// LEANFLEET_CHECK=1: values in lengths, indices and tables are checked before every launch.
bool check_requested();

// Run a bound call, or size its workspace when `ws` is counting. Values are checked first; nothing is written
// when a check fails.
Status run_cpu(const Op& op, const Call& call, const CpuTarget& target, Workspace& ws);
Status run_cuda(const Op& op, const Call& call, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet
