#include "base/hadamard.h"

#include <cmath>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

using ::testing::ElementsAre;

// Checks that H times its transpose is order * I inside each block and
// 0 outside.
void ExpectRowsOrthogonal(int64_t n) {
  const std::vector<int8_t> signs = HadamardSigns(n);
  const std::vector<int64_t> blocks = HadamardBlocks(n);
  std::vector<int64_t> order_of_row;
  for (int64_t order : blocks) {
    order_of_row.insert(order_of_row.end(), static_cast<size_t>(order), order);
  }
  ASSERT_EQ(static_cast<int64_t>(order_of_row.size()), n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) {
      int64_t dot = 0;
      for (int64_t k = 0; k < n; ++k) {
        dot += signs[static_cast<size_t>(i * n + k)] *
               signs[static_cast<size_t>(j * n + k)];
      }
      ASSERT_EQ(dot, i == j ? order_of_row[static_cast<size_t>(i)] : 0)
          << "rows " << i << " and " << j << " of order " << n;
    }
  }
}

TEST(HadamardTest, EveryMultipleOf32UpTo1024IsOneBlock) {
  for (int64_t n = 32; n <= 1024; n += 32) {
    EXPECT_THAT(HadamardBlocks(n), ElementsAre(n));
  }
}

TEST(HadamardTest, EveryMultipleOf16UpTo512IsOneBlock) {
  for (int64_t n = 16; n <= 512; n += 16) {
    EXPECT_THAT(HadamardBlocks(n), ElementsAre(n));
  }
}

TEST(HadamardTest, RowsAreOrthogonalAtEverySmallSize) {
  for (int64_t n = 1; n <= 72; ++n) ExpectRowsOrthogonal(n);
}

TEST(HadamardTest, RowsAreOrthogonalWithBothPaleyConstructions) {
  // Paley I gives 96 = 12 * 8, 160 = 20 * 8, 320 = 20 * 16 and 416 = 104 * 4.
  // Paley II gives 224 = 28 * 8 and 288 = 36 * 8.
  for (int64_t n : {96, 160, 224, 288, 320, 416}) ExpectRowsOrthogonal(n);
}

TEST(HadamardTest,
     ASizeWithoutAHadamardMatrixIsSplitIntoTheLargestBlocksThatHaveOne) {
  EXPECT_THAT(HadamardBlocks(1), ElementsAre(1));
  EXPECT_THAT(HadamardBlocks(3), ElementsAre(2, 1));
  EXPECT_THAT(HadamardBlocks(7), ElementsAre(4, 2, 1));
  EXPECT_THAT(HadamardBlocks(50), ElementsAre(48, 2));
  EXPECT_THAT(HadamardBlocks(92), ElementsAre(88, 4));
}

TEST(HadamardTest, SmallMatricesHaveTheDocumentedSigns) {
  EXPECT_THAT(HadamardSigns(1), ElementsAre(1));
  EXPECT_THAT(HadamardSigns(2), ElementsAre(1, 1, 1, -1));
  EXPECT_THAT(HadamardSigns(3), ElementsAre(1, 1, 0, 1, -1, 0, 0, 0, 1));
  // Paley I with q = 11: the squares are 1, 3, 4, 5, 9.
  const std::vector<int8_t> twelve = HadamardSigns(12);
  EXPECT_THAT(std::vector<int8_t>(twelve.begin() + 12, twelve.begin() + 24),
              ElementsAre(-1, 1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1));
}

TEST(HadamardTest, AllEntriesOfAnOrthogonalMatrixHaveTheSameMagnitude) {
  std::set<double> magnitudes;
  for (double entry : HadamardMatrix(96)) magnitudes.insert(std::abs(entry));
  ASSERT_EQ(magnitudes.size(), 1u);
  EXPECT_DOUBLE_EQ(*magnitudes.begin(), 1 / std::sqrt(96.0));
}

}  // namespace
}  // namespace kvasir::base
