// The device that tests of kernels run on: the emulated one, or a GPU in
// programs that are linked with one (kernels/cuda/testing/gpu_main.cc).
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/emulation/emulator.h"

namespace kvasir::kernels::emulation {

struct TestGpu {
  std::unique_ptr<Device> (*make)() = nullptr;
  bool has_bulk_copies = false;  // only sm_90 has them
};

// Selects the device for tests from now on. Call it before the first test.
void RunTestsOn(const TestGpu& gpu);
bool OnGpu();
// True if tests may use the sizes of real models: on a GPU, unless a tool slows
// it down (KVASIR_GPU_SMALL is set).
bool TakesWholeSizes();
bool HasBulkCopies();

// Skips the rest of a test that needs sites, counters or reports, which a GPU
// does not have. It throws an AssertionException, which gtest understands.
[[noreturn]] void SkipWithoutEmulator();

// The threads for the host's own computations in tests on a GPU. Null with the
// emulated device, because its tests fork.
base::ThreadPool* HostThreads();

// Makes a fresh device. A GPU ignores the options.
std::unique_ptr<Device> MakeTestDevice(const EmulatorOptions& options);

}  // namespace kvasir::kernels::emulation
