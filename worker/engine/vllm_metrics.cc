#include "worker/engine/vllm_metrics.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {
namespace {

const absl::flat_hash_map<std::string, std::string>& Names() {
  static const auto* const names = new absl::flat_hash_map<std::string,
                                                           std::string>{
      {"kvasir_num_requests_running", "vllm:num_requests_running"},
      {"kvasir_num_requests_waiting", "vllm:num_requests_waiting"},
      {"kvasir_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"},
      {"kvasir_cache_config_info", "vllm:cache_config_info"},
      {"kvasir_num_preemptions_total", "vllm:num_preemptions_total"},
      {"kvasir_prompt_tokens_total", "vllm:prompt_tokens_total"},
      {"kvasir_prompt_tokens_cached_total", "vllm:prompt_tokens_cached_total"},
      {"kvasir_generation_tokens_total", "vllm:generation_tokens_total"},
      {"kvasir_prefix_cache_query_tokens_total",
       "vllm:prefix_cache_queries_total"},
      {"kvasir_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"},
      {"kvasir_request_success_total", "vllm:request_success_total"},
      {"kvasir_time_to_first_token_seconds",
       "vllm:time_to_first_token_seconds"},
      {"kvasir_inter_token_latency_seconds",
       "vllm:inter_token_latency_seconds"},
      {"kvasir_e2e_request_latency_seconds",
       "vllm:e2e_request_latency_seconds"},
      {"kvasir_request_queue_time_seconds", "vllm:request_queue_time_seconds"},
      {"kvasir_request_prefill_time_seconds",
       "vllm:request_prefill_time_seconds"},
      {"kvasir_request_decode_time_seconds",
       "vllm:request_decode_time_seconds"},
      {"kvasir_request_prompt_tokens", "vllm:request_prompt_tokens"},
      {"kvasir_request_generation_tokens", "vllm:request_generation_tokens"},
      {"kvasir_step_tokens", "vllm:iteration_tokens_total"},
  };
  return *names;
}

}  // namespace

VllmMetrics::VllmMetrics(std::shared_ptr<prometheus::Collectable> source,
                         std::string model_name)
    : source_(std::move(source)), model_name_(std::move(model_name)) {}

std::vector<prometheus::MetricFamily> VllmMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> renamed;
  for (prometheus::MetricFamily& family : source_->Collect()) {
    const auto found = Names().find(family.name);
    if (found == Names().end()) continue;
    family.name = found->second;
    for (prometheus::ClientMetric& metric : family.metric) {
      metric.label.insert(metric.label.begin(),
                          {{"engine", "0"}, {"model_name", model_name_}});
    }
    renamed.push_back(std::move(family));
  }
  return renamed;
}

}  // namespace kvasir::base
