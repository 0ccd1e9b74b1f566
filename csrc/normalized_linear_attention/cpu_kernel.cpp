#include "core/simd.h"
#include "normalized_linear_attention.h"

namespace leanfleet::normalized_linear_attention::LEANFLEET_ISA {

namespace {

constexpr float kUnitRowEps = 1e-12f;  // lower bound of the norm that kUnit divides by
constexpr int kTileRows = 4;
// Vectors across a tile of S; a tile, a row of z and one of out stay in registers.
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
// Vectors across the rows that a decode step takes, and rows that it asks for ahead.
constexpr int kStepVectors = kLanes == 16 ? 8 : 4;
constexpr int64_t kStepRows = 16;

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// g as it divides: |g| held at eps or more, the sign of 0 is plus; NaN stays NaN.
float held(float g, float eps) { return __builtin_fabsf(g) < eps ? (g < 0.0f ? -eps : eps) : g; }

// Where S, or the item's columns of it, stands; `sums` is its extra row. Null: zeros, or not to be stored.
struct State {
  float *rows, *sums;
  int64_t row_stride, columns;
};

// What one task works on.
struct Item {
  int64_t batch, kv_head, first_column, columns, begin, end;  // tokens begin .. end of the scan's direction
  int64_t unit, segment;
};

Item item_at(const LinearScan& scan, int64_t index) {
  Item item;
  item.unit = index / scan.segments;
  item.segment = index % scan.segments;
  const int64_t head = item.unit / scan.ranges;
  item.batch = head / scan.kv_heads;
  item.kv_head = head % scan.kv_heads;
  item.first_column = item.unit % scan.ranges * scan.range_width;
  item.columns = min64(scan.range_width, scan.z.width - item.first_column);
  item.begin = item.segment * scan.segment_tokens;
  item.end = min64(item.begin + scan.segment_tokens, scan.tokens);
  return item;
}

int64_t token_at(const LinearScan& scan, int64_t i) { return scan.reverse ? scan.tokens - 1 - i : i; }

int64_t offset_of(const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return batch * strides.batch + head * strides.head + token * strides.token;
}

// The first n lanes, all if there are more; the others are 0 and nothing behind is touched.
Vec load_part(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float part[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}
void store_part(float* p, Vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}

template <class T>
float dot(const T* a, const T* b, int64_t n) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total = fma(load(a + i), load(b + i), total);
  float rest = 0.0f;
  for (; i < n; ++i) rest += to_float(a[i]) * to_float(b[i]);
  return sum(total) + rest;
}

void add(float* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(to + i) + load(from + i));
  for (; i < n; ++i) to[i] += from[i];
}

void scale(float* x, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

template <class T>
float norm_of(const T* row, int64_t n) {
  const float norm = __builtin_sqrtf(dot(row, row, n));
  return norm < kUnitRowEps ? kUnitRowEps : norm;  // NaN stays NaN
}

// Asks for the row that the next block of tokens has in this one's place; past the end it does no harm.
template <class T>
void prefetch_next(const LinearScan& scan, const ScanRows& rows, const T* at, int64_t count) {
  const int64_t ahead = (scan.reverse ? -scan.block_tokens : scan.block_tokens) * rows.strides.token;
  const uintptr_t next = reinterpret_cast<uintptr_t>(at) + ahead * sizeof(T);
  for (uintptr_t byte = 0; byte < count * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(next + byte), 0, 2);
}

// Columns first .. first + count of one row to out, as floats; returns the extra element.
template <class T>
float pack_row(const LinearScan& scan, const ScanRows& rows, int64_t batch, int64_t head, int64_t token, int64_t first,
               int64_t count, float* out) {
  const int64_t at = offset_of(rows.strides, batch, head, token);
  const T* row = static_cast<const T*>(rows.data) + at;
  prefetch_next(scan, rows, row + first, count);
  convert(row + first, out, count);
  if (rows.kind == RowKind::kWeighted) {
    prefetch_next(scan, rows, static_cast<const T*>(rows.output) + at, rows.width);
    const float g = rows.normalizer[offset_of(rows.normalizer_strides, batch, head, token)];
    const float factor = 1.0f / held(g, scan.eps);
    scale(out, factor, count);
    if (__builtin_fabsf(g) < scan.eps) return 0.0f;
    return -factor * dot(row, static_cast<const T*>(rows.output) + at, rows.width);
  }
  const float factor = rows.kind == RowKind::kUnit ? rows.scale / norm_of(row, rows.width) : rows.scale;
  if (factor != 1.0f) scale(out, factor, count);
  return rows.extra;
}

// Tokens first .. first + tokens in the scan's direction to out [tokens * per_head, row_stride]: whole rows and the
// extra element (of x and y), or the item's columns and zeros up to row_stride (of z).
template <class T>
void pack(const LinearScan& scan, const ScanRows& rows, const Item& item, int64_t first, int64_t tokens, bool whole, float* out,
          int64_t row_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < rows.per_head; ++j, out += row_stride) {
      const int64_t head = item.kv_head * rows.per_head + j, token = token_at(scan, first + t);
      if (whole) {
        out[rows.width] = pack_row<T>(scan, rows, item.batch, head, token, 0, rows.width, out);
      } else {
        pack_row<T>(scan, rows, item.batch, head, token, item.first_column, item.columns, out);
        for (int64_t c = item.columns; c < row_stride; ++c) out[c] = 0.0f;
      }
    }
  }
}

struct Tile {
  const float *x, *y, *z;  // at the tile's first row (x, y) or column (z, out) of the first token
  float* out;
  int64_t x_rows, y_rows;          // per token
  int64_t row_stride, out_stride;  // of x and y; of z and out
  int64_t tokens;
  const float* from;  // S before the first token; null: 0
  float* to;          // S after the last token; null: not needed
  int64_t from_stride, to_stride, from_columns, to_columns;
};

// One tile of S, R rows by C vectors, through a block of tokens: S += y z, out += x S.
template <int R, int C, bool kUpdate, bool kOutput>
void run_tile(const Tile& tile) {
  Vec s[R][C] = {};
  if (tile.from != nullptr) {
    if (tile.from_columns >= C * kLanes) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) s[r][c] = load(tile.from + r * tile.from_stride + c * kLanes);
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
          s[r][c] = load_part(tile.from + r * tile.from_stride + c * kLanes, tile.from_columns - c * kLanes);
    }
  }
  const float *x = tile.x, *y = tile.y, *z = tile.z;
  float* out = tile.out;
  const int64_t x_rows = tile.x_rows, y_rows = tile.y_rows;
  const int64_t row_stride = tile.row_stride, out_stride = tile.out_stride;
  for (int64_t t = 0; t < tile.tokens; ++t) {
    if (kUpdate) {
      for (int64_t j = 0; j < y_rows; ++j, y += row_stride, z += out_stride) {
        Vec row[C];
        for (int c = 0; c < C; ++c) row[c] = load(z + c * kLanes);
        for (int r = 0; r < R; ++r) {
          const Vec factor = broadcast(y[r]);
          for (int c = 0; c < C; ++c) s[r][c] = fma(factor, row[c], s[r][c]);
        }
      }
    }
    if (kOutput) {
      for (int64_t j = 0; j < x_rows; ++j, x += row_stride, out += out_stride) {
        Vec row[C];
        for (int c = 0; c < C; ++c) row[c] = load(out + c * kLanes);
        for (int r = 0; r < R; ++r) {
          const Vec factor = broadcast(x[r]);
          for (int c = 0; c < C; ++c) row[c] = fma(factor, s[r][c], row[c]);
        }
        for (int c = 0; c < C; ++c) store(out + c * kLanes, row[c]);
      }
    }
  }
  if (!kUpdate || tile.to == nullptr) return;
  if (tile.to_columns >= C * kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(tile.to + r * tile.to_stride + c * kLanes, s[r][c]);
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store_part(tile.to + r * tile.to_stride + c * kLanes, s[r][c], tile.to_columns - c * kLanes);
  }
}

// All rows of S, C vectors wide from `column` on, through a block of tokens.
template <int C, bool kUpdate, bool kOutput>
void run_rows(Tile tile, const State& from, const State& to, int64_t width, int64_t column) {
  const Tile first = tile;
  tile.from_stride = from.row_stride;
  tile.to_stride = to.row_stride;
  int64_t row = 0;
  const auto move_to = [&](int64_t r, float* from_row, float* to_row) {
    tile.x = first.x + r;
    tile.y = first.y + r;
    tile.from = from_row != nullptr ? from_row + column : nullptr;
    tile.to = to_row != nullptr ? to_row + column : nullptr;
  };
  const auto row_of = [](const State& state, int64_t r) {
    return state.rows != nullptr ? state.rows + r * state.row_stride : nullptr;
  };
  for (; row + kTileRows <= width; row += kTileRows) {
    move_to(row, row_of(from, row), row_of(to, row));
    run_tile<kTileRows, C, kUpdate, kOutput>(tile);
  }
  for (; row < width; ++row) {
    move_to(row, row_of(from, row), row_of(to, row));
    run_tile<1, C, kUpdate, kOutput>(tile);
  }
  move_to(width, from.sums, to.sums);
  run_tile<1, C, kUpdate, kOutput>(tile);
}

// One token through `count` rows of S from row `first` on, C whole vectors wide. Decoding is bound by memory: rows are
// taken in their order there and asked for ahead; the first row of x goes along with the update. kStream: `to` is
// streamed.
template <int C, bool kStream>
void step_rows(const Tile& tile, const float* from, float* to, int64_t first, int64_t count, int64_t column) {
  Vec z[C], out[C];
  float kept[kStream ? kStepRows * C * kLanes : 1];  // the rows again, for the other rows of x
  from += column;
  to += column;
  for (int c = 0; c < C; ++c) {
    z[c] = load(tile.z + column + c * kLanes);
    out[c] = load(tile.out + column + c * kLanes);
  }
  for (int64_t r = 0; r < count; ++r) {
    const Vec x = broadcast(tile.x[first + r]), y = broadcast(tile.y[first + r]);
    for (int c = 0; c < C; ++c) {
      const float* source = from + r * tile.from_stride + c * kLanes;
      float* target = to + r * tile.to_stride + c * kLanes;
      if (c % (16 / kLanes) == 0) {  // once a cache line
        __builtin_prefetch(source + kStepRows * tile.from_stride, 0, 3);
        if (!kStream) __builtin_prefetch(target + kStepRows * tile.to_stride, 1, 3);
      }
      const Vec s = fma(y, z[c], load(source));
      if (kStream) stream(target, s);
      else store(target, s);
      if (kStream && tile.x_rows > 1) store(kept + (r * C + c) * kLanes, s);
      out[c] = fma(x, s, out[c]);
    }
  }
  for (int c = 0; c < C; ++c) store(tile.out + column + c * kLanes, out[c]);
  const float* seen = kStream ? kept : to;
  const int64_t seen_stride = kStream ? C * kLanes : tile.to_stride;
  for (int64_t j = 1; j < tile.x_rows; ++j) {
    float* next = tile.out + j * tile.out_stride + column;
    for (int c = 0; c < C; ++c) out[c] = load(next + c * kLanes);
    for (int64_t r = 0; r < count; ++r) {
      const Vec x = broadcast(tile.x[j * tile.row_stride + first + r]);
      for (int c = 0; c < C; ++c) out[c] = fma(x, load(seen + r * seen_stride + c * kLanes), out[c]);
    }
    for (int c = 0; c < C; ++c) store(next + c * kLanes, out[c]);
  }
}

template <bool kStream>
void step_block(const Tile& tile, const float* from, float* to, int64_t first, int64_t count, int64_t columns) {
  int64_t column = 0;
  for (; column + kStepVectors * kLanes <= columns; column += kStepVectors * kLanes)
    step_rows<kStepVectors, kStream>(tile, from, to, first, count, column);
  for (; column < columns; column += kLanes) step_rows<1, kStream>(tile, from, to, first, count, column);
}

// One token through all rows of S, `columns` (whole vectors) wide; state_bytes: of all states of the call.
void step(Tile tile, const State& from, const State& to, int64_t width, int64_t columns, int64_t state_bytes) {
  tile.from_stride = from.row_stride;
  tile.to_stride = to.row_stride;
  const bool streamed = streams(from.rows, to.rows, to.row_stride, state_bytes);
  const auto block = streamed ? step_block<true> : step_block<false>;
  for (int64_t row = 0; row < width; row += kStepRows)
    block(tile, from.rows + row * from.row_stride, to.rows + row * to.row_stride, row, min64(kStepRows, width - row), columns);
  if (streamed) finish_streams();
  step_block<false>(tile, from.sums, to.sums, width, 1, columns);
}

struct Worker {
  float *state, *y_sum, *x, *y, *z, *out, *row_sums, *source;
};

Worker worker_at(const LinearScan& scan, int64_t index) {
  const ScanScratch& at = scan.layout;
  float* base = scan.scratch + index * at.size;
  return {base + at.state, base + at.y_sum, base + at.x,        base + at.y,
          base + at.z,     base + at.out,   base + at.row_sums, base + at.source};
}

State state_of(const LinearScan& scan, const Worker& worker) {
  return {worker.state, worker.state + scan.y.width * scan.range_width, scan.range_width, scan.range_width};
}

// The item's piece of a carried state [B,Hkv,width,columns] with its sums [B,Hkv,columns].
State carried(const LinearScan& scan, const Item& item, const float* state, const float* z_sum) {
  if (state == nullptr) return {};
  const int64_t head = item.batch * scan.kv_heads + item.kv_head;
  return {const_cast<float*>(state) + head * scan.y.width * scan.z.width + item.first_column,
          const_cast<float*>(z_sum) + head * scan.z.width + item.first_column, scan.z.width, item.columns};
}

int64_t y_sum_at(const LinearScan& scan, const Item& item) {
  return (item.batch * scan.kv_heads + item.kv_head) * scan.y.width;
}

// Divides, completes and writes `tokens` rows of out; adds to totals.
template <class T>
void finish_rows(const LinearScan& scan, const Item& item, const Worker& worker, int64_t first, int64_t tokens,
                 double* totals) {
  const int64_t width = scan.range_width;
  float* out = worker.out;
  const float* row_sum = worker.row_sums;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < scan.x.per_head; ++j, out += width, ++row_sum) {
      const int64_t head = item.kv_head * scan.x.per_head + j, token = token_at(scan, first + t);
      float factor = scan.out_scale;
      if (scan.normalizer != nullptr) {
        const Vec divisor = broadcast(held(*row_sum, scan.eps));
        for (int64_t c = 0; c < width; c += kLanes) store(out + c, load(out + c) / divisor);
        if (item.first_column == 0) scan.normalizer[offset_of(scan.normalizer_strides, item.batch, head, token)] = *row_sum;
      }
      if (scan.source.data != nullptr) {
        pack_row<T>(scan, scan.source, item.batch, head, token, item.first_column, item.columns, worker.source);
        const float along = dot(worker.source, out, item.columns);
        if (totals != nullptr) totals[1] += along;
        if (scan.source.kind == RowKind::kUnit) {
          const T* row = static_cast<const T*>(scan.source.data) + offset_of(scan.source.strides, item.batch, head, token);
          const float norm = norm_of(row, scan.source.width);
          if (norm > kUnitRowEps)
            for (int64_t c = 0; c < item.columns; ++c) out[c] -= along * worker.source[c];
          factor /= norm;
        }
      }
      if (factor != 1.0f) scale(out, factor, item.columns);
      convert(out, static_cast<T*>(scan.out) + offset_of(scan.out_strides, item.batch, head, token) + item.first_column,
              item.columns);
    }
  }
}

// Takes the item's tokens block by block through S, which starts as `from` and, with kUpdate, ends in `to` (if that
// is asked for) or in the worker's scratch. worker.y_sum goes along. tokens_before: those that `from` has seen.
template <class T, bool kUpdate, bool kOutput>
void walk(const LinearScan& scan, const Item& item, const Worker& worker, State from, const State& to, int64_t tokens_before,
          double* totals) {
  const int64_t width = scan.y.width, row_stride = scan.layout.row_stride, columns = scan.range_width;
  const State kept = state_of(scan, worker);
  for (int64_t first = item.begin; first < item.end; first += scan.block_tokens) {
    const int64_t tokens = min64(scan.block_tokens, item.end - first);
    if (kUpdate) {
      pack<T>(scan, scan.y, item, first, tokens, true, worker.y, row_stride);
      pack<T>(scan, scan.z, item, first, tokens, false, worker.z, columns);
    }
    if (kOutput) {
      pack<T>(scan, scan.x, item, first, tokens, true, worker.x, row_stride);
      __builtin_memset(worker.out, 0, sizeof(float) * tokens * scan.x.per_head * columns);
    }
    for (int64_t t = 0; t < tokens && scan.row_sums; ++t) {
      if (kUpdate) {
        for (int64_t j = 0; j < scan.y.per_head; ++j)
          add(worker.y_sum, worker.y + (t * scan.y.per_head + j) * row_stride, width);
        ++tokens_before;
      }
      for (int64_t r = t * scan.x.per_head; r < (t + 1) * scan.x.per_head && kOutput; ++r) {
        const float* x = worker.x + r * row_stride;
        worker.row_sums[r] = dot(x, worker.y_sum, width) + x[width] * static_cast<float>(tokens_before);
        if (totals != nullptr && item.first_column == 0) totals[0] += worker.row_sums[r];
      }
    }

    const bool last = first + tokens == item.end;
    const State& next = last && to.rows != nullptr ? to : kept;
    Tile tile = {};
    tile.x = worker.x;
    tile.y = worker.y;
    tile.x_rows = scan.x.per_head;
    tile.y_rows = scan.y.per_head;
    tile.row_stride = row_stride;
    tile.out_stride = columns;
    tile.tokens = tokens;
    tile.z = worker.z;
    tile.out = worker.out;
    int64_t column = 0;
    if constexpr (kUpdate && kOutput) {
      if (tokens == 1 && tile.y_rows == 1 && from.rows != nullptr) {
        column = min64(from.columns, next.columns) / kLanes * kLanes;
        step(tile, from, next, width, column, 4 * scan.batch * scan.kv_heads * width * scan.z.width);
      }
    }
    while (column < columns) {
      tile.z = worker.z + column;
      tile.out = worker.out + column;
      const int64_t vectors = min64((columns - column) / kLanes, kTileVectors);  // a decode step may leave any number
      tile.from_columns = from.columns - column;
      tile.to_columns = next.columns - column;
      if constexpr (kTileVectors == 4) {
        if (vectors == 4) run_rows<4, kUpdate, kOutput>(tile, from, next, width, column);
        if (vectors == 3) run_rows<3, kUpdate, kOutput>(tile, from, next, width, column);
      }
      if (vectors == 2) run_rows<2, kUpdate, kOutput>(tile, from, next, width, column);
      if (vectors == 1) run_rows<1, kUpdate, kOutput>(tile, from, next, width, column);
      column += vectors * kLanes;
    }
    if (kUpdate) from = kept;
    if (kOutput) finish_rows<T>(scan, item, worker, first, tokens, totals);
  }
}

// The item's segment summed up, in the worker's scratch.
template <class T>
void reduce(const LinearScan& scan, const Item& item, const Worker& worker) {
  __builtin_memset(worker.y_sum, 0, sizeof(float) * scan.y.width);
  walk<T, true, false>(scan, item, worker, State{}, State{}, 0, nullptr);
}

// Element i of what each of the unit's workers holds at `first`, for i < n: from the sums of the segments to, when
// causal, the sum before each segment, `initial` included; else to the sum of all, in the first worker.
void combine_row(const LinearScan& scan, float* first, const float* initial, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min64(kLanes, n - i);
    Vec total = initial != nullptr ? load_part(initial + i, lanes) : Vec{};
    for (int64_t segment = 0; segment < scan.segments; ++segment) {
      float* at = first + segment * scan.layout.size + i;
      const bool summed = !scan.causal || segment + 1 < scan.segments;
      const Vec sum_of_segment = summed ? load_part(at, lanes) : Vec{};
      if (scan.causal) store_part(at, total, lanes);
      total = total + sum_of_segment;
    }
    if (!scan.causal) store_part(first + i, total, lanes);
  }
}

void combine(const LinearScan& scan, int64_t unit) {
  const Item item = item_at(scan, unit * scan.segments);
  const Worker worker = worker_at(scan, unit * scan.segments);
  const State kept = state_of(scan, worker);
  const State initial = carried(scan, item, scan.initial_state, scan.initial_z_sum);
  const float* y_sum = scan.initial_y_sum;
  for (int64_t row = 0; row < scan.y.width; ++row)
    combine_row(scan, kept.rows + row * kept.row_stride,
                initial.rows != nullptr ? initial.rows + row * initial.row_stride : nullptr, item.columns);
  combine_row(scan, kept.sums, initial.sums, item.columns);
  combine_row(scan, worker.y_sum, y_sum != nullptr ? y_sum + y_sum_at(scan, item) : nullptr, scan.y.width);
}

template <class T>
void scan_item(const LinearScan& scan, int64_t index, int64_t worker_index) {
  const Item item = item_at(scan, index);
  Worker worker = worker_at(scan, worker_index);
  double* totals = scan.totals != nullptr ? scan.totals + 2 * index : nullptr;
  if (totals != nullptr) totals[0] = totals[1] = 0.0;
  if (!scan.causal) {
    if (scan.segments == 1) reduce<T>(scan, item, worker);
    const Worker holder = worker_at(scan, worker_index - item.segment);  // of the whole sum
    worker.y_sum = holder.y_sum;
    walk<T, false, true>(scan, item, worker, state_of(scan, holder), State{}, scan.tokens, totals);
    return;
  }
  State from = state_of(scan, worker), to = {};
  if (scan.segments == 1) {
    from = carried(scan, item, scan.initial_state, scan.initial_z_sum);
    if (scan.initial_y_sum != nullptr) convert(scan.initial_y_sum + y_sum_at(scan, item), worker.y_sum, scan.y.width);
    else __builtin_memset(worker.y_sum, 0, sizeof(float) * scan.y.width);
  }
  const bool last = item.segment + 1 == scan.segments;
  if (last) to = carried(scan, item, scan.final_state, scan.final_z_sum);
  const int64_t before = scan.initial_count != nullptr ? scan.initial_count[item.batch] : 0;
  walk<T, true, true>(scan, item, worker, from, to, before + item.begin, totals);
  if (last && scan.final_y_sum != nullptr && item.first_column == 0)
    convert(worker.y_sum, scan.final_y_sum + y_sum_at(scan, item), scan.y.width);
}

template <class T>
void run_phase(const LinearScan& scan, ScanPhase phase, int64_t task) {
  if (phase == ScanPhase::kCombine) return combine(scan, task);
  if (phase == ScanPhase::kReduce) {
    const Item item = item_at(scan, task);
    const bool needed = !scan.causal || item.segment + 1 < scan.segments;
    if (needed) reduce<T>(scan, item, worker_at(scan, task));
    return;
  }
  const int64_t items = scan.batch * scan.kv_heads * scan.ranges * scan.segments;
  const int64_t end = items * (task + 1) / scan.workers;  // a run, so that a step's prefetches reach the next state
  for (int64_t index = items * task / scan.workers; index < end; ++index) scan_item<T>(scan, index, task);
}

}  // namespace

void linear_scan(const LinearScan& scan, ScanPhase phase, int64_t task) {
  if (scan.dtype == 0) run_phase<float>(scan, phase, task);
  if (scan.dtype == 1) run_phase<Half>(scan, phase, task);
  if (scan.dtype == 2) run_phase<BFloat16>(scan, phase, task);
}

}  // namespace leanfleet::normalized_linear_attention::LEANFLEET_ISA
