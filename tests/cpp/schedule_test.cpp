// Walks the stream-K schedule as a kernel would, for many shapes, lengths and numbers of ranges, and checks
// that every visible key/value tile is visited exactly once, that contributors are counted consistently and
// that no partial result is overwritten. Prints the number of schedules; exits with 1 and the case at the
// first that is wrong.
#include "lean_attention/schedule.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace leanfleet::lean_attention;

std::string describe(const Args& args) {
  const Plan& plan = args.plan;
  std::string text =
      "B=" + std::to_string(args.batch) + " Hkv=" + std::to_string(args.kv_heads) +
      " group=" + std::to_string(args.group) + " Nq=" + std::to_string(args.tokens) +
      " capacity=" + std::to_string(args.capacity) + " kind=" + std::to_string(args.cache_kind) +
      " causal=" + std::to_string(args.causal) + " window=" + std::to_string(args.window) +
      " key_tile=" + std::to_string(plan.key_tile) + " row_tile=" + std::to_string(plan.row_tile) +
      " overhead=" + std::to_string(plan.unit_overhead) + " ranges=" + std::to_string(plan.max_ranges) +
      " min=" + std::to_string(plan.min_range_work) + " equal_parts=" + std::to_string(plan.equal_parts) +
      " halved=" + std::to_string(plan.equal_halved);
  for (int b = 0; b < args.batch; ++b) {
    const Request request = request_of(args, b);
    text += " (" + std::to_string(request.start) + "," + std::to_string(request.keys) + "," +
            std::to_string(request.tokens) + ")";
  }
  return text;
}

void require(bool condition, const char* what, const Args& args) {
  if (condition) return;
  std::printf("%s: %s\n", what, describe(args).c_str());
  std::exit(1);
}

// Whether packed row `row` of the request sees key `key`, straight from the operator's definition.
bool sees(const Args& args, const Request& request, int row, int key) {
  const int token = row / args.group;
  if (token >= request.tokens || key >= request.keys) return false;
  const int position = request.keys - request.tokens + token;
  if (args.causal && key > position) return false;
  return args.window <= 0 || key > position - args.window;
}

void check_request(const Args& args, int b) {
  const Request request = request_of(args, b);
  int64_t capacity = args.capacity, start = 0;
  if (args.cache_kind == kRagged) {
    const auto inside = [&](int64_t x) { return x < 0 ? 0 : x > args.capacity ? args.capacity : x; };
    start = inside(args.cu_seqlens[b]);
    capacity = inside(args.cu_seqlens[b + 1]) - start;
    if (capacity < 0) capacity = 0;
  }
  int64_t keys = args.seq_lens != nullptr ? args.seq_lens[b] : capacity;
  keys = keys < 0 ? 0 : keys > capacity ? capacity : keys;
  int64_t tokens = args.query_lens != nullptr ? args.query_lens[b] : args.tokens;
  tokens = tokens < 0 ? 0 : tokens > args.tokens ? args.tokens : tokens;
  tokens = tokens > keys ? keys : tokens;
  require(request.start == start && request.keys == keys && request.tokens == tokens,
          "clamped lengths are wrong", args);
}

// Every row of packed tokens is in one piece, of its own request, at its own position.
void check_pieces(const Args& args, const std::vector<int32_t>& offsets) {
  int row = 0, tokens = 0;
  require(args.batch <= args.requests + 1 + args.total_tokens / args.tokens, "too many pieces", args);
  for (int i = 0; i < args.batch; ++i) {
    const Request& one = args.pieces[i];
    if (one.rows == 0) continue;
    require(one.origin == row && one.rows <= args.tokens, "a piece is not behind the one before", args);
    row += one.rows;
    const int begin = one.b == 0 ? 0 : offsets[one.b];
    const int end = one.b < args.requests ? offsets[one.b + 1] : args.total_tokens;
    require(one.origin >= begin && one.origin + one.rows <= end, "a piece has another request's rows", args);
    if (one.b == args.requests) {
      require(one.tokens == 0, "padding has tokens", args);
      continue;
    }
    const Request all = whole_request(args, one.b);
    tokens = end - begin < all.keys ? end - begin : all.keys;
    const int mine = tokens - (one.origin - begin);
    require(one.tokens == (mine < 0 ? 0 : mine < one.rows ? mine : one.rows), "tokens of a piece", args);
    require(one.position == all.keys - tokens + one.origin - begin, "position of a piece", args);
    require(one.tokens == 0 || one.keys == (args.causal ? one.position + one.tokens : all.keys), "keys of a piece", args);
  }
  require(row == args.total_tokens, "rows without a piece", args);
}

// Where a plan cuts equal units into equal parts it does so for all units in the same places, and every part has at least
// min_range_work tiles. Returns whether the units are equal.
bool check_settled(const Args& open, const Args& args) {
  const int units = args.batch * args.kv_heads * num_row_tiles(args);
  int fewest = args.capacity, most = 0;
  for (int b = 0; b < args.batch; ++b) {
    for (int row_tile = 0; row_tile < num_row_tiles(args); ++row_tile) {
      const Span tiles = unit_tiles(args, request_of(args, b), row_tile);
      fewest = tiles.end - tiles.begin < fewest ? tiles.end - tiles.begin : fewest;
      most = tiles.end - tiles.begin > most ? tiles.end - tiles.begin : most;
    }
  }
  const bool equal = open.plan.equal_parts > 0 && fewest == most;
  const int parts = equal ? num_equal_parts(open.plan, most) : 0;
  require(args.plan.unit_overhead == (equal ? 0 : open.plan.unit_overhead), "overhead of equal units", args);
  require(args.plan.max_ranges == (equal ? units * parts : open.plan.max_ranges), "ranges of equal units", args);
  require(!equal || (parts >= 1 && parts <= open.plan.equal_parts), "parts of equal units", args);
  require(parts <= 1 || most / parts >= open.plan.min_range_work, "a part of an equal unit is too small", args);
  return equal;
}

// What a kernel does with a plan.
void check_schedule(const Args& open) {
  Args args = open;
  settle(args);
  const bool equal = check_settled(open, args);
  std::vector<int64_t> prefix(args.batch + 1);
  const int64_t work = fill_work_prefix(args, prefix.data());
  const int ranges = num_ranges(args.plan, work);
  const int row_tiles = num_row_tiles(args), units = args.batch * args.kv_heads * row_tiles;
  require(ranges >= 1 && ranges <= args.plan.max_ranges && ranges <= work,
          "number of ranges is out of bounds", args);
  require(work >= units || args.packed_tokens, "a unit has no place on the line", args);
  if (work == 0) return;
  require(
      static_cast<int64_t>(row_tiles) * args.plan.row_tile >= static_cast<int64_t>(args.group) * args.tokens,
      "query tiles do not hold all rows", args);

  struct Visits {
    Span tiles;
    int next;          // the tile that must be visited next
    int contributors;  // so far
    int count, first;  // as the first contributor saw them
  };
  std::vector<Visits> visits(units, {{0, 0}, -1, 0, 0, 0});
  std::vector<int> slot_user(2 * static_cast<size_t>(ranges), -1);
  int64_t least = work, most = 0;

  for (int range = 0; range < ranges; ++range) {
    const int64_t begin = range_begin(work, ranges, range),
                  end = range_begin(work, ranges, range + 1);
    require(begin < end, "a range is empty", args);
    least = end - begin < least ? end - begin : least;
    most = end - begin > most ? end - begin : most;
    for (int64_t x : {begin, end - 1})
      require(range_of(work, ranges, x) == range, "wrong owner of a position", args);
    if (work < int64_t{1} << 31 && ranges <= 1 << 16) {
      const int32_t narrow = static_cast<int32_t>(work);
      require(range_begin(narrow, ranges, range) == begin, "another begin in 32 bits", args);
      for (int64_t x : {begin, end - 1})
        require(range_of(narrow, ranges, static_cast<int32_t>(x)) == range, "wrong owner in 32 bits", args);
    }
    Unit unit = locate(args, prefix.data(), begin);
    require(unit.position <= begin && begin < unit_end(args, unit), "the located unit does not hold it",
            args);
    for (;;) {
      const Segment segment = segment_of(args, unit, work, ranges, range);
      const int id = (unit.index * args.kv_heads + unit.head) * row_tiles + unit.row_tile;
      require(unit.index < args.batch && unit.head < args.kv_heads && unit.row_tile < row_tiles, "no such unit",
              args);
      if (segment.contributes) {
        Visits& seen = visits[id];
        require(segment.index == seen.contributors, "contributors are counted inconsistently", args);
        if (segment.index == 0) {
          seen = {unit.tiles, unit.tiles.begin, 0, segment.count, range};
        }
        require(segment.count == seen.count && segment.index < segment.count,
                "contributors disagree on their count", args);
        require(segment.tiles.begin == seen.next, "a tile is skipped or visited twice", args);
        require(segment.tiles.end > segment.tiles.begin || unit.tiles.end == unit.tiles.begin,
                "a contributor has no tile", args);
        seen.next = segment.tiles.end;
        ++seen.contributors;
        if (segment.count > 1) {
          require(segment.slot == slot_of(seen.first, segment.index), "a slot is not where the merge looks",
                  args);
          require(segment.slot >= 0 && segment.slot < 2 * ranges, "a slot is out of bounds", args);
          require(slot_user[segment.slot] < 0, "a partial result is overwritten", args);
          slot_user[segment.slot] = id;
        }
      }
      if (unit_end(args, unit) >= end) break;
      next_unit(args, unit);
    }
  }
  require(most - least <= 1, "ranges differ by more than a tile", args);
  if (equal) {
    const int parts = args.plan.max_ranges / units;
    require(ranges == args.plan.max_ranges, "equal units have other than their ranges", args);
    for (int range = 0; range < ranges; ++range)
      require(range_begin(work, ranges, range) ==
                  work / units * (range / parts) + work / units * (range % parts) / parts,
              "equal units are cut in different places", args);
  }

  for (int id = 0; id < units; ++id) {
    const Visits& seen = visits[id];
    if (request_of(args, id / row_tiles / args.kv_heads).rows == 0) {
      require(seen.next < 0, "a piece without rows has an owner", args);
      continue;
    }
    require(seen.next >= 0, "a unit has no owner", args);
    require(seen.contributors == seen.count, "a unit lacks contributors", args);
    require(seen.next == seen.tiles.end, "the last tiles of a unit are not visited", args);
  }
}

// Every unit has one place in the order of dealing; that of all heads together is by falling size, unless it is of pieces.
void check_dealing(const Args& args) {
  const int row_tiles = num_row_tiles(args), units = args.batch * args.kv_heads * row_tiles;
  std::vector<int> places(units, 0);
  int before = args.capacity;
  Unit unit = {};
  for (int index = 0; index < units; ++index) {
    require(deal(args, index, unit), "there are fewer places than units", args);
    require(unit.index < args.batch && unit.head < args.kv_heads && unit.row_tile < row_tiles, "no such unit", args);
    const Span tiles = unit_tiles(args, request_of(args, unit.index), unit.row_tile);
    require(unit.tiles.begin == tiles.begin && unit.tiles.end == tiles.end, "other tiles than the unit's", args);
    require(places[(unit.index * args.kv_heads + unit.head) * row_tiles + unit.row_tile]++ == 0, "a unit has two places", args);
    const bool equal = !args.packed_tokens && args.seq_lens == nullptr && args.query_lens == nullptr && args.cache_kind != kRagged;
    if (args.plan.deal_heads < args.batch * args.kv_heads || !equal || args.window > 0 || args.tokens > args.capacity) continue;
    require(tiles.end - tiles.begin <= before, "units do not fall in size", args);
    before = tiles.end - tiles.begin;
  }
  require(!deal(args, units, unit), "there are more places than units", args);
}

// What is chosen for prompts of a causal model on a GPU of 132 CTAs: history, or -1.
int dealt_history(int batch, int kv_heads, int group, int tokens, int capacity, bool known) {
  const std::vector<int32_t> seq_lens(batch, tokens);
  Args args = {};
  args.batch = batch, args.kv_heads = kv_heads, args.group = group, args.heads = kv_heads * group;
  args.tokens = tokens, args.capacity = capacity, args.causal = true;
  args.key_width = args.value_width = 128;
  if (!known) args.seq_lens = seq_lens.data();
  args.plan = {128, 128, 4, 132, 2, 0, false};
  choose_dealing(args, args.plan);
  require(args.plan.deal_heads >= 1 && args.plan.deal_heads <= batch * kv_heads, "no such number of heads", args);
  return args.plan.deal_history;
}

void check_choice() {
  const auto expect = [](bool right, const char* what) {
    if (!right) std::printf("%s\n", what), std::exit(1);
  };
  expect(dealt_history(1, 2, 3, 235, 235, true) == 0, "a unit or less for each CTA is cut");
  expect(dealt_history(21, 1, 5, 996, 996, true) == 0, "many short units are cut");
  expect(dealt_history(1, 1, 1, 8192, 8192, true) == -1, "fewer long units than CTAs are dealt");
  expect(dealt_history(1, 1, 1, 20000, 20000, true) == -1, "fewer than two long units for each CTA are dealt");
  expect(dealt_history(2, 2, 3, 235, 4096, false) >= 0, "a prompt at the front of a cache is cut");
  expect(dealt_history(2, 2, 3, 235, 1 << 20, false) < 1 << 16, "few units of long histories are dealt");
  expect(dealt_history(1, 2, 3, 235, 100, true) == -1, "more tokens than keys are dealt");
  expect(dealt_history(1, 8, 4, 2048, 16384, true) > 0, "ranges of more keys than the L2 cache holds are cut");
}

// The tiles of every unit hold exactly the keys that its rows see.
void check_tiles(const Args& args) {
  for (int b = 0; b < args.batch; ++b) {
    if (!args.packed_tokens) check_request(args, b);
    const Request request = request_of(args, b);
    for (int row_tile = 0; row_tile < num_row_tiles(args); ++row_tile) {
      const Span rows = unit_rows(args, request, row_tile), tiles = unit_tiles(args, request, row_tile);
      const Span keys = unit_keys(args, request, row_tile);
      int first = args.capacity, last = -1;
      int token = -1, row_first = args.capacity, row_last = -1;  // the rows of a token see the same keys
      for (int row = rows.begin; row < rows.end; ++row) {
        if (row / args.group != token) {
          token = row / args.group, row_first = args.capacity, row_last = -1;
          for (int key = 0; key < args.capacity; ++key) {
            if (!sees(args, request, row, key)) continue;
            row_first = key < row_first ? key : row_first;
            row_last = key;
          }
        }
        if (token < request.tokens) {
          const Span seen = token_keys(args, request, token);
          require(seen.begin == row_first && seen.end == row_last + 1, "the keys of a token are wrong", args);
        }
        first = row_first < first ? row_first : first;
        last = row_last > last ? row_last : last;
      }
      if (last < 0) {
        require(tiles.begin == tiles.end && keys.begin == keys.end, "padding has work", args);
      } else {
        require(keys.begin == first && keys.end == last + 1, "the keys of a unit are wrong", args);
        require(tiles.begin == first / args.plan.key_tile && tiles.end == last / args.plan.key_tile + 1,
                "the tiles of a unit are wrong", args);
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto pick = [&](auto... choices) {
    const int values[] = {choices...};
    return values[random() % (sizeof values / sizeof *values)];
  };
  int64_t schedules = 0;

  // Every length around the tile's edges, alone and beside a long neighbour.
  for (int ranges : {1, 2, 7, 131, 132, 264}) {
    for (int length = 0; length <= 140; ++length) {
      for (int overhead : {0, 1, 3}) {
        const int32_t seq_lens[] = {length, 140, length};
        Args args = {};
        args.batch = 3, args.kv_heads = 3, args.group = 5, args.heads = 15, args.tokens = 1,
        args.capacity = 140;
        args.seq_lens = seq_lens, args.causal = true;
        args.plan = {64, 16, overhead, ranges, 1, 0, false};
        check_schedule(args);
        if (ranges == 1 && overhead == 0) check_tiles(args);
        ++schedules;
      }
    }
  }

  for (int round = 0; round < 12000; ++round) {
    Args args = {};
    args.batch = pick(1, 2, 3, 5, 33);
    args.kv_heads = pick(1, 2, 3, 7);
    args.group = pick(1, 3, 4, 5, 7, 16);
    args.heads = args.kv_heads * args.group;
    args.tokens = pick(1, 1, 2, 3, 17, 64, 65);
    args.causal = pick(0, 1, 1) == 1;
    args.window = args.causal ? pick(0, 0, 1, 5, 64, 1000) : 0;
    args.capacity = pick(1, 63, 64, 65, 200, 1000);
    args.plan = {pick(1, 16, 64, 128), pick(1, 6, 16, 64, 96), pick(0, 1, 2, 5), pick(1, 2, 7, 131, 132, 264),
                 pick(1, 2, 10), pick(0, 0, 1, 2, 3, 8, 13, 16), pick(0, 1) != 0};
    std::vector<int32_t> seq_lens, query_lens, cu_seqlens{0};
    const auto length = [&](int limit) {  // garbage included
      const int kind = pick(0, 1, 2, 3, 3, 3, 3, 3);
      if (kind == 0) return pick(0, limit, limit - 1, 1);
      if (kind == 1) return pick(-5, limit + 1, 2147483647, -2147483647 - 1);
      return static_cast<int>(random() % (limit + 1));
    };
    const int same = pick(0, 1) == 1 ? length(args.capacity) : -1;
    for (int b = 0; b < args.batch; ++b) {
      seq_lens.push_back(same >= 0 ? same : length(args.capacity));
      query_lens.push_back(same >= 0 ? args.tokens : length(args.tokens));
      cu_seqlens.push_back(pick(0, 1, 2, 3) == 0
                               ? length(args.capacity)
                               : static_cast<int>(cu_seqlens.back() * 0.9) + pick(0, 1, 5, 63, 64, 65));
    }
    if (pick(0, 1, 1, 1) == 1) args.seq_lens = seq_lens.data();
    if (pick(0, 1) == 1) args.query_lens = query_lens.data();
    if (pick(0, 1) == 1) args.cache_kind = kRagged, args.cu_seqlens = cu_seqlens.data();
    args.plan.deal_history = pick(-1, 0, 200, 100000), args.plan.deal_heads = pick(1, 2, 3, args.batch * args.kv_heads);
    check_schedule(args);
    check_dealing(args);
    if (args.batch * args.group * args.tokens <= 200) check_tiles(args);
    ++schedules;
  }

  // Packed tokens in pieces, whatever their number and that of the requests.
  for (int round = 0; round < 6000; ++round) {
    Args args = {};
    args.packed_tokens = true;
    args.requests = pick(1, 2, 3, 5, 33, 70);
    args.kv_heads = pick(1, 2, 3);
    args.group = pick(1, 3, 4, 16);
    args.heads = args.kv_heads * args.group;
    args.causal = pick(0, 1, 1) == 1;
    args.window = args.causal ? pick(0, 0, 5, 64) : 0;
    args.capacity = pick(1, 64, 200, 1000);
    std::vector<int32_t> seq_lens, offsets{pick(0, 0, 0, 7)};
    for (int b = 0; b < args.requests; ++b) {
      const int tokens = pick(0, 1, 1, 1, 2, 17, static_cast<int>(random() % 150));
      offsets.push_back((b == 0 ? 0 : offsets.back()) + tokens);
      seq_lens.push_back(pick(0, 1, 1) == 0 ? static_cast<int>(random() % (args.capacity + 2)) : args.capacity);
    }
    args.total_tokens = offsets.back() + pick(0, 0, 1, 30);
    if (args.total_tokens == 0) continue;
    args.seq_lens = seq_lens.data(), args.cu_query_lens = offsets.data();
    cut_into_pieces(args, pick(1, 2, 3, 8, 32, 128));
    std::vector<Request> pieces;
    for (int i = 0; i < args.batch; ++i) pieces.push_back(piece(args, i));
    args.pieces = pieces.data();
    args.plan = {pick(16, 64, 128), args.group * args.tokens, pick(0, 1, 5), pick(1, 7, 132), pick(1, 2), 0, false};
    args.plan.deal_heads = pick(1, 2, args.kv_heads);
    check_pieces(args, offsets);
    check_schedule(args);
    check_dealing(args);
    check_tiles(args);
    ++schedules;
  }

  // Sizes beyond 32 bits: W and range * W.
  {
    std::vector<int32_t> seq_lens(64, 1 << 29);
    seq_lens[7] = 12345;
    Args args = {};
    args.batch = 64, args.kv_heads = 8, args.group = 4, args.heads = 32, args.tokens = 1,
    args.capacity = 1 << 29;
    args.seq_lens = seq_lens.data(), args.causal = true;
    args.plan = {64, 16, 1, 264, 2, 0, false};
    check_schedule(args);
    ++schedules;
  }
  check_choice();
  std::printf("%lld schedules\n", static_cast<long long>(schedules));
  return 0;
}
