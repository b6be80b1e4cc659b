// `kvasir bench decode`: measures which share of the machine's read bandwidth a
// decode step reaches, and how many times faster a batch of 8 generates tokens.
#include "bench/tool/decode.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "bench/tool/bench.h"
#include "bench/tool/engine.h"
#include "bench/tool/report.h"
#include "model/known_models.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::cli {

absl::StatusOr<DecodeSample> DecodeSteps(BenchEngine* engine, int64_t batch,
                                         int64_t steps) {
  const int64_t weights_before = engine->weight_bytes_read();
  const int64_t cache_before = engine->kv_bytes_read();
  absl::Status status;
  DecodeSample sample;
  engine->profile().Start();
  sample.seconds = bench::SecondsOf([&] {
    for (int64_t i = 0; i < steps && status.ok(); ++i) {
      status = engine->Decode(batch);
    }
  });
  sample.parts = engine->profile().Stop();
  KVASIR_RETURN_IF_ERROR(status);
  sample.weight_bytes =
      static_cast<double>(engine->weight_bytes_read() - weights_before);
  sample.cache_bytes =
      static_cast<double>(engine->kv_bytes_read() - cache_before);
  return sample;
}

nlohmann::ordered_json BreakdownOf(const worker::CpuStepProfile::Seconds& sum) {
  double all = 0.0;
  for (const double seconds : sum) all += seconds;
  nlohmann::ordered_json shares = nlohmann::ordered_json::object();
  for (size_t part = 0; part < sum.size(); ++part) {
    const char* name =
        worker::StepPartName(static_cast<worker::StepPart>(part));
    shares[name] = all > 0.0 ? sum[part] / all : 0.0;
  }
  return shares;
}

void AddParts(const DecodeSample& sample,
              worker::CpuStepProfile::Seconds* sum) {
  for (size_t part = 0; part < sum->size(); ++part) {
    (*sum)[part] += sample.parts[part];
  }
}

absl::Status FillEngine(const DecodeFlags& flags, BenchEngine* engine) {
  if (flags.fill == "random") {
    return engine->FillWithRandomLatents(flags.batch, flags.context);
  }
  Progress progress("prefill", flags.batch, "sequences", !engine->quiet());
  for (int64_t i = 1; i <= flags.batch; ++i) {
    KVASIR_RETURN_IF_ERROR(
        engine->Prefill(static_cast<uint64_t>(i), flags.context));
    progress.Update(i);
  }
  return absl::OkStatus();
}

namespace {

using bench::Quantile;
using bench::RatioOf;

// The times of each pair: seconds per byte of a plain read and of a step with
// batch 1, and seconds per token with both batch sizes.
struct DecodeTimes {
  std::vector<double> read;
  std::vector<double> one_byte;
  std::vector<double> one_token;
  std::vector<double> many_token;
  double bytes_per_step = 0.0;
  double many_bytes_per_step = 0.0;
  worker::CpuStepProfile::Seconds many_parts = {};
};

// A row of the report for one batch size, with medians.
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
    KVASIR_ASSIGN_OR_RETURN(const DecodeSample one,
                            DecodeSteps(engine, 1, flags.steps));
    KVASIR_ASSIGN_OR_RETURN(const DecodeSample many,
                            DecodeSteps(engine, flags.batch, flags.steps));
    if (pair < 0) continue;
    times.read.push_back(1.0 / bandwidth);
    times.one_byte.push_back(one.seconds / one.bytes());
    times.one_token.push_back(one.seconds / steps);
    times.many_token.push_back(many.seconds / steps /
                               static_cast<double>(flags.batch));
    times.bytes_per_step = one.bytes() / steps;
    AddParts(many, &times.many_parts);
    times.many_bytes_per_step = many.bytes() / steps;
    progress.Update(pair + 1);
  }
  return times;
}

absl::StatusOr<BenchReport> RunDecode(DecodeFlags flags) {
  DefaultBenchModel(flags.bench, &flags.model);
  UseQuick<int64_t>(flags.bench, "--context", 64, &flags.context);
  if (flags.batch < 2 && !flags.compares()) {
    return absl::InvalidArgumentError(
        "--batch 1 needs --plan or --baseline; without them, the batch is "
        "compared with batch 1 and must be larger");
  }
  if (flags.tp > 1) return RunDecodeRanks(std::move(flags));
  if (flags.paced && flags.plans.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--paced measures one cache: want one --plan, have ",
                     flags.plans.size()));
  }
  if (flags.fill == "auto")
    flags.fill = flags.compares() ? "random" : "prefill";
  if (flags.compares()) return RunDecodeComparison(std::move(flags));
  // The most tokens that the run adds to a sequence. A sequence may be in both
  // batches of every pair, and there is one more pair to warm up.
  const int64_t decoded = 2 * flags.steps * (BenchPairs(flags.bench) + 1);
  KVASIR_ASSIGN_OR_RETURN(
      const auto engine,
      BenchEngine::Create({.model = flags.model,
                           .max_model_len = flags.context + decoded,
                           .max_num_seqs = flags.batch}));
  KVASIR_RETURN_IF_ERROR(FillEngine(flags, engine.get()));

  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(engine->pool(), flags.bench.quick));
  KVASIR_ASSIGN_OR_RETURN(const DecodeTimes times,
                          Measure(flags, engine.get(), &ceilings));
  BenchReport report(ceilings.ToJson());
  report.AddRatio("read_bandwidth_share", RatioOf(times.read, times.one_byte),
                  Target{0.75, true},
                  "batch 1, share of the machine's read bandwidth");
  const std::string batch = absl::StrCat("batch", flags.batch);
  report.AddRatio(
      batch + "_speedup", RatioOf(times.one_token, times.many_token),
      flags.batch == 8 ? std::optional(Target{4.0, true}) : std::nullopt,
      "tokens per second, divided by those of batch 1");
  report.AddFigure("batch1_tokens_per_second",
                   1.0 / Quantile(times.one_token, 0.5));
  report.AddFigure(batch + "_tokens_per_second",
                   1.0 / Quantile(times.many_token, 0.5));
  report.AddFigure("read_bytes_per_second", 1.0 / Quantile(times.one_byte, 0.5),
                   std::nullopt, "batch 1, bytes of weights and cache");
  report.AddFigure("bytes_read_per_step", times.bytes_per_step);
  report.AddRow(
      DecodeRow(1, Quantile(times.one_token, 0.5), times.bytes_per_step));
  nlohmann::ordered_json row = DecodeRow(
      flags.batch, Quantile(times.many_token, 0.5), times.many_bytes_per_step);
  if (flags.breakdown) row["breakdown"] = BreakdownOf(times.many_parts);
  report.AddRow(std::move(row));
  const auto weights = static_cast<double>(engine->model().weight_bytes());
  report.AddFigure("weight_bytes", weights);
  report.AddFigure("context_tokens", static_cast<double>(flags.context));
  const auto cache = static_cast<double>(base::LastLevelCacheBytes());
  if (cache > 0) {
    report.AddFigure("footprint_over_llc", times.bytes_per_step / cache);
  }
  if (times.bytes_per_step <
      static_cast<double>(MachineCeilings::FootprintBytes())) {
    report.MarkUndecided("read_bandwidth_share");
    report.AddNote(
        "a step reads less than four times the last-level cache, "
        "or less than 256 MiB, so its share does not show the "
        "memory's speed");
  }
  return report;
}

}  // namespace

void AddBenchDecode(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<DecodeFlags>();
  CLI::App* command = group->add_subcommand(
      "decode",
      "compare the read bandwidth of decode steps with the "
      "machine's, and batch 8 with batch 1");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--context", flags->context,
          "tokens in each sequence before the steps")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--batch", flags->batch,
          "the number of sequences in the larger batch; with --plan or "
          "--baseline, in every batch")
      ->check(CLI::Range(1, 1024));
  AddFlag(command, "--steps", flags->steps, "steps in each sample")
      ->check(CLI::Range(1, 1000));
  AddSwitch(command, "--breakdown", flags->breakdown,
            "report the share of each part in a step of the larger "
            "batch");
  AddFlag(command, "--plan", flags->plans,
          "compare the shape's uncompressed cache with the caches "
          "of these plans: kv_plan.json files (a plan for another "
          "shape is stretched to this one), or names that `kvasir "
          "bench attention --help` lists")
      ->delimiter(',');
  AddSwitch(command, "--bias-cost", flags->bias_cost,
            "with --plan NAME and a shape of the Qwen2 family: compare the "
            "model with the same model without biases, both with this plan");
  AddModelFlag(command, "--baseline", flags->baseline,
               "compare --model with this checkpoint");
  AddFlag(command, "--fill", flags->fill,
          "how the cache is filled: by a prefill, or with random "
          "latents (auto: random if caches or ranks are compared)")
      ->check(CLI::IsMember({"auto", "prefill", "random"}));
  AddSwitch(command, "--paced", flags->paced,
            "with --plan NAME: take a sample for each line of "
            "standard input, and print it as a line of JSON");
  AddFlag(command, "--tp", flags->tp,
          "compare one rank with this many tensor-parallel ranks on "
          "the same CPU cores; ranks are threads of this process, "
          "over Gloo on loopback")
      ->check(CLI::Range(1, static_cast<int>(worker::kMaxTpSize)));
  command->footer(
      "With --plan or --baseline the rows are caches: tokens_per_second,\n"
      "bytes_per_step (weights by the stream's counter, cache by its layout),\n"
      "speedup_over_dense and bytes_ratio (against the uncompressed cache),\n"
      "attention_speedup and attention_floor_ratio (for attention and lifts\n"
      "only: the uncompressed cache's time divided by this time, and this "
      "time\n"
      "divided by the larger of the floors of its bytes and operations).\n"
      "With --bias-cost the first row, with which the other is compared, is\n"
      "the model without biases instead of the uncompressed cache.\n"
      "The breakdown has these parts of a step: projections, rotation,\n"
      "append, lifts (what a compressed cache adds around attention),\n"
      "attention, eviction, output, mlp, norms, sum (over ranks), head,\n"
      "sampling, rest.\n"
      "With --tp the rows are ranks, first the one of TP=1. Each has "
      "--threads\n"
      "divided by N threads (at least one): step_ms (until the group's last\n"
      "rank has finished),\n"
      "weight_bytes and cache_bytes (the allocator's), collectives_per_step,\n"
      "sent_bytes_per_step (to all other ranks, with Gloo's own headers) "
      "and\n"
      "wait_share (the share of a rank's steps that it waits in collectives).");
  AddBenchFlags(command, &flags->bench);
  AddSimdFlag(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunDecode(*flags); }, exit_code);
}

}  // namespace kvasir::cli
