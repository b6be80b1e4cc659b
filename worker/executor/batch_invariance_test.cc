// Tests the central promise of the engine: some conditions change no bit of a
// request's tokens and log probabilities. These are other requests in the
// batch, prompt chunks, the number of threads, preemptions, prefix-cache hits,
// and a resumption on another worker. Runs the scheduler and the real executor
// on a tiny model.
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "worker/testing/invariance_scenario.h"

namespace kvasir::worker {
namespace {

class BatchInvarianceTest : public ::testing::TestWithParam<int64_t> {
 protected:
  // Returns the samples of each request when the requests run one at a time.
  std::vector<Sample> Alone(const std::vector<Request>& requests) {
    Worker worker({.one_at_a_time = true}, GetParam());
    return worker.Run(requests);
  }
};

TEST_P(BatchInvarianceTest,
       SixteenRequestsInOneBatchGetTheSameBitsAsOneRequestAtATime) {
  const std::vector<Request> requests = MixedRequests();
  Worker worker({}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
  EXPECT_EQ(worker.stats().preemptions, 0);
}

TEST_P(BatchInvarianceTest, ChunkSizeAndNumberOfThreadsChangeNoBitOfTheOutput) {
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

TEST_P(BatchInvarianceTest, StepsOfASingleTokenChangeNoBitOfTheOutput) {
  std::vector<Request> requests = MixedRequests();
  std::erase_if(requests, [](const Request& r) { return r.sampling.n() > 1; });
  Worker worker({.max_num_seqs = 1, .max_batched_tokens = 1}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
}

TEST_P(BatchInvarianceTest, PreemptionChangesNoBitOfTheOutput) {
  const std::vector<Request> requests = MixedRequests();
  Worker worker({.pages = 14}, GetParam());
  EXPECT_EQ(worker.Run(requests), Alone(requests));
  EXPECT_GT(worker.stats().preemptions, 0);
  Worker copying({.pages = 14, .host_pages = 9}, GetParam());
  EXPECT_EQ(copying.Run(requests), Alone(requests));
  EXPECT_GT(copying.stats().imports, 0);
}

TEST_P(BatchInvarianceTest, APrefixCacheHitChangesNoBitOfTheOutput) {
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

TEST_P(BatchInvarianceTest, AResumedRequestContinuesWithTheSameTokens) {
  const std::vector<Request> requests = MixedRequests();
  std::vector<Request> resumed;
  std::vector<Sample> rest;
  for (const Request& request : requests) {
    if (request.sampling.n() == 1) resumed.push_back(request);
  }
  const std::vector<Sample> whole = Alone(resumed);
  for (size_t i = 0; i < resumed.size(); ++i) {
    const size_t emitted = 1 + i % 7;
    resumed[i].emitted = proto::TokenBytes::FromIds(
        absl::MakeConstSpan(whole[i].tokens).first(emitted));
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
                                      ? std::string("NoLayerHasAWindow")
                                      : std::string("OneLayerHasAWindow");
                         });

}  // namespace
}  // namespace kvasir::worker
