// The leader's side of a tensor-parallel group. RankServer listens for
// followers; RankGroupState decides what is sent to them.
//
//   RankLeader leader(options);
//   KVASIR_ASSIGN_OR_RETURN(auto addresses, leader.WaitJoined());
//   ... the collective connects, the rank loads ...
//   KVASIR_ASSIGN_OR_RETURN(auto start, leader.WaitStarted(ready));
//   GroupExecutor executor(&leader, &own_executor);  // runs steps on all ranks
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

// The largest message that a follower accepts. It is larger than any step plan.
inline constexpr int64_t kMaxLeaderMessageBytes = int64_t{256} << 20;

struct RankLeaderOptions {
  RankGroupOptions group;
  int64_t max_message_bytes = kMaxLeaderMessageBytes;
  const base::Clock* clock = &base::Clock::Real();
  // Called once when the group ends, unless Drain or the destructor ends it. It
  // should first abort the collective, because this rank's step may be waiting
  // for a lost rank, and then end the process. Neither on_end nor
  // on_drain_asked may block, because they run on the leader's thread or on a
  // thread that calls the leader.
  std::function<void(const absl::Status& why)> on_end;
  // Called when a follower's process was asked to stop: the engine should then
  // finish its requests and drain the group.
  std::function<void()> on_drain_asked;
};

// Owns: a thread for heartbeats and timeouts.
// Threads: any thread may call any method.
// Errors: every call that waits returns the reason why the group ended;
//   CANCELLED if the group was drained.
class RankLeader {
 public:
  using LinkId = RankGroupState::LinkId;

  // `options.group` must pass CheckRankGroupOptions (CHECK).
  explicit RankLeader(RankLeaderOptions options);
  // Aborts the group if it has not ended.
  ~RankLeader();

  // The events of a follower's call: first OnLink with the follower's address
  // (`peer`), then OnBytes for each message, then OnLost when the call ends.
  // The leader may close the link before OnLink returns.
  LinkId OnLink(std::shared_ptr<RankLink> link, bool authenticated,
                const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(LinkId link, std::string_view message)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnLost(LinkId link, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits until every rank has joined. Returns the collective address of each
  // rank.
  absl::StatusOr<std::vector<std::string>> WaitJoined()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports that the leader's own rank is ready (`own`) and waits until every
  // rank is. Returns the page counts that all ranks can use, and the ids of
  // their weights (RankGroupOptions::combine).
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Sends a step to all followers. RESOURCE_EXHAUSTED if the plan is larger
  // than RankLeaderOptions::max_message_bytes; also the errors of
  // RankGroupState::OnStep. These errors do not end the group.
  absl::Status SendStep(const kvasir::v1::StepPlan& plan)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The leader's own rank has ended a step with the result `own`; the step must
  // have been sent (CHECK). Waits until all ranks have ended it with the same
  // result.
  absl::Status FinishStep(const kvasir::v1::StepResult& own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The leader's own step has failed. Ends the group and returns the reason why
  // it ended, which may differ from `why` if another rank failed first.
  absl::Status FailStep(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // See RankGroupState::Drain and Abort.
  absl::Status Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // The reason why the group ended. OK if it has not ended or was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The followers that have joined, by rank.
  std::vector<RankMember> members() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = RankGroupState::Phase;

  // Work to do after mutex_ was released: send a message, close a link, or call
  // a callback.
  struct Task {
    LinkId id = 0;
    std::shared_ptr<RankLink> link;
    RankLink::Bytes message;  // null: no message
    std::optional<absl::Status> close;
    std::function<void()> call;  // a callback, instead of a message
  };

  // Moves the actions that `state_` has produced to tasks_.
  void Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Log(const RankGroupState::Event& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Carries out tasks_ without holding the lock. If another thread is already
  // doing that, leaves all tasks to that thread, so that messages keep their
  // order.
  void RunTasks() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the error for a call that waited when the group ended.
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankLeaderOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // wakes waiters when the state or working_ changes
  base::CondVar stop_;     // wakes the heartbeat thread
  RankGroupState state_ ABSL_GUARDED_BY(mutex_);
  std::map<LinkId, std::shared_ptr<RankLink>> links_ ABSL_GUARDED_BY(mutex_);
  LinkId last_link_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  // True once the group's end was handled: on_end was queued, if it must be
  // called.
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

}  // namespace kvasir::worker
