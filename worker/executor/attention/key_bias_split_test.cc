#include "worker/executor/attention/key_bias_split.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvasir::worker {
namespace {

using kernels::RopePairing;
using ::testing::Each;

constexpr int64_t kDim = 64;

// Returns the angles by which 32 RoPE pairs with base 10000 turn per position.
// Pairs from 21 on turn by at most 0.1 rad in half a tile.
std::vector<uint64_t> Steps() {
  std::vector<uint64_t> steps;
  for (int p = 0; p < 32; ++p) {
    steps.push_back(kernels::RopeStep(std::pow(10000.0, -p / 32.0)));
  }
  return steps;
}

// Returns the bias of a head: the first dimension of each given pair has the
// given bias, and all other dimensions have 0.
std::vector<float> Head(std::vector<std::pair<int, float>> of_pair) {
  std::vector<float> bias(kDim);
  for (const auto& [pair, number] : of_pair) {
    bias[static_cast<size_t>(pair)] = number;
  }
  return bias;
}

KeyBiasSplit Split(const std::vector<float>& bias, const KeyTurns& turns) {
  return SplitKeyBias(bias, kDim, turns);
}

TEST(KeyBiasSplitTest,
     TheFourPairsWhoseBiasWouldMakeCachedKeysLongestAreExact) {
  const std::vector<uint64_t> steps = Steps();
  // If it were not exact, the slowest pair would leave a bias of 500 * 0.0043
  // in cached keys. That is its bias times its turn in half a tile, in radians.
  const KeyBiasSplit split =
      Split(Head({{0, 1}, {5, 7}, {9, -3}, {12, 2.1f}, {31, 500}, {25, 4}}),
            {.steps = steps});
  EXPECT_EQ(split.exact_pairs, 4);
  EXPECT_EQ(split.tile_pairs, 1);
  ASSERT_EQ(split.pairs.size(), 5u);
  EXPECT_EQ(split.pairs[0].first, 25);
  EXPECT_EQ(split.pairs[0].second, 57);
  EXPECT_EQ(split.pairs[0].step, steps[25]);
  const int exact[] = {5, 9, 12, 31};
  for (size_t e = 0; e < 4; ++e) EXPECT_EQ(split.pairs[1 + e].first, exact[e]);
  // Only pair 0 stays in cached keys.
  EXPECT_EQ(split.cached, Head({{0, 1}}));
}

TEST(KeyBiasSplitTest, ATilePairOfOneHeadIsATilePairOfAllHeads) {
  const std::vector<uint64_t> steps = Steps();
  std::vector<float> bias = Head({{24, 1}, {25, 1}, {26, 1}, {27, 1}, {28, 1}});
  const std::vector<float> other = Head({{28, 9}});
  bias.insert(bias.end(), other.begin(), other.end());
  const std::vector<float> none = Head({});
  bias.insert(bias.end(), none.begin(), none.end());
  const KeyBiasSplit split = Split(bias, {.steps = steps});
  // Four of the first head's pairs are exact, and the slowest is a tile pair.
  // The second head has a single exact pair, and the third has no bias.
  EXPECT_EQ(split.tile_pairs, 1);
  EXPECT_EQ(split.exact_pairs, 4);
  ASSERT_EQ(split.pairs.size(), 15u);
  for (const size_t head : {0, 1, 2}) {
    EXPECT_EQ(split.pairs[head * 5].first, 28);
    EXPECT_EQ(split.pairs[head * 5].bias_first, head == 0 ? 1.0f : 0.0f);
  }
  EXPECT_EQ(split.pairs[6].first, 28);
  EXPECT_EQ(split.pairs[6].bias_first, 9.0f);
  for (size_t i = 7; i < 15; ++i) {
    EXPECT_EQ(split.pairs[i].bias_first, 0.0f);
    EXPECT_EQ(split.pairs[i].bias_second, 0.0f);
  }
  EXPECT_THAT(split.cached, Each(0.0f));
}

TEST(KeyBiasSplitTest, TheBiasOfDimensionsThatDoNotRotateIsNotCached) {
  const std::vector<float> bias(kDim, 3.0f);
  KeyBiasSplit split = Split(bias, {});
  EXPECT_TRUE(split.pairs.empty());
  EXPECT_THAT(split.cached, Each(0.0f));
  // With 2 pairs, the other 60 dimensions do not rotate.
  const std::vector<uint64_t> steps = {kernels::RopeStep(1.0),
                                       kernels::RopeStep(0.001)};
  split = Split(bias, {.steps = steps,
                       .pairing = RopePairing::kInterleaved,
                       .attention_factor = 2.0f});
  EXPECT_THAT(split.cached, Each(0.0f));
  EXPECT_EQ(split.tile_pairs, 0);
  ASSERT_EQ(split.exact_pairs, 2);
  EXPECT_EQ(split.pairs[1].first, 2);
  EXPECT_EQ(split.pairs[1].second, 3);
  EXPECT_EQ(split.pairs[1].bias_second, 6.0f);
}

TEST(KeyBiasSplitTest, ALargeBiasIsScaledSoThatProductsWithQueriesFitFloat16) {
  // In float16, 300 * 800 would be infinite.
  std::vector<kernels::KeyBiasPair> pairs(2);
  pairs[0].bias_first = -800.0f;
  pairs[0].bias_second = 3.0f;
  pairs[1].bias_second = 0.5f;
  const float unit = ScaleToUnits(&pairs);
  EXPECT_EQ(unit, 1024.0f);
  EXPECT_EQ(pairs[0].bias_first, -800.0f / 1024);
  EXPECT_EQ(pairs[0].bias_second, 3.0f / 1024);
  EXPECT_EQ(pairs[1].bias_second, 0.5f / 1024);
  pairs.assign(1, {});
  EXPECT_EQ(ScaleToUnits(&pairs), 1.0f);
}

TEST(KeyBiasSplitTest, TheBiasOfAPairThatTurnsBackwardsIsNotCached) {
  const std::vector<uint64_t> steps = {kernels::RopeStep(-0.001)};
  std::vector<float> bias = Head({});
  bias[0] = 1.0f;
  const KeyBiasSplit split = Split(bias, {.steps = steps});
  EXPECT_EQ(split.exact_pairs, 1);
  EXPECT_THAT(split.cached, Each(0.0f));
}

}  // namespace
}  // namespace kvasir::worker
