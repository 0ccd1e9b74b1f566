// Which build of a CPU kernel runs on this processor.
#pragma once

namespace leanfleet {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// What LEANFLEET_CPU may say.
constexpr const char* kCpuIsaNames = "baseline, avx2 or avx512";

// The best that the processor has and this library holds. The environment variable LEANFLEET_CPU can only lower it.
Isa cpu_isa();

// The value of LEANFLEET_CPU where it is none of those names; null where it is one, empty or not set.
const char* unknown_cpu_isa();

// Whether kernels of kAvx512 may multiply bfloat16 directly (AVX512_BF16). LEANFLEET_CPU=avx512 forbids it.
bool cpu_has_bfloat16();

// The same of instructions that add up products of bytes (AVX512_VNNI).
bool cpu_has_integer_products();

}  // namespace leanfleet

// LEANFLEET_CPU_FUNCTION(result, name, parameters), in the operator's namespace: declares `name` in the namespace of every
// build and defines select_name(), which returns the one for this processor:
// LEANFLEET_CPU_FUNCTION(void, attend, (const Args& args, float* out)).
#if defined(LEANFLEET_X86)
#define LEANFLEET_CPU_FUNCTION(result, name, parameters) \
  namespace baseline {                                   \
  result name parameters;                                \
  }                                                      \
  namespace avx2 {                                       \
  result name parameters;                                \
  }                                                      \
  namespace avx512 {                                     \
  result name parameters;                                \
  }                                                      \
  inline auto select_##name() -> result(*) parameters {  \
    switch (cpu_isa()) {                                 \
      case Isa::kAvx512: return avx512::name;            \
      case Isa::kAvx2: return avx2::name;                \
      default: return baseline::name;                    \
    }                                                    \
  }
#else
#define LEANFLEET_CPU_FUNCTION(result, name, parameters) \
  namespace baseline {                                   \
  result name parameters;                                \
  }                                                      \
  inline auto select_##name() -> result(*) parameters { return baseline::name; }
#endif
