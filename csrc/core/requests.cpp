#include "core/requests.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/integers.h"

namespace leanfleet {

namespace {

std::string number(float value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return buffer;
}

}  // namespace

bool in_a_request(const Tensor& cu_seqlens, int64_t token) {
  if (!cu_seqlens.present()) return true;
  const int32_t* offsets = cu_seqlens.as<const int32_t>();
  for (int64_t q = 0; q + 1 < cu_seqlens.shape[0]; ++q)
    if (offsets[q] <= token && token < offsets[q + 1]) return true;
  return false;
}

Status check_log_decay(const Call& call, const Tensor& log_decay, const Tensor& cu_seqlens) {
  if (!log_decay.present()) return {};
  const float* values = log_decay.as<const float>();
  const int64_t count = log_decay.elements();
  bool right = true;
  for (int64_t i = 0; i < count; ++i) right &= values[i] <= 0.0f;  // false for NaN
  if (right) return {};
  int64_t axes[kMaxRank];
  const auto split = [&](int64_t i) {
    for (int axis = log_decay.rank - 1; axis >= 0; --axis) {
      axes[axis] = i % log_decay.shape[axis];
      i /= log_decay.shape[axis];
    }
  };
  const int head_axis = call.bnhd() ? 2 : 1, token_axis = call.bnhd() ? 1 : 2;
  const auto allowed = [&](int64_t i) {
    if (values[i] <= 0.0f) return true;
    if (log_decay.rank < 3) return false;
    split(i);
    return !in_a_request(cu_seqlens, axes[token_axis]);
  };
  int64_t at = 0;
  while (at < count && allowed(at)) ++at;
  if (at == count) return {};
  split(at);
  std::string index, where;
  for (int axis = 0; axis < log_decay.rank; ++axis) index += (axis > 0 ? "," : "") + std::to_string(axes[axis]);
  if (log_decay.rank >= 3)
    where = " (batch row " + std::to_string(axes[0]) + ", head " + std::to_string(axes[head_axis]) + ", token " +
            std::to_string(axes[token_axis]) + ")";
  return call.invalid("log_decay[" + index + "] is " + number(values[at]) + where +
                      "; ln of a decay lies in [-inf, 0]. Pass the logarithm, not the decay itself");
}

Status check_cu_seqlens(const Call& call, const Tensor& cu_seqlens, int64_t tokens) {
  const int32_t* offsets = cu_seqlens.as<const int32_t>();
  const int64_t last = cu_seqlens.shape[0] - 1;
  for (int64_t i = 0; i <= last; ++i) {
    const std::string found = "cu_seqlens[" + std::to_string(i) + "] is " + std::to_string(offsets[i]);
    if (i == 0 && offsets[i] != 0) return call.invalid(found + "; expected 0, where the first request begins");
    if (i > 0 && offsets[i] < offsets[i - 1])
      return call.invalid(found + ", less than the " + std::to_string(offsets[i - 1]) + " before it; offsets must not fall");
    if (i == last && offsets[i] > tokens) return call.invalid(found + "; there are N = " + std::to_string(tokens) + " tokens");
  }
  return {};
}

Status check_query_lens(const Call& call, const Tensor& query_lens, int64_t tokens) {
  for (int64_t b = 0; b < query_lens.shape[0]; ++b) {
    const int32_t found = query_lens.as<const int32_t>()[b];
    if (found < 0 || found > tokens)
      return call.invalid("query_lens[" + std::to_string(b) + "] is " + std::to_string(found) +
                          "; expected 0 .. N = " + std::to_string(tokens));
  }
  return {};
}

Status check_state_index(const Call& call, const Tensor& state_index, int64_t rows, const Tensor& cu_seqlens) {
  const int32_t* index = state_index.as<const int32_t>();
  for (int64_t i = 0; i < state_index.shape[0]; ++i) {
    if (index[i] == -1 && cu_seqlens.present()) {
      const int32_t* offsets = cu_seqlens.as<const int32_t>();
      if (offsets[i] == offsets[i + 1]) continue;
    }
    const std::string found = "state_index[" + std::to_string(i) + "] is " + std::to_string(index[i]);
    if (index[i] < 0 || index[i] >= rows)
      return call.invalid(found + "; initial_state has " + std::to_string(rows) + " rows, expected 0 .. " +
                          std::to_string(rows - 1));
    const int64_t twin = std::find(index, index + i, index[i]) - index;
    if (twin < i)
      return call.invalid(found + ", as is state_index[" + std::to_string(twin) + "]; two requests cannot write one state");
  }
  return {};
}

RequestTokens tokens_of(const int32_t* cu_seqlens, int64_t request, int64_t tokens) {
  if (cu_seqlens == nullptr) return {0, tokens};
  const int64_t begin = clamped_offset(cu_seqlens, request, tokens);
  return {begin, std::max(begin, clamped_offset(cu_seqlens, request + 1, tokens))};
}

bool covers_all_tokens(const int32_t* cu_seqlens, int64_t requests, int64_t tokens) {
  int64_t covered = 0;
  for (int64_t q = 0; q < requests; ++q) {
    const RequestTokens own = tokens_of(cu_seqlens, q, tokens);
    if (own.begin <= covered) covered = std::max(covered, own.end);
  }
  return covered == tokens;
}

void zero(const Tensor& tensor) {
  std::memset(tensor.data, 0, static_cast<size_t>(tensor.elements() * element_size(tensor.dtype)));
}

void name_pool_rows(const int32_t* state_index, int64_t requests, int64_t rows, uint8_t* named) {
  std::memset(named, 0, static_cast<size_t>(rows));
  for (int64_t q = 0; q < requests; ++q)
    if (state_index[q] >= 0 && state_index[q] < rows) named[state_index[q]] = 1;
}

void keep_other_rows(Threads& threads, const Tensor& from, const Tensor& to, const uint8_t* named) {
  if (to.data == nullptr || from.data == to.data || from.elements() == 0) return;
  const int64_t bytes = from.elements() / from.shape[0] * element_size(from.dtype);
  parallel_for(threads, from.shape[0], [&](int64_t row) {
    if (!named[row])
      std::memcpy(static_cast<char*>(to.data) + row * bytes, static_cast<const char*>(from.data) + row * bytes,
                  static_cast<size_t>(bytes));
  });
}

}  // namespace leanfleet
