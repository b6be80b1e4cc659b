#include "kernels/latents/hadamard.h"

#include <gmock/gmock.h>

#include <vector>

#include "base/hadamard.h"
#include "kernels/latents/hadamard_tables.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 3;

struct Case {
  std::vector<HadamardPlace> places;
  int64_t stride;
  bool transposed;
  bool in_place;
  int64_t num_rows = kTokens;
};

std::vector<float> Multiply(TestStream& test, const Case& run,
                            const std::vector<float>& x) {
  std::vector<float> y = x;
  if (!run.in_place) y.assign(x.size(), kPoison);
  HadamardParams shape;
  shape.x_row_stride = run.stride;
  shape.y_row_stride = run.stride;
  shape.transposed = run.transposed;
  HadamardTables tables(&test.device());
  const auto hadamard = Prepare(test.device(), shape, run.places, &tables);
  KVASIR_EXPECT_OK(hadamard.status());
  KVASIR_EXPECT_OK(Hadamard(test.stream(), *hadamard,
                            {OnDevice(run.in_place ? y.data() : x.data()),
                             OnDevice(y.data()), run.num_rows},
                            test.workspace()));
  return y;
}

// Returns number i of the product in float64: the sum over j of H[i, j] x[j],
// or of H[j, i] x[j] if `transposed`.
double Exact(const std::vector<double>& matrix, int64_t width, const float* x,
             int64_t i, bool transposed) {
  double sum = 0.0;
  for (int64_t j = 0; j < width; ++j) {
    const int64_t at = transposed ? j * width + i : i * width + j;
    sum += matrix[static_cast<size_t>(at)] * static_cast<double>(x[j]);
  }
  return sum;
}

class HadamardTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(HadamardTest, TheTransformEqualsAMatrixProductOnAllBackEnds) {
  const int64_t width = GetParam();
  const std::vector<HadamardPlace> places = {{width, 1}, {24, width + 3}};
  const std::vector<double> matrix = base::HadamardMatrix(width);
  const int64_t stride = width + 30;
  const std::vector<float> x =
      RandomFloats(kTokens * stride, static_cast<uint32_t>(width));
  for (const bool transposed : {false, true}) {
    const Case run = {places, stride, transposed, false};
    TestStream reference(1, CpuBackend::kReference);
    const std::vector<float> truth = Multiply(reference, run, x);
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* row = truth.data() + t * stride;
      for (int64_t i = 0; i < width; ++i) {
        ASSERT_NEAR(
            Exact(matrix, width, x.data() + t * stride + 1, i, transposed),
            static_cast<double>(row[1 + i]), 2e-5);
      }
      EXPECT_TRUE(std::isnan(row[0]) && std::isnan(row[width + 1]));
    }
    TestStream two(2);
    ForEachSimdTarget([&] {
      EXPECT_TRUE(SameBits(truth, Multiply(two, run, x)));
      Case in_place = run;
      in_place.in_place = true;
      std::vector<float> y = Multiply(two, in_place, x);
      // Numbers between the latents must not change.
      for (size_t i = 0; i < y.size(); ++i) {
        if (!std::isnan(truth[i])) {
          EXPECT_EQ(BitsOf(truth[i]), BitsOf(y[i]));
        } else {
          EXPECT_EQ(x[i], y[i]);
        }
      }
    });
  }
}

// The widths cover powers of two (some smaller than a SIMD vector), multiples
// of the orders of Paley I and Paley II matrices, and widths that need several
// blocks.
INSTANTIATE_TEST_SUITE_P(Widths, HadamardTest,
                         ::testing::Values(1, 2, 7, 8, 16, 24, 64, 72, 96, 128,
                                           160, 288, 300, 512, 50, 52));

TEST(HadamardRowsTest, AnyNumberOfThreadsGivesTheSameBits) {
  // With this many rows, the work is divided among threads.
  constexpr int64_t kRows = 61;
  const Case run = {{{512, 0}, {96, 512}}, 608, false, false, kRows};
  const std::vector<float> x = RandomFloats(kRows * run.stride, 9);
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<float> truth = Multiply(reference, run, x);
  TestStream four(4);
  ForEachSimdTarget(
      [&] { EXPECT_TRUE(SameBits(truth, Multiply(four, run, x))); });
}

TEST(HadamardInverseTest, TheTransposedTransformRestoresTheOriginalLatents) {
  for (const int64_t width : {96, 160, 256}) {
    const std::vector<float> x = RandomFloats(kTokens * width, 4);
    TestStream test;
    const std::vector<float> there =
        Multiply(test, {{{width, 0}}, width, false, false}, x);
    const std::vector<float> back =
        Multiply(test, {{{width, 0}}, width, true, true}, there);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], back[i], 2e-6);
  }
}

TEST(HadamardRefusalTest, TheErrorNamesTheInvalidField) {
  TestStream test;
  HadamardTables tables(&test.device());
  HadamardParams shape;
  shape.x_row_stride = 100;
  shape.y_row_stride = 99;
  EXPECT_THAT(Prepare(test.device(), shape, std::vector<HadamardPlace>{{96, 4}},
                      &tables)
                  .status(),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("y_row_stride: must be at least 100")));
}

}  // namespace
}  // namespace kvasir::kernels
