#include "router/core/access_log.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using ::testing::HasSubstr;

TEST(AccessLogTest, ALineSaysWhoHowLongHowOftenAndInWhichTrace) {
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

}  // namespace
}  // namespace kvasir::router
