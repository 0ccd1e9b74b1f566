#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cpu_isa.h"
#include "core/integers.h"
#include "core/op_specs.h"
#include "core/over_ranks.h"
#include "lean_attention/schedule.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#include "lean_attention/one_segment.h"
#endif

namespace leanfleet::lean_attention {

LEANFLEET_CPU_FUNCTION(int64_t, thread_scratch_bytes, (const Args& args))
LEANFLEET_CPU_FUNCTION(void, append_head, (const Args& args, int32_t index, int32_t head))
LEANFLEET_CPU_FUNCTION(void, attend, (const Args& args, int64_t work, int32_t ranges, int32_t range, char* scratch))
LEANFLEET_CPU_FUNCTION(void, merge, (const Args& args, int64_t work, int32_t ranges, int32_t range, char* scratch))

namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 30;  // positions, rows and page ids are int32 in the kernels
constexpr int64_t kMaxWidth = int64_t{1} << 28;      // and bytes of a row
constexpr int64_t kMaxPacked = int64_t{1} << 22;     // requests of packed tokens: x 128 tokens of a piece is below 2^30

// Those of input `cache`, whose rows have `width` numbers, and whose strides count these.
Scales scales_of(const Call& call, int cache, int input, int per_token, int output, CacheStrides strides, int64_t width) {
  const Tensor& scale = call.inputs[input];
  if (!scale.present()) return {};
  Scales scales = {};
  scales.in = scale.as<const float>();
  scales.elements = scale.elements();
  const DType type = call.inputs[cache].dtype;
  scales.form = type == DType::kFloat8e4m3fn ? kFloat8 : type == DType::kUint8 ? kInt4 : kInt8;
  scales.kind = call.attrs[per_token].i != 0 ? kPerToken : scale.rank == 1 ? kPerTensor : kPerChannel;
  if (scales.kind == kPerToken) {
    scales.out = call.outputs[output].as<float>();
    scales.strides = {strides.batch / width, strides.page / width, strides.head / width, strides.token / width};
  }
  return scales;
}

// Everything but the plan and the workspace.
Args make_args(const Call& call) {
  const auto dim = [&](Dim symbol) { return call.dims[symbol]; };
  const int64_t b = dim(kDimB), h = dim(kDimH), hkv = dim(kDimHkv), nq = dim(kDimNq);
  const int64_t d = dim(kDimD), dv = dim(kDimDv);
  const bool bnhd = call.bnhd();
  Args args = {};
  args.query = call.inputs[kQuery].data;
  args.key_cache = call.inputs[kKeyCache].data;
  args.value_cache = call.inputs[kValueCache].data;
  args.new_key = call.inputs[kNewKey].data;
  args.new_value = call.inputs[kNewValue].data;
  args.output = call.outputs[kOutOutput].data;
  args.lse = call.outputs[kOutLse].as<float>();
  args.key_cache_out = call.outputs[kOutKeyCacheOut].data;
  args.value_cache_out = call.outputs[kOutValueCacheOut].data;
  args.seq_lens = call.inputs[kSeqLens].as<const int32_t>();
  args.query_lens = call.inputs[kQueryLens].as<const int32_t>();
  args.cu_seqlens = call.inputs[kCuSeqlens].as<const int32_t>();
  args.block_table = call.inputs[kBlockTable].as<const int32_t>();
  args.sinks = call.inputs[kSinks].as<const float>();
  args.cos_cache = call.inputs[kCosCache].as<const float>();
  args.sin_cache = call.inputs[kSinCache].as<const float>();

  const bool packed = call.attrs[kAttrPackedQkv].i != 0;  // heads: those of the query, of new_key, of new_value
  args.query_strides = head_token_strides(bnhd, packed ? h + 2 * hkv : h, nq, d);
  args.output_strides = head_token_strides(bnhd, h, nq, dv);
  args.lse_strides = head_token_strides(bnhd, h, nq, 1);
  args.new_key_strides = packed ? args.query_strides : head_token_strides(bnhd, hkv, nq, d);
  args.new_value_strides = packed ? args.query_strides : head_token_strides(bnhd, hkv, nq, dv);
  if (packed && args.query != nullptr) {
    const int64_t head = args.query_strides.head * element_size(call.inputs[kQuery].dtype);
    args.new_key = static_cast<const char*>(args.query) + h * head;
    args.new_value = static_cast<const char*>(args.query) + (h + hkv) * head;
  }
  args.key_cache_elements = call.inputs[kKeyCache].elements();
  args.value_cache_elements = call.inputs[kValueCache].elements();
  if (call.inputs[kBlockTable].present()) {
    const int64_t block = dim(kDimBlock);
    args.cache_kind = kPaged;
    args.capacity = static_cast<int32_t>(dim(kDimM) * block);
    args.block = static_cast<int32_t>(block);
    args.pages_per_request = static_cast<int32_t>(dim(kDimM));
    args.num_pages = static_cast<int32_t>(dim(kDimP));
    args.key_strides = {0, block * hkv * d, d, hkv * d};
    args.value_strides = {0, block * hkv * dv, dv, hkv * dv};
  } else if (call.inputs[kCuSeqlens].present()) {
    const int64_t total = dim(kDimTotal);
    args.cache_kind = kRagged;
    args.capacity = static_cast<int32_t>(total);
    args.key_strides = {0, 0, total * d, d};
    args.value_strides = {0, 0, total * dv, dv};
  } else {
    const int64_t s = dim(kDimS);
    args.cache_kind = kDense;
    args.capacity = static_cast<int32_t>(s);
    args.key_strides = {hkv * s * d, 0, s * d, d};
    args.value_strides = {hkv * s * dv, 0, s * dv, dv};
  }
  args.key_scales = scales_of(call, kKeyCache, kKeyScale, kAttrKeyPerToken, kOutKeyScaleOut, args.key_strides, d);
  args.value_scales = scales_of(call, kValueCache, kValueScale, kAttrValuePerToken, kOutValueScaleOut, args.value_strides, dv);
  args.dtype = static_cast<int32_t>(call.inputs[kQuery].dtype);
  args.batch = static_cast<int32_t>(b);
  args.heads = static_cast<int32_t>(h);
  args.kv_heads = static_cast<int32_t>(hkv);
  args.group = static_cast<int32_t>(h / hkv);
  args.tokens = static_cast<int32_t>(nq);
  args.key_width = static_cast<int32_t>(d);
  args.value_width = static_cast<int32_t>(dv);
  const float scale = call.attrs[kAttrScale].f;
  args.scale = scale != 0.0f ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
  args.softcap = call.attrs[kAttrSoftcap].f;
  args.window = static_cast<int32_t>(std::clamp<int64_t>(call.attrs[kAttrWindow].i, 0, kMaxPositions));
  args.causal = call.attrs[kAttrCausal].i != 0;
  if (call.inputs[kCuQueryLens].present()) {
    args.packed_tokens = true;
    args.cu_query_lens = call.inputs[kCuQueryLens].as<const int32_t>();
    args.requests = args.batch;
    args.total_tokens = args.tokens;
    for (Strides* strides :
         {&args.query_strides, &args.output_strides, &args.lse_strides, &args.new_key_strides, &args.new_value_strides})
      strides->batch = strides->token;
  }
  args.append = call.attrs[kAttrAppend].i != 0;
  if (call.inputs[kCosCache].present()) {
    args.rotary_half = static_cast<int32_t>(dim(kDimHalf));
    args.rotary_positions = static_cast<int32_t>(std::min(dim(kDimPositions), kMaxPositions));
    args.rotary_interleaved = call.attrs[kAttrRotaryInterleaved].i != 0;
  }
  return args;
}

// Asks for what the plan in `args` needs.
void carve(Args& args, Workspace& ws) {
  const auto slots_of = [](const Plan& plan) { return 2 * static_cast<int64_t>(plan.max_ranges) * plan.row_tile; };
  const int64_t slots = std::max(slots_of(args.plan), slots_of(args.short_plan));
  args.work_prefix = ws.scratch<int64_t>(args.batch + 1);
  if (args.packed_tokens) args.pieces = ws.scratch<Request>(args.batch + args.requests);
  args.partial_output = ws.scratch<float>(slots * args.value_width);
  args.partial_max = ws.scratch<float>(slots);
  args.partial_sum = ws.scratch<float>(slots);
  if (args.plan.merge_apart || args.short_plan.merge_apart)
    args.cut_units = ws.scratch<CutUnit>(std::max(args.plan.max_ranges, args.short_plan.max_ranges));
}

// ---- Keys that are spread over ranks

int64_t world_of(const Call& call) { return call.attrs[kAttrWorld].i; }

PartialAttention own_part(const Call& call) {
  const Tensor &output = call.outputs[kOutOutput], &lse = call.outputs[kOutLse];
  const int64_t inner = call.bnhd() ? 1 : call.dims[kDimNq];
  return {output.data,       lse.as<float>(), lse.elements(),
          call.dims[kDimDv], output.dtype,    {call.inputs[kSinks].as<const float>(), call.dims[kDimH], inner}};
}

// The communicator, or null for a world of one. Sinks join when the ranks' parts are merged.
Status join(const Call& call, Engine engine, Args& args, std::shared_ptr<Communicator>* found) {
  if (world_of(call) == 1) return {};
  LEANFLEET_RETURN_IF_ERROR(communicator_of(call, call.attrs[kAttrCommunicator].s, world_of(call), engine, found));
  args.sinks = nullptr;
  return {};
}

// A quantised cache and its scales come together.
Status check_scale(const Call& call, int cache, int scale) {
  const char *const cache_name = call.spec->inputs[cache].name, *const scale_name = call.spec->inputs[scale].name;
  const DType type = call.inputs[cache].dtype;
  if (is_narrow(type) && !call.inputs[scale].present())
    return call.invalid(std::string(cache_name) + " is " + dtype_name(type) + " and " + scale_name +
                        " is missing; give the scales that its elements are multiplied by");
  if (!is_narrow(type) && call.inputs[scale].present())
    return call.invalid(std::string(scale_name) + " is given and " + cache_name + " is " + dtype_name(type) +
                        "; scales go with a cache of " + narrow_type_names());
  return {};
}

Status check(const Call& call) {
  LEANFLEET_RETURN_IF_ERROR(check_world(call, world_of(call)));
  LEANFLEET_RETURN_IF_ERROR(check_scale(call, kKeyCache, kKeyScale));
  LEANFLEET_RETURN_IF_ERROR(check_scale(call, kValueCache, kValueScale));
  const auto refuse = [&](const char* what, int64_t count, const char* unit) {
    return call.unsupported(what + std::to_string(count) + unit + "; the kernels take fewer than 2^30");
  };
  const int64_t rows = call.dims[kDimH] * call.dims[kDimNq], pages = call.dims[kDimP];
  int64_t capacity = call.dims[kDimS];
  if (call.inputs[kBlockTable].present()) capacity = call.dims[kDimM] * call.dims[kDimBlock];
  else if (call.inputs[kCuSeqlens].present()) capacity = call.dims[kDimTotal];
  const int64_t tokens = call.dims[kDimB] * call.dims[kDimNq];
  if (rows >= kMaxPositions) return refuse("query has H x Nq = ", rows, " rows a request");
  if (tokens >= kMaxPositions) return refuse("query has B x Nq = ", tokens, " tokens");
  if (capacity >= kMaxPositions) return refuse("the cache holds ", capacity, " positions a request");
  if (pages >= kMaxPositions) return refuse("the pool has ", pages, " pages");
  const int64_t heads = call.dims[kDimB] * call.dims[kDimHkv];
  if (heads >= kMaxPositions) return refuse("the batch has B x Hkv = ", heads, " heads");
  if (call.inputs[kCuQueryLens].present() && call.dims[kDimB] >= kMaxPacked)
    return call.unsupported("cu_query_lens tells of B = " + std::to_string(call.dims[kDimB]) +
                            " requests; the kernels take fewer than 2^22");
  for (const auto& [tensor, name, columns] :
       {std::tuple("query", "D", call.dims[kDimD]), std::tuple("value_cache", "Dv", call.dims[kDimDv])})
    if (columns >= kMaxWidth)
      return call.unsupported(std::string(tensor) + " has " + name + " = " + std::to_string(columns) +
                              "; the kernels take fewer than 2^28");
  const int64_t rotated = 2 * call.dims[kDimHalf], width = call.dims[kDimD];
  if (call.inputs[kCosCache].present() && rotated > width)
    return call.invalid("cos_cache has half = " + std::to_string(call.dims[kDimHalf]) + ", which rotates " +
                        std::to_string(rotated) + " columns; query has D = " + std::to_string(width) +
                        ", expected half <= " + std::to_string(width / 2));
  return {};
}

std::string at(const char* name, int64_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

// Slots of one page that one request writes: those at [begin, end) of page `page`, which is block_table[b,j].
struct Written {
  int32_t page, begin, end, b, j;
};

constexpr int32_t kNoPage = -1;  // in a block table: keys that count for nothing, new tokens that are not written

// Calls body(page, begin, end, j) for every page under positions `span` of request b.
template <class F>
void for_pages(const Args& args, int32_t b, Span span, F&& body) {
  for (int32_t position = span.begin; position < span.end;) {
    const int32_t j = position / args.block, begin = position % args.block;
    const int32_t end = std::min(args.block, begin + span.end - position);
    const int32_t page = args.block_table[static_cast<int64_t>(b) * args.pages_per_request + j];
    if (page != kNoPage) body(page, begin, end, j);
    position += end - begin;
  }
}

std::string page_of(const Written& at) { return "block_table[" + std::to_string(at.b) + "," + std::to_string(at.j) + "]"; }

std::string slot_text(int32_t page, int32_t slot) {
  return "slot " + std::to_string(slot) + " of page " + std::to_string(page);
}

// With append: no two requests of a paged cache write one slot, and none reads a slot that another writes, nor one of its
// own at a second place of its table. (Requests of dense and ragged caches have no slot in common.)
Status check_writers(const Call& call, const Args& args) {
  std::vector<Written> written;  // by page and slot
  for (int32_t b = 0; b < args.batch; ++b) {
    const Request request = whole_request(args, b);
    for_pages(args, b, {request.keys - request.tokens, request.keys},
              [&](int32_t page, int32_t begin, int32_t end, int32_t j) { written.push_back({page, begin, end, b, j}); });
  }
  std::sort(written.begin(), written.end(), [](const Written& x, const Written& y) {
    return std::tie(x.page, x.begin, x.b, x.j) < std::tie(y.page, y.begin, y.b, y.j);
  });
  for (size_t i = 1; i < written.size(); ++i) {
    const Written &x = written[i - 1], &y = written[i];
    if (x.page == y.page && x.end > y.begin)
      return call.invalid((x.b == y.b ? "request " + std::to_string(x.b) + " writes twice to "
                                      : "requests " + std::to_string(x.b) + " and " + std::to_string(y.b) + " both write to ") +
                          slot_text(y.page, y.begin) + ", which is " + page_of(x) + " and " + page_of(y) +
                          "; a slot takes one new token");
  }
  // No two of them overlap now, so that their ends are sorted too.
  for (int32_t b = 0; b < args.batch; ++b) {
    const Request request = whole_request(args, b);
    if (request.tokens == 0) continue;  // it reads nothing
    Status status;
    for_pages(
        args, b, {token_keys(args, request, 0).begin, request.keys}, [&](int32_t page, int32_t begin, int32_t end, int32_t j) {
          auto at = std::partition_point(written.begin(), written.end(),
                                         [&](const Written& w) { return w.page < page || (w.page == page && w.end <= begin); });
          for (; status.ok() && at != written.end() && at->page == page && at->begin < end; ++at)
            if (at->b != b || at->j != j)
              status = call.invalid("request " + std::to_string(b) + " reads " + slot_text(page, std::max(begin, at->begin)) +
                                    ", which is " + page_of({page, begin, end, b, j}) + ", and request " +
                                    std::to_string(at->b) + " writes it in the same call, as " + page_of(*at) +
                                    "; requests share only what none of them writes");
        });
    LEANFLEET_RETURN_IF_ERROR(status);
  }
  return {};
}

// Offsets cu[requests + 1] of 0 .. `end`, which is how many `whole` has, in words.
Status check_offsets(const Call& call, const char* name, const int32_t* cu, int32_t requests, int32_t end,
                     const std::string& whole) {
  for (int32_t b = 0; b <= requests; ++b) {
    if (cu[b] < 0 || cu[b] > end)
      return call.invalid(at(name, b) + " is " + std::to_string(cu[b]) + "; " + whole + ", expected 0 .. " +
                          std::to_string(end));
    if (b > 0 && cu[b] < cu[b - 1])
      return call.invalid(at(name, b) + " is " + std::to_string(cu[b]) + ", less than " + at(name, b - 1) + " = " +
                          std::to_string(cu[b - 1]) + "; offsets must not fall");
  }
  return {};
}

Status check_new_tokens(const Call& call, const Args& args, int32_t b, int32_t keys) {
  const auto too_many = [&](const std::string& text) {
    return call.invalid(text + ", more than the " + std::to_string(keys) + " valid keys of request " + std::to_string(b) +
                        ", which count the new tokens");
  };
  const bool no_share = keys == 0 && world_of(call) > 1;  // other ranks may have keys
  if (args.packed_tokens) {
    const int32_t tokens = args.cu_query_lens[b + 1] - args.cu_query_lens[b];
    if (tokens > keys && !no_share)
      return too_many("cu_query_lens gives request " + std::to_string(b) + " " + std::to_string(tokens) + " tokens");
  } else if (args.query_lens != nullptr) {
    const int32_t tokens = args.query_lens[b];
    if (tokens < 0 || tokens > args.tokens)
      return call.invalid(at("query_lens", b) + " is " + std::to_string(tokens) + "; query has " + std::to_string(args.tokens) +
                          " rows a request, expected 0 .. " + std::to_string(args.tokens));
    if (tokens > keys && !no_share) return too_many(at("query_lens", b) + " is " + std::to_string(tokens));
  }
  return {};
}

// Scales that stay as they are: positive numbers.
Status check_scales(const Call& call, const char* name, const Scales& scales) {
  if (scales.kind != kPerTensor && scales.kind != kPerChannel) return {};
  for (int64_t i = 0; i < scales.elements; ++i) {
    const double scale = scales.in[i];
    if (scale > 0.0 && std::isfinite(scale)) continue;
    const int64_t width = scales.elements / call.dims[kDimHkv];
    const std::string index =
        scales.kind == kPerTensor ? std::to_string(i) : std::to_string(i / width) + ",0," + std::to_string(i % width);
    return call.invalid(std::string(name) + "[" + index + "] is " + std::to_string(scale) + "; a scale is a positive number");
  }
  return {};
}

Status check_values(const Call& call, bool strict) {
  if (!strict) return {};
  const Args args = make_args(call);
  LEANFLEET_RETURN_IF_ERROR(check_scales(call, "key_scale", args.key_scales));
  LEANFLEET_RETURN_IF_ERROR(check_scales(call, "value_scale", args.value_scales));
  if (args.cu_seqlens != nullptr)
    LEANFLEET_RETURN_IF_ERROR(check_offsets(call, "cu_seqlens", args.cu_seqlens, args.batch, args.capacity,
                                            "the cache has " + std::to_string(args.capacity) + " positions"));
  if (args.packed_tokens) {
    LEANFLEET_RETURN_IF_ERROR(check_offsets(call, "cu_query_lens", args.cu_query_lens, args.batch, args.tokens,
                                            "query has " + std::to_string(args.tokens) + " rows"));
    if (args.cu_query_lens[0] != 0)
      return call.invalid("cu_query_lens[0] is " + std::to_string(args.cu_query_lens[0]) + "; the first request begins at 0");
  }
  for (int32_t b = 0; b < args.batch; ++b) {
    const int32_t capacity = args.cu_seqlens != nullptr ? args.cu_seqlens[b + 1] - args.cu_seqlens[b] : args.capacity;
    const int32_t keys = args.seq_lens != nullptr ? args.seq_lens[b] : capacity;
    if (keys < 0 || keys > capacity)
      return call.invalid(at("seq_lens", b) + " is " + std::to_string(keys) + "; request " + std::to_string(b) +
                          "'s cache holds " + std::to_string(capacity) + ", expected 0 .. " + std::to_string(capacity));
    LEANFLEET_RETURN_IF_ERROR(check_new_tokens(call, args, b, keys));
    if (args.cos_cache != nullptr && keys > args.rotary_positions && whole_request(args, b).tokens > 0)
      return call.invalid("the last new token of request " + std::to_string(b) + " stands at position " +
                          std::to_string(keys - 1) + "; cos_cache has " + std::to_string(args.rotary_positions) +
                          " rows, expected positions 0 .. " + std::to_string(args.rotary_positions - 1));
    if (args.block_table != nullptr) {
      for (int32_t j = 0; j < args.pages_per_request && j * args.block < keys; ++j) {
        const int32_t page = args.block_table[static_cast<int64_t>(b) * args.pages_per_request + j];
        if (page != kNoPage && (page < 0 || page >= args.num_pages))
          return call.invalid("block_table[" + std::to_string(b) + "," + std::to_string(j) + "] is " + std::to_string(page) +
                              "; the pool has " + std::to_string(args.num_pages) + " pages, expected 0 .. " +
                              std::to_string(args.num_pages - 1) + ", or -1 for none");
      }
    }
  }
  return args.append && args.block_table != nullptr ? check_writers(call, args) : Status{};
}

constexpr int kRangesPerThread = 4, kWorkPerRange = 8;
constexpr int32_t kRowTile = 96;

// How a CPU cuts the work. Many rows share the transposed keys of a tile.
Plan cpu_plan(const Args& args, int threads) {
  const int32_t rows = args.group * args.tokens, row_tiles = ceil_div(rows, kRowTile);
  Plan plan;
  plan.key_tile = 128;
  plan.row_tile = row_tiles == 1 ? rows : (ceil_div(rows, row_tiles) + 5) / 6 * 6;
  plan.unit_overhead = 0;
  plan.max_ranges = kRangesPerThread * threads;
  plan.min_range_work = 1;
  return plan;
}

void copy_cache(Threads& threads, const void* from, void* to, int64_t bytes) {
  constexpr int64_t kChunk = 1 << 20;
  if (from == to) return;
  parallel_for(threads, ceil_div(bytes, kChunk), [&](int64_t i) {
    std::memcpy(static_cast<char*>(to) + i * kChunk, static_cast<const char*>(from) + i * kChunk,
                std::min(kChunk, bytes - i * kChunk));
  });
}

void append(const Args& args, Threads& threads, int64_t element) {
  const auto bytes_of = [&](int64_t elements, const Scales& scales) {
    return elements * (scales.kind == kNoScale ? element : 1);
  };
  copy_cache(threads, args.key_cache, args.key_cache_out, bytes_of(args.key_cache_elements, args.key_scales));
  copy_cache(threads, args.value_cache, args.value_cache_out, bytes_of(args.value_cache_elements, args.value_scales));
  for (const Scales* scales : {&args.key_scales, &args.value_scales})
    if (scales->kind == kPerToken) copy_cache(threads, scales->in, scales->out, scales->elements * 4);
  const auto append_head = [&, append_rows = select_append_head()](int64_t i) {
    append_rows(args, static_cast<int32_t>(i / args.kv_heads), static_cast<int32_t>(i % args.kv_heads));
  };
  const int64_t heads = static_cast<int64_t>(args.batch) * args.kv_heads;
  if (heads * args.tokens * (args.key_width + args.value_width) * element < (1 << 16)) {
    for (int64_t i = 0; i < heads; ++i) append_head(i);  // sooner done than shared out
  } else {
    parallel_for(threads, heads, [&](int64_t i) { append_head(i); });
  }
}

Status run_on_cpu(const Call& call, const CpuTarget& target, Workspace& ws) {
  Threads& threads = *target.threads;
  Args args = make_args(call);
  args.bfloat16_products = cpu_has_bfloat16();
  if (args.packed_tokens) cut_into_pieces(args, std::clamp(kRowTile / args.group, 1, args.total_tokens));
  args.plan = cpu_plan(args, threads.count());
  carve(args, ws);
  if (args.rotary_half > 0 && args.append && args.key_scales.kind != kNoScale)
    args.rotated_key = ws.scratch<char>(static_cast<int64_t>(args.batch) * args.kv_heads * args.key_width * 4);
  const int64_t stride = select_thread_scratch_bytes()(args);
  char* const scratch = ws.scratch<char>(threads.count() * stride);
  const bool alone = world_of(call) == 1;
  const GatheredAttention gathered = alone ? GatheredAttention{} : carve_gathered(own_part(call), world_of(call), ws);
  if (ws.counting()) return {};
  std::shared_ptr<Communicator> communicator;
  LEANFLEET_RETURN_IF_ERROR(join(call, Engine::kSharedMemory, args, &communicator));

  for (int32_t i = 0; args.packed_tokens && i < args.batch; ++i) args.pieces[i] = piece(args, i);
  if (args.append) append(args, threads, element_size(call.inputs[kQuery].dtype));

  const int64_t work = fill_work_prefix(args, args.work_prefix);
  // Where there is work enough, several ranges a thread even out what tiles really cost and what else the
  // machine does.
  const int64_t per_thread = std::clamp<int64_t>(work / (kWorkPerRange * threads.count()), 1, kRangesPerThread);
  args.plan.max_ranges = static_cast<int32_t>(per_thread * threads.count());
  const int32_t ranges = num_ranges(args.plan, work);
  const int64_t tasks = std::min(threads.count(), ranges);
  // A task is a thread's share of scratch; it takes ranges until none is left.
  const auto for_ranges = [&](auto kernel) {
    std::atomic<int32_t> next{0};
    parallel_for(threads, tasks, [&](int64_t task) {
      for (int32_t range; (range = next.fetch_add(1, std::memory_order_relaxed)) < ranges;)
        kernel(args, work, ranges, range, scratch + task * stride);
    });
  };
  for_ranges(select_attend());
  const auto merge = select_merge();
  const int64_t partial = static_cast<int64_t>(ranges) * args.plan.row_tile * args.value_width;
  if (partial < (1 << 16)) {
    for (int32_t range = 0; range + 1 < ranges; ++range) merge(args, work, ranges, range, scratch);
  } else {
    for_ranges(merge);
  }
  return alone ? Status{} : merge_over_ranks(call, *communicator, own_part(call), gathered, target);
}

#ifdef LEANFLEET_CUDA
// For tests and benchmarks. LEANFLEET_RANGES: another number of ranges than one an SM. LEANFLEET_ONE_SEGMENT: a way of one_segment.h,
// where it can be had, or -1 for none. LEANFLEET_MERGE_APART: 1 for merges by a launch of their own, whatever they gain.
// LEANFLEET_CONVERT: 0 for prompts over quantised caches without wgmma.
ForcedPlan forced_plan(const Args& args) {
  ForcedPlan forced;
  if (const char* text = std::getenv("LEANFLEET_RANGES"))
    forced.ranges = static_cast<int>(std::clamp(std::atoi(text), 0, 1 << 16));
  if (const char* text = std::getenv("LEANFLEET_ONE_SEGMENT"))
    forced.way =
        can_be_one_segment(args) ? std::clamp(std::atoi(text), -1, static_cast<int>(std::size(kOneSegmentWays)) - 1) : -1;
  if (const char* text = std::getenv("LEANFLEET_MERGE_APART")) forced.merge_apart = std::atoi(text) != 0;
  if (const char* text = std::getenv("LEANFLEET_CONVERT")) forced.converts = std::atoi(text) != 0;
  return forced;
}

Status run_on_cuda(const Call& call, const CudaTarget& target, Workspace& ws) {
  Args args = make_args(call);
  for (const auto& [name, width] : {std::pair("D", args.key_width), std::pair("Dv", args.value_width)})
    if (width > 256 || width % 8 != 0)
      return call.unsupported(std::string(name) + " = " + std::to_string(width) +
                              "; the CUDA kernels take multiples of 8 up to 256, others run on the CPU");
  if (args.packed_tokens) cut_for_cuda(args);
  args.plan = cuda_plan(args, target.sm_count, forced_plan(args));
  if (args.short_tokens > 0) args.short_plan = cuda_plan(short_launch(args), target.sm_count, forced_plan(short_launch(args)));
  carve(args, ws);
  args.tickets = ws.sync<uint32_t>(std::max(args.plan.max_ranges, args.short_plan.max_ranges) + 1);
  if (args.rotary_half > 0) {
    const int64_t bytes = element_size(call.inputs[kQuery].dtype);
    args.rotated_query = ws.scratch<char>(call.inputs[kQuery].elements() * bytes);
    if (call.inputs[kNewKey].present()) {
      args.rotated_key = ws.scratch<char>(call.inputs[kNewKey].elements() * bytes);
    } else if (args.append && !ws.counting()) {  // packed: they follow the queries
      args.rotated_key = static_cast<char*>(args.rotated_query) + args.heads * args.query_strides.head * bytes;
    }
  }
  const bool alone = world_of(call) == 1;
  const GatheredAttention gathered = alone ? GatheredAttention{} : carve_gathered(own_part(call), world_of(call), ws);
  if (ws.counting()) return {};
  std::shared_ptr<Communicator> communicator;
  LEANFLEET_RETURN_IF_ERROR(join(call, Engine::kNccl, args, &communicator));
  const int error = launch_attention(args, target.device, target.stream);
  if (error != 0 || alone) return cuda_status(call, "launch of the LeanAttention kernel", error);
  return merge_over_ranks(call, *communicator, own_part(call), gathered, target);
}
#else
constexpr Status (*run_on_cuda)(const Call&, const CudaTarget&, Workspace&) = nullptr;
#endif

}  // namespace

const OpImpl kImpl = {check, check_values, run_on_cpu, run_on_cuda};

}  // namespace leanfleet::lean_attention
