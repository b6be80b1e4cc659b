#include "router/core/admission.h"

#include "base/status_matchers.h"
#include "proto/refusal.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Answer = Admission::Answer;

TEST(AdmissionTest, RunsThenWaitsThenRefuses) {
  Admission admission({2, 1});
  EXPECT_EQ(admission.Enter(1, 0), Answer::kRun);
  EXPECT_EQ(admission.Enter(2, 0), Answer::kRun);
  EXPECT_EQ(admission.Enter(3, 0), Answer::kWait);
  EXPECT_EQ(admission.Enter(4, 0), Answer::kRefuse);
  EXPECT_EQ(admission.in_flight(), 2u);
  EXPECT_EQ(admission.waiting(), 1u);
}

TEST(AdmissionTest, WhoWaitsRunsWhenOneEnds) {
  Admission admission({1, 4});
  admission.Enter(1, 0);
  admission.Enter(2, 0);
  admission.Enter(3, 0);
  EXPECT_THAT(admission.Leave(), ElementsAre(2));
  EXPECT_THAT(admission.Leave(), ElementsAre(3));
  EXPECT_THAT(admission.Leave(), IsEmpty());
  EXPECT_EQ(admission.in_flight(), 0u);
}

TEST(AdmissionTest, LowerPriorityValuesGoFirst) {
  Admission admission({1, 4});
  admission.Enter(1, 0);
  admission.Enter(2, 5);
  admission.Enter(3, -5);
  admission.Enter(4, 5);
  EXPECT_THAT(admission.Leave(), ElementsAre(3));
  EXPECT_THAT(admission.Leave(), ElementsAre(2));
  EXPECT_THAT(admission.Leave(), ElementsAre(4));
}

TEST(AdmissionTest, OnlyWhoWaitsCanWithdraw) {
  Admission admission({1, 4});
  admission.Enter(1, 0);
  admission.Enter(2, 0);
  EXPECT_FALSE(admission.Withdraw(1));
  EXPECT_TRUE(admission.Withdraw(2));
  EXPECT_FALSE(admission.Withdraw(2));
  EXPECT_THAT(admission.Leave(), IsEmpty());
  EXPECT_EQ(admission.waiting(), 0u);
}

TEST(AdmissionTest, TheRefusalNamesNumbersAndFlags) {
  Admission admission({1, 0});
  admission.Enter(1, 0);
  EXPECT_EQ(admission.Enter(2, 0), Answer::kRefuse);
  const absl::Status status = admission.RefusedStatus();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               AllOf(HasSubstr("1 requests run of 1"),
                                     HasSubstr("--max-inflight"))));
  EXPECT_EQ(proto::RefusalOf(status)->reason(),
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

}  // namespace
}  // namespace kvasir::router
