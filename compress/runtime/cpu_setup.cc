#include "compress/runtime/cpu_setup.h"

#include <dlfcn.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace kvasir::compress {
namespace {

constexpr char kCoreType[] = "OPENBLAS_CORETYPE";

const char* BestCoreType() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return "SkylakeX";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return "Haswell";
  }
#endif
  return nullptr;
}

}  // namespace

void UseBestBlasKernels(char** argv) {
  const char* core_type = BestCoreType();
  if (core_type == nullptr || std::getenv(kCoreType) != nullptr) return;
  if (setenv(kCoreType, core_type, /*overwrite=*/0) != 0) return;

  // The program is executed by its real path, so that it keeps its name in
  // process lists. If this fails, the process continues with slow kernels.
  std::error_code error;
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) execv(program.c_str(), argv);
}

void SetBlasThreads(int threads) {
  // The function is looked up at run time, because libtorch may use another
  // BLAS.
  void* symbol = dlsym(RTLD_DEFAULT, "openblas_set_num_threads");
  if (symbol == nullptr) return;
  reinterpret_cast<void (*)(int)>(symbol)(threads);
}

int BlasThreads() {
  void* symbol = dlsym(RTLD_DEFAULT, "openblas_get_num_threads");
  return symbol == nullptr ? 0 : reinterpret_cast<int (*)()>(symbol)();
}

ScopedBlasThreads::ScopedBlasThreads(int threads) : before_(BlasThreads()) {
  if (before_ > 0 && before_ != threads) SetBlasThreads(threads);
}

ScopedBlasThreads::~ScopedBlasThreads() {
  if (before_ > 0 && BlasThreads() != before_) SetBlasThreads(before_);
}

void KeepFreedMemory() {
  // All threads share the main arena, because only this arena can grow without
  // limit. All other arenas would map large blocks from the system.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace kvasir::compress
