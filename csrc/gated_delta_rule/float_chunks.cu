// The gated delta rule in chunks of 64 tokens for prompts in float32 with a decay of each token, as chunked.cu has it, but on
// the ordinary cores: two 16-bit numbers are not as exact as one of 32. A CTA has one state and 64 of its value columns. Rows of
// keys and queries, the state, -M, P and U are floats in shared memory. Threads are 16 x 16: (y, x) has tokens y, y + 16 .. of
// rows, and columns from 4 x on; where columns are tokens, x, x + 16 ..
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/tiles.cuh"
#include "gated_delta_rule/warp_states.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kFloatThreads = 256, kSide = 16;
constexpr int kColumnStride = kSlice + 4, kSquareStride = kChunk + 4;  // floats of rows; reads of 16 rows then meet all banks

template <int kD>
struct Layout {
  static constexpr int kStride = kD + 4;
  float keys[kChunk][kStride], queries[kChunk][kStride];
  float state[kD][kSlice], values[kChunk][kColumnStride];  // values, then R, then U
  float system[kChunk][kSquareStride], scores[kChunk][kSquareStride];
  Scalars scalars;
};

struct Place {
  int64_t batch, head, key_head, first_out, token;
  int tokens, first_column;
};

__device__ __forceinline__ float4 four_at(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ void add_product(float (&sum)[4], float by, const float4& x) {
  sum[0] += by * x.x, sum[1] += by * x.y, sum[2] += by * x.z, sum[3] += by * x.w;
}
__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ __forceinline__ float element(const float4& x, int i) { return i < 2 ? (i == 0 ? x.x : x.y) : (i == 2 ? x.z : x.w); }

// Rows of a chunk, zeros where there are none.
template <int kWidth, int kStride>
__device__ __forceinline__ void load_tile(float (&to)[kChunk][kStride], const float* rows, int64_t stride, int tokens,
                                          int column, int width) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kWidth / 4; i += kFloatThreads) {
    const int row = i / (kWidth / 4), first = i % (kWidth / 4) * 4;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < tokens && column + first < width)
      x = __ldg(reinterpret_cast<const float4*>(rows + row * stride + column + first));
    *reinterpret_cast<float4*>(&to[row][first]) = x;
  }
}

template <int kD>
struct Chunks {
  using L = Layout<kD>;
  const Args& args;
  L& s;
  Place place;
  const int y = static_cast<int>(threadIdx.x) / kSide, x = static_cast<int>(threadIdx.x) % kSide;

  // Factors of rows; four threads share one.
  __device__ __forceinline__ void make_factors(const float (&rows)[kChunk][L::kStride], float (&factors)[kChunk],
                                               float scale) const {
    const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    float squares = 0.0f;
#pragma unroll 4
    for (int d = 4 * part; d < kD; d += 16) {
      const float4 four = four_at(&rows[row][d]);
      squares = dot(four, four, squares);
    }
    squares += __shfl_xor_sync(kFullWarp, squares, 1);
    squares += __shfl_xor_sync(kFullWarp, squares, 2);
    if (part == 0) factors[row] = args.normalize ? scale * rsqrtf(squares + kUnitRowEps) : scale;
  }

  __device__ __forceinline__ void load_queries(int64_t h) const {
    const int64_t head = (place.first_out + h) / (args.heads / args.q_heads);
    load_tile<kD>(s.queries, row_of<float>(args.query, args.query_strides, place.batch, head, place.token),
                  args.query_strides.token, place.tokens, 0, static_cast<int>(args.key_width));
  }
  __device__ __forceinline__ void load_chunk() const {
    load_tile<kD>(s.keys, row_of<float>(args.key, args.key_strides, place.batch, place.key_head, place.token),
                  args.key_strides.token, place.tokens, 0, static_cast<int>(args.key_width));
    load_tile<kSlice>(s.values, row_of<float>(args.value, args.value_strides, place.batch, place.head, place.token),
                      args.value_strides.token, place.tokens, place.first_column, static_cast<int>(args.value_width));
    load_queries(0);
    if (threadIdx.x < 32) take_scalars(args, place.batch, place.head, place.token, place.tokens, s.scalars);
  }

  // Products of rows with keys, of blocks up to the diagonal: put(token, token of the key, product).
  template <class Put>
  __device__ __forceinline__ void multiply_keys(const float (&rows)[kChunk][L::kStride], Put&& put) const {
    float sums[kBlocks][kBlocks] = {};
#pragma unroll 2
    for (int d = 0; d < kD; d += 4) {
      float4 left[kBlocks], right[kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        left[i] = four_at(&rows[y + kBlock * i][d]), right[i] = four_at(&s.keys[x + kBlock * i][d]);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int j = 0; j <= i; ++j) sums[i][j] = dot(left[i], right[j], sums[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j) put(y + kBlock * i, x + kBlock * j, sums[i][j]);
  }

  // by * product, of which 0 makes 0 whatever the rows hold: padding is told by a beta of 0.
  static __device__ __forceinline__ float times(float by, float product) { return by != 0.0f ? by * product : 0.0f; }

  // -M: blocks on the diagonal where they are inverted, the others in the system.
  __device__ __forceinline__ void make_system() const {
    Scalars& of = s.scalars;
    multiply_keys(s.keys, [&](int t, int from, float product) {
      const float by = -of.beta[t] * of.key[t] * of.key[from] * decay_between(of.decay, from, t);
      const float m = from < t ? times(by, product) : 0.0f;
      if (t / kBlock == from / kBlock) of.diagonal[t / kBlock][t % kBlock][from % kBlock] = m;
      else s.system[t][from] = m;
    });
  }
  __device__ __forceinline__ void make_scores() const {
    Scalars& of = s.scalars;
    multiply_keys(s.queries, [&](int t, int from, float product) {
      const float by = of.query[t] * of.key[from] * decay_between(of.decay, from, t);
      s.scores[t][from] = from <= t ? times(by, product) : 0.0f;
    });
  }

  // Products of rows with the state.
  __device__ __forceinline__ void multiply_state(const float (&rows)[kChunk][L::kStride], float (&sums)[kBlocks][4]) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < kD; d += 4) {
      float4 left[kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) left[i] = four_at(&rows[y + kBlock * i][d]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float4 right = four_at(&s.state[d + e][4 * x]);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) add_product(sums[i], element(left[i], e), right);
      }
    }
  }

  // R = beta (V - decayed K S), in place of V.
  __device__ __forceinline__ void make_rest() const {
    const Scalars& of = s.scalars;
    float sums[kBlocks][4];
    multiply_state(s.keys, sums);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int t = y + kBlock * i;
      const float by = of.prefix[t] * of.key[t], beta = of.beta[t];
      float4& at = *reinterpret_cast<float4*>(&s.values[t][4 * x]);
      at = make_float4(beta * (at.x - by * sums[i][0]), beta * (at.y - by * sums[i][1]), beta * (at.z - by * sums[i][2]),
                       beta * (at.w - by * sums[i][3]));
    }
  }

  // U = (I + M)^-1 R, in place of R: a warp has 8 columns, a lane four of them in a row of each block.
  __device__ __forceinline__ void solve() const {
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 2;
    const int column = static_cast<int>(threadIdx.x / 32) * 8 + lane % 2 * 4;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int t = kBlock * block + row;
      const float4 own = four_at(&s.values[t][column]);
      float rest[4] = {own.x, own.y, own.z, own.w}, found[4] = {};
#pragma unroll 4
      for (int from = 0; from < kBlock * block; from += 4) {
        const float4 m = four_at(&s.system[t][from]);
#pragma unroll
        for (int e = 0; e < 4; ++e) add_product(rest, element(m, e), four_at(&s.values[from + e][column]));
      }
      *reinterpret_cast<float4*>(&s.values[t][column]) = make_float4(rest[0], rest[1], rest[2], rest[3]);
      __syncwarp();
#pragma unroll
      for (int from = 0; from < kBlock; from += 4) {
        const float4 inverse = four_at(&s.scalars.diagonal[block][row][from]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          add_product(found, element(inverse, e), four_at(&s.values[kBlock * block + from + e][column]));
      }
      __syncwarp();
      *reinterpret_cast<float4*>(&s.values[t][column]) = make_float4(found[0], found[1], found[2], found[3]);
      __syncwarp();
    }
  }

  // O = decayed Q S + P U.
  __device__ __forceinline__ void write_output(int64_t h) const {
    const Scalars& of = s.scalars;
    float sums[kBlocks][4];
    multiply_state(s.queries, sums);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int t = y + kBlock * i;
      const float by = of.prefix[t] * of.query[t];
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] *= by;
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll 2
      for (int from = kBlock * block; from < kBlock * (block + 1); from += 4) {
        float4 right[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) right[e] = four_at(&s.values[from + e][4 * x]);
#pragma unroll
        for (int i = block; i < kBlocks; ++i) {
          const float4 left = four_at(&s.scores[y + kBlock * i][from]);
#pragma unroll
          for (int e = 0; e < 4; ++e) add_product(sums[i], element(left, e), right[e]);
        }
      }
    }
    float* const rows =
        const_cast<float*>(row_of<float>(args.output, args.output_strides, place.batch, place.first_out + h, place.token));
    const int column = place.first_column + 4 * x;
    if (column >= args.value_width) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int t = y + kBlock * i;
      if (t < place.tokens)
        *reinterpret_cast<float4*>(rows + t * args.output_strides.token + column) =
            make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
  }

  // S = kept S + K^T U with the decay to the chunk's end; a thread has key dimensions 4 y .. of each 64.
  __device__ __forceinline__ void enter_state() const {
    constexpr int kParts = kD / 64;
    const Scalars& of = s.scalars;
    const float kept = of.prefix[kChunk - 1];
    float sums[kParts][4][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 old = four_at(&s.state[64 * part + 4 * y + i][4 * x]);
        sums[part][i][0] = kept * old.x, sums[part][i][1] = kept * old.y;
        sums[part][i][2] = kept * old.z, sums[part][i][3] = kept * old.w;
      }
#pragma unroll 4
    for (int t = 0; t < kChunk; ++t) {
      const float by = of.suffix[t] * of.key[t];
      const float4 u = four_at(&s.values[t][4 * x]), right = make_float4(by * u.x, by * u.y, by * u.z, by * u.w);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4 left = four_at(&s.keys[t][64 * part + 4 * y]);
#pragma unroll
        for (int i = 0; i < 4; ++i) add_product(sums[part][i], element(left, i), right);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float4*>(&s.state[64 * part + 4 * y + i][4 * x]) =
            make_float4(sums[part][i][0], sums[part][i][1], sums[part][i][2], sums[part][i][3]);
  }

  // Reads (kStore false) or writes the state [D,V], or [V,D] with v_first.
  template <bool kStore>
  __device__ __forceinline__ void move_state(float* data) const {
    const int D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
    for (int i = static_cast<int>(threadIdx.x); i < kD * kSlice; i += kFloatThreads) {
      const int d = args.state_v_first ? i % kD : i / kSlice, c = args.state_v_first ? i / kD : i % kSlice;
      const int v = place.first_column + c;
      const bool there = data != nullptr && d < D && v < V;
      float* const at = data + (args.state_v_first ? static_cast<int64_t>(v) * D + d : static_cast<int64_t>(d) * V + v);
      if constexpr (kStore) {
        if (there) *at = s.state[d][c];
      } else {
        s.state[d][c] = there ? *at : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void take_chunk() const {
    load_chunk();
    __syncthreads();
    make_factors(s.keys, s.scalars.key, 1.0f);
    make_factors(s.queries, s.scalars.query, args.scale);
    __syncthreads();
    make_system();
    make_scores();
    make_rest();
    __syncthreads();
    if (threadIdx.x < 32 * kBlocks) invert_block(s.scalars.diagonal[threadIdx.x / 32], static_cast<int>(threadIdx.x % 32));
    __syncthreads();
    solve();
    __syncthreads();
    write_output(0);
    for (int64_t h = 1; h < args.heads / args.v_heads; ++h) {  // more query heads of this state
      __syncthreads();
      load_queries(h);
      __syncthreads();
      make_factors(s.queries, s.scalars.query, args.scale);
      __syncthreads();
      make_scores();
      __syncthreads();
      write_output(h);
    }
    __syncthreads();
    enter_state();
    __syncthreads();
  }
};

template <int kD>
__global__ void __launch_bounds__(kFloatThreads, 1) FloatChunksKernel(const __grid_constant__ Args args, unsigned slices) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int64_t unit = blockIdx.x / slices, request = unit / args.v_heads;
  Place place = {};
  place.head = unit % args.v_heads;
  place.key_head = place.head / (args.v_heads / args.k_heads);
  place.first_out = place.head * (args.heads / args.v_heads);
  place.first_column = static_cast<int>(blockIdx.x % slices) * kSlice;
  place.batch = request;
  int64_t end = args.tokens;
  if (args.cu_seqlens != nullptr) {
    place.batch = 0;
    place.token = clamped_offset(args.cu_seqlens, request, args.tokens);
    end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
  }
  const int64_t state_row = args.state_index != nullptr ? args.state_index[request] : request;
  const bool there = state_row >= 0 && state_row < args.state_rows;
  const int64_t at = (state_row * args.v_heads + place.head) * args.key_width * args.value_width;

  Chunks<kD> chunks{args, *reinterpret_cast<Layout<kD>*>(shared), place};
  chunks.template move_state<false>(there && args.initial_state != nullptr ? const_cast<float*>(args.initial_state) + at
                                                                           : nullptr);
  for (; chunks.place.token < end; chunks.place.token += kChunk) {
    const int64_t left = end - chunks.place.token;
    chunks.place.tokens = static_cast<int>(left < kChunk ? left : kChunk);
    chunks.take_chunk();
  }
  __syncthreads();
  if (there && args.final_state != nullptr) chunks.template move_state<true>(args.final_state + at);
}

template <int kD>
cudaError_t launch_width(const Args& args, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Layout<kD>));
  const auto kernel = FloatChunksKernel<kD>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t slices = ceil_div(args.value_width, int64_t{kSlice}), blocks = args.requests * args.v_heads * slices;
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kFloatThreads, kBytes, stream>>>(args, static_cast<unsigned>(slices));
  return cudaGetLastError();
}

// Whether rows can be read 16 bytes at a time.
bool has_vectors(const void* data, const Strides& strides, int64_t width) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && width % 4 == 0 && strides.batch % 4 == 0 && strides.head % 4 == 0 &&
         strides.token % 4 == 0;
}

}  // namespace

bool float_chunks_fit(const Args& args, int device) {
  if (args.dtype != static_cast<int32_t>(DType::kFloat32) || args.decay_per_key || !args.delta) return false;
  if (args.key_width > 128 || args.tokens < kChunkedTokens * (args.packed ? args.requests : 1)) return false;
  if (!has_vectors(args.query, args.query_strides, args.key_width) ||
      !has_vectors(args.key, args.key_strides, args.key_width) ||
      !has_vectors(args.value, args.value_strides, args.value_width) ||
      !has_vectors(args.output, args.output_strides, args.value_width))
    return false;
  int shared = 0;
  if (cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();  // not to be taken for the next launch's
    return false;
  }
  return static_cast<size_t>(shared) >= (args.key_width <= 64 ? sizeof(Layout<64>) : sizeof(Layout<128>));
}

int launch_float_chunks(const Args& args, const CudaTarget& target) {
  const auto stream = static_cast<cudaStream_t>(target.stream);
  return args.key_width <= 64 ? launch_width<64>(args, stream) : launch_width<128>(args, stream);
}

}  // namespace leanfleet::gated_delta_rule
