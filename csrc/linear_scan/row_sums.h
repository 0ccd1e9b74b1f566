// The row sums of a scan whose keys are wider than Hopper's kernel takes at once: without decay they are products of rows of
// x with a running sum of y, so that they can be known before the scan, which then goes in parts of the keys, each with rows
// divided beforehand.
#pragma once

#include "linear_scan/chunk_scan.h"

namespace leanfleet {

// Ascending, causal, without decay or packed requests, of 16-bit numbers and at most kChunkMaxWidth keys; what is divided, only
// where halves_add. What is null while a workspace is counted may make a scan fit then and not when it runs: it asks for less.
bool row_sums_fit(const ChunkScan& scan);

// Finds the row sums of a scan that fits, and the sum of y that is carried, and leaves in `scan` one without row sums that has
// the same outputs, carried states and sums of z. Asks `ws` for its buffers, returns 0 if that counts, else launches and
// returns the cudaError_t.
int take_row_sums(ChunkScan& scan, const CudaTarget& target, Workspace& ws);

}  // namespace leanfleet
