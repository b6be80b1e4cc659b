// Tests kvasir.v1.Worker over a real Unix socket, with a scripted engine.
#include "worker/service/service.h"

#include <dirent.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/net/grpc_callbacks.h"
#include "base/net/grpc_status.h"
#include "base/status_matchers.h"
#include "proto/refusal.h"
#include "worker/service/server.h"
#include "worker/testing/fake_engine.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace v1 = kvasir::v1;

constexpr absl::Duration kPatience = absl::Seconds(20);

// Waits until `condition` holds and returns true, or returns false after
// kPatience.
template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + kPatience;
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
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

WorkerServerOptions TestOptions() {
  static int count = 0;
  const char* dir = std::getenv("TMPDIR");
  WorkerServerOptions options;
  options.listen.unix_path = absl::StrCat(dir == nullptr ? "/tmp" : dir,
                                          "/kvasir_w", getpid(), "_", ++count);
  options.service.info.set_api_version("kvasir.v1");
  options.service.info.set_weights_id("w1");
  options.service.info.set_max_model_len(1024);
  options.service.load_heartbeat = absl::Milliseconds(100);
  return options;
}

v1::GenerateRequest NewRequest(const std::string& id, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  request.set_prompt_token_ids(std::string("\1\0\0\0\2\0\0\0", 8));
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_n(1);
  return request;
}

class WorkerServiceTest : public ::testing::Test {
 protected:
  // Keeps gRPC running between tests, because each shutdown may take 10
  // seconds.
  static void SetUpTestSuite() { base::KeepGrpcCallbackThreads(); }
  void SetUp() override { StartServer(TestOptions()); }

  void StartServer(WorkerServerOptions options) {
    stub_.reset();
    server_.reset();
    auto started = WorkerServer::Start(std::move(options), &engine_);
    KVASIR_ASSERT_OK(started);
    server_ = *std::move(started);
    server_->SetReady(true);
    channel_ = grpc::CreateChannel(server_->target(),
                                   grpc::InsecureChannelCredentials());
    stub_ = v1::Worker::NewStub(channel_);
  }

  std::string Health(const std::string& service) {
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        channel_);
    const grpc::Slice slice(absl::StrCat(
        "\n", std::string(1, static_cast<char>(service.size())), service));
    const grpc::ByteBuffer out(&slice, 1);
    grpc::ByteBuffer in;
    grpc::ClientContext context;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &out, &in,
                   [&](grpc::Status status) { done.set_value(status); });
    if (!done.get_future().get().ok()) return "unknown";
    grpc::Slice answer;
    EXPECT_TRUE(in.DumpToSingleSlice(&answer).ok());
    return std::string(answer.begin(), answer.end()) == "\x08\x01"
               ? "serving"
               : "not serving";
  }

  FakeEngine engine_;
  std::unique_ptr<WorkerServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Worker::Stub> stub_;
};

struct Answer {
  absl::Status status;
  bool accepted_first = false;
  std::vector<int32_t> ids;
  std::vector<v1::GenerateEvent::Finish> finishes;
};

// Reads all events of a call until it ends.
Answer ReadAll(grpc::ClientReader<v1::GenerateEvent>* reader,
               const grpc::ClientContext& context) {
  Answer answer;
  v1::GenerateEvent event;
  bool first = true;
  while (reader->Read(&event)) {
    if (first) answer.accepted_first = event.has_accepted();
    first = false;
    if (event.has_finish()) answer.finishes.push_back(event.finish());
    answer.ids.insert(answer.ids.end(), event.tokens().token_ids().begin(),
                      event.tokens().token_ids().end());
  }
  answer.status = base::FromGrpcStatus(reader->Finish());
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(proto::kRefusalMetadataKey);
  if (found != trailers.end()) {
    v1::Refusal refusal;
    EXPECT_TRUE(refusal.ParseFromArray(found->second.data(),
                                       static_cast<int>(found->second.size())));
    proto::SetRefusal(refusal, &answer.status);
  }
  return answer;
}

TEST_F(WorkerServiceTest, AStreamSendsAcceptedThenTokensInOrderThenOneFinish) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 5));
  const Answer answer = ReadAll(reader.get(), context);
  KVASIR_EXPECT_OK(answer.status);
  EXPECT_TRUE(answer.accepted_first);
  EXPECT_THAT(answer.ids, ElementsAre(1000, 1001, 1002, 1003, 1004));
  ASSERT_EQ(answer.finishes.size(), 1u);
  EXPECT_EQ(answer.finishes[0].reason(), v1::FINISH_LENGTH);
  EXPECT_EQ(answer.finishes[0].output_tokens(), 5u);
  EXPECT_EQ(answer.finishes[0].prompt_tokens(), 2u);
}

// gRPC closes an aged connection right after its last call. A client that
// writes at that moment gets "Broken pipe" and loses the rest of the answer.
TEST_F(WorkerServiceTest,
       AConnectionOverAUnixSocketIsNotClosedAtTheMaximumConnectionAge) {
  WorkerServerOptions options = TestOptions();
  options.max_connection_age = absl::Milliseconds(100);
  StartServer(std::move(options));
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 300));
  const Answer answer = ReadAll(reader.get(), context);
  KVASIR_EXPECT_OK(answer.status);
  EXPECT_EQ(answer.ids.size(), 300u);
  EXPECT_EQ(channel_->GetState(false), GRPC_CHANNEL_READY);
}

TEST_F(WorkerServiceTest, TheDeadlineOfTheCallReachesTheEngine) {
  grpc::ClientContext context;
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  context.set_deadline(absl::ToChronoTime(deadline));
  auto reader = stub_->Generate(&context, NewRequest("r", 1));
  KVASIR_EXPECT_OK(ReadAll(reader.get(), context).status);
  const absl::Duration error = engine_.LastRequest()->deadline - deadline;
  EXPECT_LT(absl::AbsDuration(error), absl::Seconds(2));
}

TEST_F(WorkerServiceTest, ACallWithoutADeadlineReachesTheEngineWithoutOne) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 1));
  KVASIR_EXPECT_OK(ReadAll(reader.get(), context).status);
  EXPECT_EQ(engine_.LastRequest()->deadline, absl::InfiniteFuture());
}

TEST_F(WorkerServiceTest,
       AStreamThatTheClientResetsAfterTheFirstTokenAbortsTheRequest) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 1000000));
  v1::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(engine_.live(), 1u);
  context.TryCancel();
  EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
  EXPECT_THAT(ReadAll(reader.get(), context).status,
              StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_EQ(engine_.Totals().aborted, 1u);
}

TEST_F(WorkerServiceTest,
       AStreamThatTheClientResetsBeforeTheFirstTokenAbortsTheRequest) {
  engine_.Hold(true);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 10));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  context.TryCancel();
  EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
}

TEST_F(WorkerServiceTest,
       ACallThatReachesItsDeadlineDuringTheStreamAbortsTheRequest) {
  grpc::ClientContext context;
  context.set_deadline(
      absl::ToChronoTime(absl::Now() + absl::Milliseconds(100)));
  auto reader = stub_->Generate(&context, NewRequest("r", 1000000));
  EXPECT_THAT(ReadAll(reader.get(), context).status,
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
}

TEST_F(WorkerServiceTest,
       AnAbortByRequestIdEndsTheStreamWithTheFinishReasonAbort) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 1000000));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  for (const char* id : {"q", "r", "r"}) {
    grpc::ClientContext abort_context;
    v1::AbortRequest request;
    request.set_request_id(id);
    v1::AbortResponse response;
    EXPECT_TRUE(stub_->Abort(&abort_context, request, &response).ok());
  }
  const Answer answer = ReadAll(reader.get(), context);
  KVASIR_EXPECT_OK(answer.status);
  ASSERT_EQ(answer.finishes.size(), 1u);
  EXPECT_EQ(answer.finishes[0].reason(), v1::FINISH_ABORT);
}

TEST_F(WorkerServiceTest, TheErrorForARefusedRequestHasACodeAReasonAndADetail) {
  engine_.RefuseWith({absl::ResourceExhaustedError("queue: 64 of 64"),
                      kvasir::v1::Refusal::RETRY_ELSEWHERE});
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 1));
  const Answer answer = ReadAll(reader.get(), context);
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                      "queue: 64 of 64"));
  const auto refusal = proto::RefusalOf(answer.status);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->reason(), v1::Refusal::RETRY_ELSEWHERE);
  EXPECT_EQ(refusal->detail(), "queue: 64 of 64");
}

TEST_F(WorkerServiceTest, TheErrorForAnInvalidValueCarriesNoRefusal) {
  v1::GenerateRequest request = NewRequest("r", 1);
  request.set_prompt_token_ids("12345");
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, request);
  const Answer answer = ReadAll(reader.get(), context);
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("prompt_token_ids")));
  EXPECT_FALSE(proto::RefusalOf(answer.status).has_value());
  EXPECT_EQ(engine_.submitted(), 0u);
}

TEST_F(WorkerServiceTest,
       TheRefusalOfARequestForOtherWeightsStatesBothWeightsIdsAndAllowsARetry) {
  v1::GenerateRequest request = NewRequest("r", 1);
  request.set_weights_id("w2");
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, request);
  const absl::Status status = ReadAll(reader.get(), context).status;
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               AllOf(HasSubstr("w1"), HasSubstr("w2"))));
  ASSERT_TRUE(proto::RefusalOf(status).has_value());
  EXPECT_EQ(proto::RefusalOf(status)->reason(), v1::Refusal::RETRY_ELSEWHERE);
}

TEST_F(WorkerServiceTest, AnEngineThatFailsEndsTheStreamWithItsError) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 1000000));
  v1::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  engine_.RefuseAll({absl::UnavailableError("executor"),
                     kvasir::v1::Refusal::RETRY_ELSEWHERE});
  const Answer answer = ReadAll(reader.get(), context);
  EXPECT_THAT(answer.status,
              StatusIs(absl::StatusCode::kUnavailable, "executor"));
  EXPECT_TRUE(proto::RefusalOf(answer.status).has_value());
}

TEST_F(WorkerServiceTest,
       TheCallOfAClientThatReadsTooSlowlyIsResetAndItsPagesAreFreed) {
  WorkerServerOptions options = TestOptions();
  options.service.max_queued_bytes = 64 << 10;
  StartServer(std::move(options));
  engine_.TokensPerStep(10000);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 2000000000));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  // The client reads nothing. So gRPC's flow control window fills, then the
  // stream's queue, and the call is reset.
  EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
  const Answer answer = ReadAll(reader.get(), context);
  EXPECT_FALSE(answer.status.ok());
  EXPECT_TRUE(answer.finishes.empty());
}

TEST_F(WorkerServiceTest,
       AGenerateMessageTooLargeForTheModelsMaximumLengthIsRefused) {
  v1::GenerateRequest request = NewRequest("r", 1);
  request.set_prompt_token_ids(std::string(4 << 20, '\0'));
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, request);
  EXPECT_THAT(ReadAll(reader.get(), context).status,
              StatusIs(absl::StatusCode::kResourceExhausted, ::testing::_));
  EXPECT_EQ(engine_.submitted(), 0u);
}

TEST_F(WorkerServiceTest, GetInfoReturnsTheConfiguredInfo) {
  grpc::ClientContext context;
  v1::WorkerInfo info;
  EXPECT_TRUE(stub_->GetInfo(&context, v1::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.api_version(), "kvasir.v1");
  EXPECT_EQ(info.max_model_len(), 1024u);
}

TEST_F(WorkerServiceTest, AWatchOfTheLoadGetsAReportAtOnceAndAfterEachChange) {
  grpc::ClientContext context;
  v1::WatchLoadRequest request;
  request.set_min_interval_ms(20);
  auto watch = stub_->WatchLoad(&context, request);
  v1::LoadReport report;
  ASSERT_TRUE(watch->Read(&report));
  EXPECT_EQ(report.running(), 0u);
  EXPECT_EQ(report.total_pages(), FakeEngine::kTotalPages);
  engine_.Hold(true);
  grpc::ClientContext generate;
  auto reader = stub_->Generate(&generate, NewRequest("r", 1));
  while (report.running() == 0) ASSERT_TRUE(watch->Read(&report));
  EXPECT_EQ(report.free_pages(), FakeEngine::kTotalPages - 1);
  generate.TryCancel();
  while (report.running() == 1) ASSERT_TRUE(watch->Read(&report));
  context.TryCancel();
}

TEST_F(WorkerServiceTest,
       ADrainingWorkerReportsNotServingWhileRunningStreamsFinish) {
  EXPECT_EQ(Health("kvasir.v1.Worker"), "serving");
  EXPECT_EQ(Health(""), "serving");
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 200));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));

  DrainCounts drained;
  std::thread drain(
      [&] { drained = server_->Drain(absl::Now() + absl::Seconds(20)); });
  ASSERT_TRUE(Eventually([&] { return engine_.draining(); }));
  EXPECT_EQ(Health("kvasir.v1.Worker"), "not serving");
  EXPECT_EQ(Health(""), "not serving");

  grpc::ClientContext late_context;
  auto late = stub_->Generate(&late_context, NewRequest("late", 1));
  const Answer refused = ReadAll(late.get(), late_context);
  EXPECT_EQ(proto::RefusalOf(refused.status)->reason(), v1::Refusal::DRAINING);

  const Answer answer = ReadAll(reader.get(), context);
  KVASIR_EXPECT_OK(answer.status);
  EXPECT_EQ(answer.ids.size(), 200u);
  drain.join();
  EXPECT_EQ(drained.finished, 1u);
  EXPECT_EQ(drained.aborted, 0u);
  server_->SetReady(true);
  EXPECT_EQ(Health(""), "not serving") << "a drain is final";
}

// Only a worker's operator may drain it, by a signal or by the admin port. With
// a method Drain, a stray call would leave a worker that refuses every request
// but does not exit.
TEST_F(WorkerServiceTest, TheWorkerServiceHasNoMethodThatDrainsTheWorker) {
  const auto* const service =
      v1::WorkerInfo::descriptor()->file()->FindServiceByName("Worker");
  ASSERT_NE(service, nullptr);
  EXPECT_EQ(service->FindMethodByName("Drain"), nullptr);
}

TEST_F(WorkerServiceTest, RequestsThatStillRunAtTheDeadlineOfADrainAreRefused) {
  engine_.Hold(true);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 10));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  const DrainCounts drained =
      server_->Drain(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(drained.aborted, 1u);
  const Answer answer = ReadAll(reader.get(), context);
  EXPECT_TRUE(answer.finishes.empty()) << "nothing that looks complete";
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kUnavailable,
                                      HasSubstr("drain's deadline")));
  const auto refusal = proto::RefusalOf(answer.status);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->reason(), v1::Refusal::DRAINING);
  // A second drain returns at once, because no request is left.
  EXPECT_EQ(server_->Drain(absl::InfiniteFuture()).aborted, 0u);
}

TEST_F(WorkerServiceTest, ShutdownEndsLoadWatchesAndGenerateStreams) {
  engine_.Hold(true);
  grpc::ClientContext watch_context;
  auto watch = stub_->WatchLoad(&watch_context, v1::WatchLoadRequest());
  v1::LoadReport report;
  ASSERT_TRUE(watch->Read(&report));
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 10));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  std::thread shutdown([&] { server_->Shutdown(absl::Now()); });
  while (watch->Read(&report)) {
  }
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(ReadAll(reader.get(), context).status.ok());
  shutdown.join();
  EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
}

TEST_F(WorkerServiceTest, ShutdownDuringADrainDoesNotWaitForTheDrainsDeadline) {
  engine_.Hold(true);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, NewRequest("r", 10));
  ASSERT_TRUE(Eventually([&] { return engine_.live() == 1; }));
  std::thread drain([&] { server_->Drain(absl::Now() + absl::Hours(1)); });
  ASSERT_TRUE(Eventually([&] { return engine_.draining(); }));
  const absl::Time start = absl::Now();
  server_->Shutdown(absl::Now());
  EXPECT_LT(absl::Now() - start, kPatience);
  drain.join();
  EXPECT_EQ(server_->Drain(absl::InfiniteFuture()).finished, 0u);
}

TEST_F(WorkerServiceTest, StartFailsIfAnotherServerListensOnTheAddress) {
  WorkerServerOptions options = TestOptions();
  options.listen.unix_path.clear();
  StartServer(options);
  options.listen.port = server_->port();
  EXPECT_THAT(
      WorkerServer::Start(options, &engine_),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(server_->target()), HasSubstr("--port"))));
}

// Makes Generate calls one after the other. At random, reads a call to its end
// or cancels it.
void Caller(v1::Worker::Stub* stub, uint32_t seed, int rounds,
            std::atomic<int>* completed) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    grpc::ClientContext context;
    const auto fate = static_cast<uint32_t>(random()) % 4;
    const auto length = static_cast<uint32_t>(random()) % 30;
    if (fate == 1) {
      context.set_deadline(
          absl::ToChronoTime(absl::Now() + absl::Milliseconds(length)));
    }
    auto reader = stub->Generate(
        &context, NewRequest(absl::StrCat(seed, ".", round), 1 + length));
    if (fate == 2) context.TryCancel();
    v1::GenerateEvent event;
    for (uint32_t read = 0; reader->Read(&event); ++read) {
      if (fate == 3 && read == length / 2) context.TryCancel();
    }
    if (reader->Finish().ok()) ++*completed;
  }
}

TEST_F(WorkerServiceTest, NoRequestIsLeftAfterManyCallsWereCancelledAtRandom) {
  constexpr int kCallers = 200;
  constexpr int kRounds = 3;
  std::atomic<int> completed{0};
  const auto storm = [&](uint32_t first_seed) {
    std::vector<std::thread> callers;
    for (uint32_t i = 0; i < kCallers; ++i) {
      callers.emplace_back(Caller, stub_.get(), first_seed + i, kRounds,
                           &completed);
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_TRUE(Eventually([&] { return engine_.live() == 0; }));
  };
  storm(1);
  const size_t threads = CountEntries("/proc/self/task");
  const size_t descriptors = CountEntries("/proc/self/fd");
  storm(1001);
  EXPECT_GT(completed.load(), kCallers / 4);
  EXPECT_TRUE(Eventually(
      [&] { return CountEntries("/proc/self/task") <= threads + 2; }));
  EXPECT_LE(CountEntries("/proc/self/fd"), descriptors);
}

}  // namespace
}  // namespace kvasir::worker
