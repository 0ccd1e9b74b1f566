#include <math.h>

#include "core/simd.h"
#include "rms_norm/rms_norm.h"

namespace leanfleet::rms_norm::LEANFLEET_ISA {

namespace {

// A unit's first columns. addend, gate, sum: null where there is none.
template <class T>
struct Unit {
  const T *input, *addend, *gate;
  const float* weight;
  T *output, *sum;
};

template <class T>
Unit<T> unit_at(const Args& args, int64_t index) {
  const int64_t groups = args.width / args.group, row = index / groups, first = (index - row * groups) * args.group;
  const int64_t at = row * args.width + first;
  const auto rows_at = [at](const void* rows) { return rows == nullptr ? nullptr : static_cast<const T*>(rows) + at; };
  Unit<T> unit;
  unit.input = static_cast<const T*>(args.input) + row * args.input_pitch + first;
  unit.addend = rows_at(args.addend);
  unit.gate = args.gate == nullptr ? nullptr : static_cast<const T*>(args.gate) + row * args.gate_pitch + first;
  unit.weight = args.weight + first;
  unit.output = static_cast<T*>(args.output) + at;
  unit.sum = args.sum == nullptr ? nullptr : static_cast<T*>(args.sum) + at;
  return unit;
}

template <class T>
Vec gate_at(const Args& args, const Unit<T>& unit, int64_t i) {
  const Vec gate = load_part(unit.gate + i, args.group - i);
  return args.activation == Kind::kSigmoid ? sigmoid(gate) : gate / (1.0f + exp(-gate));
}

// The columns from i on that are normalised, as many as a vector has and the unit has left; 0 behind them.
template <class T>
Vec columns_at(const Args& args, const Unit<T>& unit, int64_t i) {
  const int64_t left = args.group - i;
  Vec x = load_part(unit.input + i, left);
  if (unit.addend != nullptr) {
    T rounded[kLanes];
    store(rounded, x + load_part(unit.addend + i, left));
    x = load(rounded);
  }
  return args.gate_first ? x * gate_at(args, unit, i) : x;
}

// What columns are multiplied with, weights apart.
template <class T>
float factor_of(const Args& args, const Unit<T>& unit) {
  const float count = static_cast<float>(args.group);
  Vec squares = {};
  for (int64_t i = 0; i < args.group; i += kLanes) {
    const Vec x = columns_at(args, unit, i);
    squares = fma(x, x, squares);
  }
  const float total = sum(squares);
  if (total <= kMostSum && (total >= kLeastSum || args.epsilon >= kLeastEpsilon))
    return 1.0f / sqrtf(total / count + args.epsilon);
  double exact = 0.0;
  for (int64_t i = 0; i < args.group; i += kLanes) {
    const Vec x = columns_at(args, unit, i);
    for (int lane = 0; lane < kLanes; ++lane) exact += static_cast<double>(x[lane]) * x[lane];
  }
  return static_cast<float>(1.0 / sqrt(exact / count + args.epsilon));
}

template <class T>
void units_of(const Args& args, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Unit<T> unit = unit_at<T>(args, index);
    const bool divided = unit.weight - args.weight < args.normed;
    const float factor = divided ? factor_of(args, unit) : 1.0f;
    const bool gate_last = unit.gate != nullptr && !args.gate_first;
    for (int64_t i = 0; i < args.group; i += kLanes) {
      const int64_t left = args.group - i;
      Vec y = columns_at(args, unit, i) * factor * load_part(unit.weight + i, left);
      if (gate_last) y = y * gate_at(args, unit, i);
      store_part(unit.output + i, y, left);
      if (unit.sum != nullptr)
        store_part(unit.sum + i, load_part(unit.input + i, left) + load_part(unit.addend + i, left), left);
    }
  }
}

}  // namespace

// Units begin .. end.
void normalize(const Args& args, int64_t begin, int64_t end) {
  if (args.dtype == 0) units_of<float>(args, begin, end);
  if (args.dtype == 1) units_of<Half>(args, begin, end);
  if (args.dtype == 2) units_of<BFloat16>(args, begin, end);
}

}  // namespace leanfleet::rms_norm::LEANFLEET_ISA
