#include "model/random_weights.h"

#include <cmath>

#include "gtest/gtest.h"

namespace kvasir::model {
namespace {

RandomTensor Matrix(const char* name, double deviation) {
  return {name, {100, 1000}, RandomKind::kNormal, deviation};
}

std::vector<float> Fill(const RandomTensor& tensor, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
  FillRandom(tensor, seed, 0, values);
  return values;
}

TEST(RandomWeightsTest, HaveTheirMeanAndDeviation) {
  double sum = 0.0;
  double squares = 0.0;
  double fourths = 0.0;
  const std::vector<float> values = Fill(Matrix("a", 0.25), 1);
  for (const float value : values) {
    sum += value;
    squares += std::pow(value, 2);
    fourths += std::pow(value, 4);
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0.0, 0.004);
  EXPECT_NEAR(std::sqrt(squares / count), 0.25, 0.003);
  // 3 for a normal distribution, 1.8 for a uniform one; four uniforms: 2.7.
  EXPECT_NEAR(fourths * count / (squares * squares), 2.7, 0.06);
}

TEST(RandomWeightsTest, AnySplitGivesTheSameElements) {
  const RandomTensor tensor = Matrix("a", 1.0);
  const std::vector<float> whole = Fill(tensor, 7);
  for (const int64_t begin : {0, 1, 2, 501, 99998, 99999}) {
    for (const size_t length : {size_t{1}, size_t{2}}) {
      if (static_cast<size_t>(begin) + length > whole.size()) continue;
      std::vector<float> part(length);
      FillRandom(tensor, 7, begin, part);
      for (size_t i = 0; i < length; ++i) {
        EXPECT_EQ(part[i], whole[static_cast<size_t>(begin) + i])
            << begin << " + " << i;
      }
    }
  }
}

TEST(RandomWeightsTest, DependOnSeedAndName) {
  EXPECT_EQ(Fill(Matrix("a", 1.0), 7), Fill(Matrix("a", 1.0), 7));
  EXPECT_NE(Fill(Matrix("a", 1.0), 7), Fill(Matrix("a", 1.0), 8));
  EXPECT_NE(Fill(Matrix("a", 1.0), 7), Fill(Matrix("b", 1.0), 7));
}

TEST(RandomWeightsTest, NormsAreOnes) {
  const RandomTensor norm{"n", {3}, RandomKind::kOnes, 0.0};
  EXPECT_EQ(Fill(norm, 1), (std::vector<float>{1.0F, 1.0F, 1.0F}));
}

}  // namespace
}  // namespace kvasir::model
