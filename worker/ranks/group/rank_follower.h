// A tensor-parallel group from a follower's side. The call to the leader is
// made by whoever dials (rank_client.h); what is said on it is FollowerState's.
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
  // As RankLeaderOptions'.
  std::function<void(const absl::Status& why)> on_end;
};

// The time to join begins when it is made, and so does the leader's silence:
// made once the leader is reached.
//
// Owns: a thread for heartbeats and timeouts.
// Threads: any.
// Errors: what the group ended of, from every call that waits; CANCELLED where
// it
//   was drained before it ran.
class RankFollower {
 public:
  explicit RankFollower(RankFollowerOptions options);
  // Aborts a group that lives.
  ~RankFollower();

  // The call: its link, once, then what came on it, then its end.
  void OnLink(std::shared_ptr<RankLink> link) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(std::string_view message) ABSL_LOCKS_EXCLUDED(mutex_);
  // The link hears nothing more.
  void OnLost(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Until every rank has come: collective addresses, by rank.
  absl::StatusOr<std::vector<std::string>> WaitWelcome()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Until every rank is ready: the pages that all of them have, and what their
  // weights are called. FollowerState::OnReady's errors, too.
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The next step to run; nullopt once the leader has drained the group.
  absl::StatusOr<std::optional<kvasir::v1::StepPlan>> NextStep()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // FollowerState's.
  absl::Status FinishStep(const kvasir::v1::StepResult& result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns what the group has ended of. See kFirstReason.
  absl::Status FailStep(uint64_t step_id, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Asks the leader to finish its requests and to end the group.
  void AskDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // Why the group ended; OK: it lives, or was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = FollowerState::Phase;

  // Sends what the state wants sent, unless a thread is at it, which then sends
  // this too; nothing is called under the lock.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankFollowerOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // the state, or working_
  base::CondVar stop_;     // the ticker's
  FollowerState state_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<RankLink> link_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // and the link was closed
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

// Runs the group's steps until the leader drains it: OK. Otherwise what ended
// the group: where the executor fails the leader hears of it.
absl::Status RunSteps(RankFollower* follower, Executor* executor);

}  // namespace kvasir::worker
