// Ranks as processes that are killed and stopped under load. The program runs
// itself: with "--rank RANK SIZE TIMEOUT_MS NUMBERS CALLS" it is a rank.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "worker/ranks/gloo_group.h"
#include "worker/testing/collective_ranks.h"

extern char** environ;

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

constexpr int kDone = 0;
constexpr int kGroupDied = 3;
constexpr int kWrongSum = 4;

// Says its address, reads those of all, says "connected", then "call" now and
// then, and what the group died of. Calls below 0: until then.
int RunRank(int64_t rank, int64_t size, int64_t timeout_ms, int64_t numbers,
            int64_t calls) {
  std::signal(SIGPIPE, SIG_IGN);
  const auto say = [](const std::string& line) {
    std::cout << line << std::endl;
  };
  auto group =
      GlooGroup::Begin({.shard = {rank, size},
                        .interface = "lo",
                        .call_timeout = absl::Milliseconds(timeout_ms)});
  if (!group.ok()) {
    say(group.status().ToString());
    return kGroupDied;
  }
  say((*group)->address());
  std::vector<std::string> addresses(static_cast<size_t>(size));
  for (std::string& address : addresses) std::getline(std::cin, address);
  auto collective = std::move(**group).Connect(addresses);
  if (!collective.ok()) {
    say(collective.status().ToString());
    return kGroupDied;
  }
  say("connected");
  HostRank own(collective->get());
  const std::vector<float> mine = RankNumbers(rank, numbers, 1);
  const std::vector<float> sum = SumOfRanks(size, numbers, 1);
  for (int64_t call = 0; call != calls; ++call) {
    std::vector<float> data = mine;
    const absl::Status status = own.AllReduceSum(&data);
    if (!status.ok()) {
      (*collective)->Abort(status);
      say(status.ToString());
      return kGroupDied;
    }
    if (data != sum) return kWrongSum;
    if (call % 16 == 0) say("call");
  }
  return kDone;
}

// A rank's process. Killed and reaped at the latest with this.
class RankProcess {
 public:
  explicit RankProcess(const std::vector<std::string>& arguments) {
    int to[2], from[2];
    EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    std::vector<std::string> texts = {"/proc/self/exe", "--rank"};
    texts.insert(texts.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& text : texts) argv.push_back(text.data());
    argv.push_back(nullptr);
    EXPECT_EQ(
        posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ),
        0);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    in_ = fdopen(to[1], "w");
    out_ = fdopen(from[0], "r");
  }
  ~RankProcess() {
    if (pid_ > 0) {
      Signal(SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    std::fclose(in_);
    std::fclose(out_);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  // "" at the end.
  std::string ReadLine() {
    char line[4096];
    if (std::fgets(line, sizeof(line), out_) == nullptr) return "";
    std::string text = line;
    text.pop_back();
    return text;
  }
  std::string ReadLastLine() {
    std::string last;
    for (std::string line; !(line = ReadLine()).empty();) last = line;
    return last;
  }
  void Write(const std::string& line) {
    std::fprintf(in_, "%s\n", line.c_str());
    std::fflush(in_);
  }
  void Signal(int signal) { kill(pid_, signal); }
  // How it ended, as of waitpid; after ReadLastLine it has.
  int Wait() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = 0;
    return status;
  }

 private:
  pid_t pid_ = 0;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};

std::vector<std::unique_ptr<RankProcess>> StartRanks(int64_t size,
                                                     absl::Duration timeout,
                                                     int64_t numbers,
                                                     int64_t calls) {
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(std::vector<std::string>{
        absl::StrCat(rank), absl::StrCat(size),
        absl::StrCat(absl::ToInt64Milliseconds(timeout)), absl::StrCat(numbers),
        absl::StrCat(calls)}));
  }
  std::vector<std::string> addresses;
  for (const auto& rank : ranks) addresses.push_back(rank->ReadLine());
  for (const auto& rank : ranks) {
    for (const std::string& address : addresses) rank->Write(address);
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->ReadLine(), "connected");
  return ranks;
}

void ExpectGroupDied(RankProcess* rank, const std::string& text) {
  const std::string last = rank->ReadLastLine();
  EXPECT_TRUE(last.rfind("UNAVAILABLE", 0) == 0 ||
              last.rfind("ABORTED", 0) == 0)
      << last;
  EXPECT_THAT(last, HasSubstr(text));
  const int status = rank->Wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kGroupDied)
      << "status " << status;
}

TEST(GlooProcessTest, RanksSumAndEnd) {
  const auto ranks = StartRanks(4, absl::Seconds(30), 5000, 200);
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->ReadLastLine(), "call");
    EXPECT_EQ(rank->Wait(), kDone);
  }
}

// Well before their time: connections close with the process.
TEST(GlooProcessTest, ARankThatIsKilledEndsAllOthersAtOnce) {
  for (int round = 0; round < 6; ++round) {
    const int64_t size = 2 + round % 3;
    // Small messages and large ones.
    const int64_t numbers = round % 2 == 0 ? 500 : 400000;
    auto ranks = StartRanks(size, absl::Minutes(5), numbers, -1);
    const auto killed = static_cast<size_t>(round % size);
    EXPECT_EQ(ranks[killed]->ReadLine(), "call");
    ranks[killed]->Signal(SIGKILL);
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(WIFSIGNALED(ranks[killed]->Wait()));
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == killed) continue;
      // Of three, one may first hear of another that has ended for it.
      ExpectGroupDied(
          ranks[rank].get(),
          size == 2 ? absl::StrCat("tensor-parallel rank ", killed, " is gone")
                    : "tensor-parallel rank ");
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  }
}

TEST(GlooProcessTest, ARankThatIsStoppedEndsAllOthersWhenTheirTimeIsUp) {
  const absl::Duration timeout = absl::Milliseconds(700);
  for (const int64_t size : {2, 3}) {
    auto ranks = StartRanks(size, timeout, 50000, -1);
    EXPECT_EQ(ranks[1]->ReadLine(), "call");
    ranks[1]->Signal(SIGSTOP);
    const absl::Time begin = absl::Now();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank != 1) ExpectGroupDied(ranks[rank].get(), "tensor-parallel rank");
    }
    EXPECT_LT(absl::Now() - begin, timeout + absl::Seconds(20));
    // It finds the others gone when it goes on.
    ranks[1]->Signal(SIGCONT);
    ExpectGroupDied(ranks[1].get(), "tensor-parallel rank");
  }
}

// What stands still for less long than that only holds the others up.
TEST(GlooProcessTest, ARankThatGoesOnInTimeIsWaitedFor) {
  auto ranks = StartRanks(3, absl::Minutes(1), 1000, 2000);
  EXPECT_EQ(ranks[2]->ReadLine(), "call");
  ranks[2]->Signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(200));
  ranks[2]->Signal(SIGCONT);
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->ReadLastLine(), "call");
    EXPECT_EQ(rank->Wait(), kDone);
  }
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  if (argc == 7 && std::string(argv[1]) == "--rank") {
    int64_t numbers[5] = {};
    for (int i = 0; i < 5; ++i) {
      if (!absl::SimpleAtoi(argv[i + 2], &numbers[i])) return 2;
    }
    return kvasir::worker::RunRank(numbers[0], numbers[1], numbers[2],
                                   numbers[3], numbers[4]);
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
