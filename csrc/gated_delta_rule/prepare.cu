// What chunks of a prompt need besides states, see chunks.cuh and chunked.cu. A CTA has a chunk of a key head and up to four of
// its value heads: the products of keys with keys and queries are made once for all of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/chunks.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kHeads = kWarps;  // of a CTA at most: a warp makes the scalars of each

// What a value head's tokens have. Between blocks the decay is that from the token before the later block: `row` from there to
// a token, `column` from a token to there, [later block - 1].
struct HeadScalars {
  DecaySums decay;
  float beta[kChunk], prefix[kChunk], row[kChunk], column[kBlocks - 1][kChunk];
};

struct Shared {
  HeadScalars heads[kHeads];
  float key[kChunk], query[kChunk];  // factors of rows: 1 / length, and for queries scale too
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
};

template <int kD>
struct Layout {
  static constexpr int kRowsBytes = kChunk * kD * 2;
  // Tiles of the system take the place of the queries.
  static constexpr int kQueries = kRowsBytes, kHigh = kQueries, kLow = kHigh + kSquareBytes;
  static constexpr int kScores = kQueries + (kRowsBytes > 2 * kSquareBytes ? kRowsBytes : 2 * kSquareBytes);
  static constexpr int kShared = kScores + kSquareBytes;
  static constexpr int kBytes = kShared + static_cast<int>(sizeof(Shared));
};

struct Place {
  ChunkPlace chunk;
  int64_t slot;  // of the window
  int64_t key_head, first_head;
  int heads;
};

// One warp: scalars of a value head, whose g and beta of tokens l and 32 + l lane l brings.
__device__ __forceinline__ void take_scalars(const float (&g)[2], const float (&beta)[2], const float (&key)[kChunk],
                                             HeadScalars& s, System& to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float prefix[2];
  sum_decay(g, s.decay, prefix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane, before = t / kBlock * kBlock - 1;
    s.beta[t] = beta[half];
    s.prefix[t] = prefix[half];
    s.row[t] = before < 0 ? 0.0f : decay_between(s.decay, before, t);
#pragma unroll
    for (int later = 0; later < kBlocks - 1; ++later) {
      const int last = kBlock * (later + 1) - 1;
      s.column[later][t] = t <= last ? key[t] * decay_between(s.decay, t, last) : 0.0f;
    }
    to.from_state[t] = prefix[half] * key[t];
    to.to_state[t] = key[t] * decay_between(s.decay, t, kChunk - 1);
    if (t == kChunk - 1) to.kept = prefix[half];
  }
}

// Blocks above the diagonal, which nothing else writes, by all threads.
__device__ __forceinline__ void clear_above(uint32_t tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kChunk / 8; i += kThreads)
    if (i % 8 / 2 > i / 8 / kBlock) store_16_bytes(tile + chunk_offset<kChunk>(i / 8, i % 8), make_uint4(0, 0, 0, 0));
}
__device__ __forceinline__ void copy_tile(unsigned char* to, uint32_t tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kSquareBytes / 16; i += kThreads)
    reinterpret_cast<uint4*>(to)[i] = load_16_bytes(tile + 16 * i);
}

// This warp's rows of P, of products of queries and keys.
template <class T>
__device__ __forceinline__ void make_scores(const float (&c)[2 * kBlocks][4], const HeadScalars& head, const Shared& s,
                                            uint32_t scores, int warp, int lane) {
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int t = kBlock * warp + fragment_row(lane, e);
    const float query = s.query[t], row = query * head.row[t];
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n / 2 > warp) continue;
      const int first = 8 * n + fragment_column(lane, 0);
      float p[2];
      if (n / 2 < warp) {
        const float2 column = *reinterpret_cast<const float2*>(&head.column[warp - 1][first]);
        p[0] = row * column.x * c[n][e];
        p[1] = row * column.y * c[n][e + 1];
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          p[i] = first + i <= t ? query * s.key[first + i] * decay_between(head.decay, first + i, t) * c[n][e + i] : 0.0f;
      }
      store_pair(scores, t, first, pack_pair(T{}, p[0], p[1]));
    }
  }
}

// This warp's rows of -M in two planes, of products of keys, with the inverse of I + M's block in place of the diagonal one.
template <class T>
__device__ __forceinline__ void make_system(const float (&c)[2 * kBlocks][4], const HeadScalars& head, Shared& s, uint32_t high,
                                            uint32_t low, int warp, int lane) {
  float (&diagonal)[kBlock][kDiagonalStride] = s.diagonal[warp];
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int t = kBlock * warp + fragment_row(lane, e);
    const float key = -head.beta[t] * s.key[t], row = key * head.row[t];
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n / 2 > warp) continue;
      const int first = 8 * n + fragment_column(lane, 0);
      if (n / 2 < warp) {
        const float2 column = *reinterpret_cast<const float2*>(&head.column[warp - 1][first]);
        store_planes<T>(high, low, t, first, row * column.x * c[n][e], row * column.y * c[n][e + 1]);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = first + i;
          diagonal[t % kBlock][from % kBlock] =
              from < t ? key * s.key[from] * decay_between(head.decay, from, t) * c[n][e + i] : 0.0f;
        }
      }
    }
  }
  __syncwarp();
  invert_block(diagonal, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = fragment_row(lane, e), column = 8 * n + fragment_column(lane, e);
      store_planes<T>(high, low, kBlock * warp + row, kBlock * warp + column, diagonal[row][column], diagonal[row][column + 1]);
    }
}

// A 16 x 16 block as the left side of products, in two planes.
struct Planes {
  uint32_t high[4], low[4];
};
template <class T>
__device__ __forceinline__ Planes take_planes(const float (&a)[4], const float (&b)[4]) {
  Planes to;
  const float pairs[4][2] = {{a[0], a[1]}, {a[2], a[3]}, {b[0], b[1]}, {b[2], b[3]}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t planes[2];
    split_pair<T>(pairs[i][0], pairs[i][1], planes);
    to.high[i] = planes[0], to.low[i] = planes[1];
  }
  return to;
}
// c += left times the transposed block (i, j) of the tiles.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[2][4], const Planes& left, uint32_t high, uint32_t low, int i, int j,
                                         int lane) {
  uint32_t b[4], rest[4];
  load_matrices(b, right_rows(high, i, j, lane));
  load_matrices(rest, right_rows(low, i, j, lane));
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.high, rest[2 * n], rest[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.low, b[2 * n], b[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(T{}, c[n], left.high, b[2 * n], b[2 * n + 1]);
}

// Columns 16 warp .. of (I + M)^-1, transposed, from the block on the diagonal down: x[i] is block (i, warp).
template <class T>
__device__ __forceinline__ void solve(const Shared& s, uint32_t high, uint32_t low, int warp, int lane,
                                      float (&x)[kBlocks][2][4]) {
  Planes solved[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (i < warp) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[i][n][e] = i == warp ? s.diagonal[i][8 * n + fragment_column(lane, e)][fragment_row(lane, e)] : 0.0f;
    if (i > warp) {
      float sum[2][4] = {};
#pragma unroll
      for (int j = 0; j < i; ++j)
        if (j >= warp) multiply<T>(sum, solved[j], high, low, i, j, lane);
      multiply<T>(x[i], take_planes<T>(sum[0], sum[1]), high, low, i, i, lane);
    }
    if (i + 1 < kBlocks) solved[i] = take_planes<T>(x[i][0], x[i][1]);
  }
}

// The same times beta, in two planes, to tiles whose rows are rows again.
template <class T>
__device__ __forceinline__ void store_solved(const float (&x)[kBlocks][2][4], const float (&beta)[kChunk], uint32_t high,
                                             uint32_t low, int warp, int lane) {
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const float factor = beta[kBlock * warp + fragment_row(lane, e)];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i < warp) continue;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t planes[2];
        split_pair<T>(factor * x[i][n][e], factor * x[i][n][e + 1], planes);
        const int row = kBlock * i + 8 * n + lane / 4, column = kBlock * warp + 4 * e + fragment_column(lane, 0);
        store_pair(high, row, column, transpose_matrix(planes[0]));
        store_pair(low, row, column, transpose_matrix(planes[1]));
      }
    }
  }
}

template <class T, int kD>
__device__ __forceinline__ void fetch_query(const Args& args, const Place& place, int64_t head, uint32_t to) {
  fetch<T, kD>(to, row_of<T>(args.query, args.query_strides, place.chunk.batch, head, place.chunk.token),
               args.query_strides.token, place.chunk.tokens, 0, static_cast<int>(args.key_width));
  cp_async_commit();
}

// P of all heads of the output that belong to the value heads of this CTA.
template <class T, int kD>
__device__ __forceinline__ void all_scores(const Prompt& prompt, const Place& place, Shared& s, uint32_t keys, uint32_t queries,
                                           uint32_t scores) {
  const Args& args = prompt.args;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t group = args.heads / args.v_heads, of_query = args.heads / args.q_heads;
  const int64_t first = place.first_head * group, count = place.heads * group;
  float c[2 * kBlocks][4];
  pair_products<T, kD>(queries, keys, warp, lane, c);
  for (int64_t h = 0; h < count; ++h) {
    const int64_t query_head = (first + h) / of_query;
    if (h > 0 && query_head != (first + h - 1) / of_query) {
      fetch_query<T, kD>(args, place, query_head, queries);
      cp_async_wait();
      __syncthreads();
      if (thread < kChunk) s.query[thread] = row_factor<T, kD>(queries, thread, args.normalize, args.scale);
      pair_products<T, kD>(queries, keys, warp, lane, c);
      __syncthreads();
    }
    const HeadScalars& head = s.heads[h / group];
    make_scores<T>(c, head, s, scores, warp, lane);
    __syncthreads();
    Scores& to = prompt.scores[place.slot * args.heads + first + h];
    copy_tile(to.tile, scores);
    if (thread < kChunk) to.from_state[thread] = head.prefix[thread] * s.query[thread];
    __syncthreads();
  }
}

template <class T, int kD>
__device__ __forceinline__ void all_systems(const Prompt& prompt, const Place& place, Shared& s, uint32_t keys, uint32_t high,
                                            uint32_t low) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  float c[2 * kBlocks][4];
  pair_products<T, kD>(keys, keys, warp, lane, c);
  clear_above(high);
  clear_above(low);
  for (int v = 0; v < place.heads; ++v) {
    make_system<T>(c, s.heads[v], s, high, low, warp, lane);
    __syncthreads();
    float x[kBlocks][2][4];
    solve<T>(s, high, low, warp, lane, x);
    __syncthreads();
    store_solved<T>(x, s.heads[v].beta, high, low, warp, lane);
    __syncthreads();
    System& to = prompt.systems[place.slot * prompt.args.v_heads + place.first_head + v];
    copy_tile(to.high, high);
    copy_tile(to.low, low);
    if (v + 1 < place.heads) __syncthreads();
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(kThreads, 4) PrepareKernel(const __grid_constant__ Prompt prompt, unsigned parts) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = Layout<kD>;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Args& args = prompt.args;
  Shared& s = *reinterpret_cast<Shared*>(shared + L::kShared);
  const uint32_t keys = shared_address(shared), queries = keys + L::kQueries, scores = keys + L::kScores;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t of_key = args.v_heads / args.k_heads, unit = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  Place place = {};
  place.slot = unit / args.k_heads;
  place.key_head = unit % args.k_heads;
  place.first_head = place.key_head * of_key + part * kHeads;
  place.heads = static_cast<int>(of_key - part * kHeads < kHeads ? of_key - part * kHeads : kHeads);
  place.chunk = chunk_of(args, prompt.first_slot + place.slot);
  if (place.chunk.tokens == 0) return;

  fetch<T, kD>(keys, row_of<T>(args.key, args.key_strides, place.chunk.batch, place.key_head, place.chunk.token),
               args.key_strides.token, place.chunk.tokens, 0, static_cast<int>(args.key_width));
  fetch_query<T, kD>(args, place, place.first_head * (args.heads / args.v_heads) / (args.heads / args.q_heads), queries);
  float g[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane;
    if (warp >= place.heads || t >= place.chunk.tokens) continue;
    const int64_t head = place.first_head + warp, token = place.chunk.token + t;
    beta[half] = __ldg(row_of<float>(args.beta, args.beta_strides, place.chunk.batch, head, token));
    if (args.log_decay != nullptr)
      g[half] = __ldg(row_of<float>(args.log_decay, args.decay_strides, place.chunk.batch, head, token));
  }
  clear_above(scores);
  cp_async_wait();
  __syncthreads();
  if (thread < kChunk) s.key[thread] = row_factor<T, kD>(keys, thread, args.normalize, 1.0f);
  else s.query[thread - kChunk] = row_factor<T, kD>(queries, thread - kChunk, args.normalize, args.scale);
  __syncthreads();
  if (warp < place.heads)
    take_scalars(g, beta, s.key, s.heads[warp], prompt.systems[place.slot * args.v_heads + place.first_head + warp]);
  __syncthreads();
  all_scores<T, kD>(prompt, place, s, keys, queries, scores);
  all_systems<T, kD>(prompt, place, s, keys, keys + L::kHigh, keys + L::kLow);
}

template <class T, int kD>
cudaError_t launch_width(const Prompt& prompt, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD>::kBytes;
  const auto kernel = PrepareKernel<T, kD>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const Args& args = prompt.args;
  const int64_t parts = ceil_div(args.v_heads / args.k_heads, int64_t{kHeads});
  kernel<<<static_cast<unsigned>(prompt.slots * args.k_heads * parts), kThreads, kBytes, stream>>>(
      prompt, static_cast<unsigned>(parts));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Prompt& prompt, cudaStream_t stream) {
  return prompt.args.key_width <= 64 ? launch_width<T, 64>(prompt, stream) : launch_width<T, 128>(prompt, stream);
}

}  // namespace

int launch_prepare(const Prompt& prompt, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (prompt.args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(prompt, on);
  return launch_type<__nv_bfloat16>(prompt, on);
}

}  // namespace leanfleet::gated_delta_rule
