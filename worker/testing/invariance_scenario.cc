#include "worker/testing/invariance_scenario.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "kernels/testing/granule_device.h"
#include "model/shapes/shape_config.h"

namespace kvasir::worker {

Worker::Worker(const Conditions& conditions, int64_t sliding_window,
               const PlanCase* plan_case, const model::ModelShape& shape,
               const std::string& dtype)
    : conditions_(conditions) {
  auto spec = model::SpecOfShape(shape);
  KVASIR_EXPECT_OK(spec);
  if (sliding_window > 0) spec->layers[1].sliding_window = sliding_window;
  const auto plan = plan_case != nullptr
                        ? PlanOf(*plan_case, *spec, dtype)
                        : plan::FullRankPlan(model::AttentionShapeOf(*spec),
                                             kvasir::v1::BF16);
  auto source = RandomSource::Create(shape, *spec, Resolved(plan, *spec), 20260,
                                     kernels::DType::kBf16);
  KVASIR_EXPECT_OK(source.status());
  Start(*spec, plan, source->get());
}

Worker::Worker(const Conditions& conditions, const model::DecoderSpec& spec,
               const kvasir::v1::KvPlan& plan, WeightSource* source)
    : conditions_(conditions) {
  Start(spec, plan, source);
}

Worker::~Worker() = default;

std::vector<Sample> Worker::Run(const std::vector<Request>& requests) {
  Sinks sinks;
  for (const Request& request : requests) {
    sinks.push_back(Add(request));
    if (conditions_.one_at_a_time) Finish();
  }
  Finish();
  return SamplesOf(sinks);
}

std::vector<Sample> Worker::RunAndAbortOdd(
    const std::vector<Request>& requests) {
  Sinks kept;
  Sinks aborted;
  for (size_t i = 0; i < requests.size(); ++i) {
    (i % 2 == 0 ? kept : aborted).push_back(Add(requests[i]));
  }
  Finish([&](bool during_step) {
    for (const SequenceSnapshot& each : scheduler_->Snapshot()) {
      for (size_t i = during_step ? 1 : 3; i < requests.size(); i += 4) {
        const auto prompt =
            static_cast<uint32_t>(requests[i].prompt.size_tokens());
        const uint32_t from = during_step ? prompt / 4 : prompt + 3;
        if (each.request_id == requests[i].request_id &&
            each.computed_tokens >= from) {
          scheduler_->Abort(each.request_id, std::nullopt);
        }
      }
    }
  });
  for (size_t i = 0; i < aborted.size(); ++i) {
    EXPECT_TRUE(aborted[i]->ended()) << "request " << i;
    if (!aborted[i]->ended()) continue;
    for (const RecordingSink::Sample& sample : aborted[i]->samples()) {
      EXPECT_EQ(sample.finish->reason(), kvasir::v1::FINISH_ABORT);
      EXPECT_EQ(sample.tokens.empty(), i % 2 == 0);
    }
  }
  return SamplesOf(kept);
}

void Worker::Start(const model::DecoderSpec& spec,
                   const kvasir::v1::KvPlan& plan, WeightSource* source) {
  const size_t num_groups = Resolved(plan, spec).page_groups.size();
  RankOptions options = TinyOptions();
  options.num_threads = conditions_.threads;
  options.deterministic = conditions_.deterministic;
  options.backend = conditions_.backend;
  options.page_tokens = conditions_.page_tokens;
  if (const int64_t granule = conditions_.granule_bytes; granule > 0) {
    options.make_device = [granule](base::ThreadPool* pool, kernels::CpuBackend,
                                    int64_t limit) {
      return std::make_unique<kernels::GranuleDevice>(pool, granule, limit);
    };
  }
  options.pages.assign(num_groups, conditions_.pages);
  options.host_pages.assign(num_groups, conditions_.host_pages);
  options.executor.max_model_len = conditions_.max_model_len;
  options.executor.max_num_seqs = conditions_.max_num_seqs;
  options.executor.max_batched_tokens = conditions_.max_batched_tokens;
  options.executor.logits_tap = conditions_.logits_tap;
  auto rank = Rank::Create(spec, plan, source, options);
  KVASIR_EXPECT_OK(rank);
  rank_ = *std::move(rank);
  cache_ = std::make_unique<cache::KvCache>(cache::MakeKvCacheConfig(
      rank_->layout(), rank_->pages(), rank_->cache_id(), rank_->host_pages()));
  SchedulerOptions scheduler;
  scheduler.max_model_len = conditions_.max_model_len;
  scheduler.max_num_seqs = conditions_.max_num_seqs;
  scheduler.max_batched_tokens = conditions_.max_batched_tokens;
  scheduler.vocab_size = static_cast<int32_t>(spec.vocab_size);
  auto made = Scheduler::Create(
      scheduler, {.cache = cache_.get(), .clock = &base::Clock::Real()});
  KVASIR_EXPECT_OK(made.status());
  scheduler_ = *std::move(made);
}

std::shared_ptr<RecordingSink> Worker::Add(const Request& request) {
  auto sink = std::make_shared<RecordingSink>(request.sampling.n());
  KVASIR_EXPECT_OK(scheduler_->Add(request, sink).status);
  return sink;
}

void Worker::Finish(const std::function<void(bool during_step)>& look) {
  const kvasir::v1::StepPlan* next = nullptr;
  while (true) {
    const bool runs = next != nullptr;
    const kvasir::v1::StepPlan* const plan =
        runs ? next : scheduler_->Schedule();
    if (plan == nullptr) return;
    if (!runs) {
      KVASIR_ASSERT_OK(rank_->executor().Enqueue(*plan));
    }
    next = conditions_.one_at_a_time ? nullptr : scheduler_->ScheduleAhead();
    look(true);
    const auto result = rank_->executor().Await();
    KVASIR_ASSERT_OK(result.status());
    if (next != nullptr) {
      ++steps_ahead_;
      KVASIR_ASSERT_OK(rank_->executor().Enqueue(*next));
    }
    KVASIR_ASSERT_OK(scheduler_->Apply(*result));
    look(false);
  }
}

std::vector<Sample> Worker::SamplesOf(const Sinks& sinks) {
  std::vector<Sample> samples;
  for (const auto& sink : sinks) {
    EXPECT_TRUE(sink->ended());
    for (const auto& from : sink->samples()) {
      Sample& to = samples.emplace_back();
      to.tokens = from.tokens;
      to.numbers = from.prompt_logprobs;
      for (const auto& logprob : from.logprobs) {
        to.numbers.push_back(logprob.logprob());
        for (const auto& top : logprob.top()) {
          to.numbers.push_back(static_cast<float>(top.token_id()));
          to.numbers.push_back(top.logprob());
        }
      }
    }
  }
  EXPECT_EQ(scheduler_->Load().free_pages, scheduler_->Load().total_pages);
  for (const cache::PageGroupStats& group : stats().groups) {
    EXPECT_EQ(group.host_used_pages, 0);
  }
  return samples;
}

std::vector<Request> MixedRequests() {
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 16; ++i) {
    Request& request = requests.emplace_back();
    request.request_id = absl::StrCat("r", i);
    request.use_prefix_cache = false;
    // There are four texts, so several prompts have a common beginning.
    const uint32_t text = i % 4;
    const uint32_t length = 1 + (i * 29) % 75;
    std::vector<int32_t> ids(length);
    for (uint32_t t = 0; t < length; ++t) {
      ids[t] = static_cast<int32_t>((text * 311 + t * 37 + t * t) % 1237);
    }
    request.prompt = proto::TokenBytes::Adopt(std::move(ids));
    kvasir::v1::SamplingParams& sampling = request.sampling;
    sampling.set_max_tokens(8 + i);
    sampling.set_seed(1000 + i);
    sampling.set_temperature(
        i % 4 == 0 ? 0.0f : 0.5f + 0.25f * static_cast<float>(i % 5));
    sampling.set_logprobs(5);
    if (i % 3 == 1) sampling.set_top_p(0.9f);
    if (i % 5 == 2) sampling.set_top_k(40);
    if (i % 5 == 3) sampling.set_min_p(0.05f);
    if (i % 4 == 3) {
      sampling.set_repetition_penalty(1.25f);
      sampling.set_presence_penalty(0.5f);
      sampling.set_frequency_penalty(0.25f);
    }
    if (i % 6 == 4) {
      (*sampling.mutable_logit_bias())[7] = 2.0f;
      (*sampling.mutable_logit_bias())[11] = -4.0f;
    }
    if (i % 7 == 5) sampling.set_n(2);
    if (i % 8 == 6) sampling.set_prompt_logprobs(0);
  }
  return requests;
}

}  // namespace kvasir::worker
