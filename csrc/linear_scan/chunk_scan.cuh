// The kernel of chunk_scan.h with mma.sync. A CTA owns the state of a head, or some of its columns, as fp32
// accumulators in registers, and walks over the tokens of a segment in chunks:
//
//   P = (X Yᵀ ⊙ D)            shared by the warps, rounded to 16 bits in shared memory
//   Oᵀ = Sᵀ Xᵀ, scaled, + Zᵀ Pᵀ   each warp 16 columns of Z: rows of the mma, so that the accumulators of Sᵀ are the
//   Sᵀ = kept Sᵀ + Z'ᵀ Y          left operand of the first product as they stand; Z' are rows scaled to the chunk's end
//
// Exponents are differences of logarithms, not positive; masks select.
#pragma once

#include <type_traits>

#include "core/integers.h"
#include "core/mma.cuh"
#include "linear_scan/chunk_scan.h"

namespace leanfleet {
namespace chunk {

using namespace tile;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLeastLog2 = -1024.0f;  // of a decay; 2^-1024 is 0 in float32

enum Pass : int { kSegmentSums, kOutputs };

// The floats of a row that depend on its token, and what follows from them for a chunk.
template <int kTokens>
struct alignas(16) RowTable {  // log2_decay is read two rows at a time
  float2 log2_decay[kTokens];  // sum from the chunk's begin, in scan order, as high and low part
  float x_factor[kTokens], x_rank1[kTokens];
  float y_factor[kTokens], y_rank1[kTokens], z_factor[kTokens];  // 0 for rows outside
  float own[kTokens];                                            // y_factor z_factor
  float from_begin[kTokens];                     // own over the decay since the chunk's begin, for chunks that are not steep
  float from_state[kTokens], from_sum[kTokens];  // of the carried sums in an output row
  float to_state[kTokens], to_z_sum[kTokens], to_y_sum[kTokens];  // of a row in the sums after the chunk
  float kept;                                                     // of the sums before the chunk
  float count;                                                    // Σ ry_j at the chunk's end
  double log2_kept;
  int unscaled;  // to_state is 1 or 0
  int steep;     // the chunk decays by more than 2^-32
};

template <class T, int kWidth_, int kWarps_>
struct Shape {
  using Plane = typename Element<T>::Plane;
  static constexpr int kPlanes = Element<T>::kPlanes;
  static constexpr int kWidth = kWidth_, kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kTokens = kPlanes == 1 ? 64 : 32;
  static constexpr int kColumns = 16 * kWarps;
  static constexpr int kWidePlane = kTokens * kWidth * 2, kNarrowPlane = kTokens * kColumns * 2;
  static constexpr int kScorePlane = kTokens * 128;
  static constexpr int kSharers = kWarps / (kTokens / 16);  // warps that share 16 rows of P
  static constexpr int kRaw = 6;                            // decay, fx, rx, fy, ry, fz
  struct Small {
    RowTable<kTokens> table;
    float raw[2][kRaw][kTokens];
    float y_sum[2][kWidth];
    float row_sums[kSharers][kTokens], row_carried[kTokens];
    float dots[kWarps][kTokens];
  };
  static int stage_bytes(bool source) { return kPlanes * (2 * kWidePlane + (source ? 2 : 1) * kNarrowPlane); }
  static int shared_bytes(int stages, bool source) {
    return 1024 + stages * stage_bytes(source) + kPlanes * kScorePlane + static_cast<int>(sizeof(Small));
  }
};

// Tokens and requests are numbered in 32 bits here; what addresses are made of has 64.
__device__ __forceinline__ int clamp_token(const ChunkScan& scan, int request) {
  return clamped_offset(scan.cu_seqlens, request, static_cast<int>(scan.tokens));
}

struct Span {
  int begin, end;
};
__device__ __forceinline__ Span request_tokens(const ChunkScan& scan, int request) {
  if (scan.cu_seqlens == nullptr) return {0, static_cast<int>(scan.tokens)};
  const int begin = clamp_token(scan, request), end = clamp_token(scan, request + 1);
  return {begin, end > begin ? end : begin};
}

// The first request that ends after `token`.
__device__ __forceinline__ int request_after(const ChunkScan& scan, int token) {
  int low = 0, high = static_cast<int>(scan.requests);
  while (low < high) {
    const int middle = (low + high) / 2;
    if (clamp_token(scan, middle + 1) > token) high = middle;
    else low = middle + 1;
  }
  return low;
}
// The last request that begins before `token`, or -1.
__device__ __forceinline__ int request_before(const ChunkScan& scan, int token) {
  int low = -1, high = static_cast<int>(scan.requests) - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (clamp_token(scan, middle) < token) low = middle;
    else high = middle - 1;
  }
  return low;
}

// What a CTA works on, step by step in scan order: pieces, which are what a segment has of a request; their chunks;
// and for each chunk the heads of y that go into it.
struct Cursor {
  Span segment, piece, request_span;
  int request, chunk;  // chunk: its first token
  int head;            // 0 .. y_group
  bool valid;

  __device__ __forceinline__ int chunk_end(int tokens) const { return piece.end - chunk > tokens ? chunk + tokens : piece.end; }
  __device__ __forceinline__ bool first_chunk(const ChunkScan& scan, int tokens) const {
    return scan.reverse ? piece.end - chunk <= tokens : chunk == piece.begin;
  }
  __device__ __forceinline__ bool last_chunk(const ChunkScan& scan, int tokens) const {
    return scan.reverse ? chunk == piece.begin : piece.end - chunk <= tokens;
  }
  __device__ __forceinline__ bool begins_request(bool reverse) const {
    return reverse ? piece.end == request_span.end : piece.begin == request_span.begin;
  }
  __device__ __forceinline__ bool ends_request(bool reverse) const {
    return reverse ? piece.begin == request_span.begin : piece.end == request_span.end;
  }
  // From `request` on, the next one that has tokens in the segment.
  __device__ __forceinline__ void find_piece(const ChunkScan& scan, int tokens) {
    for (;; request += scan.reverse ? -1 : 1) {
      valid = request >= 0 && request < scan.requests;
      if (!valid) return;
      request_span = request_tokens(scan, request);
      if (scan.reverse ? request_span.end <= segment.begin && request_span.begin < segment.begin
                       : request_span.begin >= segment.end) {
        valid = false;
        return;
      }
      piece.begin = request_span.begin > segment.begin ? request_span.begin : segment.begin;
      piece.end = request_span.end < segment.end ? request_span.end : segment.end;
      if (piece.begin < piece.end) break;
    }
    head = 0;
    chunk = scan.reverse ? piece.begin + (piece.end - piece.begin - 1) / tokens * tokens : piece.begin;
  }
  __device__ __forceinline__ void next(const ChunkScan& scan, int tokens) {
    if (++head < scan.y_group) return;
    head = 0;
    if (!last_chunk(scan, tokens)) {
      chunk += scan.reverse ? -tokens : tokens;
      return;
    }
    if (scan.cu_seqlens == nullptr) {
      valid = false;
      return;
    }
    request += scan.reverse ? -1 : 1;
    find_piece(scan, tokens);
  }
};

// scale: a power of two that brings `top` to between 2^12 and 2^13; unscale: its inverse.
__device__ __forceinline__ void power_of_two_scale(float top, float& scale, float& unscale) {
  int exponent = static_cast<int>(__float_as_uint(top) >> 23) - 127 - 12;
  exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
  scale = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  unscale = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

template <class T>
__device__ __forceinline__ float power(float x) {
  if constexpr (sizeof(T) == 2) return exp2_fast(x);
  else return exp2f(x);
}

// By a warp. Lane l has rows kRows l ... in scan order. raw(kind, row): what a row has in memory, 0: log_decay (of the
// next token if descending), 1 .. 5: x_factor, x_rank1, y_factor, y_rank1, z_factor; not called for what is absent.
template <class T, int kTokens, class Raw>
__device__ __forceinline__ void fill_table(const ChunkScan& scan, int pass, int state_head, int lane, const Cursor& at,
                                           RowTable<kTokens>& table, Raw&& raw) {
  constexpr int kRows = kTokens / 32;
  const int rows = static_cast<int>(at.chunk_end(kTokens) - at.chunk);
  double sums[kRows], total = 0.0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int position = kRows * lane + r, row = scan.reverse ? kTokens - 1 - position : position;
    const bool there = row < rows;
    float decay = 0.0f;
    if (scan.log_decay != nullptr && there) {
      const bool no_next = scan.reverse && at.chunk + row + 1 == at.request_span.end;
      if (!no_next) decay = scan.decay_per_token ? raw(0, row) : scan.log_decay[state_head];
    }
    const double log2 = static_cast<double>(decay) * 1.4426950408889634;
    total += log2 > kLeastLog2 ? log2 : kLeastLog2;
    sums[r] = total;
  }
  double before = total;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double left = __shfl_up_sync(kFullWarp, before, offset);
    if (lane >= offset) before += left;
  }
  const double end = __shfl_sync(kFullWarp, before, 31);
  before -= total;
  float count_end = 0.0f;
  bool unscaled = true;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int position = kRows * lane + r, row = scan.reverse ? kTokens - 1 - position : position;
    const bool there = row < rows;
    const double sum = before + sums[r];
    const float high = static_cast<float>(sum);
    table.log2_decay[row] = make_float2(high, static_cast<float>(sum - high));
    const float from_begin = power<T>(high), to_end = power<T>(static_cast<float>(end - sum));
    const auto factor = [&](int kind, const ChunkFactor& f) {
      float x = there ? f.scale : 0.0f;
      if (f.data != nullptr && there) x *= raw(kind, row);
      return f.times != nullptr ? x * *f.times : x;
    };
    const bool outputs = pass == kOutputs;
    const float fx = outputs ? factor(1, scan.x_factor) : 0.0f;
    const float rx = outputs && scan.rank1 ? factor(2, scan.x_rank1) : 0.0f;
    const float fy = factor(3, scan.y_factor), ry = scan.rank1 ? factor(4, scan.y_rank1) : 0.0f;
    const float fz = factor(5, scan.z_factor);
    table.x_factor[row] = fx;
    table.x_rank1[row] = rx;
    table.y_factor[row] = fy;
    table.y_rank1[row] = ry;
    table.z_factor[row] = fz;
    table.own[row] = fy * fz;
    table.from_begin[row] = fy * fz * power<T>(-high);
    table.from_state[row] = from_begin * fx;
    table.from_sum[row] = from_begin * rx;
    table.to_state[row] = to_end * fy * fz;
    table.to_z_sum[row] = to_end * ry * fz;
    table.to_y_sum[row] = to_end * fy;
    count_end += to_end * ry;
    unscaled = unscaled && (!there || to_end * fy * fz == 1.0f);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) count_end += __shfl_xor_sync(kFullWarp, count_end, offset);
  unscaled = __all_sync(kFullWarp, unscaled);
  if (lane == 0) {
    // The heads of y that follow in the same chunk add to the same sums.
    table.kept = at.head == 0 ? power<T>(static_cast<float>(end)) : 1.0f;
    table.log2_kept = at.head == 0 ? end : 0.0;
    table.count = count_end;
    table.unscaled = unscaled;
    table.steep = !(end >= -32.0);
  }
}

// Row `row` of P times a column of Z, only of the tokens that the row sees. For what is not finite; off the usual path,
// and a call, so that it stays small.
template <class Plane, int kPlanes, int kTokens, int kScorePlane, int kNarrowPlane>
__device__ __noinline__ float score_times_column(uint32_t scores, uint32_t z, int row, int of_slice, bool reverse) {
  float sum = 0.0f;
#pragma unroll 1
  for (int j = reverse ? row : 0; j < (reverse ? kTokens : row + 1); ++j) {
    const uint32_t p_at = scores + chunk_offset<kTokens>(row, j / 8) + j % 8 * 2;
    const uint32_t z_at = z + chunk_offset<kTokens>(j, of_slice / 8) + of_slice % 8 * 2;
    float p = 0.0f, value = 0.0f;
#pragma unroll 1
    for (int k = kPlanes - 1; k >= 0; --k) {
      p += unpack_one(Plane{}, load_2_bytes(p_at + k * kScorePlane));
      value += unpack_one(Plane{}, load_2_bytes(z_at + k * kNarrowPlane));
    }
    sum += p * value;
  }
  return sum;
}

struct FirstSums {
  const float *state, *y_sum, *z_sum;  // null: 0
  int64_t k_stride, v_stride;
  float count;
};
struct LastSums {
  float *state, *y_sum, *z_sum;  // null: not asked for
  int64_t k_stride, v_stride;
  float factor;      // of what is written
  float* slot_rest;  // of a slot: count, log2 of the decay, whether what comes before matters; or null
};

// A warp's 16 columns of a state, `column` and the eighth after it for this lane, as accumulators of Sᵀ.
template <int kWidth>
__device__ __forceinline__ void read_state(float (&state)[kWidth / 8][4], const FirstSums& from, int K, int V, int column,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int k = 8 * n + 2 * (lane % 4) + c % 2, v = column + c / 2 * 8;
      state[n][c] = from.state != nullptr && k < K && v < V ? from.state[k * from.k_stride + v * from.v_stride] : 0.0f;
    }
}
template <int kWidth>
__device__ __forceinline__ void write_state(const float (&state)[kWidth / 8][4], const LastSums& to, int K, int V, int column,
                                            int lane) {
  if (to.state == nullptr) return;
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int k = 8 * n + 2 * (lane % 4) + c % 2, v = column + c / 2 * 8;
      if (k < K && v < V) to.state[k * to.k_stride + v * to.v_stride] = to.factor * state[n][c];
    }
}

// The work of a CTA: segment `segment`, in scan order, of a head, and a slice of kColumns columns of Z.
template <class T, int kTokens, int kColumns>
struct Site {
  const ChunkScan& scan;
  const int pass;
  int batch, x_head, state_head, slice, segment;

  // Of the segment and slice `index` in this order, slices first.
  __device__ __forceinline__ Site(const ChunkScan& scan, int pass, unsigned index) : scan(scan), pass(pass) {
    slice = static_cast<int>(index % scan.slices);
    index /= scan.slices;
    const unsigned segments = pass == kOutputs || !scan.causal ? scan.segments : scan.segments - 1;
    segment = static_cast<int>(index % segments);
    index /= segments;
    const unsigned heads = pass == kOutputs ? scan.heads : scan.heads / scan.x_group;
    const int head = static_cast<int>(index % heads);
    batch = static_cast<int>(index / heads);
    state_head = pass == kOutputs ? head / scan.x_group : head;
    x_head = pass == kOutputs ? head : head * scan.x_group;
  }

  // Of `head` in a tensor where `share` heads have the same rows. The division alone would cost registers in hot loops.
  static __device__ __forceinline__ int shared_head(int head, int share) { return share == 1 ? head : head / share; }

  __device__ __forceinline__ T* out_row(int64_t token) const {
    return static_cast<T*>(scan.out) + batch * scan.out_strides.batch + x_head * scan.out_strides.head +
           token * scan.out_strides.token;
  }

  __device__ __forceinline__ float* slot(float* slots, int index) const {
    const int64_t heads = scan.heads / scan.x_group;
    const int64_t per_head = scan.causal ? scan.segments - 1 : scan.segments;
    return slots + ((batch * heads + state_head) * per_head + index) * scan.slot_floats;
  }

  // -1: outside the pool.
  __device__ __forceinline__ int64_t state_row(int request, const int32_t* index) const {
    if (index == nullptr) return request;
    const int64_t row = index[request];
    return row >= 0 && row < scan.state_rows ? row : -1;
  }

  // What a piece begins with.
  __device__ __forceinline__ FirstSums first_sums(const Cursor& at) const {
    const int K = scan.y.width, V = scan.z.width;
    FirstSums from = {};
    if (at.begins_request(scan.reverse) && scan.causal) {
      const int64_t heads = scan.heads / scan.x_group, row = state_row(at.request, scan.state_index);
      if (row < 0 || scan.initial.state == nullptr) return from;
      const int64_t entry = row * heads + state_head;
      from.state = scan.initial.state + entry * scan.initial.size;
      from.k_stride = scan.initial.k_stride;
      from.v_stride = scan.initial.v_stride;
      if (scan.initial.y_sum != nullptr) from.y_sum = scan.initial.y_sum + entry * K;
      if (scan.initial.z_sum != nullptr) from.z_sum = scan.initial.z_sum + entry * V;
      if (scan.initial.count != nullptr) from.count = static_cast<float>(scan.initial.count[row]);
    } else if (pass == kOutputs) {
      from.state = slot(scan.slots, scan.causal ? segment - 1 : 0);
      from.k_stride = 1;
      from.v_stride = K;
      from.y_sum = from.state + static_cast<int64_t>(K) * V;
      from.z_sum = from.y_sum + K;
      from.count = from.z_sum[V];
    }
    return from;
  }

  // Where the sums after a piece go.
  __device__ __forceinline__ LastSums last_sums(const Cursor& at) const {
    const int K = scan.y.width, V = scan.z.width;
    LastSums to = {};
    to.factor = 1.0f;
    if (pass == kSegmentSums) {
      to.state = slot(scan.slots, segment);
      to.k_stride = 1;
      to.v_stride = K;
      to.y_sum = to.state + static_cast<int64_t>(K) * V;
      to.z_sum = to.y_sum + K;
      to.slot_rest = to.z_sum + V;
      return to;
    }
    if (!scan.causal || !at.ends_request(scan.reverse) || x_head % scan.x_group != 0) return to;
    if (scan.last.state == nullptr) return to;
    const int64_t row = state_row(at.request, scan.last_index);
    if (row < 0) return to;
    const int64_t entry = row * (scan.heads / scan.x_group) + state_head;
    if (scan.final_decayed && scan.log_decay != nullptr) {
      const float log_decay = scan.decay_per_token ? scan.log_decay[batch * scan.decay_batch + state_head * scan.decay_head +
                                                                    at.request_span.begin * scan.decay_token]
                                                   : scan.log_decay[state_head];
      to.factor = power<T>(log_decay * kLog2E);
    }
    to.state = scan.last.state + entry * scan.last.size;
    to.k_stride = scan.last.k_stride;
    to.v_stride = scan.last.v_stride;
    if (scan.last.y_sum != nullptr) to.y_sum = scan.last.y_sum + entry * K;
    if (scan.last.z_sum != nullptr) to.z_sum = scan.last.z_sum + entry * V;
    return to;
  }

  __device__ __forceinline__ void write_slot_rest(const Cursor& at, float* rest, float count, double log2_kept) const {
    rest[0] = count;
    rest[1] = static_cast<float>(log2_kept);
    rest[2] = at.begins_request(scan.reverse) ? 1.0f : 0.0f;
  }

  // Tokens of a packed batch row that belong to no request.
  __device__ __forceinline__ void zero_rows(Span rows, int warp, int warps, int lane) const {
    const int V = scan.z.width, first = slice * kColumns;
    const int columns = V - first < kColumns ? V - first : kColumns;
    for (int token = rows.begin + warp; token < rows.end; token += warps) {
      for (int v = lane; v < columns; v += 32) out_row(token)[first + v] = T(0.0f);
      if (lane == 0 && slice == 0 && scan.row_sum != nullptr)
        scan.row_sum[batch * scan.sum_batch + x_head * scan.sum_head + token * scan.sum_token] = 0.0f;
      if (lane == 0 && scan.row_dot != nullptr) *row_dot_at(token) = 0.0f;
    }
  }

  __device__ __forceinline__ float* row_dot_at(int64_t token) const {
    return scan.row_dot + ((static_cast<int64_t>(slice) * scan.batch + batch) * scan.heads + x_head) * scan.tokens + token;
  }

  __device__ __forceinline__ void zero_unowned(const Cursor& at, int warp, int warps, int lane) const {
    if (pass != kOutputs || scan.cu_seqlens == nullptr) return;
    const int requests = static_cast<int>(scan.requests), tokens = static_cast<int>(scan.tokens);
    const int begin = requests > 0 ? clamp_token(scan, 0) : tokens, end = requests > 0 ? clamp_token(scan, requests) : tokens;
    const Span s = at.segment;
    zero_rows({s.begin, begin < s.end ? begin : s.end}, warp, warps, lane);
    zero_rows({end > s.begin ? end : s.begin, s.end}, warp, warps, lane);
  }

  // A segment that nothing goes on from: what its slot holds is not used, but marks that nothing came before.
  __device__ __forceinline__ void mark_unused_slot() const {
    float* rest = slot(scan.slots, segment) + static_cast<int64_t>(scan.y.width) * scan.z.width + scan.y.width + scan.z.width;
    rest[1] = 0.0f;
    rest[2] = 1.0f;
  }

  __device__ __forceinline__ Cursor first_step() const {
    Cursor at;
    const int number = scan.reverse ? scan.segments - 1 - segment : segment;
    const int length = static_cast<int>(scan.segment_tokens), tokens = static_cast<int>(scan.tokens);
    at.segment.begin = number * length;
    at.segment.end = tokens - at.segment.begin > length ? at.segment.begin + length : tokens;
    at.request = batch;
    if (scan.cu_seqlens != nullptr) {
      if (pass == kSegmentSums) {
        // The request that goes on beyond the segment.
        at.request = scan.reverse ? request_before(scan, at.segment.begin) : request_after(scan, at.segment.end);
        const bool there = at.request >= 0 && at.request < scan.requests;
        at.valid = false;
        if (!there) return at;
        const Span owned = request_tokens(scan, at.request);
        if (scan.reverse ? owned.end <= at.segment.begin : owned.begin >= at.segment.end) return at;
      } else {
        at.request = scan.reverse ? request_before(scan, at.segment.end) : request_after(scan, at.segment.begin);
      }
    }
    at.find_piece(scan, kTokens);
    return at;
  }
};

template <class S, class T>
struct Cta : Site<T, S::kTokens, S::kColumns> {
  using Base = Site<T, S::kTokens, S::kColumns>;
  using Base::scan, Base::pass, Base::batch, Base::x_head, Base::state_head, Base::slice, Base::segment;
  using Base::slot, Base::state_row, Base::out_row, Base::row_dot_at;
  using Plane = typename S::Plane;
  static constexpr int kPlanes = S::kPlanes, kTokens = S::kTokens, kWidth = S::kWidth, kWarps = S::kWarps;

  const int stages, aligned;
  const uint32_t shared;  // stages, then P
  typename S::Small& small;
  const int warp, lane;
  int y_sum_now;

  float state[kWidth / 8][4];  // columns lane / 4 (+ 8) of Z, rows 8 n + 2 (lane % 4) (+ 1) of Y
  float z_sum[2], count;
  double log2_kept;

  __device__ __forceinline__ int column() const { return slice * S::kColumns + warp * 16 + lane / 4; }
  __device__ __forceinline__ uint32_t stage_at(int stage) const {
    return shared + stage * kPlanes * (2 * S::kWidePlane + (scan.row_dot != nullptr ? 2 : 1) * S::kNarrowPlane);
  }
  __device__ __forceinline__ uint32_t y_of(uint32_t stage) const { return stage + kPlanes * S::kWidePlane; }
  __device__ __forceinline__ uint32_t z_of(uint32_t stage) const { return stage + 2 * kPlanes * S::kWidePlane; }
  __device__ __forceinline__ uint32_t source_of(uint32_t stage) const { return z_of(stage) + kPlanes * S::kNarrowPlane; }
  __device__ __forceinline__ uint32_t scores() const { return stage_at(stages); }

  // Rows [begin, end) of a tensor, kColumns columns from `first` on, to a tile; rows and columns that are not there
  // become 0.
  template <int kTileColumns>
  __device__ __forceinline__ void load_rows(uint32_t to, const ChunkTensor& x, int head, int64_t begin, int64_t end,
                                            int first) const {
    constexpr int kChunks = kTileColumns / 8, kPlane = kTokens * kTileColumns * 2;
    const int width = x.width - first;
    const int64_t base = batch * x.batch + head * x.head + begin * x.token + first;
    const T* const from = static_cast<const T*>(x.data) + base;
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens * kChunks; i += S::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool there = begin + row < end;
      const uint32_t at = to + chunk_offset<kTokens>(row, chunk);
      const T* const row_from = from + row * x.token + chunk * 8;
      if constexpr (kPlanes == 1) {
        if (aligned) {
          const bool read = there && chunk * 8 < width;
          cp_async(at, read ? row_from : static_cast<const T*>(x.data), read ? 16 : 0);
          continue;
        }
      }
      uint32_t planes[4][kPlanes];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 pair;
        if (aligned && sizeof(T) == 4) {  // whole float4
          const bool read = there && chunk * 8 + j / 2 * 4 < width;
          pair = read ? *reinterpret_cast<const float2*>(row_from + 2 * j) : make_float2(0.0f, 0.0f);
        } else {
          pair.x = there && chunk * 8 + 2 * j < width ? static_cast<float>(row_from[2 * j]) : 0.0f;
          pair.y = there && chunk * 8 + 2 * j + 1 < width ? static_cast<float>(row_from[2 * j + 1]) : 0.0f;
        }
        split_pair<Plane, kPlanes>(pair.x, pair.y, planes[j]);
      }
#pragma unroll
      for (int p = 0; p < kPlanes; ++p)
        store_16_bytes(at + p * kPlane, make_uint4(planes[0][p], planes[1][p], planes[2][p], planes[3][p]));
    }
  }

  __device__ __forceinline__ void load_factor(int buffer, int kind, const ChunkFactor& factor, int head, int64_t begin,
                                              int64_t end) const {
    if (factor.data == nullptr) return;
    for (int row = lane; row < kTokens; row += 32) {
      const bool there = begin + row < end;
      const float* from = factor.data + batch * factor.batch + head * factor.head + (begin + row) * factor.token;
      cp_async_4(shared_address(&small.raw[buffer][kind][row]), there ? from : factor.data, there ? 4 : 0);
    }
  }

  __device__ __forceinline__ void load(const Cursor& at, int stage, int buffer) const {
    if (at.valid) {
      const int begin = at.chunk, end = at.chunk_end(kTokens);
      const int y_head = state_head * scan.y_group + at.head;
      const uint32_t to = stage_at(stage);
      if (pass == kOutputs) load_rows<kWidth>(to, scan.x, Base::shared_head(x_head, scan.x_share), begin, end, 0);
      if (pass == kSegmentSums || scan.causal) {
        load_rows<kWidth>(y_of(to), scan.y, Base::shared_head(y_head, scan.y_share), begin, end, 0);
        load_rows<S::kColumns>(z_of(to), scan.z, Base::shared_head(y_head, scan.z_share), begin, end, slice * S::kColumns);
      }
      if (scan.row_dot != nullptr && pass == kOutputs)
        load_rows<S::kColumns>(source_of(to), scan.source, Base::shared_head(x_head, scan.source_share), begin, end,
                               slice * S::kColumns);
      if (warp == 0) {
        if (scan.decay_per_token) {
          const int last = at.request_span.end;
          for (int row = lane; row < kTokens; row += 32) {
            const int token = begin + row + (scan.reverse ? 1 : 0);
            const bool there = begin + row < end && token < last;
            const float* from =
                scan.log_decay + batch * scan.decay_batch + state_head * scan.decay_head + token * scan.decay_token;
            cp_async_4(shared_address(&small.raw[buffer][0][row]), there ? from : scan.log_decay, there ? 4 : 0);
          }
        }
        if (pass == kOutputs) {
          load_factor(buffer, 1, scan.x_factor, x_head, begin, end);
          load_factor(buffer, 2, scan.x_rank1, x_head, begin, end);
        }
        load_factor(buffer, 3, scan.y_factor, y_head, begin, end);
        load_factor(buffer, 4, scan.y_rank1, y_head, begin, end);
        load_factor(buffer, 5, scan.z_factor, y_head, begin, end);
      }
    }
    cp_async_commit();
  }

  // By warp 0.
  __device__ __forceinline__ void make_table(const Cursor& at, int buffer) {
    fill_table<T, kTokens>(scan, pass, state_head, lane, at, small.table,
                           [&](int kind, int row) { return small.raw[buffer][kind][row]; });
  }

  // Fragments

  // A k-step of 32 of the right operand whose row n is a tile's row: [k-step of 16][register][plane].
  template <int kTileColumns>
  __device__ __forceinline__ void load_right(uint32_t tile, int row, int step32, uint32_t (&b)[4][kPlanes]) const {
    const uint32_t at = tile + chunk_offset<kTokens>(row + lane % 8, 4 * step32 + lane / 8);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      uint32_t r[4];
      load_matrices(r, at + p * kTokens * kTileColumns * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i][p] = r[i];
    }
  }

  // 16 columns of a narrow tile by 16 tokens as the left operand: this warp's columns.
  __device__ __forceinline__ void load_columns(uint32_t tile, int step, uint32_t (&a)[kPlanes][4]) const {
    const uint32_t at = tile + chunk_offset<kTokens>(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) load_matrices_transposed(a[p], at + p * S::kNarrowPlane);
  }

  // P to shared memory and, if needed, its row sums.
  __device__ __forceinline__ void make_scores(uint32_t stage, float (&s)[kTokens / S::kSharers / 8][4]) const {
    constexpr int kTiles = kTokens / S::kSharers / 8;
    const int row = warp % (kTokens / 16) * 16, first = warp / (kTokens / 16) * (8 * kTiles);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[t][c] = 0.0f;
    if (scan.reverse ? first + 8 * kTiles <= row : first > row + 15) return;
    const uint32_t x = stage, y = y_of(stage);
#pragma unroll 2
    for (int step = 0; step < kWidth / 32; ++step) {
      if (32 * step >= scan.x.width) break;
      uint32_t a[2][kPlanes][4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int p = 0; p < kPlanes; ++p)
          load_matrices(a[k][p], x + p * S::kWidePlane + chunk_offset<kTokens>(row + lane % 16, 4 * step + 2 * k + lane / 16));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t b[4][kPlanes];
        load_right<kWidth>(y, first + 8 * t, step, b);
        mma_planes<Plane, kPlanes>(s[t], a[0], b[0], b[1]);
        mma_planes<Plane, kPlanes>(s[t], a[1], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void finish_scores(float (&s)[kTokens / S::kSharers / 8][4]) const {
    constexpr int kTiles = kTokens / S::kSharers / 8;
    const RowTable<kTokens>& table = small.table;
    const int sharer = warp / (kTokens / 16);
    const int row = warp % (kTokens / 16) * 16, first = sharer * (8 * kTiles);
    float sums[2] = {0.0f, 0.0f};
    const bool decays = scan.log_decay != nullptr;
    float2 row_decay[2];
    float x_factor[2], x_rank1[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half + lane / 4;
      row_decay[half] = table.log2_decay[i];
      x_factor[half] = table.x_factor[i];
      x_rank1[half] = table.x_rank1[i];
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = first + 8 * t + 2 * (lane % 4) + c;
        const float2 decay = table.log2_decay[j];
        const float y_factor = table.y_factor[j], y_rank1 = table.y_rank1[j], z_factor = table.z_factor[j];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = row + 8 * half + lane / 4;
          float x = s[t][2 * half + c] * x_factor[half] * y_factor;
          if (scan.rank1) x += x_rank1[half] * y_rank1;
          if (decays) x *= power<T>((row_decay[half].x - decay.x) + (row_decay[half].y - decay.y));
          if (scan.reverse ? j < i : j > i) x = 0.0f;
          sums[half] += x;
          p[2 * half + c] = x == 0.0f ? 0.0f : x * z_factor;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t planes[kPlanes];
        split_pair<Plane, kPlanes>(p[2 * half], p[2 * half + 1], planes);
        const int i = row + 8 * half + lane / 4;
        const uint32_t at = scores() + chunk_offset<kTokens>(i, first / 8 + t) + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < kPlanes; ++k) store_4_bytes(at + k * S::kScorePlane, planes[k]);
      }
    }
    if (!scan.row_sums) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
      sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
      if (lane % 4 == 0) small.row_sums[sharer][row + 8 * half + lane / 4] = sums[half];
    }
  }

  // x_i · Σ y of what comes before the chunk.
  __device__ __forceinline__ void carried_row_sums(uint32_t stage) const {
    constexpr int kRows = kTokens / kWarps;
    const float* const y_sum = small.y_sum[y_sum_now];
#pragma unroll 1
    for (int r = 0; r < kRows; r += 8) {
      const int of_warp = r + lane / 4, row = warp * kRows + of_warp;
      float sum = 0.0f;
      if (of_warp < kRows) {
#pragma unroll 1
        for (int chunk = lane % 4; chunk * 8 < scan.x.width; chunk += 4) {
          uint32_t planes[4][kPlanes];
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) {
            const uint4 x = load_16_bytes(stage + p * S::kWidePlane + chunk_offset<kTokens>(row, chunk));
            planes[0][p] = x.x, planes[1][p] = x.y, planes[2][p] = x.z, planes[3][p] = x.w;
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 x = join_pair<Plane, kPlanes>(planes[j]);
            sum += x.x * y_sum[chunk * 8 + 2 * j] + x.y * y_sum[chunk * 8 + 2 * j + 1];
          }
        }
      }
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (of_warp < kRows && lane % 4 == 0) small.row_carried[row] = sum;
    }
  }

  // Σ y after the chunk: a thread a column.
  __device__ __forceinline__ void add_to_y_sum(uint32_t stage) const {
    const RowTable<kTokens>& table = small.table;
    const uint32_t y = y_of(stage);
#pragma unroll 1
    for (int k = threadIdx.x; k < kWidth; k += S::kThreads) {
      float sum = 0.0f;
      if (k < scan.y.width) {
#pragma unroll 4
        for (int j = 0; j < kTokens; ++j) {
          const uint32_t at = y + chunk_offset<kTokens>(j, k / 8) + k % 8 * 2;
          float value = 0.0f;
#pragma unroll
          for (int p = kPlanes - 1; p >= 0; --p) value += unpack_one(Plane{}, load_2_bytes(at + p * S::kWidePlane));
          sum += table.to_y_sum[j] * value;
        }
      }
      small.y_sum[y_sum_now ^ 1][k] = table.kept * small.y_sum[y_sum_now][k] + sum;
    }
  }

  __device__ __forceinline__ float row_sum(int row) const {
    const RowTable<kTokens>& table = small.table;
    float sum = table.from_state[row] * small.row_carried[row] + table.from_sum[row] * count;
    if (scan.causal) {
#pragma unroll
      for (int i = 0; i < S::kSharers; ++i) sum += small.row_sums[i][row];
    }
    return sum;
  }

  // Oᵀ = Sᵀ Xᵀ, without the factors of rows.
  __device__ __forceinline__ void from_state(uint32_t stage, float (&o)[kTokens / 8][4]) const {
    float scale[2] = {1.0f, 1.0f}, unscale[2] = {1.0f, 1.0f};
    if constexpr (sizeof(Plane) == 2 && std::is_same<Plane, __half>::value) {
      // float16 reaches 65504: columns are scaled by powers of two on their way.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = 0.0f;
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) top = fmaxf(top, fmaxf(fabsf(state[n][2 * half]), fabsf(state[n][2 * half + 1])));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        power_of_two_scale(top, scale[half], unscale[half]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) o[n][c] = 0.0f;
#pragma unroll
    for (int step = 0; step < kWidth / 32; ++step) {
      if (32 * step >= scan.x.width) break;
      uint32_t a[2][kPlanes][4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t planes[kPlanes];
          const float (&from)[4] = state[4 * step + 2 * k + i / 2];
          split_pair<Plane, kPlanes>(from[i % 2 * 2] * scale[i % 2], from[i % 2 * 2 + 1] * scale[i % 2], planes);
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) a[k][p][i] = planes[p];
        }
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        uint32_t b[4][kPlanes];
        load_right<kWidth>(stage, 8 * n, step, b);
        mma_planes<Plane, kPlanes>(o[n], a[0], b[0], b[1]);
        mma_planes<Plane, kPlanes>(o[n], a[1], b[2], b[3]);
      }
    }
    if constexpr (std::is_same<Plane, __half>::value) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[n][c] *= unscale[c / 2];
    }
  }

  __device__ __forceinline__ void scale_rows(float (&o)[kTokens / 8][4]) const {
    const RowTable<kTokens>& table = small.table;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = 8 * n + 2 * (lane % 4) + c % 2;
        o[n][c] *= table.from_state[row];
        if (scan.rank1) o[n][c] += table.from_sum[row] * z_sum[c / 2];
      }
  }

  // Oᵀ += Zᵀ Pᵀ.
  __device__ __forceinline__ void from_scores(uint32_t stage, const uint32_t (&z)[kTokens / 16][kPlanes][4],
                                              float (&o)[kTokens / 8][4]) const {
    // 0 times an infinity, or what is no number, must not reach tokens before its own.
    bool odd = false;
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) odd = odd || pair_not_finite(Plane{}, z[step][0][i]);
    if (__any_sync(kFullWarp, odd)) {
      from_scores_by_rows(stage, o);
      return;
    }
#pragma unroll
    for (int step = 0; step < kTokens / 32; ++step) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        if (scan.reverse ? 8 * n > 32 * step + 31 : 8 * n + 7 < 32 * step) continue;
        uint32_t b[4][kPlanes];
        load_right<64>(scores(), 8 * n, step, b);
        mma_planes<Plane, kPlanes>(o[n], z[2 * step], b[0], b[1]);
        mma_planes<Plane, kPlanes>(o[n], z[2 * step + 1], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void from_scores_by_rows(uint32_t stage, float (&o)[kTokens / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        o[n][c] += score_times_column<Plane, kPlanes, kTokens, S::kScorePlane, S::kNarrowPlane>(
            scores(), z_of(stage), 8 * n + 2 * (lane % 4) + c % 2, warp * 16 + lane / 4 + c / 2 * 8, scan.reverse);
  }

  // Sᵀ = kept Sᵀ + Z'ᵀ Y, and the sum of z.
  __device__ __forceinline__ void to_state(uint32_t stage, uint32_t (&z)[kTokens / 16][kPlanes][4]) {
    const RowTable<kTokens>& table = small.table;
    const float kept = table.kept;
    if (kept != 1.0f) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) state[n][c] *= kept;
    }
    const bool scaled = !table.unscaled;
    if (scan.rank1 || scaled) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * step + i / 2 * 8 + 2 * (lane % 4);
          uint32_t planes[kPlanes];
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) planes[p] = z[step][p][i];
          const float2 x = join_pair<Plane, kPlanes>(planes);
          sums[i % 2] += table.to_z_sum[row] * x.x + table.to_z_sum[row + 1] * x.y;
          if (scaled) {
            split_pair<Plane, kPlanes>(x.x * table.to_state[row], x.y * table.to_state[row + 1], planes);
#pragma unroll
            for (int p = 0; p < kPlanes; ++p) z[step][p][i] = planes[p];
          }
        }
#pragma unroll
      for (int half = 0; half < 2 && scan.rank1; ++half) {
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 1);
        sums[half] += __shfl_xor_sync(kFullWarp, sums[half], 2);
        z_sum[half] = kept * z_sum[half] + sums[half];
      }
    }
    const uint32_t y = y_of(stage);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      if (16 * n >= scan.y.width) break;
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) {
        uint32_t b[4][kPlanes];
        const uint32_t at = y + chunk_offset<kTokens>(16 * step + lane % 16, 2 * n + lane / 16);
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
          uint32_t r[4];
          load_matrices_transposed(r, at + p * S::kWidePlane);
#pragma unroll
          for (int i = 0; i < 4; ++i) b[i][p] = r[i];
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) mma_planes<Plane, kPlanes>(state[2 * n + t], z[step], b[2 * t], b[2 * t + 1]);
      }
    }
  }

  // One row's dot products with the source, of this warp's columns.
  __device__ __forceinline__ void dot_with_source(uint32_t stage, const float (&o)[kTokens / 8][4]) const {
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      uint32_t a[kPlanes][4];
      load_columns(source_of(stage), step, a);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t planes[kPlanes];
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) planes[p] = a[p][2 * t + half];
          const float2 x = join_pair<Plane, kPlanes>(planes);
          sums[0] += x.x * o[2 * step + t][2 * half];
          sums[1] += x.y * o[2 * step + t][2 * half + 1];
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2) sums[c] += __shfl_xor_sync(kFullWarp, sums[c], offset);
          if (lane < 4) small.dots[warp][16 * step + 8 * t + 2 * lane + c] = sums[c];
        }
      }
    }
  }

  __device__ __forceinline__ void write_rows(const Cursor& at, float (&o)[kTokens / 8][4]) const {
    const int rows = static_cast<int>(at.chunk_end(kTokens) - at.chunk), width = scan.z.width;
    const float factor = scan.out_times != nullptr ? *scan.out_times : 1.0f;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        o[n][c] *= factor;
        if (scan.divide) {
          float sum = row_sum(8 * n + 2 * (lane % 4) + c % 2);
          if (fabsf(sum) < scan.eps) sum = sum < 0.0f ? -scan.eps : scan.eps;
          o[n][c] /= sum;
        }
      }
      if (8 * n >= rows) continue;
      if (sizeof(T) == 2 && aligned && !scan.accumulate) {
        const int row = 8 * n + lane / 4, first = slice * S::kColumns + warp * 16 + 2 * (lane % 4);
        T* const to = out_row(at.chunk + row) + first;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = transpose_matrix(pack_pair(Plane{}, o[n][2 * half], o[n][2 * half + 1]));
          if (row < rows && first + 8 * half < width) *reinterpret_cast<uint32_t*>(to + 8 * half) = pair;
        }
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = 8 * n + 2 * (lane % 4) + c % 2, v = column() + c / 2 * 8;
          if (row >= rows || v >= width) continue;
          T* const to = out_row(at.chunk + row) + v;
          *to = static_cast<T>(scan.accumulate ? static_cast<float>(*to) + o[n][c] : o[n][c]);
        }
      }
    }
  }

  // The carried sums

  __device__ __forceinline__ void begin_piece(const Cursor& at) {
    const FirstSums from = Base::first_sums(at);
    const int K = scan.y.width, V = scan.z.width;
    read_state<kWidth>(state, from, K, V, column(), lane);
    count = from.count;
    log2_kept = 0.0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int v = column() + 8 * half;
      z_sum[half] = from.z_sum != nullptr && scan.rank1 && v < V ? from.z_sum[v] : 0.0f;
    }
    if (scan.row_sums) {
      for (int k = threadIdx.x; k < kWidth; k += S::kThreads)
        small.y_sum[y_sum_now][k] = from.y_sum != nullptr && k < K ? from.y_sum[k] : 0.0f;
    }
  }

  __device__ __forceinline__ void end_piece(const Cursor& at) const {
    const LastSums to = Base::last_sums(at);
    const int K = scan.y.width, V = scan.z.width;
    write_state<kWidth>(state, to, K, V, column(), lane);
    if (to.z_sum != nullptr && scan.rank1 && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (column() + 8 * half < V) to.z_sum[column() + 8 * half] = to.factor * z_sum[half];
    }
    if (slice != 0) return;
    if (to.y_sum != nullptr && scan.row_sums) {
      for (int k = threadIdx.x; k < K; k += S::kThreads) to.y_sum[k] = to.factor * small.y_sum[y_sum_now][k];
    }
    if (to.slot_rest != nullptr && threadIdx.x == 0) Base::write_slot_rest(at, to.slot_rest, count, log2_kept);
  }

  __device__ __forceinline__ void run() {
    Cursor at = Base::first_step();
    y_sum_now = 0;
    Base::zero_unowned(at, warp, kWarps, lane);
    if (pass == kSegmentSums && !at.valid) {
      if (slice == 0 && threadIdx.x == 0) Base::mark_unused_slot();
      return;
    }
    Cursor ahead = at;
    load(ahead, 0, 0);
    float o[kTokens / 8][4];
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (; at.valid; at.next(scan, kTokens)) {
      cp_async_wait();
      __syncthreads();
      ahead.next(scan, kTokens);
      if (stages > 1) load(ahead, stage ^ 1, buffer ^ 1);
      const uint32_t tiles = stage_at(stage);
      const bool first = at.head == 0, last = at.head + 1 == scan.y_group;
      if (first && at.first_chunk(scan, kTokens)) begin_piece(at);
      if (warp == 0) make_table(at, buffer);
      const bool pairs = pass == kOutputs && scan.causal;
      float s[kTokens / S::kSharers / 8][4];
      if (pass == kOutputs && first) from_state(tiles, o);
      if (pairs) make_scores(tiles, s);
      __syncthreads();
      if (pass == kOutputs && first) scale_rows(o);
      if (pairs) finish_scores(s);
      if (pass == kOutputs && scan.row_sums) carried_row_sums(tiles);
      __syncthreads();
      if (pass == kSegmentSums || scan.causal) {
        uint32_t z[kTokens / 16][kPlanes][4];
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) load_columns(z_of(tiles), step, z[step]);
        if (pairs) from_scores(tiles, z, o);
        if (pass == kOutputs && last) finish_rows(at, tiles, o);
        to_state(tiles, z);
        if (scan.row_sums) {
          add_to_y_sum(tiles);
          y_sum_now ^= 1;
        }
        count = small.table.kept * count + small.table.count;
        log2_kept += small.table.log2_kept;
        if (last && at.last_chunk(scan, kTokens)) {
          if (scan.row_sums) __syncthreads();
          end_piece(at);
        }
      } else if (last) {
        finish_rows(at, tiles, o);
      }
      if (stages == 1) {
        __syncthreads();
        load(ahead, 0, buffer ^ 1);
      } else {
        stage ^= 1;
      }
      buffer ^= 1;
    }
    cp_async_wait();
  }

  __device__ __forceinline__ void finish_rows(const Cursor& at, uint32_t tiles, float (&o)[kTokens / 8][4]) {
    const int rows = static_cast<int>(at.chunk_end(kTokens) - at.chunk);
    if (scan.row_dot != nullptr) dot_with_source(tiles, o);
    write_rows(at, o);
    if (scan.row_sum != nullptr && slice == 0) {
      for (int row = threadIdx.x; row < rows; row += S::kThreads)
        scan.row_sum[batch * scan.sum_batch + x_head * scan.sum_head + (at.chunk + row) * scan.sum_token] = row_sum(row);
    }
    if (scan.row_dot == nullptr) return;
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += S::kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += small.dots[w][row];
      float* const to = row_dot_at(at.chunk + row);
      *to = scan.add_dots ? *to + sum : sum;
    }
  }
};

template <class T, int kWidth, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    ChunkScanKernel(const __grid_constant__ ChunkScan scan, int pass, int stages, int aligned) {
  using S = Shape<T, kWidth, kWarps>;
  extern __shared__ char dynamic[];
  char* const shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
  const bool source = scan.row_dot != nullptr;
  const int stage_bytes = S::kPlanes * (2 * S::kWidePlane + (source ? 2 : 1) * S::kNarrowPlane);
  auto& small = *reinterpret_cast<typename S::Small*>(shared + stages * stage_bytes + S::kPlanes * S::kScorePlane);
  Cta<S, T> cta{
      {scan, pass, blockIdx.x},          stages, aligned, shared_address(shared), small, static_cast<int>(threadIdx.x / 32),
      static_cast<int>(threadIdx.x % 32)};
  cta.run();
}

// Compiled by chunk_scan_launch.cu.in, a source file a type.
template <class T>
int launch_typed(const ChunkScan& scan, int pass, int aligned, int max_shared_bytes, void* stream);

}  // namespace chunk
}  // namespace leanfleet
