// Cuts text into words like the common pre-tokenizer patterns, without a
// regular expression engine.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "model/tokenizer/unicode.h"

namespace kvasir::model {

// Splits text by the patterns of GPT-2, Llama 3 and Qwen 2, which differ
// little. A pattern is recognised by its exact text. Instead of a regular
// expression, a few rules on character classes are applied. All other patterns
// use Regex. A test checks that both give the same words.
class WordScanner {
 public:
  // Returns nullopt if the pattern is not one of the known ones.
  static std::optional<WordScanner> ForPattern(std::string_view pattern);

  // Appends the words from left to right. Together they cover all of `text`,
  // which must be valid UTF-8.
  void FindAll(std::string_view text, std::vector<TextRange>* matches) const;

 private:
  enum class Family {
    kGpt2,  // a word of letters, digits or punctuation may begin with one space
    // A word of letters may begin with one space or punctuation mark. Newlines
    // end runs of punctuation and runs of spaces.
    kLlama3,
  };

  size_t WordEnd(std::string_view text, size_t begin) const;
  size_t Gpt2End(std::string_view text, size_t begin) const;
  size_t Llama3End(std::string_view text, size_t begin) const;
  size_t ContractionEnd(std::string_view text, size_t begin) const;

  Family family_ = Family::kGpt2;
  int max_digits_ = 0;  // only for kLlama3
};

// The pattern by which the ByteLevel pre-tokenizer splits.
extern const std::string_view kGpt2Pattern;

}  // namespace kvasir::model
