#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Case {
  int64_t rows;
  int64_t columns;
  bool residual;
};

// Of the rows from `first_row` on.
struct Data {
  explicit Data(const Case& c, int64_t first_row = 0)
      : x(Rows(c, first_row, 1)),
        residual(Rows(c, first_row, 2)),
        weight(RandomFloats(c.columns, 3)),
        bias(RandomFloats(c.columns, 4)),
        out(x.size(), kPoison) {
    // A mean that is far from 0: squares about it must not be differences of
    // large numbers.
    for (float& number : x) number += 30.0f;
  }
  static std::vector<float> Rows(const Case& c, int64_t first_row,
                                 uint32_t seed) {
    const auto all = RandomFloats((first_row + c.rows) * c.columns, seed);
    return {all.begin() + first_row * c.columns, all.end()};
  }
  std::vector<float> x, residual, weight, bias, out;
};

Data Norm(TestStream& test, const Case& c, int64_t first_row = 0) {
  Data data(c, first_row);
  LayerNormArgs params;
  params.x = data.x.data();
  params.residual = c.residual ? data.residual.data() : nullptr;
  params.weight = data.weight.data();
  params.bias = data.bias.data();
  params.out = data.out.data();
  params.num_rows = c.rows;
  params.columns = c.columns;
  KVASIR_EXPECT_OK(
      LayerNorm(test.stream(), OnDevice(params), test.workspace()));
  return data;
}

class LayerNormTest : public ::testing::TestWithParam<Case> {};

TEST_P(LayerNormTest, IsTheDefinitionAndTheSameOnEveryBackEnd) {
  const Case& c = GetParam();
  TestStream reference(1, CpuBackend::kReference);
  const Data truth = Norm(reference, c);
  const Data fresh(c);
  const auto columns = static_cast<double>(c.columns);
  for (int64_t t = 0; t < c.rows; ++t) {
    std::vector<double> row;
    double mean = 0.0;
    for (int64_t i = 0; i < c.columns; ++i) {
      const auto index = static_cast<size_t>(t * c.columns + i);
      row.push_back(static_cast<double>(c.residual ? fresh.x[index] +
                                                         fresh.residual[index]
                                                   : fresh.x[index]));
      ASSERT_EQ(row.back(), static_cast<double>(truth.x[index]));
      mean += row.back() / columns;
    }
    double variance = 0.0;
    for (const double number : row) {
      variance += (number - mean) * (number - mean) / columns;
    }
    const double inverse = 1.0 / std::sqrt(variance + 1e-5);
    for (size_t i = 0; i < row.size(); ++i) {
      const double expected =
          (row[i] - mean) * inverse * static_cast<double>(fresh.weight[i]) +
          static_cast<double>(fresh.bias[i]);
      const auto index = static_cast<size_t>(t * c.columns) + i;
      // Of the mean, an ulp of 30 is 2e-6.
      ASSERT_NEAR(expected, static_cast<double>(truth.out[index]),
                  1e-5 * (1.0 + std::abs(expected)));
    }
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    for (TestStream* test : {&one, &three}) {
      const Data got = Norm(*test, c);
      EXPECT_TRUE(SameBits(truth.x, got.x));
      EXPECT_TRUE(SameBits(truth.out, got.out));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayerNormTest,
                         ::testing::Values(Case{0, 5, true}, Case{1, 64, true},
                                           Case{3, 37, true},
                                           Case{2, 4099, false},
                                           Case{40, 1000, true}));

// Together they are enough to wake threads.
TEST(LayerNormRowsTest, RowsAreTheSameAloneAndTogether) {
  constexpr int64_t kRows = 61;
  constexpr int64_t kColumns = 275;
  TestStream test(3);
  ForEachSimdTarget([&] {
    const Data together = Norm(test, {kRows, kColumns, true});
    for (const int64_t rows : {1, 2, 5, 16}) {
      for (int64_t first = 0; first + rows <= kRows; first += rows) {
        const Data alone = Norm(test, {rows, kColumns, true}, first);
        const auto part = [&](const std::vector<float>& all) {
          return std::vector<float>(all.begin() + first * kColumns,
                                    all.begin() + (first + rows) * kColumns);
        };
        EXPECT_TRUE(SameBits(alone.x, part(together.x)) &&
                    SameBits(alone.out, part(together.out)))
            << rows << " rows from " << first;
      }
    }
  });
}

TEST(LayerNormInPlaceTest, OutMayBeTheInput) {
  const Case c = {3, 37, false};
  TestStream test;
  const Data apart = Norm(test, c);
  Data data(c);
  LayerNormArgs params;
  params.x = params.out = data.x.data();
  params.weight = data.weight.data();
  params.bias = data.bias.data();
  params.num_rows = c.rows;
  params.columns = c.columns;
  KVASIR_ASSERT_OK(
      LayerNorm(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_TRUE(SameBits(apart.out, data.x));
}

TEST(LayerNormOnlyTest, TheAdditionAloneNeedsNoWeight) {
  std::vector<float> x = {1.0f, 2.0f};
  const std::vector<float> residual = {0.5f, -2.0f};
  LayerNormArgs params;
  params.x = x.data();
  params.residual = residual.data();
  params.num_rows = 1;
  params.columns = 2;
  TestStream test;
  KVASIR_ASSERT_OK(
      LayerNorm(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ((std::vector<float>{1.5f, 0.0f}), x);
  params.columns = 0;
  EXPECT_THAT(LayerNorm(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("columns: want at least 1, have 0")));
}

}  // namespace
}  // namespace kvasir::kernels
