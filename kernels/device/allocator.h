// Device memory with exact counters, from which all reported byte figures come.
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

// The purpose of memory. The host pool is host memory that the device's ops can
// access: ordinary memory for a CPU, pinned memory for a GPU.
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

// Owns one allocation and frees it. Must not outlive its allocator.
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
  // Touch every page now, so that the memory exists (host memory is also zero)
  // and the first request does not pay for it.
  bool prefault = false;
};

struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};

// The place of the host pool: in the device's memory like everything else, or
// in host memory with its own limit.
enum class HostPool : uint8_t { kOnDevice, kOnHost };

// Counts the requested bytes, without the rounding to pages.
//
// Threads: all methods may be called from any thread.
class DeviceAllocator {
 public:
  // limit_bytes limits the sum of all allocations in the device's memory; 0: no
  // limit.
  explicit DeviceAllocator(int64_t limit_bytes,
                           HostPool host_pool = HostPool::kOnDevice,
                           int64_t host_limit_bytes = 0)
      : limit_bytes_(limit_bytes),
        host_pool_(host_pool),
        host_limit_bytes_(host_limit_bytes) {}
  virtual ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // Errors: RESOURCE_EXHAUSTED if there is not enough memory, with the bytes
  // requested, held and allowed, and what to change; other codes if the device
  // does not work. 0 bytes give an empty buffer.
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes, MemoryTag tag,
                                        const AllocationOptions& options = {});

  MemoryUse use(MemoryTag tag) const;
  MemoryUse total_use() const;
  // Bytes held in the device's memory, without a host pool in host memory.
  int64_t device_bytes() const;
  int64_t limit_bytes() const { return limit_bytes_; }
  // Where the host pool is, and its limit if that is host memory (0: no limit).
  HostPool host_pool() const { return host_pool_; }
  int64_t host_limit_bytes() const { return host_limit_bytes_; }

 protected:
  // Allocates `bytes`, which is above 0; returns null if there is too little
  // memory. alignment_bytes is at least 64. Errors mean that the device does
  // not work.
  virtual absl::StatusOr<void*> Acquire(size_t bytes,
                                        const AllocationOptions& options) = 0;
  virtual void Release(void* data, size_t bytes) = 0;
  // Allocates from a host pool in host memory, with the contract of Acquire.
  virtual absl::StatusOr<void*> AcquireOnHost(
      size_t bytes, const AllocationOptions& options) {
    return Acquire(bytes, options);
  }
  virtual void ReleaseOnHost(void* data, size_t bytes) { Release(data, bytes); }
  // The error text for the case that Acquire returned null.
  virtual std::string Refusal(size_t bytes, MemoryTag tag) const;
  // The end of that text, such as "; lower --flag", or nothing.
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

// Host memory. Blocks of 1 MiB and more come from the operating system and
// return to it when freed; they are zero at first.
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
