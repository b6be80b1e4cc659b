// Tests leader and followers that are connected by gRPC on this machine.
#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/testing/certificates.h"
#include "base/net/tls.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/kvasir/v1/rank.grpc.pb.h"
#include "worker/ranks/group/group_executor.h"
#include "worker/ranks/group/rank_bytes.h"
#include "worker/ranks/group/rank_client.h"
#include "worker/ranks/group/rank_follower.h"
#include "worker/ranks/group/rank_leader.h"
#include "worker/ranks/group/rank_server.h"
#include "worker/ranks/group/testing/fake_rank.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kvasir::v1::RankRefusal;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSecret[] = "a secret of tests";

// The parts of a leader's process: the leader and its gRPC server.
struct LeaderSide {
  static absl::StatusOr<std::unique_ptr<LeaderSide>> Start(
      uint32_t size, RankServerOptions options = {.secret = kSecret},
      absl::Duration heartbeat = kLong) {
    auto side = std::make_unique<LeaderSide>();
    RankLeaderOptions leader;
    leader.group.identity = TestIdentity(size, heartbeat);
    leader.group.combine = TestCombine;
    leader.group.collective_address = "at 0";
    leader.on_end = [raw = side.get()](const absl::Status&) {
      raw->ended.Set();
    };
    side->leader = std::make_unique<RankLeader>(std::move(leader));
    KVASIR_ASSIGN_OR_RETURN(side->server,
                            RankServer::Start(options, side->leader.get()));
    return side;
  }
  ~LeaderSide() { leader->Abort(absl::CancelledError("the test is over")); }

  absl::StatusOr<kvasir::v1::RankStart> WaitStarted() {
    KVASIR_RETURN_IF_ERROR(leader->WaitJoined().status());
    return leader->WaitStarted(TestReady(10));
  }

  std::unique_ptr<RankLeader> leader;
  std::unique_ptr<RankServer> server;
  FakeRank rank;
  Event ended;
};

// The parts of a follower's process: the client and the follower, whose steps
// run on a thread.
struct FollowerSide {
  static absl::StatusOr<std::unique_ptr<FollowerSide>> Join(
      uint32_t rank, uint32_t size, const RankClientOptions& dial,
      absl::Duration heartbeat = kLong, FakeRank::Hook hook = {}) {
    auto side = std::make_unique<FollowerSide>();
    KVASIR_ASSIGN_OR_RETURN(side->client, RankClient::Dial(dial));
    RankFollowerOptions options;
    *options.hello.mutable_identity() = TestIdentity(size, heartbeat);
    options.hello.set_rank(rank);
    options.hello.set_host("node");
    options.hello.set_collective_address(absl::StrCat("at ", rank));
    options.on_end = [raw = side.get()](const absl::Status&) {
      raw->ended.Set();
    };
    side->follower = std::make_unique<RankFollower>(std::move(options));
    side->executor = std::make_unique<FakeRank>(std::move(hook));
    side->client->Join(side->follower.get());
    side->thread = std::thread([raw = side.get()] { raw->Run(); });
    return side;
  }
  ~FollowerSide() {
    if (follower != nullptr) {
      follower->Abort(absl::CancelledError("the test is over"));
    }
    if (thread.joinable()) thread.join();
    client.reset();
  }

  void Run() {
    status = [&]() -> absl::Status {
      KVASIR_ASSIGN_OR_RETURN(addresses, follower->WaitWelcome());
      KVASIR_RETURN_IF_ERROR(follower->WaitStarted(TestReady(9)).status());
      return RunSteps(follower.get(), executor.get());
    }();
    done.Set();
  }
  // Waits until the follower's thread has ended and returns its status.
  absl::Status Ended() {
    EXPECT_TRUE(done.Wait());
    return status;
  }

  std::unique_ptr<RankFollower> follower;
  std::unique_ptr<FakeRank> executor;
  std::unique_ptr<RankClient> client;
  std::vector<std::string> addresses;
  absl::Status status;
  Event done;
  Event ended;
  std::thread thread;
};

RankClientOptions DialOf(const LeaderSide& leader) {
  return {.leader = leader.server->target(),
          .secret = kSecret,
          .connect_timeout = absl::Seconds(20)};
}

TEST(RankGrpcTest, AGroupRunsStepsOnAllRanksUntilItIsDrained) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(3));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto two,
                              FollowerSide::Join(2, 3, DialOf(*leader)));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 3, DialOf(*leader)));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto start, leader->WaitStarted());
  EXPECT_THAT(start.pages(), ElementsAre(9));
  EXPECT_THAT(one->addresses, ElementsAre("at 0", "at 1", "at 2"));
  GroupExecutor executor(leader->leader.get(), &leader->rank);
  for (uint64_t step = 1; step <= 200; ++step) {
    kvasir::v1::StepPlan plan = TestPlan(step);
    // The plan of step 100 is larger than an HTTP/2 flow control window.
    const int tokens = step == 100 ? 1 << 20 : 10;
    auto* ids = plan.add_sequences()->mutable_token_ids();
    for (int i = 0; i < tokens; ++i) ids->Add(i);
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto result, executor.Execute(plan));
    ASSERT_EQ(result.step_id(), step);
  }
  EXPECT_EQ(two->executor->steps(), 200);
  KVASIR_EXPECT_OK(leader->leader->Drain());
  KVASIR_EXPECT_OK(one->Ended());
  KVASIR_EXPECT_OK(two->Ended());
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto late,
                              FollowerSide::Join(1, 3, DialOf(*leader)));
  EXPECT_THAT(late->Ended(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "the leader refuses this rank: TOO_LATE: the group has "
                       "ended: it was drained"));
}

TEST(RankGrpcTest, ACallWithoutTheRightSecretIsRefused) {
  ::testing::internal::CaptureStderr();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  for (const char* shown :
       {"", "a secret", "A secret of tests", "a secret of tests!"}) {
    RankClientOptions dial = DialOf(*leader);
    dial.secret = shown;
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto stranger,
                                FollowerSide::Join(1, 2, dial));
    EXPECT_THAT(stranger->Ended(),
                StatusIs(absl::StatusCode::kUnauthenticated,
                         AllOf(HasSubstr("the leader refuses this rank: the "
                                         "call shows neither"),
                               Not(HasSubstr("secret of")))));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t line = log.find("a caller at ipv4:127.0.0.1:");
  EXPECT_NE(line, std::string::npos) << log;
  EXPECT_EQ(log.find("a caller", line + 1), std::string::npos) << log;
  EXPECT_THAT(log, Not(HasSubstr("ecret of tests")));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  KVASIR_EXPECT_OK(leader->WaitStarted().status());
}

TEST(RankGrpcTest,
     EveryCallIsRefusedIfTheLeaderHasNeitherASecretNorCertificates) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader,
                              LeaderSide::Start(2, RankServerOptions{}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  EXPECT_THAT(one->Ended(), StatusIs(absl::StatusCode::kUnauthenticated,
                                     HasSubstr("the call shows neither")));
}

TEST(RankGrpcTest, AFollowerThatHasACertificateMayJoinWithoutTheSecret) {
  const base::TempFolder folder;
  const base::TestCertificate authority = base::MakeAuthority("ranks");
  const auto pair = [&](const std::string& name) {
    const base::TestCertificate made = base::MakeCertificate(
        authority, {.names = {"DNS:localhost", "IP:127.0.0.1"}});
    return base::TlsFiles{
        .certificate = folder.Write(name + ".pem", made.certificate),
        .key = folder.Write(name + ".key", made.key)};
  };
  const std::string ca = folder.Write("ca.pem", authority.certificate);
  base::TlsWatch watch({.refresh = absl::InfiniteDuration()});
  base::TlsOptions server{.files = pair("leader")};
  server.files.authorities = ca;
  RankServerOptions options;
  KVASIR_ASSERT_OK_AND_ASSIGN(options.credentials, watch.Server(server));
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader,
                                LeaderSide::Start(2, options));
    RankClientOptions dial{.leader = leader->server->target()};
    base::TlsOptions client{.files = pair("follower")};
    client.files.authorities = ca;
    KVASIR_ASSERT_OK_AND_ASSIGN(dial.credentials, watch.Channel(client));
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto one, FollowerSide::Join(1, 2, dial));
    KVASIR_EXPECT_OK(leader->WaitStarted().status());
  }
  // With TLS but without client certificates, a follower must send the secret.
  server.files.authorities = "";
  KVASIR_ASSERT_OK_AND_ASSIGN(options.credentials, watch.Server(server));
  for (const bool secret : {false, true}) {
    options.secret = secret ? kSecret : "";
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader,
                                LeaderSide::Start(2, options));
    RankClientOptions dial = DialOf(*leader);
    base::TlsOptions client;
    client.files.authorities = ca;
    KVASIR_ASSERT_OK_AND_ASSIGN(dial.credentials, watch.Channel(client));
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto one, FollowerSide::Join(1, 2, dial));
    if (secret) {
      KVASIR_EXPECT_OK(leader->WaitStarted().status());
    } else {
      EXPECT_THAT(one->Ended(), StatusIs(absl::StatusCode::kUnauthenticated,
                                         HasSubstr("the call shows neither")));
    }
  }
}

// ---------------------------------------------------------------------------
// Messages that no follower sends
// ---------------------------------------------------------------------------

// A Join call that sends given bytes. It records the messages that it receives
// and the status with which it ends.
class RawCall final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  RawCall(const std::string& target, std::vector<std::string> messages,
          const std::string& method = "/kvasir.v1.Rank/Join")
      : stub_(NewChannel(target)), messages_(std::move(messages)) {
    context_.AddMetadata(kRankAuthorizationKey, RankAuthorization(kSecret));
    context_.set_deadline(absl::ToChronoTime(absl::Now() + kLong));
    stub_.PrepareBidiStreamingCall(&context_, method, {}, this);
    StartRead(&response_);
    Write();
    StartCall();
  }
  grpc::Status Wait() { return done_.get_future().get(); }
  const std::vector<kvasir::v1::LeaderMessage>& received() const {
    return received_;
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    received_.emplace_back();
    EXPECT_TRUE(received_.back().ParseFromString(BytesOf(response_)));
    StartRead(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) Write();
  }
  void OnDone(const grpc::Status& status) override { done_.set_value(status); }

 private:
  static std::shared_ptr<grpc::Channel> NewChannel(const std::string& target) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  // After the last message the call stays open.
  void Write() {
    if (written_ == messages_.size()) return;
    request_ =
        BufferOf(std::make_shared<const std::string>(messages_[written_++]));
    StartWrite(&request_);
  }

  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  const std::vector<std::string> messages_;
  size_t written_ = 0;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  std::vector<kvasir::v1::LeaderMessage> received_;
  std::promise<grpc::Status> done_;
};

std::string HelloBytes(uint32_t rank, absl::Duration heartbeat = kLong) {
  kvasir::v1::FollowerMessage message;
  *message.mutable_hello()->mutable_identity() = TestIdentity(2, heartbeat);
  message.mutable_hello()->set_rank(rank);
  return message.SerializeAsString();
}

std::string ReadyBytes(const std::string& tiles) {
  kvasir::v1::FollowerMessage message;
  *message.mutable_ready() = TestReady(9, tiles);
  return message.SerializeAsString();
}

// Sends raw bytes to the port over TCP, without gRPC. Returns when the other
// side closes the connection.
void SendToPort(int port, const std::string& bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address),
            0);
  ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  shutdown(fd, SHUT_WR);
  char buffer[256];
  while (recv(fd, buffer, sizeof buffer, 0) > 0) {
  }
  close(fd);
}

TEST(RankGrpcTest, AFollowerCanJoinAfterInvalidCallsOfOtherClientsWereRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  const std::string& target = leader->server->target();
  struct Case {
    std::vector<std::string> messages;
    grpc::StatusCode code;
    std::string text;
  };
  for (const Case& each : std::vector<Case>{
           {{"\xff\xff\xff"},
            grpc::StatusCode::INVALID_ARGUMENT,
            "3 bytes that are not a FollowerMessage"},
           {{""},
            grpc::StatusCode::INVALID_ARGUMENT,
            "the first message must be a RankHello, but is a message of an "
            "unknown "
            "kind"},
           {{"\x22"}, grpc::StatusCode::INVALID_ARGUMENT, "1 bytes that are"},
           {{std::string("\x22\x00", 2)},
            grpc::StatusCode::INVALID_ARGUMENT,
            "the first message must be a RankHello, but is RankHeartbeat"},
           {{std::string(size_t{kMaxFollowerMessageBytes} + 1, 'x')},
            grpc::StatusCode::INVALID_ARGUMENT,
            "the first message must be a RankHello, but is 65537 bytes, the "
            "limit "
            "is 65536"},
           {{ReadyBytes(std::string(1 << 20, 't'))},
            grpc::StatusCode::INVALID_ARGUMENT,
            "the first message must be a RankHello, but is 1048587 bytes, the "
            "limit is 65536"},
           {{std::string(size_t{kMaxFollowerMessageBytes + kMaxReadyBytes} + 1,
                         'x')},
            grpc::StatusCode::RESOURCE_EXHAUSTED,
            "larger than max"},
           {{HelloBytes(7)},
            grpc::StatusCode::FAILED_PRECONDITION,
            "rank is 7, a follower of this group must have a rank from 1 to 1"},
       }) {
    SCOPED_TRACE(each.text);
    RawCall call(target, each.messages);
    const grpc::Status status = call.Wait();
    EXPECT_EQ(status.error_code(), each.code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(each.text));
  }
  RawCall unknown(target, {"x"}, "/kvasir.v1.Rank/Leave");
  EXPECT_EQ(unknown.Wait().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100000, '\xee'),
        std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") +
            std::string(5000, '\xff')}) {
    SendToPort(leader->server->port(), bytes);
  }
  // After all these invalid calls, a valid follower can still join.
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  GroupExecutor executor(leader->leader.get(), &leader->rank);
  KVASIR_EXPECT_OK(executor.Execute(TestPlan(1)).status());
  RawCall doubled(target, {HelloBytes(1)});
  EXPECT_THAT(doubled.Wait().error_message(),
              HasSubstr("rank 1 (node, pid 0) has joined already"));
  ASSERT_EQ(doubled.received().size(), 1u);
  EXPECT_EQ(doubled.received()[0].refusal().reason(), RankRefusal::RANK_TAKEN);
  KVASIR_EXPECT_OK(executor.Execute(TestPlan(2)).status());
  KVASIR_EXPECT_OK(leader->leader->Drain());
}

TEST(RankGrpcTest, WeightTilesOfTheLargestSizeReachTheLeader) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  const std::string tiles(kMaxReadyBytes, 't');
  RawCall call(leader->server->target(), {HelloBytes(1), ReadyBytes(tiles)});
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto start, leader->WaitStarted());
  EXPECT_TRUE(start.weights_id() == absl::StrCat("weights tiles|", tiles));
  KVASIR_EXPECT_OK(leader->leader->Drain());
  EXPECT_TRUE(call.Wait().ok());
}

// A Join call that stays open and never reads.
class NonReadingCall final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit NonReadingCall(const std::string& target)
      : stub_(NewChannel(target)) {
    context_.AddMetadata(kRankAuthorizationKey, RankAuthorization(kSecret));
    stub_.PrepareBidiStreamingCall(&context_, "/kvasir.v1.Rank/Join", {}, this);
    AddHold();
    StartCall();
  }
  ~NonReadingCall() override {
    context_.TryCancel();
    RemoveHold();
    done_.get_future().wait();
  }
  // Returns when gRPC has taken the bytes.
  void Write(const std::string& bytes) {
    written_ = {};
    request_ = BufferOf(std::make_shared<const std::string>(bytes));
    StartWrite(&request_);
    written_.get_future().wait();
  }
  void OnWriteDone(bool) override { written_.set_value(); }
  void OnDone(const grpc::Status&) override { done_.set_value(); }

 private:
  static std::shared_ptr<grpc::Channel> NewChannel(const std::string& target) {
    grpc::ChannelArguments arguments;
    // Turns off gRPC's bandwidth probe, which would enlarge the flow control
    // window. Then more messages would fit.
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(),
                                     arguments);
  }

  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_;
  std::promise<void> written_;
  std::promise<void> done_;
};

TEST(RankGrpcTest, TheQueueOfMessagesToAFollowerThatDoesNotReadIsBounded) {
  constexpr absl::Duration kHeartbeat = absl::Milliseconds(600);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto leader, LeaderSide::Start(2, {.secret = kSecret}, kHeartbeat));
  NonReadingCall call(leader->server->target());
  call.Write(HelloBytes(1, kHeartbeat));
  KVASIR_ASSERT_OK(leader->leader->WaitJoined().status());
  call.Write(ReadyBytes("tiles"));
  KVASIR_ASSERT_OK(leader->leader->WaitStarted(TestReady(10)).status());
  // The plan is larger than a flow control window.
  kvasir::v1::StepPlan plan = TestPlan(1);
  auto* ids = plan.add_sequences()->mutable_token_ids();
  for (int i = 0; i < 1 << 20; ++i) ids->Add(i);
  KVASIR_ASSERT_OK(leader->leader->SendStep(plan));
  kvasir::v1::FollowerMessage heartbeat;
  heartbeat.mutable_heartbeat();
  while (!leader->ended.Wait(absl::Milliseconds(20))) {
    call.Write(heartbeat.SerializeAsString());
  }
  EXPECT_THAT(leader->leader->status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       "rank 1 (, pid 0) does not read its messages: 17 "
                       "messages wait"));
}

TEST(RankGrpcTest, TheGroupEndsIfARankSendsAMessageThatCannotBeParsed) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  RawCall call(leader->server->target(), {HelloBytes(1), "\xff\xff"});
  const grpc::Status status = call.Wait();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_EQ(call.received().size(), 2u);
  EXPECT_TRUE(call.received()[0].has_welcome());
  EXPECT_THAT(call.received()[1].abort().reason(),
              HasSubstr("sent 2 bytes that are not a FollowerMessage"));
  EXPECT_THAT(
      leader->leader->status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("sent 2 bytes that are not a FollowerMessage")));
}

// A leader's server that answers each Join call with one given message and then
// sends nothing more.
class BrokenLeader final : public kvasir::v1::Rank::WithRawCallbackMethod_Join<
                               kvasir::v1::Rank::Service> {
 public:
  explicit BrokenLeader(std::string message) : message_(std::move(message)) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Join(
      grpc::CallbackServerContext*) override {
    class Reactor final
        : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
     public:
      explicit Reactor(const std::string& message)
          : message_(BufferOf(std::make_shared<const std::string>(message))) {
        StartWrite(&message_);
      }
      void OnWriteDone(bool) override {}
      void OnCancel() override { Finish(grpc::Status::CANCELLED); }
      void OnDone() override { delete this; }

     private:
      const grpc::ByteBuffer message_;
    };
    return new Reactor(message_);
  }

 private:
  const std::string message_;
};

TEST(RankGrpcTest,
     AFollowerEndsWithAnErrorIfItReceivesAMessageThatCannotBeParsed) {
  BrokenLeader broken("\xff\xff");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              base::GrpcServer::Start({}, {&broken}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto one, FollowerSide::Join(1, 2, {.leader = server->target()}));
  EXPECT_THAT(one->Ended(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "the leader sent 2 bytes that are not a LeaderMessage"));
}

// ---------------------------------------------------------------------------
// Ends
// ---------------------------------------------------------------------------

TEST(RankGrpcTest, AllRanksEndAtOnceIfTheProcessOfAFollowerIsLost) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(3));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 3, DialOf(*leader)));
  KVASIR_ASSERT_OK_AND_ASSIGN(auto two,
                              FollowerSide::Join(2, 3, DialOf(*leader)));
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  GroupExecutor executor(leader->leader.get(), &leader->rank);
  KVASIR_ASSERT_OK(executor.Execute(TestPlan(1)).status());
  two->client.reset();  // cancels the call, like the end of a process
  EXPECT_THAT(two->Ended(),
              StatusIs(absl::StatusCode::kCancelled,
                       HasSubstr("the call to the leader ended")));
  EXPECT_THAT(
      one->Ended(),
      StatusIs(absl::StatusCode::kUnavailable,
               "the leader: the call of rank 2 (node, pid 0) ended: the "
               "connection to the follower is gone"));
  EXPECT_THAT(executor.Execute(TestPlan(2)),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("the call of rank 2")));
  EXPECT_TRUE(one->ended.Wait());
  EXPECT_TRUE(two->ended.Wait());
}

// The connection to a process that is stopped or cut off still looks open, so
// only missing heartbeats show it.
TEST(RankGrpcTest, LeaderAndFollowerEndWithinFiveSecondsIfMessagesStop) {
  constexpr absl::Duration kHeartbeat = kDefaultHeartbeatTimeout;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto leader, LeaderSide::Start(2, {.secret = kSecret}, kHeartbeat));
  RawCall silent(leader->server->target(),
                 {HelloBytes(1, kHeartbeat), ReadyBytes("tiles")});
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  kvasir::v1::LeaderMessage welcome;
  for (const char* address : {"at 0", "at 1"}) {
    welcome.mutable_welcome()->add_collective_addresses(address);
  }
  BrokenLeader broken(welcome.SerializeAsString());
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              base::GrpcServer::Start({}, {&broken}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto follower,
      FollowerSide::Join(1, 2, {.leader = server->target()}, kHeartbeat));
  const absl::Time since = absl::Now();
  EXPECT_TRUE(leader->ended.Wait(absl::Seconds(5)));
  EXPECT_TRUE(follower->ended.Wait(since + absl::Seconds(5) - absl::Now()));
  EXPECT_THAT(leader->leader->status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("no message from rank 1")));
  EXPECT_THAT(follower->Ended(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("no message from the leader")));
  EXPECT_EQ(silent.Wait().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(RankGrpcTest, AllRanksEndAtOnceIfTheProcessOfTheLeaderIsLost) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  leader->server.reset();
  EXPECT_THAT(one->Ended(), StatusIs(absl::StatusCode::kUnavailable,
                                     HasSubstr("the call to the leader")));
  // Wait until the leader has noticed the end too.
  while (leader->leader->status().ok()) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

TEST(RankGrpcTest, FollowersReceiveTheReasonWhenTheLeaderAborts) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  leader->leader->Abort(absl::DataLossError("the disk is gone"));
  leader->server.reset();
  EXPECT_THAT(one->Ended(),
              StatusIs(absl::StatusCode::kDataLoss,
                       "the leader: rank 0 (the leader) gave up: the disk is "
                       "gone"));
}

TEST(RankGrpcTest,
     TheLeaderReceivesTheReasonEvenIfTheFollowerExitsRightAfterItsAbort) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
  KVASIR_ASSERT_OK_AND_ASSIGN(auto one,
                              FollowerSide::Join(1, 2, DialOf(*leader)));
  KVASIR_ASSERT_OK(leader->WaitStarted().status());
  one->follower->Abort(absl::DataLossError("the disk is gone"));
  one.reset();
  EXPECT_THAT(leader->leader->status(),
              StatusIs(absl::StatusCode::kDataLoss,
                       "rank 1 (node, pid 0) gave up: the disk is gone"));
}

TEST(RankGrpcTest, TheErrorForAnUnreachableLeaderNamesItsAddressAndTheCause) {
  int port = 0;
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
    port = leader->server->port();
  }
  EXPECT_THAT(RankClient::Dial({.leader = absl::StrCat("127.0.0.1:", port),
                                .connect_timeout = absl::Milliseconds(300)}),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(absl::StrCat("127.0.0.1:", port)),
                             HasSubstr("was not reached within 300ms"),
                             HasSubstr("Connection refused"))));
}

TEST(RankGrpcTest, AFollowerWaitsForALeaderThatStartsLater) {
  RankServerOptions options{.secret = kSecret};
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2));
    options.listen.port = leader->server->port();
  }
  std::unique_ptr<FollowerSide> one;
  std::thread early([&] {
    auto joined = FollowerSide::Join(
        1, 2,
        {.leader = absl::StrCat("127.0.0.1:", options.listen.port),
         .secret = kSecret});
    KVASIR_ASSERT_OK(joined.status());
    one = *std::move(joined);
  });
  absl::SleepFor(absl::Milliseconds(300));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto leader, LeaderSide::Start(2, options));
  KVASIR_EXPECT_OK(leader->WaitStarted().status());
  early.join();
  KVASIR_EXPECT_OK(leader->leader->Drain());
  KVASIR_EXPECT_OK(one->Ended());
}

}  // namespace
}  // namespace kvasir::worker
