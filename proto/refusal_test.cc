#include "proto/refusal.h"

#include <gtest/gtest.h>

namespace kvasir::proto {
namespace {

using kvasir::v1::Refusal;

TEST(RefusalTest, TheReasonOfARefusalDeterminesItsStatusCode) {
  EXPECT_EQ(RefusedError(Refusal::RETRY_ELSEWHERE, "x").code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RefusedError(Refusal::NEVER_FITS, "x").code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RefusedError(Refusal::DRAINING, "x").code(),
            absl::StatusCode::kUnavailable);
}

TEST(RefusalTest, AStatusKeepsTheReasonAndDetailOfARefusal) {
  const auto refusal =
      RefusalOf(RefusedError(Refusal::NEVER_FITS, "want 900 pages, have 64"));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->reason(), Refusal::NEVER_FITS);
  EXPECT_EQ(refusal->detail(), "want 900 pages, have 64");
}

TEST(RefusalTest, OkAndOrdinaryErrorsContainNoRefusal) {
  EXPECT_FALSE(RefusalOf(absl::InternalError("lost rank")).has_value());
  EXPECT_FALSE(RefusalOf(absl::OkStatus()).has_value());
}

}  // namespace
}  // namespace kvasir::proto
