// Opens NVIDIA's cuBLASLt at run time. Programs do not link it, so they also
// start on hosts without it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cublaslt.h"

namespace kvasir::kernels::cuda {

// Returns the library, which stays valid for the whole process; the first
// successful call opens it. Errors: UNIMPLEMENTED if the build had no header of
// cuBLASLt; NOT_FOUND with every place that was tried and what to do. The
// places are those of the loader (LD_LIBRARY_PATH, ldconfig), then the
// toolkit's folder.
absl::StatusOr<CublasLt*> RealCublasLt();

// Opens the first of these files that the loader accepts and that has every
// function; for tests. The library stays loaded.
absl::StatusOr<std::unique_ptr<CublasLt>> OpenCublasLt(
    const std::vector<std::string>& files);

// OK if the library accepts every attribute in its descriptions of a product of
// this shape, which needs no GPU; for tests.
absl::Status DescribesForTesting(CublasLt& real, const GemmShape& shape);

}  // namespace kvasir::kernels::cuda
