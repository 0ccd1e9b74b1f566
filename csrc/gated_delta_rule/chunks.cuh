// Long prompts on Hopper go in two kernels. prepare.cu, or prepare_keys.cu for decays of key dimensions, makes for all chunks
// of 64 tokens at once what does not depend on states; states.cu then takes each state from chunk to chunk. Between the two are
// these records in global memory. Rows past a request's end are 0 in them. What prepare_keys.cu leaves to it is made by
// prepare_steep_keys.cu.
#pragma once

#include <cuda.h>

#include "core/integers.h"
#include "gated_delta_rule/gated_delta_rule.h"
#include "gated_delta_rule/tiles.cuh"

namespace leanfleet::gated_delta_rule {

// Of a chunk and a value head: (I + M)^-1 diag(beta) as two 16-bit tiles whose sum it is; factors of rows of K S, of those of U
// that enter the state, and of the state.
struct alignas(128) System {
  unsigned char high[kSquareBytes], low[kSquareBytes];
  float from_state[kChunk], to_state[kChunk];
  float kept, unused[31];
};
// Of a chunk and a head of the output: P as a tile, and the factors of rows of Q S.
struct alignas(128) Scores {
  unsigned char tile[kSquareBytes];
  float from_state[kChunk];
};
static_assert(sizeof(System) % 128 == 0 && sizeof(Scores) % 128 == 0);
// The same where key dimensions have decays of their own, which are multiplied into keys and queries. from_state: keys times
// the decay from the chunk's begin to their token; to_state: keys times that from their token to the chunk's end; both as two
// tiles whose sum they are. query: queries times the former decay, as one tile.
template <int kD>
struct alignas(128) KeySystem {
  unsigned char from_state[2][kChunk * kD * 2], high[kSquareBytes], low[kSquareBytes];
  unsigned char to_state[2][kChunk * kD * 2];
  float kept[kD];
};
template <int kD>
struct alignas(128) KeyScores {
  unsigned char query[kChunk * kD * 2], tile[kSquareBytes];
  int32_t left, unused[31];  // to prepare_steep_keys.cu, with the system where this is its state's first head of the output
};
// Tiles of 64 columns of rows of records. Where keys have up to 192 dimensions, the last of four is not used.
template <int kD>
__device__ __forceinline__ int used_boxes(const Args& args) {
  return kD > 192 && args.key_width <= 192 ? 3 : kD / 64;
}

// Chunks have slots. Without offsets those of all requests alternate; with them chunk c of a request that begins at token b has
// slot b / 64 + request + c, so that no request's depend on the lengths of those before it. Windows of slots are walked one
// after another, which bounds the workspace.
struct Prompt {
  Args args;
  void* systems;   // [slot of the window][value head] of System, or KeySystem
  void* scores;    // [slot of the window][head of the output] of Scores, or KeyScores
  float* carried;  // [request or, with offsets, window % 2][walk][slice]: states between windows; null: one window
  int64_t first_slot, slots;
  int64_t window;
  int group, of_query, of_key;  // heads of the output of a value head and of a query head; value heads of a key head
  // With decays of key dimensions each head of the output walks its state for itself; the first of a state writes it. Which of
  // them this launch has.
  bool firsts, others;
};

struct Span {
  int64_t begin, end;
};
__device__ __forceinline__ Span tokens_of_request(const Args& args, int64_t request) {
  if (args.cu_seqlens == nullptr) return {0, args.tokens};
  const int64_t begin = clamped_offset(args.cu_seqlens, request, args.tokens);
  const int64_t end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
  return {begin, end > begin ? end : begin};
}
__device__ __forceinline__ int64_t slot_of(const Args& args, int64_t request, int64_t begin, int64_t chunk) {
  return args.cu_seqlens == nullptr ? chunk * args.requests + request
                                    : static_cast<int64_t>(static_cast<uint64_t>(begin) / kChunk) + request + chunk;
}

struct ChunkPlace {
  int64_t batch, token;
  int tokens;  // 0: no chunk has this slot
};
__device__ __forceinline__ ChunkPlace chunk_of(const Args& args, int64_t slot) {
  if (args.cu_seqlens == nullptr) {
    const unsigned requests = static_cast<unsigned>(args.requests), chunk = static_cast<unsigned>(slot) / requests;
    const int64_t token = static_cast<int64_t>(chunk) * kChunk, left = args.tokens - token;
    return {static_cast<unsigned>(slot) % requests, token, static_cast<int>(left < kChunk ? left : kChunk)};
  }
  // The last request whose first slot is not after this one.
  int64_t low = 0, high = args.requests;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (slot_of(args, middle, clamped_offset(args.cu_seqlens, middle, args.tokens), 0) <= slot) low = middle;
    else high = middle;
  }
  const Span span = tokens_of_request(args, low);
  const int64_t chunk = slot - slot_of(args, low, span.begin, 0), token = span.begin + chunk * kChunk;
  const int64_t left = chunk < 0 ? 0 : span.end - token;
  return {0, token, static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk)};
}

// The chunks first .. last - 1 of a request that a window of slots has. begins, ends: the request does.
struct Work {
  Span span;
  int64_t batch, request, first, last;
  bool there, begins, ends;
};
__device__ __forceinline__ Work find_work(const Args& args, int64_t first_slot, int64_t slots, int64_t request) {
  Work work = {};
  work.span = tokens_of_request(args, request);
  work.request = request;
  work.batch = args.cu_seqlens == nullptr ? request : 0;
  const int64_t chunks = ceil_div(work.span.end - work.span.begin, int64_t{kChunk});
  const int64_t step = args.cu_seqlens == nullptr ? args.requests : 1;
  const int64_t before = first_slot - slot_of(args, request, work.span.begin, 0);
  const int64_t first = before > 0 ? ceil_div(before, step) : 0, last = ceil_div(before + slots, step);
  work.first = first;
  work.last = last < chunks ? last : chunks;
  // A request without tokens is walked where its first chunk would be.
  work.there = before + slots > 0 && (first < chunks || (chunks == 0 && before <= 0));
  work.begins = before <= 0;
  work.ends = last >= chunks;
  return work;
}

struct PromptMaps {
  CUtensorMap query, key, value;
};

// The first kernel for a window; returns the cudaError_t.
int launch_prepare(const Prompt& prompt, const PromptMaps& maps, void* stream);
int launch_prepare_keys(const Prompt& prompt, const PromptMaps& maps, int sm_count, void* stream);
int launch_prepare_steep_keys(const Prompt& prompt, const PromptMaps& maps, int sm_count, void* stream);

}  // namespace leanfleet::gated_delta_rule
