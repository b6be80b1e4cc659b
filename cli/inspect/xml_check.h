// Test support: whether a text is well-formed, as far as our pages go.
#pragma once

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvasir::cli {

// What is wrong with it, or nothing: tags nest and are closed, attributes are
// quoted, every '&' begins an entity. A <!DOCTYPE> may stand in front.
inline std::string XmlError(std::string_view text) {
  std::vector<std::string> open;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '&') {
      const size_t end = text.find(';', i);
      if (end == text.npos || end - i > 7) return absl::StrCat("bare & at ", i);
    }
    if (text[i] == '>') return absl::StrCat("bare > at ", i);
    if (text[i] != '<') continue;
    size_t end = i + 1;
    char quote = 0;
    for (; end < text.size() && (quote != 0 || text[end] != '>'); ++end) {
      if (text[end] == '<') return absl::StrCat("< inside of a tag at ", end);
      if (quote != 0) {
        if (text[end] == quote) quote = 0;
      } else if (text[end] == '"') {
        if (text[end - 1] != '=') return absl::StrCat("quote at ", end);
        quote = '"';
      } else if (text[end] == '=' && text[end + 1] != '"') {
        return absl::StrCat("attribute without quotes at ", end);
      }
    }
    if (end == text.size()) return absl::StrCat("tag without end at ", i);
    const std::string_view tag = text.substr(i + 1, end - i - 1);
    size_t length = 0;
    const size_t begin = tag.starts_with('/') ? 1 : 0;
    while (begin + length < tag.size() &&
           std::isalnum(static_cast<unsigned char>(tag[begin + length])) != 0) {
      ++length;
    }
    const std::string name(tag.substr(begin, length));
    if (begin == 1) {
      if (open.empty() || open.back() != name) {
        return absl::StrCat("</", name, "> at ", i, " closes ",
                            open.empty() ? "nothing" : open.back());
      }
      open.pop_back();
    } else if (!tag.ends_with('/') && !tag.starts_with('!')) {
      open.push_back(name);
    }
    i = end;
  }
  return open.empty() ? "" : absl::StrCat("<", open.back(), "> stays open");
}

}  // namespace kvasir::cli
