// LeanAttention over quantised caches on CUDA. Keys and values may be so each on their own, in forms of their own.
#pragma once

#include "lean_attention/lean_attention.h"

namespace leanfleet::lean_attention {

inline bool has_narrow_cache(const Args& args) {
  return args.key_scales.kind != kNoScale || args.value_scales.kind != kNoScale;
}

// Whether keys, values and scales of both lie in the same rows, which have one of a few widths and can be counted in 32 bits. Rows of
// int4 are half as many bytes as numbers.
inline bool has_plain_rows(const Args& args) {
  if (args.key_scales.kind == kNoScale || args.value_scales.kind == kNoScale || args.key_width != args.value_width)
    return false;
  if (args.key_width != 64 && args.key_width != 128 && args.key_width != 256) return false;
  return args.key_cache_elements / (args.key_width / 2) < int64_t{1} << 32;
}

// Whether many rows of a request may go to the kernel that makes tiles of the query's type of the caches, where there is wgmma. Its
// logits are multiplied by a scale a token; scales of channels are factors of the query.
inline bool may_convert(const Args& args) { return has_plain_rows(args) && args.key_scales.kind != kPerChannel; }

// Rows of a unit, for so many of a request's head, in the kernel that reads the caches straight into registers
// (direct_kernel.cuh); 0: it does not take them.
inline int narrow_direct_rows(const Args& args, int64_t rows) {
  if (!has_plain_rows(args)) return 0;
  if (args.key_scales.form != kInt8 && args.key_scales.form != args.value_scales.form) return 0;
  return rows <= 8 ? 8 : rows <= 16 && args.key_width <= 128 ? 16 : 0;
}

constexpr int kNarrowTileKeys = 64, kNarrowFewRows = 16;

// Packed rows of a unit on tensor cores: 16 for each of 1, 2, 4 or 8 warps.
inline int narrow_rows(int64_t rows) {
  return rows <= kNarrowFewRows ? kNarrowFewRows : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
}

// Writes the new keys, after their rotary embedding, and values to the caches, where these have scales quantised; notes the pieces
// of packed tokens, unless they are lone. Returns a cudaError_t.
int launch_append_narrow(const Args& args, void* stream);

// Whether a GPU has shared memory enough for launch_narrow.
bool narrow_fits(const Args& args, int max_shared_bytes);

// Launches the kernel for float16 and bfloat16. Query and caches begin at multiples of 16 bytes, new tokens are in the caches,
// args.plan has units of narrow_rows rows and tiles of kNarrowTileKeys. Returns a cudaError_t.
int launch_narrow(const Args& args, int max_shared_bytes, void* stream);

}  // namespace leanfleet::lean_attention
