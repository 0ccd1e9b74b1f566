// CausalLinearDecay over many tokens on CUDA cores, in float32: what `causal_dot_product` and `fleet` both run for calls
// that are not normalised. A token's work is that of the row recurrence (LD section 3.1.2), U += c_iᵀ v_i and o_i = b_i U,
// with U in registers; it is divided up as FleetAttention (FA algorithm 1) divides its own: blocks of value columns, walked
// in tiles of tokens, a warp with a slice of the rank, whose rows of U are the prefixes l_r of the λ-cumsums, and partial
// outputs that are added up over the slices in a fixed order.
//
// R above 16: a thread has four columns of kRows ranks; eight lanes are a slice of the rank, added up by shuffles and then
// over the warps through shared memory. While some warps compute a tile of tokens, kStagingWarps others bring the next one
// to shared memory as float32, have the loads of the one after it on their way, and write the outputs of the one before.
// R up to 16: a warp has all ranks of its columns, and no partial outputs.
//
// Decays: outputs are multiplied by the decay from the start of a window and values divided by it, which leaves one product
// a window to the state. The window is the tile, or kWindow tokens, or one: the longest whose decays multiply to no less
// than e^-30.
//
// Where there are too few heads to fill the device, tokens are cut into segments: a first pass computes what each but the
// last adds to the state, and every CTA of the second adds up what came before it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "causal_linear_decay/causal_linear_decay.h"
#include "causal_linear_decay/choose.h"
#include "causal_linear_decay/device.cuh"
#include "core/mma.cuh"
#include "core/op.h"

namespace leanfleet::causal_linear_decay::rows {

using namespace tile;

constexpr int kRows = 8;  // ranks of a thread, and 4 columns; of a warp 32 ranks, 32 columns
constexpr int kStagingWarps = 4;
constexpr int kStagers = 32 * kStagingWarps;
constexpr int kWindow = 8;             // tokens
constexpr float kLeastDecay = -30.0f;  // of a window, natural logarithm

struct RowsPlan {
  int segments;
  int column_blocks;
  bool vectors;      // rows of query, key and value begin and end at 16 bytes
  bool out_vectors;  // outputs are written four columns at once
  bool pairs;        // values and outputs can be taken two columns at once
  float* slots;      // [requests,Hv,segments][R,Dv]: the state before the first token, then what each segment but the last adds
  float* decays;     // [requests,Hv,segments]: with it, ln of that segment's decay
  int64_t query_step, key_step, value_step, out_step;  // bytes from one row to the next that a staging thread has
};

// The warps that compute, and how a CTA's shared memory is cut. All sizes in floats.
template <int kRankWarps, int kColumnWarps>
struct CtaShape {
  static constexpr int kRanks = 32 * kRankWarps, kColumns = 32 * kColumnWarps;
  static constexpr int kTile = kRankWarps <= 4 ? 32 : kRankWarps == 8 ? 16 : 4;  // tokens
  static constexpr int kKeys = kTile * kRanks;                                   // after the queries, then the values
  static constexpr int kStaged = 2 * kKeys + kTile * kColumns;
  static constexpr int kToken = kRankWarps * kColumns;    // partial outputs of a token
  static constexpr int kPartials = (kTile + 1) * kToken;  // the first token's are not used
  // Of the staging threads' rows: lanes that have one, tokens from one to a thread's next, how many a thread has in a tile.
  template <class T>
  struct Rows {
    static constexpr int kVec = 16 / sizeof(T);
    static constexpr int kLanes = kRanks / kVec, kStep = kStagers / kLanes, kCount = kTile / kStep;
    static constexpr int kValueLanes = kColumns / kVec, kValueSpan = kStagers / kValueLanes;
    static constexpr int kValueStep = kValueSpan < kTile ? kValueSpan : kTile, kValueCount = kTile / kValueStep;
    static_assert(kCount * kStep == kTile && kCount > 0 && kValueCount * kValueStep == kTile);
  };
  static constexpr int kOutLanes = kColumns / 4, kOutSpan = kStagers / kOutLanes;
  static constexpr int kOutStep = kOutSpan < kTile ? kOutSpan : kTile, kOutCount = kTile / kOutStep;
  static constexpr int kComputing = 32 * kRankWarps * kColumnWarps, kThreads = kComputing + kStagers;
  static constexpr int kDecays = 32 + 4 + 4;  // of every token, of every window, of the tile, then the window's length
  static constexpr size_t kBytes = sizeof(float) * 2 * (kStaged + kPartials + kDecays);
};

// The staging warps and the others meet here, each in code of their own.
__device__ __forceinline__ void cta_barrier(int threads) { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); }

// 16 bytes, or zeros. A predicate, not a branch: many of these are on their way at once.
__device__ __forceinline__ uint4 load_or_zero(const void* from, bool load) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
__device__ __forceinline__ uint2 load_or_zero(const uint2* from, bool load) {
  uint2 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.b32 {%0,%1}, [%2];\n}"
      : "=&r"(x.x), "=&r"(x.y)
      : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
__device__ __forceinline__ uint32_t load_or_zero(const uint32_t* from, bool load) {
  uint32_t x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
               : "=&r"(x)
               : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
__device__ __forceinline__ float load_or_zero(const float* from, bool load) {
  float x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
               : "=&f"(x)
               : "l"(from), "r"(static_cast<int>(load)));
  return x;
}
template <class T>
__device__ __forceinline__ T load_or_zero(const T* from, bool load) {
  uint16_t x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.b16 %0, [%1];\n}"
               : "=&h"(x)
               : "l"(from), "r"(static_cast<int>(load)));
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

// The state after a decay; what is forgotten completely is 0, also where it was not finite.
template <int kRanks, int kColumns>
__device__ __forceinline__ void forget(float (&state)[kRanks][kColumns], float decay) {
  if (decay == 0.0f) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state[r][c] = 0.0f;
    return;
  }
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state[r][c] *= decay;
}

// A CTA's place in the call.
struct Part {
  int column, head, state_head, segment;
  int64_t request, batch, begin, end;  // tokens
};

__device__ __forceinline__ Part part_of(const Inputs& in, int64_t unit, int columns, int column_blocks, int segments, int tile,
                                        bool sums_only) {
  Part part;
  const int heads = static_cast<int>(sums_only ? in.v_heads : in.heads), group = static_cast<int>(in.heads / in.v_heads);
  part.column = static_cast<int>(unit % column_blocks) * columns;
  unit /= column_blocks;
  const int passes = sums_only ? segments - 1 : segments;
  part.segment = static_cast<int>(unit % passes);
  unit /= passes;
  part.head = static_cast<int>(unit % heads);
  part.request = unit / heads;
  part.state_head = sums_only ? part.head : part.head / group;
  part.batch = in.cu_seqlens != nullptr ? 0 : part.request;
  const RequestTokens tokens = request_tokens(in, part.request);
  const int64_t end = tokens.end < tokens.begin ? tokens.begin : tokens.end;
  const int64_t length = round_up(ceil_div(end - tokens.begin, segments), tile);
  part.begin = tokens.begin + part.segment * length < end ? tokens.begin + part.segment * length : end;
  part.end = part.begin + length < end ? part.begin + length : end;
  return part;
}

// Row of the state pool, or -1.
__device__ __forceinline__ int64_t state_row(const Args& args, int64_t request) {
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  return row < 0 || row >= args.state_rows ? -1 : row;
}

// What the state is before a segment, from the sums of those before it; what the first pass puts there. each(f) calls
// f(element of the state, its place) for a thread's elements.
template <class Each>
__device__ __forceinline__ void begin_segment(const Args& args, const Part& part, float* slots, const float* decays,
                                              int segments, bool sums_only, Each&& each) {
  const Inputs& in = args.in;
  const int64_t row = state_row(args, part.request), size = in.key_width * in.value_width;
  const float* const initial =
      args.initial_state != nullptr && row >= 0 ? args.initial_state + (row * in.v_heads + part.state_head) * size : nullptr;
  const int64_t slot = (part.request * in.v_heads + part.state_head) * segments;
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
__device__ __forceinline__ void end_segment(const Args& args, const Part& part, float* slots, int segments, bool sums_only,
                                            Each&& each) {
  const Inputs& in = args.in;
  const int64_t row = state_row(args, part.request), size = in.key_width * in.value_width;
  if (sums_only) {
    slots += ((part.request * in.v_heads + part.state_head) * segments + part.segment + 1) * size;
    each([&](float& x, int64_t at) { slots[at] = x; });
  } else if (args.final_state != nullptr && row >= 0 && part.segment == segments - 1 &&
             part.head % (in.heads / in.v_heads) == 0) {
    float* const to = args.final_state + (row * in.v_heads + part.state_head) * size;
    each([&](float& x, int64_t at) { to[at] = x; });
  }
}

__device__ __forceinline__ float load_log_decay(const Inputs& in, const Part& part, int64_t token, bool there) {
  if (!there || in.log_decay == nullptr) return 0.0f;
  return in.decay_per_token ? __ldg(in.log_decay + part.batch * in.decay_strides.batch +
                                    part.state_head * in.decay_strides.head + token * in.decay_strides.token)
                            : __ldg(in.log_decay + part.state_head);
}

// The decays of a tile of up to 32 tokens, a token a lane; those beyond the last have a logarithm of 0.
struct TileDecay {
  float up, down;  // factors of a token's outputs (with `scale`) and of its value (with beta)
  float log_total;
  float window;  // factor of the state after the lane's kWindow tokens
  int length;    // of windows: 32, kWindow or 1
};
__device__ __forceinline__ TileDecay tile_decay(float log_decay, float beta, float scale, int lane) {
  float sum = log_decay;
#pragma unroll
  for (int offset = 1; offset < kWindow; offset *= 2) {
    const float before = __shfl_up_sync(kFullWarp, sum, offset, kWindow);
    if (lane % kWindow >= offset) sum += before;
  }
  float of[32 / kWindow], before = 0.0f, least = 0.0f;
  TileDecay x;
  x.log_total = 0.0f;
#pragma unroll
  for (int w = 0; w < 32 / kWindow; ++w) {
    of[w] = __shfl_sync(kFullWarp, sum, w * kWindow + kWindow - 1);
    if (w < lane / kWindow) before += of[w];
    least = fminf(least, of[w]);
    x.log_total += of[w];
  }
  x.window = expf(__shfl_sync(kFullWarp, sum, lane | (kWindow - 1)));
  x.length = x.log_total >= kLeastDecay ? 32 : least >= kLeastDecay ? kWindow : 1;
  if (x.length == 32) sum += before;
  x.up = x.length > 1 ? scale * expf(sum) : scale;
  x.down = x.length > 1 ? beta * expf(-sum) : beta;
  return x;
}

// The warps that bring tiles to shared memory and write outputs.
template <class Shape, class T, bool kVectors>
__device__ __forceinline__ void stage_tiles(const Args& args, const RowsPlan& plan, const Part& part, bool sums_only,
                                            float* shared, int thread) {
  using Rows = typename Shape::template Rows<T>;
  constexpr int kTile = Shape::kTile, kVec = Rows::kVec, kHalves = kVec / 4;
  constexpr int kCount = Rows::kCount, kStep = Rows::kStep, kValueCount = Rows::kValueCount;
  const Inputs& in = args.in;
  const int lane = thread % 32;
  const int columns = static_cast<int>(in.value_width) - part.column, R = static_cast<int>(in.key_width);
  const int key_token = thread / Rows::kLanes, key_at = thread % Rows::kLanes * kVec;
  const int value_token = thread / Rows::kValueLanes, value_at = thread % Rows::kValueLanes * kVec;
  const int out_token = thread / Shape::kOutLanes, out_at = thread % Shape::kOutLanes * 4;
  // The pointers run ahead from row to row, and so from tile to tile.
  const auto row_of = [&](const void* data, const Strides& strides, int head, int token, int at) {
    return static_cast<const char*>(data) +
           (part.batch * strides.batch + head * strides.head + (part.begin + token) * strides.token + at) * sizeof(T);
  };
  const char* query = row_of(in.query, in.query_strides, in.query_head(part.head), key_token, key_at);
  const char* key = row_of(in.key, in.key_strides, in.key_head(part.state_head), key_token, key_at);
  const char* value = row_of(in.value, in.value_strides, part.state_head, value_token, part.column + value_at);
  char* out = const_cast<char*>(row_of(args.output, in.output_strides, part.head, out_token, part.column + out_at));
  float* const output = shared + 2 * Shape::kStaged;
  float* const decays = output + 2 * Shape::kPartials;
  const int length = static_cast<int>(part.end - part.begin), tiles = ceil_div(length, kTile);

  // Vectors are on their way in registers while the tile before is computed; single elements are loaded when they are stored.
  constexpr int kUnroll = kVectors ? 32 : 1;
  Piece<T> k[kVectors ? kCount : 1], q[kVectors ? kCount : 1], v[kVectors ? kValueCount : 1];
  float log_decay = 0.0f, beta = 1.0f, log_total = 0.0f;
  float up[3] = {};  // of the last tile put, the one before it, and before that
  const auto piece = [](const char*& row, int64_t step, int width, bool there) {
    const Piece<T> x = load_piece<kVectors>(reinterpret_cast<const T*>(row), 0, there ? width : 0);
    row += step;
    return x;
  };
  const auto fetch = [&](int tile) {
    const int left = length - tile * kTile;
    const bool there = lane < left && lane < kTile;
    log_decay = load_log_decay(in, part, part.begin + tile * kTile + lane, there);
    beta = there ? beta_of(in, part.batch, part.state_head, part.begin + tile * kTile + lane) : 1.0f;
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) k[i] = piece(key, plan.key_step, R - key_at, key_token + i * kStep < left);
#pragma unroll
      for (int i = 0; i < kValueCount; ++i)
        v[i] = piece(value, plan.value_step, columns - value_at, value_token + i * Rows::kValueStep < left);
      if (sums_only) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) q[i] = piece(query, plan.query_step, R - key_at, key_token + i * kStep < left);
    }
  };
  const auto put = [&](int tile) {
    const int left = length - tile * kTile;
    const TileDecay x = tile_decay(log_decay, beta, in.scale, lane);
    up[0] = x.up;
    log_total += x.log_total;
    if (thread < 32) {
      float* const of = decays + (tile & 1) * Shape::kDecays;
      of[lane] = expf(log_decay);
      if (lane % kWindow == 0) of[32 + lane / kWindow] = x.window;
      if (lane == 0) of[36] = expf(x.log_total), of[37] = static_cast<float>(x.length);
    }
    float* const queries = shared + (tile & 1) * Shape::kStaged;
    // Of 16-bit numbers the first fours of eight ranks come first, then the others: no two lanes of a store meet in a bank.
    float* const to = queries + key_token * Shape::kRanks + key_at / kHalves;
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) {
      const Piece<T> y = kVectors ? k[kVectors ? i : 0] : piece(key, plan.key_step, R - key_at, key_token + i * kStep < left);
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        store_four(to + Shape::kKeys + i * kStep * Shape::kRanks + h * Shape::kRanks / 2, four_of(y, h));
    }
    float* const values = queries + 2 * Shape::kKeys + value_at;
#pragma unroll kUnroll
    for (int i = 0; i < kValueCount; ++i) {
      const int token = value_token + i * Rows::kValueStep;
      const Piece<T> y = kVectors ? v[kVectors ? i : 0] : piece(value, plan.value_step, columns - value_at, token < left);
      const float by = __shfl_sync(kFullWarp, x.down, token & 31);
      if (Rows::kValueSpan > kTile && token >= kTile) continue;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float4 z = four_of(y, h);
        store_four(values + token * Shape::kColumns + 4 * h, make_float4(by * z.x, by * z.y, by * z.z, by * z.w));
      }
    }
    if (sums_only) return;
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) {
      const Piece<T> y =
          kVectors ? q[kVectors ? i : 0] : piece(query, plan.query_step, R - key_at, key_token + i * kStep < left);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) store_four(to + i * kStep * Shape::kRanks + h * Shape::kRanks / 2, four_of(y, h));
    }
  };
  const auto write = [&](int tile) {
    if (sums_only) return;
    const int left = length - tile * kTile, tokens = left < kTile ? left : kTile;
    const float* const from = output + (tile & 1) * Shape::kPartials + Shape::kToken + out_token * Shape::kToken + out_at;
    float4 x[Shape::kOutCount];
#pragma unroll
    for (int i = 0; i < Shape::kOutCount; ++i) {
      x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (Shape::kOutSpan > kTile && out_token >= kTile) continue;
#pragma unroll
      for (int p = 0; p < Shape::kRanks / 32; ++p) {
        const float4 y = *reinterpret_cast<const float4*>(from + i * Shape::kOutStep * Shape::kToken + p * Shape::kColumns);
        x[i].x += y.x, x[i].y += y.y, x[i].z += y.z, x[i].w += y.w;
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kOutCount; ++i) {
      const int token = out_token + i * Shape::kOutStep;
      const float by = __shfl_sync(kFullWarp, up[2], token & 31);
      const bool there = token < tokens;
      x[i].x *= by, x[i].y *= by, x[i].z *= by, x[i].w *= by;
      T* const to = reinterpret_cast<T*>(out);
      out += plan.out_step;
      if (kVectors || plan.out_vectors) {
        if (there && out_at < columns) store_four(to, x[i]);
      } else if (there) {
        if (out_at < columns) to[0] = static_cast<T>(x[i].x);
        if (out_at + 1 < columns) to[1] = static_cast<T>(x[i].y);
        if (out_at + 2 < columns) to[2] = static_cast<T>(x[i].z);
        if (out_at + 3 < columns) to[3] = static_cast<T>(x[i].w);
      }
    }
  };
  if (tiles > 0) {
    fetch(0);
    put(0);
    if (tiles > 1) fetch(1);
  }
  cta_barrier(Shape::kThreads);
  for (int tile = 0; tile < tiles; ++tile) {
    up[2] = up[1], up[1] = up[0];
    if (tile + 1 < tiles) {
      put(tile + 1);
      if (tile + 2 < tiles) fetch(tile + 2);
    }
    if (tile > 0) write(tile - 1);
    cta_barrier(Shape::kThreads);
  }
  up[2] = up[1];
  if (tiles > 0) write(tiles - 1);
  if (sums_only && thread == 0 && part.column == 0)
    plan.decays[(part.request * in.v_heads + part.state_head) * plan.segments + part.segment + 1] = log_total;
}

template <class T, int kRankWarps, int kColumnWarps>
__global__ void __launch_bounds__(CtaShape<kRankWarps, kColumnWarps>::kThreads, kRankWarps <= 4 ? 2 : 1)
    RowsKernel(const __grid_constant__ Args args, const __grid_constant__ RowsPlan plan, bool sums_only) {
  using Shape = CtaShape<kRankWarps, kColumnWarps>;
  constexpr int kTile = Shape::kTile;
  extern __shared__ __align__(16) float shared[];
  const Inputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const Part part = part_of(in, blockIdx.x, Shape::kColumns, plan.column_blocks, plan.segments, kTile, sums_only);
  const int length = static_cast<int>(part.end - part.begin), tiles = ceil_div(length, kTile);
  float* const output = shared + 2 * Shape::kStaged;          // [2][1 + tile][rank warps][columns]
  const float* const decays = output + 2 * Shape::kPartials;  // [2][kDecays]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x >= Shape::kComputing) {
    const int thread = static_cast<int>(threadIdx.x) - Shape::kComputing;
    if (plan.vectors) stage_tiles<Shape, T, true>(args, plan, part, sums_only, shared, thread);
    else stage_tiles<Shape, T, false>(args, plan, part, sums_only, shared, thread);
    return;
  }

  // The lanes of the upper half have their pairs of columns in the other order, so that each gives away its last two.
  const int rank_warp = warp % kRankWarps, first_row = (rank_warp * 4 + lane / 8) * kRows;
  const int mine = warp / kRankWarps * 32 + lane % 8 * 4, flip = lane & 16 ? 2 : 0;
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

  const float* const staged = shared + (sizeof(T) == 4 ? first_row : first_row / 2);
  const float* const staged_values = shared + 2 * Shape::kKeys + mine;
  cta_barrier(Shape::kThreads);
  for (int tile = 0; tile < tiles; ++tile) {
    const int left = length - tile * kTile, tokens = left < kTile ? left : kTile;
    const float* const query = staged + (tile & 1) * Shape::kStaged;
    const float* const value = staged_values + (tile & 1) * Shape::kStaged;
    const float* const decay = decays + (tile & 1) * Shape::kDecays;
    // Of the token before; after the sum over the slices a lane has one column.
    float* const to = output + (tile & 1) * Shape::kPartials + rank_warp * Shape::kColumns + mine + flip + (lane & 8) / 8;
    struct Operands {
      float4 k[2], q[2];
      float2 v[2];
    };
    const auto walk = [&](auto only_sums, auto window) {
      constexpr bool kSums = decltype(only_sums)::value;
      constexpr int kLength = decltype(window)::value, kAtOnce = kTile < kWindow ? kTile : kWindow;
      constexpr int kQuad = sizeof(T) == 4 ? 4 : Shape::kRanks / 2;  // from the first four ranks to the others
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
          if constexpr (kLength == 1) forget(state, decay[t + i]);
          float out[4] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float k[4] = {now.k[h].x, now.k[h].y, now.k[h].z, now.k[h].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float (&s)[4] = state[4 * h + j];
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
        if constexpr (kLength == kWindow) forget(state, decay[32 + t / kWindow]);
      }
      store_last(round_up(tokens, kAtOnce));
      if constexpr (kLength == 32) forget(state, decay[36]);
    };
    const float length = decay[37];
    const auto walk_by = [&](auto only_sums) {
      if (length == 32.0f) walk(only_sums, std::integral_constant<int, 32>{});
      else if (length > 1.0f) walk(only_sums, std::integral_constant<int, kWindow>{});
      else walk(only_sums, std::integral_constant<int, 1>{});
    };
    if (sums_only) walk_by(std::true_type{});
    else walk_by(std::false_type{});
    cta_barrier(Shape::kThreads);
  }
  end_segment(args, part, plan.slots, plan.segments, sums_only, each);
}

// R up to kRecurrenceNarrowWidth: a warp has all ranks of 64 columns, a lane two of these. Only keys and queries go through
// shared memory, from a token a lane to all ranks of one token.
constexpr int kNarrowTile = 32, kNarrowWarps = 4;

template <class T>
union Pair {
  typename std::conditional<sizeof(T) == 4, uint2, uint32_t>::type bits;
  T element[2];
};

// kVectors: rows of query and key begin and end at 16 bytes; kPairs: values and outputs can be taken two columns at once.
template <class T, int kRanks, bool kVectors, bool kPairs>
__global__ void __launch_bounds__(32 * kNarrowWarps, 3)
    NarrowKernel(const __grid_constant__ Args args, const __grid_constant__ RowsPlan plan, int64_t units, bool sums_only) {
  constexpr int kVec = 16 / sizeof(T), kPieces = kRanks > kVec ? kRanks / kVec : 1;
  constexpr int kBatch = sizeof(T) == 4 && kRanks > 8 ? 8 : 16;  // tokens whose values are on their way
  constexpr int kPitch = 2 * kRanks + 4;                         // keys, queries; no two lanes of a store meet in a bank
  __shared__ __align__(16) float rows[kNarrowWarps][kNarrowTile][kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kNarrowWarps + warp;
  if (unit >= units) return;
  const Inputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const Part part = part_of(in, unit, kRecurrenceNarrowColumns, plan.column_blocks, plan.segments, kNarrowTile, sums_only);
  const int column = part.column + 2 * lane, left = V - column;

  float state[kRanks][2];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) state[r][0] = state[r][1] = 0.0f;
  const auto each = [&](auto&& function) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (r < R && c < left) function(state[r][c], static_cast<int64_t>(r) * V + column + c);
  };
  begin_segment(args, part, plan.slots, plan.decays, plan.segments, sums_only, each);

  // Rows of the lane's token of the next tile, values of the next tokens; both from the pointers on, which run ahead.
  const int64_t key_stride = in.key_strides.token, query_stride = in.query_strides.token, stride = in.value_strides.token;
  const T* key = static_cast<const T*>(in.key) + part.batch * in.key_strides.batch +
                 in.key_head(part.state_head) * in.key_strides.head + (part.begin + lane) * key_stride;
  const T* query = static_cast<const T*>(in.query) + part.batch * in.query_strides.batch +
                   in.query_head(part.head) * in.query_strides.head + (part.begin + lane) * query_stride;
  const T* value = static_cast<const T*>(in.value) + part.batch * in.value_strides.batch +
                   part.state_head * in.value_strides.head + part.begin * stride + column;
  T* out = static_cast<T*>(args.output) + part.batch * in.output_strides.batch + part.head * in.output_strides.head +
           part.begin * in.output_strides.token + column;
  int rows_left = static_cast<int>(part.end - part.begin) - lane, values_left = static_cast<int>(part.end - part.begin);
  Piece<T> k[kPieces], q[kPieces];
  Pair<T> v[kBatch];
  float log_decay = 0.0f, beta = 1.0f, log_total = 0.0f;
  const auto fetch_rows = [&] {
    const int width = rows_left > 0 ? R : 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) k[i] = load_piece<kVectors>(key, i * kVec, width);
    if (!sums_only) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) q[i] = load_piece<kVectors>(query, i * kVec, width);
    }
    log_decay = load_log_decay(in, part, part.end - rows_left, rows_left > 0);
    beta = rows_left > 0 ? beta_of(in, part.batch, part.state_head, part.end - rows_left) : 1.0f;
    key += kNarrowTile * key_stride, query += kNarrowTile * query_stride, rows_left -= kNarrowTile;
  };
  const auto fetch_values = [&] {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if constexpr (kPairs) {
        v[i].bits = load_or_zero(reinterpret_cast<const decltype(v[i].bits)*>(value), values_left > i && left > 0);
      } else {
        v[i].element[0] = load_or_zero(value, values_left > i && left > 0);
        v[i].element[1] = load_or_zero(value + 1, values_left > i && left > 1);
      }
      value += stride;
    }
    values_left -= kBatch;
  };

  fetch_rows();
  fetch_values();
  for (int64_t first = part.begin; first < part.end; first += kNarrowTile) {
    const TileDecay x = tile_decay(log_decay, beta, in.scale, lane);
    const float decay = expf(log_decay);
    log_total += x.log_total;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRanks; r += 4) {
      const float4 a = four_of(k[r / kVec], r % kVec / 4), b = four_of(q[r / kVec], r % kVec / 4);
      store_four(&rows[warp][lane][r], make_float4(x.down * a.x, x.down * a.y, x.down * a.z, x.down * a.w));
      if (!sums_only) store_four(&rows[warp][lane][kRanks + r], make_float4(x.up * b.x, x.up * b.y, x.up * b.z, x.up * b.w));
    }
    __syncwarp();
    fetch_rows();
    const int tokens = static_cast<int>(part.end - first < kNarrowTile ? part.end - first : kNarrowTile);
    const auto walk = [&](auto only_sums, auto window) {
      constexpr bool kSums = decltype(only_sums)::value;
      constexpr int kLength = decltype(window)::value;
      for (int t = 0; t < tokens; t += kBatch) {
        Pair<T> now[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) now[i] = v[i];
        fetch_values();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const float value0 = static_cast<float>(now[i].element[0]), value1 = static_cast<float>(now[i].element[1]);
          const float* const row = rows[warp][t + i];
          if constexpr (kLength == 1) forget(state, __shfl_sync(kFullWarp, decay, t + i));
          float sum[2][2] = {};
#pragma unroll
          for (int r = 0; r < kRanks; r += 4) {
            const float4 k4 = *reinterpret_cast<const float4*>(row + r);
            const float by[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) state[r + j][0] += by[j] * value0, state[r + j][1] += by[j] * value1;
            if constexpr (!kSums) {
              const float4 q4 = *reinterpret_cast<const float4*>(row + kRanks + r);
              const float of[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
              for (int j = 0; j < 4; ++j) sum[j % 2][0] += of[j] * state[r + j][0], sum[j % 2][1] += of[j] * state[r + j][1];
            }
          }
          if constexpr (!kSums) {
            const bool there = t + i < tokens;
            Pair<T> y;
            y.element[0] = static_cast<T>(sum[0][0] + sum[1][0]), y.element[1] = static_cast<T>(sum[0][1] + sum[1][1]);
            if constexpr (kPairs) {
              if (there && left > 0) *reinterpret_cast<decltype(y.bits)*>(out) = y.bits;
            } else {
              if (there && left > 0) out[0] = y.element[0];
              if (there && left > 1) out[1] = y.element[1];
            }
            out += in.output_strides.token;
          }
          if constexpr (kLength == kWindow)
            if (i % kWindow == kWindow - 1) forget(state, __shfl_sync(kFullWarp, x.window, t + i));
        }
      }
      if constexpr (kLength == 32) forget(state, expf(x.log_total));
    };
    const auto walk_by = [&](auto only_sums) {
      if (x.length == 32) walk(only_sums, std::integral_constant<int, 32>{});
      else if (x.length > 1) walk(only_sums, std::integral_constant<int, kWindow>{});
      else walk(only_sums, std::integral_constant<int, 1>{});
    };
    if (sums_only) walk_by(std::true_type{});
    else walk_by(std::false_type{});
  }
  end_segment(args, part, plan.slots, plan.segments, sums_only, each);
  if (sums_only && lane == 0 && part.column == 0)
    plan.decays[(part.request * in.v_heads + part.state_head) * plan.segments + part.segment + 1] = log_total;
}

// Compiled by rows_launch.cu.in, a source file a type.
template <class T>
cudaError_t launch_typed(const Args& args, RowsPlan plan, cudaStream_t stream);

}  // namespace leanfleet::causal_linear_decay::rows
