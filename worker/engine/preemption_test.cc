#include "worker/engine/preemption.h"

#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

TEST(PreemptionTest,
     ASequenceIsCopiedIfCopyingOutAndBackTakesLessTimeThanAPrefill) {
  // The prefill of 100 tokens takes 1 second. In this time, 500 bytes can be
  // copied out and back (2 * 500 / 1000 = 1). So 499 bytes are faster to copy.
  PreemptionCosts costs = {.image_bytes = 499,
                           .recompute_tokens = 100,
                           .copy_bytes_per_second = 1000,
                           .prefill_tokens_per_second = 100};
  EXPECT_EQ(ChoosePreemption(costs), Preemption::kCopy);
  costs.image_bytes = 500;
  EXPECT_EQ(ChoosePreemption(costs), Preemption::kRecompute);
  costs.recompute_tokens = 101;
  EXPECT_EQ(ChoosePreemption(costs), Preemption::kCopy);
  costs.copy_bytes_per_second = 900;
  EXPECT_EQ(ChoosePreemption(costs), Preemption::kRecompute);
  costs.prefill_tokens_per_second = 80;
  EXPECT_EQ(ChoosePreemption(costs), Preemption::kCopy);
}

TEST(PreemptionTest, ASequenceWithoutComputedTokensIsNotCopied) {
  EXPECT_EQ(ChoosePreemption({}), Preemption::kRecompute);
}

TEST(PrefillRateTest, AnAssumedPrefillRateIsUsedUntilAStepHasBeenMeasured) {
  PrefillRate rate;
  EXPECT_EQ(rate.tokens_per_second(), kAssumedPrefillTokensPerSecond);
  rate.Add(100, absl::ZeroDuration());
  EXPECT_EQ(rate.tokens_per_second(), kAssumedPrefillTokensPerSecond);
  rate.Add(100, absl::Seconds(2));
  EXPECT_EQ(rate.tokens_per_second(), 50);
}

TEST(PrefillRateTest, ThePrefillRateFollowsTheMostRecentSteps) {
  PrefillRate rate;
  rate.Add(100, absl::Seconds(1));
  for (int i = 0; i < 200; ++i) rate.Add(300, absl::Seconds(1));
  EXPECT_NEAR(rate.tokens_per_second(), 300, 1);
}

}  // namespace
}  // namespace kvasir::worker
