// A leader's rules for its tensor-parallel group: which followers may join, how
// many pages all ranks have, which ranks are alive, and why the group ends. No
// clock, thread or socket: events come in with their time, and actions go out.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/kvasir/v1/rank.pb.h"

namespace kvasir::worker {

// Ids of the weights of all ranks together.
struct CombinedIds {
  std::string weights_id;
  std::string cache_id;
};

struct RankGroupOptions {
  // The leader's own. It must name 2 to kMaxTpSize ranks and a heartbeat
  // timeout above 0.
  kvasir::v1::RankIdentity identity;
  std::string collective_address;
  // Computes the ids from RankReady.weight_tiles of all ranks, by rank. Called
  // once, by the thread of WaitStarted, when all ranks are ready. An error ends
  // the group, and all ranks receive it.
  std::function<absl::StatusOr<CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // The time until every rank has come, and then until every rank is ready.
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration load_timeout = absl::Hours(1);
  // The group ends if a rank takes longer for a step.
  absl::Duration step_timeout = absl::Seconds(60);
};

// INVALID_ARGUMENT with the value and its limits.
absl::Status CheckRankGroupOptions(const RankGroupOptions& options);

// How many steps may be sent before the first of them ends: the next one
// travels while one runs, which is as many as a scheduler plans.
inline constexpr size_t kMaxStepsInFlight = 2;

// Heartbeats in each timeout. With several of them, a late or lost one does not
// end the group.
inline constexpr int kHeartbeatsPerTimeout = 6;

// A follower that has joined. Its texts were made printable and shortened.
struct RankMember {
  uint32_t rank = 0;
  std::string host;
  uint32_t pid = 0;
  std::string metrics_address;
  bool ready = false;  // false: the fields below are not known
  std::vector<int64_t> pages;
  std::vector<int64_t> host_pages;
  int64_t weight_bytes = 0;
};

// If this process itself was held up (stopped, swapped out) for more than half
// of a heartbeat timeout, it does not count that time against other ranks.
//
// Threads: one at a time.
class RankGroupState {
 public:
  // Names a follower's call. Never used twice.
  using LinkId = uint64_t;
  using RefusalReason = kvasir::v1::RankRefusal::Reason;

  enum class Phase { kJoining, kLoading, kRunning, kEnded };

  struct Action {
    LinkId link = 0;
    // Sent, unless it is empty.
    kvasir::v1::LeaderMessage message;
    // If set, the call then ends with this status, and no later action names
    // it.
    std::optional<absl::Status> close;
  };

  // For the log. Events that anybody can cause are reported once for each
  // reason, rank and field of the identity.
  struct Event {
    enum class Kind {
      kJoined,
      kLeft,
      kRefused,
      kReady,
      kStarted,
      kDrainAsked,
    };
    Kind kind = Kind::kJoined;
    std::string ranks;
    std::string detail;
  };

  RankGroupState(RankGroupOptions options, absl::Time now);

  // Events of calls. A link that was closed is not known any more. `peer` is
  // where the call comes from, for the log.
  void OnLink(LinkId link, bool authenticated, const std::string& peer,
              absl::Time now);
  // Moves out of the message what the state keeps.
  void OnMessage(LinkId link, kvasir::v1::FollowerMessage* message,
                 absl::Time now);
  // A longer message counts as garbage and need not be parsed.
  int64_t MaxMessageBytes(LinkId link) const;
  // Bytes that do not parse as a message, or are too many.
  void OnGarbage(LinkId link, size_t num_bytes, absl::Time now);
  // More messages wait to be sent than a rank that reads leaves waiting.
  void OnBacklog(LinkId link, size_t num_messages);
  // The call or its connection has ended.
  void OnLost(LinkId link, const absl::Status& why);
  // Call it several times in each heartbeat_interval().
  void OnTime(absl::Time now);

  // The leader's own rank is ready. Call it once.
  void OnReady(kvasir::v1::RankReady ready);
  // Returns, once and when all ranks are ready, their tiles by rank for
  // `combine`. Pass its result to OnCombined, which starts or ends the group.
  std::optional<std::vector<std::string>> TakeTiles();
  void OnCombined(const absl::StatusOr<CombinedIds>& ids);
  // A step is about to be sent to all followers. FAILED_PRECONDITION unless the
  // group runs and has room for the step. INVALID_ARGUMENT unless it is the
  // next one: ids count up by one from 1.
  absl::Status OnStep(uint64_t step_id, absl::Time now);
  // The leader's own rank has ended the step, which must have been sent
  // (CHECK).
  void OnStepDone(uint64_t step_id, uint64_t result_hash);
  // No step follows: all ranks receive an end, and the group ends with OK.
  // FAILED_PRECONDITION while a step runs.
  absl::Status Drain();
  // The leader itself has failed.
  void Abort(const absl::Status& reason);

  // The actions to do, in order. Steps are not among them.
  std::vector<Action> TakeActions() { return std::exchange(actions_, {}); }
  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }
  // The calls of the followers that a step is sent to.
  std::vector<LinkId> member_links() const;
  // By rank; empty after the group has ended.
  std::vector<RankMember> members() const;

  Phase phase() const { return phase_; }
  // The reason why the group ended. OK: it has not ended, or it was drained.
  const absl::Status& status() const { return status_; }
  absl::Duration heartbeat_interval() const {
    return heartbeat_timeout_ / kHeartbeatsPerTimeout;
  }
  // By rank; set from kLoading on.
  const std::vector<std::string>& collective_addresses() const {
    return addresses_;
  }
  // Set from kRunning on.
  const kvasir::v1::RankStart& start() const { return start_; }
  // Whether every rank has ended the step with the same result.
  bool IsStepDone(uint64_t step_id) const;

 private:
  struct Link {
    std::string peer;
    std::optional<uint32_t> rank;  // absent: no RankHello yet
    absl::Time last_message;
  };
  struct Member {
    LinkId link = 0;  // 0: not joined
    kvasir::v1::RankHello hello;
    std::string name;
    std::optional<kvasir::v1::RankReady> ready;
    uint64_t steps_done = 0;
    bool asked_drain = false;
  };
  // A step that not every rank has ended.
  struct Step {
    uint64_t id = 0;
    absl::Time since;
    std::vector<std::optional<uint64_t>> hashes;  // by rank
  };

  uint32_t size() const { return options_.identity.tp_size(); }
  Member& member(uint32_t rank) { return members_[rank]; }

  // A follower sent something that is not allowed.
  void OnBroken(LinkId link, const std::string& what, absl::Time now);
  void OnHello(LinkId link, const kvasir::v1::RankHello& hello);
  void OnMemberMessage(uint32_t rank, kvasir::v1::FollowerMessage* message);
  void OnMemberReady(uint32_t rank, kvasir::v1::RankReady ready);
  void OnMemberStepDone(uint32_t rank, const kvasir::v1::RankStepDone& done);
  void Welcome();
  bool IsAllReady() const;
  void CombineIfReady();
  // Checks whether the group can start.
  absl::Status CheckReady() const;
  void AddHash(uint64_t step_id, uint32_t rank, uint64_t hash);
  absl::Status CheckTimes(absl::Time now) const;
  // Names the ranks for which `waits` holds: "rank 1 (...), rank 3".
  template <typename Predicate>
  std::string NamesWhere(const Predicate& waits) const;

  void Refuse(LinkId link, RefusalReason reason, const std::string& detail,
              const kvasir::v1::RankHello* hello, int field = 0);
  // A rank broke a rule or left. While the group is joining, only its place
  // becomes free again; later the group ends.
  void Fail(uint32_t rank, const absl::Status& why);
  void End(const absl::Status& why);
  void Send(LinkId link, kvasir::v1::LeaderMessage message);
  void Close(LinkId link, kvasir::v1::LeaderMessage last,
             const absl::Status& status);

  const RankGroupOptions options_;
  const absl::Duration heartbeat_timeout_;

  Phase phase_ = Phase::kJoining;
  absl::Time phase_since_;
  absl::Time last_time_;
  absl::Time last_beat_;
  absl::Status status_;
  std::map<LinkId, Link> links_;
  std::vector<Member> members_;  // by rank; the leader is 0
  std::vector<std::string> addresses_;
  kvasir::v1::RankStart start_;
  std::optional<std::vector<std::string>> tiles_;  // waiting for TakeTiles
  std::deque<Step> steps_;
  uint64_t last_step_ = 0;

  std::vector<Action> actions_;
  std::vector<Event> events_;
  std::set<std::tuple<RefusalReason, uint32_t, int>> reported_;
  std::string last_refusal_;
};

}  // namespace kvasir::worker
