// MergeAttention as plain structs: the arguments of its kernels.
#pragma once

#include <cstdint>

namespace leanfleet::merge_attention {

struct Args {
  const void* partial_output;  // T [parts,rows,width]
  const float* partial_lse;    // [parts,rows]
  void* output;                // T [rows,width]
  float* lse;                  // [rows]
  int32_t dtype;               // DType of T
  int64_t parts, rows, width;
};

// On CUDA. Returns the cudaError_t of the launch.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::merge_attention
