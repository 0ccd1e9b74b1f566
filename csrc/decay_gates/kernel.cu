// A thread has some numbers of a token's decays, and some of beta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dependent_launch.cuh"
#include "core/op.h"
#include "core/with_type.cuh"
#include "decay_gates/decay_gates.h"

namespace leanfleet::decay_gates {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostNumbers = int64_t{1} << 31;  // of a launch: they are counted in 32 bits

__device__ __forceinline__ float softplus(float x) { return x == x ? fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) : x; }

// What a decay's logarithm may be: a NaN forgets everything, which leaves nothing finite where nothing should be.
__device__ __forceinline__ float as_log_decay(float x) { return x <= 0.0f ? x : x == x ? 0.0f : -INFINITY; }

// kColumns numbers of a row, of float32 or T.
template <class T, int kColumns>
struct alignas(kColumns * sizeof(T)) Chunk {
  T x[kColumns];
};

// Some rows from first_row on. kColumns: 4, where heads of several columns have whole chunks of them and all rows begin at a chunk's
// address, or 1.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads) GateKernel(const __grid_constant__ Args args, int64_t first_row, uint32_t rows) {
  let_next_launch_begin();
  wait_for_launch_before();
  const auto heads = static_cast<uint32_t>(args.heads), width = static_cast<uint32_t>(args.width), of_row = heads * width;
  const uint32_t chunks_of_row = of_row / kColumns, chunks = rows * chunks_of_row;
  const uint32_t own = blockIdx.x * kThreads + threadIdx.x;
  if (own >= chunks) return;
  const auto inside = [&](int64_t row) {
    if (args.query_lens == nullptr) return true;
    const int64_t request = row / args.tokens;
    return row - request * args.tokens < args.query_lens[request];
  };
  const uint32_t of_launch = own / chunks_of_row, column = (own - of_launch * chunks_of_row) * kColumns;
  const int64_t row = first_row + of_launch;
  Chunk<float, kColumns> steps = {}, log_decays = {};
  if (inside(row)) {
    const auto input =
        *reinterpret_cast<const Chunk<T, kColumns>*>(static_cast<const T*>(args.input) + row * args.input_pitch + column);
    Chunk<float, kColumns> bias = {};
    if (args.bias != nullptr) bias = *reinterpret_cast<const Chunk<float, kColumns>*>(args.bias + column);
    const uint32_t head = width == 1 ? column : column / width;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float x = static_cast<float>(input.x[j]);
      float step = softplus(args.bias != nullptr ? x + bias.x[j] : x);
      if (step < args.step_min) step = args.step_min;
      if (step > args.step_max) step = args.step_max;
      steps.x[j] = step;
      log_decays.x[j] = as_log_decay(args.rate[width == 1 ? head + j : head] * step);
    }
  }
  const int64_t at = row * of_row + column;
  *reinterpret_cast<Chunk<float, kColumns>*>(args.log_decay + at) = log_decays;
  if (args.step != nullptr) *reinterpret_cast<Chunk<float, kColumns>*>(args.step + at) = steps;
  if (args.beta == nullptr) return;
  const auto beta_of = [&](int64_t of_row, T x) {
    return inside(of_row) ? args.beta_scale / (1.0f + expf(-static_cast<float>(x))) : 0.0f;
  };
  const auto* const betas = static_cast<const T*>(args.beta_input);
  if (width == 1) {
    const auto x = *reinterpret_cast<const Chunk<T, kColumns>*>(betas + row * args.beta_pitch + column);
    Chunk<float, kColumns> beta;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) beta.x[j] = beta_of(row, x.x[j]);
    *reinterpret_cast<Chunk<float, kColumns>*>(args.beta + at) = beta;
    return;
  }
  for (uint32_t i = own; i < rows * heads; i += chunks) {
    const uint32_t beta_row = i / heads, beta_head = i - beta_row * heads;
    const int64_t of_all = first_row + beta_row;
    args.beta[of_all * heads + beta_head] = beta_of(of_all, betas[of_all * args.beta_pitch + beta_head]);
  }
}

template <class T, int kColumns>
int launch_chunks(const Args& args, cudaStream_t stream) {
  const int64_t of_row = args.heads * args.width, rows = args.batch * args.tokens;
  if (rows == 0 || of_row == 0) return cudaSuccess;
  if (of_row > kMostNumbers) return cudaErrorInvalidConfiguration;
  const int64_t together = kMostNumbers / of_row;
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t count = rows - first < together ? rows - first : together;
    const auto blocks = static_cast<unsigned>((count * of_row / kColumns + kThreads - 1) / kThreads);
    const cudaError_t error =
        launch_dependently<GateKernel<T, kColumns>>(dim3(blocks), kThreads, stream, args, first, static_cast<uint32_t>(count));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  bool whole = args.heads * args.width % 4 == 0 && (args.width == 1 || args.width % 4 == 0) && args.input_pitch % 4 == 0;
  const auto begins_whole = [&](const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
  whole = whole && begins_whole(args.input, 4 * sizeof(T));
  for (const float* data : {args.bias, static_cast<const float*>(args.log_decay), static_cast<const float*>(args.step)})
    whole = whole && begins_whole(data, 16);
  if (args.width == 1 && args.beta != nullptr)  // which is read in such chunks too
    whole = whole && args.beta_pitch % 4 == 0 && begins_whole(args.beta_input, 4 * sizeof(T)) && begins_whole(args.beta, 16);
  return whole ? launch_chunks<T, 4>(args, stream) : launch_chunks<T, 1>(args, stream);
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::decay_gates
