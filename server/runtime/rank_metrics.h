// Metrics of one rank in a tensor-parallel group (docs/metrics.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "plan/tp_shard.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "worker/collective/collective.h"

namespace kvasir::cli {

struct RankConstants {
  plan::TpShard shard;
  std::string collective;
  std::string device;
  int64_t weight_bytes = 0;
  int64_t weight_read_bytes = 0;  // bytes read from the checkpoint
  int64_t kv_pool_bytes = 0;
};

// Threads: its methods may be called from any thread.
class RankMetrics final : public prometheus::Collectable {
 public:
  RankMetrics(RankConstants constants, const worker::Collective* collective)
      : constants_(std::move(constants)), collective_(collective) {}

  // From now on, nothing is collected. Call it before the collective
  // is destroyed.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const RankConstants constants_;
  mutable base::Mutex mutex_;
  const worker::Collective* collective_ ABSL_GUARDED_BY(mutex_);
};

// Collects the metrics of another source and adds the label `rank` to
// each series.
class OfRank final : public prometheus::Collectable {
 public:
  OfRank(int64_t rank, std::shared_ptr<prometheus::Collectable> source)
      : rank_(std::to_string(rank)), source_(std::move(source)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::string rank_;
  const std::shared_ptr<prometheus::Collectable> source_;
};

}  // namespace kvasir::cli
