#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "sample_tokens/arithmetic.h"
#include "sample_tokens/sample_tokens.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::sample_tokens {

LEANFLEET_CPU_FUNCTION(void, prepare,
                       (const Args& args, const RowWork& work, int64_t row, int64_t piece, int64_t begin, int64_t end))
LEANFLEET_CPU_FUNCTION(void, weigh,
                       (const Args& args, const RowWork& work, int64_t row, int64_t piece, int64_t begin, int64_t end,
                        float top, float raw_top))
LEANFLEET_CPU_FUNCTION(int64_t, collect, (const Args& args, const RowWork& work, int64_t row, float top, int32_t bin))
LEANFLEET_CPU_FUNCTION(void, top_places, (const Args& args, int64_t row, uint64_t* places))
LEANFLEET_CPU_FUNCTION(float, logit, (const Args& args, int64_t row, int64_t token))

namespace {

using exact::Settings;

constexpr int64_t kMinPieceTokens = 16384;  // a shorter piece is sooner done than shared out

Args make_args(const Call& call) {
  const auto input = [&](Input i) -> const Tensor& { return call.inputs[i]; };
  Args args = {};
  args.logits = input(kLogits).data;
  args.dtype = static_cast<int32_t>(input(kLogits).dtype);
  args.batch = call.dims[kDimB];
  args.vocabulary = call.dims[kDimV];
  args.temperature = input(kTemperature).as<const float>();
  args.top_k = input(kTopK).as<const int32_t>();
  args.top_p = input(kTopP).as<const float>();
  args.min_p = input(kMinP).as<const float>();
  args.seed = input(kSeed).as<const int64_t>();
  args.position = input(kPosition).as<const int32_t>();
  args.token_counts = input(kTokenCounts).as<const int32_t>();
  args.count_index = input(kCountIndex).as<const int32_t>();
  args.count_rows = input(kTokenCounts).present() ? input(kTokenCounts).shape[0] : 0;
  args.repetition_penalty = input(kRepetitionPenalty).as<const float>();
  args.presence_penalty = input(kPresencePenalty).as<const float>();
  args.frequency_penalty = input(kFrequencyPenalty).as<const float>();
  args.logit_bias = input(kLogitBias).as<const float>();
  args.allowed_tokens = input(kAllowedTokens).as<const int32_t>();
  args.allowed_words = ceil_div(args.vocabulary, kWordTokens);
  args.active = input(kActive).as<const int32_t>();
  args.tokens = call.outputs[kOutTokens].as<int64_t>();
  args.logprob = call.outputs[kOutLogprob].as<float>();
  args.top_logprobs = call.outputs[kOutTopLogprobs].as<float>();
  args.top_tokens = call.outputs[kOutTopTokens].as<int64_t>();
  args.token_counts_out = call.outputs[kOutTokenCountsOut].as<int32_t>();
  args.num_logprobs = call.attrs[kAttrNumLogprobs].i;
  args.samples = input(kTemperature).present();
  args.wants_logprob = call.attrs[kAttrLogprob].i != 0 || args.num_logprobs > 0;
  return args;
}

Status check(const Call& call) {
  const int64_t vocabulary = call.dims[kDimV], words = ceil_div(vocabulary, kWordTokens);
  if (call.inputs[kAllowedTokens].present() && call.dims[kDimW] != words)
    return call.invalid("allowed_tokens has W = " + std::to_string(call.dims[kDimW]) + " words of 32 tokens; logits give V = " +
                        std::to_string(vocabulary) + ", which takes " + std::to_string(words));
  const int64_t wanted = call.attrs[kAttrNumLogprobs].i, most = std::min(vocabulary, kMaxLogprobs);
  if (wanted > most)
    return call.invalid("attribute num_logprobs is " + std::to_string(wanted) + "; expected at most " + std::to_string(most) +
                        (most < kMaxLogprobs ? ", because logits give V = " + std::to_string(vocabulary) : ""));
  return {};
}

bool takes_part(const Call& call, int64_t request) {
  return !call.inputs[kActive].present() || call.inputs[kActive].as<const int32_t>()[request] != 0;
}

// Refuses the first value of an input [B], of requests that take part, for which `right` does not hold.
template <class T, class F>
Status check_each(const Call& call, Input input, const char* expected, F&& right) {
  const Tensor& tensor = call.inputs[input];
  if (!tensor.present()) return {};
  for (int64_t b = 0; b < tensor.elements(); ++b) {
    const T value = tensor.as<const T>()[b];
    if (takes_part(call, b) && !right(value))
      return call.invalid(std::string(call.spec->inputs[input].name) + "[" + std::to_string(b) + "] is " +
                          std::to_string(value) + "; expected " + expected);
  }
  return {};
}

Status check_count_index(const Call& call) {
  const Tensor& index = call.inputs[kCountIndex];
  if (!index.present()) return {};
  const auto rows = static_cast<int32_t>(call.inputs[kTokenCounts].shape[0]);
  std::vector<int64_t> owner(static_cast<size_t>(rows), -1);
  for (int64_t b = 0; b < index.elements(); ++b) {
    const int32_t row = index.as<const int32_t>()[b];
    const std::string found = "count_index[" + std::to_string(b) + "] is " + std::to_string(row);
    if (row < 0 || row >= rows) return call.invalid(found + "; token_counts has rows 0 to " + std::to_string(rows - 1));
    if (owner[row] >= 0)
      return call.invalid(found + ", as count_index[" + std::to_string(owner[row]) + "] is; a row serves one request");
    owner[row] = b;
  }
  return {};
}

Status check_allowed(const Call& call) {
  const Tensor& allowed = call.inputs[kAllowedTokens];
  if (!allowed.present()) return {};
  const int64_t words = allowed.shape[1], vocabulary = call.dims[kDimV];
  for (int64_t b = 0; b < allowed.shape[0]; ++b) {
    if (!takes_part(call, b)) continue;
    uint32_t some = 0;
    for (int64_t w = 0; w < words; ++w) {
      const int64_t left = vocabulary - w * kWordTokens;
      some |= static_cast<uint32_t>(allowed.as<const int32_t>()[b * words + w]) & (left < 32 ? (1u << left) - 1 : ~0u);
    }
    if (some == 0) return call.invalid("allowed_tokens[" + std::to_string(b) + "] allows no token; expected at least one bit");
  }
  return {};
}

Status check_values(const Call& call, bool strict) {
  if (!strict) return {};
  const auto not_negative = [](auto x) { return x >= 0; };
  const auto is_finite = [](float x) { return std::isfinite(x); };
  LEANFLEET_RETURN_IF_ERROR(
      check_each<float>(call, kTemperature, "0 or more", [](float x) { return x >= 0 && std::isfinite(x); }));
  LEANFLEET_RETURN_IF_ERROR(check_each<int32_t>(call, kTopK, "0 (all) or more", not_negative));
  LEANFLEET_RETURN_IF_ERROR(check_each<float>(call, kTopP, "above 0, at most 1", [](float x) { return x > 0 && x <= 1; }));
  LEANFLEET_RETURN_IF_ERROR(check_each<float>(call, kMinP, "0 to 1", [](float x) { return x >= 0 && x <= 1; }));
  LEANFLEET_RETURN_IF_ERROR(check_each<int32_t>(call, kPosition, "0 or more", not_negative));
  LEANFLEET_RETURN_IF_ERROR(check_each<float>(call, kRepetitionPenalty, "a finite number above 0",
                                              [](float x) { return x > 0 && std::isfinite(x); }));
  LEANFLEET_RETURN_IF_ERROR(check_each<float>(call, kPresencePenalty, "a finite number", is_finite));
  LEANFLEET_RETURN_IF_ERROR(check_each<float>(call, kFrequencyPenalty, "a finite number", is_finite));
  LEANFLEET_RETURN_IF_ERROR(check_count_index(call));
  return check_allowed(call);
}

// ---- The choice of a row's token, once its weights are known

// Where the running sum, of weights or of tokens, reaches a target: the place of that token, and the weights up to it.
struct Cut {
  uint64_t place;
  int64_t mass;
};

class Choice {
 public:
  Choice(const Args& args, const RowWork& work, int64_t row, float top) : args_(args), work_(work), row_(row), top_(top) {}

  int64_t token(const Settings& settings) {
    int64_t mass = 0, tokens = 0;
    for (int bin = 0; bin < kBins; ++bin) mass += work_.mass[bin], tokens += work_.count[bin];
    if (settings.top_k > 0 && settings.top_k < tokens) mass = cut_at(settings.top_k, true).mass;
    if (settings.top_p > 0) mass = cut_at(std::max<int64_t>(exact::fraction_of(mass, settings.top_p), 1), false).mass;
    const exact::Random random =
        exact::philox(static_cast<uint64_t>(args_.seed[row_]), static_cast<uint32_t>(args_.position[row_]));
    return static_cast<int64_t>(cut_at(exact::part_of(mass, random) + 1, false).place & 0xffffffffu);
  }

 private:
  Cut cut_at(int64_t target, bool of_tokens) {
    int64_t mass = 0;
    int bin = 0;
    for (;; ++bin) {
      const int64_t step = of_tokens ? work_.count[bin] : work_.mass[bin];
      if (step >= target || bin == kBins - 1) break;
      target -= step;
      mass += work_.mass[bin];
    }
    if (bin != bin_) {
      bin_ = bin;
      found_ = select_collect()(args_, work_, row_, top_, bin);
      std::sort(work_.candidates, work_.candidates + found_);
    }
    Cut cut = {0, mass};
    for (int64_t i = 0; i < found_ && target > 0; ++i) {
      const int64_t weight = work_.weights[work_.candidates[i] & 0xffffffffu];
      cut = {work_.candidates[i], cut.mass + weight};
      target -= of_tokens ? 1 : weight;
    }
    return cut;
  }

  const Args& args_;
  const RowWork& work_;
  const int64_t row_;
  const float top_;
  int bin_ = -1;  // whose tokens the candidates are, in order
  int64_t found_ = 0;
};

void write_nothing(const Args& args, int64_t row) {
  args.tokens[row] = -1;
  if (args.logprob != nullptr) args.logprob[row] = exact::not_a_number();
  std::fill_n(args.top_logprobs + row * args.num_logprobs, args.num_logprobs, exact::not_a_number());
  std::fill_n(args.top_tokens + row * args.num_logprobs, args.num_logprobs, int64_t{-1});
}

// ---- Rows and pieces

struct Pieces {
  int64_t count, tokens;  // of a row, of a piece

  int64_t begin(int64_t piece) const { return piece * tokens; }
  int64_t end(int64_t piece, int64_t vocabulary) const { return std::min(vocabulary, begin(piece) + tokens); }
};

// The pieces' results together, in the first of them.
Piece joined(const RowWork& work, int64_t pieces) {
  Piece all = work.pieces[0];
  for (int64_t i = 1; i < pieces; ++i) {
    const Piece& piece = work.pieces[i];
    if (piece.top > all.top) all.top = piece.top, all.first = piece.first;
    all.raw_top = std::max(all.raw_top, piece.raw_top);
    all.raw_nan |= piece.raw_nan;
    all.raw_sum += piece.raw_sum;
  }
  return all;
}

class RowTask {
 public:
  RowTask(const Args& args, const RowWork& work, const Pieces& pieces, int64_t row)
      : args_(args), work_(work), pieces_(pieces), row_(row), settings_(exact::settings_of(args, row)) {}

  void prepare(int64_t piece) const {
    if (!settings_.active) return;
    select_prepare()(args_, work_, row_, piece, pieces_.begin(piece), pieces_.end(piece, args_.vocabulary));
  }

  void weigh(int64_t piece) const {
    if (!settings_.active || (settings_.greedy && !args_.wants_logprob)) return;
    const auto [top, raw_top] = tops();
    select_weigh()(args_, work_, row_, piece, pieces_.begin(piece), pieces_.end(piece, args_.vocabulary), top, raw_top);
  }

  void choose() const {
    if (!settings_.active) return write_nothing(args_, row_);
    const Piece all = joined(work_, pieces_.count);
    int64_t token = all.first;
    if (all.top == exact::minus_infinity()) {
      token = -1;
    } else if (!settings_.greedy) {
      for (int64_t piece = 1; piece < pieces_.count; ++piece) {
        for (int bin = 0; bin < kBins; ++bin) {
          work_.mass[bin] += work_.mass[piece * kBins + bin];
          work_.count[bin] += work_.count[piece * kBins + bin];
        }
      }
      token = Choice(args_, work_, row_, all.top).token(settings_);
    }
    args_.tokens[row_] = token;
    if (args_.wants_logprob) write_logprobs(all, token);
  }

 private:
  // Read of all pieces by each: joined() would also read sums that others are writing.
  std::pair<float, float> tops() const {
    float top = work_.pieces[0].top, raw_top = work_.pieces[0].raw_top;
    for (int64_t i = 1; i < pieces_.count; ++i) {
      top = std::max(top, work_.pieces[i].top);
      raw_top = std::max(raw_top, work_.pieces[i].raw_top);
    }
    return {top, raw_top};
  }

  void write_logprobs(const Piece& all, int64_t token) const {
    const bool none = all.raw_nan || !exact::finite(all.raw_top);
    const auto log_sum = static_cast<float>(std::log(all.raw_sum));
    const auto logprob_of = [&](float logit) {
      return none ? exact::not_a_number() : (logit == all.raw_top ? 0.0f : logit - all.raw_top) - log_sum;
    };
    if (args_.logprob != nullptr)
      args_.logprob[row_] = token < 0 ? exact::not_a_number() : logprob_of(select_logit()(args_, row_, token));
    if (args_.num_logprobs == 0) return;
    uint64_t places[kMaxLogprobs];
    select_top_places()(args_, row_, places);
    for (int64_t i = 0; i < args_.num_logprobs; ++i) {
      const auto top = static_cast<int64_t>(places[i] & 0xffffffffu);
      args_.top_tokens[row_ * args_.num_logprobs + i] = top;
      args_.top_logprobs[row_ * args_.num_logprobs + i] = logprob_of(exact::value_at(places[i]));
    }
  }

  const Args& args_;
  const RowWork& work_;
  const Pieces pieces_;
  const int64_t row_;
  const Settings settings_;
};

void copy_counts(const Args& args, Threads& threads) {
  if (args.token_counts_out == nullptr || args.token_counts_out == args.token_counts) return;
  parallel_for(threads, args.count_rows, [&](int64_t row) {
    std::copy_n(args.token_counts + row * args.vocabulary, args.vocabulary, args.token_counts_out + row * args.vocabulary);
  });
}

// Once all rows are done: what they see are the counts before the call.
void count_tokens(const Args& args) {
  if (args.token_counts_out == nullptr) return;
  for (int64_t row = 0; row < args.batch; ++row) {
    const int64_t at = exact::settings_of(args, row).count_row;
    if (at < 0 || args.tokens[row] < 0) continue;
    int32_t& count = args.token_counts_out[at * args.vocabulary + args.tokens[row]];
    count = exact::counted(count);
  }
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  const Args args = make_args(call);
  const int64_t threads = target.threads->count(), V = args.vocabulary;
  // A row at a time for each thread; the pieces of rows where there are fewer rows.
  const int64_t slots = std::min(args.batch, threads);
  const int64_t most = std::max<int64_t>(1, std::min(threads / slots, V / kMinPieceTokens));
  const int64_t piece_tokens = round_up(ceil_div(V, most), int64_t{1024});
  const Pieces pieces = {ceil_div(V, piece_tokens), piece_tokens};

  const bool changes =
      call.inputs[kLogitBias].present() || call.inputs[kAllowedTokens].present() || call.inputs[kTokenCounts].present();
  float* x = ws.scratch<float>(changes ? slots * V : 0);
  int32_t* weights = ws.scratch<int32_t>(args.samples ? slots * V : 0);
  uint64_t* candidates = ws.scratch<uint64_t>(args.samples ? slots * V : 0);
  int64_t* mass = ws.scratch<int64_t>(args.samples ? slots * pieces.count * kBins : 0);
  uint32_t* count = ws.scratch<uint32_t>(args.samples ? slots * pieces.count * kBins : 0);
  Piece* results = ws.scratch<Piece>(slots * pieces.count);
  if (ws.counting()) return {};

  copy_counts(args, *target.threads);
  const auto work_of = [&](int64_t slot) {
    const int64_t piece = slot * pieces.count;
    return RowWork{x + slot * V * changes,
                   weights + slot * V * args.samples,
                   mass + piece * kBins * args.samples,
                   count + piece * kBins * args.samples,
                   candidates + slot * V * args.samples,
                   results + piece};
  };
  for (int64_t first = 0; first < args.batch; first += slots) {
    const int64_t rows = std::min(slots, args.batch - first);
    const auto each_piece = [&](auto&& step) {
      parallel_for(*target.threads, rows * pieces.count, [&](int64_t i) {
        const RowWork work = work_of(i / pieces.count);
        step(RowTask(args, work, pieces, first + i / pieces.count), i % pieces.count);
      });
    };
    if (pieces.count == 1) {
      each_piece([](const RowTask& task, int64_t piece) {
        task.prepare(piece);
        task.weigh(piece);
        task.choose();
      });
      continue;
    }
    each_piece([](const RowTask& task, int64_t piece) { task.prepare(piece); });
    if (args.samples || args.wants_logprob) each_piece([](const RowTask& task, int64_t piece) { task.weigh(piece); });
    parallel_for(*target.threads, rows, [&](int64_t i) {
      const RowWork work = work_of(i);
      RowTask(args, work, pieces, first + i).choose();
    });
  }
  count_tokens(args);
  return {};
}

#ifdef LEANFLEET_CUDA
Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  return cuda_status(call, "launch of the SampleTokens kernel", launch(make_args(call), target, ws));
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::sample_tokens
