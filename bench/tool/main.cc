// kvasir-bench: benchmarks of this build on this machine. `kvasir bench` runs
// it.
#include "CLI/CLI.hpp"
#include "base/cli/flags.h"
#include "base/cli/process.h"
#include "base/cli/version.h"
#include "bench/tool/bench.h"

int main(int argc, char** argv) {
  using namespace kvasir::cli;
  PrepareProcess();

  CLI::App app{"Benchmarks: ratios measured side by side in one run."};
  app.name("kvasir bench");
  app.set_version_flag("--version", std::string(kVersion));
  AddConfigFile(&app);
  app.fallthrough();
  app.require_subcommand(1);
  app.footer(
      "A ratio is the median of interleaved pairs. It is marked undecided if\n"
      "the middle half of its pairs spreads by more than 15 % of the median\n"
      "(the machine was too busy), or if there are fewer than 7 pairs.\n"
      "--json prints one object {machine, figures, spread, targets, "
      "undecided,\n"
      "rows, notes}.");

  int exit_code = kExitOk;
  AddBenchAttention(&app, &exit_code);
  AddBenchCapacity(&app, &exit_code);
  AddBenchDecode(&app, &exit_code);
  AddBenchPrefill(&app, &exit_code);
  AddBenchProxy(&app, &exit_code);
  AddBenchRouter(&app, &exit_code);
  AddBenchScheduler(&app, &exit_code);
  AddBenchServe(&app, &exit_code);
  AddBenchLoad(&app, &exit_code);
  return ParseAndRun(&app, argc, argv, exit_code);
}
