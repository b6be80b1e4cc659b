#include "base/net/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_server.h"
#include "base/net/testing/certificates.h"
#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() {
    std::string pattern = ::testing::TempDir() + "/kvasir-tls-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    Write("ca.pem", authority_.certificate);
    Put("server", {.names = {"DNS:localhost", "IP:127.0.0.1",
                             "URI:spiffe://kvasir/worker"}});
    Put("client", {.names = {"DNS:router.kvasir"}});
  }
  ~TlsTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_, "/", name);
  }
  void Write(const std::string& name, const std::string& text) {
    // Whole or not at all, as rotations are.
    std::ofstream(Path("part")) << text;
    std::filesystem::rename(Path("part"), Path(name));
  }
  void Put(const std::string& name, const TestCertificateOptions& options) {
    const TestCertificate made = MakeCertificate(authority_, options);
    Write(name + ".key", made.key);
    Write(name + ".pem", made.certificate);
  }
  TlsFiles Files(const std::string& name, bool authorities = true) const {
    TlsFiles files;
    files.certificate = Path(name + ".pem");
    files.key = Path(name + ".key");
    if (authorities) files.authorities = Path("ca.pem");
    return files;
  }
  absl::Status Check(const TlsFiles& files) {
    return CheckTlsFiles(files, absl::Now());
  }

  std::unique_ptr<GrpcServer> Serve(const TlsOptions& tls) {
    GrpcServerOptions options;
    auto credentials = TlsServerCredentials(tls);
    KVASIR_EXPECT_OK(credentials.status());
    options.credentials = *credentials;
    auto server = GrpcServer::Start(options, {});
    KVASIR_EXPECT_OK(server.status());
    (*server)->SetServing("", true);
    return *std::move(server);
  }

  // Whether a client gets an answer; what it saw of the server goes to `error`.
  bool Reaches(const GrpcServer& server, const TlsOptions& tls,
               std::string* error = nullptr) {
    auto credentials = TlsChannelCredentials(tls);
    KVASIR_EXPECT_OK(credentials.status());
    return Answers(server, *credentials, error);
  }
  bool Answers(const GrpcServer& server,
               const std::shared_ptr<grpc::ChannelCredentials>& credentials,
               std::string* error = nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel(server.target(), credentials, arguments);
    grpc::GenericStub stub(channel);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    grpc::CompletionQueue queue;
    const grpc::Slice nothing("", 0);
    const auto call =
        stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                              grpc::ByteBuffer(&nothing, 1), &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    if (error != nullptr) *error = status.error_message();
    return status.ok();
  }

  const TestCertificate authority_ = MakeAuthority("an authority");
  std::string folder_;
};

TEST_F(TlsTest, WhatIsWrongWithAFileIsSaidWithItsFlag) {
  KVASIR_EXPECT_OK(Check(Files("server")));
  TlsFiles files = Files("server");
  files.key.clear();
  EXPECT_THAT(Check(files), StatusIs(absl::StatusCode::kInvalidArgument,
                                     AllOf(HasSubstr("--tls-cert"),
                                           HasSubstr("needs --tls-key"))));
  files = Files("server");
  files.certificate.clear();
  EXPECT_THAT(Check(files), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("needs --tls-cert")));
  files = Files("server");
  files.key = Path("client.key");
  EXPECT_THAT(Check(files),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("--tls-key"), HasSubstr("client.key"),
                             HasSubstr("is not the key of --tls-cert"))));
  files = Files("nobody");
  EXPECT_THAT(Check(files), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("No such file")));
  Write("text.pem", "no PEM at all");
  files = Files("server");
  files.authorities = Path("text.pem");
  EXPECT_THAT(Check(files), StatusIs(absl::StatusCode::kInvalidArgument,
                                     AllOf(HasSubstr("--tls-client-ca"),
                                           HasSubstr("has no cert"))));
  files = Files("server");
  files.key = Path("ca.pem");
  EXPECT_THAT(Check(files), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("has no private key")));
}

TEST_F(TlsTest, ACertificateOutOfItsTimeIsRefusedWithTheDate) {
  Put("old", {.names = {},
              .valid_from = -absl::Hours(2),
              .valid_until = -absl::Hours(1)});
  EXPECT_THAT(
      Check(Files("old")),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("was valid until 20"), HasSubstr("UTC"))));
  Put("new", {.names = {},
              .valid_from = absl::Hours(1),
              .valid_until = absl::Hours(2)});
  EXPECT_THAT(Check(Files("new")), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("is valid from 20")));
}

TEST_F(TlsTest, ServersNeedACertificateAndNamesNeedAnAuthority) {
  TlsOptions options;
  options.files.authorities = Path("ca.pem");
  EXPECT_THAT(TlsServerCredentials(options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("needs --tls-cert and --tls-key")));
  options.files = Files("server", /*authorities=*/false);
  options.names = {"router.kvasir"};
  EXPECT_THAT(TlsServerCredentials(options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("without --tls-client-ca")));
  options.names.clear();
  EXPECT_THAT(TlsChannelCredentials(options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("who vouches for the server")));
}

TEST_F(TlsTest, AClientThatKnowsTheAuthorityIsServedAndPlainTextIsNot) {
  const auto server = Serve({.files = Files("server", false), .names = {}});
  TlsFiles authority_alone;
  authority_alone.authorities = Path("ca.pem");
  EXPECT_TRUE(Reaches(*server, {.files = authority_alone, .names = {}}));
  EXPECT_FALSE(Answers(*server, grpc::InsecureChannelCredentials()));
  // Another authority's word is not enough.
  Write("other.pem", MakeAuthority("another").certificate);
  authority_alone.authorities = Path("other.pem");
  EXPECT_FALSE(Reaches(*server, {.files = authority_alone, .names = {}}));
}

TEST_F(TlsTest, AServersNameIsTheHostThatIsDialledOrOneOfTheNames) {
  Put("elsewhere", {.names = {"DNS:elsewhere", "URI:spiffe://kvasir/worker"}});
  const auto server = Serve({.files = Files("elsewhere", false), .names = {}});
  TlsOptions client;
  client.files.authorities = Path("ca.pem");
  EXPECT_FALSE(Reaches(*server, client));
  client.names = {"nobody", "spiffe://kvasir/worker"};
  EXPECT_TRUE(Reaches(*server, client));
  client.names = {"spiffe://kvasir/work"};
  std::string error;
  EXPECT_FALSE(Reaches(*server, client, &error));
}

TEST_F(TlsTest, MutualTlsLetsInWhoHasACertificateAndOneOfTheNames) {
  TlsFiles nobody;
  nobody.authorities = Path("ca.pem");
  {
    const auto server = Serve({.files = Files("server"), .names = {}});
    EXPECT_TRUE(Reaches(*server, {.files = Files("client"), .names = {}}));
    EXPECT_FALSE(Reaches(*server, {.files = nobody, .names = {}}));
  }
  const auto server =
      Serve({.files = Files("server"), .names = {"router.kvasir"}});
  EXPECT_TRUE(Reaches(*server, {.files = Files("client"), .names = {}}));
  Put("guest", {.names = {"DNS:guest.kvasir"}});
  EXPECT_FALSE(Reaches(*server, {.files = Files("guest"), .names = {}}));
  // Another authority signs whatever it is asked to.
  const TestCertificate other = MakeAuthority("another");
  const TestCertificate forged =
      MakeCertificate(other, {.names = {"DNS:router.kvasir"}});
  Write("forged.pem", forged.certificate);
  Write("forged.key", forged.key);
  EXPECT_FALSE(Reaches(*server, {.files = Files("forged"), .names = {}}));
}

TEST_F(TlsTest, FilesThatChangeAreReadAgainWithoutARestart) {
  const auto server = Serve({.files = Files("server", false),
                             .names = {},
                             .refresh = absl::Seconds(1)});
  TlsOptions client;
  client.files.authorities = Path("ca.pem");
  client.names = {"second.kvasir"};
  EXPECT_FALSE(Reaches(*server, client));
  Put("server", {.names = {"DNS:second.kvasir"}});
  bool reached = false;
  for (int i = 0; i < 60 && !reached; ++i) {
    absl::SleepFor(absl::Milliseconds(500));
    reached = Reaches(*server, client);
  }
  EXPECT_TRUE(reached);
}

TEST(IsLocalTest, LoopbackAndUnixSocketsAreLocal) {
  for (const char* host : {"127.0.0.1", "127.9.0.1", "localhost", "::1"}) {
    ListenAddress listen;
    listen.host = host;
    EXPECT_TRUE(IsLocal(listen)) << host;
    EXPECT_TRUE(IsLocalTarget(JoinHostPort(host, 80))) << host;
    KVASIR_EXPECT_OK(CheckPlaintext(listen, false, "a way out"));
  }
  EXPECT_TRUE(IsLocalTarget("unix:/run/worker.sock"));
  for (const char* host :
       {"0.0.0.0", "::", "10.0.0.1", "127.evil.example", "worker"}) {
    ListenAddress listen;
    listen.host = host;
    EXPECT_FALSE(IsLocal(listen)) << host;
    EXPECT_FALSE(IsLocalTarget(JoinHostPort(host, 80))) << host;
    EXPECT_THAT(CheckPlaintext(listen, false, "give --tls-cert"),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr(host), HasSubstr("give --tls-cert"),
                               HasSubstr("--insecure"))));
    KVASIR_EXPECT_OK(CheckPlaintext(listen, true, ""));
  }
  ListenAddress unix_socket;
  unix_socket.unix_path = "/run/x";
  EXPECT_TRUE(IsLocal(unix_socket));
}

}  // namespace
}  // namespace kvasir::base
