#include <dlfcn.h>
#include <dnnl.h>

#include "absl/strings/str_cat.h"
#include "bench/gemm_baseline.h"

namespace kvasir::bench {
namespace {

// Sets the number of OpenMP's threads. Debian's oneDNN runs on these threads
// but cannot set their number. OpenMP's function is looked up at run time, so
// that the build does not need OpenMP.
void SetThreads(int threads) {
  static void* const function = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads");
  if (function != nullptr) reinterpret_cast<void (*)(int)>(function)(threads);
}

}  // namespace

bool HasGemmBaseline() { return true; }

absl::Status BaselineGemm(const GemmOperands& operands, int threads) {
  SetThreads(threads);
  const dnnl_status_t status = dnnl_sgemm(
      'N', 'N', operands.m, operands.n, operands.k, 1.0f, operands.a,
      operands.k, operands.b, operands.n, 0.0f, operands.c, operands.n);
  if (status == dnnl_success) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("dnnl_sgemm: status ", static_cast<int>(status)));
}

}  // namespace kvasir::bench
