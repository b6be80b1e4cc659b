// Converts between absl::Status and grpc::Status. Both number their codes
// alike, which the assertions below check.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <string>

#include "absl/status/status.h"

namespace kvasir::base {

#define KVASIR_SAME_CODE(absl_code, grpc_code)                   \
  static_assert(static_cast<int>(absl::StatusCode::absl_code) == \
                static_cast<int>(grpc::StatusCode::grpc_code))
KVASIR_SAME_CODE(kOk, OK);
KVASIR_SAME_CODE(kCancelled, CANCELLED);
KVASIR_SAME_CODE(kUnknown, UNKNOWN);
KVASIR_SAME_CODE(kInvalidArgument, INVALID_ARGUMENT);
KVASIR_SAME_CODE(kDeadlineExceeded, DEADLINE_EXCEEDED);
KVASIR_SAME_CODE(kNotFound, NOT_FOUND);
KVASIR_SAME_CODE(kAlreadyExists, ALREADY_EXISTS);
KVASIR_SAME_CODE(kPermissionDenied, PERMISSION_DENIED);
KVASIR_SAME_CODE(kResourceExhausted, RESOURCE_EXHAUSTED);
KVASIR_SAME_CODE(kFailedPrecondition, FAILED_PRECONDITION);
KVASIR_SAME_CODE(kAborted, ABORTED);
KVASIR_SAME_CODE(kOutOfRange, OUT_OF_RANGE);
KVASIR_SAME_CODE(kUnimplemented, UNIMPLEMENTED);
KVASIR_SAME_CODE(kInternal, INTERNAL);
KVASIR_SAME_CODE(kUnavailable, UNAVAILABLE);
KVASIR_SAME_CODE(kDataLoss, DATA_LOSS);
KVASIR_SAME_CODE(kUnauthenticated, UNAUTHENTICATED);
#undef KVASIR_SAME_CODE

// Status messages are cut to this length, because they are sent in trailing
// metadata, and peers limit its size.
inline constexpr size_t kMaxStatusMessageBytes = 1024;

inline grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(
      static_cast<grpc::StatusCode>(status.code()),
      std::string(status.message().substr(0, kMaxStatusMessageBytes)));
}

// A peer may send any number as a code. Numbers that are not codes
// become UNKNOWN.
inline absl::Status FromGrpcStatus(const grpc::Status& status) {
  const int code = static_cast<int>(status.error_code());
  const bool known = code >= 0 && code <= grpc::StatusCode::UNAUTHENTICATED;
  return absl::Status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      status.error_message());
}

// Returns the status of a client's call that has ended. If a deadline
// passes while the server is closing the connection, gRPC 1.51 reports
// UNAVAILABLE ("Stream removed (GOAWAY received)"); this function then
// returns DEADLINE_EXCEEDED.
inline absl::Status StatusOfCall(const grpc::Status& status,
                                 const grpc::ClientContext& context) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE &&
      context.deadline() <= std::chrono::system_clock::now()) {
    return absl::DeadlineExceededError("the deadline passed");
  }
  return FromGrpcStatus(status);
}

}  // namespace kvasir::base
