// The state machine of the leader of a tensor-parallel group: which followers
// may join, how many pages each rank uses, which ranks are alive, and why the
// group ends. Uses no clock, thread or socket: the caller passes in events with
// their time, and carries out the actions that result.
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

// The ids computed from the weights of all ranks.
struct CombinedIds {
  std::string weights_id;
  std::string cache_id;
};

struct RankGroupOptions {
  // The identity that followers must match. Its tp_size must be from 2 to
  // kMaxTpSize, and its heartbeat timeout above 0.
  kvasir::v1::RankIdentity identity;
  std::string collective_address;
  // Computes the ids from the RankReady.weight_tiles of all ranks, in rank
  // order. RankLeader::WaitStarted calls it once, when all ranks are ready. If
  // it returns an error, the group ends with that error on all ranks.
  std::function<absl::StatusOr<CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // The longest time until every rank has joined (join_timeout), and after that
  // until every rank is ready (load_timeout).
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration load_timeout = absl::Hours(1);
  // The group ends if a rank takes longer than this for a step.
  absl::Duration step_timeout = absl::Seconds(60);
};

// Returns INVALID_ARGUMENT with the value and its limits if an option is out of
// range.
absl::Status CheckRankGroupOptions(const RankGroupOptions& options);

// The most steps that are sent to followers and have not ended: the running one
// and the next one. The scheduler does not plan more.
inline constexpr size_t kMaxStepsInFlight = 2;

// The number of heartbeats that a rank sends in each heartbeat timeout. It is
// above 1, so that one late heartbeat does not end the group.
inline constexpr int kHeartbeatsPerTimeout = 6;

// Describes a follower that has joined. Texts that the follower sent were made
// printable and shortened.
struct RankMember {
  uint32_t rank = 0;
  std::string host;
  uint32_t pid = 0;
  std::string metrics_address;
  bool ready = false;  // if false, the fields below are not known yet
  std::vector<int64_t> pages;
  std::vector<int64_t> host_pages;
  int64_t weight_bytes = 0;
};

// The leader's process itself may not run for some time (stopped, swapped out).
// If that is more than half of a heartbeat timeout, it does not count towards
// the timeouts of other ranks.
//
// Threads: one thread at a time may call methods.
class RankGroupState {
 public:
  // Identifies a follower's call to the leader. An id is never used twice.
  using LinkId = uint64_t;
  using RefusalReason = kvasir::v1::RankRefusal::Reason;

  enum class Phase { kJoining, kLoading, kRunning, kEnded };

  struct Action {
    LinkId link = 0;
    // The message to send on the call. If it is empty, nothing is sent.
    kvasir::v1::LeaderMessage message;
    // If set, the call ends with this status after the message. There are no
    // later actions for this link.
    std::optional<absl::Status> close;
  };

  // Something to log. Refusals, which any process that connects can cause, are
  // reported only once for each reason, rank and identity field.
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

  // The methods from here to OnLost report events of the followers' calls.
  // Events of a closed link are ignored. `peer` is the address from which the
  // call comes, for the log.
  void OnLink(LinkId link, bool authenticated, const std::string& peer,
              absl::Time now);
  // Handles a message of a follower. Parts of the message are moved out of it.
  void OnMessage(LinkId link, kvasir::v1::FollowerMessage* message,
                 absl::Time now);
  // The most bytes that a message from this link may have now. Pass a longer
  // message to OnGarbage without parsing it.
  int64_t MaxMessageBytes(LinkId link) const;
  // A follower sent bytes that do not parse as a message, or more bytes than
  // MaxMessageBytes allows.
  void OnGarbage(LinkId link, size_t num_bytes, absl::Time now);
  // More than kMaxWaitingMessages messages wait to be sent on the link. The
  // follower does not read them, so it counts as lost.
  void OnBacklog(LinkId link, size_t num_messages);
  // The call or its connection has ended, with the status `why`.
  void OnLost(LinkId link, const absl::Status& why);
  // Sends heartbeats and checks timeouts. Call it several times in each
  // heartbeat_interval().
  void OnTime(absl::Time now);

  // The leader's own rank has loaded its weights and is ready. Call it once.
  void OnReady(kvasir::v1::RankReady ready);
  // Once all ranks are ready, the first call returns their weight tiles in rank
  // order. All other calls return nullopt. Pass the tiles to
  // RankGroupOptions::combine, and its result to OnCombined, which starts or
  // ends the group.
  std::optional<std::vector<std::string>> TakeTiles();
  void OnCombined(const absl::StatusOr<CombinedIds>& ids);
  // A step is about to be sent to all followers. FAILED_PRECONDITION if the
  // group is not running or kMaxStepsInFlight steps have not ended.
  // INVALID_ARGUMENT if `step_id` is not the next one: ids count up by one from
  // 1.
  absl::Status OnStep(uint64_t step_id, absl::Time now);
  // The leader's own rank has ended the step. The step must have been passed to
  // OnStep (CHECK).
  void OnStepDone(uint64_t step_id, uint64_t result_hash);
  // Ends the group with OK and sends all followers an end message.
  // FAILED_PRECONDITION while a step runs.
  absl::Status Drain();
  // Ends the group because the leader itself has failed.
  void Abort(const absl::Status& reason);

  // Returns the actions to carry out, in order. They do not include steps,
  // which the caller itself sends on all member_links().
  std::vector<Action> TakeActions() { return std::exchange(actions_, {}); }
  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }
  // The links on which a step must be sent to the followers.
  std::vector<LinkId> member_links() const;
  // The followers that have joined, by rank. Empty after the group has ended.
  std::vector<RankMember> members() const;

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
  // Set from phase kRunning on.
  const kvasir::v1::RankStart& start() const { return start_; }
  // Whether every rank has ended the step with the same result.
  bool IsStepDone(uint64_t step_id) const;

 private:
  struct Link {
    std::string peer;
    std::optional<uint32_t> rank;  // absent before its RankHello
    absl::Time last_message;
  };
  struct Member {
    LinkId link = 0;  // 0 if the rank has not joined
    kvasir::v1::RankHello hello;
    std::string name;
    std::optional<kvasir::v1::RankReady> ready;
    uint64_t steps_done = 0;
    bool asked_drain = false;
  };
  // A step that was sent and that at least one rank has not ended yet.
  struct Step {
    uint64_t id = 0;
    absl::Time since;
    // The result hash of each rank that has ended the step.
    std::vector<std::optional<uint64_t>> hashes;
  };

  uint32_t size() const { return options_.identity.tp_size(); }
  Member& member(uint32_t rank) { return members_[rank]; }

  // The follower on this link sent something that is not allowed.
  void OnBroken(LinkId link, const std::string& what, absl::Time now);
  void OnHello(LinkId link, const kvasir::v1::RankHello& hello);
  void OnMemberMessage(uint32_t rank, kvasir::v1::FollowerMessage* message);
  void OnMemberReady(uint32_t rank, kvasir::v1::RankReady ready);
  void OnMemberStepDone(uint32_t rank, const kvasir::v1::RankStepDone& done);
  void Welcome();
  bool IsAllReady() const;
  void CombineIfReady();
  // Checks whether the RankReady messages of all ranks agree.
  absl::Status CheckReady() const;
  void AddHash(uint64_t step_id, uint32_t rank, uint64_t hash);
  absl::Status CheckTimes(absl::Time now) const;
  // Returns the names of the ranks for which `waits` is true: "rank 1 (...),
  // rank 3".
  template <typename Predicate>
  std::string NamesWhere(const Predicate& waits) const;

  void Refuse(LinkId link, RefusalReason reason, const std::string& detail,
              const kvasir::v1::RankHello* hello, int field = 0);
  // A rank broke a rule or left. If the group is still joining, another process
  // may take the rank's place. Otherwise the group ends.
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
  std::vector<Member> members_;  // by rank; the leader is rank 0
  std::vector<std::string> addresses_;
  kvasir::v1::RankStart start_;
  // The weight tiles of all ranks, until TakeTiles returns them.
  std::optional<std::vector<std::string>> tiles_;
  std::deque<Step> steps_;
  uint64_t last_step_ = 0;

  std::vector<Action> actions_;
  std::vector<Event> events_;
  std::set<std::tuple<RefusalReason, uint32_t, int>> reported_;
  std::string last_refusal_;
};

}  // namespace kvasir::worker
