// row_sums.h: three passes. A warp has a row at once, each lane eight columns of it.
#include "core/row_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/chunk_scan.cuh"
#include "core/cuda_target.h"
#include "core/integers.h"
#include "core/op.h"

namespace leanfleet {

namespace {

using chunk::request_after;
using chunk::request_tokens;
using chunk::Span;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = kChunkMaxWidth / 32, kRowsAtOnce = 4;
constexpr int kMostWarpTokens = 32, kLeastWarpTokens = 4;

struct RowSums {
  ChunkScan scan;
  int32_t segments, warp_tokens;  // tokens are cut in segments of kWarps * warp_tokens
  bool aligned;                   // columns of a lane are 16 bytes that begin at a multiple of as many
  float* before;                  // [B,y heads,segments,K]: a segment's own sum of y, then that of what is before it
  int32_t* begins;                // [B,y heads,segments]: whether a request begins in it, at which the sum starts anew
  float* first;                   // [requests,y heads,K]: the sums that requests begin with
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

  __device__ __forceinline__ const T* row(const ChunkTensor& x, int head, int token) const {
    return static_cast<const T*>(x.data) + batch * x.batch + head * x.head + token * x.token + kColumns * lane;
  }
  // 0 where nothing is.
  __device__ __forceinline__ uint4 load(const T* from) const {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (columns == kColumns && of.aligned) {
      bits = *reinterpret_cast<const uint4*>(from);
    } else {
      alignas(16) T parts[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) parts[i] = i < columns ? from[i] : T(0.0f);
      bits = *reinterpret_cast<const uint4*>(parts);
    }
    return bits;
  }
  static __device__ __forceinline__ float at(const uint4& row, int i) {
    return static_cast<float>(reinterpret_cast<const T*>(&row)[i]);
  }
  __device__ __forceinline__ float factor(const ChunkFactor& factor, int head, int token) const {
    float x = factor.times != nullptr ? factor.scale * *factor.times : factor.scale;
    if (factor.data != nullptr) x *= factor.data[batch * factor.batch + head * factor.head + token * factor.token];
    return x;
  }
  __device__ __forceinline__ int64_t state_row(int request) const {
    if (scan.state_index == nullptr) return request;
    const int64_t row = scan.state_index[request];
    return row >= 0 && row < scan.state_rows ? row : -1;
  }
  __device__ __forceinline__ int request_of(int token) const {
    return scan.cu_seqlens == nullptr ? batch : request_after(scan, token);
  }
  __device__ __forceinline__ Span tokens_of(int request) const {
    return scan.cu_seqlens == nullptr ? Span{0, static_cast<int>(scan.tokens)} : request_tokens(scan, request);
  }
  __device__ __forceinline__ float* columns_of(float* sums, int64_t entry) const {
    return sums + entry * scan.y.width + kColumns * lane;
  }
  __device__ __forceinline__ int64_t first_entry(int request) const { return static_cast<int64_t>(request) * y_heads + y_head; }

  // Adds the rows of y of tokens begin .. end.
  __device__ __forceinline__ void add(float (&sum)[kColumns], int begin, int end) const {
    const int head = y_head / scan.y_share;
#pragma unroll 1
    for (int token = begin; token < end; token += kRowsAtOnce) {
      uint4 rows[kRowsAtOnce];
      float factors[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        rows[r] = token + r < end ? load(row(scan.y, head, token + r)) : make_uint4(0, 0, 0, 0);
        factors[r] = token + r < end ? factor(scan.y_factor, y_head, token + r) : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
        if (token + r < end)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) sum[i] += factors[r] * at(rows[r], i);
    }
  }

  // Calls body(request, its tokens, which of them are in begin .. end) for the requests that have some there.
  template <class Body>
  __device__ __forceinline__ void for_requests(int begin, int end, Body&& body) const {
    for (int token = begin, request = begin < end ? request_of(begin) : 0; token < end; ++request) {
      if (scan.cu_seqlens != nullptr && request >= scan.requests) return;
      const Span all = tokens_of(request), here = {token > all.begin ? token : all.begin, end < all.end ? end : all.end};
      if (here.begin >= here.end) {
        if (all.begin >= end) return;
        continue;
      }
      body(request, all, here);
      token = here.end;
    }
  }

  // The sum of a warp's tokens since the last request that begins among them; whether one does.
  __device__ __forceinline__ bool sum_up(float (&sum)[kColumns], int begin, int end, bool first_sums) const {
    bool begins = false;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] = 0.0f;
    for_requests(begin, end, [&](int request, Span all, Span here) {
      if (here.begin == all.begin) {
        begins = true;
        const int64_t from = first_sums ? state_row(request) : -1;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          sum[i] = 0.0f;
          if (i >= columns) continue;
          if (first_sums && from >= 0 && scan.initial.y_sum != nullptr)
            sum[i] = columns_of(scan.initial.y_sum, from * y_heads + y_head)[i];
          float* const kept = columns_of(of.first, first_entry(request)) + i;
          if (first_sums) *kept = sum[i];
          else sum[i] = *kept;
        }
      }
      add(sum, here.begin, here.end);
    });
    return begins;
  }
};

// A warp's tokens.
__device__ __forceinline__ Span warp_tokens(const RowSums& of) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * of.warp_tokens;
  const int64_t tokens = of.scan.tokens;
  return {static_cast<int>(first < tokens ? first : tokens),
          static_cast<int>(first + of.warp_tokens < tokens ? first + of.warp_tokens : tokens)};
}

// What warps of a CTA have added up, and which of them begin anew.
struct WarpSums {
  float sum[kWarps][kChunkMaxWidth];
  bool begins[kWarps];
};

// CTAs: (segment, head of y, batch row). Each segment's own sum.
template <class T>
__global__ void __launch_bounds__(kThreads) SegmentSumKernel(const __grid_constant__ RowSums of) {
  __shared__ WarpSums shared;
  const Lane<T> lane(of);
  const Span tokens = warp_tokens(of);
  const int warp = static_cast<int>(threadIdx.x) / 32, column = static_cast<int>(threadIdx.x);
  float sum[kColumns];
  const bool begins = lane.sum_up(sum, tokens.begin, tokens.end, true);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) shared.sum[warp][kColumns * lane.lane + i] = sum[i];
  if (lane.lane == 0) shared.begins[warp] = begins;
  __syncthreads();
  const int64_t segment = (static_cast<int64_t>(lane.batch) * lane.y_heads + lane.y_head) * of.segments + blockIdx.x;
  float total = 0.0f;
  bool any = false;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    total = shared.begins[w] ? shared.sum[w][column] : total + shared.sum[w][column];
    any = any || shared.begins[w];
  }
  if (column < of.scan.y.width) of.before[segment * of.scan.y.width + column] = total;
  if (column == 0) of.begins[segment] = any;
}

// CTAs: (head of y, batch row), a thread a column. From each segment's own sum to that of what is before it.
__global__ void __launch_bounds__(kThreads) SegmentPrefixKernel(const __grid_constant__ RowSums of) {
  constexpr int kAhead = 8;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * of.segments;
  const int width = of.scan.y.width, column = static_cast<int>(threadIdx.x);
  if (column >= width) return;
  float running = 0.0f;
  for (int segment = 0; segment < of.segments; segment += kAhead) {
    float own[kAhead];
    bool begins[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool there = segment + i < of.segments;
      own[i] = there ? of.before[(first + segment + i) * width + column] : 0.0f;
      begins[i] = there && of.begins[first + segment + i] != 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (segment + i < of.segments) of.before[(first + segment + i) * width + column] = running;
      running = begins[i] ? own[i] : running + own[i];
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
__device__ __forceinline__ void put_row(const Lane<T>& lane, int x_head, int token, float dot, float count) {
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
  __shared__ WarpSums shared;
  const ChunkScan& scan = of.scan;
  const Lane<T> lane(of);
  const Span tokens = warp_tokens(of);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float sum[kColumns];
  {
    const bool begins = lane.sum_up(sum, tokens.begin, tokens.end, false);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) shared.sum[warp][kColumns * lane.lane + i] = sum[i];
    if (lane.lane == 0) shared.begins[warp] = begins;
  }
  __syncthreads();
  const int64_t segment = (static_cast<int64_t>(lane.batch) * lane.y_heads + lane.y_head) * of.segments + blockIdx.x;
  const float* const before = lane.columns_of(of.before, segment);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] = i < lane.columns ? before[i] : 0.0f;
  for (int w = 0; w < warp; ++w)
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float own = shared.sum[w][kColumns * lane.lane + i];
      sum[i] = shared.begins[w] ? own : sum[i] + own;
    }
  if (scan.cu_seqlens != nullptr) {
    // Tokens of no request are few: all rows become 0 first.
    for (int x = 0; x < scan.x_group; ++x)
      for (int token = tokens.begin + lane.lane; token < tokens.end; token += 32) {
        const int x_head = lane.y_head * scan.x_group + x;
        const int64_t row = (static_cast<int64_t>(lane.batch) * scan.heads + x_head) * scan.tokens + token;
        if (scan.row_sum != nullptr)
          scan.row_sum[lane.batch * scan.sum_batch + x_head * scan.sum_head + token * scan.sum_token] = 0.0f;
        if (of.x_factor != nullptr) of.x_factor[row] = 0.0f;
        if (of.x_rank1 != nullptr) of.x_rank1[row] = 0.0f;
      }
    __syncwarp();
  }
  const int y_rows = lane.y_head / scan.y_share;
  lane.for_requests(tokens.begin, tokens.end, [&](int request, Span all, Span here) {
    const int64_t state = lane.state_row(request);
    float rank1_before = 0.0f;
    if (scan.rank1 && scan.initial.count != nullptr && state >= 0) rank1_before = static_cast<float>(scan.initial.count[state]);
    if (here.begin == all.begin) {
      const float* const first = lane.columns_of(of.first, lane.first_entry(request));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] = i < lane.columns ? first[i] : 0.0f;
    }
#pragma unroll 1
    for (int token = here.begin; token < here.end; token += kRowsAtOnce) {
      float sums[kRowsAtOnce][kColumns];
      uint4 rows[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
        rows[r] = token + r < here.end ? lane.load(lane.row(scan.y, y_rows, token + r)) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float factor = token + r < here.end ? lane.factor(scan.y_factor, lane.y_head, token + r) : 0.0f;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (token + r < here.end) sum[i] += factor * lane.at(rows[r], i);
          sums[r][i] = sum[i];
        }
      }
#pragma unroll 1
      for (int x = 0; x < scan.x_group; ++x) {
        const int x_head = lane.y_head * scan.x_group + x, x_rows = x_head / scan.x_share;
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
          rows[r] = token + r < here.end ? lane.load(lane.row(scan.x, x_rows, token + r)) : make_uint4(0, 0, 0, 0);
        float dots[kRowsAtOnce] = {};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dots[r] += lane.at(rows[r], i) * sums[r][i];
        const float dot = sum_of_row(dots, lane.lane);
        const int own = token + lane.lane / 8;
        if (lane.lane % 8 == 0 && own < here.end) {
          const float count = rank1_before + lane.factor(scan.y_rank1, 0, 0) * static_cast<float>(own - all.begin + 1);
          put_row(lane, x_head, own, dot, count);
        }
      }
    }
    if (here.end == all.end && scan.last.y_sum != nullptr && state >= 0) {
      float* const to = lane.columns_of(scan.last.y_sum, state * lane.y_heads + lane.y_head);
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (i < lane.columns) to[i] = sum[i];
    }
  });
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
  of.begins = ws.scratch<int32_t>(scan.batch * y_heads * of.segments);
  of.first = ws.scratch<float>(scan.requests * y_heads * K);
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
