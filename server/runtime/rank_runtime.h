// A rank other than 0 (`kvasir rank`): the loaded model, a thread that runs the
// group's steps, and metrics.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "prometheus/collectable.h"
#include "server/flags/options.h"
#include "server/ranks/rank_group.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/device_metrics.h"
#include "server/runtime/node.h"
#include "server/runtime/rank_metrics.h"
#include "worker/load/loaded_model.h"

namespace kvasir::cli {

struct RankRuntimeOptions {
  ModelOptions model;
  EngineFlags engine;
  RankGroupSettings group;
  JoinInfo join;
  LocalRanks* children = nullptr;  // passed to FollowerGroup
  // Called from one of the runtime's threads when the leader has drained
  // the group.
  std::function<void()> on_drained;
};

class RankRuntime final : public Node {
 public:
  // Joins the group, loads the model, and begins to run steps.
  static absl::StatusOr<std::unique_ptr<RankRuntime>> Create(
      RankRuntimeOptions options);
  ~RankRuntime() override;

  NodeReport Report() const override { return {.leader = leader_}; }
  std::string model_name() const override { return model_->source().name; }
  MetricsSources Metrics() const override;

  // Asks the leader to finish its requests and to end the group, and waits
  // for this a little longer than `deadline`. If the group does not end in
  // time or has failed, calls the group's on_fatal. The outcome counts no
  // requests, because requests belong to the leader.
  DrainOutcome Drain(absl::Duration deadline) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  RankRuntime() = default;
  absl::Status DrainGroup(absl::Duration deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  bool WaitEnded(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  std::string leader_;
  std::function<void(const std::string& why)> on_fatal_;
  std::unique_ptr<FollowerGroup> group_;
  std::unique_ptr<LoadedModel> model_;
  // Shared, because metrics may be collected after this object is destroyed.
  std::shared_ptr<DeviceMetrics> device_metrics_;
  std::shared_ptr<RankMetrics> rank_metrics_;
  std::thread steps_;
  base::Mutex mutex_;
  base::CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  // the result of the thread steps_, set when it has ended
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
