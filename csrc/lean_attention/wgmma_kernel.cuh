// LeanAttention for 17 and more packed rows on Hopper (sm_90a): one persistent CTA per range of the schedule, as in
// mma_kernel.cuh, whose producer and queue it takes over, or for the whole units that it is dealt (schedule.h). Warpgroups compute,
// each 64 rows of a unit and all tokens, with wgmma: S = Q K^T from shared memory, O += P V with P in registers; whole units of up to
// 64 rows they take in turn. Three of them where registers suffice, which the softmax of narrow heads needs: it takes as long as their
// products. Values of more than 128 columns have tiles of 64 tokens, so that the output of 256 columns fits in registers beside the
// logits; their products take twice as long as the softmax.
//
// The next tile's S is on its way through the tensor cores beside this tile's O while the softmax of the next one runs, and
// the warpgroups take turns at issuing products, so that one has its softmax while the tensor cores work for the other (both
// as in FlashAttention-3). What tile it is, masked or not, decides about branches between products only: a product
// behind a branch, with others on their way, makes the compiler wait for each.
#pragma once

#include "core/hopper.cuh"
#include "lean_attention/mma_kernel.cuh"

namespace leanfleet::lean_attention {

// kWidth: columns of keys; kValueWidth: of values. kOfQuantised: of quantised caches, which two warpgroups of producers turn into T.
// They need the registers of a third one that computes.
template <int kWidth, bool kOfQuantised = false, int kValueWidth = kWidth>
struct WgmmaTile {
  static constexpr bool kSplitTokens = false, kDeals = true, kConverts = kOfQuantised;
  static constexpr int kColumns = kWidth;
  static constexpr int kWarpgroups = kWidth == 64 && !kConverts ? 3 : 2, kGroupRows = 64;
  static constexpr int kTokens = kValueWidth > 128 ? 64 : 128, kRows = kWarpgroups * kGroupRows;
  static constexpr bool kTurns = kValueWidth <= 128;  // at issuing products; where these take longest it only delays them
  static constexpr int kConsumerWarps = 4 * kWarpgroups, kTileWarps = kConsumerWarps, kGroups = 1;
  static constexpr int kProducerWarps = kConverts ? kConvertingWarps : 4;
  // Registers of a thread; with those of the producers all that an SM has, 65,536.
  static constexpr int kConsumerRegisters = kConverts ? (kWidth > 128 ? 208 : 192) : kWarpgroups == 3 ? 160 : 224;
  static constexpr int kProducerRegisters = kConverts ? (kWidth > 128 ? 48 : 64) : kWarpgroups == 3 ? 32 : 56;
  static_assert(32 * (kConsumerWarps * kConsumerRegisters + kProducerWarps * kProducerRegisters) <= 65536);
  static constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);
  static constexpr int kKeyBoxes = (kWidth + kBoxColumns - 1) / kBoxColumns;  // of a row in shared memory, the query's too
  static constexpr int kValueBoxes = (kValueWidth + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kKeySlotBytes = kTokens * kKeyBoxes * 128, kPairBytes = kTokens * (kKeyBoxes + kValueBoxes) * 128;
  static constexpr int kQueryBytes = kRows * kKeyBoxes * 128;
  static constexpr int kSlices = kTokens / 16;
  static constexpr int kStageBytes = kConverts ? 2 * kTokens * kWidth : 0;
  static constexpr int kSlotExtra = 16 + kSlices * 2 + (kConverts ? kTokens * 2 : 0);  // a float for every second slot's tokens
  static constexpr int kQueueBytes = kQueue * (static_cast<int>(sizeof(Work)) + 16);
  static constexpr int kFixedBytes = kQueryBytes + kStageBytes + kQueueBytes + 1024;  // 1024: to align the ring
  static_assert(kQueueBytes % 16 == 0, "a slot's bits are read as words");
  // Keys have the even slots and values the odd ones.
  static __host__ __device__ constexpr int slot_at(int slot) {
    return kKeyBoxes == kValueBoxes ? slot * kKeySlotBytes : (slot >> 1) * kPairBytes + (slot & 1) * kKeySlotBytes;
  }
  static int slots_for(int shared_bytes) {
    const int pairs = (shared_bytes - kFixedBytes) / (kPairBytes + 2 * kSlotExtra);
    return 2 * (pairs < 6 ? pairs : 6);
  }
  static int shared_bytes(int slots) { return kFixedBytes + slots / 2 * (kPairBytes + 2 * kSlotExtra); }
};

// launch(columns of keys, columns of values) with those of the kernel for such heads, known to the compiler.
template <class F>
auto for_wgmma_widths(int key_width, int value_width, F&& launch) {
  constexpr std::integral_constant<int, 64> narrow;
  constexpr std::integral_constant<int, 96> of_96;
  constexpr std::integral_constant<int, 128> of_128;
  constexpr std::integral_constant<int, 192> of_192;
  constexpr std::integral_constant<int, 256> wide;
  const int columns = key_width > value_width ? key_width : value_width;
  if (columns <= 64) return launch(narrow, narrow);
  if (columns <= 96) return launch(of_96, of_96);
  if (columns <= 128) return launch(of_128, of_128);
  if (columns <= 192) return value_width <= 128 ? launch(of_192, of_128) : launch(of_192, of_192);
  return launch(wide, wide);
}

#if __CUDA_ARCH_FEAT_SM90_ALL

// A 4x4 transposition of words among the four lanes of a quad: lane q gets word q of each lane, in their order.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  const auto swap = [&](uint32_t& low, uint32_t& high, int distance) {
    const bool upper = lane & distance;
    const uint32_t got = __shfl_xor_sync(kFullWarp, upper ? low : high, distance);
    if (upper) low = got;
    else high = got;
  };
  swap(w[0], w[1], 1);
  swap(w[2], w[3], 1);
  swap(w[0], w[2], 2);
  swap(w[1], w[3], 2);
}

// A warpgroup: `group` 0, 1 or 2, with 64 rows of a unit, or none, see part_of; `warp` of the CTA's consumer warps. Of these rows a
// thread has 16 * (warp % 4) + lane / 4 and 8 more, and of each the columns 8n + 2 * (lane % 4) and the next.
template <class T, int kWidth, bool kConverts, int kValueWidth>
struct WarpgroupConsumer {
  using Tile = WgmmaTile<kWidth, kConverts, kValueWidth>;
  static constexpr int kTokens = Tile::kTokens;
  static constexpr int kThreads = 32 * Tile::kConsumerWarps;
  using Scores = float[kTokens / 8][4];
  using Output = float[kValueWidth / 8][4];
  using Weights = uint32_t[kTokens / 16][4];

  const Args& args;
  const TileLoads& loads;
  const RingAddresses& ring;
  const uint32_t query;  // shared address of this group's rows, [box][64][64 columns], swizzled like a slot
  const int group, warp, lane;
  int pair = 0;  // of slots in the ring, keys' and values'
  uint32_t parity = 0;
  float max[2], sum[2];

  __device__ __forceinline__ void run() {
    if (args.plan.merge_apart && warp == 0 && lane == 0) begin_cuts(args, blockIdx.x);
    RingPlace queued(0, kQueue);
    Output o;
    mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
    if (ring.queue[queued.slot].last != 0) return;
    if (group == 1) end_turn(2);
    load_query(ring.queue[queued.slot].unit, part_of(ring.queue[queued.slot]));
#pragma unroll 1
    for (;;) {
      const Work& work = ring.queue[queued.slot];
      const int groups = groups_of(work.unit), part = part_of(work);
      begin_unit(part, o);
      const Span tiles = work.segment.tiles;
      if (part >= groups) skip(tiles.end - tiles.begin);
      else if (tiles.begin < tiles.end) consume(tiles, work, groups, part, o);
      // The next unit's query is on its way while this one's output is written.
      const uint32_t done = ring.queue_empty + queued.slot * 8;
      queued.next();
      mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
      const bool last = ring.queue[queued.slot].last != 0;
      if (!last) load_query(ring.queue[queued.slot].unit, part_of(ring.queue[queued.slot]));
      if constexpr (kConverts) multiply_by_value_scales(work.unit.head, o);
      finish(work, part, o);
      if (last) break;
      mbarrier_arrive(done);  // every lane for what it has read of the work: no order between lanes is needed
    }
    if (group == 0) await_turn(2);  // the turn that nobody took
  }

  // How many groups have rows of a unit.
  __device__ __forceinline__ int groups_of(const Unit& unit) const {
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    return max32(ceil_div(rows.end - rows.begin, Tile::kGroupRows), 1);
  }
  // Which 64 rows of a unit are this group's. Whole units of up to 64 rows go to the groups in turn: while one has a unit's begin or
  // end, the others compute. kWarpgroups: none. Were the turn kept here from one unit to the next, the compiler would no longer know that
  // the loop over tiles is the same in all lanes, which costs its products 6 to 15%.
  __device__ __forceinline__ int part_of(const Work& work) const {
    return work.taker < 0 ? group : work.taker == group ? 0 : Tile::kWarpgroups;
  }

  // The ring

  __device__ __forceinline__ uint32_t keys_full() const { return ring.full + pair * 16; }
  __device__ __forceinline__ uint32_t values_full(int of) const { return ring.full + of * 16 + 8; }
  __device__ __forceinline__ uint32_t keys_empty() const { return ring.full + 8 * loads.slots + pair * 16; }
  __device__ __forceinline__ uint32_t values_empty(int of) const { return ring.full + 8 * loads.slots + of * 16 + 8; }
  __device__ __forceinline__ uint32_t keys() const { return ring.slots + pair * Tile::kPairBytes; }
  __device__ __forceinline__ uint32_t values(int of) const { return ring.slots + of * Tile::kPairBytes + Tile::kKeySlotBytes; }
  __device__ __forceinline__ void next() {
    if (++pair == loads.slots / 2) pair = 0, parity ^= 1;
  }
  // Whether this tile's values and the next one's keys have landed: asked while products run, so that nobody waits for the answer.
  __device__ __forceinline__ bool are_there() const {
    const bool turns = pair + 1 == loads.slots / 2;
    const uint32_t next_keys = ring.full + (turns ? 0 : pair + 1) * 16;
    return mbarrier_test(values_full(pair), parity) & mbarrier_test(next_keys, turns ? parity ^ 1 : parity);
  }
  // Gives a slot back: 32 arrivals of a warp, of its first lane alone or, `each`, of every lane. zero: something that has to be known
  // before.
  __device__ __forceinline__ void release(uint32_t empty, bool each = false, uint32_t zero = 0, bool held = true) const {
    __syncwarp();
    mbarrier_arrive_times_if(empty + zero, !held ? 0 : each ? 1 : lane == 0 ? 32 : 0);
  }
  // Values may have been silenced by every lane. Where threads fill the slot next, every lane arrives: the order of one lane's
  // arrival after __syncwarp is as good, but racecheck does not follow it.
  __device__ __forceinline__ void release_values(int of, bool held = true) const {
    release(values_empty(of), !loads.tensor_maps || args.append, 0, held);
  }
  // Rows that threads have copied or converted instead of TMA, before wgmma reads them.
  __device__ __forceinline__ void landed() const {
    if (!loads.tensor_maps || args.append) hopper::fence_proxy_async();
  }

  // Bits of the tokens of a tile that have no page, in the next keys' slot, which is full. Read by the lane that gives the
  // slot back: an order that racecheck follows. First all of them in one word, in that lane, while the products run.
  __device__ __forceinline__ uint4 missing_bits() const {
    const uint16_t* const bits = ring.masked_out + pair * 2 * Tile::kSlices;
    if (kTokens == 128) return *reinterpret_cast<const uint4*>(bits);
    const uint2 low = *reinterpret_cast<const uint2*>(bits);
    return make_uint4(low.x, low.y, 0, 0);
  }
  // `reads`: this is that lane, and there are pages.
  __device__ __forceinline__ uint32_t load_missing(uint32_t reads) const {
    const uint32_t from = shared_address(ring.masked_out + pair * 2 * Tile::kSlices);
    if (kTokens == 128) {
      const uint4 bits = hopper::load_16_bytes_if(from, reads);
      return bits.x | bits.y | bits.z | bits.w;
    }
    const uint2 bits = hopper::load_8_bytes_if(from, reads);
    return bits.x | bits.y;
  }
  __device__ __forceinline__ uint4 missing_tokens(bool all_there) const {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (all_there) return bits;
    if (lane == 0) bits = missing_bits();
    return make_uint4(__shfl_sync(kFullWarp, bits.x, 0), __shfl_sync(kFullWarp, bits.y, 0), __shfl_sync(kFullWarp, bits.z, 0),
                      __shfl_sync(kFullWarp, bits.w, 0));
  }
  // Tiles that this group's rows do not see.
  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      mbarrier_wait(keys_full(), parity);
      release(keys_empty());
      mbarrier_wait(values_full(pair), parity);
      release_values(pair);
      next();
    }
  }

  // Products

  // The same in all lanes, and known to be.
  static __device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(kFullWarp, x, 0); }

  __device__ __forceinline__ void keys_product(Scores& s) const {
    const uint32_t a = hopper::make_smem_descriptor(query, 0), b = uniform(hopper::make_smem_descriptor(keys(), 0));
    hopper::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k)
      hopper::wgmma_ss(T{}, s, a + (k / 4 * Tile::kGroupRows * 128 + k % 4 * 32) / 16,
                       b + (k / 4 * kTokens * 128 + k % 4 * 32) / 16, k > 0);
    hopper::warpgroup_commit();
  }
  static __device__ __forceinline__ void values_product(Output& o, const Weights& p, uint32_t values) {
    const uint32_t b = uniform(hopper::make_smem_descriptor(values, kTokens * 128));
    hopper::warpgroup_arrive();
#pragma unroll
    for (int t = 0; t < kTokens / 16; ++t) {
      if constexpr (kConverts && kWidth == 256) {
        // The assembler takes no instruction with more registers than each thread of so large a CTA begins with.
        constexpr int kHalf = kWidth / 16;
        hopper::wgmma_rs<true>(T{}, reinterpret_cast<float (&)[kHalf][4]>(o[0]), p[t], b + t * 2048 / 16, 1);
        hopper::wgmma_rs<true>(T{}, reinterpret_cast<float (&)[kHalf][4]>(o[kHalf]), p[t],
                               b + (kHalf / 8 * kTokens * 128 + t * 2048) / 16, 1);
      } else {
        hopper::wgmma_rs<true>(T{}, o, p[t], b + t * 2048 / 16, 1);
      }
    }
    hopper::warpgroup_commit();
  }

  // Softmax

  // Logits times log2(e) are s * scale; the sign of the scale is in the query.
  __device__ __forceinline__ float log2_scale() const { return args.softcap > 0.0f ? kLog2E : fabsf(args.scale) * kLog2E; }

  // Brings the maxima up to date and returns what earlier sums have to be multiplied with.
  __device__ __forceinline__ void new_maxima(const Scores& s, float scale, float (&factor)[2]) {
    float top[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[c][i] = s[0][2 * c + i];
#pragma unroll
        for (int n = 1; n < kTokens / 8; ++n) top[c][i] = fmaxf(top[c][i], s[n][2 * c + i]);
      }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float most = fmaxf(top[c][0], top[c][1]);
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
      most *= multiplier_of(most * scale, scale);
      const float in_use = most - max[c] > kRescaleAt ? most : max[c];
      factor[c] = rescale(max[c], in_use);
      max[c] = in_use;
      sum[c] *= factor[c];
    }
  }

  // Turns the logits of row c into weights and adds them up.
  template <int c>
  __device__ __forceinline__ void weigh(Scores& s, float scale) {
    const float base = max[c] == -INFINITY ? 0.0f : -max[c], unit = multiplier_of(max[c], scale);
    float sums[2] = {sum[c], 0.0f};
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[n][2 * c + i] = exp2_fast(fmaf(s[n][2 * c + i], unit, base));
        sums[i] += s[n][2 * c + i];
      }
    }
    sum[c] = sums[0] + sums[1];
  }

  static __device__ __forceinline__ void rescale_output(Output& o, const float (&factor)[2]) {
#pragma unroll
    for (int d = 0; d < kValueWidth / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] *= factor[i / 2];
  }

  static __device__ __forceinline__ void pack(const Scores& s, Weights& p) {
#pragma unroll
    for (int t = 0; t < kTokens / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[t][i] = pack_pair(T{}, s[2 * t + i / 2][i % 2 * 2], s[2 * t + i / 2][i % 2 * 2 + 1]);
  }

  // The turn at issuing products, which goes round the groups that have rows; group 0 has the first.
  __device__ __forceinline__ void await_turn(int groups) const {
    if (Tile::kTurns && groups > 1) named_barrier(8 + group, 256);
  }
  __device__ __forceinline__ void end_turn(int groups) const {
    if (Tile::kTurns && groups > 1) named_barrier_arrive(group + 1 == groups ? 8 : 9 + group, 256);
  }

  // groups: so many do this.
  __device__ __forceinline__ void consume(Span tiles, const Work& work, int groups, int part, Output& o) {
    const float scale = log2_scale();
    Span plain = {ceil_div(work.common.begin, kTokens), work.common.end / kTokens};  // tiles of which all rows see all tokens
    Scores s;
    Weights p;
    float factor[2];
    mbarrier_wait(keys_full(), parity);
    landed();
    uint32_t reads_bits = args.cache_kind == kPaged && lane == 0;
    asm volatile("" : "+r"(reads_bits));
    uint32_t missing = load_missing(reads_bits);
    await_turn(groups);
    keys_product(s);
    end_turn(groups);
    bool there = are_there();
    hopper::warpgroup_wait<0>();
    // The code of the softmax stands once: where prompts are short it costs more to fetch it than to run it.
#pragma unroll 1
    for (int tile = tiles.begin;;) {
      hopper::fence_accumulators(s);
      finish_scores(tile, plain, work, part, args.cache_kind != kPaged || !__any_sync(kFullWarp, missing != 0), s);
      new_maxima(s, scale, factor);
      // The product of the values before is waited for late: its registers are needed by rescaling alone.
      if (kValueWidth == 128) release(keys_empty(), kConverts, (__float_as_uint(factor[0]) | __float_as_uint(factor[1])) >> 31);
      weigh<0>(s, scale);
      if (kValueWidth > 128) {
        weigh<1>(s, scale);
        hopper::stay_behind(sum[1], query);
      }
      const bool scales = kValueWidth <= 128 || __any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f);
      hopper::warpgroup_wait<0>();
      hopper::fence_accumulators(o);
      release_values(pair == 0 ? loads.slots / 2 - 1 : pair - 1, tile > tiles.begin);
      if (scales) rescale_output(o, factor);
      if (kValueWidth <= 128) weigh<1>(s, scale);
      pack(s, p);
      const int before = pair;
      const uint32_t before_parity = parity;
      next();
      if (++tile == tiles.end) {
        mbarrier_wait(values_full(before), before_parity);
        landed();
        values_product(o, p, values(before));
        hopper::warpgroup_wait<0>();
        hopper::fence_accumulators(o);
        release_values(before);
        return;
      }
      if (!there) {
        mbarrier_wait(keys_full(), parity);
        mbarrier_wait(values_full(before), before_parity);
      }
      landed();
      missing = load_missing(reads_bits);
      await_turn(groups);
      keys_product(s);
      values_product(o, p, values(before));
      end_turn(groups);
      there = are_there();
      hopper::warpgroup_wait<1>();
    }
  }

  // Products with bytes become logits. Every lane reads: every lane gives the slot back.
  __device__ __forceinline__ void multiply_by_scales(Scores& s) const {
    const uint32_t from = ring.key_scales + (pair * kTokens + lane % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      float x, y;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from + n * 32) : "memory");
      s[n][0] *= x, s[n][1] *= y, s[n][2] *= x, s[n][3] *= y;
    }
  }

  template <class F>
  static __device__ __forceinline__ void for_few_at_a_time(Scores& s, F&& cap) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      // A branch that the compiler does not see through: otherwise it works on so many logits at once that the loop over
      // tiles loses registers to it, also where there is no softcap.
      int on;
      asm volatile("activemask.b32 %0;" : "=r"(on));
      if (on == 0) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = cap(s[n][i]);
    }
  }
  __device__ __forceinline__ void cap_scores(Scores& s) const {
    const float rate = __fdividef(fabsf(args.scale), args.softcap), softcap = args.softcap;
    float most[4] = {};
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = fmaxf(most[i], fabsf(s[n][i]));
    // A NaN may count as small: it stays one either way.
    const bool small = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) * rate < kSmallCapped;
    if (__all_sync(kFullWarp, small)) for_few_at_a_time(s, [&](float x) { return cap_small(x * rate, softcap); });
    else for_few_at_a_time(s, [&](float x) { return cap_any(x * rate, softcap); });
  }

  // Caps logits and masks those of a tile that is not plain. Gives keys back.
  __device__ __forceinline__ void finish_scores(int tile, Span plain, const Work& work, int part, bool all_there,
                                                Scores& s) const {
    if constexpr (kConverts) multiply_by_scales(s);
    const uint4 missing = missing_tokens(all_there);
    if (kValueWidth != 128) release(keys_empty(), kConverts);
    if (args.softcap > 0.0f) cap_scores(s);
    if (tile >= plain.begin && tile < plain.end && all_there) return;
    const int begin = tile * kTokens;
    const Span seen = work.seen;
    const Span rows = real_rows(work.unit, part);
    const int first = begin + lane % 4 * 2;  // the position of s[0][0] and s[0][2]
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = rows.begin + warp % 4 * 16 + lane / 4 + 8 * c;
      const RowBounds bounds = row < rows.end ? row_bounds(args, work.unit, row) : RowBounds{0, 0};
      const int low = bounds.begin - first, high = bounds.end - first;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * n + i >= high) s[n][2 * c + i] = -INFINITY;
      if (low <= 0) continue;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * n + i < low) s[n][2 * c + i] = -INFINITY;
    }
    if (!all_there) {
      const uint32_t bits[4] = {missing.x, missing.y, missing.z, missing.w};
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (bits[n / 4] >> (8 * n % 32 + lane % 4 * 2 + i % 2) & 1) s[n][i] = -INFINITY;
    }
    // Of whole tiles only what is behind the request's keys may hold anything: later tokens' values are what they are.
    const Span valid = {seen.begin, loads.whole_tiles ? work.unit.request.keys : seen.end};
    if (begin < valid.begin || begin + kTokens > valid.end || !all_there) {
      mbarrier_wait(values_full(pair), parity);
      silence_values(begin, valid, missing);
    }
  }

  // What is outside the cache's valid part may be NaN, which a weight of 0 does not silence: those tokens' values become
  // 0 in the slot. All groups do so, as each may be ahead of the others.
  __device__ __forceinline__ void silence_values(int begin, Span seen, uint4 missing) const {
    const uint32_t to = values(pair);
    const int thread = warp % 4 * 32 + lane;
    if ((missing.x | missing.y | missing.z | missing.w) == 0 && begin >= seen.begin) {  // the last tokens: lines in a row
      const int first = (seen.end - begin) * 128 + thread * 16;
#pragma unroll
      for (int box = 0; box < Tile::kValueBoxes; ++box)
#pragma unroll
        for (int i = 0; i < kTokens * 128; i += 128 * 16)
          if (first + i < kTokens * 128) store_16_bytes(to + box * kTokens * 128 + first + i, make_uint4(0, 0, 0, 0));
    } else {
#pragma unroll 1
      for (int i = thread; i < kTokens * 8 * Tile::kValueBoxes; i += 128) {
        const int token = i / (8 * Tile::kValueBoxes), chunk = i % (8 * Tile::kValueBoxes);
        const uint32_t bits = token < 64 ? token < 32 ? missing.x : missing.y : token < 96 ? missing.z : missing.w;
        if (begin + token < seen.begin || begin + token >= seen.end || (bits >> (token % 32) & 1))
          store_16_bytes(to + slot_offset<kTokens>(token, chunk), make_uint4(0, 0, 0, 0));
      }
    }
    hopper::fence_proxy_async();
    group_barrier();
  }

  __device__ __forceinline__ void group_barrier() const { named_barrier(2 + group, 128); }

  // The begin and the end of a unit

  // A part's rows of a unit: the first, and the end of those that are not padding.
  __device__ __forceinline__ Span real_rows(const Unit& unit, int part) const {
    const Span all = unit_rows(args, unit.request, unit.row_tile);
    const int begin = all.begin + Tile::kGroupRows * part;
    return {begin, min32(min32(begin + Tile::kGroupRows, all.end), args.group * unit.request.tokens)};
  }

  // A thread's 16-byte chunks of the query: the same of every kRowsApart-th row, which is at the same place of its line; of wide
  // rows also that kAcross chunks on.
  static constexpr int kChunks = 8 * Tile::kKeyBoxes, kAcross = kChunks % 16 == 0 ? 16 : 8, kRowsApart = 128 / kAcross;
  static_assert(kRowsApart % 8 == 0, "the swizzle repeats after 8 lines");
  __device__ __forceinline__ int query_row() const { return (warp % 4 * 32 + lane) / kAcross; }
  __device__ __forceinline__ int query_chunk() const { return lane % kAcross; }

  // Starts to copy the rows of a unit, 0 for padding.
  __device__ __forceinline__ void load_query(const Unit& unit, int part) const {
    if (part == Tile::kWarpgroups) return;
    const Span rows = real_rows(unit, part);
    const int row = rows.begin + query_row(), chunk = query_chunk();
    // Row = token * group + head of the group; kRowsApart rows on are step_token tokens and step_head heads on, or one token more.
    int head = row - quotient(row, args.group) * args.group;
    const int step_token = small_quotient(kRowsApart, args.group), step_head = kRowsApart - step_token * args.group;
    const Strides& strides = args.query_strides;
    const int64_t step = step_token * strides.token + step_head * strides.head,
                  carry = strides.token - args.group * strides.head;
    const T* from = static_cast<const T*>(args.query) + unit.request.origin * strides.batch +
                    (unit.head * args.group + head) * strides.head + quotient(row, args.group) * strides.token + chunk * 8;
    const uint32_t to = query + slot_offset<Tile::kGroupRows>(query_row(), chunk);
    const int left = rows.end - row, columns = args.key_width - chunk * 8;
    group_barrier();  // the previous unit's rows have been read
#pragma unroll
    for (int r = 0; r < Tile::kGroupRows; r += kRowsApart) {
#pragma unroll
      for (int c = 0; c < kChunks; c += kAcross) {
        const bool read = r < left && c * 8 < columns;
        cp_async(to + r * 128 + c / 8 * Tile::kGroupRows * 128, read ? from + c * 8 : static_cast<const T*>(args.query),
                 read ? 16 : 0);
      }
      head += step_head;
      from += step;
      if (head >= args.group) head -= args.group, from += carry;
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void begin_unit(int part, Output& o) {
    cp_async_wait();
    if (args.scale < 0.0f && part < Tile::kWarpgroups) {
#pragma unroll 1
      for (int i = 0; i < Tile::kGroupRows * kChunks / 128; ++i) {
        const int row = query_row() + i % (Tile::kGroupRows / kRowsApart) * kRowsApart;
        const int chunk = query_chunk() + i / (Tile::kGroupRows / kRowsApart) * kAcross;
        const uint32_t at = query + slot_offset<Tile::kGroupRows>(row, chunk);
        const uint4 x = load_16_bytes(at);
        store_16_bytes(at, make_uint4(x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u));
      }
    }
    hopper::fence_proxy_async();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      max[c] = -INFINITY;
      sum[c] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kValueWidth / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    group_barrier();
  }

  // Scales of values that are no tokens' are factors of the output.
  __device__ __forceinline__ void multiply_by_value_scales(int head, Output& o) const {
    const bool per_channel = args.value_scales.kind == kPerChannel;
    if (!per_channel && args.value_scales.kind != kPerTensor) return;
    const float* const scales = args.value_scales.in + (per_channel ? static_cast<int64_t>(head) * kWidth + lane % 4 * 2 : 0);
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d) {
      const float x = scales[per_channel ? 8 * d : 0], y = scales[per_channel ? 8 * d + 1 : 0];
      o[d][0] *= x, o[d][1] *= y, o[d][2] *= x, o[d][3] *= y;
    }
  }

  __device__ __forceinline__ void finish(const Work& work, int part, const Output& o) {
    const Segment& segment = work.segment;
    const Span all = unit_rows(args, work.unit.request, work.unit.row_tile);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 1);
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 2);
      if (max[c] == INFINITY) sum[c] = NAN;  // beyond float32: no weight is left
    }
    if (segment.count == 1) {
      write_output(work.unit, all, part, o);
      return;
    }
    const int columns = args.value_width;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 16 * warp + lane / 4 + 8 * c;
      if (all.begin + row >= all.end) continue;
      const int64_t at = static_cast<int64_t>(segment.slot) * Tile::kRows + row;
      float* const to = args.partial_output + at * columns + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < kValueWidth / 8; ++d)
        if (8 * d < columns) *reinterpret_cast<float2*>(to + 8 * d) = make_float2(o[d][2 * c], o[d][2 * c + 1]);
      if (lane % 4 == 0) {
        args.partial_max[at] = max[c];
        args.partial_sum[at] = sum[c];
      }
    }
    if (args.plan.merge_apart) {
      if (warp == 0 && lane == 0) note_cut(args, work.unit, segment, work.first);
      return;
    }
    if (!last_to_arrive(args.tickets + work.first, segment.count, warp * 32 + lane, kThreads)) return;
    merge_rows(work.unit, work.first, segment.count);
  }

  __device__ __forceinline__ void write_output(const Unit& unit, Span rows, int part, const Output& o) const {
    rows.begin += Tile::kGroupRows * part;
    if (rows.begin >= rows.end) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = rows.begin + warp % 4 * 16 + lane / 4 + 8 * c;
      const RowPlace place = row_place(args, unit, min32(row, rows.end - 1));
      const RowEnd<T> end = row_end<T>(args, unit, place, logit_of(max[c], log2_scale()), sum[c]);
      if (lane % 4 == 0 && row < rows.end) write_lse(args, unit, place, end.lse);
#pragma unroll
      for (int d = 0; d < kValueWidth / 8; d += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          w[i] = end.factor == 0.0f ? 0u : pack_pair(T{}, o[d + i][2 * c] * end.factor, o[d + i][2 * c + 1] * end.factor);
        transpose_quad(w, lane);
        const int column = 8 * (d + lane % 4);
        if (row < rows.end && column < args.value_width)
          *reinterpret_cast<uint4*>(end.output + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }

  // Merges the partial results of a unit in the order of their ranges and writes the rows. A warp takes kPer rows at
  // once, kAtOnce times, with two contributors on their way; a lane has 4 columns of them, of wide rows 4 of each 128, and the
  // statistics of one. As little code as can be: what runs once costs some five cycles an instruction.
  __device__ __forceinline__ void merge_rows(const Unit& unit, int first, int count) const {
    constexpr int kLanes = kValueWidth == 64 ? 16 : 32, kPer = 32 / kLanes, kAtOnce = 8, kApart = Tile::kConsumerWarps * kPer;
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    int columns = args.value_width;
    asm volatile("" : "+r"(columns));           // else its multiples are worked out before the first unit and kept in registers
    const int source = lane / kLanes * kLanes;  // the lane with the statistics of this lane's first row
#pragma unroll 1
    for (int column0 = 0; column0 < kValueWidth; column0 += 4 * kLanes) {
      const int d = column0 + lane % kLanes * 4;
      const bool in_columns = d < columns;
#pragma unroll 1
      for (int row0 = rows.begin + warp * kPer + lane / kLanes; row0 - lane / kLanes < rows.end; row0 += kApart * kAtOnce) {
        const int mine = row0 + lane % kLanes % kAtOnce * kApart;
        float4 o[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) o[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float top = -INFINITY, total = 0.0f;
#pragma unroll 1
        for (int i0 = 0; i0 < count; i0 += 2) {
          float4 part[2][kAtOnce];
          float part_max[2], part_sum[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool there = i0 + i < count;
            const int64_t slot = static_cast<int64_t>(slot_of(first, i0 + i)) * Tile::kRows;
            const float* const from = args.partial_output + (slot + row0 - rows.begin) * columns + d;
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
              part[i][r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
              if (there && in_columns && row0 + r * kApart < rows.end)
                part[i][r] = __ldcg(reinterpret_cast<const float4*>(from + r * kApart * columns));
            }
            part_max[i] = -INFINITY;
            part_sum[i] = 0.0f;
            if (there && mine < rows.end) {
              part_max[i] = __ldcg(args.partial_max + slot + mine - rows.begin);
              part_sum[i] = __ldcg(args.partial_sum + slot + mine - rows.begin);
            }
          }
          const float now = fmaxf(top, fmaxf(part_max[0], part_max[1]));
          const float old = rescale(top, now), share[2] = {rescale(part_max[0], now), rescale(part_max[1], now)};
          total = total * old + share[0] * part_sum[0] + share[1] * part_sum[1];
          top = now;
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) {
            const float f = __shfl_sync(kFullWarp, old, source + r), f0 = __shfl_sync(kFullWarp, share[0], source + r),
                        f1 = __shfl_sync(kFullWarp, share[1], source + r);
            o[r].x = o[r].x * f + f0 * part[0][r].x + f1 * part[1][r].x;
            o[r].y = o[r].y * f + f0 * part[0][r].y + f1 * part[1][r].y;
            o[r].z = o[r].z * f + f0 * part[0][r].z + f1 * part[1][r].z;
            o[r].w = o[r].w * f + f0 * part[0][r].w + f1 * part[1][r].w;
          }
        }
        const RowPlace place = row_place(args, unit, min32(mine, rows.end - 1));
        const RowEnd<T> end = row_end<T>(args, unit, place, logit_of(top, log2_scale()), total);
        if (column0 == 0 && lane % kLanes < kAtOnce && mine < rows.end) write_lse(args, unit, place, end.lse);
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          const float f = __shfl_sync(kFullWarp, end.factor, source + r);
          T* const to = reinterpret_cast<T*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(end.output), source + r)) + d;
          uint2 w = make_uint2(pack_pair(T{}, o[r].x * f, o[r].y * f), pack_pair(T{}, o[r].z * f, o[r].w * f));
          if (f == 0.0f) w = make_uint2(0, 0);
          if (in_columns && row0 + r * kApart < rows.end) *reinterpret_cast<uint2*>(to) = w;
        }
      }
    }
  }
};

#endif

template <class T, int kWidth, bool kConverts, int kValueWidth>
__global__ void __launch_bounds__(WgmmaTile<kWidth, kConverts, kValueWidth>::kThreads, 1)
    WgmmaKernel(const __grid_constant__ Args launch_args, const __grid_constant__ TileLoads loads,
                const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = WgmmaTile<kWidth, kConverts, kValueWidth>;
  Args args = launch_args;   // so that the compiler knows the plan's constants
  args.lone_tokens = false;  // never here
  args.plan.key_tile = Tile::kTokens;
  args.plan.row_tile = Tile::kRows;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0),
            lane = threadIdx.x % 32;  // so that the compiler sees it uniform
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* at = base + Tile::slot_at(loads.slots);
  const uint32_t query = shared_address(at);
  at += Tile::kQueryBytes;
  RingAddresses ring;
  ring.slots = shared_address(base);
  ring.queue = reinterpret_cast<Work*>(at);
  ring.queue_full = shared_address(at + kQueue * sizeof(Work));
  ring.queue_empty = ring.queue_full + 8 * kQueue;
  at += Tile::kQueueBytes;
  ring.full = shared_address(at);
  ring.empty = ring.full + 8 * loads.slots;
  at += 16 * loads.slots;
  ring.masked_out = reinterpret_cast<uint16_t*>(at);
  at += 2 * Tile::kSlices * loads.slots;
  if constexpr (kConverts) {
    ring.key_scales = shared_address(at);
    at += Tile::kTokens * 2 * loads.slots;
    ring.stage = shared_address(at);
  }

  // Producers make the barriers and then go ahead; consumers wait until that is done and, if units are dealt, the first is told.
  if (warp >= Tile::kConsumerWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    const int of_producers = warp - Tile::kConsumerWarps;
    if (lane == 0) {
      if (loads.tensor_maps) {
        hopper::prefetch_map(&key_map);
        hopper::prefetch_map(&value_map);
      }
#pragma unroll 1
      for (int i = of_producers; i < 2 * kQueue + 2 * loads.slots; i += Tile::kProducerWarps) {
        const int of_ring = i - 2 * kQueue;
        const int readers = Tile::kConsumerWarps + loads.copy_warps - (loads.copy_warps < 4 ? 0 : 1);  // who publishes does not
        const int count = of_ring >= loads.slots ? 32 * Tile::kTileWarps
                          : of_ring >= 0         ? (kConverts ? 32 : kFillArrivals) * loads.fill_warps
                          : i < kQueue           ? 1
                                                 : 32 * readers;
        mbarrier_init(ring.queue_full + 8 * i, count);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    named_barrier(5, 32 * Tile::kProducerWarps);  // of producers alone
    TileProducer<T, Tile, false> producer{args,
                                          loads,
                                          &key_map,
                                          &value_map,
                                          ring,
                                          of_producers,
                                          loads.copy_warps,
                                          lane,
                                          of_producers < loads.copy_warps,
                                          of_producers == 3,
                                          RingPlace(0, loads.slots),
                                          RingPlace(0, loads.slots)};
    if (!producer.publishes) named_barrier_arrive(0, Tile::kThreads);
    Range<int32_t> range;
    bool exists;
    if (!deal_first(args, blockIdx.x, range, exists))
      exists = locate_range<int32_t>(args, blockIdx.x, num_row_tiles(args), range);
    if (producer.publishes) {
      producer.told = range.dealt && exists;
      if (producer.told) producer.note(range.unit, whole_segment(range.unit, range.index), false, 0);
      named_barrier_arrive(0, Tile::kThreads);
      if (producer.told && lane == 0) mbarrier_arrive(ring.queue_full);
    }
    producer.run(range, exists);
  } else {
    if (!kConverts && args.append)
      append_all<T, uint4>(launch_args, static_cast<int64_t>(blockIdx.x) * Tile::kConsumerWarps + warp,
                           static_cast<int64_t>(gridDim.x) * Tile::kConsumerWarps);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kConsumerRegisters));
    named_barrier(0, Tile::kThreads);
    const int group = warp / 4;
    const uint32_t own_query = query + group * Tile::kGroupRows * Tile::kKeyBoxes * 128;
    WarpgroupConsumer<T, kWidth, kConverts, kValueWidth> consumer{args, loads, ring, own_query, group, warp, lane};
    consumer.run();
  }
#endif
}

// Launches the kernel for one element type and widths (those of for_wgmma_widths, at least D and Dv; kConverts: 64, 128 or 256, D and
// Dv); args.plan holds the tile. Compiled by wgmma_launch.cu.in, a source file a type.
template <class T, int kWidth, bool kConverts, int kValueWidth>
int launch_wgmma(const Args& args, const TileLoads& loads, const CUtensorMap& key_map, const CUtensorMap& value_map,
                 void* stream);

}  // namespace leanfleet::lean_attention
