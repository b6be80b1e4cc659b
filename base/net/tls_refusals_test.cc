#include "base/net/tls_refusals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/clock.h"

namespace kvasir::base {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Failed(const std::string& what) {
  return "Handshake failed with fatal error SSL_ERROR_SSL: error:0A0000C7:SSL "
         "routines::" +
         what + ".";
}

// The log lines are copied from gRPC 1.51; test_tls.py provokes them by
// real handshakes.
TEST(TlsRefusalsTest, LogLinesOfGrpcAboutFailedHandshakesAreClassifiedByCause) {
  EXPECT_EQ(TlsRefusalOf(Failed("peer did not return a certificate")),
            TlsRefusal::kNoCertificate);
  EXPECT_EQ(TlsRefusalOf(Failed("certificate verify failed")),
            TlsRefusal::kCertificate);
  EXPECT_EQ(TlsRefusalOf(Failed("wrong version number")), TlsRefusal::kNoTls);
  EXPECT_EQ(TlsRefusalOf(Failed("http request")), TlsRefusal::kNoTls);
  EXPECT_EQ(TlsRefusalOf(Failed("unsupported protocol")), TlsRefusal::kVersion);
  EXPECT_EQ(TlsRefusalOf(Failed("tlsv1 alert unknown ca")), TlsRefusal::kPeer);
  EXPECT_EQ(TlsRefusalOf(Failed("no shared cipher")), TlsRefusal::kOther);
  EXPECT_EQ(TlsRefusalOf("accept4: Too many open files"), std::nullopt);
}

TEST(TlsRefusalsTest,
     EveryRefusedHandshakeIsCountedButOnlyOnePerMinuteIsLogged) {
  ManualClock clock;
  TlsRefusals refusals(clock);
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 5; ++i) refusals.Add(TlsRefusal::kNames, "nobody");
  EXPECT_TRUE(refusals.AddGrpcLine(Failed("certificate verify failed")));
  EXPECT_FALSE(refusals.AddGrpcLine("something else"));
  // This line is recognized but not counted, because gRPC logs it even if
  // another name of the certificate is allowed.
  EXPECT_TRUE(refusals.AddGrpcLine("No match found for server name: x."));
  clock.Advance(absl::Seconds(59));
  refusals.Add(TlsRefusal::kNames, "not in the log");
  clock.Advance(absl::Seconds(1));
  refusals.Add(TlsRefusal::kNames, "a minute later");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(refusals.count(TlsRefusal::kNames), 7u);
  EXPECT_EQ(refusals.count(TlsRefusal::kCertificate), 1u);
  EXPECT_EQ(refusals.count(TlsRefusal::kOther), 0u);
  const size_t first = log.find("nobody");
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("nobody", first + 1), std::string::npos) << log;
  EXPECT_THAT(log, HasSubstr("certificate verify failed"));
  EXPECT_THAT(log, Not(HasSubstr("not in the log")));
  EXPECT_THAT(log, HasSubstr("a minute later"));
  EXPECT_THAT(log, HasSubstr("since_last_line=5"));
}

TEST(TlsRefusalsTest, TheMetricOfEveryRefusalCauseIsExportedFromTheStart) {
  TlsRefusals refusals;
  refusals.Add(TlsRefusal::kNoTls, "");
  std::map<std::string, double> values;
  for (const auto& family : refusals.Collect()) {
    EXPECT_EQ(family.name, "kvasir_tls_handshakes_refused_total");
    for (const auto& metric : family.metric) {
      values[metric.label.at(0).value] = metric.counter.value;
    }
  }
  EXPECT_EQ(values, (std::map<std::string, double>{{"no_certificate", 0},
                                                   {"certificate", 0},
                                                   {"names", 0},
                                                   {"peer", 0},
                                                   {"no_tls", 1},
                                                   {"version", 0},
                                                   {"other", 0}}));
}

}  // namespace
}  // namespace kvasir::base
