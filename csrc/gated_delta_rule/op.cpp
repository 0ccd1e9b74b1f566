// GatedDeltaRule: from tensors and attributes to Args, and how the CPU cuts the work.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "core/requests.h"
#include "gated_delta_rule/gated_delta_rule.h"

#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::gated_delta_rule {

LEANFLEET_CPU_FUNCTION(int64_t, scratch_floats, (const CpuPlan& plan))
LEANFLEET_CPU_FUNCTION(void, run_item, (const CpuPlan& plan, int64_t index, float* scratch))

namespace {

constexpr double kMinWorkerCost = 1 << 16;             // multiplications that are worth another thread
constexpr int64_t kMaxStateFloats = int64_t{1} << 40;  // so that sizes of scratch fit in int64

Status check(const Call& call) {
  const int64_t queries = call.dims[kDimHq], values = call.dims[kDimHv], size = call.dims[kDimD] * call.dims[kDimDv];
  if (std::max(queries, values) % std::min(queries, values) != 0)
    return call.invalid("Hq = " + std::to_string(queries) + " and Hv = " + std::to_string(values) +
                        "; one of the two must be a multiple of the other");
  if (size > kMaxStateFloats)
    return call.unsupported("a state has D x Dv = " + std::to_string(size) + " elements; the kernels take up to 2^40");
  return {};
}

// A beta outside [0, 2] makes states grow without end, but it may be meant.
Status check_beta(const Call& call) {
  const Tensor& beta = call.inputs[kBeta];
  const float* values = beta.as<const float>();
  const int64_t inner = beta.shape[1] * beta.shape[2];
  for (int64_t i = 0; i < beta.elements(); ++i) {
    if (values[i] >= 0.0f && values[i] <= 2.0f) continue;
    const int64_t row = i / inner, first = i / beta.shape[2] % beta.shape[1], second = i % beta.shape[2];
    if (!in_a_request(call.inputs[kCuSeqlens], call.bnhd() ? first : second)) continue;
    return call.invalid("beta[" + std::to_string(row) + "," + std::to_string(first) + "," + std::to_string(second) + "] is " +
                        std::to_string(values[i]) + "; expected a number in [0, 2]");
  }
  return {};
}

Status check_values(const Call& call, bool strict) {
  const Tensor& offsets = call.inputs[kCuSeqlens];
  LEANFLEET_RETURN_IF_ERROR(check_log_decay(call, call.inputs[kLogDecay], offsets));
  if (!strict) return {};
  if (offsets.present()) LEANFLEET_RETURN_IF_ERROR(check_cu_seqlens(call, offsets, call.dims[kDimN]));
  LEANFLEET_RETURN_IF_ERROR(check_beta(call));
  if (call.inputs[kStateIndex].present()) return check_state_index(call, call.inputs[kStateIndex], call.dims[kDimP], offsets);
  return {};
}

Args make_args(const Call& call) {
  Args args = {};
  args.query = call.inputs[kQuery].data;
  args.key = call.inputs[kKey].data;
  args.value = call.inputs[kValue].data;
  args.log_decay = call.inputs[kLogDecay].as<const float>();
  args.beta = call.inputs[kBeta].as<const float>();
  args.initial_state = call.inputs[kInitialState].as<const float>();
  args.cu_seqlens = call.inputs[kCuSeqlens].as<const int32_t>();
  args.state_index = call.inputs[kStateIndex].as<const int32_t>();
  args.output = call.outputs[kOutOutput].data;
  args.final_state = call.outputs[kOutFinalState].as<float>();
  args.dtype = static_cast<int32_t>(call.inputs[kQuery].dtype);
  args.decay_per_key = call.inputs[kLogDecay].rank == 4;
  args.normalize = call.attrs[kAttrNormalizeQk].i != 0;
  args.state_v_first = call.attrs[kAttrStateVFirst].i != 0;
  args.batch = call.dims[kDimB];
  args.requests = call.inputs[kCuSeqlens].present() ? call.inputs[kCuSeqlens].shape[0] - 1 : args.batch;
  args.q_heads = call.dims[kDimHq];
  args.k_heads = call.dims[kDimHk];
  args.v_heads = call.dims[kDimHv];
  args.heads = std::max(args.q_heads, args.v_heads);
  args.tokens = call.dims[kDimN];
  args.key_width = call.dims[kDimD];
  args.value_width = call.dims[kDimDv];
  args.state_rows = call.inputs[kStateIndex].present() ? call.dims[kDimP] : args.requests;
  const float scale = call.attrs[kAttrScale].f;
  args.scale = scale != 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(args.key_width));
  const auto strides = [&](int64_t heads, int64_t width) { return head_token_strides(call.bnhd(), heads, args.tokens, width); };
  args.query_strides = strides(args.q_heads, args.key_width);
  args.key_strides = strides(args.k_heads, args.key_width);
  args.value_strides = strides(args.v_heads, args.value_width);
  args.output_strides = strides(args.heads, args.value_width);
  args.decay_strides = strides(args.v_heads, args.decay_per_key ? args.key_width : 1);
  args.beta_strides = strides(args.v_heads, 1);
  return args;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  CpuPlan plan = {};
  plan.args = make_args(call);
  const Args& args = plan.args;
  // Each range of columns repeats what is the same for all columns: only where there are too few states.
  const int64_t states = args.requests * args.v_heads, threads = target.threads->count();
  const int64_t blocks = ceil_div(args.value_width, kRangeColumns);
  plan.range_width = ceil_div(blocks, std::min(blocks, ceil_div(threads, states))) * kRangeColumns;
  plan.ranges = ceil_div(args.value_width, plan.range_width);
  const int64_t items = states * plan.ranges;
  const double cost = 3.0 * double(args.batch * args.tokens * args.v_heads) * double(args.key_width * args.value_width);
  const int64_t workers = std::clamp<int64_t>(static_cast<int64_t>(cost / kMinWorkerCost), 1, std::min(threads, items));
  const int64_t floats = round_up(select_scratch_floats()(plan), int64_t{64});
  float* scratch = ws.scratch<float>(workers * floats);
  const bool pool = call.inputs[kStateIndex].present();
  uint8_t* named = ws.scratch<uint8_t>(pool ? args.state_rows : 0);
  if (ws.counting()) return {};

  if (pool) {
    name_pool_rows(args.state_index, args.requests, args.state_rows, named);
    keep_other_rows(*target.threads, args.initial_state, args.final_state, args.state_rows,
                    args.v_heads * args.key_width * args.value_width, named);
  }
  if (args.cu_seqlens != nullptr && !covers_all_tokens(args.cu_seqlens, args.requests, args.tokens))
    zero(call.outputs[kOutOutput]);
  const auto kernel = select_run_item();
  run_items(*target.threads, items, workers,
            [&](int64_t index, int64_t worker) { kernel(plan, index, scratch + worker * floats); });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  if (args.key_width > kCudaMaxKeyWidth)
    return call.unsupported("query has D = " + std::to_string(args.key_width) + "; on CUDA D goes up to " +
                            std::to_string(kCudaMaxKeyWidth) + ", larger calls run on the CPU");
  if (args.value_width > kMaxAxis || recurrence_blocks(args) > kMaxAxis)
    return call.unsupported(
        "there are requests x Hv x Dv = " + std::to_string(args.requests * args.v_heads * args.value_width) +
        " columns of states; on CUDA they are less than 2^35, larger calls run on the CPU");
  return cuda_status(call, "launching the recurrence", launch_recurrence(args, target, ws));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::gated_delta_rule
