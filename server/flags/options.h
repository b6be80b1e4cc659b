// The flags of the long-running programs (serve, router, worker, rank), in
// several structs, so that each command has only the flags that it uses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/cli/dial.h"
#include "base/net/tls.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct EngineFlags {
  int64_t max_model_len = 0;  // 0: the model's limit
  int64_t max_num_seqs = 64;
  int64_t max_batched_tokens = 512;
  int64_t kv_cache_bytes = 0;  // 0: a share of the remaining memory
  double gpu_memory_utilization = 0.9;
  bool gpu_memory_given = false;
  bool cuda_graphs = false;
  // The size of the page pool in host memory; empty for "auto" (see
  // --host-pool-bytes). 0 means no host pool.
  std::optional<int64_t> host_pool_bytes;
  int64_t max_queue = 1024;
  absl::Duration queue_timeout = absl::Minutes(5);
  int64_t default_max_tokens = 256;
  // The smallest budget that a request may ask for. "plan" stands for the
  // plan's own budget.
  std::string eviction_min_budget = "plan";
  bool prefix_caching = true;
  std::string plan_check =
      "refuse";  // the argument `mode` of LoadWithPlanCheck
  absl::Duration watchdog = absl::Minutes(2);
};
// Adds the flags that affect steps and their memory. Their values must be equal
// on all ranks.
void AddStepFlags(CLI::App* app, EngineFlags* options);
void AddEngineFlags(CLI::App* app, EngineFlags* options);

// The TLS flags of a listener. Without a certificate the listener uses plain
// text, which is allowed on loopback, on Unix sockets, and with --insecure.
struct ListenTlsFlags {
  std::string certificate;
  std::string key;
  // authorities for clients' certificates; empty: clients need no certificate
  std::string client_ca;
  std::vector<std::string> client_names;
  // For a worker without a client_ca: if true, programs on other machines may
  // call it without a certificate.
  bool any_client = false;
};

struct ListenFlags {
  std::string host = "127.0.0.1";
  int grpc_port = 8001;
  int metrics_port = 8002;
  std::string metrics_host;  // empty: `host`
  int admin_port = 8003;
  // The address of the admin port; may be "unix:/path". The default is
  // loopback, because calls to this port can end the program.
  std::string admin_host = "127.0.0.1";
  // TLS for the port of clients or routers. The admin port uses the
  // same certificate.
  ListenTlsFlags tls;
  // A file of certificate authorities. If it is set, operators must show a
  // certificate that one of them has signed.
  std::string admin_client_ca;
  std::vector<std::string> admin_client_names;
  // If true, connections to and from other machines may use plain text.
  bool insecure = false;
  int health_port = 8004;
  std::string health_host;  // empty: `host`
  std::string ready_file;
  absl::Duration drain_timeout = absl::Seconds(30);
  int64_t max_connections = 0;  // 0: half of the process's file descriptors
  // 0: a third of drain_timeout
  absl::Duration max_connection_age = absl::ZeroDuration();
};
// Returns the age at which a client's connection is closed. The default is
// a third of --drain-timeout, so that a drain has time left for running
// calls. INVALID_ARGUMENT if the flag's value is too small or not less
// than --drain-timeout.
absl::StatusOr<absl::Duration> MaxConnectionAge(const ListenFlags& flags);
// Parses the value of `flag`: "unix:/path" or "host:port".
absl::StatusOr<base::ListenAddress> ParseListen(const std::string& text,
                                                const std::string& flag);
// The address of the admin port.
base::ListenAddress AdminAddress(const ListenFlags& flags);
// Returns the credentials of a listener; null for plain text. Errors: those of
// base::TlsWatch::Server, and FAILED_PRECONDITION if other machines could
// connect in plain text.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ListenCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch);
// The credentials of a worker's listener. Errors: those of ListenCredentials,
// and FAILED_PRECONDITION if other machines could call without a certificate
// and no flag allows this.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>>
WorkerListenCredentials(const ListenFlags& flags,
                        const base::ListenAddress& listen,
                        base::TlsWatch* watch);
// The credentials of the admin port. FAILED_PRECONDITION if other machines
// could call without a certificate, even with --insecure, because calls to this
// port can end the program. If `by_token`, operators may show a token instead
// of a certificate.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> AdminCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch, bool by_token = false);

// The callers of a program. Clients call --grpc-port. Routers call a worker's
// --listen. A rank has neither flag, because only operators call it.
enum class CalledBy { kClients, kRouters, kOperators };
void AddListenFlags(CLI::App* app, ListenFlags* options, CalledBy callers);

struct RouterFlags {
  std::vector<std::string> workers;  // see router::ParseWorkers
  absl::Duration workers_refresh = absl::Seconds(5);
  struct WorkerTls {
    std::string ca;  // empty: plain text
    std::string certificate;
    std::string key;
    std::vector<std::string> names;
  } worker_tls;
  std::vector<std::string> served_model_names;
  std::string policy = "prefix_affinity";  // or least_loaded, round_robin
  double load_factor = 1.25;
  int64_t prefix_bytes = 16 << 20;
  std::string move_streams = "exact";  // or rounding, off
  int64_t max_inflight = 4096;
  int64_t max_queue = 1024;
  int64_t stream_buffer_bytes = 16 << 20;
  int64_t request_bytes = 256 << 20;
  // Whether gateways may download the tokenizer's files: "on", "off", or "auto"
  // (only if no other machine can connect).
  std::string share_tokenizer = "auto";
  // Whether the clients' port has server reflection: "on", "off", or "auto"
  // (only if no other machine can connect and no credentials are required).
  std::string reflection = "auto";
  // The file that lists who may call. If empty, anybody who can connect
  // may call.
  std::string identities;
};
// Returns the credentials with which a router calls its workers; null for plain
// text. Errors: those of base::TlsWatch::Channel, and FAILED_PRECONDITION if
// plain text would go to another machine.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> WorkerCredentials(
    const RouterFlags& flags, bool insecure, base::TlsWatch* watch);
void AddRouterFlags(CLI::App* app, RouterFlags* options, bool with_workers);

struct CommonFlags {
  std::string log_format = "text";
  std::string log_level = "info";
  std::string metrics_compat = "none";  // or vllm
  bool print_config = false;
  bool json = false;  // print the ready line as JSON
};
void AddCommonFlags(CLI::App* app, CommonFlags* options);
// Sets up logging. INVALID_ARGUMENT for an unknown format or level.
absl::Status ApplyCommonFlags(const CommonFlags& options);

}  // namespace kvasir::cli
