// Opens NVIDIA's cuBLASLt at run time. Programs are not linked with it, so they
// also start on hosts that do not have it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cublaslt.h"

namespace kvasir::kernels::cuda {

// Returns the library, which is valid for the whole process. The first
// successful call opens it, from the places that the loader searches
// (LD_LIBRARY_PATH, ldconfig) or from the folder of the CUDA toolkit. Errors:
// UNIMPLEMENTED if the program was built without the header of cuBLASLt;
// NOT_FOUND, with every place that was tried and what to do, if the library was
// not found.
absl::StatusOr<CublasLt*> RealCublasLt();

// For tests: opens the first of these files that the loader can load and that
// has all functions that we use. The library stays loaded.
absl::StatusOr<std::unique_ptr<CublasLt>> OpenCublasLt(
    const std::vector<std::string>& files);

// For tests: returns OK if the library accepts every attribute with which we
// describe a product of this shape. Needs no GPU.
absl::Status DescribesForTesting(CublasLt& real, const GemmShape& shape);

}  // namespace kvasir::kernels::cuda
