#pragma once

#include <ATen/ATen.h>

namespace kvasir::compress {

// F + epsilon * tr(F) / n * I for a Fisher information F [n, n] float64. F is
// estimated from fewer tokens than it has directions; the shrinkage ensures
// that no direction counts as worthless. The frontier of a real model was
// measured with the default epsilon.
at::Tensor Shrunk(const at::Tensor& information, double epsilon = 0.02);

}  // namespace kvasir::compress
