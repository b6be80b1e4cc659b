// If this test program is called with `rank WHAT --join-fd=3`, it acts as
// a child.
#include "server/ranks/local_ranks.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kLost = 9;

std::string FileText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

LocalRanks::Child ChildThat(std::vector<std::string> does, int rank = 1) {
  does.insert(does.begin(), "rank");
  return {.rank = rank, .arguments = std::move(does)};
}

// Returns true if the process does not exist, or has ended but is still in the
// process table (a zombie).
bool IsGone(pid_t pid) {
  const std::string stat = FileText(absl::StrCat("/proc/", pid, "/stat"));
  return stat.empty() || absl::StrContains(stat, ") Z ");
}

bool IsGoneWithin(pid_t pid, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!IsGone(pid)) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

pid_t WaitForPid(const std::string& path) {
  for (int i = 0; i < 1000; ++i) {
    const int pid = std::atoi(FileText(path).c_str());
    if (pid > 0) return pid;
    absl::SleepFor(absl::Milliseconds(10));
  }
  ADD_FAILURE() << path << ": no pid";
  return 0;
}

class LocalRanksTest : public ::testing::Test {
 protected:
  const base::TempFolder folder_;
};

// Starts the children and returns the first failure that is reported.
absl::Status FailureOf(std::vector<LocalRanks::Child> children) {
  auto ranks = LocalRanks::Start(children);
  if (!ranks.ok()) return ranks.status();
  absl::Notification failure_reported;
  absl::Status failure;
  const absl::Status sent = (*ranks)->Send(
      {.leader = "127.0.0.1:1", .secret = "s"}, [&](const absl::Status& why) {
        if (failure_reported.HasBeenNotified()) return;
        failure = why;
        failure_reported.Notify();
      });
  if (!sent.ok()) return sent;
  failure_reported.WaitForNotificationWithTimeout(absl::Seconds(20));
  (*ranks)->StopReporting();
  return failure;
}

TEST_F(LocalRanksTest, ChildProcessesReceiveTheAddressOfTheLeaderAndTheirRank) {
  std::vector<LocalRanks::Child> children;
  for (int i = 1; i <= 3; ++i) {
    children.push_back(
        ChildThat({"write", folder_.File(absl::StrCat("written", i))}, i));
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ranks, LocalRanks::Start(children));
  bool failed = false;
  KVASIR_ASSERT_OK(ranks->Send({.leader = "10.0.0.1:8200", .secret = "hush"},
                               [&](const absl::Status&) { failed = true; }));
  ASSERT_TRUE(ranks->WaitEnded(absl::Seconds(20)));
  ranks->StopReporting();
  EXPECT_FALSE(failed);
  for (int i = 1; i <= 3; ++i) {
    EXPECT_EQ(FileText(folder_.File(absl::StrCat("written", i))),
              absl::StrCat("10.0.0.1:8200 hush ", i, " of 4"));
  }
}

// Regression test: a child once inherited its parent's KVASIR_READY_FILE and
// overwrote the file.
TEST_F(LocalRanksTest, AChildProcessDoesNotInheritKvasirEnvironmentVariables) {
  setenv("KVASIR_READY_FILE", "/nowhere", 1);
  setenv("OTHERS", "stay", 1);
  const std::string path = folder_.File("environment");
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto ranks, LocalRanks::Start({ChildThat({"environment", path})}));
  KVASIR_ASSERT_OK(ranks->Send({.leader = "x:1"}, nullptr));
  ASSERT_TRUE(ranks->WaitEnded(absl::Seconds(20)));
  EXPECT_EQ(FileText(path), "none stay");
  unsetenv("KVASIR_READY_FILE");
}

// Regression test: pgrep and top once showed the name "exe".
TEST_F(LocalRanksTest, AChildProcessHasTheNameOfTheProgram) {
  const std::string path = folder_.File("name");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ranks,
                              LocalRanks::Start({ChildThat({"sleep", path})}));
  KVASIR_ASSERT_OK(ranks->Send({.leader = "x:1"}, nullptr));
  EXPECT_EQ(FileText(absl::StrCat("/proc/", WaitForPid(path), "/comm")),
            "kvasir\n");
}

// Regression test: a leader once ended with success although ranks had died
// during its drain.
TEST_F(LocalRanksTest, TheFailureOfAChildProcessCanStillBeQueriedLater) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ranks,
                              LocalRanks::Start({ChildThat({"exit", "3"}, 2)}));
  KVASIR_EXPECT_OK(ranks->failure());
  KVASIR_ASSERT_OK(ranks->Send({.leader = "x:1"}, nullptr));
  ASSERT_TRUE(ranks->WaitEnded(absl::Seconds(20)));
  EXPECT_THAT(ranks->failure(), StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("exit code 3")));
}

TEST_F(LocalRanksTest,
       ChildProcessesThatAreKilledInEndAreNotReportedAsFailures) {
  const std::string path = folder_.File("ended");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ranks,
                              LocalRanks::Start({ChildThat({"stop", path})}));
  bool failed = false;
  KVASIR_ASSERT_OK(ranks->Send({.leader = "x:1"},
                               [&](const absl::Status&) { failed = true; }));
  const pid_t pid = WaitForPid(path);
  ranks->End();
  EXPECT_TRUE(IsGoneWithin(pid, absl::Seconds(5)));
  ASSERT_TRUE(ranks->WaitEnded(absl::Seconds(5)));
  KVASIR_EXPECT_OK(ranks->failure());
  EXPECT_FALSE(failed);
}

TEST_F(LocalRanksTest, TheFailureOfAChildProcessIsReported) {
  EXPECT_THAT(FailureOf({ChildThat({"exit", "3"}, 2)}),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("rank 2 (pid "),
                             HasSubstr("ended with exit code 3"))));
  EXPECT_THAT(FailureOf({ChildThat({"sleep", folder_.File("other")}, 1),
                         ChildThat({"kill"}, 2)}),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("rank 2 (pid "),
                             HasSubstr("was killed by signal 9"))));
}

// Regression test: if a child failed while its parent was loading, the parent
// once waited for minutes.
TEST_F(LocalRanksTest, TheFailureOfAChildProcessBeforeSendIsReportedBySend) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto ranks,
                              LocalRanks::Start({ChildThat({"die"})}));
  ASSERT_TRUE(ranks->WaitEnded(absl::Seconds(20)));
  EXPECT_THAT(ranks->Send({.leader = "x:1"}, nullptr),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("ended with exit code 7")));
}

TEST_F(LocalRanksTest, NoChildProcessOutlivesTheLocalRanksObject) {
  for (const char* what : {"sleep", "stop", "ignore"}) {
    const std::string path = folder_.File(what);
    KVASIR_ASSERT_OK_AND_ASSIGN(auto ranks,
                                LocalRanks::Start({ChildThat({what, path})}));
    KVASIR_ASSERT_OK(ranks->Send({.leader = "x:1"}, nullptr));
    const pid_t pid = WaitForPid(path);
    ASSERT_FALSE(IsGone(pid)) << what;
    ranks = nullptr;
    EXPECT_TRUE(IsGone(pid)) << what;
  }
}

TEST_F(LocalRanksTest,
       AChildProcessEndsIfItsParentGivesUpBeforeSendingJoinData) {
  const std::string path = folder_.File("untold");
  KVASIR_ASSERT_OK_AND_ASSIGN(auto ranks,
                              LocalRanks::Start({ChildThat({"sleep", path})}));
  const absl::Time start = absl::Now();
  ranks = nullptr;
  EXPECT_EQ(FileText(path), "");
  // End kills children after two seconds, so the child has ended by itself.
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
}

TEST_F(LocalRanksTest, AChildProcessEndsIfItsParentIsKilled) {
  for (const char* what : {"sleep", "stop", "ignore"}) {
    const std::string path = folder_.File(absl::StrCat("orphan_", what));
    std::string self = "/proc/self/exe";
    std::vector<std::string> words = {self, "parent", what, path};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t parent = 0;
    ASSERT_EQ(posix_spawn(&parent, self.c_str(), nullptr, nullptr,
                          arguments.data(), environ),
              0);
    const pid_t child = WaitForPid(path);
    ASSERT_FALSE(IsGone(child));
    kill(parent, SIGKILL);
    waitpid(parent, nullptr, 0);
    EXPECT_TRUE(IsGoneWithin(child, absl::Seconds(5))) << what;
  }
}

TEST_F(LocalRanksTest, InvalidJoinDataOfAParentProcessIsRefused) {
  for (const char* text :
       {"", "{", "[]", R"({"leader":"x:1"})", R"({"parent":1,"leader":1})",
        R"({"parent":"1","leader":"x:1","secret":"","local_count":2})"}) {
    int fds[2];
    ASSERT_EQ(pipe(fds), 0);
    ASSERT_EQ(write(fds[1], text, strlen(text)),
              static_cast<ssize_t>(strlen(text)));
    close(fds[1]);
    EXPECT_THAT(LocalRanks::ReadJoinInfo(fds[0]).status(),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("that started this rank is gone")))
        << text;
  }
  EXPECT_THAT(LocalRanks::ReadJoinInfo(987).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("--join-fd")));
}

// Runs in a child process. Returns its exit code.
int RunChild(const std::string& does, const std::string& argument) {
  if (does == "die") return 7;
  const auto info = LocalRanks::ReadJoinInfo(3);
  if (!info.ok()) return kLost;
  if (does == "exit") return std::atoi(argument.c_str());
  if (does == "kill") kill(getpid(), SIGKILL);
  if (does == "write") {
    std::ofstream(argument) << info->leader << " " << info->secret << " "
                            << info->local.index << " of " << info->local.count;
    return 0;
  }
  if (does == "environment") {
    const char* const ours = getenv("KVASIR_READY_FILE");
    std::ofstream(argument)
        << (ours == nullptr ? "none" : ours) << " " << getenv("OTHERS");
    return 0;
  }
  if (does == "ignore") signal(SIGTERM, SIG_IGN);
  // Write to another name first, so that the renamed file is always complete.
  std::ofstream(argument + ".part") << getpid();
  std::filesystem::rename(argument + ".part", argument);
  if (does == "stop") kill(getpid(), SIGSTOP);
  absl::SleepFor(absl::Minutes(2));
  return 0;
}

int RunParent(const std::string& does, const std::string& path) {
  const auto ranks = LocalRanks::Start({ChildThat({does, path})});
  if (!ranks.ok() || !(*ranks)->Send({.leader = "x:1"}, nullptr).ok()) return 1;
  absl::SleepFor(absl::Minutes(2));
  return 0;
}

}  // namespace
}  // namespace kvasir::cli

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  const auto word = [&](int i) { return std::string(i < argc ? argv[i] : ""); };
  if (word(1) == "rank") return kvasir::cli::RunChild(word(2), word(3));
  if (word(1) == "parent") return kvasir::cli::RunParent(word(2), word(3));
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
