// SampleTokens as plain structs: the arguments of every kernel, and the steps of the CPU kernel.
#pragma once

#include <cstdint>

namespace leanfleet {

struct CudaTarget;
class Workspace;

namespace sample_tokens {

// Null: absent. B requests, V tokens.
struct Args {
  const void* logits;  // T [B,V]
  int32_t dtype;       // DType of T
  int64_t batch, vocabulary;
  const float* temperature;  // [B], with seed and position
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t* seed;
  const int32_t* position;
  const int32_t* token_counts;  // [count_rows,V]
  const int32_t* count_index;   // [B]
  int64_t count_rows;
  const float *repetition_penalty, *presence_penalty, *frequency_penalty;
  const float* logit_bias;        // [B,V]
  const int32_t* allowed_tokens;  // [B,allowed_words]
  int64_t allowed_words;
  const int32_t* active;
  int64_t* tokens;              // [B]
  float* logprob;               // [B]
  float* top_logprobs;          // [B,num_logprobs]
  int64_t* top_tokens;          // [B,num_logprobs]
  int32_t* token_counts_out;    // [count_rows,V], may be token_counts
  int64_t num_logprobs;         // 0: not asked for
  bool samples, wants_logprob;  // known, too, while a workspace is counted
};

constexpr int64_t kMaxLogprobs = 128;
constexpr int64_t kWordTokens = 32;  // of a word of allowed_tokens

// Bins of weights, 64 to a factor of 2: kWeightBits * 64 + 1 are in use.
constexpr int kBins = 2048;

// ---- The CPU kernel. A row's tokens are cut into pieces of whole blocks; steps of a row are prepare and weigh for each
// piece, then the choice, in op.cpp.

struct Piece {
  float top;       // largest x; -inf where there is none
  int64_t first;   // the first token that has it
  float raw_top;   // largest logit
  bool raw_nan;    // a logit is NaN
  double raw_sum;  // sum of exp(logit - largest logit of the row)
};

// What a row needs while its token is found.
struct RowWork {
  float* x;              // [V]; null: the logits as they are
  int32_t* weights;      // [V]
  int64_t* mass;         // [pieces,kBins]: sums of weights
  uint32_t* count;       // [pieces,kBins]: tokens
  uint64_t* candidates;  // [V]
  Piece* pieces;         // [pieces]
};

}  // namespace sample_tokens

namespace sample_tokens {

// On CUDA. Asks `ws` for its buffers and returns 0 while it counts, otherwise the cudaError_t of the launches.
int launch(const Args& args, const CudaTarget& target, Workspace& ws);

}  // namespace sample_tokens
}  // namespace leanfleet
