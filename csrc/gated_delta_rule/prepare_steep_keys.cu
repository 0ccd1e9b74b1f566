// What prepare_keys.cu leaves: chunks with decays so steep that none between two tokens may be divided by another. A CTA has one
// of these after another, each a chunk of a value head. Half of its threads have two columns of a block of 16 keys each, the
// others of queries. Products are those of key_blocks.cuh.
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
constexpr int kSystemBarrier = 1;  // of four warps

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

  using Columns = KeyColumns<kD>;
  __device__ __forceinline__ int first_column() const { return kPasses == 1 ? 0 : pass * kD; }
  __device__ __forceinline__ bool is_last() const { return kPasses == 1 || pass + 1 == kPasses; }
  static __device__ __forceinline__ bool has_keys() { return threadIdx.x < 2 * kD; }

  // Decays are kept by threads of keys and left in shared memory for the others.
  __device__ __forceinline__ void load_decays(Columns& c) const {
    c.load_decays(prompt.args, chunk, head, first_column());
#pragma unroll
    for (int i = 0; i < kBlock; ++i) *reinterpret_cast<float2*>(decays(c.first_token + i) + decay_place(c.column)) = c.decay[i];
  }
  __device__ __forceinline__ void read_decays(Columns& c) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      c.decay[i] = *reinterpret_cast<const float2*>(decays(c.first_token + i) + decay_place(c.column));
  }

  __device__ __forceinline__ void put_planes(int tile, int row, int column, float2 x) const {
    store_planes<T>(at(tile), at(tile + L::kRows), row, column, x.x, x.y);
  }

  __device__ __forceinline__ float2 decay_over(int first, int last, int column) const {
    return whole_blocks(s.totals, first, last, column);
  }

  // Keys between blocks, and the decay of whole blocks.
  __device__ __forceinline__ void make_keys(Columns& c) const {
    c.template take_rows<T>(shared, s.key);
    const float2 one = make_float2(1.0f, 1.0f);
    const float2 total = c.from_first(one, [&](int t, float2 x) { put_planes(L::kFromFirst, t, c.column, x); });
    c.to_last(one, [&](int t, float2 x) { put_planes(L::kToLast, t, c.column, x); });
    *reinterpret_cast<float2*>(&s.totals[c.first_token / kBlock][c.column]) = total;
  }
  __device__ __forceinline__ void make_queries(Columns& c) const {
    c.template take_rows<T>(shared + L::kQueries, s.query);
    c.from_first(make_float2(1.0f, 1.0f), [&](int t, float2 x) { put_planes(L::kQueriesFromFirst, t, c.column, x); });
  }
  // Keys and queries of the record, once decays of whole blocks are there.
  __device__ __forceinline__ void send_keys(const Columns& c) const {
    if (!makes_system()) return;
    const int block = c.first_token / kBlock, column = first_column() + c.column;
    KeySystem<kAll>& to = system();
    const bool delta = prompt.args.delta;
    c.from_first(decay_over(0, block, c.column),
                 [&](int t, float2 x) { send_planes<T>(to.from_state, t, column, delta ? x : make_float2(0.0f, 0.0f)); });
    c.to_last(decay_over(block + 1, kBlocks, c.column), [&](int t, float2 x) { send_planes<T>(to.to_state, t, column, x); });
    if (block == 0) *reinterpret_cast<float2*>(&to.kept[column]) = decay_over(0, kBlocks, c.column);
  }
  __device__ __forceinline__ void send_queries(const Columns& c) const {
    KeyScores<kAll>& to = scores();
    c.from_first(decay_over(0, c.first_token / kBlock, c.column), [&](int t, float2 x) {
      *reinterpret_cast<uint32_t*>(to.query + element_offset(t, first_column() + c.column)) = pack_pair(T{}, x.x, x.y);
    });
  }

  // A warp's four columns of M and P within a block.
  __device__ __forceinline__ void products_within(int block, int lane) const {
    const int quarter = static_cast<int>(threadIdx.x / 32 % 4), part = lane % 8;
    within_block<T, kD>(at(0), at(L::kQueries), decays(0), block, quarter, lane, [&](int to, int from, float m, float p) {
      const int row = kBlock * block + to;
      if constexpr (kPasses > 1) {
        if (part < 2) {
          float& held = s.held[block][part][to][from];
          const float sum = (part == 0 ? m : p) + (pass > 0 ? held : 0.0f);
          held = m = p = sum;  // of which part 0 has M's and part 1 P's
        }
        if (!is_last()) return;
      }
      const float by = s.key[kBlock * block + from];
      if (part == 0 && from < to) s.diagonal[block][to][from] = prompt.args.delta ? -s.beta[row] * s.key[row] * by * m : 0.0f;
      if (part == 1) {
        const T rounded = static_cast<T>(from <= to ? s.query[row] * by * p : 0.0f);
        store_2_bytes(at(L::kScores) + element_offset(row, kBlock * block + from),
                      *reinterpret_cast<const uint16_t*>(&rounded));
      }
    });
  }

  // The blocks below the diagonal ones, of P and M, that a warp has.
  struct Task : Below {
    bool there, of_scores;

    __device__ __forceinline__ explicit Task(int task)
        : Below(task % kBefore), there(task < 2 * kBefore), of_scores(task < kBefore) {}
  };
  __device__ __forceinline__ void add_below_diagonal(int warp, int lane, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const Task of(warp + i * kCtaWarps);
      if (!of.there) continue;
      between_blocks<T, kD, L::kRows>(at(of.of_scores ? L::kQueriesFromFirst : L::kFromFirst), at(L::kToLast), s.totals, of,
                                      lane, sums[i]);
    }
  }
  // To the tiles of -M and P.
  __device__ __forceinline__ void store_below_diagonal(int warp, int lane, const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const Task of(warp + i * kCtaWarps);
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
    for (int block = warp / 4; block < kBlocks; block += L::kThreads / kThreads) products_within(block, lane);
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
