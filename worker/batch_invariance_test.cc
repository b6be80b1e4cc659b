// The promise of the whole engine: a request's tokens and log probabilities are
// the same bits whatever shares its batch, however its prefill was cut, with
// any number of threads, after a preemption, with a prefix hit, and when it is
// resumed elsewhere. Scheduler and real executor on a tiny model.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/kv_cache.h"
#include "worker/recording_sink.h"
#include "worker/scheduler.h"
#include "worker/tiny_rank.h"

namespace kvasir::worker {
namespace {

constexpr uint32_t kMaxLen = 128;
constexpr int64_t kPageTokens = 16;

struct Conditions {
  int threads = 1;
  uint32_t max_num_seqs = 16;
  uint32_t max_batched_tokens = 64;
  // Token pages of each page group.
  int64_t pages = 256;
  bool one_at_a_time = false;
};

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<float> numbers;  // every log probability that was reported
  friend bool operator==(const Sample&, const Sample&) = default;
};

// Model, cache and scheduler of one worker.
class Worker {
 public:
  Worker(const Conditions& conditions, int64_t sliding_window)
      : conditions_(conditions) {
    auto spec = model::SpecOfShape(TinyShape());
    EXPECT_THAT(spec, base::IsOk());
    if (sliding_window > 0) spec->layers[1].sliding_window = sliding_window;
    const auto plan =
        cache::FullRankPlan(CacheShapeOf(*spec), kvasir::v1::BF16);
    RankOptions options = TinyOptions();
    options.num_threads = conditions.threads;
    options.page_tokens = kPageTokens;
    options.pages.assign(sliding_window > 0 ? 2 : 1, conditions.pages);
    options.executor.max_model_len = kMaxLen;
    options.executor.max_num_seqs = conditions.max_num_seqs;
    options.executor.max_batched_tokens = conditions.max_batched_tokens;
    RandomSource source(TinyShape(), 20260, kernels::DType::kBf16);
    auto rank = Rank::Create(*spec, plan, &source, options);
    EXPECT_THAT(rank, base::IsOk());
    rank_ = *std::move(rank);
    cache_ = std::make_unique<cache::KvCache>(cache::MakeKvCacheConfig(
        rank_->layout(), rank_->pages(), rank_->cache_id()));
    SchedulerOptions scheduler;
    scheduler.max_model_len = kMaxLen;
    scheduler.max_num_seqs = conditions.max_num_seqs;
    scheduler.max_batched_tokens = conditions.max_batched_tokens;
    scheduler.vocab_size = static_cast<int32_t>(spec->vocab_size);
    auto made = Scheduler::Create(
        scheduler, {.cache = cache_.get(), .clock = &base::Clock::Real()});
    EXPECT_THAT(made.status(), base::IsOk());
    scheduler_ = *std::move(made);
  }

  // All samples of all requests, in order.
  std::vector<Sample> Run(const std::vector<Request>& requests) {
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (const Request& request : requests) {
      sinks.push_back(std::make_shared<RecordingSink>(request.sampling.n));
      EXPECT_THAT(scheduler_->Add(request, sinks.back()).status, base::IsOk());
      if (conditions_.one_at_a_time) Finish();
    }
    Finish();
    std::vector<Sample> samples;
    for (const auto& sink : sinks) {
      EXPECT_TRUE(sink->ended());
      for (const auto& from : sink->samples()) {
        Sample& to = samples.emplace_back();
        to.tokens = from.tokens;
        to.numbers = from.prompt_logprobs;
        for (const TokenLogprob& logprob : from.logprobs) {
          to.numbers.push_back(logprob.logprob);
          for (const TopToken& top : logprob.top) {
            to.numbers.push_back(static_cast<float>(top.token_id));
            to.numbers.push_back(top.logprob);
          }
        }
      }
    }
    EXPECT_EQ(scheduler_->Load().free_pages, scheduler_->Load().total_pages);
    return samples;
  }

  cache::KvCacheStats stats() const { return cache_->Stats(); }

 private:
  void Finish() {
    while (const kvasir::v1::StepPlan* plan = scheduler_->Schedule()) {
      const auto result = rank_->executor().Execute(*plan);
      ASSERT_THAT(result.status(), base::IsOk());
      ASSERT_THAT(scheduler_->Apply(*result), base::IsOk());
    }
  }

  const Conditions conditions_;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<cache::KvCache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
};

std::vector<Request> MixedRequests() {
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 16; ++i) {
    Request& request = requests.emplace_back();
    request.request_id = absl::StrCat("r", i);
    request.use_prefix_cache = false;
    // Some share the beginning of their prompts.
    const uint32_t text = i % 4;
    const uint32_t length = 1 + (i * 29) % 75;
    for (uint32_t t = 0; t < length; ++t) {
      request.prompt_ids.push_back(
          static_cast<int32_t>((text * 311 + t * 37 + t * t) % 1237));
    }
    SamplingParams& sampling = request.sampling;
    sampling.max_tokens = 8 + i;
    sampling.seed = 1000 + i;
    sampling.temperature =
        i % 4 == 0 ? 0.0f : 0.5f + 0.25f * static_cast<float>(i % 5);
    sampling.num_logprobs = 5;
    if (i % 3 == 1) sampling.top_p = 0.9f;
    if (i % 5 == 2) sampling.top_k = 40;
    if (i % 5 == 3) sampling.min_p = 0.05f;
    if (i % 4 == 3) {
      sampling.repetition_penalty = 1.25f;
      sampling.presence_penalty = 0.5f;
      sampling.frequency_penalty = 0.25f;
    }
    if (i % 6 == 4) sampling.logit_bias = {{7, 2.0f}, {11, -4.0f}};
    if (i % 7 == 5) sampling.n = 2;
    if (i % 8 == 6) sampling.num_prompt_logprobs = 0;
  }
  return requests;
}

class BatchInvarianceTest : public ::testing::TestWithParam<int64_t> {
 protected:
  // What each request gives alone.
  std::vector<Sample> Alone(const std::vector<Request>& requests) {
    Worker worker({.one_at_a_time = true}, GetParam());
    return worker.Run(requests);
  }
};

TEST_P(BatchInvarianceTest, SixteenTogetherAreWhatEachIsAlone) {
  const std::vector<Request> requests = MixedRequests();
  Worker worker({}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
  EXPECT_EQ(worker.stats().preemptions, 0);
}

TEST_P(BatchInvarianceTest, ChunksAndThreadsChangeNothing) {
  const std::vector<Request> requests = MixedRequests();
  const std::vector<Sample> alone = Alone(requests);
  for (const Conditions& conditions : {
           Conditions{.max_num_seqs = 2, .max_batched_tokens = 2},
           Conditions{.max_num_seqs = 7, .max_batched_tokens = 7},
           Conditions{.threads = 2, .max_batched_tokens = 64},
       }) {
    Worker worker(conditions, GetParam());
    EXPECT_EQ(worker.Run(requests), alone)
        << "chunks of " << conditions.max_batched_tokens << ", "
        << conditions.threads << " threads";
  }
}

TEST_P(BatchInvarianceTest, NorDoesOneTokenAtATime) {
  std::vector<Request> requests = MixedRequests();
  std::erase_if(requests, [](const Request& r) { return r.sampling.n > 1; });
  Worker worker({.max_num_seqs = 1, .max_batched_tokens = 1}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
}

TEST_P(BatchInvarianceTest, PreemptionChangesNothing) {
  const std::vector<Request> requests = MixedRequests();
  Worker worker({.pages = 14}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
  EXPECT_GT(worker.stats().preemptions, 0);
}

TEST_P(BatchInvarianceTest, APrefixHitChangesNothing) {
  std::vector<Request> requests = MixedRequests();
  const std::vector<Sample> alone = Alone(requests);
  for (Request& request : requests) request.use_prefix_cache = true;
  Worker worker({.max_num_seqs = 4}, GetParam());
  EXPECT_EQ(worker.Run(requests), alone);
  const int64_t hits = worker.stats().hit_tokens;
  EXPECT_GT(hits, 0);
  EXPECT_EQ(worker.Run(requests), alone);
  EXPECT_GT(worker.stats().hit_tokens, 2 * hits);
}

TEST_P(BatchInvarianceTest, AResumedRequestGoesOnWithTheSameTokens) {
  const std::vector<Request> requests = MixedRequests();
  std::vector<Request> resumed;
  std::vector<Sample> rest;
  for (const Request& request : requests) {
    if (request.sampling.n == 1) resumed.push_back(request);
  }
  const std::vector<Sample> whole = Alone(resumed);
  for (size_t i = 0; i < resumed.size(); ++i) {
    const size_t emitted = 1 + i % 7;
    resumed[i].emitted_ids.assign(
        whole[i].tokens.begin(),
        whole[i].tokens.begin() + static_cast<std::ptrdiff_t>(emitted));
    Sample& sample = rest.emplace_back();
    sample.tokens.assign(
        whole[i].tokens.begin() + static_cast<std::ptrdiff_t>(emitted),
        whole[i].tokens.end());
  }
  Worker worker({.threads = 2, .max_num_seqs = 5, .max_batched_tokens = 9},
                GetParam());
  const std::vector<Sample> got = worker.Run(resumed);
  ASSERT_EQ(got.size(), rest.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, rest[i].tokens) << resumed[i].request_id;
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, BatchInvarianceTest, ::testing::Values(0, 24),
                         [](const auto& param_info) {
                           return param_info.param == 0
                                      ? std::string("AllLayersSeeAll")
                                      : std::string("OneLayerHasAWindow");
                         });

}  // namespace
}  // namespace kvasir::worker
