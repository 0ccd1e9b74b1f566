#include "core/cpu_isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace leanfleet {

namespace {

Isa detect() {
#if defined(LEANFLEET_X86)
  __builtin_cpu_init();
  Isa best = Isa::kBaseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) best = Isa::kAvx2;
  if (best == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    best = Isa::kAvx512;
  const char* wish = std::getenv("LEANFLEET_CPU");
  if (wish != nullptr && std::strcmp(wish, "baseline") == 0) return Isa::kBaseline;
  if (wish != nullptr && std::strcmp(wish, "avx2") == 0 && best == Isa::kAvx512) return Isa::kAvx2;
  return best;
#else
  return Isa::kBaseline;
#endif
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = detect();
  return isa;
}

const char* unknown_cpu_isa() {
  static const char* const unknown = [] {
    const char* wish = std::getenv("LEANFLEET_CPU");
    if (wish == nullptr || wish[0] == '\0') return static_cast<const char*>(nullptr);
    for (const char* known : {"baseline", "avx2", "avx512"})
      if (std::strcmp(wish, known) == 0) return static_cast<const char*>(nullptr);
    return wish;
  }();
  return unknown;
}

namespace {

#if defined(LEANFLEET_X86)
// Whether kernels of kAvx512 may use what not all such processors have.
bool may_go_beyond_avx512() {
  const char* wish = std::getenv("LEANFLEET_CPU");
  return cpu_isa() == Isa::kAvx512 && (wish == nullptr || std::strcmp(wish, "avx512") != 0);
}
#endif

}  // namespace

bool cpu_has_bfloat16() {
#if defined(LEANFLEET_X86)
  static const bool has = may_go_beyond_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

bool cpu_has_integer_products() {
#if defined(LEANFLEET_X86)
  static const bool has = may_go_beyond_avx512() && __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

}  // namespace leanfleet
