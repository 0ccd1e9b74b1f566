// LeanAttention on CUDA: the choice of a kernel and its plan, and the kernel for what tensor cores do not take
// (float32, and tensors of other types that do not begin at a multiple of 16 bytes). It multiplies quantised caches by
// their scales as it reads them.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

#include "core/cuda_target.h"
#include "core/shared_memory.cuh"
#include "lean_attention/device.cuh"
#include "lean_attention/direct_kernel.cuh"
#include "lean_attention/mma_kernel.cuh"
#include "lean_attention/narrow.cuh"
#include "lean_attention/narrow.h"
#include "lean_attention/wgmma_kernel.cuh"

namespace leanfleet::lean_attention {

namespace {

// Kernel with float32 arithmetic on CUDA cores. A CTA of 4 warps takes tiles of 32 keys through two buffers; warp w
// has rows w, w + 4, w + 8 and w + 12 of the unit. For the logits a lane is a token, for the output it is a column.
constexpr int kFloatTokens = 32, kFloatRows = 16, kFloatWarps = 4, kFloatThreads = 32 * kFloatWarps;

int float_stride(int width) { return width + 4; }  // floats between tokens: 16-byte reads by 8 lanes miss no bank

int float_shared_bytes(const Args& args) {
  const int tile = kFloatTokens * (float_stride(args.key_width) + float_stride(args.value_width));
  return (2 * tile + kFloatRows * args.key_width) * 4 + 16;
}

template <class T>
struct FloatCta {
  const Args& args;
  const bool by_16_bytes;
  float* const tiles;  // [2] keys [32][key_stride] and values [32][value_stride]
  float* const query;  // [16][D]
  const int warp, lane, key_stride, value_stride;

  // Starts to load a tile; tokens outside `seen` and those without a page become 0. Returns a bit for each of the
  // latter.
  __device__ __forceinline__ unsigned load(const Unit& unit, Span seen, int begin, int buffer) const {
    const int j = begin + lane;
    const void* key = nullptr;
    const void* value = nullptr;
    bool missing = false;
    float key_scale = 1.0f, value_scale = 1.0f;
    if (j >= seen.begin && j < seen.end) {
      const int64_t at = cache_row(args, args.key_strides, unit.request, unit.head, j);
      const int token = j - (unit.request.keys - unit.request.tokens);
      missing = at < 0;
      if (!missing && args.append && token >= 0) {
        key = static_cast<const T*>(args.new_key) + unit.request.origin * args.new_key_strides.batch +
              unit.head * args.new_key_strides.head + token * args.new_key_strides.token;
        value = static_cast<const T*>(args.new_value) + unit.request.origin * args.new_value_strides.batch +
                unit.head * args.new_value_strides.head + token * args.new_value_strides.token;
      } else if (!missing) {
        key = row_at(args.key_cache, args.key_scales, at);
        value = row_at(args.value_cache, args.value_scales, cache_row(args, args.value_strides, unit.request, unit.head, j));
        key_scale = scale_of(args.key_scales, unit, j);
        value_scale = scale_of(args.value_scales, unit, j);
      }
    }
    float* const keys = tiles + buffer * kFloatTokens * (key_stride + value_stride);
    load_cache_rows(args.key_scales, unit.head, key, key_scale, args.key_width, keys, key_stride);
    load_cache_rows(args.value_scales, unit.head, value, value_scale, args.value_width, keys + kFloatTokens * key_stride,
                    value_stride);
    return __ballot_sync(kFullWarp, missing);
  }

  static __device__ __forceinline__ const void* row_at(const void* cache, const Scales& scales, int64_t at) {
    return static_cast<const char*>(cache) + cache_bytes(scales, at, sizeof(T));
  }

  // Of position j in a quantised cache, but for those of channels.
  __device__ __forceinline__ float scale_of(const Scales& scales, const Unit& unit, int j) const {
    if (scales.kind == kPerTensor) return scales.in[0];
    return scales.kind == kPerToken ? scales.in[cache_row(args, scales.strides, unit.request, unit.head, j)] : 1.0f;
  }

  // A lane holds the pointer of its token, or null, and its scale; each warp copies 8 tokens.
  __device__ __forceinline__ void load_cache_rows(const Scales& scales, int head, const void* mine, float scale, int width,
                                                  float* to, int stride) const {
    if (scales.kind == kNoScale) return load_rows(static_cast<const T*>(mine), width, to, stride);
    const float* const of_channels = scales.in + static_cast<int64_t>(head) * width;
    for (int token = warp; token < kFloatTokens; token += kFloatWarps) {
      const auto* const from = reinterpret_cast<const char*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(mine), token));
      const float of_token = __shfl_sync(kFullWarp, scale, token);
      for (int d = lane; d < width; d += 32) {
        const float by = scales.kind == kPerChannel ? of_channels[d] : of_token;
        to[token * stride + d] = from != nullptr ? number_at(scales.form, from, d) * by : 0.0f;
      }
    }
  }

  // The same of rows that need no scale.
  __device__ __forceinline__ void load_rows(const T* mine, int width, float* to, int stride) const {
    for (int token = warp; token < kFloatTokens; token += kFloatWarps) {
      const T* from = reinterpret_cast<const T*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(mine), token));
      float* row = to + token * stride;
      if constexpr (sizeof(T) == 4) {
        if (by_16_bytes) {
          for (int d = lane * 4; d < width; d += 128)
            cp_async(shared_address(row + d), from != nullptr ? static_cast<const void*>(from + d) : args.key_cache,
                     from != nullptr ? 16 : 0);
          continue;
        }
      }
      for (int d = lane; d < width; d += 32) row[d] = from != nullptr ? as_float(from[d]) : 0.0f;
    }
  }

  template <int kRows>
  __device__ __forceinline__ void segment_rows(const Unit& unit, const Segment& segment) const {
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    const Span seen = unit_keys(args, unit.request, unit.row_tile);
    const int real_rows = min32(rows.end, args.group * unit.request.tokens);
    __syncthreads();  // the previous unit's query has been read
    for (int i = threadIdx.x; i < (rows.end - rows.begin) * args.key_width; i += kFloatThreads) {
      const int row = i / args.key_width, d = i - row * args.key_width;
      const RowPlace at = row_place(args, unit, rows.begin + row);
      query[i] = rows.begin + row < real_rows ? as_float(query_row<T>(args, unit, at)[d]) : 0.0f;
    }
    float o[kRows][8], max[kRows], sum[kRows];
    RowBounds bounds[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = rows.begin + warp + 4 * r;
      bounds[r] = row < rows.end ? row_bounds(args, unit, row) : RowBounds{0, 0};
      max[r] = -INFINITY;
      sum[r] = 0.0f;
#pragma unroll
      for (int d = 0; d < 8; ++d) o[r][d] = 0.0f;
    }
    unsigned missing = 0;
    if (segment.tiles.begin < segment.tiles.end) missing = load(unit, seen, segment.tiles.begin * kFloatTokens, 0);
    asm volatile("cp.async.commit_group;" ::: "memory");
    int buffer = 0;
    for (int tile = segment.tiles.begin; tile < segment.tiles.end; ++tile, buffer ^= 1) {
      unsigned next_missing = 0;
      if (tile + 1 < segment.tiles.end) next_missing = load(unit, seen, (tile + 1) * kFloatTokens, buffer ^ 1);
      asm volatile("cp.async.commit_group;" ::: "memory");
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      const float* keys = tiles + buffer * kFloatTokens * (key_stride + value_stride);
      const float* values = keys + kFloatTokens * key_stride;
      float p[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) p[r] = 0.0f;
      for (int d = 0; d < args.key_width; d += 4) {
        const float4 k = *reinterpret_cast<const float4*>(keys + lane * key_stride + d);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int row = kRows == 1 ? warp : min32(warp + 4 * r, rows.end - rows.begin - 1);
          const float4 q = *reinterpret_cast<const float4*>(query + row * args.key_width + d);
          p[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
        }
      }
      const int j = tile * kFloatTokens + lane;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float x = p[r] * args.scale;
        if (args.softcap > 0.0f) x = cap_logit(x, args.softcap);
        x *= kLog2E;
        if (j < bounds[r].begin || j >= bounds[r].end || (missing >> lane & 1)) x = -INFINITY;
        float top = x;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
        top = fmaxf(top, max[r]);
        const float factor = rescale(max[r], top);
        max[r] = top;
        p[r] = rescale(x, top);
        sum[r] = sum[r] * factor + p[r];
#pragma unroll
        for (int d = 0; d < 8; ++d) o[r][d] *= factor;
      }
#pragma unroll 4
      for (int t = 0; t < kFloatTokens; ++t) {
        float weight[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) weight[r] = __shfl_sync(kFullWarp, p[r], t);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int d = part * 128 + lane * 4;
          if (d >= args.value_width) break;
          const float4 v = *reinterpret_cast<const float4*>(values + t * value_stride + d);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            o[r][4 * part] += weight[r] * v.x, o[r][4 * part + 1] += weight[r] * v.y;
            o[r][4 * part + 2] += weight[r] * v.z, o[r][4 * part + 3] += weight[r] * v.w;
          }
        }
      }
      missing = next_missing;
      __syncthreads();  // the buffer has been read
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = rows.begin + warp + 4 * r;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum[r] += __shfl_xor_sync(kFullWarp, sum[r], offset);
      if (row >= rows.end) continue;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int d = part * 128 + lane * 4;
        const float4 x = make_float4(o[r][4 * part], o[r][4 * part + 1], o[r][4 * part + 2], o[r][4 * part + 3]);
        if (d >= args.value_width) break;
        if (segment.count == 1) write_row<T>(args, unit, row, d, x, max[r], sum[r]);
        else write_partial(args, segment.slot, row - rows.begin, d, x, max[r], sum[r]);
      }
    }
    if (segment.count == 1) return;
    end_part<T>(args, unit, segment, first_contributor(segment), warp, kFloatWarps);
  }
};

template <class T>
__global__ void __launch_bounds__(kFloatThreads) FloatKernel(const __grid_constant__ Args launch_args, bool by_16_bytes) {
  Args args = launch_args;
  args.plan.equal_parts = 0;  // the fallback for other types has the plan of their kernels
  args.lone_tokens = false;   // never here
  extern __shared__ float shared[];
  if (args.plan.merge_apart && threadIdx.x == 0) begin_cuts(args, blockIdx.x);
  const int key_stride = args.key_width + 4, value_stride = args.value_width + 4;
  float* const query = shared + 2 * kFloatTokens * (key_stride + value_stride);
  if (args.append)
    append_all<T, T>(launch_args, static_cast<int64_t>(blockIdx.x) * kFloatWarps + threadIdx.x / 32,
                     static_cast<int64_t>(gridDim.x) * kFloatWarps);
  Range<int64_t> range;
  if (!locate_range(args, blockIdx.x, num_row_tiles(args), range)) return;
  const FloatCta<T> cta{
      args,       by_16_bytes, shared, query, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32),
      key_stride, value_stride};
  for_each_share(args, range, [&](const Unit& unit, const Share& share) {
    const Segment segment = segment_of(args, unit, share, range.work, range.ranges, range.index);
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    if (rows.end - rows.begin <= kFloatWarps) cta.template segment_rows<1>(unit, segment);
    else cta.template segment_rows<kFloatRows / kFloatWarps>(unit, segment);
  });
}

// launch(type) for the call's half-precision type.
template <class F>
int for_type(const Args& args, F&& launch) {
  return args.dtype == static_cast<int>(DType::kFloat16) ? launch(__half{}) : launch(__nv_bfloat16{});
}

// What comes before the attention: the append, so that prompts read all keys and values from the caches, through TMA, and
// pieces of packed tokens what others append; and the notes of these pieces.
template <class T, class Chunk, bool kRope, bool kPieces>
__global__ void __launch_bounds__(256) AppendKernel(const __grid_constant__ Args args) {
  begin_append();
  if constexpr (kPieces) {
    note_pieces(args, blockIdx.x * 256 + threadIdx.x, gridDim.x * 256);
    if (!args.append) return;
  }
  append_all<T, Chunk, kRope, kPieces>(args, blockIdx.x * 8 + threadIdx.x / 32, gridDim.x * 8);
}
constexpr int kAppendApart = 64;  // new tokens

template <class T, class Chunk, bool kRope, bool kPieces>
int launch_append(const Args& args, cudaStream_t stream) {
  const int64_t rows = args.append ? static_cast<int64_t>(args.batch) * args.tokens * args.kv_heads : ceil_div(args.batch, 32);
  const dim3 ctas(static_cast<unsigned>(rows < 8192 ? (rows + 7) / 8 : 1024));
  return launch_dependently<AppendKernel<T, Chunk, kRope, kPieces>>(ctas, 256, stream, args);
}

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether launch_prepare takes a call.
bool prepares(const Args& args) {
  return args.append && args.dtype != static_cast<int>(DType::kFloat32) && args.rotary_half > 0 && args.rotary_half % 8 == 0 &&
         !args.rotary_interleaved && aligned(args.cos_cache, 16) && aligned(args.sin_cache, 16);
}

// Notes the pieces of packed tokens, unless they are lone, and appends, for kernels that then only read. Keys get their rotary embedding here where
// the attention gives the queries theirs.
int prepare_packed(Args& args, bool by_16_bytes, cudaStream_t stream) {
  int error;
  if (args.dtype == static_cast<int>(DType::kFloat32)) {
    error = launch_append<float, float, false, true>(args, stream);
  } else {
    error = for_type(args, [&](auto type) {
      using T = decltype(type);
      if (!by_16_bytes) return launch_append<T, T, false, true>(args, stream);
      if (prepares(args)) return launch_prepare(args, false, stream);
      return args.rotary_half > 0 ? launch_append<T, uint4, true, true>(args, stream)
                                  : launch_append<T, uint4, false, true>(args, stream);
    });
  }
  args.append = false;
  return error;
}

template <class T>
int launch_float(const Args& args, bool by_16_bytes, cudaStream_t stream) {
  const int bytes = float_shared_bytes(args);
  const cudaError_t error = allow_shared_memory(FloatKernel<T>);
  if (error != cudaSuccess) return error;
  FloatKernel<T><<<args.plan.max_ranges, kFloatThreads, bytes, stream>>>(args, by_16_bytes);
  return cudaGetLastError();
}

// The architecture that the code loaded on a device was compiled for, such as 90: newer devices without code of their
// own run that of an older one, which lacks TMA.
int code_version(int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int version = known[device % kDevices].load(std::memory_order_relaxed);
  if (version != 0) return version;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, FloatKernel<float>) != cudaSuccess) return 0;
  known[device % kDevices].store(attributes.ptxVersion, std::memory_order_relaxed);
  return attributes.ptxVersion;
}

int columns_of(const Args& args) { return args.key_width > args.value_width ? args.key_width : args.value_width; }

// The width of kernels other than wgmma's.
int padded_width(const Args& args) {
  const int columns = columns_of(args);
  return columns <= 64 ? 64 : columns <= 128 ? 128 : 256;
}

// Whether prompts run on wgmma, which only code for sm_90a has and which counts work in 31 bits: no call of hours fits.
bool takes_wgmma(const Args& args) {
  const double units =
      static_cast<double>(args.batch) * args.kv_heads * (args.group * static_cast<double>(args.tokens) / 128 + 1);
  int device = 0;
  return units * (args.capacity / WgmmaTile<256>::kTokens + 16.0) < double{1u << 31} && cudaGetDevice(&device) == cudaSuccess &&
         code_version(device) == 90;
}

OneSegmentDevice this_device(int sm_count) {
  OneSegmentDevice found = {sm_count, false, 0};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return found;
  found.clusters = code_version(device) >= 90;
  if (cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    found.shared_bytes = 0;
  return found;
}

// Of a prompt's unit.
int prompt_rows(const Args& args) {
  if (has_narrow_cache(args) || !takes_wgmma(args)) return 128;  // also of those that are converted
  return for_wgmma_widths(args.key_width, args.value_width, [](auto keys, auto values) {
    return WgmmaTile<decltype(keys)::value, false, decltype(values)::value>::kRows;
  });
}

int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// A map of a cache as [outer][head][row][column] for boxes of `box_tokens` rows of 64 columns or, with whole_rows, as
// [outer][head][row][box of 64 columns][column] for all columns. False: the driver has no such function or refuses.
bool encode_map(CUtensorMap* map, const Args& args, const void* data, const CacheStrides& strides, int width, int64_t elements,
                int box_tokens, bool whole_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return false;
  const bool paged = args.cache_kind == kPaged;
  const int64_t rows = paged ? args.block : args.capacity;
  const int64_t batch = args.packed_tokens ? args.requests : args.batch;
  const int64_t outer = paged ? args.num_pages : args.cache_kind == kDense ? batch : 1;
  const int64_t outer_stride = paged ? strides.page : args.cache_kind == kDense ? strides.batch : elements;
  cuuint64_t sizes[5], bytes[4];
  cuuint32_t box[5];
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  int rank = 0;
  const auto axis = [&](int64_t size, int64_t stride, int of_box) {
    sizes[rank] = static_cast<cuuint64_t>(size);
    if (rank > 0) bytes[rank - 1] = static_cast<cuuint64_t>(stride) * 2;
    box[rank++] = static_cast<cuuint32_t>(of_box);
  };
  axis(whole_rows ? kBoxColumns : width, 1, kBoxColumns);
  if (whole_rows) axis(width / kBoxColumns, kBoxColumns, width / kBoxColumns);
  axis(rows, strides.token, box_tokens);
  axis(args.kv_heads, strides.head, 1);
  axis(outer, outer_stride, 1);
  const auto type =
      args.dtype == static_cast<int>(DType::kFloat16) ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, rank, const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// launch(width) with padded_width, known to the compiler.
template <class F>
auto for_padded_width(const Args& args, F&& launch) {
  const int width = padded_width(args);
  if (width == 64) return launch(std::integral_constant<int, 64>{});
  if (width == 128) return launch(std::integral_constant<int, 128>{});
  return launch(std::integral_constant<int, 256>{});
}

// How a kernel of tensor cores keeps keys and values.
struct Ring {
  int key_tile, slots;
};

// Of the kernel for units of so many rows, in a CTA with so much shared memory.
Ring ring_of(const Args& args, int rows, bool wgmma, int shared_bytes) {
  const auto of_tile = [&](auto tile) { return Ring{decltype(tile)::kTokens, decltype(tile)::slots_for(shared_bytes)}; };
  if (wgmma && rows > 16) {
    if (has_narrow_cache(args))
      return for_padded_width(args, [&](auto w) { return of_tile(WgmmaTile<decltype(w)::value, true>{}); });
    return for_wgmma_widths(args.key_width, args.value_width, [&](auto keys, auto values) {
      return of_tile(WgmmaTile<decltype(keys)::value, false, decltype(values)::value>{});
    });
  }
  return for_padded_width(args, [&](auto w) {
    constexpr int kWidth = decltype(w)::value;
    if (rows <= 8) return of_tile(MmaTile<kWidth, 8>{});
    if (rows <= 16) return of_tile(MmaTile<kWidth, kWidth == 256 ? 128 : 16>{});
    return of_tile(MmaTile<kWidth, 128>{});
  });
}

// The shared memory of DirectKernel, for units of so many rows.
int direct_bytes(const Args& args, int rows) {
  return for_padded_width(args, [&](auto w) {
    constexpr int kWidth = decltype(w)::value;
    const auto of = [&](auto type) {
      using T = decltype(type);
      const int bits = cache_bits(args);
      return rows <= 8 ? direct_shared_bytes<T, kWidth, 1>(8, bits) : direct_shared_bytes<T, kWidth, 2>(16, bits);
    };
    return has_narrow_cache(args) ? of(EitherHalf{}) : of(__half{});
  });
}

// launch(width, blocks of 8 rows) of DirectKernel's instance for a plan, known to the compiler.
template <class F>
int launch_direct_width(const Args& args, F&& launch) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  return for_padded_width(args, [&](auto w) {
    if constexpr (decltype(w)::value <= 128)
      if (args.plan.row_tile > kDirectRows) return launch(w, two);
    return launch(w, one);
  });
}

// Whether DirectKernel may run a plan in CTAs with so much shared memory, and the tokens that a CTA of it reads at once.
bool is_direct(const Args& args, const Plan& plan, int shared_bytes) {
  if (has_narrow_cache(args)) return plan.directly;
  // Heads of up to 192 columns would leave a quarter and more of the registers of 256 idle: measured, the ring is faster.
  const int columns = columns_of(args), most_rows = columns <= 128 ? kMostDirectRows : columns <= 192 ? 0 : kDirectRows;
  return plan.row_tile <= most_rows && direct_bytes(args, plan.row_tile) <= shared_bytes;
}
int tokens_at_once(const Args& args, const Plan& plan) {
  return direct_tokens(padded_width(args), plan.row_tile, cache_bits(args));
}

constexpr int kUnitOverhead = 9, kWgmmaUnitOverhead = 4;  // in key tiles, measured
constexpr int kNarrowUnitOverhead = 16;                   // 4, 8 and 32 are as fast
constexpr int kShortPart = 128;                           // key tiles, measured
constexpr int kShortWide = 8192;                          // keys of more than 192 columns, measured
constexpr int kMostSplitRows = 32;                        // of more than 128 columns, in units of 8
constexpr int kConvertedRows = 65;                        // of a head, at least; measured with whole prompts alone

}  // namespace

// Where requests have few tokens on average, all have the small units of decode steps; a longer request is then many of them.
// Else there are pieces of prompts: they have the units of prompts, and requests of few tokens those of decode steps.
void cut_for_cuda(Args& args) {
  const int64_t each = ceil_div(args.total_tokens, args.requests);
  const bool half = args.dtype != static_cast<int>(DType::kFloat32), few = args.group * each <= 16;
  const int64_t tokens = few ? each : (half ? prompt_rows(args) : kFloatRows) / args.group;
  const int few_rows = has_narrow_cache(args) && narrow_direct_rows(args, args.group) == 0 ? kNarrowFewRows : 8;
  if (half && !few && args.requests > 1 && args.group <= 16) args.short_tokens = max32(few_rows / args.group, 1);
  cut_into_pieces(args, static_cast<int>(clamp<int64_t>(tokens, 1, args.total_tokens)));
}

Args short_launch(const Args& args) {
  Args first = args;
  first.batch = args.requests;
  first.tokens = args.short_tokens;
  first.plan = args.short_plan;
  return first;
}

namespace {

constexpr int kMergeRounds = 12;  // that are worth a launch, measured

// Whether a launch of its own merges the units: whether their last contributors might take longer. They read parts in rounds, 16 of 64
// columns a warp, or on Hopper's kernel 2 of 8 rows. Where CTAs of a cluster may merge there is none, forced or not.
bool merges_apart(const Args& args, const Plan& plan, bool forced) {
  if (plan.row_tile <= 16 && plan.equal_parts > 1 && plan.equal_parts <= kMaxCluster) return false;
  const int64_t row_tiles = num_row_tiles(args, plan.row_tile), rows = row_tiles > 1 ? plan.row_tile : args.group * args.tokens;
  if (args.kv_heads * row_tiles == 0) return false;
  // The most parts of a unit: those of one request's tiles, of which the later ones see twice as many keys as all on average.
  int64_t parts = (row_tiles > 1 ? 2 : 1) * plan.max_ranges / (args.kv_heads * row_tiles) + 1;
  const int64_t most = args.capacity / plan.key_tile / plan.min_range_work + 1;
  if (parts > most) parts = most;
  if (parts <= 1) return false;
  const int64_t rounds = plan.row_tile > 16 && (!has_narrow_cache(args) || plan.converts) && takes_wgmma(args)
                             ? ceil_div(rows, 64) * ceil_div(args.value_width, 128) * ceil_div(parts, 2)
                             : ceil_div(rows * ceil_div(args.value_width, 64), 8) * ceil_div(parts, 16);
  return forced || rounds > kMergeRounds;
}

}  // namespace

Plan cuda_plan(const Args& args, int sm_count, const ForcedPlan& forced) {
  const int64_t rows = static_cast<int64_t>(args.group) * args.tokens;
  Plan plan;
  plan.unit_overhead = kUnitOverhead;
  plan.min_range_work = kMinRangeWork;
  plan.max_ranges = forced.ranges > 0 ? forced.ranges : sm_count;
  if (args.dtype == static_cast<int>(DType::kFloat32)) {
    plan.key_tile = kFloatTokens;
    plan.row_tile = rows < kFloatRows ? static_cast<int32_t>(rows) : kFloatRows;
    if (forced.ranges == 0) plan.max_ranges = 2 * sm_count;
    plan.merge_apart = merges_apart(args, plan, forced.merge_apart);
    return plan;
  }
  const OneSegmentDevice device = this_device(sm_count);
  // The kernels for few rows count positions in 32 bits.
  const int tile = 8192 / padded_width(args);  // of the smallest tiles that one of them has
  const int overhead = has_narrow_cache(args) ? kNarrowUnitOverhead : kUnitOverhead;
  const bool narrow = static_cast<int64_t>(args.batch) * args.kv_heads * (args.capacity / tile + 1 + overhead) <
                      (int64_t{1} << 32) / (plan.max_ranges + 1);
  plan.row_tile = rows <= 8 && narrow ? 8 : rows <= 16 && narrow && padded_width(args) < 256 ? 16 : prompt_rows(args);
  if (has_narrow_cache(args)) {
    const int direct_rows = narrow ? narrow_direct_rows(args, rows) : 0;
    plan.directly = direct_rows > 0 && direct_bytes(args, direct_rows) <= device.shared_bytes;
    plan.converts = forced.converts && rows >= kConvertedRows && may_convert(args) && takes_wgmma(args);
    plan.row_tile = plan.directly ? direct_rows : plan.converts ? prompt_rows(args) : narrow_rows(rows);
    plan.key_tile = plan.directly ? tile : kNarrowTileKeys;
    plan.unit_overhead = kNarrowUnitOverhead;
  }
  if (!has_narrow_cache(args) || plan.converts) {
    const bool wgmma = takes_wgmma(args) && plan.row_tile > 16;
    plan.unit_overhead = wgmma ? kWgmmaUnitOverhead : kUnitOverhead;
    plan.key_tile = ring_of(args, plan.row_tile, wgmma, 0).key_tile;
    if (wgmma && forced.ranges == 0) choose_dealing(args, plan);
  }
  // Few units, should they turn out to be equal, are cut into equal parts, if that leaves few SMs idle: up to a
  // twentieth, or a tenth where ranges are short; or where a part is read at once.
  const int64_t units = args.batch * static_cast<int64_t>(args.kv_heads) * num_row_tiles(args, plan.row_tile);
  const int64_t parts = units > 0 ? sm_count / units : 0, busy = parts * units;
  const int64_t tiles = args.capacity / plan.key_tile;
  const bool read_at_once = is_direct(args, plan, device.shared_bytes) && args.capacity <= parts * tokens_at_once(args, plan);
  // Whether such a part is less than a range, in which units cost something too.
  const bool few_tiles = plan.directly && tiles * sm_count <= (tiles + plan.unit_overhead) * busy;
  if (forced.ranges == 0 && parts > 0 && args.capacity / tile < 1 << 19 &&
      (read_at_once || few_tiles || busy * 20 >= int64_t{19} * sm_count ||
       (busy * 10 >= int64_t{9} * sm_count && tiles <= kShortPart * parts)))
    plan.equal_parts = static_cast<int32_t>(parts);
  plan.merge_apart = merges_apart(args, plan, forced.merge_apart);
  // Pieces of prompts beside requests of few tokens keep the units of prompts: their rotary embedding comes before both launches.
  const bool pieces = args.short_tokens > 0 && args.tokens != args.short_tokens;
  const int width = padded_width(args);
  // Quantised rows of other layouts or pairs of forms have no such kernel, and of up to 128 columns the ones with a ring are as good.
  const bool without =
      has_narrow_cache(args) && !plan.directly && (width <= 128 || rows > kMostSplitRows || narrow_direct_rows(args, 8) == 0);
  if (without || pieces || forced.ranges > 0) return plan;
  int way = forced.way;
  if (way == kAnyWay) way = choose_one_segment(args, width, device);
  else if (way >= 0 && !can_take(device, short_call(args, width), kOneSegmentWays[way])) way = -1;
  if (way >= 0) return one_segment_plan(args, width, way, sm_count);
  return plan;
}

namespace {

// The kernel without tensor cores for the other types, with the rotary embedding before it.
int launch_float_of_half(Args args, cudaStream_t stream) {
  args.plan.key_tile = kFloatTokens;
  args.plan.row_tile = min32(args.plan.row_tile, kFloatRows);
  args.plan.merge_apart = false;
  if (args.rotary_half > 0) {
    const int error = launch_rotate(args, stream);
    if (error != cudaSuccess) return error;
  }
  return for_type(args, [&](auto type) { return launch_float<decltype(type)>(args, false, stream); });
}

// Whether a CTA reads all its tokens at once.
bool has_few_tokens(const Args& args) {
  return args.plan.equal_parts > 0 && args.capacity <= args.plan.equal_parts * tokens_at_once(args, args.plan);
}

// Whether DirectKernel runs a plan for 16-bit caches. Pages too, unless a unit has 16 rows and these have all of 128 columns: those
// are read faster through the ring. And wide heads of short dense caches that requests may fill in part.
bool runs_directly(const Args& args, int shared_bytes) {
  if (has_narrow_cache(args) || !is_direct(args, args.plan, shared_bytes)) return false;
  const bool pages = args.cache_kind == kPaged && (args.plan.row_tile <= kDirectRows || columns_of(args) < 128);
  const bool short_wide =
      args.cache_kind == kDense && args.seq_lens != nullptr && columns_of(args) > 192 && args.capacity <= kShortWide;
  return pages || short_wide || has_few_tokens(args);
}

// Whether pieces of packed tokens may be worked out by lone_token, so that kernels need no notes of them and may begin while the new
// tokens are appended.
bool may_begin_early(const Args& args, int device) {
  return args.packed_tokens && args.tokens == 1 && args.short_tokens == 0 && args.causal && dependent_launches() &&
         code_version(device) >= 90;
}

// The kernel that args.plan asks for, and the merge of its units.
int launch_planned(Args args, int device, int max_shared_bytes, bool by_16_bytes, void* stream) {
  const auto then_merge = [&](int error, bool scales_far = false) {
    if (error != cudaSuccess || !args.plan.merge_apart) return error;
    return launch_merge(args, scales_far, code_version(device) >= 90, stream);
  };
  if (args.dtype == static_cast<int>(DType::kFloat32))
    return then_merge(launch_float<float>(args, by_16_bytes, static_cast<cudaStream_t>(stream)));
  const int width = padded_width(args);
  const bool clusters = args.plan.equal_parts > 1 && code_version(device) >= 90;
  // Measured: rows of pages are read at the same speed wherever they lie, and a launch of few tokens takes less time; long
  // contexts in one piece are read faster by TMA.
  const DirectCut cut = clusters && has_few_tokens(args) ? DirectCut::kClustersOfFew
                        : clusters                       ? DirectCut::kClusters
                                                         : DirectCut::kPlan;
  if (has_narrow_cache(args) && !args.plan.converts) {
    if (!by_16_bytes) return launch_float_of_half(args, static_cast<cudaStream_t>(stream));
    if (!args.plan.directly) return then_merge(launch_narrow(args, max_shared_bytes, stream));
    if (args.plan.one_segment > 0)
      return for_padded_width(args, [&](auto w) { return launch_one_segment_narrow<decltype(w)::value>(args, stream); });
    return then_merge(launch_direct_width(args, [&](auto w, auto blocks) {
      return launch_direct_narrow<decltype(w)::value, decltype(blocks)::value>(args, cut, stream);
    }));
  }
  if (by_16_bytes && args.plan.one_segment > 0)
    return for_type(args, [&](auto type) { return launch_one_segment<decltype(type)>(args, width, stream); });
  if (by_16_bytes && runs_directly(args, max_shared_bytes))
    return then_merge(for_type(args, [&](auto type) {
      using T = decltype(type);
      return launch_direct_width(args, [&](auto w, auto blocks) {
        return launch_direct<T, decltype(w)::value, decltype(blocks)::value>(args, cut, stream);
      });
    }));
  const bool many_rows = args.plan.row_tile > 16, wgmma = many_rows && takes_wgmma(args);
  const Ring ring = ring_of(args, args.plan.row_tile, wgmma, max_shared_bytes);
  if (!by_16_bytes || ring.slots < (wgmma ? 4 : 2) || (wgmma && !aligned(args.output, 16)))
    return launch_float_of_half(args, static_cast<cudaStream_t>(stream));
  if (wgmma && args.append && args.tokens >= kAppendApart) {
    const int error = for_type(args, [&](auto type) {
      return launch_append<decltype(type), uint4, false, false>(args, static_cast<cudaStream_t>(stream));
    });
    args.append = false;
    if (error != cudaSuccess) return error;
  }
  TileLoads loads = {};
  loads.key_boxes = ceil_div(args.key_width, kBoxColumns);
  loads.value_boxes = ceil_div(args.value_width, kBoxColumns);
  if (wgmma)  // its products take all columns: zeros beyond D and Dv
    for_wgmma_widths(args.key_width, args.value_width, [&](auto keys, auto values) {
      using Tile = WgmmaTile<decltype(keys)::value, false, decltype(values)::value>;
      loads.key_boxes = Tile::kKeyBoxes;
      loads.value_boxes = Tile::kValueBoxes;
    });
  loads.stream_once = num_row_tiles(args) == 1 && (!args.packed_tokens || args.total_tokens <= args.requests);
  loads.slots = ring.slots;
  loads.clusters = clusters;
  loads.cluster = 1;
  loads.box_tokens = args.cache_kind == kPaged ? greatest_common_divisor(args.block, ring.key_tile) : ring.key_tile;
  loads.boxes = ring.key_tile / loads.box_tokens;
  loads.box_slices = loads.box_tokens / 16;
  // Row consumers read a slot more often than it is filled; there conflicts cost more than longer pieces gain.
  loads.whole_rows = args.plan.row_tile <= 16 && args.key_width % kBoxColumns == 0 && args.value_width % kBoxColumns == 0;
  CUtensorMap key_map = {}, value_map = {};
  loads.tensor_maps = !args.plan.converts && code_version(device) >= 90 && loads.box_tokens >= 16 &&
                      encode_map(&key_map, args, args.key_cache, args.key_strides, args.key_width, args.key_cache_elements,
                                 loads.box_tokens, loads.whole_rows) &&
                      encode_map(&value_map, args, args.value_cache, args.value_strides, args.value_width,
                                 args.value_cache_elements, loads.box_tokens, loads.whole_rows);
  loads.whole_tiles =
      loads.tensor_maps && loads.boxes == 1 && args.cache_kind != kPaged && (!args.append || args.plan.row_tile <= 16);
  // One warp keeps up with copies of whole tiles, for many rows two, so that keys need not wait for the slot of values; others
  // help to gather rows, to look up pages and to issue small copies. The last warp tells the consumers what to do; it copies too
  // where all 4 are needed.
  loads.copy_warps = args.plan.converts ? kConvertingWarps : !loads.whole_tiles ? 4 : many_rows ? 2 : 1;
  const bool pages_in_turn = wgmma && args.cache_kind == kPaged && loads.tensor_maps && !args.append;
  loads.fill_warps = pages_in_turn || loads.whole_tiles ? 1 : args.plan.converts ? kConvertingWarps / 2 : loads.copy_warps;
  const int producer_warps = loads.whole_tiles && args.plan.row_tile <= 16 ? 2 : 4;
  const int error = for_type(args, [&](auto type) {
    using T = decltype(type);
    if (args.plan.converts)
      return for_padded_width(args, [&](auto w) {
        constexpr int kWidth = decltype(w)::value;
        return launch_wgmma<T, kWidth, true, kWidth>(args, loads, key_map, value_map, stream);
      });
    if (wgmma)
      return for_wgmma_widths(args.key_width, args.value_width, [&](auto keys, auto values) {
        return launch_wgmma<T, decltype(keys)::value, false, decltype(values)::value>(args, loads, key_map, value_map, stream);
      });
    return for_padded_width(args, [&](auto w) {
      return launch_mma<T, decltype(w)::value>(args, loads, key_map, value_map, producer_warps, stream);
    });
  });
  return then_merge(error, wgmma);
}

// The same, or two of them where packed requests of few tokens have a launch of their own.
int launch_pieces(Args args, int device, int max_shared_bytes, bool by_16_bytes, void* stream) {
  if (args.short_tokens > 0) {
    const int error = launch_planned(short_launch(args), device, max_shared_bytes, by_16_bytes, stream);
    if (error != cudaSuccess) return error;
    args.pieces += args.requests;
  }
  return launch_planned(args, device, max_shared_bytes, by_16_bytes, stream);
}

// The append comes first: the kernels only read the caches. So does the rotary embedding where there are no tensor cores, and of prompts on wgmma.
int launch_over_narrow(Args args, int device, int max_shared_bytes, void* stream) {
  const bool by_16_bytes = aligned(args.query, 16) && aligned(args.key_cache, 16) && aligned(args.value_cache, 16);
  const bool half = args.dtype != static_cast<int>(DType::kFloat32);
  args.lone_tokens = half && by_16_bytes && args.plan.directly && may_begin_early(args, device);
  if (args.append || (args.packed_tokens && !args.lone_tokens)) {
    const int error = launch_append_narrow(args, stream);
    if (error != cudaSuccess) return error;
    args.append = false;
    // Who reads old rows before the append has ended must not have a new row's sector of 32 bytes in L1 then.
    const bool whole_sectors = aligned(args.key_cache, 32) && aligned(args.value_cache, 32);
    args.begins_early =
        (!args.packed_tokens || args.lone_tokens) && dependent_launches() && code_version(device) >= 90 && whole_sectors;
  }
  const auto launches = [&](const Args& part) {
    return part.plan.directly || part.plan.converts || narrow_fits(part, max_shared_bytes);
  };
  const bool fits = half && by_16_bytes && launches(args) && (args.short_tokens == 0 || launches(short_launch(args)));
  const bool rotates = args.rotary_half % 2 == 0 && aligned(args.cos_cache, 16) && aligned(args.sin_cache, 16);
  const bool directly = args.plan.directly || (args.short_tokens > 0 && args.short_plan.directly);
  if (args.rotary_half > 0 && (!fits || args.plan.converts || (directly && !rotates))) {
    const int error = launch_rotate(args, stream);
    if (error != cudaSuccess) return error;
    args.begins_early = false;
  }
  return launch_pieces(args, device, max_shared_bytes, half ? fits : by_16_bytes, stream);
}

}  // namespace

int launch_attention(const Args& call, int device, void* stream) {
  Args args = call;
  int max_shared_bytes = 0;
  const cudaError_t known = cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (known != cudaSuccess) return known;
  const size_t element = args.dtype == static_cast<int>(DType::kFloat32) ? 4 : 2;
  const auto copy = [&](const void* from, void* to, int64_t bytes) {
    if (from == to) return cudaSuccess;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
  };
  const auto copy_cache = [&](const void*& from, void* to, int64_t elements, Scales& scales) {
    const cudaError_t error = copy(from, to, elements * (scales.kind == kNoScale ? element : 1));
    from = to;
    if (error != cudaSuccess || scales.kind != kPerToken) return error;
    const float* const old_scales = scales.in;
    scales.in = scales.out;
    return copy(old_scales, scales.out, scales.elements * 4);
  };
  if (args.append) {
    cudaError_t error = copy_cache(args.key_cache, args.key_cache_out, args.key_cache_elements, args.key_scales);
    if (error == cudaSuccess)
      error = copy_cache(args.value_cache, args.value_cache_out, args.value_cache_elements, args.value_scales);
    if (error != cudaSuccess) return error;
  }
  if (has_narrow_cache(args)) return launch_over_narrow(args, device, max_shared_bytes, stream);
  const bool new_rows_aligned = aligned(args.new_key, 16) && aligned(args.new_value, 16);
  const bool by_16_bytes =
      aligned(args.query, 16) && aligned(args.key_cache, 16) && aligned(args.value_cache, 16) && new_rows_aligned;
  if (args.packed_tokens && args.plan.row_tile > 16 && by_16_bytes && prepares(args)) {
    const int error = launch_prepare(args, true, stream);
    if (error != cudaSuccess) return error;
    args.query = args.rotated_query;
    args.rotary_half = 0;
    args.append = false;
    return launch_pieces(args, device, max_shared_bytes, by_16_bytes, stream);
  }
  // Kernels for few rows rotate queries and new keys as they read them; for others it is done once, before.
  if (args.rotary_half > 0 && (element == 4 || args.plan.row_tile > 16 || args.rotary_half % 2 != 0 ||
                               !aligned(args.cos_cache, 16) || !aligned(args.sin_cache, 16))) {
    const int error = launch_rotate(args, stream);
    if (error != cudaSuccess) return error;
  }
  if (args.packed_tokens) {
    if (args.append && args.rotary_half > 0 && !by_16_bytes) {
      const int error = launch_rotate(args, stream);
      if (error != cudaSuccess) return error;
    }
    // A new row's sector of 32 bytes must not be in L1 when old rows have been read.
    const bool whole_sectors =
        (args.key_width | args.value_width) % 16 == 0 && aligned(args.key_cache, 32) && aligned(args.value_cache, 32);
    args.begins_early = args.lone_tokens = may_begin_early(args, device) && by_16_bytes && prepares(args) && whole_sectors &&
                                           (args.plan.one_segment > 0 || runs_directly(args, max_shared_bytes));
    const int error = prepare_packed(args, by_16_bytes, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return launch_pieces(args, device, max_shared_bytes, by_16_bytes, stream);
}

}  // namespace leanfleet::lean_attention
