#include "kernels/device/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "kernels/device/device_observer.h"

namespace kvasir::kernels {
namespace {

// Blocks of at least this size are mapped directly from the system: freeing
// returns them to the system, and transparent huge pages reduce TLB misses when
// weights are streamed.
constexpr size_t kMapFromBytes = size_t{1} << 20;
constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kSmallPageBytes = 4096;
// Each thread that touches pages gets at least this many bytes. With fewer
// bytes, starting the thread would take longer than touching them.
constexpr size_t kTouchPerThread = size_t{1} << 20;

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

void* Map(size_t bytes) {
  // Maps one huge page more than requested, so that the block can start on a
  // huge page. The unused ends are unmapped again.
  if (bytes > std::numeric_limits<size_t>::max() - 2 * kHugePageBytes) {
    return nullptr;
  }
  const size_t wanted = AlignUp(bytes, kSmallPageBytes);
  const size_t mapped = wanted + kHugePageBytes;
  // MAP_NORESERVE is not set, so a system that does not overcommit memory
  // refuses this mapping if it has too little memory.
  void* raw = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const size_t begin = reinterpret_cast<size_t>(raw);
  const size_t start = AlignUp(begin, kHugePageBytes);
  if (start > begin) ::munmap(raw, start - begin);
  const size_t tail = begin + mapped - (start + wanted);
  if (tail > 0) ::munmap(reinterpret_cast<void*>(start + wanted), tail);
  void* data = reinterpret_cast<void*>(start);
  if (wanted >= kHugePageBytes) {
    (void)::madvise(data, wanted, MADV_HUGEPAGE);  // advice only
  }
  return data;
}

// Touches every page of newly mapped memory, so that the system provides
// it. The system also clears each page, which takes long, so all cores
// share the work.
void Touch(char* data, size_t bytes) {
  const auto cores = static_cast<size_t>(base::ReadMachineLimits().cpus);
  const size_t threads = std::clamp(bytes / kTouchPerThread, size_t{1}, cores);
  const auto touch = [&](size_t thread) {
    const size_t pages = (bytes + kSmallPageBytes - 1) / kSmallPageBytes;
    const size_t end = pages * (thread + 1) / threads;
    for (size_t page = pages * thread / threads; page < end; ++page) {
      *static_cast<volatile char*>(data + page * kSmallPageBytes) = 0;
    }
  };
  std::vector<std::thread> others;
  for (size_t thread = 1; thread < threads; ++thread) {
    others.emplace_back(touch, thread);
  }
  touch(0);
  for (std::thread& other : others) other.join();
}

}  // namespace

const char* MemoryTagName(MemoryTag tag) {
  switch (tag) {
    case MemoryTag::kWeights:
      return "weights";
    case MemoryTag::kKvCache:
      return "kv_cache";
    case MemoryTag::kWorkspace:
      return "workspace";
    case MemoryTag::kHostPool:
      return "host_pool";
    case MemoryTag::kOther:
      break;
  }
  return "other";
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) allocator_->Free(data_, bytes_, tag_);
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) allocator_->Free(data_, bytes_, tag_);
    allocator_ = std::exchange(other.allocator_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    tag_ = other.tag_;
  }
  return *this;
}

DeviceAllocator::~DeviceAllocator() {
  base::MutexLock lock(&mutex_);
  // This check fails if a buffer outlives its allocator.
  KVASIR_CHECK(total_.bytes == 0);
}

absl::StatusOr<DeviceBuffer> DeviceAllocator::Allocate(
    size_t bytes, MemoryTag tag, const AllocationOptions& options) {
  const size_t alignment = options.alignment_bytes;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 ||
      alignment > kHugePageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the alignment must be a power of two up to ",
                     kHugePageBytes, " bytes, not ", alignment));
  }
  if (bytes == 0) return DeviceBuffer();
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnAllocate(bytes);
  }
  KVASIR_RETURN_IF_ERROR(Count(bytes, tag));
  AllocationOptions fixed = options;
  fixed.alignment_bytes = std::max<size_t>(alignment, 64);
  const absl::StatusOr<void*> data =
      OnHost(tag) ? AcquireOnHost(bytes, fixed) : Acquire(bytes, fixed);
  if (!data.ok() || *data == nullptr) Uncount(bytes, tag);
  if (!data.ok()) {
    return absl::Status(
        data.status().code(),
        absl::StrCat("cannot allocate ", bytes, " bytes for ",
                     MemoryTagName(tag), ": ", data.status().message()));
  }
  if (*data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Refusal(bytes, tag), Advice(tag)));
  }
  return DeviceBuffer(this, *data, bytes, tag);
}

std::string DeviceAllocator::Refusal(size_t bytes, MemoryTag tag) const {
  return absl::StrCat("the system refused ", bytes, " bytes for ",
                      MemoryTagName(tag));
}

void DeviceAllocator::Free(void* data, size_t bytes, MemoryTag tag) {
  if (OnHost(tag)) {
    ReleaseOnHost(data, bytes);
  } else {
    Release(data, bytes);
  }
  Uncount(bytes, tag);
}

absl::Status DeviceAllocator::Count(size_t bytes, MemoryTag tag) {
  base::MutexLock lock(&mutex_);
  const bool on_host = OnHost(tag);
  const int64_t own = on_host ? host_limit_bytes_ : limit_bytes_;
  const int64_t limit = own > 0 ? own : std::numeric_limits<int64_t>::max();
  const int64_t held = on_host ? total_.bytes - device_bytes_ : device_bytes_;
  if (bytes > static_cast<size_t>(limit - held)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "not enough ", on_host ? "host memory" : "memory", " for ",
        MemoryTagName(tag), ": ", bytes, " bytes are needed, but ", held,
        " of the limit of ", limit, " bytes are in use", Advice(tag)));
  }
  const auto add = [bytes](MemoryUse& use) {
    use.bytes += static_cast<int64_t>(bytes);
    use.peak_bytes = std::max(use.peak_bytes, use.bytes);
  };
  add(use_[static_cast<size_t>(tag)]);
  add(total_);
  if (!OnHost(tag)) device_bytes_ += static_cast<int64_t>(bytes);
  return absl::OkStatus();
}

void DeviceAllocator::Uncount(size_t bytes, MemoryTag tag) {
  base::MutexLock lock(&mutex_);
  use_[static_cast<size_t>(tag)].bytes -= static_cast<int64_t>(bytes);
  total_.bytes -= static_cast<int64_t>(bytes);
  if (!OnHost(tag)) device_bytes_ -= static_cast<int64_t>(bytes);
}

MemoryUse DeviceAllocator::use(MemoryTag tag) const {
  base::MutexLock lock(&mutex_);
  return use_[static_cast<size_t>(tag)];
}

MemoryUse DeviceAllocator::total_use() const {
  base::MutexLock lock(&mutex_);
  return total_;
}

int64_t DeviceAllocator::device_bytes() const {
  base::MutexLock lock(&mutex_);
  return device_bytes_;
}

absl::StatusOr<void*> CpuAllocator::Acquire(size_t bytes,
                                            const AllocationOptions& options) {
  if (bytes >= kMapFromBytes) {
    void* data = Map(bytes);
    if (data != nullptr && options.prefault) {
      Touch(static_cast<char*>(data), bytes);
    }
    return data;
  }
  void* data = std::aligned_alloc(options.alignment_bytes,
                                  AlignUp(bytes, options.alignment_bytes));
  if (data != nullptr && options.prefault) std::memset(data, 0, bytes);
  return data;
}

void CpuAllocator::Release(void* data, size_t bytes) {
  if (bytes >= kMapFromBytes) {
    ::munmap(data, AlignUp(bytes, kSmallPageBytes));
  } else {
    std::free(data);
  }
}

}  // namespace kvasir::kernels
