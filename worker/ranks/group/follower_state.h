// The state machine of a follower in a tensor-parallel group: what the leader
// may send, and when the follower gives the group up. Uses no clock, thread or
// socket.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/rank.pb.h"
#include "worker/ranks/group/rank_group_state.h"

namespace kvasir::worker {

// Construct the object when the call to the leader has begun. Its first message
// to the leader is the RankHello.
//
// Threads: one thread at a time may call methods.
class FollowerState {
 public:
  enum class Phase { kJoining, kLoading, kReady, kRunning, kEnded };

  // `join_timeout` is the longest time that the leader may take to send the
  // RankWelcome.
  FollowerState(const kvasir::v1::RankHello& hello, absl::Duration join_timeout,
                absl::Time now);

  // Handles a message from the leader. If it contains a step plan, the plan is
  // moved out of it.
  void OnMessage(kvasir::v1::LeaderMessage* message, absl::Time now);
  // The leader sent bytes that do not parse as a LeaderMessage.
  void OnGarbage(size_t num_bytes);
  // The call or its connection has ended, with the status `why`.
  void OnLost(const absl::Status& why);
  // Sends heartbeats and checks timeouts. Call it several times in each
  // heartbeat_interval().
  void OnTime(absl::Time now);

  // This rank has loaded its weights and is ready. FAILED_PRECONDITION if the
  // group is not loading or the rank was ready already. RESOURCE_EXHAUSTED if
  // the message has more bytes of weight tiles than a leader accepts.
  absl::Status OnReady(kvasir::v1::RankReady ready);
  // Report how a step ended: it is done, or it has failed. The step must be the
  // oldest one that TakeStep has returned and that has not ended yet.
  absl::Status OnStepDone(uint64_t step_id, uint64_t result_hash);
  absl::Status OnStepFailed(uint64_t step_id, const absl::Status& why);
  void AskDrain();
  void Abort(const absl::Status& reason);

  // Returns the next step to run, in the order of step ids, if the leader has
  // sent it.
  std::optional<kvasir::v1::StepPlan> TakeStep();
  // Returns the messages to send to the leader, in order.
  std::vector<kvasir::v1::FollowerMessage> TakeMessages() {
    return std::exchange(messages_, {});
  }

  Phase phase() const { return phase_; }
  // The reason why the group ended. OK if it has not ended or was drained.
  const absl::Status& status() const { return status_; }
  absl::Duration heartbeat_interval() const {
    return heartbeat_timeout_ / kHeartbeatsPerTimeout;
  }
  // One address per rank. Set from phase kLoading on.
  const std::vector<std::string>& collective_addresses() const {
    return addresses_;
  }
  bool started() const { return started_; }
  const kvasir::v1::RankStart& start() const { return start_; }

 private:
  void OnWelcome(const kvasir::v1::RankWelcome& welcome);
  void OnStart(const kvasir::v1::RankStart& start);
  void OnStep(kvasir::v1::StepPlan* plan);
  // Ends the group because the leader sent something (`text`) that is not
  // allowed.
  void Violated(const std::string& text);
  void End(const absl::Status& why);
  absl::Status CheckStep(uint64_t step_id) const;

  const uint32_t size_;
  const absl::Duration heartbeat_timeout_;
  const absl::Duration join_timeout_;

  Phase phase_ = Phase::kJoining;
  const absl::Time began_;
  absl::Time last_message_;
  absl::Time last_time_;
  absl::Time last_beat_;
  absl::Status status_;
  std::vector<std::string> addresses_;
  bool started_ = false;
  kvasir::v1::RankStart start_;
  kvasir::v1::RankReady ready_;  // as sent, without the weight tiles
  // Plans that have been received but that TakeStep has not returned yet.
  std::deque<kvasir::v1::StepPlan> plans_;
  uint64_t last_step_ = 0;  // id of the last step that was received
  uint64_t last_taken_ = 0;
  uint64_t last_done_ = 0;
  std::vector<kvasir::v1::FollowerMessage> messages_;
};

}  // namespace kvasir::worker
