// More than a few rows of the input in 16-bit types, and weights of int8 or int4 in blocks of a multiple of 32 columns. A CTA
// multiplies a tile of rows by a panel of outputs on tensor cores. A warp has 16 of the outputs. Its lanes copy weights as they
// lie in memory, and make of them in registers what mma.sync takes as its left side; the right side is the input, which the
// warps share. Where there are too few tiles to keep the GPU busy, CTAs share a tile's columns, and another kernel adds up their
// sums in the order of the columns.
#include <algorithm>
#include <atomic>

#include "block_linear/device.cuh"
#include "core/integers.h"
#include "core/shared_memory.cuh"

namespace leanfleet::block_linear {

namespace {

constexpr int kOutputs = 16;  // of a warp: in two lines of weights a lane
constexpr int kLines = kOutputs / 8;
constexpr int kLane = 32;                   // columns of a line of weights that a lane reads together, of one block
constexpr int kGroup = 4 * kLane;           // the columns that a warp reads together: four lanes have a line
constexpr int kMostShared = 96 << 10;       // which any GPU has
constexpr int kMostTallShared = 112 << 10;  // of tiles of 128 rows

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

// Two int4 of byte i of a word as a pair of T, exactly, divided by kRange: as the lowest bits of the mantissa of a power of two,
// which is subtracted. In halves a scale is multiplied by kRange, so that it is about the largest weight of its block, and does not
// lose bits where that one does not.
// `bits` and `unit` come with the launch: constants that the compiler knew it would move to registers for each use.
template <class T>
struct Nibbles;
template <>
struct Nibbles<__half> {
  static constexpr float kRange = 8.0f;
  static constexpr uint32_t kBits = 0x64646464, kUnit = 0x20003000;  // 1/8 and 1/128
  uint32_t bits, unit;

  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    const uint32_t sums = __byte_perm(word, bits, 0x4040u + 0x0101u * i) & 0xfff0ff0fu;  // 1024 + x, and 1024 + 16 x
    return multiply_add(__half{}, sums, unit, tile::pack_pair(__half{}, -129.0f, -9.0f));
  }
};
template <>
struct Nibbles<__nv_bfloat16> {
  static constexpr float kRange = 1.0f;
  static constexpr uint32_t kBits = 0x43004300, kUnit = 0x3f803f80;
  uint32_t bits, unit;

  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    const uint32_t sums = (__byte_perm(word, word >> 4, 0x4400u + 0x1111u * i) & 0x000f000fu) | bits;  // 128 + x
    return multiply_add(__nv_bfloat16{}, sums, unit, tile::pack_pair(__nv_bfloat16{}, -136.0f, -136.0f));
  }
};

// Weights of a lane and a line, times a scale plus a shift, as pairs of T. int8 in float32, rounded once; int4 of a rounded scale
// and shift.
template <class T, bool kInt4>
struct Decoder {
  uint32_t words[kInt4 ? 4 : 8];
  uint32_t scale, shift;  // int4: pairs; int8: floats

  __device__ __forceinline__ void set_factors(float of_scale, float of_shift) {
    constexpr float kRange = Nibbles<T>::kRange;
    scale = kInt4 ? tile::pack_pair(T{}, of_scale * kRange, of_scale * kRange) : __float_as_uint(of_scale);
    shift = kInt4 ? tile::pack_pair(T{}, of_shift, of_shift) : __float_as_uint(of_shift);
  }
  // Columns 8 i .. 8 i + 7.
  __device__ __forceinline__ void eight(const Nibbles<T>& nibbles, int i, uint32_t (&pairs)[4]) const {
    if constexpr (kInt4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = multiply_add(T{}, nibbles.pair(words[i], j), scale, shift);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float w[4];
        four_columns<Piece::kInt8>(words, 2 * i + j, false, w);
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = fmaf(__uint_as_float(scale), w[k], __uint_as_float(shift));
        pairs[2 * j] = tile::pack_pair(T{}, w[0], w[1]);
        pairs[2 * j + 1] = tile::pack_pair(T{}, w[2], w[3]);
      }
    }
  }
};

// Scales or shifts on their way to shared memory, four bytes at a time: of 16-bit ones all of the word that the tensor has up to
// the one that is wanted.
struct CopiedFactors {
  const char* from;  // a multiple of 4
  int32_t dtype;

  __device__ __forceinline__ void copy(uint32_t to, uint32_t i) const {
    const char* const word = from + uint64_t{dtype == 0 ? i : i / 2} * 4;
    tile::cp_async_4(to, word, dtype == 0 || i % 2 != 0 ? 4 : 2);
  }
  __device__ __forceinline__ float value(uint32_t word, uint32_t i) const {
    return float_of(dtype != 0 && i % 2 != 0 ? word >> 16 : word, dtype);
  }
};

// Writes a warp's product of 16 outputs and 8 rows from `output` and `row` on. The whole warp calls it.
template <class T>
__device__ __forceinline__ void write_sums(const Args& args, int64_t row, int64_t output, bool paired, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  __syncwarp();            // lanes may come from writing
  uint32_t pairs[kLines];  // a lane has two rows of an output, and then two outputs of a row
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int64_t own = output + 8 * i + lane / 4;
    const float bias = args.bias != nullptr && own < args.outputs ? to_float(static_cast<const T*>(args.bias)[own]) : 0.0f;
    pairs[i] = tile::transpose_matrix(tile::pack_pair(T{}, sums[2 * i] + bias, sums[2 * i + 1] + bias));
  }
  row += lane / 4;
  if (row >= args.rows) return;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int64_t first = output + 8 * i + lane % 4 * 2;
    T* const to = static_cast<T*>(args.output) + row * args.outputs + first;
    const float2 x = tile::unpack_pair(T{}, pairs[i]);
    if (paired) {
      if (first < args.outputs) *reinterpret_cast<uint32_t*>(to) = pairs[i];
    } else {
      if (first < args.outputs) to[0] = static_cast<T>(x.x);
      if (first + 1 < args.outputs) to[1] = static_cast<T>(x.y);
    }
  }
}

// What is the same for all CTAs of a launch.
struct Launch {
  uint32_t inverse;     // 2^32 over the lanes that share a block, rounded up; 0 where a lane has its own
  bool paired;          // two outputs next to each other may be written together
  uint32_t bits, unit;  // of Nibbles
};

// Where chunk c of 16 bytes of a row stands among the 16 of its group: of a row and the next one, those that four lanes read
// together, 64 bytes apart, come to all banks, and so do eight that are written together.
__device__ __forceinline__ int place_of(int row, int chunk) { return chunk ^ (chunk >> 3 & 1) ^ (row & 1) << 1; }

// What a CTA has of a group in shared memory: its rows of the input, 256 bytes each; and [warp][line] the pieces of 16 bytes of
// weights, [of a lane][lane], the words of scales and those of shifts.
template <bool kInt4, int kRowTiles, int kWarps>
struct Stage {
  static constexpr int kRows = 8 * kRowTiles, kPieces = kInt4 ? 1 : 2;  // a lane's of a line
  static constexpr int kFactors = 32 * 16 * kPieces, kLineBytes = kFactors + 2 * 32 * 4;
  static constexpr int kWeights = kRows * 256, kBytes = kWeights + kWarps * kLines * kLineBytes;
  static constexpr int kMost = (kRowTiles == 16 ? kMostTallShared : kMostShared) / kBytes, kRing = kMost < 6 ? kMost : 6;
  static_assert(kRing >= 2);
};

template <class T, bool kInt4, int kRowTiles, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kRowTiles == 16 ? 1 : 16 / kWarps)
    BlockPanelsKernel(const __grid_constant__ Args args, const __grid_constant__ Launch launch) {
  using S = Stage<kInt4, kRowTiles, kWarps>;
  extern __shared__ __align__(128) unsigned char stages[];
  const Panels& panels = args.panels;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quarter = lane % 4;
  const unsigned row_tile = blockIdx.x % panels.row_tiles, rest = blockIdx.x / panels.row_tiles;
  const unsigned part = rest % panels.split, panel = rest / panels.split;
  const int64_t row = static_cast<int64_t>(row_tile) * S::kRows;
  const int64_t output = (static_cast<int64_t>(panel) * kWarps + warp) * kOutputs;  // the warp's first
  const int width = static_cast<int>(args.width), all_groups = ceil_div(width, kGroup);
  const int first = static_cast<int>(part) * panels.groups;
  const int count = all_groups - first < panels.groups ? all_groups - first : panels.groups;
  let_next_kernel_begin();

  // Lines behind the last output are that of the last one, and are not written. Columns behind the width are those before it,
  // times an input of 0.
  const auto units = static_cast<uint32_t>(width / kLane);
  const uint4* weights[kLines];
  uint32_t factors[kLines];  // the first of a line
#pragma unroll
  for (int n = 0; n < kLines; ++n) {
    const int64_t own = output + 8 * n + line, real = own < args.outputs ? own : args.outputs - 1;
    weights[n] = static_cast<const uint4*>(args.weight) + real * units * S::kPieces;
    factors[n] = static_cast<uint32_t>(real * args.blocks);
  }
  const auto unit_of = [&](int group) {
    const auto wanted = static_cast<uint32_t>((first + group) * 4 + quarter);
    return wanted < units ? wanted : units - 1;
  };
  const auto block_of = [&](uint32_t unit) { return launch.inverse == 0 ? unit : __umulhi(unit, launch.inverse); };
  const bool shifted = args.shift != nullptr;
  const CopiedFactors scales = {static_cast<const char*>(args.scale), args.scale_dtype};
  const CopiedFactors shifts = {static_cast<const char*>(args.shift), args.shift_dtype};
  // `place`: of a stage, in bytes.
  const uint32_t held = tile::shared_address(stages);
  const uint32_t own_weights = held + S::kWeights + warp * (kLines * S::kLineBytes);
  const auto fill_weights = [&](int group, uint32_t place) {
    if (group >= count) return;
    const uint32_t unit = unit_of(group), block = block_of(unit);
#pragma unroll
    for (int n = 0; n < kLines; ++n) {
      const uint32_t to = own_weights + place + n * S::kLineBytes;
#pragma unroll
      for (int i = 0; i < S::kPieces; ++i) tile::cp_async(to + (i * 32 + lane) * 16, weights[n] + (unit * S::kPieces + i), 16);
      scales.copy(to + S::kFactors + lane * 4, factors[n] + block);
      if (shifted) shifts.copy(to + S::kFactors + 128 + lane * 4, factors[n] + block);
    }
  };
  // A thread brings the same chunk of every so many rows, an even number.
  constexpr int kTogether = 2 * kWarps;
  const int chunk = threadIdx.x % 16, own_row = threadIdx.x / 16;
  const int rows = static_cast<int>(args.rows - row < S::kRows ? args.rows - row : S::kRows);
  const T* const input = static_cast<const T*>(args.input) + row * args.width;
  const uint32_t own_chunk = held + own_row * 256 + place_of(own_row, chunk) * 16;
  const auto fill_input = [&](int group, uint32_t place) {
    if (group >= count) return;
    const int column = (first + group) * kGroup + 8 * chunk;
#pragma unroll
    for (int r = 0; r < S::kRows; r += kTogether) {
      const bool there = own_row + r < rows && column < width;
      tile::cp_async(own_chunk + place + r * 256, input + (there ? (own_row + r) * width + column : 0), there ? 16 : 0);
    }
  };

  const Nibbles<T> nibbles = {launch.bits, launch.unit};
  float sums[kRowTiles][4] = {};
  const auto multiply = [&](int group, uint32_t place) {
    Decoder<T, kInt4> decoders[kLines];
    const uint32_t block = block_of(unit_of(group));
    const bool in_width =
        static_cast<uint32_t>((first + group) * 4 + quarter) < units;  // else weights are 0, whatever stands there
#pragma unroll
    for (int n = 0; n < kLines; ++n) {
      const uint32_t from = own_weights + place + n * S::kLineBytes;
#pragma unroll
      for (int i = 0; i < S::kPieces; ++i) {
        const uint4 x = tile::load_16_bytes(from + (i * 32 + lane) * 16);
        uint32_t* const to = decoders[n].words + 4 * i;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      }
      const uint32_t factor = factors[n] + block;
      const float added = shifted ? shifts.value(tile::load_4_bytes(from + S::kFactors + 128 + lane * 4), factor) : 0.0f;
      const float scale = scales.value(tile::load_4_bytes(from + S::kFactors + lane * 4), factor);
      decoders[n].set_factors(in_width ? scale : 0.0f, in_width ? added : 0.0f);
    }
    // Columns in the order in which lanes have them: 8 of each of four lanes are two steps.
#pragma unroll
    for (int i = 0; i < kLane / 8; ++i) {
      uint32_t w[kLines][4];
#pragma unroll
      for (int n = 0; n < kLines; ++n) decoders[n].eight(nibbles, i, w[n]);
      const uint32_t a[2][4] = {{w[0][0], w[1][0], w[0][1], w[1][1]}, {w[0][2], w[1][2], w[0][3], w[1][3]}};
      const uint32_t from = held + place + line * 256 + place_of(line, 4 * quarter + i) * 16;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 x = tile::load_16_bytes(from + m * (8 * 256));
        tile::mma(T{}, sums[m], a[0], x.x, x.y);
        tile::mma(T{}, sums[m], a[1], x.z, x.w);
      }
    }
  };

#pragma unroll
  for (int group = 0; group < S::kRing - 1; ++group) fill_weights(group, group * S::kBytes);
  wait_for_kernel_before();  // which may round the input
#pragma unroll
  for (int group = 0; group < S::kRing - 1; ++group) {
    fill_input(group, group * S::kBytes);
    tile::cp_async_commit();  // the first of them with all weights so far
  }
  uint32_t place = 0, before = (S::kRing - 1) * S::kBytes;
  for (int group = 0; group < count; ++group) {
    tile::cp_async_wait_but<S::kRing - 2>();
    __syncthreads();  // the group is there, and the one before it has been read
    fill_weights(group + S::kRing - 1, before);
    fill_input(group + S::kRing - 1, before);
    tile::cp_async_commit();
    multiply(group, place);
    before = place;
    place = place + S::kBytes == S::kRing * S::kBytes ? 0 : place + S::kBytes;
  }

  const int64_t slot = (static_cast<int64_t>(panel) * panels.row_tiles + row_tile) * panels.split + part;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const float (&x)[4] = sums[m];
    if (panels.split == 1) write_sums<T>(args, row + 8 * m, output, launch.paired, x);
    else
      static_cast<float4*>(args.partial)[(slot * kRowTiles + m) * (32 * kWarps) + threadIdx.x] =
          make_float4(x[0], x[1], x[2], x[3]);
  }
}

// Adds up what the parts of a tile's columns came to. A warp has what a warp of each of them left of 8 rows.
constexpr int kSumThreads = 64;
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    SumPanelsKernel(const __grid_constant__ Args args, const __grid_constant__ Launch launch) {
  const Panels& panels = args.panels;
  const unsigned threads = 32 * panels.warps, all = panels.row_fragments * threads;  // of a part
  const unsigned ctas = all / kSumThreads, own = blockIdx.x % ctas * kSumThreads + threadIdx.x, tile = blockIdx.x / ctas;
  const unsigned row_tile = tile % panels.row_tiles, panel = tile / panels.row_tiles;
  wait_for_kernel_before();
  const float4* from = static_cast<const float4*>(args.partial) + static_cast<int64_t>(tile) * panels.split * all + own;
  float sums[4] = {};
#pragma unroll 8
  for (int part = 0; part < panels.split; ++part, from += all) {
    const float4 x = __ldcg(from);
    sums[0] += x.x, sums[1] += x.y, sums[2] += x.z, sums[3] += x.w;
  }
  const int64_t row = (static_cast<int64_t>(row_tile) * panels.row_fragments + own / threads) * 8;
  write_sums<T>(args, row, (static_cast<int64_t>(panel) * panels.warps + own % threads / 32) * kOutputs, launch.paired, sums);
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
struct Chosen {
  Kernel kernel;
  int shared, threads;  // bytes, and those of a CTA
};
template <class T, bool kInt4, int kRowTiles, int kWarps>
Chosen chosen() {
  using S = Stage<kInt4, kRowTiles, kWarps>;
  return {BlockPanelsKernel<T, kInt4, kRowTiles, kWarps>, S::kRing * S::kBytes, 32 * kWarps};
}

template <class T, bool kInt4>
Chosen choose(const Panels& panels) {
  switch (panels.row_fragments) {
    case 2: return panels.warps == 4 ? chosen<T, kInt4, 2, 4>() : chosen<T, kInt4, 2, 8>();
    case 4: return chosen<T, kInt4, 4, 8>();
    case 16: return chosen<T, kInt4, 16, 8>();
    default: return chosen<T, kInt4, 8, 8>();
  }
}

cudaError_t launch_one(const Chosen& chosen, int64_t ctas, bool early, const Args& args, const Launch& launch,
                       cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(chosen.threads));
  config.dynamicSmemBytes = static_cast<size_t>(chosen.shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, chosen.kernel, args, launch);
  if (launched != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return launched;
}

template <class T>
int launch_type(const Args& args, bool follows, cudaStream_t stream) {
  const Panels& panels = args.panels;
  Launch launch = {0, args.outputs % 2 == 0 && aligned(args.output, 4), Nibbles<T>::kBits, Nibbles<T>::kUnit};
  if (const int64_t lanes = args.block / kLane; lanes > 1)
    launch.inverse = static_cast<unsigned>(ceil_div(int64_t{1} << 32, lanes));
  bool early = false;
  cudaError_t error = overlaps<T>(&early);
  const Chosen kernel = args.form == Form::kInt4 ? choose<T, true>(panels) : choose<T, false>(panels);
  const int64_t tiles = static_cast<int64_t>(panels.row_tiles) * panels.panels;
  if (error == cudaSuccess) error = allow_shared_memory(kernel.kernel);
  if (error == cudaSuccess) error = launch_one(kernel, tiles * panels.split, early && follows, args, launch, stream);
  if (error != cudaSuccess || panels.split == 1) return error;
  return launch_one({SumPanelsKernel<T>, 0, kSumThreads}, tiles * panels.row_fragments * panels.warps * 32 / kSumThreads, early,
                    args, launch, stream);
}

}  // namespace

bool takes_panels(const Args& args) {
  if (args.dtype == 0 || (args.form != Form::kInt8 && args.form != Form::kInt4)) return false;
  if (args.block % kLane != 0 || !aligned(args.weight, 16) || (!args.round_input && !aligned(args.input, 16))) return false;
  if (!aligned(args.scale, 4) || !aligned(args.shift, 4) || args.outputs * args.blocks >= int64_t{1} << 32) return false;
  return args.width < int64_t{1} << 24 && args.width / kLane * (args.block / kLane) < int64_t{1} << 32;  // as `inverse` needs
}

namespace {

bool allows_tall_tiles() {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return error == cudaSuccess && most >= kMostTallShared;  // an error is what the launch comes to too
}

// Tiles of 128 rows where they keep the GPU busy for a while, and few of their rows are none.
int32_t row_fragments_of(const Args& args, int sms) {
  if (args.rows <= 32) return args.rows <= 16 ? 2 : 4;
  const int64_t tall = ceil_div(args.rows, int64_t{128}), panels = ceil_div(args.outputs, int64_t{8} * kOutputs);
  const bool busy = tall * panels >= int64_t{2} * sms, full = tall * 128 - round_up(args.rows, int64_t{64}) <= args.rows / 8;
  return busy && full && allows_tall_tiles() ? 16 : 8;
}

}  // namespace

Panels plan_panels(const Args& args, int sms, int64_t forced_split) {
  constexpr int kCtasOfSm = 2;
  constexpr int64_t kLeast = 2;  // groups of a part, to be worth its sums, which are written and read
  Panels panels = {};
  panels.row_fragments = row_fragments_of(args, sms);
  panels.warps = panels.row_fragments == 2 && args.outputs < int64_t{kCtasOfSm} * 8 * kOutputs * sms ? 4 : 8;
  panels.row_tiles = static_cast<int32_t>(ceil_div(args.rows, int64_t{8} * panels.row_fragments));
  panels.panels = static_cast<int32_t>(ceil_div(args.outputs, int64_t{kOutputs} * panels.warps));
  const int64_t tiles = static_cast<int64_t>(panels.row_tiles) * panels.panels, groups = ceil_div(args.width, int64_t{kGroup});
  const int64_t places = int64_t{kCtasOfSm} * 8 / panels.warps * sms;
  const bool busy = 4 * tiles >= 3 * sms && panels.row_fragments >= 8;  // sums of large tiles cost more than GPUs half full
  const int64_t chosen = busy ? 1 : clamp(places / tiles, int64_t{1}, std::max<int64_t>(groups / kLeast, 1));
  const int64_t split = forced_split > 0 ? std::min(forced_split, groups) : chosen;
  panels.groups = static_cast<int32_t>(ceil_div(groups, split));
  panels.split = static_cast<int32_t>(ceil_div(groups, int64_t{panels.groups}));
  const int64_t of_part = int64_t{8} * panels.row_fragments * kOutputs * panels.warps * static_cast<int64_t>(sizeof(float));
  panels.partial = panels.split == 1 ? 0 : tiles * panels.split * of_part;
  return panels;
}

int launch_panels(const Args& args, bool follows, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.dtype == 1) return launch_type<__half>(args, follows, cuda_stream);
  return launch_type<__nv_bfloat16>(args, follows, cuda_stream);
}

}  // namespace leanfleet::block_linear
