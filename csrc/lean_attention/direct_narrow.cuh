// LeanAttention of up to 8 packed rows over quantised caches, keys and values of any form: the products and the way of the CTAs
// are those of direct_kernel.cuh. What differs:
//   numbers  become halves in registers, the query too: its rows are divided by a power of two (row_power). Scales of keys are
//            factors of the query's columns, of rows or of logits; those of values are factors of the weights, which `lift` keeps
//            in half's range, or of the output.
//   append   the CTA that owns a new token's tile quantises it and takes it from shared memory.
//
// Of keys a lane (g, t) holds bytes 64 c + 16 t .. + 15 of a row, of values bytes W g .. where W is an eighth of a row, and of outputs
// columns kWidth / 8 g + 2 m and the next in output[m]; of shorter rows of keys a quarter each.
//
// Copies through shared memory in place of registers (cp.async, two tiles ahead, a lane its own pieces) took longer: on an H100 B16 8k
// 139 us, where straight to registers took 106.
#pragma once

#include "lean_attention/direct_kernel.cuh"

namespace leanfleet::lean_attention {

template <int kWidth>
struct NarrowDirectTile {
  static constexpr int kSlices = 2;  // of 16 tokens
  static constexpr int kTokens = 16 * kSlices;
  static constexpr int kKeyChunks = kWidth / 64, kValueChunks = 1;  // of 16 bytes of a row that a lane holds
};

// Of a tile, what all lanes of its warp need.
template <int kWidth>
struct NarrowStage {
  float scales[2][NarrowDirectTile<kWidth>::kTokens];  // of its tokens' keys and values
  unsigned missing;                                    // a bit for each token whose page is outside the pool
};

constexpr int kNarrowDirectTokens = kDirectWarps * 32;  // that a CTA reads at once

template <int kWidth>
struct alignas(16) NarrowDirectShared : DirectShared<kWidth> {
  __half query[2][kDirectRows][kWidth + 8];  // of two segments, over row_power
  float row_power[2][kDirectRows];           // times a scale of all keys
  // The keys and values that the call appends, as their caches hold them, and their scales.
  uint8_t fresh[2][2][kDirectRows][kWidth];
  float fresh_scales[2][2][kDirectRows];
  NarrowStage<kWidth> stages[kDirectWarps][2];  // of the tile that a warp computes on, and of the one that it reads next
};

template <class T, int kWidth>
struct NarrowDirectCta : DirectBase<T, kWidth, NarrowDirectTile<kWidth>::kSlices, true> {
  using Tile = NarrowDirectTile<kWidth>;
  using Base = DirectBase<T, kWidth, Tile::kSlices, true>;
  using Shared = NarrowDirectShared<kWidth>;
  using Base::args, Base::warp, Base::lane, Base::rows, Base::output, Base::max, Base::sum;
  using Base::group, Base::member, Base::first_tile, Base::readable;
  using Base::kTokens, Base::kRowChunks, Base::kStagingThreads, Base::kScratchStride;
  static constexpr int kSlices = Tile::kSlices;

  Shared& shared;
  float* const scratch;  // [kDirectWarps][rows][kScratchStride]
  uint4 keys[2 * kSlices][Tile::kKeyChunks];
  uint4 values[4 * kSlices][Tile::kValueChunks];
  int slot = 0;   // the stage of the tile that the registers hold
  float lift[2];  // of rows 2 t and 2 t + 1: the output is to be multiplied by it

  __device__ __forceinline__ NarrowDirectCta(const Args& args, char* raw)
      : Base(args, *reinterpret_cast<Shared*>(raw)), shared(*reinterpret_cast<Shared*>(raw)),
        scratch(reinterpret_cast<float*>(raw + sizeof(Shared))) {}
  static int shared_bytes(int rows) { return static_cast<int>(sizeof(Shared)) + kDirectWarps * rows * kScratchStride * 4; }

  __device__ __forceinline__ NarrowStage<kWidth>& stage_at(int which) const { return shared.stages[warp][which]; }

  // Reads

  // Where the rows of a tile lie: of token lane % kTokens, or of the nearest that some row sees and the cache holds.
  struct Place {
    int page, position;
    bool even;         // the tile's rows lie at one distance from each other
    unsigned missing;  // a bit for each token whose page is outside the pool
  };
  __device__ __forceinline__ Place place_of(const DirectWork& work, int begin) const {
    const int wanted = begin + lane % kTokens, token = readable(work, wanted);
    Place place = {0, token, begin >= work.seen.begin && begin + kTokens <= work.cached_end, 0};
    if (args.cache_kind != kPaged) return place;
    const int index = quotient(token, args.block);
    place.position = token - index * args.block;
    place.page = __ldg(args.block_table + static_cast<int64_t>(work.unit.request.b) * args.pages_per_request + index);
    const bool exists = static_cast<unsigned>(place.page) < static_cast<unsigned>(args.num_pages);
    place.missing = __ballot_sync(kFullWarp, !exists && wanted < work.cached_end);
    if (!exists) place.page = 0;
    place.even = place.even && args.block % kTokens == 0;
    return place;
  }

  // A tile's scales and missing pages to a stage. exists: some of the tile is read from the cache.
  __device__ __forceinline__ void read_scales(const DirectWork& work, const Place& place, bool exists,
                                              NarrowStage<kWidth>& stage) const {
    __syncwarp();  // every lane has read what stood here
    if (lane == 0) stage.missing = place.missing;
    if (!exists) return;
    read_scales_of<false>(work, place, stage);
    read_scales_of<true>(work, place, stage);
    cp_async_commit();
  }
  template <bool kValues>
  __device__ __forceinline__ void read_scales_of(const DirectWork& work, const Place& place, NarrowStage<kWidth>& stage) const {
    const Scales& scales = kValues ? args.value_scales : args.key_scales;
    if (scales.kind != kPerToken || lane >= kTokens) return;
    int64_t at = work.unit.head * scales.strides.head + place.position * scales.strides.token;
    if (args.cache_kind == kPaged) at += place.page * scales.strides.page;
    else at += work.unit.request.b * scales.strides.batch + work.unit.request.start * scales.strides.token;
    cp_async_4(shared_address(&stage.scales[kValues][lane]), scales.in + at, 4);
  }

  // A lane's bytes of a row of keys or of values: the first of kOwn, in pieces of up to 16. of_row(piece's first byte, bytes) reads one.
  template <bool kValues, int kOwn, int kChunks, class F>
  __device__ __forceinline__ void take_row(uint4 (&to)[kChunks], F&& of_row) const {
    constexpr int kPiece = kOwn < 16 ? kOwn : 16;
#pragma unroll
    for (int c = 0; c < kOwn / kPiece; ++c)
      to[c] = of_row(kValues ? group() * kOwn + 16 * c : 64 * c + member() * kPiece, std::integral_constant<int, kPiece>{});
  }
  // The same where int4 make rows half as long.
  template <bool kValues, int kChunks, class F>
  __device__ __forceinline__ void take_row(CacheForm form, uint4 (&to)[kChunks], F&& of_row) const {
    constexpr int kOwn = kWidth / (kValues ? 8 : 4);
    if (form == kInt4) take_row<kValues, kOwn / 2>(to, of_row);
    else take_row<kValues, kOwn>(to, of_row);
  }
  template <bool kValues>
  __device__ __forceinline__ int token_of_row(int i) const {
    return kValues ? i / 2 * 8 + 2 * member() + i % 2 : 8 * i + group();
  }

  // The tile's keys, or its values.
  template <bool kValues, int kRows, int kChunks>
  __device__ __forceinline__ void read_rows(const DirectWork& work, const Place& place, uint4 (&to)[kRows][kChunks]) const {
    const Scales& scales = kValues ? args.value_scales : args.key_scales;
    const CacheStrides& strides = kValues ? args.value_strides : args.key_strides;
    const char* const base = kValues ? work.values : work.keys;
    const auto row_at = [&](int token) {
      const int page = __shfl_sync(kFullWarp, place.page, token), position = __shfl_sync(kFullWarp, place.position, token);
      return base + cache_bytes(scales, page * strides.page + position * strides.token, 2);
    };
    const auto read_row = [&](int i, const char* from) {
      take_row<kValues>(scales.form, to[i],
                        [&](int byte, auto bytes) { return read_piece<decltype(bytes)::value>(from + byte); });
    };
    // No array of pointers: registers are short.
    if (place.even) {
      const int64_t stride = cache_bytes(scales, strides.token, 2);
      const char* from = row_at(0) + token_of_row<kValues>(0) * stride;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        read_row(i, from);
        from += kValues ? (i % 2 == 0 ? stride : 7 * stride) : 8 * stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) read_row(i, row_at(token_of_row<kValues>(i)));
    }
  }
  template <int kBytes>
  static __device__ __forceinline__ uint4 read_piece(const char* from) {
    if constexpr (kBytes == 16) return read_once(from);
    else if constexpr (kBytes == 8) return read_once_8(from);
    else return read_once_4(from);
  }

  __device__ __forceinline__ void read_first(const DirectWork& work) {
    const int tile = first_tile(work);
    const bool exists = tile < work.read_end;
    Place place = {0, 0, false, 0};
    if (exists) place = place_of(work, tile);
    read_scales(work, place, exists, stage_at(slot));
    if (!exists) return;
    read_rows<false>(work, place, keys);
    read_rows<true>(work, place, values);
  }

  // The query and new tokens

  __device__ __forceinline__ void stage(const DirectWork& work, int which) const {
    const int thread = this->staging_thread(), row = thread / kRowChunks, column = thread % kRowChunks * 8;
    const uint4 x = this->template query_chunk<true>(work, row, column);
    *reinterpret_cast<uint4*>(&shared.query[which][row][column]) = as_halves(x, work.unit.head, which, row, column);
    if (__builtin_expect(work.cached_end < work.end, false)) stage_new(work, which, kStagingThreads - 1 - thread);
  }

  // 8 columns of a row of the query times the keys' scales of these, over a power of two near the row's largest number.
  __device__ __forceinline__ uint4 as_halves(const uint4& from, int head, int which, int row, int column) const {
    float2 x[4];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = unpack_pair(T{}, word_of(from, i));
      if (args.key_scales.kind == kPerChannel) {
        const float* const scales = args.key_scales.in + static_cast<int64_t>(head) * kWidth + column + 2 * i;
        x[i].x *= scales[0], x[i].y *= scales[1];
      }
      largest = fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
    }
#pragma unroll
    for (int offset = 1; offset < kRowChunks; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    const float power = largest > 0.0f && largest < INFINITY ? power_below(largest) : 1.0f, inverse = inverse_power(power);
    if (column == 0) shared.row_power[which][row] = power * (args.key_scales.kind == kPerTensor ? args.key_scales.in[0] : 1.0f);
    const auto pair = [&](int i) { return pack_pair(__half{}, x[i].x * inverse, x[i].y * inverse); };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }

  // kRowChunks threads side by side have a row.
  __device__ __forceinline__ void stage_new(const DirectWork& work, int which, int thread) const {
    const int new_begin = work.unit.request.keys - work.unit.request.tokens;
    const int from = max32(work.begin, new_begin), tokens = work.end - from;
    const unsigned lanes = kRowChunks == 32 ? kFullWarp : ((1u << kRowChunks % 32) - 1) << (lane / kRowChunks * kRowChunks);
#pragma unroll 1
    for (int i = thread; i < 2 * tokens * kRowChunks; i += kStagingThreads) {
      const bool value = i >= tokens * kRowChunks;
      const int of_kind = value ? i - tokens * kRowChunks : i;
      const int position = from + of_kind / kRowChunks, column = of_kind % kRowChunks * 8;
      if (value) stage_chunk<true>(work, which, position, column, lanes);
      else stage_chunk<false>(work, which, position, column, lanes);
    }
  }

  // 8 columns of a new key, after its rotary embedding, or value to shared memory and to the cache, and by the thread with the
  // first columns the scale. A token without a page is not seen.
  template <bool kValue>
  __device__ __forceinline__ void stage_chunk(const DirectWork& work, int which, int position, int column,
                                              unsigned lanes) const {
    const Request& request = work.unit.request;
    const int index = position - (request.keys - request.tokens), head = work.unit.head;
    const Scales& scales = kValue ? args.value_scales : args.key_scales;
    const Strides& new_strides = kValue ? args.new_value_strides : args.new_key_strides;
    const T* const row = static_cast<const T*>(kValue ? args.new_value : args.new_key) + request.origin * new_strides.batch +
                         head * new_strides.head + index * new_strides.token;
    const uint4 chunk = !kValue && args.rotary_half > 0 ? rotated_chunk(rotation_at(args, position), row, column)
                                                        : *reinterpret_cast<const uint4*>(row + column);
    float x[8];
    unsigned magnitudes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack_pair(T{}, word_of(chunk, i / 2));
      x[i] = i % 2 == 0 ? pair.x : pair.y;
      const unsigned magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
      magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    }
    float scale = scales.kind == kPerTensor ? scales.in[0] : 0.0f;
    if (scales.kind == kPerToken) scale = own_scale<kRowChunks>(scales.form, magnitudes, lanes);
    uint2 words = make_uint2(0, 0);
    const bool nibbles = scales.form == kInt4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (scales.kind == kPerChannel) scale = scales.in[static_cast<int64_t>(head) * kWidth + column + i];
      const uint32_t bits = quantised(scales.form, x[i], scale);
      if (nibbles) words.x |= bits << (4 * i);
      else (i < 4 ? words.x : words.y) |= bits << (8 * (i % 4));
    }
    uint8_t* const fresh = shared.fresh[which][kValue][index];
    const int64_t at = cache_row(args, kValue ? args.value_strides : args.key_strides, request, head, position);
    auto* const cache =
        static_cast<uint8_t*>(kValue ? args.value_cache_out : args.key_cache_out) + cache_bytes(scales, at + column, 2);
    if (nibbles) {
      *reinterpret_cast<uint32_t*>(fresh + column / 2) = words.x;
      if (at >= 0) *reinterpret_cast<uint32_t*>(cache) = words.x;
    } else {
      *reinterpret_cast<uint2*>(fresh + column) = words;
      if (at >= 0) *reinterpret_cast<uint2*>(cache) = words;
    }
    if (column != 0) return;
    if (!kValue) shared.absent[which][index] = at < 0;
    shared.fresh_scales[which][kValue][index] = scale;
    if (scales.kind == kPerToken && at >= 0) scales.out[cache_row(args, scales.strides, request, head, position)] = scale;
  }

  // The new keys or values of a tile from where they are staged.
  template <bool kValues, int kRows, int kChunks>
  __device__ __forceinline__ void take_new(const DirectWork& work, int which, int begin, uint4 (&to)[kRows][kChunks]) const {
    const CacheForm form = (kValues ? args.value_scales : args.key_scales).form;
    const int new_begin = work.unit.request.keys - work.unit.request.tokens;
    const auto is_new = [&](int token) { return token >= work.cached_end && token < work.end; };
    NarrowStage<kWidth>& stage = stage_at(slot);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = begin + token_of_row<kValues>(i);
      if (!is_new(token)) continue;
      take_row<kValues>(form, to[i], [&](int byte, auto bytes) {
        const uint8_t* const from = shared.fresh[which][kValues][token - new_begin] + byte;
        if constexpr (decltype(bytes)::value == 16) return *reinterpret_cast<const uint4*>(from);
        const auto* const words = reinterpret_cast<const uint32_t*>(from);
        return make_uint4(words[0], decltype(bytes)::value == 8 ? words[1] : 0, 0, 0);
      });
    }
    const int mine = begin + lane;
    const bool mine_new = lane < kTokens && is_new(mine);
    if (mine_new) stage.scales[kValues][lane] = shared.fresh_scales[which][kValues][mine - new_begin];
    if (kValues) return;
    const unsigned gone = __ballot_sync(kFullWarp, mine_new && shared.absent[which][mine - new_begin]);
    if (lane == 0) stage.missing |= gone;
  }

  // The segment's tiles

  // A segment's tiles of this warp, of which the registers hold the first; in the end they hold the first of the next segment.
  // ready(): the segment's query is there.
  template <class F>
  __device__ __forceinline__ void run_segment(int which, F&& ready) {
    ready();
    const DirectWork& work = shared.works[which];
    constexpr int kStep = kDirectWarps * kTokens;
    this->clear_rows();
    lift[0] = lift[1] = args.value_scales.kind == kPerToken ? 0.0f : 1.0f;
    int tile = first_tile(work);
    const bool any = tile < work.end, appends = work.cached_end < work.end;
    float factors[2] = {0.0f, 0.0f};
    if (any) {
#pragma unroll
      for (int c = 0; c < 2; ++c) factors[c] = shared.row_power[which][2 * member() + c] * this->logit_scale();
    }
#pragma unroll 1
    for (;; tile += kStep) {
      const bool last = tile + kStep >= work.end;
      const DirectWork& of_next = shared.works[last ? which ^ 1 : which];
      const int next = last ? first_tile(of_next) : tile + kStep;
      const bool more = next < of_next.read_end, takes_new = appends && tile + kTokens > work.cached_end;
      Place place = {0, 0, false, 0};
      if (more) place = place_of(of_next, next);
      cp_async_wait();  // for the tile's scales
      read_scales(of_next, place, more, stage_at(slot ^ 1));
      NarrowStage<kWidth>& stage = stage_at(slot);
      float s[kSlices][4];
      unsigned gone = 0;
      if (any) {
        if (takes_new) take_new<false>(work, which, tile, keys);
        __syncwarp();
        gone = stage.missing;
        for_form(args.key_scales.form, [&](auto form) { score<decltype(form)::value>(which, s); });
        finish_logits(stage, factors, s);
      }
      if (more) read_rows<false>(of_next, place, keys);
      if (any) add_tile(work, which, tile, gone, takes_new, stage, s);
      if (more) read_rows<true>(of_next, place, values);
      slot ^= 1;
      if (last) return;
    }
  }
  // The tile's logits become weights, and its values times these are added to the output.
  __device__ __forceinline__ void add_tile(const DirectWork& work, int which, int tile, unsigned gone, bool takes_new,
                                           NarrowStage<kWidth>& stage, float (&s)[kSlices][4]) {
    const bool masked = this->is_masked(work, tile, gone);
    if (masked) this->mask_logits(work, tile, gone, s);
    this->softmax(s, [&](int c, float factor) {
      // With scales of tokens the power falls with the weights so far; lift_weights raises it as far as it has to. Below the
      // least power its row has next to no part in the output.
      if (args.value_scales.kind == kPerToken) lift[c] = lift[c] * factor < 0x1p-120f ? 0.0f : lift[c] * factor;
      else this->multiply_output(c, factor);
    });
    if (takes_new) take_new<true>(work, which, tile, values);
    if (masked) clear_unseen(work, tile, gone, stage);
    if (takes_new || masked) __syncwarp();
    if (args.value_scales.kind == kPerToken) lift_weights(stage, s);
    for_form(args.value_scales.form, [&](auto form) { add_values<decltype(form)::value>(s); });
  }

  // 8 columns of the query's row g, those of this lane's numbers 8 u .. of a row of keys.
  template <CacheForm kForm>
  __device__ __forceinline__ uint4 query_columns(int which, int u) const {
    constexpr int kOfChunk = kForm != kInt4 || kWidth == 64 ? 16 : 32;  // numbers
    const int column = 8 * u / kOfChunk * 4 * kOfChunk + kOfChunk * member() + 8 * u % kOfChunk;
    return *reinterpret_cast<const uint4*>(&shared.query[which][group()][column]);
  }

  // The products of 4 numbers of keys g and g + 8 of a slice.
  template <CacheForm kForm>
  static __device__ __forceinline__ void multiply(float (&s)[4], uint32_t low, uint32_t high, uint32_t q0, uint32_t q1) {
    low = prepared<kForm>(low), high = prepared<kForm>(high);
    const uint32_t a[4] = {halves_of<kForm, false>(low), halves_of<kForm, false>(high), halves_of<kForm, true>(low),
                           halves_of<kForm, true>(high)};
    mma(__half{}, s, a, q0, q1);
  }

  template <CacheForm kForm>
  __device__ __forceinline__ void score(int which, float (&s)[kSlices][4]) const {
    constexpr int kOfChunk = kForm != kInt4 || kWidth == 64 ? 16 : 32;  // numbers
    float other[kSlices][4];                                            // a second chain of sums
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[slice][i] = other[slice][i] = 0.0f;
#pragma unroll
    for (int at = 0; at < kWidth / 32; ++at) {
      const uint4 q = query_columns<kForm>(which, at);
      const int c = 8 * at / kOfChunk, u = at % (kOfChunk / 8);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const uint4 &low = keys[2 * slice][c], &high = keys[2 * slice + 1][c];
        uint2 a, b;
        if constexpr (kForm == kInt4) {
          a = biased_bytes(word_of(low, u)), b = biased_bytes(word_of(high, u));
        } else {
          a = make_uint2(word_of(low, 2 * u), word_of(low, 2 * u + 1));
          b = make_uint2(word_of(high, 2 * u), word_of(high, 2 * u + 1));
        }
        multiply<kForm>(s[slice], a.x, b.x, q.x, q.y);
        multiply<kForm>(other[slice], a.y, b.y, q.z, q.w);
      }
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[slice][i] += other[slice][i];
  }

  // Products become logits: times the scales of the rows and of the tokens.
  __device__ __forceinline__ void finish_logits(const NarrowStage<kWidth>& stage, const float (&factors)[2],
                                                float (&s)[kSlices][4]) const {
    const float* const scales = stage.scales[0];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float of_token = args.key_scales.kind == kPerToken ? scales[16 * slice + 8 * r + group()] : 1.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) s[slice][2 * r + c] *= factors[c] * of_token;
      }
    this->cap_logits(s);
  }

  // What no row sees may be NaN, which a weight of 0 does not silence.
  __device__ __forceinline__ void clear_unseen(const DirectWork& work, int begin, unsigned gone, NarrowStage<kWidth>& stage) {
    if (lane < kTokens && Base::is_unseen(work, begin, gone, lane)) stage.scales[1][lane] = 0.0f;
    if (args.value_scales.form != kFloat8) return;
#pragma unroll
    for (int i = 0; i < 4 * kSlices; ++i)
      if (Base::is_unseen(work, begin, gone, token_of_row<true>(i))) {
#pragma unroll
        for (int c = 0; c < Tile::kValueChunks; ++c) values[i][c] = make_uint4(0, 0, 0, 0);
      }
  }

  // Multiplies the weights by their tokens' scales and divides them by lift, which rises where they would be large.
  __device__ __forceinline__ void lift_weights(const NarrowStage<kWidth>& stage, float (&p)[kSlices][4]) {
    const float* const scales = stage.scales[1];
    float top[2] = {0.0f, 0.0f};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float of_token = scales[16 * slice + 8 * r + group()];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          p[slice][2 * r + c] *= of_token;
          top[c] = fmaxf(top[c], fabsf(p[slice][2 * r + c]));
        }
      }
    if (__any_sync(kFullWarp, top[0] > lift[0] * kMostOverLift || top[1] > lift[1] * kMostOverLift)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float now = power_below(Base::largest_of_row(fmaxf(top[c], lift[c])));
        this->multiply_output(c, lift[c] * inverse_power(now));
        lift[c] = now;
      }
    }
    const float inverses[2] = {inverse_of_lift(0), inverse_of_lift(1)};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[slice][i] *= inverses[i % 2];
  }
  __device__ __forceinline__ float inverse_of_lift(int c) const { return lift[c] > 0.0f ? inverse_power(lift[c]) : 0.0f; }

  // The products of a tile's values with its weights.
  template <CacheForm kForm>
  __device__ __forceinline__ void add_values(const float (&p)[kSlices][4]) {
    constexpr int kNumbers = kNumbersOfWord<kForm>, kWords = kWidth / 8 / kNumbers;  // a lane's of a row
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const uint32_t p0 = transpose_matrix(pack_pair(__half{}, p[slice][0], p[slice][1]));
      const uint32_t p1 = transpose_matrix(pack_pair(__half{}, p[slice][2], p[slice][3]));
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const auto word = [&](int i) { return word_of(values[4 * slice + i][w / 4], w % 4); };
        uint32_t low[kNumbers], high[kNumbers];
        pair_columns<kForm>(word(0), word(1), low);
        pair_columns<kForm>(word(2), word(3), high);
#pragma unroll
        for (int i = 0; i < kNumbers; i += 2) {
          const uint32_t a[4] = {low[i], low[i + 1], high[i], high[i + 1]};
          mma(__half{}, output[(w * kNumbers + i) / 2], a, p0, p1);
        }
      }
    }
  }

  // This warp's statistics and output to shared memory.
  __device__ __forceinline__ void store_to_shared() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      this->store_statistics(c);
      const int row = 2 * member() + c;
      if (row >= rows) continue;
      this->multiply_output(c, lift[c]);
      float* const to = scratch + (warp * rows + row) * kScratchStride + kWidth / 8 * group();
#pragma unroll
      for (int m = 0; m < kWidth / 16; m += 2)
        *reinterpret_cast<float4*>(to + 2 * m) =
            make_float4(output[m][c], output[m][2 + c], output[m + 1][c], output[m + 1][2 + c]);
    }
  }
  __device__ __forceinline__ const float* output_of(int w) const { return scratch + w * rows * kScratchStride; }
};

}  // namespace leanfleet::lean_attention
