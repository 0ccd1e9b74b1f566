// DecayGates: from tensors and attributes to Args, and how the CPU cuts the work.
#include <algorithm>
#include <limits>

#include "core/columns.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "core/requests.h"
#include "decay_gates/decay_gates.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::decay_gates {

LEANFLEET_CPU_FUNCTION(void, make_gates, (const Args& args, int64_t begin, int64_t end))

namespace {

constexpr int64_t kPiece = 4096;  // numbers: fewer are sooner done than shared out

Status check_values(const Call& call, bool strict) {
  if (!strict || !call.inputs[kQueryLens].present()) return {};
  return check_query_lens(call, call.inputs[kQueryLens], call.dims[kDimN]);
}

Status check_sizes(const Call& call) {
  if (call.attrs[kAttrColumns].i == 0) return {};
  const int64_t heads = call.dims[kDimH];
  if (call.attrs[kAttrPerKey].i == 0) {
    const Status status = check_columns(call, "input", call.attrs[kAttrFirstColumn].i, heads, call.dims[kDimF]);
    if (!status.ok()) return status;
  }
  if (!call.inputs[kBetaInput].present()) return {};
  return check_columns(call, "beta_input", call.attrs[kAttrFirstBetaColumn].i, heads, call.dims[kDimC], "first_beta_column");
}

Args make_args(const Call& call) {
  Args args = {};
  args.input = call.inputs[kInput].data;
  args.rate = call.inputs[kRate].as<const float>();
  args.bias = call.inputs[kBias].as<const float>();
  args.beta_input = call.inputs[kBetaInput].data;
  args.query_lens = call.inputs[kQueryLens].as<const int32_t>();
  args.log_decay = call.outputs[kOutLogDecay].as<float>();
  args.step = call.outputs[kOutStep].as<float>();
  args.beta = call.outputs[kOutBeta].as<float>();
  args.dtype = static_cast<int32_t>(call.inputs[kInput].dtype);
  args.batch = call.dims[kDimB];
  args.tokens = call.dims[kDimN];
  args.heads = call.dims[kDimH];
  args.width = call.attrs[kAttrPerKey].i != 0 ? call.dims[kDimD] : 1;
  args.input_pitch = args.heads * args.width;
  args.beta_pitch = args.heads;
  const bool columns = call.attrs[kAttrColumns].i != 0;
  if (columns && call.attrs[kAttrPerKey].i == 0) {
    args.input = columns_of(call.inputs[kInput], call.attrs[kAttrFirstColumn].i);
    args.input_pitch = call.dims[kDimF];
  }
  if (columns && call.inputs[kBetaInput].present()) {
    args.beta_input = columns_of(call.inputs[kBetaInput], call.attrs[kAttrFirstBetaColumn].i);
    args.beta_pitch = call.dims[kDimC];
  }
  args.step_min = call.attrs[kAttrStepMin].f;
  const float most = call.attrs[kAttrStepMax].f;
  args.step_max = most == 0.0f ? std::numeric_limits<float>::infinity() : most;
  args.beta_scale = call.attrs[kAttrBetaScale].f;
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  const Args args = make_args(call);
  const auto kernel = select_make_gates();
  const int64_t rows = args.batch * args.tokens;
  const int64_t of_piece = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, args.heads * args.width));
  parallel_for(*target.threads, ceil_div(rows, of_piece),
               [&](int64_t piece) { kernel(args, piece * of_piece, std::min(rows, (piece + 1) * of_piece)); });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return cuda_status(call, "launch of the DecayGates kernel", launch(make_args(call), target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_sizes, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::decay_gates
