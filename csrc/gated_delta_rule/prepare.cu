// What chunks of a prompt need besides states, see chunks.cuh and chunked.cu. A CTA has a chunk of a key head and up to four of
// its value heads: the products of keys with keys and queries are made once for all of them. Four warps make systems, four
// scores, 16 rows each of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/prepare.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kHeads = kWarps;  // of a CTA at most: a warp makes the scalars of each
constexpr int kPrepareThreads = 2 * kThreads;

// What a value head's tokens have. sums: running sums of g over log 2 as a float and what is left of it, so that differences
// are exact enough whatever their size. Between blocks the decay is that from the token before the later block: `row` from
// there to a token, `column` from a token to there, [later block - 1]. suffix: from a token to the chunk's end.
struct HeadScalars {
  float2 sums[kChunk];
  float beta[kChunk], prefix[kChunk], suffix[kChunk], row[kChunk], column[kBlocks - 1][kChunk];
};

struct Shared {
  HeadScalars heads[kHeads];
  float key[kChunk];  // factors of rows
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
  uint64_t keys_full, queries_full;
};

template <int kD>
struct Layout {
  static constexpr int kBoxes = kD / 64, kRowsBytes = kBoxes * kSquareBytes;
  // Tiles of queries, of the system and its inverse in two planes, and of scores.
  static constexpr int kQueries = kRowsBytes, kSystem = kQueries + kRowsBytes, kSolved = kSystem + 2 * kSquareBytes;
  static constexpr int kScores = kSolved + 2 * kSquareBytes, kShared = kScores + kSquareBytes;
  static constexpr int kBytes = 1024 + kShared + static_cast<int>(sizeof(Shared));
};

struct Place {
  ChunkPlace chunk;
  int64_t slot;  // of the window
  int key_head, first_head, heads;
};

#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kSystemBarrier = 1, kScoreBarrier = 2;  // of four warps each
constexpr int kKeyBarrier = 3;                        // of all
constexpr double kLog2E = 1.4426950408889634;
constexpr float kLeastLog = -20000.0f;  // what a token that forgets all counts as: sums stay finite, and exp of it is 0

__device__ __forceinline__ float decay_of(float2 from, float2 to) {
  return exp2f(fminf((to.x - from.x) + (to.y - from.y), 0.0f));
}

// One warp: scalars of a value head, whose g and beta of tokens l and 32 + l lane l brings.
__device__ __forceinline__ void take_scalars(const float (&g)[2], const float (&beta)[2], HeadScalars& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  double own[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) own[half] = kLog2E * (g[half] <= kForgotten ? kLeastLog : g[half]);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double before = __shfl_up_sync(kFullWarp, own[half], offset);
      if (lane >= offset) own[half] += before;
    }
  }
  own[1] += __shfl_sync(kFullWarp, own[0], 31);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane;
    const float sum = static_cast<float>(own[half]);
    s.sums[t] = make_float2(sum, static_cast<float>(own[half] - static_cast<double>(sum)));
    s.beta[t] = beta[half];
    s.prefix[t] = exp2f(sum);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = 32 * half + lane, before = t / kBlock * kBlock - 1;
    const float2 sums = s.sums[t];
    s.row[t] = before < 0 ? 0.0f : decay_of(s.sums[before], sums);
#pragma unroll
    for (int later = 0; later < kBlocks - 1; ++later)
      if (32 * half < kBlock * (later + 1)) s.column[later][t] = decay_of(sums, s.sums[kBlock * (later + 1) - 1]);
    s.suffix[t] = decay_of(sums, s.sums[kChunk - 1]);
  }
}

// A warp's 16 rows of X K^T: the blocks before the one on the diagonal, and that.
struct Products {
  float before[kBlocks - 1][2][4], diagonal[2][4];
};

// Of the tile at `rows`, from row 16 warp on. squares: the diagonal block of X X^T.
template <class T, int kD, bool kSquares>
__device__ __forceinline__ void make_products(uint32_t rows, uint32_t keys, int warp, int lane, Products& c,
                                              float (&squares)[2][4]) {
  c = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) squares[n][e] = 0.0f;
#pragma unroll 2
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t a[4], b[4];
    load_matrices(a, left_rows(rows, warp, k, lane));
    load_matrices(b, right_rows(keys, warp, k, lane));
    mma(T{}, c.diagonal[0], a, b[0], b[1]);
    mma(T{}, c.diagonal[1], a, b[2], b[3]);
    if constexpr (kSquares) {
      load_matrices(b, right_rows(rows, warp, k, lane));
      mma(T{}, squares[0], a, b[0], b[1]);
      mma(T{}, squares[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int block = 0; block < kBlocks - 1; ++block) {
      if (block >= warp) continue;
      load_matrices(b, right_rows(keys, block, k, lane));
      mma(T{}, c.before[block][0], a, b[0], b[1]);
      mma(T{}, c.before[block][1], a, b[2], b[3]);
    }
  }
}

// The factors of rows lane / 4 and 8 later of a warp's 16: `scale`, over the row's length with normalize. The squares of
// lengths stand on the diagonal of the block.
__device__ __forceinline__ void row_factors(const float (&squares)[2][4], bool normalize, float scale, int lane,
                                            float (&factor)[2]) {
  factor[0] = factor[1] = scale;
  if (!normalize) return;
  const int row = lane / 4, owner = 4 * row + row / 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float even = __shfl_sync(kFullWarp, squares[r][2 * r], owner),
                odd = __shfl_sync(kFullWarp, squares[r][2 * r + 1], owner);
    factor[r] = scale * rsqrtf((row % 2 == 0 ? even : odd) + kUnitRowEps);
  }
}

__device__ __forceinline__ void scale_products(Products& c, const float (&row)[2], const float (&key)[kChunk], int warp,
                                               int lane) {
  const auto scale = [&](float (&x)[2][4], int block) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 column = *reinterpret_cast<const float2*>(&key[kBlock * block + 8 * n + fragment_column(lane, 0)]);
#pragma unroll
      for (int r = 0; r < 2; ++r) x[n][2 * r] *= row[r] * column.x, x[n][2 * r + 1] *= row[r] * column.y;
    }
  };
#pragma unroll
  for (int block = 0; block < kBlocks - 1; ++block)
    if (block < warp) scale(c.before[block], block);
  scale(c.diagonal, warp);
}

// Calls put(row of the warp's, column, x, y) for pairs of a warp's rows of products with decay, times by[row / 8], before the
// block on the diagonal.
template <class Put>
__device__ __forceinline__ void with_decay(const Products& c, const HeadScalars& head, const float (&by)[2], int warp, int lane,
                                           Put&& put) {
  float row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) row[r] = by[r] * head.row[kBlock * warp + fragment_row(lane, 2 * r)];
#pragma unroll
  for (int block = 0; block < kBlocks - 1; ++block) {
    if (block >= warp) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int first = kBlock * block + 8 * n + fragment_column(lane, 0);
      const float2 column = *reinterpret_cast<const float2*>(&head.column[warp - 1][first]);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        put(fragment_row(lane, 2 * r), first, row[r] * column.x * c.before[block][n][2 * r],
            row[r] * column.y * c.before[block][n][2 * r + 1]);
    }
  }
}
// The same of the block on the diagonal, 0 above it. own: on it too.
template <bool kOwn, class Put>
__device__ __forceinline__ void diagonal_with_decay(const Products& c, const HeadScalars& head, const float (&by)[2], int warp,
                                                    int lane, Put&& put) {
  const float2* const sums = &head.sums[kBlock * warp];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int first = 8 * n + fragment_column(lane, 0);
    const float4 from = *reinterpret_cast<const float4*>(&sums[first]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = fragment_row(lane, 2 * r);
      const float2 to = sums[t];
      const float x = exp2_fast(fminf((to.x - from.x) + (to.y - from.y), 0.0f));
      const float y = exp2_fast(fminf((to.x - from.z) + (to.y - from.w), 0.0f));
      const int last = kOwn ? t : t - 1;
      put(t, first, first <= last ? by[r] * x * c.diagonal[n][2 * r] : 0.0f,
          first < last ? by[r] * y * c.diagonal[n][2 * r + 1] : 0.0f);
    }
  }
}

// This warp's rows of -M in two planes, of products of keys, with the inverse of I + M's block in place of the diagonal one.
template <class T>
__device__ __forceinline__ void make_system(const Products& c, const HeadScalars& head, Shared& s, uint32_t high, uint32_t low,
                                            int warp, int lane) {
  float (&diagonal)[kBlock][kDiagonalStride] = s.diagonal[warp];
  float by[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) by[r] = -head.beta[kBlock * warp + fragment_row(lane, 2 * r)];
  diagonal_with_decay<false>(c, head, by, warp, lane, [&](int row, int column, float x, float y) {
    *reinterpret_cast<float2*>(&diagonal[row][column]) = make_float2(x, y);
  });
  with_decay(c, head, by, warp, lane,
             [&](int row, int column, float x, float y) { store_planes<T>(high, low, kBlock * warp + row, column, x, y); });
  __syncwarp();
  put_inverse<T>(diagonal, high, low, warp, lane);
}

// Four warps: P of all heads of the output that belong to the value heads of this CTA. A warp's rows lie together in a tile.
template <class T, int kD>
__device__ __forceinline__ void all_scores(const Prompt& prompt, const CUtensorMap& query_map, const Place& place, Shared& s,
                                           uint32_t base, int warp, int lane) {
  using L = Layout<kD>;
  const Args& args = prompt.args;
  const uint32_t keys = base, queries = base + L::kQueries, scores = base + L::kScores + kSquareBytes / kWarps * warp;
  const int group = prompt.group, of_query = prompt.of_query;
  const int first = place.first_head * group, count = place.heads * group;
  uint32_t parity = 0;
  Products c;
  float query[2];
  for (int h = 0; h < count; ++h) {
    if (h == 0 || (first + h) % of_query == 0) {
      if (h > 0) {
        named_barrier(kScoreBarrier, kThreads);
        if (warp == 0 && lane == 0)
          load_rows<kD>(query_map, queries, place.chunk, (first + h) / of_query, shared_address(&s.queries_full));
      }
      wait_rows<kD>(prompt, place.chunk, queries, s.queries_full, parity, 32 * warp + lane, kThreads,
                    [] { named_barrier(kScoreBarrier, kThreads); });
      parity ^= 1;
      float squares[2][4];
      make_products<T, kD, true>(queries, keys, warp, lane, c, squares);
      row_factors(squares, args.normalize, args.scale, lane, query);
      if (h == 0) named_barrier(kKeyBarrier, kPrepareThreads);  // factors of keys
      scale_products(c, query, s.key, warp, lane);
    }
    const HeadScalars& head = s.heads[h / group];
    const float one[2] = {1.0f, 1.0f};
    const auto put = [&](int row, int column, float x, float y) { store_pair(scores, row, column, pack_pair(T{}, x, y)); };
    with_decay(c, head, one, warp, lane, put);
    diagonal_with_decay<true>(c, head, one, warp, lane,
                              [&](int row, int column, float x, float y) { put(row, kBlock * warp + column, x, y); });
    __syncwarp();
    Scores& to = static_cast<Scores*>(prompt.scores)[place.slot * args.heads + first + h];
    copy_16_bytes(to.tile + kSquareBytes / kWarps * warp, scores, kSquareBytes / kWarps, lane, 32);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = kBlock * warp + fragment_row(lane, 2 * r);
        to.from_state[t] = head.prefix[t] * query[r];
      }
    }
    __syncwarp();
  }
}

// Four warps: the systems of all value heads of this CTA.
template <class T, int kD>
__device__ __forceinline__ void all_systems(const Prompt& prompt, const Place& place, Shared& s, uint32_t base, int warp,
                                            int lane) {
  using L = Layout<kD>;
  const uint32_t high = base + L::kSystem, low = high + kSquareBytes, solved = base + L::kSolved;
  Products c;
  float squares[2][4], key[2];
  make_products<T, kD, false>(base, base, warp, lane, c, squares);
  row_factors(c.diagonal, prompt.args.normalize, 1.0f, lane, key);
  if (lane % 4 == 0) s.key[kBlock * warp + lane / 4] = key[0], s.key[kBlock * warp + 8 + lane / 4] = key[1];
  named_barrier_arrive(kKeyBarrier, kPrepareThreads);
  named_barrier(kSystemBarrier, kThreads);
  scale_products(c, key, s.key, warp, lane);
  for (int v = 0; v < place.heads; ++v) {
    const HeadScalars& head = s.heads[v];
    make_system<T>(c, head, s, high, low, warp, lane);
    named_barrier(kSystemBarrier, kThreads);  // the system is there, and the inverse before it has been read
    solve<T>(s.diagonal, head.beta, high, low, solved, warp, lane);
    named_barrier(kSystemBarrier, kThreads);
    System& to = static_cast<System*>(prompt.systems)[place.slot * prompt.args.v_heads + place.first_head + v];
    const int thread = 32 * warp + lane, t = thread % kChunk;
    copy_16_bytes(to.high, solved, 2 * kSquareBytes, thread, kThreads);
    if (thread < kChunk) to.from_state[t] = head.prefix[t] * s.key[t];
    else to.to_state[t] = head.suffix[t] * s.key[t];
    if (thread == 0) to.kept = head.prefix[kChunk - 1];
  }
}
#endif

template <class T, int kD>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    PrepareKernel(const __grid_constant__ Prompt prompt, const __grid_constant__ PromptMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  using L = Layout<kD>;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Args& args = prompt.args;
  // Remainders without a sign: addresses are then sums of few parts.
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % kWarps);
  const bool makes_systems = threadIdx.x < kThreads;
  const int thread = 32 * warp + lane, of_key = prompt.of_key, part = static_cast<int>(blockIdx.z) * kHeads;
  Place place = {};
  place.slot = blockIdx.x;
  place.key_head = static_cast<int>(blockIdx.y);
  place.first_head = place.key_head * of_key + part;
  place.heads = of_key - part < kHeads ? of_key - part : kHeads;
  place.chunk = chunk_of(args, prompt.first_slot + place.slot);
  if (place.chunk.tokens == 0) return;

  unsigned char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  Shared& s = *reinterpret_cast<Shared*>(shared + L::kShared);
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&s.keys_full), 1);
    mbarrier_init(shared_address(&s.queries_full), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    load_rows<kD>(maps.key, base, place.chunk, place.key_head, shared_address(&s.keys_full));
    load_rows<kD>(maps.query, base + L::kQueries, place.chunk, place.first_head * prompt.group / prompt.of_query,
                  shared_address(&s.queries_full));
  }
  if (!makes_systems) {
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
    if (warp < place.heads) take_scalars(g, beta, s.heads[warp]);
    clear_above(base + L::kScores, thread);
  } else {
    clear_above(base + L::kSolved, thread);
    clear_above(base + L::kSolved + kSquareBytes, thread);
  }
  __syncthreads();
  wait_rows<kD>(prompt, place.chunk, base, s.keys_full, 0, thread, kThreads, [] { __syncthreads(); });
  if (makes_systems) all_systems<T, kD>(prompt, place, s, base, warp, lane);
  else all_scores<T, kD>(prompt, maps.query, place, s, base, warp, lane);
#endif
}

template <class T, int kD>
cudaError_t launch_width(const Prompt& prompt, const PromptMaps& maps, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD>::kBytes;
  const auto kernel = PrepareKernel<T, kD>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const Args& args = prompt.args;
  const dim3 grid(static_cast<unsigned>(prompt.slots), static_cast<unsigned>(args.k_heads),
                  static_cast<unsigned>(ceil_div(args.v_heads / args.k_heads, int64_t{kHeads})));
  kernel<<<grid, kPrepareThreads, kBytes, stream>>>(prompt, maps);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Prompt& prompt, const PromptMaps& maps, cudaStream_t stream) {
  return prompt.args.key_width <= 64    ? launch_width<T, 64>(prompt, maps, stream)
         : prompt.args.key_width <= 128 ? launch_width<T, 128>(prompt, maps, stream)
                                        : launch_width<T, 256>(prompt, maps, stream);
}

}  // namespace

int launch_prepare(const Prompt& prompt, const PromptMaps& maps, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (prompt.args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(prompt, maps, on);
  return launch_type<__nv_bfloat16>(prompt, maps, on);
}

}  // namespace leanfleet::gated_delta_rule
