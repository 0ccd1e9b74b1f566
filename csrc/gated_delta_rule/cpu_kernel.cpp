// The gated delta rule. Prompts go in chunks of 32 tokens: with gc the running sum of g inside the chunk,
//   M[t,s] = beta_t (k_t . k_s) exp(gc_t - gc_s) for s < t      U = (I + M)^-1 (beta v - beta exp(gc) K S_0)
//   P[t,s] = (q_t . k_s) exp(gc_t - gc_s) for s <= t            O = scale (P U + exp(gc) Q S_0)
//   S_C = exp(gc_C) S_0 + (exp(gc_C - gc) K)^T U
// Differences of gc are formed as sums of the g between, so that no exponent is positive and a decay of 0 is exact; U comes
// from forward substitution, which loses no more than the recurrence does. A few tokens, and decays of each key dimension,
// go token by token.
#include "gated_delta_rule/gated_delta_rule.h"

#include <math.h>

#include "core/integers.h"
#include "core/simd.h"

namespace leanfleet::gated_delta_rule::LEANFLEET_ISA {

namespace {

constexpr int kChunk = 32;
constexpr int kChunkVecs = kChunk / kLanes;
constexpr int64_t kFewTokens = 4;                              // below it a chunk's own work is not worth it
constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 4;  // a block of results in registers: kRows rows by two vectors
constexpr int kPanel = 2 * kLanes;                             // columns of a state that stand together in scratch memory
constexpr int kSolveRows = 8;                                  // rows of U that are solved at once
constexpr int kStepVecs = 4;                                   // vectors across the rows of a state that a step takes

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

struct Item {
  int64_t batch, begin, end;                        // tokens of the batch row
  int64_t state_head, key_head, first_head, group;  // `group` heads of the output, from first_head on
  int64_t first_column, columns;
  const float* from;  // the state's first element of these columns; null: zeros
  float* to;          // null: not asked for
};

Item item_at(const CpuPlan& plan, int64_t index) {
  const Args& args = plan.args;
  Item item = {};
  const int64_t request = index / plan.ranges / args.v_heads;
  item.batch = args.cu_seqlens != nullptr ? 0 : request;
  item.end = args.tokens;
  if (args.cu_seqlens != nullptr) {
    item.begin = clamped_offset(args.cu_seqlens, request, args.tokens);
    item.end = clamped_offset(args.cu_seqlens, request + 1, args.tokens);
    if (item.end < item.begin) item.end = item.begin;
  }
  item.state_head = index / plan.ranges % args.v_heads;
  item.key_head = item.state_head / (args.v_heads / args.k_heads);
  item.group = args.heads / args.v_heads;
  item.first_head = item.state_head * item.group;
  item.first_column = index % plan.ranges * plan.range_width;
  item.columns = min64(plan.range_width, args.value_width - item.first_column);
  const int64_t row = args.state_index != nullptr ? args.state_index[request] : request;
  if (row < 0 || row >= args.state_rows) return item;
  const int64_t at = (row * args.v_heads + item.state_head) * args.key_width * args.value_width +
                     item.first_column * (args.state_v_first ? args.key_width : 1);
  if (args.initial_state != nullptr) item.from = args.initial_state + at;
  if (args.final_state != nullptr) item.to = args.final_state + at;
  return item;
}

struct Scratch {
  float* state;                   // [D, width]; a step's state where none is asked for, [columns, pitch] v-first
  float *key, *query;             // [kChunk, pitch]
  float* key_t;                   // [pitch, kChunk]
  float* decay;                   // [pitch]: of a token's key dimensions
  float* kept_key;                // [pitch]: decay times key
  float* kept_query;              // [group, pitch]
  float* query_key;               // [group]
  float *update, *output;         // [kChunk, width]
  float* steps;                   // [group, width]: a step's outputs
  float *mask, *system, *scores;  // [kChunk, kChunk]
  float *prefix, *suffix, *beta;  // [kChunk]
  int64_t width, pitch, floats;   // floats: of all
};

// Rows begin on lines of the cache, if `base` does.
struct Carver {
  float* base;
  int64_t used;
  float* take(int64_t floats) {
    float* at = base + used;
    used += round_up(floats, int64_t{16});
    return at;
  }
};

Scratch carve(const CpuPlan& plan, float* base) {
  const Args& args = plan.args;
  const int64_t group = args.heads / args.v_heads;
  Carver carver = {base, 0};
  Scratch s = {};
  s.width = round_up(min64(plan.range_width, args.value_width), int64_t{2 * kLanes});
  s.pitch = round_up(args.key_width, int64_t{kLanes});
  s.state = carver.take(s.pitch * s.width);
  s.key = carver.take(kChunk * s.pitch);
  s.query = carver.take((kChunk > group ? kChunk : group) * s.pitch);
  s.key_t = carver.take(s.pitch * kChunk);
  s.decay = carver.take(s.pitch);
  s.kept_key = carver.take(s.pitch);
  s.kept_query = carver.take(group * s.pitch);
  s.query_key = carver.take(group);
  s.update = carver.take(kChunk * s.width);
  s.output = carver.take(kChunk * s.width);
  s.steps = carver.take(group * s.width);
  s.mask = carver.take(kChunk * kChunk);
  s.system = carver.take(kChunk * kChunk);
  s.scores = carver.take(kChunk * kChunk);
  s.prefix = carver.take(kChunk);
  s.suffix = carver.take(kChunk);
  s.beta = carver.take(kChunk);
  s.floats = carver.used;
  return s;
}

template <class T>
T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return static_cast<T*>(const_cast<void*>(data)) + batch * strides.batch + head * strides.head + token * strides.token;
}

float dot(const float* a, const float* b, int64_t n) {  // n: whole vectors
  Vec total = {}, other = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    total = fma(load(a + i), load(b + i), total);
    other = fma(load(a + i + kLanes), load(b + i + kLanes), other);
  }
  if (i < n) total = fma(load(a + i), load(b + i), total);
  return sum(total + other);
}

void multiply_row(float* row, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(row + i) * factor);
}

// A row of query or key as floats, zeros up to the pitch, times `factor` and, with normalize, of unit length before.
template <class T>
void take_row(const Args& args, const T* from, float factor, int64_t pitch, float* to) {
  convert(from, to, args.key_width);
  for (int64_t c = args.key_width; c < pitch; ++c) to[c] = 0.0f;
  if (args.normalize) factor /= sqrtf(dot(to, to, pitch) + kUnitRowEps);
  if (factor != 1.0f) multiply_row(to, factor, pitch);
}

template <class T>
const T* query_row(const Args& args, const Item& item, int64_t h, int64_t token) {
  const int64_t head = (item.first_head + h) / (args.heads / args.q_heads);
  return row_of<const T>(args.query, args.query_strides, item.batch, head, token);
}

float beta_at(const Args& args, const Item& item, int64_t token) {
  return *row_of<const float>(args.beta, args.beta_strides, item.batch, item.state_head, token);
}

// Steps

// exp(g) of a token's key dimensions, of the decays of a token all the same.
void take_decay(const Args& args, const Item& item, int64_t token, const Scratch& s) {
  const float* g = args.log_decay == nullptr
                       ? nullptr
                       : row_of<const float>(args.log_decay, args.decay_strides, item.batch, item.state_head, token);
  for (int64_t c = 0; c < s.pitch; c += kLanes) {
    if (g == nullptr) store(s.decay + c, broadcast(1.0f));
    else if (args.decay_per_key) store(s.decay + c, exp_of_decay(load_part(g + c, args.key_width - c)));
    else store(s.decay + c, exp_of_decay(broadcast(*g)));
  }
}

struct Step {
  const float* from;  // null: zeros
  float* to;
  int64_t from_stride, to_stride, rows, columns, group, pitch, width;
  const float *decay, *key, *kept_key, *kept_query;
  const float* query_key;  // [group]: q . k
  float beta;
  float *update, *output;  // value on entry, u after; [group, width]
};

// V vectors of columns of a state [D, columns], from `column` on: what the old state gives, then the new one. kStream: which is
// streamed.
template <int V, bool kPart, bool kStream>
void step_columns(const Step& s, int64_t column) {
  const int64_t left = s.columns - column;
  const auto read = [&](const float* p) { return kPart ? load_part(p, left) : load(p); };
  Vec found[V] = {}, first[V] = {};  // of the key, and of the first head's query
  for (int64_t r = 0; r < s.rows && s.from != nullptr; ++r) {
    const Vec k = broadcast(s.kept_key[r]), q = broadcast(s.kept_query[r]);
    for (int c = 0; c < V; ++c) {
      const Vec x = read(s.from + r * s.from_stride + column + c * kLanes);
      found[c] = fma(k, x, found[c]);
      first[c] = fma(q, x, first[c]);
    }
  }
  Vec update[V];
  for (int c = 0; c < V; ++c) {
    update[c] = s.beta * (load(s.update + column + c * kLanes) - found[c]);
    store(s.update + column + c * kLanes, update[c]);
  }
  for (int64_t h = 0; h < s.group; ++h) {
    Vec out[V];
    for (int c = 0; c < V; ++c) out[c] = fma(update[c], broadcast(s.query_key[h]), h == 0 ? first[c] : Vec{});
    for (int64_t r = 0; r < s.rows && h > 0 && s.from != nullptr; ++r) {
      const Vec q = broadcast(s.kept_query[h * s.pitch + r]);
      for (int c = 0; c < V; ++c) out[c] = fma(q, read(s.from + r * s.from_stride + column + c * kLanes), out[c]);
    }
    for (int c = 0; c < V; ++c) store(s.output + h * s.width + column + c * kLanes, out[c]);
  }
  for (int64_t r = 0; r < s.rows && s.to != nullptr; ++r) {
    const Vec k = broadcast(s.key[r]), decay = broadcast(s.decay[r]);
    for (int c = 0; c < V; ++c) {
      const int64_t at = column + c * kLanes;
      const Vec old = s.from != nullptr ? decay * read(s.from + r * s.from_stride + at) : Vec{};
      const Vec x = fma(k, update[c], old);
      if (kPart) store_part(s.to + r * s.to_stride + at, x, left);
      else if (kStream) stream(s.to + r * s.to_stride + at, x);
      else store(s.to + r * s.to_stride + at, x);
    }
  }
}

template <bool kStream>
void step_columns(const Step& s) {
  int64_t c = 0;
  for (; c + kStepVecs * kLanes <= s.columns; c += kStepVecs * kLanes) step_columns<kStepVecs, false, kStream>(s, c);
  for (; c + kLanes <= s.columns; c += kLanes) step_columns<1, false, kStream>(s, c);
  if (c < s.columns) step_columns<1, true, false>(s, c);
}

// A state [columns, D]: each value column by itself. kPart: D is no multiple of a vector.
template <bool kPart, bool kStream>
void step_rows(const Step& s) {
  const auto read = [&](const float* p, int64_t c) {
    return p == nullptr ? Vec{} : kPart ? load_part(p + c, s.rows - c) : load(p + c);
  };
  for (int64_t column = 0; column < s.columns; ++column) {
    const float* from = s.from != nullptr ? s.from + column * s.from_stride : nullptr;
    Vec found = {};
    for (int64_t c = 0; c < s.rows; c += kLanes) found = fma(load(s.kept_key + c), read(from, c), found);
    const float update = s.beta * (s.update[column] - sum(found));
    for (int64_t h = 0; h < s.group; ++h) {
      Vec out = {};
      for (int64_t c = 0; c < s.rows; c += kLanes) out = fma(load(s.kept_query + h * s.pitch + c), read(from, c), out);
      s.output[h * s.width + column] = sum(out) + update * s.query_key[h];
    }
    for (int64_t c = 0; c < s.rows && s.to != nullptr; c += kLanes) {
      const Vec x = fma(load(s.key + c), broadcast(update), load(s.decay + c) * read(from, c));
      if (kPart) store_part(s.to + column * s.to_stride + c, x, s.rows - c);
      else if (kStream) stream(s.to + column * s.to_stride + c, x);
      else store(s.to + column * s.to_stride + c, x);
    }
  }
}

// One token: from the state at `from` to the one at `to` (null: not asked for).
template <class T>
void step(const Args& args, const Item& item, const Scratch& s, int64_t token, const float* from, int64_t from_stride,
          float* to, int64_t to_stride) {
  take_row(args, row_of<const T>(args.key, args.key_strides, item.batch, item.key_head, token), 1.0f, s.pitch, s.key);
  take_decay(args, item, token, s);
  for (int64_t c = 0; c < s.pitch; c += kLanes) store(s.kept_key + c, load(s.key + c) * load(s.decay + c));
  for (int64_t h = 0; h < item.group; ++h) {
    float *query = s.query + h * s.pitch, *kept = s.kept_query + h * s.pitch;
    take_row(args, query_row<T>(args, item, h, token), args.scale, s.pitch, query);
    s.query_key[h] = dot(query, s.key, s.pitch);
    for (int64_t c = 0; c < s.pitch; c += kLanes) store(kept + c, load(query + c) * load(s.decay + c));
  }
  const T* value = row_of<const T>(args.value, args.value_strides, item.batch, item.state_head, token);
  convert(value + item.first_column, s.update, item.columns);
  for (int64_t c = item.columns; c < s.width; ++c) s.update[c] = 0.0f;
  const float beta = beta_at(args, item, token);
  const Step x = {from,    to,    from_stride, to_stride,    args.key_width, item.columns, item.group, s.pitch, s.width,
                  s.decay, s.key, s.kept_key,  s.kept_query, s.query_key,    beta,         s.update,   s.steps};
  const int64_t bytes = 4 * args.requests * args.v_heads * args.key_width * args.value_width;
  const bool streamed = to != nullptr && to != s.state && streams(from, to, to_stride, bytes);
  if (!args.state_v_first) streamed ? step_columns<true>(x) : step_columns<false>(x);
  else if (args.key_width % kLanes != 0) step_rows<true, false>(x);
  else streamed ? step_rows<false, true>(x) : step_rows<false, false>(x);
  if (streamed) finish_streams();
  for (int64_t h = 0; h < item.group; ++h) {
    T* out = row_of<T>(args.output, args.output_strides, item.batch, item.first_head + h, token);
    convert(s.steps + h * s.width, out + item.first_column, item.columns);
  }
}

// Chunks

// out = kept * base + a b for rows of a, or where there is no base a b; columns in whole vectors. kCausal: row i of a has
// i + 1 elements that are not 0. kSquare: columns of `out` behind the row's own are not asked for.
enum class Shape { kFull, kCausal, kSquare };
struct Product {
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  int64_t b_row;
  float* out;
  int64_t out_row, rows, columns, depth;
  Shape shape;
  const float* base = nullptr;
  int64_t base_row = 0;
  float kept = 1.0f;
  int64_t b_panel = kPanel, out_panel = kPanel, base_panel = kPanel;  // from one panel of columns to the next
};

template <int M, int V>
void product_block(const Product& p, int64_t row, int64_t panel) {
  Vec acc[M][V] = {};
  float* out = p.out + row * p.out_row + panel * p.out_panel;
  if (p.base != nullptr) {
    const float* base = p.base + row * p.base_row + panel * p.base_panel;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
      for (int c = 0; c < V; ++c) acc[i][c] = load(base + i * p.base_row + c * kLanes) * p.kept;
  }
  const float *a = p.a + row * p.a_row, *b = p.b + panel * p.b_panel;
  const int64_t depth = p.shape == Shape::kCausal ? min64(p.depth, row + M) : p.depth;
  for (int64_t k = 0; k < depth; ++k, a += p.a_step, b += p.b_row) {
    Vec x[V];
#pragma GCC unroll 2
    for (int c = 0; c < V; ++c) x[c] = load(b + c * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec factor = broadcast(a[i * p.a_row]);
#pragma GCC unroll 2
      for (int c = 0; c < V; ++c) acc[i][c] = fma(factor, x[c], acc[i][c]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int c = 0; c < V; ++c) store(out + i * p.out_row + c * kLanes, acc[i][c]);
}

template <int V>
void product_panel(const Product& p, int64_t panel) {
  int64_t row = p.shape == Shape::kSquare ? panel * kPanel / kRows * kRows : 0;
  for (; row + kRows <= p.rows; row += kRows) product_block<kRows, V>(p, row, panel);
  if (row + 4 <= p.rows && kRows > 4) product_block<4, V>(p, row, panel), row += 4;
  for (; row < p.rows; ++row) product_block<1, V>(p, row, panel);
}

void multiply(const Product& p) {
  for (int64_t column = 0; column < p.columns; column += kPanel) {
    if (p.columns - column > kLanes) product_panel<2>(p, column / kPanel);
    else product_panel<1>(p, column / kPanel);
  }
}

// exp of sums of g: mask[t][s] from s + 1 to t for s <= t, else 0; prefix[t] from 0 to t; suffix[s] from s + 1 to the last.
// Returns that of all.
float take_decays(const Args& args, const Item& item, int64_t token, int64_t n, const Scratch& s) {
  Vec sums[kChunkVecs] = {}, lanes[kChunkVecs], row[kChunkVecs] = {};
  for (int c = 0; c < kChunkVecs; ++c) lanes[c] = lane_numbers(c * kLanes);
  double total = 0.0;
  float logs[kChunk] = {};
  for (int64_t t = 0; t < n; ++t) {
    float g = 0.0f;
    if (args.log_decay != nullptr)
      g = *row_of<const float>(args.log_decay, args.decay_strides, item.batch, item.state_head, token + t);
    total += static_cast<double>(g);
    logs[t] = static_cast<float>(total);
    for (int c = 0; c < kChunkVecs; ++c) {
      sums[c] = select(lanes[c] < static_cast<float>(t), sums[c] + g, Vec{});
      row[c] = select(lanes[c] <= static_cast<float>(t), exp_of_decay(sums[c]), Vec{});
      store(s.mask + t * kChunk + c * kLanes, row[c]);
    }
  }
  for (int c = 0; c < kChunkVecs; ++c) {
    store(s.suffix + c * kLanes, row[c]);
    store(s.prefix + c * kLanes, exp_of_decay(load(logs + c * kLanes)));
  }
  return s.prefix[n - 1];
}

// key_t[c][t] = key[t][c] for t < n, 0 for the other t.
void transpose_keys(const Scratch& s, int64_t n) {
  for (int64_t c = 0; c < s.pitch; c += kLanes) {
    for (int64_t first = 0; first < kChunk; first += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) block[t] = first + t < n ? load(s.key + (first + t) * s.pitch + c) : Vec{};
      transpose(block);
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) store(s.key_t + (c + t) * kChunk + first, block[t]);
    }
  }
}

// u = (I + M)^-1 u for the first n rows; s.system holds -M.
void solve(const Scratch& s, int64_t n, int64_t wide) {
  for (int64_t first = 0; first < n; first += kSolveRows) {
    const int64_t rows = min64(kSolveRows, n - first);
    if (first > 0)
      multiply({s.system + first * kChunk, kChunk, 1, s.update, s.width, s.update + first * s.width, s.width, rows, wide, first,
                Shape::kFull, s.update + first * s.width, s.width, 1.0f});
    for (int64_t c = 0; c < wide; c += kLanes) {
      Vec solved[kSolveRows];
      for (int64_t i = 0; i < rows; ++i) {
        Vec x = load(s.update + (first + i) * s.width + c);
        for (int64_t j = 0; j < i; ++j) x = fma(broadcast(s.system[(first + i) * kChunk + first + j]), solved[j], x);
        solved[i] = x;
        store(s.update + (first + i) * s.width + c, x);
      }
    }
  }
}

// A state [D, columns]; whole vectors of columns may be read and written. A caller's rows often are a power of two apart,
// which few places of the first cache serve: scratch memory holds panels one after the other.
struct State {
  float* data;  // null: zeros, or not asked for
  int64_t row, panel;
};

State own_state(const Args& args, const Scratch& s) { return {s.state, kPanel, args.key_width * kPanel}; }

// n tokens of a chunk, from the state before them to the one after.
template <class T>
void chunk(const Args& args, const Item& item, const Scratch& s, int64_t token, int64_t n, const State& from, const State& to) {
  const int64_t wide = round_up(item.columns, int64_t{kLanes}), depth = args.key_width;
  const float kept = take_decays(args, item, token, n, s);
  for (int64_t t = 0; t < n; ++t)
    take_row(args, row_of<const T>(args.key, args.key_strides, item.batch, item.key_head, token + t), 1.0f, s.pitch,
             s.key + t * s.pitch);
  transpose_keys(s, n);
  // -M, and the right side beta (v - exp(gc) K S_0)
  multiply({s.key, s.pitch, 1, s.key_t, kChunk, s.system, kChunk, n, kChunk, depth, Shape::kSquare});
  if (from.data != nullptr)
    multiply({s.key, s.pitch, 1, from.data, from.row, s.update, s.width, n, wide, depth, Shape::kFull, nullptr, 0, 1.0f,
              from.panel});
  for (int64_t t = 0; t < n; ++t) {
    const float beta = beta_at(args, item, token + t);
    for (int c = 0; c < kChunk; c += kLanes) {
      float* row = s.system + t * kChunk + c;
      store(row, select(lane_numbers(c) < static_cast<float>(t), load(row) * load(s.mask + t * kChunk + c) * -beta, Vec{}));
    }
    const T* value =
        row_of<const T>(args.value, args.value_strides, item.batch, item.state_head, token + t) + item.first_column;
    float* row = s.update + t * s.width;
    for (int64_t c = 0; c < wide; c += kLanes) {
      Vec v = load_part(value + c, item.columns - c);
      if (from.data != nullptr) v = v - s.prefix[t] * load(row + c);
      store(row + c, beta * v);
    }
  }
  solve(s, n, wide);
  for (int64_t h = 0; h < item.group; ++h) {
    for (int64_t t = 0; t < n; ++t)
      take_row(args, query_row<T>(args, item, h, token + t), args.scale, s.pitch, s.query + t * s.pitch);
    multiply({s.query, s.pitch, 1, s.key_t, kChunk, s.scores, kChunk, n, kChunk, depth, Shape::kSquare});
    if (from.data != nullptr)
      multiply({s.query, s.pitch, 1, from.data, from.row, s.output, s.width, n, wide, depth, Shape::kFull, nullptr, 0, 1.0f,
                from.panel});
    for (int64_t t = 0; t < n; ++t) {
      for (int c = 0; c < kChunk; c += kLanes) {
        float* row = s.scores + t * kChunk + c;
        store(row, select(lane_numbers(c) <= static_cast<float>(t), load(row) * load(s.mask + t * kChunk + c), Vec{}));
      }
      if (from.data != nullptr) multiply_row(s.output + t * s.width, s.prefix[t], wide);
    }
    multiply({s.scores, kChunk, 1, s.update, s.width, s.output, s.width, n, wide, n, Shape::kCausal,
              from.data != nullptr ? s.output : nullptr, s.width, 1.0f});
    for (int64_t t = 0; t < n; ++t) {
      T* out = row_of<T>(args.output, args.output_strides, item.batch, item.first_head + h, token + t);
      convert(s.output + t * s.width, out + item.first_column, item.columns);
    }
  }
  if (to.data == nullptr) return;
  for (int64_t r = 0; r < depth; ++r)
    for (int c = 0; c < kChunk; c += kLanes) {
      float* p = s.key_t + r * kChunk + c;
      store(p, load(p) * load(s.suffix + c));
    }
  multiply({s.key_t, kChunk, 1, s.update, s.width, to.data, to.row, depth, wide, n, Shape::kFull, from.data, from.row, kept,
            kPanel, to.panel, from.panel});
}

// Calls copy(element of the caller's state, of the one in scratch memory) for all of an item's columns.
template <class Copy>
void for_each_element(const Args& args, const Item& item, const State& own, Copy copy) {
  const int64_t row = args.state_v_first ? 1 : args.value_width, column = args.state_v_first ? args.key_width : 1;
  for (int64_t c = 0; c < item.columns; ++c) {
    const int64_t at = c / kPanel * own.panel + c % kPanel;
    for (int64_t r = 0; r < args.key_width; ++r) copy(r * row + c * column, at + r * own.row);
  }
}

void import_state(const Args& args, const Item& item, const Scratch& s) {
  __builtin_memset(s.state, 0, sizeof(float) * s.pitch * s.width);
  if (item.from == nullptr) return;
  for_each_element(args, item, own_state(args, s), [&](int64_t from, int64_t to) { s.state[to] = item.from[from]; });
}

void export_state(const Args& args, const Item& item, const Scratch& s) {
  for_each_element(args, item, own_state(args, s), [&](int64_t to, int64_t from) { item.to[to] = s.state[from]; });
}

// The first chunk reads the caller's state where it lies, and the last writes it there, if its rows are whole vectors.
template <class T>
void run_chunks(const Args& args, const Item& item, const Scratch& s) {
  const bool whole = !args.state_v_first && item.columns % kLanes == 0;
  const State own = own_state(args, s);
  State from = {const_cast<float*>(item.from), args.value_width, kPanel};
  if (!whole && item.from != nullptr) {
    import_state(args, item, s);
    from = own;
  }
  for (int64_t token = item.begin; token < item.end; token += kChunk) {
    const int64_t n = min64(kChunk, item.end - token);
    State to = own;
    if (token + n == item.end && item.to == nullptr) to.data = nullptr;
    else if (token + n == item.end && whole) to = {item.to, args.value_width, kPanel};
    chunk<T>(args, item, s, token, n, from, to);
    from = own;
  }
  if (!whole && item.to != nullptr) export_state(args, item, s);
}

// States between tokens stand where the last one goes, or in scratch memory where that is not asked for.
template <class T>
void run_steps(const Args& args, const Item& item, const Scratch& s) {
  const int64_t stride = args.state_v_first ? args.key_width : args.value_width;
  const bool asked = item.to != nullptr;
  const int64_t to_stride = asked ? stride : args.state_v_first ? s.pitch : s.width;
  for (int64_t token = item.begin; token < item.end; ++token) {
    const bool first = token == item.begin, last = token + 1 == item.end;
    float* const to = asked ? item.to : last ? nullptr : s.state;
    step<T>(args, item, s, token, first ? item.from : asked ? item.to : s.state, first ? stride : to_stride, to, to_stride);
  }
}

template <class T>
void run_typed(const CpuPlan& plan, int64_t index, float* floats) {
  const Args& args = plan.args;
  const Item item = item_at(plan, index);
  const Scratch s = carve(plan, floats);
  const int64_t tokens = item.end - item.begin;
  if (tokens == 0 && item.to != nullptr && item.to != item.from) {
    import_state(args, item, s);
    export_state(args, item, s);
  } else if (tokens < kFewTokens || args.decay_per_key) {
    run_steps<T>(args, item, s);
  } else {
    run_chunks<T>(args, item, s);
  }
}

}  // namespace

int64_t scratch_floats(const CpuPlan& plan) { return carve(plan, nullptr).floats; }

void run_item(const CpuPlan& plan, int64_t index, float* scratch) {
  if (plan.args.dtype == 0) run_typed<float>(plan, index, scratch);
  if (plan.args.dtype == 1) run_typed<Half>(plan, index, scratch);
  if (plan.args.dtype == 2) run_typed<BFloat16>(plan, index, scratch);
}

}  // namespace leanfleet::gated_delta_rule::LEANFLEET_ISA
