// Where the elements of a tensor with batch rows, heads and tokens are.
#pragma once

#include <cstdint>

namespace leanfleet {

// Element strides of a [B,heads,N,width] or, with width 1, of a [B,heads,N] tensor in the call's layout; the innermost
// stride is 1.
struct Strides {
  int64_t batch, head, token;
};

}  // namespace leanfleet
