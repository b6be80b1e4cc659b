#include "compress/methods/keep_search.h"

#include <cmath>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// Returns a search in which the bytes of plans grow in steps of 8 from 64 on,
// as they do if ranks are multiples of a number.
KeepSearch Steps(double want, int* plans = nullptr) {
  KeepSearch search;
  search.want_bytes = want;
  search.plan = [plans](double keep) -> absl::StatusOr<kvasir::v1::KvPlan> {
    if (plans != nullptr) ++*plans;
    if (keep < 0.05) return absl::InvalidArgumentError("below the least ranks");
    kvasir::v1::KvPlan plan;
    plan.mutable_target()->set_kv_bytes_per_token(64 +
                                                  8 * std::floor(keep * 100));
    return plan;
  };
  search.bytes = [](const kvasir::v1::KvPlan& plan) -> absl::StatusOr<double> {
    return plan.target().kv_bytes_per_token();
  };
  return search;
}

TEST(KeepSearchTest, TheLargestPlanWithinTheByteLimitIsFound) {
  for (const double want : {120.0, 127.0, 300.0, 501.5, 863.0}) {
    int plans = 0;
    KVASIR_ASSERT_OK_AND_ASSIGN(const FoundPlan found,
                                PlanForBytes(Steps(want, &plans)));
    EXPECT_LE(found.bytes, want);
    EXPECT_GT(found.bytes, want - 8.0);
    EXPECT_EQ(found.plan.target().kv_bytes_per_token(), found.bytes);
    EXPECT_LT(plans, 24);
  }
}

TEST(KeepSearchTest, WithAByteLimitAboveTheSizeOfTheWholePlanEverythingIsKept) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const FoundPlan found,
                              PlanForBytes(Steps(5000.0)));
  EXPECT_EQ(found.keep, 1.0);
  EXPECT_EQ(found.bytes, 864.0);
}

TEST(KeepSearchTest,
     AByteLimitBelowTheSmallestPlanIsRefusedWithTheBytesOfThatPlan) {
  EXPECT_THAT(
      PlanForBytes(Steps(100.0)),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("no plan of at most 100 KV bytes per token was found: "
                    "the smallest plan takes 104 (below the least ranks)")));
}

TEST(KeepSearchTest, ErrorsOfThePlannerAreReturned) {
  KeepSearch search = Steps(300.0);
  search.plan = [](double) -> absl::StatusOr<kvasir::v1::KvPlan> {
    return absl::FailedPreconditionError("no calibration");
  };
  EXPECT_THAT(PlanForBytes(search),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("no calibration")));
}

}  // namespace
}  // namespace kvasir::compress
