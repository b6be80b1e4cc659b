#include "model/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

// The most bytes of an added token. This bounds the time of the search at each
// character of a text.
constexpr size_t kMaxContentBytes = 1024;
constexpr size_t kMaxTrieBytes = size_t{8} << 20;

bool WordEndsAt(std::string_view text, size_t end) {
  if (end == 0) return false;
  return IsWordChar(FirstChar(text.substr(PreviousCharBegin(text, end))).value);
}

bool WordStartsAt(std::string_view text, size_t begin) {
  return begin < text.size() && IsWordChar(FirstChar(text.substr(begin)).value);
}

}  // namespace

void TokenTrie::Add(std::string_view content, int32_t index) {
  if (content.empty()) return;
  uint64_t node = 0;
  for (const char c : content) {
    const uint64_t key = (node << 8) | static_cast<uint8_t>(c);
    const auto [it, added] = children_.try_emplace(
        key, static_cast<uint32_t>(index_of_node_.size()));
    if (added) index_of_node_.push_back(-1);
    node = it->second;
  }
  if (index_of_node_[node] < 0) index_of_node_[node] = index;
  starts_[static_cast<uint8_t>(content[0])] = true;
}

int32_t TokenTrie::LongestAt(std::string_view text, size_t at,
                             size_t* size) const {
  int32_t found = -1;
  if (!starts_[static_cast<uint8_t>(text[at])]) return found;
  uint64_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto it = children_.find((node << 8) | static_cast<uint8_t>(text[i]));
    if (it == children_.end()) break;
    node = it->second;
    if (index_of_node_[node] >= 0) {
      found = index_of_node_[node];
      *size = i + 1 - at;
    }
  }
  return found;
}

absl::StatusOr<AddedToken> AddedTokens::ReadToken(const JsonRef& entry,
                                                  bool special) {
  AddedToken token;
  const bool is_text = entry.value().is_string();
  KVASIR_ASSIGN_OR_RETURN(
      token.content, is_text ? entry.String() : entry.GetString("content"));
  if (token.content.empty() || token.content.size() > kMaxContentBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        entry.path(), is_text ? "" : ".content", " has ", token.content.size(),
        " bytes, but must have 1 to ", kMaxContentBytes));
  }
  if (is_text) {
    token.special = special;
    token.normalized = !special;
    return token;
  }
  KVASIR_ASSIGN_OR_RETURN(token.special, entry.GetBool("special", false));
  token.special = token.special || special;
  KVASIR_ASSIGN_OR_RETURN(token.normalized,
                          entry.GetBool("normalized", !token.special));
  KVASIR_ASSIGN_OR_RETURN(token.single_word,
                          entry.GetBool("single_word", false));
  KVASIR_ASSIGN_OR_RETURN(token.left_strip, entry.GetBool("lstrip", false));
  KVASIR_ASSIGN_OR_RETURN(token.right_strip, entry.GetBool("rstrip", false));
  return token;
}

absl::StatusOr<std::vector<AddedToken>> AddedTokens::ReadList(
    const JsonRef& ref) {
  std::vector<AddedToken> tokens;
  KVASIR_ASSIGN_OR_RETURN(const std::vector<JsonRef> entries, ref.Elements());
  if (entries.size() > kMaxTokens) {
    return ref.Invalid(absl::StrCat("at most ", kMaxTokens, " tokens"));
  }
  for (const JsonRef& entry : entries) {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef id, entry.Get("id"));
    KVASIR_ASSIGN_OR_RETURN(const int64_t value, id.Int());
    if (value < 0 || value > INT32_MAX) {
      return id.Invalid("an id from 0 to 2^31 - 1");
    }
    KVASIR_ASSIGN_OR_RETURN(const std::string content,
                            entry.GetString("content"));
    if (content.empty()) continue;
    KVASIR_ASSIGN_OR_RETURN(AddedToken token, ReadToken(entry, false));
    token.id = static_cast<int32_t>(value);
    tokens.push_back(std::move(token));
  }
  return tokens;
}

absl::StatusOr<AddedTokens> AddedTokens::Build(
    std::vector<AddedToken> tokens, const TextNormalizer& normalizer) {
  AddedTokens added;
  added.tokens_ = std::move(tokens);
  size_t total_bytes = 0;
  const size_t count = added.tokens_.size();
  // TokenTrie uses the first of several equal texts. If the normalizer makes
  // the texts of tokens equal, this must be the first special token, or else
  // the first token. So special tokens are added first.
  for (size_t at = 0; at < 2 * count; ++at) {
    const size_t i = at % count;
    const AddedToken& token = added.tokens_[i];
    if (token.special != (at < count)) continue;
    const auto index = static_cast<int32_t>(i);
    std::string content = token.content;
    if (token.also_raw) added.raw_.Add(content, index);
    if (token.normalized) {
      TextBudget budget(content.size());
      KVASIR_ASSIGN_OR_RETURN(NormalizedText result,
                              normalizer.Apply(content, &budget));
      content = std::move(result.text);
      if (content.empty()) {
        return absl::UnimplementedError(absl::StrCat(
            "added_tokens[", i, "] has the id ", token.id,
            " and becomes empty in the normalizer; the reference then splits "
            "every text into characters, which is not supported; set its "
            "normalized to false"));
      }
    }
    total_bytes += content.size();
    if (total_bytes > kMaxTrieBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "added_tokens[", i,
          "]: the added tokens up to this one together take more than "
          "the limit of ",
          kMaxTrieBytes, " bytes"));
    }
    (token.normalized ? added.normalized_ : added.raw_).Add(content, index);
  }
  return added;
}

void AddedTokens::Split(bool normalized, bool parse_special,
                        std::string_view text,
                        std::vector<TextSegment>* segments) const {
  const TokenTrie& trie = normalized ? normalized_ : raw_;
  segments->clear();
  size_t done = 0;
  size_t space_end = 0;  // end of the last whitespace that was scanned
  // A token with left_strip or right_strip also takes the whitespace next to
  // it. The search continues directly after the token's own text, so the next
  // match may lie in whitespace that this token has taken. Such a match is
  // still used, and the text after it begins where the match ends. If the match
  // strips whitespace to its left, it begins no earlier than the end of the
  // taken whitespace. It may then be empty, and an empty match gives no id.
  size_t at = trie.empty() ? text.size() : 0;
  while (at < text.size()) {
    size_t size = 0;
    const int32_t index = trie.LongestAt(text, at, &size);
    if (index < 0) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + size;
    at = end;
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    if (token.special && !parse_special) continue;
    if (token.single_word &&
        (WordEndsAt(text, begin) || WordStartsAt(text, end))) {
      continue;
    }
    if (token.left_strip) begin = SpaceBegin(text, begin, done);
    if (token.right_strip) {
      // No whitespace is scanned twice. Otherwise a long run of spaces would
      // take quadratic time if a space were a token with right_strip.
      if (end > space_end) space_end = SpaceEnd(text, end);
      end = space_end;
    }
    if (done < begin) segments->push_back({-1, done, begin});
    if (begin < end) segments->push_back({token.id, begin, end});
    done = end;
  }
  if (done < text.size()) segments->push_back({-1, done, text.size()});
}

}  // namespace kvasir::model
