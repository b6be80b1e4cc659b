// What all steps of a tokenizer file may make of one text: a file may chain
// many of them, and each may double what the last one made.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::model {

// Counts bytes of texts and pieces, over all steps and segments of one text.
// Threads: one at a time.
class TextBudget {
 public:
  explicit TextBudget(size_t text_bytes)
      : text_bytes_(text_bytes), limit_(kBytes + kBytesPerByte * text_bytes) {}

  // InvalidArgument with the numbers where it is more than is left.
  absl::Status Spend(size_t bytes) {
    if (bytes <= left()) {
      used_ += bytes;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("the tokenizer's steps make ", used_ + bytes,
                     " bytes of a text of ", text_bytes_, ", limit ", limit_));
  }
  // Of what was spent: its memory is free again.
  void Return(size_t bytes) { used_ -= bytes; }

  size_t left() const { return limit_ - used_; }

 private:
  // Of sound files, the hungriest cut a text into single bytes a few times; a
  // piece takes 24.
  static constexpr size_t kBytes = size_t{16} << 20;
  static constexpr size_t kBytesPerByte = 128;

  const size_t text_bytes_;
  const size_t limit_;
  size_t used_ = 0;
};

}  // namespace kvasir::model
