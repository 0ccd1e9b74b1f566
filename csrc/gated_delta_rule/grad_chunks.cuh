// What the kernels share that find gradients in chunks of 64 tokens: grad_chunks.cu, where tokens have a decay each, and
// grad_key_chunks.cu, where key dimensions have decays of their own.
#pragma once

#include <cuda_runtime.h>

#include "gated_delta_rule/chunks.cuh"
#include "gated_delta_rule/warp_states.cuh"

namespace leanfleet::gated_delta_rule {

constexpr int kSlab = 16;          // value columns of a step of the last kernel, those of a warp of the others
constexpr int kGradThreads = 256;  // of the last kernel
constexpr int kSlabs = 3;          // of it under way

// Of a chunk, a value head and a slice: S^T before the chunk or dS^T behind it, rows are value columns. With decays of key
// dimensions the decay of the chunk's first token is in S already. inverse: what undoes the scale of 16 rows of 64 columns.
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

struct Window {
  GradArgs args;
  GradParts parts;
  void *systems, *scores;       // [slot][value head] and [slot][head of the output], of GradSystem and GradScores or, with
                                // decays of key dimensions, of KeyGradSystem and KeyGradScores
  void *states, *grads;         // [slot][value head][slice] of KeptState: before chunks, behind them
  KeptUpdate *updates, *rules;  // the same: U, Y
  float *borders, *carried;     // states before windows [window][request, or 0 with offsets][value head][slice]; of gradients
                                // behind windows the last two
  int64_t first_slot, slots, index;
  int slices, group;
  bool keeps, vectors;  // vectors: rows are whole ones of 16 bytes
};

// `fetch`, or element by element where rows are no whole vectors; commits nothing.
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
template <int kOf>
__device__ __forceinline__ void keep_record(void* to, uint32_t from, int bytes) {
  for (int i = 16 * static_cast<int>(threadIdx.x); i < bytes; i += 16 * kOf)
    *reinterpret_cast<uint4*>(static_cast<unsigned char*>(to) + i) = load_16_bytes(from + i);
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
// c = S^T X^T for the tile of X, or its two planes that are kLow bytes apart, where the state is of a pass's columns. The left
// sides that the state is go into both planes of a record.
template <int kLow, class T, int kD>
__device__ __forceinline__ void multiply_and_keep(const State<T, 64>& state, uint32_t rows, KeptState<kD>& to,
                                                  const Pass<kD>& pass, uint32_t room, float (&c)[2 * kBlocks][4]) {
  state.template multiply<kLow>(rows, pass.lane, c, [&](int k, const Left<T>& left, float undo) {
    put_left(left, k, room, pass.lane);
    if (Left<T>::kScaled && k == 0 && pass.lane == 0) to.inverse[pass.part][pass.slab] = undo;
  });
  keep_room(to.planes[0] + pass.tile_part() + pass.own * 128, sizeof(to.planes[0]), room, pass.lane);
}

// A pass's part of a state [D,V] or [V,D] of its request.
template <bool kStore, class T, int kD>
__device__ __forceinline__ void move_state(const Window& window, const Pass<kD>& pass, float* data, State<T, 64>& state) {
  const Args& args = window.args.in;
  const int D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  state.template move<kStore>(data + (pass.work.request * args.v_heads + pass.head) * D * V, args.state_v_first,
                              pass.column + pass.own, pass.lane, D, V, 64 * pass.part);
}
// The state before a window, the gradient of that behind it, and where the gradient of that before goes.
template <class T, int kD>
__device__ __forceinline__ void begin_states(const Window& window, const Pass<kD>& pass, State<T, 64>& state) {
  const float* const initial = window.args.in.initial_state;
  if (!pass.work.begins) move_border<false>(state.x, border_of<kD>(window, pass, window.borders, window.index));
  else if (initial != nullptr) move_state<false>(window, pass, const_cast<float*>(initial), state);
}
template <class T, int kD>
__device__ __forceinline__ void begin_grads(const Window& window, const Pass<kD>& pass, State<T, 64>& state) {
  const float* const final_state = window.args.grad_final_state;
  if (!pass.work.ends) move_border<false>(state.x, border_of<kD>(window, pass, window.carried, (window.index + 1) % 2));
  else if (final_state != nullptr) move_state<false>(window, pass, const_cast<float*>(final_state), state);
}
template <class T, int kD>
__device__ __forceinline__ void end_grads(const Window& window, const Pass<kD>& pass, State<T, 64>& state) {
  float* const initial = window.args.grad_initial_state;
  if (!pass.work.begins) move_border<true>(state.x, border_of<kD>(window, pass, window.carried, window.index % 2));
  else if (initial != nullptr) move_state<true>(window, pass, initial, state);
}

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

// A step of the last kernel: slabs of 16 value columns of S, dS, U and Y as planes, of dO and V as they are.
template <int kD>
struct SlabLayout {
  static constexpr int kStatePlane = kSlab * kD * 2, kUpdatePlane = kSlab * kChunk * 2, kColumnsBytes = kChunk * kSlab * 2;
  static constexpr int kBehind = 2 * kStatePlane, kUpdate = 4 * kStatePlane, kRule = kUpdate + 2 * kUpdatePlane;
  static constexpr int kOutput = kRule + 2 * kUpdatePlane, kValues = kOutput + kColumnsBytes;
  static constexpr int kSlabBytes = kValues + kColumnsBytes;
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

// Where a lane reads and writes in tiles: the bytes of the first 16 or 8 columns of a warp's. Those of later ones in lines of
// 64 differ by the exclusive or of 32 or 16 for each, as chunks of 16 bytes stand where the row's number takes them.
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

// What a warp of the last kernel finds first: of tokens 16 block .. and half of the key dimensions, and of those tokens with
// half of the chunk's. slabs: where they are in shared memory.
template <class T, int kD, bool kPerKey>
struct SlabProducts {
  using L = SlabLayout<kD>;
  static constexpr int kTiles = kD / 16;
  static constexpr int kLine = kBlock * 128;  // bytes of 16 rows of 64 columns
  const Window& window;
  ChunkPlace chunk;
  int64_t slot, head;
  uint32_t slabs;
  int block, half, lane;
  Lanes<kD> at;
  const T* columns;                                         // of dO or V, this thread's row and chunk; null: zeros
  float query[kTiles][4], rule[kTiles][4], key[kTiles][4];  // dO S^T, Y S^T, U dS^T
  float of_query[4][4], of_key[4][4];                       // dO U^T, Y U^T
  float values[2];                                          // Y . V of rows
  float whole[kPerKey ? kTiles : 1];                        // S . dS, of key dimensions lane / 4, lane / 4 + 8 ..

  __device__ __forceinline__ SlabProducts(const Window& of, const ChunkPlace& place, int64_t its_slot, int64_t its_head,
                                          uint32_t at_slabs)
      : window(of), chunk(place), slot(its_slot), head(its_head), slabs(at_slabs),
        block(static_cast<int>(threadIdx.x / 32) % kBlocks), half(static_cast<int>(threadIdx.x / 32) / kBlocks),
        lane(static_cast<int>(threadIdx.x % 32)), at(block, half, lane) {
    clear(rule), clear(key), clear(of_key);
    values[0] = values[1] = 0.0f;
#pragma unroll
    for (float& x : whole) x = 0.0f;
  }
  template <int kCount>
  static __device__ __forceinline__ void clear(float (&x)[kCount][4]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
  }

  __device__ __forceinline__ int64_t unit(int slice) const {
    return (slot * window.args.in.v_heads + head) * window.slices + slice;
  }
  static __device__ __forceinline__ float over_row(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
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
    const uint32_t to = slabs + k % kSlabs * L::kSlabBytes;
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
    const uint32_t slab = slabs + k % kSlabs * L::kSlabBytes;
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
        whole[kPerKey ? 2 * j + i / 2 : 0] += before * behind * dot_pairs<T>(b, i, make_float2(high.x + low.x, high.y + low.y));
      }
    }
  }

  __device__ __forceinline__ int slab_count() const {
    return static_cast<int>(ceil_div(window.args.in.value_width, int64_t{kSlab}));
  }
  // Asks for the first slabs.
  __device__ __forceinline__ void begin_slabs(int64_t out_head, bool with_keys) const {
#pragma unroll 1
    for (int k = 0; k < kSlabs - 1; ++k) {
      if (k < slab_count()) take_slab(k, out_head, with_keys);
      cp_async_commit();
    }
  }
  __device__ __forceinline__ void multiply_slabs(int64_t out_head, bool with_keys) {
    const int count = slab_count();
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      cp_async_wait_but<kSlabs - 2>();
      __syncthreads();  // the slab is there, and the one before has been read
      if (k + kSlabs - 1 < count) take_slab(k + kSlabs - 1, out_head, with_keys);
      cp_async_commit();
      multiply_slab(k, with_keys);
    }
    cp_async_wait();
  }

  // A square of this warp's rows as planes at `high`, each number times by_of(column of its pair, element of its fragment);
  // blocks above the diagonal are not read. inverses: what undoes the scales of blocks.
  template <class By>
  __device__ __forceinline__ void put_square(uint32_t high, float (&inverses)[kBlocks][kBlocks], const float (&x)[4][4],
                                             By&& by_of) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * half + j > block) continue;
      float scaled[2][4], by[2], inverse;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scaled[n][e] = x[2 * j + n][e] * by_of(kChunk / 2 * half + 16 * j + 8 * n + 2 * (lane % 4), e);
      scale_rows<T>(scaled, by, inverse);
      if (Left<T>::kScaled && lane == 0) inverses[block][2 * half + j] = inverse;
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
};

// With decays of key dimensions, in grad_key_chunks.cu: a window's kernels, and bytes of its records and, at most, of shared
// memory.
struct KeyGradBytes {
  int64_t system, scores;
  int shared;
};
KeyGradBytes key_grad_bytes(int64_t key_width);
cudaError_t launch_key_window(const Window& window, cudaStream_t stream);

template <class Kernel>
cudaError_t launch(Kernel kernel, int64_t blocks, int threads, int bytes, const Window& window, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(window);
  return cudaGetLastError();
}

}  // namespace leanfleet::gated_delta_rule
