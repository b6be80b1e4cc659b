// Tests NCCL ranks as separate processes that are killed and stopped during
// calls. The test program starts itself: with "--rank RANK SIZE TIMEOUT_MS" it
// runs as one rank.
#include <sys/wait.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "worker/ranks/nccl/nccl_group.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/nccl_ranks.h"
#include "worker/testing/rank_process.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kNumbers = 50000;

// The main function of a rank process. Prints its address, reads the addresses
// of all ranks, prints "connected" and makes calls. While it makes calls, it
// prints "call" now and then. At the end it prints the error that killed the
// group.
int RunRank(int64_t rank, int64_t size, int64_t timeout_ms) {
  const auto say = [](const std::string& line) {
    std::cout << line << std::endl;
  };
  auto group =
      NcclGroup::Begin({.shard = {rank, size},
                        .libraries = FakeNcclLibraries(),
                        .deterministic = true,
                        .call_timeout = absl::Milliseconds(timeout_ms)});
  if (!group.ok()) {
    say(group.status().ToString());
    return kGroupDied;
  }
  say((*group)->address());
  std::vector<std::string> addresses(static_cast<size_t>(size));
  for (std::string& address : addresses) std::getline(std::cin, address);
  HostGpu gpu;
  auto collective = std::move(**group).Connect(addresses);
  if (!collective.ok()) {
    say(collective.status().ToString());
    return kGroupDied;
  }
  say("connected");
  HostRank own(collective->get(), gpu.device());
  const std::vector<float> mine = RankNumbers(rank, kNumbers, 1);
  const std::vector<float> sum = SumOfRanks(size, kNumbers, 1);
  for (int64_t call = 0;; ++call) {
    std::vector<float> data = mine;
    const absl::Status status = own.AllReduceSum(&data);
    if (!status.ok()) {
      say(status.ToString());
      return kGroupDied;
    }
    if (data != sum) return kWrongSum;
    if (call % 16 == 0) say("call");
  }
}

class NcclProcessTest : public ::testing::Test {
 protected:
  std::vector<std::unique_ptr<RankProcess>> Start(int64_t size,
                                                  absl::Duration timeout) {
    return ConnectRankProcesses(
        size,
        {absl::StrCat(size), absl::StrCat(absl::ToInt64Milliseconds(timeout))});
  }
  void Kill(RankProcess* rank) {
    EXPECT_EQ(rank->ReadLine(), "call");
    rank->Signal(SIGKILL);
    EXPECT_TRUE(WIFSIGNALED(rank->Wait()));
  }
};

// The other ranks end well before the timeout, because over a network NCCL
// notices that a rank is gone.
TEST_F(NcclProcessTest, OverANetworkAllOtherRanksEndAtOnceIfOneRankIsKilled) {
  const FakeNcclFaults faults("0:0:notify,1:0:notify,2:0:notify");
  for (const int64_t size : {2, 3}) {
    auto ranks = Start(size, absl::Minutes(5));
    Kill(ranks[1].get());
    const absl::Time begin = absl::Now();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank != 1) ExpectGroupDied(ranks[rank].get(), "network error (6)");
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  }
}

// If ranks share a machine, NCCL does not notice that a rank is gone.
TEST_F(NcclProcessTest, AllOtherRanksEndAtTheTimeoutIfOneRankIsKilled) {
  const absl::Duration timeout = absl::Milliseconds(700);
  for (const int64_t size : {2, 3}) {
    auto ranks = Start(size, timeout);
    Kill(ranks[0].get());
    const absl::Time begin = absl::Now();
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      ExpectGroupDied(ranks[rank].get(), "rank is gone");
    }
    EXPECT_LT(absl::Now() - begin, timeout + absl::Seconds(20));
  }
}

TEST_F(NcclProcessTest, AllOtherRanksEndAtTheTimeoutIfOneRankIsStopped) {
  auto ranks = Start(2, absl::Milliseconds(700));
  EXPECT_EQ(ranks[1]->ReadLine(), "call");
  ranks[1]->Signal(SIGSTOP);
  ExpectGroupDied(ranks[0].get(), "stands still");
  // After rank 1 continues, it finds that rank 0 is gone.
  ranks[1]->Signal(SIGCONT);
  ExpectGroupDied(ranks[1].get(), "rank is gone");
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--rank") {
    int64_t numbers[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (!absl::SimpleAtoi(argv[i + 2], &numbers[i])) return 2;
    }
    return kvasir::worker::RunRank(numbers[0], numbers[1], numbers[2]);
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
