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

struct Result {
  std::vector<float> x;
  std::vector<float> out;
};

// Of the rows from `first_row` on.
Result Norm(TestStream& test, const Case& c, int64_t first_row = 0) {
  const auto rows = [&](uint32_t seed) {
    const auto all = RandomFloats((first_row + c.rows) * c.columns, seed);
    return std::vector<float>(all.begin() + first_row * c.columns, all.end());
  };
  Result result = {
      rows(1),
      std::vector<float>(static_cast<size_t>(c.rows * c.columns), kPoison)};
  const auto residual = rows(2);
  const auto weight = RandomFloats(c.columns, 3);
  RmsNormArgs params;
  params.x = result.x.data();
  params.residual = c.residual ? residual.data() : nullptr;
  params.weight = weight.data();
  params.out = result.out.data();
  params.num_rows = c.rows;
  params.columns = c.columns;
  KVASIR_EXPECT_OK(RmsNorm(test.stream(), OnDevice(params), test.workspace()));
  return result;
}

class RmsNormTest : public ::testing::TestWithParam<Case> {};

TEST_P(RmsNormTest, IsTheDefinitionAndTheSameOnEveryBackEnd) {
  const Case& c = GetParam();
  TestStream reference(1, CpuBackend::kReference);
  const Result truth = Norm(reference, c);
  const auto x = RandomFloats(c.rows * c.columns, 1);
  const auto residual = RandomFloats(c.rows * c.columns, 2);
  const auto weight = RandomFloats(c.columns, 3);
  for (int64_t t = 0; t < c.rows; ++t) {
    std::vector<double> row;
    double sum = 0.0;
    for (int64_t i = 0; i < c.columns; ++i) {
      const auto index = static_cast<size_t>(t * c.columns + i);
      row.push_back(static_cast<double>(c.residual ? x[index] + residual[index]
                                                   : x[index]));
      ASSERT_EQ(row.back(), static_cast<double>(truth.x[index]));
      sum += row.back() * row.back();
    }
    const double inverse =
        1.0 / std::sqrt(sum / static_cast<double>(c.columns) + 1e-5);
    for (int64_t i = 0; i < c.columns; ++i) {
      const auto index = static_cast<size_t>(i);
      const double expected =
          row[index] * inverse * static_cast<double>(weight[index]);
      ASSERT_NEAR(expected,
                  static_cast<double>(
                      truth.out[static_cast<size_t>(t * c.columns + i)]),
                  1e-6 * (1.0 + std::abs(expected)));
    }
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    for (TestStream* test : {&one, &three}) {
      const Result got = Norm(*test, c);
      EXPECT_TRUE(SameBits(truth.x, got.x));
      EXPECT_TRUE(SameBits(truth.out, got.out));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormTest,
                         ::testing::Values(Case{0, 5, true}, Case{1, 1, false},
                                           Case{1, 64, true}, Case{3, 37, true},
                                           Case{2, 4099, false},
                                           Case{40, 1000, true}));

// Together they are enough to wake threads.
TEST(RmsNormRowsTest, RowsAreTheSameAloneAndTogether) {
  constexpr int64_t kRows = 61;
  constexpr int64_t kColumns = 275;
  TestStream test(3);
  ForEachSimdTarget([&] {
    const Result together = Norm(test, {kRows, kColumns, true});
    for (const int64_t rows : {1, 2, 5, 16}) {
      for (int64_t first = 0; first + rows <= kRows; first += rows) {
        const Result alone = Norm(test, {rows, kColumns, true}, first);
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

TEST(RmsNormOnlyTest, TheAdditionAloneNeedsNoWeight) {
  std::vector<float> x = {1.0f, 2.0f};
  const std::vector<float> residual = {0.5f, -2.0f};
  RmsNormArgs params;
  params.x = x.data();
  params.residual = residual.data();
  params.num_rows = 1;
  params.columns = 2;
  TestStream test;
  KVASIR_ASSERT_OK(RmsNorm(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ((std::vector<float>{1.5f, 0.0f}), x);
  params.columns = 0;
  EXPECT_THAT(RmsNorm(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("columns: want at least 1, have 0")));
}

}  // namespace
}  // namespace kvasir::kernels
