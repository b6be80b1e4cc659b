#pragma once

#include <ATen/ATen.h>

namespace kvasir::compress {

// Returns F + epsilon * tr(F) / n * I for a Fisher information F [n, n]
// float64, where I is the identity matrix. F may be estimated from fewer tokens
// than it has dimensions. Errors in some directions would then seem to cost
// nothing without the added term. The published results for real models were
// measured with the default epsilon.
at::Tensor Shrunk(const at::Tensor& information, double epsilon = 0.02);

}  // namespace kvasir::compress
