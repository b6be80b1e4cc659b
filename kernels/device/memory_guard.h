// What a strict device does around each look at its memory.
#pragma once

namespace kvasir::kernels {

// Device memory is there for an op, an upload or a read-back alone, and what
// they are given is looked at first. Tests have one; else there is none, and a
// launch costs a look at a null pointer more.
//
// Threads: all methods may be called from any thread.
class MemoryGuard {
 public:
  virtual ~MemoryGuard() = default;
  // Ends the process when `address` is in no live allocation of the device.
  // Null is nowhere.
  virtual void Check(const char* op, const void* address) const = 0;
  // Each Open is followed by one Close; memory is there between the first and
  // the last.
  virtual void Open() = 0;
  virtual void Close() = 0;
};

// Open while it lives. `guard` may be null.
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
