// Tests of the router with scripted workers and without gRPC.
#include "router/core/request_router.h"

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "proto/refusal.h"
#include "router/testing/fake_worker_client.h"
#include "router/testing/recording_sink.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

class KeptLog final : public AccessLogSink {
 public:
  void Write(const AccessRecord& record) override {
    base::MutexLock lock(&mutex_);
    records_.push_back(record);
  }
  std::vector<AccessRecord> records() const {
    base::MutexLock lock(&mutex_);
    return records_;
  }

 private:
  mutable base::Mutex mutex_;
  std::vector<AccessRecord> records_ ABSL_GUARDED_BY(mutex_);
};

// An observer that keeps the last reported numbers and each replica's states.
// If `slow` is set, it takes a millisecond to record a number above 0.
class KeptStates final : public RouterObserver {
 public:
  std::atomic<bool> slow{false};

  void OnInFlight(size_t in_flight, size_t queued) override {
    if (slow && in_flight > 0) absl::SleepFor(absl::Milliseconds(1));
    base::MutexLock lock(&mutex_);
    in_flight_ = in_flight;
    queued_ = queued;
  }
  void OnRefused(const absl::Status&) override {
    base::MutexLock lock(&mutex_);
    ++num_refused_;
  }
  void OnReplicaState(const std::string& target, ReplicaState state) override {
    base::MutexLock lock(&mutex_);
    states_[target].push_back(state);
  }
  std::pair<size_t, size_t> in_flight() const {
    base::MutexLock lock(&mutex_);
    return {in_flight_, queued_};
  }
  size_t num_refused() const {
    base::MutexLock lock(&mutex_);
    return num_refused_;
  }
  std::vector<ReplicaState> states(const std::string& target) const {
    base::MutexLock lock(&mutex_);
    const auto found = states_.find(target);
    return found == states_.end() ? std::vector<ReplicaState>() : found->second;
  }

 private:
  mutable base::Mutex mutex_;
  size_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t queued_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t num_refused_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::vector<ReplicaState>> states_
      ABSL_GUARDED_BY(mutex_);
};

CanonicalRequest NewRequest(size_t prompt_tokens = 3) {
  CanonicalRequest request;
  request.model = "tiny";
  request.tenant = "tenant";
  request.client_request_id = "client-1";
  request.prompt = TokenBytes::FromIds(std::vector<int32_t>(prompt_tokens, 5));
  request.sampling = NeutralSampling();
  return request;
}

class RequestRouterTest : public ::testing::Test {
 protected:
  // Starts the router with workers "w0", "w1", and so on. A test may call
  // Prepare first and change the workers' states.
  absl::Status Start(int num_workers, RouterCoreOptions options = {},
                     absl::Duration patience = absl::Milliseconds(500)) {
    Prepare(num_workers);
    ReplicaRegistryOptions registry_options;
    for (int i = 0; i < num_workers; ++i) {
      registry_options.workers.push_back({absl::StrCat("w", i)});
    }
    registry_options.served_names = served_names_;
    registry_options.others_patience = absl::Milliseconds(200);
    registry_options.on_change = [this] { ++changes_; };
    registry_ = std::make_unique<ReplicaRegistry>(
        registry_options,
        [this](const WorkerAddress& worker) {
          return workers_[static_cast<size_t>(worker.target[1] - '0')]
              ->NewClient();
        },
        &timers_, &observer_);
    KVASIR_RETURN_IF_ERROR(registry_->Start(patience));
    router_ = std::make_unique<RouterCore>(
        options,
        RouterCore::Parts{registry_.get(), &timers_, &log_, &observer_});
    return absl::OkStatus();
  }
  void Prepare(int num_workers) {
    while (workers_.size() < static_cast<size_t>(num_workers)) {
      workers_.push_back(std::make_unique<FakeWorker>(&transport_));
    }
  }

  // Submits a request; `sink` receives its events.
  std::shared_ptr<RequestHandle> Submit(
      std::shared_ptr<RecordingSink> sink,
      CanonicalRequest request = NewRequest()) {
    auto handle = router_->Submit(std::move(request), std::move(sink));
    KVASIR_EXPECT_OK(handle);
    return handle.ok() ? *handle : nullptr;
  }

  // Starts the router with one worker, which is then lost.
  void StartAndLoseTheWorker(RouterCoreOptions options = {}) {
    KVASIR_ASSERT_OK(Start(1, options));
    workers_[0]->Die();
    EXPECT_TRUE(Eventually([&] { return !router_->Health().ready; }));
  }

  // Submits a request whose client gets the whole answer in one response. Then
  // loses worker 0 after the first token.
  std::shared_ptr<RecordingSink> LoseAFoldedAnswer() {
    KVASIR_EXPECT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin},
                               .queue_timeout = absl::Milliseconds(100)}));
    CanonicalRequest request = NewRequest();
    request.folded = true;
    const auto sink = std::make_shared<RecordingSink>();
    Submit(sink, std::move(request));
    const auto first = WaitForAttempt(0);
    first->Accept();
    first->Tokens({7});
    EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 1; }));
    first->End(absl::UnavailableError("gone"));
    return sink;
  }

  std::shared_ptr<FakeAttempt> WaitForAttempt(size_t worker, size_t index = 0) {
    EXPECT_TRUE(Eventually([&] {
      return workers_[worker]->attempts().size() > index &&
             workers_[worker]->attempts()[index]->started();
    }));
    return workers_[worker]->attempts()[index];
  }

  TimerThread transport_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::vector<std::string> served_names_;
  std::atomic<int> changes_{0};
  TimerThread timers_;
  KeptLog log_;
  KeptStates observer_;
  std::unique_ptr<ReplicaRegistry> registry_;
  std::unique_ptr<RouterCore> router_;
};

TEST_F(RequestRouterTest,
       EventsOfTheWorkerReachTheRequestsSinkUntilTheRequestEnds) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink);
  const auto attempt = WaitForAttempt(0);
  attempt->Accept();
  attempt->Tokens({7, 8});
  attempt->Tokens({9});
  attempt->Finish(kvasir::v1::FINISH_STOP);
  attempt->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(sink->accepted(), 1);
  EXPECT_THAT(sink->ids(), ElementsAre(7, 8, 9));
  ASSERT_EQ(log_.records().size(), 1u);
  const AccessRecord record = log_.records()[0];
  EXPECT_EQ(record.request_id, handle->id());
  EXPECT_EQ(record.finish_reason, "stop");
  EXPECT_EQ(record.output_tokens, 3u);
  EXPECT_TRUE(router_->WaitIdle(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(registry_->replicas()[0]->in_flight(), 0u);
}

TEST_F(RequestRouterTest, TheWorkerReceivesEveryFieldOfTheRequest) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest();
  request.deadline = absl::Now() + absl::Seconds(30);
  request.priority = -2;
  request.traceparent = "00-trace";
  request.cache_salt = "salt";
  request.queue_timeout = absl::Milliseconds(1500);
  const char* const bytes = request.prompt.bytes().data();
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink, request);
  const WorkerCall& call = WaitForAttempt(0)->call();
  EXPECT_EQ(call.prompt.bytes().data(), bytes) << "not a copy";
  EXPECT_EQ(call.head.request_id(), handle->id());
  EXPECT_EQ(call.head.attempt(), 0u);
  EXPECT_EQ(call.head.weights_id(), "w1");
  EXPECT_NE(call.head.sampling().seed(), 0u);
  EXPECT_EQ(call.head.sampling().max_tokens(), 97u)
      << "max_model_len 100 minus 3 prompt tokens";
  EXPECT_EQ(call.head.priority(), -2);
  EXPECT_FALSE(call.head.has_eviction_budget());
  EXPECT_EQ(call.head.traceparent(), "00-trace");
  EXPECT_EQ(call.head.cache_salt(), "salt");
  EXPECT_EQ(call.head.tenant(), "tenant");
  EXPECT_GT(call.head.queue_timeout_ms(), 0u);
  EXPECT_LE(call.head.queue_timeout_ms(), 1500u);
  EXPECT_EQ(call.deadline, request.deadline);
}

TEST_F(RequestRouterTest, ASeedThatTheClientHasSetIsKept) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest();
  request.seed = 0;
  Submit(std::make_shared<RecordingSink>(), request);
  EXPECT_EQ(WaitForAttempt(0)->call().head.sampling().seed(), 0u);
}

TEST_F(RequestRouterTest, IfAWorkerIsFullTheRequestGoesToAnotherWorker) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink);
  WaitForAttempt(0)->End(
      proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(second->call().head.attempt(), 1u);
  EXPECT_EQ(second->call().head.request_id(), handle->id());
  second->Tokens({1});
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(log_.records()[0].attempts, 2u);
  EXPECT_EQ(log_.records()[0].replica, "w1");
}

TEST_F(RequestRouterTest,
       AWorkerWithTheSameNumericsIdContinuesTheAnswerOfALostWorker) {
  const auto sink = LoseAFoldedAnswer();
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(second->call().head.weights_id(), "w1");
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, TokensThatAnEqualWorkerRepeatsAreDeliveredOnce) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  CanonicalRequest request = NewRequest();
  request.folded = true;
  request.sampling.set_prompt_logprobs(0);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, std::move(request));
  const auto first = WaitForAttempt(0);
  first->Accept();
  first->Tokens({7});
  EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 1; }));
  first->End(absl::UnavailableError("gone"));
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(second->call().emitted, "");
  second->Accept();
  second->Tokens({7, 8});
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_THAT(sink->ids(), ::testing::ElementsAre(7, 8));
}

TEST_F(RequestRouterTest,
       TheRouterRefusesToStartWithWorkersOfDifferentCacheFormats) {
  Prepare(2);
  workers_[1]->info()->set_cache_id("other");
  EXPECT_THAT(Start(2), StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("cache_id")));
}

// A worker with other arithmetic would continue the answer with
// different tokens.
TEST_F(RequestRouterTest,
       AWorkerWithADifferentNumericsIdDoesNotContinueTheAnswer) {
  Prepare(2);
  workers_[1]->info()->set_numerics_id("other");
  const auto sink = LoseAFoldedAnswer();
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_TRUE(workers_[1]->attempts().empty());
}

TEST_F(RequestRouterTest, EveryWorkerReceivesTheRequestsEvictionBudget) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  CanonicalRequest request = NewRequest();
  request.eviction_budget = {.ratio = 0.5};
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, std::move(request));
  const auto first = WaitForAttempt(0);
  EXPECT_EQ(first->call().head.eviction_budget().share(), 0.5);
  first->End(proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(second->call().head.eviction_budget().share(), 0.5);
  EXPECT_EQ(second->call().head.eviction_budget().slots(), 0u);
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, ThePromptIsSentToEachWorkerWithoutACopy) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  CanonicalRequest request = NewRequest(50);
  const void* const where = request.prompt.bytes().data();
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, std::move(request));
  const auto first = WaitForAttempt(0);
  EXPECT_EQ(static_cast<const void*>(first->call().prompt.bytes().data()),
            where);
  first->End(proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(static_cast<const void*>(second->call().prompt.bytes().data()),
            where);
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, IfAllWorkersRefuseTheClientReceivesTheLastReason) {
  KVASIR_ASSERT_OK(Start(2));
  const auto sink = std::make_shared<RecordingSink>();
  for (const auto& worker : workers_) {
    worker->OnAttempt([](const std::shared_ptr<FakeAttempt>& attempt) {
      attempt->End(
          proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
    });
  }
  Submit(sink);
  const absl::Status status = sink->Wait();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_TRUE(proto::RefusalOf(status).has_value());
  EXPECT_EQ(log_.records()[0].finish_reason, "refused");
  EXPECT_EQ(workers_[0]->attempts().size(), 1u) << "no worker is asked twice";
  EXPECT_EQ(workers_[1]->attempts().size(), 1u);
}

TEST_F(RequestRouterTest, AStreamGoesOnAfterItsWorkerHasDied) {
  Prepare(2);
  for (const auto& worker : workers_) worker->info()->set_device("cpu");
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  WaitForAttempt(0)->Tokens({7, 8});
  EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 2; }));
  workers_[0]->Die();
  const auto second = WaitForAttempt(1);
  EXPECT_EQ(second->call().emitted, std::string("\7\0\0\0\10\0\0\0", 8));
  second->Tokens({9});
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_THAT(sink->ids(), ElementsAre(7, 8, 9));
}

class MoveStreamsTest
    : public RequestRouterTest,
      public ::testing::WithParamInterface<std::tuple<MoveStreams, bool>> {};

TEST_P(MoveStreamsTest,
       StreamsMoveIfTheirTokensStayTheSameOrIfRoundingMayDiffer) {
  const auto [moves, lifts] = GetParam();
  Prepare(2);
  for (const auto& worker : workers_) {
    worker->info()->set_device("cpu");
    worker->info()->set_lifts_prompts(lifts);
  }
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin},
                             .move_streams = moves}));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  WaitForAttempt(0)->Tokens({1});
  EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 1; }));
  workers_[0]->Die();
  if (moves == MoveStreams::kOff || (lifts && moves == MoveStreams::kExact)) {
    EXPECT_THAT(sink->Wait(),
                StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
    EXPECT_TRUE(workers_[1]->attempts().empty());
    return;
  }
  const auto second = WaitForAttempt(1);
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
}
INSTANTIATE_TEST_SUITE_P(
    All, MoveStreamsTest,
    ::testing::Combine(::testing::Values(MoveStreams::kOff, MoveStreams::kExact,
                                         MoveStreams::kRounding),
                       ::testing::Bool()));

TEST(ParseMoveStreamsTest, AnUnknownTextIsRefusedWithTheKnownOnes) {
  EXPECT_EQ(*ParseMoveStreams("rounding"), MoveStreams::kRounding);
  EXPECT_EQ(*ParseMoveStreams("exact"), MoveStreams::kExact);
  EXPECT_EQ(*ParseMoveStreams("off"), MoveStreams::kOff);
  EXPECT_THAT(
      ParseMoveStreams("on"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               "--move-streams 'on': it must be exact, rounding or off"));
}

TEST_F(RequestRouterTest, AWorkerThatDiesMidStreamEndsTheRequest) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  WaitForAttempt(0)->Tokens({1});
  workers_[0]->Die();
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
  EXPECT_TRUE(workers_[1]->attempts().empty());
}

TEST_F(RequestRouterTest, ALostWorkerGetsRequestsAgainAfterItHasReconnected) {
  KVASIR_ASSERT_OK(Start(1));
  EXPECT_EQ(changes_, 1) << "ready";
  workers_[0]->Die();
  EXPECT_TRUE(Eventually([&] { return !router_->Health().ready; }));
  EXPECT_TRUE(Eventually([&] { return changes_ == 2; }));
  EXPECT_THAT(router_->Health().detail, HasSubstr("w0 lost"));
  workers_[0]->SetReachable(true);
  EXPECT_TRUE(Eventually([&] { return router_->Health().ready; }));
  Submit(std::make_shared<RecordingSink>());
}

TEST_F(RequestRouterTest, ARequestWaitsUntilAReplicaIsReady) {
  StartAndLoseTheWorker();
  CanonicalRequest urgent = NewRequest();
  urgent.priority = -1;
  const auto later = std::make_shared<RecordingSink>();
  const auto sooner = std::make_shared<RecordingSink>();
  const auto cancelled = std::make_shared<RecordingSink>();
  Submit(later);
  const auto second = Submit(sooner, urgent);
  Submit(cancelled)->Cancel(CancelReason::kClient);
  EXPECT_THAT(cancelled->Wait(),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_TRUE(workers_[0]->attempts().empty());
  workers_[0]->SetReachable(true);
  EXPECT_EQ(WaitForAttempt(0)->call().head.request_id(), second->id());
  for (size_t i = 0; i < 2; ++i) {
    const auto attempt = WaitForAttempt(0, i);
    attempt->Finish(kvasir::v1::FINISH_LENGTH);
    attempt->End(absl::OkStatus());
  }
  KVASIR_EXPECT_OK(sooner->Wait());
  KVASIR_EXPECT_OK(later->Wait());
}

// The error for the client must not contain addresses of workers, because the
// client may be untrusted.
TEST_F(RequestRouterTest, WithoutAReadyReplicaARequestEndsAtTheQueueTimeout) {
  RouterCoreOptions options;
  options.admission = {.max_in_flight = 1, .max_queue = 1};
  options.queue_timeout = absl::Milliseconds(20);
  StartAndLoseTheWorker(options);
  for (int i = 0; i < 2; ++i) {
    const auto sink = std::make_shared<RecordingSink>();
    Submit(sink);
    EXPECT_THAT(sink->Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                       "model tiny: no replica is ready"));
    EXPECT_TRUE(Eventually([&] { return router_->in_flight() == 0; }));
  }
  EXPECT_EQ(log_.records()[0].finish_reason, "refused");
}

// Regression test: a cancel was once lost if it came while the request was in
// no queue.
TEST_F(RequestRouterTest, ARequestThatWaitsForAReplicaCanAlwaysBeCancelled) {
  StartAndLoseTheWorker();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  std::vector<std::shared_ptr<RequestHandle>> handles;
  for (int i = 0; i < 200; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    handles.push_back(Submit(sinks.back()));
  }
  std::thread cancels([&] {
    // Cancels the requests while they are being dispatched.
    Eventually([&] { return !workers_[0]->attempts().empty(); });
    for (const auto& handle : handles) handle->Cancel(CancelReason::kClient);
  });
  workers_[0]->SetReachable(true);
  cancels.join();
  EXPECT_TRUE(Eventually([&] {
    for (const auto& attempt : workers_[0]->attempts()) {
      if (attempt->started()) attempt->End(absl::CancelledError(""));
    }
    return router_->in_flight() == 0;
  }));
  for (const auto& sink : sinks) {
    EXPECT_THAT(sink->Wait(),
                StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  }
}

TEST_F(RequestRouterTest, RequestsThatWaitForAReplicaTakeNoPlaceFromOthers) {
  RouterCoreOptions options;
  options.admission = {.max_in_flight = 1, .max_queue = 8};
  StartAndLoseTheWorker(options);
  // If the waiting requests kept their places, the second would have to wait in
  // the queue.
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    Submit(sinks.back());
  }
  workers_[0]->SetReachable(true);
  for (size_t i = 0; i < 3; ++i) {
    const auto attempt = WaitForAttempt(0, i);
    // With max_in_flight = 1, the next request starts only when this one
    // has ended.
    EXPECT_EQ(workers_[0]->attempts().size(), i + 1);
    attempt->Finish(kvasir::v1::FINISH_LENGTH);
    attempt->End(absl::OkStatus());
  }
  for (const auto& sink : sinks) KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, ADrainEndsRequestsThatWaitForAReplica) {
  StartAndLoseTheWorker();
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  router_->BeginDrain();
  const absl::Status status = sink->Wait();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_EQ(proto::RefusalOf(status)->reason(), kvasir::v1::Refusal::DRAINING);
}

// The second request leaves the queue after the drain has begun.
TEST_F(RequestRouterTest, InADrainNoRequestWaitsForAReplica) {
  RouterCoreOptions options;
  options.admission = {.max_in_flight = 1, .max_queue = 8};
  KVASIR_ASSERT_OK(Start(1, options));
  const auto runs = std::make_shared<RecordingSink>();
  Submit(runs);
  WaitForAttempt(0);
  const auto waits = std::make_shared<RecordingSink>();
  Submit(waits);
  router_->BeginDrain();
  workers_[0]->Die();
  EXPECT_THAT(runs->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_THAT(waits->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
}

TEST_F(RequestRouterTest, TheDestructorEndsRequestsThatWaitForAReplica) {
  StartAndLoseTheWorker();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 20; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    Submit(sinks.back());
  }
  workers_[0]->SetReachable(true);
  router_.reset();
  for (const auto& sink : sinks) EXPECT_TRUE(sink->done());
}

TEST_F(RequestRouterTest, TheNumberOfRequestsThatWaitForAReplicaIsLimited) {
  RouterCoreOptions options;
  options.admission.max_queue = 2;
  StartAndLoseTheWorker(options);
  for (int i = 0; i < 2; ++i) Submit(std::make_shared<RecordingSink>());
  EXPECT_THAT(router_->Submit(NewRequest(), std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
}

TEST_F(RequestRouterTest, AReplicaHasTheStateConnectingUntilItIsReached) {
  Prepare(2);
  workers_[1]->SetReachable(false);
  KVASIR_ASSERT_OK(Start(2));
  EXPECT_THAT(observer_.states("w0"),
              ElementsAre(ReplicaState::kConnecting, ReplicaState::kReady));
  EXPECT_THAT(observer_.states("w1"), ElementsAre(ReplicaState::kConnecting));
}

TEST_F(RequestRouterTest,
       IfADrainingWorkerAbortsARequestItGoesToAnotherWorker) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  const auto first = WaitForAttempt(0);
  first->Accept();
  first->Finish(kvasir::v1::FINISH_ABORT);
  first->End(absl::OkStatus());
  const auto second = WaitForAttempt(1);
  second->Tokens({1});
  second->Finish(kvasir::v1::FINISH_LENGTH);
  second->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  ASSERT_EQ(sink->finishes().size(), 1u);
  EXPECT_EQ(sink->finishes()[0].reason(), kvasir::v1::FINISH_LENGTH);
}

TEST_F(RequestRouterTest, TheCallToAWorkerThatExceedsMaxTokensIsReset) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest();
  request.sampling.set_max_tokens(2);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, request);
  const auto attempt = WaitForAttempt(0);
  attempt->Tokens({1, 2});
  attempt->Tokens({3});
  EXPECT_THAT(sink->Wait(), StatusIs(absl::StatusCode::kInternal,
                                     HasSubstr("max_tokens is 2")));
  EXPECT_TRUE(attempt->cancelled());
  EXPECT_THAT(sink->ids(), ElementsAre(1, 2));
}

TEST_F(RequestRouterTest,
       TheLastReportToTheObserverHasTheCurrentNumberOfRequestsInFlight) {
  RouterCoreOptions options;
  options.admission = {2, 100};
  KVASIR_ASSERT_OK(Start(1, options));
  workers_[0]->OnAttempt([](const std::shared_ptr<FakeAttempt>& attempt) {
    attempt->Finish(kvasir::v1::FINISH_STOP);
    attempt->End(absl::OkStatus());
  });
  observer_.slow = true;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int i = 0; i < 4; ++i) {
      sinks.push_back(std::make_shared<RecordingSink>());
      Submit(sinks.back());
    }
    for (const auto& sink : sinks) KVASIR_EXPECT_OK(sink->Wait());
    ASSERT_TRUE(router_->WaitIdle(absl::Now() + absl::Seconds(20)));
    ASSERT_EQ(observer_.in_flight(), std::make_pair(size_t{0}, size_t{0}));
  }
}

TEST_F(RequestRouterTest, ACancelByTheClientResetsTheCallToTheWorker) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink);
  const auto attempt = WaitForAttempt(0);
  attempt->Tokens({1});
  ASSERT_TRUE(Eventually([&] { return sink->ids().size() == 1; }));
  handle->Cancel(CancelReason::kStopString);
  handle->Cancel(CancelReason::kClient);
  EXPECT_TRUE(attempt->cancelled());
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("stop string")));
  EXPECT_EQ(log_.records()[0].finish_reason, "stop");
  handle->Cancel(CancelReason::kClient);
}

TEST_F(RequestRouterTest, RequestsOverTheLimitWaitUntilARunningOneEnds) {
  RouterCoreOptions options;
  options.admission = {1, 1};
  KVASIR_ASSERT_OK(Start(1, options));
  const auto first = std::make_shared<RecordingSink>();
  const auto second = std::make_shared<RecordingSink>();
  Submit(first);
  const auto attempt = WaitForAttempt(0);
  Submit(second);
  EXPECT_THAT(router_->Submit(NewRequest(), std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("1 of at most 1 requests run")));
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
  attempt->Finish(kvasir::v1::FINISH_STOP);
  attempt->End(absl::OkStatus());
  KVASIR_EXPECT_OK(first->Wait());
  const auto next = WaitForAttempt(0, 1);
  next->Finish(kvasir::v1::FINISH_STOP);
  next->End(absl::OkStatus());
  KVASIR_EXPECT_OK(second->Wait());
}

TEST_F(RequestRouterTest, ARequestCancelledInTheQueueNeverReachesAWorker) {
  RouterCoreOptions options;
  options.admission = {1, 1};
  KVASIR_ASSERT_OK(Start(1, options));
  Submit(std::make_shared<RecordingSink>());
  const auto waiting = std::make_shared<RecordingSink>();
  Submit(waiting)->Cancel(CancelReason::kClient);
  EXPECT_THAT(waiting->Wait(),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
}

TEST_F(RequestRouterTest, AWaitingRequestEndsAtTheQueueTimeoutOrItsDeadline) {
  RouterCoreOptions options;
  options.admission = {1, 2};
  options.queue_timeout = absl::Milliseconds(20);
  KVASIR_ASSERT_OK(Start(1, options));
  Submit(std::make_shared<RecordingSink>());
  const auto waiting = std::make_shared<RecordingSink>();
  Submit(waiting);
  EXPECT_THAT(waiting->Wait(), StatusIs(absl::StatusCode::kResourceExhausted,
                                        HasSubstr("in the router's queue")));
  CanonicalRequest hurried = NewRequest();
  hurried.deadline = absl::Now() + absl::Milliseconds(10);
  const auto late = std::make_shared<RecordingSink>();
  Submit(late, hurried);
  EXPECT_THAT(late->Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
}

TEST_F(RequestRouterTest,
       AWaitingRequestEndsWithDeadlineExceededAtItsOwnTimeout) {
  RouterCoreOptions options;
  options.admission = {1, 2};
  KVASIR_ASSERT_OK(Start(1, options));
  Submit(std::make_shared<RecordingSink>());
  CanonicalRequest hurried = NewRequest();
  hurried.queue_timeout = absl::Milliseconds(10);
  const auto waiting = std::make_shared<RecordingSink>();
  Submit(waiting, hurried);
  EXPECT_THAT(waiting->Wait(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                        HasSubstr("own timeout of 10ms")));
}

TEST_F(RequestRouterTest,
       ATimeoutBelowAMillisecondIsSentToTheWorkerAsOneMillisecond) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest();
  request.queue_timeout = absl::Microseconds(10);
  Submit(std::make_shared<RecordingSink>(), request);
  EXPECT_EQ(WaitForAttempt(0)->call().head.queue_timeout_ms(), 1u);
}

TEST_F(RequestRouterTest, ASecondAttemptGetsTheRemainingQueueTimeout) {
  KVASIR_ASSERT_OK(Start(2, {.picker = {.policy = PolicyKind::kRoundRobin}}));
  CanonicalRequest request = NewRequest();
  request.queue_timeout = absl::Seconds(60);
  Submit(std::make_shared<RecordingSink>(), request);
  const auto first = WaitForAttempt(0);
  absl::SleepFor(absl::Milliseconds(20));
  first->End(proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
  EXPECT_LE(WaitForAttempt(1)->call().head.queue_timeout_ms(), 59980u);
}

TEST_F(RequestRouterTest, ARequestThatCannotBeServedIsRefusedBeforeItStarts) {
  KVASIR_ASSERT_OK(Start(1));
  const auto refused = [&](CanonicalRequest request) {
    const auto sink = std::make_shared<RecordingSink>();
    const absl::Status status =
        router_->Submit(std::move(request), sink).status();
    EXPECT_FALSE(sink->done()) << "a refused sink receives nothing";
    return status;
  };
  CanonicalRequest request = NewRequest();
  request.model = "huge";
  EXPECT_THAT(refused(request),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("'huge'"), HasSubstr("tiny"))));
  const absl::Status too_long = refused(NewRequest(100));
  EXPECT_THAT(too_long, StatusIs(absl::StatusCode::kInvalidArgument,
                                 AllOf(HasSubstr("100 tokens"),
                                       HasSubstr("prompt and output"))));
  EXPECT_EQ(proto::RefusalOf(too_long)->reason(),
            kvasir::v1::Refusal::NEVER_FITS);
  EXPECT_THAT(refused(NewRequest(0)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
  request = NewRequest();
  request.sampling.set_n(4000000000u);
  EXPECT_THAT(refused(request), StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("4000000000")));
  request = NewRequest();
  request.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_THAT(refused(request),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  EXPECT_EQ(log_.records().size(), 5u) << "each is logged";
  EXPECT_TRUE(workers_[0]->attempts().empty());
  EXPECT_EQ(router_->in_flight(), 0u);
}

TEST_F(RequestRouterTest, ARequestThatAFacadeRefusesIsLoggedAndCounted) {
  KVASIR_ASSERT_OK(Start(1));
  router_->LogRefused(NewRequest(), absl::AlreadyExistsError("twice"));
  ASSERT_EQ(log_.records().size(), 1u);
  EXPECT_EQ(log_.records()[0].finish_reason, "refused");
  EXPECT_EQ(log_.records()[0].tenant, "tenant");
  EXPECT_EQ(log_.records()[0].status, absl::AlreadyExistsError("twice"));
  EXPECT_EQ(observer_.num_refused(), 1u);
}

// Regression test: during the first part of a drain, a facade's health call
// still answered "ready", so gateways sent more requests.
TEST_F(RequestRouterTest, TheRouterStillServesAfterAnAnnouncedDrain) {
  KVASIR_ASSERT_OK(Start(1));
  EXPECT_TRUE(router_->Health().ready);
  router_->AnnounceDrain();
  EXPECT_EQ(router_->Health().state, RouterState::kDraining);
  EXPECT_FALSE(router_->Health().ready);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  const auto attempt = WaitForAttempt(0);
  attempt->Finish(kvasir::v1::FINISH_STOP);
  attempt->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, ADrainRefusesOnlyNewRequests) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink);
  const auto attempt = WaitForAttempt(0);
  router_->BeginDrain();
  EXPECT_EQ(router_->Health().state, RouterState::kDraining);
  EXPECT_FALSE(router_->Health().ready);
  const absl::Status refused =
      router_->Submit(NewRequest(), std::make_shared<RecordingSink>()).status();
  EXPECT_EQ(proto::RefusalOf(refused)->reason(), kvasir::v1::Refusal::DRAINING);
  EXPECT_FALSE(router_->WaitIdle(absl::Now() + absl::Milliseconds(10)));
  attempt->Finish(kvasir::v1::FINISH_STOP);
  attempt->End(absl::OkStatus());
  EXPECT_TRUE(router_->WaitIdle(absl::InfiniteFuture()));
  KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RequestRouterTest, ADrainingReplicaGetsNoNewRequests) {
  KVASIR_ASSERT_OK(Start(2));
  kvasir::v1::LoadReport report;
  report.set_draining(true);
  workers_[0]->Report(report);
  EXPECT_TRUE(Eventually([&] {
    return registry_->replicas()[0]->state() == ReplicaState::kDraining;
  }));
  for (int i = 0; i < 4; ++i) Submit(std::make_shared<RecordingSink>());
  EXPECT_TRUE(workers_[0]->attempts().empty());
  EXPECT_EQ(workers_[1]->attempts().size(), 4u);
  EXPECT_TRUE(router_->Health().ready);
}

TEST_F(RequestRouterTest, DestroyingTheRouterCancelsRunningRequests) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink);
  WaitForAttempt(0);
  router_.reset();
  EXPECT_TRUE(sink->done());
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_EQ(log_.records()[0].finish_reason, "shutdown");
  handle->Cancel(CancelReason::kClient);
}

TEST_F(RequestRouterTest,
       TheRouterRefusesToStartWithAWorkerOfAnotherApiVersion) {
  Prepare(2);
  workers_[1]->info()->set_api_version("kvasir.v9");
  EXPECT_THAT(Start(2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("w1"), HasSubstr("--workers"),
                             HasSubstr("kvasir.v9"), HasSubstr("kvasir.v1"))));
}

TEST_F(RequestRouterTest,
       TheRouterRefusesToStartWithWorkersOfDifferentWeights) {
  Prepare(2);
  workers_[1]->info()->set_weights_id("w2");
  EXPECT_THAT(Start(2), StatusIs(absl::StatusCode::kFailedPrecondition,
                                 AllOf(HasSubstr("--workers"),
                                       HasSubstr("'w1'"), HasSubstr("'w2'"))));
}

TEST_F(RequestRouterTest, TheRouterStartsEvenIfAWorkerCannotBeReached) {
  Prepare(2);
  workers_[1]->SetReachable(false);
  KVASIR_ASSERT_OK(Start(2));
  EXPECT_TRUE(router_->Health().ready);
  EXPECT_THAT(router_->Health().detail, HasSubstr("w1 connecting"));
  KVASIR_ASSERT_OK_AND_ASSIGN(const ModelStatus model, router_->Model("tiny"));
  EXPECT_EQ(model.num_ready_replicas, 1u);
}

// One worker never answers. Start may wait forever for the first answer, but
// for the other workers it waits only briefly.
TEST_F(RequestRouterTest,
       AfterOneWorkerHasAnsweredTheStartWaitsForOthersOnlyBriefly) {
  Prepare(2);
  workers_[1]->SetReachable(false);
  KVASIR_ASSERT_OK(Start(2, {}, absl::InfiniteDuration()));
  EXPECT_TRUE(router_->Health().ready);
}

TEST_F(RequestRouterTest,
       AWorkersAnswerCountsEvenIfItComesBeforeTheStartWaitsForIt) {
  Prepare(2);
  workers_[1]->SetReachable(false);
  workers_[1]->OnInfoAsked([this] {
    ASSERT_TRUE(Eventually([&] { return changes_ == 1; }));
    // Also wait until the thread that reported the change has done all
    // its work.
    std::promise<void> done;
    transport_.At(absl::InfinitePast(), [&done] { done.set_value(); });
    done.get_future().wait();
    workers_[1]->OnInfoAsked(nullptr);
  });
  KVASIR_ASSERT_OK(Start(2, {}, absl::InfiniteDuration()));
  EXPECT_TRUE(router_->Health().ready);
}

TEST_F(RequestRouterTest, ClientsUseTheServedNameInsteadOfTheModelsOwnName) {
  served_names_ = {"default", "tiny-v1"};
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest();
  EXPECT_THAT(router_->Submit(request, std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("default")));
  request.model = "tiny-v1";
  Submit(std::make_shared<RecordingSink>(), request);
  EXPECT_EQ(router_->Models().size(), 2u);
}

TEST_F(RequestRouterTest, TwoModelsCannotShareOneServedName) {
  served_names_ = {"default"};
  Prepare(2);
  workers_[1]->info()->set_model_name("other");
  EXPECT_THAT(Start(2), StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("--served-model-name")));
}

// Makes the fake attempt refuse, fail, delay or answer at random.
void AnswerAtRandom(uint32_t seed,
                    const std::shared_ptr<FakeAttempt>& attempt) {
  std::mt19937 random(seed);
  switch (static_cast<uint32_t>(random()) % 6) {
    case 0:
      attempt->End(
          proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full"));
      return;
    case 1:
      attempt->Accept();
      attempt->End(absl::UnavailableError("gone"));
      return;
    case 2:
      attempt->Accept();
      attempt->Tokens({1, 2});
      attempt->End(absl::UnavailableError("gone"));
      return;
    case 3:
      attempt->Accept();  // the attempt sends nothing more
      return;
    default:
      attempt->Accept();
      attempt->Tokens({1});
      attempt->Tokens({2});
      attempt->Finish(kvasir::v1::FINISH_LENGTH);
      attempt->End(absl::OkStatus());
  }
}

TEST_F(RequestRouterTest, AfterManyRandomAnswersAndCancelsNoRequestIsLeft) {
  constexpr int kCallers = 4;
  constexpr int kRequests = 300;
  RouterCoreOptions options;
  options.admission = {16, 1000};
  KVASIR_ASSERT_OK(Start(3, options));
  std::atomic<uint32_t> seed{0};
  for (const auto& worker : workers_) {
    worker->OnAttempt([&](const std::shared_ptr<FakeAttempt>& attempt) {
      AnswerAtRandom(++seed, attempt);
    });
  }
  std::atomic<int> accepted{0};
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(caller);
      for (int i = 0; i < kRequests; ++i) {
        const auto sink = std::make_shared<RecordingSink>();
        auto handle = router_->Submit(NewRequest(), sink);
        if (!handle.ok()) continue;
        ++accepted;
        // Some workers never answer, so cancel the request if it has not ended
        // after a few milliseconds.
        const auto patience = static_cast<int>(random() % 4);
        for (int waited = 0; waited < patience && !sink->done(); ++waited) {
          absl::SleepFor(absl::Milliseconds(1));
        }
        (*handle)->Cancel(CancelReason::kClient);
        EXPECT_FALSE(absl::IsUnknown(sink->Wait()));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(router_->WaitIdle(absl::Now() + absl::Seconds(20)));
  EXPECT_GT(accepted.load(), kCallers * kRequests / 2);
  for (const auto& replica : registry_->replicas()) {
    EXPECT_EQ(replica->in_flight(), 0u);
  }
  EXPECT_GE(log_.records().size(), static_cast<size_t>(accepted.load()));
}

}  // namespace
}  // namespace kvasir::router
