#include "worker/executor/step/step_profile.h"

namespace kvasir::worker {

const char* StepPartName(StepPart part) {
  static constexpr std::array<const char*, kNumStepParts> kNames = {
      "rest",      "projections", "rotation", "append", "lifts",
      "attention", "eviction",    "output",   "mlp",    "norms",
      "sum",       "head",        "sampling"};
  return kNames[static_cast<size_t>(part)];
}

void CpuStepProfile::Start() {
  seconds_ = {};
  part_ = StepPart::kRest;
  since_ = Clock::now();
}

CpuStepProfile::Seconds CpuStepProfile::Stop() {
  Take();
  return seconds_;
}

StepPart CpuStepProfile::Enter(kernels::Stream&, StepPart part) {
  Take();
  const StepPart before = part_;
  part_ = part;
  return before;
}

void CpuStepProfile::Take() {
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> took = now - since_;
  seconds_[static_cast<size_t>(part_)] += took.count();
  since_ = now;
}

}  // namespace kvasir::worker
