#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

uint8_t ByteAt(std::string_view text, size_t i) {
  return static_cast<uint8_t>(text[i]);
}

struct LeadByte {
  size_t size = 0;  // 0: no character starts with this byte
  char32_t bits = 0;
  // The range of the second byte. After some first bytes it is narrower than
  // 80..BF, to exclude overlong forms, surrogates and values above U+10FFFF.
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
};

LeadByte DescribeLead(uint8_t b) {
  if (b < 0x80) return {.size = 1, .bits = b};
  if (b < 0xC2) return {};
  if (b < 0xE0) return {.size = 2, .bits = b & 0x1Fu};
  if (b < 0xF0) {
    LeadByte lead{.size = 3, .bits = b & 0x0Fu};
    if (b == 0xE0) lead.low = 0xA0;
    if (b == 0xED) lead.high = 0x9F;
    return lead;
  }
  if (b < 0xF5) {
    LeadByte lead{.size = 4, .bits = b & 0x07u};
    if (b == 0xF0) lead.low = 0x90;
    if (b == 0xF4) lead.high = 0x8F;
    return lead;
  }
  return {};
}

std::array<char32_t, 256> MakeByteAlphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable =
        (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE);
    alphabet[b] = printable ? char32_t{b} : next++;
  }
  return alphabet;
}

// One more than U+0143, the last character of the byte-level alphabet.
constexpr char32_t kAlphabetEnd = 0x144;

std::array<int16_t, kAlphabetEnd> MakeByteOfChar() {
  std::array<int16_t, kAlphabetEnd> bytes{};
  bytes.fill(-1);
  const auto& alphabet = ByteAlphabet();
  for (size_t b = 0; b < 256; ++b) {
    bytes[alphabet[b]] = static_cast<int16_t>(b);
  }
  return bytes;
}

void AppendReplacements(InvalidUnit unit, size_t num_bytes, std::string* out) {
  const size_t count = unit == InvalidUnit::kByte ? num_bytes : 1;
  for (size_t i = 0; i < count; ++i) out->append(kReplacement);
}

}  // namespace

Utf8Char FirstChar(std::string_view text) {
  const LeadByte lead = DescribeLead(ByteAt(text, 0));
  if (lead.size == 0) return {.value = 0xFFFD, .size = 1};
  Utf8Char c{.value = lead.bits, .size = 1};
  for (size_t i = 1; i < lead.size; ++i) {
    if (i == text.size()) {
      c.kind = Utf8Kind::kIncomplete;
      c.value = 0xFFFD;
      return c;
    }
    const uint8_t b = ByteAt(text, i);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xBF;
    if (b < low || b > high) {
      c.value = 0xFFFD;
      return c;
    }
    c.value = (c.value << 6) | (b & 0x3Fu);
    ++c.size;
  }
  c.kind = Utf8Kind::kValid;
  return c;
}

size_t NumChars(std::string_view text) {
  size_t count = 0;
  for (; !text.empty(); ++count) text.remove_prefix(FirstChar(text).size);
  return count;
}

size_t PreviousCharBegin(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (ByteAt(text, begin) & 0xC0) == 0x80) --begin;
  return begin;
}

void AppendUtf8(char32_t value, std::string* out) {
  const auto put = [out](char32_t byte) {
    out->push_back(static_cast<char>(static_cast<uint8_t>(byte)));
  };
  if (value < 0x80) {
    put(value);
  } else if (value < 0x800) {
    put(0xC0 | (value >> 6));
    put(0x80 | (value & 0x3F));
  } else if (value < 0x10000) {
    put(0xE0 | (value >> 12));
    put(0x80 | ((value >> 6) & 0x3F));
    put(0x80 | (value & 0x3F));
  } else {
    put(0xF0 | (value >> 18));
    put(0x80 | ((value >> 12) & 0x3F));
    put(0x80 | ((value >> 6) & 0x3F));
    put(0x80 | (value & 0x3F));
  }
}

bool IsValidUtf8(std::string_view text) {
  while (!text.empty()) {
    if (ByteAt(text, 0) < 0x80) {
      text.remove_prefix(1);
      continue;
    }
    const Utf8Char c = FirstChar(text);
    if (c.kind != Utf8Kind::kValid) return false;
    text.remove_prefix(c.size);
  }
  return true;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 16);
  while (!text.empty()) {
    const Utf8Char c = FirstChar(text);
    if (c.kind == Utf8Kind::kValid) {
      out.append(text.substr(0, c.size));
    } else {
      out.append(kReplacement);
    }
    text.remove_prefix(c.size);
  }
  return out;
}

void DrainUtf8(InvalidUnit unit, std::string* pending, std::string* out) {
  std::string_view rest = *pending;
  while (!rest.empty()) {
    const Utf8Char c = FirstChar(rest);
    if (c.kind == Utf8Kind::kIncomplete) break;
    if (c.kind == Utf8Kind::kValid) {
      out->append(rest.substr(0, c.size));
    } else {
      AppendReplacements(unit, c.size, out);
    }
    rest.remove_prefix(c.size);
  }
  pending->erase(0, pending->size() - rest.size());
}

void FinishUtf8(InvalidUnit unit, std::string* pending, std::string* out) {
  DrainUtf8(unit, pending, out);
  if (!pending->empty()) AppendReplacements(unit, pending->size(), out);
  pending->clear();
}

const std::array<char32_t, 256>& ByteAlphabet() {
  static const std::array<char32_t, 256> alphabet = MakeByteAlphabet();
  return alphabet;
}

std::optional<uint8_t> ByteOfAlphabetChar(char32_t value) {
  static const std::array<int16_t, kAlphabetEnd> bytes = MakeByteOfChar();
  if (value >= bytes.size() || bytes[value] < 0) return std::nullopt;
  return static_cast<uint8_t>(bytes[value]);
}

void AppendByteLevel(std::string_view bytes, std::string* out) {
  const auto& alphabet = ByteAlphabet();
  for (const char b : bytes) {
    AppendUtf8(alphabet[static_cast<uint8_t>(b)], out);
  }
}

std::optional<std::string> BytesOfByteLevel(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Char c = FirstChar(text);
    const auto byte = ByteOfAlphabetChar(c.value);
    if (c.kind != Utf8Kind::kValid || !byte) return std::nullopt;
    out.push_back(static_cast<char>(*byte));
    text.remove_prefix(c.size);
  }
  return out;
}

}  // namespace kvasir::model
