// Operators that read some columns of a wider tensor where they stand: the attribute columns, and one that says where they begin.
#pragma once

#include <string>

#include "core/op.h"

namespace leanfleet {

// `count` columns from `first` on, of a tensor that has `width`. attribute: that of `first`.
inline Status check_columns(const Call& call, const char* tensor, int64_t first, int64_t count, int64_t width,
                            const std::string& attribute = "first_column") {
  if (first <= width && count <= width - first) return {};
  return call.invalid("columns is 1, " + attribute + " is " + std::to_string(first) + ", and " + tensor + " has " +
                      std::to_string(width) + " columns; expected " + std::to_string(count) + " from " + attribute + " on");
}

// Where they begin in the first row. Null where the tensor is, as while a workspace is counted.
inline const void* columns_of(const Tensor& tensor, int64_t first) {
  return tensor.data == nullptr ? nullptr : static_cast<const char*>(tensor.data) + first * element_size(tensor.dtype);
}

}  // namespace leanfleet
