// A tensor-parallel group whose ranks are threads of this process. They use
// Gloo on loopback like ranks in separate processes, but no processes must be
// started.
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

// Owns: the collectives. Destroy their users first.
// Threads: OnRanks and totals must be called from one thread; ranks run only
// during OnRanks. member(r) must be used on the thread of rank r.
class ThreadGroup {
 public:
  // `size` is at least 2.
  explicit ThreadGroup(int64_t size);
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  // The membership of a rank, for LoadRequest::group. The process must ignore
  // SIGPIPE.
  Membership& member(int64_t rank) {
    return members_[static_cast<size_t>(rank)];
  }

  // Runs body(rank) on one thread per rank and returns when all have returned.
  // The first failure ends the group; this call and all later ones return it,
  // with the rank's number.
  absl::Status OnRanks(absl::FunctionRef<absl::Status(int64_t rank)> body);

  // The totals of a rank's collective; the rank must have joined.
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

  // Exchanges values between the ranks: contributes `own` and returns the
  // contributions of all ranks, by rank.
  template <typename T>
  absl::StatusOr<std::vector<T>> Exchange(
      int64_t rank, T own, std::vector<std::optional<T>> ThreadGroup::*shown)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the group; only the first reason is kept.
  void End(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  std::deque<Member> members_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<std::string>> addresses_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<worker::RankOffer>> offers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
