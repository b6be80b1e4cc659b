// Test support: what becomes of a kernel when something is wrong in it, each
// time in a process of its own, because what is found ends one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/emulation/testing/emulated_ops.h"

namespace kvasir::kernels::emulation {

enum class Verdict {
  kRight,    // and ThreadSanitizer had nothing to say
  kWrong,    // numbers
  kRace,     // ThreadSanitizer reported one
  kStopped,  // by the emulator or UndefinedBehaviorSanitizer
  kEndless   // it took more time of a processor than it may
};
const char* VerdictName(Verdict verdict);

// Seeds of a test that runs a kernel on several: 8, or KVASIR_EMULATION_SEEDS
// (scripts/soak).
uint64_t Seeds();

// `is_right` runs in a child process, on one thread, for at most `most_seconds`
// of a processor's time. One that ends by anything else is a failure of the
// test, and right: nothing was found.
Verdict Judge(absl::FunctionRef<bool()> is_right, int most_seconds = 60);

struct Mutant {
  SyncSite site;
  Verdict verdict = Verdict::kRight;  // the first that is not, over the seeds
};

// Runs a kernel as it is on `seeds` seeds, on which it has to be right, and
// then with each of its sites left out in turn, on as many until it is noticed.
// `is_right` launches it on a fresh device and compares.
std::vector<Mutant> LeaveOutEach(
    const std::string& kernel, uint64_t seeds,
    absl::FunctionRef<bool(EmulatedTest&)> is_right);

}  // namespace kvasir::kernels::emulation
