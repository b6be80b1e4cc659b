// A group whose ranks run a model: plans over gRPC, sums in memory.
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/executor/direct_runner.h"
#include "worker/ranks/collective.h"
#include "worker/ranks/group/group_executor.h"
#include "worker/ranks/group/rank_client.h"
#include "worker/ranks/group/rank_follower.h"
#include "worker/ranks/group/rank_leader.h"
#include "worker/ranks/group/rank_server.h"
#include "worker/ranks/group/testing/fake_rank.h"
#include "worker/ranks/in_process_group.h"
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

// A prompt and eight tokens of output.
absl::StatusOr<std::vector<int32_t>> Generate(Executor* executor,
                                              const Rank& rank,
                                              const cache::PageCounts& pages) {
  DirectRunner runner(executor, &rank.layout(), pages);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 20; ++i) prompt.push_back(11 * i + 3);
  std::vector<int32_t> tokens;
  for (int step = 0; step < 8; ++step) {
    DirectStep direct = {.sequence_id = 1, .sample = GreedySample()};
    if (step == 0) direct.token_ids = prompt;
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::StepResult result,
                            runner.Run(absl::MakeConstSpan(&direct, 1)));
    tokens.push_back(result.sequences(0).token_id());
  }
  return tokens;
}

// The step that is to be its last begins, and does not end before the group.
class Stopping final : public Executor {
 public:
  Stopping(Executor* own, uint64_t last_step, Event* reached, Event* ended)
      : own_(*own), last_step_(last_step), reached_(*reached), ended_(*ended) {}

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override {
    if (plan.step_id() == last_step_) {
      reached_.Set();
      EXPECT_TRUE(ended_.Wait());
      return absl::AbortedError("stopped");
    }
    return own_.Enqueue(plan);
  }
  absl::StatusOr<kvasir::v1::StepResult> Await() override {
    return own_.Await();
  }

 private:
  Executor& own_;
  const uint64_t last_step_;
  Event& reached_;
  Event& ended_;
};

// A follower with its model. `last_step`: see Stopping; 0: it has none.
struct ModelFollower {
  ModelFollower(uint32_t rank, uint32_t size, const std::string& leader,
                Collective* collective, uint64_t last_step = 0) {
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
    thread = std::thread([this, collective, last_step] {
      status = [&]() -> absl::Status {
        KVASIR_RETURN_IF_ERROR(follower->WaitWelcome().status());
        KVASIR_ASSIGN_OR_RETURN(const auto model, MakeRank(collective));
        KVASIR_RETURN_IF_ERROR(follower->WaitStarted(ReadyOf(*model)).status());
        Stopping executor(&model->executor(), last_step, &reached, &ended);
        return RunSteps(follower.get(), &executor);
      }();
    });
  }
  ~ModelFollower() {
    if (thread.joinable()) thread.join();
    client.reset();
  }

  std::unique_ptr<RankFollower> follower;
  std::unique_ptr<RankClient> client;
  Event reached;
  Event ended;
  absl::Status status;
  std::thread thread;
};

struct ModelLeader {
  static absl::StatusOr<std::unique_ptr<ModelLeader>> Start(
      uint32_t size, Collective* collective) {
    auto side = std::make_unique<ModelLeader>();
    RankLeaderOptions options;
    options.group.identity = TestIdentity(size, kLong);
    options.group.combine = TestCombine;
    options.on_end = [collective](const absl::Status& why) {
      collective->Abort(why);
    };
    side->leader = std::make_unique<RankLeader>(std::move(options));
    KVASIR_ASSIGN_OR_RETURN(
        side->server,
        RankServer::Start({.secret = kSecret}, side->leader.get()));
    return side;
  }
  // The tokens that the group generates.
  absl::StatusOr<std::vector<int32_t>> Run(Collective* collective) {
    KVASIR_RETURN_IF_ERROR(leader->WaitJoined().status());
    KVASIR_ASSIGN_OR_RETURN(const auto model, MakeRank(collective));
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::RankStart start,
                            leader->WaitStarted(ReadyOf(*model)));
    GroupExecutor executor(leader.get(), &model->executor());
    return Generate(&executor, *model,
                    {start.pages().begin(), start.pages().end()});
  }

  std::unique_ptr<RankLeader> leader;
  std::unique_ptr<RankServer> server;
};

TEST(ModelRanksGrpcTest, AllRanksTogetherGiveWhatOneGives) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one, MakeRank(nullptr));
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> want,
                              Generate(&one->executor(), *one, one->pages()));
  for (const uint32_t size : {2u, 4u}) {
    const auto sums = InProcessGroup::Create(size);
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader,
                                ModelLeader::Start(size, sums[0].get()));
    std::vector<std::unique_ptr<ModelFollower>> followers;
    for (uint32_t rank = 1; rank < size; ++rank) {
      followers.push_back(std::make_unique<ModelFollower>(
          rank, size, leader->server->target(), sums[rank].get()));
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> tokens,
                                leader->Run(sums[0].get()));
    EXPECT_EQ(tokens, want) << size << " ranks";
    KVASIR_EXPECT_OK(leader->leader->Drain());
    for (const auto& follower : followers) {
      follower->thread.join();
      KVASIR_EXPECT_OK(follower->status);
    }
  }
}

TEST(ModelRanksGrpcTest, ARankThatIsGoneInAStepEndsTheLeadersStep) {
  const auto sums = InProcessGroup::Create(2);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader,
                              ModelLeader::Start(2, sums[0].get()));
  ModelFollower one(1, 2, leader->server->target(), sums[1].get(), 4);
  std::thread kill([&one] {
    EXPECT_TRUE(one.reached.Wait());
    // The leader waits in its first sum of the step.
    absl::SleepFor(absl::Milliseconds(100));
    one.client.reset();
  });
  EXPECT_THAT(leader->Run(sums[0].get()),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("the call of rank 1 (node, pid 0) ended")));
  kill.join();
}

}  // namespace
}  // namespace kvasir::worker
