// Sizing and carving of an operator's workspace by one and the same code path.
//
// A kernel's run function asks for its buffers first, then returns if the workspace is only counting:
//
//   float* partial = ws.scratch<float>(tasks * width);
//   uint32_t* tickets = ws.sync<uint32_t>(units);
//   if (ws.counting()) return {};
//
// What it asks for may depend on shapes and attributes, never on data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace leanfleet {

constexpr size_t kWorkspaceAlignment = 256;  // bytes; of both bases and of every buffer

class Workspace {
 public:
  // Counts only: every buffer is null.
  Workspace() = default;
  // Carves. `scratch` holds anything at entry. `sync` is zero before the first launch and every launch leaves it
  // zero; it belongs to one node on one stream. A buffer that does not fit is null.
  Workspace(void* scratch, size_t scratch_bytes, void* sync, size_t sync_bytes)
      : scratch_{static_cast<char*>(scratch), scratch_bytes, 0}, sync_{static_cast<char*>(sync), sync_bytes, 0},
        counting_(false) {}

  template <class T>
  T* scratch(int64_t count) {
    return reinterpret_cast<T*>(take(scratch_, static_cast<size_t>(count) * sizeof(T)));
  }
  template <class T>
  T* sync(int64_t count) {
    return reinterpret_cast<T*>(take(sync_, static_cast<size_t>(count) * sizeof(T)));
  }

  bool counting() const { return counting_; }
  size_t scratch_bytes() const { return scratch_.used; }
  size_t sync_bytes() const { return sync_.used; }

 private:
  struct Arena {
    char* base = nullptr;
    size_t size = 0;
    size_t used = 0;
  };

  char* take(Arena& arena, size_t bytes) {
    const size_t begin = arena.used;
    arena.used += round_up(bytes, kWorkspaceAlignment);
    if (counting_) return nullptr;
    return arena.used > arena.size ? nullptr : arena.base + begin;
  }

  Arena scratch_, sync_;
  bool counting_ = true;
};

}  // namespace leanfleet
