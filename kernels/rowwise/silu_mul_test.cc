#include <cmath>
#include <limits>
#include <vector>

#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

std::vector<float> Gate(TestStream& test, int64_t rows, int64_t features,
                        const std::vector<float>& gate_up,
                        GateKind kind = GateKind::kSilu) {
  std::vector<float> out(static_cast<size_t>(rows * features), kPoison);
  SiluMulArgs params = {gate_up.data(), out.data(), rows, features};
  params.gate = kind;
  KVASIR_EXPECT_OK(SiluMul(test.stream(), OnDevice(params), test.workspace()));
  return out;
}

struct Case {
  int64_t rows;
  int64_t features;
};

class SiluMulTest : public ::testing::TestWithParam<Case> {};

TEST_P(SiluMulTest, SiluMulMatchesItsDefinitionOnEveryBackEnd) {
  const int64_t rows = GetParam().rows;
  const int64_t features = GetParam().features;
  // Most gates are so far from 0 that silu is nearly 0 or nearly the gate.
  const auto gate_up = RandomFloats(rows * 2 * features, 1, 30.0f);
  TestStream reference(1, CpuBackend::kReference);
  const auto truth = Gate(reference, rows, features, gate_up);
  for (size_t i = 0; i < truth.size(); ++i) {
    const size_t width = static_cast<size_t>(features);
    const double gate =
        static_cast<double>(gate_up[i / width * 2 * width + i % width]);
    const double up =
        static_cast<double>(gate_up[i / width * 2 * width + width + i % width]);
    const double expected = gate / (1.0 + std::exp(-gate)) * up;
    ASSERT_NEAR(expected, static_cast<double>(truth[i]),
                1e-6 * std::abs(expected) + 1e-30)
        << gate;
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(truth, Gate(one, rows, features, gate_up)));
    EXPECT_TRUE(SameBits(truth, Gate(three, rows, features, gate_up)));
  });
}

TEST_P(SiluMulTest, AGeluGateMatchesItsDefinitionOnEveryBackEnd) {
  const int64_t rows = GetParam().rows;
  const int64_t features = GetParam().features;
  const auto gate_up = RandomFloats(rows * 2 * features, 2, 6.0f);
  TestStream reference(1, CpuBackend::kReference);
  const auto truth =
      Gate(reference, rows, features, gate_up, GateKind::kGeluTanh);
  for (size_t i = 0; i < truth.size(); ++i) {
    const size_t width = static_cast<size_t>(features);
    const size_t at = i / width * 2 * width + i % width;
    const double gate = static_cast<double>(gate_up[at]);
    const double up = static_cast<double>(gate_up[at + width]);
    const double inner =
        std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
    const double expected = 0.5 * gate * (1 + std::tanh(inner)) * up;
    ASSERT_NEAR(expected, static_cast<double>(truth[i]),
                2e-6 * (std::abs(expected) + std::abs(up)))
        << gate;
  }
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    for (TestStream* test : {&one, &three}) {
      EXPECT_TRUE(SameBits(
          truth, Gate(*test, rows, features, gate_up, GateKind::kGeluTanh)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, SiluMulTest,
                         ::testing::Values(Case{0, 3}, Case{1, 1}, Case{1, 256},
                                           Case{5, 77}, Case{16, 1000}));

TEST(SiluMulEndsTest, LargeGatesGiveTheLimitsOfSiluOnEveryBackEnd) {
  const float gates[] = {88.0f, 88.5f, 1e20f, 1e38f,
                         std::numeric_limits<float>::infinity()};
  constexpr int64_t kFeatures = 37;
  std::vector<float> gate_up;
  for (const float gate : gates) {
    for (const float side : {gate, -gate}) {
      gate_up.insert(gate_up.end(), kFeatures, side);
      gate_up.insert(gate_up.end(), kFeatures, 1.0f);
    }
  }
  TestStream reference(1, CpuBackend::kReference);
  const auto truth = Gate(reference, 10, kFeatures, gate_up);
  for (size_t i = 0; i < truth.size(); ++i) {
    const size_t row = i / kFeatures;
    const float limit = row % 2 == 0 ? gates[row / 2] : 0.0f;
    EXPECT_TRUE(truth[i] == limit || std::abs(truth[i] - limit) < 1e-30f)
        << gates[row / 2] << " gives " << truth[i];
  }
  TestStream one(1);
  ForEachSimdTarget(
      [&] { EXPECT_TRUE(SameBits(truth, Gate(one, 10, kFeatures, gate_up))); });
}

}  // namespace
}  // namespace kvasir::kernels
