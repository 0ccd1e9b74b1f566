// A team of threads has a unit: it asks for all that it keeps in registers at once, adds up squares, and writes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/dependent_launch.cuh"
#include "core/mma.cuh"
#include "core/op.h"
#include "core/with_type.cuh"
#include "rms_norm/rms_norm.h"

namespace leanfleet::rms_norm {

namespace {

constexpr int threads_of(int team) { return team > 32 ? team : 256; }  // of a CTA

// 16 bytes of T, or one number of it.
template <class T, bool kWide>
struct Words {
  static constexpr int kColumns = kWide ? 16 / sizeof(T) : 1;
  using Raw = std::conditional_t<kWide, uint4, T>;
  Raw raw;

  __device__ __forceinline__ void load(const T* from) { raw = *reinterpret_cast<const Raw*>(from); }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Raw*>(to) = raw; }
  __device__ __forceinline__ void numbers(float (&x)[kColumns]) const {
    if constexpr (!kWide) {
      x[0] = static_cast<float>(raw);
    } else if constexpr (sizeof(T) == 4) {
      x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y), x[2] = __uint_as_float(raw.z),
      x[3] = __uint_as_float(raw.w);
    } else {
      const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = tile::unpack_pair(T{}, pairs[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void round(const float (&x)[kColumns]) {
    if constexpr (!kWide) {
      raw = static_cast<T>(x[0]);
    } else if constexpr (sizeof(T) == 4) {
      raw = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    } else {
      raw = make_uint4(tile::pack_pair(T{}, x[0], x[1]), tile::pack_pair(T{}, x[2], x[3]), tile::pack_pair(T{}, x[4], x[5]),
                       tile::pack_pair(T{}, x[6], x[7]));
    }
  }
};

// A unit's columns: where its input, its gate, and what has the output's shape begin.
template <class T>
struct Unit {
  const T *input, *gate;
  int64_t at, weight;
};

template <class T>
__device__ __forceinline__ Unit<T> unit_at(const Args& args, int64_t row, int64_t first) {
  return {static_cast<const T*>(args.input) + row * args.input_pitch + first,
          static_cast<const T*>(args.gate) + row * args.gate_pitch + first, row * args.width + first, first};
}

// Some columns of a unit, from their loads to their stores.
template <class T, bool kWide>
struct Columns {
  using W = Words<T, kWide>;
  static constexpr int kColumns = W::kColumns;
  W input, addend, gate;
  float x[kColumns];

  __device__ __forceinline__ void load(const Args& args, const Unit<T>& unit, int64_t column) {
    input.load(unit.input + column);
    if (args.addend != nullptr) addend.load(static_cast<const T*>(args.addend) + unit.at + column);
    if (args.gate != nullptr) gate.load(unit.gate + column);
  }
  // What is normalised.
  __device__ __forceinline__ void make(const Args& args, const Unit<T>& unit, int64_t column, bool writes_sum) {
    input.numbers(x);
    if (args.addend != nullptr) {
      float added[kColumns];
      addend.numbers(added);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) added[i] += x[i];
      input.round(added);
      input.numbers(x);
      if (writes_sum && args.sum != nullptr) input.store(static_cast<T*>(args.sum) + unit.at + column);
    }
    if (args.gate_first) multiply_by_gate(args);
  }
  __device__ __forceinline__ void multiply_by_gate(const Args& args) {
    float by[kColumns];
    gate.numbers(by);
    const bool silu = args.activation == Kind::kSilu;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] *= __fdividef(silu ? by[i] : 1.0f, 1.0f + __expf(-by[i]));
  }
  __device__ __forceinline__ float squares(float sum) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum = fmaf(x[i], x[i], sum);
    return sum;
  }
  __device__ __forceinline__ float squares(float sum, float scale) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum = fmaf(x[i] * scale, x[i] * scale, sum);
    return sum;
  }
  __device__ __forceinline__ float largest(float most) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(x[i]));
    return most;
  }
  __device__ __forceinline__ void write(const Args& args, const Unit<T>& unit, int64_t column, float factor,
                                        const float (&weights)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = x[i] * factor * weights[i];
    if (args.gate != nullptr && !args.gate_first) multiply_by_gate(args);
    input.round(x);
    input.store(static_cast<T*>(args.output) + unit.at + column);
  }
  static __device__ __forceinline__ void load_weights(const float* from, float (&weights)[kColumns]) {
    if constexpr (kColumns == 1) {
      weights[0] = *from;
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4)
        *reinterpret_cast<float4*>(weights + i) = *reinterpret_cast<const float4*>(from + i);
    }
  }
};

// combine() over a team. shared: of kTeam / 32 numbers, for a team that is a CTA.
template <int kTeam, class F>
__device__ __forceinline__ float over_team(float x, float* shared, F&& combine) {
#pragma unroll
  for (int offset = (kTeam < 32 ? kTeam : 32) / 2; offset > 0; offset /= 2)
    x = combine(x, __shfl_xor_sync(tile::kFullWarp, x, offset));
  if constexpr (kTeam > 32) {
    __syncthreads();  // earlier ones have been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int i = 1; i < kTeam / 32; ++i) x = combine(x, shared[i]);
  }
  return x;
}

// The row of a unit, of which each row has `groups`.
__device__ __forceinline__ int64_t row_of_unit(int64_t unit, int64_t groups) {
  if (groups == 1) return unit;
  if ((unit | groups) <= UINT32_MAX) return static_cast<uint32_t>(unit) / static_cast<uint32_t>(groups);
  return unit / groups;
}

// kTeam: threads that have a unit: of a warp, or all of a CTA. kHeld: columns that a thread keeps, in 16 bytes or, not kWide, single
// ones; of units with more the others are read again. A CTA of several teams has units one after the other; teams behind the last
// unit do what that of the last one does, and write nothing.
template <class T, int kTeam, int kHeld, bool kWide>
__global__ void __launch_bounds__(threads_of(kTeam), kTeam > 32  ? 512 / kTeam
                                                     : kHeld > 1 ? 3
                                                                 : 5)
    RmsNormKernel(const __grid_constant__ Args args, int64_t first_cta) {
  using C = Columns<T, kWide>;
  constexpr int kStep = kTeam * C::kColumns, kUnits = threads_of(kTeam) / kTeam;
  __shared__ float shared[threads_of(kTeam) / 32];
  let_next_launch_begin();
  wait_for_launch_before();
  const int64_t group = args.group, groups = args.width / group, units = args.rows * groups;
  const int64_t first = static_cast<int64_t>(threadIdx.x) % kTeam * C::kColumns, behind = first + int64_t{kHeld} * kStep;
  const auto add = [](float a, float b) { return a + b; };
  const int64_t own = (first_cta + blockIdx.x) * kUnits + threadIdx.x / kTeam;
  const bool exists = own < units;
  const int64_t index = exists ? own : units - 1, row = row_of_unit(index, groups);
  const Unit<T> unit = unit_at<T>(args, row, (index - row * groups) * group);
  C held[kHeld];
  float weights[kHeld][C::kColumns];
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    if (first + j * kStep < group) held[j].load(args, unit, first + j * kStep);
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    if (first + j * kStep < group) C::load_weights(args.weight + unit.weight + first + j * kStep, weights[j]);
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (first + j * kStep < group) {
      held[j].make(args, unit, first + j * kStep, exists);
      squares = held[j].squares(squares);
    }
  }
  // What is not kept, one after the other.
  const auto for_others = [&](auto&& take) {
    if constexpr (kTeam > 32) {  // launch_type has smaller teams keep all
#pragma unroll 1
      for (int64_t column = behind; column < group; column += kStep) {
        C columns;
        columns.load(args, unit, column);
        columns.make(args, unit, column, exists);
        take(columns, column);
      }
    }
  };
  for_others([&](const C& columns, int64_t) { squares = columns.squares(squares); });
  const float sum = over_team<kTeam>(squares, shared, add), count = static_cast<float>(group);
  float factor = 1.0f / sqrtf(sum / count + args.epsilon);
  const bool lost = !(sum <= kMostSum && (sum >= kLeastSum || args.epsilon >= kLeastEpsilon));
  // Float32 has lost something: again of numbers times a power of two. The same in the whole team, and in all teams of a warp.
  if (kTeam > 32 ? lost : __any_sync(tile::kFullWarp, lost)) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (first + j * kStep < group) most = held[j].largest(most);
    for_others([&](const C& columns, int64_t) { most = columns.largest(most); });
    most = over_team<kTeam>(most, shared, [](float a, float b) { return fmaxf(a, b); });
    const float scale = exp2f(fminf(fmaxf(-rintf(log2f(most)), -126.0f), 60.0f));
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (first + j * kStep < group) squares = held[j].squares(squares, scale);
    for_others([&](const C& columns, int64_t) { squares = columns.squares(squares, scale); });
    squares = over_team<kTeam>(squares, shared, add);
    if (lost) factor = scale / sqrtf(squares / count + args.epsilon * scale * scale);
  }
  if (unit.weight >= args.normed) factor = 1.0f;
  if (exists) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (first + j * kStep < group) held[j].write(args, unit, first + j * kStep, factor, weights[j]);
    for_others([&](C& columns, int64_t column) {
      C::load_weights(args.weight + unit.weight + column, weights[0]);
      columns.write(args, unit, column, factor, weights[0]);
    });
  }
}

template <class T, int kTeam, int kHeld, bool kWide>
int launch_team(const Args& args, cudaStream_t stream) {
  constexpr int64_t kUnits = threads_of(kTeam) / kTeam;
  const int64_t ctas = (args.rows * (args.width / args.group) + kUnits - 1) / kUnits;
  for (int64_t first = 0; first < ctas; first += INT32_MAX) {
    const dim3 blocks(static_cast<unsigned>(ctas - first < INT32_MAX ? ctas - first : INT32_MAX));
    const cudaError_t error =
        launch_dependently<RmsNormKernel<T, kTeam, kHeld, kWide>>(blocks, threads_of(kTeam), stream, args, first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class T>
int launch_type(const Args& args, cudaStream_t stream) {
  constexpr int64_t kColumns = 16 / sizeof(T);
  bool wide = args.group % kColumns == 0 && args.input_pitch % kColumns == 0 && args.gate_pitch % kColumns == 0;
  for (const void* data : {args.input, static_cast<const void*>(args.weight), args.addend, args.gate,
                           static_cast<const void*>(args.output), static_cast<const void*>(args.sum)})
    wide = wide && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  if (!wide)
    return args.group <= 128 ? launch_team<T, 32, 4, false>(args, stream) : launch_team<T, 256, 4, false>(args, stream);
  if (args.group <= 16 * kColumns) return launch_team<T, 16, 1, true>(args, stream);
  if (args.group <= 64 * kColumns) return launch_team<T, 32, 2, true>(args, stream);
  if (args.group <= 256 * kColumns) return launch_team<T, 128, 2, true>(args, stream);
  return launch_team<T, 256, 2, true>(args, stream);
}

}  // namespace

int launch(const Args& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, cuda_stream); });
}

}  // namespace leanfleet::rms_norm
