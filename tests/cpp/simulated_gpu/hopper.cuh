// In place of csrc/core/hopper.cuh. Copies and products are done at once: a wait that is missing does not show.
#pragma once

#include <cuda.h>

#include "core/mma.cuh"

namespace leanfleet {
namespace hopper {

using namespace tile;

inline void fence_proxy_async() {}
inline uint4 load_16_bytes_if(uint32_t from, uint32_t load) { return load != 0 ? load_16_bytes(from) : make_uint4(0, 0, 0, 0); }
inline uint2 load_8_bytes_if(uint32_t from, uint32_t load) {
  uint2 x = make_uint2(0, 0);
  if (load != 0) std::memcpy(&x, simulated::from_shared(from, 8), 8);
  return x;
}
inline void stay_behind(float, uint32_t) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit() {}
template <int kLeft>
void warpgroup_wait() {}
template <class T>
void fence_accumulators(T&) {}
template <class T>
void fence_operands(const T&) {}
template <class T>
void fence_operands_for_write(T&) {}

// The chunk of 16 bytes that the swizzle puts at an address.
inline char* swizzled(uint32_t address) { return simulated::from_shared(address ^ (address >> 7 & 7) << 4, 2); }

// Numbers from a row and a column of a matrix on, 0 beyond it.
inline void load_box(uint32_t to, const simulated::TensorMap& m, const char* from, int column, int row, int rows,
                     uint32_t barrier) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < 64; ++c) {
      const uint64_t t = static_cast<uint64_t>(row + r), x = static_cast<uint64_t>(column + c);
      uint16_t value = 0;
      if (t < m.sizes[1] && x < m.sizes[0]) std::memcpy(&value, from + t * m.strides[0] + 2 * x, 2);
      std::memcpy(swizzled(to + static_cast<uint32_t>(r * 128 + 2 * c)), &value, 2);
    }
  mbarrier_landed(barrier, rows * 128);
}
inline void tma_load(uint32_t to, const CUtensorMap* map, int column, int token, int head, int batch, uint32_t barrier) {
  const simulated::TensorMap& m = *reinterpret_cast<const simulated::TensorMap*>(map);
  const char* const from = m.data + static_cast<uint64_t>(head) * m.strides[1] + static_cast<uint64_t>(batch) * m.strides[2];
  load_box(to, m, from, column, token, 64, barrier);
}
inline void prefetch_map(const CUtensorMap*) {}
constexpr uint64_t kEvictFirst = 0, kEvictLast = 0;
inline void tma_load_rows(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t) {
  const simulated::TensorMap& m = *reinterpret_cast<const simulated::TensorMap*>(map);
  load_box(to, m, m.data, column, row, static_cast<int>(m.box_rows), barrier);
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) simulated::unsupported();
  std::memcpy(simulated::from_shared(to, 16), from, bytes);
  mbarrier_landed(barrier, static_cast<int>(bytes));
}

inline void store_matrices_transposed(uint32_t to, const uint32_t (&r)[4]) {
  uint32_t rows[32];
  simulated::exchange(simulated::kWholeWarp, &to, rows, 4);
  const int lane = simulated::lane();
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      const uint16_t half = static_cast<uint16_t>(r[i] >> 16 * j);
      std::memcpy(simulated::from_shared(rows[8 * i + lane % 4 * 2 + j], 16) + 2 * (lane / 4), &half, 2);
    }
  simulated::votes(simulated::kWholeWarp, false);
}

inline uint32_t make_smem_descriptor(uint32_t address, int box_bytes) {
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(box_bytes >> 4) << 16;
}

// c (+)= a times the tile that the descriptor tells, as a warp's 16 rows of a warpgroup's product.
template <bool kRowsSummed, class T, int kTiles>
void wgmma_rs(T, float (&c)[kTiles][4], const uint32_t (&a)[4], uint32_t b, int add) {
  uint16_t left[32][4][2];
  simulated::exchange(simulated::kWholeWarp, a, left, sizeof(a));
  simulated::count_group_product();
  const uint32_t base = simulated::shared_base() + ((b & 0x3fff) << 4), box = b >> 16 << 4;
  const int lane = simulated::lane();
  const auto value = [](const void* bits) {
    T x;
    std::memcpy(&x, bits, 2);
    return static_cast<float>(x);
  };
  for (int n = 0; n < kTiles; ++n)
    for (int e = 0; e < 4; ++e) {
      const uint32_t column = static_cast<uint32_t>(8 * n + lane % 4 * 2 + e % 2);
      double sum = add ? c[n][e] : 0.0;
      for (uint32_t k = 0; k < 16; ++k) {
        const uint32_t at = kRowsSummed ? column / 64 * box + k * 128 + column % 64 * 2 : column * 128 + 2 * k;
        sum +=
            static_cast<double>(value(&left[lane / 4 * 4 + k % 8 / 2][e / 2 + k / 8 * 2][k % 2])) * value(swizzled(base + at));
      }
      c[n][e] = static_cast<float>(sum);
    }
}

// The same with a in a tile, of 64 rows of the product. kRowsSummed: of a's tile; that of b has the summed index as columns.
template <bool kRowsSummed, class T, int kTiles>
void wgmma_ss(T, float (&c)[kTiles][4], uint32_t a, uint32_t b, int add) {
  simulated::votes(simulated::kWholeWarp, false);  // all lanes come here
  simulated::count_group_product();
  const auto base_of = [](uint32_t descriptor) { return simulated::shared_base() + ((descriptor & 0x3fff) << 4); };
  const auto value = [](const void* bits) {
    T x;
    std::memcpy(&x, bits, 2);
    return static_cast<float>(x);
  };
  const int lane = simulated::lane(), warp = static_cast<int>(simulated::place().thread.x) / 32 % 4;
  float left[2][16];
  for (uint32_t e = 0; e < 2; ++e)
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t row = 16 * warp + lane / 4 + 8 * e;
      left[e][k] = value(swizzled(base_of(a) + (kRowsSummed ? k * 128 + 2 * row : row * 128 + 2 * k)));
    }
  for (int n = 0; n < kTiles; ++n)
    for (int i = 0; i < 2; ++i) {
      const auto column = static_cast<uint32_t>(8 * n + lane % 4 * 2 + i);
      double sum[2] = {add ? c[n][i] : 0.0, add ? c[n][2 + i] : 0.0};
      for (uint32_t k = 0; k < 16; ++k) {
        const double right = value(swizzled(base_of(b) + column * 128 + 2 * k));
        sum[0] += left[0][k] * right, sum[1] += left[1][k] * right;
      }
      c[n][i] = static_cast<float>(sum[0]), c[n][2 + i] = static_cast<float>(sum[1]);
    }
}
template <class T, int kTiles>
void wgmma_ss(T, float (&c)[kTiles][4], uint32_t a, uint32_t b, int add) {
  wgmma_ss<false>(T{}, c, a, b, add);
}

}  // namespace hopper
}  // namespace leanfleet
