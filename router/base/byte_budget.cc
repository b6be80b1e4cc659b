#include "router/base/byte_budget.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/refusal.h"

namespace kvasir::router {

absl::StatusOr<std::shared_ptr<ByteShare>> ByteBudget::Take(
    size_t bytes, std::shared_ptr<ByteShare> outer) {
  const size_t limit = limit_bytes_;
  const size_t before = used_bytes_.fetch_add(bytes);
  if (bytes <= limit && before <= limit - bytes) {
    return std::make_shared<ByteShare>(shared_from_this(), bytes,
                                       std::move(outer));
  }
  used_bytes_ -= bytes;
  if (bytes > limit) {
    return proto::RefusedError(
        kvasir::v1::Refusal::NEVER_FITS,
        absl::StrCat("this request needs ", bytes, " bytes, and ", words_.whose,
                     " may hold at most ", limit, " together (", words_.setting,
                     ")"));
  }
  return proto::RefusedError(
      kvasir::v1::Refusal::RETRY_ELSEWHERE,
      absl::StrCat(words_.whose, " hold ", before, " of at most ", limit,
                   " bytes (", words_.setting, "), and this request needs ",
                   bytes, " more"));
}

}  // namespace kvasir::router
