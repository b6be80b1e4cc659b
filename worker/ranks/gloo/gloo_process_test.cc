// Tests Gloo ranks as separate processes that are killed, stopped and cut off
// during calls. The test program starts itself: with "--rank RANK SIZE
// TIMEOUT_MS NUMBERS CALLS" it runs as one rank, which makes CALLS sums of
// NUMBERS floats.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cerrno>
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
#include "worker/ranks/gloo/gloo_address.h"
#include "worker/ranks/gloo/gloo_group.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/rank_process.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

// All ranks must notice a failure within this time.
constexpr absl::Duration kSoon = absl::Seconds(5);

// Handler of SIGUSR1: cuts one of this process's connections, as a network
// failure would.
void CutAConnection(int) {
  for (int descriptor = 3; descriptor < 256; ++descriptor) {
    tcp_info info = {};
    socklen_t size = sizeof(info);
    constexpr int kEstablished = 1;
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
        info.tcpi_state == kEstablished) {
      shutdown(descriptor, SHUT_RDWR);
      return;
    }
  }
}

// The main function of a rank process. Prints its address, reads the addresses
// of all ranks, prints "connected" and makes calls; prints "call" now and then.
// At the end it prints "done" or the error that killed the group, and waits for
// an input line. If `calls` is below 0, it makes calls until the group dies.
int RunRank(int64_t rank, int64_t size, int64_t timeout_ms, int64_t numbers,
            int64_t calls) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGUSR1, &CutAConnection);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
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
  auto collective = (*group)->Connect(addresses);
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
  say("done");
  std::string go;
  std::getline(std::cin, go);
  return kDone;
}

std::unique_ptr<RankProcess> StartRank(plan::TpShard shard,
                                       absl::Duration timeout, int64_t numbers,
                                       int64_t calls) {
  return std::make_unique<RankProcess>(std::vector<std::string>{
      absl::StrCat(shard.rank), absl::StrCat(shard.size),
      absl::StrCat(absl::ToInt64Milliseconds(timeout)), absl::StrCat(numbers),
      absl::StrCat(calls)});
}

// Starts the ranks and connects them.
std::vector<std::unique_ptr<RankProcess>> StartRanks(int64_t size,
                                                     absl::Duration timeout,
                                                     int64_t numbers,
                                                     int64_t calls) {
  return ConnectRankProcesses(
      size,
      {absl::StrCat(size), absl::StrCat(absl::ToInt64Milliseconds(timeout)),
       absl::StrCat(numbers), absl::StrCat(calls)});
}

void ExpectAllDone(const std::vector<std::unique_ptr<RankProcess>>& ranks) {
  for (const auto& rank : ranks) {
    std::string line = rank->ReadLine();
    while (line == "call") line = rank->ReadLine();
    EXPECT_EQ(line, "done");
  }
  for (const auto& rank : ranks) rank->Write("go");
  for (const auto& rank : ranks) EXPECT_EQ(rank->Wait(), kDone);
}

class GlooProcessTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }
};

TEST_F(GlooProcessTest, RanksInSeparateProcessesComputeSumsWithoutErrors) {
  const auto ranks = StartRanks(4, absl::Seconds(30), 5000, 200);
  ExpectAllDone(ranks);
}

// The other ranks notice the end of the process well before the timeout,
// because the system closes its connections.
TEST_F(GlooProcessTest, AllOtherRanksEndAtOnceIfOneRankIsKilled) {
  for (int round = 0; round < 6; ++round) {
    const int64_t size = 2 + round % 3;
    // Test with small and with large messages.
    const int64_t numbers = round % 2 == 0 ? 500 : 400000;
    auto ranks = StartRanks(size, absl::Minutes(5), numbers, -1);
    const auto killed = static_cast<size_t>(round % size);
    EXPECT_EQ(ranks[killed]->ReadLine(), "call");
    ranks[killed]->Signal(SIGKILL);
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(WIFSIGNALED(ranks[killed]->Wait()));
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == killed) continue;
      // With more than two ranks, the error may name a rank that ended because
      // another rank was killed.
      ExpectGroupDied(
          ranks[rank].get(),
          size == 2 ? absl::StrCat("tensor-parallel rank ", killed, " is gone")
                    : "tensor-parallel rank ");
    }
    EXPECT_LT(absl::Now() - begin, kSoon);
  }
}

TEST_F(GlooProcessTest, AllOtherRanksEndAtTheTimeoutIfOneRankIsStopped) {
  const absl::Duration timeout = absl::Milliseconds(700);
  for (const int64_t size : {2, 3}) {
    auto ranks = StartRanks(size, timeout, 50000, -1);
    EXPECT_EQ(ranks[1]->ReadLine(), "call");
    ranks[1]->Signal(SIGSTOP);
    const absl::Time begin = absl::Now();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank != 1) ExpectGroupDied(ranks[rank].get(), "tensor-parallel rank");
    }
    EXPECT_LT(absl::Now() - begin, kSoon);
    // After rank 1 continues, it finds that the others are gone.
    ranks[1]->Signal(SIGCONT);
    ExpectGroupDied(ranks[1].get(), "tensor-parallel rank");
  }
}

TEST_F(GlooProcessTest, AllRanksEndAtOnceIfAConnectionIsCut) {
  for (int round = 0; round < 4; ++round) {
    const int64_t size = 2 + round % 3;
    auto ranks = StartRanks(size, absl::Minutes(5), 100000, -1);
    RankProcess& cut = *ranks[static_cast<size_t>(size - 1)];
    EXPECT_EQ(cut.ReadLine(), "call");
    cut.Signal(SIGUSR1);
    const absl::Time begin = absl::Now();
    for (const auto& rank : ranks) {
      ExpectGroupDied(rank.get(), "tensor-parallel rank ");
    }
    EXPECT_LT(absl::Now() - begin, kSoon);
  }
}

// This test documents that Gloo then throws an exception in its own thread,
// which ends the process before the rank connects.
TEST_F(GlooProcessTest,
       InvalidBytesFromAProcessOutsideTheGroupEndARankThatWaitsForConnections) {
  const auto rank = StartRank({0, 2}, absl::Minutes(5), 100, -1);
  const auto address = ParseGlooAddress(rank->ReadLine());
  KVASIR_ASSERT_OK(address);
  const SocketAddress& port = address->ports[1];
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(stranger, port.get(), port.size), 0);
  // These bytes look like a Gloo message that nobody expects.
  const uint64_t nonsense[6] = {1 << 20, 1, 7, 0, 1 << 20, 0};
  EXPECT_EQ(write(stranger, nonsense, sizeof(nonsense)), sizeof(nonsense));
  const absl::Time begin = absl::Now();
  EXPECT_EQ(rank->ReadLastLine(), "");
  EXPECT_NE(rank->Wait(), kDone);
  EXPECT_LT(absl::Now() - begin, kSoon);
  close(stranger);
}

TEST_F(GlooProcessTest,
       ARankThatIsStoppedForLessThanTheTimeoutOnlyDelaysTheOthers) {
  auto ranks = StartRanks(3, absl::Minutes(1), 1000, 2000);
  EXPECT_EQ(ranks[2]->ReadLine(), "call");
  ranks[2]->Signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(200));
  ranks[2]->Signal(SIGCONT);
  ExpectAllDone(ranks);
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
