// Our own threads, for callers that bring none (the C interface).
#pragma once

#include <memory>

#include "core/op.h"

namespace leanfleet {

// The processors this process may use.
int available_processors();

// A pool shared by the process, created at the first call with a given thread count and after a fork. Calls from
// several threads take turns. Thread counts below 1 mean available_processors(); where the system does not give so many
// threads, fewer run.
std::shared_ptr<Threads> shared_threads(int count);

}  // namespace leanfleet
