// Packed requests and pools of states, as the operators with a carried state have them: what their values must be, and
// which tokens and rows belong to a request.
#pragma once

#include <cstdint>

#include "core/op.h"

namespace leanfleet {

// log_decay of a head (rank 1), a token (3) or a token's key dimensions (4). Tokens of no request may hold anything.
Status check_log_decay(const Call& call, const Tensor& log_decay, const Tensor& cu_seqlens);
// Offsets begin at 0, do not fall and end at the last of `tokens` or before; tokens behind are padding.
Status check_cu_seqlens(const Call& call, const Tensor& cu_seqlens, int64_t tokens);
// So many tokens of each batch row.
Status check_query_lens(const Call& call, const Tensor& query_lens, int64_t tokens);
// Rows of a pool of so many, none of them twice. A request without tokens may have -1.
Status check_state_index(const Call& call, const Tensor& state_index, int64_t rows, const Tensor& cu_seqlens);

// Whether a token belongs to a request; without offsets all do.
bool in_a_request(const Tensor& cu_seqlens, int64_t token);

struct RequestTokens {
  int64_t begin, end;
};

// The tokens of a request, inside 0 .. tokens whatever the offsets say; without offsets (null) all.
RequestTokens tokens_of(const int32_t* cu_seqlens, int64_t request, int64_t tokens);
// Whether every token belongs to one of the requests.
bool covers_all_tokens(const int32_t* cu_seqlens, int64_t requests, int64_t tokens);

void zero(const Tensor& tensor);

// named[row] of a pool with so many rows: 1 where a request names the row, else 0.
void name_pool_rows(const int32_t* state_index, int64_t requests, int64_t rows, uint8_t* named);
// Copies the rows of a pool that no request names, unless it is the same buffer or `to` is absent.
void keep_other_rows(Threads& threads, const Tensor& from, const Tensor& to, const uint8_t* named);

}  // namespace leanfleet
