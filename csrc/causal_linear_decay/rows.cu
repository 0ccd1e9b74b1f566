// CausalLinearDecay over many tokens on CUDA cores, in float32: `causal_dot_product` and `fleet` for calls that are not
// normalised. The state is in registers, a thread has four columns of kRows ranks: for each of these the prefix l_r of
// FleetAttention's λ-cumsum (FA algorithm 1), which is also the row recurrence's state (LD section 3.1.2). A block has a
// request, a query head and 32 columns. Half-warps own slices of the rank; their partial outputs meet in shared memory and
// are added in a fixed order.
//
// While some warps compute a tile of tokens, kStagingWarps others bring the next one to shared memory as float32 and write
// the outputs of the one before. Where the decays of a tile multiply to no less than e^-20, its queries are multiplied by
// the decay from the tile's start and its keys divided by it, which leaves one product a tile to the state.
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
#include "core/op.h"

namespace leanfleet {

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kColumns = 32;       // of a block
constexpr int kStagingWarps = 4;
constexpr int kMaxTile = 32;       // tokens
constexpr float kLeastTileDecay = -20.0f;  // natural logarithm
constexpr size_t kSharedBudget = 200 * 1024;
constexpr int64_t kMinSegmentTokens = 256;
constexpr int kMaxSegments = 16;

struct RowsPlan {
  int warps;     // that compute; each has 4 * kRows ranks
  int rows;      // ranks of all warps; those beyond R are 0
  int tile;      // tokens, a multiple of 4
  int segments;
  int column_blocks;
  float* slots;  // [requests,Hkv,segments][R,Dv]: the state before the first token, then what each segment but the last adds
  float* decays; // [requests,Hkv,segments]: with it, ln of that segment's decay
};

// Floats of one of the two buffers.
__host__ __device__ inline int staged_floats(const RowsPlan& plan) { return plan.tile * (2 * plan.rows + kColumns); }
__host__ __device__ inline int partial_floats(const RowsPlan& plan) { return plan.tile * plan.warps * kColumns; }
inline size_t shared_bytes(const RowsPlan& plan) {
  return sizeof(float) * 2 * static_cast<size_t>(staged_floats(plan) + partial_floats(plan) + kMaxTile + 4);
}

// The staging warps and the others meet here, each in code of their own.
__device__ __forceinline__ void block_barrier(int threads) {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

template <class T>
union RowPart {
  uint4 bits;
  T element[16 / sizeof(T)];
};

// Elements of some rows from column c on. Without branches, so that all loads are on their way at once: what lies outside is
// read from inside, and left out by put_rows.
template <bool kVectors, class T, int kCount>
__device__ __forceinline__ void fetch_rows(const T* from, int64_t stride, int t, int tokens, int c, int width,
                                           RowPart<T> (&x)[kCount]) {
  constexpr int kVec = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int token = t + i * kStagingWarps < tokens ? t + i * kStagingWarps : tokens - 1;
    const T* const row = from + token * stride;
    if (kVectors) {
      x[i].bits = __ldg(reinterpret_cast<const uint4*>(row + (c < width ? c : 0)));
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[i].element[j] = __ldg(row + (c + j < width ? c + j : width - 1));
    }
  }
}

template <class T, int kCount>
__device__ __forceinline__ void put_rows(const RowPart<T> (&x)[kCount], float factor, int t, int tokens, int tile, int c,
                                         int width, int padded, float* to) {
  constexpr int kVec = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int token = t + i * kStagingWarps;
    const float by = __shfl_sync(kAll, factor, token & 31);
    if (token >= tile) continue;
#pragma unroll
    for (int j = 0; j < kVec; j += 4) {
      if (c + j >= padded) continue;
      float y[4];
#pragma unroll
      for (int l = 0; l < 4; ++l)
        y[l] = token < tokens && c + j + l < width ? by * static_cast<float>(x[i].element[j + l]) : 0.0f;
      *reinterpret_cast<float4*>(to + token * padded + c + j) = make_float4(y[0], y[1], y[2], y[3]);
    }
  }
}

template <class T, int kRows, int kMaxWarps>
__global__ void __launch_bounds__((kMaxWarps + kStagingWarps) * 32, kRows == 4 ? 2 : 1)
    DecayRowsKernel(const __grid_constant__ CausalLinearDecayArgs args, const __grid_constant__ RowsPlan plan, bool sums_only,
                    bool vectors) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kVec = 16 / sizeof(T);
  const DecayInputs& in = args.in;
  const int R = static_cast<int>(in.key_width), V = static_cast<int>(in.value_width);
  const int heads = static_cast<int>(sums_only ? in.kv_heads : in.heads), group = static_cast<int>(in.heads / in.kv_heads);
  int64_t block = blockIdx.x;
  const int column = static_cast<int>(block % plan.column_blocks) * kColumns;
  block /= plan.column_blocks;
  const int passes = sums_only ? plan.segments - 1 : plan.segments;
  const int segment = static_cast<int>(block % passes);
  block /= passes;
  const int64_t head = block % heads, request = block / heads, kv_head = sums_only ? head : head / group;
  const int64_t batch = in.cu_seqlens != nullptr ? 0 : request;
  const RequestTokens tokens = request_tokens(in, request);
  int64_t begin = tokens.begin, end = tokens.end < begin ? begin : tokens.end;
  const int64_t per_segment = ((end - begin + plan.segments - 1) / plan.segments + plan.tile - 1) / plan.tile * plan.tile;
  const int64_t stop = end;
  begin = begin + segment * per_segment < stop ? begin + segment * per_segment : stop;
  end = begin + per_segment < stop ? begin + per_segment : stop;
  const int tiles = static_cast<int>((end - begin + plan.tile - 1) / plan.tile);
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = row >= 0 && row < args.state_rows;

  const int staged = staged_floats(plan), partials = partial_floats(plan);
  float* const output = shared + 2 * staged;                // [2][tile][warps][kColumns]
  float* const decay = output + 2 * partials;               // [2][kMaxTile], then [2][total, whether scaled]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = 32 * (plan.warps + kStagingWarps);
  const int64_t state_size = static_cast<int64_t>(R) * V;

  if (warp >= plan.warps) {
    const int stager = warp - plan.warps;
    const T* const query = static_cast<const T*>(in.query) + batch * in.query_strides.batch + head * in.query_strides.head;
    const T* const key = static_cast<const T*>(in.key) + batch * in.key_strides.batch + kv_head * in.key_strides.head;
    const T* const value =
        static_cast<const T*>(in.value) + batch * in.value_strides.batch + kv_head * in.value_strides.head + column;
    T* const out = static_cast<T*>(args.output) + batch * in.output_strides.batch + head * in.output_strides.head + column;
    float log_total = 0.0f;
    const auto write = [&](int tile) {
      if (sums_only || column + lane >= V) return;
      const int64_t first = begin + static_cast<int64_t>(tile) * plan.tile;
      const float* const from = output + (tile & 1) * partials + lane;
      for (int t = stager; t < plan.tile && first + t < end; t += kStagingWarps) {
        float x = 0.0f;
#pragma unroll 8
        for (int p = 0; p < plan.warps; ++p) x += from[(t * plan.warps + p) * kColumns];
        out[(first + t) * in.output_strides.token + lane] = static_cast<T>(x);
      }
    };
    const auto stage = [&](auto with_vectors, int tile) {
      constexpr bool kVectors = decltype(with_vectors)::value;
      constexpr int kCount = kMaxWarps <= 4 ? 4 : 2;  // rows of each kind that a lane has in flight
      const int64_t first = begin + static_cast<int64_t>(tile) * plan.tile;
      const int tokens = static_cast<int>(end - first < plan.tile ? end - first : plan.tile);
      float* const to = shared + (tile & 1) * staged;
      float log_decay = 0.0f;
      if (lane < tokens && in.log_decay != nullptr)
        log_decay = in.decay_per_token ? __ldg(in.log_decay + batch * in.decay_strides.batch + kv_head * in.decay_strides.head +
                                               (first + lane) * in.decay_strides.token)
                                       : __ldg(in.log_decay + kv_head);
      const T* const keys = key + first * in.key_strides.token;
      const T* const queries = query + first * in.query_strides.token;
      const T* const values = value + first * in.value_strides.token;
      const int left = V - column < kColumns ? V - column : kColumns;
      float up = 0.0f, down = 0.0f;
      for (int t = stager; t < plan.tile; t += kCount * kStagingWarps) {
        RowPart<T> v[kCount];
        fetch_rows<kVectors>(values, in.value_strides.token, t, tokens, lane * kVec, left, v);
        for (int c = lane * kVec; c - lane * kVec < plan.rows; c += 32 * kVec) {
          RowPart<T> k[kCount], q[kCount];
          fetch_rows<kVectors>(keys, in.key_strides.token, t, tokens, c, R, k);
          if (!sums_only) fetch_rows<kVectors>(queries, in.query_strides.token, t, tokens, c, R, q);
          if (t == stager && c == lane * kVec) {
            if (tile > 1) write(tile - 2);
            float sum = log_decay;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
              const float before = __shfl_up_sync(kAll, sum, offset);
              if (lane >= offset) sum += before;
            }
            const float last = __shfl_sync(kAll, sum, 31);
            const bool scaled = last >= kLeastTileDecay;
            log_total += last;
            up = scaled ? in.scale * expf(sum) : in.scale, down = scaled ? expf(-sum) : 1.0f;
            if (stager == 0) {
              decay[(tile & 1) * kMaxTile + lane] = expf(log_decay);
              if (lane == 0) {
                decay[2 * kMaxTile + 2 * (tile & 1)] = scaled ? expf(last) : 1.0f;
                decay[2 * kMaxTile + 2 * (tile & 1) + 1] = scaled;
              }
            }
          }
          put_rows(k, down, t, tokens, plan.tile, c, R, plan.rows, to + plan.tile * plan.rows);
          if (!sums_only) put_rows(q, up, t, tokens, plan.tile, c, R, plan.rows, to);
        }
        put_rows(v, 1.0f, t, tokens, plan.tile, lane * kVec, left, kColumns, to + 2 * plan.tile * plan.rows);
      }
    };
    const auto stage_all = [&](auto with_vectors) {
      if (tiles > 0) stage(with_vectors, 0);
      block_barrier(threads);
      for (int tile = 0; tile < tiles; ++tile) {
        if (tile + 1 < tiles) stage(with_vectors, tile + 1);
        else if (tile > 0) write(tile - 1);
        block_barrier(threads);
      }
    };
    if (vectors) stage_all(std::true_type{});
    else stage_all(std::false_type{});
    if (tiles > 0) write(tiles - 1);
    if (sums_only && stager == 0 && lane == 0 && column == 0)
      plan.decays[(request * in.kv_heads + kv_head) * plan.segments + segment + 1] = log_total;
    return;
  }

  const int slice = lane / 8, mine = lane % 8 * 4, first_row = (warp * 4 + slice) * kRows;
  float state[kRows][4];
  const float* const initial =
      args.initial_state != nullptr && there ? args.initial_state + (row * in.kv_heads + kv_head) * state_size : nullptr;
  const auto each = [&](auto&& function) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (first_row + r < R && column + mine + c < V)
          function(state[r][c], static_cast<int64_t>(first_row + r) * V + column + mine + c);
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) state[r][0] = state[r][1] = state[r][2] = state[r][3] = 0.0f;
  const int64_t slot = (request * in.kv_heads + kv_head) * plan.segments;
  float* const slots = plan.slots + slot * state_size;
  if (plan.segments == 1) {
    if (initial != nullptr) each([&](float& x, int64_t at) { x = initial[at]; });
  } else if (sums_only) {
    // The initial state is kept, since its buffer may take the final one.
    if (segment == 0) each([&](float&, int64_t at) { slots[at] = initial != nullptr ? initial[at] : 0.0f; });
  } else {
    each([&](float& x, int64_t at) { x = slots[at]; });
    for (int s = 1; s <= segment; ++s) {
      const float kept = expf(plan.decays[slot + s]);
      each([&](float& x, int64_t at) { x = times_decay(x, kept) + slots[s * state_size + at]; });
    }
  }
  block_barrier(threads);
  for (int tile = 0; tile < tiles; ++tile) {
    const float* const query = shared + (tile & 1) * staged + first_row;
    const float* const key = query + plan.tile * plan.rows;
    const float* const value = shared + (tile & 1) * staged + 2 * plan.tile * plan.rows + mine;
    // After the sum over the slices a lane has one column.
    float* const to = output + (tile & 1) * partials + warp * kColumns + mine + (lane & 16) / 8 + (lane & 8) / 8;
    const float total = decay[2 * kMaxTile + 2 * (tile & 1)];
    const bool scaled = decay[2 * kMaxTile + 2 * (tile & 1) + 1] != 0.0f;
    // Returns the warp's share of output column mine + 2 * (lane / 16) + lane / 8 % 2.
    const auto token = [&](auto only_sums, int t) {
      constexpr bool kSums = decltype(only_sums)::value;
      const float4 v = *reinterpret_cast<const float4*>(value + t * kColumns);
      float out[4] = {};
#pragma unroll
      for (int quad = 0; quad < kRows / 4; ++quad) {
        const float4 k4 = *reinterpret_cast<const float4*>(key + t * plan.rows + 4 * quad);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
        float q[4] = {};
        if constexpr (!kSums) {
          const float4 q4 = *reinterpret_cast<const float4*>(query + t * plan.rows + 4 * quad);
          q[0] = q4.x, q[1] = q4.y, q[2] = q4.z, q[3] = q4.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float(&s)[4] = state[4 * quad + j];
          s[0] += k[j] * v.x, s[1] += k[j] * v.y, s[2] += k[j] * v.z, s[3] += k[j] * v.w;
          if constexpr (!kSums) out[0] += q[j] * s[0], out[1] += q[j] * s[1], out[2] += q[j] * s[2], out[3] += q[j] * s[3];
        }
      }
      if constexpr (kSums) return 0.0f;
      const bool upper = lane & 16, odd = lane & 8;
      const float keep0 = (upper ? out[2] : out[0]) + __shfl_xor_sync(kAll, upper ? out[0] : out[2], 16);
      const float keep1 = (upper ? out[3] : out[1]) + __shfl_xor_sync(kAll, upper ? out[1] : out[3], 16);
      return (odd ? keep1 : keep0) + __shfl_xor_sync(kAll, odd ? keep0 : keep1, 8);
    };
    const auto walk = [&](auto only_sums) {
      constexpr int kAtOnce = 4;  // tokens between which nothing is stored
      if (scaled) {
        for (int t = 0; t < plan.tile; t += kAtOnce) {
          float out[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) out[i] = token(only_sums, t + i);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (!only_sums) to[(t + i) * plan.warps * kColumns] = out[i];
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) state[r][c] *= total;
        return;
      }
      for (int t = 0; t < plan.tile; ++t) {
        const float by = decay[(tile & 1) * kMaxTile + t];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) state[r][c] = times_decay(state[r][c], by);
        const float out = token(only_sums, t);
        if (!only_sums) to[t * plan.warps * kColumns] = out;
      }
    };
    if (sums_only) walk(std::true_type{});
    else walk(std::false_type{});
    block_barrier(threads);
  }
  if (sums_only) {
    each([&](float& x, int64_t at) { slots[(segment + 1) * state_size + at] = x; });
  } else if (args.final_state != nullptr && there && segment == plan.segments - 1 && head % group == 0) {
    float* const to = args.final_state + (row * in.kv_heads + kv_head) * state_size;
    each([&](float& x, int64_t at) { to[at] = x; });
  }
}

template <class T, int kRows, int kMaxWarps>
cudaError_t launch_as(const CausalLinearDecayArgs& args, const RowsPlan& plan, bool vectors, cudaStream_t stream) {
  const auto kernel = DecayRowsKernel<T, kRows, kMaxWarps>;
  const size_t bytes = shared_bytes(plan);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  const unsigned threads = 32 * static_cast<unsigned>(plan.warps + kStagingWarps);
  const int64_t blocks = args.in.requests * plan.column_blocks;
  if (plan.segments > 1)
    kernel<<<static_cast<unsigned>(blocks * args.in.kv_heads * (plan.segments - 1)), threads, bytes, stream>>>(args, plan, true,
                                                                                                              vectors);
  kernel<<<static_cast<unsigned>(blocks * args.in.heads * plan.segments), threads, bytes, stream>>>(args, plan, false, vectors);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_typed(const CausalLinearDecayArgs& args, const RowsPlan& plan, cudaStream_t stream) {
  const DecayInputs& in = args.in;
  bool vectors = (in.key_width * sizeof(T)) % 16 == 0 && (in.value_width * sizeof(T)) % 16 == 0;
  for (const void* data : {in.query, in.key, in.value}) vectors &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  if (in.key_width <= 32) return launch_as<T, 4, 2>(args, plan, vectors, stream);
  return in.key_width <= 128 ? launch_as<T, 8, 4>(args, plan, vectors, stream)
                             : launch_as<T, 8, 16>(args, plan, vectors, stream);
}

RowsPlan plan_of(const CausalLinearDecayArgs& args, int sm_count) {
  const DecayInputs& in = args.in;
  const int rows = in.key_width <= 32 ? 16 : 32;  // of a warp
  RowsPlan plan = {};
  plan.warps = static_cast<int>((in.key_width + rows - 1) / rows);
  plan.rows = plan.warps * rows;
  plan.column_blocks = static_cast<int>((in.value_width + kColumns - 1) / kColumns);
  plan.tile = kMaxTile;
  while (shared_bytes(plan) > kSharedBudget) plan.tile /= 2;
  const int64_t blocks = in.requests * in.heads * plan.column_blocks;
  const int64_t at_once = sm_count * (in.key_width <= 32 ? 6 : in.key_width <= 64 ? 2 : 1);
  const int64_t tokens = in.batch * in.tokens / (in.requests > 0 ? in.requests : 1);
  int64_t segments = blocks > 0 ? at_once / blocks : 1;
  if (segments > tokens / kMinSegmentTokens) segments = tokens / kMinSegmentTokens;
  plan.segments = static_cast<int>(segments < 1 ? 1 : segments > kMaxSegments ? kMaxSegments : segments);
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
