// What the simulated GPU has to find, and what it has to get right. Prints one line a check.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "core/mma.cuh"

namespace leanfleet {

// A warp's neighbours exchange numbers through shared memory, with or without a barrier between.
template <bool barrier>
__global__ void SwapKernel(int* out) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = -1;
  __syncthreads();
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (barrier) __syncthreads();
  out[threadIdx.x] = numbers[63 - threadIdx.x];
}

// Half of the warp waits at a barrier, the other for all lanes.
__global__ void DivergentKernel(int* out) {
  if (threadIdx.x < 16) __syncthreads();
  else out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

template <bool waits>
__global__ void CopyKernel(const int* from, int* out) {
  extern __shared__ __align__(16) char shared[];
  tile::cp_async(tile::shared_address(shared) + 16 * threadIdx.x, from + 4 * threadIdx.x, 16);
  tile::cp_async_commit();
  if constexpr (waits) tile::cp_async_wait();
  __syncthreads();
  out[threadIdx.x] = reinterpret_cast<const int*>(shared)[threadIdx.x];
}

__global__ void MisalignedKernel(int* out) {
  extern __shared__ __align__(16) char shared[];
  uint32_t r[4];
  tile::load_matrices(r, tile::shared_address(shared) + 8 * threadIdx.x);
  out[threadIdx.x] = static_cast<int>(r[0]);
}

// c = a b for a of 16 x 16, b of 16 x 8, row by row.
template <class T>
__global__ void ProductKernel(const float* a, const float* b, float* c) {
  extern __shared__ __align__(16) char shared[];
  T* const left = reinterpret_cast<T*>(shared);
  T* const right = left + 16 * 16;
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) left[i] = static_cast<T>(a[i]);
  for (int i = lane; i < 128; i += 32) right[i] = static_cast<T>(b[i]);
  __syncwarp();
  uint32_t rows[4], columns[4];
  tile::load_matrices(rows, tile::shared_address(left + lane % 16 * 16 + lane / 16 * 8));
  tile::load_matrices_transposed(columns, tile::shared_address(right + lane % 16 * 8));
  float sums[4] = {};
  tile::mma(T{}, sums, rows, columns[0], tile::transpose_matrix(tile::transpose_matrix(columns[1])));
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

template <class T>
bool product_is_right() {
  float a[256], b[128], c[128];
  for (int i = 0; i < 256; ++i) a[i] = static_cast<float>(i * 7 % 23 - 11);
  for (int i = 0; i < 128; ++i) b[i] = static_cast<float>(i * 5 % 19 - 9);
  ProductKernel<T><<<1, 32, 1024>>>(a, b, c);
  if (cudaGetLastError() != cudaSuccess) return false;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[16 * row + k] * b[8 * k + column];
      if (sum != c[8 * row + column]) return false;
    }
  return true;
}

template <bool barrier>
int wrong_swaps() {
  int out[64], wrong = 0;
  SwapKernel<barrier><<<1, 64>>>(out);
  for (int i = 0; i < 64; ++i) wrong += out[i] != 63 - i;
  return wrong;
}

template <bool waits>
int wrong_copies() {
  int from[128], out[32], wrong = 0;
  for (int i = 0; i < 128; ++i) from[i] = i;
  CopyKernel<waits><<<1, 32, 512>>>(from, out);
  for (int i = 0; i < 32; ++i) wrong += out[i] != i;
  return wrong;
}

void check_all() {
  int out[64] = {};
  std::printf("swap with a barrier: %d wrong\n", wrong_swaps<true>());
  std::printf("swap without: %s\n", wrong_swaps<false>() > 0 ? "found" : "missed");
  std::printf("copy waited for: %d wrong\n", wrong_copies<true>());
  std::printf("copy not waited for: %s\n", wrong_copies<false>() > 0 ? "found" : "missed");
  DivergentKernel<<<1, 32>>>(out);
  std::printf("divergent barrier: %s\n", cudaGetLastError() == cudaErrorLaunchFailure ? "found" : "missed");
  MisalignedKernel<<<1, 32, 1024>>>(out);
  std::printf("misaligned matrix: %s\n", cudaGetLastError() == cudaErrorLaunchFailure ? "found" : "missed");
  std::printf("product in half: %s\n", product_is_right<__half>() ? "right" : "wrong");
  std::printf("product in bfloat16: %s\n", product_is_right<__nv_bfloat16>() ? "right" : "wrong");
}

}  // namespace leanfleet

int main() { leanfleet::check_all(); }
