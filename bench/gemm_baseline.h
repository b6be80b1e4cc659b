// The float32 GEMM that ours is compared with: oneDNN's, if the build has it.
// Only benchmarks use it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace kvasir::bench {

bool HasGemmBaseline();

// c [m, n] = a [m, k] * b [k, n], row-major and dense, on `threads` threads.
// UNIMPLEMENTED without oneDNN.
struct GemmOperands {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
};
absl::Status BaselineGemm(const GemmOperands& operands, int threads);

}  // namespace kvasir::bench
