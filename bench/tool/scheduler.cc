// `kvasir bench scheduler`: measures the time for planning a step.
#include <algorithm>
#include <memory>
#include <vector>

#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/scheduler_bench.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"

namespace kvasir::cli {
namespace {

struct SchedulerFlags {
  BenchFlags bench;
  worker::SchedulerBenchOptions options;
};

// The median of the values, and the spread of their middle half relative to the
// median.
bench::PairedRatio MedianOf(const std::vector<double>& values) {
  return bench::RatioOf(values, std::vector<double>(values.size(), 1.0));
}

absl::StatusOr<BenchReport> RunScheduler(SchedulerFlags flags) {
  worker::SchedulerBenchOptions& options = flags.options;
  UseQuick(flags.bench, "--sequences", 8u, &options.num_sequences);
  UseQuick(flags.bench, "--context", 256u, &options.context_tokens);
  UseQuick(flags.bench, "--steps", 20u, &options.steps);
  std::vector<double> step_us;
  std::vector<double> schedule_us;
  std::vector<double> apply_us;
  std::vector<double> ahead_us;
  std::vector<double> p99_us;
  worker::SchedulerBenchResult last;
  Progress progress("scheduler", BenchPairs(flags.bench), "runs", true);
  for (int run = 0; run < BenchPairs(flags.bench); ++run) {
    KVASIR_ASSIGN_OR_RETURN(last, worker::RunSchedulerBench(options));
    step_us.push_back(last.step_us);
    schedule_us.push_back(last.schedule_us);
    apply_us.push_back(last.apply_us);
    ahead_us.push_back(last.ahead_us);
    p99_us.push_back(last.step_p99_us);
    progress.Update(run + 1);
  }
  progress.Finish();

  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  report.AddRatio("step_us", MedianOf(step_us), Target{100.0, false},
                  "Schedule + Apply; the median over runs of each run's "
                  "median");
  report.AddFigure("schedule_us", bench::Quantile(schedule_us, 0.5));
  report.AddFigure("apply_us", bench::Quantile(apply_us, 0.5));
  report.AddFigure("ahead_us", bench::Quantile(ahead_us, 0.5));
  report.AddFigure("step_p99_us", bench::Quantile(p99_us, 0.5));
  report.AddFigure("metadata_share", last.metadata_share, Target{0.02, false},
                   "of the page pool");
  report.AddFigure("metadata_bytes", static_cast<double>(last.metadata_bytes));
  report.AddFigure("pool_bytes", static_cast<double>(last.pool_bytes));
  report.AddFigure("sequences", options.num_sequences);
  report.AddFigure("context_tokens", options.context_tokens);
  return report;
}

}  // namespace

void AddBenchScheduler(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<SchedulerFlags>();
  flags->options.steps = 500;
  CLI::App* command = group->add_subcommand(
      "scheduler",
      "measure the time for planning a step, with an executor "
      "that does nothing");
  AddFlag(command, "--sequences", flags->options.num_sequences,
          "the number of running sequences")
      ->check(CLI::Range(1, 65536));
  AddFlag(command, "--context", flags->options.context_tokens,
          "tokens in each sequence")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(command, "--page-tokens", flags->options.page_tokens,
          "slots in a cache page")
      ->check(CLI::IsMember({16, 32, 64, 128}));
  AddFlag(command, "--steps", flags->options.steps,
          "the number of steps in a run")
      ->check(CLI::Range(10, 1 << 20));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunScheduler(*flags); }, exit_code);
}

}  // namespace kvasir::cli
