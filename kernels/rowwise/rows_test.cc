#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

TEST(AddRowsTest, AddsEachRowOrOneBiasToAllRowsOnEveryBackEnd) {
  constexpr int64_t kRows = 70;
  constexpr int64_t kColumns = 301;
  constexpr int64_t kStride = 305;
  const auto start = RandomFloats(kRows * kStride, 1);
  const auto x = RandomFloats(kRows * kColumns, 2);
  const auto run = [&](TestStream& test, int64_t x_stride) {
    std::vector<float> y = start;
    AddRowsArgs params = {y.data(), kStride, x.data(),
                          x_stride, kRows,   kColumns};
    KVASIR_EXPECT_OK(
        AddRows(test.stream(), OnDevice(params), test.workspace()));
    return y;
  };
  TestStream reference(1, CpuBackend::kReference);
  TestStream three(3);
  for (const int64_t x_stride : {int64_t{0}, kColumns}) {
    std::vector<float> expected = start;
    for (size_t t = 0; t < kRows; ++t) {
      for (size_t i = 0; i < kColumns; ++i) {
        expected[t * kStride + i] += x[t * static_cast<size_t>(x_stride) + i];
      }
    }
    EXPECT_TRUE(SameBits(expected, run(reference, x_stride)));
    ForEachSimdTarget(
        [&] { EXPECT_TRUE(SameBits(expected, run(three, x_stride))); });
  }
}

TEST(SumRowsTest, AddsRowsInOrderOnEveryBackEnd) {
  constexpr int64_t kStride = 20011;
  TestStream reference(1, CpuBackend::kReference);
  TestStream three(3);
  for (const int64_t rows : {1, 2, 5}) {
    for (const int64_t columns : {int64_t{0}, int64_t{37}, kStride}) {
      // The numbers get very different sizes, so that adding them in another
      // order would give other bits.
      auto x = RandomFloats(rows * kStride, 4);
      for (size_t i = 0; i < x.size(); ++i) x[i] *= i % 3 == 0 ? 1e4f : 1.0f;
      std::vector<float> expected(x.begin(), x.begin() + columns);
      for (int64_t t = 1; t < rows; ++t) {
        for (int64_t i = 0; i < columns; ++i) {
          expected[static_cast<size_t>(i)] +=
              x[static_cast<size_t>(t * kStride + i)];
        }
      }
      const auto run = [&](TestStream& test) {
        std::vector<float> out(static_cast<size_t>(columns), kPoison);
        SumRowsArgs params = {x.data(), kStride, out.data(), rows, columns};
        KVASIR_EXPECT_OK(
            SumRows(test.stream(), OnDevice(params), test.workspace()));
        return out;
      };
      EXPECT_TRUE(SameBits(expected, run(reference)));
      ForEachSimdTarget([&] { EXPECT_TRUE(SameBits(expected, run(three))); });
    }
  }
}

TEST(SumRowsTest, ASumOfZeroRowsIsRefused) {
  TestStream test;
  SumRowsParams params;
  params.columns = 4;
  EXPECT_THAT(SumRows(test.stream(), params, test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             "sum_rows: rows: must be at least 1, but is 0"));
}

TEST(GatherRowsTest, CopiesTheListedRowsInOrder) {
  constexpr int64_t kColumns = 500;
  const auto x = RandomFloats(50 * kColumns, 3);
  std::vector<int32_t> rows;
  for (int32_t i = 0; i < 60; ++i) rows.push_back(i * 7 % 50);
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(2, backend);
    std::vector<float> out(60 * 501, kPoison);
    GatherRowsArgs params = {x.data(), kColumns, rows.data(), out.data(),
                             501,      60,       kColumns};
    KVASIR_ASSERT_OK(
        GatherRows(test.stream(), OnDevice(params), test.workspace()));
    for (size_t t = 0; t < 60; ++t) {
      for (size_t i = 0; i < kColumns; ++i) {
        ASSERT_EQ(x[static_cast<size_t>(rows[t]) * kColumns + i],
                  out[t * 501 + i]);
      }
      // This number is still NaN, so the op has not written it.
      EXPECT_NE(out[t * 501 + 500], out[t * 501 + 500]);
    }
  }
}

// The offsets in x exceed 2^31 elements. The memory is only reserved; the
// system provides just the pages that the test touches.
TEST(GatherRowsTest, RowsBeyondTwoToThe31ElementsAreRead) {
  constexpr int64_t kStride = int64_t{1} << 28;
  constexpr int64_t kRow = 9;
  const size_t bytes = static_cast<size_t>(kRow * kStride + 16) * sizeof(float);
  std::unique_ptr<float, void (*)(void*)> memory(
      static_cast<float*>(std::calloc(bytes, 1)), &std::free);
  if (memory == nullptr) GTEST_SKIP() << "no address space for " << bytes;
  memory.get()[kRow * kStride + 3] = 5.0f;
  const int32_t row = kRow;
  float out[4] = {};
  TestStream test;
  GatherRowsArgs params = {memory.get(), kStride, &row, out, 4, 1, 4};
  KVASIR_ASSERT_OK(
      GatherRows(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ(5.0f, out[3]);
}

}  // namespace
}  // namespace kvasir::kernels
