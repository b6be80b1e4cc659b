#include "bench/tool/load_generator.h"

#include <atomic>
#include <map>

#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using ::testing::HasSubstr;

// A client that answers immediately and records the requests.
class FakeClient final : public TokenClient {
 public:
  absl::StatusOr<TokenResult> Generate(const TokenRequest& request) override {
    const int now = ++running_;
    int most = most_.load();
    while (now > most && !most_.compare_exchange_weak(most, now)) {
    }
    absl::SleepFor(absl::Milliseconds(2));
    --running_;
    base::MutexLock lock(&mutex_);
    lengths[request.request_id] =
        request.prompt_ids.size() + request.max_tokens;
    if (lengths.size() == fail_at)
      return absl::InternalError("the fake client fails");
    TokenResult result;
    result.arrivals = {{absl::Milliseconds(1), 1}, {absl::Milliseconds(4), 3}};
    result.total = absl::Milliseconds(5);
    return result;
  }

  int most() const { return most_; }
  size_t fail_at = 0;
  std::map<std::string, size_t> lengths;

 private:
  std::atomic<int> running_{0};
  std::atomic<int> most_{0};
  base::Mutex mutex_;
};

LoadOptions SmallLoad() {
  LoadOptions options;
  options.num_requests = 20;
  options.concurrency = 3;
  options.max_model_len = 64;
  options.vocab_size = 100;
  options.prompt_tokens = *LengthDistribution::Parse("uniform:10:200");
  options.output_tokens = *LengthDistribution::Parse("fixed:8");
  return options;
}

TEST(LoadGeneratorTest, ClosedLoopSendsEachRequestOnceWithLimitedConcurrency) {
  FakeClient client;
  const LoadResult result = RunLoad(SmallLoad(), &client);
  EXPECT_EQ(result.succeeded, 20);
  EXPECT_EQ(result.failed, 0);
  EXPECT_EQ(client.lengths.size(), 20u);
  EXPECT_LE(client.most(), 3);
  EXPECT_EQ(result.output_tokens, 80);
  EXPECT_DOUBLE_EQ(result.first_token_ms.p50, 1.0);
  // The responses are 3 ms apart and have 3 tokens each.
  EXPECT_DOUBLE_EQ(result.inter_token_ms.p50, 1.0);
  EXPECT_DOUBLE_EQ(result.end_to_end_ms.p99, 5.0);
}

TEST(LoadGeneratorTest, SampledLengthsAreCutToTheMaximumLengthOfTheModel) {
  FakeClient client;
  RunLoad(SmallLoad(), &client);
  for (const auto& [id, length] : client.lengths) EXPECT_LE(length, 64u) << id;
}

TEST(LoadGeneratorTest, FailedRequestsAreCountedAlongWithTheirFirstError) {
  FakeClient client;
  client.fail_at = 5;
  const LoadResult result = RunLoad(SmallLoad(), &client);
  EXPECT_EQ(result.failed, 1);
  EXPECT_EQ(result.succeeded, 19);
  EXPECT_THAT(result.first_error,
              base::StatusIs(absl::StatusCode::kInternal,
                             HasSubstr("the fake client fails")));
}

TEST(LoadGeneratorTest,
     OpenLoopLatencyIsMeasuredFromTheTimeAtWhichARequestWasDue) {
  // Requests are due at ten times the rate that is possible with answers of 2
  // ms, one at a time. So they are sent late, and their latencies must include
  // the delay.
  LoadOptions options = SmallLoad();
  options.concurrency = 1;
  options.rate = 5000;
  FakeClient client;
  const LoadResult result = RunLoad(options, &client);
  EXPECT_EQ(result.succeeded, 20);
  EXPECT_GT(result.end_to_end_ms.p90, 15.0);
}

TEST(LengthDistributionTest, SampledLengthsStayInTheRangeOfTheirDistribution) {
  std::mt19937_64 random(1);
  const auto uniform = LengthDistribution::Parse("uniform:3:5");
  const auto lognormal = LengthDistribution::Parse("lognormal:100:0.5");
  ASSERT_TRUE(uniform.ok() && lognormal.ok());
  int64_t above = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t length = uniform->Sample(&random);
    EXPECT_GE(length, 3);
    EXPECT_LE(length, 5);
    above += lognormal->Sample(&random) >= 100 ? 1 : 0;
  }
  // half of the 1000 samples are above the median
  EXPECT_NEAR(static_cast<double>(above), 500.0, 80.0);
  EXPECT_EQ(LengthDistribution::Parse("fixed:7")->Sample(&random), 7);
}

TEST(LengthDistributionTest, LengthsAboveTheMaximumLengthOfTheModelAreRefused) {
  const auto check = [](const char* prompt, const char* output) {
    return CheckLengths(*LengthDistribution::Parse(prompt),
                        *LengthDistribution::Parse(output), 64);
  };
  KVASIR_EXPECT_OK(check("fixed:60", "fixed:4"));
  KVASIR_EXPECT_OK(check("lognormal:30:2", "uniform:1:34"));
  for (const char* prompt : {"fixed:61", "uniform:1:61", "lognormal:61:0"}) {
    EXPECT_THAT(check(prompt, "fixed:4"),
                base::StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("limit of 64")))
        << prompt;
  }
}

// Regression test: `bench serve` sent prompts of up to 512 tokens to a model
// whose length is 512 tokens.
TEST(LengthDistributionTest,
     DefaultLengthsAreReducedForAModelWithAShortMaximumLength) {
  const auto prompts = *LengthDistribution::Parse("uniform:32:512");
  const auto outputs = *LengthDistribution::Parse("uniform:8:64");
  EXPECT_EQ(prompts.CutTo(512 - 64).longest(), 448);
  EXPECT_EQ(prompts.CutTo(4096).longest(), 512);
  EXPECT_EQ(prompts.CutTo(16).longest(), 16);
  EXPECT_EQ(prompts.CutTo(-3).longest(), 1);
  EXPECT_EQ(LengthDistribution::Parse("lognormal:100:2")->CutTo(64).longest(),
            64);
  KVASIR_EXPECT_OK(
      CheckLengths(prompts.CutTo(512 - outputs.longest()), outputs, 512));
  std::mt19937_64 random(1);
  EXPECT_EQ(prompts.CutTo(1).Sample(&random), 1);
}

TEST(LengthDistributionTest,
     TextThatDoesNotDescribeALengthDistributionIsRefused) {
  for (const char* text :
       {"", "7", "fixed", "fixed:0", "fixed:1:2", "fixed:x", "uniform:5:3",
        "uniform:5", "lognormal:1:-1", "normal:1:2", "fixed:inf"}) {
    EXPECT_FALSE(LengthDistribution::Parse(text).ok()) << text;
  }
}

}  // namespace
}  // namespace kvasir::cli
