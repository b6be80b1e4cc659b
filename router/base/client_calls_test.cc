#include "router/base/client_calls.h"

#include <memory>

#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

TEST(ClientCallsTest, TheQuietTimeBeginsWhenTheLastOpenCallEnds) {
  base::ManualClock clock;
  const auto calls = std::make_shared<ClientCalls>(&clock);
  EXPECT_TRUE(calls->QuietFor(absl::Hours(1)));
  auto first = std::make_unique<ClientCall>(calls);
  auto second = std::make_unique<ClientCall>(calls);
  EXPECT_EQ(calls->open(), 2u);
  first.reset();
  clock.Advance(absl::Seconds(9));
  EXPECT_FALSE(calls->QuietFor(absl::Seconds(1)));
  second.reset();
  EXPECT_EQ(calls->open(), 0u);
  EXPECT_FALSE(calls->QuietFor(absl::Seconds(1)));
  clock.Advance(absl::Seconds(1));
  EXPECT_TRUE(calls->QuietFor(absl::Seconds(1)));
}

}  // namespace
}  // namespace kvasir::router
