// A worker's Prometheus metrics (listed in docs/metrics.md). The engine's
// events update counters and histograms. The cache is sampled on the engine's
// thread, because no other thread may use the cache.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "worker/engine/engine_events.h"

namespace kvasir::worker {

// Counters of cache and executor at one point in time. Counters marked "since
// start" only grow.
struct CacheSample {
  int64_t free_pages = 0;    // neither used nor cached
  int64_t used_pages = 0;    // held by at least one sequence
  int64_t cached_pages = 0;  // not used, but contain cached prefixes
  int64_t leaked_pages = 0;  // pages in use while there is no request
  int64_t logical_tokens = 0;
  int64_t physical_tokens = 0;
  int64_t used_bytes = 0;         // bytes of used pages
  int64_t padding_bytes = 0;      // included in used_bytes: padding in pages
  int64_t unfilled_bytes = 0;     // included in used_bytes: unused slots
  int64_t side_bytes = 0;         // included in used_bytes: pages of exact rows
  int64_t side_unused_bytes = 0;  // included in side_bytes: not filled
  int64_t host_used_bytes = 0;    // in the host pool, by preempted sequences
  int64_t bytes_to_host = 0;      // since start
  int64_t bytes_from_host = 0;    // since start
  int64_t prefix_query_tokens = 0;       // since start
  int64_t prefix_hit_tokens = 0;         // since start
  int64_t window_pages_reclaimed = 0;    // since start
  int64_t evictions = 0;                 // since start, summed over page groups
  int64_t slots_evicted = 0;             // since start
  int64_t eviction_pages_reclaimed = 0;  // since start
  // The next four members are copied from ExecutorTotals (since start).
  int64_t scored_by_weights = 0;
  int64_t scored_again = 0;
  int64_t scored_without_room = 0;
  double eviction_seconds = 0;
  double reconstruction_flops = 0;  // since start
  int64_t static_codes = 0;         // since start
  int64_t clamped_codes = 0;        // since start, included in static_codes
  int64_t captured_steps = 0;       // since start
  int64_t replayed_steps = 0;       // since start
  // ExecutorTotals::expert_tokens: the tokens that each expert has run since
  // the start.
  std::vector<int64_t> expert_tokens;
};

// Values that do not change after the start.
struct WorkerConstants {
  std::string version;
  std::string model_name;
  std::string model_type;
  std::string invariance;  // as returned by InvarianceName
  std::string device;      // as returned by kernels::Device::name
  int64_t max_model_len = 0;
  int64_t num_experts = 0;
  int64_t page_tokens = 0;
  int64_t total_pages = 0;
  int64_t kv_pool_bytes = 0;    // as counted by the allocator
  int64_t host_pool_bytes = 0;  // as counted by the allocator
  int64_t weight_bytes = 0;     // as counted by the allocator
  double kv_bytes_per_token = 0;
  double kv_fixed_bytes_per_sequence = 0;
  double kv_compression_ratio = 0;
  // PlanCheck::kl, the plan's divergence from an uncompressed cache. NaN if the
  // plan was not compared.
  double plan_check_kl = std::numeric_limits<double>::quiet_NaN();
  struct LayerSide {
    int64_t layer = 0;
    std::string side;    // "key" or "value"
    std::string method;  // how keys or values are stored, for example "full"
    int64_t rank = 0;    // channels per token, of all latents together
    std::string bits;    // for example "bf16", "4" or "8,4,4,4,2,2,0,0"
  };
  std::vector<LayerSide> layers;
};

// Exports the engine's events and samples of the cache as Prometheus metrics.
// Threads: the engine's thread calls OnStep, OnRequestEnd and OnLoad. Any
//   thread may call OnRefused and the registry's Collect.
class WorkerMetrics final : public EngineObserver, public LoadListener {
 public:
  // `sample_cache` is called on the engine's thread, between steps. While there
  // are requests, it is called at most once in kCacheSampleInterval, because it
  // visits every sequence.
  static constexpr absl::Duration kCacheSampleInterval =
      absl::Milliseconds(100);
  WorkerMetrics(WorkerConstants constants,
                std::function<CacheSample()> sample_cache,
                const base::Clock* clock = &base::Clock::Real());

  void OnStep(const StepStats& step) override;
  void OnRequestEnd(const RequestSummary& summary) override;
  void OnRefused(const Refusal& why) override;
  void OnLoad(const LoadSnapshot& load) override;

  // The registry to export through a metrics server.
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

 private:
  // Adds one series to the family. Only the help text passed with a family's
  // first series is used.
  prometheus::Gauge& AddGauge(const char* family, const char* help,
                              const prometheus::Labels& labels = {});
  prometheus::Counter& AddCounter(const char* family, const char* help,
                                  const prometheus::Labels& labels = {});
  prometheus::Histogram& AddHistogram(const char* family, const char* help,
                                      const std::vector<double>& buckets);
  // Exports a field of CacheSample as a metric family. If the name ends in
  // `_total`, the family is a counter, and the field must be a total since the
  // start. Otherwise the family is a gauge.
  template <typename Number>
  void Sample(Number CacheSample::*field, const char* family, const char* help,
              const prometheus::Labels& labels = {});
  void AddSampled();
  void AddExperts(int64_t count);
  void AddConstants(const WorkerConstants& constants);
  void SetCache(bool at_rest);

  const std::function<CacheSample()> sample_cache_;
  const base::Clock* const clock_;
  absl::Time cache_sampled_ = absl::InfinitePast();
  const std::shared_ptr<prometheus::Registry> registry_;

  std::vector<std::function<void(const CacheSample&)>> sampled_;
  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Gauge& usage_ratio_;
  prometheus::Gauge& queued_tokens_;
  prometheus::Gauge& draining_;
  prometheus::Counter& steps_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& cached_tokens_;
  prometheus::Counter& generation_tokens_;
  prometheus::Counter& preemptions_;
  prometheus::Counter& preemptions_by_copy_;
  prometheus::Counter& preemptions_by_recompute_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& inter_token_;
  prometheus::Histogram& end_to_end_;
  prometheus::Histogram& queue_time_;
  prometheus::Histogram& prefill_time_;
  prometheus::Histogram& decode_time_;
  prometheus::Histogram& request_prompt_tokens_;
  prometheus::Histogram& request_generation_tokens_;
  prometheus::Histogram& step_schedule_;
  prometheus::Histogram& step_execute_;
  prometheus::Histogram& step_tokens_;
  prometheus::Family<prometheus::Counter>& success_;
  prometheus::Family<prometheus::Counter>& failure_;
  prometheus::Family<prometheus::Counter>& refused_;
};

}  // namespace kvasir::worker
