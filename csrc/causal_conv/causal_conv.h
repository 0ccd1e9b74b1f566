// CausalConv as plain structs: the arguments of every kernel, and a piece of the CPU kernel's work.
#pragma once

#include <cstdint>

namespace leanfleet {
struct CudaTarget;
}  // namespace leanfleet

namespace leanfleet::causal_conv {

// In the order of the schema's values.
enum class Kind : int32_t { kNone, kSilu };

// Channels begin .. end of the output, in a tensor of their own.
struct Part {
  void* data;  // T [B,N,end - begin]
  int64_t begin, end;
};
constexpr int kMostParts = 3;

// output_i = act(bias + sum over j of weight_j x_(i-past+j)). Request q is the first query_lens[q] tokens of batch row q or,
// with cu_seqlens, tokens cu_seqlens[q] .. cu_seqlens[q+1] of batch row 0, all clamped to [0, N].
struct Args {
  const void *input, *weight, *bias;  // T [B,N,C], rows `pitch` elements apart, [past+1,C], [C]; bias null: 0
  const float* initial_state;         // [state_rows,past,C]; null: 0
  const int32_t* query_lens;          // [requests]; null: N
  const int32_t* cu_seqlens;          // [requests + 1]; null: requests = batch
  const int32_t* state_index;         // [requests]: row of a request's state; outside the pool: 0, not written. null: q
  Part parts[kMostParts];             // of the output, in order; tokens of no request become 0
  float* final_state;                 // as the initial one, and perhaps its buffer; null: not asked for. Rows that no request
                                      // names become those of the initial one
  int32_t dtype;                      // DType of T
  Kind activation;
  int64_t batch, requests, tokens, channels, past, state_rows, pitch;
  int32_t num_parts;
};

// Tokens `from` .. `to` of a request of `count` tokens, and its channels `begin` .. `end`. The piece that begins at 0 writes
// the state too, after it has read it: others begin `past` tokens later at least and read none.
struct Piece {
  int64_t first, count, from, to, begin, end;  // first: row of the request's first token in [B * N]
  const float* state;                          // [past,C]; null: zeros
  float* final_state;                          // null: not asked for, or the request has no row
};

// On CUDA, a thread for a few channels. Needs no workspace; returns the cudaError_t of the launches. blocks: CTAs, which
// must be less than 2^31.
int64_t blocks(const Args& args);
int launch(const Args& args, const CudaTarget& target);

}  // namespace leanfleet::causal_conv
