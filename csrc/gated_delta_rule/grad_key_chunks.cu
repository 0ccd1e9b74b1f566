// GatedDeltaRuleGrad in chunks of 64 tokens on tensor cores where key dimensions have decays of their own: counterparts of the
// four kernels of grad_chunks.cu. Keys and queries come with decays multiplied into them, as sums of two 16-bit numbers, and no
// decay is ever divided by, see key_blocks.cuh: any decays go this way.
//   KeyPrepareKernel    of all chunks at once: the system, P, keys and queries with decays
//   KeyForwardsKernel   takes states from chunk to chunk: keeps S before each, its first token's decay in it, and U
//   KeyBackwardsKernel  takes gradients of states from the last chunk to the first: keeps dS behind each, Y; gives grad_value
//   KeyChunksKernel     of all chunks at once, what S, dS, U and Y hand on to queries, keys, betas and decays
// The decay of a chunk's first token is multiplied into the state before the chunk, and into its gradient, in float32; that of
// a block's first token into sums over its rows. What is left for planes is 1 at one token at least: where all decays are
// steep, the largest numbers stay in float16's range.
#include <cuda_runtime.h>

#include "core/op.h"
#include "gated_delta_rule/grad_chunks.cuh"
#include "gated_delta_rule/key_blocks.cuh"

namespace leanfleet::gated_delta_rule {

namespace {

// Records in global memory. Of a chunk and a value head: keys with the decay from their token to the chunk's end, and from
// behind its first token to theirs, as planes; -M as make_system has it; key: 1 over the lengths of keys; first: the decay of
// the chunk's first token, kept: that of the others.
template <int kD>
struct alignas(128) KeyGradSystem {
  unsigned char to_state[2][kChunk * kD * 2], from_state[2][kChunk * kD * 2], planes[2][kSquareBytes];
  float beta[kChunk], key[kChunk], first[kD], kept[kD];
};
// Of a chunk and a head of the output: queries with the decay from behind the chunk's first token, and P, both over scale.
template <int kD>
struct alignas(128) KeyGradScores {
  unsigned char from_state[2][kChunk * kD * 2], planes[2][kSquareBytes];
  float query[kChunk];
};

template <int kD>
__device__ __forceinline__ KeyGradSystem<kD>& system_at(const Window& window, int64_t slot, int64_t head) {
  return static_cast<KeyGradSystem<kD>*>(window.systems)[slot * window.args.in.v_heads + head];
}
template <int kD>
__device__ __forceinline__ KeyGradScores<kD>& scores_at(const Window& window, int64_t slot, int64_t out_head) {
  return static_cast<KeyGradScores<kD>*>(window.scores)[slot * window.args.in.heads + out_head];
}

// Of the first kernel: rows as they are; in two planes rows with decay from their block's first token and keys with that to
// their block's last; decays of tokens; the system and P.
template <int kD>
struct KeyPrepareLayout {
  static constexpr int kPrepareThreads = 4 * kD, kRows = kChunk * kD * 2;
  static constexpr int kQueries = kRows, kKeysFirst = 2 * kRows, kQueriesFirst = 4 * kRows, kLast = 6 * kRows;
  static constexpr int kDecays = 8 * kRows, kSystem = 10 * kRows, kScores = kSystem + 2 * kSquareBytes;
  static constexpr int kShared = kScores + 2 * kSquareBytes;
  static_assert(kChunk * kD * 4 <= kSystem - kDecays);
};
template <int kD>
struct KeyPrepareShared {
  float key[kChunk], query[kChunk], beta[kChunk];  // factors of rows
  float totals[kBlocks][kD];                       // decays of blocks, of the first one but for its first token
  alignas(16) float diagonal[kBlocks][kBlock][kDiagonalStride];
};

// A CTA's part of KeyPrepareKernel. Half of its threads have two columns of a block of keys each, the others of queries.
template <class T, int kD>
struct KeyPrepare {
  using L = KeyPrepareLayout<kD>;
  static constexpr int kOf = L::kPrepareThreads;
  const Window& window;
  const ChunkPlace chunk;
  const int64_t slot, head, out_head;
  unsigned char* const shared;
  KeyPrepareShared<kD>& s;

  __device__ __forceinline__ uint32_t at(int offset) const { return shared_address(shared) + offset; }
  __device__ __forceinline__ float* decays() const { return reinterpret_cast<float*>(shared + L::kDecays); }
  static __device__ __forceinline__ bool has_keys() { return threadIdx.x < 2 * kD; }
  __device__ __forceinline__ bool makes_system() const { return out_head == head * window.group; }
  __device__ __forceinline__ void put(int tile, int row, int column, float2 x) const {
    store_planes<T>(at(tile), at(tile + L::kRows), row, column, x.x, x.y);
  }

  __device__ __forceinline__ void take_chunk() const {
    const Args& args = window.args.in;
    const int D = static_cast<int>(args.key_width), tid = static_cast<int>(threadIdx.x);
    take_rows<T, kD, kOf>(at(0),
                          row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
                          args.key_strides.token, chunk.tokens, 0, D, window.vectors);
    take_rows<T, kD, kOf>(
        at(L::kQueries),
        row_of<T>(args.query, args.query_strides, chunk.batch, out_head / (args.heads / args.q_heads), chunk.token),
        args.query_strides.token, chunk.tokens, 0, D, window.vectors);
    cp_async_commit();
    if (tid < kChunk) s.beta[tid] = beta_of(args, chunk, head, tid);
    for (int i = 16 * tid; i < 2 * kSquareBytes; i += 16 * kOf)  // what is above the diagonal stays 0
      store_16_bytes(at(L::kScores) + i, make_uint4(0, 0, 0, 0));
  }

  // Decays are kept by threads of keys and left in shared memory for the others.
  __device__ __forceinline__ void take_decays(KeyColumns<kD>& c) const {
    if (!has_keys()) return;
    c.load_decays(window.args.in, chunk, head, 0);
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      *reinterpret_cast<float2*>(decays() + (c.first_token + i) * kD + decay_place(c.column)) = c.decay[i];
  }

  __device__ __forceinline__ void make_rows(KeyColumns<kD>& c) const {
    const float2 one = make_float2(1.0f, 1.0f);
    if (has_keys()) {
      c.template take_rows<T>(shared, s.key);
      c.from_first(one, [&](int t, float2 x) { put(L::kKeysFirst, t, c.column, x); });
      c.to_last(one, [&](int t, float2 x) { put(L::kLast, t, c.column, x); });
    } else {
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        c.decay[i] = *reinterpret_cast<const float2*>(decays() + (c.first_token + i) * kD + decay_place(c.column));
      c.template take_rows<T>(shared + L::kQueries, s.query);
      c.from_first(one, [&](int t, float2 x) { put(L::kQueriesFirst, t, c.column, x); });
    }
  }

  // Without the chunk's first token from here on.
  __device__ __forceinline__ void sum_decays(KeyColumns<kD>& c) const {
    if (c.first_token == 0) {
      if (has_keys() && makes_system())
        *reinterpret_cast<float2*>(&system_at<kD>(window, slot, head).first[c.column]) = c.decay[0];
      c.decay[0] = make_float2(1.0f, 1.0f);
    }
    if (has_keys()) *reinterpret_cast<float2*>(&s.totals[c.first_token / kBlock][c.column]) = c.over_block();
  }

  // To the records, once decays of whole blocks are there.
  __device__ __forceinline__ void send_rows(const KeyColumns<kD>& c) const {
    const int block = c.first_token / kBlock;
    const float2 before = whole_blocks(s.totals, 0, block, c.column);
    if (!has_keys()) {
      KeyGradScores<kD>& to = scores_at<kD>(window, slot, out_head);
      c.from_first(before, [&](int t, float2 x) { send_planes<T>(to.from_state, t, c.column, x); });
    } else if (makes_system()) {
      KeyGradSystem<kD>& to = system_at<kD>(window, slot, head);
      c.from_first(before, [&](int t, float2 x) { send_planes<T>(to.from_state, t, c.column, x); });
      c.to_last(whole_blocks(s.totals, block + 1, kBlocks, c.column),
                [&](int t, float2 x) { send_planes<T>(to.to_state, t, c.column, x); });
      if (block == 0) *reinterpret_cast<float2*>(&to.kept[c.column]) = whole_blocks(s.totals, 0, kBlocks, c.column);
    }
  }

  __device__ __forceinline__ void make_below_diagonal(int warp, int lane) const {
    for (int task = warp; task < 2 * kBefore; task += kOf / 32) {
      const Below of(task % kBefore);
      const bool of_scores = task < kBefore;
      float c[2][4] = {};
      between_blocks<T, kD, L::kRows>(at(of_scores ? L::kQueriesFirst : L::kKeysFirst), at(L::kLast), s.totals, of, lane, c);
      const uint32_t to = at(of_scores ? L::kScores : L::kSystem);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = kBlock * of.row_block + fragment_row(lane, 2 * r);
          const float by = of_scores ? 1.0f : -s.beta[row];
          store_planes<T>(to, to + kSquareBytes, row, kBlock * of.key_block + 8 * n + fragment_column(lane, 0),
                          by * c[n][2 * r], by * c[n][2 * r + 1]);
        }
    }
  }
  __device__ __forceinline__ void make_diagonal(int warp, int lane) const {
    for (int task = warp; task < kBlocks * kBlocks; task += kOf / 32) {
      const int block = task / kBlocks;
      within_block<T, kD>(at(0), at(L::kQueries), decays(), block, task % kBlocks, lane,
                          [&](int to, int from, float m, float p) {
                            const int row = kBlock * block + to;
                            const float by = s.key[kBlock * block + from];
                            if (lane % 8 == 0 && from < to) s.diagonal[block][to][from] = -s.beta[row] * s.key[row] * by * m;
                            if (lane % 8 == 1 && from <= to) {
                              uint32_t planes[2];
                              split_pair<T>(s.query[row] * by * p, 0.0f, planes);
                              const uint32_t place = at(L::kScores) + element_offset(row, kBlock * block + from);
                              store_2_bytes(place, static_cast<uint16_t>(planes[0]));
                              store_2_bytes(place + kSquareBytes, static_cast<uint16_t>(planes[1]));
                            }
                          });
    }
  }

  __device__ __forceinline__ void run() const {
    const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
    KeyColumns<kD> c;
    take_chunk();
    take_decays(c);
    cp_async_wait();
    __syncthreads();
    if (tid < kChunk) s.key[tid] = row_factor<T, kD>(at(0), tid, window.args.in.normalize, 1.0f);
    else if (tid < 2 * kChunk)
      s.query[tid - kChunk] = row_factor<T, kD>(at(L::kQueries), tid - kChunk, window.args.in.normalize, 1.0f);
    __syncthreads();
    make_rows(c);
    sum_decays(c);
    __syncthreads();
    send_rows(c);
    make_below_diagonal(warp, lane);
    make_diagonal(warp, lane);
    __syncthreads();
    KeyGradScores<kD>& scores = scores_at<kD>(window, slot, out_head);
    keep_record<kOf>(scores.planes, at(L::kScores), 2 * kSquareBytes);
    if (tid < kChunk) scores.query[tid] = s.query[tid];
    if (!makes_system()) return;
    if (warp < kBlocks) put_inverse_block<T>(s.diagonal[warp], at(L::kSystem), at(L::kSystem) + kSquareBytes, warp, lane);
    __syncthreads();
    KeyGradSystem<kD>& system = system_at<kD>(window, slot, head);
    keep_record<kOf>(system.planes, at(L::kSystem), 2 * kSquareBytes);
    if (tid < kChunk) system.beta[tid] = s.beta[tid], system.key[tid] = s.key[tid];
  }
};

// A CTA: (slot, head of the output). The first head of a state makes its system.
template <class T, int kD>
__global__ void __launch_bounds__(KeyPrepareLayout<kD>::kPrepareThreads, 1)
    KeyPrepareKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int64_t heads = window.args.in.heads, slot = blockIdx.x / heads, out_head = blockIdx.x % heads;
  const ChunkPlace chunk = chunk_of(window.args.in, window.first_slot + slot);
  if (chunk.tokens == 0) return;
  const KeyPrepare<T, kD> of{window,
                             chunk,
                             slot,
                             out_head / window.group,
                             out_head,
                             shared,
                             *reinterpret_cast<KeyPrepareShared<kD>*>(shared + KeyPrepareLayout<kD>::kShared)};
  of.run();
}

template <int kD>
struct KeyForwardsLayout {
  static constexpr int kRows = kChunk * kD * 2, kValues = sizeof(KeyGradSystem<kD>), kStage = kValues + kSquareBytes;
  static constexpr int kRoom = 2 * kStage, kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) KeyForwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = KeyForwardsLayout<kD>;
  using System = KeyGradSystem<kD>;
  const Args& args = window.args.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads;
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared);
  const int lane = pass.lane, V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const auto take = [&](int64_t chunk, uint32_t stage) {
    fetch_record<kOf>(stage, &system_at<kD>(window, slot_in(window, pass, chunk), pass.head), sizeof(System));
    take_rows<T, kSlice, kOf>(
        stage + L::kValues, row_of<T>(args.value, args.value_strides, work.batch, pass.head, work.span.begin + chunk * kChunk),
        args.value_strides.token, tokens_in(pass, chunk), pass.column, V, window.vectors);
    cp_async_commit();
  };

  if (work.first < work.last) take(work.first, base);
  State<T, 64> state = {};
  begin_states(window, pass, state);
  int turn = 0;
  for (int64_t chunk = work.first; chunk < work.last; ++chunk, turn ^= 1) {
    const uint32_t stage = base + turn * L::kStage, from_state = stage + offsetof(System, from_state) + part;
    const uint32_t system = stage + offsetof(System, planes);
    const System& record = *reinterpret_cast<const System*>(shared + turn * L::kStage);
    cp_async_wait();
    __syncthreads();  // the chunk is there, and the other stage has been read
    if (chunk + 1 < work.last) take(chunk + 1, base + (turn ^ 1) * L::kStage);
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    state.decay([&](int n) { return column_pair(record.first + 64 * pass.part, n, lane); });
    float u[2 * kBlocks][4];
    if (window.keeps) {
      multiply_and_keep<L::kRows>(state, from_state, static_cast<KeptState<kD>*>(window.states)[at], pass, room, u);
    } else {
      state.template multiply<L::kRows>(from_state, lane, u, [](int, const Left<T>&, float) {});
    }
    pass.join(u, shared + L::kRoom);
    take_rest<T>(stage + L::kValues, record.beta, [](int) { return make_float2(1.0f, 1.0f); }, pass.slab, lane, u);
    solve<T>(system, system + kSquareBytes, lane, u);
    if (window.keeps && pass.part == 0) keep_update<T>(u, window.updates[at], room, pass.slab, lane);
    state.template enter<L::kRows>(stage + part, lane, u,
                                   [&](int n) { return column_pair(record.kept + 64 * pass.part, n, lane); });
  }
  if (!window.keeps && !work.ends) move_border<true>(state.x, border_of<kD>(window, pass, window.borders, window.index + 1));
}

// A chunk's records in one place: what has been read is fetched for the next chunk while the rest is at work.
template <int kD>
struct KeyBackwardsLayout {
  static constexpr int kRows = kChunk * kD * 2, kQueries = sizeof(KeyGradSystem<kD>);
  static constexpr int kOutput = kQueries + static_cast<int>(sizeof(KeyGradScores<kD>)), kRoom = kOutput + kSquareBytes;
  static constexpr int kBytes = kRoom + kD / 64 * kWarps * kWarpRoom;
};

// A CTA: (request, value head, slice of columns).
template <class T, int kD>
__global__ void __launch_bounds__(Pass<kD>::kPassThreads) KeyBackwardsKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using L = KeyBackwardsLayout<kD>;
  using System = KeyGradSystem<kD>;
  const GradArgs& grad = window.args;
  const Args& args = grad.in;
  const Pass<kD> pass(window);
  constexpr int kOf = Pass<kD>::kPassThreads, kRest = offsetof(System, from_state);
  const Work& work = pass.work;
  if (!work.there) return;
  const uint32_t base = shared_address(shared), system = base + offsetof(System, planes);
  const uint32_t scores = base + L::kQueries + offsetof(KeyGradScores<kD>, planes), outputs = base + L::kOutput;
  const int lane = pass.lane, V = static_cast<int>(args.value_width);
  const uint32_t room = pass.room(base + L::kRoom), part = pass.tile_part();
  const System& record = *reinterpret_cast<const System*>(shared);
  const auto take_system = [&](int64_t chunk, int first, int last) {
    const System& from = system_at<kD>(window, slot_in(window, pass, chunk), pass.head);
    fetch_record<kOf>(base + first, reinterpret_cast<const unsigned char*>(&from) + first, last - first);
  };
  const auto take_scores = [&](int64_t chunk, int h) {
    fetch_record<kOf>(base + L::kQueries, &scores_at<kD>(window, slot_in(window, pass, chunk), pass.head * window.group + h),
                      sizeof(KeyGradScores<kD>));
  };
  const auto take_output = [&](int64_t chunk, int h) {
    take_rows<T, kSlice, kOf>(outputs,
                              row_of<T>(grad.grad_output, args.output_strides, work.batch, pass.head * window.group + h,
                                        work.span.begin + chunk * kChunk),
                              args.output_strides.token, tokens_in(pass, chunk), pass.column, V, window.vectors);
  };

  if (work.first < work.last) {
    take_system(work.last - 1, 0, kRest);
    cp_async_commit();
    take_scores(work.last - 1, 0);
    cp_async_commit();
    take_system(work.last - 1, kRest, sizeof(System));
    take_output(work.last - 1, 0);
    cp_async_commit();
  }
  State<T, 64> state = {};
  begin_grads(window, pass, state);
  for (int64_t chunk = work.last - 1; chunk >= work.first; --chunk) {
    const bool more = chunk > work.first;
    const int64_t at = slot_in(window, pass, chunk) * pass.units + pass.unit;
    cp_async_wait_but<2>();
    __syncthreads();  // keys up to the chunk's end are there
    float u[2 * kBlocks][4];
    multiply_and_keep<L::kRows>(state, base + part, static_cast<KeptState<kD>*>(window.grads)[at], pass, room, u);
    __syncthreads();
    if (more) take_system(chunk - 1, 0, kRest);
    cp_async_commit();
    cp_async_wait_but<1>();
    __syncthreads();  // all else is there
    for (int h = 0; h < window.group; ++h) {
      if (h > 0) {
        __syncthreads();
        take_scores(chunk, h);
        take_output(chunk, h);
        cp_async_commit();
        cp_async_wait();
        __syncthreads();
      }
      uint32_t output[kBlocks][4];
      float rows[2 * kBlocks][4];
      load_columns<T>(outputs, pass.slab, lane, output, rows);
      add_scores_turned<T>(output, scores, args.scale, pass, u);
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[n][e] *= args.scale;
      state.template enter<L::kRows>(base + L::kQueries + part, lane, rows, [&](int n) {
        return h > 0 ? make_float2(1.0f, 1.0f) : column_pair(record.kept + 64 * pass.part, n, lane);
      });
    }
    pass.join(u, shared + L::kRoom);
    __syncthreads();
    if (more) take_scores(chunk - 1, 0);
    cp_async_commit();
    solve<T, true>(system, system + kSquareBytes, lane, u);
    if (pass.part == 0) keep_update<T>(u, window.rules[at], room, pass.slab, lane);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      const float2 beta = column_pair(record.beta, n, lane);
#pragma unroll
      for (int e = 0; e < 4; e += 2) u[n][e] *= beta.x, u[n][e + 1] *= beta.y;
    }
    if (pass.part == 0) give_values<T>(window, pass, outputs, work.span.begin + chunk * kChunk, tokens_in(pass, chunk), u);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) u[n][e] = -u[n][e];
    state.template enter<L::kRows>(base + kRest + part, lane, u, [](int) { return make_float2(1.0f, 1.0f); });
    state.decay([&](int n) { return column_pair(record.first + 64 * pass.part, n, lane); });
    __syncthreads();
    if (more) {
      take_system(chunk - 1, kRest, sizeof(System));
      take_output(chunk - 1, 0);
    }
    cp_async_commit();
  }
  end_grads(window, pass, state);
}

// Of the last kernel: rows as they are; in two planes keys with decay to their block's last token, keys times -beta and
// queries with that from behind their block's first; slabs. Later, in place of slabs, squares of pairs of tokens, and those
// within blocks as pairs of floats; in place of planes three tiles of floats.
template <int kD>
struct KeyChunksLayout {
  static constexpr int kRows = kChunk * kD * 2, kQueries = kRows, kLast = 2 * kRows, kKeysFirst = 4 * kRows;
  static constexpr int kQueriesFirst = 6 * kRows, kFirstSlab = 8 * kRows, kSums = kLast;
  static constexpr int kSquares = kFirstSlab, kDiagonal = kSquares + 4 * kSquareBytes;
  static constexpr int kShared = kFirstSlab + kSlabs * SlabLayout<kD>::kSlabBytes;
  static_assert(kDiagonal + kBlocks * kBlock * kBlock * 8 <= kShared);
  static_assert(3 * kChunk * kD * 4 <= kFirstSlab - kSums);
};
template <int kD>
struct KeyChunksShared {
  float beta[kChunk], key[kChunk], query[kChunk];  // factors of rows
  float totals[kBlocks][kD];                       // decays of blocks, of the first one but for its first token
  float firsts[kBlocks][kD];                       // decays of blocks' first tokens
  float whole[kBlocks][kD];                        // S . dS, of every fourth slab
  float states[kBlocks][kD], rows[kBefore][kD];    // see KeyChunkGrads
  float values[kChunk], grad_beta[kD / 32][kChunk];
  float inverse[2][kBlocks][kBlocks];  // of blocks of squares
};

// A CTA's part of KeyChunksKernel. What tokens hand on to each other and to states runs through the decays of all tokens
// between: the gradient of a token's is the sum of all that runs through it, of products of rows or keys with their own
// gradients. What runs through a whole block comes from the state or from keys of blocks before it, and goes to rows of blocks
// behind it or to the state behind. Of a block `states` is what its keys hand on to the state behind; of a row's block and one
// before it `rows` is what comes to its rows through all of the other, from the state and from blocks before that. Each such
// sum has the decay of the block it runs through as a factor, and nothing is subtracted: where that is 0, so are the sums.
template <class T, int kD>
struct KeyChunkGrads : SlabProducts<T, kD, true> {
  using Base = SlabProducts<T, kD, true>;
  using L = KeyChunksLayout<kD>;
  using Base::kLine, Base::kTiles;
  using Base::over_row;
  using Base::query, Base::rule, Base::key, Base::of_query, Base::of_key, Base::values, Base::whole;
  using Base::window, Base::chunk, Base::slot, Base::head, Base::block, Base::half, Base::lane, Base::at;
  unsigned char* const shared;
  KeyChunksShared<kD>& s;
  const int64_t out_head;
  const bool with_keys;  // as the first head of the output of its state

  __device__ __forceinline__ KeyChunkGrads(const Window& of, const ChunkPlace& place, int64_t its_slot, int64_t its_head,
                                           unsigned char* its_shared)
      : Base(of, place, its_slot, its_head / of.group, shared_address(its_shared) + L::kFirstSlab), shared(its_shared),
        s(*reinterpret_cast<KeyChunksShared<kD>*>(its_shared + L::kShared)), out_head(its_head),
        with_keys(its_head % of.group == 0) {}

  __device__ __forceinline__ uint32_t base() const { return shared_address(shared); }
  __device__ __forceinline__ int dimension(int n) const { return kD / 2 * half + 8 * n + fragment_column(lane, 0); }
  // The number of a block below the diagonal, as Below has it.
  static __device__ __forceinline__ int below(int row_block, int other) { return row_block * (row_block - 1) / 2 + other; }

  __device__ __forceinline__ void take_chunk() const {
    const Args& args = window.args.in;
    const int D = static_cast<int>(args.key_width), tid = static_cast<int>(threadIdx.x);
    take_rows<T, kD, kGradThreads>(
        base(), row_of<T>(args.key, args.key_strides, chunk.batch, head / (args.v_heads / args.k_heads), chunk.token),
        args.key_strides.token, chunk.tokens, 0, D, window.vectors);
    take_rows<T, kD, kGradThreads>(
        base() + L::kQueries,
        row_of<T>(args.query, args.query_strides, chunk.batch, out_head / (args.heads / args.q_heads), chunk.token),
        args.query_strides.token, chunk.tokens, 0, D, window.vectors);
    cp_async_commit();
    if (tid < kChunk) {
      const KeyGradSystem<kD>& system = system_at<kD>(window, slot, head);
      s.beta[tid] = system.beta[tid], s.key[tid] = system.key[tid];
      s.query[tid] = scores_at<kD>(window, slot, out_head).query[tid];
    }
  }

  // Planes of keys and queries with decays, without scale, which could take numbers out of float16's range.
  __device__ __forceinline__ void make_rows() const {
    if (threadIdx.x >= 2 * kD) return;
    KeyColumns<kD> c;
    const float2 one = make_float2(1.0f, 1.0f);
    const auto put = [&](int tile, int t, float2 x) {
      store_planes<T>(base() + tile, base() + tile + L::kRows, t, c.column, x.x, x.y);
    };
    const int its_block = c.first_token / kBlock;
    c.load_decays(window.args.in, chunk, head, 0);
    c.template take_rows<T>(shared, s.key);
    c.to_last(one, [&](int t, float2 x) { put(L::kLast, t, x); });
    const float2 first = c.decay[0];
    c.decay[0] = one;
    c.from_first(one, [&](int t, float2 x) { put(L::kKeysFirst, t, times(-s.beta[t], x)); });
    *reinterpret_cast<float2*>(&s.firsts[its_block][c.column]) = first;
    *reinterpret_cast<float2*>(&s.totals[its_block][c.column]) = its_block == 0 ? c.over_block() : times(first, c.over_block());
    c.template take_rows<T>(shared + L::kQueries, s.query);
    c.from_first(one, [&](int t, float2 x) { put(L::kQueriesFirst, t, x); });
  }

  // Products with states times the decay of whole blocks between, and what keys hand on to the state behind.
  __device__ __forceinline__ void finish_states() {
    if (with_keys) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float sum = over_row(whole[n]);
        if (lane % 4 == 0) s.whole[block][kD / 2 * half + 8 * n + lane / 4] = sum;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = over_row(values[r]);
        if (half == 0 && lane % 4 == 0) s.values[kBlock * block + fragment_row(lane, 2 * r)] = sum;
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 before = whole_blocks(s.totals, 0, block, dimension(n)),
                   behind = whole_blocks(s.totals, block + 1, kBlocks, dimension(n));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        query[n][2 * r] *= before.x, query[n][2 * r + 1] *= before.y;
        rule[n][2 * r] *= before.x, rule[n][2 * r + 1] *= before.y;
        key[n][2 * r] *= behind.x, key[n][2 * r + 1] *= behind.y;
      }
    }
    sum_keys(key, s.states[block]);
  }
  // sums += rows of a tile in planes times x, of this warp's rows that the lane has.
  __device__ __forceinline__ void add_products_with(int tile, const float (&x)[kTiles][4], float2 (&sums)[kTiles]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned char* const place = shared + tile + 1024 * r + (at.pairs ^ 16 * n);
        const uint32_t planes[2] = {*reinterpret_cast<const uint32_t*>(place),
                                    *reinterpret_cast<const uint32_t*>(place + L::kRows)};
        const float2 row = join_pair<T>(planes);
        sums[n].x += row.x * x[n][2 * r], sums[n].y += row.y * x[n][2 * r + 1];
      }
  }
  // The sums of all lanes that have the same key dimensions.
  __device__ __forceinline__ void put_sums(const float2 (&sums)[kTiles], float* to) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float2 sum = sums[n];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        sum.x += __shfl_xor_sync(kFullWarp, sum.x, offset);
        sum.y += __shfl_xor_sync(kFullWarp, sum.y, offset);
      }
      if (lane < 4) *reinterpret_cast<float2*>(&to[dimension(n)]) = sum;
    }
  }
  __device__ __forceinline__ void sum_keys(const float (&x)[kTiles][4], float* to) const {
    float2 sums[kTiles] = {};
    add_products_with(L::kLast, x, sums);
    put_sums(sums, to);
  }
  // Of rows behind block `other`, before what they get from it and from blocks behind it is added.
  __device__ __forceinline__ void sum_rows(int other) const {
    float2 sums[kTiles] = {};
    add_products_with(L::kQueriesFirst, query, sums);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) sums[n] = times(window.args.in.scale, sums[n]);
    if (with_keys) add_products_with(L::kKeysFirst, rule, sums);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) sums[n] = times(sums[n], *reinterpret_cast<const float2*>(&s.firsts[block][dimension(n)]));
    put_sums(sums, s.rows[below(block, other)]);
  }

  // dO U^T and Y U^T: planes, of which what is below the blocks on the diagonal is read, and these blocks as pairs of floats.
  __device__ __forceinline__ void put_pairs() const {
    const auto as_it_is = [](int, int) { return 1.0f; };
    this->put_square(base() + L::kSquares, s.inverse[0], of_query, as_it_is);
    if (with_keys) this->put_square(base() + L::kSquares + 2 * kSquareBytes, s.inverse[1], of_key, as_it_is);
    if (block / 2 != half) return;
    float2* const diagonal = reinterpret_cast<float2*>(shared + L::kDiagonal) + block * kBlock * kBlock;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n / 2 != block % 2) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        diagonal[fragment_row(lane, e) * kBlock + 8 * (n % 2) + fragment_column(lane, e)] =
            make_float2(of_query[n][e], of_key[n][e]);
    }
  }

  // x += a block of a square, or with kTurned its transpose, times the rows of a tile, times the decay of whole blocks between;
  // queries, those of square 0 with kTurned, also times scale.
  template <bool kTurned>
  __device__ __forceinline__ void add_block(int square, int other, int tile, float (&x)[kTiles][4]) const {
    const uint32_t high = base() + L::kSquares + 2 * square * kSquareBytes;
    uint32_t a[2][4];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if constexpr (kTurned) load_matrices_transposed(a[p], high + p * kSquareBytes + kLine * other + at.turned);
      else load_matrices(a[p], high + p * kSquareBytes + (at.left ^ 32 * other));
    }
    const float inverse = Left<T>::kScaled ? s.inverse[square][kTurned ? other : block][kTurned ? block : other] : 1.0f;
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t b[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p)
        load_matrices_transposed(b[p], base() + tile + p * L::kRows + kLine * other + (at.depth ^ 32 * j));
#pragma unroll
      for (int n = 2 * j; n < 2 * j + 2; ++n) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        add_product<T>(sum, a, b, n % 2, inverse);
        float2 by = whole_blocks(s.totals, (kTurned ? block : other) + 1, kTurned ? other : block, dimension(n));
        if (kTurned) by = times(by, *reinterpret_cast<const float2*>(&s.firsts[other][dimension(n)]));
        if (kTurned && square == 0) by = times(window.args.in.scale, by);
#pragma unroll
        for (int e = 0; e < 4; e += 2) x[n][e] += by.x * sum[e], x[n][e + 1] += by.y * sum[e + 1];
      }
    }
  }
  __device__ __forceinline__ void add_blocks() {
#pragma unroll 1
    for (int other = 0; other < block; ++other) {
      sum_rows(other);
      add_block<false>(0, other, L::kLast, query);
      if (with_keys) add_block<false>(1, other, L::kLast, rule);
    }
#pragma unroll 1
    for (int other = block + 1; other < kBlocks; ++other) {
      add_block<true>(0, other, L::kQueriesFirst, key);
      if (with_keys) add_block<true>(1, other, L::kKeysFirst, key);
    }
  }

  // Tiles of floats: rows of kD, whose groups of eight stand where the row's number takes them, so that eight rows of a
  // fragment are in banks of their own.
  __device__ __forceinline__ float* sum_at(int tile, int t, int d) const {
    return reinterpret_cast<float*>(shared + L::kSums) + (tile * kChunk + t) * kD + (d ^ t % 8 * 8);
  }
  __device__ __forceinline__ void put_tile(int tile, const float (&x)[kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(sum_at(tile, kBlock * block + fragment_row(lane, 2 * r), dimension(n))) =
            make_float2(x[n][2 * r], x[n][2 * r + 1]);
  }

  // A column of a block of 16 tokens: its keys, those times beta, queries times scale, and what comes from outside of the
  // block: gradients of rows of queries over scale, of the rule's rows over -beta, and of keys.
  struct Column {
    float decay[kBlock], key[kBlock], of_beta[kBlock], query[kBlock];
    float grad_query[kBlock], grad_rule[kBlock], grad_key[kBlock];
  };
  __device__ __forceinline__ void take_column(int its_block, int d, Column& c) const {
    const Args& args = window.args.in;
    const float* const decays =
        row_of<float>(args.log_decay, args.decay_strides, chunk.batch, head, chunk.token + kBlock * its_block) + d;
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      c.decay[i] =
          d < args.key_width && kBlock * its_block + i < chunk.tokens ? __ldg(decays + i * args.decay_strides.token) : 0.0f;
    float by = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int t = kBlock * its_block + i;
      c.decay[i] = expf(c.decay[i]);
      if (t > 0) by *= c.decay[i];
      c.key[i] = s.key[t] * unpack_one(T{}, load_2_bytes(base() + element_offset(t, d)));
      c.of_beta[i] = s.beta[t] * c.key[i];
      c.query[i] = args.scale * (s.query[t] * unpack_one(T{}, load_2_bytes(base() + L::kQueries + element_offset(t, d))));
      c.grad_query[i] = by * *sum_at(0, t, d);
      c.grad_rule[i] = by * *sum_at(1, t, d);
    }
    by = 1.0f;
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      c.grad_key[i] = by * *sum_at(2, kBlock * its_block + i, d);
      by *= c.decay[i];
    }
  }
  static __device__ __forceinline__ float along_row(const Column& c, int i) {
    return c.query[i] * c.grad_query[i] - c.of_beta[i] * c.grad_rule[i];
  }

  // What runs through all of a block.
  __device__ __forceinline__ float through_block(int its_block, int d) const {
    float kept = 1.0f, states = 0.0f, whole_state = 0.0f, rows = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      kept *= s.totals[i][d];
      if (with_keys) whole_state += s.whole[i][d];
      if (i < its_block) states += s.states[i][d];
      if (i > its_block) rows += s.rows[below(i, its_block)][d];
    }
    return kept * whole_state + states + rows;
  }

  // Gradients of the decays of a block's tokens, and of its rows and keys what they hand on to each other too.
  __device__ __forceinline__ void finish_column(const float2* pairs, float through, Column& c, float (&grad_g)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      grad_g[i] = through;
      through += c.key[i] * c.grad_key[i];
    }
    float later = 0.0f;
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      later += along_row(c, i);
      grad_g[i] += later;
    }
#pragma unroll
    for (int from = 0; from < kBlock; ++from) {
      const float own = pairs[from * kBlock + from].x;
      float of_key = own * c.query[from], decayed = 1.0f, term[kBlock];
      c.grad_query[from] += own * c.key[from];
#pragma unroll
      for (int t = from + 1; t < kBlock; ++t) {
        decayed *= c.decay[t];
        const float2 pair = times(decayed, pairs[t * kBlock + from]);
        const float of_row = pair.x * c.query[t] - pair.y * c.of_beta[t];
        c.grad_query[t] += pair.x * c.key[from];
        c.grad_rule[t] += pair.y * c.key[from];
        of_key += of_row;
        term[t] = of_row * c.key[from];
      }
      c.grad_key[from] += of_key;
      later = 0.0f;
#pragma unroll
      for (int t = kBlock - 1; t > from; --t) {
        later += term[t];
        grad_g[t] += later;
      }
    }
  }

  __device__ __forceinline__ void give_column(int its_block, int d) const {
    const Args& args = window.args.in;
    const int first = kBlock * its_block, D = static_cast<int>(args.key_width);
    Column c;
    float grad_g[kBlock];
    take_column(its_block, d, c);
    finish_column(reinterpret_cast<const float2*>(shared + L::kDiagonal) + its_block * kBlock * kBlock,
                  through_block(its_block, d), c, grad_g);
    const int64_t row = (chunk.batch * args.heads + out_head) * args.tokens + chunk.token + first;
    float* const to_query = window.parts.query + row * D + d;
    float* const to_key = window.parts.key + row * D + d;
    float* to_decay = nullptr;
    int64_t stride = args.decay_strides.token;
    if (window.parts.decay != nullptr) {
      const int64_t member = out_head % window.group;
      to_decay = window.parts.decay +
                 (((member * args.batch + chunk.batch) * args.v_heads + head) * args.tokens + chunk.token + first) * D + d;
      stride = D;
    } else if (window.args.grad_log_decay != nullptr) {
      to_decay = const_cast<float*>(
                     row_of<float>(window.args.grad_log_decay, args.decay_strides, chunk.batch, head, chunk.token + first)) +
                 d;
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (with_keys) {
        float sum = c.key[i] * c.grad_rule[i];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        if (lane == 0) s.grad_beta[d / 32][first + i] = sum;
      }
      if (first + i >= chunk.tokens || d >= D) continue;
      to_query[i * D] = c.grad_query[i];
      to_key[i * D] = c.grad_key[i] - s.beta[first + i] * c.grad_rule[i];
      if (to_decay != nullptr) to_decay[i * stride] = grad_g[i];
    }
  }

  __device__ __forceinline__ void run() {
    const int tid = static_cast<int>(threadIdx.x);
    take_chunk();
    this->choose_columns(out_head);
    this->begin_slabs(out_head, with_keys);
    cp_async_wait_but<kSlabs - 1>();
    __syncthreads();
    make_rows();
    this->clear(query), this->clear(of_query);
    this->multiply_slabs(out_head, with_keys);
    finish_states();
    __syncthreads();  // the slabs have been read
    put_pairs();
    __syncthreads();
    add_blocks();
    __syncthreads();  // the planes have been read
    put_tile(0, query), put_tile(1, rule), put_tile(2, key);
    __syncthreads();
#pragma unroll 1
    for (int item = tid; item < kBlocks * kD; item += kGradThreads) give_column(item / kD, item % kD);
    if (!with_keys || window.args.grad_beta == nullptr) return;
    __syncthreads();
    if (tid >= chunk.tokens) return;
    const Strides& strides = window.args.in.beta_strides;
    float sum = s.values[tid];
#pragma unroll
    for (int i = 0; i < kD / 32; ++i) sum -= s.grad_beta[i][tid];
    const_cast<float*>(row_of<float>(window.args.grad_beta, strides, chunk.batch, head, chunk.token))[tid * strides.token] =
        sum;
  }
};

// A CTA: (slot, head of the output).
template <class T, int kD>
__global__ void __launch_bounds__(kGradThreads, 1) KeyChunksKernel(const __grid_constant__ Window window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int64_t heads = window.args.in.heads, slot = blockIdx.x / heads;
  const ChunkPlace chunk = chunk_of(window.args.in, window.first_slot + slot);
  if (chunk.tokens == 0) return;
  KeyChunkGrads<T, kD> grads(window, chunk, slot, blockIdx.x % heads, shared);
  grads.run();
}

template <int kD>
constexpr int kPrepareBytes = KeyPrepareLayout<kD>::kShared + static_cast<int>(sizeof(KeyPrepareShared<kD>));
template <int kD>
constexpr int kChunksBytes = KeyChunksLayout<kD>::kShared + static_cast<int>(sizeof(KeyChunksShared<kD>));

template <int kD>
constexpr KeyGradBytes bytes_of() {
  int most = kPrepareBytes<kD>;
  for (int bytes : {kChunksBytes<kD>, KeyForwardsLayout<kD>::kBytes, KeyBackwardsLayout<kD>::kBytes})
    most = bytes > most ? bytes : most;
  return {sizeof(KeyGradSystem<kD>), sizeof(KeyGradScores<kD>), most};
}
static_assert(bytes_of<128>().shared <= 227 << 10);

template <class T, int kD>
cudaError_t launch_width(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  const int64_t chunks = window.slots * args.heads, states = args.requests * args.v_heads * window.slices;
  cudaError_t error =
      launch(KeyPrepareKernel<T, kD>, chunks, KeyPrepareLayout<kD>::kPrepareThreads, kPrepareBytes<kD>, window, stream);
  if (error == cudaSuccess)
    error = launch(KeyForwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, KeyForwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess || !window.keeps) return error;
  error = launch(KeyBackwardsKernel<T, kD>, states, Pass<kD>::kPassThreads, KeyBackwardsLayout<kD>::kBytes, window, stream);
  if (error != cudaSuccess) return error;
  return launch(KeyChunksKernel<T, kD>, chunks, kGradThreads, kChunksBytes<kD>, window, stream);
}

}  // namespace

KeyGradBytes key_grad_bytes(int64_t key_width) { return key_width <= 64 ? bytes_of<64>() : bytes_of<128>(); }

cudaError_t launch_key_window(const Window& window, cudaStream_t stream) {
  const Args& args = window.args.in;
  if (args.dtype == static_cast<int32_t>(DType::kFloat16))
    return args.key_width <= 64 ? launch_width<__half, 64>(window, stream) : launch_width<__half, 128>(window, stream);
  return args.key_width <= 64 ? launch_width<__nv_bfloat16, 64>(window, stream)
                              : launch_width<__nv_bfloat16, 128>(window, stream);
}

}  // namespace leanfleet::gated_delta_rule
