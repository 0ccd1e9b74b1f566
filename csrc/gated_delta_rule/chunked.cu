// The gated delta rule in chunks of 64 tokens on tensor cores, for prompts of 16-bit numbers. A CTA has one state and 64 of its
// value columns, a warp 16 of these from the first token to the last. With gc the running sum of g inside the chunk,
//   M[t,s] = beta_t (k_t . k_s) exp(gc_t - gc_s) for s < t      U = (I + M)^-1 (beta v - beta exp(gc) K S)
//   P[t,s] = scale (q_t . k_s) exp(gc_t - gc_s) for s <= t      O = P U + scale exp(gc) Q S
//   S = exp(gc_last) S + (exp(gc_last - gc) K)^T U
// M and P are made by all warps. From there on a warp works alone, on transposed matrices: S^T, U^T and O^T have value columns
// as rows, so that what one product leaves in registers is the left side of the next. The inverses of the 16 x 16 blocks on the
// diagonal of I + M are found in float32; the rest of it is block substitution.
// S, U and M enter as sums of two 16-bit numbers, K, Q and V as they are.
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/warp_states.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

template <int kD>
struct Layout {
  static constexpr int kRowsBytes = kChunk * kD * 2, kValueBytes = kChunk * kSlice * 2;
  static constexpr int kStageBytes = 2 * kRowsBytes + kValueBytes;  // key, query, value
  static constexpr int kHigh = 2 * kStageBytes, kLow = kHigh + kSquareBytes, kScores = kLow + kSquareBytes;
  static constexpr int kScalars = kScores + kSquareBytes;
  static constexpr int kBytes = kScalars + static_cast<int>(sizeof(Scalars));
};

struct Place {
  int64_t batch, begin, end, head, key_head, first_head, group;
  int first_column;
};

template <class T, int kD>
__device__ __forceinline__ void fetch_query(const Args& args, const Place& place, int64_t h, int64_t token, int tokens,
                                            uint32_t to) {
  const int64_t head = (place.first_head + h) / (args.heads / args.q_heads);
  fetch<T, kD>(to, row_of<T>(args.query, args.query_strides, place.batch, head, token), args.query_strides.token, tokens, 0,
               static_cast<int>(args.key_width));
}

template <class T, int kD>
__device__ __forceinline__ void fetch_chunk(const Args& args, const Place& place, int64_t token, uint32_t stage) {
  const int tokens = static_cast<int>(place.end - token < kChunk ? place.end - token : kChunk);
  fetch<T, kD>(stage, row_of<T>(args.key, args.key_strides, place.batch, place.key_head, token), args.key_strides.token, tokens,
               0, static_cast<int>(args.key_width));
  fetch_query<T, kD>(args, place, 0, token, tokens, stage + Layout<kD>::kRowsBytes);
  fetch<T, kSlice>(stage + 2 * Layout<kD>::kRowsBytes,
                   row_of<T>(args.value, args.value_strides, place.batch, place.head, token), args.value_strides.token, tokens,
                   place.first_column, static_cast<int>(args.value_width));
  cp_async_commit();
}

// This warp's rows of the tile of P.
template <class T, int kD>
__device__ __forceinline__ void make_scores(uint32_t queries, uint32_t keys, uint32_t scores, const Scalars& s, int warp,
                                            int lane) {
  float c[2 * kBlocks][4];
  pair_products<T, kD>(queries, keys, warp, lane, c);
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n) {
    if (n / 2 > warp) continue;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int t = kBlock * warp + fragment_row(lane, e), first = 8 * n + fragment_column(lane, e);
      float p[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        p[i] = first + i <= t ? s.query[t] * s.key[first + i] * decay_between(s.decay, first + i, t) * c[n][e + i] : 0.0f;
      store_pair(scores, t, first, pack_pair(T{}, p[0], p[1]));
    }
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(kThreads) ChunkedKernel(const __grid_constant__ Args args, unsigned slices) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = Layout<kD>;
  Scalars& s = *reinterpret_cast<Scalars*>(shared + L::kScalars);
  const uint32_t base = shared_address(shared), high = base + L::kHigh, low = base + L::kLow, scores = base + L::kScores;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const int64_t unit = blockIdx.x / slices, request = unit / args.v_heads;
  Place place = {};
  place.head = unit % args.v_heads;
  place.key_head = place.head / (args.v_heads / args.k_heads);
  place.group = args.heads / args.v_heads;
  place.first_head = place.head * place.group;
  place.first_column = static_cast<int>(blockIdx.x % slices) * kSlice;
  place.batch = request;
  place.end = args.tokens;
  if (args.cu_seqlens != nullptr) {
    place.batch = 0;
    place.begin = clamped_offset(args.cu_seqlens, request, args.tokens);
    place.end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
  }
  const int64_t state_row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = state_row >= 0 && state_row < args.state_rows;
  const int64_t at = (state_row * args.v_heads + place.head) * D * V;
  const int own = 16 * warp, column = place.first_column + own;  // of the warp, in the slice and in all

  if (place.begin < place.end) fetch_chunk<T, kD>(args, place, place.begin, base);
  State<T, kD> state = {};
  if (there && args.initial_state != nullptr)
    state.template move<false>(const_cast<float*>(args.initial_state) + at, args.state_v_first, column, lane, D, V);

  int turn = 0;
  for (int64_t token = place.begin; token < place.end; token += kChunk, turn ^= 1) {
    const uint32_t keys = base + turn * L::kStageBytes, queries = keys + L::kRowsBytes, values = queries + L::kRowsBytes;
    const int tokens = static_cast<int>(place.end - token < kChunk ? place.end - token : kChunk);
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage and the tables have been read
    if (token + kChunk < place.end) fetch_chunk<T, kD>(args, place, token + kChunk, base + (turn ^ 1) * L::kStageBytes);
    const int row = static_cast<int>(threadIdx.x) % kChunk;
    if (threadIdx.x < kChunk) s.key[row] = row_factor<T, kD>(keys, row, args.normalize, 1.0f);
    else s.query[row] = row_factor<T, kD>(queries, row, args.normalize, args.scale);
    if (warp == 0) take_scalars(args, place.batch, place.head, token, tokens, s);
    __syncthreads();
    make_system<T, kD>(keys, high, low, s, warp, lane);
    make_scores<T, kD>(queries, keys, scores, s, warp, lane);
    __syncthreads();

    float u[2 * kBlocks][4];
    state.multiply(keys, lane, u);
    take_rest<T>(values, s, warp, lane, u);
    solve<T>(high, low, lane, u);
    for (int64_t h = 0; h < place.group; ++h) {
      if (h > 0) {  // another query head of this state
        __syncthreads();
        fetch_query<T, kD>(args, place, h, token, tokens, queries);
        cp_async_commit();
        cp_async_wait();
        __syncthreads();
        if (threadIdx.x < kChunk) s.query[row] = row_factor<T, kD>(queries, row, args.normalize, args.scale);
        __syncthreads();
        make_scores<T, kD>(queries, keys, scores, s, warp, lane);
        __syncthreads();
      }
      float out[2 * kBlocks][4];
      state.multiply(queries, lane, out);
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int t = 8 * n + fragment_column(lane, e);
          out[n][e] *= s.prefix[t] * s.query[t];
        }
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        Left<T> left;
        left.take(u[2 * k], u[2 * k + 1]);
#pragma unroll
        for (int block = k; block < kBlocks; ++block) {
          uint32_t b[4];
          load_matrices(b, right_rows(scores, block, k, lane));
          left.multiply(out[2 * block], b[0], b[1]);
          left.multiply(out[2 * block + 1], b[2], b[3]);
        }
      }
      // By way of the value tile, whose columns no other warp reads and this one has read: rows go out in 16 bytes.
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int t = 8 * n + fragment_column(lane, e), c = own + fragment_row(lane, e);
          const T rounded = static_cast<T>(out[n][e]);
          store_2_bytes(values + element_offset(t, c), *reinterpret_cast<const uint16_t*>(&rounded));
        }
      __syncwarp();
      T* const rows = const_cast<T*>(row_of<T>(args.output, args.output_strides, place.batch, place.first_head + h, token));
      for (int i = lane; i < 2 * tokens; i += 32) {
        const int t = i / 2, chunk = own / 8 + i % 2;
        if (place.first_column + 8 * chunk < V)
          *reinterpret_cast<uint4*>(rows + t * args.output_strides.token + place.first_column + 8 * chunk) =
              load_16_bytes(values + chunk_offset<kChunk>(t, chunk));
      }
      __syncwarp();
    }

    scale_columns(u, s.suffix, s.key, lane);
    state.enter(keys, lane, u, s.prefix[kChunk - 1]);
  }
  if (there && args.final_state != nullptr)
    state.template move<true>(args.final_state + at, args.state_v_first, column, lane, D, V);
}

template <class T, int kD>
cudaError_t launch_width(const Args& args, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD>::kBytes;
  const auto kernel = ChunkedKernel<T, kD>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t slices = ceil_div(args.value_width, int64_t{kSlice}), blocks = args.requests * args.v_heads * slices;
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(args, static_cast<unsigned>(slices));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Args& args, cudaStream_t stream) {
  return args.key_width <= 64 ? launch_width<T, 64>(args, stream) : launch_width<T, 128>(args, stream);
}

}  // namespace

bool chunked_fits(const Args& args, int device) {
  if (args.dtype == static_cast<int32_t>(DType::kFloat32) || args.decay_per_key || !args.delta) return false;
  // Scores and the system are held in the keys' type: float16 has no range for keys and queries of any length.
  if (args.dtype == static_cast<int32_t>(DType::kFloat16) && !args.normalize) return false;
  if (args.key_width > 128 || args.key_width % 8 != 0 || args.value_width % 8 != 0) return false;
  if (args.tokens < kChunkedTokens * (args.packed ? args.requests : 1)) return false;
  for (const void* data : {args.query, args.key, args.value, static_cast<const void*>(args.output)})
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  // GPUs of 8.6, 8.9 and 12.0 have less shared memory than the wider keys ask for.
  int shared = 0;
  if (cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();  // not to be taken for the next launch's
    return false;
  }
  return shared >= (args.key_width <= 64 ? Layout<64>::kBytes : Layout<128>::kBytes);
}

int launch_chunked(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  if (args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(args, stream);
  return launch_type<__nv_bfloat16>(args, stream);
}

}  // namespace leanfleet::gated_delta_rule
