// The merge of LeanAttention's cut units by a launch of its own. The last contributor of a unit reads all parts of it alone, one
// round of loads after the other: with many rows and parts that takes longer than the attention. Here all SMs share them.
//
// A CTA takes 128 columns of rows: of a unit of up to kWarps parts a row a warp, of others one row, of which each warp has every
// kWarps-th part.
#include <cuda_runtime.h>

#include "core/dependent_launch.cuh"
#include "lean_attention/device.cuh"

namespace leanfleet::lean_attention {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 128;
constexpr int kPerSm = 3, kMostCtas = kPerSm * 132;  // that an H200 runs at once

struct Shared {
  CutUnit units[kThreads];
  int first[kThreads];  // contributors
  int many[kWarps], few[kWarps];
  float max[kWarps], sum[kWarps];
  float4 output[kWarps][kColumns / 4];
};

// Parts of a row: their largest logit, the sum of their weights and 4 columns from d on, by lane.
struct Parts {
  float max, sum;
  float4 output;
};

__device__ __forceinline__ void add(float4& to, float by, const float4& x) {
  to.x += by * x.x, to.y += by * x.y, to.z += by * x.z, to.w += by * x.w;
}

// Parts `part`, `part` + kStep, ... of `row`, counted from the unit's first.
template <int kStep>
__device__ __forceinline__ Parts read_parts(const Args& args, int first, int count, int part, int row, int d) {
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32;
  const bool column = d < args.value_width;
  Parts all = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
  for (int base = part; base < count; base += 32 * kStep) {
    const auto row_of = [&](int i) {
      return static_cast<int64_t>(slot_of(first, base + i * kStep)) * args.plan.row_tile + row;
    };
    const int parts = min32((count - base + kStep - 1) / kStep, 32);
    float4 x[kAtOnce];
    const auto read = [&](int i0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i0 + i < parts && column)
          x[i] = __ldcg(reinterpret_cast<const float4*>(args.partial_output + row_of(i0 + i) * args.value_width + d));
      }
    };
    read(0);
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
    for (int i0 = 0;;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(all.output, __shfl_sync(kFullWarp, mine, (i0 + i) % 32), x[i]);
      i0 += kAtOnce;
      if (i0 >= parts) break;
      read(i0);
    }
  }
  return all;
}

// The parts of all warps.
__device__ __forceinline__ Parts join(const Shared& shared) {
  Parts all = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all.max = fmaxf(all.max, shared.max[w]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float by = rescale(shared.max[w], all.max);
    all.sum += by * shared.sum[w];
    add(all.output, by, shared.output[w][threadIdx.x % 32]);
  }
  return all;
}

// How many of the threads before this one, and of all, have `listed`. counts: for this alone.
struct Counted {
  int before, all;
};
__device__ __forceinline__ Counted count(bool listed, int (&counts)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned found = __ballot_sync(kFullWarp, listed);
  if (lane == 0) counts[warp] = __popc(found);
  __syncthreads();
  Counted counted = {__popc(found & ((1u << lane) - 1)), 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) counted.before += counts[w];
    counted.all += counts[w];
  }
  return counted;
}

template <class T>
struct Merge {
  const Args& args;
  const bool scales_far;
  Shared& shared;
  const int warp, lane;

  // Lists the units that kThreads ranges from `base` on begin, first those of many parts, and merges them.
  __device__ __forceinline__ void run(int base) const {
    const int range = base + threadIdx.x;
    CutUnit cut = {};
    if (range < args.plan.max_ranges) cut = args.cut_units[range];
    const bool is_many = cut.count > kWarps, is_few = cut.count > 0 && !is_many;
    const Counted many = count(is_many, shared.many), few = count(is_few, shared.few);
    const int place = is_many ? many.before : many.all + few.before;
    if (cut.count > 0) shared.units[place] = cut, shared.first[place] = range;
    __syncthreads();
    const int rows = min32(args.group * args.tokens, args.plan.row_tile), slices = ceil_div(args.value_width, kColumns);
    const int of_many = rows * slices, of_few = ceil_div(rows, kWarps) * slices;  // items of a unit
    const int all_of_many = many.all * of_many, items = all_of_many + few.all * of_few;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const bool by_all = item < all_of_many;
      const int i = by_all ? item : item - all_of_many, each = by_all ? of_many : of_few;
      const int of_list = i / each, of_unit = i - of_list * each, block = of_unit / slices;
      const int d = (of_unit - block * slices) * kColumns + 4 * lane;
      if (by_all) merge_row<true>(of_list, block, d);
      else merge_row<false>(many.all + of_list, block * kWarps + warp, d);
    }
    __syncthreads();  // the list has been read
  }

  // 4 columns a lane, from d on, of a row of a listed unit: by a warp or, kMany, by the CTA.
  template <bool kMany>
  __device__ __forceinline__ void merge_row(int listed, int row, int d) const {
    const CutUnit& cut = shared.units[listed];
    Unit unit = {};
    unit.index = cut.index;
    unit.head = cut.head;
    unit.row_tile = cut.row_tile;
    unit.request = request_of(args, cut.index);
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    if (rows.begin + row >= rows.end) return;  // all lanes, of kMany all threads
    Parts all = read_parts<kMany ? kWarps : 1>(args, shared.first[listed], cut.count, kMany ? warp : 0, row, d);
    if constexpr (kMany) {
      if (lane == 0) shared.max[warp] = all.max, shared.sum[warp] = all.sum;
      shared.output[warp][lane] = all.output;
      __syncthreads();
      all = join(shared);
      __syncthreads();
      if (warp != 0) return;
    }
    if (scales_far) all.max = logit_of(all.max, args.softcap > 0.0f ? kLog2E : fabsf(args.scale) * kLog2E);
    if (d < args.value_width) write_row<T>(args, unit, rows.begin + row, d, all.output, all.max, all.sum);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kPerSm) MergeKernel(const __grid_constant__ Args args, bool scales_far) {
  __shared__ Shared shared;
  let_next_launch_begin();
  wait_for_launch_before();
  const Merge<T> merge{args, scales_far, shared, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)};
#pragma unroll 1
  for (int base = 0; base < args.plan.max_ranges; base += kThreads) merge.run(base);
}

}  // namespace

int launch_merge(const Args& args, bool scales_far, bool early, void* stream) {
  const int64_t units = static_cast<int64_t>(args.batch) * args.kv_heads * num_row_tiles(args);
  const int64_t cut = units < args.plan.max_ranges ? units : args.plan.max_ranges;
  const int64_t items = cut * min32(args.group * args.tokens, args.plan.row_tile) * ceil_div(args.value_width, kColumns);
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  config.gridDim = dim3(static_cast<unsigned>(items < kMostCtas ? items : kMostCtas));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  if (early) allow_dependent_launch(config, &attribute);
  const auto kernel = args.dtype == static_cast<int>(DType::kFloat32)   ? MergeKernel<float>
                      : args.dtype == static_cast<int>(DType::kFloat16) ? MergeKernel<__half>
                                                                        : MergeKernel<__nv_bfloat16>;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, args, scales_far);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}

}  // namespace leanfleet::lean_attention
