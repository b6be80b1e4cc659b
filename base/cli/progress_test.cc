#include "base/cli/progress.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
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

// Returns whether this system has terminals: a root file system without
// /dev/pts has none.
bool HasTerminals() {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal >= 0) close(terminal);
  return terminal >= 0;
}

// Runs `use` with a terminal as standard error, and returns what it writes.
std::string OnATerminal(const std::function<void()>& use) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_GE(terminal, 0);
  EXPECT_EQ(grantpt(terminal) + unlockpt(terminal), 0);
  const int other_end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  EXPECT_GE(other_end, 0);
  const int before = dup(STDERR_FILENO);
  dup2(other_end, STDERR_FILENO);
  use();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  std::string text;
  pollfd ready{.fd = terminal, .events = POLLIN, .revents = 0};
  while (poll(&ready, 1, 100) > 0 && (ready.revents & POLLIN) != 0) {
    char buffer[512];
    const ssize_t size = read(terminal, buffer, sizeof buffer);
    if (size <= 0) break;
    text.append(buffer, static_cast<size_t>(size));
  }
  close(other_end);
  close(terminal);
  return text;
}

TEST(ProgressTest, TheProgressLineIsRemovedFromATerminalAtTheEnd) {
  if (!HasTerminals()) GTEST_SKIP() << "no pseudo-terminals here";
  const std::string text = OnATerminal([] {
    std::fputs("row 1\n", stderr);
    {
      Progress progress("work", 2, "MB", true);
      progress.Update(1);
      progress.Update(2);
    }
    std::fputs("row 2\n", stderr);
  });
  // The terminal turns "\n" into "\r\n"; "\x1b[K" clears the line to its end.
  EXPECT_EQ(text,
            "row 1\r\n"
            "\r\x1b[Kwork: 1/2 MB\r\x1b[Kwork: 2/2 MB\r\x1b[K"
            "row 2\r\n");
}

TEST(ProgressTest,
     WorkDoneBeforeTheFirstUpdateDoesNotAffectTheEstimateOfTheTimeLeft) {
  const absl::Time start = absl::FromUnixSeconds(1000);
  TimeLeft time_left;
  // The duration of the first unit is unknown, because See is called only
  // after it.
  time_left.See(start, 1);
  EXPECT_EQ(time_left.Estimate(20), std::nullopt);
  time_left.See(start + absl::Milliseconds(100), 2);
  EXPECT_EQ(time_left.Estimate(20), std::nullopt);
  time_left.See(start + absl::Seconds(4), 2);
  EXPECT_EQ(time_left.Estimate(20), absl::Seconds(72));
  time_left.See(start + absl::Seconds(36), 10);
  EXPECT_EQ(time_left.Estimate(20), absl::Seconds(40));
  time_left.See(start + absl::Seconds(80), 20);
  EXPECT_EQ(time_left.Estimate(20), std::nullopt);
}

TEST(ProgressTest,
     ThereIsNoEstimateOfTheTimeLeftIfTheTotalAmountOfWorkIsUnknown) {
  TimeLeft time_left;
  time_left.See(absl::FromUnixSeconds(0), 1);
  time_left.See(absl::FromUnixSeconds(9), 5);
  EXPECT_EQ(time_left.Estimate(0), std::nullopt);
}

TEST(ProgressTest, ManyUpdatesInAShortTimePrintOnlyTwoLines) {
  // The first and the last update print a line.
  EXPECT_EQ(LinesOf(
                [](Progress* progress) {
                  for (int i = 0; i <= 50; ++i) progress->Update(i);
                },
                50),
            2);
}

TEST(ProgressTest, ManyUpdatesThatReportNoProgressPrintOnlyOneLine) {
  EXPECT_EQ(LinesOf(
                [](Progress* progress) {
                  for (int i = 0; i < 50; ++i) progress->Update(0);
                },
                0),
            1);
}

}  // namespace
}  // namespace kvasir::cli
