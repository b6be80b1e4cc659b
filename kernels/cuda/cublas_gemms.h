// Matrix products on one GPU by cuBLASLt.
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

// Asks the library for an algorithm once for each shape and keeps the answer:
// the choice takes tens of microseconds, and every step has the same shapes.
class CublasGemms {
 public:
  // A model's step has about five shapes for each number of rows.
  static constexpr size_t kMostShapes = 4096;

  // `library` outlives the result. The device is the one that the calling
  // thread uses; `major` is the major number of its compute capability.
  // INTERNAL if the library does not start.
  static absl::StatusOr<std::unique_ptr<CublasGemms>> Make(CublasLt* library,
                                                           int major);
  // The calling thread must use the device.
  ~CublasGemms();

  // NVIDIA's recommended size: 32 MiB from sm_90 on, 8 MiB before.
  size_t workspace_bytes() const { return workspace_bytes_; }
  // Names the library's version, for example "lt130101", because another
  // version may add in other orders.
  std::string name() const;

  // UNIMPLEMENTED if the library has no algorithm for the product; INTERNAL
  // with the library's own words if it fails.
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
