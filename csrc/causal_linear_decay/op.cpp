// CausalLinearDecay and CausalLinearDecayGrad: from tensors and attributes to LinearBlocks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "causal_linear_decay.h"
#include "core/cpu_isa.h"
#include "core/op_specs.h"

LEANFLEET_CPU_FUNCTION(void, run_linear_block, (const LinearBlock& block))
LEANFLEET_CPU_FUNCTION(int64_t, linear_columns, ())
LEANFLEET_CPU_FUNCTION(int64_t, linear_scratch, (const LinearBlock& block))
LEANFLEET_CPU_FUNCTION(void, run_linear_normaliser, (const LinearBlock& block, float eps, float* norm, float* denominator))

namespace leanfleet {

namespace {

constexpr int kLanesPerThread = 4;  // tasks a thread gets: enough to even out requests of unequal length

struct Request {
  int64_t batch, begin, tokens;
};

// What both operators share: sizes, requests and decay.
struct Problem {
  int64_t batch, heads, kv_heads, tokens, r, dv, requests;
  bool bnhd;
  DType dtype;
  const int32_t* cu_seqlens;  // null: a request is a row of the batch
  const float* log_decay;     // null: no decay
  bool per_token;

  int64_t group() const { return heads / kv_heads; }

  // Whatever cu_seqlens holds, a request lies within the tokens.
  Request request(int64_t q) const {
    if (cu_seqlens == nullptr) return {q, 0, tokens};
    const auto held = [this](int64_t x) { return x < 0 ? 0 : x > tokens ? tokens : x; };
    const int64_t begin = held(cu_seqlens[q]), end = held(cu_seqlens[q + 1]);
    return {0, begin, end > begin ? end - begin : 0};
  }

  void set_decay(const Request& request, int64_t kv_head, LinearBlock* block) const {
    block->log_decay = log_decay;
    block->decay_token = 0;
    if (log_decay == nullptr) return;
    const Strides s = head_token_strides(bnhd, kv_heads, tokens, 1);
    block->log_decay += per_token ? request.batch * s.batch + kv_head * s.head + request.begin * s.token : kv_head;
    block->decay_token = per_token ? s.token : 0;
  }
};

// A [B,heads,N,width] tensor of the node.
struct Rows {
  void* data;
  int64_t heads, width;
};

void* first_token(const Problem& p, const Rows& rows, const Request& request, int64_t head) {
  if (rows.data == nullptr) return nullptr;
  const Strides s = head_token_strides(p.bnhd, rows.heads, p.tokens, rows.width);
  return static_cast<char*>(rows.data) +
         element_size(p.dtype) * (request.batch * s.batch + head * s.head + request.begin * s.token);
}

// The block of a request and key/value head for output = product(query, key, value), all columns; states are not set.
LinearBlock product(const Problem& p, const Rows& query, const Rows& key, const Rows& value, const Rows& output,
                    const Request& request, int64_t kv_head) {
  LinearBlock block = {};
  block.dtype = static_cast<int32_t>(p.dtype);
  block.tokens = request.tokens;
  block.x = query.width;
  block.columns = value.width;
  block.scale = block.value_scale = 1.0f;
  block.query_groups = query.heads / p.kv_heads;
  block.key_groups = key.heads / p.kv_heads;
  const auto place = [&](const Rows& rows, int64_t* head, int64_t* token) {
    const Strides s = head_token_strides(p.bnhd, rows.heads, p.tokens, rows.width);
    *head = s.head;
    *token = s.token;
    return first_token(p, rows, request, kv_head * (rows.heads / p.kv_heads));
  };
  block.query = place(query, &block.query_head, &block.query_token);
  block.key = place(key, &block.key_head, &block.key_token);
  block.value = place(value, &block.value_head, &block.value_token);
  block.output = place(output, &block.output_head, &block.output_token);
  p.set_decay(request, kv_head, &block);
  return block;
}

// A state [R,Dv] of a request and head; transposed: read as [Dv,R].
void set_state_in(const float* state, int64_t dv, bool transposed, LinearBlock* block) {
  block->state_in = state;
  block->state_in_row = transposed ? 1 : dv;
  block->state_in_column = transposed ? dv : 1;
}
void set_state_out(float* state, int64_t dv, bool transposed, LinearBlock* block) {
  block->state_out = state;
  block->state_out_row = transposed ? 1 : dv;
  block->state_out_column = transposed ? dv : 1;
}

// Runs `job(index, scratch)` for 0 .. jobs - 1 on lanes that each own a part of the scratch.
struct Lanes {
  int64_t lanes, floats;
  float* scratch;

  Lanes(Workspace& ws, const CpuTarget& target, int64_t jobs, int64_t floats_per_lane)
      : lanes(std::min<int64_t>(jobs, int64_t{kLanesPerThread} * target.threads->count())),
        floats((floats_per_lane + 63) / 64 * 64),
        scratch(ws.scratch<float>(lanes * floats)) {}

  template <class F>
  void run(const CpuTarget& target, int64_t jobs, F&& job) const {
    parallel_for(*target.threads, lanes, [&](int64_t lane) {
      for (int64_t i = lane; i < jobs; i += lanes) job(i, scratch + lane * floats);
    });
  }
};

int64_t column_blocks(int64_t width) {
  const int64_t columns = select_linear_columns()();
  return (width + columns - 1) / columns;
}

void set_columns(int64_t index, int64_t width, LinearBlock* block) {
  const int64_t columns = select_linear_columns()();
  block->column_begin = index * columns;
  block->columns = std::min(columns, width - block->column_begin);
}

std::string number(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return text;
}

Status check_decay(const Call& call, const Tensor& decay) {
  const float* values = decay.as<const float>();
  for (int64_t i = 0; i < decay.elements(); ++i) {
    if (values[i] <= 0.0f) continue;
    std::string at = std::to_string(i % decay.shape[decay.rank - 1]);
    for (int64_t axis = decay.rank - 2, rest = i / decay.shape[decay.rank - 1]; axis >= 0; rest /= decay.shape[axis--])
      at = std::to_string(rest % decay.shape[axis]) + "," + at;
    return call.invalid("log_decay[" + at + "] is " + number(values[i]) +
                        "; ln of a decay lies in [-inf, 0]. Pass the logarithm of the decay, not the decay itself");
  }
  return {};
}

Status check_offsets(const Call& call, const Tensor& offsets, int64_t tokens) {
  const int32_t* values = offsets.as<const int32_t>();
  const int64_t last = offsets.shape[0] - 1;
  for (int64_t i = 0; i <= last; ++i) {
    const std::string found = "cu_seqlens[" + std::to_string(i) + "] is " + std::to_string(values[i]);
    if (i == 0 && values[i] != 0) return call.invalid(found + "; the first request starts at 0");
    if (i > 0 && values[i] < values[i - 1])
      return call.invalid(found + "; offsets must not decrease, the one before is " + std::to_string(values[i - 1]));
    if (values[i] > tokens || (i == last && values[i] != tokens))
      return call.invalid(found + "; the last request ends at N = " + std::to_string(tokens));
  }
  return {};
}

Status check_pool_rows(const Call& call, const Tensor& index, int64_t rows) {
  const int32_t* values = index.as<const int32_t>();
  for (int64_t i = 0; i < index.shape[0]; ++i) {
    const std::string found = "state_index[" + std::to_string(i) + "] is " + std::to_string(values[i]);
    if (values[i] < 0 || values[i] >= rows)
      return call.invalid(found + "; the pool has rows 0 .. " + std::to_string(rows - 1));
    for (int64_t j = 0; j < i; ++j)
      if (values[j] == values[i])
        return call.invalid(found + ", as state_index[" + std::to_string(j) + "]; two requests cannot share a row");
  }
  return {};
}

template <int kQuery, int kLogDecay, int kCuSeqlens>
Problem make_problem(const Call& call, int64_t kv_heads, int64_t tokens, int64_t r, int64_t dv, int64_t requests) {
  Problem p = {};
  const Tensor& query = call.inputs[kQuery];
  p.bnhd = call.bnhd();
  p.batch = query.shape[0];
  p.heads = query.shape[p.bnhd ? 2 : 1];
  p.kv_heads = kv_heads;
  p.tokens = tokens;
  p.r = r;
  p.dv = dv;
  p.requests = requests > 0 ? requests : p.batch;
  p.dtype = query.dtype;
  p.cu_seqlens = call.inputs[kCuSeqlens].as<const int32_t>();
  p.log_decay = call.inputs[kLogDecay].as<const float>();
  p.per_token = call.inputs[kLogDecay].rank == 3;
  return p;
}

void zero(const Tensor& tensor) {
  if (tensor.present()) std::memset(tensor.data, 0, static_cast<size_t>(tensor.elements() * element_size(tensor.dtype)));
}

}  // namespace

namespace causal_linear_decay {

namespace {

Status check_values(const Call& call, bool strict) {
  if (call.inputs[kLogDecay].present()) LEANFLEET_RETURN_IF_ERROR(check_decay(call, call.inputs[kLogDecay]));
  if (!strict) return {};
  if (call.inputs[kCuSeqlens].present())
    LEANFLEET_RETURN_IF_ERROR(check_offsets(call, call.inputs[kCuSeqlens], call.dims[kDimN]));
  if (call.inputs[kStateIndex].present())
    LEANFLEET_RETURN_IF_ERROR(check_pool_rows(call, call.inputs[kStateIndex], call.dims[kDimP]));
  return {};
}

// All values of the attribute `algorithm` run the same recurrence here: on a CPU it is the fastest of them.
Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Problem p = make_problem<kQuery, kLogDecay, kCuSeqlens>(call, call.dims[kDimHkv], call.dims[kDimN], call.dims[kDimR],
                                                                call.dims[kDimDv], call.dims[kDimQ]);
  const bool normalize = call.attrs[kAttrNormalize].i != 0;
  const Rows query = {call.inputs[kQuery].data, p.heads, p.r}, key = {call.inputs[kKey].data, p.kv_heads, p.r};
  const Rows value = {call.inputs[kValue].data, p.kv_heads, p.dv}, output = {call.outputs[kOutOutput].data, p.heads, p.dv};
  const int64_t pairs = p.requests * p.kv_heads, blocks = column_blocks(p.dv), jobs = pairs * blocks;
  const LinearBlock sample = product(p, query, key, value, output, {0, 0, 0}, 0);
  const Lanes lanes(ws, target, jobs, select_linear_scratch()(sample));
  float* norms = normalize ? ws.scratch<float>(pairs * p.r) : nullptr;
  float* denominators = normalize ? ws.scratch<float>(p.batch * p.heads * p.tokens) : nullptr;
  if (ws.counting()) return {};

  const int32_t* index = call.inputs[kStateIndex].as<const int32_t>();
  const int64_t rows = index != nullptr ? call.dims[kDimP] : p.requests;
  // The state of a request and head lies at this row of [rows, Hkv]; -1: outside the pool.
  const auto row_of = [&](int64_t pair) -> int64_t {
    const int64_t q = pair / p.kv_heads, row = index != nullptr ? index[q] : q;
    return row >= 0 && row < rows ? row * p.kv_heads + pair % p.kv_heads : -1;
  };
  const auto keep_other_rows = [&](const Tensor& from, const Tensor& to) {
    if (index != nullptr && to.present() && to.data != from.data)
      std::memcpy(to.data, from.data, static_cast<size_t>(to.elements()) * sizeof(float));
  };
  const Tensor &state_in = call.inputs[kInitialState], &state_out = call.outputs[kOutFinalState];
  const Tensor &norm_in = call.inputs[kInitialNorm], &norm_out = call.outputs[kOutFinalNorm];
  const bool wants_state = output_exists(*call.spec, call.attrs, kOutFinalState);
  const bool wants_norm = output_exists(*call.spec, call.attrs, kOutFinalNorm);
  if (wants_state) keep_other_rows(state_in, state_out);
  if (wants_norm) keep_other_rows(norm_in, norm_out);
  if (p.cu_seqlens != nullptr) zero(call.outputs[kOutOutput]);  // tokens of no request

  const float scale = call.attrs[kAttrScale].f;
  const Strides den = head_token_strides(p.bnhd, p.heads, p.tokens, 1);
  const auto set_denominator = [&](const Request& request, int64_t kv_head, LinearBlock* block) {
    block->denominator_head = den.head;
    block->denominator_token = den.token;
    return denominators + request.batch * den.batch + kv_head * p.group() * den.head + request.begin * den.token;
  };
  if (normalize) {
    const auto normaliser = select_run_linear_normaliser();
    lanes.run(target, pairs, [&](int64_t pair, float* scratch) {
      const Request request = p.request(pair / p.kv_heads);
      const int64_t kv_head = pair % p.kv_heads, row = row_of(pair);
      LinearBlock block = product(p, query, key, value, output, request, kv_head);
      block.scale = scale;
      block.scratch = scratch;
      float* norm = norms + pair * p.r;
      for (int64_t i = 0; i < p.r; ++i)
        norm[i] = norm_in.present() && row >= 0 ? norm_in.as<const float>()[row * p.r + i] : 0.0f;
      float* denominator = set_denominator(request, kv_head, &block);
      normaliser(block, call.attrs[kAttrEps].f, norm, denominator);
      if (wants_norm && row >= 0) std::memcpy(norm_out.as<float>() + row * p.r, norm, static_cast<size_t>(p.r) * sizeof(float));
    });
  }
  const auto run_block = select_run_linear_block();
  lanes.run(target, jobs, [&](int64_t job, float* scratch) {
    const int64_t pair = job / blocks, kv_head = pair % p.kv_heads, row = row_of(pair);
    const Request request = p.request(pair / p.kv_heads);
    LinearBlock block = product(p, query, key, value, output, request, kv_head);
    block.scale = scale;
    block.scratch = scratch;
    if (row >= 0 && state_in.present()) set_state_in(state_in.as<const float>() + row * p.r * p.dv, p.dv, false, &block);
    if (row >= 0 && wants_state) set_state_out(state_out.as<float>() + row * p.r * p.dv, p.dv, false, &block);
    if (normalize) block.denominator = set_denominator(request, kv_head, &block);
    set_columns(job % blocks, p.dv, &block);
    run_block(block);
  });
  return {};
}

}  // namespace

const OpImpl kImpl = {nullptr, check_values, run_on_cpu, nullptr};

}  // namespace causal_linear_decay

namespace causal_linear_decay_grad {

namespace {

Status check_values(const Call& call, bool strict) {
  if (call.inputs[kLogDecay].present()) LEANFLEET_RETURN_IF_ERROR(check_decay(call, call.inputs[kLogDecay]));
  if (strict && call.inputs[kCuSeqlens].present()) return check_offsets(call, call.inputs[kCuSeqlens], call.dims[kDimN]);
  return {};
}

// grad_log_decay_t = sum over u >= t of (q_u . dq_u - k_u . dk_u), plus <dS_N, S_N>: the dots were left by the passes for dq
// and dk, a row for each block of columns. Where the decay is 0 nothing crosses from before: the sum starts again at 0.
struct DecayGradient {
  const Problem& p;
  const float *query_dots, *key_dots;  // [blocks, H, B*N], [blocks, Hkv, B*N]
  int64_t blocks;
  const float *final_state, *grad_final_state;  // [requests, Hkv, R, Dv]; null where there is no grad_final_state

  // Calls each(token, gradient) for the tokens of a request, last first; returns their sum.
  template <class F>
  double visit(int64_t q, int64_t kv_head, F&& each) const {
    const Request request = p.request(q);
    LinearBlock decay = {};
    p.set_decay(request, kv_head, &decay);
    const int64_t all = p.batch * p.tokens;
    double running = 0.0, total = 0.0;
    if (grad_final_state != nullptr) {
      const int64_t at = (q * p.kv_heads + kv_head) * p.r * p.dv;
      for (int64_t i = 0; i < p.r * p.dv; ++i)
        running += static_cast<double>(final_state[at + i]) * static_cast<double>(grad_final_state[at + i]);
    }
    for (int64_t n = request.tokens - 1; n >= 0; --n) {
      const int64_t token = request.batch * p.tokens + request.begin + n;
      for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t g = 0; g < p.group(); ++g)
          running += static_cast<double>(query_dots[(block * p.heads + kv_head * p.group() + g) * all + token]);
        running -= static_cast<double>(key_dots[(block * p.kv_heads + kv_head) * all + token]);
      }
      if (std::isinf(decay.log_decay[n * decay.decay_token])) running = 0.0;
      each(request.begin + n, static_cast<float>(running));
      total += running;
    }
    return total;
  }
};

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Problem p = make_problem<kQuery, kLogDecay, kCuSeqlens>(call, call.dims[kDimHkv], call.dims[kDimN], call.dims[kDimR],
                                                                call.dims[kDimDv], call.dims[kDimQ]);
  const bool wants_decay = call.attrs[kAttrGradDecay].i != 0, wants_state = call.attrs[kAttrGradState].i != 0;
  const Rows query = {call.inputs[kQuery].data, p.heads, p.r}, key = {call.inputs[kKey].data, p.kv_heads, p.r};
  const Rows value = {call.inputs[kValue].data, p.kv_heads, p.dv}, grad = {call.inputs[kGradOutput].data, p.heads, p.dv};
  const Rows grad_query = {call.outputs[kOutGradQuery].data, p.heads, p.r};
  const Rows grad_key = {call.outputs[kOutGradKey].data, p.kv_heads, p.r};
  const Rows grad_value = {call.outputs[kOutGradValue].data, p.kv_heads, p.dv};
  const float* start = call.inputs[kInitialState].as<const float>();
  const float* end = call.inputs[kGradFinalState].as<const float>();
  const int64_t pairs = p.requests * p.kv_heads, r_blocks = column_blocks(p.r), dv_blocks = column_blocks(p.dv);
  const int64_t all = p.batch * p.tokens, state = p.r * p.dv;
  const int64_t jobs = pairs * (2 * r_blocks + dv_blocks);
  const auto scratch_of = select_linear_scratch();
  const int64_t floats = std::max(scratch_of(product(p, grad, value, key, grad_query, {0, 0, 0}, 0)),
                                  scratch_of(product(p, key, query, grad, grad_value, {0, 0, 0}, 0)));
  const Lanes lanes(ws, target, jobs, floats);
  float* query_dots = wants_decay ? ws.scratch<float>(r_blocks * p.heads * all) : nullptr;
  float* key_dots = wants_decay ? ws.scratch<float>(r_blocks * p.kv_heads * all) : nullptr;
  float* final_state = wants_decay && call.inputs[kGradFinalState].present() ? ws.scratch<float>(pairs * state) : nullptr;
  if (ws.counting()) return {};

  const float scale = call.attrs[kAttrScale].f;
  if (p.cu_seqlens != nullptr)
    for (int i : {kOutGradQuery, kOutGradKey, kOutGradValue}) zero(call.outputs[i]);
  const auto run_block = select_run_linear_block();
  // One list of jobs, so that all threads have work to the end: dq, dk, dv of every request, head and block of columns.
  lanes.run(target, jobs, [&](int64_t job, float* scratch) {
    const int64_t pair = job % pairs, part = job / pairs, kv_head = pair % p.kv_heads;
    const Request request = p.request(pair / p.kv_heads);
    const int64_t token = request.batch * p.tokens + request.begin;
    const float* state_in = start != nullptr ? start + pair * state : nullptr;
    const float* state_end = end != nullptr ? end + pair * state : nullptr;
    LinearBlock block;
    if (part < r_blocks) {  // dq_i = scale * dO_i S_i^T
      block = product(p, grad, value, key, grad_query, request, kv_head);
      block.scale = scale;
      if (state_in != nullptr) set_state_in(state_in, p.dv, true, &block);
      if (final_state != nullptr) set_state_out(final_state + pair * state, p.dv, true, &block);
      if (wants_decay) {
        block.dot_with = first_token(p, query, request, kv_head * p.group());
        block.dot_head = block.output_head;
        block.dot_token = block.output_token;
        block.dots_head = all;
        block.dots = query_dots + (part * p.heads + kv_head * p.group()) * all + token;
      }
      set_columns(part, p.r, &block);
    } else if (part < 2 * r_blocks) {  // dk_p = v_p dS_p^T with dS_n = decay_{n+1} dS_{n+1} + scale * q_n^T dO_n
      block = product(p, value, grad, query, grad_key, request, kv_head);
      block.value_scale = scale;
      block.reverse = true;
      if (state_end != nullptr) set_state_in(state_end, p.dv, true, &block);
      if (wants_decay) {
        block.dot_with = first_token(p, key, request, kv_head);
        block.dot_head = block.output_head;
        block.dot_token = block.output_token;
        block.dots_head = all;
        block.dots = key_dots + ((part - r_blocks) * p.kv_heads + kv_head) * all + token;
      }
      set_columns(part - r_blocks, p.r, &block);
    } else {  // dv_p = k_p dS_p, and the gradient of the initial state
      block = product(p, key, query, grad, grad_value, request, kv_head);
      block.value_scale = scale;
      block.reverse = true;
      if (state_end != nullptr) set_state_in(state_end, p.dv, false, &block);
      if (wants_state) set_state_out(call.outputs[kOutGradInitialState].as<float>() + pair * state, p.dv, false, &block);
      set_columns(part - 2 * r_blocks, p.dv, &block);
    }
    block.scratch = scratch;
    run_block(block);
  });
  if (!wants_decay) return {};
  const DecayGradient gradient = {p, query_dots, key_dots, r_blocks, final_state, end};
  const Tensor& result = call.outputs[kOutGradLogDecay];
  if (p.per_token) {
    zero(result);  // tokens of no request
    const Strides s = head_token_strides(p.bnhd, p.kv_heads, p.tokens, 1);
    parallel_for(*target.threads, pairs, [&](int64_t pair) {
      const int64_t q = pair / p.kv_heads, kv_head = pair % p.kv_heads;
      float* to = result.as<float>() + p.request(q).batch * s.batch + kv_head * s.head;
      gradient.visit(q, kv_head, [&](int64_t token, float value) { to[token * s.token] = value; });
    });
  } else {
    parallel_for(*target.threads, p.kv_heads, [&](int64_t kv_head) {
      double total = 0.0;
      for (int64_t q = 0; q < p.requests; ++q) total += gradient.visit(q, kv_head, [](int64_t, float) {});
      result.as<float>()[kv_head] = static_cast<float>(total);
    });
  }
  return {};
}

}  // namespace

const OpImpl kImpl = {nullptr, check_values, run_on_cpu, nullptr};

}  // namespace causal_linear_decay_grad

}  // namespace leanfleet
