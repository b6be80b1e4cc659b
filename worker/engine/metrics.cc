#include "worker/engine/metrics.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/net/metrics_server.h"

namespace kvasir::worker {
namespace {

const char* ReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
  }
  return "unknown";
}

const char* RefusalName(RefusalReason reason) {
  switch (reason) {
    case RefusalReason::kNone:
      return "invalid";
    case RefusalReason::kRetryElsewhere:
      return "retry_elsewhere";
    case RefusalReason::kNeverFits:
      return "never_fits";
    case RefusalReason::kDraining:
      return "draining";
  }
  return "unknown";
}

// Counters of others become Prometheus counters by their difference.
void RaiseTo(prometheus::Counter& counter, double total) {
  const double difference = total - counter.Value();
  if (difference > 0) counter.Increment(difference);
}
void RaiseTo(prometheus::Counter& counter, int64_t total) {
  RaiseTo(counter, static_cast<double>(total));
}

}  // namespace

prometheus::Gauge& WorkerMetrics::AddGauge(const std::string& name,
                                           const std::string& help) {
  return prometheus::BuildGauge()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add({});
}

prometheus::Counter& WorkerMetrics::AddCounter(const std::string& name,
                                               const std::string& help) {
  return prometheus::BuildCounter()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add({});
}

prometheus::Histogram& WorkerMetrics::AddHistogram(
    const std::string& name, const std::string& help,
    const std::vector<double>& buckets) {
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add({}, buckets);
}

WorkerMetrics::WorkerMetrics(WorkerConstants constants,
                             std::function<CacheSample()> sample_cache,
                             const base::Clock* clock)
    : sample_cache_(std::move(sample_cache)),
      clock_(clock),
      registry_(std::make_shared<prometheus::Registry>()),
      running_(AddGauge("kvasir_num_requests_running",
                        "Sequences in the running batch")),
      waiting_(AddGauge("kvasir_num_requests_waiting",
                        "Requests that wait, and sequences preempted")),
      usage_ratio_(AddGauge("kvasir_kv_cache_usage_ratio",
                            "Pages held by sequences / all pages, 0 to 1")),
      queued_tokens_(AddGauge("kvasir_queued_prompt_tokens",
                              "Tokens to prefill of all requests that wait")),
      draining_(AddGauge("kvasir_worker_draining", "1 while draining")),
      pages_free_(AddGauge("kvasir_kv_cache_free_pages",
                           "Pages that nobody holds and nothing indexes")),
      pages_used_(AddGauge("kvasir_kv_cache_used_pages",
                           "Pages held by at least one sequence")),
      pages_cached_(
          AddGauge("kvasir_kv_cache_cached_pages",
                   "Pages that only the prefix index holds (reusable)")),
      leaked_pages_(AddGauge("kvasir_cache_leaked_pages",
                             "Pages held although no request lives; not 0 is "
                             "a bug")),
      logical_tokens_(AddGauge("kvasir_kv_cache_logical_tokens",
                               "Tokens that the live sequences have seen")),
      physical_tokens_(AddGauge("kvasir_kv_cache_physical_tokens",
                                "Slots that the live sequences hold")),
      used_bytes_(AddGauge("kvasir_kv_cache_used_bytes",
                           "Bytes of pages held by at least one sequence")),
      waste_bytes_(prometheus::BuildGauge()
                       .Name("kvasir_kv_cache_waste_bytes")
                       .Help("Bytes of held pages that hold nothing, by kind: "
                             "padding between regions, unfilled slots, room "
                             "of side pages beyond what a sequence keeps there")
                       .Register(*registry_)),
      padding_bytes_(waste_bytes_.Add({{"kind", "padding"}})),
      unfilled_bytes_(waste_bytes_.Add({{"kind", "unfilled"}})),
      side_unused_bytes_(waste_bytes_.Add({{"kind", "side"}})),
      side_bytes_(AddGauge("kvasir_kv_cache_side_bytes",
                           "Bytes of held pages that are not for tokens: what "
                           "sequences keep beside (exact rows)")),
      host_used_bytes_(
          AddGauge("kvasir_host_pool_used_bytes",
                   "Bytes of the host pool that hold preempted sequences")),
      host_copied_(prometheus::BuildCounter()
                       .Name("kvasir_host_pool_copied_bytes_total")
                       .Help("Bytes of pages copied between the pool and the "
                             "host pool, by direction (out, in)")
                       .Register(*registry_)),
      bytes_to_host_(host_copied_.Add({{"direction", "out"}})),
      bytes_from_host_(host_copied_.Add({{"direction", "in"}})),
      prefix_queries_(
          AddCounter("kvasir_prefix_cache_query_tokens_total",
                     "Prompt tokens looked up in the prefix index")),
      prefix_hits_(AddCounter("kvasir_prefix_cache_hit_tokens_total",
                              "Prompt tokens found in the prefix index")),
      window_pages_reclaimed_(
          AddCounter("kvasir_window_pages_reclaimed_total",
                     "Pages given back because a sliding window passed them")),
      evictions_(AddCounter("kvasir_evictions_total",
                            "Times that a sequence gave up slots of a group "
                            "of layers")),
      slots_evicted_(AddCounter("kvasir_evicted_slots_total",
                                "Slots that were given up so")),
      eviction_pages_reclaimed_(
          AddCounter("kvasir_eviction_pages_reclaimed_total",
                     "Pages given back because slots were evicted")),
      scored_(prometheus::BuildCounter()
                  .Name("kvasir_eviction_scored_tokens_total")
                  .Help("Tokens whose attention was added to the scores of a "
                        "group's slots, by how: kept (weights), again (keys "
                        "scored a second time) or no_room (again, for "
                        "weights found no room)")
                  .Register(*registry_)),
      scored_by_weights_(scored_.Add({{"how", "kept"}})),
      scored_again_(scored_.Add({{"how", "again"}})),
      scored_without_room_(scored_.Add({{"how", "no_room"}})),
      eviction_seconds_(AddCounter("kvasir_eviction_seconds_total",
                                   "Choosing the slots that stay and moving "
                                   "them")),
      reconstruction_flops_(
          AddCounter("kvasir_reconstruction_flops_total",
                     "Operations that lifted and rotated cached keys where "
                     "they were read")),
      static_codes_(AddCounter("kvasir_kv_static_codes_total",
                               "Codes written with the channel's own range")),
      clamped_codes_(AddCounter("kvasir_kv_clamped_codes_total",
                                "Of those, codes whose number lay outside of "
                                "the range")),
      captured_steps_(AddCounter("kvasir_steps_captured_total",
                                 "Steps that were captured as graphs")),
      replayed_steps_(AddCounter("kvasir_steps_replayed_total",
                                 "Steps that were launched by a graph")),
      steps_(AddCounter("kvasir_steps_total", "Forward passes")),
      prompt_tokens_(AddCounter("kvasir_prompt_tokens_total",
                                "Prompt tokens of requests that ended")),
      cached_tokens_(AddCounter("kvasir_prompt_tokens_cached_total",
                                "Of those, taken from the prefix index")),
      generation_tokens_(
          AddCounter("kvasir_generation_tokens_total", "Tokens sampled")),
      preemptions_(AddCounter("kvasir_num_preemptions_total",
                              "Sequences put back because pages ran out")),
      preemptions_by_kind_(
          prometheus::BuildCounter()
              .Name("kvasir_preemptions_by_kind_total")
              .Help("The same by what becomes of the cache: copy (to the host "
                    "pool and back) or recompute")
              .Register(*registry_)),
      preemptions_by_copy_(preemptions_by_kind_.Add({{"kind", "copy"}})),
      preemptions_by_recompute_(
          preemptions_by_kind_.Add({{"kind", "recompute"}})),
      time_to_first_token_(AddHistogram("kvasir_time_to_first_token_seconds",
                                        "Arrival to first token",
                                        base::TimeToFirstTokenBuckets())),
      inter_token_(AddHistogram("kvasir_inter_token_latency_seconds",
                                "Between two tokens of a sequence",
                                base::InterTokenBuckets())),
      end_to_end_(AddHistogram("kvasir_e2e_request_latency_seconds",
                               "Arrival to the end of the last sample",
                               base::RequestPhaseBuckets())),
      queue_time_(AddHistogram("kvasir_request_queue_time_seconds",
                               "Arrival to first step",
                               base::RequestPhaseBuckets())),
      prefill_time_(AddHistogram("kvasir_request_prefill_time_seconds",
                                 "First step to first token",
                                 base::RequestPhaseBuckets())),
      decode_time_(AddHistogram("kvasir_request_decode_time_seconds",
                                "First token to the end",
                                base::RequestPhaseBuckets())),
      request_prompt_tokens_(
          AddHistogram("kvasir_request_prompt_tokens", "Prompt tokens",
                       base::TokenCountBuckets(constants.max_model_len))),
      request_generation_tokens_(
          AddHistogram("kvasir_request_generation_tokens", "Output tokens",
                       base::TokenCountBuckets(constants.max_model_len))),
      step_schedule_(AddHistogram("kvasir_step_schedule_seconds",
                                  "The scheduler's share of a step",
                                  base::FineBuckets())),
      step_execute_(AddHistogram("kvasir_step_execute_seconds",
                                 "The executor's share of a step",
                                 base::FineBuckets())),
      step_tokens_(AddHistogram(
          "kvasir_step_tokens", "Tokens run in a step",
          {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384})),
      success_(prometheus::BuildCounter()
                   .Name("kvasir_request_success_total")
                   .Help("Requests that ended, by the reason of sample 0")
                   .Register(*registry_)),
      failure_(prometheus::BuildCounter()
                   .Name("kvasir_request_failure_total")
                   .Help("Requests that failed after admission, by status")
                   .Register(*registry_)),
      refused_(prometheus::BuildCounter()
                   .Name("kvasir_requests_refused_total")
                   .Help("Requests not admitted, by reason")
                   .Register(*registry_)) {
  // Series exist from the start, so that rates have a first point.
  for (const FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort}) {
    success_.Add({{"finished_reason", ReasonName(reason)}});
  }
  for (const RefusalReason reason :
       {RefusalReason::kNone, RefusalReason::kRetryElsewhere,
        RefusalReason::kNeverFits, RefusalReason::kDraining}) {
    refused_.Add({{"reason", RefusalName(reason)}});
  }
  for (const absl::StatusCode code :
       {absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kInternal}) {
    failure_.Add({{"code", absl::StatusCodeToString(code)}});
  }
  AddConstants(constants);
}

void WorkerMetrics::AddConstants(const WorkerConstants& constants) {
  prometheus::BuildGauge()
      .Name("kvasir_build_info")
      .Help("Always 1; what runs here")
      .Register(*registry_)
      .Add({{"version", constants.version},
            {"model_name", constants.model_name},
            {"model_type", constants.model_type},
            {"invariance", constants.invariance},
            {"device", constants.device}})
      .Set(1);
  prometheus::BuildGauge()
      .Name("kvasir_cache_config_info")
      .Help("Always 1; the pool's geometry")
      .Register(*registry_)
      .Add({{"block_size", absl::StrCat(constants.page_tokens)},
            {"num_gpu_blocks", absl::StrCat(constants.total_pages)}})
      .Set(1);
  AddGauge("kvasir_kv_cache_pool_bytes", "Bytes allocated for pages")
      .Set(static_cast<double>(constants.kv_pool_bytes));
  AddGauge("kvasir_host_pool_bytes", "Bytes allocated for preempted sequences")
      .Set(static_cast<double>(constants.host_pool_bytes));
  AddGauge("kvasir_weight_bytes", "Bytes allocated for weights")
      .Set(static_cast<double>(constants.weight_bytes));
  AddGauge("kvasir_kv_cache_bytes_per_token",
           "Marginal bytes of one more token, padding included")
      .Set(constants.kv_bytes_per_token);
  AddGauge("kvasir_kv_cache_fixed_bytes_per_sequence",
           "Bytes a sequence takes beside its tokens")
      .Set(constants.kv_fixed_bytes_per_sequence);
  AddGauge("kvasir_kv_cache_compression_ratio",
           "Bytes of a dense bf16 cache / ours, per token")
      .Set(constants.kv_compression_ratio);
  auto& layers = prometheus::BuildGauge()
                     .Name("kvasir_kv_layer_info")
                     .Help(
                         "Always 1; how each layer's keys and values are "
                         "cached")
                     .Register(*registry_);
  for (const WorkerConstants::LayerSide& side : constants.layers) {
    layers
        .Add({{"layer", absl::StrCat(side.layer)},
              {"side", side.side},
              {"method", side.method},
              {"rank", absl::StrCat(side.rank)},
              {"bits", side.bits}})
        .Set(1);
  }
}

void WorkerMetrics::OnStep(const StepStats& step) {
  steps_.Increment();
  step_schedule_.Observe(absl::ToDoubleSeconds(step.schedule));
  step_execute_.Observe(absl::ToDoubleSeconds(step.execute));
  step_tokens_.Observe(step.prefill_tokens + step.decode_sequences);
  generation_tokens_.Increment(step.sampled_tokens);
  preemptions_.Increment(step.preemptions);
  preemptions_by_copy_.Increment(step.preemptions_by_copy);
  preemptions_by_recompute_.Increment(step.preemptions -
                                      step.preemptions_by_copy);
  for (const absl::Duration time : step.time_to_first_token) {
    time_to_first_token_.Observe(absl::ToDoubleSeconds(time));
  }
  for (const absl::Duration time : step.inter_token) {
    inter_token_.Observe(absl::ToDoubleSeconds(time));
  }
  OnLoad(step.load);
}

void WorkerMetrics::OnRequestEnd(const RequestSummary& summary) {
  if (summary.reason.has_value()) {
    success_.Add({{"finished_reason", ReasonName(*summary.reason)}})
        .Increment();
  } else {
    failure_.Add({{"code", absl::StatusCodeToString(summary.status.code())}})
        .Increment();
  }
  prompt_tokens_.Increment(summary.prompt_tokens);
  cached_tokens_.Increment(summary.cached_tokens);
  end_to_end_.Observe(absl::ToDoubleSeconds(summary.end_to_end));
  queue_time_.Observe(absl::ToDoubleSeconds(summary.queue));
  if (summary.prefill.has_value()) {
    prefill_time_.Observe(absl::ToDoubleSeconds(*summary.prefill));
  }
  if (summary.decode.has_value()) {
    decode_time_.Observe(absl::ToDoubleSeconds(*summary.decode));
  }
  request_prompt_tokens_.Observe(summary.prompt_tokens);
  request_generation_tokens_.Observe(summary.output_tokens);
  SetCache(/*at_rest=*/false);
}

void WorkerMetrics::OnRefused(const Refusal& why) {
  refused_.Add({{"reason", RefusalName(why.reason)}}).Increment();
}

void WorkerMetrics::OnLoad(const LoadSnapshot& load) {
  running_.Set(load.running);
  waiting_.Set(load.waiting);
  queued_tokens_.Set(static_cast<double>(load.queued_tokens));
  draining_.Set(load.draining ? 1 : 0);
  if (load.total_pages > 0) {
    usage_ratio_.Set(1.0 - static_cast<double>(load.free_pages) /
                               static_cast<double>(load.total_pages));
  }
  SetCache(load.running == 0 && load.waiting == 0);
}

void WorkerMetrics::SetCache(bool at_rest) {
  const absl::Time now = clock_->Now();
  if (!at_rest && now < cache_sampled_ + kCacheSampleInterval) return;
  cache_sampled_ = now;
  const CacheSample sample = sample_cache_();
  pages_free_.Set(static_cast<double>(sample.free_pages));
  pages_used_.Set(static_cast<double>(sample.used_pages));
  pages_cached_.Set(static_cast<double>(sample.cached_pages));
  leaked_pages_.Set(static_cast<double>(sample.leaked_pages));
  logical_tokens_.Set(static_cast<double>(sample.logical_tokens));
  physical_tokens_.Set(static_cast<double>(sample.physical_tokens));
  used_bytes_.Set(static_cast<double>(sample.used_bytes));
  padding_bytes_.Set(static_cast<double>(sample.padding_bytes));
  unfilled_bytes_.Set(static_cast<double>(sample.unfilled_bytes));
  side_unused_bytes_.Set(static_cast<double>(sample.side_unused_bytes));
  side_bytes_.Set(static_cast<double>(sample.side_bytes));
  host_used_bytes_.Set(static_cast<double>(sample.host_used_bytes));
  RaiseTo(bytes_to_host_, sample.bytes_to_host);
  RaiseTo(bytes_from_host_, sample.bytes_from_host);
  RaiseTo(prefix_queries_, sample.prefix_query_tokens);
  RaiseTo(prefix_hits_, sample.prefix_hit_tokens);
  RaiseTo(window_pages_reclaimed_, sample.window_pages_reclaimed);
  RaiseTo(evictions_, sample.evictions);
  RaiseTo(slots_evicted_, sample.slots_evicted);
  RaiseTo(eviction_pages_reclaimed_, sample.eviction_pages_reclaimed);
  RaiseTo(scored_by_weights_, sample.scored_by_weights);
  RaiseTo(scored_again_, sample.scored_again);
  RaiseTo(scored_without_room_, sample.scored_without_room);
  RaiseTo(eviction_seconds_, sample.eviction_seconds);
  RaiseTo(reconstruction_flops_, sample.reconstruction_flops);
  RaiseTo(static_codes_, sample.static_codes);
  RaiseTo(clamped_codes_, sample.clamped_codes);
  RaiseTo(captured_steps_, sample.captured_steps);
  RaiseTo(replayed_steps_, sample.replayed_steps);
}

}  // namespace kvasir::worker
