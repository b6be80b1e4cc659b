// Tests the emulated device in the way that programs use it: loaded as a module
// at run time, not linked.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/device_module.h"
#include "kernels/device/read_back.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<Device>> Load(const std::string& settings,
                                             int64_t limit_bytes = 0) {
  return LoadDevice(std::getenv("KVASIR_EMULATED_MODULE"),
                    {settings, limit_bytes});
}

TEST(EmulatedModuleTest, TheSettingsOfAModuleSelectTheNumberTypeOfActivations) {
  for (const auto& [settings, want] :
       std::vector<std::pair<std::string, DType>>{{"", DType::kBf16},
                                                  {"f32", DType::kF32},
                                                  {"seed=3,f16", DType::kF16},
                                                  {"bf16", DType::kBf16}}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto device, Load(settings));
    EXPECT_EQ(device->activations(), want) << settings;
    EXPECT_EQ(device->name(), "emulated");
    EXPECT_EQ(device->kind(), DeviceKind::kCuda);
  }
}

TEST(EmulatedModuleTest, AnUnknownSettingIsNamedInTheError) {
  for (const std::string settings : {"f64", "seed=", "seed=x", "f32,f8"}) {
    EXPECT_THAT(Load(settings),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("kvasir-emulated.so: the setting \""),
                               HasSubstr("want f32, f16, bf16 or seed=N"))))
        << settings;
  }
}

TEST(EmulatedModuleTest, AllocationsAboveTheMemoryLimitAreRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto device, Load("", 1000));
  EXPECT_THAT(
      device->allocator().Allocate(1001, MemoryTag::kOther),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1000")));
}

TEST(EmulatedModuleTest, OpsCalledByTheProgramRunKernelsOfTheLoadedModule) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto device, Load("f32"));
  const auto stream = device->MakeStream();
  const std::vector<float> numbers = {1, 2, 3, -4};
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DeviceBuffer memory,
      device->allocator().Allocate(3 * sizeof(float) * numbers.size(),
                                   MemoryTag::kOther));
  const DevicePtr<float> gate_up = memory.as<float>();
  const DevicePtr<float> out = gate_up + 4;
  KVASIR_ASSERT_OK(Upload(*stream, gate_up, numbers.data(), 4 * sizeof(float)));
  Workspace counter = Workspace::Counting();
  const SiluMulParams params = {gate_up, out, 1, 2};
  KVASIR_ASSERT_OK(SiluMul(*stream, params, counter));
  Workspace workspace(memory.data(), 0);
  KVASIR_ASSERT_OK(SiluMul(*stream, params, workspace));
  std::vector<float> got(2);
  KVASIR_ASSERT_OK(ReadBack(*stream, got.data(), out, 2 * sizeof(float)));
  EXPECT_NEAR(got[0], 3 / (1 + std::exp(-1.0)), 1e-5);
  EXPECT_NEAR(got[1], -8 / (1 + std::exp(-2.0)), 1e-5);
}

}  // namespace
}  // namespace kvasir::kernels
