#include "cli/device/device.h"

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceTest, NamesAreCheckedWhereTheyAreGiven) {
  for (const std::string name : {"auto", "cpu", "cuda", "cuda:0", "cuda:11",
                                 "emulated", "emulated:f32,seed=2"}) {
    KVASIR_EXPECT_OK(CheckDeviceName(name));
  }
  for (const std::string name : {"", "gpu", "cpu:0", "auto:", "cuda:",
                                 "cuda:-1", "cuda:x", "cudas", "Emulated"}) {
    EXPECT_THAT(CheckDeviceName(name),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(name + ": want"),
                               HasSubstr("emulated[:SETTINGS]"))))
        << name;
  }
}

TEST(DeviceTest, AutoIsTheCpuWhereThereIsNoGpu) {
  for (const std::string name : {"auto", "cpu"}) {
    EXPECT_TRUE(IsCpu({.device = name}));
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto device,
                                OpenDevice({.device = name}, 0));
    EXPECT_EQ(device, nullptr);
  }
}

TEST(DeviceTest, CudaIsRefusedWithWhatItWouldNeed) {
  EXPECT_FALSE(IsCpu({.device = "cuda:1"}));
  EXPECT_THAT(
      OpenDevice({.device = "cuda:1"}, 0),
      StatusIs(absl::StatusCode::kUnimplemented,
               AllOf(HasSubstr("--device cuda:1: "), HasSubstr("KVASIR_CUDA"),
                     HasSubstr("libcuda.so.1"))));
}

TEST(DeviceTest, AModuleThatIsNotThereIsNamedWithWhatMakesIt) {
  EXPECT_THAT(
      OpenDevice({.device = "emulated:f32", .module = "/nowhere/m.so"}, 0),
      StatusIs(absl::StatusCode::kNotFound,
               AllOf(HasSubstr("--device emulated:f32: /nowhere/m.so: no such "
                               "file"),
                     HasSubstr("KVASIR_EMULATION=ON"))));
  // Beside this program, which is not where the server's is.
  EXPECT_THAT(
      OpenDevice({.device = "emulated"}, 0),
      StatusIs(absl::StatusCode::kNotFound,
               HasSubstr("/cli/device/kvasir-emulated.so: no such file")));
}

TEST(DeviceTest, AModuleIsReadWithTheEmulatedDeviceAlone) {
  EXPECT_THAT(OpenDevice({.device = "cpu", .module = "m.so"}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--device-module m.so is read with --device "
                                 "emulated alone, this is cpu")));
}

}  // namespace
}  // namespace kvasir::cli
