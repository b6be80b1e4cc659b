// A tensor-parallel group on a follower. RankClient makes the call to the
// leader; FollowerState decides what is sent on it.
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

// join_timeout and the leader's heartbeat timeout start with the constructor,
// so construct it after the leader was reached.
//
// Owns: a thread for heartbeats and timeouts.
// Threads: any.
// Errors: every call that waits returns the reason why the group ended;
//   CANCELLED if it was drained before it ran.
class RankFollower {
 public:
  explicit RankFollower(RankFollowerOptions options);
  // Aborts the group if it has not ended.
  ~RankFollower();

  // Events of the call: OnLink once, then its messages, then its end.
  void OnLink(std::shared_ptr<RankLink> link) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(std::string_view message) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing more comes from the link.
  void OnLost(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits until every rank has come. Returns collective addresses, by rank.
  absl::StatusOr<std::vector<std::string>> WaitWelcome()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until every rank is ready. Returns the pages that all of them have,
  // and the ids of their weights. Also returns the errors of
  // FollowerState::OnReady.
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next step to run; nullopt after the leader has drained the
  // group.
  absl::StatusOr<std::optional<kvasir::v1::StepPlan>> NextStep()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // FollowerState::OnStepDone.
  absl::Status FinishStep(const kvasir::v1::StepResult& result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the reason why the group ended. See kFirstReason.
  absl::Status FailStep(uint64_t step_id, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Asks the leader to finish its requests and to end the group.
  void AskDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // The reason why the group ended. OK: it has not ended, or it was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = FollowerState::Phase;

  // Sends the state's messages. If another thread is sending, that thread sends
  // these too. Nothing is called under the lock.
  void SendMessages() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankFollowerOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // wakes waiters when the state or working_ changes
  base::CondVar stop_;     // wakes the ticker
  FollowerState state_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<RankLink> link_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  // the end was handled and the link closed
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

// Runs the group's steps until the leader drains it; then returns OK. Otherwise
// returns the reason why the group ended. A failure of the executor is reported
// to the leader.
absl::Status RunSteps(RankFollower* follower, Executor* executor);

}  // namespace kvasir::worker
