// A tensor-parallel group as its leader judges it: who may join, what all ranks
// have room for, who is still there, and what the group ends of. No clock, no
// thread, no socket: what happens comes in with its time, and what is to be
// done goes out as actions.
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

// What the weights of all ranks together are called.
struct CombinedIds {
  std::string weights_id;
  std::string cache_id;
};

struct RankGroupOptions {
  // The leader's: of 2 to kMaxTpSize ranks, a heartbeat timeout above 0.
  kvasir::v1::RankIdentity identity;
  std::string collective_address;
  // From the RankReady.weight_tiles of all ranks, by rank. Called once, by
  // WaitStarted's thread, when all are ready; an error ends the group, and all
  // hear it.
  std::function<absl::StatusOr<CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // Until every rank has come; until every rank is ready.
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration load_timeout = absl::Hours(1);
  // A rank that has not ended a step for so long is given up.
  absl::Duration step_timeout = absl::Seconds(60);
};

// INVALID_ARGUMENT with the value and its limits.
absl::Status CheckRankGroupOptions(const RankGroupOptions& options);

// Steps that a rank may have before it has ended the first of them: the next
// one travels while one runs. As many as a scheduler plans.
inline constexpr size_t kMaxStepsInFlight = 2;

// Signs of life a timeout: one that is late, or lost in a busy moment, is no
// reason yet.
inline constexpr int kHeartbeatsPerTimeout = 6;

// A follower that is there. What it says of itself is printable and cut.
struct RankMember {
  uint32_t rank = 0;
  std::string host;
  uint32_t pid = 0;
  std::string metrics_address;
  bool ready = false;  // or else nothing below is known
  std::vector<int64_t> pages;
  std::vector<int64_t> host_pages;
  int64_t weight_bytes = 0;
};

// A process that was held up itself (stopped, swapped out) for more than half
// of a heartbeat timeout judges nobody by that time.
//
// Threads: one at a time.
class RankGroupState {
 public:
  // A follower's call. Never used twice.
  using LinkId = uint64_t;
  using RefusalReason = kvasir::v1::RankRefusal::Reason;

  enum class Phase { kJoining, kLoading, kRunning, kEnded };

  struct Action {
    LinkId link = 0;
    // Sent, unless it is empty.
    kvasir::v1::LeaderMessage message;
    // Then the call ends with this, and no other action names it.
    std::optional<absl::Status> close;
  };

  // For the log: what anybody can cause is told once for each reason, rank and
  // field of the identity.
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
    std::string who;
    std::string detail;
  };

  RankGroupState(RankGroupOptions options, absl::Time now);

  // What calls bring. A link that is closed is not known any more.
  // `peer`: from where, for the log.
  void OnLink(LinkId link, bool authenticated, const std::string& peer,
              absl::Time now);
  // Takes out of the message what it keeps.
  void OnMessage(LinkId link, kvasir::v1::FollowerMessage* message,
                 absl::Time now);
  // A longer message is garbage, and need not be parsed.
  int64_t MaxMessageBytes(LinkId link) const;
  // Bytes that are no message, or too many for one.
  void OnGarbage(LinkId link, size_t num_bytes, absl::Time now);
  // More waits to be sent than a rank that reads lets wait.
  void OnBacklog(LinkId link, size_t num_messages);
  // The call has ended, or its connection.
  void OnLost(LinkId link, const absl::Status& why);
  // Several times a heartbeat_interval().
  void OnTime(absl::Time now);

  // What the leader's own rank does. It is ready once.
  void OnReady(kvasir::v1::RankReady ready);
  // Once, when all ranks are ready: their tiles, by rank, for the options'
  // `combine`. What it gives starts or ends the group.
  std::optional<std::vector<std::string>> TakeTiles();
  void OnCombined(const absl::StatusOr<CombinedIds>& ids);
  // A step goes to all followers. FAILED_PRECONDITION unless the group runs and
  // there is room for it, INVALID_ARGUMENT unless it is the next: the first is
  // 1, then they count up by one.
  absl::Status OnStep(uint64_t step_id, absl::Time now);
  // Of a step that was sent (CHECK).
  void OnStepDone(uint64_t step_id, uint64_t result_hash);
  // No step follows: all ranks hear so, and the group ends with OK.
  // FAILED_PRECONDITION while a step runs.
  absl::Status Drain();
  // The leader itself has failed.
  void Abort(const absl::Status& reason);

  // In their order; steps are not among them.
  std::vector<Action> TakeActions() { return std::exchange(actions_, {}); }
  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }
  // Of the followers that a step goes to.
  std::vector<LinkId> member_links() const;
  // By rank; none once the group has ended.
  std::vector<RankMember> members() const;

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
  // From kRunning on.
  const kvasir::v1::RankStart& start() const { return start_; }
  // Every rank has ended it, and with the same result.
  bool IsStepDone(uint64_t step_id) const;

 private:
  struct Link {
    std::string peer;
    std::optional<uint32_t> rank;  // absent: no RankHello yet
    absl::Time heard;
  };
  struct Member {
    LinkId link = 0;  // 0: not there
    kvasir::v1::RankHello hello;
    std::string name;
    std::optional<kvasir::v1::RankReady> ready;
    uint64_t steps_done = 0;
    bool asked_drain = false;
  };
  // One that not every rank has ended.
  struct Step {
    uint64_t id = 0;
    absl::Time since;
    std::vector<std::optional<uint64_t>> hashes;  // by rank
  };

  uint32_t size() const { return options_.identity.tp_size(); }
  Member& member(uint32_t rank) { return members_[rank]; }

  // What came is nothing that a follower may send.
  void OnBroken(LinkId link, const std::string& what, absl::Time now);
  void OnHello(LinkId link, const kvasir::v1::RankHello& hello);
  void OnMemberMessage(uint32_t rank, kvasir::v1::FollowerMessage* message);
  void OnMemberReady(uint32_t rank, kvasir::v1::RankReady ready);
  void OnMemberStepDone(uint32_t rank, const kvasir::v1::RankStepDone& done);
  void Welcome();
  bool IsAllReady() const;
  void CombineIfReady();
  // A reason not to start.
  absl::Status CheckReady() const;
  void AddHash(uint64_t step_id, uint32_t rank, uint64_t hash);
  absl::Status CheckTimes(absl::Time now) const;
  // Of ranks for which `waits` holds: "rank 1 (...), rank 3".
  template <typename Predicate>
  std::string NamesWhere(const Predicate& waits) const;

  void Refuse(LinkId link, RefusalReason reason, const std::string& detail,
              const kvasir::v1::RankHello* hello, int field = 0);
  // One rank breaks the rules, or goes: of a group that is still joining only
  // its place is free again.
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
  std::vector<Member> members_;  // by rank; the leader's own is 0
  std::vector<std::string> addresses_;
  kvasir::v1::RankStart start_;
  std::optional<std::vector<std::string>> tiles_;  // to combine
  std::deque<Step> steps_;
  uint64_t last_step_ = 0;

  std::vector<Action> actions_;
  std::vector<Event> events_;
  std::set<std::tuple<RefusalReason, uint32_t, int>> told_;
  std::string last_refusal_;
};

}  // namespace kvasir::worker
