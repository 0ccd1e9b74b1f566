// chunk_scan on the host: how tokens and columns are cut, and the launches.
#include "linear_scan/chunk_scan.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "core/cuda_target.h"
#include "core/op.h"
#include "linear_scan/chunk_scan_hopper.cuh"
#include "linear_scan/chunk_scan_hopper_float32.cuh"
#include "linear_scan/row_sums.h"
#include "linear_scan/tensor_map.cuh"

namespace leanfleet {

namespace chunk {

namespace {

constexpr int64_t kMinSegmentTokens = 512;   // fewer are not worth a second pass
constexpr int64_t kMaxRank1Together = 1024;  // tokens of a segment
constexpr int64_t kSegmentUnit = 64;         // tokens of the longest chunk
constexpr int kCombineThreads = 256;

// Slots of a head in scan order: from each segment's own sums to the sums before the next segment or, when not causal,
// to those of all segments in slot 0.
__global__ void __launch_bounds__(kCombineThreads) ChunkCombineKernel(const __grid_constant__ ChunkScan scan) {
  const int64_t K = scan.y.width, V = scan.z.width, sums = K * V + K + V + 1;
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  const int count = scan.causal ? scan.segments - 1 : scan.segments;
  float* const slots = scan.slots + static_cast<int64_t>(blockIdx.y) * count * scan.slot_floats;
  if (element >= sums) return;
  float running = 0.0f;
#pragma unroll 4
  for (int s = 0; s < count; ++s) {
    float* const slot = slots + s * scan.slot_floats;
    const float own = slot[element];
    if (!scan.causal) {
      running += own;
      continue;
    }
    // A sum that nothing came before may stand beside what was never written.
    running = slot[sums + 1] != 0.0f ? own : own + exp2f(slot[sums]) * running;
    slot[element] = running;
  }
  if (!scan.causal) slots[element] = running;
}

// The sums that every request begins with, so that `last` may take the buffers of `initial`: [requests,heads] of [K][V], as
// `initial` itself has them, then [K], then [V].
__global__ void __launch_bounds__(kCombineThreads)
    ChunkSnapshotKernel(const __grid_constant__ ChunkScan scan, float* states, float* y_sums, float* z_sums) {
  const unsigned K = scan.y.width, V = scan.z.width, heads = scan.heads / scan.x_group;
  const unsigned request = blockIdx.y / heads, head = blockIdx.y % heads;
  // Nobody reads what a request without tokens begins with.
  if (scan.cu_seqlens != nullptr && scan.cu_seqlens[request] >= scan.cu_seqlens[request + 1]) return;
  const int64_t row = scan.state_index != nullptr ? scan.state_index[request] : request;
  const bool there = scan.state_index == nullptr || (row >= 0 && row < scan.state_rows);
  const int64_t from = row * heads + head, to = blockIdx.y;
  for (unsigned i = blockIdx.x * kCombineThreads + threadIdx.x; i < K * V + K + V; i += gridDim.x * kCombineThreads) {
    if (i < K * V) {
      const int64_t k = i / V, v = i % V;
      states[to * K * V + i] =
          there ? scan.initial.state[from * scan.initial.size + k * scan.initial.k_stride + v * scan.initial.v_stride] : 0.0f;
    } else if (i < K * V + K) {
      if (scan.initial.y_sum != nullptr) y_sums[to * K + i - K * V] = there ? scan.initial.y_sum[from * K + i - K * V] : 0.0f;
    } else if (scan.initial.z_sum != nullptr) {
      z_sums[to * V + i - K * V - K] = there ? scan.initial.z_sum[from * V + i - K * V - K] : 0.0f;
    }
  }
}

bool aligned_rows(const ChunkTensor& x, int64_t per_16_bytes) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.batch % per_16_bytes == 0 && x.head % per_16_bytes == 0 &&
         x.token % per_16_bytes == 0 && x.width % per_16_bytes == 0;
}

// Whether the code loaded on a device is that of Hopper: newer devices without code of their own run an older one's.
bool runs_hopper_code(int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not known, else the version, such as 80
  int version = known[device % kDevices].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, ChunkCombineKernel) != cudaSuccess) return false;
    version = attributes.ptxVersion;
    known[device % kDevices].store(version, std::memory_order_relaxed);
  }
  return version == 90;
}

bool encode_maps(ChunkMaps* maps, const ChunkScan& scan, const ChunkTensor& out) {
  const int64_t y_heads = static_cast<int64_t>(scan.heads / scan.x_group) * scan.y_group;
  const auto encode = [&](CUtensorMap* map, const ChunkTensor& x, int64_t heads) {
    return encode_rows(map, x.data, {x.batch, x.head, x.token}, x.width, scan.tokens, heads, scan.batch,
                       static_cast<DType>(scan.dtype));
  };
  return encode(&maps->x, scan.x, scan.heads / scan.x_share) && encode(&maps->y, scan.y, y_heads / scan.y_share) &&
         encode(&maps->z, scan.z, y_heads / scan.z_share) && encode(&maps->out, out, scan.heads) &&
         (scan.row_dot == nullptr || encode(&maps->source, scan.source, scan.heads / scan.source_share));
}

// Whether keys are too wide for Hopper's kernel, but not halves of them, whose outputs add up: in T, so that halves that cancel
// lose what T has not, and in float16 must not overflow. Row sums are then found beforehand. Divided by a row sum that is small
// because its halves cancel, what is lost is large: the first token's output, which is its value, would be off by per cents.
bool in_halves(const ChunkScan& scan, const CudaTarget& target) {
  return scan.y.width > kChunkPartWidth && scan.dtype != static_cast<int32_t>(DType::kFloat32) &&
         (!scan.row_sums || row_sums_fit(scan)) && !scan.own_slots && runs_hopper_code(target.device);
}

// The scan over columns first .. first + width - 1 of the keys, which adds to the scans over those before.
ChunkScan part_of(const ChunkScan& scan, int first, int width) {
  ChunkScan part = scan;
  for (ChunkTensor* t : {&part.x, &part.y}) {
    if (t->data != nullptr) t->data = static_cast<const char*>(t->data) + 2 * static_cast<int64_t>(first);
    t->width = t->width - first < width ? t->width - first : width;
  }
  for (ChunkFactor* f : {&part.x_rank1, &part.y_rank1})
    if (f->data != nullptr) f->data += (1 + first / width) * scan.rank1_parts;
  for (ChunkState* s : {&part.initial, &part.last})
    if (s->state != nullptr) s->state += first * s->k_stride;
  if (first > 0) {
    part.accumulate = part.add_dots = true;
    part.rank1 = scan.rank1_parts != 0;
    part.initial.z_sum = part.last.z_sum = nullptr;
    part.initial.count = nullptr;
  }
  return part;
}

}  // namespace

}  // namespace chunk

int chunk_scan_slices(const ChunkScan& scan) {
  const int columns = scan.y.width <= 128 && scan.z.width <= 64 ? 64 : 128;
  return static_cast<int>(ceil_div(scan.z.width, columns));
}

int64_t chunk_scan_slots(const ChunkScan& scan) {
  return scan.batch * (scan.heads / scan.x_group) * (scan.causal ? scan.segments - 1 : scan.segments);
}

namespace chunk {

namespace {

void plan(ChunkScan& scan, int count, int sm_count) {
  scan.slices = chunk_scan_slices(scan);
  const int64_t units = scan.batch * scan.heads * scan.slices * count;
  int64_t segments = units > 0 ? sm_count / units : 1;
  if (segments > scan.tokens / kMinSegmentTokens) segments = scan.tokens / kMinSegmentTokens;
  if (segments < 1) segments = 1;
  scan.segment_tokens = ceil_div(ceil_div(scan.tokens, segments), kSegmentUnit) * kSegmentUnit;
  scan.segments = scan.tokens > 0 ? static_cast<int32_t>(ceil_div(scan.tokens, scan.segment_tokens)) : 1;
  const int64_t floats = static_cast<int64_t>(scan.y.width) * scan.z.width + scan.y.width + scan.z.width + 3;
  scan.slot_floats = static_cast<int32_t>(ceil_div(floats, 4) * 4);
}

bool joins_others(const ChunkScan& scan) {
  return scan.dtype != static_cast<int32_t>(DType::kFloat32) && scan.y.width <= kChunkPartWidth && !scan.accumulate;
}

// How many of the scans from `scans` on one launch runs, alignment permitting.
int together(const ChunkScan* scans, int count, const CudaTarget& target) {
  if (count == 1 || !joins_others(scans[0]) || !runs_hopper_code(target.device)) return 1;
  // With terms of rank 1 a launch of several is slower but for the pass over segments that it saves.
  if (scans[0].rank1) {
    ChunkScan alone = scans[0];
    plan(alone, 1, target.sm_count);
    if (alone.segments == 1 || alone.segment_tokens > kMaxRank1Together) return 1;
  }
  int run = 1;
  while (run < count && run < kMaxTogether && joins_others(scans[run]) && go_together(scans[0], scans[run])) ++run;
  return run;
}

struct Snapshot {
  float *states, *y_sums, *z_sums;  // null: not needed
};

cudaError_t take_snapshot(ChunkScan& scan, const Snapshot& to, cudaStream_t stream) {
  const int64_t K = scan.y.width, V = scan.z.width, entries = scan.requests * (scan.heads / scan.x_group);
  const dim3 grid(static_cast<unsigned>(ceil_div(K * V + K + V, 8 * kCombineThreads)), static_cast<unsigned>(entries));
  ChunkSnapshotKernel<<<grid, kCombineThreads, 0, stream>>>(scan, to.states, to.y_sums, to.z_sums);
  scan.initial.state = to.states;
  scan.initial.k_stride = V;
  scan.initial.v_stride = 1;
  scan.initial.size = K * V;
  if (scan.initial.y_sum != nullptr) scan.initial.y_sum = to.y_sums;
  if (scan.initial.z_sum != nullptr) scan.initial.z_sum = to.z_sums;
  scan.state_index = nullptr;
  return cudaGetLastError();
}

// Stands here, not in the header: a file that has the launches of one width would compile the kernels of the other too.
int launch_hopper_float32(const ChunkScan& scan, int pass, void* stream) {
  const bool narrow = scan.z.width <= 64;
  if (scan.y.width > 64)
    return narrow ? launch_hopper_float32_shape<128, 1>(scan, pass, stream)
                  : launch_hopper_float32_shape<128, 2>(scan, pass, stream);
  return narrow ? launch_hopper_float32_shape<64, 1>(scan, pass, stream)
                : launch_hopper_float32_shape<64, 2>(scan, pass, stream);
}

// The passes of a group, of which maps[i] are set if `hopper`.
int launch_passes(const ChunkGroup& group, bool hopper, bool hopper_code, bool aligned, int max_shared_bytes, void* stream) {
  const ChunkScan& first = group.scans[0];
  const bool half = first.dtype == static_cast<int32_t>(DType::kFloat16);
  const int64_t slots = chunk_scan_slots(first);
  const auto launch = [&](int pass) -> int {
    if (hopper) {
      const auto typed = half ? launch_hopper<__half> : launch_hopper<__nv_bfloat16>;
      return typed(group, pass, pass == kOutputs && slots > 0 && !first.combined, max_shared_bytes, stream);
    }
    const bool single = first.dtype == static_cast<int32_t>(DType::kFloat32);
    const auto typed = single ? launch_typed<float> : half ? launch_typed<__half> : launch_typed<__nv_bfloat16>;
    for (int i = 0; i < group.count; ++i) {
      const ChunkScan& scan = group.scans[i];
      const int failed = single && hopper_code && aligned && scan.y.width <= kChunkPartWidth
                             ? launch_hopper_float32(scan, pass, stream)
                             : typed(scan, pass, aligned, max_shared_bytes, stream);
      if (failed != cudaSuccess) return failed;
    }
    return cudaSuccess;
  };
  if (slots > 0) {
    const int failed = launch(kSegmentSums);
    if (failed != cudaSuccess) return failed;
  }
  for (int i = 0; i < group.count && slots > 0 && first.combined; ++i) {
    const ChunkScan& scan = group.scans[i];
    const int64_t K = scan.y.width, V = scan.z.width;
    const dim3 grid(static_cast<unsigned>(ceil_div(K * V + K + V + 1, kCombineThreads)),
                    static_cast<unsigned>(scan.batch * (scan.heads / scan.x_group)));
    ChunkCombineKernel<<<grid, kCombineThreads, 0, static_cast<cudaStream_t>(stream)>>>(scan);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return launch(kOutputs);
}

// Scans that go together.
int run_group(ChunkGroup& group, const CudaTarget& target, Workspace& ws) {
  Snapshot snapshots[kMaxTogether] = {};
  for (int i = 0; i < group.count; ++i) {
    ChunkScan& scan = group.scans[i];
    if (!scan.own_slots) {
      plan(scan, group.count, target.sm_count);
      scan.slots = ws.scratch<float>(chunk_scan_slots(scan) * scan.slot_floats);
    }
    // Whether the buffers are the same is not known while the workspace is counted.
    const int64_t K = scan.y.width, V = scan.z.width, heads = scan.heads / scan.x_group;
    if (!scan.carried_in_place || (scan.segments == 1 && scan.x_group == 1 && scan.slices == 1)) continue;
    snapshots[i] = {ws.scratch<float>(scan.requests * heads * K * V), ws.scratch<float>(scan.requests * heads * K),
                    ws.scratch<float>(scan.requests * heads * V)};
  }
  if (ws.counting() || group.scans[0].tokens == 0 || group.scans[0].batch == 0) return cudaSuccess;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  int max_shared_bytes = 0;
  cudaError_t error = cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error != cudaSuccess) return error;
  const int64_t per_16_bytes = group.scans[0].dtype == static_cast<int32_t>(DType::kFloat32) ? 4 : 8;
  const bool hopper_code = runs_hopper_code(target.device);
  bool aligned = true, hopper = per_16_bytes == 8 && hopper_code;
  for (int i = 0; i < group.count; ++i) {
    ChunkScan& scan = group.scans[i];
    scan.last_index = scan.state_index;
    if (snapshots[i].states != nullptr && scan.initial.state != nullptr && scan.initial.state == scan.last.state) {
      error = take_snapshot(scan, snapshots[i], stream);
      if (error != cudaSuccess) return error;
    }
    ChunkTensor out = scan.out_strides;
    out.data = scan.out;
    out.width = scan.z.width;
    aligned = aligned && aligned_rows(scan.x, per_16_bytes) && aligned_rows(scan.y, per_16_bytes) &&
              aligned_rows(scan.z, per_16_bytes) && aligned_rows(out, per_16_bytes);
    if (scan.row_dot != nullptr) aligned = aligned && aligned_rows(scan.source, per_16_bytes);
    hopper = hopper && aligned && scan.y.width <= kChunkPartWidth && encode_maps(&group.maps[i], scan, out);
  }
  const ChunkScan& first = group.scans[0];
  const bool combined = !hopper || !first.causal || first.own_slots || first.segments - 1 > kMaxUncombined;
  for (int i = 0; i < group.count; ++i) group.scans[i].combined = combined;
  return launch_passes(group, hopper, hopper_code, aligned, max_shared_bytes, target.stream);
}

}  // namespace

}  // namespace chunk

bool chunk_scans_join(const ChunkScan& one, const ChunkScan& other, const CudaTarget& target) {
  return chunk::joins_others(one) && chunk::joins_others(other) && chunk::runs_hopper_code(target.device) &&
         chunk::go_together(one, other);
}

void chunk_scan_plan(ChunkScan& scan, int sm_count) { chunk::plan(scan, 1, sm_count); }

int chunk_scans(const ChunkScan* scans, int count, const CudaTarget& target, Workspace& ws) {
  for (int i = 0; i < count;) {
    if (chunk::in_halves(scans[i], target)) {
      ChunkScan whole = scans[i];
      if (whole.row_sums)
        if (const int failed = take_row_sums(whole, target, ws)) return failed;
      for (int first = 0; first < whole.y.width; first += kChunkPartWidth) {
        const ChunkScan part = chunk::part_of(whole, first, kChunkPartWidth);
        if (const int failed = chunk_scans(&part, 1, target, ws)) return failed;
      }
      ++i;
      continue;
    }
    chunk::ChunkGroup group = {};
    group.count = chunk::together(scans + i, count - i, target);
    group.sm_count = target.sm_count;
    for (int j = 0; j < group.count; ++j) group.scans[j] = scans[i + j];
    const int failed = chunk::run_group(group, target, ws);
    if (failed != cudaSuccess) return failed;
    i += group.count;
  }
  return cudaSuccess;
}

int chunk_scan(const ChunkScan& scan, const CudaTarget& target, Workspace& ws) { return chunk_scans(&scan, 1, target, ws); }

}  // namespace leanfleet
