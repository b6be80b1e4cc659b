// Tests the contract of class Collective with every implementation. The NCCL
// implementation uses a fake NCCL library that needs no GPU.
#include "worker/collective/collective.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "worker/collective/in_process_group.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/nccl_ranks.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

struct GroupCase {
  std::string name;
  std::function<std::vector<std::unique_ptr<Collective>>(int64_t size)> make;
  bool over_network = false;
  // True: the ranks use NCCL on emulated GPUs; a rank then does not notice that
  // another rank has ended, but waits for it. False: the ranks use CPUs.
  bool nccl = false;
  bool in_rank_order = true;
  // The most elements that a test passes to one collective call.
  int64_t most = 70001;
  int calls = 90;  // number of calls in tests that make many
  int64_t size = 0;

  friend void PrintTo(const GroupCase& group, std::ostream* out) {
    *out << group.name << " of " << group.size;
  }
};

std::vector<GroupCase> Cases() {
  std::vector<GroupCase> cases;
  for (int64_t size = 2; size <= 8; ++size) {
    cases.push_back(
        {.name = "InProcess", .make = &InProcessGroup::Create, .size = size});
  }
  for (const int64_t size : {2, 4, 6, 8}) {
    cases.push_back({.name = "Gloo",
                     .make = [](int64_t ranks) { return MakeGlooRanks(ranks); },
                     .over_network = true,
                     .size = size});
  }
  // With messages of at most 52 bytes, most calls need several messages, and
  // often an odd number of them.
  for (const int64_t size : {2, 3, 5, 7}) {
    cases.push_back({.name = "GlooInPieces",
                     .make =
                         [](int64_t ranks) {
                           return MakeGlooRanks(ranks, {.chunk_bytes = 52});
                         },
                     .over_network = true,
                     .most = 333,
                     .calls = 30,
                     .size = size});
  }
  for (const int64_t size : {2, 3, 4, 8}) {
    for (const bool deterministic : {false, true}) {
      cases.push_back({.name = deterministic ? "NcclDeterministic" : "Nccl",
                       .make =
                           [deterministic](int64_t ranks) {
                             return MakeNcclRanks(
                                 ranks, {.deterministic = deterministic});
                           },
                       .over_network = true,
                       .nccl = true,
                       .in_rank_order = deterministic,
                       .size = size});
    }
  }
  return cases;
}

class CollectiveTest : public ::testing::TestWithParam<GroupCase> {
 protected:
  void SetUp() override {
    std::signal(SIGPIPE, SIG_IGN);
    if (GetParam().nccl) gpus_ = MakeHostGpus(size());
    group_ = GetParam().make(size());
    ASSERT_EQ(group_.size(), static_cast<size_t>(size()));
  }
  void TearDown() override {
    const auto dead = [](const auto& rank) { return !rank->status().ok(); };
    if (std::any_of(group_.begin(), group_.end(), dead)) {
      // NCCL does not tell a rank that another rank has ended. Without Abort,
      // the destructors would wait for the ranks that have ended.
      for (const auto& rank : group_) rank->Abort(absl::CancelledError());
    }
    EndRanks(&group_);
  }

  int64_t size() const { return GetParam().size; }
  Collective* rank(int64_t rank) {
    return group_[static_cast<size_t>(rank)].get();
  }

  // If the ranks use NCCL, replaces the group by one whose calls time out after
  // 400 ms. Otherwise does nothing.
  void UseImpatientNccl() {
    if (!GetParam().nccl) return;
    EndRanks(&group_);
    group_ = MakeNcclRanks(size(), {.deterministic = GetParam().in_rank_order,
                                    .call_timeout = absl::Milliseconds(400),
                                    .poll_interval = absl::Milliseconds(20)});
    ASSERT_EQ(group_.size(), static_cast<size_t>(size()));
  }

  HostRank Own(int64_t r) {
    return HostRank(rank(r), gpus_.empty()
                                 ? nullptr
                                 : gpus_[static_cast<size_t>(r)]->device());
  }

  // Expects that `data` is the sum over all ranks: exactly if the group adds in
  // rank order, otherwise within rounding.
  void ExpectSum(const std::vector<float>& data, uint64_t seed) {
    const auto count = static_cast<int64_t>(data.size());
    const std::vector<float> want = SumOfRanks(size(), count, seed);
    if (GetParam().in_rank_order) {
      EXPECT_EQ(data, want) << count << " numbers";
      return;
    }
    std::vector<float> most(data.size());
    for (int64_t r = 0; r < size(); ++r) {
      const std::vector<float> numbers = RankNumbers(r, count, seed);
      for (size_t i = 0; i < most.size(); ++i) most[i] += std::abs(numbers[i]);
    }
    for (size_t i = 0; i < data.size(); ++i) {
      ASSERT_NEAR(data[i], want[i], 1e-6 * most[i]) << i << " of " << count;
    }
  }

  // Runs `body` on each rank. A rank whose body fails aborts the group, as an
  // executor does.
  std::vector<absl::Status> Run(
      const std::function<absl::Status(HostRank& own, int64_t rank)>& body) {
    std::vector<absl::Status> results(group_.size());
    OnRanks(size(), [&](int64_t r) {
      HostRank own = Own(r);
      absl::Status& result = results[static_cast<size_t>(r)];
      result = body(own, r);
      if (!result.ok()) own.collective().Abort(result);
    });
    return results;
  }

  std::vector<std::unique_ptr<HostGpu>> gpus_;
  std::vector<std::unique_ptr<Collective>> group_;
};

void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (const absl::Status& result : results) KVASIR_EXPECT_OK(result);
}

TEST_P(CollectiveTest, EachRanksShardStatesItsRankAndTheSizeOfTheGroup) {
  for (int64_t r = 0; r < size(); ++r) {
    EXPECT_EQ(rank(r)->shard(), (plan::TpShard{r, size()}));
  }
}

TEST_P(CollectiveTest, AllReduceGivesEveryRankTheSameSum) {
  const std::vector<int64_t> counts = {0,  1,   2,    12,   13,   14,    25,
                                       26, 27,  1000, 1023, 1024, 1025,  0,
                                       1,  333, 4096, 4999, 3,    70001, 7};
  std::vector<std::vector<std::vector<float>>> sums(group_.size());
  ExpectAllOk(Run([&](HostRank& own, int64_t r) -> absl::Status {
    for (size_t i = 0; i < counts.size(); ++i) {
      const int64_t count = std::min(counts[i], GetParam().most);
      std::vector<float> data = RankNumbers(r, count, i);
      const absl::Status status = own.AllReduceSum(&data);
      if (!status.ok()) return status;
      ExpectSum(data, i);
      sums[static_cast<size_t>(r)].push_back(std::move(data));
    }
    EXPECT_EQ(own.collective().totals().calls,
              static_cast<int64_t>(counts.size()));
    return absl::OkStatus();
  }));
  for (const auto& of_rank : sums) EXPECT_EQ(of_rank, sums[0]);
}

TEST_P(CollectiveTest, SumsOfSignedZerosAndInfinitiesAreExact) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ExpectAllOk(Run([&](HostRank& own, int64_t r) {
    std::vector<float> data = {-0.0f, r == 0 ? -0.0f : 0.0f,
                               r == 1 ? kInfinity : 1.0f};
    const absl::Status status = own.AllReduceSum(&data);
    EXPECT_TRUE(std::signbit(data[0]));
    EXPECT_FALSE(std::signbit(data[1]));
    EXPECT_EQ(data[2], kInfinity);
    return status;
  }));
}

// Returns a copy of `all` with only the rank's own columns; the others contain
// -1, as garbage that AllGather must overwrite.
std::vector<float> OwnColumns(const std::vector<float>& all, int64_t num_rows,
                              const std::vector<int64_t>& first_columns,
                              int64_t rank) {
  std::vector<float> own(all.size(), -1);
  const int64_t columns = first_columns.back();
  for (int64_t i = 0; i < num_rows * columns; ++i) {
    const int64_t column = i % columns;
    const auto r = static_cast<size_t>(rank);
    if (first_columns[r] <= column && column < first_columns[r + 1]) {
      own[static_cast<size_t>(i)] = all[static_cast<size_t>(i)];
    }
  }
  return own;
}

TEST_P(CollectiveTest, AllGatherGivesEveryRankTheColumnsOfAllRanks) {
  const int calls = GetParam().calls;
  ExpectAllOk(Run([&](HostRank& own, int64_t r) -> absl::Status {
    // The seed is the same on all ranks, so that they make the same calls.
    std::mt19937 random(5);
    for (int call = 0; call < calls; ++call) {
      const int64_t num_rows = call % 5 == 0 ? call % 2 : random() % 12;
      std::vector<int64_t> first_columns = {0};
      for (int64_t each = 0; each < size(); ++each) {
        // About one rank in four has no columns, and in every seventh call no
        // rank has any.
        const bool none = call % 7 == 3 || random() % 4 == 0;
        first_columns.push_back(
            first_columns.back() +
            (none ? 0 : static_cast<int64_t>(random() % 60)));
      }
      const std::vector<float> all = RankNumbers(
          99, num_rows * first_columns.back(), static_cast<uint64_t>(call));
      std::vector<float> data = OwnColumns(all, num_rows, first_columns, r);
      const absl::Status status = own.AllGather(&data, num_rows, first_columns);
      if (!status.ok()) return status;
      EXPECT_EQ(data, all) << "call " << call << " on rank " << r;
    }
    return absl::OkStatus();
  }));
}

TEST_P(CollectiveTest, BroadcastGivesEveryRankTheDataOfRank0) {
  const std::vector<size_t> sizes = {
      0,  1, 51, 52, 53, 103, 104, 4 * static_cast<size_t>(GetParam().most) + 1,
      105};
  ExpectAllOk(Run([&](HostRank& own, int64_t r) -> absl::Status {
    for (const size_t bytes : sizes) {
      std::string want;
      for (size_t i = 0; i < bytes; ++i) {
        want.push_back(static_cast<char>(i * i % 251));
      }
      std::string data = r == 0 ? want : std::string(bytes, 'x');
      const absl::Status status = own.Broadcast(&data);
      if (!status.ok()) return status;
      EXPECT_EQ(data, want) << bytes << " bytes on rank " << r;
    }
    return absl::OkStatus();
  }));
}

// Random calls of all kinds; each rank pauses at random before calls.
TEST_P(CollectiveTest, RandomSequencesOfAllKindsOfCallsGiveTheRightResults) {
  const int calls = GetParam().calls;
  ExpectAllOk(Run([&](HostRank& own, int64_t r) -> absl::Status {
    // The same seed makes all ranks make the same calls.
    std::mt19937 random(11);
    std::mt19937 pauses(static_cast<uint32_t>(r));
    for (int call = 0; call < calls; ++call) {
      if (pauses() % 8 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(pauses() % 900));
      }
      const auto seed = static_cast<uint64_t>(call);
      const int64_t count = random() % 200;
      absl::Status status;
      switch (random() % 3) {
        case 0: {
          std::vector<float> data = RankNumbers(r, count, seed);
          status = own.AllReduceSum(&data);
          if (status.ok()) ExpectSum(data, seed);
          break;
        }
        case 1: {
          std::vector<int64_t> first_columns(static_cast<size_t>(size()) + 1);
          std::iota(first_columns.begin(), first_columns.end(), 0);
          const std::vector<float> all = RankNumbers(99, count * size(), seed);
          std::vector<float> data = OwnColumns(all, count, first_columns, r);
          status = own.AllGather(&data, count, first_columns);
          if (status.ok()) {
            EXPECT_EQ(data, all);
          }
          break;
        }
        default: {
          const std::string want(static_cast<size_t>(count),
                                 static_cast<char>('a' + call % 26));
          std::string data = r == 0 ? want : std::string(want.size(), '-');
          status = own.Broadcast(&data);
          if (status.ok()) {
            EXPECT_EQ(data, want);
          }
        }
      }
      if (!status.ok()) return status;
    }
    EXPECT_EQ(own.collective().totals().calls, calls);
    EXPECT_EQ(own.collective().totals().sent_bytes > 0,
              GetParam().over_network);
    return absl::OkStatus();
  }));
}

TEST_P(CollectiveTest,
       CollectiveCallsThatOnlyCountMemoryDoNotWaitForOtherRanks) {
  HostRank own = Own(1);
  const CollectiveTotals before = rank(1)->totals();
  kernels::Workspace counter = kernels::Workspace::Counting();
  const std::vector<int64_t> first_columns(static_cast<size_t>(size()) + 1);
  KVASIR_EXPECT_OK(rank(1)->AllReduceSum(own.stream(), nullptr, 1 << 20,
                                         kernels::DType::kF32, counter));
  KVASIR_EXPECT_OK(
      rank(1)->AllGather(own.stream(), nullptr, 5, first_columns, counter));
  KVASIR_EXPECT_OK(rank(1)->Broadcast(own.stream(), nullptr, 77, counter));
  EXPECT_EQ(rank(1)->totals().calls, before.calls);
  EXPECT_EQ(rank(1)->totals().sent_bytes, before.sent_bytes);
  EXPECT_EQ(rank(1)->totals().waited_seconds, before.waited_seconds);
}

// Only rank 1 makes the calls of this test. They contain no data, so they
// return at once.
TEST_P(CollectiveTest, CollectiveCallsWithoutDataDoNotWaitForOtherRanks) {
  HostRank own = Own(1);
  const CollectiveTotals before = rank(1)->totals();
  std::vector<float> none;
  std::string no_text;
  std::vector<int64_t> first_columns(static_cast<size_t>(size()) + 1);
  KVASIR_EXPECT_OK(own.AllReduceSum(&none));
  KVASIR_EXPECT_OK(own.Broadcast(&no_text));
  KVASIR_EXPECT_OK(own.AllGather(&none, 5, first_columns));
  first_columns.back() = 10;
  KVASIR_EXPECT_OK(own.AllGather(&none, 0, first_columns));
  EXPECT_EQ(rank(1)->totals().calls, before.calls + 4);
  EXPECT_EQ(rank(1)->totals().sent_bytes, before.sent_bytes);
  EXPECT_EQ(rank(1)->totals().waited_seconds, before.waited_seconds);
}

TEST_P(CollectiveTest, TheTimeSpentWaitingForOtherRanksIsCounted) {
  constexpr std::chrono::milliseconds kLate(40);
  for (int64_t r = 0; r < size(); ++r) {
    EXPECT_EQ(rank(r)->totals().waited_seconds, 0);
  }
  const auto begin = std::chrono::steady_clock::now();
  ExpectAllOk(Run([&](HostRank& own, int64_t r) -> absl::Status {
    if (r == size() - 1) std::this_thread::sleep_for(kLate);
    std::vector<float> data(10);
    return own.AllReduceSum(&data);
  }));
  const std::chrono::duration<double> all =
      std::chrono::steady_clock::now() - begin;
  for (int64_t r = 0; r < size(); ++r) {
    const double waited = rank(r)->totals().waited_seconds;
    EXPECT_LT(waited, all.count());
    // With NCCL the device waits, not the calling thread; that time is not
    // counted.
    EXPECT_EQ(waited > 0, !GetParam().nccl);
  }
  if (GetParam().nccl) return;
  // On a busy machine rank 0's thread may start late too and so wait less. The
  // test requires only half of the delay.
  EXPECT_GT(rank(0)->totals().waited_seconds,
            std::chrono::duration<double>(kLate).count() / 2);
}

TEST_P(CollectiveTest, ACallWithInvalidSizesIsRefusedWithoutEndingTheGroup) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto invalid = [](const absl::Status& status, const char* text) {
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  ExpectAllOk(Run([&](HostRank& own, int64_t r) {
    Collective& ranks = own.collective();
    std::vector<int64_t> columns(static_cast<size_t>(size()) + 1, 0);
    columns.back() = 10;
    const auto gather = [&](int64_t num_rows,
                            const std::vector<int64_t>& first_columns) {
      return ranks.AllGather(own.stream(), nullptr, num_rows, first_columns,
                             own.workspace());
    };
    const auto sum = [&](int64_t count) {
      return ranks.AllReduceSum(own.stream(), nullptr, count,
                                kernels::DType::kF32, own.workspace());
    };
    invalid(sum(-1), "but it has 1 rows and -1 columns");
    invalid(sum(kMost), "AllReduceSum");
    invalid(ranks.Broadcast(own.stream(), nullptr, -1, own.workspace()),
            "Broadcast: the size must be at least 0 bytes, but is -1");
    invalid(gather(-1, columns), "but it has -1 rows and 10 columns");
    invalid(gather(kMost, columns), "AllGather");
    invalid(gather(1, {}), "first_columns must have the first column of each");
    invalid(gather(1, {0, 10}),
            "first_columns must have the first column of each");
    columns[0] = 1;
    invalid(gather(1, columns),
            "first_columns must have the first column of each");
    columns[0] = 0;
    columns[1] = 11;
    invalid(gather(1, columns),
            "first_columns must have the first column of each");
    std::vector<float> data = {static_cast<float>(r)};
    return own.AllReduceSum(&data);
  }));
}

TEST_P(CollectiveTest, CallsOfAllOtherRanksFailIfOneRankAborts) {
  UseImpatientNccl();
  const std::vector<absl::Status> results =
      Run([&](HostRank& own, int64_t r) -> absl::Status {
        std::vector<float> data(100);
        const absl::Status first = own.AllReduceSum(&data);
        if (!first.ok()) return first;
        if (r == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return absl::InternalError("disk on fire");
        }
        return own.AllReduceSum(&data);
      });
  for (int64_t r = 0; r < size(); ++r) {
    if (r == 1) continue;
    const absl::Status& result = results[static_cast<size_t>(r)];
    if (GetParam().nccl) {
      EXPECT_THAT(result, StatusIs(absl::StatusCode::kUnavailable,
                                   HasSubstr("rank is gone")));
      continue;
    }
    EXPECT_EQ(result.code(), absl::StatusCode::kAborted) << result;
    EXPECT_THAT(std::string(result.message()),
                HasSubstr("rank 1 gave up: disk on fire"));
  }
}

TEST_P(CollectiveTest, AbortEndsACallThatTheSameRankMakesOnAnotherThread) {
  absl::Status ended, after;
  std::thread waiting([&] {
    HostRank own = Own(0);
    std::vector<float> data(1000);
    ended = own.AllReduceSum(&data);
    std::string text = "x";
    after = own.Broadcast(&text);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rank(0)->Abort(absl::CancelledError("a heartbeat is missing"));
  rank(0)->Abort(absl::CancelledError("another reason"));
  waiting.join();
  for (const absl::Status& status : {ended, after}) {
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kAborted,
                         "tensor-parallel rank 0 gave up: a heartbeat is "
                         "missing"));
  }
}

TEST_P(CollectiveTest, CollectiveCallsFailOnAllRanksIfTheirSizesDiffer) {
  UseImpatientNccl();
  const std::vector<absl::Status> results =
      Run([&](HostRank& own, int64_t r) -> absl::Status {
        std::vector<float> data(20);
        if (r != size() - 1) return own.AllReduceSum(&data);
        data.resize(40);
        return own.AllReduceSum(&data);
      });
  int reported = 0;
  for (const absl::Status& result : results) {
    EXPECT_FALSE(result.ok());
    if (GetParam().nccl) {
      EXPECT_THAT(result,
                  StatusIs(absl::StatusCode::kUnavailable,
                           HasSubstr("stands still or makes other calls")));
      ++reported;
    } else if (result.code() == absl::StatusCode::kInternal) {
      ++reported;
      EXPECT_THAT(std::string(result.message()),
                  AllOf(HasSubstr("tensor-parallel ranks make different calls"),
                        HasSubstr("AllReduceSum of 80 bytes"),
                        HasSubstr("AllReduceSum of 160 bytes")));
    } else {
      EXPECT_EQ(result.code(), absl::StatusCode::kAborted) << result;
    }
  }
  EXPECT_GE(reported, 1);
}

TEST_P(CollectiveTest, CollectiveCallsFailOnAllRanksIfTheirKindsDiffer) {
  UseImpatientNccl();
  const std::vector<absl::Status> results =
      Run([&](HostRank& own, int64_t r) -> absl::Status {
        std::vector<float> data(20);
        if (r == 0) return own.AllReduceSum(&data);
        std::string text(80, 'x');
        return own.Broadcast(&text);
      });
  for (const absl::Status& result : results) {
    EXPECT_TRUE(result.code() == (GetParam().nccl
                                      ? absl::StatusCode::kUnavailable
                                      : absl::StatusCode::kInternal) ||
                result.code() == absl::StatusCode::kAborted)
        << result;
  }
}

TEST(SingleRankTest, CollectiveCallsDoNotChangeTheDataOfASingleRank) {
  std::vector<std::unique_ptr<Collective>> ones = InProcessGroup::Create(1);
  ASSERT_EQ(ones.size(), 1u);
  ones.push_back(std::make_unique<SingleRank>());
  for (const auto& one : ones) {
    EXPECT_EQ(one->shard(), plan::TpShard());
    HostRank own(one.get());
    const std::vector<float> numbers = RankNumbers(0, 100, 1);
    std::vector<float> data = numbers;
    KVASIR_EXPECT_OK(own.AllReduceSum(&data));
    KVASIR_EXPECT_OK(own.AllGather(&data, 4, {0, 25}));
    EXPECT_EQ(data, numbers);
    std::string text = "text";
    KVASIR_EXPECT_OK(own.Broadcast(&text));
    EXPECT_EQ(text, "text");
  }
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveTest, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<GroupCase>& each) {
                           return absl::StrCat(each.param.name,
                                               each.param.size);
                         });

}  // namespace
}  // namespace kvasir::worker
