// GatedDeltaRuleGrad in chunks of 16 tokens, with float32 products on the ordinary cores; cpu_kernel.cpp has the equations.
// Three kernels, of which grad_chunks.cu has others in place of the first two for what goes on tensor cores:
//   ScoresKernel   of all chunks at once, what depends on no state: N, P and the lengths of rows
//   StatesKernel   takes a CTA's value columns of one state through all chunks and back. Thread d has key dimension d: its row of
//                  the state and of its gradient, and its elements of the chunk's rows. States before chunks are kept on the way
//                  forwards; of long requests those before spans of chunks, and those in a span found again.
//   SumsKernel     adds what the CTAs of other columns, and states that share a head, have found of a row, in their order
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <utility>

#include "core/integers.h"
#include "core/op.h"
#include "core/shared_memory.cuh"
#include "core/with_type.cuh"
#include "gated_delta_rule/gated_delta_rule.h"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kChunk = 16, kSquare = kChunk * kChunk;
constexpr int kScoreThreads = 128, kSumThreads = 256;
constexpr int kPad = 4;  // floats behind a row of columns, against conflicts of banks
constexpr int kMaxColumns = 64;
#ifndef LEANFLEET_WINDOW_BYTES  // tests take less
#define LEANFLEET_WINDOW_BYTES (int64_t{512} << 20)
#endif
constexpr int64_t kHeldBytes = LEANFLEET_WINDOW_BYTES;  // of states before chunks, about, before requests are cut into spans

struct Plan {
  GradArgs args;
  int columns, slices;  // of value, a CTA's and how many times those
  int64_t chunks;       // of the longest request at most
  int64_t slots;        // of chunks, of all requests
  int64_t span;         // chunks of which the states are held; at least `chunks`: slots have places of their own
  int64_t spans;
  int64_t key_heads;  // that have parts of the gradient of keys: Hv, or heads of the output
  // [slot][value head][kSquare], [slot][head of the output][kSquare], and 1 over the lengths of the rows, [..][kChunk]
  float *key_scores, *query_scores, *key_lengths, *query_lengths;
  float *held, *borders;  // [slot or (request, chunk of the span)][value head][slice][held_floats()]; [request][span]..
  float *query_parts, *key_parts;   // [slice][B][heads or key_heads][N][D]
  float *beta_parts, *decay_parts;  // [slice][B][Hv][N], [slice][B][Hv][N][D or nothing]
};

struct Span {
  int64_t begin, end;
};

__device__ __forceinline__ Span tokens_of_request(const Args& args, int64_t request) {
  if (args.cu_seqlens == nullptr) return {0, args.tokens};
  const int64_t begin = clamped_offset(args.cu_seqlens, request, args.tokens);
  const int64_t end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
  return {begin, end > begin ? end : begin};
}

// The slot of a request's first chunk; with offsets none depends on the lengths of those before.
__device__ __forceinline__ int64_t first_slot(const Plan& plan, int64_t request, int64_t begin) {
  return plan.args.in.cu_seqlens == nullptr ? request * plan.chunks : begin / kChunk + request;
}

// The last request that begins before the token or at it, and -1 where the token is of none.
__device__ __forceinline__ int64_t request_of(const Args& args, int64_t token) {
  int64_t low = 0, high = args.requests;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (clamped_offset(args.cu_seqlens, middle + 1, args.tokens) > token) high = middle;
    else low = middle + 1;
  }
  return low < args.requests && clamped_offset(args.cu_seqlens, low, args.tokens) <= token ? low : -1;
}

template <class T>
__device__ __forceinline__ const T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head,
                                           int64_t token) {
  return static_cast<const T*>(data) + batch * strides.batch + head * strides.head + token * strides.token;
}

__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

// exp(g) of a token and, with decay_per_key, of its key dimension d.
__device__ __forceinline__ float decay_at(const Args& args, int64_t batch, int64_t head, int64_t token, int d) {
  if (args.log_decay == nullptr) return 1.0f;
  return expf(row_of<float>(args.log_decay, args.decay_strides, batch, head, token)[args.decay_per_key ? d : 0]);
}

// A chunk's rows of query or key into shared memory as floats, of unit length with normalize, 0 behind its tokens. A warp takes
// every fourth row.
template <class T>
__device__ void take_unit_rows(const Args& args, const T* rows, int64_t stride, int tokens, float factor, float* to, int pitch,
                               float* lengths) {
  const int lane = static_cast<int>(threadIdx.x % 32), D = static_cast<int>(args.key_width);
  for (int t = static_cast<int>(threadIdx.x / 32); t < kChunk; t += kScoreThreads / 32) {
    float squares = 0.0f;
    for (int d = lane; d < D; d += 32) {
      const float x = t < tokens ? static_cast<float>(rows[t * stride + d]) : 0.0f;
      to[t * pitch + d] = x;
      squares += x * x;
    }
    const float inverse = args.normalize ? 1.0f / sqrtf(over_warp(squares) + kUnitRowEps) : 1.0f;
    for (int d = lane; d < D; d += 32) to[t * pitch + d] *= factor * inverse;
    if (lane == 0 && lengths != nullptr) lengths[t] = inverse;
  }
}

// A CTA: (slot, head of the output). Scores of decays of each key dimension come in four passes. Tokens t and s that differ first
// in the bit of weight `half` stand on both sides of a token of that weight, from which each row is decayed by itself: no exponent
// is positive, and nothing is divided.
template <class T>
__global__ void __launch_bounds__(kScoreThreads) ScoresKernel(const __grid_constant__ Plan plan) {
  extern __shared__ float scores_shared[];
  const Args& args = plan.args.in;
  const int D = static_cast<int>(args.key_width), pitch = D | 1, tid = static_cast<int>(threadIdx.x);
  const int64_t slot = blockIdx.x / args.heads, head = blockIdx.x % args.heads, group = args.heads / args.v_heads;
  const int64_t state = head / group;
  const bool first = head % group == 0;  // writes what is the key's
  int64_t request = slot / plan.chunks, chunk = slot % plan.chunks, batch = request;
  if (args.cu_seqlens != nullptr) {
    int64_t low = 0, high = args.requests;  // the last whose first slot is not after this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (first_slot(plan, middle, clamped_offset(args.cu_seqlens, middle, args.tokens)) <= slot) low = middle;
      else high = middle;
    }
    request = low;
    batch = 0;
    chunk = slot - first_slot(plan, request, clamped_offset(args.cu_seqlens, request, args.tokens));
  }
  if (request >= args.requests) return;
  const Span span = tokens_of_request(args, request);
  const int64_t token = span.begin + chunk * kChunk;
  if (chunk < 0 || token >= span.end) return;
  const int tokens = static_cast<int>(span.end - token < kChunk ? span.end - token : kChunk);

  float* const keys = scores_shared;
  float* const queries = keys + kChunk * pitch;
  float* const decays = queries + kChunk * pitch;  // [kChunk][pitch], or of tokens [kChunk]
  float* const far_keys = decays + (args.decay_per_key ? kChunk * pitch : kChunk);
  float* const far_queries = far_keys + kChunk * pitch;
  const int64_t of_key = slot * args.v_heads + state, of_query = slot * args.heads + head;
  take_unit_rows(args, row_of<T>(args.key, args.key_strides, batch, state / (args.v_heads / args.k_heads), token),
                 args.key_strides.token, tokens, 1.0f, keys, pitch, first ? plan.key_lengths + of_key * kChunk : nullptr);
  take_unit_rows(args, row_of<T>(args.query, args.query_strides, batch, head / (args.heads / args.q_heads), token),
                 args.query_strides.token, tokens, args.scale, queries, pitch, plan.query_lengths + of_query * kChunk);
  const int decay_width = args.decay_per_key ? D : 1, decay_pitch = args.decay_per_key ? pitch : 1;
  for (int i = tid; i < kChunk * decay_width; i += kScoreThreads) {
    const int t = i / decay_width, d = i % decay_width;
    decays[t * decay_pitch + d] = t < tokens ? decay_at(args, batch, state, token + t, d) : 1.0f;
  }
  __syncthreads();

  float* const key_scores = plan.key_scores + of_key * kSquare;
  float* const query_scores = plan.query_scores + of_query * kSquare;
  for (int half = args.decay_per_key ? kChunk / 2 : 0;; half /= 2) {
    if (half > 0) {
      for (int i = tid; i < kChunk * D; i += kScoreThreads) {
        const int t = i / D, d = i % D, middle = (t & ~(2 * half - 1)) + half;
        float product = 1.0f;
        for (int j = t >= middle ? middle : t + 1; j < (t >= middle ? t + 1 : middle); ++j) product *= decays[j * pitch + d];
        far_keys[t * pitch + d] = keys[t * pitch + d] * product;
        far_queries[t * pitch + d] = queries[t * pitch + d] * product;
      }
      __syncthreads();
    }
    for (int i = tid; i < 2 * kSquare; i += kScoreThreads) {
      const bool of_rows = i >= kSquare;
      const int t = i / kChunk % kChunk, s = i % kChunk;
      // Without passes, or in the last, also what no pass takes: the diagonal and what is above it.
      const bool mine =
          half == 0 || (t > s && t / half % 2 == 1 && (t ^ s) < 2 * half && (t ^ s) >= half) || (half == 1 && t <= s);
      if (!mine || (!of_rows && !first)) continue;
      float dot = 0.0f;
      if ((t > s && (of_rows || args.delta)) || (t == s && of_rows)) {
        const bool far = half > 0 && t > s;
        const float* const x = (of_rows ? far ? far_queries : queries : far ? far_keys : keys) + t * pitch;
        const float* const y = (far ? far_keys : keys) + s * pitch;
        for (int d = 0; d < D; ++d) dot += x[d] * y[d];
        if (half == 0)
          for (int j = s + 1; j <= t; ++j) dot *= decays[j];
      }
      (of_rows ? query_scores : key_scores)[t * kChunk + s] = dot;
    }
    if (half <= 1) break;
    __syncthreads();
  }
}

// Of StatesKernel. Rows of columns have `wide` floats from one to the next.
struct Shared {
  float *state, *grad;         // [threads][wide]: of each thread's key dimension
  float* rows;                 // [kChunk][threads + 1]
  float *missing, *update;     // W and U, [kChunk][wide]
  float *given, *grad_update;  // grad_output, later the gradient of value; dU, later Y
  float *squares, *factors;    // N or P, and F or E, [kChunk][kChunk]
  float *beta, *sums;          // [kChunk], [kChunk][warps]
};

__host__ __device__ __forceinline__ int64_t shared_floats(int threads, int columns) {
  const int wide = columns + kPad;
  return int64_t{2} * threads * wide + kChunk * (threads + 1) + 4 * kChunk * wide + 2 * kSquare + kChunk + kChunk * 8;
}

__device__ __forceinline__ Shared carve(float* base, int threads, int columns) {
  const int wide = columns + kPad;
  Shared s;
  s.state = base;
  s.grad = s.state + threads * wide;
  s.missing = s.grad + threads * wide;
  s.update = s.missing + kChunk * wide;
  s.given = s.update + kChunk * wide;
  s.grad_update = s.given + kChunk * wide;
  s.squares = s.grad_update + kChunk * wide;
  s.factors = s.squares + kSquare;
  s.beta = s.factors + kSquare;
  s.sums = s.beta + kChunk;
  s.rows = s.sums + kChunk * 8;
  return s;
}

__device__ __forceinline__ float4 four_at(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x += factor * x.x, sum.y += factor * x.y, sum.z += factor * x.z, sum.w += factor * x.w;
}
__device__ __forceinline__ float dot_of(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// out[t][..] = base[t][..] - rows[t] state, or + without `minus`; out is [kChunk][wide].
__device__ void times_state(const float* rows, const float* state, int threads, int columns, bool minus, const float* base,
                            float* out) {
  const int wide = columns + kPad, fours = columns / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * fours; i += threads) {
    const int t = i / fours, c = i % fours * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int d = 0; d < threads; ++d) add_scaled(sum, rows[t * (threads + 1) + d], four_at(state + d * wide + c));
    float4 result = base != nullptr ? four_at(base + t * wide + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    add_scaled(result, minus ? -1.0f : 1.0f, sum);
    *reinterpret_cast<float4*>(out + t * wide + c) = result;
  }
}

// factors[t][s] = sign given[t] . update[s] for s < t + diagonal, else 0.
__device__ void pair_factors(const Shared& s, int threads, int columns, int diagonal, float sign) {
  const int wide = columns + kPad;
  for (int i = static_cast<int>(threadIdx.x); i < kSquare; i += threads) {
    const int t = i / kChunk, from = i % kChunk;
    float sum = 0.0f;
    if (from < t + diagonal)
      for (int c = 0; c < columns; c += 4) sum += dot_of(four_at(s.given + t * wide + c), four_at(s.update + from * wide + c));
    s.factors[i] = sign * sum;
  }
}

// A thread's elements of what the gradients of scores hand on: from pairs of a later row t and the key of an earlier token.
__device__ __forceinline__ void pairs_backward(const float* factors, bool diagonal, const float (&rows)[kChunk],
                                               const float (&keys)[kChunk], const float (&decays)[kChunk],
                                               float (&grad_rows)[kChunk], float (&grad_keys)[kChunk],
                                               float (&grad_g)[kChunk]) {
#pragma unroll
  for (int s = 0; s < kChunk; ++s) {
    float of_key = 0.0f, decayed = 1.0f, term[kChunk];
    if (diagonal) {
      const float factor = factors[s * kChunk + s];
      of_key = factor * rows[s];
      grad_rows[s] += factor * keys[s];
    }
#pragma unroll
    for (int t = s + 1; t < kChunk; ++t) {
      decayed *= decays[t];
      const float factor = factors[t * kChunk + s] * decayed, of_row = factor * rows[t];
      of_key += of_row;
      grad_rows[t] += factor * keys[s];
      term[t] = of_row * keys[s];
    }
    grad_keys[s] += of_key;
    float later = 0.0f;
#pragma unroll
    for (int t = kChunk - 1; t > s; --t) {
      later += term[t];
      grad_g[t] += later;
    }
  }
}

// sums[t] = rows of `given` times the thread's row of a state.
__device__ __forceinline__ void times_own_row(const float* given, const float* own, int columns, float (&sums)[kChunk]) {
  const int wide = columns + kPad;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) sums[t] = 0.0f;
#pragma unroll 1
  for (int c = 0; c < columns; c += 4) {
    const float4 x = four_at(own + c);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) sums[t] += dot_of(four_at(given + t * wide + c), x);
  }
}

// The thread's row of a state: kept times itself and the sum of factors[t] given[t].
__device__ __forceinline__ void add_to_own_row(const float* given, const float (&factors)[kChunk], float kept, float* own,
                                               int columns) {
  const int wide = columns + kPad;
#pragma unroll 1
  for (int c = 0; c < columns; c += 4) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    add_scaled(x, kept, four_at(own + c));
#pragma unroll
    for (int t = 0; t < kChunk; ++t) add_scaled(x, factors[t], four_at(given + t * wide + c));
    *reinterpret_cast<float4*>(own + c) = x;
  }
}

__device__ __forceinline__ void copy_floats(const float* from, float* to, int count) {  // whole vectors
  for (int c = 0; c < count; c += 4) *reinterpret_cast<float4*>(to + c) = four_at(from + c);
}

// A thread's row of a state [D,V], or [V,D] with v_first; columns behind V are 0 and not written.
template <bool kStore>
__device__ void move_row(float* data, bool v_first, int d, int D, int V, int column, int columns, float* own) {
  for (int c = 0; c < columns; ++c) {
    const bool there = d < D && column + c < V && data != nullptr;
    float* const at = data + (v_first ? static_cast<int64_t>(column + c) * D + d : static_cast<int64_t>(d) * V + column + c);
    if (kStore && there) *at = own[c];
    if (!kStore) own[c] = there ? *at : 0.0f;
  }
}

// A thread's keys and decays of a chunk's tokens, 0 and 1 behind them.
struct OwnChunk {
  float keys[kChunk], decays[kChunk];
};

// A thread's part of StatesKernel. CTA: (request, value head, slice of columns).
template <class T>
struct Walk {
  const Plan& plan;
  const GradArgs& grad;
  const Args& args;
  int D, V, columns, threads, d, wide, column;  // column: the slice's first
  Shared s;
  float *own_state, *own_grad;  // rows of s.state and s.grad
  int64_t slice, head, request, group, key_head, batch;
  Span tokens;
  int64_t chunks, slots;  // of the request, and its first slot
  int64_t state_at, held_floats, border_floats;

  __device__ __forceinline__ Walk(const Plan& of, float* shared) : plan(of), grad(of.args), args(of.args.in) {
    D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width), columns = plan.columns;
    threads = static_cast<int>(blockDim.x), d = static_cast<int>(threadIdx.x), wide = columns + kPad;
    s = carve(shared, threads, columns);
    own_state = s.state + d * wide, own_grad = s.grad + d * wide;
    slice = blockIdx.x % plan.slices;
    const int64_t unit = blockIdx.x / plan.slices;
    head = unit % args.v_heads, request = unit / args.v_heads, group = args.heads / args.v_heads;
    key_head = head / (args.v_heads / args.k_heads), batch = args.cu_seqlens != nullptr ? 0 : request;
    column = static_cast<int>(slice) * columns;
    tokens = tokens_of_request(args, request);
    chunks = ceil_div(tokens.end - tokens.begin, int64_t{kChunk}), slots = first_slot(plan, request, tokens.begin);
    state_at = (request * args.v_heads + head) * D * V;
    held_floats = static_cast<int64_t>(D + kChunk) * columns, border_floats = static_cast<int64_t>(D) * columns;
  }

  __device__ __forceinline__ float* held_at(int64_t chunk) const {
    const int64_t place = plan.span >= plan.chunks ? slots + chunk : request * plan.span + chunk % plan.span;
    return plan.held + ((place * args.v_heads + head) * plan.slices + slice) * held_floats;
  }
  __device__ __forceinline__ float* border_at(int64_t span) const {
    return plan.borders + (((request * plan.spans + span) * args.v_heads + head) * plan.slices + slice) * border_floats +
           static_cast<int64_t>(d) * columns;
  }

  // The thread's row of a state; null: zeros.
  __device__ __forceinline__ void load_row(const float* state, float* own) const {
    move_row<false>(const_cast<float*>(state), args.state_v_first, d, D, V, column, columns, own);
  }
  __device__ __forceinline__ void store_row(float* state, float* own) const {
    move_row<true>(state, args.state_v_first, d, D, V, column, columns, own);
  }

  // N or P of a chunk.
  __device__ __forceinline__ void take_key_scores(int64_t slot) const {
    for (int i = d; i < kSquare; i += threads) s.squares[i] = plan.key_scores[(slot * args.v_heads + head) * kSquare + i];
  }

  __device__ __forceinline__ void take_query_scores(int64_t slot, int64_t out_head) const {
    for (int i = d; i < kSquare; i += threads) s.squares[i] = plan.query_scores[(slot * args.heads + out_head) * kSquare + i];
  }

  // A chunk's keys and decays of this thread, N, and its betas, 0 behind its tokens.
  __device__ __forceinline__ void take_chunk(int64_t token, int64_t slot, OwnChunk& own) const {
    const float* const lengths = plan.key_lengths + (slot * args.v_heads + head) * kChunk;
    const T* const rows = row_of<T>(args.key, args.key_strides, batch, key_head, token);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const bool there = token + t < tokens.end && d < D;
      own.keys[t] = there ? static_cast<float>(rows[t * args.key_strides.token + d]) * lengths[t] : 0.0f;
      own.decays[t] = there ? decay_at(args, batch, head, token + t, d) : 1.0f;
    }
    take_key_scores(slot);
    if (d < kChunk)
      s.beta[d] = token + d >= tokens.end ? 0.0f
                  : args.beta == nullptr  ? 1.0f
                                          : *row_of<float>(args.beta, args.beta_strides, batch, head, token + d);
  }

  // A chunk's queries of this thread, scaled, 0 behind its tokens.
  __device__ __forceinline__ void take_queries(int64_t token, int64_t slot, int64_t out_head, float (&rows)[kChunk]) const {
    const float* const lengths = plan.query_lengths + (slot * args.heads + out_head) * kChunk;
    const T* const from = row_of<T>(args.query, args.query_strides, batch, out_head / (args.heads / args.q_heads), token);
#pragma unroll
    for (int t = 0; t < kChunk; ++t)
      rows[t] = token + t < tokens.end && d < D
                    ? static_cast<float>(from[t * args.query_strides.token + d]) * (args.scale * lengths[t])
                    : 0.0f;
  }

  // Rows of a tensor with value's width, 0 behind the tokens and behind V.
  __device__ __forceinline__ void take_columns(const void* data, const Strides& strides, int64_t of_head, int64_t token,
                                               float* to) const {
    const T* const rows = row_of<T>(data, strides, batch, of_head, token);
    for (int i = d; i < kChunk * columns; i += threads) {
      const int t = i / columns, c = i % columns;
      const bool there = token + t < tokens.end && column + c < V;
      to[t * wide + c] = there ? static_cast<float>(rows[t * strides.token + column + c]) : 0.0f;
    }
  }

  // W = (I + N diag(beta))^-1 W and U = diag(beta) W; W is held from chunk `first` on.
  __device__ __forceinline__ void solve_missing(int64_t chunk, int64_t first) const {
    for (int c = d; c < columns; c += threads) {
      float solved[kChunk];
#pragma unroll
      for (int t = 0; t < kChunk; ++t) {
        float x = s.missing[t * wide + c];
#pragma unroll
        for (int from = 0; from < t; ++from) x -= s.squares[t * kChunk + from] * solved[from];
        if (chunk >= first) held_at(chunk)[border_floats + t * columns + c] = x;
        solved[t] = x * s.beta[t];
        s.update[t * wide + c] = solved[t];
      }
    }
  }

  // The state through a chunk. What the way back needs is held from chunk `first` on, in the walk from the start also what is
  // before each span.
  __device__ __forceinline__ void forwards(int64_t chunk, int64_t first, bool from_the_start) const {
    OwnChunk own;
    const int64_t token = tokens.begin + chunk * kChunk;
    __syncthreads();
    take_chunk(token, slots + chunk, own);
    take_columns(args.value, args.value_strides, head, token, s.given);
    if (from_the_start && plan.spans > 1 && chunk % plan.span == 0 && d < D)
      copy_floats(own_state, border_at(chunk / plan.span), columns);
    if (chunk >= first && d < D) copy_floats(own_state, held_at(chunk) + static_cast<int64_t>(d) * columns, columns);
    float product = 1.0f;
#pragma unroll
    for (int t = 0; t < kChunk; ++t) s.rows[t * (threads + 1) + d] = own.keys[t] * (product *= own.decays[t]);
    __syncthreads();
    if (args.delta) times_state(s.rows, s.state, threads, columns, true, s.given, s.missing);
    else
      for (int i = d; i < kChunk * columns; i += threads) {
        const int at = i / columns * wide + i % columns;
        s.missing[at] = s.given[at];
      }
    __syncthreads();
    solve_missing(chunk, first);
    __syncthreads();
    float factors[kChunk], kept = 1.0f;
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      factors[t] = own.keys[t] * kept;
      kept *= own.decays[t];
    }
    add_to_own_row(s.update, factors, kept, own_state, columns);
  }

  // The state before a chunk, its W and its U, as the way forwards held them.
  __device__ __forceinline__ void take_held(int64_t chunk) const {
    if (d < D) copy_floats(held_at(chunk) + static_cast<int64_t>(d) * columns, own_state, columns);
    else
      for (int c = 0; c < columns; ++c) own_state[c] = 0.0f;
    __syncthreads();  // others' betas; and W, which the same threads do not read as wrote it
    for (int i = d; i < kChunk * columns; i += threads) {
      const int t = i / columns, c = i % columns;
      const float x = held_at(chunk)[border_floats + i];
      s.missing[t * wide + c] = x;
      s.update[t * wide + c] = x * s.beta[t];
    }
  }

  // What the gradient of the state behind a chunk hands on: to keys, to decays, to U as dU, and decayed to the state before it.
  __device__ __forceinline__ void state_backward(const OwnChunk& own, float (&grad_keys)[kChunk],
                                                 float (&grad_g)[kChunk]) const {
    float kept = 1.0f;
    times_own_row(s.update, own_grad, columns, grad_keys);
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      const float factor = own.keys[t] * kept;
      grad_keys[t] *= kept;
      kept *= own.decays[t];
      s.rows[t * (threads + 1) + d] = factor;
    }
    float earlier = 0.0f;  // of the states before and behind, then of the keys before a token too
    for (int c = 0; c < columns; c += 4) earlier += dot_of(four_at(own_state + c), four_at(own_grad + c));
    earlier *= kept;
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      grad_g[t] = earlier;
      earlier += own.keys[t] * grad_keys[t];
    }
    __syncthreads();
    times_state(s.rows, s.grad, threads, columns, false, nullptr, s.grad_update);
    __syncthreads();
    for (int c = 0; c < columns; ++c) own_grad[c] *= kept;
  }

  // dU += P^T grad_output
  __device__ __forceinline__ void add_output_to_update() const {
    for (int i = d; i < kChunk * columns; i += threads) {
      const int from_token = i / columns, c = i % columns;
      float sum = 0.0f;
      for (int t = from_token; t < kChunk; ++t) sum += s.squares[t * kChunk + from_token] * s.given[t * wide + c];
      s.grad_update[from_token * wide + c] += sum;
    }
  }

  // Y = (I + N^T diag(beta))^-1 dU; diag(beta) Y, the gradient of value, takes grad_output's place, and Y times W that of dU.
  __device__ __forceinline__ void solve_update(int64_t token) const {
    for (int c = d; c < columns; c += threads) {
      float solved[kChunk];
#pragma unroll
      for (int t = kChunk - 1; t >= 0; --t) {
        float x = s.grad_update[t * wide + c];
#pragma unroll
        for (int later = t + 1; later < kChunk; ++later) x -= s.squares[later * kChunk + t] * solved[later];
        s.grad_update[t * wide + c] = x * s.missing[t * wide + c];
        solved[t] = x * s.beta[t];
        s.given[t * wide + c] = solved[t];
        if (token + t < tokens.end && column + c < V)
          const_cast<T*>(row_of<T>(grad.grad_value, args.value_strides, batch, head, token + t))[column + c] =
              static_cast<T>(solved[t]);
      }
    }
  }

  // The gradient of beta, sums of rows of Y times W.
  __device__ __forceinline__ void store_beta(int64_t token) const {
    if (grad.grad_beta != nullptr && d < kChunk && token + d < tokens.end) {
      float sum = 0.0f;
      for (int c = 0; c < columns; ++c) sum += s.grad_update[d * wide + c];
      plan.beta_parts[((slice * args.batch + batch) * args.v_heads + head) * args.tokens + token + d] = sum;
    }
  }

  // What rows that read a chunk's state and keys, queries or keys, hand on to themselves, to those and to decays; s.given has
  // the gradient of what they read.
  __device__ __forceinline__ void rows_backward(const OwnChunk& own, bool of_query, const float (&rows)[kChunk],
                                                float (&grad_rows)[kChunk], float (&grad_keys)[kChunk],
                                                float (&grad_g)[kChunk]) const {
    float factors[kChunk];
    pair_factors(s, threads, columns, of_query ? 1 : 0, of_query ? 1.0f : -1.0f);
    times_own_row(s.given, own_state, columns, grad_rows);
    float product = of_query ? 1.0f : -1.0f;
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      product *= own.decays[t];
      grad_rows[t] *= product;
      factors[t] = rows[t] * product;
    }
    float later = 0.0f;
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      later += rows[t] * grad_rows[t];
      grad_g[t] += later;
    }
    add_to_own_row(s.given, factors, 1.0f, own_grad, columns);
    __syncthreads();
    pairs_backward(s.factors, of_query, rows, own.keys, own.decays, grad_rows, grad_keys, grad_g);
  }

  // Rows of D of the chunk's tokens; `to` begins at token 0.
  __device__ __forceinline__ void store_rows(int64_t token, const float (&rows)[kChunk], float* to) const {
#pragma unroll
    for (int t = 0; t < kChunk; ++t)
      if (token + t < tokens.end && d < D) to[(token + t) * D + d] = rows[t];
  }

  // The gradient of g, with decay_per_key each thread's own, else their sum.
  __device__ __forceinline__ void store_decays(int64_t token, const float (&grad_g)[kChunk]) const {
    if (grad.grad_log_decay == nullptr) return;
    const int64_t decay_row = ((slice * args.batch + batch) * args.v_heads + head) * args.tokens + token;
    if (args.decay_per_key) {
#pragma unroll
      for (int t = 0; t < kChunk; ++t)
        if (token + t < tokens.end && d < D) plan.decay_parts[(decay_row + t) * D + d] = grad_g[t];
      return;
    }
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const float sum = over_warp(d < D ? grad_g[t] : 0.0f);
      if (d % 32 == 0) s.sums[t * 8 + d / 32] = sum;
    }
    __syncthreads();
    if (d < kChunk && token + d < tokens.end) {
      float sum = 0.0f;
      for (int warp = 0; warp < threads / 32; ++warp) sum += s.sums[d * 8 + warp];
      plan.decay_parts[decay_row + d] = sum;
    }
  }
};

// D rounded up to whole warps of threads.
template <class T>
__global__ void __launch_bounds__(kCudaMaxKeyWidth) StatesKernel(const __grid_constant__ Plan plan) {
  extern __shared__ float states_shared[];
  const Walk<T> walk(plan, states_shared);
  const GradArgs& grad = plan.args;
  const Args& args = grad.in;
  walk.load_row(grad.grad_final_state == nullptr ? nullptr : grad.grad_final_state + walk.state_at, walk.own_grad);
  const int64_t last_span = walk.chunks > 0 ? (walk.chunks - 1) / plan.span : -1;
  for (int64_t span = last_span; span >= 0; --span) {
    const int64_t first = span * plan.span, end = first + plan.span < walk.chunks ? first + plan.span : walk.chunks;
    const bool from_the_start = span == last_span;
    if (from_the_start)
      walk.load_row(args.initial_state == nullptr ? nullptr : args.initial_state + walk.state_at, walk.own_state);
    else if (walk.d < walk.D) copy_floats(walk.border_at(span), walk.own_state, walk.columns);
    for (int64_t chunk = from_the_start ? 0 : first; chunk < end; ++chunk) walk.forwards(chunk, first, from_the_start);
    for (int64_t chunk = end - 1; chunk >= first; --chunk) {
      OwnChunk own;
      const int64_t token = walk.tokens.begin + chunk * kChunk, slot = walk.slots + chunk;
      __syncthreads();
      walk.take_chunk(token, slot, own);
      walk.take_held(chunk);
      float grad_keys[kChunk], grad_g[kChunk];
      __syncthreads();
      walk.state_backward(own, grad_keys, grad_g);

      // After the heads of the output the keys: they too read from the state before, for the rule itself.
      for (int64_t h = 0; h <= walk.group; ++h) {
        const bool of_query = h < walk.group;
        const int64_t out_head = walk.head * walk.group + h;
        float rows[kChunk], grad_rows[kChunk];
        __syncthreads();
        if (of_query) {
          walk.take_queries(token, slot, out_head, rows);
          walk.take_columns(grad.grad_output, args.output_strides, out_head, token, walk.s.given);
          // P in place of N, which comes back for the keys.
          walk.take_query_scores(slot, out_head);
          __syncthreads();
          walk.add_output_to_update();
        } else {
          walk.take_key_scores(slot);
          __syncthreads();
          walk.solve_update(token);
          __syncthreads();
          walk.store_beta(token);
#pragma unroll
          for (int t = 0; t < kChunk; ++t) rows[t] = own.keys[t];
        }
        if (of_query || args.delta) {
          walk.rows_backward(own, of_query, rows, grad_rows, grad_keys, grad_g);
        } else {
#pragma unroll
          for (int t = 0; t < kChunk; ++t) grad_rows[t] = 0.0f;
        }
        float* to = nullptr;
        if (of_query) {
          to = plan.query_parts + ((walk.slice * args.batch + walk.batch) * args.heads + out_head) * args.tokens * walk.D;
        } else {
          to = plan.key_parts + ((walk.slice * args.batch + walk.batch) * args.v_heads + walk.head) * args.tokens * walk.D;
#pragma unroll
          for (int t = 0; t < kChunk; ++t) grad_rows[t] += grad_keys[t];
        }
        walk.store_rows(token, grad_rows, to);
      }
      walk.store_decays(token, grad_g);
    }
  }
  if (grad.grad_initial_state != nullptr) walk.store_row(grad.grad_initial_state + walk.state_at, walk.own_grad);
}

// The sum of a row's parts, through its length, a warp each. `rows`, the operator's input, and `out` have `heads`, the parts
// `all_heads`.
struct RowSums {
  const float* parts;
  const void* rows;
  void* out;
  Strides strides;
  int64_t heads, all_heads;
  int slices;
  float scale;
  unsigned blocks;  // of a head's tokens
  bool vectors;
};

// Four neighbouring numbers of a row, from d on; with `vectors` rows are whole vectors of four.
template <class T>
__device__ __forceinline__ void take_four(const T* row, int d, int D, bool vectors, float (&x)[4]) {
  if (vectors) {
    alignas(4 * sizeof(T)) T four[4];
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float4*>(four) = *reinterpret_cast<const float4*>(row + d);
    else *reinterpret_cast<uint2*>(four) = *reinterpret_cast<const uint2*>(row + d);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(four[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = d + i < D ? static_cast<float>(row[d + i]) : 0.0f;
  }
}

template <class T>
__global__ void __launch_bounds__(kSumThreads)
    SumsKernel(const __grid_constant__ Args args, const __grid_constant__ RowSums sums) {
  constexpr int kFours = kCudaMaxKeyWidth / 128;
  const int lane = static_cast<int>(threadIdx.x % 32), D = static_cast<int>(args.key_width);
  const int64_t token = static_cast<int64_t>(blockIdx.x % sums.blocks) * (kSumThreads / 32) + threadIdx.x / 32;
  const unsigned heads = static_cast<unsigned>(sums.heads), unit = blockIdx.x / sums.blocks;
  const int64_t head = unit % heads, batch = unit / heads, group = sums.all_heads / sums.heads;
  if (token >= args.tokens) return;  // the whole warp
  const bool there = args.cu_seqlens == nullptr || request_of(args, token) >= 0;
  const T* const from = row_of<T>(sums.rows, sums.strides, batch, head, token);
  float x[kFours][4] = {}, y[kFours][4] = {}, squares = 0.0f, along = 0.0f;
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const int d = 128 * j + 4 * lane;
    if (!there || d >= D) continue;
    take_four(from, d, D, sums.vectors, x[j]);
    for (int64_t member = 0; member < group; ++member)
      for (int slice = 0; slice < sums.slices; ++slice) {
        float part[4];
        take_four(
            sums.parts + (((slice * args.batch + batch) * sums.all_heads + head * group + member) * args.tokens + token) * D, d,
            D, sums.vectors, part);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[j][i] += part[i];
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[j][i] *= sums.scale;
      squares += x[j][i] * x[j][i];
    }
  }
  const float inverse = args.normalize ? 1.0f / sqrtf(over_warp(squares) + kUnitRowEps) : 1.0f;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[j][i] *= inverse;
      along += x[j][i] * y[j][i];
    }
  along = args.normalize ? over_warp(along) : 0.0f;
  T* const to = static_cast<T*>(sums.out) + (from - static_cast<const T*>(sums.rows));
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const int d = 128 * j + 4 * lane;
    if (d >= D) continue;
    alignas(4 * sizeof(T)) T four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = static_cast<T>(there ? (y[j][i] - x[j][i] * along) * inverse : 0.0f);
    if (sums.vectors && sizeof(T) == 4) *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(four);
    else if (sums.vectors) *reinterpret_cast<uint2*>(to + d) = *reinterpret_cast<const uint2*>(four);
    else
      for (int i = 0; i < 4 && d + i < D; ++i) to[d + i] = four[i];
  }
}

// The same for floats of tokens of value heads, `width` of them.
__global__ void __launch_bounds__(kSumThreads) FloatSumsKernel(const __grid_constant__ Args args, const float* parts,
                                                               int slices, int64_t width, Strides strides, float* out) {
  const int64_t count = args.batch * args.v_heads * args.tokens * width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
    const int64_t token = i / width % args.tokens, head = i / width / args.tokens % args.v_heads;
    const int64_t batch = i / width / args.tokens / args.v_heads;
    float sum = 0.0f;
    if (args.cu_seqlens == nullptr || request_of(args, token) >= 0)
      for (int slice = 0; slice < slices; ++slice) sum += parts[slice * count + i];
    out[batch * strides.batch + head * strides.head + token * strides.token + i % width] = sum;
  }
}

template <class T>
cudaError_t launch_states(const Plan& plan, cudaStream_t stream) {
  const Args& args = plan.args.in;
  const int threads = static_cast<int>(round_up(args.key_width, int64_t{32})), pitch = static_cast<int>(args.key_width) | 1;
  const int64_t score_bytes = int64_t{4} * (4 * kChunk * pitch + (args.decay_per_key ? kChunk * pitch : kChunk)),
                state_bytes = 4 * shared_floats(threads, plan.columns);
  cudaError_t error = allow_shared_memory(ScoresKernel<T>);
  if (error == cudaSuccess) error = allow_shared_memory(StatesKernel<T>);
  if (error != cudaSuccess || args.requests == 0) return error;
  ScoresKernel<T><<<static_cast<unsigned>(plan.slots * args.heads), kScoreThreads, score_bytes, stream>>>(plan);
  StatesKernel<T><<<static_cast<unsigned>(args.requests * args.v_heads * plan.slices), threads, state_bytes, stream>>>(plan);
  return cudaGetLastError();
}

cudaError_t sum_floats(const Args& args, const float* parts, int slices, int64_t width, const Strides& strides, float* out,
                       cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.batch * args.v_heads * args.tokens * width, int64_t{kSumThreads});
  FloatSumsKernel<<<static_cast<unsigned>(blocks < 4096 ? blocks : 4096), kSumThreads, 0, stream>>>(args, parts, slices, width,
                                                                                                    strides, out);
  return cudaGetLastError();
}

cudaError_t launch_float_sums(const Plan& plan, cudaStream_t stream) {
  const Args& args = plan.args.in;
  cudaError_t error = cudaSuccess;
  if (plan.args.grad_beta != nullptr)
    error = sum_floats(args, plan.beta_parts, plan.slices, 1, args.beta_strides, plan.args.grad_beta, stream);
  if (plan.args.grad_log_decay != nullptr && error == cudaSuccess)
    error = sum_floats(args, plan.decay_parts, plan.slices, args.decay_per_key ? args.key_width : 1, args.decay_strides,
                       plan.args.grad_log_decay, stream);
  return error;
}

template <class T>
cudaError_t launch_row_sums(const Plan& plan, cudaStream_t stream) {
  const Args& args = plan.args.in;
  const auto sum_rows = [&](const float* parts, const void* rows, void* out, const Strides& strides, int64_t heads,
                            int64_t all_heads, float scale) {
    const int64_t blocks = ceil_div(args.tokens, int64_t{kSumThreads / 32}), whole = 4 * static_cast<int64_t>(sizeof(T));
    const bool vectors = args.key_width % 4 == 0 && reinterpret_cast<uintptr_t>(rows) % whole == 0 &&
                         reinterpret_cast<uintptr_t>(out) % whole == 0;
    const RowSums sums = {parts,  rows, out, strides, heads, all_heads, plan.slices, scale, static_cast<unsigned>(blocks),
                          vectors};
    SumsKernel<T><<<static_cast<unsigned>(args.batch * heads * blocks), kSumThreads, 0, stream>>>(args, sums);
  };
  sum_rows(plan.query_parts, args.query, plan.args.grad_query, args.query_strides, args.q_heads, args.heads, args.scale);
  sum_rows(plan.key_parts, args.key, plan.args.grad_key, args.key_strides, args.k_heads, plan.key_heads, 1.0f);
  return cudaGetLastError();
}

// Bytes that a CTA of any GPU gets: what is planned with where an engine is built without one.
constexpr int kMostShared = 227 << 10;

// As many columns as leave a CTA for every SM, if they fit: what does not depend on columns is done once for each slice.
void choose_columns(Plan& plan, int shared, int sm_count) {
  const Args& args = plan.args.in;
  const int threads = static_cast<int>(round_up(args.key_width, int64_t{32}));
  for (plan.columns = kMaxColumns; plan.columns > 8; plan.columns /= 2) {
    plan.slices = static_cast<int>(ceil_div(args.value_width, int64_t{plan.columns}));
    const bool fits = 4 * shared_floats(threads, plan.columns) <= shared;
    const bool fills = args.requests * args.v_heads * plan.slices >= sm_count || plan.columns <= 16;
    if (fits && fills && plan.columns < args.value_width + 8) break;
  }
  plan.slices = static_cast<int>(ceil_div(args.value_width, int64_t{plan.columns}));
}

// What launch_states needs beside what launch_row_sums takes.
void plan_states(Plan& plan, Workspace& ws) {
  const Args& args = plan.args.in;
  plan.chunks = ceil_div(args.tokens, int64_t{kChunk});
  plan.slots = args.batch == 1 ? plan.chunks + args.requests : plan.chunks * args.requests;
  const int64_t rows = args.batch * args.tokens, unit = args.v_heads * plan.slices,
                state_floats = args.key_width * plan.columns;
  const int64_t held_floats = (args.key_width + kChunk) * plan.columns;
  plan.span = plan.chunks;
  plan.spans = 1;
  int64_t held = plan.slots;
  if (4 * plan.slots * unit * held_floats > kHeldBytes) {
    int64_t root = 1;
    while (root * root < plan.chunks) ++root;
    const int64_t spans = ceil_div(plan.chunks, root);
    if (args.requests * (root + spans) < plan.slots && root < plan.chunks) {
      plan.span = root;
      plan.spans = spans;
      held = args.requests * root;
    }
  }
  plan.key_scores = ws.scratch<float>(plan.slots * args.v_heads * kSquare);
  plan.query_scores = ws.scratch<float>(plan.slots * args.heads * kSquare);
  plan.key_lengths = ws.scratch<float>(plan.slots * args.v_heads * kChunk);
  plan.query_lengths = ws.scratch<float>(plan.slots * args.heads * kChunk);
  plan.held = ws.scratch<float>(held * unit * held_floats);
  plan.beta_parts = ws.scratch<float>(args.delta ? plan.slices * rows * args.v_heads : 0);
  plan.decay_parts = ws.scratch<float>(
      plan.args.wants_grad_decay ? plan.slices * rows * args.v_heads * (args.decay_per_key ? args.key_width : 1) : 0);
  plan.borders = ws.scratch<float>(plan.spans > 1 ? args.requests * plan.spans * unit * state_floats : 0);
}

}  // namespace

int launch_grad(const GradArgs& grad, const CudaTarget& target, Workspace& ws) {
  const Args& args = grad.in;
  int shared = 0;
  cudaError_t error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error != cudaSuccess) {
    if (!ws.counting()) return error;
    cudaGetLastError();  // not to be taken for the next launch's
    shared = kMostShared;
  }
  Plan plan = {};
  plan.args = grad;
  const bool in_chunks = grad_chunks_fit(grad, shared);
  if (in_chunks) plan.slices = 1;
  else choose_columns(plan, shared, target.sm_count);
  const int64_t rows = args.batch * args.tokens, decays = rows * args.v_heads * (args.decay_per_key ? args.key_width : 1);
  plan.key_heads = in_chunks ? key_part_heads(args) : args.v_heads;
  plan.query_parts = ws.scratch<float>(plan.slices * rows * args.heads * args.key_width);
  plan.key_parts = ws.scratch<float>(plan.slices * rows * plan.key_heads * args.key_width);
  if (!in_chunks) plan_states(plan, ws);
  const int64_t members = in_chunks && args.decay_per_key && grad.wants_grad_decay ? args.heads / args.v_heads : 1;
  float* const member_decays = ws.scratch<float>(members > 1 ? members * decays : 0);

  const auto stream = static_cast<cudaStream_t>(target.stream);
  if (args.cu_seqlens != nullptr && !ws.counting()) {  // tokens of no request
    const int64_t bytes = rows * args.v_heads * args.value_width * element_size(static_cast<DType>(args.dtype));
    error = cudaMemsetAsync(grad.grad_value, 0, static_cast<size_t>(bytes), stream);
    for (const auto& [floats, count] : {std::pair{grad.grad_beta, rows * args.v_heads}, std::pair{grad.grad_log_decay, decays}})
      if (in_chunks && floats != nullptr && error == cudaSuccess)
        error = cudaMemsetAsync(floats, 0, static_cast<size_t>(count) * sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  if (in_chunks) {
    const int failed =
        launch_grad_chunks(grad, {plan.query_parts, plan.key_parts, members > 1 ? member_decays : nullptr}, target, ws);
    if (failed) return failed;
  }
  if (ws.counting()) return cudaSuccess;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    cudaError_t failed = in_chunks ? cudaSuccess : launch_states<T>(plan, stream);
    if (failed == cudaSuccess && !in_chunks) failed = launch_float_sums(plan, stream);
    if (failed == cudaSuccess && members > 1 && grad.grad_log_decay != nullptr)
      failed = sum_floats(args, member_decays, static_cast<int>(members), args.key_width, args.decay_strides,
                          grad.grad_log_decay, stream);
    return failed != cudaSuccess ? failed : launch_row_sums<T>(plan, stream);
  });
}

}  // namespace leanfleet::gated_delta_rule
