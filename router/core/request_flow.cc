#include "router/core/request_flow.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"

namespace kvasir::router {

using kvasir::v1::GenerateEvent;

namespace {

// A client resets its call at its deadline. The router's deadline may be a
// little later, because the router counts the time from the call's
// arrival. So a reset this shortly before the router's deadline counts as
// a passed deadline.
constexpr absl::Duration kDeadlineTolerance = absl::Milliseconds(100);

absl::Status DeadlinePassed() {
  return absl::DeadlineExceededError("the request's deadline passed");
}

// A request that this many workers died of is not sent to another one.
constexpr int kMaxLostWorkers = 2;

// Returns true if another replica may succeed: the worker was lost, full or
// draining, and did not find fault with the request itself.
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

const char* MoveStreamsName(MoveStreams moves) {
  switch (moves) {
    case MoveStreams::kOff:
      return "off";
    case MoveStreams::kExact:
      return "exact";
    case MoveStreams::kRounding:
      return "rounding";
  }
  return "unknown";
}

MoveStreams MovesFrom(MoveStreams allowed, const kvasir::v1::WorkerInfo& info) {
  const bool exact = info.device() == "cpu" && !info.lifts_prompts();
  if (exact && allowed != MoveStreams::kOff) return MoveStreams::kExact;
  return allowed == MoveStreams::kRounding ? allowed : MoveStreams::kOff;
}

const char* MoveReasonName(MoveReason reason) {
  switch (reason) {
    case MoveReason::kLost:
      return "lost";
    case MoveReason::kHung:
      return "hung";
    case MoveReason::kDrained:
      return "drained";
    case MoveReason::kAborted:
      return "aborted";
    case MoveReason::kRefused:
      return "refused";
  }
  return "unknown";
}

RequestFlow::RequestFlow(CanonicalRequest request, std::string id,
                         int max_attempts, absl::Time now)
    : request_(std::move(request)),
      id_(std::move(id)),
      max_attempts_(max_attempts),
      start_(now),
      waits_since_(now),
      samples_(request_.sampling.n()) {}

bool RequestFlow::Cancel(CancelReason reason, absl::Time now) {
  if (cancel_reason_.has_value()) return false;
  cancel_reason_ = reason;
  cancelled_at_deadline_ = reason == CancelReason::kClient &&
                           request_.deadline <= now + kDeadlineTolerance;
  return true;
}

void RequestFlow::OnAttempt(const std::string& replica, absl::Time now,
                            MoveStreams moves, uint64_t connection) {
  ++attempts_;
  moves_ = moves;
  attempt_began_ = false;
  left_ = false;
  blamed_ = false;
  tried_.push_back({replica, connection});
  if (!ContinuesFromTokens()) {
    for (Sample& sample : samples_) sample.to_repeat = sample.num_tokens();
  }
  first_attempt_ = std::min(first_attempt_, now);
}

bool RequestFlow::Tried(const std::string& replica, uint64_t connection) const {
  return std::any_of(tried_.begin(), tried_.end(), [&](const Asked& asked) {
    return asked.replica == replica && asked.connection == connection;
  });
}

bool RequestFlow::Leave(bool blamed, absl::Time now) {
  if (left_ || cancelled() || !breach_.ok()) return false;
  const int lost_workers = lost_workers_ + (blamed && attempt_began_ ? 1 : 0);
  if (!Retryable(absl::UnavailableError(""), lost_workers, now)) return false;
  left_ = true;
  blamed_ = blamed;
  return true;
}

RequestFlow::Delivery RequestFlow::OnEvent(const GenerateEvent& event,
                                           absl::Time now) {
  if (cancelled() || !breach_.ok()) return {};
  attempt_began_ = true;
  switch (event.event_case()) {
    case GenerateEvent::kAccepted: {
      // After a retry, the client already knows that its request was accepted.
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

absl::Status RequestFlow::TakeRepeated(absl::Span<const int32_t> ids,
                                       Sample* sample) {
  std::string repeated;
  proto::AppendTokenBytes(ids, &repeated);
  const size_t at =
      static_cast<size_t>(sample->num_tokens() - sample->to_repeat) *
      proto::kBytesPerTokenId;
  if (sample->emitted.compare(at, repeated.size(), repeated) != 0) {
    return absl::InternalError(
        "the request was repeated on another worker of the same model and "
        "plan, which generated other tokens");
  }
  sample->to_repeat -= ids.size();
  return absl::OkStatus();
}

RequestFlow::Delivery RequestFlow::OnTokens(const GenerateEvent::Tokens& tokens,
                                            absl::Time now) {
  Delivery delivery;
  Sample* const sample = RunningSample(tokens.index());
  if (sample == nullptr) return delivery;
  const auto all = absl::MakeConstSpan(tokens.token_ids());
  delivery.repeated_tokens = std::min<uint64_t>(sample->to_repeat, all.size());
  breach_ = TakeRepeated(all.first(delivery.repeated_tokens), sample);
  const auto ids = all.subspan(delivery.repeated_tokens);
  const uint64_t num_tokens = sample->num_tokens() + ids.size();
  if (num_tokens > request_.sampling.max_tokens()) {
    breach_ = absl::InternalError(absl::StrCat(
        "the worker sent ", num_tokens, " tokens of sample ", tokens.index(),
        ", but max_tokens is ", request_.sampling.max_tokens()));
  }
  if (!breach_.ok()) {
    delivery.reset_attempt = true;
    return delivery;
  }
  if (ids.empty()) return delivery;
  proto::AppendTokenBytes(ids, &sample->emitted);
  delivery.deliver = true;
  delivered_ = true;
  output_tokens_ += static_cast<uint32_t>(ids.size());
  if (request_.bytes != nullptr) {
    request_.bytes->Grow(ids.size() * proto::kBytesPerTokenId);
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
  // If the sample was aborted, the worker did this by itself, because the
  // router has not cancelled the request. Ignore the event. The end of the
  // stream will then count as too early.
  if (sample == nullptr || !IsComplete(finish.reason())) return delivery;
  if (sample->to_repeat > 0) {
    breach_ = absl::InternalError(absl::StrCat(
        "the worker generated sample ", finish.index(), " again and ended it ",
        sample->to_repeat, " tokens earlier than the worker before it"));
    delivery.reset_attempt = true;
    return delivery;
  }
  sample->finished = true;
  cached_tokens_ = std::max(cached_tokens_, finish.cached_tokens());
  if (finish.index() == 0) finish_reason_ = finish.reason();
  delivery.deliver = true;
  delivered_ = true;
  return delivery;
}

std::optional<absl::Duration> RequestFlow::QueueTimeoutLeft(
    absl::Time now) const {
  if (request_.queue_timeout <= absl::ZeroDuration() || delivered_) {
    return std::nullopt;
  }
  return start_ + request_.queue_timeout - now;
}

bool RequestFlow::TimedOut(absl::Time now) const {
  const auto left = QueueTimeoutLeft(now);
  return left.has_value() && *left <= absl::ZeroDuration() && !delivered_;
}

bool RequestFlow::Retryable(const absl::Status& status, int lost_workers,
                            absl::Time now) const {
  if (attempts_ >= static_cast<uint32_t>(max_attempts_)) return false;
  if (delivered_ && !request_.folded && !StreamMoves()) return false;
  if (lost_workers >= kMaxLostWorkers) return false;
  if (request_.deadline <= now) return false;
  return MayRunElsewhere(status);
}

MoveReason RequestFlow::ReasonOf(const absl::Status& status) const {
  if (left_) return MoveReason::kHung;
  if (status.ok()) return MoveReason::kAborted;
  const auto refusal = proto::RefusalOf(status);
  if (!refusal.has_value()) return MoveReason::kLost;
  return refusal->reason() == kvasir::v1::Refusal::DRAINING
             ? MoveReason::kDrained
             : MoveReason::kRefused;
}

bool RequestFlow::ContinuesFromTokens() const {
  return samples_.size() == 1 && !request_.sampling.has_prompt_logprobs();
}

std::optional<absl::Status> RequestFlow::OnAttemptDone(
    const absl::Status& status, absl::Time now) {
  if (cancelled()) return CancelledStatus();
  if (!breach_.ok()) return breach_;
  absl::Status end = status;
  const bool transport =
      absl::IsCancelled(end) ||
      (absl::IsUnavailable(end) && !proto::RefusalOf(end).has_value());
  const bool complete =
      std::all_of(samples_.begin(), samples_.end(),
                  [](const Sample& sample) { return sample.finished; });
  if (complete && (end.ok() || transport || MayRunElsewhere(end) ||
                   absl::IsDeadlineExceeded(end))) {
    return absl::OkStatus();
  }
  if (end.ok()) {
    end = absl::UnavailableError("the worker ended the stream early");
  } else if (transport) {
    // The call to the worker has the request's deadline. At the deadline, the
    // transport ends the call: with CANCELLED, or with UNAVAILABLE if the
    // worker is closing the connection. Before the deadline, these codes mean
    // that the worker has reset the call or is lost.
    end = request_.deadline <= now
              ? DeadlinePassed()
              : absl::UnavailableError(left_ ? "the worker hangs"
                                       : absl::IsCancelled(end)
                                           ? "the worker reset the stream"
                                           : "the worker is lost");
  }
  // A worker sends the same refusal for a request that has waited too long and
  // for a full queue. If the client's own timeout has passed, return the
  // timeout's error in both cases.
  if (TimedOut(now) && MayRunElsewhere(end)) {
    return Admission::TimedOut(request_);
  }
  move_reason_ = ReasonOf(status);
  lost_ = absl::IsUnavailable(end) && !proto::RefusalOf(end).has_value();
  // A worker that was only silent may be asked again when it has reported.
  if (left_ && !blamed_) tried_.back().connection = kNoConnection;
  if (lost_ && attempt_began_ && (!left_ || blamed_)) ++lost_workers_;
  waits_since_ = now;
  const bool retry = Retryable(end, lost_workers_, now);
  // The client of a stream has lost its worker, whatever the reason why another
  // one does not continue.
  if (delivered_ && !request_.folded && !attempt_began_ &&
      !absl::IsDeadlineExceeded(end)) {
    end = absl::UnavailableError("the worker is lost");
  }
  last_error_ = end;
  if (retry) return std::nullopt;
  return end;
}

absl::Status RequestFlow::NoReplica(const absl::Status& otherwise) const {
  if (cancelled()) return CancelledStatus();
  if (last_error_.ok() || absl::IsDeadlineExceeded(otherwise)) return otherwise;
  return last_error_;
}

absl::Status RequestFlow::CancelledStatus() const {
  switch (cancel_reason_.value_or(CancelReason::kClient)) {
    case CancelReason::kClient:
      if (cancelled_at_deadline_) break;
      return absl::CancelledError("cancelled by the client");
    case CancelReason::kStopString:
      return absl::CancelledError("a stop string matched");
    case CancelReason::kSlowReader:
      return absl::CancelledError("the client reads too slowly");
    case CancelReason::kShutdown:
      return Admission::ShuttingDown();
  }
  return DeadlinePassed();
}

std::string RequestFlow::FinishReasonName(const absl::Status& status) const {
  if (status.ok()) {
    return finish_reason_ == kvasir::v1::FINISH_STOP ? "stop" : "length";
  }
  if (cancelled()) {
    switch (*cancel_reason_) {
      case CancelReason::kClient:
        return cancelled_at_deadline_ ? "deadline" : "cancelled";
      case CancelReason::kStopString:
        return "stop";
      case CancelReason::kSlowReader:
        return "slow_reader";
      case CancelReason::kShutdown:
        return "shutdown";
    }
  }
  if (absl::IsDeadlineExceeded(status)) return "deadline";
  if (attempts_ == 0 || proto::RefusalOf(status).has_value()) return "refused";
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
  if (!tried_.empty()) record.replica = tried_.back().replica;
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
