// AllReduce and AllGather, which a communicator carries out.
#include <cstring>
#include <string>

#include "core/communicator.h"
#include "core/op_specs.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet {

namespace collectives {

namespace {

// Runs `exchange` of the communicator that the node names, or `copy` in a world of one.
template <class Copy, class Exchange>
Status run(const Call& call, const std::string& name, Engine engine, Copy&& copy, Exchange&& exchange) {
  std::shared_ptr<Communicator> communicator;
  LEANFLEET_RETURN_IF_ERROR(communicator_of(call, name, engine, &communicator));
  if (communicator->world > 1) return with_node(call, exchange(*communicator));
  const Tensor &input = call.inputs[0], &output = call.outputs[0];
  return input.data == output.data ? Status{} : copy(output.data, input.data, input.elements() * element_size(input.dtype));
}

Status copy_on_cpu(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return {};
}

template <class Copy>
Status reduce(const Call& call, Engine engine, void* stream, Copy&& copy) {
  return run(call, call.attrs[all_reduce::kAttrCommunicator].s, engine, copy, [&](Communicator& communicator) {
    const Tensor& input = call.inputs[all_reduce::kInput];
    return communicator.sum(input.data, call.outputs[all_reduce::kOutOutput].data, input.elements(), input.dtype, stream);
  });
}

template <class Copy>
Status gather(const Call& call, Engine engine, void* stream, Copy&& copy) {
  const std::string& name = call.attrs[all_gather::kAttrCommunicator].s;
  std::shared_ptr<Communicator> found;
  LEANFLEET_RETURN_IF_ERROR(communicator_of(call, name, call.attrs[all_gather::kAttrWorld].i, engine, &found));
  return run(call, name, engine, copy, [&](Communicator& communicator) {
    const Tensor& input = call.inputs[all_gather::kInput];
    return communicator.gather(input.data, call.outputs[all_gather::kOutOutput].data, input.elements(), input.dtype, stream);
  });
}

Status reduce_on_cpu(const Call& call, const CpuTarget&, Workspace& ws) {
  return ws.counting() ? Status{} : reduce(call, Engine::kSharedMemory, nullptr, copy_on_cpu);
}

Status gather_on_cpu(const Call& call, const CpuTarget&, Workspace& ws) {
  return ws.counting() ? Status{} : gather(call, Engine::kSharedMemory, nullptr, copy_on_cpu);
}

Status check_gather(const Call& call) { return check_world(call, call.attrs[all_gather::kAttrWorld].i); }

#ifdef LEANFLEET_CUDA
Status reduce_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return reduce(call, Engine::kNccl, target.stream, [&](void* to, const void* from, int64_t bytes) {
    return copy_on_device(call, to, from, bytes, target.stream);
  });
}

Status gather_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  if (ws.counting()) return {};
  return gather(call, Engine::kNccl, target.stream, [&](void* to, const void* from, int64_t bytes) {
    return copy_on_device(call, to, from, bytes, target.stream);
  });
}
#else
constexpr Status (*reduce_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
constexpr Status (*gather_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

}  // namespace collectives

const OpImpl all_reduce::kImpl = {nullptr, nullptr, collectives::reduce_on_cpu, collectives::reduce_on_cuda};
const OpImpl all_gather::kImpl = {collectives::check_gather, nullptr, collectives::gather_on_cpu, collectives::gather_on_cuda};

}  // namespace leanfleet
