// `kvasir bench router`: simulates the router's policies.
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/router/simulation.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"

namespace kvasir::cli {
namespace {

struct RouterBenchFlags {
  BenchFlags bench;
  std::vector<std::string> traces{std::begin(bench::kTraceNames),
                                  std::end(bench::kTraceNames)};
  std::string file;
  double load = 0.7;
  bench::TraceOptions trace;
  bench::SimulationOptions simulation;
  int64_t prefix_bytes = 16 << 20;
};

struct Policy {
  const char* name;
  router::PolicyKind kind;
  bool two_choices = false;
};
constexpr Policy kPolicies[] = {
    {"prefix_affinity", router::PolicyKind::kPrefixAffinity},
    {"least_loaded", router::PolicyKind::kLeastLoaded},
    {"two_choices", router::PolicyKind::kLeastLoaded, true},
    {"round_robin", router::PolicyKind::kRoundRobin}};

void AddRows(const bench::Trace& trace, const RouterBenchFlags& flags,
             BenchReport* report) {
  const double best = bench::BestHitRate(trace);
  std::optional<bench::SimulationResult> affinity;
  for (const Policy& policy : kPolicies) {
    bench::SimulationOptions options = flags.simulation;
    options.picker.policy = policy.kind;
    options.picker.prefix_bytes = static_cast<size_t>(flags.prefix_bytes);
    options.two_choices = policy.two_choices;
    const bench::SimulationResult result = bench::Simulate(trace, options);
    const double of_best = best > 0.0 ? result.hit_rate / best : 1.0;
    report->AddRow({{"trace", trace.name},
                    {"policy", policy.name},
                    {"hit_rate", result.hit_rate},
                    {"of_best", of_best},
                    {"imbalance", result.imbalance},
                    {"work_imbalance", result.work_imbalance},
                    {"busiest", result.busiest},
                    {"queue_ms",
                     {{"p50", 1000 * result.queue_s_p50},
                      {"p99", 1000 * result.queue_s_p99}}},
                    {"first_token_ms",
                     {{"p50", 1000 * result.first_token_s_p50},
                      {"p99", 1000 * result.first_token_s_p99}}},
                    {"choice_us", 1e6 / result.choices_per_s}});
    if (!affinity.has_value()) {
      affinity = result;
      continue;
    }
    if (policy.two_choices || policy.kind != router::PolicyKind::kLeastLoaded) {
      continue;
    }
    // The second row: compare it with the first.
    report->AddFigure(trace.name + "_best_hit_rate", best);
    if (trace.name != "chat") continue;
    report->AddFigure("chat_hit_rate_of_best", affinity->hit_rate / best,
                      Target{0.9, true});
    report->AddFigure("chat_imbalance", affinity->imbalance,
                      Target{1.25, false});
    report->AddFigure("chat_wait_p99_ms", 1000 * affinity->queue_s_p99,
                      Target{1000 * result.queue_s_p99, false},
                      "the target is the wait with least_loaded");
  }
}

absl::StatusOr<BenchReport> RunRouter(RouterBenchFlags flags) {
  UseQuick(flags.bench, "--requests", uint64_t{2000}, &flags.trace.requests);
  flags.trace.token_s = flags.simulation.token_s;
  flags.trace.prompt_tokens_per_s = flags.load * flags.simulation.replicas *
                                    flags.simulation.prompt_tokens_per_s;
  flags.simulation.seed = flags.trace.seed;
  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  report.AddFigure("replicas", flags.simulation.replicas);
  report.AddFigure("routers", flags.simulation.routers);
  if (!flags.file.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        bench::Trace trace,
        bench::ReadTrace(flags.file, flags.trace.page_tokens));
    trace.name = "file";
    AddRows(trace, flags, &report);
    return report;
  }
  for (const std::string& name : flags.traces) {
    KVASIR_ASSIGN_OR_RETURN(const bench::Trace trace,
                            bench::MakeTrace(name, flags.trace));
    AddRows(trace, flags, &report);
  }
  report.AddNote(absl::StrCat(
      "hit_rate: the share of prompt tokens found in a replica's cache; "
      "of_best: relative to one cache of unlimited size for all"));
  return report;
}

}  // namespace

void AddBenchRouter(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<RouterBenchFlags>();
  CLI::App* command = group->add_subcommand(
      "router",
      "simulate replicas under each policy of the router: cache hits, balance "
      "and waiting");
  AddFlag(command, "--trace", flags->traces,
          "the synthetic traces. chat: conversations with common system "
          "prompts; few_shot: short questions after long common prompts; "
          "independent: prompts that share nothing; hot: one tenant sends half "
          "of the requests, all with one long prompt")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(
          std::begin(bench::kTraceNames), std::end(bench::kTraceNames))));
  AddFlag(command, "--file", flags->file,
          "a recorded trace instead: on each line a JSON object {timestamp: "
          "milliseconds, input_length: tokens, hash_ids: [a number for each "
          "page of --page-tokens], output_length: tokens}, in order of time; "
          "equal numbers mean equal pages with equal pages before them. "
          "token_ids may replace input_length and hash_ids; session_id is "
          "optional");
  AddFlag(command, "--requests", flags->trace.requests,
          "the number of requests of a synthetic trace")
      ->check(CLI::Range(uint64_t{100}, uint64_t{100000000}));
  AddFlag(command, "--load", flags->load,
          "how many prompt tokens arrive, relative to what all replicas can "
          "run without any cache hits")
      ->check(Between(0.001, 100.0));
  AddFlag(command, "--replicas", flags->simulation.replicas,
          "the number of replicas")
      ->check(CLI::Range(1, 16384));
  AddFlag(command, "--routers", flags->simulation.routers,
          "the number of routers, which share no state")
      ->check(CLI::Range(1, 256));
  AddFlag(command, "--page-tokens", flags->trace.page_tokens,
          "slots in a cache page")
      ->check(CLI::Range(1, 1024));
  AddFlag(command, "--cache-pages", flags->simulation.cache_pages,
          "pages of a replica's cache")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
  AddFlag(command, "--max-num-seqs", flags->simulation.max_num_seqs,
          "the most requests that a replica runs at a time")
      ->check(CLI::Range(1, 65536));
  AddFlag(command, "--prompt-rate", flags->simulation.prompt_tokens_per_s,
          "prompt tokens that a replica runs in a second")
      ->check(Above(0.0));
  AddFlag(command, "--token-s", flags->simulation.token_s,
          "seconds for a token of output")
      ->check(AtLeast(0.0));
  AddFlag(command, "--think-s", flags->trace.think_s,
          "the mean time between an answer and the next turn, in seconds")
      ->check(AtLeast(0.0));
  AddSwitch(command, "--sessions", flags->simulation.sessions,
            "name each conversation to the router");
  AddFlag(command, "--load-factor", flags->simulation.picker.load_factor,
          "as in `kvasir router`")
      ->check(Between(1.0, 100.0));
  AddBytes(command, "--prefix-bytes", flags->prefix_bytes,
           "as in `kvasir router`", {.least = int64_t{1} << 20});
  AddFlag(command, "--seed", flags->trace.seed,
          "the seed of the random numbers");
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunRouter(*flags); }, exit_code);
}

}  // namespace kvasir::cli
