#include "worker/executor/step/step_layout.h"

#include <bit>
#include <utility>

#include "base/status_macros.h"
#include "kernels/device/read_back.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kAlignmentBytes = 64;

int64_t AlignUp(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

int64_t Pad(int64_t count, int64_t limit) {
  return std::min(
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))), limit);
}

}  // namespace

StepSizes LargestStep(const StepLimits& limits) {
  StepSizes sizes;
  sizes.tokens = limits.max_batched_tokens;
  sizes.sequences = limits.max_sequences;
  sizes.samples = limits.max_sequences;
  sizes.targets = limits.max_batched_tokens;
  sizes.top = limits.max_logprobs;
  sizes.histories = 2 * limits.max_sequences;
  return sizes;
}

StepSizes PadSizes(const StepSizes& sizes, const StepLimits& limits,
                   int64_t logits_rows) {
  const StepSizes largest = LargestStep(limits);
  const auto pad = [](int64_t count, int64_t limit) {
    return count == 0 ? 0 : Pad(count, limit);
  };
  StepSizes padded;
  padded.tokens = pad(sizes.tokens, largest.tokens);
  padded.sequences = pad(sizes.sequences, largest.sequences);
  padded.samples =
      sizes.samples <= logits_rows
          ? pad(sizes.samples, std::min(logits_rows, largest.samples))
          : std::min(AlignUp(sizes.samples, logits_rows), largest.samples);
  padded.targets = pad(sizes.targets, largest.targets);
  padded.top = pad(sizes.top, largest.top);
  padded.histories = pad(sizes.histories, largest.histories);
  return padded;
}

ResultLayout::ResultLayout(const StepSizes& padded) {
  constexpr auto kNumber = static_cast<int64_t>(sizeof(float));
  const int64_t samples = padded.samples * kNumber;
  logprobs = token_ids + samples;
  top_ids = logprobs + samples;
  top_logprobs = top_ids + samples * padded.top;
  target_logprobs = top_logprobs + samples * padded.top;
  not_finite = target_logprobs + padded.targets * kNumber;
  bytes = not_finite + padded.tokens * kNumber;
}

void StepBlob::StartCounting() {
  counting_ = true;
  used_bytes_ = 0;
}

absl::Status StepBlob::StartPacking() {
  const auto bytes = static_cast<size_t>(used_bytes_);
  if (bytes > most_bytes_) {
    most_bytes_ = bytes;
    ++peaks_;
  }
  if (bytes > device_.bytes()) {
    size_t grown = std::max(bytes, 2 * device_.bytes());
    // The old memory can be freed: no step is in flight, and this step is not
    // packed yet.
    device_ = kernels::DeviceBuffer();
    auto memory = allocator_->Allocate(grown, kernels::MemoryTag::kOther);
    if (!memory.ok()) {
      grown = bytes;
      memory = allocator_->Allocate(grown, kernels::MemoryTag::kOther);
    }
    KVASIR_ASSIGN_OR_RETURN(device_, std::move(memory));
    host_ = std::make_unique_for_overwrite<std::byte[]>(grown);
  }
  counting_ = false;
  used_bytes_ = 0;
  return absl::OkStatus();
}

int64_t StepBlob::TakeBytes(int64_t bytes) {
  const int64_t offset = used_bytes_;
  used_bytes_ += AlignUp(bytes, kAlignmentBytes);
  return offset;
}

absl::Status StepBlob::Upload(kernels::Stream& stream) const {
  return kernels::Upload(stream, device_.data(), host_.get(),
                         static_cast<size_t>(used_bytes_));
}

}  // namespace kvasir::worker
