#include "kernels/emulation/testing/left_out.h"

#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "base/check.h"

namespace {

// The exit codes by which the child process returns its verdict. Nothing else
// in the child exits with these codes.
constexpr int kRight = 40, kWrong = 41, kRace = 42;
bool judging = false;

}  // namespace

// ThreadSanitizer calls the function of this name for each report.
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
    case Verdict::kEndless:
      return "endless";
    case Verdict::kStopped:
      break;
  }
  return "stopped";
}

uint64_t Seeds() {
  const char* const asked = std::getenv("KVASIR_EMULATION_SEEDS");
  if (asked == nullptr) return 8;
  uint64_t seeds = 0;
  KVASIR_CHECK(absl::SimpleAtoi(asked, &seeds) && seeds > 0);
  return seeds;
}

Verdict Judge(absl::FunctionRef<bool()> is_right, int most_seconds) {
  if (kThreadSanitizer) FreeIdleStacks();
  std::fflush(nullptr);
  // The child's error output is captured and not shown, because its reports are
  // expected.
  std::FILE* const said = std::tmpfile();
  KVASIR_CHECK(said != nullptr);
  const pid_t child = ::fork();
  KVASIR_CHECK(child >= 0);
  if (child == 0) {
    judging = true;
    ::dup2(::fileno(said), STDERR_FILENO);
    // Limits the child's processor time, not the time that passes, so that a
    // busy machine does not make the verdict kEndless.
    const itimerval limit = {{0, 0}, {most_seconds, 0}};
    KVASIR_CHECK(::setitimer(ITIMER_PROF, &limit, nullptr) == 0);
    _exit(is_right() ? kRight : kWrong);
  }
  int status = 0;
  KVASIR_CHECK(::waitpid(child, &status, 0) == child);
  std::string text(4096, '\0');
  std::rewind(said);
  text.resize(std::fread(text.data(), 1, text.size(), said));
  std::fclose(said);
  const auto says = [&](const char* what) {
    return text.find(what) != std::string::npos;
  };
  switch (WIFEXITED(status) ? WEXITSTATUS(status) : 0) {
    case kRight:
      return Verdict::kRight;
    case kWrong:
      return Verdict::kWrong;
    case kRace:
      return Verdict::kRace;
    default:
      break;
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF) {
    return Verdict::kEndless;
  }
  const bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  // "runtime error" is a report of UndefinedBehaviorSanitizer, for example
  // about a bool that was read from poisoned memory.
  if ((aborted && says("emulated kernel ")) || says("runtime error: ")) {
    return Verdict::kStopped;
  }
  ADD_FAILURE() << "the child ended with status " << status << ": " << text;
  return Verdict::kRight;
}

std::vector<Mutant> LeaveOutEach(
    const std::string& kernel, uint64_t seeds,
    absl::FunctionRef<bool(EmulatedTest&)> is_right) {
  std::vector<Mutant> mutants;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    EmulatedTest whole(seed);
    EXPECT_TRUE(is_right(whole)) << kernel << ", seed " << seed;
    if (seed > 1) continue;
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
