#include <gmock/gmock.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/experts/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Case {
  int64_t tokens;
  int64_t top_k;
  int64_t columns;
};

std::vector<float> Mix(TestStream& test, const Case& c,
                       const std::vector<float>& y,
                       const std::vector<float>& weights,
                       const std::vector<int32_t>& places) {
  std::vector<float> out(static_cast<size_t>(c.tokens * c.columns), kPoison);
  MixExpertsArgs params;
  params.y = y.data();
  params.weights = weights.data();
  params.places = places.data();
  params.out = out.data();
  params.num_tokens = c.tokens;
  params.top_k = c.top_k;
  params.columns = c.columns;
  KVASIR_EXPECT_OK(
      MixExperts(test.stream(), OnDevice(params), test.workspace()));
  return out;
}

class MixExpertsTest : public ::testing::TestWithParam<Case> {};

TEST_P(MixExpertsTest, OutputsOfExpertsAreWeightedAndAddedInAscendingOrder) {
  const Case& c = GetParam();
  const int64_t rows = c.tokens * c.top_k;
  const auto y = RandomFloats(rows * c.columns, 1);
  const auto weights = RandomFloats(rows, 2);
  std::vector<int32_t> places(static_cast<size_t>(rows));
  std::iota(places.rbegin(), places.rend(), 0);
  TestStream reference(1, CpuBackend::kReference);
  const auto have = Mix(reference, c, y, weights, places);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t i = 0; i < c.columns; ++i) {
      double want = 0;
      double size = 0;
      for (int64_t j = 0; j < c.top_k; ++j) {
        const auto at = static_cast<size_t>(t * c.top_k + j);
        const double term =
            static_cast<double>(weights[at]) *
            static_cast<double>(
                y[static_cast<size_t>(places[at] * c.columns + i)]);
        want += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(
          static_cast<double>(have[static_cast<size_t>(t * c.columns + i)]),
          want, 1e-6 * size);
    }
  }
  TestStream three(3);
  EXPECT_TRUE(SameBits(have, Mix(three, c, y, weights, places)));
}

INSTANTIATE_TEST_SUITE_P(Shapes, MixExpertsTest,
                         ::testing::Values(Case{0, 2, 5}, Case{1, 1, 1},
                                           Case{1, 8, 33}, Case{7, 3, 65},
                                           Case{40, 2, 500}));

TEST(MixExpertsRefusalTest, TheErrorNamesTheInvalidArgument) {
  TestStream test;
  const auto refused = [&](int64_t tokens, int64_t top_k, int64_t columns,
                           const char* text) {
    MixExpertsArgs params;
    params.num_tokens = tokens;
    params.top_k = top_k;
    params.columns = columns;
    EXPECT_THAT(
        MixExperts(test.stream(), OnDevice(params), test.workspace()),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refused(-1, 1, 1, "mix_experts: tokens: must be at least 0, but is -1");
  refused(1, 0, 1, "top_k: must be at least 1, but is 0");
  refused(1, 1, -1, "columns: must be at least 0, but is -1");
}

}  // namespace
}  // namespace kvasir::kernels
