// Decayed causal linear attention as one product, which the forward uses once and the gradients three times:
//
//   S_n = decay_n S_{n-1} + sum over groups of key_n^T value_n       S [X,Y]
//   output_n = scale * query_n S_n
//
// Backwards in time (`reverse`) tokens are visited from the last to the first and the decay between tokens n + 1 and n is
// decay_{n+1}; the state enters after the last token and leaves before the first, decayed by decay_0.
#pragma once

#include <cstdint>

namespace leanfleet {

// One request, one key/value head, and columns column_begin .. column_begin + columns of Y. Pointers are those of the
// first token of the request; strides are in elements.
struct LinearBlock {
  int32_t dtype;  // DType of query, key, value, output, dot_with
  bool reverse;
  int64_t tokens, x, column_begin, columns;
  int64_t query_groups, key_groups;  // heads that read, and heads that write the state; one of them is 1
  const void *query, *key, *value;
  void* output;
  int64_t query_head, query_token, key_head, key_token, value_head, value_token, output_head, output_token;
  float scale;        // of the output
  float value_scale;  // of the values as they are read
  const float* log_decay;  // null: no decay
  int64_t decay_token;     // 0: one decay for all tokens
  const float* state_in;   // [X,Y] with these strides, null: zero. May be state_out.
  int64_t state_in_row, state_in_column;
  float* state_out;  // null: not wanted
  int64_t state_out_row, state_out_column;
  const float* denominator;  // [query_groups, tokens] with these strides, null: output is not divided
  int64_t denominator_head, denominator_token;
  const void* dot_with;  // as output: dots[group, n] = sum over the columns of dot_with * output; null: not wanted
  int64_t dot_head, dot_token;
  float* dots;  // [query_groups, tokens], tokens contiguous
  int64_t dots_head;
  float* scratch;  // linear_scratch floats
};

}  // namespace leanfleet
