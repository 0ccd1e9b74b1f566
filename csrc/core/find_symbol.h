// Functions of libraries that are loaded at run time.
#pragma once

#include <dlfcn.h>

namespace leanfleet {

template <class F>
bool find_symbol(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace leanfleet
