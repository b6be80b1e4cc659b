#include "router/core/access_log.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using ::testing::HasSubstr;

TEST(AccessLogTest, EachLogLineHasTheTenantTheTimesTheAttemptsAndTheTraceId) {
  AccessRecord record;
  record.request_id = "id-1";
  record.tenant = "red";
  record.attempts = 2;
  record.time_to_first_token = absl::Milliseconds(12);
  record.duration = absl::Milliseconds(40);
  record.finish_reason = "length";
  record.traceparent = "00-abc";
  ::testing::internal::CaptureStderr();
  LogAccess().Write(record);
  const std::string line = ::testing::internal::GetCapturedStderr();
  for (const char* field :
       {"request_id=id-1", "tenant=red", "attempts=2", "ttft_ms=12",
        "duration_ms=40", "finish_reason=length", "traceparent=00-abc",
        "queue_ms=-1"}) {
    EXPECT_THAT(line, HasSubstr(field));
  }
}

TEST(AccessLogTest, EveryRefusalOfAKnownTenantIsLoggedWithItsReason) {
  AccessRecord record;
  record.tenant = "red";
  record.status = absl::UnauthenticatedError("the token expired then");
  record.reason = "expired";
  LogAccess log;
  for (int i = 0; i < 3; ++i) {
    ::testing::internal::CaptureStderr();
    log.Write(record);
    const std::string line = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(line, HasSubstr("tenant=red"))
        << "a known tenant: every refusal is logged";
    EXPECT_THAT(line, HasSubstr("reason=expired"));
  }
}

TEST(AccessLogTest, UnknownCallersGetOneLogLineAMinuteWithoutTheirText) {
  base::ManualClock clock{absl::FromUnixSeconds(1'800'000'000)};
  LogAccess log(clock);
  AccessRecord record;
  record.facade = "vllm";
  record.peer = "ipv4:1.2.3.4:5";
  record.client_request_id = "his-words-1";
  record.traceparent = "his-words-2";
  record.model = "his-words-3";
  record.status = absl::UnauthenticatedError("no credentials");
  record.reason = "no_credentials";
  const auto write = [&] {
    ::testing::internal::CaptureStderr();
    log.Write(record);
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string first = write();
  for (const char* field :
       {"facade=vllm", "peer=ipv4:1.2.3.4:5", "reason=no_credentials",
        "status=UNAUTHENTICATED"}) {
    EXPECT_THAT(first, HasSubstr(field));
  }
  EXPECT_THAT(first, ::testing::Not(HasSubstr("his-words")));
  EXPECT_EQ(write(), "");
  EXPECT_EQ(write(), "");
  record.reason = "unknown";
  EXPECT_THAT(write(), HasSubstr("reason=unknown"));
  clock.Advance(absl::Minutes(1));
  record.reason = "no_credentials";
  EXPECT_THAT(write(), HasSubstr("since_last_line=2"));
}

}  // namespace
}  // namespace kvasir::router
