#include "base/net/grpc_status.h"

#include "base/net/grpc_deadline.h"
#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

TEST(GrpcStatusTest, AStatusKeepsItsCodeAndTextThroughGrpc) {
  const absl::Status status = absl::ResourceExhaustedError("queue full: 64");
  EXPECT_THAT(FromGrpcStatus(ToGrpcStatus(status)),
              StatusIs(absl::StatusCode::kResourceExhausted, "queue full: 64"));
  KVASIR_EXPECT_OK(FromGrpcStatus(ToGrpcStatus(absl::OkStatus())));
}

TEST(GrpcStatusTest, AnInvalidStatusCodeBecomesUnknown) {
  const grpc::Status odd(static_cast<grpc::StatusCode>(20), "odd");
  EXPECT_THAT(FromGrpcStatus(odd), StatusIs(absl::StatusCode::kUnknown, "odd"));
}

TEST(GrpcStatusTest, ALongStatusMessageIsTruncated) {
  const grpc::Status status =
      ToGrpcStatus(absl::InternalError(std::string(100000, 'x')));
  EXPECT_EQ(status.error_message().size(), kMaxStatusMessageBytes);
}

// Regression test: in a long run, 4 of 197 calls whose deadline had passed
// reported UNAVAILABLE.
TEST(GrpcStatusTest,
     ACallWhoseDeadlinePassesDuringAGoAwayFailsWithDeadlineExceeded) {
  const grpc::Status removed(grpc::StatusCode::UNAVAILABLE,
                             "Stream removed (GOAWAY received)");
  grpc::ClientContext past;
  past.set_deadline(std::chrono::system_clock::now() - std::chrono::seconds(1));
  EXPECT_THAT(StatusOfCall(removed, past),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  EXPECT_THAT(StatusOfCall(grpc::Status(grpc::StatusCode::INTERNAL, "x"), past),
              StatusIs(absl::StatusCode::kInternal, "x"));
  KVASIR_EXPECT_OK(StatusOfCall(grpc::Status::OK, past));
  grpc::ClientContext later;
  later.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  EXPECT_THAT(StatusOfCall(removed, later),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  grpc::ClientContext none;
  EXPECT_THAT(StatusOfCall(removed, none),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
}

TEST(GrpcDeadlineTest, ConvertingADeadlineKeepsItsRemainingTime) {
  EXPECT_EQ(FromGrpcDeadline(std::chrono::system_clock::time_point::max()),
            absl::InfiniteFuture());
  // The process's clock and the wall clock may differ, so compare the time that
  // is left until the deadline.
  const auto wall = absl::ToChronoTime(absl::Now() + absl::Seconds(50));
  const absl::Time ours = FromGrpcDeadline(wall);
  const absl::Duration left = ours - Clock::Real().Now();
  EXPECT_LE(left, absl::Seconds(50));
  EXPECT_GT(left, absl::Seconds(20));
  const absl::Duration back =
      absl::FromChrono(ToGrpcDeadline(ours)) - absl::FromChrono(wall);
  EXPECT_LT(absl::AbsDuration(back), absl::Seconds(20));
}

}  // namespace
}  // namespace kvasir::base
