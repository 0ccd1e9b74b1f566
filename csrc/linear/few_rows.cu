// Products of few rows, which take as long as the weight takes to come: each CTA of an SM streams a range of it (stream-K) into
// stages of shared memory, and two warpgroups multiply what has come, as weight^T input^T. A CTA that begins while the launch before
// it still runs has its first stages full when that one ends.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/barrier.cuh"
#include "core/dependent_launch.cuh"
#include "core/hopper.cuh"
#include "core/op.h"
#include "core/shared_memory.cuh"
#include "core/with_type.cuh"
#include "gated_activation/activated.cuh"
#include "linear/linear.h"
#include "linear_scan/tensor_map.cuh"

namespace leanfleet::linear {

namespace {

constexpr int kGroups = 2, kConsumers = 128 * kGroups, kThreads = kConsumers + 32;
constexpr int kBox = 64, kBoxBytes = kBox * kBox * 2;  // of the weight
static_assert(2 * kBoxBytes == kUnitBytes, "a unit is two boxes");

// kTiles: of 8 rows. A unit is, of 64 output columns, 128 of the depth, of which each warpgroup has one half; with a gate 64, and
// one warpgroup has the gate's columns, the other those of the values.
template <int kTiles_, bool kGated_>
struct Shape {
  static constexpr int kTiles = kTiles_, kRows = 8 * kTiles;
  static constexpr bool kGated = kGated_;
  static constexpr int kDepth = kGated ? kBox : 2 * kBox;
  static constexpr int kInputBytes = kRows * kBox * 2 * (kDepth / kBox), kStageBytes = kUnitBytes + kInputBytes;
  // So many that two CTAs do not fit into an SM. The next launch's CTA then begins when this one ends, and fills its stages while other
  // SMs finish and small launches run. Were it resident earlier, its stages would be full by then, and the memory would idle.
  static constexpr int kStages = 7;
  static constexpr int kPartials = kGated ? kConsumers : 128;  // threads with sums of a tile
  static constexpr int kExchangeBytes = kTiles * 128 * 16;
  static constexpr int kBytes = 1024 + kStages * (kStageBytes + 16) + kExchangeBytes;
  static_assert(kPartials <= kConsumers, "no other threads have any");
  static_assert(kBytes <= 227 * 1024 && 2 * (kBytes + 1024) > 228 * 1024, "an SM holds one");
};

struct Product {
  const void* bias;
  void* output;
  float4* partial;
  uint32_t* tickets;
  int rows, width, units_of_tile, units;
  bool constant_weight;
  Kind activation;
};

#if __CUDA_ARCH_FEAT_SM90_ALL
// The units of a CTA's range, of `units` in all.
__device__ __forceinline__ int range_begin(int units, int cta) {
  return static_cast<int>(static_cast<int64_t>(units) * cta / static_cast<int>(gridDim.x));
}
// The CTA in whose range a unit is.
__device__ __forceinline__ int cta_of(int units, int unit) {
  return static_cast<int>(((static_cast<int64_t>(unit) + 1) * static_cast<int>(gridDim.x) - 1) / units);
}

// Shared memory: stages, each the unit's two boxes and the input's columns for them; their barriers; what warpgroups exchange.
template <class S>
struct Memory {
  uint32_t stages, full, empty;
  float4* exchange;

  __device__ __forceinline__ Memory(char* raw) {
    const uint32_t start = tile::shared_address(raw);
    stages = (start + 1023) & ~1023u;
    full = stages + S::kStages * S::kStageBytes;
    empty = full + 8 * S::kStages;
    exchange = reinterpret_cast<float4*>(raw + (empty + 8 * S::kStages - start));
  }
  __device__ __forceinline__ uint32_t weight(int stage) const { return stages + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t input(int stage) const { return weight(stage) + kUnitBytes; }
};

// A thread that copies a range's units into stages.
template <class S>
__device__ __forceinline__ void copy_units(const Product& product, const CUtensorMap* weight, const CUtensorMap* input,
                                           const Memory<S>& memory, int begin, int end) {
  const auto copy_weight = [&](int unit, int stage) {
    const int of_tile = unit % product.units_of_tile, column = unit / product.units_of_tile * kBox, row = of_tile * S::kDepth;
    const uint32_t full = memory.full + 8 * stage, to = memory.weight(stage);
    tile::mbarrier_arrive_expect_tx(full, S::kStageBytes);
    hopper::tma_load_rows(to, weight, column, row, full, hopper::kEvictFirst);
    hopper::tma_load_rows(to + kBoxBytes, weight, column + (S::kGated ? product.width : 0), row + (S::kGated ? 0 : kBox), full,
                          hopper::kEvictFirst);
  };
  const auto copy_input = [&](int unit, int stage) {
    const int column = unit % product.units_of_tile * S::kDepth;
#pragma unroll
    for (int i = 0; i < S::kDepth / kBox; ++i)
      hopper::tma_load_rows(memory.input(stage) + i * S::kRows * kBox * 2, input, column + i * kBox, 0, memory.full + 8 * stage,
                            hopper::kEvictLast);
  };
  hopper::prefetch_map(weight);
  hopper::prefetch_map(input);
  if (!product.constant_weight) wait_for_launch_before();
  const int first = end - begin < S::kStages ? end - begin : S::kStages;
  for (int i = 0; i < first; ++i) copy_weight(begin + i, i);
  wait_for_launch_before();
  for (int i = 0; i < first; ++i) copy_input(begin + i, i);
  int stage = 0;
  uint32_t parity = 0;
  for (int unit = begin + first; unit < end; ++unit) {
    tile::mbarrier_wait(memory.empty + 8 * stage, parity);
    copy_weight(unit, stage);
    copy_input(unit, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&c)[kTiles][4]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[t][i] = 0.0f;
}

// The second warpgroup's sums for the first one's: take(its sum, the other's).
template <int kTiles, class Take>
__device__ __forceinline__ void take_from_second(float (&c)[kTiles][4], int group, float4* exchange, Take&& take) {
  const int thread = threadIdx.x % 128;
  if (group == 1) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) exchange[t * 128 + thread] = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
  }
  tile::named_barrier(1, kConsumers);
  if (group == 0) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float4 other = exchange[t * 128 + thread];
      take(c[t][0], other.x), take(c[t][1], other.y), take(c[t][2], other.z), take(c[t][3], other.w);
    }
  }
  tile::named_barrier(1, kConsumers);
}

// Sums of a tile as a thread holds them: c[t][i] is of row 8 t + 2 (lane % 4) + i % 2 and column 16 (warp % 4) + lane / 4 + 8 (i / 2).
template <class T, class S>
__device__ __forceinline__ void write_tile(const Product& product, float (&c)[S::kTiles][4], int tile_index, int group,
                                           float4* exchange) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int column = tile_index * kBox + warp * 16 + lane / 4;
  const auto* const bias = static_cast<const T*>(product.bias);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (bias == nullptr || column + 8 * j >= product.width) continue;
    const float add = static_cast<float>(bias[column + 8 * j + (S::kGated ? group * product.width : 0)]);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) c[t][2 * j] += add, c[t][2 * j + 1] += add;
  }
  if constexpr (S::kGated) {
    take_from_second(c, group, exchange,
                     [&](float& gate, float value) { gate = gated_activation::activated(product.activation, gate) * value; });
    if (group == 1) return;
  }
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * t + lane % 4 * 2 + i % 2, at = column + i / 2 * 8;
      if (row < product.rows && at < product.width)
        static_cast<T*>(product.output)[static_cast<int64_t>(row) * product.width + at] = static_cast<T>(c[t][i]);
    }
}

// Adds up, in their order, the sums of a tile that several ranges share. False: others are to come, the last of which does it.
template <class S>
__device__ __forceinline__ bool add_parts(const Product& product, float (&c)[S::kTiles][4], int tile_index) {
  constexpr int kTogether = 4;  // parts asked for at once
  const int begin = tile_index * product.units_of_tile, end = begin + product.units_of_tile;
  // A range has sums of at most two tiles to share: of the one in which it begins, and of the one in which it ends.
  const auto part_of = [&](int cta) {
    const int slot = 2 * cta + (range_begin(product.units, cta) < begin ? 1 : 0);
    return product.partial + static_cast<int64_t>(slot) * (S::kTiles * S::kPartials) + threadIdx.x;
  };
  float4* const own = part_of(blockIdx.x);
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) own[t * S::kPartials] = make_float4(c[t][0], c[t][1], c[t][2], c[t][3]);
  const int first = cta_of(product.units, begin), last = cta_of(product.units, end - 1);
  const auto others = static_cast<uint32_t>(last - first);
  uint32_t before = 0;
  tile::named_barrier(2, S::kPartials);
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"  // to 0 behind the last
                 : "=r"(before)
                 : "l"(product.tickets + tile_index), "r"(others)
                 : "memory");
  if (!tile::named_barrier_any(2, S::kPartials, threadIdx.x == 0 && before == others)) return false;
  clear(c);
  for (int cta = first; cta <= last; cta += kTogether) {
    float4 parts[kTogether][S::kTiles];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
        parts[j][t] = cta + j <= last ? __ldcg(part_of(cta + j) + t * S::kPartials) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        const float4 part = parts[j][t];
        c[t][0] += part.x, c[t][1] += part.y, c[t][2] += part.z, c[t][3] += part.w;
      }
  }
  return true;
}

// Products of `count` units of one tile.
template <class T, class S>
__device__ __forceinline__ void add_units(const Memory<S>& memory, float (&c)[S::kTiles][4], int count, int group, int& stage,
                                          uint32_t& parity) {
  clear(c);
  // A warp's: others of its warpgroup may still multiply.
  const auto release = [&](int used) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) tile::mbarrier_arrive(memory.empty + 8 * used);
  };
  int before = -1;  // the stage whose products may still read it
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    tile::mbarrier_wait(memory.full + 8 * stage, parity);
    const uint32_t a = hopper::make_smem_descriptor(memory.weight(stage) + group * kBoxBytes, kBoxBytes);
    const uint32_t b = hopper::make_smem_descriptor(memory.input(stage) + (S::kGated ? 0 : group * S::kRows * kBox * 2), 0);
    hopper::fence_accumulators(c);
    hopper::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBox / 16; ++k) hopper::wgmma_ss<true>(T{}, c, a + 16 * kBox * 2 / 16 * k, b + 32 / 16 * k, 1);
    hopper::warpgroup_commit();
    hopper::fence_accumulators(c);
    if (before >= 0) {
      hopper::warpgroup_wait<1>();
      release(before);
    }
    before = stage;
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  hopper::warpgroup_wait<0>();
  hopper::fence_accumulators(c);
  release(before);
}

template <class T, class S>
__device__ __forceinline__ void multiply_units(const Product& product, const Memory<S>& memory, int begin, int end) {
  const int group = threadIdx.x / 128;
  float c[S::kTiles][4];
  int stage = 0;
  uint32_t parity = 0;
  for (int unit = begin; unit < end;) {
    const int tile_index = unit / product.units_of_tile, tile_end = (tile_index + 1) * product.units_of_tile;
    const int count = (end < tile_end ? end : tile_end) - unit;
    add_units<T, S>(memory, c, count, group, stage, parity);
    unit += count;
    if constexpr (!S::kGated) {  // the halves of the depth
      take_from_second(c, group, memory.exchange, [](float& sum, float other) { sum += other; });
      if (group == 1) continue;
    }
    if (count < product.units_of_tile && !add_parts<S>(product, c, tile_index)) continue;
    write_tile<T, S>(product, c, tile_index, group, memory.exchange);
  }
}
#endif

template <class T, int kTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const __grid_constant__ Product product, const __grid_constant__ CUtensorMap weight,
                  const __grid_constant__ CUtensorMap input) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<kTiles, kGated>;
  extern __shared__ char raw[];
  const Memory<S> memory(raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      tile::mbarrier_init(memory.full + 8 * s, 1);
      tile::mbarrier_init(memory.empty + 8 * s, kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_launch_begin();
  const int begin = range_begin(product.units, blockIdx.x), end = range_begin(product.units, blockIdx.x + 1);
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) copy_units<S>(product, &weight, &input, memory, begin, end);
    return;
  }
  wait_for_launch_before();
  multiply_units<T, S>(product, memory, begin, end);
#endif
}

template <class T, int kTiles, bool kGated>
cudaError_t launch_shape(const Args& args, const FewRows& plan, const Product& product, cudaStream_t stream) {
  using S = Shape<kTiles, kGated>;
  constexpr auto kKernel = FewRowsKernel<T, kTiles, kGated>;
  CUtensorMap weight, input;
  const auto dtype = static_cast<DType>(args.dtype);
  if (!encode_matrix(&weight, args.weight, args.depth, args.columns, kBox, dtype) ||
      !encode_matrix(&input, args.input, args.rows, args.depth, S::kRows, dtype))
    return cudaErrorNotSupported;
  const cudaError_t allowed = allow_shared_memory(kKernel);
  if (allowed != cudaSuccess) return allowed;
  return launch_dependently_with<kKernel>(S::kBytes, dim3(static_cast<unsigned>(plan.ctas)), kThreads, stream, product, weight,
                                          input);
}

template <class T, bool kGated>
cudaError_t launch_rows(const Args& args, const FewRows& plan, const Product& product, cudaStream_t stream) {
  return plan.rows == 8 ? launch_shape<T, 1, kGated>(args, plan, product, stream)
                        : launch_shape<T, 2, kGated>(args, plan, product, stream);
}

template <class T>
cudaError_t launch_type(const Args& args, const FewRows& plan, const Product& product, cudaStream_t stream) {
  return args.gated ? launch_rows<T, true>(args, plan, product, stream) : launch_rows<T, false>(args, plan, product, stream);
}

}  // namespace

bool runs_few_rows() { return may_launch_dependently<FewRowsKernel<__half, 1, false>>(); }

int launch_few_rows(const Args& args, const FewRows& plan, void* partial, uint32_t* tickets, void* stream) {
  Product product = {};
  product.bias = args.bias;
  product.output = args.output;
  product.partial = static_cast<float4*>(partial);
  product.tickets = tickets;
  product.rows = static_cast<int>(args.rows);
  product.width = static_cast<int>(args.width);
  product.units_of_tile = plan.units_of_tile;
  product.units = plan.units_of_tile * plan.tiles;
  product.constant_weight = args.constant_weight;
  product.activation = args.activation;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return args.dtype == static_cast<int32_t>(DType::kFloat16) ? launch_type<__half>(args, plan, product, cuda_stream)
                                                             : launch_type<__nv_bfloat16>(args, plan, product, cuda_stream);
}

}  // namespace leanfleet::linear
