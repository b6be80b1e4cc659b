#include "bench/router/simulation.h"

#include <random>

#include "base/status_matchers.h"
#include "bench/router/page_cache.h"

namespace kvasir::bench {
namespace {

using router::PolicyKind;

TEST(PageCacheTest, ForgetsTheEndOfThePromptThatWasUsedLongestAgo) {
  PageCache cache(5);
  cache.Add(std::vector<uint64_t>{1, 2, 3});
  cache.Add(std::vector<uint64_t>{4, 5});
  cache.Add(std::vector<uint64_t>{6});
  EXPECT_EQ(cache.size(), 5u);
  EXPECT_EQ(cache.Hits(std::vector<uint64_t>{1, 2, 3}), 2u);
  EXPECT_EQ(cache.Hits(std::vector<uint64_t>{4, 5}), 2u);
  EXPECT_EQ(cache.Hits(std::vector<uint64_t>{6, 7}), 1u);
}

TEST(PageCacheTest, KeepsThePagesThatRequestsUse) {
  PageCache cache(3);
  const std::vector<uint64_t> used = {1, 2};
  cache.Use(used);
  cache.Use(used);
  cache.Release(used);
  for (uint64_t page = 10; page < 20; ++page) {
    cache.Add(std::vector<uint64_t>{page});
  }
  EXPECT_EQ(cache.Hits(used), 2u);
  EXPECT_EQ(cache.used(), 2u);
  cache.Release(used);
  EXPECT_EQ(cache.used(), 0u);
  for (uint64_t page = 20; page < 23; ++page) {
    cache.Add(std::vector<uint64_t>{page});
  }
  EXPECT_EQ(cache.Hits(used), 0u);
  EXPECT_EQ(cache.size(), 3u);
}

// Two requests of 8 pages of 4 tokens, 10 s apart; the first page is common.
Trace TwoRequests() {
  Trace trace;
  trace.page_tokens = 4;
  TraceRequest request = {.arrival_s = 1.0,
                          .prompt_tokens = 32,
                          .output_tokens = 4,
                          .shared = 1,
                          .shared_pages = 1,
                          .own = 2};
  trace.requests.push_back(request);
  request.arrival_s = 11.0;
  request.own = 3;
  trace.requests.push_back(request);
  return trace;
}

SimulationOptions Small(PolicyKind policy) {
  SimulationOptions options;
  options.replicas = 2;
  options.prompt_tokens_per_s = 8.0;
  options.step_s = 1.0;
  options.picker.policy = policy;
  options.picker.prefix_bytes = 1 << 20;
  return options;
}

TEST(SimulationTest, CountsHitsAndTimesOfTwoRequests) {
  EXPECT_EQ(BestHitRate(TwoRequests()), 4.0 / 64.0);
  const SimulationResult turns =
      Simulate(TwoRequests(), Small(PolicyKind::kRoundRobin));
  EXPECT_EQ(turns.hit_rate, 0.0);
  EXPECT_EQ(turns.work_imbalance, 1.0);
  EXPECT_EQ(turns.first_token_s_p99, 5.0);
  const SimulationResult affinity =
      Simulate(TwoRequests(), Small(PolicyKind::kPrefixAffinity));
  EXPECT_EQ(affinity.hit_rate, 4.0 / 64.0);
  EXPECT_EQ(affinity.work_imbalance, 2.0);
  EXPECT_EQ(affinity.first_token_s_p50, 5.0);
  EXPECT_EQ(affinity.queue_s_p99, 0.0);
}

TEST(SimulationTest, PromptsAtOneReplicaRunOneAfterTheOther) {
  Trace trace = TwoRequests();
  trace.requests[1].arrival_s = 2.0;
  SimulationOptions options = Small(PolicyKind::kLeastLoaded);
  options.replicas = 1;
  const SimulationResult result = Simulate(trace, options);
  // The first prompt ends at 6 s.
  EXPECT_EQ(result.queue_s_p99, 4.0);
  EXPECT_EQ(result.hit_rate, 4.0 / 64.0);
  // With one place in the batch, the second waits for the first one's output.
  options.max_num_seqs = 1;
  options.token_s = 2.0;
  EXPECT_EQ(Simulate(trace, options).queue_s_p99, 4.0 + 8.0);
}

TEST(SimulationTest, TheSameSeedGivesTheSameResult) {
  TraceOptions trace_options;
  trace_options.requests = 2000;
  trace_options.prompt_tokens_per_s = 40000;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Trace trace,
                              MakeTrace("chat", trace_options));
  SimulationOptions options;
  options.routers = 3;
  const SimulationResult one = Simulate(trace, options);
  const SimulationResult two = Simulate(trace, options);
  EXPECT_EQ(one.hit_rate, two.hit_rate);
  EXPECT_EQ(one.queue_s_p99, two.queue_s_p99);
}

struct Results {
  double best;
  SimulationResult affinity;
  SimulationResult least_loaded;
};
Results Compare(const char* name, double load, SimulationOptions options) {
  TraceOptions trace_options;
  trace_options.requests = 20000;
  trace_options.prompt_tokens_per_s =
      load * options.replicas * options.prompt_tokens_per_s;
  const absl::StatusOr<Trace> trace = MakeTrace(name, trace_options);
  KVASIR_EXPECT_OK(trace);
  Results results;
  results.best = BestHitRate(*trace);
  options.picker.policy = PolicyKind::kPrefixAffinity;
  results.affinity = Simulate(*trace, options);
  options.picker.policy = PolicyKind::kLeastLoaded;
  results.least_loaded = Simulate(*trace, options);
  return results;
}

TEST(SimulationTest, ConversationsFindNineTenthsOfTheirPagesAndStayBalanced) {
  for (const double load : {0.7, 1.5}) {
    const Results results = Compare("chat", load, {});
    EXPECT_GE(results.affinity.hit_rate, 0.9 * results.best);
    EXPECT_LT(results.least_loaded.hit_rate, 0.75 * results.best);
    EXPECT_LE(results.affinity.imbalance, 1.25);
    EXPECT_LE(results.affinity.work_imbalance, 1.25);
    EXPECT_LE(results.affinity.queue_s_p99, results.least_loaded.queue_s_p99);
  }
}

TEST(SimulationTest, RoutersThatShareNoStateKeepSessionsTogether) {
  SimulationOptions options;
  options.routers = 4;
  options.sessions = true;
  const Results results = Compare("chat", 0.7, options);
  EXPECT_GE(results.affinity.hit_rate, 0.85 * results.best);
}

TEST(SimulationTest, AHotPrefixOverloadsNoReplica) {
  const Results results = Compare("hot", 3.0, {});
  EXPECT_LE(results.affinity.imbalance, 1.25);
  EXPECT_LE(results.affinity.work_imbalance, 1.25);
}

TEST(SimulationTest, PromptsThatShareNothingAreSpreadLikeLeastLoaded) {
  const Results results = Compare("independent", 0.7, {});
  EXPECT_EQ(results.affinity.hit_rate, 0.0);
  EXPECT_NEAR(results.affinity.imbalance, results.least_loaded.imbalance, 0.05);
  EXPECT_LE(results.affinity.queue_s_p99,
            1.1 * results.least_loaded.queue_s_p99);
}

}  // namespace
}  // namespace kvasir::bench
