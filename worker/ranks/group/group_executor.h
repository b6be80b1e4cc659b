// The executor that the leader's engine uses: it runs each step on all ranks of
// a tensor-parallel group.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {

// Sends each plan to all followers, then gives it to the leader's own executor.
// A plan that is announced during the previous step is sent at once, so that
// followers can start it as soon as that step ends. Await returns when every
// rank has reported the same result.
//
// Threads: see Executor.
// Errors: those of Executor. A failed step ends the group, and after the group
//   has ended every call fails. Errors name the rank that caused them.
class GroupExecutor final : public Executor {
 public:
  // `leader` and `own` must outlive this executor. The group must have started
  // (RankLeader::WaitStarted).
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
  uint64_t step_id_ = 0;  // the step in flight
  uint64_t sent_id_ = 0;  // the last step that was sent
};

}  // namespace kvasir::worker
