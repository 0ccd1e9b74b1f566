// How functions of the C interface end: a code, and a text for leanfleet_last_error.
#pragma once

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/status.h"

namespace leanfleet::capi {

inline thread_local std::string last_error;
inline thread_local char thrown[160];  // what an exception said, in place of last_error; empty: there was none

// No exception crosses the library's boundary. To tell of a lack of memory takes none.
template <class F>
int guarded(const char* what, F&& body) {
  thrown[0] = '\0';
  try {
    Status status = body();
    if (!status.ok()) last_error = std::move(status.message);
    return static_cast<int>(status.code);
  } catch (const std::bad_alloc&) {
    std::snprintf(thrown, sizeof thrown, "%.100s: out of memory; nothing is known of its outputs", what);
  } catch (const std::exception& error) {
    std::snprintf(thrown, sizeof thrown, "%.60s: %.90s", what, error.what());
  }
  return static_cast<int>(Code::kInternal);
}

}  // namespace leanfleet::capi
