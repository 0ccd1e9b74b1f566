// Prints the way of one_segment.h that LeanAttention takes for each line of
//   sm_count clusters shared_bytes batch kv_heads group tokens D Dv capacity known append quantised
// where known: all contexts have as many keys as there is room for.
#include "lean_attention/one_segment.h"

#include <cstdio>
#include <string>

int main() {
  using namespace leanfleet::lean_attention;
  static const int32_t length = 0;
  int sm_count, clusters, shared_bytes, known, append, quantised;
  Args args = {};
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d", &sm_count, &clusters, &shared_bytes, &args.batch, &args.kv_heads,
                    &args.group, &args.tokens, &args.key_width, &args.value_width, &args.capacity, &known, &append,
                    &quantised) == 13) {
    args.seq_lens = known ? nullptr : &length;
    args.cache_kind = kDense;
    args.append = append != 0;
    args.key_scales.kind = args.value_scales.kind = quantised ? kPerToken : kNoScale;
    const int columns = args.key_width > args.value_width ? args.key_width : args.value_width;
    const int width = columns <= 64 ? 64 : columns <= 128 ? 128 : 256;
    std::printf("%d\n", choose_one_segment(args, width, {sm_count, clusters != 0, shared_bytes}));
  }
}
