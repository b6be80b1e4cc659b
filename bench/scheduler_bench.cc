#include "bench/scheduler_bench.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "cache/kv_cache.h"
#include "worker/engine/scheduler.h"

namespace kvasir::worker {
namespace {

constexpr int32_t kVocabSize = 32000;

class NullSink final : public EngineSink {
 public:
  void OnAccepted(uint32_t) override {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens&) override {}
  void OnFinished(const kvasir::v1::GenerateEvent::Finish&, bool) override {}
  void OnFailed(const Refusal&) override {}
};

// Fills in the result of a step: token 1 for each sampled token.
void FillResult(const kvasir::v1::StepPlan& plan,
                kvasir::v1::StepResult* result) {
  result->set_step_id(plan.step_id());
  result->mutable_sequences()->Clear();
  for (const auto& step : plan.sequences()) {
    auto* out = result->add_sequences();
    out->set_sequence_id(step.sequence_id());
    out->set_token_id(step.has_sample() ? 1 : -1);
  }
}

Request MakeRequest(uint32_t index, const SchedulerBenchOptions& options) {
  Request request;
  request.request_id = absl::StrCat("bench-", index);
  // All prompts differ, so that no two prompts share a page.
  std::vector<int32_t> ids(options.context_tokens);
  for (uint32_t i = 0; i < options.context_tokens; ++i) {
    ids[i] = static_cast<int32_t>((index * 7919 + i * 31) % kVocabSize);
  }
  ids[0] = static_cast<int32_t>(index % kVocabSize);
  request.prompt = proto::TokenBytes::Adopt(std::move(ids));
  request.sampling.set_max_tokens(options.steps * 3);
  request.sampling.set_ignore_eos(true);
  return request;
}

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double Microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

absl::StatusOr<SchedulerBenchResult> RunSchedulerBench(
    const SchedulerBenchOptions& options) {
  if (options.num_sequences < 1 || options.context_tokens < 1 ||
      options.page_tokens < 1 || options.steps < 10) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the benchmark needs at least 1 sequence, 1 token of context, 1 token "
        "in a page and 10 steps, has ",
        options.num_sequences, ", ", options.context_tokens, ", ",
        options.page_tokens, " and ", options.steps));
  }
  const uint32_t max_len = options.context_tokens + 3 * options.steps;
  cache::KvCacheConfig config;
  config.page_tokens = options.page_tokens;
  config.cache_id = "bench";
  const int64_t page_bytes = options.kv_bytes_per_token * options.page_tokens;
  config.groups = {{.num_pages = int64_t{options.num_sequences} *
                                 (max_len / options.page_tokens + 2),
                    .page_bytes = page_bytes,
                    .payload_bytes = page_bytes}};
  cache::KvCache cache(config);

  SchedulerOptions scheduler_options;
  scheduler_options.max_model_len = max_len;
  scheduler_options.max_num_seqs = options.num_sequences;
  scheduler_options.max_batched_tokens =
      std::max<uint32_t>(8192, 2 * options.num_sequences);
  scheduler_options.max_queue = options.num_sequences;
  scheduler_options.vocab_size = kVocabSize;
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<Scheduler> scheduler,
      Scheduler::Create(scheduler_options,
                        {.cache = &cache, .clock = &base::Clock::Real()}));
  const auto sink = std::make_shared<NullSink>();
  for (uint32_t i = 0; i < options.num_sequences; ++i) {
    KVASIR_RETURN_IF_ERROR(
        scheduler->Add(MakeRequest(i, options), sink).status);
  }

  kvasir::v1::StepResult step_result;
  std::vector<double> total;
  std::vector<double> schedule;
  std::vector<double> apply;
  uint32_t warm_up = options.steps / 10;
  while (total.size() < options.steps) {
    const auto start = std::chrono::steady_clock::now();
    const kvasir::v1::StepPlan* plan = scheduler->Schedule();
    const auto scheduled = std::chrono::steady_clock::now();
    if (plan == nullptr) {
      return absl::InternalError(
          "the scheduler returned no step, although sequences are running");
    }
    FillResult(*plan, &step_result);
    const auto executed = std::chrono::steady_clock::now();
    KVASIR_RETURN_IF_ERROR(scheduler->Apply(step_result));
    const auto applied = std::chrono::steady_clock::now();
    // Does not time steps in which some sequences still compute their prompts.
    if (scheduler->last_step().decode_sequences < options.num_sequences) {
      continue;
    }
    if (warm_up > 0) {
      --warm_up;
      continue;
    }
    schedule.push_back(Microseconds(scheduled - start));
    apply.push_back(Microseconds(applied - executed));
    total.push_back(schedule.back() + apply.back());
  }

  std::vector<double> ahead;
  const kvasir::v1::StepPlan* plan = scheduler->Schedule();
  while (ahead.size() < options.steps) {
    const auto start = std::chrono::steady_clock::now();
    const kvasir::v1::StepPlan* const next = scheduler->ScheduleAhead();
    ahead.push_back(Microseconds(std::chrono::steady_clock::now() - start));
    if (next == nullptr) {
      return absl::InternalError(
          "the scheduler planned no step ahead, although sequences are "
          "running");
    }
    FillResult(*plan, &step_result);
    KVASIR_RETURN_IF_ERROR(scheduler->Apply(step_result));
    plan = next;
  }

  const cache::KvCacheStats stats = cache.Stats();
  SchedulerBenchResult result;
  result.step_us = Median(total);
  result.schedule_us = Median(schedule);
  result.apply_us = Median(apply);
  result.ahead_us = Median(ahead);
  std::sort(total.begin(), total.end());
  result.step_p99_us = total[total.size() * 99 / 100];
  result.pool_bytes = stats.groups[0].pool_bytes;
  result.metadata_bytes = stats.metadata_bytes;
  result.metadata_share = static_cast<double>(stats.metadata_bytes) /
                          static_cast<double>(stats.groups[0].pool_bytes);
  scheduler->FailAll({absl::CancelledError("the benchmark is over"),
                      kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
  return result;
}

}  // namespace kvasir::worker
