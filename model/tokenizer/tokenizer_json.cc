#include "model/tokenizer/tokenizer_json.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/files/json.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using base::AbslView;

constexpr int kMaxDepth = 64;
// The largest number of JSON values in a file. A file with 262,144 tokens whose
// merges are pairs has 1.8 million.
constexpr int64_t kMaxValues = 8'000'000;
constexpr size_t kMaxElementsOfSmallList = 1 << 20;

}  // namespace

absl::StatusOr<nlohmann::json> ParseUntrustedJson(
    std::string_view text, const std::string& file_name) {
  KVASIR_RETURN_IF_ERROR(CheckJsonShape(
      text, file_name, {.max_depth = kMaxDepth, .max_values = kMaxValues}));
  try {
    return nlohmann::json::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": ",
                     AbslView(std::string_view(error.what()).substr(0, 300))));
  }
}

std::string JsonRef::Describe() const {
  if (value_->is_object() || value_->is_array()) {
    return absl::StrCat("an ", value_->type_name(), " of ", value_->size());
  }
  std::string text =
      value_->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  constexpr size_t kMaxShown = 80;
  if (text.size() > kMaxShown) {
    text = absl::StrCat(text.substr(0, kMaxShown), "...");
  }
  return text;
}

absl::Status JsonRef::Invalid(std::string_view want) const {
  return absl::InvalidArgumentError(
      absl::StrCat(path_, " is ", Describe(), ", want ", AbslView(want)));
}

absl::Status JsonRef::Unsupported(std::string_view have_only) const {
  return absl::UnimplementedError(absl::StrCat(
      path_, " is ", Describe(), ", supported: ", AbslView(have_only)));
}

absl::StatusOr<std::optional<JsonRef>> JsonRef::Find(const char* key) const {
  if (!value_->is_object()) return Invalid("an object");
  const auto it = value_->find(key);
  if (it == value_->end() || it->is_null()) return std::optional<JsonRef>();
  return std::optional<JsonRef>(JsonRef(*it, absl::StrCat(path_, ".", key)));
}

absl::StatusOr<JsonRef> JsonRef::Get(const char* key) const {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<JsonRef> found, Find(key));
  if (!found) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ".", key, " is missing"));
  }
  return *found;
}

absl::StatusOr<std::vector<JsonRef>> JsonRef::Elements() const {
  if (!value_->is_array() || value_->size() > kMaxElementsOfSmallList) {
    return Invalid(absl::StrCat("an array of at most ", kMaxElementsOfSmallList,
                                " elements"));
  }
  std::vector<JsonRef> elements;
  elements.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) {
    elements.emplace_back((*value_)[i], absl::StrCat(path_, "[", i, "]"));
  }
  return elements;
}

absl::StatusOr<std::string> JsonRef::String() const {
  if (!value_->is_string()) return Invalid("a string");
  return value_->get_ref<const std::string&>();
}

absl::StatusOr<int64_t> JsonRef::Int() const {
  if (value_->is_number_unsigned() &&
      value_->get<uint64_t>() > uint64_t{INT64_MAX}) {
    return Invalid("an integer below 2^63");
  }
  if (!value_->is_number_integer()) return Invalid("an integer");
  return value_->get<int64_t>();
}

absl::StatusOr<std::string> JsonRef::GetString(const char* key) const {
  KVASIR_ASSIGN_OR_RETURN(const JsonRef member, Get(key));
  return member.String();
}

absl::StatusOr<bool> JsonRef::GetBool(const char* key, bool fallback) const {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<JsonRef> member, Find(key));
  if (!member) return fallback;
  if (!member->value().is_boolean()) return member->Invalid("true or false");
  return member->value().get<bool>();
}

absl::StatusOr<int64_t> JsonRef::GetInt(const char* key,
                                        int64_t fallback) const {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<JsonRef> member, Find(key));
  if (!member) return fallback;
  return member->Int();
}

absl::StatusOr<char32_t> JsonRef::GetChar(const char* key) const {
  KVASIR_ASSIGN_OR_RETURN(const JsonRef member, Get(key));
  KVASIR_ASSIGN_OR_RETURN(const std::string text, member.String());
  if (text.empty()) return member.Invalid("one character");
  const Utf8Char c = FirstChar(text);
  if (c.kind != Utf8Kind::kValid || c.size != text.size()) {
    return member.Invalid("one character");
  }
  return c.value;
}

}  // namespace kvasir::model
