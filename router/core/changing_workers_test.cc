// Tests of the router with scripted workers that come and go.
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "router/core/request_router.h"
#include "router/testing/fake_worker_client.h"
#include "router/testing/recording_sink.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::_;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// The last state of each replica that has not been removed.
class LastStates final : public RouterObserver {
 public:
  void OnReplicaState(const std::string& target, ReplicaState state) override {
    base::MutexLock lock(&mutex_);
    states_[target] = state;
  }
  void OnReplicaRemoved(const std::string& target) override {
    base::MutexLock lock(&mutex_);
    states_.erase(target);
  }
  std::map<std::string, ReplicaState> states() const {
    base::MutexLock lock(&mutex_);
    return states_;
  }

 private:
  mutable base::Mutex mutex_;
  std::map<std::string, ReplicaState> states_ ABSL_GUARDED_BY(mutex_);
};

std::vector<WorkerAddress> Addresses(const std::vector<size_t>& workers) {
  std::vector<WorkerAddress> addresses;
  for (const size_t i : workers) addresses.push_back({absl::StrCat("w", i)});
  return addresses;
}

CanonicalRequest NewRequest() {
  CanonicalRequest request;
  request.model = "tiny";
  request.prompt = TokenBytes::FromIds(std::vector<int32_t>(3, 5));
  request.sampling = NeutralSampling();
  return request;
}

constexpr size_t kWorkers = 6;

class ChangingWorkersTest : public ::testing::Test {
 protected:
  ChangingWorkersTest() {
    for (size_t i = 0; i < kWorkers; ++i) {
      workers_.push_back(std::make_unique<FakeWorker>(&transport_));
      workers_.back()->info()->set_device("cpu");
    }
  }

  // Starts the router with some of the workers "w0", "w1", ...
  absl::Status Start(const std::vector<size_t>& workers,
                     bool refusal_fails_start = true) {
    MakeRegistry(workers, refusal_fails_start);
    return StartWithin(absl::Seconds(20));
  }
  void MakeRegistry(const std::vector<size_t>& workers,
                    bool refusal_fails_start = true) {
    ReplicaRegistryOptions options;
    options.workers = Addresses(workers);
    options.refusal_fails_start = refusal_fails_start;
    registry_ = std::make_unique<ReplicaRegistry>(
        options,
        [this](const WorkerAddress& worker) {
          return workers_[static_cast<size_t>(worker.target[1] - '0')]
              ->NewClient();
        },
        &timers_, &observer_);
  }
  absl::Status StartWithin(absl::Duration patience) {
    KVASIR_RETURN_IF_ERROR(registry_->Start(patience));
    router_ = std::make_unique<RouterCore>(
        RouterCoreOptions{},
        RouterCore::Parts{registry_.get(), &timers_, nullptr, &observer_});
    return absl::OkStatus();
  }
  void SetWorkers(const std::vector<size_t>& workers) {
    registry_->SetWorkers(Addresses(workers));
  }
  bool IsReady(size_t worker) const {
    const auto states = observer_.states();
    const auto found = states.find(absl::StrCat("w", worker));
    return found != states.end() && found->second == ReplicaState::kReady;
  }
  std::shared_ptr<RecordingSink> Submit(
      CanonicalRequest request = NewRequest()) {
    const auto sink = std::make_shared<RecordingSink>();
    KVASIR_EXPECT_OK(router_->Submit(std::move(request), sink));
    return sink;
  }
  std::shared_ptr<FakeAttempt> WaitForAttempt(size_t worker) {
    EXPECT_TRUE(Eventually([&] {
      return !workers_[worker]->attempts().empty() &&
             workers_[worker]->attempts()[0]->started();
    }));
    return workers_[worker]->attempts()[0];
  }
  static void Answer(const std::shared_ptr<FakeAttempt>& attempt) {
    attempt->Accept();
    attempt->Tokens({7, 8});
    attempt->Finish(kvasir::v1::FINISH_LENGTH);
    attempt->End(absl::OkStatus());
  }

  TimerThread transport_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  TimerThread timers_;
  LastStates observer_;
  std::unique_ptr<ReplicaRegistry> registry_;
  std::unique_ptr<RouterCore> router_;
};

TEST_F(ChangingWorkersTest,
       ARouterWithoutWorkersStartsAndIsReadyAfterTheFirstIsAdded) {
  MakeRegistry({});
  KVASIR_ASSERT_OK(StartWithin(absl::ZeroDuration()));
  EXPECT_FALSE(router_->Health().ready);
  EXPECT_THAT(router_->Submit(NewRequest(), std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no worker")));
  SetWorkers({0});
  EXPECT_TRUE(Eventually([&] { return router_->Health().ready; }));
  const auto sink = Submit();
  Answer(WaitForAttempt(0));
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(ChangingWorkersTest, TheStartWaitsForAWorkerThatIsFoundMeanwhile) {
  MakeRegistry({});
  timers_.At(base::Clock::Real().Now() + absl::Milliseconds(20),
             [this] { SetWorkers({0}); });
  KVASIR_ASSERT_OK(StartWithin(absl::Seconds(20)));
  EXPECT_TRUE(router_->Health().ready);
}

TEST_F(ChangingWorkersTest, AnAddedWorkerGetsRequests) {
  KVASIR_ASSERT_OK(Start({0}));
  SetWorkers({0, 1});
  EXPECT_TRUE(Eventually([&] { return IsReady(1); }));
  Submit();
  Submit();
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
  EXPECT_EQ(workers_[1]->attempts().size(), 1u);
}

TEST_F(ChangingWorkersTest, AnAddressThatOccursTwiceIsOneReplica) {
  KVASIR_ASSERT_OK(Start({0, 0}));
  SetWorkers({1, 0, 1, 0});
  EXPECT_EQ(registry_->replicas().size(), 2u);
}

TEST_F(ChangingWorkersTest, AReplicaThatStaysInTheListKeepsItsConnection) {
  KVASIR_ASSERT_OK(Start({0}));
  const std::shared_ptr<Replica> before = registry_->replicas()[0];
  SetWorkers({1, 0});
  EXPECT_TRUE(registry_->replicas().Contains(*before));
  EXPECT_EQ(before->state(), ReplicaState::kReady);
}

TEST_F(ChangingWorkersTest,
       ARemovedWorkerGetsNoNewRequestsAndItsRunningStreamEnds) {
  KVASIR_ASSERT_OK(Start({0}));
  const auto running = Submit();
  const auto attempt = WaitForAttempt(0);
  attempt->Accept();
  attempt->Tokens({7});
  SetWorkers({1});
  EXPECT_TRUE(Eventually([&] { return IsReady(1); }));
  const auto next = Submit();
  Answer(WaitForAttempt(1));
  KVASIR_EXPECT_OK(next->Wait());
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
  EXPECT_TRUE(workers_[0]->watched());
  attempt->Tokens({8});
  attempt->Finish(kvasir::v1::FINISH_LENGTH);
  attempt->End(absl::OkStatus());
  KVASIR_EXPECT_OK(running->Wait());
  EXPECT_THAT(running->ids(), ElementsAre(7, 8));
  EXPECT_TRUE(Eventually([&] { return !workers_[0]->watched(); }))
      << "the connection ends with the last request";
}

TEST_F(ChangingWorkersTest, AStreamMovesIfItsRemovedWorkerDies) {
  KVASIR_ASSERT_OK(Start({0}));
  const auto sink = Submit();
  WaitForAttempt(0)->Tokens({7, 8});
  EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 2; }));
  SetWorkers({1});
  EXPECT_TRUE(Eventually([&] { return IsReady(1); }));
  workers_[0]->Die();
  const auto second = WaitForAttempt(1);
  second->Tokens({9});
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_THAT(sink->ids(), ElementsAre(7, 8, 9));
  EXPECT_THAT(observer_.states(),
              ElementsAre(Pair("w1", ReplicaState::kReady)));
}

TEST_F(ChangingWorkersTest, AWorkerThatComesBackIsConnectedAgain) {
  KVASIR_ASSERT_OK(Start({0, 1}));
  const auto sink = Submit();
  const auto attempt = WaitForAttempt(0);
  SetWorkers({1});
  SetWorkers({0, 1});
  EXPECT_TRUE(Eventually([&] { return IsReady(0); }));
  Answer(attempt);
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_TRUE(IsReady(0));
}

TEST_F(ChangingWorkersTest,
       AfterTheLastWorkerIsRemovedRequestsWaitForTheNextOne) {
  KVASIR_ASSERT_OK(Start({0}));
  SetWorkers({});
  EXPECT_FALSE(router_->Health().ready);
  EXPECT_THAT(observer_.states(), IsEmpty());
  const auto sink = Submit();
  SetWorkers({1});
  Answer(WaitForAttempt(1));
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(ChangingWorkersTest, TheModelOfTheNextWorkersReplacesThatOfRemovedOnes) {
  workers_[1]->info()->set_model_name("other");
  workers_[1]->info()->set_weights_id("w2");
  KVASIR_ASSERT_OK(Start({0}));
  SetWorkers({});
  EXPECT_EQ(router_->Models()[0].name, "tiny");
  SetWorkers({1});
  EXPECT_TRUE(Eventually([&] { return router_->Health().ready; }));
  ASSERT_EQ(router_->Models().size(), 1u);
  EXPECT_EQ(router_->Models()[0].name, "other");
}

TEST_F(ChangingWorkersTest, ADiscoveredWorkerThatIsRefusedIsOnlyLeftOut) {
  workers_[1]->info()->set_api_version("kvasir.v9");
  EXPECT_THAT(Start({0, 1}),
              StatusIs(absl::StatusCode::kFailedPrecondition, _));
  KVASIR_ASSERT_OK(Start({0, 1}, /*refusal_fails_start=*/false));
  EXPECT_TRUE(router_->Health().ready);
  EXPECT_THAT(router_->Health().detail, HasSubstr("w1 refused"));
}

TEST_F(ChangingWorkersTest, ARequestLeavesARemovedWorkerThatHangs) {
  KVASIR_ASSERT_OK(Start({0}));
  const auto sink = Submit();
  WaitForAttempt(0)->Accept();
  SetWorkers({1});
  EXPECT_TRUE(Eventually([&] { return IsReady(1); }));
  workers_[0]->SetSilent(true);
  EXPECT_TRUE(Eventually([&] {
    router_->CheckWorkers(absl::Milliseconds(500));
    kvasir::v1::LoadReport idle;
    idle.set_free_pages(100);
    idle.set_total_pages(100);
    workers_[1]->Report(idle);
    return workers_[0]->attempts()[0]->cancelled();
  }));
  Answer(WaitForAttempt(1));
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(ChangingWorkersTest,
       ARequestMayReturnToItsWorkerThatWasRemovedAndAddedAgain) {
  KVASIR_ASSERT_OK(Start({0}));
  const auto sink = Submit();
  WaitForAttempt(0)->Accept();
  SetWorkers({});
  workers_[0]->Die();
  EXPECT_TRUE(Eventually([&] {
    return router_->Health().detail.find("ready") == std::string::npos;
  }));
  workers_[0]->SetReachable(true);
  SetWorkers({0});
  EXPECT_TRUE(Eventually([&] { return workers_[0]->attempts().size() == 2; }));
  Answer(workers_[0]->attempts()[1]);
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(ChangingWorkersTest, AStopAlsoEndsTheCallsToRemovedWorkers) {
  KVASIR_ASSERT_OK(Start({0}));
  CanonicalRequest request = NewRequest();
  request.queue_timeout = absl::Milliseconds(20);
  const auto sink = Submit(std::move(request));
  WaitForAttempt(0)->Accept();
  SetWorkers({});
  registry_->Stop();
  // The request waits for another worker until its own timeout.
  EXPECT_THAT(sink->Wait(), StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  SetWorkers({1});
  EXPECT_TRUE(registry_->replicas().empty());
}

// Worker 0 is always in the list; the others come and go at random.
TEST_F(ChangingWorkersTest, NoRequestFailsWhileWorkersComeAndGo) {
  constexpr int kCallers = 3;
  constexpr int kChanges = 300;
  KVASIR_ASSERT_OK(Start({0}));
  for (const auto& worker : workers_) worker->OnAttempt(Answer);
  std::atomic<bool> stop{false};
  std::thread changes([&] {
    std::mt19937 random(1);
    for (int i = 0; i < kChanges; ++i) {
      std::vector<size_t> list = {0};
      for (size_t worker = 1; worker < kWorkers; ++worker) {
        if (random() % 2 == 0) list.push_back(worker);
      }
      std::shuffle(list.begin(), list.end(), random);
      SetWorkers(list);
      absl::SleepFor(absl::Microseconds(300));
    }
    stop = true;
  });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      while (!stop) {
        const auto sink = Submit();
        KVASIR_EXPECT_OK(sink->Wait());
        EXPECT_THAT(sink->ids(), ElementsAre(7, 8));
      }
    });
  }
  changes.join();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(router_->WaitIdle(absl::Now() + absl::Seconds(20)));
  SetWorkers({0});
  for (size_t i = 1; i < kWorkers; ++i) {
    EXPECT_TRUE(Eventually([&] { return !workers_[i]->watched(); })) << i;
  }
  EXPECT_THAT(observer_.states(),
              ElementsAre(Pair("w0", ReplicaState::kReady)));
}

}  // namespace
}  // namespace kvasir::router
