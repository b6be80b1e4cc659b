// Computes matrix products on one GPU by cuBLASLt.
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

// Multiplies matrices by cuBLASLt. Asks the library for an algorithm only once
// for each shape and keeps it, because the choice takes tens of microseconds
// and every decoding step has the same shapes.
class CublasGemms {
 public:
  // The most algorithms that are kept. A model needs about five for each number
  // of rows that a batch can have.
  static constexpr size_t kMostShapes = 4096;

  // Makes an object for the device that the calling thread has selected.
  // `major` is the major number of the device's compute capability. `library`
  // must outlive the result. Returns INTERNAL if the library does not start.
  static absl::StatusOr<std::unique_ptr<CublasGemms>> Make(CublasLt* library,
                                                           int major);
  // The calling thread must have selected the device.
  ~CublasGemms();

  // The size that NVIDIA recommends: 32 MiB from sm_90 on, 8 MiB for older
  // GPUs.
  size_t workspace_bytes() const { return workspace_bytes_; }
  // The library's name and version for Device::numerics, for example
  // "lt130101". The version is included because other versions may add in other
  // orders and give other bits.
  std::string name() const;

  // Enqueues a product on the stream. Errors: UNIMPLEMENTED if the library has
  // no algorithm for it; INTERNAL with the library's own error text if the
  // library fails.
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
