#pragma once

#include <ATen/ATen.h>

#include "base/hadamard.h"

namespace kvasir::compress {

// Returns base::HadamardMatrix(n) as a tensor H [n, n], float64 on the CPU. A
// latent h is rotated to H h.
inline at::Tensor HadamardTensor(int64_t n) {
  std::vector<double> matrix = base::HadamardMatrix(n);
  return at::from_blob(matrix.data(), {n, n}, at::kDouble).clone();
}

}  // namespace kvasir::compress
