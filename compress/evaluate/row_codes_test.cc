#include "compress/evaluate/row_codes.h"

#include <cmath>
#include <limits>
#include <set>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

double SquaredError(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).pow(2).mean().item<double>();
}
at::Tensor Coded(const absl::StatusOr<at::Tensor>& rows) {
  KVASIR_EXPECT_OK(rows);
  return *rows;
}

// The expected errors are from Max 1960, table I.
TEST(CodeRotatedTest, TheErrorIsThatOfALloydMaxQuantizerEvenWithOutliers) {
  at::manual_seed(7);
  const at::Tensor normal = at::randn({500, 3, 64});
  at::Tensor outliers = normal.clone();
  outliers.select(-1, 5).mul_(20);
  for (const auto& [bits, distortion] :
       {std::pair<int64_t, double>{2, 0.1175}, {3, 0.03454}, {4, 0.009497}}) {
    const auto error = [bits = bits](const at::Tensor& rows) {
      return SquaredError(Coded(CodeRotated(rows, bits)), rows) /
             rows.pow(2).mean().item<double>();
    };
    EXPECT_NEAR(error(normal), distortion, 0.12 * distortion) << bits;
    EXPECT_LT(error(outliers), 1.12 * distortion) << bits;
  }
}

TEST(CodeRotatedTest, DecodedRowsKeepTheirLengthUpToTheRoundingOfAFloat16) {
  at::manual_seed(8);
  for (const int64_t width : {1, 2, 24, 64, 80, 128}) {
    const at::Tensor rows = at::randn({40, width}) * 3;
    const at::Tensor coded = Coded(CodeRotated(rows, 2));
    EXPECT_TRUE(at::allclose(coded.norm(2, -1), rows.norm(2, -1), 2e-3, 0))
        << width;
  }
}

TEST(CodeRotatedTest, TheCodesOfARowDependOnlyOnThatRow) {
  at::manual_seed(9);
  const at::Tensor rows = at::randn({2, 9, 3, 64});
  const at::Tensor all = Coded(CodeRotated(rows, 3));
  EXPECT_LT((Coded(CodeRotated(rows.slice(1, 4, 5), 3)) - all.slice(1, 4, 5))
                .abs()
                .max()
                .item<double>(),
            1e-5);
}

TEST(CodeRotatedTest, RowsOfZerosAndEmptyInputsAreReturnedUnchanged) {
  EXPECT_TRUE(
      Coded(CodeRotated(at::zeros({2, 64}), 4)).eq(0).all().item<bool>());
  EXPECT_EQ(Coded(CodeRotated(at::zeros({0, 64}), 4)).numel(), 0);
}

TEST(CodeRotatedTest, ARowWhoseScaleExceedsTheLargestFloat16IsRefused) {
  EXPECT_THAT(CodeRotated(at::full({1, 64}, 1e7), 4),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("65504")));
  EXPECT_THAT(
      CodeRotated(at::full({1, 64}, std::numeric_limits<float>::quiet_NaN()),
                  4),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("nan")));
}

// The expected numbers were computed by hand, following quantize_row_q8_0_ref
// in ggml-quants.c.
TEST(CodeGgmlTest, Q8RoundsHalvesAwayFromZero) {
  at::Tensor row = at::zeros({1, 32});
  row[0][0] = -127.0;
  row[0][1] = 2.5;
  row[0][2] = -2.5;
  row[0][3] = 2.4;
  const at::Tensor coded = Coded(CodeGgml(row, Ggml::kQ8_0, false));
  EXPECT_EQ(coded[0][0].item<float>(), -127.0f);
  EXPECT_EQ(coded[0][1].item<float>(), 3.0f);
  EXPECT_EQ(coded[0][2].item<float>(), -3.0f);
  EXPECT_EQ(coded[0][3].item<float>(), 2.0f);
}

// As in quantize_row_q4_0_ref, code 0 stands for the number with the greatest
// magnitude. At the other end, the range is one step shorter.
TEST(CodeGgmlTest, Q4ClampsTheLargestNumbersOfTheOppositeSign) {
  at::Tensor row = at::zeros({1, 32});
  row[0][0] = 8.0;
  row[0][1] = -8.0;
  row[0][2] = 1.4;
  row[0][3] = 1.6;
  const at::Tensor coded = Coded(CodeGgml(row, Ggml::kQ4_0, false));
  EXPECT_EQ(coded[0][0].item<float>(), 8.0f);
  EXPECT_EQ(coded[0][1].item<float>(), -7.0f);
  EXPECT_EQ(coded[0][2].item<float>(), 1.0f);
  EXPECT_EQ(coded[0][3].item<float>(), 2.0f);
  EXPECT_EQ(coded[0][31].item<float>(), 0.0f);
}

TEST(CodeGgmlTest, EachBlockHasItsOwnScale) {
  at::manual_seed(10);
  at::Tensor rows = at::randn({4, 3, 64});
  rows.slice(-1, 32).mul_(1000);
  const at::Tensor coded = Coded(CodeGgml(rows, Ggml::kQ4_0, false));
  const double small =
      SquaredError(coded.slice(-1, 0, 32), rows.slice(-1, 0, 32));
  EXPECT_LT(small, 0.05);
  EXPECT_GT(small, 0.0);
}

TEST(CodeGgmlTest, RotatingRowsWithOutliersLowersTheirError) {
  at::manual_seed(11);
  at::Tensor rows = at::randn({200, 64});
  rows.select(-1, 3).mul_(30);
  EXPECT_LT(SquaredError(Coded(CodeGgml(rows, Ggml::kQ4_0, true)), rows) * 1.5,
            SquaredError(Coded(CodeGgml(rows, Ggml::kQ4_0, false)), rows));
}

TEST(CodeGgmlTest, ZerosAreDecodedAsZeros) {
  for (const Ggml type : {Ggml::kQ8_0, Ggml::kQ4_0}) {
    EXPECT_TRUE(Coded(CodeGgml(at::zeros({2, 64}), type, true))
                    .eq(0)
                    .all()
                    .item<bool>());
  }
}

TEST(RoundToFloat8Test, NumbersAreRoundedToTheNearestFloat8Number) {
  const at::Tensor numbers =
      at::tensor({0.0f, 1.0f, -448.0f, 0.0625f, 0x1p-9f, 1.0625f, 1.1875f,
                  500.0f, 0x1p-10f, 0x1.8p-9f});
  const at::Tensor want = at::tensor({0.0f, 1.0f, -448.0f, 0.0625f, 0x1p-9f,
                                      1.0f, 1.25f, 448.0f, 0.0f, 0x1p-8f});
  EXPECT_TRUE(at::equal(RoundToFloat8(numbers, Float8::kE4M3), want));
  EXPECT_TRUE(at::equal(
      RoundToFloat8(at::tensor({57344.0f, 1e6f, 0x1p-16f, 1.125f, 1.375f}),
                    Float8::kE5M2),
      at::tensor({57344.0f, 57344.0f, 0x1p-16f, 1.0f, 1.5f})));
}

TEST(RoundToFloat8Test, RoundingToE4M3GivesNoMoreNumbersThanEightBitsEncode) {
  const at::Tensor all =
      RoundToFloat8(at::linspace(-460, 460, 2000001), Float8::kE4M3);
  std::set<float> numbers;
  const at::Tensor flat = all.contiguous();
  for (int64_t i = 0; i < flat.numel(); ++i) {
    numbers.insert(flat.data_ptr<float>()[i]);
  }
  // There are 256 codes; 2 are NaN, and 2 are zeros, which count once. Some of
  // the smallest numbers may lie between two samples and are then missed.
  EXPECT_LE(numbers.size(), 253u);
  EXPECT_GE(numbers.size(), 220u);
}

}  // namespace
}  // namespace kvasir::compress
