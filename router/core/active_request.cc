#include "router/core/active_request.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "router/core/request_router.h"

namespace kvasir::router {
void ActiveRequest::Cancel(CancelReason reason) {
  std::shared_ptr<Attempt> attempt;
  absl::Status status;
  {
    base::MutexLock lock(&mutex_);
    if (done_ || !flow_.Cancel(reason, base::Clock::Real().Now())) return;
    attempt = attempt_;
    status = flow_.CancelledStatus();
  }
  if (attempt != nullptr) {
    attempt->Cancel();
    return;
  }
  // Let the timer thread end a waiting request, because Cancel must never
  // call a sink. If the request is just being dispatched, Dispatch sees
  // the cancellation.
  core_->EndWaitingAt(absl::InfinitePast(), shared_from_this(), status);
}

void ActiveRequest::OnEvent(const kvasir::v1::GenerateEvent& event) {
  RequestFlow::Delivery delivery;
  std::shared_ptr<Attempt> attempt;
  int64_t kept_bytes = 0;
  {
    base::MutexLock lock(&mutex_);
    kept_bytes = -flow_.kept_bytes();
    delivery = flow_.OnEvent(event, base::Clock::Real().Now());
    kept_bytes += flow_.kept_bytes();
    if (lease_ != nullptr) lease_->OnAccepted();
    attempt = attempt_;
  }
  if (delivery.reset_attempt && attempt != nullptr) attempt->Cancel();
  if (!delivery.deliver) return;
  if (kept_bytes > 0 && observer_ != nullptr) {
    observer_->OnKeptBytes(kept_bytes);
  }
  if (event.has_tokens()) {
    DeliverTokens(event.tokens(), delivery);
  } else if (event.has_finish()) {
    sink_->OnFinish(event.finish());
  } else {
    sink_->OnAccepted(event.accepted().prompt_tokens());
  }
}

void ActiveRequest::DeliverTokens(
    const kvasir::v1::GenerateEvent::Tokens& tokens,
    const RequestFlow::Delivery& delivery) {
  const auto repeated = static_cast<int>(delivery.repeated_tokens);
  if (repeated == 0) {
    sink_->OnTokens(tokens);
  } else {
    kvasir::v1::GenerateEvent::Tokens rest = tokens;
    rest.mutable_token_ids()->ExtractSubrange(0, repeated, nullptr);
    if (rest.logprobs_size() >= repeated) {
      rest.mutable_logprobs()->DeleteSubrange(0, repeated);
    }
    rest.clear_prompt_logprobs();
    sink_->OnTokens(rest);
  }
  if (observer_ == nullptr) return;
  if (delivery.time_to_first_token.has_value()) {
    observer_->OnFirstToken(*delivery.time_to_first_token);
  }
  if (delivery.inter_token.has_value()) {
    observer_->OnInterToken(
        *delivery.inter_token,
        static_cast<size_t>(tokens.token_ids_size() - repeated));
  }
}

void ActiveRequest::OnAttemptDone(const absl::Status& status) {
  const std::shared_ptr<ActiveRequest> self = shared_from_this();
  std::optional<absl::Status> end;
  // The last lease of a removed replica destroys it, and its client.
  std::unique_ptr<ReplicaLease> lease;
  {
    base::MutexLock lock(&mutex_);
    end = flow_.OnAttemptDone(status, base::Clock::Real().Now());
    attempt_.reset();
    lease = std::move(lease_);
  }
  lease.reset();
  if (!end.has_value()) {
    if (observer_ != nullptr) observer_->OnRetry(status);
    const absl::Status dispatched = core_->Dispatch(self);
    if (dispatched.ok()) return;
    end = dispatched;
  }
  Close(*end);
  core_->Release(self, /*ran=*/true);
}

bool ActiveRequest::Waits() const {
  base::MutexLock lock(&mutex_);
  return flow_.Waits();
}

Admission::Waiting ActiveRequest::waiting() const {
  base::MutexLock lock(&mutex_);
  return flow_.waiting();
}

std::optional<absl::Status> ActiveRequest::Cancelled() const {
  base::MutexLock lock(&mutex_);
  if (!flow_.cancelled()) return std::nullopt;
  return flow_.CancelledStatus();
}

absl::Status ActiveRequest::NoReplica(const absl::Status& otherwise) const {
  base::MutexLock lock(&mutex_);
  return flow_.NoReplica(otherwise);
}

WorkerCall ActiveRequest::NewCall(const Replica& replica) const {
  const CanonicalRequest& request = flow_.request();
  WorkerCall call;
  call.head.set_request_id(id_);
  call.head.set_attempt(flow_.attempts());
  call.head.set_tenant(request.tenant);
  call.head.set_cache_salt(request.cache_salt);
  *call.head.mutable_sampling() = request.sampling;
  call.head.set_priority(request.priority);
  if (request.eviction_budget.has_value()) {
    auto* const budget = call.head.mutable_eviction_budget();
    budget->set_slots(request.eviction_budget->tokens);
    budget->set_share(request.eviction_budget->ratio);
  }
  if (const auto left = flow_.QueueTimeoutLeft(base::Clock::Real().Now())) {
    // Round up to at least 1 ms, because 0 would make the worker use its own
    // default timeout.
    const int64_t left_ms =
        absl::ToInt64Milliseconds(absl::Ceil(*left, absl::Milliseconds(1)));
    call.head.set_queue_timeout_ms(static_cast<uint32_t>(
        std::clamp<int64_t>(left_ms, 1, std::numeric_limits<uint32_t>::max())));
  }
  call.head.set_traceparent(request.traceparent);
  // Send the id of the weights, so that the worker checks it. Since the
  // router's own check, a worker with other weights may have started at the
  // same address.
  if (flow_.delivered() && begun_on_.has_value()) {
    call.head.set_weights_id(begun_on_->weights_id());
  } else if (const auto info = replica.info()) {
    call.head.set_weights_id(info->weights_id());
  }
  call.prompt = request.prompt;
  call.emitted = flow_.emitted();
  call.deadline = request.deadline;
  return call;
}

void ActiveRequest::LeaveHungReplica(const CandidateList& candidates) {
  std::shared_ptr<Attempt> attempt;
  {
    base::MutexLock lock(&mutex_);
    if (lease_ == nullptr || lease_->replica().state() != ReplicaState::kHung) {
      return;
    }
    bool other = false;
    for (const Candidate& candidate : candidates) {
      other |= candidate.view.eligible && MayRun(*candidate.replica);
    }
    const bool stuck = lease_->replica().liveness() == Liveness::State::kStuck;
    if (!other || !flow_.Leave(stuck, base::Clock::Real().Now())) return;
    attempt = attempt_;
  }
  attempt->Cancel();
}

bool ActiveRequest::MayRunOn(const Replica& replica) const {
  base::MutexLock lock(&mutex_);
  return MayRun(replica);
}

bool ActiveRequest::MayRun(const Replica& replica) const {
  if (flow_.Tried(replica.target(), replica.connection())) return false;
  if (!flow_.delivered()) return true;
  if (!begun_on_.has_value()) return false;
  const auto info = replica.info();
  return info.has_value() && info->weights_id() == begun_on_->weights_id() &&
         info->cache_id() == begun_on_->cache_id() &&
         info->numerics_id() == begun_on_->numerics_id();
}

void ActiveRequest::Open(const std::shared_ptr<Replica>& replica) {
  std::shared_ptr<Attempt> attempt;
  bool cancelled = false;
  std::optional<absl::Duration> waited;
  std::optional<std::pair<MoveReason, uint64_t>> moved;
  {
    base::MutexLock lock(&mutex_);
    const uint64_t connection = replica->connection();
    attempt =
        replica->client()->NewAttempt(NewCall(*replica), shared_from_this());
    if (!flow_.delivered()) begun_on_ = replica->info();
    const absl::Time now = base::Clock::Real().Now();
    flow_.OnAttempt(replica->target(), now,
                    begun_on_.has_value()
                        ? MovesFrom(core_->options_.move_streams, *begun_on_)
                        : MoveStreams::kOff,
                    connection);
    if (flow_.attempts() > 1 && flow_.delivered()) {
      moved = {flow_.move_reason(), flow_.tokens_to_prefill()};
    }
    if (flow_.attempts() == 1) {
      waited = flow_.Record(absl::OkStatus(), now).queue;
    }
    lease_ = std::make_unique<ReplicaLease>(
        replica, flow_.request().prompt.size_tokens());
    attempt_ = attempt;
    cancelled = flow_.cancelled();
  }
  if (waited.has_value() && observer_ != nullptr) {
    observer_->OnDispatched(*waited);
  }
  if (moved.has_value() && observer_ != nullptr) {
    observer_->OnMove(moved->first, moved->second);
  }
  attempt->Start();
  if (cancelled) attempt->Cancel();
}

std::optional<TimerThread::TimerId> ActiveRequest::SetQueueTimer(
    const TimerThread::TimerId& timer) {
  base::MutexLock lock(&mutex_);
  if (done_) return timer;
  return std::exchange(queue_timer_, timer);
}

std::optional<TimerThread::TimerId> ActiveRequest::TakeQueueTimer() {
  base::MutexLock lock(&mutex_);
  return std::exchange(queue_timer_, std::nullopt);
}

AccessRecord ActiveRequest::Discard(const absl::Status& status) {
  AccessRecord record;
  int64_t kept_bytes = 0;
  {
    base::MutexLock lock(&mutex_);
    done_ = true;
    kept_bytes = flow_.kept_bytes();
    record = flow_.Record(status, base::Clock::Real().Now());
  }
  if (observer_ != nullptr && kept_bytes > 0) {
    observer_->OnKeptBytes(-kept_bytes);
  }
  return record;
}

void ActiveRequest::Close(const absl::Status& status) {
  core_->LogEnd(Discard(status));
  const std::shared_ptr<RequestSink> sink = std::move(sink_);
  sink->OnDone(status);
}

}  // namespace kvasir::router
