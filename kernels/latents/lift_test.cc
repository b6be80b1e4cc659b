#include "kernels/latents/lift.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/latents/ops.h"
#include "kernels/linear/pack.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Case {
  int64_t rows;
  int64_t queries;  // query heads per KV head
  DType dtype;
  // The input and output width of every KV head's matrix.
  std::vector<std::pair<int64_t, int64_t>> in_out;
};

// Random matrices, and random rows of x with gaps between the heads.
class Heads {
 public:
  explicit Heads(const Case& c) : case_(c) {
    for (size_t j = 0; j < c.in_out.size(); ++j) {
      const auto [in, out] = c.in_out[j];
      plain.push_back(RandomFloats(in * out, static_cast<uint32_t>(j)));
      StoredArray stored(plain.back(), c.dtype);
      for (int64_t i = 0; i < in * out; ++i) {
        plain.back()[static_cast<size_t>(i)] = stored.at(i);
      }
      PackedMatrix matrix;
      matrix.k = in;
      matrix.n = out;
      matrix.dtype = c.dtype;
      // The memory of the packed matrix. It is filled with poison, which must
      // not be read.
      memory_.push_back(std::make_unique<StoredArray>(
          std::vector<float>(
              static_cast<size_t>(matrix.bytes() / DTypeBytes(c.dtype)),
              kPoison),
          c.dtype));
      matrix.data = OnDevice(memory_.back()->data());
      // Packs the matrix in two blocks of rows.
      const int64_t first = in / 3;
      for (const auto& [begin, count] :
           {std::pair(int64_t{0}, first), std::pair(first, in - first)}) {
        const char* data = static_cast<const char*>(stored.data()) +
                           begin * out * DTypeBytes(c.dtype);
        KVASIR_EXPECT_OK(PackAsTheyLie(matrix, {data, count, out}, begin,
                                       memory_.back()->data()));
      }
      ZeroPadding(matrix, memory_.back()->data());
      matrices_.push_back(matrix);
      for (int64_t i = 0; i < c.queries; ++i) {
        column_in.push_back(x_stride_);
        x_stride_ += in + 1;
        column_out.push_back(y_stride + 2);
        y_stride += out + 2;
      }
    }
    x = RandomFloats(c.rows * x_stride_, 50);
  }

  // Lifts the rows from `first` on and returns y. Numbers that the op does not
  // write keep the value 7.
  std::vector<float> Run(TestStream& test, int64_t first = 0) const {
    std::vector<float> y(static_cast<size_t>(case_.rows * y_stride), 7.0f);
    LiftParams shape;
    shape.x_row_stride = x_stride_;
    shape.y_row_stride = y_stride;
    const auto lift =
        Prepare(test.device(), shape, matrices_, {column_in, column_out});
    KVASIR_EXPECT_OK(lift.status());
    KVASIR_EXPECT_OK(Lift(
        test.stream(), *lift,
        {OnDevice(x.data()), OnDevice(y.data()), first, case_.rows - first},
        test.workspace()));
    return y;
  }

  double Exact(int64_t t, int64_t h, int64_t n) const {
    const auto j = static_cast<size_t>(h / case_.queries);
    const auto [in, out] = case_.in_out[j];
    double sum = 0.0;
    for (int64_t k = 0; k < in; ++k) {
      sum += static_cast<double>(x[static_cast<size_t>(
                 t * x_stride_ + column_in[static_cast<size_t>(h)] + k)]) *
             static_cast<double>(plain[j][static_cast<size_t>(k * out + n)]);
    }
    return sum;
  }

  std::vector<std::vector<float>> plain;  // [in, out], as stored
  std::vector<float> x;
  std::vector<int64_t> column_in;
  std::vector<int64_t> column_out;
  int64_t y_stride = 0;

 private:
  const Case case_;
  std::vector<std::unique_ptr<StoredArray>> memory_;
  std::vector<PackedMatrix> matrices_;
  int64_t x_stride_ = 0;
};

class LiftTest : public ::testing::TestWithParam<Case> {};

TEST_P(LiftTest, TheLiftEqualsAMatrixProductPerHeadOnAllBackEnds) {
  const Case& c = GetParam();
  const Heads heads(c);
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<float> truth = heads.Run(reference);
  std::vector<bool> written(truth.size());
  for (int64_t t = 0; t < c.rows; ++t) {
    for (size_t h = 0; h < heads.column_out.size(); ++h) {
      const auto [in, out] = c.in_out[h / static_cast<size_t>(c.queries)];
      for (int64_t n = 0; n < out; ++n) {
        const auto at =
            static_cast<size_t>(t * heads.y_stride + heads.column_out[h] + n);
        written[at] = true;
        ASSERT_NEAR(heads.Exact(t, static_cast<int64_t>(h), n),
                    static_cast<double>(truth[at]),
                    2e-6 * static_cast<double>(in));
      }
    }
  }
  for (size_t i = 0; i < truth.size(); ++i) {
    ASSERT_TRUE(written[i] || truth[i] == 7.0f);
  }
  TestStream three(3);
  ForEachSimdTarget([&] { EXPECT_TRUE(SameBits(truth, heads.Run(three))); });
}

TEST_P(LiftTest, RowsBeforeFirstRowAreNotWritten) {
  const Heads heads(GetParam());
  const int64_t first = GetParam().rows / 2;
  TestStream reference(1, CpuBackend::kReference);
  std::vector<float> truth = heads.Run(reference);
  std::fill_n(truth.begin(), first * heads.y_stride, 7.0f);
  EXPECT_TRUE(SameBits(truth, heads.Run(reference, first)));
  TestStream three(3);
  ForEachSimdTarget(
      [&] { EXPECT_TRUE(SameBits(truth, heads.Run(three, first))); });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, LiftTest,
    ::testing::Values(Case{1, 1, DType::kF32, {{16, 24}}},
                      Case{1, 4, DType::kBf16, {{64, 160}, {64, 24}}},
                      Case{7, 3, DType::kF16, {{33, 8}, {33, 96}, {33, 41}}},
                      Case{53, 2, DType::kBf16, {{64, 300}, {64, 64}}},
                      // Inputs wider than kLiftBlockK (512) are multiplied in
                      // several passes.
                      Case{5, 2, DType::kF32, {{600, 40}, {1100, 40}}},
                      Case{0, 1, DType::kF32, {{16, 24}}}));

struct ComplexCase {
  RopePairing pairing;
  RopePairing out_pairing;
  bool selects_only;
  int64_t tokens = 3;
};

class ComplexLiftTest : public ::testing::TestWithParam<ComplexCase> {};

TEST_P(ComplexLiftTest,
       TheInputIsMultipliedByTheComplexConjugateOfTheLiftMatrix) {
  constexpr int64_t kQueries = 2;
  constexpr int64_t kPairs = 32;
  const ComplexCase& c = GetParam();
  const std::vector<int64_t> counts = {37, 5, 64};
  std::vector<std::vector<int32_t>> lists;
  std::vector<std::vector<float>> ups;
  std::vector<ComplexChannelsArgs> channels;
  std::vector<int64_t> column_in;
  std::vector<int64_t> column_out;
  int64_t y_stride = 0;
  for (const int64_t count : counts) {
    lists.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      lists.back().push_back(static_cast<int32_t>(i * kPairs / count));
    }
    ups.push_back(RandomFloats(2 * count, static_cast<uint32_t>(count)));
  }
  for (size_t j = 0; j < counts.size(); ++j) {
    channels.push_back(
        {counts[j], lists[j].data(), c.selects_only ? nullptr : ups[j].data()});
    for (int64_t i = 0; i < kQueries; ++i) {
      column_in.push_back(static_cast<int64_t>(column_in.size()) *
                          (2 * kPairs + 1));
      column_out.push_back(y_stride + 1);
      y_stride += 2 * counts[j] + 1;
    }
  }
  const int64_t x_stride = column_in.back() + 2 * kPairs;
  const std::vector<float> x = RandomFloats(c.tokens * x_stride, 8);
  const auto run = [&](TestStream& test, int64_t first = 0) {
    std::vector<float> y(static_cast<size_t>(c.tokens * y_stride), kPoison);
    ComplexLiftParams shape;
    shape.x_row_stride = x_stride;
    shape.y_row_stride = y_stride;
    shape.num_pairs = kPairs;
    shape.pairing = c.pairing;
    shape.out_pairing = c.out_pairing;
    std::vector<ComplexChannels> on_device;
    for (const ComplexChannelsArgs& each : channels) {
      on_device.push_back(OnDevice(each));
    }
    const auto lift =
        Prepare(test.device(), shape, on_device, {column_in, column_out});
    KVASIR_EXPECT_OK(lift.status());
    KVASIR_EXPECT_OK(ComplexLift(
        test.stream(), *lift,
        {OnDevice(x.data()), OnDevice(y.data()), first, c.tokens - first},
        test.workspace()));
    return y;
  };
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<float> truth = run(reference);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (size_t h = 0; h < column_in.size(); ++h) {
      const ComplexChannelsArgs& head = channels[h / kQueries];
      const float* from = x.data() + t * x_stride + column_in[h];
      const float* to = truth.data() + t * y_stride + column_out[h];
      const bool halves = c.pairing == RopePairing::kHalfSplit;
      const bool halves_out = c.out_pairing == RopePairing::kHalfSplit;
      for (int64_t i = 0; i < head.num_channels; ++i) {
        const int64_t f = head.pairs[i];
        const auto a = static_cast<double>(from[halves ? f : 2 * f]);
        const auto b =
            static_cast<double>(from[halves ? f + kPairs : 2 * f + 1]);
        const double u = c.selects_only ? 1.0 : static_cast<double>(head.up[i]);
        const double v =
            c.selects_only
                ? 0.0
                : static_cast<double>(head.up[head.num_channels + i]);
        ASSERT_NEAR(a * u + b * v,
                    static_cast<double>(to[halves_out ? i : 2 * i]), 1e-6);
        ASSERT_NEAR(b * u - a * v,
                    static_cast<double>(
                        to[halves_out ? head.num_channels + i : 2 * i + 1]),
                    1e-6);
      }
      EXPECT_TRUE(std::isnan(to[-1]));
    }
  }
  TestStream two(2);
  ForEachSimdTarget([&] { EXPECT_TRUE(SameBits(truth, run(two))); });
  // Rows before first_row must not change.
  std::vector<float> last = truth;
  std::fill_n(last.begin(), (c.tokens - 1) * y_stride, kPoison);
  EXPECT_TRUE(SameBits(last, run(reference, c.tokens - 1)));
  ForEachSimdTarget(
      [&] { EXPECT_TRUE(SameBits(last, run(two, c.tokens - 1))); });
}

constexpr RopePairing kHalves = RopePairing::kHalfSplit;
constexpr RopePairing kNeighbours = RopePairing::kInterleaved;

INSTANTIATE_TEST_SUITE_P(
    Layouts, ComplexLiftTest,
    ::testing::Values(ComplexCase{kHalves, kHalves, false},
                      ComplexCase{kNeighbours, kHalves, false},
                      ComplexCase{kNeighbours, kNeighbours, true},
                      ComplexCase{kHalves, kHalves, true},
                      // This case has enough numbers for the work to be divided
                      // among threads.
                      ComplexCase{kNeighbours, kHalves, false, 50}));

TEST(PackAsTheyLieTest, BlocksThatDoNotFitIntoTheMatrixAreRefused) {
  PackedMatrix shape;
  shape.k = 2;
  shape.n = 40;
  std::vector<float> memory(2 * 64);
  const std::vector<float> block(2 * 40);
  const auto expect = [&](const RowBlock& rows, int64_t first,
                          const char* why) {
    EXPECT_THAT(PackAsTheyLie(shape, rows, first, memory.data()),
                base::StatusIs(absl::StatusCode::kOutOfRange, HasSubstr(why)));
  };
  expect({block.data(), 2, 40}, 1, "rows [1, 3) of W, but W has rows [0, 2)");
  expect({block.data(), 2, 39}, 0, "row stride 39 is less than n, which is 40");
}

TEST(LiftRefusalTest, TheErrorNamesTheInvalidField) {
  TestStream test;
  PackedMatrix matrix;
  matrix.k = 64;
  matrix.n = 24;
  std::vector<int64_t> column_in = {0, 64};
  std::vector<int64_t> column_out = {0, 24};
  LiftParams shape;
  shape.x_row_stride = 128;
  shape.y_row_stride = 47;
  std::vector<PackedMatrix> matrices = {matrix};
  const auto expect = [&](const char* why) {
    EXPECT_THAT(
        Prepare(test.device(), shape, matrices, {column_in, column_out})
            .status(),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  expect("y_row_stride: must be at least 48, but is 47");
  column_in = {0, 0, 0};
  column_out = {0, 0, 0};
  matrices.push_back(matrix);
  expect(
      "the number of query heads must be a positive multiple of the number of "
      "KV heads, 2, but is 3");
}

TEST(ComplexLiftRefusalTest, AChannelPairThatTheHeadDoesNotHaveIsRefused) {
  TestStream test;
  std::vector<int32_t> pairs = {0, 7, 8};
  const std::vector<ComplexChannels> channels = {{3, pairs.data(), nullptr}};
  const std::vector<int64_t> column = {0};
  ComplexLiftParams shape;
  shape.x_row_stride = 16;
  shape.y_row_stride = 6;
  shape.num_pairs = 8;
  const auto prepare = [&] {
    return Prepare(test.device(), shape, channels, {column, column}).status();
  };
  const auto expect = [&](const char* why) {
    EXPECT_THAT(prepare(), base::StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr(why)));
  };
  expect("KV head 0: the pair of channel 2 must be from 0 to 7, but is 8");
  pairs[2] = -1;
  expect("the pair of channel 2 must be from 0 to 7, but is -1");
  pairs[2] = 7;
  KVASIR_EXPECT_OK(prepare());
}

}  // namespace
}  // namespace kvasir::kernels
