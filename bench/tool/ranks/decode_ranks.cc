// `kvasir bench decode --tp`: decode steps of a tensor-parallel group, compared
// with steps of one rank on the same cores.
#include <algorithm>
#include <csignal>
#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/tool/decode.h"
#include "bench/tool/ranks/rank_figures.h"
#include "bench/tool/ranks/thread_group.h"
#include "model/shapes/tp_dealt.h"
#include "plan/tp_size.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;

absl::Status CheckFlags(const DecodeFlags& flags) {
  if (flags.compares() || flags.paced) {
    return absl::InvalidArgumentError(
        "--tp, which compares several ranks with one rank of the same model, "
        "cannot be used with --plan, --baseline, --bias-cost or --paced");
  }
  // Checks the number of ranks before anything is loaded.
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source,
                          OpenModelSource(flags.model, PlanUse::kRun));
  return plan::CheckTpSize(model::TpDealtOf(source.spec), flags.tp);
}

// The result of some steps of the group. Their time is counted from the moment
// when all ranks are ready until the last rank has finished.
struct GroupSample {
  double seconds = 0;
  std::vector<DecodeSample> ranks;
};

// Owns: the group, and an engine for each rank.
class RankEngines {
 public:
  static absl::StatusOr<std::unique_ptr<RankEngines>> Create(
      const DecodeFlags& flags, const BenchEngineOptions& options) {
    auto engines = std::unique_ptr<RankEngines>(new RankEngines(flags.tp));
    KVASIR_RETURN_IF_ERROR(
        engines->group_.OnRanks([&](int64_t rank) -> absl::Status {
          BenchEngineOptions own = options;
          own.group = &engines->group_.member(rank);
          own.quiet = rank > 0;
          auto& engine = engines->engines_[static_cast<size_t>(rank)];
          KVASIR_ASSIGN_OR_RETURN(engine, BenchEngine::Create(own));
          return FillEngine(flags, engine.get());
        }));
    return engines;
  }

  int64_t size() const { return group_.size(); }
  BenchEngine& engine(int64_t rank) {
    return *engines_[static_cast<size_t>(rank)];
  }

  // Runs steps on all ranks and adds their counts to `tallies`, which has one
  // entry for each rank. Returns the errors of CheckSameResults.
  absl::StatusOr<GroupSample> Decode(int64_t batch, int64_t steps,
                                     std::vector<RankTally>* tallies) {
    std::vector<worker::CollectiveTotals> before;
    for (int64_t rank = 0; rank < size(); ++rank) {
      before.push_back(group_.totals(rank));
    }
    GroupSample sample;
    sample.ranks.resize(engines_.size());
    std::latch all_there(static_cast<std::ptrdiff_t>(size()));
    KVASIR_RETURN_IF_ERROR(group_.OnRanks([&](int64_t rank) -> absl::Status {
      const auto r = static_cast<size_t>(rank);
      all_there.arrive_and_wait();
      KVASIR_ASSIGN_OR_RETURN(sample.ranks[r],
                              DecodeSteps(engines_[r].get(), batch, steps));
      return absl::OkStatus();
    }));
    std::vector<uint64_t> hashes;
    for (int64_t rank = 0; rank < size(); ++rank) {
      const auto r = static_cast<size_t>(rank);
      const double seconds = sample.ranks[r].seconds;
      sample.seconds = std::max(sample.seconds, seconds);
      (*tallies)[r].Add(before[r], group_.totals(rank), steps, seconds);
      hashes.push_back(engines_[r]->results_hash());
    }
    KVASIR_RETURN_IF_ERROR(CheckSameResults(hashes));
    return sample;
  }

 private:
  explicit RankEngines(int64_t size)
      : group_(size), engines_(static_cast<size_t>(size)) {}

  ThreadGroup group_;  // must outlive the engines
  std::vector<std::unique_ptr<BenchEngine>> engines_;
};

// The times of one batch size, by pair and by rank.
struct RankTimes {
  int64_t batch = 0;
  std::vector<double> whole_seconds;  // one rank that runs the whole model
  std::vector<double> ranks_seconds;  // the group of ranks
  worker::CpuStepProfile::Seconds whole_parts = {};
  std::vector<worker::CpuStepProfile::Seconds> parts;
  std::vector<RankTally> tallies;
};

absl::Status MeasurePair(const DecodeFlags& flags, bool ranks_first,
                         BenchEngine* whole, RankEngines* ranks,
                         RankTimes* times) {
  for (const bool group : {ranks_first, !ranks_first}) {
    if (!group) {
      KVASIR_ASSIGN_OR_RETURN(const DecodeSample sample,
                              DecodeSteps(whole, times->batch, flags.steps));
      times->whole_seconds.push_back(sample.seconds);
      AddParts(sample, &times->whole_parts);
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(
        const GroupSample sample,
        ranks->Decode(times->batch, flags.steps, &times->tallies));
    times->ranks_seconds.push_back(sample.seconds);
    for (size_t rank = 0; rank < sample.ranks.size(); ++rank) {
      AddParts(sample.ranks[rank], &times->parts[rank]);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankTimes>> Measure(const DecodeFlags& flags,
                                               BenchEngine* whole,
                                               RankEngines* ranks,
                                               MachineCeilings* ceilings) {
  std::vector<RankTimes> all;
  for (const int64_t batch : {int64_t{1}, flags.batch}) {
    RankTimes times;
    times.batch = batch;
    times.parts.resize(static_cast<size_t>(ranks->size()));
    times.tallies.resize(static_cast<size_t>(ranks->size()));
    all.push_back(std::move(times));
  }
  Progress progress("decode", BenchPairs(flags.bench), "pairs", true);
  // The first pair warms up.
  for (int pair = -1; pair < BenchPairs(flags.bench); ++pair) {
    ceilings->MeasureBytesPerSecond();
    for (RankTimes& times : all) {
      RankTimes unused = times;
      KVASIR_RETURN_IF_ERROR(MeasurePair(flags, /*ranks_first=*/pair % 2 != 0,
                                         whole, ranks,
                                         pair < 0 ? &unused : &times));
    }
    progress.Update(pair + 1);
  }
  return all;
}

nlohmann::ordered_json MemoryOf(BenchEngine& engine) {
  return {{"threads", engine.model().num_threads()},
          {"weight_bytes", engine.model().weight_bytes()},
          {"cache_bytes", engine.model().kv_pool_bytes()}};
}

void AddRows(const DecodeFlags& flags, const RankTimes& times,
             BenchEngine* whole, RankEngines* ranks, BenchReport* report) {
  const auto step_ms = [&](const std::vector<double>& seconds) {
    return Quantile(seconds, 0.5) / static_cast<double>(flags.steps) * 1e3;
  };
  nlohmann::ordered_json row{{"tp", 1},
                             {"batch", times.batch},
                             {"rank", 0},
                             {"step_ms", step_ms(times.whole_seconds)}};
  row.update(MemoryOf(*whole));
  if (flags.breakdown) row["breakdown"] = BreakdownOf(times.whole_parts);
  report->AddRow(std::move(row));
  for (int64_t rank = 0; rank < ranks->size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    row = {{"tp", ranks->size()},
           {"batch", times.batch},
           {"rank", rank},
           {"step_ms", step_ms(times.ranks_seconds)}};
    row.update(MemoryOf(ranks->engine(rank)));
    row.update(times.tallies[r].ToJson());
    if (flags.breakdown) row["breakdown"] = BreakdownOf(times.parts[r]);
    report->AddRow(std::move(row));
  }
}

// Adds the weights and the cache of the largest rank, as shares of those of a
// rank that holds the whole model.
void AddShares(BenchEngine* whole, RankEngines* ranks, BenchReport* report) {
  int64_t weights = 0;
  int64_t cache = 0;
  for (int64_t rank = 0; rank < ranks->size(); ++rank) {
    const LoadedModel& model = ranks->engine(rank).model();
    weights = std::max(weights, model.weight_bytes());
    cache = std::max(cache, model.kv_pool_bytes());
  }
  const auto share = [](int64_t part, int64_t all) {
    return static_cast<double>(part) / static_cast<double>(all);
  };
  report->AddFigure("rank_weight_share",
                    share(weights, whole->model().weight_bytes()), std::nullopt,
                    "bytes of the largest rank, divided by those of TP=1");
  report->AddFigure("rank_cache_share",
                    share(cache, whole->model().kv_pool_bytes()), std::nullopt,
                    "bytes of the largest rank, divided by those of TP=1");
}

}  // namespace

absl::StatusOr<BenchReport> RunDecodeRanks(DecodeFlags flags) {
  KVASIR_RETURN_IF_ERROR(CheckFlags(flags));
  // Ignores SIGPIPE, because Gloo may write to sockets that another rank has
  // closed.
  std::signal(SIGPIPE, SIG_IGN);
  if (flags.fill == "auto") flags.fill = "random";
  // The most tokens that the run adds to a sequence. A sequence may be in both
  // batches of every pair, and there is one more pair to warm up.
  const int64_t decoded = 2 * flags.steps * (BenchPairs(flags.bench) + 1);
  BenchEngineOptions options = {.model = flags.model,
                                .max_model_len = flags.context + decoded,
                                .max_num_seqs = flags.batch};
  KVASIR_ASSIGN_OR_RETURN(const auto whole, BenchEngine::Create(options));
  KVASIR_RETURN_IF_ERROR(FillEngine(flags, whole.get()));
  const int threads = whole->model().num_threads();
  options.model.threads = ThreadsOfRank(threads, flags.tp);
  KVASIR_ASSIGN_OR_RETURN(const auto ranks,
                          RankEngines::Create(flags, options));

  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(whole->pool(), flags.bench.quick));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<RankTimes> all,
                          Measure(flags, whole.get(), ranks.get(), &ceilings));
  BenchReport report(ceilings.ToJson());
  for (const RankTimes& times : all) {
    report.AddRatio(
        absl::StrCat("tp", flags.tp, "_batch", times.batch, "_speedup"),
        RatioOf(times.whole_seconds, times.ranks_seconds), std::nullopt,
        absl::StrCat("time of a step of TP=1, divided by that of TP=",
                     flags.tp));
    AddRows(flags, times, whole.get(), ranks.get(), &report);
  }
  AddShares(whole.get(), ranks.get(), &report);
  report.AddFigure("context_tokens", static_cast<double>(flags.context));
  if (const std::string note = ThreadsNote(threads, flags.tp); !note.empty()) {
    report.AddNote(note);
  }
  report.AddNote(
      "ranks are threads of one process and use Gloo's sockets "
      "on loopback; Gloo's own threads share the same cores");
  return report;
}

}  // namespace kvasir::cli
