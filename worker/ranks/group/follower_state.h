// A tensor-parallel group as a follower judges it: what its leader may say, and
// when it is given up. No clock, no thread, no socket.
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

// Begins with the call, on which the RankHello is sent first.
//
// Threads: one at a time.
class FollowerState {
 public:
  enum class Phase { kJoining, kLoading, kReady, kRunning, kEnded };

  // Until the RankWelcome.
  FollowerState(const kvasir::v1::RankHello& hello, absl::Duration join_timeout,
                absl::Time now);

  // What the leader's call brings; a step's plan is taken out of its message.
  void OnMessage(kvasir::v1::LeaderMessage* message, absl::Time now);
  // Bytes that are no message.
  void OnGarbage(size_t num_bytes);
  // The call has ended, or its connection.
  void OnLost(const absl::Status& why);
  // Several times a heartbeat_interval().
  void OnTime(absl::Time now);

  // What this rank does. FAILED_PRECONDITION out of turn, RESOURCE_EXHAUSTED
  // for more tiles than a leader takes.
  absl::Status OnReady(kvasir::v1::RankReady ready);
  // Of the step that was taken first of those that have not ended.
  absl::Status OnStepDone(uint64_t step_id, uint64_t result_hash);
  absl::Status OnStepFailed(uint64_t step_id, const absl::Status& why);
  void AskDrain();
  void Abort(const absl::Status& reason);

  // In the order of their ids.
  std::optional<kvasir::v1::StepPlan> TakeStep();
  // To send, in their order.
  std::vector<kvasir::v1::FollowerMessage> TakeMessages() {
    return std::exchange(messages_, {});
  }

  Phase phase() const { return phase_; }
  // Why it ended; OK: it lives, or was drained.
  const absl::Status& status() const { return status_; }
  absl::Duration heartbeat_interval() const {
    return heartbeat_timeout_ / kHeartbeatsPerTimeout;
  }
  // From kLoading on, by rank.
  const std::vector<std::string>& collective_addresses() const {
    return addresses_;
  }
  bool started() const { return started_; }
  const kvasir::v1::RankStart& start() const { return start_; }

 private:
  void OnWelcome(const kvasir::v1::RankWelcome& welcome);
  void OnStart(const kvasir::v1::RankStart& start);
  void OnStep(kvasir::v1::StepPlan* plan);
  // The leader breaks the rules.
  void Violated(const std::string& text);
  void End(const absl::Status& why);
  absl::Status CheckStep(uint64_t step_id) const;

  const uint32_t size_;
  const absl::Duration heartbeat_timeout_;
  const absl::Duration join_timeout_;

  Phase phase_ = Phase::kJoining;
  const absl::Time began_;
  absl::Time heard_;
  absl::Time last_time_;
  absl::Time last_beat_;
  absl::Status status_;
  std::vector<std::string> addresses_;
  bool started_ = false;
  kvasir::v1::RankStart start_;
  kvasir::v1::RankReady ready_;             // without its tiles
  std::deque<kvasir::v1::StepPlan> plans_;  // not taken yet
  uint64_t last_step_ = 0;                  // of those that came
  uint64_t last_taken_ = 0;
  uint64_t last_done_ = 0;
  std::vector<kvasir::v1::FollowerMessage> messages_;
};

}  // namespace kvasir::worker
