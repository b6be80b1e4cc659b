#include "worker/testing/thread_agreement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "model/checkpoint/weight_tiles.h"

namespace kvasir::worker {

ThreadAgreement::ThreadAgreement(int64_t size)
    : offers_(static_cast<size_t>(size)) {}

std::function<absl::StatusOr<RankAgreement>(const RankOffer&)>
ThreadAgreement::Of(int64_t rank) {
  return [this, rank](const RankOffer& offer) {
    return Agree(static_cast<size_t>(rank), offer);
  };
}

std::vector<RankOffer> ThreadAgreement::offers() const {
  base::MutexLock lock(&mutex_);
  std::vector<RankOffer> offers;
  for (const auto& offer : offers_) offers.push_back(*offer);
  return offers;
}

absl::StatusOr<RankAgreement> ThreadAgreement::Agree(size_t rank,
                                                     const RankOffer& offer) {
  base::MutexLock lock(&mutex_);
  offers_[rank] = offer;
  offered_.SignalAll();
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  const auto missing = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(offers_.begin(), offers_.end(),
                       [](const auto& other) { return !other.has_value(); });
  };
  while (missing()) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", rank,
          " has waited a minute for the offers of the other ranks"));
    }
    offered_.WaitWithTimeout(&mutex_, left);
  }
  RankAgreement agreed = {.pages = offer.pages, .host_pages = offer.host_pages};
  std::vector<std::string> tiles;
  for (const auto& other : offers_) {
    for (size_t i = 0; i < agreed.pages.size(); ++i) {
      agreed.pages[i] = std::min(agreed.pages[i], other->pages[i]);
    }
    for (size_t i = 0; i < agreed.host_pages.size(); ++i) {
      agreed.host_pages[i] =
          std::min(agreed.host_pages[i], other->host_pages[i]);
    }
    tiles.push_back(other->weight_tiles);
  }
  KVASIR_ASSIGN_OR_RETURN(agreed.weights_id, model::CombineWeightTiles(tiles));
  return agreed;
}

}  // namespace kvasir::worker
