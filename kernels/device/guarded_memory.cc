#include "kernels/device/guarded_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace kvasir::kernels {
namespace {

constexpr size_t kPageBytes = 4096;

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

void* TryToReserve(size_t bytes) {
  return ::mmap(nullptr, bytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

char* Reserve(size_t bytes) {
  void* const base = TryToReserve(bytes);
  KVASIR_CHECK(base != MAP_FAILED);
  return static_cast<char*>(base);
}

// Returns the pages that contain a range.
std::pair<char*, size_t> PagesOf(const char* data, size_t bytes) {
  const size_t before = reinterpret_cast<uintptr_t>(data) % kPageBytes;
  return {const_cast<char*>(data) - before,
          AlignUp(before + bytes, kPageBytes)};
}

}  // namespace

absl::Status GuardedMemory::CheckReservable(size_t bytes) {
  void* const base = TryToReserve(bytes);
  if (base == MAP_FAILED) {
    return absl::FailedPreconditionError(
        absl::StrCat("the system does not provide ", bytes,
                     " bytes of address space: raise ulimit -v, or set "
                     "vm.overcommit_memory to "
                     "a value other than 2"));
  }
  ::munmap(base, bytes);
  return absl::OkStatus();
}

GuardedMemory::GuardedMemory(size_t reserved_bytes, Gaps gaps)
    : reserved_bytes_(reserved_bytes),
      gaps_(gaps),
      base_(Reserve(reserved_bytes)) {}

GuardedMemory::~GuardedMemory() { ::munmap(base_, reserved_bytes_); }

void* GuardedMemory::Acquire(size_t bytes, size_t alignment) {
  base::MutexLock lock(&mutex_);
  // At least one free page lies between two allocations.
  const size_t begin =
      AlignUp(used_ + kPageBytes, std::max(alignment, kPageBytes));
  if (begin > reserved_bytes_ - kPageBytes ||
      bytes > reserved_bytes_ - begin - kPageBytes) {
    return nullptr;
  }
  used_ = begin + AlignUp(bytes, kPageBytes);
  const size_t at = gaps_ == Gaps::kClosed && alignment < kPageBytes
                        ? used_ - AlignUp(bytes, alignment)
                        : begin;
  char* const data = base_ + at;
  live_[data] = bytes;
  if (open_ > 0) ProtectOne(data, bytes, PROT_READ | PROT_WRITE);
  return data;
}

void GuardedMemory::Release(void* data) {
  base::MutexLock lock(&mutex_);
  const auto found = live_.find(static_cast<const char*>(data));
  KVASIR_CHECK(found != live_.end());
  const auto [pages, bytes] = PagesOf(found->first, found->second);
  (void)::madvise(pages, bytes, MADV_DONTNEED);
  if (gaps_ == Gaps::kClosed)
    ProtectOne(found->first, found->second, PROT_NONE);
  live_.erase(found);
}

void GuardedMemory::CheckRange(const char* op, const void* address,
                               size_t bytes) const {
  if (address == nullptr) return;
  {
    const auto* const at = static_cast<const char*>(address);
    base::MutexLock lock(&mutex_);
    auto found = live_.upper_bound(at);
    if (found != live_.begin()) {
      --found;
      const char* const end = found->first + found->second;
      if (at < end && bytes <= static_cast<size_t>(end - at)) return;
      if (at < end) {
        std::fprintf(stderr,
                     "%s: an access to %zu bytes from byte %td on exceeds its "
                     "allocation of %zu bytes\n",
                     op, bytes, at - found->first, found->second);
        std::abort();
      }
    }
  }
  std::fprintf(stderr, "%s: %p is not in the device's memory\n", op, address);
  std::abort();
}

void GuardedMemory::Open() {
  base::MutexLock lock(&mutex_);
  if (open_++ == 0) Protect(PROT_READ | PROT_WRITE);
}

void GuardedMemory::Close() {
  base::MutexLock lock(&mutex_);
  if (--open_ == 0) Protect(PROT_NONE);
}

std::vector<GuardedMemory::Range> GuardedMemory::Live() const {
  base::MutexLock lock(&mutex_);
  std::vector<Range> ranges;
  for (const auto& [data, bytes] : live_)
    ranges.push_back({data, data + bytes});
  return ranges;
}

void GuardedMemory::Protect(int protection) {
  if (gaps_ == Gaps::kClosed) {
    for (const auto& [data, bytes] : live_) ProtectOne(data, bytes, protection);
  } else if (used_ > 0) {
    KVASIR_CHECK(::mprotect(base_, used_, protection) == 0);
  }
}

void GuardedMemory::ProtectOne(const char* data, size_t bytes, int protection) {
  const auto [pages, length] = PagesOf(data, bytes);
  KVASIR_CHECK(::mprotect(pages, length, protection) == 0);
}

}  // namespace kvasir::kernels
