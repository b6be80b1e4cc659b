#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/sampling/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// Computes the log probabilities, passing the vocabulary in chunks of `chunk`
// ids.
std::vector<float> Logprobs(TestStream& test, const std::vector<float>& logits,
                            const std::vector<int32_t>& targets, int64_t vocab,
                            int64_t chunk) {
  std::vector<float> out(targets.size(), kPoison);
  std::vector<LogSoftmaxState> state(targets.size());
  for (int64_t begin = 0; begin < vocab; begin += chunk) {
    LogSoftmaxArgs params;
    params.logits = logits.data() + begin;
    params.row_stride = vocab;
    params.num_rows = static_cast<int64_t>(targets.size());
    params.vocab_begin = begin;
    params.vocab_count = std::min(chunk, vocab - begin);
    params.last = begin + chunk >= vocab;
    params.targets = targets.data();
    params.state = state.data();
    params.logprobs = out.data();
    KVASIR_EXPECT_OK(
        LogSoftmax(test.stream(), OnDevice(params), test.workspace()));
  }
  return out;
}

class LogSoftmaxTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(LogSoftmaxTest, MatchesTheDefinitionForEverySizeOfChunks) {
  const int64_t vocab = GetParam();
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < 9; ++i) {
    targets.push_back(static_cast<int32_t>(i * 7919 % vocab));
  }
  const auto logits = RandomFloats(9 * vocab, 1, 5.0f);
  TestStream reference(1, CpuBackend::kReference);
  const auto truth = Logprobs(reference, logits, targets, vocab, vocab);
  for (size_t t = 0; t < 9; ++t) {
    const float* row = logits.data() + static_cast<int64_t>(t) * vocab;
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(double{row[i]});
    EXPECT_NEAR(double{row[targets[t]]} - std::log(sum), double{truth[t]},
                2e-6);
  }
  TestStream two(2);
  ForEachSimdTarget([&] {
    for (const int64_t chunk : {vocab, int64_t{1024}, int64_t{3072}}) {
      EXPECT_TRUE(
          SameBits(truth, Logprobs(two, logits, targets, vocab, chunk)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, LogSoftmaxTest,
                         ::testing::Values(1, 13, 1024, 5000, 32003));

TEST(LogSoftmaxEdgeTest, TargetsOutsideTheVocabularyHaveProbabilityZero) {
  TestStream test;
  const auto out = Logprobs(test, {1.0f, 2.0f, 1.0f, 2.0f}, {-1, 2}, 2, 2);
  EXPECT_TRUE(std::isinf(out[0]) && out[0] < 0);
  EXPECT_TRUE(std::isinf(out[1]) && out[1] < 0);
}

TEST(LogSoftmaxEdgeTest, ANonFiniteLogitAffectsOnlyItsRow) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr int64_t kVocab = 3100;
  const auto sound = RandomFloats(3 * kVocab, 1, 5.0f);
  const std::vector<int32_t> targets = {5, 6, 7};
  TestStream reference(1, CpuBackend::kReference);
  const auto truth = Logprobs(reference, sound, targets, kVocab, kVocab);
  const auto expect = [&](const std::vector<float>& logits) {
    const auto check = [&](TestStream& test) {
      for (const int64_t chunk : {int64_t{1024}, kVocab}) {
        const auto got = Logprobs(test, logits, targets, kVocab, chunk);
        EXPECT_FALSE(std::isfinite(got[1]));
        EXPECT_TRUE(got[0] == truth[0] && got[2] == truth[2]);
      }
    };
    check(reference);
    TestStream two(2);
    ForEachSimdTarget([&] { check(two); });
  };
  for (const float bad : {kInf, -kInf, std::nanf("")}) {
    for (const int64_t at : {int64_t{0}, int64_t{1024}, kVocab - 1}) {
      std::vector<float> logits = sound;
      logits[static_cast<size_t>(kVocab + at)] = bad;
      expect(logits);
    }
    // All logits of a block are replaced by `bad`. If `bad` is NaN, the block
    // has no maximum.
    std::vector<float> logits = sound;
    std::fill_n(logits.begin() + kVocab + 1024, 1024, bad);
    expect(logits);
  }
}

TEST(LogSoftmaxEdgeTest,
     VocabularyChunksThatDoNotEndAtBlockBoundariesAreRefused) {
  TestStream test;
  LogSoftmaxArgs params;
  params.vocab_begin = 1024;
  params.vocab_count = 1000;
  params.last = false;
  EXPECT_THAT(LogSoftmax(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("[1024, 2024)")));
}

}  // namespace
}  // namespace kvasir::kernels
