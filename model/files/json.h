// JSON from files we do not trust: nlohmann's parser behind a boundary that
// throws nothing and refuses duplicate keys and deep nesting. Typed field
// access with errors that name the place, what is wanted and what is there.
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
  // A value of the tree takes about a hundred bytes, whatever the text takes.
  int64_t max_values = 1'000'000;
};

// Depth and number of values from the punctuation alone, in one pass that
// allocates nothing: a parser then builds a tree of known size.
// INVALID_ARGUMENT names the limit and the place.
absl::Status CheckJsonShape(std::string_view text, std::string_view where,
                            const JsonLimits& limits);

// `where` names the text in errors. INVALID_ARGUMENT for text that is no JSON,
// nests deeper or has more values than the limits allow, or has a key twice in
// one object.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text,
                                         std::string_view where,
                                         const JsonLimits& limits = {});

// The fields of one object. A missing or null field gives nullopt; a field of
// another type INVALID_ARGUMENT.
class JsonFields {
 public:
  // `object` must outlive this; INVALID_ARGUMENT from every getter when it is
  // no object.
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  // nullptr when missing or null.
  const nlohmann::json* Find(std::string_view name) const;
  // There, and null.
  bool IsNull(std::string_view name) const;

  absl::StatusOr<std::optional<int64_t>> Int(std::string_view name) const;
  // Takes integers too; refuses what is not finite.
  absl::StatusOr<std::optional<double>> Number(std::string_view name) const;
  absl::StatusOr<std::optional<bool>> Bool(std::string_view name) const;
  absl::StatusOr<std::optional<std::string>> String(
      std::string_view name) const;

  // As Int and Number, with inclusive limits. Missing: `fallback`, or an error
  // that says so when there is none.
  absl::StatusOr<int64_t> IntIn(std::string_view name, int64_t low,
                                int64_t high,
                                std::optional<int64_t> fallback = {}) const;
  absl::StatusOr<double> NumberIn(std::string_view name, double low,
                                  double high,
                                  std::optional<double> fallback = {}) const;
  // As Int and Number, within the limits where it is there.
  absl::StatusOr<std::optional<int64_t>> IntWithin(std::string_view name,
                                                   int64_t low,
                                                   int64_t high) const;
  absl::StatusOr<std::optional<double>> NumberWithin(std::string_view name,
                                                     double low,
                                                     double high) const;
  absl::StatusOr<bool> BoolOr(std::string_view name, bool fallback) const;

  // "config.json: hidden_size: want ..., have ..."
  absl::Status Error(std::string_view name, std::string_view what) const;
  // The same as UNIMPLEMENTED: it has a meaning, and nobody serves it.
  absl::Status Unserved(std::string_view name, std::string_view what) const;

 private:
  absl::Status TypeError(std::string_view name, std::string_view want,
                         const nlohmann::json& have) const;

  const nlohmann::json& object_;
  std::string where_;
};

// Short text of a value for error messages.
std::string JsonExcerpt(const nlohmann::json& value);

}  // namespace kvasir::model
