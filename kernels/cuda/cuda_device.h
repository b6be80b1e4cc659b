// An NVIDIA GPU as a device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"
#include "kernels/device/device.h"
#include "kernels/device/device_ops.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

struct CudaDeviceOptions {
  int ordinal = 0;  // as CUDA counts those that CUDA_VISIBLE_DEVICES leaves
  int64_t memory_limit_bytes = 0;  // of the GPU's memory; 0: no limit
  DType activations = DType::kBf16;
};

// The GPU's memory now.
struct CudaMemory {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  // Held by the allocator, as asked for.
  int64_t allocated_bytes = 0;
  // All else that is not free: CUDA's context and the kernels' code, what
  // allocations are rounded up by, and other processes.
  int64_t other_bytes = 0;
};

// Kernels run on streams of their own, in order, while the host goes on. The
// host pool is pinned memory of the host, which kernels reach; its bytes count
// towards no limit of the GPU. What is uploaded, read back or written by
// BeginWrite goes through pinned blocks (Staging), so a caller's memory is its
// own again at once. Before memory is freed the device is waited for.
//
// Owns: the allocator, and a stream for writes.
// Threads: as Device. Writes go one at a time.
// Errors: RESOURCE_EXHAUSTED with the GPU's numbers and the flag to change. A
//   kernel that fails while it runs is found by whoever waits next, and every
//   call from then on fails: CUDA has no way back but another process.
class CudaDevice final : public Device {
 public:
  // `runtime` outlives the device; `ops` are for the whole process.
  // FAILED_PRECONDITION without a driver, with one that is too old, without a
  // GPU or with one that this build has no code for; INVALID_ARGUMENT for an
  // ordinal that is not there.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Make(
      const CudaDeviceOptions& options, cuda::Runtime* runtime,
      const DeviceOps& ops);
  ~CudaDevice() override;

  const cuda::DeviceProperties& properties() const;
  absl::StatusOr<CudaMemory> memory() const;

  std::unique_ptr<Stream> MakeStream() override;
  std::string name() const override { return "cuda"; }
  DType activations() const override { return activations_; }
  int num_threads() const override { return 1; }
  WeightLayout weight_layout() const override { return WeightLayout::kRows; }
  int64_t page_granule_bytes() const override { return 16; }
  int64_t cta_shared_bytes() const override {
    return properties().shared_bytes;
  }
  // Any memory of the host, which EndWrite copies and frees.
  absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                   size_t bytes) override;
  absl::Status EndWrite(DevicePtr<void> memory, void* host,
                        size_t bytes) override;

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

// The GPU by CUDA's own runtime, with all kernels of this build (in
// kernels_cuda, which only a build with nvcc has).
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    const CudaDeviceOptions& options);

}  // namespace kvasir::kernels
