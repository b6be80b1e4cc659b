#include "router/core/request_flow.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"
#include "router/core/admission.h"

namespace kvasir::router {

using kvasir::v1::GenerateEvent;

namespace {

// Returns true if another replica may succeed: the worker was lost, full or
// draining, and did not object to the request itself.
bool MayRunElsewhere(const absl::Status& status) {
  if (const auto refusal = proto::RefusalOf(status)) {
    return refusal->reason() == kvasir::v1::Refusal::RETRY_ELSEWHERE ||
           refusal->reason() == kvasir::v1::Refusal::DRAINING;
  }
  return absl::IsUnavailable(status);
}

// Returns true if the sample ended at a stop condition or at its maximum
// length, and not for another reason.
bool IsComplete(kvasir::v1::FinishReason reason) {
  return reason == kvasir::v1::FINISH_STOP ||
         reason == kvasir::v1::FINISH_LENGTH;
}

}  // namespace

RequestFlow::RequestFlow(CanonicalRequest request, std::string id,
                         int max_attempts, absl::Time now)
    : request_(std::move(request)),
      id_(std::move(id)),
      max_attempts_(max_attempts),
      start_(now),
      samples_(request_.sampling.n()) {}

bool RequestFlow::Cancel(CancelReason reason) {
  if (cancel_reason_.has_value()) return false;
  cancel_reason_ = reason;
  return true;
}

void RequestFlow::OnAttempt(const std::string& replica, absl::Time now) {
  ++attempts_;
  tried_.push_back(replica);
  first_attempt_ = std::min(first_attempt_, now);
}

RequestFlow::Delivery RequestFlow::OnEvent(const GenerateEvent& event,
                                           absl::Time now) {
  if (cancelled() || !breach_.ok()) return {};
  switch (event.event_case()) {
    case GenerateEvent::kAccepted: {
      // Only the first acceptance is delivered; after a retry the client
      // already knows of it.
      Delivery delivery;
      delivery.deliver = !accepted_;
      accepted_ = true;
      return delivery;
    }
    case GenerateEvent::kTokens:
      return OnTokens(event.tokens(), now);
    case GenerateEvent::kFinish:
      return OnFinish(event.finish());
    case GenerateEvent::EVENT_NOT_SET:
      break;  // an event that this version does not know
  }
  return {};
}

RequestFlow::Sample* RequestFlow::RunningSample(uint32_t index) {
  if (index >= samples_.size() || samples_[index].finished) return nullptr;
  return &samples_[index];
}

RequestFlow::Delivery RequestFlow::OnTokens(const GenerateEvent::Tokens& tokens,
                                            absl::Time now) {
  Delivery delivery;
  Sample* const sample = RunningSample(tokens.index());
  const auto& ids = tokens.token_ids();
  if (sample == nullptr || ids.empty()) return delivery;
  sample->num_tokens += static_cast<uint64_t>(ids.size());
  if (sample->num_tokens > request_.sampling.max_tokens()) {
    breach_ = absl::InternalError(
        absl::StrCat("worker ", tried_.back(), " sent ", sample->num_tokens,
                     " tokens of sample ", tokens.index(),
                     ", but max_tokens is ", request_.sampling.max_tokens()));
    delivery.reset_attempt = true;
    return delivery;
  }
  delivery.deliver = true;
  delivered_ = true;
  output_tokens_ += static_cast<uint32_t>(ids.size());
  if (request_.bytes != nullptr) {
    request_.bytes->Grow(static_cast<size_t>(ids.size()) *
                         proto::kBytesPerTokenId);
  }
  if (samples_.size() == 1) {
    proto::AppendTokenBytes(
        absl::MakeConstSpan(ids.data(), static_cast<size_t>(ids.size())),
        &emitted_);
  }
  if (first_token_ == absl::InfiniteFuture()) {
    first_token_ = now;
    delivery.time_to_first_token = now - start_;
  } else if (sample->last_tokens != absl::InfinitePast()) {
    delivery.inter_token = now - sample->last_tokens;
  }
  sample->last_tokens = now;
  return delivery;
}

RequestFlow::Delivery RequestFlow::OnFinish(
    const GenerateEvent::Finish& finish) {
  Delivery delivery;
  Sample* const sample = RunningSample(finish.index());
  // The router has not cancelled the request. If the sample was aborted, the
  // worker did so: the event is ignored, and the end of the stream then counts
  // as too early.
  if (sample == nullptr || !IsComplete(finish.reason())) return delivery;
  sample->finished = true;
  cached_tokens_ = std::max(cached_tokens_, finish.cached_tokens());
  if (finish.index() == 0) finish_reason_ = finish.reason();
  delivery.deliver = true;
  delivered_ = true;
  return delivery;
}

std::optional<absl::Duration> RequestFlow::QueueTimeoutLeft(
    absl::Time now) const {
  if (request_.queue_timeout <= absl::ZeroDuration()) return std::nullopt;
  return start_ + request_.queue_timeout - now;
}

bool RequestFlow::TimedOut(absl::Time now) const {
  const auto left = QueueTimeoutLeft(now);
  return left.has_value() && *left <= absl::ZeroDuration() && !delivered_;
}

bool RequestFlow::Retryable(const absl::Status& status, absl::Time now) const {
  if (attempts_ >= static_cast<uint32_t>(max_attempts_)) return false;
  if (delivered_ && !MayContinue()) return false;
  if (request_.deadline <= now) return false;
  return MayRunElsewhere(status);
}

// A new attempt can send the received tokens of only one sample, and the
// prompt's log probabilities come only with the first tokens of an attempt.
bool RequestFlow::MayContinue() const {
  return request_.folded && samples_.size() == 1 && !samples_[0].finished &&
         !request_.sampling.has_prompt_logprobs();
}

std::optional<absl::Status> RequestFlow::OnAttemptDone(
    const absl::Status& status, absl::Time now) {
  if (cancelled()) return CancelledStatus();
  if (!breach_.ok()) return breach_;
  absl::Status end = status;
  const std::string& replica = tried_.back();
  if (end.ok()) {
    const bool complete =
        std::all_of(samples_.begin(), samples_.end(),
                    [](const Sample& sample) { return sample.finished; });
    if (complete) return end;
    end = absl::UnavailableError(
        absl::StrCat("worker ", replica,
                     " ended the stream before all samples were finished"));
  } else if (absl::IsCancelled(end) ||
             (absl::IsUnavailable(end) && !proto::RefusalOf(end).has_value())) {
    // The call to the worker has the request's deadline. At the deadline, the
    // transport ends the call: with CANCELLED, or with UNAVAILABLE if the
    // worker is closing the connection. Before the deadline, these codes mean
    // that the worker has reset the call or is lost. The registry logs the
    // transport's own text.
    end = request_.deadline <= now
              ? absl::DeadlineExceededError("the request's deadline passed")
              : absl::UnavailableError(absl::StrCat(
                    "worker ", replica,
                    absl::IsCancelled(end) ? " reset the stream" : " is lost"));
  }
  // A worker uses the same refusal for a request that waited too long and for
  // one for which it has no room. If the client's own timeout has passed, its
  // error is that of the timeout.
  if (TimedOut(now) && MayRunElsewhere(end)) {
    return Admission::TimedOut(request_);
  }
  last_error_ = end;
  if (Retryable(end, now)) return std::nullopt;
  return end;
}

absl::Status RequestFlow::NoReplica(const absl::Status& otherwise) const {
  if (cancelled()) return CancelledStatus();
  return last_error_.ok() ? otherwise : last_error_;
}

absl::Status RequestFlow::CancelledStatus() const {
  switch (cancel_reason_.value_or(CancelReason::kClient)) {
    case CancelReason::kClient:
      return absl::CancelledError("cancelled by the client");
    case CancelReason::kStopString:
      return absl::CancelledError("a stop string matched");
    case CancelReason::kSlowReader:
      return absl::CancelledError("the client reads too slowly");
    case CancelReason::kShutdown:
      return Admission::ShuttingDown();
  }
  return absl::CancelledError("cancelled");
}

std::string RequestFlow::FinishReasonName(const absl::Status& status) const {
  if (status.ok()) {
    return finish_reason_ == kvasir::v1::FINISH_STOP ? "stop" : "length";
  }
  if (cancelled()) {
    switch (*cancel_reason_) {
      case CancelReason::kClient:
        return "cancelled";
      case CancelReason::kStopString:
        return "stop";
      case CancelReason::kSlowReader:
        return "slow_reader";
      case CancelReason::kShutdown:
        return "shutdown";
    }
  }
  if (absl::IsDeadlineExceeded(status)) return "deadline";
  if (proto::RefusalOf(status).has_value()) return "refused";
  if (absl::IsUnavailable(status)) return "lost";
  return "error";
}

AccessRecord RequestFlow::Record(const absl::Status& status,
                                 absl::Time now) const {
  AccessRecord record;
  record.start = start_;
  record.request_id = id_;
  record.client_request_id = request_.client_request_id;
  record.facade = request_.facade;
  record.peer = request_.peer;
  record.tenant = request_.tenant;
  record.caller = request_.caller;
  record.model = request_.model;
  if (!tried_.empty()) record.replica = tried_.back();
  record.prompt_tokens = static_cast<uint32_t>(request_.prompt.size_tokens());
  record.output_tokens = output_tokens_;
  record.cached_tokens = cached_tokens_;
  record.samples = request_.sampling.n();
  record.attempts = attempts_;
  record.queue = first_attempt_ - start_;
  record.time_to_first_token = first_token_ - start_;
  record.duration = now - start_;
  record.finish_reason = FinishReasonName(status);
  record.status = status;
  record.traceparent = request_.traceparent;
  return record;
}

}  // namespace kvasir::router
