#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/linear/ops.h"
#include "kernels/linear/pack.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// A weight matrix in two forms: [N, K] as in a checkpoint, and packed.
struct Weights {
  Weights(int64_t k, int64_t n, DType dtype, uint32_t seed)
      : rows(RandomFloats(n * k, seed), dtype),
        packed(std::vector<float>(static_cast<size_t>((n + 31) / 32 * 32 * k),
                                  kPoison),
               dtype) {
    view.k = k;
    view.n = n;
    view.dtype = dtype;
    view.data = packed.data();
    KVASIR_EXPECT_OK(
        PackRows(OnDevice(view), {rows.data(), n, k}, 0, packed.data()));
    ZeroPadding(OnDevice(view), packed.data());
  }
  StoredArray rows;
  StoredArray packed;
  PackedMatrixArgs view;
};

struct Case {
  int64_t rows;
  int64_t k;
  int64_t n;
  DType dtype;
  bool bias;
};

// Computes the result by the definition, with unpacked weights and scalar
// std::fma.
std::vector<float> Expected(const Case& c, Weights& weights,
                            const std::vector<float>& x,
                            const std::vector<float>& bias) {
  std::vector<float> y(static_cast<size_t>(c.rows * c.n));
  std::vector<float> w(static_cast<size_t>(c.n * c.k));
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = weights.rows.at(static_cast<int64_t>(i));
  }
  for (int64_t t = 0; t < c.rows; ++t) {
    for (int64_t n = 0; n < c.n; ++n) {
      float sum = 0.0f;
      for (int64_t k = 0; k < c.k; ++k) {
        sum = std::fma(x[static_cast<size_t>(t * c.k + k)],
                       w[static_cast<size_t>(n * c.k + k)], sum);
      }
      if (c.bias) sum = sum + bias[static_cast<size_t>(n)];
      y[static_cast<size_t>(t * c.n + n)] = sum;
    }
  }
  return y;
}

std::vector<float> Multiply(TestStream& test, const Case& c,
                            const Weights& weights, const std::vector<float>& x,
                            const std::vector<float>& bias) {
  std::vector<float> y(static_cast<size_t>(c.rows * c.n), kPoison);
  MatmulArgs params;
  params.x = x.data();
  params.x_row_stride = c.k;
  params.num_rows = c.rows;
  params.weight = weights.view;
  params.bias = c.bias ? bias.data() : nullptr;
  params.y = y.data();
  params.y_row_stride = c.n;
  KVASIR_EXPECT_OK(Matmul(test.stream(), OnDevice(params), test.workspace()));
  return y;
}

class MatmulTest : public ::testing::TestWithParam<Case> {};

TEST_P(MatmulTest, EachElementHasTheBitsOfAChainOfFmasInTheOrderOfK) {
  const Case& c = GetParam();
  Weights weights(c.k, c.n, c.dtype, 1);
  const std::vector<float> x = RandomFloats(c.rows * c.k, 2);
  const std::vector<float> bias = RandomFloats(c.n, 3);
  const std::vector<float> expected = Expected(c, weights, x, bias);
  TestStream reference(1, CpuBackend::kReference);
  EXPECT_TRUE(SameBits(expected, Multiply(reference, c, weights, x, bias)));
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(expected, Multiply(one, c, weights, x, bias)));
    EXPECT_TRUE(SameBits(expected, Multiply(three, c, weights, x, bias)));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MatmulTest,
    ::testing::Values(Case{1, 1, 1, DType::kF32, false},
                      Case{1, 64, 64, DType::kBf16, false},
                      Case{2, 33, 31, DType::kF16, true},
                      Case{5, 300, 70, DType::kBf16, true},
                      Case{13, 520, 33, DType::kF32, true},
                      Case{16, 1025, 96, DType::kBf16, false},
                      Case{37, 257, 100, DType::kBf16, true},
                      Case{50, 513, 130, DType::kF16, false},
                      Case{100, 40, 544, DType::kF32, true}));

// Compares rows of one large product with the products of those rows by
// themselves.
TEST(MatmulRowsTest, ARowHasTheSameBitsInAnyBatch) {
  const int64_t k = 270;
  const int64_t n = 75;
  Weights weights(k, n, DType::kBf16, 4);
  const std::vector<float> x = RandomFloats(61 * k, 5);
  TestStream test(2);
  const auto together =
      Multiply(test, {61, k, n, DType::kBf16, false}, weights, x, {});
  for (const int64_t rows : {1, 2, 5, 16, 37}) {
    for (int64_t first = 0; first + rows <= 61; first += rows) {
      const std::vector<float> part(x.begin() + first * k,
                                    x.begin() + (first + rows) * k);
      const auto alone =
          Multiply(test, {rows, k, n, DType::kBf16, false}, weights, part, {});
      EXPECT_TRUE(SameBits(alone, {together.begin() + first * n,
                                   together.begin() + (first + rows) * n}))
          << rows << " rows from " << first;
    }
  }
}

TEST(MatmulRowsTest, StridedRowsAreReadAndWrittenWithoutChangesToTheGaps) {
  const int64_t k = 40;
  const int64_t n = 45;
  Weights weights(k, n, DType::kF32, 6);
  const std::vector<float> x = RandomFloats(50 * (k + 3), 7);
  std::vector<float> y(50 * 100, 7.0f);
  MatmulArgs params;
  params.x = x.data();
  params.x_row_stride = k + 3;
  params.num_rows = 50;
  params.weight = weights.view;
  params.y = y.data();
  params.y_row_stride = 100;
  TestStream test(2);
  KVASIR_ASSERT_OK(Matmul(test.stream(), OnDevice(params), test.workspace()));
  for (size_t t = 0; t < 50; ++t) {
    float sum = 0.0f;
    for (size_t i = 0; i < 40; ++i) {
      sum = std::fma(x[t * 43 + i], weights.rows.at(static_cast<int64_t>(i)),
                     sum);
    }
    EXPECT_EQ(sum, y[t * 100]);
    for (size_t i = 45; i < 100; ++i) ASSERT_EQ(7.0f, y[t * 100 + i]);
  }
}

TEST(MatmulCounterTest, AProductOfSixteenRowsReadsEachWeightOnce) {
  Weights weights(128, 96, DType::kBf16, 8);
  const std::vector<float> x = RandomFloats(16 * 128, 9);
  TestStream test(2);
  Multiply(test, {16, 128, 96, DType::kBf16, false}, weights, x, {});
  EXPECT_EQ(128 * 96 * 2, test.stream().weight_bytes_read());
}

TEST(MatmulRefusalTest, TheErrorNamesTheInvalidArgument) {
  Weights weights(8, 8, DType::kF32, 10);
  MatmulArgs params;
  params.weight = weights.view;
  params.num_rows = 1;
  params.x_row_stride = 7;
  params.y_row_stride = 8;
  TestStream test;
  EXPECT_THAT(Matmul(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("x_row_stride: must be at least 8")));
  params.x_row_stride = 8;
  char little[64];
  Workspace small(OnDevice(little), sizeof(little));
  EXPECT_THAT(Matmul(test.stream(), OnDevice(params), small),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("workspace")));
  params.y_dtype = DType::kBf16;
  EXPECT_THAT(
      Matmul(test.stream(), OnDevice(params), test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("y must be float32 on the CPU, not BF16")));
  params.y_dtype = DType::kF32;
  params.weight.layout = WeightLayout::kRows;
  EXPECT_THAT(
      Matmul(test.stream(), OnDevice(params), test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("must be in panels of 32 columns on the CPU")));
  params.weight.layout = WeightLayout::kPanels32;
  params.num_rows = 0;
  KVASIR_EXPECT_OK(Matmul(test.stream(), OnDevice(params), test.workspace()));
}

TEST(PackTest, FindsTheFirstNonFiniteNumberInArraysOfEveryNumberType) {
  constexpr int64_t kCount = 2500;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    VisitDType(dtype, [&](auto type) {
      using T = decltype(type);
      // In F16, -65504 is finite although it lacks only one exponent bit.
      std::vector<T> numbers(kCount, FromFloat<T>(-65504.0f));
      EXPECT_EQ(-1, FirstNotFinite(numbers.data(), dtype, kCount));
      numbers[2499] = FromFloat<T>(std::numeric_limits<float>::quiet_NaN());
      for (const int64_t at : {2499, 2100, 1024, 1023, 17, 0}) {
        numbers[static_cast<size_t>(at)] =
            FromFloat<T>(-std::numeric_limits<float>::infinity());
        EXPECT_EQ(at, FirstNotFinite(numbers.data(), dtype, kCount));
        EXPECT_EQ(-1, FirstNotFinite(numbers.data(), dtype, at));
      }
    });
  }
}

TEST(PackTest, BlocksOfSeveralMatricesCanBePackedIntoOneMatrixInAnyOrder) {
  const int64_t k = 50;
  StoredArray first(RandomFloats(40 * 100, 11), DType::kBf16);
  StoredArray second(RandomFloats(20 * 50, 12), DType::kBf16);
  PackedMatrix shape;
  shape.k = k;
  shape.n = 60;
  shape.dtype = DType::kBf16;
  std::vector<uint16_t> memory(static_cast<size_t>(shape.bytes() / 2), 0xffff);
  // Packs the second half (along K) of the first matrix, in two blocks out of
  // order. Then packs the whole second matrix.
  auto* slice = static_cast<Bf16*>(first.data()) + 50;
  KVASIR_ASSERT_OK(
      PackRows(shape, {slice + 23 * 100, 17, 100}, 23, memory.data()));
  KVASIR_ASSERT_OK(PackRows(shape, {second.data(), 20, 50}, 40, memory.data()));
  KVASIR_ASSERT_OK(PackRows(shape, {slice, 23, 100}, 0, memory.data()));
  ZeroPadding(shape, memory.data());
  for (int64_t n = 0; n < 64; ++n) {
    for (int64_t i = 0; i < k; ++i) {
      const float expected = n < 40   ? first.at(n * 100 + 50 + i)
                             : n < 60 ? second.at((n - 40) * 50 + i)
                                      : 0.0f;
      const auto index = static_cast<size_t>(((n / 32) * k + i) * 32 + n % 32);
      ASSERT_EQ(expected, ToFloat(Bf16{memory[index]})) << n << " " << i;
    }
  }
  EXPECT_THAT(
      PackRows(shape, {second.data(), 20, 50}, 41, memory.data()),
      base::StatusIs(
          absl::StatusCode::kOutOfRange,
          HasSubstr("columns [41, 61) of W, but W has columns [0, 60)")));
}

TEST(PackTest, MatricesOfEitherOrientationArePackedAsRows) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const int64_t k = 70;
    const int64_t n = 150;
    PackedMatrix shape;
    shape.k = k;
    shape.n = n;
    shape.dtype = dtype;
    shape.layout = WeightLayout::kRows;
    EXPECT_EQ(shape.bytes(), k * n * DTypeBytes(dtype));
    // Packs a matrix [N, K] whose rows are longer than K (PackRows), and
    // the same matrix as [K, N] (PackAsTheyLie). The blocks of both come
    // out of order.
    const int64_t width = DTypeBytes(dtype);
    const auto numbers = RandomFloats(n * k, 13);
    std::vector<float> wide(static_cast<size_t>(n * (k + 5)), kPoison);
    std::vector<float> turned(static_cast<size_t>(k * (n + 3)), kPoison);
    for (int64_t i = 0; i < n * k; ++i) {
      const auto number = numbers[static_cast<size_t>(i)];
      wide[static_cast<size_t>(i / k * (k + 5) + i % k)] = number;
      turned[static_cast<size_t>(i % k * (n + 3) + i / k)] = number;
    }
    StoredArray want(numbers, dtype);
    StoredArray rows(wide, dtype);
    StoredArray lines(turned, dtype);
    StoredArray packed(std::vector<float>(numbers.size(), kPoison), dtype);
    const auto at = [&](StoredArray& array, int64_t number) {
      return static_cast<const char*>(array.data()) + number * width;
    };
    KVASIR_ASSERT_OK(PackRows(shape, {at(rows, 99 * (k + 5)), 51, k + 5}, 99,
                              packed.data()));
    KVASIR_ASSERT_OK(
        PackRows(shape, {at(rows, 0), 99, k + 5}, 0, packed.data()));
    ZeroPadding(shape, packed.data());
    for (int64_t i = 0; i < n * k; ++i) ASSERT_EQ(want.at(i), packed.at(i));

    StoredArray again(std::vector<float>(numbers.size(), kPoison), dtype);
    KVASIR_ASSERT_OK(PackAsTheyLie(shape, {at(lines, 3 * (n + 3)), 67, n + 3},
                                   3, again.data()));
    KVASIR_ASSERT_OK(
        PackAsTheyLie(shape, {at(lines, 0), 3, n + 3}, 0, again.data()));
    for (int64_t i = 0; i < n * k; ++i) ASSERT_EQ(want.at(i), again.at(i));

    shape.data = OnDevice<const void>(packed.data());
    const PackedMatrix part = shape.Columns(7, 20);
    EXPECT_EQ(part.bytes(), 20 * k * width);
    EXPECT_EQ(part.data.device_address(), at(packed, 7 * k));
  }
}

}  // namespace
}  // namespace kvasir::kernels
