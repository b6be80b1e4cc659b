#include "base/log_limit.h"

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

TEST(LogLimitTest,
     AllowsOneLogLinePerMinuteForEachCauseAndCountsTheSuppressedLines) {
  ManualClock clock{absl::FromUnixSeconds(1'800'000'000)};
  LogLimit limit(clock);
  EXPECT_EQ(limit.Take("a"), 0);
  EXPECT_EQ(limit.Take("a"), std::nullopt);
  EXPECT_EQ(limit.Take("b"), 0) << "another cause";
  clock.Advance(absl::Seconds(59));
  EXPECT_EQ(limit.Take("a"), std::nullopt);
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(limit.Take("a"), 2);
  EXPECT_EQ(limit.Take("a"), std::nullopt);
  clock.Advance(absl::Hours(1));
  EXPECT_EQ(limit.Take("a"), 1);
}

}  // namespace
}  // namespace kvasir::base
