// Linear recurrences over tokens in chunks on tensor cores: what the linear attention operators and their gradients
// have in common on CUDA. For every (batch row or request, head), in scan order (ascending, or descending tokens when
// `reverse`), with rows x_i, y_j, z_j:
//
//   out_i = Σ_{j <= i} D_ij (fx_i fy_j x_i·y_j + rx_i ry_j) fz_j z_j + D_i0 (fx_i x_i S + rx_i s)
//
// D_ij is the product of the decays after j up to i, S [K,V] and s [V] the carried sums of fy_j fz_j y_jᵀ z_j and of
// ry_j fz_j z_j. When not `causal`, the sum runs over all j and there is no decay. The row sum of out_i is what out_i
// would be for z_j = 1 and fz_j = 1.
//
// A descending scan multiplies by the decay of token t + 1 before it adds token t, and by 1 before the request's last
// token: the gradient of a state that decays first.
#pragma once

#include <cstdint>

#include "core/strides.h"

namespace leanfleet {

struct CudaTarget;
class Workspace;

// T [B,heads,N,width]; strides in elements, the innermost is 1.
struct ChunkTensor {
  const void* data;
  int64_t batch, head, token;
  int32_t width;
};

inline ChunkTensor chunk_tensor(const void* data, const Strides& strides, int64_t width) {
  return {data, strides.batch, strides.head, strides.token, static_cast<int32_t>(width)};
}

// A float a row of a tensor, `scale` times data[B,heads,N] times *times, or those of them that are given.
struct ChunkFactor {
  const float* data;
  int64_t batch, head, token;
  float scale;
  const float* times;
};

// The sums that a scan carries; row r (of a request) and state head h begin at (r * state_heads + h) times the size of
// one. Null: 0 at the start, not asked for at the end.
struct ChunkState {
  float* state;  // [K,V], element (k, v) at k * k_stride + v * v_stride, `size` floats
  int64_t k_stride, v_stride, size;
  float* y_sum;    // [K]: Σ fy_j y_j, with row sums
  float* z_sum;    // [V]: s, with rank1
  int32_t* count;  // [rows], for all heads: Σ ry_j; only at the start
};

struct ChunkScan {
  int32_t dtype;  // DType of T
  bool causal, reverse;
  bool rank1;          // rx and ry are not 0
  bool row_sums;       // needed, for row_sum or to divide by them; y_group is 1 then
  bool divide;         // out_i by its row sum, whose magnitude is held at eps or more, its sign kept
  bool halves_add;     // with divide: halves of wide keys have scores that cancel each other little, so that they may be split
  bool accumulate;     // add to what is in out
  bool final_decayed;  // descending: the final state also decays by the request's first token
  float eps;
  // out is multiplied by *out_times, row_dot is not; or null. Together with rank1 and wide keys only if these have rank1_parts.
  const float* out_times;
  int64_t batch, requests, tokens;
  int32_t heads;  // of out
  // One of the two is 1. Heads of x that share one of y and z; heads of y and z that one of x sums over. There are
  // heads / x_group states, and as many heads of log_decay.
  int32_t x_group, y_group;
  // How many of the heads counted above have the same rows: head h of x is number h / x_share of the tensor's. Factors have
  // all heads. Of y and z shares above 1 come with a y_group of 1, of x and source with an x_group of 1.
  int32_t x_share = 1, y_share = 1, z_share = 1, source_share = 1;
  const int32_t* cu_seqlens;  // [requests + 1], clamped to [0, N], batch is 1; null: requests are batch rows
  ChunkTensor x, y, z;        // widths K, K, V
  void* out;                  // T, strided as out_strides, whose data is not used; 0 for tokens of no request
  ChunkTensor out_strides;
  ChunkFactor x_factor, x_rank1, y_factor, y_rank1, z_factor;  // fx, rx, ry, fy, fz
  // Where rx ry is there to cancel x·y: floats from what x_rank1 or y_rank1 has to what cancels the first kChunkPartWidth
  // columns of x and y alone; what cancels the others follows as far behind. 0: it goes with the first columns. No sums are
  // carried with it.
  int64_t rank1_parts;
  const float* log_decay;  // natural logarithms, [state heads] or [B,state heads,N]; null: no decay
  bool decay_per_token;
  int64_t decay_batch, decay_head, decay_token;
  float* row_sum;  // [B,heads,N] with the strides below, or null
  int64_t sum_batch, sum_head, sum_token;
  ChunkTensor source;  // T, of out's shape: row_dot takes out_i·source_i before out is rounded, not with divide; or null
  float* row_dot;      // [slices][B,heads,N], contiguous
  bool add_dots;       // to what is in row_dot
  ChunkState initial, last;
  bool carried_in_place;  // `last` is asked for and may take the buffers of `initial`
  bool own_slots;         // the caller has planned and set `slots`, and wants the sums before each segment in them
  const int32_t *state_index, *last_index;  // [requests]: rows of `initial` and of `last`; those outside the
  int64_t state_rows;                       // 0 .. state_rows are 0 and not written. Null: the request's number

  // Set by chunk_scan. Tokens of a batch row are cut into segments, scanned side by side: first each but the last for
  // its own sums, which are then added up in order. A slot holds [V][K] (on Hopper in an order of its own unless own_slots),
  // [K], [V], a count, log2 of the decay and whether what comes before matters.
  int32_t segments, slices;
  int64_t segment_tokens, slot_floats;
  float* slots;   // [B,state heads,segments - 1], [B,state heads,segments] when not causal
  bool combined;  // they hold the sums before the next segment instead of a segment's own
};

constexpr int kChunkMaxWidth = 256;   // of K; the caller adds up the parts of wider ones
constexpr int kChunkPartWidth = 128;  // of K, that Hopper's kernel takes: it scans wider ones in parts

// The column slices that chunk_scan makes of V.
int chunk_scan_slices(const ChunkScan& scan);

// Asks `ws` for its buffers, returns 0 if that counts, else launches and returns the cudaError_t.
int chunk_scan(const ChunkScan& scan, const CudaTarget& target, Workspace& ws);

// Several in their order, at once where one kernel can run them side by side: only one that accumulates may depend on those
// before it.
constexpr int kMaxTogether = 3;
int chunk_scans(const ChunkScan* scans, int count, const CudaTarget& target, Workspace& ws);

// Whether a scan could run beside another one.
bool chunk_scans_join(const ChunkScan& one, const ChunkScan& other, const CudaTarget& target);

// Sets segments, slices, segment_tokens and slot_floats; and the slots of such a plan.
void chunk_scan_plan(ChunkScan& scan, int sm_count);
int64_t chunk_scan_slots(const ChunkScan& scan);

}  // namespace leanfleet
