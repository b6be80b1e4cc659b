// UTF-8 one character at a time, whole or arriving in parts, and the alphabet
// that byte-level tokenizers write bytes in.
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
  kIncomplete,  // all of the input may be the start of a character
};

struct Utf8Char {
  char32_t value = 0;
  size_t size = 0;  // bytes, at least 1
  Utf8Kind kind = Utf8Kind::kInvalid;
};

// The character at the start of `text`, which must not be empty.
Utf8Char FirstChar(std::string_view text);

void AppendUtf8(char32_t value, std::string* out);

bool IsValidUtf8(std::string_view text);

// Each maximal invalid subsequence becomes one U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

// How many U+FFFD stand for an invalid subsequence.
enum class InvalidUnit { kSubsequence, kByte };

// Moves what is certain from the front of `pending` to `out` as valid UTF-8;
// at most three bytes stay, which may still become a character.
void DrainUtf8(InvalidUnit unit, std::string* pending, std::string* out);
// The same for the end of the input: nothing stays.
void FinishUtf8(InvalidUnit unit, std::string* pending, std::string* out);

// The byte-level alphabet: printable Latin-1 bytes stand for themselves, the
// other 68 for U+0100 upwards in order.
const std::array<char32_t, 256>& ByteAlphabet();
std::optional<uint8_t> ByteOfAlphabetChar(char32_t value);

// Bytes written in the alphabet, and back (nothing if a character of `text`
// is not in it).
void AppendByteLevel(std::string_view bytes, std::string* out);
std::optional<std::string> BytesOfByteLevel(std::string_view text);

}  // namespace kvasir::model
