// Long prompts on Hopper: states from chunk to chunk, see chunks.cuh. A CTA has 64 value columns of a state. One warpgroup has
// S^T in its accumulators, [value column][key dimension], and makes of each chunk
//   R^T = V^T - (K S)^T from_state      U^T = R^T T^T      S^T = kept S^T + (to_state U)^T K      O^T = (Q S)^T from_state + U^T P^T
// where T = (I + M)^-1 diag(beta), and what is left of a product was in registers all along. A warp copies ahead of it, another
// sends rows of the output after it. Where key dimensions have decays of their own, from_state and to_state are in keys and
// queries, each dimension has its `kept`, and each head of the output walks its state for itself.
// S, R, U and T enter products as sums of two 16-bit numbers; for O, whose own rounding is as large, S as one.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "core/hopper.cuh"
#include "core/op.h"
#include "gated_delta_rule/chunks.cuh"
#include "linear_scan/tensor_map.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kSlice = 64;        // value columns of a warpgroup
constexpr int kStates = 128;      // its threads
constexpr int kMostStages = 3;    // chunks under way
constexpr int kStateFloats = 64;  // of a thread

struct Barriers {
  uint64_t chunk_full[kMostStages], chunk_empty[kMostStages], query_full[kMostStages], query_empty[kMostStages];
  uint64_t keys_full[1], keys_empty[1], out_full[2], out_empty[2], landed;
};

// kGroups: warpgroups that have states, of neighbouring slices. With two the chip's share of a CTA is used better, with one
// there are twice as many CTAs. Above 128 key dimensions two warpgroups share a slice, each with half of the dimensions.
// kPerKey: each key dimension has its own decay. The keys that the state is multiplied by and those that enter it are then
// different tiles.
template <int kD, int kGroups_, bool kPerKey>
struct Layout {
  static constexpr int kGroups = kGroups_, kHalves = kD > 128 ? 2 : 1, kWarpgroups = kGroups * kHalves;
  static_assert(kHalves == 1 || kGroups == 1);
  // With decays of more than 128 key dimensions there is room for one chunk. Its tiles go and come in three parts: keys that
  // the state is multiplied by, values and the system; queries; keys that enter the state, and scores.
  static constexpr bool kOneChunk = kPerKey && kHalves > 1;
  static constexpr int kStages = kOneChunk ? 1 : kPerKey || kHalves > 1 ? 2 : 3;
  static constexpr int kQueryStages = kHalves > 1 ? 1 : kGroups == 1 && !kPerKey ? 3 : 2;
  // Those of the warps that copy and send; registers are handed over by warpgroups.
  static constexpr int kThreads = kWarpgroups * kStates + (kWarpgroups == 1 ? 64 : 128);
  static constexpr int kBoxes = kD / 64, kRows = kBoxes * kSquareBytes;
  using Systems = std::conditional_t<kPerKey, KeySystem<kD>, System>;
  using QueryScores = std::conditional_t<kPerKey, KeyScores<kD>, Scores>;
  // A chunk's keys, values and system; a query head's queries and scores. kPerKey: the keys that enter the state stand apart.
  static constexpr int kValues = (kPerKey ? 2 : 1) * kRows, kSystem = kValues + kGroups * kSquareBytes;
  static constexpr int kSystemBytes = kPerKey ? 2 * kSquareBytes : static_cast<int>(sizeof(Systems));
  static constexpr int kChunkBytes = kSystem + kSystemBytes, kChunkStage = round_up(kChunkBytes, 1024);
  static constexpr int kScoreBytes = kPerKey ? kSquareBytes : static_cast<int>(sizeof(QueryScores));
  static constexpr int kQueryBytes = kRows + (kOneChunk ? 0 : kScoreBytes), kQueryStage = round_up(kQueryBytes, 1024);
  static constexpr int kKept = 2 * kRows, kKeyBytes = kPerKey ? kKept + kD * 4 + (kOneChunk ? kScoreBytes : 0) : 0;
  static constexpr int kQueries = kStages * kChunkStage, kKeys = kQueries + kQueryStages * kQueryStage;
  static constexpr int kScores = kOneChunk ? kKeys + kKept + kD * 4 : kQueries + kRows;  // of the first query stage
  static_assert(kScores % 1024 == 0, "products read tiles whose lines are swizzled");
  static constexpr int kOut = kKeys + round_up(kKeyBytes, 1024);
  // Partial sums of halves: one for join_in_first(), and two for join(), which has the keys' tiles with kOneChunk.
  static constexpr int kPartBytes = kChunk * kSlice * 4, kParts = kOut + kGroups * kSquareBytes;
  static constexpr int kBarriers = kParts + (kHalves > 1 ? (kOneChunk ? 1 : 3) * kPartBytes : 0);
  static constexpr int kBytes = 1024 + kBarriers + static_cast<int>(sizeof(Barriers));
};

#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kPartBarrier = 1;  // of all warpgroups with states
constexpr int kHalfBarrier = 2;  // of one; the second half's is the next

// A place in a ring and the parity of its barriers.
template <int kSlots>
struct Turn {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

template <class T, int kTiles>
__device__ __forceinline__ void row_scales(const float (&x)[kTiles][4], float (&factor)[2], float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(fabsf(x[n][2 * r]), fabsf(x[n][2 * r + 1])));
    row_scale(largest, factor[r], inverse[r]);
  }
}

// Factors of the tokens that a lane has in a tile of accumulators.
__device__ __forceinline__ float2 column_factors(const float* of, int n, int lane) {
  return *reinterpret_cast<const float2*>(of + 8 * n + fragment_column(lane, 0));
}

// Accumulators as left sides of products. float16 has few exponents: times `factor`, which `inverse` undoes, by rows.
template <class T, int kTiles>
struct Rows {
  static constexpr bool kScaled = std::is_same<T, __half>::value;
  uint32_t high[kTiles / 2][4], low[kTiles / 2][4];
  float factor[2], inverse[2];

  __device__ __forceinline__ void take(const float (&x)[kTiles][4]) {
    if constexpr (kScaled) row_scales<T>(x, factor, inverse);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t planes[2];
        if constexpr (kScaled) split_pair<T>(factor[r] * x[n][2 * r], factor[r] * x[n][2 * r + 1], planes);
        else split_pair<T>(x[n][2 * r], x[n][2 * r + 1], planes);
        high[n / 2][n % 2 * 2 + r] = planes[0], low[n / 2][n % 2 * 2 + r] = planes[1];
      }
  }
  // The same of x times factors of its columns.
  __device__ __forceinline__ void take(const float (&x)[kTiles][4], const float* of, int lane) {
    float scaled[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 factor = column_factors(of, n, lane);
      scaled[n][0] = x[n][0] * factor.x, scaled[n][1] = x[n][1] * factor.y;
      scaled[n][2] = x[n][2] * factor.x, scaled[n][3] = x[n][3] * factor.y;
    }
    take(scaled);
  }
  // Keeps the compiler from making them later.
  __device__ __forceinline__ void make_now() {
    hopper::fence_operands_for_write(high);
    hopper::fence_operands_for_write(low);
  }
  __device__ __forceinline__ void fence() const {
    hopper::fence_operands(high);
    hopper::fence_operands(low);
  }
  template <int kColumns>
  __device__ __forceinline__ void unscale(float (&x)[kColumns][4]) const {
    if constexpr (kScaled) multiply(x, inverse);
  }
  template <int kColumns>
  __device__ __forceinline__ void scale(float (&x)[kColumns][4]) const {
    if constexpr (kScaled) multiply(x, factor);
  }
  // The state is x times `unit`, which each chunk replaces: were rows unscaled after each product, the compiler would keep them
  // twice and spill them.
  template <int kColumns>
  __device__ __forceinline__ void rescale(float (&x)[kColumns][4], float (&unit)[2]) const {
    if constexpr (kScaled) {
      multiply(x, unit);
      multiply(x, factor);
      unit[0] = inverse[0], unit[1] = inverse[1];
    }
  }
  // Products are to be multiplied by `unit` too.
  __device__ __forceinline__ void multiply_later(const float (&unit)[2]) {
    if constexpr (kScaled) inverse[0] *= unit[0], inverse[1] *= unit[1];
  }
  template <int kColumns>
  static __device__ __forceinline__ void multiply(float (&x)[kColumns][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= by[e / 2];
  }
};

template <class T, int kD, int kGroups, bool kPerKey>
struct Cta {
  using L = Layout<kD, kGroups, kPerKey>;
  using ChunkTurn = Turn<L::kStages>;
  using QueryTurn = Turn<L::kQueryStages>;
  static constexpr int kTiles = kD / L::kHalves / 8;
  // Q S comes after U, not beside it, where there are too few registers for both: ptxas would have each product wait.
  static constexpr bool kLateQueries = L::kOneChunk;
  const Prompt& prompt;
  const PromptMaps& maps;
  unsigned char* const shared;
  Barriers& barriers;
  Work work;
  int64_t head, first_out, group;  // the state's, and the heads of the output that are made
  int first_column;                // of this warpgroup
  int half;                        // of the key dimensions, this warpgroup's

  static __device__ __forceinline__ int group_of_thread() { return static_cast<int>(threadIdx.x / kStates / L::kHalves); }
  __device__ __forceinline__ uint32_t chunk_at(ChunkTurn turn) const {
    return shared_address(shared) + turn.slot * L::kChunkStage;
  }
  __device__ __forceinline__ uint32_t query_at(QueryTurn turn) const {
    return shared_address(shared) + L::kQueries + turn.slot * L::kQueryStage;
  }
  __device__ __forceinline__ uint32_t scores_at(QueryTurn turn) const {
    return shared_address(shared) + L::kScores + turn.slot * L::kQueryStage;
  }
  template <int kSlots>
  static __device__ __forceinline__ void wait(uint64_t* barriers, Turn<kSlots> turn) {
    mbarrier_wait(shared_address(&barriers[turn.slot]), turn.parity);
  }
  // Of the copying warp. No lane may fall behind: a barrier that goes on by two phases looks to it as if it had not moved.
  template <int kSlots>
  static __device__ __forceinline__ void wait_until_empty(uint64_t* barriers, Turn<kSlots> turn) {
    mbarrier_wait(shared_address(&barriers[turn.slot]), turn.parity ^ 1);
    __syncwarp();
  }
  // Rows of others after the request's last are not 0 in memory.
  __device__ __forceinline__ int foreign_from(int64_t chunk) const {
    const int64_t left = work.span.end - work.span.begin - chunk * kChunk;
    return prompt.args.cu_seqlens != nullptr && left < kChunk ? static_cast<int>(left) : kChunk;
  }
  __device__ __forceinline__ int64_t window_slot(int64_t chunk) const {
    return slot_of(prompt.args, work.request, work.span.begin, chunk) - prompt.first_slot;
  }

  // The first lane of the copying warp announces what it is about to ask for, and where it counts as landed: at `full`, where it
  // arrives for all lanes, or at barriers.landed, for rows of others to be cleared first.
  __device__ __forceinline__ uint32_t announce(uint64_t* full, bool clears, uint32_t bytes) const {
    const uint32_t barrier = shared_address(clears ? &barriers.landed : full);
    if (!clears) mbarrier_arrive_times(barrier, 31);
    mbarrier_arrive_expect_tx(barrier, bytes);
    return barrier;
  }

  // The copying warp waits for what it asked for, clears rows from `from` on and passes it on.
  __device__ __forceinline__ void clear_rows(uint32_t boxes, int count, int from, uint64_t* full,
                                             uint32_t& landed_parity) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    mbarrier_wait(shared_address(&barriers.landed), landed_parity);
    landed_parity ^= 1;
    for (int i = lane; i < count * (kChunk - from) * 8; i += 32) {
      const int line = i / 8, row = from + line % (kChunk - from);
      store_16_bytes(boxes + line / (kChunk - from) * kSquareBytes + row * 128 + i % 8 * 16, make_uint4(0, 0, 0, 0));
    }
    hopper::fence_proxy_async();
    mbarrier_arrive(shared_address(full));  // each lane for itself: racecheck does not follow an order through __syncwarp
  }

  // kPerKey: the tiles of records that have key dimensions, and the bytes of the others in one plane.
  __device__ __forceinline__ int boxes() const { return used_boxes<kD>(prompt.args); }
  __device__ __forceinline__ uint32_t unused_bytes() const {
    return static_cast<uint32_t>((L::kBoxes - boxes()) * kSquareBytes);
  }
  __device__ __forceinline__ void load_planes(uint32_t to, const unsigned char (&from)[2][L::kRows], uint32_t full) const {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
      hopper::bulk_load(to + plane * L::kRows, from[plane], L::kRows - unused_bytes(), full);
  }
  // What is never loaded counts as 0; by all threads, before any copy.
  __device__ __forceinline__ void clear_unused() const {
    const int first = boxes() * kSquareBytes;
    if (first == L::kRows) return;
    const uint32_t base = shared_address(shared);
    for (const int tile : {0, L::kRows, L::kQueries, L::kKeys, L::kKeys + L::kRows})
      for (int i = first + 16 * static_cast<int>(threadIdx.x); i < L::kRows; i += 16 * L::kThreads)
        store_16_bytes(base + tile + i, make_uint4(0, 0, 0, 0));
    hopper::fence_proxy_async();
  }

  __device__ __forceinline__ void copy() const {
    const Args& args = prompt.args;
    const bool first_lane = threadIdx.x % 32 == 0;
    const int batch = static_cast<int>(work.batch), key_head = static_cast<int>(head / (args.v_heads / args.k_heads));
    constexpr int kFirstForeign = kPerKey ? L::kValues : 0;  // of the tiles whose rows past the request's end are others'
    ChunkTurn turn;
    QueryTurn query_turn;
    Turn<1> key_turn;
    uint32_t landed_parity = 0;
    for (int64_t chunk = work.first; chunk < work.last; ++chunk, turn.next()) {
      const int token = static_cast<int>(work.span.begin + chunk * kChunk), foreign = foreign_from(chunk);
      const int64_t slot = window_slot(chunk);
      const auto& system = static_cast<const typename L::Systems*>(prompt.systems)[slot * args.v_heads + head];
      wait_until_empty(barriers.chunk_empty, turn);
      if (first_lane) {
        const uint32_t bytes = L::kChunkBytes - (kPerKey ? 2 * unused_bytes() : 0);
        const uint32_t full = announce(&barriers.chunk_full[turn.slot], foreign < kChunk, bytes);
        const uint32_t to = chunk_at(turn);
        if constexpr (kPerKey) {
          load_planes(to, system.from_state, full);
          hopper::bulk_load(to + L::kSystem, system.high, L::kSystemBytes, full);
        } else {
#pragma unroll
          for (int box = 0; box < L::kBoxes; ++box)
            hopper::tma_load(to + box * kSquareBytes, &maps.key, 64 * box, token, key_head, batch, full);
          hopper::bulk_load(to + L::kSystem, &system, L::kSystemBytes, full);
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          hopper::tma_load(to + L::kValues + g * kSquareBytes, &maps.value, first_column + kSlice * g, token,
                           static_cast<int>(head), batch, full);
      }
      if (foreign < kChunk)
        clear_rows(chunk_at(turn) + kFirstForeign, L::kValues / kSquareBytes + kGroups - kFirstForeign / kSquareBytes, foreign,
                   &barriers.chunk_full[turn.slot], landed_parity);
      for (int64_t h = 0; h < group; ++h, query_turn.next()) {
        const int64_t out_head = first_out + h;
        const int query_head = static_cast<int>(out_head / (args.heads / args.q_heads));
        const auto& scores = static_cast<const typename L::QueryScores*>(prompt.scores)[slot * args.heads + out_head];
        const bool clears = !kPerKey && foreign < kChunk;
        wait_until_empty(barriers.query_empty, query_turn);
        if (first_lane) {
          const uint32_t bytes = L::kQueryBytes - (kPerKey ? unused_bytes() : 0);
          const uint32_t full = announce(&barriers.query_full[query_turn.slot], clears, bytes);
          const uint32_t to = query_at(query_turn);
          if constexpr (kPerKey) {
            hopper::bulk_load(to, scores.query, L::kRows - unused_bytes(), full);
            if constexpr (!L::kOneChunk) hopper::bulk_load(scores_at(query_turn), scores.tile, L::kScoreBytes, full);
          } else {
#pragma unroll
            for (int box = 0; box < L::kBoxes; ++box)
              hopper::tma_load(to + box * kSquareBytes, &maps.query, 64 * box, token, query_head, batch, full);
            hopper::bulk_load(scores_at(query_turn), &scores, L::kScoreBytes, full);
          }
        }
        if (clears) clear_rows(query_at(query_turn), L::kBoxes, foreign, &barriers.query_full[query_turn.slot], landed_parity);
      }
      if constexpr (kPerKey) {
        wait_until_empty(barriers.keys_empty, key_turn);
        if (first_lane) {
          const uint32_t full = announce(&barriers.keys_full[key_turn.slot], false, L::kKeyBytes - 2 * unused_bytes());
          const uint32_t to = shared_address(shared) + L::kKeys;
          load_planes(to, system.to_state, full);
          hopper::bulk_load(to + L::kKept, system.kept, kD * 4, full);
          if constexpr (L::kOneChunk) {
            const auto& scores = static_cast<const typename L::QueryScores*>(prompt.scores)[slot * args.heads + first_out];
            hopper::bulk_load(scores_at(query_turn), scores.tile, L::kScoreBytes, full);
          }
        }
        key_turn.next();
      }
    }
  }

  // The tiles of this warpgroup's key dimensions.
  __device__ __forceinline__ uint32_t own_half(uint32_t tile) const {
    return L::kHalves == 1 ? tile : tile + half * L::kRows / L::kHalves;
  }

  // x (+)= left X^T of a tile with rows of X.
  template <int kLeft>
  static __device__ __forceinline__ void by_rows(float (&x)[8][4], const uint32_t (&left)[kLeft][4], uint32_t tile, bool add) {
    const uint32_t right = hopper::make_smem_descriptor(tile, 0);
#pragma unroll
    for (int k = 0; k < kLeft; ++k)
      hopper::wgmma_rs<false>(T{}, x, left[k], right + (k / 4 * kSquareBytes + k % 4 * 32) / 16, add || k > 0);
  }

  // state += U^T K of a tile with rows of K.
  static __device__ __forceinline__ void enter(float (&state)[kTiles][4], const uint32_t (&update)[kChunk / 16][4],
                                               uint32_t tile) {
    const uint32_t right = hopper::make_smem_descriptor(tile, kSquareBytes);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) hopper::wgmma_rs<true>(T{}, state, update[k], right + k * 128, 1);
  }

  // S: reads (kStore false) or writes a state [D,V], or [V,D] with v_first.
  template <bool kStore>
  __device__ __forceinline__ void move_state(float (&x)[kTiles][4], float* data) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
    const int D = static_cast<int>(prompt.args.key_width), V = static_cast<int>(prompt.args.value_width);
    const bool v_first = prompt.args.state_v_first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int v = first_column + 16 * warp + fragment_row(lane, e);
        const int d = 8 * (half * kTiles + n) + fragment_column(lane, e);
        const bool there = v < V && d < D;
        float* const at = data + (v_first ? static_cast<int64_t>(v) * D + d : static_cast<int64_t>(d) * V + v);
        if constexpr (kStore) {
          if (there) *at = x[n][e];
        } else {
          x[n][e] = there ? *at : 0.0f;
        }
      }
  }
  __device__ __forceinline__ float* state_in(const float* states) const {
    const Args& args = prompt.args;
    const int64_t row = args.state_index != nullptr ? args.state_index[work.request] : work.request;
    if (states == nullptr || row < 0 || row >= args.state_rows) return nullptr;
    return const_cast<float*>(states) + (row * args.v_heads + head) * args.key_width * args.value_width;
  }
  // Between windows, as it lies in registers.
  __device__ __forceinline__ float* carried_state(int64_t window) const {
    const Args& args = prompt.args;
    const int64_t entry = args.cu_seqlens == nullptr ? work.request : window % 2;
    const int64_t slices = ceil_div(args.value_width, int64_t{kSlice});
    const int64_t walk = kPerKey ? entry * args.heads + first_out : entry * args.v_heads + head;
    const int64_t slice = walk * slices + first_column / kSlice;
    return prompt.carried + (slice * L::kHalves + half) * kStateFloats * kStates + threadIdx.x % kStates;
  }
  __device__ __forceinline__ void load_state(float (&x)[kTiles][4]) const {
    if (first_column >= prompt.args.value_width) return;
    if (!work.begins) {
      const float* const from = carried_state(prompt.window);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) x[i / 4][i % 4] = from[i * kStates];
      return;
    }
    if (float* const from = state_in(prompt.args.initial_state)) move_state<false>(x, from);
  }
  __device__ __forceinline__ void store_state(float (&x)[kTiles][4]) const {
    if (first_column >= prompt.args.value_width) return;
    if (work.ends && first_out != head * prompt.group) return;
    if (!work.ends) {
      float* const to = carried_state(prompt.window + 1);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) to[i * kStates] = x[i / 4][i % 4];
      return;
    }
    if (float* const to = state_in(prompt.args.final_state)) move_state<true>(x, to);
  }

  template <int kColumns>
  static __device__ __forceinline__ void scale_columns(float (&x)[kColumns][4], const float* of, int lane) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float2 factor = column_factors(of, n, lane);
      x[n][0] *= factor.x, x[n][1] *= factor.y, x[n][2] *= factor.x, x[n][3] *= factor.y;
    }
  }
  __device__ __forceinline__ const System& system_of(ChunkTurn turn) const {
    return *reinterpret_cast<const System*>(shared + turn.slot * L::kChunkStage + L::kSystem);
  }
  __device__ __forceinline__ const Scores& scores_of(QueryTurn turn) const {
    return *reinterpret_cast<const Scores*>(shared + L::kScores + turn.slot * L::kQueryStage);
  }

  // V^T of a warp's 16 columns, pairs of tokens, [tile][row lane / 4 or 8 later].
  static __device__ __forceinline__ void load_values(uint32_t tile, int warp, int lane, uint32_t (&v)[8][2]) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t four[4];
      load_matrices_transposed(four, tile + chunk_offset<kChunk>(8 * (n + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2));
      v[n][0] = four[0], v[n][1] = four[1], v[n + 1][0] = four[2], v[n + 1][1] = four[3];
    }
  }

  // Rows of the output on their way: [warp][token][its 16 columns].
  __device__ __forceinline__ uint32_t out_at(int warp, int token, int half) const {
    return shared_address(shared) + L::kOut + warp * kChunk * 32 + token * 32 + (half ^ token / 4 % 2) * 16;
  }
  static __device__ __forceinline__ void pack_rows(const float (&out)[8][4], uint32_t (&rows)[8][2]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[n][r] = pack_pair(T{}, out[n][2 * r], out[n][2 * r + 1]);
  }
  // For the sending warp, once it has sent those before.
  __device__ __forceinline__ void put_rows(const uint32_t (&rows)[8][2], Turn<1>& turn, int lane) const {
    if (!has_outputs()) return;
    const int warp = static_cast<int>(threadIdx.x / 32), g = group_of_thread();
    mbarrier_wait(shared_address(&barriers.out_empty[g]), turn.parity ^ 1);
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      hopper::store_matrices_transposed(out_at(warp, 8 * (n + lane / 16) + lane % 8, lane / 8 % 2),
                                        {rows[n][0], rows[n][1], rows[n + 1][0], rows[n + 1][1]});
    mbarrier_arrive(shared_address(&barriers.out_full[g]));
    turn.next();
  }

  // The sending warp of a slice: 4 tokens at a time.
  __device__ __forceinline__ void send(int g) const {
    const Args& args = prompt.args;
    const int lane = static_cast<int>(threadIdx.x % 32), warp = 4 * g + lane / 8;
    const int column = first_column + 16 * warp + 8 * (lane % 2);
    Turn<1> turn;
    for (int64_t chunk = work.first; chunk < work.last; ++chunk) {
      const int64_t token = work.span.begin + chunk * kChunk, left = work.span.end - token;
      for (int64_t h = 0; h < group; ++h, turn.next()) {
        T* const rows = const_cast<T*>(row_of<T>(args.output, args.output_strides, work.batch, first_out + h, token));
        mbarrier_wait(shared_address(&barriers.out_full[g]), turn.parity);
#pragma unroll 4
        for (int row = lane / 2 % 4; row < kChunk; row += 4)
          if (row < left && column < args.value_width)
            *reinterpret_cast<uint4*>(rows + column + row * args.output_strides.token) =
                load_16_bytes(out_at(warp, row, lane % 2));
        mbarrier_arrive(shared_address(&barriers.out_empty[g]));
      }
    }
  }

  template <int kSlots>
  __device__ __forceinline__ void arrive(uint64_t* barriers, Turn<kSlots> turn) const {
    mbarrier_arrive(shared_address(&barriers[turn.slot]));
  }

  // (Q S)^T. kPerKey: queries with the decay in them have been rounded, so S enters in both planes, the second with kRest. Products
  // are on their way while R becomes U, or follow it with kLateQueries.
  template <bool kRest, class States>
  __device__ __forceinline__ void multiply_queries(float (&out)[8][4], const States& states, QueryTurn turn) const {
    hopper::warpgroup_arrive();
    if constexpr (kRest) by_rows(out, states.low, own_half(query_at(turn)), true);
    else by_rows(out, states.high, own_half(query_at(turn)), false);
    hopper::warpgroup_commit();
  }
  // The same with its tokens' factors, once it is there.
  template <class States>
  __device__ __forceinline__ void finish_queries(float (&out)[8][4], const States& states, QueryTurn turn, int lane) const {
    hopper::fence_accumulators(out);
    states.unscale(out);
    if constexpr (!kPerKey) scale_columns(out, scores_of(turn).from_state, lane);
    join_in_first(out);
  }
  // Two halves of the key dimensions: adds the other half's partial sum to x. Its buffers are free again once both warpgroups
  // have met in join_in_first() of the same chunk. With kOneChunk they are the first tile of each plane of a half's keys, which
  // have been multiplied by then, and go with these.
  __device__ __forceinline__ void join(float (&x)[8][4]) const {
    if constexpr (L::kHalves > 1) {
      constexpr int kPart = (L::kOneChunk ? L::kRows / 2 : L::kPartBytes) / 4;
      constexpr int kRest = L::kOneChunk ? L::kRows / 4 - 16 * kStates : 0;  // from the first 16 numbers to the others
      float* const parts = reinterpret_cast<float*>(shared + (L::kOneChunk ? 0 : L::kParts)) + threadIdx.x % kStates;
      float* const own = parts + half * kPart;
      const float* const other = parts + (half ^ 1) * kPart;
      if constexpr (L::kOneChunk) named_barrier(kHalfBarrier + half, kStates);
#pragma unroll
      for (int i = 0; i < 32; ++i) own[i * kStates + i / 16 * kRest] = x[i / 4][i % 4];
      named_barrier(kPartBarrier, L::kWarpgroups * kStates);
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i / 4][i % 4] += other[i * kStates + i / 16 * kRest];
      if constexpr (L::kOneChunk) hopper::fence_proxy_async();  // copies come next
    }
  }
  // The same for the first half alone, which writes the output. The buffer is free again once both warpgroups have met in
  // join() of the next chunk; for another head of the same chunk, once its queries are there: the only stage of queries is
  // filled after the first half has let go of the head before.
  __device__ __forceinline__ void join_in_first(float (&x)[8][4]) const {
    if constexpr (L::kHalves > 1) {
      static_assert(L::kQueryStages == 1);
      float* const part = reinterpret_cast<float*>(shared + L::kBarriers - L::kPartBytes) + threadIdx.x % kStates;
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < 32; ++i) part[i * kStates] = x[i / 4][i % 4];
      }
      named_barrier(kPartBarrier, L::kWarpgroups * kStates);
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i / 4][i % 4] += part[i * kStates];
      }
    }
  }
  // The second half's rows of the output lack the first's part. It makes them too: a branch around products would have these
  // wait for each other.
  __device__ __forceinline__ bool has_outputs() const { return L::kHalves == 1 || half == 0; }

  // O^T += U^T P^T. float16: times update.factor.
  __device__ __forceinline__ void add_scores(float (&out)[8][4], const Rows<T, 8>& update, QueryTurn turn) const {
    update.scale(out);
    const uint32_t tile = scores_at(turn);
    hopper::fence_accumulators(out);
    hopper::warpgroup_arrive();
    by_rows(out, update.low, tile, true);
    by_rows(out, update.high, tile, true);
    hopper::warpgroup_commit();
  }
  // Once it is there: the query head's tiles may go.
  __device__ __forceinline__ void finish_scores(float (&out)[8][4], const Rows<T, 8>& update, QueryTurn turn,
                                                uint32_t (&rows)[8][2]) const {
    hopper::fence_accumulators(out);
    update.fence();
    update.unscale(out);
    pack_rows(out, rows);
    if constexpr (!L::kOneChunk) arrive(barriers.query_empty, turn);
  }

  // All but the last of a state's heads of the output; `out` is Q S of the first, and that of the last afterwards.
  __device__ __forceinline__ void other_heads(float (&out)[8][4], const float (&state)[kTiles][4], const float (&unit)[2],
                                              const float (&x)[8][4], QueryTurn& turn, Turn<1>& out_turn, int lane) const {
    Rows<T, 8> update;
    update.take(x);
    for (int64_t h = 0; h + 1 < group; ++h) {
      add_scores(out, update, turn);
      hopper::warpgroup_wait<0>();
      uint32_t rows[8][2];
      finish_scores(out, update, turn, rows);
      put_rows(rows, out_turn, lane);
      turn.next();
      Rows<T, kTiles> states;
      states.take(state);
      states.multiply_later(unit);
      wait(barriers.query_full, turn);
      multiply_queries<false>(out, states, turn);
      hopper::warpgroup_wait<0>();
      finish_queries(out, states, turn, lane);
      hopper::fence_operands(states.high);
    }
  }

  // What the next chunk waits for comes first: rows of the output are finished while the next chunk's first products run.
  __device__ __forceinline__ void walk(float (&state)[kTiles][4]) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
    ChunkTurn turn;
    QueryTurn query_turn;
    Turn<1> key_turn, out_turn;
    float x[8][4], out[8][4];
    uint32_t rows[8][2] = {};  // of the output, of the chunk before
    Rows<T, kTiles> states;
    states.take(state);
    float unit[2] = {1.0f, 1.0f};  // what the state's rows are multiples of
#pragma unroll 1
    for (int64_t chunk = work.first; chunk < work.last; ++chunk, turn.next(), query_turn.next()) {
      const uint32_t keys = chunk_at(turn);
      wait(barriers.chunk_full, turn);
      hopper::warpgroup_arrive();
      by_rows(x, states.low, own_half(keys), false);
      if constexpr (kPerKey) by_rows(x, states.high, own_half(keys + L::kRows), true);
      by_rows(x, states.high, own_half(keys), true);
      hopper::warpgroup_commit();
      if constexpr (!kLateQueries) {
        wait(barriers.query_full, query_turn);
        multiply_queries<false>(out, states, query_turn);
      }
      if (chunk > work.first) put_rows(rows, out_turn, lane);
      uint32_t values[8][2];
      load_values(keys + L::kValues + group_of_thread() * kSquareBytes, warp, lane, values);
      hopper::warpgroup_wait<kLateQueries ? 0 : 1>();
      hopper::fence_accumulators(x);

      // R, then U.
      states.unscale(x);
      join(x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float2 factor = make_float2(1.0f, 1.0f);
        if constexpr (!kPerKey) factor = column_factors(system_of(turn).from_state, n, lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 v = unpack_pair(T{}, values[n][r]);
          x[n][2 * r] = v.x - factor.x * x[n][2 * r];
          x[n][2 * r + 1] = v.y - factor.y * x[n][2 * r + 1];
        }
      }
      Rows<T, 8> rest;
      rest.take(x);
      hopper::fence_accumulators(x);
      hopper::warpgroup_arrive();
      by_rows(x, rest.high, keys + L::kSystem + kSquareBytes, false);
      by_rows(x, rest.low, keys + L::kSystem, true);
      by_rows(x, rest.high, keys + L::kSystem, true);
      hopper::warpgroup_commit();
      if constexpr (!kPerKey) {
        hopper::warpgroup_wait<1>();
        finish_queries(out, states, query_turn, lane);
        states.fence();
      } else if constexpr (!kLateQueries) {
        multiply_queries<true>(out, states, query_turn);
      }
      hopper::warpgroup_wait<kPerKey && !kLateQueries ? 1 : 0>();
      hopper::fence_accumulators(x);
      rest.fence();
      rest.unscale(x);
      if constexpr (kLateQueries) {
        wait(barriers.query_full, query_turn);
        multiply_queries<false>(out, states, query_turn);
        multiply_queries<true>(out, states, query_turn);
      }
      if constexpr (!kPerKey) {  // which has one head of the output a walk
        if (group > 1) other_heads(out, state, unit, x, query_turn, out_turn, lane);
      }

      Rows<T, 8> added, update;
      uint32_t entering = own_half(keys);
      if constexpr (kPerKey) {
        arrive(barriers.chunk_empty, turn);
        entering = own_half(shared_address(shared) + L::kKeys);
        added.take(x);
        hopper::warpgroup_wait<0>();
        finish_queries(out, states, query_turn, lane);
        states.fence();
        if constexpr (L::kOneChunk) arrive(barriers.query_empty, query_turn);
        wait(barriers.keys_full, key_turn);
        scale_columns(state, reinterpret_cast<const float*>(shared + L::kKeys + L::kKept) + 8 * kTiles * half, lane);
      } else {
        const System& system = system_of(turn);
        added.take(x, system.to_state, lane);
        const float kept = system.kept;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) state[n][e] *= kept;
      }
      added.rescale(state, unit);
      hopper::fence_accumulators(state);
      hopper::warpgroup_arrive();
      enter(state, added.low, entering);
      if constexpr (kPerKey) enter(state, added.high, entering + L::kRows);
      enter(state, added.high, entering);
      hopper::warpgroup_commit();
      if constexpr (kPerKey) update = added;
      else update.take(x);
      add_scores(out, update, query_turn);
      hopper::warpgroup_wait<1>();
      hopper::fence_accumulators(state);
      added.fence();
      if constexpr (!kPerKey) arrive(barriers.chunk_empty, turn);
      else if constexpr (!L::kOneChunk) arrive(barriers.keys_empty, key_turn), key_turn.next();
      states.take(state);
      states.make_now();
      states.multiply_later(unit);
      hopper::warpgroup_wait<0>();
      finish_scores(out, update, query_turn, rows);
      if constexpr (L::kOneChunk) arrive(barriers.keys_empty, key_turn), key_turn.next();
    }
    if constexpr (Rows<T, 8>::kScaled) Rows<T, 8>::multiply(state, unit);
    if (work.first < work.last) put_rows(rows, out_turn, lane);
  }

  __device__ __forceinline__ void run() const {
    constexpr int kAll = L::kWarpgroups * kStates;
    const bool copies = threadIdx.x >= kAll;
    if (threadIdx.x == kAll) {
      for (int s = 0; s < kMostStages; ++s) {
        mbarrier_init(shared_address(&barriers.chunk_full[s]), 32);
        mbarrier_init(shared_address(&barriers.query_full[s]), 32);
        mbarrier_init(shared_address(&barriers.chunk_empty[s]), kAll);
        mbarrier_init(shared_address(&barriers.query_empty[s]), kAll);
      }
      mbarrier_init(shared_address(&barriers.keys_full[0]), 32);
      mbarrier_init(shared_address(&barriers.keys_empty[0]), kAll);
      for (int g = 0; g < kGroups; ++g) {
        mbarrier_init(shared_address(&barriers.out_full[g]), kStates);
        mbarrier_init(shared_address(&barriers.out_empty[g]), 32);
      }
      mbarrier_init(shared_address(&barriers.landed), 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (L::kOneChunk) clear_unused();
    __syncthreads();
    if (copies) {
      if constexpr (L::kWarpgroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const int warp = static_cast<int>(threadIdx.x - kAll) / 32;  // the first copies, those of slices send
      if (warp == 0) copy();
      else if (warp <= kGroups) send(warp - 1);
    } else {
      if constexpr (L::kWarpgroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      float state[kTiles][4] = {};
      load_state(state);
      // Nothing that comes after is to begin before what was launched before has ended.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      walk(state);
      store_state(state);
    }
  }
};
#endif

template <class T, int kD, int kGroups, bool kPerKey>
__global__ void __launch_bounds__(Layout<kD, kGroups, kPerKey>::kThreads, 1)
    StatesKernel(const __grid_constant__ Prompt prompt, const __grid_constant__ PromptMaps maps, unsigned slices) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  const unsigned unit = blockIdx.x / slices, heads = static_cast<unsigned>(kPerKey ? prompt.args.heads : prompt.args.v_heads);
  const unsigned group = static_cast<unsigned>(prompt.group), walk = unit % heads, head = kPerKey ? walk / group : walk;
  if (kPerKey && !(walk == head * group ? prompt.firsts : prompt.others)) return;
  const Work work = find_work(prompt.args, prompt.first_slot, prompt.slots, unit / heads);
  if (!work.there) return;
  unsigned char* const shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  using L = Layout<kD, kGroups, kPerKey>;
  const int warpgroup = static_cast<int>(threadIdx.x / kStates % L::kWarpgroups);  // 0 too for the warps that copy and send
  const int slice = static_cast<int>(blockIdx.x % slices) * kGroups + warpgroup / L::kHalves;
  const Cta<T, kD, kGroups, kPerKey> cta{prompt,
                                         maps,
                                         shared,
                                         *reinterpret_cast<Barriers*>(shared + L::kBarriers),
                                         work,
                                         head,
                                         kPerKey ? walk : head * group,
                                         kPerKey ? 1 : group,
                                         slice * kSlice,
                                         warpgroup % L::kHalves};
  cta.run();
#endif
}

template <class T, int kD, int kGroups, bool kPerKey = false>
cudaError_t launch_groups(const Prompt& prompt, const PromptMaps& maps, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD, kGroups, kPerKey>::kBytes;
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = StatesKernel<T, kD, kGroups, kPerKey>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t slices = ceil_div(prompt.args.value_width, int64_t{kGroups * kSlice});
  cudaLaunchConfig_t config = {};
  const int64_t walks = prompt.args.requests * (kPerKey ? prompt.args.heads : prompt.args.v_heads);
  config.gridDim = dim3(static_cast<unsigned>(walks * slices));
  config.blockDim = dim3(Layout<kD, kGroups, kPerKey>::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, prompt, maps, static_cast<unsigned>(slices));
}

// Whether two slices to a CTA end sooner than one. A multiprocessor has one CTA, so that CTAs come in waves of sm_count. On an
// H200 a chunk of bfloat16 takes 1.75 times as long with two slices, and a CTA's begin and end as long as 4 chunks of one slice.
bool pairs_slices(const Args& args, int sm_count) {
  const int64_t slices = ceil_div(args.value_width, int64_t{kSlice}), states = args.requests * args.v_heads;
  const int64_t tokens = args.packed ? ceil_div(args.tokens, args.requests) : args.tokens;
  const int64_t chunks = ceil_div(tokens, int64_t{kChunk});
  const int64_t alone = ceil_div(states * slices, int64_t{sm_count}) * (4 * chunks + 16);
  const int64_t paired = ceil_div(states * ceil_div(slices, int64_t{2}), int64_t{sm_count}) * (7 * chunks + 16);
  return slices > 1 && paired < alone;
}

// With decays of key dimensions. Heads of the output that share a state read it at its begin, and the first of them writes it
// at its end: after all others have read where the two are one buffer.
template <class T, int kD>
cudaError_t launch_walks(Prompt prompt, const PromptMaps& maps, cudaStream_t stream) {
  prompt.firsts = prompt.others = true;
  if (prompt.group > 1 && prompt.args.final_state != nullptr && prompt.args.initial_state == prompt.args.final_state) {
    prompt.firsts = false;
    const cudaError_t error = launch_groups<T, kD, 1, true>(prompt, maps, stream);
    if (error != cudaSuccess) return error;
    prompt.firsts = true, prompt.others = false;
  }
  return launch_groups<T, kD, 1, true>(prompt, maps, stream);
}

template <class T, int kD>
cudaError_t launch_width(const Prompt& prompt, const PromptMaps& maps, [[maybe_unused]] int sm_count, cudaStream_t stream) {
  if (prompt.args.decay_per_key) return launch_walks<T, kD>(prompt, maps, stream);
  if constexpr (kD <= 128) {
    if (pairs_slices(prompt.args, sm_count)) return launch_groups<T, kD, 2>(prompt, maps, stream);
  }
  return launch_groups<T, kD, 1>(prompt, maps, stream);
}

template <class T>
cudaError_t launch_type(const Prompt& prompt, const PromptMaps& maps, int sm_count, cudaStream_t stream) {
  return prompt.args.key_width <= 64    ? launch_width<T, 64>(prompt, maps, sm_count, stream)
         : prompt.args.key_width <= 128 ? launch_width<T, 128>(prompt, maps, sm_count, stream)
                                        : launch_width<T, 256>(prompt, maps, sm_count, stream);
}

// Whether this file's code for 9.0 runs on the device, which it does not where only PTX of 8.0 was compiled.
bool runs_hopper_code(const CudaTarget& target) {
  if (target.compute_capability != 90) return false;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, StatesKernel<__nv_bfloat16, 64, 1, false>) != cudaSuccess) {
    cudaGetLastError();  // not to be taken for the next launch's
    return false;
  }
  return attributes.ptxVersion == 90;
}

#ifndef LEANFLEET_WINDOW_BYTES  // tests take less
#define LEANFLEET_WINDOW_BYTES (int64_t{512} << 20)
#endif
constexpr int64_t kWindowBytes = LEANFLEET_WINDOW_BYTES;          // of the workspace, about
constexpr int64_t kMaxBlocks = INT32_MAX, kMaxRows = UINT16_MAX;  // of a grid

// Bytes of records.
struct RecordSizes {
  int64_t system, scores;
};
RecordSizes record_sizes(const Args& args) {
  if (!args.decay_per_key) return {sizeof(System), sizeof(Scores)};
  if (args.key_width <= 64) return {sizeof(KeySystem<64>), sizeof(KeyScores<64>)};
  if (args.key_width <= 128) return {sizeof(KeySystem<128>), sizeof(KeyScores<128>)};
  return {sizeof(KeySystem<256>), sizeof(KeyScores<256>)};
}

int64_t all_slots(const Args& args) {
  return !args.packed ? ceil_div(args.tokens, int64_t{kChunk}) * args.requests : args.tokens / kChunk + args.requests;
}

}  // namespace

bool prompt_fits(const Args& args, const CudaTarget& target) {
  if (args.dtype == static_cast<int32_t>(DType::kFloat32)) return false;
  if (!args.delta && !args.decay_per_key) return false;
  // Scores and the system are held in the keys' type: float16 has no range for keys and queries of any length.
  if (args.dtype == static_cast<int32_t>(DType::kFloat16) && !args.normalize) return false;
  if (args.key_width > 256 || args.key_width % 8 != 0 || args.value_width % 8 != 0) return false;
  if (args.tokens < kChunkedTokens * (args.packed ? args.requests : 1)) return false;
  const int64_t heads = args.decay_per_key ? args.heads : args.v_heads;  // of CTAs
  if (heads > kMaxRows) return false;
  return args.requests > 0 && all_slots(args) * heads < kMaxBlocks && runs_hopper_code(target);
}

int launch_prompt(const Args& args, const CudaTarget& target, Workspace& ws, bool* launched) {
  *launched = false;
  const int64_t slots = all_slots(args);
  const RecordSizes sizes = record_sizes(args);
  const int64_t slot_bytes = args.v_heads * sizes.system + args.heads * sizes.scores;
  // Windows of whole chunks of all requests, where these alternate.
  const int64_t step = args.packed ? 1 : args.requests;
  const int64_t window = kWindowBytes / slot_bytes / step > 0 ? kWindowBytes / slot_bytes / step * step : step;
  const int64_t window_slots = window < slots ? window : slots;
  Prompt prompt = {};
  prompt.args = args;
  prompt.group = static_cast<int>(args.heads / args.v_heads);
  prompt.of_query = static_cast<int>(args.heads / args.q_heads);
  prompt.of_key = static_cast<int>(args.v_heads / args.k_heads);
  prompt.systems = ws.scratch<unsigned char>(window_slots * args.v_heads * sizes.system);
  prompt.scores = ws.scratch<unsigned char>(window_slots * args.heads * sizes.scores);
  const int64_t entries = args.packed ? 2 : args.requests;
  const int64_t slices = ceil_div(args.value_width, int64_t{kSlice});
  const int64_t state_floats = kStateFloats * kStates * (args.key_width > 128 ? 2 : 1);
  const int64_t walks = entries * (args.decay_per_key ? args.heads : args.v_heads);
  prompt.carried = ws.scratch<float>(window_slots < slots ? walks * slices * state_floats : 0);
  if (ws.counting()) return cudaSuccess;
  for (const void* data : {args.query, args.key, args.value, static_cast<const void*>(args.output)})
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return cudaSuccess;
  PromptMaps maps;
  const auto encode = [&](CUtensorMap* map, const void* data, const Strides& strides, int64_t heads, int64_t width) {
    return encode_rows(map, data, strides, width, args.tokens, heads, args.batch, static_cast<DType>(args.dtype));
  };
  if (!encode(&maps.query, args.query, args.query_strides, args.q_heads, args.key_width) ||
      !encode(&maps.key, args.key, args.key_strides, args.k_heads, args.key_width) ||
      !encode(&maps.value, args.value, args.value_strides, args.v_heads, args.value_width))
    return cudaSuccess;
  *launched = true;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  for (; prompt.first_slot < slots; prompt.first_slot += window_slots, ++prompt.window) {
    prompt.slots = slots - prompt.first_slot < window_slots ? slots - prompt.first_slot : window_slots;
    const int failed =
        args.decay_per_key ? launch_prepare_keys(prompt, maps, target.sm_count, stream) : launch_prepare(prompt, maps, stream);
    if (failed) return failed;
    const cudaError_t error = args.dtype == static_cast<int32_t>(DType::kFloat16)
                                  ? launch_type<__half>(prompt, maps, target.sm_count, stream)
                                  : launch_type<__nv_bfloat16>(prompt, maps, target.sm_count, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace leanfleet::gated_delta_rule
