// What prepare_keys.cu leaves: chunks with decays so steep that none between two tokens may be divided by another. A CTA has one
// of these after another, each a chunk of a value head. Half of its threads have two columns of a block of 16 keys each, the
// others of queries. Decays are only multiplied: nothing cancels, and a token that forgets all is a factor 0.
//   Between blocks: rows with the decay from their block's first token on, times keys with that to their block's last.
//   Within a block: a thread walks a key from its token to the block's end, with 1/8 of its dimensions in registers.
// Keys of more than 128 dimensions go in two passes of 128, whose products are added before anything else is made of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/prepare.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

// kD: dimensions of a pass.
template <int kD, int kPasses>
struct Shared {
  float key[kChunk], query[kChunk], beta[kChunk];  // factors of rows
  float totals[kBlocks][kD];                       // decay from before a block to its last token
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
  float held[kPasses > 1 ? kBlocks : 1][2][kBlock][kBlock];  // sums of M and P within blocks, of the passes so far
  uint64_t keys_full, queries_full;
};

// Tiles of keys and queries as they came; in two planes each, rows with decay from their block's first token, keys with decay
// to their block's last, the system and its inverse; scores. Decays of tokens are floats.
template <int kD, int kPasses>
struct Layout {
  static constexpr int kThreads = 4 * kD, kRows = kChunk * kD * 2;
  static constexpr int kQueries = kRows, kFromFirst = kQueries + kRows, kQueriesFromFirst = kFromFirst + 2 * kRows;
  static constexpr int kToLast = kQueriesFromFirst + 2 * kRows, kDecays = kToLast + 2 * kRows;
  static constexpr int kSystem = kDecays + kChunk * kD * 4, kSolved = kSystem + 2 * kSquareBytes;
  static constexpr int kScores = kSolved + 2 * kSquareBytes, kShared = kScores + kSquareBytes;
  static constexpr int kBytes = 1024 + kShared + static_cast<int>(sizeof(Shared<kD, kPasses>));
};

#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kBefore = kBlocks * (kBlocks - 1) / 2;  // blocks below those on the diagonal
constexpr int kSystemBarrier = 1;                     // of four warps

// Where a dimension's decay stands in its token's row: lanes that read four each, eight dimensions apart, read neighbours.
__device__ __forceinline__ int decay_place(int d) { return d / 64 * 64 + d % 8 / 4 * 32 + d / 8 % 8 * 4 + d % 4; }

template <class T, int kD, int kPasses>
struct KeyChunk {
  using L = Layout<kD, kPasses>;
  static constexpr int kAll = kPasses * kD, kCtaWarps = L::kThreads / 32;
  static constexpr int kOfWarp = (2 * kBefore + kCtaWarps - 1) / kCtaWarps;  // products between blocks
  static_assert(kPasses == 1 || L::kThreads / kThreads == kBlocks);          // a warp has the same block in each pass
  using Sums = float[kOfWarp][2][4];
  const Prompt& prompt;
  const ChunkPlace chunk;
  const unsigned slot, head, out_head;
  unsigned char* const shared;
  Shared<kD, kPasses>& s;
  int pass = 0;

  __device__ __forceinline__ uint32_t at(int offset) const { return shared_address(shared) + offset; }
  __device__ __forceinline__ float* decays(int token) const {
    return reinterpret_cast<float*>(shared + L::kDecays) + token * kD;
  }
  __device__ __forceinline__ KeySystem<kAll>& system() const { return key_system<kAll>(prompt, slot, head); }
  __device__ __forceinline__ KeyScores<kAll>& scores() const { return key_scores<kAll>(prompt, slot, out_head); }
  __device__ __forceinline__ bool makes_system() const { return out_head == head * static_cast<unsigned>(prompt.group); }

  // Two columns of a block of 16 tokens.
  struct Columns {
    int first_token, column;
    float2 decay[kBlock], x[kBlock];

    __device__ __forceinline__ Columns() {
      const int thread = static_cast<int>(threadIdx.x) % (2 * kD);
      first_token = thread / (kD / 2) * kBlock;
      column = thread % (kD / 2) * 2;
    }
  };
  __device__ __forceinline__ int first_column() const { return kPasses == 1 ? 0 : pass * kD; }
  __device__ __forceinline__ bool is_last() const { return kPasses == 1 || pass + 1 == kPasses; }
  static __device__ __forceinline__ bool has_keys() { return threadIdx.x < 2 * kD; }

  // Decays of tokens, 1 past the request's end, kept by threads of keys and left in shared memory for the others.
  __device__ __forceinline__ void load_decays(Columns& c) const {
    const Args& args = prompt.args;
    const int column = first_column() + c.column;
    const bool there = column < args.key_width;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = c.first_token + i;
      float2 g = make_float2(0.0f, 0.0f);
      if (there && t < chunk.tokens) {
        const float* const from =
            row_of<float>(args.log_decay, args.decay_strides, chunk.batch, head, chunk.token + t) + column;
        g = make_float2(__ldg(from), __ldg(from + 1));
      }
      c.decay[i] = g;
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      c.decay[i] = make_float2(expf(c.decay[i].x), expf(c.decay[i].y));
      *reinterpret_cast<float2*>(decays(c.first_token + i) + decay_place(c.column)) = c.decay[i];
    }
  }
  __device__ __forceinline__ void read_decays(Columns& c) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      c.decay[i] = *reinterpret_cast<const float2*>(decays(c.first_token + i) + decay_place(c.column));
  }

  // A tile's columns, times factors of rows.
  __device__ __forceinline__ void take_rows(Columns& c, int tile, const float* factors) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = c.first_token + i;
      const float2 x = unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(shared + tile + element_offset(t, c.column)));
      c.x[i] = make_float2(factors[t] * x.x, factors[t] * x.y);
    }
  }

  // Calls put(token, pair) for rows times the decay from their block's first token on times `by`; returns that of the block.
  template <class Put>
  static __device__ __forceinline__ float2 from_first(const Columns& c, float2 by, Put&& put) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      by = make_float2(by.x * c.decay[i].x, by.y * c.decay[i].y);
      put(c.first_token + i, make_float2(by.x * c.x[i].x, by.y * c.x[i].y));
    }
    return by;
  }
  // The same for the decay from their token to their block's last.
  template <class Put>
  static __device__ __forceinline__ void to_last(const Columns& c, float2 by, Put&& put) {
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      put(c.first_token + i, make_float2(by.x * c.x[i].x, by.y * c.x[i].y));
      by = make_float2(by.x * c.decay[i].x, by.y * c.decay[i].y);
    }
  }
  __device__ __forceinline__ void put_planes(int tile, int row, int column, float2 x) const {
    store_planes<T>(at(tile), at(tile + L::kRows), row, column, x.x, x.y);
  }

  // The decay of whole blocks first .. last - 1.
  __device__ __forceinline__ float2 whole_blocks(int first, int last, int column) const {
    float2 by = make_float2(1.0f, 1.0f);
    for (int block = first; block < last; ++block) {
      const float2 total = *reinterpret_cast<const float2*>(&s.totals[block][column]);
      by = make_float2(by.x * total.x, by.y * total.y);
    }
    return by;
  }

  // Keys between blocks, and the decay of whole blocks.
  __device__ __forceinline__ void make_keys(Columns& c) const {
    take_rows(c, 0, s.key);
    const float2 one = make_float2(1.0f, 1.0f);
    const float2 total = from_first(c, one, [&](int t, float2 x) { put_planes(L::kFromFirst, t, c.column, x); });
    to_last(c, one, [&](int t, float2 x) { put_planes(L::kToLast, t, c.column, x); });
    *reinterpret_cast<float2*>(&s.totals[c.first_token / kBlock][c.column]) = total;
  }
  __device__ __forceinline__ void make_queries(Columns& c) const {
    take_rows(c, L::kQueries, s.query);
    from_first(c, make_float2(1.0f, 1.0f), [&](int t, float2 x) { put_planes(L::kQueriesFromFirst, t, c.column, x); });
  }
  // Keys and queries of the record, once decays of whole blocks are there.
  __device__ __forceinline__ void send_keys(const Columns& c) const {
    if (!makes_system()) return;
    const int block = c.first_token / kBlock, column = first_column() + c.column;
    KeySystem<kAll>& to = system();
    const bool delta = prompt.args.delta;
    from_first(c, whole_blocks(0, block, c.column),
               [&](int t, float2 x) { send_planes<T>(to.from_state, t, column, delta ? x : make_float2(0.0f, 0.0f)); });
    to_last(c, whole_blocks(block + 1, kBlocks, c.column), [&](int t, float2 x) { send_planes<T>(to.to_state, t, column, x); });
    if (block == 0) *reinterpret_cast<float2*>(&to.kept[column]) = whole_blocks(0, kBlocks, c.column);
  }
  __device__ __forceinline__ void send_queries(const Columns& c) const {
    KeyScores<kAll>& to = scores();
    from_first(c, whole_blocks(0, c.first_token / kBlock, c.column), [&](int t, float2 x) {
      *reinterpret_cast<uint32_t*>(to.query + element_offset(t, first_column() + c.column)) = pack_pair(T{}, x.x, x.y);
    });
  }

  // A warp's four columns of M and P within a block, a lane's eighth of the dimensions.
  __device__ __forceinline__ void within_block(int block, int lane) const {
    const int quarter = static_cast<int>(threadIdx.x / 32 % 4), first = kBlock * block, part = lane % 8;
    const int from = 4 * quarter + lane / 8;  // this key's token in the block
    float x[kD / 64][8];
#pragma unroll
    for (int i = 0; i < kD / 64; ++i) load_8<T>(at(0), first + from, 8 * i + part, x[i]);
    const float by = s.key[first + from];
    for (int to = 4 * quarter; to < kBlock; ++to) {
      const int row = first + to;
      float m = 0.0f, p = 0.0f;
#pragma unroll
      for (int i = 0; i < kD / 64; ++i) {
        float key[8], query[8];
        load_8<T>(at(0), row, 8 * i + part, key);
        load_8<T>(at(L::kQueries), row, 8 * i + part, query);
        const float4* const decay = reinterpret_cast<const float4*>(decays(row) + 64 * i) + part;
        const float4 halves[2] = {decay[0], decay[8]};
        const float w[8] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                            halves[1].x, halves[1].y, halves[1].z, halves[1].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (to > from) x[i][j] *= w[j];
          m += x[i][j] * key[j];
          p += x[i][j] * query[j];
        }
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) {
        m += __shfl_xor_sync(kFullWarp, m, offset);
        p += __shfl_xor_sync(kFullWarp, p, offset);
      }
      if constexpr (kPasses > 1) {
        if (part < 2) {
          float& held = s.held[block][part][to][from];
          const float sum = (part == 0 ? m : p) + (pass > 0 ? held : 0.0f);
          held = m = p = sum;  // of which part 0 has M's and part 1 P's
        }
        if (!is_last()) continue;
      }
      if (part == 0 && from < to) s.diagonal[block][to][from] = prompt.args.delta ? -s.beta[row] * s.key[row] * by * m : 0.0f;
      if (part == 1) {
        const T rounded = static_cast<T>(from <= to ? s.query[row] * by * p : 0.0f);
        store_2_bytes(at(L::kScores) + element_offset(row, first + from), *reinterpret_cast<const uint16_t*>(&rounded));
      }
    }
  }

  // c += a 16 x 16 block of rows with decay from their block's first token times keys with decay to their block's last.
  __device__ __forceinline__ void between_blocks(int rows_tile, int row_block, int key_block, int lane,
                                                 float (&c)[2][4]) const {
#pragma unroll 2
    for (int k = 0; k < kD / 16; ++k) {
      Planes left;
      load_matrices(left.high, left_rows(at(rows_tile), row_block, k, lane));
      load_matrices(left.low, left_rows(at(rows_tile + L::kRows), row_block, k, lane));
      if (row_block > key_block + 1) {  // whole blocks between them
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 by = whole_blocks(key_block + 1, row_block, 16 * k + fragment_column(lane, 0) + i / 2 * 8);
          const float2 high = unpack_pair(T{}, left.high[i]), low = unpack_pair(T{}, left.low[i]);
          uint32_t planes[2];
          split_pair<T>(by.x * (high.x + low.x), by.y * (high.y + low.y), planes);
          left.high[i] = planes[0], left.low[i] = planes[1];
        }
      }
      multiply<T>(c, left, at(L::kToLast), at(L::kToLast + L::kRows), key_block, k, lane);
    }
  }

  // The blocks below the diagonal ones, of P and M, that a warp has: (1,0), (2,0), (2,1), (3,0) ..
  struct Below {
    bool there, of_scores;
    int row_block, key_block;

    __device__ __forceinline__ Below(int task) {
      const int pair = task % kBefore;
      there = task < 2 * kBefore;
      of_scores = task < kBefore;
      row_block = pair < 1 ? 1 : pair < 3 ? 2 : 3;
      key_block = pair - row_block * (row_block - 1) / 2;
    }
  };
  __device__ __forceinline__ void add_below_diagonal(int warp, int lane, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const Below of(warp + i * kCtaWarps);
      if (!of.there) continue;
      between_blocks(of.of_scores ? L::kQueriesFromFirst : L::kFromFirst, of.row_block, of.key_block, lane, sums[i]);
    }
  }
  // To the tiles of -M and P.
  __device__ __forceinline__ void store_below_diagonal(int warp, int lane, const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const Below of(warp + i * kCtaWarps);
      if (!of.there) continue;
      const float (&c)[2][4] = sums[i];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = kBlock * of.row_block + fragment_row(lane, 2 * r);
          const int column = kBlock * of.key_block + 8 * n + fragment_column(lane, 0);
          if (of.of_scores) {
            store_pair(at(L::kScores), row, column, pack_pair(T{}, c[n][2 * r], c[n][2 * r + 1]));
          } else {
            const float by = -s.beta[row];
            const float2 x = prompt.args.delta ? make_float2(by * c[n][2 * r], by * c[n][2 * r + 1]) : make_float2(0.0f, 0.0f);
            store_planes<T>(at(L::kSystem), at(L::kSystem + kSquareBytes), row, column, x.x, x.y);
          }
        }
    }
  }

  __device__ __forceinline__ void make_squares(int warp, int lane, Sums& sums) const {
    add_below_diagonal(warp, lane, sums);
    if (is_last()) store_below_diagonal(warp, lane, sums);
    for (int block = warp / 4; block < kBlocks; block += L::kThreads / kThreads) within_block(block, lane);
  }

  // Factors of rows whose tiles have a part of them, from global memory; four threads have a row.
  __device__ __forceinline__ void read_row_factors(int thread) const {
    const Args& args = prompt.args;
    const int row = thread / 4 % kChunk, chunks = static_cast<int>(args.key_width) / 8;
    const bool of_keys = thread < 4 * kChunk;
    const T* const from = of_keys ? row_of<T>(args.key, args.key_strides, chunk.batch,
                                              head / static_cast<unsigned>(prompt.of_key), chunk.token + row)
                                  : row_of<T>(args.query, args.query_strides, chunk.batch,
                                              out_head / static_cast<unsigned>(prompt.of_query), chunk.token + row);
    float squares = 0.0f;
    for (int part = thread % 4; args.normalize && row < chunk.tokens && part < chunks; part += 4) {
      float x[8];
      unpack_8<T>(__ldg(reinterpret_cast<const uint4*>(from) + part), x);
#pragma unroll
      for (int i = 0; i < 8; i += 2) squares += x[i] * x[i] + x[i + 1] * x[i + 1];
    }
    squares += __shfl_xor_sync(kFullWarp, squares, 1);
    squares += __shfl_xor_sync(kFullWarp, squares, 2);
    const float scale = of_keys ? 1.0f : scale_of(args, chunk, out_head, row);
    if (thread % 4 == 0) (of_keys ? s.key : s.query)[row] = args.normalize ? scale * rsqrtf(squares + kUnitRowEps) : scale;
  }
  __device__ __forceinline__ void make_row_factors(int thread) const {
    if constexpr (kPasses > 1) {
      static_assert(L::kThreads == 8 * kChunk);
      if (pass == 0) read_row_factors(thread);
    } else {
      const int of_queries = thread - 2 * kD;  // a thread of queries, from 0
      if (thread < kChunk) s.key[thread] = row_factor<T, kD>(at(0), thread, prompt.args.normalize, 1.0f);
      if (of_queries >= 0 && of_queries < kChunk)
        s.query[of_queries] = row_factor<T, kD>(at(L::kQueries), of_queries, prompt.args.normalize,
                                                scale_of(prompt.args, chunk, out_head, of_queries));
    }
  }

  // The next columns of keys and queries; parity: of the barriers' phase.
  __device__ __forceinline__ void make_pass(const PromptMaps& maps, uint32_t parity, Sums& sums) const {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
      load_rows<kD>(maps.key, at(0), chunk, static_cast<int>(head) / prompt.of_key, shared_address(&s.keys_full),
                    first_column());
      load_rows<kD>(maps.query, at(L::kQueries), chunk, static_cast<int>(out_head) / prompt.of_query,
                    shared_address(&s.queries_full), first_column());
    }
    Columns c;
    if (has_keys()) load_decays(c);
    __syncthreads();
    wait_rows<kD>(prompt, chunk, at(0), s.keys_full, parity, thread, L::kThreads, [] {});
    wait_rows<kD>(prompt, chunk, at(L::kQueries), s.queries_full, parity, thread, L::kThreads, [] {});
    __syncthreads();
    make_row_factors(thread);
    __syncthreads();
    if (has_keys()) {
      make_keys(c);
    } else {
      read_decays(c);
      make_queries(c);
    }
    __syncthreads();
    if (has_keys()) send_keys(c);
    else send_queries(c);
    make_squares(warp, lane, sums);
    __syncthreads();
  }

  // Leaves the phase of the barriers at `parity`.
  __device__ __forceinline__ void run(const PromptMaps& maps, uint32_t& parity) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    Sums sums = {};
    if (has_keys()) {
      if (thread < kThreads) clear_above(at(L::kSolved), thread), clear_above(at(L::kSolved + kSquareBytes), thread);
    } else {
      const int t = thread - 2 * kD;
      if (t < kChunk) s.beta[t] = beta_of(prompt.args, chunk, head, t);
      for (int i = 16 * t; i < kSquareBytes; i += 16 * 2 * kD)  // what is above the diagonal stays 0
        store_16_bytes(at(L::kScores + i), make_uint4(0, 0, 0, 0));
    }
#pragma unroll 1
    for (; pass < kPasses; ++pass, parity ^= 1) {
      if (pass > 0) hopper::fence_proxy_async();  // the tiles of the pass before have been read
      make_pass(maps, parity, sums);
    }
    if (warp >= kWarps) {
      copy_16_bytes(scores().tile, at(L::kScores), kSquareBytes, thread - kThreads, L::kThreads - kThreads);
    } else if (makes_system()) {
      send_solved<T>(s.diagonal, s.beta, at(L::kSystem), at(L::kSolved), system().high, kSystemBarrier, warp, lane);
    }
  }
};
#endif

template <class T, int kD, int kPasses>
__global__ void __launch_bounds__(Layout<kD, kPasses>::kThreads, 1)
    PrepareSteepKeysKernel(const __grid_constant__ Prompt prompt, const __grid_constant__ PromptMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  constexpr int kAll = kPasses * kD;
  auto& s = *reinterpret_cast<Shared<kD, kPasses>*>(shared + Layout<kD, kPasses>::kShared);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&s.keys_full), 1);
    mbarrier_init(shared_address(&s.queries_full), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const unsigned heads = static_cast<unsigned>(prompt.args.heads), ctas = gridDim.x;
  const unsigned chunks = static_cast<unsigned>(prompt.slots) * heads;
  uint32_t parity = 0;
  for (unsigned first = blockIdx.x; first < chunks; first += 32 * ctas) {  // 32 chunks at a time, one for each lane
    const unsigned own = first + threadIdx.x % 32 * ctas, of_lane = own < chunks ? own : first;
    const bool wanted = own < chunks && key_scores<kAll>(prompt, of_lane / heads, of_lane % heads).left != 0;
    for (unsigned left = __ballot_sync(kFullWarp, wanted); left != 0; left &= left - 1) {
      const unsigned index = first + (__ffs(static_cast<int>(left)) - 1) * ctas, slot = index / heads;
      const ChunkPlace chunk = chunk_of(prompt.args, prompt.first_slot + slot);
      if (chunk.tokens == 0) continue;  // nobody has written its record
      __syncthreads();                  // the chunk before has been read
      hopper::fence_proxy_async();
      const unsigned out_head = index % heads;
      KeyChunk<T, kD, kPasses> of{prompt, chunk, slot, out_head / static_cast<unsigned>(prompt.group), out_head, shared, s};
      of.run(maps, parity);
    }
  }
#endif
}

template <class T, int kD, int kPasses>
cudaError_t launch_width(const Prompt& prompt, const PromptMaps& maps, int sm_count, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD, kPasses>::kBytes;
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = PrepareSteepKeysKernel<T, kD, kPasses>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t chunks = prompt.slots * prompt.args.heads;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(chunks < sm_count ? chunks : sm_count));
  config.blockDim = dim3(Layout<kD, kPasses>::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, prompt, maps);
}

template <class T>
cudaError_t launch_type(const Prompt& prompt, const PromptMaps& maps, int sm_count, cudaStream_t stream) {
  return prompt.args.key_width <= 64    ? launch_width<T, 64, 1>(prompt, maps, sm_count, stream)
         : prompt.args.key_width <= 128 ? launch_width<T, 128, 1>(prompt, maps, sm_count, stream)
                                        : launch_width<T, 128, 2>(prompt, maps, sm_count, stream);
}

}  // namespace

int launch_prepare_steep_keys(const Prompt& prompt, const PromptMaps& maps, int sm_count, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (prompt.args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(prompt, maps, sm_count, on);
  return launch_type<__nv_bfloat16>(prompt, maps, sm_count, on);
}

}  // namespace leanfleet::gated_delta_rule
