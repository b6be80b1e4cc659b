// The parts of a tensor-parallel group that run in the leader (rank 0) and in
// each other rank. They handle how ranks join, connect and end.
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
  bool insecure = false;   // if true, plain text may go to other machines
  std::string collective;  // the name that CollectiveOf returns
  bool deterministic = false;
  std::string metrics;                  // the address of this rank's metrics
  std::shared_ptr<base::TlsWatch> tls;  // must outlive the group
  absl::Duration step_timeout = absl::Seconds(60);
  // Called once, from any thread, if the group fails. The process should then
  // exit with a failure.
  std::function<void(const std::string& why)> on_fatal;
  // Called on the leader if an operator has asked another rank to drain. The
  // leader should then drain the whole group.
  std::function<void()> on_drain_asked;
};

// The part of the group that runs in rank 0, the leader.
// Threads: for the methods of Membership, see there. Only the main thread calls
//   the others.
class LeaderGroup final : public Membership {
 public:
  // `children` may be null. Otherwise it must outlive this object, which sends
  // the JoinInfo to the children.
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

  // Returns an executor that runs steps on all ranks. `own` is this rank's
  // executor, which must outlive it. Call this after Agree.
  std::unique_ptr<worker::Executor> MakeExecutor(worker::Executor* own);
  const worker::Collective& collective() const { return *collective_.get(); }
  const std::string& collective_name() const { return settings_.collective; }
  std::vector<worker::RankMember> members() const { return leader_->members(); }

  // If the group has failed, ends or kills this host's ranks, because they may
  // be waiting in a collective call for a lost rank.
  void EndLocalRanksIfFailed();
  // Ends the group after its last step, and waits for this host's ranks to end.
  // Ranks of a drained group end with exit code 0. Errors: the reason why the
  // group, or a rank of this host, has failed.
  absl::Status Drain();

 private:
  absl::Status Listen();

  const RankGroupSettings settings_;
  LocalRanks* const children_;
  // if true, on_fatal is not called any more
  std::atomic<bool> ending_{false};
  GroupCollective collective_;
  std::unique_ptr<worker::RankLeader> leader_;
  // Up to two servers: one for ranks of this host, and one for those of
  // other hosts.
  std::vector<std::unique_ptr<worker::RankServer>> servers_;
};

// The part of the group that runs in a rank other than 0.
// Threads: the same rules as for LeaderGroup.
class FollowerGroup final : public Membership {
 public:
  // `info` has the leader's address and the secret. `children` may be
  // null. Otherwise it must outlive this object, which sends the JoinInfo
  // to the children.
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

  // Runs steps until the group ends. Call it after Agree, on a separate thread.
  absl::Status Run(worker::Executor* executor) {
    return worker::RunSteps(follower_.get(), executor);
  }
  // Asks the leader to drain. May be called from any thread after Join.
  void AskDrain() { follower_->AskDrain(); }
  void Abort(const absl::Status& why) { follower_->Abort(why); }
  // The reason why the group has failed; OK if it runs or was drained.
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
