// Staging copies between a GPU's memory and host memory that is not pinned.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"

namespace kvasir::kernels::cuda {

// A ring of kBlocks pinned blocks for the copies of one stream. An upload first
// copies the bytes to the next block. Then the stream copies them from the
// block to the device. A block is reused only after this second copy, so an
// upload may have to wait for the upload that used the same block before.
// Copies that are longer than a block are cut into pieces.
//
// Owns: the blocks and their events. A block is as long as the longest
// copy through it so far, rounded up to a power of two from
// kLeastBlockBytes to kMostBlockBytes.
class Staging {
 public:
  static constexpr size_t kBlocks = 4;
  static constexpr size_t kLeastBlockBytes = size_t{64} << 10;
  static constexpr size_t kMostBlockBytes = size_t{8} << 20;

  // `runtime`, `stream` and `pinned_bytes` must outlive this object.
  // `pinned_bytes` is a counter of pinned memory, which several objects share.
  Staging(Runtime* runtime, StreamHandle stream,
          std::atomic<int64_t>* pinned_bytes)
      : runtime_(runtime), stream_(stream), pinned_bytes_(pinned_bytes) {}
  // The stream must be idle.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Enqueues a copy to the device. The caller may reuse `host` after the call.
  absl::Status Upload(void* device, const void* host, size_t bytes);
  // Copies from the device. Returns when the bytes are in `host`.
  absl::Status ReadBack(void* host, const void* device, size_t bytes);

  // Pins the memory that copies of up to `bytes` need, so that no later copy
  // has to pin memory, which would wait for the device.
  absl::Status Reserve(size_t bytes);

 private:
  struct Block {
    char* memory = nullptr;
    size_t bytes = 0;
    EventHandle event = nullptr;
    bool in_flight = false;
  };

  // Waits until the next block of the ring is not in use, enlarges it to at
  // least this size, and returns it.
  absl::StatusOr<Block*> Take(size_t bytes);
  absl::Status Grow(Block* block, size_t bytes);
  void Unpin(Block* block);
  // Enqueues a copy between the block and device memory.
  absl::Status Copy(Block* block, void* to, const void* from, size_t bytes);
  absl::Status Wait(Block* block);
  absl::Status Failed(const char* what, Result result);

  Runtime* const runtime_;
  const StreamHandle stream_;
  std::atomic<int64_t>* const pinned_bytes_;
  std::array<Block, kBlocks> blocks_;
  size_t next_ = 0;
};

// Makes an error from a CUDA result: RESOURCE_EXHAUSTED if memory ran out,
// otherwise INTERNAL.
absl::Status CudaError(const std::string& what, Runtime& runtime,
                       Result result);

}  // namespace kvasir::kernels::cuda
