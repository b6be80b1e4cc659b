// Tests plans that evict slots, with scheduler, cache and executor. Chunks,
// batch, page size, threads and preemptions must change no bit of a request's
// output.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "worker/testing/eviction_cases.h"
#include "worker/testing/invariance_scenario.h"

namespace kvasir::worker {
namespace {

using namespace plan_cases;  // NOLINT: helpers that make plans

class EvictionInvarianceTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  EvictionInvarianceTest() {
    Worker worker = MakeWorker({.one_at_a_time = true});
    alone_ = worker.Run(Requests());
    EXPECT_GT(worker.stats().slots_evicted, 100);
  }

  static Worker MakeWorker(const Conditions& conditions) {
    return Worker(conditions, 0, &GetParam().plan_case, GetParam().shape);
  }
  static std::vector<Request> Requests() {
    std::vector<Request> requests = MixedRequests();
    requests.resize(8);
    return requests;
  }

  // The samples of each request when the requests run one at a time.
  std::vector<Sample> alone_;
};

TEST_P(EvictionInvarianceTest,
       ChunksThreadsPageSizeAndKernelsChangeNoBitOfTheOutput) {
  for (const Sample& sample : alone_) {
    for (const float number : sample.numbers) {
      ASSERT_TRUE(std::isfinite(number));
    }
  }
  for (const Conditions& conditions : {
           Conditions{.threads = 2},
           Conditions{
               .page_tokens = 32, .max_num_seqs = 7, .max_batched_tokens = 7},
           Conditions{.page_tokens = 64, .max_num_seqs = 3},
           Conditions{.backend = kernels::CpuBackend::kReference},
       }) {
    EXPECT_EQ(MakeWorker(conditions).Run(Requests()), alone_)
        << "pages of " << conditions.page_tokens;
  }
}

// After a preemption the sequence must hold the same slots as before. Either
// its pages are copied back from the host pool, or all its tokens run again,
// with the same evictions.
TEST_P(EvictionInvarianceTest, PreemptionChangesNoBitOfTheOutput) {
  for (const int64_t host_pages : {0, 64}) {
    int64_t preemptions = 0;
    for (const int64_t pages : {8, 9, 10, 12, 15, 18}) {
      Worker worker = MakeWorker({.pages = pages, .host_pages = host_pages});
      EXPECT_EQ(worker.Run(Requests()), alone_) << pages << " pages";
      preemptions += host_pages > 0
                         ? worker.stats().imports
                         : worker.stats().preemptions - worker.stats().exports;
    }
    EXPECT_GT(preemptions, 0) << host_pages << " host pages";
  }
}

TEST_P(EvictionInvarianceTest,
       ForksOfAGreedyRequestHaveTheSameOutputAsASingleSample) {
  Request request = Requests()[5];
  request.sampling.set_temperature(0);
  request.sampling.set_max_tokens(25);
  request.sampling.set_n(1);
  Worker worker = MakeWorker({.max_batched_tokens = 16});
  const std::vector<Sample> alone = worker.Run({request});
  request.sampling.set_n(3);
  for (const Sample& sample : worker.Run({request})) {
    EXPECT_EQ(sample, alone[0]);
  }
  EXPECT_EQ(worker.stats().forks, 2);
}

TEST_P(EvictionInvarianceTest, CanceledRequestsChangeNoBitOfTheOutputOfOthers) {
  std::vector<Sample> kept;
  auto next = alone_.begin();
  for (size_t i = 0; i < Requests().size(); ++i) {
    const uint32_t n = Requests()[i].sampling.n();
    if (i % 2 == 0) kept.insert(kept.end(), next, next + n);
    next += n;
  }
  Worker worker =
      MakeWorker({.max_batched_tokens = 16, .pages = 14, .host_pages = 20});
  EXPECT_EQ(worker.RunAndAbortOdd(Requests()), kept);
  EXPECT_EQ(worker.Run(Requests()), alone_);
}

// Compares with a plan that does not evict.
TEST_P(EvictionInvarianceTest,
       ASequenceShorterThanTheEvictionBudgetHasTheSameBitsAsWithoutEviction) {
  PlanCase plan_case = GetParam().plan_case;
  const Conditions conditions = {.max_batched_tokens = 20};
  const auto without_evicting = [&] {
    Worker worker(conditions, 0, &plan_case, GetParam().shape);
    std::vector<Sample> samples = worker.Run(Requests());
    EXPECT_EQ(worker.stats().slots_evicted, 0);
    return samples;
  };
  plan_case.eviction = "";
  const std::vector<Sample> dense = without_evicting();
  plan_case.eviction = Eviction("", R"("budget":128)");
  EXPECT_EQ(without_evicting(), dense);
  EXPECT_NE(alone_, dense);
}

INSTANTIATE_TEST_SUITE_P(Plans, EvictionInvarianceTest,
                         ::testing::ValuesIn(EvictionCases()),
                         [](const auto& param_info) {
                           return param_info.param.plan_case.name;
                         });

// The pool holds a quarter of the prompt. This is enough, because eviction
// keeps fewer slots.
TEST(EvictionTest, APromptFourTimesAsLongAsThePoolIsServed) {
  PlanCase plan_case = {"Codes", Full("POST_ROPE", TokenCodes("4")),
                        Full("NO_ROPE", TokenCodes("4"))};
  plan_case.eviction = Eviction("");
  const Conditions conditions = {.pages = 2, .max_model_len = 1024};
  Worker worker(conditions, 0, &plan_case);
  std::vector<int32_t> ids(128);
  for (int32_t t = 0; t < 128; ++t) ids[static_cast<size_t>(t)] = t * 37 % 1237;
  Request request;
  request.request_id = "long";
  request.use_prefix_cache = false;
  request.prompt = proto::TokenBytes::Adopt(std::move(ids));
  request.sampling.set_max_tokens(40);
  request.sampling.set_ignore_eos(true);
  const std::vector<Sample> samples = worker.Run({request});
  EXPECT_EQ(samples[0].tokens.size(), 40u);
  EXPECT_GT(worker.stats().slots_evicted, 128);
  EXPECT_EQ(worker.stats().preemptions, 0);
}

}  // namespace
}  // namespace kvasir::worker
