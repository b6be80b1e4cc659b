#include "kernels/testing/strict_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"

namespace kvasir::kernels {
namespace {

constexpr size_t kPageBytes = 4096;
// Reserved addresses; allocations follow each other and never come back.
constexpr size_t kReservedBytes = size_t{1} << 36;

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The addresses, what is allocated of them, and whether they may be touched.
class StrictMemory final : public MemoryGuard {
 public:
  StrictMemory()
      : base_(static_cast<char*>(
            ::mmap(nullptr, kReservedBytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    KVASIR_CHECK(base_ != MAP_FAILED);
  }
  ~StrictMemory() override { ::munmap(base_, kReservedBytes); }

  void* Acquire(size_t bytes, size_t alignment) {
    base::MutexLock lock(&mutex_);
    // A page between two allocations belongs to nobody.
    const size_t begin =
        AlignUp(used_ + kPageBytes, std::max(alignment, kPageBytes));
    if (bytes > kReservedBytes - begin - kPageBytes) return nullptr;
    used_ = begin + AlignUp(bytes, kPageBytes);
    live_[base_ + begin] = bytes;
    if (open_ > 0) Protect(PROT_READ | PROT_WRITE);
    return base_ + begin;
  }
  void Release(void* data) {
    base::MutexLock lock(&mutex_);
    const auto found = live_.find(static_cast<const char*>(data));
    KVASIR_CHECK(found != live_.end());
    (void)::madvise(data, AlignUp(found->second, kPageBytes), MADV_DONTNEED);
    live_.erase(found);
  }

  void Check(const char* op, const void* address) const override {
    if (address == nullptr || IsLive(static_cast<const char*>(address))) return;
    std::fprintf(stderr, "%s: %p is no memory of the device\n", op, address);
    std::abort();
  }
  void Open() override {
    base::MutexLock lock(&mutex_);
    if (open_++ == 0) Protect(PROT_READ | PROT_WRITE);
  }
  void Close() override {
    base::MutexLock lock(&mutex_);
    if (--open_ == 0) Protect(PROT_NONE);
  }

 private:
  bool IsLive(const char* address) const {
    base::MutexLock lock(&mutex_);
    auto found = live_.upper_bound(address);
    if (found == live_.begin()) return false;
    --found;
    return address < found->first + found->second;
  }
  void Protect(int protection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (used_ > 0) KVASIR_CHECK(::mprotect(base_, used_, protection) == 0);
  }

  char* const base_;
  mutable base::Mutex mutex_;
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<const char*, size_t> live_ ABSL_GUARDED_BY(mutex_);
};

class StrictAllocator final : public DeviceAllocator {
 public:
  // shared_ptr: device and allocator end one after the other.
  StrictAllocator(std::shared_ptr<StrictMemory> memory, int64_t limit_bytes)
      : DeviceAllocator(limit_bytes), memory_(std::move(memory)) {}

 private:
  void* Acquire(size_t bytes, const AllocationOptions& options) override {
    return memory_->Acquire(bytes, options.alignment_bytes);
  }
  void Release(void* data, size_t) override { memory_->Release(data); }

  const std::shared_ptr<StrictMemory> memory_;
};

class StrictDevice final : public CpuDevice {
 public:
  StrictDevice(base::ThreadPool* pool, CpuBackend backend, int64_t limit_bytes,
               std::shared_ptr<StrictMemory> memory)
      : CpuDevice(pool, backend,
                  std::make_unique<StrictAllocator>(memory, limit_bytes),
                  memory.get()),
        memory_(std::move(memory)) {}

 private:
  const std::shared_ptr<StrictMemory> memory_;
};

}  // namespace

std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend,
                                         int64_t memory_limit_bytes) {
  return std::make_unique<StrictDevice>(pool, backend, memory_limit_bytes,
                                        std::make_shared<StrictMemory>());
}

}  // namespace kvasir::kernels
