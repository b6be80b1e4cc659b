// The executor of a whole tensor-parallel group, as its leader's engine has it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {

// Sends each plan to all followers before this rank's own executor has it: one
// that is announced as soon as it is, so that they go on with it at once. Gives
// a result when every rank has the same.
//
// Threads: as Executor.
// Errors: as Executor's; a failure here ends the group, and the other way
//   round. UNAVAILABLE and others name the rank that was why.
class GroupExecutor final : public Executor {
 public:
  // Both outlive it. The group runs (WaitStarted).
  GroupExecutor(RankLeader* leader, Executor* own)
      : leader_(*leader), own_(*own) {}

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool runs_behind() const override { return own_.runs_behind(); }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override;

 private:
  absl::Status Send(const kvasir::v1::StepPlan& plan);

  RankLeader& leader_;
  Executor& own_;
  uint64_t step_id_ = 0;  // in flight
  uint64_t sent_id_ = 0;  // the last one that was sent
};

}  // namespace kvasir::worker
