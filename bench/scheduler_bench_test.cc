#include "bench/scheduler_bench.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

TEST(SchedulerBenchTest, TheBenchmarkMeasuresStepsThatDecodeAFullBatch) {
  SchedulerBenchOptions options;
  options.num_sequences = 8;
  options.context_tokens = 100;
  options.page_tokens = 16;
  options.steps = 20;
  KVASIR_ASSERT_OK_AND_ASSIGN(const SchedulerBenchResult result,
                              RunSchedulerBench(options));
  EXPECT_GT(result.schedule_us, 0.0);
  EXPECT_GT(result.apply_us, 0.0);
  EXPECT_GE(result.step_us, result.schedule_us);
  EXPECT_GE(result.step_p99_us, result.step_us);
  EXPECT_GT(result.ahead_us, 0.0);
  // Each of 8 sequences has (100 + 3 * 20) / 16 + 2 = 12 pages of 16 tokens.
  EXPECT_EQ(result.pool_bytes, 8 * 12 * 16 * options.kv_bytes_per_token);
  EXPECT_GT(result.metadata_bytes, 0);
  EXPECT_LT(result.metadata_share, 0.02);
}

TEST(SchedulerBenchTest, ABenchmarkOfZeroSequencesIsRefused) {
  SchedulerBenchOptions options;
  options.num_sequences = 0;
  EXPECT_THAT(RunSchedulerBench(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("at least 1 sequence")));
}

}  // namespace
}  // namespace kvasir::worker
