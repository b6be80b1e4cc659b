// `kvasir bench decode`: how much of the machine's read bandwidth a decode step
// achieves, and what a batch of 8 gains.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "cli/bench.h"
#include "cli/bench_engine.h"
#include "cli/bench_report.h"
#include "cli/flags.h"
#include "cli/progress.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;
using bench::SecondsOf;

struct DecodeFlags {
  BenchFlags bench;
  ModelOptions model;
  int64_t context = 512;
  int64_t batch = 8;
  int64_t steps = 2;
};

// Seconds and bytes of some steps of one batch size.
struct Sample {
  double seconds = 0.0;
  double bytes = 0.0;
};

absl::StatusOr<Sample> DecodeSteps(BenchEngine* engine, int64_t batch,
                                   int64_t steps) {
  const int64_t before = engine->weight_bytes_read() + engine->kv_bytes_read();
  absl::Status status;
  Sample sample;
  sample.seconds = SecondsOf([&] {
    for (int64_t i = 0; i < steps && status.ok(); ++i) {
      status = engine->Decode(batch);
    }
  });
  KVASIR_RETURN_IF_ERROR(status);
  sample.bytes = static_cast<double>(engine->weight_bytes_read() +
                                     engine->kv_bytes_read() - before);
  return sample;
}

// By pair: seconds a byte of the machine and of batch 1, seconds a token of
// both batches.
struct DecodeTimes {
  std::vector<double> read;
  std::vector<double> one_byte;
  std::vector<double> one_token;
  std::vector<double> many_token;
  double bytes_per_step = 0.0;
  double many_bytes_per_step = 0.0;
};

// One case, by its medians.
nlohmann::ordered_json DecodeRow(int64_t batch, double seconds_per_token,
                                 double bytes_per_step) {
  const double seconds = seconds_per_token * static_cast<double>(batch);
  return {{"batch", batch},
          {"tokens_per_second", 1.0 / seconds_per_token},
          {"step_ms", seconds * 1e3},
          {"bytes_per_step", bytes_per_step},
          {"bytes_per_second", bytes_per_step / seconds}};
}

absl::StatusOr<DecodeTimes> Measure(const DecodeFlags& flags,
                                    BenchEngine* engine,
                                    MachineCeilings* ceilings) {
  DecodeTimes times;
  Progress progress("decode", BenchPairs(flags.bench), "pairs", true);
  const auto steps = static_cast<double>(flags.steps);
  // The first pair warms up.
  for (int pair = -1; pair < BenchPairs(flags.bench); ++pair) {
    const double bandwidth = ceilings->MeasureBytesPerSecond();
    KVASIR_ASSIGN_OR_RETURN(const Sample one,
                            DecodeSteps(engine, 1, flags.steps));
    KVASIR_ASSIGN_OR_RETURN(const Sample many,
                            DecodeSteps(engine, flags.batch, flags.steps));
    if (pair < 0) continue;
    times.read.push_back(1.0 / bandwidth);
    times.one_byte.push_back(one.seconds / one.bytes);
    times.one_token.push_back(one.seconds / steps);
    times.many_token.push_back(many.seconds / steps /
                               static_cast<double>(flags.batch));
    times.bytes_per_step = one.bytes / steps;
    times.many_bytes_per_step = many.bytes / steps;
    progress.Update(pair + 1);
  }
  return times;
}

absl::StatusOr<BenchReport> RunDecode(DecodeFlags flags) {
  DefaultBenchModel(flags.bench, &flags.model);
  UseQuick<int64_t>(flags.bench, "--context", 64, &flags.context);
  // Warm-up pair included; each sequence takes part in both batches.
  const int64_t decoded = 2 * flags.steps * (BenchPairs(flags.bench) + 1);
  KVASIR_ASSIGN_OR_RETURN(
      const auto engine,
      BenchEngine::Create({.model = flags.model,
                           .max_model_len = flags.context + decoded,
                           .max_num_seqs = flags.batch}));
  Progress progress("prefill", flags.batch, "sequences", true);
  for (int64_t i = 1; i <= flags.batch; ++i) {
    KVASIR_RETURN_IF_ERROR(
        engine->Prefill(static_cast<uint64_t>(i), flags.context));
    progress.Update(i);
  }
  progress.Finish();

  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(engine->pool(), flags.bench.quick));
  KVASIR_ASSIGN_OR_RETURN(const DecodeTimes times,
                          Measure(flags, engine.get(), &ceilings));
  BenchReport report(ceilings.ToJson());
  report.AddRatio("read_bandwidth_share", RatioOf(times.read, times.one_byte),
                  Target{0.75, true}, "batch 1, of the machine's own");
  const std::string batch = absl::StrCat("batch", flags.batch);
  report.AddRatio(
      batch + "_speedup", RatioOf(times.one_token, times.many_token),
      flags.batch == 8 ? std::optional(Target{4.0, true}) : std::nullopt,
      "tokens/s over those of batch 1");
  report.AddFigure("batch1_tokens_per_second",
                   1.0 / Quantile(times.one_token, 0.5));
  report.AddFigure(batch + "_tokens_per_second",
                   1.0 / Quantile(times.many_token, 0.5));
  report.AddFigure("read_bytes_per_second", 1.0 / Quantile(times.one_byte, 0.5),
                   std::nullopt, "batch 1, weights and cache");
  report.AddFigure("bytes_read_per_step", times.bytes_per_step);
  report.AddRow(
      DecodeRow(1, Quantile(times.one_token, 0.5), times.bytes_per_step));
  report.AddRow(DecodeRow(flags.batch, Quantile(times.many_token, 0.5),
                          times.many_bytes_per_step));
  const auto weights = static_cast<double>(engine->model().weight_bytes());
  report.AddFigure("weight_bytes", weights);
  report.AddFigure("context_tokens", static_cast<double>(flags.context));
  const auto cache = static_cast<double>(base::LastLevelCacheBytes());
  if (cache > 0) {
    report.AddFigure("footprint_over_llc", times.bytes_per_step / cache);
  }
  if (times.bytes_per_step <= 4 * cache) {
    report.MarkUndecided("read_bandwidth_share");
    report.AddNote(
        "a step reads less than four times the last-level cache: its share "
        "says nothing about memory");
  }
  return report;
}

}  // namespace

void AddBenchDecode(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<DecodeFlags>();
  CLI::App* command = group->add_subcommand(
      "decode",
      "decode steps: read bandwidth against the machine's, batch 8 against 1");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--context", flags->context, "tokens before the steps")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--batch", flags->batch, "the larger batch")
      ->check(CLI::Range(2, 1024));
  AddFlag(command, "--steps", flags->steps, "steps of a sample")
      ->check(CLI::Range(1, 1000));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunDecode(*flags); }, exit_code);
}

}  // namespace kvasir::cli
