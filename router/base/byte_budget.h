// What requests may take of the router's memory, all of them together and those
// of a tenant: their messages and texts, also those that wait for a tokenizer,
// prompts, and the tokens that have come.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::router {

class ByteShare;

// Held by shared_ptr: shares may outlive everything else.
// Threads: any thread.
class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // Of a refusal's words: whose requests, and what sets the limit.
  struct Words {
    std::string whose = "requests";
    std::string setting = "--request-bytes";
  };

  explicit ByteBudget(size_t limit_bytes) : ByteBudget(limit_bytes, Words()) {}
  ByteBudget(size_t limit_bytes, Words words)
      : words_(std::move(words)), limit_bytes_(limit_bytes) {}

  // For a request that has come. Refused where that is over the limit:
  // RETRY_ELSEWHERE, or NEVER_FITS for one that is alone; with the numbers and
  // the setting. `outer`, where there is one, is a share of as many bytes of a
  // budget that holds, too: it grows, shrinks and goes with this one.
  absl::StatusOr<std::shared_ptr<ByteShare>> Take(
      size_t bytes, std::shared_ptr<ByteShare> outer = nullptr);

  // What is held stays.
  void SetLimit(size_t limit_bytes) { limit_bytes_ = limit_bytes; }

  size_t used_bytes() const { return used_bytes_; }
  size_t limit_bytes() const { return limit_bytes_; }

 private:
  friend class ByteShare;
  const Words words_;
  std::atomic<size_t> limit_bytes_;
  std::atomic<size_t> used_bytes_{0};
};

// A request's own part, which goes with the last who holds it.
// Threads: any thread.
class ByteShare {
 public:
  ByteShare(std::shared_ptr<ByteBudget> budget, size_t bytes,
            std::shared_ptr<ByteShare> outer)
      : budget_(std::move(budget)), outer_(std::move(outer)), bytes_(bytes) {}
  ~ByteShare() { budget_->used_bytes_ -= bytes_; }
  ByteShare(const ByteShare&) = delete;
  ByteShare& operator=(const ByteShare&) = delete;

  // What becomes of a request that runs is not refused, only counted: others
  // are not taken meanwhile.
  void Grow(size_t bytes) {
    bytes_ += bytes;
    budget_->used_bytes_ += bytes;
    if (outer_ != nullptr) outer_->Grow(bytes);
  }
  // At most as many as it has.
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
