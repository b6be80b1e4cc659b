// `kvasir bench`: what this machine and this build can do.
#include "bench/tool/bench.h"

#include "base/cli/flags.h"
#include "server/commands.h"

namespace kvasir::cli {

void AddBenchCommand(CLI::App* app, int* exit_code) {
  CLI::App* group = app->add_subcommand(
      "bench", "benchmarks: ratios measured side by side in one run");
  group->require_subcommand(1);
  group->footer(
      "Every ratio is the median of interleaved pairs. One whose pairs spread\n"
      "by more than 15 % (the middle half, relative to the median) is marked\n"
      "undecided: the machine was too busy to say anything; so is one of "
      "fewer\n"
      "than 7 pairs. --json prints one object {machine, figures, spread,\n"
      "targets, undecided, rows, notes}.");
  AddBenchAttention(group, exit_code);
  AddBenchCapacity(group, exit_code);
  AddBenchDecode(group, exit_code);
  AddBenchPreemption(group, exit_code);
  AddBenchPrefill(group, exit_code);
  AddBenchProxy(group, exit_code);
  AddBenchRope(group, exit_code);
  AddBenchScheduler(group, exit_code);
  AddBenchServe(group, exit_code);
  AddBenchStream(group, exit_code);
  AddBenchLoad(group, exit_code);
}

}  // namespace kvasir::cli
