// The main function of programs that run kernel tests without a GPU. They test
// the memory, copies and launches of CudaDevice with a fake CUDA runtime, in
// which the emulator executes the kernels.
#include <gmock/gmock.h>

#include <memory>
#include <utility>

#include "base/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/emulation/emulator.h"
#include "kernels/emulation/testing/test_device.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels {
namespace {

std::unique_ptr<Device> Make() {
  // These objects live until the program ends, because a device must not
  // outlive its runtime.
  static auto* const emulator = new emulation::Emulator({});
  static auto* const runtime = [] {
    auto* const made = new cuda::FakeRuntime;
    made->OnRun([](const KernelLaunch& launch) { emulator->Run(launch); });
    return made;
  }();
  auto device = CudaDevice::Make({}, runtime, emulated::Ops());
  KVASIR_CHECK(device.ok());
  return *std::move(device);
}

}  // namespace
}  // namespace kvasir::kernels

int main(int argc, char** argv) {
  // Excludes the tests that need the emulator itself; other programs run them.
  GTEST_FLAG_SET(filter, "-*SynchronizingLine*:*Sectors*");
  ::testing::InitGoogleMock(&argc, argv);
  kvasir::kernels::emulation::RunTestsOn(
      {&kvasir::kernels::Make, /*has_bulk_copies=*/true});
  return RUN_ALL_TESTS();
}
