// NormalizedLinearAttention and NormalizedLinearAttentionGrad as plain structs: the arguments that a kernel gets for
// either operator, and what the CPU kernel makes of them. Equation numbers are those of "Linear Attention Optimized
// GPU Kernel Implementation" (cited as LA), whose printed gradients are corrected here.
#pragma once

#include <cstdint>

#include "core/strides.h"

namespace leanfleet {
struct CudaTarget;
class Workspace;
}  // namespace leanfleet

namespace leanfleet::normalized_linear_attention {

// Where final_count stays once it gets there.
constexpr int64_t kMaxCount = INT32_MAX;

struct Inputs {
  const void *query, *key, *value;  // T [B,H,N,D], [B,Hkv,N,D], [B,Hkv,N,Dv]
  const float* coefficients;        // [2]: a, b; null: 1, 1
  int32_t dtype;                    // DType of T
  bool causal, normalize_qk;
  float eps;
  int64_t batch, heads, kv_heads, tokens, dim, value_dim;  // B, H, Hkv, N, D, Dv; H is a multiple of Hkv
  // output_strides are those of grad_output too; normalizer_strides have width 1.
  Strides query_strides, key_strides, value_strides, output_strides, normalizer_strides;
};

// o_i = f_i / g_i (LA eq. 4); |g_i| is held at eps or more in the division, its sign kept.
struct Args {
  Inputs in;
  const float *initial_state, *initial_key_sum, *initial_value_sum;  // [B,Hkv,D,Dv], [B,Hkv,D], [B,Hkv,Dv]; null: 0
  const int32_t* initial_count;                                      // [B]
  void* output;                                                      // T [B,H,N,Dv]
  float* normalizer;                                                 // [B,H,N], g before it is held
  float *final_state, *final_key_sum, *final_value_sum;              // null: not asked for; each may be its initial one
  int32_t* final_count;                                              // held at kMaxCount
  bool carries_state;  // sums are given and asked for: known, too, while a workspace is counted
};

struct GradArgs {
  Inputs in;
  const void *output, *grad_output;  // T [B,H,N,Dv]
  const float* normalizer;           // [B,H,N]
  void *grad_query, *grad_key, *grad_value;
  float* grad_coefficients;      // [2]: da, db; null: not asked for
  bool wants_grad_coefficients;  // known, too, while a workspace is counted
};

// The CPU kernel: the forward and each of the three gradients is one scan over the tokens,
//   S_i = Σ_{n<=i} [y_n, y'_n]ᵀ z_n,   out_i = [x_i, x'_i] S_i,   row_sum_i = x_i·Σ_{n<=i} y_n + x'_i (tokens so far),
// where the sums run over all tokens when not causal, and from the last token back when reverse:
//               x     x'   y    y'   z
//   output      b q   a    k    1    v   divided by row_sum, which is g
//   grad_query  w     -r   v    1    k   times b; da = Σ row_sum, db = Σ q·out           (LA eq. 17, 19)
//   grad_key    v     1    w    -r   q   times b, reverse                                (LA eq. 18)
//   grad_value  b k   a    q    1    w   reverse                                         (LA eq. 20)
// with w_i = grad_output_i / g_i (g held), r_i = o_i·w_i or 0 where |g_i| < eps, q and k of unit length if
// normalize_qk. The extra row of S, of y', is the sum of v, of k, of -r q or of w.

// Ranges of columns, and every array in scratch, come in multiples of this many floats on every instruction set.
constexpr int64_t kScanColumns = 16;

enum class RowKind : int32_t {
  kPlain,
  kUnit,      // to unit length (LA eq. 22)
  kWeighted,  // w of data = grad_output, and -r as the extra element
};

// One of x, y and z: rows of a T tensor [B, Hkv * per_head, N, width], times scale, and one more element.
struct ScanRows {
  const void* data;
  Strides strides;
  int64_t width, per_head;
  RowKind kind;
  float scale, extra;
  const void* output;  // kWeighted: the forward's, strided as data
  const float* normalizer;
  Strides normalizer_strides;
};

// A worker's scratch, as offsets in floats. T = block_tokens, m = per_head, W = range_width.
struct ScanScratch {
  int64_t state;  // [width + 1, W]: S at the end of the last block of tokens
  int64_t y_sum;  // [width]
  int64_t x, y;   // [T * m, row_stride], the extra element behind the row
  int64_t row_stride;
  int64_t z, out;    // [T * m, W], columns past z.width are 0
  int64_t row_sums;  // [T * x.per_head]
  int64_t source;    // [W]
  int64_t size;
};

struct LinearScan {
  int32_t dtype;
  bool causal, reverse;
  bool row_sums;  // compute row_sum; y then has y' = 1
  float eps;
  int64_t batch, kv_heads, tokens;
  ScanRows x, y, z;  // y and z have the same per_head
  void* out;         // T [B, Hkv * x.per_head, N, z.width]
  Strides out_strides;
  float out_scale;
  float* normalizer;  // takes row_sum, by which out is then divided; or null
  Strides normalizer_strides;
  ScanRows source;  // the rows that out is the gradient of, where db or kUnit needs them, else data is null
  const float *initial_state, *initial_y_sum, *initial_z_sum;  // null: 0
  const int32_t* initial_count;
  float *final_state, *final_y_sum, *final_z_sum;  // null: not asked for

  // The work: item = (unit, segment), unit = (b, kv head, range of columns). With one segment each worker has a
  // run of units; with more every item is a worker and the sums of segments meet in their workers' scratch.
  int64_t ranges, range_width, segments, segment_tokens, block_tokens, workers;
  ScanScratch layout;
  float* scratch;  // [workers][layout.size]
  double* totals;  // [items][2]: Σ row_sum, Σ source·out; or null
};

enum class ScanPhase : int32_t {
  kReduce,   // segments > 1: a task per item sums its segment
  kCombine,  // segments > 1: a task per unit makes of those sums the state before each segment, or the whole sum
  kScan,     // a task per worker
};

// On CUDA, for D and, in the gradient, Dv up to 256. They ask `ws` for their buffers and return 0 while it counts,
// otherwise the cudaError_t of the launches.
int launch_forward(const Args& args, const CudaTarget& target, Workspace& ws);
int launch_grad(const GradArgs& args, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet::normalized_linear_attention
