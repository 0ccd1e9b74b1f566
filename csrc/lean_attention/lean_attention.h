// LeanAttention: exact softmax attention of the newest tokens over a key/value cache, its work dealt out in equal
// shares across (request, key/value head, query tile, context) as in stream-K matrix multiplication (LeanAttention,
// sections 4.2 and 4.3). This is what the kernels take; schedule.h cuts the work.
#pragma once

#include <cstdint>

#include "core/strides.h"

namespace leanfleet::lean_attention {

enum CacheKind : int32_t {
  kDense = 0,   // [B,Hkv,S,D]
  kRagged = 1,  // [Hkv,total,D]: request b owns positions cu_seqlens[b] .. cu_seqlens[b+1]
  kPaged = 2,   // [P,block,Hkv,D]: page j of request b is block_table[b,j]
};

// Element strides of a cache: position j of request b under key/value head h begins at
// dense: b * batch + h * head + j * token; ragged: h * head + (start of b + j) * token;
// paged: block_table[b, j / block] * page + h * head + j % block * token.
struct CacheStrides {
  int64_t batch, page, head, token;
};

// What a quantised cache is made of.
enum CacheForm : int32_t {
  kInt8 = 0,
  kFloat8 = 1,  // float8e4m3fn
  kInt4 = 2,    // two a byte, see cpu_forms.h; widths are even
};

// What a quantised cache is multiplied by.
enum ScaleKind : int32_t {
  kNoScale = 0,     // the cache has type T
  kPerTensor = 1,   // [1]
  kPerChannel = 2,  // [Hkv,1,D]
  kPerToken = 3,    // as the cache without its last axis
};

// The scales of a quantised cache, and its form.
struct Scales {
  ScaleKind kind;
  CacheForm form;  // where there are scales
  const float* in;
  float* out;            // kPerToken with append, else null; may be `in`
  CacheStrides strides;  // kPerToken: of the scales, as of a cache
  int64_t elements;
};

// How the work is cut: a unit of work is one tile of query rows of one key/value head of one request, and its
// context is cut into key/value tiles. Chosen by the launcher; see schedule.h.
struct Plan {
  int32_t key_tile;           // keys of a key/value tile
  int32_t row_tile;           // packed query rows of a unit: row = token * group + head in the group
  int32_t unit_overhead;      // cost of starting and finishing a unit, in key/value tiles
  int32_t max_ranges;         // shares that the work is cut into, at most
  int32_t min_range_work;     // no share is smaller, in key/value tiles
  int32_t equal_parts = 0;    // of a unit if all units have equally many tiles: at most so many; 0: no such rule
  bool equal_halved = false;  // they are so many, or half, a quarter, ...
  int32_t deal_history = -1;  // units are dealt out whole if all requests have equally many keys, at most so many before their
                              // new tokens, or as the pieces of packed tokens turn out to be; -1: they never are
  int32_t deal_heads = 0;     // heads of requests whose units are dealt before those of others
  bool merge_apart = false;   // CUDA: a launch of its own merges units, in place of their last contributor; see merge.cu
  // CUDA: so many CTAs share a unit, whatever the lengths; 0: no such rule. See OneSegmentKernel.
  int32_t one_segment = 0;
  bool small_ctas = false;   // these are small
  bool last_merges = false;  // the last of them to end merges their parts; else several are a cluster
  bool directly = false;     // CUDA: quantised caches are read straight into registers, by DirectKernel
  bool converts = false;     // CUDA: they become tiles of the query's type in shared memory, by WgmmaKernel
};

// A unit that a range begins and does not finish, for a merge apart.
struct CutUnit {
  int32_t index, head, row_tile;  // of the unit
  int32_t count;                  // contributors; 0: the range begins no such unit
};

// New tokens of a request after clamping, whatever lengths and offsets hold: all of them, or a piece of packed ones.
struct Request {
  int32_t start;     // ragged: the request's first position in the cache; else 0
  int32_t keys;      // valid keys, new ones included: 0 .. capacity. Of a piece of causal attention: up to its last token
  int32_t tokens;    // new tokens: 0 .. min(rows, keys); causal token i stands at position keys - tokens + i
  int32_t rows;      // of the query, padding behind the tokens included
  int32_t b;         // whose cache it is
  int32_t origin;    // x strides.batch: where its rows begin
  int32_t position;  // of token 0
  int32_t earlier;   // of a piece: new tokens of its request before these
};

// A GPU's kernel waits for each of the 64-byte lines of its arguments that it uses, one after the other, so that what every
// call needs stands at the front, in the order of its use.
struct Args {
  const int32_t* seq_lens;    // [B] or null: the capacity
  const int32_t* query_lens;  // [B] or null: Nq
  int32_t batch, tokens;      // B, Nq
  int32_t capacity;           // dense: S; ragged: total; paged: M * block
  int32_t cache_kind;         // CacheKind
  int32_t kv_heads, group;    // group = heads / kv_heads
  int32_t window;             // keys a token sees, itself included; 0: all
  bool causal, append;
  bool rotary_interleaved;  // pairs are columns 2 i and 2 i + 1, else i and rotary_half + i
  bool packed_tokens;       // the new tokens of all requests stand one after the other; batch and tokens: see cut_into_pieces
  bool lone_tokens;         // CUDA: their pieces are causal and of one token, and kernels work them out: see lone_token
  Plan plan;

  // T [B,H,Nq,D], or [H,Nq,D] of packed tokens; in one tensor with new_key and new_value, all three have the strides of the
  // whole. Of packed tokens the stride of the batch is that of a token.
  const void* query;
  const void* key_cache;    // T, or with key_scales their form
  const void* value_cache;  // T, or with value_scales their form
  Strides query_strides;
  CacheStrides key_strides, value_strides;
  int32_t key_width, value_width;  // D, Dv
  float scale;                     // of the logits, never 0
  float softcap;                   // 0: off

  void* output;        // T [B,H,Nq,Dv]
  float* lse;          // [B,H,Nq], natural logarithm
  const float* sinks;  // [H] or null
  Strides output_strides, lse_strides;

  // Rotary embedding of query and new_key at the tokens' positions: pairs of the first 2 * rotary_half columns are rotated, in
  // float32, and are rounded to T. rotary_half 0: none. Positions beyond the tables take their last row.
  const float* cos_cache;  // [rotary_positions, rotary_half] or null
  const float* sin_cache;  // the same
  int32_t rotary_half, rotary_positions;
  const void* new_key;    // T [B,Hkv,Nq,D] with append, else null
  const void* new_value;  // T [B,Hkv,Nq,Dv] with append, else null
  Strides new_key_strides, new_value_strides;
  void* key_cache_out;    // as key_cache with append, else null; may be key_cache
  void* value_cache_out;  // as value_cache with append, else null; may be value_cache

  const int32_t* cu_query_lens;    // [B+1], packed tokens only
  int32_t requests, total_tokens;  // B, Nq
  // CUDA: requests of up to so many packed tokens have a launch of their own, with a plan for few rows; 0: they have not.
  int32_t short_tokens;
  Plan short_plan;
  const int32_t* cu_seqlens;                    // [B+1], ragged only
  const int32_t* block_table;                   // [B,M], paged only
  int32_t block, pages_per_request, num_pages;  // paged: block, M, P; else 0
  int32_t heads;
  int32_t dtype;                                     // DType of the T tensors
  bool bfloat16_products;                            // on a CPU: the processor multiplies bfloat16 directly
  int64_t key_cache_elements, value_cache_elements;  // of the whole caches; of int4 their bytes
  Scales key_scales, value_scales;                   // of quantised caches
  bool begins_early;  // the launch before this one appends the new tokens, and may still run: see direct_kernel.cuh

  // Scratch, of any content at entry.
  int64_t* work_prefix;  // [B+1] work before each request, see schedule.h
  Request* pieces;  // [batch] of packed tokens, unless lone; before them, with short_tokens, [requests] of the first launch
  float* partial_output;  // [2 * max_ranges, row_tile, Dv] unnormalised output of a part of a unit
  float* partial_max;     // [2 * max_ranges, row_tile]
  float* partial_sum;     // [2 * max_ranges, row_tile]
  CutUnit* cut_units;     // [max_ranges] with plan.merge_apart
  void* rotated_query;    // T, query's shape and strides; CUDA with a rotary embedding
  void* rotated_key;      // T, new_key's; the same with append. On a CPU [batch,Hkv,D], with a quantised key_cache
  // Sync words, zero between launches.
  uint32_t*
      tickets;  // [max_ranges + 1] CUDA: contributors that have arrived, by the range, or part, that begins the unit; units taken
};

// Packed tokens on CUDA: cuts them into pieces and chooses short_tokens.
void cut_for_cuda(Args& args);

// The first launch of packed tokens with short_tokens: its batch, tokens and plan.
Args short_launch(const Args& args);

// What tests and benchmarks ask of a plan.
constexpr int kAnyWay = -2;
struct ForcedPlan {
  int ranges = 0;            // so many shares; 0: the plan's
  int way = kAnyWay;         // of one_segment.h; -1: none of them
  bool merge_apart = false;  // whatever it gains, where units may be cut and clusters do not merge
  bool converts = true;      // false: tiles of quantised caches stay as they are
};

// How CUDA cuts the work of a call of these shapes.
Plan cuda_plan(const Args& args, int sm_count, const ForcedPlan& forced);

// Writes the rotary embeddings of query and new_key to the scratch for them and makes these the arguments' query and
// new_key, without a rotary embedding. Returns a cudaError_t.
int launch_rotate(Args& args, void* stream);

// Packed tokens of 16 bits, with rotary embedding in halves of a multiple of 8 columns and rows that begin at multiples of 16
// bytes: notes the pieces, unless they are lone, appends, and with `queries` writes their rotary embeddings to the scratch for
// them. Returns a cudaError_t.
int launch_prepare(const Args& args, bool queries, void* stream);

// With plan.merge_apart, after the kernel: merges the units that its CTAs have cut. scales_far: its maxima beyond 2^27 are as
// logit_of takes them. early: the launch may begin before the kernel ends. Returns a cudaError_t.
int launch_merge(const Args& args, bool scales_far, bool early, void* stream);

// Launches the kernel, for widths up to 256 that are multiples of 8. Returns a cudaError_t.
int launch_attention(const Args& args, int device, void* stream);

}  // namespace leanfleet::lean_attention
