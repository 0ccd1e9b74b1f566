// NormalizedLinearAttention and its gradient on CUDA as scans over chunks of tokens (linear_scan/chunk_scan.h); the table in
// normalized_linear_attention.h says which rows each scan has. The factors of rows (1 / |q_i|, 1 / |k_j|, 1 / g_i, r_i)
// are found beforehand, so that tensors enter the scans as they are.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"
#include "linear_scan/block_sum.cuh"
#include "linear_scan/chunk_scan.h"
#include "normalized_linear_attention/normalized_linear_attention.h"
#include "normalized_linear_attention/step.h"

namespace leanfleet::normalized_linear_attention {

namespace {

constexpr int kThreads = 256;
constexpr float kUnitRowEps = 1e-12f;  // a row of less is divided by it, and its gradient is not projected

// A warp a row (b, head, token) of a tensor [B,heads,N,width]; rows are numbered in this order.
struct Row {
  int64_t batch, head, token;
};
__device__ __forceinline__ int64_t row_index() { return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32; }
__device__ __forceinline__ Row row_at(int64_t index, int64_t heads, int64_t tokens) {
  const int64_t of_head = index / tokens;
  return {of_head / heads, of_head % heads, index % tokens};
}
__device__ __forceinline__ int64_t offset_of(const Row& row, const Strides& strides) {
  return row.batch * strides.batch + row.head * strides.head + row.token * strides.token;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

unsigned row_blocks(int64_t rows) { return static_cast<unsigned>((rows + kThreads / 32 - 1) / (kThreads / 32)); }

// Whether every row's parts of 16 bytes are aligned.
template <class T>
bool parts_aligned(const void* data, const Strides& strides, int64_t width) {
  const auto aligned = [](int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)) % 16 == 0; };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && aligned(strides.batch) && aligned(strides.head) &&
         aligned(strides.token) && aligned(width);
}

// Such a row in the registers of as few lanes as hold it in kParts parts of 16 bytes, up to 256 columns. CTAs: (batch row and head,
// tokens).
constexpr int kMaxRowWidth = 256;
template <class T, int kOfLane>
struct RowParts {
  static constexpr int kElements = 16 / sizeof(T), kParts = kOfLane;
  static_assert(kMaxRowWidth <= 32 * kParts * kElements);
  uint4 parts[kParts];

  // log2 of the lanes of a row of this width.
  static int lanes_bits(int64_t width) {
    int bits = 0;
    while (bits < 5 && (kParts * kElements << bits) < width) ++bits;
    return bits;
  }
  // From where a row is, or 0. lanes: of the row; lane: among them.
  __device__ __forceinline__ void load(const T* row, bool there, int width, int lane, int lanes) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int column = (p * lanes + lane) * kElements;
      parts[p] = make_uint4(0, 0, 0, 0);
      if (there && column < width) parts[p] = *reinterpret_cast<const uint4*>(row + column);
    }
  }
  __device__ __forceinline__ float at(int part, int element) const {
    return static_cast<float>(reinterpret_cast<const T*>(&parts[part])[element]);
  }
};
struct BlockRow {
  unsigned of_head;
  int64_t token;
  int lane;
};
__device__ __forceinline__ BlockRow block_row(unsigned token_blocks, int lanes_bits) {
  const int tid = static_cast<int>(threadIdx.x);
  return {blockIdx.x / token_blocks,
          static_cast<int64_t>(blockIdx.x % token_blocks) * (kThreads >> lanes_bits) + (tid >> lanes_bits),
          tid & ((1 << lanes_bits) - 1)};
}
// 0: too many for a launch.
int64_t token_blocks_of(int64_t of_heads, int64_t tokens, int lanes_bits) {
  const int64_t blocks = ceil_div(tokens, int64_t{kThreads >> lanes_bits});
  return blocks * of_heads <= INT32_MAX ? blocks : 0;
}

// Rows of query and of key that one launch takes, those of query first.
template <class Rows>
struct QueryAndKey {
  Rows query, key;

  // Of which an index over both is; the index becomes that of its own rows.
  template <class Index>
  __device__ __forceinline__ const Rows& of(Index& index, Index queries) const {
    if (index < queries) return query;
    index -= queries;
    return key;
  }
};

// 1 / max(|row|, 1e-12).
struct UnitRows {
  const void* x;
  Strides strides;
  int64_t heads;
  float* out;  // [B,heads,N]
};
// Many parts a lane: what it does once a row, shuffles and a root, is more than what it does for a part.
template <class T>
using UnitParts = RowParts<T, 4>;
template <class T>
__global__ void __launch_bounds__(kThreads)
    UnitFactorOfAlignedKernel(const __grid_constant__ QueryAndKey<UnitRows> both, unsigned query_heads, int64_t tokens,
                              int width, unsigned token_blocks, int lanes_bits) {
  using Parts = UnitParts<T>;
  BlockRow at = block_row(token_blocks, lanes_bits);
  const UnitRows& of = both.of(at.of_head, query_heads);
  const bool there = at.token < tokens;
  const unsigned heads = static_cast<unsigned>(of.heads);
  const int lanes = 1 << lanes_bits;
  const T* const x = static_cast<const T*>(of.x) + offset_of({at.of_head / heads, at.of_head % heads, at.token}, of.strides);
  Parts row;
  row.load(x, there, width, at.lane, lanes);
  float top = 0.0f;
#pragma unroll
  for (int p = 0; p < Parts::kParts; ++p)
#pragma unroll
    for (int i = 0; i < Parts::kElements; ++i) top = fmaxf(top, fabsf(row.at(p, i)));
  for (int offset = lanes / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
  // Scaled by a power of two, so that squares neither overflow nor vanish.
  int exponent = static_cast<int>(__float_as_uint(top) >> 23) - 127;
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  const float scale = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < Parts::kParts; ++p)
#pragma unroll
    for (int i = 0; i < Parts::kElements; ++i) {
      const float scaled = row.at(p, i) * scale;
      sum += scaled * scaled;
    }
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const float norm = sqrtf(sum) * __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  if (there && at.lane == 0)
    of.out[static_cast<int64_t>(at.of_head) * tokens + at.token] = 1.0f / (norm < kUnitRowEps ? kUnitRowEps : norm);
}
template <class T>
__global__ void __launch_bounds__(kThreads)
    UnitFactorKernel(const __grid_constant__ QueryAndKey<UnitRows> both, int64_t batch, int64_t tokens, int64_t width) {
  int64_t index = row_index();
  const UnitRows& of = both.of(index, batch * both.query.heads * tokens);
  if (index >= batch * of.heads * tokens) return;
  const T* row = static_cast<const T*>(of.x) + offset_of(row_at(index, of.heads, tokens), of.strides);
  // Scaled by the largest element, so that squares neither overflow nor vanish.
  float top = 0.0f;
  for (int64_t d = threadIdx.x % 32; d < width; d += 32) top = fmaxf(top, fabsf(static_cast<float>(row[d])));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
  float sum = 0.0f;
  const float divisor = top > 0.0f ? top : 1.0f;  // no element but zeros and NaN: the norm is 0 or NaN
  for (int64_t d = threadIdx.x % 32; d < width; d += 32) {
    const float scaled = static_cast<float>(row[d]) / divisor;
    sum += scaled * scaled;
  }
  const float norm = top * sqrtf(warp_sum(sum));
  if (threadIdx.x % 32 == 0) of.out[index] = 1.0f / (norm < kUnitRowEps ? kUnitRowEps : norm);
}

// Of the values' columns: those of the first part (kChunkPartWidth), and those of the second, if there are any.
constexpr int kValueParts = kChunkMaxWidth / kChunkPartWidth;
__host__ __device__ __forceinline__ bool rest_in_parts(const Inputs& in) { return in.value_dim > kChunkPartWidth; }

// 1 / g_i with |g_i| held, and r_i = o_i · grad_o_i / g_i, or 0 where it is held: [rows], and behind it that of each part of the
// columns, if there are several. dots: o_i · grad_o_i of each.
__device__ __forceinline__ void put_weights(const GradArgs& args, const Row& row, int64_t index,
                                            const float (&dots)[kValueParts], float* inverse, float* rest) {
  const float eps = args.in.eps, g = args.normalizer[offset_of(row, args.in.normalizer_strides)];
  const bool held = fabsf(g) < eps;
  const float divisor = held ? (g < 0.0f ? -eps : eps) : g;
  inverse[index] = 1.0f / divisor;
  rest[index] = held ? 0.0f : (dots[0] + dots[1]) / divisor;
  if (!rest_in_parts(args.in)) return;
  const int64_t rows = args.in.batch * args.in.heads * args.in.tokens;
  for (int part = 0; part < kValueParts; ++part) rest[(1 + part) * rows + index] = held ? 0.0f : dots[part] / divisor;
}

template <class T>
__global__ void __launch_bounds__(kThreads) WeightKernel(const __grid_constant__ GradArgs args, float* inverse, float* rest) {
  const Inputs& in = args.in;
  const int64_t index = row_index();
  if (index >= in.batch * in.heads * in.tokens) return;
  const Row row = row_at(index, in.heads, in.tokens);
  const T* output = static_cast<const T*>(args.output) + offset_of(row, in.output_strides);
  const T* grad = static_cast<const T*>(args.grad_output) + offset_of(row, in.output_strides);
  float dots[kValueParts] = {};
  for (int64_t d = threadIdx.x % 32; d < in.value_dim; d += 32) {
    const float product = static_cast<float>(output[d]) * static_cast<float>(grad[d]);
    dots[0] += d < kChunkPartWidth ? product : 0.0f;
    dots[1] += d < kChunkPartWidth ? 0.0f : product;
  }
  for (float& dot : dots) dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) put_weights(args, row, index, dots, inverse, rest);
}

// The same for rows whose parts of 16 bytes are aligned: some lanes a row, all loads of two rows on their way at once.
// CTAs: (batch row and head, tokens).
constexpr int kWeightLanes = 8, kWeightRows = 2, kWeightTokens = kThreads / kWeightLanes * kWeightRows;
template <class T>
__global__ void __launch_bounds__(kThreads)
    WeightOfAlignedKernel(const __grid_constant__ GradArgs args, unsigned token_blocks, float* inverse, float* rest) {
  constexpr int kElements = 16 / sizeof(T), kParts = 2;
  static_assert(kChunkPartWidth % (kParts * kWeightLanes * kElements) == 0, "what is loaded at once is of one part");
  const Inputs& in = args.in;
  const unsigned of_head = blockIdx.x / token_blocks;
  const int64_t batch = of_head / static_cast<unsigned>(in.heads), head = of_head % static_cast<unsigned>(in.heads);
  const int64_t first = static_cast<int64_t>(blockIdx.x % token_blocks) * kWeightTokens + threadIdx.x / kWeightLanes;
  const int lane = threadIdx.x % kWeightLanes;
  float dots[kWeightRows][kValueParts] = {};
  for (int64_t d = lane * kElements; d < in.value_dim; d += kParts * kWeightLanes * kElements) {
    uint4 output[kWeightRows][kParts] = {}, grad[kWeightRows][kParts] = {};
#pragma unroll
    for (int r = 0; r < kWeightRows; ++r)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int64_t token = first + r * (kThreads / kWeightLanes), at = d + part * kWeightLanes * kElements;
        if (token >= in.tokens || at >= in.value_dim) continue;
        const int64_t offset = offset_of({batch, head, token}, in.output_strides) + at;
        output[r][part] = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.output) + offset);
        grad[r][part] = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.grad_output) + offset);
      }
#pragma unroll
    for (int r = 0; r < kWeightRows; ++r)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const T* const o = reinterpret_cast<const T*>(&output[r][part]);
        const T* const g = reinterpret_cast<const T*>(&grad[r][part]);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kElements; ++i) dot += static_cast<float>(o[i]) * static_cast<float>(g[i]);
        dots[r][0] += d < kChunkPartWidth ? dot : 0.0f;
        dots[r][1] += d < kChunkPartWidth ? 0.0f : dot;
      }
  }
#pragma unroll
  for (int r = 0; r < kWeightRows; ++r) {
#pragma unroll
    for (int offset = kWeightLanes / 2; offset > 0; offset /= 2)
      for (float& dot : dots[r]) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    const int64_t token = first + r * (kThreads / kWeightLanes);
    if (lane == 0 && token < in.tokens)
      put_weights(args, {batch, head, token}, static_cast<int64_t>(of_head) * in.tokens + token, dots[r], inverse, rest);
  }
}

template <class T>
int find_weights(const GradArgs& args, float* inverse, float* rest, cudaStream_t stream) {
  const Inputs& in = args.in;
  const int64_t token_blocks = ceil_div(in.tokens, kWeightTokens), ctas = token_blocks * in.batch * in.heads;
  if (parts_aligned<T>(args.output, in.output_strides, in.value_dim) &&
      parts_aligned<T>(args.grad_output, in.output_strides, in.value_dim) && ctas <= INT32_MAX) {
    WeightOfAlignedKernel<T>
        <<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args, static_cast<unsigned>(token_blocks), inverse, rest);
    return cudaGetLastError();
  }
  WeightKernel<T><<<row_blocks(in.batch * in.heads * in.tokens), kThreads, 0, stream>>>(args, inverse, rest);
  return cudaGetLastError();
}

// From the gradient of a row of unit length to that of the row it was made from: (dy - y (y·dy)) / |x|.
struct ProjectedRows {
  const void* x;
  void* grad;
  Strides strides;
  int64_t heads;
  const float *units, *dots;  // [B,heads,N]: 1 / |x|; [slices][B,heads,N]: x · dy over *times
  int slices;
};
// 1 / |x| and what x is multiplied by. rows: of all batch rows and heads.
__device__ __forceinline__ float2 projection_of(const ProjectedRows& of, const float* times, int64_t index, int64_t rows) {
  const float unit = of.units[index];
  float dot = 0.0f;
  for (int s = 0; s < of.slices; ++s) dot += of.dots[s * rows + index];
  if (times != nullptr) dot *= *times;
  return make_float2(unit, unit >= 1.0f / kUnitRowEps ? 0.0f : dot * unit * unit);
}

template <class T>
using ProjectedParts = RowParts<T, sizeof(T) / 2>;
template <class T>
__global__ void __launch_bounds__(kThreads)
    ProjectAlignedKernel(const __grid_constant__ QueryAndKey<ProjectedRows> both, unsigned query_heads, int64_t batch,
                         int64_t tokens, int width, unsigned token_blocks, int lanes_bits, const float* times) {
  using Parts = ProjectedParts<T>;
  BlockRow at = block_row(token_blocks, lanes_bits);
  const ProjectedRows& of = both.of(at.of_head, query_heads);
  if (at.token >= tokens) return;
  const unsigned heads = static_cast<unsigned>(of.heads);
  const int64_t offset = offset_of({at.of_head / heads, at.of_head % heads, at.token}, of.strides);
  const int lanes = 1 << lanes_bits;
  T* const grad = static_cast<T*>(of.grad) + offset;
  Parts row, to;
  row.load(static_cast<const T*>(of.x) + offset, true, width, at.lane, lanes);
  to.load(grad, true, width, at.lane, lanes);
  const int64_t index = static_cast<int64_t>(at.of_head) * tokens + at.token;
  const float2 by = projection_of(of, times, index, batch * of.heads * tokens);
#pragma unroll
  for (int p = 0; p < Parts::kParts; ++p) {
    alignas(16) T result[Parts::kElements];
#pragma unroll
    for (int i = 0; i < Parts::kElements; ++i) result[i] = static_cast<T>(by.x * (to.at(p, i) - by.y * row.at(p, i)));
    const int column = (p * lanes + at.lane) * Parts::kElements;
    if (column < width) *reinterpret_cast<uint4*>(grad + column) = *reinterpret_cast<const uint4*>(result);
  }
}
template <class T>
__global__ void __launch_bounds__(kThreads) ProjectKernel(const __grid_constant__ QueryAndKey<ProjectedRows> both,
                                                          int64_t batch, int64_t tokens, int64_t width, const float* times) {
  int64_t index = row_index();
  const ProjectedRows& of = both.of(index, batch * both.query.heads * tokens);
  const int64_t rows = batch * of.heads * tokens;
  if (index >= rows) return;
  const int64_t at = offset_of(row_at(index, of.heads, tokens), of.strides);
  const T* const x = static_cast<const T*>(of.x) + at;
  T* const grad = static_cast<T*>(of.grad) + at;
  const float2 by = projection_of(of, times, index, rows);
  for (int64_t d = threadIdx.x % 32; d < width; d += 32)
    grad[d] = static_cast<T>(by.x * (static_cast<float>(grad[d]) - by.y * static_cast<float>(x[d])));
}

template <class T>
int project(const QueryAndKey<ProjectedRows>& both, const Inputs& in, const float* times, cudaStream_t stream) {
  const int64_t of_heads = in.batch * (in.heads + in.kv_heads);
  const int lanes_bits = ProjectedParts<T>::lanes_bits(in.dim);
  const int64_t token_blocks = token_blocks_of(of_heads, in.tokens, lanes_bits);
  bool aligned = token_blocks > 0 && in.dim <= kMaxRowWidth;
  for (const ProjectedRows* of : {&both.query, &both.key})
    aligned = aligned && parts_aligned<T>(of->x, of->strides, in.dim) && parts_aligned<T>(of->grad, of->strides, in.dim);
  if (aligned)
    ProjectAlignedKernel<T><<<static_cast<unsigned>(token_blocks * of_heads), kThreads, 0, stream>>>(
        both, static_cast<unsigned>(in.batch * in.heads), in.batch, in.tokens, static_cast<int>(in.dim),
        static_cast<unsigned>(token_blocks), lanes_bits, times);
  else ProjectKernel<T><<<row_blocks(of_heads * in.tokens), kThreads, 0, stream>>>(both, in.batch, in.tokens, in.dim, times);
  return cudaGetLastError();
}

// Σ row sums and Σ dots, each over its rows, in parts and then whole.
struct CoefficientSums {
  const float *row_sums, *dots, *units;  // [rows], [slices][rows], [rows] or null
  int64_t rows;
  int slices;
};
constexpr int kSumBlocks = 528;

__global__ void __launch_bounds__(kThreads) CoefficientPartsKernel(CoefficientSums sums, double* parts) {
  __shared__ double shared[kThreads];
  double a = 0.0, b = 0.0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < sums.rows; i += kSumBlocks * kThreads) {
    a += sums.row_sums[i];
    float dot = 0.0f;
    for (int s = 0; s < sums.slices; ++s) dot += sums.dots[s * sums.rows + i];
    b += static_cast<double>(dot) * (sums.units != nullptr ? sums.units[i] : 1.0f);
  }
  a = block_sum<kThreads>(a, shared);
  b = block_sum<kThreads>(b, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = a, parts[kSumBlocks + blockIdx.x] = b;
}
__global__ void __launch_bounds__(kThreads) CoefficientTotalKernel(const double* parts, float* out) {
  __shared__ double shared[kThreads];
  for (int i = 0; i < 2; ++i) {
    double sum = 0.0;
    for (int part = threadIdx.x; part < kSumBlocks; part += kThreads) sum += parts[i * kSumBlocks + part];
    sum = block_sum<kThreads>(sum, shared);
    if (threadIdx.x == 0) out[i] = static_cast<float>(sum);
  }
}

__global__ void CountKernel(const int32_t* before, int32_t* after, int64_t batch, int64_t tokens) {
  for (int64_t b = threadIdx.x; b < batch; b += blockDim.x) {
    const int64_t count = (before != nullptr ? before[b] : 0) + tokens;
    after[b] = static_cast<int32_t>(count < kMaxCount ? count : kMaxCount);
  }
}

// Of query, of key or of both; null: not asked for.
int unit_factors(const Inputs& in, float* of_query, float* of_key, cudaStream_t stream) {
  const QueryAndKey<UnitRows> both = {{in.query, in.query_strides, of_query != nullptr ? in.heads : 0, of_query},
                                      {in.key, in.key_strides, of_key != nullptr ? in.kv_heads : 0, of_key}};
  const int64_t of_heads = in.batch * (both.query.heads + both.key.heads);
  return with_type(in.dtype, [&](auto type) -> int {
    using T = decltype(type);
    const int lanes_bits = UnitParts<T>::lanes_bits(in.dim);
    const int64_t token_blocks = token_blocks_of(of_heads, in.tokens, lanes_bits);
    bool aligned = token_blocks > 0 && in.dim <= kMaxRowWidth;
    for (const UnitRows* of : {&both.query, &both.key})
      aligned = aligned && (of->heads == 0 || parts_aligned<T>(of->x, of->strides, in.dim));
    if (aligned)
      UnitFactorOfAlignedKernel<T><<<static_cast<unsigned>(token_blocks * of_heads), kThreads, 0, stream>>>(
          both, static_cast<unsigned>(in.batch * both.query.heads), in.tokens, static_cast<int>(in.dim),
          static_cast<unsigned>(token_blocks), lanes_bits);
    else UnitFactorKernel<T><<<row_blocks(of_heads * in.tokens), kThreads, 0, stream>>>(both, in.batch, in.tokens, in.dim);
    return cudaGetLastError();
  });
}

// A factor a row of [B,heads,N], contiguous.
ChunkFactor row_factor(const float* data, int64_t heads, int64_t tokens, const float* times = nullptr, float scale = 1.0f) {
  return {data, heads * tokens, tokens, 1, scale, times};
}

// What the four scans have in common.
ChunkScan scan_of(const Inputs& in) {
  ChunkScan scan = {};
  scan.dtype = in.dtype;
  scan.causal = in.causal;
  scan.rank1 = true;
  scan.eps = in.eps;
  scan.batch = scan.requests = scan.state_rows = in.batch;
  scan.tokens = in.tokens;
  scan.x_factor = scan.x_rank1 = scan.y_factor = scan.y_rank1 = scan.z_factor = row_factor(nullptr, 0, 0);
  scan.x_group = scan.y_group = 1;
  return scan;
}

}  // namespace

int launch_forward(const Args& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  if (step_fits(in)) return launch_step(args, target, ws);
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const float* const a = in.coefficients;
  const float* const b = in.coefficients != nullptr ? in.coefficients + 1 : nullptr;
  float* const query_units = ws.scratch<float>(in.normalize_qk ? in.batch * in.heads * in.tokens : 0);
  float* const key_units = ws.scratch<float>(in.normalize_qk ? in.batch * in.kv_heads * in.tokens : 0);

  ChunkScan scan = scan_of(in);
  scan.row_sums = scan.divide = true;
  scan.halves_add = in.normalize_qk;  // no score is below a - b, and a = b = 1 as a rule
  scan.heads = static_cast<int32_t>(in.heads);
  scan.x_group = static_cast<int32_t>(in.heads / in.kv_heads);
  scan.x = chunk_tensor(in.query, in.query_strides, in.dim);
  scan.y = chunk_tensor(in.key, in.key_strides, in.dim);
  scan.z = chunk_tensor(in.value, in.value_strides, in.value_dim);
  scan.out = args.output;
  scan.out_strides = chunk_tensor(nullptr, in.output_strides, in.value_dim);
  scan.x_factor = row_factor(in.normalize_qk ? query_units : nullptr, in.heads, in.tokens, b);
  scan.x_rank1.times = a;
  scan.y_factor = row_factor(in.normalize_qk ? key_units : nullptr, in.kv_heads, in.tokens);
  scan.row_sum = args.normalizer;
  scan.sum_batch = in.normalizer_strides.batch;
  scan.sum_head = in.normalizer_strides.head;
  scan.sum_token = in.normalizer_strides.token;
  // The kernels only read `initial`.
  scan.initial = {const_cast<float*>(args.initial_state),
                  in.value_dim,
                  1,
                  in.dim * in.value_dim,
                  const_cast<float*>(args.initial_key_sum),
                  const_cast<float*>(args.initial_value_sum),
                  const_cast<int32_t*>(args.initial_count)};
  scan.last = {args.final_state, in.value_dim, 1, in.dim * in.value_dim, args.final_key_sum, args.final_value_sum, nullptr};
  scan.carried_in_place = args.carries_state;
  if (!ws.counting() && in.normalize_qk && in.batch * in.tokens > 0) {
    // After one launch for both the scan of 4 x 16 heads of 64 and 4,096 tokens takes 20 µs longer on an H100.
    int failed = unit_factors(in, query_units, nullptr, stream);
    if (failed == cudaSuccess) failed = unit_factors(in, nullptr, key_units, stream);
    if (failed != cudaSuccess) return failed;
  }
  const int failed = chunk_scan(scan, target, ws);
  if (failed != cudaSuccess || ws.counting() || args.final_count == nullptr || in.batch == 0) return failed;
  if (in.tokens == 0) {
    const auto keep = [&](const float* from, float* to, int64_t floats) -> cudaError_t {
      const size_t bytes = sizeof(float) * static_cast<size_t>(in.batch * in.kv_heads * floats);
      if (to == from) return cudaSuccess;
      return from != nullptr ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)
                             : cudaMemsetAsync(to, 0, bytes, stream);
    };
    cudaError_t error = keep(args.initial_state, args.final_state, in.dim * in.value_dim);
    if (error == cudaSuccess) error = keep(args.initial_key_sum, args.final_key_sum, in.dim);
    if (error == cudaSuccess) error = keep(args.initial_value_sum, args.final_value_sum, in.value_dim);
    if (error != cudaSuccess) return error;
  }
  CountKernel<<<1, kThreads, 0, stream>>>(args.initial_count, args.final_count, in.batch, in.tokens);
  return cudaGetLastError();
}

namespace {

// What the scans take and leave besides the call's own tensors.
struct GradRows {
  int64_t query_rows, key_rows;    // of [B,heads,N], [B,kv_heads,N]
  float *inverse, *rest;           // find_weights': of the output's rows
  float *query_units, *key_units;  // factors to unit length; not there without normalize_qk
  float* row_sums;                 // of scores, for the coefficients
  double* parts;                   // of the coefficients' gradients

  GradRows(const GradArgs& args, Workspace& ws) {
    const Inputs& in = args.in;
    query_rows = in.batch * in.heads * in.tokens, key_rows = in.batch * in.kv_heads * in.tokens;
    inverse = ws.scratch<float>(query_rows);
    rest = ws.scratch<float>(rest_in_parts(in) ? (1 + kValueParts) * query_rows : query_rows);
    query_units = ws.scratch<float>(in.normalize_qk ? query_rows : 0);
    key_units = ws.scratch<float>(in.normalize_qk ? key_rows : 0);
    row_sums = ws.scratch<float>(args.wants_grad_coefficients ? query_rows : 0);
    parts = ws.scratch<double>(args.wants_grad_coefficients ? 2 * kSumBlocks : 0);
  }

  ChunkFactor weight(const Inputs& in) const { return row_factor(inverse, in.heads, in.tokens); }
  ChunkFactor minus_rest(const Inputs& in) const { return row_factor(rest, in.heads, in.tokens, nullptr, -1.0f); }
  ChunkFactor query_unit(const Inputs& in) const {
    return row_factor(in.normalize_qk ? query_units : nullptr, in.heads, in.tokens);
  }
  ChunkFactor key_unit(const Inputs& in) const {
    return row_factor(in.normalize_qk ? key_units : nullptr, in.kv_heads, in.tokens);
  }
};

ChunkScan query_scan(const GradArgs& args, const GradRows& rows, const float* b, Workspace& ws) {
  const Inputs& in = args.in;
  const ChunkTensor query = chunk_tensor(in.query, in.query_strides, in.dim);
  ChunkScan scan = scan_of(in);
  scan.row_sums = args.wants_grad_coefficients;
  scan.heads = static_cast<int32_t>(in.heads);
  scan.x_group = static_cast<int32_t>(in.heads / in.kv_heads);
  scan.x = chunk_tensor(args.grad_output, in.output_strides, in.value_dim);
  scan.y = chunk_tensor(in.value, in.value_strides, in.value_dim);
  scan.z = chunk_tensor(in.key, in.key_strides, in.dim);
  scan.out = args.grad_query;
  scan.out_strides = query;
  scan.out_times = b;
  scan.x_factor = rows.weight(in);
  scan.x_rank1 = rows.minus_rest(in);
  scan.rank1_parts = rest_in_parts(in) ? rows.query_rows : 0;
  scan.z_factor = rows.key_unit(in);
  if (args.wants_grad_coefficients) {
    scan.row_sum = rows.row_sums;
    scan.sum_batch = in.heads * in.tokens;
    scan.sum_head = in.tokens;
    scan.sum_token = 1;
  }
  if (args.wants_grad_coefficients || in.normalize_qk) {
    scan.source = query;
    scan.row_dot = ws.scratch<float>(chunk_scan_slices(scan) * rows.query_rows);
  }
  return scan;
}

ChunkScan key_scan(const GradArgs& args, const GradRows& rows, const float* b, Workspace& ws) {
  const Inputs& in = args.in;
  const ChunkTensor key = chunk_tensor(in.key, in.key_strides, in.dim);
  ChunkScan scan = scan_of(in);
  scan.reverse = true;
  scan.heads = static_cast<int32_t>(in.kv_heads);
  scan.y_group = static_cast<int32_t>(in.heads / in.kv_heads);
  scan.x = chunk_tensor(in.value, in.value_strides, in.value_dim);
  scan.y = chunk_tensor(args.grad_output, in.output_strides, in.value_dim);
  scan.z = chunk_tensor(in.query, in.query_strides, in.dim);
  scan.out = args.grad_key;
  scan.out_strides = key;
  scan.out_times = b;
  scan.y_factor = rows.weight(in);
  scan.y_rank1 = rows.minus_rest(in);
  scan.rank1_parts = rest_in_parts(in) ? rows.query_rows : 0;
  scan.z_factor = rows.query_unit(in);
  if (in.normalize_qk) {
    scan.source = key;
    scan.row_dot = ws.scratch<float>(chunk_scan_slices(scan) * rows.key_rows);
  }
  return scan;
}

ChunkScan value_scan(const GradArgs& args, const GradRows& rows, const float* a, const float* b) {
  const Inputs& in = args.in;
  ChunkScan scan = scan_of(in);
  scan.reverse = true;
  scan.heads = static_cast<int32_t>(in.kv_heads);
  scan.y_group = static_cast<int32_t>(in.heads / in.kv_heads);
  scan.x = chunk_tensor(in.key, in.key_strides, in.dim);
  scan.y = chunk_tensor(in.query, in.query_strides, in.dim);
  scan.z = chunk_tensor(args.grad_output, in.output_strides, in.value_dim);
  scan.out = args.grad_value;
  scan.out_strides = chunk_tensor(in.value, in.value_strides, in.value_dim);
  scan.x_factor = rows.key_unit(in);
  scan.x_factor.times = b;
  scan.x_rank1.times = a;
  scan.y_factor = rows.query_unit(in);
  scan.z_factor = rows.weight(in);
  return scan;
}

}  // namespace

int launch_grad(const GradArgs& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const float* const a = in.coefficients;
  const float* const b = in.coefficients != nullptr ? in.coefficients + 1 : nullptr;
  const GradRows rows(args, ws);
  const ChunkScan of_query = query_scan(args, rows, b, ws), of_key = key_scan(args, rows, b, ws);
  const ChunkScan of_value = value_scan(args, rows, a, b);

  const bool empty = in.batch * in.tokens == 0;
  if (!ws.counting() && !empty) {
    int failed =
        with_type(in.dtype, [&](auto type) { return find_weights<decltype(type)>(args, rows.inverse, rows.rest, stream); });
    if (failed == cudaSuccess && in.normalize_qk) failed = unit_factors(in, rows.query_units, rows.key_units, stream);
    if (failed != cudaSuccess) return failed;
  }
  const ChunkScan scans[] = {of_query, of_key, of_value};
  const int failed = chunk_scans(scans, 3, target, ws);
  if (failed != cudaSuccess) return failed;
  if (ws.counting()) return cudaSuccess;
  if (in.normalize_qk && !empty) {
    const QueryAndKey<ProjectedRows> both = {
        {in.query, args.grad_query, in.query_strides, in.heads, rows.query_units, of_query.row_dot,
         chunk_scan_slices(of_query)},
        {in.key, args.grad_key, in.key_strides, in.kv_heads, rows.key_units, of_key.row_dot, chunk_scan_slices(of_key)}};
    const int failed = with_type(in.dtype, [&](auto type) { return project<decltype(type)>(both, in, b, stream); });
    if (failed != cudaSuccess) return failed;
  }
  if (!args.wants_grad_coefficients) return cudaSuccess;
  const CoefficientSums sums = {rows.row_sums, of_query.row_dot, in.normalize_qk ? rows.query_units : nullptr,
                                empty ? 0 : rows.query_rows, chunk_scan_slices(of_query)};
  CoefficientPartsKernel<<<kSumBlocks, kThreads, 0, stream>>>(sums, rows.parts);
  CoefficientTotalKernel<<<1, kThreads, 0, stream>>>(rows.parts, args.grad_coefficients);
  return cudaGetLastError();
}

}  // namespace leanfleet::normalized_linear_attention
