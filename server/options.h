// The flags of the long-running programs (serve, router, worker) and of the
// offline commands that load a model. One struct per concern, so that each
// command takes just what it uses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/tls.h"
#include "server/eviction_flags.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace kvasir::cli {

// What a model runs on (device.h). Commands without the flags measure or write
// what is the CPU's.
struct DeviceFlags {
  std::string device = "cpu";
  bool given = false;  // --device was
  std::string module;  // empty: the one beside the program
};

// Where weights come from.
struct ModelOptions {
  std::string model;            // Hugging Face folder, names resolved
  bool random_weights = false;  // in memory, of `shape`
  std::string shape;            // "llama-3-8b"
  uint64_t weights_seed = 1;
  std::string kv_plan;            // overrides the folder's kv_plan.json
  std::string kv_dtype = "auto";  // of the full-rank plan: auto, f32, f16, bf16
  EvictionFlags eviction;         // over whatever plan it is
  int64_t page_tokens = 64;
  int threads = 0;             // 0: what the cgroup allows
  bool deterministic = false;  // RankOptions'
  DeviceFlags device;          // only of commands with AddDeviceFlags
};
// Wrong usage for names that no shape has.
CLI::Validator ShapeName();
void AddModelFlags(CLI::App* app, ModelOptions* options);

// INVALID_ARGUMENT for a --shape, or flags of eviction, that nothing would
// read. `endpoint`: of the server that is asked in place of a model, if one is.
absl::Status CheckFlagsAreUsed(const ModelOptions& options,
                               const std::string& endpoint = "");
// One of --model and --random-weights --shape.
absl::Status CheckModelOptions(const ModelOptions& options);
// The same as a parse error (CLI::ValidationError), for a command's callback:
// wrong usage has an exit code of its own.
void RequireModel(const ModelOptions& options);

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
// FAILED_PRECONDITION where a call without TLS would leave the machine and is
// not `insecure`; `remedy`: the flag that gives it TLS.
absl::Status CheckPlainCall(const std::string& target, const char* remedy,
                            bool insecure);
// INVALID_ARGUMENT, without what is in it, for a file that holds no secret or
// more than one.
absl::StatusOr<std::string> ReadSecretFile(const char* flag,
                                           const std::string& path);
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

// TLS of a client of ours. Its flags are no server's: both may stand in one
// pod's environment.
struct DialTlsFlags {
  std::string ca;  // empty: plain text
  std::string certificate;
  std::string key;
  bool insecure = false;  // plain text may leave the machine
  // Of a token that each call shows; empty: none.
  std::string token_file;
};
void AddDialTlsFlags(CLI::App* app, DialTlsFlags* options);
// Of a client of `target`; plain text's where no flag is set. The errors of
// base::TlsChannelCredentials; INVALID_ARGUMENT for a file without a token;
// FAILED_PRECONDITION where plain text would leave the machine, or a token
// would go without TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> DialCredentials(
    const DialTlsFlags& flags, const std::string& target);

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
