// Tests CudaDevice with a fake CUDA runtime, without a GPU.
#include "kernels/cuda/cuda_device.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "base/status_matchers.h"
#include "kernels/cuda/staging.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/host_work.h"
#include "kernels/device/read_back.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

using base::StatusIs;
using cuda::FakeLaunch;
using cuda::FakeRuntime;
using cuda::Result;
using cuda::Staging;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

using Bytes = std::vector<char>;

Bytes Pattern(size_t bytes, int seed) {
  Bytes pattern(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    pattern[i] =
        static_cast<char>(i * 31 + i / 251 + static_cast<size_t>(seed));
  }
  return pattern;
}

bool Passed(const StreamMark& mark) {
  const absl::StatusOr<bool> passed = mark.passed();
  KVASIR_EXPECT_OK(passed.status());
  return passed.ok() && *passed;
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  // Makes `device_` and `stream_`; the test fails if there is an error.
  void Make(const CudaDeviceOptions& options = {}) {
    auto device = CudaDevice::Make(options, &runtime_, {});
    KVASIR_ASSERT_OK(device.status());
    device_ = *std::move(device);
    stream_ = device_->MakeStream();
  }
  absl::Status WhyNot(const CudaDeviceOptions& options = {}) {
    return CudaDevice::Make(options, &runtime_, {}).status();
  }
  DeviceBuffer Memory(size_t bytes, MemoryTag tag = MemoryTag::kOther) {
    auto buffer = device_->allocator().Allocate(bytes, tag);
    KVASIR_EXPECT_OK(buffer.status());
    return *std::move(buffer);
  }
  Bytes Get(const DeviceBuffer& buffer) {
    Bytes host(buffer.bytes());
    KVASIR_EXPECT_OK(
        ReadBack(*stream_, host.data(), buffer.data(), host.size()));
    return host;
  }
  absl::Status Refused(size_t bytes, MemoryTag tag) {
    return device_->allocator().Allocate(bytes, tag).status();
  }
  LaunchStream& launches() { return static_cast<LaunchStream&>(*stream_); }
  absl::Status Launch(KernelLaunch launch) {
    static const int kernel = 0;
    if (launch.function == nullptr) launch.function = &kernel;
    launches().launcher().Enqueue(launch);
    return launches().TakeLaunchError();
  }

  FakeRuntime runtime_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(CudaDeviceTest, AMarkIsPassedAfterItsStreamHasReachedIt) {
  Make();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto mark, launches().MakeMark());
  EXPECT_TRUE(Passed(*mark));
  KVASIR_ASSERT_OK(Launch({.name = "before"}));
  KVASIR_ASSERT_OK(launches().Record(mark.get()));
  EXPECT_FALSE(Passed(*mark));
  KVASIR_ASSERT_OK(Launch({.name = "behind"}));
  KVASIR_ASSERT_OK(launches().Record(mark.get()));
  KVASIR_ASSERT_OK(stream_->Synchronize());
  EXPECT_TRUE(Passed(*mark));
  // A mark may outlive its stream and device.
  stream_ = nullptr;
  device_ = nullptr;
  EXPECT_TRUE(Passed(*mark));
}

TEST_F(CudaDeviceTest, AFailedEventIsReported) {
  Make();
  const auto fails_with = [](const char* what) {
    return StatusIs(absl::StatusCode::kInternal,
                    AllOf(HasSubstr(what), HasSubstr("cudaErrorFake (700)")));
  };
  constexpr auto kError = static_cast<Result>(700);
  runtime_.FailNext("MakeEvent", kError);
  EXPECT_THAT(launches().MakeMark(), fails_with("an event"));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto mark, launches().MakeMark());
  KVASIR_ASSERT_OK(Launch({.name = "before"}));
  runtime_.FailNext("RecordEvent", kError);
  EXPECT_THAT(launches().Record(mark.get()),
              fails_with("up to the kernel before"));
  runtime_.FailNext("QueryEvent", kError);
  EXPECT_THAT(mark->passed(), fails_with("work on a stream"));
}

TEST_F(CudaDeviceTest,
       LibraryCallsOnTheHandleOfAStreamRunInTheOrderOfTheStream) {
  Make();
  std::vector<int> order;
  runtime_.OnRun([&](const KernelLaunch&) { order.push_back(1); });
  KVASIR_ASSERT_OK(Launch({.name = "before"}));
  KVASIR_ASSERT_OK_AND_ASSIGN(void* const handle, launches().LibraryHandle());
  EXPECT_EQ(handle, CudaDevice::HandleOf(*stream_));
  auto* const work = static_cast<HostWork*>(handle);
  work->enqueue(
      work, [](void* to) { static_cast<std::vector<int>*>(to)->push_back(2); },
      &order, nullptr);
  KVASIR_ASSERT_OK(Launch({.name = "behind"}));
  EXPECT_EQ(order, std::vector<int>());
  KVASIR_ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 1}));
  runtime_.FailNext("Use", static_cast<Result>(101));
  EXPECT_THAT(
      launches().LibraryHandle(),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("selecting the device")));
}

TEST_F(CudaDeviceTest, TheDeviceReportsTheWeightLayoutAndSizesOfItsGpu) {
  Make();
  EXPECT_EQ(device_->kind(), DeviceKind::kCuda);
  EXPECT_EQ(device_->weight_layout(), WeightLayout::kRows);
  EXPECT_EQ(device_->page_granule_bytes(), 16);
  EXPECT_EQ(device_->cta_shared_bytes(), 227 << 10);
  EXPECT_EQ(device_->activations(), DType::kBf16);
  EXPECT_EQ(launches().launcher().multiprocessors(), 7);
  EXPECT_EQ(device_->properties().name, "Fake GPU");
  Workspace none(nullptr, 0);
  EXPECT_THAT(
      SiluMul(*stream_, {.num_rows = 1, .features = 1}, none),
      base::StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("silu_mul")));
}

TEST_F(CudaDeviceTest, WithoutADriverTheErrorNamesTheNeededDriver) {
  runtime_.driver_version = 0;
  EXPECT_THAT(WhyNot(), base::StatusIs(absl::StatusCode::kFailedPrecondition,
                                       AllOf(HasSubstr("no NVIDIA driver"),
                                             HasSubstr("CUDA 13.0 or later"))));
}

TEST_F(CudaDeviceTest, TheErrorForAnOldDriverNamesItsVersionAndTheNeededOne) {
  runtime_.driver_version = 12040;
  EXPECT_THAT(WhyNot(),
              base::StatusIs(absl::StatusCode::kFailedPrecondition,
                             AllOf(HasSubstr("only CUDA 12.4"),
                                   HasSubstr("needs CUDA 13.0 or later"))));
  // A newer driver is accepted.
  runtime_.driver_version = 14010;
  KVASIR_EXPECT_OK(WhyNot());
}

TEST_F(CudaDeviceTest, TheErrorForAGpuThatDoesNotExistNamesTheLastGpu) {
  runtime_.device_count = 2;
  for (const int ordinal : {2, -1}) {
    EXPECT_THAT(WhyNot({.ordinal = ordinal}),
                base::StatusIs(
                    absl::StatusCode::kInvalidArgument,
                    AllOf(HasSubstr(absl::StrCat("cuda:", ordinal, ":")),
                          HasSubstr("the last GPU of this host is cuda:1"))));
  }
  KVASIR_EXPECT_OK(WhyNot({.ordinal = 1}));
  runtime_.device_count = 0;
  EXPECT_THAT(WhyNot(), base::StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("sees no GPU")));
  runtime_.FailNext("DeviceCount", Result::kNoDevice);
  EXPECT_THAT(WhyNot(), base::StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST_F(CudaDeviceTest, AGpuForWhichTheBuildHasNoCodeIsRefused) {
  runtime_.properties.major = 7;
  runtime_.properties.minor = 5;
  EXPECT_THAT(
      WhyNot(),
      base::StatusIs(absl::StatusCode::kFailedPrecondition,
                     AllOf(HasSubstr("(Fake GPU) is sm_75"),
                           HasSubstr("sm_80, sm_90a and PTX of compute_80"))));
  runtime_.properties.major = 12;
  KVASIR_EXPECT_OK(WhyNot());
}

TEST_F(CudaDeviceTest, TheErrorSaysWhyAGpuCannotBeUsed) {
  runtime_.FailNext("MemoryInfo", static_cast<Result>(46));
  EXPECT_THAT(WhyNot(), base::StatusIs(absl::StatusCode::kInternal,
                                       AllOf(HasSubstr("cuda:0 (Fake GPU)"),
                                             HasSubstr("cudaErrorFake (46)"))));
}

// The launched kernel records what is in device memory when the stream runs it.
TEST_F(CudaDeviceTest, TheCallerMayReuseItsMemoryRightAfterAnUpload) {
  Make();
  const DeviceBuffer memory = Memory(100);
  std::vector<Bytes> seen;
  runtime_.OnRun([&](const KernelLaunch&) {
    const char* const at = memory.as<char>().device_address();
    seen.emplace_back(at, at + 100);
  });
  constexpr int kSteps = 3 * static_cast<int>(Staging::kBlocks) + 1;
  Bytes blob;
  for (int step = 0; step < kSteps; ++step) {
    blob = Pattern(100, step);
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
    blob.assign(100, 'x');
    KVASIR_ASSERT_OK(Launch({.name = "look"}));
  }
  KVASIR_ASSERT_OK(stream_->Synchronize());
  ASSERT_THAT(seen, SizeIs(kSteps));
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_EQ(seen[static_cast<size_t>(step)], Pattern(100, step)) << step;
  }
}

TEST_F(CudaDeviceTest, AnUploadWaitsOnlyForTheLastUploadThroughTheSameBlock) {
  Make();
  const DeviceBuffer memory = Memory(100);
  const Bytes blob(100, 'a');
  for (size_t i = 0; i < Staging::kBlocks; ++i) {
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
  }
  EXPECT_EQ(runtime_.calls("WaitForEvent"), 0);
  EXPECT_EQ(runtime_.calls("SynchronizeStream"), 0);
  EXPECT_EQ(runtime_.waiting(), 2 * Staging::kBlocks);
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
  EXPECT_EQ(runtime_.calls("WaitForEvent"), 1);
  // The last upload has waited until the first one ran.
  EXPECT_EQ(runtime_.waiting(), 2 * Staging::kBlocks);
}

TEST_F(CudaDeviceTest, LongCopiesInBothDirectionsAreCutIntoPieces) {
  Make();
  const size_t bytes = 6 * Staging::kMostBlockBytes + 3;
  const DeviceBuffer memory = Memory(bytes);
  const Bytes blob = Pattern(bytes, 7);
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), bytes));
  EXPECT_EQ(Get(memory), blob);
  EXPECT_EQ(runtime_.calls("CopyAsync"), 2 * 7);
  EXPECT_EQ(runtime_.pinned_bytes(),
            Staging::kBlocks * Staging::kMostBlockBytes);
}

TEST_F(CudaDeviceTest, PinnedBlocksGrowToTheSizeOfTheLongestCopy) {
  Make();
  const DeviceBuffer memory = Memory(1 << 20);
  const Bytes blob(1 << 20, 'a');
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 1));
  EXPECT_EQ(runtime_.pinned_bytes(), Staging::kLeastBlockBytes);
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 300000));
  EXPECT_EQ(runtime_.pinned_bytes(), Staging::kLeastBlockBytes + (512 << 10));
  // After every block has grown to the length of these copies, no more memory
  // is pinned.
  for (size_t i = 0; i < 2 * Staging::kBlocks; ++i) {
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 300000));
  }
  const int64_t calls = runtime_.calls("AllocateHost");
  for (size_t i = 0; i < 2 * Staging::kBlocks; ++i) {
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 300000));
  }
  EXPECT_EQ(runtime_.calls("AllocateHost"), calls);
}

// If the event of an upload cannot be recorded, nothing reports when its block
// may be reused, so the upload must wait.
TEST_F(CudaDeviceTest, AnUploadWaitsIfItsEventCannotBeRecorded) {
  Make();
  const DeviceBuffer memory = Memory(100);
  const Bytes blob = Pattern(100, 1);
  runtime_.FailNext("RecordEvent", static_cast<Result>(400));
  EXPECT_THAT(Upload(*stream_, memory.data(), blob.data(), 100),
              base::StatusIs(absl::StatusCode::kInternal,
                             HasSubstr("cudaErrorFake (400)")));
  EXPECT_EQ(runtime_.waiting(), 0u);
}

TEST_F(CudaDeviceTest, TheErrorSaysWhyACopyIsRefused) {
  Make();
  const DeviceBuffer memory = Memory(100);
  Bytes blob(100);
  runtime_.FailNext("CopyAsync", static_cast<Result>(1));
  EXPECT_THAT(Upload(*stream_, memory.data(), blob.data(), 100),
              base::StatusIs(absl::StatusCode::kInternal,
                             HasSubstr("cudaErrorFake (1)")));
  runtime_.FailNext("AllocateHost", Result::kOutOfMemory);
  EXPECT_THAT(ReadBack(*stream_, blob.data(), memory.data(), 100),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("allocating 65536 bytes of pinned")));
  KVASIR_EXPECT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
}

TEST_F(CudaDeviceTest, WritesOfSeveralThreadsHaveArrivedWhenTheyEnd) {
  Make();
  constexpr int kWriters = 4, kWrites = 200, kBytes = 100;
  const DeviceBuffer memory = Memory(kWriters * kWrites * kBytes);
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = writer; i < kWriters * kWrites; i += kWriters) {
        const DevicePtr<void> to = memory.as<char>() + int64_t{kBytes} * i;
        auto host = device_->BeginWrite(to, kBytes);
        KVASIR_ASSERT_OK(host.status());
        std::memset(*host, i % 251, kBytes);
        KVASIR_EXPECT_OK(device_->EndWrite(to, *host, kBytes));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const char* const begin = memory.as<char>().device_address();
  const Bytes seen(begin, begin + memory.bytes());
  for (size_t i = 0; i < seen.size(); ++i) {
    ASSERT_EQ(seen[i], static_cast<char>(i / kBytes % 251)) << i;
  }
  EXPECT_EQ(Get(memory), seen);
  DeviceTables tables(device_.get());
  const std::vector<int32_t> numbers = {1, 2, 3};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto table, tables.Add<int32_t>(numbers));
  EXPECT_EQ(std::memcmp(table.device_address(), numbers.data(), 12), 0);
}

// The fake fails the test if memory is freed that a copy still needs.
TEST_F(CudaDeviceTest, MemoryIsFreedOnlyAfterTheWorkThatUsesIt) {
  Make();
  const Bytes blob(100, 'a');
  {
    const DeviceBuffer memory = Memory(100);
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
    EXPECT_EQ(runtime_.waiting(), 2u);
  }
  EXPECT_EQ(runtime_.waiting(), 0u);
  // A stream's destructor waits until the stream's work is done.
  const DeviceBuffer memory = Memory(100);
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
  stream_.reset();
  EXPECT_EQ(runtime_.waiting(), 0u);
}

TEST_F(CudaDeviceTest, TheOutOfMemoryErrorNamesTheMemorySizesAndTheFlag) {
  Make();
  const DeviceBuffer held = Memory(1000);
  EXPECT_THAT(Refused(size_t{1} << 30, MemoryTag::kKvCache),
              base::StatusIs(
                  absl::StatusCode::kResourceExhausted,
                  AllOf(HasSubstr("1073741824 bytes are needed for kv_cache"),
                        HasSubstr("only 966787072 of 1073741824 bytes are "
                                  "free; this process already uses 1000"),
                        HasSubstr("; lower --kv-cache-bytes"))));
  EXPECT_THAT(Refused(size_t{1} << 30, MemoryTag::kWorkspace),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("--max-batched-tokens")));
  EXPECT_EQ(device_->allocator().total_use().bytes, 1000);
  EXPECT_THAT(Refused(size_t{1} << 30, MemoryTag::kWeights),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("take a smaller model")));
}

// The error must not advise to lower a memory flag, because too little memory
// is not the problem.
TEST_F(CudaDeviceTest, AFailedDeviceIsNotReportedAsOutOfMemory) {
  Make();
  const auto broken = [](const char* tag) {
    return base::StatusIs(
        absl::StatusCode::kInternal,
        AllOf(HasSubstr(absl::StrCat("cannot allocate 8 bytes for ", tag,
                                     ": cuda:0: ")),
              HasSubstr("cudaErrorFake (700)"), Not(HasSubstr("lower"))));
  };
  // FailNext makes only one call fail; the device still works.
  runtime_.FailNext("Allocate", static_cast<Result>(700));
  EXPECT_THAT(Refused(8, MemoryTag::kKvCache), broken("kv_cache"));
  runtime_.FailNext("AllocateHost", static_cast<Result>(700));
  EXPECT_THAT(Refused(8, MemoryTag::kHostPool), broken("host_pool"));
  KVASIR_EXPECT_OK(Refused(8, MemoryTag::kKvCache));
  runtime_.Break(static_cast<Result>(700));
  EXPECT_THAT(Refused(8, MemoryTag::kKvCache), broken("kv_cache"));
  EXPECT_THAT(Refused(8, MemoryTag::kHostPool), broken("host_pool"));
  EXPECT_EQ(device_->allocator().total_use().bytes, 0);
}

// If selecting the device fails, no other CUDA call may follow. It would use
// the GPU that the thread selected before, or the first GPU.
TEST_F(CudaDeviceTest, ACallFailsIfTheDeviceCannotBeSelected) {
  runtime_.device_count = 2;
  Make({.ordinal = 1});
  const DeviceBuffer memory = Memory(8);
  char byte = 0;
  KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), &byte, 1));
  KVASIR_ASSERT_OK(stream_->Synchronize());
  const auto refused = base::StatusIs(
      absl::StatusCode::kInternal,
      AllOf(HasSubstr("cuda:1: selecting the device: cudaErrorFake (46)")));
  const auto calls = [&] {
    int64_t sum = 0;
    for (const char* const call :
         {"Allocate", "AllocateHost", "MakeStream", "CopyAsync", "Launch",
          "MemoryInfo", "SynchronizeStream"}) {
      sum += runtime_.calls(call);
    }
    return sum;
  };
  // Runs `call` on a new thread, which has not selected a device yet, while
  // selecting fails. Checks that no other CUDA call is made.
  const auto once = [&](const std::function<absl::Status()>& call) {
    const int64_t before = calls();
    absl::Status status;
    std::thread([&] {
      runtime_.FailNext("Use", static_cast<Result>(46));
      status = call();
    }).join();
    EXPECT_EQ(calls(), before);
    return status;
  };
  EXPECT_THAT(once([&] { return stream_->Synchronize(); }), refused);
  EXPECT_THAT(once([&] { return device_->Write(memory.data(), &byte, 1); }),
              refused);
  EXPECT_THAT(once([&] { return Upload(*stream_, memory.data(), &byte, 1); }),
              refused);
  EXPECT_THAT(once([&] { return Launch({.name = "gelu"}); }), refused);
  EXPECT_THAT(once([&] { return device_->memory().status(); }), refused);
  EXPECT_THAT(once([&] { return Refused(8, MemoryTag::kWeights); }).message(),
              HasSubstr("cuda:1: selecting the device"));
  EXPECT_THAT(once([&] { return Refused(8, MemoryTag::kHostPool); }).message(),
              HasSubstr("cuda:1: selecting the device"));
  EXPECT_THAT(once([&] { return device_->MakeStream()->Synchronize(); }),
              refused);
  KVASIR_EXPECT_OK(stream_->Synchronize());
}

// An error that occurs while memory is freed cannot be returned to a caller, so
// later calls return it.
TEST_F(CudaDeviceTest, AFailureWhileMemoryIsFreedIsReturnedByEveryLaterCall) {
  for (const std::string call : {"Use", "SynchronizeDevice", "Free"}) {
    FakeRuntime runtime;
    runtime.AllowLeaks();
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto device,
                                CudaDevice::Make({}, &runtime, {}));
    {
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const DeviceBuffer memory,
          device->allocator().Allocate(8, MemoryTag::kOther));
      runtime.FailNext(call, static_cast<Result>(46));
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(device->memory().status(),
                  base::StatusIs(absl::StatusCode::kInternal,
                                 HasSubstr("cudaErrorFake (46)")))
          << call;
    }
    EXPECT_THAT(device->allocator().Allocate(8, MemoryTag::kOther).status(),
                base::StatusIs(absl::StatusCode::kInternal,
                               HasSubstr("cudaErrorFake (46)")))
        << call;
  }
}

TEST_F(CudaDeviceTest, TheNumericsStringOfADeviceHasTheGpuArchitecture) {
  Make();
  EXPECT_EQ(device_->numerics(), "cuda-sm90");
  runtime_.properties.major = 8;
  Make();
  EXPECT_EQ(device_->numerics(), "cuda-sm80");
  EXPECT_EQ(device_->name(), "cuda");
}

TEST_F(CudaDeviceTest, DeviceMemoryAndTheHostPoolHaveSeparateLimits) {
  Make({.memory_limit_bytes = 5000, .host_limit_bytes = 3500});
  const DeviceBuffer weights = Memory(4000, MemoryTag::kWeights);
  const DeviceBuffer pool = Memory(3000, MemoryTag::kHostPool);
  EXPECT_EQ(runtime_.pinned_bytes(), 3000u);
  EXPECT_EQ(
      Refused(1001, MemoryTag::kKvCache).message(),
      "not enough memory for kv_cache: 1001 bytes are needed, but 4000 of "
      "the limit of 5000 bytes are in use; lower --kv-cache-bytes or "
      "--gpu-memory-utilization");
  const DeviceBuffer cache = Memory(1000, MemoryTag::kKvCache);
  EXPECT_EQ(device_->allocator().total_use().bytes, 8000);
  EXPECT_EQ(device_->allocator().device_bytes(), 5000);
  EXPECT_EQ(device_->allocator().use(MemoryTag::kHostPool).bytes, 3000);
  // The host pool has a limit of its own, because the system kills a process
  // that uses too much host memory.
  EXPECT_EQ(Refused(501, MemoryTag::kHostPool).message(),
            "not enough host memory for host_pool: 501 bytes are needed, but "
            "3000 of the limit of 3500 bytes are in use; lower "
            "--host-pool-bytes");
  runtime_.FailNext("AllocateHost", Result::kOutOfMemory);
  EXPECT_THAT(
      Refused(8, MemoryTag::kHostPool).message(),
      AllOf(HasSubstr("pinned memory"), HasSubstr("--host-pool-bytes")));
}

TEST_F(CudaDeviceTest, ReportedMemoryFiguresAddUpToTheTotal) {
  Make();
  const DeviceBuffer a = Memory(1000), b = Memory(3 << 20);
  const DeviceBuffer pool = Memory(5000, MemoryTag::kHostPool);
  KVASIR_ASSERT_OK_AND_ASSIGN(const DeviceMemory memory, device_->memory());
  EXPECT_EQ(memory.total_bytes, 1 << 30);
  EXPECT_EQ(memory.allocated_bytes, 1000 + (3 << 20));
  // `other_bytes` has the memory of the context and the rounding of two
  // allocations.
  EXPECT_EQ(memory.other_bytes, (100 << 20) + (2 << 20) - 1000 + (1 << 20));
  EXPECT_EQ(memory.free_bytes + memory.allocated_bytes + memory.other_bytes,
            memory.total_bytes);
  runtime_.FailNext("MemoryInfo", static_cast<Result>(700));
  EXPECT_THAT(device_->memory().status().message(),
              HasSubstr("cudaErrorFake (700)"));
}

TEST_F(CudaDeviceTest, ALaunchHasTheGridAndMemorySizesThatItsOpRequested) {
  Make();
  int64_t args = 42;
  KVASIR_ASSERT_OK(Launch({.name = "gelu",
                           .grid_x = 3,
                           .grid_y = 2,
                           .threads = 64,
                           .shared_bytes = 128,
                           .ctas_together = true,
                           .args = &args,
                           .args_bytes = sizeof(args)}));
  // Launch has copied its arguments, so this has no effect on it.
  args = 0;
  const std::vector<FakeLaunch> launches = runtime_.launches();
  ASSERT_THAT(launches, SizeIs(1));
  const KernelLaunch& launch = launches[0].launch;
  EXPECT_STREQ(launch.name, "gelu");
  EXPECT_EQ(launch.grid_x, 3u);
  EXPECT_EQ(launch.grid_y, 2u);
  EXPECT_EQ(launch.threads, 64u);
  EXPECT_EQ(launch.shared_bytes, 128u);
  EXPECT_TRUE(launch.ctas_together);
  std::memcpy(&args, launches[0].args.data(), sizeof(args));
  EXPECT_EQ(args, 42);
  EXPECT_EQ(runtime_.calls("AllowSharedBytes"), 0);
}

TEST_F(CudaDeviceTest, SharedMemoryAbove48KiBIsEnabledOnlyOncePerKernel) {
  Make();
  static const int other = 0;
  KVASIR_ASSERT_OK(Launch({.name = "a", .shared_bytes = 100 << 10}));
  KVASIR_ASSERT_OK(Launch({.name = "a", .shared_bytes = 100 << 10}));
  KVASIR_ASSERT_OK(Launch({.name = "a", .shared_bytes = 90 << 10}));
  EXPECT_EQ(runtime_.calls("AllowSharedBytes"), 1);
  KVASIR_ASSERT_OK(
      Launch({.name = "b", .shared_bytes = 90 << 10, .function = &other}));
  KVASIR_ASSERT_OK(Launch({.name = "a", .shared_bytes = 227 << 10}));
  EXPECT_EQ(runtime_.calls("AllowSharedBytes"), 3);
  EXPECT_THAT(Launch({.name = "a", .shared_bytes = (227 << 10) + 1}),
              base::StatusIs(absl::StatusCode::kInternal,
                             AllOf(HasSubstr("kernel a needs 232449 bytes"),
                                   HasSubstr("at most 232448"))));
}

TEST_F(CudaDeviceTest, TheErrorOfARefusedLaunchNamesItsKernel) {
  Make();
  runtime_.FailNext("Launch", static_cast<Result>(9));
  EXPECT_THAT(Launch({.name = "gelu", .grid_x = 5, .threads = 2048}),
              base::StatusIs(absl::StatusCode::kInternal,
                             AllOf(HasSubstr("kernel gelu (5 x 1 CTAs of 2048"),
                                   HasSubstr("cudaErrorFake (9)"))));
  // The error has been returned; the next launch does not return it again.
  KVASIR_EXPECT_OK(Launch({.name = "norm"}));
  runtime_.FailNext("Launch", Result::kNoImage);
  EXPECT_THAT(Launch({.name = "gelu"}).message(),
              HasSubstr("this build has code for sm_80"));
  runtime_.FailNext("AllowSharedBytes", static_cast<Result>(1));
  EXPECT_THAT(Launch({.name = "wide", .shared_bytes = 50 << 10}).message(),
              HasSubstr("kernel wide"));
}

TEST_F(CudaDeviceTest, AnOpStopsAtItsFirstFailedLaunchAndReportsIt) {
  Make();
  runtime_.FailNext("Launch", static_cast<Result>(9));
  static const int kernel = 0;
  launches().launcher().Enqueue({.name = "first", .function = &kernel});
  launches().launcher().Enqueue({.name = "second", .function = &kernel});
  EXPECT_THAT(launches().TakeLaunchError().message(), HasSubstr("first"));
  EXPECT_THAT(runtime_.launches(), SizeIs(0));
}

TEST_F(CudaDeviceTest, TheNextSynchronizeReportsTheFailureOfARunningKernel) {
  Make();
  KVASIR_ASSERT_OK(Launch({.name = "gelu"}));
  runtime_.FailNext("SynchronizeStream", static_cast<Result>(700));
  EXPECT_THAT(stream_->Synchronize(),
              base::StatusIs(absl::StatusCode::kInternal,
                             AllOf(HasSubstr("up to the kernel gelu"),
                                   HasSubstr("cudaErrorFake (700)"))));
}

// A step ends with ReadBack, so ReadBack is where the failure of a kernel is
// found.
TEST_F(CudaDeviceTest,
       ACopyAfterAFailedKernelNamesTheLastLaunchedKernelInItsError) {
  Make();
  const DeviceBuffer memory = Memory(100);
  Bytes blob(100);
  const auto is_that_failure = base::StatusIs(
      absl::StatusCode::kInternal,
      AllOf(HasSubstr("cuda:0: work on a stream, up to the kernel gelu"),
            HasSubstr("CUDA_LAUNCH_BLOCKING=1"),
            HasSubstr("cudaErrorFake (700)")));
  KVASIR_ASSERT_OK(Launch({.name = "gelu"}));
  runtime_.FailNext("WaitForEvent", static_cast<Result>(700));
  EXPECT_THAT(ReadBack(*stream_, blob.data(), memory.data(), 100),
              is_that_failure);
  for (const char* const call : {"CopyAsync", "RecordEvent"}) {
    runtime_.FailNext(call, static_cast<Result>(700));
    EXPECT_THAT(Upload(*stream_, memory.data(), blob.data(), 100),
                is_that_failure)
        << call;
  }
  // A launch may also report the failure of an earlier kernel. The error must
  // not blame the launched kernel.
  runtime_.FailNext("Launch", static_cast<Result>(700));
  EXPECT_THAT(Launch({.name = "norm"}),
              base::StatusIs(absl::StatusCode::kInternal,
                             AllOf(HasSubstr("up to the kernel gelu"),
                                   Not(HasSubstr("norm")))));
}

TEST_F(CudaDeviceTest, HostMemoryOfCopiesIsCountedAndReserved) {
  Make();
  const DeviceBuffer memory = Memory(1 << 20);
  KVASIR_ASSERT_OK(stream_->ReserveCopies(300000));
  EXPECT_EQ(device_->staging_bytes(),
            static_cast<int64_t>(Staging::kBlocks * (512 << 10)));
  EXPECT_EQ(runtime_.pinned_bytes(), Staging::kBlocks * (512 << 10));
  const int64_t calls = runtime_.calls("AllocateHost");
  const Bytes blob(300000, 'a');
  for (size_t i = 0; i < 2 * Staging::kBlocks; ++i) {
    KVASIR_ASSERT_OK(Upload(*stream_, memory.data(), blob.data(), 300000));
  }
  EXPECT_EQ(runtime_.calls("AllocateHost"), calls);
  const int64_t before = device_->staging_bytes();
  KVASIR_ASSERT_OK_AND_ASSIGN(void* const host,
                              device_->BeginWrite(memory.data(), 5000));
  EXPECT_EQ(device_->staging_bytes(), before + 5000);
  std::memset(host, 1, 5000);
  KVASIR_ASSERT_OK(device_->EndWrite(memory.data(), host, 5000));
  EXPECT_EQ(device_->staging_bytes(),
            before + static_cast<int64_t>(Staging::kLeastBlockBytes));
  device_->FreeWriteBuffers();
  EXPECT_EQ(device_->staging_bytes(), before);
  KVASIR_EXPECT_OK(device_->Write(memory.data(), blob.data(), 100));
  stream_.reset();
  device_->FreeWriteBuffers();
  EXPECT_EQ(device_->staging_bytes(), 0);
  EXPECT_EQ(runtime_.pinned_bytes(), 0u);
}

TEST_F(CudaDeviceTest, EveryCallOnAStreamThatCouldNotBeCreatedFails) {
  Make();
  const DeviceBuffer memory = Memory(8);
  runtime_.FailNext("MakeStream", Result::kOutOfMemory);
  stream_ = device_->MakeStream();
  char byte = 0;
  for (const absl::Status& status :
       {stream_->Synchronize(), Upload(*stream_, memory.data(), &byte, 1),
        ReadBack(*stream_, &byte, memory.data(), 1),
        Launch({.name = "gelu"})}) {
    EXPECT_THAT(status, base::StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("a stream")));
  }
}

// In CUDA, each thread has its own selected device, at first device 0.
TEST_F(CudaDeviceTest, CallsFromAnyThreadUseTheGpuOfTheDevice) {
  runtime_.device_count = 2;
  Make({.ordinal = 1});
  const DeviceBuffer memory = Memory(100);
  const Bytes blob = Pattern(100, 3);
  std::thread([&] {
    KVASIR_EXPECT_OK(Upload(*stream_, memory.data(), blob.data(), 100));
    KVASIR_EXPECT_OK(Launch({.name = "gelu"}));
  }).join();
  std::thread([&] { EXPECT_EQ(Get(memory), blob); }).join();
  std::thread([&] {
    KVASIR_EXPECT_OK(device_->Write(memory.data(), blob.data(), 100));
  }).join();
  std::thread([&] { stream_.reset(); }).join();
}

TEST_F(CudaDeviceTest, CapturedWorkRunsOnlyWhenItIsReplayed) {
  Make();
  std::vector<int> order;
  runtime_.OnRun([&](const KernelLaunch& launch) {
    order.push_back(*static_cast<const int*>(launch.args));
  });
  const auto launch = [&](int argument) {
    KVASIR_ASSERT_OK(Launch(
        {.name = "look", .args = &argument, .args_bytes = sizeof(argument)}));
  };
  struct Call {
    std::vector<int>* order;
    int* released;
  };
  int released = 0;
  launch(1);
  KVASIR_ASSERT_OK(launches().BeginCapture());
  EXPECT_TRUE(launches().capturing());
  launch(2);
  KVASIR_ASSERT_OK_AND_ASSIGN(void* const handle, launches().LibraryHandle());
  auto* const work = static_cast<HostWork*>(handle);
  work->enqueue(
      work, [](void* call) { static_cast<Call*>(call)->order->push_back(3); },
      new Call{&order, &released},
      [](void* call) {
        const std::unique_ptr<Call> owner(static_cast<Call*>(call));
        ++*owner->released;
      });
  KVASIR_ASSERT_OK_AND_ASSIGN(auto captured, launches().EndCapture());
  EXPECT_FALSE(launches().capturing());
  EXPECT_EQ(runtime_.waiting(), 1u);
  launch(4);
  KVASIR_ASSERT_OK(launches().Replay(*captured));
  launch(5);
  KVASIR_ASSERT_OK(launches().Replay(*captured));
  KVASIR_ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(order, (std::vector<int>{1, 4, 2, 3, 5, 2, 3}));
  EXPECT_EQ(released, 0);
  // The destructor of captured work waits for its replay.
  KVASIR_ASSERT_OK(launches().Replay(*captured));
  captured = nullptr;
  EXPECT_EQ(order.size(), 9u);
  EXPECT_EQ(released, 1);
}

TEST_F(CudaDeviceTest, CapturedWorkMayOutliveItsStreamAndDevice) {
  Make();
  KVASIR_ASSERT_OK(launches().BeginCapture());
  KVASIR_ASSERT_OK(Launch({.name = "look"}));
  KVASIR_ASSERT_OK_AND_ASSIGN(auto captured, launches().EndCapture());
  // Destroying a stream while it captures drops the captured work.
  KVASIR_ASSERT_OK(launches().BeginCapture());
  stream_ = nullptr;
  device_ = nullptr;
  captured = nullptr;
}

TEST_F(CudaDeviceTest, WaitsCopiesAndMarksAreRefusedWhileAStreamIsCapturing) {
  Make();
  const DeviceBuffer memory = Memory(100);
  Bytes host(100);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto mark, launches().MakeMark());
  KVASIR_ASSERT_OK(launches().BeginCapture());
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto nothing, launches().EndCapture());
  KVASIR_ASSERT_OK(launches().BeginCapture());
  const auto cannot_be = [](const char* what) {
    return StatusIs(absl::StatusCode::kFailedPrecondition,
                    HasSubstr(absl::StrCat("a stream cannot be ", what,
                                           " while it is capturing")));
  };
  EXPECT_THAT(stream_->Synchronize(), cannot_be("waited for"));
  EXPECT_THAT(stream_->ReserveCopies(1 << 20), cannot_be("waited for"));
  EXPECT_THAT(Upload(*stream_, memory.data(), host.data(), 100),
              cannot_be("copied to"));
  EXPECT_THAT(stream_->CopyToHost(host.data(), memory.data(), 100),
              cannot_be("read back from"));
  EXPECT_THAT(launches().Record(mark.get()), cannot_be("marked"));
  EXPECT_THAT(launches().BeginCapture(), cannot_be("captured again"));
  EXPECT_THAT(launches().Replay(*nothing), cannot_be("replayed to"));
  // None of the refused calls has reached CUDA, which would have invalidated
  // the capture.
  KVASIR_EXPECT_OK(launches().EndCapture());
  EXPECT_THAT(launches().EndCapture(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("the stream is not capturing")));
  KVASIR_EXPECT_OK(stream_->Synchronize());
}

TEST_F(CudaDeviceTest, TheStreamStaysUsableAfterAFailedCapture) {
  Make();
  const auto fails_with = [](const char* what) {
    return StatusIs(absl::StatusCode::kInternal,
                    AllOf(HasSubstr(what), HasSubstr("cudaErrorFake (900)")));
  };
  constexpr auto kError = Result::kCaptureUnsupported;
  runtime_.FailNext("BeginCapture", kError);
  EXPECT_THAT(launches().BeginCapture(), fails_with("beginning a capture"));
  EXPECT_FALSE(launches().capturing());
  for (const auto& [call, what] :
       {std::pair("EndCapture", "ending a capture"),
        std::pair("InstantiateGraph", "making the graph of a capture")}) {
    KVASIR_ASSERT_OK(launches().BeginCapture());
    KVASIR_ASSERT_OK(Launch({.name = "look"}));
    runtime_.FailNext(call, kError);
    EXPECT_THAT(launches().EndCapture(), fails_with(what));
    EXPECT_FALSE(launches().capturing());
    KVASIR_EXPECT_OK(stream_->Synchronize());
  }
  runtime_.FailNext("InstantiateGraph", Result::kOutOfMemory);
  KVASIR_ASSERT_OK(launches().BeginCapture());
  EXPECT_THAT(launches().EndCapture(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("making the graph of a capture")));
  // If a launch fails and its error is not taken (TakeLaunchError), EndCapture
  // returns the error, because the graph lacks the launch.
  KVASIR_ASSERT_OK(launches().BeginCapture());
  runtime_.FailNext("Launch", kError);
  launches().launcher().Enqueue({.name = "lost", .function = &runtime_});
  EXPECT_THAT(launches().EndCapture(), fails_with("kernel lost"));
  KVASIR_ASSERT_OK(launches().BeginCapture());
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto captured, launches().EndCapture());
  runtime_.FailNext("LaunchGraph", kError);
  EXPECT_THAT(launches().Replay(*captured), fails_with("up to the kernel"));
  KVASIR_EXPECT_OK(launches().Replay(*captured));
  // The device breaks during the capture.
  KVASIR_ASSERT_OK(launches().BeginCapture());
  runtime_.Break(static_cast<Result>(700));
  EXPECT_THAT(launches().EndCapture(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("Fake (700)")));
}

// CUDA does not allow a thread that captures to allocate memory.
TEST_F(CudaDeviceTest, AThreadThatIsCapturingAStreamCannotAllocateMemory) {
  Make();
  KVASIR_ASSERT_OK(launches().BeginCapture());
  KVASIR_EXPECT_OK(Launch({.name = "before"}));
  EXPECT_THAT(Refused(100, MemoryTag::kOther),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("(900)")));
  EXPECT_THAT(Launch({.name = "behind"}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("(901)")));
  EXPECT_THAT(launches().EndCapture(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("(901)")));
  KVASIR_EXPECT_OK(Refused(100, MemoryTag::kOther));
  KVASIR_EXPECT_OK(Launch({.name = "again"}));
}

// Freeing memory waits for the device. During a capture this wait would fail
// and would invalidate the capture.
TEST_F(CudaDeviceTest, AnotherThreadThatFreesMemoryWaitsForTheEndOfTheCapture) {
  Make();
  KVASIR_ASSERT_OK(launches().BeginCapture());
  std::atomic<bool> freed = false;
  std::thread other([&] {
    Memory(100);
    freed = true;
  });
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(freed);
  KVASIR_EXPECT_OK(Launch({.name = "captured"}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto captured, launches().EndCapture());
  other.join();
  KVASIR_EXPECT_OK(launches().Replay(*captured));
  KVASIR_EXPECT_OK(stream_->Synchronize());
}

// Calls that invalidate a capture in CUDA also invalidate it in the fake.
TEST(FakeRuntimeTest, AForbiddenCallInvalidatesACapture) {
  FakeRuntime runtime;
  cuda::StreamHandle stream = nullptr;
  cuda::EventHandle event = nullptr;
  void* memory = nullptr;
  void* pinned = nullptr;
  ASSERT_EQ(runtime.MakeStream(&stream), Result::kOk);
  ASSERT_EQ(runtime.MakeEvent(&event), Result::kOk);
  ASSERT_EQ(runtime.Allocate(&memory, 64), Result::kOk);
  ASSERT_EQ(runtime.AllocateHost(&pinned, 64), Result::kOk);
  char host[64];
  void* other = nullptr;
  bool over = false;
  const auto record = [&] {
    EXPECT_EQ(runtime.RecordEvent(event, stream), Result::kOk);
  };
  const std::pair<Result, std::function<Result()>> calls[] = {
      {Result::kCaptureUnsupported,
       [&] { return runtime.SynchronizeStream(stream); }},
      {Result::kCaptureUnsupported,
       [&] { return runtime.SynchronizeDevice(); }},
      {Result::kCaptureUnsupported,
       [&] { return runtime.DestroyStream(stream); }},
      {Result::kCaptureUnsupported,
       [&] { return runtime.Allocate(&other, 64); }},
      {Result::kCaptureUnsupported, [&] { return runtime.Free(memory); }},
      {Result::kCaptureUnsupported,
       [&] { return runtime.AllocateHost(&other, 64); }},
      {Result::kCaptureUnsupported, [&] { return runtime.FreeHost(pinned); }},
      {Result::kCaptureUnsupported,
       [&] { return runtime.CopyAsync(memory, host, 64, stream); }},
      {Result::kCapturedEvent,
       [&] {
         record();
         return runtime.QueryEvent(event, &over);
       }},
      {Result::kCapturedEvent,
       [&] {
         record();
         return runtime.WaitForEvent(event);
       }},
  };
  cuda::GraphHandle graph = nullptr;
  for (const auto& [want, call] : calls) {
    ASSERT_EQ(runtime.BeginCapture(stream), Result::kOk);
    EXPECT_EQ(runtime.BeginCapture(stream), Result::kIllegalState);
    EXPECT_EQ(call(), want);
    EXPECT_EQ(runtime.CopyAsync(memory, pinned, 64, stream),
              Result::kCaptureInvalidated);
    EXPECT_EQ(runtime.EndCapture(stream, &graph), Result::kCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    // Afterwards the stream works as before.
    EXPECT_EQ(runtime.RecordEvent(event, stream), Result::kOk);
    EXPECT_EQ(runtime.SynchronizeStream(stream), Result::kOk);
  }
  // Pinned memory and calls of other threads do not affect the capture.
  ASSERT_EQ(runtime.BeginCapture(stream), Result::kOk);
  EXPECT_EQ(runtime.CopyAsync(memory, pinned, 64, stream), Result::kOk);
  std::thread([&] {
    EXPECT_EQ(runtime.QueryEvent(event, &over), Result::kOk);
    EXPECT_EQ(runtime.EndCapture(stream, &graph), Result::kCaptureWrongThread);
  }).join();
  ASSERT_EQ(runtime.EndCapture(stream, &graph), Result::kOk);
  EXPECT_EQ(runtime.waiting(), 0u);
  cuda::ExecHandle exec = nullptr;
  ASSERT_EQ(runtime.InstantiateGraph(graph, stream, &exec), Result::kOk);
  EXPECT_EQ(runtime.DestroyGraph(graph), Result::kOk);
  EXPECT_EQ(runtime.LaunchGraph(exec, stream), Result::kOk);
  EXPECT_EQ(runtime.waiting(), 1u);
  EXPECT_EQ(runtime.SynchronizeStream(stream), Result::kOk);
  EXPECT_EQ(runtime.DestroyExec(exec), Result::kOk);
  EXPECT_EQ(runtime.EndCapture(stream, &graph), Result::kIllegalState);
  EXPECT_EQ(runtime.DestroyEvent(event), Result::kOk);
  EXPECT_EQ(runtime.Free(memory), Result::kOk);
  EXPECT_EQ(runtime.FreeHost(pinned), Result::kOk);
  EXPECT_EQ(runtime.DestroyStream(stream), Result::kOk);
}

}  // namespace
}  // namespace kvasir::kernels
