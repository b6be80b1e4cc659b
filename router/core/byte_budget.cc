#include "router/core/byte_budget.h"

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"

namespace kvasir::router {

absl::StatusOr<std::shared_ptr<ByteShare>> ByteBudget::Take(size_t bytes) {
  const size_t before = used_bytes_.fetch_add(bytes);
  if (bytes <= limit_bytes_ && before <= limit_bytes_ - bytes) {
    return std::make_shared<ByteShare>(shared_from_this(), bytes);
  }
  used_bytes_ -= bytes;
  const auto reason = bytes > limit_bytes_
                          ? kvasir::v1::Refusal::NEVER_FITS
                          : kvasir::v1::Refusal::RETRY_ELSEWHERE;
  return proto::RefusedError(
      reason, absl::StrCat("requests hold ", before, " bytes of ", limit_bytes_,
                           " (--request-bytes), this one wants ", bytes));
}

}  // namespace kvasir::router
