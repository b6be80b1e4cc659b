#include "cli/progress.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

int64_t LinesOf(const std::function<void(Progress*)>& use, int64_t total) {
  ::testing::internal::CaptureStderr();
  {
    Progress progress("work", total, "MB", true);
    use(&progress);
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  return std::count(text.begin(), text.end(), '\n');
}

TEST(ProgressTest, ManyUpdatesAtOnceAreAFewLines) {
  // One at once, one at the end.
  EXPECT_EQ(LinesOf(
                [](Progress* progress) {
                  for (int i = 0; i <= 50; ++i) progress->Update(i);
                },
                50),
            2);
}

TEST(ProgressTest, WorkThatRoundsToNothingIsOneLine) {
  EXPECT_EQ(LinesOf(
                [](Progress* progress) {
                  for (int i = 0; i < 50; ++i) progress->Update(0);
                },
                0),
            1);
}

}  // namespace
}  // namespace kvasir::cli
