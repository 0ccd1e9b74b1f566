// What chunks of a prompt need besides states where key dimensions have decays of their own (Kimi Delta Attention), see
// chunks.cuh. With w_i = exp(g_i) of a key dimension and products over tokens taken for each dimension,
//   M[t,s] = beta_t sum over d of k_t k_s w_(s+1) .. w_t for s < t      P[t,s] = scale sum over d of q_t k_s .. for s <= t
// The decay between two tokens is a ratio. W_t is that from the middle of t's block of 16 tokens to t, and over 1 before it:
//   w_(s+1) .. w_t = W_t W'_s / W_s, where W' is the decay from the middle of s's block to that of t's
// so that M and P are products of k W and q W with k / W, for tensor cores. No sum of logarithms is taken: W is a product of
// decays, or one over such a product, and as exact as these. A chunk that has a decay of less than kLeast over half a block, or
// rows whose numbers might leave a float's range, is left to prepare_steep_keys.cu.
// A CTA has a chunk of a head of the output; a thread has two columns of a block. The first head of a state makes its system.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/prepare.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kHalf = kBlock / 2, kHalves = kChunk / kHalf;  // tokens of half a block, and how many of these there are

template <int kD>
struct Shared {
  float key[kChunk], query[kChunk], beta[kChunk];  // factors of rows
  float halves[kHalves][kD];                       // decay over the tokens of each half of a block
  float middles[kBefore][kD];                      // decay from the middle of a pair's keys to that of its rows
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
  uint64_t keys_full, queries_full;
};

// Rows k W, rows q W and columns k / W in two planes each; keys and queries come to where the first plane of their rows will be.
// Then, in their place, the system, its inverse and the scores.
template <int kD>
struct Layout {
  static constexpr int kThreads = 2 * kD, kRows = kChunk * kD * 2;
  static constexpr int kCtas = kD == 64 ? 3 : 256 / kD;  // of an SM
  static constexpr int kKeys = 0, kQueries = kKeys + 2 * kRows, kColumns = kQueries + 2 * kRows, kShared = kColumns + 2 * kRows;
  static constexpr int kSystem = 0, kSolved = kSystem + 2 * kSquareBytes, kScores = kSolved + 2 * kSquareBytes;
  static constexpr int kBytes = 1024 + kShared + static_cast<int>(sizeof(Shared<kD>));
  static_assert(kScores + kSquareBytes <= kShared);
};

#if __CUDA_ARCH_FEAT_SM90_ALL
using Plane = __nv_bfloat16;                                 // has the range, whatever the type of keys
constexpr int kPairs = kBefore + kBlocks;                    // the last are those of a block with itself
constexpr float kLeast = 2.2e-19f;                           // exp(-43): the square of it is a normal number
constexpr float kSmallestRow = 1e-20f, kLargestRow = 1e20f;  // squares of lengths
constexpr int kSystemBarrier = 1;                            // of four warps

template <class T, int kD>
struct KeyChunk {
  using L = Layout<kD>;
  static constexpr int kCtaWarps = L::kThreads / 32, kOfWarp = (kPairs + kCtaWarps - 1) / kCtaWarps;
  const Prompt& prompt;
  const ChunkPlace chunk;
  const int64_t slot, head, out_head;
  unsigned char* const shared;
  Shared<kD>& s;
  const int block, column;  // of this thread
  const int boxes;

  __device__ __forceinline__ uint32_t at(int offset) const { return shared_address(shared) + offset; }
  __device__ __forceinline__ KeySystem<kD>& system() const { return key_system<kD>(prompt, slot, head); }
  __device__ __forceinline__ KeyScores<kD>& scores() const { return key_scores<kD>(prompt, slot, out_head); }
  __device__ __forceinline__ bool makes_system() const { return out_head == head * prompt.group; }
  __device__ __forceinline__ bool has_columns() const { return kD <= 128 || column < 64 * boxes; }

  // The decays of a thread's tokens, 1 past the request's end, become products: of those from the middle to the token, or of
  // those behind the token up to the middle. Returns whether the middle will do for all of them.
  __device__ __forceinline__ bool load_decays(float2 (&w)[kBlock]) const {
    const Args& args = prompt.args;
    if (!has_columns()) return true;
    const bool there = column < args.key_width;
    const float* const first =
        row_of<float>(args.log_decay, args.decay_strides, chunk.batch, head, chunk.token + kBlock * block) + column;
    const bool aligned = reinterpret_cast<uintptr_t>(first) % 8 == 0 && args.decay_strides.token % 2 == 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      w[i] = make_float2(0.0f, 0.0f);
      if (!there || kBlock * block + i >= chunk.tokens) continue;
      const float* const from = first + i * args.decay_strides.token;
      w[i] = aligned ? __ldg(reinterpret_cast<const float2*>(from)) : make_float2(__ldg(from), __ldg(from + 1));
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) w[i] = make_float2(__expf(w[i].x), __expf(w[i].y));
    float2 before = make_float2(1.0f, 1.0f), behind = before;
#pragma unroll
    for (int i = kHalf - 1; i >= 0; --i) {
      const float2 own = w[i];
      w[i] = before;
      before = times(before, own);
    }
#pragma unroll
    for (int i = kHalf; i < kBlock; ++i) w[i] = behind = times(behind, w[i]);
    *reinterpret_cast<float2*>(&s.halves[2 * block][column]) = before;
    *reinterpret_cast<float2*>(&s.halves[2 * block + 1][column]) = behind;
    return before.x >= kLeast && before.y >= kLeast && behind.x >= kLeast && behind.y >= kLeast;  // false for NaN
  }

  // The decay over halves first .. last - 1 of blocks.
  __device__ __forceinline__ float2 over_halves(int first, int last) const {
    float2 by = make_float2(1.0f, 1.0f);
    for (int half = first; half < last; ++half) by = times(by, *reinterpret_cast<const float2*>(&s.halves[half][column]));
    return by;
  }

  // Factors of rows, of which neighbouring threads share one. Returns whether its numbers are of a usual size.
  __device__ __forceinline__ bool make_row_factors(int thread) const {
    constexpr int kShare = L::kThreads / (2 * kChunk);
    const int row = thread / kShare % kChunk;
    const bool of_keys = thread < kShare * kChunk;
    float squares = 0.0f;
#pragma unroll 4
    for (int part = thread % kShare; part < 8 * boxes; part += kShare) {
      float x[8];
      load_8<T>(at(of_keys ? L::kKeys : L::kQueries), row, part, x);
#pragma unroll
      for (int i = 0; i < 8; i += 2) squares += x[i] * x[i] + x[i + 1] * x[i + 1];
    }
#pragma unroll
    for (int other = 1; other < kShare; other *= 2) squares += __shfl_xor_sync(kFullWarp, squares, other);
    const float scale = of_keys ? 1.0f : scale_of(prompt.args, chunk, out_head, row);
    const float factor = prompt.args.normalize ? scale * rsqrtf(squares + kUnitRowEps) : scale;
    if (thread % kShare == 0) (of_keys ? s.key : s.query)[row] = factor;
    const float size = factor * factor * squares;
    return size == 0.0f || (size > kSmallestRow && size < kLargestRow);
  }

  __device__ __forceinline__ float2 pair_at(int offset) const {
    return unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(shared + offset));
  }

  // Rows and columns of products, and keys and queries of the record. w: what load_decays() left.
  __device__ __forceinline__ void make_operands(const float2 (&w)[kBlock]) const {
    const bool of_system = makes_system();
    if (!has_columns()) {
      if (of_system && block == 0) *reinterpret_cast<float2*>(&system().kept[column]) = make_float2(1.0f, 1.0f);
      return;
    }
    const float2 from_begin = over_halves(0, 2 * block + 1), to_end = over_halves(2 * block + 1, kHalves);
    KeySystem<kD>& to = system();
    unsigned char* const to_queries = scores().query;
    if (of_system && block == 0) *reinterpret_cast<float2*>(&to.kept[column]) = times(from_begin, to_end);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = kBlock * block + i;
      const float2 other = make_float2(inverse_fast(w[i].x), inverse_fast(w[i].y)), up = i < kHalf ? other : w[i],
                   down = i < kHalf ? w[i] : other;
      const int place = static_cast<int>(element_offset(t, column));
      const float2 key = times(s.key[t], pair_at(L::kKeys + place));
      const float2 query = times(s.query[t], pair_at(L::kQueries + place));
      const float2 row = times(key, up), query_row = times(query, up), of_column = times(key, down);
      store_planes<Plane>(at(L::kKeys), at(L::kKeys + L::kRows), t, column, row.x, row.y);
      store_planes<Plane>(at(L::kQueries), at(L::kQueries + L::kRows), t, column, query_row.x, query_row.y);
      store_planes<Plane>(at(L::kColumns), at(L::kColumns + L::kRows), t, column, of_column.x, of_column.y);
      if (of_system) {
        send_planes<T>(to.from_state, t, column, prompt.args.delta ? times(from_begin, row) : make_float2(0.0f, 0.0f));
        send_planes<T>(to.to_state, t, column, times(to_end, of_column));
      }
      const float2 sent = times(from_begin, query_row);
      *reinterpret_cast<uint32_t*>(to_queries + place) = pack_pair(T{}, sent.x, sent.y);
    }
  }

  // The blocks of a pair: (1,0), (2,0), (2,1), (3,0) .. (3,2), (0,0) .. (3,3).
  struct Pair {
    int rows, keys;
  };
  static __device__ __forceinline__ Pair blocks_of(int pair) {
    if (pair >= kBefore) return {pair - kBefore, pair - kBefore};
    const int rows = pair < 1 ? 1 : pair < 3 ? 2 : 3;
    return {rows, pair - rows * (rows - 1) / 2};
  }
  // The n-th pair of a warp: those of a block with itself, which take less, come last and to the last warps.
  static __device__ __forceinline__ int pair_of(int warp, int n) {
    return n * kCtaWarps + (n % 2 == 0 ? warp : kCtaWarps - 1 - warp);
  }

  __device__ __forceinline__ void make_middles(int thread) const {
    for (int item = thread; item < kBefore * kD; item += L::kThreads) {
      const Pair of = blocks_of(item / kD);
      float by = 1.0f;
      for (int half = 2 * of.keys + 1; half <= 2 * of.rows; ++half) by *= s.halves[half][item % kD];
      s.middles[item / kD][item % kD] = by;
    }
  }

  // 16 x 16 products of a pair: m of keys, p of queries.
  template <bool kOfKeys, bool kOfQueries>
  __device__ __forceinline__ void multiply_pair(int pair, int lane, float (&m)[2][4], float (&p)[2][4]) const {
    const Pair of = blocks_of(pair);
    const int steps = kD <= 128 ? kD / 16 : static_cast<int>(ceil_div(prompt.args.key_width, int64_t{16}));
#pragma unroll 2
    for (int k = 0; k < steps; ++k) {
      uint32_t key[2][4], query[2][4], right[2][4];
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        if (kOfKeys) load_matrices(key[plane], left_rows(at(L::kKeys + plane * L::kRows), of.rows, k, lane));
        if (kOfQueries) load_matrices(query[plane], left_rows(at(L::kQueries + plane * L::kRows), of.rows, k, lane));
        load_matrices(right[plane], right_rows(at(L::kColumns + plane * L::kRows), of.keys, k, lane));
      }
      if (pair < kBefore) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the 16 dimensions
          const float2 by = *reinterpret_cast<const float2*>(&s.middles[pair][16 * k + 8 * half + fragment_column(lane, 0)]);
#pragma unroll
          for (int i = half; i < 4; i += 2) {
            const uint32_t planes[2] = {right[0][i], right[1][i]};
            const float2 x = times(by, join_pair<Plane>(planes));
            uint32_t scaled[2];
            split_pair<Plane>(x.x, x.y, scaled);
            right[0][i] = scaled[0], right[1][i] = scaled[1];
          }
        }
      }
#pragma unroll
      for (int product = 0; product < 3; ++product) {  // smallest first
        const int left = product == 1, other = product == 0;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (kOfKeys) mma(Plane{}, m[n], key[left], right[other][2 * n], right[other][2 * n + 1]);
          if (kOfQueries) mma(Plane{}, p[n], query[left], right[other][2 * n], right[other][2 * n + 1]);
        }
      }
    }
  }

  template <bool kOfKeys, bool kOfQueries>
  __device__ __forceinline__ void store_pair_of(int pair, int lane, const float (&m)[2][4], const float (&p)[2][4]) const {
    const Pair of = blocks_of(pair);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of_block = fragment_row(lane, 2 * r), first = 8 * n + fragment_column(lane, 0);
        const int row = kBlock * of.rows + of_block, key = kBlock * of.keys + first;
        float2 x = times(-s.beta[row], make_float2(m[n][2 * r], m[n][2 * r + 1]));
        if (!prompt.args.delta) x = make_float2(0.0f, 0.0f);
        float2 y = make_float2(p[n][2 * r], p[n][2 * r + 1]);
        if (pair < kBefore) {
          if (kOfKeys) store_planes<T>(at(L::kSystem), at(L::kSystem + kSquareBytes), row, key, x.x, x.y);
        } else {
          *reinterpret_cast<float2*>(&s.diagonal[of.rows][of_block][first]) = x;
          y = make_float2(first <= of_block ? y.x : 0.0f, first < of_block ? y.y : 0.0f);
        }
        if (kOfQueries) store_pair(at(L::kScores), row, key, pack_pair(T{}, y.x, y.y));
      }
  }

  // The operands have been read; what the squares leave out is cleared.
  __device__ __forceinline__ void end_products(int thread) const {
    __syncthreads();
    if (thread < kThreads)
      for (const int tile : {L::kSolved, L::kSolved + kSquareBytes, L::kScores}) clear_above(at(tile), thread);
  }
  __device__ __forceinline__ void make_squares(int thread, int warp, int lane) const {
    float m[kOfWarp][2][4] = {}, p[kOfWarp][2][4] = {};
    if constexpr (kCtaWarps == kPairs + kBefore) {  // two warps for a pair whose keys are scaled, one for each other
      const int pair = warp < kBefore ? warp : warp - kBefore;
      const bool of_keys = warp < kBefore, of_queries = pair < kBefore;
      if (of_keys) multiply_pair<true, false>(pair, lane, m[0], p[0]);
      else if (of_queries) multiply_pair<false, true>(pair, lane, m[0], p[0]);
      else multiply_pair<true, true>(pair, lane, m[0], p[0]);
      end_products(thread);
      if (of_keys) store_pair_of<true, false>(pair, lane, m[0], p[0]);
      else if (of_queries) store_pair_of<false, true>(pair, lane, m[0], p[0]);
      else store_pair_of<true, true>(pair, lane, m[0], p[0]);
    } else {
#pragma unroll
      for (int n = 0; n < kOfWarp; ++n)
        if (pair_of(warp, n) < kPairs) multiply_pair<true, true>(pair_of(warp, n), lane, m[n], p[n]);
      end_products(thread);
#pragma unroll
      for (int n = 0; n < kOfWarp; ++n)
        if (pair_of(warp, n) < kPairs) store_pair_of<true, true>(pair_of(warp, n), lane, m[n], p[n]);
    }
  }

  __device__ __forceinline__ void run(const PromptMaps& maps) const {
    const Args& args = prompt.args;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
      mbarrier_init(shared_address(&s.keys_full), 1);
      mbarrier_init(shared_address(&s.queries_full), 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      load_rows<kD>(maps.key, at(L::kKeys), chunk, static_cast<int>(head) / prompt.of_key, shared_address(&s.keys_full), 0,
                    boxes);
      load_rows<kD>(maps.query, at(L::kQueries), chunk, static_cast<int>(out_head) / prompt.of_query,
                    shared_address(&s.queries_full), 0, boxes);
    }
    if (thread < kChunk) s.beta[thread] = beta_of(args, chunk, head, thread);
    float2 w[kBlock];
    const bool mild = load_decays(w);
    __syncthreads();
    make_middles(thread);
    wait_rows<kD>(prompt, chunk, at(L::kKeys), s.keys_full, 0, thread, L::kThreads, [] {});
    wait_rows<kD>(prompt, chunk, at(L::kQueries), s.queries_full, 0, thread, L::kThreads, [] {});
    __syncthreads();
    const bool usual = make_row_factors(thread);
    const bool left = __syncthreads_or(!mild || !usual);
    if (thread == 0) scores().left = left;
    if (left) return;
    make_operands(w);
    __syncthreads();
    make_squares(thread, warp, lane);
    __syncthreads();
    copy_16_bytes(scores().tile, at(L::kScores), kSquareBytes, thread, L::kThreads);
    if (makes_system() && warp < kWarps)
      send_solved<T>(s.diagonal, s.beta, at(L::kSystem), at(L::kSolved), system().high, kSystemBarrier, warp, lane);
  }
};
#endif

template <class T, int kD>
__global__ void __launch_bounds__(Layout<kD>::kThreads, Layout<kD>::kCtas)
    PrepareKeysKernel(const __grid_constant__ Prompt prompt, const __grid_constant__ PromptMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const ChunkPlace chunk = chunk_of(prompt.args, prompt.first_slot + static_cast<int64_t>(blockIdx.x));
  if (chunk.tokens == 0) return;
  unsigned char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  const int thread = static_cast<int>(threadIdx.x);
  const KeyChunk<T, kD> of{prompt,
                           chunk,
                           blockIdx.x,
                           blockIdx.y / static_cast<unsigned>(prompt.group),
                           blockIdx.y,
                           shared,
                           *reinterpret_cast<Shared<kD>*>(shared + Layout<kD>::kShared),
                           thread / (kD / 2),
                           thread % (kD / 2) * 2,
                           used_boxes<kD>(prompt.args)};
  of.run(maps);
#endif
}

template <class T, int kD>
cudaError_t launch_width(const Prompt& prompt, const PromptMaps& maps, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD>::kBytes;
  static_assert(Layout<kD>::kCtas * (kBytes + 1024) <= 228 * 1024);
  const auto kernel = PrepareKeysKernel<T, kD>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(prompt.slots), static_cast<unsigned>(prompt.args.heads));
  kernel<<<grid, Layout<kD>::kThreads, kBytes, stream>>>(prompt, maps);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Prompt& prompt, const PromptMaps& maps, cudaStream_t stream) {
  return prompt.args.key_width <= 64    ? launch_width<T, 64>(prompt, maps, stream)
         : prompt.args.key_width <= 128 ? launch_width<T, 128>(prompt, maps, stream)
                                        : launch_width<T, 256>(prompt, maps, stream);
}

}  // namespace

int launch_prepare_keys(const Prompt& prompt, const PromptMaps& maps, int sm_count, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = prompt.args.dtype == static_cast<int32_t>(DType::kFloat16)
                                ? launch_type<__half>(prompt, maps, on)
                                : launch_type<__nv_bfloat16>(prompt, maps, on);
  return error != cudaSuccess ? error : launch_prepare_steep_keys(prompt, maps, sm_count, stream);
}

}  // namespace leanfleet::gated_delta_rule
