// The router's Prometheus metrics, which docs/metrics.md lists. They are
// updated by the events of RouterObserver.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "router/core/observer.h"

namespace kvasir::router {

// Threads: its methods may be called from any thread.
class RouterMetrics final : public RouterObserver {
 public:
  explicit RouterMetrics(const std::string& version);

  void OnRefused(const absl::Status& why) override;
  void OnDispatched(absl::Duration waited) override;
  void OnFirstToken(absl::Duration since_submit) override;
  void OnInterToken(absl::Duration gap, size_t tokens) override;
  void OnRetry(const absl::Status& why) override;
  void OnMove(MoveReason reason, uint64_t tokens) override;
  void OnKeptBytes(int64_t bytes) override;
  void OnReplicasByMoves(MoveStreams moves, size_t replicas) override;
  void OnRequestEnd(const AccessRecord& record) override;
  void OnReplicaState(const std::string& target, ReplicaState state) override;
  void OnReplicaRemoved(const std::string& target) override;
  void OnInFlight(size_t in_flight, size_t queued) override;

  // The metrics server exports this registry.
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

 private:
  void CountStates() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  prometheus::Histogram& AddHistogram(const std::string& name,
                                      const std::string& help,
                                      const std::vector<double>& buckets);
  prometheus::Gauge& AddGauge(const std::string& name, const std::string& help);

  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Counter>& refused_;
  prometheus::Family<prometheus::Counter>& retries_;
  prometheus::Family<prometheus::Counter>& moves_;
  prometheus::Counter& moved_tokens_;
  prometheus::Gauge& kept_bytes_;
  prometheus::Family<prometheus::Gauge>& replica_moves_;
  prometheus::Counter& output_tokens_;
  prometheus::Gauge& in_flight_;
  prometheus::Gauge& queued_;
  prometheus::Family<prometheus::Gauge>& replicas_;
  prometheus::Histogram& dispatch_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& inter_token_;
  prometheus::Histogram& duration_;

  base::Mutex mutex_;
  absl::flat_hash_map<std::string, ReplicaState> states_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
