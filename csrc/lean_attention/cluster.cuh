// The merge of a unit by the CTAs of one cluster (sm_90): a contributor sends its part into the shared memory of the CTAs
// that merge it, instead of leaving it in global memory for the last to arrive. CTAs of a cluster run at the same time: here
// one may wait for another.
#pragma once

#include <atomic>

#include "lean_attention/device.cuh"

namespace leanfleet::lean_attention {

constexpr int kMaxCluster = 16;

// What the contributors send for this CTA's share of a unit: 4 columns of a row each, and the row's statistics. A unit of a
// cluster is a CTA's only segment, so that an inbox serves once a launch.
struct ClusterInbox {
  float4* parts;  // [items], then max and sum [items][2]
  int items;
  uint32_t barrier;  // with one arrival
};
constexpr int kInboxItemBytes = 24;
constexpr int inbox_items(int rows, int width) { return rows * width / 4 + kMaxCluster; }

#if __CUDA_ARCH__ >= 900
// CTAs of a cluster. Every thread arrives once its CTA's barriers are initialised, of which the fence after the inits
// tells the cluster; who writes into another CTA's shared memory waits first for all of them.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t address_in_cta(uint32_t address, int cta) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}

// Stores that add their bytes to what the barrier, in the same CTA as `to`, has received.
__device__ __forceinline__ void send(uint32_t to, float4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float x, float y, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to), "f"(x), "f"(y),
               "r"(barrier)
               : "memory");
}

// Waits for the first phase of a barrier with one arrival, this one's, and `bytes` that other CTAs send.
__device__ __forceinline__ void receive(uint32_t barrier, uint32_t bytes, bool arrives) {
  if (arrives)
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
                 : "memory");
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  } while (!done);
}

// Each of a unit's contributors merges a share of the rows' chunks of 4 columns.
struct ClusterShare {
  int row_chunks, chunks;  // of a row, of the unit
  int size;                // chunks of one CTA, but for the last
  int first_row;
  int index, count;  // of the contributors
};
__device__ __forceinline__ ClusterShare cluster_share(int width, Span rows, const Segment& segment) {
  const int row_chunks = width / 4, chunks = (rows.end - rows.begin) * row_chunks;
  return {row_chunks, chunks,        small_quotient(chunks + segment.count - 1, segment.count),
          rows.begin, segment.index, segment.count};
}

// first_cta: the cluster's CTA that has the first part. row: of the unit.
__device__ __forceinline__ void send_part(const ClusterInbox& inbox, const ClusterShare& share, int first_cta, int row, int d,
                                          float4 o, float row_max, float row_sum) {
  const int chunk = row * share.row_chunks + d / 4, owner = small_quotient(chunk, share.size);
  const int item = (chunk - owner * share.size) * share.count + share.index;
  const uint32_t there = address_in_cta(shared_address(inbox.parts), first_cta + owner);
  const uint32_t barrier = address_in_cta(inbox.barrier, first_cta + owner);
  send(there + item * 16, o, barrier);
  send(there + inbox.items * 16 + item * 8, row_max, row_sum, barrier);
}

// By `warps` warps. Lanes next to each other have the parts of a chunk, in the order of their ranges.
template <class T>
__device__ __forceinline__ void merge_in_cluster(const Args& args, const Unit& unit, const ClusterInbox& inbox,
                                                 const ClusterShare& share, int warp, int warps) {
  const int lane = threadIdx.x % 32, count = share.count, first = share.index * share.size;
  const int mine = clamp(share.chunks - first, 0, share.size);
  receive(inbox.barrier, mine * count * kInboxItemBytes, warp == 0 && lane == 0);
  const int lanes_log2 = 32 - __clz(count - 1), lanes = 1 << lanes_log2;
  const int at_once = 32 >> lanes_log2, part = lane & (lanes - 1);
  const float2* const statistics = reinterpret_cast<const float2*>(inbox.parts + inbox.items);
#pragma unroll 1
  for (int base = warp * at_once; base < mine; base += warps * at_once) {
    const int chunk = base + (lane >> lanes_log2);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 mine_of_row = make_float2(-INFINITY, 0.0f);
    if (chunk < mine && part < count) {
      o = inbox.parts[chunk * count + part];
      mine_of_row = statistics[chunk * count + part];
    }
    float top = mine_of_row.x;
#pragma unroll 1
    for (int offset = lanes / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    const float factor = rescale(mine_of_row.x, top);
    float total = factor * mine_of_row.y;
    o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
#pragma unroll 1
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(kFullWarp, total, offset);
      o.x += __shfl_xor_sync(kFullWarp, o.x, offset);
      o.y += __shfl_xor_sync(kFullWarp, o.y, offset);
      o.z += __shfl_xor_sync(kFullWarp, o.z, offset);
      o.w += __shfl_xor_sync(kFullWarp, o.w, offset);
    }
    if (part == 0 && chunk < mine) {
      const int row = small_quotient(first + chunk, share.row_chunks), d = (first + chunk - row * share.row_chunks) * 4;
      write_row<T>(args, unit, share.first_row + row, d, o, top, total);
    }
  }
}
#endif

constexpr int kShortRange = 20;  // key tiles, measured

// How many clusters of a launch run at the same time, the same for all kernels of a Tag: one CTA of theirs fills a
// SM.
template <class Tag>
int clusters_at_once(const void* kernel, const cudaLaunchConfig_t& config) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];  // 1 more than the number
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  std::atomic<int>& of_size = known[device % kDevices][config.attrs->val.clusterDim.x];
  int clusters = of_size.load(std::memory_order_relaxed) - 1;
  if (clusters >= 0) return clusters;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  of_size.store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

// CTAs of a cluster for a plan with equal_parts, which then has as many; 1: clusters are not worth it. Sets the launch's grid
// and its attribute, of which config points to one. fewer: a part of the SMs will do if ranges are short.
template <class Tag>
int choose_cluster(const void* kernel, Plan& plan, const Args& args, bool fewer, cudaLaunchConfig_t& config) {
  config.attrs->id = cudaLaunchAttributeClusterDimension;
  config.attrs->val.clusterDim.y = config.attrs->val.clusterDim.z = 1;
  // Where it is refused, clusters of more than 8 do not fit.
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) cudaGetLastError();
  // CTAs of a cluster need SMs next to each other: of clusters that do not all fit at once, the last would
  // run after the others.
  const auto fits = [&](int parts) {
    config.attrs->val.clusterDim.x = parts;
    config.gridDim.x = plan.max_ranges * parts;
    config.numAttrs = 1;
    return parts > 1 && parts <= kMaxCluster && clusters_at_once<Tag>(kernel, config) >= args.batch * args.kv_heads;
  };
  int parts = plan.equal_parts;
  if (!fits(parts)) {
    // Where a range is short anyway, a merge in a cluster is worth more than all SMs are.
    parts = parts > 8 ? 8 : parts > 4 ? 4 : 2;
    if (plan.equal_parts > kMaxCluster || !fewer || args.capacity > kShortRange * parts * plan.key_tile || !fits(parts))
      parts = 1;
  }
  config.numAttrs = parts > 1;
  if (parts > 1) {
    plan.equal_parts = parts;
    plan.equal_halved = true;
    plan.max_ranges = min32(plan.max_ranges / parts, clusters_at_once<Tag>(kernel, config)) * parts;
  }
  config.gridDim.x = plan.max_ranges;
  return parts;
}

}  // namespace leanfleet::lean_attention
