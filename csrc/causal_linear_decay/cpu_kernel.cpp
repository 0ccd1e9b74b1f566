// The recurrence itself, row by row of the state, several tokens a pass: a state of [X, kColumns] stays in the first or
// second level cache, a row of it in registers while kTokens tokens go by. Without a matrix engine the chunked form only
// adds operations, so the CPU runs this for every value of the attribute `algorithm`.
#include "causal_linear_decay.h"
#include "core/simd.h"

#include <math.h>

namespace leanfleet::LEANFLEET_ISA {

namespace {

constexpr int kVecs = 2;
constexpr int kColumns = kVecs * kLanes;
constexpr int kTokens = kLanes == 16 ? 4 : 2;  // as many as registers hold accumulators for
constexpr int kHeads = 4;                      // query heads of a group that one pass over the state serves

// Buffers of one block, carved from its scratch. Rows of kColumns are padded with zeros.
struct Buffers {
  float* state;  // [X, kColumns]
  float* query;  // [tokens or groups, X]
  float* key;    // likewise
  float* value;  // [tokens or groups, kColumns]
  float* out;    // likewise
};

int64_t width_of(const LinearBlock& block) {
  const int64_t groups = block.query_groups > block.key_groups ? block.query_groups : block.key_groups;
  return groups > kTokens ? groups : kTokens;
}

Buffers carve(const LinearBlock& block) {
  const int64_t width = width_of(block);
  Buffers b;
  b.state = block.scratch;
  b.value = b.state + block.x * kColumns;
  b.out = b.value + width * kColumns;
  b.query = b.out + width * kColumns;
  b.key = b.query + width * block.x;
  return b;
}

template <class T>
void read_row(const T* from, int64_t n, float* to) {
  convert(from, to, n);
}

// The block's columns of a row, padded with zeros.
template <class T>
void read_columns(const LinearBlock& block, const T* row, float* to) {
  convert(row + block.column_begin, to, block.columns);
  for (int64_t c = 0; c < block.columns && block.value_scale != 1.0f; ++c) to[c] *= block.value_scale;
  for (int64_t c = block.columns; c < kColumns; ++c) to[c] = 0.0f;
}

// The decays of one visit of the tokens, in order. A float32 decay is off by up to half an ulp, the same way every time,
// which 1,000 tokens of 0.999 add up: so each step's relative rounding error is made good in the next one.
struct Decays {
  const LinearBlock& block;
  double carry;

  float next(int64_t token) {
    if (block.log_decay == nullptr) return 1.0f;
    const double exact = ::exp(static_cast<double>(block.log_decay[token * block.decay_token]) + carry);
    const float rounded = static_cast<float>(exact);
    carry = rounded > 1e-30f ? (exact - static_cast<double>(rounded)) / exact : 0.0;
    return rounded;
  }
};

template <class T>
void write_row(const LinearBlock& block, int64_t group, int64_t token, float* row) {
  for (int64_t c = 0; c < block.columns; ++c) row[c] *= block.scale;
  if (block.denominator != nullptr) {
    const float den = block.denominator[group * block.denominator_head + token * block.denominator_token];
    for (int64_t c = 0; c < block.columns; ++c) row[c] /= den;
  }
  if (block.dot_with != nullptr) {
    const T* other = static_cast<const T*>(block.dot_with) + group * block.dot_head + token * block.dot_token;
    float total = 0.0f;
    for (int64_t c = 0; c < block.columns; ++c) total += row[c] * to_float(other[block.column_begin + c]);
    block.dots[group * block.dots_head + token] = total;
  }
  if (block.output != nullptr)
    convert(row, static_cast<T*>(block.output) + group * block.output_head + token * block.output_token + block.column_begin,
            block.columns);
}

// kCount tokens of one head that reads and one that writes: out[t] = query[t] S_t.
template <int kCount, bool kDecay>
void advance(const Buffers& b, int64_t x, const float* decay) {
  Vec out[kCount][kVecs] = {}, value[kCount][kVecs], factor[kCount];
  for (int t = 0; t < kCount; ++t) {
    for (int c = 0; c < kVecs; ++c) value[t][c] = load(b.value + t * kColumns + c * kLanes);
    factor[t] = broadcast(decay[t]);
  }
  for (int64_t r = 0; r < x; ++r) {
    float* row = b.state + r * kColumns;
    Vec s[kVecs];
    for (int c = 0; c < kVecs; ++c) s[c] = load(row + c * kLanes);
    for (int t = 0; t < kCount; ++t) {
      const Vec k = broadcast(b.key[t * x + r]), q = broadcast(b.query[t * x + r]);
      for (int c = 0; c < kVecs; ++c) {
        s[c] = fma(k, value[t][c], kDecay ? factor[t] * s[c] : s[c]);
        out[t][c] = fma(q, s[c], out[t][c]);
      }
    }
    for (int c = 0; c < kVecs; ++c) store(row + c * kLanes, s[c]);
  }
  for (int t = 0; t < kCount; ++t)
    for (int c = 0; c < kVecs; ++c) store(b.out + t * kColumns + c * kLanes, out[t][c]);
}

// out[i] = query[i] S for kCount heads; with kUpdate S is first decayed and given the keys and values of `keys` heads.
template <int kCount, bool kUpdate>
void advance_heads(const Buffers& b, int64_t x, int64_t first, int64_t keys, float decay) {
  Vec out[kCount][kVecs] = {};
  const Vec factor = broadcast(decay);
  for (int64_t r = 0; r < x; ++r) {
    float* row = b.state + r * kColumns;
    Vec s[kVecs];
    for (int c = 0; c < kVecs; ++c) s[c] = load(row + c * kLanes);
    if (kUpdate) {
      for (int c = 0; c < kVecs; ++c) s[c] = factor * s[c];
      for (int64_t j = 0; j < keys; ++j) {
        const Vec k = broadcast(b.key[j * x + r]);
        for (int c = 0; c < kVecs; ++c) s[c] = fma(k, load(b.value + j * kColumns + c * kLanes), s[c]);
      }
      for (int c = 0; c < kVecs; ++c) store(row + c * kLanes, s[c]);
    }
    for (int i = 0; i < kCount; ++i) {
      const Vec q = broadcast(b.query[(first + i) * x + r]);
      for (int c = 0; c < kVecs; ++c) out[i][c] = fma(q, s[c], out[i][c]);
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int c = 0; c < kVecs; ++c) store(b.out + (first + i) * kColumns + c * kLanes, out[i][c]);
}

template <class T>
void step_heads(const LinearBlock& block, const Buffers& b, int64_t token, float decay) {
  const T* query = static_cast<const T*>(block.query) + token * block.query_token;
  const T* key = static_cast<const T*>(block.key) + token * block.key_token;
  const T* value = static_cast<const T*>(block.value) + token * block.value_token;
  for (int64_t i = 0; i < block.query_groups; ++i) read_row(query + i * block.query_head, block.x, b.query + i * block.x);
  for (int64_t j = 0; j < block.key_groups; ++j) {
    read_row(key + j * block.key_head, block.x, b.key + j * block.x);
    read_columns(block, value + j * block.value_head, b.value + j * kColumns);
  }
  for (int64_t first = 0; first < block.query_groups;) {
    const int64_t left = block.query_groups - first;
    if (left >= kHeads) {
      first == 0 ? advance_heads<kHeads, true>(b, block.x, first, block.key_groups, decay)
                 : advance_heads<kHeads, false>(b, block.x, first, block.key_groups, decay);
      first += kHeads;
    } else {
      first == 0 ? advance_heads<1, true>(b, block.x, first, block.key_groups, decay)
                 : advance_heads<1, false>(b, block.x, first, block.key_groups, decay);
      first += 1;
    }
  }
  for (int64_t i = 0; i < block.query_groups; ++i) write_row<T>(block, i, token, b.out + i * kColumns);
}

template <class T>
void step_tokens(const LinearBlock& block, const Buffers& b, const int64_t* tokens, int count, const float* decay) {
  for (int t = 0; t < count; ++t) {
    read_row(static_cast<const T*>(block.query) + tokens[t] * block.query_token, block.x, b.query + t * block.x);
    read_row(static_cast<const T*>(block.key) + tokens[t] * block.key_token, block.x, b.key + t * block.x);
    read_columns(block, static_cast<const T*>(block.value) + tokens[t] * block.value_token, b.value + t * kColumns);
  }
  if (count == kTokens && block.log_decay == nullptr) advance<kTokens, false>(b, block.x, decay);
  else if (count == kTokens) advance<kTokens, true>(b, block.x, decay);
  else advance<1, true>(b, block.x, decay);
  for (int t = 0; t < count; ++t) write_row<T>(block, 0, tokens[t], b.out + t * kColumns);
}

template <class T>
void run(const LinearBlock& block) {
  const Buffers b = carve(block);
  for (int64_t r = 0; r < block.x; ++r) {
    float* row = b.state + r * kColumns;
    for (int64_t c = 0; c < kColumns; ++c)
      row[c] = block.state_in == nullptr || c >= block.columns
                   ? 0.0f
                   : block.state_in[r * block.state_in_row + (block.column_begin + c) * block.state_in_column];
  }
  const bool one_head = block.query_groups == 1 && block.key_groups == 1;
  Decays decays = {block, 0.0};
  for (int64_t i = 0; i < block.tokens;) {
    const int count = one_head && block.tokens - i >= kTokens ? kTokens : 1;
    int64_t tokens[kTokens];
    float decay[kTokens];
    for (int t = 0; t < count; ++t) {
      tokens[t] = block.reverse ? block.tokens - 1 - i - t : i + t;
      decay[t] = !block.reverse ? decays.next(tokens[t]) : i + t == 0 ? 1.0f : decays.next(tokens[t] + 1);
    }
    if (one_head) step_tokens<T>(block, b, tokens, count, decay);
    else step_heads<T>(block, b, tokens[0], decay[0]);
    i += count;
  }
  if (block.state_out == nullptr) return;
  const float last = block.reverse && block.tokens > 0 ? decays.next(0) : 1.0f;
  for (int64_t r = 0; r < block.x; ++r)
    for (int64_t c = 0; c < block.columns; ++c)
      block.state_out[r * block.state_out_row + (block.column_begin + c) * block.state_out_column] =
          last * b.state[r * kColumns + c];
}

}  // namespace

void run_linear_block(const LinearBlock& block) {
  if (block.dtype == 0) run<float>(block);
  if (block.dtype == 1) run<Half>(block);
  if (block.dtype == 2) run<BFloat16>(block);
}

int64_t linear_columns() { return kColumns; }

int64_t linear_scratch(const LinearBlock& block) {
  return block.x * kColumns + width_of(block) * (2 * kColumns + 2 * block.x);
}

// The normaliser of a request and key/value head: norm [X] decayed and given each key, denominator_n = scale * query_n
// norm_n held at eps or more. query, key, norm as in LinearBlock; `norm` (scratch) [X] holds the result at the end.
namespace {

template <class T>
void run_normaliser(const LinearBlock& block, float eps, float* norm, float* denominator) {
  float* query = block.scratch;
  float* key = block.scratch + block.x;
  Decays decays = {block, 0.0};
  for (int64_t n = 0; n < block.tokens; ++n) {
    const float decay = decays.next(n);
    read_row(static_cast<const T*>(block.key) + n * block.key_token, block.x, key);
    for (int64_t r = 0; r < block.x; ++r) norm[r] = decay * norm[r] + key[r];
    for (int64_t g = 0; g < block.query_groups; ++g) {
      read_row(static_cast<const T*>(block.query) + g * block.query_head + n * block.query_token, block.x, query);
      float total = 0.0f;
      for (int64_t r = 0; r < block.x; ++r) total += query[r] * norm[r];
      total *= block.scale;
      const float magnitude = total < 0.0f ? -total : total;
      if (magnitude < eps) total = total < 0.0f ? -eps : eps;
      denominator[g * block.denominator_head + n * block.denominator_token] = total;
    }
  }
}

}  // namespace

void run_linear_normaliser(const LinearBlock& block, float eps, float* norm, float* denominator) {
  if (block.dtype == 0) run_normaliser<float>(block, eps, norm, denominator);
  if (block.dtype == 1) run_normaliser<Half>(block, eps, norm, denominator);
  if (block.dtype == 2) run_normaliser<BFloat16>(block, eps, norm, denominator);
}

}  // namespace leanfleet::LEANFLEET_ISA
