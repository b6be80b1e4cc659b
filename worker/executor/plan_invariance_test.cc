// Tests of compressed caches: other requests, chunks and preemption must change
// no bit of a request's output. Covers every compression method, every model
// family, and sliding windows.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "worker/testing/family_plan_cases.h"
#include "worker/testing/invariance_scenario.h"

namespace kvasir::worker {
namespace {

// The sliding window in tokens: shorter than most prompts, and not a whole
// number of pages.
constexpr int64_t kWindow = 24;

// A page size, and numbers of pages so small that requests preempt each other.
// Some of the pages may be side pages.
struct Pools {
  int64_t page_tokens;
  std::vector<int64_t> pages;
};

// Returns all page sizes if KVASIR_ALL_CONDITIONS is set; otherwise one page
// size, chosen by the case's name.
std::vector<Pools> PoolsOf(const std::string& name) {
  const std::vector<Pools> all = {{16, {10}}, {32, {7, 8}}, {64, {6, 8}}};
  if (std::getenv("KVASIR_ALL_CONDITIONS") != nullptr) return all;
  size_t sum = 0;
  for (const char letter : name) sum += static_cast<unsigned char>(letter);
  return {all[sum % all.size()]};
}

class PlanInvarianceTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  PlanInvarianceTest() {
    Worker worker = MakeWorker({.one_at_a_time = true});
    alone_ = worker.Run(Requests());
  }

  static Worker MakeWorker(const Conditions& conditions) {
    return Worker(conditions, 0, &GetParam().plan_case, GetParam().shape);
  }
  static std::vector<Request> Requests(bool use_prefix_cache = false) {
    std::vector<Request> requests = MixedRequests();
    requests.resize(8);
    for (Request& request : requests) {
      request.use_prefix_cache = use_prefix_cache;
    }
    return requests;
  }

  const std::vector<Pools> pools_ = PoolsOf(GetParam().plan_case.name);
  // The samples of each request when the requests run one at a time.
  std::vector<Sample> alone_;
};

TEST_P(PlanInvarianceTest, ChunksThreadsAndPageSizeChangeNoBitOfTheOutput) {
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
       }) {
    Worker worker = MakeWorker(conditions);
    EXPECT_EQ(worker.Run(Requests()), alone_)
        << "pages of " << conditions.page_tokens;
    EXPECT_EQ(worker.steps_ahead() > 0, worker.can_run_ahead());
  }
}

TEST_P(PlanInvarianceTest, PreemptionChangesNoBitOfTheOutput) {
  for (const Pools& pools : pools_) {
    int64_t preemptions = 0;
    int64_t imports = 0;
    for (const int64_t pages : pools.pages) {
      for (const int64_t host_pages : {0, 64}) {
        Worker worker = MakeWorker({.page_tokens = pools.page_tokens,
                                    .pages = pages,
                                    .host_pages = host_pages});
        EXPECT_EQ(worker.Run(Requests()), alone_) << pools.page_tokens;
        preemptions += worker.stats().preemptions - worker.stats().exports;
        imports += worker.stats().imports;
      }
    }
    EXPECT_GT(preemptions, 0) << "pages of " << pools.page_tokens;
    EXPECT_GT(imports, 0) << "pages of " << pools.page_tokens;
  }
}

TEST_P(PlanInvarianceTest, APrefixCacheHitChangesNoBitOfTheOutput) {
  for (const Pools& pools : pools_) {
    Worker worker =
        MakeWorker({.page_tokens = pools.page_tokens, .max_num_seqs = 4});
    EXPECT_EQ(worker.Run(Requests(true)), alone_);
    EXPECT_EQ(worker.Run(Requests(true)), alone_)
        << "pages of " << pools.page_tokens;
    EXPECT_GT(worker.stats().hit_tokens, 0);
  }
}

Request GreedyRequest(std::vector<int32_t> prompt, uint32_t max_tokens) {
  Request request;
  request.request_id = "chat";
  request.prompt = proto::TokenBytes::Adopt(std::move(prompt));
  request.sampling.set_temperature(0.0f);
  request.sampling.set_max_tokens(max_tokens);
  request.sampling.set_ignore_eos(true);
  request.sampling.set_logprobs(5);
  return request;
}

// The second turn's prompt is the first prompt, the answer to it, and some more
// tokens. The prefix cache has the pages of the first prompt and its answer.
TEST_P(PlanInvarianceTest,
       TheNextTurnOfAChatReusesAllFullPagesOfThePreviousTurn) {
  constexpr uint32_t kAnswer = 30;
  for (const int64_t page_tokens : {16, 32}) {
    Worker found = MakeWorker({.page_tokens = page_tokens});
    Worker alone = MakeWorker({.page_tokens = page_tokens});
    std::vector<int32_t> text;
    for (int32_t i = 0; i < 41; ++i) text.push_back(3 + 31 * i % 1009);
    for (int turn = 0; turn < 2; ++turn) {
      const int64_t before = found.stats().hit_tokens;
      Request request = GreedyRequest(text, turn == 0 ? kAnswer : 8);
      const std::vector<Sample> answer = found.Run({request});
      request.use_prefix_cache = false;
      EXPECT_EQ(alone.Run({request}), answer) << "turn " << turn;
      EXPECT_EQ(found.stats().hit_tokens - before,
                turn == 0 ? 0 : (41 + kAnswer - 1) / page_tokens * page_tokens);
      text.insert(text.end(), answer[0].tokens.begin(), answer[0].tokens.end());
      text.insert(text.end(), {7, 5, 3});
    }
    EXPECT_EQ(alone.stats().hit_tokens, 0);
  }
}

TEST_P(PlanInvarianceTest,
       PreemptionTogetherWithPrefixCacheHitsChangesNoBitOfTheOutput) {
  std::vector<Request> requests;
  for (const int32_t text : {41, 43, 47, 53, 59}) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < 40; ++i) prompt.push_back(3 + text * i % 1009);
    requests.push_back(GreedyRequest(std::move(prompt), 60));
    requests.back().request_id = absl::StrCat(text);
  }
  const std::vector<Sample> alone =
      MakeWorker({.one_at_a_time = true}).Run(requests);
  int64_t preemptions = 0;
  int64_t imports = 0;
  for (const int64_t pages : {10, 28}) {
    for (const int64_t host_pages : {0, 12}) {
      Worker worker = MakeWorker({.pages = pages, .host_pages = host_pages});
      EXPECT_EQ(worker.Run(requests), alone) << pages << " pages";
      preemptions += worker.stats().preemptions;
      imports += worker.stats().imports;
    }
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(imports, 0);
}

TEST_P(PlanInvarianceTest,
       ForksOfAGreedyRequestHaveTheSameOutputAsASingleSample) {
  std::vector<int32_t> text;
  for (int32_t i = 0; i < 53; ++i) text.push_back(2 + 17 * i % 911);
  Request request = GreedyRequest(text, 20);
  request.use_prefix_cache = false;
  Worker worker = MakeWorker({});
  const std::vector<Sample> alone = worker.Run({request});
  request.sampling.set_n(3);
  EXPECT_EQ(worker.stats().forks, 0);
  for (const Sample& sample : worker.Run({request})) {
    EXPECT_EQ(sample, alone[0]);
  }
  EXPECT_EQ(worker.stats().forks, 2);
}

TEST_P(PlanInvarianceTest, CanceledRequestsChangeNoBitOfTheOutputOfOthers) {
  std::vector<Sample> kept;
  auto next = alone_.begin();
  for (size_t i = 0; i < Requests().size(); ++i) {
    const uint32_t n = Requests()[i].sampling.n();
    if (i % 2 == 0) kept.insert(kept.end(), next, next + n);
    next += n;
  }
  for (const Pools& pools : pools_) {
    Worker worker = MakeWorker({.page_tokens = pools.page_tokens,
                                .max_batched_tokens = 16,
                                .pages = 512 / pools.page_tokens});
    EXPECT_EQ(worker.RunAndAbortOdd(Requests(true)), kept)
        << "pages of " << pools.page_tokens;
    // Pages that aborted requests left in the prefix cache change no result.
    EXPECT_EQ(worker.Run(Requests(true)), alone_)
        << "pages of " << pools.page_tokens;
  }
}

// Full-rank and low-rank caches of every data type. In all other cases,
// unquantized numbers are bfloat16.
std::vector<PlanCase> TypedCases() {
  using namespace plan_cases;  // NOLINT: helpers that make plans
  const std::string half = R"({"dtype":"F16"})";
  const std::string full = R"({"dtype":"F32"})";
  return {
      {"Dense", Full("POST_ROPE"), Full("NO_ROPE")},
      {"DenseHalves", Full("POST_ROPE", half), Full("NO_ROPE", half)},
      {"DenseFloats", Full("POST_ROPE", full), Full("NO_ROPE", full)},
      {"PaluHalves", LowRank(kTwo, kReconstruct, "PRE_ROPE", half),
       LowRank(kTwo, kFold, "NO_ROPE", half)},
      {"PaluFloats", LowRank(kTwo, kReconstruct, "PRE_ROPE", full),
       LowRank(kTwo, kFold, "NO_ROPE", full)},
  };
}

std::vector<FamilyCase> Cases() {
  std::vector<FamilyCase> cases = FamilyCases(kWindow);
  for (const auto& more : {PlanCases(), TypedCases()}) {
    for (const PlanCase& plan_case : more) {
      cases.push_back({TinyShape(), plan_case});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Plans, PlanInvarianceTest,
                         ::testing::ValuesIn(Cases()),
                         [](const auto& param_info) {
                           return param_info.param.plan_case.name;
                         });

}  // namespace
}  // namespace kvasir::worker
