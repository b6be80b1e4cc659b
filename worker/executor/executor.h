// The interface between scheduler and executor: the scheduler hands over a step
// plan and gets the sampled tokens back. Only the executor deals with tensors,
// the memory of pages, and ranks.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Returns INTERNAL if the model computed NaN or an infinite number for the
// sequence.
inline absl::Status CheckFault(const kvasir::v1::SequenceResult& result) {
  switch (result.fault()) {
    case kvasir::v1::LOGIT_NOT_FINITE:
      return absl::InternalError(
          "the model computed a logit that is not a finite number (NaN or "
          "infinite) for this request");
    case kvasir::v1::LATENT_NOT_FINITE:
      return absl::InternalError(
          "the model computed a latent (a key or value to be cached) that is "
          "NaN or infinite for this request");
    default:
      return absl::OkStatus();
  }
}

// A step has two halves, so that the next plan can be made while the step runs:
// - Enqueue checks the plan, copies it to the device and enqueues the work.
// - Await waits for the device and returns what was sampled.
//
// After each successful Enqueue the caller must call Await once before the next
// Enqueue, so at most one step is in flight. The plan need not outlive Enqueue.
//
// Threads: one at a time.
// Errors: FAILED_PRECONDITION for a call in the wrong order, without effect.
//   After any other error of Enqueue or Await the executor cannot be used: the
//   engine fails its requests, and the process is no longer ready.
class Executor {
 public:
  virtual ~Executor() = default;

  // Applies the plan's releases, page copies, evictions and block-table
  // changes. Then enqueues the model for every sequence's tokens, and the
  // sampling that the plan asks for. INVALID_ARGUMENT for a plan that names
  // unknown sequences or pages outside the pool, or whose step id is out of
  // order.
  virtual absl::Status Enqueue(const kvasir::v1::StepPlan& plan) = 0;

  // Whether Enqueue returns while the step still runs, as on a GPU. If so, the
  // engine uses that time to plan the next step and to deliver the previous
  // results. The answer never changes.
  virtual bool is_asynchronous() const { return false; }
  // Tells the executor the plan of the next Enqueue while a step is still in
  // flight. An executor with ranks in other processes sends them the plan
  // early. The call is optional, and allowed once per plan. An error means that
  // the step in flight has failed.
  virtual absl::Status Announce(const kvasir::v1::StepPlan&) {
    return absl::OkStatus();
  }

  // Waits for the step in flight and returns its result.
  virtual absl::StatusOr<kvasir::v1::StepResult> Await() = 0;

  absl::StatusOr<kvasir::v1::StepResult> Execute(
      const kvasir::v1::StepPlan& plan) {
    KVASIR_RETURN_IF_ERROR(Enqueue(plan));
    return Await();
  }
};

}  // namespace kvasir::worker
