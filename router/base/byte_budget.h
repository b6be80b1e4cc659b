// Limits how much of the router's memory requests may use, in total and for
// each tenant. The messages, texts and prompts of requests count, and the
// tokens that they have received. Counting begins when a request arrives,
// before it waits for a tokenizer.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::router {

class ByteShare;

// A limit in bytes, and the number of bytes in use. It is held by shared_ptr,
// because each ByteShare keeps its budget alive.
// Threads: its methods may be called from any thread.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // Words for the error text of a refusal.
  struct Words {
    std::string whose = "requests";           // whose requests are limited
    std::string setting = "--request-bytes";  // what limits them
  };

  explicit ByteBudget(size_t limit_bytes) : ByteBudget(limit_bytes, Words()) {}
  ByteBudget(size_t limit_bytes, Words words)
      : words_(std::move(words)), limit_bytes_(limit_bytes) {}

  // Takes bytes for a request that has arrived. If too few bytes are free,
  // returns a refusal, whose text has the numbers and the setting. Its reason
  // is NEVER_FITS if the request exceeds the limit by itself, and
  // RETRY_ELSEWHERE otherwise. `outer`, if not null, is a share of equal size
  // in another budget. It grows, shrinks and is released together with the
  // new share.
  absl::StatusOr<std::shared_ptr<ByteShare>> Take(
      size_t bytes, std::shared_ptr<ByteShare> outer = nullptr);

  // Existing shares keep their size, even if together they exceed the
  // new limit.
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

  // Counts more bytes for a running request. This always succeeds. If the limit
  // is then exceeded, new requests are refused.
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
