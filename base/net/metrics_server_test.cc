#include "base/net/metrics_server.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/net/listen_address.h"
#include "base/status_matchers.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsServerTest, TheErrorForAPortInUseNamesTheMetricsPortFlag) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto first,
                              MetricsServer::Start("127.0.0.1", 0));
  EXPECT_GT(first->port(), 0);
  EXPECT_THAT(
      MetricsServer::Start("127.0.0.1", first->port()),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr(absl::StrCat("127.0.0.1:", first->port())),
                     HasSubstr("Address already in use"),
                     HasSubstr("--metrics-port"), Not(HasSubstr("--host")))));
}

TEST(MetricsServerTest,
     TheErrorForAListenAddressOfAnotherMachineNamesTheHostFlag) {
  EXPECT_THAT(
      MetricsServer::Start("192.0.2.1", 0),
      StatusIs(
          absl::StatusCode::kFailedPrecondition,
          AllOf(HasSubstr("use --host to choose a host other than 192.0.2.1"),
                HasSubstr("Cannot assign requested address"),
                Not(HasSubstr("--metrics-port")))));
}

TEST(MetricsServerTest,
     TheErrorForAHostNameThatDoesNotResolveNamesTheHostFlag) {
  EXPECT_THAT(
      MetricsServer::Start("no such host", 0),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(
                         "use --host to choose a host other than no such host"),
                     Not(HasSubstr("--metrics-port")))));
}

int ConnectTo(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  return fd;
}

// Waits for the server to close the connection; returns false after 10 s.
bool IsClosed(int fd) {
  const timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  char byte;
  const ssize_t got = recv(fd, &byte, 1, 0);
  return got == 0 || (got < 0 && errno == ECONNRESET);
}

// Returns the status of an answer ("200"), or "" if there is none.
std::string StatusOf(int port, const std::string& path,
                     const std::string& method = "GET") {
  const int fd = ConnectTo(port);
  // The limit is well below 22 s, the time by which idle connections once
  // delayed an answer.
  const timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const std::string request =
      absl::StrCat(method, " ", path, " HTTP/1.0\r\n\r\n");
  EXPECT_EQ(write(fd, request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  char status[12] = {};
  const ssize_t got = recv(fd, status, sizeof(status), MSG_WAITALL);
  close(fd);
  return got == 12 ? std::string(status + 9, 3) : "";
}

// Regression test: two connections without a request once delayed every scrape
// by 22 s.
TEST(MetricsServerTest, IdleConnectionsDoNotKeepAScrapeWaiting) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  // prometheus-cpp's server, which had this bug, ran with at most 8 threads.
  std::vector<int> idle;
  for (int i = 0; i < 12; ++i) idle.push_back(ConnectTo(server->port()));
  EXPECT_EQ(StatusOf(server->port(), "/metrics"), "200");
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  for (const int fd : idle) close(fd);
}

// Regression test: a hundred half-sent requests once delayed every scrape by
// more than ten seconds.
TEST(MetricsServerTest, HalfSentRequestsDoNotKeepAScrapeWaiting) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  const std::string begin = "GET /metrics HTTP/1.1\r\nHost: x\r\nX-";
  std::vector<int> half;
  for (int i = 0; i < 100; ++i) {
    half.push_back(ConnectTo(server->port()));
    EXPECT_EQ(send(half.back(), begin.data(), begin.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(begin.size()));
  }
  EXPECT_EQ(StatusOf(server->port(), "/metrics"), "200");
  // There were more connections than may be open, so the oldest are closed.
  EXPECT_TRUE(IsClosed(half.front()));
  for (const int fd : half) close(fd);
}

// The time limit is for the whole request, so each further byte does not
// extend it.
TEST(MetricsServerTest, AConnectionThatSendsItsRequestByteByByteIsClosed) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  const int fd = ConnectTo(server->port());
  const std::string begin = "GET /metrics HTTP/1.1\r\nX-Long: ";
  int sent = 0;
  // Send for 20 s in total, far more than a request may take.
  while (sent < 200 &&
         send(fd, &begin[0], sent == 0 ? begin.size() : 1, MSG_NOSIGNAL) > 0) {
    ++sent;
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_LT(sent, 200);
  close(fd);
}

TEST(MetricsServerTest, AConnectionWhoseRequestIsTooLongIsClosed) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  const int fd = ConnectTo(server->port());
  const std::string request = "GET /" + std::string(64 << 10, 'x');
  send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  EXPECT_TRUE(IsClosed(fd));
  close(fd);
}

TEST(MetricsServerTest, ARequestThatArrivesInPiecesGetsACompleteResponse) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  auto large = std::make_shared<prometheus::Registry>();
  prometheus::Family<prometheus::Gauge>& family = prometheus::BuildGauge()
                                                      .Name("large")
                                                      .Help("Of many lines")
                                                      .Register(*large);
  for (int i = 0; i < 50000; ++i) family.Add({{"line", absl::StrCat(i)}});
  server->Add(large);
  const int fd = ConnectTo(server->port());
  for (const std::string piece :
       {"GET /met", "rics HTTP/1.1\r\n", "\r", "\n"}) {
    EXPECT_EQ(send(fd, piece.data(), piece.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(piece.size()));
    absl::SleepFor(absl::Milliseconds(5));
  }
  std::string answer;
  char bytes[4096];
  for (ssize_t got; (got = recv(fd, bytes, sizeof(bytes), 0)) > 0;) {
    answer.append(bytes, static_cast<size_t>(got));
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n") + 4;
  EXPECT_THAT(answer.substr(0, body),
              AllOf(HasSubstr("HTTP/1.1 200 OK\r\n"),
                    HasSubstr(absl::StrCat(
                        "Content-Length: ", answer.size() - body, "\r\n"))));
  EXPECT_THAT(answer, HasSubstr("large{line=\"49999\"} 0"));
  EXPECT_THAT(answer, HasSubstr("exposer_scrapes_total 0"));
}

TEST(MetricsServerTest, HealthzReportsTheStateThatSetReadyHasSet) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  server->SetReady(true);
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "200");
  server->SetReady(false);
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  EXPECT_EQ(StatusOf(server->port(), "/healthz?verbose"), "503");
  EXPECT_EQ(StatusOf(server->port(), "/elsewhere"), "404");
}

// Returns everything that the server sends before it closes the connection.
std::string AnswerTo(int port, const std::string& method,
                     const std::string& path) {
  const int fd = ConnectTo(port);
  const timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const std::string request =
      absl::StrCat(method, " ", path, " HTTP/1.1\r\n\r\n");
  EXPECT_EQ(write(fd, request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  char bytes[4096];
  for (ssize_t got; (got = recv(fd, bytes, sizeof(bytes), 0)) > 0;) {
    answer.append(bytes, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

// Regression test: `wget --spider` was once refused.
TEST(MetricsServerTest, AHeadRequestGetsTheHeadersOfTheAnswerToGet) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  for (const bool ready : {false, true}) {
    server->SetReady(ready);
    for (const char* path : {"/healthz", "/healthz?verbose", "/elsewhere"}) {
      const std::string get = AnswerTo(server->port(), "GET", path);
      const size_t head = get.find("\r\n\r\n") + 4;
      EXPECT_LT(head, get.size());
      EXPECT_EQ(AnswerTo(server->port(), "HEAD", path), get.substr(0, head));
    }
  }
  const std::string head = AnswerTo(server->port(), "HEAD", "/metrics");
  EXPECT_THAT(head, testing::StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(head, testing::EndsWith("\r\n\r\n"));
  EXPECT_THAT(head, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(head, HasSubstr("Content-Length: "));
  EXPECT_EQ(head.find("\r\n\r\n") + 4, head.size());
}

TEST(MetricsServerTest, ARefusalOfAnotherMethodNamesTheAllowedMethods) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  for (const char* method :
       {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get"}) {
    for (const char* path : {"/metrics", "/healthz"}) {
      EXPECT_THAT(AnswerTo(server->port(), method, path),
                  AllOf(testing::StartsWith("HTTP/1.1 405 "),
                        HasSubstr("\r\nAllow: GET, HEAD\r\n"),
                        testing::EndsWith("\r\n\r\nuse GET or HEAD\n")));
    }
  }
}

TEST(ListenAddressTest,
     CountAddressesReturnsOneForLoopbackAndZeroForAnUnknownHost) {
  EXPECT_EQ(CountAddresses("127.0.0.1"), 1);
  EXPECT_EQ(CountAddresses("no such host"), 0);
}

TEST(MetricsServerTest, ServesMetricsOnAnIpv6Address) {
  if (ProbeListen("::1", 0).with != ListenTrouble::With::kNothing) {
    GTEST_SKIP() << "no IPv6 here";
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("::1", 0));
  EXPECT_GT(server->port(), 0);
}

TEST(ListenAddressTest, AnIpv6AddressIsWrittenInBracketsBeforeThePort) {
  EXPECT_EQ(JoinHostPort("::1", 80), "[::1]:80");
  EXPECT_EQ(JoinHostPort("[::1]", 80), "[::1]:80");
  EXPECT_EQ(JoinHostPort("localhost", 80), "localhost:80");
}

}  // namespace
}  // namespace kvasir::base
