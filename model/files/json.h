// Reads JSON from untrusted files with nlohmann's parser, without exceptions.
// Duplicate keys and deep nesting are refused. An error about a field names its
// place, the wanted value and the found value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {

struct JsonLimits {
  int max_depth = 32;
  // The number of values is limited, because each value takes about a hundred
  // bytes in the parsed tree, however short its text is.
  int64_t max_values = 1'000'000;
};

// Checks the nesting depth and the number of values before a parser builds a
// tree. It looks only at the punctuation, in one pass that allocates no memory.
// Returns INVALID_ARGUMENT if a limit is exceeded; the error names the limit
// and the place.
absl::Status CheckJsonShape(std::string_view text, std::string_view where,
                            const JsonLimits& limits);

// `where` names the text in errors. Returns INVALID_ARGUMENT if the text is not
// JSON, exceeds a limit, or has the same key twice in one object.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text,
                                         std::string_view where,
                                         const JsonLimits& limits = {});

// Reads the fields of one JSON object. Getters return nullopt for a field that
// is missing or null, and INVALID_ARGUMENT for a field of another type.
class JsonFields {
 public:
  // `object` must outlive this. If it is not a JSON object, every field counts
  // as missing.
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  // nullptr if the field is missing or null.
  const nlohmann::json* Find(std::string_view name) const;
  // True if the field is present and null.
  bool IsNull(std::string_view name) const;

  absl::StatusOr<std::optional<int64_t>> Int(std::string_view name) const;
  // Accepts integers as well; refuses numbers that are not finite.
  absl::StatusOr<std::optional<double>> Number(std::string_view name) const;
  absl::StatusOr<std::optional<bool>> Bool(std::string_view name) const;
  absl::StatusOr<std::optional<std::string>> String(
      std::string_view name) const;

  // Like Int and Number, but a value outside [low, high] is an error. If
  // the field is missing, they return `fallback`, or an error if there is
  // no fallback.
  absl::StatusOr<int64_t> IntIn(std::string_view name, int64_t low,
                                int64_t high,
                                std::optional<int64_t> fallback = {}) const;
  absl::StatusOr<double> NumberIn(std::string_view name, double low,
                                  double high,
                                  std::optional<double> fallback = {}) const;
  // Like IntIn and NumberIn, but they return nullopt if the field is missing.
  absl::StatusOr<std::optional<int64_t>> IntWithin(std::string_view name,
                                                   int64_t low,
                                                   int64_t high) const;
  absl::StatusOr<std::optional<double>> NumberWithin(std::string_view name,
                                                     double low,
                                                     double high) const;
  absl::StatusOr<bool> BoolOr(std::string_view name, bool fallback) const;

  // Returns INVALID_ARGUMENT, for example "config.json: hidden_size: want ...,
  // have ...".
  absl::Status Error(std::string_view name, std::string_view what) const;
  // Like Error, but returns UNIMPLEMENTED: the value has a meaning that is
  // not supported.
  absl::Status Unserved(std::string_view name, std::string_view what) const;

 private:
  absl::Status TypeError(std::string_view name, std::string_view want,
                         const nlohmann::json& have) const;

  const nlohmann::json& object_;
  std::string where_;
};

// Returns the JSON text of a value, shortened for error messages.
std::string JsonExcerpt(const nlohmann::json& value);

}  // namespace kvasir::model
