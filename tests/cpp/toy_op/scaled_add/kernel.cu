#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "scaled_add.h"

namespace leanfleet::scaled_add {

namespace {

// One CTA per row of [B*H]; a CTA's threads stride over its N x D elements. The last CTA to arrive adds the
// row sums to the totals and sets the sync word back to zero.
template <class T>
__global__ void AddKernel(Args args) {
  __shared__ float sums[256];
  __shared__ bool last;
  const int64_t row = blockIdx.x;
  const int64_t base = row / args.heads * args.batch_stride + row % args.heads * args.head_stride;
  float total = 0.0f;
  for (int64_t i = threadIdx.x; i < args.tokens * args.width; i += blockDim.x) {
    const int64_t at = base + i / args.width * args.token_stride + i % args.width;
    const float x = static_cast<float>(static_cast<const T*>(args.x)[at]);
    const float y = args.y != nullptr ? static_cast<float>(static_cast<const T*>(args.y)[at]) : 0.0f;
    static_cast<T*>(args.output)[at] = static_cast<T>(args.alpha * x + y);
    total += x;
  }
  sums[threadIdx.x] = total;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    args.partial[row] = sums[0];
    __threadfence();
    last = atomicAdd(args.arrivals, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (args.total != nullptr)
    for (int64_t r = threadIdx.x; r < args.rows; r += blockDim.x)
      args.total_out[r] = args.total[r] + __ldcg(args.partial + r);
  if (threadIdx.x == 0) *args.arrivals = 0;
}

template <class T>
int launch_typed(const Args& args, void* stream) {
  AddKernel<T><<<static_cast<unsigned>(args.rows), 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch(const Args& args, void* stream) {
  if (args.dtype == 1) return launch_typed<__half>(args, stream);
  if (args.dtype == 2) return launch_typed<__nv_bfloat16>(args, stream);
  return launch_typed<float>(args, stream);
}

}  // namespace leanfleet::scaled_add
