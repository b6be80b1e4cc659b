// Tests what is specific to Gloo groups: connecting, bytes on the wire, and
// ranks that are lost. The contract of all collectives is tested in
// collective_test, and ranks as separate processes in gloo_process_test.
#include "worker/ranks/gloo/gloo_group.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "worker/ranks/gloo/gloo_address.h"
#include "worker/testing/collective_ranks.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

// The limit for calls that must not wait for a timeout: far below the default
// timeouts, and far above what a busy machine needs.
constexpr absl::Duration kSoon = absl::Seconds(10);

class GlooGroupTest : public ::testing::Test {
 protected:
  void SetUp() override { std::signal(SIGPIPE, SIG_IGN); }
};

std::vector<int> EntriesOf(const char* folder) {
  std::vector<int> numbers;
  DIR* const entries = opendir(folder);
  while (const dirent* const entry = readdir(entries)) {
    int number = 0;
    if (absl::SimpleAtoi(entry->d_name, &number) && number != dirfd(entries)) {
      numbers.push_back(number);
    }
  }
  closedir(entries);
  return numbers;
}

std::vector<int> Descriptors() { return EntriesOf("/proc/self/fd"); }

// Returns the sockets of all connections between ranks. Both ends are in this
// process, because the ranks are threads.
std::vector<int> Connections() {
  std::vector<int> connected;
  for (const int descriptor : Descriptors()) {
    tcp_info info = {};
    socklen_t size = sizeof(info);
    constexpr int kEstablished = 1;
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
        info.tcpi_state == kEstablished) {
      connected.push_back(descriptor);
    }
  }
  return connected;
}

int64_t ReceivedBytes(const std::vector<int>& connections) {
  int64_t bytes = 0;
  for (const int descriptor : connections) {
    tcp_info info = {};
    socklen_t size = sizeof(info);
    EXPECT_EQ(getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size), 0);
    bytes += static_cast<int64_t>(info.tcpi_bytes_received);
  }
  return bytes;
}

TEST_F(GlooGroupTest, TheCounterOfSentBytesEqualsTheBytesWrittenToSockets) {
  for (const int64_t size : {2, 3}) {
    const auto group = MakeGlooRanks(size, {.chunk_bytes = 1000});
    ASSERT_FALSE(group.empty());
    const std::vector<int> connections = Connections();
    ASSERT_EQ(connections.size(), static_cast<size_t>(size * (size - 1)));
    for (const int64_t count : {0, 1, 250, 251, 10000}) {
      OnRanks(size, [&](int64_t rank) {
        HostRank own(group[static_cast<size_t>(rank)].get());
        std::vector<float> data(static_cast<size_t>(count));
        KVASIR_EXPECT_OK(own.AllReduceSum(&data));
        std::string text(static_cast<size_t>(count), 'x');
        KVASIR_EXPECT_OK(own.Broadcast(&text));
      });
      int64_t sent = 0;
      for (const auto& rank : group) sent += rank->totals().sent_bytes;
      const absl::Time until = absl::Now() + kSoon;
      while (ReceivedBytes(connections) != sent && absl::Now() < until) {
        absl::SleepFor(absl::Milliseconds(1));
      }
      EXPECT_EQ(ReceivedBytes(connections), sent) << count;
    }
  }
}

TEST_F(GlooGroupTest, ADestroyedGroupLeavesNoThreadAndNoSocket) {
  const size_t descriptors = Descriptors().size();
  const size_t threads = EntriesOf("/proc/self/task").size();
  for (int round = 0; round < 3; ++round) {
    {
      const auto group = MakeGlooRanks(3);
      ASSERT_FALSE(group.empty());
      if (round == 1) group[2]->Abort(absl::InternalError("at once"));
      OnRanks(3, [&](int64_t rank) {
        HostRank own(group[static_cast<size_t>(rank)].get());
        std::vector<float> data(100);
        EXPECT_EQ(own.AllReduceSum(&data).ok(), round != 1);
      });
      EXPECT_GT(Descriptors().size(), descriptors);
    }
    // This group is destroyed without having been connected.
    const auto group = GlooGroup::Begin({.shard = {0, 3}, .interface = "lo"});
    KVASIR_EXPECT_OK(group);
  }
  EXPECT_EQ(Descriptors().size(), descriptors);
  EXPECT_EQ(EntriesOf("/proc/self/task").size(), threads);
}

TEST_F(GlooGroupTest, CallsFailAtTheTimeoutIfARankMakesNoCall) {
  const absl::Duration timeout = absl::Milliseconds(300);
  for (const int64_t size : {2, 3}) {
    const auto group = MakeGlooRanks(size, {.call_timeout = timeout});
    ASSERT_FALSE(group.empty());
    // The last rank makes no call, so the others must time out.
    OnRanks(size - 1, [&](int64_t rank) {
      HostRank own(group[static_cast<size_t>(rank)].get());
      std::vector<float> data(1000);
      const absl::Time begin = absl::Now();
      const absl::Status ended = own.AllReduceSum(&data);
      EXPECT_LT(absl::Now() - begin, timeout + kSoon);
      // With three ranks, one may time out first and close its connections. The
      // other then fails because of the closed connection, not of its own
      // timeout.
      EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
      if (size == 2) {
        EXPECT_GE(absl::Now() - begin, timeout);
        EXPECT_EQ(ended.message(),
                  "tensor-parallel rank 1 did not respond for 300ms");
      }
      // The group stays dead: later calls return the same error at once.
      EXPECT_EQ(own.AllReduceSum(&data), ended);
    });
    HostRank late(group.back().get());
    std::vector<float> data(1000);
    // The first call may succeed, because the others had already sent their
    // parts of it.
    absl::Status ended = late.AllReduceSum(&data);
    if (ended.ok()) ended = late.AllReduceSum(&data);
    EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  }
}

TEST_F(GlooGroupTest, CallsOfTheOtherRanksFailIfARankIsGone) {
  auto group = MakeGlooRanks(3);
  ASSERT_FALSE(group.empty());
  std::thread leaves([&] {
    absl::SleepFor(absl::Milliseconds(50));
    group[2] = nullptr;
  });
  const absl::Time begin = absl::Now();
  OnRanks(2, [&](int64_t rank) {
    HostRank own(group[static_cast<size_t>(rank)].get());
    std::vector<float> data(1000);
    EXPECT_THAT(own.AllReduceSum(&data),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("tensor-parallel rank 2 is gone")));
  });
  EXPECT_LT(absl::Now() - begin, kSoon);
  leaves.join();
}

// Rank 0 only sends in a Broadcast, and still notices that rank 1 is gone.
TEST_F(GlooGroupTest, ACallFailsAtOnceIfARankHasAlreadyLeftTheGroup) {
  auto group = MakeGlooRanks(2);
  ASSERT_FALSE(group.empty());
  group[1] = nullptr;
  absl::SleepFor(absl::Milliseconds(50));
  HostRank own(group[0].get());
  std::string data(10, 'x');
  EXPECT_THAT(own.Broadcast(&data),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1")));
}

// The connection is cut at a random time, possibly in the middle of a message.
TEST_F(GlooGroupTest, CallsOfAllRanksFailIfAConnectionIsCut) {
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    const int64_t size = 2 + round % 3;
    // The timeout is longer than the test may take, so it cannot end the calls.
    const auto group = MakeGlooRanks(size, {.call_timeout = absl::Minutes(1)});
    ASSERT_FALSE(group.empty());
    const std::vector<int> connections = Connections();
    std::thread cuts([&] {
      absl::SleepFor(absl::Microseconds(random() % 30000));
      const int which = connections[random() % connections.size()];
      EXPECT_EQ(shutdown(which, SHUT_RDWR), 0);
    });
    const absl::Time begin = absl::Now();
    OnRanks(size, [&](int64_t rank) {
      HostRank own(group[static_cast<size_t>(rank)].get());
      std::vector<float> data(300000);
      absl::Status status;
      while (status.ok()) status = own.AllReduceSum(&data);
      EXPECT_TRUE(status.code() == absl::StatusCode::kUnavailable ||
                  status.code() == absl::StatusCode::kAborted)
          << status;
      own.collective().Abort(status);
    });
    EXPECT_LT(absl::Now() - begin, kSoon);
    cuts.join();
  }
}

TEST_F(GlooGroupTest, AGroupMayBeAbortedWhileItsMessagesAreInFlight) {
  std::mt19937 random(4);
  for (int round = 0; round < 12; ++round) {
    const int64_t size = 2 + round % 3;
    const auto group = MakeGlooRanks(size);
    ASSERT_FALSE(group.empty());
    std::thread aborts([&] {
      absl::SleepFor(absl::Microseconds(random() % 30000));
      group[random() % group.size()]->Abort(absl::InternalError("enough"));
    });
    const absl::Time begin = absl::Now();
    OnRanks(size, [&](int64_t rank) {
      HostRank own(group[static_cast<size_t>(rank)].get());
      std::vector<float> data(100000);
      absl::Status status;
      while (status.ok()) status = own.AllReduceSum(&data);
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted,
                                   HasSubstr("gave up: enough")));
    });
    EXPECT_LT(absl::Now() - begin, kSoon);
    aborts.join();
  }
}

TEST_F(GlooGroupTest, ALongAbortReasonIsShortenedForOtherRanks) {
  const auto group = MakeGlooRanks(2);
  ASSERT_FALSE(group.empty());
  group[1]->Abort(absl::InternalError(std::string(10000, 'r')));
  HostRank own(group[0].get());
  std::vector<float> data(1);
  EXPECT_THAT(own.AllReduceSum(&data),
              StatusIs(absl::StatusCode::kAborted,
                       absl::StrCat("tensor-parallel rank 1 gave up: ",
                                    std::string(512 - 32, 'r'))));
}

TEST_F(GlooGroupTest, InvalidOptionsAreRefused) {
  const auto refused = [](const GlooOptions& options, absl::StatusCode code,
                          const std::string& text) {
    EXPECT_THAT(GlooGroup::Begin(options), StatusIs(code, HasSubstr(text)));
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const GlooOptions good = {.shard = {0, 2}, .interface = "lo"};
  GlooOptions options = good;
  for (const plan::TpShard shard : {plan::TpShard{0, 1},
                                    plan::TpShard{2, 2},
                                    plan::TpShard{-1, 2},
                                    {0, 1000}}) {
    options.shard = shard;
    refused(options, invalid, absl::StrCat("no rank ", shard.rank));
  }
  options = good;
  for (const int64_t bytes : {0, -4, 6, 1 << 30}) {
    options.chunk_bytes = bytes;
    refused(options, invalid, absl::StrCat("chunk_bytes is ", bytes, ","));
  }
  options = good;
  options.call_timeout = absl::ZeroDuration();
  refused(options, invalid, "call_timeout is 0, but must be 1ms to 24h");
  options = good;
  options.connect_timeout = absl::InfiniteDuration();
  refused(options, invalid, "connect_timeout is inf, but must be 1ms to 24h");
  options = good;
  options.interface = "eth77";
  refused(options, absl::StatusCode::kNotFound, "'eth77'");
  std::signal(SIGPIPE, SIG_DFL);
  refused(good, absl::StatusCode::kFailedPrecondition, "SIGPIPE");
}

// Connect refuses addresses of different groups before it connects to any rank.
TEST_F(GlooGroupTest, AddressesOfDifferentGroupsAreRefused) {
  const auto begin = [](plan::TpShard shard, int64_t chunk_bytes = 64) {
    auto group = GlooGroup::Begin(
        {.shard = shard, .interface = "lo", .chunk_bytes = chunk_bytes});
    KVASIR_EXPECT_OK(group);
    return *std::move(group);
  };
  const auto other = begin({1, 2});
  const std::string other_1 = other->address();
  const auto refused = [&](const std::vector<std::string>& rest,
                           const std::string& text) {
    auto own = begin({0, 2});
    std::vector<std::string> addresses = {own->address()};
    addresses.insert(addresses.end(), rest.begin(), rest.end());
    EXPECT_THAT(own->Connect(addresses),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refused({}, "1 addresses were given for a tensor-parallel group of 2");
  refused({other_1, other_1}, "3 addresses");
  refused({"nonsense"}, "rank 1: does not begin with");
  refused({begin({0, 2})->address()}, "rank 1: belongs to rank 0 of 2");
  refused({begin({1, 3})->address()}, "rank 1: belongs to rank 1 of 3");
  refused({begin({1, 2}, 128)->address()},
          "rank 1: has chunks of 128 bytes, but rank 0 has chunks of 64 bytes");
  auto own = begin({0, 2});
  EXPECT_THAT(
      own->Connect(std::vector<std::string>{begin({0, 2})->address(), other_1}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("differs from the address that this process")));
}

// Tests each rank as the waiting rank, because either rank may be the one that
// opens the connection.
TEST_F(GlooGroupTest, ConnectTimesOutIfARankDoesNotConnect) {
  for (const int64_t rank : {0, 1}) {
    GlooOptions options = {.shard = {rank, 2},
                           .interface = "lo",
                           .connect_timeout = absl::Milliseconds(300)};
    auto own = GlooGroup::Begin(options);
    KVASIR_ASSERT_OK(own);
    options.shard.rank = 1 - rank;
    const auto absent = GlooGroup::Begin(options);
    KVASIR_ASSERT_OK(absent);
    std::vector<std::string> addresses = {(*own)->address(),
                                          (*absent)->address()};
    if (rank == 1) std::swap(addresses[0], addresses[1]);
    const absl::Time begin = absl::Now();
    const auto connected = (*own)->Connect(addresses);
    EXPECT_EQ(connected.status().code(), absl::StatusCode::kUnavailable)
        << connected.status();
    EXPECT_THAT(std::string(connected.status().message()),
                HasSubstr(absl::StrCat("tensor-parallel rank ", 1 - rank)));
    EXPECT_LT(absl::Now() - begin, kSoon);
  }
}

// Aborts at a random time before, during or after connecting. No call may wait
// for its timeout.
TEST_F(GlooGroupTest, AGroupMayBeAbortedWhileItConnects) {
  std::mt19937 random(5);
  for (int round = 0; round < 16; ++round) {
    std::vector<std::unique_ptr<GlooGroup>> groups;
    std::vector<std::string> addresses;
    for (const int64_t rank : {0, 1, 2}) {
      auto group = GlooGroup::Begin({.shard = {rank, 3}, .interface = "lo"});
      KVASIR_ASSERT_OK(group);
      addresses.push_back((*group)->address());
      groups.push_back(*std::move(group));
    }
    std::thread aborts([&] {
      absl::SleepFor(absl::Microseconds(random() % 60000));
      for (const auto& group : groups) {
        group->Abort(absl::InternalError("another is gone"));
      }
    });
    const absl::Time begin = absl::Now();
    // In half of the rounds the last rank does not connect.
    OnRanks(3 - round % 2, [&](int64_t rank) {
      auto connected = groups[static_cast<size_t>(rank)]->Connect(addresses);
      absl::Status status = connected.status();
      if (status.ok()) {
        HostRank own(connected->get());
        std::vector<float> data(100);
        while (status.ok()) status = own.AllReduceSum(&data);
      }
      EXPECT_TRUE(status.code() == absl::StatusCode::kAborted ||
                  status.code() == absl::StatusCode::kUnavailable)
          << status;
    });
    EXPECT_LT(absl::Now() - begin, kSoon);
    aborts.join();
  }
}

TEST_F(GlooGroupTest, ConnectingToARankThatHasLeftFailsAtOnce) {
  for (int round = 0; round < 4; ++round) {
    auto own = GlooGroup::Begin({.shard = {0, 2}, .interface = "lo"});
    auto gone = GlooGroup::Begin({.shard = {1, 2}, .interface = "lo"});
    KVASIR_ASSERT_OK(own);
    KVASIR_ASSERT_OK(gone);
    const std::vector<std::string> addresses = {(*own)->address(),
                                                (*gone)->address()};
    // In Gloo, the rank with the greater address opens the connection; ports
    // are compared in network byte order. This test needs rank 0 to be that
    // rank, so other rounds are skipped.
    const auto port = [](const std::string& address, size_t rank) {
      const auto parsed = ParseGlooAddress(address);
      return reinterpret_cast<const sockaddr_in&>(parsed->ports[rank].bytes)
          .sin_port;
    };
    if (port(addresses[0], 1) < port(addresses[1], 0)) continue;
    *gone = nullptr;
    const absl::Time begin = absl::Now();
    const auto connected = (*own)->Connect(addresses);
    EXPECT_THAT(connected,
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("rank 1 cannot be reached: connect")));
    EXPECT_LT(absl::Now() - begin, kSoon);
  }
}

// A process that is not of the group (a stranger) connects first and so takes a
// rank's place. The group must notice that and not connect.
TEST_F(GlooGroupTest, ConnectFailsIfAProcessOutsideTheGroupConnectsFirst) {
  for (const bool stays : {true, false}) {
    std::vector<std::unique_ptr<GlooGroup>> groups;
    std::vector<std::string> addresses;
    for (const int64_t rank : {0, 1}) {
      auto group =
          GlooGroup::Begin({.shard = {rank, 2},
                            .interface = "lo",
                            .connect_timeout = absl::Milliseconds(500)});
      KVASIR_ASSERT_OK(group);
      addresses.push_back((*group)->address());
      groups.push_back(*std::move(group));
    }
    std::vector<int> strangers;
    for (const size_t rank : {0, 1}) {
      const auto address = ParseGlooAddress(addresses[rank]);
      KVASIR_ASSERT_OK(address);
      const SocketAddress& port = address->ports[1 - rank];
      strangers.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      ASSERT_EQ(connect(strangers.back(), port.get(), port.size), 0);
    }
    if (!stays) {
      for (const int stranger : strangers) close(stranger);
    }
    absl::SleepFor(absl::Milliseconds(50));
    OnRanks(2, [&](int64_t rank) {
      const auto connected =
          groups[static_cast<size_t>(rank)]->Connect(addresses);
      EXPECT_EQ(connected.status().code(), absl::StatusCode::kUnavailable)
          << connected.status();
    });
    if (stays) {
      for (const int stranger : strangers) close(stranger);
    }
  }
}

TEST_F(GlooGroupTest, RanksConnectOverEveryNetworkInterface) {
  std::vector<std::string> networks = {"lo", "127.0.0.1", "::1"};
  ifaddrs* found = nullptr;
  ASSERT_EQ(getifaddrs(&found), 0);
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    networks.push_back(each->ifa_name);
  }
  freeifaddrs(found);
  int served = 0;
  for (const std::string& network : networks) {
    // Skip a network interface without an address that Gloo can use.
    if (!FindInterface(network).ok()) continue;
    const auto group = MakeGlooRanks(2, {.interface = network});
    ASSERT_FALSE(group.empty()) << network;
    OnRanks(2, [&](int64_t rank) {
      HostRank own(group[static_cast<size_t>(rank)].get());
      std::vector<float> data = {1, 2};
      KVASIR_EXPECT_OK(own.AllReduceSum(&data));
      EXPECT_EQ(data, (std::vector<float>{2, 4}));
    });
    ++served;
  }
  EXPECT_GE(served, 2);
}

}  // namespace
}  // namespace kvasir::worker
