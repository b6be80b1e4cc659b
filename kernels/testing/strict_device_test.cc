#include "kernels/testing/strict_device.h"

#include <gmock/gmock.h>

#include <vector>

#include "base/status_matchers.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/read_back.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

class StrictDeviceTest : public ::testing::Test {
 protected:
  DeviceBuffer Numbers(int64_t count) {
    auto buffer = device_->allocator().Allocate(
        static_cast<size_t>(count) * sizeof(float), MemoryTag::kOther);
    KVASIR_EXPECT_OK(buffer.status());
    return *std::move(buffer);
  }
  // Launches silu_mul for one row, which has two inputs: a gate and an up
  // value.
  absl::Status Multiply(DevicePtr<const float> gate_up, DevicePtr<float> out) {
    Workspace none(nullptr, 0);
    return SiluMul(*stream_, {gate_up, out, 1, 1}, none);
  }

  base::ThreadPool pool_{2};
  const std::unique_ptr<Device> device_ = MakeStrictDevice(&pool_);
  const std::unique_ptr<Stream> stream_ = device_->MakeStream();
};
using StrictDeviceDeathTest = StrictDeviceTest;

TEST_F(StrictDeviceTest, LaunchesUploadsAndReadBacksCanAccessDeviceMemory) {
  const DeviceBuffer in = Numbers(2);
  const DeviceBuffer out = Numbers(1);
  const std::vector<float> host = {0.0f, 5.0f};
  KVASIR_ASSERT_OK(Upload(*stream_, in.data(), host.data(), in.bytes()));
  KVASIR_ASSERT_OK(Multiply(in.as<float>(), out.as<float>()));
  float back = 7.0f;
  KVASIR_ASSERT_OK(ReadBack(*stream_, &back, out.data(), sizeof(back)));
  EXPECT_EQ(back, 0.0f);
}

TEST_F(StrictDeviceTest, LaunchesReadTablesThatTheHostHasWritten) {
  DeviceTables tables(device_.get());
  const std::vector<float> host = {0.0f, 5.0f};
  KVASIR_ASSERT_OK_AND_ASSIGN(const DevicePtr<const float> table,
                              tables.Add<float>(host));
  const DeviceBuffer out = Numbers(1);
  KVASIR_EXPECT_OK(Multiply(table, out.as<float>()));
}

TEST_F(StrictDeviceDeathTest, TheProcessDiesIfTheHostReadsDeviceMemory) {
  const DeviceBuffer buffer = Numbers(1);
  const volatile float* const number = buffer.as<float>().device_address();
  EXPECT_DEATH((void)*number, "");
}

TEST_F(StrictDeviceDeathTest, TheProcessDiesIfTheHostWritesDeviceMemory) {
  const DeviceBuffer buffer = Numbers(1);
  const float number = 1.0f;
  KVASIR_ASSERT_OK(Upload(*stream_, buffer.data(), &number, sizeof(number)));
  volatile float* const there = buffer.as<float>().device_address();
  EXPECT_DEATH(*there = 2.0f, "");
}

TEST_F(StrictDeviceDeathTest,
       ALaunchWithHostMemoryEndsTheProcessAndNamesTheOp) {
  const DeviceBuffer out = Numbers(1);
  std::vector<float> host(2);
  EXPECT_DEATH(
      (void)Multiply(DevicePtr<const float>(host.data()), out.as<float>()),
      "silu_mul: .* is not in the device's memory");
}

TEST_F(StrictDeviceDeathTest,
       ALaunchWithFreedMemoryEndsTheProcessAndNamesTheOp) {
  const DeviceBuffer out = Numbers(1);
  DevicePtr<const float> gone;
  {
    const DeviceBuffer in = Numbers(2);
    gone = in.as<float>();
  }
  EXPECT_DEATH((void)Multiply(gone, out.as<float>()),
               "silu_mul: .* is not in the device's memory");
}

TEST_F(StrictDeviceDeathTest, ATableThatPointsToHostMemoryEndsTheProcess) {
  const std::vector<float> host(64);
  PackedMatrix matrix;
  matrix.k = 1;
  matrix.n = 1;
  matrix.data = DevicePtr<const float>(host.data());
  EXPECT_DEATH(device_->CheckMemory("lift", matrix.data),
               "lift: .* is not in the device's memory");
}

}  // namespace
}  // namespace kvasir::kernels
