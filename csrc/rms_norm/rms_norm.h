// RmsNorm as plain structs: the arguments of every kernel.
#pragma once

#include <cstdint>

namespace leanfleet::rms_norm {

// In the order of the schema's values.
enum class Kind : int32_t { kSilu, kSigmoid };

// A unit is a group of columns of a row: [rows, width / group] of them.
struct Args {
  const void* input;    // T [rows,width], rows input_pitch numbers apart
  const float* weight;  // [width]
  const void* addend;   // T [rows,width], or null
  const void* gate;     // T [rows,width], rows gate_pitch numbers apart, or null
  void *output, *sum;   // T [rows,width]; sum null: not asked for
  int32_t dtype;        // DType of T
  Kind activation;
  bool gate_first;
  int64_t rows, width, group, input_pitch, gate_pitch;
  int64_t normed;  // columns, a multiple of group: the others are not divided
  float epsilon;
};

// Sums of squares outside of this are added up again in another way, as float32 has lost something of them. Of a small sum that counts only
// beside an epsilon that is smaller still.
constexpr float kLeastSum = 0x1p-80f, kMostSum = 0x1p127f, kLeastEpsilon = 0x1p-40f;

// On CUDA. Returns the cudaError_t of the launch.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::rms_norm
