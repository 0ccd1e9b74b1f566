// A row's tokens are shared by the CTAs of a cluster (one CTA before sm_90). Every pass goes over the row again, which stays
// in shared memory as far as it fits: the largest x; sums of weights by bin; the tokens of up to three bins, in which top_k,
// top_p and the random number end. Only integers are added up, so that no order of CTAs and threads shows in a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>

#include "core/cuda_target.h"
#include "core/workspace.h"
#include "sample_tokens/arithmetic.h"
#include "sample_tokens/device.cuh"

namespace leanfleet::sample_tokens {

namespace {

using exact::Settings;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kBinsOfThread = kBins / kThreads;
constexpr int kListTokens = 2048;  // of a bin that is searched in a list; of a longer one the row is read instead
constexpr int kDigits = 256;
constexpr int kAtOnce = 4;  // chunks that a thread loads before it looks at them
// Most tokens weigh little. Those below 2^kHeadExponent of the largest weight are added up in registers, as one bin behind
// all others; atomics on shared memory take longer than all else. It is divided into its bins where a search ends in it.
constexpr float kHeadExponent = -12.0f;
constexpr int kTailBin = kBins - 1;
static_assert(exact::kWeightBits * 64 < kTailBin, "a bin of its own");
constexpr uint64_t kNoPlace = ~uint64_t{0};
constexpr int kSharedBytes = 112 << 10;  // two CTAs fit on an SM of 227 KiB

// What a CTA found in its part of a row.
struct Part {
  uint64_t place;  // of the largest x
  double raw_sum;  // of exp(logit - largest logit)
  float raw_top;
  uint32_t raw_nan;
};

// What the first CTA of a row asks the others to do.
struct Request {
  int32_t bin;      // whose tokens are listed; -1: nothing is left to do
  uint32_t listed;  // tokens in the list
};

struct Buffers {
  Part* parts;        // [B,clusters]
  Request* requests;  // [B]
  uint64_t* list;     // [B,kListTokens]
  uint64_t* tops;     // [B,clusters,num_logprobs]
};

// Sums of 64 bits as two words, which shared memory adds to faster than to one.
struct Sums {
  uint32_t *low, *high, *count;

  __device__ void add(int at, uint32_t weight) const {
    const uint32_t before = atomicAdd(low + at, weight);
    if (before + weight < before) atomicAdd(high + at, 1u);
    atomicAdd(count + at, 1u);
  }
  __device__ void add(int at, uint64_t weight, uint32_t tokens) const {
    const auto word = static_cast<uint32_t>(weight), before = atomicAdd(low + at, word);
    const auto carried = static_cast<uint32_t>(weight >> 32) + (before + word < before ? 1u : 0u);
    if (carried != 0) atomicAdd(high + at, carried);
    atomicAdd(count + at, tokens);
  }
  __device__ uint64_t mass(int at) const { return uint64_t{high[at]} << 32 | low[at]; }
};

// The head of a CTA's shared memory; kBins of sums, the list and the row's chunks follow.
struct Shared {
  uint64_t words[kWarps], more[kWarps];
  double sums[kWarps];
  float floats[kWarps];
  uint32_t flags[kWarps];
  uint32_t digit_low[kDigits], digit_high[kDigits], digit_count[kDigits];
  Part all;                      // of the whole row
  uint64_t target, mass, place;  // what a search found
  int32_t digit;
  uint32_t count;
};
constexpr int kHeadBytes = (sizeof(Shared) + 15) / 16 * 16;
constexpr int kBinBytes = 3 * kBins * 4, kListBytes = kListTokens * 8;
static_assert(kListBytes >= 3 * 4 * kBins / 2, "the shares of merged bins do not fit where the list is");

__device__ uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Reductions over a CTA; all threads get the result. `shared`: [kWarps].
template <class T, class F>
__device__ T block_reduce(T x, T* shared, F&& join) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = join(x, shuffle_xor(x, offset));
  sync_block();  // what was in it has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  sync_block();
  x = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) x = join(x, shared[warp]);
  return x;
}

// Sums of a and b over the threads before this one; *all_a, *all_b: over all threads.
__device__ void block_scan(uint64_t* a, uint64_t* b, Shared& shared, uint64_t* all_a, uint64_t* all_b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum_a = *a, sum_b = *b;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other_a = shuffle_up(sum_a, offset), other_b = shuffle_up(sum_b, offset);
    if (lane >= offset) sum_a += other_a, sum_b += other_b;
  }
  sync_block();
  if (lane == 31) shared.words[warp] = sum_a, shared.more[warp] = sum_b;
  sync_block();
  sum_a -= *a, sum_b -= *b;
  *all_a = *all_b = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) sum_a += *all_a, sum_b += *all_b;
    *all_a += shared.words[i], *all_b += shared.more[i];
  }
  *a = sum_a, *b = sum_b;
}

// The part of a row that a CTA reads, in chunks of 16 bytes: chunk `slot` of thread t is t + (rank + slot * CTAs) * kThreads.
template <class T>
struct Row {
  static constexpr int kChunk = 16 / sizeof(T);
  const T* logits;
  uint4* cache;  // [cached,kThreads]
  uint32_t tokens, chunks;
  int rank, ctas, slots, cached;
  bool aligned;

  __device__ uint32_t chunk_of(int slot) const {
    return threadIdx.x + (static_cast<uint32_t>(rank) + static_cast<uint32_t>(slot) * ctas) * kThreads;
  }

  // -inf behind the last token.
  __device__ uint4 read(uint32_t chunk) const {
    const uint32_t first = chunk * kChunk;
    if (aligned && first + kChunk <= tokens) return load_16_bytes(logits + first);
    union {
      uint4 words;
      T values[kChunk];
    } x;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      x.values[i] = first + i < tokens ? logits[first + i] : static_cast<T>(exact::minus_infinity());
    return x.words;
  }

  // Calls visit(logit, token) for this thread's tokens, by index. `first`: they are not in the cache yet.
  template <class F>
  __device__ void each(bool first, F&& visit) const {
    for (int slot = 0; slot < slots; slot += kAtOnce) {
      uint4 read_words[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t chunk = chunk_of(slot + k);
        if (slot + k >= slots || chunk >= chunks) continue;
        if (!first && slot + k < cached) read_words[k] = cache[(slot + k) * kThreads + threadIdx.x];
        else read_words[k] = read(chunk);
        if (first && slot + k < cached) cache[(slot + k) * kThreads + threadIdx.x] = read_words[k];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t chunk = chunk_of(slot + k);
        if (slot + k >= slots || chunk >= chunks) continue;
        union {
          uint4 words;
          T values[kChunk];
        } x;
        x.words = read_words[k];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) visit(static_cast<float>(x.values[i]), chunk * kChunk + i);
      }
    }
  }

  // The same for all tokens of the row, whichever CTA has them.
  template <class F>
  __device__ void each_of_all(F&& visit) const {
    for (uint32_t token = threadIdx.x; token < tokens; token += kThreads) visit(static_cast<float>(logits[token]), token);
  }
};

// How a row's x become weights.
struct Weigher {
  Settings settings;
  uint32_t tokens;
  bool changes;
  float top;

  __device__ float changed(float logit, uint32_t token) const {
    return changes && token < tokens ? exact::changed(settings, logit, token) : logit;
  }
  __device__ float exponent(float x) const { return exact::exponent_of(x, top, settings.scale); }
  __device__ uint32_t weight(float x) const {
    const int32_t weight = exact::weight_of(exponent(x));
    return weight >= settings.least_weight ? static_cast<uint32_t>(weight) : 0u;
  }
  // Whether a token is one of a bin's.
  __device__ bool belongs(float x, int32_t bin) const {
    const float e = exponent(x);
    return e >= exact::kLeastExponent && exact::bin_of(e) == bin && weight(x) > 0;
  }
};

__device__ uint64_t shifted(uint64_t x, int by) { return by >= 64 ? 0 : x >> by; }

// Where the running sum, of weights or of tokens, of some tokens in their order reaches a target.
struct Cut {
  uint64_t place, mass;
};

// The cut among the tokens that each(visit) goes over, which calls visit(place, weight): the place's digits one by one, from
// the highest bit in which the places differ.
template <class F>
__device__ Cut search(Shared& shared, uint64_t target, bool of_tokens, uint64_t mass, F&& each) {
  uint64_t least = kNoPlace, most = 0;
  each([&](uint64_t place, uint32_t) {
    least = smaller(least, place);
    most = place > most ? place : most;
  });
  least = block_reduce(least, shared.words, smaller);
  most = block_reduce(most, shared.more, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  const Sums digits = {shared.digit_low, shared.digit_high, shared.digit_count};
  const uint64_t differ = least ^ most;
  int end = differ == 0 ? 8 : 64 - __clzll(static_cast<long long>(differ));
  if (end < 8) end = 8;
  uint64_t prefix = shifted(least, end);
  for (;;) {
    const int shift = end > 8 ? end - 8 : 0;
    const uint64_t mask = (uint64_t{1} << (end - shift)) - 1;
    for (int i = threadIdx.x; i < kDigits; i += kThreads) digits.low[i] = digits.high[i] = digits.count[i] = 0;
    sync_block();
    each([&](uint64_t place, uint32_t weight) {
      if (shifted(place, end) == prefix) digits.add(static_cast<int>(place >> shift & mask), weight);
    });
    sync_block();
    const auto mine = static_cast<int>(threadIdx.x);
    const uint64_t weights = mine < kDigits ? digits.mass(mine) : 0, tokens = mine < kDigits ? digits.count[mine] : 0;
    uint64_t weights_before = weights, tokens_before = tokens, all_weights, all_tokens;
    block_scan(&weights_before, &tokens_before, shared, &all_weights, &all_tokens);
    const uint64_t before = of_tokens ? tokens_before : weights_before, step = of_tokens ? tokens : weights;
    if (before < target && target <= before + step) {
      shared.digit = mine;
      shared.count = static_cast<uint32_t>(tokens);
      shared.target = target - before;
      shared.mass = mass + weights_before;
    }
    sync_block();
    const uint64_t found = prefix << (end - shift) | static_cast<uint64_t>(shared.digit);
    const bool alone = shared.count <= 1;
    target = shared.target, mass = shared.mass;
    sync_block();
    if (alone || shift == 0) {
      each([&](uint64_t place, uint32_t weight) {
        if (shifted(place, shift) == found) shared.place = place, shared.mass = mass + weight;
      });
      sync_block();
      return {shared.place, shared.mass};
    }
    prefix = found;
    end = shift;
  }
}

// Sums of weights by bin over the CTAs of a row, in those of the first.
__device__ void merge_bins(const Sums& bins, uint32_t* share, int rank, int ctas) {
  sync_row(ctas);
  if (ctas == 1) return;
  const int width = kBins / ctas;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const int bin = rank * width + i;
    uint64_t mass = 0;
    uint32_t count = 0;
    for (int cta = 0; cta < ctas; ++cta) {
      mass += uint64_t{load_of_cta(bins.high + bin, cta)} << 32 | load_of_cta(bins.low + bin, cta);
      count += load_of_cta(bins.count + bin, cta);
    }
    share[i] = static_cast<uint32_t>(mass);
    share[width + i] = static_cast<uint32_t>(mass >> 32);
    share[2 * width + i] = count;
  }
  sync_row(ctas);
  if (rank == 0) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      const int cta = bin / width, i = bin % width;
      bins.low[bin] = load_of_cta(share + i, cta);
      bins.high[bin] = load_of_cta(share + width + i, cta);
      bins.count[bin] = load_of_cta(share + 2 * width + i, cta);
    }
  }
  sync_row(ctas);  // the shares have been read, and the list may take their place
}

// Puts this CTA's tokens of the tail into their bins. Functions of their own: what goes over the row has all registers.
template <class T>
__device__ __noinline__ void add_tail(Row<T> row, Weigher weigher, Sums bins) {
  row.each(false, [&](float logit, uint32_t token) {
    const float e = weigher.exponent(weigher.changed(logit, token));
    if (!(e >= exact::kLeastExponent) || e > kHeadExponent) return;
    const int32_t weight = exact::weight_of(e);
    if (weight >= weigher.settings.least_weight) bins.add(exact::bin_of(e), static_cast<uint32_t>(weight));
  });
}

// Lists this CTA's tokens of a bin.
template <class T>
__device__ __noinline__ void list_bin(Row<T> row, Weigher weigher, int32_t bin, Request* request, uint64_t* listed) {
  row.each(false, [&](float logit, uint32_t token) {
    const float x = weigher.changed(logit, token);
    if (!weigher.belongs(x, bin)) return;
    const uint32_t at = atomicAdd(&request->listed, 1u);
    if (at < kListTokens) listed[at] = exact::place_of(x, token);
  });
}

// The choice of a token, by the first CTA of a row; the others list tokens for it.
enum Step : int { kTopK, kTopP, kDraw, kDone };

template <class T>
__device__ __noinline__ int64_t draw(const Args& args, const Buffers& buffers, Row<T> row, Weigher weigher, int64_t request_row,
                                     Sums bins, uint64_t* list, Shared& shared) {
  const Settings& settings = weigher.settings;
  Request* const request = buffers.requests + request_row;
  uint64_t* const listed = buffers.list + request_row * kListTokens;
  const bool leads = row.rank == 0;

  const auto first_bin = static_cast<int>(threadIdx.x) * kBinsOfThread;
  uint64_t mass = 0, tokens = 0, mass_before = 0, tokens_before = 0;
  const auto add_up = [&] {
    mass_before = tokens_before = 0;
    for (int bin = first_bin; bin < first_bin + kBinsOfThread; ++bin) {
      mass_before += bins.mass(bin);
      tokens_before += bins.count[bin];
    }
    uint64_t all;
    block_scan(&mass_before, &tokens_before, shared, &all, &tokens);
    return all;
  };
  if (leads) mass = add_up();

  int step = kTopK, listed_bin = -1;
  uint64_t place = 0;
  for (;;) {
    if (leads) {
      int wanted_bin = -1;
      while (step != kDone) {
        if (step == kTopK && (settings.top_k == 0 || static_cast<uint64_t>(settings.top_k) >= tokens)) step = kTopP;
        if (step == kTopP && settings.top_p == 0) step = kDraw;
        uint64_t target = static_cast<uint64_t>(settings.top_k);
        if (step == kTopP) {
          target = static_cast<uint64_t>(exact::fraction_of(static_cast<int64_t>(mass), settings.top_p));
          if (target < 1) target = 1;
        } else if (step == kDraw) {
          const exact::Random random =
              exact::philox(static_cast<uint64_t>(args.seed[request_row]), static_cast<uint32_t>(args.position[request_row]));
          target = static_cast<uint64_t>(exact::part_of(static_cast<int64_t>(mass), random)) + 1;
        }
        // The bin, and what is before it.
        const bool of_tokens = step == kTopK;
        uint64_t m = mass_before, n = tokens_before;
        sync_block();
        for (int bin = first_bin; bin < first_bin + kBinsOfThread; ++bin) {
          const uint64_t weights = bins.mass(bin), before = of_tokens ? n : m;
          if (before < target && target <= before + (of_tokens ? bins.count[bin] : weights)) {
            shared.digit = bin;
            shared.count = bins.count[bin];
            shared.target = target - before;
            shared.mass = m;
          }
          m += weights;
          n += bins.count[bin];
        }
        sync_block();
        const int32_t bin = shared.digit;
        const uint32_t count = shared.count;
        target = shared.target;
        const uint64_t before = shared.mass;
        sync_block();
        Cut cut;
        if (bin == kTailBin) {
          wanted_bin = bin;
          break;
        } else if (count > kListTokens) {
          cut = search(shared, target, of_tokens, before, [&](auto&& visit) {
            row.each_of_all([&](float logit, uint32_t token) {
              const float x = weigher.changed(logit, token);
              if (weigher.belongs(x, bin)) visit(exact::place_of(x, token), weigher.weight(x));
            });
          });
        } else if (bin != listed_bin) {
          wanted_bin = bin;
          break;
        } else {
          cut = search(shared, target, of_tokens, before, [&](auto&& visit) {
            for (uint32_t i = threadIdx.x; i < count; i += kThreads) visit(list[i], weigher.weight(exact::value_at(list[i])));
          });
        }
        mass = cut.mass;
        place = cut.place;
        ++step;
      }
      if (threadIdx.x == 0) *request = {wanted_bin, 0};
    }
    sync_row(row.ctas);
    const int32_t bin = load_shared_by_ctas(&request->bin);
    if (bin < 0) return static_cast<int64_t>(place & 0xffffffffu);
    if (bin == kTailBin) {
      for (int i = threadIdx.x; i < 3 * kBins; i += kThreads)
        if (!leads || i % kBins == kTailBin) bins.low[i] = 0;  // the three arrays stand behind each other
      sync_block();
      add_tail(row, weigher, bins);
      merge_bins(bins, reinterpret_cast<uint32_t*>(list), row.rank, row.ctas);
      if (leads) add_up();
      listed_bin = -1;
      continue;
    }
    list_bin(row, weigher, bin, request, listed);
    sync_row(row.ctas);
    if (leads) {
      const uint32_t count = load_shared_by_ctas(&request->listed);
      for (uint32_t i = threadIdx.x; i < count && i < kListTokens; i += kThreads) list[i] = load_shared_by_ctas(listed + i);
      sync_block();
      listed_bin = bin;
    }
  }
}

__device__ float logprob_of(const Part& all, float logit) {
  if (all.raw_nan != 0 || all.raw_top == exact::minus_infinity()) return exact::not_a_number();
  return (logit == all.raw_top ? 0.0f : logit - all.raw_top) - logf(static_cast<float>(all.raw_sum));
}

// The most likely tokens of the logits as they are: of each CTA, and then of the row.
template <class T>
__device__ __noinline__ void write_tops(const Args& args, const Buffers& buffers, Row<T> row, int64_t request_row,
                                        Shared& shared) {
  const auto wanted = static_cast<int>(args.num_logprobs);
  uint64_t* const tops = buffers.tops + request_row * row.ctas * wanted;
  const auto next = [&](uint64_t after, bool any) {
    uint64_t best = kNoPlace;
    row.each(false, [&](float logit, uint32_t token) {
      const float x = logit == logit ? logit : exact::minus_infinity();
      const uint64_t place = exact::place_of(x, token);
      if (token < row.tokens && (any || place > after)) best = smaller(best, place);
    });
    return best;
  };
  uint64_t mine = next(0, true);
  for (int i = 0; i < wanted; ++i) {
    const uint64_t best = block_reduce(mine, shared.words, smaller);
    if (threadIdx.x == 0) tops[row.rank * wanted + i] = best;
    if (mine == best && best != kNoPlace) mine = next(best, false);
  }
  sync_row(row.ctas);
  if (row.rank != 0) return;
  const int count = row.ctas * wanted;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t place = load_shared_by_ctas(tops + i);
    if (place == kNoPlace) continue;
    int rank = 0;
    for (int k = 0; k < count; ++k) rank += load_shared_by_ctas(tops + k) < place;
    if (rank >= wanted) continue;
    args.top_tokens[request_row * wanted + rank] = static_cast<int64_t>(place & 0xffffffffu);
    args.top_logprobs[request_row * wanted + rank] = logprob_of(shared.all, exact::value_at(place));
  }
}

// Writes the parts of a row's CTAs and joins them in every CTA's shared memory.
__device__ void join_parts(const Part& mine, const Buffers& buffers, int64_t request_row, int rank, int ctas, Shared& shared) {
  Part* const parts = buffers.parts + request_row * ctas;
  if (threadIdx.x == 0) parts[rank] = mine;
  sync_row(ctas);
  if (threadIdx.x == 0) {
    Part all = {kNoPlace, 0.0, exact::minus_infinity(), 0};
    for (int i = 0; i < ctas; ++i) {
      all.place = smaller(all.place, load_shared_by_ctas(&parts[i].place));
      all.raw_sum += load_shared_by_ctas(&parts[i].raw_sum);
      all.raw_top = fmaxf(all.raw_top, load_shared_by_ctas(&parts[i].raw_top));
      all.raw_nan |= load_shared_by_ctas(&parts[i].raw_nan);
    }
    shared.all = all;
  }
  sync_row(ctas);  // who writes parts next has them read
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    SampleKernel(const __grid_constant__ Args args, const __grid_constant__ Buffers buffers, int ctas, int cached,
                 bool aligned) {
  unsigned char* const memory = dynamic_shared_memory();
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t request_row = blockIdx.x / ctas;
  const Settings settings = exact::settings_of(args, request_row);
  const bool leads = blockIdx.x % ctas == 0;
  if (!settings.active) {
    if (!leads) return;
    if (threadIdx.x == 0) args.tokens[request_row] = -1;
    if (threadIdx.x == 0 && args.logprob != nullptr) args.logprob[request_row] = exact::not_a_number();
    for (int64_t i = threadIdx.x; i < args.num_logprobs; i += kThreads) {
      args.top_logprobs[request_row * args.num_logprobs + i] = exact::not_a_number();
      args.top_tokens[request_row * args.num_logprobs + i] = -1;
    }
    return;
  }
  auto* const words = reinterpret_cast<uint32_t*>(memory + kHeadBytes);
  const Sums bins = {words, words + kBins, words + 2 * kBins};
  auto* const list = reinterpret_cast<uint64_t*>(memory + kHeadBytes + kBinBytes);
  Row<T> row;
  row.logits = static_cast<const T*>(args.logits) + request_row * args.vocabulary;
  row.cache = reinterpret_cast<uint4*>(memory + kHeadBytes + (args.samples ? kBinBytes + kListBytes : 0));
  row.tokens = static_cast<uint32_t>(args.vocabulary);
  row.chunks = (row.tokens + Row<T>::kChunk - 1) / Row<T>::kChunk;
  row.rank = static_cast<int>(blockIdx.x % ctas);
  row.ctas = ctas;
  row.slots =
      static_cast<int>((row.chunks + static_cast<int64_t>(ctas) * kThreads - 1) / (static_cast<int64_t>(ctas) * kThreads));
  row.cached = cached;
  row.aligned = aligned;
  Weigher weigher = {settings, row.tokens, settings.changes(), 0.0f};

  // The largest x, the lowest index where several are.
  Part part = {kNoPlace, 0.0, exact::minus_infinity(), 0};
  float best = exact::minus_infinity();
  uint32_t best_token = 0xffffffffu;
  row.each(true, [&](float logit, uint32_t token) {
    const float x = weigher.changed(logit, token);
    if (x > best) best = x, best_token = token;
    if (args.wants_logprob) {
      if (logit > part.raw_top) part.raw_top = logit;
      part.raw_nan |= logit != logit;
    }
  });
  part.place = block_reduce(exact::place_of(best, best_token), shared.words, smaller);
  if (args.wants_logprob) {
    part.raw_top = block_reduce(part.raw_top, shared.floats, [](float a, float b) { return fmaxf(a, b); });
    part.raw_nan = block_reduce(part.raw_nan, shared.flags, [](uint32_t a, uint32_t b) { return a | b; });
  }
  join_parts(part, buffers, request_row, row.rank, ctas, shared);
  weigher.top = exact::value_at(shared.all.place);
  const bool possible = weigher.top > exact::minus_infinity();
  const bool draws = possible && !settings.greedy;
  int64_t token = possible ? static_cast<int64_t>(shared.all.place & 0xffffffffu) : -1;

  if (draws) {
    for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) words[i] = 0;
    sync_block();
  }
  if (draws || args.wants_logprob) {
    const float raw_top = shared.all.raw_top;
    float raw_sum = 0.0f;
    uint64_t tail_mass = 0;
    uint32_t tail_tokens = 0;
    row.each(false, [&](float logit, uint32_t at) {
      if (args.wants_logprob) raw_sum += logit == raw_top ? 1.0f : __expf(logit - raw_top);
      if (!draws) return;
      const float e = weigher.exponent(weigher.changed(logit, at));
      if (!(e >= exact::kLeastExponent)) return;
      const int32_t weight = exact::weight_of(e);
      if (weight < settings.least_weight) return;
      if (e > kHeadExponent) bins.add(exact::bin_of(e), static_cast<uint32_t>(weight));
      else tail_mass += static_cast<uint32_t>(weight), ++tail_tokens;
    });
    if (draws) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        tail_mass += shuffle_xor(tail_mass, offset);
        tail_tokens += shuffle_xor(tail_tokens, offset);
      }
      if (threadIdx.x % 32 == 0 && tail_tokens > 0) bins.add(kTailBin, tail_mass, tail_tokens);
    }
    if (args.wants_logprob) {
      part.raw_sum = block_reduce(static_cast<double>(raw_sum), shared.sums, [](double a, double b) { return a + b; });
      join_parts(part, buffers, request_row, row.rank, ctas, shared);
      // Behind the last token of a row whose logits are all -inf this counts too much; that row has no log-probability.
    }
  }
  if (draws) {
    merge_bins(bins, reinterpret_cast<uint32_t*>(list), row.rank, ctas);
    token = draw(args, buffers, row, weigher, request_row, bins, list, shared);
  }
  if (args.num_logprobs > 0) write_tops(args, buffers, row, request_row, shared);
  if (!leads || threadIdx.x != 0) return;
  args.tokens[request_row] = token;
  if (args.logprob != nullptr)
    args.logprob[request_row] =
        token < 0 ? exact::not_a_number() : logprob_of(shared.all, static_cast<float>(row.logits[token]));
  if (args.token_counts_out != nullptr && settings.count_row >= 0 && token >= 0) {
    int32_t& count = args.token_counts_out[settings.count_row * args.vocabulary + token];
    count = exact::counted(count);
  }
}

// CTAs of a row: so many that all run at once, and each has some tokens. A cluster of 8 is as large as every GPU takes.
int ctas_of_row(const Args& args, const CudaTarget& target) {
  int ctas = kMaxCluster;
  while (ctas > 1 && (args.batch * ctas > 2 * target.sm_count || args.vocabulary < ctas * int64_t{2048})) ctas /= 2;
  return ctas;
}

// The architecture that a kernel's code on a device was compiled for, such as 90; newer devices without code of their own
// run that of 80. Asked once.
template <class Kernel>
int loaded_code(Kernel kernel, int device, cudaError_t* error) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not asked yet
  const int version = known[device % kDevices].load(std::memory_order_relaxed);
  if (version != 0) return version;
  cudaFuncAttributes attributes = {};
  *error = cudaFuncGetAttributes(&attributes, kernel);
  if (*error == cudaSuccess) known[device % kDevices].store(attributes.ptxVersion, std::memory_order_relaxed);
  return attributes.ptxVersion;
}

template <class T>
int launch_type(const Args& args, const Buffers& buffers, int ctas, const CudaTarget& target) {
  const auto kernel = SampleKernel<T>;
  cudaError_t error = cudaSuccess;
  if (loaded_code(kernel, target.device, &error) < 90) ctas = 1;  // it knows no clusters
  if (error != cudaSuccess) return error;
  int most = 0;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error != cudaSuccess) return error;
  if (args.batch * ctas > target.sm_count && most > kSharedBytes) most = kSharedBytes;
  const int64_t chunk = 16 / sizeof(T), chunks = (args.vocabulary + chunk - 1) / chunk;
  const int64_t slots = (chunks + int64_t{ctas} * kThreads - 1) / (int64_t{ctas} * kThreads);
  const int fixed = kHeadBytes + (args.samples ? kBinBytes + kListBytes : 0);
  int64_t cached = (most - fixed) / (16 * kThreads);
  if (cached > slots) cached = slots;
  if (!args.samples && !args.wants_logprob) cached = 0;  // the row is read once
  const auto bytes = static_cast<int>(fixed + cached * 16 * kThreads);
  int limit = 0;  // the kernel's, which other threads launch too: the same for all calls
  error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit);
  if (error != cudaSuccess) return error;
  const bool aligned = reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 && args.vocabulary % chunk == 0;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  config.gridDim = dim3(static_cast<unsigned>(args.batch * ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(target.stream);
  config.attrs = &attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.numAttrs = ctas > 1 ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, args, buffers, ctas, static_cast<int>(cached), aligned);
  if (error != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return error;
}

}  // namespace

int launch(const Args& args, const CudaTarget& target, Workspace& ws) {
  const int ctas = ctas_of_row(args, target);
  Buffers buffers;
  buffers.parts = ws.scratch<Part>(args.batch * ctas);
  buffers.requests = ws.scratch<Request>(args.batch);
  buffers.list = ws.scratch<uint64_t>(args.samples ? args.batch * kListTokens : 0);
  buffers.tops = ws.scratch<uint64_t>(args.batch * ctas * args.num_logprobs);
  if (ws.counting()) return cudaSuccess;
  if (args.token_counts_out != nullptr && args.token_counts_out != args.token_counts) {
    const cudaError_t error = cudaMemcpyAsync(args.token_counts_out, args.token_counts,
                                              sizeof(int32_t) * static_cast<size_t>(args.count_rows * args.vocabulary),
                                              cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(target.stream));
    if (error != cudaSuccess) return error;
  }
  if (args.dtype == static_cast<int32_t>(DType::kFloat32)) return launch_type<float>(args, buffers, ctas, target);
  if (args.dtype == static_cast<int32_t>(DType::kFloat16)) return launch_type<__half>(args, buffers, ctas, target);
  return launch_type<__nv_bfloat16>(args, buffers, ctas, target);
}

}  // namespace leanfleet::sample_tokens
