// The device memory that keeps its contents from one step to the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "kernels/device/allocator.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/read_back.h"
#include "kernels/device/stream.h"
#include "worker/executor/step/step_layout.h"

namespace kvasir::worker {

// One buffer with four parts:
//   the token ids of the step: [max tokens] int32
//   the last sampled ids: [max sequences] int32, by SequenceTable row
//   the load of experts: [experts] int64
//   the results of the step (ResultLayout)
// The last two are read back together.
//
// Owns: the buffer, whose address never changes.
// Errors: RESOURCE_EXHAUSTED, with the sizes, if there is too little memory.
class StepState {
 public:
  static absl::StatusOr<StepState> Create(const StepLimits& limits,
                                          kernels::DeviceAllocator* allocator,
                                          kernels::Stream& stream) {
    constexpr int64_t kAlignmentBytes = 64;
    const int64_t numbers = limits.max_batched_tokens + limits.max_sequences;
    const auto bytes = numbers * static_cast<int64_t>(sizeof(int32_t));
    StepState state;
    state.last_sampled_offset_ = limits.max_batched_tokens;
    state.load_offset_bytes_ =
        (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    const std::vector<int64_t> no_load(static_cast<size_t>(limits.num_experts));
    const size_t load_bytes = no_load.size() * sizeof(int64_t);
    state.results_offset_bytes_ =
        state.load_offset_bytes_ + static_cast<int64_t>(load_bytes);
    const ResultLayout largest(LargestStep(limits));
    KVASIR_ASSIGN_OR_RETURN(
        state.memory_,
        allocator->Allocate(
            static_cast<size_t>(state.results_offset_bytes_ + largest.bytes),
            kernels::MemoryTag::kOther));
    const int64_t none = 0;
    KVASIR_RETURN_IF_ERROR(
        kernels::Upload(stream, state.clamped_codes(), &none, sizeof(none)));
    if (!no_load.empty()) {
      KVASIR_RETURN_IF_ERROR(kernels::Upload(stream, state.expert_load(),
                                             no_load.data(), load_bytes));
    }
    return state;
  }

  kernels::DevicePtr<int32_t> source_ids() const {
    return memory_.as<int32_t>();
  }
  kernels::DevicePtr<int32_t> last_sampled() const {
    return source_ids() + last_sampled_offset_;
  }
  kernels::DevicePtr<std::byte> results() const {
    return memory_.as<std::byte>() + results_offset_bytes_;
  }
  // Decoder::Parts::expert_load. The results follow directly in memory.
  kernels::DevicePtr<int64_t> expert_load() const {
    return (memory_.as<std::byte>() + load_offset_bytes_).as<int64_t>();
  }
  // The number of clamped codes of all steps so far.
  kernels::DevicePtr<int64_t> clamped_codes() const {
    return (results() + ResultLayout().clamped_codes).as<int64_t>();
  }

 private:
  StepState() = default;

  kernels::DeviceBuffer memory_;
  int64_t last_sampled_offset_ = 0;
  int64_t load_offset_bytes_ = 0;
  int64_t results_offset_bytes_ = 0;
};

}  // namespace kvasir::worker
