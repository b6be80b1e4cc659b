// Tests a group of ranks that run a model. Plans are sent over gRPC; the
// collective sums in memory.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/collective.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/group/group_executor.h"
#include "worker/ranks/group/rank_client.h"
#include "worker/ranks/group/rank_follower.h"
#include "worker/ranks/group/rank_leader.h"
#include "worker/ranks/group/rank_server.h"
#include "worker/ranks/group/result_hash.h"
#include "worker/ranks/group/testing/fake_rank.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

constexpr char kSecret[] = "a secret of tests";

absl::StatusOr<std::unique_ptr<Rank>> MakeRank(Collective* collective) {
  return MakeTinyRank(TinyOptions(), collective, TinyShape(), kvasir::v1::F32);
}

kvasir::v1::RankReady ReadyOf(const Rank& rank) {
  kvasir::v1::RankReady ready;
  ready.set_weight_tiles(rank.weights_id());
  ready.mutable_pages()->Add(rank.pages().begin(), rank.pages().end());
  ready.mutable_host_pages()->Add(rank.host_pages().begin(),
                                  rank.host_pages().end());
  return ready;
}

// Runs a prompt and eight output tokens. Returns the result of each step.
absl::StatusOr<std::vector<kvasir::v1::StepResult>> Generate(
    Executor* executor, const Rank& rank, const cache::PageCounts& pages) {
  DirectRunner runner(executor, &rank.layout(), pages);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 20; ++i) prompt.push_back(11 * i + 3);
  std::vector<kvasir::v1::StepResult> results;
  for (int step = 0; step < 8; ++step) {
    DirectStep direct = {.sequence_id = 1, .sample = GreedySample()};
    direct.sample->set_num_logprobs(3);
    if (step == 0) direct.token_ids = prompt;
    KVASIR_ASSIGN_OR_RETURN(results.emplace_back(),
                            runner.Run(absl::MakeConstSpan(&direct, 1)));
  }
  return results;
}

std::vector<int32_t> TokensOf(
    const std::vector<kvasir::v1::StepResult>& results) {
  std::vector<int32_t> tokens;
  for (const kvasir::v1::StepResult& result : results) {
    tokens.push_back(result.sequences(0).token_id());
  }
  return tokens;
}

// Runs the ranks without gRPC, each with the same plans and connected only by a
// collective. Returns rank 0's results.
std::vector<kvasir::v1::StepResult> WithoutAGroup(uint32_t size) {
  const auto sums = InProcessGroup::Create(size);
  std::vector<std::vector<kvasir::v1::StepResult>> results(size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      KVASIR_ASSERT_OK_AND_ASSIGN(const auto model, MakeRank(sums[rank].get()));
      KVASIR_ASSERT_OK_AND_ASSIGN(
          results[rank], Generate(&model->executor(), *model, model->pages()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results[0];
}

// The ids of the steps in which a rank misbehaves; 0: never.
struct Fault {
  uint64_t stops_in = 0;  // in this step it hangs until its group ends
  uint64_t differs_in = 0;
};

class Faulty final : public Executor {
 public:
  Faulty(Executor* own, const Fault& fault, Event* stopped, Event* ended)
      : own_(*own), fault_(fault), stopped_(*stopped), ended_(*ended) {}

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override {
    if (plan.step_id() == fault_.stops_in) {
      stopped_.Set();
      EXPECT_TRUE(ended_.Wait());
      return absl::AbortedError("stopped");
    }
    return own_.Enqueue(plan);
  }
  absl::StatusOr<kvasir::v1::StepResult> Await() override {
    KVASIR_ASSIGN_OR_RETURN(kvasir::v1::StepResult result, own_.Await());
    if (result.step_id() == fault_.differs_in) {
      auto* sequence = result.mutable_sequences(0);
      sequence->set_token_id(sequence->token_id() + 1);
    }
    return result;
  }

 private:
  Executor& own_;
  const Fault fault_;
  Event& stopped_;
  Event& ended_;
};

// A follower whose thread loads a model and runs steps.
struct ModelFollower {
  ModelFollower(uint32_t rank, uint32_t size, const std::string& leader,
                Collective* collective, const Fault& fault) {
    auto dialled = RankClient::Dial({.leader = leader, .secret = kSecret});
    KVASIR_EXPECT_OK(dialled.status());
    client = *std::move(dialled);
    RankFollowerOptions options;
    *options.hello.mutable_identity() = TestIdentity(size, kLong);
    options.hello.set_rank(rank);
    options.hello.set_host("node");
    options.on_end = [this, collective](const absl::Status& why) {
      collective->Abort(why);
      ended.Set();
    };
    follower = std::make_unique<RankFollower>(std::move(options));
    client->Join(follower.get());
    thread = std::thread([this, collective, fault] {
      status = [&]() -> absl::Status {
        KVASIR_RETURN_IF_ERROR(follower->WaitWelcome().status());
        KVASIR_ASSIGN_OR_RETURN(const auto model, MakeRank(collective));
        KVASIR_RETURN_IF_ERROR(follower->WaitStarted(ReadyOf(*model)).status());
        Faulty executor(&model->executor(), fault, &stopped, &ended);
        return RunSteps(follower.get(), &executor);
      }();
      done.Set();
    });
  }
  ~ModelFollower() {
    follower->Abort(absl::CancelledError("the test is over"));
    thread.join();
    client.reset();
  }
  // Waits until the follower's thread has ended and returns its status.
  absl::Status Ended() {
    EXPECT_TRUE(done.Wait());
    return status;
  }

  Event stopped;
  Event ended;
  std::unique_ptr<RankFollower> follower;
  std::unique_ptr<RankClient> client;
  absl::Status status;
  Event done;
  std::thread thread;
};

// A leader with its server and all followers. Followers may have faults.
class ModelGroup {
 public:
  explicit ModelGroup(uint32_t size,
                      const std::map<uint32_t, Fault>& faults = {})
      : sums_(InProcessGroup::Create(size)) {
    RankLeaderOptions options;
    options.group.identity = TestIdentity(size, kLong);
    options.group.combine = TestCombine;
    options.on_end = [this](const absl::Status& why) {
      sums_[0]->Abort(why);
      why_ = why;
      ended_.Set();
    };
    leader_ = std::make_unique<RankLeader>(std::move(options));
    auto server = RankServer::Start({.secret = kSecret}, leader_.get());
    KVASIR_EXPECT_OK(server.status());
    server_ = *std::move(server);
    for (uint32_t rank = 1; rank < size; ++rank) {
      const auto fault = faults.find(rank);
      followers_.push_back(std::make_unique<ModelFollower>(
          rank, size, server_->target(), sums_[rank].get(),
          fault == faults.end() ? Fault() : fault->second));
    }
  }

  absl::Status Start() {
    KVASIR_RETURN_IF_ERROR(leader_->WaitJoined().status());
    KVASIR_ASSIGN_OR_RETURN(model_, MakeRank(sums_[0].get()));
    KVASIR_ASSIGN_OR_RETURN(start_, leader_->WaitStarted(ReadyOf(*model_)));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<kvasir::v1::StepResult>> Run() {
    KVASIR_RETURN_IF_ERROR(Start());
    GroupExecutor executor(leader_.get(), &model_->executor());
    return Generate(&executor, *model_,
                    {start_.pages().begin(), start_.pages().end()});
  }
  RankLeader& leader() { return *leader_; }
  Event& ended() { return ended_; }  // set by the leader's on_end
  // Valid after ended() was set.
  const absl::Status& why() const { return why_; }
  ModelFollower& follower(uint32_t rank) { return *followers_[rank - 1]; }

 private:
  const std::vector<std::unique_ptr<Collective>> sums_;
  Event ended_;
  absl::Status why_;
  std::unique_ptr<RankLeader> leader_;
  std::unique_ptr<RankServer> server_;
  std::vector<std::unique_ptr<ModelFollower>> followers_;
  std::unique_ptr<Rank> model_;
  kvasir::v1::RankStart start_;
};

class ModelRanksGrpcTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(ModelRanksGrpcTest,
       AGroupOverGrpcGivesTheSameResultsAsRanksWithoutGrpc) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one, MakeRank(nullptr));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ones,
                              Generate(&one->executor(), *one, one->pages()));
  const auto want = WithoutAGroup(GetParam());
  ModelGroup group(GetParam());
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto results, group.Run());
  ASSERT_EQ(results.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(results[i].SerializeAsString(), want[i].SerializeAsString());
  }
  EXPECT_EQ(TokensOf(results), TokensOf(ones));
  KVASIR_EXPECT_OK(group.leader().Drain());
  for (uint32_t rank = 1; rank < GetParam(); ++rank) {
    KVASIR_EXPECT_OK(group.follower(rank).Ended());
  }
}

TEST_P(
    ModelRanksGrpcTest,
    IfARankSamplesADifferentTokenTheGroupEndsWithAnErrorThatStatesBothHashes) {
  const uint32_t last = GetParam() - 1;
  std::vector<kvasir::v1::StepResult> want = WithoutAGroup(GetParam());
  ModelGroup group(GetParam(), {{last, {.differs_in = 4}}});
  const uint64_t leaders = ResultHash(want[3]);
  auto* sequence = want[3].mutable_sequences(0);
  sequence->set_token_id(sequence->token_id() + 1);
  const std::string text = absl::StrFormat(
      "step 4: the result of rank %d (node, pid 0) has hash %016x, the "
      "leader's %016x: the ranks computed different results",
      last, ResultHash(want[3]), leaders);
  EXPECT_THAT(group.Run(), StatusIs(absl::StatusCode::kInternal, text));
  ASSERT_TRUE(group.ended().Wait());
  // This is the text that a server logs when its group fails
  // (OperatorSurface::Fail).
  EXPECT_THAT(group.why(), StatusIs(absl::StatusCode::kInternal, text));
  for (uint32_t rank = 1; rank <= last; ++rank) {
    EXPECT_THAT(group.follower(rank).Ended(),
                StatusIs(absl::StatusCode::kInternal,
                         absl::StrCat("the leader: ", text)));
  }
}

TEST_P(ModelRanksGrpcTest, AllRanksEndIfOneIsKilledDuringAStep) {
  const uint32_t last = GetParam() - 1;
  ModelGroup group(GetParam(), {{last, {.stops_in = 4}}});
  std::thread kill([&] {
    EXPECT_TRUE(group.follower(last).stopped.Wait());
    // Give the other ranks time to reach the first sum of the step, where they
    // wait.
    absl::SleepFor(absl::Milliseconds(50));
    group.follower(last).client.reset();
  });
  const std::string text = absl::StrCat("the call of rank ", last,
                                        " (node, pid 0) ended: the connection "
                                        "to the follower is gone");
  EXPECT_THAT(group.Run(), StatusIs(absl::StatusCode::kUnavailable, text));
  kill.join();
  for (uint32_t rank = 1; rank < last; ++rank) {
    EXPECT_THAT(group.follower(rank).Ended(),
                StatusIs(absl::StatusCode::kUnavailable,
                         absl::StrCat("the leader: ", text)));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ModelRanksGrpcTest, ::testing::Values(2u, 4u));

TEST(ModelRanksPlanTest, APlanThatTheExecutorRefusesEndsTheGroup) {
  ModelGroup group(2);
  KVASIR_ASSERT_OK(group.Start());
  kvasir::v1::StepPlan plan;
  plan.set_step_id(1);
  plan.add_sequences()->set_sequence_id(7);
  KVASIR_ASSERT_OK(group.leader().SendStep(plan));
  ASSERT_TRUE(group.ended().Wait());
  EXPECT_THAT(group.leader().status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 1 (node, pid 0) failed in step 1: ")));
}

}  // namespace
}  // namespace kvasir::worker
