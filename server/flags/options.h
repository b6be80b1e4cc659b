// The flags of the long-running programs (serve, router, worker, rank). There
// is one struct per concern, so that each command has only the flags that it
// uses.
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
  int64_t max_model_len = 0;  // 0: the model's own
  int64_t max_num_seqs = 64;
  int64_t max_batched_tokens = 512;
  int64_t kv_cache_bytes = 0;  // 0: a share of the memory that is left
  double gpu_memory_utilization = 0.9;
  bool gpu_memory_given = false;
  bool cuda_graphs = false;
  // Empty: a share of the pool's; 0: no host pool.
  std::optional<int64_t> host_pool_bytes;
  int64_t max_queue = 1024;
  absl::Duration queue_timeout = absl::Minutes(5);
  int64_t default_max_tokens = 256;
  // The least that a request may ask for; "plan": what the plan keeps.
  std::string eviction_min_budget = "plan";
  bool prefix_caching = true;
  absl::Duration watchdog = absl::Minutes(2);
};
// Of them, what a step and its memory take: the same on all ranks.
void AddStepFlags(CLI::App* app, EngineFlags* options);
void AddEngineFlags(CLI::App* app, EngineFlags* options);

// TLS of a listener. Without a certificate it speaks plain text, which is for
// loopback, Unix sockets, and --insecure.
struct ListenTlsFlags {
  std::string certificate;
  std::string key;
  std::string client_ca;  // not empty: clients show a certificate, too
  std::vector<std::string> client_names;
  // Of a worker: without client_ca, another machine may call.
  bool any_client = false;
};

struct ListenFlags {
  std::string host = "127.0.0.1";
  int grpc_port = 8001;
  int metrics_port = 8002;
  std::string metrics_host;  // empty: `host`
  int admin_port = 8003;
  // Not `host`: whoever reaches it can end the program. Or "unix:/path".
  std::string admin_host = "127.0.0.1";
  // Of clients' port, or of a worker's; its certificate is the admin port's.
  ListenTlsFlags tls;
  // Not empty: operators show a certificate of these authorities.
  std::string admin_client_ca;
  std::vector<std::string> admin_client_names;
  // Plain text may leave the machine.
  bool insecure = false;
  int health_port = 8004;
  std::string health_host;  // empty: `host`
  std::string ready_file;
  absl::Duration drain_timeout = absl::Seconds(30);
  // Of clients' connections.
  int64_t max_connections = 0;  // 0: half of the descriptors
  absl::Duration max_connection_age = absl::ZeroDuration();  // 0: by the drain
};
// How old a client's connection gets: a third of the drain's time where it is
// not said, so that a drain has time for what runs behind that.
// INVALID_ARGUMENT when it is no less than the drain may take.
absl::StatusOr<absl::Duration> MaxConnectionAge(const ListenFlags& flags);
// "unix:/path" or "host:port" of that flag.
absl::StatusOr<base::ListenAddress> ParseListen(const std::string& text,
                                                const std::string& flag);
// Of the admin port.
base::ListenAddress AdminAddress(const ListenFlags& flags);
// Null: plain text. The errors of base::TlsWatch::Server, and
// FAILED_PRECONDITION where plain text would leave the machine.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ListenCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch);
// The same; FAILED_PRECONDITION where other machines are let in without a
// certificate and nobody said that they may.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>>
WorkerListenCredentials(const ListenFlags& flags,
                        const base::ListenAddress& listen,
                        base::TlsWatch* watch);
// FAILED_PRECONDITION where other machines would be let in without a
// certificate: `insecure` is not enough for a port that ends the program.
// `by_token`: operators may show a token in its place.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> AdminCredentials(
    const ListenFlags& flags, const base::ListenAddress& listen,
    base::TlsWatch* watch, bool by_token = false);

// Who calls, beside operators: a worker has --listen in place of --grpc-port, a
// rank neither.
enum class CalledBy { kClients, kRouters, kOperators };
void AddListenFlags(CLI::App* app, ListenFlags* options, CalledBy callers);

struct RouterFlags {
  std::vector<std::string> workers;  // host:port or unix:/path
  struct WorkerTls {
    std::string ca;  // empty: plain text
    std::string certificate;
    std::string key;
    std::vector<std::string> names;
  } worker_tls;
  std::vector<std::string> served_model_names;
  std::string policy = "least_loaded";  // or round_robin
  int64_t max_inflight = 4096;
  int64_t max_queue = 1024;
  int64_t stream_buffer_bytes = 16 << 20;
  int64_t request_bytes = 256 << 20;
  // Gateways may fetch the tokenizer's files: auto (a loopback listener's), on,
  // off.
  std::string share_tokenizer = "auto";
  // Server reflection on the clients' port: the same words; auto is off where
  // callers are asked who they are.
  std::string reflection = "auto";
  // File of who may call; empty: whoever reaches the port.
  std::string identities;
};
// The same of a router's workers, by the errors of base::TlsWatch::Channel;
// FAILED_PRECONDITION where plain text would leave the machine.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> WorkerCredentials(
    const RouterFlags& flags, bool insecure, base::TlsWatch* watch);
void AddRouterFlags(CLI::App* app, RouterFlags* options, bool with_workers);

struct CommonFlags {
  std::string log_format = "text";
  std::string log_level = "info";
  std::string metrics_compat = "none";  // or vllm
  bool print_config = false;
  bool json = false;  // the ready line
};
void AddCommonFlags(CLI::App* app, CommonFlags* options);
// Sets up logging; INVALID_ARGUMENT for unknown names.
absl::Status ApplyCommonFlags(const CommonFlags& options);

}  // namespace kvasir::cli
