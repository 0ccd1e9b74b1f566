#include "core/over_ranks.h"

#include "core/merge_parts.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet {

namespace {

Status gather(Communicator& communicator, const PartialAttention& part, const GatheredAttention& gathered, void* stream) {
  LEANFLEET_RETURN_IF_ERROR(communicator.gather(part.output, gathered.output, part.rows * part.width, part.dtype, stream));
  return communicator.gather(part.lse, gathered.lse, part.rows, DType::kFloat32, stream);
}

merge_parts::Args merging(const Communicator& communicator, const PartialAttention& part, const GatheredAttention& gathered) {
  return {gathered.output,    gathered.lse, part.output, part.lse,  static_cast<int32_t>(part.dtype),
          communicator.world, part.rows,    part.width,  part.sinks};
}

}  // namespace

GatheredAttention carve_gathered(const PartialAttention& part, int64_t world, Workspace& ws) {
  GatheredAttention gathered;
  gathered.output = ws.scratch<char>(world * part.rows * part.width * element_size(part.dtype));
  gathered.lse = ws.scratch<float>(world * part.rows);
  return gathered;
}

Status merge_over_ranks(const Call& call, Communicator& communicator, const PartialAttention& part,
                        const GatheredAttention& gathered, const CpuTarget& target) {
  if (communicator.world == 1 || part.rows == 0) return {};
  LEANFLEET_RETURN_IF_ERROR(with_node(call, gather(communicator, part, gathered, nullptr)));
  merge_parts::run(merging(communicator, part, gathered), *target.threads);
  return {};
}

#ifdef LEANFLEET_CUDA
Status merge_over_ranks(const Call& call, Communicator& communicator, const PartialAttention& part,
                        const GatheredAttention& gathered, const CudaTarget& target) {
  if (communicator.world == 1 || part.rows == 0) return {};
  bool done = false;
  LEANFLEET_RETURN_IF_ERROR(with_node(call, communicator.merge(part, target.stream, &done)));
  if (done) return {};
  LEANFLEET_RETURN_IF_ERROR(with_node(call, gather(communicator, part, gathered, target.stream)));
  const int error = merge_parts::launch(merging(communicator, part, gathered), target.stream);
  return cuda_status(call, "launch of the kernel that merges the ranks' attention", error);
}
#endif

}  // namespace leanfleet
