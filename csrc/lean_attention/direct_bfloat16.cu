// The kernels that read caches straight into registers, for bfloat16.
#include "lean_attention/direct_kernel.cuh"

namespace leanfleet {

template <>
int launch_direct<__nv_bfloat16>(const LeanAttentionArgs& args, int width, bool clusters, bool few_tokens, void* stream) {
  return width == 64 ? launch_direct_width<__nv_bfloat16, 64>(args, clusters, few_tokens, static_cast<cudaStream_t>(stream))
                     : launch_direct_width<__nv_bfloat16, 128>(args, clusters, few_tokens, static_cast<cudaStream_t>(stream));
}

}  // namespace leanfleet
