// CausalLinearDecay token by token on CUDA cores, in float32: `causal_dot_product` (also decode steps) and `fleet`.
//
// A CTA has a request and some columns of a state, and walks over the request's tokens in tiles. A
// tile's queries and keys wait in shared memory as float32. Where the decays of a tile multiply to no less than e^-20, its
// queries are multiplied by the decay from the tile's start and its keys divided by it, so that the state itself need not
// be multiplied token by token: S_t / Γ_t = S_0 + Σ (k_j / Γ_j)ᵀ v_j.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "causal_linear_decay/causal_linear_decay.h"
#include "causal_linear_decay/device.cuh"
#include "causal_linear_decay/rows.h"
#include "core/mma.cuh"
#include "core/op.h"
#include "core/shared_memory.cuh"
#include "core/with_type.cuh"

namespace leanfleet::causal_linear_decay {

namespace {

using namespace tile;

constexpr int kMaxTile = 16;               // tokens
constexpr float kLeastTileDecay = -20.0f;  // natural logarithm
constexpr int kSharedBudget = 96 * 1024;   // bytes; two CTAs an SM
constexpr int kMaxRowWarps = 4;
constexpr int kFleetRows = 16;  // ranks of a warp of fleet; twice as many where R is above 256

// How a kernel is laid out; all sizes in elements. CTAs are counted column blocks first, then heads, then requests.
struct Layout {
  int tile;                     // tokens
  int row_shift, column_shift;  // rows: a power of two that R fits into, the rest is 0; columns of a CTA
  int blocks_of_columns;
  int row_lanes;       // causal_dot_product: lanes of a warp that share a column
  int partials;        // fleet: warps, whose outputs are added up in their order
  bool raw;            // rows are copied as they are, 16 bytes at once, ahead of their turn
  bool whole_vectors;  // outputs are written four columns at once
  bool whole_states;   // states begin at 16 bytes
  __host__ __device__ int rows() const { return 1 << row_shift; }
  __host__ __device__ int columns() const { return 1 << column_shift; }
};

__host__ __device__ inline int raw_elements(const Layout& layout, int group) {
  return layout.tile * ((group + 1) * layout.rows() + layout.columns());
}
__host__ __device__ inline int float_elements(const Layout& layout, int group) {
  return raw_elements(layout, group) + group * layout.tile * (layout.columns() + 1) * layout.partials + 3 * kMaxTile + 4;
}

// Four numbers as one access.
__device__ __forceinline__ void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
template <class T>
__device__ __forceinline__ void store_four(T* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(T{}, x.x, x.y), pack_pair(T{}, x.z, x.w));
}

template <class T>
struct Tile {
  const Args& args;
  const Layout& layout;
  int group, request, head, column;             // head: the state; first column
  int64_t begin, end;                           // tokens
  const T *query_rows, *key_rows, *value_rows;  // of token 0
  T* output_rows;
  float *query, *key, *value;                                        // [group][tile][rows], [tile][rows], [tile][columns]
  float *query_factor, *key_factor, *decay, *total, *output, *sums;  // output [group][partials][tile][columns]
  char* raw;

  __device__ __forceinline__ Tile(const Args& args, const Layout& layout, char* shared)
      : args(args), layout(layout),
        group(static_cast<int>(static_cast<uint32_t>(args.in.heads) / static_cast<uint32_t>(args.in.v_heads))) {
    const Inputs& in = args.in;
    const uint32_t v_heads = static_cast<uint32_t>(in.v_heads);
    const uint32_t head_block = blockIdx.x / static_cast<uint32_t>(layout.blocks_of_columns);
    column = static_cast<int>(blockIdx.x - head_block * static_cast<uint32_t>(layout.blocks_of_columns)) << layout.column_shift;
    request = static_cast<int>(head_block / v_heads);
    head = static_cast<int>(head_block - request * v_heads);
    const RequestTokens tokens = request_tokens(in, request);
    begin = tokens.begin, end = tokens.end;
    const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
    query_rows = static_cast<const T*>(in.query) + batch * in.query_strides.batch +
                 in.query_head(static_cast<uint32_t>(head * group)) * in.query_strides.head;
    key_rows = static_cast<const T*>(in.key) + batch * in.key_strides.batch +
               in.key_head(static_cast<uint32_t>(head)) * in.key_strides.head;
    value_rows = static_cast<const T*>(in.value) + batch * in.value_strides.batch + head * in.value_strides.head + column;
    output_rows =
        static_cast<T*>(args.output) + batch * in.output_strides.batch + head * group * in.output_strides.head + column;
    float* floats = reinterpret_cast<float*>(shared);
    query = floats, floats += group * layout.tile << layout.row_shift;
    key = floats, floats += layout.tile << layout.row_shift;
    value = floats, floats += layout.tile << layout.column_shift;
    output = floats, floats += group * layout.partials * layout.tile << layout.column_shift;
    query_factor = floats, key_factor = floats + kMaxTile, decay = floats + 2 * kMaxTile, total = floats + 3 * kMaxTile;
    sums = floats + 3 * kMaxTile + 4;
    raw = shared + (float_elements(layout, group) * 4 + 15) / 16 * 16;
  }

  // Row of the state, or -1.
  __device__ __forceinline__ int64_t state_row() const {
    const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
    return row < 0 || row >= args.state_rows ? -1 : row;
  }
  __device__ __forceinline__ int value_width() const {
    const int left = static_cast<int>(args.in.value_width) - column;
    return left < layout.columns() ? left : layout.columns();
  }

  // Calls body(rows of token 0, their stride, width, shift of the padded width, kind) for the group's queries (kind 0), the
  // key (1) and the value (2).
  template <class F>
  __device__ __forceinline__ void for_each_row(F&& body) const {
    const Inputs& in = args.in;
    const int width = static_cast<int>(in.key_width);
    for (int g = 0; g < group; ++g)
      body(query_rows + g * in.query_strides.head, in.query_strides.token, width, layout.row_shift, 0);
    body(key_rows, in.key_strides.token, width, layout.row_shift, 1);
    body(value_rows, in.value_strides.token, value_width(), layout.column_shift, 2);
  }

  // Starts copying the rows of a tile.
  __device__ __forceinline__ void fetch(int64_t first, int buffer) const {
    if (!layout.raw || first >= end) return;
    const int tokens = static_cast<int>(end - first < layout.tile ? end - first : layout.tile);
    constexpr int kShift = sizeof(T) == 4 ? 2 : 3;  // of the elements in 16 bytes
    uint32_t to = shared_address(raw) + static_cast<uint32_t>(buffer * raw_elements(layout, group) * sizeof(T));
    for_each_row([&](const T* rows, int64_t stride, int width, int shift, int) {
      const T* const from = rows + first * stride;
      for (int i = threadIdx.x; i < tokens << (shift - kShift); i += blockDim.x) {
        const int t = i >> (shift - kShift), at = (i << kShift) & ((1 << shift) - 1);
        if (at < width) cp_async(to + static_cast<uint32_t>(i << kShift) * sizeof(T), from + t * stride + at, 16);
      }
      to += static_cast<uint32_t>((layout.tile << shift) * sizeof(T));
    });
    cp_async_commit();
  }

  // The tile at `first` as float32 with the decay's factors; returns its tokens. All threads of the CTA call it.
  __device__ __forceinline__ int unpack(int64_t first, int buffer) const {
    const Inputs& in = args.in;
    const int tokens = static_cast<int>(end - first < layout.tile ? end - first : layout.tile);
    if (threadIdx.x < 32) {
      const int t = threadIdx.x;
      float log_decay = 0.0f;
      if (t < tokens && in.log_decay != nullptr) {
        const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
        log_decay = in.decay_per_token ? in.log_decay[batch * in.decay_strides.batch + head * in.decay_strides.head +
                                                      (first + t) * in.decay_strides.token]
                                       : in.log_decay[head];
      }
      float sum = log_decay;
#pragma unroll
      for (int offset = 1; offset < kMaxTile; offset *= 2) {
        const float before = __shfl_up_sync(kFullWarp, sum, offset);
        if (t >= offset) sum += before;
      }
      const float last = __shfl_sync(kFullWarp, sum, tokens - 1);
      const bool scaled = last >= kLeastTileDecay;
      if (t < tokens) {
        query_factor[t] = in.scale * (scaled ? expf(sum) : 1.0f);
        const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
        key_factor[t] = (scaled ? expf(-sum) : 1.0f) * beta_of(in, batch, head, first + t);
        decay[t] = scaled ? 1.0f : expf(log_decay);
      }
      if (t == 0) total[0] = scaled ? expf(last) : 1.0f, total[1] = scaled;
    }
    if (layout.raw) cp_async_wait();
    __syncthreads();
    const T* copied = reinterpret_cast<const T*>(raw) + buffer * raw_elements(layout, group);
    float* to = query;
    for_each_row([&](const T* rows, int64_t stride, int width, int shift, int kind) {
      const float* const factors = kind == 0 ? query_factor : key_factor;
      if (layout.raw) {
        for (int i = 4 * threadIdx.x; i < tokens << shift; i += 4 * blockDim.x) {
          const int at = i & ((1 << shift) - 1);
          float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (at < width) {
            const float factor = kind == 2 ? 1.0f : factors[i >> shift];
            const T* const from = copied + i;
            x = make_float4(factor * static_cast<float>(from[0]), factor * static_cast<float>(from[1]),
                            factor * static_cast<float>(from[2]), factor * static_cast<float>(from[3]));
          }
          *reinterpret_cast<float4*>(to + i) = x;
        }
        copied += layout.tile << shift;
      } else {
        const T* const from = rows + first * stride;
        for (int i = threadIdx.x; i < tokens << shift; i += blockDim.x) {
          const int t = i >> shift, at = i & ((1 << shift) - 1);
          to[i] = at < width ? (kind == 2 ? 1.0f : factors[t]) * static_cast<float>(from[t * stride + at]) : 0.0f;
        }
      }
      to += layout.tile << shift;
    });
    __syncthreads();
    return tokens;
  }

  // Writes the tile's outputs: partial ones added up, divided by their sums with normalize.
  __device__ __forceinline__ void write(int64_t first, int tokens) const {
    const Inputs& in = args.in;
    const int width = value_width(), slice = layout.tile << layout.column_shift;
    for (int g = 0; g < group; ++g) {
      T* const rows = output_rows + g * in.output_strides.head + first * in.output_strides.token;
      const float* const from = output + g * layout.partials * slice;
      const float* const divisors = sums + g * layout.partials * layout.tile;
      for (int i = 4 * threadIdx.x; i < tokens << layout.column_shift; i += 4 * blockDim.x) {
        const int t = i >> layout.column_shift, c = i & (layout.columns() - 1);
        if (c >= width) continue;
        float4 x = *reinterpret_cast<const float4*>(from + i);
        float divisor = args.normalize ? divisors[t] : 0.0f;
        for (int p = 1; p < layout.partials; ++p) {
          const float4 y = *reinterpret_cast<const float4*>(from + p * slice + i);
          x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
          if (args.normalize) divisor += divisors[p * layout.tile + t];
        }
        if (args.normalize) {
          divisor = fabsf(divisor) < args.eps ? (divisor < 0.0f ? -args.eps : args.eps) : divisor;
          x.x /= divisor, x.y /= divisor, x.z /= divisor, x.w /= divisor;
        }
        T* const to = rows + t * in.output_strides.token + c;
        if (layout.whole_vectors) {
          store_four(to, x);
        } else {
          to[0] = static_cast<T>(x.x);
          if (c + 1 < width) to[1] = static_cast<T>(x.y);
          if (c + 2 < width) to[2] = static_cast<T>(x.z);
          if (c + 3 < width) to[3] = static_cast<T>(x.w);
        }
      }
    }
  }

  // Whether this CTA is the last of its head to get here: the others have read the initial norm.
  __device__ __forceinline__ bool arrives_last(uint32_t* tickets, int* last) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t before;
      const uint32_t all = static_cast<uint32_t>(layout.blocks_of_columns);
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(tickets + request * args.in.v_heads + head), "r"(all - 1)
                   : "memory");
      *last = before == all - 1;
    }
    __syncthreads();
    return *last != 0;
  }
};

// What follows is of a thread of CausalDotProductKernel: it has 4 columns of kRows rows of a state in registers, and with
// normalize, where kNorms is kRows and not 1, the norm of these rows.

// A token into the state. scaled: its tile's decays are in keys and queries.
template <int kRows, int kNorms>
__device__ __forceinline__ void take_token(float (&state)[kRows][4], float (&norm)[kNorms], bool scaled, float decay,
                                           const float4 (&key)[kRows / 4], float4 value) {
#pragma unroll
  for (int quad = 0; quad < kRows / 4; ++quad) {
    const float k[4] = {key[quad].x, key[quad].y, key[quad].z, key[quad].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float (&row)[4] = state[4 * quad + j];
      if (!scaled) {
#pragma unroll
        for (int c = 0; c < 4; ++c) row[c] = times_decay(row[c], decay);
        if (kNorms > 1) norm[4 * quad + j] = times_decay(norm[4 * quad + j], decay);
      }
      row[0] += k[j] * value.x, row[1] += k[j] * value.y, row[2] += k[j] * value.z, row[3] += k[j] * value.w;
      if (kNorms > 1) norm[4 * quad + j] += k[j];
    }
  }
}
// The thread's part of a query's outputs and of their divisor.
template <int kRows, int kNorms>
__device__ __forceinline__ void query_product(const float (&state)[kRows][4], const float (&norm)[kNorms],
                                              const float4 (&query)[kRows / 4], float (&out)[4], float& sum) {
  out[0] = out[1] = out[2] = out[3] = sum = 0.0f;
#pragma unroll
  for (int quad = 0; quad < kRows / 4; ++quad) {
    const float q[4] = {query[quad].x, query[quad].y, query[quad].z, query[quad].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c] += q[j] * state[4 * quad + j][c];
      if (kNorms > 1) sum += q[j] * norm[4 * quad + j];
    }
  }
}

// The row recurrence (LD section 3.1.2): a thread has 4 columns of 4 * kQuads rows of the state in registers.
template <class T, int kQuads, bool kNormalize>
__global__ void __launch_bounds__(32 * kMaxRowWarps, kQuads == 2 ? 4 : 2)
    CausalDotProductKernel(const __grid_constant__ Args args, const __grid_constant__ Layout layout, uint32_t* tickets) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int last;
  const Tile<T> tile(args, layout, shared);
  const int R = static_cast<int>(args.in.key_width), V = static_cast<int>(args.in.value_width);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = layout.row_lanes;
  const int row_lane = lane % lanes, mine = (warp * (32 / lanes) + lane / lanes) * 4;  // first column, of the CTA's
  const int64_t column = tile.column + mine, row = tile.state_row();
  const bool vectors = V % 4 == 0 && layout.whole_states;

  const auto row_at = [&](int quad) { return (quad * lanes + row_lane) * 4; };

  float state[4 * kQuads][4], norm[kNormalize ? 4 * kQuads : 1];
  const int64_t entry = row * args.in.v_heads + tile.head;
  const float* from = args.initial_state != nullptr && row >= 0 ? args.initial_state + entry * R * V + column : nullptr;
#pragma unroll
  for (int r = 0; r < 4 * kQuads; ++r) {
    const int at = row_at(r / 4) + r % 4;
    const bool there = from != nullptr && at < R;
    if (vectors) {
      const float4 x = there && column < V ? *reinterpret_cast<const float4*>(from + static_cast<int64_t>(at) * V)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      state[r][0] = x.x, state[r][1] = x.y, state[r][2] = x.z, state[r][3] = x.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) state[r][c] = there && column + c < V ? from[static_cast<int64_t>(at) * V + c] : 0.0f;
    }
    if (kNormalize) norm[r] = args.initial_norm != nullptr && row >= 0 && at < R ? args.initial_norm[entry * R + at] : 0.0f;
  }

  // Outputs of the newest pair of tokens, still to be added up over the lanes that share a column.
  float out[2][4], sum[2];
  float *to_output = nullptr, *to_sum = nullptr;
  bool waiting = false, pair = false;
  const auto finish = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool store = i == 0 || pair;
      float* const to = to_output + (i << layout.column_shift);
      if (lanes >= 4) {
        // Two lanes share the four columns, then four, so that each adds one.
        const bool upper = row_lane & 1, odd = row_lane & 2;
        const float give0 = upper ? out[i][0] : out[i][2], give1 = upper ? out[i][1] : out[i][3];
        float keep0 = upper ? out[i][2] : out[i][0], keep1 = upper ? out[i][3] : out[i][1];
        keep0 += __shfl_xor_sync(kFullWarp, give0, 1), keep1 += __shfl_xor_sync(kFullWarp, give1, 1);
        const float give = odd ? keep0 : keep1;
        float keep = odd ? keep1 : keep0;
        keep += __shfl_xor_sync(kFullWarp, give, 2);
        for (int offset = 4; offset < lanes; offset *= 2) keep += __shfl_xor_sync(kFullWarp, keep, offset);
        if (store && row_lane < 4) to[2 * upper + odd] = keep;
      } else {
        for (int offset = 1; offset < lanes; offset *= 2)
#pragma unroll
          for (int c = 0; c < 4; ++c) out[i][c] += __shfl_xor_sync(kFullWarp, out[i][c], offset);
        if (store && row_lane == 0) *reinterpret_cast<float4*>(to) = make_float4(out[i][0], out[i][1], out[i][2], out[i][3]);
      }
      if (kNormalize) {
        for (int offset = 1; offset < lanes; offset *= 2) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], offset);
        if (store && threadIdx.x == 0) to_sum[i] = sum[i];
      }
    }
  };
  const int step = tile.group == 1 ? 2 : 1;  // tokens at once: the heads of a group read the state of each token in turn

  int buffer = 0;
  tile.fetch(tile.begin, 0);
  for (int64_t first = tile.begin; first < tile.end; first += layout.tile, buffer ^= 1) {
    const int tokens = tile.unpack(first, buffer);
    tile.fetch(first + layout.tile, buffer ^ 1);
    const bool scaled = tile.total[1] != 0.0f;
    for (int t = 0; t < tokens; t += step) {
      const bool second = step == 2 && t + 1 < tokens;
      float4 value[2], k[2][kQuads], q[2][kQuads];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = t + (i == 1 && second);
        value[i] = *reinterpret_cast<const float4*>(tile.value + (at << layout.column_shift) + mine);
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          k[i][quad] = *reinterpret_cast<const float4*>(tile.key + (at << layout.row_shift) + row_at(quad));
      }
      for (int g = 0; g < tile.group; ++g) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad)
            q[i][quad] = *reinterpret_cast<const float4*>(
                tile.query + ((g * layout.tile + t + (i == 1 && second)) << layout.row_shift) + row_at(quad));
        if (waiting) finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && !second) break;
          if (g == 0) take_token(state, norm, scaled, tile.decay[t + i], k[i], value[i]);
          query_product(state, norm, q[i], out[i], sum[i]);
        }
        waiting = true, pair = second;
        to_output = tile.output + ((g * layout.tile + t) << layout.column_shift) + mine;
        to_sum = tile.sums + g * layout.tile + t;
      }
    }
    if (waiting) finish();
    waiting = false;
    const float total = tile.total[0];
#pragma unroll
    for (int r = 0; r < 4 * kQuads; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) state[r][c] *= total;
      if (kNormalize) norm[r] *= total;
    }
    __syncthreads();
    tile.write(first, tokens);
    // The next unpack's first barrier keeps the outputs from being overwritten while they are written.
  }

  if (args.final_state == nullptr || row < 0) return;
  float* to = args.final_state + entry * R * V + column;
#pragma unroll
  for (int r = 0; r < 4 * kQuads; ++r) {
    const int at = row_at(r / 4) + r % 4;
    if (at >= R) continue;
    if (vectors) {
      if (column < V)
        *reinterpret_cast<float4*>(to + static_cast<int64_t>(at) * V) =
            make_float4(state[r][0], state[r][1], state[r][2], state[r][3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (column + c < V) to[static_cast<int64_t>(at) * V + c] = state[r][c];
    }
  }
  if (kNormalize && tile.arrives_last(tickets, &last) && warp == 0 && lane < lanes) {
#pragma unroll
    for (int r = 0; r < 4 * kQuads; ++r)
      if (row_at(r / 4) + r % 4 < R) args.final_norm[entry * R + row_at(r / 4) + r % 4] = norm[r];
  }
}

// FleetAttention (FA algorithm 1): the sum over the rank of row-wise products b_r ⊙ λ-cumsum(c_r ⊙ v). A warp has
// kRows of the ranks for 32 columns, a lane's prefixes l_r stay in registers; the warps' sums are added in order.
template <class T, int kRows, bool kNormalize>
__global__ void __launch_bounds__(512)
    FleetKernel(const __grid_constant__ Args args, const __grid_constant__ Layout layout, uint32_t* tickets) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int last;
  const Tile<T> tile(args, layout, shared);
  const int R = static_cast<int>(args.in.key_width), V = static_cast<int>(args.in.value_width);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_row = warp * kRows;
  const int64_t column = tile.column + lane, row = tile.state_row(), entry = row * args.in.v_heads + tile.head;
  const bool initial = args.initial_state != nullptr && row >= 0;

  float prefix[kRows], norm = 0.0f;  // norm: the prefix m of rank first_row + lane, for values of 1
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    prefix[r] =
        initial && first_row + r < R && column < V ? args.initial_state[(entry * R + first_row + r) * V + column] : 0.0f;
  const bool has_norm = kNormalize && lane < kRows && first_row + lane < R;
  if (has_norm && args.initial_norm != nullptr && row >= 0) norm = args.initial_norm[entry * R + first_row + lane];

  int buffer = 0;
  tile.fetch(tile.begin, 0);
  for (int64_t first = tile.begin; first < tile.end; first += layout.tile, buffer ^= 1) {
    const int tokens = tile.unpack(first, buffer);
    tile.fetch(first + layout.tile, buffer ^ 1);
    const bool scaled = tile.total[1] != 0.0f;
    for (int t = 0; t < tokens; ++t) {
      const float value = tile.value[(t << 5) + lane];
      if (!scaled) {
        const float decay = tile.decay[t];
#pragma unroll
        for (int r = 0; r < kRows; ++r) prefix[r] = times_decay(prefix[r], decay);
        norm = times_decay(norm, decay);
      }
      const float* keys = tile.key + (t << layout.row_shift) + first_row;
#pragma unroll
      for (int quad = 0; quad < kRows / 4; ++quad) {
        const float4 c = *reinterpret_cast<const float4*>(keys + 4 * quad);
        prefix[4 * quad] += c.x * value, prefix[4 * quad + 1] += c.y * value;
        prefix[4 * quad + 2] += c.z * value, prefix[4 * quad + 3] += c.w * value;
      }
      if (has_norm) norm += keys[lane];
      for (int g = 0; g < tile.group; ++g) {
        const float* queries = tile.query + ((g * layout.tile + t) << layout.row_shift) + first_row;
        float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int quad = 0; quad < kRows / 4; ++quad) {
          const float4 b = *reinterpret_cast<const float4*>(queries + 4 * quad);
          out[0] += b.x * prefix[4 * quad], out[1] += b.y * prefix[4 * quad + 1];
          out[2] += b.z * prefix[4 * quad + 2], out[3] += b.w * prefix[4 * quad + 3];
        }
        tile.output[((g * layout.partials + warp) * layout.tile + t) * 32 + lane] = out[0] + out[1] + (out[2] + out[3]);
        if (kNormalize) {
          float sum = has_norm ? queries[lane] * norm : 0.0f;
#pragma unroll
          for (int offset = kRows / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
          if (lane == 0) tile.sums[(g * layout.partials + warp) * layout.tile + t] = sum;
        }
      }
    }
    const float total = tile.total[0];
#pragma unroll
    for (int r = 0; r < kRows; ++r) prefix[r] *= total;
    norm *= total;
    __syncthreads();
    tile.write(first, tokens);
  }

  if (args.final_state == nullptr || row < 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first_row + r < R && column < V) args.final_state[(entry * R + first_row + r) * V + column] = prefix[r];
  if (kNormalize && tile.arrives_last(tickets, &last) && has_norm) args.final_norm[entry * R + first_row + lane] = norm;
}

template <class Kernel>
cudaError_t launch(Kernel kernel, const Args& args, const Layout& layout, int threads, size_t shared, const CudaTarget& target,
                   uint32_t* tickets) {
  const int64_t ctas = args.in.requests * args.in.v_heads * layout.blocks_of_columns;
  cudaError_t error = allow_shared_memory(kernel, 16);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(ctas), threads, shared, static_cast<cudaStream_t>(target.stream)>>>(args, layout, tickets);
  return cudaGetLastError();
}

template <class T>
bool rows_of_16_bytes(const Args& args) {
  const Inputs& in = args.in;
  bool whole = (in.key_width * sizeof(T)) % 16 == 0 && (in.value_width * sizeof(T)) % 16 == 0;
  for (const void* data : {in.query, in.key, in.value}) whole &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return whole;
}

template <class T>
cudaError_t launch_for(const Args& args, const CudaTarget& target, uint32_t* tickets, bool fleet) {
  const Inputs& in = args.in;
  const int group = static_cast<int>(in.heads / in.v_heads), R = static_cast<int>(in.key_width);
  const int V = static_cast<int>(in.value_width), quads = R > 256 ? 4 : 2;
  Layout layout = {};
  int threads;
  const int warp_rows = R > 256 ? 2 * kFleetRows : kFleetRows;
  const auto shift_of = [](int width) {
    int shift = 2;
    while (1 << shift < width) ++shift;
    return shift;
  };
  layout.partials = 1;
  if (fleet) {
    layout.partials = ceil_div(R, warp_rows);
    layout.row_shift = shift_of(layout.partials * warp_rows);
    layout.column_shift = 5;
    threads = 32 * layout.partials;
  } else {
    layout.row_lanes = 1;
    while (layout.row_lanes * 4 * quads < R) layout.row_lanes *= 2;
    layout.row_shift = shift_of(layout.row_lanes * 4 * quads);
    const int warp_columns = 32 / layout.row_lanes * 4;
    int warps = 1;
    while (warps < kMaxRowWarps && warps * warp_columns < V) warps *= 2;
    layout.column_shift = shift_of(warps * warp_columns);
    threads = 32 * warps;
  }
  layout.blocks_of_columns = (V + layout.columns() - 1) >> layout.column_shift;
  layout.raw = rows_of_16_bytes<T>(args);
  layout.whole_vectors = V % 4 == 0 && reinterpret_cast<uintptr_t>(args.output) % 16 == 0;
  layout.whole_states = true;
  for (const float* state : {args.initial_state, static_cast<const float*>(args.final_state)})
    layout.whole_states &= reinterpret_cast<uintptr_t>(state) % 16 == 0;
  const auto shared_of = [&] {
    return static_cast<size_t>((float_elements(layout, group) * 4 + 15) / 16 * 16) +
           (layout.raw ? 2 * static_cast<size_t>(raw_elements(layout, group)) * sizeof(T) : 0);
  };
  layout.tile = static_cast<int>(in.tokens < kMaxTile ? in.tokens : kMaxTile);
  while (layout.tile > 1 && shared_of() > kSharedBudget) layout.tile /= 2;
  if (shared_of() > 2 * kSharedBudget) layout.raw = false;
  const size_t shared = shared_of();
  if (fleet && warp_rows == kFleetRows)
    return args.normalize ? launch(FleetKernel<T, kFleetRows, true>, args, layout, threads, shared, target, tickets)
                          : launch(FleetKernel<T, kFleetRows, false>, args, layout, threads, shared, target, tickets);
  if (fleet)
    return args.normalize ? launch(FleetKernel<T, 2 * kFleetRows, true>, args, layout, threads, shared, target, tickets)
                          : launch(FleetKernel<T, 2 * kFleetRows, false>, args, layout, threads, shared, target, tickets);
  if (quads == 2)
    return args.normalize ? launch(CausalDotProductKernel<T, 2, true>, args, layout, threads, shared, target, tickets)
                          : launch(CausalDotProductKernel<T, 2, false>, args, layout, threads, shared, target, tickets);
  return args.normalize ? launch(CausalDotProductKernel<T, 4, true>, args, layout, threads, shared, target, tickets)
                        : launch(CausalDotProductKernel<T, 4, false>, args, layout, threads, shared, target, tickets);
}

}  // namespace

int keep_other_states(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const auto keep = [&](const void* from, void* to, int64_t row_bytes) -> cudaError_t {
    if (to == nullptr || to == from) return cudaSuccess;
    const auto bytes = static_cast<size_t>(args.state_rows * args.in.v_heads * row_bytes);
    return from != nullptr ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)
                           : cudaMemsetAsync(to, 0, bytes, stream);
  };
  const int64_t state = args.in.key_width * args.in.value_width, norm_bytes = args.in.key_width * int64_t{sizeof(float)};
  const cudaError_t error = args.narrow_states ? keep(args.narrow_initial_state, args.narrow_final_state, 2 * state)
                                               : keep(args.initial_state, args.final_state, state * int64_t{sizeof(float)});
  return error == cudaSuccess ? keep(args.initial_norm, args.final_norm, norm_bytes) : error;
}

int launch_recurrence(const Args& args, bool fleet, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  uint32_t* const tickets = ws.sync<uint32_t>(args.normalize ? in.requests * in.v_heads : 0);
  const bool few = decode_fits(args), many = !few && rows_fit(args);
  if (ws.counting()) return many ? launch_rows(args, target, ws) : cudaSuccess;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  cudaError_t error = cudaSuccess;
  if (args.state_index != nullptr) error = static_cast<cudaError_t>(keep_other_states(args, target));
  if (error == cudaSuccess && in.cu_seqlens != nullptr)  // tokens of no request
    error = cudaMemsetAsync(
        args.output, 0,
        static_cast<size_t>(in.batch * in.heads * in.tokens * in.value_width * element_size(static_cast<DType>(in.dtype))),
        stream);
  if (error != cudaSuccess) return error;
  if (few) return launch_decode(args, target);
  if (many) return launch_rows(args, target, ws);
  return with_type(in.dtype, [&](auto type) { return launch_for<decltype(type)>(args, target, tickets, fleet); });
}

}  // namespace leanfleet::causal_linear_decay
