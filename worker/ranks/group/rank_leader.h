// A tensor-parallel group from its leader's side. Calls of followers come from
// whoever listens (rank_server.h); what is said on them is RankGroupState's.
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

// What a follower takes: the largest step plan there is, with room.
inline constexpr int64_t kMaxLeaderMessageBytes = int64_t{256} << 20;

struct RankLeaderOptions {
  RankGroupOptions group;
  int64_t max_message_bytes = kMaxLeaderMessageBytes;
  const base::Clock* clock = &base::Clock::Real();
  // Called once, when the group ends of anything but Drain or the destructor:
  // to abort the collective, where this rank's step may be waiting for one that
  // is gone, and to end the process. Both callbacks run on any thread that
  // calls the leader, or its own, and must not wait.
  std::function<void(const absl::Status& why)> on_end;
  // A follower was asked to go: the replica should finish its requests.
  std::function<void()> on_drain_asked;
};

// Owns: a thread for heartbeats and timeouts.
// Threads: any.
// Errors: what the group ended of, from every call that waits; CANCELLED where
// it
//   was drained.
class RankLeader {
 public:
  using LinkId = RankGroupState::LinkId;

  // CheckRankGroupOptions is OK.
  explicit RankLeader(RankLeaderOptions options);
  // Aborts a group that lives.
  ~RankLeader();

  // A follower's call: its link and from where it comes, then what came on it,
  // then its end. The link may be closed before the first returns.
  LinkId OnLink(std::shared_ptr<RankLink> link, bool authenticated,
                const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnBytes(LinkId link, std::string_view message)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnLost(LinkId link, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Until every rank has come: collective addresses, by rank.
  absl::StatusOr<std::vector<std::string>> WaitJoined()
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Until every rank is ready: the pages that all of them have, and what their
  // weights are called (RankGroupOptions::combine).
  absl::StatusOr<kvasir::v1::RankStart> WaitStarted(kvasir::v1::RankReady own)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // To all followers. kMaxStepsInFlight may be on their way;
  // RESOURCE_EXHAUSTED for a plan larger than they take, and the errors of
  // RankGroupState::OnStep. Ends nothing by itself.
  absl::Status SendStep(const kvasir::v1::StepPlan& plan)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // This rank has ended the step, which was sent (CHECK); waits until all have,
  // with the same result.
  absl::Status FinishStep(const kvasir::v1::StepResult& own)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // This rank's step has failed, and with it the group; returns what that has
  // ended of. See kFirstReason.
  absl::Status FailStep(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // RankGroupState's.
  absl::Status Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // Why the group ended; OK: it lives, or was drained.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The followers that are there, by rank.
  std::vector<RankMember> members() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Phase = RankGroupState::Phase;

  // What is to be done without the lock, in order.
  struct Task {
    LinkId id = 0;
    std::shared_ptr<RankLink> link;
    RankLink::Bytes message;  // null: none
    std::optional<absl::Status> close;
    std::function<void()> call;  // in place of all that
  };

  // Takes what the state wants done into tasks_.
  void Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tell(const RankGroupState::Event& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does tasks_, unless a thread is at it, which then does these too: what is
  // sent keeps its order, and nothing is called under the lock.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  // What a call that waits hears once the group has ended.
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  const RankLeaderOptions options_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;  // the state, or working_
  base::CondVar stop_;     // the ticker's
  RankGroupState state_ ABSL_GUARDED_BY(mutex_);
  std::map<LinkId, std::shared_ptr<RankLink>> links_ ABSL_GUARDED_BY(mutex_);
  LinkId last_link_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // and was told
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

}  // namespace kvasir::worker
