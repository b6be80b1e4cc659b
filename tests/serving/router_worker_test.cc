// Tests a router and workers that communicate by real gRPC on Unix sockets.
// Only the engines of the workers are fakes.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "proto/refusal.h"
#include "router/core/request_router.h"
#include "router/replicas/grpc_worker_client.h"
#include "router/testing/recording_sink.h"
#include "worker/service/server.h"
#include "worker/testing/fake_engine.h"

namespace kvasir {
namespace {

using base::StatusIs;
using router::CancelReason;
using router::CanonicalRequest;
using router::RecordingSink;
using router::RequestHandle;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using worker::FakeEngine;

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Microseconds(200));
  }
  return true;
}

size_t CountEntries(const char* directory) {
  DIR* dir = opendir(directory);
  size_t count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

std::string NewSocketPath() {
  static int count = 0;
  const char* dir = std::getenv("TMPDIR");
  return absl::StrCat(dir == nullptr ? "/tmp" : dir, "/kvasir_rw", getpid(),
                      "_", ++count);
}

// All parts of a worker process, with a fake engine.
struct TestWorker {
  TestWorker() {
    options.listen.unix_path = NewSocketPath();
    kvasir::v1::WorkerInfo& info = options.service.info;
    info.set_api_version("kvasir.v1");
    info.set_model_name("tiny");
    info.set_weights_id("w1");
    info.set_max_model_len(100000);
    info.set_max_num_seqs(256);
    info.set_page_tokens(64);
  }
  absl::Status Start() {
    KVASIR_ASSIGN_OR_RETURN(server,
                            worker::WorkerServer::Start(options, &engine));
    return absl::OkStatus();
  }
  std::string target() const {
    return absl::StrCat("unix:", options.listen.unix_path);
  }

  FakeEngine engine;
  worker::WorkerServerOptions options;
  std::unique_ptr<worker::WorkerServer> server;
};

class RouterWorkerTest : public ::testing::Test {
 protected:
  absl::Status Start(size_t num_workers) {
    while (workers_.size() < num_workers) {
      workers_.push_back(std::make_unique<TestWorker>());
    }
    router::ReplicaRegistryOptions options;
    for (const auto& worker : workers_) {
      KVASIR_RETURN_IF_ERROR(worker->Start());
      options.workers.push_back({worker->target()});
    }
    registry_ = std::make_unique<router::ReplicaRegistry>(
        options,
        [this](const router::WorkerAddress& worker) {
          return router::NewGrpcWorkerClient(worker, client_options_);
        },
        &timers_, nullptr);
    KVASIR_RETURN_IF_ERROR(registry_->Start(absl::Seconds(20)));
    router_ = std::make_unique<router::RouterCore>(
        router_options_,
        router::RouterCore::Parts{registry_.get(), &timers_, nullptr, nullptr});
    return absl::OkStatus();
  }

  static CanonicalRequest NewRequest(uint32_t max_tokens) {
    CanonicalRequest request;
    request.model = "tiny";
    request.prompt = router::TokenBytes::FromIds({1, 2, 70000});
    request.sampling = router::NeutralSampling();
    request.sampling.set_max_tokens(max_tokens);
    return request;
  }

  std::shared_ptr<RequestHandle> Submit(
      const std::shared_ptr<RecordingSink>& sink, CanonicalRequest request) {
    auto handle = router_->Submit(std::move(request), sink);
    KVASIR_EXPECT_OK(handle);
    return handle.ok() ? *handle : nullptr;
  }

  size_t Live() const {
    size_t live = 0;
    for (const auto& worker : workers_) live += worker->engine.live();
    return live;
  }

  router::GrpcWorkerClientOptions client_options_;
  router::RouterCoreOptions router_options_;
  std::vector<std::unique_ptr<TestWorker>> workers_;
  router::TimerThread timers_;
  std::unique_ptr<router::ReplicaRegistry> registry_;
  std::unique_ptr<router::RouterCore> router_;
};

TEST_F(RouterWorkerTest, TheWorkerReceivesTheWholeRequestAndItsTokensComeBack) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest(4);
  request.tenant = "tenant";
  request.cache_salt = std::string("s\0t", 3);
  request.priority = 3;
  request.seed = 77;
  request.deadline = absl::Now() + absl::Seconds(60);
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink, request);
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(sink->accepted(), 1);
  EXPECT_THAT(sink->ids(), ElementsAre(1000, 1001, 1002, 1003));
  ASSERT_EQ(sink->finishes().size(), 1u);
  EXPECT_EQ(sink->finishes()[0].reason(), v1::FINISH_LENGTH);
  const worker::Request arrived = *workers_[0]->engine.LastRequest();
  EXPECT_EQ(arrived.request_id, handle->id());
  EXPECT_THAT(arrived.prompt.ToIds(), ElementsAre(1, 2, 70000));
  EXPECT_TRUE(arrived.emitted.empty());
  EXPECT_EQ(arrived.tenant, "tenant");
  EXPECT_EQ(arrived.cache_salt, std::string("s\0t", 3));
  EXPECT_EQ(arrived.priority, 3);
  EXPECT_EQ(arrived.sampling.seed(), 77u);
  EXPECT_LT(absl::AbsDuration(arrived.deadline - request.deadline),
            absl::Seconds(2));
}

TEST_F(RouterWorkerTest, APromptOfTheLargestAllowedLengthReachesTheWorker) {
  KVASIR_ASSERT_OK(Start(1));
  std::vector<int32_t> ids(99998);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7);
  CanonicalRequest request = NewRequest(1);
  request.prompt = router::TokenBytes::FromIds(ids);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, request);
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(workers_[0]->engine.LastRequest()->prompt.ToIds(), ids);
}

TEST_F(RouterWorkerTest, ACancelEndsTheRequestInTheEngine) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  const auto handle = Submit(sink, NewRequest(1000000));
  ASSERT_TRUE(Eventually([&] { return !sink->ids().empty(); }));
  handle->Cancel(CancelReason::kClient);
  ASSERT_TRUE(Eventually([&] { return Live() == 0; }));
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_LT(sink->ids().size(), 1000000u);
  EXPECT_EQ(workers_[0]->engine.Totals().aborted, 1u);
  EXPECT_EQ(workers_[0]->engine.Totals().finished, 0u);
}

TEST_F(RouterWorkerTest, TheDeadlineEndsTheRequestAtTheRouterAndTheWorker) {
  KVASIR_ASSERT_OK(Start(1));
  CanonicalRequest request = NewRequest(1000000);
  request.deadline = absl::Now() + absl::Milliseconds(100);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, request);
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  EXPECT_TRUE(Eventually([&] { return Live() == 0; }));
}

// Regression test: gRPC ends its callback threads when the last channel is
// destroyed. If a callback thread destroys it, gRPC frees the threads' queue
// twice, unless KeepGrpcCallbackThreads was called.
TEST(GrpcWorkerClientTest,
     TheLastGrpcChannelMayBeDestroyedOnAGrpcCallbackThread) {
  for (int round = 0; round < 20; ++round) {
    TestWorker worker;
    KVASIR_ASSERT_OK(worker.Start());
    absl::Notification answered;
    auto client = router::NewGrpcWorkerClient({worker.target()}, {});
    client->GetInfo(absl::Seconds(20), [&](const auto& info) {
      KVASIR_EXPECT_OK(info.status());
      worker.server.reset();
      client.reset();
      answered.Notify();
    });
    answered.WaitForNotification();
  }
}

TEST_F(RouterWorkerTest, ARequestRefusedByAFullWorkerGoesToAnother) {
  router_options_.picker.policy = router::PolicyKind::kRoundRobin;
  KVASIR_ASSERT_OK(Start(2));
  workers_[0]->engine.RefuseWith({absl::ResourceExhaustedError("queue full"),
                                  kvasir::v1::Refusal::RETRY_ELSEWHERE});
  for (int i = 0; i < 4; ++i) {
    const auto sink = std::make_shared<RecordingSink>();
    Submit(sink, NewRequest(1));
    KVASIR_EXPECT_OK(sink->Wait());
  }
  EXPECT_EQ(workers_[1]->engine.submitted(), 4u);
}

TEST_F(RouterWorkerTest, ARequestThatFitsNoWorkerIsRefusedWithoutARetry) {
  KVASIR_ASSERT_OK(Start(2));
  for (const auto& worker : workers_) {
    worker->engine.RefuseWith({absl::InvalidArgumentError("900 pages of 64"),
                               kvasir::v1::Refusal::NEVER_FITS});
  }
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, NewRequest(1));
  const absl::Status status = sink->Wait();
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kInvalidArgument, "900 pages of 64"));
  EXPECT_EQ(proto::RefusalOf(status)->reason(), v1::Refusal::NEVER_FITS);
}

TEST_F(RouterWorkerTest, AWorkerThatDiesMidStreamIsUnavailableUntilItRestarts) {
  KVASIR_ASSERT_OK(Start(1));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, NewRequest(1000000));
  ASSERT_TRUE(Eventually([&] { return !sink->ids().empty(); }));
  workers_[0]->server.reset();
  EXPECT_THAT(sink->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  EXPECT_TRUE(Eventually([&] { return !router_->Health().ready; }));
  // This request waits until the worker is back.
  const auto again = std::make_shared<RecordingSink>();
  Submit(again, NewRequest(1));
  KVASIR_ASSERT_OK(workers_[0]->Start());
  KVASIR_EXPECT_OK(again->Wait());
}

// A client that does not stream receives the whole output in one message at the
// end. So if the worker is lost, another worker can continue the answer.
TEST_F(RouterWorkerTest,
       AnAnswerThatIsNotStreamedContinuesOnAnotherWorkerWithoutRepeatedTokens) {
  KVASIR_ASSERT_OK(Start(2));
  const auto sink = std::make_shared<RecordingSink>();
  CanonicalRequest request = NewRequest(2000);
  request.folded = true;
  Submit(sink, std::move(request));
  ASSERT_TRUE(Eventually([&] { return !sink->ids().empty(); }));
  const size_t busy = workers_[0]->engine.submitted() == 1 ? 0 : 1;
  workers_[busy]->engine.Hold(true);
  const size_t before = sink->ids().size();
  ASSERT_LT(before, 2000u);
  workers_[busy]->server.reset();
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(workers_[1 - busy]->engine.submitted(), 1u);
  const std::vector<int32_t> ids = sink->ids();
  ASSERT_EQ(ids.size(), 2000u);
  for (size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(ids[i], 1000 + static_cast<int32_t>(i));
  }
}

TEST_F(RouterWorkerTest, ADrainingWorkerFinishesItsRequestsAndGetsNoNewOnes) {
  KVASIR_ASSERT_OK(Start(2));
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, NewRequest(300));
  ASSERT_TRUE(Eventually([&] { return Live() == 1; }));
  const size_t busy = workers_[0]->engine.live() == 1 ? 0 : 1;
  std::thread drain(
      [&] { workers_[busy]->server->Drain(absl::Now() + absl::Seconds(20)); });
  ASSERT_TRUE(Eventually([&] {
    return registry_->replicas()[busy]->state() ==
           router::ReplicaState::kDraining;
  }));
  const uint64_t before = workers_[busy]->engine.submitted();
  for (int i = 0; i < 4; ++i) {
    const auto next = std::make_shared<RecordingSink>();
    Submit(next, NewRequest(1));
    KVASIR_EXPECT_OK(next->Wait());
  }
  EXPECT_EQ(workers_[busy]->engine.submitted(), before);
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_EQ(sink->ids().size(), 300u);
  drain.join();
}

TEST_F(RouterWorkerTest,
       DuringADrainARequestThatHasNoTokensYetMovesToAnotherWorker) {
  KVASIR_ASSERT_OK(Start(2));
  for (const auto& worker : workers_) worker->engine.Hold(true);
  const auto sink = std::make_shared<RecordingSink>();
  Submit(sink, NewRequest(3));
  ASSERT_TRUE(Eventually([&] { return Live() == 1; }));
  const size_t busy = workers_[0]->engine.live() == 1 ? 0 : 1;
  workers_[1 - busy]->engine.Hold(false);
  workers_[busy]->server->Drain(absl::Now() + absl::Milliseconds(20));
  KVASIR_EXPECT_OK(sink->Wait());
  EXPECT_THAT(sink->ids(), ElementsAre(1000, 1001, 1002));
  ASSERT_EQ(sink->finishes().size(), 1u);
  EXPECT_EQ(sink->finishes()[0].reason(), kvasir::v1::FINISH_LENGTH);
}

TEST_F(RouterWorkerTest,
       TheRouterRefusesToStartWithAWorkerOfAnotherApiVersion) {
  workers_.push_back(std::make_unique<TestWorker>());
  workers_[0]->options.service.info.set_api_version("kvasir.v2");
  EXPECT_THAT(Start(1),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(workers_[0]->target()),
                             HasSubstr("kvasir.v2"), HasSubstr("kvasir.v1"))));
}

TEST_F(RouterWorkerTest,
       AConnectionWithoutMessagesIsNotClosedBecauseOfKeepalivePings) {
  // These times are shorter than the defaults. gRPC pings at most once a
  // second, and the worker tolerates two pings that come too early.
  client_options_.keepalive_time = absl::Seconds(1);
  client_options_.keepalive_timeout = absl::Seconds(2);
  workers_.push_back(std::make_unique<TestWorker>());
  workers_[0]->options.min_ping_interval = absl::Milliseconds(800);
  KVASIR_ASSERT_OK(Start(1));
  workers_[0]->engine.Hold(true);
  // Two requests, so that each of the client's two connections has one.
  const auto first = std::make_shared<RecordingSink>();
  const auto second = std::make_shared<RecordingSink>();
  Submit(first, NewRequest(1));
  Submit(second, NewRequest(1));
  absl::SleepFor(absl::Seconds(5));
  EXPECT_FALSE(first->done());
  EXPECT_FALSE(second->done());
  workers_[0]->engine.Hold(false);
  KVASIR_EXPECT_OK(first->Wait());
  KVASIR_EXPECT_OK(second->Wait());
}

// A peer that accepts HTTP/2 connections and then answers nothing, not even
// pings, like a process that gets no CPU time.
class MutePeer {
 public:
  MutePeer() : path_(NewSocketPath()), thread_([this] { Serve(); }) {}
  ~MutePeer() {
    shutdown(listening_, SHUT_RDWR);
    thread_.join();
    close(listening_);
    unlink(path_.c_str());
  }
  std::string target() const { return absl::StrCat("unix:", path_); }

 private:
  static int Listen(const std::string& path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    const int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(
        bind(listening, reinterpret_cast<sockaddr*>(&address), sizeof address),
        0);
    EXPECT_EQ(listen(listening, 8), 0);
    return listening;
  }
  void Serve() {
    // Two HTTP/2 frames: SETTINGS and its acknowledgement. A frame begins with
    // its length (24 bits), type, flags and stream number.
    constexpr char kOpening[] = "\0\0\0\4\0\0\0\0\0\0\0\0\4\1\0\0\0\0";
    std::vector<int> connections;
    for (int next = 0; (next = accept(listening_, nullptr, nullptr)) >= 0;) {
      connections.push_back(next);
      EXPECT_EQ(send(next, kOpening, 18, MSG_NOSIGNAL), 18);
    }
    for (const int connection : connections) close(connection);
  }

  const std::string path_;
  const int listening_ = Listen(path_);
  std::thread thread_;
};

struct WatchEnd final : router::LoadSink {
  void OnReport(const kvasir::v1::LoadReport&) override {}
  void OnWatchEnded(const absl::Status& why) override {
    status = why;
    ended.Notify();
  }
  absl::Status status;
  absl::Notification ended;
};

TEST(GrpcWorkerClientTest,
     OnlyAClientWithKeepalivePingsGivesUpOnAServerThatNeverAnswers) {
  MutePeer peer;
  router::GrpcWorkerClientOptions options;
  options.keepalive_time = absl::Seconds(1);
  options.keepalive_timeout = absl::Milliseconds(200);
  const auto pings = router::NewGrpcWorkerClient({peer.target()}, options);
  options.keepalive_time = absl::InfiniteDuration();
  const auto waits = router::NewGrpcWorkerClient({peer.target()}, options);
  const auto given_up = std::make_shared<WatchEnd>();
  const auto waited = std::make_shared<WatchEnd>();
  waits->WatchLoad(absl::ZeroDuration(), waited);
  pings->WatchLoad(absl::ZeroDuration(), given_up);
  ASSERT_TRUE(
      given_up->ended.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_THAT(given_up->status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("keepalive")));
  EXPECT_FALSE(
      waited->ended.WaitForNotificationWithTimeout(absl::Milliseconds(300)));
  waits->Close();
  waited->ended.WaitForNotification();
}

TEST_F(RouterWorkerTest, TheLeastLoadedPolicySpreadsABurstOverTheWorkers) {
  KVASIR_ASSERT_OK(Start(2));
  for (const auto& worker : workers_) worker->engine.Hold(true);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 64; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    Submit(sinks.back(), NewRequest(1));
  }
  ASSERT_TRUE(Eventually([&] { return Live() == 64; }));
  EXPECT_NEAR(static_cast<double>(workers_[0]->engine.live()), 32.0, 8.0);
  for (const auto& worker : workers_) worker->engine.Hold(false);
  for (const auto& sink : sinks) KVASIR_EXPECT_OK(sink->Wait());
}

TEST_F(RouterWorkerTest, TwoHundredStreamsWithCancelsLeaveNoRequestsOrThreads) {
  constexpr uint32_t kStreams = 200;
  KVASIR_ASSERT_OK(Start(2));
  std::atomic<int> complete{0};
  const auto storm = [&](uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    std::vector<std::shared_ptr<RequestHandle>> handles;
    for (uint32_t i = 0; i < kStreams; ++i) {
      const auto length = static_cast<uint32_t>(random()) % 40;
      CanonicalRequest request = NewRequest(1 + length);
      if (random() % 4 == 0) {
        request.deadline = absl::Now() + absl::Milliseconds(1 + length);
      }
      sinks.push_back(std::make_shared<RecordingSink>());
      auto handle = router_->Submit(std::move(request), sinks.back());
      if (!handle.ok()) {
        sinks.pop_back();
        continue;
      }
      handles.push_back(*handle);
      if (random() % 4 == 0) handles.back()->Cancel(CancelReason::kClient);
      if (random() % 4 == 0) {
        handles[random() % handles.size()]->Cancel(CancelReason::kClient);
      }
    }
    for (const auto& sink : sinks) {
      const absl::Status status = sink->Wait();
      EXPECT_FALSE(absl::IsUnknown(status)) << status;
      complete += status.ok();
    }
    EXPECT_TRUE(router_->WaitIdle(absl::Now() + absl::Seconds(20)));
    EXPECT_TRUE(Eventually([&] { return Live() == 0; }));
  };
  storm(1);
  const size_t threads = CountEntries("/proc/self/task");
  const size_t descriptors = CountEntries("/proc/self/fd");
  for (uint32_t seed = 2; seed < 6; ++seed) storm(seed);
  EXPECT_GT(complete.load(), 100);
  // gRPC's executor may start further threads, up to twice the number of cores.
  EXPECT_TRUE(Eventually([&] {
    return CountEntries("/proc/self/task") <=
           threads + 2 * std::thread::hardware_concurrency();
  }));
  EXPECT_LE(CountEntries("/proc/self/fd"), descriptors);
  for (const auto& replica : registry_->replicas()) {
    EXPECT_EQ(replica->in_flight(), 0u);
  }
}

}  // namespace
}  // namespace kvasir
