// chunk_scan on the host: how tokens and columns are cut, and the launches.
#include "core/chunk_scan.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "core/chunk_scan_hopper.cuh"
#include "core/cuda_target.h"
#include "core/op.h"

namespace leanfleet {

namespace chunk {

extern template int launch_typed<float>(const ChunkScan&, int, int, int, void*);
extern template int launch_typed<__half>(const ChunkScan&, int, int, int, void*);
extern template int launch_typed<__nv_bfloat16>(const ChunkScan&, int, int, int, void*);
extern template int launch_hopper<__half>(const ChunkScan&, const ChunkMaps&, int, bool, int, void*);
extern template int launch_hopper<__nv_bfloat16>(const ChunkScan&, const ChunkMaps&, int, bool, int, void*);

namespace {

constexpr int64_t kMinSegmentTokens = 512;  // fewer are not worth a second pass
constexpr int64_t kSegmentUnit = 64;        // tokens of the longest chunk
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

// The sums that every request begins with, so that `last` may take the buffers of `initial`: [requests,heads] of [V][K],
// then [K], then [V].
__global__ void __launch_bounds__(kCombineThreads)
    ChunkSnapshotKernel(const __grid_constant__ ChunkScan scan, float* states, float* y_sums, float* z_sums) {
  const int64_t K = scan.y.width, V = scan.z.width, heads = scan.heads / scan.x_group;
  const int64_t request = blockIdx.y / heads, head = blockIdx.y % heads;
  const int64_t row = scan.state_index != nullptr ? scan.state_index[request] : request;
  const bool there = scan.state_index == nullptr || (row >= 0 && row < scan.state_rows);
  const int64_t from = row * heads + head, to = blockIdx.y;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < K * V + K + V;
       i += static_cast<int64_t>(gridDim.x) * kCombineThreads) {
    if (i < K * V) {
      const int64_t k = scan.initial.k_stride == 1 ? i % K : i / V, v = scan.initial.k_stride == 1 ? i / K : i % V;
      states[to * K * V + v * K + k] =
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

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// A map of a tensor as [batch][head][token][column] for boxes of 64 tokens by 64 columns. False: the driver has no such
// function or refuses.
bool encode_map(CUtensorMap* map, const ChunkTensor& x, int64_t heads, int64_t batch, int64_t tokens, int32_t dtype) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return false;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(x.width), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(x.token) * 2, static_cast<cuuint64_t>(x.head) * 2,
                               static_cast<cuuint64_t>(x.batch) * 2};
  const cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type = dtype == static_cast<int32_t>(DType::kFloat16) ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 4, const_cast<void*>(x.data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_maps(ChunkMaps* maps, const ChunkScan& scan, const ChunkTensor& out) {
  const int64_t y_heads = static_cast<int64_t>(scan.heads / scan.x_group) * scan.y_group;
  const auto encode = [&](CUtensorMap* map, const ChunkTensor& x, int64_t heads) {
    return encode_map(map, x, heads, scan.batch, scan.tokens, scan.dtype);
  };
  return encode(&maps->x, scan.x, scan.heads) && encode(&maps->y, scan.y, y_heads) && encode(&maps->z, scan.z, y_heads) &&
         encode(&maps->out, out, scan.heads) && (scan.row_dot == nullptr || encode(&maps->source, scan.source, scan.heads));
}

}  // namespace

}  // namespace chunk

int chunk_scan_slices(const ChunkScan& scan) {
  const int columns = scan.y.width <= 128 && scan.z.width <= 64 ? 64 : 128;
  return static_cast<int>(chunk::ceil_div(scan.z.width, columns));
}

void chunk_scan_plan(ChunkScan& scan, int sm_count) {
  scan.slices = chunk_scan_slices(scan);
  const int64_t units = scan.batch * scan.heads * scan.slices;
  int64_t segments = units > 0 ? sm_count / units : 1;
  if (segments > scan.tokens / chunk::kMinSegmentTokens) segments = scan.tokens / chunk::kMinSegmentTokens;
  if (segments < 1) segments = 1;
  scan.segment_tokens = chunk::ceil_div(chunk::ceil_div(scan.tokens, segments), chunk::kSegmentUnit) * chunk::kSegmentUnit;
  scan.segments = scan.tokens > 0 ? static_cast<int32_t>(chunk::ceil_div(scan.tokens, scan.segment_tokens)) : 1;
  const int64_t floats = static_cast<int64_t>(scan.y.width) * scan.z.width + scan.y.width + scan.z.width + 3;
  scan.slot_floats = static_cast<int32_t>(chunk::ceil_div(floats, 4) * 4);
}

int64_t chunk_scan_slots(const ChunkScan& scan) {
  return scan.batch * (scan.heads / scan.x_group) * (scan.causal ? scan.segments - 1 : scan.segments);
}

int chunk_scan(ChunkScan scan, const CudaTarget& target, Workspace& ws) {
  if (!scan.own_slots) chunk_scan_plan(scan, target.sm_count);
  const int64_t heads = scan.heads / scan.x_group, K = scan.y.width, V = scan.z.width;
  const int64_t slots = chunk_scan_slots(scan);
  if (!scan.own_slots) scan.slots = ws.scratch<float>(slots * scan.slot_floats);
  // Whether the buffers are the same is not known while the workspace is counted.
  const bool may_snapshot = scan.carried_in_place && (scan.segments > 1 || scan.x_group > 1 || scan.slices > 1);
  const int64_t entries = may_snapshot ? scan.requests * heads : 0;
  float* const states = ws.scratch<float>(entries * K * V);
  float* const y_sums = ws.scratch<float>(entries * K);
  float* const z_sums = ws.scratch<float>(entries * V);
  if (ws.counting() || scan.tokens == 0 || scan.batch == 0) return cudaSuccess;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  int max_shared_bytes = 0;
  cudaError_t error = cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error != cudaSuccess) return error;
  scan.last_index = scan.state_index;
  if (may_snapshot && scan.initial.state != nullptr && scan.initial.state == scan.last.state) {
    const dim3 grid(static_cast<unsigned>(chunk::ceil_div(K * V + K + V, 8 * chunk::kCombineThreads)),
                    static_cast<unsigned>(entries));
    chunk::ChunkSnapshotKernel<<<grid, chunk::kCombineThreads, 0, stream>>>(scan, states, y_sums, z_sums);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    scan.initial.state = states;
    scan.initial.k_stride = 1;
    scan.initial.v_stride = K;
    scan.initial.size = K * V;
    if (scan.initial.y_sum != nullptr) scan.initial.y_sum = y_sums;
    if (scan.initial.z_sum != nullptr) scan.initial.z_sum = z_sums;
    scan.state_index = nullptr;
  }
  const int64_t per_16_bytes = scan.dtype == static_cast<int32_t>(DType::kFloat32) ? 4 : 8;
  ChunkTensor out = scan.out_strides;
  out.data = scan.out;
  out.width = scan.z.width;
  bool aligned = chunk::aligned_rows(scan.x, per_16_bytes) && chunk::aligned_rows(scan.y, per_16_bytes) &&
                 chunk::aligned_rows(scan.z, per_16_bytes) && chunk::aligned_rows(out, per_16_bytes);
  if (scan.row_dot != nullptr) aligned = aligned && chunk::aligned_rows(scan.source, per_16_bytes);
  chunk::ChunkMaps maps = {};
  const bool hopper = aligned && per_16_bytes == 8 && scan.y.width <= chunk::kHopperMaxWidth && !scan.accumulate &&
                      chunk::runs_hopper_code(target.device) && chunk::encode_maps(&maps, scan, out);
  scan.combined = !hopper || !scan.causal || scan.own_slots || scan.segments - 1 > chunk::kMaxUncombined;
  const auto launch = [&](int pass) {
    if (hopper) {
      const auto typed = scan.dtype == static_cast<int32_t>(DType::kFloat16) ? chunk::launch_hopper<__half>
                                                                             : chunk::launch_hopper<__nv_bfloat16>;
      const bool overlap = pass == chunk::kOutputs && slots > 0 && !scan.combined;
      return typed(scan, maps, pass, overlap, max_shared_bytes, target.stream);
    }
    const auto typed = scan.dtype == static_cast<int32_t>(DType::kFloat32)   ? chunk::launch_typed<float>
                       : scan.dtype == static_cast<int32_t>(DType::kFloat16) ? chunk::launch_typed<__half>
                                                                             : chunk::launch_typed<__nv_bfloat16>;
    return typed(scan, pass, aligned, max_shared_bytes, target.stream);
  };
  if (slots > 0) {
    const int failed = launch(chunk::kSegmentSums);
    if (failed != cudaSuccess) return failed;
  }
  if (slots > 0 && scan.combined) {
    const dim3 grid(static_cast<unsigned>(chunk::ceil_div(K * V + K + V + 1, chunk::kCombineThreads)),
                    static_cast<unsigned>(scan.batch * heads));
    chunk::ChunkCombineKernel<<<grid, chunk::kCombineThreads, 0, stream>>>(scan);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return launch(chunk::kOutputs);
}

}  // namespace leanfleet
