// A tensor-parallel group from either side: who it is, that it connects, what
// it ends of.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/net/tls.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"
#include "worker/executor/executor.h"
#include "worker/load/group_collective.h"
#include "worker/load/membership.h"
#include "worker/ranks/group/rank_client.h"
#include "worker/ranks/group/rank_follower.h"
#include "worker/ranks/group/rank_leader.h"
#include "worker/ranks/group/rank_server.h"

namespace kvasir::cli {

struct RankGroupSettings {
  RankFlags flags;
  bool insecure = false;   // plain text may leave the machine
  std::string collective;  // CollectiveOf
  bool deterministic = false;
  std::string metrics;                  // where this rank's are asked for
  std::shared_ptr<base::TlsWatch> tls;  // outlives the group
  absl::Duration step_timeout = absl::Seconds(60);
  // Called once, from any thread, when the group ends of anything but a drain:
  // the process should exit with a failure.
  std::function<void(const std::string& why)> on_fatal;
  // A rank was asked to go: the leader should drain.
  std::function<void()> on_drain_asked;
};

// Rank 0.
// Threads: Membership's; the rest from the main thread.
class LeaderGroup final : public Membership {
 public:
  // `children` (or null) outlive it; they wait to be told.
  LeaderGroup(RankGroupSettings settings, LocalRanks* children)
      : settings_(std::move(settings)), children_(children) {}
  ~LeaderGroup() override;

  plan::TpShard shard() const override {
    return {.rank = 0, .size = settings_.flags.tp};
  }
  LocalShare local() const override {
    return {.index = 0, .count = settings_.flags.num_local()};
  }
  absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) override;
  absl::StatusOr<worker::RankAgreement> Agree(
      const worker::RankOffer& offer) override;

  // The executor of all ranks; `own` outlives it. After Agree.
  std::unique_ptr<worker::Executor> MakeExecutor(worker::Executor* own);
  const worker::Collective& collective() const { return *collective_.get(); }
  const std::string& collective_name() const { return settings_.collective; }
  std::vector<worker::RankMember> members() const { return leader_->members(); }

  // Where the group has failed its ranks of this host end, or are killed: what
  // a step of a dead collective hangs in may wait for one that stands still.
  void EndLocalRanksOfDead();
  // No step follows: the ranks end with exit code 0, and those of this host
  // are waited for. Errors: what the group has ended of, or one of these.
  absl::Status Drain();

 private:
  absl::Status Listen();

  const RankGroupSettings settings_;
  LocalRanks* const children_;
  std::atomic<bool> ending_{false};  // nobody wants to hear why
  GroupCollective collective_;
  std::unique_ptr<worker::RankLeader> leader_;
  // Of this host's ranks, and of others'.
  std::vector<std::unique_ptr<worker::RankServer>> servers_;
};

// Any other rank.
// Threads: as LeaderGroup.
class FollowerGroup final : public Membership {
 public:
  // `info`: the leader's address, and what it wants to be shown. `children`: as
  // LeaderGroup's.
  FollowerGroup(RankGroupSettings settings, JoinInfo info, LocalRanks* children)
      : settings_(std::move(settings)),
        info_(std::move(info)),
        children_(children) {}
  ~FollowerGroup() override;

  plan::TpShard shard() const override {
    return {.rank = settings_.flags.rank, .size = settings_.flags.tp};
  }
  LocalShare local() const override { return info_.local; }
  absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) override;
  absl::StatusOr<worker::RankAgreement> Agree(
      const worker::RankOffer& offer) override;

  // Steps, until the group ends. After Agree; on a thread of its own.
  absl::Status Run(worker::Executor* executor) {
    return worker::RunSteps(follower_.get(), executor);
  }
  // The leader is asked to drain. Any thread, after Join.
  void AskDrain() { follower_->AskDrain(); }
  void Abort(const absl::Status& why) { follower_->Abort(why); }
  // Why the group ended; OK: it lives, or was drained.
  absl::Status status() const { return follower_->status(); }
  const worker::Collective& collective() const { return *collective_.get(); }
  const std::string& collective_name() const { return settings_.collective; }

 private:
  const RankGroupSettings settings_;
  const JoinInfo info_;
  LocalRanks* const children_;
  std::atomic<bool> ending_{false};
  GroupCollective collective_;
  std::unique_ptr<worker::RankFollower> follower_;
  std::unique_ptr<worker::RankClient> client_;
};

}  // namespace kvasir::cli
