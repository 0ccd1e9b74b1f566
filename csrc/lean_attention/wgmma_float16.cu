#include "lean_attention/wgmma_launch.cuh"

namespace leanfleet {

template int launch_wgmma<__half>(const LeanAttentionArgs&, const LeanTileLoads&, const CUtensorMap&, const CUtensorMap&, int,
                               void*);

}  // namespace leanfleet
