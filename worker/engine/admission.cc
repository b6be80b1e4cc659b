#include "worker/engine/admission.h"

#include "absl/strings/str_cat.h"
#include "base/string_view.h"

namespace kvasir::worker {

using base::AbslView;

Refusal Admission::OfRequest(const Request& request) const {
  const size_t prompt = request.prompt.size_tokens();
  if (prompt >= limits_.max_model_len) {
    return {
        absl::InvalidArgumentError(absl::StrCat(
            "prompt has ", prompt, " tokens, want at most max_model_len - 1 = ",
            int64_t{limits_.max_model_len} - 1)),
        RefusalReason::kNeverFits};
  }
  return {ValidateRequest(request, limits_), RefusalReason::kNone};
}

Refusal Admission::OfWeights(std::string_view want, std::string_view have) {
  if (want.empty() || want == have) return {};
  // Its router judged who was behind this address before.
  return {absl::UnavailableError(
              absl::StrCat("weights_id: this worker has ", AbslView(have),
                           ", the request wants ", AbslView(want))),
          RefusalReason::kRetryElsewhere};
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

Refusal Admission::DrainEnded() {
  return {absl::UnavailableError("the drain's deadline has come"),
          RefusalReason::kDraining};
}

Refusal Admission::EngineStopped() {
  return {absl::UnavailableError("the engine was stopped"),
          RefusalReason::kDraining};
}

Refusal Admission::ExecutorFailed(const absl::Status& why) {
  return {absl::UnavailableError(
              absl::StrCat("the executor failed: ", why.ToString())),
          RefusalReason::kRetryElsewhere};
}

}  // namespace kvasir::worker
