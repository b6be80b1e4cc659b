// The executor of a whole tensor-parallel group, as its leader's engine has it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {

// Sends each plan to all followers before this rank's own executor has it, and
// gives its result once every rank has the same.
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

 private:
  RankLeader& leader_;
  Executor& own_;
  uint64_t step_id_ = 0;  // in flight
};

}  // namespace kvasir::worker
