// Measures how the time of a step divides among its parts. The executor's code
// marks which part of the step it enqueues; a StepProfile measures the time
// between marks. Without a profile a mark only checks a null pointer.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/device/stream.h"

namespace kvasir::worker {

enum class StepPart : uint8_t {
  kRest,         // embedding, tables, copies to and from the host
  kProjections,  // from the normed residual stream to queries and latents
  kRotation,
  kAppend,
  // only for compressed caches: lifts of queries and of attention's sums, and
  // Hadamard transforms
  kLifts,
  kAttention,
  kEviction,  // choosing and moving slots; scoring counts as kAttention
  kOutput,    // the output projection of attention
  kMlp,
  kNorms,
  kSum,  // sums and gathers over tensor-parallel ranks
  kHead,
  kSampling,
};
inline constexpr size_t kNumStepParts = 13;
const char* StepPartName(StepPart part);

// Receives the marks. The implementation decides how to measure: with a clock,
// or with events in the stream.
class StepProfile {
 public:
  virtual ~StepProfile() = default;
  // Marks that ops enqueued from now on belong to `part`. Returns the previous
  // part.
  virtual StepPart Enter(kernels::Stream& stream, StepPart part) = 0;
};

// Ops that are enqueued while the scope lives belong to `part`, except inside
// inner scopes. `profile` may be null.
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

// Measures wall-clock time. Only for CpuStream, where an op is done when the
// call that enqueues it returns.
//
// Threads: only the thread that uses the stream.
class CpuStepProfile final : public StepProfile {
 public:
  using Seconds = std::array<double, kNumStepParts>;

  // Forgets what was measured. Time until the first mark belongs to kRest.
  void Start();
  // Returns the seconds of each part since Start.
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
