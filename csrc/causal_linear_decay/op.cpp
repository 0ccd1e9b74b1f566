// CausalLinearDecay and CausalLinearDecayGrad: from tensors and attributes to Args, and how the CPU cuts the work.
#include "causal_linear_decay.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "causal_linear_decay/choose.h"
#include "causal_linear_decay/rows.h"
#include "causal_linear_decay/without_rule.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "core/requests.h"

#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::causal_linear_decay {

LEANFLEET_CPU_FUNCTION(int64_t, forward_scratch, (const ForwardPlan& plan))
LEANFLEET_CPU_FUNCTION(void, run_forward, (const ForwardPlan& plan, Phase phase, int64_t index, float* scratch))
LEANFLEET_CPU_FUNCTION(int64_t, backward_scratch, (const BackwardPlan& plan))
LEANFLEET_CPU_FUNCTION(void, run_backward, (const BackwardPlan& plan, Phase phase, int64_t index, float* scratch))

namespace {

constexpr int64_t kMinPieceTokens = 128;               // below it a piece's own overhead shows
constexpr double kMinWorkerCost = 1 << 16;             // multiplications that are worth another thread
constexpr int64_t kSpanFloats = int64_t{1} << 20;      // states before chunks that a backward worker holds at least
constexpr int64_t kMaxStateFloats = int64_t{1} << 40;  // so that sizes of scratch fit in int64

// The two operators have these in common.
namespace forward = causal_linear_decay;
namespace backward = causal_linear_decay_grad;
static_assert(int(forward::kQuery) == backward::kQuery && int(forward::kKey) == backward::kKey &&
              int(forward::kValue) == backward::kValue && int(forward::kLogDecay) == backward::kLogDecay &&
              int(forward::kInitialState) == backward::kInitialState);
static_assert(int(forward::kDimB) == backward::kDimB && int(forward::kDimHq) == backward::kDimHq &&
              int(forward::kDimN) == backward::kDimN && int(forward::kDimR) == backward::kDimR &&
              int(forward::kDimHk) == backward::kDimHk && int(forward::kDimHv) == backward::kDimHv &&
              int(forward::kDimDv) == backward::kDimDv);

Inputs inputs_of(const Call& call, const Tensor& cu_seqlens, float scale, bool state_v_first) {
  Inputs in = {};
  in.query = call.inputs[forward::kQuery].data;
  in.key = call.inputs[forward::kKey].data;
  in.value = call.inputs[forward::kValue].data;
  in.log_decay = call.inputs[forward::kLogDecay].as<const float>();
  in.decay_per_token = call.inputs[forward::kLogDecay].rank == 3;
  in.decay_per_key = call.inputs[forward::kLogDecay].rank == 4;
  in.state_v_first = state_v_first;
  in.cu_seqlens = cu_seqlens.as<const int32_t>();
  in.packed = cu_seqlens.present();
  in.dtype = static_cast<int32_t>(call.inputs[forward::kQuery].dtype);
  in.scale = scale;
  in.batch = call.dims[forward::kDimB];
  in.requests = cu_seqlens.present() ? cu_seqlens.shape[0] - 1 : in.batch;
  in.q_heads = call.dims[forward::kDimHq];
  in.k_heads = call.dims[forward::kDimHk];
  in.v_heads = call.dims[forward::kDimHv];
  in.heads = std::max(in.q_heads, in.v_heads);
  in.query_share = static_cast<int32_t>(in.heads / in.q_heads);
  in.key_share = static_cast<int32_t>(in.v_heads / in.k_heads);
  in.tokens = call.dims[forward::kDimN];
  in.key_width = call.dims[forward::kDimR];
  in.value_width = call.dims[forward::kDimDv];
  in.query_strides = head_token_strides(call.bnhd(), in.q_heads, in.tokens, in.key_width);
  in.key_strides = head_token_strides(call.bnhd(), in.k_heads, in.tokens, in.key_width);
  in.value_strides = head_token_strides(call.bnhd(), in.v_heads, in.tokens, in.value_width);
  in.output_strides = head_token_strides(call.bnhd(), in.heads, in.tokens, in.value_width);
  in.decay_strides = head_token_strides(call.bnhd(), in.v_heads, in.tokens, 1);
  return in;
}

Status check_sizes(const Call& call) {
  const int64_t queries = call.dims[forward::kDimHq], values = call.dims[forward::kDimHv];
  if (std::max(queries, values) % std::min(queries, values) != 0)
    return call.invalid("Hq = " + std::to_string(queries) + " and Hv = " + std::to_string(values) +
                        "; one of the two must be a multiple of the other");
  const int64_t size = call.dims[forward::kDimR] * call.dims[forward::kDimDv];
  if (size <= kMaxStateFloats) return {};
  return call.unsupported("a state has R x Dv = " + std::to_string(size) + " elements; the kernels take up to 2^40");
}

Status check_forward(const Call& call) {
  LEANFLEET_RETURN_IF_ERROR(check_sizes(call));
  const int64_t algorithm = call.attrs[forward::kAttrAlgorithm].i;
  if (call.inputs[forward::kLogDecay].rank < 4 || algorithm == kAlgorithmAuto || algorithm == kAlgorithmCausalDotProduct)
    return {};
  return call.invalid(std::string("log_decay is that of each key dimension and algorithm ") + kAlgorithmValues[algorithm] +
                      "; it must be auto or causal_dot_product then");
}

#ifdef LEANFLEET_CUDA
// Launches count CTAs in 32 bits.
Status check_cuda_size(const Call& call, const Inputs& in) {
  const auto refuse = [&](const char* what, int64_t count) {
    return call.unsupported(std::string("the output has ") + what + " = " + std::to_string(count) +
                            "; on CUDA it is less than 2^31, larger calls run on the CPU");
  };
  const int64_t heads = std::max(in.batch, in.requests) * in.heads, rows = in.batch * in.heads * in.tokens;
  if (heads > kMaxAxis) return refuse("requests x H", heads);
  if (rows > kMaxAxis) return refuse("B x H x N", rows);
  if (heads * in.key_width > kMaxAxis) return refuse("requests x H x R", heads * in.key_width);
  if (heads * in.value_width > kMaxAxis) return refuse("requests x H x Dv", heads * in.value_width);
  return {};
}

Status check_cuda_key_decays(const Call& call, const Inputs& in) {
  if (!in.decay_per_key || in.key_width <= kDeltaMaxKeyWidth) return {};
  return call.unsupported(
      "query has R = " + std::to_string(in.key_width) +
      " and log_decay is that of each key dimension; on CUDA R goes up to 256 then, larger calls run on the "
      "CPU");
}
#endif

// How requests are cut, as far as shapes say: pieces of at most piece_tokens, and room for them.
struct Cut {
  int64_t ranges, range_width, piece_tokens;
  int64_t max_slots, max_pieces, max_piece_tokens;
};

// The cost of a token to one item, in multiplications: all of its work, and that of finding a piece's own sum.
struct Cost {
  double scan, reduce;
};

// Few heads for many threads: ranges of columns repeat a part of the work, pieces find each one's own sum first. The
// cheapest cut into equal items is taken; packed requests are thought of as equal, and none gets an item of more
// than half a thread's share.
template <class CostOf>
Cut cut_for(const Inputs& in, bool packed, int64_t threads, int64_t max_ranges, CostOf cost_of) {
  const int64_t heads = in.requests * in.v_heads, length = packed ? ceil_div(in.tokens, in.requests) : in.tokens;
  const int64_t blocks = ceil_div(in.value_width, kRangeColumns);
  Cut cut = {};
  double best = 0.0;
  for (int64_t ranges = 1; ranges <= std::min(blocks, max_ranges); ++ranges) {
    const int64_t width = ceil_div(blocks, ranges) * kRangeColumns;
    if ((ranges - 1) * width >= in.value_width) continue;
    const Cost cost = cost_of(std::min(width, in.value_width));
    for (int64_t wave = 0; wave <= (packed ? 0 : 4); ++wave) {
      const int64_t wanted = std::min(threads * wave / (heads * ranges), length / kMinPieceTokens);
      const int64_t tokens = round_up(ceil_div(length, std::max<int64_t>(wanted, 1)), kChunkTokens);
      const int64_t pieces = ceil_div(length, tokens);
      double time = double(ceil_div(heads * ranges * pieces, threads)) * double(tokens) * cost.scan;
      if (pieces > 1)
        time += double(ceil_div(heads * ranges * (pieces - 1), threads)) * double(tokens) * cost.reduce +
                2.0 * double(pieces * in.key_width * in.value_width * heads) / double(threads);
      if (best != 0.0 && time >= best) continue;
      best = time;
      cut.ranges = ranges;
      cut.range_width = width;
      cut.piece_tokens = tokens;
    }
  }
  if (packed) {
    const int64_t share = ceil_div(in.tokens * in.v_heads * cut.ranges, 2 * threads);
    cut.piece_tokens = round_up(std::max(2 * kMinPieceTokens, share), kChunkTokens);
  }
  // A request longer than piece_tokens, and only such a one, is cut, into fewer than 2 length / piece_tokens pieces.
  if (cut.piece_tokens < in.tokens)
    cut.max_slots = packed ? 2 * in.tokens / cut.piece_tokens : in.batch * ceil_div(in.tokens, cut.piece_tokens);
  cut.max_pieces = in.requests + cut.max_slots;
  cut.max_piece_tokens = packed ? in.tokens : std::min(in.tokens, cut.piece_tokens);
  return cut;
}

// The pieces of all requests, in order; returns their number. Offsets that overlap may ask for more slots than there
// are: requests that find none left stay whole.
int64_t cut_requests(const Inputs& in, const Cut& cut, RequestPiece* pieces, int64_t* slots) {
  int64_t count = 0;
  *slots = 0;
  for (int64_t q = 0; q < in.requests; ++q) {
    const RequestTokens tokens = tokens_of(in.cu_seqlens, q, in.tokens);
    const int64_t length = tokens.end - tokens.begin, batch = in.cu_seqlens != nullptr ? 0 : q;
    int64_t parts = ceil_div(length, cut.piece_tokens);
    if (parts < 2 || *slots + parts > cut.max_slots) {
      pieces[count++] = {q, batch, tokens.begin, tokens.end, -1, true, true};
      continue;
    }
    const int64_t size = round_up(ceil_div(length, parts), kChunkTokens);
    for (int64_t begin = tokens.begin; begin < tokens.end; begin += size)
      pieces[count++] = {
          q, batch, begin, std::min(begin + size, tokens.end), (*slots)++, begin == tokens.begin, begin + size >= tokens.end};
  }
  return count;
}

// scans, sums: items of kScan and kSum for each piece.
template <class Plan, class Run>
void run_phases(const Plan& plan, Threads& threads, int64_t pieces, int64_t slots, int64_t ranges, int64_t scans, int64_t sums,
                int64_t workers, float* scratch, int64_t scratch_floats, Run run) {
  const Inputs& in = plan.args.in;
  const auto phase = [&](Phase which, int64_t items) {
    run_items(threads, items, workers,
              [&](int64_t index, int64_t worker) { run(plan, which, index, scratch + worker * scratch_floats); });
  };
  if (slots > 0) {
    phase(Phase::kReduce, pieces * in.v_heads * ranges);
    phase(Phase::kCombine, pieces * in.v_heads * ceil_div(in.key_width, kChunkTokens));
  }
  phase(Phase::kScan, pieces * scans);
  if (sums > 0) phase(Phase::kSum, pieces * sums);
}

int64_t workers_for(const Inputs& in, int64_t threads, int64_t items, double cost) {
  const double total = cost * double(in.tokens) * double(in.batch * in.v_heads);
  return std::clamp<int64_t>(static_cast<int64_t>(total / kMinWorkerCost), 1, std::min(threads, items));
}

Args make_args(const Call& call) {
  Args args = {};
  args.in = inputs_of(call, call.inputs[kCuSeqlens], call.attrs[kAttrScale].f, call.attrs[kAttrStateVFirst].i != 0);
  args.in.beta = call.inputs[kBeta].as<const float>();
  args.algorithm = static_cast<int32_t>(call.attrs[kAttrAlgorithm].i);
  args.normalize = call.attrs[kAttrNormalize].i != 0;
  args.eps = call.attrs[kAttrEps].f;
  args.narrow_states = call.inputs[kInitialState].present() && call.inputs[kInitialState].dtype != DType::kFloat32;
  if (args.narrow_states) {
    args.narrow_initial_state = call.inputs[kInitialState].data;
    args.narrow_final_state = call.outputs[kOutFinalState].data;
  } else {
    args.initial_state = call.inputs[kInitialState].as<const float>();
    args.final_state = call.outputs[kOutFinalState].as<float>();
  }
  args.initial_norm = call.inputs[kInitialNorm].as<const float>();
  args.state_index = call.inputs[kStateIndex].as<const int32_t>();
  args.state_rows = call.inputs[kStateIndex].present() ? call.dims[kDimP] : args.in.requests;
  args.output = call.outputs[kOutOutput].data;
  args.final_norm = call.outputs[kOutFinalNorm].as<float>();
  args.carries_state = call.inputs[kInitialState].present() && call.attrs[kAttrReturnState].i != 0;
  return args;
}

Status check_values(const Call& call, bool strict) {
  LEANFLEET_RETURN_IF_ERROR(check_log_decay(call, call.inputs[kLogDecay], call.inputs[kCuSeqlens]));
  if (!strict) return {};
  if (call.inputs[kCuSeqlens].present())
    LEANFLEET_RETURN_IF_ERROR(check_cu_seqlens(call, call.inputs[kCuSeqlens], call.dims[kDimN]));
  if (call.inputs[kStateIndex].present())
    return check_state_index(call, call.inputs[kStateIndex], call.dims[kDimP], call.inputs[kCuSeqlens]);
  return {};
}

// Decays of key dimensions, and states [Dv,R].
Status run_without_rule(const Call& call, const Args& args, const CpuTarget& target, Workspace& ws) {
  gated_delta_rule::Args to = without_rule(args);
  to.narrow_states = args.narrow_states;
  to.narrow_initial_state = args.narrow_initial_state;
  to.narrow_final_state = args.narrow_final_state;
  to.divides = args.normalize;
  to.eps = args.eps;
  to.initial_norm = args.initial_norm;
  to.final_norm = args.final_norm;
  const bool pool = call.inputs[kStateIndex].present();
  uint8_t* named = ws.scratch<uint8_t>(pool ? args.state_rows : 0);
  if (!ws.counting()) {
    if (pool) {
      name_pool_rows(args.state_index, to.requests, args.state_rows, named);
      keep_other_rows(*target.threads, call.inputs[kInitialState], call.outputs[kOutFinalState], named);
      keep_other_rows(*target.threads, call.inputs[kInitialNorm], call.outputs[kOutFinalNorm], named);
    }
    if (to.cu_seqlens != nullptr && !covers_all_tokens(to.cu_seqlens, to.requests, to.tokens)) zero(call.outputs[kOutOutput]);
  }
  gated_delta_rule::run_states(to, target, ws);
  return {};
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  ForwardPlan plan = {};
  plan.args = make_args(call);
  const Args& args = plan.args;
  const Inputs& in = args.in;
  if (in.decay_per_key || in.state_v_first) return run_without_rule(call, args, target, ws);
  const int64_t group = in.heads / in.v_heads, threads = target.threads->count();
  const auto cost_of = [&](int64_t columns) -> Cost {
    const double update = double(columns) * double(in.key_width) + 8.0 * double(in.key_width) + 40.0;
    const double output = double(columns) * double(in.key_width + 10) + 18.0 * double(in.key_width) + 60.0;
    return {double(group) * output + update, update};
  };
  const Cut cut = cut_for(in, call.inputs[kCuSeqlens].present(), threads, in.value_width, cost_of);
  plan.ranges = cut.ranges;
  plan.range_width = cut.range_width;
  const int64_t items = cut.max_pieces * in.v_heads * cut.ranges, state_heads = cut.max_slots * in.v_heads;
  const int64_t workers = workers_for(in, threads, items, cost_of(in.value_width).scan);
  const int64_t scratch_floats = round_up(select_forward_scratch()(plan), 64);
  float* scratch = ws.scratch<float>(workers * scratch_floats);
  RequestPiece* pieces = ws.scratch<RequestPiece>(cut.max_pieces);
  plan.slots.state = ws.scratch<float>(state_heads * in.key_width * in.value_width);
  plan.slots.norm = ws.scratch<float>(args.normalize ? state_heads * in.key_width : 0);
  plan.slots.kept = ws.scratch<double>(state_heads);
  const bool copies_norm = call.inputs[kInitialNorm].present() && cut.ranges > 1;
  const int64_t norm_row = in.v_heads * in.key_width;
  float* norms = ws.scratch<float>(copies_norm ? in.requests * norm_row : 0);
  const bool pool = call.inputs[kStateIndex].present();
  uint8_t* named = ws.scratch<uint8_t>(pool ? args.state_rows : 0);
  if (ws.counting()) return {};

  int64_t slots;
  const int64_t count = cut_requests(in, cut, pieces, &slots);
  plan.pieces = pieces;
  if (pool) {
    name_pool_rows(args.state_index, in.requests, args.state_rows, named);
    keep_other_rows(*target.threads, call.inputs[kInitialState], call.outputs[kOutFinalState], named);
    keep_other_rows(*target.threads, call.inputs[kInitialNorm], call.outputs[kOutFinalNorm], named);
  }
  for (int64_t q = 0; q < in.requests && copies_norm; ++q) {
    const int64_t row = pool ? args.state_index[q] : q;
    if (row >= 0 && row < args.state_rows) std::copy_n(args.initial_norm + row * norm_row, norm_row, norms + q * norm_row);
  }
  if (copies_norm) plan.norms = norms;
  if (in.cu_seqlens != nullptr && !covers_all_tokens(in.cu_seqlens, in.requests, in.tokens)) zero(call.outputs[kOutOutput]);
  run_phases(plan, *target.threads, count, slots, cut.ranges, in.v_heads * cut.ranges, 0, workers, scratch, scratch_floats,
             select_run_forward());
  return {};
}

#ifdef LEANFLEET_CUDA
int launch_algorithm(const Args& args, const CudaTarget& target, Workspace& ws) {
  if (args.algorithm == kAlgorithmLightning) return launch_lightning(args, target, ws);
  return launch_recurrence(args, args.algorithm == kAlgorithmFleet, target, ws);
}

// States [Dv,R] of few tokens go without a copy in the other order.
constexpr int64_t kFewTokens = 16;
bool steps_without_rule(const Args& args) {
  const Inputs& in = args.in;
  const bool any = args.algorithm == kAlgorithmAuto || args.algorithm == kAlgorithmCausalDotProduct;
  return any && in.state_v_first && !args.narrow_states && !args.normalize && in.key_width <= kDeltaMaxKeyWidth &&
         in.batch * in.tokens <= kFewTokens * in.requests;
}

Status run_without_rule_on_cuda(const Call& call, const Args& args, const CudaTarget& target, Workspace& ws) {
  LEANFLEET_RETURN_IF_ERROR(check_cuda_key_decays(call, args.in));
  const int failed = args.narrow_states ? with_plain_states(args, false, target, ws, launch_without_rule)
                                        : launch_without_rule(args, target, ws);
  return cuda_status(call, "launching the recurrence of key dimensions", failed);
}

Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  Args args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_size(call, args.in));
  if (args.in.decay_per_key || steps_without_rule(args)) return run_without_rule_on_cuda(call, args, target, ws);
  if (args.algorithm == kAlgorithmAuto) args.algorithm = fastest_algorithm(args.in, args.normalize, target.sm_count);
  const bool lightning = args.algorithm == kAlgorithmLightning;
  if (args.normalize && args.in.key_width > kRecurrenceMaxKeyWidth)
    return call.unsupported("query has R = " + std::to_string(args.in.key_width) +
                            " and normalize is 1; on CUDA R goes up to 512 then");
  if (lightning && args.normalize && args.in.key_width > kLightningMaxNormalizedKeyWidth)
    return call.unsupported("query has R = " + std::to_string(args.in.key_width) +
                            " and normalize is 1; on CUDA lightning takes "
                            "R up to 256 then. Use auto");
  if (!lightning && args.in.key_width > kRecurrenceMaxKeyWidth)
    return call.unsupported("query has R = " + std::to_string(args.in.key_width) + "; on CUDA algorithm " +
                            kAlgorithmValues[args.algorithm] + " takes R up to 512. Use auto or lightning");
  const bool takes_narrow = !lightning && decode_fits(args), turned = args.in.state_v_first;
  const int failed = turned || (args.narrow_states && !takes_narrow)
                         ? with_plain_states(args, turned, target, ws, launch_algorithm)
                         : launch_algorithm(args, target, ws);
  return cuda_status(call, lightning ? "launching lightning" : "launching the recurrence", failed);
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_forward, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::causal_linear_decay

namespace leanfleet::causal_linear_decay_grad {

namespace {

using namespace causal_linear_decay;  // what the two operators share; names of this one come first

// States of a key head that an item takes one after the other: as many as leave every thread a few items, for less memory.
// They divide a query head's or are a multiple of them.
int64_t states_of_item(const Inputs& in, int64_t pieces, int64_t threads) {
  int64_t best = 1;
  for (int64_t n = 2; n <= in.key_share && pieces * in.v_heads / n >= 2 * threads; ++n)
    if (in.key_share % n == 0 && (n % in.query_share == 0 || in.query_share % n == 0)) best = n;
  return best;
}

GradArgs make_args(const Call& call) {
  GradArgs args = {};
  args.in = inputs_of(call, call.inputs[kCuSeqlens], call.attrs[kAttrScale].f, call.attrs[kAttrStateVFirst].i != 0);
  args.grad_output = call.inputs[kGradOutput].data;
  args.initial_state = call.inputs[kInitialState].as<const float>();
  args.grad_final_state = call.inputs[kGradFinalState].as<const float>();
  args.grad_query = call.outputs[kOutGradQuery].data;
  args.grad_key = call.outputs[kOutGradKey].data;
  args.grad_value = call.outputs[kOutGradValue].data;
  args.grad_log_decay = call.outputs[kOutGradLogDecay].as<float>();
  args.grad_initial_state = call.outputs[kOutGradInitialState].as<float>();
  args.wants_grad_decay = call.attrs[kAttrGradDecay].i != 0;
  args.has_grad_final_state = call.inputs[kGradFinalState].present();
  return args;
}

Status check_values(const Call& call, bool strict) {
  LEANFLEET_RETURN_IF_ERROR(check_log_decay(call, call.inputs[kLogDecay], call.inputs[kCuSeqlens]));
  if (strict && call.inputs[kCuSeqlens].present()) return check_cu_seqlens(call, call.inputs[kCuSeqlens], call.dims[kDimN]);
  return {};
}

// All states [rows,columns] as [columns,rows].
void turn_states(const float* from, int64_t states, int64_t rows, int64_t columns, float* to) {
  for (int64_t s = 0; s < states; ++s, from += rows * columns, to += rows * columns)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
}

Status run_plain(const Call& call, const GradArgs& args, const CpuTarget& target, Workspace& ws);

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  GradArgs args = make_args(call);
  const Inputs& in = args.in;
  if (!ws.counting() && in.cu_seqlens != nullptr && !covers_all_tokens(in.cu_seqlens, in.requests, in.tokens)) {
    for (int output : {kOutGradQuery, kOutGradKey, kOutGradValue}) zero(call.outputs[output]);
    if (args.grad_log_decay != nullptr) zero(call.outputs[kOutGradLogDecay]);
  }
  if (in.decay_per_key) {
    gated_delta_rule::run_grads(without_rule(args), target, ws);
    return {};
  }
  if (!in.state_v_first) return run_plain(call, args, target, ws);
  const int64_t states = in.requests * in.v_heads, rows = in.key_width, columns = in.value_width;
  const bool wants_grad = call.attrs[kAttrGradState].i != 0;
  float* initial = ws.scratch<float>(call.inputs[kInitialState].present() ? states * rows * columns : 0);
  float* last = ws.scratch<float>(args.has_grad_final_state ? states * rows * columns : 0);
  float* first = ws.scratch<float>(wants_grad ? states * rows * columns : 0);
  float* const grad_initial = args.grad_initial_state;
  if (!ws.counting()) {
    if (args.initial_state != nullptr)
      turn_states(args.initial_state, states, columns, rows, initial), args.initial_state = initial;
    if (args.grad_final_state != nullptr)
      turn_states(args.grad_final_state, states, columns, rows, last), args.grad_final_state = last;
    if (grad_initial != nullptr) args.grad_initial_state = first;
  }
  LEANFLEET_RETURN_IF_ERROR(run_plain(call, args, target, ws));
  if (!ws.counting() && grad_initial != nullptr) turn_states(first, states, rows, columns, grad_initial);
  return {};
}

// States [R,Dv], decays of heads or tokens.
Status run_plain(const Call& call, const GradArgs& grad, const CpuTarget& target, Workspace& ws) {
  BackwardPlan plan = {};
  plan.args = grad;
  const GradArgs& args = plan.args;
  const Inputs& in = args.in;
  const int64_t group = in.heads / in.v_heads, threads = target.threads->count();
  const double product = double(in.key_width) * double(in.value_width);
  const Cost cost = {(3.0 + 2.0 * double(group)) * product, (1.0 + double(group)) * product};
  const Cut cut = cut_for(in, call.inputs[kCuSeqlens].present(), threads, 1, [&](int64_t) { return cost; });
  const int64_t state_floats = in.key_width * round_up(in.value_width, 2 * kRangeColumns);
  const int64_t chunks = ceil_div(cut.max_piece_tokens, kChunkTokens);
  const int64_t even = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  plan.span_chunks = std::min(chunks, std::max({even, kSpanFloats / state_floats, kChunkTokens}));
  plan.spans = ceil_div(chunks, plan.span_chunks);

  const int64_t state_heads = cut.max_slots * in.v_heads, state = in.key_width * in.value_width;
  const int64_t workers = workers_for(in, threads, cut.max_pieces * in.v_heads, cost.scan);
  const int64_t scratch_floats = round_up(select_backward_scratch()(plan), 64);
  float* scratch = ws.scratch<float>(workers * scratch_floats);
  RequestPiece* pieces = ws.scratch<RequestPiece>(cut.max_pieces);
  plan.slots.state = ws.scratch<float>(state_heads * state);
  plan.slots.grad = ws.scratch<float>(state_heads * state);
  plan.slots.kept = ws.scratch<double>(state_heads);
  plan.item_states = states_of_item(in, cut.max_pieces, threads);
  const auto shared = [&](int64_t share) -> HeadSums {
    const int64_t states = std::min<int64_t>(plan.item_states, share);
    const int64_t floats = in.batch * (in.v_heads / states) * in.tokens * in.key_width;
    return {ws.scratch<float>(share > 1 ? floats : 0), states};
  };
  plan.query_sums = shared(in.query_share);
  plan.key_sums = shared(in.key_share);
  if (in.query_share == 1) plan.query_sums.data = nullptr;
  if (in.key_share == 1) plan.key_sums.data = nullptr;
  const bool per_head = call.attrs[kAttrGradDecay].i != 0 && !in.decay_per_token;
  double* decay_sums = ws.scratch<double>(per_head ? cut.max_pieces * in.v_heads : 0);
  if (ws.counting()) return {};

  int64_t slots;
  const int64_t count = cut_requests(in, cut, pieces, &slots);
  plan.pieces = pieces;
  if (per_head) plan.decay_sums = decay_sums;
  const int64_t sums = in.key_share > 1 ? in.k_heads + (in.query_share > 1 ? in.q_heads : 0) : 0;
  run_phases(plan, *target.threads, count, slots, 1, in.v_heads / plan.item_states, sums, workers, scratch, scratch_floats,
             select_run_backward());
  for (int64_t head = 0; head < in.v_heads && per_head; ++head) {
    double total = 0.0;
    for (int64_t piece = 0; piece < count; ++piece) total += decay_sums[piece * in.v_heads + head];
    args.grad_log_decay[head] = static_cast<float>(total);
  }
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const GradArgs args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_cuda_size(call, args.in));
  LEANFLEET_RETURN_IF_ERROR(check_cuda_key_decays(call, args.in));
  const int failed = args.in.decay_per_key   ? launch_grad_without_rule(args, target, ws)
                     : args.in.state_v_first ? launch_grad_turned(args, target, ws)
                                             : launch_grad(args, target, ws);
  return cuda_status(call, "launching the kernels", failed);
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_sizes, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::causal_linear_decay_grad
