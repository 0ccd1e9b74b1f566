#include "leanfleet.h"

#include <cstring>
#include <string>

#include "capi/guarded.h"
#include "core/cpu_isa.h"
#include "core/op.h"
#include "core/thread_pool.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace {

using namespace leanfleet;
using capi::guarded;

static_assert(kMaxRank <= LEANFLEET_MAX_RANK);  // whose size is part of the interface

Status read_tensors(const OpSpec& spec, const char* role, const leanfleet_tensor* from, int given, int allowed, Tensor* to) {
  if (given > allowed)
    return Status::invalid(std::string(spec.name) + ": " + std::to_string(given) + " " + role + "; it has at most " +
                           std::to_string(allowed));
  for (int i = 0; i < given; ++i) {
    if (from[i].rank < 0) continue;
    const TensorSpec& tensor = role[0] == 'i' ? spec.inputs[i] : spec.outputs[i];
    if (from[i].rank > kMaxRank)
      return Status::invalid(std::string(spec.name) + ": " + tensor.name + " has rank " + std::to_string(from[i].rank) +
                             "; no tensor here has more than " + std::to_string(kMaxRank));
    if (from[i].dtype < 0 || from[i].dtype >= kNumDTypes)
      return Status::invalid(std::string(spec.name) + ": " + tensor.name +
                             " has an unknown type; expected float32, float16, bfloat16, int32, int64, int8, "
                             "float8e4m3fn or uint8");
    to[i].data = from[i].data;
    to[i].dtype = static_cast<DType>(from[i].dtype);
    to[i].rank = from[i].rank;
    for (int axis = 0; axis < from[i].rank; ++axis) to[i].shape[axis] = from[i].shape[axis];
  }
  return {};
}

Status read_attrs(const OpSpec& spec, const char* node, const leanfleet_call& from, AttrValue* attrs) {
  default_attrs(spec, attrs);
  for (int i = 0; i < from.num_attrs; ++i) {
    const leanfleet_attr& attr = from.attrs[i];
    int index = 0;
    while (index < spec.num_attrs && std::strcmp(spec.attrs[index].name, attr.name) != 0) ++index;
    if (index == spec.num_attrs) return Status::invalid(std::string(spec.name) + ": it has no attribute '" + attr.name + "'");
    if (attr.kind == 0) LEANFLEET_RETURN_IF_ERROR(set_attr_int(spec, node, index, attr.i, attrs));
    if (attr.kind == 1) LEANFLEET_RETURN_IF_ERROR(set_attr_float(spec, node, index, attr.f, attrs));
    if (attr.kind == 2) LEANFLEET_RETURN_IF_ERROR(set_attr_string(spec, node, index, attr.s, attrs));
  }
  return {};
}

Status read_call(const leanfleet_call& from, const Op** op, Call* call) {
  *op = find_op(from.op);
  if (*op == nullptr) return Status::invalid(std::string("no operator is named '") + from.op + "'");
  const OpSpec& spec = *(*op)->spec;
  call->spec = &spec;
  call->node = from.node != nullptr ? from.node : "";
  LEANFLEET_RETURN_IF_ERROR(read_attrs(spec, call->node, from, call->attrs));
  LEANFLEET_RETURN_IF_ERROR(read_tensors(spec, "inputs", from.inputs, from.num_inputs, spec.num_inputs, call->inputs));
  LEANFLEET_RETURN_IF_ERROR(read_tensors(spec, "outputs", from.outputs, from.num_outputs, spec.num_outputs, call->outputs));
  return bind_inputs(**op, *call);
}

Status dispatch(const leanfleet_call& from, const Op& op, const Call& call, Workspace& ws) {
  if (from.device == 0) {
    const std::shared_ptr<Threads> threads = shared_threads(from.threads);
    return run_cpu(op, call, CpuTarget{threads.get()}, ws);
  }
#ifdef LEANFLEET_CUDA
  CudaTarget target;
  LEANFLEET_RETURN_IF_ERROR(current_cuda_target(from.stream, &target));
  return run_cuda(op, call, target, ws);
#else
  return call.unsupported("this build has no CUDA kernels; move the tensors to the CPU, or build with nvcc present");
#endif
}

Status size_workspace(const leanfleet_call& from, size_t* scratch_bytes, size_t* sync_bytes) {
  const Op* op;
  Call call;
  LEANFLEET_RETURN_IF_ERROR(read_call(from, &op, &call));
  Workspace counting;
  LEANFLEET_RETURN_IF_ERROR(dispatch(from, *op, call, counting));
  *scratch_bytes = counting.scratch_bytes();
  *sync_bytes = counting.sync_bytes();
  return {};
}

Status run(const leanfleet_call& from) {
  const Op* op;
  Call call;
  LEANFLEET_RETURN_IF_ERROR(read_call(from, &op, &call));
  LEANFLEET_RETURN_IF_ERROR(check_outputs(call));
  Workspace needed;
  LEANFLEET_RETURN_IF_ERROR(dispatch(from, *op, call, needed));
  if (needed.scratch_bytes() > from.scratch_bytes || needed.sync_bytes() > from.sync_bytes)
    return call.invalid("the workspace has " + std::to_string(from.scratch_bytes) + " scratch and " +
                        std::to_string(from.sync_bytes) + " sync bytes; this call needs " +
                        std::to_string(needed.scratch_bytes()) + " and " + std::to_string(needed.sync_bytes()));
  Workspace ws(from.scratch, from.scratch_bytes, from.sync, from.sync_bytes);
  return dispatch(from, *op, call, ws);
}

}  // namespace

extern "C" {

int leanfleet_workspace(const leanfleet_call* call, size_t* scratch_bytes, size_t* sync_bytes) {
  return guarded(call->op, [&] { return size_workspace(*call, scratch_bytes, sync_bytes); });
}

int leanfleet_run(const leanfleet_call* call) {
  return guarded(call->op, [&] { return run(*call); });
}

const char* leanfleet_op_name(int index) { return index >= 0 && index < num_ops() ? op_at(index).spec->name : nullptr; }

const char* leanfleet_build_info() {
#ifdef LEANFLEET_CUDA
#define LEANFLEET_KERNELS ", cuda"
#else
#define LEANFLEET_KERNELS ""
#endif
  switch (cpu_isa()) {
    case Isa::kAvx512: return cpu_has_bfloat16() ? "cpu avx512_bf16" LEANFLEET_KERNELS : "cpu avx512" LEANFLEET_KERNELS;
    case Isa::kAvx2: return "cpu avx2" LEANFLEET_KERNELS;
    default: return "cpu baseline" LEANFLEET_KERNELS;
  }
}

}  // extern "C"
