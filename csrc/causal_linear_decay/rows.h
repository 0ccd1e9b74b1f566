// The CUDA-core kernels to which recurrence.cu passes calls: many tokens (rows.cu) and few (decode.cu). What they ask of `ws`
// depends on shapes and attributes; they return 0 while it counts, otherwise the cudaError_t of the launches.
#pragma once

#include "causal_linear_decay/causal_linear_decay.h"

namespace leanfleet::causal_linear_decay {

bool rows_fit(const Args& args);
int launch_rows(const Args& args, const CudaTarget& target, Workspace& ws);

// Few tokens a request, any number of requests.
bool decode_fits(const Args& args);
int launch_decode(const Args& args, const CudaTarget& target);

// Another kernel's launch over states of 16 bits or [Dv,R]: with float32 ones [R,Dv] in its scratch. `turned` says whether the
// order changes: the delta rule's kernels have either.
int with_plain_states(const Args& args, bool turned, const CudaTarget& target, Workspace& ws,
                      int (*launch)(const Args&, const CudaTarget&, Workspace&));
// launch_grad over states [Dv,R].
int launch_grad_turned(const GradArgs& args, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet::causal_linear_decay
