#include "server/runtime/rank_metrics.h"

#include <utility>

namespace kvasir::cli {

void RankMetrics::Stop() {
  base::MutexLock lock(&mutex_);
  collective_ = nullptr;
}

std::vector<prometheus::MetricFamily> RankMetrics::Collect() const {
  base::MutexLock lock(&mutex_);
  std::vector<prometheus::MetricFamily> families;
  if (collective_ == nullptr) return families;
  const std::string rank = std::to_string(constants_.shard.rank);
  const auto add = [&](const char* name, const char* help,
                       prometheus::MetricType type, double value) {
    prometheus::ClientMetric metric;
    metric.label = {{"rank", rank}};
    metric.gauge.value = metric.counter.value = value;
    families.push_back({name, help, type, {std::move(metric)}});
  };
  using Type = prometheus::MetricType;
  const auto gauge = [&](const char* name, const char* help, int64_t value) {
    add(name, help, Type::Gauge, static_cast<double>(value));
  };
  gauge("kvasir_rank_info",
        "Always 1; the rank, its group's size, its collective and device", 1);
  std::vector<prometheus::ClientMetric::Label>& labels =
      families.back().metric.back().label;
  labels.push_back({"tp_size", std::to_string(constants_.shard.size)});
  labels.push_back({"collective", constants_.collective});
  labels.push_back({"device", constants_.device});
  gauge("kvasir_rank_group_size", "Ranks of the group", constants_.shard.size);
  gauge("kvasir_rank_weight_bytes", "Bytes of weights that the rank holds",
        constants_.weight_bytes);
  gauge("kvasir_rank_weight_read_bytes",
        "Bytes that the rank has read of the checkpoint's tensors",
        constants_.weight_read_bytes);
  gauge("kvasir_rank_kv_cache_pool_bytes",
        "Bytes allocated for pages on the rank", constants_.kv_pool_bytes);
  const worker::CollectiveTotals totals = collective_->totals();
  const auto counter = [&](const char* name, const char* help, double value) {
    add(name, help, Type::Counter, value);
  };
  counter("kvasir_collective_calls_total", "Collectives that are done",
          static_cast<double>(totals.calls));
  counter("kvasir_collective_sent_bytes_total",
          "Bytes that the rank has sent to others in collectives",
          static_cast<double>(totals.sent_bytes));
  counter("kvasir_collective_wait_seconds_total",
          "Time in which a collective waited for other ranks",
          totals.waited_seconds);
  return families;
}

std::vector<prometheus::MetricFamily> OfRank::Collect() const {
  std::vector<prometheus::MetricFamily> families = source_->Collect();
  for (prometheus::MetricFamily& family : families) {
    for (prometheus::ClientMetric& metric : family.metric) {
      metric.label.push_back({"rank", rank_});
    }
  }
  return families;
}

}  // namespace kvasir::cli
