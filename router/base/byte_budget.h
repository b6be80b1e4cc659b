// Limits how much of the router's memory requests may use, in total and for
// each tenant. The count includes the messages and texts of requests, their
// prompts, and the tokens that they have received. Counting begins before a
// request waits for a tokenizer.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::router {

class ByteShare;

// A limit in bytes, and the number of bytes in use. Held by shared_ptr: each
// ByteShare holds a reference, so its budget exists as long as the share.
// Threads: its methods may be called from any thread.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // Words for the error text of a refusal: whose requests are limited, and
  // which setting limits them.
  struct Words {
    std::string whose = "requests";
    std::string setting = "--request-bytes";
  };

  explicit ByteBudget(size_t limit_bytes) : ByteBudget(limit_bytes, Words()) {}
  ByteBudget(size_t limit_bytes, Words words)
      : words_(std::move(words)), limit_bytes_(limit_bytes) {}

  // Takes bytes for a request that has arrived. If the limit does not allow
  // this, the request is refused: with NEVER_FITS if it exceeds the limit by
  // itself, otherwise with RETRY_ELSEWHERE. The error text contains the numbers
  // and the setting. `outer`, if not null, is a share of equal size in another
  // budget. It grows, shrinks and is released together with the new share.
  absl::StatusOr<std::shared_ptr<ByteShare>> Take(
      size_t bytes, std::shared_ptr<ByteShare> outer = nullptr);

  // Shares that have been taken keep their size, even if they exceed the new
  // limit.
  void SetLimit(size_t limit_bytes) { limit_bytes_ = limit_bytes; }

  size_t used_bytes() const { return used_bytes_; }
  size_t limit_bytes() const { return limit_bytes_; }

 private:
  friend class ByteShare;
  const Words words_;
  std::atomic<size_t> limit_bytes_;
  std::atomic<size_t> used_bytes_{0};
};

// The bytes of a budget that one request uses. They are released when the last
// reference to this object is gone.
// Threads: its methods may be called from any thread.
class ByteShare {
 public:
  ByteShare(std::shared_ptr<ByteBudget> budget, size_t bytes,
            std::shared_ptr<ByteShare> outer)
      : budget_(std::move(budget)), outer_(std::move(outer)), bytes_(bytes) {}
  ~ByteShare() { budget_->used_bytes_ -= bytes_; }
  ByteShare(const ByteShare&) = delete;
  ByteShare& operator=(const ByteShare&) = delete;

  // Counts more bytes for a running request. This always succeeds, even over
  // the limit; new requests are then refused.
  void Grow(size_t bytes) {
    bytes_ += bytes;
    budget_->used_bytes_ += bytes;
    if (outer_ != nullptr) outer_->Grow(bytes);
  }
  // `bytes` must not exceed the size of the share.
  void Shrink(size_t bytes) {
    bytes_ -= bytes;
    budget_->used_bytes_ -= bytes;
    if (outer_ != nullptr) outer_->Shrink(bytes);
  }

 private:
  const std::shared_ptr<ByteBudget> budget_;
  const std::shared_ptr<ByteShare> outer_;
  std::atomic<size_t> bytes_;
};

}  // namespace kvasir::router
