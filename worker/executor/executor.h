// Runs step plans. The scheduler's side of the cut: it hands over a plan and
// gets the sampled tokens; tensors, pages' memory and ranks are the executor's.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
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

// A step has two halves, so that the next plan can be made while it runs:
//   Enqueue checks the plan, brings it to the device and enqueues the work;
//   Await waits for the device and gives what was sampled.
// Each Enqueue that is OK is followed by one Await before the next Enqueue: one
// step is in flight at most. The plan may change or go when Enqueue returns.
//
// Threads: one thread at a time.
// Errors: a failed step, in either half, leaves the executor unusable; the
//   engine fails its requests and the process stops being ready.
//   FAILED_PRECONDITION for a call out of turn.
class Executor {
 public:
  virtual ~Executor() = default;

  // Applies the plan's releases, copies and block-table deltas, and enqueues:
  // every sequence's tokens run through the model and are sampled where asked.
  // INVALID_ARGUMENT for a plan that names unknown sequences, pages outside the
  // pool or a step id out of order.
  virtual absl::Status Enqueue(const kvasir::v1::StepPlan& plan) = 0;

  // Whether Enqueue returns while the step runs, as on a GPU: there is time to
  // plan then, and to deliver what the step before it gave. Constant.
  virtual bool runs_behind() const { return false; }
  // The plan of the next Enqueue, told once while a step is in flight: for
  // ranks elsewhere, to which it travels meanwhile. Not every plan is. An error
  // is that of the step in flight, which has failed.
  virtual absl::Status Announce(const kvasir::v1::StepPlan&) {
    return absl::OkStatus();
  }

  // The result of the step in flight, when it is done.
  virtual absl::StatusOr<kvasir::v1::StepResult> Await() = 0;

  // Both halves, for callers with nothing to do between them.
  absl::StatusOr<kvasir::v1::StepResult> Execute(
      const kvasir::v1::StepPlan& plan) {
    KVASIR_RETURN_IF_ERROR(Enqueue(plan));
    return Await();
  }
};

}  // namespace kvasir::worker
