// Produces the text of one sample: detokenizes its tokens as they arrive, and
// searches the text for stop strings.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "router/facades/text/text_codec.h"

namespace kvasir::router {

struct TextStreamOptions {
  std::vector<std::string> stop_strings;
  // If true, the matched stop string is part of the text. If false, the text
  // ends before it.
  bool include_stop_string = false;
  // The stream does not search for stop strings in the text of the first
  // min_tokens tokens.
  uint32_t min_tokens = 0;
};

// The text of one sample. Text is returned as soon as it cannot be the
// beginning of a stop string. The stop string that is complete first ends the
// text. If two end at the same byte, the longer one counts. So the result does
// not depend on how the tokens are divided into calls of Push.
//
// Threads: only one thread at a time may use it.
class TextStream {
 public:
  TextStream(std::unique_ptr<Detokenizer> detokenizer,
             TextStreamOptions options);

  struct Piece {
    // The new text that cannot be part of a stop string.
    std::string text;
    // How many of the pushed ids belong to the sample. Ids after the one that
    // completed a stop string do not.
    size_t num_used = 0;
  };
  // Adds tokens. Returns an empty piece if a stop string has already ended
  // the text.
  Piece Push(std::span<const int32_t> ids);
  // Call this if the sample has ended without a stop string. Returns the text
  // that was held back. The detokenizer may return its last text here, so a
  // stop string can still match.
  std::string Finish();

  bool stopped() const { return stopped_; }
  // Returns the stop string that ended the text; empty if none has.
  const std::string& matched_stop() const { return matched_stop_; }

 private:
  // Adds decoded text. Returns the text that cannot be part of a stop string.
  std::string Absorb(const std::string& text);
  // Returns the length of the longest suffix of held_ that is the beginning of
  // a stop string.
  size_t HoldBackBytes() const;

  const std::unique_ptr<Detokenizer> detokenizer_;
  const TextStreamOptions options_;
  size_t longest_stop_bytes_ = 0;
  // Text that is held back because it may be the beginning of a stop string.
  std::string held_;
  uint64_t num_tokens_ = 0;
  bool stopped_ = false;
  std::string matched_stop_;
};

}  // namespace kvasir::router
