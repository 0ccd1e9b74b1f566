// Attention over all keys from that over parts of them, by the logarithms of their softmax sums: MergeAttention's equation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op.h"

namespace leanfleet::merge_parts {

// Logits that join the softmax's sum of rows with any keys and have no value: sinks[row / inner % heads], or null.
struct Sinks {
  const float* logits = nullptr;
  int64_t heads = 1, inner = 1;
};

struct Args {
  const void* partial_output;  // T [parts,rows,width]
  const float* partial_lse;    // [parts,rows]
  void* output;                // T [rows,width]
  float* lse;                  // [rows]
  int32_t dtype;               // DType of T
  int64_t parts, rows, width;
  Sinks sinks;
};

// Rows begin .. end, on the CPU.
LEANFLEET_CPU_FUNCTION(void, merge, (const Args& args, int64_t begin, int64_t end))

// All rows, on the CPU.
inline void run(const Args& args, Threads& threads) {
  constexpr int64_t kPiece = 16384;  // numbers read: fewer are sooner done than shared out
  const auto kernel = select_merge();
  const int64_t rows_of_piece = std::max<int64_t>(1, kPiece / (args.parts * args.width));
  parallel_for(threads, ceil_div(args.rows, rows_of_piece),
               [&](int64_t piece) { kernel(args, piece * rows_of_piece, std::min(args.rows, (piece + 1) * rows_of_piece)); });
}

// On CUDA. Returns the cudaError_t of the launch.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::merge_parts
