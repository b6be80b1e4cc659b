#include "kernels/emulation/emulated_device.h"

#include <gmock/gmock.h>

#include <vector>

#include "kernels/device/device_tables.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/host_work.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

absl::Status Multiply(Stream& stream, const DeviceBuffer& in,
                      const DeviceBuffer& out) {
  Workspace none(nullptr, 0);
  return SiluMul(stream, {in.as<float>(), out.as<float>(), 1, 1}, none);
}

TEST(EmulatedDeviceTest, OpsSeeTheDeviceAsAGpu) {
  EmulatedTest test;
  EXPECT_EQ(test.device().kind(), DeviceKind::kCuda);
  EXPECT_EQ(test.device().weight_layout(), WeightLayout::kRows);
  EXPECT_EQ(test.device().page_granule_bytes(), 16);
  EXPECT_EQ(test.device().cta_shared_bytes(), 163 << 10);
  EXPECT_EQ(test.launcher().multiprocessors(), 4);
  constexpr OpKernels<SiluMulParams> kUnknown = {"unknown", &SiluMulReference,
                                                 &SiluMulSimd};
  EXPECT_THAT(
      Launch(kUnknown, test.stream(), SiluMulParams()),
      base::StatusIs(absl::StatusCode::kUnimplemented,
                     HasSubstr("unknown: the device has no kernel for it")));
}

TEST(EmulatedDeviceTest, SynchronizingAStreamRunsItsWorkInOrder) {
  EmulatedTest test;
  const DeviceBuffer in = test.Memory(8), out = test.Memory(4);
  std::vector<float> host = {100.0f, 5.0f};
  KVASIR_ASSERT_OK(Upload(test.stream(), in.data(), host.data(), 8));
  KVASIR_ASSERT_OK(Multiply(test.stream(), in, out));
  host = {100.0f, 7.0f};  // the caller may reuse its buffer at once
  KVASIR_ASSERT_OK(Upload(test.stream(), in.data(), host.data(), 8));
  EXPECT_EQ(test.emulator().launches(), 0);
  EXPECT_EQ(test.Get<float>(out), std::vector<float>{500.0f});
  EXPECT_EQ(test.emulator().launches(), 1);
  EXPECT_EQ(test.Get<float>(in), host);
}

TEST(EmulatedDeviceTest, MarksAndLibraryCallsTakeEffectInTheOrderOfTheStream) {
  EmulatedTest test;
  auto& stream = static_cast<LaunchStream&>(test.stream());
  const DeviceBuffer in = test.Memory(8), out = test.Memory(4);
  const std::vector<float> host = {100.0f, 5.0f};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto mark, stream.MakeMark());
  KVASIR_ASSERT_OK(Upload(stream, in.data(), host.data(), 8));
  KVASIR_ASSERT_OK(stream.Record(mark.get()));
  KVASIR_ASSERT_OK_AND_ASSIGN(void* const handle, stream.LibraryHandle());
  auto* const work = static_cast<HostWork*>(handle);
  // The host function may access device memory, because it runs as work of the
  // stream.
  work->enqueue(
      work, [](void* to) { static_cast<float*>(to)[1] += 1.0f; },
      in.data().device_address(), nullptr);
  KVASIR_ASSERT_OK(Multiply(stream, in, out));
  KVASIR_ASSERT_OK(stream.Record(mark.get()));
  EXPECT_FALSE(*mark->passed());
  EXPECT_EQ(test.Get<float>(out), std::vector<float>{600.0f});
  EXPECT_TRUE(*mark->passed());
}

TEST(EmulatedDeviceTest, CapturedWorkRunsOnlyWhenItIsReplayed) {
  EmulatedTest test;
  auto& stream = static_cast<LaunchStream&>(test.stream());
  const DeviceBuffer in = test.Put(std::vector<float>{100.0f, 5.0f});
  const DeviceBuffer out = test.Put(std::vector<float>{0.0f});
  // This launch precedes the capture, so it must not become part of it.
  KVASIR_ASSERT_OK(Multiply(stream, in, out));
  KVASIR_ASSERT_OK(stream.Synchronize());
  KVASIR_ASSERT_OK(test.device().Write(out.data(), "\0\0\0\0", 4));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto mark, stream.MakeMark());
  KVASIR_ASSERT_OK(stream.BeginCapture());
  EXPECT_TRUE(stream.capturing());
  KVASIR_ASSERT_OK(Multiply(stream, in, out));
  float host[2] = {100.0f, 7.0f};
  for (const absl::Status& status :
       {stream.Synchronize(), stream.BeginCapture(),
        Upload(stream, in.data(), host, 8),
        stream.CopyToHost(host, out.data(), 4), stream.Record(mark.get())}) {
    EXPECT_THAT(status, base::StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("while it is capturing")));
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto captured, stream.EndCapture());
  EXPECT_FALSE(stream.capturing());
  EXPECT_THAT(stream.EndCapture(),
              base::StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("the stream is not capturing")));
  EXPECT_EQ(test.Get<float>(out), std::vector<float>{0.0f});
  // A replay reads the memory as it is at the time of the replay, not of the
  // capture.
  for (const float factor : {7.0f, 9.0f}) {
    host[1] = factor;
    KVASIR_ASSERT_OK(Upload(stream, in.data(), host, 8));
    KVASIR_ASSERT_OK(stream.Replay(*captured));
    EXPECT_EQ(test.Get<float>(out), std::vector<float>{100.0f * factor});
  }
}

TEST(EmulatedDeviceTest, EnqueuedWorkRunsBeforeItsMemoryIsFreed) {
  EmulatedTest test;
  const DeviceBuffer out = test.Put(std::vector<float>{0.0f});
  {
    const DeviceBuffer in = test.Put(std::vector<float>{100.0f, 5.0f});
    KVASIR_ASSERT_OK(Multiply(test.stream(), in, out));
  }
  EXPECT_EQ(test.emulator().launches(), 1);
  EXPECT_EQ(test.Get<float>(out), std::vector<float>{500.0f});
}

TEST(EmulatedDeviceTest, DestroyingAStreamRunsItsWorkFirst) {
  EmulatedTest test;
  const DeviceBuffer in = test.Put(std::vector<float>{100.0f, 5.0f});
  const DeviceBuffer out = test.Put(std::vector<float>{0.0f});
  KVASIR_ASSERT_OK(Multiply(*test.device().MakeStream(), in, out));
  EXPECT_EQ(test.Get<float>(out), std::vector<float>{500.0f});
}

TEST(EmulatedDeviceTest, HostWritesToDeviceMemoryGoThroughSeparateHostMemory) {
  EmulatedTest test;
  const DeviceBuffer memory = test.Memory(4);
  KVASIR_ASSERT_OK_AND_ASSIGN(void* const host,
                              test.device().BeginWrite(memory.data(), 4));
  EXPECT_NE(host, memory.data().device_address());
  *static_cast<float*>(host) = 3.0f;
  KVASIR_ASSERT_OK(test.device().EndWrite(memory.data(), host, 4));
  EXPECT_EQ(test.Get<float>(memory), std::vector<float>{3.0f});
  DeviceTables tables(&test.device());
  const std::vector<float> numbers = {100.0f, 5.0f};
  KVASIR_ASSERT_OK_AND_ASSIGN(const DevicePtr<const float> table,
                              tables.Add<float>(numbers));
  Workspace none(nullptr, 0);
  KVASIR_ASSERT_OK(
      SiluMul(test.stream(), {table, memory.as<float>(), 1, 1}, none));
  EXPECT_EQ(test.Get<float>(memory), std::vector<float>{500.0f});
}

TEST(EmulatedDeviceTest, DeviceMemoryHasTheLimitAndTheAlignmentOfAGpu) {
  EmulatedDevice device({.memory_limit_bytes = 1000}, emulated::Ops());
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DeviceBuffer first,
      device.allocator().Allocate(1, MemoryTag::kOther));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data().device_address()) % 256,
            0u);
  EXPECT_THAT(
      device.allocator().Allocate(1000, MemoryTag::kOther).status(),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     HasSubstr("1 of the limit of 1000 bytes are in use")));
}

TEST(EmulatedDeviceTest, NewDeviceMemoryIsFilledWithAPoisonPattern) {
  EmulatedTest test;
  const DeviceBuffer memory = test.Memory(5000);
  EXPECT_EQ(test.Get<uint8_t>(memory), std::vector<uint8_t>(5000, 0xff));
}

TEST(EmulatedDeviceDeathTest, ACopyBeyondItsAllocationEndsTheProcess) {
  EmulatedTest test;
  const DeviceBuffer memory = test.Memory(8);
  std::vector<char> host(12);
  EXPECT_DEATH((void)Upload(test.stream(), memory.data(), host.data(), 12),
               "upload: an access to 12 bytes from byte 0 on exceeds its "
               "allocation of 8 bytes");
  EXPECT_DEATH((void)ReadBack(test.stream(), host.data(), memory.data(), 12),
               "read_back: an access to 12 bytes from byte 0 on exceeds its "
               "allocation of 8 bytes");
  EXPECT_DEATH((void)test.device().BeginWrite(memory.data(), 12),
               "write: an access to 12 bytes from byte 0 on exceeds its "
               "allocation of 8 bytes");
}

TEST(EmulatedDeviceDeathTest, HostAccessToDeviceMemoryEndsTheProcess) {
  EmulatedTest test;
  const DeviceBuffer memory = test.Put(std::vector<float>{1.0f});
  volatile float* const number = memory.as<float>().device_address();
  EXPECT_DEATH((void)*number, "");
  EXPECT_DEATH(*number = 2.0f, "");
  // After kernels have run, memory is inaccessible to the host again.
  const DeviceBuffer in = test.Put(std::vector<float>{100.0f, 5.0f});
  KVASIR_ASSERT_OK(Multiply(test.stream(), in, memory));
  KVASIR_ASSERT_OK(test.stream().Synchronize());
  EXPECT_DEATH((void)*number, "");
}

TEST(EmulatedDeviceDeathTest,
     ALaunchWithMemoryOutsideTheDeviceEndsTheProcessAndNamesTheOp) {
  EmulatedTest test;
  const DeviceBuffer out = test.Memory(4);
  std::vector<float> host(2);
  Workspace none(nullptr, 0);
  EXPECT_DEATH(
      (void)SiluMul(
          test.stream(),
          {DevicePtr<const float>(host.data()), out.as<float>(), 1, 1}, none),
      "silu_mul: .* is not in the device's memory");
  EXPECT_DEATH(
      test.device().CheckMemory("lift", DevicePtr<const void>(host.data())),
      "lift: .* is not in the device's memory");
}

}  // namespace
}  // namespace kvasir::kernels::emulation
