#include "core/simd.h"
#include "gated_activation/activated.h"
#include "linear/linear.h"

namespace leanfleet::linear::LEANFLEET_ISA {

namespace {

using gated_activation::LEANFLEET_ISA::activated;

constexpr int kRows = 4, kVecs = kLanes == 16 ? 4 : 2;  // of sums in registers
constexpr int kDepth = 4;                               // of the weight's rows that few rows meet together

// sums [kCount,kCpuFewColumns] += input [kCount,kTogether] times kTogether rows of the weight, straight from the weight.
template <class T, int kCount, int kTogether>
void add_weight_rows(const T* weight, int64_t pitch, const float* input, int64_t input_pitch, int64_t columns, float* sums) {
  Vec x[kCount][kTogether];
  for (int r = 0; r < kCount; ++r)
    for (int d = 0; d < kTogether; ++d) x[r][d] = broadcast(input[r * input_pitch + d]);
  const auto add = [&](int64_t c, const Vec(&w)[kTogether]) {
    for (int r = 0; r < kCount; ++r) {
      Vec sum = load(sums + r * kCpuFewColumns + c);
      for (int d = 0; d < kTogether; ++d) sum = fma(x[r][d], w[d], sum);
      store(sums + r * kCpuFewColumns + c, sum);
    }
  };
  Vec w[kTogether];
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    for (int d = 0; d < kTogether; ++d) {
      prefetch(weight + (d + kTogether) * pitch + c);  // its rows lie pages apart
      w[d] = load(weight + d * pitch + c);
    }
    add(c, w);
  }
  if (c == columns) return;
  for (int d = 0; d < kTogether; ++d) w[d] = load_part(weight + d * pitch + c, columns - c);
  add(c, w);
}

template <class T, int kCount>
void add_few(const T* weight, int64_t pitch, const float* input, int64_t input_pitch, int64_t depth, int64_t columns,
             float* sums) {
  int64_t k = 0;
  for (; k + kDepth <= depth; k += kDepth)
    add_weight_rows<T, kCount, kDepth>(weight + k * pitch, pitch, input + k, input_pitch, columns, sums);
  for (; k < depth; ++k) add_weight_rows<T, kCount, 1>(weight + k * pitch, pitch, input + k, input_pitch, columns, sums);
}

// The same of a panel [depth,kCpuColumns] of floats, for kRows rows.
void add_panel(const float* panel, const float* const (&input)[kRows], int64_t depth, int64_t columns,
               float* const (&sums)[kRows]) {
  for (int64_t c = 0; c < columns; c += kVecs * kLanes) {
    Vec sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecs; ++v) sum[r][v] = load(sums[r] + c + v * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
      Vec w[kVecs];
      for (int v = 0; v < kVecs; ++v) w[v] = load(panel + k * kCpuColumns + c + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec x = broadcast(input[r][k]);
        for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(x, w[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecs; ++v) store(sums[r] + c + v * kLanes, sum[r][v]);
  }
}

template <class T>
void add_rows(const T* weight, int64_t pitch, const float* input, int64_t input_pitch, int64_t rows, int64_t depth,
              int64_t columns, float* panel, float* sums) {
  switch (rows) {
    case 1: return add_few<T, 1>(weight, pitch, input, input_pitch, depth, columns, sums);
    case 2: return add_few<T, 2>(weight, pitch, input, input_pitch, depth, columns, sums);
    case 3: return add_few<T, 3>(weight, pitch, input, input_pitch, depth, columns, sums);
    default: break;
  }
  for (int64_t k0 = 0; k0 < depth; k0 += kCpuDepth) {
    const int64_t here = depth - k0 < kCpuDepth ? depth - k0 : kCpuDepth;
    for (int64_t k = 0; k < here; ++k) convert(weight + (k0 + k) * pitch, panel + k * kCpuColumns, columns);
    for (int64_t r = 0; r < rows; r += kRows) {
      // Rows behind the last do what it does, after all others, into sums that nobody reads.
      const float* from[kRows];
      float* to[kRows];
      for (int i = 0; i < kRows; ++i) {
        from[i] = input + (r + i < rows ? r + i : rows - 1) * input_pitch + k0;
        to[i] = sums + (r + i) * kCpuColumns;
      }
      add_panel(panel, from, here, columns, to);
    }
  }
}

template <class T>
void block(const Args& args, const float* input, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
           float* scratch) {
  const T* const weight = static_cast<const T*>(args.weight) + first_column;
  const T* const bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + first_column;
  float *const panel = scratch, *const sums = scratch + kCpuDepth * kCpuColumns;
  constexpr int64_t kPart = kCpuRows * kCpuColumns;  // the columns' sums, and behind the gate's those of the values
  const int64_t sums_pitch = rows <= kCpuFewRows ? kCpuFewColumns : kCpuColumns;
  // Whole vectors read columns, and whole groups of rows write sums, that nobody has.
  const int64_t held = rows <= kCpuFewRows ? rows : (rows + kRows - 1) / kRows * kRows;
  const int64_t whole = (columns + kVecs * kLanes - 1) / (kVecs * kLanes) * (kVecs * kLanes);
  for (int64_t k = 0; k < kCpuDepth && rows > kCpuFewRows; ++k)
    for (int64_t c = columns; c < whole; ++c) panel[k * kCpuColumns + c] = 0.0f;
  for (int part = 0; part < 1 + args.gated; ++part) {
    for (int64_t row = 0; row < held; ++row)
      for (int64_t c = 0; c < whole; c += kLanes) store(sums + part * kPart + row * sums_pitch + c, Vec{});
    add_rows(weight + part * args.width, args.columns, input + first_row * args.depth, args.depth, rows, args.depth, columns,
             panel, sums + part * kPart);
  }
  const auto biased = [&](int part, int64_t row, int64_t c) {
    const Vec sum = load(sums + part * kPart + row * sums_pitch + c);
    return bias == nullptr ? sum : sum + load_part(bias + part * args.width + c, columns - c);
  };
  for (int64_t row = 0; row < rows; ++row) {
    T* const to = static_cast<T*>(args.output) + (first_row + row) * args.width + first_column;
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vec y = biased(0, row, c);
      if (args.gated) y = activated(args.activation, y) * biased(1, row, c);
      store_part(to + c, y, columns - c);
    }
  }
}

}  // namespace

// Rows begin .. end of the input as floats.
void widen(const Args& args, int64_t begin, int64_t end, float* to) {
  const int64_t first = begin * args.depth, count = (end - begin) * args.depth;
  if (args.dtype == 0) convert(static_cast<const float*>(args.input) + first, to + first, count);
  if (args.dtype == 1) convert(static_cast<const Half*>(args.input) + first, to + first, count);
  if (args.dtype == 2) convert(static_cast<const BFloat16*>(args.input) + first, to + first, count);
}

// Some columns of some rows. input: all rows as floats.
void multiply(const Args& args, const float* input, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
              float* scratch) {
  if (args.dtype == 0) block<float>(args, input, first_row, rows, first_column, columns, scratch);
  if (args.dtype == 1) block<Half>(args, input, first_row, rows, first_column, columns, scratch);
  if (args.dtype == 2) block<BFloat16>(args, input, first_row, rows, first_column, columns, scratch);
}

}  // namespace leanfleet::linear::LEANFLEET_ISA
