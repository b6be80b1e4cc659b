// Runs a router and a worker in one process, connected by gRPC over a Unix
// socket, for `kvasir serve` and for commands that need a server for one call.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/flags/options.h"
#include "server/runtime/router_runtime.h"
#include "server/runtime/worker_runtime.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {

struct ServeStackOptions {
  ModelOptions model;
  // Null: Create reads the tokenizer in the model's folder, if there is one.
  std::shared_ptr<const model::Tokenizer> tokenizer;
  EngineFlags engine;
  std::unique_ptr<LeaderGroup> group;  // see WorkerRuntimeOptions::group
  RouterFlags router;                  // `workers` is set by the stack
  base::ListenAddress listen;
  // If true, the router listens on a Unix socket that only this user can reach,
  // and not on `listen`.
  bool listens_privately = false;
  // null means plain text
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // see RouterRuntimeOptions::callers
  std::shared_ptr<const router::Callers> callers;
  int64_t max_connections = 0;  // see RouterRuntimeOptions::max_connections
  absl::Duration max_connection_age = absl::Seconds(10);
  std::function<void(const std::string& why)> on_fatal;
  std::function<void(int64_t done, int64_t total)> progress;
  std::function<void(bool serving)> on_health;
};

// A node that runs a router and a worker.
// Owns: worker, router and the folder of their sockets.
class ServeStack final : public Node {
 public:
  static absl::StatusOr<std::unique_ptr<ServeStack>> Create(
      ServeStackOptions options);
  ~ServeStack() override;

  const RouterRuntime& router() const { return *router_; }
  // The router's report, with the worker's `ranks`.
  NodeReport Report() const override;
  std::string model_name() const override { return router_->model_name(); }
  MetricsSources Metrics() const override;
  DrainOutcome Drain(absl::Duration deadline) override;

 private:
  ServeStack() = default;

  std::string socket_folder_;
  std::unique_ptr<WorkerRuntime> worker_;
  std::unique_ptr<RouterRuntime> router_;
};

// The token limit of a text that is generated until the user stops it. At four
// tokens per second, it is reached after about a year.
inline constexpr int64_t kEndlessTokens = int64_t{1} << 27;

// A server for one text request, on its own Unix socket. It logs only warnings
// and errors.
class EphemeralServer {
 public:
  // Starts the server. To save memory, its cache has room only for the prompt
  // and `max_tokens` more tokens. If `endless`, it has room for the tokens that
  // eviction keeps. NOT_FOUND for a model without a tokenizer.
  static absl::StatusOr<std::unique_ptr<EphemeralServer>> Start(
      const ModelOptions& model, const std::string& prompt, int64_t max_tokens,
      bool endless);
  const std::string& endpoint() const { return stack_->router().target(); }

 private:
  EphemeralServer() = default;
  std::unique_ptr<ServeStack> stack_;
};

}  // namespace kvasir::cli
