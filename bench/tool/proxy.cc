// `kvasir bench proxy`: measures the cost of the router, compared with a proxy
// that only forwards bytes and with direct calls of the worker.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/net/tls.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/proxy/null_proxy.h"
#include "bench/tool/bench.h"
#include "bench/tool/forked_server.h"
#include "bench/tool/raw_load.h"
#include "bench/tool/report.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;

constexpr char kModel[] = "bench";  // the name of the scripted worker's model

struct ProxyBenchFlags {
  BenchFlags bench;
  int64_t prompt_tokens = 1000;
  uint32_t output_tokens = 16;
  int requests = 1500;
  int concurrency = 16;
  int latency_requests = 100;
  // PEM files: the certificate chain and key of servers and clients, and the
  // authority that signed the certificate.
  std::string certificate;
  std::string authorities;
};

// The servers, each in its own process. They are ended in the reverse order.
struct Servers {
  std::unique_ptr<ForkedServer> worker;
  std::unique_ptr<ForkedServer> null_proxy;
  std::unique_ptr<ForkedServer> router;
  // The servers below exist only if certificates are given.
  std::unique_ptr<ForkedServer> tls_router;  // its worker speaks plain text
  // the only worker with TLS
  std::unique_ptr<ForkedServer> mtls_worker;
  std::unique_ptr<ForkedServer> mtls_router;
};

// Selects the connections that are encrypted. kPlain: none. kTls: those between
// clients and router. kMutualTls: also those between router and worker, and all
// by mutual TLS.
enum class Hops { kPlain, kTls, kMutualTls };

base::TlsOptions OfFiles(const ProxyBenchFlags& flags, bool authorities) {
  base::TlsOptions options;
  options.files.certificate = options.files.key = flags.certificate;
  if (authorities) options.files.authorities = flags.authorities;
  return options;
}

// A server, and the watch that reloads its TLS files.
template <typename Server>
struct Watched {
  std::shared_ptr<base::TlsWatch> watch;
  std::unique_ptr<Server> server;  // ends first
};
template <typename Server>
ForkedServer::Running Running(std::shared_ptr<base::TlsWatch> watch,
                              std::unique_ptr<Server> server) {
  std::string target = server->target();
  return {.server = std::make_shared<Watched<Server>>(
              Watched<Server>{std::move(watch), std::move(server)}),
          .target = std::move(target)};
}

absl::StatusOr<std::unique_ptr<ForkedServer>> StartRouter(
    const ProxyBenchFlags& flags, const std::string& worker, Hops hops) {
  // The router must not close connections during the measurement.
  std::vector<std::string> arguments = {
      "router", absl::StrCat("--workers=", worker), "--drain-timeout=48h",
      "--max-connection-age=24h"};
  for (const char* port : {"grpc", "admin", "health", "metrics"}) {
    arguments.push_back(absl::StrCat("--", port, "-port=0"));
  }
  const auto add = [&](const char* flag, const std::string& file) {
    arguments.push_back(absl::StrCat("--", flag, "=", file));
  };
  if (hops != Hops::kPlain) {
    add("tls-cert", flags.certificate);
    add("tls-key", flags.certificate);
  }
  if (hops == Hops::kMutualTls) {
    add("tls-client-ca", flags.authorities);
    add("worker-tls-ca", flags.authorities);
    add("worker-tls-cert", flags.certificate);
    add("worker-tls-key", flags.certificate);
  }
  return ForkedServer::StartKvasir("router", std::move(arguments));
}

absl::StatusOr<std::unique_ptr<ForkedServer>> StartWorker(
    const ProxyBenchFlags& flags, bench::BareServerOptions bare, Hops hops) {
  return ForkedServer::Start(
      "worker", [&]() -> absl::StatusOr<ForkedServer::Running> {
        auto watch = std::make_shared<base::TlsWatch>();
        if (hops == Hops::kMutualTls) {
          KVASIR_ASSIGN_OR_RETURN(bare.credentials,
                                  watch->Server(OfFiles(flags, true)));
        }
        KVASIR_ASSIGN_OR_RETURN(auto server, bench::StartScriptedWorker(bare));
        return Running(std::move(watch), std::move(server));
      });
}

absl::StatusOr<Servers> StartServers(const ProxyBenchFlags& flags) {
  bench::BareServerOptions bare;
  bare.max_model_len = std::max<int64_t>(
      8192, flags.prompt_tokens + int64_t{flags.output_tokens});
  Servers servers;
  KVASIR_ASSIGN_OR_RETURN(servers.worker,
                          StartWorker(flags, bare, Hops::kPlain));
  const std::string worker = servers.worker->target();
  KVASIR_ASSIGN_OR_RETURN(
      servers.null_proxy,
      ForkedServer::Start(
          "null proxy", [&]() -> absl::StatusOr<ForkedServer::Running> {
            KVASIR_ASSIGN_OR_RETURN(auto server,
                                    bench::StartNullProxy(bare, worker));
            return Running(nullptr, std::move(server));
          }));
  KVASIR_ASSIGN_OR_RETURN(servers.router,
                          StartRouter(flags, worker, Hops::kPlain));
  if (flags.certificate.empty()) return servers;
  KVASIR_ASSIGN_OR_RETURN(servers.tls_router,
                          StartRouter(flags, worker, Hops::kTls));
  KVASIR_ASSIGN_OR_RETURN(servers.mtls_worker,
                          StartWorker(flags, bare, Hops::kMutualTls));
  KVASIR_ASSIGN_OR_RETURN(
      servers.mtls_router,
      StartRouter(flags, servers.mtls_worker->target(), Hops::kMutualTls));
  return servers;
}

// A way to reach the worker, directly or through a router or proxy, and its
// measurements.
struct Way {
  std::string name;
  // the process whose CPU time is measured
  const ForkedServer* server = nullptr;
  RawLoad load;
  RawCall call;       // requests all tokens
  RawCall one_token;  // requests one token

  std::vector<double> seconds;  // time of each round of load
  // time until the end of an answer, under load
  std::vector<double> load_p50_ms;
  std::vector<double> load_p99_ms;
  // time until the first message, with one request at a time
  std::vector<double> first_ms;
  std::vector<double> first_p99_ms;
  std::vector<double> cpu_us_per_request;  // for answers of one token
  std::vector<double> cpu_us_per_token;    // for each further token
};

// The ways, in the order of the report. The last two exist only with
// certificates.
enum WayIndex : size_t {
  kDirect,
  kNullProxy,
  kKserve,
  kVllmEngine,
  kVllmInference,
  kKserveTls,
  kKserveMutualTls
};

absl::StatusOr<std::vector<std::unique_ptr<Way>>> MakeWays(
    const ProxyBenchFlags& flags, const Servers& servers) {
  std::vector<std::unique_ptr<Way>> ways;
  using Credentials = std::shared_ptr<grpc::ChannelCredentials>;
  const auto add = [&](const char* name, const ForkedServer& server,
                       const std::function<RawCall(uint32_t)>& call,
                       const Credentials& credentials) {
    ways.push_back(std::unique_ptr<Way>(
        new Way{.name = name,
                .server = &server,
                .load = RawLoad(server.target(), credentials),
                .call = call(flags.output_tokens),
                .one_token = call(1)}));
  };
  const int64_t prompt = flags.prompt_tokens;
  const auto worker = [=](uint32_t tokens) {
    return WorkerRawCall(prompt, tokens);
  };
  const auto kserve = [=](uint32_t tokens) {
    return KserveRawCall(kModel, prompt, tokens);
  };
  add("direct", *servers.worker, worker, nullptr);
  add("null_proxy", *servers.null_proxy, worker, nullptr);
  add("kserve", *servers.router, kserve, nullptr);
  add(
      "vllm_engine", *servers.router,
      [=](uint32_t tokens) { return VllmEngineRawCall(prompt, tokens); },
      nullptr);
  add(
      "vllm_inference", *servers.router,
      [=](uint32_t tokens) { return VllmInferenceRawCall(prompt, tokens); },
      nullptr);
  if (servers.tls_router == nullptr) return ways;
  base::TlsOptions believing;
  believing.files.authorities = flags.authorities;
  KVASIR_ASSIGN_OR_RETURN(const Credentials tls,
                          base::TlsChannelCredentials(believing));
  add("kserve_tls", *servers.tls_router, kserve, tls);
  KVASIR_ASSIGN_OR_RETURN(const Credentials mutual,
                          base::TlsChannelCredentials(OfFiles(flags, true)));
  add("kserve_mtls", *servers.mtls_router, kserve, mutual);
  return ways;
}

// Opens the connections of a way and checks that all tokens arrive.
absl::Status WarmUp(const ProxyBenchFlags& flags, Way* way) {
  const int requests = std::min(flags.requests, 2 * flags.concurrency);
  KVASIR_ASSIGN_OR_RETURN(
      const RawRound round,
      way->load.Run(way->call, requests, flags.concurrency, /*read=*/true));
  const int64_t want = int64_t{requests} * flags.output_tokens;
  if (round.tokens != want) {
    return absl::InternalError(
        absl::StrCat(way->name, ": the warm-up must stream ", want,
                     " tokens, but streamed ", round.tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> CpuUsOfRound(const ProxyBenchFlags& flags,
                                    const RawCall& call, Way* way,
                                    RawRound* round) {
  KVASIR_ASSIGN_OR_RETURN(const double before, way->server->CpuSeconds());
  KVASIR_ASSIGN_OR_RETURN(
      *round,
      way->load.Run(call, flags.requests, flags.concurrency, /*read=*/false));
  KVASIR_ASSIGN_OR_RETURN(const double after, way->server->CpuSeconds());
  return 1e6 * (after - before) / flags.requests;
}

absl::Status MeasureLoad(const ProxyBenchFlags& flags, Way* way) {
  RawRound round;
  KVASIR_ASSIGN_OR_RETURN(const double one_token_us,
                          CpuUsOfRound(flags, way->one_token, way, &round));
  KVASIR_ASSIGN_OR_RETURN(const double all_tokens_us,
                          CpuUsOfRound(flags, way->call, way, &round));
  way->seconds.push_back(absl::ToDoubleSeconds(round.took));
  way->load_p50_ms.push_back(Quantile(round.total_ms, 0.5));
  way->load_p99_ms.push_back(Quantile(round.total_ms, 0.99));
  way->cpu_us_per_request.push_back(one_token_us);
  way->cpu_us_per_token.push_back((all_tokens_us - one_token_us) /
                                  (flags.output_tokens - 1));
  return absl::OkStatus();
}

// Measures latency: sends one request at a time, over each way in turn.
absl::Status MeasureLatency(const ProxyBenchFlags& flags,
                            const std::vector<std::unique_ptr<Way>>& ways) {
  std::vector<std::vector<double>> first_ms(ways.size());
  for (int i = 0; i < flags.latency_requests; ++i) {
    for (size_t turn = 0; turn < ways.size(); ++turn) {
      const size_t at = (turn + static_cast<size_t>(i)) % ways.size();
      KVASIR_ASSIGN_OR_RETURN(
          const RawRound round,
          ways[at]->load.Run(ways[at]->call, 1, 1, /*read=*/false));
      first_ms[at].push_back(round.first_ms.front());
    }
  }
  for (size_t at = 0; at < ways.size(); ++at) {
    ways[at]->first_p99_ms.push_back(Quantile(first_ms[at], 0.99));
    ways[at]->first_ms.insert(ways[at]->first_ms.end(), first_ms[at].begin(),
                              first_ms[at].end());
  }
  return absl::OkStatus();
}

bench::PairedRatio AcrossRounds(const std::vector<double>& values) {
  return bench::DifferenceOf(values, std::vector<double>(values.size(), 0.0));
}

void AddFigures(const ProxyBenchFlags& flags,
                const std::vector<std::unique_ptr<Way>>& ways,
                BenchReport* report) {
  const Way& direct = *ways[kDirect];
  const Way& null_proxy = *ways[kNullProxy];
  // True if the load is the one for which the performance targets were set.
  const bool as_set = flags.prompt_tokens >= 1000;
  const auto target = [as_set](double value, bool at_least) {
    return as_set ? std::optional(Target{value, at_least}) : std::nullopt;
  };
  for (const size_t at : {kKserve, kVllmEngine, kVllmInference}) {
    const Way& way = *ways[at];
    report->AddRatio(way.name + "_rate_over_null_proxy",
                     bench::RatioOf(null_proxy.seconds, way.seconds),
                     target(0.6, true), "requests a second, streamed");
    report->AddRatio(way.name + "_added_ms_p50",
                     bench::DifferenceOf(way.first_ms, direct.first_ms),
                     target(1.0, false),
                     "time until the first message with one request at a time, "
                     "minus that of direct calls of the worker");
    report->AddRatio(way.name + "_p99_over_null_proxy",
                     bench::RatioOf(way.first_p99_ms, null_proxy.first_p99_ms),
                     target(1.5, false),
                     "time until the first message with one request at a time");
  }
  for (size_t at = kKserveTls; at < ways.size(); ++at) {
    report->AddRatio(ways[at]->name + "_rate_over_plain",
                     bench::RatioOf(ways[kKserve]->seconds, ways[at]->seconds),
                     target(0.8, true),
                     at == kKserveTls
                         ? "requests a second, clients by TLS"
                         : "requests a second, clients and worker by mutual "
                           "TLS");
  }
  for (size_t at = kNullProxy; at < ways.size(); ++at) {
    const Way& way = *ways[at];
    report->AddRatio(way.name + "_cpu_us_per_request",
                     AcrossRounds(way.cpu_us_per_request), std::nullopt,
                     "CPU time of the process for an answer with one token");
    report->AddRatio(way.name + "_cpu_us_per_token",
                     AcrossRounds(way.cpu_us_per_token), std::nullopt,
                     "CPU time of the process for each further token");
  }
  report->AddFigure("prompt_tokens", static_cast<double>(flags.prompt_tokens));
  report->AddFigure("output_tokens", flags.output_tokens);
  report->AddFigure("concurrency", flags.concurrency);
  report->AddFigure("requests", flags.requests);
  report->AddFigure("latency_requests", flags.latency_requests);
  report->AddFigure("rounds", static_cast<double>(direct.seconds.size()));
  for (const auto& way : ways) {
    report->AddRow(
        {{"way", way->name},
         {"requests_per_second", flags.requests / Quantile(way->seconds, 0.5)},
         {"load_ms_p50", Quantile(way->load_p50_ms, 0.5)},
         {"load_ms_p99", Quantile(way->load_p99_ms, 0.5)},
         {"first_ms_p50", Quantile(way->first_ms, 0.5)},
         {"first_ms_p99", Quantile(way->first_p99_ms, 0.5)},
         {"request_bytes", way->call.request.size()},
         {"cpu_us_per_request", Quantile(way->cpu_us_per_request, 0.5)},
         {"cpu_us_per_token", Quantile(way->cpu_us_per_token, 0.5)}});
  }
}

absl::StatusOr<BenchReport> RunProxy(ProxyBenchFlags flags) {
  if (flags.certificate.empty() != flags.authorities.empty()) {
    return absl::InvalidArgumentError(
        "--tls-cert and --tls-ca must be given together");
  }
  UseQuick(flags.bench, "--requests", 8, &flags.requests);
  UseQuick(flags.bench, "--concurrency", 2, &flags.concurrency);
  UseQuick(flags.bench, "--latency-requests", 3, &flags.latency_requests);
  KVASIR_ASSIGN_OR_RETURN(const Servers servers, StartServers(flags));
  // Starts the clients after all servers, because with their threads this
  // process can no longer fork.
  KVASIR_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<Way>> ways,
                          MakeWays(flags, servers));
  for (const auto& way : ways) KVASIR_RETURN_IF_ERROR(WarmUp(flags, way.get()));
  const int pairs = BenchPairs(flags.bench);
  Progress progress("proxy", pairs, "rounds", true);
  for (int pair = 0; pair < pairs; ++pair) {
    for (size_t turn = 0; turn < ways.size(); ++turn) {
      KVASIR_RETURN_IF_ERROR(MeasureLoad(
          flags, ways[(turn + static_cast<size_t>(pair)) % ways.size()].get()));
    }
    KVASIR_RETURN_IF_ERROR(MeasureLatency(flags, ways));
    progress.Update(pair + 1);
  }
  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  AddFigures(flags, ways, &report);
  return report;
}

}  // namespace

void AddBenchProxy(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<ProxyBenchFlags>();
  flags->bench.pairs = 15;
  CLI::App* command = group->add_subcommand(
      "proxy",
      "measure the cost of the router: compare each facade with "
      "a proxy that only forwards bytes, and with direct calls "
      "of the worker, which computes nothing here");
  AddFlag(command, "--prompt-tokens", flags->prompt_tokens,
          "prompt tokens in each request")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--output-tokens", flags->output_tokens,
          "output tokens of each request, which are streamed")
      ->check(CLI::Range(2, 1 << 16));
  AddFlag(command, "--requests", flags->requests,
          "requests in each round of load")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--concurrency", flags->concurrency,
          "requests that run at the same time in a round of load")
      ->check(CLI::Range(1, 1024));
  AddFlag(command, "--latency-requests", flags->latency_requests,
          "requests in each round of latency, one at a time")
      ->check(CLI::Range(1, 1 << 20));
  AddText(command, "--tls-cert", flags->certificate,
          "PEM file with a key and its certificate for 127.0.0.1; "
          "if given, the router is also measured with TLS and "
          "mutual TLS")
      ->type_name("FILE");
  AddText(command, "--tls-ca", flags->authorities,
          "PEM file of the authority that signed --tls-cert")
      ->type_name("FILE");
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunProxy(*flags); }, exit_code);
}

}  // namespace kvasir::cli
