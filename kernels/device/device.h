// Device: the CPU or a GPU that runs ops. It makes streams, allocates memory,
// and defines the layout of data.
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

// How the memory of a device is used at present. The driver reports it for a
// GPU, and the cgroup and the system for the host.
struct DeviceMemory {
  int64_t total_bytes = 0;
  // Memory that no process uses and that the device's allocator has not handed
  // out.
  int64_t free_bytes = 0;
  // Memory that was allocated from the device's allocator and not freed.
  int64_t allocated_bytes = 0;
  // Everything else: CUDA's context, the kernels' code, the rounding of
  // allocations, and other processes.
  int64_t other_bytes = 0;
};

// A device on which ops run.
// Owns: the allocator.
// Threads: all methods may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceKind kind() const { return kind_; }
  DeviceAllocator& allocator() const { return *allocator_; }

  // Makes a stream, which the device must outlive.
  virtual std::unique_ptr<Stream> MakeStream() = 0;
  // "cpu", "emulated" or "cuda", for logs and metrics.
  virtual std::string name() const = 0;
  // A short name for the device's arithmetic. It becomes part of a worker's
  // numerics_id, which has at most 32 characters. Devices with the same name
  // and the same type of activations give bit-identical results.
  virtual std::string numerics() const { return name(); }
  // True if the bits of a row's result do not depend on the other rows of
  // the batch.
  virtual bool rows_are_invariant() const { return true; }
  // The type of activations, the same for all ops (activations.h).
  virtual DType activations() const = 0;
  // The number of threads that run an op, each of which needs its own scratch
  // memory.
  virtual int num_threads() const = 0;
  virtual WeightLayout weight_layout() const = 0;
  // How many bytes of a cache slot are contiguous in a tile (TileRegion); 0 if
  // all bytes of a slot are contiguous.
  virtual int64_t page_granule_bytes() const = 0;
  // The most shared memory that a CTA can have, in bytes; 0 if the device is
  // not a GPU.
  virtual int64_t cta_shared_bytes() const { return 0; }

  // The memory of the device, or of the host if the device has none of its own.
  virtual absl::StatusOr<DeviceMemory> memory() const;
  virtual bool has_own_memory() const { return false; }
  // The bytes of host memory that the device holds as buffers for copies to and
  // from the device and for BeginWrite.
  virtual int64_t staging_bytes() const { return 0; }

  // Makes other GPU libraries (such as NCCL) use this device for calls from the
  // current thread.
  virtual absl::Status UseOnThisThread() const { return absl::OkStatus(); }

  // Begins a write to a part of an allocation. Returns host memory to which any
  // thread can write the new content; EndWrite then copies it to the device.
  // Until then, nothing else may access this part. All of the returned memory
  // must be written, because its content is undefined at first. If the device's
  // memory is host memory, its own address is returned and nothing is copied.
  virtual absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                           size_t bytes) = 0;
  virtual absl::Status EndWrite(DevicePtr<void> memory, void* host,
                                size_t bytes) = 0;
  // True if BeginWrite returns a buffer from which EndWrite copies to the
  // device's memory.
  virtual bool stages_writes() const { return kind_ != DeviceKind::kCpu; }
  // Frees the buffers that the device keeps for writes.
  virtual void FreeWriteBuffers() {}
  // Copies bytes from `host` to the device, by BeginWrite and EndWrite.
  absl::Status Write(DevicePtr<void> memory, const void* host, size_t bytes);

  // Checks that a pointer that is stored in a table is in the device's memory,
  // if the device has a MemoryGuard. (A launch checks only the pointers among
  // its parameters.)
  virtual void CheckMemory(const char*, DevicePtr<const void>) const {}

 protected:
  Device(DeviceKind kind, std::unique_ptr<DeviceAllocator> allocator)
      : kind_(kind), allocator_(std::move(allocator)) {}

 private:
  const DeviceKind kind_;
  const std::unique_ptr<DeviceAllocator> allocator_;
};

// The CPU: the host's cores and memory.
class CpuDevice : public Device {
 public:
  // `pool` must outlive the device. limit_bytes limits the allocated memory, as
  // in CpuAllocator.
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
  // `guard` may be null; otherwise it must outlive the device.
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
