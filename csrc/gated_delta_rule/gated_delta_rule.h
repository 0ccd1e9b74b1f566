// GatedDeltaRule and GatedDeltaRuleGrad as plain structs: the arguments that a kernel gets, and how the CPU kernels cut the
// work. CausalLinearDecay, which is the same recurrence without the rule, has its decays of key dimensions, and some of its
// states [Dv,D], from these kernels.
#pragma once

#include <cstdint>

#include "core/strides.h"

namespace leanfleet {
struct CpuTarget;
struct CudaTarget;
class Workspace;
}  // namespace leanfleet

namespace leanfleet::gated_delta_rule {

constexpr float kUnitRowEps = 1e-6f;  // what normalize_qk adds to a row's sum of squares

// S' = diag(exp(g_i)) S_{i-1}, u_i = beta_i (v_i - k_i S'), S_i = S' + k_iᵀ u_i, o_i = scale * q_i S_i.
// Request q is all tokens of batch row q or, with cu_seqlens, tokens cu_seqlens[q] .. cu_seqlens[q+1] of batch row 0, both
// ends clamped to [0, N]. Of the `heads` heads of the output head h takes query head h / (heads / q_heads) and state
// h / (heads / v_heads); state s takes key head s / (v_heads / k_heads). Without `delta` u_i = beta_i v_i.
struct Args {
  const void *query, *key, *value;  // T [B,Hq,N,D], [B,Hk,N,D], [B,Hv,N,Dv]
  const float* log_decay;           // g in [-inf, 0], [B,Hv,N] or per key dimension [B,Hv,N,D]; null: 0
  const float* beta;                // [B,Hv,N]; null: 1
  const float* initial_state;       // [state_rows,Hv,D,Dv], with state_v_first [state_rows,Hv,Dv,D]; null: 0
  const int32_t* cu_seqlens;        // [requests + 1]; null: requests = batch, or a workspace is counted
  const int32_t* state_index;       // [requests]: row of a request's state; outside the pool: 0, not written. null: q
  void* output;                     // T [B,heads,N,Dv]; tokens of no request become 0
  float* final_state;               // as the initial one, and perhaps its buffer; null: not asked for. Rows that no request
                                    // names become those of the initial one
  bool packed;                      // with cu_seqlens: what the host plans by
  int32_t dtype;                    // DType of T
  float scale;                      // not 0 with `delta`
  bool delta;
  bool decay_per_key, normalize, state_v_first;
  int64_t batch, requests, q_heads, k_heads, v_heads, heads, tokens, key_width, value_width, state_rows;
  Strides query_strides, key_strides, value_strides, output_strides, decay_strides, beta_strides;

  // On the CPU, with decays of key dimensions or without `delta`: states of T in place of the float32 ones, which are null then,
  // and a norm z_i = exp(g_i) z_{i-1} + beta_i k_i, by which o_i is divided: by scale q_i . z_i, its magnitude held at eps or more.
  bool narrow_states, divides;
  float eps;
  const void* narrow_initial_state;
  void* narrow_final_state;
  const float* initial_norm;  // [state_rows,Hv,D]; null: 0
  float* final_norm;          // null: not asked for
  // On CUDA.
  const float* row_factors;  // [batch,heads,tokens], of rows of the output, where decays are of key dimensions; null: 1
  bool token_by_token;       // whatever else would be taken
};

// The CPU kernel. An item is (request, state, range of value columns), a task of one thread.
constexpr int64_t kRangeColumns = 16;  // ranges of columns are multiples of it on every instruction set

struct CpuPlan {
  Args args;
  int64_t ranges, range_width;
};

// All tokens and states that a request has. Asks `ws` first, and returns then if it is counting.
void run_states(const Args& args, const CpuTarget& target, Workspace& ws);

// The gradients of all inputs of `in`, whose output, final_state and state_index are null. With dS_i the gradient of S_i:
//   dS_i = exp(g_(i+1)) dS'_(i+1) + scale q_iᵀ do_i    du_i = k_i dS_i    dS'_i = dS_i - beta_i k_iᵀ du_i
//   dq_i = scale do_i S_iᵀ    dk_i = u_i dS_iᵀ - beta_i du_i S'_iᵀ    dv_i = beta_i du_i    dbeta_i = du_i . (v_i - k_i S'_i)
//   dg_i = <S'_i, dS'_i>, of a key dimension that of its row
struct GradArgs {
  Args in;
  const void* grad_output;        // T, where the output is
  const float* grad_final_state;  // null: 0
  void *grad_query, *grad_key, *grad_value;
  float *grad_beta, *grad_log_decay, *grad_initial_state;  // null: not asked for; with `delta` grad_beta is
  bool wants_grad_decay;
};

// The CPU kernel. An item is (request, state), a task of one thread. Where several share a head of queries or keys, each writes
// its part of that gradient, which a second phase sums.
constexpr int64_t kGradChunk = 32;  // tokens

struct GradPlan {
  GradArgs args;
  int64_t span_chunks, spans;      // states before so many chunks are held at once; before each span from the start
  float *query_parts, *key_parts;  // [batch, heads or v_heads, tokens, D]; null: nothing is shared
};
enum class GradPhase { kStates, kSums };

// As run_states. Gradients of tokens that no request has are not written.
void run_grads(const GradArgs& args, const CpuTarget& target, Workspace& ws);

// On CUDA: chooses a kernel, for D up to kCudaMaxKeyWidth, and returns the cudaError_t of the launches. Asks `ws` first, and
// returns then if it is counting. The kernel that takes all calls goes token by token with the state in registers;
// recurrence_blocks: its CTAs, which must be less than 2^31.
constexpr int64_t kCudaMaxKeyWidth = 256;
int64_t recurrence_blocks(const Args& args);
int launch_recurrence(const Args& args, const CudaTarget& target, Workspace& ws);
// The same for a few tokens a request and D up to 128, where rows and states may be read in vectors: decode steps.
bool steps_fit(const Args& args);
int launch_steps(const Args& args, const CudaTarget& target);
// In chunks on tensor cores, for 16-bit prompts with a decay of each token.
constexpr int64_t kChunkedTokens = 32;  // a request, below which the recurrence is taken
bool chunked_fits(const Args& args, int device);
int launch_chunked(const Args& args, const CudaTarget& target);
// For float32, on the ordinary cores.
bool float_chunks_fit(const Args& args, int device);
int launch_float_chunks(const Args& args, const CudaTarget& target);
// On Hopper for 16 bits, D up to 256, decays of tokens or of key dimensions, in two or three kernels, of which the last takes states
// through the chunks and the others take all chunks at once. prompt_fits sees no addresses, so that
// whether launch_prompt launched anything depends on these.
bool prompt_fits(const Args& args, const CudaTarget& target);
int launch_prompt(const Args& args, const CudaTarget& target, Workspace& ws, bool* launched);
// The gradients, for D up to kCudaMaxKeyWidth.
int launch_grad(const GradArgs& args, const CudaTarget& target, Workspace& ws);
// In chunks on tensor cores, for 16-bit prompts: all but sums over what shares a head of queries or keys, and lengths of rows.
// shared: bytes that a CTA gets.
struct GradParts {
  float *query, *key;  // [B, heads, tokens, D] and [B, key_part_heads(), tokens, D], of unit rows, without scale
  float* decay;        // of key dimensions [heads / v_heads, B, v_heads, tokens, D]; null: goes straight to its output
};
// With decays of key dimensions the heads of the output that share a state have parts of their own.
inline int64_t key_part_heads(const Args& args) { return args.decay_per_key ? args.heads : args.v_heads; }
bool grad_chunks_fit(const GradArgs& args, int shared);
int launch_grad_chunks(const GradArgs& args, const GradParts& parts, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet::gated_delta_rule
