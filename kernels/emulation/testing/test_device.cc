#include "kernels/emulation/testing/test_device.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/machine.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels::emulation {
namespace {

TestGpu test_gpu;

}  // namespace

void RunTestsOn(const TestGpu& gpu) { test_gpu = gpu; }
bool OnGpu() { return test_gpu.make != nullptr; }
bool TakesWholeSizes() {
  return OnGpu() && std::getenv("KVASIR_GPU_SMALL") == nullptr;
}
bool HasBulkCopies() { return !OnGpu() || test_gpu.has_bulk_copies; }

base::ThreadPool* HostThreads() {
  if (!OnGpu()) return nullptr;
  static base::ThreadPool threads(base::ReadMachineLimits().cpus);
  return &threads;
}

void SkipWithoutEmulator() {
  constexpr char kWhy[] =
      "skipped on a GPU: needs the emulator's sites, counters or reports";
  [&] { GTEST_SKIP() << kWhy; }();
  throw ::testing::AssertionException(::testing::TestPartResult(
      ::testing::TestPartResult::kSkip, __FILE__, __LINE__, kWhy));
}

std::unique_ptr<Device> MakeTestDevice(const EmulatorOptions& options,
                                       DType activations) {
  if (OnGpu()) return test_gpu.make();
  return std::make_unique<EmulatedDevice>(
      EmulatedDeviceOptions{.emulator = options, .activations = activations},
      emulated::Ops());
}

}  // namespace kvasir::kernels::emulation
