#include "router/base/byte_budget.h"

#include "base/status_matchers.h"
#include "proto/refusal.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using kvasir::v1::Refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ByteBudgetTest, RefusesRequestsOverTheLimitUntilOtherRequestsEnd) {
  const auto budget = std::make_shared<ByteBudget>(100);
  KVASIR_ASSERT_OK_AND_ASSIGN(auto first, budget->Take(60));
  const absl::Status refused = budget->Take(41).status();
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                AllOf(HasSubstr("60 of at most 100 bytes"),
                                      HasSubstr("--request-bytes"),
                                      HasSubstr("needs 41"))));
  EXPECT_EQ(proto::RefusalOf(refused)->reason(), Refusal::RETRY_ELSEWHERE);
  EXPECT_EQ(budget->used_bytes(), 60u);
  first.reset();
  EXPECT_EQ(budget->used_bytes(), 0u);
  KVASIR_EXPECT_OK(budget->Take(100));
}

TEST(ByteBudgetTest, ARequestLargerThanTheLimitIsRefusedWithNeverFits) {
  const auto budget = std::make_shared<ByteBudget>(100);
  const absl::Status refused = budget->Take(101).status();
  EXPECT_EQ(proto::RefusalOf(refused)->reason(), Refusal::NEVER_FITS);
}

TEST(ByteBudgetTest, GrowthOfARunningRequestLeavesFewerBytesForNewRequests) {
  const auto budget = std::make_shared<ByteBudget>(100);
  KVASIR_ASSERT_OK_AND_ASSIGN(auto share, budget->Take(60));
  share->Grow(60);
  EXPECT_EQ(budget->used_bytes(), 120u);
  EXPECT_FALSE(budget->Take(1).ok());
  share->Shrink(100);
  EXPECT_EQ(budget->used_bytes(), 20u);
  KVASIR_EXPECT_OK(budget->Take(80));
  share.reset();
  EXPECT_EQ(budget->used_bytes(), 0u);
}

}  // namespace
}  // namespace kvasir::router
