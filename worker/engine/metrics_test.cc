#include "worker/engine/metrics.h"

#include <string>

#include "absl/container/flat_hash_map.h"
#include "gtest/gtest.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"
#include "worker/engine/vllm_metrics.h"

namespace kvasir::worker {
namespace {

std::string Text(const prometheus::Collectable& source) {
  return prometheus::TextSerializer().Serialize(source.Collect());
}

class WorkerMetricsTest : public ::testing::Test {
 protected:
  WorkerMetricsTest()
      : metrics_(
            {.version = "1.2.3",
             .model_name = "tiny",
             .model_type = "llama",
             .invariance = "bits",
             .device = "cpu",
             .max_model_len = 1024,
             .num_experts = 3,
             .page_tokens = 64,
             .total_pages = 10,
             .kv_pool_bytes = 12345,
             .host_pool_bytes = 777,
             .layers = {{0, "key", "full", 256, "bf16"}}},
            [this] {
              ++samples_taken_;
              return sample_;
            },
            &clock_) {}

  base::ManualClock clock_;
  CacheSample sample_;
  int samples_taken_ = 0;
  WorkerMetrics metrics_;
};

TEST_F(WorkerMetricsTest, TheGaugesShowTheLoadThatTheEngineReports) {
  metrics_.OnLoad(
      {.running = 3, .waiting = 2, .free_pages = 4, .total_pages = 10});
  const std::string text = Text(*metrics_.registry());
  EXPECT_NE(text.find("\nkvasir_num_requests_running 3\n"), std::string::npos);
  EXPECT_NE(text.find("\nkvasir_num_requests_waiting 2\n"), std::string::npos);
  EXPECT_NE(text.find("\nkvasir_kv_cache_usage_ratio 0.6\n"),
            std::string::npos);
  EXPECT_NE(text.find("\nkvasir_kv_cache_pool_bytes 12345\n"),
            std::string::npos);
}

TEST_F(WorkerMetricsTest,
       SamplingAnUnchangedCacheTotalTwiceAddsItToTheCounterOnce) {
  sample_.prefix_hit_tokens = 5;
  metrics_.OnLoad({});
  metrics_.OnLoad({});
  EXPECT_NE(Text(*metrics_.registry())
                .find("\nkvasir_prefix_cache_hit_tokens_total 5\n"),
            std::string::npos);
}

TEST_F(WorkerMetricsTest,
       TheMetricsShowTheBytesOfTheCacheAndTheExecutorsCounters) {
  sample_.used_bytes = 4096;
  sample_.padding_bytes = 96;
  sample_.unfilled_bytes = 1000;
  sample_.side_bytes = 512;
  sample_.side_unused_bytes = 12;
  sample_.reconstruction_flops = 0x1p40;
  sample_.static_codes = 500;
  sample_.clamped_codes = 3;
  sample_.captured_steps = 2;
  sample_.replayed_steps = 70;
  metrics_.OnLoad({});
  const std::string text = Text(*metrics_.registry());
  for (const char* line :
       {"kvasir_kv_cache_used_bytes 4096\n",
        "kvasir_kv_cache_waste_bytes{kind=\"padding\"} 96\n",
        "kvasir_kv_cache_waste_bytes{kind=\"unfilled\"} 1000\n",
        "kvasir_kv_cache_waste_bytes{kind=\"side\"} 12\n",
        "kvasir_kv_cache_side_bytes 512\n",
        "kvasir_reconstruction_flops_total 1099511627776\n",
        "kvasir_kv_static_codes_total 500\n",
        "kvasir_kv_clamped_codes_total 3\n", "kvasir_steps_captured_total 2\n",
        "kvasir_steps_replayed_total 70\n"}) {
    EXPECT_NE(text.find(std::string("\n") + line), std::string::npos)
        << line << text;
  }
}

TEST_F(WorkerMetricsTest, EveryExpertHasASeriesFromTheStart) {
  metrics_.OnLoad({});
  EXPECT_NE(Text(*metrics_.registry())
                .find("\nkvasir_expert_tokens_total{expert=\"2\"} 0\n"),
            std::string::npos);
  sample_.expert_tokens = {5, 0, 7};
  metrics_.OnLoad({});
  const std::string text = Text(*metrics_.registry());
  for (const char* line : {"kvasir_expert_tokens_total{expert=\"0\"} 5\n",
                           "kvasir_expert_tokens_total{expert=\"1\"} 0\n",
                           "kvasir_expert_tokens_total{expert=\"2\"} 7\n"}) {
    EXPECT_NE(text.find(std::string("\n") + line), std::string::npos)
        << line << text;
  }
}

TEST_F(WorkerMetricsTest,
       TheMetricsShowPreemptionsByKindAndTheBytesOfTheHostPool) {
  metrics_.OnStep({.preemptions = 3, .preemptions_by_copy = 2});
  sample_.host_used_bytes = 555;
  sample_.bytes_to_host = 2000;
  sample_.bytes_from_host = 1000;
  metrics_.OnLoad({});
  const std::string text = Text(*metrics_.registry());
  for (const char* line :
       {"kvasir_num_preemptions_total 3\n",
        "kvasir_preemptions_by_kind_total{kind=\"copy\"} 2\n",
        "kvasir_preemptions_by_kind_total{kind=\"recompute\"} 1\n",
        "kvasir_host_pool_bytes 777\n", "kvasir_host_pool_used_bytes 555\n",
        "kvasir_host_pool_copied_bytes_total{direction=\"out\"} 2000\n",
        "kvasir_host_pool_copied_bytes_total{direction=\"in\"} 1000\n"}) {
    EXPECT_NE(text.find(std::string("\n") + line), std::string::npos)
        << line << text;
  }
}

TEST_F(WorkerMetricsTest, TheMetricsCountTheSlotsPagesAndSecondsOfEvictions) {
  sample_.logical_tokens = 1000;
  sample_.physical_tokens = 300;
  sample_.evictions = 4;
  sample_.slots_evicted = 700;
  sample_.eviction_pages_reclaimed = 11;
  sample_.scored_by_weights = 21;
  sample_.scored_again = 500;
  sample_.scored_without_room = 6;
  sample_.eviction_seconds = 0.25;
  metrics_.OnLoad({});
  const std::string text = Text(*metrics_.registry());
  for (const char* line :
       {"kvasir_kv_cache_logical_tokens 1000\n",
        "kvasir_kv_cache_physical_tokens 300\n", "kvasir_evictions_total 4\n",
        "kvasir_evicted_slots_total 700\n",
        "kvasir_eviction_pages_reclaimed_total 11\n",
        "kvasir_eviction_scored_tokens_total{how=\"kept\"} 21\n",
        "kvasir_eviction_scored_tokens_total{how=\"again\"} 500\n",
        "kvasir_eviction_scored_tokens_total{how=\"no_room\"} 6\n",
        "kvasir_eviction_seconds_total 0.25\n"}) {
    EXPECT_NE(text.find(std::string("\n") + line), std::string::npos)
        << line << text;
  }
}

TEST_F(WorkerMetricsTest,
       AnIdleWorkerSamplesTheCacheAtEachEventInsteadOfAtIntervals) {
  const LoadSnapshot busy = {.running = 1};
  for (int i = 0; i < 5; ++i) metrics_.OnStep({.load = busy});
  EXPECT_EQ(samples_taken_, 1);
  clock_.Advance(WorkerMetrics::kCacheSampleInterval);
  metrics_.OnStep({.load = busy});
  metrics_.OnRequestEnd({.reason = kvasir::v1::FINISH_LENGTH});
  EXPECT_EQ(samples_taken_, 2);
  sample_.used_pages = 3;
  metrics_.OnLoad({.waiting = 1});
  EXPECT_EQ(samples_taken_, 2);
  metrics_.OnLoad({});
  EXPECT_EQ(samples_taken_, 3);
  EXPECT_NE(Text(*metrics_.registry()).find("\nkvasir_kv_cache_used_pages 3\n"),
            std::string::npos);
}

TEST_F(WorkerMetricsTest, LatencyAndTokenMetricsCountEveryTokenOfAStep) {
  const absl::Duration gaps[] = {absl::Milliseconds(3), absl::Milliseconds(4)};
  metrics_.OnStep({.decode_sequences = 2,
                   .prefill_tokens = 7,
                   .sampled_tokens = 2,
                   .inter_token = gaps});
  const std::string text = Text(*metrics_.registry());
  EXPECT_NE(text.find("\nkvasir_inter_token_latency_seconds_count 2\n"),
            std::string::npos);
  EXPECT_NE(text.find("\nkvasir_step_tokens_sum 9\n"), std::string::npos);
  EXPECT_NE(text.find("\nkvasir_generation_tokens_total 2\n"),
            std::string::npos);
}

TEST_F(WorkerMetricsTest,
       FinishedRequestsAreCountedByReasonAndFailedOnesByStatus) {
  metrics_.OnRequestEnd(
      {.reason = kvasir::v1::FINISH_LENGTH, .prompt_tokens = 11});
  metrics_.OnRequestEnd({.status = absl::DeadlineExceededError("late")});
  metrics_.OnRefused({.status = absl::ResourceExhaustedError("full"),
                      .reason = kvasir::v1::Refusal::RETRY_ELSEWHERE});
  const std::string text = Text(*metrics_.registry());
  EXPECT_NE(
      text.find("kvasir_request_success_total{finished_reason=\"length\"} 1\n"),
      std::string::npos);
  EXPECT_NE(
      text.find("kvasir_request_failure_total{code=\"DEADLINE_EXCEEDED\"} 1\n"),
      std::string::npos);
  EXPECT_NE(
      text.find(
          "kvasir_requests_refused_total{reason=\"retry_elsewhere\"} 1\n"),
      std::string::npos);
  EXPECT_NE(text.find("\nkvasir_prompt_tokens_total 11\n"), std::string::npos);
}

TEST_F(WorkerMetricsTest,
       DurationsOfPhasesThatARequestDidNotReachAreNotRecorded) {
  metrics_.OnRequestEnd({.status = absl::DeadlineExceededError("in the queue"),
                         .queue = absl::Seconds(2)});
  metrics_.OnRequestEnd({.status = absl::DeadlineExceededError("prefilling"),
                         .queue = absl::Seconds(1),
                         .prefill = absl::Seconds(4)});
  metrics_.OnRequestEnd({.reason = kvasir::v1::FINISH_LENGTH,
                         .prefill = absl::Seconds(3),
                         .decode = absl::Seconds(5)});
  const std::string text = Text(*metrics_.registry());
  for (const char* line : {"kvasir_request_queue_time_seconds_count 3\n",
                           "kvasir_request_queue_time_seconds_sum 3\n",
                           "kvasir_request_prefill_time_seconds_count 2\n",
                           "kvasir_request_prefill_time_seconds_sum 7\n",
                           "kvasir_request_decode_time_seconds_count 1\n",
                           "kvasir_request_decode_time_seconds_sum 5\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

// Tools for vLLM expect one series per metric name.
TEST_F(WorkerMetricsTest, EachVllmMetricHasOneSeriesWithTheModelsName) {
  metrics_.OnLoad({.running = 1, .total_pages = 10});
  const base::VllmMetrics vllm(metrics_.registry(), "tiny");
  absl::flat_hash_map<std::string, size_t> series;
  for (const prometheus::MetricFamily& family : vllm.Collect()) {
    series[family.name] = family.metric.size();
  }
  for (const char* name :
       {"vllm:num_requests_running", "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}) {
    EXPECT_EQ(series[name], 1u) << name;
  }
  EXPECT_NE(Text(vllm).find("vllm:num_requests_running{engine=\"0\",model_name="
                            "\"tiny\"} 1\n"),
            std::string::npos);
}

}  // namespace
}  // namespace kvasir::worker
