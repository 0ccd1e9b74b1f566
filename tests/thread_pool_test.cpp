// Runs tasks on pools that asked for four threads where the system gives 0, 1, 2 or 3 beside the caller's: each task runs
// once. Prints how many there were.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/thread_pool.h"

namespace {

std::atomic<int> left{0}, made{0};

}  // namespace

// In place of the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  if (left.fetch_sub(1) <= 0) return EAGAIN;
  ++made;
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  return reinterpret_cast<Create*>(dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, start, argument);
}

int main() {
  using namespace leanfleet;
  for (int limit = 0; limit < 4; ++limit) {
    left = limit;
    made = 0;
    shared_threads(1);  // the pool of the round before goes
    const auto threads = shared_threads(4);
    for (int call = 0; call < 100; ++call) {
      std::vector<std::atomic<int>> runs(37);
      parallel_for(*threads, 37, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const auto& count : runs)
        if (count != 1) {
          std::printf("with %d threads a task ran %d times\n", limit, count.load());
          return 1;
        }
    }
    if (threads->count() != 4 || shared_threads(4) != threads) {
      std::printf("with %d threads the pool is not the one that was asked for\n", limit);
      return 1;
    }
    std::printf("%d\n", made.load());
  }
  return 0;
}
