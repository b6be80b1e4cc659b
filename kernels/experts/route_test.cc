#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/experts/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Routed {
  std::vector<int32_t> experts, places, tokens, first_rows;
  std::vector<float> weights;
  std::vector<int64_t> load;
};

Routed RunRoute(TestStream& test, const std::vector<float>& logits,
                int64_t tokens, int64_t experts, int64_t top_k,
                bool normalize) {
  const auto rows = static_cast<size_t>(tokens * top_k);
  Routed out;
  out.experts.assign(rows, -7);
  out.places.assign(rows, -7);
  out.tokens.assign(rows, -7);
  out.first_rows.assign(static_cast<size_t>(experts + 1), -7);
  out.weights.assign(rows, kPoison);
  out.load.assign(static_cast<size_t>(experts), 100);
  RouteArgs params;
  params.logits = logits.data();
  params.num_tokens = tokens;
  params.num_experts = experts;
  params.top_k = top_k;
  params.normalize = normalize;
  params.experts = out.experts.data();
  params.weights = out.weights.data();
  params.places = out.places.data();
  params.tokens = out.tokens.data();
  params.first_rows = out.first_rows.data();
  params.load = out.load.data();
  KVASIR_EXPECT_OK(Route(test.stream(), OnDevice(params), test.workspace()));
  return out;
}

struct Case {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;
  bool normalize;
};

class RouteTest : public ::testing::TestWithParam<Case> {};

TEST_P(RouteTest, ChosenExpertsTheirWeightsAndTheSortedRowsMatchTheDefinition) {
  const Case& c = GetParam();
  const auto logits = RandomFloats(c.tokens * c.experts, 7, 5.0f);
  TestStream reference(1, CpuBackend::kReference);
  const Routed have =
      RunRoute(reference, logits, c.tokens, c.experts, c.top_k, c.normalize);
  std::vector<int64_t> load(static_cast<size_t>(c.experts), 0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float* const of_token = logits.data() + t * c.experts;
    std::vector<int32_t> order(static_cast<size_t>(c.experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return of_token[a] > of_token[b];
    });
    std::vector<int32_t> best(order.begin(), order.begin() + c.top_k);
    std::sort(best.begin(), best.end());
    double sum = 0;
    const std::vector<int32_t>& summed = c.normalize ? best : order;
    for (const int32_t e : summed) {
      sum += std::exp(static_cast<double>(of_token[e]));
    }
    for (int64_t j = 0; j < c.top_k; ++j) {
      const auto at = static_cast<size_t>(t * c.top_k + j);
      const int32_t expert = best[static_cast<size_t>(j)];
      ASSERT_EQ(have.experts[at], expert) << t << " " << j;
      const double want = std::exp(static_cast<double>(of_token[expert])) / sum;
      ASSERT_NEAR(static_cast<double>(have.weights[at]), want, 2e-6 * want);
      ++load[static_cast<size_t>(expert)];
      const int32_t row = have.places[at];
      ASSERT_GE(row, have.first_rows[static_cast<size_t>(expert)]);
      ASSERT_LT(row, have.first_rows[static_cast<size_t>(expert) + 1]);
      ASSERT_EQ(have.tokens[static_cast<size_t>(row)], t);
    }
  }
  ASSERT_EQ(have.first_rows.front(), 0);
  ASSERT_EQ(have.first_rows.back(), c.tokens * c.top_k);
  for (size_t e = 0; e < load.size(); ++e) {
    ASSERT_EQ(have.load[e], 100 + load[e]);
    ASSERT_EQ(have.first_rows[e + 1] - have.first_rows[e], load[e]);
    ASSERT_TRUE(std::is_sorted(have.tokens.begin() + have.first_rows[e],
                               have.tokens.begin() + have.first_rows[e + 1]));
  }
  TestStream three(3);
  const Routed again =
      RunRoute(three, logits, c.tokens, c.experts, c.top_k, c.normalize);
  EXPECT_TRUE(SameBits(have.weights, again.weights));
  EXPECT_EQ(have.experts, again.experts);
  EXPECT_EQ(have.places, again.places);
  EXPECT_EQ(have.tokens, again.tokens);
  EXPECT_EQ(have.first_rows, again.first_rows);
  EXPECT_EQ(have.load, again.load);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RouteTest,
    ::testing::Values(Case{0, 3, 2, true}, Case{1, 1, 1, false},
                      Case{1, 8, 2, true}, Case{13, 7, 1, true},
                      Case{13, 7, 1, false}, Case{9, 5, 5, false},
                      Case{9, 5, 5, true}, Case{60, 60, 4, false},
                      Case{300, 128, 8, true}));

TEST(RouteTest, TheLowerExpertIsChosenIfLogitsAreEqual) {
  TestStream test;
  const Routed tied =
      RunRoute(test, {1, 2, 1, 2, 2, 1, 1, 1, 1, 1}, 2, 5, 2, true);
  EXPECT_THAT(tied.experts, ElementsAre(1, 3, 0, 1));
  EXPECT_THAT(tied.weights, Each(0.5f));
  EXPECT_THAT(tied.load, ElementsAre(101, 102, 100, 101, 100));
}

TEST(RouteTest, LargeLogitsDoNotOverflow) {
  TestStream test;
  const Routed far = RunRoute(test, {3e38f, -3e38f, 0}, 1, 3, 2, false);
  EXPECT_THAT(far.experts, ElementsAre(0, 2));
  EXPECT_THAT(far.weights, ElementsAre(1.0f, 0.0f));
}

TEST(RouteTest, NanLogitsMakeOnlyTheWeightsOfTheirOwnTokenNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  TestStream test;
  const Routed out =
      RunRoute(test, {nan, nan, nan, 1, 2, 3, nan, 2, 1}, 3, 3, 2, true);
  EXPECT_THAT(out.experts, ElementsAre(0, 1, 1, 2, 1, 2));
  const Routed alone = RunRoute(test, {1, 2, 3}, 1, 3, 2, true);
  for (const size_t i : {0, 1, 4, 5}) EXPECT_TRUE(std::isnan(out.weights[i]));
  EXPECT_TRUE(SameBits(alone.weights, {out.weights[2], out.weights[3]}));
}

TEST(RouteRefusalTest, TheErrorNamesTheInvalidArgument) {
  TestStream test;
  const auto refused = [&](int64_t tokens, int64_t experts, int64_t top_k,
                           const char* text) {
    RouteArgs params;
    params.num_tokens = tokens;
    params.num_experts = experts;
    params.top_k = top_k;
    EXPECT_THAT(
        Route(test.stream(), OnDevice(params), test.workspace()),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refused(-1, 4, 2, "route: tokens: must be at least 0, but is -1");
  refused(1, 0, 2, "experts: must be at least 1, but is 0");
  refused(1, 4, 0, "top_k: must be at least 1, but is 0");
  refused(1, 4, 5, "top_k: must be at most the number of experts, 4, but is 5");
  refused(int64_t{1} << 30, 4, 2, "fewer than 2^31 rows");
}

}  // namespace
}  // namespace kvasir::kernels
