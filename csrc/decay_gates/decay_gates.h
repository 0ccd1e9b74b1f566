// DecayGates as plain structs: the arguments of every kernel.
#pragma once

#include <cstdint>

namespace leanfleet::decay_gates {

// Rows are tokens, tokens of all requests one after the other; those at query_lens[request] or later become 0.
struct Args {
  const void* input;          // T [B,N,H,width], a row `input_pitch` numbers behind the one before
  const float *rate, *bias;   // [H], [H,width]; bias null: 0
  const void* beta_input;     // T [B,N,H], a row beta_pitch numbers behind the one before, or null
  const int32_t* query_lens;  // [B]; null: N
  float *log_decay, *step;    // [B,N,H,width]; step null: not asked for
  float* beta;                // [B,N,H]; null: not asked for
  int32_t dtype;              // DType of T
  int64_t batch, tokens, heads, width, input_pitch, beta_pitch;
  float step_min, step_max, beta_scale;  // step_max: infinity where there is no bound
};

// On CUDA. Returns the cudaError_t of the launch.
int launch(const Args& args, void* stream);

}  // namespace leanfleet::decay_gates
