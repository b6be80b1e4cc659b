#include "worker/load/device.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/testing/fake_runtime.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceTest, OnlyValidDeviceNamesAreAccepted) {
  for (const std::string name : {"auto", "cpu", "cuda", "cuda:0", "cuda:11",
                                 "emulated", "emulated:f32,seed=2"}) {
    KVASIR_EXPECT_OK(CheckDeviceName(name));
  }
  for (const std::string name :
       {"", "gpu", "cpu:0", "auto:", "cuda:", "cuda:-1", "cuda:x", "cuda:+1",
        "cuda: 1", "cuda:99999999999", "cudas", "Emulated"}) {
    EXPECT_THAT(CheckDeviceName(name),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("emulated[:SETTINGS], but is " + name)))
        << name;
  }
}

TEST(DeviceTest, DeviceFlagsAreRefusedForACommandThatCallsAServer) {
  KVASIR_EXPECT_OK(CheckDeviceIsUsed({.device = "cpu"}, "127.0.0.1:1"));
  EXPECT_THAT(
      CheckDeviceIsUsed({.device = "cpu", .given = true}, "127.0.0.1:1"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("--device cpu applies only to a model that this "
                         "command runs itself")));
  EXPECT_THAT(
      CheckDeviceIsUsed({.device = "cuda:1", .given = true}, "127.0.0.1:1"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("--device cuda:1 "),
                     HasSubstr("the server at 127.0.0.1:1"))));
  EXPECT_THAT(
      CheckDeviceIsUsed({.device = "cpu", .module = "m.so"}, "127.0.0.1:1"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("--device-module m.so")));
}

// Test fixture: a host without a real GPU. A fake CUDA runtime reports the
// host's GPUs and driver.
class CudaHostTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<kernels::Device>> Open(
      const std::string& device, const DeviceWish& wish = {}) {
    return OpenDevice({.device = device}, wish,
                      [this](const kernels::CudaDeviceOptions& options)
                          -> absl::StatusOr<std::unique_ptr<kernels::Device>> {
                        asked_ = options;
                        KVASIR_ASSIGN_OR_RETURN(
                            std::unique_ptr<kernels::CudaDevice> made,
                            kernels::CudaDevice::Make(options, &runtime_, {}));
                        return made;
                      });
  }
  // Checks that opening `device` fails with `code` and `why`, and that `auto`
  // chooses the CPU.
  template <typename Matcher>
  void ExpectUnusable(absl::StatusCode code, const Matcher& why,
                      const std::string& device = "cuda") {
    EXPECT_THAT(Open(device),
                StatusIs(code, AllOf(HasSubstr("--device " + device + ": "),
                                     why, HasSubstr("--device cpu"))));
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto instead, Open("auto"));
    EXPECT_EQ(instead, nullptr);
  }

  kernels::cuda::FakeRuntime runtime_;
  kernels::CudaDeviceOptions asked_;
};

TEST_F(CudaHostTest, TheDeterministicSettingReachesTheCudaDevice) {
  for (const bool deterministic : {false, true}) {
    KVASIR_ASSERT_OK(Open("cuda", {.deterministic = deterministic}).status());
    EXPECT_EQ(asked_.deterministic, deterministic);
  }
}

TEST_F(CudaHostTest, TheNumberInTheDeviceNameCudaNChoosesTheGpu) {
  runtime_.device_count = 3;
  for (const auto& [name, ordinal] : std::vector<std::pair<std::string, int>>{
           {"cuda", 0}, {"cuda:0", 0}, {"cuda:2", 2}, {"auto", 0}}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto device,
        Open(name, {.host_limit_bytes = 5000,
                    .gpu_activations = kernels::DType::kF16}));
    ASSERT_NE(device, nullptr) << name;
    EXPECT_EQ(device->name(), "cuda");
    EXPECT_EQ(device->activations(), kernels::DType::kF16);
    EXPECT_EQ(device->allocator().host_limit_bytes(), 5000);
    EXPECT_EQ(runtime_.device_in_use(), ordinal) << name;
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto cpu, Open("cpu"));
  EXPECT_EQ(cpu, nullptr);
}

TEST_F(CudaHostTest, WithoutADriverTheDeviceCudaFailsAndAutoUsesTheCpu) {
  runtime_.driver_version = 0;
  ExpectUnusable(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("no NVIDIA driver (libcuda.so.1)"),
                       HasSubstr("CUDA 13.0 or later")));
}

TEST_F(CudaHostTest, WithAnOldDriverTheDeviceCudaFailsAndAutoUsesTheCpu) {
  runtime_.driver_version = 12020;
  ExpectUnusable(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("supports only CUDA 12.2"),
                       HasSubstr("needs CUDA 13.0")));
}

TEST_F(CudaHostTest, WithoutAGpuTheDeviceCudaFailsAndAutoUsesTheCpu) {
  runtime_.device_count = 0;
  ExpectUnusable(absl::StatusCode::kFailedPrecondition,
                 HasSubstr("the NVIDIA driver sees no GPU"));
}

TEST_F(CudaHostTest, WithAnOldGpuTheDeviceCudaFailsAndAutoUsesTheCpu) {
  runtime_.properties.major = 7;
  runtime_.properties.minor = 0;
  ExpectUnusable(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("(Fake GPU) is sm_70"),
                       HasSubstr("want compute capability 8.0 or later")));
}

TEST_F(CudaHostTest,
       IfAnotherProcessHoldsTheGpuTheDeviceCudaFailsAndAutoUsesTheCpu) {
  // FailNext makes only one call fail, so it is needed once for `cuda` and
  // again, below, for `auto`.
  runtime_.FailNext("MemoryInfo", static_cast<kernels::cuda::Result>(46));
  EXPECT_THAT(Open("cuda"),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("does another process hold it?")));
  runtime_.FailNext("MemoryInfo", static_cast<kernels::cuda::Result>(46));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto instead, Open("auto"));
  EXPECT_EQ(instead, nullptr);
}

TEST_F(CudaHostTest,
       TheErrorForAGpuNumberThatDoesNotExistStatesHowManyGpusThereAre) {
  runtime_.device_count = 2;
  EXPECT_THAT(
      Open("cuda:2"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("--device cuda:2: cuda:2: no such GPU"),
                     HasSubstr("the last GPU of this host is cuda:1"))));
}

// Passes no fake CUDA runtime, so `auto` finds a real GPU if build and machine
// have one, and otherwise chooses the CPU.
TEST(DeviceTest, TheDeviceAutoCanBeOpenedWithAndWithoutAGpu) {
  KVASIR_EXPECT_OK(OpenDevice({.device = "auto"}, {}));
}

TEST(DeviceTest, TheErrorForAMissingModuleNamesItAndHowToBuildIt) {
  EXPECT_THAT(
      OpenDevice({.device = "emulated:f32", .module = "/nowhere/m.so"}, {}),
      StatusIs(absl::StatusCode::kNotFound,
               AllOf(HasSubstr("--device emulated:f32: /nowhere/m.so: no such "
                               "file"),
                     HasSubstr("KVASIR_EMULATION=ON"))));
  // By default the module is expected in the folder of the program. Here that
  // is the folder of the test, which has no module.
  EXPECT_THAT(
      OpenDevice({.device = "emulated"}, {}),
      StatusIs(absl::StatusCode::kNotFound,
               HasSubstr("/worker/load/kvasir-emulated.so: no such file")));
}

TEST(DeviceTest, TheDeviceModuleFlagIsRefusedUnlessTheDeviceIsEmulated) {
  EXPECT_THAT(
      OpenDevice({.device = "cpu", .module = "m.so"}, {}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("--device-module m.so is used only with --device "
                         "emulated, but --device is cpu")));
}

}  // namespace
}  // namespace kvasir::cli
