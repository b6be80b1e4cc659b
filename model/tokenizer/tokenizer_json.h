// Reading tokenizer.json without trusting it: every access checks the kind and
// every error says which file, which member and what was found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {

// Ids may have gaps (padding, tokens held in reserve), but a wild id must not
// size the tables: this many may stand for nothing.
inline constexpr size_t kMaxUnusedIds = size_t{1} << 16;

// Parses `text`. InvalidArgument where it is not JSON, nests deeper or holds
// more values than any tokenizer needs; `file_name` stands in errors.
absl::StatusOr<nlohmann::json> ParseUntrustedJson(std::string_view text,
                                                  const std::string& file_name);

// A value inside a parsed file together with the path that led to it. Copying
// is cheap; the parsed file must outlive it.
class JsonRef {
 public:
  JsonRef(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }

  // The member, or nothing where it is absent or null. InvalidArgument where
  // this is no object.
  absl::StatusOr<std::optional<JsonRef>> Find(const char* key) const;
  // The member; InvalidArgument where it is absent or null.
  absl::StatusOr<JsonRef> Get(const char* key) const;
  absl::StatusOr<std::vector<JsonRef>> Elements() const;

  absl::StatusOr<std::string> String() const;
  absl::StatusOr<int64_t> Int() const;

  absl::StatusOr<std::string> GetString(const char* key) const;
  absl::StatusOr<bool> GetBool(const char* key, bool fallback) const;
  absl::StatusOr<int64_t> GetInt(const char* key, int64_t fallback) const;
  // One character.
  absl::StatusOr<char32_t> GetChar(const char* key) const;

  // "path is VALUE, want ..." for values that cannot be right.
  absl::Status Invalid(std::string_view want) const;
  // The same for values that are right but that we do not have.
  absl::Status Unsupported(std::string_view have_only) const;

 private:
  std::string Describe() const;

  const nlohmann::json* value_;
  std::string path_;
};

// Calls `visit` for the component `ref`, or for each in turn where it is a
// "Sequence" holding them under `list_key`, sequences in sequences included.
// InvalidArgument above 64 components.
template <typename Visit>
absl::Status VisitComponents(const JsonRef& ref, const char* list_key,
                             Visit&& visit);

inline constexpr int kMaxComponents = 64;

namespace json_internal {

template <typename Visit>
absl::Status VisitCounted(const JsonRef& ref, const char* list_key, int* count,
                          Visit& visit) {
  absl::StatusOr<std::string> type = ref.GetString("type");
  if (!type.ok()) return type.status();
  if (++*count > kMaxComponents) return ref.Invalid("at most 64 components");
  if (*type != "Sequence") return visit(*type, ref);
  absl::StatusOr<JsonRef> list = ref.Get(list_key);
  if (!list.ok()) return list.status();
  absl::StatusOr<std::vector<JsonRef>> elements = list->Elements();
  if (!elements.ok()) return elements.status();
  for (const JsonRef& element : *elements) {
    absl::Status status = VisitCounted(element, list_key, count, visit);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace json_internal

template <typename Visit>
absl::Status VisitComponents(const JsonRef& ref, const char* list_key,
                             Visit&& visit) {
  int count = 0;
  return json_internal::VisitCounted(ref, list_key, &count, visit);
}

}  // namespace kvasir::model
