// A follower's side of a tensor-parallel group. RankClient makes the call to
// the leader; FollowerState decides what is sent on the call.
//
//   RankFollower follower(options);
//   ... a call: OnLink ...
//   KVASIR_ASSIGN_OR_RETURN(auto addresses, follower.WaitWelcome());
//   ... the collective connects, the rank loads ...
//   KVASIR_ASSIGN_OR_RETURN(auto start, follower.WaitStarted(ready));
//   KVASIR_RETURN_IF_ERROR(RunSteps(&follower, &executor));
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/follower_state.h"
#include "worker/ranks/group/rank_link.h"

namespace kvasir::worker {

struct RankFollowerOptions {
  kvasir::v1::RankHello hello;
  absl::Duration join_timeout = absl::Minutes(5);
  const base::Clock* clock = &base::Clock::Real();
  // See RankLeaderOptions::on_end.
  std::function<void(const absl::Status& why)> on_end;
};

// Construct it after the leader was reached, because join_timeout and the
// leader's heartbeat timeout start in the constructor.
//
// Owns: a thread for heartbeats and timeouts.
// Threads: any thread may call any method.
// Errors: every call that waits returns the reason why the group ended;
//   CANCELLED if the group was drained before it started.
class RankFollower {
 public:
  explicit RankFollower(RankFollowerOptions options);
  // Aborts the group if it has not ended.
  ~RankFollower();

  // The events of the call to the leader: first OnLink, then OnBytes for each
  // message, then OnLost when the call ends.
  void OnLink(std::shared_ptr<RankLink> link) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(std::string_view message) ABSL_LOCKS_EXCLUDED(mutex_);
  // The call has ended with the status `why`: no more messages come.
  void OnLost(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits until every rank has joined. Returns the collective address of each
  // rank.
  absl::StatusOr<std::vector<std::string>> WaitWelcome()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports that this rank is ready (`own`) and waits until every rank is.
  // Returns the page counts that all ranks can use, and the ids of their
  // weights. Also returns the errors of FollowerState::OnReady.
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next step to run; nullopt after the leader has drained the
  // group.
  absl::StatusOr<std::optional<kvasir::v1::StepPlan>> NextStep()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports the result of the oldest running step to the leader
  // (FollowerState::OnStepDone).
  absl::Status FinishStep(const kvasir::v1::StepResult& result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports that the step has failed, and returns the reason why the group
  // ended, which may differ from `why` if another rank failed first.
  absl::Status FailStep(uint64_t step_id, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Asks the leader to finish its requests and to end the group.
  void AskDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // The reason why the group ended. OK if it has not ended or was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = FollowerState::Phase;

  // Sends the messages that `state_` has produced, or leaves them to another
  // thread that is already sending. The link is not called while the lock is
  // held.
  void SendMessages() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankFollowerOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // wakes waiters when the state or working_ changes
  base::CondVar stop_;     // wakes the heartbeat thread
  FollowerState state_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<RankLink> link_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  // True once the group's end was handled and the link closed.
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

// Runs the steps that the leader sends. Returns OK when the leader has drained
// the group, or the reason why the group ended. If the executor fails, reports
// that to the leader.
absl::Status RunSteps(RankFollower* follower, Executor* executor);

}  // namespace kvasir::worker
