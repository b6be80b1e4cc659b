// Memory for a device of tests or emulation that the host cannot touch: the
// addresses, what is allocated of them, and whether they may be touched.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "kernels/device/memory_guard.h"

namespace kvasir::kernels {

// PROT_NONE but between Open and Close. Allocations follow each other and
// their addresses never come back, so that a freed one is known as such.
//
// Threads: all methods may be called from any thread.
class GuardedMemory final : public MemoryGuard {
 public:
  // What lies between two allocations, while memory is open.
  enum class Gaps {
    kOpen,    // can be touched: Open and Close are one system call each
    kClosed,  // cannot: they are one for each allocation, whose end is the
              // page's (but for what its alignment leaves)
  };
  struct Range {
    const char* begin;
    const char* end;
  };

  // FAILED_PRECONDITION where the system does not give that many addresses
  // (ulimit -v, vm.overcommit_memory=2).
  static absl::Status CheckReservable(size_t bytes);

  // Of addresses that the system gives (CHECK); memory comes as it is touched.
  GuardedMemory(size_t reserved_bytes, Gaps gaps);
  ~GuardedMemory() override;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  // Null where addresses have run out. `alignment` is a power of two.
  void* Acquire(size_t bytes, size_t alignment);
  void Release(void* data);

  void Check(const char* op, const void* address) const override {
    CheckRange(op, address, 1);
  }
  // Ends the process too where the last of `bytes` is not the allocation's.
  void CheckRange(const char* op, const void* address, size_t bytes) const;
  void Open() override;
  void Close() override;

  // What is allocated, ascending.
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
