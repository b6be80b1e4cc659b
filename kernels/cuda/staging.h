// Copies between a stream of a GPU and memory of the host that is not pinned.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"

namespace kvasir::kernels::cuda {

// A ring of pinned blocks. An upload is copied into the next block and goes
// from there when the stream comes by; the block is written again only when
// that is done. So a caller waits for the upload kBlocks before its own, not
// for the last. What is longer than a block goes in pieces.
//
// Owns: the blocks, each as long as its longest copy so far (a power of two,
//   kLeastBlockBytes to kMostBlockBytes), and their events.
// Threads: one at a time, which has named the device (Runtime::Use).
// Errors: RESOURCE_EXHAUSTED where the system has no pinned memory; INTERNAL
//   with CUDA's words.
class Staging {
 public:
  static constexpr size_t kBlocks = 4;
  static constexpr size_t kLeastBlockBytes = size_t{64} << 10;
  static constexpr size_t kMostBlockBytes = size_t{8} << 20;

  // All outlive it. `pinned_bytes` counts what this and others have pinned.
  Staging(Runtime* runtime, StreamHandle stream,
          std::atomic<int64_t>* pinned_bytes)
      : runtime_(runtime), stream_(stream), pinned_bytes_(pinned_bytes) {}
  // The stream has nothing left to do.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Enqueued; `host` is the caller's again when it returns.
  absl::Status Upload(void* device, const void* host, size_t bytes);
  // Returns when the bytes are there.
  absl::Status ReadBack(void* host, const void* device, size_t bytes);

  // Pins now what copies of up to `bytes` take, so that none of them does:
  // pinning waits for the device.
  absl::Status Reserve(size_t bytes);

 private:
  struct Block {
    char* memory = nullptr;
    size_t bytes = 0;
    EventHandle event = nullptr;
    bool in_flight = false;
  };

  // The next block, with room and at rest.
  absl::StatusOr<Block*> Take(size_t bytes);
  absl::Status Grow(Block* block, size_t bytes);
  void Unpin(Block* block);
  // Enqueues a copy that has the block on one side.
  absl::Status Copy(Block* block, void* to, const void* from, size_t bytes);
  absl::Status Wait(Block* block);
  absl::Status Failed(const char* what, Result result);

  Runtime* const runtime_;
  const StreamHandle stream_;
  std::atomic<int64_t>* const pinned_bytes_;
  std::array<Block, kBlocks> blocks_;
  size_t next_ = 0;
};

// INTERNAL, or RESOURCE_EXHAUSTED where memory is what is missing.
absl::Status CudaError(const std::string& what, Runtime& runtime,
                       Result result);

}  // namespace kvasir::kernels::cuda
