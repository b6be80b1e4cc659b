#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::Values;

struct Case {
  int64_t rows;
  int64_t columns;
  bool residual;
};

std::vector<float> RandomRows(const Case& c, int64_t first_row, uint32_t seed) {
  const auto all = RandomFloats((first_row + c.rows) * c.columns, seed);
  return {all.begin() + first_row * c.columns, all.end()};
}

// Inputs of the op, for the rows from `first_row` on.
struct Data {
  Data(NormKind norm_kind, const Case& c, int64_t first_row = 0)
      : kind(norm_kind),
        rows(c.rows),
        x(RandomRows(c, first_row, 1)),
        weight(RandomFloats(c.columns, 3)),
        bias(RandomFloats(c.columns, 4)),
        out(x.size(), kPoison) {
    if (c.residual) residual = RandomRows(c, first_row, 2);
    // The mean is far from 0, so that an op which computes the variance as a
    // difference of large sums would fail.
    if (kind == NormKind::kLayer) {
      for (float& number : x) number += 30.0f;
    }
  }

  NormArgs Args() {
    NormArgs params;
    params.x = x.data();
    params.residual = residual.empty() ? nullptr : residual.data();
    params.weight = weight.data();
    params.bias = kind == NormKind::kLayer ? bias.data() : nullptr;
    params.out = out.data();
    params.num_rows = rows;
    params.columns = static_cast<int64_t>(weight.size());
    params.kind = kind;
    return params;
  }

  NormKind kind;
  int64_t rows;
  std::vector<float> x, residual, weight, bias, out;
};

Data Normed(TestStream& test, Data data) {
  KVASIR_EXPECT_OK(
      Norm(test.stream(), OnDevice(data.Args()), test.workspace()));
  return data;
}

// Returns the result for row `t`, computed by the definition in float64.
std::vector<double> Definition(const Data& data, int64_t t) {
  const size_t columns = data.weight.size();
  const size_t first = static_cast<size_t>(t) * columns;
  const bool layer = data.kind == NormKind::kLayer;
  std::vector<double> row(columns);
  double mean = 0.0;
  for (size_t i = 0; i < columns; ++i) {
    row[i] = static_cast<double>(
        data.residual.empty() ? data.x[first + i]
                              : data.x[first + i] + data.residual[first + i]);
    if (layer) mean += row[i] / static_cast<double>(columns);
  }
  double variance = 0.0;
  for (const double number : row) {
    variance +=
        (number - mean) * (number - mean) / static_cast<double>(columns);
  }
  for (size_t i = 0; i < columns; ++i) {
    row[i] = (row[i] - mean) / std::sqrt(variance + 1e-5) *
                 static_cast<double>(data.weight[i]) +
             (layer ? static_cast<double>(data.bias[i]) : 0.0);
  }
  return row;
}

class NormTest : public ::testing::TestWithParam<std::tuple<NormKind, Case>> {};

TEST_P(NormTest, TheNormMatchesItsDefinitionOnEveryBackEnd) {
  const auto& [kind, c] = GetParam();
  TestStream reference(1, CpuBackend::kReference);
  const Data given(kind, c);
  const Data truth = Normed(reference, given);
  // For kLayer, the inputs are near 30, where one ulp is 2e-6.
  const double tolerance = kind == NormKind::kRms ? 1e-6 : 1e-5;
  for (int64_t t = 0; t < c.rows; ++t) {
    const std::vector<double> want = Definition(given, t);
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t at = static_cast<size_t>(t) * want.size() + i;
      ASSERT_EQ(truth.x[at],
                c.residual ? given.x[at] + given.residual[at] : given.x[at]);
      ASSERT_NEAR(want[i], static_cast<double>(truth.out[at]),
                  tolerance * (1.0 + std::abs(want[i])));
    }
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&, kind = kind, c = c] {
    for (TestStream* test : {&one, &three}) {
      const Data got = Normed(*test, Data(kind, c));
      EXPECT_TRUE(SameBits(truth.x, got.x));
      EXPECT_TRUE(SameBits(truth.out, got.out));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, NormTest,
                         Combine(Values(NormKind::kRms, NormKind::kLayer),
                                 Values(Case{0, 5, true}, Case{1, 1, false},
                                        Case{1, 64, true}, Case{3, 37, true},
                                        Case{2, 4099, false},
                                        Case{40, 1000, true})));

class NormKindTest : public ::testing::TestWithParam<NormKind> {};

// There are enough rows for the op to use several threads.
TEST_P(NormKindTest, ARowHasTheSameBitsInAnyBatch) {
  constexpr int64_t kRows = 61;
  constexpr int64_t kColumns = 275;
  TestStream test(3);
  ForEachSimdTarget([&] {
    const Data together = Normed(test, {GetParam(), {kRows, kColumns, true}});
    for (const int64_t rows : {1, 2, 5, 16}) {
      for (int64_t first = 0; first + rows <= kRows; first += rows) {
        const Data alone =
            Normed(test, {GetParam(), {rows, kColumns, true}, first});
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

TEST_P(NormKindTest, TheOutputOfANormMayOverwriteItsInput) {
  TestStream test;
  Data data(GetParam(), {3, 37, false});
  const Data apart = Normed(test, data);
  NormArgs params = data.Args();
  params.out = params.x;
  KVASIR_ASSERT_OK(Norm(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_TRUE(SameBits(apart.out, data.x));
}

INSTANTIATE_TEST_SUITE_P(Kinds, NormKindTest,
                         Values(NormKind::kRms, NormKind::kLayer));

// Each of `long_rows` longer rows has `stride` numbers: first `first` other
// numbers, then `parts` rows of `columns` numbers.
struct Parts {
  int64_t long_rows, parts, columns, first, stride;
};

class NormPartsTest : public ::testing::TestWithParam<Parts> {};

TEST_P(NormPartsTest, RowsThatArePartsOfLongerRowsHaveTheBitsOfSeparateRows) {
  const Parts& shape = GetParam();
  const int64_t rows = shape.long_rows * shape.parts;
  ForEachSimdTarget([&] {
    TestStream test(3);
    const Data data =
        Normed(test, {NormKind::kRms, {rows, shape.columns, false}});
    for (const CpuBackend backend :
         {CpuBackend::kReference, CpuBackend::kSimd}) {
      std::vector<float> all(
          static_cast<size_t>(shape.long_rows * shape.stride), kPoison);
      std::vector<float> want = all;
      const auto put = [&](const std::vector<float>& from,
                           std::vector<float>* to) {
        for (int64_t t = 0; t < rows; ++t) {
          std::copy_n(from.begin() + t * shape.columns, shape.columns,
                      to->begin() + t / shape.parts * shape.stride +
                          shape.first + t % shape.parts * shape.columns);
        }
      };
      put(data.x, &all);
      put(data.out, &want);
      NormArgs params;
      params.x = all.data() + shape.first;
      params.out = params.x;
      params.weight = data.weight.data();
      params.num_rows = rows;
      params.columns = shape.columns;
      params.num_parts = shape.parts;
      params.stride = shape.stride;
      TestStream other(3, backend);
      KVASIR_ASSERT_OK(
          Norm(other.stream(), OnDevice(params), other.workspace()));
      EXPECT_TRUE(SameBits(want, all));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, NormPartsTest,
                         Values(Parts{1, 1, 10, 0, 10}, Parts{3, 1, 37, 2, 45},
                                Parts{5, 3, 8, 7, 64},
                                Parts{41, 5, 128, 64, 1024}));

TEST(NormPartsTest, OverlappingPartsAndPartsWithAResidualAreRefused) {
  std::vector<float> x(24);
  NormArgs params;
  params.x = x.data();
  params.out = x.data();
  params.weight = x.data();
  params.num_rows = 4;
  params.columns = 4;
  params.num_parts = 2;
  TestStream test;
  const auto refused = [&](const char* text) {
    EXPECT_THAT(
        Norm(test.stream(), OnDevice(params), test.workspace()),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  params.stride = 7;
  refused("stride: must be at least 8, but is 7");
  params.stride = 12;
  params.residual = x.data();
  refused("a residual is allowed only for separate rows (stride 0)");
  params.num_parts = 0;
  refused("parts: must be at least 1, but is 0");
}

TEST(NormOnlyTest, AddingTheResidualWithoutANormNeedsNoWeight) {
  std::vector<float> x = {1.0f, 2.0f};
  const std::vector<float> residual = {0.5f, -2.0f};
  NormArgs params;
  params.x = x.data();
  params.residual = residual.data();
  params.num_rows = 1;
  params.columns = 2;
  TestStream test;
  KVASIR_ASSERT_OK(Norm(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ((std::vector<float>{1.5f, 0.0f}), x);
  params.columns = 0;
  EXPECT_THAT(
      Norm(test.stream(), OnDevice(params), test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("columns: must be at least 1, but is 0")));
}

}  // namespace
}  // namespace kvasir::kernels
