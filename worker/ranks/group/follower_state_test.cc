#include "worker/ranks/group/follower_state.h"

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kvasir::v1::FollowerMessage;
using kvasir::v1::LeaderMessage;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Phase = FollowerState::Phase;

kvasir::v1::RankHello Hello() {
  kvasir::v1::RankHello hello;
  hello.mutable_identity()->set_tp_size(2);
  hello.mutable_identity()->set_heartbeat_timeout_ms(3000);
  hello.set_rank(1);
  return hello;
}

kvasir::v1::RankReady Ready() {
  kvasir::v1::RankReady ready;
  ready.add_pages(9);
  ready.add_host_pages(4);
  return ready;
}

class Follower {
 public:
  Follower() : state_(Hello(), absl::Seconds(20), now_) {}
  static Follower In(Phase phase) {
    Follower follower;
    if (phase >= Phase::kLoading) follower.Welcome();
    if (phase >= Phase::kReady) {
      KVASIR_EXPECT_OK(follower.state_.OnReady(Ready()));
    }
    if (phase >= Phase::kRunning) follower.Start(8, 4);
    EXPECT_EQ(follower.state_.phase(), phase);
    (void)follower.Sent();
    return follower;
  }

  FollowerState& state() { return state_; }
  void Receive(LeaderMessage message) { state_.OnMessage(&message, now_); }
  void Welcome(int addresses = 2) {
    LeaderMessage message;
    message.mutable_welcome();
    for (int i = 0; i < addresses; ++i) {
      message.mutable_welcome()->add_collective_addresses(
          absl::StrCat("address ", i));
    }
    Receive(message);
  }
  void Start(int64_t pages, int64_t host_pages) {
    LeaderMessage message;
    message.mutable_start()->add_pages(pages);
    message.mutable_start()->add_host_pages(host_pages);
    Receive(message);
  }
  void Step(uint64_t id) {
    LeaderMessage message;
    message.mutable_step()->set_step_id(id);
    Receive(message);
  }
  void Drain() {
    LeaderMessage message;
    message.mutable_drain();
    Receive(message);
  }
  void Pass(absl::Duration time, bool leader_lives) {
    const absl::Time until = now_ + time;
    while (now_ < until) {
      now_ += absl::Milliseconds(250);
      LeaderMessage message;
      message.mutable_heartbeat();
      if (leader_lives) Receive(message);
      state_.OnTime(now_);
    }
  }
  void Jump(absl::Duration time) {
    now_ += time;
    state_.OnTime(now_);
  }

  // Returns the messages that the follower sent, except heartbeats.
  std::vector<std::string> Sent() {
    std::vector<std::string> sent;
    for (const FollowerMessage& message : state_.TakeMessages()) {
      if (!message.has_heartbeat()) sent.push_back(message.ShortDebugString());
    }
    return sent;
  }

 private:
  absl::Time now_ = absl::UnixEpoch();
  FollowerState state_;
};

TEST(FollowerStateTest, AFollowerRunsTheStepsOfItsLeaderUntilTheDrain) {
  Follower follower;
  EXPECT_THAT(follower.Sent(), ElementsAre(HasSubstr("hello { identity")));
  follower.Welcome();
  EXPECT_THAT(follower.state().collective_addresses(),
              ElementsAre("address 0", "address 1"));
  KVASIR_EXPECT_OK(follower.state().OnReady(Ready()));
  EXPECT_THAT(follower.Sent(), ElementsAre("ready { pages: 9 host_pages: 4 }"));
  follower.Start(8, 4);
  EXPECT_THAT(follower.state().start().pages(), ElementsAre(8));

  EXPECT_FALSE(follower.state().TakeStep().has_value());
  follower.Step(1);
  EXPECT_EQ(follower.state().TakeStep()->step_id(), 1u);
  follower.Step(2);  // while step 1 runs
  KVASIR_EXPECT_OK(follower.state().OnStepDone(1, 5));
  follower.Step(3);
  EXPECT_EQ(follower.state().TakeStep()->step_id(), 2u);
  KVASIR_EXPECT_OK(follower.state().OnStepDone(2, 6));
  EXPECT_EQ(follower.state().TakeStep()->step_id(), 3u);
  KVASIR_EXPECT_OK(follower.state().OnStepDone(3, 7));
  EXPECT_THAT(follower.Sent(),
              ElementsAre("step_done { step_id: 1 result_hash: 5 }",
                          "step_done { step_id: 2 result_hash: 6 }",
                          "step_done { step_id: 3 result_hash: 7 }"));
  follower.Drain();
  EXPECT_EQ(follower.state().phase(), Phase::kEnded);
  KVASIR_EXPECT_OK(follower.state().status());
  follower.state().OnLost(absl::OkStatus());
  KVASIR_EXPECT_OK(follower.state().status());
}

struct Broken {
  std::string name;
  Phase phase;
  std::function<void(Follower*)> act;
  absl::StatusCode code;
  std::string text;
  // Whether the follower reports `text` to the leader in a RankAbort.
  bool reported = true;
};

class BrokenFollowerTest : public ::testing::TestWithParam<Broken> {};

TEST_P(BrokenFollowerTest, TheStatusOfAFollowerThatFailedStatesTheReason) {
  Follower follower = Follower::In(GetParam().phase);
  GetParam().act(&follower);
  EXPECT_EQ(follower.state().phase(), Phase::kEnded);
  EXPECT_THAT(follower.state().status(),
              StatusIs(GetParam().code, GetParam().text));
  if (GetParam().reported) {
    EXPECT_THAT(follower.Sent(),
                ElementsAre(absl::StrCat(
                    "abort { code: ", static_cast<int>(GetParam().code),
                    " reason: \"", GetParam().text, "\" }")));
  } else {
    EXPECT_THAT(follower.Sent(), IsEmpty());
  }
  // After the end the follower sends nothing more.
  follower.Step(1);
  follower.state().AskDrain();
  follower.state().Abort(absl::InternalError("late"));
  follower.Pass(absl::Seconds(5), true);
  EXPECT_FALSE(follower.state().TakeStep().has_value());
  EXPECT_THAT(follower.state().TakeMessages(), IsEmpty());
  EXPECT_THAT(follower.state().status(),
              StatusIs(GetParam().code, GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(
    Rules, BrokenFollowerTest,
    ::testing::ValuesIn(std::vector<Broken>{
        {"Refused", Phase::kJoining,
         [](Follower* f) {
           LeaderMessage message;
           message.mutable_refusal()->set_reason(
               kvasir::v1::RankRefusal::WRONG_SIZE);
           message.mutable_refusal()->set_detail("tp_size is 2");
           f->Receive(message);
         },
         absl::StatusCode::kFailedPrecondition,
         "the leader refuses this rank: WRONG_SIZE: tp_size is 2", false},
        {"RefusedWithoutASecret", Phase::kJoining,
         [](Follower* f) {
           LeaderMessage message;
           message.mutable_refusal()->set_reason(
               kvasir::v1::RankRefusal::UNAUTHENTICATED);
           message.mutable_refusal()->set_detail("no secret");
           f->Receive(message);
         },
         absl::StatusCode::kUnauthenticated,
         "the leader refuses this rank: no secret", false},
        {"RefusedForAReasonThatIsNotKnown", Phase::kJoining,
         [](Follower* f) {
           LeaderMessage message;
           message.mutable_refusal()->set_reason(
               static_cast<kvasir::v1::RankRefusal::Reason>(99));
           f->Receive(message);
         },
         absl::StatusCode::kFailedPrecondition,
         "the leader refuses this rank: 99: ", false},
        {"OthersDoNotJoin", Phase::kJoining,
         [](Follower* f) { f->Pass(absl::Seconds(20), true); },
         absl::StatusCode::kDeadlineExceeded,
         "not all ranks joined the tensor-parallel group within 20s"},
        {"WelcomeForAnotherGroupSize", Phase::kJoining,
         [](Follower* f) { f->Welcome(3); }, absl::StatusCode::kInvalidArgument,
         "the leader sent a RankWelcome with 3 addresses for 2 ranks"},
        {"WelcomeTwice", Phase::kRunning, [](Follower* f) { f->Welcome(); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a second RankWelcome"},
        {"StartBeforeItIsReady", Phase::kLoading,
         [](Follower* f) { f->Start(8, 4); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a RankStart out of turn"},
        {"StartWithMorePagesThanOffered", Phase::kReady,
         [](Follower* f) { f->Start(10, 4); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a RankStart whose page counts are negative, too "
         "large "
         "for this rank, or for other page groups: pages: 10 host_pages: 4"},
        {"StepBeforeTheStart", Phase::kReady, [](Follower* f) { f->Step(1); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a StepPlan out of turn"},
        {"StepReplayed", Phase::kRunning,
         [](Follower* f) {
           f->Step(1);
           f->Step(1);
         },
         absl::StatusCode::kInvalidArgument,
         "the leader sent step 1, expected step 2"},
        {"StepLeftOut", Phase::kRunning, [](Follower* f) { f->Step(2); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent step 2, expected step 1"},
        {"ThirdStep", Phase::kRunning,
         [](Follower* f) {
           f->Step(1);
           f->Step(2);
           f->Step(3);
         },
         absl::StatusCode::kInvalidArgument,
         "the leader sent step 3 while step 1 has not ended: the limit is 2 "
         "steps in flight"},
        {"DrainInAStep", Phase::kRunning,
         [](Follower* f) {
           f->Step(1);
           f->Drain();
         },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a RankDrain while step 1 runs"},
        {"EmptyMessage", Phase::kRunning,
         [](Follower* f) { f->Receive(LeaderMessage()); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent a message of an unknown kind"},
        {"Garbage", Phase::kRunning,
         [](Follower* f) { f->state().OnGarbage(12); },
         absl::StatusCode::kInvalidArgument,
         "the leader sent 12 bytes that are not a LeaderMessage"},
        {"Aborted", Phase::kRunning,
         [](Follower* f) {
           LeaderMessage message;
           message.mutable_abort()->set_code(13);
           message.mutable_abort()->set_reason("rank 3 is gone");
           f->Receive(message);
         },
         absl::StatusCode::kInternal, "the leader: rank 3 is gone", false},
        {"Lost", Phase::kRunning,
         [](Follower* f) {
           f->state().OnLost(absl::UnavailableError("reset"));
         },
         absl::StatusCode::kUnavailable, "the call to the leader ended: reset",
         false},
        {"CallEndsWithoutAReason", Phase::kRunning,
         [](Follower* f) { f->state().OnLost(absl::OkStatus()); },
         absl::StatusCode::kUnavailable,
         "the leader closed the connection without giving a reason", false},
        {"SilentLeader", Phase::kRunning,
         [](Follower* f) { f->Pass(absl::Seconds(3), false); },
         absl::StatusCode::kUnavailable,
         "no message from the leader for 3s, the heartbeat timeout is 3s",
         false},
        {"OwnFailure", Phase::kLoading,
         [](Follower* f) { f->state().Abort(absl::NotFoundError("no file")); },
         absl::StatusCode::kNotFound, "no file"},
    }),
    [](const auto& each) { return each.param.name; });

TEST(FollowerStateTest, AFollowerDoesNotSendMoreWeightTilesThanALeaderAccepts) {
  Follower follower = Follower::In(Phase::kLoading);
  kvasir::v1::RankReady ready = Ready();
  ready.set_weight_tiles(std::string(kMaxReadyBytes + 1, 't'));
  EXPECT_THAT(follower.state().OnReady(ready),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("33554433 bytes, the limit is 33554432")));
  EXPECT_THAT(follower.Sent(), IsEmpty());
  ready.set_weight_tiles("few");
  KVASIR_EXPECT_OK(follower.state().OnReady(ready));
  EXPECT_THAT(follower.Sent(), ElementsAre(HasSubstr("weight_tiles: \"few\"")));
}

TEST(FollowerStateTest, AFollowerReportsAFailedStepToTheLeader) {
  Follower follower = Follower::In(Phase::kRunning);
  follower.Step(1);
  ASSERT_TRUE(follower.state().TakeStep().has_value());
  KVASIR_EXPECT_OK(
      follower.state().OnStepFailed(1, absl::InternalError("broken")));
  EXPECT_THAT(
      follower.Sent(),
      ElementsAre("step_done { step_id: 1 code: 13 error: \"broken\" }"));
  EXPECT_THAT(follower.state().status(),
              StatusIs(absl::StatusCode::kInternal, "broken"));
}

TEST(FollowerStateTest, CallsInTheWrongOrderAreRefused) {
  Follower follower = Follower::In(Phase::kLoading);
  EXPECT_THAT(follower.state().OnStepDone(1, 5),
              StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::_));
  KVASIR_EXPECT_OK(follower.state().OnReady(Ready()));
  EXPECT_THAT(follower.state().OnReady(Ready()),
              StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::_));
  follower.Start(9, 4);
  follower.Step(1);
  EXPECT_THAT(follower.state().OnStepDone(1, 5),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("step 0 was started last")));
  ASSERT_TRUE(follower.state().TakeStep().has_value());
  EXPECT_THAT(follower.state().OnStepDone(2, 5),
              StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::_));
  KVASIR_EXPECT_OK(follower.state().OnStepDone(1, 5));
  EXPECT_EQ(follower.state().phase(), Phase::kRunning);
}

TEST(FollowerStateTest,
     TimeInWhichTheFollowerDidNotRunDoesNotCountAsSilenceOfTheLeader) {
  Follower follower = Follower::In(Phase::kRunning);
  follower.Jump(absl::Minutes(10));
  EXPECT_EQ(follower.state().phase(), Phase::kRunning);
  follower.Pass(absl::Seconds(3), false);
  EXPECT_EQ(follower.state().phase(), Phase::kEnded);
}

TEST(FollowerStateTest,
     AFollowerWaitsForOtherRanksToLoadAsLongAsTheLeaderIsAlive) {
  Follower follower = Follower::In(Phase::kReady);
  follower.Pass(absl::Hours(1), true);
  EXPECT_EQ(follower.state().phase(), Phase::kReady);
  follower.state().AskDrain();
  EXPECT_THAT(follower.Sent(), ElementsAre("drain { }"));
  follower.Drain();
  KVASIR_EXPECT_OK(follower.state().status());
}

}  // namespace
}  // namespace kvasir::worker
