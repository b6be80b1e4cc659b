// A rank behind the first, as `kvasir rank` runs it: loaded model, the group's
// steps, metrics.
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
#include "server/loaded_model.h"
#include "server/options.h"
#include "server/ranks/rank_group.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/device_metrics.h"
#include "server/runtime/rank_metrics.h"

namespace kvasir::cli {

struct RankRuntimeOptions {
  ModelOptions model;
  EngineFlags engine;
  RankGroupSettings group;
  JoinInfo join;
  LocalRanks* children = nullptr;  // FollowerGroup's
  // From a thread of the runtime's: the leader has drained the group.
  std::function<void()> on_drained;
};

// Threads: Create, Drain and the destructor from one.
class RankRuntime {
 public:
  // Joins, loads, and runs steps from then on.
  static absl::StatusOr<std::unique_ptr<RankRuntime>> Create(
      RankRuntimeOptions options);
  ~RankRuntime();

  const LoadedModel& model() const { return *model_; }
  std::vector<std::shared_ptr<prometheus::Collectable>> metrics() const;

  // The leader is asked to finish its requests, for which it has as long, and
  // to end the group. OK: it has; else what the group ended of, or
  // DEADLINE_EXCEEDED.
  absl::Status Drain(absl::Duration deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  RankRuntime() = default;
  bool WaitEnded(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  std::unique_ptr<FollowerGroup> group_;
  std::unique_ptr<LoadedModel> model_;
  // Scraped for longer than model and group are there.
  std::shared_ptr<DeviceMetrics> device_metrics_;
  std::shared_ptr<RankMetrics> rank_metrics_;
  std::thread steps_;
  base::Mutex mutex_;
  base::CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);  // of steps_, which has ended
};

}  // namespace kvasir::cli
