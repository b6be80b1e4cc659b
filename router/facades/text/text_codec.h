// Conversion between text and token ids for facades. A narrow interface, so
// that facades are tested without a tokenizer file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::router {

// Converts one sample's ids to text as they arrive. Every piece is valid UTF-8;
// bytes of an incomplete character wait.
// Threads: one at a time.
class Detokenizer {
 public:
  virtual ~Detokenizer() = default;
  // Returns the text that is certain after `id`; may be empty.
  virtual std::string Push(int32_t id) = 0;
  // Returns the text that was still waiting. The last call.
  virtual std::string Finish() = 0;
};

// Threads: any thread.
class TextCodec {
 public:
  virtual ~TextCodec() = default;

  // Returns a prompt's ids, with those that the model's template adds (bos).
  virtual absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text) const = 0;
  // Returns only the word's ids: nothing is added, and special tokens are
  // recognized.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const = 0;
  // For text that continues `prompt`. The codec must outlive it.
  virtual std::unique_ptr<Detokenizer> NewDetokenizer(
      std::span<const int32_t> prompt, bool skip_special) const = 0;
  // The text of a single token, for lists of log probabilities.
  virtual std::string TokenText(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
};

}  // namespace kvasir::router
