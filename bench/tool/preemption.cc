// `kvasir bench preemption`: a sequence that lost its pages, copied to the host
// pool and back or computed again, and which of the two the scheduler takes.
#include "worker/engine/preemption.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/paired.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"
#include "server/loaded_model.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;
using bench::SecondsOf;
using worker::ChoosePreemption;
using worker::Preemption;

struct PreemptionFlags {
  BenchFlags bench;
  ModelOptions model;
  std::vector<int64_t> lengths = {64, 256, 1024};
  int64_t max_batched_tokens = 512;
  int64_t host_pool_bytes = int64_t{1} << 30;
};

constexpr uint64_t kSequence = 1;

// One sequence at a time, on an executor without a scheduler.
class PreemptionBench {
 public:
  static absl::StatusOr<std::unique_ptr<PreemptionBench>> Create(
      const PreemptionFlags& flags) {
    auto bench = std::unique_ptr<PreemptionBench>(new PreemptionBench());
    bench->max_batched_tokens_ = flags.max_batched_tokens;
    const int64_t longest =
        *std::max_element(flags.lengths.begin(), flags.lengths.end());
    KVASIR_ASSIGN_OR_RETURN(
        bench->model_,
        LoadedModel::Load({.model = flags.model,
                           .max_model_len = longest,
                           .max_batched_tokens = flags.max_batched_tokens,
                           .host_pool_bytes = flags.host_pool_bytes,
                           .prefix_reuse = false,
                           .stretch_positions = true}));
    const int64_t need = bench->ImageBytes(longest);
    if (need > bench->model_->host_pool_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--host-pool-bytes ", flags.host_pool_bytes, ": a sequence of ",
          longest, " tokens has ", need, " bytes of pages, of which ",
          bench->model_->host_pool_bytes(), " fit"));
    }
    return bench;
  }

  // Seconds of `tokens` at the end of a sequence of `length`.
  absl::StatusOr<double> Prefill(int64_t length, int64_t tokens) {
    worker::DirectRunner runner(&executor(), &model_->layout(), model_->pages(),
                                executor().last_step_id());
    runner.SetPrompt(kSequence, length);
    if (tokens < length) runner.StartAt(kSequence, length - tokens);
    const std::vector<int32_t> ids(static_cast<size_t>(max_batched_tokens_), 7);
    absl::Status status;
    const double seconds = SecondsOf([&] {
      for (int64_t left = tokens; left > 0 && status.ok();) {
        const int64_t until = runner.next_eviction(kSequence).value_or(length);
        const int64_t count =
            std::min({left, max_batched_tokens_, until - (length - left)});
        worker::DirectStep step;
        step.sequence_id = kSequence;
        step.token_ids =
            absl::MakeConstSpan(ids).first(static_cast<size_t>(count));
        left -= count;
        if (left == 0) step.sample = worker::GreedySample();
        status = runner.Run({step}).status();
      }
    });
    KVASIR_RETURN_IF_ERROR(status);
    kvasir::v1::StepPlan plan = NewPlan();
    plan.add_released_sequences(kSequence);
    KVASIR_RETURN_IF_ERROR(executor().Execute(plan).status());
    return seconds;
  }

  // Seconds of the pages of `length` tokens to the host pool and back.
  absl::StatusOr<double> Copy(int64_t length) {
    absl::Status status;
    const double seconds = SecondsOf([&] {
      for (const bool out : {true, false}) {
        kvasir::v1::StepPlan plan = NewPlan();
        for (const cache::PageGroupLayout& group :
             model_->layout().page_groups()) {
          for (int32_t page = 0; page < PagesOf(group, length); ++page) {
            kvasir::v1::PageCopy* const copy = plan.add_page_copies();
            copy->set_page_group(static_cast<uint32_t>(group.id.value()));
            copy->set_from_page(page);
            copy->set_to_page(page);
            out ? copy->set_to_host(true) : copy->set_from_host(true);
          }
        }
        if (status.ok()) status = executor().Execute(plan).status();
      }
    });
    KVASIR_RETURN_IF_ERROR(status);
    return seconds;
  }

  int64_t ImageBytes(int64_t length) const {
    int64_t bytes = 0;
    for (const cache::PageGroupLayout& group : model_->layout().page_groups()) {
      bytes += PagesOf(group, length) * group.page_bytes;
    }
    return bytes;
  }

  worker::ModelExecutor& executor() { return model_->rank().executor(); }
  base::ThreadPool* pool() { return &model_->rank().pool(); }

 private:
  PreemptionBench() = default;

  int64_t PagesOf(const cache::PageGroupLayout& group, int64_t length) const {
    return model_->layout().PagesHeld(group.id, length, 1);
  }
  kvasir::v1::StepPlan NewPlan() {
    kvasir::v1::StepPlan plan;
    plan.set_step_id(executor().last_step_id() + 1);
    return plan;
  }

  std::unique_ptr<LoadedModel> model_;
  int64_t max_batched_tokens_ = 0;
};

struct Measured {
  std::vector<double> copy;
  std::vector<double> prefill;
};

// `tokens` of `length` are to be computed again: others hold the rest.
absl::StatusOr<Measured> Measure(const BenchFlags& flags, int64_t length,
                                 int64_t tokens, PreemptionBench* bench) {
  Measured measured;
  for (int pair = 0; pair < BenchPairs(flags); ++pair) {
    // Who goes first alternates.
    for (int turn = 0; turn < 2; ++turn) {
      if ((pair + turn) % 2 == 0) {
        KVASIR_ASSIGN_OR_RETURN(const double seconds, bench->Copy(length));
        measured.copy.push_back(seconds);
      } else {
        KVASIR_ASSIGN_OR_RETURN(const double seconds,
                                bench->Prefill(length, tokens));
        measured.prefill.push_back(seconds);
      }
    }
  }
  return measured;
}

absl::StatusOr<BenchReport> RunPreemption(PreemptionFlags flags) {
  DefaultBenchModel(flags.bench, &flags.model);
  UseQuick(flags.bench, "--host-pool-bytes", int64_t{64} << 20,
           &flags.host_pool_bytes);
  if (flags.bench.quick && !WasAsked(flags.bench, "--lengths")) {
    flags.lengths = {32, 96};
  }
  KVASIR_ASSIGN_OR_RETURN(const auto bench, PreemptionBench::Create(flags));
  KVASIR_ASSIGN_OR_RETURN(const double copy_rate,
                          bench->executor().MeasureCopyBytesPerSecond());
  KVASIR_RETURN_IF_ERROR(bench->Prefill(flags.lengths[0], 1).status());
  KVASIR_RETURN_IF_ERROR(bench->Copy(flags.lengths[0]).status());

  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(bench->pool(), flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  worker::PrefillRate rate;
  double crossing = 0;
  int64_t right = 0;
  int64_t choices = 0;
  std::optional<bench::PairedRatio> whole;
  Progress progress("preemption", static_cast<int64_t>(flags.lengths.size()),
                    "lengths", true);
  for (size_t i = 0; i < flags.lengths.size(); ++i) {
    const int64_t length = flags.lengths[i];
    const int64_t bytes = bench->ImageBytes(length);
    const auto add_row = [&](int64_t tokens) -> absl::Status {
      KVASIR_ASSIGN_OR_RETURN(
          const Measured measured,
          Measure(flags.bench, length, tokens, bench.get()));
      const bench::PairedRatio ratio = RatioOf(measured.prefill, measured.copy);
      const double copy = Quantile(measured.copy, 0.5);
      const double prefill = Quantile(measured.prefill, 0.5);
      if (tokens == length) {
        for (const double seconds : measured.prefill) {
          rate.Add(tokens, absl::Seconds(seconds));
        }
        crossing = copy * rate.tokens_per_second();
        whole = ratio;
      }
      const bool copies =
          ChoosePreemption({.image_bytes = bytes,
                            .recompute_tokens = tokens,
                            .copy_bytes_per_second = copy_rate,
                            .prefill_tokens_per_second =
                                rate.tokens_per_second()}) == Preemption::kCopy;
      const bool is_right = copies == (copy < prefill);
      right += is_right ? 1 : 0;
      ++choices;
      report.AddRow({{"tokens", length},
                     {"to_compute", tokens},
                     {"image_bytes", bytes},
                     {"copy_ms", 1e3 * copy},
                     {"prefill_ms", 1e3 * prefill},
                     {"prefill_over_copy", ratio.median},
                     {"spread", ratio.spread},
                     {"undecided", ratio.undecided()},
                     {"chosen", copies ? "copy" : "recompute"},
                     {"right", is_right}});
      return absl::OkStatus();
    };
    KVASIR_RETURN_IF_ERROR(add_row(length));
    // Both sides of the crossing, as far as there are tokens.
    const auto at = static_cast<int64_t>(crossing);
    if (4 * at < length && at >= 1) KVASIR_RETURN_IF_ERROR(add_row(4 * at));
    if (at >= 4 && at / 4 < length) KVASIR_RETURN_IF_ERROR(add_row(at / 4));
    progress.Update(static_cast<int64_t>(i) + 1);
  }
  progress.Finish();

  report.AddRatio("prefill_over_copy", *whole, std::nullopt,
                  "of the last length: the sequence computed again, over "
                  "copied out and in");
  report.AddFigure("crossing_tokens", crossing, std::nullopt,
                   "of the last length: fewer to be computed again are "
                   "computed sooner than copied");
  report.AddFigure("right_choices",
                   static_cast<double>(right) / static_cast<double>(choices),
                   Target{1.0, true}, "of the rows");
  report.AddFigure("copy_bytes_per_second", copy_rate);
  report.AddFigure("prefill_tokens_per_second", rate.tokens_per_second());
  return report;
}

}  // namespace

void AddBenchPreemption(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<PreemptionFlags>();
  CLI::App* command = group->add_subcommand(
      "preemption",
      "a sequence's pages copied to the host pool and back, against computing "
      "it again");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--lengths", flags->lengths, "of sequences, in tokens")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--max-batched-tokens", flags->max_batched_tokens,
          "tokens in one step")
      ->check(CLI::Range(1, 1 << 16));
  AddBytes(command, "--host-pool-bytes", flags->host_pool_bytes,
           "of host memory for the longest");
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunPreemption(*flags); }, exit_code);
}

}  // namespace kvasir::cli
