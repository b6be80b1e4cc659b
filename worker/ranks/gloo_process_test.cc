// Ranks as processes that are killed and stopped under load. The program runs
// itself: with "--rank RANK SIZE TIMEOUT_MS NUMBERS CALLS" it is a rank.

#include <sys/wait.h>

#include <csignal>
#include <cstdint>
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
#include "worker/testing/rank_process.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

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

std::vector<std::unique_ptr<RankProcess>> StartRanks(int64_t size,
                                                     absl::Duration timeout,
                                                     int64_t numbers,
                                                     int64_t calls) {
  return ConnectRankProcesses(
      size,
      {absl::StrCat(size), absl::StrCat(absl::ToInt64Milliseconds(timeout)),
       absl::StrCat(numbers), absl::StrCat(calls)});
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
