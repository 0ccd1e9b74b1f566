// output = alpha * x + y and, with totals, total_out[b,h] = total[b,h] + the sum of x[b,h,:,:].
#pragma once

#include <cstdint>

namespace leanfleet::scaled_add {

struct Args {
  const void* x;
  const void* y;  // null: 0
  void* output;
  const float* total;  // null: no totals are kept
  float* total_out;
  float* partial;      // [rows] scratch: the sum of each x[b,h,:,:]
  uint32_t* arrivals;  // [1] sync word of the CUDA kernel
  int32_t dtype;       // DType
  int64_t rows, heads, tokens, width;  // rows = B * H
  int64_t batch_stride, head_stride, token_stride;
  float alpha;
};

// Returns a cudaError_t.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::scaled_add
