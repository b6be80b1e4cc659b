#include "kernels/cuda/staging.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::kernels::cuda {

absl::Status CudaError(const std::string& what, Runtime& runtime,
                       Result result) {
  const std::string text = absl::StrCat(what, ": ", runtime.Describe(result));
  return result == Result::kOutOfMemory ? absl::ResourceExhaustedError(text)
                                        : absl::InternalError(text);
}

Staging::~Staging() {
  for (Block& block : blocks_) {
    if (block.event != nullptr) runtime_->DestroyEvent(block.event);
    Unpin(&block);
  }
}

void Staging::Unpin(Block* block) {
  if (block->memory == nullptr) return;
  runtime_->FreeHost(block->memory);
  *pinned_bytes_ -= static_cast<int64_t>(block->bytes);
  block->memory = nullptr;
  block->bytes = 0;
}

absl::Status Staging::Failed(const char* what, Result result) {
  return CudaError(what, *runtime_, result);
}

absl::Status Staging::Wait(Block* block) {
  block->in_flight = false;
  const Result result = runtime_->WaitForEvent(block->event);
  return result == Result::kOk ? absl::OkStatus()
                               : Failed("copy through pinned memory", result);
}

absl::StatusOr<Staging::Block*> Staging::Take(size_t bytes) {
  Block* const block = &blocks_[next_];
  next_ = (next_ + 1) % kBlocks;
  if (block->in_flight) KVASIR_RETURN_IF_ERROR(Wait(block));
  if (block->event == nullptr) {
    const Result result = runtime_->MakeEvent(&block->event);
    if (result != Result::kOk) return Failed("event", result);
  }
  KVASIR_RETURN_IF_ERROR(Grow(block, bytes));
  return block;
}

absl::Status Staging::Grow(Block* block, size_t bytes) {
  if (block->bytes >= bytes) return absl::OkStatus();
  Unpin(block);
  const size_t wanted = std::max(std::bit_ceil(bytes), kLeastBlockBytes);
  void* memory = nullptr;
  const Result result = runtime_->AllocateHost(&memory, wanted);
  if (result != Result::kOk) {
    return CudaError(absl::StrCat("allocating ", wanted,
                                  " bytes of pinned host memory for copies"),
                     *runtime_, result);
  }
  block->memory = static_cast<char*>(memory);
  block->bytes = wanted;
  *pinned_bytes_ += static_cast<int64_t>(wanted);
  return absl::OkStatus();
}

absl::Status Staging::Reserve(size_t bytes) {
  for (Block& block : blocks_) {
    if (block.in_flight) KVASIR_RETURN_IF_ERROR(Wait(&block));
    KVASIR_RETURN_IF_ERROR(Grow(&block, std::min(bytes, kMostBlockBytes)));
  }
  return absl::OkStatus();
}

absl::Status Staging::Copy(Block* block, void* to, const void* from,
                           size_t bytes) {
  Result result = runtime_->CopyAsync(to, from, bytes, stream_);
  if (result != Result::kOk) return Failed("copy", result);
  result = runtime_->RecordEvent(block->event, stream_);
  if (result != Result::kOk) {
    // Without the event, nothing reports when the block may be reused, so this
    // call waits for the stream.
    runtime_->SynchronizeStream(stream_);
    return Failed("recording the event of a copy", result);
  }
  block->in_flight = true;
  return absl::OkStatus();
}

absl::Status Staging::Upload(void* device, const void* host, size_t bytes) {
  auto* to = static_cast<char*>(device);
  const auto* from = static_cast<const char*>(host);
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kMostBlockBytes);
    KVASIR_ASSIGN_OR_RETURN(Block* const block, Take(piece));
    std::memcpy(block->memory, from, piece);
    KVASIR_RETURN_IF_ERROR(Copy(block, to, block->memory, piece));
    to += piece;
    from += piece;
    bytes -= piece;
  }
  return absl::OkStatus();
}

absl::Status Staging::ReadBack(void* host, const void* device, size_t bytes) {
  // The bytes are read in pieces of at most one block. While the host copies
  // one piece out of its block, the GPU copies the next piece to another block.
  struct Piece {
    Block* block = nullptr;
    char* to = nullptr;
    size_t bytes = 0;
  };
  const auto take_out = [this](const Piece& piece) -> absl::Status {
    KVASIR_RETURN_IF_ERROR(Wait(piece.block));
    std::memcpy(piece.to, piece.block->memory, piece.bytes);
    return absl::OkStatus();
  };
  Piece last;
  auto* to = static_cast<char*>(host);
  const auto* from = static_cast<const char*>(device);
  while (bytes > 0) {
    const size_t bytes_now = std::min(bytes, kMostBlockBytes);
    KVASIR_ASSIGN_OR_RETURN(Block* const block, Take(bytes_now));
    KVASIR_RETURN_IF_ERROR(Copy(block, block->memory, from, bytes_now));
    if (last.block != nullptr) KVASIR_RETURN_IF_ERROR(take_out(last));
    last = {block, to, bytes_now};
    to += bytes_now;
    from += bytes_now;
    bytes -= bytes_now;
  }
  return last.block == nullptr ? absl::OkStatus() : take_out(last);
}

}  // namespace kvasir::kernels::cuda
