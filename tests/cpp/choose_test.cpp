// What `auto` takes on CUDA: reads "sm_count element B H Hv N R Dv normalize" a line, for Hq = H and Hk = Hv, prints the number that the
// algorithm has in the schema.
#include <cstdio>

#include "causal_linear_decay/choose.h"

int main() {
  using namespace leanfleet::causal_linear_decay;
  Inputs in = {};
  int sm_count = 0, element = 0, normalize = 0;
  long long b, h, kv, n, r, v;
  while (std::scanf("%d %d %lld %lld %lld %lld %lld %lld %d", &sm_count, &element, &b, &h, &kv, &n, &r, &v, &normalize) ==
         9) {
    in.dtype = element == 4 ? 0 : 2;
    in.batch = in.requests = b, in.q_heads = in.heads = h, in.k_heads = in.v_heads = kv, in.tokens = n, in.key_width = r, in.value_width = v;
    std::printf("%d\n", fastest_algorithm(in, normalize != 0, sm_count));
  }
  return 0;
}
