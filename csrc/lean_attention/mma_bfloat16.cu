#include "lean_attention/mma_launch.cuh"

namespace leanfleet {

template int launch_mma<__nv_bfloat16>(const LeanAttentionArgs&, const LeanTileLoads&, const CUtensorMap&, const CUtensorMap&, int,
                            int, void*);

}  // namespace leanfleet
