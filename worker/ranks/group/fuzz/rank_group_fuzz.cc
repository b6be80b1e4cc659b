// Fuzz test with malicious followers. The invariants of RankGroupState must
// hold whatever the followers send, and a group that receives nothing more must
// end.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "worker/ranks/group/rank_group_state.h"
#include "worker/ranks/group/rank_identity.h"

namespace {

using kvasir::v1::FollowerMessage;
using kvasir::v1::LeaderMessage;
using kvasir::worker::RankGroupState;
using Phase = RankGroupState::Phase;

constexpr uint32_t kSize = 3;
constexpr absl::Duration kTick = absl::Milliseconds(250);

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t Take() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  std::string Take(size_t most) {
    std::string taken;
    while (taken.size() < most && !empty()) {
      taken.push_back(static_cast<char>(Take()));
    }
    return taken;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

kvasir::v1::RankIdentity Identity() {
  kvasir::v1::RankIdentity identity;
  identity.set_tp_size(kSize);
  identity.set_heartbeat_timeout_ms(3000);
  return identity;
}

kvasir::v1::RankReady Ready(uint8_t pages) {
  kvasir::v1::RankReady ready;
  ready.set_weight_tiles("tiles");
  ready.add_pages(pages);
  return ready;
}

class Fuzz {
 public:
  Fuzz()
      : state_({.identity = Identity(),
                .join_timeout = absl::Seconds(20),
                .load_timeout = absl::Seconds(20),
                .step_timeout = absl::Seconds(10)},
               now_) {}

  void Run(Bytes bytes) {
    SetUp(bytes.Take() % 3);
    while (!bytes.empty()) {
      Act(bytes.Take(), &bytes);
      Check();
    }
    // From now on no rank sends anything, so the group must end.
    for (int i = 0; i < 100; ++i) {
      Pass();
      Check();
    }
    KVASIR_CHECK(state_.phase() == Phase::kEnded);
    KVASIR_CHECK(open_.empty());
  }

 private:
  // Brings the group to phase 0 (joining), 1 (all ranks have joined) or 2
  // (running).
  void SetUp(uint8_t phase) {
    for (uint8_t rank = 1; phase > 0 && rank < kSize; ++rank) {
      const auto link = static_cast<uint8_t>((rank - 1) * 16);
      const uint8_t yes[] = {1, rank, 9};
      Bytes bytes(yes, 3);
      Act(link, &bytes);
      Act(link + 2, &bytes);
    }
    for (uint8_t rank = 1; phase > 1 && rank < kSize; ++rank) {
      const uint8_t pages[] = {9};
      Bytes bytes(pages, 1);
      Act(static_cast<uint8_t>((rank - 1) * 16 + 3), &bytes);
    }
    const uint8_t pages[] = {8};
    Bytes bytes(pages, 1);
    if (phase > 1) Act(9, &bytes);
    Check();
    KVASIR_CHECK(static_cast<int>(state_.phase()) == phase);
  }

  void Act(uint8_t what, Bytes* bytes) {
    const uint64_t link = 1 + what / 16 % 8;
    FollowerMessage message;
    switch (what % 16) {
      case 0:
        if (!known_.emplace(link, true).second) return;
        open_[link] = true;
        state_.OnLink(link, bytes->Take() != 0, "peer", now_);
        return;
      case 1:
        if (bytes->Take() % 4 == 3) return state_.OnBacklog(link, 17);
        state_.OnLost(link, absl::UnavailableError("lost"));
        open_.erase(link);
        return;
      case 2:
        *message.mutable_hello()->mutable_identity() = Identity();
        message.mutable_hello()->set_rank(bytes->Take() % (kSize + 1));
        break;
      case 3:
        *message.mutable_ready() = Ready(bytes->Take());
        break;
      case 4:
        message.mutable_step_done()->set_step_id(bytes->Take() % 4);
        message.mutable_step_done()->set_result_hash(bytes->Take() / 128);
        break;
      case 5:
        message.mutable_heartbeat();
        break;
      case 6:
        message.mutable_drain();
        break;
      case 7:
        return Pass();
      case 8:
        now_ += absl::Seconds(bytes->Take());
        return state_.OnTime(now_);
      case 9:
        if (!ready_) state_.OnReady(Ready(bytes->Take()));
        ready_ = state_.phase() != Phase::kJoining;
        if (const auto tiles = state_.TakeTiles()) {
          KVASIR_CHECK(tiles->size() == kSize);
          if (bytes->Take() % 16 == 15) {
            state_.OnCombined(absl::DataLossError("fuzz"));
          } else {
            state_.OnCombined(kvasir::worker::CombinedIds());
          }
        }
        return;
      case 10:
        if (state_.OnStep(sent_ + 1, now_).ok()) ++sent_;
        return;
      case 11:
        if (done_ < sent_) state_.OnStepDone(++done_, bytes->Take() / 128);
        return;
      case 12:
        (void)state_.Drain();
        return;
      case 13:
        return state_.OnGarbage(link, bytes->Take(), now_);
      case 14:
        return state_.Abort(absl::InternalError("fuzz"));
      default:
        if (!message.ParseFromString(bytes->Take(bytes->Take()))) {
          return state_.OnGarbage(link, 1, now_);
        }
    }
    state_.OnMessage(link, &message, now_);
  }

  void Pass() {
    now_ += kTick;
    state_.OnTime(now_);
  }

  void Check() {
    for (const RankGroupState::Action& action : state_.TakeActions()) {
      // No message may be sent on a closed call.
      KVASIR_CHECK(open_.contains(action.link));
      KVASIR_CHECK(action.message.message_case() !=
                       LeaderMessage::MESSAGE_NOT_SET ||
                   action.close.has_value());
      if (action.message.has_start()) {
        KVASIR_CHECK(action.message.start().pages(0) > 0);
      }
      if (action.close.has_value()) open_.erase(action.link);
    }
    (void)state_.TakeEvents();
    KVASIR_CHECK(state_.members().size() == state_.member_links().size());
    const std::vector<uint64_t> members = state_.member_links();
    KVASIR_CHECK(members.size() < kSize);
    for (const uint64_t link : members) KVASIR_CHECK(open_.contains(link));
    switch (state_.phase()) {
      case Phase::kJoining:
        KVASIR_CHECK(members.size() + 1 < kSize);
        break;
      case Phase::kLoading:
      case Phase::kRunning:
        KVASIR_CHECK(members.size() + 1 == kSize);
        KVASIR_CHECK(state_.collective_addresses().size() == kSize);
        break;
      case Phase::kEnded:
        KVASIR_CHECK(members.empty());
        break;
    }
    KVASIR_CHECK(state_.status().ok() || state_.phase() == Phase::kEnded);
    KVASIR_CHECK(!state_.IsStepDone(sent_ + 1));
  }

  absl::Time now_ = absl::UnixEpoch();
  RankGroupState state_;
  std::map<uint64_t, bool> known_;
  std::map<uint64_t, bool> open_;
  bool ready_ = false;
  uint64_t sent_ = 0;
  uint64_t done_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Fuzz().Run(Bytes(data, size));
  return 0;
}
