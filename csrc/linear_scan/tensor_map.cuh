// Maps of tensors for Hopper's tensor copies, in files that nvcc compiles.
#pragma once

#include <cuda.h>

#include "core/cuda_target.h"
#include "core/strides.h"

namespace leanfleet {

// A map of 16-bit numbers for boxes of box_rows rows by 64 columns, which land swizzled; what lies beyond the tensor is 0. sizes
// and strides, in bytes, from the last axis on, without that of the columns. False: the driver has no such function or refuses.
template <int kRank>
bool encode_boxes(CUtensorMap* map, const void* data, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                  int box_rows, DType dtype, CUtensorMapL2promotion promotion) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return false;
  cuuint32_t box[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    box[i] = i == 0 ? 64 : i == 1 ? static_cast<cuuint32_t>(box_rows) : 1;
    steps[i] = 1;
  }
  const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Of rows as [batch][head][token][column], in boxes of 64 tokens.
inline bool encode_rows(CUtensorMap* map, const void* data, const Strides& strides, int64_t width, int64_t tokens,
                        int64_t heads, int64_t batch, DType dtype) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(strides.token) * 2, static_cast<cuuint64_t>(strides.head) * 2,
                               static_cast<cuuint64_t>(strides.batch) * 2};
  return encode_boxes(map, data, sizes, bytes, 64, dtype, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// Of a matrix [rows][columns].
inline bool encode_matrix(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows, DType dtype) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t bytes[1] = {static_cast<cuuint64_t>(columns) * 2};
  return encode_boxes(map, data, sizes, bytes, box_rows, dtype, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace leanfleet
