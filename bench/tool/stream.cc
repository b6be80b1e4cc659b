// `kvasir bench stream`: whether a text without end takes the memory of its
// beginning, and loses no more than it did there.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"
#include "server/loaded_model.h"
#include "server/text_tokens.h"
#include "worker/offline/perplexity.h"

namespace kvasir::cli {
namespace {

constexpr double kMostLoss = 1.01;    // of a pass over the second's
constexpr double kMostMemory = 1.02;  // of the process, end over warm-up

struct StreamFlags {
  BenchFlags bench;
  ModelOptions model;
  std::string text;
  int64_t tokens = 1000000;
  int64_t chunk = 512;
};

// The first pass begins with an empty cache; the second is what others are
// compared with.
constexpr int64_t kWarmUpPasses = 2;

// `rss`: of the process at the end of each pass.
void AddPasses(const worker::PerplexityResult& result,
               const std::vector<int64_t>& rss, BenchReport* report) {
  const auto loss = [&](size_t pass) {
    const worker::PerplexityPart& part = result.parts[pass];
    return part.nats / static_cast<double>(part.tokens);
  };
  const double second = loss(kWarmUpPasses - 1);
  double most = 0;
  double least = 0;
  for (size_t pass = 0; pass < result.parts.size(); ++pass) {
    const worker::PerplexityPart& part = result.parts[pass];
    const double over_second = loss(pass) / second;
    if (pass >= kWarmUpPasses) {
      most = std::max(most, over_second);
      least = least == 0 ? over_second : std::min(least, over_second);
    }
    report->AddRow({{"pass", pass + 1},
                    {"tokens", part.tokens},
                    {"nats_per_token", loss(pass)},
                    {"loss_over_second", over_second},
                    {"kv_held_bytes", part.held_bytes},
                    {"allocated_bytes", part.allocated_bytes},
                    {"rss_bytes", rss[pass]}});
  }
  const worker::PerplexityPart& warm = result.parts[kWarmUpPasses - 1];
  const worker::PerplexityPart& last = result.parts.back();
  const auto figure = [&](const std::string& name, int64_t value) {
    report->AddFigure(name, static_cast<double>(value));
  };
  report->AddFigure("loss_over_second_most", most,
                    Target{.value = kMostLoss, .at_least = false});
  report->AddFigure("loss_over_second_least", least);
  report->AddFigure(
      "allocated_bytes_more",
      static_cast<double>(last.allocated_bytes - warm.allocated_bytes),
      Target{.value = 0, .at_least = false});
  report->AddFigure("rss_over_warm_up",
                    static_cast<double>(rss.back()) /
                        static_cast<double>(rss[kWarmUpPasses - 1]),
                    Target{.value = kMostMemory, .at_least = false});
  figure("kv_held_bytes_warm", warm.held_bytes);
  figure("kv_held_bytes_end", last.held_bytes);
  figure("kv_held_bytes_most", result.kv_held_bytes);
  figure("allocated_bytes_warm", warm.allocated_bytes);
  figure("allocated_bytes_end", last.allocated_bytes);
  figure("rss_bytes_warm", rss[kWarmUpPasses - 1]);
  figure("rss_bytes_end", rss.back());
}

absl::StatusOr<BenchReport> RunStream(StreamFlags flags) {
  UseQuick<int64_t>(flags.bench, "--tokens", 3000, &flags.tokens);
  KVASIR_ASSIGN_OR_RETURN(TextTokens text,
                          ReadTextTokens(flags.model.model, flags.text));
  if (text.ids.size() < 2) {
    return absl::InvalidArgumentError(absl::StrCat("--text ", flags.text, ": ",
                                                   text.ids.size(),
                                                   " tokens, want 2 at least"));
  }
  // So much of it that three passes are no more than what was asked for.
  const int64_t once =
      std::min(static_cast<int64_t>(text.ids.size()),
               std::max<int64_t>(2, flags.tokens / (kWarmUpPasses + 1)));
  text.ids.resize(static_cast<size_t>(once));
  text.bytes.resize(static_cast<size_t>(once));
  const int64_t passes =
      std::max(kWarmUpPasses + 1, (flags.tokens + once - 1) / once);
  text.Repeat(passes);
  const int64_t window = passes * once + (text.bos.has_value() ? 1 : 0);
  const int64_t chunk = std::min(flags.chunk, window);
  KVASIR_ASSIGN_OR_RETURN(const auto model,
                          LoadedModel::Load({.model = flags.model,
                                             .max_model_len = window,
                                             .max_num_seqs = 1,
                                             .max_batched_tokens = chunk,
                                             .prefix_reuse = false}));
  Progress progress("stream", passes * once, "tokens", true);
  std::vector<int64_t> rss(static_cast<size_t>(passes));
  size_t from = 0;
  const auto update = [&](int64_t done, int64_t total) {
    progress.Update(done);
    // Of the last step in each pass; a step may end several.
    const auto pass = static_cast<size_t>((done - 1) * passes / total);
    const int64_t bytes = base::ReadResidentMemory().bytes;
    for (; from < pass; ++from) {
      if (rss[from] == 0) rss[from] = bytes;
    }
    rss[pass] = bytes;
  };
  absl::StatusOr<worker::PerplexityResult> result;
  const double seconds = bench::SecondsOf([&] {
    result =
        worker::Perplexity(&model->rank().executor(),
                           {.token_ids = text.ids, .token_bytes = text.bytes},
                           {.window_tokens = window,
                            .chunk_tokens = chunk,
                            .bos_token_id = text.bos,
                            .parts = passes,
                            .progress = update});
  });
  KVASIR_RETURN_IF_ERROR(result.status());
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&model->rank().pool(), true));
  ceilings.Measure();
  BenchReport report(ceilings.ToJson());
  report.AddFigure("tokens", static_cast<double>(result->tokens));
  report.AddFigure("passes", static_cast<double>(passes));
  report.AddFigure("tokens_per_second",
                   static_cast<double>(result->tokens) / seconds);
  AddPasses(*result, rss, &report);
  report.AddNote(absl::StrCat(
      model->source().name, ", ", model->source().plan->source.method(), ", ",
      once,
      " tokens of text again and again; warm is the end of the second pass"));
  return report;
}

}  // namespace

void AddBenchStream(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<StreamFlags>();
  CLI::App* command = group->add_subcommand(
      "stream",
      "a text again and again as one sequence that evicts: its memory and its "
      "loss at the end against the beginning's");
  command->footer(
      "The path of `kvasir perplexity --stream`. After each pass over the "
      "text\n"
      "a row has its loss, the bytes of the pages held, what the allocator "
      "has\n"
      "given out and what the process holds. warm: after the second pass,\n"
      "which is the first that begins with a full cache. What the plan does\n"
      "not evict must be a number of slots, and positions must roll:\n"
      "--eviction h2o --eviction-budget 256 --eviction-rolling.");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--text", flags->text, "the text")
      ->type_name("FILE")
      ->required();
  AddFlag(command, "--tokens", flags->tokens,
          "as many passes as this many tokens take, three at least: of the "
          "text's beginning where it is longer than a third of them")
      ->check(CLI::Range(6, 1 << 26));
  AddFlag(command, "--chunk", flags->chunk, "tokens of a step")
      ->check(CLI::Range(1, 1 << 20));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags]() -> absl::StatusOr<BenchReport> {
        if (flags->model.random_weights) {
          return absl::InvalidArgumentError(
              "--random-weights: a text needs a tokenizer: give --model DIR");
        }
        KVASIR_RETURN_IF_ERROR(CheckModelOptions(flags->model));
        return RunStream(*flags);
      },
      exit_code);
}

}  // namespace kvasir::cli
