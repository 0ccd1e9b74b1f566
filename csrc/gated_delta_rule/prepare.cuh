// What the first kernels of long prompts share: prepare.cu, and for decays of key dimensions prepare_keys.cu and
// prepare_steep_keys.cu.
#pragma once

#include "core/hopper.cuh"
#include "gated_delta_rule/chunks.cuh"
#include "gated_delta_rule/key_blocks.cuh"

namespace leanfleet::gated_delta_rule {

#if __CUDA_ARCH_FEAT_SM90_ALL
// Blocks above the diagonal, which nothing else writes, by four warps: rows of 2, 4 and 6 chunks.
__device__ __forceinline__ void clear_above(uint32_t tile, int thread) {
  const int row = thread % kBlock, chunk = thread / kBlock;  // 8 chunks of 16 rows
#pragma unroll
  for (int block = 0; block < kBlocks - 1; ++block)
    if (chunk / 2 > block) store_16_bytes(tile + chunk_offset<kChunk>(kBlock * block + row, chunk), make_uint4(0, 0, 0, 0));
}

__device__ __forceinline__ void copy_16_bytes(unsigned char* to, uint32_t from, int bytes, int thread, int threads) {
  for (int i = 16 * thread; i < bytes; i += 16 * threads) *reinterpret_cast<uint4*>(to + i) = load_16_bytes(from + i);
}

// Rows of a chunk, asked for by one thread and waited for by others: `boxes` of 64 columns from column `first` on. Rows of
// other requests after the chunk's last become 0, for which all `threads` that wait meet at `meet`.
template <int kD>
__device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t to, const ChunkPlace& chunk, int head, uint32_t full,
                                          int first = 0, int boxes = kD / 64) {
  mbarrier_arrive_expect_tx(full, boxes * kSquareBytes);
#pragma unroll
  for (int box = 0; box < kD / 64; ++box)
    if (box < boxes)
      hopper::tma_load(to + box * kSquareBytes, &map, first + 64 * box, static_cast<int>(chunk.token), head,
                       static_cast<int>(chunk.batch), full);
}
template <int kD, class Meet>
__device__ __forceinline__ void wait_rows(const Prompt& prompt, const ChunkPlace& chunk, uint32_t rows, uint64_t& full,
                                          uint32_t parity, int thread, int threads, Meet&& meet) {
  mbarrier_wait(shared_address(&full), parity);
  const int lines = kChunk - chunk.tokens;
  if (prompt.args.cu_seqlens == nullptr || lines == 0) return;
  for (int i = thread; i < kD / 64 * lines * 8; i += threads) {
    const int line = i / 8;
    store_16_bytes(rows + line / lines * kSquareBytes + (chunk.tokens + line % lines) * 128 + i % 8 * 16,
                   make_uint4(0, 0, 0, 0));
  }
  meet();
}

// One warp: the inverse of I + M's block on the diagonal, of which `block` has -M's, to the tiles.
template <class T>
__device__ __forceinline__ void put_inverse(float (&block)[kBlock][kDiagonalStride], uint32_t high, uint32_t low, int warp,
                                            int lane) {
  invert_block(block, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = fragment_row(lane, 2 * r), column = 8 * n + fragment_column(lane, 0);
      const float2 pair = *reinterpret_cast<const float2*>(&block[row][column]);
      store_planes<T>(high, low, kBlock * warp + row, kBlock * warp + column, pair.x, pair.y);
    }
}

// A 16 x 16 block of floats as the left side of products.
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

// A transposed block in two planes to tiles whose rows are rows again; by: factors of the block's columns.
template <class T>
__device__ __forceinline__ void store_solved(const float (&x)[2][4], const float (&by)[2], uint32_t high, uint32_t low, int row,
                                             int column, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t planes[2];
      split_pair<T>(by[r] * x[n][2 * r], by[r] * x[n][2 * r + 1], planes);
      const int to = row + 8 * n + lane / 4, first = column + 8 * r + fragment_column(lane, 0);
      store_pair(high, to, first, transpose_matrix(planes[0]));
      store_pair(low, to, first, transpose_matrix(planes[1]));
    }
}

// Columns 16 warp .. of (I + M)^-1 diag(beta), from the block on the diagonal down, each made as its transposed one of those
// above it.
template <class T>
__device__ __forceinline__ void solve(const float (&diagonal)[kBlocks][kBlock][kDiagonalStride], const float (&beta)[kChunk],
                                      uint32_t high, uint32_t low, uint32_t solved, int warp, int lane) {
  Planes above[kBlocks - 1];
  float by[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) by[r] = beta[kBlock * warp + fragment_row(lane, 2 * r)];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (i < warp) continue;
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[n][e] = i == warp ? diagonal[i][8 * n + fragment_column(lane, e)][fragment_row(lane, e)] : 0.0f;
    if (i > warp) {
      float sum[2][4] = {};
#pragma unroll
      for (int j = 0; j < i; ++j)
        if (j >= warp) multiply<T>(sum, above[j], high, low, i, j, lane);
      multiply<T>(x, take_planes<T>(sum[0], sum[1]), high, low, i, i, lane);
    }
    if (i + 1 < kBlocks) above[i] = take_planes<T>(x[0], x[1]);
    store_solved<T>(x, by, solved, solved + kSquareBytes, kBlock * i, kBlock * warp, lane);
  }
}

// (I + M)^-1 diag(beta) to the record, by four warps that meet at `barrier`. diagonal: blocks of -M; system: its other blocks.
template <class T>
__device__ __forceinline__ void send_solved(float (&diagonal)[kBlocks][kBlock][kDiagonalStride], const float (&beta)[kChunk],
                                            uint32_t system, uint32_t solved, unsigned char* to, int barrier, int warp,
                                            int lane) {
  const uint32_t low = system + kSquareBytes;
  put_inverse<T>(diagonal[warp], system, low, warp, lane);
  named_barrier(barrier, kThreads);
  solve<T>(diagonal, beta, system, low, solved, warp, lane);
  named_barrier(barrier, kThreads);
  copy_16_bytes(to, solved, 2 * kSquareBytes, 32 * warp + lane, kThreads);
}

// Where key dimensions have decays of their own. The factor of the query of a chunk's token, of a head of the output. Without
// `delta` M is 0, and so are the keys that read from the state.
__device__ __forceinline__ float scale_of(const Args& args, const ChunkPlace& chunk, int64_t out_head, int t) {
  if (args.row_factors == nullptr || t >= chunk.tokens) return args.scale;
  return args.scale * __ldg(args.row_factors + (chunk.batch * args.heads + out_head) * args.tokens + chunk.token + t);
}

// Records where key dimensions have decays of their own.
template <int kD>
__device__ __forceinline__ KeySystem<kD>& key_system(const Prompt& prompt, int64_t slot, int64_t head) {
  return static_cast<KeySystem<kD>*>(prompt.systems)[slot * prompt.args.v_heads + head];
}
template <int kD>
__device__ __forceinline__ KeyScores<kD>& key_scores(const Prompt& prompt, int64_t slot, int64_t out_head) {
  return static_cast<KeyScores<kD>*>(prompt.scores)[slot * prompt.args.heads + out_head];
}
#endif

}  // namespace leanfleet::gated_delta_rule
