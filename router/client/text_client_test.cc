#include "router/client/text_client.h"

namespace kvasir::cli {
namespace {

// Regression test: the prompt's time, 9.5 s, once counted as time of the
// output, so that 5.9 tokens/s were reported instead of 48.
TEST(TextResultTest, TheDecodeRateDoesNotIncludeTheTimeOfThePrompt) {
  TextResult result;
  result.prompt_tokens = 3901;
  result.output_tokens = 65;
  result.time_to_first_token = absl::Milliseconds(9541);
  result.total = result.time_to_first_token + absl::Seconds(64) / 48;
  EXPECT_NEAR(result.decode_rate().value_or(0), 48.0, 1e-6);
  EXPECT_NEAR(result.prompt_rate().value_or(0), 3901 / 9.541, 1e-6);
}

TEST(TextResultTest, AnAnswerWithOnlyOneTokenHasNoDecodeRate) {
  TextResult result;
  EXPECT_EQ(result.prompt_rate(), std::nullopt);
  result.prompt_tokens = 5;
  result.output_tokens = 1;
  result.time_to_first_token = absl::Milliseconds(10);
  result.total = absl::Milliseconds(11);
  EXPECT_EQ(result.decode_rate(), std::nullopt);
}

}  // namespace
}  // namespace kvasir::cli
