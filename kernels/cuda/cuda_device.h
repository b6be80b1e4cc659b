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
  int ordinal = 0;  // as CUDA counts those that CUDA_VISIBLE_DEVICES leaves
  int64_t memory_limit_bytes = 0;  // of the GPU's memory; 0: no limit
  // Of the host's, where the host pool lies; 0: no limit.
  int64_t host_limit_bytes = 0;
  DType activations = DType::kBf16;
  // Products by our own kernels, whose rows have the same bits in any number,
  // in place of cuBLASLt.
  bool deterministic = false;
};

// Kernels run on streams of their own, in order, while the host goes on. The
// host pool is pinned memory of the host, which kernels reach; it has a limit
// of its own. What is uploaded, read back or written by
// BeginWrite goes through pinned blocks (Staging), so a caller's memory is its
// own again at once. Before memory is freed the device is waited for.
//
// Owns: the allocator, and a stream for writes.
// Threads: as Device. Writes go one at a time.
// Errors: RESOURCE_EXHAUSTED with the GPU's numbers and the flag to change;
//   INTERNAL with CUDA's words for all else. A kernel that fails while it runs
//   is found by whoever waits next, and every call from then on fails: CUDA has
//   no way back but another process. So it is after a failure that nobody could
//   be told of (memory that could not be given back).
class CudaDevice final : public Device {
 public:
  // `runtime` outlives the device; `ops` are for the whole process.
  // FAILED_PRECONDITION without a driver, with one that is too old, without a
  // GPU or with one that this build has no code for; INVALID_ARGUMENT for an
  // ordinal that is not there.
  // `open_cublas` finds cuBLASLt, which outlives the device, where products are
  // not to be deterministic; without it our own kernels multiply all the same.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Make(
      const CudaDeviceOptions& options, cuda::Runtime* runtime,
      const DeviceOps& ops,
      const std::function<absl::StatusOr<cuda::CublasLt*>()>& open_cublas =
          nullptr);
  ~CudaDevice() override;

  const cuda::DeviceProperties& properties() const;
  // Of a stream of such a device: for measurements by CUDA's own events.
  static cuda::StreamHandle HandleOf(const Stream& stream);

  std::unique_ptr<Stream> MakeStream() override;
  std::string name() const override { return "cuda"; }
  // "cuda-sm90": tensor cores of other architectures sum in other orders; with
  // cuBLASLt "cuda-sm90-lt130101", by its version.
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
  // Any memory of the host, which EndWrite copies and frees.
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

// The GPU by CUDA's own runtime, with all kernels of this build: in
// kernels_cuda, which only a build with nvcc has. kernels_no_cuda is in its
// place elsewhere: UNIMPLEMENTED, and what a build with it would need.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    const CudaDeviceOptions& options);

}  // namespace kvasir::kernels
