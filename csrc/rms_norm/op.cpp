// RmsNorm: from tensors and attributes to Args, and how the CPU cuts the work.
#include <algorithm>
#include <string>

#include "core/columns.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "rms_norm/rms_norm.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::rms_norm {

LEANFLEET_CPU_FUNCTION(void, normalize, (const Args& args, int64_t begin, int64_t end))

namespace {

constexpr int64_t kPiece = 8192;  // columns: fewer are sooner done than shared out

Status check_sizes(const Call& call) {
  const int64_t width = call.dims[kDimC], group = call.attrs[kAttrGroup].i;
  if (group != 0 && width % group != 0)
    return call.invalid("group is " + std::to_string(group) + ", and weight has C = " + std::to_string(width) +
                        " columns; expected a multiple of group");
  const int64_t normed = call.attrs[kAttrNormed].i;
  if (normed != 0 && (normed % group != 0 || normed > width))
    return call.invalid("normed is " + std::to_string(normed) + "; expected a multiple of group = " + std::to_string(group) +
                        ", and at most C = " + std::to_string(width));
  if (call.attrs[kAttrColumns].i != 0) {
    const Status status = check_columns(call, "input", call.attrs[kAttrFirstColumn].i, width, call.dims[kDimF]);
    if (!status.ok()) return status;
  }
  if (call.attrs[kAttrGateColumns].i == 0) return {};
  return check_columns(call, "gate", call.attrs[kAttrFirstGateColumn].i, width, call.dims[kDimI], "first_gate_column");
}

Args make_args(const Call& call) {
  Args args = {};
  args.input = call.inputs[kInput].data;
  args.weight = call.inputs[kWeight].as<const float>();
  args.addend = call.inputs[kAddend].data;
  args.gate = call.inputs[kGate].data;
  args.output = call.outputs[kOutOutput].data;
  args.sum = call.outputs[kOutSum].data;
  args.dtype = static_cast<int32_t>(call.inputs[kInput].dtype);
  args.activation = static_cast<Kind>(call.attrs[kAttrActivation].i);
  args.gate_first = call.attrs[kAttrGateFirst].i != 0;
  args.rows = call.dims[kDimB] * call.dims[kDimN];
  args.width = args.input_pitch = args.gate_pitch = call.dims[kDimC];
  const int64_t group = call.attrs[kAttrGroup].i;
  args.group = group == 0 ? args.width : group;
  args.normed = call.attrs[kAttrNormed].i == 0 ? args.width : call.attrs[kAttrNormed].i;
  args.epsilon = call.attrs[kAttrEpsilon].f;
  if (call.attrs[kAttrColumns].i != 0) {
    args.input = columns_of(call.inputs[kInput], call.attrs[kAttrFirstColumn].i);
    args.input_pitch = call.dims[kDimF];
  }
  if (call.attrs[kAttrGateColumns].i != 0) {
    args.gate = columns_of(call.inputs[kGate], call.attrs[kAttrFirstGateColumn].i);
    args.gate_pitch = call.dims[kDimI];
  }
  return args;
}

int64_t units_of(const Args& args) { return args.group == 0 ? 0 : args.rows * (args.width / args.group); }

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  const Args args = make_args(call);
  const auto kernel = select_normalize();
  const int64_t units = units_of(args), of_piece = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, args.group));
  parallel_for(*target.threads, ceil_div(units, of_piece),
               [&](int64_t piece) { kernel(args, piece * of_piece, std::min(units, (piece + 1) * of_piece)); });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  const Args args = make_args(call);
  if (units_of(args) == 0) return {};
  return cuda_status(call, "launch of the RmsNorm kernel", launch(args, target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_sizes, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::rms_norm
