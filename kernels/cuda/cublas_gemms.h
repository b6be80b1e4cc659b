// Products of one GPU by cuBLASLt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/cuda/cublaslt.h"

namespace kvasir::kernels::cuda {

// Asks the library once for each shape and keeps its answer: a look-up takes
// tens of microseconds, and the same shapes come with every step.
//
// Owns: a handle, and the answers of at most kMostShapes shapes.
// Threads: all methods may be called from any thread that uses the device.
class CublasGemms {
 public:
  // Steps of a model are some five shapes for each number of rows.
  static constexpr size_t kMostShapes = 4096;

  // `library` outlives it. The device is the one that the calling thread uses,
  // `major` that of its compute capability. INTERNAL where the library does not
  // start.
  static absl::StatusOr<std::unique_ptr<CublasGemms>> Make(CublasLt* library,
                                                           int major);
  // The calling thread uses the device.
  ~CublasGemms();

  // What NVIDIA names for its libraries: 32 MiB on sm_90 and newer, 8 before.
  size_t workspace_bytes() const { return workspace_bytes_; }
  // "lt130101": another version may multiply in other orders.
  std::string name() const;

  // UNIMPLEMENTED where the library has no algorithm for the product, INTERNAL
  // with its own words where it fails.
  absl::Status Enqueue(const Gemm& gemm, StreamHandle stream);

  size_t known_shapes() const;

 private:
  CublasGemms(CublasLt* library, CublasHandle handle, size_t workspace_bytes)
      : library_(library), handle_(handle), workspace_bytes_(workspace_bytes) {}

  absl::StatusOr<GemmAlgorithm> AlgorithmFor(const GemmShape& shape);
  absl::Status Failed(absl::StatusCode code, const std::string& what,
                      CublasResult result) const;

  CublasLt* const library_;
  const CublasHandle handle_;
  const size_t workspace_bytes_;
  mutable base::Mutex mutex_;
  std::map<GemmShape, GemmAlgorithm> algorithms_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::kernels::cuda
