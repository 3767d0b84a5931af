// One source, several instruction sets. A kernel's body is an always-inlined function. MESA_TUNE_PATHS
// compiles it once per instruction set (a path); path() chooses one at run time by the processor. All give
// the same bytes.
#pragma once

#include <cstdlib>
#include <cstring>

#include "inline.h"

#if defined(__x86_64__)

#if defined(__clang__)
#define MESA_TUNE_WIDE ""
#else
#define MESA_TUNE_WIDE ",prefer-vector-width=512"
#endif

#define MESA_TUNE_PATHS(name, parameters, arguments)                                                     \
  static void name##_default parameters {                                                                \
    name arguments;                                                                                      \
  }                                                                                                      \
  __attribute__((target("avx2"))) static void name##_avx2 parameters {                                   \
    name arguments;                                                                                      \
  }                                                                                                      \
  __attribute__((target(                                                                                 \
      "avx2,avx512f,avx512bw,avx512dq,avx512vl" MESA_TUNE_WIDE))) static void name##_avx512 parameters { \
    name arguments;                                                                                      \
  }                                                                                                      \
  static constexpr decltype(&name##_default) name##_paths[] = {name##_default, name##_avx2, name##_avx512};

#else

#define MESA_TUNE_PATHS(name, parameters, arguments) \
  static void name##_default parameters {            \
    name arguments;                                  \
  }                                                  \
  static constexpr decltype(&name##_default) name##_paths[] = {name##_default};

#endif

namespace mesa_tune::cpu {

// Index of the best path that the processor supports. ATEN_CPU_CAPABILITY, which limits torch's own kernels,
// limits this one, too, if it is `default` or `avx2`.
inline int detect_path() {
#if defined(__x86_64__)
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  if (limit != nullptr && std::strcmp(limit, "default") == 0) return 0;
  const bool narrow = limit != nullptr && std::strcmp(limit, "avx2") == 0;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide && !narrow) return 2;
  return __builtin_cpu_supports("avx2") ? 1 : 0;
#else
  return 0;
#endif
}

inline int path() {
  static const int chosen = detect_path();
  return chosen;
}

}  // namespace mesa_tune::cpu
