#include "kernels/emulation/testing/left_out.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "base/check.h"

namespace {

constexpr int kRight = 0, kWrong = 1, kRace = 2;
bool judging = false;

}  // namespace

// ThreadSanitizer calls this with each report: the name is its own.
extern "C" void __tsan_on_report(void*);   // NOLINT
extern "C" void __tsan_on_report(void*) {  // NOLINT
  if (judging) _exit(kRace);
}

namespace kvasir::kernels::emulation {

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kRight:
      return "right";
    case Verdict::kWrong:
      return "wrong numbers";
    case Verdict::kRace:
      return "race";
    case Verdict::kStopped:
      break;
  }
  return "stopped";
}

Verdict Judge(absl::FunctionRef<bool()> is_right) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  KVASIR_CHECK(child >= 0);
  if (child == 0) {
    judging = true;
    // What is found is expected here.
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDERR_FILENO);
    _exit(is_right() ? kRight : kWrong);
  }
  int status = 0;
  KVASIR_CHECK(::waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status)) return Verdict::kStopped;
  switch (WEXITSTATUS(status)) {
    case kRight:
      return Verdict::kRight;
    case kWrong:
      return Verdict::kWrong;
    case kRace:
      return Verdict::kRace;
    default:
      return Verdict::kStopped;
  }
}

std::vector<Mutant> LeaveOutEach(
    const std::string& kernel, uint64_t seeds,
    absl::FunctionRef<bool(EmulatedTest&)> is_right) {
  std::vector<Mutant> mutants;
  {
    EmulatedTest whole;
    EXPECT_TRUE(is_right(whole)) << kernel;
    for (const SyncSite& site : whole.emulator().SyncSites(kernel)) {
      mutants.push_back({site});
    }
  }
  for (Mutant& mutant : mutants) {
    for (uint64_t seed = 1; seed <= seeds && mutant.verdict == Verdict::kRight;
         ++seed) {
      mutant.verdict = Judge([&] {
        EmulatedTest test(seed);
        test.emulator().LeaveOut(kernel, mutant.site);
        return is_right(test);
      });
    }
  }
  return mutants;
}

}  // namespace kvasir::kernels::emulation
