// Token ids to text as they arrive, one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "model/tokenizer/tokenizer.h"

namespace kvasir::model {

struct DetokenizerState;

// Turns a growing list of ids into text deltas.
//
// The deltas and Finish() concatenated are what Tokenizer::Decode gives for
// all ids; every delta is valid UTF-8. Bytes that may still become a character
// wait; they become U+FFFD only when it is certain that they will not.
// Pushing a token costs O(its length), amortized.
//
// Threads: one at a time. The tokenizer must outlive it.
class IncrementalDetokenizer {
 public:
  IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special);
  ~IncrementalDetokenizer();
  IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept;
  IncrementalDetokenizer& operator=(IncrementalDetokenizer&&) noexcept;

  // Call before the first Push: the text goes on after `context` (the prompt),
  // so that a first word keeps its space. Its own text is not repeated.
  void Prime(std::span<const int32_t> context);

  // The text that became certain with `id`, often one word, maybe nothing.
  std::string Push(int32_t id);

  // What was still waiting. Nothing may be pushed after it.
  std::string Finish();

  // Bytes that wait: not in any delta yet.
  size_t pending_bytes() const;

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::unique_ptr<DetokenizerState> state_;
};

}  // namespace kvasir::model
