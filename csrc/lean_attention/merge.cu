// The merge of LeanAttention's cut units by a launch of its own. The last contributor of a unit reads all parts of it alone, one
// round of loads after the other: with many rows and parts that takes longer than the attention. Here all SMs share them.
//
// A CTA takes 128 columns of a row at once; each of its warps has every kWarps-th part.
#include <cuda_runtime.h>

#include "lean_attention/device.cuh"

namespace leanfleet::lean_attention {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 128;
constexpr int kMostCtas = 8 * 132;  // that an H200 runs at once

struct Shared {
  CutUnit units[kThreads];
  int first[kThreads];  // contributors
  int counts[kWarps];
  float max[kWarps], sum[kWarps];
  float4 output[kWarps][kColumns / 4];
};

// The parts of a warp: their largest logit, the sum of their weights and 4 columns from d on, by lane.
struct Parts {
  float max, sum;
  float4 output;
};

// Parts `first_part`, `first_part` + kWarps, ... of `row`, counted from the unit's first.
__device__ __forceinline__ Parts read_parts(const Args& args, int first, int count, int first_part, int row, int d) {
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32;
  const bool column = d < args.value_width;
  Parts all = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
  for (int base = first_part; base < count; base += 32 * kWarps) {
    const auto row_of = [&](int i) {
      return static_cast<int64_t>(slot_of(first, base + i * kWarps)) * args.plan.row_tile + row;
    };
    const int parts = min32((count - base + kWarps - 1) / kWarps, 32);
    float max = -INFINITY, sum = 0.0f;
    if (lane < parts) {
      max = __ldcg(args.partial_max + row_of(lane));
      sum = __ldcg(args.partial_sum + row_of(lane));
    }
    float top = fmaxf(max, all.max);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    const float old = rescale(all.max, top), mine = rescale(max, top);
    all = {top, all.sum * old + warp_sum(mine * sum),
           make_float4(all.output.x * old, all.output.y * old, all.output.z * old, all.output.w * old)};
#pragma unroll 1
    for (int i0 = 0; i0 < parts; i0 += kAtOnce) {
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i0 + i < parts && column)
          part[i] = __ldcg(reinterpret_cast<const float4*>(args.partial_output + row_of(i0 + i) * args.value_width + d));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float by = __shfl_sync(kFullWarp, mine, (i0 + i) % 32);
        all.output.x += by * part[i].x, all.output.y += by * part[i].y;
        all.output.z += by * part[i].z, all.output.w += by * part[i].w;
      }
    }
  }
  return all;
}

// kColumns columns of a row of a cut unit, by a CTA.
template <class T>
__device__ __forceinline__ void merge_row(const Args& args, const CutUnit& cut, int first, int row, int column, bool scales_far,
                                          Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = column + 4 * lane;
  Unit unit = {};
  unit.index = cut.index;
  unit.head = cut.head;
  unit.row_tile = cut.row_tile;
  unit.request = request_of(args, cut.index);
  const Span rows = unit_rows(args, unit.request, unit.row_tile);
  if (rows.begin + row >= rows.end) return;  // all threads
  const Parts own = read_parts(args, first, cut.count, warp, row, d);
  if (lane == 0) shared.max[warp] = own.max, shared.sum[warp] = own.sum;
  shared.output[warp][lane] = own.output;
  __syncthreads();
  if (warp == 0) {
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.max[w]);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float by = rescale(shared.max[w], top);
      const float4 x = shared.output[w][lane];
      sum += by * shared.sum[w];
      o.x += by * x.x, o.y += by * x.y, o.z += by * x.z, o.w += by * x.w;
    }
    if (scales_far && args.softcap == 0.0f) top = logit_of(top, fabsf(args.scale) * kLog2E);
    if (scales_far && args.softcap > 0.0f) top = logit_of(top, kLog2E);
    if (d < args.value_width) write_row<T>(args, unit, rows.begin + row, d, o, top, sum);
  }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ Args args, bool scales_far) {
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int rows = min32(args.group * args.tokens, args.plan.row_tile);
  const int slices = (args.value_width + kColumns - 1) / kColumns, items = rows * slices;  // of a unit
#pragma unroll 1
  for (int base = 0; base < args.plan.max_ranges; base += kThreads) {
    const int range = base + threadIdx.x;
    CutUnit cut = {};
    if (range < args.plan.max_ranges) cut = args.cut_units[range];
    const unsigned found = __ballot_sync(kFullWarp, cut.count > 0);
    if (lane == 0) shared.counts[warp] = __popc(found);
    __syncthreads();
    int units = 0, place = __popc(found & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += shared.counts[w];
      units += shared.counts[w];
    }
    if (cut.count > 0) shared.units[place] = cut, shared.first[place] = range;
    __syncthreads();
#pragma unroll 1
    for (int item = blockIdx.x; item < units * items; item += gridDim.x) {
      const int of_list = item / items, of_unit = item - of_list * items, row = of_unit / slices;
      merge_row<T>(args, shared.units[of_list], shared.first[of_list], row, (of_unit - row * slices) * kColumns, scales_far,
                   shared);
    }
    __syncthreads();  // the list has been read
  }
}

}  // namespace

int launch_merge(const Args& args, bool scales_far, bool early, void* stream) {
  const int64_t units = static_cast<int64_t>(args.batch) * args.kv_heads * num_row_tiles(args);
  const int64_t cut = units < args.plan.max_ranges ? units : args.plan.max_ranges;
  const int64_t items =
      cut * min32(args.group * args.tokens, args.plan.row_tile) * ((args.value_width + kColumns - 1) / kColumns);
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(items < kMostCtas ? items : kMostCtas));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const auto kernel = args.dtype == static_cast<int>(DType::kFloat32)   ? MergeKernel<float>
                      : args.dtype == static_cast<int>(DType::kFloat16) ? MergeKernel<__half>
                                                                        : MergeKernel<__nv_bfloat16>;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, args, scales_far);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}

}  // namespace leanfleet::lean_attention
