#include "model/tokenizer/word_scanner.h"

#include <vector>

#include "model/tokenizer/utf8.h"

namespace kvasir::model {

constexpr std::string_view kGpt2 =
    R"re('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)re";
const std::string_view kGpt2Pattern = kGpt2;

namespace {

constexpr std::string_view kLlama3Pattern =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view kQwen2Pattern =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";

enum class Class : uint8_t { kLetter, kNumber, kNewline, kSpace, kOther };

Class Classify(char32_t c) {
  if (IsLetter(c)) return Class::kLetter;
  if (IsNumber(c)) return Class::kNumber;
  if (c == '\r' || c == '\n') return Class::kNewline;
  if (IsWhiteSpace(c)) return Class::kSpace;
  return Class::kOther;
}

// The table of character classes ends before this code point. It covers the
// first two planes of Unicode, which have nearly all characters of texts.
constexpr char32_t kTableEnd = 0x20000;

std::vector<Class> MakeTable() {
  std::vector<Class> table(kTableEnd);
  for (char32_t c = 0; c < kTableEnd; ++c) table[c] = Classify(c);
  return table;
}

struct ClassedChar {
  Class kind = Class::kOther;
  size_t size = 0;  // 0: end of the text
};

ClassedChar At(std::string_view text, size_t at) {
  static const std::vector<Class> table = MakeTable();
  if (at >= text.size()) return {};
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 128) return {table[lead], 1};
  const Utf8Char c = FirstChar(text.substr(at));
  return {c.value < kTableEnd ? table[c.value] : Classify(c.value), c.size};
}

bool Is(std::string_view text, size_t at, Class kind) {
  const ClassedChar c = At(text, at);
  return c.size > 0 && c.kind == kind;
}

size_t RunEnd(std::string_view text, size_t at, Class kind) {
  for (;;) {
    const ClassedChar c = At(text, at);
    if (c.size == 0 || c.kind != kind) return at;
    at += c.size;
  }
}

// A run of whitespace, including newlines. Its last character belongs to the
// next word, except if the run is a single character or ends the text.
struct SpaceRun {
  size_t end = 0;
  size_t last = 0;         // start of its last character
  size_t newline_end = 0;  // end of its last newline, or 0
};

SpaceRun ScanSpaces(std::string_view text, size_t begin) {
  SpaceRun run{.end = begin, .last = begin};
  for (;;) {
    const ClassedChar c = At(text, run.end);
    const bool newline = c.kind == Class::kNewline;
    if (c.size == 0 || (!newline && c.kind != Class::kSpace)) return run;
    run.last = run.end;
    run.end += c.size;
    if (newline) run.newline_end = run.end;
  }
}

size_t SpaceWordEnd(std::string_view text, size_t begin, const SpaceRun& run) {
  return run.end == text.size() || run.last == begin ? run.end : run.last;
}

char Lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace

std::optional<WordScanner> WordScanner::ForPattern(std::string_view pattern) {
  WordScanner scanner;
  if (pattern == kGpt2) return scanner;
  scanner.family_ = Family::kLlama3;
  scanner.max_digits_ = 3;
  if (pattern == kLlama3Pattern) return scanner;
  scanner.max_digits_ = 1;
  if (pattern == kQwen2Pattern) return scanner;
  return std::nullopt;
}

size_t WordScanner::ContractionEnd(std::string_view text, size_t begin) const {
  if (text[begin] != '\'' || begin + 1 >= text.size()) return begin;
  const bool any_case = family_ == Family::kLlama3;
  const auto letter = [&](size_t i) {
    const char c = i < text.size() ? text[i] : '\0';
    return any_case ? Lower(c) : c;
  };
  const char first = letter(begin + 1);
  const char second = letter(begin + 2);
  switch (first) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return begin + 2;
    case 'r':
    case 'v':
      return second == 'e' ? begin + 3 : begin;
    case 'l':
      return second == 'l' ? begin + 3 : begin;
    default:
      break;
  }
  // If case is ignored, U+017F (the long s) matches s.
  if (any_case && text.substr(begin + 1, 2) == "\xC5\xBF") return begin + 3;
  return begin;
}

size_t WordScanner::Gpt2End(std::string_view text, size_t begin) const {
  const ClassedChar first = At(text, begin);
  size_t at = begin;
  Class kind = first.kind;
  if (text[begin] == ' ') {
    const ClassedChar next = At(text, begin + 1);
    if (next.size > 0) {
      at = begin + 1;
      kind = next.kind;
    }
  }
  if (kind != Class::kSpace && kind != Class::kNewline) {
    return RunEnd(text, at, kind);
  }
  return SpaceWordEnd(text, begin, ScanSpaces(text, begin));
}

size_t WordScanner::Llama3End(std::string_view text, size_t begin) const {
  const ClassedChar first = At(text, begin);
  const size_t next = begin + first.size;
  if (first.kind == Class::kLetter) return RunEnd(text, next, Class::kLetter);
  if (first.kind == Class::kNumber) {
    size_t end = next;
    for (int digits = 1; digits < max_digits_; ++digits) {
      const ClassedChar c = At(text, end);
      if (c.size == 0 || c.kind != Class::kNumber) break;
      end += c.size;
    }
    return end;
  }
  if (first.kind != Class::kNewline && Is(text, next, Class::kLetter)) {
    return RunEnd(text, next, Class::kLetter);
  }
  const bool signs = first.kind == Class::kOther ||
                     (text[begin] == ' ' && Is(text, next, Class::kOther));
  if (signs) {
    const size_t end = RunEnd(text, next, Class::kOther);
    return RunEnd(text, end, Class::kNewline);
  }
  const SpaceRun run = ScanSpaces(text, begin);
  if (run.newline_end > 0) return run.newline_end;
  return SpaceWordEnd(text, begin, run);
}

size_t WordScanner::WordEnd(std::string_view text, size_t begin) const {
  const size_t contraction = ContractionEnd(text, begin);
  if (contraction > begin) return contraction;
  return family_ == Family::kGpt2 ? Gpt2End(text, begin)
                                  : Llama3End(text, begin);
}

void WordScanner::FindAll(std::string_view text,
                          std::vector<TextRange>* matches) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = WordEnd(text, begin);
    matches->push_back({begin, end});
    begin = end;
  }
}

}  // namespace kvasir::model
