// A running worker (`kvasir worker`, `kvasir serve`): the loaded model, the
// engine, the kvasir.v1 listener and metrics.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/grpc_server.h"
#include "model/tokenizer/tokenizer.h"
#include "prometheus/collectable.h"
#include "server/flags/options.h"
#include "server/ranks/rank_group.h"
#include "server/runtime/device_metrics.h"
#include "server/runtime/node.h"
#include "server/runtime/rank_metrics.h"
#include "worker/engine/engine.h"
#include "worker/engine/metrics.h"
#include "worker/load/loaded_model.h"
#include "worker/load/model_options.h"
#include "worker/service/server.h"

namespace kvasir::cli {

// Checks the flags; INVALID_ARGUMENT if they contradict each other.
absl::Status CheckStepFlags(const EngineFlags& flags,
                            const ModelOptions& model);
// Returns the load request of a worker or a rank. The caller must set its
// field `group`.
LoadRequest LoadRequestOf(const ModelOptions& model, const EngineFlags& flags);
RankConstants RankConstantsOf(const LoadedModel& model, plan::TpShard shard,
                              const std::string& collective);

struct WorkerRuntimeOptions {
  ModelOptions model;
  EngineFlags engine;
  // Null if one process runs the model.
  std::unique_ptr<LeaderGroup> group;
  // Returns the address to listen on. It is called only after the model is
  // loaded, because it may create a folder for sockets, which a failed load
  // must not leave on the disk.
  std::function<absl::StatusOr<base::ListenAddress>()> listen;
  std::shared_ptr<grpc::ServerCredentials> credentials;  // null: plain text
  std::shared_ptr<const model::Tokenizer> tokenizer;     // may be null
  // Called from a thread of the engine if the engine has failed permanently,
  // and by Drain if the group could not be drained. The process should then
  // exit with a failure.
  std::function<void(const std::string& why)> on_fatal;
  std::function<void(int64_t done, int64_t total)> progress;
};

// The counts of executor and cache at the end of the warm-up, which the
// metrics subtract.
struct WarmUp {
  worker::ExecutorTotals executor;
  cache::KvCacheStats cache;
};

class WorkerRuntime final : public Node {
 public:
  // Loads the model, warms up and listens.
  static absl::StatusOr<std::unique_ptr<WorkerRuntime>> Create(
      WorkerRuntimeOptions options);
  ~WorkerRuntime() override;

  const std::string& target() const { return server_->target(); }
  const LoadedModel& model() const { return *model_; }
  NodeReport Report() const override;
  std::string model_name() const override { return model_->source().name; }
  // The worker's metrics, including those of the device and, in a group, of
  // the rank.
  MetricsSources Metrics() const override;
  DrainOutcome Drain(absl::Duration deadline) override;

 private:
  WorkerRuntime() = default;
  std::string NumericsId() const;
  kvasir::v1::WorkerInfo Info(const WorkerRuntimeOptions& options) const;

  std::function<void(const std::string& why)> on_fatal_;
  WarmUp warm_up_;
  std::vector<int32_t> end_tokens_;
  // The order of the members matters: they are destroyed from the last to the
  // first (listener, engine, model, group).
  std::unique_ptr<LeaderGroup> group_;
  std::unique_ptr<LoadedModel> model_;
  std::shared_ptr<worker::WorkerMetrics> metrics_;
  // Shared, because metrics may be collected after this object is destroyed.
  std::shared_ptr<DeviceMetrics> device_metrics_;
  std::shared_ptr<RankMetrics> rank_metrics_;  // null: no group
  // the executor that runs steps on all ranks; null if there is no group
  std::unique_ptr<worker::Executor> executor_;
  std::unique_ptr<worker::Engine> engine_;
  std::unique_ptr<worker::WorkerServer> server_;
};

}  // namespace kvasir::cli
