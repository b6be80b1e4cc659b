#include "compress/calibrate/calibration_sample.h"

#include <numeric>
#include <set>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// Token i is i.
TokenStream Numbers(int64_t count) {
  TokenStream text;
  text.ids.resize(static_cast<size_t>(count));
  std::iota(text.ids.begin(), text.ids.end(), 0);
  return text;
}

TEST(CalibrationSampleTest, WindowsAreDifferentAndRunsOfTheText) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleCalibration(Numbers(1007),
                        {.tokens = 905, .sequence_tokens = 10, .seed = 3},
                        1007));
  ASSERT_EQ(sample.num_sequences(), 90);
  EXPECT_EQ(sample.num_tokens(), 900);
  std::set<int32_t> seen;
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    for (size_t i = 0; i < sequence.size(); ++i) {
      EXPECT_EQ(sequence[i], sequence[0] + static_cast<int32_t>(i));
      seen.insert(sequence[i]);
    }
  }
  EXPECT_EQ(seen.size(), 900U);
}

TEST(CalibrationSampleTest, ALargerSampleBeginsWithTheSmallerOne) {
  const TokenStream text = Numbers(500);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample small,
      SampleCalibration(text, {.tokens = 70, .sequence_tokens = 7}, 500));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample large,
      SampleCalibration(text, {.tokens = 140, .sequence_tokens = 7}, 500));
  ASSERT_EQ(large.sequences.size(), 20U);
  for (size_t i = 0; i < small.sequences.size(); ++i) {
    EXPECT_EQ(small.sequences[i], large.sequences[i]);
  }
}

TEST(CalibrationSampleTest, SeedsTakeOtherWindows) {
  const TokenStream text = Numbers(5000);
  auto sample = [&](uint64_t seed) {
    return SampleCalibration(
               text, {.tokens = 50, .sequence_tokens = 10, .seed = seed}, 5000)
        ->sequences;
  };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
}

TEST(CalibrationSampleTest, ATextOfJustTheTokensIsEnough) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleCalibration(Numbers(16), {.tokens = 16, .sequence_tokens = 8}, 16));
  EXPECT_EQ(sample.num_sequences(), 2);
}

TEST(CalibrationSampleTest, ATooShortTextSaysWhatItHasAndWhatIsWanted) {
  EXPECT_THAT(
      SampleCalibration(Numbers(15), {.tokens = 16, .sequence_tokens = 8}, 16),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("it has 15 tokens, want 16 (2 sequences of 8)")));
}

TEST(CalibrationSampleTest, FewerTokensThanASequenceAreRefused) {
  EXPECT_THAT(
      SampleCalibration(Numbers(99), {.tokens = 7, .sequence_tokens = 8}, 99),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("7 calibration tokens hold no sequence of 8")));
}

TEST(CalibrationSampleTest, IdsOutsideTheVocabularyAreRefused) {
  EXPECT_THAT(
      SampleCalibration(Numbers(20), {.tokens = 16, .sequence_tokens = 8}, 19),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("token 19 is 19, the model's vocabulary has 19")));
}

}  // namespace
}  // namespace kvasir::compress
