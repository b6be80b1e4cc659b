// The device on which tests of kernels run: the emulated device, or a GPU in
// test programs that are linked with kernels/cuda/testing/gpu_main.cc.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/device/dtype.h"
#include "kernels/emulation/emulator.h"

namespace kvasir::kernels::emulation {

struct TestGpu {
  std::unique_ptr<Device> (*make)() = nullptr;
  bool has_bulk_copies = false;  // GPUs of sm_90 have them
};

// Makes all tests run on this GPU. Must be called before the first test.
void RunTestsOn(const TestGpu& gpu);
bool OnGpu();
// True if tests run on a GPU and may use the sizes of real models. The
// environment variable KVASIR_GPU_SMALL forbids these sizes, because tools such
// as compute-sanitizer make the GPU slow.
bool TakesWholeSizes();
bool HasBulkCopies();

// Skips the rest of a test that needs the emulator's sites, counters or
// reports. Only called if tests run on a GPU. Throws AssertionException, which
// ends the test without a failure.
[[noreturn]] void SkipWithoutEmulator();

// Threads with which tests on a GPU compute expected results. Null if tests use
// the emulated device, because those tests fork.
base::ThreadPool* HostThreads();

// Makes the device for one test. A GPU ignores the options and the type of
// activations.
std::unique_ptr<Device> MakeTestDevice(const EmulatorOptions& options,
                                       DType activations = DType::kBf16);

}  // namespace kvasir::kernels::emulation
