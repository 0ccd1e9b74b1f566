#include "core/simd.h"
#include "gated_activation/activated.h"
#include "linear/linear.h"

namespace leanfleet::linear::LEANFLEET_ISA {

namespace {

using gated_activation::LEANFLEET_ISA::activated;

constexpr int kRows = 4, kVecs = 2;

// kRows rows of kVecs vectors of columns: of the values, and with a gate of the gate too.
struct Sums {
  Vec of[kRows][kVecs] = {};
};

// left: columns that are there.
template <class T>
void add_products(const T* weight, int64_t pitch, const float* input, int64_t depth, int rows, int64_t left, Sums& sums) {
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = input + (r < rows ? r : 0) * depth;
  for (int64_t k = 0; k < depth; ++k) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      if (left >= (v + 1) * kLanes) w[v] = load(weight + k * pitch + v * kLanes);
      else if (left > v * kLanes) w[v] = load_part(weight + k * pitch + v * kLanes, left - v * kLanes);
      else w[v] = Vec{};
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec x = broadcast(row[r][k]);
      for (int v = 0; v < kVecs; ++v) sums.of[r][v] = fma(x, w[v], sums.of[r][v]);
    }
  }
}

template <class T>
void add_bias(const T* bias, int64_t left, Sums& sums) {
  for (int v = 0; v < kVecs && v * kLanes < left; ++v) {
    const Vec x = load_part(bias + v * kLanes, left - v * kLanes);
    for (int r = 0; r < kRows; ++r) sums.of[r][v] = sums.of[r][v] + x;
  }
}

template <class T>
void block(const Args& args, const float* input, int64_t first_row, int64_t rows, int64_t column) {
  const T* const weight = static_cast<const T*>(args.weight) + column;
  const T* const bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + column;
  const int64_t left = args.width - column;
  for (int64_t r = 0; r < rows; r += kRows) {
    const int count = rows - r < kRows ? static_cast<int>(rows - r) : kRows;
    const float* const from = input + (first_row + r) * args.depth;
    Sums sums[2];  // of the columns, and of those behind the gate
    for (int part = 0; part < 1 + args.gated; ++part) {
      add_products(weight + part * args.width, args.columns, from, args.depth, count, left, sums[part]);
      if (bias != nullptr) add_bias(bias + part * args.width, left, sums[part]);
    }
    for (int i = 0; i < count; ++i) {
      T* const to = static_cast<T*>(args.output) + (first_row + r + i) * args.width + column;
      for (int v = 0; v < kVecs && v * kLanes < left; ++v) {
        Vec y = sums[0].of[i][v];
        if (args.gated) y = activated(args.activation, y) * sums[1].of[i][v];
        store_part(to + v * kLanes, y, left - v * kLanes);
      }
    }
  }
}

}  // namespace

int64_t columns_together() { return kVecs * kLanes; }

// Rows begin .. end of the input as floats.
void widen(const Args& args, int64_t begin, int64_t end, float* to) {
  const int64_t first = begin * args.depth, count = (end - begin) * args.depth;
  if (args.dtype == 0) convert(static_cast<const float*>(args.input) + first, to + first, count);
  if (args.dtype == 1) convert(static_cast<const Half*>(args.input) + first, to + first, count);
  if (args.dtype == 2) convert(static_cast<const BFloat16*>(args.input) + first, to + first, count);
}

// columns_together() columns of some rows. input: all rows as floats.
void multiply(const Args& args, const float* input, int64_t first_row, int64_t rows, int64_t first_column) {
  if (args.dtype == 0) block<float>(args, input, first_row, rows, first_column);
  if (args.dtype == 1) block<Half>(args, input, first_row, rows, first_column);
  if (args.dtype == 2) block<BFloat16>(args, input, first_row, rows, first_column);
}

}  // namespace leanfleet::linear::LEANFLEET_ISA
