// An NVIDIA GPU as a device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/runtime.h"
#include "kernels/device/device.h"
#include "kernels/device/device_ops.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

struct CudaDeviceOptions {
  int ordinal = 0;  // index among the GPUs in CUDA_VISIBLE_DEVICES
  int64_t memory_limit_bytes = 0;  // limit of GPU memory; 0: no limit
  // Limit of the host pool, which lies in the host's memory; 0: no limit.
  int64_t host_limit_bytes = 0;
  DType activations = DType::kBf16;
  // Multiplies with our own kernels instead of cuBLASLt. Then a row's bits do
  // not depend on the number of rows.
  bool deterministic = false;
};

// Kernels run in order on the device's own streams, while the host continues.
// The host pool is pinned host memory with its own limit, and kernels can
// access it. Uploads, read-backs and writes (BeginWrite) go through pinned
// blocks (Staging), so the caller may reuse its memory at once. Freeing memory
// first waits for the device.
//
// Owns: the allocator, and a stream for writes.
class CudaDevice final : public Device {
 public:
  // `runtime` outlives the device; `ops` are valid for the whole process.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Make(
      const CudaDeviceOptions& options, cuda::Runtime* runtime,
      const DeviceOps& ops,
      const std::function<absl::StatusOr<cuda::CublasLt*>()>& open_cublas =
          nullptr);
  ~CudaDevice() override;

  const cuda::DeviceProperties& properties() const;
  // Returns the CUDA handle of a stream that this class made, for measurements
  // with CUDA events.
  static cuda::StreamHandle HandleOf(const Stream& stream);

  std::unique_ptr<Stream> MakeStream() override;
  std::string name() const override { return "cuda"; }
  // Names the architecture, because tensor cores of other architectures add in
  // other orders, and the version of cuBLASLt if it is used: "cuda-sm90" or
  // "cuda-sm90-lt130101".
  std::string numerics() const override;
  bool rows_are_invariant() const override;
  DType activations() const override { return activations_; }
  int num_threads() const override { return 1; }
  WeightLayout weight_layout() const override { return WeightLayout::kRows; }
  int64_t page_granule_bytes() const override { return 16; }
  absl::StatusOr<DeviceMemory> memory() const override;
  absl::Status UseOnThisThread() const override;
  bool has_own_memory() const override { return true; }
  int64_t staging_bytes() const override;
  int64_t cta_shared_bytes() const override {
    return properties().shared_bytes;
  }
  // Returns ordinary host memory, which EndWrite copies and frees.
  absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                   size_t bytes) override;
  absl::Status EndWrite(DevicePtr<void> memory, void* host,
                        size_t bytes) override;
  void FreeWriteBuffers() override;

 private:
  class State;
  class Allocator;
  class CudaStream;
  class Writes;

  CudaDevice(std::shared_ptr<State> state, const CudaDeviceOptions& options,
             const DeviceOps& ops);

  const std::shared_ptr<State> state_;
  const DeviceOps ops_;
  const DType activations_;
  const std::unique_ptr<Writes> writes_;
};

// Makes a device for a GPU, with CUDA's own runtime and all kernels of this
// build. This function is in the library kernels_cuda, which only a build with
// nvcc has. Other builds link kernels_no_cuda, where it returns UNIMPLEMENTED
// and says what the build lacks.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    const CudaDeviceOptions& options);

}  // namespace kvasir::kernels
