#include "bench/gemm_baseline.h"

namespace kvasir::bench {

bool HasGemmBaseline() { return false; }

absl::Status BaselineGemm(const GemmOperands&, int) {
  return absl::UnimplementedError(
      "this build has no oneDNN (libdnnl-dev was not found)");
}

}  // namespace kvasir::bench
