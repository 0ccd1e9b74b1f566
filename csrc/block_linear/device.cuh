// What BlockLinear's kernels share: numbers of any type as floats, and weights of any form.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block_linear/block_linear.h"
#include "core/mma.cuh"
#include "lean_attention/narrow.cuh"

namespace leanfleet::block_linear {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// with_type() of with_type.cuh on the device.
template <class F>
__device__ __forceinline__ void for_type(int32_t dtype, F&& body) {
  if (dtype == 0) body(float{});
  else if (dtype == 1) body(__half{});
  else body(__nv_bfloat16{});
}

// Where the next kernel of the stream was launched to overlap with this one: it may begin; and it waits for this one's end.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A scale or a shift: its bits, which are asked for long before they are needed, and what they mean.
__device__ __forceinline__ uint32_t bits_at(const void* from, int32_t dtype, int64_t i) {
  if (from == nullptr) return 0;
  return dtype == 0 ? __ldg(static_cast<const uint32_t*>(from) + i) : __ldg(static_cast<const uint16_t*>(from) + i);
}
__device__ __forceinline__ float float_of(uint32_t bits, int32_t dtype) {
  const float half = tile::unpack_one(__half{}, static_cast<uint16_t>(bits));
  return dtype == 1 ? half : __uint_as_float(dtype == 0 ? bits : bits << 16);
}
__device__ __forceinline__ float float_at(const void* from, int32_t dtype, int64_t i) {
  return float_of(bits_at(from, dtype, i), dtype);
}

// What a piece of 16 bytes of weights is made of, and how it is multiplied.
enum class Piece { kInt8, kInt4, kFloat8, kPairs, kFloats, kInt8Products, kInt4Products };
constexpr int columns_of(Piece piece) {
  switch (piece) {
    case Piece::kInt4:
    case Piece::kInt4Products: return 32;
    case Piece::kPairs: return 8;
    case Piece::kFloats: return 4;
    default: return 16;
  }
}
constexpr bool in_integers(Piece piece) { return piece == Piece::kInt8Products || piece == Piece::kInt4Products; }

// Columns 4 i .. 4 i + 3 of the words of a piece, as floats. i is known to the compiler. bfloat16: what pairs are made of.
template <Piece kPiece>
__device__ __forceinline__ void four_columns(const uint32_t* words, int i, bool bfloat16, float (&w)[4]) {
  const auto held = [](uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); };
  if constexpr (kPiece == Piece::kInt8) {
    const uint32_t biased = words[i] ^ lean_attention::kBias;
#pragma unroll
    for (int j = 0; j < 4; ++j)  // 2^23 + x, of which the bits of x are the lowest
      w[j] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440u + j)) - (8388608.0f + 128.0f);
  } else if constexpr (kPiece == Piece::kInt4) {
    // Halves: 0x6400 | x is 1024 + x.
    const uint32_t bytes = __byte_perm(words[i / 2], 0x64646464u, i % 2 != 0 ? 0x4342 : 0x4140);
    const __half2 even = __hsub2(held(bytes & 0xff0fff0fu), __floats2half2_rn(1032.0f, 1032.0f));
    const __half2 odd =
        __hfma2(held(bytes & 0xfff0fff0u), __floats2half2_rn(0.0625f, 0.0625f), __floats2half2_rn(-72.0f, -72.0f));
    w[0] = __low2float(even), w[1] = __low2float(odd), w[2] = __high2float(even), w[3] = __high2float(odd);
  } else if constexpr (kPiece == Piece::kFloat8) {
    const float2 low = __half22float2(held(lean_attention::halves_of<lean_attention::kFloat8, false>(words[i])));
    const float2 high = __half22float2(held(lean_attention::halves_of<lean_attention::kFloat8, true>(words[i])));
    w[0] = low.x, w[1] = low.y, w[2] = high.x, w[3] = high.y;
  } else if constexpr (kPiece == Piece::kPairs) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pair = words[2 * i + j];
      const float2 x = bfloat16 ? tile::unpack_pair(__nv_bfloat16{}, pair) : tile::unpack_pair(__half{}, pair);
      w[2 * j] = x.x, w[2 * j + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = __uint_as_float(words[4 * i + j]);
  }
}

// Scales or shifts of lines of weights next to each other, whose bits are loaded for a block of each.
struct Factors {
  const char* from;
  unsigned bytes;  // of one

  __device__ __forceinline__ Factors(const void* all, int32_t dtype, int64_t first)
      : from(static_cast<const char*>(all) + first * (dtype == 0 ? 4 : 2)), bytes(dtype == 0 ? 4 : 2) {}
  template <int kLines>
  __device__ __forceinline__ void load(const uint32_t (&at)[kLines], uint32_t (&to)[kLines]) const {
#pragma unroll
    for (int o = 0; o < kLines; ++o) {
      const char* const one = from + static_cast<uint64_t>(at[o]) * bytes;
      to[o] = bytes == 4 ? __ldg(reinterpret_cast<const uint32_t*>(one)) : __ldg(reinterpret_cast<const uint16_t*>(one));
    }
  }
};

inline bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace leanfleet::block_linear
