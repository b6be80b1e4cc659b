#include "worker/ranks/group/rank_group_state.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::FollowerMessage;
using kvasir::v1::LeaderMessage;
using kvasir::v1::RankHello;
using kvasir::v1::RankIdentity;
using kvasir::v1::RankReady;
using kvasir::v1::RankRefusal;

// Stands for a rank number outside the group.
constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

absl::StatusCode CodeOf(RankRefusal::Reason reason) {
  switch (reason) {
    case RankRefusal::UNAUTHENTICATED:
      return absl::StatusCode::kUnauthenticated;
    case RankRefusal::NO_HELLO:
      return absl::StatusCode::kInvalidArgument;
    case RankRefusal::RANK_TAKEN:
      return absl::StatusCode::kAlreadyExists;
    default:
      return absl::StatusCode::kFailedPrecondition;
  }
}

std::string MessageName(const FollowerMessage& message) {
  const google::protobuf::FieldDescriptor* field =
      FollowerMessage::descriptor()->FindFieldByNumber(message.message_case());
  return field == nullptr ? "a message of an unknown kind"
                          : field->message_type()->name();
}

LeaderMessage AbortMessage(const absl::Status& why) {
  LeaderMessage message;
  message.mutable_abort()->set_code(static_cast<int>(why.code()));
  message.mutable_abort()->set_reason(
      std::string(why.message().substr(0, kMaxPeerTextBytes)));
  return message;
}

// Returns the page counts of a RankReady or RankStart, by page group, as text.
template <typename Message>
std::string PagesText(const Message& message) {
  return absl::StrCat("pages ", absl::StrJoin(message.pages(), "+"),
                      ", host pages ",
                      absl::StrJoin(message.host_pages(), "+"));
}

// Sets each element of `least` to the smaller of itself and the rank's page
// count.
void TakeLeast(const google::protobuf::RepeatedField<int64_t>& pages,
               google::protobuf::RepeatedField<int64_t>* least) {
  for (int g = 0; g < least->size(); ++g) {
    least->Set(g, std::min(least->Get(g), pages.Get(g)));
  }
}

// Returns an error if a rank's page counts are not for the same page groups as
// the leader's, or if one of them is below `least`.
absl::Status ComparePages(const std::string& name, const char* what,
                          const google::protobuf::RepeatedField<int64_t>& pages,
                          const google::protobuf::RepeatedField<int64_t>& want,
                          int64_t least) {
  if (pages.size() != want.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " has ", what, " in ", pages.size(),
                     " page groups, the leader in ", want.size()));
  }
  for (int g = 0; g < pages.size(); ++g) {
    if (pages.Get(g) >= least) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", pages.Get(g), " ", what, " in page group ",
                     g, ", but must have at least ", least));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRankGroupOptions(const RankGroupOptions& options) {
  const RankIdentity& identity = options.identity;
  if (identity.tp_size() < 2 || identity.tp_size() > kMaxTpSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor-parallel group has ", identity.tp_size(),
                     " ranks, but must have 2 to ", kMaxTpSize));
  }
  if (identity.heartbeat_timeout_ms() == 0) {
    return absl::InvalidArgumentError(
        "heartbeat_timeout_ms is 0, but must be more than 0");
  }
  if (options.combine == nullptr) {
    return absl::InvalidArgumentError("RankGroupOptions.combine is not set");
  }
  const std::pair<const char*, absl::Duration> timeouts[] = {
      {"join_timeout", options.join_timeout},
      {"load_timeout", options.load_timeout},
      {"step_timeout", options.step_timeout}};
  for (const auto& [name, timeout] : timeouts) {
    if (timeout > absl::ZeroDuration()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", absl::FormatDuration(timeout),
                     ", but must be more than 0"));
  }
  return absl::OkStatus();
}

RankGroupState::RankGroupState(RankGroupOptions options, absl::Time now)
    : options_(std::move(options)),
      heartbeat_timeout_(
          absl::Milliseconds(options_.identity.heartbeat_timeout_ms())),
      phase_since_(now),
      last_time_(now),
      last_beat_(now),
      members_(size()) {
  member(0).name = "rank 0 (the leader)";
  for (uint32_t rank = 1; rank < size(); ++rank) {
    member(rank).name = absl::StrCat("rank ", rank);
  }
}

// ---------------------------------------------------------------------------
// Joining
// ---------------------------------------------------------------------------

void RankGroupState::OnLink(LinkId link, bool authenticated,
                            const std::string& peer, absl::Time now) {
  links_[link] = {.peer = PeerName(peer), .last_message = now};
  if (!authenticated) {
    Refuse(link, RankRefusal::UNAUTHENTICATED,
           "the call shows neither the group's secret nor a certificate that "
           "the leader trusts",
           nullptr);
  } else if (phase_ == Phase::kEnded) {
    Refuse(link, RankRefusal::TOO_LATE,
           absl::StrCat("the group has ended: ",
                        status_.ok() ? "it was drained" : status_.message()),
           nullptr);
  }
}

int64_t RankGroupState::MaxMessageBytes(LinkId link) const {
  const auto found = links_.find(link);
  const bool may_be_ready = phase_ == Phase::kLoading &&
                            found != links_.end() &&
                            found->second.rank.has_value() &&
                            !members_[*found->second.rank].ready.has_value();
  return kMaxFollowerMessageBytes + (may_be_ready ? kMaxReadyBytes : 0);
}

void RankGroupState::OnMessage(LinkId link, FollowerMessage* message,
                               absl::Time now) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;
  const size_t num_bytes =
      message->ByteSizeLong() - message->ready().weight_tiles().size();
  if (num_bytes > size_t{kMaxFollowerMessageBytes}) {
    return OnBroken(
        link,
        absl::StrCat(num_bytes,
                     " bytes (not counting weight tiles), the limit is ",
                     kMaxFollowerMessageBytes),
        now);
  }
  found->second.last_message = now;
  if (found->second.rank.has_value()) {
    OnMemberMessage(*found->second.rank, message);
  } else if (message->has_hello()) {
    OnHello(link, message->hello());
    if (phase_ == Phase::kJoining && member_links().size() + 1 == size()) {
      phase_since_ = now;
      Welcome();
    }
  } else {
    Refuse(link, RankRefusal::NO_HELLO,
           absl::StrCat("the first message must be a RankHello, but is ",
                        MessageName(*message)),
           nullptr);
  }
}

void RankGroupState::OnGarbage(LinkId link, size_t num_bytes, absl::Time now) {
  const int64_t limit = MaxMessageBytes(link);
  OnBroken(
      link,
      num_bytes > static_cast<size_t>(limit)
          ? absl::StrCat(num_bytes, " bytes, the limit is ", limit)
          : absl::StrCat(num_bytes, " bytes that are not a FollowerMessage"),
      now);
}

void RankGroupState::OnBroken(LinkId link, const std::string& what,
                              absl::Time now) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;
  found->second.last_message = now;
  if (found->second.rank.has_value()) {
    const uint32_t rank = *found->second.rank;
    Fail(rank, absl::InvalidArgumentError(
                   absl::StrCat(member(rank).name, " sent ", what)));
  } else {
    Refuse(link, RankRefusal::NO_HELLO,
           absl::StrCat("the first message must be a RankHello, but is ", what),
           nullptr);
  }
}

void RankGroupState::OnHello(LinkId link, const RankHello& hello) {
  const std::optional<IdentityDifference> difference =
      FirstDifference(options_.identity, hello.identity());
  const int field = difference.has_value() ? difference->field : 0;
  if (field == RankIdentity::kApiVersionFieldNumber ||
      field == RankIdentity::kBuildFieldNumber) {
    return Refuse(link, RankRefusal::WRONG_VERSION, difference->text, &hello,
                  field);
  }
  if (field == RankIdentity::kTpSizeFieldNumber) {
    return Refuse(link, RankRefusal::WRONG_SIZE, difference->text, &hello);
  }
  if (hello.rank() < 1 || hello.rank() >= size()) {
    return Refuse(
        link, RankRefusal::WRONG_RANK,
        absl::StrCat("rank is ", hello.rank(),
                     ", a follower of this group must have a rank from 1 to ",
                     size() - 1),
        &hello);
  }
  Member& joining = member(hello.rank());
  if (joining.link != 0) {
    return Refuse(link, RankRefusal::RANK_TAKEN,
                  absl::StrCat(joining.name, " has joined already"), &hello);
  }
  if (difference.has_value()) {
    return Refuse(link, RankRefusal::WRONG_IDENTITY, difference->text, &hello,
                  field);
  }
  links_.at(link).rank = hello.rank();
  joining.link = link;
  joining.hello = hello;
  joining.name = RankName(hello);
  events_.push_back({Event::Kind::kJoined, joining.name, ""});
}

void RankGroupState::Welcome() {
  phase_ = Phase::kLoading;
  LeaderMessage message;
  addresses_.push_back(options_.collective_address);
  for (uint32_t rank = 1; rank < size(); ++rank) {
    addresses_.push_back(member(rank).hello.collective_address());
  }
  for (const std::string& address : addresses_) {
    message.mutable_welcome()->add_collective_addresses(address);
  }
  for (const LinkId link : member_links()) Send(link, message);
}

// ---------------------------------------------------------------------------
// Members
// ---------------------------------------------------------------------------

void RankGroupState::OnMemberMessage(uint32_t rank, FollowerMessage* message) {
  const std::string& name = member(rank).name;
  switch (message->message_case()) {
    case FollowerMessage::kHeartbeat:
      return;
    case FollowerMessage::kReady:
      return OnMemberReady(rank, std::move(*message->mutable_ready()));
    case FollowerMessage::kStepDone:
      return OnMemberStepDone(rank, message->step_done());
    case FollowerMessage::kDrain:
      if (!std::exchange(member(rank).asked_drain, true)) {
        events_.push_back({Event::Kind::kDrainAsked, name, ""});
      }
      return;
    case FollowerMessage::kAbort:
      return Fail(rank, PeerStatus(message->abort().code(),
                                   absl::StrCat(name, " gave up: "),
                                   message->abort().reason()));
    case FollowerMessage::kHello:
    case FollowerMessage::MESSAGE_NOT_SET:
      break;
  }
  Fail(rank,
       absl::InvalidArgumentError(absl::StrCat(
           name, " sent ", MessageName(*message), " after its RankHello")));
}

void RankGroupState::OnMemberReady(uint32_t rank, RankReady ready) {
  Member& from = member(rank);
  if (phase_ != Phase::kLoading || from.ready.has_value()) {
    return Fail(rank, absl::InvalidArgumentError(absl::StrCat(
                          from.name, " sent a RankReady ",
                          phase_ == Phase::kJoining ? "before its RankWelcome"
                                                    : "for the second time")));
  }
  events_.push_back({Event::Kind::kReady, from.name,
                     absl::StrCat(ready.weight_bytes(), " bytes of weights, ",
                                  PagesText(ready))});
  from.ready = std::move(ready);
  CombineIfReady();
}

void RankGroupState::OnReady(RankReady ready) {
  if (phase_ != Phase::kLoading) return;
  member(0).ready = std::move(ready);
  CombineIfReady();
}

absl::Status RankGroupState::CheckReady() const {
  const RankReady& own = *members_[0].ready;
  for (const Member& other : members_) {
    const RankReady& ready = *other.ready;
    for (const absl::Status& status :
         {ComparePages(other.name, "pages", ready.pages(), own.pages(), 1),
          ComparePages(other.name, "host pages", ready.host_pages(),
                       own.host_pages(), 0)}) {
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

bool RankGroupState::IsAllReady() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const Member& each) { return each.ready.has_value(); });
}

void RankGroupState::CombineIfReady() {
  if (!IsAllReady()) return;
  if (const absl::Status status = CheckReady(); !status.ok()) {
    return End(status);
  }
  tiles_.emplace();
  for (Member& each : members_) {
    tiles_->push_back(std::move(*each.ready->mutable_weight_tiles()));
    each.ready->clear_weight_tiles();
  }
}

std::optional<std::vector<std::string>> RankGroupState::TakeTiles() {
  return std::exchange(tiles_, std::nullopt);
}

void RankGroupState::OnCombined(const absl::StatusOr<CombinedIds>& ids) {
  if (phase_ != Phase::kLoading) return;
  if (!ids.ok()) return End(ids.status());
  start_.set_weights_id(ids->weights_id);
  start_.set_cache_id(ids->cache_id);
  *start_.mutable_pages() = member(0).ready->pages();
  *start_.mutable_host_pages() = member(0).ready->host_pages();
  for (const Member& each : members_) {
    TakeLeast(each.ready->pages(), start_.mutable_pages());
    TakeLeast(each.ready->host_pages(), start_.mutable_host_pages());
  }
  phase_ = Phase::kRunning;
  LeaderMessage message;
  *message.mutable_start() = start_;
  for (const LinkId link : member_links()) Send(link, message);
  events_.push_back({Event::Kind::kStarted, absl::StrCat(size(), " ranks"),
                     PagesText(start_)});
}

// ---------------------------------------------------------------------------
// Steps
// ---------------------------------------------------------------------------

absl::Status RankGroupState::OnStep(uint64_t step_id, absl::Time now) {
  if (phase_ != Phase::kRunning) {
    return absl::FailedPreconditionError(
        "the tensor-parallel group is not running steps");
  }
  if (step_id != last_step_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("step_id is ", step_id, ", but must be ", last_step_ + 1));
  }
  if (steps_.size() == kMaxStepsInFlight) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot send step ", step_id, " while step ",
                     steps_.front().id, " has not ended: the limit is ",
                     kMaxStepsInFlight, " steps in flight"));
  }
  last_step_ = step_id;
  steps_.push_back({.id = step_id,
                    .since = now,
                    .hashes = std::vector<std::optional<uint64_t>>(size())});
  return absl::OkStatus();
}

void RankGroupState::OnStepDone(uint64_t step_id, uint64_t result_hash) {
  if (phase_ != Phase::kRunning) return;
  AddHash(step_id, 0, result_hash);
}

void RankGroupState::OnMemberStepDone(uint32_t rank,
                                      const kvasir::v1::RankStepDone& done) {
  Member& from = member(rank);
  const uint64_t want = from.steps_done + 1;
  if (done.step_id() != want || want > last_step_) {
    return Fail(
        rank, absl::InvalidArgumentError(absl::StrCat(
                  from.name, " reported the end of step ", done.step_id(),
                  want > last_step_ ? std::string(" but has no step to run")
                                    : absl::StrCat(", expected step ", want))));
  }
  if (done.code() != 0) {
    return Fail(rank, PeerStatus(done.code(),
                                 absl::StrCat(from.name, " failed in step ",
                                              done.step_id(), ": "),
                                 done.error()));
  }
  from.steps_done = want;
  AddHash(want, rank, done.result_hash());
}

void RankGroupState::AddHash(uint64_t step_id, uint32_t rank, uint64_t hash) {
  const auto step =
      std::find_if(steps_.begin(), steps_.end(),
                   [step_id](const Step& each) { return each.id == step_id; });
  KVASIR_CHECK(step != steps_.end());
  KVASIR_CHECK(!step->hashes[rank].has_value());
  step->hashes[rank] = hash;
  if (const std::optional<uint64_t> own = step->hashes[0]) {
    for (uint32_t r = 1; r < size(); ++r) {
      const uint64_t other = step->hashes[r].value_or(*own);
      if (other == *own) continue;
      return End(absl::InternalError(absl::StrFormat(
          "step %d: the result of %s has hash %016x, the leader's %016x: the "
          "ranks computed different results",
          step_id, member(r).name, other, *own)));
    }
  }
  while (!steps_.empty() &&
         std::all_of(steps_.front().hashes.begin(), steps_.front().hashes.end(),
                     [](const auto& each) { return each.has_value(); })) {
    steps_.pop_front();
    // The timeout of the next step starts only now, because ranks run steps one
    // after the other.
    if (!steps_.empty()) {
      steps_.front().since = std::max(steps_.front().since, last_time_);
    }
  }
}

bool RankGroupState::IsStepDone(uint64_t step_id) const {
  return step_id <= last_step_ &&
         (steps_.empty() || step_id < steps_.front().id);
}

// ---------------------------------------------------------------------------
// Time
// ---------------------------------------------------------------------------

void RankGroupState::OnTime(absl::Time now) {
  const absl::Duration passed = now - last_time_;
  last_time_ = now;
  if (passed > heartbeat_timeout_ / 2) {
    // This process itself did not run for a while (it was stopped or swapped
    // out). Messages of followers may wait in the sockets, so the pause does
    // not count as silence of the followers.
    for (auto& [id, link] : links_) {
      link.last_message = std::min(now, link.last_message + passed);
    }
    for (Step& step : steps_) step.since = std::min(now, step.since + passed);
  }
  if (phase_ == Phase::kEnded) return;
  if (const absl::Status status = CheckTimes(now); !status.ok()) {
    return End(status);
  }
  std::vector<LinkId> silent;
  for (const auto& [id, link] : links_) {
    if (now - link.last_message >= heartbeat_timeout_) silent.push_back(id);
  }
  const std::string limit = absl::FormatDuration(heartbeat_timeout_);
  for (const LinkId id : silent) {
    const auto found = links_.find(id);
    if (found == links_.end()) continue;  // an earlier link ended the group
    if (!found->second.rank.has_value()) {
      Refuse(id, RankRefusal::NO_HELLO,
             absl::StrCat("no RankHello within ", limit), nullptr);
      continue;
    }
    const uint32_t rank = *found->second.rank;
    Fail(rank, absl::UnavailableError(absl::StrCat(
                   "no message from ", member(rank).name, " for ",
                   absl::FormatDuration(now - found->second.last_message),
                   ", the heartbeat timeout is ", limit)));
  }
  if (now - last_beat_ < heartbeat_interval()) return;
  last_beat_ = now;
  for (const LinkId link : member_links()) {
    LeaderMessage message;
    message.mutable_heartbeat();
    Send(link, std::move(message));
  }
}

absl::Status RankGroupState::CheckTimes(absl::Time now) const {
  const auto late = [](const std::string& who, const std::string& what,
                       absl::Duration limit) {
    return absl::StrCat(who, " ", what, " within ",
                        absl::FormatDuration(limit));
  };
  switch (phase_) {
    case Phase::kJoining:
      if (now - phase_since_ < options_.join_timeout) break;
      return absl::DeadlineExceededError(absl::StrCat(
          late(NamesWhere([](const Member& each) { return each.link == 0; }),
               "did not join", options_.join_timeout),
          last_refusal_.empty() ? "" : "; the last refusal was: ",
          last_refusal_));
    case Phase::kLoading:
      if (now - phase_since_ < options_.load_timeout || IsAllReady()) break;
      return absl::DeadlineExceededError(
          late(NamesWhere(
                   [](const Member& each) { return !each.ready.has_value(); }),
               "did not load", options_.load_timeout));
    case Phase::kRunning: {
      if (steps_.empty() ||
          now - steps_.front().since < options_.step_timeout) {
        break;
      }
      const Step& step = steps_.front();
      return absl::UnavailableError(late(
          NamesWhere([&](const Member& each) {
            const auto rank = static_cast<size_t>(&each - members_.data());
            return !step.hashes[rank].has_value();
          }),
          absl::StrCat("did not end step ", step.id), options_.step_timeout));
    }
    case Phase::kEnded:
      break;
  }
  return absl::OkStatus();
}

template <typename Predicate>
std::string RankGroupState::NamesWhere(const Predicate& waits) const {
  std::string names;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    // While the group is joining, only followers can be missing, not the
    // leader.
    if (rank == 0 && phase_ == Phase::kJoining) continue;
    if (!waits(members_[rank])) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", members_[rank].name);
  }
  return names;
}

// ---------------------------------------------------------------------------
// Ends
// ---------------------------------------------------------------------------

void RankGroupState::OnBacklog(LinkId link, size_t num_messages) {
  const auto found = links_.find(link);
  if (found == links_.end() || !found->second.rank.has_value()) return;
  const uint32_t rank = *found->second.rank;
  Fail(rank, absl::UnavailableError(absl::StrCat(
                 member(rank).name, " does not read its messages: ",
                 num_messages, " messages wait")));
}

void RankGroupState::OnLost(LinkId link, const absl::Status& why) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;
  const std::optional<uint32_t> rank = found->second.rank;
  links_.erase(found);
  if (!rank.has_value()) return;
  Member& lost = member(*rank);
  lost.link = 0;
  Fail(*rank, absl::UnavailableError(absl::StrCat(
                  "the call of ", lost.name, " ended: ",
                  why.ok() ? "the follower left" : PeerText(why.message()))));
}

absl::Status RankGroupState::Drain() {
  if (phase_ == Phase::kEnded) return absl::OkStatus();
  if (!steps_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the tensor-parallel group cannot drain while step ",
                     steps_.front().id, " runs"));
  }
  phase_ = Phase::kEnded;
  LeaderMessage message;
  message.mutable_drain();
  for (const LinkId link : member_links()) {
    Close(link, message, absl::OkStatus());
  }
  while (!links_.empty()) {
    Close(links_.begin()->first, {},
          absl::UnavailableError("the tensor-parallel group was drained"));
  }
  return absl::OkStatus();
}

void RankGroupState::Abort(const absl::Status& reason) {
  End(absl::Status(reason.code(), absl::StrCat(members_[0].name, " gave up: ",
                                               reason.message())));
}

void RankGroupState::Refuse(LinkId link, RefusalReason reason,
                            const std::string& detail, const RankHello* hello,
                            int field) {
  const std::string who =
      hello == nullptr ? absl::StrCat("a caller at ", links_.at(link).peer)
                       : RankName(*hello);
  const std::string text =
      absl::StrCat(RankRefusal::Reason_Name(reason), ": ", detail);
  last_refusal_ = absl::StrCat(who, ": ", text);
  const uint32_t rank =
      hello == nullptr || hello->rank() >= size() ? kNoRank : hello->rank();
  if (reported_.insert({reason, rank, field}).second) {
    events_.push_back({Event::Kind::kRefused, who, text});
  }
  LeaderMessage message;
  message.mutable_refusal()->set_reason(reason);
  message.mutable_refusal()->set_detail(detail);
  Close(link, std::move(message), absl::Status(CodeOf(reason), detail));
}

void RankGroupState::Fail(uint32_t rank, const absl::Status& why) {
  if (phase_ != Phase::kJoining) return End(why);
  Member& leaving = member(rank);
  events_.push_back(
      {Event::Kind::kLeft, leaving.name, std::string(why.message())});
  if (leaving.link != 0) Close(leaving.link, AbortMessage(why), why);
  leaving = {};
  leaving.name = absl::StrCat("rank ", rank);
}

void RankGroupState::End(const absl::Status& why) {
  if (phase_ == Phase::kEnded) return;
  phase_ = Phase::kEnded;
  status_ = why;
  while (!links_.empty()) {
    const auto& [link, of] = *links_.begin();
    Close(link, of.rank.has_value() ? AbortMessage(why) : LeaderMessage(), why);
  }
}

void RankGroupState::Send(LinkId link, LeaderMessage message) {
  actions_.push_back({link, std::move(message), std::nullopt});
}

void RankGroupState::Close(LinkId link, LeaderMessage last,
                           const absl::Status& status) {
  const auto found = links_.find(link);
  KVASIR_CHECK(found != links_.end());
  if (found->second.rank.has_value()) member(*found->second.rank).link = 0;
  links_.erase(found);
  actions_.push_back({link, std::move(last), status});
}

std::vector<RankGroupState::LinkId> RankGroupState::member_links() const {
  std::vector<LinkId> links;
  for (const Member& each : members_) {
    if (each.link != 0) links.push_back(each.link);
  }
  return links;
}

std::vector<RankMember> RankGroupState::members() const {
  std::vector<RankMember> members;
  for (const Member& each : members_) {
    if (each.link == 0) continue;
    RankMember& one = members.emplace_back();
    one.rank = each.hello.rank();
    one.host = PeerName(each.hello.host());
    one.pid = each.hello.pid();
    one.metrics_address = PeerName(each.hello.metrics_address());
    if (!each.ready.has_value()) continue;
    one.ready = true;
    one.pages.assign(each.ready->pages().begin(), each.ready->pages().end());
    one.host_pages.assign(each.ready->host_pages().begin(),
                          each.ready->host_pages().end());
    one.weight_bytes = each.ready->weight_bytes();
  }
  return members;
}

}  // namespace kvasir::worker
