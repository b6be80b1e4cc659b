#include "worker/engine/metrics.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/net/metrics_server.h"

namespace kvasir::worker {
namespace {

const char* ReasonName(kvasir::v1::FinishReason reason) {
  switch (reason) {
    case kvasir::v1::FINISH_STOP:
      return "stop";
    case kvasir::v1::FINISH_LENGTH:
      return "length";
    case kvasir::v1::FINISH_ABORT:
      return "abort";
    default:
      return "unknown";
  }
}

const char* RefusalName(kvasir::v1::Refusal::Reason reason) {
  switch (reason) {
    case kvasir::v1::Refusal::REFUSAL_UNSPECIFIED:
      return "invalid";
    case kvasir::v1::Refusal::RETRY_ELSEWHERE:
      return "retry_elsewhere";
    case kvasir::v1::Refusal::NEVER_FITS:
      return "never_fits";
    case kvasir::v1::Refusal::DRAINING:
      return "draining";
    default:
      return "unknown";
  }
}

}  // namespace

prometheus::Gauge& WorkerMetrics::AddGauge(const char* family, const char* help,
                                           const prometheus::Labels& labels) {
  return prometheus::BuildGauge()
      .Name(family)
      .Help(help)
      .Register(*registry_)
      .Add(labels);
}

prometheus::Counter& WorkerMetrics::AddCounter(
    const char* family, const char* help, const prometheus::Labels& labels) {
  return prometheus::BuildCounter()
      .Name(family)
      .Help(help)
      .Register(*registry_)
      .Add(labels);
}

prometheus::Histogram& WorkerMetrics::AddHistogram(
    const char* family, const char* help, const std::vector<double>& buckets) {
  return prometheus::BuildHistogram()
      .Name(family)
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
                        "Requests that wait, and preempted sequences")),
      usage_ratio_(AddGauge("kvasir_kv_cache_usage_ratio",
                            "Pages held by sequences / all pages, 0 to 1")),
      queued_tokens_(AddGauge("kvasir_queued_prompt_tokens",
                              "Tokens to prefill for all requests that wait")),
      draining_(
          AddGauge("kvasir_worker_draining", "1 while the worker drains")),
      steps_(AddCounter("kvasir_steps_total", "Forward passes")),
      prompt_tokens_(AddCounter("kvasir_prompt_tokens_total",
                                "Prompt tokens of requests that ended")),
      cached_tokens_(AddCounter("kvasir_prompt_tokens_cached_total",
                                "Prompt tokens taken from the prefix index")),
      generation_tokens_(
          AddCounter("kvasir_generation_tokens_total", "Tokens sampled")),
      preemptions_(AddCounter("kvasir_num_preemptions_total",
                              "Sequences preempted because pages ran out")),
      preemptions_by_copy_(AddCounter("kvasir_preemptions_by_kind_total",
                                      "Preemptions by kind: copy (the cache "
                                      "goes to the host pool and back) "
                                      "or recompute",
                                      {{"kind", "copy"}})),
      preemptions_by_recompute_(AddCounter("kvasir_preemptions_by_kind_total",
                                           "", {{"kind", "recompute"}})),
      time_to_first_token_(AddHistogram("kvasir_time_to_first_token_seconds",
                                        "Arrival to first token",
                                        base::TimeToFirstTokenBuckets())),
      inter_token_(AddHistogram("kvasir_inter_token_latency_seconds",
                                "Time between two tokens of a sequence",
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
  // Every series that can occur is created at the start with 0, so that
  // Prometheus can compute rates from the first event on.
  for (const kvasir::v1::FinishReason reason :
       {kvasir::v1::FINISH_STOP, kvasir::v1::FINISH_LENGTH,
        kvasir::v1::FINISH_ABORT}) {
    success_.Add({{"finished_reason", ReasonName(reason)}});
  }
  for (const kvasir::v1::Refusal::Reason reason :
       {kvasir::v1::Refusal::REFUSAL_UNSPECIFIED,
        kvasir::v1::Refusal::RETRY_ELSEWHERE, kvasir::v1::Refusal::NEVER_FITS,
        kvasir::v1::Refusal::DRAINING}) {
    refused_.Add({{"reason", RefusalName(reason)}});
  }
  for (const absl::StatusCode code :
       {absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kInternal,
        absl::StatusCode::kInvalidArgument,
        absl::StatusCode::kResourceExhausted, absl::StatusCode::kUnavailable}) {
    failure_.Add({{"code", absl::StatusCodeToString(code)}});
  }
  AddSampled();
  AddExperts(constants.num_experts);
  AddConstants(constants);
}

template <typename Number>
void WorkerMetrics::Sample(Number CacheSample::*field, const char* family,
                           const char* help, const prometheus::Labels& labels) {
  const auto read = [field](const CacheSample& sample) {
    return static_cast<double>(sample.*field);
  };
  if (!absl::EndsWith(family, "_total")) {
    sampled_.push_back(
        [read, &gauge = AddGauge(family, help, labels)](
            const CacheSample& sample) { gauge.Set(read(sample)); });
    return;
  }
  sampled_.push_back([read, &counter = AddCounter(family, help, labels)](
                         const CacheSample& sample) {
    const double more = read(sample) - counter.Value();
    if (more > 0) counter.Increment(more);
  });
}

void WorkerMetrics::AddSampled() {
  Sample(&CacheSample::free_pages, "kvasir_kv_cache_free_pages",
         "Pages that no sequence holds and the prefix index does not name");
  Sample(&CacheSample::used_pages, "kvasir_kv_cache_used_pages",
         "Pages held by at least one sequence");
  Sample(&CacheSample::cached_pages, "kvasir_kv_cache_cached_pages",
         "Pages that only the prefix index holds (reusable)");
  Sample(&CacheSample::leaked_pages, "kvasir_cache_leaked_pages",
         "Pages held although no request is live; not 0 is a bug");
  Sample(&CacheSample::logical_tokens, "kvasir_kv_cache_logical_tokens",
         "Tokens that the live sequences have seen");
  Sample(&CacheSample::physical_tokens, "kvasir_kv_cache_physical_tokens",
         "Slots that the live sequences hold");
  Sample(&CacheSample::used_bytes, "kvasir_kv_cache_used_bytes",
         "Bytes of pages held by at least one sequence");
  Sample(
      &CacheSample::padding_bytes, "kvasir_kv_cache_waste_bytes",
      "Bytes of held pages that hold nothing, by kind: padding between "
      "regions, unfilled slots, side pages beyond what the layers keep there",
      {{"kind", "padding"}});
  Sample(&CacheSample::unfilled_bytes, "kvasir_kv_cache_waste_bytes", "",
         {{"kind", "unfilled"}});
  Sample(&CacheSample::side_unused_bytes, "kvasir_kv_cache_waste_bytes", "",
         {{"kind", "side"}});
  Sample(&CacheSample::side_bytes, "kvasir_kv_cache_side_bytes",
         "Bytes of held side pages: what sequences keep beside their tokens "
         "(exact rows)");
  Sample(&CacheSample::host_used_bytes, "kvasir_host_pool_used_bytes",
         "Bytes of the host pool that hold preempted sequences");
  Sample(&CacheSample::bytes_to_host, "kvasir_host_pool_copied_bytes_total",
         "Bytes of pages copied between the pool and the host pool, by "
         "direction (out, in)",
         {{"direction", "out"}});
  Sample(&CacheSample::bytes_from_host, "kvasir_host_pool_copied_bytes_total",
         "", {{"direction", "in"}});
  Sample(&CacheSample::prefix_query_tokens,
         "kvasir_prefix_cache_query_tokens_total",
         "Prompt tokens looked up in the prefix index");
  Sample(&CacheSample::prefix_hit_tokens,
         "kvasir_prefix_cache_hit_tokens_total",
         "Prompt tokens found in the prefix index");
  Sample(&CacheSample::window_pages_reclaimed,
         "kvasir_window_pages_reclaimed_total",
         "Pages given back because a sliding window passed them");
  Sample(&CacheSample::evictions, "kvasir_evictions_total",
         "Times that a sequence gave up slots of a group of layers");
  Sample(&CacheSample::slots_evicted, "kvasir_evicted_slots_total",
         "Slots that evictions gave up");
  Sample(&CacheSample::eviction_pages_reclaimed,
         "kvasir_eviction_pages_reclaimed_total",
         "Pages given back because slots were evicted");
  Sample(&CacheSample::scored_by_weights, "kvasir_eviction_scored_tokens_total",
         "Tokens that added their attention to the scores of slots, by how: "
         "kept (attention kept its weights), again (keys scored a second "
         "time), no_room (scored again because there was no room for weights)",
         {{"how", "kept"}});
  Sample(&CacheSample::scored_again, "kvasir_eviction_scored_tokens_total", "",
         {{"how", "again"}});
  Sample(&CacheSample::scored_without_room,
         "kvasir_eviction_scored_tokens_total", "", {{"how", "no_room"}});
  Sample(&CacheSample::eviction_seconds, "kvasir_eviction_seconds_total",
         "Seconds spent on choosing the slots that stay and on moving them");
  Sample(&CacheSample::reconstruction_flops,
         "kvasir_reconstruction_flops_total",
         "Operations that lifted and rotated cached keys");
  Sample(&CacheSample::static_codes, "kvasir_kv_static_codes_total",
         "Codes written with the channel's own range");
  Sample(&CacheSample::clamped_codes, "kvasir_kv_clamped_codes_total",
         "Codes of kvasir_kv_static_codes_total that the range clamped");
  Sample(&CacheSample::captured_steps, "kvasir_steps_captured_total",
         "Steps that were captured as graphs");
  Sample(&CacheSample::replayed_steps, "kvasir_steps_replayed_total",
         "Steps that were launched by a graph");
}

void WorkerMetrics::AddExperts(int64_t count) {
  for (size_t expert = 0; expert < static_cast<size_t>(count); ++expert) {
    sampled_.push_back([expert,
                        &counter = AddCounter(
                            "kvasir_expert_tokens_total",
                            "Tokens that an expert has run, summed over layers",
                            {{"expert", absl::StrCat(expert)}})](
                           const CacheSample& sample) {
      if (expert >= sample.expert_tokens.size()) return;
      const double more =
          static_cast<double>(sample.expert_tokens[expert]) - counter.Value();
      if (more > 0) counter.Increment(more);
    });
  }
}

void WorkerMetrics::AddConstants(const WorkerConstants& constants) {
  AddGauge("kvasir_build_info", "Always 1; the labels say what runs here",
           {{"version", constants.version},
            {"model_name", constants.model_name},
            {"model_type", constants.model_type},
            {"invariance", constants.invariance},
            {"device", constants.device}})
      .Set(1);
  AddGauge("kvasir_cache_config_info",
           "Always 1; slots per page and pages of the pool",
           {{"block_size", absl::StrCat(constants.page_tokens)},
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
           "Bytes that a sequence takes in addition to its tokens")
      .Set(constants.kv_fixed_bytes_per_sequence);
  AddGauge("kvasir_kv_cache_compression_ratio",
           "Bytes of a dense bf16 cache / ours, per token")
      .Set(constants.kv_compression_ratio);
  AddGauge("kvasir_kv_plan_check_kl",
           "Divergence of the plan's predictions from those with a dense "
           "cache, in nats a token; NaN if they were not compared")
      .Set(constants.plan_check_kl);
  for (const WorkerConstants::LayerSide& side : constants.layers) {
    AddGauge("kvasir_kv_layer_info",
             "Always 1; how each layer's keys and values are cached",
             {{"layer", absl::StrCat(side.layer)},
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
  for (const auto& set : sampled_) set(sample);
}

}  // namespace kvasir::worker
