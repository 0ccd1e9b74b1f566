// CausalLinearDecay over many tokens on CUDA cores, in float32: `causal_dot_product` and `fleet` for calls that are not
// normalised. The state is in registers, a thread has four columns of kRows ranks: for each of these the prefix l_r of
// FleetAttention's λ-cumsum (FA algorithm 1), which is also the row recurrence's state (LD section 3.1.2). A block has a
// request, a query head and some columns. Half-warps own slices of the rank; their partial outputs are added up in a fixed
// order, in a warp by shuffles and over the warps through shared memory.
//
// While some warps compute a tile of tokens, kStagingWarps others bring the next one to shared memory as float32, have the
// loads of the one after it on their way, and write the outputs of the one before. Where the decays of a tile multiply to no
// less than e^-20, its outputs are multiplied by the decay from the tile's start and its values divided by it, which leaves
// one product a tile to the state.
//
// Where there are too few heads to fill the device, tokens are cut into segments: a first pass computes what each but the
// last adds to the state, and every block of the second adds up what came before it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "causal_linear_decay/causal_linear_decay.h"
#include "causal_linear_decay/device.cuh"
#include "causal_linear_decay/rows.h"
#include "core/mma.cuh"
#include "core/op.h"

namespace leanfleet {

namespace {

using namespace tile;

constexpr int kRows = 8;           // ranks of a thread, and 4 columns; of a warp 32 ranks, 32 columns
constexpr int kStagingWarps = 4;
constexpr int kStagers = 32 * kStagingWarps;
constexpr float kLeastTileDecay = -20.0f;  // natural logarithm
constexpr int64_t kMinSegmentTokens = 256;
constexpr int kMaxSegments = 16;

struct RowsPlan {
  int rank_warps, column_warps;  // that compute
  int segments;
  int column_blocks;
  bool vectors;      // rows of query, key and value begin and end at 16 bytes
  bool out_vectors;  // outputs are written four columns at once
  float* slots;   // [requests,Hkv,segments][R,Dv]: the state before the first token, then what each segment but the last adds
  float* decays;  // [requests,Hkv,segments]: with it, ln of that segment's decay
};

// The most warps that compute, and how a block's shared memory is cut. All sizes in floats.
template <int kRankWarps, int kColumnWarps>
struct BlockShape {
  static constexpr int kRanks = 32 * kRankWarps, kColumns = 32 * kColumnWarps;
  static constexpr int kTile = kRankWarps <= 4 ? 32 : kRankWarps == 8 ? 16 : 4;  // tokens
  static constexpr int kKeys = kTile * kRanks;                           // after the queries, then the values
  static constexpr int kStaged = 2 * kKeys + kTile * kColumns;
  static constexpr int kToken = kRankWarps * kColumns;    // partial outputs of a token
  static constexpr int kPartials = (kTile + 1) * kToken;  // the first token's are not used
  static constexpr int kThreads = 32 * kRankWarps * kColumnWarps + kStagers;
  static constexpr size_t kBytes = sizeof(float) * (2 * (kStaged + kPartials + kTile) + 4);
};

// The staging warps and the others meet here, each in code of their own.
__device__ __forceinline__ void block_barrier(int threads) { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); }

// 16 bytes, or zeros. A predicate, not a branch: many of these are on their way at once.
__device__ __forceinline__ uint4 load_or_zero(const void* from, bool load) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w) : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
__device__ __forceinline__ float load_or_zero(const float* from, bool load) {
  float x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
               : "=&f"(x) : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
template <class T>
__device__ __forceinline__ T load_or_zero(const T* from, bool load) {
  uint16_t x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.b16 %0, [%1];\n}"
               : "=&h"(x) : "l"(from), "r"(static_cast<int>(load)));
  return *reinterpret_cast<const T*>(&x);
}

template <class T>
union Piece {
  uint4 bits;
  T element[16 / sizeof(T)];
};

// Elements c .. of a row, 0 from `width` on.
template <bool kVectors, class T>
__device__ __forceinline__ Piece<T> load_piece(const T* row, int c, int width) {
  Piece<T> x;
  if constexpr (kVectors) {
    x.bits = load_or_zero(static_cast<const void*>(row + c), c < width);
  } else {
#pragma unroll
    for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) x.element[j] = load_or_zero(row + c + j, c + j < width);
  }
  return x;
}

__device__ __forceinline__ float4 four_of(const Piece<float>& x, int) {
  return make_float4(x.element[0], x.element[1], x.element[2], x.element[3]);
}
template <class T>
__device__ __forceinline__ float4 four_of(const Piece<T>& x, int half) {
  const float2 a = unpack_pair(T{}, half == 0 ? x.bits.x : x.bits.z), b = unpack_pair(T{}, half == 0 ? x.bits.y : x.bits.w);
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
template <class T>
__device__ __forceinline__ void store_four(T* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(T{}, x.x, x.y), pack_pair(T{}, x.z, x.w));
}

// A block's place in the call.
struct Part {
  int column, head, kv_head, segment;
  int64_t request, batch, begin, end;  // tokens
};

__device__ __forceinline__ Part part_of(const DecayInputs& in, int64_t unit, int columns, int column_blocks, int segments,
                                        int tile, bool sums_only) {
  Part part;
  const int heads = static_cast<int>(sums_only ? in.kv_heads : in.heads), group = static_cast<int>(in.heads / in.kv_heads);
  part.column = static_cast<int>(unit % column_blocks) * columns;
  unit /= column_blocks;
  const int passes = sums_only ? segments - 1 : segments;
  part.segment = static_cast<int>(unit % passes);
  unit /= passes;
  part.head = static_cast<int>(unit % heads);
  part.request = unit / heads;
  part.kv_head = sums_only ? part.head : part.head / group;
  part.batch = in.cu_seqlens != nullptr ? 0 : part.request;
  const RequestTokens tokens = request_tokens(in, part.request);
  const int64_t end = tokens.end < tokens.begin ? tokens.begin : tokens.end;
  const int64_t length = ((end - tokens.begin + segments - 1) / segments + tile - 1) / tile * tile;
  part.begin = tokens.begin + part.segment * length < end ? tokens.begin + part.segment * length : end;
  part.end = part.begin + length < end ? part.begin + length : end;
  return part;
}

// Row of the state pool, or -1.
__device__ __forceinline__ int64_t state_row(const CausalLinearDecayArgs& args, int64_t request) {
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  return row < 0 || row >= args.state_rows ? -1 : row;
}

// What the state is before a segment, from the sums of those before it; what the first pass puts there. each(f) calls
// f(element of the state, its place) for a thread's elements.
template <class Each>
__device__ __forceinline__ void begin_segment(const CausalLinearDecayArgs& args, const Part& part, float* slots,
                                              const float* decays, int segments, bool sums_only, Each&& each) {
  const DecayInputs& in = args.in;
  const int64_t row = state_row(args, part.request), size = in.key_width * in.value_width;
  const float* const initial =
      args.initial_state != nullptr && row >= 0 ? args.initial_state + (row * in.kv_heads + part.kv_head) * size : nullptr;
  const int64_t slot = (part.request * in.kv_heads + part.kv_head) * segments;
  slots += slot * size, decays += slot;
  if (segments == 1) {
    if (initial != nullptr) each([&](float& x, int64_t at) { x = initial[at]; });
  } else if (sums_only) {
    // The initial state is kept, since its buffer may take the final one.
    if (part.segment == 0) each([&](float&, int64_t at) { slots[at] = initial != nullptr ? initial[at] : 0.0f; });
  } else {
    each([&](float& x, int64_t at) { x = slots[at]; });
    for (int s = 1; s <= part.segment; ++s) {
      const float kept = expf(decays[s]);
      each([&](float& x, int64_t at) { x = times_decay(x, kept) + slots[s * size + at]; });
    }
  }
}

template <class Each>
__device__ __forceinline__ void end_segment(const CausalLinearDecayArgs& args, const Part& part, float* slots, int segments,
                                            bool sums_only, Each&& each) {
  const DecayInputs& in = args.in;
  const int64_t row = state_row(args, part.request), size = in.key_width * in.value_width;
  if (sums_only) {
    slots += ((part.request * in.kv_heads + part.kv_head) * segments + part.segment + 1) * size;
    each([&](float& x, int64_t at) { slots[at] = x; });
  } else if (args.final_state != nullptr && row >= 0 && part.segment == segments - 1 &&
             part.head % (in.heads / in.kv_heads) == 0) {
    float* const to = args.final_state + (row * in.kv_heads + part.kv_head) * size;
    each([&](float& x, int64_t at) { to[at] = x; });
  }
}

__device__ __forceinline__ float load_log_decay(const DecayInputs& in, const Part& part, int64_t token, bool there) {
  if (!there || in.log_decay == nullptr) return 0.0f;
  return in.decay_per_token ? __ldg(in.log_decay + part.batch * in.decay_strides.batch +
                                    part.kv_head * in.decay_strides.head + token * in.decay_strides.token)
                            : __ldg(in.log_decay + part.kv_head);
}

// The decays of a tile, a token a lane.
struct TileDecay {
  float up, down;  // factors of a token's outputs (with `scale`) and of its value
  float total;     // factor of the state after the tile
  float log_total;
  bool scaled;     // otherwise the state takes every token's decay
};
__device__ __forceinline__ TileDecay tile_decay(float log_decay, float scale, int lane) {
  float sum = log_decay;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float before = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += before;
  }
  TileDecay x;
  x.log_total = __shfl_sync(kFullWarp, sum, 31);
  x.scaled = x.log_total >= kLeastTileDecay;
  x.up = x.scaled ? scale * expf(sum) : scale;
  x.down = x.scaled ? expf(-sum) : 1.0f;
  x.total = x.scaled ? expf(x.log_total) : 1.0f;
  return x;
}

// The warps that bring tiles to shared memory and write outputs.
template <class Shape, class T, bool kVectors>
__device__ __forceinline__ void stage_tiles(const CausalLinearDecayArgs& args, const RowsPlan& plan, const Part& part,
                                            bool sums_only, float* shared, int thread, int threads) {
  constexpr int kTile = Shape::kTile, kVec = 16 / sizeof(T), kHalves = kVec / 4;
  constexpr int kLanes = Shape::kRanks / kVec, kStep = kStagers / kLanes, kCount = kTile / kStep;  // of queries and keys
  constexpr int kValueLanes = Shape::kColumns / kVec, kValueStep = kStagers / kValueLanes;
  constexpr int kValueCount = kTile > kValueStep ? kTile / kValueStep : 1;
  constexpr int kOutLanes = Shape::kColumns / 4, kOutStep = kStagers / kOutLanes;
  constexpr int kOutCount = kTile > kOutStep ? kTile / kOutStep : 1;
  static_assert(kCount * kStep == kTile && kCount > 0);
  const DecayInputs& in = args.in;
  const int R = static_cast<int>(in.key_width), lane = thread % 32;
  const int left = static_cast<int>(in.value_width) - part.column;  // columns
  const int key_token = thread / kLanes, key_at = thread % kLanes * kVec;
  const int value_token = thread / kValueLanes, value_at = thread % kValueLanes * kVec;
  const int out_token = thread / kOutLanes, out_at = thread % kOutLanes * 4;
  const T* const query = static_cast<const T*>(in.query) + part.batch * in.query_strides.batch + part.head * in.query_strides.head;
  const T* const key = static_cast<const T*>(in.key) + part.batch * in.key_strides.batch + part.kv_head * in.key_strides.head;
  const T* const value = static_cast<const T*>(in.value) + part.batch * in.value_strides.batch +
                         part.kv_head * in.value_strides.head + part.column;
  T* const out =
      static_cast<T*>(args.output) + part.batch * in.output_strides.batch + part.head * in.output_strides.head + part.column;
  float* const output = shared + 2 * Shape::kStaged;
  float* const decay = output + 2 * Shape::kPartials;
  const int tiles = static_cast<int>((part.end - part.begin + kTile - 1) / kTile);

  // Vectors are on their way in registers while the tile before is computed; single elements are loaded when they are stored.
  constexpr int kUnroll = kVectors ? 32 : 1;
  Piece<T> k[kVectors ? kCount : 1], q[kVectors ? kCount : 1], v[kVectors ? kValueCount : 1];
  float log_decay = 0.0f, log_total = 0.0f;
  float up[3] = {};  // of the last tile put, the one before it, and before that
  const auto tokens_of = [&](int tile) {
    const int64_t left = part.end - part.begin - static_cast<int64_t>(tile) * kTile;
    return static_cast<int>(left < kTile ? left : kTile);
  };
  const auto key_piece = [&](const T* rows, int64_t stride, int tile, int i) {
    const int token = key_token + i * kStep;
    return load_piece<kVectors>(rows + (part.begin + static_cast<int64_t>(tile) * kTile + token) * stride, key_at,
                                token < tokens_of(tile) ? R : 0);
  };
  const auto value_piece = [&](int tile, int i) {
    const int token = value_token + i * kValueStep;
    return load_piece<kVectors>(value + (part.begin + static_cast<int64_t>(tile) * kTile + token) * in.value_strides.token,
                                value_at, token < tokens_of(tile) ? left : 0);
  };
  const auto fetch = [&](int tile) {
    log_decay = load_log_decay(in, part, part.begin + static_cast<int64_t>(tile) * kTile + lane, lane < tokens_of(tile));
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) k[i] = key_piece(key, in.key_strides.token, tile, i);
#pragma unroll
      for (int i = 0; i < kValueCount; ++i) v[i] = value_piece(tile, i);
      if (sums_only) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) q[i] = key_piece(query, in.query_strides.token, tile, i);
    }
  };
  const auto put = [&](int tile) {
    const TileDecay x = tile_decay(log_decay, in.scale, lane);
    up[0] = x.up;
    log_total += x.log_total;
    if (thread < kTile) {
      decay[(tile & 1) * kTile + thread] = expf(log_decay);
      if (thread == 0) decay[2 * kTile + 2 * (tile & 1)] = x.total, decay[2 * kTile + 2 * (tile & 1) + 1] = x.scaled;
    }
    float* const queries = shared + (tile & 1) * Shape::kStaged;
    // Of 16-bit numbers the first fours of eight ranks come first, then the others: no two lanes of a store meet in a bank.
    float* const to = queries + key_token * Shape::kRanks + key_at / kHalves;
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) {
      const Piece<T> piece = kVectors ? k[kVectors ? i : 0] : key_piece(key, in.key_strides.token, tile, i);
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        store_four(to + Shape::kKeys + i * kStep * Shape::kRanks + h * Shape::kRanks / 2, four_of(piece, h));
    }
    float* const values = queries + 2 * Shape::kKeys + value_at;
#pragma unroll kUnroll
    for (int i = 0; i < kValueCount; ++i) {
      const Piece<T> piece = kVectors ? v[kVectors ? i : 0] : value_piece(tile, i);
      const int token = value_token + i * kValueStep;
      const float by = __shfl_sync(kFullWarp, x.down, token & 31);
      if (kValueStep > kTile && token >= kTile) continue;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float4 y = four_of(piece, h);
        store_four(values + token * Shape::kColumns + 4 * h, make_float4(by * y.x, by * y.y, by * y.z, by * y.w));
      }
    }
    if (sums_only) return;
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) {
      const Piece<T> piece = kVectors ? q[kVectors ? i : 0] : key_piece(query, in.query_strides.token, tile, i);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) store_four(to + i * kStep * Shape::kRanks + h * Shape::kRanks / 2, four_of(piece, h));
    }
  };
  const auto write = [&](int tile) {
    if (sums_only) return;
    const int64_t first = part.begin + static_cast<int64_t>(tile) * kTile;
    const int tokens = static_cast<int>(part.end - first < kTile ? part.end - first : kTile);
    const float* const from = output + (tile & 1) * Shape::kPartials + Shape::kToken + out_at;
#pragma unroll
    for (int i = 0; i < kOutCount; ++i) {
      const int token = out_token + i * kOutStep;
      const float by = __shfl_sync(kFullWarp, up[2], token & 31);
      if (token >= tokens || out_at >= left) continue;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < Shape::kRanks / 32; ++p) {
        if (p >= plan.rank_warps) break;
        const float4 y = *reinterpret_cast<const float4*>(from + token * Shape::kToken + p * Shape::kColumns);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      x.x *= by, x.y *= by, x.z *= by, x.w *= by;
      T* const to = out + (first + token) * in.output_strides.token + out_at;
      if (plan.out_vectors) {
        store_four(to, x);
      } else {
        to[0] = static_cast<T>(x.x);
        if (out_at + 1 < left) to[1] = static_cast<T>(x.y);
        if (out_at + 2 < left) to[2] = static_cast<T>(x.z);
        if (out_at + 3 < left) to[3] = static_cast<T>(x.w);
      }
    }
  };
  if (tiles > 0) {
    fetch(0);
    put(0);
    if (tiles > 1) fetch(1);
  }
  block_barrier(threads);
  for (int tile = 0; tile < tiles; ++tile) {
    up[2] = up[1], up[1] = up[0];
    if (tile + 1 < tiles) {
      put(tile + 1);
      if (tile + 2 < tiles) fetch(tile + 2);
    }
    if (tile > 0) write(tile - 1);
    block_barrier(threads);
  }
  up[2] = up[1];
  if (tiles > 0) write(tiles - 1);
  if (sums_only && thread == 0 && part.column == 0)
    plan.decays[(part.request * in.kv_heads + part.kv_head) * plan.segments + part.segment + 1] = log_total;
}

template <class T, int kRankWarps, int kColumnWarps>
__global__ void __launch_bounds__(BlockShape<kRankWarps, kColumnWarps>::kThreads, kRankWarps <= 4 ? 2 : 1)
    DecayRowsKernel(const __grid_constant__ CausalLinearDecayArgs args, const __grid_constant__ RowsPlan plan, bool sums_only) {
  using Shape = BlockShape<kRankWarps, kColumnWarps>;
  constexpr int kTile = Shape::kTile;
  extern __shared__ __align__(16) float shared[];
  const DecayInputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const Part part =
      part_of(in, blockIdx.x, Shape::kColumns, plan.column_blocks, plan.segments, kTile, sums_only);
  const int tiles = static_cast<int>((part.end - part.begin + kTile - 1) / kTile);
  float* const output = shared + 2 * Shape::kStaged;           // [2][1 + tile][rank warps][columns]
  float* const decay = output + 2 * Shape::kPartials;          // [2][tile], then [2][total, whether scaled]
  const int warps = plan.rank_warps * plan.column_warps, threads = 32 * warps + kStagers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp >= warps) {
    const int thread = static_cast<int>(threadIdx.x) - 32 * warps;
    if (plan.vectors) stage_tiles<Shape, T, true>(args, plan, part, sums_only, shared, thread, threads);
    else stage_tiles<Shape, T, false>(args, plan, part, sums_only, shared, thread, threads);
    return;
  }

  // The lanes of the upper half have their pairs of columns in the other order, so that each gives away its last two.
  const int rank_warp = warp % plan.rank_warps, first_row = (rank_warp * 4 + lane / 8) * kRows;
  const int mine = warp / plan.rank_warps * 32 + lane % 8 * 4, flip = lane & 16 ? 2 : 0;
  float state[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) state[r][0] = state[r][1] = state[r][2] = state[r][3] = 0.0f;
  const auto each = [&](auto&& function) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (first_row + r < R && part.column + mine + (c ^ flip) < V)
          function(state[r][c], static_cast<int64_t>(first_row + r) * V + part.column + mine + (c ^ flip));
  };
  begin_segment(args, part, plan.slots, plan.decays, plan.segments, sums_only, each);

  constexpr int kQuad = sizeof(T) == 4 ? 4 : Shape::kRanks / 2;  // from the first four ranks to the others
  const float* const staged = shared + (sizeof(T) == 4 ? first_row : first_row / 2);
  const float* const staged_values = shared + 2 * Shape::kKeys + mine;
  block_barrier(threads);
  for (int tile = 0; tile < tiles; ++tile) {
    const int64_t left = part.end - part.begin - static_cast<int64_t>(tile) * kTile;
    const int tokens = static_cast<int>(left < kTile ? left : kTile);
    const float* const query = staged + (tile & 1) * Shape::kStaged;
    const float* const value = staged_values + (tile & 1) * Shape::kStaged;
    // Of the token before; after the sum over the slices a lane has one column.
    float* const to =
        output + (tile & 1) * Shape::kPartials + rank_warp * Shape::kColumns + mine + flip + (lane & 8) / 8;
    const float total = decay[2 * kTile + 2 * (tile & 1)];
    const bool scaled = decay[2 * kTile + 2 * (tile & 1) + 1] != 0.0f;
    struct Operands {
      float4 k[2], q[2];
      float2 v[2];
    };
    const auto walk = [&](auto only_sums, auto with_scale) {
      constexpr bool kSums = decltype(only_sums)::value, kScaled = decltype(with_scale)::value;
      constexpr int kAtOnce = 4;
      const auto load = [&](int t) {
        Operands x;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x.k[h] = *reinterpret_cast<const float4*>(query + Shape::kKeys + t * Shape::kRanks + h * kQuad);
          if constexpr (!kSums) x.q[h] = *reinterpret_cast<const float4*>(query + t * Shape::kRanks + h * kQuad);
          x.v[h] = *reinterpret_cast<const float2*>(value + t * Shape::kColumns + (h == 0 ? flip : flip ^ 2));
        }
        return x;
      };
      float last[4] = {};  // the thread's outputs of the token before
      const auto store_last = [&](int t) {
        if constexpr (kSums) return;
        const float keep0 = last[0] + __shfl_xor_sync(kFullWarp, last[2], 16);
        const float keep1 = last[1] + __shfl_xor_sync(kFullWarp, last[3], 16);
        const bool odd = lane & 8;
        to[t * Shape::kToken] = (odd ? keep1 : keep0) + __shfl_xor_sync(kFullWarp, odd ? keep0 : keep1, 8);
      };
      Operands now = load(0);
      for (int t = 0; t < tokens; t += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // The one after the last token of the tile is read again, and not used.
          const Operands next = load(i + 1 < kAtOnce || t + kAtOnce < kTile ? t + i + 1 : t);
          if constexpr (!kScaled) {
            const float by = decay[(tile & 1) * kTile + t + i];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
              for (int c = 0; c < 4; ++c) state[r][c] = times_decay(state[r][c], by);
          }
          float out[4] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float k[4] = {now.k[h].x, now.k[h].y, now.k[h].z, now.k[h].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float(&s)[4] = state[4 * h + j];
              s[0] += k[j] * now.v[0].x, s[1] += k[j] * now.v[0].y, s[2] += k[j] * now.v[1].x, s[3] += k[j] * now.v[1].y;
            }
            if constexpr (!kSums) {
              const float q[4] = {now.q[h].x, now.q[h].y, now.q[h].z, now.q[h].w};
#pragma unroll
              for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) out[c] += q[j] * state[4 * h + j][c];
            }
          }
          store_last(t + i);
#pragma unroll
          for (int c = 0; c < 4; ++c) last[c] = out[c];
          now = next;
        }
      }
      store_last((tokens + kAtOnce - 1) / kAtOnce * kAtOnce);
      if constexpr (kScaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) state[r][c] *= total;
      }
    };
    if (scaled && sums_only) walk(std::true_type{}, std::true_type{});
    else if (scaled) walk(std::false_type{}, std::true_type{});
    else if (sums_only) walk(std::true_type{}, std::false_type{});
    else walk(std::false_type{}, std::false_type{});
    block_barrier(threads);
  }
  end_segment(args, part, plan.slots, plan.segments, sums_only, each);
}

template <class T, int kRankWarps, int kColumnWarps>
cudaError_t launch_as(const CausalLinearDecayArgs& args, const RowsPlan& plan, cudaStream_t stream) {
  using Shape = BlockShape<kRankWarps, kColumnWarps>;
  const auto kernel = DecayRowsKernel<T, kRankWarps, kColumnWarps>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Shape::kBytes));
  if (error != cudaSuccess) return error;
  const unsigned threads = 32 * static_cast<unsigned>(plan.rank_warps * plan.column_warps) + kStagers;
  const int64_t blocks = args.in.requests * plan.column_blocks;
  if (plan.segments > 1)
    kernel<<<static_cast<unsigned>(blocks * args.in.kv_heads * (plan.segments - 1)), threads, Shape::kBytes, stream>>>(args, plan,
                                                                                                                     true);
  kernel<<<static_cast<unsigned>(blocks * args.in.heads * plan.segments), threads, Shape::kBytes, stream>>>(args, plan, false);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_typed(const CausalLinearDecayArgs& args, RowsPlan plan, cudaStream_t stream) {
  const DecayInputs& in = args.in;
  plan.vectors = (in.key_width * sizeof(T)) % 16 == 0 && (in.value_width * sizeof(T)) % 16 == 0;
  for (const void* data : {in.query, in.key, in.value}) plan.vectors &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  plan.out_vectors = in.value_width % 4 == 0 && reinterpret_cast<uintptr_t>(args.output) % (4 * sizeof(T)) == 0;
  if (in.key_width <= 32) return launch_as<T, 1, 4>(args, plan, stream);
  if (in.key_width <= 64) return launch_as<T, 2, 2>(args, plan, stream);
  if (in.key_width <= 128) return launch_as<T, 4, 1>(args, plan, stream);
  if (in.key_width <= 256) return launch_as<T, 8, 1>(args, plan, stream);
  return launch_as<T, 16, 1>(args, plan, stream);
}

// How many segments take least time, in tokens of one block alone on its multiprocessor.
int segments_of(int64_t blocks, int64_t sum_blocks, int64_t tokens, int sm_count) {
  const auto time = [&](int64_t count) {
    const double deep = double((count + sm_count - 1) / sm_count);
    return deep > 1.0 ? 0.85 * deep : deep;
  };
  int best = 1;
  double least = time(blocks) * double(tokens);
  for (int64_t s = 2; s <= kMaxSegments && s <= tokens / kMinSegmentTokens; ++s) {
    const double total = (time(blocks * s) + 0.6 * time(sum_blocks * (s - 1))) * double(tokens) / double(s) + 60.0 + 3.0 * double(s);
    if (total < least) least = total, best = static_cast<int>(s);
  }
  return best;
}

RowsPlan plan_of(const CausalLinearDecayArgs& args, int sm_count) {
  const DecayInputs& in = args.in;
  const int columns = in.key_width <= 32 ? 128 : in.key_width <= 64 ? 64 : 32;
  RowsPlan plan = {};
  plan.rank_warps = static_cast<int>((in.key_width + 31) / 32);
  plan.column_blocks = static_cast<int>((in.value_width + columns - 1) / columns);
  plan.column_warps = static_cast<int>(((in.value_width < columns ? in.value_width : columns) + 31) / 32);
  const int64_t tokens = in.batch * in.tokens / (in.requests > 0 ? in.requests : 1);
  plan.segments = segments_of(in.requests * in.heads * plan.column_blocks,
                              in.requests * in.kv_heads * plan.column_blocks, tokens, sm_count);
  return plan;
}

}  // namespace

bool decay_rows_fit(const CausalLinearDecayArgs& args) {
  const DecayInputs& in = args.in;
  return !args.normalize && in.key_width <= kRecurrenceMaxKeyWidth && in.requests * in.heads > 0 &&
         !(args.carries_state && in.heads > in.kv_heads);
}

int launch_decay_rows(const CausalLinearDecayArgs& args, const CudaTarget& target, Workspace& ws) {
  const DecayInputs& in = args.in;
  RowsPlan plan = plan_of(args, target.sm_count);
  const int64_t slots = plan.segments > 1 ? in.requests * in.kv_heads * plan.segments : 0;
  plan.slots = ws.scratch<float>(slots * in.key_width * in.value_width);
  plan.decays = ws.scratch<float>(slots);
  if (ws.counting()) return cudaSuccess;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  switch (static_cast<DType>(in.dtype)) {
    case DType::kFloat32: return launch_typed<float>(args, plan, stream);
    case DType::kFloat16: return launch_typed<__half>(args, plan, stream);
    default: return launch_typed<__nv_bfloat16>(args, plan, stream);
  }
}

}  // namespace leanfleet
