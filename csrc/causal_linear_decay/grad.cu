// CausalLinearDecayGrad: three chunk_scans and, of their row sums, the gradient of the decay. With
// op(X, Y, Z) = (X Yᵀ ⊙ D) Z:
//   dq = op(dO, V, K)    dk = op(V, dO, Q), descending    dv = op(K, Q, dO), descending
//
// F_t = dlog_decay_t = <G_t, γ_t S_{t-1}> follows from F_t = F_{t+1} + q_t·dq_t - k_t·dk_t and F_{N+1} = <dS_N, S_N>. The
// sum begins anew at the end of every segment of the scans, where both states are at hand, and is 0 where γ_t is.
//
// The scans have a dq for each head of the output and a dk for each state. Where these share queries or keys, they are added
// up afterwards, in their order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "causal_linear_decay/causal_linear_decay.h"
#include "core/integers.h"
#include "core/op.h"
#include "core/with_type.cuh"
#include "linear_scan/block_sum.cuh"
#include "linear_scan/chunk_scan.h"

namespace leanfleet::causal_linear_decay {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxParts = 4;  // of wide rows: 1024 columns

struct DecayGradSums {
  Inputs in;
  const float *query_dots, *key_dots;  // [query_slices][B,H,N], [key_slices][B,Hv,N]
  int32_t query_slices, key_slices, segments, parts;
  int64_t segment_tokens, slot_floats;
  const float* forward_slots[kMaxParts];  // S before and
  const float* reverse_slots[kMaxParts];  // G after the segments' edges
  int64_t slot_sums[kMaxParts];           // floats of a state in them
  const float* final_dots;                // [requests,Hv]: <dS_N, S_N>; null: 0
  float* grad_log_decay;
  double* partial;  // [Hv][B][segments]: sums over tokens; null: per token
};

// <dS_N, S_N> of a (request, head) a CTA.
__global__ void __launch_bounds__(kThreads) StateDotKernel(const float* a, const float* b, int64_t floats, float* out) {
  __shared__ double shared[kThreads];
  const int64_t base = static_cast<int64_t>(blockIdx.x) * floats;
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < floats; i += kThreads) sum += static_cast<double>(a[base + i]) * b[base + i];
  sum = block_sum<kThreads>(sum, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(sum);
}

struct Span {
  int64_t begin, end;
};

// The request of a token; empty if it has none.
__device__ __forceinline__ Span request_of(const Inputs& in, int64_t token, int64_t* request) {
  int64_t low = 0, high = in.requests;
  const auto offset = [&](int64_t q) { return clamped_offset(in.cu_seqlens, q, in.tokens); };
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (offset(middle + 1) > token) high = middle;
    else low = middle + 1;
  }
  *request = low;
  if (low >= in.requests || offset(low) > token) return {0, 0};
  return {offset(low), offset(low + 1)};
}

// A CTA: (segment, head, batch row), tokens from its end to its begin, kThreads at a time.
__global__ void __launch_bounds__(kThreads) DecayGradKernel(const __grid_constant__ DecayGradSums sums) {
  __shared__ double shared[kThreads];
  __shared__ int resets[kThreads];
  const Inputs& in = sums.in;
  const int segment = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int64_t begin = segment * sums.segment_tokens;
  int64_t end = begin + sums.segment_tokens;
  if (end > in.tokens) end = in.tokens;
  const auto log_decay_at = [&](int64_t token) {
    return in.decay_per_token
               ? in.log_decay[batch * in.decay_strides.batch + head * in.decay_strides.head + token * in.decay_strides.token]
               : in.log_decay[head];
  };
  double carry = 0.0;
  if (end < in.tokens) {
    const int64_t slots = (static_cast<int64_t>(batch) * in.v_heads + head) * (sums.segments - 1);
    double dot = 0.0;
    for (int part = 0; part < sums.parts; ++part) {
      const int64_t before = (slots + segment) * sums.slot_floats;
      const int64_t after = (slots + sums.segments - 2 - segment) * sums.slot_floats;
      for (int64_t i = threadIdx.x; i < sums.slot_sums[part]; i += kThreads)
        dot += static_cast<double>(sums.forward_slots[part][before + i]) * sums.reverse_slots[part][after + i];
    }
    carry = block_sum<kThreads>(dot, shared) * exp(static_cast<double>(log_decay_at(end)));
  }
  double total = 0.0;
  const int group = static_cast<int>(in.heads / in.v_heads);
  for (int64_t tile = begin + (end - begin - 1) / kThreads * kThreads; tile >= begin; tile -= kThreads) {
    // Thread 0 has the last token of the tile.
    const int64_t token = tile + kThreads - 1 - threadIdx.x;
    double value = 0.0;
    int reset = 0;
    bool none = token >= end;
    if (!none) {
      for (int g = 0; g < group; ++g)
        for (int s = 0; s < sums.query_slices; ++s)
          value +=
              sums.query_dots[((static_cast<int64_t>(s) * in.batch + batch) * in.heads + head * group + g) * in.tokens + token];
      for (int s = 0; s < sums.key_slices; ++s)
        value -= sums.key_dots[((static_cast<int64_t>(s) * in.batch + batch) * in.v_heads + head) * in.tokens + token];
      int64_t request = batch;
      Span tokens = {0, in.tokens};
      if (in.cu_seqlens != nullptr) tokens = request_of(in, token, &request);
      none = tokens.begin >= tokens.end;
      if (!none && token + 1 == tokens.end) {
        reset = 1;
        if (sums.final_dots != nullptr) value += sums.final_dots[request * in.v_heads + head];
      }
      if (none || log_decay_at(token) == -INFINITY) reset = 1, value = 0.0;
    }
    // Inclusive scan over threads: what is left of a reset does not pass it.
    for (int offset = 1; offset < kThreads; offset *= 2) {
      __syncthreads();
      shared[threadIdx.x] = value;
      resets[threadIdx.x] = reset;
      __syncthreads();
      if (static_cast<int>(threadIdx.x) >= offset && !reset) {
        value += shared[threadIdx.x - offset];
        reset = resets[threadIdx.x - offset];
      }
    }
    if (!reset) value += carry;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) shared[0] = value;
    __syncthreads();
    carry = shared[0];
    if (token >= end) continue;
    if (sums.partial != nullptr) total += value;
    else
      sums.grad_log_decay[batch * in.decay_strides.batch + head * in.decay_strides.head + token * in.decay_strides.token] =
          static_cast<float>(value);
  }
  if (sums.partial == nullptr) return;
  total = block_sum<kThreads>(total, shared);
  if (threadIdx.x == 0) sums.partial[(static_cast<int64_t>(head) * in.batch + batch) * sums.segments + segment] = total;
}

__global__ void __launch_bounds__(kThreads) DecayGradTotalKernel(const double* partial, int64_t count, float* out) {
  __shared__ double shared[kThreads];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partial[blockIdx.x * count + i];
  sum = block_sum<kThreads>(sum, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(sum);
}

// to[b,h,n,:] = Σ from[b, h * share + g, n, :] over g < share, for from [B, heads * share, N, width].
template <class T>
struct HeadSum {
  const T* from;
  T* to;
  int64_t rows, tokens;  // rows of `to`
  int32_t heads, share, width;
  Strides strides;  // of `to`
  bool vectors;     // rows begin and end at 16 bytes
};

// A thread has some neighbouring elements of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) HeadSumKernel(const __grid_constant__ HeadSum<T> sum) {
  constexpr int kVec = 16 / sizeof(T);
  union Part {
    uint4 bits;
    T element[kVec];
  };
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int parts = (sum.width + kVec - 1) / kVec;
  const int64_t row = index / parts, head_row = row / sum.tokens, token = row % sum.tokens;
  if (row >= sum.rows) return;
  const int first = static_cast<int>(index % parts) * kVec, left = sum.width - first;
  const int64_t batch = head_row / sum.heads, head = head_row % sum.heads;
  const T* from = sum.from + (head_row * sum.share * sum.tokens + token) * sum.width + first;
  float total[kVec] = {};
#pragma unroll 4
  for (int g = 0; g < sum.share; ++g, from += sum.tokens * sum.width) {
    Part x;
    if (sum.vectors) x.bits = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < left) total[i] += static_cast<float>(sum.vectors ? x.element[i] : from[i]);
  }
  T* const to = sum.to + batch * sum.strides.batch + head * sum.strides.head + token * sum.strides.token + first;
  Part y;
#pragma unroll
  for (int i = 0; i < kVec; ++i) y.element[i] = static_cast<T>(total[i]);
  if (sum.vectors) *reinterpret_cast<uint4*>(to) = y.bits;
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (!sum.vectors && i < left) to[i] = y.element[i];
}

template <class T>
cudaError_t sum_heads(const Inputs& in, const void* from, void* to, int64_t heads, int32_t share, const Strides& strides,
                      cudaStream_t stream) {
  constexpr int64_t kVec = 16 / sizeof(T);
  HeadSum<T> sum = {};
  sum.from = static_cast<const T*>(from);
  sum.to = static_cast<T*>(to);
  sum.rows = in.batch * heads * in.tokens;
  sum.tokens = in.tokens;
  sum.heads = static_cast<int32_t>(heads);
  sum.share = share;
  sum.width = static_cast<int32_t>(in.key_width);
  sum.strides = strides;
  sum.vectors = in.key_width % kVec == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const int64_t ctas = ceil_div(sum.rows * ceil_div(in.key_width, kVec), int64_t{kThreads});
  if (ctas == 0) return cudaSuccess;
  HeadSumKernel<T><<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(sum);
  return cudaGetLastError();
}

ChunkTensor part_of(ChunkTensor x, int64_t first, int32_t dtype) {
  const int64_t left = x.width - first;
  if (x.data != nullptr) x.data = static_cast<const char*>(x.data) + first * element_size(static_cast<DType>(dtype));
  x.width = static_cast<int32_t>(left < kChunkMaxWidth ? left : kChunkMaxWidth);
  return x;
}

// Gradients of queries or keys, of each head of the output or of each state: where these share heads a buffer of their own.
void* grads_apart(const Inputs& in, void* grad, int64_t heads, bool shared, Workspace& ws) {
  const int64_t bytes = in.batch * heads * in.tokens * in.key_width * element_size(static_cast<DType>(in.dtype));
  char* const buffer = ws.scratch<char>(shared ? bytes : 0);
  return shared ? buffer : grad;
}

// What the three scans have in common.
ChunkScan common_scan(const Inputs& in) {
  ChunkScan scan = {};
  scan.dtype = in.dtype;
  scan.causal = true;
  scan.batch = in.batch;
  scan.requests = scan.state_rows = in.requests;
  scan.tokens = in.tokens;
  scan.cu_seqlens = in.cu_seqlens;
  scan.x_factor.scale = scan.y_factor.scale = scan.z_factor.scale = 1.0f;
  scan.log_decay = in.log_decay;
  scan.decay_per_token = in.decay_per_token;
  scan.decay_batch = in.decay_strides.batch;
  scan.decay_head = in.decay_strides.head;
  scan.decay_token = in.decay_strides.token;
  return scan;
}

// The three scans over whole rows, of which each runs a part of up to kChunkMaxWidth columns.
struct GradScans {
  ChunkTensor query, key, value, grad_output;
  ChunkScan of_query, of_key, of_value;
};

GradScans scans_of(const GradArgs& args, void* query_grads, void* key_grads) {
  const Inputs& in = args.in;
  const int64_t R = in.key_width, V = in.value_width, state_floats = R * V, group = in.heads / in.v_heads;
  GradScans scans = {};
  scans.query = chunk_tensor(in.query, in.query_strides, R);
  scans.key = chunk_tensor(in.key, in.key_strides, R);
  scans.value = chunk_tensor(in.value, in.value_strides, V);
  scans.grad_output = chunk_tensor(args.grad_output, in.output_strides, V);
  const auto strides_of = [&](const ChunkTensor& x, int64_t heads, bool shared) {
    return shared ? ChunkTensor{nullptr, heads * in.tokens * R, in.tokens * R, R, x.width} : x;
  };

  ChunkScan& of_query = scans.of_query = common_scan(in);
  of_query.heads = static_cast<int32_t>(in.heads);
  of_query.x_group = static_cast<int32_t>(group);
  of_query.y_group = 1;
  of_query.x = scans.grad_output;
  of_query.y = scans.value;
  of_query.z = scans.key;
  of_query.z_share = in.key_share;
  of_query.source_share = in.query_share;
  of_query.out = query_grads;
  of_query.out_strides = strides_of(scans.query, in.heads, in.query_share > 1);
  of_query.x_factor.scale = in.scale;
  of_query.initial = {const_cast<float*>(args.initial_state), 1, V, state_floats, nullptr, nullptr, nullptr};

  ChunkScan& of_key = scans.of_key = common_scan(in);
  of_key.reverse = true;
  of_key.heads = static_cast<int32_t>(in.v_heads);
  of_key.x_group = 1;
  of_key.y_group = static_cast<int32_t>(group);
  of_key.x = scans.value;
  of_key.y = scans.grad_output;
  of_key.z = scans.query;
  of_key.z_share = in.query_share;
  of_key.source_share = in.key_share;
  of_key.out = key_grads;
  of_key.out_strides = strides_of(scans.key, in.v_heads, in.key_share > 1);
  of_key.y_factor.scale = in.scale;
  of_key.initial = {const_cast<float*>(args.grad_final_state), 1, V, state_floats, nullptr, nullptr, nullptr};

  ChunkScan& of_value = scans.of_value = of_key;
  of_value.x = scans.key;
  of_value.y = scans.query;
  of_value.z = scans.grad_output;
  of_value.x_share = in.key_share;
  of_value.y_share = in.query_share;
  of_value.z_share = of_value.source_share = 1;
  of_value.out = args.grad_value;
  of_value.out_strides = scans.value;
  of_value.initial.k_stride = V;
  of_value.initial.v_stride = 1;
  of_value.last = {args.grad_initial_state, V, 1, state_floats, nullptr, nullptr, nullptr};
  of_value.final_decayed = true;
  return scans;
}

// Scans, kMaxTogether of them at a time.
struct ScanQueue {
  const CudaTarget& target;
  Workspace& ws;
  ChunkScan scans[kMaxTogether] = {};
  int count = 0, failed = cudaSuccess;

  void add(const ChunkScan& one) {
    scans[count++] = one;
    if (count == kMaxTogether) run();
  }
  void run() {
    if (failed == cudaSuccess) failed = chunk_scans(scans, count, target, ws);
    count = 0;
  }
};

// What the gradient of the decay takes of the scans of queries and of keys, which have the same segments for it.
struct DecayGrad {
  const GradArgs& args;
  ChunkScan plan;  // has these segments
  DecayGradSums sums = {};
  float *query_dots = nullptr, *key_dots = nullptr, *final_states = nullptr, *final_dots = nullptr;

  DecayGrad(const GradArgs& args, const GradScans& scans, int parts, const CudaTarget& target, Workspace& ws)
      : args(args), plan(scans.of_key) {
    const Inputs& in = args.in;
    plan.y = plan.x = part_of(scans.value, 0, in.dtype);
    chunk_scan_plan(plan, target.sm_count);
    if (!args.wants_grad_decay) return;
    sums.in = in;
    sums.parts = parts;
    sums.segments = plan.segments;
    sums.segment_tokens = plan.segment_tokens;
    sums.slot_floats = plan.slot_floats;
    sums.query_slices = sums.key_slices = parts * plan.slices;
    query_dots = ws.scratch<float>(sums.query_slices * in.batch * in.heads * in.tokens);
    key_dots = ws.scratch<float>(sums.key_slices * in.batch * in.v_heads * in.tokens);
    sums.query_dots = query_dots;
    sums.key_dots = key_dots;
    if (args.has_grad_final_state) {
      final_states = ws.scratch<float>(in.requests * in.v_heads * in.key_width * in.value_width);
      final_dots = ws.scratch<float>(in.requests * in.v_heads);
    }
    if (!in.decay_per_token) sums.partial = ws.scratch<double>(in.batch * in.v_heads * plan.segments);
  }

  ChunkScan with_segments(ChunkScan one) const {
    one.segments = plan.segments;
    one.segment_tokens = plan.segment_tokens;
    one.slot_floats = plan.slot_floats;
    one.slices = plan.slices;
    one.own_slots = true;
    return one;
  }
  ChunkScan with_slots(const ChunkScan& scan, Workspace& ws) const {
    ChunkScan one = with_segments(scan);
    one.slots = ws.scratch<float>(chunk_scan_slots(one) * plan.slot_floats);
    return one;
  }

  // A part of the scan of queries or, in reverse, of keys, that also leaves its states and the dots of its rows.
  ChunkScan watched(const ChunkScan& scan, const GradScans& scans, int part, Workspace& ws) {
    const Inputs& in = args.in;
    ChunkScan one = with_slots(scan, ws);
    sums.slot_sums[part] = one.y.width * in.key_width;
    const int64_t dots = static_cast<int64_t>(part) * plan.slices * in.batch * in.tokens;
    if (one.reverse) {
      sums.reverse_slots[part] = one.slots;
      one.source = scans.key;
      one.row_dot = key_dots + dots * in.v_heads;
    } else {
      sums.forward_slots[part] = one.slots;
      one.source = scans.query;
      one.row_dot = query_dots + dots * in.heads;
      if (final_states != nullptr)
        one.last = {final_states + static_cast<int64_t>(part) * kChunkMaxWidth,
                    1,
                    in.value_width,
                    in.key_width * in.value_width,
                    nullptr,
                    nullptr,
                    nullptr};
    }
    return one;
  }

  // Behind all scans.
  cudaError_t launch(cudaStream_t stream) {
    const Inputs& in = args.in;
    sums.grad_log_decay = args.grad_log_decay;
    if (in.tokens == 0 || in.batch == 0) {
      const size_t bytes = sizeof(float) * static_cast<size_t>(in.decay_per_token ? 0 : in.v_heads);
      return bytes == 0 ? cudaSuccess : cudaMemsetAsync(args.grad_log_decay, 0, bytes, stream);
    }
    if (final_states != nullptr && in.requests > 0) {
      StateDotKernel<<<static_cast<unsigned>(in.requests * in.v_heads), kThreads, 0, stream>>>(
          final_states, args.grad_final_state, in.key_width * in.value_width, final_dots);
      sums.final_dots = final_dots;
    }
    const dim3 grid(static_cast<unsigned>(sums.segments), static_cast<unsigned>(in.v_heads), static_cast<unsigned>(in.batch));
    DecayGradKernel<<<grid, kThreads, 0, stream>>>(sums);
    if (sums.partial != nullptr)
      DecayGradTotalKernel<<<static_cast<unsigned>(in.v_heads), kThreads, 0, stream>>>(sums.partial, in.batch * sums.segments,
                                                                                       args.grad_log_decay);
    return cudaGetLastError();
  }
};

// The gradient of the initial state of requests without tokens, which no scan writes: that of the final one.
cudaError_t hand_on_states(const GradArgs& args, cudaStream_t stream) {
  const Inputs& in = args.in;
  if (args.grad_initial_state == nullptr || (in.cu_seqlens == nullptr && in.tokens > 0)) return cudaSuccess;
  const size_t bytes = sizeof(float) * static_cast<size_t>(in.requests * in.v_heads * in.key_width * in.value_width);
  return args.grad_final_state != nullptr
             ? cudaMemcpyAsync(args.grad_initial_state, args.grad_final_state, bytes, cudaMemcpyDeviceToDevice, stream)
             : cudaMemsetAsync(args.grad_initial_state, 0, bytes, stream);
}

// Gradients of shared queries and keys out of those apart.
cudaError_t sum_shared(const GradArgs& args, const void* query_grads, const void* key_grads, cudaStream_t stream) {
  const Inputs& in = args.in;
  const auto sum = [&](const void* from, void* to, int64_t heads, int32_t share, const Strides& strides) -> cudaError_t {
    if (share == 1) return cudaSuccess;
    return with_type(in.dtype,
                     [&](auto type) { return sum_heads<decltype(type)>(in, from, to, heads, share, strides, stream); });
  };
  const cudaError_t error = sum(query_grads, args.grad_query, in.q_heads, in.query_share, in.query_strides);
  return error != cudaSuccess ? error : sum(key_grads, args.grad_key, in.k_heads, in.key_share, in.key_strides);
}

}  // namespace

int launch_grad(const GradArgs& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  void* const query_grads = grads_apart(in, args.grad_query, in.heads, in.query_share > 1, ws);
  void* const key_grads = grads_apart(in, args.grad_key, in.v_heads, in.key_share > 1, ws);
  const GradScans scans = scans_of(args, query_grads, key_grads);
  if (!ws.counting()) {
    const cudaError_t error = hand_on_states(args, stream);
    if (error != cudaSuccess) return error;
  }
  const int parts = static_cast<int>(ceil_div(in.value_width, kChunkMaxWidth));
  if (parts > kMaxParts) return cudaErrorNotSupported;
  DecayGrad decay(args, scans, parts, target, ws);

  ScanQueue queue{target, ws};
  for (int part = 0; part < parts; ++part) {
    const int64_t first = static_cast<int64_t>(part) * kChunkMaxWidth;
    for (ChunkScan one : {scans.of_query, scans.of_key}) {
      one.x = part_of(one.x, first, in.dtype);
      one.y = part_of(one.y, first, in.dtype);
      one.accumulate = part > 0;
      if (one.initial.state != nullptr) one.initial.state += first;
      queue.add(args.wants_grad_decay ? decay.watched(one, scans, part, ws) : one);
    }
  }
  for (int64_t first = 0; first < in.key_width; first += kChunkMaxWidth) {
    ChunkScan one = scans.of_value;
    one.x = part_of(one.x, first, in.dtype);
    one.y = part_of(one.y, first, in.dtype);
    one.accumulate = first > 0;
    if (one.initial.state != nullptr) one.initial.state += first * in.value_width;
    if (one.last.state != nullptr) one.last.state += first * in.value_width;
    // Like the other two, if it then runs beside them.
    const bool beside =
        args.wants_grad_decay && parts == 1 && first == 0 && chunk_scans_join(queue.scans[1], decay.with_segments(one), target);
    queue.add(beside ? decay.with_slots(one, ws) : one);
  }
  queue.run();
  if (queue.failed != cudaSuccess) return queue.failed;
  if (ws.counting()) return cudaSuccess;
  const cudaError_t error = sum_shared(args, query_grads, key_grads, stream);
  return error != cudaSuccess || !args.wants_grad_decay ? error : decay.launch(stream);
}

}  // namespace leanfleet::causal_linear_decay
