// One kernel an exchange: a thread writes its lines into all ranks' windows, then waits for the others' lines of the same
// numbers. CTA i waits for CTAs up to i alone, its own GPU's and the others' (of its own for the LSE of a row that began
// there): CTAs start in their order, so that a grid may be larger than the GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "core/integers.h"
#include "core/merge_weights.cuh"
#include "core/peer_lines.cuh"
#include "core/with_type.cuh"

namespace leanfleet {

namespace {

constexpr int kThreads = 128, kMostBlocks = 512, kLineBytes = 8;
constexpr uint32_t kFailed = 1u << 31;          // beside the count of CTAs that have arrived
constexpr uint32_t kLooks = 4096;               // between looks at whether the communicator has failed, which cross PCIe
constexpr uint32_t kSwept = uint32_t{1} << 20;  // exchanges after which slots are cleared: numbers of long ago come again

struct Data {
  uint32_t low, high;
};

__device__ Data load_data(const char* from, int64_t bytes) {
  Data data = {};
  if (bytes >= kLineBytes && reinterpret_cast<uintptr_t>(from) % kLineBytes == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    return {both.x, both.y};
  }
  uint16_t halves[kLineBytes / 2] = {};  // the smallest numbers have two bytes
  for (int i = 0; i < kLineBytes / 2; ++i)
    if (2 * i < bytes) memcpy(&halves[i], from + 2 * i, 2);
  memcpy(&data, halves, kLineBytes);
  return data;
}

__device__ void store_data(char* to, Data data, int64_t bytes) {
  if (bytes >= kLineBytes && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(data.low, data.high);
    return;
  }
  uint16_t halves[kLineBytes / 2];
  memcpy(halves, &data, kLineBytes);
  for (int i = 0; i < kLineBytes / 2; ++i)
    if (2 * i < bytes) memcpy(to + 2 * i, &halves[i], 2);
}

__device__ uint32_t number_of(const PeerView& view) { return *static_cast<const volatile uint32_t*>(&view.state->number); }

// Where rank `from` writes its lines of exchange `number` in a window.
__device__ PeerLine* slot(const PeerView& view, PeerLine* window, uint32_t number, int from) {
  return window + ((number & 1) * view.world + from) * kPeerLines;
}

// To all windows; to this rank's own one only with kOwn.
template <int kWorld, bool kOwn = false>
__device__ void send(const PeerView& view, uint32_t number, int64_t line, Data data) {
#pragma unroll
  for (int to = 0; to < kWorld; ++to)
    if (to < view.world && (kOwn || to != view.rank))
      write_line(slot(view, view.windows[to], number, view.rank) + line, data.low, data.high, number);
}

// A line of all ranks; this rank's is `own`, with kOwn the one in its window. False: the communicator has failed.
template <int kWorld, bool kOwn = false>
__device__ bool receive(const PeerView& view, PeerLine* window, uint32_t number, int64_t line, Data own, Data (&all)[kWorld]) {
  PeerLine got[kWorld];
  const auto comes = [&](int from) { return from < view.world && (kOwn || from != view.rank); };
  const auto look = [&](int from) { return read_line(slot(view, window, number, from) + line); };
#pragma unroll
  for (int from = 0; from < kWorld; ++from)
    if (comes(from)) got[from] = look(from);
#pragma unroll
  for (int from = 0; from < kWorld; ++from) {
    all[from] = own;
    if (!comes(from)) continue;
    for (uint32_t turn = 1; got[from].low_number != number || got[from].high_number != number; ++turn) {
      if (turn % kLooks == 0 && *static_cast<const volatile uint32_t*>(view.stop) != 0) return false;
      wait_a_little();
      got[from] = look(from);
    }
    all[from] = {got[from].low, got[from].high};
  }
  return true;
}

// The last CTA to come here makes the next exchange's number, and now and then clears the slots of this one: nobody writes them
// before this rank has sent the next one's lines. failed: in this thread.
__device__ void finish(const PeerView& view, PeerLine* window, uint32_t number, bool failed) {
  __shared__ bool last;
  const bool some_failed = __syncthreads_or(failed) != 0;
  if (threadIdx.x == 0) {
    if (some_failed) atomicOr(&view.state->arrived, kFailed);
    __threadfence();
    last = (atomicAdd(&view.state->arrived, 1u) & ~kFailed) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  if ((number & (kSwept - 2)) == 2)  // 2 and 3 of so many
    for (int64_t i = threadIdx.x; i < view.world * kPeerLines; i += blockDim.x) slot(view, window, number, 0)[i] = {};
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t next = number == 0xffffffffu ? 2 : number + 1;
    view.state->number = (atomicExch(&view.state->arrived, 0u) & kFailed) != 0 ? 0 : next;
  }
}

template <class T>
__device__ void add(float (&total)[kLineBytes / sizeof(T)], Data data) {
  T numbers[kLineBytes / sizeof(T)];
  memcpy(numbers, &data, kLineBytes);
#pragma unroll
  for (int i = 0; i < kLineBytes / static_cast<int>(sizeof(T)); ++i) total[i] += static_cast<float>(numbers[i]);
}

template <class T>
__device__ Data rounded(const float (&total)[kLineBytes / sizeof(T)]) {
  Data data;
  T numbers[kLineBytes / sizeof(T)];
#pragma unroll
  for (int i = 0; i < kLineBytes / static_cast<int>(sizeof(T)); ++i) numbers[i] = static_cast<T>(total[i]);
  memcpy(&data, numbers, kLineBytes);
  return data;
}

// An exchange of `bytes` of each rank. take(place, lines of all ranks at this place, bytes from there on).
template <int kWorld, class F>
__device__ __forceinline__ void exchange(const PeerView& view, PeerLine* window, const char* input, int64_t bytes, F&& take) {
  const uint32_t number = number_of(view);
  if (number == 0) return;  // the communicator has failed
  bool failed = false;
  const int64_t begin = int64_t{blockIdx.x} * kThreads + threadIdx.x, stride = int64_t{gridDim.x} * kThreads;
  for (int64_t at = begin; at * kLineBytes < bytes; at += stride)
    send<kWorld>(view, number, at, load_data(input + at * kLineBytes, bytes - at * kLineBytes));
  for (int64_t at = begin; at * kLineBytes < bytes; at += stride) {
    const int64_t place = at * kLineBytes;
    Data all[kWorld];
    failed = !receive<kWorld>(view, window, number, at, load_data(input + place, bytes - place), all);
    if (failed) break;
    take(place, all, bytes - place);
  }
  finish(view, window, number, failed);
}

// Summed in float32 and in the order of the ranks: the same bits on all. output may be input.
template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads)
    PeerSumKernel(const PeerView view, PeerLine* window, const char* input, char* output, int64_t bytes) {
  exchange<kWorld>(view, window, input, bytes, [&](int64_t place, const Data(&all)[kWorld], int64_t left) {
    float total[kLineBytes / sizeof(T)] = {};
#pragma unroll
    for (int from = 0; from < kWorld; ++from)
      if (from < view.world) add<T>(total, all[from]);
    store_data(output + place, rounded<T>(total), left);
  });
}

template <int kWorld>
__global__ void __launch_bounds__(kThreads)
    PeerGatherKernel(const PeerView view, PeerLine* window, const char* input, char* output, int64_t bytes) {
  exchange<kWorld>(view, window, input, bytes, [&](int64_t place, const Data(&all)[kWorld], int64_t left) {
#pragma unroll
    for (int from = 0; from < kWorld; ++from)
      if (from < view.world) store_data(output + from * bytes + place, all[from], left);
  });
}

// A thread has one line of a row. The row's LSEs are lines of their own, behind all others; also this rank's comes through its
// window, since the thread that has a row's first line overwrites it.
template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads)
    PeerMergeKernel(const PeerView view, PeerLine* window, char* output, float* lse, int64_t rows, int64_t row_bytes,
                    int64_t row_lines, const merge_parts::Sinks sinks) {
  const uint32_t number = number_of(view);
  if (number == 0) return;  // the communicator has failed
  bool failed = false;
  const int64_t begin = int64_t{blockIdx.x} * kThreads + threadIdx.x, stride = int64_t{gridDim.x} * kThreads;
  const int64_t lines = rows * row_lines;
  for (int64_t at = begin; at < lines; at += stride) {
    const int64_t row = at / row_lines, place = at % row_lines * kLineBytes;
    if (place == 0) send<kWorld, true>(view, number, lines + row, {__float_as_uint(lse[row]), 0});
    send<kWorld>(view, number, at, load_data(output + row * row_bytes + place, row_bytes - place));
  }
  for (int64_t at = begin; at < lines; at += stride) {
    const int64_t row = at / row_lines, place = at % row_lines * kLineBytes, left = row_bytes - place;
    Data all[kWorld], lses[kWorld];
    const Data own = load_data(output + row * row_bytes + place, left);
    failed = !receive<kWorld, true>(view, window, number, lines + row, {}, lses) ||
             !receive<kWorld>(view, window, number, at, own, all);
    if (failed) break;
    const auto lse_of = [&](int64_t from) {
      return from < view.world ? __uint_as_float(lses[from].low) : merge_parts::kNothing;
    };
    const merge_parts::RowWeights weights = merge_parts::weigh(lse_of, kWorld, sinks, row);
    float total[kLineBytes / sizeof(T)] = {};
#pragma unroll
    for (int from = 0; from < kWorld; ++from) {
      if (lse_of(from) == merge_parts::kNothing) continue;
      const float weight = weights.of(lse_of(from));
      float part[kLineBytes / sizeof(T)] = {};
      add<T>(part, all[from]);
#pragma unroll
      for (int i = 0; i < kLineBytes / static_cast<int>(sizeof(T)); ++i) total[i] += part[i] * weight;
    }
    store_data(output + row * row_bytes + place, rounded<T>(total), left);
    if (place == 0) lse[row] = weights.lse();
  }
  finish(view, window, number, failed);
}

unsigned blocks_of(int64_t lines) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(lines, int64_t{kThreads}), 1, kMostBlocks));
}

int64_t lines_of(int64_t bytes) { return ceil_div(bytes, int64_t{kLineBytes}); }

template <class T, int kWorld>
int sum(const PeerView& view, const char* input, char* output, int64_t bytes, cudaStream_t stream) {
  PeerSumKernel<T, kWorld>
      <<<blocks_of(lines_of(bytes)), kThreads, 0, stream>>>(view, view.windows[view.rank], input, output, bytes);
  return cudaGetLastError();
}

template <int kWorld>
int gather(const PeerView& view, const char* input, char* output, int64_t bytes, cudaStream_t stream) {
  PeerGatherKernel<kWorld>
      <<<blocks_of(lines_of(bytes)), kThreads, 0, stream>>>(view, view.windows[view.rank], input, output, bytes);
  return cudaGetLastError();
}

template <class T, int kWorld>
int merge(const PeerView& view, const PartialAttention& part, cudaStream_t stream) {
  const int64_t row_bytes = part.width * int64_t{sizeof(T)}, row_lines = lines_of(row_bytes);
  PeerMergeKernel<T, kWorld><<<blocks_of(part.rows * row_lines), kThreads, 0, stream>>>(
      view, view.windows[view.rank], static_cast<char*>(part.output), part.lse, part.rows, row_bytes, row_lines, part.sinks);
  return cudaGetLastError();
}

template <class T>
int sum_of_type(const PeerView& view, const void* input, void* output, int64_t count, void* stream) {
  const auto run = view.world <= 2 ? sum<T, 2> : view.world <= 4 ? sum<T, 4> : sum<T, kMaxPeers>;
  return run(view, static_cast<const char*>(input), static_cast<char*>(output), count * int64_t{sizeof(T)},
             static_cast<cudaStream_t>(stream));
}

template <class T>
int merge_of_type(const PeerView& view, const PartialAttention& part, void* stream) {
  const auto run = view.world <= 2 ? merge<T, 2> : view.world <= 4 ? merge<T, 4> : merge<T, kMaxPeers>;
  return run(view, part, static_cast<cudaStream_t>(stream));
}

}  // namespace

bool fits_peers(int64_t bytes) { return lines_of(bytes) <= kPeerLines; }

bool fits_peers(const PartialAttention& part) {
  return part.rows * (lines_of(part.width * element_size(part.dtype)) + 1) <= kPeerLines;
}

int launch_peer_sum(const PeerView& view, const void* input, void* output, int64_t count, DType dtype, void* stream) {
  return with_type(dtype, [&](auto type) { return sum_of_type<decltype(type)>(view, input, output, count, stream); });
}

int launch_peer_gather(const PeerView& view, const void* input, void* output, int64_t bytes, void* stream) {
  const auto run = view.world <= 2 ? gather<2> : view.world <= 4 ? gather<4> : gather<kMaxPeers>;
  return run(view, static_cast<const char*>(input), static_cast<char*>(output), bytes, static_cast<cudaStream_t>(stream));
}

int launch_peer_merge(const PeerView& view, const PartialAttention& part, void* stream) {
  return with_type(part.dtype, [&](auto type) { return merge_of_type<decltype(type)>(view, part, stream); });
}

}  // namespace leanfleet
