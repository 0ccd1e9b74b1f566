#include "normalized_linear_attention/normalized_linear_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"

#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::normalized_linear_attention {

LEANFLEET_CPU_FUNCTION(void, linear_scan, (const LinearScan& scan, ScanPhase phase, int64_t task))

namespace {

constexpr int64_t kBlockRows = 32;         // rows of x or y per block of tokens
constexpr int64_t kMinSegmentTokens = 64;  // below it a segment's own overhead shows
constexpr int64_t kWorkersPerThread = 4;   // so that a slow thread does not hold up the others
#ifdef LEANFLEET_CUDA
constexpr int64_t kCudaMaxWidth = 256;  // of rows that the chunked scans multiply
#endif
constexpr int64_t kMaxStateFloats = int64_t{1} << 40;  // so that sizes of scratch fit in int64
constexpr int64_t kPackingColumns = 8;                 // reading a token costs a range as much as this many more columns

// Columns are divided before tokens are: ranges of columns only repeat the packing, segments of a causal scan also
// repeat the sums. A range holds whole rows of out where the gradient of unit rows needs them.
void plan_ranges(LinearScan& scan, int64_t threads) {
  const int64_t heads = scan.batch * scan.kv_heads, columns = scan.z.width;
  const int64_t blocks = ceil_div(columns, kScanColumns);
  const bool whole_rows = scan.source.kind == RowKind::kUnit;
  double best = 0.0;
  for (int64_t ranges = 1; ranges <= (whole_rows ? 1 : blocks); ++ranges) {
    const int64_t width = ceil_div(blocks, ranges) * kScanColumns;
    if ((ranges - 1) * width >= columns) continue;
    for (int64_t wave = 0; wave <= 4; ++wave) {
      const int64_t wanted = threads * wave / (heads * ranges);
      int64_t segments = std::max<int64_t>(1, std::min(wanted, scan.tokens / kMinSegmentTokens));
      const int64_t tokens = ceil_div(scan.tokens, segments);
      segments = ceil_div(scan.tokens, tokens);
      const int64_t repeated = scan.causal && segments > 1 ? scan.y.per_head : 0;
      const double walks = double(ceil_div(heads * ranges * segments, threads)) * tokens * (width + kPackingColumns) *
                           (scan.x.per_head + scan.y.per_head + repeated);
      const double combining = segments > 1 ? 2.0 * ceil_div(heads * ranges, threads) * segments * width : 0.0;
      if (best != 0.0 && walks + combining >= best) continue;
      best = walks + combining;
      scan.ranges = ranges;
      scan.range_width = width;
      scan.segments = segments;
      scan.segment_tokens = tokens;
    }
  }
}

void plan(LinearScan& scan, int64_t threads) {
  plan_ranges(scan, threads);
  const int64_t items = scan.batch * scan.kv_heads * scan.ranges * scan.segments;
  scan.workers = scan.segments > 1 ? items : std::min(items, threads * kWorkersPerThread);
  const int64_t tokens = std::max<int64_t>(1, kBlockRows / std::max(scan.x.per_head, scan.y.per_head));
  scan.block_tokens = std::min(tokens, scan.segment_tokens);

  ScanScratch& at = scan.layout;
  int64_t used = 0;
  const auto take = [&](int64_t floats) {
    const int64_t begin = used;
    used += round_up(floats, kScanColumns);
    return begin;
  };
  const int64_t width = scan.y.width, x_rows = scan.block_tokens * scan.x.per_head;
  const int64_t y_rows = scan.block_tokens * scan.y.per_head;
  // An odd number of cache lines, so that the rows of a block fall into different sets.
  at.row_stride = round_up(width + 1, kScanColumns);
  if (at.row_stride / kScanColumns % 2 == 0) at.row_stride += kScanColumns;
  at.state = take((width + 1) * scan.range_width);
  at.y_sum = take(width);
  at.x = take(x_rows * at.row_stride);
  at.y = take(y_rows * at.row_stride);
  at.z = take(y_rows * scan.range_width);
  at.out = take(x_rows * scan.range_width);
  at.row_sums = take(x_rows);
  at.source = take(scan.range_width);
  at.size = used;
}

void run_scan(const LinearScan& scan, Threads& threads) {
  const auto task = select_linear_scan();
  const int64_t units = scan.batch * scan.kv_heads * scan.ranges;
  if (scan.segments > 1) {
    parallel_for(threads, units * scan.segments, [&](int64_t i) { task(scan, ScanPhase::kReduce, i); });
    parallel_for(threads, units, [&](int64_t i) { task(scan, ScanPhase::kCombine, i); });
  }
  parallel_for(threads, scan.workers, [&](int64_t i) { task(scan, ScanPhase::kScan, i); });
}

ScanRows rows_of(const void* data, const Strides& strides, int64_t width, int64_t per_head, RowKind kind) {
  ScanRows rows = {};
  rows.data = data;
  rows.strides = strides;
  rows.width = width;
  rows.per_head = per_head;
  rows.kind = kind;
  rows.scale = 1.0f;
  rows.extra = 1.0f;
  return rows;
}

ScanRows scaled(ScanRows rows, float scale, float extra) {
  rows.scale = scale;
  rows.extra = extra;
  return rows;
}

// What every scan of a call starts from.
struct Operands {
  float a, b;
  ScanRows query, key, value;
  LinearScan scan;
};

Operands operands_of(const Inputs& in) {
  Operands operands = {};
  operands.a = in.coefficients != nullptr ? in.coefficients[0] : 1.0f;
  operands.b = in.coefficients != nullptr ? in.coefficients[1] : 1.0f;
  const RowKind kind = in.normalize_qk ? RowKind::kUnit : RowKind::kPlain;
  operands.query = rows_of(in.query, in.query_strides, in.dim, in.heads / in.kv_heads, kind);
  operands.key = rows_of(in.key, in.key_strides, in.dim, 1, kind);
  operands.value = rows_of(in.value, in.value_strides, in.value_dim, 1, RowKind::kPlain);
  LinearScan& scan = operands.scan;
  scan.dtype = in.dtype;
  scan.causal = in.causal;
  scan.eps = in.eps;
  scan.batch = in.batch;
  scan.kv_heads = in.kv_heads;
  scan.tokens = in.tokens;
  scan.out_scale = 1.0f;
  scan.normalizer_strides = in.normalizer_strides;
  return operands;
}

// The two operators have these inputs, attributes and sizes in common.
namespace forward = normalized_linear_attention;
namespace backward = normalized_linear_attention_grad;
static_assert(int(forward::kQuery) == backward::kQuery && int(forward::kKey) == backward::kKey &&
              int(forward::kValue) == backward::kValue && int(forward::kCoefficients) == backward::kCoefficients);
static_assert(int(forward::kAttrCausal) == backward::kAttrCausal && int(forward::kAttrEps) == backward::kAttrEps &&
              int(forward::kAttrNormalizeQk) == backward::kAttrNormalizeQk);
static_assert(int(forward::kDimB) == backward::kDimB && int(forward::kDimH) == backward::kDimH &&
              int(forward::kDimN) == backward::kDimN && int(forward::kDimD) == backward::kDimD &&
              int(forward::kDimHkv) == backward::kDimHkv && int(forward::kDimDv) == backward::kDimDv);

Inputs inputs_of(const Call& call) {
  Inputs in = {};
  in.query = call.inputs[forward::kQuery].data;
  in.key = call.inputs[forward::kKey].data;
  in.value = call.inputs[forward::kValue].data;
  in.coefficients = call.inputs[forward::kCoefficients].as<const float>();
  in.dtype = static_cast<int32_t>(call.inputs[forward::kQuery].dtype);
  in.causal = call.attrs[forward::kAttrCausal].i != 0;
  in.normalize_qk = call.attrs[forward::kAttrNormalizeQk].i != 0;
  in.eps = call.attrs[forward::kAttrEps].f;
  in.batch = call.dims[forward::kDimB];
  in.heads = call.dims[forward::kDimH];
  in.kv_heads = call.dims[forward::kDimHkv];
  in.tokens = call.dims[forward::kDimN];
  in.dim = call.dims[forward::kDimD];
  in.value_dim = call.dims[forward::kDimDv];
  in.query_strides = head_token_strides(call.bnhd(), in.heads, in.tokens, in.dim);
  in.key_strides = head_token_strides(call.bnhd(), in.kv_heads, in.tokens, in.dim);
  in.value_strides = head_token_strides(call.bnhd(), in.kv_heads, in.tokens, in.value_dim);
  in.output_strides = head_token_strides(call.bnhd(), in.heads, in.tokens, in.value_dim);
  in.normalizer_strides = head_token_strides(call.bnhd(), in.heads, in.tokens, 1);
  return in;
}

Status check_state_size(const Call& call) {
  const int64_t size = call.dims[forward::kDimD] * call.dims[forward::kDimDv];
  if (size <= kMaxStateFloats) return {};
  return call.unsupported("a state has D x Dv = " + std::to_string(size) + " elements; the kernels take up to 2^40");
}

#ifdef LEANFLEET_CUDA
// Launches count CTAs in 32 bits.
Status check_cuda_size(const Call& call, const Inputs& in) {
  const auto refuse = [&](const char* what, int64_t count) {
    return call.unsupported(std::string("query has ") + what + " = " + std::to_string(count) +
                            "; on CUDA it is less than 2^31, larger calls run on the CPU");
  };
  const int64_t heads = in.batch * in.heads;
  if (heads > kMaxAxis) return refuse("B x H", heads);
  if (heads * in.tokens > kMaxAxis) return refuse("B x H x N", heads * in.tokens);
  if (heads * in.dim > kMaxAxis) return refuse("B x H x D", heads * in.dim);
  if (heads * in.value_dim > kMaxAxis) return refuse("B x H x Dv", heads * in.value_dim);
  return {};
}
#endif

Status check_coefficients(const Call& call, const Tensor& coefficients) {
  for (int i = 0; coefficients.present() && i < 2; ++i) {
    const float value = coefficients.as<const float>()[i];
    if (!std::isfinite(value))
      return call.invalid("input coefficients holds " + std::to_string(value) + " for " + (i == 0 ? "a" : "b") +
                          "; expected two finite numbers a, b");
  }
  return {};
}

Args make_args(const Call& call) {
  Args args = {};
  args.in = inputs_of(call);
  args.initial_state = call.inputs[kInitialState].as<const float>();
  args.initial_key_sum = call.inputs[kInitialKeySum].as<const float>();
  args.initial_value_sum = call.inputs[kInitialValueSum].as<const float>();
  args.initial_count = call.inputs[kInitialCount].as<const int32_t>();
  args.output = call.outputs[kOutOutput].data;
  args.normalizer = call.outputs[kOutNormalizer].as<float>();
  args.final_state = call.outputs[kOutFinalState].as<float>();
  args.final_key_sum = call.outputs[kOutFinalKeySum].as<float>();
  args.final_value_sum = call.outputs[kOutFinalValueSum].as<float>();
  args.final_count = call.outputs[kOutFinalCount].as<int32_t>();
  args.carries_state = call.inputs[kInitialState].present() && call.attrs[kAttrReturnState].i != 0;
  return args;
}

Status check_values(const Call& call, bool strict) {
  LEANFLEET_RETURN_IF_ERROR(check_coefficients(call, call.inputs[kCoefficients]));
  const Tensor& count = call.inputs[kInitialCount];
  for (int64_t i = 0; strict && count.present() && i < count.shape[0]; ++i) {
    const int32_t value = count.as<const int32_t>()[i];
    const auto found = [&] {
      return "input initial_count holds " + std::to_string(value) + " for request " + std::to_string(i);
    };
    if (value < 0) return call.invalid(found() + "; expected the number of tokens seen, at least 0");
    const int64_t most = kMaxCount - call.dims[kDimN];
    if (call.attrs[kAttrReturnState].i != 0 && value > most)
      return call.invalid(found() + "; with N = " + std::to_string(call.dims[kDimN]) + " more expected at most " +
                          std::to_string(most) + ", because final_count ends at 2^31 - 1");
  }
  return {};
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  // While a workspace is counted the coefficients are null, like every tensor.
  const Operands operands = operands_of(args.in);
  LinearScan scan = operands.scan;
  scan.row_sums = true;
  scan.x = scaled(operands.query, operands.b, operands.a);
  scan.y = operands.key;
  scan.z = operands.value;
  scan.out = args.output;
  scan.out_strides = args.in.output_strides;
  scan.normalizer = args.normalizer;
  scan.initial_state = args.initial_state;
  scan.initial_y_sum = args.initial_key_sum;
  scan.initial_z_sum = args.initial_value_sum;
  scan.initial_count = args.initial_count;
  scan.final_state = args.final_state;
  scan.final_y_sum = args.final_key_sum;
  scan.final_z_sum = args.final_value_sum;
  plan(scan, target.threads->count());
  scan.scratch = ws.scratch<float>(scan.workers * scan.layout.size);
  // Every range of columns reads the key sum, and one of them writes it, perhaps into the same buffer.
  const bool shared_key_sum = call.inputs[kInitialKeySum].present() && scan.ranges > 1 && scan.segments == 1;
  const int64_t key_sums = args.in.batch * args.in.kv_heads * args.in.dim;
  float* key_sum = shared_key_sum ? ws.scratch<float>(key_sums) : nullptr;
  if (ws.counting()) return {};
  if (shared_key_sum) {
    std::memcpy(key_sum, args.initial_key_sum, sizeof(float) * static_cast<size_t>(key_sums));
    scan.initial_y_sum = key_sum;
  }
  run_scan(scan, *target.threads);
  for (int64_t b = 0; b < args.in.batch && args.final_count != nullptr; ++b) {
    const int64_t before = args.initial_count != nullptr ? args.initial_count[b] : 0;
    args.final_count[b] = static_cast<int32_t>(std::min(before + args.in.tokens, kMaxCount));
  }
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (call.dims[kDimD] > kCudaMaxWidth)
    return call.unsupported("query has D = " + std::to_string(call.dims[kDimD]) + "; on CUDA D is at most 256");
  const Args args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_size(call, args.in));
  return cuda_status(call, "launching the kernels", launch_forward(args, target, ws));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_state_size, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::normalized_linear_attention

namespace leanfleet::normalized_linear_attention_grad {

namespace {

using namespace normalized_linear_attention;  // what the two operators share; names of this one come first

GradArgs make_args(const Call& call) {
  GradArgs args = {};
  args.in = inputs_of(call);
  args.output = call.inputs[kOutput].data;
  args.normalizer = call.inputs[kNormalizer].as<const float>();
  args.grad_output = call.inputs[kGradOutput].data;
  args.grad_query = call.outputs[kOutGradQuery].data;
  args.grad_key = call.outputs[kOutGradKey].data;
  args.grad_value = call.outputs[kOutGradValue].data;
  args.grad_coefficients = call.outputs[kOutGradCoefficients].as<float>();
  args.wants_grad_coefficients = call.attrs[kAttrGradCoefficients].i != 0;
  return args;
}

Status check_values(const Call& call, bool) { return check_coefficients(call, call.inputs[kCoefficients]); }

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const GradArgs args = make_args(call);
  const Inputs& in = args.in;
  const Operands operands = operands_of(in);
  ScanRows weighted = rows_of(args.grad_output, in.output_strides, in.value_dim, in.heads / in.kv_heads, RowKind::kWeighted);
  weighted.output = args.output;
  weighted.normalizer = args.normalizer;
  weighted.normalizer_strides = in.normalizer_strides;

  LinearScan scans[3] = {operands.scan, operands.scan, operands.scan};
  LinearScan& query = scans[0];
  query.row_sums = args.wants_grad_coefficients;
  query.x = weighted;
  query.y = operands.value;
  query.z = operands.key;
  if (args.wants_grad_coefficients || in.normalize_qk) query.source = operands.query;
  query.out = args.grad_query;
  query.out_strides = in.query_strides;
  query.out_scale = operands.b;
  LinearScan& key = scans[1];
  key.reverse = true;
  key.x = operands.value;
  key.y = weighted;
  key.z = operands.query;
  if (in.normalize_qk) key.source = operands.key;
  key.out = args.grad_key;
  key.out_strides = in.key_strides;
  key.out_scale = operands.b;
  LinearScan& value = scans[2];
  value.reverse = true;
  value.x = scaled(operands.key, operands.b, operands.a);
  value.y = operands.query;
  value.z = weighted;
  value.out = args.grad_value;
  value.out_strides = in.value_strides;

  int64_t floats = 0;
  for (LinearScan& scan : scans) {
    plan(scan, target.threads->count());
    floats = std::max(floats, scan.workers * scan.layout.size);
  }
  float* scratch = ws.scratch<float>(floats);
  const int64_t items = in.batch * in.kv_heads * query.ranges * query.segments;
  if (args.wants_grad_coefficients) query.totals = ws.scratch<double>(2 * items);
  if (ws.counting()) return {};
  for (LinearScan& scan : scans) {
    scan.scratch = scratch;
    run_scan(scan, *target.threads);
  }
  if (!args.wants_grad_coefficients) return {};
  double sums[2] = {0.0, 0.0};
  for (int64_t i = 0; i < 2 * items; ++i) sums[i % 2] += query.totals[i];
  for (int i = 0; i < 2; ++i) args.grad_coefficients[i] = static_cast<float>(sums[i]);
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  for (const int dim : {kDimD, kDimDv})
    if (call.dims[dim] > kCudaMaxWidth)
      return call.unsupported(std::string(dim == kDimD ? "query has D = " : "value has Dv = ") +
                              std::to_string(call.dims[dim]) + "; on CUDA it is at most 256");
  const GradArgs args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_size(call, args.in));
  return cuda_status(call, "launching the kernels", launch_grad(args, target, ws));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_state_size, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::normalized_linear_attention_grad
