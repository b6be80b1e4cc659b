#include "router/core/admission.h"

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"

namespace kvasir::router {

using kvasir::v1::Refusal;

absl::StatusOr<Admission::Answer> Admission::Enter(Ticket ticket,
                                                   int32_t priority) {
  if (draining_) {
    return proto::RefusedError(Refusal::DRAINING, "the router is draining");
  }
  // A new request must not run before the waiting ones, even if there is a free
  // place.
  if (in_flight_ < limits_.max_in_flight && waiting_.empty()) {
    ++in_flight_;
    return Answer::kRun;
  }
  if (waiting_.size() >= limits_.max_queue) {
    return proto::RefusedError(
        Refusal::RETRY_ELSEWHERE,
        absl::StrCat("the router is full: ", in_flight_, " of at most ",
                     limits_.max_in_flight, " requests run and ",
                     waiting_.size(), " of at most ", limits_.max_queue,
                     " wait (--max-inflight)"));
  }
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

absl::Status Admission::CheckRequest(const CanonicalRequest& request,
                                     const kvasir::v1::WorkerInfo& info,
                                     uint32_t max_n, absl::Time now) {
  const size_t prompt = request.prompt.size_tokens();
  if (prompt == 0) return absl::InvalidArgumentError("the prompt is empty");
  if (prompt >= info.max_model_len()) {
    return proto::RefusedError(
        Refusal::NEVER_FITS,
        absl::StrCat("the prompt has ", prompt, " tokens; prompt and output ",
                     "together may have ", info.max_model_len(),
                     " (--max-model-len)"));
  }
  const uint32_t n = request.sampling.n();
  if (const uint32_t limit = LargestN(info, max_n); n == 0 || n > limit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "n (the number of samples) is ", n, ", want 1 to ", limit));
  }
  if (request.deadline <= now) {
    return absl::DeadlineExceededError(
        "the request's deadline had already passed when it arrived");
  }
  return absl::OkStatus();
}

Admission::Patience Admission::PatienceOf(const CanonicalRequest& request,
                                          std::optional<absl::Duration> own,
                                          absl::Duration ours, absl::Time now) {
  const absl::Time expiry = now + own.value_or(ours);
  if (request.deadline < expiry) {
    return {request.deadline,
            absl::DeadlineExceededError(
                "the request's deadline passed in the router's queue")};
  }
  if (own.has_value()) return {expiry, TimedOut(request)};
  return {expiry,
          proto::RefusedError(
              Refusal::RETRY_ELSEWHERE,
              absl::StrCat(
                  "the request waited ", absl::FormatDuration(ours),
                  " in the router's queue, the limit of --queue-timeout"))};
}

absl::Status Admission::TimedOut(const CanonicalRequest& request) {
  return absl::DeadlineExceededError(
      absl::StrCat("the request's own timeout of ",
                   absl::FormatDuration(request.queue_timeout),
                   " passed before its first token"));
}

absl::Status Admission::Unreached(const std::string& model,
                                  absl::string_view problems) {
  return absl::UnavailableError(absl::StrCat("model ", model, ": ", problems));
}

absl::Status Admission::ShuttingDown() {
  return proto::RefusedError(Refusal::DRAINING, "the server is shutting down");
}

absl::Status Admission::NoReplica(const std::string& model, bool all_drain,
                                  absl::string_view problems) {
  if (all_drain) {
    return proto::RefusedError(
        Refusal::DRAINING,
        absl::StrCat("model ", model, ": every replica is draining"));
  }
  return absl::UnavailableError(
      absl::StrCat("model ", model, ": no replica is ready: ", problems));
}

}  // namespace kvasir::router
