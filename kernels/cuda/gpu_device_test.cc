// Tests of CudaDevice that need a real GPU. cuda_device_test.cc tests it
// without a GPU.
#include <gmock/gmock.h>

#include <thread>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/device/read_back.h"
#include "kernels/emulation/testing/primitive_kernels.h"

namespace kvasir::kernels {
namespace {

// In this program, namespace emulated stands for namespace gpu
// (primitive_kernels.h), because the build sets KVASIR_PRIMITIVES_TARGET to
// `gpu`. So these are the parameters of kernels that nvcc compiled.
using emulated::PrimitiveArgs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Words = std::vector<uint32_t>;

// LaunchCopies copies this many words from `in` to `out`.
constexpr size_t kWords = 224;

class GpuDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = MakeCudaDevice({.deterministic = true});
    KVASIR_ASSERT_OK(device.status());
    device_ = *std::move(device);
    stream_ = device_->MakeStream();
  }
  CudaDevice& gpu() { return static_cast<CudaDevice&>(*device_); }
  LaunchStream& launches() { return static_cast<LaunchStream&>(*stream_); }
  DeviceBuffer Memory(size_t words, MemoryTag tag = MemoryTag::kOther) {
    auto memory = device_->allocator().Allocate(words * 4, tag);
    KVASIR_EXPECT_OK(memory.status());
    return *std::move(memory);
  }
  Words Get(const DeviceBuffer& memory) {
    Words words(memory.bytes() / 4);
    KVASIR_EXPECT_OK(
        ReadBack(*stream_, words.data(), memory.data(), memory.bytes()));
    return words;
  }
  absl::Status Copy(const DeviceBuffer& in, const DeviceBuffer& out,
                    Launcher& launcher) {
    PrimitiveArgs args;
    args.in = in.as<uint32_t>().device_address();
    args.out = out.as<uint32_t>().device_address();
    LaunchCopies(args, launcher);
    return launches().TakeLaunchError();
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

Words Pattern(uint32_t seed) {
  Words words(kWords);
  for (uint32_t i = 0; i < kWords; ++i) words[i] = seed * 1000003u + i;
  return words;
}

// A launcher that passes each launch on to another launcher, after a given
// function has changed it.
class Changed final : public Launcher {
 public:
  Changed(Launcher* launcher, void (*change)(KernelLaunch*))
      : launcher_(launcher), change_(change) {}
  void Enqueue(const KernelLaunch& launch) override {
    KernelLaunch changed = launch;
    change_(&changed);
    launcher_->Enqueue(changed);
  }
  int multiprocessors() const override { return launcher_->multiprocessors(); }

 private:
  Launcher* const launcher_;
  void (*const change_)(KernelLaunch*);
};

TEST_F(GpuDeviceTest, TheDeviceReportsTheNameAndArchitectureOfTheGpu) {
  const cuda::DeviceProperties& properties = gpu().properties();
  EXPECT_GE(properties.major, 8);
  EXPECT_GT(properties.multiprocessors, 0);
  EXPECT_GT(properties.l2_bytes, 0);
  EXPECT_GE(properties.shared_bytes, 99 << 10);  // sm_86 has the smallest limit
  KVASIR_ASSERT_OK_AND_ASSIGN(const DeviceMemory memory, gpu().memory());
  EXPECT_GE(properties.memory_bytes, memory.total_bytes);
  EXPECT_GT(memory.free_bytes, 0);
}

TEST_F(GpuDeviceTest, ReportedMemoryUseIsExactUpToTheRoundingOfCuda) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const DeviceMemory before, gpu().memory());
  const DeviceBuffer memory = Memory(((size_t{1} << 30) + 1000) / 4);
  KVASIR_ASSERT_OK_AND_ASSIGN(const DeviceMemory after, gpu().memory());
  const auto bytes = static_cast<int64_t>(memory.bytes());
  EXPECT_EQ(after.allocated_bytes - before.allocated_bytes, bytes);
  EXPECT_GE(after.other_bytes, before.other_bytes);
  EXPECT_LE(after.other_bytes - before.other_bytes, 2 << 20);
}

TEST_F(GpuDeviceTest, TheDeviceStaysUsableAfterAnOutOfMemoryError) {
  const auto all = static_cast<size_t>(gpu().properties().memory_bytes);
  EXPECT_THAT(
      device_->allocator().Allocate(all, MemoryTag::kKvCache).status(),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     AllOf(HasSubstr(absl::StrCat(all, " bytes are needed")),
                           HasSubstr("--kv-cache-bytes"))));
  const DeviceBuffer in = Memory(kWords), out = Memory(kWords);
  const Words pattern = Pattern(1);
  KVASIR_ASSERT_OK(Upload(*stream_, in.data(), pattern.data(), in.bytes()));
  KVASIR_ASSERT_OK(Copy(in, out, launches().launcher()));
  EXPECT_EQ(Get(out), pattern);
}

TEST_F(GpuDeviceTest, TheCallerMayReuseItsMemoryRightAfterAnUpload) {
  constexpr uint32_t kSteps = 100;
  const DeviceBuffer in = Memory(kWords);
  std::vector<DeviceBuffer> out;
  Words blob;
  for (uint32_t step = 0; step < kSteps; ++step) {
    out.push_back(Memory(kWords));
    blob = Pattern(step);
    KVASIR_ASSERT_OK(Upload(*stream_, in.data(), blob.data(), in.bytes()));
    blob.assign(kWords, 0);
    KVASIR_ASSERT_OK(Copy(in, out.back(), launches().launcher()));
  }
  for (uint32_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(Get(out[step]), Pattern(step)) << step;
  }
}

TEST_F(GpuDeviceTest, LongCopiesAreReadBackUnchanged) {
  Words words((size_t{40} << 20) / 4 + 1);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<uint32_t>(i) * 2654435761u;
  }
  const DeviceBuffer memory = Memory(words.size());
  KVASIR_ASSERT_OK(
      Upload(*stream_, memory.data(), words.data(), memory.bytes()));
  EXPECT_EQ(Get(memory), words);
}

TEST_F(GpuDeviceTest, AStreamSeesTheWritesOfSeveralThreads) {
  const DeviceBuffer in = Memory(kWords * 4);
  std::vector<std::thread> writers;
  for (uint32_t part = 0; part < 4; ++part) {
    writers.emplace_back([&, part] {
      const Words pattern = Pattern(part);
      KVASIR_EXPECT_OK(device_->Write(
          in.as<uint32_t>() + static_cast<int64_t>(kWords * part),
          pattern.data(), kWords * 4));
    });
  }
  for (std::thread& writer : writers) writer.join();
  const Words seen = Get(in);
  for (uint32_t part = 0; part < 4; ++part) {
    const auto begin = seen.begin() + static_cast<int64_t>(kWords * part);
    EXPECT_EQ(Words(begin, begin + kWords), Pattern(part)) << part;
  }
}

TEST_F(GpuDeviceTest, KernelsCanAccessTheHostPool) {
  const DeviceBuffer pool = Memory(kWords, MemoryTag::kHostPool);
  const DeviceBuffer on_gpu = Memory(kWords);
  const DeviceBuffer back = Memory(kWords, MemoryTag::kHostPool);
  const Words pattern = Pattern(3);
  KVASIR_ASSERT_OK(device_->Write(pool.data(), pattern.data(), pool.bytes()));
  KVASIR_ASSERT_OK(Copy(pool, on_gpu, launches().launcher()));
  KVASIR_ASSERT_OK(Copy(on_gpu, back, launches().launcher()));
  EXPECT_EQ(Get(back), pattern);
}

TEST_F(GpuDeviceTest, AKernelMayUseMoreThan48KiBOfSharedMemory) {
  const DeviceBuffer in = Memory(kWords), out = Memory(kWords);
  const Words pattern = Pattern(4);
  KVASIR_ASSERT_OK(Upload(*stream_, in.data(), pattern.data(), in.bytes()));
  Changed wide(&launches().launcher(),
               [](KernelLaunch* launch) { launch->shared_bytes = 96 << 10; });
  KVASIR_ASSERT_OK(Copy(in, out, wide));
  EXPECT_EQ(Get(out), pattern);
  Changed wider(&launches().launcher(),
                [](KernelLaunch* launch) { launch->shared_bytes = 1 << 20; });
  EXPECT_THAT(Copy(in, out, wider).message(),
              HasSubstr("kernel copies needs 1048576 bytes"));
}

TEST_F(GpuDeviceTest,
       TheErrorOfARefusedLaunchNamesItsKernelAndDoesNotAffectLaterCalls) {
  const DeviceBuffer in = Memory(kWords), out = Memory(kWords);
  const Words pattern = Pattern(5);
  KVASIR_ASSERT_OK(Upload(*stream_, in.data(), pattern.data(), in.bytes()));
  Changed many(&launches().launcher(),
               [](KernelLaunch* launch) { launch->threads = 2048; });
  EXPECT_THAT(Copy(in, out, many).message(),
              AllOf(HasSubstr("kernel copies"), HasSubstr("cudaError")));
  // CTAs that wait for each other must all be resident, but 2^20 cannot be.
  Changed together(&launches().launcher(), [](KernelLaunch* launch) {
    launch->ctas_together = true;
    launch->grid_x = 1 << 20;
  });
  EXPECT_THAT(Copy(in, out, together).message(), HasSubstr("all together"));
  KVASIR_ASSERT_OK(Copy(in, out, launches().launcher()));
  EXPECT_EQ(Get(out), pattern);
}

TEST_F(GpuDeviceTest, AGpuNumberThatDoesNotExistIsRefused) {
  EXPECT_THAT(MakeCudaDevice({.ordinal = 99}).status(),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("cuda:99: no such GPU")));
}

}  // namespace
}  // namespace kvasir::kernels
