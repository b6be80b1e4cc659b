// Runs step plans. The scheduler's side of the cut: it hands over a plan and
// gets the sampled tokens; tensors, pages' memory and ranks are the executor's.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// INTERNAL where the model's numbers became NaN or infinite in a sequence.
inline absl::Status CheckFault(const kvasir::v1::SequenceResult& result) {
  switch (result.fault()) {
    case kvasir::v1::LOGIT_NOT_FINITE:
      return absl::InternalError(
          "the model gives a logit that is not a finite number after these "
          "tokens");
    case kvasir::v1::LATENT_NOT_FINITE:
      return absl::InternalError(
          "the model gives the cache's codec a number that is not finite at "
          "these tokens");
    default:
      return absl::OkStatus();
  }
}

// Threads: one thread at a time.
// Errors: a failed step leaves the executor unusable; the engine fails its
// requests and the process stops being ready.
class Executor {
 public:
  virtual ~Executor() = default;

  // Applies the plan's releases, copies and block-table deltas, runs every
  // sequence's tokens through the model and samples where asked.
  // INVALID_ARGUMENT for a plan that names unknown sequences, pages outside the
  // pool or a step id out of order.
  virtual absl::StatusOr<kvasir::v1::StepResult> Execute(
      const kvasir::v1::StepPlan& plan) = 0;
};

}  // namespace kvasir::worker
