#include <algorithm>

#include "core/columns.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "gated_activation/gated_activation.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::gated_activation {

LEANFLEET_CPU_FUNCTION(void, activate, (const Args& args, int64_t begin, int64_t end))

namespace {

constexpr int64_t kPiece = 8192;  // elements of the output: fewer are sooner done than shared out

Status check_sizes(const Call& call) {
  if (call.attrs[kAttrColumns].i == 0) return {};
  return check_columns(call, "gate_up", call.attrs[kAttrFirstColumn].i, call.dims[kDimF], call.dims[kDimW]);
}

Args make_args(const Call& call) {
  Args args = {};
  args.output = call.outputs[kOutOutput].data;
  args.dtype = static_cast<int32_t>(call.inputs[kGateUp].dtype);
  args.activation = static_cast<Kind>(call.attrs[kAttrActivation].i);
  args.rows = call.dims[kDimB] * call.dims[kDimN];
  args.width = call.dims[kDimF];
  args.gate = call.inputs[kGateUp].data;
  args.up = call.inputs[kUp].data;
  args.gate_pitch = args.up_pitch = args.width;
  args.heads = 1;
  if (call.inputs[kSkip].present()) {
    args.skip = call.inputs[kSkip].data;
    args.scales = static_cast<const float*>(call.inputs[kSkipScale].data);
    args.heads = call.dims[kDimH];
  }
  if (!call.inputs[kUp].present()) {  // behind the gate
    const int64_t bytes = args.width * element_size(call.inputs[kGateUp].dtype);
    args.up = static_cast<const char*>(args.gate) + bytes;
    args.gate_pitch = args.up_pitch = 2 * args.width;
  }
  if (call.attrs[kAttrColumns].i != 0) {
    args.gate_pitch = call.dims[kDimW];
    args.gate = columns_of(call.inputs[kGateUp], call.attrs[kAttrFirstColumn].i);
  }
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  const Args args = make_args(call);
  const auto kernel = select_activate();
  const int64_t rows_of_piece = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, args.width));
  parallel_for(*target.threads, ceil_div(args.rows, rows_of_piece),
               [&](int64_t piece) { kernel(args, piece * rows_of_piece, std::min(args.rows, (piece + 1) * rows_of_piece)); });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return cuda_status(call, "launch of the GatedActivation kernel", launch(make_args(call), target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_sizes, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::gated_activation
