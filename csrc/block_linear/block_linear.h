// BlockLinear as plain structs: the arguments of every kernel.
#pragma once

#include <cstdint>

namespace leanfleet::block_linear {

// What the weights are made of.
enum class Form : int32_t { kInt8, kInt4, kFloat8, kOfT };

// On CUDA: how tiles of rows meet panels of outputs (panels.cu).
struct Panels {
  int32_t row_fragments, warps;  // a tile has 8 rows each, a panel 16 outputs each
  int32_t row_tiles, panels;
  int32_t split, groups;  // parts of the columns, and how many groups of them a part has
  int64_t partial;        // bytes of scratch for the parts' sums
};

struct Args {
  const void* input;                        // T [rows,width]
  const void* weight;                       // [outputs,width] of `form`
  const void *scale, *shift;                // of scale_dtype and shift_dtype [outputs,blocks]; shift may be null
  const void* bias;                         // T [outputs], or null
  void* output;                             // T [rows,outputs]
  int32_t dtype, scale_dtype, shift_dtype;  // DType
  Form form;
  bool round_input;
  int64_t rows, width, outputs, blocks, block;  // block = width / blocks

  // On a CPU. Integers are multiplied by chunks: a block, or a part of one. 0: numbers become floats.
  int32_t chunk;
  int64_t pitch;          // of `rounded`
  int8_t* rounded;        // [rows,pitch], 0 behind the width
  float *steps, *sums;    // [rows,width / chunk]: of a chunk of `rounded`, and the sum of the floats that it stands for
  float* floats;          // [rows,width] without chunks: the input, rounded if it has to be
  bool integer_products;  // the processor adds up products of bytes itself (AVX512_VNNI)

  // On CUDA.
  void* rounded_input;  // T [rows,width], where round_input is on
  void* partial;        // of panels.partial bytes
  Panels panels;
};

constexpr float kLargestInteger = 127.0f;
constexpr float kLeastMagnitude = 0x1p-100f;  // a block of smaller numbers is 0
constexpr int64_t kPitch = 64;                // `rounded` has rows of a multiple of it

// On CUDA. How a call is multiplied: in few rows, panels or tiles. It depends on addresses too, of which those that are null are
// right for anything. Launches return a cudaError_t.
enum class Way { kNothing, kRows, kPanels, kTiles };
Way way_of(const Args& args);
int launch(const Args& args, void* stream);

bool takes_panels(const Args& args);
Panels plan_panels(const Args& args, int sms, int64_t forced_split);  // forced_split: 0, or as many parts
// follows: the launch before it on the stream lets it begin early.
int launch_panels(const Args& args, bool follows, void* stream);

}  // namespace leanfleet::block_linear
