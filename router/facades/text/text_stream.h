// The text of one sample: detokenizes its tokens as they arrive, and searches
// for stop strings.
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
  // The matched stop string stays in the text.
  bool include_stop_string = false;
  // The text of the first min_tokens tokens is not searched.
  uint32_t min_tokens = 0;
};

// Text is released as soon as no stop string can begin in it. The first stop
// string that is complete ends the text (of two that end together, the longer
// one), so the result does not depend on how tokens are split into pushes.
//
// Threads: one at a time.
class TextStream {
 public:
  TextStream(std::unique_ptr<Detokenizer> detokenizer,
             TextStreamOptions options);

  struct Piece {
    // Text that is certain now.
    std::string text;
    // How many of the pushed ids count: all, or those up to the one that
    // completed a stop string.
    size_t num_used = 0;
  };
  // Returns nothing once stopped.
  Piece Push(std::span<const int32_t> ids);
  // Returns the rest after the sample has ended by itself. A stop string may
  // still match in what the detokenizer held back.
  std::string Finish();

  bool stopped() const { return stopped_; }
  // The stop string that ended the text; empty until one has.
  const std::string& matched_stop() const { return matched_stop_; }

 private:
  // Adds decoded text and returns the text that may be released.
  std::string Absorb(const std::string& text);
  // The length of the longest suffix of held_ that begins a stop string.
  size_t HoldBackBytes() const;

  const std::unique_ptr<Detokenizer> detokenizer_;
  const TextStreamOptions options_;
  size_t longest_stop_bytes_ = 0;
  // Text that is not released, because a stop string may begin in it.
  std::string held_;
  uint64_t num_tokens_ = 0;
  bool stopped_ = false;
  std::string matched_stop_;
};

}  // namespace kvasir::router
