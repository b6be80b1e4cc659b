#include "worker/engine/admission.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

Refusal Admission::OfRequest(const Request& request) const {
  absl::Status valid = ValidateRequest(request, limits_);
  if (valid.ok()) return {};
  const bool too_long = request.prompt.size_tokens() >= limits_.max_model_len;
  return {std::move(valid),
          too_long ? RefusalReason::kNeverFits : RefusalReason::kNone};
}

Refusal Admission::OfPlace(const Request& request, const Place& place) const {
  if (place.is_live) {
    return {absl::AlreadyExistsError(
                absl::StrCat("request ", request.request_id, ", attempt ",
                             request.attempt, " is live")),
            RefusalReason::kNone};
  }
  if (place.num_queued >= max_queue_ && !place.starts_at_once) {
    return {absl::ResourceExhaustedError(absl::StrCat(
                place.num_queued, " requests wait, the limit is ", max_queue_)),
            RefusalReason::kRetryElsewhere};
  }
  return {};
}

Refusal Admission::OfState(Serving serving) {
  switch (serving) {
    case Serving::kRunning:
      return {};
    case Serving::kStarting:
      return {absl::UnavailableError("the engine is not ready"),
              RefusalReason::kRetryElsewhere};
    case Serving::kDraining:
      return {absl::UnavailableError("the engine is draining"),
              RefusalReason::kDraining};
    case Serving::kStopped:
      return {absl::UnavailableError("the engine has stopped"),
              RefusalReason::kRetryElsewhere};
    case Serving::kFailed:
      return {absl::UnavailableError("the executor failed"),
              RefusalReason::kRetryElsewhere};
  }
  return {};
}

Refusal Admission::TooManySamples(uint32_t n, uint32_t max_num_seqs) {
  return {absl::InvalidArgumentError(absl::StrCat(
              "n is ", n, ", want at most max_num_seqs ", max_num_seqs)),
          RefusalReason::kNeverFits};
}

Refusal Admission::DeadlinePassed(bool started) {
  return {absl::DeadlineExceededError(absl::StrCat(
              "deadline passed ", started ? "while running" : "in the queue")),
          RefusalReason::kNone};
}

Refusal Admission::QueueTimeout(const Request& request, absl::Duration waited) {
  const std::string message = absl::StrCat(
      "not started within the queue timeout, ", absl::FormatDuration(waited));
  if (request.queue_timeout != absl::ZeroDuration()) {
    return {absl::DeadlineExceededError(message), RefusalReason::kNone};
  }
  return {absl::ResourceExhaustedError(message),
          RefusalReason::kRetryElsewhere};
}

Refusal Admission::NoTokenLeft() {
  return {absl::InvalidArgumentError(
              "no token may be sampled: the request's token mask and bans "
              "leave none"),
          RefusalReason::kNone};
}

}  // namespace kvasir::worker
