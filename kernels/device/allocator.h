// Allocators of device memory. They count the bytes exactly; all memory figures
// that the server reports come from these counters.
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

// The purpose of an allocation. Bytes are counted by purpose. The host pool is
// host memory that the device's ops can access: ordinary memory for a CPU,
// pinned memory for a GPU.
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
  // Touch every page now, so that the system provides the memory at load and
  // not during the first request. Host memory is then also zero.
  bool prefault = false;
};

struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};

// Whether the host pool counts as the device's memory, like everything else, or
// is in host memory with a limit of its own.
enum class HostPool : uint8_t { kOnDevice, kOnHost };

// Allocates memory of one device. Counts the requested bytes, not the bytes
// after rounding up to pages.
//
// Threads: all methods may be called from any thread.
class DeviceAllocator {
 public:
  // limit_bytes limits the sum of all allocations in the device's memory, and
  // host_limit_bytes the host pool if it is in host memory. 0: no limit.
  explicit DeviceAllocator(int64_t limit_bytes,
                           HostPool host_pool = HostPool::kOnDevice,
                           int64_t host_limit_bytes = 0)
      : limit_bytes_(limit_bytes),
        host_pool_(host_pool),
        host_limit_bytes_(host_limit_bytes) {}
  virtual ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // For 0 bytes, returns an empty buffer. Errors: RESOURCE_EXHAUSTED if there
  // is not enough memory; the text has the requested bytes and, if known, what
  // to change. INVALID_ARGUMENT if the alignment is invalid. Other codes mean
  // that the device does not work.
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes, MemoryTag tag,
                                        const AllocationOptions& options = {});

  MemoryUse use(MemoryTag tag) const;
  MemoryUse total_use() const;
  // Bytes that are allocated in the device's memory. A host pool in host memory
  // is not included.
  int64_t device_bytes() const;
  int64_t limit_bytes() const { return limit_bytes_; }
  // Where the host pool is, and its limit if it is in host memory (0: no
  // limit).
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
  // Returns the error text of Allocate for the case that Acquire returned null.
  virtual std::string Refusal(size_t bytes, MemoryTag tag) const;
  // Returns the advice at the end of a RESOURCE_EXHAUSTED error, such as ";
  // lower --flag", or an empty string.
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

// Allocates host memory. Blocks of 1 MiB and more are zero at first; they are
// mapped from the operating system, and returned to it when freed.
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
