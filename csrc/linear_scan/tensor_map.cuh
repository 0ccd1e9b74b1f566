// Maps of tensors for Hopper's tensor copies, in files that nvcc compiles.
#pragma once

#include <cuda.h>

#include "core/cuda_target.h"
#include "core/strides.h"

namespace leanfleet {

// A map of 16-bit rows as [batch][head][token][column] for boxes of 64 tokens by 64 columns, which land swizzled. False: the
// driver has no such function or refuses.
inline bool encode_rows(CUtensorMap* map, const void* data, const Strides& strides, int64_t width, int64_t tokens,
                        int64_t heads, int64_t batch, DType dtype) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return false;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(strides.token) * 2, static_cast<cuuint64_t>(strides.head) * 2,
                               static_cast<cuuint64_t>(strides.batch) * 2};
  const cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 4, const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace leanfleet
