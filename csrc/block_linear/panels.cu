// More than a few rows of the input in 16-bit types, and weights of int8 or int4 in blocks of a multiple of 32 columns. A CTA
// multiplies a tile of rows by a panel of outputs on tensor cores. Its warps read weights as they lie in memory, and make what
// mma.sync takes of them in registers; they share the input, which stands in shared memory. Where there are too few tiles to
// keep the GPU busy, CTAs share a tile's columns, and another kernel adds up their sums in the order of the columns.
#include <algorithm>
#include <atomic>

#include "block_linear/device.cuh"
#include "core/integers.h"

namespace leanfleet::block_linear {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLane = 32;          // columns of a line of weights that a lane reads together, of one block
constexpr int kGroup = 4 * kLane;  // the columns that a warp reads together: four lanes have a line
constexpr int kRing = 3;           // stages of the input in shared memory
constexpr int kStageBytes = 16 << 10;

// a b + c of pairs.
__device__ __forceinline__ uint32_t multiply_add(__half, uint32_t a, uint32_t b, uint32_t c) {
  const auto pair = [](const uint32_t& bits) { return *reinterpret_cast<const __half2*>(&bits); };
  const __half2 sum = __hfma2(pair(a), pair(b), pair(c));
  return *reinterpret_cast<const uint32_t*>(&sum);
}
__device__ __forceinline__ uint32_t multiply_add(__nv_bfloat16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// How int4 become T: the bits of 2^k in a pair, of which a nibble is the lowest bits of the mantissa; then exactly
// (number * kUnit + kOffset), which is int4 / kRange. In halves a scale is multiplied by kRange, so that it is about the largest
// weight of its block, and does not lose bits where that one does not.
template <class T>
struct Nibbles;
template <>
struct Nibbles<__half> {
  static constexpr uint32_t kBits = 0x64006400;  // 1024
  static constexpr float kUnit = 0.125f, kOffset = -1032.0f / 8, kRange = 8.0f;
};
template <>
struct Nibbles<__nv_bfloat16> {
  static constexpr uint32_t kBits = 0x43004300;  // 128
  static constexpr float kUnit = 1.0f, kOffset = -136.0f, kRange = 1.0f;
};

// A lane's columns of a line of weights, with the bits of their scale and shift.
template <bool kInt4>
struct Columns {
  uint32_t words[kInt4 ? 4 : 8];
};

// Weights times a scale plus a shift as pairs of T: columns 8 i .. 8 i + 7 of a lane. int8 in float32, rounded once; int4 of a
// rounded scale and shift.
template <class T, bool kInt4>
struct Decoder {
  float scale, shift;
  uint32_t scales, shifts;

  __device__ __forceinline__ Decoder(float of_scale, float of_shift) : scale(of_scale), shift(of_shift) {
    scales = tile::pack_pair(T{}, scale * Nibbles<T>::kRange, scale * Nibbles<T>::kRange);
    shifts = tile::pack_pair(T{}, shift, shift);
  }
  __device__ __forceinline__ void eight(const Columns<kInt4>& columns, int i, uint32_t (&pairs)[4]) const {
    if constexpr (kInt4) {
      using N = Nibbles<T>;
      const uint32_t low = columns.words[i], high = low >> 4;
      const uint32_t unit = tile::pack_pair(T{}, N::kUnit, N::kUnit), offset = tile::pack_pair(T{}, N::kOffset, N::kOffset);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t nibbles = (__byte_perm(low, high, 0x4400u + 0x1111u * j) & 0x000f000fu) | N::kBits;
        pairs[j] = multiply_add(T{}, multiply_add(T{}, nibbles, unit, offset), scales, shifts);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float w[4];
        four_columns<Piece::kInt8>(columns.words, 2 * i + j, false, w);
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = fmaf(scale, w[k], shift);
        pairs[2 * j] = tile::pack_pair(T{}, w[0], w[1]);
        pairs[2 * j + 1] = tile::pack_pair(T{}, w[2], w[3]);
      }
    }
  }
};

// Two outputs next to each other of a row, and of the row 8 below it: what a lane has of a product.
template <class T>
__device__ __forceinline__ void write_sums(const Args& args, int64_t row, int64_t output, bool paired, const float (&sums)[4]) {
  if (output >= args.outputs) return;
  const bool both = output + 1 < args.outputs;
  float bias[2] = {};
  if (args.bias != nullptr) {
    const T* const from = static_cast<const T*>(args.bias) + output;
    bias[0] = to_float(from[0]);
    if (both) bias[1] = to_float(from[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + 8 * i >= args.rows) continue;
    T* const to = static_cast<T*>(args.output) + (row + 8 * i) * args.outputs + output;
    const float low = sums[2 * i] + bias[0], high = sums[2 * i + 1] + bias[1];
    if (paired) {
      *reinterpret_cast<uint32_t*>(to) = tile::pack_pair(T{}, low, high);
    } else {
      to[0] = static_cast<T>(low);
      if (both) to[1] = static_cast<T>(high);
    }
  }
}

// What is the same for all CTAs of a launch.
struct Launch {
  unsigned inverse;  // 2^32 over the lanes that share a block, rounded up; 0 where a lane has its own
  bool paired;       // two outputs next to each other may be written together
};

// Where chunk c of 16 bytes of a row stands among the 16 of its group: of a row and the next one, those that four lanes read
// together, 64 bytes apart, come to all banks, and so do eight that are written together.
__device__ __forceinline__ int place_of(int row, int chunk) { return chunk ^ (chunk >> 3 & 1) ^ (row & 1) << 1; }

template <class T, bool kInt4, int kRowTiles, int kOutTiles>
__global__ void __launch_bounds__(kThreads, 2)
    BlockPanelsKernel(const __grid_constant__ Args args, const __grid_constant__ Launch launch) {
  constexpr int kRows = 16 * kRowTiles, kOutputs = 8 * kOutTiles * kWarps;
  constexpr int kGroups = kStageBytes / (kRows * kGroup * 2);        // of a stage
  constexpr int kDepth = kRowTiles == 4 || !kInt4 ? 2 : 3;           // groups whose weights are on their way
  constexpr int kPieces = kInt4 ? 1 : 2;                             // of 16 bytes, a lane's of a line
  constexpr int kTurns = kStageBytes / 16 / kThreads;                // of a thread that fills a stage
  __shared__ __align__(128) unsigned char stages[kRing][kStageBytes];
  const Panels& panels = args.panels;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quarter = lane % 4;
  const unsigned row_tile = blockIdx.x % panels.row_tiles, rest = blockIdx.x / panels.row_tiles;
  const unsigned part = rest % panels.split, panel = rest / panels.split;
  const int64_t row = static_cast<int64_t>(row_tile) * kRows;
  const int64_t output = static_cast<int64_t>(panel) * kOutputs + warp * (8 * kOutTiles);  // the warp's first
  const int width = static_cast<int>(args.width), all_groups = ceil_div(width, kGroup);
  const int first = static_cast<int>(part) * panels.groups;
  const int count = all_groups - first < panels.groups ? all_groups - first : panels.groups;
  let_next_kernel_begin();

  // Lines behind the last output are that of the last one, and are not written. Columns behind the width are those before it,
  // times an input of 0.
  const int64_t origin = output < args.outputs ? output : args.outputs - 1;
  uint32_t lines[kOutTiles];
#pragma unroll
  for (int n = 0; n < kOutTiles; ++n) {
    const int64_t own = output + 8 * n + line;
    lines[n] = static_cast<uint32_t>((own < args.outputs ? own : args.outputs - 1) - origin);
  }
  const auto units = static_cast<uint32_t>(width / kLane), blocks = static_cast<uint32_t>(args.blocks);
  const uint4* const weights = static_cast<const uint4*>(args.weight) + origin * units * kPieces;
  const bool shifted = args.shift != nullptr;
  const Factors scales(args.scale, args.scale_dtype, origin * args.blocks);
  const Factors shifts(shifted ? args.shift : args.scale, shifted ? args.shift_dtype : args.scale_dtype,
                       origin * args.blocks);  // without shifts the scales stand in for them
  Columns<kInt4> ahead[kDepth][kOutTiles];
  uint32_t of_scales[kDepth][kOutTiles], of_shifts[kDepth][kOutTiles];
  const auto load = [&](int d, int group) {
    const auto wanted = static_cast<uint32_t>((first + group) * 4 + quarter), unit = wanted < units ? wanted : units - 1;
    const uint32_t block = launch.inverse == 0 ? unit : __umulhi(unit, launch.inverse);
    uint32_t at[kOutTiles];
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      at[n] = lines[n] * blocks + block;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint32_t* const to = ahead[d][n].words + 4 * i;
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(weights + (static_cast<uint64_t>(lines[n]) * units + unit) * kPieces + i));
      }
    }
    scales.load(at, of_scales[d]);
    shifts.load(at, of_shifts[d]);
  };

  // A thread brings the same chunk of every 16th row of a stage, group by group.
  static_assert(kTurns == kRowTiles * kGroups);
  const int chunk = threadIdx.x % 16, own_row = threadIdx.x / 16;
  const int rows = static_cast<int>(args.rows - row < kRows ? args.rows - row : kRows);
  const T* const input = static_cast<const T*>(args.input) + row * args.width;
  const uint32_t held = tile::shared_address(stages), own = held + own_row * 256 + place_of(own_row, chunk) * 16;
  const auto fill = [&](int stage) {
    const uint32_t to = own + stage % kRing * kStageBytes;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int r = own_row + turn % kRowTiles * 16, group = stage * kGroups + turn / kRowTiles;
      const int column = (first + group) * kGroup + 8 * chunk;
      const bool there = r < rows && group < count && column < width;
      tile::cp_async(to + turn * (16 * 256), input + (there ? r * width + column : 0), there ? 16 : 0);
    }
    tile::cp_async_commit();
  };

  float sums[kRowTiles][kOutTiles][4] = {};
  const auto multiply = [&](int d, uint32_t from) {
#pragma unroll
    for (int i = 0; i < kLane / 8; ++i) {
      uint32_t b[kOutTiles][4];
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        const float added = shifted ? float_of(of_shifts[d][n], args.shift_dtype) : 0.0f;
        const Decoder<T, kInt4> decoder(float_of(of_scales[d][n], args.scale_dtype), added);
        decoder.eight(ahead[d][n], i, b[n]);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        // Rows m 16 + line and the one 8 below it stand alike, as both are even or odd.
        const uint32_t at = from + (16 * m + line) * 256 + place_of(line, 4 * quarter + i) * 16;
        const uint4 upper = tile::load_16_bytes(at), lower = tile::load_16_bytes(at + 8 * 256);
        const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) tile::mma(T{}, sums[m][n], a[j], b[n][2 * j], b[n][2 * j + 1]);
      }
    }
  };

#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    if (d < count) load(d, d);
  wait_for_kernel_before();  // which may round the input
#pragma unroll
  for (int stage = 0; stage < kRing - 1; ++stage) fill(stage);
  for (int base = 0; base < count; base += kDepth) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int group = base + d;
      if (group >= count) break;
      if (group % kGroups == 0) {
        tile::cp_async_wait_but<kRing - 2>();
        __syncthreads();  // the stage is there, and the one before it has been read
        fill(group / kGroups + kRing - 1);
      }
      multiply(d, held + group / kGroups % kRing * kStageBytes + group % kGroups * (kRows * 256));
      if (group + kDepth < count) load(d, group + kDepth);
    }
  }
  tile::cp_async_wait();

  const int64_t slot = (static_cast<int64_t>(panel) * panels.row_tiles + row_tile) * panels.split + part;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      if (panels.split == 1) {
        write_sums<T>(args, row + 16 * m + line, output + 8 * n + 2 * quarter, launch.paired, sums[m][n]);
      } else {
        const float(&x)[4] = sums[m][n];
        const int64_t fragment = slot * (kRowTiles * kOutTiles) + m * kOutTiles + n;
        static_cast<float4*>(args.partial)[fragment * kThreads + threadIdx.x] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
}

// Adds up what the parts of a tile's columns came to. A CTA has a fragment of each thread of the CTAs that left them.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SumPanelsKernel(const __grid_constant__ Args args, const __grid_constant__ Launch launch) {
  const Panels& panels = args.panels;
  const unsigned fragments = panels.row_fragments * panels.output_fragments;
  const unsigned fragment = blockIdx.x % fragments, tile = blockIdx.x / fragments;
  const unsigned row_tile = tile % panels.row_tiles, panel = tile / panels.row_tiles;
  const unsigned m = fragment / panels.output_fragments, n = fragment % panels.output_fragments;
  wait_for_kernel_before();
  const float4* from = static_cast<const float4*>(args.partial) +
                       (static_cast<int64_t>(tile) * panels.split * fragments + fragment) * kThreads + threadIdx.x;
  float sums[4] = {};
#pragma unroll 8
  for (int part = 0; part < panels.split; ++part, from += fragments * kThreads) {
    const float4 x = __ldcg(from);
    sums[0] += x.x, sums[1] += x.y, sums[2] += x.z, sums[3] += x.w;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = (static_cast<int64_t>(row_tile) * panels.row_fragments + m) * 16 + lane / 4;
  const int64_t output = ((static_cast<int64_t>(panel) * kWarps + warp) * panels.output_fragments + n) * 8 + lane % 4 * 2;
  write_sums<T>(args, row, output, launch.paired, sums);
}

// Whether kernels may begin before those in front of them have ended: those compiled for GPUs that can wait for them.
template <class T>
cudaError_t overlaps(bool* result) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // by device; 0: not asked yet
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::atomic<int>& version = known[device % kDevices];
  if (version.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, SumPanelsKernel<T>);
    if (error != cudaSuccess) return error;
    version.store(attributes.ptxVersion, std::memory_order_relaxed);
  }
  *result = version.load(std::memory_order_relaxed) >= 90;
  return cudaSuccess;
}

using Kernel = void (*)(Args, Launch);

template <class T, bool kInt4>
Kernel kernel_of(const Panels& panels) {
  if (panels.row_fragments == 1 && panels.output_fragments == 1) return BlockPanelsKernel<T, kInt4, 1, 1>;
  if (panels.row_fragments == 1) return BlockPanelsKernel<T, kInt4, 1, 2>;
  return panels.row_fragments == 2 ? BlockPanelsKernel<T, kInt4, 2, 2> : BlockPanelsKernel<T, kInt4, 4, 2>;
}

cudaError_t launch_one(Kernel kernel, int64_t ctas, bool early, const Args& args, const Launch& launch, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, args, launch);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}

template <class T>
int launch_type(const Args& args, bool follows, cudaStream_t stream) {
  const Panels& panels = args.panels;
  Launch launch = {0, args.outputs % 2 == 0 && aligned(args.output, 4)};
  if (const int64_t lanes = args.block / kLane; lanes > 1)
    launch.inverse = static_cast<unsigned>(ceil_div(int64_t{1} << 32, lanes));
  bool early = false;
  cudaError_t error = overlaps<T>(&early);
  const Kernel kernel = args.form == Form::kInt4 ? kernel_of<T, true>(panels) : kernel_of<T, false>(panels);
  const int64_t tiles = static_cast<int64_t>(panels.row_tiles) * panels.panels;
  if (error == cudaSuccess) error = launch_one(kernel, tiles * panels.split, early && follows, args, launch, stream);
  if (error != cudaSuccess || panels.split == 1) return error;
  return launch_one(SumPanelsKernel<T>, tiles * panels.row_fragments * panels.output_fragments, early, args, launch, stream);
}

}  // namespace

bool takes_panels(const Args& args) {
  if (args.dtype == 0 || (args.form != Form::kInt8 && args.form != Form::kInt4)) return false;
  if (args.block % kLane != 0 || !aligned(args.weight, 16) || (!args.round_input && !aligned(args.input, 16))) return false;
  return args.width < int64_t{1} << 24 && args.width / kLane * (args.block / kLane) < int64_t{1} << 32;  // as `inverse` needs
}

Panels plan_panels(const Args& args, int sms) {
  constexpr int kCtasOfSm = 2, kPanel = 8 * kWarps;
  Panels panels = {};
  panels.row_fragments = args.rows <= 16 ? 1 : args.rows <= 32 ? 2 : 4;
  panels.output_fragments = panels.row_fragments == 1 && args.outputs < int64_t{kCtasOfSm} * kPanel * sms ? 1 : 2;
  panels.row_tiles = static_cast<int32_t>(ceil_div(args.rows, int64_t{16} * panels.row_fragments));
  panels.panels = static_cast<int32_t>(ceil_div(args.outputs, int64_t{kPanel} * panels.output_fragments));
  const int64_t tiles = static_cast<int64_t>(panels.row_tiles) * panels.panels, groups = ceil_div(args.width, int64_t{kGroup});
  // A part has enough columns to be worth its sums, which are written and read.
  const int64_t least = panels.row_fragments == 4 ? 4 : 2, most = std::max<int64_t>(groups / least, 1);
  const int64_t split = clamp(int64_t{kCtasOfSm} * sms / tiles, int64_t{1}, most);
  panels.groups = static_cast<int32_t>(ceil_div(groups, split));
  panels.split = static_cast<int32_t>(ceil_div(groups, int64_t{panels.groups}));
  panels.partial = panels.split == 1 ? 0
                                     : tiles * panels.split * panels.row_fragments * panels.output_fragments * kThreads *
                                           static_cast<int64_t>(sizeof(float4));
  return panels;
}

int launch_panels(const Args& args, bool follows, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.dtype == 1) return launch_type<__half>(args, follows, cuda_stream);
  return launch_type<__nv_bfloat16>(args, follows, cuda_stream);
}

}  // namespace leanfleet::block_linear
