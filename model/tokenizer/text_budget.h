// Limits the memory that all steps of a tokenizer file take for one input. A
// file may chain many steps, and each of them may double the text.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::model {

// Counts the bytes of all rewritten texts and pieces while one input
// is tokenized.
// Threads: used by one thread at a time.
class TextBudget {
 public:
  explicit TextBudget(size_t text_bytes)
      : text_bytes_(text_bytes), limit_(kBytes + kBytesPerByte * text_bytes) {}

  // Takes `bytes` from the budget. INVALID_ARGUMENT if less is left; the error
  // states the bytes needed and the limit.
  absl::Status Spend(size_t bytes) {
    if (bytes <= left()) {
      used_ += bytes;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("the steps of the tokenizer need ", used_ + bytes,
                     " bytes of memory for a text of ", text_bytes_,
                     " bytes, but the limit is ", limit_));
  }
  // Gives back bytes that were spent, after their memory was freed.
  void Return(size_t bytes) { used_ -= bytes; }

  size_t left() const { return limit_ - used_; }

 private:
  // The budget of an input: kBytes, plus kBytesPerByte for each of its bytes.
  // Valid files need far less: they cut a text into single bytes at most a few
  // times, and each piece takes 24 bytes.
  static constexpr size_t kBytes = size_t{16} << 20;
  static constexpr size_t kBytesPerByte = 128;

  const size_t text_bytes_;
  const size_t limit_;
  size_t used_ = 0;
};

}  // namespace kvasir::model
