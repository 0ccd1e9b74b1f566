#include <math.h>

#include <initializer_list>

#include "core/simd.h"
#include "decay_gates/decay_gates.h"

namespace leanfleet::decay_gates::LEANFLEET_ISA {

namespace {

// log(1 + e) is 2 atanh(s) with s = e / (2 + e), at most 1 / 3 here: the series up to s^15 / 15 is off by 2^-29.
Vec softplus(Vec x) {
  const Vec e = exp(select(x > 0.0f, -x, x)), s = e / (e + 2.0f), square = s * s;
  Vec series = broadcast(1.0f / 15);
  for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
    series = fma(series, square, broadcast(term));
  return select((VecInt)(x == x), maximum(x, Vec{}) + 2.0f * s * series, x);
}

// `n` columns with a rate each, or all with the first one.
struct Columns {
  const float *rate, *bias;
  bool one_rate;
  float *log_decay, *step;
};

template <class T>
void gate_columns(const Args& args, const T* input, const Columns& to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec rate = to.one_rate ? broadcast(*to.rate) : load_part(to.rate + i, n - i);
    Vec x = load_part(input + i, n - i);
    if (to.bias != nullptr) x = x + load_part(to.bias + i, n - i);
    Vec step = softplus(x);
    step = select((VecInt)(step < args.step_min), broadcast(args.step_min), step);
    step = select((VecInt)(step > args.step_max), broadcast(args.step_max), step);
    const Vec decay = rate * step, wrong = select((VecInt)(decay == decay), Vec{}, broadcast(-INFINITY));
    store_part(to.log_decay + i, select((VecInt)(decay <= 0.0f), decay, wrong), n - i);
    if (to.step != nullptr) store_part(to.step + i, step, n - i);
  }
}

void zero(float* to, int64_t n) {
  if (to != nullptr) __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(n));
}

template <class T>
void gate_row(const Args& args, int64_t row) {
  const int64_t width = args.heads * args.width, at = row * width, beta_at = row * args.heads;
  float *const log_decay = args.log_decay + at, *const step = args.step == nullptr ? nullptr : args.step + at;
  float* const beta = args.beta == nullptr ? nullptr : args.beta + beta_at;
  if (args.query_lens != nullptr && row % args.tokens >= args.query_lens[row / args.tokens]) {
    zero(log_decay, width), zero(step, width), zero(beta, args.heads);
    return;
  }
  const T* const input = static_cast<const T*>(args.input) + row * args.input_pitch;
  if (args.width == 1) {
    gate_columns(args, input, {args.rate, args.bias, false, log_decay, step}, args.heads);
  } else {
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t first = head * args.width;
      const Columns to = {args.rate + head, args.bias == nullptr ? nullptr : args.bias + first, true, log_decay + first,
                          step == nullptr ? nullptr : step + first};
      gate_columns(args, input + first, to, args.width);
    }
  }
  for (int64_t i = 0; i < args.heads && beta != nullptr; i += kLanes) {
    const Vec x = load_part(static_cast<const T*>(args.beta_input) + row * args.beta_pitch + i, args.heads - i);
    store_part(beta + i, args.beta_scale * sigmoid(x), args.heads - i);
  }
}

template <class T>
void rows_of(const Args& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) gate_row<T>(args, row);
}

}  // namespace

// Rows begin .. end.
void make_gates(const Args& args, int64_t begin, int64_t end) {
  if (args.dtype == 0) rows_of<float>(args, begin, end);
  if (args.dtype == 1) rows_of<Half>(args, begin, end);
  if (args.dtype == 2) rows_of<BFloat16>(args, begin, end);
}

}  // namespace leanfleet::decay_gates::LEANFLEET_ISA
