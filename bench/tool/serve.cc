// `kvasir bench serve`: measures a server under load over gRPC, and the time
// that the router adds to a request.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/dial.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/tool/bench.h"
#include "bench/tool/forked_server.h"
#include "bench/tool/load_generator.h"
#include "bench/tool/report.h"
#include "bench/tool/token_client.h"
#include "router/client/text_client.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;

constexpr char kPromptTokens[] = "uniform:32:512";
constexpr char kOutputTokens[] = "uniform:8:64";

struct ServeBenchFlags {
  BenchFlags bench;
  ModelOptions model;
  std::string endpoint;
  DialTlsFlags tls;  // TLS settings of calls to the router and the worker
  std::string worker_endpoint;
  std::string model_name;
  std::string mode = "both";
  int requests = 64;
  int concurrency = 4;
  double rate = 0.0;
  int max_outstanding = 256;
  std::string prompt_tokens = kPromptTokens;
  std::string output_tokens = kOutputTokens;
  int64_t latency_prompt_tokens = 1000;
  uint64_t seed = 1;
  // The following values are used if the server does not report its own.
  int64_t max_model_len = 1024;
  int32_t vocab_size = 256;
};

// The server under load: one that already runs, or one that this program
// starts.
struct TestedServer {
  // The programs that this benchmark started, the worker first. Both are null
  // if it uses a server that was already running.
  std::unique_ptr<ForkedServer> own_worker;
  std::unique_ptr<ForkedServer> own_router;
  std::string router_endpoint;
  std::string worker_endpoint;  // empty: unknown
  std::shared_ptr<grpc::ChannelCredentials> router_credentials;
  std::shared_ptr<grpc::ChannelCredentials> worker_credentials;
  std::string model;
  int64_t max_model_len = 0;
  int32_t vocab_size = 0;
};

// Starts a worker with the model that the flags name, and a router.
absl::Status StartOwn(const ServeBenchFlags& flags, TestedServer* server) {
  const std::vector<std::string> ports = {"--admin-port=0", "--health-port=0",
                                          "--metrics-port=0"};
  std::vector<std::string> worker = {"worker", "--listen=127.0.0.1:0"};
  worker.insert(worker.end(), ports.begin(), ports.end());
  for (std::string& argument :
       ModelArguments(*flags.bench.command, flags.model)) {
    worker.push_back(std::move(argument));
  }
  KVASIR_ASSIGN_OR_RETURN(server->own_worker, ForkedServer::StartKvasir(
                                                  "worker", std::move(worker)));
  server->worker_endpoint = server->own_worker->target();
  std::vector<std::string> router = {
      "router", "--grpc-port=0",
      absl::StrCat("--workers=", server->worker_endpoint)};
  router.insert(router.end(), ports.begin(), ports.end());
  KVASIR_ASSIGN_OR_RETURN(server->own_router, ForkedServer::StartKvasir(
                                                  "router", std::move(router)));
  server->router_endpoint = server->own_router->target();
  return absl::OkStatus();
}

absl::StatusOr<TestedServer> OpenServer(const ServeBenchFlags& flags) {
  TestedServer server;
  server.router_endpoint = flags.endpoint;
  server.worker_endpoint = flags.worker_endpoint;
  server.max_model_len = flags.max_model_len;
  server.vocab_size = flags.vocab_size;
  if (flags.endpoint.empty()) {
    KVASIR_RETURN_IF_ERROR(StartOwn(flags, &server));
  }
  const DialTlsFlags tls = server.own_router ? DialTlsFlags{} : flags.tls;
  KVASIR_ASSIGN_OR_RETURN(server.router_credentials,
                          DialCredentials(tls, server.router_endpoint));
  if (!server.worker_endpoint.empty()) {
    // Does not send the token to the worker, because workers authenticate only
    // routers, not clients.
    DialTlsFlags to_worker = tls;
    to_worker.token_file.clear();
    KVASIR_ASSIGN_OR_RETURN(server.worker_credentials,
                            DialCredentials(to_worker, server.worker_endpoint));
  }
  constexpr absl::Duration kTimeout = absl::Seconds(10);
  TextClient client(server.router_endpoint, server.router_credentials);
  server.model = flags.model_name;
  if (server.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            client.ReadyModels(kTimeout));
    if (names.empty()) {
      return absl::UnavailableError(absl::StrCat(
          "no model is ready on the server ", server.router_endpoint));
    }
    server.model = names.front();
  }
  if (!server.worker_endpoint.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::WorkerInfo info,
                            GetWorkerInfo(server.worker_endpoint,
                                          server.worker_credentials, kTimeout));
    server.max_model_len = info.max_model_len();
    server.vocab_size = static_cast<int32_t>(info.vocab_size());
  } else if (!WasAsked(flags.bench, "--max-model-len")) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> reported,
                            client.MaxModelLen(server.model, kTimeout));
    server.max_model_len = reported.value_or(server.max_model_len);
  }
  return server;
}

nlohmann::ordered_json ToJson(const Percentiles& values) {
  return {{"p50", values.p50},
          {"p90", values.p90},
          {"p95", values.p95},
          {"p99", values.p99}};
}

nlohmann::ordered_json LoadRow(const LoadOptions& options,
                               const LoadResult& result) {
  const bool open = options.rate > 0;
  nlohmann::ordered_json row{{"mode", open ? "open" : "closed"}};
  if (open) {
    row["rate_per_second"] = options.rate;
  } else {
    row["concurrency"] = options.concurrency;
  }
  row["requests"] = result.succeeded;
  row["failed"] = result.failed;
  if (!result.first_error.ok()) {
    row["first_error"] = result.first_error.ToString();
  }
  row["seconds"] = result.seconds;
  row["requests_per_second"] =
      static_cast<double>(result.succeeded) / result.seconds;
  row["prompt_tokens"] = result.prompt_tokens;
  row["output_tokens"] = result.output_tokens;
  row["output_tokens_per_second"] =
      static_cast<double>(result.output_tokens) / result.seconds;
  row["ttft_ms"] = ToJson(result.first_token_ms);
  row["itl_ms"] = ToJson(result.inter_token_ms);
  row["e2e_ms"] = ToJson(result.end_to_end_ms);
  return row;
}

struct LoadRows {
  std::vector<nlohmann::ordered_json> rows;
  std::optional<LoadResult> closed;
  std::optional<LoadResult> open;
};

absl::StatusOr<LoadRows> MeasureLoad(const ServeBenchFlags& flags,
                                     const TestedServer& server,
                                     TokenClient* client) {
  LoadOptions options;
  options.model = server.model;
  options.num_requests = flags.requests;
  options.max_model_len = server.max_model_len;
  options.vocab_size = server.vocab_size;
  options.seed = flags.seed;
  KVASIR_ASSIGN_OR_RETURN(options.prompt_tokens,
                          LengthDistribution::Parse(flags.prompt_tokens));
  KVASIR_ASSIGN_OR_RETURN(options.output_tokens,
                          LengthDistribution::Parse(flags.output_tokens));
  // Shortens the default lengths to fit the model.
  if (!WasAsked(flags.bench, "--output-tokens")) {
    options.output_tokens =
        options.output_tokens.CutTo(server.max_model_len / 2);
  }
  if (!WasAsked(flags.bench, "--prompt-tokens")) {
    options.prompt_tokens = options.prompt_tokens.CutTo(
        server.max_model_len - options.output_tokens.longest());
  }
  KVASIR_RETURN_IF_ERROR(CheckLengths(
      options.prompt_tokens, options.output_tokens, options.max_model_len));
  LoadRows loads;
  const auto run = [&](const char* what) -> absl::StatusOr<LoadResult> {
    Progress progress(what, flags.requests, "requests", true);
    options.progress = [&progress](int64_t done) { progress.Update(done); };
    LoadResult result = RunLoad(options, client);
    if (result.succeeded == 0) {
      return absl::Status(
          result.first_error.code(),
          absl::StrCat(what, ": all ", result.failed,
                       " requests failed: ", result.first_error.message()));
    }
    loads.rows.push_back(LoadRow(options, result));
    return result;
  };
  double rate = flags.rate;
  if (flags.mode != "open" || rate == 0.0) {
    options.concurrency = flags.concurrency;
    KVASIR_ASSIGN_OR_RETURN(loads.closed, run("closed loop"));
    // The default rate is half of the rate that a few clients reach, so that
    // the server is busy but not overloaded.
    if (rate == 0.0) {
      rate = 0.5 * static_cast<double>(loads.closed->succeeded) /
             loads.closed->seconds;
    }
    ++options.seed;  // the next run then has other prompts
  }
  if (flags.mode != "closed" && rate > 0) {
    options.rate = rate;
    options.concurrency = flags.max_outstanding;
    KVASIR_ASSIGN_OR_RETURN(loads.open, run("open loop"));
  }
  return loads;
}

// For each pair, the milliseconds until the first token and until the end of
// the answer.
struct LatencyPairs {
  std::vector<double> router;
  std::vector<double> worker;
  std::vector<double> router_total;
  std::vector<double> worker_total;
};

double FirstTokenMs(const TokenResult& result) {
  return absl::ToDoubleMilliseconds(
      result.arrivals.empty() ? result.total : result.arrivals.front().at);
}

// Measures latency through the router and directly, in alternating order. All
// requests have the same prompt and one output token. The engine then uses its
// prefix cache and takes a short, steady time, beside which the router's time
// is visible.
absl::StatusOr<LatencyPairs> MeasureLatency(int pairs, int64_t prompt_tokens,
                                            const TestedServer& server,
                                            TokenClient* router,
                                            TokenClient* worker) {
  TokenRequest request;
  request.model = server.model;
  for (int64_t i = 0; i < prompt_tokens; ++i) {
    request.prompt_ids.push_back(
        static_cast<int32_t>((i * 7919 + 1) % server.vocab_size));
  }
  LatencyPairs times;
  Progress progress("router latency", pairs, "pairs", true);
  // The first pairs open connections and fill the prefix cache.
  constexpr int kWarmUp = 2;
  for (int pair = -kWarmUp; pair < pairs; ++pair) {
    for (int turn = 0; turn < 2; ++turn) {
      const bool through_router = (pair + turn) % 2 == 0;
      request.request_id = absl::StrCat("latency-", pair + kWarmUp, "-", turn);
      KVASIR_ASSIGN_OR_RETURN(
          const TokenResult result,
          (through_router ? router : worker)->Generate(request));
      if (pair < 0) continue;
      (through_router ? times.router : times.worker)
          .push_back(FirstTokenMs(result));
      (through_router ? times.router_total : times.worker_total)
          .push_back(absl::ToDoubleMilliseconds(result.total));
    }
    if (pair >= 0) progress.Update(pair + 1);
  }
  return times;
}

void AddLatencyFigures(const LatencyPairs& times, int64_t prompt_tokens,
                       BenchReport* report) {
  report->AddRatio(
      "router_added_ms_p50", bench::DifferenceOf(times.router, times.worker),
      prompt_tokens >= 1000 ? std::optional(Target{1.0, false}) : std::nullopt,
      "time until the first token, median of the pairs' "
      "differences");
  report->AddRatio("router_added_total_ms_p50",
                   bench::DifferenceOf(times.router_total, times.worker_total),
                   std::nullopt,
                   "time until the end of a request for one token");
  report->AddRatio("router_over_worker",
                   bench::RatioOf(times.router, times.worker), std::nullopt,
                   "time until the first token, through the router divided "
                   "by direct");
  report->AddFigure("router_ms_p50", Quantile(times.router, 0.5));
  report->AddFigure("worker_ms_p50", Quantile(times.worker, 0.5));
  report->AddFigure("router_ms_p99", Quantile(times.router, 0.99));
  report->AddFigure("worker_ms_p99", Quantile(times.worker, 0.99));
  report->AddFigure("latency_prompt_tokens",
                    static_cast<double>(prompt_tokens));
}

void AddLoadFigures(const LoadRows& loads, BenchReport* report) {
  for (const auto& row : loads.rows) report->AddRow(row);
  const auto add = [report](const std::string& prefix,
                            const std::optional<LoadResult>& result) {
    if (!result.has_value()) return;
    report->AddFigure(
        prefix + "_output_tokens_per_second",
        static_cast<double>(result->output_tokens) / result->seconds);
    report->AddFigure(prefix + "_ttft_ms_p50", result->first_token_ms.p50);
    report->AddFigure(prefix + "_ttft_ms_p99", result->first_token_ms.p99);
    report->AddFigure(prefix + "_itl_ms_p50", result->inter_token_ms.p50);
    report->AddFigure(prefix + "_itl_ms_p99", result->inter_token_ms.p99);
    report->AddFigure(prefix + "_e2e_ms_p50", result->end_to_end_ms.p50);
    report->AddFigure(prefix + "_e2e_ms_p99", result->end_to_end_ms.p99);
    report->AddFigure(prefix + "_failed", static_cast<double>(result->failed));
  };
  add("closed", loads.closed);
  add("open", loads.open);
}

absl::StatusOr<BenchReport> RunServe(ServeBenchFlags flags) {
  if (flags.bench.quick) {
    if (flags.prompt_tokens == kPromptTokens) flags.prompt_tokens = "fixed:16";
    if (flags.output_tokens == kOutputTokens) flags.output_tokens = "fixed:3";
    UseQuick(flags.bench, "--requests", 4, &flags.requests);
    UseQuick<int64_t>(flags.bench, "--latency-prompt-tokens", 64,
                      &flags.latency_prompt_tokens);
  }
  KVASIR_RETURN_IF_ERROR(CheckFlagsAreUsed(flags.model, flags.endpoint));
  if (flags.endpoint.empty() && flags.model.model.empty() &&
      !flags.model.random_weights) {
    flags.model.random_weights = true;
    flags.model.shape = "kvasir-tiny";
  }
  KVASIR_ASSIGN_OR_RETURN(const TestedServer server, OpenServer(flags));
  const auto router =
      MakeRouterTokenClient(server.router_endpoint, server.router_credentials);
  KVASIR_ASSIGN_OR_RETURN(const LoadRows loads,
                          MeasureLoad(flags, server, router.get()));
  if (flags.latency_prompt_tokens >= server.max_model_len &&
      WasAsked(flags.bench, "--latency-prompt-tokens")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--latency-prompt-tokens ", flags.latency_prompt_tokens,
                     " plus one output token are over the limit of ",
                     server.max_model_len, " tokens (the model's length)"));
  }
  const int64_t prompt_tokens =
      std::min(flags.latency_prompt_tokens, server.max_model_len - 1);
  std::optional<LatencyPairs> latency;
  if (!server.worker_endpoint.empty()) {
    const auto worker = MakeWorkerTokenClient(server.worker_endpoint,
                                              server.worker_credentials);
    KVASIR_ASSIGN_OR_RETURN(
        latency, MeasureLatency(BenchPairs(flags.bench), prompt_tokens, server,
                                router.get(), worker.get()));
  }
  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  if (latency.has_value()) {
    AddLatencyFigures(*latency, prompt_tokens, &report);
  } else {
    report.AddNote(
        "the time that the router adds was not measured: give "
        "--worker-endpoint, too");
  }
  AddLoadFigures(loads, &report);
  return report;
}

}  // namespace

void AddBenchServe(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<ServeBenchFlags>();
  flags->bench.pairs = 201;
  flags->bench.calls_server = true;
  const CLI::Validator is_distribution = Checked([](const std::string& text) {
    return LengthDistribution::Parse(text).status();
  });
  CLI::App* command = group->add_subcommand(
      "serve",
      "put load on the server at --endpoint over gRPC, or on a "
      "server that this command starts, with --model or a tiny "
      "random model");
  AddFlag(command, "--endpoint", flags->endpoint,
          "HOST:PORT of the server's gRPC port")
      ->type_name("HOST:PORT");
  AddDialTlsFlags(command, &flags->tls);
  AddFlag(command, "--worker-endpoint", flags->worker_endpoint,
          "with --endpoint: the address of its worker, to measure "
          "the time that the router adds")
      ->needs(command->get_option("--endpoint"))
      ->type_name("HOST:PORT");
  AddFlag(command, "--model-name", flags->model_name,
          "the server's model to use; default: its first model");
  AddModelFlags(command, &flags->model);
  AddFlag(command, "--mode", flags->mode,
          "the kind of load: a closed loop, an open loop, or both")
      ->check(CLI::IsMember({"closed", "open", "both"}));
  AddFlag(command, "--requests", flags->requests,
          "requests for each kind of load")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--concurrency", flags->concurrency,
          "closed loop: the number of requests that run at the same time")
      ->check(CLI::Range(1, 4096));
  AddFlag(command, "--rate", flags->rate,
          "open loop: Poisson arrivals per second; 0: half of what the closed "
          "loop reached")
      ->check(AtLeast(0));
  AddFlag(command, "--max-outstanding", flags->max_outstanding,
          "open loop: the most requests that run at the same time; further "
          "ones are "
          "sent late, and their latencies include the delay")
      ->check(CLI::Range(1, 4096));
  AddFlag(command, "--prompt-tokens", flags->prompt_tokens,
          "length of prompts: fixed:N, uniform:LOW:HIGH or "
          "lognormal:MEDIAN:SIGMA, whose samples are shortened to "
          "the model's length")
      ->check(is_distribution);
  AddFlag(command, "--output-tokens", flags->output_tokens,
          "length of outputs, in the forms of --prompt-tokens")
      ->check(is_distribution);
  AddFlag(command, "--latency-prompt-tokens", flags->latency_prompt_tokens,
          "prompt tokens of the requests that measure the time that "
          "the router adds")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(command, "--seed", flags->seed,
          "seed for lengths, prompts and arrival times");
  AddFlag(command, "--max-model-len", flags->max_model_len,
          "without --worker-endpoint: the most tokens of a prompt and its "
          "output, if the server does not report them")
      ->check(CLI::Range(2, 1 << 24));
  AddFlag(command, "--vocab-size", flags->vocab_size,
          "without --worker-endpoint: prompts use token ids below "
          "this")
      ->check(CLI::Range(1, 1 << 24));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunServe(*flags); }, exit_code);
}

}  // namespace kvasir::cli
