#include "kernels/testing/strict_device.h"

#include <utility>

#include "kernels/device/guarded_memory.h"

namespace kvasir::kernels {
namespace {

constexpr size_t kReservedBytes = size_t{1} << 36;

class StrictAllocator final : public DeviceAllocator {
 public:
  // `memory` is shared, because the device and the allocator are destroyed at
  // different times.
  StrictAllocator(std::shared_ptr<GuardedMemory> memory, int64_t limit_bytes)
      : DeviceAllocator(limit_bytes), memory_(std::move(memory)) {}

 private:
  absl::StatusOr<void*> Acquire(size_t bytes,
                                const AllocationOptions& options) override {
    return memory_->Acquire(bytes, options.alignment_bytes);
  }
  void Release(void* data, size_t) override { memory_->Release(data); }

  const std::shared_ptr<GuardedMemory> memory_;
};

class StrictDevice final : public CpuDevice {
 public:
  StrictDevice(base::ThreadPool* pool, CpuBackend backend, int64_t limit_bytes,
               std::shared_ptr<GuardedMemory> memory)
      : CpuDevice(pool, backend,
                  std::make_unique<StrictAllocator>(memory, limit_bytes),
                  memory.get()),
        memory_(std::move(memory)) {}

 private:
  const std::shared_ptr<GuardedMemory> memory_;
};

}  // namespace

std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend,
                                         int64_t memory_limit_bytes) {
  return std::make_unique<StrictDevice>(
      pool, backend, memory_limit_bytes,
      std::make_shared<GuardedMemory>(kReservedBytes,
                                      GuardedMemory::Gaps::kOpen));
}

}  // namespace kvasir::kernels
