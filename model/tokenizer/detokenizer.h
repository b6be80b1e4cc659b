// Turns token ids into text one by one, as they arrive.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "model/tokenizer/tokenizer.h"

namespace kvasir::model {

struct DetokenizerState;

// Turns a growing list of ids into text deltas. All deltas followed by
// Finish() equal Tokenizer::Decode of all ids, and every delta is valid
// UTF-8. Bytes are held back as long as they may still become a character.
// If they cannot become one, they become U+FFFD. Push takes time linear in
// the token's length, amortized.
// Threads: used by one thread at a time. The tokenizer must outlive it.
class IncrementalDetokenizer {
 public:
  IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special);
  ~IncrementalDetokenizer();
  IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept;
  IncrementalDetokenizer& operator=(IncrementalDetokenizer&&) noexcept;

  // Makes the text continue after `context` (the prompt), so that its first
  // word keeps its leading space. Call it before the first Push. The text of
  // the context is not returned.
  void Prime(std::span<const int32_t> context);

  // Adds `id` and returns the text that can no longer change: often one word,
  // sometimes nothing.
  std::string Push(int32_t id);

  // Returns the text that was held back. Push must not be called afterwards.
  std::string Finish();

  // The number of bytes that are held back and were not returned yet.
  size_t pending_bytes() const;

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::unique_ptr<DetokenizerState> state_;
};

}  // namespace kvasir::model
