#include "core/merge_parts.h"
#include "core/op_specs.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::merge_attention {

namespace {

merge_parts::Args make_args(const Call& call) {
  merge_parts::Args args = {};
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
  if (!ws.counting()) merge_parts::run(make_args(call), *target.threads);
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return cuda_status(call, "launch of the MergeAttention kernel", merge_parts::launch(make_args(call), target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {nullptr, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::merge_attention
