#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "kernels/sampling/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Sampled {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  bool operator==(const Sampled& other) const {
    return ids == other.ids && SameBits(logprobs, other.logprobs) &&
           top_ids == other.top_ids &&
           SameBits(top_logprobs, other.top_logprobs);
  }
};

Sampled Draw(TestStream& test, const std::vector<float>& logits,
             const std::vector<SampleRowArgs>& rows, int64_t max_top = 0) {
  Sampled out;
  out.ids.assign(rows.size(), -7);
  out.logprobs.assign(rows.size(), kPoison);
  out.top_ids.assign(rows.size() * static_cast<size_t>(max_top), -7);
  out.top_logprobs.assign(rows.size() * static_cast<size_t>(max_top), kPoison);
  SampleArgs params;
  params.logits = logits.data();
  params.num_rows = static_cast<int64_t>(rows.size());
  params.vocab = static_cast<int64_t>(logits.size() / rows.size());
  params.row_stride = params.vocab;
  params.rows = rows.data();
  params.token_ids = out.ids.data();
  params.logprobs = out.logprobs.data();
  params.max_top = max_top;
  params.top_ids = out.top_ids.data();
  params.top_logprobs = out.top_logprobs.data();
  KVASIR_EXPECT_OK(Sample(test.stream(), OnDevice(params), test.workspace()));
  return out;
}

// Draws many times with the parameters `row` from `logits`, and counts the
// drawn ids.
std::map<int32_t, int> Histogram(const std::vector<float>& logits,
                                 SampleRowArgs row, int draws) {
  TestStream test;
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) {
    row.position = static_cast<uint64_t>(i);
    ++counts[Draw(test, logits, {row}).ids[0]];
  }
  return counts;
}

std::set<int32_t> Support(const std::vector<float>& logits,
                          const SampleRowArgs& row) {
  std::set<int32_t> ids;
  for (const auto& [id, count] : Histogram(logits, row, 2000)) ids.insert(id);
  return ids;
}

// Logits of four ids: the logarithms of 0.4, 0.3, 0.2 and 0.1 in mixed order.
const std::vector<float> kFour = {std::log(0.2f), std::log(0.4f),
                                  std::log(0.1f), std::log(0.3f)};

TEST(SampleTest, GreedySamplingTakesTheLowestIdWithTheLargestLogit) {
  TestStream test;
  SampleRowArgs greedy;
  greedy.temperature = 0.0f;
  EXPECT_EQ(1, Draw(test, kFour, {greedy}).ids[0]);
  EXPECT_EQ(1, Draw(test, {0.0f, 2.0f, 2.0f, 2.0f}, {greedy}).ids[0]);
}

TEST(SampleTest, DrawnTokensFollowTheProbabilityDistribution) {
  // With 3 degrees of freedom, chi-square is below 16.3 with a probability of
  // 99.9 %. The draws are fixed by their seeds, so the test never fails by
  // chance.
  constexpr int kDraws = 20000;
  const auto counts = Histogram(kFour, SampleRowArgs(), kDraws);
  const double expected[] = {0.2, 0.4, 0.1, 0.3};
  double chi_square = 0.0;
  for (int32_t id = 0; id < 4; ++id) {
    const double want = expected[id] * kDraws;
    const double difference = counts.at(id) - want;
    chi_square += difference * difference / want;
  }
  EXPECT_LT(chi_square, 16.3);
}

TEST(SampleTest, TemperatureSharpensTheDistribution) {
  SampleRowArgs row;
  // Temperature 0.5 squares the probabilities: id 1 has 0.16 / 0.3 = 16/30.
  row.temperature = 0.5f;
  const auto counts = Histogram(kFour, row, 20000);
  EXPECT_NEAR(16.0 / 30.0, counts.at(1) / 20000.0, 0.015);
}

TEST(SampleTest, TopKTopPAndMinPKeepOnlyTheMostLikelyTokens) {
  SampleRowArgs row;
  row.top_k = 2;
  EXPECT_EQ((std::set<int32_t>{1, 3}), Support(kFour, row));
  row = SampleRowArgs();
  row.top_p = 0.69f;  // reached by 0.4 + 0.3 = 0.7
  EXPECT_EQ((std::set<int32_t>{1, 3}), Support(kFour, row));
  row.top_p = 0.71f;
  EXPECT_EQ((std::set<int32_t>{0, 1, 3}), Support(kFour, row));
  row.top_p = 1e-6f;
  EXPECT_EQ((std::set<int32_t>{1}), Support(kFour, row));
  row = SampleRowArgs();
  row.min_p = 0.49f;  // the limit is 0.49 * 0.4 = 0.196, just below 0.2
  EXPECT_EQ((std::set<int32_t>{0, 1, 3}), Support(kFour, row));
  row.min_p = 0.51f;
  EXPECT_EQ((std::set<int32_t>{1, 3}), Support(kFour, row));
  // Top-p applies to the two ids that top-k kept. Among them, id 1 has a
  // probability of 0.4 / 0.7 = 0.57, which reaches 0.55 without the other id.
  row = SampleRowArgs();
  row.top_k = 2;
  row.top_p = 0.55f;
  EXPECT_EQ((std::set<int32_t>{1}), Support(kFour, row));
  // If only some of several equal logits fit into top-k, the lowest ids are
  // kept.
  row = SampleRowArgs();
  row.top_k = 2;
  EXPECT_EQ((std::set<int32_t>{0, 1}), Support({1.0f, 1.0f, 1.0f}, row));
}

TEST(SampleTest, BiasesBansAndMasksChangeWhichIdsAreDrawn) {
  SampleRowArgs row;
  const int32_t banned[] = {1, 99, -3};
  row.banned_ids = banned;
  row.num_banned = 3;
  EXPECT_EQ((std::set<int32_t>{0, 2, 3}), Support(kFour, row));
  const uint32_t mask = 0b0101;
  row.allow_mask = &mask;
  EXPECT_EQ((std::set<int32_t>{0, 2}), Support(kFour, row));
  const int32_t bias_ids[] = {2, 4};
  const float biases[] = {100.0f, 5.0f};
  row.bias_ids = bias_ids;
  row.biases = biases;
  row.num_biases = 2;
  EXPECT_EQ((std::set<int32_t>{2}), Support(kFour, row));
}

TEST(SampleTest, NoTokenIsDrawnIfAllIdsAreExcluded) {
  SampleRowArgs row;
  const uint32_t mask = 0;
  row.allow_mask = &mask;
  row.num_logprobs = 0;
  TestStream test;
  EXPECT_EQ(-1, Draw(test, kFour, {row}).ids[0]);
  row.temperature = 0.0f;
  EXPECT_EQ(-1, Draw(test, kFour, {row}).ids[0]);
}

TEST(SampleTest, ARowWithANonFiniteLogitDrawsNoTokenButOtherRowsDo) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr int64_t kVocab = 37;  // not a multiple of the vector length
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(1, backend);
    for (const float bad :
         {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
      for (const size_t at : {0, 16, 36}) {
        std::vector<float> logits(3 * kVocab, -1.0f);
        logits[20] = logits[2 * kVocab + 30] = 2.0f;
        logits[kVocab + at] = bad;
        SampleRowArgs row;
        row.temperature = 0.0f;
        std::vector<int32_t> output(kVocab);
        row.output_counts = output.data();
        EXPECT_EQ(Draw(test, logits, {row, row, row}).ids,
                  (std::vector<int32_t>{20, kLogitNotFinite, 30}));
        EXPECT_EQ(2, std::accumulate(output.begin(), output.end(), 0));
      }
    }
  }
}

TEST(SampleTest, AnAllowedTokenIsDrawnDespiteInfiniteBiases) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  struct Case {
    std::vector<float> biases;
    int32_t want;
  };
  const Case cases[] = {
      // Ids 1 and 3 have +infinity, so the lower one is taken.
      {{0.0f, kInf, 0.0f, kInf}, 1},
      // All logits are equal, so the lowest id that is not banned is taken. Id
      // 0 is banned.
      {{-kInf, -kInf, -kInf, -kInf}, 1},
      {{kInf, -kInf, 3.0f, -kInf}, 2},
  };
  const int32_t ids[] = {0, 1, 2, 3};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(1, backend);
    for (const Case& c : cases) {
      for (const float temperature : {0.0f, 1.0f}) {
        SampleRowArgs row;
        row.temperature = temperature;
        row.banned_ids = ids;
        row.num_banned = 1;
        row.bias_ids = ids;
        row.biases = c.biases.data();
        row.num_biases = 4;
        EXPECT_EQ(c.want, Draw(test, kFour, {row}).ids[0]);
      }
    }
  }
}

// Logits are divided by the penalty of 1e-38. The quotient 1 / 1e-38 is finite,
// but 100 / 1e-38 is infinite.
TEST(SampleTest, ATokenIsDrawnEvenIfTheRepetitionPenaltyMakesItsLogitInfinite) {
  TestStream test;
  SampleRowArgs row;
  const std::vector<int32_t> prompt = {0, 1, 0};
  row.prompt_counts = prompt.data();
  row.repetition_penalty = 1e-38f;
  EXPECT_EQ(1, Draw(test, {3.0f, 100.0f, 1.0f}, {row}).ids[0]);
}

TEST(SampleTest, PenaltiesLowerTheLogitsOfPromptAndOutputIds) {
  TestStream test;
  SampleRowArgs row;
  row.temperature = 0.0f;
  const std::vector<int32_t> prompt = {0, 1, 0};
  std::vector<int32_t> output = {0, 0, 2};
  row.prompt_counts = prompt.data();
  // the penalty changes 4 to 2, which is below 3
  row.repetition_penalty = 2.0f;
  EXPECT_EQ(0, Draw(test, {3.0f, 4.0f, 1.0f}, {row}).ids[0]);
  // A negative logit is multiplied by the penalty: -1 becomes -2.
  EXPECT_EQ(0, Draw(test, {-1.5f, -1.0f, -9.0f}, {row}).ids[0]);
  row = SampleRowArgs();
  row.temperature = 0.0f;
  row.output_counts = output.data();
  // The penalty is subtracted once, not twice: 4 becomes 2.5, which is below 3.
  row.presence_penalty = 1.5f;
  EXPECT_EQ(0, Draw(test, {3.0f, 1.0f, 4.0f}, {row}).ids[0]);
  // the drawn id was counted
  EXPECT_EQ((std::vector<int32_t>{1, 0, 2}), output);
  output = {0, 0, 2};
  row.presence_penalty = 0.0f;
  row.frequency_penalty = 0.6f;  // two occurrences: 4 becomes 2.8
  EXPECT_EQ(0, Draw(test, {3.0f, 1.0f, 4.0f}, {row}).ids[0]);
  output = {0, 0, 1};  // one occurrence: 4 becomes 3.4
  EXPECT_EQ(2, Draw(test, {3.0f, 1.0f, 4.0f}, {row}).ids[0]);
}

TEST(SampleTest, LogProbabilitiesAreComputedFromTheUnmodifiedLogits) {
  TestStream test;
  SampleRowArgs row;
  row.temperature = 0.0f;
  const int32_t banned[] = {1};
  row.banned_ids = banned;
  row.num_banned = 1;
  row.num_logprobs = 2;
  const Sampled got = Draw(test, kFour, {row}, 3);
  EXPECT_EQ(3, got.ids[0]);
  EXPECT_NEAR(std::log(0.3), got.logprobs[0], 1e-6);
  EXPECT_EQ((std::vector<int32_t>{1, 3, -1}), got.top_ids);
  EXPECT_NEAR(std::log(0.4), got.top_logprobs[0], 1e-6);
  EXPECT_NEAR(std::log(0.3), got.top_logprobs[1], 1e-6);
  EXPECT_EQ(0.0f, got.top_logprobs[2]);
}

// The rows use the parameters in many combinations; the vocabulary is not a
// multiple of the vector length.
TEST(SampleTest, TheSampledTokenDoesNotDependOnBackEndThreadsOrBatch) {
  constexpr int64_t kVocab = 5003;
  constexpr size_t kRows = 12;
  const auto logits = RandomFloats(kVocab * kRows, 1, 3.0f);
  const std::vector<int32_t> prompt(kVocab, 1);
  std::vector<SampleRowArgs> rows(kRows);
  for (size_t i = 0; i < kRows; ++i) {
    rows[i].temperature = i % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(i);
    rows[i].top_k = i % 3 == 0 ? 50 : 0;
    rows[i].top_p = i % 2 == 0 ? 0.9f : 1.0f;
    rows[i].min_p = i % 5 == 0 ? 0.02f : 0.0f;
    rows[i].repetition_penalty = i % 7 == 0 ? 1.3f : 1.0f;
    rows[i].prompt_counts = prompt.data();
    rows[i].seed = 100 + i;
    rows[i].num_logprobs = static_cast<int32_t>(i % 4) - 1;
  }
  TestStream reference(1, CpuBackend::kReference);
  const Sampled truth = Draw(reference, logits, rows, 2);
  TestStream three(3);
  ForEachSimdTarget(
      [&] { EXPECT_TRUE(truth == Draw(three, logits, rows, 2)); });
  for (size_t i = 0; i < kRows; ++i) {
    const std::vector<float> row(
        logits.begin() + static_cast<int64_t>(i) * kVocab,
        logits.begin() + static_cast<int64_t>(i + 1) * kVocab);
    EXPECT_EQ(truth.ids[i], Draw(three, row, {rows[i]}, 2).ids[0]);
  }
}

TEST(SampleTest, RefusesToListMoreTopIdsThanTheVocabularyHas) {
  TestStream test;
  SampleArgs params;
  params.vocab = 4;
  params.max_top = 5;
  EXPECT_THAT(Sample(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("max_top must be from 0 to the size of "
                                       "the vocabulary, 4, but is 5")));
}

TEST(CountTokensTest, TokensOfEachHistoryAreCountedInItsOwnTable) {
  TestStream test;
  const std::vector<int32_t> ids = {1, 3, 1, -1, 9, 0};
  std::vector<int32_t> cleared = {5, 5, 5, 5};
  std::vector<int32_t> kept = {5, 5, 5, 5};
  const TokenHistoryArgs rows[] = {{ids.data(), 5, cleared.data(), true},
                                   {ids.data() + 3, 3, kept.data(), false},
                                   {}};  // padding: no ids
  KVASIR_ASSERT_OK(CountTokens(
      test.stream(), OnDevice(CountTokensArgs{rows, 3, 4}), test.workspace()));
  EXPECT_EQ((std::vector<int32_t>{0, 2, 0, 1}), cleared);
  EXPECT_EQ((std::vector<int32_t>{6, 5, 5, 5}), kept);
}

}  // namespace
}  // namespace kvasir::kernels
