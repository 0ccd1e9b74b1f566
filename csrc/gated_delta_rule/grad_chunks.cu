// GatedDeltaRuleGrad in chunks of 64 tokens on tensor cores, for prompts of 16-bit numbers; cpu_kernel.cpp has the equations,
// warp_states.cuh what is shared with the forward. Four kernels, a window of chunks at a time, of which grad_key_chunks.cu has
// others where key dimensions have decays of their own:
//   GradPrepareKernel  of all chunks at once, what depends on no state: the system, P, factors of rows
//   ForwardsKernel     takes states from chunk to chunk, as ChunkedKernel does: keeps S before each, and U
//   BackwardsKernel    takes gradients of states from the last chunk to the first: keeps dS behind each, Y; gives grad_value
//   GradChunksKernel   of all chunks at once, what S, dS, U and Y hand on to queries, keys, betas and decays
// What is kept, and all that is not an input, enters products as sums of two 16-bit numbers, in float16 times powers of two:
// gradients of beta and of decays are float32 sums of products of them.
#include <cuda_runtime.h>

#include <cmath>

#include "core/op.h"
#include "core/workspace.h"
#include "gated_delta_rule/grad_chunks.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

constexpr int kGradPitch = kChunk + 1;   // floats of a row of squares
constexpr int64_t kMaxGrid = INT32_MAX;  // blocks

// Records in global memory. Of a chunk and a value head: -M with the inverses of its diagonal blocks, see make_system.
struct alignas(128) GradSystem {
  unsigned char planes[2][kSquareBytes];
  TokenScalars tokens;
};
constexpr int kSystemBytes = sizeof(GradSystem) - sizeof(DecaySums);  // without what pairs of tokens take
// Of a chunk and a head of the output: P over scale, and 1 over the lengths of queries.
struct alignas(128) GradScores {
  unsigned char planes[2][kSquareBytes];
  float query[kChunk];
};
static_assert(kSystemBytes % 128 == 0 && sizeof(GradScores) % 128 == 0);

template <int kD>
struct PrepareLayout {
  static constexpr int kRowsBytes = kChunk * kD * 2, kQueries = kRowsBytes, kSystem = 2 * kRowsBytes;
  static constexpr int kScores = kSystem + 2 * kSquareBytes, kScalars = kScores + 2 * kSquareBytes;
  static constexpr int kBytes = kScalars + static_cast<int>(sizeof(Scalars));
};

// This warp's rows of P, over scale, in two planes.
template <class T, int kD>
__device__ __forceinline__ void make_scores(uint32_t queries, uint32_t keys, uint32_t scores, const Scalars& s, int warp,
                                            int lane) {
  float c[2 * kBlocks][4];
  pair_products<T, kD>(queries, keys, warp, lane, c);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = kBlock * warp + fragment_row(lane, 2 * r);
    const Until until(s.decay, t);
    const float factor = s.query[t];
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n / 2 > warp) continue;
      const int first = 8 * n + fragment_column(lane, 0);
      const float2 decay = until.from<true>(s.decay, first), key = column_pair(s.key, n, lane);
      store_planes<T>(scores, scores + kSquareBytes, t, first, factor * key.x * decay.x * c[n][2 * r],
                      factor * key.y * decay.y * c[n][2 * r + 1]);
    }
  }
}

// A CTA: (slot, value head). Blocks above the diagonal are read by nothing.
template <class T, int kD>
__global__ void __launch_bounds__(kThreads) GradPrepareKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = PrepareLayout<kD>;
  const Args& args = window.args.in;
  Scalars& s = *reinterpret_cast<Scalars*>(shared + L::kScalars);
  const uint32_t keys = shared_address(shared), queries = keys + L::kQueries, system = keys + L::kSystem,
                 scores = keys + L::kScores;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int row = static_cast<int>(threadIdx.x) % kChunk, D = static_cast<int>(args.key_width);
  const int64_t slot = blockIdx.x / args.v_heads, head = blockIdx.x % args.v_heads;
  const ChunkPlace chunk = chunk_of(args, window.first_slot + slot);
  if (chunk.tokens == 0) return;

  take_rows<T, kD>(keys, row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
                   args.key_strides.token, chunk.tokens, 0, D, window.vectors);
  if (warp == 0) take_scalars(args, chunk.batch, head, chunk.token, chunk.tokens, s);
  int64_t query_head = -1;
  for (int h = 0; h < window.group; ++h) {
    const int64_t out_head = head * window.group + h;
    const bool another = out_head / (args.heads / args.q_heads) != query_head;
    if (another) {
      query_head = out_head / (args.heads / args.q_heads);
      take_rows<T, kD>(queries, row_of<T>(args.query, args.query_strides, chunk.batch, query_head, chunk.token),
                       args.query_strides.token, chunk.tokens, 0, D, window.vectors);
      cp_async_commit();
      cp_async_wait();
      __syncthreads();
      if (threadIdx.x >= kChunk) s.query[row] = row_factor<T, kD>(queries, row, args.normalize, 1.0f);
      else if (h == 0) s.key[row] = row_factor<T, kD>(keys, row, args.normalize, 1.0f);
      __syncthreads();
    }
    if (h == 0) make_system<T, kD>(keys, system, system + kSquareBytes, s, warp, lane);
    if (another) make_scores<T, kD>(queries, keys, scores, s, warp, lane);
    __syncthreads();
    if (h == 0) {
      GradSystem& to = static_cast<GradSystem*>(window.systems)[slot * args.v_heads + head];
      keep_record<kThreads>(to.planes, system, 2 * kSquareBytes);
      keep_record<kThreads>(&to.tokens, shared_address(&s), sizeof(TokenScalars));
    }
    GradScores& to = static_cast<GradScores*>(window.scores)[slot * args.heads + out_head];
    keep_record<kThreads>(to.planes, scores, 2 * kSquareBytes);
    if (threadIdx.x < kChunk) to.query[row] = s.query[row];
    __syncthreads();
  }
}

template <int kD>
struct ForwardsLayout {
  static constexpr int kValues = kChunk * kD * 2, kSystem = kValues + kSquareBytes;
  static constexpr int kStage = kSystem + kSystemBytes;
  static constexpr int kRoom = 2 * kStage, kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) ForwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = ForwardsLayout<kD>;
  const Args& args = window.args.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads;
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared);
  const int lane = pass.lane, D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const auto take = [&](int64_t chunk, uint32_t stage) {
    const int64_t token = work.span.begin + chunk * kChunk;
    const int tokens = tokens_in(pass, chunk);
    take_rows<T, kD, kOf>(stage, row_of<T>(args.key, args.key_strides, work.batch, pass.key_head, token),
                          args.key_strides.token, tokens, 0, D, window.vectors);
    take_rows<T, kSlice, kOf>(stage + L::kValues, row_of<T>(args.value, args.value_strides, work.batch, pass.head, token),
                              args.value_strides.token, tokens, pass.column, V, window.vectors);
    fetch_record<kOf>(stage + L::kSystem,
                      &static_cast<const GradSystem*>(window.systems)[slot_in(window, pass, chunk) * args.v_heads + pass.head],
                      kSystemBytes);
    cp_async_commit();
  };

  if (work.first < work.last) take(work.first, base);
  State<T, 64> state = {};
  begin_states(window, pass, state);
  int turn = 0;
  for (int64_t chunk = work.first; chunk < work.last; ++chunk, turn ^= 1) {
    const uint32_t keys = base + turn * L::kStage, values = keys + L::kValues, system = keys + L::kSystem;
    const GradSystem& record = *reinterpret_cast<const GradSystem*>(shared + turn * L::kStage + L::kSystem);
    const TokenScalars& s = record.tokens;
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage has been read
    if (chunk + 1 < work.last) take(chunk + 1, base + (turn ^ 1) * L::kStage);
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    float u[2 * kBlocks][4];
    if (window.keeps) {
      multiply_and_keep<0>(state, keys + part, static_cast<KeptState<kD>*>(window.states)[at], pass, room, u);
    } else {
      state.multiply(keys + part, lane, u);
    }
    pass.join(u, shared + L::kRoom);
    take_rest<T>(values, s, pass.slab, lane, u);
    solve<T>(system, system + kSquareBytes, lane, u);
    if (window.keeps && pass.part == 0) keep_update<T>(u, window.updates[at], room, pass.slab, lane);
    scale_columns(u, s.suffix, s.key, lane);
    state.enter(keys + part, lane, u, s.prefix[kChunk - 1]);
  }
  if (!window.keeps && !work.ends) move_border<true>(state.x, border_of<kD>(window, pass, window.borders, window.index + 1));
}

template <int kD>
struct BackwardsLayout {
  static constexpr int kQueries = kChunk * kD * 2, kOutput = 2 * kQueries, kSystem = kOutput + kSquareBytes;
  static constexpr int kScores = kSystem + kSystemBytes, kStage = kScores + static_cast<int>(sizeof(GradScores));
  static constexpr int kRoom = 2 * kStage, kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) BackwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = BackwardsLayout<kD>;
  const GradArgs& grad = window.args;
  const Args& args = grad.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads;
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared);
  const int lane = pass.lane, D = static_cast<int>(args.key_width), V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const auto take_head = [&](int64_t chunk, int h, uint32_t stage) {
    const int64_t token = work.span.begin + chunk * kChunk, out_head = pass.head * window.group + h;
    const int tokens = tokens_in(pass, chunk);
    take_rows<T, kD, kOf>(stage + L::kQueries,
                          row_of<T>(args.query, args.query_strides, work.batch, out_head / (args.heads / args.q_heads), token),
                          args.query_strides.token, tokens, 0, D, window.vectors);
    take_rows<T, kSlice, kOf>(stage + L::kOutput, row_of<T>(grad.grad_output, args.output_strides, work.batch, out_head, token),
                              args.output_strides.token, tokens, pass.column, V, window.vectors);
    fetch_record<kOf>(stage + L::kScores,
                      &static_cast<const GradScores*>(window.scores)[slot_in(window, pass, chunk) * args.heads + out_head],
                      sizeof(GradScores));
    cp_async_commit();
  };
  const auto take = [&](int64_t chunk, uint32_t stage) {
    take_rows<T, kD, kOf>(stage,
                          row_of<T>(args.key, args.key_strides, work.batch, pass.key_head, work.span.begin + chunk * kChunk),
                          args.key_strides.token, tokens_in(pass, chunk), 0, D, window.vectors);
    fetch_record<kOf>(stage + L::kSystem,
                      &static_cast<const GradSystem*>(window.systems)[slot_in(window, pass, chunk) * args.v_heads + pass.head],
                      kSystemBytes);
    take_head(chunk, 0, stage);
  };

  if (work.first < work.last) take(work.last - 1, base);
  State<T, 64> state = {};
  begin_grads(window, pass, state);
  int turn = 0;
  for (int64_t chunk = work.last - 1; chunk >= work.first; --chunk, turn ^= 1) {
    const uint32_t keys = base + turn * L::kStage, queries = keys + L::kQueries, outputs = keys + L::kOutput;
    const uint32_t system = keys + L::kSystem, scores = keys + L::kScores;
    unsigned char* const stage = shared + turn * L::kStage;
    const TokenScalars& s = reinterpret_cast<const GradSystem*>(stage + L::kSystem)->tokens;
    const float* const query = reinterpret_cast<const GradScores*>(stage + L::kScores)->query;
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage has been read
    if (chunk > work.first) take(chunk - 1, base + (turn ^ 1) * L::kStage);
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    float u[2 * kBlocks][4];
    multiply_and_keep<0>(state, keys + part, static_cast<KeptState<kD>*>(window.grads)[at], pass, room, u);
    scale_columns(u, s.suffix, s.key, lane);
    float kept = s.prefix[kChunk - 1];
    for (int h = 0; h < window.group; ++h) {
      if (h > 0) {
        __syncthreads();
        take_head(chunk, h, keys);
        cp_async_wait();
        __syncthreads();
      }
      uint32_t output[kBlocks][4];
      float rows[2 * kBlocks][4];
      load_columns<T>(outputs, pass.slab, lane, output, rows);
      add_scores_turned<T>(output, scores, args.scale, pass, u);
      scale_columns(rows, s.prefix, query, lane, args.scale);
      state.enter(queries + part, lane, rows, kept);
      kept = 1.0f;
    }
    pass.join(u, shared + L::kRoom);
    solve<T, true>(system, system + kSquareBytes, lane, u);
    if (pass.part == 0) keep_update<T>(u, window.rules[at], room, pass.slab, lane);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      const float2 beta = column_pair(s.beta, n, lane);
#pragma unroll
      for (int e = 0; e < 4; e += 2) u[n][e] *= beta.x, u[n][e + 1] *= beta.y;
    }
    if (pass.part == 0) give_values<T>(window, pass, outputs, work.span.begin + chunk * kChunk, tokens_in(pass, chunk), u);
    scale_columns(u, s.prefix, s.key, lane, -1.0f);
    state.enter(keys + part, lane, u, 1.0f);
  }
  end_grads(window, pass, state);
}

// Of GradChunksKernel: rows of keys and queries, and slabs.
template <int kD>
struct ChunksLayout {
  static constexpr int kQueries = kChunk * kD * 2, kFirstSlab = 2 * kQueries;
  // In place of slabs when these have been read: gradients of scores of queries and of keys as planes, and products of both.
  static constexpr int kSquares = kFirstSlab, kProducts = kSquares + 4 * kSquareBytes;
  static constexpr int kShared = kFirstSlab + kSlabs * SlabLayout<kD>::kSlabBytes;
  static_assert(kProducts + kChunk * kGradPitch * 4 <= kShared);
};
struct ChunksShared {
  TokenScalars tokens;
  float query[kChunk];
  float of_query[2][kChunk], of_rule[2][kChunk], of_key[2][kChunk];  // q . dq and k . dk of states, of halves of D
  float grad_beta[2][kChunk], grad_g[kChunk], whole[kGradThreads / 32];
  float inverse[2][kBlocks][kBlocks];  // of blocks of squares
};

// Gradients of a chunk, from what SlabProducts finds.
template <class T, int kD>
struct ChunkGrads : SlabProducts<T, kD, false> {
  using Base = SlabProducts<T, kD, false>;
  using L = ChunksLayout<kD>;
  using Base::kLine, Base::kTiles;
  using Base::over_row;
  using Base::query, Base::rule, Base::key, Base::of_query, Base::of_key, Base::values, Base::whole;
  using Base::window, Base::chunk, Base::slot, Base::head, Base::block, Base::half, Base::lane, Base::at;
  unsigned char* const shared;
  ChunksShared& s;

  __device__ __forceinline__ ChunkGrads(const Window& of, const ChunkPlace& place, int64_t its_slot, int64_t its_head,
                                        unsigned char* its_shared)
      : Base(of, place, its_slot, its_head, shared_address(its_shared) + L::kFirstSlab), shared(its_shared),
        s(*reinterpret_cast<ChunksShared*>(its_shared + L::kShared)) {}

  __device__ __forceinline__ uint32_t base() const { return shared_address(shared); }

  // Sums over this warp's dimensions of rows of `tile` times x, of rows lane / 4 and 8 later; in the row's four lanes.
  __device__ __forceinline__ void dot_rows(const float (&x)[kTiles][4], int tile, float (&sums)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 pair =
            unpack_pair(T{}, *reinterpret_cast<const uint32_t*>(shared + tile + 1024 * r + (at.pairs ^ 16 * n)));
        sums[r] += pair.x * x[n][2 * r] + pair.y * x[n][2 * r + 1];
      }
      sums[r] = over_row(sums[r]);
    }
  }

  // The decays and lengths that products with states lack, and their rows' products with queries and keys.
  __device__ __forceinline__ void finish_states(bool with_keys) {
    float sums[2], rules[2], keys[2];
    dot_rows(query, L::kQueries, sums);
    if (with_keys) {
      dot_rows(rule, 0, rules);
      dot_rows(key, 0, keys);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      const float prefix = s.tokens.prefix[t], suffix = s.tokens.suffix[t], by_rule = prefix * s.tokens.beta[t];
      if (lane % 4 == 0) s.of_query[half][t] = prefix * s.query[t] * sums[r];
      if (with_keys && lane % 4 == 0) {
        s.of_rule[half][t] = prefix * s.tokens.key[t] * rules[r];
        s.of_key[half][t] = suffix * s.tokens.key[t] * keys[r];
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          query[n][e] *= prefix;
          if (with_keys) key[n][e] = suffix * key[n][e] - by_rule * rule[n][e];
        }
    }
  }

  // Products of this warp's rows of queries and keys with half of the keys, up to the diagonal.
  __device__ __forceinline__ void multiply_keys(float (&queries)[4][4], float (&keys)[4][4]) const {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      const int box = k / kBlocks * kSquareBytes, column = 32 * (k % kBlocks);
      uint32_t of_rows[4], of_keys[4];
      load_matrices(of_rows, base() + L::kQueries + box + (at.left ^ column));
      load_matrices(of_keys, base() + box + (at.left ^ column));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * half + j > block) continue;
        uint32_t b[4];
        load_matrices(b, base() + box + kLine * j + (at.rows ^ column));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma(T{}, queries[2 * j + n], of_rows, b[2 * n], b[2 * n + 1]);
          mma(T{}, keys[2 * j + n], of_keys, b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }

  // Gradients of scores stay, with the decay between the tokens; what scores hand on to decays and betas goes to shared memory.
  __device__ __forceinline__ void finish_scores(bool with_keys) {
    float queries[4][4] = {}, keys[4][4] = {};
    multiply_keys(queries, keys);
    float* const products = reinterpret_cast<float*>(shared + L::kProducts);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      const Until until(s.tokens.decay, t);
      const float of_t = s.query[t], key_t = s.tokens.key[t], beta = s.tokens.beta[t];
      float grad_beta = values[r];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int first = kChunk / 2 * half + 8 * n + fragment_column(lane, 0);
        const float2 decays = until.from<true>(s.tokens.decay, first), lengths = column_pair(s.tokens.key, 4 * half + n, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = first + i, e = 2 * r + i;
          const float decay = i ? decays.y : decays.x, length = i ? lengths.y : lengths.x;
          const float of_rule = from < t ? decay * of_key[n][e] : 0.0f, by_rule = of_rule * key_t * length * keys[n][e];
          of_query[n][e] = from <= t ? decay * of_query[n][e] : 0.0f;
          of_key[n][e] = -beta * of_rule;
          grad_beta -= by_rule;
          products[t * kGradPitch + from] =
              from < t ? of_query[n][e] * of_t * length * queries[n][e] - (with_keys ? beta * by_rule : 0.0f) : 0.0f;
        }
      }
      if (!with_keys) continue;
      grad_beta = over_row(grad_beta);
      if (lane % 4 == 0) s.grad_beta[half][t] = grad_beta;
    }
  }

  // A square times factors of its rows, or with kColumns of its columns.
  template <bool kColumns>
  __device__ __forceinline__ void put_times(int square, const float (&x)[4][4], const float* factors) const {
    const float rows[2] = {factors[kBlock * block + lane / 4], factors[kBlock * block + lane / 4 + 8]};
    this->put_square(base() + L::kSquares + 2 * square * kSquareBytes, s.inverse[square], x,
                     [&](int column, int e) { return kColumns ? factors[column + e % 2] : rows[e / 2]; });
  }

  // x += the square, or with kTurned its transpose, times the rows of a tile.
  template <bool kTurned>
  __device__ __forceinline__ void add_square(int square, int tile, float (&x)[kTiles][4]) const {
    const uint32_t high = base() + L::kSquares + 2 * square * kSquareBytes;
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      if (kTurned ? other < block : other > block) continue;
      uint32_t a[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if constexpr (kTurned) load_matrices_transposed(a[p], high + p * kSquareBytes + kLine * other + at.turned);
        else load_matrices(a[p], high + p * kSquareBytes + (at.left ^ 32 * other));
      }
      const float inverse = Left<T>::kScaled ? s.inverse[square][kTurned ? other : block][kTurned ? block : other] : 1.0f;
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        uint32_t b[1][4];
        load_matrices_transposed(b[0], base() + tile + kLine * other + (at.depth ^ 32 * j));
        add_product<T>(x[2 * j], a, b, 0, inverse);
        add_product<T>(x[2 * j + 1], a, b, 1, inverse);
      }
    }
  }

  // In place of products of pairs the sums of those of a row with earlier tokens than a column's.
  __device__ __forceinline__ void sum_products() const {
    const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    float* const at = reinterpret_cast<float*>(shared + L::kProducts) + row * kGradPitch + kBlock * part;
    float sum = 0.0f, before = 0.0f;
#pragma unroll
    for (int c = 0; c < kBlock; ++c) {
      const float x = at[c];
      at[c] = sum;
      sum += x;
    }
#pragma unroll
    for (int other = 0; other < 3; ++other) {
      const float x = __shfl_sync(kFullWarp, sum, lane / 4 * 4 + other);
      if (other < part) before += x;
    }
#pragma unroll
    for (int c = 0; c < kBlock; ++c) at[c] += before;
  }
  __device__ __forceinline__ void sum_decays(bool with_keys) const {
    const int t = static_cast<int>(threadIdx.x) / 4, first = static_cast<int>(threadIdx.x) % 4 * kBlock;
    const float* const products = reinterpret_cast<const float*>(shared + L::kProducts);
    float sum = 0.0f;
    for (int i = first; i < first + kBlock; ++i) {
      if (i >= t) sum += products[i * kGradPitch + t] + (s.of_query[0][i] + s.of_query[1][i]);
      if (!with_keys) continue;
      if (i >= t) sum -= s.tokens.beta[i] * (s.of_rule[0][i] + s.of_rule[1][i]);
      else sum += s.of_key[0][i] + s.of_key[1][i];
    }
    sum = over_row(sum);
    if (first != 0) return;
    if (with_keys) {
      float states = 0.0f;
      for (int i = 0; i < kGradThreads / 32; ++i) states += s.whole[i];
      s.grad_g[t] = sum + s.tokens.prefix[kChunk - 1] * states;
    } else {
      s.grad_g[t] += sum;
    }
  }

  // Rows of `to`, [token][D].
  __device__ __forceinline__ void give_rows(const float (&x)[kTiles][4], float* to) const {
    const int D = static_cast<int>(window.args.in.key_width);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = kBlock * block + fragment_row(lane, 2 * r);
      if (t >= chunk.tokens) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int d = kD / 2 * half + 8 * n + 2 * (lane % 4);
        float* const at = to + static_cast<int64_t>(t) * D + d;
        if (window.vectors) {
          if (d < D) *reinterpret_cast<float2*>(at) = make_float2(x[n][2 * r], x[n][2 * r + 1]);
        } else {
          if (d < D) at[0] = x[n][2 * r];
          if (d + 1 < D) at[1] = x[n][2 * r + 1];
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Args& args = window.args.in;
    const int D = static_cast<int>(args.key_width), tid = static_cast<int>(threadIdx.x);
    take_rows<T, kD, kGradThreads>(
        base(), row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
        args.key_strides.token, chunk.tokens, 0, D, window.vectors);
    const float* const tokens =
        reinterpret_cast<const float*>(&static_cast<const GradSystem*>(window.systems)[slot * args.v_heads + head].tokens);
    for (int i = tid; i < static_cast<int>(sizeof(TokenScalars) / 4); i += kGradThreads)
      reinterpret_cast<float*>(&s.tokens)[i] = tokens[i];
    for (int h = 0; h < window.group; ++h) {
      const int64_t out_head = head * window.group + h;
      const bool with_keys = h == 0;
      if (h > 0) __syncthreads();  // what is loaded next has been read
      take_rows<T, kD, kGradThreads>(
          base() + L::kQueries,
          row_of<T>(args.query, args.query_strides, chunk.batch, out_head / (args.heads / args.q_heads), chunk.token),
          args.query_strides.token, chunk.tokens, 0, D, window.vectors);
      if (tid < kChunk)
        s.query[tid] = args.scale * static_cast<const GradScores*>(window.scores)[slot * args.heads + out_head].query[tid];
      this->clear(query), this->clear(of_query);
      this->choose_columns(out_head);
      this->begin_slabs(out_head, with_keys);
      this->multiply_slabs(out_head, with_keys);
      finish_states(with_keys);
      if (with_keys) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) whole[0] += __shfl_xor_sync(kFullWarp, whole[0], offset);
        if (lane == 0) s.whole[tid / 32] = whole[0];
      }
      __syncthreads();  // the slabs have been read
      finish_scores(with_keys);
      put_times<true>(0, of_query, s.tokens.key);
      if (with_keys) put_times<true>(1, of_key, s.tokens.key);
      __syncthreads();
      add_square<false>(0, 0, query);
      if (with_keys) add_square<false>(1, 0, key);
      sum_products();
      give_rows(query, window.parts.query + ((chunk.batch * args.heads + out_head) * args.tokens + chunk.token) * D);
      __syncthreads();
      put_times<false>(0, of_query, s.query);
      if (with_keys) put_times<false>(1, of_key, s.tokens.key);
      sum_decays(with_keys);
      __syncthreads();
      add_square<true>(0, L::kQueries, key);
      if (with_keys) add_square<true>(1, 0, key);
    }
    const int64_t row = (chunk.batch * args.v_heads + head) * args.tokens + chunk.token;
    give_rows(key, window.parts.key + row * D);
    if (tid >= chunk.tokens) return;
    const GradArgs& grad = window.args;
    const auto give = [&](float* out, const Strides& strides, float x) {
      if (out != nullptr)
        const_cast<float*>(row_of<float>(out, strides, chunk.batch, head, chunk.token))[tid * strides.token] = x;
    };
    give(grad.grad_beta, args.beta_strides,
         s.grad_beta[0][tid] + s.grad_beta[1][tid] - (s.of_rule[0][tid] + s.of_rule[1][tid]));
    give(grad.grad_log_decay, args.decay_strides, s.grad_g[tid]);
  }
};

// A CTA: (slot, value head).
template <class T, int kD>
__global__ void __launch_bounds__(kGradThreads, 1) GradChunksKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int64_t slot = blockIdx.x / window.args.in.v_heads, head = blockIdx.x % window.args.in.v_heads;
  const ChunkPlace chunk = chunk_of(window.args.in, window.first_slot + slot);
  if (chunk.tokens == 0) return;
  ChunkGrads<T, kD> grads(window, chunk, slot, head, shared);
  grads.run();
}

// Bytes of shared memory of the kernel that asks for most.
template <int kD>
constexpr int most_shared() {
  constexpr int kChunks = ChunksLayout<kD>::kShared + static_cast<int>(sizeof(ChunksShared));
  return BackwardsLayout<kD>::kBytes > kChunks ? BackwardsLayout<kD>::kBytes : kChunks;
}

// keeps: all four kernels, else states alone, to the border of the next window.
template <class T, int kD>
cudaError_t launch_window(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  const int64_t chunks = window.slots * args.v_heads, states = args.requests * args.v_heads * window.slices;
  cudaError_t error = launch(GradPrepareKernel<T, kD>, chunks, kThreads, PrepareLayout<kD>::kBytes, window, stream);
  if (error == cudaSuccess)
    error = launch(ForwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, ForwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess || !window.keeps) return error;
  error = launch(BackwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, BackwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess) return error;
  return launch(GradChunksKernel<T, kD>, chunks, kGradThreads,
                ChunksLayout<kD>::kShared + static_cast<int>(sizeof(ChunksShared)), window, stream);
}

cudaError_t launch_window(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  if (args.decay_per_key) return launch_key_window(window, stream);
  if (args.dtype == static_cast<int32_t>(DType::kFloat16))
    return args.key_width <= 64 ? launch_window<__half, 64>(window, stream) : launch_window<__half, 128>(window, stream);
  return args.key_width <= 64 ? launch_window<__nv_bfloat16, 64>(window, stream)
                              : launch_window<__nv_bfloat16, 128>(window, stream);
}

#ifndef LEANFLEET_WINDOW_BYTES  // tests take less
#define LEANFLEET_WINDOW_BYTES (int64_t{1536} << 20)
#endif
constexpr int64_t kWindowBytes = LEANFLEET_WINDOW_BYTES;  // of the workspace, about

int64_t all_slots(const Args& args) {
  return !args.packed ? ceil_div(args.tokens, int64_t{kChunk}) * args.requests : args.tokens / kChunk + args.requests;
}

}  // namespace

bool grad_chunks_fit(const GradArgs& grad, int shared) {
  const Args& args = grad.in;
  if (args.dtype == static_cast<int32_t>(DType::kFloat32) || !args.delta) return false;
  // Scores and the system are held in the keys' type: float16 has no range for keys and queries of any length.
  if (args.dtype == static_cast<int32_t>(DType::kFloat16) && !args.normalize) return false;
  if (args.key_width > 128 || args.requests == 0) return false;
  if (args.tokens < kChunkedTokens * (args.packed ? args.requests : 1)) return false;
  const int64_t units = args.v_heads * ceil_div(args.value_width, int64_t{kSlice});
  if (all_slots(args) * (units > args.heads ? units : args.heads) > kMaxGrid) return false;
  if (args.decay_per_key) return shared >= key_grad_bytes(args.key_width).shared;
  return shared >= (args.key_width <= 64 ? most_shared<64>() : most_shared<128>());
}

int launch_grad_chunks(const GradArgs& grad, const GradParts& parts, const CudaTarget& target, Workspace& ws) {
  const Args& args = grad.in;
  Window window = {};
  window.args = grad;
  window.parts = parts;
  window.group = static_cast<int>(args.heads / args.v_heads);
  window.slices = static_cast<int>(ceil_div(args.value_width, int64_t{kSlice}));
  const int64_t units = args.v_heads * window.slices, slots = all_slots(args);
  const int64_t state_bytes = args.key_width <= 64 ? sizeof(KeptState<64>) : sizeof(KeptState<128>);
  const KeyGradBytes records =
      args.decay_per_key ? key_grad_bytes(args.key_width) : KeyGradBytes{sizeof(GradSystem), sizeof(GradScores), 0};
  const int64_t slot_bytes = args.v_heads * records.system + args.heads * records.scores +
                             2 * units * (state_bytes + static_cast<int64_t>(sizeof(KeptUpdate)));
  // Windows of whole chunks of all requests, where these alternate.
  const int64_t step = args.packed ? 1 : args.requests;
  const int64_t chunks = ceil_div(slots, step);
  int64_t most = kWindowBytes / slot_bytes / step > 0 ? kWindowBytes / slot_bytes / step : 1;
  // Of many requests each window keeps a state at its border: more windows than their root would keep more of these.
  if (most < chunks && most * most < chunks) most = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  const int64_t windows = ceil_div(chunks, most);
  const int64_t held = ceil_div(chunks, windows) * step;
  const int64_t border_floats = step * units * state_bytes / 4;
  window.systems = ws.scratch<unsigned char>(held * args.v_heads * records.system);
  window.scores = ws.scratch<unsigned char>(held * args.heads * records.scores);
  window.states = ws.scratch<unsigned char>(held * units * state_bytes);
  window.grads = ws.scratch<unsigned char>(held * units * state_bytes);
  window.updates = ws.scratch<KeptUpdate>(held * units);
  window.rules = ws.scratch<KeptUpdate>(held * units);
  window.borders = ws.scratch<float>(windows > 1 ? windows * border_floats : 0);
  window.carried = ws.scratch<float>(windows > 1 ? 2 * border_floats : 0);
  if (ws.counting()) return cudaSuccess;

  window.vectors = args.key_width % 8 == 0 && args.value_width % 8 == 0;
  for (const void* data : {args.query, args.key, args.value, grad.grad_output, static_cast<const void*>(grad.grad_value)})
    window.vectors = window.vectors && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  const auto launch_at = [&](int64_t index, bool keeps) {
    window.index = index;
    window.first_slot = index * held;
    window.slots = slots - window.first_slot < held ? slots - window.first_slot : held;
    window.keeps = keeps;
    return launch_window(window, stream);
  };
  cudaError_t error = cudaSuccess;
  for (int64_t index = 0; index + 1 < windows && error == cudaSuccess; ++index) error = launch_at(index, false);
  for (int64_t index = windows - 1; index >= 0 && error == cudaSuccess; --index) error = launch_at(index, true);
  return error;
}

}  // namespace leanfleet::gated_delta_rule
