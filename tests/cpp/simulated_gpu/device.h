// Runs CUDA kernels on the host: included into .cu files that tests/support/simulated_gpu.py has translated to C++. Each
// thread of a CTA is a fiber, which runs until it has to wait for others: at a barrier, or in a warp's exchange. Threads are
// taken in an order that a seed shuffles, another one each round, so that a result which depends on the order shows (a missing
// barrier). A thread that waits for one that has ended, or for ever, ends the launch with cudaErrorLaunchFailure. Global memory
// is the host's. Nothing here is about speed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#undef __launch_bounds__
#undef __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __noinline__

namespace simulated {

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
};

const Place& place();        // of the thread that runs
void* dynamic_shared();      // of its CTA
void block_barrier();        // __syncthreads
int block_votes(bool vote);  // __syncthreads_count
// All lanes of `mask` bring so many bytes, kMost at most; `all` gets those of the 32 lanes, unspecified for lanes outside of
// the mask.
constexpr size_t kMost = 32;
void exchange(unsigned mask, const void* mine, void* all, size_t bytes);
int lane();
// Shared memory as instructions address it. from_shared ends the launch for an address that is no multiple of `alignment`.
uint32_t shared_address(const void* pointer);
char* from_shared(uint32_t address, unsigned alignment);
// Copies of a thread wait for its cp.async.wait_group: what reads them too early reads what was there before.
void copy_later(uint32_t to, const void* from, int size, int read);
void commit_copies();
void wait_for_copies(size_t groups);
void count_product();
void count_group_product();
// Barriers by number: whether to wait too. For instructions that wait in a loop: a pause, and what ends the others' waits.
bool named_barrier(int id, int threads, bool waits, bool vote = false);  // whether one of those that meet votes for it
void pause();
void note_progress();
uint32_t shared_base();  // what address 0 of the window of shared memory is here
struct TensorMap {       // what a CUtensorMap holds: of 16-bit elements, strides in bytes without the first
  const char* data;
  uint64_t sizes[4], strides[3];
  uint32_t box_rows;
};
void unsupported();  // an instruction that is not simulated: ends the launch
void run(dim3 blocks, dim3 threads, size_t shared_bytes, const std::function<void()>& thread);

// What kernel<<<blocks, threads, shared, stream>>> is translated to. Arguments are copied, as a launch does.
template <class... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  return [=](Parameters... arguments) { run(blocks, threads, shared_bytes, [&] { kernel(arguments...); }); };
}

template <class T>
T from_lane(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  alignas(T) char all[32][sizeof(T)];
  exchange(mask, &value, all, sizeof(T));
  std::memcpy(&value, all[source], sizeof(T));
  return value;
}

inline unsigned votes(unsigned mask, bool vote) {
  bool all[32];
  exchange(mask, &vote, all, 1);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0 && all[i]) result |= 1u << i;
  return result;
}

// Instructions, by the names that the translation gives them. Fragments: PTX ISA, "Matrix fragments for mma.m16n8k16".
constexpr unsigned kWholeWarp = 0xffffffffu;
using Rows = uint16_t[8];

inline void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int size, int read) {
  copy_later(to, from, size, read);
}
inline void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int size, int read) {
  copy_later(to, from, size, read);
}
inline void ptx_cp_async_commit_group() { commit_copies(); }
inline void ptx_cp_async_wait_group(int groups) { wait_for_copies(static_cast<size_t>(groups)); }
inline void ptx_cp_async_wait_all() { commit_copies(), wait_for_copies(0); }
inline void ptx_fence_proxy_async_shared_cta() {}
inline void ptx_st_shared_v4_b32(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  std::memcpy(from_shared(to, 16), x, 16);
}
inline void ptx_st_shared_v2_b32(uint32_t to, uint32_t a, uint32_t b) {
  const uint32_t x[2] = {a, b};
  std::memcpy(from_shared(to, 8), x, 8);
}
inline void ptx_st_shared_b32(uint32_t to, uint32_t x) { std::memcpy(from_shared(to, 4), &x, 4); }
inline void ptx_st_shared_b16(uint32_t to, uint16_t x) { std::memcpy(from_shared(to, 2), &x, 2); }
inline void ptx_ld_shared_v4_b32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  uint32_t x[4];
  std::memcpy(x, from_shared(from, 16), 16);
  a = x[0], b = x[1], c = x[2], d = x[3];
}
inline void ptx_ld_shared_b32(uint32_t& x, uint32_t from) { std::memcpy(&x, from_shared(from, 4), 4); }
inline void ptx_ld_shared_v2_f32(float& a, float& b, uint32_t from) {
  const char* const at = static_cast<const char*>(from_shared(from, 8));
  std::memcpy(&a, at, 4), std::memcpy(&b, at + 4, 4);
}
inline void ptx_ld_shared_b16(uint16_t& x, uint32_t from) { std::memcpy(&x, from_shared(from, 2), 2); }

// Lane 8 i + n brings the address of row n of matrix i; it gets two neighbours of row lane / 4, or of column lane / 4.
template <bool transposed>
void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  uint32_t rows[32];
  exchange(kWholeWarp, &from, rows, 4);
  const int outer = lane() / 4, inner = lane() % 4 * 2;
  uint32_t* const to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int row = transposed ? inner + j : outer, column = transposed ? outer : inner + j;
      std::memcpy(&pair[j], from_shared(rows[8 * i + row], 16) + 2 * column, 2);
    }
    std::memcpy(to[i], pair, 4);
  }
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  load_matrices<false>(a, b, c, d, from);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                               uint32_t from) {
  load_matrices<true>(a, b, c, d, from);
}
inline void ptx_movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& y, uint32_t x) {
  uint16_t all[32][2], pair[2];
  exchange(kWholeWarp, &x, all, 4);
  const int column = lane() / 4;
  for (int j = 0; j < 2; ++j) pair[j] = all[4 * (lane() % 4 * 2 + j) + column / 2][column % 2];
  std::memcpy(&y, pair, 4);
}

template <class T>
void multiply(float* const (&to)[4], const uint32_t (&mine)[6], const float (&added)[4]) {
  uint16_t all[32][6][2];  // [lane][a0 a1 a2 a3 b0 b1][low, high]
  exchange(kWholeWarp, mine, all, sizeof(mine));
  count_product();
  const auto value = [](uint16_t bits) {
    T x;
    std::memcpy(&x, &bits, 2);
    return static_cast<double>(static_cast<float>(x));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4, upper = i / 2, column = lane() % 4 * 2 + i % 2;
    double sum = added[i];
    for (int k = 0; k < 16; ++k)
      sum += value(all[4 * row + k % 8 / 2][upper + 2 * (k / 8)][k % 2]) * value(all[4 * column + k % 8 / 2][4 + k / 8][k % 2]);
    *to[i] = static_cast<float>(sum);
  }
}
#define LEANFLEET_MMA(name, T)                                                                                     \
  inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                   uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {                             \
    multiply<T>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, {c0, c1, c2, c3});                                 \
  }
LEANFLEET_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, __half)
LEANFLEET_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, __nv_bfloat16)
#undef LEANFLEET_MMA
// Of bytes, int8 or uint8.
template <class A, class B>
void multiply_bytes(int* const (&to)[4], const uint32_t (&mine)[6], const int (&added)[4]) {
  uint8_t all[32][6][4];  // [lane][a0 a1 a2 a3 b0 b1][byte]
  exchange(kWholeWarp, mine, all, sizeof(mine));
  count_product();
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4, upper = i / 2, column = lane() % 4 * 2 + i % 2;
    int64_t sum = added[i];
    for (int k = 0; k < 32; ++k)
      sum += static_cast<A>(all[4 * row + k % 16 / 4][upper + 2 * (k / 16)][k % 4]) *
             static_cast<B>(all[4 * column + k % 16 / 4][4 + k / 16][k % 4]);
    if (sum != static_cast<int>(sum)) unsupported();
    *to[i] = static_cast<int>(sum);
  }
}
#define LEANFLEET_MMA(name, A, B)                                                                                       \
  inline void name(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, \
                   uint32_t b1, int c0, int c1, int c2, int c3) {                                                       \
    multiply_bytes<A, B>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, {c0, c1, c2, c3});                             \
  }
LEANFLEET_MMA(ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, int8_t, int8_t)
LEANFLEET_MMA(ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_u8_s32, int8_t, uint8_t)
#undef LEANFLEET_MMA
inline void ptx_ld_global_nc_L1_no_allocate_L2_128B_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                           const void* from) {
  uint32_t x[4];
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) unsupported();
  std::memcpy(x, from, 16);
  a = x[0], b = x[1], c = x[2], d = x[3];
}
inline void ptx_ld_global_nc_L1_no_allocate_L2_128B_v2_u32(uint32_t& a, uint32_t& b, const void* from) {
  uint32_t x[2];
  if (reinterpret_cast<uintptr_t>(from) % 8 != 0) unsupported();
  std::memcpy(x, from, 8);
  a = x[0], b = x[1];
}
inline void ptx_ld_global_nc_L1_no_allocate_L2_128B_u32(uint32_t& x, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 != 0) unsupported();
  std::memcpy(&x, from, 4);
}
inline void ptx_mad_wide_u32(const char*& y, uint32_t a, uint32_t b, const char* c) { y = c + static_cast<uint64_t>(a) * b; }
inline void ptx_fma_rn_bf16x2(uint32_t& y, uint32_t a, uint32_t b, uint32_t c) {
  __nv_bfloat16 x[3][2];
  std::memcpy(x[0], &a, 4), std::memcpy(x[1], &b, 4), std::memcpy(x[2], &c, 4);
  for (int i = 0; i < 2; ++i)
    x[0][i] = __double2bfloat16(static_cast<double>(static_cast<float>(x[0][i])) * static_cast<float>(x[1][i]) +
                                static_cast<float>(x[2][i]));
  std::memcpy(&y, x[0], 4);
}
inline void ptx_prefetch_global_L2(const void*) {}
inline void ptx_activemask_b32(int& mask) { mask = -1; }
inline void ptx_griddepcontrol_wait() {}
inline void ptx_setmaxnreg_dec_sync_aligned_u32(int) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int) {}
inline void ptx_griddepcontrol_launch_dependents() {}
inline void ptx_fence_mbarrier_init_release_cluster() {}
inline void ptx_atom_acq_rel_gpu_global_inc_u32(uint32_t& before, uint32_t* at, uint32_t most) {
  before = *at;
  *at = before >= most ? 0 : before + 1;
}
inline void ptx_ex2_approx_ftz_f32(float& y, float x) { y = std::exp2(x); }
inline void ptx_rcp_approx_ftz_f32(float& y, float x) { y = 1.0f / x; }

}  // namespace simulated

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
namespace simulated {
template <class... Parameters, class... Arguments>
cudaError_t launch_ex(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes)(arguments...);
  return cudaGetLastError();
}
}  // namespace simulated
#define cudaLaunchKernelEx simulated::launch_ex
#define __CUDA_ARCH_FEAT_SM90_ALL 1
inline size_t __cvta_generic_to_shared(const void* pointer) { return simulated::shared_address(pointer); }

inline void __syncthreads() { simulated::block_barrier(); }
inline int __syncthreads_count(int vote) { return simulated::block_votes(vote != 0); }
inline int __syncthreads_or(int vote) { return simulated::block_votes(vote != 0) != 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simulated::votes(mask, false); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = simulated::lane() / width * width;
  return simulated::from_lane(mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int other = simulated::lane() ^ bits;
  return simulated::from_lane(mask, value, other / width == simulated::lane() / width ? other : simulated::lane());
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int other = simulated::lane() - static_cast<int>(delta);
  return simulated::from_lane(mask, value, other >= simulated::lane() / width * width ? other : simulated::lane());
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int other = simulated::lane() + static_cast<int>(delta);
  return simulated::from_lane(mask, value, other / width == simulated::lane() / width ? other : simulated::lane());
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return simulated::votes(mask, vote != 0) == mask; }

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T>
T atomicOr(T* address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}
template <class T>
T atomicExch(T* address, T value) {
  const T before = *address;
  *address = value;
  return before;
}
inline void __threadfence() {}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __log2f(float x) { return std::log2(x); }
// A product of two halves is exact in float32, its sum with a third in double.
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  const auto of = [](__half a, __half b, __half c) {
    return __double2half(static_cast<double>(__half2float(a) * __half2float(b)) + __half2float(c));
  };
  return {of(x.x, y.x, z.x), of(x.y, y.y, z.y)};
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x >> 8 * i) * static_cast<int8_t>(y >> 8 * i);
  return sum;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
#ifndef LEANFLEET_NO_RSQRT
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#endif
