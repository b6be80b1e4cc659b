// Tests how an NCCL group handles failures, with a fake NCCL library that needs
// no GPU.
#include "worker/ranks/nccl/nccl_group.h"

#include <dirent.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "kernels/rowwise/ops.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/nccl_ranks.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

// Options with a long call_timeout, for tests in which a reported failure must
// end the calls much sooner.
NcclOptions Patient() {
  return {.call_timeout = absl::Seconds(60),
          .poll_interval = absl::Milliseconds(10)};
}
NcclOptions Impatient() {
  return {.call_timeout = absl::Milliseconds(400),
          .poll_interval = absl::Milliseconds(10)};
}

// Records the errors that on_failure receives.
class Failures {
 public:
  NcclOptions Of(NcclOptions options) {
    options.on_failure = [this](const absl::Status& status) {
      base::MutexLock lock(&mutex_);
      reported_.push_back(status);
    };
    return options;
  }
  std::vector<absl::Status> reported() {
    base::MutexLock lock(&mutex_);
    return reported_;
  }

 private:
  base::Mutex mutex_;
  std::vector<absl::Status> reported_ ABSL_GUARDED_BY(mutex_);
};

// Counts what a group must release: open descriptors of this process, and
// mappings of the fake library's shared memory.
int64_t Held() {
  int64_t held = 0;
  DIR* const files = opendir("/proc/self/fd");
  while (readdir(files) != nullptr) ++held;
  closedir(files);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    held += line.find("kvasir-fake-nccl") != std::string::npos;
  }
  return held;
}

class NcclGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    (void)FakeNcclLive();  // loads the fake library
    aborts_ = FakeNcclAborts();
    held_ = Held();
  }
  void TearDown() override {
    End();
    EXPECT_EQ(FakeNcclLive(), 0) << "communicators are left";
    EXPECT_EQ(Held(), held_) << "memory or descriptors are left";
  }

  void Make(int64_t size, const NcclOptions& options,
            const std::string& faults = "") {
    const FakeNcclFaults set(faults);
    gpus_ = MakeHostGpus(size);
    group_ = MakeNcclRanks(size, options);
    ASSERT_EQ(group_.size(), static_cast<size_t>(size));
  }
  void End() {
    EndRanks(&group_);
    gpus_.clear();
  }
  HostGpu& gpu(int64_t rank) { return *gpus_[static_cast<size_t>(rank)]; }
  Collective& collective(int64_t rank) {
    return *group_[static_cast<size_t>(rank)];
  }
  HostRank Own(int64_t rank) {
    return HostRank(&collective(rank), gpu(rank).device());
  }
  // Each rank makes `calls` sums, or stops at the first that fails.
  std::vector<absl::Status> Sum(int64_t calls) {
    std::vector<absl::Status> results(group_.size());
    OnRanks(static_cast<int64_t>(group_.size()), [&](int64_t r) {
      HostRank own = Own(r);
      absl::Status& status = results[static_cast<size_t>(r)];
      for (int64_t call = 0; call < calls && status.ok(); ++call) {
        std::vector<float> data(100, 1.0f);
        status = own.AllReduceSum(&data);
      }
    });
    return results;
  }
  int64_t aborts() const { return FakeNcclAborts() - aborts_; }

  std::vector<std::unique_ptr<HostGpu>> gpus_;
  std::vector<std::unique_ptr<Collective>> group_;

 private:
  int aborts_ = 0;
  int64_t held_ = 0;
};

TEST_F(NcclGroupTest, RanksThatEndTogetherFreeTheirResourcesWithoutAnAbort) {
  Make(3, Patient());
  for (const absl::Status& status : Sum(5)) KVASIR_EXPECT_OK(status);
  End();
  EXPECT_EQ(aborts(), 0);
}

TEST_F(NcclGroupTest, AGroupMayHaveASingleRank) {
  for (const bool deterministic : {false, true}) {
    NcclOptions options = Patient();
    options.deterministic = deterministic;
    Make(1, options);
    std::vector<float> data = {1, 2, 3, 4};
    std::string text = "abc";
    KVASIR_EXPECT_OK(Own(0).AllReduceSum(&data));
    KVASIR_EXPECT_OK(Own(0).AllGather(&data, 2, {0, 2}));
    KVASIR_EXPECT_OK(Own(0).Broadcast(&text));
    EXPECT_EQ(data, (std::vector<float>{1, 2, 3, 4}));
    EXPECT_EQ(text, "abc");
    EXPECT_EQ(collective(0).totals().calls, 3);
    EXPECT_EQ(collective(0).totals().sent_bytes, 0);
    End();
  }
}

TEST_F(NcclGroupTest, SentBytesAreThoseThatARingAlgorithmWouldSend) {
  const auto sent = [this](bool deterministic, int64_t rank, auto call) {
    NcclOptions options = Patient();
    options.deterministic = deterministic;
    Make(4, options);
    OnRanks(4, [&](int64_t r) {
      HostRank own = Own(r);
      KVASIR_EXPECT_OK(call(own));
    });
    const int64_t bytes = collective(rank).totals().sent_bytes;
    End();
    return bytes;
  };
  const auto sum = [](HostRank& own) {
    std::vector<float> data(100);
    return own.AllReduceSum(&data);
  };
  EXPECT_EQ(sent(false, 1, sum), 2 * 3 * 400 / 4);
  EXPECT_EQ(sent(true, 1, sum), 3 * 400);
  const auto gather = [](HostRank& own) {
    std::vector<float> data(10);
    // The widest rank has three columns.
    return own.AllGather(&data, 2, {0, 1, 1, 4, 5});
  };
  EXPECT_EQ(sent(false, 1, gather), 3 * 2 * 3 * 4);
  const auto broadcast = [](HostRank& own) {
    std::string data(77, 'x');
    return own.Broadcast(&data);
  };
  EXPECT_EQ(sent(false, 0, broadcast), 77);
  EXPECT_EQ(sent(false, 3, broadcast), 0);
}

TEST_F(NcclGroupTest, ActivationsAreSummedInTheirOwnDataType) {
  Make(4, Patient());
  std::vector<std::vector<kernels::Bf16>> sums(4);
  OnRanks(4, [&](int64_t r) {
    HostRank own = Own(r);
    std::vector<kernels::Bf16>& data = sums[static_cast<size_t>(r)];
    for (const float number : RankNumbers(r, 1000, 3)) {
      data.push_back(kernels::FromFloat<kernels::Bf16>(number));
    }
    KVASIR_EXPECT_OK(own.AllReduceSum(&data));
  });
  const std::vector<float> want = SumOfRanks(4, 1000, 3);
  std::vector<float> most(want.size());
  for (int64_t r = 0; r < 4; ++r) {
    const std::vector<float> numbers = RankNumbers(r, 1000, 3);
    for (size_t i = 0; i < most.size(); ++i) most[i] += std::abs(numbers[i]);
  }
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(kernels::ToFloat(sums[0][i]), want[i], most[i] / 64) << i;
    for (const auto& sum : sums) EXPECT_EQ(sum[i].bits, sums[0][i].bits);
  }
}

TEST_F(NcclGroupTest,
       AnAsynchronousErrorOfNcclIsReportedOnceAndReturnedByAllLaterCalls) {
  Failures failures;
  Make(2, failures.Of(Patient()), "0:3:error,1:0:notify");
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results = Sum(1000);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_THAT(
      results[0],
      StatusIs(kUnavailable, HasSubstr("NCCL: unhandled system error (2)")));
  // NCCL reports the failure of another rank if the ranks are connected over a
  // network.
  EXPECT_THAT(
      results[1],
      StatusIs(kUnavailable,
               AllOf(HasSubstr("NCCL: remote process exited or there was a "
                               "network error (6)"))));
  // Later calls return the same error.
  for (int64_t r = 0; r < 2; ++r) {
    const auto result = static_cast<size_t>(r);
    EXPECT_EQ(collective(r).status(), results[result]);
    collective(r).Abort(absl::InternalError("another reason"));
    std::string text = "x";
    EXPECT_EQ(Own(r).Broadcast(&text), results[result]);
  }
  EXPECT_THAT(failures.reported(),
              ::testing::UnorderedElementsAre(results[0], results[1]));
  End();
  EXPECT_EQ(aborts(), 2);
}

TEST_F(NcclGroupTest, AllRanksEndAtTheTimeoutIfOneRankHangs) {
  Failures failures;
  Make(3, failures.Of(Impatient()), "1:4:hang");
  const absl::Time begin = absl::Now();
  for (const absl::Status& status : Sum(1000)) {
    EXPECT_THAT(status,
                StatusIs(kUnavailable,
                         AllOf(HasSubstr("of 3 has waited for the others"),
                               HasSubstr("in ncclAllReduce"))));
  }
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(400));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_EQ(failures.reported().size(), 3u);
  End();
  EXPECT_EQ(aborts(), 3);
}

// As in a step of a model: many calls are enqueued, and the host waits only
// once, at the end.
TEST_F(NcclGroupTest,
       AnEnqueuedCallThatHangsTimesOutWhileTheHostWaitsForTheStream) {
  Make(2, Impatient(), "1:40:hang");
  OnRanks(2, [&](int64_t r) {
    const std::unique_ptr<kernels::Stream> stream =
        gpu(r).device()->MakeStream();
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto memory,
        gpu(r).device()->allocator().Allocate(400, kernels::MemoryTag::kOther));
    kernels::Workspace none(nullptr, 0);
    for (int call = 0; call < 60; ++call) {
      KVASIR_EXPECT_OK(collective(r).AllReduceSum(
          *stream, memory.as<float>(), 100, kernels::DType::kF32, none));
    }
    KVASIR_EXPECT_OK(stream->Synchronize());
    EXPECT_THAT(collective(r).status(),
                StatusIs(kUnavailable, HasSubstr("in ncclAllReduce")));
  });
}

// Each call takes less than the timeout, but all together take much longer.
TEST_F(NcclGroupTest, AStreamThatMakesProgressDoesNotTimeOut) {
  NcclOptions options = Patient();
  options.call_timeout = absl::Seconds(2);
  Make(2, options);
  OnRanks(2, [&](int64_t r) {
    const std::unique_ptr<kernels::Stream> stream =
        gpu(r).device()->MakeStream();
    auto& launches = static_cast<kernels::LaunchStream&>(*stream);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto memory,
        gpu(r).device()->allocator().Allocate(400, kernels::MemoryTag::kOther));
    kernels::Workspace none(nullptr, 0);
    KVASIR_ASSERT_OK_AND_ASSIGN(void* const handle, launches.LibraryHandle());
    auto* const work = static_cast<kernels::HostWork*>(handle);
    for (int call = 0; call < 12; ++call) {
      work->enqueue(
          work, [](void*) { absl::SleepFor(absl::Milliseconds(300)); }, nullptr,
          nullptr);
      KVASIR_EXPECT_OK(collective(r).AllReduceSum(
          *stream, memory.as<float>(), 100, kernels::DType::kF32, none));
    }
    KVASIR_EXPECT_OK(stream->Synchronize());
    KVASIR_EXPECT_OK(collective(r).status());
  });
}

TEST_F(NcclGroupTest, ANcclCallThatDoesNotReturnIsAbortedAtTheTimeout) {
  Make(2, Impatient(), "0:2:stuck");
  const std::vector<absl::Status> results = Sum(1000);
  for (const absl::Status& status : results) {
    EXPECT_THAT(status, StatusIs(kUnavailable, HasSubstr("in ncclAllReduce")));
  }
  End();
  EXPECT_EQ(aborts(), 2);
}

TEST_F(NcclGroupTest, AnErrorThatNcclReturnsIsReported) {
  Make(2, Impatient(), "1:2:refuse");
  const std::vector<absl::Status> results = Sum(1000);
  EXPECT_THAT(results[1],
              StatusIs(absl::StatusCode::kInternal,
                       "NCCL: ncclAllReduce: another error (3); last error: "
                       "fake: refused"));
  EXPECT_THAT(results[0], StatusIs(kUnavailable, HasSubstr("stands still")));
}

TEST_F(NcclGroupTest, ACallWaitsForWorkThatNcclContinuesInTheBackground) {
  Make(2, Patient(), "0:1:late,1:3:late,0:4:late,1:4:late");
  for (const absl::Status& status : Sum(6)) KVASIR_EXPECT_OK(status);
  End();
  EXPECT_EQ(aborts(), 0);
}

TEST_F(NcclGroupTest, AbortEndsTheCallThatAStreamIsExecuting) {
  Failures failures;
  Make(2, failures.Of(Patient()));
  absl::Status ended;
  std::atomic<bool> begun = false;
  std::thread waiting([&] {
    HostRank own = Own(0);
    std::vector<float> data(1000);
    begun = true;
    ended = own.AllReduceSum(&data);
  });
  while (!begun) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(30));
  const absl::Time begin = absl::Now();
  collective(0).Abort(absl::CancelledError("a heartbeat is missing"));
  waiting.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_THAT(ended, StatusIs(absl::StatusCode::kAborted,
                              "tensor-parallel rank 0 gave up: a heartbeat is "
                              "missing"));
  collective(1).Abort(absl::CancelledError("so did rank 0"));
  End();
  EXPECT_EQ(aborts(), 2);
  // on_failure is not called, because the caller of Abort knows the reason.
  EXPECT_EQ(failures.reported().size(), 0u);
}

// A rank that is destroyed waits for the others, but only briefly, because they
// may be gone.
TEST_F(NcclGroupTest,
       ARankThatIsDestroyedBeforeTheOthersWaitsForThemOnlyBriefly) {
  Make(2, Patient());
  const absl::Time begin = absl::Now();
  group_[0] = nullptr;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  EXPECT_EQ(aborts(), 1);
  collective(1).Abort(absl::CancelledError());
}

TEST_F(NcclGroupTest, AnErrorOfTheCudaRuntimeIsReported) {
  const auto cuda = [](const char* what) {
    return StatusIs(absl::StatusCode::kInternal,
                    AllOf(HasSubstr(what), HasSubstr("cudaErrorFake (700)")));
  };
  constexpr auto kError = static_cast<kernels::cuda::Result>(700);
  for (const char* const call : {"MakeEvent", "RecordEvent", "QueryEvent"}) {
    Failures failures;
    Make(2, failures.Of(Impatient()));
    std::unique_ptr<kernels::Stream> stream = gpu(0).device()->MakeStream();
    KVASIR_ASSERT_OK_AND_ASSIGN(
        auto memory,
        gpu(0).device()->allocator().Allocate(400, kernels::MemoryTag::kOther));
    kernels::Workspace none(nullptr, 0);
    gpu(0).runtime().FailNext(call, kError);
    const absl::Status enqueued = collective(0).AllReduceSum(
        *stream, memory.as<float>(), 100, kernels::DType::kF32, none);
    if (std::string(call) == "QueryEvent") {
      KVASIR_EXPECT_OK(enqueued);
      while (failures.reported().empty()) absl::SleepFor(absl::Milliseconds(1));
    } else {
      EXPECT_EQ(enqueued, collective(0).status());
    }
    EXPECT_THAT(collective(0).status(), cuda("")) << call;
    EXPECT_THAT(failures.reported(), ::testing::ElementsAre(cuda(""))) << call;
    KVASIR_EXPECT_OK(stream->Synchronize());
    stream = nullptr;
    memory = {};
    collective(1).Abort(absl::CancelledError());
    End();
  }
  // If the GPU cannot be selected, the call fails.
  Make(1, Patient());
  const std::unique_ptr<kernels::Stream> stream = gpu(0).device()->MakeStream();
  kernels::Workspace none(nullptr, 0);
  gpu(0).runtime().FailNext("Use", kError);
  EXPECT_THAT(collective(0).Broadcast(*stream, nullptr, 4, none),
              cuda("selecting the device"));
}

TEST_F(NcclGroupTest, ConnectTimesOutIfARankDoesNotConnect) {
  const FakeNcclFaults faults("1:0:hang");
  Failures failures;
  NcclOptions options = failures.Of(Patient());
  options.connect_timeout = absl::Milliseconds(300);
  for (const auto& rank : ConnectNcclRanks(3, options)) {
    EXPECT_THAT(rank.status(),
                StatusIs(kUnavailable, HasSubstr("in ncclCommInitRankConfig")));
  }
  End();
  EXPECT_EQ(aborts(), 3);
  // on_failure is not called, because Connect returns the error.
  EXPECT_EQ(failures.reported().size(), 0u);
}

TEST_F(NcclGroupTest, AConnectionThatNcclRefusesIsReported) {
  const FakeNcclFaults faults("0:0:refuse");
  EXPECT_THAT(ConnectNcclRanks(1, Patient())[0].status(),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("ncclCommInitRankConfig: another error (3); "
                                 "last error: fake: refused")));
}

// Does not use fixture NcclGroupTest: its leak check would find the unused id
// that rank 0 has made.
TEST(NcclConnectTest, TheDeviceIsSelectedBeforeConnecting) {
  NcclOptions options = Patient();
  options.use_device = [] { return absl::InternalError("no such GPU"); };
  EXPECT_THAT(ConnectNcclRanks(1, options)[0].status(),
              StatusIs(absl::StatusCode::kInternal, "no such GPU"));
}

TEST_F(NcclGroupTest, CallsOnAStreamOfTheCpuAreRefused) {
  Make(1, Patient());
  HostRank own(&collective(0));
  std::vector<float> data(4);
  std::string text = "x";
  const auto refused = [](const char* call) {
    return StatusIs(
        absl::StatusCode::kUnimplemented,
        absl::StrCat(call, ": NCCL needs a stream of a GPU, not of the CPU"));
  };
  EXPECT_THAT(own.AllReduceSum(&data), refused("AllReduceSum"));
  EXPECT_THAT(own.AllGather(&data, 1, {0, 4}), refused("AllGather"));
  EXPECT_THAT(own.Broadcast(&text), refused("Broadcast"));
}

TEST_F(NcclGroupTest,
       AMissingKernelIsReportedBeforeTheFirstStepWhileMemoryIsCounted) {
  NcclOptions options = Patient();
  options.deterministic = true;
  Make(1, options);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto bare,
      kernels::CudaDevice::Make({}, &gpu(0).runtime(), kernels::DeviceOps()));
  const std::unique_ptr<kernels::Stream> stream = bare->MakeStream();
  kernels::Workspace counter = kernels::Workspace::Counting();
  EXPECT_THAT(
      collective(0).AllReduceSum(*stream, nullptr, 4, kernels::DType::kF32,
                                 counter),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("sum_rows")));
  EXPECT_THAT(
      collective(0).AllGather(*stream, nullptr, 1, {0, 4}, counter),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("gather_rows")));
}

TEST_F(NcclGroupTest, InvalidRanksAndInterfacesAreRefusedBeforeNcclIsOpened) {
  const auto begin = [](NcclOptions options) {
    options.libraries = FakeNcclLibraries();
    return NcclGroup::Begin(options).status();
  };
  EXPECT_THAT(begin({.shard = {2, 2}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "NCCL: there is no rank 2 of 2: want 1 to 256 ranks, "
                       "numbered from 0"));
  EXPECT_THAT(begin({.shard = {0, 257}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "NCCL: there is no rank 0 of 257: want 1 to 256 ranks, "
                       "numbered from 0"));
  EXPECT_THAT(begin({.shard = {1, 2}, .interface = "none7"}),
              StatusIs(absl::StatusCode::kNotFound,
                       "NCCL: 'none7' is not a network interface of this "
                       "machine"));
  unsetenv("NCCL_SOCKET_IFNAME");
  KVASIR_EXPECT_OK(begin({.shard = {1, 2}}));
  EXPECT_EQ(std::getenv("NCCL_SOCKET_IFNAME"), nullptr);
  KVASIR_EXPECT_OK(begin({.shard = {1, 2}, .interface = "lo"}));
  EXPECT_STREQ(std::getenv("NCCL_SOCKET_IFNAME"), "=lo");
}

}  // namespace
}  // namespace kvasir::worker
