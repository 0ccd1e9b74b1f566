#include "core/cpu_isa.h"
#include "core/op_specs.h"
#include "scaled_add.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::scaled_add {

LEANFLEET_CPU_FUNCTION(void, add_row, (const Args& args, int64_t row))

namespace {

Args make_args(const Call& call, Workspace& ws) {
  const int64_t heads = call.dims[kDimH], tokens = call.dims[kDimN], width = call.dims[kDimD];
  const Strides strides = head_token_strides(call.bnhd(), heads, tokens, width);
  Args args = {};
  args.x = call.inputs[kX].data;
  args.y = call.inputs[kY].data;
  args.output = call.outputs[kOutOutput].data;
  args.total = call.inputs[kTotal].as<const float>();
  args.total_out = call.outputs[kOutTotalOut].as<float>();
  args.dtype = static_cast<int32_t>(call.inputs[kX].dtype);
  args.rows = call.dims[kDimB] * heads;
  args.heads = heads;
  args.tokens = tokens;
  args.width = width;
  args.batch_stride = strides.batch;
  args.head_stride = strides.head;
  args.token_stride = strides.token;
  args.alpha = call.attrs[kAttrAlpha].f;
  args.partial = ws.scratch<float>(args.rows);
  args.arrivals = ws.sync<uint32_t>(1);
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Args args = make_args(call, ws);
  if (ws.counting()) return {};
  const auto row_kernel = select_add_row();
  parallel_for(*target.threads, args.rows, [&](int64_t row) { row_kernel(args, row); });
  for (int64_t row = 0; row < args.rows && args.total != nullptr; ++row)
    args.total_out[row] = args.total[row] + args.partial[row];
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const Args args = make_args(call, ws);
  if (ws.counting()) return {};
  return cuda_status(call, "launch of the ScaledAdd kernel", launch(args, target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {nullptr, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::scaled_add
