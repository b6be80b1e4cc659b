#include "compress/calibrate/calibration_sample.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// Returns a text in which the id of token i is i.
TokenStream Numbers(int64_t count) {
  TokenStream text;
  text.ids.resize(static_cast<size_t>(count));
  std::iota(text.ids.begin(), text.ids.end(), 0);
  return text;
}

TEST(CalibrationSampleTest,
     SampledSequencesAreStretchesOfTheTextThatDoNotOverlap) {
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

TEST(CalibrationSampleTest,
     ALargerSampleBeginsWithTheSequencesOfASmallerSample) {
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

TEST(CalibrationSampleTest, DifferentSeedsChooseDifferentSequencesOfTheText) {
  const TokenStream text = Numbers(5000);
  auto sample = [&](uint64_t seed) {
    return SampleCalibration(
               text, {.tokens = 50, .sequence_tokens = 10, .seed = seed}, 5000)
        ->sequences;
  };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
}

TEST(CalibrationSampleTest, ATextWithExactlyTheRequestedTokensIsLongEnough) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleCalibration(Numbers(16), {.tokens = 16, .sequence_tokens = 8}, 16));
  EXPECT_EQ(sample.num_sequences(), 2);
}

TEST(CalibrationSampleTest,
     ATextThatIsTooShortIsRefusedWithItsLengthAndTheNeededLength) {
  EXPECT_THAT(
      SampleCalibration(Numbers(15), {.tokens = 16, .sequence_tokens = 8}, 16),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("it has 15 tokens, but 16 are needed (2 sequences of 8 "
                    "tokens)")));
}

TEST(CalibrationSampleTest, FewerTokensThanOneSequenceNeedsAreRefused) {
  EXPECT_THAT(
      SampleCalibration(Numbers(99), {.tokens = 7, .sequence_tokens = 8}, 99),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("7 calibration tokens are too few for a sequence of 8")));
}

TEST(CalibrationSampleTest, TokenIdsOutsideTheVocabularyAreRefused) {
  EXPECT_THAT(
      SampleCalibration(Numbers(20), {.tokens = 16, .sequence_tokens = 8}, 19),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr(
              "token 19 has the id 19, but the model's vocabulary has 19")));
}

// Returns texts in which token i of domain d has the id 1000 d + i.
std::vector<DomainText> Domains(const std::vector<int64_t>& lengths) {
  std::vector<DomainText> domains;
  for (const int64_t length : lengths) {
    const auto index = static_cast<int32_t>(domains.size());
    TokenStream text = Numbers(length);
    for (int32_t& id : text.ids) id += 1000 * index;
    domains.push_back({std::string(1, static_cast<char>('a' + index)), text});
  }
  return domains;
}

TEST(SampleDomainsTest, TheLastSequencesOfEachDomainAreHeldOut) {
  const std::vector<DomainText> domains = Domains({300, 500, 220});
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleDomains(domains, {.tokens = 600, .sequence_tokens = 10}, 0.1,
                    3000));
  EXPECT_THAT(sample.domains, testing::ElementsAre("a", "b", "c"));
  ASSERT_EQ(sample.num_sequences(), 60);
  EXPECT_EQ(sample.held_out_sequences, 6);
  EXPECT_EQ(sample.counted_sequences(), 54);
  for (int64_t i = 0; i < 60; ++i) {
    const int64_t domain = sample.sequences[static_cast<size_t>(i)][0] / 1000;
    EXPECT_EQ(domain, i % 3);
    EXPECT_EQ(sample.DomainOf(i), domain);
  }
  // The windows of a domain must be the same as if only this domain were
  // sampled.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample alone,
      SampleCalibration(domains[1].text, {.tokens = 200, .sequence_tokens = 10},
                        3000));
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(sample.sequences[3 * i + 1], alone.sequences[i]);
  }
}

TEST(SampleDomainsTest, TheOnlySequenceOfADomainIsNotHeldOut) {
  auto held_out = [](int64_t tokens, double share) {
    return SampleDomains(Domains({50, 50}),
                         {.tokens = tokens, .sequence_tokens = 10}, share, 2000)
        ->held_out_sequences;
  };
  EXPECT_EQ(held_out(20, 0.1), 0);
  EXPECT_EQ(held_out(40, 0.1), 2);
  EXPECT_EQ(held_out(40, 0.0), 0);
}

TEST(SampleDomainsTest, ADomainThatIsTooShortForItsShareIsNamedInTheError) {
  EXPECT_THAT(
      SampleDomains(Domains({300, 25, 300}),
                    {.tokens = 90, .sequence_tokens = 10}, 0.1, 3000),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("domain b (a share of 1/3 of 90 tokens)"),
                     HasSubstr("it has 25 tokens, but 30"))));
}

TEST(SampleDomainsTest, TwoDomainsWithTheSameNameAreRefused) {
  std::vector<DomainText> domains = Domains({30, 30});
  domains[1].name = "a";
  EXPECT_THAT(
      SampleDomains(domains, {.tokens = 20, .sequence_tokens = 10}, 0.1, 2000),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("two calibration domains have the same name a")));
}

TEST(SpreadRowsTest, SampleRowsAreSpreadEvenlyOverTheTokensAfterTheSinks) {
  CalibrationSample sample;
  sample.sequence_tokens = 12;
  sample.sequences.resize(7);
  sample.sink_tokens = 2;
  for (const int64_t limit : {1, 5, 23, 70, 1000}) {
    const std::vector<SampledRow> rows = SpreadRows(sample, limit);
    const int64_t count = std::min<int64_t>(limit, 70);
    ASSERT_EQ(static_cast<int64_t>(rows.size()), count);
    std::vector<int64_t> taken(7);
    int64_t last = -1;
    for (const SampledRow& row : rows) {
      EXPECT_GE(row.position, 2);
      EXPECT_LT(row.position, 12);
      const int64_t token = row.sequence * 12 + row.position;
      EXPECT_GT(token, last);
      last = token;
      ++taken[static_cast<size_t>(row.sequence)];
    }
    for (const int64_t rows_of_it : taken) {
      EXPECT_LE(std::abs(7 * rows_of_it - count), 7) << limit;
    }
  }
}

}  // namespace
}  // namespace kvasir::compress
