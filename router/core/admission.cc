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
  // If other requests wait, the new one waits too, even if there is a free
  // place, because it must not overtake them.
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
                     " wait"));
  }
  Wait(ticket, priority);
  return Answer::kWait;
}

Admission::Answer Admission::Return(Ticket ticket, int32_t priority) {
  if (in_flight_ < limits_.max_in_flight) {
    ++in_flight_;
    return Answer::kRun;
  }
  Wait(ticket, priority);
  return Answer::kWait;
}

void Admission::Wait(Ticket ticket, int32_t priority) {
  const Place place{priority, ticket};
  waiting_.emplace(place, ticket);
  places_.emplace(ticket, place);
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
                     "together may have at most ", info.max_model_len()));
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
                                          const Waiting& waiting,
                                          absl::Duration ours,
                                          const absl::Status& then) {
  const bool own =
      request.queue_timeout > absl::ZeroDuration() && !waiting.begun;
  const absl::Time expiry =
      own ? waiting.arrival + request.queue_timeout : waiting.since + ours;
  if (request.deadline < expiry) {
    return {request.deadline,
            absl::DeadlineExceededError(
                "the request's deadline passed in the router's queue")};
  }
  return {expiry, own ? TimedOut(request) : then};
}

absl::Status Admission::WaitedTooLong(absl::Duration queue_timeout) {
  return proto::RefusedError(
      Refusal::RETRY_ELSEWHERE,
      absl::StrCat("the request has waited for ",
                   absl::FormatDuration(queue_timeout),
                   ", the longest time allowed, in the router's queue"));
}

absl::Status Admission::TimedOut(const CanonicalRequest& request) {
  return absl::DeadlineExceededError(
      absl::StrCat("the request's own timeout of ",
                   absl::FormatDuration(request.queue_timeout),
                   " passed before its first token"));
}

absl::Status Admission::Unreached(const std::string& model) {
  return absl::UnavailableError(
      absl::StrCat("model ", model, ": no worker has been reached yet"));
}

absl::Status Admission::ShuttingDown() {
  return proto::RefusedError(Refusal::DRAINING, "the server is shutting down");
}

absl::Status Admission::NoReplica(const std::string& model, bool all_drain) {
  if (all_drain) {
    return proto::RefusedError(
        Refusal::DRAINING,
        absl::StrCat("model ", model, ": every replica is draining"));
  }
  return absl::UnavailableError(
      absl::StrCat("model ", model, ": no replica is ready"));
}

}  // namespace kvasir::router
