#include "server/flags/options.h"

#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "plan/eviction.h"
#include "router/identity/credentials.h"

namespace kvasir::cli {
namespace {

static_assert(kMaxTokenBytes == router::kMaxBearerTokenBytes);

// The limits of --stream-buffer-bytes. With a smaller buffer, a single pending
// write would make a fast client look slow. With a larger one, a single stream
// could use all of the router's memory.
constexpr int64_t kMinStreamBufferBytes = 64 << 10;
constexpr int64_t kMaxStreamBufferBytes = int64_t{1} << 30;
// The least value of --request-bytes. A lower limit would refuse prompts of
// usual length.
constexpr int64_t kMinRequestBytes = 1 << 20;
constexpr int64_t kMaxRequestBytes = int64_t{1} << 40;

}  // namespace

absl::StatusOr<base::ListenAddress> ParseListen(const std::string& text,
                                                const std::string& flag) {
  base::ListenAddress address;
  address.flag = address.host_flag = flag;
  if (absl::StartsWith(text, "unix:")) {
    address.unix_path = text.substr(5);
    if (!address.unix_path.empty()) return address;
  } else {
    const size_t colon = text.rfind(':');
    if (colon != std::string::npos && colon > 0 &&
        absl::SimpleAtoi(text.substr(colon + 1), &address.port) &&
        address.port >= 0 && address.port <= 65535) {
      address.host = text.substr(0, colon);
      return address;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text,
                   "' is not an address: give HOST:PORT or "
                   "unix:/path/of/socket"));
}

void AddStepFlags(CLI::App* app, EngineFlags* options) {
  AddFlag(app, "--max-model-len", options->max_model_len,
          "longest prompt + output in tokens; 0: the model's own limit")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  AddFlag(app, "--max-num-seqs", options->max_num_seqs,
          "the most sequences that run at the same time")
      ->check(CLI::Range(1, 65536));
  AddFlag(app, "--max-batched-tokens", options->max_batched_tokens,
          "the most tokens in one step (prefill chunks and decoded "
          "tokens)")
      ->check(CLI::Range(1, 1 << 20));
  AddBytes(app, "--kv-cache-bytes", options->kv_cache_bytes,
           "size of the KV cache pool on each rank, e.g. 2GiB; 0: half "
           "of the memory that is left in the cgroup, or on a GPU what "
           "--gpu-memory-utilization leaves, but at most what "
           "--max-num-seqs sequences of full length need");
  AddFlag(app, "--gpu-memory-utilization", options->gpu_memory_utilization,
          "on a GPU: the share of its memory that may be in use in "
          "total: by weights, cache, steps, CUDA itself and other "
          "processes; it limits --kv-cache-bytes")
      ->each(
          [options](const std::string&) { options->gpu_memory_given = true; })
      ->check(Above(0))
      ->check(Between(0, 1));
  AddSwitch(app, "--cuda-graphs", options->cuda_graphs,
            "on a GPU: capture steps that only decode as CUDA graphs and "
            "replay each with one call; graphs take memory in addition "
            "to --gpu-memory-utilization; off by default, because graphs "
            "have not been tried on a GPU yet");
  AddBytesOrAuto(app, "--host-pool-bytes", options->host_pool_bytes,
                 "host memory for the cache of preempted sequences, which is "
                 "then copied back instead of computed again; 0: none; auto: "
                 "a quarter of the KV cache pool, or none if --max-num-seqs "
                 "sequences of full length fit into the pool");
  AddFlag(app, "--plan-check", options->plan_check,
          "at the start, compare the predictions with the plan's cache and "
          "with a dense cache on a built-in text; refuse: do not serve a plan "
          "that changes them much; warn: serve it with a warning; off: do not "
          "compare")
      ->check(CLI::IsMember({"refuse", "warn", "off"}));
  AddDuration(app, "--watchdog", options->watchdog,
              "if no step finishes for this long although work is waiting: "
              "report NOT_SERVING, log the step's plan and exit");
}

void AddEngineFlags(CLI::App* app, EngineFlags* options) {
  AddStepFlags(app, options);
  AddFlag(app, "--max-queue", options->max_queue,
          "the most requests that may wait; further ones are refused "
          "(RESOURCE_EXHAUSTED)")
      ->check(CLI::Range(0, 1 << 20));
  AddDuration(app, "--queue-timeout", options->queue_timeout,
              "how long a request may wait before its first step");
  AddFlag(app, "--default-max-tokens", options->default_max_tokens,
          "the most output tokens of a request that does not set a "
          "limit")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(app, "--eviction-min-budget", options->eviction_min_budget,
          "if the plan evicts: the smallest budget that a request may "
          "set by its parameter eviction_budget, in slots (256) or as "
          "a share of its prompt (0.1); plan: the plan's budget. A "
          "larger budget is always allowed")
      ->check(Checked([](const std::string& text) {
        return text == "plan" ? absl::OkStatus()
                              : plan::ParseEvictionBudget(text).status();
      }))
      ->type_name("BUDGET|plan")
      ->group("Eviction");
  app->add_flag("--prefix-caching,!--no-prefix-caching",
                options->prefix_caching,
                "reuse cached pages of prompts that begin with the same "
                "tokens")
      ->envname(EnvironmentName("--prefix-caching"))
      ->default_str(options->prefix_caching ? "true" : "false");
}

void AddListenFlags(CLI::App* app, ListenFlags* options, CalledBy callers) {
  AddText(app, "--host", options->host,
          "address to listen on; 0.0.0.0 for all interfaces");
  if (callers == CalledBy::kClients) {
    AddFlag(app, "--grpc-port", options->grpc_port,
            "gRPC port for clients; 0 picks a free port")
        ->check(CLI::Range(0, 65535));
  }
  AddText(app, "--metrics-host", options->metrics_host,
          "address of --metrics-port; default: --host")
      ->type_name("HOST");
  AddText(app, "--health-host", options->health_host,
          "address of --health-port; default: --host")
      ->type_name("HOST");
  AddFlag(app, "--metrics-port", options->metrics_port,
          "HTTP port for Prometheus, path /metrics; 0 picks a free port")
      ->check(CLI::Range(0, 65535));
  AddFlag(app, "--admin-port", options->admin_port,
          "gRPC port for operators (drain, config); 0 picks a free port")
      ->check(CLI::Range(0, 65535));
  AddText(app, "--admin-host", options->admin_host,
          "address of --admin-port, independent of --host, because "
          "anybody who reaches the port can drain the program; or "
          "unix:/path instead of address and port")
      ->type_name("HOST|unix:/PATH");
  AddFlag(app, "--health-port", options->health_port,
          "gRPC port with only grpc.health.v1; 0 picks a free port")
      ->check(CLI::Range(0, 65535));
  AddText(app, "--tls-cert", options->tls.certificate,
          "PEM certificate chain that this server shows; read again "
          "when it changes. Without it, the server uses plain text and "
          "only this machine can connect")
      ->type_name("FILE");
  AddText(app, "--tls-key", options->tls.key, "PEM key of --tls-cert")
      ->type_name("FILE");
  if (callers != CalledBy::kOperators) {
    AddText(app, "--tls-client-ca", options->tls.client_ca,
            "PEM authorities of callers; if set, callers must show a "
            "certificate that one of them has signed")
        ->type_name("FILE");
    AddText(app, "--tls-client-names", options->tls.client_names,
            "DNS, URI or IP names; a caller's certificate must have one "
            "of them; default: any certificate that --tls-client-ca has "
            "signed")
        ->delimiter(',');
  }
  AddText(app, "--admin-client-ca", options->admin_client_ca,
          "PEM authorities of operators' certificates on --admin-port; "
          "needs --tls-cert; required, even with --insecure, if other "
          "machines can reach --admin-host")
      ->type_name("FILE");
  AddText(app, "--admin-client-names", options->admin_client_names,
          "names, one of which an operator's certificate must have; "
          "default: any certificate that --admin-client-ca has signed")
      ->delimiter(',');
  AddSwitch(app, "--insecure", options->insecure,
            "allow plain text to and from other machines; use it only if "
            "something else protects the connections (a mesh, a "
            "NetworkPolicy)");
  AddFlag(app, "--ready-file", options->ready_file,
          "file that is written when the program is ready: a JSON "
          "object with its addresses")
      ->type_name("FILE");
  AddDuration(app, "--drain-timeout", options->drain_timeout,
              "how long running requests may take after SIGTERM");
  if (callers == CalledBy::kOperators) return;
  if (callers == CalledBy::kRouters) {
    AddSwitch(app, "--tls-any-client", options->tls.any_client,
              "with --tls-cert and without --tls-client-ca: accept any "
              "program on another machine that reaches --listen as a "
              "router; use it only if something else limits who can reach "
              "the port (a NetworkPolicy)");
    return;
  }
  AddFlag(app, "--max-connections", options->max_connections,
          "the most connections of clients at a time; further ones are "
          "closed; 0: half of the file descriptors that the system "
          "allows")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  AddDuration(app, "--max-connection-age", options->max_connection_age,
              "age at which a client's connection is closed (by GOAWAY, so "
              "running calls finish), so that a drain loses no call; must "
              "be less than --drain-timeout; 0: a third of it");
}

constexpr absl::Duration kLeastConnectionAge = absl::Seconds(1);

absl::StatusOr<absl::Duration> MaxConnectionAge(const ListenFlags& flags) {
  // The default is at least kLeastConnectionAge, because with an age of 0 (from
  // --drain-timeout 0) gRPC would close every connection at once.
  if (flags.max_connection_age == absl::ZeroDuration()) {
    return std::max(flags.drain_timeout / 3, kLeastConnectionAge);
  }
  if (flags.max_connection_age < kLeastConnectionAge) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-connection-age ", absl::FormatDuration(flags.max_connection_age),
        " must be at least ", absl::FormatDuration(kLeastConnectionAge)));
  }
  if (flags.max_connection_age < flags.drain_timeout) {
    return flags.max_connection_age;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--max-connection-age ", absl::FormatDuration(flags.max_connection_age),
      " must be less than --drain-timeout ",
      absl::FormatDuration(flags.drain_timeout),
      ", so that clients can reconnect elsewhere during the drain"));
}

base::ListenAddress AdminAddress(const ListenFlags& flags) {
  constexpr absl::string_view kUnix = "unix:";
  base::ListenAddress listen;
  listen.port = flags.admin_port;
  listen.flag = "--admin-port";
  listen.host_flag = "--admin-host";
  if (absl::StartsWith(flags.admin_host, kUnix)) {
    listen.unix_path = flags.admin_host.substr(kUnix.size());
    listen.unix_mode = 0600;
    listen.flag = "--admin-host";
  } else {
    listen.host = flags.admin_host;
  }
  return listen;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ListenCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch) {
  const ListenTlsFlags& tls = flags.tls;
  if (tls.certificate.empty() && tls.key.empty() && tls.client_ca.empty() &&
      tls.client_names.empty()) {
    KVASIR_RETURN_IF_ERROR(base::CheckPlaintext(
        listen, flags.insecure, "give --tls-cert and --tls-key"));
    return nullptr;
  }
  base::TlsOptions options;
  options.files.certificate = tls.certificate;
  options.files.key = tls.key;
  options.files.authorities = tls.client_ca;
  options.names = tls.client_names;
  return watch->Server(options);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>>
WorkerListenCredentials(const ListenFlags& flags,
                        const base::ListenAddress& listen,
                        base::TlsWatch* watch) {
  const ListenTlsFlags& tls = flags.tls;
  if (tls.any_client && tls.certificate.empty()) {
    return absl::InvalidArgumentError(
        "--tls-any-client: without --tls-cert and --tls-key the server does "
        "not use TLS: give them, or give --insecure instead if unencrypted "
        "connections from other machines are acceptable");
  }
  if (tls.any_client && !tls.client_ca.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tls-any-client and --tls-client-ca ", tls.client_ca,
                     " exclude each other: the first accepts any "
                     "client and the second only clients with a certificate"));
  }
  if (!tls.certificate.empty() && tls.client_ca.empty() && !tls.any_client &&
      !base::IsLocal(listen)) {
    return absl::FailedPreconditionError(absl::StrCat(
        listen.host_flag, " ", listen.host, " with --tls-cert ",
        tls.certificate,
        " would let any program that can connect act as a router: give "
        "--tls-client-ca (and --tls-client-names), or "
        "--tls-any-client if something else limits who can connect "
        "(a NetworkPolicy), or listen on 127.0.0.1 only"));
  }
  return ListenCredentials(flags, listen, watch);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> AdminCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch, bool by_token) {
  base::TlsOptions options;
  options.role = "admin";
  if (flags.admin_client_ca.empty() && flags.admin_client_names.empty()) {
    if (base::IsLocal(listen)) return nullptr;
    if (by_token && !flags.tls.certificate.empty()) {
      options.files.certificate = flags.tls.certificate;
      options.files.key = flags.tls.key;
      return watch->Server(options);
    }
    return absl::FailedPreconditionError(absl::StrCat(
        listen.host_flag, " ", listen.host,
        " would let anybody who can connect end this program, and --insecure "
        "does not allow this: give --tls-cert, --tls-key and "
        "--admin-client-ca (for a router, --identities also works), "
        "or listen on 127.0.0.1 or unix:/path only"));
  }
  options.files.certificate = flags.tls.certificate;
  options.files.key = flags.tls.key;
  options.files.authorities = flags.admin_client_ca;
  options.files.authorities_flag = "--admin-client-ca";
  options.names = flags.admin_client_names;
  options.names_flag = "--admin-client-names";
  return watch->Server(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> WorkerCredentials(
    const RouterFlags& flags, bool insecure, base::TlsWatch* watch) {
  base::TlsOptions options;
  options.files.certificate = flags.worker_tls.certificate;
  options.files.certificate_flag = "--worker-tls-cert";
  options.files.key = flags.worker_tls.key;
  options.files.key_flag = "--worker-tls-key";
  options.files.authorities = flags.worker_tls.ca;
  options.files.authorities_flag = "--worker-tls-ca";
  options.names = flags.worker_tls.names;
  options.names_flag = "--worker-tls-names";
  options.role = "workers";
  if (!options.files.empty() || !options.names.empty()) {
    return watch->Channel(options);
  }
  for (const std::string& target : flags.workers) {
    KVASIR_RETURN_IF_ERROR(CheckPlainCall(target, "--worker-tls-ca", insecure));
  }
  return grpc::InsecureChannelCredentials();
}

void AddRouterFlags(CLI::App* app, RouterFlags* options, bool with_workers) {
  if (with_workers) {
    AddText(app, "--worker-tls-ca", options->worker_tls.ca,
            "PEM authorities of workers' certificates; without it: plain text")
        ->type_name("FILE");
    AddText(app, "--worker-tls-cert", options->worker_tls.certificate,
            "PEM certificate chain that the router shows to workers")
        ->type_name("FILE");
    AddText(app, "--worker-tls-key", options->worker_tls.key,
            "PEM key of --worker-tls-cert")
        ->type_name("FILE");
    AddText(app, "--worker-tls-names", options->worker_tls.names,
            "DNS, URI or IP names; a worker's certificate must have one "
            "of them; default: the host that is called")
        ->delimiter(',');
    AddFlag(app, "--workers", options->workers,
            "the workers, separated by commas. host:port or unix:/path: one "
            "worker; dns:///host:port: one worker for each address of the "
            "host; file:PATH: a file with one worker in each line. dns and "
            "file entries may be empty at first, and are followed while the "
            "router runs")
        ->delimiter(',')
        ->required();
    AddDuration(app, "--workers-refresh", options->workers_refresh,
                "how often dns and file entries of --workers are looked up");
    AddFlag(app, "--max-queue", options->max_queue,
            "the most requests that may wait in the router; further ones "
            "are refused (RESOURCE_EXHAUSTED)")
        ->check(CLI::Range(0, 1 << 20));
  }
  AddFlag(app, "--served-model-name", options->served_model_names,
          "model names that clients may request; default: the name of "
          "the model's folder")
      ->delimiter(',');
  AddFlag(app, "--policy", options->policy,
          "how the router chooses the replica for a request. "
          "prefix_affinity: the session's replica, or one that was sent the "
          "longest part of the prompt, unless its load is far above the mean; "
          "least_loaded: the one with the least load; round_robin: in turn")
      ->check(
          CLI::IsMember({"prefix_affinity", "least_loaded", "round_robin"}));
  AddFlag(app, "--load-factor", options->load_factor,
          "with prefix_affinity: a replica above this load, relative to the "
          "mean, gets no requests for its prefixes")
      ->check(Between(1.0, 100.0));
  AddBytes(app, "--prefix-bytes", options->prefix_bytes,
           "with prefix_affinity: the memory in which the router notes which "
           "replica has which page, 16 bytes for each",
           {.least = int64_t{1} << 20, .most = int64_t{1} << 36});
  AddFlag(app, "--move-streams", options->move_streams,
          "which streams go on at another replica after their worker is lost. "
          "exact: if their tokens stay the same, i.e. on CPUs with plans that "
          "do not lift prompts (--deterministic lifts none); rounding: also "
          "others of one sample without prompt log probabilities, whose next "
          "tokens may differ; off: none, they end UNAVAILABLE")
      ->check(CLI::IsMember({"exact", "rounding", "off"}));
  AddFlag(app, "--max-inflight", options->max_inflight,
          "the most requests that are sent to workers at a time; "
          "further ones wait in the router")
      ->check(CLI::Range(1, 1 << 20));
  AddBytes(app, "--stream-buffer-bytes", options->stream_buffer_bytes,
           "the most output that a client may leave unread before its "
           "stream is reset",
           {.least = kMinStreamBufferBytes, .most = kMaxStreamBufferBytes});
  AddBytes(app, "--request-bytes", options->request_bytes,
           "the most memory for all requests in the router (messages, "
           "prompts, tokens); further requests are refused "
           "(RESOURCE_EXHAUSTED)",
           {.least = kMinRequestBytes, .most = kMaxRequestBytes});
  AddFlag(app, "--share-tokenizer", options->share_tokenizer,
          "whether gateways may download the tokenizer's files "
          "(GetTokenizer); auto: only if no other machine can connect")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  AddFlag(app, "--reflection", options->reflection,
          "whether the clients' port describes its services and "
          "messages (gRPC server reflection, which grpcurl uses); "
          "auto: only if no other machine can connect and there is no "
          "--identities")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  AddText(app, "--identities", options->identities,
          "JSON file that lists who may call, and each caller's limits "
          "(docs/operations.md, Who may call); read again when it "
          "changes; without it, anybody who reaches the port may call")
      ->type_name("FILE");
}

void AddCommonFlags(CLI::App* app, CommonFlags* options) {
  AddFlag(app, "--log-format", options->log_format, "text or json")
      ->check(CLI::IsMember({"text", "json"}));
  AddFlag(app, "--log-level", options->log_level,
          "debug, info, warning, error or off")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}));
  AddFlag(app, "--metrics-compat", options->metrics_compat,
          "vllm: also expose vLLM's metric names")
      ->check(CLI::IsMember({"none", "vllm"}));
  AddSwitch(app, "--json", options->json,
            "print the ready line as a JSON object");
  app->add_flag("--print-config", options->print_config,
                "print the effective configuration as TOML and exit")
      ->configurable(false);
}

absl::Status ApplyCommonFlags(const CommonFlags& options) {
  base::LogFormat format;
  base::LogLevel level;
  KVASIR_RETURN_IF_ERROR(base::ParseLogFormat(options.log_format, &format));
  KVASIR_RETURN_IF_ERROR(base::ParseLogLevel(options.log_level, &level));
  base::InitLogging(format, level);
  return absl::OkStatus();
}

}  // namespace kvasir::cli
