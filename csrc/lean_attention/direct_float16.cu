#include "lean_attention/direct_kernel.cuh"

namespace leanfleet {

template int launch_direct<__half>(const LeanAttentionArgs&, int, bool, bool, void*);

}  // namespace leanfleet
