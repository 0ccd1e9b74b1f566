// GatedDeltaRule and GatedDeltaRuleGrad: from tensors and attributes to Args, and how the CPU cuts the work.
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

LEANFLEET_CPU_FUNCTION(float, key_square, (const Args& args, int64_t batch, int64_t head, int64_t token))
LEANFLEET_CPU_FUNCTION(int64_t, scratch_floats, (const CpuPlan& plan))
LEANFLEET_CPU_FUNCTION(void, run_item, (const CpuPlan& plan, int64_t index, float* scratch))
LEANFLEET_CPU_FUNCTION(int64_t, grad_scratch_floats, (const GradPlan& plan))
LEANFLEET_CPU_FUNCTION(void, run_grad_item, (const GradPlan& plan, GradPhase phase, int64_t index, float* scratch))

namespace {

constexpr double kMinWorkerCost = 1 << 16;             // multiplications that are worth another thread
constexpr int64_t kMaxStateFloats = int64_t{1} << 40;  // so that sizes of scratch fit in int64

// The two operators have these in common.
namespace forward = gated_delta_rule;
namespace backward = gated_delta_rule_grad;
static_assert(int(forward::kQuery) == backward::kQuery && int(forward::kKey) == backward::kKey &&
              int(forward::kValue) == backward::kValue && int(forward::kLogDecay) == backward::kLogDecay &&
              int(forward::kBeta) == backward::kBeta && int(forward::kInitialState) == backward::kInitialState);
static_assert(int(forward::kDimB) == backward::kDimB && int(forward::kDimHq) == backward::kDimHq &&
              int(forward::kDimHk) == backward::kDimHk && int(forward::kDimHv) == backward::kDimHv &&
              int(forward::kDimN) == backward::kDimN && int(forward::kDimD) == backward::kDimD &&
              int(forward::kDimDv) == backward::kDimDv);

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
Status check_beta(const Call& call, const Tensor& offsets) {
  const Tensor& beta = call.inputs[kBeta];
  const float* values = beta.as<const float>();
  const int64_t inner = beta.shape[1] * beta.shape[2];
  for (int64_t i = 0; i < beta.elements(); ++i) {
    if (values[i] >= 0.0f && values[i] <= 2.0f) continue;
    const int64_t row = i / inner, first = i / beta.shape[2] % beta.shape[1], second = i % beta.shape[2];
    if (!in_a_request(offsets, call.bnhd() ? first : second)) continue;
    return call.invalid("beta[" + std::to_string(row) + "," + std::to_string(first) + "," + std::to_string(second) + "] is " +
                        std::to_string(values[i]) + "; expected a number in [0, 2]");
  }
  return {};
}

// What a token multiplies the state by along its key, at most, but for the sign; where beta |k|^2 is 1 or less, it shrinks.
float growth(const Args& args, float square, float beta, int64_t batch, int64_t head, int64_t token) {
  const Strides& strides = args.decay_strides;
  const int64_t decays = args.log_decay == nullptr ? 0 : args.decay_per_key ? args.key_width : 1;
  float decay = decays == 0 ? 0.0f : -INFINITY;
  for (int64_t i = 0; i < decays; ++i)
    decay = std::max(decay, args.log_decay[batch * strides.batch + head * strides.head + token * strides.token + i]);
  return std::exp(decay) * (beta * square - 1.0f);
}

// Where beta |k|^2 is above 2 a state is longer along the key after each token, unless it decays by more. Keys of unit length may
// be so by the rounding of their type: |k|^2 by two of its roundings.
Status check_key_lengths(const Call& call, const Args& args, const Tensor& offsets) {
  constexpr float kSlack[] = {0x1p-16f, 0x1p-9f, 0x1p-6f};  // of float32, float16, bfloat16
  if (args.normalize) return {};
  const auto square_of = select_key_square();
  const int64_t group = args.v_heads / args.k_heads, rows = args.batch * args.k_heads * args.tokens;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t batch = i / args.tokens / args.k_heads, head = i / args.tokens % args.k_heads, token = i % args.tokens;
    if (!in_a_request(offsets, token)) continue;
    const float square = square_of(args, batch, head, token);
    for (int64_t state = head * group; state < (head + 1) * group; ++state) {
      const Strides& strides = args.beta_strides;
      const float beta = args.beta[batch * strides.batch + state * strides.head + token * strides.token];
      const float factor = growth(args, square, beta, batch, state, token);
      if (factor <= 1.0f + kSlack[args.dtype]) continue;
      const int64_t first = call.bnhd() ? token : head, second = call.bnhd() ? head : token;
      return call.invalid("key[" + std::to_string(batch) + "," + std::to_string(first) + "," + std::to_string(second) +
                          "] (batch row " + std::to_string(batch) + ", head " + std::to_string(head) + ", token " +
                          std::to_string(token) + ") has |k|^2 = " + std::to_string(square) + " with beta " +
                          std::to_string(beta) + ": it multiplies state " + std::to_string(state) + " along the key by -" +
                          std::to_string(factor) + ", and such states grow without end; expected beta |k|^2 of 2 or less, as " +
                          "keys of unit length have it: set normalize_qk, or divide keys by their lengths");
    }
  }
  return {};
}

// `offsets`: cu_seqlens.
Status check_common_values(const Call& call, const Args& args, const Tensor& offsets, bool strict) {
  LEANFLEET_RETURN_IF_ERROR(check_log_decay(call, call.inputs[kLogDecay], offsets));
  if (!strict) return {};
  if (offsets.present()) LEANFLEET_RETURN_IF_ERROR(check_cu_seqlens(call, offsets, call.dims[kDimN]));
  LEANFLEET_RETURN_IF_ERROR(check_beta(call, offsets));
  return check_key_lengths(call, args, offsets);
}

// What the two operators share: no state but the initial one, no output.
Args common_args(const Call& call, const Tensor& offsets, float scale, bool normalize, bool state_v_first) {
  Args args = {};
  args.query = call.inputs[kQuery].data;
  args.key = call.inputs[kKey].data;
  args.value = call.inputs[kValue].data;
  args.log_decay = call.inputs[kLogDecay].as<const float>();
  args.beta = call.inputs[kBeta].as<const float>();
  args.initial_state = call.inputs[kInitialState].as<const float>();
  args.cu_seqlens = offsets.as<const int32_t>();
  args.packed = offsets.present();
  args.dtype = static_cast<int32_t>(call.inputs[kQuery].dtype);
  args.decay_per_key = call.inputs[kLogDecay].rank == 4;
  args.delta = true;
  args.normalize = normalize;
  args.state_v_first = state_v_first;
  args.batch = call.dims[kDimB];
  args.requests = args.state_rows = offsets.present() ? offsets.shape[0] - 1 : args.batch;
  args.q_heads = call.dims[kDimHq];
  args.k_heads = call.dims[kDimHk];
  args.v_heads = call.dims[kDimHv];
  args.heads = std::max(args.q_heads, args.v_heads);
  args.tokens = call.dims[kDimN];
  args.key_width = call.dims[kDimD];
  args.value_width = call.dims[kDimDv];
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

Args make_args(const Call& call) {
  Args args = common_args(call, call.inputs[kCuSeqlens], call.attrs[kAttrScale].f, call.attrs[kAttrNormalizeQk].i != 0,
                          call.attrs[kAttrStateVFirst].i != 0);
  args.state_index = call.inputs[kStateIndex].as<const int32_t>();
  args.output = call.outputs[kOutOutput].data;
  args.final_state = call.outputs[kOutFinalState].as<float>();
  if (call.inputs[kStateIndex].present()) args.state_rows = call.dims[kDimP];
  return args;
}

Status check_values(const Call& call, bool strict) {
  const Tensor& offsets = call.inputs[kCuSeqlens];
  LEANFLEET_RETURN_IF_ERROR(check_common_values(call, make_args(call), offsets, strict));
  if (!strict || !call.inputs[kStateIndex].present()) return {};
  return check_state_index(call, call.inputs[kStateIndex], call.dims[kDimP], offsets);
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  const bool pool = call.inputs[kStateIndex].present();
  uint8_t* named = ws.scratch<uint8_t>(pool ? args.state_rows : 0);
  if (!ws.counting()) {
    if (pool) {
      name_pool_rows(args.state_index, args.requests, args.state_rows, named);
      keep_other_rows(*target.threads, call.inputs[kInitialState], call.outputs[kOutFinalState], named);
    }
    if (args.cu_seqlens != nullptr && !covers_all_tokens(args.cu_seqlens, args.requests, args.tokens))
      zero(call.outputs[kOutOutput]);
  }
  run_states(args, target, ws);
  return {};
}

#ifdef LEANFLEET_CUDA
Status check_cuda_key_width(const Call& call, const Args& args) {
  if (args.key_width <= kCudaMaxKeyWidth) return {};
  return call.unsupported("query has D = " + std::to_string(args.key_width) + "; on CUDA D goes up to " +
                          std::to_string(kCudaMaxKeyWidth) + ", larger calls run on the CPU");
}

Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_key_width(call, args));
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

void run_states(const Args& args, const CpuTarget& target, Workspace& ws) {
  CpuPlan plan = {};
  plan.args = args;
  // Each range of columns repeats what is the same for all columns: only where there are too few states.
  const int64_t states = args.requests * args.v_heads, threads = target.threads->count();
  const int64_t blocks = ceil_div(args.value_width, kRangeColumns);
  const int64_t parts = args.divides ? 1 : std::min(blocks, ceil_div(threads, states));  // a norm has one writer
  plan.range_width = ceil_div(blocks, parts) * kRangeColumns;
  plan.ranges = ceil_div(args.value_width, plan.range_width);
  const int64_t items = states * plan.ranges;
  const double cost = 3.0 * double(args.batch * args.tokens * args.v_heads) * double(args.key_width * args.value_width);
  const int64_t workers = std::clamp<int64_t>(static_cast<int64_t>(cost / kMinWorkerCost), 1, std::min(threads, items));
  const int64_t floats = round_up(select_scratch_floats()(plan), int64_t{64});
  float* scratch = ws.scratch<float>(workers * floats);
  if (ws.counting()) return;
  const auto kernel = select_run_item();
  run_items(*target.threads, items, workers,
            [&](int64_t index, int64_t worker) { kernel(plan, index, scratch + worker * floats); });
}

void run_grads(const GradArgs& args, const CpuTarget& target, Workspace& ws) {
  constexpr int64_t kSpanFloats = int64_t{1} << 20;  // states before chunks that a worker holds at least
  GradPlan plan = {};
  plan.args = args;
  const Args& in = plan.args.in;
  const int64_t items = in.requests * in.v_heads, threads = target.threads->count(), rows = in.batch * in.tokens;
  const int64_t chunks = std::max<int64_t>(ceil_div(in.tokens, kGradChunk), 1);
  const int64_t even = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  plan.span_chunks = std::min(chunks, std::max<int64_t>({even, kSpanFloats / (in.key_width * in.value_width), 2}));
  plan.spans = ceil_div(chunks, plan.span_chunks);
  const double cost = 9.0 * double(rows * in.v_heads) * double(in.key_width * in.value_width);
  const int64_t workers = std::clamp<int64_t>(static_cast<int64_t>(cost / kMinWorkerCost), 1, std::min(threads, items));
  const int64_t floats = round_up(select_grad_scratch_floats()(plan), int64_t{64});
  float* scratch = ws.scratch<float>(workers * floats);
  const bool query_shared = in.heads > in.q_heads, key_shared = in.v_heads > in.k_heads;
  float* query_parts = ws.scratch<float>(query_shared ? rows * in.heads * in.key_width : 0);
  float* key_parts = ws.scratch<float>(key_shared ? rows * in.v_heads * in.key_width : 0);
  if (ws.counting()) return;

  if (query_shared) plan.query_parts = query_parts;
  if (key_shared) plan.key_parts = key_parts;
  const auto kernel = select_run_grad_item();
  const auto phase = [&](GradPhase which, int64_t count) {
    run_items(*target.threads, count, workers,
              [&](int64_t index, int64_t worker) { kernel(plan, which, index, scratch + worker * floats); });
  };
  phase(GradPhase::kStates, items);
  if (query_shared || key_shared) phase(GradPhase::kSums, rows);
}

const OpImpl kImpl = {check, check_values, run_on_cpu, run_on_cuda, uint64_t{1} << kKey};

}  // namespace leanfleet::gated_delta_rule

namespace leanfleet::gated_delta_rule_grad {

namespace {

using namespace gated_delta_rule;  // what the two operators share; names of this one come first

GradArgs make_args(const Call& call) {
  GradArgs args = {};
  args.in = common_args(call, call.inputs[kCuSeqlens], call.attrs[kAttrScale].f, call.attrs[kAttrNormalizeQk].i != 0,
                        call.attrs[kAttrStateVFirst].i != 0);
  args.grad_output = call.inputs[kGradOutput].data;
  args.grad_final_state = call.inputs[kGradFinalState].as<const float>();
  args.grad_query = call.outputs[kOutGradQuery].data;
  args.grad_key = call.outputs[kOutGradKey].data;
  args.grad_value = call.outputs[kOutGradValue].data;
  args.grad_beta = call.outputs[kOutGradBeta].as<float>();
  args.grad_log_decay = call.outputs[kOutGradLogDecay].as<float>();
  args.grad_initial_state = call.outputs[kOutGradInitialState].as<float>();
  args.wants_grad_decay = call.attrs[kAttrGradDecay].i != 0;
  return args;
}

Status check_values(const Call& call, bool strict) {
  return check_common_values(call, make_args(call).in, call.inputs[kCuSeqlens], strict);
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const GradArgs args = make_args(call);
  const Args& in = args.in;
  if (!ws.counting() && in.cu_seqlens != nullptr && !covers_all_tokens(in.cu_seqlens, in.requests, in.tokens)) {
    for (int output : {kOutGradQuery, kOutGradKey, kOutGradValue, kOutGradBeta}) zero(call.outputs[output]);
    if (args.grad_log_decay != nullptr) zero(call.outputs[kOutGradLogDecay]);
  }
  run_grads(args, target, ws);
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const GradArgs args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_key_width(call, args.in));
  const int64_t rows = args.in.batch * args.in.heads * args.in.tokens, states = args.in.requests * args.in.v_heads;
  if (rows > kMaxAxis || states * args.in.value_width > kMaxAxis)
    return call.unsupported("there are B x H x N = " + std::to_string(rows) +
                            " rows and requests x Hv x Dv = " + std::to_string(states * args.in.value_width) +
                            " columns of states; on CUDA both are less than 2^31, larger calls run on the CPU");
  return cuda_status(call, "launching the kernels", launch_grad(args, target, ws));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check, check_values, run_on_cpu, run_on_cuda, uint64_t{1} << kKey};

}  // namespace leanfleet::gated_delta_rule_grad
