#include "router/core/admission.h"

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"

namespace kvasir::router {

Admission::Answer Admission::Enter(Ticket ticket, int32_t priority) {
  // Who waits goes first, even where a place is free.
  if (in_flight_ < limits_.max_in_flight && waiting_.empty()) {
    ++in_flight_;
    return Answer::kRun;
  }
  if (waiting_.size() >= limits_.max_queue) return Answer::kRefuse;
  const Place place{priority, arrivals_++};
  waiting_.emplace(place, ticket);
  places_.emplace(ticket, place);
  return Answer::kWait;
}

std::vector<Ticket> Admission::Leave() {
  --in_flight_;
  std::vector<Ticket> admitted;
  while (in_flight_ < limits_.max_in_flight && !waiting_.empty()) {
    const auto first = waiting_.begin();
    admitted.push_back(first->second);
    places_.erase(first->second);
    waiting_.erase(first);
    ++in_flight_;
  }
  return admitted;
}

bool Admission::Withdraw(Ticket ticket) {
  const auto found = places_.find(ticket);
  if (found == places_.end()) return false;
  waiting_.erase(found->second);
  places_.erase(found);
  return true;
}

absl::Status Admission::RefusedStatus() const {
  return proto::RefusedError(
      kvasir::v1::Refusal::RETRY_ELSEWHERE,
      absl::StrCat("the router is full: ", in_flight_, " requests run of ",
                   limits_.max_in_flight, ", ", waiting_.size(), " wait of ",
                   limits_.max_queue, " (--max-inflight)"));
}

}  // namespace kvasir::router
