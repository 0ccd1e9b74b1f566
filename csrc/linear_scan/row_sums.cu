// row_sums.h: three passes. A warp has a row at once, each lane eight columns of it.
#include "linear_scan/row_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/cuda_target.h"
#include "core/integers.h"
#include "core/op.h"

namespace leanfleet {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = kChunkMaxWidth / 32, kRowsAtOnce = 4;
constexpr int kMostWarpTokens = 32, kLeastWarpTokens = 4;

struct RowSums {
  ChunkScan scan;
  int32_t segments, warp_tokens;  // tokens are cut in segments of kWarps * warp_tokens
  bool aligned;                   // columns of a lane are 16 bytes that begin at a multiple of as many
  float* before;                  // [B,y heads,segments,K]: a segment's own sum of y, then that of what is before it
  float *x_factor, *x_rank1;      // [B,heads,N] over the row sum; null: not asked for
};

template <class T>
struct Lane {
  const RowSums& of;
  const ChunkScan& scan;
  const int lane, batch, y_head, y_heads, columns;  // columns: that this lane has of a row, the first is 8 lane

  __device__ __forceinline__ explicit Lane(const RowSums& of)
      : of(of), scan(of.scan), lane(static_cast<int>(threadIdx.x) % 32), batch(static_cast<int>(blockIdx.z)),
        y_head(static_cast<int>(blockIdx.y)), y_heads(static_cast<int>(gridDim.y)),
        columns(clamp(scan.y.width - kColumns * lane, 0, kColumns)) {}

  __device__ __forceinline__ const T* row(const ChunkTensor& x, int head, int64_t token) const {
    return static_cast<const T*>(x.data) + batch * x.batch + head * x.head + token * x.token + kColumns * lane;
  }
  // 0 where nothing is.
  __device__ __forceinline__ uint4 load(const T* from) const {
    if (columns == kColumns && of.aligned) return *reinterpret_cast<const uint4*>(from);
    alignas(16) T parts[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) parts[i] = i < columns ? from[i] : T(0.0f);
    return *reinterpret_cast<const uint4*>(parts);
  }
  static __device__ __forceinline__ float at(const uint4& row, int i) {
    return static_cast<float>(reinterpret_cast<const T*>(&row)[i]);
  }
  __device__ __forceinline__ float factor(const ChunkFactor& factor, int head, int64_t token) const {
    float x = factor.times != nullptr ? factor.scale * *factor.times : factor.scale;
    if (factor.data != nullptr) x *= factor.data[batch * factor.batch + head * factor.head + token * factor.token];
    return x;
  }

  // Rows of tokens from `token` on, 0 from `end` on.
  __device__ __forceinline__ void load_rows(const ChunkTensor& x, int head, int64_t token, int64_t end,
                                            uint4 (&rows)[kRowsAtOnce]) const {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = token + r < end ? load(row(x, head, token + r)) : make_uint4(0, 0, 0, 0);
  }

  // Adds the rows of y of tokens begin .. end.
  __device__ __forceinline__ void add(float (&sum)[kColumns], int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int64_t token = begin; token < end; token += kRowsAtOnce) {
      uint4 rows[kRowsAtOnce];
      load_rows(scan.y, y_head / scan.y_share, token, end, rows);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (token + r >= end) break;
        const float times = factor(scan.y_factor, y_head, token + r);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[i] += times * at(rows[r], i);
      }
    }
  }
};

// A warp's tokens.
struct WarpTokens {
  int64_t begin, end;
};
__device__ __forceinline__ WarpTokens warp_tokens(const RowSums& of) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * of.warp_tokens;
  const int64_t tokens = of.scan.tokens;
  return {first < tokens ? first : tokens, first + of.warp_tokens < tokens ? first + of.warp_tokens : tokens};
}

// Leaves what each warp of a CTA adds up of its own tokens.
template <class T>
__device__ __forceinline__ void sum_warps(const Lane<T>& lane, float (&sums)[kWarps][kChunkMaxWidth]) {
  const WarpTokens tokens = warp_tokens(lane.of);
  float sum[kColumns] = {};
  lane.add(sum, tokens.begin, tokens.end);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[threadIdx.x / 32][kColumns * lane.lane + i] = sum[i];
  __syncthreads();
}

// Where a segment's sum is in `before`.
template <class T>
__device__ __forceinline__ float* sum_before(const Lane<T>& lane) {
  const int64_t segment = (static_cast<int64_t>(lane.batch) * lane.y_heads + lane.y_head) * lane.of.segments + blockIdx.x;
  return lane.of.before + segment * lane.scan.y.width;
}

// CTAs: (segment, head of y, batch row). Each segment's own sum.
template <class T>
__global__ void __launch_bounds__(kThreads) SegmentSumKernel(const __grid_constant__ RowSums of) {
  __shared__ float sums[kWarps][kChunkMaxWidth];
  const Lane<T> lane(of);
  sum_warps(lane, sums);
  const int column = static_cast<int>(threadIdx.x);
  if (column >= of.scan.y.width) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w][column];
  sum_before(lane)[column] = total;
}

// CTAs: (head of y, batch row), a thread a column. From each segment's own sum to that of what is before it.
__global__ void __launch_bounds__(kThreads) SegmentPrefixKernel(const __grid_constant__ RowSums of) {
  constexpr int kAhead = 8;
  const int64_t entry = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int width = of.scan.y.width, column = static_cast<int>(threadIdx.x);
  if (column >= width) return;
  float* const before = of.before + entry * of.segments * width + column;
  float running = of.scan.initial.y_sum != nullptr ? of.scan.initial.y_sum[entry * width + column] : 0.0f;
  for (int segment = 0; segment < of.segments; segment += kAhead) {
    float own[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      own[i] = segment + i < of.segments ? before[static_cast<int64_t>(segment + i) * width] : 0.0f;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (segment + i < of.segments) before[static_cast<int64_t>(segment + i) * width] = running;
      running += own[i];
    }
  }
}

// What each row of x adds up to over the lanes: of row lane / 8 of four.
__device__ __forceinline__ float sum_of_row(const float (&dots)[kRowsAtOnce], int lane) {
  static_assert(kRowsAtOnce == 4, "the exchanges below are for four rows");
  float pair[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool upper = lane & 16;
    pair[r] = (upper ? dots[r + 2] : dots[r]) + __shfl_xor_sync(0xffffffffu, upper ? dots[r] : dots[r + 2], 16);
  }
  const bool upper = lane & 8;
  float sum = (upper ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, upper ? pair[0] : pair[1], 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

template <class T>
__device__ __forceinline__ void put_row(const Lane<T>& lane, int x_head, int64_t token, float dot, float count) {
  const RowSums& of = lane.of;
  const ChunkScan& scan = lane.scan;
  const float factor = lane.factor(scan.x_factor, x_head, token);
  const float rank1 = scan.rank1 ? lane.factor(scan.x_rank1, x_head, token) : 0.0f;
  const float sum = factor * dot + rank1 * count;
  if (scan.row_sum != nullptr)
    scan.row_sum[lane.batch * scan.sum_batch + x_head * scan.sum_head + token * scan.sum_token] = sum;
  if (of.x_factor == nullptr) return;
  const float divisor = fabsf(sum) < scan.eps ? (sum < 0.0f ? -scan.eps : scan.eps) : sum;
  const int64_t row = (static_cast<int64_t>(lane.batch) * scan.heads + x_head) * scan.tokens + token;
  of.x_factor[row] = factor / divisor;
  if (of.x_rank1 != nullptr) of.x_rank1[row] = rank1 / divisor;
}

// CTAs as for the sums. The row sums of all heads of x that share a head of y.
template <class T>
__global__ void __launch_bounds__(kThreads) RowSumKernel(const __grid_constant__ RowSums of) {
  __shared__ float sums_of_warps[kWarps][kChunkMaxWidth];
  const ChunkScan& scan = of.scan;
  const Lane<T> lane(of);
  sum_warps(lane, sums_of_warps);
  const WarpTokens tokens = warp_tokens(of);
  const float* const before = sum_before(lane) + kColumns * lane.lane;
  float sum[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] = i < lane.columns ? before[i] : 0.0f;
  for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w)
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] += sums_of_warps[w][kColumns * lane.lane + i];
  const float counted = scan.initial.count != nullptr ? static_cast<float>(scan.initial.count[lane.batch]) : 0.0f;
#pragma unroll 1
  for (int64_t token = tokens.begin; token < tokens.end; token += kRowsAtOnce) {
    float sums[kRowsAtOnce][kColumns];
    uint4 rows[kRowsAtOnce];
    lane.load_rows(scan.y, lane.y_head / scan.y_share, token, tokens.end, rows);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const bool there = token + r < tokens.end;
      const float times = there ? lane.factor(scan.y_factor, lane.y_head, token + r) : 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (there) sum[i] += times * lane.at(rows[r], i);
        sums[r][i] = sum[i];
      }
    }
#pragma unroll 1
    for (int x = 0; x < scan.x_group; ++x) {
      const int x_head = lane.y_head * scan.x_group + x;
      lane.load_rows(scan.x, x_head / scan.x_share, token, tokens.end, rows);
      float dots[kRowsAtOnce] = {};
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dots[r] += lane.at(rows[r], i) * sums[r][i];
      const float dot = sum_of_row(dots, lane.lane);
      const int64_t own = token + lane.lane / 8;
      if (lane.lane % 8 == 0 && own < tokens.end)
        put_row(lane, x_head, own, dot, counted + lane.factor(scan.y_rank1, 0, 0) * static_cast<float>(own + 1));
    }
  }
  if (tokens.begin < tokens.end && tokens.end == scan.tokens && scan.last.y_sum != nullptr) {
    float* const to = scan.last.y_sum + (static_cast<int64_t>(lane.batch) * lane.y_heads + lane.y_head) * scan.y.width;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i < lane.columns) to[kColumns * lane.lane + i] = sum[i];
  }
}

template <class T>
cudaError_t launch(const RowSums& of, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(of.scan.heads / of.scan.x_group), rows = static_cast<unsigned>(of.scan.batch);
  const dim3 grid(static_cast<unsigned>(of.segments), heads, rows);
  SegmentSumKernel<T><<<grid, kThreads, 0, stream>>>(of);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  SegmentPrefixKernel<<<dim3(heads, rows), kThreads, 0, stream>>>(of);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  RowSumKernel<T><<<grid, kThreads, 0, stream>>>(of);
  return cudaGetLastError();
}

}  // namespace

bool row_sums_fit(const ChunkScan& scan) {
  return scan.causal && !scan.reverse && scan.log_decay == nullptr && scan.y_group == 1 && scan.y_rank1.data == nullptr &&
         scan.cu_seqlens == nullptr && scan.state_index == nullptr && (!scan.divide || scan.halves_add) &&
         scan.dtype != static_cast<int32_t>(DType::kFloat32) && scan.y.width <= kChunkMaxWidth &&
         scan.heads / scan.x_group <= 65535 && scan.batch <= 65535;
}

int take_row_sums(ChunkScan& scan, const CudaTarget& target, Workspace& ws) {
  RowSums of = {};
  const int64_t y_heads = scan.heads / scan.x_group, K = scan.y.width, rows = scan.batch * scan.heads * scan.tokens;
  of.warp_tokens = kMostWarpTokens;
  const auto segments = [&] { return ceil_div(scan.tokens, static_cast<int64_t>(kWarps) * of.warp_tokens); };
  while (of.warp_tokens > kLeastWarpTokens && scan.batch * y_heads * segments() < 4 * target.sm_count) of.warp_tokens /= 2;
  of.segments = static_cast<int32_t>(segments());
  of.before = ws.scratch<float>(scan.batch * y_heads * of.segments * K);
  of.x_factor = ws.scratch<float>(scan.divide ? rows : 0);
  of.x_rank1 = ws.scratch<float>(scan.divide && scan.rank1 ? rows : 0);
  of.scan = scan;
  if (!scan.divide) of.x_factor = of.x_rank1 = nullptr;
  if (!scan.rank1) of.x_rank1 = nullptr;
  if (scan.divide) {
    const auto divided = [&](const float* data) {
      return ChunkFactor{data, scan.heads * scan.tokens, scan.tokens, 1, 1.0f, nullptr};
    };
    scan.x_factor = divided(of.x_factor);
    if (scan.rank1) scan.x_rank1 = divided(of.x_rank1);
  }
  scan.row_sums = scan.divide = false;
  scan.row_sum = nullptr;
  scan.initial.y_sum = scan.last.y_sum = nullptr;
  scan.initial.count = nullptr;
  if (ws.counting() || rows == 0) return cudaSuccess;
  const auto aligned = [](const ChunkTensor& x) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.batch % kColumns == 0 && x.head % kColumns == 0 &&
           x.token % kColumns == 0;
  };
  of.aligned = aligned(scan.x) && aligned(scan.y);
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const bool half = scan.dtype == static_cast<int32_t>(DType::kFloat16);
  return half ? launch<__half>(of, stream) : launch<__nv_bfloat16>(of, stream);
}

}  // namespace leanfleet
