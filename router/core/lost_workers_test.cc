// Tests of requests whose worker is lost, with scripted workers and without
// gRPC.
#include <atomic>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "proto/load_heartbeat.h"
#include "proto/refusal.h"
#include "router/core/request_router.h"
#include "router/testing/fake_worker_client.h"
#include "router/testing/recording_sink.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

CanonicalRequest NewRequest() {
  CanonicalRequest request;
  request.model = "tiny";
  request.prompt = TokenBytes::FromIds({5, 5, 5});
  request.sampling = NeutralSampling();
  return request;
}

// Keeps what the router reports about moves.
class KeptMoves final : public RouterObserver {
 public:
  void OnMove(MoveReason reason, uint64_t tokens) override {
    base::MutexLock lock(&mutex_);
    moves_.emplace_back(reason, tokens);
  }
  void OnKeptBytes(int64_t bytes) override { kept_bytes += bytes; }
  void OnReplicasByMoves(MoveStreams moves, size_t replicas) override {
    base::MutexLock lock(&mutex_);
    replicas_[moves] = replicas;
  }
  std::vector<std::pair<MoveReason, uint64_t>> moves() const {
    base::MutexLock lock(&mutex_);
    return moves_;
  }
  size_t replicas(MoveStreams moves) const {
    base::MutexLock lock(&mutex_);
    const auto found = replicas_.find(moves);
    return found == replicas_.end() ? 0 : found->second;
  }

  std::atomic<int64_t> kept_bytes{0};

 private:
  mutable base::Mutex mutex_;
  std::vector<std::pair<MoveReason, uint64_t>> moves_ ABSL_GUARDED_BY(mutex_);
  std::map<MoveStreams, size_t> replicas_ ABSL_GUARDED_BY(mutex_);
};

class LostWorkersTest : public ::testing::Test {
 protected:
  void Start(size_t num_workers, RouterCoreOptions options = {}) {
    ReplicaRegistryOptions registry;
    for (size_t i = 0; i < num_workers; ++i) {
      workers_.push_back(std::make_unique<FakeWorker>(&transport_));
      workers_.back()->info()->set_device("cpu");
      registry.workers.push_back({absl::StrCat("w", i)});
    }
    registry_ = std::make_unique<ReplicaRegistry>(
        registry,
        [this](const WorkerAddress& worker) {
          return workers_[static_cast<size_t>(worker.target[1] - '0')]
              ->NewClient();
        },
        &timers_, nullptr);
    KVASIR_ASSERT_OK(registry_->Start(absl::Seconds(20)));
    options.picker.policy = PolicyKind::kRoundRobin;
    router_ = std::make_unique<RouterCore>(
        options, RouterCore::Parts{registry_.get(), &timers_,
                                   /*log=*/nullptr, &moves_});
  }

  std::shared_ptr<RequestHandle> Submit(std::shared_ptr<RecordingSink> sink,
                                        CanonicalRequest request) {
    auto handle = router_->Submit(std::move(request), std::move(sink));
    KVASIR_EXPECT_OK(handle);
    return handle.ok() ? *handle : nullptr;
  }

  std::shared_ptr<FakeAttempt> WaitForAttempt(size_t worker, size_t index = 0) {
    EXPECT_TRUE(Eventually([&] {
      return workers_[worker]->attempts().size() > index &&
             workers_[worker]->attempts()[index]->started();
    }));
    return workers_[worker]->attempts()[index];
  }

  // Submits a request to worker 0 and waits until its client has tokens 7, 8.
  std::shared_ptr<RequestHandle> Begin(
      const std::shared_ptr<RecordingSink>& sink,
      CanonicalRequest request = NewRequest()) {
    auto handle = Submit(sink, std::move(request));
    const auto attempt = WaitForAttempt(0);
    attempt->Accept();
    attempt->Tokens({7, 8});
    EXPECT_TRUE(Eventually([&] { return sink->ids().size() == 2; }));
    return handle;
  }

  void Lose(size_t worker) {
    workers_[worker]->Die();
    EXPECT_TRUE(Eventually([&] {
      return registry_->replicas()[worker]->state() == ReplicaState::kLost;
    }));
  }

  void GoOn(const std::shared_ptr<FakeAttempt>& attempt,
            const std::shared_ptr<RecordingSink>& sink) {
    EXPECT_EQ(attempt->call().emitted, std::string("\7\0\0\0\10\0\0\0", 8));
    attempt->Accept();
    attempt->Tokens({9});
    attempt->Finish(kvasir::v1::FINISH_LENGTH);
    attempt->End(absl::OkStatus());
    KVASIR_EXPECT_OK(sink->Wait());
    EXPECT_THAT(sink->ids(), ElementsAre(7, 8, 9));
    EXPECT_EQ(sink->accepted(), 1);
  }

  TimerThread transport_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  TimerThread timers_;
  KeptMoves moves_;
  std::unique_ptr<ReplicaRegistry> registry_;
  std::unique_ptr<RouterCore> router_;
};

TEST_F(LostWorkersTest, AStreamWaitsUntilItsWorkerHasComeBack) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Lose(0);
  EXPECT_FALSE(sink->done());
  workers_[0]->SetReachable(true);
  GoOn(WaitForAttempt(0, 1), sink);
  EXPECT_EQ(workers_[0]->attempts().size(), 2u);
  EXPECT_THAT(moves_.moves(),
              ElementsAre(std::pair(MoveReason::kLost, uint64_t{3 + 2})));
}

TEST_F(LostWorkersTest, OutputIsKeptUntilTheRequestEnds) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  EXPECT_EQ(moves_.kept_bytes, 8);
  Lose(0);
  workers_[0]->SetReachable(true);
  GoOn(WaitForAttempt(0, 1), sink);
  EXPECT_EQ(moves_.kept_bytes, 0);
}

TEST_F(LostWorkersTest, ReplicasAreCountedByHowTheirStreamsMayMove) {
  Start(2, {.move_streams = MoveStreams::kRounding});
  EXPECT_TRUE(
      Eventually([&] { return moves_.replicas(MoveStreams::kExact) == 2; }));
  workers_[1]->info()->set_device("cuda");
  Lose(1);
  workers_[1]->SetReachable(true);
  EXPECT_TRUE(
      Eventually([&] { return moves_.replicas(MoveStreams::kRounding) == 1; }));
  EXPECT_EQ(moves_.replicas(MoveStreams::kExact), 1u);
  EXPECT_EQ(moves_.replicas(MoveStreams::kOff), 0u);
}

// The call to the worker may fail earlier than its load reports.
TEST_F(LostWorkersTest, AStreamIsNotSentAgainBeforeTheRouterHasReconnected) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  workers_[0]->attempts()[0]->End(absl::UnavailableError("gone"));
  // This request shows that the worker still counts as ready.
  Submit(std::make_shared<RecordingSink>(), NewRequest());
  WaitForAttempt(0, 1);
  EXPECT_FALSE(sink->done());
  Lose(0);
  workers_[0]->SetReachable(true);
  EXPECT_TRUE(Eventually([&] {
    return workers_[0]->attempts().size() == 4;  // both requests
  }));
  const auto attempts = workers_[0]->attempts();
  GoOn(attempts[attempts[2]->call().emitted.empty() ? 3 : 2], sink);
}

TEST_F(LostWorkersTest, AWorkerThatComesBackWithOtherWeightsGetsNoOldStream) {
  Start(1, {.queue_timeout = absl::Seconds(1)});
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Lose(0);
  workers_[0]->info()->set_weights_id("others");
  workers_[0]->SetReachable(true);
  Submit(std::make_shared<RecordingSink>(), NewRequest());
  EXPECT_EQ(WaitForAttempt(0, 1)->call().emitted, "");
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
  EXPECT_EQ(workers_[0]->attempts().size(), 2u);
}

TEST_F(LostWorkersTest, AStreamThatNoReplicaContinuesEndsAtTheQueueTimeout) {
  Start(1, {.queue_timeout = absl::Milliseconds(20)});
  const auto sink = std::make_shared<RecordingSink>();
  CanonicalRequest request = NewRequest();
  // The stream has begun, so the client's own queue timeout no longer counts.
  request.queue_timeout = absl::Seconds(100);
  Begin(sink, std::move(request));
  absl::SleepFor(absl::Milliseconds(20));
  workers_[0]->Die();
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
}

TEST_F(LostWorkersTest, AStreamThatWaitsForAReplicaEndsAtItsDeadline) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  CanonicalRequest request = NewRequest();
  request.deadline = absl::Now() + absl::Seconds(1);
  Begin(sink, std::move(request));
  workers_[0]->Die();
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
}

TEST_F(LostWorkersTest, AStreamThatWaitsForAReplicaCanBeCancelled) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Begin(sink);
  Lose(0);
  handle->Cancel(CancelReason::kClient);
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  workers_[0]->SetReachable(true);
  EXPECT_TRUE(Eventually([&] { return router_->Health().ready; }));
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
}

TEST_F(LostWorkersTest, InADrainOnlyRequestsWithOutputWaitForAReplica) {
  Start(1);
  const auto stream = std::make_shared<RecordingSink>();
  const auto fresh = std::make_shared<RecordingSink>();
  Begin(stream);
  Lose(0);
  Submit(fresh, NewRequest());
  router_->BeginDrain();
  const absl::Status refused = fresh->Wait();
  EXPECT_EQ(proto::RefusalOf(refused)->reason(), kvasir::v1::Refusal::DRAINING);
  EXPECT_FALSE(stream->done());
  workers_[0]->SetReachable(true);
  GoOn(WaitForAttempt(0, 1), stream);
}

TEST_F(LostWorkersTest, AStreamThatWasLostDuringADrainGoesOn) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  router_->BeginDrain();
  Lose(0);
  workers_[0]->SetReachable(true);
  GoOn(WaitForAttempt(0, 1), sink);
}

// The other replica may finish its own requests, and a third may come.
TEST_F(LostWorkersTest, AStreamWaitsAlsoWhileTheOtherReplicasDrain) {
  Start(2);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  kvasir::v1::LoadReport draining;
  draining.set_draining(true);
  workers_[1]->Report(draining);
  EXPECT_TRUE(Eventually([&] {
    return registry_->replicas()[1]->state() == ReplicaState::kDraining;
  }));
  Lose(0);
  EXPECT_FALSE(sink->done());
  workers_[0]->SetReachable(true);
  GoOn(WaitForAttempt(0, 1), sink);
}

// While the stream waits, other requests take its place among the running ones.
TEST_F(LostWorkersTest, AStreamResumesAtOnceEvenAboveTheLimit) {
  Start(1, {.admission = {.max_in_flight = 1, .max_queue = 8}});
  const auto stream = std::make_shared<RecordingSink>();
  const auto other = std::make_shared<RecordingSink>();
  Begin(stream);
  Submit(other, NewRequest());  // waits in the queue
  workers_[0]->attempts()[0]->End(absl::UnavailableError("gone"));
  const auto runs = WaitForAttempt(0, 1);
  EXPECT_EQ(runs->call().emitted, "");
  // The worker comes back. The call of the second request goes on, as if its
  // connection had not been cut.
  registry_->replicas()[0]->OnInfo(*workers_[0]->info());
  workers_[0]->Report({});
  GoOn(WaitForAttempt(0, 2), stream);
  runs->Finish(kvasir::v1::FINISH_LENGTH);
  runs->End(absl::OkStatus());
  KVASIR_EXPECT_OK(other->Wait());
}

TEST_F(LostWorkersTest, TheDestructorEndsStreamsThatWaitForAReplica) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Lose(0);
  router_.reset();
  EXPECT_TRUE(sink->done());
}

class HungWorkersTest : public LostWorkersTest {
 protected:
  // Lets the worker miss its heartbeats.
  void Hang(size_t worker) {
    workers_[worker]->SetSilent(true);
    router_->CheckWorkers(proto::kMissedHeartbeats * proto::kLoadHeartbeat);
    // The other workers answer in time.
    for (size_t i = 0; i < workers_.size(); ++i) {
      if (i != worker) workers_[i]->Report(Report(0, 0));
    }
    EXPECT_TRUE(Eventually([&] {
      for (size_t i = 0; i < workers_.size(); ++i) {
        if (StateOf(i) == ReplicaState::kHung && i != worker) return false;
      }
      return StateOf(worker) == ReplicaState::kHung;
    }));
    router_->CheckWorkers(absl::ZeroDuration());
  }

  ReplicaState StateOf(size_t worker) {
    return registry_->replicas()[worker]->state();
  }

  static kvasir::v1::LoadReport Report(uint64_t step, uint32_t running) {
    kvasir::v1::LoadReport report;
    report.set_step(step);
    report.set_running(running);
    report.set_step_limit_ms(1000);
    report.set_free_pages(100);
    report.set_total_pages(100);
    return report;
  }
};

TEST_F(HungWorkersTest, StreamsOfAWorkerThatHangsGoOnAtAnother) {
  Start(2);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Hang(0);
  EXPECT_TRUE(workers_[0]->attempts()[0]->cancelled());
  GoOn(WaitForAttempt(1), sink);
}

TEST_F(HungWorkersTest, AWorkerThatHangsGetsRequestsOnlyAfterItHasReported) {
  Start(2);
  Hang(0);
  for (int i = 0; i < 4; ++i) {
    Submit(std::make_shared<RecordingSink>(), NewRequest());
  }
  EXPECT_TRUE(workers_[0]->attempts().empty());
  EXPECT_EQ(workers_[1]->attempts().size(), 4u);
  workers_[0]->Report(Report(0, 0));
  EXPECT_TRUE(Eventually([&] { return StateOf(0) == ReplicaState::kReady; }));
  EXPECT_EQ(registry_->replicas()[0]->view().max_num_seqs, 1u)
      << "it starts slowly";
  for (int i = 0; i < 2; ++i) {
    Submit(std::make_shared<RecordingSink>(), NewRequest());
  }
  WaitForAttempt(0);
}

// If all workers hang, perhaps the router's network was cut. The streams stay
// with their workers, which may come back.
TEST_F(HungWorkersTest, WhileAllWorkersHangStreamsStayWhereTheyAre) {
  Start(1);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Hang(0);
  const auto attempt = workers_[0]->attempts()[0];
  EXPECT_FALSE(attempt->cancelled());
  const auto waits = std::make_shared<RecordingSink>();
  Submit(waits, NewRequest());
  EXPECT_EQ(workers_[0]->attempts().size(), 1u);
  workers_[0]->Report(Report(1, 1));
  WaitForAttempt(0, 1);
  attempt->Tokens({9});
  attempt->Finish(kvasir::v1::FINISH_LENGTH);
  attempt->End(absl::OkStatus());
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_THAT(sink->ids(), ElementsAre(7, 8, 9));
}

TEST_F(HungWorkersTest, AStreamThatMayNotMoveStaysAtAWorkerThatHangs) {
  Start(2, {.move_streams = MoveStreams::kOff});
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  Hang(0);
  EXPECT_FALSE(workers_[0]->attempts()[0]->cancelled());
  EXPECT_FALSE(sink->done());
}

TEST_F(HungWorkersTest, ACancelledRequestOfAWorkerThatHangsDoesNotMove) {
  Start(2);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink)->Cancel(CancelReason::kClient);
  Hang(0);
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_TRUE(workers_[1]->attempts().empty());
}

TEST_F(HungWorkersTest, AWorkerWhoseEngineHangsCountsAsHungAlthoughItReports) {
  Start(2);
  const auto sink = std::make_shared<RecordingSink>();
  Begin(sink);
  workers_[0]->Report(Report(5, 1));
  EXPECT_TRUE(Eventually([&] {
    router_->CheckWorkers(absl::Milliseconds(100));
    workers_[0]->Report(Report(5, 1));
    workers_[1]->Report(Report(5, 0));
    return StateOf(0) == ReplicaState::kHung;
  }));
  EXPECT_THAT(router_->Health().detail,
              ::testing::HasSubstr("no step finishes: 1 requests run, 0 wait"));
  EXPECT_EQ(StateOf(1), ReplicaState::kReady);
  router_->CheckWorkers(absl::ZeroDuration());
  GoOn(WaitForAttempt(1), sink);
}

}  // namespace
}  // namespace kvasir::router
