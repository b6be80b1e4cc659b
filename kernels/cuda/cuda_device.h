// CudaDevice: the Device for an NVIDIA GPU.
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
  int ordinal = 0;  // index of the GPU among those in CUDA_VISIBLE_DEVICES
  int64_t memory_limit_bytes = 0;  // limit of GPU memory; 0: no limit
  // Limit of the host pool, which is in the host's memory; 0: no limit.
  int64_t host_limit_bytes = 0;
  DType activations = DType::kBf16;
  // True if matrix products use our own kernels instead of cuBLASLt. With
  // our kernels, a row's result has the same bits for any number of rows in
  // the batch.
  bool deterministic = false;
};

// Kernels run asynchronously, in the order of their CUDA stream. The host pool
// is pinned host memory with its own limit, which kernels can access. Uploads,
// read-backs and writes (BeginWrite) go through pinned blocks (Staging), so the
// caller may reuse the host memory as soon as the call returns. Freeing memory
// waits until the device is idle.
//
// Owns: the allocator, and a stream for writes.
class CudaDevice final : public Device {
 public:
  // `runtime` must outlive the device; `ops` must be valid for the whole
  // process.
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
  // For example "cuda-sm90", or "cuda-sm90-lt130101" if cuBLASLt is used. The
  // name includes the architecture and the version of cuBLASLt because both
  // determine in which order numbers are added.
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
  // Returns ordinary host memory; EndWrite copies its content to the device and
  // frees it.
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
