// Where the time of a step goes: the layers and the output say which part of
// the step they enqueue, and a profile takes the time. Without one a mark is a
// look at a null pointer.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/device/stream.h"

namespace kvasir::worker {

enum class StepPart : uint8_t {
  kRest,         // embedding, tables, copies to and from the host
  kProjections,  // from the normed stream to queries and latents
  kRotation,
  kAppend,
  // What a compressed cache adds around attention: lifts of queries and of
  // sums of latents, Hadamard transforms.
  kLifts,
  kAttention,
  kEviction,  // at a point; attention's share of scoring is attention's
  kOutput,    // of attention
  kMlp,
  kNorms,
  kSum,  // over tensor-parallel ranks
  kHead,
  kSampling,
};
inline constexpr size_t kNumStepParts = 13;
const char* StepPartName(StepPart part);

// Is told which part of a step is enqueued from here on. How time is taken is
// the device's: a clock, or events in the stream.
class StepProfile {
 public:
  virtual ~StepProfile() = default;
  // Returns the part before.
  virtual StepPart Enter(kernels::Stream& stream, StepPart part) = 0;
};

// What is enqueued while it lives belongs to `part`, but for what an inner one
// takes for itself. `profile` may be null.
class StepPartScope {
 public:
  StepPartScope(StepProfile* profile, kernels::Stream& stream, StepPart part)
      : profile_(profile), stream_(stream) {
    if (profile_ != nullptr) before_ = profile_->Enter(stream_, part);
  }
  ~StepPartScope() {
    if (profile_ != nullptr) profile_->Enter(stream_, before_);
  }
  StepPartScope(const StepPartScope&) = delete;
  StepPartScope& operator=(const StepPartScope&) = delete;

 private:
  StepProfile* const profile_;
  kernels::Stream& stream_;
  StepPart before_ = StepPart::kRest;
};

// Times of a stream that executes within the enqueueing call (CpuStream), by
// the wall clock.
//
// Threads: the stream's.
class CpuStepProfile final : public StepProfile {
 public:
  using Seconds = std::array<double, kNumStepParts>;

  // Forgets what was measured. Until the first mark time is the rest's.
  void Start();
  // Of each part since Start.
  Seconds Stop();

  StepPart Enter(kernels::Stream& stream, StepPart part) override;

 private:
  using Clock = std::chrono::steady_clock;
  void Take();

  Seconds seconds_ = {};
  StepPart part_ = StepPart::kRest;
  Clock::time_point since_ = Clock::now();
};

inline double SecondsOf(const CpuStepProfile::Seconds& seconds, StepPart part) {
  return seconds[static_cast<size_t>(part)];
}

}  // namespace kvasir::worker
