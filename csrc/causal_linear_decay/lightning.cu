// CausalLinearDecay in chunks on tensor cores (Lightning Attention-2; LD section 3.2): one chunk_scan with the queries
// as x, the keys as y and the values as z.
#include <cuda_runtime.h>

#include "causal_linear_decay/causal_linear_decay.h"
#include "core/op.h"
#include "linear_scan/chunk_scan.h"

namespace leanfleet::causal_linear_decay {

int launch_lightning(const Args& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  const int64_t state_floats = in.key_width * in.value_width;
  ChunkScan scan = {};
  scan.dtype = in.dtype;
  scan.causal = true;
  scan.row_sums = scan.divide = args.normalize;
  scan.eps = args.eps;
  scan.batch = in.batch;
  scan.requests = in.requests;
  scan.tokens = in.tokens;
  scan.heads = static_cast<int32_t>(in.heads);
  scan.x_group = static_cast<int32_t>(in.heads / in.v_heads);
  scan.y_group = 1;
  scan.x_share = in.query_share;
  scan.y_share = in.key_share;
  scan.cu_seqlens = in.cu_seqlens;
  scan.x = chunk_tensor(in.query, in.query_strides, in.key_width);
  scan.y = chunk_tensor(in.key, in.key_strides, in.key_width);
  scan.z = chunk_tensor(in.value, in.value_strides, in.value_width);
  scan.out = args.output;
  scan.out_strides = chunk_tensor(nullptr, in.output_strides, in.value_width);
  scan.x_factor.scale = in.scale;
  scan.y_factor = {in.beta, in.decay_strides.batch, in.decay_strides.head, in.decay_strides.token, 1.0f, nullptr};
  scan.z_factor.scale = 1.0f;
  scan.log_decay = in.log_decay;
  scan.decay_per_token = in.decay_per_token;
  scan.decay_batch = in.decay_strides.batch;
  scan.decay_head = in.decay_strides.head;
  scan.decay_token = in.decay_strides.token;
  // The kernels only read `initial`.
  scan.initial = {const_cast<float*>(args.initial_state),
                  in.value_width,
                  1,
                  state_floats,
                  args.normalize ? const_cast<float*>(args.initial_norm) : nullptr,
                  nullptr,
                  nullptr};
  scan.last = {args.final_state, in.value_width, 1, state_floats, args.normalize ? args.final_norm : nullptr, nullptr, nullptr};
  scan.carried_in_place = args.carries_state;
  scan.state_index = args.state_index;
  scan.state_rows = args.state_rows;

  const bool untouched = args.state_index != nullptr || in.cu_seqlens != nullptr || in.tokens == 0;
  if (!ws.counting() && untouched)
    if (const int failed = keep_other_states(args, target)) return failed;

  // Wider keys in parts, whose outputs add up.
  for (int64_t first = 0; first < in.key_width; first += kChunkMaxWidth) {
    const int64_t left = in.key_width - first;
    const auto part = [&](ChunkTensor x) {
      if (x.data != nullptr) x.data = static_cast<const char*>(x.data) + first * element_size(static_cast<DType>(in.dtype));
      x.width = static_cast<int32_t>(left < kChunkMaxWidth ? left : kChunkMaxWidth);
      return x;
    };
    ChunkScan one = scan;
    one.x = part(scan.x);
    one.y = part(scan.y);
    if (one.initial.state != nullptr) one.initial.state += first * in.value_width;
    if (one.last.state != nullptr) one.last.state += first * in.value_width;
    one.accumulate = first > 0;
    const int failed = chunk_scan(one, target, ws);
    if (failed != cudaSuccess) return failed;
  }
  return cudaSuccess;
}

}  // namespace leanfleet::causal_linear_decay
