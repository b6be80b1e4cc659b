// Tests of the way from a request to the policy that follows prefixes.
#include <random>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "router/core/request_router.h"
#include "router/testing/fake_worker_client.h"
#include "router/testing/recording_sink.h"

namespace kvasir::router {
namespace {

constexpr int kWorkers = 4;

class AffinityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ReplicaRegistryOptions options;
    for (int i = 0; i < kWorkers; ++i) {
      workers_.push_back(std::make_unique<FakeWorker>(&transport_));
      workers_.back()->info()->set_max_model_len(1000);
      options.workers.push_back({absl::StrCat("w", i)});
    }
    registry_ = std::make_unique<ReplicaRegistry>(
        options,
        [this](const WorkerAddress& worker) {
          return workers_[static_cast<size_t>(worker.target[1] - '0')]
              ->NewClient();
        },
        &timers_, nullptr);
    KVASIR_ASSERT_OK(registry_->Start(absl::Seconds(20)));
    router_ = std::make_unique<RouterCore>(
        RouterCoreOptions{},
        RouterCore::Parts{registry_.get(), &timers_, nullptr, nullptr});
  }

  // Runs a request, and returns the number of its worker.
  int PlaceOf(const std::vector<int32_t>& prompt, const std::string& salt = "",
              const std::string& session = "") {
    CanonicalRequest request;
    request.model = "tiny";
    request.prompt = TokenBytes::FromIds(prompt);
    request.sampling = NeutralSampling();
    request.cache_salt = salt;
    request.session = session;
    const auto sink = std::make_shared<RecordingSink>();
    std::vector<size_t> before;
    for (const auto& worker : workers_) {
      before.push_back(worker->attempts().size());
    }
    KVASIR_EXPECT_OK(router_->Submit(std::move(request), sink));
    for (int i = 0; i < kWorkers; ++i) {
      const auto attempts = workers_[static_cast<size_t>(i)]->attempts();
      if (attempts.size() == before[static_cast<size_t>(i)]) continue;
      attempts.back()->Finish(kvasir::v1::FINISH_LENGTH);
      attempts.back()->End(absl::OkStatus());
      KVASIR_EXPECT_OK(sink->Wait());
      ReportIdle(i);
      return i;
    }
    ADD_FAILURE() << "no worker was asked";
    return -1;
  }

  void ReportIdle(int worker) {
    kvasir::v1::LoadReport report;
    report.set_free_pages(100);
    report.set_total_pages(100);
    workers_[static_cast<size_t>(worker)]->Report(report);
    const std::shared_ptr<Replica> replica =
        registry_->replicas()[static_cast<size_t>(worker)];
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (replica->view().unreported_requests > 0 && absl::Now() < end) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  TimerThread transport_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  TimerThread timers_;
  std::unique_ptr<ReplicaRegistry> registry_;
  std::unique_ptr<RouterCore> router_;
};

TEST_F(AffinityTest, ALongerPromptGoesToTheWorkerThatWasSentItsBeginning) {
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::vector<int32_t> prompt;
    int place = -1;
    for (int turn = 0; turn < 4; ++turn) {
      for (int j = 0; j < 50; ++j) {
        prompt.push_back(static_cast<int32_t>(random() % 100));
      }
      const int next = PlaceOf(prompt);
      if (turn > 0) {
        EXPECT_EQ(next, place);
      }
      place = next;
    }
  }
}

TEST_F(AffinityTest, PromptsOfOneTenantDoNotMoveThoseOfAnother) {
  // The router forgets nothing here, so a shared key would move the second
  // tenant's prompt to the first one's worker.
  int equal = 0;
  constexpr int kPrompts = 60;
  for (int i = 0; i < kPrompts; ++i) {
    const std::vector<int32_t> prompt(64, i);
    equal += PlaceOf(prompt, "a") == PlaceOf(prompt, "b");
  }
  EXPECT_LT(equal, kPrompts / 2);
}

TEST_F(AffinityTest, TheRequestsOfASessionGoToOneWorker) {
  for (int i = 0; i < 10; ++i) {
    const std::string session = absl::StrCat("session ", i);
    const int place = PlaceOf({1}, "", session);
    for (int32_t j = 0; j < 3; ++j) {
      EXPECT_EQ(PlaceOf(std::vector<int32_t>(40, j), "", session), place);
    }
  }
}

}  // namespace
}  // namespace kvasir::router
