// Reads tokenizer.json as an untrusted file: every access checks the type, and
// every error names the file, the member and the value found.
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

// The largest number of unused ids below the largest id. Ids may have gaps
// (padding, reserved tokens), but a single huge id must not determine the size
// of the tables.
inline constexpr size_t kMaxUnusedIds = size_t{1} << 16;

// Parses `text`. INVALID_ARGUMENT if it is not JSON, or if it nests deeper or
// holds more values than any tokenizer needs. Errors name `file_name`.
absl::StatusOr<nlohmann::json> ParseUntrustedJson(std::string_view text,
                                                  const std::string& file_name);

// A value in a parsed file, with the path that leads to it. Copying is cheap;
// the parsed file must outlive it.
class JsonRef {
 public:
  JsonRef(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }

  // Returns the member, or nullopt if it is absent or null. INVALID_ARGUMENT if
  // this value is not an object.
  absl::StatusOr<std::optional<JsonRef>> Find(const char* key) const;
  // Returns the member. INVALID_ARGUMENT if it is absent or null.
  absl::StatusOr<JsonRef> Get(const char* key) const;
  absl::StatusOr<std::vector<JsonRef>> Elements() const;

  absl::StatusOr<std::string> String() const;
  absl::StatusOr<int64_t> Int() const;

  absl::StatusOr<std::string> GetString(const char* key) const;
  absl::StatusOr<bool> GetBool(const char* key, bool fallback) const;
  absl::StatusOr<int64_t> GetInt(const char* key, int64_t fallback) const;
  // The member must be a string of exactly one character.
  absl::StatusOr<char32_t> GetChar(const char* key) const;

  // The error "path is VALUE, want ..." for a wrong value.
  absl::Status Invalid(std::string_view want) const;
  // The error "path is VALUE, supported: ..." for a value that is valid but
  // not supported.
  absl::Status Unsupported(std::string_view have_only) const;

 private:
  std::string Describe() const;

  const nlohmann::json* value_;
  std::string path_;
};

// Calls `visit` for the component `ref`. If it is a "Sequence", calls it for
// each component under `list_key` in turn, including nested sequences.
// INVALID_ARGUMENT if there are more than 64 components.
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
