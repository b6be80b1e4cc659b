// The float32 GEMM with which our matmul is compared: oneDNN's, if the build
// has it. Only benchmarks use it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace kvasir::bench {

bool HasGemmBaseline();

// The operands of c [m, n] = a [m, k] * b [k, n], which are row-major and
// dense. BaselineGemm returns UNIMPLEMENTED without oneDNN.
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
