#include <algorithm>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "merge_attention/merge_attention.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::merge_attention {

LEANFLEET_CPU_FUNCTION(void, merge, (const Args& args, int64_t begin, int64_t end))

namespace {

constexpr int64_t kPiece = 16384;  // numbers read: fewer are sooner done than shared out

Args make_args(const Call& call) {
  Args args = {};
  args.partial_output = call.inputs[kPartialOutput].data;
  args.partial_lse = call.inputs[kPartialLse].as<const float>();
  args.output = call.outputs[kOutOutput].data;
  args.lse = call.outputs[kOutLse].as<float>();
  args.dtype = static_cast<int32_t>(call.inputs[kPartialOutput].dtype);
  args.parts = call.dims[kDimW];
  args.rows = call.dims[kDimB] * call.dims[kDimH] * call.dims[kDimNq];
  args.width = call.dims[kDimDv];
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  const Args args = make_args(call);
  const auto kernel = select_merge();
  const int64_t rows_of_piece = std::max<int64_t>(1, kPiece / (args.parts * args.width));
  parallel_for(*target.threads, ceil_div(args.rows, rows_of_piece),
               [&](int64_t piece) { kernel(args, piece * rows_of_piece, std::min(args.rows, (piece + 1) * rows_of_piece)); });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return cuda_status(call, "launch of the MergeAttention kernel", launch(make_args(call), target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {nullptr, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::merge_attention
