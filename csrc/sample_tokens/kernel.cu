// A row's tokens are shared by the CTAs of a cluster (one CTA before sm_90), which all do the same with what they find
// together. Every pass goes over the row again, which stays in shared memory as far as it fits: the largest x; sums of weights
// by bin; the tokens of the bins in which top_k, top_p and the random number end. Only integers are added up, so that no order
// of CTAs and threads shows in a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>

#include "core/cuda_target.h"
#include "core/with_type.cuh"
#include "core/workspace.h"
#include "sample_tokens/arithmetic.h"
#include "sample_tokens/device.cuh"

namespace leanfleet::sample_tokens {

namespace {

using exact::Settings;

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kBinsOfThread = kBins / kThreads;
constexpr int kListTokens = 1024;  // so many, or more of their place's digits have to be told apart first
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
// Most tokens weigh little. Those below 2^kHeadExponent of the largest weight are added up in registers, as one bin behind
// all others, which is divided into its bins where a search ends in it. The others, the head, are noted in shared memory, and
// what follows goes over them alone.
constexpr float kHeadExponent = -14.0f;
constexpr int kHeadBins = 14 * 64, kTailBin = kBins - 1;
static_assert(kWarps == 32, "a warp adds up what the warps found");
static_assert(exact::kWeightBits * 64 < kTailBin, "a bin of its own");
static_assert(kHeadBins % kBinsOfThread == 0, "a thread has bins of the head or of the tail");
constexpr uint64_t kNoPlace = ~uint64_t{0};

// What a CTA found in its part of a row.
struct Part {
  uint64_t place;  // of the largest x
  double raw_sum;  // of exp(logit - largest logit)
  float raw_top;
  uint32_t raw_nan;
};

// The tokens of a bin whose place has a prefix in front of its lowest `shift` bits.
struct Range {
  int32_t bin;
  int shift;  // 64: all of the bin
  uint64_t prefix;
};

// Where the running sum, of weights or of tokens, of the row's tokens in their order reaches a target.
struct Cut {
  uint64_t place, mass;  // mass: up to that token
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
  // Over the CTAs of a row.
  __device__ void all(int at, int ctas, uint64_t* weight, uint32_t* tokens) const {
    *weight = 0, *tokens = 0;
    for (int cta = 0; cta < ctas; ++cta) {
      *weight += uint64_t{load_of_cta(high + at, cta)} << 32 | load_of_cta(low + at, cta);
      *tokens += load_of_cta(count + at, cta);
    }
  }
};

// A CTA's shared memory but for the row, which follows.
struct Shared {
  uint64_t words[kWarps], more[kWarps];
  double sums[kWarps];
  float floats[kWarps];
  uint32_t flags[kWarps];
  Part part, all;                // this CTA's and the whole row's
  uint64_t target, mass, place;  // what a search found
  int32_t found;
  uint32_t count;
  // What follows is there for draws alone.
  uint32_t heads;                    // tokens of the head, of which `noted` holds as many as it has room for
  uint32_t listed;                   // tokens in `list`
  uint64_t list[kListTokens];        // this CTA's
  uint64_t candidates[kListTokens];  // those of all CTAs
  uint32_t weights[kListTokens];     // theirs
  alignas(16) uint32_t low[kBins], high[kBins], count_of[kBins];
};
constexpr int rounded_up(size_t bytes) { return static_cast<int>((bytes + 15) / 16 * 16); }
constexpr int kGreedyBytes = rounded_up(offsetof(Shared, heads)), kDrawBytes = rounded_up(sizeof(Shared));

// By this function the compiler knows that it is shared memory.
__device__ __forceinline__ Shared& memory() { return *reinterpret_cast<Shared*>(dynamic_shared_memory()); }
__device__ __forceinline__ Sums bins() { return {memory().low, memory().high, memory().count_of}; }

__device__ uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Reductions over a CTA; all threads get the result. `shared`: [kWarps].
template <class T, class F>
__device__ __forceinline__ T block_reduce(T x, T* shared, F&& join) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = join(x, shuffle_xor(x, offset));
  sync_block();  // what was in it has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  sync_block();
  x = shared[threadIdx.x % 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = join(x, shuffle_xor(x, offset));
  return x;
}

// Inclusive sums over the lanes of a warp.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = shuffle_up(x, offset);
    if (threadIdx.x % 32 >= static_cast<unsigned>(offset)) x += other;
  }
  return x;
}

// Sums of a and b over the threads before this one; *all_a, *all_b: over all threads.
__device__ __forceinline__ void block_scan(uint64_t* a, uint64_t* b, uint64_t* all_a, uint64_t* all_b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t sum_a = warp_scan(*a), sum_b = warp_scan(*b);
  sync_block();
  if (lane == 31) memory().words[warp] = sum_a, memory().more[warp] = sum_b;
  sync_block();
  const uint64_t ends_a = warp_scan(memory().words[lane]), ends_b = warp_scan(memory().more[lane]);
  *all_a = shuffle(ends_a, 31), *all_b = shuffle(ends_b, 31);
  *a = sum_a - *a + (warp > 0 ? shuffle(ends_a, warp - 1) : 0);
  *b = sum_b - *b + (warp > 0 ? shuffle(ends_b, warp - 1) : 0);
}

// The part of a row that a CTA reads, in chunks of 16 bytes: chunk `slot` of thread t is t + (rank + slot * CTAs) * kThreads.
// kAtOnce: chunks that a thread loads before it looks at them.
template <class T, int kAtOnce>
struct Row {
  static constexpr int kChunk = 16 / sizeof(T);
  union Chunk {
    uint4 words;
    T values[kChunk];
    __device__ Chunk() {}
  };
  const T* logits;
  uint4* cache;     // [cached,kThreads]
  uint32_t* noted;  // [room]: tokens of the head, by their place in the cache, as if all had one
  uint32_t tokens, chunks, room;
  int rank, ctas, slots, cached;
  bool aligned;

  __device__ uint32_t chunk_of(int slot) const {
    return threadIdx.x + (static_cast<uint32_t>(rank) + static_cast<uint32_t>(slot) * ctas) * kThreads;
  }

  // -inf behind the last token.
  __device__ uint4 read(uint32_t chunk) const {
    const uint32_t first = chunk * kChunk;
    if (aligned && first + kChunk <= tokens) return load_16_bytes(logits + first);
    Chunk x;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      x.values[i] = first + i < tokens ? logits[first + i] : static_cast<T>(exact::minus_infinity());
    return x.words;
  }

  // Calls visit(chunk, index of its first token, chunks before it in this turn) for this thread's chunks, by index, and
  // after(slot of the first) at each turn's end: as often for all threads. `first`: they are not in the cache yet.
  template <class F, class After>
  __device__ __forceinline__ void each_chunk(bool first, F&& visit, After&& after) const {
#pragma unroll 1
    for (int slot = 0; slot < slots; slot += kAtOnce) {
      Chunk x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (slot + k >= slots) continue;
        uint4* const cached_words = cache + (slot + k) * kThreads + threadIdx.x;
        if (!first && slot + k < cached) x[k].words = *cached_words;
        else x[k].words = read(chunk_of(slot + k));
        if (first && slot + k < cached) *cached_words = x[k].words;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (slot + k < slots) visit(x[k], chunk_of(slot + k) * kChunk, k);
      after(slot);
    }
  }
  template <class F>
  __device__ __forceinline__ void each_chunk(bool first, F&& visit) const {
    each_chunk(first, [&](const Chunk& x, uint32_t token, int) { visit(x, token); }, [](int) {});
  }

  // Notes tokens of a turn of each_chunk: bit k * kChunk + i for token i of the turn's k-th chunk.
  __device__ __forceinline__ void note(uint32_t chosen, int slot) const {
    const auto own = static_cast<uint32_t>(__popc(chosen));
    uint32_t before = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = shuffle_up(before, offset);
      if (threadIdx.x % 32 >= static_cast<unsigned>(offset)) before += other;
    }
    uint32_t at = 0;
    if (threadIdx.x % 32 == 31 && before > 0) at = atomicAdd(&memory().heads, before);
    at = shuffle(at, 31) + before - own;
    while (chosen != 0) {
      const int bit = __ffs(static_cast<int>(chosen)) - 1;
      chosen &= chosen - 1;
      if (at < room) noted[at] = ((slot + bit / kChunk) * kThreads + threadIdx.x) * kChunk + bit % kChunk;
      ++at;
    }
    __syncwarp();  // the warp's threads go on together
  }

  // Calls visit(logit, token) for the tokens that are noted.
  template <class F>
  __device__ __forceinline__ void each_noted(F&& visit) const {
    constexpr uint32_t kTurn = kThreads * kChunk;
    for (uint32_t i = threadIdx.x; i < memory().heads; i += kThreads) {
      const uint32_t place = noted[i], slot = place / kTurn;
      const uint32_t token = (static_cast<uint32_t>(rank) + slot * ctas) * kTurn + place % kTurn;
      const T logit = static_cast<int>(slot) < cached ? reinterpret_cast<const T*>(cache)[place] : logits[token];
      visit(static_cast<float>(logit), token);
    }
  }
  __device__ bool all_noted() const { return memory().heads <= room; }

  // Calls visit(logit, token) for the tokens of a chunk whose bit is set in `chosen`, which are few.
  template <class F>
  __device__ static void each_of(uint32_t chosen, const Chunk& chunk, uint32_t first, F&& visit) {
    while (chosen != 0) {
      const int i = __ffs(static_cast<int>(chosen)) - 1;
      chosen &= chosen - 1;
      T value = chunk.values[0];
#pragma unroll
      for (int k = 1; k < kChunk; ++k)
        if (i == k) value = chunk.values[k];  // a chunk lies in registers, which have no index
      visit(static_cast<float>(value), first + i);
    }
    __syncwarp();  // the warp's threads go on together
  }
};

// How a row's x become weights. kChanges: penalties, a bias or a mask change its logits.
template <bool kChanges>
struct Weigher {
  Settings settings;
  uint32_t tokens;
  float top;
  uint32_t least_weight;

  __device__ float changed(float logit, uint32_t token) const {
    if constexpr (kChanges) return token < tokens ? exact::changed(settings, logit, token) : logit;
    else return logit;
  }
  __device__ float exponent(float x) const { return exact::exponent_of(x, top, settings.scale); }
  // 0: the token cannot be chosen.
  __device__ uint32_t weight_of(float exponent) const {
    const auto weight = static_cast<uint32_t>(exact::weight_unchecked(fmaxf(exponent, exact::kLeastExponent - 1.0f)));
    return weight >= least_weight ? weight : 0u;
  }
  __device__ uint32_t weight(float x) const { return weight_of(exponent(x)); }
};

// The choice of a token of a row, by all its CTAs.
template <class T, bool kChanges, int kAtOnce>
struct Draw {
  using Tokens = Row<T, kAtOnce>;
  using Chunk = typename Tokens::Chunk;
  Tokens row;
  Weigher<kChanges> weigher;
  bool divided = false;  // the tail is in its own bins
  // Of this thread's bins, over the row's CTAs, and of all bins before them.
  uint64_t mass[kBinsOfThread], mass_before;
  uint32_t count[kBinsOfThread];
  uint64_t count_before;
  uint64_t all_mass, all_tokens;
  Range listed = {-1, 64, 0};  // whose tokens are candidates
  uint32_t candidates = 0;

  __device__ static uint64_t shifted(uint64_t x, int by) { return by >= 64 ? 0 : x >> by; }

  // The bins of all CTAs: of the head, with the tail as one, or once it is divided those of the tail.
  __device__ void merge() {
    sync_row(row.ctas);
    mass_before = count_before = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      const int bin = static_cast<int>(threadIdx.x) * kBinsOfThread + i;
      if (!divided || bin >= kHeadBins) mass[i] = 0, count[i] = 0;
      if (divided ? bin >= kHeadBins && bin != kTailBin : bin < kHeadBins || bin == kTailBin)
        bins().all(bin, row.ctas, &mass[i], &count[i]);
      mass_before += mass[i], count_before += count[i];
    }
    block_scan(&mass_before, &count_before, &all_mass, &all_tokens);
  }

  // Puts the tail into its bins.
  __device__ void divide_tail() {
    row.each_chunk(false, [&](const Chunk& x, uint32_t first) {
#pragma unroll
      for (int i = 0; i < Tokens::kChunk; ++i) {
        const float e = weigher.exponent(weigher.changed(static_cast<float>(x.values[i]), first + i));
        if (!(e >= exact::kLeastExponent) || e > kHeadExponent) continue;
        const uint32_t weight = weigher.weight_of(e);
        if (weight > 0) bins().add(exact::bin_of(e), weight);
      }
    });
    divided = true;
    merge();
  }

  // Calls visit(place, weight) for this CTA's tokens of a range.
  template <class F>
  __device__ void each_of_range(const Range& range, F&& visit) const {
    const auto visit_one = [&](float logit, uint32_t token) {
      const float value = weigher.changed(logit, token);
      const uint32_t weight = weigher.weight(value);
      const uint64_t place = exact::place_of(value, token);
      if (weight > 0 && shifted(place, range.shift) == range.prefix) visit(place, weight);
    };
    if (range.bin < kHeadBins && row.all_noted()) {
      row.each_noted([&](float logit, uint32_t token) {
        if (exact::bin_of(weigher.exponent(weigher.changed(logit, token))) == range.bin) visit_one(logit, token);
      });
      return;
    }
    const auto least = static_cast<float>(range.bin), most = static_cast<float>(range.bin + 1);
    row.each_chunk(false, [&](const Chunk& x, uint32_t first) {
      uint32_t chosen = 0;
#pragma unroll
      for (int i = 0; i < Tokens::kChunk; ++i) {
        const float e = weigher.exponent(weigher.changed(static_cast<float>(x.values[i]), first + i));
        const float scaled = exact::multiply(e, -exact::kBinsPerOctave);  // bin_of before it is cut
        if (scaled >= least && scaled < most && e >= exact::kLeastExponent) chosen |= 1u << i;
      }
      Tokens::each_of(chosen, x, first, visit_one);
    });
  }

  // Makes a range of too many tokens smaller by their places' next digit, as find() does by bin.
  __device__ void narrow(Range* range, uint64_t* target, bool of_tokens, uint64_t* mass_so_far, uint32_t* tokens) {
    sync_row(row.ctas);  // the bins of the head have been read: digits take their place
    for (int i = threadIdx.x; i < kDigits; i += kThreads) memory().low[i] = memory().high[i] = memory().count_of[i] = 0;
    sync_block();
    const int shift = range->shift - kDigitBits;
    each_of_range(
        *range, [&](uint64_t place, uint32_t weight) { bins().add(static_cast<int>(place >> shift & (kDigits - 1)), weight); });
    sync_row(row.ctas);
    uint64_t own_mass = 0, own_tokens = 0;
    uint32_t own = 0;
    if (threadIdx.x < kDigits) bins().all(threadIdx.x, row.ctas, &own_mass, &own), own_tokens = own;
    uint64_t before = own_mass, tokens_before = own_tokens, total, total_tokens;
    block_scan(&before, &tokens_before, &total, &total_tokens);
    const uint64_t begin = of_tokens ? tokens_before : before, step = of_tokens ? own_tokens : own_mass;
    if (begin < *target && *target <= begin + step) {
      memory().found = static_cast<int32_t>(threadIdx.x);
      memory().count = own;
      memory().target = *target - begin;
      memory().mass = *mass_so_far + before;
    }
    sync_block();
    *range = {range->bin, shift, range->prefix << kDigitBits | static_cast<uint64_t>(memory().found)};
    *target = memory().target, *mass_so_far = memory().mass, *tokens = memory().count;
    sync_block();
  }

  // Makes the tokens of a range the candidates.
  __device__ void list(const Range& range) {
    if (range.bin == listed.bin && range.shift == listed.shift && range.prefix == listed.prefix) return;
    sync_row(row.ctas);  // the list before has been read
    if (threadIdx.x == 0) memory().listed = 0;
    sync_block();
    each_of_range(range, [&](uint64_t place, uint32_t) { memory().list[atomicAdd(&memory().listed, 1u)] = place; });
    sync_row(row.ctas);
    candidates = 0;
    for (int cta = 0; cta < row.ctas; ++cta) {
      const uint32_t there = load_of_cta(&memory().listed, cta);
      for (uint32_t i = threadIdx.x; i < there; i += kThreads) {
        const auto* const words = reinterpret_cast<const uint32_t*>(memory().list + i);
        const uint64_t place = uint64_t{load_of_cta(words + 1, cta)} << 32 | load_of_cta(words, cta);
        memory().candidates[candidates + i] = place;
        memory().weights[candidates + i] = weigher.weight(exact::value_at(place));
      }
      candidates += there;
    }
    sync_block();
    listed = range;
  }

  // Where the sum of the candidates reaches a target.
  __device__ Cut cut_of_candidates(uint64_t target, bool of_tokens, uint64_t mass_so_far) {
    for (uint32_t i = threadIdx.x; i < candidates; i += kThreads) {
      const uint64_t place = memory().candidates[i];
      uint64_t before = 0, rank = 0;
#pragma unroll 4
      for (uint32_t k = 0; k < candidates; ++k) {
        if (memory().candidates[k] >= place) continue;
        before += memory().weights[k];
        ++rank;
      }
      const uint64_t begin = of_tokens ? rank : before, step = of_tokens ? 1 : memory().weights[i];
      if (begin < target && target <= begin + step) {
        memory().place = place;
        memory().mass = mass_so_far + before + memory().weights[i];
      }
    }
    sync_block();
    const Cut cut = {memory().place, memory().mass};
    sync_block();
    return cut;
  }

  // Where the sum of the row reaches a target, from 1 to the sum of all.
  __device__ Cut find(uint64_t target, bool of_tokens) {
    for (;;) {
      uint64_t m = mass_before, n = count_before;
#pragma unroll
      for (int i = 0; i < kBinsOfThread; ++i) {
        const uint64_t begin = of_tokens ? n : m, step = of_tokens ? count[i] : mass[i];
        if (begin < target && target <= begin + step) {
          memory().found = static_cast<int32_t>(threadIdx.x) * kBinsOfThread + i;
          memory().count = count[i];
          memory().target = target - begin;
          memory().mass = m;
        }
        m += mass[i], n += count[i];
      }
      sync_block();
      Range range = {memory().found, 64, 0};
      uint32_t tokens = memory().count;
      uint64_t rest = memory().target, mass_so_far = memory().mass;
      sync_block();
      if (range.bin == kTailBin) {
        divide_tail();
        continue;
      }
      while (tokens > kListTokens) narrow(&range, &rest, of_tokens, &mass_so_far, &tokens);
      list(range);
      return cut_of_candidates(rest, of_tokens, mass_so_far);
    }
  }

  __device__ int64_t token(uint64_t seed, uint32_t position) {
    const Settings& settings = weigher.settings;
    merge();
    Cut cut = {kNoPlace, all_mass};
#pragma unroll 1
    for (int step = 0; step < 3; ++step) {  // top_k, top_p, the draw
      auto target = static_cast<uint64_t>(settings.top_k);
      if (step == 0 && (target == 0 || target >= all_tokens)) continue;
      if (step == 1) {
        if (settings.top_p == 0) continue;
        target = static_cast<uint64_t>(exact::fraction_of(static_cast<int64_t>(cut.mass), settings.top_p));
        if (target < 1) target = 1;
      }
      if (step == 2)
        target = static_cast<uint64_t>(exact::part_of(static_cast<int64_t>(cut.mass), exact::philox(seed, position))) + 1;
      cut = find(target, step == 0);
    }
    return static_cast<int64_t>(cut.place & 0xffffffffu);
  }
};

__device__ float logprob_of(const Part& all, float logit) {
  if (all.raw_nan != 0 || !exact::finite(all.raw_top)) return exact::not_a_number();
  return (logit == all.raw_top ? 0.0f : logit - all.raw_top) - logf(static_cast<float>(all.raw_sum));
}

// The most likely tokens of the logits as they are: of each CTA, and then of the row. tops: [CTAs,wanted] of the row.
template <class T, int kAtOnce>
__device__ __noinline__ void write_tops(const Args& args, uint64_t* tops, const Row<T, kAtOnce>& row, int64_t request) {
  const auto wanted = static_cast<int>(args.num_logprobs);
  const auto next = [&](uint64_t after, bool any) {
    uint64_t best = kNoPlace;
    row.each_chunk(false, [&](const typename Row<T, kAtOnce>::Chunk& chunk, uint32_t first) {
#pragma unroll
      for (int i = 0; i < Row<T, kAtOnce>::kChunk; ++i) {
        const auto logit = static_cast<float>(chunk.values[i]);
        const uint64_t place = exact::place_of(logit == logit ? logit : exact::minus_infinity(), first + i);
        if (first + i < row.tokens && (any || place > after)) best = smaller(best, place);
      }
    });
    return best;
  };
  uint64_t mine = next(0, true);
  for (int i = 0; i < wanted; ++i) {
    const uint64_t best = block_reduce(mine, memory().words, smaller);
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
    args.top_tokens[request * wanted + rank] = static_cast<int64_t>(place & 0xffffffffu);
    args.top_logprobs[request * wanted + rank] = logprob_of(memory().all, exact::value_at(place));
  }
}

// Joins what a row's CTAs found, in each of them.
__device__ void join_parts(const Part& mine, int ctas) {
  if (threadIdx.x == 0) memory().part = mine;
  sync_row(ctas);
  if (threadIdx.x == 0) {
    Part all = {kNoPlace, 0.0, exact::minus_infinity(), 0};
    for (int i = 0; i < ctas; ++i) {
      const Part part = load_struct_of_cta(memory().part, i);
      all.place = smaller(all.place, part.place);
      all.raw_sum += part.raw_sum;
      all.raw_top = fmaxf(all.raw_top, part.raw_top);
      all.raw_nan |= part.raw_nan;
    }
    memory().all = all;
  }
  sync_block();
}

__device__ void write_nothing(const Args& args, int64_t request) {
  if (threadIdx.x == 0) args.tokens[request] = -1;
  if (threadIdx.x == 0 && args.logprob != nullptr) args.logprob[request] = exact::not_a_number();
  for (int64_t i = threadIdx.x; i < args.num_logprobs; i += kThreads) {
    args.top_logprobs[request * args.num_logprobs + i] = exact::not_a_number();
    args.top_tokens[request * args.num_logprobs + i] = -1;
  }
}

template <class T, bool kChanges>
__global__ void __launch_bounds__(kThreads, 1)
    SampleKernel(const __grid_constant__ Args args, uint64_t* tops, int ctas, int cached, int room, bool aligned) {
  constexpr int kAtOnce = kChanges ? 1 : 4;  // code that changes logits is long
  using Tokens = Row<T, kAtOnce>;
  using Chunk = typename Tokens::Chunk;
  const int64_t request = blockIdx.x / ctas;
  const Settings settings = exact::settings_of(args, request);
  const bool leads = blockIdx.x % ctas == 0;
  if (!settings.active) {
    if (leads) write_nothing(args, request);
    return;
  }
  Tokens row;
  row.logits = static_cast<const T*>(args.logits) + request * args.vocabulary;
  row.cache = reinterpret_cast<uint4*>(dynamic_shared_memory() + (args.samples ? kDrawBytes : kGreedyBytes));
  row.tokens = static_cast<uint32_t>(args.vocabulary);
  row.chunks = (row.tokens + Tokens::kChunk - 1) / Tokens::kChunk;
  row.rank = static_cast<int>(blockIdx.x % ctas);
  row.ctas = ctas;
  row.slots =
      static_cast<int>((row.chunks + static_cast<int64_t>(ctas) * kThreads - 1) / (static_cast<int64_t>(ctas) * kThreads));
  row.cached = cached;
  row.aligned = aligned;
  row.noted = reinterpret_cast<uint32_t*>(row.cache + static_cast<int64_t>(cached) * kThreads);
  row.room = static_cast<uint32_t>(room);
  Weigher<kChanges> weigher = {settings, row.tokens, 0.0f, static_cast<uint32_t>(settings.least_weight)};

  // The largest x, the lowest index where several are.
  Part part = {kNoPlace, 0.0, exact::minus_infinity(), 0};
  float best = exact::minus_infinity();
  uint32_t best_token = 0xffffffffu;
  row.each_chunk(true, [&](const Chunk& chunk, uint32_t first) {
#pragma unroll
    for (int i = 0; i < Tokens::kChunk; ++i) {
      const auto logit = static_cast<float>(chunk.values[i]);
      const float x = weigher.changed(logit, first + i);
      if (x > best) best = x, best_token = first + i;
      if (kChanges) part.raw_top = logit > part.raw_top ? logit : part.raw_top;
      part.raw_nan |= logit != logit;
    }
  });
  part.place = block_reduce(exact::place_of(best, best_token), memory().words, smaller);
  if (args.wants_logprob) {
    part.raw_top = kChanges ? block_reduce(part.raw_top, memory().floats, [](float a, float b) { return fmaxf(a, b); })
                            : exact::value_at(part.place);
    part.raw_nan = block_reduce(part.raw_nan, memory().flags, [](uint32_t a, uint32_t b) { return a | b; });
  }
  join_parts(part, ctas);
  weigher.top = exact::value_at(memory().all.place);
  const bool possible = weigher.top > exact::minus_infinity();
  const bool draws = possible && !settings.greedy;
  int64_t token = possible ? static_cast<int64_t>(memory().all.place & 0xffffffffu) : -1;

  const float raw_top = memory().all.raw_top;
  float raw_sum = 0.0f;
  const auto add_raw = [&](float logit) { raw_sum += logit == raw_top ? 1.0f : __expf(logit - raw_top); };
  if (draws) {
    for (int i = threadIdx.x; i < 3 * kBins / 4; i += kThreads) reinterpret_cast<uint4*>(memory().low)[i] = uint4{};
    if (threadIdx.x == 0) memory().heads = 0;
    sync_block();
    uint64_t tail_mass = 0;
    uint32_t tail_tokens = 0, in_head = 0;
    const auto weigh = [&](const Chunk& chunk, uint32_t first, int turn) {
      uint32_t light = 0;
#pragma unroll
      for (int i = 0; i < Tokens::kChunk; ++i) {
        const auto logit = static_cast<float>(chunk.values[i]);
        const float e = weigher.exponent(weigher.changed(logit, first + i));
        const uint32_t head = e > kHeadExponent ? 1u : 0u;
        const uint32_t weight = weigher.weight_of(e) & (head - 1);  // without a branch
        in_head |= head << (turn * Tokens::kChunk + i);
        light += weight;  // at most kChunk 2^16
        tail_tokens += weight > 0 ? 1u : 0u;
      }
      tail_mass += light;
    };
    row.each_chunk(false, weigh, [&](int slot) {
      row.note(in_head, slot);
      in_head = 0;
    });
    sync_block();
    const auto add_head = [&](float logit, uint32_t at) {
      const float e = weigher.exponent(weigher.changed(logit, at));
      const uint32_t weight = weigher.weight_of(e);
      if (e > kHeadExponent && weight > 0) bins().add(exact::bin_of(e), weight);
    };
    if (row.all_noted()) {
      row.each_noted(add_head);
    } else {
      row.each_chunk(false, [&](const Chunk& chunk, uint32_t first) {
        Tokens::each_of((1u << Tokens::kChunk) - 1, chunk, first, add_head);
      });
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      tail_mass += shuffle_xor(tail_mass, offset);
      tail_tokens += shuffle_xor(tail_tokens, offset);
    }
    if (threadIdx.x % 32 == 0 && tail_tokens > 0) bins().add(kTailBin, tail_mass, tail_tokens);
  }
  if (args.wants_logprob) {
    row.each_chunk(false, [&](const Chunk& chunk, uint32_t) {
#pragma unroll
      for (int i = 0; i < Tokens::kChunk; ++i) add_raw(static_cast<float>(chunk.values[i]));
    });
    // Behind the last token of a row whose logits are all -inf this counts too much; that row has no log-probability.
    part.raw_sum = block_reduce(static_cast<double>(raw_sum), memory().sums, [](double a, double b) { return a + b; });
    sync_row(ctas);  // all have read the parts
    join_parts(part, ctas);
  }
  if (draws) {
    Draw<T, kChanges, kAtOnce> draw = {row, weigher};
    token = draw.token(static_cast<uint64_t>(args.seed[request]), static_cast<uint32_t>(args.position[request]));
  }
  if (args.num_logprobs > 0) write_tops(args, tops + request * ctas * args.num_logprobs, row, request);
  sync_row(ctas);  // no CTA ends while another reads its memory
  if (!leads || threadIdx.x != 0) return;
  args.tokens[request] = token;
  if (args.logprob != nullptr)
    args.logprob[request] = token < 0 ? exact::not_a_number() : logprob_of(memory().all, static_cast<float>(row.logits[token]));
  if (args.token_counts_out != nullptr && settings.count_row >= 0 && token >= 0) {
    int32_t& count = args.token_counts_out[settings.count_row * args.vocabulary + token];
    count = exact::counted(count);
  }
}

// CTAs of a row: so many that all run at once, one on an SM, and each has some tokens. A cluster of 8 is as large as every GPU
// takes. Large clusters leave SMs of a GPC without work: some rows would wait for others if all SMs were counted on.
int ctas_of_row(const Args& args, const CudaTarget& target) {
  int ctas = kMaxCluster;
  const auto rows_at_once = [&] { return target.sm_count * int64_t{ctas > 2 ? 3 : 4} / (4 * ctas); };
  while (ctas > 1 && (args.batch > rows_at_once() || args.vocabulary < ctas * int64_t{2048})) ctas /= 2;
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

template <class T, bool kChanges>
int launch_kernel(const Args& args, uint64_t* tops, int ctas, const CudaTarget& target) {
  const auto kernel = SampleKernel<T, kChanges>;
  cudaError_t error = cudaSuccess;
  if (loaded_code(kernel, target.device, &error) < 90) ctas = 1;  // it knows no clusters
  if (error != cudaSuccess) return error;
  int most = 0;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, target.device);
  if (error != cudaSuccess) return error;
  const int64_t chunk = 16 / sizeof(T), chunks = (args.vocabulary + chunk - 1) / chunk;
  const int64_t slots = (chunks + int64_t{ctas} * kThreads - 1) / (int64_t{ctas} * kThreads);
  const int fixed = args.samples ? kDrawBytes : kGreedyBytes;
  // Room for a sixth of the CTA's tokens in the head, and then for its part of the row.
  int64_t room = args.samples ? args.vocabulary / (6 * ctas) + 64 : 0;
  if (4 * room > (most - fixed) / 2) room = (most - fixed) / 8;
  int64_t cached = (most - fixed - 4 * room) / (16 * kThreads);
  if (cached > slots) cached = slots;
  if (!args.samples && !args.wants_logprob) cached = 0;  // the row is read once
  const auto bytes = static_cast<int>(fixed + cached * 16 * kThreads + 4 * room);
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
  error = cudaLaunchKernelEx(&config, kernel, args, tops, ctas, static_cast<int>(cached), static_cast<int>(room), aligned);
  if (error != cudaSuccess) cudaGetLastError();  // it is reported here, not by the next call
  return error;
}

template <class T>
int launch_type(const Args& args, uint64_t* tops, int ctas, const CudaTarget& target) {
  const bool changes = args.token_counts != nullptr || args.logit_bias != nullptr || args.allowed_tokens != nullptr;
  return changes ? launch_kernel<T, true>(args, tops, ctas, target) : launch_kernel<T, false>(args, tops, ctas, target);
}

}  // namespace

int launch(const Args& args, const CudaTarget& target, Workspace& ws) {
  const int ctas = ctas_of_row(args, target);
  auto* const tops = ws.scratch<uint64_t>(args.batch * ctas * args.num_logprobs);
  if (ws.counting()) return cudaSuccess;
  if (args.token_counts_out != nullptr && args.token_counts_out != args.token_counts) {
    const cudaError_t error = cudaMemcpyAsync(args.token_counts_out, args.token_counts,
                                              sizeof(int32_t) * static_cast<size_t>(args.count_rows * args.vocabulary),
                                              cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(target.stream));
    if (error != cudaSuccess) return error;
  }
  return with_type(args.dtype, [&](auto type) { return launch_type<decltype(type)>(args, tops, ctas, target); });
}

}  // namespace leanfleet::sample_tokens
