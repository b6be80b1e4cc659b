// A tensor-parallel group whose ranks are threads of this process, over Gloo on
// loopback: the sockets of rank processes, and nobody to start or to meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "worker/collective/collective.h"
#include "worker/load/group_collective.h"
#include "worker/load/membership.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

// Owns: the collectives; what uses them goes first.
// Threads: OnRanks and totals from one, between calls of OnRanks no rank runs;
//   member(r) on the thread of rank r.
class ThreadGroup {
 public:
  // Of 2 ranks at least.
  explicit ThreadGroup(int64_t size);
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  // LoadRequest::group of a rank. The process ignores SIGPIPE.
  Membership& member(int64_t rank) {
    return members_[static_cast<size_t>(rank)];
  }

  // body(rank) on a thread for each rank. All have returned when this does: no
  // rank goes while another one is in a call. The first failure ends the group
  // and is returned, by the rank's name, from then on from every call.
  absl::Status OnRanks(absl::FunctionRef<absl::Status(int64_t rank)> body);

  // Of a rank that has joined.
  worker::CollectiveTotals totals(int64_t rank) const;

 private:
  class Member final : public Membership {
   public:
    Member(ThreadGroup* group, int64_t rank) : group_(group), rank_(rank) {}

    plan::TpShard shard() const override {
      return {.rank = rank_, .size = group_->size()};
    }
    LocalShare local() const override {
      return {.index = static_cast<int>(rank_),
              .count = static_cast<int>(group_->size())};
    }
    absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) override;
    absl::StatusOr<worker::RankAgreement> Agree(
        const worker::RankOffer& offer) override;

    const worker::Collective& collective() const { return *collective_.get(); }
    void Abort(const absl::Status& why) { collective_.Abort(why); }

   private:
    ThreadGroup* const group_;
    const int64_t rank_;
    decltype(GroupTerms::combine) combine_;
    GroupCollective collective_;
  };

  // Shows `own` to all, and has what all have shown, by rank.
  template <typename T>
  absl::StatusOr<std::vector<T>> Exchange(
      int64_t rank, T own, std::vector<std::optional<T>> ThreadGroup::*shown)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The first reason is the group's.
  void End(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  std::deque<Member> members_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<std::string>> addresses_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<worker::RankOffer>> offers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
