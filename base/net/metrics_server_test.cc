#include "base/net/metrics_server.h"

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

TEST(MetricsServerTest, StopsWithoutWaitingForThePollOfItsLibrary) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto server,
                              MetricsServer::Start("127.0.0.1", 0));
  absl::SleepFor(absl::Milliseconds(100));  // it polls now, for two seconds
  const absl::Time begin = absl::Now();
  server.reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
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
