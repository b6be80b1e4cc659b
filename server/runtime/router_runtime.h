// A running router (`kvasir router`, `kvasir serve`): its replicas, request
// routing, the facades (client protocols) and their listener, and metrics.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/net/grpc_server.h"
#include "model/tokenizer/tokenizer.h"
#include "prometheus/collectable.h"
#include "router/base/callback_gate.h"
#include "router/base/client_calls.h"
#include "router/base/timer_thread.h"
#include "router/core/access_log.h"
#include "router/core/metrics.h"
#include "router/core/request_router.h"
#include "router/facades/facades.h"
#include "router/replicas/discovery.h"
#include "router/replicas/replica_registry.h"
#include "server/flags/options.h"
#include "server/runtime/node.h"

namespace kvasir::cli {

struct RouterRuntimeOptions {
  RouterFlags router;
  base::ListenAddress listen;
  // If null, the listener uses plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // If null, callers need no credentials.
  std::shared_ptr<const router::Callers> callers;
  std::shared_ptr<grpc::ChannelCredentials> worker_credentials;
  // True if the workers run in this process. Then no pings are sent to them.
  bool workers_in_process = false;
  int64_t max_connections = 0;  // 0: half of the process's file descriptors
  // The age at which clients' connections are closed. A drain waits until about
  // this age for clients to leave.
  absl::Duration max_connection_age = absl::Seconds(10);
  absl::Duration queue_timeout = absl::Seconds(30);
  int64_t default_max_tokens = 256;
  // How long Create waits for the first worker. Then the router starts without
  // one, and is not ready until one answers.
  absl::Duration start_timeout = absl::Seconds(30);
  // If null, requests must contain token ids instead of text.
  std::shared_ptr<const model::Tokenizer> tokenizer;
  // Called from any thread when the runtime becomes able or unable to serve
  // requests. May be empty.
  std::function<void(bool serving)> on_health;
  // The folder or the GGUF file from which the tokenizer was read.
  std::string tokenizer_folder;
};

struct NameCheck;

class RouterRuntime final : public Node {
 public:
  static absl::StatusOr<std::unique_ptr<RouterRuntime>> Create(
      RouterRuntimeOptions options);
  ~RouterRuntime() override;

  const std::string& target() const { return server_->target(); }
  // The model names that clients may ask for.
  std::vector<std::string> model_names() const;
  NodeReport Report() const override {
    return {
        .grpc = target(), .model = model_name(), .tokenizer = tokenizer_.get()};
  }
  // Empty if no worker has been reached yet.
  std::string model_name() const override;
  MetricsSources Metrics() const override { return {metrics_->registry()}; }
  bool ready() const { return core_->Health().ready; }

  // Reports NOT_SERVING and accepts no more connections. Connected clients are
  // served until their connections reach max_connection_age and are closed.
  // After that, new calls are refused. Waits for running requests until
  // `deadline`, cancels the rest, and returns when no call is left.
  DrainOutcome Drain(absl::Duration deadline) override;

 private:
  RouterRuntime();
  // The steps of Create, in the order in which it calls them.
  absl::Status ConnectReplicas(const RouterRuntimeOptions& options);
  absl::Status MakeCore(const RouterRuntimeOptions& options);
  // Returns the largest max_model_len of the workers that have answered; 0 if
  // none has answered.
  int64_t LongestModel() const;
  // Logs at intervals which workers are missing, while no replica can answer.
  void ReportMissingWorkersLater();
  router::FacadeOptions OptionsOfFacades(
      const RouterRuntimeOptions& options) const;
  absl::Status Listen(const RouterRuntimeOptions& options,
                      int64_t max_model_len);

  // Sets the health state to that of the replicas. Has no effect after a drain
  // has begun.
  void UpdateHealth() ABSL_LOCKS_EXCLUDED(health_mutex_);
  // Makes the listener report NOT_SERVING from now on, whatever the replicas'
  // state is.
  void StopServing() ABSL_LOCKS_EXCLUDED(health_mutex_);
  void SetServing(bool serving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(health_mutex_);
  // Waits until clients have left or make no more calls, but at most for about
  // max_connection_age_, and never longer than 0.6 `patience`.
  void WaitForClientsToLeave(absl::Duration patience);

  std::shared_ptr<const model::Tokenizer> tokenizer_;
  std::function<void(bool serving)> on_health_;
  absl::Duration max_connection_age_;
  const std::shared_ptr<router::ClientCalls> calls_ =
      std::make_shared<router::ClientCalls>();
  const std::shared_ptr<NameCheck> name_check_;
  const std::shared_ptr<router::CallbackGate> report_gate_ =
      std::make_shared<router::CallbackGate>();
  // The order of the members matters: they are destroyed from the last to
  // the first.
  std::unique_ptr<router::RouterMetrics> metrics_;
  std::unique_ptr<router::AccessLogSink> log_;
  std::unique_ptr<router::TimerThread> timers_;
  std::unique_ptr<router::ReplicaRegistry> registry_;
  std::unique_ptr<router::Discovery> discovery_;
  std::unique_ptr<router::RouterCore> core_;
  router::Facades facades_;
  std::unique_ptr<base::GrpcServer> server_;
  base::Mutex health_mutex_;
  bool health_follows_ ABSL_GUARDED_BY(health_mutex_) = false;
};

// Loads the tokenizer of a model folder; null if the folder has none.
absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(
    const std::string& folder);

}  // namespace kvasir::cli
