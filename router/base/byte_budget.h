// Budgets of the router's memory that requests use, in total and by tenant:
// their messages and texts (also while they wait for a tokenizer), prompts, and
// received tokens.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::router {

class ByteShare;

// Held by shared_ptr, because shares may outlive everything else.
// Threads: any thread.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // Words of a refusal: the requests that are limited, and the setting.
  struct Words {
    std::string whose = "requests";
    std::string setting = "--request-bytes";
  };

  explicit ByteBudget(size_t limit_bytes) : ByteBudget(limit_bytes, Words()) {}
  ByteBudget(size_t limit_bytes, Words words)
      : words_(std::move(words)), limit_bytes_(limit_bytes) {}

  // Takes bytes for a request that has arrived. If that exceeds the limit,
  // refuses with the numbers and the setting: NEVER_FITS if the request by
  // itself exceeds it, else RETRY_ELSEWHERE. `outer` may be null; otherwise it
  // is a share of as many bytes in another budget, and grows, shrinks and ends
  // with this one.
  absl::StatusOr<std::shared_ptr<ByteShare>> Take(
      size_t bytes, std::shared_ptr<ByteShare> outer = nullptr);

  // Shares that exist are kept.
  void SetLimit(size_t limit_bytes) { limit_bytes_ = limit_bytes; }

  size_t used_bytes() const { return used_bytes_; }
  size_t limit_bytes() const { return limit_bytes_; }

 private:
  friend class ByteShare;
  const Words words_;
  std::atomic<size_t> limit_bytes_;
  std::atomic<size_t> used_bytes_{0};
};

// A request's share of a budget, released with the last reference.
// Threads: any thread.
class ByteShare {
 public:
  ByteShare(std::shared_ptr<ByteBudget> budget, size_t bytes,
            std::shared_ptr<ByteShare> outer)
      : budget_(std::move(budget)), outer_(std::move(outer)), bytes_(bytes) {}
  ~ByteShare() { budget_->used_bytes_ -= bytes_; }
  ByteShare(const ByteShare&) = delete;
  ByteShare& operator=(const ByteShare&) = delete;

  // Growth of a running request is only counted, not refused. New requests are
  // refused meanwhile.
  void Grow(size_t bytes) {
    bytes_ += bytes;
    budget_->used_bytes_ += bytes;
    if (outer_ != nullptr) outer_->Grow(bytes);
  }
  // `bytes` must not exceed the share.
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
