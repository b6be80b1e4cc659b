// `kvasir bench prefill`: compares the matrix products of a prefill with
// oneDNN's float32 GEMM on the same shapes.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/gemm_baseline.h"
#include "bench/gemm_share.h"
#include "bench/tool/bench.h"
#include "bench/tool/engine.h"
#include "bench/tool/report.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;
using bench::SecondsOf;

struct PrefillFlags {
  BenchFlags bench;
  ModelOptions model;
  int64_t tokens = 512;
};

// The matrix products of one layer, fused as in the executor. For experts: a
// dense MLP with the same operations.
std::vector<bench::GemmShape> LayerShapes(const model::DecoderSpec& spec) {
  const int64_t q = spec.num_heads * spec.head_dim;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  const int64_t features = spec.used_mlp_features();
  return {{"qkv", spec.hidden_size, q + 2 * kv},
          {"o", q, spec.hidden_size},
          {"gate_up", spec.hidden_size, 2 * features},
          {"down", features, spec.hidden_size}};
}

void AddShareFigures(const bench::GemmShare& gemm,
                     const std::vector<double>& prefill_seconds, double layers,
                     BenchReport* report) {
  report->AddRatio("gemm_share",
                   RatioOf(gemm.baseline_seconds(), gemm.seconds()),
                   Target{0.85, true},
                   "speed of our matmuls, divided by that of oneDNN's sgemm");
  // Adds the share of the baseline's speed that a whole prefill, with attention
  // and norms, reaches.
  std::vector<double> baseline = gemm.baseline_seconds();
  for (double& seconds : baseline) seconds *= layers;
  report->AddRatio("prefill_share", RatioOf(baseline, prefill_seconds),
                   std::nullopt,
                   "speed of the whole prefill, divided by that of only "
                   "oneDNN's sgemm");
  report->AddFigure("gemm_gflops",
                    gemm.operations() / Quantile(gemm.seconds(), 0.5) * 1e-9);
  report->AddFigure(
      "onednn_gflops",
      gemm.operations() / Quantile(gemm.baseline_seconds(), 0.5) * 1e-9);
  for (const bench::GemmShareRow& row : gemm.Rows()) {
    report->AddRow({{"shape", row.shape.name},
                    {"k", row.shape.k},
                    {"n", row.shape.n},
                    {"gflops", row.flops * 1e-9},
                    {"onednn_gflops", row.baseline_flops * 1e-9},
                    {"share", row.share.median},
                    {"spread", row.share.spread},
                    {"undecided", row.share.undecided()}});
  }
}

absl::StatusOr<BenchReport> RunPrefill(PrefillFlags flags) {
  DefaultBenchModel(flags.bench, &flags.model);
  UseQuick<int64_t>(flags.bench, "--tokens", 32, &flags.tokens);
  KVASIR_ASSIGN_OR_RETURN(
      const auto engine,
      BenchEngine::Create({.model = flags.model,
                           .max_model_len = flags.tokens,
                           .max_batched_tokens = flags.tokens}));
  const model::DecoderSpec& spec = engine->model().rank().spec();
  std::optional<bench::GemmShare> gemm;
  if (bench::HasGemmBaseline()) {
    KVASIR_ASSIGN_OR_RETURN(
        gemm,
        bench::GemmShare::Create(LayerShapes(spec), {.num_rows = flags.tokens},
                                 engine->pool()));
  }
  std::vector<double> prefill_seconds;
  Progress progress("prefill", BenchPairs(flags.bench), "pairs", true);
  for (int pair = 0; pair < BenchPairs(flags.bench); ++pair) {
    // Pairs alternate between measuring the GEMMs (ours and oneDNN's) first and
    // the prefill first.
    for (int turn = 0; turn < 2; ++turn) {
      absl::Status status;
      if ((pair + turn) % 2 == 0) {
        if (gemm.has_value()) status = gemm->MeasurePair();
      } else {
        prefill_seconds.push_back(
            SecondsOf([&] { status = engine->Prefill(1, flags.tokens); }));
        engine->Release(1);
      }
      KVASIR_RETURN_IF_ERROR(status);
    }
    progress.Update(pair + 1);
  }
  progress.Finish();

  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(engine->pool(), flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  const auto layers = static_cast<double>(spec.num_layers());
  if (gemm.has_value()) {
    AddShareFigures(*gemm, prefill_seconds, layers, &report);
  } else {
    report.AddNote(
        "gemm_share is left out: this build has no oneDNN (libdnnl-dev)");
  }
  const double seconds = Quantile(prefill_seconds, 0.5);
  report.AddFigure("prefill_tokens_per_second",
                   static_cast<double>(flags.tokens) / seconds, std::nullopt,
                   "end to end");
  report.AddFigure("prefill_seconds", seconds);
  report.AddFigure("prompt_tokens", static_cast<double>(flags.tokens));
  return report;
}

}  // namespace

void AddBenchPrefill(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<PrefillFlags>();
  CLI::App* command = group->add_subcommand(
      "prefill",
      "compare the matrix products of a prompt with oneDNN's "
      "GEMM");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--tokens", flags->tokens,
          "tokens in the prompt, which is one step")
      ->check(CLI::Range(1, 1 << 16));
  AddBenchFlags(command, &flags->bench);
  AddSimdFlag(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunPrefill(*flags); }, exit_code);
}

}  // namespace kvasir::cli
