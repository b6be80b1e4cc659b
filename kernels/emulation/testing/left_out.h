// Test support: the outcome of a faulty kernel. Each run has a process of its
// own, because a fault that is found ends the process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/emulation/testing/emulated_ops.h"

namespace kvasir::kernels::emulation {

enum class Verdict {
  kRight,    // and ThreadSanitizer reported nothing
  kWrong,    // wrong numbers
  kRace,     // ThreadSanitizer reported a race
  kStopped,  // by the emulator or UndefinedBehaviorSanitizer
  kEndless   // it used more processor time than allowed
};
const char* VerdictName(Verdict verdict);

// Number of seeds for a test that runs a kernel on several: 8, or
// KVASIR_EMULATION_SEEDS (scripts/soak).
uint64_t Seeds();

// Runs `is_right` in a child process, on one thread, for at most `most_seconds`
// of processor time. If the child ends in any other way than by a verdict, the
// test fails and kRight is returned.
Verdict Judge(absl::FunctionRef<bool()> is_right, int most_seconds = 60);

struct Mutant {
  SyncSite site;
  Verdict verdict = Verdict::kRight;  // the first over the seeds that is not
                                      // kRight
};

// Runs a kernel unchanged on `seeds` seeds; it must be right on all of them.
// Then leaves out each of its sites in turn, on as many seeds until a verdict
// is not kRight. `is_right` launches the kernel on a fresh device and compares.
std::vector<Mutant> LeaveOutEach(
    const std::string& kernel, uint64_t seeds,
    absl::FunctionRef<bool(EmulatedTest&)> is_right);

}  // namespace kvasir::kernels::emulation
