// The interface between scheduler and executor: the scheduler hands over a step
// plan and gets the sampled tokens. Tensors, the memory of pages, and ranks are
// the executor's.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// INTERNAL if the model computed NaN or an infinite number in the sequence.
inline absl::Status CheckFault(const kvasir::v1::SequenceResult& result) {
  switch (result.fault()) {
    case kvasir::v1::LOGIT_NOT_FINITE:
      return absl::InternalError(
          "the model computed a logit that is not a finite number (NaN or "
          "infinite) after these tokens");
    case kvasir::v1::LATENT_NOT_FINITE:
      return absl::InternalError(
          "the model computed a latent (a key or value to be cached) that is "
          "NaN "
          "or infinite at these tokens");
    default:
      return absl::OkStatus();
  }
}

// A step has two halves, so that the next plan can be made while the step runs:
// - Enqueue checks the plan, brings it to the device and enqueues the work.
// - Await waits for the device and returns what was sampled.
// After each successful Enqueue the caller must Await once before the next
// Enqueue: at most one step is in flight. The plan may change or go when
// Enqueue returns.
//
// Threads: one at a time.
// Errors: a failed step, in either half, leaves the executor unusable: the
//   engine fails its requests and the process stops being ready.
//   FAILED_PRECONDITION for a call out of turn.
class Executor {
 public:
  virtual ~Executor() = default;

  // Applies the plan's releases, copies, evictions and block-table deltas. Then
  // enqueues the model over every sequence's tokens, and the samples that the
  // plan asks for. INVALID_ARGUMENT for a plan that names unknown sequences,
  // pages outside the pool or a step id out of order.
  virtual absl::Status Enqueue(const kvasir::v1::StepPlan& plan) = 0;

  // Whether Enqueue returns while the step still runs, as on a GPU. The engine
  // then uses the time to plan, and to deliver the results of the step before.
  // Constant.
  virtual bool is_asynchronous() const { return false; }
  // Passes on the plan of the next Enqueue while a step is in flight, at most
  // once per plan. An executor with ranks elsewhere sends it to them meanwhile.
  // Optional: a plan may be enqueued without it. An error means that the step
  // in flight has failed.
  virtual absl::Status Announce(const kvasir::v1::StepPlan&) {
    return absl::OkStatus();
  }

  // Waits for the step in flight and returns its result.
  virtual absl::StatusOr<kvasir::v1::StepResult> Await() = 0;

  // Enqueue and Await, for callers with nothing to do between them.
  absl::StatusOr<kvasir::v1::StepResult> Execute(
      const kvasir::v1::StepPlan& plan) {
    KVASIR_RETURN_IF_ERROR(Enqueue(plan));
    return Await();
  }
};

}  // namespace kvasir::worker
