#include "worker/ranks/group/rank_follower.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/ranks/group/rank_identity.h"
#include "worker/ranks/group/result_hash.h"

namespace kvasir::worker {

using base::MutexLock;
using kvasir::v1::FollowerMessage;

RankFollower::RankFollower(RankFollowerOptions options)
    : options_(std::move(options)),
      state_(options_.hello, options_.join_timeout, options_.clock->Now()) {
  ticker_ = std::thread([this] { Tick(); });
}

RankFollower::~RankFollower() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    stop_.Signal();
  }
  ticker_.join();
  Abort(absl::CancelledError("the process of this rank has finished"));
  MutexLock lock(&mutex_);
  while (working_) changed_.Wait(&mutex_);
}

void RankFollower::OnLink(std::shared_ptr<RankLink> link) {
  {
    MutexLock lock(&mutex_);
    link_ = std::move(link);
  }
  SendMessages();
}

void RankFollower::OnBytes(std::string_view bytes) {
  kvasir::v1::LeaderMessage message;
  const bool parsed =
      message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  {
    MutexLock lock(&mutex_);
    if (parsed) {
      state_.OnMessage(&message, options_.clock->Now());
    } else {
      state_.OnGarbage(bytes.size());
    }
  }
  SendMessages();
}

void RankFollower::OnLost(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    link_ = nullptr;
    state_.OnLost(why);
  }
  SendMessages();
}

absl::StatusOr<std::vector<std::string>> RankFollower::WaitWelcome() {
  MutexLock lock(&mutex_);
  while (state_.phase() == Phase::kJoining) changed_.Wait(&mutex_);
  if (state_.phase() == Phase::kEnded) return EndStatus();
  return state_.collective_addresses();
}

absl::StatusOr<kvasir::v1::RankStart> RankFollower::WaitStarted(
    kvasir::v1::RankReady own) {
  {
    MutexLock lock(&mutex_);
    if (state_.phase() == Phase::kEnded) return EndStatus();
    KVASIR_RETURN_IF_ERROR(state_.OnReady(std::move(own)));
  }
  SendMessages();
  MutexLock lock(&mutex_);
  while (state_.phase() == Phase::kReady) changed_.Wait(&mutex_);
  // If the group has started and been drained since, this still succeeds:
  // NextStep reports the drain.
  if (!state_.status().ok() || !state_.started()) return EndStatus();
  return state_.start();
}

absl::StatusOr<std::optional<kvasir::v1::StepPlan>> RankFollower::NextStep() {
  MutexLock lock(&mutex_);
  while (true) {
    if (state_.phase() == Phase::kEnded) {
      KVASIR_RETURN_IF_ERROR(state_.status());
      return std::nullopt;
    }
    if (std::optional<kvasir::v1::StepPlan> plan = state_.TakeStep()) {
      return plan;
    }
    changed_.Wait(&mutex_);
  }
}

absl::Status RankFollower::FinishStep(const kvasir::v1::StepResult& result) {
  const uint64_t hash = ResultHash(result);
  {
    MutexLock lock(&mutex_);
    if (state_.phase() == Phase::kEnded) return EndStatus();
    KVASIR_RETURN_IF_ERROR(state_.OnStepDone(result.step_id(), hash));
  }
  SendMessages();
  return absl::OkStatus();
}

absl::Status RankFollower::FailStep(uint64_t step_id, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    // Uses real time, not options_.clock, because a test's clock may not
    // advance while this waits.
    const base::Clock& clock = base::Clock::Real();
    const absl::Time deadline = clock.Now() + kFirstReason;
    while (MayBeAConsequence(why) && state_.phase() == Phase::kRunning &&
           clock.Now() < deadline) {
      changed_.WaitWithTimeout(&mutex_, deadline - clock.Now());
    }
    if (state_.phase() == Phase::kEnded) return EndStatus();
    KVASIR_RETURN_IF_ERROR(state_.OnStepFailed(step_id, why));
  }
  SendMessages();
  return status();
}

void RankFollower::AskDrain() {
  {
    MutexLock lock(&mutex_);
    state_.AskDrain();
  }
  SendMessages();
}

void RankFollower::Abort(const absl::Status& reason) {
  {
    MutexLock lock(&mutex_);
    state_.Abort(reason);
  }
  SendMessages();
}

absl::Status RankFollower::status() const {
  MutexLock lock(&mutex_);
  return state_.status();
}

absl::Status RankFollower::EndStatus() const {
  return state_.status().ok()
             ? absl::CancelledError("the tensor-parallel group was drained")
             : state_.status();
}

void RankFollower::SendMessages() {
  mutex_.Lock();
  if (working_) {
    mutex_.Unlock();
    return;
  }
  working_ = true;
  changed_.SignalAll();
  while (true) {
    std::vector<FollowerMessage> messages;
    if (link_ != nullptr) messages = state_.TakeMessages();
    const bool ends =
        state_.phase() == Phase::kEnded && !std::exchange(ended_, true);
    if (messages.empty() && !ends) break;
    const std::shared_ptr<RankLink> link = link_;
    if (ends) link_ = nullptr;
    const absl::Status status = state_.status();
    const bool call_on_end = ends && !status.ok() && !stopping_;
    mutex_.Unlock();
    size_t waiting = 0;
    for (const FollowerMessage& message : messages) {
      waiting = link->Send(
          std::make_shared<const std::string>(message.SerializeAsString()));
    }
    if (ends && link != nullptr) link->Close(status);
    if (call_on_end && options_.on_end) options_.on_end(status);
    mutex_.Lock();
    if (waiting > kMaxWaitingMessages) {
      state_.Abort(absl::UnavailableError(
          absl::StrCat("the leader does not read its messages: ", waiting,
                       " messages wait")));
    }
    changed_.SignalAll();
  }
  working_ = false;
  changed_.SignalAll();
  mutex_.Unlock();
}

void RankFollower::Tick() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
      stop_.WaitWithTimeout(&mutex_, state_.heartbeat_interval() / 2);
      if (stopping_) return;
      state_.OnTime(options_.clock->Now());
    }
    SendMessages();
  }
}

absl::Status RunSteps(RankFollower* follower, Executor* executor) {
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<kvasir::v1::StepPlan> plan,
                            follower->NextStep());
    if (!plan.has_value()) return absl::OkStatus();
    absl::StatusOr<kvasir::v1::StepResult> result = executor->Execute(*plan);
    if (result.ok() && result->step_id() != plan->step_id()) {
      result = absl::InternalError(
          absl::StrCat("the executor returned the result of step ",
                       result->step_id(), ", expected step ", plan->step_id()));
    }
    if (!result.ok()) {
      return follower->FailStep(plan->step_id(), result.status());
    }
    KVASIR_RETURN_IF_ERROR(follower->FinishStep(*result));
  }
}

}  // namespace kvasir::worker
