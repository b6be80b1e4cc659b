// The device that tests of kernels run on: the emulated one, or a GPU in the
// programs that are linked with one (kernels/cuda/testing/gpu_main.cc).
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/emulation/emulator.h"

namespace kvasir::kernels::emulation {

struct TestGpu {
  std::unique_ptr<Device> (*make)() = nullptr;
  bool has_bulk_copies = false;  // of sm_90
};

// From now on tests run on such devices. Before the first test.
void RunTestsOn(const TestGpu& gpu);
bool OnGpu();
// On a GPU, and no tool makes it slow (KVASIR_GPU_SMALL in the environment):
// sizes of models are no trouble.
bool TakesWholeSizes();
bool HasBulkCopies();

// Ends a test, skipped, that asks a GPU for more than results: for sites,
// counters or reports. (gtest takes an AssertionException for what it was
// told.)
[[noreturn]] void SkipWithoutEmulator();

// For what the host computes beside a GPU. Null with the emulated device, whose
// tests fork.
base::ThreadPool* HostThreads();

// A fresh device; a GPU has no use for the options.
std::unique_ptr<Device> MakeTestDevice(const EmulatorOptions& options);

}  // namespace kvasir::kernels::emulation
