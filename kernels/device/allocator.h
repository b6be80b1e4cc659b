// Device memory with exact counters: the source of every byte figure that the
// process reports.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

// What memory is for. The host pool is the host's memory, where the device's
// ops reach it (the CPU's is no other; a GPU's is pinned).
enum class MemoryTag : uint8_t {
  kWeights,
  kKvCache,
  kWorkspace,
  kHostPool,
  kOther
};
inline constexpr int kNumMemoryTags = 5;
const char* MemoryTagName(MemoryTag tag);

class DeviceAllocator;

// Owns one allocation and gives it back. Must not outlive its allocator.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  // Null for an empty buffer.
  DevicePtr<void> data() const { return DevicePtr<void>(data_); }
  template <typename T>
  DevicePtr<T> as() const {
    return DevicePtr<T>(static_cast<T*>(data_));
  }
  size_t bytes() const { return bytes_; }
  MemoryTag tag() const { return tag_; }

 private:
  friend class DeviceAllocator;
  DeviceBuffer(DeviceAllocator* allocator, void* data, size_t bytes,
               MemoryTag tag)
      : allocator_(allocator), data_(data), bytes_(bytes), tag_(tag) {}

  DeviceAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  MemoryTag tag_ = MemoryTag::kOther;
};

struct AllocationOptions {
  size_t alignment_bytes = 64;  // a power of two
  // Touch every page now, so that the memory is really there (the host's: and
  // zero) and the first request does not pay for it.
  bool prefault = false;
};

struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};

// Where the host pool lies: in the device's memory like all else, or in the
// host's, which has a limit of its own.
enum class HostPool : uint8_t { kOnDevice, kOnHost };

// Counts the bytes asked for (rounding to pages is not in the figures).
//
// Threads: all methods may be called from any thread.
class DeviceAllocator {
 public:
  // limit_bytes: what all allocations in the device's memory may hold together;
  // 0: no limit.
  explicit DeviceAllocator(int64_t limit_bytes,
                           HostPool host_pool = HostPool::kOnDevice,
                           int64_t host_limit_bytes = 0)
      : limit_bytes_(limit_bytes),
        host_pool_(host_pool),
        host_limit_bytes_(host_limit_bytes) {}
  virtual ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // RESOURCE_EXHAUSTED (want, held, limit, and what to change) when there is
  // not enough; other codes where the device does not work. 0 bytes is an empty
  // buffer.
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes, MemoryTag tag,
                                        const AllocationOptions& options = {});

  MemoryUse use(MemoryTag tag) const;
  MemoryUse total_use() const;
  // Held of the device's memory: without a host pool that lies on the host.
  int64_t device_bytes() const;
  int64_t limit_bytes() const { return limit_bytes_; }
  // Where the host pool lies on the host: its limit. 0: none.
  HostPool host_pool() const { return host_pool_; }
  int64_t host_limit_bytes() const { return host_limit_bytes_; }

 protected:
  // Memory for `bytes` > 0, null where there is too little; alignment_bytes is
  // at least 64. Errors are of a device that does not work.
  virtual absl::StatusOr<void*> Acquire(size_t bytes,
                                        const AllocationOptions& options) = 0;
  virtual void Release(void* data, size_t bytes) = 0;
  // The same of a host pool that lies on the host.
  virtual absl::StatusOr<void*> AcquireOnHost(
      size_t bytes, const AllocationOptions& options) {
    return Acquire(bytes, options);
  }
  virtual void ReleaseOnHost(void* data, size_t bytes) { Release(data, bytes); }
  // What a caller reads of an Acquire that gave null.
  virtual std::string Refusal(size_t bytes, MemoryTag tag) const;
  // "; lower --flag", or nothing: how an answer for want of memory ends.
  virtual std::string Advice(MemoryTag) const { return ""; }

 private:
  friend class DeviceBuffer;
  bool OnHost(MemoryTag tag) const {
    return tag == MemoryTag::kHostPool && host_pool_ == HostPool::kOnHost;
  }
  void Free(void* data, size_t bytes, MemoryTag tag);
  absl::Status Count(size_t bytes, MemoryTag tag);
  void Uncount(size_t bytes, MemoryTag tag);

  const int64_t limit_bytes_;
  const HostPool host_pool_;
  const int64_t host_limit_bytes_;
  mutable base::Mutex mutex_;
  std::array<MemoryUse, kNumMemoryTags> use_ ABSL_GUARDED_BY(mutex_);
  MemoryUse total_ ABSL_GUARDED_BY(mutex_);
  int64_t device_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The host's memory. Blocks of 1 MiB and more come from the operating system
// and go back to it when freed; their content starts as zero.
class CpuAllocator final : public DeviceAllocator {
 public:
  explicit CpuAllocator(int64_t limit_bytes = 0)
      : DeviceAllocator(limit_bytes) {}

 private:
  absl::StatusOr<void*> Acquire(size_t bytes,
                                const AllocationOptions& options) override;
  void Release(void* data, size_t bytes) override;
};

}  // namespace kvasir::kernels
