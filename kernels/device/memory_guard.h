// Interface for checks of each access to a device's memory. Tests use it to
// find wrong accesses.
#pragma once

namespace kvasir::kernels {

// If a device has a guard, only ops, uploads and read-backs can access its
// memory, and the addresses that they use are checked first. Only devices of
// tests have a guard.
//
// Threads: all methods may be called from any thread.
class MemoryGuard {
 public:
  virtual ~MemoryGuard() = default;
  // Ends the process if `address` is in no live allocation of the device. Null
  // is allowed.
  virtual void Check(const char* op, const void* address) const = 0;
  // The caller must call Close once for each Open. Calls from several threads
  // may overlap: memory is accessible until every Open has been closed.
  virtual void Open() = 0;
  virtual void Close() = 0;
};

// Keeps a guard's memory accessible while this object lives. `guard` may be
// null.
class OpenMemory {
 public:
  explicit OpenMemory(MemoryGuard* guard) : guard_(guard) {
    if (guard_ != nullptr) guard_->Open();
  }
  ~OpenMemory() {
    if (guard_ != nullptr) guard_->Close();
  }
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;

 private:
  MemoryGuard* const guard_;
};

}  // namespace kvasir::kernels
