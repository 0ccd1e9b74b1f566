#include <algorithm>
#include <cstdlib>

#include "block_linear/block_linear.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::block_linear {

LEANFLEET_CPU_FUNCTION(int64_t, few_rows, ())
LEANFLEET_CPU_FUNCTION(int64_t, panel_outputs, ())
LEANFLEET_CPU_FUNCTION(int64_t, panel_bytes, (const Args& args))
LEANFLEET_CPU_FUNCTION(void, prepare, (const Args& args, int64_t row, float* block))
LEANFLEET_CPU_FUNCTION(void, multiply_few, (const Args& args, int64_t begin, int64_t end))
LEANFLEET_CPU_FUNCTION(void, multiply_panel, (const Args& args, int64_t output, int64_t begin, int64_t end, char* scratch))
LEANFLEET_CPU_FUNCTION(void, multiply_floats, (const Args& args, int64_t begin, int64_t end, float* scratch))

namespace {

constexpr int64_t kPieceBytes = 32 << 10;  // of weights: fewer are sooner multiplied than shared out
constexpr int64_t kRowsBytes = 512 << 10;  // of the rounded input, which a panel meets in the cache
constexpr int64_t kAlone = 16 << 10;       // numbers of the input that one thread has sooner rounded than others hear of it

Form form_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8: return Form::kInt8;
    case DType::kUint8: return Form::kInt4;
    case DType::kFloat8e4m3fn: return Form::kFloat8;
    default: return Form::kOfT;
  }
}

Args make_args(const Call& call) {
  Args args = {};
  args.input = call.inputs[kInput].data;
  args.weight = call.inputs[kWeight].data;
  args.scale = call.inputs[kScale].data;
  args.shift = call.inputs[kShift].data;
  args.bias = call.inputs[kBias].data;
  args.output = call.outputs[kOutOutput].data;
  args.dtype = static_cast<int32_t>(call.inputs[kInput].dtype);
  args.scale_dtype = static_cast<int32_t>(call.inputs[kScale].dtype);
  args.shift_dtype = static_cast<int32_t>(call.inputs[kShift].dtype);
  args.form = form_of(call.inputs[kWeight].dtype);
  args.round_input = call.attrs[kAttrRoundInput].i != 0;
  args.rows = call.dims[kDimB] * call.dims[kDimN];
  args.width = call.dims[kDimI];
  args.outputs = call.dims[kDimO];
  args.blocks = call.dims[kDimG];
  args.block = args.blocks > 0 ? args.width / args.blocks : 0;
  return args;
}

// Columns whose products are added up as integers: all of a block's, or parts of it.
int chunk_of(const Args& args) {
  const bool integers = args.form == Form::kInt8 || args.form == Form::kInt4;
  if (!args.round_input || !integers || args.block == 0) return 0;
  return args.block % 32 == 0 ? 32 : args.block % 16 == 0 ? 16 : 0;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  Args args = make_args(call);
  Threads& threads = *target.threads;
  const int64_t workers = threads.count();
  args.chunk = chunk_of(args);
  args.pitch = round_up(args.width, kPitch);
  args.integer_products = cpu_has_integer_products();
  const int64_t chunks = args.chunk > 0 ? args.width / args.chunk : 0;
  const bool in_floats = args.chunk == 0, few = args.rows <= select_few_rows()();
  args.rounded = ws.scratch<int8_t>(in_floats ? 0 : args.rows * args.pitch);
  args.steps = ws.scratch<float>(args.rows * chunks);
  args.sums = ws.scratch<float>(args.rows * chunks);
  args.floats = ws.scratch<float>(in_floats ? args.rows * args.width : 0);
  // A worker's: the floats of a block, then a row of weights as floats, or a panel.
  int64_t own_bytes = in_floats ? args.width * sizeof(float) : args.block * sizeof(float);
  if (!in_floats && !few) own_bytes = std::max(own_bytes, select_panel_bytes()(args));
  own_bytes = round_up(own_bytes, kPitch);
  char* const own = ws.scratch<char>(workers * own_bytes);
  if (ws.counting() || args.rows == 0 || args.outputs == 0) return {};

  const auto prepare = select_prepare();
  const auto own_of = [&](int64_t worker) { return own + worker * own_bytes; };
  if (args.rows * args.width <= kAlone) {
    for (int64_t row = 0; row < args.rows; ++row) prepare(args, row, reinterpret_cast<float*>(own));
  } else {
    run_items(threads, args.rows, workers,
              [&](int64_t row, int64_t worker) { prepare(args, row, reinterpret_cast<float*>(own_of(worker))); });
  }
  const int64_t row_bytes = std::max<int64_t>(args.width * (args.form == Form::kInt4 ? 1 : 2) / 2, 1);
  const int64_t piece = std::max<int64_t>(kPieceBytes / row_bytes, 16), pieces = ceil_div(args.outputs, piece);
  if (in_floats) {
    const auto multiply = select_multiply_floats();
    run_items(threads, pieces, workers, [&](int64_t i, int64_t worker) {
      multiply(args, i * piece, std::min(args.outputs, (i + 1) * piece), reinterpret_cast<float*>(own_of(worker)));
    });
  } else if (few) {
    const auto multiply = select_multiply_few();
    run_items(threads, pieces, workers,
              [&](int64_t i, int64_t) { multiply(args, i * piece, std::min(args.outputs, (i + 1) * piece)); });
  } else {
    const auto multiply = select_multiply_panel();
    const int64_t panel = select_panel_outputs()(), panels = ceil_div(args.outputs, panel);
    const int64_t rows = std::max<int64_t>(kRowsBytes / args.pitch, 64), parts = ceil_div(args.rows, rows);
    run_items(threads, panels * parts, workers, [&](int64_t i, int64_t worker) {
      const int64_t begin = i / panels * rows;
      multiply(args, i % panels * panel, begin, std::min(args.rows, begin + rows), own_of(worker));
    });
  }
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  Args args = make_args(call);
  args.rounded_input =
      ws.scratch<char>(args.round_input ? args.rows * args.width * element_size(call.inputs[kInput].dtype) : 0);
  if (way_of(args) == Way::kPanels) {
    const char* const split = std::getenv("LEANFLEET_BLOCK_SPLIT");  // of tests and measurements
    args.panels = plan_panels(args, target.sm_count, split != nullptr ? std::clamp(std::atoi(split), 0, 1 << 16) : 0);
  }
  args.partial = ws.scratch<char>(args.panels.partial);
  if (ws.counting()) return {};
  if (args.panels.partial > 0 && args.partial == nullptr)
    return Status::internal("LEANFLEET_BLOCK_SPLIT has changed since the workspace was counted");
  return cuda_status(call, "launch of the BlockLinear kernels", launch(args, target.stream));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {nullptr, nullptr, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::block_linear
