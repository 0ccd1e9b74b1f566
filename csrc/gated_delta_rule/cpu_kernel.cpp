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
static_assert(kChunk == kGradChunk);
constexpr int kChunkVecs = kChunk / kLanes;
constexpr int64_t kFewTokens = 4;                              // below it a chunk's own work is not worth it
constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 4;  // a block of results in registers: kRows rows by two vectors
constexpr int kPanel = 2 * kLanes;                             // columns of a state that stand together in scratch memory
constexpr int kSolveRows = 8;                                  // rows of U that are solved at once
constexpr int kStepVecs = 4;                                   // vectors across the rows of a state that a step takes

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
T* row_of(const void* data, const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return static_cast<T*>(const_cast<void*>(data)) + batch * strides.batch + head * strides.head + token * strides.token;
}

struct Item {
  int64_t batch, begin, end;                        // tokens of the batch row
  int64_t state_head, key_head, first_head, group;  // `group` heads of the output, from first_head on
  int64_t first_column, columns;
  const float* from;  // the state's first element of these columns; null: zeros
  float* to;          // null: not asked for
  const void* narrow_from;
  void* narrow_to;
  const float* norm_from;
  float* norm_to;
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
  if (args.narrow_initial_state != nullptr) item.narrow_from = static_cast<const uint16_t*>(args.narrow_initial_state) + at;
  if (args.narrow_final_state != nullptr) item.narrow_to = static_cast<uint16_t*>(args.narrow_final_state) + at;
  const int64_t norm_at = (row * args.v_heads + item.state_head) * args.key_width;
  if (args.initial_norm != nullptr) item.norm_from = args.initial_norm + norm_at;
  if (args.final_norm != nullptr) item.norm_to = args.final_norm + norm_at;
  return item;
}

struct Scratch {
  float* state;                   // [D, width]; a step's state where none is asked for, [columns, pitch] v-first
  float *key, *query;             // [kChunk, pitch]
  float* key_t;                   // [pitch, kChunk]
  float* decay;                   // [pitch]: of a token's key dimensions
  float* kept_key;                // [pitch]: decay times key
  float* norm;                    // [pitch]
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
  s.norm = carver.take(args.divides ? s.pitch : 0);
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

template <class T>
float square_of(const T* row, int64_t n) {
  Vec total = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = load_part(row + i, n - i);
    total = fma(x, x, total);
  }
  return sum(total);
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
  if (args.beta == nullptr) return 1.0f;
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
  bool delta;
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
      if (s.delta) found[c] = fma(k, x, found[c]);
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
    for (int64_t c = 0; c < s.rows && s.delta; c += kLanes) found = fma(load(s.kept_key + c), read(from, c), found);
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

// A token's norm, and the outputs over what it makes of their queries.
void divide_outputs(const Args& args, const Item& item, const Scratch& s, float beta) {
  for (int64_t c = 0; c < s.pitch; c += kLanes)
    store(s.norm + c, fma(load(s.key + c), broadcast(beta), load(s.norm + c) * load(s.decay + c)));
  for (int64_t h = 0; h < item.group; ++h) {
    float by = dot(s.query + h * s.pitch, s.norm, s.pitch);
    if (__builtin_fabsf(by) < args.eps) by = by < 0.0f ? -args.eps : args.eps;
    multiply_row(s.steps + h * s.width, 1.0f / by, s.width);
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
  const Step x = {from,    to,    from_stride, to_stride,    args.key_width, item.columns, item.group, s.pitch,  s.width,
                  s.decay, s.key, s.kept_key,  s.kept_query, s.query_key,    beta,         args.delta, s.update, s.steps};
  const int64_t bytes = 4 * args.requests * args.v_heads * args.key_width * args.value_width;
  const bool streamed = to != nullptr && to != s.state && streams(from, to, to_stride, bytes);
  if (!args.state_v_first) streamed ? step_columns<true>(x) : step_columns<false>(x);
  else if (args.key_width % kLanes != 0) step_rows<true, false>(x);
  else streamed ? step_rows<false, true>(x) : step_rows<false, false>(x);
  if (streamed) finish_streams();
  if (args.divides) divide_outputs(args, item, s, beta);
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
  // A decay that is the same for all tokens would round the same way in each sum: `lost` is what rounding takes.
  Vec sums[kChunkVecs] = {}, lost[kChunkVecs] = {}, lanes[kChunkVecs], row[kChunkVecs] = {};
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
      const Vec before = sums[c], sum = before + g, added = sum - before;
      const Vec error = (before - (sum - added)) + (g - added);  // NaN behind a decay to 0
      const VecInt counts = lanes[c] < static_cast<float>(t);
      sums[c] = select(counts, sum, Vec{});
      lost[c] = select(counts & (error == error), lost[c] + error, Vec{});
      const Vec power = exp_of_decay(sums[c]);
      row[c] = select(lanes[c] <= static_cast<float>(t), fma(power, lost[c], power), Vec{});
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
  const bool corrects = args.delta && from.data != nullptr;
  if (args.delta) multiply({s.key, s.pitch, 1, s.key_t, kChunk, s.system, kChunk, n, kChunk, depth, Shape::kSquare});
  if (corrects)
    multiply({s.key, s.pitch, 1, from.data, from.row, s.update, s.width, n, wide, depth, Shape::kFull, nullptr, 0, 1.0f,
              from.panel});
  for (int64_t t = 0; t < n; ++t) {
    const float beta = beta_at(args, item, token + t);
    for (int c = 0; c < kChunk && args.delta; c += kLanes) {
      float* row = s.system + t * kChunk + c;
      store(row, select(lane_numbers(c) < static_cast<float>(t), load(row) * load(s.mask + t * kChunk + c) * -beta, Vec{}));
    }
    const T* value =
        row_of<const T>(args.value, args.value_strides, item.batch, item.state_head, token + t) + item.first_column;
    float* row = s.update + t * s.width;
    for (int64_t c = 0; c < wide; c += kLanes) {
      Vec v = load_part(value + c, item.columns - c);
      if (corrects) v = v - s.prefix[t] * load(row + c);
      store(row + c, beta * v);
    }
  }
  if (args.delta) solve(s, n, wide);
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

// The same with states of T, which are in scratch memory as floats from the first token to the last.
template <class T>
void run_narrow_steps(const Args& args, const Item& item, const Scratch& s) {
  const int64_t stride = args.state_v_first ? args.key_width : args.value_width, pitch = args.state_v_first ? s.pitch : s.width;
  const int64_t rows = args.state_v_first ? item.columns : args.key_width;
  const int64_t width = args.state_v_first ? args.key_width : item.columns;
  const auto* const from = static_cast<const T*>(item.narrow_from);
  __builtin_memset(s.state, 0, sizeof(float) * static_cast<size_t>(s.pitch * s.width));
  for (int64_t r = 0; r < rows && from != nullptr; ++r) convert(from + r * stride, s.state + r * pitch, width);
  for (int64_t token = item.begin; token < item.end; ++token) step<T>(args, item, s, token, s.state, pitch, s.state, pitch);
  auto* const to = static_cast<T*>(item.narrow_to);
  for (int64_t r = 0; r < rows && to != nullptr; ++r) convert(s.state + r * pitch, to + r * stride, width);
}

template <class T>
void run_typed(const CpuPlan& plan, int64_t index, float* floats) {
  const Args& args = plan.args;
  const Item item = item_at(plan, index);
  const Scratch s = carve(plan, floats);
  const int64_t tokens = item.end - item.begin, width = args.key_width;
  for (int64_t c = 0; c < s.pitch && args.divides; c += kLanes)
    store(s.norm + c, item.norm_from != nullptr && c < width ? load_part(item.norm_from + c, width - c) : Vec{});
  if (args.narrow_states) {
    run_narrow_steps<T>(args, item, s);
  } else if (tokens == 0 && item.to != nullptr && item.to != item.from) {
    import_state(args, item, s);
    export_state(args, item, s);
  } else if (tokens < kFewTokens || args.decay_per_key || args.divides) {
    run_steps<T>(args, item, s);
  } else {
    run_chunks<T>(args, item, s);
  }
  if (item.norm_to != nullptr) convert(s.norm, item.norm_to, width);
}

// Gradients, in chunks of kChunk tokens. With the matrices above, K' = exp(gc) K, K" = exp(gc_C - gc) K, Q' = scale exp(gc) Q, a
// decay of each key dimension in its own column, N[t,s] = (k_t . k_s) exp(gc_t - gc_s) below the diagonal, and dS the gradient
// of the state behind the chunk:
//   W = (I + N diag(beta))^-1 (v - K' S_0)    U = diag(beta) W
//   dU = P^T dO + K" dS                       Y = (I + N^T diag(beta))^-1 dU
//   dv = diag(beta) Y                         dbeta_t = y_t . w_t
//   F = dO U^T on and below the diagonal, E = -dv U^T below it; both times exp(gc_t - gc_s) as scores of queries and of keys are
//   dQ = exp(gc) dO S_0^T + F K               dK = F^T Q + E K + E^T K - exp(gc) dv S_0^T + exp(gc_C - gc) U dS^T
//   dS_0 = exp(gc_C) dS + Q'^T dO - K'^T dv
// The gradient of g_t is the sum of the terms that exp(g_t) is a factor of: of pairs s < t <= i in F and E, of rows i >= t that
// take from S_0, of keys s < t in the state behind, and of S_0 there. Nothing is subtracted or divided by a decay.
struct Held {       // of a chunk, from the way forwards
  float* state;     // before it
  float* missing;   // W [kChunk, width]
  float* products;  // N [kChunk, kChunk]
};

struct GradScratch {
  float *held, *borders;  // of the chunks of a span; states before spans
  float *grad_state, *turned;
  float *key, *query, *decay, *prefix, *suffix, *scaled;        // [kChunk, pitch]; scaled: the left side of a product
  float *found, *grad_key, *grad_query, *grad_g, *rows, *keys;  // [kChunk, pitch]
  float *update, *grad_update, *value;                          // [kChunk, width]
  float *key_t, *update_t;                                      // [pitch, kChunk], [width, kChunk]
  float *mask, *scores, *pairs, *factors, *system;              // [kChunk, kChunk]
  float *kept, *whole;                                          // [pitch]
  float *token_prefix, *token_suffix, *beta, *key_factor;       // [kChunk]
  int64_t width, pitch, state_floats, held_floats, floats;
};

GradScratch carve(const GradPlan& plan, float* base) {
  const Args& args = plan.args.in;
  Carver carver = {base, 0};
  GradScratch s = {};
  s.width = round_up(args.value_width, int64_t{kPanel});
  s.pitch = round_up(args.key_width, int64_t{kPanel});
  s.state_floats = args.key_width * s.width;
  s.held_floats = round_up(s.state_floats + kChunk * s.width + kChunk * kChunk, int64_t{16});
  s.held = carver.take(plan.span_chunks * s.held_floats);
  s.borders = carver.take(plan.spans > 1 ? plan.spans * s.state_floats : 0);
  s.grad_state = carver.take(s.state_floats);
  s.turned = carver.take(args.value_width * s.pitch);
  float** const wide[] = {&s.key,   &s.query,    &s.decay,      &s.prefix, &s.suffix, &s.scaled,
                          &s.found, &s.grad_key, &s.grad_query, &s.grad_g, &s.rows,   &s.keys};
  for (float** rows : wide) *rows = carver.take(kChunk * s.pitch);
  float** const values[] = {&s.update, &s.grad_update, &s.value};
  for (float** rows : values) *rows = carver.take(kChunk * s.width);
  s.key_t = carver.take(s.pitch * kChunk);
  s.update_t = carver.take(s.width * kChunk);
  float** const squares[] = {&s.mask, &s.scores, &s.pairs, &s.factors, &s.system};
  for (float** square : squares) *square = carver.take(kChunk * kChunk);
  s.kept = carver.take(s.pitch);
  s.whole = carver.take(s.pitch);
  float** const tokens[] = {&s.token_prefix, &s.token_suffix, &s.beta, &s.key_factor};
  for (float** row : tokens) *row = carver.take(kChunk);
  s.floats = carver.used;
  return s;
}

Held held_at(const GradScratch& s, int64_t chunk) {
  float* const at = s.held + chunk * s.held_floats;
  return {at, at + s.state_floats, at + s.state_floats + kChunk * s.width};
}

// to[c][r] = from[r][c] for c < columns; r up to whole panels, 0 behind `rows`. *_panel: from one panel of columns to the next.
void turn(const float* from, int64_t from_row, int64_t from_panel, int64_t rows, int64_t columns, float* to, int64_t to_row,
          int64_t to_panel) {
  for (int64_t r = 0; r < round_up(rows, int64_t{kPanel}); r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        block[i] = r + i < rows ? load(from + c / kPanel * from_panel + (r + i) * from_row + c % kPanel) : Vec{};
      transpose(block);
      for (int i = 0; i < kLanes && c + i < columns; ++i)
        store(to + r / kPanel * to_panel + (c + i) * to_row + r % kPanel, block[i]);
    }
}

void turn_state(const Args& args, const GradScratch& s, const float* state) {
  turn(state, kPanel, args.key_width * kPanel, args.key_width, args.value_width, s.turned, kPanel, args.value_width * kPanel);
}

// out = rows of `a` times a state [D, Dv].
void times_state(const Args& args, const GradScratch& s, const float* a, const float* state, int64_t n, float* out) {
  multiply({a, s.pitch, 1, state, kPanel, out, s.width, n, s.width, args.key_width, Shape::kFull, nullptr, 0, 1.0f,
            args.key_width * kPanel});
}

// out = rows of `a`, [n, width], times the state that turn_state() turned, [Dv, D].
void times_turned(const Args& args, const GradScratch& s, const float* a, int64_t n, float* out) {
  multiply({a, s.width, 1, s.turned, kPanel, out, s.pitch, n, s.pitch, args.value_width, Shape::kFull, nullptr, 0, 1.0f,
            args.value_width * kPanel});
}

// state += s.scaled^T b, for b [n, width].
void add_to_state(const Args& args, const GradScratch& s, const float* b, int64_t n, float* state) {
  const int64_t panel = args.key_width * kPanel;
  multiply({s.scaled, 1, s.pitch, b, s.width, state, kPanel, args.key_width, s.width, n, Shape::kFull, state, kPanel, 1.0f,
            kPanel, panel, panel});
}

// out += a b with a [n, kChunk] and b [n, pitch]; turned: a^T b.
void times_square(const GradScratch& s, const float* a, bool turned, const float* b, int64_t n, float* out) {
  multiply(
      {a, turned ? 1 : kChunk, turned ? kChunk : 1, b, s.pitch, out, s.pitch, n, s.pitch, n, Shape::kFull, out, s.pitch, 1.0f});
}

// A row of value's width as floats, zeros up to `width`.
template <class T>
void take_values(const T* from, int64_t count, int64_t width, float* to) {
  convert(from, to, count);
  for (int64_t c = count; c < width; ++c) to[c] = 0.0f;
}

// A row of query or key as take_row has it; returns 1 over its length, 1 without normalize.
template <class T>
float take_unit_row(const Args& args, const T* from, float factor, int64_t pitch, float* to) {
  convert(from, to, args.key_width);
  for (int64_t c = args.key_width; c < pitch; ++c) to[c] = 0.0f;
  const float inverse = args.normalize ? 1.0f / sqrtf(dot(to, to, pitch) + kUnitRowEps) : 1.0f;
  if (factor * inverse != 1.0f) multiply_row(to, factor * inverse, pitch);
  return inverse;
}

// The gradient of the row that take_unit_row made `factor * unit row` of; `grad` is that of what it made.
void through_length(const Args& args, float* grad, const float* row, float factor, float inverse, int64_t pitch) {
  if (!args.normalize) {
    if (factor != 1.0f) multiply_row(grad, factor, pitch);
    return;
  }
  const float along = dot(row, grad, pitch) / factor;
  for (int64_t c = 0; c < pitch; c += kLanes) store(grad + c, (load(grad + c) * factor - load(row + c) * along) * inverse);
}

// Keys, betas and decays of a chunk: s.prefix and s.suffix in their columns, and for decays of a token s.mask.
template <class T>
void take_chunk(const Args& args, const Item& item, const GradScratch& s, int64_t token, int64_t n) {
  for (int64_t t = 0; t < n; ++t) {
    const T* row = row_of<const T>(args.key, args.key_strides, item.batch, item.key_head, token + t);
    s.key_factor[t] = take_unit_row(args, row, 1.0f, s.pitch, s.key + t * s.pitch);
    s.beta[t] = beta_at(args, item, token + t);
  }
  if (args.decay_per_key) {
    for (int64_t c = 0; c < s.pitch; c += kLanes) {
      Vec product = broadcast(1.0f);
      for (int64_t t = 0; t < n; ++t) {
        const float* g = row_of<const float>(args.log_decay, args.decay_strides, item.batch, item.state_head, token + t);
        const Vec decay = c < args.key_width ? exp_of_decay(load_part(g + c, args.key_width - c)) : broadcast(1.0f);
        store(s.decay + t * s.pitch + c, decay);
        store(s.prefix + t * s.pitch + c, product = product * decay);
      }
      store(s.kept + c, product);
      product = broadcast(1.0f);
      for (int64_t t = n - 1; t >= 0; --t) {
        store(s.suffix + t * s.pitch + c, product);
        product = product * load(s.decay + t * s.pitch + c);
      }
    }
    return;
  }
  Scratch decays = {};
  decays.mask = s.mask;
  decays.prefix = s.token_prefix;
  decays.suffix = s.token_suffix;
  const Vec kept = broadcast(take_decays(args, item, token, n, decays));
  for (int64_t c = 0; c < s.pitch; c += kLanes) {
    store(s.kept + c, kept);
    for (int64_t t = 0; t < n; ++t) {
      store(s.prefix + t * s.pitch + c, broadcast(s.token_prefix[t]));
      store(s.suffix + t * s.pitch + c, broadcast(s.token_suffix[t]));
    }
  }
}

void multiply_rows(const float* a, const float* b, float sign, int64_t floats, float* out) {
  for (int64_t i = 0; i < floats; i += kLanes) store(out + i, load(a + i) * load(b + i) * sign);
}

// out[t][s] = (rows_t . k_s) exp(gc_t - gc_s) for s < t, and with `diagonal` s = t; else 0. s.key_t holds the keys turned.
void scores_of(const Args& args, const GradScratch& s, const float* rows, bool diagonal, int64_t n, float* out) {
  const float shift = diagonal ? 1.0f : 0.0f;
  if (!args.decay_per_key)
    multiply({rows, s.pitch, 1, s.key_t, kChunk, out, kChunk, n, kChunk, args.key_width, Shape::kSquare});
  for (int64_t t = 0; t < n; ++t)
    for (int c = 0; c < kChunk; c += kLanes) {
      float* const at = out + t * kChunk + c;
      const Vec x = args.decay_per_key ? Vec{} : load(at) * load(s.mask + t * kChunk + c);
      store(at, select(lane_numbers(c) < static_cast<float>(t) + shift, x, Vec{}));
    }
  if (!args.decay_per_key) return;
  for (int64_t from = 0; from < n; ++from) {  // s.found: the key of `from`, as it has decayed
    __builtin_memcpy(s.found, s.key + from * s.pitch, sizeof(float) * static_cast<size_t>(s.pitch));
    if (diagonal) out[from * kChunk + from] = dot(rows + from * s.pitch, s.found, s.pitch);
    for (int64_t t = from + 1; t < n; ++t) {
      multiply_rows(s.found, s.decay + t * s.pitch, 1.0f, s.pitch, s.found);
      out[t * kChunk + from] = dot(rows + t * s.pitch, s.found, s.pitch);
    }
  }
}

// What scores_of(rows) hands on, where s.factors is the gradient of its result, 0 above what it takes: to the rows, the keys and
// the decays. `products`: what scores_of returned.
void scores_backward(const Args& args, const GradScratch& s, const float* rows, bool diagonal, const float* products, int64_t n,
                     float* grad_rows) {
  if (!args.decay_per_key) {
    for (int64_t t = 0; t < n; ++t)
      for (int c = 0; c < kChunk; c += kLanes) {
        const int64_t at = t * kChunk + c;
        const VecInt earlier = lane_numbers(c) < static_cast<float>(t);
        store(s.pairs + at, load(s.pairs + at) + select(earlier, load(s.factors + at) * load(products + at), Vec{}));
        store(s.factors + at, load(s.factors + at) * load(s.mask + at));
      }
    times_square(s, s.factors, false, s.key, n, grad_rows);
    times_square(s, s.factors, true, rows, n, s.grad_key);
    return;
  }
  for (int64_t c = 0; c < s.pitch; c += kLanes)
    for (int64_t from = 0; from < n; ++from) {
      const Vec key = load(s.key + from * s.pitch + c);
      Vec of_key = {}, decayed = broadcast(1.0f), term[kChunk];
      if (diagonal) {
        const Vec factor = broadcast(s.factors[from * kChunk + from]);
        float* const grad = grad_rows + from * s.pitch + c;
        of_key = factor * load(rows + from * s.pitch + c);
        store(grad, fma(factor, key, load(grad)));
      }
      for (int64_t t = from + 1; t < n; ++t) {
        decayed = decayed * load(s.decay + t * s.pitch + c);
        const Vec factor = decayed * s.factors[t * kChunk + from], of_row = factor * load(rows + t * s.pitch + c);
        float* const grad = grad_rows + t * s.pitch + c;
        of_key = of_key + of_row;
        store(grad, fma(factor, key, load(grad)));
        term[t] = of_row * key;
      }
      store(s.grad_key + from * s.pitch + c, load(s.grad_key + from * s.pitch + c) + of_key);
      Vec later = {};
      for (int64_t t = n - 1; t > from; --t) {
        later = later + term[t];
        store(s.grad_g + t * s.pitch + c, load(s.grad_g + t * s.pitch + c) + later);
      }
    }
}

void decay_state(const Args& args, const GradScratch& s, const float* from, float* to) {
  for (int64_t panel = 0; panel < s.width / kPanel; ++panel)
    for (int64_t r = 0; r < args.key_width; ++r) {
      const int64_t at = (panel * args.key_width + r) * kPanel;
      for (int c = 0; c < kPanel; c += kLanes) store(to + at + c, load(from + at + c) * s.kept[r]);
    }
}

// W and N of a chunk, from held.state, and the state behind it (null: not asked for).
template <class T>
void forwards(const Args& args, const Item& item, const GradScratch& s, int64_t token, int64_t n, const Held& held, float* to) {
  take_chunk<T>(args, item, s, token, n);
  turn(s.key, s.pitch, kPanel, n, args.key_width, s.key_t, kChunk, kPanel);
  if (args.delta) {
    scores_of(args, s, s.key, false, n, held.products);
    multiply_rows(s.key, s.prefix, 1.0f, n * s.pitch, s.scaled);
    times_state(args, s, s.scaled, held.state, n, held.missing);
  }
  for (int64_t t = 0; t < n; ++t) {
    take_values(row_of<const T>(args.value, args.value_strides, item.batch, item.state_head, token + t), args.value_width,
                s.width, s.value);
    float* const row = held.missing + t * s.width;
    for (int64_t c = 0; c < s.width; c += kLanes)
      store(row + c, args.delta ? load(s.value + c) - load(row + c) : load(s.value + c));
    for (int c = 0; c < kChunk && args.delta; c += kLanes) {
      const VecInt earlier = lane_numbers(c) < static_cast<float>(t);
      store(s.system + t * kChunk + c, select(earlier, load(held.products + t * kChunk + c) * -load(s.beta + c), Vec{}));
    }
  }
  Scratch system = {};
  system.system = s.system;
  system.update = held.missing;
  system.width = s.width;
  if (args.delta) solve(system, n, s.width);
  if (to == nullptr) return;
  for (int64_t t = 0; t < n; ++t)
    for (int64_t c = 0; c < s.width; c += kLanes)
      store(s.update + t * s.width + c, load(held.missing + t * s.width + c) * s.beta[t]);
  decay_state(args, s, held.state, to);
  multiply_rows(s.key, s.suffix, 1.0f, n * s.pitch, s.scaled);
  add_to_state(args, s, s.update, n, to);
}

// y = (I + N^T diag(beta))^-1 y for n rows of s.grad_update.
void solve_turned(const GradScratch& s, const float* products, int64_t n) {
  turn(products, kChunk, kPanel, n, n, s.system, kChunk, kPanel);
  for (int64_t t = 0; t < n; ++t)
    for (int c = 0; c < kChunk; c += kLanes)
      store(s.system + t * kChunk + c, load(s.system + t * kChunk + c) * -load(s.beta + c));
  for (int64_t first = (n - 1) / kSolveRows * kSolveRows; first >= 0; first -= kSolveRows) {
    const int64_t rows = min64(kSolveRows, n - first), behind = first + rows;
    if (behind < n)
      multiply({s.system + first * kChunk + behind, kChunk, 1, s.grad_update + behind * s.width, s.width,
                s.grad_update + first * s.width, s.width, rows, s.width, n - behind, Shape::kFull,
                s.grad_update + first * s.width, s.width, 1.0f});
    for (int64_t c = 0; c < s.width; c += kLanes) {
      Vec solved[kSolveRows];
      for (int64_t i = rows - 1; i >= 0; --i) {
        float* const at = s.grad_update + (first + i) * s.width + c;
        Vec x = load(at);
        for (int64_t j = i + 1; j < rows; ++j) x = fma(broadcast(s.system[(first + i) * kChunk + first + j]), solved[j], x);
        store(at, solved[i] = x);
      }
    }
  }
}

// A row of a gradient of query or key, to the caller's tensor or to the parts of one that states share.
template <class T>
void give_row(const Args& args, const float* row, void* tensor, const Strides& strides, int64_t batch, int64_t head,
              int64_t token) {
  convert(row, row_of<T>(tensor, strides, batch, head, token), args.key_width);
}

void give_part(const Args& args, const float* row, float* parts, int64_t heads, int64_t batch, int64_t head, int64_t token) {
  convert(row, parts + ((batch * heads + head) * args.tokens + token) * args.key_width, args.key_width);
}

// s.factors = sign s.value U^T, for s < t + diagonal; else 0.
void pair_factors(const Args& args, const GradScratch& s, float diagonal, float sign, int64_t n) {
  multiply({s.value, s.width, 1, s.update_t, kChunk, s.factors, kChunk, n, kChunk, args.value_width, Shape::kSquare});
  for (int64_t t = 0; t < n; ++t)
    for (int c = 0; c < kChunk; c += kLanes) {
      float* const at = s.factors + t * kChunk + c;
      store(at, select(lane_numbers(c) < static_cast<float>(t) + diagonal, load(at) * sign, Vec{}));
    }
}

// s.grad_g to dg: what exp(g_t) is a factor of in rows i >= t, in keys s < t, in pairs of both, and in the state before.
void give_decays(const GradArgs& grad, const Item& item, const GradScratch& s, int64_t token, int64_t n) {
  const Args& args = grad.in;
  float total[kChunk] = {};
  for (int64_t c = 0; c < s.pitch; c += kLanes) {
    Vec later = {}, earlier = load(s.whole + c);
    for (int64_t t = n - 1; t >= 0; --t) {
      float* const at = s.grad_g + t * s.pitch + c;
      later = later + load(s.rows + t * s.pitch + c);
      store(at, later + (args.decay_per_key ? load(at) : Vec{}));
    }
    for (int64_t t = 0; t < n; ++t) {
      float* const at = s.grad_g + t * s.pitch + c;
      store(at, load(at) + earlier);
      earlier = earlier + load(s.keys + t * s.pitch + c);
    }
  }
  if (!args.decay_per_key) {
    Vec pairs[kChunkVecs] = {};
    for (int64_t t = n - 1; t >= 0; --t) {
      Vec own = {};
      for (int c = 0; c < kChunkVecs; ++c) {
        pairs[c] = pairs[c] + load(s.pairs + t * kChunk + c * kLanes);
        own = own + select(lane_numbers(c * kLanes) < static_cast<float>(t), pairs[c], Vec{});
      }
      for (int64_t c = 0; c < s.pitch; c += kLanes) own = own + load(s.grad_g + t * s.pitch + c);
      total[t] = sum(own);
    }
  }
  for (int64_t t = 0; t < n; ++t) {
    const float* const g = row_of<const float>(args.log_decay, args.decay_strides, item.batch, item.state_head, token + t);
    float* const to = grad.grad_log_decay + (g - args.log_decay);
    if (args.decay_per_key) convert(s.grad_g + t * s.pitch, to, args.key_width);
    else *to = total[t];
  }
}

// A chunk from its last token to its first: s.grad_state becomes the gradient of the state before it.
template <class T>
void backwards(const GradPlan& plan, const Item& item, const GradScratch& s, int64_t token, int64_t n, const Held& held) {
  const GradArgs& grad = plan.args;
  const Args& args = grad.in;
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(kChunk * s.pitch);
  take_chunk<T>(args, item, s, token, n);
  turn(s.key, s.pitch, kPanel, n, args.key_width, s.key_t, kChunk, kPanel);
  for (int64_t t = 0; t < n; ++t)
    for (int64_t c = 0; c < s.width; c += kLanes)
      store(s.update + t * s.width + c, load(held.missing + t * s.width + c) * s.beta[t]);
  turn(s.update, s.width, kPanel, n, args.value_width, s.update_t, kChunk, kPanel);

  turn_state(args, s, s.grad_state);
  times_turned(args, s, s.update, n, s.found);
  multiply_rows(s.found, s.suffix, 1.0f, n * s.pitch, s.grad_key);
  multiply_rows(s.grad_key, s.key, 1.0f, n * s.pitch, s.keys);
  multiply_rows(s.key, s.suffix, 1.0f, n * s.pitch, s.scaled);
  times_state(args, s, s.scaled, s.grad_state, n, s.grad_update);
  __builtin_memset(s.whole, 0, sizeof(float) * static_cast<size_t>(s.pitch));
  for (int64_t r = 0; r < args.key_width; ++r) {
    Vec product = {};
    for (int64_t panel = 0; panel < s.width / kPanel; ++panel) {
      const int64_t at = (panel * args.key_width + r) * kPanel;
      for (int c = 0; c < kPanel; c += kLanes) product = fma(load(held.state + at + c), load(s.grad_state + at + c), product);
    }
    s.whole[r] = sum(product) * s.kept[r];
  }
  __builtin_memset(s.rows, 0, row_bytes);
  __builtin_memset(s.grad_g, 0, row_bytes);
  __builtin_memset(s.pairs, 0, sizeof(float) * kChunk * kChunk);
  decay_state(args, s, s.grad_state, s.grad_state);
  turn_state(args, s, held.state);

  for (int64_t h = 0; h < item.group; ++h) {
    const int64_t head = item.first_head + h, query_head = head / (args.heads / args.q_heads);
    float inverse[kChunk];
    for (int64_t t = 0; t < n; ++t) {
      const T* row = row_of<const T>(args.query, args.query_strides, item.batch, query_head, token + t);
      inverse[t] = take_unit_row(args, row, args.scale, s.pitch, s.query + t * s.pitch);
      take_values(row_of<const T>(grad.grad_output, args.output_strides, item.batch, head, token + t), args.value_width,
                  s.width, s.value + t * s.width);
    }
    scores_of(args, s, s.query, true, n, s.scores);
    multiply({s.scores, 1, kChunk, s.value, s.width, s.grad_update, s.width, n, s.width, n, Shape::kFull, s.grad_update,
              s.width, 1.0f});
    pair_factors(args, s, 1.0f, 1.0f, n);
    times_turned(args, s, s.value, n, s.found);
    multiply_rows(s.found, s.prefix, 1.0f, n * s.pitch, s.grad_query);
    for (int64_t i = 0; i < n * s.pitch; i += kLanes)
      store(s.rows + i, fma(load(s.query + i), load(s.grad_query + i), load(s.rows + i)));
    multiply_rows(s.query, s.prefix, 1.0f, n * s.pitch, s.scaled);
    add_to_state(args, s, s.value, n, s.grad_state);
    scores_backward(args, s, s.query, true, s.scores, n, s.grad_query);
    for (int64_t t = 0; t < n; ++t) {
      float* const row = s.grad_query + t * s.pitch;
      through_length(args, row, s.query + t * s.pitch, args.scale, inverse[t], s.pitch);
      if (plan.query_parts == nullptr)
        give_row<T>(args, row, grad.grad_query, args.query_strides, item.batch, query_head, token + t);
      else give_part(args, row, plan.query_parts, args.heads, item.batch, head, token + t);
    }
  }

  if (args.delta) solve_turned(s, held.products, n);
  for (int64_t t = 0; t < n; ++t) {
    float *const y = s.grad_update + t * s.width, *const v = s.value + t * s.width;
    const int64_t at =
        item.batch * args.beta_strides.batch + item.state_head * args.beta_strides.head + (token + t) * args.beta_strides.token;
    if (grad.grad_beta != nullptr) grad.grad_beta[at] = dot(y, held.missing + t * s.width, s.width);
    for (int64_t c = 0; c < s.width; c += kLanes) store(v + c, load(y + c) * s.beta[t]);
    convert(v, row_of<T>(grad.grad_value, args.value_strides, item.batch, item.state_head, token + t), args.value_width);
  }
  if (args.delta) {  // what the rule reads from the state under the key
    pair_factors(args, s, 0.0f, -1.0f, n);
    times_turned(args, s, s.value, n, s.found);
    multiply_rows(s.found, s.prefix, -1.0f, n * s.pitch, s.found);
    for (int64_t i = 0; i < n * s.pitch; i += kLanes) {
      store(s.grad_key + i, load(s.grad_key + i) + load(s.found + i));
      store(s.rows + i, fma(load(s.key + i), load(s.found + i), load(s.rows + i)));
    }
    multiply_rows(s.key, s.prefix, -1.0f, n * s.pitch, s.scaled);
    add_to_state(args, s, s.value, n, s.grad_state);
    scores_backward(args, s, s.key, false, held.products, n, s.grad_key);
  }
  if (grad.grad_log_decay != nullptr) give_decays(grad, item, s, token, n);
  for (int64_t t = 0; t < n; ++t) {
    float* const row = s.grad_key + t * s.pitch;
    through_length(args, row, s.key + t * s.pitch, 1.0f, s.key_factor[t], s.pitch);
    if (plan.key_parts == nullptr)
      give_row<T>(args, row, grad.grad_key, args.key_strides, item.batch, item.key_head, token + t);
    else give_part(args, row, plan.key_parts, args.v_heads, item.batch, item.state_head, token + t);
  }
}

// Calls copy(element of a state of the caller, of one in panels) for all of them.
template <class Copy>
void for_each_element(const Args& args, Copy copy) {
  Item whole = {};
  whole.columns = args.value_width;
  for_each_element(args, whole, State{nullptr, kPanel, args.key_width * kPanel}, copy);
}

void import_state(const Args& args, const GradScratch& s, const float* from, int64_t at, float* to) {
  __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(s.state_floats));
  if (from != nullptr) for_each_element(args, [&](int64_t theirs, int64_t own) { to[own] = from[at + theirs]; });
}

template <class T>
void grad_of_states(const GradPlan& plan, int64_t index, float* floats) {
  const GradArgs& grad = plan.args;
  const Args& args = grad.in;
  CpuPlan whole = {};
  whole.args = args;
  whole.ranges = 1;
  whole.range_width = args.value_width;
  const Item item = item_at(whole, index);
  const GradScratch s = carve(plan, floats);
  const int64_t at = index * args.key_width * args.value_width;
  const int64_t chunks = ceil_div(item.end - item.begin, int64_t{kChunk}), spans = ceil_div(chunks, plan.span_chunks);
  const auto token_of = [&](int64_t chunk) { return item.begin + chunk * kChunk; };
  const auto tokens_of = [&](int64_t chunk) { return min64(kChunk, item.end - token_of(chunk)); };
  const auto border = [&](int64_t span) { return s.borders + span * s.state_floats; };
  import_state(args, s, args.initial_state, at, spans > 1 ? border(0) : held_at(s, 0).state);
  for (int64_t chunk = 0; chunk < (spans - 1) * plan.span_chunks; ++chunk) {  // to the last span's border
    const int64_t place = chunk % plan.span_chunks;
    Held held = held_at(s, 0);
    held.state = place == 0 ? border(chunk / plan.span_chunks) : held_at(s, place % 2).state;
    const bool last = place + 1 == plan.span_chunks;
    float* const to = last ? border(chunk / plan.span_chunks + 1) : held_at(s, (place + 1) % 2).state;
    forwards<T>(args, item, s, token_of(chunk), tokens_of(chunk), held, to);
  }
  import_state(args, s, grad.grad_final_state, at, s.grad_state);
  for (int64_t span = spans - 1; span >= 0; --span) {
    const int64_t first = span * plan.span_chunks, count = min64(plan.span_chunks, chunks - first);
    if (spans > 1) __builtin_memcpy(held_at(s, 0).state, border(span), sizeof(float) * static_cast<size_t>(s.state_floats));
    for (int64_t i = 0; i < count; ++i)
      forwards<T>(args, item, s, token_of(first + i), tokens_of(first + i), held_at(s, i),
                  i + 1 < count ? held_at(s, i + 1).state : nullptr);
    for (int64_t i = count - 1; i >= 0; --i)
      backwards<T>(plan, item, s, token_of(first + i), tokens_of(first + i), held_at(s, i));
  }
  if (grad.grad_initial_state == nullptr) return;
  for_each_element(args, [&](int64_t theirs, int64_t own) { grad.grad_initial_state[at + theirs] = s.grad_state[own]; });
}

// The sum of the parts of a head's row, in their order.
template <class T>
void sum_parts(const Args& args, const float* parts, int64_t heads, int64_t all_heads, int64_t batch, int64_t token,
               void* tensor, const Strides& strides, float* row) {
  const int64_t D = args.key_width, group = all_heads / heads;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t c = 0; c < D; ++c) row[c] = 0.0f;
    for (int64_t i = 0; i < group; ++i) {
      const float* const part = parts + ((batch * all_heads + head * group + i) * args.tokens + token) * D;
      for (int64_t c = 0; c < D; ++c) row[c] += part[c];
    }
    give_row<T>(args, row, tensor, strides, batch, head, token);
  }
}

// A token of a batch row; one of no request has gradients of 0 already.
template <class T>
void grad_sums(const GradPlan& plan, int64_t index, float* row) {
  const Args& args = plan.args.in;
  const int64_t batch = index / args.tokens, token = index % args.tokens;
  bool there = args.cu_seqlens == nullptr;
  for (int64_t q = 0; q < args.requests && !there; ++q)
    there =
        token >= clamped_offset(args.cu_seqlens, q, args.tokens) && token < clamped_offset(args.cu_seqlens, q + 1, args.tokens);
  if (!there) return;
  if (plan.query_parts != nullptr)
    sum_parts<T>(args, plan.query_parts, args.q_heads, args.heads, batch, token, plan.args.grad_query, args.query_strides, row);
  if (plan.key_parts != nullptr)
    sum_parts<T>(args, plan.key_parts, args.k_heads, args.v_heads, batch, token, plan.args.grad_key, args.key_strides, row);
}

template <class T>
void run_grad_typed(const GradPlan& plan, GradPhase phase, int64_t index, float* scratch) {
  if (phase == GradPhase::kStates) grad_of_states<T>(plan, index, scratch);
  else grad_sums<T>(plan, index, scratch);
}

}  // namespace

float key_square(const Args& args, int64_t batch, int64_t head, int64_t token) {
  const auto square = [&](auto* row) { return square_of(row, args.key_width); };
  if (args.dtype == 1) return square(row_of<const Half>(args.key, args.key_strides, batch, head, token));
  if (args.dtype == 2) return square(row_of<const BFloat16>(args.key, args.key_strides, batch, head, token));
  return square(row_of<const float>(args.key, args.key_strides, batch, head, token));
}

int64_t scratch_floats(const CpuPlan& plan) { return carve(plan, nullptr).floats; }

void run_item(const CpuPlan& plan, int64_t index, float* scratch) {
  const FlushSubnormals flush;
  if (plan.args.dtype == 0) run_typed<float>(plan, index, scratch);
  if (plan.args.dtype == 1) run_typed<Half>(plan, index, scratch);
  if (plan.args.dtype == 2) run_typed<BFloat16>(plan, index, scratch);
}

int64_t grad_scratch_floats(const GradPlan& plan) { return carve(plan, nullptr).floats; }

void run_grad_item(const GradPlan& plan, GradPhase phase, int64_t index, float* scratch) {
  const FlushSubnormals flush;
  const int32_t dtype = plan.args.in.dtype;
  if (dtype == 0) run_grad_typed<float>(plan, phase, index, scratch);
  if (dtype == 1) run_grad_typed<Half>(plan, phase, index, scratch);
  if (dtype == 2) run_grad_typed<BFloat16>(plan, phase, index, scratch);
}

}  // namespace leanfleet::gated_delta_rule::LEANFLEET_ISA
