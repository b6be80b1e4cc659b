#include "base/net/grpc_server.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/support/byte_buffer.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Not;

enum class Served { kUnreachable, kUnknownService, kServing, kNotServing };

// Calls grpc.health.v1 without its generated code. Field 1 of the request is
// the service's name, and field 1 of the response is the status.
Served CheckHealth(const std::string& target, const std::string& service) {
  auto channel =
      grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  const std::string request =
      service.empty()
          ? ""
          : absl::StrCat("\n",
                         std::string(1, static_cast<char>(service.size())),
                         service);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &out, &in,
                 [&](const grpc::Status& status) { done.set_value(status); });
  const grpc::Status status = done.get_future().get();
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    return Served::kUnknownService;
  }
  if (!status.ok()) return Served::kUnreachable;
  grpc::Slice answer;
  EXPECT_TRUE(in.DumpToSingleSlice(&answer).ok());
  const std::string bytes(answer.begin(), answer.end());
  return bytes == "\x08\x01" ? Served::kServing : Served::kNotServing;
}

// A service with one method, for tests that need a server but call no method
// of the service.
class IdleService : public grpc::Service {
 public:
  IdleService() {
    AddMethod(new grpc::internal::RpcServiceMethod(
        "/kvasir.test.Idle/Idle", grpc::internal::RpcMethod::NORMAL_RPC,
        nullptr));
    MarkMethodCallback(
        0, new grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer,
                                                    grpc::ByteBuffer>(
               [](grpc::CallbackServerContext* context, const grpc::ByteBuffer*,
                  grpc::ByteBuffer*) {
                 grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
                 reactor->Finish(grpc::Status::OK);
                 return reactor;
               }));
  }
};

absl::StatusOr<std::unique_ptr<GrpcServer>> StartIdle(
    const GrpcServerOptions& options = {}) {
  static IdleService* const service = new IdleService;
  return GrpcServer::Start(options, {service});
}

TEST(GrpcServerTest, PortZeroTakesAFreePortAndReportsIt) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server, StartIdle());
  EXPECT_GT(server->port(), 0);
  EXPECT_EQ(server->target(), absl::StrCat("127.0.0.1:", server->port()));
}

TEST(GrpcServerTest, TheErrorForAPortInUseStatesTheAddressTheCauseAndTheFlag) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto first, StartIdle());
  GrpcServerOptions options;
  options.listen.port = first->port();
  options.listen.flag = "--grpc-port";
  EXPECT_THAT(StartIdle(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(first->target()),
                             HasSubstr("Address already in use"),
                             HasSubstr("--grpc-port"))));
}

TEST(GrpcServerTest, ThePortIsFreeAgainAfterTheServersShutdown) {
  GrpcServerOptions options;
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto first, StartIdle());
    options.listen.port = first->port();
  }
  KVASIR_EXPECT_OK(StartIdle(options));
}

TEST(GrpcServerTest,
     TheErrorForAListenAddressOfAnotherMachineNamesAddressAndHostFlag) {
  GrpcServerOptions options;
  options.listen.host = "192.0.2.1";
  EXPECT_THAT(StartIdle(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("192.0.2.1:0"), HasSubstr("--host"),
                             HasSubstr("Cannot assign requested address"),
                             Not(HasSubstr("--port")))));
}

TEST(GrpcServerTest,
     TheErrorForAHostNameThatDoesNotResolveNamesTheHostAndNotThePort) {
  GrpcServerOptions options;
  options.listen.host = "no such host";
  EXPECT_THAT(
      StartIdle(options),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(
                         "use --host to choose a host other than no such host"),
                     Not(HasSubstr("--port")))));
}

TEST(GrpcServerTest, APortAbove65535IsRefused) {
  GrpcServerOptions options;
  options.listen.port = 65536;
  EXPECT_THAT(StartIdle(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("127.0.0.1:65536")));
}

TEST(GrpcServerTest, AUnixSocketThatAProcessServesIsNotReplaced) {
  const TempFolder folder;
  GrpcServerOptions options;
  options.listen.unix_path = folder.File("served");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto first, StartIdle(options));
  EXPECT_THAT(StartIdle(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(options.listen.unix_path),
                             HasSubstr("another process serves it"))));
  first->SetServing("", true);
  EXPECT_EQ(CheckHealth(first->target(), ""), Served::kServing);
}

TEST(GrpcServerTest, AUnixSocketThatNoProcessServesIsReplaced) {
  const TempFolder folder;
  GrpcServerOptions options;
  options.listen.unix_path = folder.File("stale");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  options.listen.unix_path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  close(fd);
  KVASIR_EXPECT_OK(StartIdle(options));
}

TEST(GrpcServerTest, AUnixPathThatIsTooLongIsRefusedWithItsLengthAndTheLimit) {
  GrpcServerOptions options;
  options.listen.unix_path = "/tmp/" + std::string(120, 'x');
  EXPECT_THAT(StartIdle(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("125 bytes"), HasSubstr("107"))));
}

TEST(GrpcServerTest,
     TheHealthServiceReportsAServiceAsServingOnlyAfterSetServing) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server, StartIdle());
  EXPECT_EQ(CheckHealth(server->target(), ""), Served::kNotServing);
  EXPECT_EQ(CheckHealth(server->target(), "a.B"), Served::kUnknownService);
  server->SetServing("a.B", true);
  EXPECT_EQ(CheckHealth(server->target(), "a.B"), Served::kServing);
  EXPECT_EQ(CheckHealth(server->target(), ""), Served::kNotServing);
}

TEST(GrpcServerTest, AServerWithoutServicesAnswersOnlyHealthChecks) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server, GrpcServer::Start({}, {}));
  server->SetServing("", true);
  EXPECT_EQ(CheckHealth(server->target(), ""), Served::kServing);
  const auto channel =
      grpc::CreateChannel(server->target(), grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  const grpc::Slice slice("x");
  const grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/kvasir.v1.Admin/Drain", {}, &out, &in,
                 [&](const grpc::Status& status) { done.set_value(status); });
  EXPECT_EQ(done.get_future().get().error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

// A service whose call ends when the test finishes its reactor.
class HeldService : public grpc::Service {
 public:
  HeldService() {
    AddMethod(new grpc::internal::RpcServiceMethod(
        "/kvasir.test.Held/Call", grpc::internal::RpcMethod::NORMAL_RPC,
        nullptr));
    MarkMethodCallback(
        0, new grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer,
                                                    grpc::ByteBuffer>(
               [this](grpc::CallbackServerContext* context,
                      const grpc::ByteBuffer* in, grpc::ByteBuffer* out) {
                 *out = *in;
                 grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
                 running.set_value(reactor);
                 return reactor;
               }));
  }
  std::promise<grpc::ServerUnaryReactor*> running;
};

TEST(GrpcServerTest, AConnectionAboveTheAgeLimitEndsAfterItsRunningCall) {
  HeldService service;
  GrpcServerOptions options;
  options.max_connection_age = absl::Milliseconds(100);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              GrpcServer::Start(options, {&service}));
  const auto channel =
      grpc::CreateChannel(server->target(), grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  const grpc::Slice slice("x");
  const grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/kvasir.test.Held/Call", {}, &out, &in,
                 [&](const grpc::Status& status) { done.set_value(status); });
  grpc::ServerUnaryReactor* const reactor = service.running.get_future().get();
  // When the GOAWAY of the old connection arrives, the channel is no
  // longer ready.
  const auto end = absl::Now() + absl::Seconds(20);
  while (channel->GetState(false) == GRPC_CHANNEL_READY && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_NE(channel->GetState(false), GRPC_CHANNEL_READY);
  reactor->Finish(grpc::Status::OK);
  EXPECT_TRUE(done.get_future().get().ok());
}

// A service that records the size of the largest message that it has received.
class EchoService : public grpc::Service {
 public:
  EchoService() {
    AddMethod(new grpc::internal::RpcServiceMethod(
        "/kvasir.test.Echo/Call", grpc::internal::RpcMethod::NORMAL_RPC,
        nullptr));
    MarkMethodCallback(
        0, new grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer,
                                                    grpc::ByteBuffer>(
               [this](grpc::CallbackServerContext* context,
                      const grpc::ByteBuffer* in, grpc::ByteBuffer*) {
                 largest = std::max(largest.load(), in->Length());
                 grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
                 reactor->Finish(grpc::Status::OK);
                 return reactor;
               }));
  }
  std::atomic<size_t> largest{0};
};

// Regression test: every server once decompressed a megabyte of gzip into a
// message of a gigabyte.
TEST(GrpcServerTest, ACompressedMessageIsRefusedAndNotUnpacked) {
  EchoService service;
  GrpcServerOptions options;
  options.max_receive_message_bytes = 64 << 20;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              GrpcServer::Start(options, {&service}));
  const auto channel =
      grpc::CreateChannel(server->target(), grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  const grpc::Slice slice(std::string(16 << 20, 'a'));
  const grpc::ByteBuffer out(&slice, 1);
  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    grpc::ByteBuffer in;
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/kvasir.test.Echo/Call", {}, &out, &in,
                   [&](const grpc::Status& status) { done.set_value(status); });
    const grpc::Status status = done.get_future().get();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr("ompression"));
  }
  EXPECT_LT(service.largest, size_t{1} << 20);
}

// Opens a connection without calls that sends pings one at a time, `pause`
// apart. Returns how many of `count` pings are answered before the server
// closes it.
int PingsAnswered(int port, int count, absl::Duration pause) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address),
            0);
  constexpr char kPing = 6, kGoAway = 7, kAcknowledged = 1;
  // A frame: length (24 bits), type, flags, stream (32 bits), payload.
  const auto frame = [](char type, const std::string& payload) {
    return std::string({0, 0, static_cast<char>(payload.size()), type, 0}) +
           std::string(4, '\0') + payload;
  };
  const auto send_all = [fd](const std::string& bytes) {
    EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  };
  const auto receive = [fd](size_t size) {
    std::string bytes(size, '\0');
    const ssize_t got = recv(fd, bytes.data(), size, MSG_WAITALL);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  };
  constexpr char kSettings = 4;
  send_all("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(kSettings, ""));
  int answered = 0;
  bool gone = false;
  while (answered < count && !gone) {
    absl::SleepFor(pause);
    send_all(frame(kPing, "whatever"));
    for (bool waiting = true; waiting && !gone;) {
      const std::string head = receive(9);
      if (head.size() < 9) {
        gone = true;
        break;
      }
      receive(static_cast<size_t>(static_cast<unsigned char>(head[1]) << 8 |
                                  static_cast<unsigned char>(head[2])));
      gone = head[3] == kGoAway;
      waiting = !(head[3] == kPing && head[4] == kAcknowledged);
    }
    if (!gone) ++answered;
  }
  close(fd);
  return answered;
}

// Regression test: the gateway smg pings its connections every 30 s, even
// without requests, and the server once closed them.
TEST(GrpcServerTest, AConnectionWithPingsButWithoutCallsStaysOpen) {
  GrpcServerOptions options;
  options.min_ping_interval = absl::Milliseconds(1);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server, StartIdle(options));
  EXPECT_EQ(PingsAnswered(server->port(), 10, absl::Milliseconds(20)), 10);
}

// Regression test: clients with pings every 3 s once lost each unary call that
// took 13 s ("Too many pings").
TEST(GrpcServerTest, ACallOfAClientThatPingsOnceASecondIsNotEnded) {
  HeldService service;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto server, GrpcServer::Start(GrpcServerOptions(), {&service}));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
      grpc::CreateCustomChannel(server->target(),
                                grpc::InsecureChannelCredentials(), arguments));
  const grpc::Slice slice("x");
  const grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/kvasir.test.Held/Call", {}, &out, &in,
                 [&](const grpc::Status& status) { done.set_value(status); });
  grpc::ServerUnaryReactor* const reactor = service.running.get_future().get();
  // The first ping and two strikes are always allowed, so wait until the
  // fifth ping.
  absl::SleepFor(absl::Milliseconds(5500));
  reactor->Finish(grpc::Status::OK);
  const grpc::Status status = done.get_future().get();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(GrpcServerTest,
     AClientThatPingsTooOftenIsDisconnectedAfterTheAllowedNumberOfPings) {
  // With an interval of one hour, every ping after the first is a strike.
  GrpcServerOptions options;
  options.min_ping_interval = absl::Hours(1);
  options.max_ping_strikes = 2;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server, StartIdle(options));
  // The server answers the first ping and the two strikes. It may also answer
  // the ping after them, if that answer arrives before the GOAWAY.
  EXPECT_THAT(PingsAnswered(server->port(), 10, absl::ZeroDuration()),
              AllOf(Ge(3), Le(4)));
}

TEST(GrpcServerTest, TheMessageSizeLimitGrowsWithTheModelLength) {
  EXPECT_EQ(MaxMessageBytesFor(0), 1 << 20);
  EXPECT_EQ(MaxMessageBytesFor(131072), 8 * 131072 + (1 << 20));
}

}  // namespace
}  // namespace kvasir::base
