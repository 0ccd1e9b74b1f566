// Preloaded into a process: `operator new` fails at the chosen allocations of a library, or of everybody.
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> seen{0};                            // allocations since arm()
std::atomic<long> first{-1};                          // the first that fails; -1: none
std::atomic<long> failures{0};                        // that many in a row
std::atomic<const char*> from{nullptr}, to{nullptr};  // where callers lie that count; null: everywhere

bool fails(const void* caller) {
  const long start = first.load();
  const char* const low = from.load();
  if (start < 0 || (low != nullptr && (caller < low || caller >= to.load()))) return false;
  const long number = seen.fetch_add(1);
  return number >= start && number - start < failures.load();
}

void* allocate(std::size_t size, std::size_t alignment, const void* caller) noexcept {
  if (fails(caller)) return nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(size != 0 ? size : 1);
  return std::aligned_alloc(alignment, (size + alignment) / alignment * alignment);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" void refuse_memory(long start, long count, const char* low, const char* high) {
  first.store(-1);
  seen.store(0);
  failures.store(count);
  from.store(low);
  to.store(high);
  first.store(start);
}

extern "C" long memory_asked_for() { return seen.load(); }

#define CALLER __builtin_return_address(0)

void* operator new(std::size_t size) { return or_throw(allocate(size, 0, CALLER)); }
void* operator new[](std::size_t size) { return or_throw(allocate(size, 0, CALLER)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, 0, CALLER); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size, 0, CALLER); }
void* operator new(std::size_t size, std::align_val_t to) { return or_throw(allocate(size, std::size_t(to), CALLER)); }
void* operator new[](std::size_t size, std::align_val_t to) { return or_throw(allocate(size, std::size_t(to), CALLER)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
