// A worker as `kvasir worker` and `kvasir serve` run it: loaded model, engine,
// kvasir.v1 listener, metrics.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/grpc_server.h"
#include "cli/loaded_model.h"
#include "cli/options.h"
#include "cli/runtime/admin_service.h"
#include "cli/runtime/device_metrics.h"
#include "prometheus/collectable.h"
#include "worker/engine/engine.h"
#include "worker/engine/metrics.h"
#include "worker/service/server.h"

namespace kvasir::cli {

struct WorkerRuntimeOptions {
  ModelOptions model;
  EngineFlags engine;
  base::ListenAddress listen;
  std::shared_ptr<grpc::ServerCredentials> credentials;  // null: plain text
  absl::Duration drain_timeout = absl::Seconds(30);
  std::string tokenizer_hash;  // empty: the model has no tokenizer
  // Called once, from an engine thread, when the engine is broken for good:
  // the process should exit with a failure.
  std::function<void(const std::string& why)> on_fatal;
  std::function<void(int64_t done, int64_t total)> progress;
};

// What executor and cache had done before the worker served.
struct WarmUp {
  worker::ExecutorTotals executor;
  cache::KvCacheStats cache;
};

// Threads: Create, Drain and the destructor from one.
class WorkerRuntime {
 public:
  // Loads, warms up, listens and is ready.
  static absl::StatusOr<std::unique_ptr<WorkerRuntime>> Create(
      WorkerRuntimeOptions options);
  ~WorkerRuntime();

  const std::string& target() const { return server_->target(); }
  const LoadedModel& model() const { return *model_; }
  std::shared_ptr<prometheus::Collectable> metrics() const {
    return metrics_->registry();
  }
  std::shared_ptr<prometheus::Collectable> device_metrics() const {
    return device_metrics_;
  }

  // Refuses new requests, waits for running ones, aborts the rest.
  DrainOutcome Drain(absl::Duration deadline);

 private:
  WorkerRuntime() = default;
  kvasir::v1::WorkerInfo Info(const WorkerRuntimeOptions& options) const;

  WarmUp warm_up_;
  // Destroyed from last to first: listener, engine, model.
  std::unique_ptr<LoadedModel> model_;
  std::shared_ptr<worker::WorkerMetrics> metrics_;
  // Scraped for longer than the model is there.
  std::shared_ptr<DeviceMetrics> device_metrics_;
  std::unique_ptr<worker::Engine> engine_;
  std::unique_ptr<worker::WorkerServer> server_;
};

}  // namespace kvasir::cli
