// Stress test of the scheduler with random requests, aborts and clock jumps.
// The fake executor checks every step, and the test checks the cache after each
// step. A fake model without pages computes the expected outputs.
#include <random>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "worker/engine/scheduler.h"
#include "worker/testing/fake_executor.h"
#include "worker/testing/recording_sink.h"
#include "worker/testing/scheduler_scenario.h"

namespace kvasir::worker {
namespace {

constexpr uint32_t kMaxLen = 64;
constexpr uint32_t kMaxQueue = 20;
// a small vocabulary, so stop ids are often sampled
constexpr int32_t kVocab = 50;

struct Storm {
  const char* name;
  uint32_t seed;
  uint32_t max_batched_tokens;
  uint32_t max_num_seqs;
  std::vector<FakeExecutorOptions::PageGroup> groups;
};

struct Sent {
  Request request;
  std::shared_ptr<RecordingSink> sink;
};

class StormTest : public ::testing::TestWithParam<Storm> {
 protected:
  void SetUp() override {
    const Storm& storm = GetParam();
    random_.seed(storm.seed);
    FakeExecutorOptions fake;
    fake.groups = storm.groups;
    fake.vocab_size = kVocab;
    fake.max_num_seqs = storm.max_num_seqs;
    fake.max_batched_tokens = storm.max_batched_tokens;
    executor_ = std::make_unique<FakeExecutor>(fake);
    cache::KvCacheConfig config;
    config.page_tokens = fake.page_tokens;
    config.cache_id = "storm";
    for (const auto& group : storm.groups) {
      config.groups.push_back({.num_pages = group.num_pages,
                               .sliding_window = group.sliding_window,
                               .side_pages_per_sequence = group.side_pages,
                               .eviction = group.eviction,
                               .page_bytes = 64,
                               .num_host_pages = group.host_pages});
      eviction_.groups.push_back({.pages = {.page_tokens = fake.page_tokens,
                                            .side_pages = group.side_pages,
                                            .eviction = group.eviction},
                                  .least_slots = 1,
                                  .num_pages = group.num_pages});
      if (group.eviction.evicts()) config.prefix_reuse = false;
    }
    eviction_.min_budget = {.tokens = 2};
    cache_ = std::make_unique<cache::KvCache>(config);
    SchedulerOptions options;
    options.max_model_len = kMaxLen;
    options.max_num_seqs = storm.max_num_seqs;
    options.max_batched_tokens = storm.max_batched_tokens;
    options.max_queue = kMaxQueue;
    options.eviction = eviction_;
    options.vocab_size = kVocab;
    options.eos_token_ids = {3};
    auto scheduler =
        Scheduler::Create(options, {.cache = cache_.get(), .clock = &clock_});
    KVASIR_ASSERT_OK(scheduler.status());
    scheduler_ = *std::move(scheduler);
  }

  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  FakeModelLimits Limits() const {
    return {.vocab_size = kVocab,
            .max_model_len = kMaxLen,
            .eos_token_ids = {3},
            .eviction = eviction_};
  }

  // Returns a random eviction budget for the request. Returns nullopt in a
  // third of the cases, and whenever the engine would refuse the budget.
  std::optional<proto::EvictionBudget> RandomBudget(const Request& request) {
    proto::EvictionBudget budget;
    if (Below(2) == 0) {
      budget.tokens = 2 + Below(20);
    } else {
      budget.ratio = (1 + Below(10)) / 10.0;
    }
    const auto prompt = static_cast<int64_t>(request.prompt.size_tokens());
    const absl::Status status = CheckEvictionBudget(
        budget,
        {.prompt_tokens = prompt,
         .total_tokens = std::min<int64_t>(
             prompt + request.sampling.max_tokens(), kMaxLen)},
        eviction_);
    if (!status.ok() || Below(3) == 0) return std::nullopt;
    ++budgets_;
    return budget;
  }

  Request RandomRequest(int index) {
    Request request;
    request.request_id = absl::StrCat("r", index);
    // Only four texts, so that requests share prefixes.
    const std::string text = absl::StrCat("text", Below(4));
    request.prompt =
        proto::TokenBytes::Adopt(FakePrompt(text, 1 + Below(40), kVocab));
    request.cache_salt = Below(4) == 0 ? "other" : "";
    request.priority = static_cast<int32_t>(Below(3)) - 1;
    request.use_prefix_cache = Below(8) != 0;
    kvasir::v1::SamplingParams& sampling = request.sampling;
    sampling.set_temperature(Below(3) == 0 ? 0.0f : 1.0f);
    sampling.set_seed(Below(1000));
    sampling.set_max_tokens(1 + Below(24));
    sampling.set_min_tokens(Below(4) == 0 ? Below(sampling.max_tokens()) : 0);
    sampling.set_ignore_eos(Below(2) == 0);
    if (eviction_.evicts()) request.eviction_budget = RandomBudget(request);
    if (Below(3) == 0) {
      sampling.add_stop_token_ids(static_cast<int32_t>(Below(kVocab)));
    }
    if (Below(4) == 0) sampling.set_presence_penalty(0.5f);
    if (Below(6) == 0) sampling.set_prompt_logprobs(0);
    if (Below(6) == 0) sampling.set_logprobs(2);
    switch (Below(5)) {
      case 0:
        sampling.set_n(1 + Below(std::min(4u, GetParam().max_num_seqs)));
        break;
      case 1: {
        std::vector<int32_t> ids = FakeContinuation(request, 0, Limits());
        ids.resize(Below(static_cast<uint32_t>(ids.size()) + 1));
        request.emitted = proto::TokenBytes::Adopt(std::move(ids));
        break;
      }
      default:
        break;
    }
    if (Below(12) == 0) {
      request.deadline = clock_.Now() + absl::Seconds(Below(40));
    }
    return request;
  }

  void Submit(int index) {
    Sent sent{.request = RandomRequest(index), .sink = nullptr};
    sent.sink = std::make_shared<RecordingSink>(sent.request.sampling.n());
    const Refusal refusal = scheduler_->Add(sent.request, sent.sink);
    if (refusal.ok()) {
      sent_.push_back(std::move(sent));
    } else {
      EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
      ++refused_;
    }
  }

  void AbortOne() {
    if (sent_.empty()) return;
    const uint32_t recent =
        std::min<uint32_t>(static_cast<uint32_t>(sent_.size()), 20);
    scheduler_->Abort(
        sent_[sent_.size() - 1 - Below(recent)].request.request_id,
        std::nullopt);
  }

  // Runs one step as the engine does: if the next step was planned ahead, it is
  // enqueued before this step's result is applied.
  void Step() {
    if (running_ == nullptr) {
      running_ = scheduler_->Schedule();
      if (running_ == nullptr) {
        ASSERT_FALSE(scheduler_->has_work())
            << "there is work, but no step was planned";
        return;
      }
      KVASIR_ASSERT_OK(executor_->Enqueue(*running_));
    }
    const kvasir::v1::StepPlan* const next =
        Below(4) != 0 ? scheduler_->ScheduleAhead() : nullptr;
    if (Below(10) == 0) AbortOne();  // an abort while the step runs
    const auto result = executor_->Await();
    KVASIR_ASSERT_OK(result.status());
    if (next != nullptr) {
      KVASIR_ASSERT_OK(executor_->Enqueue(*next));
      ++ahead_;
    }
    running_ = next;
    KVASIR_ASSERT_OK(scheduler_->Apply(*result));
    KVASIR_ASSERT_OK(cache_->CheckInvariants());
    ASSERT_EQ(cache_->Stats().leaked_pages, 0);
    ASSERT_LE(scheduler_->num_running(), GetParam().max_num_seqs);
  }

  static bool EndedBefore(const Request& request) {
    const size_t emitted = request.emitted.size_tokens();
    if (emitted == 0) return false;
    const int32_t last = request.emitted[emitted - 1];
    const auto& stop = request.sampling.stop_token_ids();
    return (last == 3 && !request.sampling.ignore_eos()) ||
           std::find(stop.begin(), stop.end(), last) != stop.end();
  }

  // Checks the outputs of all requests. Returns how many samples ended without
  // an abort.
  int CheckOutputs() {
    int complete = 0;
    for (const Sent& sent : sent_) {
      EXPECT_TRUE(sent.sink->ended()) << sent.request.request_id;
      for (uint32_t i = 0; i < sent.request.sampling.n(); ++i) {
        const auto& sample = sent.sink->samples()[i];
        std::vector<int32_t> want = FakeContinuation(sent.request, i, Limits());
        // If earlier attempts had already delivered the complete output,
        // nothing more is delivered.
        if (sample.finish.has_value() &&
            sample.finish->reason() != kvasir::v1::FINISH_ABORT) {
          ++complete;
          if (EndedBefore(sent.request)) want.clear();
        } else {
          EXPECT_GE(want.size(), sample.tokens.size());
          want.resize(sample.tokens.size());
        }
        EXPECT_EQ(sample.tokens, want) << sent.request.request_id << "#" << i;
        if (sent.request.sampling.has_logprobs()) {
          EXPECT_EQ(sample.logprobs.size(), sample.tokens.size());
        }
      }
    }
    return complete;
  }

  std::mt19937 random_;
  base::ManualClock clock_;
  std::unique_ptr<cache::KvCache> cache_;
  std::unique_ptr<FakeExecutor> executor_;
  std::unique_ptr<Scheduler> scheduler_;
  EvictionLimits eviction_;
  std::vector<Sent> sent_;
  const kvasir::v1::StepPlan* running_ = nullptr;
  int ahead_ = 0;  // steps that were planned ahead
  int refused_ = 0;
  int budgets_ = 0;  // requests with their own eviction budget
};

TEST_P(StormTest, OutputsOfRandomRequestsAreExactAndAllTheirPagesAreFreed) {
  constexpr int kRequests = 500;
  int submitted = 0;
  while (submitted < kRequests) {
    // When the queue is nearly full, seldom submit a request, so that the queue
    // is not always full.
    const bool full = scheduler_->num_queued() >= kMaxQueue - 2;
    uint32_t burst = full && Below(20) != 0 ? 0 : Below(4);
    for (; burst > 0 && submitted < kRequests; --burst) Submit(submitted++);
    if (Below(6) == 0) AbortOne();
    if (Below(3) == 0) clock_.Advance(absl::Seconds(Below(3)));
    Step();
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 100000 && (scheduler_->has_work() || running_ != nullptr);
       ++i) {
    Step();
    if (HasFatalFailure()) return;
  }
  ASSERT_FALSE(scheduler_->has_work());
  EXPECT_GT(CheckOutputs(), kRequests / 3);
  EXPECT_EQ(static_cast<int>(sent_.size()) + refused_, kRequests);
  const LoadSnapshot load = scheduler_->Load();
  EXPECT_EQ(load.free_pages, load.total_pages);
  EXPECT_EQ(load.queued_tokens, 0u);
  EXPECT_EQ(scheduler_->num_queued(), 0u);
  const cache::KvCacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.sequences, 0);
  EXPECT_EQ(stats.hit_tokens > 0, !eviction_.evicts());
  EXPECT_EQ(stats.slots_evicted > 0, eviction_.evicts());
  EXPECT_EQ(budgets_ > kRequests / 20, eviction_.evicts());
  bool has_side_pages = false;
  bool evicts_in_each_step = false;
  for (const auto& group : GetParam().groups) {
    has_side_pages |= group.side_pages > 0;
    evicts_in_each_step |= group.eviction.every_tokens == 1;
  }
  EXPECT_EQ(stats.tails_published > 0, has_side_pages && !eviction_.evicts());
  EXPECT_EQ(ahead_ > kRequests / 10, !has_side_pages && !evicts_in_each_step)
      << ahead_;
  // In cases with a host pool, the small page pool must run out, so that
  // sequences are copied.
  EXPECT_EQ(stats.exports > 0, GetParam().groups[0].host_pages > 0);
  EXPECT_EQ(stats.imports > 0, GetParam().groups[0].host_pages > 0);
  for (const auto& group : stats.groups) EXPECT_EQ(group.host_used_pages, 0);
  cache_->DropPrefixCache();
  for (const auto& group : cache_->Stats().groups) {
    EXPECT_EQ(group.cached_pages, 0);
    EXPECT_EQ(group.free_pages, group.num_pages);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pools, StormTest,
    ::testing::Values(
        Storm{"PoolForOne", 1, 16, 4, {{.num_pages = 16}}},
        Storm{"PoolForMany", 2, 32, 16, {{.num_pages = 128}}},
        Storm{"SmallChunks", 3, 5, 5, {{.num_pages = 40}}},
        Storm{"OneSeat", 4, 7, 1, {{.num_pages = 24}}},
        Storm{"ManySeatsFewPages", 5, 64, 32, {{.num_pages = 20}}},
        Storm{"Window", 6, 12, 8, {{.num_pages = 24, .sliding_window = 10}}},
        Storm{"WindowBesideFull",
              7,
              16,
              8,
              {{.num_pages = 40}, {.num_pages = 20, .sliding_window = 7}}},
        Storm{"SidePages", 8, 16, 8, {{.num_pages = 96, .side_pages = 2}}},
        Storm{"SidePagesInAPoolForOne",
              9,
              16,
              4,
              {{.num_pages = 18, .side_pages = 2}}},
        Storm{"SidePagesInSmallChunks",
              10,
              5,
              5,
              {{.num_pages = 40, .side_pages = 1}}},
        Storm{"SidePagesBesideAWindow",
              11,
              16,
              8,
              {{.num_pages = 60, .side_pages = 1},
               {.num_pages = 40, .sliding_window = 7, .side_pages = 3}}},
        Storm{"HostPool", 12, 32, 16, {{.num_pages = 40, .host_pages = 100}}},
        Storm{"HostPoolThatIsFull",
              13,
              16,
              12,
              {{.num_pages = 20, .host_pages = 7}}},
        Storm{"HostPoolOfAWindow",
              14,
              16,
              8,
              {{.num_pages = 24, .host_pages = 30},
               {.num_pages = 20, .sliding_window = 7, .host_pages = 9}}},
        Storm{"HostPoolOfSidePages",
              15,
              16,
              8,
              {{.num_pages = 40, .side_pages = 2, .host_pages = 24},
               {.num_pages = 40,
                .sliding_window = 7,
                .side_pages = 3,
                .host_pages = 24}}},
        Storm{"Evicts",
              16,
              16,
              8,
              {{.num_pages = 24,
                .eviction = {.budget_tokens = 9, .every_tokens = 6}}}},
        Storm{"EvictsIntoAHostPool",
              20,
              32,
              16,
              {{.num_pages = 20,
                .host_pages = 40,
                .eviction = {.budget_tokens = 9, .every_tokens = 6}}}},
        // The pool has room for only one sequence: 9 slots that eviction keeps,
        // and 6 new slots. Without eviction the longest sequence would need
        // four times as many pages.
        Storm{"EvictsInAPoolForOne",
              17,
              16,
              4,
              {{.num_pages = 4,
                .eviction = {.budget_tokens = 9, .every_tokens = 6}}}},
        Storm{"EvictsASmallShareInSmallChunks",
              18,
              5,
              5,
              {{.num_pages = 40,
                .eviction = {.budget_ratio = 0.3,
                             .least_tokens = 2,
                             .every_tokens = 1}}}},
        Storm{"EvictsBesideOthers",
              19,
              16,
              8,
              {{.num_pages = 60},
               {.num_pages = 40, .sliding_window = 7},
               {.num_pages = 30,
                .side_pages = 1,
                .eviction = {.budget_tokens = 12, .every_tokens = 8}},
               {.num_pages = 30,
                .eviction = {.budget_ratio = 0.5,
                             .least_tokens = 4,
                             .every_tokens = 5}}}}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

}  // namespace
}  // namespace kvasir::worker
