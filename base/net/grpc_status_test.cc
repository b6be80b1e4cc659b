#include "base/net/grpc_status.h"

#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

TEST(GrpcStatusTest, CodeAndTextSurviveBothWays) {
  const absl::Status status = absl::ResourceExhaustedError("queue full: 64");
  EXPECT_THAT(FromGrpcStatus(ToGrpcStatus(status)),
              StatusIs(absl::StatusCode::kResourceExhausted, "queue full: 64"));
  KVASIR_EXPECT_OK(FromGrpcStatus(ToGrpcStatus(absl::OkStatus())));
}

TEST(GrpcStatusTest, ACodeThatIsNoneBecomesUnknown) {
  const grpc::Status odd(static_cast<grpc::StatusCode>(20), "odd");
  EXPECT_THAT(FromGrpcStatus(odd), StatusIs(absl::StatusCode::kUnknown, "odd"));
}

TEST(GrpcStatusTest, ALongTextIsCut) {
  const grpc::Status status =
      ToGrpcStatus(absl::InternalError(std::string(100000, 'x')));
  EXPECT_EQ(status.error_message().size(), kMaxStatusMessageBytes);
}

}  // namespace
}  // namespace kvasir::base
