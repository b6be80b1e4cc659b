#include "base/net/metrics_server.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/net/listen_address.h"
#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsServerTest, ATakenPortNamesItsFlagAndNotTheHost) {
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

TEST(MetricsServerTest, AnAddressThatIsNotOursNamesTheHostAndNotThePort) {
  EXPECT_THAT(MetricsServer::Start("192.0.2.1", 0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("--host 192.0.2.1"),
                             HasSubstr("Cannot assign requested address"),
                             Not(HasSubstr("--metrics-port")))));
}

TEST(MetricsServerTest, ANameThatDoesNotResolveNamesTheHostAndNotThePort) {
  EXPECT_THAT(MetricsServer::Start("no such host", 0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("--host no such host"),
                             Not(HasSubstr("--metrics-port")))));
}

// Knocks come 2 ms apart: an end by the library's poll of two seconds would
// follow some hundred of them.
TEST(MetricsServerTest, AKnockEndsThePollOfItsLibrary) {
  for (const char* host : {"127.0.0.1", "0.0.0.0", "localhost"}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                                MetricsServer::Start(host, 0));
    absl::SleepFor(absl::Milliseconds(100));  // it polls now
    const int knocks = server->Stop();
    EXPECT_GE(knocks, 1) << host;
    EXPECT_LT(knocks, 500) << host;
    EXPECT_EQ(server->Stop(), 0);
  }
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

// The status of an answer, "200"; empty where none comes.
std::string StatusOf(int port, const std::string& path) {
  const int fd = ConnectTo(port);
  // Far below what idle connections kept a scrape waiting, far above what they
  // may.
  const timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n");
  EXPECT_EQ(write(fd, request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  char status[12] = {};
  const ssize_t got = recv(fd, status, sizeof(status), MSG_WAITALL);
  close(fd);
  return got == 12 ? std::string(status + 9, 3) : "";
}

// Two connections without a request once kept every scrape waiting for 22 s.
TEST(MetricsServerTest, IdleConnectionsDoNotKeepAScrapeWaiting) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  // More than there are threads.
  std::vector<int> idle;
  for (int i = 0; i < 12; ++i) idle.push_back(ConnectTo(server->port()));
  EXPECT_EQ(StatusOf(server->port(), "/metrics"), "200");
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  for (const int fd : idle) close(fd);
}

// Clients that begin requests and do not end them kept scrapes waiting: eight of
// them, for a second each, one after the other.
TEST(MetricsServerTest, HalfSentRequestsDoNotKeepAScrapeWaiting) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  std::vector<int> half;
  const std::string begin = "GET /metrics HTTP/1.1\r\nHost: x\r\nX-";
  for (int i = 0; i < 100; ++i) {
    half.push_back(ConnectTo(server->port()));
    EXPECT_EQ(write(half.back(), begin.data(), begin.size()),
              static_cast<ssize_t>(begin.size()));
  }
  const absl::Time start = absl::Now();
  EXPECT_EQ(StatusOf(server->port(), "/metrics"), "200");
  std::fprintf(stderr, "took %s\n", absl::FormatDuration(absl::Now()-start).c_str());
  for (const int fd : half) close(fd);
}

// A byte now and then does not make a connection's time longer.
TEST(MetricsServerTest, ARequestThatComesByDripsIsEnded) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  const int fd = ConnectTo(server->port());
  const std::string begin = "GET /metrics HTTP/1.1\r\nX-Long: ";
  send(fd, begin.data(), begin.size(), MSG_NOSIGNAL);
  const absl::Time start = absl::Now();
  int sent = 0;
  while (absl::Now() - start < absl::Seconds(20) && send(fd, "x", 1, MSG_NOSIGNAL) == 1) {
    char byte;
    if (recv(fd, &byte, 1, MSG_DONTWAIT) == 0) break;
    ++sent;
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_LT(sent, 100);
  std::fprintf(stderr, "took %d %s\n", sent, absl::FormatDuration(absl::Now()-start).c_str());
  close(fd);
}

TEST(MetricsServerTest, HealthzSaysWhatItWasTold) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  server->SetReady(true);
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "200");
  server->SetReady(false);
  EXPECT_EQ(StatusOf(server->port(), "/healthz"), "503");
  EXPECT_EQ(StatusOf(server->port(), "/elsewhere"), "404");
}

TEST(ListenAddressTest, AddressesOfAHostAreCountedByFamily) {
  EXPECT_EQ(CountAddresses("127.0.0.1"), 1);
  EXPECT_EQ(CountAddresses("no such host"), 0);
}

TEST(ListenAddressTest, AKnockNeedsAnAddress) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  const Knocker knocker("127.0.0.1", server->port());
  EXPECT_TRUE(knocker.Knock());
  EXPECT_FALSE(Knocker("no such host", 1).Knock());
}

// Served, or refused for the reason that holds: never as a taken port.
TEST(MetricsServerTest, AnIpv6AddressIsServedOrRefusedAsSuch) {
  if (ProbeListen("::1", 0).with != ListenTrouble::With::kNothing) {
    GTEST_SKIP() << "no IPv6 here";
  }
  const auto server = MetricsServer::Start("::1", 0);
  if (server.ok()) {
    EXPECT_GT((*server)->port(), 0);
    return;
  }
  EXPECT_THAT(server, StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("[::1]:0"), HasSubstr("IPv6"),
                                     HasSubstr("--host"))));
}

TEST(ListenAddressTest, Ipv6AddressesGoIntoBrackets) {
  EXPECT_EQ(JoinHostPort("::1", 80), "[::1]:80");
  EXPECT_EQ(JoinHostPort("[::1]", 80), "[::1]:80");
  EXPECT_EQ(JoinHostPort("localhost", 80), "localhost:80");
}

}  // namespace
}  // namespace kvasir::base
