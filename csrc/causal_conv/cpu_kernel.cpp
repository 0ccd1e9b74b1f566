#include "causal_conv/causal_conv.h"
#include "core/simd.h"

namespace leanfleet::causal_conv::LEANFLEET_ISA {

namespace {

template <class T>
inline void store_some(T* p, Vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T part[kLanes];
  store(part, v);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

// A piece's channels begin .. end, all of one part. kTaps: how many there are, if that is known when this is compiled; else 0.
template <class T, int kTaps>
void sums(const Args& args, const Piece& piece, const Part& part, int64_t begin, int64_t end) {
  const int64_t width = args.channels, pitch = args.pitch, past = kTaps > 0 ? kTaps - 1 : args.past;
  const T* const input = static_cast<const T*>(args.input) + piece.first * pitch;
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const bias = static_cast<const T*>(args.bias);
  const int64_t own = part.end - part.begin;  // channels of a row of the output
  T* const output = static_cast<T*>(part.data) + piece.first * own - part.begin;
  for (int64_t i = piece.from; i < piece.to; ++i) {
    const int64_t missing = past > i ? past - i : 0;  // of the tokens before: they are in the state
    for (int64_t c = begin; c < end; c += kLanes) {
      const int64_t left = end - c;
      Vec sum = bias != nullptr ? load_part(bias + c, left) : Vec{};
      if (piece.state != nullptr) {
        for (int64_t j = 0; j < missing; ++j)
          sum = fma(load_part(weight + j * width + c, left), load_part(piece.state + (i + j) * width + c, left), sum);
      }
      const T* const rows = input + (i - past) * pitch + c;
      if (kTaps > 0 && missing == 0 && left >= kLanes) {
        for (int j = 0; j < kTaps; ++j) sum = fma(load(weight + j * width + c), load(rows + j * pitch), sum);
      } else {
        for (int64_t j = missing; j <= past; ++j)
          sum = fma(load_part(weight + j * width + c, left), load_part(rows + j * pitch, left), sum);
      }
      if (args.activation == Kind::kSilu) sum = sum / (1.0f + exp(-sum));
      store_some(output + i * own + c, sum, left);
    }
  }
}

// The last `past` tokens, those from before the request among them. A row is read before one in front of it is written.
template <class T>
void keep_last(const Args& args, const Piece& piece) {
  const int64_t width = args.channels;
  const T* const input = static_cast<const T*>(args.input) + piece.first * args.pitch;
  for (int64_t s = 0; s < args.past; ++s) {
    const int64_t token = piece.count - args.past + s;
    float* const to = piece.final_state + s * width;
    for (int64_t c = piece.begin; c < piece.end; ++c) {
      if (token >= 0) to[c] = to_float(input[token * args.pitch + c]);
      else to[c] = piece.state != nullptr ? piece.state[(piece.count + s) * width + c] : 0.0f;
    }
  }
}

template <class T>
void typed(const Args& args, const Piece& piece) {
  for (int i = 0; i < args.num_parts; ++i) {
    const Part& part = args.parts[i];
    const int64_t begin = piece.begin > part.begin ? piece.begin : part.begin,
                  end = piece.end < part.end ? piece.end : part.end;
    if (begin >= end) continue;
    if (args.past == 3) sums<T, 4>(args, piece, part, begin, end);
    else sums<T, 0>(args, piece, part, begin, end);
  }
  if (piece.from == 0 && piece.final_state != nullptr) keep_last<T>(args, piece);
}

}  // namespace

void convolve(const Args& args, const Piece& piece) {
  if (args.dtype == 0) typed<float>(args, piece);
  if (args.dtype == 1) typed<Half>(args, piece);
  if (args.dtype == 2) typed<BFloat16>(args, piece);
}

}  // namespace leanfleet::causal_conv::LEANFLEET_ISA
