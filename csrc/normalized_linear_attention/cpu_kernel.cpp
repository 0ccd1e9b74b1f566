#include "core/simd.h"
#include "normalized_linear_attention.h"

namespace leanfleet::LEANFLEET_ISA {

namespace {

constexpr float kUnitRowEps = 1e-12f;  // lower bound of the norm that kUnit divides by
constexpr int kTileRows = 4;
// Vectors across a tile of S; a tile, a row of z and one of out stay in registers.
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// g as it divides: |g| held at eps or more, the sign of 0 is plus.
float held(float g, float eps) { return __builtin_fabsf(g) >= eps ? g : g < 0.0f ? -eps : eps; }

// A piece of S outside scratch or in it. `sums` is the extra row. Null: zeros, or not to be stored.
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

int64_t offset_of(const TokenStrides& strides, int64_t batch, int64_t head, int64_t token) {
  return batch * strides.batch + head * strides.head + token * strides.token;
}

float dot(const float* a, const float* b, int64_t n) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total = fma(load(a + i), load(b + i), total);
  float rest = 0.0f;
  for (; i < n; ++i) rest += a[i] * b[i];
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

// The sum of a[i] * b[i], converted from T.
template <class T>
float dot_converted(const T* a, const T* b, int64_t n) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total = fma(load(a + i), load(b + i), total);
  float rest = 0.0f;
  for (; i < n; ++i) rest += to_float(a[i]) * to_float(b[i]);
  return sum(total) + rest;
}

template <class T>
float norm_of(const T* row, int64_t n) {
  const float norm = __builtin_sqrtf(dot_converted(row, row, n));
  return norm > kUnitRowEps ? norm : kUnitRowEps;
}

// Columns first .. first + count of one row to out, as floats; returns the extra element.
template <class T>
float pack_row(const LinearScan& scan, const ScanRows& rows, int64_t batch, int64_t head, int64_t token, int64_t first,
               int64_t count, float* out) {
  const int64_t at = offset_of(rows.strides, batch, head, token);
  const T* row = static_cast<const T*>(rows.data) + at;
  convert(row + first, out, count);
  if (rows.kind == RowKind::kWeighted) {
    const float g = rows.normalizer[offset_of(rows.normalizer_strides, batch, head, token)];
    const float factor = 1.0f / held(g, scan.eps);
    scale(out, factor, count);
    if (__builtin_fabsf(g) < scan.eps) return 0.0f;
    return -factor * dot_converted(row, static_cast<const T*>(rows.output) + at, rows.width);
  }
  const float factor = rows.kind == RowKind::kUnit ? rows.scale / norm_of(row, rows.width) : rows.scale;
  if (factor != 1.0f) scale(out, factor, count);
  return rows.extra;
}

// Tokens first .. first + tokens in the scan's direction to out [tokens * per_head, row_stride]: whole rows and the
// extra element (of x and y), or the item's columns and zeros up to row_stride (of z).
template <class T>
void pack(const LinearScan& scan, const ScanRows& rows, const Item& item, int64_t first, int64_t tokens, bool whole,
          float* out, int64_t row_stride) {
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
  int64_t x_rows, y_rows;         // per token
  int64_t row_stride, out_stride;  // of x and y; of z and out
  int64_t tokens;
  const float* from;  // S before the first token; null: 0
  float* to;          // S after the last token; null: not needed
  int64_t from_stride, to_stride, columns;  // columns that from and to have
};

// One tile of S, R rows by C vectors, through a block of tokens: S += y z, out += x S.
template <int R, int C, bool kUpdate, bool kOutput>
void run_tile(const Tile& tile) {
  Vec s[R][C];
  const bool whole = tile.columns >= C * kLanes;
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      s[r][c] = Vec{};
      if (tile.from == nullptr) continue;
      const float* from = tile.from + r * tile.from_stride + c * kLanes;
      if (whole) {
        s[r][c] = load(from);
      } else {
        float part[kLanes] = {};
        for (int64_t i = 0; i < kLanes && c * kLanes + i < tile.columns; ++i) part[i] = from[i];
        s[r][c] = load(part);
      }
    }
  }
  const float *x = tile.x, *y = tile.y, *z = tile.z;
  float* out = tile.out;
  for (int64_t t = 0; t < tile.tokens; ++t) {
    if (kUpdate) {
      for (int64_t j = 0; j < tile.y_rows; ++j, y += tile.row_stride, z += tile.out_stride) {
        Vec row[C];
        for (int c = 0; c < C; ++c) row[c] = load(z + c * kLanes);
        for (int r = 0; r < R; ++r) {
          const Vec factor = broadcast(y[r]);
          for (int c = 0; c < C; ++c) s[r][c] = fma(factor, row[c], s[r][c]);
        }
      }
    }
    if (kOutput) {
      for (int64_t j = 0; j < tile.x_rows; ++j, x += tile.row_stride, out += tile.out_stride) {
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
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float* to = tile.to + r * tile.to_stride + c * kLanes;
      if (whole) {
        store(to, s[r][c]);
      } else {
        for (int64_t i = 0; i < kLanes && c * kLanes + i < tile.columns; ++i) to[i] = s[r][c][i];
      }
    }
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
        if (item.first_column == 0)
          scan.normalizer[offset_of(scan.normalizer_strides, item.batch, head, token)] = *row_sum;
      }
      if (scan.source.data != nullptr) {
        pack_row<T>(scan, scan.source, item.batch, head, token, item.first_column, item.columns, worker.source);
        const float along = dot(worker.source, out, item.columns);
        if (totals != nullptr) totals[1] += along;
        if (scan.source.kind == RowKind::kUnit) {
          const T* row = static_cast<const T*>(scan.source.data) +
                         offset_of(scan.source.strides, item.batch, head, token);
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
void walk(const LinearScan& scan, const Item& item, const Worker& worker, State from, const State& to,
          int64_t tokens_before, double* totals) {
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
    for (int64_t column = 0; column < columns;) {
      const int64_t vectors = min64((columns - column) / kLanes, kTileVectors);
      tile.z = worker.z + column;
      tile.out = worker.out + column;
      tile.columns = min64(from.rows != nullptr ? from.columns : columns, next.columns) - column;
      if constexpr (kTileVectors == 4) {
        if (vectors == 4) run_rows<4, kUpdate, kOutput>(tile, from, next, width, column);
        if (vectors == 3) run_rows<3, kUpdate, kOutput>(tile, from, next, width, column);
        if (vectors == 1) run_rows<1, kUpdate, kOutput>(tile, from, next, width, column);
      }
      if (vectors == 2) run_rows<2, kUpdate, kOutput>(tile, from, next, width, column);
      column += vectors * kLanes;
    }
    if (kUpdate) from = kept;
    if (kOutput) finish_rows<T>(scan, item, worker, first, tokens, totals);
  }
}
