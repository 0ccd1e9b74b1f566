// LeanAttention on tensor cores for float16 and bfloat16: one persistent CTA per SM and range of the
// schedule. A producer streams key and value tiles through a ring of shared-memory slots, by TMA
// where there is one (sm_90) and by cp.async otherwise, and runs ahead of the consumers across units; consumer warps
// compute with mma.sync.
//
// Two ways to share a tile among consumer warps:
//   up to 16 rows    8 warps, each with its own tokens of every second tile and softmax statistics of its own, merged
//                    once a segment. The products are transposed, S^T = K Q^T and O^T = V^T P^T, so that a decode step's few
//                    rows stand on the side of the mma that is 8 wide and not on the one that is 16 wide.
//   up to 128 rows   8 warps, each with its own 16 rows and all tokens. On sm_90a wgmma_kernel.cuh has these.
//
// The producer alone reads the schedule; it passes each segment, with the query rows of few, to the consumers through a queue
// in shared memory.
//
// Partial results of a unit of up to 16 rows meet in shared memory where all its ranges are CTAs of one cluster: each
// CTA sends its part to the CTA that merges it. Launches are clustered where few units of equal length are likely; any
// other unit, and every unit if the lengths turn out to differ, is merged by its last contributor, through global memory.
//
// A slot holds the keys or the values of one tile as lines of 64 columns, 128 bytes: [box of columns][token], or
// [token][box] where whole rows of several boxes come in one copy, which reads memory in longer pieces. The 16-byte
// chunk c of line n stands at place c ^ (n % 8): TMA's 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "lean_attention/cluster.cuh"
#include "lean_attention/narrow.cuh"

namespace leanfleet::lean_attention {

constexpr int kBoxColumns = 64;      // 128 bytes, the span of the swizzle
constexpr int kConvertingWarps = 8;  // that make tiles of T of quantised caches, one half keys and the other values

struct TileLoads {
  bool tensor_maps;                // keys and values come through the maps below
  int32_t box_tokens;              // tokens of one copy; divides the key tile
  int32_t boxes;                   // copies for the tokens of a tile
  int32_t box_slices;              // box_tokens / 16
  bool whole_rows;                 // lines stand as [token][box]: a copy brings all columns
  int32_t slots;                   // of the ring
  int32_t key_boxes, value_boxes;  // lines of 64 columns in a row
  bool whole_tiles;    // every tile is one copy of keys and one of values, nothing is gathered or looked up; the warp that
                       // copies appends
  int32_t copy_warps;  // producer warps that copy: 1, 2 (of whole tiles, one keys, one values), 4 or kConvertingWarps
  int32_t fill_warps;  // those that fill a slot together: all of them, of those that convert half, or one
  bool stream_once;    // no other unit reads the same keys: they need not stay in the L2 cache
  bool clusters;       // CTAs may be launched in clusters
  int32_t cluster;     // CTAs of a cluster; 1: they are launched on their own
};

// A segment, as the consumers get it from the producer.
struct Work {
  Unit unit;
  Segment segment;
  int32_t first;    // the range that begins the unit
  int32_t last;     // not 0: there is no more work, the rest is not set
  bool in_cluster;  // all contributors are CTAs of this CTA's cluster
  int32_t taker;    // WgmmaKernel: the group that takes all of the unit; -1: each has its part
  Span seen;        // keys that at least one row of the unit sees
  Span common;      // keys that all its rows see, padding aside
};
constexpr int kQueue = 4;  // segments that the producer may be ahead

template <int kWidth, int kUnitRows>
struct MmaTile {
  static constexpr int kRows = kUnitRows;
  static constexpr bool kSplitTokens = kRows <= 16;
  static constexpr bool kDeals = false, kConverts = false;
  using Position = std::conditional_t<kSplitTokens, uint32_t, int64_t>;
  static constexpr int kTokens = kWidth == 64 ? 128 : 64;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kTileWarps = kSplitTokens ? 4 : 8;  // that share a tile
  // Groups of warps take tiles in turn, each from a ring of its own: who waits for one phase of a barrier out of two
  // cannot tell them apart.
  static constexpr int kGroups = kConsumerWarps / kTileWarps;
  static constexpr int kMaxThreads = 32 * (kConsumerWarps + 4);  // at most 4 producer warps
  // Arrivals of a consumer warp that has read a slot. Warps of many rows arrive with every lane on Hopper: the order of
  // one lane's arrival after __syncwarp is as good, but racecheck does not follow it.
#if __CUDA_ARCH__ >= 900
  static constexpr int kReaderArrivals = kSplitTokens ? 1 : 32;
#else
  static constexpr int kReaderArrivals = 1;
#endif
  static constexpr int kSlotBytes = kTokens * kWidth * 2;
  static constexpr int kQueryBytes = kSplitTokens ? 0 : kRows * kWidth * 2;
  static constexpr int kScratchStride = kWidth + 4;  // floats; two rows apart is 8 banks apart
  static constexpr int kScratchBytes = kSplitTokens ? 8 * 8 * kScratchStride * 4 + 2 * 8 * kRows * 4 : 0;
  static constexpr int kSlices = kTokens / 16;
  // The query's rows of a segment, kQueryStride elements apart: a row is 4 banks from the one before.
  static constexpr int kQueryStride = kWidth + 8;
  static constexpr int kQueuedQueryBytes = kSplitTokens ? kRows * kQueryStride * 2 : 0;
  static constexpr int kInboxItems = kSplitTokens ? inbox_items(kRows, kWidth) : 0;
  static constexpr int kInboxBytes = kInboxItems * kInboxItemBytes;
  // Per slot: two barriers and a bit per token.
  static constexpr int kSlotExtra = 16 + kSlices * 2;
  static constexpr int kQueueBytes = kQueue * (static_cast<int>(sizeof(Work)) + kQueuedQueryBytes + 16);
  // 16: a barrier for the inbox; 1024: to align the ring.
  static constexpr int kFixedBytes = kQueryBytes + kScratchBytes + kInboxBytes + kQueueBytes + 16 + 1024;
  static __host__ __device__ constexpr int slot_at(int slot) { return slot * kSlotBytes; }
  static int slots_for(int shared_bytes) {
    const int slots = (shared_bytes - kFixedBytes) / (kSlotBytes + kSlotExtra);
    return (slots < 12 ? slots : 12) / kGroups * kGroups;
  }
  static int shared_bytes(int slots) { return kFixedBytes + slots * (kSlotBytes + kSlotExtra); }
};

// Arrives once this thread's earlier cp.async have landed.
__device__ __forceinline__ void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrivals of a producer warp that fill a slot: each lane when its copies have landed, and the warp for what it has
// stored itself.
constexpr int kFillArrivals = 33;

// The byte of a 16-byte chunk of a line.
__device__ __forceinline__ uint32_t line_offset(int line, int chunk) { return line * 128 + (chunk ^ (line % 8)) * 16; }

// The byte of 16-byte chunk `chunk` of a token's row, in lines ordered [box][token].
template <int kTokens>
__device__ __forceinline__ uint32_t slot_offset(int token, int chunk) {
  return line_offset(chunk / 8 * kTokens + token, chunk % 8);
}

// A place in a ring of the slots [begin, end) and the parity of the barrier phase that comes next there.
struct RingPlace {
  int begin, end, slot;
  uint32_t parity;
  __device__ __forceinline__ RingPlace(int begin, int end) : begin(begin), end(end), slot(begin), parity(0) {}
  __device__ __forceinline__ void next() {
    if (++slot == end) slot = begin, parity ^= 1;
  }
  __device__ __forceinline__ void back() {
    if (slot == begin) slot = end, parity ^= 1;
    --slot;
  }
};

struct RingAddresses {
  uint32_t slots, full, empty;  // shared addresses; barriers are 8 bytes apart
  uint32_t queue_full, queue_empty;
  Work* queue;
  char* queries;         // [kQueue][kQueuedQueryBytes]
  uint16_t* masked_out;  // [slots][kTokens / 16] paged caches: a bit for each token without a page
  // Where quantised caches are converted: bytes of keys and of values on their way, [2][kTokens * kWidth], and the keys' scales,
  // [slots / 2][kTokens] floats.
  uint32_t stage, key_scales;
};

#if __CUDA_ARCH__ >= 900
// All of a warp's arrivals; the phase also waits for `bytes` of TMA.
__device__ __forceinline__ void warp_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.release.cta.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
               "n"(kFillArrivals)
               : "memory");
}

// All columns of some tokens, as [token][box][64].
__device__ __forceinline__ void tma_load_rows(uint32_t to, const CUtensorMap* map, int token, int head, int outer,
                                              uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(0), "r"(token), "r"(head), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load_box(uint32_t to, const CUtensorMap* map, int column, int token, int head, int outer,
                                             uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(column), "r"(token), "r"(head), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}
#endif

// Fills the ring with the tiles of the range, keys and values in turn, and the queue with its segments.
// kRope: new keys get their rotary embedding.
template <class T, class Tile, bool kRope>
struct TileProducer {
  const Args& args;
  const TileLoads& loads;
  const CUtensorMap* key_map;
  const CUtensorMap* value_map;
  const RingAddresses& ring;
  int warp, warps, lane;                    // of the warps that copy
  bool copies, publishes;                   // what this warp does
  RingPlace place, waiting;                 // of the group whose turn it is, and of the other
  int turn = 0;                             // tiles so far, where warps take them in turn
  int taker = 0;                            // the group whose turn it is at a whole unit of one group's rows
  bool told = false;                        // the consumers know of the first segment
  RingPlace queued = RingPlace(0, kQueue);  // the place of the queue that this warp comes to next

  static constexpr int kTokens = Tile::kTokens;
  static constexpr bool kQueuesQuery = Tile::kSplitTokens && !kRope;

  // `exists`: the range holds work; else only the end of the queue is told.
  template <class P>
  __device__ __forceinline__ void run(const Range<P>& range, bool exists) {
    if (!copies && !publishes) return;
#if __CUDA_ARCH__ >= 900
    uint64_t policy;
    if (loads.stream_once) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    if (!Tile::kConverts && loads.whole_tiles && copies) {
      if (exists)
        for_each(range, [&](const Unit& unit, const Share& share) {
          if constexpr (Tile::kGroups == 1) copy_half_of_whole_tiles(unit, share.tiles, policy);
          else copy_whole_tiles(unit, share.tiles, policy);
        });
      return;
    }
#endif
    if (exists)
      for_each(range, [&](const Unit& unit, const Share& share) {
        if (publishes) publish(unit, segment_of(args, range, unit, share), range.parts > 0);
        if (!copies) return;
        if constexpr (Tile::kConverts) return convert_tiles(unit, share.tiles);
#if __CUDA_ARCH__ >= 900
        if constexpr (Tile::kGroups == 1) {
          if (loads.fill_warps < warps) return copy_tiles_of_pages(unit, share.tiles, policy);
        }
#endif
        const Span keys = unit_keys(args, unit.request, unit.row_tile);
        // Rows that this launch appends come from new_key and new_value: other CTAs may be writing them.
        const int new_begin = args.append ? unit.request.keys - unit.request.tokens : INT32_MAX;
        const int box_tokens = loads.box_tokens, boxes = loads.boxes;
        const bool paged = args.cache_kind == kPaged;
        // Page ids of 32 boxes in a row, a lane each, and of the next 32.
        const auto page_of_box = [&](int64_t box) {
          const int64_t token = box * box_tokens;
          if (token >= keys.end || box < 0) return -1;
          const int page = args.block_table[static_cast<int64_t>(unit.request.b) * args.pages_per_request + token / args.block];
          return static_cast<unsigned>(page) < static_cast<unsigned>(args.num_pages) ? page : -1;
        };
        int pages = -1, next_pages = -1;
        const int64_t first_box = static_cast<int64_t>(share.tiles.begin) * boxes;
        if (loads.tensor_maps && paged) {
          pages = page_of_box(first_box + lane);
          next_pages = page_of_box(first_box + 32 + lane);
        }
        int box_of_window = 0;
#pragma unroll 1
        for (int tile = share.tiles.begin; tile < share.tiles.end; ++tile) {
          const int begin = tile * kTokens;
          const bool through_maps = loads.tensor_maps && (!args.append || begin + kTokens <= new_begin);
          if (through_maps) {
#if __CUDA_ARCH__ >= 900
            // Lane j issues the copies of box j of the tile, in copying warp j % warps.
            int outer = args.cache_kind == kDense ? unit.request.b : 0;
            int token = unit.request.start + begin + lane * box_tokens;
            bool wanted = lane < boxes && (lane & (warps - 1)) == warp && begin + lane * box_tokens < keys.end;
            if (paged) {
              outer = __shfl_sync(kFullWarp, pages, (box_of_window + lane) % 32);
              token = (begin + lane * box_tokens) % args.block;
              wanted = wanted && outer >= 0;
            }
            const unsigned issue = __ballot_sync(kFullWarp, wanted);
            copy_boxes(key_map, loads.key_boxes, unit.head, token, outer, issue, paged, policy);
            copy_boxes(value_map, loads.value_boxes, unit.head, token, outer, issue, false, policy);
#endif
          } else {
            gather_tile(unit, keys, begin, new_begin);
          }
          next_group();
          if (loads.tensor_maps && paged) {
            box_of_window += boxes;
            if (box_of_window == 32) {
              box_of_window = 0;
              pages = next_pages;
              next_pages = page_of_box((tile + 1) * static_cast<int64_t>(boxes) + 32 + lane);
            }
          }
        }
      });
    if (publishes) {
      mbarrier_wait(ring.queue_empty + queued.slot * 8, queued.parity ^ 1);
      if constexpr (kQueuesQuery) mbarrier_arrive_after_cp_async(ring.queue_full + queued.slot * 8);
      if (lane == 0) {
        ring.queue[queued.slot].last = 1;
        mbarrier_arrive(ring.queue_full + queued.slot * 8);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // Calls body(unit, share) for every part of a unit that the range holds, or for every whole unit that is dealt to this CTA. Warps
  // that copy and do not publish hold the places of the queue as consumers do, and read there what units they are dealt.
  template <class P, class F>
  __device__ __forceinline__ void for_each(const Range<P>& range, F&& body) {
    if constexpr (Tile::kDeals) {
      Unit unit = range.unit;
      RingPlace begun(0, kQueue);                                  // the unit before those that were told last
      int ahead = unit.tiles.end - unit.tiles.begin <= 2 ? 2 : 1;  // sooner done than the next one is taken
      if (args.group * args.tokens <= Tile::kGroupRows)
        ahead = min32(ahead + Tile::kWarpgroups - 1, kQueue - 1);  // many at once
#pragma unroll 1
      for (int turn = 1;; ++turn) {
        Share share = {unit.tiles, true, true};
        if (!range.dealt) share = share_of(args, unit, range.begin, range.end);
        if (share.contributes) {
          body(unit, share);
          if (!publishes) {
            // They may be ahead of the queue, with units without tiles by more than it holds.
            mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
            mbarrier_arrive(ring.queue_empty + queued.slot * 8);
            queued.next();
          }
        }
        if (!range.dealt) {
          if (static_cast<P>(unit_end(args, unit)) >= range.end) return;
          next_unit<true>(args, unit);
        } else if (publishes) {
          // A unit is taken when the consumers begin the one before, or that before it: who is behind takes fewer.
          if (turn > ahead) {
            mbarrier_wait(ring.queue_empty + begun.slot * 8, begun.parity);
            begun.next();
          }
          if (!take(args, range.index, turn, unit)) return;
        } else {
          mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
          if (ring.queue[queued.slot].last != 0) return;
          unit = ring.queue[queued.slot].unit;
        }
      }
    } else {
      for_each_share(args, range, body);
    }
  }

  // Tells the consumers of a segment and starts to copy its query rows. Queries that need a rotary embedding they read themselves: a warp that
  // copies cannot wait for what it would have to rotate.
  __device__ __forceinline__ void publish(const Unit& unit, const Segment& segment, bool equal) {
    if (!told) {
      mbarrier_wait(ring.queue_empty + queued.slot * 8, queued.parity ^ 1);
      if constexpr (kQueuesQuery) {
        queue_query(unit, shared_address(ring.queries + queued.slot * Tile::kQueuedQueryBytes));
        mbarrier_arrive_after_cp_async(ring.queue_full + queued.slot * 8);
      }
      note(unit, segment, equal, queued.slot);
      if (lane == 0) mbarrier_arrive(ring.queue_full + queued.slot * 8);
      __syncwarp();
    }
    told = false;
    queued.next();
  }

  __device__ __forceinline__ void note(const Unit& unit, const Segment& segment, bool equal, int slot) {
    const RowsKeys keys = keys_of_tokens(args, unit.request, unit_tokens(args, unit.request, unit.row_tile));
    Work& work = ring.queue[slot];
    if constexpr (Tile::kDeals) {
      const Span rows = unit_rows(args, unit.request, unit.row_tile);
      const bool by_one = segment.count == 1 && rows.end - rows.begin <= Tile::kGroupRows;
      if (lane == 0) work.taker = by_one ? taker : -1;
      if (by_one) taker = taker + 1 == Tile::kWarpgroups ? 0 : taker + 1;
    }
    if (lane != 0) return;
    work.unit = unit;
    work.segment = segment;
    work.first = first_contributor(segment);
    work.last = 0;
    work.in_cluster = equal && segment.count > 1 && work.first % loads.cluster + segment.count <= loads.cluster;
    work.seen = keys.seen;
    work.common = keys.common;
  }

  // A unit's rows, with zeros for padding and beyond D.
  __device__ __forceinline__ void queue_query(const Unit& unit, uint32_t to) {
    constexpr int kChunks = Tile::kQueryStride / 8 - 1;  // of a row
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    const int real_rows = min32(rows.end, args.group * unit.request.tokens) - rows.begin;
    const T* const of_unit = static_cast<const T*>(args.query) + unit.request.origin * args.query_strides.batch +
                             unit.head * args.group * args.query_strides.head;
#pragma unroll
    for (int i = 0; i < Tile::kRows * kChunks / 32; ++i) {
      const int row = (i * 32 + lane) / kChunks, column = (i * 32 + lane) % kChunks * 8;
      const bool read = row < real_rows && column < args.key_width;
      const int token = args.tokens == 1 ? 0 : small_quotient(rows.begin + row, args.group);
      const T* const from = of_unit + token * args.query_strides.token +
                            (rows.begin + row - token * args.group) * args.query_strides.head + column;
      cp_async(to + (row * Tile::kQueryStride + column) * 2, read ? from : of_unit, read ? 16 : 0);
    }
  }

  // Groups of consumers take tiles in turn.
  __device__ __forceinline__ void next_group() {
    if constexpr (Tile::kGroups == 2) {
      const RingPlace next = waiting;
      waiting = place;
      place = next;
    }
  }

#if __CUDA_ARCH__ >= 900
  // The keys' tiles of a unit or the values', by one of two warps each.
  __device__ __forceinline__ void copy_half_of_whole_tiles(const Unit& unit, Span tiles, uint64_t policy) {
    if (lane != 0) return;
    const bool values = warp != 0;
    const int outer = args.cache_kind == kDense ? unit.request.b : 0;
    if (values) place.next();
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      copy_whole_tile(values ? value_map : key_map, values ? loads.value_boxes : loads.key_boxes, unit.head,
                      unit.request.start + tile * kTokens, outer, policy);
      place.next();
    }
    if (values) place.back();
  }

  // By the first lane; before it copies a tile with new tokens, all write these to the cache. Nobody else reads them: at most, in
  // ragged caches, the copy of an earlier request's last tile takes them along, and they are masked there.
  __device__ __forceinline__ void copy_whole_tiles(const Unit& unit, Span tiles, uint64_t policy) {
    const int outer = args.cache_kind == kDense ? unit.request.b : 0;
    const int new_begin = args.append ? unit.request.keys - unit.request.tokens : INT32_MAX;
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int begin = tile * kTokens;
      if (begin > new_begin - kTokens) append_tokens(unit, max32(begin, new_begin), min32(begin + kTokens, unit.request.keys));
      if (lane != 0) continue;
      const int token = unit.request.start + begin;
      copy_whole_tile(key_map, loads.key_boxes, unit.head, token, outer, policy);
      copy_whole_tile(value_map, loads.value_boxes, unit.head, token, outer, policy);
      next_group();
    }
  }

  // Tiles of pages: even warps copy keys, odd ones values, of every other tile where they are 4; lane j has box j. They may be
  // ahead of each other by no more than the ring has pairs of slots, 2 or more.
  __device__ __forceinline__ void copy_tiles_of_pages(const Unit& unit, Span tiles, uint64_t policy) {
    const int takers = warps / 2, end = min32(tiles.end * kTokens, unit_keys(args, unit.request, unit.row_tile).end);
    const bool values = warp % 2 != 0;
    const int32_t* const table = args.block_table + static_cast<int64_t>(unit.request.b) * args.pages_per_request;
    const auto page_of = [&](int tile) {
      const int token = tile * kTokens + lane * loads.box_tokens;
      if (lane >= loads.boxes || token >= end) return -1;
      const int page = table[token / args.block];
      return static_cast<unsigned>(page) < static_cast<unsigned>(args.num_pages) ? page : -1;
    };
    int at = tiles.begin, tile = at + ((warp / 2 - turn) & (takers - 1)), page = page_of(tile);
    turn += tiles.end - at;
    if (values) place.next();
#pragma unroll 1
    for (; at < tiles.end; ++at) {
      if (at == tile) {
        tile += takers;
        const int next_page = page_of(tile), token = (at * kTokens + lane * loads.box_tokens) % args.block;
        const unsigned issue = __ballot_sync(kFullWarp, page >= 0);
        copy_boxes(values ? value_map : key_map, values ? loads.value_boxes : loads.key_boxes, unit.head, token, page, issue,
                   !values, policy);
        page = next_page;
      } else {
        place.next();
      }
      place.next();
    }
    if (values) place.back();
  }

  // Writes the new keys and values at positions [begin, end) to the cache, where TMA then sees them.
  __device__ __forceinline__ void append_tokens(const Unit& unit, int begin, int end) {
    const int key_chunks = args.key_width / 8, chunks = key_chunks + args.value_width / 8;
#pragma unroll 1
    for (int i = lane; i < (end - begin) * chunks; i += 32) {
      const int of_token = small_quotient(i, chunks), chunk = i - of_token * chunks;
      const bool value = chunk >= key_chunks;
      append_chunk<T, kRope>(args, unit, begin + of_token, value, (value ? chunk - key_chunks : chunk) * 8);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
  }

  __device__ __forceinline__ void copy_whole_tile(const CUtensorMap* map, int columns, int head, int token, int outer,
                                                  uint64_t policy) {
    const uint32_t to = acquire(), full = ring.full + place.slot * 8;
    warp_arrive_expect_tx(full, columns * kTokens * 128);
    if (loads.whole_rows) {
      tma_load_rows(to, map, token, head, outer, full, policy);
    } else {
#pragma unroll 1
      for (int c = 0; c < columns; ++c)
        tma_load_box(to + c * kTokens * 128, map, c * kBoxColumns, token, head, outer, full, policy);
    }
    place.next();
  }
#endif

  __device__ __forceinline__ uint32_t acquire() {
    mbarrier_wait(ring.empty + place.slot * 8, place.parity ^ 1);
    return ring.slots + Tile::slot_at(place.slot);
  }

#if __CUDA_ARCH__ >= 900
  // Box `lane` of a tile, for the lanes in `issue`.
  __device__ __forceinline__ void copy_boxes(const CUtensorMap* map, int columns, int head, int token, int outer,
                                             unsigned issue, bool note_pages, uint64_t policy) {
    const uint32_t to = acquire();
    const uint32_t full = ring.full + place.slot * 8;
    const int box_tokens = loads.box_tokens;
    if (note_pages && lane == 0) {  // the lane that arrives, so that its arrival releases what it has written
      uint16_t* bits = ring.masked_out + place.slot * Tile::kSlices;
#pragma unroll 1
      for (int box = loads.fill_warps < warps ? 0 : warp; box < loads.boxes; box += loads.fill_warps) {
        const uint16_t missing = issue >> box & 1 ? 0 : 0xffff;
#pragma unroll 1
        for (int t = 0; t < loads.box_slices; ++t) bits[box * loads.box_slices + t] = missing;
      }
    }
    __syncwarp();
    // A slot that cp.async filled before is written by TMA now.
    if (args.append) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (lane == 0) warp_arrive_expect_tx(full, __popc(issue) * columns * box_tokens * 128);
    __syncwarp();
    if (issue >> lane & 1) {
      if (loads.whole_rows) {
        tma_load_rows(to + lane * box_tokens * columns * 128, map, token, head, outer, full, policy);
      } else {
#pragma unroll 1
        for (int c = 0; c < columns; ++c)
          tma_load_box(to + (c * kTokens + lane * box_tokens) * 128, map, c * kBoxColumns, token, head, outer, full, policy);
      }
    }
    __syncwarp();
    place.next();
  }
#endif

  // Quantised caches: warps of one half convert keys, of the other half values, each its part of a tile's tokens, in two batches.
  // Where a batch's bytes were, those of the next tile are on their way while the other batch is converted; the second one's are
  // asked for behind the fence, which may wait for copies that were asked for just before it. A lane knows the row and the scale
  // of one token of the next tile and the page of one of the tile after next. Keys become what their bytes stand for, and their
  // scales, which are no channels', go along; values are multiplied by scales of tokens here, and by others in the output.
  static constexpr int kHalfWarps = kConvertingWarps / 2, kPerWarp = kTokens / kHalfWarps;
  struct QuantisedRow {
    uint32_t row;  // among all of a cache, the same of keys, of values and of their scales; kNoRow: nothing to read
    float scale;
  };
  static constexpr uint32_t kNoRow = UINT32_MAX;
  __device__ __forceinline__ void convert_tiles(const Unit& unit, Span tiles) {
    if (tiles.begin >= tiles.end) return;
    const bool values = warp >= kHalfWarps;
    if (values) place.next();
    for_form(values ? args.value_scales.form : args.key_scales.form, [&](auto form) {
      if (values && args.value_scales.kind == kPerToken) convert_tiles_of<decltype(form)::value, true>(unit, tiles, true);
      else convert_tiles_of<decltype(form)::value, false>(unit, tiles, values);
    });
    if (values) place.back();
  }

  // kScaled: values, with scales of tokens.
  template <CacheForm kForm, bool kScaled>
  __device__ __forceinline__ void convert_tiles_of(const Unit& unit, Span tiles, bool values) {
    const LaneOfRows<kForm> rows(*this, values);
    Span seen = unit_keys(args, unit.request, unit.row_tile);
    seen.end = min32(seen.end, tiles.end * kTokens);
    int position = tiles.begin * kTokens + warp % kHalfWarps * kPerWarp + lane % kPerWarp;
    QuantisedRow now = quantised_row(unit, seen, position, quantised_page(unit, seen, position), values);
    fetch_batch(rows, 0, now.row, true);
    fetch_batch(rows, 1, now.row, true);
    int page = quantised_page(unit, seen, position + kTokens);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const QuantisedRow next = quantised_row(unit, seen, position + kTokens, page, values);
      page = quantised_page(unit, seen, position + 2 * kTokens);
      const uint32_t slot = acquire();
#pragma unroll 1
      for (int batch = 0; batch < 2; ++batch) {
        cp_async_wait_but<1>();  // what comes last are copies of the other batch
        convert_batch<kForm, kScaled>(rows, batch, slot, now.scale);
        if (batch == 1) {
          if (!values) note_keys(now.scale, position >= seen.begin && position < seen.end && now.row == kNoRow);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          mbarrier_arrive(ring.full + place.slot * 8);
        }
        fetch_batch(rows, batch, next.row, tile + 1 < tiles.end);
      }
      place.next();
      place.next();
      now = next;
      position += kTokens;
    }
  }

  // The page of a position as the table has it, or -1; 0 where there are none. Who needs it checks it: nobody waits here.
  __device__ __forceinline__ int quantised_page(const Unit& unit, Span seen, int position) const {
    if (args.cache_kind != kPaged) return 0;
    if (position < seen.begin || position >= seen.end) return -1;
    const int64_t at = static_cast<int64_t>(unit.request.b) * args.pages_per_request + quotient(position, args.block);
    return args.block_table[at];
  }

  __device__ __forceinline__ QuantisedRow quantised_row(const Unit& unit, Span seen, int position, int page,
                                                        bool values) const {
    const auto in_rows = [](int64_t numbers) { return static_cast<uint32_t>(static_cast<uint64_t>(numbers) / Tile::kColumns); };
    const CacheStrides& strides = args.key_strides;
    const bool paged = args.cache_kind == kPaged;
    if (position < seen.begin || position >= seen.end) return {kNoRow, 0.0f};
    if (paged && static_cast<unsigned>(page) >= static_cast<unsigned>(args.num_pages)) return {kNoRow, 0.0f};
    uint32_t row = unit.head * in_rows(strides.head);
    if (paged)
      row += page * in_rows(strides.page) + (position - quotient(position, args.block) * args.block) * in_rows(strides.token);
    else row += unit.request.b * in_rows(strides.batch) + (unit.request.start + position) * in_rows(strides.token);
    const ScaleKind kind = values ? args.value_scales.kind : args.key_scales.kind;
    const float* const scales = values ? args.value_scales.in : args.key_scales.in;
    return {row, kind == kPerToken ? __ldcg(scales + row) : kind == kPerTensor ? scales[0] : 1.0f};
  }

  // The part of a warp's rows that a lane has: in each pass 16 bytes of a row, `kPieces` chunks of 8 numbers. Eight lanes in a row
  // have the chunks of one box of columns in so many rows that their stores, one piece of each, fall into different banks.
  template <CacheForm kForm>
  struct LaneOfRows {
    static constexpr int kPieces = kForm == kInt4 ? 4 : 2, kOfBox = 8 / kPieces, kBoxes = Tile::kColumns / kBoxColumns;
    static constexpr int kRowBytes = kBoxes * kOfBox * 16, kRowsOfPass = 32 / (kBoxes * kOfBox);
    static constexpr int kBatchRows = kPerWarp / 2, kPasses = kBatchRows / kRowsOfPass;  // of a batch
    static_assert(kPasses > 0 && kBatchRows % 8 == 0, "both batches are swizzled alike");
    uint32_t row;      // of the warp's, in the first pass
    uint32_t staged;   // shared address of the first pass, where nobody else looks
    uint32_t to;       // of its first piece from a slot's begin
    const char* from;  // this chunk of the cache's first row
    // kHighOfBfloat16, where the assembler does not see it: an instruction has room for one constant, the selector of bytes, and it
    // would bring that to a register each time instead.
    uint32_t high;
    __device__ __forceinline__ LaneOfRows(const TileProducer& producer, bool values) {
      uint32_t lane = producer.lane;
      asm volatile("" : "+r"(lane));  // else it is worked out again in each pass
      const uint32_t warp = producer.warp % kHalfWarps, of_box = lane % kOfBox, box = lane / 8 % kBoxes;
      row = lane / 8 / kBoxes * kPieces + lane % 8 / kOfBox;
      staged = producer.ring.stage + (values ? kTokens * Tile::kColumns : 0) + (warp * 32 + lane) * 16;
      to = (box * kTokens + warp * kPerWarp + row) * 128 + (of_box * kPieces ^ row % 8) * 16;
      from =
          static_cast<const char*>(values ? producer.args.value_cache : producer.args.key_cache) + (box * kOfBox + of_box) * 16;
      asm volatile("" : "+r"(row), "+r"(staged), "+r"(to), "+l"(from));
      high = __shfl_sync(kFullWarp, kHighOfBfloat16, 0);
    }
    __device__ __forceinline__ uint32_t staged_at(int batch, int pass) const {
      return staged + (batch * kPasses + pass) * (kHalfWarps * 32 * 16);
    }
  };

  // row: of this lane's token. One group of copies, empty if not `wanted`.
  template <class Rows>
  __device__ __forceinline__ void fetch_batch(const Rows& rows, int batch, uint32_t row, bool wanted) const {
    if (wanted) {
#pragma unroll
      for (int pass = 0; pass < Rows::kPasses; ++pass) {
        const int from_row = batch * Rows::kBatchRows + pass * Rows::kRowsOfPass;
        const uint32_t of_pass = __shfl_sync(kFullWarp, row, rows.row + from_row);
        const bool exists = of_pass != kNoRow;
        const char* at;
        asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(exists ? of_pass : 0u), "n"(Rows::kRowBytes), "l"(rows.from));
        cp_async(rows.staged_at(batch, pass), at, exists ? 16 : 0);
      }
    }
    cp_async_commit();
  }

  // 8 numbers, of words `piece` of 16 bytes, or 2 words of 8 bits, as pairs of halves.
  template <CacheForm kForm>
  static __device__ __forceinline__ void halves_of_piece(const uint4& bytes, int piece, uint32_t (&pairs)[4]) {
    if constexpr (kForm == kInt4) {
      uint32_t x[4];
      nibble_pairs(word_of(bytes, piece), x);
      pairs[0] = __byte_perm(x[0], x[1], 0x5410), pairs[1] = __byte_perm(x[2], x[3], 0x5410);
      pairs[2] = __byte_perm(x[0], x[1], 0x7632), pairs[3] = __byte_perm(x[2], x[3], 0x7632);
    } else {
      uint32_t x[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        row_pairs<kForm>(word_of(bytes, 2 * piece + w), x);
        pairs[2 * w] = x[0], pairs[2 * w + 1] = x[1];
      }
    }
  }
  // The same of T.
  template <CacheForm kForm>
  static __device__ __forceinline__ void numbers_of_piece(const uint4& bytes, int piece, uint32_t high, uint32_t (&pairs)[4]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kForm == kInt8) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = bfloat16_of(word_of(bytes, 2 * piece + i / 2), i % 2 ? kHighBytes : kLowBytes, high);
      return;
    }
    halves_of_piece<kForm>(bytes, piece, pairs);
    if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        pairs[i] = pack_pair(T{}, x.x, x.y);
      }
    }
  }
  // The same times a scale.
  template <CacheForm kForm>
  static __device__ __forceinline__ void products_of_piece(const uint4& bytes, int piece, float scale, uint32_t (&pairs)[4]) {
    halves_of_piece<kForm>(bytes, piece, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      pairs[i] = pack_pair(T{}, x.x * scale, x.y * scale);
      if constexpr (std::is_same_v<T, __half>) pairs[i] = kept_finite(pairs[i]);
    }
  }

  // Infinities become the largest numbers: rows that do not see them multiply them by 0. NaN stays.
  static __device__ __forceinline__ uint32_t kept_finite(uint32_t pair) {
    const __half2 most = __float2half2_rn(65504.0f), x = *reinterpret_cast<const __half2*>(&pair);
    const __half2 held = __hmax2_nan(__hmin2_nan(x, most), __hneg2(most));
    return *reinterpret_cast<const uint32_t*>(&held);
  }

  // Half of this warp's rows of a slot, from where they are staged. scale: of this lane's token.
  template <CacheForm kForm, bool kScaled>
  __device__ __forceinline__ void convert_batch(const LaneOfRows<kForm>& rows, int batch, uint32_t slot, float scale) const {
    using Rows = LaneOfRows<kForm>;
    const uint32_t to = slot + rows.to;
    uint4 bytes[Rows::kPasses];
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) bytes[pass] = load_16_bytes(rows.staged_at(batch, pass));
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
      const int of_batch = pass * Rows::kRowsOfPass, of_warp = batch * Rows::kBatchRows + of_batch;
      const float of_pass = kScaled ? __shfl_sync(kFullWarp, scale, rows.row + of_warp) : 1.0f;
#pragma unroll
      for (int piece = 0; piece < Rows::kPieces; ++piece) {
        uint32_t pairs[4];
        if constexpr (kScaled) products_of_piece<kForm>(bytes[pass], piece, of_pass, pairs);
        else numbers_of_piece<kForm>(bytes[pass], piece, rows.high, pairs);
        // The swizzle: bits of the row and of the piece that change meet those of the first ones in the address.
        store_16_bytes((to ^ (piece ^ of_batch % 8) * 16) + of_warp * 128, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }

  // What consumers have to know of this lane's token of a tile's keys. missing: its page is outside the pool.
  __device__ __forceinline__ void note_keys(float scale, bool missing) const {
    if (lane < kPerWarp)
      store_4_bytes(ring.key_scales + (place.slot / 2 * kTokens + warp * kPerWarp + lane) * 4, __float_as_uint(scale));
    if (args.cache_kind != kPaged) return;
    const unsigned bits = __ballot_sync(kFullWarp, missing && lane < kPerWarp);
    if (lane != 0) return;
#pragma unroll
    for (int t = 0; t < kPerWarp / 16; ++t)
      ring.masked_out[place.slot * Tile::kSlices + warp * (kPerWarp / 16) + t] = bits >> (16 * t) & 0xffff;
  }

  // A tile row by row with cp.async, each of the producer's warps a part of the tokens.
  __device__ __forceinline__ void gather_tile(const Unit& unit, Span keys, int begin, int new_begin) {
    const int per_warp = kTokens / warps, first = warp * per_warp;
    constexpr int kGroups = (kTokens + 31) / 32;
    const T* key_rows[kGroups];
    const T* value_rows[kGroups];
    unsigned bits[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int of_warp = g * 32 + lane, j = begin + first + of_warp;
      key_rows[g] = value_rows[g] = nullptr;
      bool page_missing = false;
      if (of_warp < per_warp && j >= keys.begin && j < keys.end) {
        const int64_t at = cache_row(args, args.key_strides, unit.request, unit.head, j);
        page_missing = at < 0;
        if (j >= new_begin && !page_missing) {
          const int token = j - new_begin;
          key_rows[g] = static_cast<const T*>(args.new_key) + unit.request.origin * args.new_key_strides.batch +
                        unit.head * args.new_key_strides.head + token * args.new_key_strides.token;
          value_rows[g] = static_cast<const T*>(args.new_value) + unit.request.origin * args.new_value_strides.batch +
                          unit.head * args.new_value_strides.head + token * args.new_value_strides.token;
        } else if (!page_missing) {
          key_rows[g] = static_cast<const T*>(args.key_cache) + at;
          value_rows[g] =
              static_cast<const T*>(args.value_cache) + cache_row(args, args.value_strides, unit.request, unit.head, j);
        }
      }
      bits[g] = __ballot_sync(kFullWarp, page_missing);
    }
    gather_rows(key_rows, loads.key_boxes, args.key_width, static_cast<const T*>(args.key_cache), first, per_warp, bits,
                args.cache_kind == kPaged, begin, kRope ? new_begin : INT32_MAX);
    gather_rows(value_rows, loads.value_boxes, args.value_width, static_cast<const T*>(args.value_cache), first, per_warp, bits,
                false, begin, INT32_MAX);
  }

  // Rows at positions from rope_from on get their rotary embedding.
  template <int kGroups>
  __device__ __forceinline__ void gather_rows(const T* const (&rows)[kGroups], int boxes, int width, const T* readable,
                                              int first, int per_warp, const unsigned (&bits)[kGroups], bool note_pages,
                                              int begin, int rope_from) {
    const uint32_t to = acquire();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int tokens = min32(per_warp - g * 32, 32);
      if (tokens <= 0) break;
      const uint64_t mine = reinterpret_cast<uint64_t>(rows[g]);
#pragma unroll 2
      for (int t = 0; t < tokens; t += 4) {  // 8 lanes a token
        const uint64_t row = __shfl_sync(kFullWarp, mine, t + lane / 8);
#pragma unroll 1
        for (int chunk = lane % 8; chunk < boxes * 8; chunk += 8) {
          const bool read = row != 0 && chunk * 8 < width;
          const int token = first + g * 32 + t + lane / 8;
          const uint32_t place_of_chunk =
              to + (loads.whole_rows ? line_offset(token * boxes + chunk / 8, chunk % 8) : slot_offset<kTokens>(token, chunk));
          if constexpr (kRope) {
            if (read && begin + token >= rope_from) {
              const uint4 x = rotated_chunk(rotation_at(args, begin + token), reinterpret_cast<const T*>(row), chunk * 8);
              asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(place_of_chunk), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                           : "memory");
              continue;
            }
          }
          cp_async(place_of_chunk, read ? reinterpret_cast<const T*>(row) + chunk * 8 : readable, read ? 16 : 0);
        }
      }
      if (note_pages && lane == 0) {
#pragma unroll 1
        for (int t = 0; t < tokens / 16; ++t)
          ring.masked_out[place.slot * Tile::kSlices + (first + g * 32) / 16 + t] = bits[g] >> (16 * t) & 0xffff;
      }
    }
    const uint32_t full = ring.full + place.slot * 8;
    mbarrier_arrive_after_cp_async(full);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
    place.next();
  }
};

// Masks a pair of 16-bit values: the low one stays if `low`, the high one if `high`.
__device__ __forceinline__ uint32_t keep_pair(bool low, bool high) { return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u); }

// A consumer warp that holds its own tokens of every tile, for units of up to 8 * kBlocks rows. kRope: queries get their
// rotary embedding.
template <class T, int kWidth, int kBlocks, bool kRope>
struct TokenConsumer {
  using Tile = MmaTile<kWidth, 8 * kBlocks>;
  static constexpr int kTokens = Tile::kTokens;
  static constexpr int kWarpTokens = kTokens / Tile::kTileWarps;
  static constexpr int kSteps = kWarpTokens / 16;
  static constexpr int kThreads = 32 * Tile::kConsumerWarps;

  const Args& args;
  const TileLoads& loads;
  const RingAddresses& ring;
  float* scratch;  // [8][8][kScratchStride], then max [8][kRows] and sum [8][kRows]
  ClusterInbox inbox;
  int warp, lane;
  RingPlace place;

  uint32_t query[kWidth / 16][kBlocks][2];
  float output[kWidth / 16][kBlocks][4];
  float max[kBlocks][2], sum[kBlocks][2];  // of rows 8 * block + 2 * (lane % 4) and the next
  RowBounds bounds[kBlocks][2];

  __device__ __forceinline__ void run() {
    if (args.plan.merge_apart && warp == 0 && lane == 0) begin_cuts(args, blockIdx.x);
    RingPlace queued(0, kQueue);
    int turn = 0;  // which half of the warps has the next tile
#pragma unroll 1
    for (;;) {
      mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
      const Work& work = ring.queue[queued.slot];
      if (work.last != 0) return;
      begin_unit(work.unit, reinterpret_cast<const T*>(ring.queries + queued.slot * Tile::kQueuedQueryBytes));
      const Span common = work.common, seen = work.seen;
      const int end = work.segment.tiles.end;
#pragma unroll 1
      for (int tile = work.segment.tiles.begin; tile < end; ++tile) {
        if (turn == warp / Tile::kTileWarps) {
          const int begin = tile * kTokens + warp % Tile::kTileWarps * kWarpTokens;
          consume(begin, begin < common.begin || begin + kWarpTokens > common.end, seen);
        }
        turn ^= 1;
      }
      finish(work);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.queue_empty + queued.slot * 8);
      queued.next();
    }
  }

  // rows_from: the unit's rows as the producer has queued them.
  __device__ __forceinline__ void begin_unit(const Unit& unit, const T* rows_from) {
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    if constexpr (kRope) {
      rotate_query(unit, rows.begin, min32(rows.end, args.group * unit.request.tokens));
      rows_from = reinterpret_cast<const T*>(scratch);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const T* const from = rows_from + (8 * n + lane / 4) * Tile::kQueryStride + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) query[k][n][half] = *reinterpret_cast<const uint32_t*>(from + 16 * k + 8 * half);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max[n][c] = -INFINITY;
        sum[n][c] = 0.0f;
        bounds[n][c] = row_bounds(args, unit, rows.begin + 8 * n + lane % 4 * 2 + c);
      }
    }
#pragma unroll
    for (int d = 0; d < kWidth / 16; ++d)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) output[d][n][i] = 0.0f;
  }

  // The query's rows after their rotary embedding to scratch, with zeros for padding and beyond D, by all consumers together.
  static_assert(Tile::kQueuedQueryBytes <= Tile::kScratchBytes);
  __device__ __forceinline__ void rotate_query(const Unit& unit, int first_row, int real_rows) {
    constexpr int kChunks = kWidth / 8;
    named_barrier(1, kThreads);  // the previous contents have been read
#pragma unroll 1
    for (int i = warp * 32 + lane; i < 8 * kBlocks * kChunks; i += kThreads) {
      const int row = i / kChunks, column = i % kChunks * 8;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < real_rows - first_row && column < args.key_width) {
        const RowPlace place = row_place(args, unit, first_row + row);
        const T* const from = query_row<T>(args, unit, place);
        x = rotated_chunk(rotation_at(args, unit.request.position + place.token), from, column);
      }
      *reinterpret_cast<uint4*>(reinterpret_cast<T*>(scratch) + row * Tile::kQueryStride + column) = x;
    }
    named_barrier(1, kThreads);
  }

  // One tile. `begin`: the position of this warp's first token.
  __device__ __forceinline__ void consume(int begin, bool masked, Span seen) {
    const int of_tile = warp % Tile::kTileWarps;  // this warp's part of the tile
    float s[kSteps][kBlocks][4];
    const uint32_t keys = ring.slots + place.slot * Tile::kSlotBytes;
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
    unsigned missing[kSteps];
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      missing[t] = 0;
      if (args.cache_kind == kPaged) {
        missing[t] = ring.masked_out[place.slot * Tile::kSlices + of_tile * kSteps + t];
        masked = masked || missing[t] != 0;
      }
    }
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int token = of_tile * kWarpTokens + t * 16 + lane % 16;
      float other[kBlocks][4];  // a second chain of sums, so that two products are in flight
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] = other[n][i] = 0.0f;
#pragma unroll
      for (int box = 0; box < kWidth / kBoxColumns; ++box) {
        if (box >= loads.key_boxes) break;
        const int line = loads.whole_rows ? token * loads.key_boxes + box : box * kTokens + token;
#pragma unroll
        for (int k = box * 4; k < box * 4 + 4; ++k) {
          uint32_t a[4];
          load_matrices(a, keys + line_offset(line, 2 * (k % 4) + lane / 16));
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) mma(T{}, k % 2 ? other[n] : s[t][n], a, query[k][n][0], query[k][n][1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] += other[n][i];
    }
    release();

    const float scale = args.scale * (args.softcap > 0.0f ? 1.0f : kLog2E);
#pragma unroll
    for (int t = 0; t < kSteps; ++t)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] *= scale;
    if (args.softcap > 0.0f) {
#pragma unroll
      for (int t = 0; t < kSteps; ++t)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[t][n][i] = cap_logit(s[t][n][i], args.softcap) * kLog2E;
    }
    if (masked) {
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = i / 2 * 8 + lane / 4, j = begin + 16 * t + at;
          const bool gone = missing[t] >> at & 1;
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
            if (gone || j < bounds[n][i % 2].begin || j >= bounds[n][i % 2].end) s[t][n][i] = -INFINITY;
        }
      }
    }
    float top[kBlocks][2];
    bool rising = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = -INFINITY;
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float x = s[t][n][2 * half + c];
            top[n][c] = fmaxf(top[n][c], x);
          }
        }
        rising = rising || top[n][c] - max[n][c] > kRescaleAt;
      }
    }
    if (__any_sync(kFullWarp, rising)) rescale_all(top);
    uint32_t p[kSteps][kBlocks][2];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float base[2] = {max[n][0] == -INFINITY ? 0.0f : max[n][0], max[n][1] == -INFINITY ? 0.0f : max[n][1]};
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[t][n][i] = exp2_fast(s[t][n][i] - base[i % 2]);
          sum[n][i % 2] += s[t][n][i];
        }
        p[t][n][0] = transpose_matrix(pack_pair(T{}, s[t][n][0], s[t][n][1]));
        p[t][n][1] = transpose_matrix(pack_pair(T{}, s[t][n][2], s[t][n][3]));
      }
    }

    const uint32_t values = ring.slots + place.slot * Tile::kSlotBytes;
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
    if (masked) {
      // What is outside the cache's valid part may be NaN, which a weight of 0 does not silence. A warp's tokens are
      // its own, so it can set them to 0 in the slot, which TMA writes next.
#pragma unroll 1
      for (int t = 0; t < kWarpTokens; ++t) {
        if (begin + t >= seen.begin && begin + t < seen.end && !(missing_at(missing, t) & 1)) continue;
#pragma unroll 1
        for (int chunk = lane; chunk < loads.value_boxes * 8; chunk += 32) {
          const int token = of_tile * kWarpTokens + t, box = chunk / 8;
          const int line = loads.whole_rows ? token * loads.value_boxes + box : box * kTokens + token;
          asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(values + line_offset(line, chunk % 8)), "r"(0) : "memory");
        }
      }
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      __syncwarp();
    }
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int token = of_tile * kWarpTokens + t * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int box = 0; box < kWidth / kBoxColumns; ++box) {
        if (box >= loads.value_boxes) break;
        const int line = loads.whole_rows ? token * loads.value_boxes + box : box * kTokens + token;
#pragma unroll
        for (int d = box * 4; d < box * 4 + 4; ++d) {
          uint32_t a[4];
          load_matrices_transposed(a, values + line_offset(line, 2 * (d % 4) + lane / 8 % 2));
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) mma(T{}, output[d][n], a, p[t][n][0], p[t][n][1]);
        }
      }
    }
    release();
  }

  static __device__ __forceinline__ unsigned missing_at(const unsigned (&missing)[kSteps], int token) {
    unsigned bits = missing[0];
#pragma unroll
    for (int t = 1; t < kSteps; ++t) bits = token >= 16 * t ? missing[t] : bits;
    return bits >> (token % 16);
  }

  // This warp has read the slot.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + place.slot * 8);
    place.next();
  }

  __device__ __forceinline__ void rescale_all(float (&top)[kBlocks][2]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = raise_max(top[n][c], max[n][c], sum[n][c]);
#pragma unroll
        for (int d = 0; d < kWidth / 16; ++d) {
          output[d][n][c] *= factor;
          output[d][n][2 + c] *= factor;
        }
      }
    }
  }

  // Merges the warps' statistics and outputs, 8 rows at a time, and writes them or, where others contribute to
  // the unit too, leaves them as a partial result.
  __device__ __forceinline__ void finish(const Work& work) {
    constexpr int kWarps = Tile::kConsumerWarps;
    const Unit& unit = work.unit;
    const Segment& segment = work.segment;
    const Span rows = unit_rows(args, unit.request, unit.row_tile);
    float* warp_max = scratch + kWarps * 8 * Tile::kScratchStride;
    float* warp_sum = warp_max + kWarps * 8 * kBlocks;
#if __CUDA_ARCH__ >= 900
    const ClusterShare share = cluster_share(args.value_width, rows, segment);
    if (work.in_cluster) cluster_wait();
#endif
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      named_barrier(1, kThreads);  // the previous contents have been read
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = lane % 4 * 2 + c;
        float total = sum[n][c];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
        if (lane < 4) {
          warp_max[warp * 8 * kBlocks + 8 * n + row] = max[n][c];
          warp_sum[warp * 8 * kBlocks + 8 * n + row] = total;
        }
        float* to = scratch + (warp * 8 + row) * Tile::kScratchStride + lane / 4;
#pragma unroll
        for (int d = 0; d < kWidth / 16; ++d) {
          to[16 * d] = output[d][n][c];
          to[16 * d + 8] = output[d][n][2 + c];
        }
      }
      named_barrier(1, kThreads);
      const int count = min32(rows.end - rows.begin - 8 * n, 8);
#pragma unroll 1
      for (int row = warp; row < count; row += Tile::kConsumerWarps) {
        float factor[kWarps], top = -INFINITY, total = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          factor[w] = warp_max[w * 8 * kBlocks + 8 * n + row];
          top = fmaxf(top, factor[w]);
        }
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          factor[w] = rescale(factor[w], top);
          total += factor[w] * warp_sum[w * 8 * kBlocks + 8 * n + row];
        }
#pragma unroll 1
        for (int d = lane * 4; d < args.value_width; d += 128) {
          float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float4 x = *reinterpret_cast<const float4*>(scratch + (w * 8 + row) * Tile::kScratchStride + d);
            o.x += factor[w] * x.x, o.y += factor[w] * x.y, o.z += factor[w] * x.z, o.w += factor[w] * x.w;
          }
#if __CUDA_ARCH__ >= 900
          if (work.in_cluster) {
            send_part(inbox, share, work.first % loads.cluster, 8 * n + row, d, o, top, total);
            continue;
          }
#endif
          if (segment.count == 1) write_row<T>(args, unit, rows.begin + 8 * n + row, d, o, top, total);
          else write_partial(args, segment.slot, 8 * n + row, d, o, top, total);
        }
      }
    }
    if (segment.count == 1) return;
#if __CUDA_ARCH__ >= 900
    if (work.in_cluster) {
      merge_in_cluster<T>(args, unit, inbox, share, warp, Tile::kConsumerWarps);
      return;
    }
#endif
    end_part<T>(args, unit, segment, work.first, warp, Tile::kConsumerWarps);
  }
};

// A consumer warp that holds 16 rows of the unit's 128.
template <class T, int kWidth>
struct RowConsumer {
  using Tile = MmaTile<kWidth, 128>;
  static constexpr int kTokens = Tile::kTokens;
  static constexpr int kRows = 128;
  static constexpr int kThreads = 32 * Tile::kConsumerWarps;

  const Args& args;
  const TileLoads& loads;
  const RingAddresses& ring;
  uint32_t query;  // shared address of [box][128][64], swizzled like a slot
  int warp, lane;
  RingPlace place;

  float output[kWidth / 8][4];
  float max[2], sum[2];  // of rows lane / 4 and lane / 4 + 8 of the warp's
  RowBounds bounds[2];

  __device__ __forceinline__ void run() {
    if (args.plan.merge_apart && warp == 0 && lane == 0) begin_cuts(args, blockIdx.x);
    RingPlace queued(0, kQueue);
#pragma unroll 1
    for (;;) {
      mbarrier_wait(ring.queue_full + queued.slot * 8, queued.parity);
      const Work& work = ring.queue[queued.slot];
      if (work.last != 0) return;
      const Unit& unit = work.unit;
      const Span all = unit_rows(args, unit.request, unit.row_tile);
      const Span rows = {min32(all.begin + 16 * warp, all.end), min32(all.begin + 16 * warp + 16, all.end)};
      begin_unit(unit, rows);
      const int real_rows = min32(rows.end, args.group * unit.request.tokens);
      Span tokens = {0, 0};
      if (rows.begin < real_rows) tokens = {quotient(rows.begin, args.group), quotient(real_rows - 1, args.group) + 1};
      const RowsKeys of_warp = keys_of_tokens(args, unit.request, tokens);
      const Span common = of_warp.common, mine = of_warp.seen, seen = work.seen;
      const int end = work.segment.tiles.end;
#pragma unroll 1
      for (int tile = work.segment.tiles.begin; tile < end; ++tile) {
        const int begin = tile * kTokens;
        if (begin >= mine.end || begin + kTokens <= mine.begin) {
          skip();
          skip();
        } else {
          consume(begin, begin < common.begin || begin + kTokens > common.end, seen);
        }
      }
      finish(work, rows);
      give_back(ring.queue_empty + queued.slot * 8);
      queued.next();
    }
  }

  __device__ __forceinline__ void skip() {
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
    release();
  }

  __device__ __forceinline__ void release() {
    give_back(ring.empty + place.slot * 8);
    place.next();
  }
  __device__ __forceinline__ void give_back(uint32_t empty) const {
    if (Tile::kReaderArrivals == 1) __syncwarp();
    if (Tile::kReaderArrivals == 32 || lane == 0) mbarrier_arrive(empty);
  }

  __device__ __forceinline__ void begin_unit(const Unit& unit, Span rows) {
    const int real_rows = min32(rows.end, args.group * unit.request.tokens);
    const int chunks = loads.key_boxes * 8;
    __syncwarp();  // the previous unit's rows have been read
#pragma unroll 1
    for (int i = lane; i < 16 * chunks; i += 32) {
      const int r = i / chunks, chunk = i - r * chunks, row = rows.begin + r;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < real_rows && chunk * 8 < args.key_width) {
        x = *reinterpret_cast<const uint4*>(query_row<T>(args, unit, row_place(args, unit, row)) + chunk * 8);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(query + slot_offset<kRows>(16 * warp + r, chunk)), "r"(x.x),
                   "r"(x.y), "r"(x.z), "r"(x.w)
                   : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      max[c] = -INFINITY;
      sum[c] = 0.0f;
      const int row = rows.begin + lane / 4 + 8 * c;
      bounds[c] = row < rows.end ? row_bounds(args, unit, row) : RowBounds{0, 0};
    }
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) output[d][i] = 0.0f;
  }

  __device__ __forceinline__ void consume(int begin, bool masked, Span seen) {
    float s[kTokens / 8][4];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    const uint32_t keys = ring.slots + place.slot * Tile::kSlotBytes;
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
    const uint16_t* missing = ring.masked_out + place.slot * Tile::kSlices;
    unsigned missing_bits[Tile::kSlices];
#pragma unroll
    for (int t = 0; t < Tile::kSlices; ++t) {
      missing_bits[t] = 0;
      if (args.cache_kind == kPaged) {
        missing_bits[t] = missing[t];
        masked = masked || missing_bits[t] != 0;
      }
    }
#pragma unroll
    for (int box = 0; box < kWidth / kBoxColumns; ++box) {
      if (box >= loads.key_boxes) break;
#pragma unroll
      for (int k = box * 4; k < box * 4 + 4; ++k) {
        uint32_t a[4];
        load_matrices(a, query + slot_offset<kRows>(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int t = 0; t < kTokens / 16; ++t) {
          uint32_t b[4];
          load_matrices(b, keys + slot_offset<kTokens>(16 * t + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
          mma(T{}, s[2 * t], a, b[0], b[1]);
          mma(T{}, s[2 * t + 1], a, b[2], b[3]);
        }
      }
    }
    release();

    const float scale = args.scale * (args.softcap > 0.0f ? 1.0f : kLog2E);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= scale;
    if (args.softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = cap_logit(s[n][i], args.softcap) * kLog2E;
    }
    if (masked) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * n + lane % 4 * 2 + i % 2, j = begin + at;
          if (j < bounds[i / 2].begin || j >= bounds[i / 2].end || (missing_bits[n / 2] >> (at % 16) & 1)) s[n][i] = -INFINITY;
        }
      }
    }
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], s[n][i]);
    if (__any_sync(kFullWarp, top[0] - max[0] > kRescaleAt || top[1] - max[1] > kRescaleAt)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(top[c], max[c]);
        x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
        x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
        const float factor = rescale(max[c], x);
        max[c] = x;
        sum[c] *= factor;
#pragma unroll
        for (int d = 0; d < kWidth / 8; ++d) {
          output[d][2 * c] *= factor;
          output[d][2 * c + 1] *= factor;
        }
      }
    }
    const float base[2] = {max[0] == -INFINITY ? 0.0f : max[0], max[1] == -INFINITY ? 0.0f : max[1]};
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_fast(s[n][i] - base[i / 2]);
        sum[i / 2] += s[n][i];
      }
    }

    const uint32_t values = ring.slots + place.slot * Tile::kSlotBytes;
    mbarrier_wait(ring.full + place.slot * 8, place.parity);
#pragma unroll
    for (int t = 0; t < kTokens / 16; ++t) {
      const uint32_t p[4] = {pack_pair(T{}, s[2 * t][0], s[2 * t][1]), pack_pair(T{}, s[2 * t][2], s[2 * t][3]),
                             pack_pair(T{}, s[2 * t + 1][0], s[2 * t + 1][1]),
                             pack_pair(T{}, s[2 * t + 1][2], s[2 * t + 1][3])};
      uint32_t keep[2] = {0xffffffffu, 0xffffffffu};
      if (masked) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 8 * half + lane % 4 * 2, j = begin + 16 * t + at;
          keep[half] = keep_pair(j >= seen.begin && j < seen.end && !(missing_bits[t] >> at & 1),
                                 j + 1 >= seen.begin && j + 1 < seen.end && !(missing_bits[t] >> (at + 1) & 1));
        }
      }
#pragma unroll
      for (int box = 0; box < kWidth / kBoxColumns; ++box) {
        if (box >= loads.value_boxes) break;
#pragma unroll
        for (int d = box * 4; d < box * 4 + 4; ++d) {
          uint32_t b[4];
          load_matrices_transposed(b, values + slot_offset<kTokens>(16 * t + lane % 16, 2 * d + lane / 16));
          if (masked) b[0] &= keep[0], b[1] &= keep[1], b[2] &= keep[0], b[3] &= keep[1];
          mma(T{}, output[2 * d], p, b[0], b[1]);
          mma(T{}, output[2 * d + 1], p, b[2], b[3]);
        }
      }
    }
    release();
  }

  __device__ __forceinline__ void finish(const Work& work, Span rows) {
    const Unit& unit = work.unit;
    const Segment& segment = work.segment;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 1);
      sum[c] += __shfl_xor_sync(kFullWarp, sum[c], 2);
    }
#pragma unroll
    for (int d = 0; d < kWidth / 8; ++d) {
      // Lanes 2i and 2i + 1 hold columns 4i .. 4i + 3 of two rows: the even lane takes the first row, the odd one
      // the second.
      const bool odd = lane % 2 != 0;
      const float give0 = odd ? output[d][0] : output[d][2], give1 = odd ? output[d][1] : output[d][3];
      const float got0 = __shfl_xor_sync(kFullWarp, give0, 1), got1 = __shfl_xor_sync(kFullWarp, give1, 1);
      const float4 o =
          odd ? make_float4(got0, got1, output[d][2], output[d][3]) : make_float4(output[d][0], output[d][1], got0, got1);
      // Not max[odd]: an index known at run time only would put the whole struct into local memory.
      const float row_max = odd ? max[1] : max[0], row_sum = odd ? sum[1] : sum[0];
      const int row = rows.begin + lane / 4 + (odd ? 8 : 0), column = 8 * d + lane % 4 / 2 * 4;
      if (row < rows.end && column < args.value_width) {
        if (segment.count == 1) write_row<T>(args, unit, row, column, o, row_max, row_sum);
        else write_partial(args, segment.slot, row % kRows, column, o, row_max, row_sum);
      }
    }
    if (segment.count == 1) return;
    end_part<T>(args, unit, segment, work.first, warp, Tile::kConsumerWarps);
  }
};

// kRope: queries and new keys get their rotary embedding as they are read, for units of up to 16 rows.
template <class T, int kWidth, int kRows, bool kRope>
__global__ void __launch_bounds__(MmaTile<kWidth, kRows>::kMaxThreads, 1)
    MmaKernel(const __grid_constant__ Args launch_args, const __grid_constant__ TileLoads loads,
              const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kRows == 128) return;  // wgmma_kernel.cuh has these
#endif
  using Tile = MmaTile<kWidth, kRows>;
  let_next_launch_begin();
  Args args = launch_args;   // so that the compiler knows the plan's constants
  args.lone_tokens = false;  // never here
  args.plan.key_tile = Tile::kTokens;
  args.plan.row_tile = kRows;
  if constexpr (kRows <= 16) args.plan.min_range_work = kMinRangeWork;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Which of the ranges is a long chain of dependent steps: the producers follow it while the others prepare the barriers.
  using P = typename Tile::Position;
  Range<P> range = {};
  bool exists = false;
  if (warp >= Tile::kConsumerWarps) {
#if __CUDA_ARCH__ >= 900
    if (loads.tensor_maps && lane == 0) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&key_map) : "memory");
      asm volatile("prefetch.tensormap [%0];" ::"l"(&value_map) : "memory");
    }
#endif
    exists = locate_range<P>(args, blockIdx.x, Tile::kSplitTokens ? 1 : num_row_tiles(args), range);
  }

  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const int producer_warps = blockDim.x / 32 - Tile::kConsumerWarps;
  const int group_slots = loads.slots / Tile::kGroups;

  char* at = base + loads.slots * Tile::kSlotBytes;
  RingAddresses ring;
  ring.slots = shared_address(base);
  const uint32_t query = shared_address(at);
  at += Tile::kQueryBytes;
  float* const scratch = reinterpret_cast<float*>(at);
  at += Tile::kScratchBytes;
  char* const inbox = at;
  at += Tile::kInboxBytes;
  ring.queries = at;
  at += kQueue * Tile::kQueuedQueryBytes;
  ring.queue = reinterpret_cast<Work*>(at);
  at += kQueue * sizeof(Work);
  ring.queue_full = shared_address(at);
  ring.queue_empty = ring.queue_full + 8 * kQueue;
  at += 16 * kQueue;
  ring.full = shared_address(at);
  ring.empty = ring.full + 8 * loads.slots;
  at += 16 * loads.slots;
  ring.masked_out = reinterpret_cast<uint16_t*>(at);
  at += 2 * Tile::kSlices * loads.slots;
  const uint32_t inbox_barrier = shared_address(at);

  // Inits of one warp's lanes follow one another, so that warps share them.
  const int of_producers = warp - Tile::kConsumerWarps;
  if (of_producers < 0 && lane == 0) {
#pragma unroll 1
    for (int i = warp; i < 2 * kQueue + 2 * loads.slots; i += Tile::kConsumerWarps) {
      const int of_ring = i - 2 * kQueue;
      const int count = of_ring >= loads.slots         ? Tile::kReaderArrivals * Tile::kTileWarps
                        : of_ring >= 0                 ? kFillArrivals * loads.copy_warps
                        : i >= kQueue                  ? Tile::kReaderArrivals * Tile::kConsumerWarps
                        : Tile::kSplitTokens && !kRope ? kFillArrivals
                                                       : 1;
      mbarrier_init(ring.queue_full + 8 * i, count);
    }
    if (warp == Tile::kConsumerWarps - 1) mbarrier_init(inbox_barrier, 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (loads.cluster > 1) cluster_arrive();
#endif

  // Row consumers need more registers than a CTA of 12 warps can give every thread.
  if (warp >= Tile::kConsumerWarps) {
#if __CUDA_ARCH__ >= 900
    if constexpr (!Tile::kSplitTokens) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
    TileProducer<T, Tile, kRope> producer{args,
                                          loads,
                                          &key_map,
                                          &value_map,
                                          ring,
                                          of_producers,
                                          loads.copy_warps,
                                          lane,
                                          of_producers < loads.copy_warps,
                                          of_producers == producer_warps - 1,
                                          RingPlace(0, group_slots),
                                          RingPlace(group_slots, 2 * group_slots)};
    producer.run(range, exists);
  } else {
    if (args.append && !loads.whole_tiles)
      append_all<T, uint4, kRope>(launch_args, static_cast<int64_t>(blockIdx.x) * Tile::kConsumerWarps + warp,
                                  static_cast<int64_t>(gridDim.x) * Tile::kConsumerWarps);
    const int group = warp / Tile::kTileWarps;
    const RingPlace place(group * group_slots, (group + 1) * group_slots);
    if constexpr (Tile::kSplitTokens) {
      TokenConsumer<T, kWidth, kRows / 8, kRope> consumer{
          args, loads, ring,  scratch, {reinterpret_cast<float4*>(inbox), Tile::kInboxItems, inbox_barrier},
          warp, lane,  place, {},      {},
          {},   {},    {}};
      consumer.run();
    } else {
#if __CUDA_ARCH__ >= 900
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
      RowConsumer<T, kWidth> consumer{args, loads, ring, query, warp, lane, place, {}, {}, {}, {}};
      consumer.run();
    }
  }
}

// Launches the kernel for one element type and width (64, 128 or 256, at least D and Dv); args.plan holds the tile. Compiled by
// mma_launch.cu.in, a source file a width.
template <class T, int kWidth>
int launch_mma(const Args& args, const TileLoads& loads, const CUtensorMap& key_map, const CUtensorMap& value_map,
               int producer_warps, void* stream);

}  // namespace leanfleet::lean_attention
