// CausalLinearDecay and CausalLinearDecayGrad as plain structs: the arguments that a kernel gets for either operator,
// and how the CPU kernel cuts the work. "LD" is LeetDecoding, "FA" is FleetAttention (Efficient Decoding for Long
// Prompts via Low-Rank Attention).
#pragma once

#include <cstdint>

#include "core/strides.h"

namespace leanfleet {
struct CudaTarget;
class Workspace;
}  // namespace leanfleet

namespace leanfleet::causal_linear_decay {

// Request q is all tokens of batch row q or, with cu_seqlens, tokens cu_seqlens[q] .. cu_seqlens[q+1] of batch row 0,
// both ends clamped to [0, N]. Of the `heads` heads of the output head h takes query head h / query_share and state
// h / (heads / v_heads); state s takes key head s / key_share. Where heads of the output share a query, each has a state.
struct Inputs {
  const void *query, *key, *value;  // T [B,Hq,N,R], [B,Hk,N,R], [B,Hv,N,Dv]
  const float* log_decay;           // ln γ in [-inf, 0], [Hv], per token [B,Hv,N] or its key dimensions [B,Hv,N,R]; null: γ = 1
  const float* beta;                // [B,Hv,N]: k stands for beta k below; null: 1. Not of gradients
  bool decay_per_token, decay_per_key;  // at most one
  bool state_v_first;                   // states are [Dv,R]; false for kernels that do not say otherwise
  const int32_t* cu_seqlens;            // [requests + 1]; null: requests = batch, or a workspace is counted
  bool packed;                          // with cu_seqlens: what the host plans by
  int32_t dtype;                        // DType of T
  float scale;
  int64_t batch, requests, q_heads, k_heads, v_heads, heads;  // B, B or Q, Hq, Hk, Hv, H = max(Hq, Hv)
  int64_t tokens, key_width, value_width;                     // N, R, Dv
  int32_t query_share, key_share;                             // H / Hq, Hv / Hk
  // output_strides are those of grad_output too; decay_strides are those of beta and of a per-token log_decay.
  Strides query_strides, key_strides, value_strides, output_strides, decay_strides;

  template <class I>
  constexpr I query_head(I head) const {
    return head / static_cast<I>(query_share);
  }
  template <class I>
  constexpr I key_head(I state) const {
    return state / static_cast<I>(key_share);
  }
};

// S_i = γ_i S_{i-1} + k_iᵀ v_i, o_i = scale * q_i S_i (LD eq. 4 row by row). With normalize also z_i = γ_i z_{i-1} + k_i,
// and o_i is divided by scale * q_i·z_i, its magnitude held at eps or more, its sign kept, that of 0 plus (FA
// algorithm 1).
struct Args {
  Inputs in;
  int32_t algorithm;  // the attribute: Algorithm in core/op_specs.h
  bool normalize;
  float eps;
  const float *initial_state, *initial_norm;  // [state_rows,Hv,R,Dv], [state_rows,Hv,R]; null: 0
  const void* narrow_initial_state;           // T: in place of the float32 one, which is null then. On CUDA for decode.cu
  const int32_t* state_index;                 // [requests]: row of a request's state; outside the pool: 0, not written. null: q
  int64_t state_rows;                         // P, or requests
  void* output;                               // T [B,H,N,Dv]; tokens of no request become 0
  float *final_state, *final_norm;            // as the initial ones, and perhaps their buffers; null: not asked for. Rows that
                                              // no request names become those of the initial ones
  void* narrow_final_state;                   // T: with narrow_initial_state, in place of the float32 one
  bool narrow_states;                         // known, too, while a workspace is counted
  bool carries_state;  // initial_state is given and final_state asked for: known, too, while a workspace is counted
};

// With G_i the gradient of S_i, grad_final_state in place of γ_{N+1} G_{N+1}:
//   G_i = γ_{i+1} G_{i+1} + scale * q_iᵀ do_i
//   dq_i = scale * do_i S_iᵀ, dk_i = v_i G_iᵀ, dv_i = k_i G_i, dlog_decay_i = <G_i, γ_i S_{i-1}>
struct GradArgs {
  Inputs in;
  const void* grad_output;                        // T [B,H,N,Dv]
  const float *initial_state, *grad_final_state;  // [requests,Hv,R,Dv]; null: 0
  void *grad_query, *grad_key, *grad_value;       // as query, key, value; tokens of no request become 0
  float* grad_log_decay;                          // as log_decay; null: not asked for
  float* grad_initial_state;                      // [requests,Hv,R,Dv]; null: not asked for
  bool wants_grad_decay, has_grad_final_state;    // known, too, while a workspace is counted
};

// The CPU kernel. Requests are cut into pieces of whole chunks (the last one may be short), value columns into
// ranges; an item is (piece, state, range), a task of one thread. A request in one piece is walked once.
// One in several is walked twice: kReduce gives each piece's own sum, kCombine makes of these, in their order, the
// state at each piece's edge, and kScan walks again for the result. Which thread takes an item does not matter.
// Gradients of keys and queries that states share are sums: a kScan item of the backward takes item_states states of a key
// head in turn, which add to sums of their own, and kSum adds these up.
constexpr int64_t kChunkTokens = 16;   // tokens whose products are taken at once
constexpr int64_t kRangeColumns = 16;  // ranges of columns are multiples of it on every instruction set

enum class Phase : int32_t { kReduce, kCombine, kScan, kSum };

struct RequestPiece {
  int64_t request, batch, begin, end;  // tokens of the batch row
  int64_t slot;                        // of the sums at its edges; -1: it is the whole request
  bool first, last;                    // of its request
};

// Sums of slot s and state h: entry s * v_heads + h. Before kCombine the piece's own, then those at its edge:
// state and norm before the piece's first token, grad after its last.
struct Slots {
  float *state, *norm, *grad;  // [slots,Hv,R,Dv], [slots,Hv,R], [slots,Hv,R,Dv]
  double* kept;                // [slots,Hv]: the product of the piece's γ
};

struct ForwardPlan {
  Args args;
  int64_t ranges, range_width;
  const RequestPiece* pieces;
  Slots slots;
  const float* norms;  // [requests,Hv,R] in place of args.initial_norm, whose rows one range overwrites; or null
};

// Of each `states` neighbouring states, what they add to the gradient of a head that they share: [B,Hv / states,N,R]. Null:
// no heads are shared.
struct HeadSums {
  float* data;
  int64_t states;

  int64_t row(const Inputs& in, int64_t batch, int64_t part, int64_t token) const {
    return ((batch * (in.v_heads / states) + part) * in.tokens + token) * in.key_width;
  }
};

struct BackwardPlan {
  GradArgs args;
  const RequestPiece* pieces;
  Slots slots;
  int64_t span_chunks, spans;  // a piece is walked in spans of so many chunks, at most `spans` of them
  double* decay_sums;          // [pieces,Hv]: the piece's share of a per-head grad_log_decay; null: not asked for
  int64_t item_states;
  HeadSums query_sums, key_sums;
};

// On CUDA: chunks on tensor cores (linear_scan/chunk_scan.h). They take any widths, types and arguments; ask `ws` for their
// buffers and return 0 while it counts, otherwise the cudaError_t of the launches.
int launch_lightning(const Args& args, const CudaTarget& target, Workspace& ws);
constexpr int64_t kLightningMaxNormalizedKeyWidth = 256;
// Token by token on CUDA cores, for R up to kRecurrenceMaxKeyWidth: the row recurrence, which also serves decode steps,
// or FleetAttention's sum over the rank.
constexpr int64_t kRecurrenceMaxKeyWidth = 512;
// Copies all states and norms that are not in place, from the initial to the final ones (0 where there are none), for rows
// that no request names or only one without tokens. Returns the cudaError_t.
int keep_other_states(const Args& args, const CudaTarget& target);
int launch_recurrence(const Args& args, bool fleet, const CudaTarget& target, Workspace& ws);
int launch_grad(const GradArgs& args, const CudaTarget& target, Workspace& ws);

// The delta rule's kernels without the rule, for R up to kDeltaMaxKeyWidth: they have decays of key dimensions, and states in
// either order. Without such decays they are not normalised.
constexpr int64_t kDeltaMaxKeyWidth = 256;
int launch_without_rule(const Args& args, const CudaTarget& target, Workspace& ws);
int launch_grad_without_rule(const GradArgs& args, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet::causal_linear_decay
