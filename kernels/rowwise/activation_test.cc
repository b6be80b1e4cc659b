#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

constexpr float kCap = 2.75f;

double Definition(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSoftCap:
      return kCap * std::tanh(x / kCap);
    case ActivationKind::kGelu:
      return x * std::erfc(-x / std::sqrt(2.0)) / 2.0;
    case ActivationKind::kGeluTanh:
      return x *
             (1.0 +
              std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))) /
             2.0;
    case ActivationKind::kRelu:
      break;
  }
  return x > 0.0 ? x : 0.0;
}

struct Case {
  ActivationKind kind;
  int64_t rows;
  int64_t columns;
};

class ActivationTest : public ::testing::TestWithParam<Case> {};

TEST_P(ActivationTest, MatchesTheDefinitionOnEveryBackEndAlsoInPlace) {
  const ActivationKind kind = GetParam().kind;
  const int64_t rows = GetParam().rows;
  const int64_t columns = GetParam().columns;
  // The scale is large enough that x reaches both tails of the function.
  const auto x = RandomFloats(rows * columns, 1, 4.0f);
  const auto run = [&](TestStream& test) {
    std::vector<float> out(x.size(), kPoison);
    const ActivationArgs params = {x.data(), out.data(),  rows, columns,
                                   kind,     DType::kF32, kCap};
    KVASIR_EXPECT_OK(
        Activation(test.stream(), OnDevice(params), test.workspace()));
    return out;
  };
  TestStream reference(1, CpuBackend::kReference);
  const auto truth = run(reference);
  for (size_t i = 0; i < truth.size(); ++i) {
    const double wide = static_cast<double>(x[i]);
    ASSERT_NEAR(
        Definition(kind, wide), static_cast<double>(truth[i]),
        2e-7 * std::abs(wide) + (kind == ActivationKind::kSoftCap ? 1e-6 : 0.0))
        << wide;
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(truth, run(one)));
    EXPECT_TRUE(SameBits(truth, run(three)));
    std::vector<float> in_place = x;
    const ActivationArgs params = {in_place.data(),
                                   in_place.data(),
                                   rows,
                                   columns,
                                   kind,
                                   DType::kF32,
                                   kCap};
    KVASIR_EXPECT_OK(
        Activation(one.stream(), OnDevice(params), one.workspace()));
    EXPECT_TRUE(SameBits(truth, in_place));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ActivationTest,
    ::testing::Values(Case{ActivationKind::kGelu, 0, 3},
                      Case{ActivationKind::kGelu, 1, 1},
                      Case{ActivationKind::kGelu, 16, 1003},
                      Case{ActivationKind::kGeluTanh, 5, 77},
                      Case{ActivationKind::kGeluTanh, 16, 1003},
                      Case{ActivationKind::kSoftCap, 5, 77},
                      Case{ActivationKind::kSoftCap, 16, 1003},
                      Case{ActivationKind::kRelu, 5, 77},
                      Case{ActivationKind::kRelu, 33, 1003}));

TEST(SoftCapTest, ACapAboveZeroLimitsLargeInputs) {
  std::vector<float> x;
  for (const float far :
       {300.0f, 1e20f, 1e38f, std::numeric_limits<float>::infinity()}) {
    for (int i = 0; i < 37; ++i) x.push_back(i % 2 == 0 ? far : -far);
  }
  std::vector<float> out(x.size(), kPoison);
  ActivationArgs params = {x.data(),
                           out.data(),
                           1,
                           static_cast<int64_t>(x.size()),
                           ActivationKind::kSoftCap,
                           DType::kF32,
                           kCap};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(1, backend);
    KVASIR_ASSERT_OK(
        Activation(test.stream(), OnDevice(params), test.workspace()));
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(out[i], std::copysign(kCap, x[i])) << x[i];
    }
  }
  params.cap = 0.0f;
  TestStream test;
  EXPECT_THAT(Activation(test.stream(), OnDevice(params), test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("the cap must be above 0, but is 0")));
}

// Inputs far from 0 are placed in every lane of a vector and in the remainder.
TEST(ActivationEndsTest, LargeInputsGiveTheSameResultOnEveryBackEnd) {
  std::vector<float> x;
  for (const float far : {13.0f, 14.0f, 88.0f, 88.5f, 1e4f, 1e20f, 1e38f,
                          std::numeric_limits<float>::infinity()}) {
    for (int i = 0; i < 37; ++i) x.push_back(i % 3 == 0 ? far : -far);
  }
  const auto count = static_cast<int64_t>(x.size());
  for (const ActivationKind kind :
       {ActivationKind::kGelu, ActivationKind::kGeluTanh,
        ActivationKind::kRelu}) {
    const auto run = [&](TestStream& test) {
      std::vector<float> out(x.size(), kPoison);
      const ActivationArgs params = {x.data(), out.data(), 1, count, kind};
      KVASIR_EXPECT_OK(
          Activation(test.stream(), OnDevice(params), test.workspace()));
      return out;
    };
    TestStream reference(1, CpuBackend::kReference);
    const std::vector<float> truth = run(reference);
    for (size_t i = 0; i < x.size(); ++i) {
      const float limit = std::max(x[i], 0.0f);
      EXPECT_TRUE(truth[i] == limit || std::abs(truth[i] - limit) < 1e-30f)
          << x[i] << " gives " << truth[i];
    }
    TestStream one(1);
    ForEachSimdTarget([&] { EXPECT_TRUE(SameBits(truth, run(one))); });
  }
}

TEST(ActivationRefusalTest, TheErrorNamesAnInvalidNumberOfColumns) {
  TestStream test;
  EXPECT_THAT(
      Activation(test.stream(), {}, test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("columns: must be at least 1, but is 0")));
}

}  // namespace
}  // namespace kvasir::kernels
