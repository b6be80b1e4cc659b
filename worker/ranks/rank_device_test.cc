// Tests a rank on the device that KVASIR_TEST_DEVICE names.
#include <cstdlib>
#include <memory>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

TEST(RankDeviceDeathTest, TheHostCanReadPagesUnlessTheTestDeviceIsStrict) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank, MakeTinyRank(TinyOptions()));
  const auto& layers = rank->executor().arenas().layers();
  ASSERT_FALSE(layers.empty());
  const volatile char* const page =
      static_cast<const char*>(layers[0].key[0].latents.arena.device_address());
  ASSERT_NE(page, nullptr);
  if (IsTestDeviceStrict()) {
    EXPECT_DEATH((void)*page, "");
  } else {
    EXPECT_EQ(*page, 0);
  }
}

TEST(RankDeviceDeathTest, TheTestEndsIfItsEnvironmentNamesAnUnknownDevice) {
  EXPECT_DEATH(
      {
        ::setenv("KVASIR_TEST_DEVICE", "strickt", 1);
        (void)TinyOptions();
      },
      "check failed: name");
}

}  // namespace
}  // namespace kvasir::worker
