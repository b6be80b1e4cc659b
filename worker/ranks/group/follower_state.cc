#include "worker/ranks/group/follower_state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::FollowerMessage;
using kvasir::v1::LeaderMessage;
using kvasir::v1::RankRefusal;
using kvasir::v1::StepPlan;

std::string TextOf(const absl::Status& status) {
  return std::string(status.message().substr(0, kMaxPeerTextBytes));
}

absl::Status RefusedStatus(const RankRefusal& refusal) {
  const std::string reason = RankRefusal::Reason_IsValid(refusal.reason())
                                 ? RankRefusal::Reason_Name(refusal.reason())
                                 : absl::StrCat(refusal.reason());
  const bool is_code = refusal.reason() == RankRefusal::UNAUTHENTICATED;
  const std::string text = absl::StrCat(
      "the leader refuses this rank: ", is_code ? "" : reason + ": ",
      PeerText(refusal.detail()));
  return is_code ? absl::UnauthenticatedError(text)
                 : absl::FailedPreconditionError(text);
}

}  // namespace

FollowerState::FollowerState(const kvasir::v1::RankHello& hello,
                             absl::Duration join_timeout, absl::Time now)
    : size_(hello.identity().tp_size()),
      heartbeat_timeout_(
          absl::Milliseconds(hello.identity().heartbeat_timeout_ms())),
      join_timeout_(join_timeout),
      began_(now),
      last_message_(now),
      last_time_(now),
      last_beat_(now) {
  messages_.emplace_back();
  *messages_.back().mutable_hello() = hello;
}

void FollowerState::OnMessage(LeaderMessage* message, absl::Time now) {
  if (phase_ == Phase::kEnded) return;
  last_message_ = now;
  switch (message->message_case()) {
    case LeaderMessage::kWelcome:
      return OnWelcome(message->welcome());
    case LeaderMessage::kRefusal:
      return End(RefusedStatus(message->refusal()));
    case LeaderMessage::kStart:
      return OnStart(message->start());
    case LeaderMessage::kStep:
      return OnStep(message->mutable_step());
    case LeaderMessage::kHeartbeat:
      return;
    case LeaderMessage::kDrain:
      if (last_done_ != last_step_) {
        return Violated(
            absl::StrCat("a RankDrain while step ", last_step_, " runs"));
      }
      return End(absl::OkStatus());
    case LeaderMessage::kAbort:
      return End(PeerStatus(message->abort().code(),
                            "the leader: ", message->abort().reason()));
    case LeaderMessage::MESSAGE_NOT_SET:
      return Violated("a message of an unknown kind");
  }
}

void FollowerState::OnWelcome(const kvasir::v1::RankWelcome& welcome) {
  if (phase_ != Phase::kJoining) return Violated("a second RankWelcome");
  const int num_addresses = welcome.collective_addresses_size();
  if (num_addresses != static_cast<int>(size_)) {
    return Violated(absl::StrCat("a RankWelcome with ", num_addresses,
                                 " addresses for ", size_, " ranks"));
  }
  addresses_.assign(welcome.collective_addresses().begin(),
                    welcome.collective_addresses().end());
  phase_ = Phase::kLoading;
}

void FollowerState::OnStart(const kvasir::v1::RankStart& start) {
  if (phase_ != Phase::kReady) return Violated("a RankStart out of turn");
  const auto fits = [](const auto& pages, const auto& own) {
    if (pages.size() != own.size()) return false;
    for (int g = 0; g < pages.size(); ++g) {
      if (pages.Get(g) < 0 || pages.Get(g) > own.Get(g)) return false;
    }
    return true;
  };
  if (!fits(start.pages(), ready_.pages()) ||
      !fits(start.host_pages(), ready_.host_pages())) {
    return Violated(
        absl::StrCat("a RankStart whose page counts are negative, too large "
                     "for this rank, or for other page groups: ",
                     PeerText(start.ShortDebugString())));
  }
  start_ = start;
  started_ = true;
  phase_ = Phase::kRunning;
}

void FollowerState::OnStep(StepPlan* plan) {
  if (phase_ != Phase::kRunning) return Violated("a StepPlan out of turn");
  if (plan->step_id() != last_step_ + 1) {
    return Violated(absl::StrCat("step ", plan->step_id(), ", expected step ",
                                 last_step_ + 1));
  }
  if (last_step_ - last_done_ == kMaxStepsInFlight) {
    return Violated(absl::StrCat("step ", plan->step_id(), " while step ",
                                 last_done_ + 1,
                                 " has not ended: the limit is ",
                                 kMaxStepsInFlight, " steps in flight"));
  }
  last_step_ = plan->step_id();
  plans_.push_back(std::move(*plan));
}

void FollowerState::OnGarbage(size_t num_bytes) {
  Violated(absl::StrCat(num_bytes, " bytes that are not a LeaderMessage"));
}

void FollowerState::OnLost(const absl::Status& why) {
  End(why.ok() ? absl::UnavailableError(
                     "the leader closed the connection without giving a reason")
               : absl::Status(why.code(),
                              absl::StrCat("the call to the leader ended: ",
                                           PeerText(why.message()))));
}

void FollowerState::OnTime(absl::Time now) {
  const absl::Duration passed = now - last_time_;
  last_time_ = now;
  // If this process itself did not run for a while (it was stopped or swapped
  // out), the leader's messages may wait in the socket, so the pause does not
  // count as silence of the leader.
  if (passed > heartbeat_timeout_ / 2)
    last_message_ = std::min(now, last_message_ + passed);
  if (phase_ == Phase::kEnded) return;
  if (now - last_message_ >= heartbeat_timeout_) {
    return End(absl::UnavailableError(
        absl::StrCat("no message from the leader for ",
                     absl::FormatDuration(now - last_message_),
                     ", the heartbeat timeout is ",
                     absl::FormatDuration(heartbeat_timeout_))));
  }
  if (phase_ == Phase::kJoining && now - began_ >= join_timeout_) {
    return Abort(absl::DeadlineExceededError(
        absl::StrCat("not all ranks joined the tensor-parallel group within ",
                     absl::FormatDuration(join_timeout_))));
  }
  if (now - last_beat_ < heartbeat_interval()) return;
  last_beat_ = now;
  messages_.emplace_back().mutable_heartbeat();
}

absl::Status FollowerState::OnReady(kvasir::v1::RankReady ready) {
  if (phase_ != Phase::kLoading) {
    return absl::FailedPreconditionError(
        "this rank must report exactly once that it is ready, after it has "
        "received the RankWelcome");
  }
  const size_t num_bytes = ready.weight_tiles().size();
  if (num_bytes > size_t{kMaxReadyBytes}) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the fingerprints of this rank's weights take ", num_bytes,
                     " bytes, the limit is ", kMaxReadyBytes));
  }
  *ready_.mutable_pages() = ready.pages();
  *ready_.mutable_host_pages() = ready.host_pages();
  *messages_.emplace_back().mutable_ready() = std::move(ready);
  phase_ = Phase::kReady;
  return absl::OkStatus();
}

std::optional<StepPlan> FollowerState::TakeStep() {
  if (plans_.empty()) return std::nullopt;
  StepPlan plan = std::move(plans_.front());
  plans_.pop_front();
  last_taken_ = plan.step_id();
  return plan;
}

absl::Status FollowerState::CheckStep(uint64_t step_id) const {
  if (phase_ != Phase::kRunning) {
    return absl::FailedPreconditionError(
        "the tensor-parallel group is not running steps");
  }
  if (step_id != last_done_ + 1 || step_id > last_taken_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step_id, " cannot have ended: step ", last_done_,
        " ended last, and step ", last_taken_, " was started last"));
  }
  return absl::OkStatus();
}

absl::Status FollowerState::OnStepDone(uint64_t step_id, uint64_t result_hash) {
  if (absl::Status status = CheckStep(step_id); !status.ok()) return status;
  last_done_ = step_id;
  kvasir::v1::RankStepDone* done = messages_.emplace_back().mutable_step_done();
  done->set_step_id(step_id);
  done->set_result_hash(result_hash);
  return absl::OkStatus();
}

absl::Status FollowerState::OnStepFailed(uint64_t step_id,
                                         const absl::Status& why) {
  if (absl::Status status = CheckStep(step_id); !status.ok()) return status;
  kvasir::v1::RankStepDone* done = messages_.emplace_back().mutable_step_done();
  done->set_step_id(step_id);
  done->set_code(static_cast<int>(why.code()));
  done->set_error(TextOf(why));
  End(why);
  return absl::OkStatus();
}

void FollowerState::AskDrain() {
  if (phase_ == Phase::kEnded) return;
  messages_.emplace_back().mutable_drain();
}

void FollowerState::Abort(const absl::Status& reason) {
  if (phase_ == Phase::kEnded) return;
  kvasir::v1::RankAbort* abort = messages_.emplace_back().mutable_abort();
  abort->set_code(static_cast<int>(reason.code()));
  abort->set_reason(TextOf(reason));
  End(reason);
}

void FollowerState::Violated(const std::string& text) {
  Abort(absl::InvalidArgumentError(absl::StrCat("the leader sent ", text)));
}

void FollowerState::End(const absl::Status& why) {
  if (phase_ == Phase::kEnded) return;
  phase_ = Phase::kEnded;
  status_ = why;
  plans_.clear();
}

}  // namespace kvasir::worker
