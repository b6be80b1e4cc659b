#include "worker/engine/engine.h"

#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "cache/kv_cache.h"
#include "gtest/gtest.h"
#include "worker/testing/fake_executor.h"
#include "worker/testing/recording_sink.h"

namespace kvasir::worker {
namespace {

using base::MutexLock;
using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int32_t kPages = 64;
constexpr int32_t kHostPages = 32;

// Lets a test hold steps back. While the gate is closed, a step waits in Pass.
// AwaitHeld returns when a step waits in Pass.
class Gate {
 public:
  void Close() { CloseAfter(0); }
  // Closes the gate after `steps` more steps have passed.
  void CloseAfter(int steps) {
    MutexLock lock(&mutex_);
    closed_ = true;
    passes_ = steps;
  }
  void Open() {
    MutexLock lock(&mutex_);
    closed_ = false;
    changed_.SignalAll();
  }
  void Pass() {
    MutexLock lock(&mutex_);
    if (closed_ && passes_ > 0) {
      --passes_;
      return;
    }
    ++held_;
    changed_.SignalAll();
    while (closed_) changed_.Wait(&mutex_);
    --held_;
  }
  void AwaitHeld() {
    MutexLock lock(&mutex_);
    while (held_ == 0) changed_.Wait(&mutex_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int passes_ ABSL_GUARDED_BY(mutex_) = 0;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A RecordingSink that lets another thread wait for the end of the request.
class WaitableSink : public RecordingSink {
 public:
  using RecordingSink::RecordingSink;
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                  bool last) override {
    MutexLock lock(&mutex_);
    RecordingSink::OnFinished(finish, last);
    changed_.SignalAll();
  }
  void OnFailed(const Refusal& why) override {
    MutexLock lock(&mutex_);
    RecordingSink::OnFailed(why);
    changed_.SignalAll();
  }
  void AwaitEnd() {
    MutexLock lock(&mutex_);
    while (!ended()) changed_.Wait(&mutex_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
};

// Parameter: true if the executor is asynchronous, so that it runs steps after
// Enqueue has returned; false if it runs them within Enqueue.
class EngineTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineTest() {
    options_.scheduler.max_model_len = 64;
    options_.scheduler.max_num_seqs = 8;
    options_.scheduler.max_batched_tokens = 32;
    options_.scheduler.max_queue = 4;
    options_.scheduler.vocab_size = 1000;
    fake_.is_asynchronous = GetParam();
    fake_.page_tokens = 4;
    fake_.groups = {{.num_pages = kPages, .host_pages = kHostPages}};
    fake_.max_num_seqs = 8;
    fake_.max_batched_tokens = 32;
    fake_.during_step = [this](const kvasir::v1::StepPlan&) {
      gate_.Pass();
      MutexLock lock(&mutex_);
      return step_status_;
    };
  }
  ~EngineTest() override {
    gate_.Open();
    engine_.reset();
  }

  absl::Status Start() {
    cache::KvCacheConfig config;
    config.page_tokens = 4;
    config.cache_id = "test";
    config.groups = {{.num_pages = kPages,
                      .eviction = fake_.groups[0].eviction,
                      .page_bytes = 128,
                      .num_host_pages = kHostPages}};
    config.prefix_reuse = !config.groups[0].eviction.evicts();
    cache_ = std::make_unique<cache::KvCache>(config);
    executor_ = std::make_unique<FakeExecutor>(fake_);
    auto engine = Engine::Create(options_, cache_.get(), executor_.get());
    if (!engine.ok()) return engine.status();
    engine_ = *std::move(engine);
    return engine_->Start();
  }

  static Request MakeRequest(const std::string& id, uint32_t max_tokens = 4) {
    Request request;
    request.request_id = id;
    request.prompt =
        proto::TokenBytes::FromIds({1, 2, 3, static_cast<int32_t>(id.size())});
    request.sampling.set_max_tokens(max_tokens);
    request.sampling.set_seed(7);
    return request;
  }
  std::vector<int32_t> Expected(const Request& request, uint32_t sample = 0) {
    return FakeContinuation(request, sample,
                            {.vocab_size = 1000, .max_model_len = 64});
  }
  void FailSteps(absl::Status status) {
    MutexLock lock(&mutex_);
    step_status_ = std::move(status);
  }
  // Expects that no request holds cache pages. Call it after Stop.
  void ExpectNothingHeld() {
    EXPECT_EQ(cache_->Stats().sequences, 0);
    EXPECT_EQ(cache_->available_pages(cache::PageGroupId(0)), kPages);
    EXPECT_EQ(cache_->Stats().groups[0].host_used_pages, 0);
    KVASIR_EXPECT_OK(cache_->CheckInvariants());
  }

  Gate gate_;
  base::ManualClock manual_clock_;
  base::Mutex mutex_;
  absl::Status step_status_ ABSL_GUARDED_BY(mutex_);
  EngineOptions options_;
  FakeExecutorOptions fake_;
  std::unique_ptr<cache::KvCache> cache_;
  std::unique_ptr<FakeExecutor> executor_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineTest, ARequestIsServedWithItsEvictionBudgetIfTheBudgetIsAllowed) {
  fake_.groups[0].eviction = {.budget_tokens = 8, .every_tokens = 4};
  options_.scheduler.eviction.groups = {
      {.pages = {.eviction = fake_.groups[0].eviction}, .least_slots = 2}};
  KVASIR_ASSERT_OK(Start());
  const auto sink = std::make_shared<WaitableSink>(1);
  Request request = MakeRequest("less", 20);
  request.eviction_budget = {.tokens = 7};
  EXPECT_THAT(engine_->Submit(request, sink).status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("eviction_budget is 7 and keeps 7 slots")));
  request.request_id = "more";
  request.eviction_budget = {.tokens = 12};
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  sink->AwaitEnd();
  EXPECT_EQ(sink->samples()[0].tokens,
            FakeContinuation(request, 0,
                             {.vocab_size = 1000,
                              .max_model_len = 64,
                              .eviction = options_.scheduler.eviction}));
  engine_->Stop();
  ExpectNothingHeld();
}

TEST_P(EngineTest, TheEngineContinuesAfterItRefusedABudgetTooLargeForThePool) {
  fake_.groups[0].eviction = {.budget_tokens = 8, .every_tokens = 4};
  options_.scheduler.max_model_len = 4 * kPages + 9;
  options_.scheduler.eviction.groups = {
      {.pages = {.eviction = fake_.groups[0].eviction}, .least_slots = 2}};
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("r", 4 * kPages);
  request.eviction_budget = {.ratio = 1};
  const auto sink = std::make_shared<WaitableSink>(1);
  EXPECT_THAT(engine_->Submit(request, sink).status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("pages of page group 0, want at most its")));
  request.sampling.set_max_tokens(4);
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  sink->AwaitEnd();
  engine_->Stop();
  ExpectNothingHeld();
}

TEST_P(EngineTest, TheEngineStreamsTheTokensOfEverySampleOfARequest) {
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("r", 6);
  request.sampling.set_n(3);
  const auto sink = std::make_shared<WaitableSink>(3);
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  sink->AwaitEnd();
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(sink->samples()[i].tokens, Expected(request, i));
  }
  EXPECT_NE(sink->samples()[0].tokens, sink->samples()[1].tokens);
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  engine_->Stop();
  EXPECT_EQ(engine_->Totals().finished, 1u);
  ExpectNothingHeld();
}

TEST_P(EngineTest, TheEngineWarmsUpWithTheLargestBatchBeforeItIsReady) {
  KVASIR_ASSERT_OK(Start());
  engine_->Stop();
  EXPECT_EQ(executor_->largest_batch_tokens(), 32u);
  EXPECT_EQ(executor_->largest_batch_sequences(), 8u);
  EXPECT_EQ(engine_->Totals().finished, 0u);
  EXPECT_EQ(cache_->Stats().pages_published, 0);
  ExpectNothingHeld();
}

TEST_P(EngineTest, StartReturnsTheErrorOfAFailedWarmUp) {
  FailSteps(absl::InternalError("no such kernel"));
  EXPECT_THAT(Start(), StatusIs(absl::StatusCode::kInternal,
                                HasSubstr("no such kernel")));
  EXPECT_THAT(
      engine_->Submit(MakeRequest("r"), std::make_shared<WaitableSink>())
          .status,
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("failed")));
}

TEST_P(EngineTest, SubmitRefusesRequestsAfterStop) {
  KVASIR_ASSERT_OK(Start());
  engine_->Stop();
  const Refusal refusal =
      engine_->Submit(MakeRequest("r"), std::make_shared<WaitableSink>());
  EXPECT_THAT(refusal.status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("stopped")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

TEST_P(EngineTest, SubmitRefusesInvalidRequests) {
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("r");
  request.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(64, 1));
  Refusal refusal = engine_->Submit(request, std::make_shared<WaitableSink>());
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::NEVER_FITS);
  EXPECT_EQ(refusal.status.code(), absl::StatusCode::kInvalidArgument);
  request = MakeRequest("r");
  request.sampling.set_n(9);  // max_num_seqs is 8
  EXPECT_THAT(engine_->Submit(request, std::make_shared<WaitableSink>()).status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("n is 9, want 1 to 8")));
}

TEST_P(EngineTest, SubmitRefusesARequestIfTheQueueIsFull) {
  options_.scheduler.max_num_seqs = 1;  // `first` has the only seat
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto first = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("first"), first).status);
  gate_.AwaitHeld();  // `first` has the seat, and its step waits at the gate
  std::vector<std::shared_ptr<WaitableSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    sinks.push_back(std::make_shared<WaitableSink>());
    KVASIR_ASSERT_OK(
        engine_->Submit(MakeRequest(absl::StrCat("r", i)), sinks.back())
            .status);
  }
  // The queue has room for 4 requests. Until the step has ended, the engine may
  // count `first` as queued, so either r3 or r4 is refused.
  sinks.push_back(std::make_shared<WaitableSink>());
  Refusal refusal = engine_->Submit(MakeRequest("r3"), sinks.back());
  if (refusal.ok()) {
    refusal =
        engine_->Submit(MakeRequest("r4"), std::make_shared<WaitableSink>());
  } else {
    sinks.pop_back();
  }
  EXPECT_THAT(refusal.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("the limit is 4")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
  gate_.Open();
  first->AwaitEnd();
  for (const auto& sink : sinks) sink->AwaitEnd();
}

TEST_P(EngineTest,
       IfTheQueueHasLengthZeroOnlyRequestsThatCanRunAtOnceAreAccepted) {
  options_.scheduler.max_queue = 0;
  options_.scheduler.max_num_seqs = 2;
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto first = std::make_shared<WaitableSink>();
  const auto second = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("first"), first).status);
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("second"), second).status);
  const Refusal refusal =
      engine_->Submit(MakeRequest("third"), std::make_shared<WaitableSink>());
  EXPECT_THAT(refusal.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("the limit is 0")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
  gate_.Open();
  first->AwaitEnd();
  second->AwaitEnd();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  const auto later = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("later"), later).status);
  later->AwaitEnd();
  EXPECT_EQ(later->samples()[0].tokens, Expected(MakeRequest("later")));
}

TEST_P(EngineTest,
       SubmitRefusesAnAttemptThatIsLiveButAcceptsTheNextAttemptOfTheRequest) {
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r"), sink).status);
  EXPECT_EQ(engine_->Submit(MakeRequest("r"), std::make_shared<WaitableSink>())
                .status.code(),
            absl::StatusCode::kAlreadyExists);
  Request again = MakeRequest("r");
  again.attempt = 1;
  const auto second = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(again, second).status);
  // An abort that names an attempt ends only that attempt.
  EXPECT_EQ(engine_->Abort("r", 1), 1);
  gate_.Open();
  sink->AwaitEnd();
  second->AwaitEnd();
  EXPECT_EQ(sink->samples()[0].finish->reason(), kvasir::v1::FINISH_LENGTH);
  EXPECT_EQ(second->samples()[0].finish->reason(), kvasir::v1::FINISH_ABORT);
}

TEST_P(EngineTest, AnAbortDuringAStepDropsTheTokensOfThatStep) {
  KVASIR_ASSERT_OK(Start());
  gate_.CloseAfter(2);
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 50), sink).status);
  gate_.AwaitHeld();
  EXPECT_EQ(engine_->Abort("r", std::nullopt), 1);
  EXPECT_EQ(engine_->Abort("r ", std::nullopt), 0);  // ids match exactly
  gate_.Open();
  sink->AwaitEnd();
  EXPECT_EQ(sink->samples()[0].tokens.size(), 2u);
  EXPECT_EQ(sink->samples()[0].finish->reason(), kvasir::v1::FINISH_ABORT);
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(engine_->Abort("r", std::nullopt), 0);
  EXPECT_EQ(engine_->Totals().aborted, 1u);
  engine_->Stop();
  ExpectNothingHeld();
}

TEST_P(EngineTest, ADrainingEngineFinishesOnlyTheRequestsThatItHasAccepted) {
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto sink = std::make_shared<WaitableSink>();
  const Request request = MakeRequest("r");
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  engine_->BeginDrain();
  const Refusal refusal =
      engine_->Submit(MakeRequest("late"), std::make_shared<WaitableSink>());
  EXPECT_EQ(refusal.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::DRAINING);
  EXPECT_TRUE(engine_->Load().draining);
  EXPECT_FALSE(engine_->WaitIdle(absl::Now() + absl::Milliseconds(5)));
  gate_.Open();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(sink->samples()[0].tokens, Expected(request));
}

TEST_P(EngineTest, ADrainAlsoFinishesSequencesInTheHostPool) {
  options_.scheduler.max_queue = 8;
  KVASIR_ASSERT_OK(Start());
  std::vector<std::pair<Request, std::shared_ptr<WaitableSink>>> all;
  // At its end each request holds 16 pages. The 64 pages suffice for 4 of
  // the 8.
  for (int i = 0; i < 8; ++i) {
    Request request = MakeRequest(absl::StrCat("r", i), 60);
    request.sampling.set_ignore_eos(true);
    all.emplace_back(request, std::make_shared<WaitableSink>());
  }
  gate_.Close();
  for (auto& [request, sink] : all) {
    KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  }
  engine_->BeginDrain();
  gate_.Open();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  for (auto& [request, sink] : all) {
    EXPECT_EQ(sink->samples()[0].tokens, Expected(request));
  }
  engine_->Stop();
  EXPECT_GT(cache_->Stats().exports, 0);
  EXPECT_GT(cache_->Stats().imports, 0);
  ExpectNothingHeld();
}

TEST_P(EngineTest, StopFailsRunningAndWaitingRequestsWithTheReasonDraining) {
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  std::vector<std::shared_ptr<WaitableSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    sinks.push_back(std::make_shared<WaitableSink>());
    KVASIR_ASSERT_OK(
        engine_->Submit(MakeRequest(absl::StrCat("r", i), 50), sinks.back())
            .status);
  }
  gate_.AwaitHeld();
  std::thread stop([&] { engine_->Stop(); });
  // Open the gate only when Submit refuses because of Stop. Before that, the
  // requests could finish.
  int more = 0;
  while (true) {
    auto sink = std::make_shared<WaitableSink>();
    const Refusal refusal =
        engine_->Submit(MakeRequest(absl::StrCat("more", more++)), sink);
    if (refusal.ok()) sinks.push_back(std::move(sink));
    if (refusal.status.code() == absl::StatusCode::kUnavailable) break;
    std::this_thread::yield();
  }
  gate_.Open();
  stop.join();
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->failed().has_value());
    EXPECT_EQ(sink->failed()->reason, kvasir::v1::Refusal::DRAINING);
  }
  ExpectNothingHeld();
}

TEST_P(EngineTest, TheEngineContinuesAfterRefuseAllDuringAStep) {
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto running = std::make_shared<WaitableSink>();
  const auto waiting = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 50), running).status);
  gate_.AwaitHeld();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("w"), waiting).status);
  engine_->RefuseAll(
      {absl::UnavailableError("too late"), kvasir::v1::Refusal::DRAINING});
  gate_.Open();
  running->AwaitEnd();
  waiting->AwaitEnd();
  for (const auto& sink : {running, waiting}) {
    ASSERT_TRUE(sink->failed().has_value());
    EXPECT_EQ(sink->failed()->reason, kvasir::v1::Refusal::DRAINING);
    EXPECT_TRUE(sink->samples()[0].tokens.empty());
  }
  const auto later = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("l"), later).status);
  later->AwaitEnd();
  EXPECT_TRUE(later->samples()[0].finish.has_value());
  engine_->Stop();
  ExpectNothingHeld();
}

TEST_P(EngineTest, AFailedStepFailsEveryRequest) {
  std::atomic<int> failures = 0;
  options_.on_failure = [&](const absl::Status& status) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "bit rot"));
    ++failures;
  };
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto running = std::make_shared<WaitableSink>();
  const auto waiting = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 50), running).status);
  gate_.AwaitHeld();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("w"), waiting).status);
  FailSteps(absl::DataLossError("bit rot"));
  gate_.Open();
  running->AwaitEnd();
  waiting->AwaitEnd();
  for (const auto& sink : {running, waiting}) {
    ASSERT_TRUE(sink->failed().has_value());
    EXPECT_THAT(sink->failed()->status,
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("bit rot")));
    EXPECT_EQ(sink->failed()->reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
  }
  engine_->Stop();
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(engine_->Totals().failed, 2u);
  EXPECT_EQ(engine_->Submit(MakeRequest("x"), std::make_shared<WaitableSink>())
                .reason,
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
  ExpectNothingHeld();
}

TEST_P(EngineTest, NonFiniteNumbersFailOnlyTheRequestThatProducedThem) {
  std::atomic<int> failures = 0;
  options_.on_failure = [&](const absl::Status&) { ++failures; };
  // Two requests have prompts of 8 tokens. The prefill of `latent` fails, and
  // the step after the first token of `logit` fails.
  fake_.after_step = [](const kvasir::v1::StepPlan& plan,
                        kvasir::v1::StepResult* result) {
    for (int i = 0; i < plan.sequences_size(); ++i) {
      const kvasir::v1::SequenceStep& step = plan.sequences(i);
      kvasir::v1::SequenceResult* const out = result->mutable_sequences(i);
      if (step.token_ids_size() > 0 && step.token_ids(0) == 77) {
        out->set_fault(kvasir::v1::LATENT_NOT_FINITE);
      }
      if (step.logical_start() == 8) {
        out->set_fault(kvasir::v1::LOGIT_NOT_FINITE);
      }
    }
  };
  KVASIR_ASSERT_OK(Start());
  gate_.Close();  // makes the requests below run in one batch
  const auto blocker = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r"), blocker).status);
  gate_.AwaitHeld();
  const Request sound = MakeRequest("sound");
  Request latent = MakeRequest("latent");
  latent.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(8, 77));
  Request logit = MakeRequest("logit");
  logit.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(8, 78));
  const auto sound_sink = std::make_shared<WaitableSink>();
  const auto latent_sink = std::make_shared<WaitableSink>();
  const auto logit_sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(latent, latent_sink).status);
  KVASIR_ASSERT_OK(engine_->Submit(sound, sound_sink).status);
  KVASIR_ASSERT_OK(engine_->Submit(logit, logit_sink).status);
  gate_.Open();
  for (const auto& sink : {blocker, sound_sink, latent_sink, logit_sink}) {
    sink->AwaitEnd();
  }
  ASSERT_TRUE(latent_sink->failed().has_value());
  EXPECT_THAT(
      latent_sink->failed()->status,
      StatusIs(absl::StatusCode::kInternal, HasSubstr("computed a latent")));
  EXPECT_TRUE(latent_sink->samples()[0].tokens.empty());
  ASSERT_TRUE(logit_sink->failed().has_value());
  EXPECT_THAT(logit_sink->failed()->status,
              StatusIs(absl::StatusCode::kInternal, HasSubstr("logit")));
  EXPECT_EQ(logit_sink->failed()->reason,
            kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
  EXPECT_EQ(logit_sink->samples()[0].tokens.size(), 1u);
  EXPECT_EQ(sound_sink->samples()[0].tokens, Expected(sound));
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(engine_->Totals().failed, 2u);
  ExpectNothingHeld();
}

TEST_P(EngineTest, TheWatchdogsReportOfAHangingStepOmitsItsTokenIds) {
  base::Mutex mutex;
  base::CondVar changed;
  std::vector<StallReport> reports;
  // The watchdog measures with this clock, which only the test advances.
  options_.clock = &manual_clock_;
  options_.watchdog = absl::Milliseconds(20);
  options_.on_stall = [&](const StallReport& report) {
    MutexLock lock(&mutex);
    reports.push_back(report);
    changed.SignalAll();
  };
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  Request request = MakeRequest("r");
  request.prompt = proto::TokenBytes::FromIds({987, 986, 985});
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  gate_.AwaitHeld();
  manual_clock_.Advance(absl::Seconds(7));
  {
    MutexLock lock(&mutex);
    while (reports.empty()) changed.Wait(&mutex);
    EXPECT_EQ(reports[0].stalled, absl::Seconds(7));
    EXPECT_THAT(reports[0].plan, AllOf(HasSubstr("3 tokens at 0, samples"),
                                       HasSubstr("group 0: reset, +1 pages"),
                                       Not(HasSubstr("987"))));
  }
  gate_.Open();
  sink->AwaitEnd();
}

TEST_P(EngineTest, TheWatchdogReportsNothingWhileNoStepRuns) {
  std::atomic<int> stalls = 0;
  options_.clock = &manual_clock_;
  options_.watchdog = absl::Milliseconds(20);
  options_.on_stall = [&](const StallReport&) { ++stalls; };
  KVASIR_ASSERT_OK(Start());
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r"), sink).status);
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  // Advance the clock past the watchdog's limit, and sleep long enough for
  // several checks of the watchdog.
  manual_clock_.Advance(absl::Seconds(7));
  absl::SleepFor(absl::Milliseconds(60));
  EXPECT_EQ(stalls, 0);
}

class CountingListener final : public LoadListener {
 public:
  void OnLoad(const LoadSnapshot& load) override {
    MutexLock lock(&mutex_);
    received_.push_back(load);
    changed_.SignalAll();
  }
  template <typename Predicate>
  LoadSnapshot Await(Predicate predicate) {
    MutexLock lock(&mutex_);
    while (true) {
      for (const LoadSnapshot& load : received_) {
        if (predicate(load)) return load;
      }
      changed_.Wait(&mutex_);
    }
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  std::vector<LoadSnapshot> received_ ABSL_GUARDED_BY(mutex_);
};

TEST_P(EngineTest, ALoadListenerReceivesTheLoadAtOnceAndAgainAfterEachChange) {
  KVASIR_ASSERT_OK(Start());
  const auto listener = std::make_shared<CountingListener>();
  engine_->SubscribeLoad(listener);
  const LoadSnapshot first = listener->Await([](const auto&) { return true; });
  EXPECT_EQ(first.total_pages, uint64_t{kPages});
  EXPECT_EQ(first.free_pages, uint64_t{kPages});
  EXPECT_EQ(first.running, 0u);
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 8), sink).status);
  const LoadSnapshot busy = listener->Await(
      [](const LoadSnapshot& load) { return load.running == 1; });
  EXPECT_GT(busy.step, first.step);
  EXPECT_LT(busy.free_pages, uint64_t{kPages});
  listener->Await([&](const LoadSnapshot& load) {
    return load.step > busy.step && load.running == 0 &&
           load.free_pages == kPages;
  });
  engine_->BeginDrain();
  listener->Await([](const LoadSnapshot& load) { return load.draining; });
}

TEST_P(EngineTest, TheStepLimitIsTenTimesTheLongestStepButAtLeastTenSeconds) {
  options_.clock = &manual_clock_;
  KVASIR_ASSERT_OK(Start());
  const auto listener = std::make_shared<CountingListener>();
  engine_->SubscribeLoad(listener);
  EXPECT_EQ(listener->Await([](const auto&) { return true; }).step_limit_ms,
            10000u);
  gate_.Close();
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r"), sink).status);
  gate_.AwaitHeld();
  manual_clock_.Advance(absl::Seconds(7));
  gate_.Open();
  sink->AwaitEnd();
  listener->Await(
      [](const LoadSnapshot& load) { return load.step_limit_ms == 70000; });
}

// For example, the process was stopped for some time.
TEST_P(EngineTest, AStepAboveTheLimitRaisesItAtMostTwofold) {
  options_.clock = &manual_clock_;
  KVASIR_ASSERT_OK(Start());
  const auto listener = std::make_shared<CountingListener>();
  engine_->SubscribeLoad(listener);
  gate_.Close();
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r"), sink).status);
  gate_.AwaitHeld();
  manual_clock_.Advance(absl::Seconds(50));
  gate_.Open();
  sink->AwaitEnd();
  listener->Await(
      [](const LoadSnapshot& load) { return load.step_limit_ms == 20000; });
}

class CountingObserver final : public EngineObserver {
 public:
  void OnStep(const StepStats& step) override {
    MutexLock lock(&mutex_);
    ++steps;
    first_tokens += step.time_to_first_token.size();
    later_tokens += step.inter_token.size();
    sampled += step.sampled_tokens;
    draining_steps += step.load.draining ? 1 : 0;
  }
  void OnRequestEnd(const RequestSummary& summary) override {
    MutexLock lock(&mutex_);
    ends.push_back(summary);
  }
  void OnRefused(const Refusal&) override {
    MutexLock lock(&mutex_);
    ++refused;
  }

  base::Mutex mutex_;
  size_t steps = 0, first_tokens = 0, later_tokens = 0, sampled = 0;
  size_t refused = 0, draining_steps = 0;
  std::vector<RequestSummary> ends;
};

TEST_P(EngineTest,
       TheObserverReceivesEachStepEachRefusalAndTheEndOfEachRequest) {
  CountingObserver observer;
  options_.observer = &observer;
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("r", 5);
  request.tenant = "acme";
  request.sampling.set_n(2);
  const auto sink = std::make_shared<WaitableSink>(2);
  KVASIR_ASSERT_OK(engine_->Submit(request, sink).status);
  sink->AwaitEnd();
  Request bad = MakeRequest("bad");
  bad.prompt = {};
  EXPECT_FALSE(engine_->Submit(bad, std::make_shared<WaitableSink>()).ok());
  engine_->WaitIdle(absl::InfiniteFuture());
  engine_->Stop();
  EXPECT_GE(observer.steps, 6u);
  EXPECT_EQ(observer.sampled, 10u);
  EXPECT_EQ(observer.first_tokens, 2u);
  EXPECT_EQ(observer.later_tokens, 8u);
  EXPECT_EQ(observer.refused, 1u);
  ASSERT_EQ(observer.ends.size(), 1u);
  EXPECT_EQ(observer.ends[0].tenant, "acme");
  EXPECT_EQ(observer.ends[0].output_tokens, 10u);
  EXPECT_EQ(observer.ends[0].reason, kvasir::v1::FINISH_LENGTH);
}

TEST_P(EngineTest, TheStatisticsOfEachStepShowTheObserverThatTheEngineDrains) {
  CountingObserver observer;
  options_.observer = &observer;
  KVASIR_ASSERT_OK(Start());
  gate_.Close();
  const auto sink = std::make_shared<WaitableSink>();
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 5), sink).status);
  gate_.AwaitHeld();
  engine_->BeginDrain();
  gate_.Open();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  engine_->Stop();
  EXPECT_GE(observer.steps, 5u);
  EXPECT_EQ(observer.draining_steps, observer.steps);
}

// A sink that aborts its request from within OnTokens, as the server does when
// it finds a stop string.
class AbortingSink final : public RecordingSink {
 public:
  AbortingSink(Engine* engine, std::string id)
      : engine_(engine), id_(std::move(id)) {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& chunk) override {
    RecordingSink::OnTokens(chunk);
    engine_->Abort(id_, std::nullopt);
  }

 private:
  Engine* const engine_;
  const std::string id_;
};

TEST_P(EngineTest, ARequestMayBeAbortedFromTheCallbackThatReceivesItsTokens) {
  KVASIR_ASSERT_OK(Start());
  const auto sink = std::make_shared<AbortingSink>(engine_.get(), "r");
  KVASIR_ASSERT_OK(engine_->Submit(MakeRequest("r", 50), sink).status);
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  engine_->Stop();
  EXPECT_EQ(sink->samples()[0].finish->reason(), kvasir::v1::FINISH_ABORT);
  // At most one more step runs: the step that was already planned.
  EXPECT_LE(sink->samples()[0].tokens.size(), 2u);
}

TEST_P(EngineTest, ManyThreadsMaySubmitAndAbortRequestsAtRandomTimes) {
  options_.scheduler.max_queue = 64;
  KVASIR_ASSERT_OK(Start());
  constexpr int kThreads = 4;
  constexpr int kRequests = 125;
  std::atomic<int> wrong = 0;
  std::atomic<int> finished = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 generator(static_cast<uint32_t>(t));
      const auto random = [&] { return static_cast<uint32_t>(generator()); };
      std::vector<std::pair<Request, std::shared_ptr<WaitableSink>>> all;
      for (int i = 0; i < kRequests; ++i) {
        Request request =
            MakeRequest(absl::StrCat("t", t, "-", i), 1 + random() % 12);
        request.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(
            1 + random() % 30, static_cast<int32_t>(random() % 3)));
        request.sampling.set_n(1 + random() % 2);
        auto sink = std::make_shared<WaitableSink>(request.sampling.n());
        while (!engine_->Submit(request, sink).ok()) std::this_thread::yield();
        if (random() % 3 == 0) engine_->Abort(request.request_id, std::nullopt);
        all.emplace_back(std::move(request), std::move(sink));
      }
      for (auto& [request, sink] : all) {
        sink->AwaitEnd();
        for (uint32_t s = 0; s < request.sampling.n(); ++s) {
          const auto& sample = sink->samples()[s];
          if (sample.finish->reason() == kvasir::v1::FINISH_ABORT) continue;
          ++finished;
          if (sample.tokens != Expected(request, s)) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(finished, 0);
  const EngineTotals totals = engine_->Totals();
  EXPECT_EQ(totals.finished + totals.aborted, uint64_t{kThreads * kRequests});
  EXPECT_EQ(totals.failed, 0u);
  EXPECT_EQ(engine_->Load().running, 0u);
  EXPECT_EQ(engine_->Load().waiting, 0u);
  engine_->Stop();
  ExpectNothingHeld();
}

// Writes its calls to a log that it shares with LoggingSink, to show their
// order.
class LoggingExecutor final : public Executor {
 public:
  LoggingExecutor(Executor* own, std::vector<std::string>* log)
      : own_(*own), log_(*log) {}
  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override {
    step_id_ = plan.step_id();
    log_.push_back(absl::StrCat("run ", step_id_));
    return own_.Enqueue(plan);
  }
  absl::StatusOr<kvasir::v1::StepResult> Await() override {
    log_.push_back(absl::StrCat("await ", step_id_));
    return own_.Await();
  }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override {
    log_.push_back(absl::StrCat("announce ", plan.step_id()));
    return own_.Announce(plan);
  }
  bool is_asynchronous() const override { return own_.is_asynchronous(); }

 private:
  Executor& own_;
  std::vector<std::string>& log_;
  uint64_t step_id_ = 0;
};

class LoggingSink final : public EngineSink {
 public:
  explicit LoggingSink(std::vector<std::string>* log) : log_(*log) {}
  void OnAccepted(uint32_t) override {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens&) override {
    log_.push_back("token");
  }
  void OnFinished(const kvasir::v1::GenerateEvent::Finish&, bool) override {
    log_.push_back("end");
  }
  void OnFailed(const Refusal& why) override {
    log_.push_back(why.status.ToString());
  }

 private:
  // Only the engine's thread uses the log until Stop.
  std::vector<std::string>& log_;
};

TEST_P(EngineTest, TheNextStepIsEnqueuedBeforeTokensAreDelivered) {
  options_.warm_up = false;
  KVASIR_ASSERT_OK(Start());
  engine_.reset();
  std::vector<std::string> log;
  LoggingExecutor executor(executor_.get(), &log);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      engine_, Engine::Create(options_, cache_.get(), &executor));
  KVASIR_ASSERT_OK(engine_->Start());
  ASSERT_TRUE(
      engine_->Submit(MakeRequest("a", 3), std::make_shared<LoggingSink>(&log))
          .ok());
  ASSERT_TRUE(engine_->WaitIdle(absl::InfiniteFuture()));
  engine_->Stop();
  if (GetParam()) {
    EXPECT_EQ(absl::StrJoin(log, ", "),
              "run 1, announce 2, await 1, run 2, token, "
              "announce 3, await 2, run 3, token, await 3, token, end");
  } else {
    EXPECT_EQ(absl::StrJoin(log, ", "),
              "run 1, await 1, token, run 2, await 2, token, run 3, await 3, "
              "token, end");
  }
}

// The step that was planned ahead samples a token for the request that has
// ended; that token is dropped.
TEST_P(EngineTest,
       TheEngineAwaitsAStepThatWasPlannedAheadForARequestThatHasEnded) {
  options_.warm_up = false;
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("a", 20);
  const std::vector<int32_t> all = Expected(request);
  request.sampling.add_stop_token_ids(all[3]);
  const auto sink = std::make_shared<WaitableSink>(1);
  ASSERT_TRUE(engine_->Submit(request, sink).ok());
  sink->AwaitEnd();
  engine_->Stop();
  EXPECT_EQ(sink->samples()[0].tokens, Expected(request));
  EXPECT_EQ(executor_->steps(), GetParam() ? 5u : 4u);
  EXPECT_EQ(executor_->announced_steps(), GetParam() ? 4u : 0u);
  EXPECT_EQ(executor_->Await().status().code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectNothingHeld();
}

// An executor whose Enqueue or Announce fails for a given step.
class FailingExecutor final : public Executor {
 public:
  explicit FailingExecutor(Executor* own) : own_(*own) {}
  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override {
    if (plan.step_id() == fails_enqueue) return absl::DataLossError("enqueue");
    return own_.Enqueue(plan);
  }
  absl::StatusOr<kvasir::v1::StepResult> Await() override {
    return own_.Await();
  }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override {
    if (plan.step_id() == fails_announce) {
      return absl::DataLossError("announce");
    }
    return own_.Announce(plan);
  }
  bool is_asynchronous() const override { return own_.is_asynchronous(); }

  uint64_t fails_enqueue = 0;
  uint64_t fails_announce = 0;

 private:
  Executor& own_;
};

TEST_P(EngineTest, EveryRequestFailsIfHandingTheNextStepToTheExecutorFails) {
  options_.warm_up = false;
  KVASIR_ASSERT_OK(Start());
  for (const bool announce : {true, false}) {
    if (announce && !GetParam()) continue;
    engine_.reset();
    executor_ = std::make_unique<FakeExecutor>(fake_);
    FailingExecutor executor(executor_.get());
    (announce ? executor.fails_announce : executor.fails_enqueue) = 2;
    std::atomic<int> failures = 0;
    options_.on_failure = [&](const absl::Status&) { ++failures; };
    KVASIR_ASSERT_OK_AND_ASSIGN(
        engine_, Engine::Create(options_, cache_.get(), &executor));
    KVASIR_ASSERT_OK(engine_->Start());
    const auto sink = std::make_shared<WaitableSink>();
    ASSERT_TRUE(engine_->Submit(MakeRequest("r", 9), sink).ok());
    sink->AwaitEnd();
    engine_->Stop();
    ASSERT_TRUE(sink->failed().has_value());
    EXPECT_THAT(sink->failed()->status.message(),
                HasSubstr(announce ? "announce" : "enqueue"));
    // If Enqueue fails, the token of the previous step is still delivered.
    EXPECT_EQ(sink->samples()[0].tokens.size(), announce ? 0u : 1u);
    EXPECT_EQ(failures, 1);
    ExpectNothingHeld();
    engine_.reset();
  }
}

TEST_P(EngineTest, TheFailureOfAStepIsReportedEvenIfItsRequestsHaveEnded) {
  options_.warm_up = false;
  std::atomic<int> failures = 0;
  options_.on_failure = [&](const absl::Status&) { ++failures; };
  std::atomic<uint64_t> awaited = 0;
  fake_.during_step = [&](const kvasir::v1::StepPlan& plan) {
    awaited = plan.step_id();
    return plan.step_id() == 5 ? absl::DataLossError("bit rot")
                               : absl::OkStatus();
  };
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("a", 20);
  request.sampling.add_stop_token_ids(Expected(request)[3]);
  const auto sink = std::make_shared<WaitableSink>(1);
  ASSERT_TRUE(engine_->Submit(request, sink).ok());
  sink->AwaitEnd();
  // If the executor is asynchronous, step 5 was planned ahead for the request
  // that has ended. The engine must await this step without being woken by a
  // command or Stop.
  while (awaited < (GetParam() ? 5 : 4)) absl::SleepFor(absl::Milliseconds(1));
  engine_->Stop();
  EXPECT_EQ(sink->samples()[0].tokens, Expected(request));
  EXPECT_EQ(failures, GetParam() ? 1 : 0);
  ExpectNothingHeld();
}

// A sink whose OnFinished does not return before the engine's Stop was called.
class LingeringSink final : public WaitableSink {
 public:
  LingeringSink(Engine* engine, Request own)
      : engine_(*engine), own_(std::move(own)) {}
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                  bool last) override {
    WaitableSink::OnFinished(finish, last);
    // Submit refuses this request: before Stop with ALREADY_EXISTS because it
    // is live, and after Stop with UNAVAILABLE.
    while (engine_.Submit(own_, nullptr).status.code() !=
           absl::StatusCode::kUnavailable) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

 private:
  Engine& engine_;
  const Request own_;
};

TEST_P(EngineTest, StopReportsTheFailureOfTheRunningStep) {
  options_.warm_up = false;
  std::atomic<int> failures = 0;
  options_.on_failure = [&](const absl::Status&) { ++failures; };
  fake_.during_step = [](const kvasir::v1::StepPlan& plan) {
    return plan.step_id() == 5 ? absl::DataLossError("bit rot")
                               : absl::OkStatus();
  };
  KVASIR_ASSERT_OK(Start());
  Request request = MakeRequest("a", 20);
  request.sampling.add_stop_token_ids(Expected(request)[3]);
  const auto sink = std::make_shared<LingeringSink>(engine_.get(), request);
  ASSERT_TRUE(engine_->Submit(request, sink).ok());
  sink->AwaitEnd();
  engine_->Stop();
  EXPECT_EQ(sink->samples()[0].tokens, Expected(request));
  EXPECT_EQ(failures, GetParam() ? 1 : 0);
  ExpectNothingHeld();
}

TEST(EngineCreateTest, TheErrorForAPoolTooSmallForOneSequenceStatesTheSizes) {
  cache::KvCacheConfig config;
  config.page_tokens = 4;
  config.cache_id = "test";
  config.groups = {{.num_pages = 15}};
  cache::KvCache cache(config);
  FakeExecutor executor({.groups = {{.num_pages = 15}}});
  EngineOptions options;
  options.scheduler.max_model_len = 64;
  options.scheduler.vocab_size = 10;
  EXPECT_THAT(Engine::Create(options, &cache, &executor).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("64"), HasSubstr("16 pages"),
                             HasSubstr("which has 15"))));
}

INSTANTIATE_TEST_SUITE_P(
    StepsRun, EngineTest, ::testing::Bool(), [](const auto& param_info) {
      return std::string(param_info.param ? "AfterEnqueue" : "WithinEnqueue");
    });

}  // namespace
}  // namespace kvasir::worker
