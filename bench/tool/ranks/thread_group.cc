#include "bench/tool/ranks/thread_group.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/load/collective_group.h"

namespace kvasir::cli {
namespace {

// Reduces each page group's count in `least` to the offered count if that is
// smaller.
void TakeLeast(const cache::PageCounts& offered, cache::PageCounts* least) {
  for (size_t group = 0; group < least->size(); ++group) {
    (*least)[group] = std::min((*least)[group], offered[group]);
  }
}

}  // namespace

ThreadGroup::ThreadGroup(int64_t size)
    : addresses_(static_cast<size_t>(size)),
      offers_(static_cast<size_t>(size)) {
  for (int64_t rank = 0; rank < size; ++rank) {
    members_.emplace_back(this, rank);
  }
}

absl::Status ThreadGroup::OnRanks(
    absl::FunctionRef<absl::Status(int64_t rank)> body) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size(); ++rank) {
    threads.emplace_back([this, body, rank] {
      const absl::Status status = body(rank);
      if (status.ok()) return;
      End(absl::Status(status.code(),
                       absl::StrCat("rank ", rank, ": ", status.message())));
    });
  }
  for (std::thread& thread : threads) thread.join();
  base::MutexLock lock(&mutex_);
  return ended_;
}

worker::CollectiveTotals ThreadGroup::totals(int64_t rank) const {
  return members_[static_cast<size_t>(rank)].collective().totals();
}

void ThreadGroup::End(const absl::Status& why) {
  {
    base::MutexLock lock(&mutex_);
    if (!ended_.ok()) return;
    ended_ = why;
    changed_.SignalAll();
  }
  for (Member& member : members_) member.Abort(why);
}

template <typename T>
absl::StatusOr<std::vector<T>> ThreadGroup::Exchange(
    int64_t rank, T own, std::vector<std::optional<T>> ThreadGroup::*shown) {
  base::MutexLock lock(&mutex_);
  (this->*shown)[static_cast<size_t>(rank)] = std::move(own);
  changed_.SignalAll();
  std::vector<T> all;
  // Waits for all ranks. A rank that does not contribute has failed, which ends
  // the group.
  while (ended_.ok()) {
    all.clear();
    for (const std::optional<T>& each : this->*shown) {
      if (each.has_value()) all.push_back(*each);
    }
    if (static_cast<int64_t>(all.size()) == size()) return all;
    changed_.Wait(&mutex_);
  }
  return ended_;
}

absl::StatusOr<worker::Collective*> ThreadGroup::Member::Join(
    const GroupTerms& terms) {
  combine_ = terms.combine;
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<CollectiveGroup> joining,
      CollectiveGroup::Begin({.shard = shard(), .kind = "gloo"}));
  std::string address = joining->address();
  collective_.Begin(std::move(joining));
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<std::string> addresses,
      group_->Exchange(rank_, std::move(address), &ThreadGroup::addresses_));
  KVASIR_RETURN_IF_ERROR(collective_.Connect(addresses));
  return collective_.get();
}

absl::StatusOr<worker::RankAgreement> ThreadGroup::Member::Agree(
    const worker::RankOffer& offer) {
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<worker::RankOffer> offers,
      group_->Exchange(rank_, offer, &ThreadGroup::offers_));
  worker::RankAgreement agreed = {.pages = offer.pages,
                                  .host_pages = offer.host_pages};
  std::vector<std::string> tiles;
  for (const worker::RankOffer& other : offers) {
    TakeLeast(other.pages, &agreed.pages);
    TakeLeast(other.host_pages, &agreed.host_pages);
    tiles.push_back(other.weight_tiles);
  }
  KVASIR_ASSIGN_OR_RETURN(worker::CombinedIds ids, combine_(tiles));
  agreed.weights_id = std::move(ids.weights_id);
  agreed.cache_id = std::move(ids.cache_id);
  return agreed;
}

}  // namespace kvasir::cli
