// A tensor-parallel group on its leader. RankServer listens for followers;
// RankGroupState decides what is sent to them.
//
//   RankLeader leader(options);
//   KVASIR_ASSIGN_OR_RETURN(auto addresses, leader.WaitJoined());
//   ... the collective connects, the rank loads ...
//   KVASIR_ASSIGN_OR_RETURN(auto start, leader.WaitStarted(ready));
//   GroupExecutor executor(&leader, &own_executor);  // steps
//   leader.Drain();
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/ranks/group/rank_group_state.h"
#include "worker/ranks/group/rank_link.h"

namespace kvasir::worker {

// The most that a follower accepts: the largest step plan, with room to spare.
inline constexpr int64_t kMaxLeaderMessageBytes = int64_t{256} << 20;

struct RankLeaderOptions {
  RankGroupOptions group;
  int64_t max_message_bytes = kMaxLeaderMessageBytes;
  const base::Clock* clock = &base::Clock::Real();
  // Called once when the group ends, unless by Drain or the destructor. It
  // should abort the collective, because this rank's step may be waiting for a
  // lost rank, and end the process. Both callbacks run on any thread that calls
  // the leader, or on the leader's own, and must not block.
  std::function<void(const absl::Status& why)> on_end;
  // A follower was asked to stop: the replica should finish its requests.
  std::function<void()> on_drain_asked;
};

// Owns: a thread for heartbeats and timeouts.
// Threads: any.
// Errors: every call that waits returns the reason why the group ended;
//   CANCELLED if it was drained.
class RankLeader {
 public:
  using LinkId = RankGroupState::LinkId;

  // `options` must pass CheckRankGroupOptions.
  explicit RankLeader(RankLeaderOptions options);
  // Aborts the group if it has not ended.
  ~RankLeader();

  // Events of a follower's call: its link with the peer's address, then its
  // messages, then its end. The link may be closed before OnLink returns.
  LinkId OnLink(std::shared_ptr<RankLink> link, bool authenticated,
                const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(LinkId link, std::string_view message)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnLost(LinkId link, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits until every rank has come. Returns collective addresses, by rank.
  absl::StatusOr<std::vector<std::string>> WaitJoined()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until every rank is ready. Returns the pages that all of them have,
  // and the ids of their weights (RankGroupOptions::combine).
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Sends a step to all followers; kMaxStepsInFlight may be on their way.
  // RESOURCE_EXHAUSTED for a plan larger than followers accept; also the errors
  // of RankGroupState::OnStep. These errors do not end the group.
  absl::Status SendStep(const kvasir::v1::StepPlan& plan)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // This rank has ended the step, which must have been sent (CHECK). Waits
  // until all ranks have ended it with the same result.
  absl::Status FinishStep(const kvasir::v1::StepResult& own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // This rank's step has failed. Ends the group and returns the reason why it
  // ended. See kFirstReason.
  absl::Status FailStep(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // RankGroupState::Drain and Abort.
  absl::Status Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // The reason why the group ended. OK: it has not ended, or it was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The followers that have joined, by rank.
  std::vector<RankMember> members() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = RankGroupState::Phase;

  // Something to do without the lock, in order.
  struct Task {
    LinkId id = 0;
    std::shared_ptr<RankLink> link;
    RankLink::Bytes message;  // null: none
    std::optional<absl::Status> close;
    std::function<void()> call;  // instead of a message
  };

  // Moves the state's actions to tasks_.
  void Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Log(const RankGroupState::Event& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does tasks_. If another thread is doing them, that thread does these too.
  // So messages keep their order, and nothing is called under the lock.
  void RunTasks() ABSL_LOCKS_EXCLUDED(mutex_);
  // The error for a waiting call after the group has ended.
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankLeaderOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // wakes waiters when the state or working_ changes
  base::CondVar stop_;     // wakes the ticker
  RankGroupState state_ ABSL_GUARDED_BY(mutex_);
  std::map<LinkId, std::shared_ptr<RankLink>> links_ ABSL_GUARDED_BY(mutex_);
  LinkId last_link_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // and on_end was called
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

}  // namespace kvasir::worker
