// Linear as plain structs: the arguments of every kernel, and which of them run.
#pragma once

#include <cstdint>

#include "gated_activation/gated_activation.h"

namespace leanfleet::linear {

using Kind = gated_activation::Kind;

struct Args {
  const void* input;   // T [rows,depth]
  const void* weight;  // T [depth,columns]: with `gated` the gate's columns, and behind them those of the values
  const void* bias;    // T [columns], or null
  void* output;        // T [rows,width]
  int32_t dtype;       // DType of T
  Kind activation;
  bool gated, constant_weight;
  int64_t rows, depth, columns, width;  // columns: width, or twice as many
};

// On the CPU: the most columns and rows that are worked out together, and how much of the depth a panel of the weight has. A worker's
// scratch holds the panel and the sums.
constexpr int64_t kCpuColumns = 256, kCpuRows = 64, kCpuDepth = 128;
constexpr int64_t kCpuFewRows = 3, kCpuFewColumns = 4096;  // rows that meet the weight itself, and the most columns then
static_assert(kCpuFewRows * kCpuFewColumns <= kCpuRows * kCpuColumns, "they share the sums' memory");
static_assert(kCpuColumns % 64 == 0 && kCpuFewColumns % 64 == 0, "vectors that are read together are 64 columns or fewer");
constexpr int64_t kCpuScratch = kCpuDepth * kCpuColumns + 2 * kCpuRows * kCpuColumns;  // floats

// Few rows: reading the weight is what takes the time, and each CTA streams a range of it. A range is a run of units of 8,192
// numbers; the units of a tile, 64 output columns, follow each other.
constexpr int kFewRows = 16;  // of more, cuBLAS has been as fast or faster: bench/kernels/linear.py
constexpr int kUnitBytes = 16384;
struct FewRows {
  int32_t units_of_tile, tiles, ctas;
  int32_t rows;           // held: 8 or 16
  int64_t partial_bytes;  // of sums of tiles that ranges share
};
FewRows plan_few_rows(const Args& args, int sm_count);

enum class Way { kFewRows, kCublas, kPlain };
// Of shapes and types alone. compute_capability: 90 for 9.0.
Way way_of(const Args& args, int compute_capability, bool has_cublas);

// On CUDA. Returns the cudaError_t of the launch. partial and tickets (zero, and left so): of a plan's sizes. runs_few_rows: whether
// the current device, of 9.0, has code for it.
bool runs_few_rows();
int launch_few_rows(const Args& args, const FewRows& plan, void* partial, uint32_t* tickets, void* stream);
// output T [rows,columns], whatever `gated` says.
int launch_plain(const Args& args, void* output, void* stream);

}  // namespace leanfleet::linear
