// Reads UTF-8 character by character, also if the text arrives in parts.
// Converts bytes to and from the alphabet in which byte-level tokenizers
// write them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvasir::model {

// U+FFFD in UTF-8.
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

enum class Utf8Kind {
  kValid,
  kInvalid,     // `size` bytes form a maximal invalid subsequence
  kIncomplete,  // the whole input may be the start of a character
};

struct Utf8Char {
  char32_t value = 0;
  size_t size = 0;  // bytes, at least 1
  Utf8Kind kind = Utf8Kind::kInvalid;
};

// The character at the start of `text`, which must not be empty.
Utf8Char FirstChar(std::string_view text);

size_t NumChars(std::string_view text);

// Returns the beginning of the character that ends at `end`, which must not be
// 0. `text` must be valid UTF-8.
size_t PreviousCharBegin(std::string_view text, size_t end);

void AppendUtf8(char32_t value, std::string* out);

bool IsValidUtf8(std::string_view text);

// Replaces each maximal invalid subsequence by one U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

// The bytes of invalid UTF-8 that become one U+FFFD: a maximal invalid
// subsequence, or a single byte.
enum class InvalidUnit { kSubsequence, kByte };

// Moves text from the front of `pending` to `out` as valid UTF-8. The
// last bytes, at most three, stay in `pending` if they may be the
// start of a character.
void DrainUtf8(InvalidUnit unit, std::string* pending, std::string* out);
// Like DrainUtf8, but at the end of the input: no byte stays in `pending`.
void FinishUtf8(InvalidUnit unit, std::string* pending, std::string* out);

// The byte-level alphabet. Printable Latin-1 bytes stand for themselves; the
// other 68 bytes map to U+0100 and the following code points in order.
const std::array<char32_t, 256>& ByteAlphabet();
std::optional<uint8_t> ByteOfAlphabetChar(char32_t value);

// AppendByteLevel writes bytes in the byte-level alphabet, and
// BytesOfByteLevel reads them back. It returns nullopt if a character of
// `text` is not in the alphabet.
void AppendByteLevel(std::string_view bytes, std::string* out);
std::optional<std::string> BytesOfByteLevel(std::string_view text);

}  // namespace kvasir::model
