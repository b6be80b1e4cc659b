// Assertions for invariants. A failed check prints its file, line and
// condition, and aborts. Never use them on data from files, the network
// or peers.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace kvasir::base {

[[noreturn]] inline void CheckFailed(const char* file, int line,
                                     const char* condition) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace kvasir::base

// Checks the condition in every build.
#define KVASIR_CHECK(condition)                                    \
  do {                                                             \
    if (!(condition)) [[unlikely]]                                 \
      ::kvasir::base::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

// Checks the condition only in builds with KVASIR_CHECKS (the dev and
// sanitizer presets).
#if KVASIR_CHECKS
#define KVASIR_DCHECK(condition) KVASIR_CHECK(condition)
#else
#define KVASIR_DCHECK(condition)  \
  do {                            \
    if (false) (void)(condition); \
  } while (false)
#endif
