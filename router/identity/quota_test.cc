#include "router/identity/quota.h"

#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

kvasir::v1::Quota Limits(double per_second, uint32_t burst,
                         uint32_t concurrent) {
  kvasir::v1::Quota limits;
  limits.set_requests_per_second(per_second);
  limits.set_burst(burst);
  limits.set_concurrent_requests(concurrent);
  return limits;
}

TEST(RequestRateTest, AcceptsABurstAndThenExactlyOneRequestPerInterval) {
  RequestRate rate;
  rate.SetLimit(4, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(rate.Take(kStart), absl::ZeroDuration()) << i;
  }
  EXPECT_EQ(rate.Take(kStart), absl::Milliseconds(250));
  const absl::Time before = kStart + absl::Milliseconds(250);
  EXPECT_EQ(rate.Take(before - absl::Nanoseconds(1)), absl::Nanoseconds(1));
  EXPECT_EQ(rate.Take(before), absl::ZeroDuration());
  EXPECT_EQ(rate.Take(before), absl::Milliseconds(250));
}

TEST(RequestRateTest, APauseRefillsTheTokenBucketOnlyUpToTheBurst) {
  RequestRate rate;
  rate.SetLimit(10, 2);
  const absl::Time later = kStart + absl::Hours(5);
  EXPECT_EQ(rate.Take(kStart), absl::ZeroDuration());
  EXPECT_EQ(rate.Take(later), absl::ZeroDuration());
  EXPECT_EQ(rate.Take(later), absl::ZeroDuration());
  EXPECT_EQ(rate.Take(later), absl::Milliseconds(100));
}

TEST(RequestRateTest, ARequestAfterTheReportedWaitingTimeIsAccepted) {
  RequestRate rate;
  rate.SetLimit(3, 1);  // 1/3 s has no exact binary value
  absl::Time now = kStart;
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_EQ(rate.Take(now), absl::ZeroDuration()) << i;
    const absl::Duration wait = rate.Take(now);
    ASSERT_GT(wait, absl::ZeroDuration()) << i;
    now += wait;
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(now - kStart), 10'000 / 3.0, 1e-3);
}

TEST(RequestRateTest, ARateMayBeBelowOneRequestPerSecondOrUnlimited) {
  RequestRate rate;
  rate.SetLimit(0.1, 1);
  EXPECT_EQ(rate.Take(kStart), absl::ZeroDuration());
  EXPECT_EQ(rate.Take(kStart), absl::Seconds(10));
  rate.SetLimit(0, 1);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(rate.Take(kStart), absl::ZeroDuration());
  }
}

TEST(TenantQuotaTest, ARefusalNamesTheTenantTheLimitAndWhenToTryAgain) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(2, 1, 0));
  QuotaLimit met;
  KVASIR_EXPECT_OK(quota->Enter(kStart, &met).status());
  EXPECT_EQ(met, QuotaLimit::kNone);
  EXPECT_THAT(quota->Enter(kStart + absl::Microseconds(1), &met).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       "tenant 'red' sends more requests than its quota allows "
                       "(requests_per_second 2, burst 1): try again in 500ms"));
  EXPECT_EQ(met, QuotaLimit::kRate);
  KVASIR_EXPECT_OK(
      quota->Enter(kStart + absl::Milliseconds(500), &met).status());
}

TEST(TenantQuotaTest, TheDefaultBurstIsTheNumberOfRequestsAllowedPerSecond) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(2.5, 0, 0));
  QuotaLimit met;
  for (int i = 0; i < 3; ++i) {
    KVASIR_EXPECT_OK(quota->Enter(kStart, &met).status());
  }
  EXPECT_THAT(
      quota->Enter(kStart, &met).status(),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("burst 3)")));
}

TEST(TenantQuotaTest, RepeatedCallsOfLeaveRemoveARequestFromTheQuotaOnlyOnce) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(0, 0, 2));
  QuotaLimit met;
  auto first = *quota->Enter(kStart, &met);
  const auto again = first;
  const auto second = *quota->Enter(kStart, &met);
  EXPECT_THAT(quota->Enter(kStart, &met).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       "tenant 'red' runs 2 requests (each sample counts as "
                       "one), and its quota's concurrent_requests is 2: try "
                       "again when one has ended"));
  EXPECT_EQ(met, QuotaLimit::kConcurrency);
  first->Leave();
  again->Leave();
  first.reset();
  EXPECT_EQ(quota->running(), 1);
  EXPECT_FALSE(quota->idle());
}

TEST(TenantQuotaTest, EachSampleCountsInTheQuotaUntilItsRequestLeaves) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(0, 0, 4));
  QuotaLimit met;
  const auto first = *quota->Enter(kStart, &met);
  const auto second = *quota->Enter(kStart, &met);
  EXPECT_THAT(first->CountSamples(5),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("n is 5, but the quota of tenant 'red'")));
  EXPECT_THAT(first->CountSamples(4),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("runs 2 requests")));
  KVASIR_EXPECT_OK(first->CountSamples(3));
  EXPECT_EQ(quota->running(), 4);
  first->Leave();
  EXPECT_EQ(quota->running(), 1);
  KVASIR_EXPECT_OK(first->CountSamples(9)) << "the request has left";
}

TEST(TenantQuotaTest,
     ARequestRefusedByTheConcurrencyLimitDoesNotCountInTheRate) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(1, 2, 1));
  QuotaLimit met;
  {
    const auto place = quota->Enter(kStart, &met);
    for (int i = 0; i < 10; ++i) {
      EXPECT_FALSE(quota->Enter(kStart, &met).ok());
      EXPECT_EQ(met, QuotaLimit::kConcurrency);
    }
  }
  EXPECT_TRUE(quota->idle());
  KVASIR_EXPECT_OK(quota->Enter(kStart, &met).status());
}

TEST(TenantQuotaTest, RunningRequestsCountInANewConcurrencyLimit) {
  const auto quota = std::make_shared<TenantQuota>("red", Limits(0, 0, 0));
  QuotaLimit met;
  const auto place = quota->Enter(kStart, &met);
  quota->SetLimits(Limits(0, 0, 1));
  EXPECT_FALSE(quota->Enter(kStart, &met).ok());
  quota->SetLimits(Limits(0, 0, 2));
  KVASIR_EXPECT_OK(quota->Enter(kStart, &met).status());
}

TEST(TenantQuotaTest, ARequestsBytesCountInTheBudgetsOfTenantAndRouter) {
  kvasir::v1::Quota limits;
  limits.set_bytes_in_flight(100);
  const auto quota = std::make_shared<TenantQuota>("red", limits);
  const auto all = std::make_shared<ByteBudget>(1000);
  auto share = quota->TakeBytes(60, *all->Take(60));
  KVASIR_EXPECT_OK(share.status());
  EXPECT_THAT(
      quota->TakeBytes(50, *all->Take(50)).status(),
      StatusIs(absl::StatusCode::kResourceExhausted,
               "requests of tenant 'red' hold 60 of at most 100 bytes (its "
               "quota's bytes_in_flight), and this request needs 50 more"));
  EXPECT_THAT(quota->TakeBytes(101, *all->Take(101)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("this request needs 101")))
      << "a later request of this size would not fit either";
  EXPECT_EQ(all->used_bytes(), 60) << "the refused request uses neither budget";
  (*share)->Grow(20);
  EXPECT_EQ(all->used_bytes(), 80);
  EXPECT_FALSE(quota->TakeBytes(21, nullptr).ok());
  (*share)->Shrink(50);
  EXPECT_EQ(all->used_bytes(), 30);
  KVASIR_EXPECT_OK(quota->TakeBytes(70, nullptr).status());
  EXPECT_FALSE(quota->idle());
  share = absl::UnknownError("gone");
  EXPECT_EQ(all->used_bytes(), 0);
  EXPECT_TRUE(quota->idle());
}

}  // namespace
}  // namespace kvasir::router
