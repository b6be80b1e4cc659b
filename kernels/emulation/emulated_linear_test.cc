// Tests the kernels for matrix products against a product in float64, with
// several seeds and odd shapes.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/linear/ops.h"
#include "kernels/linear/pack.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();

struct Case {
  DType x;
  DType w;
  DType y;
  int64_t rows;
  int64_t k;
  int64_t n;
  bool bias = true;
  int64_t x_gap = 0;  // numbers between two rows of x, all NaN
  int64_t y_gap = 0;
};

// Returns a case in which x, W and y have the same type.
Case Alike(DType dtype, int64_t rows, int64_t k, int64_t n) {
  return {dtype, dtype, dtype, rows, k, n};
}

struct Data {
  explicit Data(const Case& c)
      : x(static_cast<size_t>(c.rows * (c.k + c.x_gap)), kPoison),
        w(Rounded(RandomFloats(c.n * c.k, 2), c.w)),
        bias(RandomFloats(c.n, 3)) {
    const auto numbers = Rounded(RandomFloats(c.rows * c.k, 1), c.x);
    for (int64_t t = 0; t < c.rows; ++t) {
      std::copy_n(numbers.begin() + t * c.k, c.k,
                  x.begin() + t * (c.k + c.x_gap));
    }
  }
  std::vector<float> x, w, bias;  // w is [n, k]
};

// Returns y [rows, n], including the gaps between rows.
std::vector<float> ByKernel(EmulatedTest& test, const Case& c,
                            const Data& data) {
  PackedMatrix weight = {nullptr, c.k, c.n, c.w, WeightLayout::kRows};
  StoredArray rows(data.w, c.w);
  std::vector<char> packed(static_cast<size_t>(weight.bytes()), '\xff');
  KVASIR_EXPECT_OK(PackRows(weight, {rows.data(), c.n, c.k}, 0, packed.data()));
  const DeviceBuffer w = test.Put(packed);
  const DeviceBuffer x = test.PutNumbers(data.x, c.x);
  const DeviceBuffer bias = test.Put(data.bias);
  const DeviceBuffer y = test.PutNumbers(
      std::vector<float>(static_cast<size_t>(c.rows * (c.n + c.y_gap)),
                         kPoison),
      c.y);
  weight.data = w.data();
  MatmulParams params;
  params.x = x.as<float>();
  params.x_row_stride = c.k + c.x_gap;
  params.num_rows = c.rows;
  params.weight = weight;
  if (c.bias) params.bias = bias.as<float>();
  params.y = y.as<float>();
  params.y_row_stride = c.n + c.y_gap;
  params.dtype = c.x;
  params.y_dtype = c.y;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Matmul(test.stream(), params, none));
  return test.GetNumbers(y, c.y);
}

// Computes a row of the product in float64.
std::vector<double> RowOf(const Case& c, const Data& data, int64_t row) {
  std::vector<double> y(static_cast<size_t>(c.n));
  for (int64_t n = 0; n < c.n; ++n) {
    double sum = 0.0;
    for (int64_t k = 0; k < c.k; ++k) {
      sum += static_cast<double>(
                 data.x[static_cast<size_t>(row * (c.k + c.x_gap) + k)]) *
             static_cast<double>(data.w[static_cast<size_t>(n * c.k + k)]);
    }
    if (c.bias) sum += static_cast<double>(data.bias[static_cast<size_t>(n)]);
    y[static_cast<size_t>(n)] = sum;
  }
  return y;
}

// Half the distance from `stored` to the next larger number of type `dtype`:
// the largest error of rounding.
double HalfUnit(DType dtype, float stored) {
  const int digits = dtype == DType::kF32 ? 24 : dtype == DType::kF16 ? 11 : 8;
  const int least = dtype == DType::kF16 ? -14 : -126;
  const int exponent = stored == 0.0f ? least : std::ilogb(stored);
  return std::ldexp(1.0, std::max(exponent, least) - digits);
}

// Relative errors of a row of y. `of_numbers` is the error of the stored
// numbers. `of_sums` counts only the part of each error that exceeds half a
// unit of the type of y. So it is at most the error of the unrounded sums.
struct RowError {
  double of_numbers;
  double of_sums;
};
RowError ErrorOf(const std::vector<double>& want, const float* got,
                 DType dtype) {
  double numbers = 0.0, sums = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - want[i]);
    const double more = std::max(0.0, d - HalfUnit(dtype, got[i]));
    numbers += d * d;
    sums += more * more;
    norm += want[i] * want[i];
  }
  if (std::isnan(numbers)) return {INFINITY, INFINITY};
  return {std::sqrt(numbers / norm), std::sqrt(sums / norm)};
}

// The tolerance for RowError::of_sums, for any type. The emulator rounds each
// sum of an mma to float32. A Hopper tensor core instead truncates each term 25
// bits below the largest term, and then truncates their sum. On an H100, the
// error after 1000 products is 1.3e-6.
double SumTolerance() { return OnGpu() ? 4e-6 : 1e-6; }

void ExpectProduct(const Case& c, uint64_t seed, int multiprocessors = 4) {
  SCOPED_TRACE(testing::Message()
               << c.rows << " x " << c.k << " x " << c.n << ", "
               << DTypeName(c.x) << " by " << DTypeName(c.w) << " to "
               << DTypeName(c.y) << ", seed " << seed);
  EmulatedTest test(seed, multiprocessors);
  const Data data(c);
  const std::vector<float> got = ByKernel(test, c, data);
  for (int64_t t = 0; t < c.rows; ++t) {
    const float* const row = got.data() + t * (c.n + c.y_gap);
    const RowError error = ErrorOf(RowOf(c, data, t), row, c.y);
    ASSERT_LE(error.of_numbers, ToleranceOf(c.y)) << t;
    ASSERT_LE(error.of_sums, SumTolerance()) << t;
    for (int64_t i = c.n; i < c.n + c.y_gap; ++i) {
      ASSERT_TRUE(std::isnan(row[i])) << t << ", after the end";
    }
  }
}

TEST(MatmulCudaTest, TheProductIsCorrectWithinTheToleranceOfEachNumberType) {
  uint64_t seed = 0;
  for (const DType x : kDTypes) {
    for (const DType w : kDTypes) {
      for (const DType y : {DType::kF32, x}) {
        ExpectProduct({x, w, y, 0, 8, 8}, ++seed);
        ExpectProduct({x, w, y, 1, 1, 1}, ++seed);
        ExpectProduct({x, w, y, 1, 64, 72, false}, ++seed);
        ExpectProduct({x, w, y, 5, 33, 37, true, 4, 5}, ++seed);
        ExpectProduct({x, w, y, 16, 136, 32}, ++seed);
        ExpectProduct({x, w, y, 19, 40, 45, true, 8, 1}, ++seed);
      }
    }
  }
}

// For each tile size, covers incomplete tiles and ring buffers that wrap. Some
// of the depths k and strides are multiples of 16 bytes, others are not.
TEST(MatmulCudaTest, TheProductIsCorrectForEveryTileSize) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const DType y : {dtype, DType::kF32}) {
      // With 65 rows or more, a device with one multiprocessor uses large
      // tiles, and a device with four uses tiles of 64 x 128.
      for (const auto& [rows, many] : std::vector<std::pair<int64_t, int>>{
               {3, 1}, {61, 1}, {130, 1}, {70, 4}}) {
        ExpectProduct({dtype, dtype, y, rows, 1000, 40}, ++seed, many);
        ExpectProduct({dtype, dtype, y, rows, 712, 33, true, 8, 2}, ++seed,
                      many);
        ExpectProduct({dtype, dtype, y, rows, 84, 130, false, 4, 1}, ++seed,
                      2 * many);
        ExpectProduct({dtype, dtype, y, rows, 77, 12, true, 3}, ++seed, many);
      }
    }
  }
}

// Each case has more tiles of rows than one group holds (TileOrder::kTogether).
TEST(MatmulCudaTest, TheProductIsCorrectForManyTilesOfRows) {
  for (const auto& [multiprocessors, n, kernel] :
       std::vector<std::tuple<int, int64_t, std::string>>{
           {1, 136, "matmul_many_rows"},
           {30, 8, "matmul_more_rows"},
           {1000, 40, "matmul_some_rows"}}) {
    const int64_t rows = kernel == "matmul_many_rows" ? 2100 : 1100;
    const Case c = Alike(DType::kBf16, rows, 8, n);
    EmulatedTest test(7, multiprocessors);
    const Data data(c);
    const std::vector<float> got = ByKernel(test, c, data);
    for (int64_t t = 0; t < rows; ++t) {
      ASSERT_LE(ErrorOf(RowOf(c, data, t), got.data() + t * n, c.y).of_numbers,
                ToleranceOf(c.y))
          << kernel << ", row " << t;
    }
    EXPECT_FALSE(test.emulator().SyncSites(kernel).empty()) << kernel;
  }
}

TEST(MatmulCudaTest, Float32ProductsHaveTheSameBitsAsOnTheCpu) {
  for (const DType w : kDTypes) {
    const Case c = {DType::kF32, w, DType::kF32, 21, 70, 45};
    const Data data(c);
    PackedMatrixArgs panels;
    panels.k = c.k;
    panels.n = c.n;
    panels.dtype = w;
    std::vector<char> packed(static_cast<size_t>(panels.bytes()));
    panels.data = packed.data();
    StoredArray rows(data.w, w);
    KVASIR_ASSERT_OK(
        PackRows(OnDevice(panels), {rows.data(), c.n, c.k}, 0, packed.data()));
    std::vector<float> want(static_cast<size_t>(c.rows * c.n));
    MatmulArgs args;
    args.x = data.x.data();
    args.x_row_stride = c.k;
    args.num_rows = c.rows;
    args.weight = panels;
    args.bias = data.bias.data();
    args.y = want.data();
    args.y_row_stride = c.n;
    TestStream reference(1, CpuBackend::kReference);
    KVASIR_ASSERT_OK(
        Matmul(reference.stream(), OnDevice(args), reference.workspace()));
    EmulatedTest test;
    EXPECT_TRUE(SameBits(want, ByKernel(test, c, data))) << DTypeName(w);
  }
}

// Multiplies `rows` rows of `data`, beginning with row `first`.
std::vector<float> RowsByKernel(Case c, const Data& data, int64_t first,
                                int64_t rows, int multiprocessors) {
  Data part = data;
  part.x.assign(data.x.begin() + first * c.k,
                data.x.begin() + (first + rows) * c.k);
  c.rows = rows;
  EmulatedTest test(static_cast<uint64_t>(rows), multiprocessors);
  return ByKernel(test, c, part);
}

TEST(MatmulCudaTest, RowsHaveTheSameBitsInAnyBatch) {
  constexpr int64_t kRows = 70;
  for (const Case& c : std::vector<Case>{
           Alike(DType::kBf16, kRows, 88, 40),
           Alike(DType::kF16, kRows, 49, 10),
           {DType::kF32, DType::kBf16, DType::kF32, kRows, 40, 33}}) {
    const Data data(c);
    // A device with one multiprocessor uses large tiles, one with four uses
    // tiles of 64 x 128, and one with a hundred uses tiles of 64 x 32.
    const auto all = RowsByKernel(c, data, 0, kRows, 1);
    EXPECT_TRUE(SameBits(all, RowsByKernel(c, data, 0, kRows, 100)))
        << DTypeName(c.x);
    for (int64_t rows = 1; rows <= kRows; ++rows) {
      EXPECT_TRUE(SameBits({all.begin(), all.begin() + rows * c.n},
                           RowsByKernel(c, data, 0, rows, 4)))
          << rows << " rows of " << DTypeName(c.x);
    }
    for (int64_t row = 0; row < kRows; row += 3) {
      EXPECT_TRUE(
          SameBits({all.begin() + row * c.n, all.begin() + (row + 1) * c.n},
                   RowsByKernel(c, data, row, 1, 4)))
          << "row " << row << " of " << DTypeName(c.x);
    }
  }
}

TEST(MatmulCudaTest, NonFiniteNumbersInARowDoNotAffectOtherRows) {
  for (const int64_t rows : {9, 40, 100}) {
    const Case c = Alike(DType::kBf16, rows, 80, 24);
    Data data(c);
    EmulatedTest first(1, 1), second(1, 1);
    const auto want = ByKernel(first, c, data);
    for (int64_t k = 0; k < c.k; ++k) {
      data.x[static_cast<size_t>(5 * c.k + k)] = kPoison;
    }
    auto got = ByKernel(second, c, data);
    for (int64_t n = 0; n < c.n; ++n) {
      float& y = got[static_cast<size_t>(5 * c.n + n)];
      EXPECT_TRUE(std::isnan(y));
      y = want[static_cast<size_t>(5 * c.n + n)];
    }
    EXPECT_TRUE(SameBits(want, got)) << rows;
  }
}

// One product for each kernel, for a device with four multiprocessors.
struct KernelCase {
  const char* kernel;
  Case c;
};
std::vector<KernelCase> KernelCases() {
  return {
      {"matmul_few_rows", Alike(DType::kBf16, 7, 648, 40)},
      {"matmul_some_rows", Alike(DType::kF16, 33, 392, 40)},
      {"matmul_more_rows", Alike(DType::kF16, 65, 168, 40)},
      {"matmul_many_rows", Alike(DType::kBf16, 65, 168, 392)},
      {"matmul_chain", {DType::kBf16, DType::kF32, DType::kBf16, 20, 70, 40}}};
}

TEST(MatmulCudaTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  for (const KernelCase& k : KernelCases()) {
    const Data data(k.c);
    EmulatedTest first(1);
    const auto want = ByKernel(first, k.c, data);
    EXPECT_FALSE(first.emulator().SyncSites(k.kernel).empty()) << k.kernel;
    for (uint64_t seed = 2; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      EXPECT_TRUE(SameBits(want, ByKernel(test, k.c, data)))
          << k.kernel << ", seed " << seed;
    }
  }
}

TEST(MatmulCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  for (const KernelCase& k : KernelCases()) {
    const Data data(k.c);
    EmulatedTest whole(1);
    const auto want = ByKernel(whole, k.c, data);
    const auto mutants =
        LeaveOutEach(k.kernel, kSeeds, [&](EmulatedTest& test) {
          return SameBits(want, ByKernel(test, k.c, data));
        });
    // Most kernels have four sites that synchronize: two commits, a wait and a
    // barrier. matmul_chain has only two barriers.
    EXPECT_EQ(mutants.size(), std::string(k.kernel) == "matmul_chain" ? 2u : 4u)
        << k.kernel;
    for (const Mutant& mutant : mutants) {
      EXPECT_NE(mutant.verdict, Verdict::kRight)
          << k.kernel << ": " << mutant.site.kind << " at " << mutant.site.line;
    }
  }
}

TEST(MatmulCudaTest, ReadsWholeSectorsWithoutBankConflicts) {
  for (const KernelCase& k : std::vector<KernelCase>{
           {"matmul_few_rows", Alike(DType::kBf16, 16, 640, 64)},
           {"matmul_some_rows", Alike(DType::kF16, 64, 320, 64)},
           {"matmul_more_rows", Alike(DType::kF16, 128, 128, 128)},
           {"matmul_many_rows", Alike(DType::kBf16, 128, 128, 512)},
           {"matmul_chain",
            {DType::kF32, DType::kF32, DType::kF32, 16, 64, 32}}}) {
    EmulatedTest test(1, 4, /*count_accesses=*/true);
    (void)ByKernel(test, k.c, Data(k.c));
    int64_t loads = 0, shared = 0;
    for (const AccessCount& count : test.emulator().Accesses(k.kernel)) {
      EXPECT_EQ(count.passes, count.least_passes)
          << k.kernel << ": " << count.kind << " at " << count.line;
      shared += count.passes;
      if (count.kind != "global load") continue;
      EXPECT_EQ(count.sectors, count.least_sectors)
          << k.kernel << ": " << count.kind << " at " << count.line;
      loads += count.bytes;
    }
    EXPECT_GT(shared, 0) << k.kernel;
    if (std::string(k.kernel) == "matmul_few_rows") {
      // W (64 rows) is loaded once, and x (16 rows) once for every 32 columns
      // of y.
      EXPECT_EQ(loads, (64 + 64 / 32 * 16) * 640 * 2);
    }
  }
}

TEST(MatmulCudaTest, ProductsThatAGpuDoesNotSupportAreRefused) {
  EmulatedTest test;
  Workspace none(nullptr, 0);
  MatmulParams params;
  params.num_rows = 1;
  params.weight.k = 8;
  params.weight.n = 8;
  params.x_row_stride = 8;
  params.y_row_stride = 8;
  EXPECT_THAT(
      Matmul(test.stream(), params, none),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("matmul: the weight must be in rows on a GPU")));
  params.weight.layout = WeightLayout::kRows;
  params.dtype = DType::kBf16;
  params.y_dtype = DType::kF16;
  EXPECT_THAT(
      Matmul(test.stream(), params, none),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr("matmul: on a GPU, y must be F32 or have the type of the "
                    "activations (BF16), but is F16")));
  params.y_dtype = DType::kF32;
  params.weight.n = int64_t{1} << 22;
  params.y_row_stride = params.weight.n;
  EXPECT_THAT(Matmul(test.stream(), params, none),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("at most 2097120 columns, not "
                                       "4194304")));
  params.weight.n = 8;
  params.num_rows = int64_t{1} << 24;
  EXPECT_THAT(
      Matmul(test.stream(), params, none),
      base::StatusIs(absl::StatusCode::kUnimplemented,
                     HasSubstr("a GPU supports at most 16776960 rows of x, "
                               "not 16777216")));
}

}  // namespace
}  // namespace kvasir::kernels::emulation
