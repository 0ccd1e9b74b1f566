#include "core/simd.h"
#include "scaled_add.h"

namespace leanfleet::scaled_add::LEANFLEET_ISA {

namespace {

template <class T>
void row_of(const Args& args, int64_t row) {
  const int64_t base = row / args.heads * args.batch_stride + row % args.heads * args.head_stride;
  float total = 0.0f;
  for (int64_t n = 0; n < args.tokens; ++n) {
    const int64_t at = base + n * args.token_stride;
    for (int64_t d = 0; d < args.width; ++d) {
      const float x = to_float(static_cast<const T*>(args.x)[at + d]);
      const float y = args.y != nullptr ? to_float(static_cast<const T*>(args.y)[at + d]) : 0.0f;
      static_cast<T*>(args.output)[at + d] = from_float<T>(args.alpha * x + y);
      total += x;
    }
  }
  args.partial[row] = total;
}

}  // namespace

void add_row(const Args& args, int64_t row) {
  if (args.dtype == 0) row_of<float>(args, row);
  if (args.dtype == 1) row_of<Half>(args, row);
  if (args.dtype == 2) row_of<BFloat16>(args, row);
}

}  // namespace leanfleet::scaled_add::LEANFLEET_ISA
