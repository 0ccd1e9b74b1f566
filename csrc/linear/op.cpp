// Linear: from tensors and attributes to Args, which kernels run, and how the CPU cuts the work.
#include "linear/linear.h"

#include <algorithm>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#ifdef LEANFLEET_CUDA
#include "core/cublas.h"
#include "core/cuda_target.h"
#endif

namespace leanfleet::linear {

LEANFLEET_CPU_FUNCTION(void, widen, (const Args& args, int64_t begin, int64_t end, float* to))
LEANFLEET_CPU_FUNCTION(void, multiply,
                       (const Args& args, const float* input, int64_t first_row, int64_t rows, int64_t first_column,
                        int64_t columns, float* scratch))

FewRows plan_few_rows(const Args& args, int sm_count) {
  FewRows plan = {};
  const int64_t depth = args.gated ? 64 : 128;
  plan.units_of_tile = static_cast<int32_t>(ceil_div(args.depth, depth));
  plan.tiles = static_cast<int32_t>(ceil_div(args.width, int64_t{64}));
  plan.ctas = static_cast<int32_t>(std::min<int64_t>(sm_count, int64_t{plan.units_of_tile} * plan.tiles));
  plan.rows = args.rows <= 8 ? 8 : kFewRows;
  plan.partial_bytes = 2 * int64_t{plan.ctas} * plan.rows * (args.gated ? 128 : 64) * static_cast<int64_t>(sizeof(float));
  return plan;
}

Way way_of(const Args& args, int compute_capability, bool has_cublas) {
  constexpr int64_t kMostUnits = 1 << 22;
  const bool halves = args.dtype != static_cast<int32_t>(DType::kFloat32);
  if (halves && compute_capability == 90 && args.rows <= kFewRows && args.depth > 0 && args.depth % 8 == 0 &&
      args.width % 8 == 0 && ceil_div(args.depth, int64_t{64}) * ceil_div(args.width, int64_t{64}) <= kMostUnits)
    return Way::kFewRows;
  return has_cublas && args.depth > 0 ? Way::kCublas : Way::kPlain;
}

namespace {

Args make_args(const Call& call) {
  Args args = {};
  args.input = call.inputs[kInput].data;
  args.weight = call.inputs[kWeight].data;
  args.bias = call.inputs[kBias].data;
  args.output = call.outputs[kOutOutput].data;
  args.dtype = static_cast<int32_t>(call.inputs[kInput].dtype);
  args.activation = static_cast<Kind>(call.attrs[kAttrActivation].i);
  args.gated = call.attrs[kAttrGated].i != 0;
  args.constant_weight = call.attrs[kAttrConstantWeight].i != 0;
  args.rows = call.dims[kDimB] * call.dims[kDimN];
  args.depth = call.dims[kDimI];
  args.width = call.dims[kDimO];
  args.columns = args.gated ? 2 * args.width : args.width;
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  constexpr int64_t kLeastColumns = 64;  // 128 bytes of a row of the weight, or more
  const Args args = make_args(call);
  const int64_t workers = target.threads->count();
  float* const input = ws.scratch<float>(args.rows * args.depth);
  float* const own = ws.scratch<float>(workers * kCpuScratch);
  if (ws.counting() || args.rows == 0 || args.width == 0) return {};
  const int64_t parts = ceil_div(args.rows, kCpuRows);
  const auto widen = select_widen();
  parallel_for(*target.threads, parts,
               [&](int64_t part) { widen(args, part * kCpuRows, std::min(args.rows, (part + 1) * kCpuRows), input); });
  // So many columns that each worker has some blocks.
  const bool few = args.rows <= kCpuFewRows;
  const int64_t wanted = round_up(ceil_div(args.width * parts, (few ? 2 : 4) * workers), kLeastColumns);
  const int64_t columns = std::clamp(wanted, kLeastColumns, few ? kCpuFewColumns : kCpuColumns);
  const int64_t blocks = ceil_div(args.width, columns);
  const auto multiply = select_multiply();
  run_items(*target.threads, blocks * parts, workers, [&](int64_t item, int64_t worker) {
    const int64_t row = item % parts * kCpuRows, column = item / parts * columns;
    multiply(args, input, row, std::min(kCpuRows, args.rows - row), column, std::min(columns, args.width - column),
             own + worker * kCpuScratch);
  });
  return {};
}

#ifdef LEANFLEET_CUDA
bool is_aligned(const Args& args) {
  for (const void* data : {args.input, args.weight, args.bias, static_cast<const void*>(args.output)})
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  return true;
}

int activate(const Args& args, const void* product, void* stream) {
  gated_activation::Args gate = {};
  gate.gate = product;
  gate.up = static_cast<const char*>(product) + args.width * element_size(static_cast<DType>(args.dtype));
  gate.output = args.output;
  gate.dtype = args.dtype;
  gate.activation = args.activation;
  gate.rows = args.rows;
  gate.width = args.width;
  gate.gate_pitch = gate.up_pitch = args.columns;
  gate.heads = 1;
  return gated_activation::launch(gate, stream);
}

Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  const bool few_rows = target.compute_capability == 90 && runs_few_rows();
  Way way = way_of(args, few_rows ? 90 : 0, has_cublas());
  const FewRows plan = way == Way::kFewRows ? plan_few_rows(args, target.sm_count) : FewRows{};
  char* const partial = ws.scratch<char>(plan.partial_bytes);
  uint32_t* const tickets = ws.sync<uint32_t>(plan.tiles);
  char* const cublas_workspace = ws.scratch<char>(way == Way::kCublas ? kCublasWorkspace : 0);
  char* const product =
      ws.scratch<char>(args.gated ? args.rows * args.columns * element_size(static_cast<DType>(args.dtype)) : 0);
  if (ws.counting() || args.rows == 0 || args.width == 0) return {};
  if (!is_aligned(args)) way = Way::kPlain;
  if (way == Way::kFewRows)
    return cuda_status(call, "launch of the Linear kernel of few rows",
                       launch_few_rows(args, plan, partial, tickets, target.stream));
  void* const output = args.gated ? product : args.output;
  bool done = false;
  if (way == Way::kCublas) {
    const CublasProduct of = {args.input, args.weight, args.bias,    output,
                              args.rows,  args.depth,  args.columns, cublas_workspace};
    const Status status = multiply_by_cublas(call, of, static_cast<DType>(args.dtype), target, &done);
    if (!status.ok()) return status;
  }
  if (!done) {
    const Status status = cuda_status(call, "launch of the Linear kernel", launch_plain(args, output, target.stream));
    if (!status.ok()) return status;
  }
  if (!args.gated) return {};
  return cuda_status(call, "launch of the activation behind Linear", activate(args, product, target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {nullptr, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::linear
