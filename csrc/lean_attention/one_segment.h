// When LeanAttention's steps over short contexts run on OneSegmentKernel (direct_kernel.cuh), and how it cuts units: what each of a
// few ways is expected to take, from what a host knows. No CUDA, so that tests have it too.
//
// The constants are fitted by python -m bench.kernels.one_segment on an H200; other devices run as its SMs do.
#pragma once

#include <cmath>
#include <iterator>

#include "lean_attention/schedule.h"

namespace leanfleet::lean_attention {

// Warps of a CTA, of which an SM has one, and of a small one; quantised caches have small ones alone.
LEANFLEET_HD constexpr int one_segment_warps(int width, bool small) { return small ? 4 : width > 128 ? 8 : 12; }
// Bits of a cache's number. Where keys are int4, all are that have these kernels.
inline int cache_bits(const Args& args) {
  return args.key_scales.kind == kNoScale ? 16 : args.key_scales.form == kInt4 ? 4 : 8;
}
// Tokens that a warp reads at once, and a CTA.
LEANFLEET_HD constexpr int warp_tokens(int width, int bits) { return width * bits <= 64 * 16 ? 32 : 16; }
LEANFLEET_HD constexpr int one_segment_tokens(int width, bool small, int bits) {
  return one_segment_warps(width, small) * warp_tokens(width, bits);
}
LEANFLEET_HD constexpr int one_segment_ctas(int width, bool small) { return !small ? 1 : width > 128 ? 2 : 3; }  // of an SM
// Bytes of shared memory of a CTA, at most.
constexpr int one_segment_shared_bytes(int width, int rows, bool small, bool in_cluster) {
  const int warps = one_segment_warps(width, small);
  const int inbox = in_cluster ? (rows * width / 4 + 16) * 24 : 16, staged = 3 * rows * (width + 8) * 2;
  return inbox + staged + 8 * rows + 2 * rows * warps * 4 + 8 + rows + 15 + warps * rows * (width + 4) * 4;
}
// Rows of a unit. width: columns of a row, or of the registers for them.
inline int one_segment_rows(int width, int rows, bool narrow) { return rows <= 8 || width > 128 || narrow ? 8 : 16; }

// CTAs of a unit: so many, a cluster if several; or as many as all run at once, of which the last to end merges the unit.
constexpr int kAllAtOnce = 0;
struct OneSegmentWay {
  bool small;
  int parts;
};
constexpr OneSegmentWay kOneSegmentWays[] = {{true, 1}, {false, 1}, {false, 2}, {false, 4},          {false, 8},
                                             {true, 4}, {true, 8},  {true, 16}, {false, kAllAtOnce}, {true, kAllAtOnce}};
constexpr int kMostParts = 64, kLeastKeys = 64;  // of a unit, of a part

// Where lengths are known on the device alone, the estimates count on so many keys of those that there is room for, on average: where
// a unit may have more than others, and where a schedule evens that out.
constexpr double kMeanOfWhole = 0.6, kMeanOfCut = 0.4;

// What the estimates take of a call. A ragged cache has room for the keys of all in each context.
struct ShortCall {
  int width;         // columns in all registers: 64, 128 or 256
  int rows;          // of a request's key/value head
  double units;      // pairs of a request and a key/value head
  double keys;       // of a context, at most
  double megabytes;  // of all, if all have so many
  bool known;        // they have
  int bits;          // of a number
  bool narrow;       // quantised caches
};

inline ShortCall short_call(const Args& args, int width) {
  ShortCall call = {};
  call.width = width;
  call.rows = args.group * args.tokens;
  call.units = static_cast<double>(args.batch) * args.kv_heads;
  call.keys = args.capacity;
  call.bits = cache_bits(args);
  call.narrow = call.bits < 16;
  call.megabytes = call.units * call.keys * 1e-6 * (args.key_width + args.value_width) * call.bits / 8;
  call.known = args.seq_lens == nullptr && args.cache_kind == kDense;
  return call;
}
inline int one_segment_rows(const ShortCall& call) { return one_segment_rows(call.width, call.rows, call.narrow); }

// CTAs of a unit.
inline int one_segment_parts(const ShortCall& call, OneSegmentWay way, int sm_count) {
  if (way.parts != kAllAtOnce) return way.parts;
  const double units = std::fmax(call.units * ceil_div(call.rows, one_segment_rows(call)), 1.0);
  const double at_once = std::floor(sm_count * one_segment_ctas(call.width, way.small) / units);
  const double parts = std::fmin(std::fmin(at_once, std::floor(call.keys / kLeastKeys)), kMostParts);
  return parts < 1.0 ? 1 : static_cast<int>(parts);
}

// Rounds of reads that the CTAs of a unit take.
inline double one_segment_rounds(const ShortCall& call, bool small, int parts) {
  const double rounds = call.keys / (parts * one_segment_tokens(call.width, small, call.bits));
  return rounds < 1.0 ? 1.0 : rounds;
}

// Fitted to caches of 16 bits and to quantised ones, in microseconds. The latter have no large CTAs, nor units of 16 rows.
struct OneSegmentCosts {
  double start[std::size(kOneSegmentWays)];
  double round[2][3], next_cta[2];  // of large and small CTAs, by width
  double many_rows;                 // of a round, with units of 16 rows
  double again_per_us;              // megabytes that the second and later units of a head read
};
struct ScheduledCosts {
  double start[5], tile[5], next_unit[2], unknown, read_per_us;  // by rows and width; megabytes
};
constexpr OneSegmentCosts kOneSegmentCosts[] = {{{9.08, 9.02, 9.86, 9.82, 11.01, 10.95, 11.65, 14.21, 12.84, 12.50},
                                                 {{1.59, 1.35, 2.00}, {1.19, 1.14, 1.67}},
                                                 {3.88, 5.16},
                                                 1.54,
                                                 15.3},
                                                {{8.04, 9.36, 10.33, 10.28, 11.53, 9.43, 9.26, 10.16, 12.00, 12.53},
                                                 {{1.50, 1.20, 1.83}, {1.04, 2.22, 1.85}},
                                                 {4.13, 4.25},
                                                 1.54,
                                                 15.3}};
constexpr ScheduledCosts kScheduledCosts[] = {
    {{13.88, 16.49, 22.87, 22.06, 28.75}, {0.23, 0.02, 0.38, 0.34, 0.51}, {6.63, 5.37}, 6.40, 19.0},
    {{11.48, 18.49, 23.3, 15.28, 28.75}, {0.26, 0.02, 0.40, 0.34, 0.55}, {4.70, 0.03}, 3.79, 6.23}};

// Microseconds of OneSegmentKernel.
inline double one_segment_us(const ShortCall& call, int way, int sm_count) {
  const OneSegmentCosts& costs = kOneSegmentCosts[call.narrow];
  const bool small = kOneSegmentWays[way].small, at_once = kOneSegmentWays[way].parts == kAllAtOnce;
  const int parts = one_segment_parts(call, kOneSegmentWays[way], sm_count);
  const int row_tile = one_segment_rows(call), row_tiles = ceil_div(call.rows, row_tile);
  const int per_sm = one_segment_ctas(call.width, small);
  // Clusters stand in groups of 16 SMs or some more.
  const double slots =
      parts == 1 || at_once ? sm_count * per_sm : 16 * per_sm / parts * parts * (sm_count < 18 ? 1 : sm_count / 18);
  const double waves = call.units * row_tiles * parts / slots, quantised = (waves + std::ceil(waves)) / 2;
  const double rounds = one_segment_rounds(call, small, parts), mean = call.known ? 1.0 : kMeanOfWhole;
  const int width = call.width == 64 ? 0 : call.width == 128 ? 1 : 2;
  const double round = costs.round[small][width] * (row_tile > 8 ? costs.many_rows : 1.0);
  const double each = std::fmax(rounds * mean, 1.0) * round + costs.next_cta[small];
  const double through = waves > 1.0 ? quantised * each - costs.next_cta[small] : 0.0;
  const double us = costs.start[way] + std::fmax(rounds * round, through);
  return std::fmax(us, call.megabytes * mean * (row_tiles - 1) / costs.again_per_us);
}

// Microseconds of the other kernels.
inline double scheduled_us(const ShortCall& call, int sm_count) {
  const ScheduledCosts& costs = kScheduledCosts[call.narrow];
  const bool wide = call.width > 128;
  const double mean = call.known ? 1.0 : kMeanOfCut;
  const int kind = wide ? (call.rows <= 8 ? 3 : 4) : call.rows <= 8 ? 0 : call.rows <= 16 ? 1 : 2;
  const double row_tiles = call.rows > 64 && (kind == 2 || kind == 4) ? call.rows / 64.0 : 1.0;
  const double tiles = call.units * call.keys * mean / 64 / sm_count * row_tiles, units = call.units / sm_count;
  return costs.start[kind] + std::fmax(call.megabytes * mean / costs.read_per_us, tiles * costs.tile[kind]) +
         (units > 1.0 ? (units - 1.0) * costs.next_unit[kind > 1] : 0.0) + (call.known ? 0.0 : costs.unknown);
}

// Whether one of the ways can be had, whatever it takes. Of new tokens a CTA keeps as many as rows.
inline bool can_be_one_segment(const Args& args) {
  const int64_t rows = static_cast<int64_t>(args.group) * args.tokens;
  const int width = args.key_width > args.value_width ? args.key_width : args.value_width;
  const bool narrow = cache_bits(args) < 16;  // the launch before appends
  return rows <= 128 && (!args.append || narrow || args.tokens <= one_segment_rows(width, static_cast<int>(rows), narrow));
}

// What a device has.
struct OneSegmentDevice {
  int sm_count;
  bool clusters;
  int shared_bytes;  // of a CTA
};

inline bool can_take(const OneSegmentDevice& device, const ShortCall& call, OneSegmentWay way) {
  const bool in_cluster = way.parts != 1 && way.parts != kAllAtOnce;
  if (call.narrow ? !way.small : way.small && way.parts == kAllAtOnce) return false;  // not compiled
  return (device.clusters || !in_cluster) &&
         one_segment_shared_bytes(call.width, one_segment_rows(call), way.small, in_cluster) <= device.shared_bytes;
}

// The way that is expected to be done soonest; -1: the other kernels are, or may be nearly as soon.
inline int choose_one_segment(const Args& args, int width, const OneSegmentDevice& device) {
  // The estimates have seen too little beyond these.
  constexpr double kMostCtas = 1 << 20, kMostInClusters = 8192, kMostRounds = 8.0, kMostWideRounds = 32.0, kNearly = 0.9;
  if (!can_be_one_segment(args)) return -1;
  const ShortCall call = short_call(args, width);
  // Wide quantised heads with more rows than DirectKernel takes have only the kernel with a ring beside these, which is slow.
  const bool wide = call.narrow && call.width > 128 && call.rows > one_segment_rows(call);
  const double most_rounds = wide ? kMostWideRounds : kMostRounds;
  const int row_tiles = ceil_div(call.rows, one_segment_rows(call));
  double least = kNearly * scheduled_us(call, device.sm_count);
  int chosen = -1;
  for (int way = 0; way < static_cast<int>(std::size(kOneSegmentWays)); ++way) {
    const OneSegmentWay taken = kOneSegmentWays[way];
    const int parts = one_segment_parts(call, taken, device.sm_count);
    if (call.units * row_tiles * parts > kMostCtas || one_segment_rounds(call, taken.small, parts) > most_rounds) continue;
    if (parts > 1 && (call.units * parts > kMostInClusters || call.keys < kLeastKeys * parts)) continue;
    if ((taken.parts == kAllAtOnce && parts == 1) || !can_take(device, call, taken)) continue;
    const double us = one_segment_us(call, way, device.sm_count);
    if (us < least) least = us, chosen = way;
  }
  return chosen;
}

// The plan of a way. max_ranges is for the kernel without tensor cores, which takes tensors that are not aligned, and for the parts
// of units that the last to end merges.
inline Plan one_segment_plan(const Args& args, int width, int way, int sm_count) {
  const ShortCall call = short_call(args, width);
  const bool at_once = kOneSegmentWays[way].parts == kAllAtOnce;
  Plan plan = {};
  plan.directly = cache_bits(args) < 16;
  plan.row_tile = one_segment_rows(width, args.group * args.tokens, plan.directly);
  plan.key_tile = warp_tokens(width, cache_bits(args));
  plan.max_ranges = sm_count;
  plan.min_range_work = 1;
  plan.one_segment = one_segment_parts(call, kOneSegmentWays[way], sm_count);
  plan.small_ctas = kOneSegmentWays[way].small;
  plan.last_merges = at_once;
  if (at_once)
    plan.max_ranges = max32(sm_count, args.batch * args.kv_heads * num_row_tiles(args, plan.row_tile) * plan.one_segment);
  return plan;
}

}  // namespace leanfleet::lean_attention
