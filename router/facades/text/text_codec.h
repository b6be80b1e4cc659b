// Text to token ids and back, as facades need it: narrow, so that their logic
// can be tested without a tokenizer file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::router {

// Ids of one sample to text, as they come. Every piece is valid UTF-8; bytes
// that may still become a character wait.
// Threads: one at a time.
class Detokenizer {
 public:
  virtual ~Detokenizer() = default;
  // The text that became certain with `id`; may be empty.
  virtual std::string Push(int32_t id) = 0;
  // What was still waiting. Last call.
  virtual std::string Finish() = 0;
};

// Threads: any thread.
class TextCodec {
 public:
  virtual ~TextCodec() = default;

  // A prompt's ids, with what the model's template adds (bos).
  virtual absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text) const = 0;
  // A word's ids alone: nothing added, special tokens recognized.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const = 0;
  // For text that goes on after `prompt`. The codec outlives it.
  virtual std::unique_ptr<Detokenizer> NewDetokenizer(
      std::span<const int32_t> prompt, bool skip_special) const = 0;
  // One token alone, for lists of log probabilities.
  virtual std::string TokenText(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
};

}  // namespace kvasir::router
