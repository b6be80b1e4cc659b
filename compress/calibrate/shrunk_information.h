#pragma once

#include <ATen/ATen.h>

namespace kvasir::compress {

// F + epsilon * tr(F) / n * I of a Fisher information F [n, n] float64, which
// is estimated from fewer tokens than it has directions: none is worth nothing.
// The default is the one that the frontier of a real model was found with.
at::Tensor Shrunk(const at::Tensor& information, double epsilon = 0.02);

}  // namespace kvasir::compress
