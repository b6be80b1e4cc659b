// Test support: runs a kernel that is expected to fail, and reports how it
// failed. Each run is in a child process, because the emulator ends its process
// when it finds a fault.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/emulation/testing/emulated_ops.h"

namespace kvasir::kernels::emulation {

enum class Verdict {
  kRight,    // the result is right, and ThreadSanitizer reported nothing
  kWrong,    // the result is wrong
  kRace,     // ThreadSanitizer reported a race
  kStopped,  // the emulator or UBSan ended the process
  kEndless   // it used more processor time than allowed
};
const char* VerdictName(Verdict verdict);

// The number of seeds with which a test runs each kernel: 8, or the value of
// the environment variable KVASIR_EMULATION_SEEDS.
uint64_t Seeds();

// Runs `is_right` in a child process, on one thread, for at most `most_seconds`
// of processor time, and returns how it ended. If the child ends in a way that
// no Verdict describes, the test fails and kRight is returned.
Verdict Judge(absl::FunctionRef<bool()> is_right, int most_seconds = 60);

struct Mutant {
  SyncSite site;
  // The first verdict that is not kRight, in the order of the seeds.
  Verdict verdict = Verdict::kRight;
};

// Runs a kernel unchanged with `seeds` seeds; the result must be right with all
// of them. Then leaves out each synchronizing line of the kernel in turn and
// runs it with the same seeds, until a verdict is not kRight. `is_right` must
// launch the kernel on the fresh device that it receives, and return whether
// the result is right.
std::vector<Mutant> LeaveOutEach(
    const std::string& kernel, uint64_t seeds,
    absl::FunctionRef<bool(EmulatedTest&)> is_right);

}  // namespace kvasir::kernels::emulation
