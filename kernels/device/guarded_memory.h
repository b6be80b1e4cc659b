// Device memory for tests and emulation. Host code can access it only while an
// op or a copy runs; any other access ends the process.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "kernels/device/memory_guard.h"

namespace kvasir::kernels {

// The memory is inaccessible (PROT_NONE) except between Open and Close. An
// address is never allocated twice, so that uses of freed memory are found.
//
// Threads: all methods may be called from any thread.
class GuardedMemory final : public MemoryGuard {
 public:
  // Whether the gaps between allocations are accessible between Open and Close.
  enum class Gaps {
    // Accessible. Open and Close are one system call each.
    kOpen,
    // Inaccessible. Open and Close are one system call for each allocation.
    // Each allocation ends at the end of a page, except for the padding of its
    // alignment, so accesses after its end are found.
    kClosed,
  };
  struct Range {
    const char* begin;
    const char* end;
  };

  // Returns FAILED_PRECONDITION if the system does not provide that much
  // address space, for example because of ulimit -v or vm.overcommit_memory=2.
  static absl::Status CheckReservable(size_t bytes);

  // Reserves address space; if the system does not provide it, ends the
  // process. The system provides memory for a page when the page is touched.
  GuardedMemory(size_t reserved_bytes, Gaps gaps);
  ~GuardedMemory() override;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  // Allocates memory; returns null if no address space is left. `alignment` is
  // a power of two.
  void* Acquire(size_t bytes, size_t alignment);
  void Release(void* data);

  void Check(const char* op, const void* address) const override {
    CheckRange(op, address, 1);
  }
  // Like Check, but also ends the process if the range exceeds the allocation.
  void CheckRange(const char* op, const void* address, size_t bytes) const;
  void Open() override;
  void Close() override;

  // Returns the live allocations, sorted by address.
  std::vector<Range> Live() const;

 private:
  void Protect(int protection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ProtectOne(const char* data, size_t bytes, int protection);

  const size_t reserved_bytes_;
  const Gaps gaps_;
  char* const base_;
  mutable base::Mutex mutex_;
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<const char*, size_t> live_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::kernels
