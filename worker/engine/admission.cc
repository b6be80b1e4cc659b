#include "worker/engine/admission.h"

#include "absl/strings/str_cat.h"
#include "base/string_view.h"

namespace kvasir::worker {

using base::AbslView;

Refusal Admission::CheckRequest(const Request& request) const {
  const size_t prompt = request.prompt.size_tokens();
  if (prompt >= limits_.max_model_len) {
    return {
        absl::InvalidArgumentError(absl::StrCat(
            "prompt has ", prompt, " tokens, want at most max_model_len - 1 = ",
            int64_t{limits_.max_model_len} - 1)),
        kvasir::v1::Refusal::NEVER_FITS};
  }
  return {ValidateRequest(request, limits_),
          kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
}

Refusal Admission::CheckWeights(std::string_view want, std::string_view have) {
  if (want.empty() || want == have) return {};
  // This happens if the worker at this address was replaced and the router does
  // not know it yet.
  return {absl::UnavailableError(
              absl::StrCat("weights_id: this worker has ", AbslView(have),
                           ", the request wants ", AbslView(want))),
          kvasir::v1::Refusal::RETRY_ELSEWHERE};
}

Refusal Admission::CheckPlace(const Request& request,
                              const Place& place) const {
  if (place.is_live) {
    return {absl::AlreadyExistsError(
                absl::StrCat("request ", request.request_id, ", attempt ",
                             request.attempt, " is already queued or running")),
            kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
  }
  if (place.num_queued >= max_queue_ && !place.starts_at_once) {
    return {absl::ResourceExhaustedError(absl::StrCat(
                place.num_queued, " requests are queued, the limit is ",
                max_queue_)),
            kvasir::v1::Refusal::RETRY_ELSEWHERE};
  }
  return {};
}

Refusal Admission::CheckState(Serving serving) {
  switch (serving) {
    case Serving::kRunning:
      return {};
    case Serving::kStarting:
      return {absl::UnavailableError("the engine is not ready"),
              kvasir::v1::Refusal::RETRY_ELSEWHERE};
    case Serving::kDraining:
      return {absl::UnavailableError("the engine is draining"),
              kvasir::v1::Refusal::DRAINING};
    case Serving::kStopped:
      return {absl::UnavailableError("the engine has stopped"),
              kvasir::v1::Refusal::RETRY_ELSEWHERE};
    case Serving::kFailed:
      return {absl::UnavailableError("the executor failed"),
              kvasir::v1::Refusal::RETRY_ELSEWHERE};
  }
  return {};
}

Refusal Admission::DeadlinePassed(bool started) {
  return {absl::DeadlineExceededError(absl::StrCat(
              "deadline passed ", started ? "while running" : "in the queue")),
          kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
}

Refusal Admission::QueueTimeout(const Request& request, absl::Duration waited) {
  const std::string message = absl::StrCat(
      "not started within the queue timeout, ", absl::FormatDuration(waited));
  if (request.queue_timeout != absl::ZeroDuration()) {
    return {absl::DeadlineExceededError(message),
            kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
  }
  return {absl::ResourceExhaustedError(message),
          kvasir::v1::Refusal::RETRY_ELSEWHERE};
}

Refusal Admission::NoTokenLeft() {
  return {absl::InvalidArgumentError(
              "no token can be sampled: the request's token mask and banned "
              "tokens exclude all of them"),
          kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
}

Refusal Admission::DrainEnded() {
  return {absl::UnavailableError(
              "the drain's deadline passed before the request ended"),
          kvasir::v1::Refusal::DRAINING};
}

Refusal Admission::EngineStopped() {
  return {absl::UnavailableError("the engine was stopped"),
          kvasir::v1::Refusal::DRAINING};
}

Refusal Admission::ExecutorFailed(const absl::Status& why) {
  return {absl::UnavailableError(
              absl::StrCat("the executor failed: ", why.ToString())),
          kvasir::v1::Refusal::RETRY_ELSEWHERE};
}

}  // namespace kvasir::worker
