// Products of matrices by cuBLASLt, where the process can load it. No CUDA header is needed to include this.
#pragma once

#include "core/cuda_target.h"

namespace leanfleet {

// Row-major: output T [rows,columns] = input T [rows,depth] weight T [depth,columns] + bias T [columns] (null: none), with sums in
// float32. All begin at multiples of 16 bytes. workspace: kCublasWorkspace bytes.
struct CublasProduct {
  const void *input, *weight, *bias;
  void* output;
  int64_t rows, depth, columns;
  void* workspace;
};
constexpr int64_t kCublasWorkspace = int64_t{32} << 20;  // what NVIDIA recommends for Hopper

// Whether cuBLASLt of CUDA 13 or 12 is there, which ONNX Runtime's CUDA provider and PyTorch bring: asked once.
bool has_cublas();

// done false: it has no algorithm for this product, or none yet while a stream is being captured.
Status multiply_by_cublas(const Call& call, const CublasProduct& product, DType dtype, const CudaTarget& target, bool* done);

}  // namespace leanfleet
