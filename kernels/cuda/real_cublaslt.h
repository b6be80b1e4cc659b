// NVIDIA's cuBLASLt, opened when it is asked for: nothing links it, so that one
// program starts on hosts with and without it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cublaslt.h"

namespace kvasir::kernels::cuda {

// For the whole process, UNIMPLEMENTED from a build that had no header of it;
// opened by the first call that finds it. NOT_FOUND
// names every place that was tried and what to do: the loader's own
// (LD_LIBRARY_PATH, ldconfig), then the toolkit's folder.
absl::StatusOr<CublasLt*> RealCublasLt();

// The same from the first of these files that the loader takes and that has
// every function; for tests. It stays loaded.
absl::StatusOr<std::unique_ptr<CublasLt>> OpenCublasLt(
    const std::vector<std::string>& files);

// Whether the library takes every attribute of its descriptions of a product of
// this shape, which needs no GPU; for tests.
absl::Status DescribesForTesting(CublasLt& real, const GemmShape& shape);

}  // namespace kvasir::kernels::cuda
