// Workspace: a bump allocator for the scratch memory that ops and the executor
// use on the device. In counting mode, the same calling code computes how much
// memory it needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

// The caller owns the memory. In counting mode there is no memory: Take returns
// null, and ops return OK without looking at their data pointers or enqueueing
// anything. At the end, peak_bytes() is the memory that a real run needs:
//
//   Workspace counter = Workspace::Counting();
//   KVASIR_RETURN_IF_ERROR(RunLayers(max_batch, stream, counter));
//   KVASIR_ASSIGN_OR_RETURN(memory,
//                           allocator.Allocate(counter.peak_bytes(), ...));
//   Workspace workspace(memory.data(), memory.bytes());
//
// When a Scope is destroyed, it gives back the memory that was taken since it
// was made. This memory may be taken again while earlier ops of the same stream
// still use it, because a stream runs its ops in order.
//
// Threads: one thread at a time.
// Errors: Take returns null, and status() returns the error from then on:
//   RESOURCE_EXHAUSTED if the memory does not suffice, INVALID_ARGUMENT if a
//   count is negative or too large. Check it once after a few Takes.
class Workspace {
 public:
  static constexpr size_t kAlignmentBytes = 64;

  Workspace(DevicePtr<void> memory, size_t bytes);
  static Workspace Counting() { return Workspace(); }

  // Takes memory for `count` uninitialised elements, aligned to 64 bytes.
  template <typename T>
  DevicePtr<T> Take(int64_t count) {
    return DevicePtr<T>(static_cast<T*>(TakeBytes(count, sizeof(T))));
  }

  bool counting() const { return counting_; }
  const absl::Status& status() const { return status_; }
  size_t peak_bytes() const { return peak_bytes_; }

  class Scope {
   public:
    explicit Scope(Workspace* workspace)
        : workspace_(workspace), mark_bytes_(workspace->used_bytes_) {}
    ~Scope() { workspace_->used_bytes_ = mark_bytes_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace* const workspace_;
    const size_t mark_bytes_;
  };

 private:
  Workspace() : counting_(true) {}
  void* TakeBytes(int64_t count, size_t element_bytes);

  std::byte* base_ = nullptr;
  size_t capacity_bytes_ = 0;
  size_t used_bytes_ = 0;
  size_t peak_bytes_ = 0;
  bool counting_ = false;
  absl::Status status_;
};

}  // namespace kvasir::kernels
