#include "base/net/tls.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_server.h"
#include "base/net/testing/certificates.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Connects with a client that supports only the TLS version `version`. Returns
// that version, or 0 if the handshake fails.
int NegotiatedVersion(const std::string& target, int version) {
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  // OpenSSL's default security level excludes TLS 1.1.
  SSL_CTX_set_security_level(context, 0);
  SSL_CTX_set_min_proto_version(context, version);
  SSL_CTX_set_max_proto_version(context, version);
  const unsigned char h2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context, h2, sizeof h2);
  BIO* const connection = BIO_new_ssl_connect(context);
  BIO_set_conn_hostname(connection, target.c_str());
  int agreed = 0;
  if (BIO_do_handshake(connection) == 1) {
    SSL* ssl = nullptr;
    BIO_get_ssl(connection, &ssl);
    agreed = SSL_version(ssl);
  }
  ERR_clear_error();
  BIO_free_all(connection);
  SSL_CTX_free(context);
  return agreed;
}

// Counts refusals in gRPC's log lines, as the programs do (PrepareProcess).
class GrpcLog final : public ::testing::Environment {
 public:
  void SetUp() override {
    gpr_set_log_function([](gpr_log_func_args* args) {
      TlsRefusals::OfProcess()->AddGrpcLine(args->message);
    });
  }
};
const auto* const kGrpcLog = ::testing::AddGlobalTestEnvironment(new GrpcLog);

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() {
    Write("ca.pem", authority_.certificate);
    Put("server", {.names = {"DNS:localhost", "IP:127.0.0.1",
                             "URI:spiffe://kvasir/worker"}});
    Put("client", {.names = {"DNS:router.kvasir"}});
  }

  std::string Path(const std::string& name) const { return folder_.File(name); }
  void Write(const std::string& name, const std::string& text) {
    folder_.Write(name, text);
  }
  void Put(const std::string& name, const TestCertificateOptions& options) {
    const TestCertificate made = MakeCertificate(authority_, options);
    Write(name + ".key", made.key);
    Write(name + ".pem", made.certificate);
  }
  TlsOptions Options(const std::string& name, bool authorities = true) const {
    TlsOptions options;
    options.files.certificate = Path(name + ".pem");
    options.files.key = Path(name + ".key");
    if (authorities) options.files.authorities = Path("ca.pem");
    options.refusals = refusals_;
    return options;
  }
  TlsOptions AuthorityAlone() const {
    TlsOptions options;
    options.files.authorities = Path("ca.pem");
    options.refusals = refusals_;
    return options;
  }
  static TlsOptions With(TlsOptions options, std::vector<std::string> names) {
    options.names = std::move(names);
    return options;
  }

  std::unique_ptr<GrpcServer> Serve(const TlsOptions& tls) {
    GrpcServerOptions options;
    auto credentials = watch_.Server(tls);
    KVASIR_EXPECT_OK(credentials.status());
    options.credentials = *credentials;
    auto server = GrpcServer::Start(options, {});
    KVASIR_EXPECT_OK(server.status());
    (*server)->SetServing("", true);
    return *std::move(server);
  }

  // Calls a server and returns the call's error; "" if it is answered.
  std::string Reach(const GrpcServer& server, const TlsOptions& tls) {
    auto credentials = TlsChannelCredentials(tls);
    KVASIR_EXPECT_OK(credentials.status());
    return Ask(server, *credentials);
  }
  std::string Ask(const GrpcServer& server,
                  const std::shared_ptr<grpc::ChannelCredentials>& with) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel(server.target(), with, arguments);
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
    if (status.ok()) return "";
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE)
        << status.error_message();
    return status.error_message();
  }

  // Returns how many refusals with this cause the process has counted. gRPC's
  // log lines about handshakes are counted in TlsRefusals::OfProcess(), as in
  // the programs.
  static uint64_t Refused(TlsRefusal cause) {
    return TlsRefusals::OfProcess()->count(cause);
  }
  // Waits until the count of `cause` exceeds `before`. It may exceed it by more
  // than one, because other tests in the process may cause the same refusals.
  void ExpectRefused(TlsRefusal cause, uint64_t before) {
    for (int i = 0; i < 400 && Refused(cause) == before; ++i) {
      absl::SleepFor(absl::Milliseconds(50));
    }
    EXPECT_GT(Refused(cause), before);
  }

  std::map<std::string, double> Numbers() const {
    std::map<std::string, double> numbers;
    for (const auto& family : watch_.Collect()) {
      for (const auto& metric : family.metric) {
        std::string name = family.name;
        for (const auto& label : metric.label) {
          absl::StrAppend(&name, " ", label.value);
        }
        numbers[name] = metric.gauge.value;
      }
    }
    return numbers;
  }

  const TestCertificate authority_ = MakeAuthority("an authority");
  const std::shared_ptr<TlsRefusals> refusals_ =
      std::make_shared<TlsRefusals>();
  absl::Time now_ = absl::Now();
  TlsWatch watch_{
      {.refresh = absl::InfiniteDuration(), .now = [this] { return now_; }}};
  const TempFolder folder_;
};

TEST_F(TlsTest,
       TlsOptionsWithoutTheCertificateOrAuthorityThatTheyNeedAreRefused) {
  EXPECT_THAT(watch_.Server(AuthorityAlone()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("needs --tls-cert and --tls-key")));
  EXPECT_THAT(
      watch_.Server(With(Options("server", false), {"router.kvasir"})).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("--tls-client-names router.kvasir: without "
                         "--tls-client-ca")));
  for (const auto& refused : {TlsChannelCredentials(Options("server", false)),
                              watch_.Channel(Options("server", false))}) {
    EXPECT_THAT(
        refused.status(),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("the server's certificate cannot be verified")));
  }
  EXPECT_THAT(Numbers(), IsEmpty()) << "refused options are not watched";
}

TEST_F(TlsTest, AServerServesClientsThatTrustItsAuthorityAndRefusesPlainText) {
  const auto server = Serve(Options("server", false));
  EXPECT_EQ(Reach(*server, AuthorityAlone()), "");
  uint64_t before = Refused(TlsRefusal::kNoTls);
  EXPECT_NE(Ask(*server, grpc::InsecureChannelCredentials()), "");
  ExpectRefused(TlsRefusal::kNoTls, before);
  // A client that trusts only another authority refuses the
  // server's certificate.
  Write("other.pem", MakeAuthority("another").certificate);
  TlsOptions other = AuthorityAlone();
  other.files.authorities = Path("other.pem");
  before = Refused(TlsRefusal::kCertificate);
  EXPECT_THAT(Reach(*server, other), HasSubstr("certificate verify failed"));
  ExpectRefused(TlsRefusal::kCertificate, before);
}

TEST_F(TlsTest, AServerCertificateMustNameTheDialledHostOrAnAllowedName) {
  Put("elsewhere", {.names = {"DNS:elsewhere", "URI:spiffe://kvasir/worker"}});
  const auto server = Serve(Options("elsewhere", false));
  TlsOptions client = AuthorityAlone();
  client.names_flag = "--worker-tls-names";
  client.role = "workers";
  EXPECT_THAT(Reach(*server, client),
              HasSubstr("none of the certificate's names is the name that was "
                        "dialled (its names: elsewhere, "
                        "spiffe://kvasir/worker)"));
  EXPECT_EQ(refusals_->count(TlsRefusal::kNames), 1u);
  EXPECT_EQ(Reach(*server, With(client, {"nobody", "spiffe://kvasir/worker"})),
            "");
  // The client's error contains the server's names and the flag that
  // excludes them.
  EXPECT_EQ(refusals_->count(TlsRefusal::kNames), 1u);
  EXPECT_THAT(Reach(*server, With(client, {"spiffe://kvasir/work"})),
              HasSubstr("none of the certificate's names is allowed by "
                        "--worker-tls-names (its names: elsewhere, "
                        "spiffe://kvasir/worker)"));
  EXPECT_EQ(refusals_->count(TlsRefusal::kNames), 2u);
}

TEST_F(TlsTest, MutualTlsAdmitsOnlyClientsWithACertificateForAnAllowedName) {
  {
    const auto server = Serve(Options("server"));
    EXPECT_EQ(Reach(*server, Options("client")), "");
    const uint64_t before = Refused(TlsRefusal::kNoCertificate);
    EXPECT_NE(Reach(*server, AuthorityAlone()), "");
    ExpectRefused(TlsRefusal::kNoCertificate, before);
  }
  const auto server = Serve(With(Options("server"), {"router.kvasir"}));
  EXPECT_EQ(Reach(*server, Options("client")), "");
  Put("guest", {.names = {"DNS:guest.kvasir"}});
  ::testing::internal::CaptureStderr();
  EXPECT_NE(Reach(*server, Options("guest")), "");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("cause=names"), HasSubstr("listener"),
                    HasSubstr("[guest.kvasir]"), HasSubstr("[router.kvasir]"),
                    HasSubstr("--tls-client-names")));
  EXPECT_EQ(refusals_->count(TlsRefusal::kNames), 1u);
  // An allowed name does not help if another authority has signed
  // the certificate.
  const TestCertificate other = MakeAuthority("another");
  const TestCertificate forged =
      MakeCertificate(other, {.names = {"DNS:router.kvasir"}});
  Write("forged.pem", forged.certificate);
  Write("forged.key", forged.key);
  const uint64_t before = Refused(TlsRefusal::kCertificate);
  EXPECT_NE(Reach(*server, Options("forged")), "");
  ExpectRefused(TlsRefusal::kCertificate, before);
  EXPECT_EQ(refusals_->count(TlsRefusal::kNames), 1u);
}

TEST_F(TlsTest, ChangedTlsFilesAreUsedWithoutARestart) {
  const auto server = Serve(Options("server", false));
  const TlsOptions first = With(AuthorityAlone(), {"spiffe://kvasir/worker"});
  const TlsOptions second = With(AuthorityAlone(), {"second.kvasir"});
  EXPECT_EQ(Reach(*server, first), "");
  EXPECT_THAT(Reach(*server, second), HasSubstr("spiffe://kvasir/worker"));
  Put("server", {.names = {"DNS:second.kvasir"}});
  watch_.Look();
  // gRPC checks the files in use once a second.
  std::string error = "not asked";
  for (int i = 0; i < 100 && !error.empty(); ++i) {
    absl::SleepFor(absl::Milliseconds(100));
    error = Reach(*server, second);
  }
  EXPECT_EQ(error, "");
  EXPECT_THAT(Reach(*server, first), HasSubstr("second.kvasir"));
  EXPECT_EQ(Numbers()["kvasir_tls_reloads_total listener ok"], 1);
}

// gRPC's own file watcher aborts the process if a key file is empty, and
// refuses all clients while key and certificate do not match.
TEST_F(TlsTest, InvalidChangesOfTlsFilesAreNotUsedAndAreReportedOnce) {
  const auto server = Serve(Options("server"));
  const TestCertificate next =
      MakeCertificate(authority_, {.names = {"IP:127.0.0.1", "DNS:next"}});
  const std::vector<std::pair<std::function<void()>, std::string>> wrongs = {
      {[&] { Write("server.key", ""); },
       "--tls-key " + Path("server.key") + ": has no private key"},
      {[&] { Write("server.key", next.key); }, "is not the key of --tls-cert"},
      {[&] { Write("server.pem", next.certificate.substr(0, 100)); },
       "--tls-cert " + Path("server.pem") + ": certificate 1 cannot be read"},
      {[&] { std::filesystem::remove(Path("server.pem")); },
       "--tls-cert " + Path("server.pem") + ": No such file"},
  };
  double refused = 0;
  for (const auto& [change, said] : wrongs) {
    change();
    ::testing::internal::CaptureStderr();
    watch_.Look();
    watch_.Look();
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, HasSubstr(said));
    EXPECT_EQ(log.find("TLS files refused"), log.rfind("TLS files refused"));
    auto numbers = Numbers();
    EXPECT_EQ(numbers["kvasir_tls_reloads_total listener refused"], ++refused);
    EXPECT_EQ(numbers["kvasir_tls_files_refused listener"], 1);
    EXPECT_EQ(Reach(*server, Options("client")), "");
  }
  // The new key is already in place, so with the new certificate both match.
  Write("server.pem", next.certificate);
  watch_.Look();
  auto numbers = Numbers();
  EXPECT_EQ(numbers["kvasir_tls_reloads_total listener refused"], refused);
  EXPECT_EQ(numbers["kvasir_tls_files_refused listener"], 0);
  EXPECT_EQ(numbers["kvasir_tls_reloads_total listener ok"], 1);
}

TEST_F(TlsTest, ExportsWhenTheCertificateOfEachFileExpires) {
  Put("server", {.names = {}, .valid_until = absl::Minutes(20)});
  TlsOptions options = Options("server");
  options.role = "admin";
  KVASIR_ASSERT_OK(watch_.Server(options).status());
  TlsOptions workers = AuthorityAlone();
  workers.role = "workers";
  KVASIR_ASSERT_OK(watch_.Channel(workers).status());
  const auto numbers = Numbers();
  const auto near = [this](absl::Duration from_now) {
    return ::testing::DoubleNear(
        static_cast<double>(absl::ToUnixSeconds(now_ + from_now)), 30);
  };
  const std::string name = "kvasir_tls_certificate_not_after_seconds ";
  EXPECT_THAT(numbers.at(name + "admin certificate"), near(absl::Minutes(20)));
  EXPECT_THAT(numbers.at(name + "admin authorities"), near(absl::Hours(1)));
  EXPECT_THAT(numbers.at(name + "workers authorities"), near(absl::Hours(1)));
  EXPECT_EQ(numbers.count(name + "workers certificate"), 0u);
  EXPECT_THAT(numbers.at("kvasir_tls_certificate_not_before_seconds admin "
                         "certificate"),
              near(-absl::Hours(1)));
  // A certificate that expires while it is in use stays in use. But when its
  // file changes, the new certificate must be valid at the current time.
  now_ += absl::Minutes(30);
  watch_.Look();
  EXPECT_EQ(Numbers().at("kvasir_tls_files_refused admin"), 0);
  Put("server", {.names = {}, .valid_until = absl::Minutes(25)});
  watch_.Look();
  EXPECT_EQ(Numbers().at("kvasir_tls_files_refused admin"), 1);
}

// Regression test: an expired authority was once only reported, and stayed in
// use until a restart.
TEST_F(TlsTest, AnAuthorityThatExpiresWhileInUseIsNoLongerTrusted) {
  const std::string old = MakeAuthorityWith({.common_name = "old",
                                             .valid_until = absl::Minutes(20)})
                              .certificate;
  Write("ca.pem", old + authority_.certificate);
  KVASIR_ASSERT_OK(watch_.Channel(AuthorityAlone()).status());
  const auto look = [this] {
    ::testing::internal::CaptureStderr();
    watch_.Look();
    return ::testing::internal::GetCapturedStderr();
  };
  const auto until = [this](absl::Duration from_start) {
    return ::testing::DoubleNear(
        static_cast<double>(absl::ToUnixSeconds(now_ + from_start)), 30);
  };
  const std::string name =
      "kvasir_tls_certificate_not_after_seconds listener authorities";
  EXPECT_EQ(look(), "");
  EXPECT_THAT(Numbers()[name], until(absl::Minutes(20)));
  now_ += absl::Minutes(21);
  EXPECT_THAT(look(), AllOf(HasSubstr("expired authorities are left out"),
                            HasSubstr("--tls-client-ca " + Path("ca.pem") +
                                      ": certificate 1 was valid until")));
  EXPECT_THAT(Numbers()[name], until(absl::Minutes(39)));
  EXPECT_EQ(Numbers()["kvasir_tls_files_refused listener"], 0);
  EXPECT_EQ(look(), "") << "once";
  // The last authority stays in use although it has expired, because without
  // it no peer could be trusted.
  now_ += absl::Hours(1);
  EXPECT_THAT(look(), HasSubstr("was valid until"));
  EXPECT_EQ(Numbers()["kvasir_tls_files_refused listener"], 1);
  EXPECT_EQ(look(), "") << "once";
}

// A certificate that is not yet valid is refused at first and used once it
// is valid.
TEST_F(TlsTest, RefusedTlsFilesAreCheckedAgainLater) {
  KVASIR_ASSERT_OK(watch_.Server(Options("server")).status());
  Put("server", {.names = {},
                 .valid_from = absl::Minutes(10),
                 .valid_until = absl::Hours(2)});
  watch_.Look();
  EXPECT_EQ(Numbers()["kvasir_tls_reloads_total listener refused"], 1);
  now_ += absl::Minutes(11);
  watch_.Look();
  EXPECT_EQ(Numbers()["kvasir_tls_reloads_total listener ok"], 1);
  EXPECT_EQ(Numbers()["kvasir_tls_files_refused listener"], 0);
}

TEST_F(TlsTest, TheWatchThreadReadsChangedTlsFiles) {
  TlsWatch watch({.refresh = absl::Milliseconds(10)});
  KVASIR_ASSERT_OK(watch.Server(Options("server")).status());
  Put("server", {.names = {}});
  double taken = 0;
  for (int i = 0; i < 400 && taken == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(50));
    for (const auto& family : watch.Collect()) {
      if (family.name != "kvasir_tls_reloads_total") continue;
      taken = family.metric.at(0).counter.value;
    }
  }
  EXPECT_GE(taken, 1);
}

// gRPC 1.51 has no option for the TLS version. This test records the versions
// that it accepts.
TEST_F(TlsTest, TlsVersionsBelowOnePointTwoAreRefused) {
  const auto server = Serve(Options("server", false));
  EXPECT_EQ(NegotiatedVersion(server->target(), TLS1_3_VERSION),
            TLS1_3_VERSION);
  EXPECT_EQ(NegotiatedVersion(server->target(), TLS1_2_VERSION),
            TLS1_2_VERSION);
  const uint64_t before = Refused(TlsRefusal::kVersion);
  EXPECT_EQ(NegotiatedVersion(server->target(), TLS1_1_VERSION), 0);
  ExpectRefused(TlsRefusal::kVersion, before);
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
