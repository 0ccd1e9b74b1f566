// From the type of a call's tensors to the type that its kernel is compiled for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/op.h"

namespace leanfleet {

// launch(T{}) with the T of a floating-point type. Tensors of other types reach no kernel this way: their operators' schemas
// allow float, float16 and bfloat16 alone.
template <class Launch>
auto with_type(DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::kFloat32: return launch(float{});
    case DType::kFloat16: return launch(__half{});
    default: return launch(__nv_bfloat16{});
  }
}
template <class Launch>
auto with_type(int32_t dtype, Launch&& launch) {  // as kernels' arguments hold it
  return with_type(static_cast<DType>(dtype), launch);
}

}  // namespace leanfleet
