// GatedActivation as plain structs: the arguments of every kernel.
#pragma once

#include <cstdint>

namespace leanfleet::gated_activation {

// In the order of the schema's values.
enum class Kind : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kSigmoid };

struct Args {
  const void *gate, *up;  // T [rows,width], rows `gate_pitch` and `up_pitch` elements apart
  const void* skip;       // T [rows,width], or null
  const float* scales;    // [heads] of skip, each of width / heads columns in a row
  void* output;           // T [rows,width]
  int32_t dtype;          // DType of T
  Kind activation;
  int64_t rows, width, gate_pitch, up_pitch, heads;  // heads: 1 without skip
};

constexpr float kSqrtHalf = 0.707106781f;
constexpr float kTanhScale = 1.595769122f, kTanhCube = 0.044715f;  // 2 sqrt(2 / pi): tanh(u) = 2 / (1 + exp(-2 u)) - 1

// On CUDA. Returns the cudaError_t of the launch.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::gated_activation
