// CausalLinearDecay as the delta rule's kernels take it, with the rule switched off.
#pragma once

#include "causal_linear_decay/causal_linear_decay.h"
#include "gated_delta_rule/gated_delta_rule.h"

namespace leanfleet::causal_linear_decay {

// What the forward and its gradient have in common: no states, no output.
inline gated_delta_rule::Args without_rule(const Inputs& in) {
  gated_delta_rule::Args to = {};
  to.query = in.query;
  to.key = in.key;
  to.value = in.value;
  to.log_decay = in.log_decay;
  to.beta = in.beta;
  to.cu_seqlens = in.cu_seqlens;
  to.packed = in.packed;
  to.dtype = in.dtype;
  to.scale = in.scale;
  to.decay_per_key = in.decay_per_key;
  to.state_v_first = in.state_v_first;
  to.batch = in.batch;
  to.requests = to.state_rows = in.requests;
  to.q_heads = in.q_heads;
  to.k_heads = in.k_heads;
  to.v_heads = in.v_heads;
  to.heads = in.heads;
  to.tokens = in.tokens;
  to.key_width = in.key_width;
  to.value_width = in.value_width;
  to.query_strides = in.query_strides;
  to.key_strides = in.key_strides;
  to.value_strides = in.value_strides;
  to.output_strides = in.output_strides;
  to.beta_strides = in.decay_strides;
  const int64_t width = in.decay_per_key ? in.key_width : 1;
  to.decay_strides = {in.decay_strides.batch * width, in.decay_strides.head * width, in.decay_strides.token * width};
  if (!in.decay_per_key && !in.decay_per_token) to.decay_strides = {0, 1, 0};  // of a head
  return to;
}

inline gated_delta_rule::Args without_rule(const Args& args) {
  gated_delta_rule::Args to = without_rule(args.in);
  to.initial_state = args.initial_state;
  to.state_index = args.state_index;
  to.output = args.output;
  to.final_state = args.final_state;
  to.state_rows = args.state_rows;
  return to;
}

inline gated_delta_rule::GradArgs without_rule(const GradArgs& args) {
  gated_delta_rule::GradArgs to = {};
  to.in = without_rule(args.in);
  to.in.initial_state = args.initial_state;
  to.grad_output = args.grad_output;
  to.grad_final_state = args.grad_final_state;
  to.grad_query = args.grad_query;
  to.grad_key = args.grad_key;
  to.grad_value = args.grad_value;
  to.grad_log_decay = args.grad_log_decay;
  to.grad_initial_state = args.grad_initial_state;
  to.wants_grad_decay = args.wants_grad_decay;
  return to;
}

}  // namespace leanfleet::causal_linear_decay
