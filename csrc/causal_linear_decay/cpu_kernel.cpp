// Decayed linear attention in chunks of 16 tokens: inside a chunk the masked scores times the values, between chunks
// the state (Lightning Attention-2, LD section 3.2). Every step is a product of small matrices whose result stays in
// registers, which makes up for the scores that a row-by-row recurrence does without. Only products of γ appear,
// never a quotient, so that γ = 0 and any span of tokens are exact. All values of the attribute `algorithm` run this.
#include "causal_linear_decay.h"

#include <math.h>

#include "core/integers.h"
#include "core/simd.h"

namespace leanfleet::causal_linear_decay::LEANFLEET_ISA {

namespace {

constexpr int kChunk = kChunkTokens;
constexpr int kChunkVecs = kChunk / kLanes;
// A block of results in registers: kRows rows by kVecs vectors, and for those as wide as a chunk kScoreRows rows.
constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 4;
constexpr int kVecs = 2;
constexpr int kPanel = kVecs * kLanes;
constexpr int kScoreRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 2;
constexpr int kHeadBlock = 4;                    // query heads of a group that are taken at once
constexpr int kStepVecs = kLanes == 16 ? 8 : 4;  // vectors across the rows of a state that a decode step takes
constexpr int64_t kStepRows = 16;                // rows that it asks for ahead

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// The decays of the tokens of a chunk.
struct Chunk {
  float mask[kChunk][kChunk];  // scale * M_ij, M_ij = γ_{j+1} .. γ_i for j <= i, else 0 (LD eq. 4)
  float prefix[kChunk];        // scale * γ_0 .. γ_i
  float suffix[kChunk];        // γ_{j+1} .. γ_{n-1}; 0 beyond the last token
  float kept;                  // γ_0 .. γ_{n-1}
};

// ln γ of a request's tokens under one head, and what is the same in all of its chunks.
struct Decay {
  const float* log_decay;  // at token 0 of the batch row; null: γ = 1
  int64_t stride;          // 0: the same γ for all tokens
  float scale;
  double power[kChunk + 1];  // γ^i
};

Decay decay_of(const Inputs& in, int64_t batch, int64_t state_head) {
  Decay decay = {};
  decay.scale = in.scale;
  if (in.log_decay != nullptr && in.decay_per_token) {
    decay.log_decay = in.log_decay + batch * in.decay_strides.batch + state_head * in.decay_strides.head;
    decay.stride = in.decay_strides.token;
    return decay;
  }
  if (in.log_decay != nullptr) decay.log_decay = in.log_decay + state_head;
  decay.power[0] = 1.0;
  const double gamma = decay.log_decay != nullptr ? ::exp(static_cast<double>(*decay.log_decay)) : 1.0;
  for (int i = 0; i < kChunk; ++i) decay.power[i + 1] = decay.power[i] * gamma;
  return decay;
}

// The chunks of a walk over the tokens, forwards or backwards. A float32 factor `kept` is off by up to half an ulp,
// with one γ always the same way, which adds up over the chunks: each one's error is made good in the next.
struct ChunkSource {
  Decay decay;
  Chunk chunk;
  int64_t n;     // tokens of `chunk`, if it holds for all chunks of so many
  double exact;  // kept
  double owed;   // what kept should have been over what it was, less 1

  explicit ChunkSource(const Decay& d) : decay(d), n(-1), exact(1.0), owed(0.0) {}

  const Chunk& at(int64_t token, int64_t count) {
    if (decay.stride != 0) set_tokens(token, count);
    else if (count != n) set_head(count);
    const double wanted = exact + exact * owed;
    chunk.kept = static_cast<float>(wanted);
    owed = chunk.kept > 1e-30f ? wanted / static_cast<double>(chunk.kept) - 1.0 : 0.0;
    return chunk;
  }

 private:
  void set_head(int64_t count) {
    n = count;
    exact = decay.power[n];
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j < kChunk; ++j) chunk.mask[i][j] = j <= i ? static_cast<float>(decay.scale * decay.power[i - j]) : 0.0f;
      chunk.prefix[i] = static_cast<float>(decay.scale * decay.power[i + 1]);
      chunk.suffix[i] = i < n ? static_cast<float>(decay.power[n - 1 - i]) : 0.0f;
    }
  }

  // Sums of ln γ, never a difference: no -inf meets another, and γ = 0 and any span are exact.
  void set_tokens(int64_t token, int64_t count) {
    Vec sums[kChunkVecs] = {}, lanes[kChunkVecs], row[kChunkVecs] = {};
    float logs[kChunk];
    for (int c = 0; c < kChunkVecs; ++c) lanes[c] = lane_numbers(c * kLanes);
    double total = 0.0;
    for (int64_t i = 0; i < kChunk; ++i) logs[i] = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const float log = decay.log_decay[(token + i) * decay.stride];
      total += static_cast<double>(log);
      logs[i] = static_cast<float>(total);
      for (int c = 0; c < kChunkVecs; ++c) {
        sums[c] = select(lanes[c] < static_cast<float>(i), sums[c] + log, Vec{});
        row[c] = select(lanes[c] <= static_cast<float>(i), exp_of_decay(sums[c]), Vec{});
        store(chunk.mask[i] + c * kLanes, row[c] * decay.scale);
      }
    }
    exact = ::exp(total);
    for (int c = 0; c < kChunkVecs; ++c) {
      store(chunk.suffix + c * kLanes, row[c]);
      store(chunk.prefix + c * kLanes, exp_of_decay(load(logs + c * kLanes)) * decay.scale);
    }
  }
};

// Rows of floats, `stride` apart.
struct Floats {
  const float* data;
  int64_t stride;
};

// n rows of a T tensor as floats: where they lie, if they are floats without a gap between them and vectors may be
// loaded from them (`whole`: the width is a multiple of a vector, or they are read one by one), else in `buffer`,
// whose rows are `pitch` apart and padded with zeros.
inline Floats as_floats(const float* rows, int64_t stride, int64_t n, int64_t width, bool whole, float* buffer, int64_t pitch);

template <class T>
Floats copied(const T* rows, int64_t stride, int64_t n, int64_t width, float* buffer, int64_t pitch) {
  for (int64_t i = 0; i < n; ++i) {
    float* to = buffer + i * pitch;
    convert(rows + i * stride, to, width);
    for (int64_t c = width; c < pitch; ++c) to[c] = 0.0f;
  }
  return {buffer, pitch};
}
template <class T>
Floats as_floats(const T* rows, int64_t stride, int64_t n, int64_t width, bool, float* buffer, int64_t pitch) {
  return copied(rows, stride, n, width, buffer, pitch);
}
inline Floats as_floats(const float* rows, int64_t stride, int64_t n, int64_t width, bool whole, float* buffer, int64_t pitch) {
  if (whole && stride <= 2 * width) return {rows, stride};
  return copied(rows, stride, n, width, buffer, pitch);
}

// out[c][t] = rows[t][c] for t < n, 0 for the other t < kChunk. Rows of out are written up to a multiple of kLanes.
template <class T>
void transpose_in(const T* rows, int64_t stride, int64_t n, int64_t width, float* out) {
  for (int64_t c = 0; c < width; c += kLanes) {
    for (int64_t first = 0; first < kChunk; first += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) block[t] = first + t < n ? load_part(rows + (first + t) * stride + c, width - c) : Vec{};
      transpose(block);
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) store(out + (c + t) * kChunk + first, block[t]);
    }
  }
}

// rows[t][c] = in[c][t] for t < n, c < width; with `add` += it.
template <class T>
void transpose_out(const float* in, int64_t n, int64_t width, T* rows, int64_t stride, bool add = false) {
  for (int64_t c = 0; c < width; c += kLanes) {
    for (int64_t first = 0; first < n; first += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) block[t] = load(in + (c + t) * kChunk + first);
      transpose(block);
      for (int64_t t = 0; t < kLanes && first + t < n; ++t) {
        T* to = rows + (first + t) * stride + c;
        store_part(to, add ? load_part(to, width - c) + block[t] : block[t], width - c);
      }
    }
  }
}

// acc[i][c] += Σ_{k < count} a[i * a_row + k * a_step] * b[k * b_step + c * kLanes + lane]
template <int M, int V>
inline __attribute__((always_inline)) void multiply_add(Vec (&acc)[M][V], const float* a, int64_t a_row, int64_t a_step,
                                                        const float* b, int64_t b_step, int64_t count) {
  for (int64_t k = 0; k < count; ++k, a += a_step, b += b_step) {
    Vec row[V];
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) row[c] = load(b + c * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec x = broadcast(a[i * a_row]);
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] = fma(x, row[c], acc[i][c]);
    }
  }
}

// Calls block<M>(first row) for all rows, M = kMost as long as there are so many, then 4, 2, 1.
#define LEANFLEET_BLOCKS_OF_ROWS(kMost, rows, block)                \
  do {                                                              \
    int64_t row_ = 0;                                               \
    for (; row_ + (kMost) <= (rows); row_ += (kMost)) block(kMost); \
    if constexpr ((kMost) > 4)                                      \
      for (; row_ + 4 <= (rows); row_ += 4) block(4);               \
    if constexpr ((kMost) > 2)                                      \
      for (; row_ + 2 <= (rows); row_ += 2) block(2);               \
    for (; row_ < (rows); ++row_) block(1);                         \
  } while (false)

// A state [rows, columns]: panels of kPanel columns, or, in a caller's tensor, one row after the other.
struct State {
  float* data;  // null: zeros
  int64_t row_stride, panel_stride;

  float* panel(int64_t p) const { return data == nullptr ? nullptr : data + p * panel_stride; }
};

State packed_state(float* data, int64_t rows) { return {data, kPanel, rows * kPanel}; }
State plain_state(const float* data, int64_t width) { return {const_cast<float*>(data), width, kPanel}; }

template <class T>
void import_state(const T* from, int64_t rows, int64_t columns, int64_t stride, const State& to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes)
      store(to.panel(c / kPanel) + r * kPanel + c % kPanel,
            from != nullptr ? load_part(from + r * stride + c, columns - c) : Vec{});
}

template <class T>
void export_state(const State& from, int64_t rows, int64_t columns, int64_t stride, T* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes)
      store_part(to + r * stride + c, load(from.panel(c / kPanel) + r * kPanel + c % kPanel), columns - c);
}

// A panel of: to = kept * from + Σ_{t < n} a[r, t] b[t, :]
struct Update {
  const float* from;
  float* to;
  int64_t from_stride, to_stride, rows;
  float kept;
  const float* a;
  int64_t a_row, a_step;
  Floats b;
  int64_t n;
};

template <int M, int V>
void update_block(const Update& u, int64_t row) {
  Vec acc[M][V] = {};
  if (u.from != nullptr) {
    const float* from = u.from + row * u.from_stride;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] = load(from + i * u.from_stride + c * kLanes) * u.kept;
  }
  multiply_add<M, V>(acc, u.a + row * u.a_row, u.a_row, u.a_step, u.b.data, u.b.stride, u.n);
  float* to = u.to + row * u.to_stride;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) store(to + i * u.to_stride + c * kLanes, acc[i][c]);
}

template <int V>
void update_panel(const Update& u) {
#define LEANFLEET_BLOCK(M) update_block<M, V>(u, row_)
  LEANFLEET_BLOCKS_OF_ROWS(kRows, u.rows, LEANFLEET_BLOCK);
#undef LEANFLEET_BLOCK
}

// to = kept * from + aᵀ b for all panels of a state `columns` wide.
void update(const State& from, const State& to, int64_t columns, Update u) {
  const float* b = u.b.data;
  u.from_stride = from.row_stride;
  u.to_stride = to.row_stride;
  for (int64_t c = 0; c < columns; c += kPanel) {
    u.from = from.panel(c / kPanel);
    u.to = to.panel(c / kPanel);
    u.b.data = b + c;
    if (columns - c > kLanes) update_panel<2>(u);
    else update_panel<1>(u);
  }
}

// scores[i][j] = a_i·b_j for i < n and all j, where `b` is transposed.
struct Scores {
  Floats a;
  const float* b;  // [width, kChunk]
  int64_t width;
  float* out;  // [kChunk, kChunk]
};

template <int M>
void score_block(const Scores& s, int64_t row) {
  Vec acc[M][kChunkVecs] = {};
  multiply_add<M, kChunkVecs>(acc, s.a.data + row * s.a.stride, s.a.stride, 1, s.b, kChunk, s.width);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < kChunkVecs; ++c) store(s.out + (row + i) * kChunk + c * kLanes, acc[i][c]);
}

void score(const Scores& s, int64_t n) {
#define LEANFLEET_BLOCK(M) score_block<M>(s, row_)
  LEANFLEET_BLOCKS_OF_ROWS(kScoreRows, n, LEANFLEET_BLOCK);
#undef LEANFLEET_BLOCK
}

// to[i][j] = mask[i][j] * from[i][j] for j <= i, else 0, whatever from holds there; for i < n.
void apply_mask(const Chunk& chunk, const float* from, int64_t n, float* to) {
  for (int c = 0; c < kChunkVecs; ++c) {
    const Vec lanes = lane_numbers(c * kLanes);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * kChunk + c * kLanes;
      const Vec product = load(from + at) * load(chunk.mask[i] + c * kLanes);
      store(to + at, select(lanes <= static_cast<float>(i), product, Vec{}));
    }
  }
}

float dot(const float* a, const float* b, int64_t n) {
  Vec total = {};
  for (int64_t i = 0; i < n; i += kLanes) total = fma(load_part(a + i, n - i), load_part(b + i, n - i), total);
  return sum(total);
}

// d as it divides: its magnitude held at eps or more, the sign of 0 is plus; NaN stays NaN.
float held(float d, float eps) { return __builtin_fabsf(d) < eps ? (d < 0.0f ? -eps : eps) : d; }

// A panel of out[i] = factor[i] * query_i S + Σ_{j <= i} scores[i][j] value_j for i < n.
struct Output {
  Floats query;
  const float* state;  // null: zeros
  int64_t state_stride, width;
  const float* factors;
  const float* scores;
  Floats value;
  float* out;
  int64_t out_stride;
};

template <int M, int V>
void output_block(const Output& o, int64_t row) {
  Vec acc[M][V] = {};
  if (o.state != nullptr) {
    multiply_add<M, V>(acc, o.query.data + row * o.query.stride, o.query.stride, 1, o.state, o.state_stride, o.width);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] *= o.factors[row + i];
  }
  const float* scores = o.scores + row * kChunk;
  multiply_add<M, V>(acc, scores, kChunk, 1, o.value.data, o.value.stride, row);
  // The tokens of the block itself, each with itself and those before: a later one's NaN stays away from them.
#pragma GCC unroll 16
  for (int j = 0; j < M; ++j) {
    Vec value[V];
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) value[c] = load(o.value.data + (row + j) * o.value.stride + c * kLanes);
#pragma GCC unroll 16
    for (int i = j; i < M; ++i) {
      const Vec x = broadcast(scores[i * kChunk + row + j]);
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] = fma(x, value[c], acc[i][c]);
    }
  }
  float* out = o.out + row * o.out_stride;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) store(out + i * o.out_stride + c * kLanes, acc[i][c]);
}

template <int V>
void output_panel(const Output& o, int64_t n) {
#define LEANFLEET_BLOCK(M) output_block<M, V>(o, row_)
  LEANFLEET_BLOCKS_OF_ROWS(kRows, n, LEANFLEET_BLOCK);
#undef LEANFLEET_BLOCK
}

// Cuts a thread's scratch into buffers, each on its own cache lines.
struct Carver {
  float* base;
  int64_t used;

  float* take(int64_t floats) {
    float* at = base == nullptr ? nullptr : base + used;
    used += round_up(floats, 16);
    return at;
  }
};

// Rows of floats are this far apart: whole vectors, and an odd number of cache lines so that rows fall into
// different sets.
int64_t pitch_of(int64_t width) {
  const int64_t lines = (width + 15) / 16;
  return 16 * (lines % 2 == 0 ? lines + 1 : lines);
}

struct ForwardScratch {
  float* state;    // packed [R, W]
  float* norm;     // [R]
  float* key_t;    // [R, kChunk]
  float* query;    // [kHeadBlock][kChunk, pitch of R]
  float* value;    // [kChunk, pitch of W]
  float* scores;   // [kHeadBlock][kChunk, kChunk]
  float* factors;  // [kHeadBlock][kChunk]
  float* out;      // [kChunk, kPanel], or a decode step's [G, pitch of W]
  int64_t floats;
};

ForwardScratch carve(const Inputs& in, int64_t range_width, float* base) {
  const int64_t width = round_up(range_width, kPanel), rows = round_up(in.key_width, kLanes);
  const int64_t group = in.heads / in.v_heads;
  Carver carver = {base, 0};
  ForwardScratch s = {};
  s.state = carver.take(in.key_width * width);
  s.norm = carver.take(rows);
  s.key_t = carver.take(rows * kChunk);
  const int64_t query_rows = kHeadBlock * kChunk > group ? kHeadBlock * kChunk : group;
  s.query = carver.take(query_rows * pitch_of(in.key_width));
  s.value = carver.take(kChunk * pitch_of(width));
  s.scores = carver.take(kHeadBlock * kChunk * kChunk);
  s.factors = carver.take(kHeadBlock * kChunk);
  const int64_t chunk_out = kChunk * kPanel, step_out = group * pitch_of(width);
  s.out = carver.take(chunk_out > step_out ? chunk_out : step_out);
  s.floats = carver.used;
  return s;
}

// One item of the forward.
struct ForwardItem {
  RequestPiece piece;
  int64_t state_head, first_column, columns, group;
  int64_t state_row;  // of the initial and final state, times v_heads plus state_head; -1: outside the pool
};

ForwardItem item_at(const ForwardPlan& plan, int64_t index) {
  const Inputs& in = plan.args.in;
  ForwardItem item;
  item.piece = plan.pieces[index / (in.v_heads * plan.ranges)];
  item.state_head = index / plan.ranges % in.v_heads;
  item.first_column = index % plan.ranges * plan.range_width;
  item.columns = min64(plan.range_width, in.value_width - item.first_column);
  item.group = in.heads / in.v_heads;
  const int64_t row = plan.args.state_index != nullptr ? plan.args.state_index[item.piece.request] : item.piece.request;
  item.state_row = row >= 0 && row < plan.args.state_rows ? row * in.v_heads + item.state_head : -1;
  return item;
}

template <class T>
T* token_rows(const void* data, const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return static_cast<T*>(const_cast<void*>(data)) + batch * strides.batch + head * strides.head + token * strides.token;
}

// The beta of a state's tokens begin .. begin + n, 1 where there is none.
void load_betas(const Inputs& in, int64_t batch, int64_t state_head, int64_t begin, int64_t n, float (&betas)[kChunk]) {
  const Strides& strides = in.decay_strides;
  for (int64_t j = 0; j < kChunk; ++j)
    betas[j] = in.beta == nullptr || j >= n
                   ? 1.0f
                   : in.beta[batch * strides.batch + state_head * strides.head + (begin + j) * strides.token];
}

// norm = kept * norm + Σ_j suffix_j beta_j k_j
template <class T>
void update_norm(const Chunk& chunk, const float (&betas)[kChunk], const T* keys, int64_t stride, int64_t n, int64_t width,
                 float* norm) {
  for (int64_t r = 0; r < width; r += kLanes) {
    Vec total = load(norm + r) * chunk.kept;
    for (int64_t j = 0; j < n; ++j)
      total = fma(broadcast(chunk.suffix[j] * betas[j]), load_part(keys + j * stride + r, width - r), total);
    store(norm + r, total);
  }
}

// Rows of transposed keys [width, kChunk] times a factor a token.
void scale_tokens(float* key_t, int64_t width, const float (&factors)[kChunk]) {
  for (int c = 0; c < kChunkVecs; ++c) {
    const Vec by = load(factors + c * kLanes);
    for (int64_t r = 0; r < width; ++r) {
      float* p = key_t + r * kChunk + c * kLanes;
      store(p, load(p) * by);
    }
  }
}

// Walks the item's tokens: `from` is the state before the first (null: zeros), `to` takes the one after the last
// (null: not asked for); scratch.norm goes along. With kOutput writes the output; without, returns the product of γ.
template <class T, bool kOutput>
double walk(const ForwardPlan& plan, const ForwardItem& item, const ForwardScratch& scratch, const State& from,
            const State& to) {
  const Inputs& in = plan.args.in;
  const int64_t width = in.key_width, batch = item.piece.batch, columns = item.columns;
  const bool whole = columns % kLanes == 0, normalize = plan.args.normalize;
  const State kept_state = packed_state(scratch.state, width);
  ChunkSource source(decay_of(in, batch, item.state_head));
  double kept = 1.0;
  State state = from;
  for (int64_t token = item.piece.begin; token < item.piece.end; token += kChunk) {
    const int64_t n = min64(kChunk, item.piece.end - token);
    const bool last = token + n == item.piece.end;
    const bool updates = !last || to.data != nullptr;
    const State& next = last ? to : kept_state;
    const Chunk& chunk = source.at(token, n);
    const T* keys = token_rows<T>(in.key, in.key_strides, batch, in.key_head(item.state_head), token);
    transpose_in(keys, in.key_strides.token, n, width, scratch.key_t);
    float betas[kChunk];
    load_betas(in, batch, item.state_head, token, n, betas);
    if (in.beta != nullptr) scale_tokens(scratch.key_t, width, betas);
    const Floats value =
        as_floats(token_rows<T>(in.value, in.value_strides, batch, item.state_head, token) + item.first_column,
                  in.value_strides.token, n, columns, whole, scratch.value, pitch_of(round_up(plan.range_width, kPanel)));
    for (int64_t head = 0; head < item.group && kOutput; head += kHeadBlock) {
      const int64_t heads = min64(kHeadBlock, item.group - head);
      Floats query[kHeadBlock];
      T* rows[kHeadBlock];
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t output_head = item.state_head * item.group + head + h, pitch = pitch_of(width);
        rows[h] = token_rows<T>(plan.args.output, in.output_strides, batch, output_head, token) + item.first_column;
        query[h] = as_floats(token_rows<T>(in.query, in.query_strides, batch, in.query_head(output_head), token),
                             in.query_strides.token, n, width, true, scratch.query + h * kChunk * pitch, pitch);
        float* scores = scratch.scores + h * kChunk * kChunk;
        float* factors = scratch.factors + h * kChunk;
        score({query[h], scratch.key_t, width, scores}, n);
        apply_mask(chunk, scores, n, scores);
        for (int64_t i = 0; i < n; ++i) {
          factors[i] = chunk.prefix[i];
          if (!normalize) continue;
          Vec total = {};
          for (int c = 0; c < kChunkVecs; ++c) total = total + load(scores + i * kChunk + c * kLanes);
          const float d = factors[i] * dot(query[h].data + i * query[h].stride, scratch.norm, width) + sum(total);
          const float inverse = 1.0f / held(d, plan.args.eps);
          factors[i] *= inverse;
          for (int c = 0; c < kChunkVecs; ++c) {
            float* p = scores + i * kChunk + c * kLanes;
            store(p, load(p) * inverse);
          }
        }
      }
      for (int64_t c = 0; c < columns; c += kPanel) {
        const int64_t wide = min64(kPanel, columns - c);
        for (int64_t h = 0; h < heads; ++h) {
          Output o = {query[h],
                      state.panel(c / kPanel),
                      state.row_stride,
                      width,
                      scratch.factors + h * kChunk,
                      scratch.scores + h * kChunk * kChunk,
                      {value.data + c, value.stride},
                      scratch.out,
                      kPanel};
          const bool direct = sizeof(T) == sizeof(float) && wide % kLanes == 0;
          if (direct) {
            o.out = reinterpret_cast<float*>(rows[h] + c);
            o.out_stride = in.output_strides.token;
          }
          if (wide > kLanes) output_panel<2>(o, n);
          else output_panel<1>(o, n);
          for (int64_t i = 0; i < n && !direct; ++i)
            convert(scratch.out + i * kPanel, rows[h] + i * in.output_strides.token + c, wide);
        }
      }
    }
    if (normalize && (updates || !kOutput)) update_norm(chunk, betas, keys, in.key_strides.token, n, width, scratch.norm);
    if (updates) {
      if (in.log_decay != nullptr) scale_tokens(scratch.key_t, width, chunk.suffix);
      Update u = {};
      u.rows = width;
      u.kept = chunk.kept;
      u.a = scratch.key_t;
      u.a_row = kChunk;
      u.a_step = 1;
      u.b = value;
      u.n = n;
      update(state, next, columns, u);
      state = next;
    }
    kept *= chunk.kept;
  }
  return kept;
}

template <class T>
void reduce_forward(const ForwardPlan& plan, const ForwardItem& item, const ForwardScratch& scratch) {
  if (item.piece.slot < 0 || item.piece.last) return;  // nothing comes after it
  const Inputs& in = plan.args.in;
  const int64_t at = item.piece.slot * in.v_heads + item.state_head;
  __builtin_memset(scratch.norm, 0, sizeof(float) * round_up(in.key_width, kLanes));
  const State state = packed_state(scratch.state, in.key_width);
  const double kept = walk<T, false>(plan, item, scratch, State{}, state);
  export_state(state, in.key_width, item.columns, in.value_width,
               plan.slots.state + at * in.key_width * in.value_width + item.first_column);
  if (item.first_column != 0) return;
  plan.slots.kept[at] = kept;
  if (plan.args.normalize) __builtin_memcpy(plan.slots.norm + at * in.key_width, scratch.norm, sizeof(float) * in.key_width);
}

// Σ of earlier pieces in place of each piece's own. at[s * stride] belongs to the s-th of `count` pieces; the last
// one's own sum is not there.
template <class T>
void combine_row(const T* initial, float* at, int64_t stride, const double* kept, int64_t kept_stride, int64_t count,
                 int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec total = initial != nullptr ? load_part(initial + i, n - i) : Vec{};
    for (int64_t s = 0; s < count; ++s) {
      float* p = at + s * stride + i;
      const Vec own = s + 1 < count ? load_part(p, n - i) : Vec{};
      store_part(p, total, n - i);
      if (s + 1 < count) total = fma(broadcast(static_cast<float>(kept[s * kept_stride])), total, own);
    }
  }
}

// Pieces of a request that begins at pieces[0].
int64_t pieces_of_request(const RequestPiece* pieces) {
  int64_t count = 1;
  while (!pieces[count - 1].last) ++count;
  return count;
}

template <class T>
void combine_forward(const ForwardPlan& plan, int64_t index) {
  const Inputs& in = plan.args.in;
  const int64_t rows = ceil_div(in.key_width, kChunkTokens);  // blocks of rows
  const RequestPiece* piece = plan.pieces + index / rows / in.v_heads;
  if (piece->slot < 0 || !piece->first) return;
  const int64_t state_head = index / rows % in.v_heads, row = index % rows * kChunkTokens;
  const int64_t first = piece->slot * in.v_heads + state_head, count = pieces_of_request(piece);
  const int64_t n = min64(kChunkTokens, in.key_width - row);
  ForwardPlan one_range = plan;
  one_range.ranges = 1;
  one_range.range_width = in.value_width;
  const int64_t state_row = item_at(one_range, (piece - plan.pieces) * in.v_heads + state_head).state_row;
  const bool given = state_row >= 0 && plan.args.initial_state != nullptr;
  const bool given_norm = state_row >= 0 && plan.args.initial_norm != nullptr;
  const int64_t at = row * in.value_width, size = in.key_width * in.value_width;
  const auto combine = [&](const auto* initial) {
    combine_row(initial, plan.slots.state + first * size + at, in.v_heads * size, plan.slots.kept + first, in.v_heads, count,
                n * in.value_width);
  };
  if (state_row >= 0 && plan.args.narrow_initial_state != nullptr)
    combine(static_cast<const T*>(plan.args.narrow_initial_state) + state_row * size + at);
  else combine(given ? plan.args.initial_state + state_row * size + at : nullptr);
  if (!plan.args.normalize) return;
  combine_row(given_norm ? plan.args.initial_norm + state_row * in.key_width + row : nullptr,
              plan.slots.norm + first * in.key_width + row, in.v_heads * in.key_width, plan.slots.kept + first, in.v_heads,
              count, n);
}

// One token through `count` rows of a state, V vectors wide: to = γ * from + key value, out += query to.
struct Step {
  const float *from, *key, *query, *value;
  float *to, *out;
  int64_t stride, query_stride, out_stride, heads;
  float gamma;
};

// Columns of `count` rows from row `first` on; kStream: s.to is streamed.
template <int V, bool kStream>
void step_rows(const Step& s, int64_t first, int64_t count, int64_t column) {
  Vec value[V], out[V];
  const Vec gamma = broadcast(s.gamma);
  float kept[kStream ? kStepRows * V * kLanes : 1];  // the rows again, for the other heads
  const float* seen = kStream ? kept : s.to + first * s.stride + column;
  const int64_t seen_stride = kStream ? V * kLanes : s.stride;
#pragma GCC unroll 8
  for (int c = 0; c < V; ++c) {
    value[c] = load(s.value + column + c * kLanes);
    out[c] = load(s.out + column + c * kLanes);
  }
  for (int64_t r = first; r < first + count; ++r) {
    const Vec k = broadcast(s.key[r]), q = broadcast(s.query[r]);
    const float* from = s.from + r * s.stride + column;
    float* to = s.to + r * s.stride + column;
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) {
      if (c % (16 / kLanes) == 0) {  // once a cache line
        __builtin_prefetch(from + kStepRows * s.stride + c * kLanes, 0, 3);
        if (!kStream) __builtin_prefetch(to + kStepRows * s.stride + c * kLanes, 1, 3);
      }
      const Vec x = fma(k, value[c], gamma * load(from + c * kLanes));
      if (kStream) stream(to + c * kLanes, x);
      else store(to + c * kLanes, x);
      if (kStream && s.heads > 1) store(kept + (r - first) * V * kLanes + c * kLanes, x);
      out[c] = fma(q, x, out[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < V; ++c) store(s.out + column + c * kLanes, out[c]);
  for (int64_t h = 1; h < s.heads; ++h) {  // the rows are in the cache now
    float* next = s.out + h * s.out_stride + column;
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) out[c] = load(next + c * kLanes);
    for (int64_t r = 0; r < count; ++r) {
      const Vec q = broadcast(s.query[h * s.query_stride + first + r]);
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) out[c] = fma(q, load(seen + r * seen_stride + c * kLanes), out[c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) store(next + c * kLanes, out[c]);
  }
}

// All rows, `columns` (whole vectors) wide: some rows at a time, so that memory is taken in its order.
template <bool kStream>
void step_state(const Step& s, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += kStepRows) {
    const int64_t count = min64(kStepRows, rows - r);
    int64_t c = 0;
    for (; c + kStepVecs * kLanes <= columns; c += kStepVecs * kLanes) step_rows<kStepVecs, kStream>(s, r, count, c);
    for (; c < columns; c += kLanes) step_rows<1, kStream>(s, r, count, c);
  }
}

// A piece of one token that takes the state from one tensor to another, or the same: bound by memory, so the rows of
// the state are taken in their order there.
template <class T>
void step(const ForwardPlan& plan, const ForwardItem& item, const ForwardScratch& scratch, const float* from, float* to) {
  const Inputs& in = plan.args.in;
  const int64_t width = in.key_width, columns = item.columns, batch = item.piece.batch, token = item.piece.begin;
  ChunkSource source(decay_of(in, batch, item.state_head));
  const T* key = token_rows<T>(in.key, in.key_strides, batch, in.key_head(item.state_head), token);
  const int64_t pitch = pitch_of(width), out_pitch = pitch_of(round_up(plan.range_width, kPanel));
  Step s = {};
  s.key = copied(key, 0, 1, width, scratch.key_t, round_up(width, kLanes)).data;
  float betas[kChunk];
  load_betas(in, batch, item.state_head, token, 1, betas);
  for (int64_t r = 0; r < width && in.beta != nullptr; ++r) scratch.key_t[r] *= betas[0];
  s.value = copied(token_rows<T>(in.value, in.value_strides, batch, item.state_head, token) + item.first_column, 0, 1, columns,
                   scratch.value, round_up(columns, kLanes))
                .data;
  const T* query = token_rows<T>(in.query, in.query_strides, batch, in.query_head(item.state_head * item.group), token);
  s.query = copied(query, in.query_strides.head, item.group, width, scratch.query, pitch).data;
  s.query_stride = pitch;
  s.out_stride = out_pitch;
  s.stride = in.value_width;
  s.heads = item.group;
  s.gamma = source.at(token, 1).kept;
  __builtin_memset(scratch.out, 0, sizeof(float) * item.group * out_pitch);
  s.from = from;
  s.to = to;
  s.out = scratch.out;
  const int64_t c = columns / kLanes * kLanes;
  if (streams(from, to, s.stride, 4 * in.requests * in.v_heads * width * s.stride)) {
    step_state<true>(s, width, c);
    finish_streams();
  } else {
    step_state<false>(s, width, c);
  }
  for (int64_t r = 0; r < width && c < columns; ++r) {
    const int64_t n = columns - c, at = r * s.stride + c;
    const Vec x = fma(broadcast(s.key[r]), load(scratch.value + c), load_part(from + at, n) * s.gamma);
    store_part(to + at, x, n);
    for (int64_t h = 0; h < item.group; ++h) {
      float* out = scratch.out + h * out_pitch + c;
      store(out, fma(broadcast(s.query[h * pitch + r]), x, load(out)));
    }
  }
  if (plan.args.normalize) {
    for (int64_t r = 0; r < width; r += kLanes)
      store(scratch.norm + r, fma(load(scratch.norm + r), broadcast(s.gamma), load(s.key + r)));
  }
  for (int64_t h = 0; h < item.group; ++h) {
    float factor = in.scale;
    if (plan.args.normalize) factor /= held(in.scale * dot(s.query + h * pitch, scratch.norm, width), plan.args.eps);
    float* out = scratch.out + h * out_pitch;
    for (int64_t i = 0; i < columns; i += kLanes) store(out + i, load(out + i) * factor);
    T* row = token_rows<T>(plan.args.output, in.output_strides, batch, item.state_head * item.group + h, token);
    convert(out, row + item.first_column, columns);
  }
}

template <class T>
void scan_forward(const ForwardPlan& plan, const ForwardItem& item, const ForwardScratch& scratch) {
  const Args& args = plan.args;
  const int64_t width = args.in.key_width, stride = args.in.value_width, columns = item.columns;
  const int64_t slot = item.piece.slot < 0 ? -1 : item.piece.slot * args.in.v_heads + item.state_head;
  const bool inside = item.state_row >= 0;
  const int64_t at = item.state_row * width * stride + item.first_column;
  const float* from = slot >= 0                                 ? plan.slots.state + slot * width * stride + item.first_column
                      : inside && args.initial_state != nullptr ? args.initial_state + at
                                                                : nullptr;
  float* to = inside && item.piece.last && args.final_state != nullptr ? args.final_state + at : nullptr;
  const bool narrow_given = slot < 0 && inside && args.narrow_initial_state != nullptr;
  const T* narrow_from = narrow_given ? static_cast<const T*>(args.narrow_initial_state) + at : nullptr;
  const bool narrow_asked = inside && item.piece.last && args.narrow_final_state != nullptr;
  T* narrow_to = narrow_asked ? static_cast<T*>(args.narrow_final_state) + at : nullptr;
  if (args.normalize) {
    const float* norm = slot >= 0 ? plan.slots.norm + slot * width
                        : inside && plan.norms != nullptr
                            ? plan.norms + (item.piece.request * args.in.v_heads + item.state_head) * width
                        : inside && args.initial_norm != nullptr ? args.initial_norm + item.state_row * width
                                                                 : nullptr;
    for (int64_t r = 0; r < width; r += kLanes)
      store(scratch.norm + r, norm != nullptr ? load_part(norm + r, width - r) : Vec{});
  }
  const int64_t tokens = item.piece.end - item.piece.begin;
  if (tokens == 1 && from != nullptr && to != nullptr) {
    step<T>(plan, item, scratch, from, to);
  } else if (columns % kLanes == 0 && tokens > 0 && !args.narrow_states) {
    const State after = to != nullptr ? plain_state(to, stride) : State{};
    walk<T, true>(plan, item, scratch, from != nullptr ? plain_state(from, stride) : State{}, after);
  } else {
    const State state = packed_state(scratch.state, width);
    const bool given = from != nullptr || narrow_given || tokens == 0, asked = to != nullptr || narrow_asked;
    if (narrow_given) import_state(narrow_from, width, columns, stride, state);
    else if (given) import_state(from, width, columns, stride, state);
    walk<T, true>(plan, item, scratch, given ? state : State{}, asked ? state : State{});
    if (to != nullptr) export_state(state, width, columns, stride, to);
    if (narrow_asked) export_state(state, width, columns, stride, narrow_to);
  }
  if (args.normalize && inside && item.piece.last && args.final_norm != nullptr && item.first_column == 0)
    __builtin_memcpy(args.final_norm + item.state_row * width, scratch.norm, sizeof(float) * width);
}

template <class T>
void forward_of(const ForwardPlan& plan, Phase phase, int64_t index, float* floats) {
  if (phase == Phase::kCombine) return combine_forward<T>(plan, index);
  const ForwardItem item = item_at(plan, index);
  const ForwardScratch scratch = carve(plan.args.in, plan.range_width, floats);
  if (phase == Phase::kReduce) reduce_forward<T>(plan, item, scratch);
  else scan_forward<T>(plan, item, scratch);
}

struct BackwardScratch {
  float* states;                                // [span_chunks] packed [R, Dv]: the state before each chunk of a span
  float* starts;                                // [spans] packed: the state before each span
  float* grad;                                  // packed: the gradient of the state after the chunk
  float *key, *value;                           // [kChunk, pitch of R], [kChunk, pitch of Dv]
  float *query, *output;                        // the same for kHeadBlock heads; output means grad_output here
  float* scaled;                                // [kChunk, pitch of R]
  float *key_t, *value_t, *query_t, *output_t;  // [R or Dv, kChunk]
  float *grad_query_t, *grad_key_t;             // [R, kChunk]
  float* grad_value;                            // [kChunk, pitch of Dv]
  float *scores, *products;                     // [kHeadBlock][kChunk, kChunk]: masked q_i.k_j and do_i.v_j
  float* products_t;                            // [kChunk, kChunk]
  float* pairs;                                 // [kChunk, kChunk]
  int64_t state_floats, floats;
};

BackwardScratch carve(const BackwardPlan& plan, float* base) {
  const Inputs& in = plan.args.in;
  const int64_t width = in.key_width, columns = in.value_width, square = kChunk * kChunk;
  const int64_t rows = round_up(width, kLanes), value_rows = round_up(columns, kLanes);
  Carver carver = {base, 0};
  BackwardScratch s = {};
  s.state_floats = width * round_up(columns, kPanel);
  s.states = carver.take(plan.span_chunks * s.state_floats);
  s.starts = carver.take(plan.spans * s.state_floats);
  s.grad = carver.take(s.state_floats);
  s.key = carver.take(kChunk * pitch_of(width));
  s.value = carver.take(kChunk * pitch_of(columns));
  s.query = carver.take(kHeadBlock * kChunk * pitch_of(width));
  s.output = carver.take(kHeadBlock * kChunk * pitch_of(columns));
  s.scaled = carver.take(kChunk * pitch_of(width));
  s.key_t = carver.take(rows * kChunk);
  s.value_t = carver.take(value_rows * kChunk);
  s.query_t = carver.take(rows * kChunk);
  s.output_t = carver.take(value_rows * kChunk);
  s.grad_query_t = carver.take(rows * kChunk);
  s.grad_key_t = carver.take(rows * kChunk);
  s.grad_value = carver.take(kChunk * pitch_of(columns));
  s.scores = carver.take(kHeadBlock * square);
  s.products = carver.take(kHeadBlock * square);
  s.products_t = carver.take(square);
  s.pairs = carver.take(square);
  s.floats = carver.used;
  return s;
}

// One item of the backward.
struct BackwardItem {
  RequestPiece piece;
  int64_t state_head, group;
};

// Masked scores s_ij and products p_ij = do_i.v_j, in place, for j <= i < n, else 0; pairs += s_ij p_ij M_ij scale.
void mask_pairs(const Chunk& chunk, int64_t n, float* scores, float* products, float* pairs) {
  for (int c = 0; c < kChunkVecs; ++c) {
    const Vec lanes = lane_numbers(c * kLanes);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * kChunk + c * kLanes;
      const Vec mask = load(chunk.mask[i] + c * kLanes), score = load(scores + at);
      const VecInt visible = lanes <= static_cast<float>(i);
      const Vec product = select(visible, load(products + at) * mask, Vec{});
      store(products + at, product);
      store(scores + at, select(visible, score * mask, Vec{}));
      if (pairs != nullptr) store(pairs + at, load(pairs + at) + select(visible, score * product, Vec{}));
    }
  }
}

// Transposed results, one vector across a chunk's tokens:
//   out[r, t] = factor[t] * Σ_d state[r, d] b[d, t] + Σ_{j < n} a[j, r] weights[j, t]
// and along[t] += Σ_r with[r, t] times the first term. With `add` out is added to in place of the first term.
struct Transposed {
  State state;  // packed; null: zeros
  int64_t columns;
  const float *b, *factor;
  const float* with;  // null: no along
  float* along;
  bool add;
  Floats a;
  const float* weights;
  int64_t n;
  float* out;
};

template <int M>
void transposed_block(const Transposed& x, int64_t row) {
  Vec acc[M][kChunkVecs] = {};
  if (x.add) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < kChunkVecs; ++c) acc[i][c] = load(x.out + (row + i) * kChunk + c * kLanes);
  } else if (x.state.data != nullptr) {
    for (int64_t d = 0; d < x.columns; d += kPanel)
      multiply_add<M, kChunkVecs>(acc, x.state.panel(d / kPanel) + row * kPanel, kPanel, 1, x.b + d * kChunk, kChunk,
                                  min64(kPanel, x.columns - d));
#pragma GCC unroll 4
    for (int c = 0; c < kChunkVecs; ++c) {
      const Vec factor = load(x.factor + c * kLanes);
      Vec along = {};
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        acc[i][c] *= factor;
        if (x.with != nullptr) along = fma(acc[i][c], load(x.with + (row + i) * kChunk + c * kLanes), along);
      }
      if (x.with != nullptr) store(x.along + c * kLanes, load(x.along + c * kLanes) + along);
    }
  }
  multiply_add<M, kChunkVecs>(acc, x.a.data + row, 1, x.a.stride, x.weights, kChunk, x.n);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < kChunkVecs; ++c) store(x.out + (row + i) * kChunk + c * kLanes, acc[i][c]);
}

void transposed_product(const Transposed& x, int64_t rows) {
#define LEANFLEET_BLOCK(M) transposed_block<M>(x, row_)
  LEANFLEET_BLOCKS_OF_ROWS(kScoreRows, rows, LEANFLEET_BLOCK);
#undef LEANFLEET_BLOCK
}

// A panel of out[j] = factor[j] * key_j G + Σ_{j <= i < n} scores[i][j] output_i; with `add` out in place of the first.
struct ValueGrad {
  Floats key;
  const float* grad;  // null: zeros
  int64_t width;
  const float* factor;
  bool add;
  const float* scores;
  Floats output;
  int64_t n;
  float* out;
  int64_t out_stride;
};

template <int M, int V>
void value_grad_block(const ValueGrad& x, int64_t row) {
  Vec acc[M][V] = {};
  float* out = x.out + row * x.out_stride;
  if (x.add) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] = load(out + i * x.out_stride + c * kLanes);
  } else if (x.grad != nullptr) {
    multiply_add<M, V>(acc, x.key.data + row * x.key.stride, x.key.stride, 1, x.grad, kPanel, x.width);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int c = 0; c < V; ++c) acc[i][c] *= x.factor[row + i];
  }
  multiply_add<M, V>(acc, x.scores + row * kChunk + row, 1, kChunk, x.output.data + row * x.output.stride, x.output.stride,
                     x.n - row);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < V; ++c) store(out + i * x.out_stride + c * kLanes, acc[i][c]);
}

template <int V>
void value_grad_panel(const ValueGrad& x) {
#define LEANFLEET_BLOCK(M) value_grad_block<M, V>(x, row_)
  LEANFLEET_BLOCKS_OF_ROWS(kRows, x.n, LEANFLEET_BLOCK);
#undef LEANFLEET_BLOCK
}

void value_grad(const State& grad, int64_t columns, ValueGrad x) {
  const float* output = x.output.data;
  float* out = x.out;
  for (int64_t c = 0; c < columns; c += kPanel) {
    x.grad = grad.panel(c / kPanel);
    x.output.data = output + c;
    x.out = out + c;
    if (columns - c > kLanes) value_grad_panel<2>(x);
    else value_grad_panel<1>(x);
  }
}

// out[t] = factor[t] * rows[t] for n rows.
Floats scaled_rows(const Floats& rows, const float* factor, float carry, int64_t n, int64_t width, float* out) {
  const int64_t pitch = pitch_of(width);
  for (int64_t t = 0; t < n; ++t) {
    const float* row = rows.data + t * rows.stride;
    const float by = factor[t] * carry;
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) store(out + t * pitch + c, load(row + c) * by);
    for (; c < width; ++c) out[t * pitch + c] = row[c] * by;
  }
  return {out, pitch};
}

double state_product(const State& a, const State& b, int64_t rows, int64_t columns) {
  double result = 0.0;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const float* x = a.panel(c / kPanel) + c % kPanel;
    const float* y = b.panel(c / kPanel) + c % kPanel;
    Vec total[4] = {};
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      for (int i = 0; i < 4; ++i) total[i] = fma(load(x + (r + i) * kPanel), load(y + (r + i) * kPanel), total[i]);
    for (; r < rows; ++r) total[0] = fma(load(x + r * kPanel), load(y + r * kPanel), total[0]);
    result += static_cast<double>(sum((total[0] + total[1]) + (total[2] + total[3])));
  }
  return result;
}

template <class T>
class Backward {
 public:
  Backward(const BackwardPlan& plan, int64_t piece, int64_t state, float* floats)
      : plan_(plan), args_(plan.args), in_(plan.args.in), s_(carve(plan, floats)),
        source_(decay_of(in_, plan.pieces[piece].batch, state)) {
    item_.piece = plan.pieces[piece];
    item_.state_head = state;
    item_.group = in_.heads / in_.v_heads;
    index_ = piece * in_.v_heads + state;
  }

  // The piece's own sums: of the state unless it is the request's last, of its gradient unless it is the first.
  void reduce() {
    if (item_.piece.slot < 0) return;
    const State state = packed(s_.states), grad = packed(s_.grad);
    State from = {}, grad_from = {};
    double kept = 1.0;
    for (int64_t token = item_.piece.begin; token < item_.piece.end; token += kChunk) {
      const int64_t n = min64(kChunk, item_.piece.end - token);
      const Chunk& chunk = source_.at(token, n);
      if (!item_.piece.last) advance_state(chunk, token, n, from, state);
      for (int64_t head = 0; head < item_.group && !item_.piece.first; head += kHeadBlock) {
        const int64_t heads = min64(kHeadBlock, item_.group - head);
        load_heads(token, n, head, heads);
        for (int64_t h = 0; h < heads; ++h) {
          advance_grad(chunk.prefix, static_cast<float>(kept), 1.0f, n, h, grad_from, grad);
          grad_from = grad;
        }
      }
      from = state;
      kept *= chunk.kept;
    }
    const int64_t at = slot(), size = in_.key_width * in_.value_width;
    if (!item_.piece.last) export_state(state, in_.key_width, in_.value_width, in_.value_width, plan_.slots.state + at * size);
    if (!item_.piece.first) export_state(grad, in_.key_width, in_.value_width, in_.value_width, plan_.slots.grad + at * size);
    plan_.slots.kept[at] = kept;
  }

  void scan() {
    const int64_t size = in_.key_width * in_.value_width, request = item_.piece.request * in_.v_heads + item_.state_head;
    const float* state = item_.piece.slot >= 0            ? plan_.slots.state + slot() * size
                         : args_.initial_state != nullptr ? args_.initial_state + request * size
                                                          : nullptr;
    const float* grad = item_.piece.slot >= 0               ? plan_.slots.grad + slot() * size
                        : args_.grad_final_state != nullptr ? args_.grad_final_state + request * size
                                                            : nullptr;
    if (grad != nullptr) import_state(grad, in_.key_width, in_.value_width, in_.value_width, packed(s_.grad));
    grad_ = grad != nullptr ? packed(s_.grad) : State{};
    decay_sum_ = 0.0;

    // The state before each span, then span by span from the last: the state before each of its chunks, and from
    // the last of these the gradients.
    const int64_t chunks = ceil_div(item_.piece.end - item_.piece.begin, kChunk);
    const int64_t spans = ceil_div(chunks, plan_.span_chunks);
    State before = {};
    if (state != nullptr) {
      before = packed(s_.starts);
      import_state(state, in_.key_width, in_.value_width, in_.value_width, before);
    }
    const State start = before;
    for (int64_t chunk = 0; chunk < (spans - 1) * plan_.span_chunks; ++chunk) {
      const State after = packed(s_.starts + (chunk / plan_.span_chunks + 1) * s_.state_floats);
      advance_state(chunk, before, after);
      before = after;
    }
    for (int64_t span = spans - 1; span >= 0; --span) {
      const int64_t first = span * plan_.span_chunks, end = min64(first + plan_.span_chunks, chunks);
      before = span > 0 ? packed(s_.starts + span * s_.state_floats) : start;
      for (int64_t chunk = first; chunk + 1 < end; ++chunk) {
        const State after = packed(s_.states + (chunk + 1 - first) * s_.state_floats);
        advance_state(chunk, before, after);
        before = after;
      }
      for (int64_t chunk = end - 1; chunk >= first; --chunk) {
        before = chunk > first ? packed(s_.states + (chunk - first) * s_.state_floats)
                 : span > 0    ? packed(s_.starts + span * s_.state_floats)
                               : start;
        const int64_t token = item_.piece.begin + chunk * kChunk;
        gradients(token, min64(kChunk, item_.piece.end - token), before);
      }
    }
    if (item_.piece.first && args_.grad_initial_state != nullptr) {
      float* to = args_.grad_initial_state + request * size;
      if (grad_.data != nullptr) export_state(grad_, in_.key_width, in_.value_width, in_.value_width, to);
      else __builtin_memset(to, 0, sizeof(float) * size);
    }
    if (plan_.decay_sums != nullptr) plan_.decay_sums[index_] = decay_sum_;
  }

 private:
  int64_t slot() const { return item_.piece.slot * in_.v_heads + item_.state_head; }
  State packed(float* data) const { return packed_state(data, in_.key_width); }

  T* rows(const void* data, const Strides& strides, int64_t head, int64_t token) const {
    return token_rows<T>(data, strides, item_.piece.batch, head, token);
  }

  void load_key_value(int64_t token, int64_t n) {
    key_ = as_floats(rows(in_.key, in_.key_strides, in_.key_head(item_.state_head), token), in_.key_strides.token, n,
                     in_.key_width, true, s_.key, pitch_of(in_.key_width));
    value_ = as_floats(rows(in_.value, in_.value_strides, item_.state_head, token), in_.value_strides.token, n, in_.value_width,
                       in_.value_width % kLanes == 0, s_.value, pitch_of(in_.value_width));
  }

  void load_heads(int64_t token, int64_t n, int64_t head, int64_t heads) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t output_head = item_.state_head * item_.group + head + h;
      const int64_t pitch = pitch_of(in_.key_width), value_pitch = pitch_of(in_.value_width);
      query_[h] = as_floats(rows(in_.query, in_.query_strides, in_.query_head(output_head), token), in_.query_strides.token, n,
                            in_.key_width, true, s_.query + h * kChunk * pitch, pitch);
      output_[h] = as_floats(rows(args_.grad_output, in_.output_strides, output_head, token), in_.output_strides.token, n,
                             in_.value_width, in_.value_width % kLanes == 0, s_.output + h * kChunk * value_pitch, value_pitch);
    }
  }

  void advance_state(int64_t chunk_index, const State& from, const State& to) {
    const int64_t token = item_.piece.begin + chunk_index * kChunk, n = min64(kChunk, item_.piece.end - token);
    advance_state(source_.at(token, n), token, n, from, to);
  }

  // to = kept * from + Σ_t suffix_t k_tᵀ v_t
  void advance_state(const Chunk& chunk, int64_t token, int64_t n, const State& from, const State& to) {
    load_key_value(token, n);
    const Floats keys = in_.log_decay == nullptr ? key_ : scaled_rows(key_, chunk.suffix, 1.0f, n, in_.key_width, s_.scaled);
    outer_product(keys, value_, chunk.kept, n, from, to);
  }

  // to = kept * from + Σ_t carry * factor_t q_tᵀ do_t of a head
  void advance_grad(const float* factor, float carry, float kept, int64_t n, int64_t h, const State& from, const State& to) {
    outer_product(scaled_rows(query_[h], factor, carry, n, in_.key_width, s_.scaled), output_[h], kept, n, from, to);
  }

  void outer_product(const Floats& a, const Floats& b, float kept, int64_t n, const State& from, const State& to) {
    Update u = {};
    u.rows = in_.key_width;
    u.kept = kept;
    u.a = a.data;
    u.a_row = 1;
    u.a_step = a.stride;
    u.b = b;
    u.n = n;
    update(from, to, in_.value_width, u);
  }

  // Rows of a head that others may share: to the gradient itself, or to the sums of those that share it.
  void write_shared(const float* transposed, int64_t n, int64_t token, void* grad, const Strides& strides, int64_t head,
                    const HeadSums& sums) {
    if (sums.data == nullptr)
      return transpose_out(transposed, n, in_.key_width, rows(grad, strides, head, token), strides.token);
    float* to = sums.data + sums.row(in_, item_.piece.batch, item_.state_head / sums.states, token);
    transpose_out(transposed, n, in_.key_width, to, in_.key_width, item_.state_head % sums.states != 0);
  }

  // The gradients of a chunk's tokens, from the state before it and the gradient of the one after; grad_ becomes that
  // of the one before.
  void gradients(int64_t token, int64_t n, const State& state) {
    const Chunk& chunk = source_.at(token, n);
    const int64_t width = in_.key_width, columns = in_.value_width, value_pitch = pitch_of(columns);
    const bool decays = args_.grad_log_decay != nullptr;
    float from_state[kChunk] = {}, to_grad[kChunk] = {};
    load_key_value(token, n);
    transpose_in(rows(in_.key, in_.key_strides, in_.key_head(item_.state_head), token), in_.key_strides.token, n, width,
                 s_.key_t);
    transpose_in(rows(in_.value, in_.value_strides, item_.state_head, token), in_.value_strides.token, n, columns, s_.value_t);
    if (decays) __builtin_memset(s_.pairs, 0, sizeof(float) * kChunk * kChunk);
    const double across = decays && state.data != nullptr && grad_.data != nullptr
                              ? static_cast<double>(chunk.kept) * state_product(state, grad_, width, columns)
                              : 0.0;
    const State grad = grad_;
    for (int64_t head = 0; head < item_.group; head += kHeadBlock) {
      const int64_t heads = min64(kHeadBlock, item_.group - head);
      load_heads(token, n, head, heads);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t output_head = item_.state_head * item_.group + head + h;
        const int64_t query_head = in_.query_head(output_head);
        float* scores = s_.scores + h * kChunk * kChunk;
        float* products = s_.products + h * kChunk * kChunk;
        score({query_[h], s_.key_t, width, scores}, n);
        score({output_[h], s_.value_t, columns, products}, n);
        mask_pairs(chunk, n, scores, products, decays ? s_.pairs : nullptr);
        transpose_in(products, kChunk, n, kChunk, s_.products_t);
        transpose_in(rows(args_.grad_output, in_.output_strides, output_head, token), in_.output_strides.token, n, columns,
                     s_.output_t);
        if (decays)
          transpose_in(rows(in_.query, in_.query_strides, query_head, token), in_.query_strides.token, n, width, s_.query_t);
        Transposed x = {};
        x.state = state;
        x.columns = columns;
        x.b = s_.output_t;
        x.factor = chunk.prefix;
        x.with = decays ? s_.query_t : nullptr;
        x.along = from_state;
        x.a = key_;
        x.weights = s_.products_t;
        x.n = n;
        x.out = s_.grad_query_t;
        transposed_product(x, width);
        write_shared(s_.grad_query_t, n, token, args_.grad_query, in_.query_strides, query_head, plan_.query_sums);

        const bool add = head + h > 0;
        x.state = grad;
        x.b = s_.value_t;
        x.factor = chunk.suffix;
        x.with = decays ? s_.key_t : nullptr;
        x.along = to_grad;
        x.add = add;
        x.a = query_[h];
        x.weights = products;
        x.out = s_.grad_key_t;
        transposed_product(x, width);
        value_grad(grad, columns, {key_, nullptr, width, chunk.suffix, add, scores, output_[h], n, s_.grad_value, value_pitch});
      }
      // Only now, for grad is read above; the first head of the first block reads all that is needed of it.
      for (int64_t h = 0; h < heads; ++h) {
        advance_grad(chunk.prefix, 1.0f, head + h == 0 ? chunk.kept : 1.0f, n, h, grad_, packed(s_.grad));
        grad_ = packed(s_.grad);
      }
    }
    write_shared(s_.grad_key_t, n, token, args_.grad_key, in_.key_strides, in_.key_head(item_.state_head), plan_.key_sums);
    T* value_rows = rows(args_.grad_value, in_.value_strides, item_.state_head, token);
    for (int64_t t = 0; t < n; ++t) convert(s_.grad_value + t * value_pitch, value_rows + t * in_.value_strides.token, columns);
    if (decays) decay_gradients(token, n, from_state, to_grad, across);
  }

  // γ_t is a factor of what row i >= t takes from key j < t (pairs) and from the state before the chunk (from_state),
  // of what the state after it keeps of key j < t (to_grad) and of what crosses the chunk. Sums of those terms alone:
  // nothing cancels, and where γ_t is 0 all of them are.
  void decay_gradients(int64_t token, int64_t n, const float* from_state, const float* to_grad, double across) {
    Vec below[kChunkVecs] = {};
    double rows = across;
    for (int64_t t = n - 1; t >= 0; --t) {
      rows += static_cast<double>(from_state[t]);
      Vec total = {};
      for (int c = 0; c < kChunkVecs; ++c) {
        below[c] = below[c] + load(s_.pairs + t * kChunk + c * kLanes);
        const VecInt earlier = lane_numbers(c * kLanes) < static_cast<float>(t);
        total = total + select(earlier, below[c] + load(to_grad + c * kLanes), Vec{});
      }
      const double gradient = rows + static_cast<double>(sum(total));
      decay_sum_ += gradient;
      if (in_.decay_per_token)
        args_.grad_log_decay[item_.piece.batch * in_.decay_strides.batch + item_.state_head * in_.decay_strides.head +
                             (token + t) * in_.decay_strides.token] = static_cast<float>(gradient);
    }
  }

  const BackwardPlan& plan_;
  const GradArgs& args_;
  const Inputs& in_;
  BackwardScratch s_;
  ChunkSource source_;
  BackwardItem item_;
  int64_t index_;
  Floats key_, value_, query_[kHeadBlock], output_[kHeadBlock];
  State grad_;
  double decay_sum_;
};

void combine_backward(const BackwardPlan& plan, int64_t index) {
  const Inputs& in = plan.args.in;
  const int64_t blocks = ceil_div(in.key_width, kChunkTokens);  // of rows
  const RequestPiece* piece = plan.pieces + index / blocks / in.v_heads;
  if (piece->slot < 0 || !piece->first) return;
  const int64_t state_head = index / blocks % in.v_heads, row = index % blocks * kChunkTokens;
  const int64_t first = piece->slot * in.v_heads + state_head, count = pieces_of_request(piece);
  const int64_t last = first + (count - 1) * in.v_heads, size = in.key_width * in.value_width;
  const int64_t at = row * in.value_width, n = min64(kChunkTokens, in.key_width - row) * in.value_width;
  const int64_t request = piece->request * in.v_heads + state_head;
  const float *initial = plan.args.initial_state, *final = plan.args.grad_final_state;
  combine_row(initial != nullptr ? initial + request * size + at : nullptr, plan.slots.state + first * size + at,
              in.v_heads * size, plan.slots.kept + first, in.v_heads, count, n);
  combine_row(final != nullptr ? final + request * size + at : nullptr, plan.slots.grad + last * size + at, -in.v_heads * size,
              plan.slots.kept + last, -in.v_heads, count, n);
}

// The gradients of a head of key or query that states share, over a piece: their sums added up, in the order of the states.
template <class T>
void sum_shared(const BackwardPlan& plan, int64_t index, float* row) {
  const GradArgs& args = plan.args;
  const Inputs& in = args.in;
  const int64_t heads = in.k_heads + (plan.query_sums.data != nullptr ? in.q_heads : 0), at = index % heads;
  const RequestPiece& piece = plan.pieces[index / heads];
  const bool of_key = at < in.k_heads;
  const HeadSums& sums = of_key ? plan.key_sums : plan.query_sums;
  const int64_t head = of_key ? at : at - in.k_heads, share = of_key ? in.key_share : in.query_share;
  const int64_t parts = share / sums.states, stride = sums.row(in, 0, 1, 0);
  const Strides& strides = of_key ? in.key_strides : in.query_strides;
  T* to = token_rows<T>(of_key ? args.grad_key : args.grad_query, strides, piece.batch, head, piece.begin);
  for (int64_t token = piece.begin; token < piece.end; ++token, to += strides.token) {
    const float* from = sums.data + sums.row(in, piece.batch, head * parts, token);
    for (int64_t c = 0; c < in.key_width; c += kLanes) {
      Vec total = load_part(from + c, in.key_width - c);
      for (int64_t p = 1; p < parts; ++p) total = total + load_part(from + p * stride + c, in.key_width - c);
      store_part(row + c, total, in.key_width - c);
    }
    convert(row, to, in.key_width);
  }
}

template <class T>
void backward_of(const BackwardPlan& plan, Phase phase, int64_t index, float* floats) {
  const Inputs& in = plan.args.in;
  if (phase == Phase::kCombine) return combine_backward(plan, index);
  if (phase == Phase::kSum) return sum_shared<T>(plan, index, floats);
  if (phase == Phase::kReduce) return Backward<T>(plan, index / in.v_heads, index % in.v_heads, floats).reduce();
  const int64_t first = index * plan.item_states;
  for (int64_t i = first; i < first + plan.item_states; ++i) Backward<T>(plan, i / in.v_heads, i % in.v_heads, floats).scan();
}

}  // namespace

int64_t forward_scratch(const ForwardPlan& plan) { return carve(plan.args.in, plan.range_width, nullptr).floats; }

void run_forward(const ForwardPlan& plan, Phase phase, int64_t index, float* scratch) {
  const FlushSubnormals flush;
  if (plan.args.in.dtype == 0) forward_of<float>(plan, phase, index, scratch);
  if (plan.args.in.dtype == 1) forward_of<Half>(plan, phase, index, scratch);
  if (plan.args.in.dtype == 2) forward_of<BFloat16>(plan, phase, index, scratch);
}

int64_t backward_scratch(const BackwardPlan& plan) { return carve(plan, nullptr).floats; }

void run_backward(const BackwardPlan& plan, Phase phase, int64_t index, float* scratch) {
  const FlushSubnormals flush;
  if (plan.args.in.dtype == 0) backward_of<float>(plan, phase, index, scratch);
  if (plan.args.in.dtype == 1) backward_of<Half>(plan, phase, index, scratch);
  if (plan.args.in.dtype == 2) backward_of<BFloat16>(plan, phase, index, scratch);
}

}  // namespace leanfleet::causal_linear_decay::LEANFLEET_ISA
