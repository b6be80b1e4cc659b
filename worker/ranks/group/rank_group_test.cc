// Tests leader and followers as threads of one process, connected by queues
// instead of gRPC calls.
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/ranks/group/group_executor.h"
#include "worker/ranks/group/rank_follower.h"
#include "worker/ranks/group/rank_leader.h"
#include "worker/ranks/group/result_hash.h"
#include "worker/ranks/group/testing/fake_rank.h"

namespace kvasir::worker {
namespace {

using base::MutexLock;
using base::StatusIs;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One direction of a call: messages wait in memory until the receiver takes
// them.
class Queue final : public RankLink {
 public:
  size_t Send(Bytes message) override {
    MutexLock lock(&mutex_);
    if (!closed_.has_value()) messages_.push_back(std::move(message));
    changed_.SignalAll();
    return messages_.size();
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    if (!closed_.has_value()) closed_ = status;
    changed_.SignalAll();
  }
  // From now on messages are lost without either side noticing.
  void Freeze() {
    MutexLock lock(&mutex_);
    frozen_ = true;
  }
  // Waits for the next message and returns it. After the call was closed,
  // returns null and sets `end` to the call's status.
  Bytes Take(absl::Status* end) {
    MutexLock lock(&mutex_);
    while (true) {
      if (frozen_) messages_.clear();
      if (!messages_.empty()) {
        Bytes message = std::move(messages_.front());
        messages_.pop_front();
        return message;
      }
      if (closed_.has_value()) {
        *end = *closed_;
        return nullptr;
      }
      changed_.Wait(&mutex_);
    }
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  std::deque<Bytes> messages_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
};

// A follower's call to the leader, with a thread for each direction. Destroy it
// before leader and follower.
class Call {
 public:
  Call(RankLeader* leader, RankFollower* follower, bool authenticated) {
    const RankLeader::LinkId id =
        leader->OnLink(to_follower_, authenticated, "memory");
    follower_ = std::thread([this, follower] {
      Deliver(
          to_follower_.get(),
          [&](const std::string& bytes) {
            follower->OnBytes(bytes);
            ++delivered_;
          },
          [&](const absl::Status& why) { follower->OnLost(why); });
    });
    leader_ = std::thread([this, leader, id] {
      Deliver(
          to_leader_.get(),
          [&](const std::string& bytes) { leader->OnBytes(id, bytes); },
          [&](const absl::Status& why) { leader->OnLost(id, why); });
    });
    follower->OnLink(to_leader_);
  }
  ~Call() {
    Cut();
    follower_.join();
    leader_.join();
  }
  void Cut() {
    to_leader_->Close(absl::UnavailableError("cut"));
    to_follower_->Close(absl::UnavailableError("cut"));
  }
  void Freeze() {
    to_leader_->Freeze();
    to_follower_->Freeze();
  }
  // Number of messages that the follower has received.
  uint64_t delivered() const { return delivered_.load(); }

 private:
  template <typename OnMessage, typename OnEnd>
  static void Deliver(Queue* queue, const OnMessage& on_message,
                      const OnEnd& on_end) {
    absl::Status end;
    while (const RankLink::Bytes message = queue->Take(&end)) {
      on_message(*message);
    }
    on_end(end);
  }

  const std::shared_ptr<Queue> to_leader_ = std::make_shared<Queue>();
  const std::shared_ptr<Queue> to_follower_ = std::make_shared<Queue>();
  std::atomic<uint64_t> delivered_{0};
  std::thread follower_;
  std::thread leader_;
};

struct GroupOptions {
  uint32_t size = 3;
  absl::Duration heartbeat = kLong;
  absl::Duration step_timeout = kLong;
  int64_t max_message_bytes = kMaxLeaderMessageBytes;
  // Called when a follower loads its model; its error makes the load fail.
  std::function<absl::Status(uint32_t rank)> load = [](uint32_t) {
    return absl::OkStatus();
  };
  // Hooks of the ranks' fake executors; rank 0 is the leader.
  std::vector<FakeRank::Hook> hooks;
};

// A rank group: the leader, and followers that each run on a thread until the
// group ends.
class Group {
 public:
  explicit Group(GroupOptions options = {}) : options_(std::move(options)) {
    options_.hooks.resize(options_.size);
    RankLeaderOptions leader;
    leader.group.identity = TestIdentity(options_.size, options_.heartbeat);
    leader.group.combine = TestCombine;
    leader.group.step_timeout = options_.step_timeout;
    leader.max_message_bytes = options_.max_message_bytes;
    leader.on_end = [this](const absl::Status&) { ended_[0].Set(); };
    leader.on_drain_asked = [this] { drain_asked_.Set(); };
    leader_ = std::make_unique<RankLeader>(std::move(leader));
    for (uint32_t rank = 1; rank < options_.size; ++rank) {
      followers_.push_back(std::make_unique<OneFollower>(this, rank));
    }
    own_ = std::make_unique<FakeRank>(options_.hooks[0]);
    executor_ = std::make_unique<GroupExecutor>(leader_.get(), own_.get());
  }
  ~Group() {
    leader_->Abort(absl::CancelledError("the test is over"));
    for (const auto& follower : followers_) {
      follower->thread.join();
      follower->call.reset();
    }
  }

  absl::StatusOr<kvasir::v1::RankStart> Start() {
    KVASIR_RETURN_IF_ERROR(leader_->WaitJoined().status());
    return leader_->WaitStarted(TestReady(10));
  }
  // Waits until the follower's thread has ended and returns its status.
  absl::Status Ended(uint32_t rank) {
    OneFollower& follower = *followers_[rank - 1];
    EXPECT_TRUE(follower.done.Wait());
    return follower.status;
  }
  RankLeader& leader() { return *leader_; }
  RankFollower& follower(uint32_t rank) {
    return *followers_[rank - 1]->follower;
  }
  Call& call(uint32_t rank) { return *followers_[rank - 1]->call; }
  FakeRank& executor_of(uint32_t rank) {
    return *followers_[rank - 1]->executor;
  }
  GroupExecutor& executor() { return *executor_; }
  // Set when on_end of this rank is called.
  Event& ended(uint32_t rank) { return ended_[rank]; }
  Event& drain_asked() { return drain_asked_; }

 private:
  struct OneFollower {
    OneFollower(Group* group, uint32_t rank) {
      RankFollowerOptions options;
      *options.hello.mutable_identity() =
          TestIdentity(group->options_.size, group->options_.heartbeat);
      options.hello.set_rank(rank);
      options.hello.set_host("node");
      options.hello.set_collective_address(absl::StrCat("at ", rank));
      options.on_end = [group, rank](const absl::Status&) {
        group->ended_[rank].Set();
      };
      follower = std::make_unique<RankFollower>(std::move(options));
      executor = std::make_unique<FakeRank>(group->options_.hooks[rank]);
      call = std::make_unique<Call>(group->leader_.get(), follower.get(), true);
      thread = std::thread([this, rank, load = group->options_.load] {
        status = [&]() -> absl::Status {
          KVASIR_RETURN_IF_ERROR(follower->WaitWelcome().status());
          if (absl::Status loaded = load(rank); !loaded.ok()) {
            follower->Abort(loaded);
            return loaded;
          }
          KVASIR_RETURN_IF_ERROR(
              follower
                  ->WaitStarted(
                      TestReady(10 - rank, absl::StrCat("tiles ", rank)))
                  .status());
          return RunSteps(follower.get(), executor.get());
        }();
        done.Set();
      });
    }

    std::unique_ptr<RankFollower> follower;
    std::unique_ptr<FakeRank> executor;
    std::unique_ptr<Call> call;
    absl::Status status;
    Event done;
    std::thread thread;
  };

  GroupOptions options_;
  std::deque<Event> ended_{8};
  Event drain_asked_;
  std::unique_ptr<RankLeader> leader_;
  std::vector<std::unique_ptr<OneFollower>> followers_;
  std::unique_ptr<FakeRank> own_;
  std::unique_ptr<GroupExecutor> executor_;
};

TEST(RankGroupTest, AGroupRunsStepsOnAllRanksUntilItIsDrained) {
  Group group;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto start, group.Start());
  EXPECT_THAT(start.pages(), ElementsAre(8));
  EXPECT_EQ(start.weights_id(), "weights tiles|tiles 1|tiles 2");
  EXPECT_EQ(start.cache_id(), "cache");
  for (uint64_t step = 1; step <= 100; ++step) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const StepResult result,
                                group.executor().Execute(TestPlan(step)));
    ASSERT_EQ(result.sequences(0).token_id(), 100 + static_cast<int>(step));
    // All ranks must have run the step before a result is returned.
    ASSERT_EQ(group.executor_of(1).steps(), static_cast<int>(step));
    ASSERT_EQ(group.executor_of(2).steps(), static_cast<int>(step));
  }
  KVASIR_EXPECT_OK(group.leader().Drain());
  KVASIR_EXPECT_OK(group.Ended(1));
  KVASIR_EXPECT_OK(group.Ended(2));
  KVASIR_EXPECT_OK(group.leader().status());
  EXPECT_FALSE(group.executor().Execute(TestPlan(101)).ok());
}

TEST(RankGroupTest, TheNextPlanIsSentWhileAStepRuns) {
  Event running;
  Event go;
  GroupOptions options{.size = 2};
  options.hooks = {{}, [&](const StepPlan& plan, StepResult*) {
                     if (plan.step_id() == 1) {
                       running.Set();
                       go.Wait();
                     }
                     return absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_ASSERT_OK(group.leader().SendStep(TestPlan(1)));
  ASSERT_TRUE(running.Wait());
  const uint64_t before = group.call(1).delivered();
  KVASIR_ASSERT_OK(group.leader().SendStep(TestPlan(2)));
  while (group.call(1).delivered() == before) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_THAT(group.leader().SendStep(TestPlan(3)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "cannot send step 3 while step 1 has not ended: the "
                       "limit is 2 steps in flight"));
  go.Set();
  FakeRank own;
  for (uint64_t step = 1; step <= 2; ++step) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const StepResult result,
                                own.Execute(TestPlan(step)));
    KVASIR_EXPECT_OK(group.leader().FinishStep(result));
  }
  KVASIR_EXPECT_OK(group.leader().Drain());
}

TEST(RankGroupTest, FollowersRunAnAnnouncedStepWithoutWaitingForTheLeader) {
  Group group;
  KVASIR_ASSERT_OK(group.Start().status());
  EXPECT_TRUE(group.executor().is_asynchronous());
  KVASIR_ASSERT_OK(group.executor().Enqueue(TestPlan(1)));
  KVASIR_ASSERT_OK(group.executor().Announce(TestPlan(2)));
  // The followers run step 2 although the leader has not ended step 1.
  for (const uint32_t rank : {1u, 2u}) {
    while (group.executor_of(rank).steps() < 2) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  for (uint64_t step = 1; step <= 9; ++step) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const StepResult result,
                                group.executor().Await());
    ASSERT_EQ(result.step_id(), step);
    // Even steps were announced in the round before, and odd steps were not.
    // Enqueue must not send an announced plan again.
    KVASIR_ASSERT_OK(group.executor().Enqueue(TestPlan(step + 1)));
    if (step % 2 == 0) {
      KVASIR_ASSERT_OK(group.executor().Announce(TestPlan(step + 2)));
    }
  }
  KVASIR_ASSERT_OK(group.executor().Await().status());
  KVASIR_EXPECT_OK(group.leader().Drain());
  for (const uint32_t rank : {1u, 2u}) {
    KVASIR_EXPECT_OK(group.Ended(rank));
    EXPECT_EQ(group.executor_of(rank).steps(), 10);
  }
}

TEST(RankGroupTest, TheStepInFlightAlsoFailsIfTheAnnouncedStepFails) {
  GroupOptions options{.size = 2};
  options.hooks = {{}, [](const StepPlan& plan, StepResult*) {
                     return plan.step_id() == 2
                                ? absl::ResourceExhaustedError("no memory")
                                : absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_ASSERT_OK(group.executor().Enqueue(TestPlan(1)));
  KVASIR_ASSERT_OK(group.executor().Announce(TestPlan(2)));
  ASSERT_TRUE(group.ended(0).Wait());
  EXPECT_THAT(group.executor().Await(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       "rank 1 (node, pid 0) failed in step 2: no memory"));
}

TEST(RankGroupTest, IfOneRankFailsAllRanksEndWithItsError) {
  GroupOptions options;
  options.hooks = {{}, {}, [](const StepPlan& plan, StepResult*) {
                     return plan.step_id() == 3
                                ? absl::ResourceExhaustedError("no memory")
                                : absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  for (uint64_t step = 1; step <= 2; ++step) {
    KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(step)).status());
  }
  const std::string text = "rank 2 (node, pid 0) failed in step 3: no memory";
  EXPECT_THAT(group.executor().Execute(TestPlan(3)),
              StatusIs(absl::StatusCode::kResourceExhausted, text));
  EXPECT_THAT(group.Ended(1), StatusIs(absl::StatusCode::kResourceExhausted,
                                       absl::StrCat("the leader: ", text)));
  EXPECT_THAT(group.Ended(2),
              StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  for (const uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_TRUE(group.ended(rank).Wait());
  }
}

TEST(RankGroupTest, NoTokenOfAStepIsDeliveredIfARankHasADifferentResult) {
  GroupOptions options;
  options.hooks = {{}, [](const StepPlan& plan, StepResult* result) {
                     if (plan.step_id() == 2) {
                       result->mutable_sequences(0)->set_token_id(7);
                     }
                     return absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(1)).status());
  EXPECT_THAT(
      group.executor().Execute(TestPlan(2)),
      StatusIs(absl::StatusCode::kInternal,
               HasSubstr("the result of rank 1 (node, pid 0) has hash")));
  EXPECT_THAT(group.Ended(2),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("computed different results")));
}

TEST(RankGroupTest, AllRanksEndIfTheLeaderFails) {
  GroupOptions options;
  options.hooks = {[](const StepPlan&, StepResult*) {
    return absl::InternalError("broken");
  }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  EXPECT_THAT(group.executor().Execute(TestPlan(1)),
              StatusIs(absl::StatusCode::kInternal,
                       "rank 0 (the leader) gave up: broken"));
  for (const uint32_t rank : {1u, 2u}) {
    EXPECT_THAT(group.Ended(rank),
                StatusIs(absl::StatusCode::kInternal,
                         "the leader: rank 0 (the leader) gave up: broken"));
  }
}

TEST(RankGroupTest, TheGroupEndsIfARankHangsInAStep) {
  // `hang` simulates a collective that waits for a lost rank: step 2 of an
  // executor hangs until the group ends.
  Group* all = nullptr;
  const auto hang = [&all](uint32_t rank) {
    return [&all, rank](const StepPlan& plan, StepResult*) {
      if (plan.step_id() < 2) return absl::OkStatus();
      EXPECT_TRUE(all->ended(rank).Wait());
      return absl::AbortedError("the collective was aborted");
    };
  };
  // Timeouts are checked twelve times in each heartbeat timeout: here every 250
  // ms.
  GroupOptions options{.heartbeat = absl::Seconds(3),
                       .step_timeout = absl::Milliseconds(200),
                       .hooks = {hang(0), {}, hang(2)}};
  Group group(options);
  all = &group;
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(1)).status());
  const std::string text =
      "rank 0 (the leader), rank 2 (node, pid 0) did not end step 2 within "
      "200ms";
  EXPECT_THAT(group.executor().Execute(TestPlan(2)),
              StatusIs(absl::StatusCode::kUnavailable, text));
  for (const uint32_t rank : {1u, 2u}) {
    EXPECT_THAT(group.Ended(rank),
                StatusIs(absl::StatusCode::kUnavailable,
                         absl::StrCat("the leader: ", text)));
  }
}

TEST(RankGroupTest, AllRanksEndIfTheConnectionOfOneRankIsLost) {
  Group group;
  KVASIR_ASSERT_OK(group.Start().status());
  group.call(2).Cut();
  ASSERT_TRUE(group.ended(0).Wait());
  EXPECT_THAT(group.Ended(2),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_THAT(group.Ended(1), StatusIs(absl::StatusCode::kUnavailable,
                                       HasSubstr("rank 2 (node, pid 0)")));
  EXPECT_THAT(group.executor().Execute(TestPlan(1)),
              StatusIs(absl::StatusCode::kUnavailable,
                       "the call of rank 2 (node, pid 0) ended: cut"));
}

TEST(RankGroupTest,
     TheLeaderAndTheFollowerEachEndTheirCallIfNoHeartbeatsArrive) {
  GroupOptions options{.size = 2, .heartbeat = absl::Milliseconds(900)};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  // Sleep for longer than the heartbeat timeout. The group stays alive because
  // heartbeats are sent.
  absl::SleepFor(absl::Milliseconds(1200));
  KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(1)).status());
  group.call(1).Freeze();
  // Leader and follower each notice that no messages come from the other.
  EXPECT_THAT(group.Ended(1), StatusIs(absl::StatusCode::kUnavailable,
                                       HasSubstr("no message from")));
  EXPECT_THAT(
      group.executor().Execute(TestPlan(2)),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no message from")));
}

TEST(RankGroupTest, APlanThatIsTooLargeIsNotSent) {
  GroupOptions options{.size = 2, .max_message_bytes = 1000};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  StepPlan plan = TestPlan(1);
  for (int i = 0; i < 1000; ++i) plan.add_released_sequences(1);
  EXPECT_THAT(group.executor().Execute(plan),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("bytes, the limit is 1000")));
  EXPECT_THAT(group.Ended(1),
              StatusIs(absl::StatusCode::kResourceExhausted, ::testing::_));
}

TEST(RankGroupTest, FollowersReceiveAStepPlanUnchanged) {
  base::Mutex mutex;
  StepPlan got;
  GroupOptions options{.size = 2};
  options.hooks = {{}, [&](const StepPlan& plan, StepResult*) {
                     MutexLock lock(&mutex);
                     got = plan;
                     return absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  StepPlan plan = TestPlan(1);
  for (uint64_t i = 0; i < 300; ++i) {
    auto* sequence = plan.add_sequences();
    sequence->set_sequence_id(i);
    sequence->mutable_sample()->set_seed(~i);
    sequence->add_token_ids(static_cast<int32_t>(i));
  }
  KVASIR_ASSERT_OK(group.executor().Execute(plan).status());
  MutexLock lock(&mutex);
  EXPECT_EQ(got.SerializeAsString(), plan.SerializeAsString());
  KVASIR_EXPECT_OK(group.leader().Drain());
}

TEST(RankGroupTest, AFollowerMayAskTheLeaderForADrain) {
  Group group;
  KVASIR_ASSERT_OK(group.Start().status());
  group.follower(2).AskDrain();
  EXPECT_TRUE(group.drain_asked().Wait());
  KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(1)).status());
  KVASIR_EXPECT_OK(group.leader().Drain());
  KVASIR_EXPECT_OK(group.Ended(1));
}

TEST(RankGroupTest, AllRanksEndIfOneRankFailsToLoad) {
  Group group({.load = [](uint32_t rank) {
    return rank == 1 ? absl::NotFoundError("no such file") : absl::OkStatus();
  }});
  const std::string text = "rank 1 (node, pid 0) gave up: no such file";
  EXPECT_THAT(group.Start(), StatusIs(absl::StatusCode::kNotFound, text));
  EXPECT_THAT(group.Ended(1),
              StatusIs(absl::StatusCode::kNotFound, "no such file"));
  EXPECT_THAT(group.Ended(2), StatusIs(absl::StatusCode::kNotFound,
                                       absl::StrCat("the leader: ", text)));
}

TEST(RankGroupTest, ACallWithoutTheSecretIsRefused) {
  RankLeaderOptions leader_options;
  leader_options.group.identity = TestIdentity(2, kLong);
  leader_options.group.combine = TestCombine;
  RankLeader leader(leader_options);
  RankFollowerOptions options;
  *options.hello.mutable_identity() = TestIdentity(2, kLong);
  options.hello.set_rank(1);
  RankFollower follower(options);
  Call call(&leader, &follower, false);
  EXPECT_THAT(follower.WaitWelcome(),
              StatusIs(absl::StatusCode::kUnauthenticated,
                       HasSubstr("the call shows neither")));
  call.Cut();
}

// A link that accepts messages and never sends them.
class Stuck final : public RankLink {
 public:
  size_t Send(Bytes) override { return ++waiting_; }
  void Close(const absl::Status&) override {}

 private:
  std::atomic<size_t> waiting_{0};
};

std::string HeartbeatBytes() {
  kvasir::v1::FollowerMessage message;
  message.mutable_heartbeat();
  return message.SerializeAsString();
}

TEST(RankGroupTest, AFollowerThatDoesNotReadItsMessagesCountsAsLost) {
  Event ended;
  RankLeaderOptions options;
  options.group.identity = TestIdentity(3, absl::Milliseconds(600));
  options.group.combine = TestCombine;
  options.on_end = [&ended](const absl::Status&) { ended.Set(); };
  RankLeader leader(options);
  std::vector<RankLeader::LinkId> links;
  for (const uint32_t rank : {1u, 2u}) {
    links.push_back(leader.OnLink(std::make_shared<Stuck>(), true, "memory"));
    kvasir::v1::FollowerMessage message;
    *message.mutable_hello()->mutable_identity() = options.group.identity;
    message.mutable_hello()->set_rank(rank);
    leader.OnBytes(links.back(), message.SerializeAsString());
  }
  // Both followers still send heartbeats, so only their unread messages can end
  // the group.
  while (!ended.Wait(absl::Milliseconds(20))) {
    for (const RankLeader::LinkId link : links) {
      leader.OnBytes(link, HeartbeatBytes());
    }
  }
  EXPECT_THAT(leader.status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       "rank 1 (, pid 0) does not read its messages: 17 "
                       "messages wait"));
}

TEST(RankGroupTest, ALeaderThatDoesNotReadItsMessagesCountsAsLost) {
  Event ended;
  RankFollowerOptions options;
  *options.hello.mutable_identity() = TestIdentity(2, absl::Milliseconds(600));
  options.hello.set_rank(1);
  options.on_end = [&ended](const absl::Status&) { ended.Set(); };
  RankFollower follower(options);
  follower.OnLink(std::make_shared<Stuck>());
  kvasir::v1::LeaderMessage message;
  message.mutable_heartbeat();
  while (!ended.Wait(absl::Milliseconds(20))) {
    follower.OnBytes(message.SerializeAsString());
  }
  EXPECT_THAT(follower.status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       "the leader does not read its messages: 17 messages "
                       "wait"));
}

// A rank sends heartbeats also while it loads or runs a long step.
TEST(RankGroupTest, ARankIsNotReportedAsLostDuringALongLoadOrALongStep) {
  const auto busy = [] { absl::SleepFor(absl::Milliseconds(1300)); };
  GroupOptions options{.size = 2, .heartbeat = absl::Milliseconds(900)};
  options.load = [&](uint32_t) {
    busy();
    return absl::OkStatus();
  };
  options.hooks = {{}, [&](const StepPlan&, StepResult*) {
                     busy();
                     return absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_EXPECT_OK(group.executor().Execute(TestPlan(1)).status());
  KVASIR_EXPECT_OK(group.leader().Drain());
  KVASIR_EXPECT_OK(group.Ended(1));
}

// When rank 2 fails, the collectives of ranks 0 and 1 fail before the leader
// receives the reason from rank 2.
TEST(RankGroupTest, TheGroupReportsTheErrorOfTheRankThatFailedFirst) {
  GroupOptions options;
  const auto echo = [](const StepPlan& plan, StepResult*) {
    return plan.step_id() == 2 ? absl::AbortedError("a rank gave up")
                               : absl::OkStatus();
  };
  options.hooks = {echo, echo, [](const StepPlan& plan, StepResult*) {
                     if (plan.step_id() == 2) {
                       absl::SleepFor(absl::Milliseconds(200));
                       return absl::DataLossError("a page is broken");
                     }
                     return absl::OkStatus();
                   }};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  KVASIR_ASSERT_OK(group.executor().Execute(TestPlan(1)).status());
  const std::string text =
      "rank 2 (node, pid 0) failed in step 2: a page is broken";
  EXPECT_THAT(group.executor().Execute(TestPlan(2)),
              StatusIs(absl::StatusCode::kDataLoss, text));
  EXPECT_THAT(group.Ended(1), StatusIs(absl::StatusCode::kDataLoss,
                                       absl::StrCat("the leader: ", text)));
}

TEST(RankGroupTest, TheGroupReportsAnErrorOfTheLeaderIfNoOtherRankReportsOne) {
  GroupOptions options{.size = 2};
  options.hooks = {[](const StepPlan&, StepResult*) {
                     return absl::UnavailableError("rank 1 stands still");
                   },
                   {}};
  Group group(options);
  KVASIR_ASSERT_OK(group.Start().status());
  EXPECT_THAT(group.executor().Execute(TestPlan(1)),
              StatusIs(absl::StatusCode::kUnavailable,
                       "rank 0 (the leader) gave up: rank 1 stands still"));
}

TEST(RankGroupTest, AllRanksEndIfTheLeaderFailsToCombineTheWeightTiles) {
  RankLeaderOptions options;
  options.group.identity = TestIdentity(2, kLong);
  options.group.combine = [](absl::Span<const std::string> tiles) {
    EXPECT_THAT(tiles, ElementsAre("own", "others"));
    return absl::DataLossError("tile 3 of rank 1 is another");
  };
  RankLeader leader(options);
  RankFollowerOptions joining;
  *joining.hello.mutable_identity() = TestIdentity(2, kLong);
  joining.hello.set_rank(1);
  RankFollower follower(joining);
  Call call(&leader, &follower, true);
  std::thread other([&follower] {
    KVASIR_ASSERT_OK(follower.WaitWelcome().status());
    EXPECT_THAT(follower.WaitStarted(TestReady(9, "others")),
                StatusIs(absl::StatusCode::kDataLoss,
                         "the leader: tile 3 of rank 1 is another"));
  });
  KVASIR_ASSERT_OK(leader.WaitJoined().status());
  EXPECT_THAT(
      leader.WaitStarted(TestReady(9, "own")),
      StatusIs(absl::StatusCode::kDataLoss, "tile 3 of rank 1 is another"));
  other.join();
}

// Rounds differ in what fails and after which step. All calls that wait must
// return.
TEST(RankGroupTest, EveryWaitingCallReturnsWhateverEndsTheGroup) {
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const auto last = static_cast<uint64_t>(round % 7);
    GroupOptions options{.size = 4};
    options.hooks.resize(4);
    if (round % 4 == 1) {
      options.hooks[2] = [last](const StepPlan& plan, StepResult*) {
        return plan.step_id() > last ? absl::InternalError("x")
                                     : absl::OkStatus();
      };
    }
    Group group(options);
    absl::Status status = group.Start().status();
    for (uint64_t step = 1; status.ok(); ++step) {
      if (step > last) {
        if (round % 4 == 0) group.call(3).Cut();
        if (round % 4 == 2) group.follower(1).Abort(absl::DataLossError("y"));
        if (round % 4 == 3) group.leader().Abort(absl::DataLossError("z"));
      }
      status = group.executor().Execute(TestPlan(step)).status();
    }
    for (const uint32_t rank : {1u, 2u, 3u}) {
      EXPECT_FALSE(group.Ended(rank).ok());
    }
  }
}

TEST(ResultHashTest,
     TheHashOfAResultDependsOnTheStepAndOnEachSequencesIdTokenAndFault) {
  StepResult result;
  result.set_step_id(1);
  result.add_sequences()->set_sequence_id(5);
  result.mutable_sequences(0)->set_token_id(7);
  const uint64_t hash = ResultHash(result);
  // Equal results have the same hash.
  EXPECT_EQ(hash, ResultHash(StepResult(result)));
  StepResult other = result;
  other.set_step_id(2);
  EXPECT_NE(ResultHash(other), hash);
  other = result;
  other.mutable_sequences(0)->set_sequence_id(6);
  EXPECT_NE(ResultHash(other), hash);
  other = result;
  other.mutable_sequences(0)->set_token_id(-1);
  EXPECT_NE(ResultHash(other), hash);
  other = result;
  other.mutable_sequences(0)->set_fault(kvasir::v1::LOGIT_NOT_FINITE);
  EXPECT_NE(ResultHash(other), hash);
  other = result;
  other.mutable_sequences(0)->set_logprob(-1);
  EXPECT_EQ(ResultHash(other), hash);
}

}  // namespace
}  // namespace kvasir::worker
