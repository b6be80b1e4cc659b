// The executor of a whole tensor-parallel group, used by the engine of the
// leader.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {

// Sends each plan to all followers before it gives the plan to this rank's own
// executor. An announced plan is sent at once, so that followers can start it
// without a pause. Returns a result when every rank has reported the same one.
//
// Threads: as Executor.
// Errors: those of Executor. A failure here ends the group, and the end of the
//   group is a failure here. UNAVAILABLE and other errors name the rank that
//   caused them.
class GroupExecutor final : public Executor {
 public:
  // Both outlive the executor. The group must have started (WaitStarted).
  GroupExecutor(RankLeader* leader, Executor* own)
      : leader_(*leader), own_(*own) {}

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool is_asynchronous() const override { return own_.is_asynchronous(); }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override;

 private:
  absl::Status Send(const kvasir::v1::StepPlan& plan);

  RankLeader& leader_;
  Executor& own_;
  uint64_t step_id_ = 0;  // in flight
  uint64_t sent_id_ = 0;  // last sent
};

}  // namespace kvasir::worker
