// One range of the stream-K line on one thread, and the merging of units that several ranges shared.
//
// A unit's queries are scaled into float32 once. Then, tile by tile of its keys: scores, an online softmax in
// base 2, and the product with the values, rescaled. Few rows (decode) read each key once, where it lies, and
// take dot products; many rows (a prompt) transpose the tile's keys and multiply blocks of registers. Keys
// and values are found through arrays of row addresses, so that dense, ragged and paged caches take the same
// way.
//
// The bytes of a quantised cache are numbers like others, which become floats in registers, or in the transposed keys. The scales
// of keys are factors of the query (one, or one for each column) or of the scores (one for each token), those of values of the
// output or of the weights.
#include "lean_attention/cpu_forms.h"

namespace leanfleet::lean_attention::LEANFLEET_ISA {

namespace {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
constexpr int kDotRows = 12;                 // up to so many rows scores are dot products
constexpr int kVecs = kLanes == 16 ? 4 : 2;  // vectors of a register block's width
constexpr int kStrip = kVecs * kLanes;       // keys of a strip of transposed keys
constexpr int kPad = 16;                     // rows of scratch are multiples of this
constexpr int kAheadBytes = 8192;            // how far before their turn keys and values are fetched
constexpr int kAheadRows = 32;               // with more rows there is work enough to hide memory behind

int64_t padded(int64_t n) { return round_up(n, kPad); }
bool whole(int64_t width) { return width % kPad == 0; }  // rows so wide are read where they lie

// The keys and values of a tile, without those on pages outside the pool.
struct Tile {
  Span span;            // positions
  int32_t n;            // keys
  bool gaps;            // n < span.end - span.begin
  const void** keys;    // [key_tile + kPad] their addresses; beyond n the last one is repeated
  const void** values;  // [key_tile + kPad]
  int32_t* positions;   // [key_tile]
  float* key_scales;    // [key_tile + kPad] of kPerToken, else empty
  float* value_scales;  // the same
};

// What one thread works in. Widths are padded to kPad, the padding of query, keys and values is zero. keys, strips
// and values are there only if a call needs them.
struct Scratch {
  float* query;         // [row_tile, D] times the factor of the logits
  float* output;        // [row_tile, Dv] sum of weights * values
  float* scores;        // [row_tile, key_tile] logits in base 2, then weights
  float* keys;          // [key_tile, D] float32 copies of the tile's keys
  float* strips;        // [key_tile / kStrip, D, kStrip] transposed keys
  float* values;        // [key_tile, Dv] float32 copies
  float* maximum;       // [row_tile] of the logits so far
  float* sum;           // [row_tile] of the weights so far, relative to maximum
  float* factor;        // [row_tile] 2^(old maximum - new maximum)
  void* rotated_query;  // T [D] a row of the query after its rotary embedding
  Tile tiles[2];        // the one that is worked on and the next
};

// Cuts `base` into the buffers above; returns the bytes taken. base may be null.
int64_t carve(const Args& args, char* base, Scratch* scratch) {
  const int64_t rows = padded(args.plan.row_tile), keys = padded(args.plan.key_tile);
  const int64_t d = padded(args.key_width), dv = padded(args.value_width);
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base == nullptr ? nullptr : base + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  scratch->query = floats(rows * d);
  scratch->output = floats(rows * dv);
  scratch->scores = floats(rows * keys);
  const bool many = args.plan.row_tile > kDotRows;
  scratch->keys = floats(whole(args.key_width) ? 0 : keys * d);
  scratch->strips = floats(many ? keys * d : 0);
  const bool read_in_place = !many || (args.dtype == 0 && args.value_scales.kind == kNoScale);
  scratch->values = floats(whole(args.value_width) && read_in_place ? 0 : keys * dv);
  scratch->maximum = floats(rows);
  scratch->sum = floats(rows);
  scratch->factor = floats(rows);
  scratch->rotated_query = floats(args.rotary_half > 0 ? d : 0);
  for (Tile& tile : scratch->tiles) {
    tile.keys = reinterpret_cast<const void**>(take((keys + kPad) * 8));
    tile.values = reinterpret_cast<const void**>(take((keys + kPad) * 8));
    tile.positions = reinterpret_cast<int32_t*>(take(keys * 4));
    tile.key_scales = floats(args.key_scales.kind == kPerToken ? keys + kPad : 0);
    tile.value_scales = floats(args.value_scales.kind == kPerToken ? keys + kPad : 0);
  }
  return used;
}

Vec larger(Vec a, Vec b) {  // b if either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return maximum(a, b);
#endif
}

// 2^x for x <= 0 within 1 ulp; 0 below -126.5; NaN stays NaN. x = n + r with |r| <= 1/2 and a degree 6
// polynomial in r, fitted to the least greatest relative error.
Vec exp2(Vec x) {
  x = larger(broadcast(-127.0f), x);
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x + kRound;
  const Vec r = x - (shifted - kRound);
  Vec p = fma(broadcast(1.5403508e-4f), r, broadcast(1.3390737e-3f));
  p = fma(p, r, broadcast(9.6182376e-3f));
  p = fma(p, r, broadcast(5.5503573e-2f));
  p = fma(p, r, broadcast(2.4022649e-1f));
  p = fma(p, r, broadcast(6.9314718e-1f));
  p = fma(p, r, broadcast(1.0f));
  return p * power_of_two(shifted);  // 2^-127 counts as 0
}

float exp2(float x) { return exp2(broadcast(x))[0]; }

// tanh within 2 ulp: an odd polynomial near 0, where 1 - 2 / (e^2|x| + 1) would cancel.
Vec tanh(Vec x) {
  const Vec magnitude = (Vec)((VecInt)x & 0x7fffffff), z = x * x;
  Vec p = fma(broadcast(-6.0453918e-3f), z, broadcast(2.0961512e-2f));
  p = fma(p, z, broadcast(-5.3843308e-2f));
  p = fma(p, z, broadcast(1.3332719e-1f));
  p = fma(p, z, broadcast(-3.3333328e-1f));
  const Vec near = fma(p * z, x, x);
  const Vec decay = exp2(magnitude * (-2 * kLog2E));  // e^-2|x|
  const Vec far = (Vec)((VecInt)((1.0f - decay) / (1.0f + decay)) | ((VecInt)x & static_cast<int32_t>(0x80000000)));
  return select(magnitude < 0.625f, near, far);
}

// Lane i of the result is the sum of v[i]'s lanes.
__attribute__((always_inline)) inline Vec sums_of(const Vec* v) {
#if defined(__AVX512F__)
  __m512 quads[4];  // quads[j]: in each 128-bit lane, that lane's sums of v[4j] .. v[4j+3]
  for (int j = 0; j < 4; ++j) {
    const __m512 a = (__m512)v[4 * j], b = (__m512)v[4 * j + 1], c = (__m512)v[4 * j + 2], d = (__m512)v[4 * j + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    quads[j] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const auto halve = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (Vec)halve(halve(quads[0], quads[1]), halve(quads[2], quads[3]));
#elif defined(__AVX2__)
  const auto quad = [&](int j) {
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[j], (__m256)v[j + 1]), _mm256_hadd_ps((__m256)v[j + 2], (__m256)v[j + 3]));
  };
  const __m256 low = quad(0), high = quad(4);
  return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#else
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = sum(v[i]);
  return result;
#endif
}

// out[i] = factor * in[i] for i < n and 0 up to n_padded.
template <class Row>
void to_floats(Row in, float* out, int64_t n, int64_t n_padded, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, factor * load(in + i));
  for (; i < n; ++i) out[i] = factor * to_float(in[i]);
  for (; i < n_padded; ++i) out[i] = 0.0f;
}

template <class T>
void from_floats(const float* in, T* out, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, factor * load(in + i));
  for (; i < n; ++i) out[i] = from_float<T>(factor * in[i]);
}

void fill(float* out, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// A row [D] of query or key after the rotary embedding of its position.
template <class T>
void rotate(const Args& args, int32_t position, const T* in, T* out) {
  const int64_t half = args.rotary_half, at = min32(position, args.rotary_positions - 1) * half;
  const float *cosines = args.cos_cache + at, *sines = args.sin_cache + at;
  const int64_t step = args.rotary_interleaved ? 2 : 1, other = args.rotary_interleaved ? 1 : half;
  int64_t i = 0;
  for (; step == 1 && i + kLanes <= half; i += kLanes) {
    const Vec a = load(in + i), b = load(in + half + i), cosine = load(cosines + i), sine = load(sines + i);
    store(out + i, a * cosine - b * sine);
    store(out + half + i, b * cosine + a * sine);
  }
  for (; i < half; ++i) {
    const float a = to_float(in[step * i]), b = to_float(in[step * i + other]);
    out[step * i] = from_float<T>(a * cosines[i] - b * sines[i]);
    out[step * i + other] = from_float<T>(b * cosines[i] + a * sines[i]);
  }
  std::memcpy(out + 2 * half, in + 2 * half, (args.key_width - 2 * half) * sizeof(T));
}

// The rows of a matrix: anywhere, or at equal distances.
template <class T>
struct RowsAt {
  using Element = T;
  const void* const* rows;
  typename RowOf<T>::Type operator[](int64_t i) const { return RowOf<T>::at(rows[i]); }
};
template <class T>
struct RowsApart {
  using Element = T;
  const float* base;
  int64_t stride;
  const float* operator[](int64_t i) const { return base + i * stride; }
};

// Two bfloat16 that follow each other along the summed axis, in the place of a float: the processor multiplies such
// words pairwise and adds both products up, in twice the speed of floats.
struct Words {};
template <class T>
constexpr bool kIsWords = false;
template <>
constexpr bool kIsWords<Words> = true;
// Whether a call with many rows runs on words. Widths are then so that keys and values are whole vectors of words.
template <class T>
bool on_words(const Args& args, int32_t rows);

#if defined(__AVX512F__)
inline Vec dot_words(Vec a, Vec b, Vec sum) {  // named in assembler: this file is compiled for processors without it too
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
inline Vec broadcast_word(const float* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return (Vec)_mm512_set1_epi32(word);
}
// row[i] becomes the word of floats 2i and 2i+1, for n floats, a multiple of 2 * kLanes.
inline void to_words(float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    Vec low = load(row + i), high = load(row + i + kLanes), words;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(words) : "v"(low), "v"(high));
    store(row + i / 2, words);
  }
}
// out[i] = word of a[i] and b[i], for n values, a multiple of kLanes. b null: of a[i] and 0.
inline void pair_up(const BFloat16* a, const BFloat16* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecInt low = (VecInt)load(a + i), high = b == nullptr ? VecInt{} : (VecInt)load(b + i);
    store(out + i, (Vec)((VecInt)_mm512_srli_epi32((__m512i)low, 16) | high));
  }
}
template <>
bool on_words<BFloat16>(const Args& args, int32_t rows) {
  if (args.key_scales.kind != kNoScale || args.value_scales.kind != kNoScale) return false;
  return args.bfloat16_products && rows > kDotRows && args.key_width % (2 * kLanes) == 0 && args.value_width % kLanes == 0;
}
#else
inline Vec dot_words(Vec, Vec, Vec sum) { return sum; }
inline Vec broadcast_word(const float*) { return Vec{}; }
inline void to_words(float*, int64_t) {}
inline void pair_up(const BFloat16*, const BFloat16*, float*, int64_t) {}
#endif
template <class T>
bool on_words(const Args&, int32_t) {
  return false;
}

// Brings rows into the cache while earlier ones are worked on: those of `rows` and then the first ones of
// `then`. Where keys and values alternate, the processor's own prefetching starts anew with every tile.
struct Ahead {
  const void* const* rows;
  int32_t n, bytes;  // of a row
  const void* const* then;
  int32_t then_n, then_bytes;
  int32_t distance;  // rows

  void fetch(int32_t k) const {
    k += distance;
    const char* row;
    int32_t size;
    if (k < n) {
      row = static_cast<const char*>(rows[k]);
      size = bytes;
    } else if (k - n < then_n) {
      row = static_cast<const char*>(then[k - n]);
      size = then_bytes;
    } else {
      return;
    }
    for (int32_t i = 0; i < size; i += 64) prefetch(row + i);
  }
};
constexpr Ahead kNothing = {nullptr, 0, 0, nullptr, 0, 0, 0};

// Keeps x in a register where the compiler would load it again for each use.
inline void hold(Vec& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  (void)x;
#endif
}

// 2 * kLanes floats in their order, from those with an even index and those with an odd one.
inline void join(Vec* even, Vec* odd) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const __m512 a = (__m512)*even, b = (__m512)*odd;
  *even = (Vec)_mm512_permutex2var_ps(a, first, b);
  *odd = (Vec)_mm512_permutex2var_ps(a, second, b);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)*even, (__m256)*odd), high = _mm256_unpackhi_ps((__m256)*even, (__m256)*odd);
  *even = (Vec)_mm256_permute2f128_ps(low, high, 0x20);
  *odd = (Vec)_mm256_permute2f128_ps(low, high, 0x31);
#else
  (void)even, (void)odd;
#endif
}

// Each 2 * kLanes floats of a row: first those with an even index, then those with an odd one.
void separate(float* row, int64_t d) {
  for (; d >= 2 * kLanes; d -= 2 * kLanes, row += 2 * kLanes) {
    float block[2 * kLanes];
    std::memcpy(block, row, sizeof block);
    for (int i = 0; i < kLanes; ++i) {
      row[i] = block[2 * i];
      row[kLanes + i] = block[2 * i + 1];
    }
  }
}

// scores[r, k] = query[r] . keys[k] for ROWS rows and keys 0 .. n-1, and some beyond: up to a multiple of
// kLanes. Where T has pairs the query is separated.
template <class T, int ROWS>
void dot_block(const float* query, int64_t d, RowsAt<T> keys, int32_t n, float* scores, int64_t score_stride, Ahead ahead) {
  constexpr int KEYS = kLanes / (ROWS == 3 ? 4 : ROWS);
  for (int32_t k = 0; k < n; k += KEYS) {
    for (int32_t key = k; key < k + KEYS; ++key) ahead.fetch(key);
    Vec acc[kLanes] = {};
    int64_t i = 0;
    for (; kPairs<T> && i + 2 * kLanes <= d; i += 2 * kLanes) {
      Vec q[2][ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        q[0][r] = load(query + r * d + i);
        q[1][r] = load(query + r * d + i + kLanes);
      }
#pragma GCC unroll 16
      for (int key = 0; key < KEYS; ++key) {
        Vec even, odd;
        load_pair(keys[k + key] + i, &even, &odd);
        hold(even);
        hold(odd);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r * KEYS + key] = fma(q[0][r], even, acc[r * KEYS + key]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r * KEYS + key] = fma(q[1][r], odd, acc[r * KEYS + key]);
      }
    }
    for (; i < d; i += kLanes) {
      Vec q[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) q[r] = load(query + r * d + i);
#pragma GCC unroll 16
      for (int key = 0; key < KEYS; ++key) {
        Vec x = load(keys[k + key] + i);
        hold(x);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r * KEYS + key] = fma(q[r], x, acc[r * KEYS + key]);
      }
    }
    float sums[kLanes];
    store(sums, sums_of(acc));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) std::memcpy(scores + r * score_stride + k, sums + r * KEYS, KEYS * 4);
  }
}

template <class T>
void dot_rows(const float* query, int64_t d, int32_t rows, RowsAt<T> keys, int32_t n, float* scores, int64_t score_stride,
              Ahead ahead) {
  while (rows > 0) {
    const int32_t block = rows < 4 ? rows : 4;
    if (block == 4) dot_block<T, 4>(query, d, keys, n, scores, score_stride, ahead);
    if (block == 3) dot_block<T, 3>(query, d, keys, n, scores, score_stride, ahead);
    if (block == 2) dot_block<T, 2>(query, d, keys, n, scores, score_stride, ahead);
    if (block == 1) dot_block<T, 1>(query, d, keys, n, scores, score_stride, ahead);
    ahead = kNothing;
    rows -= block;
    query += block * d;
    scores += block * score_stride;
  }
}

// out[r] = factor[r] * out[r] + sum over k < n of a[r, k] * b[k], for ROWS rows and VECS vectors of columns.
// Without factors the old content of out does not matter. On words, n counts words of a and rows of words of b.
template <int ROWS, int VECS, class Rows>
void product_block(const float* a, int64_t a_stride, Rows b, int64_t column, int32_t n, float* out, int64_t out_stride,
                   const float* factor, Ahead ahead) {
  constexpr bool kPaired = kPairs<typename Rows::Element> && VECS % 2 == 0;
  constexpr bool kWords = kIsWords<typename Rows::Element>;
  Vec acc[ROWS][VECS] = {};
  for (int32_t k = 0; k < n; ++k) {
    ahead.fetch(k);
    Vec x[VECS];
    if constexpr (kPaired) {
#pragma GCC unroll 8
      for (int c = 0; c < VECS; c += 2) load_pair(b[k] + column + c * kLanes, &x[c], &x[c + 1]);
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < VECS; ++c) x[c] = load(b[k] + column + c * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Vec weight = kWords ? broadcast_word(a + r * a_stride + k) : broadcast(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int c = 0; c < VECS; ++c) acc[r][c] = kWords ? dot_words(weight, x[c], acc[r][c]) : fma(weight, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    if constexpr (kPaired)
      for (int c = 0; c < VECS; c += 2) join(&acc[r][c], &acc[r][c + 1]);
#pragma GCC unroll 8
    for (int c = 0; c < VECS; ++c) {
      float* at = out + r * out_stride + column + c * kLanes;
      store(at, factor == nullptr ? acc[r][c] : fma(broadcast(factor[r]), load(at), acc[r][c]));
    }
  }
}

template <int VECS, class Rows>
void product_rows(const float* a, int64_t a_stride, int32_t rows, Rows b, int64_t column, int32_t n, float* out,
                  int64_t out_stride, const float* factor, Ahead ahead) {
  while (rows > 0) {
    const int32_t block = rows >= 6 ? 6 : rows >= 4 ? 4 : rows;
    const auto kernel = block == 6   ? product_block<6, VECS, Rows>
                        : block == 4 ? product_block<4, VECS, Rows>
                        : block == 3 ? product_block<3, VECS, Rows>
                        : block == 2 ? product_block<2, VECS, Rows>
                                     : product_block<1, VECS, Rows>;
    kernel(a, a_stride, b, column, n, out, out_stride, factor, ahead);
    ahead = kNothing;
    rows -= block;
    a += block * a_stride;
    out += block * out_stride;
    if (factor != nullptr) factor += block;
  }
}

// The same for `width` columns, a multiple of kLanes.
template <class Rows>
void product(const float* a, int64_t a_stride, int32_t rows, Rows b, int64_t width, int32_t n, float* out, int64_t out_stride,
             const float* factor, Ahead ahead) {
  for (int64_t column = 0; column < width;) {
    const int64_t left = width - column;
    const int vecs = left >= kStrip ? kVecs : left >= 2 * kLanes ? 2 : 1;
    const auto kernel = vecs == kVecs ? product_rows<kVecs, Rows> : vecs == 2 ? product_rows<2, Rows> : product_rows<1, Rows>;
    kernel(a, a_stride, rows, b, column, n, out, out_stride, factor, ahead);
    ahead = kNothing;
    column += vecs * kLanes;
  }
}

// strips[s, i, j] = keys[s * kStrip + j][i] for the strips that hold keys 0 .. n-1.
template <class T>
void transpose_keys(RowsAt<T> keys, int64_t d, int32_t n, float* strips, Ahead ahead) {
  for (int32_t k = 0; k < n; k += kLanes) {
    for (int32_t key = k; key < k + kLanes; ++key) ahead.fetch(key);
    float* strip = strips + k / kStrip * d * kStrip + k % kStrip;
    for (int64_t i = 0; i < d; i += kLanes) {
      Vec v[kLanes];
      for (int j = 0; j < kLanes; ++j) v[j] = load(keys[k + j] + i);
      transpose(v);
      for (int j = 0; j < kLanes; ++j) store(strip + (i + j) * kStrip, v[j]);
    }
  }
}

// scores[r, k] = query[r] . keys[k] for the transposed keys 0 .. n-1, and some beyond, along `depth` of T.
template <class T>
void products_with_strips(const float* query, int64_t d, int32_t rows, int64_t depth, int32_t n, const float* strips,
                          float* scores, int64_t score_stride) {
  const int64_t strip_size = padded(depth) * kStrip;
  for (int32_t k = 0; k < n; k += kStrip) {
    const int64_t width = min32(round_up(n - k, kLanes), kStrip);
    product(query, d, rows, RowsApart<T>{strips + k / kStrip * strip_size, kStrip}, width, static_cast<int32_t>(depth),
            scores + k, score_stride, nullptr, kNothing);
  }
}

// What a product of query and key is multiplied by to become a logit in base 2, or the argument of softcap's tanh.
float logit_factor(const Args& args) { return args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2E; }

// Where a position's element of a cache, or its scale, is: `token` behind the first on page `page` or of the request's cache.
int64_t place(const CacheStrides& strides, const Request& request, int32_t head, int64_t page, int64_t token) {
  return request.b * strides.batch + head * strides.head + page * strides.page + token * strides.token;
}

// Fills `tile` with the keys and values at positions `span` of a request.
template <class T>
void find_rows(const Args& args, const Unit& unit, Span span, Tile* tile) {
  const char* const keys = static_cast<const char*>(args.append ? args.key_cache_out : args.key_cache);
  const char* const values = static_cast<const char*>(args.append ? args.value_cache_out : args.value_cache);
  const int64_t key_token = cache_bytes(args.key_scales, args.key_strides.token, sizeof(T));
  const int64_t value_token = cache_bytes(args.value_scales, args.value_strides.token, sizeof(T));
  int32_t n = 0;
  const auto add_scales = [&](const Scales& scales, int64_t page, int64_t token, int32_t count, float* to) {
    if (scales.kind != kPerToken) return;
    const float* const from =
        (args.append ? scales.out : scales.in) + place(scales.strides, unit.request, unit.head, page, token);
    for (int32_t j = 0; j < count; ++j) to[n + j] = from[j * scales.strides.token];
  };
  const auto add = [&](int64_t page, int64_t token, int32_t count, int32_t position) {
    const auto at = [&](const Scales& scales, const CacheStrides& strides) {
      return cache_bytes(scales, place(strides, unit.request, unit.head, page, token), sizeof(T));
    };
    const char* const key = keys + at(args.key_scales, args.key_strides);
    const char* const value = values + at(args.value_scales, args.value_strides);
    for (int32_t j = 0; j < count; ++j) {
      tile->keys[n + j] = key + j * key_token;
      tile->values[n + j] = value + j * value_token;
      tile->positions[n + j] = position + j;
    }
    add_scales(args.key_scales, page, token, count, tile->key_scales);
    add_scales(args.value_scales, page, token, count, tile->value_scales);
    n += count;
  };
  if (args.cache_kind == kPaged) {
    for (int32_t position = span.begin; position < span.end;) {
      const int32_t page =
          args.block_table[static_cast<int64_t>(unit.request.b) * args.pages_per_request + position / args.block];
      const int32_t first = position % args.block, count = min32(args.block - first, span.end - position);
      if (page >= 0 && page < args.num_pages) add(page, first, count, position);
      position += count;
    }
  } else {
    add(0, static_cast<int64_t>(unit.request.start) + span.begin, span.end - span.begin, span.begin);
  }
  tile->span = span;
  tile->n = n;
  tile->gaps = n < span.end - span.begin;
  for (int j = 0; j < kLanes && n > 0; ++j) tile->keys[n + j] = tile->keys[n - 1];
}

// How many of the tile's keys stand before `position`.
int32_t keys_before(const Tile& tile, int32_t position) {
  if (!tile.gaps) return clamp(position - tile.span.begin, 0, tile.n);
  int32_t low = 0, high = tile.n;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (tile.positions[middle] < position) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The online softmax of a tile: scores become weights; maximum, sum and factor are brought up to date.
void online_softmax(const Args& args, const Unit& unit, const Tile& tile, int32_t first_row, int32_t rows,
                    const Scratch& scratch) {
  const int64_t stride = padded(args.plan.key_tile);
  const int32_t n_padded = round_up(tile.n, kLanes);
  const float infinity = __builtin_inff();
  for (int32_t r = 0; r < rows; ++r) {
    float* scores = scratch.scores + r * stride;
    if (args.softcap > 0)
      for (int32_t k = 0; k < n_padded; k += kLanes) store(scores + k, args.softcap * kLog2E * tanh(load(scores + k)));
    const Span seen = token_keys(args, unit.request, (first_row + r) / args.group);
    const int32_t begin = keys_before(tile, seen.begin);
    const int32_t end = keys_before(tile, seen.end);
    if (begin > 0) fill(scores, begin, -infinity);
    if (end < n_padded) fill(scores + end, n_padded - end, -infinity);
    Vec top = broadcast(-infinity);
    for (int32_t k = 0; k < n_padded; k += kLanes) top = larger(top, load(scores + k));
    const float old = scratch.maximum[r], highest = maximum(top);
    scratch.factor[r] = old;
    scratch.maximum[r] = highest > old ? highest : old;
  }
  for (int32_t r = 0; r < rows; r += kLanes) {  // rows beyond the last are scratch too
    const Vec now = load(scratch.maximum + r);
    const Vec base = select(now == -infinity, Vec{}, now);  // a row that has seen nothing: 2^(-inf - 0) = 0
    store(scratch.factor + r, exp2(load(scratch.factor + r) - base));
  }
  for (int32_t r = 0; r < rows; ++r) {
    float* scores = scratch.scores + r * stride;
    const float base = scratch.maximum[r] == -infinity ? 0.0f : scratch.maximum[r];
    Vec total = {};
    for (int32_t k = 0; k < n_padded; k += kLanes) {
      const Vec weight = exp2(load(scores + k) - base);
      store(scores + k, weight);
      total += weight;
    }
    scratch.sum[r] = scratch.sum[r] * scratch.factor[r] + sum(total);
  }
}

// x[r, k] *= factors[k] for the tile's keys, and some beyond.
void scale_columns(float* x, int64_t stride, int32_t rows, int32_t n, const float* factors) {
  for (int32_t k = 0; k < n; k += kLanes) {
    const Vec factor = load(factors + k);
    for (int32_t r = 0; r < rows; ++r) store(x + r * stride + k, factor * load(x + r * stride + k));
  }
}

// The scores of a tile's keys, which are of type K; its values are fetched behind them.
template <class T, class K>
void score_tile(const Args& args, const Tile& tile, int32_t rows, const Scratch& scratch, int32_t value_bytes) {
  const int64_t d = padded(args.key_width), stride = padded(args.plan.key_tile);
  const int32_t n = tile.n, key_bytes = row_bytes<K>(args.key_width);
  const RowsAt<K> keys{tile.keys};
  const bool whole_keys = whole(args.key_width);
  // Keys whose width is no multiple of a vector are copied, so that no load goes beyond the buffer.
  if (!whole_keys) {
    for (int32_t k = 0; k < n; ++k) to_floats(keys[k], scratch.keys + k * d, args.key_width, d, 1.0f);
    for (int32_t k = 0; k < n + kLanes; ++k) tile.keys[k] = scratch.keys + min32(k, n - 1) * d;
  }
  const RowsAt<float> copied_keys{tile.keys};
  Ahead in_keys{tile.keys, n, key_bytes, tile.values, n, value_bytes, kAheadBytes / key_bytes};
  if (rows > kAheadRows) in_keys = kNothing;
  if (rows <= kDotRows) {
    if (whole_keys) dot_rows(scratch.query, d, rows, keys, n, scratch.scores, stride, in_keys);
    else dot_rows(scratch.query, d, rows, copied_keys, n, scratch.scores, stride, kNothing);
  } else if (on_words<T>(args, rows)) {
    transpose_keys(copied_keys, d / 2, n, scratch.strips, in_keys);  // rows of words move as floats do
    products_with_strips<Words>(scratch.query, d, rows, d / 2, n, scratch.strips, scratch.scores, stride);
    for (int32_t r = 0; r < rows; ++r)
      for (int32_t k = 0; k < n; k += kLanes)
        store(scratch.scores + r * stride + k, logit_factor(args) * load(scratch.scores + r * stride + k));
  } else {
    if (whole_keys) transpose_keys(keys, d, n, scratch.strips, in_keys);
    else transpose_keys(copied_keys, d, n, scratch.strips, kNothing);
    products_with_strips<float>(scratch.query, d, rows, args.key_width, n, scratch.strips, scratch.scores, stride);
  }
  if (args.key_scales.kind == kPerToken) scale_columns(scratch.scores, stride, rows, n, tile.key_scales);
}

// Rescales the output and adds the tile's values, which are of type V, by their weights. The keys of `next` are fetched
// meanwhile.
template <class T, class V>
void add_values(const Args& args, const Tile& tile, const Tile& next, int32_t rows, const Scratch& scratch, int32_t key_bytes) {
  const int64_t dv = padded(args.value_width), stride = padded(args.plan.key_tile);
  const int32_t n = tile.n, value_bytes = row_bytes<V>(args.value_width);
  const RowsAt<V> values{tile.values};
  Ahead in_values{tile.values, n, value_bytes, next.keys, next.n, key_bytes, kAheadBytes / value_bytes};
  if (rows > kAheadRows) in_values = kNothing;
  if (args.value_scales.kind == kPerToken) scale_columns(scratch.scores, stride, rows, n, tile.value_scales);
  if (on_words<T>(args, rows)) {
    const auto* const* at = reinterpret_cast<const BFloat16* const*>(tile.values);
    for (int32_t k = 0; k < n; k += 2) {
      in_values.fetch(k);
      in_values.fetch(k + 1);
      pair_up(at[k], k + 1 < n ? at[k + 1] : nullptr, scratch.values + k / 2 * dv, dv);
    }
    for (int32_t r = 0; r < rows; ++r)
      to_words(scratch.scores + r * stride, (n + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes));
    product(scratch.scores, stride, rows, RowsApart<Words>{scratch.values, dv}, dv, (n + 1) / 2, scratch.output, dv,
            scratch.factor, kNothing);
  } else if (whole(args.value_width) && (rows <= kDotRows || sizeof(V) == 4)) {
    product(scratch.scores, stride, rows, values, dv, n, scratch.output, dv, scratch.factor, in_values);
  } else {
    for (int32_t k = 0; k < n; ++k) {
      in_values.fetch(k);
      to_floats(values[k], scratch.values + k * dv, args.value_width, dv, 1.0f);
    }
    product(scratch.scores, stride, rows, RowsApart<float>{scratch.values, dv}, dv, n, scratch.output, dv, scratch.factor,
            kNothing);
  }
}

// `next` is the tile after this one.
template <class T>
void attend_tile(const Args& args, const Unit& unit, const Tile& tile, const Tile& next, int32_t first_row, int32_t rows,
                 const Scratch& scratch) {
  if (tile.n == 0) return;
  const int32_t key_bytes = cache_bytes(args.key_scales, args.key_width, sizeof(T));
  const int32_t value_bytes = cache_bytes(args.value_scales, args.value_width, sizeof(T));
  for_form<T>(args.key_scales, [&](auto k) { score_tile<T, decltype(k)>(args, tile, rows, scratch, value_bytes); });
  online_softmax(args, unit, tile, first_row, rows, scratch);
  for_form<T>(args.value_scales, [&](auto v) { add_values<T, decltype(v)>(args, tile, next, rows, scratch, key_bytes); });
}

// row[i] *= the scale of column i, or of all, where the cache has one that is no token's; n columns.
void scale_row(const Scales& scales, int32_t head, float* row, int64_t n) {
  if (scales.kind == kPerTensor)
    for (int64_t i = 0; i < n; ++i) row[i] *= scales.in[0];
  if (scales.kind == kPerChannel)
    for (int64_t i = 0; i < n; ++i) row[i] *= scales.in[head * n + i];
}

// Element offsets of a packed row: token = row / group of query head `head * group + row % group`.
int64_t row_offset(const Args& args, const Strides& strides, const Unit& unit, int32_t row) {
  return unit.request.origin * strides.batch +
         (static_cast<int64_t>(unit.head) * args.group + row % args.group) * strides.head + row / args.group * strides.token;
}

// output [rows, Dv] / sum, and lse, after the sink has joined.
template <class T>
void write_rows(const Args& args, const Unit& unit, int32_t first_row, int32_t rows, const float* output, const float* maximum,
                const float* sum) {
  const float infinity = __builtin_inff();
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t row = first_row + r;
    float top = maximum[r], total = sum[r], factor = 1.0f;
    if (args.sinks != nullptr) {
      const float sink = args.sinks[unit.head * args.group + row % args.group] * kLog2E;
      const float joint = top >= sink ? top : sink;  // a sink of NaN stays NaN
      if (joint != -infinity) {
        factor = exp2(top - joint);
        total = total * factor + exp2(sink - joint);
        top = joint;
      }
    }
    T* at = static_cast<T*>(args.output) + row_offset(args, args.output_strides, unit, row);
    from_floats(output + r * padded(args.value_width), at, args.value_width, total == 0 ? 0.0f : factor / total);
    args.lse[row_offset(args, args.lse_strides, unit, row)] = total == 0 ? -infinity : top * kLn2 + __builtin_logf(total);
  }
}

template <class T>
void write_padding(const Args& args, const Unit& unit, Span rows) {
  for (int32_t row = rows.begin; row < rows.end; ++row) {
    T* at = static_cast<T*>(args.output) + row_offset(args, args.output_strides, unit, row);
    std::memset(at, 0, args.value_width * sizeof(T));
    args.lse[row_offset(args, args.lse_strides, unit, row)] = -__builtin_inff();
  }
}

template <class T>
void attend_segment(const Args& args, const Unit& unit, const Segment& segment, Scratch& scratch) {
  const Span all = unit_rows(args, unit.request, unit.row_tile);
  const int32_t end = clamp(args.group * unit.request.tokens, all.begin, all.end);
  const int32_t rows = end - all.begin;
  if (segment.index == 0) write_padding<T>(args, unit, {end, all.end});
  if (rows == 0) return;
  const int64_t d = padded(args.key_width), dv = padded(args.value_width);
  const bool words = on_words<T>(args, rows);
  for (int32_t r = 0; r < rows; ++r) {
    const T* row = static_cast<const T*>(args.query) + row_offset(args, args.query_strides, unit, all.begin + r);
    if (args.rotary_half > 0) {
      const int32_t position = unit.request.position + (all.begin + r) / args.group;
      rotate(args, position, row, static_cast<T*>(scratch.rotated_query));
      row = static_cast<const T*>(scratch.rotated_query);
    }
    to_floats(row, scratch.query + r * d, args.key_width, d, words ? 1.0f : logit_factor(args));
    scale_row(args.key_scales, unit.head, scratch.query + r * d, args.key_width);
    if (words) to_words(scratch.query + r * d, d);
  }
  bool pairs = false;
  for_form<T>(args.key_scales, [&](auto k) { pairs = kPairs<decltype(k)>; });
  if (pairs && rows <= kDotRows && whole(args.key_width))  // these take dot_rows() over the keys where they lie
    for (int32_t r = 0; r < rows; ++r) separate(scratch.query + r * d, d);
  fill(scratch.output, rows * dv, 0.0f);
  fill(scratch.maximum, padded(rows), -__builtin_inff());
  fill(scratch.sum, rows, 0.0f);

  const Span keys = unit_keys(args, unit.request, unit.row_tile);
  const auto find = [&](int32_t tile, Tile* found) {
    const int32_t first = tile * args.plan.key_tile;
    const int32_t last = keys.end - first < args.plan.key_tile ? keys.end : first + args.plan.key_tile;
    found->n = 0;
    if (tile < segment.tiles.end) find_rows<T>(args, unit, {max32(first, keys.begin), last}, found);
  };
  find(segment.tiles.begin, &scratch.tiles[segment.tiles.begin % 2]);
  for (int32_t tile = segment.tiles.begin; tile < segment.tiles.end; ++tile) {
    Tile* next = &scratch.tiles[(tile + 1) % 2];
    find(tile + 1, next);
    attend_tile<T>(args, unit, scratch.tiles[tile % 2], *next, all.begin, rows, scratch);
  }

  for (int32_t r = 0; r < rows; ++r) scale_row(args.value_scales, unit.head, scratch.output + r * dv, args.value_width);
  if (segment.count == 1) {
    write_rows<T>(args, unit, all.begin, rows, scratch.output, scratch.maximum, scratch.sum);
    return;
  }
  const int64_t row = static_cast<int64_t>(segment.slot) * args.plan.row_tile;
  for (int32_t r = 0; r < rows; ++r)
    std::memcpy(args.partial_output + (row + r) * args.value_width, scratch.output + r * dv, args.value_width * 4);
  std::memcpy(args.partial_max + row, scratch.maximum, rows * 4);
  std::memcpy(args.partial_sum + row, scratch.sum, rows * 4);
}

// Joins the partial results of a unit in the order of its contributors.
template <class T>
void merge_unit(const Args& args, const Unit& unit, int32_t first, int32_t count, const Scratch& scratch) {
  const Span all = unit_rows(args, unit.request, unit.row_tile);
  const int32_t rows = clamp(args.group * unit.request.tokens, all.begin, all.end) - all.begin;
  const int64_t dv = padded(args.value_width);
  const float infinity = __builtin_inff();
  fill(scratch.output, rows * dv, 0.0f);
  for (int32_t r = 0; r < rows; ++r) {
    float top = -infinity, total = 0.0f;
    for (int32_t i = 0; i < count; ++i) {
      const float other = args.partial_max[static_cast<int64_t>(slot_of(first, i)) * args.plan.row_tile + r];
      top = other > top ? other : top;
    }
    const float base = top == -infinity ? 0.0f : top;
    for (int32_t i = 0; i < count; ++i) {
      const int64_t row = static_cast<int64_t>(slot_of(first, i)) * args.plan.row_tile + r;
      const float factor = exp2(args.partial_max[row] - base);
      const float* part = args.partial_output + row * args.value_width;
      float* output = scratch.output + r * dv;
      for (int64_t c = 0; c < args.value_width; ++c) output[c] += factor * part[c];
      total += factor * args.partial_sum[row];
    }
    scratch.maximum[r] = top;
    scratch.sum[r] = total;
  }
  write_rows<T>(args, unit, all.begin, rows, scratch.output, scratch.maximum, scratch.sum);
}

template <class T>
void attend_range(const Args& args, int64_t work, int32_t ranges, int32_t range, Scratch& scratch) {
  const int64_t end = range_begin(work, ranges, range + 1);
  Unit unit = locate(args, args.work_prefix, range_begin(work, ranges, range));
  for (;;) {
    const Segment segment = segment_of(args, unit, work, ranges, range);
    if (segment.contributes) attend_segment<T>(args, unit, segment, scratch);
    if (unit_end(args, unit) >= end) return;
    next_unit(args, unit);
  }
}

// Only the last unit that a range begins can go on in the next one.
template <class T>
void merge_range(const Args& args, int64_t work, int32_t ranges, int32_t range, const Scratch& scratch) {
  const int64_t end = range_begin(work, ranges, range + 1);
  const Unit unit = locate(args, args.work_prefix, end - 1);
  const Segment segment = segment_of(args, unit, work, ranges, range);
  if (segment.contributes && segment.index == 0 && segment.count > 1) merge_unit<T>(args, unit, range, segment.count, scratch);
}

// Quantised rows
//
// A row's own scale is its largest magnitude / the largest number of the form. That of a row without a magnitude of kLeast or more is 0, as are its numbers;
// that of a row with a NaN or an infinity is NaN, so that no result takes it for a number.

constexpr float kLeast = 0x1p-100f;

template <class T>
float own_scale(CacheForm form, const T* row, int64_t n) {
  VecInt largest = {};  // the bits of magnitudes, which are in the order of these, with NaN last
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecInt bits = (VecInt)load_part(row + i, n - i) & 0x7fffffff;
    largest = (VecInt)select(bits > largest, (Vec)bits, (Vec)largest);
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = max32(bits, largest[i]);
  if (bits >= 0x7f800000) return __builtin_nanf("");
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude < kLeast ? 0.0f : magnitude / largest_of(form);
}

// row[i] / scale in the form of `to`, rounded half to even and held within its range; 0 where the scale is. scales: of each
// column, or of all where `step` is 0.
template <class T, class K>
void quantise(K form, const T* row, const float* scales, int64_t step, uint8_t* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec scale = step == 0 ? broadcast(scales[0]) : load_part(scales + i, n - i);
    to_bytes(form, select(scale != 0.0f, load_part(row + i, n - i) / scale, Vec{}), to + row_bytes<K>(i), n - i);
  }
}

// Appends a row [n] of new keys or values, of which this is the place in the cache and in the scales.
template <class T>
void append_row(const Scales& scales, int32_t head, const T* row, int64_t n, void* cache, int64_t at, int64_t scale_at) {
  uint8_t* const to = static_cast<uint8_t*>(cache) + cache_bytes(scales, at, sizeof(T));
  if (scales.kind == kNoScale) {
    std::memcpy(to, row, n * sizeof(T));
    return;
  }
  const float* used = scales.kind == kPerChannel ? scales.in + head * n : scales.in;
  if (scales.kind == kPerToken) {
    scales.out[scale_at] = own_scale(scales.form, row, n);
    used = scales.out + scale_at;
  }
  for_form<T>(scales, [&](auto form) {
    if constexpr (!std::is_same_v<decltype(form), T>) quantise(form, row, used, scales.kind == kPerChannel, to, n);
  });
}

// Writes the new keys and values of a request, or of a piece of it, and head to their positions.
template <class T>
void append_rows(const Args& args, int32_t index, int32_t head) {
  const Request request = request_of(args, index);
  const T* keys =
      static_cast<const T*>(args.new_key) + request.origin * args.new_key_strides.batch + head * args.new_key_strides.head;
  const T* values = static_cast<const T*>(args.new_value) + request.origin * args.new_value_strides.batch +
                    head * args.new_value_strides.head;
  const int64_t row = (static_cast<int64_t>(index) * args.kv_heads + head) * args.key_width;
  T* const rotated = args.rotated_key == nullptr ? nullptr : static_cast<T*>(args.rotated_key) + row;
  for (int32_t i = 0; i < request.tokens; ++i) {
    const int32_t position = request.position + i;
    int64_t page = 0, token = static_cast<int64_t>(request.start) + position;
    if (args.cache_kind == kPaged) {
      page = args.block_table[static_cast<int64_t>(request.b) * args.pages_per_request + position / args.block];
      if (page < 0 || page >= args.num_pages) continue;
      token = position % args.block;
    }
    const auto at = [&](const CacheStrides& strides) { return place(strides, request, head, page, token); };
    const T* key = keys + i * args.new_key_strides.token;
    const int64_t key_at = at(args.key_strides);
    if (args.rotary_half > 0) {
      T* const to = args.key_scales.kind == kNoScale ? static_cast<T*>(args.key_cache_out) + key_at : rotated;
      rotate(args, position, key, to);
      key = to;
    }
    if (args.rotary_half == 0 || args.key_scales.kind != kNoScale)
      append_row(args.key_scales, head, key, args.key_width, args.key_cache_out, key_at, at(args.key_scales.strides));
    append_row(args.value_scales, head, values + i * args.new_value_strides.token, args.value_width, args.value_cache_out,
               at(args.value_strides), at(args.value_scales.strides));
  }
}

}  // namespace

void append_head(const Args& args, int32_t index, int32_t head) {
  if (args.dtype == 0) append_rows<float>(args, index, head);
  if (args.dtype == 1) append_rows<Half>(args, index, head);
  if (args.dtype == 2) append_rows<BFloat16>(args, index, head);
}

int64_t thread_scratch_bytes(const Args& args) {
  Scratch scratch;
  return carve(args, nullptr, &scratch);
}

void attend(const Args& args, int64_t work, int32_t ranges, int32_t range, char* thread_scratch) {
  Scratch scratch;
  carve(args, thread_scratch, &scratch);
  if (args.dtype == 0) attend_range<float>(args, work, ranges, range, scratch);
  if (args.dtype == 1) attend_range<Half>(args, work, ranges, range, scratch);
  if (args.dtype == 2) attend_range<BFloat16>(args, work, ranges, range, scratch);
}

void merge(const Args& args, int64_t work, int32_t ranges, int32_t range, char* thread_scratch) {
  Scratch scratch;
  carve(args, thread_scratch, &scratch);
  if (args.dtype == 0) merge_range<float>(args, work, ranges, range, scratch);
  if (args.dtype == 1) merge_range<Half>(args, work, ranges, range, scratch);
  if (args.dtype == 2) merge_range<BFloat16>(args, work, ranges, range, scratch);
}

}  // namespace leanfleet::lean_attention::LEANFLEET_ISA
