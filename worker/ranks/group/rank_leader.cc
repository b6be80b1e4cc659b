#include "worker/ranks/group/rank_leader.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "google/protobuf/io/coded_stream.h"
#include "worker/ranks/group/rank_identity.h"
#include "worker/ranks/group/result_hash.h"

namespace kvasir::worker {
namespace {

using base::MutexLock;
using kvasir::v1::LeaderMessage;

RankLink::Bytes Serialized(const LeaderMessage& message) {
  return std::make_shared<const std::string>(message.SerializeAsString());
}

// Returns the serialized LeaderMessage with this plan. Does not copy the plan
// into a message object.
RankLink::Bytes SerializedStep(const kvasir::v1::StepPlan& plan) {
  constexpr uint32_t kLengthDelimited = 2;
  using google::protobuf::io::CodedOutputStream;
  uint8_t header[20];
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(
      uint32_t{LeaderMessage::kStepFieldNumber} << 3 | kLengthDelimited,
      header);
  end = CodedOutputStream::WriteVarint64ToArray(plan.ByteSizeLong(), end);
  auto bytes = std::make_shared<std::string>(header, end);
  plan.AppendToString(bytes.get());
  return bytes;
}

}  // namespace

RankLeader::RankLeader(RankLeaderOptions options)
    : options_(std::move(options)),
      state_(options_.group, options_.clock->Now()) {
  KVASIR_CHECK(CheckRankGroupOptions(options_.group).ok());
  ticker_ = std::thread([this] { Tick(); });
}

RankLeader::~RankLeader() {
  {
    MutexLock lock(&mutex_);
    ended_ = true;  // so that on_end is not called
    stopping_ = true;
    stop_.Signal();
  }
  ticker_.join();
  Abort(absl::CancelledError("the process of this rank has finished"));
  MutexLock lock(&mutex_);
  while (working_) changed_.Wait(&mutex_);
}

RankLeader::LinkId RankLeader::OnLink(std::shared_ptr<RankLink> link,
                                      bool authenticated,
                                      const std::string& peer) {
  LinkId id = 0;
  {
    MutexLock lock(&mutex_);
    id = ++last_link_;
    links_[id] = std::move(link);
    state_.OnLink(id, authenticated, peer, options_.clock->Now());
    Collect();
  }
  RunTasks();
  return id;
}

void RankLeader::OnBytes(LinkId link, std::string_view bytes) {
  int64_t limit = 0;
  {
    MutexLock lock(&mutex_);
    limit = state_.MaxMessageBytes(link);
  }
  kvasir::v1::FollowerMessage message;
  const bool parsed =
      bytes.size() <= static_cast<size_t>(limit) &&
      message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  {
    MutexLock lock(&mutex_);
    const absl::Time now = options_.clock->Now();
    if (parsed) {
      state_.OnMessage(link, &message, now);
    } else {
      state_.OnGarbage(link, bytes.size(), now);
    }
    Collect();
  }
  RunTasks();
}

void RankLeader::OnLost(LinkId link, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    state_.OnLost(link, why);
    links_.erase(link);
    Collect();
  }
  RunTasks();
}

absl::StatusOr<std::vector<std::string>> RankLeader::WaitJoined() {
  MutexLock lock(&mutex_);
  while (state_.phase() == Phase::kJoining) changed_.Wait(&mutex_);
  if (state_.phase() == Phase::kEnded) return EndStatus();
  return state_.collective_addresses();
}

absl::StatusOr<kvasir::v1::RankStart> RankLeader::WaitStarted(
    kvasir::v1::RankReady own) {
  {
    MutexLock lock(&mutex_);
    if (state_.phase() == Phase::kJoining) {
      return absl::FailedPreconditionError(
          "the leader may report that it is ready only after all ranks have "
          "joined");
    }
    state_.OnReady(std::move(own));
    Collect();
  }
  RunTasks();
  std::optional<std::vector<std::string>> tiles;
  {
    MutexLock lock(&mutex_);
    while (state_.phase() == Phase::kLoading &&
           !(tiles = state_.TakeTiles()).has_value()) {
      changed_.Wait(&mutex_);
    }
  }
  if (tiles.has_value()) {
    // Called without the lock, so that heartbeats continue even if `combine`
    // takes long.
    const absl::StatusOr<CombinedIds> ids = options_.group.combine(*tiles);
    {
      MutexLock lock(&mutex_);
      state_.OnCombined(ids);
      Collect();
    }
    RunTasks();
  }
  MutexLock lock(&mutex_);
  if (state_.phase() == Phase::kEnded) return EndStatus();
  return state_.start();
}

absl::Status RankLeader::SendStep(const kvasir::v1::StepPlan& plan) {
  const RankLink::Bytes bytes = SerializedStep(plan);
  const auto num_bytes = static_cast<int64_t>(bytes->size());
  if (num_bytes > options_.max_message_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the plan of step ", plan.step_id(), " takes ", num_bytes,
                     " bytes, the limit is ", options_.max_message_bytes));
  }
  {
    MutexLock lock(&mutex_);
    if (state_.phase() == Phase::kEnded) return EndStatus();
    const absl::Status status =
        state_.OnStep(plan.step_id(), options_.clock->Now());
    if (!status.ok()) return status;
    for (const LinkId link : state_.member_links()) {
      tasks_.push_back({.id = link, .link = links_.at(link), .message = bytes});
    }
  }
  RunTasks();
  return absl::OkStatus();
}

absl::Status RankLeader::FinishStep(const kvasir::v1::StepResult& own) {
  const uint64_t hash = ResultHash(own);
  {
    MutexLock lock(&mutex_);
    state_.OnStepDone(own.step_id(), hash);
    Collect();
  }
  RunTasks();
  MutexLock lock(&mutex_);
  while (state_.phase() == Phase::kRunning &&
         !state_.IsStepDone(own.step_id())) {
    changed_.Wait(&mutex_);
  }
  return state_.IsStepDone(own.step_id()) ? absl::OkStatus() : EndStatus();
}

absl::Status RankLeader::FailStep(const absl::Status& why) {
  if (MayBeAConsequence(why)) {
    MutexLock lock(&mutex_);
    // Uses real time, not options_.clock, because a test's clock may not
    // advance while this waits.
    const base::Clock& clock = base::Clock::Real();
    const absl::Time deadline = clock.Now() + kFirstReason;
    while (state_.phase() == Phase::kRunning && clock.Now() < deadline) {
      changed_.WaitWithTimeout(&mutex_, deadline - clock.Now());
    }
  }
  Abort(why);
  const absl::Status ended = status();
  return ended.ok() ? why : ended;  // OK if the group was drained
}

absl::Status RankLeader::Drain() {
  absl::Status status;
  {
    MutexLock lock(&mutex_);
    status = state_.Drain();
    Collect();
  }
  RunTasks();
  return status;
}

void RankLeader::Abort(const absl::Status& reason) {
  {
    MutexLock lock(&mutex_);
    state_.Abort(reason);
    Collect();
  }
  RunTasks();
}

absl::Status RankLeader::status() const {
  MutexLock lock(&mutex_);
  return state_.status();
}

std::vector<RankMember> RankLeader::members() const {
  MutexLock lock(&mutex_);
  return state_.members();
}

absl::Status RankLeader::EndStatus() const {
  return state_.status().ok()
             ? absl::CancelledError("the tensor-parallel group was drained")
             : state_.status();
}

void RankLeader::Collect() {
  for (const RankGroupState::Event& event : state_.TakeEvents()) Log(event);
  for (RankGroupState::Action& action : state_.TakeActions()) {
    const auto found = links_.find(action.link);
    KVASIR_CHECK(found != links_.end());
    Task task{.id = action.link,
              .link = found->second,
              .close = std::move(action.close)};
    if (action.message.message_case() != LeaderMessage::MESSAGE_NOT_SET) {
      task.message = Serialized(action.message);
    }
    if (task.close.has_value()) links_.erase(found);
    tasks_.push_back(std::move(task));
  }
  if (state_.phase() == Phase::kEnded && !std::exchange(ended_, true) &&
      !state_.status().ok()) {
    tasks_.push_back({.call = [this, why = state_.status()] {
      if (options_.on_end) options_.on_end(why);
    }});
  }
  changed_.SignalAll();
}

void RankLeader::Log(const RankGroupState::Event& event) {
  using Kind = RankGroupState::Event::Kind;
  tasks_.push_back({.call = [this, event] {
    switch (event.kind) {
      case Kind::kJoined:
        base::LogInfo("a rank joined", {{"rank", event.ranks}});
        break;
      case Kind::kLeft:
        base::LogWarning("a rank left before the group was complete",
                         {{"rank", event.ranks}, {"why", event.detail}});
        break;
      case Kind::kRefused:
        base::LogWarning("a rank was refused",
                         {{"rank", event.ranks}, {"why", event.detail}});
        break;
      case Kind::kReady:
        base::LogInfo("a rank is ready",
                      {{"rank", event.ranks}, {"has", event.detail}});
        break;
      case Kind::kStarted:
        base::LogInfo("the tensor-parallel group runs",
                      {{"ranks", event.ranks}, {"least", event.detail}});
        break;
      case Kind::kDrainAsked:
        base::LogInfo("a rank asks for a drain", {{"rank", event.ranks}});
        if (options_.on_drain_asked) options_.on_drain_asked();
        break;
    }
  }});
}

void RankLeader::RunTasks() {
  mutex_.Lock();
  if (working_) {
    mutex_.Unlock();
    return;
  }
  working_ = true;
  while (!tasks_.empty()) {
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    mutex_.Unlock();
    if (task.call) task.call();
    size_t waiting = 0;
    if (task.message != nullptr) waiting = task.link->Send(task.message);
    if (task.close.has_value()) task.link->Close(*task.close);
    mutex_.Lock();
    if (waiting > kMaxWaitingMessages) {
      state_.OnBacklog(task.id, waiting);
      Collect();
    }
  }
  working_ = false;
  changed_.SignalAll();
  mutex_.Unlock();
}

void RankLeader::Tick() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
      stop_.WaitWithTimeout(&mutex_, state_.heartbeat_interval() / 2);
      if (stopping_) return;
      state_.OnTime(options_.clock->Now());
      Collect();
    }
    RunTasks();
  }
}

}  // namespace kvasir::worker
