// Runs step plans. The scheduler's side of the cut: it hands over a plan and
// gets the sampled tokens; tensors, pages' memory and ranks are the executor's.
#pragma once

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

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
