// A device: what makes streams and memory, and how data lies there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "kernels/device/allocator.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/memory_guard.h"
#include "kernels/device/stream.h"
#include "kernels/device/weight_layout.h"

namespace kvasir::kernels {

// All of a device's memory now: a GPU's as the driver tells, the host's as the
// cgroup allows and the system tells.
struct DeviceMemory {
  int64_t total_bytes = 0;
  // Neither taken by anybody nor promised to the allocator's buffers.
  int64_t free_bytes = 0;
  // Held by the allocator, as asked for.
  int64_t allocated_bytes = 0;
  // All else: CUDA's context and the kernels' code, what allocations are
  // rounded up by, and other processes.
  int64_t other_bytes = 0;
};

// Owns: the allocator.
// Threads: all methods may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceKind kind() const { return kind_; }
  DeviceAllocator& allocator() const { return *allocator_; }

  // The device outlives its streams.
  virtual std::unique_ptr<Stream> MakeStream() = 0;
  // "cpu", "emulated", "cuda": for logs and metrics.
  virtual std::string name() const = 0;
  // Names its arithmetic, beside the type of activations: devices of one name
  // give the same bits. Part of an id that has room for 32 characters.
  virtual std::string numerics() const { return name(); }
  // Whether a row's bits are its own, whatever is computed beside it.
  virtual bool rows_are_invariant() const { return true; }
  // The type of activations, one for all ops (activations.h).
  virtual DType activations() const = 0;
  // Threads that an op's scratch must serve.
  virtual int num_threads() const = 0;
  virtual WeightLayout weight_layout() const = 0;
  // Bytes of a slot that lie side by side in a tile (TileRegion). 0: all.
  virtual int64_t page_granule_bytes() const = 0;
  // Shared memory that a CTA of a GPU's kernel may have at most. 0: no GPU.
  virtual int64_t cta_shared_bytes() const { return 0; }

  // Of the host, where the device has no memory of its own.
  virtual absl::StatusOr<DeviceMemory> memory() const;
  virtual bool has_own_memory() const { return false; }
  // Of the host, which copies go through; what BeginWrite gave included.
  virtual int64_t staging_bytes() const { return 0; }

  // From here on calls of other libraries by this thread are for this device.
  virtual absl::Status UseOnThisThread() const { return absl::OkStatus(); }

  // Host memory to fill a part of an allocation with, from any thread: until
  // EndWrite what is written there is the device's in the end, and nothing
  // else may touch that part. It starts with any content, so all of it is
  // written. Memory of the host itself is given as it is: no second copy.
  virtual absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                           size_t bytes) = 0;
  virtual absl::Status EndWrite(DevicePtr<void> memory, void* host,
                                size_t bytes) = 0;
  // Whether BeginWrite gives memory beside the device's own.
  virtual bool stages_writes() const { return kind_ != DeviceKind::kCpu; }
  // Gives back what the device keeps for writes, until the next one.
  virtual void FreeWriteBuffers() {}
  // The same of bytes that are there.
  absl::Status Write(DevicePtr<void> memory, const void* host, size_t bytes);

  // What a launch does to its pointers, for those that a table holds.
  virtual void CheckMemory(const char*, DevicePtr<const void>) const {}

 protected:
  Device(DeviceKind kind, std::unique_ptr<DeviceAllocator> allocator)
      : kind_(kind), allocator_(std::move(allocator)) {}

 private:
  const DeviceKind kind_;
  const std::unique_ptr<DeviceAllocator> allocator_;
};

// The host's cores and memory.
class CpuDevice : public Device {
 public:
  // `pool` outlives the device; limit_bytes as CpuAllocator's.
  explicit CpuDevice(base::ThreadPool* pool,
                     CpuBackend backend = CpuBackend::kSimd,
                     int64_t limit_bytes = 0)
      : CpuDevice(pool, backend, std::make_unique<CpuAllocator>(limit_bytes),
                  nullptr) {}

  std::unique_ptr<Stream> MakeStream() override {
    return std::make_unique<CpuStream>(pool_, backend_, guard_);
  }
  std::string name() const override { return "cpu"; }
  DType activations() const override { return DType::kF32; }
  int num_threads() const override { return pool_->num_threads(); }
  WeightLayout weight_layout() const override {
    return WeightLayout::kPanels32;
  }
  int64_t page_granule_bytes() const override { return 0; }
  absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                   size_t bytes) override;
  absl::Status EndWrite(DevicePtr<void> memory, void* host,
                        size_t bytes) override;
  void CheckMemory(const char* op,
                   DevicePtr<const void> pointer) const override;

 protected:
  // `guard` (or null) outlives the device.
  CpuDevice(base::ThreadPool* pool, CpuBackend backend,
            std::unique_ptr<DeviceAllocator> allocator, MemoryGuard* guard)
      : Device(DeviceKind::kCpu, std::move(allocator)),
        pool_(pool),
        backend_(backend),
        guard_(guard) {}

 private:
  base::ThreadPool* const pool_;
  const CpuBackend backend_;
  MemoryGuard* const guard_;
};

}  // namespace kvasir::kernels
