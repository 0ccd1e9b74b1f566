// CausalConv: from tensors and attributes to Args, and how the CPU cuts the work.
#include <algorithm>
#include <cstring>
#include <string>

#include "causal_conv/causal_conv.h"
#include "core/columns.h"
#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "core/requests.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::causal_conv {

LEANFLEET_CPU_FUNCTION(void, convolve, (const Args& args, const Piece& piece))

namespace {

constexpr int64_t kPieceTokens = 64, kPieceChannels = 256;  // of the CPU's pieces: what they read stays in the first cache
constexpr double kMinWorkerCost = 1 << 16;                  // multiplications that are worth another thread

Status check_sizes(const Call& call) {
  if (call.attrs[kAttrColumns].i != 0)
    LEANFLEET_RETURN_IF_ERROR(check_columns(call, "input", call.attrs[kAttrFirstColumn].i, call.dims[kDimC], call.dims[kDimW]));
  if (call.attrs[kAttrSplit].i == 0) return {};
  const int64_t channels = call.dims[kDimC],
                sizes[kMostParts] = {call.attrs[kAttrFirst].i, call.attrs[kAttrSecond].i, call.attrs[kAttrThird].i};
  int64_t left = channels;
  bool right = true;
  for (const int64_t size : sizes) right = right && size >= 1 && size <= left, left -= size;
  if (right && left == 0) return {};
  return call.invalid("split is 1, and first, second and third are " + std::to_string(sizes[0]) + ", " +
                      std::to_string(sizes[1]) + " and " + std::to_string(sizes[2]) +
                      "; expected three times 1 or more channels that add up to C = " + std::to_string(channels));
}

Status check_values(const Call& call, bool strict) {
  if (!strict) return {};
  const Tensor &offsets = call.inputs[kCuSeqlens], &lens = call.inputs[kQueryLens];
  if (offsets.present()) LEANFLEET_RETURN_IF_ERROR(check_cu_seqlens(call, offsets, call.dims[kDimN]));
  if (lens.present()) LEANFLEET_RETURN_IF_ERROR(check_query_lens(call, lens, call.dims[kDimN]));
  if (call.inputs[kStateIndex].present()) return check_state_index(call, call.inputs[kStateIndex], call.dims[kDimP], offsets);
  return {};
}

Args make_args(const Call& call) {
  Args args = {};
  args.weight = call.inputs[kWeight].data;
  args.bias = call.inputs[kBias].data;
  args.initial_state = call.inputs[kInitialState].as<const float>();
  args.query_lens = call.inputs[kQueryLens].as<const int32_t>();
  args.cu_seqlens = call.inputs[kCuSeqlens].as<const int32_t>();
  args.state_index = call.inputs[kStateIndex].as<const int32_t>();
  args.channels = call.dims[kDimC];
  args.pitch = call.inputs[kInput].shape[2];
  args.input = columns_of(call.inputs[kInput], call.attrs[kAttrFirstColumn].i);
  const bool split = call.attrs[kAttrSplit].i != 0;
  args.num_parts = split ? kMostParts : 1;
  const int outputs[kMostParts] = {kOutOutput, kOutOutput2, kOutOutput3};
  const int64_t sizes[kMostParts] = {split ? call.attrs[kAttrFirst].i : args.channels, call.attrs[kAttrSecond].i,
                                     call.attrs[kAttrThird].i};
  for (int64_t i = 0, begin = 0; i < args.num_parts; begin += sizes[i++])
    args.parts[i] = {call.outputs[outputs[i]].data, begin, begin + sizes[i]};
  args.final_state = call.outputs[kOutFinalState].as<float>();
  args.dtype = static_cast<int32_t>(call.inputs[kInput].dtype);
  args.activation = static_cast<Kind>(call.attrs[kAttrActivation].i);
  args.batch = call.dims[kDimB];
  args.requests = call.inputs[kCuSeqlens].present() ? call.inputs[kCuSeqlens].shape[0] - 1 : args.batch;
  args.tokens = call.dims[kDimN];
  args.past = call.dims[kDimK];
  args.state_rows = call.inputs[kStateIndex].present() ? call.dims[kDimP] : args.requests;
  return args;
}

RequestTokens own_tokens(const Args& args, int64_t request) {
  RequestTokens own = tokens_of(args.cu_seqlens, request, args.tokens);
  if (args.query_lens != nullptr) own.end = std::clamp<int64_t>(args.query_lens[request], 0, args.tokens);
  return own;
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  int64_t* const begins = ws.scratch<int64_t>(args.requests + 1);  // number of each request's first piece
  const bool pool = call.inputs[kStateIndex].present();
  uint8_t* const named = ws.scratch<uint8_t>(pool ? args.state_rows : 0);
  if (ws.counting()) return {};

  const int64_t row_floats = args.past * args.channels;
  if (pool) {
    name_pool_rows(args.state_index, args.requests, args.state_rows, named);
    keep_other_rows(*target.threads, call.inputs[kInitialState], call.outputs[kOutFinalState], named);
  }
  if (args.cu_seqlens != nullptr && !covers_all_tokens(args.cu_seqlens, args.requests, args.tokens))
    for (int output : {kOutOutput, kOutOutput2, kOutOutput3})
      if (call.outputs[output].present()) zero(call.outputs[output]);
  const int64_t piece_tokens = std::max(kPieceTokens, args.past), strips = ceil_div(args.channels, kPieceChannels);
  begins[0] = 0;
  for (int64_t q = 0; q < args.requests; ++q) {
    const RequestTokens own = own_tokens(args, q);
    begins[q + 1] = begins[q] + std::max<int64_t>(1, ceil_div(own.end - own.begin, piece_tokens));
    for (int i = 0; i < args.num_parts && args.query_lens != nullptr; ++i) {
      const Part& part = args.parts[i];
      const auto row_bytes = static_cast<size_t>((part.end - part.begin) * element_size(call.inputs[kInput].dtype));
      std::memset(static_cast<char*>(part.data) + static_cast<size_t>(q * args.tokens + own.end) * row_bytes, 0,
                  static_cast<size_t>(args.tokens - own.end) * row_bytes);
    }
  }
  const int64_t items = begins[args.requests] * strips;
  if (items == 0) return {};
  const double cost = double(args.batch * args.tokens) * double(args.channels * (args.past + 1));
  const int64_t threads = target.threads->count();
  const int64_t workers = std::clamp<int64_t>(static_cast<int64_t>(cost / kMinWorkerCost), 1, std::min(threads, items));
  const auto kernel = select_convolve();
  run_items(*target.threads, items, workers, [&](int64_t index, int64_t) {
    const int64_t number = index / strips, strip = index % strips;
    const int64_t q = std::upper_bound(begins, begins + args.requests + 1, number) - begins - 1;
    const RequestTokens own = own_tokens(args, q);
    const int64_t row = args.state_index != nullptr ? args.state_index[q] : q;
    const bool has_row = row >= 0 && row < args.state_rows;
    Piece piece = {};
    piece.first = args.cu_seqlens != nullptr ? own.begin : q * args.tokens;
    piece.count = own.end - own.begin;
    piece.from = (number - begins[q]) * piece_tokens;
    piece.to = std::min(piece.count, piece.from + piece_tokens);
    piece.begin = strip * kPieceChannels;
    piece.end = std::min(args.channels, piece.begin + kPieceChannels);
    if (has_row && args.initial_state != nullptr) piece.state = args.initial_state + row * row_floats;
    if (has_row && args.final_state != nullptr) piece.final_state = args.final_state + row * row_floats;
    kernel(args, piece);
  });
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  if (blocks(args) > kMaxAxis)
    return call.unsupported("there are requests x C = " + std::to_string(args.requests * args.channels) +
                            " channels in B x N = " + std::to_string(args.batch * args.tokens) +
                            " tokens; on CUDA they make less than 2^31 CTAs, larger calls run on the CPU");
  if (ws.counting()) return {};
  return cuda_status(call, "launching the convolution", launch(args, target));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check_sizes, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::causal_conv
