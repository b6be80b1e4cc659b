// Test support: runs a faulty kernel and reports the outcome. Each run is in a
// child process, because the emulator ends the process when it finds a fault.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/emulation/testing/emulated_ops.h"

namespace kvasir::kernels::emulation {

enum class Verdict {
  kRight,    // right numbers, no report of ThreadSanitizer
  kWrong,    // wrong numbers
  kRace,     // ThreadSanitizer reported a race
  kStopped,  // the emulator or UBSan ended the process
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
