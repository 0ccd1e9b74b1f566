// GatedDeltaRuleGrad in chunks of 64 tokens on tensor cores, for prompts of 16-bit numbers with a decay of each token;
// cpu_kernel.cpp has the equations, warp_states.cuh what is shared with the forward. Four kernels, a window of chunks at a time:
//   GradPrepareKernel  of all chunks at once, what depends on no state: the system, P, factors of rows
//   ForwardsKernel     takes states from chunk to chunk, as ChunkedKernel does: keeps S before each, and U
//   BackwardsKernel    takes gradients of states from the last chunk to the first: keeps dS behind each, and Y; gives grad_value
//   GradChunksKernel   of all chunks at once, what S, dS, U and Y hand on to queries, keys, betas and decays
// What is kept, and all that is not an input, enters products as sums of two 16-bit numbers, in float16 times powers of two:
// gradients of beta and of decays are float32 sums of products of them.
#include <cuda_runtime.h>

#include <cmath>

#include "core/op.h"
#include "core/workspace.h"
#include "gated_delta_rule/chunks.cuh"
#include "gated_delta_rule/warp_states.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kSlab = 16;                // value columns of a step of GradChunksKernel, those of a warp of the others
constexpr int kGradThreads = 256;        // of GradChunksKernel
constexpr int kSlabs = 3;                // of it under way
constexpr int kGradPitch = kChunk + 1;   // floats of a row of squares
constexpr int64_t kMaxGrid = INT32_MAX;  // blocks

// Records in global memory. Of a chunk and a value head: -M with the inverses of its diagonal blocks, see make_system.
struct alignas(128) GradSystem {
  unsigned char planes[2][kSquareBytes];
  TokenScalars tokens;
};
constexpr int kSystemBytes = sizeof(GradSystem) - sizeof(DecaySums);  // without what pairs of tokens take
// Of a chunk and a head of the output: P over scale, and 1 over the lengths of queries.
struct alignas(128) GradScores {
  unsigned char planes[2][kSquareBytes];
  float query[kChunk];
};
// Of a chunk, a value head and a slice: S^T or dS^T, rows are value columns. inverse: what undoes the scale of 16 rows of 64
// columns.
template <int kD>
struct alignas(128) KeptState {
  unsigned char planes[2][kSlice * kD * 2];
  float inverse[2][kWarps], unused[24];
};
// The same of U^T or Y^T, whose columns are tokens.
struct alignas(128) KeptUpdate {
  unsigned char planes[2][kSquareBytes];
  float inverse[kWarps], unused[28];
};
static_assert(kSystemBytes % 128 == 0 && sizeof(GradScores) % 128 == 0);

struct Window {
  GradArgs args;
  GradParts parts;
  GradSystem* systems;          // [slot][value head]
  GradScores* scores;           // [slot][head of the output]
  void *states, *grads;         // [slot][value head][slice] of KeptState: before chunks, behind them
  KeptUpdate *updates, *rules;  // the same: U, Y
  float *borders, *carried;     // states before windows [window][request, or 0 with offsets][value head][slice]; of gradients
                                // behind windows the last two
  int64_t first_slot, slots, index;
  int slices, group;
  bool keeps, vectors;  // vectors: rows are whole ones of 16 bytes
};

template <class T, int kWidth, int kOf = kThreads>
__device__ __forceinline__ void take_rows(uint32_t to, const T* rows, int64_t stride, int tokens, int column, int width,
                                          bool vectors) {
  if (vectors) {
    fetch<T, kWidth, kOf>(to, rows, stride, tokens, column, width);
    return;
  }
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kWidth; i += kOf) {
    const int row = i / kWidth, c = i % kWidth;
    const bool there = row < tokens && column + c < width;
    store_2_bytes(to + element_offset(row, c), there ? reinterpret_cast<const uint16_t*>(rows)[row * stride + column + c] : 0);
  }
}

// Whole vectors, by kOf threads.
template <int kOf>
__device__ __forceinline__ void fetch_record(uint32_t to, const void* from, int bytes) {
  for (int i = 16 * static_cast<int>(threadIdx.x); i < bytes; i += 16 * kOf)
    cp_async(to + i, static_cast<const unsigned char*>(from) + i, 16);
}
__device__ __forceinline__ void keep_record(void* to, uint32_t from, int bytes) {
  for (int i = 16 * static_cast<int>(threadIdx.x); i < bytes; i += 16 * kThreads)
    *reinterpret_cast<uint4*>(static_cast<unsigned char*>(to) + i) = load_16_bytes(from + i);
}

template <int kD>
struct PrepareLayout {
  static constexpr int kRowsBytes = kChunk * kD * 2, kQueries = kRowsBytes, kSystem = 2 * kRowsBytes;
  static constexpr int kScores = kSystem + 2 * kSquareBytes, kScalars = kScores + 2 * kSquareBytes;
  static constexpr int kBytes = kScalars + static_cast<int>(sizeof(Scalars));
};

// This warp's rows of P, over scale, in two planes.
template <class T, int kD>
__device__ __forceinline__ void make_scores(uint32_t queries, uint32_t keys, uint32_t scores, const Scalars& s, int warp,
                                            int lane) {
  float c[2 * kBlocks][4];
  pair_products<T, kD>(queries, keys, warp, lane, c);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = kBlock * warp + fragment_row(lane, 2 * r);
    const Until until(s.decay, t);
    const float factor = s.query[t];
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n / 2 > warp) continue;
      const int first = 8 * n + fragment_column(lane, 0);
      const float2 decay = until.from<true>(s.decay, first), key = column_pair(s.key, n, lane);
      store_planes<T>(scores, scores + kSquareBytes, t, first, factor * key.x * decay.x * c[n][2 * r],
                      factor * key.y * decay.y * c[n][2 * r + 1]);
    }
  }
}

// A CTA: (slot, value head). Blocks above the diagonal are read by nothing.
template <class T, int kD>
__global__ void __launch_bounds__(kThreads) GradPrepareKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = PrepareLayout<kD>;
  const Args& args = window.args.in;
  Scalars& s = *reinterpret_cast<Scalars*>(shared + L::kScalars);
  const uint32_t keys = shared_address(shared), queries = keys + L::kQueries, system = keys + L::kSystem,
                 scores = keys + L::kScores;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int row = static_cast<int>(threadIdx.x) % kChunk, D = static_cast<int>(args.key_width);
  const int64_t slot = blockIdx.x / args.v_heads, head = blockIdx.x % args.v_heads;
  const ChunkPlace chunk = chunk_of(args, window.first_slot + slot);
  if (chunk.tokens == 0) return;

  take_rows<T, kD>(keys, row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
                   args.key_strides.token, chunk.tokens, 0, D, window.vectors);
  if (warp == 0) take_scalars(args, chunk.batch, head, chunk.token, chunk.tokens, s);
  int64_t query_head = -1;
  for (int h = 0; h < window.group; ++h) {
    const int64_t out_head = head * window.group + h;
    const bool another = out_head / (args.heads / args.q_heads) != query_head;
    if (another) {
      query_head = out_head / (args.heads / args.q_heads);
      take_rows<T, kD>(queries, row_of<T>(args.query, args.query_strides, chunk.batch, query_head, chunk.token),
                       args.query_strides.token, chunk.tokens, 0, D, window.vectors);
      cp_async_commit();
      cp_async_wait();
      __syncthreads();
      if (threadIdx.x >= kChunk) s.query[row] = row_factor<T, kD>(queries, row, args.normalize, 1.0f);
      else if (h == 0) s.key[row] = row_factor<T, kD>(keys, row, args.normalize, 1.0f);
      __syncthreads();
    }
    if (h == 0) make_system<T, kD>(keys, system, system + kSquareBytes, s, warp, lane);
    if (another) make_scores<T, kD>(queries, keys, scores, s, warp, lane);
    __syncthreads();
    if (h == 0) {
      GradSystem& to = window.systems[slot * args.v_heads + head];
      keep_record(to.planes, system, 2 * kSquareBytes);
      keep_record(&to.tokens, shared_address(&s), sizeof(TokenScalars));
    }
    GradScores& to = window.scores[slot * args.heads + out_head];
    keep_record(to.planes, scores, 2 * kSquareBytes);
    if (threadIdx.x < kChunk) to.query[row] = s.query[row];
    __syncthreads();
  }
}

// The left sides of products that a warp's 16 rows are, 64 columns of them, into both planes of a record, through `room` of its
// own.
constexpr int kRoomPlane = kSlab * kChunk * 2, kWarpRoom = 2 * kRoomPlane;
template <class T>
__device__ __forceinline__ void put_left(const Left<T>& left, int k, uint32_t room, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = room + chunk_offset<kSlab>(lane / 4 + i % 2 * 8, k % kBlocks * 2 + i / 2) + 4 * (lane % 4);
    store_4_bytes(at, left.high[i]);
    store_4_bytes(at + kRoomPlane, left.low[i]);
  }
}
__device__ __forceinline__ void keep_room(unsigned char* rows, int plane_bytes, uint32_t room, int lane) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRoomPlane / 512; ++i)
#pragma unroll
    for (int p = 0; p < 2; ++p)
      *reinterpret_cast<uint4*>(rows + p * plane_bytes + 512 * i + 16 * lane) =
          load_16_bytes(room + p * kRoomPlane + 512 * i + 16 * lane);
  __syncwarp();
}

// c = S^T X^T for the tile of X, where the state has a line of 64 key dimensions, and those into both planes of a record.
template <class T>
__device__ __forceinline__ void multiply_and_keep(const State<T, 64>& state, uint32_t rows, unsigned char* planes,
                                                  int plane_bytes, float* inverse, uint32_t room, int lane,
                                                  float (&c)[2 * kBlocks][4]) {
  state.multiply(rows, lane, c, [&](int k, const Left<T>& left, float undo) {
    put_left(left, k, room, lane);
    if (Left<T>::kScaled && k == 0 && lane == 0) *inverse = undo;
  });
  keep_room(planes, plane_bytes, room, lane);
}
template <class T>
__device__ __forceinline__ void keep_update(const float (&u)[2 * kBlocks][4], KeptUpdate& kept, uint32_t room, int slab,
                                            int lane) {
  float factor[2], inverse;
  scale_rows<T>(u, factor, inverse);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    Left<T> left;
    left.split(u[2 * k], u[2 * k + 1], factor);
    put_left(left, k, room, lane);
  }
  keep_room(kept.planes[0] + kSlab * slab * 128, kSquareBytes, room, lane);
  if (Left<T>::kScaled && lane == 0) kept.inverse[slab] = inverse;
}

// What the two kernels that go from chunk to chunk have. A warp has 16 value columns and a line of 64 key dimensions; two warps
// with kD 128, which then add up what they find and go on with the same.
template <int kD>
struct Pass {
  static constexpr int kParts = kD / 64, kPassThreads = kParts * kThreads;
  Work work;
  int64_t head, key_head, slice, unit, units;  // unit: of (value head, slice)
  int column, slab, own, part, lane;           // of the slice; of the warp's columns in it and the first of these; of D

  __device__ __forceinline__ explicit Pass(const Window& window) {
    const Args& args = window.args.in;
    const int warp = static_cast<int>(threadIdx.x / 32);
    units = args.v_heads * window.slices;
    unit = blockIdx.x % units;
    head = unit / window.slices;
    slice = unit % window.slices;
    key_head = head / (args.v_heads / args.k_heads);
    column = static_cast<int>(slice) * kSlice;
    slab = warp % kWarps;
    own = kSlab * slab;
    part = warp / kWarps;
    lane = static_cast<int>(threadIdx.x % 32);
    work = find_work(args, window.first_slot, window.slots, blockIdx.x / units);
  }

  // The warp's room among those of all, and the bytes of a tile before its part of D.
  __device__ __forceinline__ uint32_t room(uint32_t rooms) const { return rooms + (kWarps * part + slab) * kWarpRoom; }
  __device__ __forceinline__ uint32_t tile_part() const { return part * kSquareBytes; }

  // A barrier of the warps that have the same columns.
  __device__ __forceinline__ void meet() const {
    if constexpr (kParts > 1) named_barrier(1 + slab, 32 * kParts);
  }
  // The sum of what these warps have found, through their rooms.
  __device__ __forceinline__ void join(float (&u)[2 * kBlocks][4], unsigned char* rooms) const {
    if constexpr (kParts > 1) {
      float2* const to = reinterpret_cast<float2*>(rooms + (kWarps * part + slab) * kWarpRoom) + lane;
      const float2* const from = reinterpret_cast<const float2*>(rooms + (kWarps * (1 - part) + slab) * kWarpRoom) + lane;
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) to[32 * i] = make_float2(u[i / 2][i % 2 * 2], u[i / 2][i % 2 * 2 + 1]);
      meet();
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const float2 x = from[32 * i];
        u[i / 2][i % 2 * 2] += x.x, u[i / 2][i % 2 * 2 + 1] += x.y;
      }
      meet();  // before the rooms are written again
    }
  }
};
template <int kD>
__device__ __forceinline__ int64_t slot_in(const Window& window, const Pass<kD>& pass, int64_t chunk) {
  return slot_of(window.args.in, pass.work.request, pass.work.span.begin, chunk) - window.first_slot;
}
template <int kD>
__device__ __forceinline__ int tokens_in(const Pass<kD>& pass, int64_t chunk) {
  const int64_t left = pass.work.span.end - pass.work.span.begin - chunk * kChunk;
  return static_cast<int>(left < kChunk ? left : kChunk);
}
// Of floats of this thread, as far apart as there are threads.
template <int kD>
__device__ __forceinline__ float* border_of(const Window& window, const Pass<kD>& pass, float* borders, int64_t index) {
  const int64_t entries = window.args.in.cu_seqlens == nullptr ? window.args.in.requests : 1;
  const int64_t entry = window.args.in.cu_seqlens == nullptr ? pass.work.request : 0;
  return borders + ((index * entries + entry) * pass.units + pass.unit) * kD * kSlice + threadIdx.x;
}
template <bool kStore, int kTiles>
__device__ __forceinline__ void move_border(float (&x)[kTiles][4], float* border) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& at = border[(4 * n + e) * blockDim.x];
      if constexpr (kStore) at = x[n][e];
      else x[n][e] = at;
    }
}

template <int kD>
struct ForwardsLayout {
  static constexpr int kValues = kChunk * kD * 2, kSystem = kValues + kSquareBytes;
  static constexpr int kStage = kSystem + kSystemBytes;
  static constexpr int kRoom = 2 * kStage, kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) ForwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = ForwardsLayout<kD>;
  const Args& args = window.args.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads;
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared);
  const int lane = pass.lane, D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const auto take = [&](int64_t chunk, uint32_t stage) {
    const int64_t token = work.span.begin + chunk * kChunk;
    const int tokens = tokens_in(pass, chunk);
    take_rows<T, kD, kOf>(stage, row_of<T>(args.key, args.key_strides, work.batch, pass.key_head, token),
                          args.key_strides.token, tokens, 0, D, window.vectors);
    take_rows<T, kSlice, kOf>(stage + L::kValues, row_of<T>(args.value, args.value_strides, work.batch, pass.head, token),
                              args.value_strides.token, tokens, pass.column, V, window.vectors);
    fetch_record<kOf>(stage + L::kSystem, &window.systems[slot_in(window, pass, chunk) * args.v_heads + pass.head],
                      kSystemBytes);
    cp_async_commit();
  };

  if (work.first < work.last) take(work.first, base);
  State<T, 64> state = {};
  if (!work.begins) move_border<false>(state.x, border_of<kD>(window, pass, window.borders, window.index));
  else if (args.initial_state != nullptr)
    state.template move<false>(const_cast<float*>(args.initial_state) + (work.request * args.v_heads + pass.head) * D * V,
                               args.state_v_first, pass.column + pass.own, lane, D, V, 64 * pass.part);
  int turn = 0;
  for (int64_t chunk = work.first; chunk < work.last; ++chunk, turn ^= 1) {
    const uint32_t keys = base + turn * L::kStage, values = keys + L::kValues, system = keys + L::kSystem;
    const GradSystem& record = *reinterpret_cast<const GradSystem*>(shared + turn * L::kStage + L::kSystem);
    const TokenScalars& s = record.tokens;
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage has been read
    if (chunk + 1 < work.last) take(chunk + 1, base + (turn ^ 1) * L::kStage);
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    float u[2 * kBlocks][4];
    if (window.keeps) {
      auto& kept = static_cast<KeptState<kD>*>(window.states)[at];
      multiply_and_keep(state, keys + part, kept.planes[0] + part + pass.own * 128, sizeof(kept.planes[0]),
                        &kept.inverse[pass.part][pass.slab], room, lane, u);
    } else {
      state.multiply(keys + part, lane, u);
    }
    pass.join(u, shared + L::kRoom);
    take_rest<T>(values, s, pass.slab, lane, u);
    solve<T>(system, system + kSquareBytes, lane, u);
    if (window.keeps && pass.part == 0) keep_update<T>(u, window.updates[at], room, pass.slab, lane);
    scale_columns(u, s.suffix, s.key, lane);
    state.enter(keys + part, lane, u, s.prefix[kChunk - 1]);
  }
  if (!window.keeps && !work.ends) move_border<true>(state.x, border_of<kD>(window, pass, window.borders, window.index + 1));
}

template <int kD>
struct BackwardsLayout {
  static constexpr int kQueries = kChunk * kD * 2, kOutput = 2 * kQueries, kSystem = kOutput + kSquareBytes;
  static constexpr int kScores = kSystem + kSystemBytes, kStage = kScores + static_cast<int>(sizeof(GradScores));
  static constexpr int kRoom = 2 * kStage, kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// u += scale dO^T P: a warp's columns of dO are `output`, P over scale is the tiles at `scores`.
template <class T, int kD>
__device__ __forceinline__ void add_scores_turned(const uint32_t (&output)[kBlocks][4], uint32_t scores, float scale,
                                                  const Pass<kD>& pass, float (&u)[2 * kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (Pass<kD>::kParts > 1 && pass.part != (i == 1 || i == 2)) continue;  // warps of the same columns share the blocks
    float sum[2][4] = {};
#pragma unroll
    for (int j = i; j < kBlocks; ++j)
#pragma unroll
      for (int p = 1; p >= 0; --p) {
        uint32_t b[4];
        load_matrices_transposed(b, right_depth(scores + p * kSquareBytes, j, i, pass.lane));
        mma(T{}, sum[0], output[j], b[0], b[1]);
        mma(T{}, sum[1], output[j], b[2], b[3]);
      }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) u[2 * i + n][e] += scale * sum[n][e];
  }
}

// A warp's columns of rows of the value's width, from a tile of them that it has overwritten; u is transposed.
template <class T, int kD>
__device__ __forceinline__ void give_values(const Window& window, const Pass<kD>& pass, uint32_t tile, int64_t token,
                                            int tokens, const float (&u)[2 * kBlocks][4]) {
  const Args& args = window.args.in;
  const int V = static_cast<int>(args.value_width), lane = pass.lane;
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const T rounded = static_cast<T>(u[n][e]);
      store_2_bytes(tile + element_offset(8 * n + fragment_column(lane, e), pass.own + fragment_row(lane, e)),
                    *reinterpret_cast<const uint16_t*>(&rounded));
    }
  __syncwarp();
  T* const rows = const_cast<T*>(row_of<T>(window.args.grad_value, args.value_strides, pass.work.batch, pass.head, token));
  for (int i = lane; i < 2 * tokens && window.vectors; i += 32) {
    const int t = i / 2, chunk = pass.own / 8 + i % 2;
    if (pass.column + 8 * chunk < V)
      *reinterpret_cast<uint4*>(rows + t * args.value_strides.token + pass.column + 8 * chunk) =
          load_16_bytes(tile + chunk_offset<kChunk>(t, chunk));
  }
  for (int i = lane; i < kSlab * tokens && !window.vectors; i += 32) {
    const int t = i / kSlab, c = pass.own + i % kSlab;
    if (pass.column + c < V)
      reinterpret_cast<uint16_t*>(rows)[t * args.value_strides.token + pass.column + c] =
          load_2_bytes(tile + element_offset(t, c));
  }
  __syncwarp();
}

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) BackwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = BackwardsLayout<kD>;
  const GradArgs& grad = window.args;
  const Args& args = grad.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads;
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared);
  const int lane = pass.lane, D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const auto take_head = [&](int64_t chunk, int h, uint32_t stage) {
    const int64_t token = work.span.begin + chunk * kChunk, out_head = pass.head * window.group + h;
    const int tokens = tokens_in(pass, chunk);
    take_rows<T, kD, kOf>(stage + L::kQueries,
                          row_of<T>(args.query, args.query_strides, work.batch, out_head / (args.heads / args.q_heads), token),
                          args.query_strides.token, tokens, 0, D, window.vectors);
    take_rows<T, kSlice, kOf>(stage + L::kOutput, row_of<T>(grad.grad_output, args.output_strides, work.batch, out_head, token),
                              args.output_strides.token, tokens, pass.column, V, window.vectors);
    fetch_record<kOf>(stage + L::kScores, &window.scores[slot_in(window, pass, chunk) * args.heads + out_head],
                      sizeof(GradScores));
    cp_async_commit();
  };
  const auto take = [&](int64_t chunk, uint32_t stage) {
    take_rows<T, kD, kOf>(stage,
                          row_of<T>(args.key, args.key_strides, work.batch, pass.key_head, work.span.begin + chunk * kChunk),
                          args.key_strides.token, tokens_in(pass, chunk), 0, D, window.vectors);
    fetch_record<kOf>(stage + L::kSystem, &window.systems[slot_in(window, pass, chunk) * args.v_heads + pass.head],
                      kSystemBytes);
    take_head(chunk, 0, stage);
  };

  const int64_t state_at = (work.request * args.v_heads + pass.head) * D * V;
  if (work.first < work.last) take(work.last - 1, base);
  State<T, 64> state = {};
  if (!work.ends) move_border<false>(state.x, border_of<kD>(window, pass, window.carried, (window.index + 1) % 2));
  else if (grad.grad_final_state != nullptr)
    state.template move<false>(const_cast<float*>(grad.grad_final_state) + state_at, args.state_v_first, pass.column + pass.own,
                               lane, D, V, 64 * pass.part);
  int turn = 0;
  for (int64_t chunk = work.last - 1; chunk >= work.first; --chunk, turn ^= 1) {
    const uint32_t keys = base + turn * L::kStage, queries = keys + L::kQueries, outputs = keys + L::kOutput;
    const uint32_t system = keys + L::kSystem, scores = keys + L::kScores;
    unsigned char* const stage = shared + turn * L::kStage;
    const TokenScalars& s = reinterpret_cast<const GradSystem*>(stage + L::kSystem)->tokens;
    const float* const query = reinterpret_cast<const GradScores*>(stage + L::kScores)->query;
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage has been read
    if (chunk > work.first) take(chunk - 1, base + (turn ^ 1) * L::kStage);
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    float u[2 * kBlocks][4];
    auto& record = static_cast<KeptState<kD>*>(window.grads)[at];
    multiply_and_keep(state, keys + part, record.planes[0] + part + pass.own * 128, sizeof(record.planes[0]),
                      &record.inverse[pass.part][pass.slab], room, lane, u);
    scale_columns(u, s.suffix, s.key, lane);
    float kept = s.prefix[kChunk - 1];
    for (int h = 0; h < window.group; ++h) {
      if (h > 0) {
        __syncthreads();
        take_head(chunk, h, keys);
        cp_async_wait();
        __syncthreads();
      }
      uint32_t output[kBlocks][4];
      float rows[2 * kBlocks][4];
      load_columns<T>(outputs, pass.slab, lane, output, rows);
      add_scores_turned<T>(output, scores, args.scale, pass, u);
      scale_columns(rows, s.prefix, query, lane, args.scale);
      state.enter(queries + part, lane, rows, kept);
      kept = 1.0f;
    }
    pass.join(u, shared + L::kRoom);
    solve<T, true>(system, system + kSquareBytes, lane, u);
    if (pass.part == 0) keep_update<T>(u, window.rules[at], room, pass.slab, lane);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      const float2 beta = column_pair(s.beta, n, lane);
#pragma unroll
      for (int e = 0; e < 4; e += 2) u[n][e] *= beta.x, u[n][e + 1] *= beta.y;
    }
    if (pass.part == 0) give_values<T>(window, pass, outputs, work.span.begin + chunk * kChunk, tokens_in(pass, chunk), u);
    scale_columns(u, s.prefix, s.key, lane, -1.0f);
    state.enter(keys + part, lane, u, 1.0f);
  }
  if (!work.begins) move_border<true>(state.x, border_of<kD>(window, pass, window.carried, window.index % 2));
  else if (grad.grad_initial_state != nullptr)
    state.template move<true>(grad.grad_initial_state + state_at, args.state_v_first, pass.column + pass.own, lane, D, V,
                              64 * pass.part);
}

// Of GradChunksKernel, a step's slabs of 16 value columns: S, dS, U and Y as planes, dO and V as they are.
template <int kD>
struct ChunksLayout {
  static constexpr int kQueries = kChunk * kD * 2, kFirstSlab = 2 * kQueries;
  static constexpr int kStatePlane = kSlab * kD * 2, kUpdatePlane = kSlab * kChunk * 2, kColumnsBytes = kChunk * kSlab * 2;
  static constexpr int kBehind = 2 * kStatePlane, kUpdate = 4 * kStatePlane, kRule = kUpdate + 2 * kUpdatePlane;
  static constexpr int kOutput = kRule + 2 * kUpdatePlane, kValues = kOutput + kColumnsBytes;
  static constexpr int kSlabBytes = kValues + kColumnsBytes;
  // In place of slabs when these have been read: gradients of scores of queries and of keys as planes, and products of both.
  static constexpr int kSquares = kFirstSlab, kProducts = kSquares + 4 * kSquareBytes;
  static constexpr int kShared = kFirstSlab + kSlabs * kSlabBytes;
  static_assert(kProducts + kChunk * kGradPitch * 4 <= kShared);
};
struct ChunksShared {
  TokenScalars tokens;
  float query[kChunk];
  float of_query[2][kChunk], of_rule[2][kChunk], of_key[2][kChunk];  // q . dq and k . dk of states, of halves of D
  float grad_beta[2][kChunk], grad_g[kChunk], whole[kGradThreads / 32];
  float inverse[2][kBlocks][kBlocks];  // of blocks of squares
};

// c[half] += inverse times the product of sums of planes; the right side has 16 columns.
template <class T, int kA, int kB>
__device__ __forceinline__ void add_product(float (&c)[4], const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4], int half,
                                            float inverse) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float (&to)[4] = Left<T>::kScaled ? sum : c;
  if constexpr (kA == 2) mma(T{}, to, a[1], b[0][2 * half], b[0][2 * half + 1]);
  if constexpr (kB == 2) mma(T{}, to, a[0], b[1][2 * half], b[1][2 * half + 1]);
  mma(T{}, to, a[0], b[0][2 * half], b[0][2 * half + 1]);
  if constexpr (Left<T>::kScaled) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += inverse * sum[i];
  }
}

// The byte of a 16-byte chunk of a row of 16 numbers: eight rows are in banks of their own.
__device__ __forceinline__ uint32_t columns_offset(int row, int chunk) { return row * 32 + (chunk ^ row / 4) % 2 * 16; }

template <class T>
__device__ __forceinline__ void take_columns(uint32_t to, const T* rows, int64_t stride, int tokens, int column, int width) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kSlab; i += kGradThreads) {
    const int row = i / kSlab, c = i % kSlab;
    const bool there = row < tokens && column + c < width;
    store_2_bytes(to + columns_offset(row, c / 8) + c % 8 * 2,
                  there ? reinterpret_cast<const uint16_t*>(rows)[row * stride + column + c] : 0);
  }
}

// Both planes of 16 rows of a record's tiles of 64, which begin at `from`; a plane has kBytes of them, in boxes of 2 KB.
template <int kBytes>
__device__ __forceinline__ void fetch_slab(uint32_t to, const unsigned char* from) {
  static_assert(2 * kBytes % (16 * kGradThreads) == 0);
#pragma unroll
  for (unsigned first = 0; first < 2 * kBytes; first += 16 * kGradThreads) {
    const unsigned i = first + 16 * threadIdx.x, inside = i % kBytes;
    cp_async(to + i, from + i / kBytes * (kBytes * kWarps) + inside / 2048 * (2048 * kWarps) + inside % 2048, 16);
  }
}

template <class T>
__device__ __forceinline__ float dot_pairs(const uint32_t (&a)[2][4], int i, float2 y) {
  const float2 high = unpack_pair(T{}, a[0][i]), low = unpack_pair(T{}, a[1][i]);
  return (high.x + low.x) * y.x + (high.y + low.y) * y.y;
}

// Where a lane reads and writes in tiles: the bytes of the first 16 or 8 columns of a warp's. Those of later ones in lines of 64
// differ by the exclusive or of 32 or 16 for each, as chunks of 16 bytes stand where the row's number takes them.
template <int kD>
struct Lanes {
  static constexpr int kHalf = kD == 64 ? 64 : 0;        // of the second half of the key dimensions: in a line, else in boxes
  uint32_t slab_state, slab_update, slab_left, columns;  // in slabs: right sides, left sides, of dO and V
  uint32_t rows, depth, left, turned;                    // in tiles: right sides by rows and depth, left sides by rows, turned
  uint32_t pairs, square;                                // pairs of products

  __device__ __forceinline__ Lanes(int block, int half, int lane) {
    const int low = lane / 8 % 2 * 8 + lane % 8, high = lane / 16 * 8 + lane % 8, row = kBlock * block + lane / 4;
    const uint32_t in_slab = chunk_offset<kSlab>(low, lane / 16), in_tile = chunk_offset<kChunk>(low, lane / 16);
    slab_state = (in_slab ^ half * kHalf) + (kD == 64 ? 0 : half * kSlab * 128);
    slab_update = in_slab ^ half * 64;
    slab_left = chunk_offset<kSlab>(high, 2 * block + lane / 8 % 2);
    columns = columns_offset(kBlock * block + low, lane / 16);
    rows = chunk_offset<kChunk>(kChunk / 2 * half + high, lane / 8 % 2);
    depth = (in_tile ^ half * kHalf) + (kD == 64 ? 0 : half * kSquareBytes);
    left = in_tile + block * kBlock * 128;
    turned = chunk_offset<kChunk>(high, 2 * block + lane / 8 % 2);
    pairs = (chunk_offset<kChunk>(row, 0) ^ half * kHalf) + 4 * (lane % 4) + (kD == 64 ? 0 : half * kSquareBytes);
    square = (chunk_offset<kChunk>(row, 0) ^ half * 64) + 4 * (lane % 4);
  }
};

// What a warp finds: of tokens 16 block .. and half of the key dimensions, and of those tokens with half of the chunk's.
template <class T, int kD>
struct ChunkGrads {
  using L = ChunksLayout<kD>;
  static constexpr int kTiles = kD / 16;
  static constexpr int kLine = kBlock * 128;  // bytes of 16 rows of 64 columns
  const Window& window;
  unsigned char* const shared;
  ChunksShared& s;
  ChunkPlace chunk;
  int64_t slot, head;
  int block, half, lane;
  Lanes<kD> at;
  const T* columns;                                         // of dO or V, this thread's row and chunk; null: zeros
  float query[kTiles][4], rule[kTiles][4], key[kTiles][4];  // dO S^T, Y S^T, U dS^T; then gradients of queries, -, of keys
  float of_query[4][4], of_key[4][4];                       // dO U^T, Y U^T
  float values[2], whole;                                   // Y . V of rows, S . dS

  __device__ __forceinline__ uint32_t base() const { return shared_address(shared); }
  __device__ __forceinline__ int64_t unit(int slice) const {
    return (slot * window.args.in.v_heads + head) * window.slices + slice;
  }

  // Half of the threads copy vectors of dO, the others of V.
  __device__ __forceinline__ void choose_columns(int64_t out_head) {
    const Args& args = window.args.in;
    const int row = static_cast<int>(threadIdx.x) / 2 % kChunk;
    columns = threadIdx.x < kGradThreads / 2
                  ? row_of<T>(window.args.grad_output, args.output_strides, chunk.batch, out_head, chunk.token + row)
                  : row_of<T>(args.value, args.value_strides, chunk.batch, head, chunk.token + row);
    columns = row < chunk.tokens ? columns + threadIdx.x % 2 * 8 : nullptr;
  }

  // Slab k into its place; with_keys: also what does not depend on the head of the output.
  __device__ __forceinline__ void take_slab(int k, int64_t out_head, bool with_keys) const {
    const Args& args = window.args.in;
    const int slab = k % kWarps, V = static_cast<int>(args.value_width);
    const int64_t record = unit(k / kWarps);
    const uint32_t to = base() + L::kFirstSlab + k % kSlabs * L::kSlabBytes;
    fetch_slab<L::kStatePlane>(to, static_cast<const KeptState<kD>*>(window.states)[record].planes[0] + slab * kLine);
    fetch_slab<L::kUpdatePlane>(to + L::kUpdate, window.updates[record].planes[0] + slab * kLine);
    if (with_keys) {
      fetch_slab<L::kStatePlane>(to + L::kBehind,
                                 static_cast<const KeptState<kD>*>(window.grads)[record].planes[0] + slab * kLine);
      fetch_slab<L::kUpdatePlane>(to + L::kRule, window.rules[record].planes[0] + slab * kLine);
    }
    if (window.vectors) {
      const int row = static_cast<int>(threadIdx.x) / 2, part = static_cast<int>(threadIdx.x) % 2;
      const bool there = columns != nullptr && kSlab * k + 8 * part < V;
      const void* const from = there ? columns + kSlab * k : window.args.grad_output;
      if (with_keys || row < kChunk)
        cp_async(to + (row < kChunk ? L::kOutput : L::kValues) + columns_offset(row % kChunk, part), from, there ? 16 : 0);
      return;
    }
    take_columns(to + L::kOutput, row_of<T>(window.args.grad_output, args.output_strides, chunk.batch, out_head, chunk.token),
                 args.output_strides.token, chunk.tokens, kSlab * k, V);
    if (with_keys)
      take_columns(to + L::kValues, row_of<T>(args.value, args.value_strides, chunk.batch, head, chunk.token),
                   args.value_strides.token, chunk.tokens, kSlab * k, V);
  }

  __device__ __forceinline__ void multiply_slab(int k, bool with_keys) {
    const uint32_t slab = base() + L::kFirstSlab + k % kSlabs * L::kSlabBytes;
    float before = 1.0f, behind = 1.0f, update = 1.0f, rules = 1.0f;  // what undoes scales
    if constexpr (Left<T>::kScaled) {
      const int64_t record = unit(k / kWarps);
      before = __ldg(&static_cast<const KeptState<kD>*>(window.states)[record].inverse[kD / 128 * half][k % kWarps]);
      update = __ldg(&window.updates[record].inverse[k % kWarps]);
      if (with_keys) {
        behind = __ldg(&static_cast<const KeptState<kD>*>(window.grads)[record].inverse[kD / 128 * half][k % kWarps]);
        rules = __ldg(&window.rules[record].inverse[k % kWarps]);
      }
    }
    uint32_t output[1][4], of_update[2][4], of_rule[2][4];
    load_matrices(output[0], slab + L::kOutput + at.columns);
    if (with_keys) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        load_matrices_transposed(of_update[p], slab + L::kUpdate + p * L::kUpdatePlane + at.slab_left);
        load_matrices_transposed(of_rule[p], slab + L::kRule + p * L::kUpdatePlane + at.slab_left);
      }
      if (half == 0) {
        uint32_t value[4];
        load_matrices(value, slab + L::kValues + at.columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i % 2] += rules * dot_pairs<T>(of_rule, i, unpack_pair(T{}, value[i]));
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * half + j > block) continue;
      uint32_t b[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p)
        load_matrices_transposed(b[p], slab + L::kUpdate + p * L::kUpdatePlane + (at.slab_update ^ 32 * j));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        add_product<T>(of_query[2 * j + n], output, b, n, update);
        if (with_keys) add_product<T>(of_key[2 * j + n], of_rule, b, n, rules * update);
      }
    }
    const bool has_whole = with_keys && k % kWarps == block;  // all blocks load the same
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      const uint32_t column = slab + (at.slab_state ^ 32 * j);
      uint32_t b[2][4], d[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        load_matrices_transposed(b[p], column + p * L::kStatePlane);
        if (with_keys) load_matrices_transposed(d[p], column + L::kBehind + p * L::kStatePlane);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        add_product<T>(query[2 * j + n], output, b, n, before);
        if (!with_keys) continue;
        add_product<T>(rule[2 * j + n], of_rule, b, n, rules * before);
        add_product<T>(key[2 * j + n], of_update, d, n, update * behind);
      }
      if (!has_whole) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 high = unpack_pair(T{}, d[0][i]), low = unpack_pair(T{}, d[1][i]);
        whole += before * behind * dot_pairs<T>(b, i, make_float2(high.x + low.x, high.y + low.y));
      }
    }
  }

  __device__ __forceinline__ void multiply_slabs(int64_t out_head, bool with_keys) {
    const int count = static_cast<int>(ceil_div(window.args.in.value_width, int64_t{kSlab}));
#pragma unroll 1
    for (int k = 1 - kSlabs; k < count; ++k) {
      if (k >= 0) {
        cp_async_wait_but<kSlabs - 2>();
        __syncthreads();  // the slab is there, and the one before has been read
      }
      if (k + kSlabs - 1 < count) take_slab(k + kSlabs - 1, out_head, with_keys);
      cp_async_commit();
      if (k >= 0) multiply_slab(k, with_keys);
    }
    cp_async_wait();
  }

  // Sums over this warp's dimensions of rows of `tile` times x, of rows lane / 4 and 8 later; in the row's four lanes.
  __device__ __forceinline__ void dot_rows(const float (&x)[kTiles][4], int tile, float (&sums)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 pair =
            unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(shared + tile + 1024 * r + (at.pairs ^ 16 * n)));
        sums[r] += pair.x * x[n][2 * r] + pair.y * x[n][2 * r + 1];
      }
      sums[r] = over_row(sums[r]);
    }
  }
  static __device__ __forceinline__ float over_row(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
  }

  // The decays and lengths that products with states lack, and their rows' products with queries and keys.
  __device__ __forceinline__ void finish_states(bool with_keys) {
    float sums[2], rules[2], keys[2];
    dot_rows(query, L::kQueries, sums);
    if (with_keys) {
      dot_rows(rule, 0, rules);
      dot_rows(key, 0, keys);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      const float prefix = s.tokens.prefix[t], suffix = s.tokens.suffix[t], by_rule = prefix * s.tokens.beta[t];
      if (lane % 4 == 0) s.of_query[half][t] = prefix * s.query[t] * sums[r];
      if (with_keys && lane % 4 == 0) {
        s.of_rule[half][t] = prefix * s.tokens.key[t] * rules[r];
        s.of_key[half][t] = suffix * s.tokens.key[t] * keys[r];
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          query[n][e] *= prefix;
          if (with_keys) key[n][e] = suffix * key[n][e] - by_rule * rule[n][e];
        }
    }
  }

  // Products of this warp's rows of queries and keys with half of the keys, up to the diagonal.
  __device__ __forceinline__ void multiply_keys(float (&queries)[4][4], float (&keys)[4][4]) const {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      const int box = k / kBlocks * kSquareBytes, column = 32 * (k % kBlocks);
      uint32_t of_rows[4], of_keys[4];
      load_matrices(of_rows, base() + L::kQueries + box + (at.left ^ column));
      load_matrices(of_keys, base() + box + (at.left ^ column));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * half + j > block) continue;
        uint32_t b[4];
        load_matrices(b, base() + box + kLine * j + (at.rows ^ column));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma(T{}, queries[2 * j + n], of_rows, b[2 * n], b[2 * n + 1]);
          mma(T{}, keys[2 * j + n], of_keys, b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }

  // Gradients of scores stay, with the decay between the tokens; what scores hand on to decays and betas goes to shared memory.
  __device__ __forceinline__ void finish_scores(bool with_keys) {
    float queries[4][4] = {}, keys[4][4] = {};
    multiply_keys(queries, keys);
    float* const products = reinterpret_cast<float*>(shared + L::kProducts);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      const Until until(s.tokens.decay, t);
      const float of_t = s.query[t], key_t = s.tokens.key[t], beta = s.tokens.beta[t];
      float grad_beta = values[r];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int first = kChunk / 2 * half + 8 * n + fragment_column(lane, 0);
        const float2 decays = until.from<true>(s.tokens.decay, first), lengths = column_pair(s.tokens.key, 4 * half + n, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = first + i, e = 2 * r + i;
          const float decay = i ? decays.y : decays.x, length = i ? lengths.y : lengths.x;
          const float of_rule = from < t ? decay * of_key[n][e] : 0.0f, by_rule = of_rule * key_t * length * keys[n][e];
          of_query[n][e] = from <= t ? decay * of_query[n][e] : 0.0f;
          of_key[n][e] = -beta * of_rule;
          grad_beta -= by_rule;
          products[t * kGradPitch + from] =
              from < t ? of_query[n][e] * of_t * length * queries[n][e] - (with_keys ? beta * by_rule : 0.0f) : 0.0f;
        }
      }
      if (!with_keys) continue;
      grad_beta = over_row(grad_beta);
      if (lane % 4 == 0) s.grad_beta[half][t] = grad_beta;
    }
  }

  // A square of this warp's rows times factors of rows, or with kColumns of columns, as planes; blocks above the diagonal are
  // not read.
  template <bool kColumns>
  __device__ __forceinline__ void put_square(int square, const float (&x)[4][4], const float* factors) const {
    const uint32_t high = base() + L::kSquares + 2 * square * kSquareBytes;
    const float rows[2] = {factors[kBlock * block + lane / 4], factors[kBlock * block + lane / 4 + 8]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * half + j > block) continue;
      float scaled[2][4], by[2], inverse;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 of = *reinterpret_cast<const float2*>(&factors[kChunk / 2 * half + 16 * j + 8 * n + 2 * (lane % 4)]);
#pragma unroll
        for (int e = 0; e < 4; ++e) scaled[n][e] = x[2 * j + n][e] * (kColumns ? e % 2 ? of.y : of.x : rows[e / 2]);
      }
      scale_rows<T>(scaled, by, inverse);
      if (Left<T>::kScaled && lane == 0) s.inverse[square][block][2 * half + j] = inverse;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t planes[2];
          split_pair<T>(by[0] * scaled[n][2 * r], by[0] * scaled[n][2 * r + 1], planes);
          const uint32_t to = high + 1024 * r + (at.square ^ 16 * (2 * j + n));
          store_4_bytes(to, planes[0]);
          store_4_bytes(to + kSquareBytes, planes[1]);
        }
    }
  }

  // x += the square, or with kTurned its transpose, times the rows of a tile.
  template <bool kTurned>
  __device__ __forceinline__ void add_square(int square, int tile, float (&x)[kTiles][4]) const {
    const uint32_t high = base() + L::kSquares + 2 * square * kSquareBytes;
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      if (kTurned ? other < block : other > block) continue;
      uint32_t a[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if constexpr (kTurned) load_matrices_transposed(a[p], high + p * kSquareBytes + kLine * other + at.turned);
        else load_matrices(a[p], high + p * kSquareBytes + (at.left ^ 32 * other));
      }
      const float inverse = Left<T>::kScaled ? s.inverse[square][kTurned ? other : block][kTurned ? block : other] : 1.0f;
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        uint32_t b[1][4];
        load_matrices_transposed(b[0], base() + tile + kLine * other + (at.depth ^ 32 * j));
        add_product<T>(x[2 * j], a, b, 0, inverse);
        add_product<T>(x[2 * j + 1], a, b, 1, inverse);
      }
    }
  }

  // In place of products of pairs the sums of those of a row with earlier tokens than a column's.
  __device__ __forceinline__ void sum_products() const {
    const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    float* const at = reinterpret_cast<float*>(shared + L::kProducts) + row * kGradPitch + kBlock * part;
    float sum = 0.0f, before = 0.0f;
#pragma unroll
    for (int c = 0; c < kBlock; ++c) {
      const float x = at[c];
      at[c] = sum;
      sum += x;
    }
#pragma unroll
    for (int other = 0; other < 3; ++other) {
      const float x = __shfl_sync(kFullWarp, sum, lane / 4 * 4 + other);
      if (other < part) before += x;
    }
#pragma unroll
    for (int c = 0; c < kBlock; ++c) at[c] += before;
  }
  __device__ __forceinline__ void sum_decays(bool with_keys) const {
    const int t = static_cast<int>(threadIdx.x) / 4, first = static_cast<int>(threadIdx.x) % 4 * kBlock;
    const float* const products = reinterpret_cast<const float*>(shared + L::kProducts);
    float sum = 0.0f;
    for (int i = first; i < first + kBlock; ++i) {
      if (i >= t) sum += products[i * kGradPitch + t] + (s.of_query[0][i] + s.of_query[1][i]);
      if (!with_keys) continue;
      if (i >= t) sum -= s.tokens.beta[i] * (s.of_rule[0][i] + s.of_rule[1][i]);
      else sum += s.of_key[0][i] + s.of_key[1][i];
    }
    sum = over_row(sum);
    if (first != 0) return;
    if (with_keys) {
      float states = 0.0f;
      for (int i = 0; i < kGradThreads / 32; ++i) states += s.whole[i];
      s.grad_g[t] = sum + s.tokens.prefix[kChunk - 1] * states;
    } else {
      s.grad_g[t] += sum;
    }
  }

  // Rows of `to`, [token][D].
  __device__ __forceinline__ void give_rows(const float (&x)[kTiles][4], float* to) const {
    const int D = static_cast<int>(window.args.in.key_width);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      if (t >= chunk.tokens) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int d = kD / 2 * half + 8 * n + 2 * (lane % 4);
        float* const at = to + static_cast<int64_t>(t) * D + d;
        if (window.vectors) {
          if (d < D) *reinterpret_cast<float2*>(at) = make_float2(x[n][2 * r], x[n][2 * r + 1]);
        } else {
          if (d < D) at[0] = x[n][2 * r];
          if (d + 1 < D) at[1] = x[n][2 * r + 1];
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Args& args = window.args.in;
    const int D = static_cast<int>(args.key_width), tid = static_cast<int>(threadIdx.x);
    take_rows<T, kD, kGradThreads>(
        base(), row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
        args.key_strides.token, chunk.tokens, 0, D, window.vectors);
    const float* const tokens = reinterpret_cast<const float*>(&window.systems[slot * args.v_heads + head].tokens);
    for (int i = tid; i < static_cast<int>(sizeof(TokenScalars) / 4); i += kGradThreads)
      reinterpret_cast<float*>(&s.tokens)[i] = tokens[i];
    for (int h = 0; h < window.group; ++h) {
      const int64_t out_head = head * window.group + h;
      const bool with_keys = h == 0;
      if (h > 0) __syncthreads();  // what is loaded next has been read
      take_rows<T, kD, kGradThreads>(
          base() + L::kQueries,
          row_of<T>(args.query, args.query_strides, chunk.batch, out_head / (args.heads / args.q_heads), chunk.token),
          args.query_strides.token, chunk.tokens, 0, D, window.vectors);
      if (tid < kChunk) s.query[tid] = args.scale * window.scores[slot * args.heads + out_head].query[tid];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) query[n][e] = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) of_query[n][e] = 0.0f;
      choose_columns(out_head);
      multiply_slabs(out_head, with_keys);
      finish_states(with_keys);
      if (with_keys) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) whole += __shfl_xor_sync(kFullWarp, whole, offset);
        if (lane == 0) s.whole[tid / 32] = whole;
      }
      __syncthreads();  // the slabs have been read
      finish_scores(with_keys);
      put_square<true>(0, of_query, s.tokens.key);
      if (with_keys) put_square<true>(1, of_key, s.tokens.key);
      __syncthreads();
      add_square<false>(0, 0, query);
      if (with_keys) add_square<false>(1, 0, key);
      sum_products();
      give_rows(query, window.parts.query + ((chunk.batch * args.heads + out_head) * args.tokens + chunk.token) * D);
      __syncthreads();
      put_square<false>(0, of_query, s.query);
      if (with_keys) put_square<false>(1, of_key, s.tokens.key);
      sum_decays(with_keys);
      __syncthreads();
      add_square<true>(0, L::kQueries, key);
      if (with_keys) add_square<true>(1, 0, key);
    }
    const int64_t row = (chunk.batch * args.v_heads + head) * args.tokens + chunk.token;
    give_rows(key, window.parts.key + row * D);
    if (tid >= chunk.tokens) return;
    const GradArgs& grad = window.args;
    const auto give = [&](float* out, const Strides& strides, float x) {
      if (out != nullptr)
        const_cast<float*>(row_of<float>(out, strides, chunk.batch, head, chunk.token))[tid * strides.token] = x;
    };
    give(grad.grad_beta, args.beta_strides,
         s.grad_beta[0][tid] + s.grad_beta[1][tid] - (s.of_rule[0][tid] + s.of_rule[1][tid]));
    give(grad.grad_log_decay, args.decay_strides, s.grad_g[tid]);
  }
};

// A CTA: (slot, value head).
template <class T, int kD>
__global__ void __launch_bounds__(kGradThreads, 1) GradChunksKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int64_t slot = blockIdx.x / window.args.in.v_heads, head = blockIdx.x % window.args.in.v_heads;
  const ChunkPlace chunk = chunk_of(window.args.in, window.first_slot + slot);
  if (chunk.tokens == 0) return;
  ChunkGrads<T, kD> grads = {window,
                             shared,
                             *reinterpret_cast<ChunksShared*>(shared + ChunksLayout<kD>::kShared),
                             chunk,
                             slot,
                             head,
                             warp % kBlocks,
                             warp / kBlocks,
                             static_cast<int>(threadIdx.x % 32),
                             Lanes<kD>(warp % kBlocks, warp / kBlocks, static_cast<int>(threadIdx.x % 32))};
  grads.run();
}

template <class Kernel>
cudaError_t launch(Kernel kernel, int64_t blocks, int threads, int bytes, const Window& window, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(window);
  return cudaGetLastError();
}

// Bytes of shared memory of the kernel that asks for most.
template <int kD>
constexpr int most_shared() {
  constexpr int kChunks = ChunksLayout<kD>::kShared + static_cast<int>(sizeof(ChunksShared));
  return BackwardsLayout<kD>::kBytes > kChunks ? BackwardsLayout<kD>::kBytes : kChunks;
}

// keeps: all four kernels, else states alone, to the border of the next window.
template <class T, int kD>
cudaError_t launch_window(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  const int64_t chunks = window.slots * args.v_heads, states = args.requests * args.v_heads * window.slices;
  cudaError_t error = launch(GradPrepareKernel<T, kD>, chunks, kThreads, PrepareLayout<kD>::kBytes, window, stream);
  if (error == cudaSuccess)
    error = launch(ForwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, ForwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess || !window.keeps) return error;
  error = launch(BackwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, BackwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess) return error;
  return launch(GradChunksKernel<T, kD>, chunks, kGradThreads,
                ChunksLayout<kD>::kShared + static_cast<int>(sizeof(ChunksShared)), window, stream);
}

cudaError_t launch_window(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  if (args.dtype == static_cast<int32_t>(DType::kFloat16))
    return args.key_width <= 64 ? launch_window<__half, 64>(window, stream) : launch_window<__half, 128>(window, stream);
  return args.key_width <= 64 ? launch_window<__nv_bfloat16, 64>(window, stream)
                              : launch_window<__nv_bfloat16, 128>(window, stream);
}

#ifndef LEANFLEET_WINDOW_BYTES  // tests take less
#define LEANFLEET_WINDOW_BYTES (int64_t{1536} << 20)
#endif
constexpr int64_t kWindowBytes = LEANFLEET_WINDOW_BYTES;  // of the workspace, about

int64_t all_slots(const Args& args) {
  return !args.packed ? ceil_div(args.tokens, int64_t{kChunk}) * args.requests : args.tokens / kChunk + args.requests;
}

}  // namespace

bool grad_chunks_fit(const GradArgs& grad, int shared) {
  const Args& args = grad.in;
  if (args.dtype == static_cast<int32_t>(DType::kFloat32) || args.decay_per_key || !args.delta) return false;
  // Scores and the system are held in the keys' type: float16 has no range for keys and queries of any length.
  if (args.dtype == static_cast<int32_t>(DType::kFloat16) && !args.normalize) return false;
  if (args.key_width > 128 || args.requests == 0) return false;
  if (args.tokens < kChunkedTokens * (args.packed ? args.requests : 1)) return false;
  if (all_slots(args) * args.v_heads * ceil_div(args.value_width, int64_t{kSlice}) > kMaxGrid) return false;
  return shared >= (args.key_width <= 64 ? most_shared<64>() : most_shared<128>());
}

int launch_grad_chunks(const GradArgs& grad, const GradParts& parts, const CudaTarget& target, Workspace& ws) {
  const Args& args = grad.in;
  Window window = {};
  window.args = grad;
  window.parts = parts;
  window.group = static_cast<int>(args.heads / args.v_heads);
  window.slices = static_cast<int>(ceil_div(args.value_width, int64_t{kSlice}));
  const int64_t units = args.v_heads * window.slices, slots = all_slots(args);
  const int64_t state_bytes = args.key_width <= 64 ? sizeof(KeptState<64>) : sizeof(KeptState<128>);
  const int64_t slot_bytes = args.v_heads * static_cast<int64_t>(sizeof(GradSystem)) +
                             args.heads * static_cast<int64_t>(sizeof(GradScores)) +
                             2 * units * (state_bytes + static_cast<int64_t>(sizeof(KeptUpdate)));
  // Windows of whole chunks of all requests, where these alternate.
  const int64_t step = args.packed ? 1 : args.requests;
  const int64_t chunks = ceil_div(slots, step);
  int64_t most = kWindowBytes / slot_bytes / step > 0 ? kWindowBytes / slot_bytes / step : 1;
  // Of many requests each window keeps a state at its border: more windows than their root would keep more of these.
  if (most < chunks && most * most < chunks) most = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  const int64_t windows = ceil_div(chunks, most);
  const int64_t held = ceil_div(chunks, windows) * step;
  const int64_t border_floats = step * units * state_bytes / 4;
  window.systems = ws.scratch<GradSystem>(held * args.v_heads);
  window.scores = ws.scratch<GradScores>(held * args.heads);
  window.states = ws.scratch<unsigned char>(held * units * state_bytes);
  window.grads = ws.scratch<unsigned char>(held * units * state_bytes);
  window.updates = ws.scratch<KeptUpdate>(held * units);
  window.rules = ws.scratch<KeptUpdate>(held * units);
  window.borders = ws.scratch<float>(windows > 1 ? windows * border_floats : 0);
  window.carried = ws.scratch<float>(windows > 1 ? 2 * border_floats : 0);
  if (ws.counting()) return cudaSuccess;

  window.vectors = args.key_width % 8 == 0 && args.value_width % 8 == 0;
  for (const void* data : {args.query, args.key, args.value, grad.grad_output, static_cast<const void*>(grad.grad_value)})
    window.vectors = window.vectors && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const auto launch_at = [&](int64_t index, bool keeps) {
    window.index = index;
    window.first_slot = index * held;
    window.slots = slots - window.first_slot < held ? slots - window.first_slot : held;
    window.keeps = keeps;
    return launch_window(window, stream);
  };
  cudaError_t error = cudaSuccess;
  for (int64_t index = 0; index + 1 < windows && error == cudaSuccess; ++index) error = launch_at(index, false);
  for (int64_t index = windows - 1; index >= 0 && error == cudaSuccess; --index) error = launch_at(index, true);
  return error;
}

}  // namespace leanfleet::gated_delta_rule
