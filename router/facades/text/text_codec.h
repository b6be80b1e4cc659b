// The interface by which facades convert between text and token ids. Tests of
// facades have an implementation without a tokenizer file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::router {

// Converts the ids of one sample to text as they arrive. Every returned piece
// of text is valid UTF-8: the bytes of an incomplete character are held back
// until the rest has come.
// Threads: only one thread at a time may use it.
class Detokenizer {
 public:
  virtual ~Detokenizer() = default;
  // Adds `id`. Returns the new text, which later ids cannot change. It may
  // be empty.
  virtual std::string Push(int32_t id) = 0;
  // Returns the text that is still held back. Push must not be called
  // after this.
  virtual std::string Finish() = 0;
};

// Converts between text and token ids.
// Threads: its methods may be called from any thread.
class TextCodec {
 public:
  virtual ~TextCodec() = default;

  // Returns the ids of a prompt, including those that the tokenizer adds (for
  // example the begin-of-sequence token). Returns OUT_OF_RANGE if the text has
  // more than `max_ids`.
  virtual absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text, size_t max_ids) const = 0;
  // Returns the ids of a word, without those that the tokenizer adds to
  // prompts. The text of a special token becomes the id of this token.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const = 0;
  // Returns a detokenizer for output that continues `prompt`. The codec must
  // outlive it.
  virtual std::unique_ptr<Detokenizer> NewDetokenizer(
      std::span<const int32_t> prompt, bool skip_special) const = 0;
  // Returns the text of a single token, for lists of log probabilities.
  virtual std::string TokenText(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
};

}  // namespace kvasir::router
